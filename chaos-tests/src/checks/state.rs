//! The state machine's own invariants ([`mooncake_state::invariants`]), along the committed log.

use super::{Evidence, Findings};

pub(super) fn check(evidence: &Evidence, findings: &mut Findings) {
    for fault in evidence.replay.iter().flat_map(|r| &r.state_faults) {
        findings.add(fault);
    }
}

#[cfg(test)]
mod tests {
    use crate::checks::testing::*;

    const NAME: &str = "state";

    #[test]
    fn what_the_replay_found_is_passed_on() {
        let mut run = Run::new();
        let mut log = Log::new(2);
        log.create("a", 0, &[0, 1]);
        log.acquire("a");
        run.replay(log);
        assert_eq!(run.broken(NAME), 0);
        let replay = run.evidence.replay.as_mut().unwrap();
        replay.state_faults.push("index 9: job a is completed".into());
        assert_eq!(run.broken(NAME), 1);
    }
}
