//! What operators do to the masters, as faults: by the commands of `docs/operations.md`.

use crate::{cluster::READY_DEADLINE, testbed::Testbed};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::time::{Duration, Instant};

/// Exit code of a master for "starting again changes nothing, a person has to act".
const NEEDS_A_PERSON: i32 = 3;
/// What a master says at its end whose disk is not the one that its cluster knows (`BootstrapError::Wiped`).
const WIPED: &str = "must come back as a new id";
/// What one says that was taken out of its cluster (`consensus/removal.rs`).
const REMOVED: &str = "was removed from the cluster";
/// What a master's log begins behind.
const PURGED: &str = "master_raft_purged_index";
const POLL: Duration = Duration::from_millis(20);

/// Hands leadership to the next master, and again. What is refused (there is no leader at this moment) is tried again.
pub(super) async fn transfer_storm(bed: &mut Testbed, times: u32) -> Result<()> {
    let masters = bed.cluster.masters.len();
    let until = Instant::now() + READY_DEADLINE;
    let mut leader = bed.cluster.leader().await?;
    let mut moved = 0;
    while moved < times {
        let next = (leader + 1) % masters;
        let url = format!("{}/api/v1/cluster/transfer", bed.cluster.endpoints[leader]);
        let wish = json!({"to": bed.cluster.ids[next]});
        let answer = bed.cluster.http.post(url).json(&wish).send().await?;
        if answer.status().is_success() {
            leader = next;
            moved += 1;
        } else {
            ensure!(
                Instant::now() < until,
                "leadership moved only {moved} times of {times}: {}",
                answer.text().await?
            );
            leader = bed.cluster.leader().await?;
        }
    }
    Ok(())
}

/// The wiped master, started under its old id, is refused and ends; one with a new id takes its place.
pub(super) async fn replace_wiped(bed: &mut Testbed, master: usize) -> Result<()> {
    let cluster = &mut bed.cluster;
    cluster.masters[master].start()?;
    wait_dismissed(bed, master, WIPED).await?;
    let old = bed.cluster.renew_master(master)?;
    join(bed, master, &["replace", &old.to_string()], &[]).await
}

/// Adds a fourth master, removes `follower`; gives the fourth one's index.
pub(super) async fn churn(bed: &mut Testbed, follower: usize) -> Result<usize> {
    let fourth = bed.add_master()?;
    join(bed, fourth, &["add"], &["--promote"]).await?;
    let id = bed.cluster.ids[follower].to_string();
    bed.cluster.operate(&["cluster", "remove", &id]).await?;
    wait_dismissed(bed, follower, REMOVED).await?;
    Ok(fourth)
}

/// Puts a new master into the follower's place, in exchange for the fourth one.
pub(super) async fn end_churn(bed: &mut Testbed, follower: usize) -> Result<()> {
    let fourth = bed.cluster.masters.len() - 1;
    let id = bed.cluster.ids[fourth].to_string();
    bed.cluster.renew_master(follower)?;
    join(bed, follower, &["replace", &id], &[]).await?;
    wait_dismissed(bed, fourth, REMOVED).await?;
    bed.cluster.retire_last_master()
}

/// Starts a master that is no member yet and makes it one: `mooncakectl cluster <before> <its address> <after>`.
async fn join(bed: &mut Testbed, master: usize, before: &[&str], after: &[&str]) -> Result<()> {
    let cluster = &mut bed.cluster;
    cluster.masters[master].start()?;
    cluster.wait_live(master).await?;
    let rpc = cluster.rpc_addresses[master].clone();
    let command = [&["cluster"], before, &[rpc.as_str()], after].concat();
    let done = cluster.operate(&command).await?;
    let members = done["cluster"]["members"].as_array().context("members")?;
    let role = members
        .iter()
        .find(|m| m["id"] == cluster.ids[master])
        .map(|m| &m["role"]);
    ensure!(
        role.is_some_and(|role| role != "learner"),
        "master {} does not vote: {done:#}",
        cluster.ids[master]
    );
    Ok(())
}

/// Waits until the leader's log begins behind `index`.
pub async fn wait_purged(bed: &mut Testbed, index: u64) -> Result<()> {
    let until = Instant::now() + READY_DEADLINE;
    loop {
        let leader = bed.cluster.leader().await?;
        let purged = bed.cluster.master_metric(leader, PURGED).await;
        // It may be a master that led until now.
        if purged.as_ref().is_ok_and(|&purged| purged > index) {
            return Ok(());
        }
        ensure!(
            Instant::now() < until,
            "the log is purged up to {purged:?}, not behind {index}: are there writes, and is --snapshot-every small?"
        );
        tokio::time::sleep(POLL).await;
    }
}

/// Waits until a master ends because it is no member (any more), for this reason, and says that a person has to act.
async fn wait_dismissed(bed: &mut Testbed, master: usize, reason: &str) -> Result<()> {
    let process = &mut bed.cluster.masters[master];
    let status = process.wait_exit(READY_DEADLINE).await?;
    ensure!(
        dismissed(status.code(), &process.log(), reason),
        "it ended with {status}, not because it {reason}\n{}",
        process.log_tail()
    );
    Ok(())
}

/// By its exit code, and by what it logged of the reason.
fn dismissed(code: Option<i32>, log: &str, reason: &str) -> bool {
    code == Some(NEEDS_A_PERSON) && log.contains(reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_master_that_ends_for_another_reason_is_not_dismissed() {
        let log = "ERROR A wiped master must come back as a new id: remove master 2";
        assert!(dismissed(Some(3), log, WIPED));
        assert!(!dismissed(Some(3), log, REMOVED));
        assert!(!dismissed(
            Some(3),
            "ERROR --data-dir is of another cluster",
            WIPED
        ));
        assert!(!dismissed(Some(1), log, WIPED) && !dismissed(None, log, WIPED));
    }
}
