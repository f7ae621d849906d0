//! The scenarios of `docs/performance.md`.

use mooncake_client::swarm::simulation::{NodeSpec, Scenario};

/// A scenario with a name.
pub struct Named {
    /// For the command line.
    pub name: &'static str,
    /// For a person.
    pub about: &'static str,
    /// What is run.
    pub scenario: Scenario,
}

/// Changes `count` followers, spread evenly over all.
pub fn spread(s: &mut Scenario, count: usize, change: impl Fn(&mut NodeSpec)) {
    let followers = s.nodes.len() - 1;
    for i in 0..count.min(followers) {
        // An odd step, so that every rack gets its part.
        change(&mut s.nodes[1 + (i * followers / count + i) % followers]);
    }
}

/// Lets a fraction of the followers die, one after the other, within `span_us`.
pub fn die(s: &mut Scenario, fraction: f64, span_us: f64) {
    let followers = s.nodes.len() - 1;
    let count = (followers as f64 * fraction).round() as usize;
    for i in 0..count {
        let node = 1 + (i * followers / count + i) % followers;
        s.nodes[node].dies_us = Some((span_us * (i + 1) as f64 / (count + 1) as f64) as u64);
    }
}

/// 200 Mbit/s, as in the measurements with real nodes.
const SHAPED: f64 = 25e6;
/// 10 Gbit/s.
const FAST: f64 = 1.25e9;
const KIB_256: u32 = 256 << 10;
const MIB_4: u32 = 4 << 20;

/// All of them.
pub fn named() -> Vec<Named> {
    let shaped = |followers| Scenario::uniform(followers, 2048, KIB_256, SHAPED);
    let thousand = || Scenario::uniform(1000, 16_384, MIB_4, FAST);
    let mut all = Vec::new();
    let mut add = |name, about, scenario| {
        all.push(Named {
            name,
            about,
            scenario,
        })
    };
    add("followers-1", "512 MiB, 200 Mbit/s", shaped(1));
    add("followers-4", "512 MiB, 200 Mbit/s", shaped(4));
    add("followers-8", "512 MiB, 200 Mbit/s", shaped(8));
    let mut s = shaped(8);
    s.source_bytes_per_s = Some(SHAPED / 2.0);
    add("source-half", "the source at half the link", s);
    let mut s = shaped(8);
    for n in &mut s.nodes[3..5] {
        n.up_bytes_per_s /= 4.0;
        n.down_bytes_per_s /= 4.0;
        n.counts = false;
    }
    add("slow-2", "two of eight at a quarter of the rate", s);
    let mut s = shaped(8);
    s.nodes[0].up_bytes_per_s *= 4.0;
    add("seed-4x", "the seed's link at four times the rate", s);
    let mut s = shaped(8);
    s.nodes[3].dies_us = Some(10_000_000);
    s.nodes[5].joins_us = 10_000_000;
    add("die-join", "one of eight dies, one joins, in the middle", s);
    add(
        "nodes-100",
        "8 GiB, 10 Gbit/s",
        Scenario::uniform(100, 2048, MIB_4, FAST),
    );
    add("nodes-1000", "64 GiB, 10 Gbit/s", thousand());
    let mut s = thousand().in_racks(4);
    s.spine = Some(0.25);
    add("racks-4", "four racks, a spine of 4:1", s);
    let mut s = thousand();
    let span_us = s.bound_s() * 1e6;
    die(&mut s, 0.05, span_us);
    add("die-5-percent", "one in twenty dies, silently", s);
    let mut s = thousand();
    spread(&mut s, 10, |n| n.corrupts = true);
    add("corrupt-10", "ten send wrong bytes", s);
    let mut s = thousand();
    spread(&mut s, 100, |n| {
        n.up_bytes_per_s /= 4.0;
        n.down_bytes_per_s /= 4.0;
        n.counts = false;
    });
    add("slow-100", "a hundred at a quarter of the rate", s);
    add(
        "nodes-4000",
        "16 GiB, 10 Gbit/s",
        Scenario::uniform(4000, 4096, MIB_4, FAST),
    );
    all
}
