//! A master that answers a read without asking a quorum whether it still leads.

use crate::{Bench, LONG, SWITCHES, names};
use anyhow::{Context, Result, ensure};
use mooncake_chaos::{
    Testbed, TestbedOptions,
    nemesis::{Nemesis, Who},
    workload::{Library, Planner, Step},
};
use std::time::{Duration, Instant};

/// A job is read at the leader, which is then cut off; the job is canceled at its successor and read at the old one.
async fn run(sabotage: Option<&str>) -> Result<Vec<&'static str>> {
    let mut bed = Testbed::prepare(TestbedOptions {
        clients: 1,
        balancer: None,
        ..Default::default()
    })
    .await?;
    for master in &mut bed.cluster.masters {
        sabotage.into_iter().for_each(|s| master.set_env(SWITCHES, s));
    }
    let models = tempfile::tempdir()?;
    let url = bed.serve(models.path()).await?.url.clone();
    // So slow that the job is live as long as this takes.
    bed.source()?.limit_rate(Some(1000));
    let library = Library::create(models.path(), &url, 1, 1)?;
    bed.cluster.start_all().await?;
    let secret = std::fs::read_to_string(bed.dir().join("secret"))?;
    let mut bench = Bench::new(&bed.cluster, library, Some(secret))?;
    let old = bed.cluster.leader().await?;
    let sent = Planner::writers_job(&bench.scene.library, &bench.scene.nodes, 1);
    let made = bench.caller.take(old, Step::Create(sent.clone())).await;
    ensure!(made.is_acknowledged_write(), "{made:?}");

    let injected = Nemesis::Isolate(Who::Leader).inject(&mut bed).await?;
    ensure!(injected.victims == [old], "the leader changed by itself");
    let until = Instant::now() + LONG;
    let new = loop {
        let others = (0..bed.cluster.masters.len()).filter(|&i| i != old);
        let mut leads = None;
        for i in others {
            let url = format!("{}/leaderz", bed.cluster.endpoints[i]);
            let answer = bed.cluster.http.get(url).send().await?;
            leads = leads.or(answer.status().is_success().then_some(i));
        }
        if let Some(new) = leads {
            break new;
        }
        ensure!(Instant::now() < until, "no other leader within {LONG:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let cancel = Step::Cancel {
        job: sent.job.clone(),
    };
    let canceled = bench.caller.take(new, cancel).await;
    ensure!(canceled.is_acknowledged_write(), "{canceled:?}");
    let read = Step::Read {
        job: sent.job,
        stale: false,
    };
    // No answer is fine, a wrong one is not.
    let read = bench.caller.take(old, read).await;
    if sabotage.is_none() {
        ensure!(read.seen().is_none(), "it answered without a quorum: {read:?}");
    }
    injected.heal(&mut bed).await.context("healing")?;
    let caught = names(&bench.judge().await?);
    bed.finish();
    Ok(caught)
}

#[tokio::test]
async fn a_read_without_the_read_index_is_caught_by_linear() -> Result<()> {
    assert_eq!(run(None).await?, Vec::<&str>::new());
    let caught = run(Some("skip_read_index")).await?;
    assert!(caught.contains(&"linear"), "{caught:?}");
    Ok(())
}
