use super::{
    choice::{BEHIND_LEAST, ENDGAME_AGE_US, ENDGAME_MIN, SHARE_US, STARVED_US},
    stalls::{SILENT_DROP_US, STALL_DROP_US, STALL_US},
    *,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashSet};

const BS: u32 = 256 << 10;

fn traits(n: u32, seed: bool) -> PeerTraits {
    PeerTraits {
        hash: hash_id(&format!("n{n}")),
        seed,
        near: true,
    }
}

fn chooser(blocks: u32) -> Chooser {
    Chooser::new(hash_id("me"), blocks, BS)
}

/// Adds a peer of which a block was verified before.
fn add(c: &mut Chooser, n: u32, t: PeerTraits) {
    c.add_peer(n, t);
    c.peers.get_mut(&n).unwrap().trusted = true;
}

fn drain(c: &mut Chooser, now_us: u64) -> Vec<Pick> {
    std::iter::from_fn(|| c.next(now_us)).collect()
}

#[test]
fn the_seed_is_asked_only_for_what_no_other_has() {
    let mut c = chooser(8);
    add(&mut c, 0, traits(0, true));
    add(&mut c, 1, traits(1, false));
    (0..8).for_each(|b| {
        c.announce(0, b, 0);
    });
    (0..4).for_each(|b| {
        c.announce(1, b, 0);
    });
    let own = drain(&mut c, SHARE_US - 1);
    assert!(
        own.iter().all(|p| p.peer == 1 || c.shares.owns(p.block)),
        "{own:?}"
    );
    let picks: Vec<Pick> = own.into_iter().chain(drain(&mut c, SHARE_US)).collect();
    for p in &picks {
        assert_eq!(p.peer, u32::from(p.block < 4), "{p:?}");
        assert_eq!(p.unless_sent, p.peer == 0, "{p:?}");
    }
    assert_eq!(
        picks.iter().filter(|p| p.peer == 0).count(),
        4,
        "the window at the start"
    );
}

#[test]
fn alone_with_the_seed_everything_is_asked_of_it_without_condition() {
    let mut c = chooser(3);
    add(&mut c, 0, traits(0, true));
    (0..3).for_each(|b| {
        c.announce(0, b, 0);
    });
    let picks = drain(&mut c, 0);
    assert_eq!(picks.len(), 3);
    assert!(picks.iter().all(|p| !p.unless_sent));
}

#[test]
fn rarest_first_and_each_block_once() {
    let mut c = chooser(6);
    for n in 0..3 {
        add(&mut c, n, traits(n, false));
    }
    (0..6).for_each(|b| {
        c.announce(0, b, 0);
    });
    (0..4).for_each(|b| {
        c.announce(1, b, 0);
    });
    (0..2).for_each(|b| {
        c.announce(2, b, 0);
    });
    let picks = drain(&mut c, 0);
    let blocks: Vec<u32> = picks.iter().map(|p| p.block).collect();
    assert_eq!(
        blocks.iter().collect::<BTreeSet<_>>().len(),
        6,
        "each once: {picks:?}"
    );
    let from_0: Vec<u32> = picks.iter().filter(|p| p.peer == 0).map(|p| p.block).collect();
    assert!(
        from_0.contains(&4) && from_0.contains(&5),
        "only 0 has these: {picks:?}"
    );
}

#[test]
fn another_rack_is_asked_only_for_what_the_own_has_not() {
    let mut c = chooser(4);
    c.add_peer(
        0,
        PeerTraits {
            near: false,
            ..traits(0, false)
        },
    );
    add(&mut c, 1, traits(1, false));
    (0..4).for_each(|b| {
        c.announce(0, b, 0);
    });
    (0..2).for_each(|b| {
        c.announce(1, b, 0);
    });
    for p in drain(&mut c, 0) {
        assert_eq!(p.peer == 1, p.block < 2, "{p:?}");
    }
}

