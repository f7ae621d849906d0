//! `overload`: what the masters do when more is asked of them than they can do.

use anyhow::{Result, ensure};
use clap::Parser;
use indicatif::ProgressBar;
use mooncake_chaos::{
    failover::{
        Load, Outcome, generator,
        generator::{NOT_SENT, UNANSWERED},
        overload,
    },
    process,
    report::exit_code,
};
use serde_json::json;
use std::{process::ExitCode, time::Duration};

const MEMORY_LIMIT_BYTES: u64 = 3 << 29;
const HEARTBEAT_LIMIT: Duration = Duration::from_millis(100);
/// Of what was to be offered, the generator may fail to send so much: beyond it less was asked than the numbers say.
const NOT_SENT_LIMIT: f64 = 0.01;

/// Opens thousands of long polls and writes at a high rate, then writes far beyond what three masters can take.
///
/// Two phases, each with a cluster of its own; the generator is a process of its own on one core. In both must hold: no
/// election, no node suspected or down, each master's peak memory at most 1.5 GiB, heartbeats go on, every write is
/// answered, every 429 and 503 has Retry-After, all polls are held. In the first besides: 99 of 100 heartbeats within
/// 100 ms, no poll refused, at most 1 % of the writes not sent. In the second besides: some writes are refused, and some
/// acknowledged. Exit code 0: all of this holds; 2: something does not; 1: it could not be measured. Needs root and
/// Debian's iproute2, nftables and haproxy.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Long polls open at once.
    #[arg(long, default_value_t = 10_000)]
    polls: usize,
    /// Writes offered per second in the first phase.
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    writes_per_s: u32,
    /// How long the first phase takes; 0: no first phase.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Writes offered per second in the second phase; more than masters and generator can do.
    #[arg(long, default_value_t = 8_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    beyond_per_s: u32,
    /// How long the second phase takes; 0: no second phase.
    #[arg(long, default_value_t = 20)]
    beyond_seconds: u64,
    /// The core of the generator.
    #[arg(long, default_value_t = 0)]
    core: usize,
    /// JSON instead of text: one object per phase and line.
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
            Err(error) => {
                eprintln!("error: {error:#}");
                ExitCode::FAILURE
            }
        };
    }
    exit_code(measure(&Arguments::parse()))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Offered,
    Beyond,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::Offered => "offered",
            Self::Beyond => "beyond",
        }
    }
}

/// Whether all holds.
fn measure(arguments: &Arguments) -> Result<bool> {
    ensure!(
        arguments.seconds + arguments.beyond_seconds > 0,
        "nothing to do: --seconds or --beyond-seconds must be at least 1"
    );
    let cores = std::thread::available_parallelism()?.get();
    ensure!(
        arguments.core < cores,
        "--core {}: this machine has the cores 0 to {}",
        arguments.core,
        cores - 1
    );
    process::build_product()?;
    let phases = [
        (Phase::Offered, arguments.writes_per_s, arguments.seconds),
        (Phase::Beyond, arguments.beyond_per_s, arguments.beyond_seconds),
    ];
    let mut holds = true;
    for (phase, writes_per_s, seconds) in phases.into_iter().filter(|(_, _, seconds)| *seconds > 0) {
        let load = Load {
            polls: arguments.polls,
            writes_per_s,
            lasts: Duration::from_secs(seconds),
            core: arguments.core,
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let bar = ProgressBar::new(seconds);
        let outcome = runtime.block_on(overload(load, || bar.inc(1)))?;
        bar.finish_and_clear();
        let broken = broken(phase, load, &outcome);
        match arguments.json {
            true => println!("{}", as_json(phase, load, &outcome, &broken)),
            false => print(phase, load, &outcome, &broken),
        }
        holds &= broken.is_empty();
    }
    Ok(holds)
}

/// What did not hold.
fn broken(phase: Phase, load: Load, outcome: &Outcome) -> Vec<String> {
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
    check(
        generated.polls_held == load.polls,
        format!("{} of {} polls were held", generated.polls_held, load.polls),
    );
    let writes = |status: &str| generated.writes.get(status).copied().unwrap_or(0);
    let unanswered = writes(UNANSWERED);
    check(unanswered == 0, format!("{unanswered} writes were not answered"));
    match phase {
        Phase::Offered => {
            check(
                generated.polls_refused == 0,
                format!("{} times a poll was refused", generated.polls_refused),
            );
            let (not_sent, all) = (writes(NOT_SENT), generated.writes.values().sum::<u64>());
            check(
                not_sent as f64 <= all as f64 * NOT_SENT_LIMIT,
                format!(
                    "the generator did not send {not_sent} of {all} writes: less was offered than asked for"
                ),
            );
        }
        Phase::Beyond => check(
            writes("429") + writes("503") > 0,
            "no write was refused: offer more (--beyond-per-s)".into(),
        ),
    }
    let strange: Vec<_> = generated
        .writes
        .iter()
        .filter(|(status, _)| !["201", "429", "503", NOT_SENT, UNANSWERED].contains(&status.as_str()))
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
        phase == Phase::Beyond || p99.is_some_and(|p99| p99 <= HEARTBEAT_LIMIT),
        format!("heartbeats: p99 {}", at_most(p99)),
    );
    broken
}

