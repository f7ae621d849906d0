//! `overload`: what the masters do when more is asked of them than they can do.

use anyhow::{Result, ensure};
use clap::Parser;
use indicatif::ProgressBar;
use mooncake_chaos::{
    failover::{Load, Outcome, generator, overload},
    process,
};
use serde_json::json;
use std::{process::ExitCode, time::Duration};

const MEMORY_LIMIT_BYTES: u64 = 3 << 29;
const HEARTBEAT_LIMIT: Duration = Duration::from_millis(100);

/// Opens thousands of long polls and offers more writes than three masters on this machine can take.
///
/// The generator is a process of its own on one core. Exit code 0: refused with 429 or 503 and Retry-After instead of a
/// collapse, no election, no node suspected or down, each master's peak memory at most 1.5 GiB, 99 of 100 heartbeats of
/// the nodes answered within 100 ms; 2: something of this did not hold; 1: it could not be measured. Needs root and
/// Debian's iproute2, nftables and haproxy.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Long polls open at once.
    #[arg(long, default_value_t = 10_000)]
    polls: usize,
    /// Writes offered per second.
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    writes_per_s: u32,
    /// How long.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// The core of the generator.
    #[arg(long, default_value_t = 0)]
    core: usize,
    /// One JSON document.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    if std::env::args()
        .nth(1)
        .is_some_and(|first| first == generator::FLAG)
    {
        return match generator::main() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(&error),
        };
    }
    let arguments = Arguments::parse();
    match measure(&arguments) {
        Ok(outcome) => {
            let broken = broken(&outcome);
            match arguments.json {
                true => println!("{:#}", as_json(&outcome, &broken)),
                false => print(&outcome, &broken),
            }
            if broken.is_empty() {
                ExitCode::SUCCESS
            } else {
                ExitCode::from(2)
            }
        }
        Err(error) => fail(&error),
    }
}

