use clap::CommandFactory as _;

use super::file::file_arguments;
use super::*;

fn load(arguments: &[&str]) -> Result<Config, ConfigError> {
    Config::load(
        std::iter::once("mooncake_master")
            .chain(arguments.iter().copied())
            .map(OsString::from),
    )
}

fn refused(arguments: &[&str]) -> String {
    load(arguments).unwrap_err().to_string()
}

const THREE: &str = "1=127.0.0.1:50051/127.0.0.1:9003,2=[::1]:50061/h2:9013,3=h3:50071/h3:9023";

#[test]
fn clap_agrees_with_itself() {
    Flags::command().debug_assert();
}

#[test]
fn defaults_listen_on_loopback() {
    let config = load(&[]).unwrap();
    assert_eq!(config.rpc.to_string(), "127.0.0.1:50051");
    assert_eq!(config.http.to_string(), "127.0.0.1:9003");
    assert_eq!((config.node_id, config.bootstrap), (1, false));
    assert_eq!(config.limits, Limits::default());
}

#[test]
fn underscores_and_mooncakes_names_are_taken() {
    let config = load(&[
        "--rpc_port",
        "7",
        "--metrics_port=8",
        "--cluster_id",
        "a_b",
        "--rpc_address",
        "0.0.0.0",
        "--node_grace_s=4",
        "--require_checksums",
        "--digest_algorithm",
        "sha256",
    ])
    .unwrap();
    assert_eq!(config.rpc.to_string(), "0.0.0.0:7");
    assert_eq!(config.http.port, 8);
    assert_eq!(config.cluster_id, "a_b", "only names are changed");
    assert_eq!(config.node_grace, Duration::from_secs(4));
    assert!(config.require_checksums);
    assert_eq!(config.digest_algorithm, Algorithm::Sha256);
}

#[test]
fn listen_addresses() {
    for (text, host, port) in [
        ("127.0.0.1", "127.0.0.1", None),
        ("127.0.0.1:0", "127.0.0.1", Some(0)),
        ("::1", "::1", None),
        ("[::1]", "::1", None),
        ("[::1]:50051", "::1", Some(50051)),
        ("node-1.rack_2:9", "node-1.rack_2", Some(9)),
    ] {
        assert_eq!(
            text.parse(),
            Ok(ListenAddress {
                host: host.into(),
                port
            }),
            "{text}"
        );
    }
    for text in ["", ":1", "h:65536", "a:b:1", "[::g]:1", "http://h:1"] {
        assert!(text.parse::<ListenAddress>().is_err(), "{text}");
    }
    assert_eq!(
        Listen {
            host: "::1".into(),
            port: 5
        }
        .to_string(),
        "[::1]:5"
    );
    assert_eq!(
        load(&["--rpc-address", "[::1]:5", "--rpc-port", "6"])
            .unwrap()
            .rpc
            .to_string(),
        "[::1]:6"
    );
}

#[test]
fn initial_cluster() {
    let cluster: InitialCluster = THREE.parse().unwrap();
    assert_eq!(cluster.0.len(), 3);
    assert_eq!(
        cluster.0[&2],
        MemberAddress {
            rpc: "[::1]:50061".into(),
            http: "h2:9013".into()
        }
    );
    assert_eq!(cluster.to_string(), THREE);
    for (text, why) in [
        ("", "no master"),
        ("1=h:1", "is not ID="),
        ("0=h:1/h:2", "not a master id"),
        ("1=h:1/h:2,1=h:3/h:4", "twice"),
        ("1=h:1/h:2,2=h:1/h:4", "twice"),
        ("1=h:0/h:2", "not a port"),
    ] {
        let error = text.parse::<InitialCluster>().unwrap_err();
        assert!(error.contains(why), "{text}: {error}");
    }
    assert!(refused(&["--node-id", "4", "--initial-cluster", THREE]).contains("--node-id is 4"));
    assert!(
        load(&["--node-id", "2", "--initial-cluster", THREE, "--bootstrap"])
            .unwrap()
            .bootstrap
    );
    assert!(refused(&["--node-id", "0"]).contains("0"));
}

#[test]
fn files_of_both_kinds_and_flags_win() {
    let folder = tempfile::tempdir().unwrap();
    let toml = folder.path().join("m.toml");
    std::fs::write(
        &toml,
        "node_id = 2\nrpc-port = 70\nbootstrap = true\ninitial_cluster = [\"1=a:1/a:2\", \"2=b:1/b:2\"]\n",
    )
    .unwrap();
    let path = toml.to_str().unwrap();
    let config = load(&["--config", path]).unwrap();
    assert_eq!((config.node_id, config.rpc.port, config.bootstrap), (2, 70, true));
    assert_eq!(config.initial_cluster.len(), 2);
    let config = load(&[
        "--rpc_port",
        "71",
        "--bootstrap=false",
        &format!("--config={path}"),
    ])
    .unwrap();
    assert_eq!((config.rpc.port, config.bootstrap), (71, false));

    let yaml = folder.path().join("m.yml");
    std::fs::write(
        &yaml,
        "node_id: 1\nmetrics_port: 72\ninitial_cluster:\n  1: a:1/a:2\n  2: b:1/b:2\n",
    )
    .unwrap();
    let config = load(&["--config", yaml.to_str().unwrap()]).unwrap();
    assert_eq!((config.http.port, config.initial_cluster.len()), (72, 2));
}

#[test]
fn faults_of_a_file_name_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.toml");
    let path = file.to_str().unwrap();
    for (text, why) in [
        ("nod_id = 2", "no setting 'nod_id'"),
        ("heartbeat_ms = \"fast\"", "invalid value 'fast'"),
        ("node_id = ", "m.toml"),
        ("config = \"x\"", "no setting 'config'"),
    ] {
        std::fs::write(&file, text).unwrap();
        let error = refused(&["--config", path]);
        assert!(error.contains(why) && error.contains("m.toml"), "{text}: {error}");
    }
    assert!(refused(&["--config", "/nonexistent/m.toml"]).contains("/nonexistent/m.toml"));
}

#[test]
fn the_environment_stands_between_flags_and_file() {
    let text = "rpc_port = 1\nhttp_port = 2";
    let arguments = file_arguments(text, false, |name| name == "MOONCAKE_MASTER_RPC_PORT").unwrap();
    assert_eq!(arguments, ["--http-port=2"]);
    let set: Vec<_> = Flags::command()
        .get_arguments()
        .filter(|argument| {
            argument
                .get_long()
                .is_some_and(|long| long != "help" && long != "version")
        })
        .filter(|argument| {
            let want = format!(
                "{ENV_PREFIX}{}",
                argument.get_long().unwrap().replace('-', "_").to_uppercase()
            );
            argument.get_env().and_then(|env| env.to_str()) != Some(&want)
        })
        .map(|argument| argument.get_id().to_string())
        .collect();
    assert!(
        set.is_empty(),
        "every flag has its variable, these differ: {set:?}"
    );
}
