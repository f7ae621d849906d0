//! The RFC's rules, one pure function each.

use crate::types::{Artifact, Fence, TaskKind};
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

/// Manifest → download payload: content and form from the artifact, sources of the job whose attempt it is.
pub fn download_payload(artifact: &Artifact, sources: Digest, fence: Fence) -> DownloadPayload {
    DownloadPayload {
        manifest: artifact.manifest,
        sources,
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

#[cfg(test)]
mod tests {
    #![allow(clippy::type_complexity, reason = "rows of tables")]

    use super::*;
    use crate::tests::{World, job_id, model, node};
    use JobStatus as J;
    use PlacementState as P;

    /// Snapshot evaluation: (status, seeded, follows, seed, requested) → status.
    #[test]
    fn snapshot_evaluation() {
        let table: &[(J, bool, bool, P, &[P], J)] = &[
            // Nothing has begun.
            (
                J::Planned,
                false,
                false,
                P::Planned,
                &[P::Planned, P::Planned],
                J::Planned,
            ),
            // The seed acquires; followers may do so at the same time.
            (
                J::Planned,
                false,
                false,
                P::Acquiring,
                &[P::Acquiring, P::Planned],
                J::Seeding,
            ),
            (
                J::Seeding,
                false,
                false,
                P::Acquiring,
                &[P::Acquiring, P::Acquiring],
                J::Seeding,
            ),
            // A seed that is no target.
            (J::Planned, false, false, P::Acquiring, &[P::Planned], J::Seeding),
            // Another job's seed acquires.
            (J::Planned, false, true, P::Planned, &[P::Planned], J::Seeding),
            // Between two attempts a job does not go back.
            (J::Seeding, false, false, P::Planned, &[P::Planned], J::Seeding),
            // Sealed.
            (
                J::Seeding,
                true,
                false,
                P::Acquiring,
                &[P::Acquiring, P::Acquiring],
                J::Replicating,
            ),
            // Seed reuse: straight to replication.
            (J::Planned, true, false, P::Planned, &[P::Planned], J::Replicating),
            (
                J::Planned,
                true,
                false,
                P::Staged,
                &[P::Staged, P::Planned],
                J::Replicating,
            ),
            // Staged one by one.
            (
                J::Replicating,
                true,
                false,
                P::Staged,
                &[P::Staged, P::Acquiring],
                J::Replicating,
            ),
            (
                J::Replicating,
                true,
                false,
                P::Staged,
                &[P::Staged, P::Staged],
                J::Completed,
            ),
            (
                J::Planned,
                true,
                false,
                P::Staged,
                &[P::Staged, P::Staged],
                J::Completed,
            ),
            // A follower failed: the others go on, then the job has failed.
            (
                J::Replicating,
                true,
                false,
                P::Staged,
                &[P::Staged, P::Failed, P::Acquiring],
                J::Replicating,
            ),
            (
                J::Replicating,
                true,
                false,
                P::Staged,
                &[P::Staged, P::Failed, P::Staged],
                J::Failed,
            ),
            (
                J::Seeding,
                false,
                false,
                P::Acquiring,
                &[P::Acquiring, P::Failed],
                J::Seeding,
            ),
            // All targets failed before the seal: there is nobody left to seed for.
            (J::Seeding, false, false, P::Acquiring, &[P::Failed], J::Failed),
            // The seed failed.
            (
                J::Seeding,
                false,
                false,
                P::Failed,
                &[P::Failed, P::Acquiring],
                J::Failed,
            ),
            (J::Planned, false, false, P::Failed, &[P::Planned], J::Failed),
            // … but the job follows another download, or the data was there already.
            (J::Seeding, false, true, P::Failed, &[P::Acquiring], J::Seeding),
            (
                J::Replicating,
                true,
                false,
                P::Failed,
                &[P::Acquiring],
                J::Replicating,
            ),
            (J::Replicating, true, false, P::Failed, &[P::Staged], J::Completed),
            // Once replicating, never seeding again.
            (
                J::Replicating,
                false,
                true,
                P::Planned,
                &[P::Acquiring],
                J::Replicating,
            ),
            // Terminal absorbs.
            (J::Canceled, true, false, P::Staged, &[P::Staged], J::Canceled),
            (J::Failed, true, false, P::Staged, &[P::Staged], J::Failed),
            (J::Completed, true, false, P::Failed, &[P::Failed], J::Completed),
        ];
        for &(status, seeded, follows, seed, requested, want) in table {
            let facts = JobFacts {
                status,
                seeded,
                follows,
                seed,
                requested,
            };
            assert_eq!(job_status(&facts), want, "{facts:?}");
        }
    }

    /// Task outcome → placement state: (before, kind, is seed, outcome, failures, max) → change.
    #[test]
    fn task_outcome_to_placement_state() {
        use Outcome::{Acquired, Failed, Running, Staged, Started};
        use TaskKind::{Acquire, Replicate};
        let again = Failed { retryable: true };
        let never = Failed { retryable: false };
        let table: &[(P, TaskKind, bool, Outcome, u32, u32, Option<P>)] = &[
            (P::Planned, Acquire, true, Started, 0, 3, Some(P::Acquiring)),
            (P::Planned, Replicate, false, Started, 0, 3, Some(P::Acquiring)),
            (P::Planned, Replicate, false, Running, 0, 3, Some(P::Acquiring)),
            (P::Acquiring, Replicate, false, Running, 0, 3, None),
            // Acquired is not staged: the folder is not published.
            (P::Acquiring, Acquire, true, Acquired, 0, 3, None),
            (P::Acquiring, Acquire, true, Staged, 0, 3, Some(P::Staged)),
            (P::Acquiring, Replicate, false, Staged, 2, 3, Some(P::Staged)),
            // Found on the node without a task.
            (P::Planned, Replicate, false, Staged, 0, 3, Some(P::Staged)),
            // Failures that another attempt may cure, and those that none can.
            (P::Acquiring, Replicate, false, again, 1, 3, None),
            (P::Acquiring, Replicate, false, again, 2, 3, None),
            (P::Acquiring, Replicate, false, again, 3, 3, Some(P::Failed)),
            (P::Acquiring, Replicate, false, again, 1, 1, Some(P::Failed)),
            (P::Acquiring, Replicate, false, never, 1, 3, Some(P::Failed)),
            (P::Acquiring, Acquire, true, again, 1, 2, None),
            (P::Acquiring, Acquire, true, never, 1, 2, Some(P::Failed)),
            (P::Planned, Replicate, false, never, 1, 3, Some(P::Failed)),
            // Another job's download failed here: to this job the node is a follower.
            (P::Acquiring, Acquire, false, never, 3, 3, None),
            // Frozen.
            (P::Staged, Replicate, false, never, 1, 1, None),
            (P::Failed, Replicate, false, Staged, 1, 1, None),
            (P::Failed, Replicate, false, Started, 1, 1, None),
        ];
        for &(before, kind, is_seed, outcome, failures, max, want) in table {
            let got = placement_state(before, kind, is_seed, outcome, failures, max);
            assert_eq!(
                got, want,
                "{before:?} {kind:?} seed={is_seed} {outcome:?} {failures}/{max}"
            );
        }
    }

    #[test]
    fn manifest_to_download_payload() {
        let mut world = World::new(2);
        world.create(0, 0, 0, &[0, 1]);
        let state = &world.state;
        let (artifact, job) = (state.artifact(&model(0)).unwrap(), state.job(&job_id(0)).unwrap());
        let fence = Fence {
            recovery_epoch: 3,
            attempt: 7,
        };
        let payload = download_payload(artifact, job.sources, fence);
        let manifest = state.manifest(&payload.manifest).unwrap();
        let sources = state.sources(&payload.sources).unwrap();
        assert_eq!(manifest.model, model(0));
        assert_eq!(sources.0.len(), manifest.files.len(), "one source per file");
        assert_eq!(payload.fence, fence);
        assert_eq!(
            (payload.block_size_bytes, payload.algorithm),
            (artifact.block_size_bytes, artifact.algorithm)
        );
        assert_eq!(payload.expected_seal, None, "a first download proves the content");
        world.acquire(0, 0, 0);
        world.seal(0, 0, 0);
        let artifact = world.state.artifact(&model(0)).unwrap();
        let job = world.state.job(&job_id(0)).unwrap();
        let again = download_payload(artifact, job.sources, fence);
        assert_eq!(
            again.expected_seal, artifact.seal,
            "a later one must reproduce it"
        );
        assert_eq!(job.seed, node(0));
    }

    #[test]
    fn paths_follow_the_diagram() {
        assert_eq!(job_path(J::Planned, J::Planned, false), []);
        assert_eq!(job_path(J::Planned, J::Seeding, false), [J::Seeding]);
        assert_eq!(
            job_path(J::Planned, J::Completed, true),
            [J::Replicating, J::Completed]
        );
        assert_eq!(
            job_path(J::Seeding, J::Completed, true),
            [J::Replicating, J::Completed]
        );
        assert_eq!(job_path(J::Planned, J::Failed, false), [J::Seeding, J::Failed]);
        assert_eq!(job_path(J::Planned, J::Failed, true), [J::Replicating, J::Failed]);
        assert_eq!(job_path(J::Planned, J::Canceled, false), [J::Canceled]);
        assert_eq!(job_path(J::Replicating, J::Failed, true), [J::Failed]);
    }

    #[test]
    fn retries_wait_longer_and_longer() {
        let delays: Vec<_> = [1, 2, 3, 5, 6, 100, u32::MAX].map(retry_delay_ms).into();
        assert_eq!(delays, [1000, 2000, 4000, 16000, 30000, 30000, 30000]);
    }
}
