//! Flags and the configuration file, which uses the same names; checked as a whole before anything starts.
//!
//! Names may be written with `-` or `_`, in flags and in the file. A flag wins over the file.

mod rdma;

pub use rdma::{RdmaArgs, TransportChoice};

use crate::{rate::Limit, source::AllowList};
use clap::{CommandFactory, FromArgMatches, Parser, parser::ValueSource};
use mooncake_proto::{
    DEFAULT_CLUSTER_ID,
    hello::{Secret, check_listen},
    ids::NodeId,
};
use std::{
    collections::BTreeMap,
    ffi::OsString,
    net::SocketAddr,
    path::{Path, PathBuf},
    str::FromStr,
};

const EXAMPLES: &str = "\
Examples:
  One node beside three masters on one machine, models from a folder:
    mooncake_client --node-id 127.0.0.1:25001 --data-address 127.0.0.1:25001 \\
        --root /srv/models --masters 127.0.0.1:50051,127.0.0.1:50061,127.0.0.1:50071 \\
        --allow-source /srv/incoming

  A node of a fleet (beyond loopback a cluster secret is required):
    mooncake_client --data-address 10.0.0.7:50052 --root /nvme/models \\
        --masters m1:50051,m2:50051,m3:50051 --cluster-secret-file /etc/mooncake/secret \\
        --allow-source https://models.example.com/ --label rack=r12

  The same from a file (TOML or YAML, the flags' names): mooncake_client --config client.toml
    data_address = \"10.0.0.7:50052\"
    root = \"/nvme/models\"
    masters = [\"m1:50051\", \"m2:50051\", \"m3:50051\"]
    cluster_secret_file = \"/etc/mooncake/secret\"
    allow_source = [\"https://models.example.com/\"]
    label = { rack = \"r12\" }

Staged models are plain folders below --root: <provider>/<model_id>/<revision>/<format>.
What this node holds: curl http://127.0.0.1:9300/api/v1/holdings";

/// The node of Mooncake distribution: stages model versions on this machine's disk and passes them on to
/// other nodes, as the masters order.
#[derive(Clone, Debug, Parser)]
#[command(name = "mooncake_client", version, after_help = EXAMPLES, max_term_width = 110, args_override_self = true)]
pub struct Args {
    /// TOML or YAML file with these settings under the same names; flags win over it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// This node's id in jobs, host:port; by default the address that peers dial
    #[arg(long, value_name = "HOST:PORT")]
    pub node_id: Option<String>,

    /// Where to listen for other nodes; port 0 takes a free one
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:50052")]
    pub data_address: String,

    /// The address that other nodes dial, if it is not --data-address (behind NAT, or listening on 0.0.0.0)
    #[arg(long, value_name = "HOST:PORT")]
    pub advertise_address: Option<String>,

    /// Where to serve health, metrics, holdings and objects over HTTP; port 0 takes a free one
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:9300")]
    pub http_address: String,

    /// The folder of the models; created if missing. Used by one client at a time
    #[arg(long, value_name = "DIR", default_value = "./mooncake-models")]
    pub root: PathBuf,

    /// The masters' RPC addresses, separated by commas; any subset that is alive will do
    #[arg(
        long,
        value_name = "HOST:PORT,…",
        value_delimiter = ',',
        default_value = "127.0.0.1:50051"
    )]
    pub masters: Vec<String>,

    /// The cluster this node belongs to
    #[arg(long, value_name = "ID", default_value = DEFAULT_CLUSTER_ID)]
    pub cluster_id: String,

    /// File with the cluster's secret; required to listen beyond loopback
    #[arg(long, value_name = "FILE")]
    pub cluster_secret_file: Option<PathBuf>,

    /// A folder or a URL prefix from which models may be read; repeatable. Without it nothing may be read
    #[arg(long, value_name = "PREFIX")]
    pub allow_source: Vec<String>,

    /// A label of this node, e.g. rack=r12 or zone=a; repeatable. Peers of the same rack are asked first
    #[arg(long, value_name = "KEY=VALUE")]
    pub label: Vec<Label>,

    /// Blocks sent to other nodes at once
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = max_uploads)]
    pub max_uploads: usize,

    /// Most bytes per second sent to other nodes, e.g. 500MiB; at least 2MiB. Without it as fast as can be
    #[arg(long, value_name = "BYTES/S")]
    pub upload_limit: Option<Limit>,

    /// Most bytes per second taken from other nodes and from sources together
    #[arg(long, value_name = "BYTES/S")]
    pub download_limit: Option<Limit>,

    /// Model versions fetched at once, 1 to 10000, from other nodes and from sources; more wait for their turn, by the
    /// priority and the age of their jobs. Without it as many as there are, but at most 8 from sources
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_TRANSFERS)))]
    pub max_transfers: Option<u32>,

    /// By which transport, and by which devices
    #[command(flatten)]
    pub rdma: RdmaArgs,

    /// Staging that no job wants is removed this long after it was last written
    #[arg(long, value_name = "SECONDS", default_value_t = 86_400)]
    pub staging_expire_s: u64,

    /// The form of the log, on standard error
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,

    /// What to log: error, warn, info, debug, trace, or a filter such as info,mooncake_client::swarm=debug
    #[arg(long, value_name = "FILTER", env = "RUST_LOG", default_value = "info")]
    pub log_level: String,
}