#[test]
fn nodes_share_what_only_the_seed_has_among_them() {
    // Three receivers that know each other: their first 60 choices at the seed are disjoint.
    let names = ["x", "y", "z"];
    let mut seen = HashSet::new();
    for me in names {
        let mut c = Chooser::new(hash_id(me), 300, BS);
        add(&mut c, 0, traits(0, true));
        for (i, other) in names.iter().filter(|o| **o != me).enumerate() {
            c.add_peer(
                1 + i as u32,
                PeerTraits {
                    hash: hash_id(other),
                    seed: false,
                    near: true,
                },
            );
        }
        (0..300).for_each(|b| {
            c.announce(0, b, 0);
        });
        for i in 0..60 {
            let pick = c.next(i).expect("the seed has it");
            assert!(seen.insert(pick.block), "block {} is taken twice", pick.block);
            c.delivered(0, pick.block, BS.into(), i);
            c.obtained(pick.block);
        }
    }
}

#[test]
fn a_declined_block_is_asked_elsewhere_or_later() {
    let mut c = chooser(1);
    add(&mut c, 0, traits(0, true));
    add(&mut c, 1, traits(1, false));
    c.announce(0, 0, 0);
    let begin = SHARE_US;
    assert_eq!(
        c.next(begin),
        Some(Pick {
            peer: 0,
            block: 0,
            unless_sent: true
        })
    );
    assert_eq!(c.next(begin), None);
    c.declined(0, 0, Decline::SentElsewhere, begin + 10);
    assert_eq!(c.next(begin + 20), None, "it is on its way to somebody");
    c.announce(1, 0, begin);
    assert_eq!(c.next(begin + 30).map(|p| p.peer), Some(1));
    c.declined(1, 0, Decline::NotHeld, begin + 40);
    assert_eq!(c.next(begin + 50), None);
    assert_eq!(
        c.next(begin + 10 + DEFER_US).map(|p| p.peer),
        Some(0),
        "nobody got it after all"
    );
}

#[test]
fn who_waits_for_what_nobody_has_is_not_starved() {
    let mut c = chooser(2);
    add(&mut c, 0, traits(0, true));
    add(&mut c, 1, traits(1, false));
    for t in 0..10 {
        assert_eq!(c.next(t * STARVED_US), None);
    }
    // The next block is asked for by the rules, not as a second copy at once.
    c.announce(0, 0, 10 * STARVED_US);
    c.announce(1, 0, 10 * STARVED_US);
    c.peers.get_mut(&1).unwrap().busy_until_us = u64::MAX;
    assert_eq!(c.next(10 * STARVED_US), None);
    assert_eq!(c.next(11 * STARVED_US).map(|p| p.peer), Some(0));
}

#[test]
fn a_gateway_brings_in_its_share_and_before_all_else() {
    // Three gateways of one rack and a relay elsewhere that has everything.
    let names = ["x", "y", "z"];
    let mut imported = BTreeSet::new();
    for me in names {
        let mut c = Chooser::new(hash_id(me), 300, BS);
        for (i, other) in names.iter().filter(|o| **o != me).enumerate() {
            let t = PeerTraits {
                hash: hash_id(other),
                seed: false,
                near: true,
            };
            add(&mut c, 1 + i as u32, t);
        }
        let far = PeerTraits {
            near: false,
            ..traits(9, false)
        };
        add(&mut c, 9, far);
        (0..300).for_each(|b| {
            c.announce(9, b, 0);
        });
        // What the rack has is not brought in again.
        (0..30).for_each(|b| {
            c.announce(1, b, 0);
        });
        let first = c.next(0).unwrap();
        assert_eq!((first.peer, first.unless_sent), (9, false));
        let mut picks = vec![first];
        for i in 0.. {
            let last = *picks.last().unwrap();
            c.delivered(last.peer, last.block, BS.into(), i);
            c.obtained(last.block);
            match c.next(i) {
                Some(pick) => picks.push(pick),
                None => break,
            }
        }
        for p in picks {
            assert_eq!(p.peer == 9, p.block >= 30, "{p:?}");
            assert!(
                p.peer != 9 || imported.insert(p.block),
                "{p:?} is brought in twice"
            );
        }
    }
    assert_eq!(imported, (30..300).collect(), "all of it is somebody's");
}

