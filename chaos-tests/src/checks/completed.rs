//! `completed` if and only if every requested placement is staged: in every answer and along the committed log.

use super::{Evidence, Findings};
use crate::history::JobSeen;
use mooncake_proto::api::{JobStatus, PlacementState};

/// What contradicts it in one snapshot.
fn fault(seen: &JobSeen) -> Option<String> {
    let mut requested = seen.placements.iter().filter(|p| p.requested);
    let all = requested.all(|p| p.state == PlacementState::Staged);
    let completed = seen.status == JobStatus::Completed;
    (all != completed && !seen.placements.is_empty()).then(|| {
        format!(
            "job {} is {:?} in version {} with {:?}",
            seen.job, seen.status, seen.version, seen.placements
        )
    })
}

pub(super) fn check(evidence: &Evidence, findings: &mut Findings) {
    for op in &evidence.ops {
        if let Some(fault) = op.seen().and_then(fault) {
            findings.add(format!("{}: {fault}", op.endpoint));
        }
    }
    for seen in evidence.replay.iter().flat_map(|r| r.jobs.values()).flatten() {
        if let Some(fault) = fault(&seen.1) {
            findings.add(format!("the log at index {}: {fault}", seen.0));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::checks::testing::*;
    use crate::history::JobSeen;
    use mooncake_proto::api::{JobStatus, PlacementState::*};

    const NAME: &str = "completed";

    fn run(status: JobStatus, states: &[mooncake_proto::api::PlacementState]) -> u64 {
        let mut run = Run::new();
        let placements = states
            .iter()
            .enumerate()
            .map(|(i, s)| placement(&i.to_string(), *s, 1));
        let mut seen = JobSeen {
            placements: placements.collect(),
            ..job_seen("a", 5, status)
        };
        // A seed beside the targets does not count.
        let mut seed = placement("seed", Acquiring, 1);
        seed.requested = false;
        seen.placements.push(seed);
        run.answer_job("a", 0, 1, seen);
        run.broken(NAME)
    }

    #[test]
    fn exactly_when_all_are_staged() {
        assert_eq!(run(JobStatus::Completed, &[Staged, Staged]), 0);
        assert_eq!(run(JobStatus::Replicating, &[Staged, Acquiring]), 0);
        assert_eq!(run(JobStatus::Failed, &[Staged, Failed]), 0);
        assert_eq!(run(JobStatus::Completed, &[Staged, Acquiring]), 1);
        assert_eq!(run(JobStatus::Replicating, &[Staged, Staged]), 1);
    }
}
