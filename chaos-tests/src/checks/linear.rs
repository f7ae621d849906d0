//! Linearizability per job, without the log: a job is a register that only its version orders.
//!
//! Of two linearizable answers, one of which was there before the other was asked for, the later has at least the
//! earlier's version; equal versions are equal snapshots; a read that began after an acknowledged create finds the job
//! (that is [`super::acknowledged`]); one that began after an acknowledged cancel finds it canceled.
//! Not judged: stale reads (see [`super::monotone`]) and lists (see [`super::answers`]).

use super::{Evidence, Findings};
use crate::history::{JobSeen, Kind, Op};
use mooncake_proto::api::JobStatus;
use std::collections::BTreeMap;

pub(super) fn check(evidence: &Evidence, findings: &mut Findings) {
    for (job, ops) in evidence.by_job() {
        let mut reads: Vec<(&Op, &JobSeen)> = ops
            .iter()
            .filter(|op| op.kind.stale_from().is_none())
            .filter_map(|op| Some((*op, op.seen()?)))
            .collect();
        same_version_same_snapshot(job, ops.iter().filter_map(|op| op.seen()), findings);
        let mut ended = reads.clone();
        ended.sort_by_key(|(op, _)| op.returned_us);
        reads.sort_by_key(|(op, _)| op.invoked_us);
        let mut before = ended.into_iter().peekable();
        let mut newest: Option<(&Op, &JobSeen)> = None;
        let mut canceled: Option<&Op> = None;
        for (op, seen) in reads {
            while let Some((earlier, was)) = before.next_if(|(e, _)| e.returned_us < op.invoked_us) {
                if newest.is_none_or(|(_, n)| n.version < was.version) {
                    newest = Some((earlier, was));
                }
                if matches!(earlier.kind, Kind::Cancel { .. }) && earlier.is_acknowledged_write() {
                    canceled.get_or_insert(earlier);
                }
            }
            if let Some((earlier, was)) = newest
                && seen.version < was.version
            {
                findings.add(format!(
                    "job {job}: {} answered version {} at {} µs, and {}, asked at {} µs, version {}",
                    earlier.endpoint,
                    was.version,
                    earlier.returned_us,
                    op.endpoint,
                    op.invoked_us,
                    seen.version
                ));
            }
            if let Some(cancel) = canceled
                && seen.status != JobStatus::Canceled
            {
                findings.add(format!(
                    "job {job} was canceled at {} µs, and {}, asked at {} µs, says {:?}",
                    cancel.returned_us, op.endpoint, op.invoked_us, seen.status
                ));
            }
        }
    }
}

fn same_version_same_snapshot<'a>(
    job: &str,
    all: impl Iterator<Item = &'a JobSeen>,
    findings: &mut Findings,
) {
    let mut versions: BTreeMap<u64, &JobSeen> = BTreeMap::new();
    for seen in all {
        let first = *versions.entry(seen.version).or_insert(seen);
        if first != seen {
            findings.add(format!(
                "job {job}: version {} was answered as {first:?} and as {seen:?}",
                seen.version
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::checks::testing::*;
    use mooncake_proto::api::JobStatus::*;

    const NAME: &str = "linear";

    #[test]
    fn overlapping_reads_may_be_answered_in_any_order() {
        let mut run = Run::new();
        run.create("a", 0, 1, 3);
        run.read_as("a", 10, 30, 7, Seeding);
        run.read_as("a", 20, 40, 5, Seeding);
        run.read_as("a", 50, 60, 7, Seeding);
        run.cancel("a", 70, 80, 9);
        run.read_as("a", 75, 90, 7, Seeding);
        run.read_as("a", 81, 90, 9, Canceled);
        assert_eq!(run.broken(NAME), 0);
    }

    #[test]
    fn a_later_read_of_an_older_version_is_noticed() {
        let mut run = Run::new();
        run.read_as("a", 10, 20, 7, Seeding);
        run.read_as("a", 21, 40, 5, Seeding);
        assert_eq!(run.broken(NAME), 1);
        // A master that answers without asking a quorum.
        run.cancel("b", 10, 20, 9);
        run.read_as("b", 21, 40, 7, Seeding);
        assert_eq!(run.broken(NAME), 3, "the version and the cancel");
    }

    #[test]
    fn one_version_is_one_snapshot() {
        let mut run = Run::new();
        run.read_as("a", 10, 20, 7, Seeding);
        run.read_as("a", 15, 25, 7, Replicating);
        assert_eq!(run.broken(NAME), 1);
    }
}
