//! No election without a fault: a term rises only while something befalls the masters, or shortly after.
//!
//! A fault of the masters begins with its injection and ends when, after its healing, all masters were seen well. When a
//! term rose is known by looks at the masters ([`MasterSeen`]): after the last look at which one of them was below it, and
//! before the first at which one of them had it. It is a violation if all of that time was without such a fault.
//!
//! A machine that stands still is a fault of the masters, too, though nobody injected it: see
//! [`Standstill`](crate::history::Standstill).
//!
//! Not judged: a rise of which the looks do not say that it was in quiet time, be it so. Judged wrongly: one of a machine
//! that kept all threads of a master waiting, but not that of the round which watches for this.

use super::{Evidence, Findings};
use crate::history::{Concern, MasterSeen, Phase};
use std::collections::BTreeMap;

/// After all masters were seen well: they are asked one after the other, so the first ones may have lost a leader who
/// fell behind meanwhile (a second is four of the longest election time-outs); and a look is as old as its time-out allows,
/// two seconds.
pub const SETTLED_AFTER_US: u64 = 3_000_000;

/// After a standstill: who stood for election because of it has won or lost (the longest time-out is half a second).
const STANDSTILL_OVER_US: u64 = 1_000_000;

/// Times during which the masters are disturbed: [from, to).
fn disturbed(evidence: &Evidence) -> Vec<(u64, u64)> {
    let mut events: Vec<_> = evidence
        .events
        .iter()
        .filter(|e| e.concerns.contains(&Concern::Masters))
        .collect();
    events.sort_by_key(|e| e.at_us);
    let mut times = Vec::new();
    let mut since = None;
    for event in events {
        match event.phase {
            Phase::Injected => {
                since.get_or_insert(event.at_us);
            }
            Phase::Healed => {}
            Phase::Well => {
                if let Some(from) = since.take() {
                    times.push((from, event.at_us + SETTLED_AFTER_US));
                }
            }
        }
    }
    times.extend(since.map(|from| (from, u64::MAX)));
    let stills = evidence.standstills.iter();
    times.extend(stills.map(|still| (still.from_us, still.to_us + STANDSTILL_OVER_US)));
    times
}

/// Between which times each term but the first ones began.
fn rises(masters: &[MasterSeen]) -> BTreeMap<u64, (u64, u64)> {
    let mut looks: Vec<_> = masters.iter().collect();
    looks.sort_by_key(|m| m.at_us);
    let mut last: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    let mut rises: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for look in looks {
        if let Some((at_us, term)) = last.insert(look.id, (look.at_us, look.term)) {
            for risen in term + 1..=look.term {
                // Whichever master was the first to have it: at the earliest after the earliest of these looks.
                let (from, to) = rises.entry(risen).or_insert((at_us, look.at_us));
                (*from, *to) = ((*from).min(at_us), (*to).min(look.at_us));
            }
        } else if let Some((_, to)) = rises.get_mut(&look.term) {
            *to = (*to).min(look.at_us);
        }
    }
    rises
}

pub(super) fn check(evidence: &Evidence, findings: &mut Findings) {
    let disturbed = disturbed(evidence);
    for (term, (from, to)) in rises(&evidence.masters) {
        let excused = disturbed.iter().any(|&(begin, end)| begin <= to && from < end);
        if !excused {
            findings.add(format!(
                "term {term} began between {from} and {to} µs, and nothing befell the masters then"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        checks::testing::*,
        history::{Event, Standstill},
    };

    const NAME: &str = "elections";
    const SECOND: u64 = 1_000_000;

    fn look(run: &mut Run, at_us: u64, id: u64, term: u64) {
        run.master(id, term, None, 1, None);
        if let Some(last) = run.evidence.masters.last_mut() {
            last.at_us = at_us;
        }
    }

    fn event(run: &mut Run, at_us: u64, phase: Phase, concern: Concern) {
        run.evidence.events.push(Event {
            at_us,
            name: "fault".into(),
            phase,
            concerns: vec![concern],
            detail: String::new(),
        });
    }

    /// A term that rises between second 10 and 11.
    fn risen() -> Run {
        let mut run = Run::new();
        for at in 0..20 {
            for id in 1..=3 {
                look(&mut run, at * SECOND + id, id, if at > 10 { 8 } else { 7 });
            }
        }
        run
    }

    /// And a fault from second 5 on, healed and well at these seconds.
    fn run(concern: Concern, healed: u64, well: u64) -> u64 {
        let mut run = risen();
        event(&mut run, 5 * SECOND, Phase::Injected, concern.clone());
        event(&mut run, healed * SECOND, Phase::Healed, concern.clone());
        event(&mut run, well * SECOND, Phase::Well, concern);
        run.broken(NAME)
    }

    #[test]
    fn a_fault_of_the_masters_excuses_one_until_they_are_well_and_shortly_after() {
        assert_eq!(run(Concern::Masters, 15, 16), 0, "active");
        assert_eq!(run(Concern::Masters, 6, 15), 0, "not well yet");
        let shortly = 10 - SETTLED_AFTER_US / SECOND + 1;
        assert_eq!(run(Concern::Masters, shortly, shortly), 0, "shortly after");
    }

    #[test]
    fn an_election_in_quiet_times_is_noticed() {
        assert_eq!(run(Concern::Masters, 5, 5), 1, "long over");
        assert_eq!(run(Concern::Node("n".into()), 15, 16), 1, "not of the masters");
        assert_eq!(run(Concern::Source, 15, 16), 1, "not of the masters");
    }

    #[test]
    fn a_machine_that_stands_still_is_a_fault_of_the_masters() {
        let stood_still = |from: u64, to: u64| {
            let mut run = risen();
            run.evidence.standstills.push(Standstill {
                from_us: from * SECOND,
                to_us: to * SECOND,
            });
            run.broken(NAME)
        };
        assert_eq!(stood_still(10, 11), 0);
        assert_eq!(stood_still(7, 8), 1, "long over");
        assert_eq!(stood_still(12, 13), 1, "not yet");
    }

    #[test]
    fn a_master_that_learns_of_a_term_later_is_no_election() {
        let mut run = Run::new();
        event(&mut run, 0, Phase::Injected, Concern::Masters);
        event(&mut run, 2 * SECOND, Phase::Well, Concern::Masters);
        for (at, id, term) in [(0, 1, 1), (0, 2, 1), (1, 1, 2), (20, 2, 2), (21, 3, 2)] {
            look(&mut run, at * SECOND, id, term);
        }
        assert_eq!(run.broken(NAME), 0);
        // The next term is one.
        look(&mut run, 22 * SECOND, 3, 3);
        assert_eq!(run.broken(NAME), 1);
    }
}
