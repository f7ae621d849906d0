//! What must hold of the swarm, at sizes that run in seconds; the example runs the full ones.

use super::*;

const BLOCK: u32 = 256 << 10;
/// 200 Mbit/s.
const LINK: f64 = 25e6;

/// 512 MiB.
fn shaped(followers: usize) -> Scenario {
    Scenario::uniform(followers, 2048, BLOCK, LINK)
}

/// Many nodes and 1,024 blocks of 4 MiB, at 10 Gbit/s.
fn many(followers: usize) -> Scenario {
    Scenario::uniform(followers, 1024, 4 << 20, 1.25e9)
}

#[test]
fn as_fast_as_the_links_and_flat_in_the_number_of_nodes() {
    let one = run(&shaped(1));
    let eight = run(&shaped(8));
    for r in [&one, &eight] {
        assert!(r.ratio() <= 1.10, "{r:?}");
        assert!(r.seed_copies <= 1.02 && r.received_max <= 1.02, "{r:?}");
    }
    assert!(
        eight.makespan_s <= one.makespan_s.map(|s| s * 1.05),
        "{one:?} {eight:?}"
    );
    let fifty = run(&Scenario::uniform(50, 2048, BLOCK, LINK));
    assert!(fifty.ratio() <= 1.08 && fifty.seed_copies <= 1.1, "{fifty:?}");
    let first = fifty
        .done_s
        .iter()
        .flatten()
        .copied()
        .fold(f64::INFINITY, f64::min);
    assert!(
        first * 1.05 > fifty.makespan_s.unwrap(),
        "somebody starves: {fifty:?}"
    );
}

#[test]
fn a_seed_that_still_acquires_is_overlapped() {
    let mut s = shaped(8);
    s.source_bytes_per_s = Some(LINK / 2.0);
    let r = run(&s);
    assert!(r.ratio() <= 1.05, "{r:?}");
    assert!(r.seed_copies <= 1.1, "{r:?}");
}

#[test]
fn a_seed_with_four_times_the_link_still_sends_one_copy() {
    let mut s = shaped(8);
    s.nodes[0].up_bytes_per_s *= 4.0;
    let r = run(&s);
    assert!(r.seed_copies <= 1.15 && r.received_max <= 1.02, "{r:?}");
    assert!(r.ratio() <= 1.10, "{r:?}");
}

#[test]
fn slow_nodes_slow_down_themselves_only() {
    let mut s = shaped(8);
    for slow in [3, 6] {
        s.nodes[slow].up_bytes_per_s /= 4.0;
        s.nodes[slow].down_bytes_per_s /= 4.0;
        s.nodes[slow].counts = false;
    }
    let r = run(&s);
    assert!(r.ratio() <= 1.15, "{r:?}");
    let slow_s = r.done_s[3].unwrap();
    assert!(slow_s <= 4.0 * r.bound_s * 1.15, "{r:?}");
}

#[test]
fn one_dies_and_one_joins_in_the_middle() {
    let whole = run(&shaped(8)).makespan_s.unwrap();
    let mut s = shaped(8);
    s.nodes[3].dies_us = Some(10_000_000);
    s.nodes[5].joins_us = 10_000_000;
    s.nodes[5].counts = false;
    let r = run(&s);
    assert!(r.makespan_s.unwrap() <= whole * 1.05, "{r:?}");
    assert!(r.done_s[5].unwrap() <= whole * 1.05, "{r:?}");
}

#[test]
fn a_mesh_of_bounded_degree_is_as_fast() {
    let r = run(&many(200));
    assert!(r.neighbours_max <= mooncake_proto::mesh::MAX_NEIGHBOURS, "{r:?}");
    // A way of a few hops and the last requests cost the same whatever the size: 16 times as many blocks, less than 1.05.
    assert!(r.ratio() <= 1.18, "{r:?}");
    assert!(r.seed_copies <= 1.05 && r.received_max <= 1.02, "{r:?}");
}

#[test]
fn a_rack_gets_its_content_brought_in_once() {
    let mut s = many(120).in_racks(4);
    s.spine = Some(0.25);
    let r = run(&s);
    assert!(r.cross_rack_bytes <= 1.3 * 3.0 * s.size_bytes(), "{r:?}");
    assert!(r.ratio() <= 1.35, "{r:?}");
    // Small enough that all know each other.
    let mut s = many(32).in_racks(4);
    s.spine = Some(0.25);
    let r = run(&s);
    assert!(r.cross_rack_bytes <= 1.3 * 3.0 * s.size_bytes(), "{r:?}");
    assert!(r.ratio() <= 1.35, "{r:?}");
}

#[test]
fn the_dead_do_not_stop_the_rest() {
    let mut s = many(120);
    for i in 0..6 {
        s.nodes[7 + 17 * i].dies_us = Some(400_000 * (1 + i as u64));
    }
    let r = run(&s);
    assert!(r.makespan_s.is_some(), "{r:?}");
    // Who waits for a silent one notices after 3 s.
    assert!(r.makespan_s.unwrap() <= r.bound_s * 1.12 + 3.5, "{r:?}");
    // The seed too, once every block has left it.
    let mut s = shaped(8);
    s.nodes[0].dies_us = Some((s.bound_s() * 1.02e6) as u64);
    let r = run(&s);
    assert!(r.makespan_s.is_some_and(|m| m <= r.bound_s * 1.10 + 3.5), "{r:?}");
}

#[test]
fn who_stands_still_stops_nobody() {
    let mut s = shaped(8);
    s.nodes[4].frozen_us = Some((5_000_000, 60_000_000));
    s.nodes[4].counts = false;
    let r = run(&s);
    assert!(r.makespan_s.is_some_and(|m| m <= r.bound_s * 1.10 + 3.5), "{r:?}");
    assert!(r.done_s[4].is_some(), "it goes on when it can: {r:?}");
}

#[test]
fn who_sends_wrong_bytes_is_left_after_one_block() {
    let mut s = many(80);
    s.nodes[9].corrupts = true;
    s.nodes[30].corrupts = true;
    let r = run(&s);
    assert!(r.corrupt > 0 && r.corrupt == r.corrupt_pairs, "{r:?}");
    // What they got as first copies leaves the seed once more when they had their time to pass it on.
    let held_s = crate::swarm::sent::HOLD_MS as f64 / 1e3;
    assert!(r.makespan_s.unwrap() <= r.bound_s * 1.15 + held_s, "{r:?}");
    // Long enough to be tried again after the first penalty: it gets one block again, and is left again.
    let mut s = Scenario::uniform(8, 1024, BLOCK, LINK / 4.0);
    s.nodes[5].corrupts = true;
    let r = run(&s);
    assert!(r.corrupt > r.corrupt_pairs, "{r:?}");
    assert_eq!(r.corrupt, r.corrupt_connections, "{r:?}");
}

#[test]
fn the_same_twice() {
    let s = many(80).in_racks(2);
    assert_eq!(run(&s), run(&s));
}
