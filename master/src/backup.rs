//! Takes a backup of the applied state: the file of [`mooncake_proto::backup`], in memory.
//!
//! Guaranteed: it is the state at one log index, with the membership of that index. Not guaranteed: that it is current;
//! confirm a read index first where that matters.

use bytes::Bytes;
use mooncake_proto::backup::{self, BackupInfo};
use mooncake_raft_store::{SnapshotMeta, encode_snapshot_meta};
use mooncake_state::State;

use crate::consensus::{Handle, SOFTWARE};

/// A backup, ready to be sent.
pub(crate) struct Taken {
    /// The last entry in it.
    pub(crate) index: u64,
    /// Of all parts.
    pub(crate) size_bytes: u64,
    /// In order.
    pub(crate) parts: [Bytes; 3],
}

/// Blocking, as long as encoding the state takes.
pub(crate) fn take(consensus: &Handle) -> Taken {
    // A copy is cheap; it is encoded without the lock.
    let (meta, state) = consensus.copy_state();
    let info = describe(&meta, &state, consensus);
    let state = state.encode_snapshot();
    let head = backup::head(&info, &encode_snapshot_meta(&meta), state.len() as u64);
    let digest = backup::digest(&head, &state);
    Taken {
        index: info.index,
        size_bytes: backup::size_bytes(&head, state.len() as u64),
        parts: [head.into(), state.into(), Bytes::copy_from_slice(&digest)],
    }
}

fn describe(meta: &SnapshotMeta, state: &State, consensus: &Handle) -> BackupInfo {
    let identity = consensus.identity();
    let last = meta.last_log_id.as_ref();
    let now_ms = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64);
    BackupInfo {
        cluster_id: identity.cluster_id.clone(),
        taken_at: mooncake_proto::time::rfc3339(now_ms),
        taken_by: identity.node_id,
        software: SOFTWARE.into(),
        term: last.map_or(0, |id| id.committed_leader_id().term),
        index: last.map_or(0, |id| id.index()),
        cluster_version: state.cluster_version(),
        recovery_epoch: state.recovery_epoch(),
        members: meta
            .last_membership
            .nodes()
            .map(|(id, node)| format!("{id}={}/{}", node.rpc_address, node.http_address))
            .collect(),
        jobs: state.jobs().count() as u64,
        live_jobs: state.live_job_count() as u64,
        nodes: state.nodes().count() as u64,
        models: state.artifacts().count() as u64,
    }
}
