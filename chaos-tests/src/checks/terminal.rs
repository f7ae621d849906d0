//! Terminal states absorb, over all callers and masters: a job has one terminal snapshot, and none is newer.

use super::{Evidence, Findings};

pub(super) fn check(evidence: &Evidence, findings: &mut Findings) {
    for (job, ops) in evidence.by_job() {
        let seen = || ops.iter().filter_map(|op| op.seen().map(|s| (*op, s)));
        let Some((_, end)) = seen().find(|(_, s)| s.status.is_terminal()) else {
            continue;
        };
        for (op, other) in seen() {
            let changed = other.status.is_terminal() && other != end;
            if changed || (!other.status.is_terminal() && other.version >= end.version) {
                findings.add(format!(
                    "job {job} ended as {:?} in version {}, and {} shows {:?} in version {} at {} µs",
                    end.status, end.version, op.endpoint, other.status, other.version, op.returned_us
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::checks::testing::*;
    use mooncake_proto::api::JobStatus::*;

    const NAME: &str = "terminal";

    #[test]
    fn the_same_end_may_be_read_for_ever() {
        let mut run = Run::new();
        run.read_as("a", 0, 1, 5, Seeding);
        run.read_as("a", 2, 3, 9, Completed);
        run.read_as("a", 4, 5, 9, Completed);
        // A stale read of before.
        run.read_as("a", 6, 7, 5, Seeding);
        assert_eq!(run.broken(NAME), 0);
    }

    #[test]
    fn a_job_does_not_end_twice_nor_come_back() {
        let mut run = Run::new();
        run.read_as("a", 2, 3, 9, Completed);
        run.read_as("a", 4, 5, 10, Failed);
        run.read_as("a", 6, 7, 11, Replicating);
        assert_eq!(run.broken(NAME), 2);
    }
}
