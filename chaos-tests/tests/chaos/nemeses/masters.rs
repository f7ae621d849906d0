//! Masters that die, stand still, are restarted, lose the time of day.

use super::{calm, leader_among, masters_only, post_job, probe, term, view, whole, write};
use crate::LONG;
use anyhow::{Context, Result};
use mooncake_chaos::{Nemesis, Testbed, Who};
use serde_json::Value;

#[tokio::test]
async fn killing_leader_follower_majority_and_all() -> Result<()> {
    let mut bed = masters_only(calm).await?;
    let before = whole(&mut bed).await?;

    let fault = Nemesis::Kill(Who::Leader).inject(&mut bed).await?;
    let dead = fault.victims[0];
    assert_eq!(probe(&bed, dead, "/livez").await, 0);
    let rest: Vec<usize> = (0..3).filter(|&i| i != dead).collect();
    let leader = leader_among(&bed, &rest).await?;
    assert!(term(&bed, leader).await? > before, "a new leader, a new term");
    assert_eq!(write(&bed, leader, "leader-dead").await?, 201);
    fault.heal(&mut bed).await?;
    let term_now = whole(&mut bed).await?;

    let fault = Nemesis::Kill(Who::Follower).inject(&mut bed).await?;
    assert_eq!(probe(&bed, fault.victims[0], "/livez").await, 0);
    assert_eq!(write(&bed, leader, "follower-dead").await?, 201);
    fault.heal(&mut bed).await?;
    assert_eq!(
        whole(&mut bed).await?,
        term_now,
        "a follower's death is no election"
    );

    let fault = Nemesis::Kill(Who::Majority).inject(&mut bed).await?;
    assert_eq!(fault.victims.len(), 2);
    let left = (0..3)
        .find(|i| !fault.victims.contains(i))
        .context("one is left")?;
    let status = write(&bed, left, "majority-dead").await?;
    assert!(
        matches!(status, 503 | 504),
        "{status}: one of three decides nothing"
    );
    fault.heal(&mut bed).await?;
    whole(&mut bed).await?;

    let fault = Nemesis::Kill(Who::All).inject(&mut bed).await?;
    for i in 0..3 {
        assert_eq!(probe(&bed, i, "/livez").await, 0);
    }
    fault.heal(&mut bed).await?;
    whole(&mut bed).await?;
    for id in ["leader-dead", "follower-dead"] {
        assert_eq!(bed.cluster.job(id).await?["job_id"], id, "acknowledged is kept");
    }
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn a_leader_frozen_for_longer_than_an_election_is_replaced_and_steps_down() -> Result<()> {
    let mut bed = masters_only(|_| ()).await?;
    let before = whole(&mut bed).await?;
    let fault = Nemesis::Freeze(Who::Leader).inject(&mut bed).await?;
    let frozen = fault.victims[0];
    let rest: Vec<usize> = (0..3).filter(|&i| i != frozen).collect();
    let leader = leader_among(&bed, &rest).await?;
    assert_eq!(write(&bed, leader, "frozen").await?, 201);
    assert!(bed.cluster.masters[frozen].is_running());
    assert_eq!(probe(&bed, frozen, "/livez").await, 0, "frozen");
    fault.heal(&mut bed).await?;
    assert!(whole(&mut bed).await? > before);
    assert_eq!(
        probe(&bed, frozen, "/leaderz").await,
        503,
        "it learned of its successor"
    );
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn a_rolling_restart_replaces_every_process_and_loses_nothing() -> Result<()> {
    let mut bed = masters_only(|_| ()).await?;
    let leader = bed.cluster.leader().await?;
    assert_eq!(write(&bed, leader, "kept").await?, 201);
    let pids = |bed: &Testbed| -> Vec<_> { bed.cluster.masters.iter().map(|m| m.pid()).collect() };
    let before = pids(&bed);
    let fault = Nemesis::RollingRestart.inject(&mut bed).await?;
    fault.heal(&mut bed).await?;
    whole(&mut bed).await?;
    assert!(
        pids(&bed)
            .iter()
            .all(|pid| pid.is_some() && !before.contains(pid))
    );
    assert_eq!(bed.cluster.job("kept").await?["job_id"], "kept");
    bed.finish();
    Ok(())
}

/// What the state says about when a job was made.
async fn created(bed: &mut Testbed, id: &str) -> Result<String> {
    let list: Value = bed.cluster.get("/api/v1/model-distribution/jobs").await?;
    let jobs = list["jobs"].as_array().context("jobs")?;
    let job = jobs.iter().find(|j| j["job_id"] == id).context("it is listed")?;
    Ok(job["created_at"].as_str().context("created_at")?.to_owned())
}

/// Minutes of a time stamp (`2026-11-29T19:46:54.075Z`) since 0000-03-01.
fn minutes(stamp: &str) -> Result<i64> {
    let part = |from: usize, to: usize| -> Result<i64> { Ok(stamp.get(from..to).context("short")?.parse()?) };
    let (year, month, day) = (part(0, 4)?, part(5, 7)?, part(8, 10)?);
    // Years that begin in March, so that a leap day is a year's last.
    let (year, month) = if month < 3 {
        (year - 1, month + 9)
    } else {
        (year, month - 3)
    };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    Ok((days * 24 + part(11, 13)?) * 60 + part(14, 16)?)
}

#[tokio::test]
async fn a_wall_clock_that_jumps_is_seen_by_the_next_leader_only() -> Result<()> {
    let mut bed = masters_only(|o| {
        calm(o);
        o.clocks = true;
    })
    .await?;
    let before = whole(&mut bed).await?;
    let leader = bed.cluster.leader().await?;
    assert_eq!(write(&bed, leader, "clock-0").await?, 201);
    let start = minutes(&created(&mut bed, "clock-0").await?)?;

    // Ahead, everywhere: no election, and the leader's time goes on.
    let fault = Nemesis::ClockJump(Who::All, 3600).inject(&mut bed).await?;
    bed.cluster.masters[leader].freeze()?;
    let rest: Vec<usize> = (0..3).filter(|&i| i != leader).collect();
    let second = leader_among(&bed, &rest).await?;
    bed.cluster.masters[leader].thaw()?;
    let after = whole(&mut bed).await?;
    assert!(after > before);
    assert_eq!(write(&bed, second, "clock-1").await?, 201);
    let ahead = minutes(&created(&mut bed, "clock-1").await?)?;
    assert!(
        (59..62).contains(&(ahead - start)),
        "{start} {ahead}: the new leader read the jump"
    );

    // Back, two hours from there: the log's time does not go back, and nobody is deposed by it.
    fault.heal(&mut bed).await?;
    let fault = Nemesis::ClockJump(Who::All, -3600).inject(&mut bed).await?;
    assert_eq!(whole(&mut bed).await?, after, "no election");
    bed.cluster.masters[second].kill();
    let rest: Vec<usize> = (0..3).filter(|&i| i != second).collect();
    let third = leader_among(&bed, &rest).await?;
    assert_eq!(write(&bed, third, "clock-2").await?, 201);
    let back = minutes(&created(&mut bed, "clock-2").await?)?;
    assert!(back >= ahead, "{ahead} {back}: never behind what is in the log");
    fault.heal(&mut bed).await?;
    bed.cluster.masters[second].start()?;
    whole(&mut bed).await?;
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn a_wiped_master_is_refused_under_its_old_id_and_comes_back_under_a_new_one() -> Result<()> {
    let mut bed = masters_only(|_| ()).await?;
    let leader = bed.cluster.leader().await?;
    assert_eq!(write(&bed, leader, "kept").await?, 201);
    let fault = Nemesis::Wipe(Who::Follower).inject(&mut bed).await?;
    let wiped = fault.victims[0];
    assert!(!bed.cluster.data_dirs[wiped].exists());
    // The others go on, and count it as absent.
    assert_eq!(write(&bed, leader, "meanwhile").await?, 201);
    assert_eq!(members(&bed, leader).await?, [1, 2, 3]);
    fault.heal(&mut bed).await?;
    // Under the old id its process ended with the code that tells a supervisor not to start it again (the nemesis saw
    // to that), and said why.
    let (old_id, old) = &bed.cluster.retired[0];
    assert_eq!(*old_id, wiped as u64 + 1);
    old.wait_log("must come back as a new id", LONG).await?;
    let ids: Vec<u64> = (1..=4).filter(|id| id != old_id).collect();
    assert_eq!(members(&bed, leader).await?, ids);
    whole(&mut bed).await?;
    // The new one counts: with it and without another one there is a majority.
    let other = (0..3).find(|&i| i != wiped && i != leader).context("other")?;
    bed.cluster.masters[other].kill();
    let leader = leader_among(&bed, &[leader, wiped]).await?;
    assert_eq!(write(&bed, leader, "with-the-new-one").await?, 201);
    bed.cluster.masters[other].start()?;
    whole(&mut bed).await?;
    for id in ["kept", "meanwhile", "with-the-new-one"] {
        assert_eq!(bed.cluster.job(id).await?["job_id"], id);
    }
    bed.finish();
    Ok(())
}

/// Ids of the members by what master `i` says.
async fn members(bed: &Testbed, i: usize) -> Result<Vec<u64>> {
    let view = view(bed, i).await?;
    let members = view["members"].as_array().context("members")?;
    members.iter().map(|m| m["id"].as_u64().context("id")).collect()
}

#[tokio::test]
async fn leadership_that_is_handed_on_and_on_loses_no_write() -> Result<()> {
    const TIMES: u32 = 30;
    let mut bed = masters_only(|_| ()).await?;
    let before = whole(&mut bed).await?;
    // A caller of its own, meanwhile: through any master, each request as often as it takes.
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let caller = tokio::spawn(callers_writes(
        bed.cluster.endpoints.clone(),
        bed.cluster.nodes[0].clone(),
        stopped,
    ));
    let fault = Nemesis::TransferStorm { times: TIMES }.inject(&mut bed).await?;
    fault.heal(&mut bed).await?;
    stop.send_replace(true);
    let acknowledged = caller.await??;
    let after = whole(&mut bed).await?;
    assert!(
        after >= before + u64::from(TIMES),
        "{before} {after}: each hand-over is a term"
    );
    assert!(!acknowledged.is_empty());
    for id in &acknowledged {
        assert_eq!(bed.cluster.job(id).await?["job_id"], *id, "acknowledged is kept");
    }
    bed.finish();
    Ok(())
}

/// Creates jobs until told to stop; those that were acknowledged.
async fn callers_writes(
    endpoints: Vec<String>,
    node: String,
    stopped: tokio::sync::watch::Receiver<bool>,
) -> Result<Vec<String>> {
    let http = mooncake_chaos::cluster::http_client()?;
    let mut acknowledged = Vec::new();
    for n in 0.. {
        if *stopped.borrow() {
            break;
        }
        let id = format!("storm-{n}");
        let url = &endpoints[n % endpoints.len()];
        if matches!(post_job(&http, url, &node, &id, 1).await, Ok(200 | 201)) {
            acknowledged.push(id);
        }
    }
    Ok(acknowledged)
}

#[tokio::test]
async fn members_that_come_and_go_lose_nothing() -> Result<()> {
    let mut bed = masters_only(calm).await?;
    let before = whole(&mut bed).await?;
    let leader = bed.cluster.leader().await?;
    assert_eq!(write(&bed, leader, "three").await?, 201);
    let fault = Nemesis::MembershipChurn.inject(&mut bed).await?;
    let gone = fault.victims[0];
    assert!(!bed.cluster.masters[gone].is_running());
    let mut ids: Vec<u64> = (1..=4).filter(|id| *id != gone as u64 + 1).collect();
    assert_eq!(members(&bed, leader).await?, ids);
    assert_eq!(
        term(&bed, leader).await?,
        before,
        "a follower that leaves is no election"
    );
    // The fourth counts: without another of the first three there is a majority.
    let other = (0..3).find(|&i| i != gone && i != leader).context("other")?;
    bed.cluster.masters[other].kill();
    assert_eq!(write(&bed, leader, "with-the-fourth").await?, 201);
    bed.cluster.masters[other].start()?;
    bed.cluster.wait_ready().await?;

    fault.heal(&mut bed).await?;
    assert_eq!(bed.cluster.masters.len(), 3);
    whole(&mut bed).await?;
    ids.retain(|id| *id != 4);
    ids.push(5);
    assert_eq!(members(&bed, gone).await?, ids);
    for id in ["three", "with-the-fourth"] {
        assert_eq!(bed.cluster.job(id).await?["job_id"], id);
    }
    // It can be done again, on the same hosts.
    let fault = Nemesis::MembershipChurn.inject(&mut bed).await?;
    fault.heal(&mut bed).await?;
    whole(&mut bed).await?;
    bed.finish();
    Ok(())
}
