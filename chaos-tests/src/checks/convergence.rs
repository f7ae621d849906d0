//! After everything is healed, all is well within a bounded time: masters ready and equal, nodes up, jobs ended.

use super::{Evidence, Findings};
use serde::{Deserialize, Serialize};

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Convergence {
    /// From the last healing until all was well; none: it never was.
    pub took_ms: Option<u64>,
    /// How long it may take.
    pub limit_ms: u64,
    /// What was not well when it was looked at last before that.
    pub waited_for: String,
}

pub(super) fn check(evidence: &Evidence, findings: &mut Findings) {
    let Some(end) = &evidence.convergence else { return };
    match end.took_ms {
        Some(took) if took <= end.limit_ms => {}
        Some(took) => findings.add(format!(
            "it took {took} ms, the limit is {} ms; last was waited for: {}",
            end.limit_ms, end.waited_for
        )),
        None => findings.add(format!(
            "not within {} ms and not later either: {}",
            end.limit_ms, end.waited_for
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::testing::*;

    #[test]
    fn late_and_never_are_noticed() {
        for (took_ms, broken) in [(Some(900), 0), (Some(1001), 1), (None, 1)] {
            let mut run = Run::new();
            run.evidence.convergence = Some(Convergence {
                took_ms,
                limit_ms: 1000,
                waited_for: "node x is suspected".into(),
            });
            assert_eq!(run.broken("convergence"), broken);
        }
    }
}
