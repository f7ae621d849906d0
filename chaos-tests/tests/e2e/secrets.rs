//! Without the cluster's secret, or with another cluster's, nobody gets in, and both ends say why.

use anyhow::{Context, Result};
use mooncake_chaos::{Cluster, ClusterOptions};
use std::time::Duration;

const SECRET: &str = "a secret of the cluster under test";

/// A process that is refused says so at once; this is for a machine that does something else.
const LOGGED: Duration = Duration::from_secs(120);

#[tokio::test]
async fn clients_without_the_secret_are_refused_with_a_message() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions {
        secret: Some(SECRET.into()),
        ..ClusterOptions::calm()
    })
    .await?;
    let wrong = cluster.dir().join("wrong-secret");
    std::fs::write(&wrong, "another secret, of another cluster")?;
    let wrong = wrong.display().to_string();

    // The last --cluster-secret-file wins.
    cluster.clients[2].kill();
    cluster.clients[2].start_with(&["--cluster-secret-file".into(), wrong.clone()])?;
    cluster.clients[2]
        .wait_log("different cluster secrets", LOGGED)
        .await?;

    cluster.clients[1].kill();
    cluster.clients[1].start_with(&["--cluster-id".into(), "somebody-else".into()])?;
    cluster.clients[1]
        .wait_log("cluster 'somebody-else'", LOGGED)
        .await?;

    // A master with another secret: refused on the Raft port; the others go on.
    cluster.masters[2].kill();
    cluster.masters[2].start_with(&["--cluster-secret-file".into(), wrong])?;
    cluster.masters[2]
        .wait_log("different cluster secrets", LOGGED)
        .await?;
    cluster.masters[2].kill();
    cluster.get("/api/v1/nodes").await?;
    Ok(())
}

#[tokio::test]
async fn the_data_port_refuses_strangers() -> Result<()> {
    use mooncake_proto::hello::{HelloConfig, HelloError, Purpose, Secret, connect};
    let cluster = Cluster::start(ClusterOptions {
        secret: Some(SECRET.into()),
        clients: 1,
        ..ClusterOptions::calm()
    })
    .await?;
    let stranger = |secret: Option<&str>| HelloConfig {
        cluster_id: mooncake_proto::DEFAULT_CLUSTER_ID.into(),
        secret: secret.map(|s| Secret::new(s.as_bytes()).expect("long enough")),
        node_id: "127.0.0.1:9".into(),
        instance_id: "x".into(),
        software: "stranger".into(),
        features: 0,
    };
    let ports = [
        (cluster.nodes[0].clone(), Purpose::Data),
        (cluster.rpc_addresses[0].clone(), Purpose::Session),
        (cluster.rpc_addresses[0].clone(), Purpose::Raft),
    ];
    for (address, purpose) in ports {
        for (secret, want) in [
            (None, "secret_required"),
            (Some("another secret, of another cluster"), "wrong_secret"),
        ] {
            let mut stream = tokio::net::TcpStream::connect(&address).await?;
            match connect(&mut stream, &stranger(secret), purpose).await {
                Err(HelloError::Refused { code, .. }) => assert_eq!(code, want, "{address} {purpose:?}"),
                other => panic!("{address} {purpose:?}: {other:?}"),
            }
        }
        let foreign = HelloConfig {
            cluster_id: "another".into(),
            ..stranger(Some(SECRET))
        };
        let mut stream = tokio::net::TcpStream::connect(&address).await?;
        match connect(&mut stream, &foreign, purpose).await {
            Err(HelloError::Refused { code, message }) => {
                assert_eq!(code, "wrong_cluster", "{address} {purpose:?}");
                assert!(message.contains("'another'"), "{message}");
            }
            other => panic!("{address} {purpose:?}: {other:?}"),
        }
        let mut stream = tokio::net::TcpStream::connect(&address).await?;
        connect(&mut stream, &stranger(Some(SECRET)), purpose)
            .await
            .context("the right secret is let in")?;
    }
    Ok(())
}

#[tokio::test]
async fn beyond_loopback_a_process_refuses_to_listen_without_a_secret() -> Result<()> {
    let mut cluster = Cluster::prepare(&ClusterOptions {
        clients: 1,
        masters: 1,
        ..ClusterOptions::calm()
    })?;
    let port = |address: &str| {
        address
            .rsplit_once(':')
            .map(|(_, p)| p.to_owned())
            .unwrap_or_default()
    };
    let far = format!("0.0.0.0:{}", port(&cluster.nodes[0]));
    cluster.clients[0].start_with(&["--data-address".into(), far])?;
    let far = format!("0.0.0.0:{}", port(&cluster.rpc_addresses[0]));
    cluster.masters[0].start_with(&["--rpc-address".into(), far])?;
    for process in [&mut cluster.clients[0], &mut cluster.masters[0]] {
        let status = process.wait_exit(LOGGED).await?;
        assert!(!status.success());
        assert!(
            process.log().contains("--cluster-secret-file"),
            "{}",
            process.log_tail()
        );
    }
    Ok(())
}
