//! An answer that says that nothing was done is true.
//!
//! Judged where every create of a job was refused with such an answer by a master: the job must then not be anywhere.
//! A balancer's own error says nothing about what a master did, so it counts as unknown.

use super::{Evidence, Findings};
use crate::history::{Kind, Op};
use mooncake_proto::api::ProblemCode as P;

fn says_nothing_was_done(op: &Op) -> bool {
    matches!(
        op.problem(),
        Some(
            P::InvalidJson
                | P::InvalidRequest
                | P::ArtifactConflict
                | P::Overloaded
                | P::NoLeader
                | P::NotCaughtUp
                | P::Draining
        )
    )
}

pub(super) fn check(evidence: &Evidence, findings: &mut Findings) {
    for (job, ops) in evidence.by_job() {
        let mut creates = ops
            .iter()
            .filter(|op| matches!(op.kind, Kind::Create { .. }))
            .peekable();
        if creates.peek().is_none() || !creates.all(|op| says_nothing_was_done(op)) {
            continue;
        }
        if let Some(op) = ops.iter().find(|op| op.seen().is_some()) {
            findings.add(format!(
                "every create of job {job} was refused, and {} shows it at {} µs",
                op.endpoint, op.returned_us
            ));
        }
        if evidence
            .replay
            .as_ref()
            .is_some_and(|r| r.job_at(job, u64::MAX).is_some())
        {
            findings.add(format!(
                "every create of job {job} was refused, and it is in the committed log"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::checks::testing::*;
    use mooncake_proto::api::ProblemCode::{NoLeader, OutcomeUnknown};

    const NAME: &str = "refused";

    #[test]
    fn an_unknown_outcome_may_have_happened() {
        let mut run = Run::new();
        run.create_problem("a", 0, 5, OutcomeUnknown);
        run.create_problem("a", 5, 8, NoLeader);
        run.read("a", 10, 20, 5);
        run.create_problem("b", 0, 5, NoLeader);
        assert_eq!(run.broken(NAME), 0);
    }

    #[test]
    fn a_refused_create_must_not_appear() {
        let mut run = Run::new();
        run.create_problem("a", 0, 5, NoLeader);
        run.read("a", 10, 20, 5);
        let mut log = Log::new(1);
        log.create("a", 0, &[0]);
        run.replay(log);
        assert_eq!(run.broken(NAME), 2);
    }
}
