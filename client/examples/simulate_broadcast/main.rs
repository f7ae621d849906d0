//! How long a broadcast takes, by simulation: `cargo run --release -p mooncake-client --example simulate_broadcast`.
//!
//! Without arguments it runs the scenarios of `docs/performance.md`; `--scenario` picks some of them, and with
//! `--nodes` one of your own is run. `--json` prints one object a line. Exit code 2 if something does not hold that
//! must: it says what.

mod scenarios;

use clap::Parser;
use mooncake_chaos::report::exit_code;
use mooncake_client::swarm::simulation::{self, Report, Scenario};
use scenarios::{Limits, Named, named};
use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

/// Simulates one artifact's way through a swarm, with the program's own choosers.
#[derive(Debug, Parser)]
#[command(name = "simulate_broadcast")]
struct Cli {
    /// Run only these of the built-in scenarios (their names, or the beginnings of them).
    #[arg(long, value_delimiter = ',')]
    scenario: Vec<String>,
    /// Followers of a scenario of your own.
    #[arg(long)]
    nodes: Option<usize>,
    /// Blocks of the artifact.
    #[arg(long, default_value_t = 2048)]
    blocks: u32,
    /// Size of a block.
    #[arg(long, default_value_t = 1 << 20)]
    block_bytes: u32,
    /// Rate of every link, in Mbit/s.
    #[arg(long, default_value_t = 1000.0)]
    link_mbit: f64,
    /// Rate of the seed's uplink, as a multiple of the others'.
    #[arg(long, default_value_t = 1.0)]
    seed_link: f64,
    /// Rate of the source, as a multiple of the links'; without: the seed has everything.
    #[arg(long)]
    source: Option<f64>,
    /// Racks.
    #[arg(long, default_value_t = 1)]
    racks: u32,
    /// A rack's link to the spine, as a fraction of the links of its nodes.
    #[arg(long)]
    spine: Option<f64>,
    /// Nodes with a quarter of the rate.
    #[arg(long, default_value_t = 0)]
    slow: usize,
    /// Fraction of the nodes that dies, spread over the time that the bound gives.
    #[arg(long, default_value_t = 0.0)]
    die: f64,
    /// Nodes that send wrong bytes.
    #[arg(long, default_value_t = 0)]
    corrupt: usize,
    /// Nodes that join in the middle.
    #[arg(long, default_value_t = 0)]
    late: usize,
    /// Blocks that a node sends at a time.
    #[arg(long)]
    max_uploads: Option<usize>,
    /// Parts of a block on the links.
    #[arg(long, default_value_t = 4)]
    segments: u32,
    /// Print one JSON object a line.
    #[arg(long)]
    json: bool,
}

impl Cli {
    fn own(&self, nodes: usize) -> Scenario {
        let link = self.link_mbit * 1e6 / 8.0;
        let mut s = Scenario::uniform(nodes, self.blocks, self.block_bytes, link);
        s.segments = self.segments;
        s.spine = self.spine;
        s.source_bytes_per_s = self.source.map(|x| x * link);
        s.nodes[0].up_bytes_per_s *= self.seed_link;
        if let Some(max) = self.max_uploads {
            s.max_uploads = max;
        }
        if self.racks > 1 {
            s = s.in_racks(self.racks);
        }
        let span_us = s.bound_s() * 1e6;
        // Which nodes are special is spread over all, and over the racks.
        scenarios::spread(&mut s, self.slow, |n| {
            n.up_bytes_per_s /= 4.0;
            n.down_bytes_per_s /= 4.0;
            n.counts = false;
        });
        scenarios::spread(&mut s, self.corrupt, |n| n.corrupts = true);
        scenarios::spread(&mut s, self.late, |n| n.joins_us = (span_us / 2.0) as u64);
        scenarios::die(&mut s, self.die, span_us);
        s
    }
}

fn main() -> ExitCode {
    exit_code(run(&Cli::parse()))
}

/// Whether all holds.
fn run(cli: &Cli) -> anyhow::Result<bool> {
    let runs: Vec<Named> = match cli.nodes {
        Some(nodes) => vec![Named {
            name: "own",
            about: "as given",
            scenario: cli.own(nodes),
            limits: Limits::default(),
        }],
        None => {
            let wanted = |n: &Named| {
                cli.scenario.is_empty() || cli.scenario.iter().any(|w| n.name.starts_with(w.as_str()))
            };
            named().into_iter().filter(wanted).collect()
        }
    };
    anyhow::ensure!(
        !runs.is_empty(),
        "no scenario of that name; there are: {}",
        named().iter().map(|n| n.name).collect::<Vec<_>>().join(", ")
    );
    if !cli.json {
        println!(
            "{:<14} {:>6} {:>7} {:>9} {:>9} {:>6} {:>6} {:>8} {:>9} {:>8} {:>7} {:>8} {:>6} {:>7}",
            "scenario",
            "nodes",
            "blocks",
            "bound s",
            "took s",
            "ratio",
            "seed",
            "cross/S",
            "recv max",
            "msg/s",
            "max",
            "declined",
            "wrong",
            "real s"
        );
    }
    let mut holds = true;
    for named in runs {
        let begun = Instant::now();
        let report = simulation::run(&named.scenario);
        if cli.json {
            println!("{}", json(&named, &report, begun.elapsed()));
        } else {
            row(&named, &report, begun.elapsed());
        }
        for what in named.broken(&report) {
            holds = false;
            let line = format!("DOES NOT HOLD: {what}");
            if cli.json {
                eprintln!("{line}")
            } else {
                println!("{line}")
            }
        }
    }
    Ok(holds)
}

fn row(named: &Named, r: &Report, real: Duration) {
    let s = &named.scenario;
    println!(
        "{:<14} {:>6} {:>7} {:>9.2} {:>9} {:>6.3} {:>6.3} {:>8.2} {:>9.4} {:>8.0} {:>7.0} {:>8} {:>6} {:>7.1}",
        named.name,
        s.nodes.len() - 1,
        s.blocks,
        r.bound_s,
        r.makespan_s.map_or("never".to_owned(), |m| format!("{m:.2}")),
        r.ratio(),
        r.seed_copies,
        r.cross_rack_bytes / s.size_bytes(),
        r.received_max,
        r.messages_mean,
        r.messages_max,
        r.declined,
        r.corrupt,
        real.as_secs_f64()
    );
}

fn json(named: &Named, r: &Report, real: Duration) -> serde_json::Value {
    let s = &named.scenario;
    serde_json::json!({
        "tool": "simulate_broadcast",
        "scenario": named.name,
        "about": named.about,
        "followers": s.nodes.len() - 1,
        "blocks": s.blocks,
        "block_bytes": s.block_bytes,
        "racks": s.racks(),
        "bound_s": r.bound_s,
        "makespan_s": r.makespan_s,
        "ratio": r.makespan_s.map(|_| r.ratio()),
        "seed_copies": r.seed_copies,
        "cross_rack_copies": r.cross_rack_bytes / s.size_bytes(),
        "received_max": r.received_max,
        "received_mean": r.received_mean,
        "messages_per_node_s": r.messages_mean,
        "messages_per_node_s_max": r.messages_max,
        "message_bytes": r.message_bytes,
        "declined": r.declined,
        "corrupt_blocks": r.corrupt,
        "corrupt_connections": r.corrupt_connections,
        "corrupt_pairs": r.corrupt_pairs,
        "neighbours_max": r.neighbours_max,
        "events": r.events,
        "real_s": real.as_secs_f64(),
    })
}
