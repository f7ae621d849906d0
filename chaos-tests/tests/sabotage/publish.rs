//! A client that publishes the final folder before it has checked what is in it.

use crate::{Bench, LONG, names};
use anyhow::{Result, ensure};
use mooncake_chaos::{
    Cluster, ClusterOptions,
    workload::{Library, Planner, Step},
};
use std::time::Instant;

/// The client's switches, of the `fail` crate.
const FAILPOINTS: &str = "FAILPOINTS";

/// A model goes to two nodes, the second of which obeys the switches.
async fn run(sabotage: Option<&str>) -> Result<Vec<&'static str>> {
    let models = tempfile::tempdir()?;
    let base = models.path().display().to_string();
    let mut cluster = Cluster::prepare(&ClusterOptions {
        masters: 1,
        clients: 2,
        allow_sources: vec![base.clone()],
        ..Default::default()
    })?;
    sabotage
        .into_iter()
        .for_each(|s| cluster.clients[1].set_env(FAILPOINTS, s));
    cluster.start_all().await?;
    let library = Library::create(models.path(), &base, 1, 1)?;
    let mut bench = Bench::new(&cluster, library, None)?;
    let nodes = &bench.scene.nodes;
    let sent = Planner::job("two", &bench.scene.library.models[0], &nodes[0], nodes);
    let made = bench.caller.take(0, Step::Create(sent.clone())).await;
    ensure!(made.is_acknowledged_write(), "{made:?}");
    let until = Instant::now() + LONG;
    loop {
        let poll = Step::Poll {
            job: sent.job.clone(),
        };
        let op = bench.caller.take(0, poll).await;
        if op.seen().is_some_and(|s| s.status.is_terminal()) {
            break;
        }
        ensure!(Instant::now() < until, "the job does not end: {op:?}");
    }
    Ok(names(&bench.judge().await?))
}

#[tokio::test]
async fn publishing_before_the_last_digest_is_caught_by_staged() -> Result<()> {
    assert_eq!(run(None).await?, Vec::<&str>::new());
    let caught = run(Some("fetch::skip=return;publish::skip_checks=return")).await?;
    assert!(caught.contains(&"staged"), "{caught:?}");
    Ok(())
}
