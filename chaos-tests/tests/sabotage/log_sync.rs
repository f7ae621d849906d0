//! Masters that acknowledge what is only in their memory.

use crate::{Bench, SWITCHES, names};
use anyhow::{Result, ensure};
use mooncake_chaos::{
    Cluster, ClusterOptions,
    workload::{Library, Planner, Step},
};

/// A job is acknowledged, every master is killed and started again, and the job is read.
async fn run(sabotage: Option<&str>) -> Result<Vec<&'static str>> {
    let models = tempfile::tempdir()?;
    let mut cluster = Cluster::prepare(&ClusterOptions {
        clients: 1,
        allow_sources: vec![models.path().display().to_string()],
        ..Default::default()
    })?;
    for master in &mut cluster.masters {
        sabotage.into_iter().for_each(|s| master.set_env(SWITCHES, s));
    }
    cluster.start_all().await?;
    let library = Library::create(models.path(), &models.path().display().to_string(), 1, 1)?;
    let mut bench = Bench::new(&cluster, library, None)?;
    let sent = Planner::writers_job(&bench.scene.library, &bench.scene.nodes, 1);
    let made = bench.caller.take(0, Step::Create(sent.clone())).await;
    ensure!(made.is_acknowledged_write(), "{made:?}");
    cluster.masters.iter_mut().for_each(|m| m.kill());
    for master in &mut cluster.masters {
        master.start()?;
    }
    cluster.wait_ready().await?;
    let read = Step::Read {
        job: sent.job,
        stale: false,
    };
    let read = bench.caller.take(1, read).await;
    ensure!(read.answer().is_some_and(|a| a.served_by.is_some()), "{read:?}");
    Ok(names(&bench.judge().await?))
}

#[tokio::test]
async fn a_dropped_log_sync_is_caught_by_acknowledged() -> Result<()> {
    assert_eq!(run(None).await?, Vec::<&str>::new());
    let caught = run(Some("drop_sync")).await?;
    assert!(caught.contains(&"acknowledged"), "{caught:?}");
    Ok(())
}
