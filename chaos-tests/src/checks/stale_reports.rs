//! A report of an attempt that is over changes nothing.
//!
//! Whether a report is stale is judged by the replay on its own, from the placement's fence, the artifact's generation and
//! the node's incarnation before it, not by what the state machine answered.

use super::{Evidence, Findings};

pub(super) fn check(evidence: &Evidence, findings: &mut Findings) {
    for fault in evidence.replay.iter().flat_map(|r| &r.stale_changes) {
        findings.add(fault);
    }
}

#[cfg(test)]
mod tests {
    use crate::checks::testing::*;

    const NAME: &str = "stale_reports";

    fn with_a_late_report(run: &mut Run) -> u64 {
        let mut log = Log::new(2);
        log.create("a", 0, &[0, 1]);
        let report = log.acquire("a");
        log.fail(&report);
        log.acquire("a");
        log.fail(&report);
        run.replay(log);
        run.evidence.replay.as_ref().unwrap().stale_reports
    }

    #[test]
    fn a_stale_report_is_counted_and_changes_nothing() {
        let mut run = Run::new();
        assert_eq!(with_a_late_report(&mut run), 1);
        assert_eq!(run.broken(NAME), 0);
    }

    #[test]
    fn one_that_changes_the_state_is_noticed() {
        // The judge on its own: a state machine that does change is in tests/sabotage.
        let mut run = Run::new();
        let mut log = Log::new(2);
        log.create("a", 0, &[0, 1]);
        let report = log.acquire("a");
        let before = log.state.clone();
        log.fail(&report);
        let stale = mooncake_state::ReportId {
            fence: mooncake_state::Fence {
                recovery_epoch: 0,
                attempt: 99,
            },
            ..report
        };
        let found = crate::checks::replay::judge_report(7, &stale, &before, &log.state);
        assert!(
            found.as_ref().is_some_and(|f| f.contains("attempt: 99")),
            "{found:?}"
        );
        run.replay(log);
        run.evidence.replay.as_mut().unwrap().stale_changes.extend(found);
        assert_eq!(run.broken(NAME), 1);
    }
}