#[test]
fn who_is_far_behind_leaves_first_copies_to_others() {
    let (blocks, relays) = (16 * BEHIND_LEAST, 8);
    let mut c = chooser(blocks);
    for n in 0..=relays {
        add(&mut c, n, traits(n, n == 0));
        (0..if n == 0 { blocks } else { blocks / 2 }).for_each(|b| {
            c.announce(n, b, 0);
        });
    }
    // Each peer gives a block in 50 ms: how many of so many rounds' were the seed's.
    let mut now = SHARE_US;
    let mut firsts = |c: &mut Chooser, rounds: u32, gives: u32| {
        let mut firsts = 0;
        for _ in 0..rounds {
            while c.next(now).is_some() {}
            now += 50_000;
            for peer in 0..=gives {
                let first = c.peers[&peer].asked.iter().next();
                if let Some(block) = first.map(|(block, _)| *block) {
                    c.delivered(peer, block, BS.into(), now);
                    c.obtained(block);
                    firsts += u32::from(peer == 0);
                }
            }
        }
        firsts
    };
    assert_eq!(
        firsts(&mut c, 10, 2),
        10,
        "three of nine senders are the seed: it is needed"
    );
    // What was asked of it before still comes.
    firsts(&mut c, 15, relays);
    assert_eq!(
        firsts(&mut c, 15, relays),
        0,
        "relays fill the link, with what nobody else asks for"
    );
    firsts(&mut c, 30, relays);
    assert!(firsts(&mut c, 10, relays) >= 9, "caught up");
}

#[test]
fn a_starved_node_may_have_a_second_copy() {
    let mut c = chooser(4);
    add(&mut c, 0, traits(0, true));
    add(&mut c, 1, traits(1, false));
    (0..4).for_each(|b| {
        (0..2).for_each(|p| {
            c.announce(p, b, 0);
        })
    });
    let first = drain(&mut c, 0);
    assert!(first.iter().all(|p| p.peer == 1));
    for p in first {
        c.declined(1, p.block, Decline::Busy, 10);
    }
    assert_eq!(c.next(11), None, "1 is busy, the seed is not for second copies");
    // Still busy (it declines again and again).
    let mut now = 11;
    while now < STARVED_US + 11 {
        now += BUSY_US;
        for p in drain(&mut c, now) {
            assert_eq!(p.peer, 1);
            c.declined(1, p.block, Decline::Busy, now);
        }
    }
    c.peers.get_mut(&1).unwrap().busy_until_us = u64::MAX;
    assert_eq!(c.next(now + 1), None);
    let pick = c.next(now + 1 + STARVED_US).expect("starved");
    assert_eq!((pick.peer, pick.unless_sent), (0, false));
}

#[test]
fn a_stalled_peer_is_passed_over_until_it_delivers() {
    let mut c = chooser(2);
    add(&mut c, 0, traits(0, false));
    c.announce(0, 0, 0);
    c.announce(0, 1, 0);
    assert_eq!(drain(&mut c, 0).len(), 2);
    assert_eq!(c.tick(STALL_US * 3), [], "nobody else has these");
    add(&mut c, 1, traits(1, false));
    c.announce(1, 0, 0);
    let stalls = c.tick(STALL_US * 3);
    assert_eq!(
        stalls,
        [Stall {
            peer: 0,
            cancel: vec![0],
            drop: false
        }]
    );
    assert_eq!(
        c.next(STALL_US * 3),
        Some(Pick {
            peer: 1,
            block: 0,
            unless_sent: false
        })
    );
    // The stalled one delivers after all: the other is told.
    let d = c.delivered(0, 0, BS.into(), STALL_US * 3 + 1);
    assert_eq!(
        d,
        Delivery {
            wanted: true,
            cancel: vec![1]
        }
    );
    assert_eq!(c.holders[1].all, 1, "it counts again");
    // The block that was canceled may arrive from 1, and is not wanted.
    assert!(!c.delivered(1, 0, BS.into(), STALL_US * 3 + 2).wanted);
}

