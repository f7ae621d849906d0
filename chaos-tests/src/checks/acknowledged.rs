//! An acknowledged job is never lost.
//!
//! Judged by linearizable reads that began after the acknowledgement, by stale reads whose `min_index` is at or behind
//! the acknowledgement's, and by the committed log itself.

use super::{Evidence, Findings};
use crate::history::Kind;
use mooncake_proto::api::ProblemCode;

pub(super) fn check(evidence: &Evidence, findings: &mut Findings) {
    for (job, ops) in evidence.by_job() {
        let acknowledged =
            |op: &&&crate::history::Op| matches!(op.kind, Kind::Create { .. }) && op.is_acknowledged_write();
        let Some(first) = ops.iter().filter(acknowledged).min_by_key(|op| op.returned_us) else {
            continue;
        };
        let index = first.answer().and_then(|a| a.applied_index).unwrap_or(u64::MAX);
        for op in &ops {
            if op.problem() != Some(ProblemCode::JobNotFound) {
                continue;
            }
            let must_see = match op.kind.stale_from() {
                None => op.invoked_us > first.returned_us,
                Some(from) => from >= index,
            };
            if must_see {
                findings.add(format!(
                    "job {job} was acknowledged at {} µs (index {index}), and {} at {} µs says that there is no such job: {:?}",
                    first.returned_us, op.endpoint, op.invoked_us, op.kind
                ));
            }
        }
        if let Some(replay) = &evidence.replay
            && replay.job_at(job, u64::MAX).is_none()
        {
            findings.add(format!(
                "job {job} was acknowledged at {} µs and is not in the committed log",
                first.returned_us
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::checks::testing::*;
    use mooncake_proto::api::ProblemCode::JobNotFound;

    const NAME: &str = "acknowledged";

    #[test]
    fn a_job_may_be_missing_before_it_is_acknowledged() {
        let mut run = Run::new();
        run.create("a", 10, 20, 5);
        // It overlaps the create.
        run.read_problem("a", 15, 25, JobNotFound, 4);
        run.stale_problem("a", 4, 30, 40, JobNotFound, 4);
        run.read("a", 30, 40, 6);
        assert_eq!(run.broken(NAME), 0);
    }

    #[test]
    fn a_later_read_must_see_it() {
        let mut run = Run::new();
        run.create("a", 10, 20, 5);
        run.read_problem("a", 21, 30, JobNotFound, 4);
        run.stale_problem("a", 5, 50, 60, JobNotFound, 5);
        assert_eq!(run.broken(NAME), 2);
    }

    #[test]
    fn the_log_must_hold_it() {
        let mut run = Run::new();
        run.create("lost", 10, 20, 5);
        run.replay(Log::new(1));
        assert_eq!(run.broken(NAME), 1);
    }
}
