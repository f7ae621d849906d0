//! What a leader does for the cluster itself, beside the jobs: completes a membership change that its predecessor
//! left in half, and raises the cluster's version when every master supports a newer one.

use std::sync::Arc;
use std::time::Duration;

use mooncake_raft_store::NodeId;
use mooncake_state::Command;
use openraft::ChangeMembers;
use openraft::async_runtime::watch::WatchReceiver as _;

use super::handle::Handle;
use super::version;

/// Between two looks. Neither task is urgent: a joint membership works, it only needs both quorums.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long one master may take to say which version it supports.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs until consensus is gone.
pub(crate) async fn run(handle: Handle) {
    let mut leadership = handle.leadership();
    loop {
        if leadership.wait_for(|now| now.is_serving).await.is_err() {
            return;
        }
        complete_change(&handle).await;
        raise_version(&handle).await;
        tokio::time::sleep(INTERVAL).await;
    }
}

async fn complete_change(handle: &Handle) {
    let inner = &handle.inner;
    // A change that this very leader makes is joint for a moment too, and completes itself.
    let Ok(_one) = Arc::clone(&inner.changing).try_lock_owned() else {
        return;
    };
    let joint = {
        let metrics = inner.raft.metrics();
        let metrics = metrics.borrow_watched();
        metrics.membership_config.membership().get_joint_config().len() > 1
    };
    if !joint {
        return;
    }
    tracing::warn!("completing a membership change that an earlier leader left in half");
    let nothing: ChangeMembers<NodeId, mooncake_raft_store::Node> = ChangeMembers::AddVoterIds([].into());
    if let Err(error) = inner.raft.change_membership(nothing, false).await {
        tracing::debug!(%error, "the change is not complete yet");
    }
}

async fn raise_version(handle: &Handle) {
    let current = handle.state().cluster_version();
    if current >= version::supported() {
        return;
    }
    let at = handle.membership_at();
    let cluster = handle.cluster();
    let others = cluster
        .members
        .iter()
        .filter(|member| member.id != cluster.me.node_id);
    let answers = futures_util::future::join_all(others.map(async |member| {
        let answer = handle.inner.peers.ask(&member.rpc_address, PROBE_TIMEOUT).await;
        let same = |answer: &mooncake_proto::pb::raft::ProbeResponse| answer.disk_id == member.disk_id;
        answer.ok().filter(same).map(|answer| version::of_probe(&answer))
    }))
    .await;
    // Every master has to be asked: one that is away may come back as what it was.
    let Some(answers) = answers.into_iter().collect::<Option<Vec<_>>>() else {
        tracing::debug!(
            current,
            "the cluster's version is not raised: not every master answers"
        );
        return;
    };
    let version = answers.into_iter().fold(version::supported(), u32::min);
    if version <= current {
        return;
    }
    // Nobody joins between the question and the answer that is in the log: who was added has been asked, or is asked
    // under the new version. Not held while the questions are under way, which may take seconds.
    let Ok(_one) = Arc::clone(&handle.inner.changing).try_lock_owned() else {
        return;
    };
    if handle.membership_at() != at {
        return;
    }
    let now_ms = handle.state().time_ms();
    match handle
        .propose(&Command::SetClusterVersion { version, now_ms })
        .await
    {
        Ok(_) => tracing::info!(
            from = current,
            to = version,
            "raised the cluster's version: every master supports it"
        ),
        Err(error) => tracing::debug!(%error, "the cluster's version is not raised yet"),
    }
}
