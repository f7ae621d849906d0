//! One job per id: every acknowledged create of it had the same body, one of them at most made it, and the same body
//! is never a conflict.

use super::{Evidence, Findings};
use crate::history::Kind;
use mooncake_proto::api::ProblemCode;
use std::collections::BTreeSet;

pub(super) fn check(evidence: &Evidence, findings: &mut Findings) {
    for (job, ops) in evidence.by_job() {
        let creates = || {
            ops.iter().filter_map(|op| match &op.kind {
                Kind::Create { body, .. } => Some((op, body.as_str())),
                _ => None,
            })
        };
        let accepted: BTreeSet<&str> = creates()
            .filter(|(op, _)| op.is_acknowledged_write())
            .map(|(_, body)| body)
            .collect();
        if accepted.len() > 1 {
            findings.add(format!(
                "job {job} was acknowledged for different bodies: {accepted:?}"
            ));
        }
        let made = creates()
            .filter(|(op, _)| op.answer().is_some_and(|a| a.status == 201))
            .count();
        if made > 1 {
            findings.add(format!("job {job} was made {made} times (201)"));
        }
        for (op, body) in creates() {
            if op.problem() == Some(ProblemCode::JobConflict) && accepted.contains(body) {
                findings.add(format!(
                    "job {job}: the body that was accepted is a conflict at {} µs",
                    op.returned_us
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::checks::testing::*;
    use mooncake_proto::api::ProblemCode::JobConflict;

    const NAME: &str = "idempotency";

    #[test]
    fn repeats_and_conflicts_are_told_apart() {
        let mut run = Run::new();
        run.create("a", 10, 20, 5);
        run.create_again("a", "body", 30, 40, 6);
        run.create_problem_with("a", "other", 50, 60, JobConflict);
        assert_eq!(run.broken(NAME), 0);
    }

    #[test]
    fn mixed_up_bodies_are_noticed() {
        let mut run = Run::new();
        run.create("a", 10, 20, 5);
        run.create("a", 25, 28, 5);
        run.create_again("a", "other", 30, 40, 6);
        run.create_problem_with("a", "body", 50, 60, JobConflict);
        assert_eq!(run.broken(NAME), 3);
    }
}