#[test]
fn a_peer_that_stays_stalled_is_dropped() {
    let mut c = chooser(1);
    for n in 0..2 {
        add(&mut c, n, traits(n, false));
        c.announce(n, 0, 0);
    }
    let first = c.next(0).unwrap();
    assert_eq!(c.tick(STALL_US).len(), 1);
    let drops = c.tick(STALL_US + STALL_DROP_US);
    assert_eq!(
        drops,
        [Stall {
            peer: first.peer,
            cancel: vec![],
            drop: true
        }]
    );
    c.remove_peer(first.peer);
    assert_ne!(c.next(STALL_US + STALL_DROP_US).unwrap().peer, first.peer);
}

/// It answers pings and no request: it would keep what it was asked for, and the budget for it, for ever.
#[test]
fn the_only_holder_is_dropped_too_when_it_answers_nothing() {
    let mut c = chooser(2);
    add(&mut c, 0, traits(0, true));
    c.announce(0, 0, 0);
    c.announce(0, 1, 0);
    assert_eq!(drain(&mut c, 0).len(), 2);
    // Any answer shows that it is there.
    c.delivered(0, 0, BS.into(), 1000);
    c.obtained(0);
    assert_eq!(
        c.tick(SILENT_DROP_US + 999),
        [],
        "nobody else has the other one: waiting is all there is"
    );
    let stalls = c.tick(SILENT_DROP_US + 1000);
    let dropped = Stall {
        peer: 0,
        cancel: vec![],
        drop: true,
    };
    assert_eq!(stalls, [dropped]);
    // Its next connection is asked anew.
    c.remove_peer(0);
    add(&mut c, 1, traits(0, true));
    c.announce(1, 1, SILENT_DROP_US);
    let next = c.next(SILENT_DROP_US + 1000);
    assert_eq!(next.map(|p| (p.peer, p.block)), Some((1, 1)));
}

#[test]
fn a_request_whose_word_does_not_count_any_more_stands_in_nobodys_way() {
    let mut c = chooser(1);
    for n in 0..2 {
        add(&mut c, n, traits(n, false));
    }
    c.announce(0, 0, 0);
    assert_eq!(c.next(0).map(|p| p.peer), Some(0));
    // Another word counts: 1 has the right block, what 0 would send is of no use.
    assert!(c.retract(0, 0), "the request is to be canceled");
    assert!(!c.retract(0, 0), "once");
    c.announce(1, 0, 0);
    assert_eq!(c.next(1).map(|p| p.peer), Some(1), "at once");
    // It does not even answer the cancel: it is stalled, then dropped.
    c.delivered(1, 0, BS.into(), 2);
    c.failed(0);
    let stall = |drop| Stall {
        peer: 0,
        cancel: vec![],
        drop,
    };
    assert_eq!(c.tick(STALL_US), [stall(false)]);
    assert_eq!(c.tick(STALL_US + STALL_DROP_US), [stall(true)]);
}

#[test]
fn endgame_asks_a_second_peer_for_late_blocks_only_and_rarely() {
    let mut c = chooser(8);
    for n in 0..4 {
        add(&mut c, n, traits(n, false));
        (0..8).for_each(|b| {
            c.announce(n, b, 0);
        });
    }
    let first = drain(&mut c, 0);
    assert_eq!(first.len(), 8);
    assert_eq!(c.next(ENDGAME_AGE_US - 1), None, "nothing is late yet");
    // Two peers are done; the others are late.
    let (fast, slow): (Vec<Pick>, Vec<Pick>) = first.iter().partition(|p| p.peer < 2);
    for p in &fast {
        c.delivered(p.peer, p.block, BS.into(), 1000);
        c.obtained(p.block);
    }
    let again = drain(&mut c, ENDGAME_AGE_US);
    assert!(
        !again.is_empty() && again.len() <= 2,
        "one for each idle peer: {again:?}"
    );
    for p in &again {
        assert!(p.peer < 2 && slow.iter().any(|s| s.block == p.block));
    }
    // The second wins: the first is told.
    let won = again[0];
    let lost = slow.iter().find(|s| s.block == won.block).unwrap();
    assert_eq!(
        c.delivered(won.peer, won.block, BS.into(), ENDGAME_AGE_US + 1)
            .cancel,
        [lost.peer]
    );
    assert!(c.duplicates() <= ENDGAME_MIN);
}

