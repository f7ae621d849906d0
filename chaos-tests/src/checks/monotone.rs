//! For one caller nothing goes backwards: version, status, each placement's state and attempt.
//!
//! What promises it: a linearizable read, and a stale read whose `min_index` is at least the index of what the caller has
//! seen of this job. A stale read without promises nothing, and is not judged; but it must honour its `min_index`.

use super::{Evidence, Findings};
use crate::history::{JobSeen, Op};
use mooncake_proto::api::{JobStatus, PlacementState};
use std::collections::BTreeMap;

/// What one caller has seen of one job.
struct Last<'a> {
    seen: &'a JobSeen,
    index: u64,
}

pub(super) fn check(evidence: &Evidence, findings: &mut Findings) {
    let mut callers: BTreeMap<u32, Vec<&Op>> = BTreeMap::new();
    for op in &evidence.ops {
        callers.entry(op.caller).or_default().push(op);
    }
    for (caller, mut ops) in callers {
        ops.sort_by_key(|op| op.invoked_us);
        let mut jobs: BTreeMap<&str, Last> = BTreeMap::new();
        for op in ops {
            let Some(answer) = op.answer() else { continue };
            let index = answer.applied_index.unwrap_or(0);
            let good = (200..300).contains(&answer.status);
            if let Some(from) = op.kind.stale_from()
                && good
                && index < from
            {
                findings.add(format!(
                    "caller {caller}: {} was asked for index {from} or later and answered at {index} ({} µs)",
                    op.endpoint, op.returned_us
                ));
            }
            let Some(seen) = op.seen() else { continue };
            if let Some(last) = jobs.get(seen.job.as_str()) {
                let promised = op.kind.stale_from().is_none_or(|from| from >= last.index);
                let back = back(last.seen, seen);
                if let Some(back) = back.filter(|_| promised) {
                    findings.add(format!(
                        "caller {caller}, job {}: {back} ({} at {} µs)",
                        seen.job, op.endpoint, op.returned_us
                    ));
                }
            }
            let last = jobs.entry(&seen.job).or_insert(Last { seen, index });
            if index >= last.index {
                *last = Last { seen, index };
            }
        }
    }
}

fn status_rank(status: JobStatus) -> u8 {
    match status {
        JobStatus::Planned => 0,
        JobStatus::Seeding => 1,
        JobStatus::Replicating => 2,
        JobStatus::Completed | JobStatus::Failed | JobStatus::Canceled => 3,
    }
}

fn state_rank(state: PlacementState) -> u8 {
    match state {
        PlacementState::Planned => 0,
        PlacementState::Acquiring => 1,
        PlacementState::Staged | PlacementState::Failed => 2,
    }
}

/// What went backwards from `a` to `b`, if anything did.
pub(super) fn back(a: &JobSeen, b: &JobSeen) -> Option<String> {
    if b.version < a.version {
        return Some(format!("version {} after {}", b.version, a.version));
    }
    let (old, new) = (status_rank(a.status), status_rank(b.status));
    if new < old || (old == 3 && a.status != b.status) {
        return Some(format!("status {:?} after {:?}", b.status, a.status));
    }
    for was in &a.placements {
        let Some(is) = b.placements.iter().find(|p| p.node == was.node) else {
            return Some(format!("the placement on {} is gone", was.node));
        };
        let (old, new) = (state_rank(was.state), state_rank(is.state));
        if new < old || (old == 2 && was.state != is.state) {
            return Some(format!("{} is {:?} after {:?}", was.node, is.state, was.state));
        }
        if is.attempt < was.attempt {
            return Some(format!(
                "{} is at attempt {} after {}",
                was.node, is.attempt, was.attempt
            ));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::testing::*;
    use mooncake_proto::api::JobStatus::*;

    const NAME: &str = "monotone";

    #[test]
    fn a_stale_read_without_min_index_may_be_older() {
        let mut run = Run::new();
        run.read_as("a", 0, 1, 9, Replicating);
        run.stale_as("a", 3, 2, 3, 5, Seeding);
        // Another caller has promises of its own.
        run.caller = 2;
        run.stale_as("a", 5, 2, 3, 5, Seeding);
        run.stale_as("a", 5, 4, 5, 9, Replicating);
        assert_eq!(run.broken(NAME), 0);
    }

    #[test]
    fn with_min_index_it_may_not() {
        let mut run = Run::new();
        run.read_as("a", 0, 1, 9, Replicating);
        run.stale_as("a", 9, 2, 3, 5, Seeding);
        assert_eq!(run.broken(NAME), 2, "backwards, and min_index is not honoured");
    }

    #[test]
    fn each_field_is_looked_at() {
        use PlacementState::*;
        let seen = |version, status, state, attempt| JobSeen {
            placements: vec![placement("n", state, attempt)],
            ..job_seen("a", version, status)
        };
        let base = seen(5, Replicating, Acquiring, 3);
        assert_eq!(back(&base, &seen(6, Replicating, Staged, 3)), None);
        for (worse, what) in [
            (seen(4, Replicating, Acquiring, 3), "version"),
            (seen(5, Seeding, Acquiring, 3), "status"),
            (seen(5, Replicating, Planned, 3), "is Planned"),
            (seen(5, Replicating, Acquiring, 2), "attempt 2"),
            (job_seen("a", 5, Replicating), "is gone"),
        ] {
            assert!(back(&base, &worse).unwrap().contains(what), "{what}");
        }
        let staged = seen(5, Replicating, Staged, 3);
        assert!(back(&staged, &seen(6, Replicating, Failed, 3)).is_some());
        assert!(
            back(
                &seen(5, Completed, Staged, 3),
                &seen(5, JobStatus::Failed, Staged, 3)
            )
            .is_some()
        );
    }
}
