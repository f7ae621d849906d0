//! The scenarios of `docs/performance.md`.

use mooncake_client::swarm::simulation::{NodeSpec, Report, Scenario};

/// A scenario with a name.
pub struct Named {
    /// For the command line.
    pub name: &'static str,
    /// For a person.
    pub about: &'static str,
    /// What is run.
    pub scenario: Scenario,
    /// What must hold.
    pub limits: Limits,
}

/// The most that a scenario may take of each; `None`: whatever comes out.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Makespan by bound.
    pub ratio: Option<f64>,
    /// Out of the seed.
    pub seed_copies: Option<f64>,
    /// Into any node.
    pub received_copies: Option<f64>,
    /// From rack to rack, by rack that has to get its content from another.
    pub cross_copies: Option<f64>,
}

impl Named {
    /// What does not hold. Whatever the limits are, all that live get everything, and a connection over which wrong bytes
    /// come is left after one block.
    pub fn broken(&self, report: &Report) -> Vec<String> {
        let (s, limits) = (&self.scenario, &self.limits);
        let mut broken = Vec::new();
        let living = |i: &usize| s.nodes[*i].dies_us.is_none();
        let without = (1..s.nodes.len())
            .filter(living)
            .filter(|i| report.done_s[*i].is_none())
            .count();
        if without > 0 {
            broken.push(format!("{}: {without} nodes never got everything", self.name));
        }
        if report.corrupt > report.corrupt_connections {
            broken.push(format!(
                "{}: {} wrong blocks came on {} connections, at most one on each is wanted",
                self.name, report.corrupt, report.corrupt_connections
            ));
        }
        let imports = s.racks().saturating_sub(1).max(1) as f64;
        let cross = report.cross_rack_bytes / s.size_bytes() / imports;
        for (what, value, limit) in [
            ("the ratio", report.ratio(), limits.ratio),
            (
                "the number of copies out of the seed",
                report.seed_copies,
                limits.seed_copies,
            ),
            (
                "the number of copies into a node",
                report.received_max,
                limits.received_copies,
            ),
            ("the number of copies into a rack", cross, limits.cross_copies),
        ] {
            if let Some(limit) = limit
                && value > limit
            {
                broken.push(format!(
                    "{}: {what} is {value:.3}, at most {limit} is wanted",
                    self.name
                ));
            }
        }
        broken
    }
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
    let mut add = |name, about, scenario, limits| {
        all.push(Named {
            name,
            about,
            scenario,
            limits,
        })
    };
    let fast = Limits {
        ratio: Some(1.10),
        received_copies: Some(1.02),
        ..Limits::default()
    };
    let once = Limits {
        seed_copies: Some(1.15),
        ..fast
    };
    add("followers-1", "512 MiB, 200 Mbit/s", shaped(1), once);
    add("followers-4", "512 MiB, 200 Mbit/s", shaped(4), once);
    add("followers-8", "512 MiB, 200 Mbit/s", shaped(8), once);
    let mut s = shaped(8);
    s.source_bytes_per_s = Some(SHAPED / 2.0);
    add("source-half", "the source at half the link", s, once);
    let mut s = shaped(8);
    for n in &mut s.nodes[3..5] {
        n.up_bytes_per_s /= 4.0;
        n.down_bytes_per_s /= 4.0;
        n.counts = false;
    }
    let beside_slow = Limits {
        ratio: Some(1.15),
        ..fast
    };
    add("slow-2", "two of eight at a quarter of the rate", s, beside_slow);
    let mut s = shaped(8);
    s.nodes[0].up_bytes_per_s *= 4.0;
    add("seed-4x", "the seed's link at four times the rate", s, once);
    let mut s = shaped(8);
    s.nodes[3].dies_us = Some(10_000_000);
    s.nodes[5].joins_us = 10_000_000;
    add("die-join", "one of eight dies, one joins, in the middle", s, fast);
    add(
        "nodes-100",
        "8 GiB, 10 Gbit/s",
        Scenario::uniform(100, 2048, MIB_4, FAST),
        once,
    );
    add("nodes-1000", "64 GiB, 10 Gbit/s", thousand(), once);
    let mut s = thousand().in_racks(4);
    s.spine = Some(0.25);
    // A block comes in by one gateway and goes on from there: that is a way more for each of them.
    let into_racks = Limits {
        ratio: Some(1.30),
        cross_copies: Some(1.3),
        ..once
    };
    add("racks-4", "four racks, a spine of 4:1", s, into_racks);
    let mut s = thousand();
    let span_us = s.bound_s() * 1e6;
    die(&mut s, 0.05, span_us);
    let beside_dead = Limits {
        seed_copies: Some(1.05),
        ..fast
    };
    add("die-5-percent", "one in twenty dies, silently", s, beside_dead);
    let mut s = thousand();
    spread(&mut s, 10, |n| n.corrupts = true);
    // A liar takes what comes to it and passes nothing on; each of its neighbours finds that out for itself.
    let beside_liars = Limits {
        ratio: Some(1.35),
        seed_copies: Some(1.05),
        ..fast
    };
    add("corrupt-10", "ten send wrong bytes", s, beside_liars);
    let mut s = thousand();
    spread(&mut s, 100, |n| {
        n.up_bytes_per_s /= 4.0;
        n.down_bytes_per_s /= 4.0;
        n.counts = false;
    });
    add("slow-100", "a hundred at a quarter of the rate", s, beside_slow);
    add(
        "nodes-4000",
        "16 GiB, 10 Gbit/s",
        Scenario::uniform(4000, 4096, MIB_4, FAST),
        once,
    );
    all
}
