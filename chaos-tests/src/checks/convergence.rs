//! After everything is healed, all is well within a bounded time: masters ready and equal, nodes up, jobs ended.

use super::{Evidence, Findings};
use serde::{Deserialize, Serialize};

/// How soon all was well again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Convergence {
    /// What was healed.
    pub after: String,
    /// From the healing until all was well; none: it never was.
    pub took_ms: Option<u64>,
    /// How long it may take.
    pub limit_ms: u64,
    /// What was not well when it was looked at last before that.
    pub waited_for: String,
}

pub(super) fn check(evidence: &Evidence, findings: &mut Findings) {
    for one in &evidence.convergence {
        match one.took_ms {
            Some(took) if took <= one.limit_ms => {}
            Some(took) => findings.add(format!(
                "after {}: it took {took} ms, the limit is {} ms; last was waited for: {}",
                one.after, one.limit_ms, one.waited_for
            )),
            None => findings.add(format!(
                "after {}: not within {} ms and not later either: {}",
                one.after, one.limit_ms, one.waited_for
            )),
        }
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
            run.evidence.convergence.push(Convergence {
                after: "kill-leader".into(),
                took_ms,
                limit_ms: 1000,
                waited_for: "node x is suspected".into(),
            });
            assert_eq!(run.broken("convergence"), broken);
        }
    }
}
