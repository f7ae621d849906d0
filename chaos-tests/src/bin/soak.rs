//! Random faults for a long time, judged by every checker. See `mooncake_chaos::soak`.

use anyhow::{Context, Result};
use clap::Parser;
use mooncake_chaos::{
    process,
    soak::{Report, RoundOptions, round},
};
use std::{
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};
use tokio::signal::unix::{SignalKind, signal};

/// Every so many seeds wall clocks jump too.
const CLOCKS_EVERY: u64 = 3;
/// Every so many seeds masters take snapshots and purge their logs, with the clocks of every third one of these jumping. In
/// the other rounds the whole log is judged.
const SNAPSHOTS_EVERY: u64 = 4;
/// Every so many seeds a node that is away is soon taken for lost.
const SHORT_GRACE_EVERY: u64 = 4;

/// Runs a cluster under load and random faults, round after round, and checks everything. Needs root.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// How long; the last round is finished
    #[arg(long, default_value_t = 60)]
    minutes: u64,
    /// Seed of the first round; each further one counts up
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How long the faults of one round go on, in seconds
    #[arg(long, default_value_t = 180)]
    round_s: u64,
    /// Only so many rounds
    #[arg(long)]
    rounds: Option<u64>,
    /// Number of masters
    #[arg(long, default_value_t = 3)]
    masters: usize,
    /// Number of clients
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..=32))]
    clients: u64,
    /// All must be well so many seconds after everything is healed
    #[arg(long, default_value_t = 30)]
    converge_s: u64,
    /// Where reports go, and the histories of rounds that failed
    #[arg(long, default_value = "soak-results")]
    out: PathBuf,
    /// Print the report as JSON instead of Markdown
    #[arg(long)]
    json: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args).await {
        Ok(report) if report.is_good() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("soak: {e:#}");
            ExitCode::from(2)
        }
    }
}

async fn run(args: &Args) -> Result<Report> {
    process::build_product()?;
    std::fs::create_dir_all(&args.out).with_context(|| format!("cannot create {}", args.out.display()))?;
    let began = Instant::now();
    let mut report = Report::default();
    let mut terminate = signal(SignalKind::terminate())?;
    for number in 0..args.rounds.unwrap_or(u64::MAX) {
        if began.elapsed() >= Duration::from_secs(60 * args.minutes) {
            break;
        }
        let seed = args.seed + number;
        let options = RoundOptions {
            seed,
            length: Duration::from_secs(args.round_s),
            masters: args.masters,
            clients: args.clients as usize,
            clocks: seed.is_multiple_of(CLOCKS_EVERY),
            snapshots: seed % SNAPSHOTS_EVERY == 1,
            short_grace: seed % SHORT_GRACE_EVERY == 2,
            converge_within: Duration::from_secs(args.converge_s),
            out: args.out.join(format!("seed-{seed}")),
            progress: |what| eprintln!("{what}"),
        };
        let judged = tokio::select! {
            judged = round(&options) => judged,
            // What the round made is removed as it is dropped.
            _ = tokio::signal::ctrl_c() => break,
            _ = terminate.recv() => break,
        };
        match judged {
            Ok(one) => {
                eprintln!(
                    "seed {seed}: {}; {} requests, {} jobs, {} faults, longest time without a write {} ms",
                    if one.violations.is_empty() {
                        "good"
                    } else {
                        "VIOLATED"
                    },
                    one.requests,
                    one.jobs,
                    one.nemeses.values().map(|n| n.count).sum::<u64>(),
                    one.longest_gap_ms
                );
                one.violations.iter().for_each(|v| eprintln!("seed {seed}: {v}"));
                if one.violations.is_empty() {
                    std::fs::remove_dir_all(&options.out)?;
                }
                report.rounds.push(one);
            }
            Err(e) => {
                eprintln!("seed {seed} could not be judged: {e:#}");
                report.errors.push((seed, format!("{e:#}")));
            }
        }
        report.took_s = began.elapsed().as_secs();
        // After each round: a soak that is ended has said what it found.
        std::fs::write(args.out.join("report.md"), report.markdown())?;
        std::fs::write(args.out.join("report.json"), serde_json::to_vec_pretty(&report)?)?;
    }
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&report)?),
        false => println!("{}", report.markdown()),
    }
    Ok(report)
}
