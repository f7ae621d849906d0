//! Masters that stand still say nothing about nodes that do not.

use super::{until, whole};
use anyhow::{Context, Result};
use mooncake_chaos::{Nemesis, Testbed, TestbedOptions, Who};
use serde_json::Value;
use std::{collections::BTreeMap, time::Duration};

/// As shipped.
const DEFAULT_GRACE: Duration = Duration::from_secs(30);
/// Set by flag, so that a freeze can be longer than all that makes a node `down`.
const GRACE_S: u64 = 1;
/// Longer than a new leader's reconnect window (5 s) and the grace together.
const FREEZE: Duration = Duration::from_secs(7);
/// After the thaw, until whoever would draw a wrong conclusion has drawn it: longer than a session may be silent (3 s),
/// and the grace.
const AFTER: Duration = Duration::from_secs(5);

/// Status of each node and since when, by what master `i` knows. `since` moves with every change of the status.
async fn nodes(bed: &Testbed, i: usize) -> Result<BTreeMap<String, (String, String)>> {
    let url = format!("{}/api/v1/nodes?consistency=stale", bed.cluster.endpoints[i]);
    let answer: Value = bed
        .cluster
        .http
        .get(url)
        .send()
        .await?
        .error_for_status()?
        .json()
        .await?;
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    let nodes = answer["nodes"].as_array().context("nodes")?;
    Ok(nodes
        .iter()
        .map(|n| (text(&n["node_id"]), (text(&n["status"]), text(&n["since"]))))
        .collect())
}

async fn bed(master_args: Vec<String>) -> Result<Testbed> {
    Testbed::start(TestbedOptions {
        clients: 3,
        balancer: None,
        master_args,
        ..Default::default()
    })
    .await
}

/// Freezes and thaws `who`; no master may think anything new of any node.
async fn says_nothing(bed: &mut Testbed, who: Who, freeze: Duration) -> Result<()> {
    whole(bed).await?;
    let before = nodes(bed, 0).await?;
    assert!(before.len() == 3 && before.values().all(|(status, _)| status == "up"));
    let fault = Nemesis::Freeze(who).inject(bed).await?;
    tokio::time::sleep(freeze).await;
    fault.heal(bed).await?;
    whole(bed).await?;
    tokio::time::sleep(AFTER).await;
    for i in 0..3 {
        until("every node is where it was", async || {
            Ok(nodes(bed, i).await.is_ok())
        })
        .await?;
        assert_eq!(nodes(bed, i).await?, before, "{who:?}, by master {}", i + 1);
    }
    Ok(())
}

#[tokio::test]
async fn frozen_masters_declare_no_healthy_node_suspected_or_down() -> Result<()> {
    let mut bed = bed(vec![format!("--node-grace-s={GRACE_S}")]).await?;
    for who in [Who::Leader, Who::Follower, Who::All] {
        says_nothing(&mut bed, who, FREEZE).await?;
    }
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn a_leader_frozen_for_half_a_minute_declares_no_healthy_node_suspected_or_down() -> Result<()> {
    let mut bed = bed(vec![]).await?;
    says_nothing(&mut bed, Who::Leader, DEFAULT_GRACE).await?;
    bed.finish();
    Ok(())
}
