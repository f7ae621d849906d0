//! One authorised download attempt per artifact at a time, and each byte of the source at most once per attempt.
//!
//! The bytes of broken requests do not count: what the source sent and nobody received has to be sent again. Nor do, once
//! each, the losses that a nemesis caused (`excused`): a client that was killed has lost what it had not recorded.

use super::{Evidence, Findings};
use serde::{Deserialize, Serialize};

/// What the source served of one file in whole requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Served {
    /// `model_id` of the model it belongs to.
    pub model: String,
    /// Its path at the source.
    pub path: String,
    /// How often the byte served most often was served.
    pub times: u64,
    /// Times that are excused.
    pub excused: u64,
}

/// How often the byte covered most often is covered by these half-open ranges.
pub fn most_covered(ranges: &[(u64, u64)]) -> u64 {
    let mut ends: Vec<(u64, i64)> = ranges
        .iter()
        .filter(|(a, b)| a < b)
        .flat_map(|&(a, b)| [(a, 1), (b, -1)])
        .collect();
    // At one place ends come before beginnings.
    ends.sort_unstable();
    let (mut now, mut most) = (0i64, 0i64);
    for (_, step) in ends {
        now += step;
        most = most.max(now);
    }
    most as u64
}

pub(super) fn check(evidence: &Evidence, findings: &mut Findings) {
    let Some(replay) = &evidence.replay else { return };
    for overlap in &replay.overlapping_downloads {
        findings.add(overlap);
    }
    for served in &evidence.served {
        let attempts = replay.downloads.get(&served.model).copied().unwrap_or(0);
        if served.times > attempts + served.excused {
            findings.add(format!(
                "{} of {}: a byte was served {} times for {attempts} authorised attempts ({} more are excused)",
                served.path, served.model, served.times, served.excused
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::testing::*;

    const NAME: &str = "downloads";

    fn served(times: u64, excused: u64) -> Vec<Served> {
        vec![Served {
            model: "m-a".into(),
            path: "model.bin".into(),
            times,
            excused,
        }]
    }

    fn run(times: u64, excused: u64) -> Run {
        let mut run = Run::new();
        let mut log = Log::new(2);
        log.create("a", 0, &[0, 1]);
        let report = log.acquire("a");
        log.fail(&report);
        log.acquire("a");
        run.replay(log);
        run.evidence.served = served(times, excused);
        run
    }

    #[test]
    fn once_per_attempt() {
        assert_eq!(run(2, 0).broken(NAME), 0);
        assert_eq!(run(3, 1).broken(NAME), 0);
        assert_eq!(run(3, 0).broken(NAME), 1);
    }

    #[test]
    fn two_downloads_at_once_are_noticed() {
        let mut run = run(1, 0);
        let replay = run.evidence.replay.as_mut().unwrap();
        replay.overlapping_downloads.push("two".into());
        assert_eq!(run.broken(NAME), 1);
    }

    #[test]
    fn bytes_nobody_was_authorised_for_are_noticed() {
        let mut run = Run::new();
        run.replay(Log::new(1));
        run.evidence.served = served(1, 0);
        assert_eq!(run.broken(NAME), 1);
    }

    #[test]
    fn coverage() {
        assert_eq!(most_covered(&[]), 0);
        assert_eq!(most_covered(&[(0, 4), (4, 8)]), 1);
        assert_eq!(most_covered(&[(0, 5), (4, 8), (4, 5), (6, 6)]), 3);
    }
}