fn at_most(bound: Option<Duration>) -> String {
    bound.map_or("beyond every bucket".into(), |at| {
        format!("<= {} ms", at.as_millis())
    })
}

fn print(phase: Phase, load: Load, outcome: &Outcome, broken: &[String]) {
    let generated = &outcome.generated;
    println!(
        "{}: {} long polls, {} writes per second offered for {} s",
        phase.name(),
        load.polls,
        load.writes_per_s,
        load.lasts.as_secs()
    );
    let heartbeat = |p| at_most(outcome.heartbeats.at_most(p));
    println!("writes by status       {:?}", generated.writes);
    println!(
        "long polls             {} of {} held, {} refused",
        generated.polls_held, load.polls, generated.polls_refused
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

fn as_json(phase: Phase, load: Load, outcome: &Outcome, broken: &[String]) -> serde_json::Value {
    let ms = |at: Duration| at.as_micros() as f64 / 1000.0;
    let heartbeat = |p| outcome.heartbeats.at_most(p).map(ms);
    let generated = &outcome.generated;
    json!({
        "phase": phase.name(),
        "polls": load.polls,
        "writes_per_s": load.writes_per_s,
        "took_s": load.lasts.as_secs(),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn load() -> Load {
        Load {
            polls: 10,
            writes_per_s: 100,
            lasts: Duration::from_secs(1),
            core: 0,
        }
    }

    fn outcome(polls_held: usize, writes: &[(&str, u64)]) -> Outcome {
        let mut outcome = Outcome::default();
        outcome.generated.polls_held = polls_held;
        outcome.generated.acknowledged_us = vec![1];
        outcome.generated.writes = writes.iter().map(|(s, n)| ((*s).to_owned(), *n)).collect();
        outcome
    }

    #[test]
    fn each_phase_is_judged_by_its_own() {
        let missed = |phase, outcome: &Outcome| {
            // There are no heartbeats here, which the first phase judges.
            let mut missed = broken(phase, load(), outcome);
            missed.retain(|what| !what.starts_with("heartbeats"));
            missed
        };
        let sent = outcome(10, &[("201", 99), (NOT_SENT, 1)]);
        assert!(missed(Phase::Offered, &sent).is_empty());
        assert_eq!(missed(Phase::Beyond, &sent).len(), 1, "none was refused");
        let less = outcome(10, &[("201", 98), (NOT_SENT, 2)]);
        assert_eq!(missed(Phase::Offered, &less).len(), 1);
        let refused = outcome(10, &[("201", 9), ("429", 1), (NOT_SENT, 90)]);
        assert!(missed(Phase::Beyond, &refused).is_empty());
        let few = outcome(9, &[("201", 100)]);
        assert_eq!(missed(Phase::Offered, &few), ["9 of 10 polls were held"]);
        let lost = outcome(10, &[("201", 9), ("429", 1), (UNANSWERED, 1)]);
        assert_eq!(missed(Phase::Beyond, &lost).len(), 1);
    }
}
