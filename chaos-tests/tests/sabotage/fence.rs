//! A master whose state machine takes reports of attempts that are over.

use crate::{Bench, LONG, SWITCHES, fake_node::FakeNode, names};
use anyhow::{Context, Result, ensure};
use mooncake_chaos::{
    Cluster, ClusterOptions,
    checks::log::KEEP_THE_LOG,
    workload::{Library, Planner, Step},
};

/// A node fails at its first attempt, is ordered a second one, and reports the failure of the first one again. Where
/// that is taken for the second's, a third is ordered at once; else when the second has failed, too.
async fn run(sabotage: Option<&str>) -> Result<Vec<&'static str>> {
    let mut cluster = Cluster::prepare(&ClusterOptions {
        masters: 1,
        clients: 0,
        master_args: KEEP_THE_LOG.map(str::to_owned).to_vec(),
        ..Default::default()
    })?;
    sabotage
        .into_iter()
        .for_each(|s| cluster.masters[0].set_env(SWITCHES, s));
    cluster.start_all().await?;
    let models = tempfile::tempdir()?;
    let library = Library::create(models.path(), "http://127.0.0.1:9", 1, 1)?;
    let mut bench = Bench::new(&cluster, library, None)?;
    let mut node = FakeNode::join(&cluster.rpc_addresses[0], "127.0.0.1:25001").await?;
    let sent = Planner::writers_job(&bench.scene.library, &[node.id.clone()], 1);
    let made = bench.caller.take(0, Step::Create(sent.clone())).await;
    ensure!(made.is_acknowledged_write(), "{made:?}");
    let first = node.ordered(LONG).await.context("the first attempt")?;
    node.fail(&first).await?;
    let second = node.ordered(LONG).await.context("the second attempt")?;
    ensure!(first.fence != second.fence, "{first:?} {second:?}");
    node.fail(&first).await?;
    if sabotage.is_none() {
        // A report in the same stream is taken after the one before it: when this one shows, the stale one was taken.
        node.fail(&second).await?;
    }
    node.ordered(LONG).await.context("the third attempt")?;
    let read = Step::Read {
        job: sent.job,
        stale: false,
    };
    let read = bench.caller.take(0, read).await;
    ensure!(read.seen().is_some(), "{read:?}");
    ensure!(
        bench.observer.look(true).await.len() == 1,
        "the master answers the observer"
    );
    let violations = bench.judge_with_log(&mut cluster).await?;
    Ok(names(&violations))
}

#[tokio::test]
async fn a_skipped_fence_is_caught_by_answers_and_digests() -> Result<()> {
    assert_eq!(run(None).await?, Vec::<&str>::new());
    let caught = run(Some("skip_fence")).await?;
    assert!(
        caught.contains(&"answers") && caught.contains(&"digests"),
        "{caught:?}"
    );
    Ok(())
}
