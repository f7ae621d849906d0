//! Node sessions: who gets one, and what its end means.

use super::{
    cluster::TestCluster,
    node::{FakeNode, Manner, Opened, open, register},
};
use anyhow::Result;
use mooncake_proto::pb::session::{self as pb, node_frame::Body as Up};
use serde_json::json;

const NODE: &str = "127.0.0.1:25001";

#[tokio::test(flavor = "multi_thread")]
async fn a_second_live_client_under_a_taken_id_is_refused() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    let rpc = &cluster.masters[0].rpc;
    let first = FakeNode::start(rpc, NODE, Manner::Works).await?;
    let (opened, _stream) = open(rpc, NODE, register(NODE, "another store")).await?;
    let Opened::Refused(refused) = opened else {
        panic!("{opened:?}")
    };
    assert_eq!(refused.code, "node_id_taken");
    assert!(refused.message.contains("--node-id"), "{}", refused.message);
    assert_eq!(
        cluster.get(0, &format!("/api/v1/nodes/{NODE}")).await?.body["incarnation"],
        1
    );

    // The same client again replaces its old session.
    let again = FakeNode::start(rpc, NODE, Manner::Works).await?;
    first.got("closed").await?;
    assert_eq!(
        cluster.get(0, &format!("/api/v1/nodes/{NODE}")).await?.body["incarnation"],
        1
    );

    // Once the first one is gone, another disk is a new incarnation.
    drop(again);
    drop(first);
    cluster.node_status(0, NODE, "suspected").await?;
    let (opened, _stream) = open(rpc, NODE, register(NODE, "another store")).await?;
    let Opened::Welcome(welcome) = opened else {
        panic!("{opened:?}")
    };
    assert_eq!(welcome.incarnation, 2);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_speaks_for_its_own_node_only() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    let rpc = &cluster.masters[0].rpc;
    let (opened, _stream) = open(rpc, "127.0.0.1:25002", register(NODE, "s")).await?;
    let Opened::Refused(refused) = opened else {
        panic!("{opened:?}")
    };
    assert_eq!(refused.code, "node_id_mismatch");
    let (opened, _stream) = open(
        rpc,
        NODE,
        pb::Register {
            data_address: "nowhere".into(),
            ..register(NODE, "s")
        },
    )
    .await?;
    let Opened::Refused(refused) = opened else {
        panic!("{opened:?}")
    };
    assert_eq!(refused.code, "invalid_register");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_node_is_suspected_then_down_and_comes_back() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    let rpc = &cluster.masters[0].rpc;
    let node = FakeNode::start(rpc, NODE, Manner::Works).await?;
    cluster.node_status(0, NODE, "up").await?;
    drop(node);
    cluster.node_status(0, NODE, "suspected").await?;
    cluster.node_status(0, NODE, "down").await?;
    let node = FakeNode::start(rpc, NODE, Manner::Works).await?;
    cluster.node_status(0, NODE, "up").await?;
    node.send(Up::Heartbeat(pb::Heartbeat {
        sequence: 1,
        free_bytes: 4711,
        answers: 0,
    }))
    .await?;
    node.got("heartbeat 1 answered").await?;
    cluster
        .until(0, &format!("/api/v1/nodes/{NODE}"), |a| {
            a.body["free_bytes"] == json!(4711)
        })
        .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_goodbye_needs_no_grace() -> Result<()> {
    let options = mooncake_master::context::Options {
        node_grace: std::time::Duration::from_secs(3600),
        ..super::cluster::options()
    };
    let cluster = TestCluster::start_with(1, options).await?;
    let node = FakeNode::start(&cluster.masters[0].rpc, NODE, Manner::Works).await?;
    cluster.node_status(0, NODE, "up").await?;
    node.send(Up::Goodbye(pb::Goodbye {
        reason: "stopped".into(),
    }))
    .await?;
    cluster.node_status(0, NODE, "down").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_breaks_the_protocol_is_told_so() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    let node = FakeNode::start(&cluster.masters[0].rpc, NODE, Manner::Works).await?;
    let report = pb::TaskReport {
        outcome: pb::TaskOutcome::Staged as i32,
        ..Default::default()
    };
    node.send(Up::Reports(pb::ReportBatch {
        reports: vec![report],
    }))
    .await?;
    node.got("refused protocol").await?;
    Ok(())
}