#[test]
fn what_takes_as_long_as_everything_does_is_not_late() {
    const USUAL_US: u64 = 400_000;
    let mut c = chooser(16);
    for n in 0..4 {
        add(&mut c, n, traits(n, false));
        (0..16).for_each(|b| {
            c.announce(n, b, 0);
        });
    }
    // A narrow link that all share: whatever is asked for takes so long.
    let mut now_us = 0;
    let mut last = drain(&mut c, now_us);
    while c.missing() > 2 {
        now_us += USUAL_US;
        let few = last.len().saturating_sub(2);
        for p in last.drain(..few.max(1)) {
            c.delivered(p.peer, p.block, BS.into(), now_us);
            c.obtained(p.block);
        }
        last.extend(drain(&mut c, now_us));
    }
    assert_eq!(c.duplicates(), 0, "nothing was late");
    let idle_at = now_us + 10 * USUAL_US;
    assert!(
        !drain(&mut c, idle_at).is_empty(),
        "and what is late is asked of others"
    );
}

#[test]
fn of_two_peers_the_slow_one_does_not_say_what_is_late() {
    const SLOW_US: u64 = 5_000_000;
    let mut c = chooser(3);
    for n in 0..2 {
        add(&mut c, n, traits(n, false));
        c.announce(n, n, 0);
    }
    assert_eq!(drain(&mut c, 0).len(), 2);
    for (peer, at_us) in [(0, 50_000), (1, SLOW_US)] {
        c.delivered(peer, peer, BS.into(), at_us);
        c.obtained(peer);
    }
    c.announce(1, 2, SLOW_US);
    assert_eq!(drain(&mut c, SLOW_US)[0].peer, 1);
    c.announce(0, 2, SLOW_US);
    assert_eq!(c.next(SLOW_US + ENDGAME_AGE_US - 1), None);
    let again = c.next(SLOW_US + ENDGAME_AGE_US).map(|p| (p.peer, p.block));
    assert_eq!(again, Some((0, 2)));
}

#[test]
fn a_new_peer_gets_one_block_to_prove_itself() {
    let mut c = chooser(20);
    c.add_peer(1, traits(1, false));
    (0..20).for_each(|b| {
        c.announce(1, b, 0);
    });
    let first = drain(&mut c, 0);
    assert_eq!(first.len(), 1);
    c.delivered(1, first[0].block, BS.into(), 1000);
    assert_eq!(c.next(1001), None, "not while it is being verified");
    c.failed(first[0].block);
    assert_eq!(drain(&mut c, 1002).len(), 1, "still one");
    let again = *c.peers[&1].asked.keys().next().unwrap();
    c.delivered(1, again, BS.into(), 2000);
    c.obtained(again);
    assert!(drain(&mut c, 2001).len() > 1);
}

#[test]
fn the_window_follows_the_path() {
    let mut c = chooser(4000);
    add(&mut c, 0, traits(0, false));
    (0..4000).for_each(|b| {
        c.announce(0, b, 0);
    });
    // 100 MB/s with 50 ms of latency: a block takes 2.6 ms on the wire, 19 are in flight.
    let (mut now, mut wire_free, mut flying) = (0, 0, std::collections::VecDeque::new());
    let mut most = 0;
    while !c.whole() {
        for p in drain(&mut c, now) {
            wire_free = now.max(wire_free) + 2621;
            flying.push_back((wire_free + 50_000, p.block));
        }
        most = most.max(flying.len());
        let (at, block) = flying.pop_front().unwrap();
        now = now.max(at);
        assert!(c.delivered(0, block, BS.into(), now).wanted);
        c.obtained(block);
    }
    assert!(most >= 20, "the window grew to {most}");
    assert!(most <= 60, "the window grew to {most}");
    let ideal = 4000 * 2621;
    assert!(now < ideal * 11 / 10, "took {now} us, the wire alone {ideal}");
}