/// `key=value`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label(pub String, pub String);

impl FromStr for Label {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((key, value)) if !key.is_empty() && !value.is_empty() => Ok(Self(key.into(), value.into())),
            _ => Err("a label is KEY=VALUE".into()),
        }
    }
}

/// Each upload takes a thread while it sends.
const MAX_UPLOADS: usize = 256;

fn max_uploads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (1..=MAX_UPLOADS).contains(&n) => Ok(n),
        _ => Err(format!("give 1 to {MAX_UPLOADS}")),
    }
}

/// As many jobs as the masters keep that have not ended: beyond it the limit could never be reached.
const MOST_TRANSFERS: u32 = 10_000;

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Checked settings.
#[derive(Clone, Debug)]
pub struct Settings {
    /// As given; `None`: the advertised address.
    pub node_id: Option<NodeId>,
    /// Where to listen for peers.
    pub data_listen: SocketAddr,
    /// What peers dial; `None`: where the node listens.
    pub advertise: Option<NodeId>,
    /// Where to serve HTTP.
    pub http_listen: SocketAddr,
    /// The folder.
    pub root: PathBuf,
    /// At least one.
    pub masters: Vec<String>,
    /// As given.
    pub cluster_id: String,
    /// If configured.
    pub secret: Option<Secret>,
    /// What may be read.
    pub allow: AllowList,
    /// By key.
    pub labels: BTreeMap<String, String>,
    /// At least one.
    pub max_uploads: usize,
    /// To peers.
    pub upload_limit: Option<Limit>,
    /// From peers and sources.
    pub download_limit: Option<Limit>,
    /// The masters order no more than so many at once.
    pub max_transfers: Option<u32>,
    /// Its devices; `None`: blocks go over TCP only.
    pub rdma: Option<mooncake_rdma::Config>,
    /// Whether the node does not start without it.
    pub rdma_required: bool,
    /// See [`crate::store::STAGING_MAX_AGE`].
    pub staging_expire: std::time::Duration,
}

/// Most masters that can be named.
const MAX_MASTERS: usize = 64;
/// Longest cluster id, in bytes: it is in every hello, which is bounded.
const MAX_CLUSTER_ID_BYTES: usize = 128;