fn fail(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {error:#}");
    ExitCode::FAILURE
}

fn measure(arguments: &Arguments) -> Result<Outcome> {
    ensure!(arguments.seconds > 0, "--seconds must be at least 1");
    let cores = std::thread::available_parallelism()?.get();
    ensure!(
        arguments.core < cores,
        "--core {}: this machine has the cores 0 to {}",
        arguments.core,
        cores - 1
    );
    process::build_product()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let load = Load {
        polls: arguments.polls,
        writes_per_s: arguments.writes_per_s,
        lasts: Duration::from_secs(arguments.seconds),
        core: arguments.core,
    };
    let bar = ProgressBar::new(arguments.seconds);
    let outcome = runtime.block_on(overload(load, || bar.inc(1)))?;
    bar.finish_and_clear();
    Ok(outcome)
}

/// What did not hold.
fn broken(outcome: &Outcome) -> Vec<String> {
    let mut broken = Vec::new();
    let mut check = |holds: bool, what: String| {
        if !holds {
            broken.push(what);
        }
    };
    let generated = &outcome.generated;
    let (before, after) = outcome.terms;
    check(
        before == after,
        format!("the term went from {before} to {after}: there was an election"),
    );
    check(
        outcome.nodes_lost == 0,
        format!("nodes were suspected or down {} times", outcome.nodes_lost),
    );
    check(
        generated.without_retry_after == 0,
        format!("{} refusals had no Retry-After", generated.without_retry_after),
    );
    let unanswered = generated.writes.get("unanswered").copied().unwrap_or(0);
    check(unanswered == 0, format!("{unanswered} writes were not answered"));
    let strange: Vec<_> = generated
        .writes
        .iter()
        .filter(|(status, _)| !["201", "429", "503", "not sent", "unanswered"].contains(&status.as_str()))
        .collect();
    check(
        strange.is_empty(),
        format!("writes were answered with {strange:?}"),
    );
    check(
        !generated.acknowledged_us.is_empty(),
        "no write was acknowledged".into(),
    );
    for (master, peak) in outcome.peak_memory_bytes.iter().enumerate() {
        check(
            *peak <= MEMORY_LIMIT_BYTES,
            format!("master {}: peak memory {} MiB", master + 1, peak >> 20),
        );
    }
    let (count, due) = (outcome.heartbeats.count(), outcome.heartbeats_due);
    check(
        count * 10 >= due * 9,
        format!("{count} heartbeats were answered, {due} were due"),
    );
    let p99 = outcome.heartbeats.at_most(0.99);
    check(
        p99.is_some_and(|p99| p99 <= HEARTBEAT_LIMIT),
        format!("heartbeats: p99 {}", at_most(p99)),
    );
    broken
}

fn at_most(bound: Option<Duration>) -> String {
    bound.map_or("beyond every bucket".into(), |at| {
        format!("<= {} ms", at.as_millis())
    })
}

fn print(outcome: &Outcome, broken: &[String]) {
    let generated = &outcome.generated;
    let heartbeat = |p| at_most(outcome.heartbeats.at_most(p));
    println!("writes by status       {:?}", generated.writes);
    println!(
        "long polls             {} held, {} refused",
        generated.polls_held, generated.polls_refused
    );
    println!(
        "heartbeats             {} of {} due; p50 {}, p99 {}, max {}",
        outcome.heartbeats.count(),
        outcome.heartbeats_due,
        heartbeat(0.5),
        heartbeat(0.99),
        heartbeat(1.0)
    );
    println!(
        "as all polls hang up   heartbeats max {}",
        at_most(outcome.heartbeats_after.at_most(1.0))
    );
    println!(
        "probe's reads          {} answered, {} not; p50 {} ms, p99 {} ms",
        outcome.reads.len(),
        outcome.reads_failed,
        outcome.read_at(0.5).as_millis(),
        outcome.read_at(0.99).as_millis()
    );
    println!(
        "probe's writes         {} acknowledged, {} not; p50 {} ms, p99 {} ms",
        outcome.writes.len(),
        outcome.writes_refused,
        outcome.write_at(0.5).as_millis(),
        outcome.write_at(0.99).as_millis()
    );
    let peaks: Vec<_> = outcome.peak_memory_bytes.iter().map(|b| b >> 20).collect();
    println!("peak memory, MiB       {peaks:?}");
    println!(
        "term                   {} -> {}",
        outcome.terms.0, outcome.terms.1
    );
    println!("nodes suspected, down  {}", outcome.nodes_lost);
    for what in broken {
        println!("DOES NOT HOLD          {what}");
    }
}

fn as_json(outcome: &Outcome, broken: &[String]) -> serde_json::Value {
    let ms = |at: Duration| at.as_micros() as f64 / 1000.0;
    let heartbeat = |p| outcome.heartbeats.at_most(p).map(ms);
    let generated = &outcome.generated;
    json!({
        "writes": generated.writes,
        "without_retry_after": generated.without_retry_after,
        "polls_held": generated.polls_held,
        "polls_refused": generated.polls_refused,
        "heartbeats": outcome.heartbeats.count(),
        "heartbeats_due": outcome.heartbeats_due,
        "p50_heartbeat_at_most_ms": heartbeat(0.5),
        "p99_heartbeat_at_most_ms": heartbeat(0.99),
        "max_heartbeat_at_most_ms": heartbeat(1.0),
        "max_heartbeat_after_at_most_ms": outcome.heartbeats_after.at_most(1.0).map(ms),
        "probe_reads": outcome.reads.len(),
        "probe_reads_failed": outcome.reads_failed,
        "p50_probe_read_ms": ms(outcome.read_at(0.5)),
        "p99_probe_read_ms": ms(outcome.read_at(0.99)),
        "probe_writes": outcome.writes.len(),
        "probe_writes_refused": outcome.writes_refused,
        "p50_probe_write_ms": ms(outcome.write_at(0.5)),
        "p99_probe_write_ms": ms(outcome.write_at(0.99)),
        "peak_memory_bytes": outcome.peak_memory_bytes,
        "term_before": outcome.terms.0,
        "term_after": outcome.terms.1,
        "nodes_suspected_or_down": outcome.nodes_lost,
        "does_not_hold": broken,
    })
}