/// On one host, or in one rack, a block is there sooner than the task that waits for it gets a core, mostly.
#[test]
fn a_short_path_is_kept_busy_by_a_busy_node() {
    const WAITS_US: u64 = 2_000;
    let mut c = chooser(8000);
    add(&mut c, 0, traits(0, false));
    (0..8000).for_each(|b| {
        c.announce(0, b, 0);
    });
    // 1 GB/s with 0.1 ms of latency.
    let (mut now, mut wire_free, mut flying) = (0, 0, std::collections::VecDeque::new());
    let (mut most, mut looks) = (0, 0);
    while !c.whole() {
        for p in drain(&mut c, now) {
            wire_free = now.max(wire_free) + 262;
            flying.push_back((wire_free + 100, p.block));
        }
        most = most.max(flying.len());
        looks += 1;
        now = match looks % 16 {
            0 => now.max(flying[0].0),
            _ => now + WAITS_US,
        };
        while let Some((_, block)) = flying.pop_front_if(|(at, _)| *at <= now) {
            assert!(c.delivered(0, block, BS.into(), now).wanted);
            c.obtained(block);
        }
    }
    let ideal = 8000 * 262;
    assert!(now < ideal * 12 / 10, "took {now} us, the wire alone {ideal}");
    assert!(most <= 64, "the window grew to {most}");
}

