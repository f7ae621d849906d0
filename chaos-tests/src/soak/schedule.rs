//! Which faults come when, from a seed.

use crate::{
    nemesis::{Filter, Nemesis, Who},
    source::Behaviour,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::time::Duration;

/// Quiet between two faults.
const QUIET: std::ops::RangeInclusive<Duration> = Duration::from_secs(2)..=Duration::from_secs(5);
/// How long a fault lasts: longer than an election, shorter than what makes a node's grace run out, and longer.
const HOLD: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(8);
/// Of all steps, those in which masters and the data plane have a fault at the same time.
const BOTH: f64 = 0.25;
/// Of the other steps, those with a fault of the masters.
const MASTERS: f64 = 0.7;
const SLOW_BITS_PER_SECOND: u64 = 2_000_000;
const DELAY_MS: u64 = 60;
const LOSS_PERCENT: u8 = 20;
const HAND_OVERS: u32 = 10;
const HOUR_S: i64 = 3600;
const FLIPPED_BITS: u64 = 20;
const SOURCE_BYTES: u64 = 100_000;

/// Faults at the same time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// After the ones before were healed.
    pub after: Duration,
    /// Which.
    pub nemeses: Vec<Nemesis>,
    /// Until they are healed.
    pub hold: Duration,
}

/// What can be done to a testbed.
#[derive(Clone, Copy, Debug)]
pub struct Means {
    /// Number of clients, at least two.
    pub clients: usize,
    /// Wall clocks can be set.
    pub clocks: bool,
}

/// Steps for ever; take as many as there is time for.
pub fn steps(seed: u64, means: Means) -> impl Iterator<Item = Step> {
    let mut rng = StdRng::seed_from_u64(seed);
    std::iter::repeat_with(move || {
        let mut nemeses = Vec::new();
        let both = rng.random_bool(BOTH);
        let masters = rng.random_bool(MASTERS);
        if both || masters {
            nemeses.push(of_masters(&mut rng, means));
        }
        if both || !masters {
            nemeses.push(of_data_plane(&mut rng, means));
        }
        Step {
            after: rng.random_range(QUIET),
            nemeses,
            hold: rng.random_range(HOLD),
        }
    })
}

/// One of these, the first ones more often.
fn of_masters(rng: &mut StdRng, means: Means) -> Nemesis {
    use Who::*;
    let mut choices = vec![
        (4, Nemesis::Kill(Leader)),
        (2, Nemesis::Kill(Follower)),
        (2, Nemesis::Kill(Majority)),
        (1, Nemesis::Kill(All)),
        (4, Nemesis::Freeze(Leader)),
        (1, Nemesis::Freeze(Follower)),
        (4, Nemesis::Isolate(Leader)),
        (2, Nemesis::Isolate(Follower)),
        (2, Nemesis::DeafLeader),
        (2, Nemesis::MuteLeader),
        (3, Nemesis::Bridge),
        (
            2,
            Nemesis::Loss {
                percent: LOSS_PERCENT,
            },
        ),
        (1, Nemesis::SlowLink(Leader, SLOW_BITS_PER_SECOND)),
        (2, Nemesis::Delay(Leader, DELAY_MS)),
        (2, Nemesis::PowerLoss(Leader)),
        (1, Nemesis::PowerLoss(Majority)),
        (1, Nemesis::PowerLoss(All)),
        (1, Nemesis::DiskFull(Leader)),
        (1, Nemesis::DiskFull(Follower)),
        (2, Nemesis::RollingRestart),
        (2, Nemesis::RefuseLeader(Filter::AtFollower)),
        (1, Nemesis::RefuseLeader(Filter::AtLeader)),
        (2, Nemesis::TransferStorm { times: HAND_OVERS }),
        (2, Nemesis::MembershipChurn),
        (1, Nemesis::Wipe(Leader)),
        (1, Nemesis::Wipe(Follower)),
    ];
    if means.clocks {
        choices.push((3, Nemesis::ClockJump(Leader, HOUR_S)));
        choices.push((3, Nemesis::ClockJump(Follower, -HOUR_S)));
    }
    choose(rng, choices)
}

fn of_data_plane(rng: &mut StdRng, means: Means) -> Nemesis {
    let one = rng.random_range(0..means.clients);
    let other = (one + rng.random_range(1..means.clients)) % means.clients;
    let choices = vec![
        (4, Nemesis::KillClient(one)),
        (3, Nemesis::FreezeClient(one)),
        (2, Nemesis::ClientPowerLoss(one)),
        (1, Nemesis::ClientDiskFull(one)),
        (
            2,
            Nemesis::CorruptWire {
                to: one,
                from: other,
                times: FLIPPED_BITS,
            },
        ),
        (1, Nemesis::Source(Behaviour::ServerError)),
        (
            1,
            Nemesis::Source(Behaviour::Stall {
                after_bytes: SOURCE_BYTES,
            }),
        ),
        (1, Nemesis::Source(Behaviour::Short { bytes: SOURCE_BYTES })),
        (1, Nemesis::Source(Behaviour::NoRanges)),
        (1, Nemesis::Source(Behaviour::Changed)),
    ];
    choose(rng, choices)
}

fn choose(rng: &mut StdRng, choices: Vec<(u32, Nemesis)>) -> Nemesis {
    let total = choices.iter().map(|(weight, _)| weight).sum();
    let mut roll = rng.random_range(0..total);
    for (weight, nemesis) in choices {
        match roll.checked_sub(weight) {
            None => return nemesis,
            Some(left) => roll = left,
        }
    }
    unreachable!("the roll is below the sum of the weights")
}

/// Whether the fault can make a client lose what the source sent it in a whole request.
pub fn loses_received_bytes(name: &str) -> bool {
    [
        "kill-client",
        "power-loss-client",
        "freeze-client",
        "disk-full-client",
        "corrupt-",
        "source-",
        "loss",
    ]
    .iter()
    .any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const MEANS: Means = Means {
        clients: 3,
        clocks: true,
    };

    #[test]
    fn a_seed_gives_the_same_schedule() {
        let of = |seed| steps(seed, MEANS).take(50).collect::<Vec<_>>();
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }

    #[test]
    fn every_fault_comes_and_no_two_of_a_step_have_the_same_victim() {
        let mut names = BTreeSet::new();
        for step in steps(3, MEANS).take(3000) {
            assert!((1..=2).contains(&step.nemeses.len()));
            names.extend(step.nemeses.iter().map(Nemesis::name));
            if let Some(Nemesis::CorruptWire { to, from, .. }) = step.nemeses.last() {
                assert_ne!(to, from);
            }
        }
        assert_eq!(names.len(), 28 + 10, "{names:?}");
        let without = Means {
            clocks: false,
            ..MEANS
        };
        let clock = |s: Step| s.nemeses.iter().any(|n| n.name().starts_with("clock"));
        assert!(!steps(3, without).take(3000).any(clock));
    }
}