impl Args {
    /// Reads the command line (with the program's name first) and the file it names. An error prints itself
    /// with `exit`, as `clap` does it.
    pub fn read(command_line: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Self, clap::Error> {
        let command = Self::command;
        let mut line: Vec<OsString> = command_line
            .into_iter()
            .map(|arg| hyphenated(arg.into()))
            .collect();
        let matches = command().try_get_matches_from(&line)?;
        let Some(file) = matches.get_one::<PathBuf>("config") else {
            return Self::from_arg_matches(&matches);
        };
        let fault = |why: String| command().error(clap::error::ErrorKind::InvalidValue, why);
        let known: Vec<String> = Self::command()
            .get_arguments()
            .map(|a| a.get_id().to_string())
            .filter(|id| !matches!(id.as_str(), "config" | "help" | "version"))
            .collect();
        for (name, value) in read_file(file).map_err(fault)? {
            let id = name.replace('-', "_");
            if !known.contains(&id) {
                let names = known.join(", ");
                return Err(fault(format!(
                    "{}: there is no setting '{name}'; known are: {names}",
                    file.display()
                )));
            }
            if matches.value_source(&id) == Some(ValueSource::CommandLine) {
                continue;
            }
            let flag = id.replace('_', "-");
            for text in texts(&value).map_err(|why| fault(format!("{}: {name}: {why}", file.display())))? {
                line.push(format!("--{flag}={text}").into());
            }
        }
        Self::from_arg_matches(&command().try_get_matches_from(&line)?)
    }

    /// Checks everything that can be checked without starting. Looks up the names of listen addresses.
    pub fn check(self) -> Result<Settings, String> {
        let parse = |flag: &str, text: &str| NodeId::parse(text).map_err(|e| format!("{flag}: {e}"));
        let node_id = self.node_id.map(|id| parse("--node-id", &id)).transpose()?;
        let advertise = self
            .advertise_address
            .map(|a| parse("--advertise-address", &a))
            .transpose()?;
        let data_listen = listen_address("--data-address", &self.data_address)?;
        let http_listen = listen_address("--http-address", &self.http_address)?;
        if data_listen == http_listen && data_listen.port() != 0 {
            return Err(format!(
                "--data-address and --http-address are both {data_listen}: give them two ports"
            ));
        }
        let advertise = match advertise {
            None if data_listen.ip().is_unspecified() => Some(node_id.clone().ok_or_else(|| {
                format!("other nodes cannot dial {data_listen}: say how they reach this one with --advertise-address HOST:PORT")
            })?),
            other => other,
        };

        let masters: Vec<String> = self
            .masters
            .iter()
            .map(|m| m.trim().to_owned())
            .filter(|m| !m.is_empty())
            .collect();
        if masters.is_empty() || masters.len() > MAX_MASTERS {
            return Err(format!(
                "--masters: {} addresses, give 1 to {MAX_MASTERS}",
                masters.len()
            ));
        }
        for master in &masters {
            parse("--masters", master)?;
        }
        if self.cluster_id.is_empty() || self.cluster_id.len() > MAX_CLUSTER_ID_BYTES {
            return Err(format!("--cluster-id: give 1 to {MAX_CLUSTER_ID_BYTES} bytes"));
        }
        let secret = self.cluster_secret_file.map(Secret::read_file).transpose()?;
        check_listen("--data-address", &data_listen, secret.as_ref())?;
        check_listen("--http-address", &http_listen, secret.as_ref())?;
        let allow = AllowList::parse(&self.allow_source).map_err(|e| format!("--allow-source: {e}"))?;
        Ok(Settings {
            node_id,
            data_listen,
            advertise,
            http_listen,
            root: self.root,
            masters,
            cluster_id: self.cluster_id,
            secret,
            allow,
            labels: self.label.into_iter().map(|Label(k, v)| (k, v)).collect(),
            max_uploads: self.max_uploads,
            upload_limit: self.upload_limit,
            download_limit: self.download_limit,
            max_transfers: self.max_transfers,
            rdma: self.rdma.config(),
            rdma_required: self.rdma.transport == TransportChoice::Rdma,
            staging_expire: std::time::Duration::from_secs(self.staging_expire_s),
        })
    }
}

/// `--node_id=x` as `--node-id=x`; anything else as it is.
fn hyphenated(arg: OsString) -> OsString {
    match arg.to_str().and_then(|text| text.strip_prefix("--")) {
        Some(text) => {
            let (name, value) = text.split_once('=').map_or((text, None), |(n, v)| (n, Some(v)));
            let name = name.replace('_', "-");
            value
                .map_or_else(|| format!("--{name}"), |v| format!("--{name}={v}"))
                .into()
        }
        None => arg,
    }
}

/// A literal is never looked up.
fn listen_address(flag: &str, text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let example = "give host:port, e.g. 127.0.0.1:50052 or [::1]:50052";
    if text
        .rsplit_once(':')
        .is_none_or(|(host, _)| host.contains(':') || host.is_empty())
    {
        return Err(format!("{flag}: '{text}' is not an address: {example}"));
    }
    std::net::ToSocketAddrs::to_socket_addrs(text)
        .map_err(|e| format!("{flag}: '{text}' cannot be resolved: {e}; {example}"))?
        .next()
        .ok_or_else(|| format!("{flag}: '{text}' has no address; {example}"))
}

/// The file as names and values. TOML by default, YAML by its suffix.
fn read_file(path: &Path) -> Result<BTreeMap<String, serde_json::Value>, String> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).map_err(|e| format!("cannot read --config {shown}: {e}"))?;
    let yaml = matches!(path.extension().and_then(|e| e.to_str()), Some("yaml" | "yml"));
    if yaml {
        let read: Option<BTreeMap<String, serde_json::Value>> = serde_yaml_ng::from_str(&text)
            .map_err(|e| format!("--config {shown} is not YAML of this form: {e}"))?;
        return Ok(read.unwrap_or_default());
    }
    toml::from_str(&text).map_err(|e| {
        format!("--config {shown} is not TOML of this form (YAML files end in .yaml or .yml): {e}")
    })
}

