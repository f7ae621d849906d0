//! The RFC's rules, one pure function each.

use crate::types::{Artifact, Fence, Job, TaskKind};
use mooncake_proto::{
    api::{JobStatus, PlacementState},
    digest::{Algorithm, Digest},
    manifest::Seal,
};

/// What the status of a job follows from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobFacts<'a> {
    /// The status so far.
    pub status: JobStatus,
    /// The data is available inside the cluster (or was while this job ran).
    pub seeded: bool,
    /// A download runs on a node other than the job's seed: the job follows it.
    pub follows: bool,
    /// The seed's state for this job.
    pub seed: PlacementState,
    /// The states of the requested placements.
    pub requested: &'a [PlacementState],
}

/// Snapshot evaluation: placements → job status. Never goes back, and a terminal status absorbs.
///
/// - Before the data is available the seed decides: its failure is the job's, unless the job follows another
///   job's download. After that, a seed that is no target counts no more.
/// - The job ends when every requested placement has ended: `completed` if all are staged, else `failed`. So one
///   failed follower does not keep the others from being staged.
pub fn job_status(facts: &JobFacts<'_>) -> JobStatus {
    use PlacementState as P;
    if facts.status.is_terminal() {
        return facts.status;
    }
    let ended = facts.requested.iter().all(|p| matches!(p, P::Staged | P::Failed));
    let next = if ended && facts.requested.iter().all(|p| *p == P::Staged) {
        JobStatus::Completed
    } else if ended {
        JobStatus::Failed
    } else if facts.seeded {
        JobStatus::Replicating
    } else if facts.seed == P::Failed && !facts.follows {
        JobStatus::Failed
    } else if facts.follows || facts.seed == P::Acquiring || facts.requested.contains(&P::Acquiring) {
        JobStatus::Seeding
    } else {
        JobStatus::Planned
    };
    next.max(facts.status)
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was authorised.
    Started,
    /// It goes on.
    Running,
    /// Download only: every byte is held and proven; publication follows.
    Acquired,
    /// Published.
    Staged,
    /// Failed.
    Failed {
        /// Another attempt may succeed.
        retryable: bool,
    },
}

/// Task outcome → placement state, for one job's view. `failures` counts this failure too. `None`: the outcome
/// does not change this view.
///
/// A failed *download* says nothing about jobs whose seed is another node: the node is then a follower to them,
/// and their placement goes on.
pub fn placement_state(
    before: PlacementState,
    kind: TaskKind,
    is_seed: bool,
    outcome: Outcome,
    failures: u32,
    max_attempts: u32,
) -> Option<PlacementState> {
    use PlacementState as P;
    if matches!(before, P::Staged | P::Failed) {
        return None;
    }
    let after = match outcome {
        Outcome::Started | Outcome::Running | Outcome::Acquired => P::Acquiring,
        Outcome::Staged => P::Staged,
        Outcome::Failed { .. } if kind == TaskKind::Acquire && !is_seed => return None,
        Outcome::Failed { retryable: true } if failures < max_attempts => return None,
        Outcome::Failed { .. } => P::Failed,
    };
    (after != before).then_some(after)
}

/// What the seed is told to do: the RFC's download payload. The blobs named travel beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DownloadPayload {
    /// Blob: the manifest.
    pub manifest: Digest,
    /// Blob: where each of its files is read.
    pub sources: Digest,
    /// The block size of the digest list.
    pub block_size_bytes: u32,
    /// The algorithm of the digest list.
    pub algorithm: Algorithm,
    /// Set: the artifact was sealed before, and the download must reproduce this or fail `source_changed`.
    pub expected_seal: Option<Seal>,
    /// Fences the order.
    pub fence: Fence,
}

/// Manifest → download payload: content and form from the artifact, sources from the job whose attempt it is.
pub fn download_payload(artifact: &Artifact, job: &Job, fence: Fence) -> DownloadPayload {
    DownloadPayload {
        manifest: artifact.manifest,
        sources: job.sources,
        block_size_bytes: artifact.block_size_bytes,
        algorithm: artifact.algorithm,
        expected_seal: artifact.seal,
        fence,
    }
}

/// First pause before another attempt on the same node.
const RETRY_FIRST_MS: u64 = 1_000;
/// Longest pause.
const RETRY_MAX_MS: u64 = 30_000;

/// How long to wait before another attempt, after `failures` in a row.
pub fn retry_delay_ms(failures: u32) -> u64 {
    let doublings = failures.saturating_sub(1).min(16);
    (RETRY_FIRST_MS << doublings).min(RETRY_MAX_MS)
}

/// The statuses from `from` (exclusive) to `to` (inclusive) along the RFC's diagram: a job that was accepted and
/// ended in one step passed through the phase in which it ended.
pub fn job_path(from: JobStatus, to: JobStatus, seeded: bool) -> Vec<JobStatus> {
    use JobStatus as S;
    let mut path = Vec::new();
    if from == S::Planned && to == S::Failed {
        path.push(if seeded { S::Replicating } else { S::Seeding });
    }
    if to == S::Completed && from < S::Replicating {
        path.push(S::Replicating);
    }
    if to != from {
        path.push(to);
    }
    path
}
