//! One authorised download attempt per artifact at a time, and each byte of the source at most once per attempt.
//!
//! The bytes of broken requests do not count: what the source sent and nobody received has to be sent again. Nor do, once
//! for each, the faults that can make an attempt lose what it had received in whole requests: one of its node, or one of the
//! source, that was active while the attempt was under way. A client that was killed has lost what it had not recorded.
//!
//! When an attempt was under way is known by log indexes; when a fault was active, by times. Answers and looks at the masters
//! bind one to the other; where they leave it open whether both met, the fault is excused.
//!
//! Not judged: how often bytes were served, where the log could not be read from its beginning.

use super::{Evidence, Findings, replay::Attempt};
use crate::history::{Concern, Event, Phase};
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
    if replay.first_index > 0 {
        return;
    }
    let faults = Faults::of(evidence);
    for served in &evidence.served {
        let attempts = replay.downloads.get(&served.model).map_or(&[][..], Vec::as_slice);
        let excused = faults.met(attempts);
        if served.times > (attempts.len() + excused.len()) as u64 {
            findings.add(format!(
                "{} of {}: a byte was served {} times for the authorised attempts {attempts:?}; excused by {excused:?}",
                served.path, served.model, served.times
            ));
        }
    }
}

/// Those that can make a client lose what it received.
struct Faults<'a> {
    faults: Vec<Fault<'a>>,
}

struct Fault<'a> {
    name: &'a str,
    concerns: &'a [Concern],
    /// What was surely applied when it was injected: an attempt that was over by then did not meet it.
    after: u64,
    /// What was surely not surpassed when it was healed: an attempt that was authorised behind this did not meet it.
    before: u64,
}

impl<'a> Faults<'a> {
    fn of(evidence: &'a Evidence) -> Self {
        let of_clients = |e: &&Event| e.concerns.iter().any(|c| *c != Concern::Masters);
        let injected = evidence
            .events
            .iter()
            .filter(|e| e.phase == Phase::Injected)
            .filter(of_clients);
        let faults = injected.map(|event| {
            let healed = evidence
                .events
                .iter()
                .filter(|e| e.phase == Phase::Healed && e.name == event.name && e.at_us >= event.at_us)
                .map(|e| e.at_us)
                .min();
            Fault {
                name: &event.name,
                concerns: &event.concerns,
                after: surely_applied(evidence, event.at_us),
                before: healed.map_or(u64::MAX, |at| surely_not_surpassed(evidence, at)),
            }
        });
        Self {
            faults: faults.collect(),
        }
    }

    /// The names of those that met one of these attempts.
    fn met(&self, attempts: &[Attempt]) -> Vec<&str> {
        let met = |fault: &&Fault| {
            attempts.iter().any(|a| {
                let concerned = fault.concerns.iter().any(|c| match c {
                    Concern::Node(node) => *node == a.node,
                    Concern::Source => true,
                    Concern::Masters | Concern::Disk(_) => false,
                });
                concerned && a.from <= fault.before && a.to.is_none_or(|to| to > fault.after)
            })
        };
        self.faults.iter().filter(met).map(|f| f.name).collect()
    }
}

/// The highest index that anybody saw applied before this time.
fn surely_applied(evidence: &Evidence, at_us: u64) -> u64 {
    let answers = evidence.ops.iter().filter(|op| op.returned_us <= at_us);
    let answers = answers.filter_map(|op| op.answer()?.applied_index);
    let looks = evidence.masters.iter().filter(|m| m.at_us <= at_us);
    answers.chain(looks.map(|m| m.applied_index)).max().unwrap_or(0)
}

/// The lowest index of a linearizable answer to what was asked after this time: all that was committed by then is in it.
fn surely_not_surpassed(evidence: &Evidence, at_us: u64) -> u64 {
    let later = evidence.ops.iter().filter(|op| op.invoked_us >= at_us);
    let read = |op: &crate::history::Op| {
        let answer = op.answer()?;
        let good = (200..300).contains(&answer.status) && op.kind.stale_from().is_none();
        answer.applied_index.filter(|_| good)
    };
    later.filter_map(read).min().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::testing::*;

    const NAME: &str = "downloads";

    fn served(times: u64) -> Vec<Served> {
        vec![Served {
            model: "m-a".into(),
            path: "model.bin".into(),
            times,
        }]
    }

    /// Two attempts by node 0, the first one from index 5 to 6, the second one from 7 on; reads at some times.
    fn run(times: u64) -> Run {
        let mut run = Run::new();
        let mut log = Log::new(2);
        log.create("a", 0, &[0, 1]);
        let report = log.acquire("a");
        log.fail(&report);
        log.acquire("a");
        for (at, index) in [
            (50, 4),
            (100, 5),
            (200, 5),
            (300, 6),
            (400, 6),
            (500, 7),
            (600, 7),
        ] {
            run.read("a", at, at + 10, index);
        }
        run.replay(log);
        run.evidence.served = served(times);
        run
    }

    fn fault(run: &mut Run, concern: Concern, from: u64, to: u64) {
        for (at_us, phase) in [(from, Phase::Injected), (to, Phase::Healed)] {
            run.evidence.events.push(Event {
                at_us,
                name: "fault".into(),
                phase,
                concerns: vec![concern.clone()],
                detail: String::new(),
            });
        }
    }

    #[test]
    fn once_per_attempt() {
        assert_eq!(run(2).broken(NAME), 0);
        assert_eq!(run(3).broken(NAME), 1);
    }

    #[test]
    fn a_fault_that_an_attempt_met_is_excused_and_no_other() {
        let broken = |concern: Concern, from, to| {
            let mut run = run(3);
            fault(&mut run, concern, from, to);
            run.broken(NAME)
        };
        let seed = || Concern::Node(node(0).0);
        assert_eq!(
            broken(seed(), 120, 130),
            0,
            "of its node, during the first attempt"
        );
        assert_eq!(broken(Concern::Source, 120, 130), 0, "of the source");
        assert_eq!(broken(Concern::Node(node(1).0), 120, 130), 1, "of another node");
        assert_eq!(broken(Concern::Masters, 120, 130), 1, "of a master");
        assert_eq!(
            broken(Concern::Disk(node(0).0), 120, 130),
            1,
            "its node is named, too"
        );
        assert_eq!(broken(seed(), 320, 330), 1, "between both attempts");
        assert_eq!(broken(seed(), 320, 505), 0, "until the second one had begun");
        assert_eq!(broken(seed(), 20, 30), 1, "before both");
    }

    #[test]
    fn what_was_before_a_snapshot_is_not_judged() {
        let mut run = run(9);
        run.evidence.replay.as_mut().unwrap().first_index = 5;
        assert_eq!(run.broken(NAME), 0);
    }

    #[test]
    fn two_downloads_at_once_are_noticed() {
        let mut run = run(1);
        let replay = run.evidence.replay.as_mut().unwrap();
        replay.overlapping_downloads.push("two".into());
        assert_eq!(run.broken(NAME), 1);
    }

    #[test]
    fn bytes_nobody_was_authorised_for_are_noticed() {
        let mut run = Run::new();
        run.replay(Log::new(1));
        run.evidence.served = served(1);
        assert_eq!(run.broken(NAME), 1);
    }

    #[test]
    fn coverage() {
        assert_eq!(most_covered(&[]), 0);
        assert_eq!(most_covered(&[(0, 4), (4, 8)]), 1);
        assert_eq!(most_covered(&[(0, 5), (4, 8), (4, 5), (6, 6)]), 3);
    }
}