#[derive(Clone, Debug)]
enum Op {
    Add(u32, bool, bool),
    Remove(u32),
    Announce(u32, u32),
    Retract(u32, u32),
    Next,
    Deliver(usize, bool),
    Decline(usize, u8),
    Lose(u32),
    Pass(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        1 => (0u32..6, any::<bool>(), any::<bool>()).prop_map(|(p, s, n)| Op::Add(p, s, n)),
        1 => (0u32..6).prop_map(Op::Remove),
        12 => (0u32..6, any::<u32>()).prop_map(|(p, b)| Op::Announce(p, b)),
        2 => (0u32..6, any::<u32>()).prop_map(|(p, b)| Op::Retract(p, b)),
        12 => Just(Op::Next),
        6 => (any::<usize>(), prop::bool::weighted(0.9)).prop_map(|(i, ok)| Op::Deliver(i, ok)),
        3 => (any::<usize>(), 0u8..4).prop_map(|(i, w)| Op::Decline(i, w)),
        1 => any::<u32>().prop_map(Op::Lose),
        2 => (0u64..4_000_000).prop_map(Op::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever happens, in any order: only sensible requests, consistent counts, and in the end everything
    /// that somebody has is fetched.
    #[test]
    fn any_history(blocks in 1u32..150, ops in prop::collection::vec(op(), 0..400)) {
        let mut c = chooser(blocks);
        let mut peers: BTreeMap<u32, (PeerTraits, BTreeSet<u32>)> = BTreeMap::new();
        let mut open: Vec<Pick> = Vec::new();
        let mut now = 0;
        for op in ops {
            now += 1;
            match op {
                Op::Add(p, seed, near) => {
                    if let std::collections::btree_map::Entry::Vacant(e) = peers.entry(p) {
                        let t = PeerTraits { near, ..traits(p, seed) };
                        e.insert((t, BTreeSet::new()));
                        c.add_peer(p, t);
                    }
                }
                Op::Remove(p) => {
                    c.remove_peer(p);
                    peers.remove(&p);
                    open.retain(|o| o.peer != p);
                }
                Op::Announce(p, b) => {
                    c.announce(p, b % blocks, now);
                    if let Some((_, has)) = peers.get_mut(&p) {
                        has.insert(b % blocks);
                    }
                }
                Op::Retract(p, b) => {
                    let standing = c.peers.get(&p).and_then(|p| p.asked.get(&(b % blocks))).is_some_and(|a| !a.canceled);
                    prop_assert_eq!(c.retract(p, b % blocks), standing);
                    if let Some((_, has)) = peers.get_mut(&p) {
                        has.remove(&(b % blocks));
                    }
                }
                Op::Next => {
                    if let Some(pick) = c.next(now) {
                        prop_assert!(peers[&pick.peer].1.contains(&pick.block), "{pick:?}: it has it not");
                        prop_assert!(!c.have.get(pick.block) && !c.verifying.get(pick.block));
                        prop_assert!(!open.iter().any(|o| o.peer == pick.peer && o.block == pick.block));
                        let copies = open.iter().filter(|o| o.block == pick.block && !c.peers[&o.peer].asked[&o.block].canceled).count();
                        prop_assert!(copies <= 1, "{pick:?} is asked for {copies} times already");
                        open.push(pick);
                        prop_assert!(c.outstanding(pick.peer) <= c.window_max() as usize);
                    }
                }
                Op::Deliver(i, ok) if !open.is_empty() => {
                    let o = open.swap_remove(i % open.len());
                    let d = c.delivered(o.peer, o.block, BS.into(), now);
                    for other in &d.cancel {
                        prop_assert!(open.iter().any(|p| p.peer == *other && p.block == o.block));
                    }
                    if d.wanted {
                        if ok { c.obtained(o.block) } else { c.failed(o.block) }
                    }
                }
                Op::Decline(i, why) if !open.is_empty() => {
                    let o = open.swap_remove(i % open.len());
                    let why = [Decline::NotHeld, Decline::Busy, Decline::SentElsewhere, Decline::Canceled][why as usize];
                    c.declined(o.peer, o.block, why, now);
                    if why == Decline::NotHeld {
                        peers.get_mut(&o.peer).unwrap().1.remove(&o.block);
                    }
                }
                Op::Lose(b) => {
                    if c.have.get(b % blocks) {
                        c.lost(b % blocks);
                    }
                }
                Op::Pass(us) => {
                    now += us;
                    c.tick(now);
                }
                Op::Deliver(..) | Op::Decline(..) => {}
            }
            for b in 0..blocks {
                let live = |f: &dyn Fn(&PeerTraits) -> bool| {
                    peers.iter().filter(|(p, (t, has))| {
                        has.contains(&b) && f(t) && c.peers[*p].stalled_since_us.is_none()
                    }).count() as u16
                };
                let counted = Holders {
                    all: live(&|_| true),
                    relays: live(&|t| !t.seed),
                    near: live(&|t| t.near && !t.seed),
                };
                if !c.have.get(b) {
                    prop_assert_eq!(c.holders[b as usize], counted);
                }
                let idle = !c.have.get(b) && !c.verifying.get(b) && !c.asked.contains_key(&b);
                prop_assert_eq!(c.wanted.get(b), idle, "block {}", b);
            }
            prop_assert_eq!(c.receivers, peers.values().filter(|(t, _)| !t.seed).count());
        }
        // From here everybody behaves: it ends, with all that anybody has.
        let reachable: BTreeSet<u32> =
            peers.values().flat_map(|(_, has)| has.iter().copied()).chain(c.have.iter()).collect();
        for _ in 0..20_000 {
            now += 10_000;
            if reachable.iter().all(|b| c.have.get(*b)) {
                break;
            }
            for stall in c.tick(now) {
                prop_assert!(!stall.drop || c.peers.len() > 1);
            }
            open.extend(std::iter::from_fn(|| c.next(now)));
            for o in std::mem::take(&mut open) {
                if c.delivered(o.peer, o.block, BS.into(), now).wanted {
                    c.obtained(o.block);
                }
            }
        }
        prop_assert!(reachable.iter().all(|b| c.have.get(*b)), "stuck: {:?}", c);
    }
}