/// A value as the flag would be given: a list is the flag repeated, a table of texts is KEY=VALUE repeated.
fn texts(value: &serde_json::Value) -> Result<Vec<String>, String> {
    use serde_json::Value;
    let scalar = |v: &Value| match v {
        Value::String(s) => Ok(s.clone()),
        Value::Number(n) => Ok(n.to_string()),
        Value::Bool(b) => Ok(b.to_string()),
        _ => Err("a text, a number or a list of them is expected".to_owned()),
    };
    match value {
        Value::Array(list) => list.iter().map(scalar).collect(),
        Value::Object(table) => table
            .iter()
            .map(|(k, v)| Ok(format!("{k}={}", scalar(v)?)))
            .collect(),
        Value::Null => Ok(Vec::new()),
        other => scalar(other).map(|s| vec![s]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn read(args: &[&str]) -> Result<Args, clap::Error> {
        Args::read(std::iter::once("mooncake_client").chain(args.iter().copied()))
    }

    fn file(suffix: &str, text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::Builder::new().suffix(suffix).tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn the_command_is_well_formed() {
        Args::command().debug_assert();
    }

    #[test]
    fn underscores_and_hyphens() {
        for args in [
            ["--node_id", "h:1", "--data_address=127.0.0.1:0", "--root=a_b"],
            ["--node-id", "h:1", "--data-address=127.0.0.1:0", "--root=a_b"],
        ] {
            let settings = read(&args).unwrap().check().unwrap();
            assert_eq!(settings.node_id.unwrap().as_str(), "h:1");
            assert_eq!(
                (settings.data_listen.port(), settings.root.to_str()),
                (0, Some("a_b"))
            );
        }
    }

    #[test]
    fn files_of_both_kinds_and_flags_win() {
        let toml = "node-id = \"h:1\"\nmasters = [\"a:1\", \"b:2\"]\nallow_source = [\"/x\", \"/y\"]\nstaging_expire_s = 5\nlabel = { rack = \"r1\" }\ncluster_id = \"file\"\n";
        let yaml = "node_id: h:1\nmasters: a:1,b:2\nallow-source: [/x, /y]\nstaging_expire_s: 5\nlabel: [rack=r1]\ncluster_id: file\n";
        for (suffix, text) in [(".toml", toml), (".yaml", yaml), (".conf", toml)] {
            let file = file(suffix, text);
            let path = file.path().to_str().unwrap();
            let args = read(&["--config", path, "--cluster_id", "flag"]).unwrap();
            assert_eq!(args.masters, ["a:1", "b:2"]);
            assert_eq!(args.allow_source, ["/x", "/y"]);
            assert_eq!((args.staging_expire_s, args.cluster_id.as_str()), (5, "flag"));
            assert_eq!(args.label, [Label("rack".into(), "r1".into())]);
            assert_eq!(args.node_id.as_deref(), Some("h:1"));
        }
    }

    #[test]
    fn faults_name_the_setting_and_the_file() {
        let unknown = file(".toml", "nodeid = \"h:1\"");
        let shape = file(".toml", "root = { a = { b = 1 } }");
        let broken = file(".yaml", "a: [");
        for (file, says) in [
            (&unknown, "no setting 'nodeid'"),
            (&shape, "root"),
            (&broken, "not YAML"),
        ] {
            let text = read(&["--config", file.path().to_str().unwrap()])
                .unwrap_err()
                .to_string();
            assert!(text.contains(says), "{text}");
            assert!(text.contains(file.path().to_str().unwrap()), "{text}");
        }
        assert!(
            read(&["--config", "/nowhere/x.toml"])
                .unwrap_err()
                .to_string()
                .contains("/nowhere/x.toml")
        );
    }

    #[test]
    fn settings_are_checked() {
        for (args, says) in [
            (
                &["--data-address", "0.0.0.0:1", "--node-id", "h:1"][..],
                "--cluster-secret-file",
            ),
            (&["--http-address", "0.0.0.0:1"], "--cluster-secret-file"),
            (&["--data-address", "0.0.0.0:1"], "--advertise-address"),
            (&["--data-address", "::1:5"], "--data-address"),
            (&["--data-address", "nonsense"], "--data-address"),
            (&["--http-address", "127.0.0.1:50052"], "two ports"),
            (&["--masters", ""], "--masters"),
            (&["--masters", "a"], "--masters"),
            (&["--node-id", "x"], "--node-id"),
            (&["--advertise-address", "x:0"], "--advertise-address"),
            (&["--cluster-id", ""], "--cluster-id"),
            (&["--cluster-secret-file", "/nowhere/secret"], "/nowhere/secret"),
            (&["--allow-source", "ftp://x/y"], "--allow-source"),
        ] {
            let error = read(args).unwrap().check().unwrap_err();
            assert!(error.contains(says), "{args:?}: {error}");
        }
        for wrong in ["0", "10001", "-1", "many"] {
            let error = read(&[&format!("--max-transfers={wrong}")])
                .unwrap_err()
                .to_string();
            assert!(error.contains("--max-transfers"), "{error}");
        }
        assert!(read(&["--label", "norack"]).is_err());
        assert!(read(&["--log-format", "xml"]).is_err());
    }

    #[test]
    fn rdma_by_flag_and_file() {
        let none = read(&[]).unwrap().check().unwrap();
        assert!(
            none.rdma.is_some() && !none.rdma_required,
            "where it is there, it is used"
        );
        assert!(
            read(&["--transport=tcp"])
                .unwrap()
                .check()
                .unwrap()
                .rdma
                .is_none()
        );
        let file = file(
            ".toml",
            "transport = \"rdma\"\nrdma_device = [\"a\", \"b\"]\nrdma-memory = \"32MiB\"\nrdma_gid_index = 3\n",
        );
        let args = ["--config", file.path().to_str().unwrap(), "--rdma_mtu", "1024"];
        let settings = read(&args).unwrap().check().unwrap();
        assert!(settings.rdma_required);
        let config = settings.rdma.unwrap();
        assert_eq!(
            (config.devices, config.gid_index),
            (vec!["a".into(), "b".into()], Some(3))
        );
        assert_eq!(
            (config.memory_bytes, config.mtu.unwrap().bytes()),
            (32 << 20, 1024)
        );
        for wrong in [
            "--rdma-mtu=1500",
            "--rdma-memory=1MiB",
            "--rdma-depth=0",
            "--rdma-spin-us=2000",
            "--transport=ib",
        ] {
            let error = read(&[wrong]).unwrap_err().to_string();
            assert!(error.contains(wrong.split('=').next().unwrap()), "{error}");
        }
    }

    #[test]
    fn beyond_loopback_with_a_secret() {
        let secret = file("", "0123456789abcdef0123456789abcdef");
        let args = [
            "--data-address",
            "0.0.0.0:5",
            "--node-id",
            "h:5",
            "--cluster-secret-file",
            secret.path().to_str().unwrap(),
        ];
        let settings = read(&args).unwrap().check().unwrap();
        assert_eq!(
            settings.advertise.unwrap().as_str(),
            "h:5",
            "peers dial the node id where nothing else is said"
        );
    }
}
