//! Which faults come when, from a seed.

use crate::{
    nemesis::{Filter, Nemesis, Who},
    source::Behaviour,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::time::Duration;

/// Quiet between two faults.
const QUIET: std::ops::RangeInclusive<Duration> = Duration::from_secs(2)..=Duration::from_secs(5);
/// How long a fault lasts: longer than an election; longer and shorter than the grace of a node in the rounds that
/// make it short.
const HOLD: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(8);
/// Of all steps, those in which masters and the data plane have a fault at the same time.
const BOTH: f64 = 0.25;
/// Of the other steps, those with a fault of the masters.
const MASTERS: f64 = 0.7;
const SLOW_BITS_PER_SECOND: u64 = 2_000_000;
/// Of bodies that end without an error where ranges are not to be had: a part of most files.
const CUT_BYTES: u64 = 300_000;
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
    /// Masters purge their logs, so that one that was away is sent a snapshot.
    pub snapshots: bool,
}

/// Steps for ever; take as many as there is time for.
pub fn steps(seed: u64, means: Means) -> impl Iterator<Item = Step> {
    let mut rng = StdRng::seed_from_u64(seed);
    std::iter::repeat_with(move || {
        let mut nemeses = Vec::new();
        let both = rng.random_bool(BOTH);
        let masters = rng.random_bool(MASTERS);
        // First, because one of these waits for a download, which masters without a leader do not order.
        if both || !masters {
            nemeses.push(of_data_plane(&mut rng, means));
        }
        if both || masters {
            nemeses.push(of_masters(&mut rng, means));
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
    if means.snapshots {
        choices.push((
            4,
            Nemesis::SlowSnapshot {
                bits_per_second: SLOW_BITS_PER_SECOND,
            },
        ));
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
        (2, Nemesis::CorruptStaging(one)),
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
        (1, Nemesis::Source(Behaviour::Endless)),
        (1, Nemesis::Source(Behaviour::NoRanges)),
        (
            1,
            Nemesis::Source(Behaviour::CutWithoutRanges {
                after_bytes: CUT_BYTES,
            }),
        ),
        (1, Nemesis::Source(Behaviour::NotFound)),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::Concern;
    use std::collections::BTreeSet;

    const MEANS: Means = Means {
        clients: 3,
        clocks: true,
        snapshots: true,
    };
    /// Enough for the rarest fault many times over.
    const STEPS: usize = 5000;

    /// From one list both a match over every [`Nemesis`] there can be, which does not compile before a new one is in
    /// the list, and the names of all that the schedule must draw.
    macro_rules! every_fault {
        (drawn { $($fault:pat => $name:literal,)* } never { $($other:pat => $why:literal,)* }) => {
            const EVERY_FAULT: &[&str] = &[$($name),*];
            /// What is drawn by this name; an error says why it is not drawn.
            fn name(nemesis: &Nemesis) -> Result<&'static str, &'static str> {
                match nemesis {
                    $($fault => Ok($name),)*
                    $($other => Err($why),)*
                }
            }
        };
    }

    every_fault! {
        drawn {
            Nemesis::Kill(Who::Leader) => "kill the leader",
            Nemesis::Kill(Who::Follower) => "kill a follower",
            Nemesis::Kill(Who::Majority) => "kill a majority",
            Nemesis::Kill(Who::All) => "kill all",
            Nemesis::Freeze(Who::Leader) => "freeze the leader",
            Nemesis::Freeze(Who::Follower) => "freeze a follower",
            Nemesis::Isolate(Who::Leader) => "isolate the leader",
            Nemesis::Isolate(Who::Follower) => "isolate a follower",
            Nemesis::DeafLeader => "deaf leader",
            Nemesis::MuteLeader => "mute leader",
            Nemesis::Bridge => "bridge",
            Nemesis::Loss { .. } => "loss",
            Nemesis::SlowLink(Who::Leader, _) => "slow link",
            Nemesis::SlowSnapshot { .. } => "slow snapshot",
            Nemesis::Delay(Who::Leader, _) => "delay",
            Nemesis::PowerLoss(Who::Leader) => "power loss of the leader",
            Nemesis::PowerLoss(Who::Majority) => "power loss of a majority",
            Nemesis::PowerLoss(Who::All) => "power loss of all",
            Nemesis::DiskFull(Who::Leader) => "the leader's disk is full",
            Nemesis::DiskFull(Who::Follower) => "a follower's disk is full",
            Nemesis::Wipe(Who::Leader) => "wipe the leader",
            Nemesis::Wipe(Who::Follower) => "wipe a follower",
            Nemesis::RefuseLeader(Filter::AtFollower) => "refused at a follower",
            Nemesis::RefuseLeader(Filter::AtLeader) => "refused at the leader",
            Nemesis::TransferStorm { .. } => "transfer storm",
            Nemesis::MembershipChurn => "membership churn",
            Nemesis::ClockJump(Who::Leader, 0..) => "the leader's clock ahead",
            Nemesis::ClockJump(Who::Follower, ..0) => "a follower's clock back",
            Nemesis::RollingRestart => "rolling restart",
            Nemesis::KillClient(_) => "kill a client",
            Nemesis::FreezeClient(_) => "freeze a client",
            Nemesis::ClientPowerLoss(_) => "power loss of a client",
            Nemesis::ClientDiskFull(_) => "a client's disk is full",
            Nemesis::CorruptStaging(_) => "corrupt staging",
            Nemesis::CorruptWire { .. } => "corrupt wire",
            Nemesis::Source(Behaviour::ServerError) => "source: 500",
            Nemesis::Source(Behaviour::Stall { .. }) => "source: stall",
            Nemesis::Source(Behaviour::Short { .. }) => "source: short",
            Nemesis::Source(Behaviour::Endless) => "source: endless",
            Nemesis::Source(Behaviour::NoRanges) => "source: no ranges",
            Nemesis::Source(Behaviour::CutWithoutRanges { .. }) => "source: cut without ranges",
            Nemesis::Source(Behaviour::NotFound) => "source: 404",
            Nemesis::Source(Behaviour::Changed) => "source: changed",
        }
        never {
            Nemesis::Source(Behaviour::Honest) => "it is none",
            Nemesis::Freeze(Who::Majority | Who::All) => "as killing them, but that they come back as they were",
            Nemesis::Isolate(Who::Majority | Who::All) => "isolated from each other they are as dead",
            Nemesis::SlowLink(Who::Follower | Who::Majority | Who::All, _) => "the leader's link carries everything",
            Nemesis::Delay(Who::Follower | Who::Majority | Who::All, _) => "a far leader is far from all",
            Nemesis::PowerLoss(Who::Follower) => "it is in the majority's and all's",
            Nemesis::DiskFull(Who::Majority | Who::All) => "as many disks are not full at the same instant",
            Nemesis::Wipe(Who::Majority | Who::All) => "a wiped quorum is lost: that is recovery, by hand",
            Nemesis::ClockJump(..) => "ahead at the leader and back at a follower are what moves time most",
        }
    }

    #[test]
    fn a_seed_gives_the_same_schedule() {
        let of = |seed| steps(seed, MEANS).take(50).collect::<Vec<_>>();
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }

    #[test]
    fn every_fault_comes_and_no_two_of_a_step_have_the_same_victim() {
        let mut names = BTreeSet::new();
        for step in steps(3, MEANS).take(STEPS) {
            assert!((1..=2).contains(&step.nemeses.len()));
            names.extend(
                step.nemeses
                    .iter()
                    .map(|n| name(n).expect("drawn, and said to be never drawn")),
            );
            if let Some(Nemesis::CorruptWire { to, from, .. }) = step.nemeses.first() {
                assert_ne!(to, from);
            }
            let masters = step
                .nemeses
                .iter()
                .filter(|n| n.concerns(&[]).contains(&Concern::Masters));
            assert!(masters.count() <= 1, "{step:?}");
        }
        assert_eq!(
            names,
            EVERY_FAULT.iter().copied().collect(),
            "drawn, and to be drawn"
        );
        let without = Means {
            clocks: false,
            ..MEANS
        };
        let clock = |s: Step| s.nemeses.iter().any(|n| n.name().starts_with("clock"));
        assert!(!steps(3, without).take(STEPS).any(clock));
        let without = Means {
            snapshots: false,
            ..MEANS
        };
        let snapshot = |s: Step| {
            s.nemeses
                .iter()
                .any(|n| matches!(n, Nemesis::SlowSnapshot { .. }))
        };
        assert!(!steps(3, without).take(STEPS).any(snapshot));
    }
}
