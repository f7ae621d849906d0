//! `overload`: what the masters do when more is asked of them than they can do.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use indicatif::ProgressBar;
use mooncake_chaos::failover::{Load, Mooncake, Outcome, overload, percentile};
use serde_json::json;
use std::{process::ExitCode, time::Duration};

const MEMORY_LIMIT_BYTES: u64 = 3 << 29;
const PROBE_LIMIT: Duration = Duration::from_millis(100);
/// The generator's own sockets and files beside one per poll.
const SPARE_FILES: u64 = 8_192;

/// Opens thousands of long polls and offers more writes than three masters on this machine can take.
///
/// The generator runs on one core. Exit code 0: refused with 429 or 503 and Retry-After instead of a collapse, no
/// election, no node down, each master's peak memory at most 1.5 GiB, the leader's liveness probe within 100 ms in
/// 99 of 100; 2: something of this did not hold; 1: it could not be measured. Needs root and Debian's iproute2, nftables
/// and haproxy.
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
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn measure(arguments: &Arguments) -> Result<Outcome> {
    ensure!(arguments.seconds > 0, "--seconds must be at least 1");
    allow_files(arguments.polls as u64 + SPARE_FILES)?;
    // The masters inherit nothing of the pinning: they are started before it.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut subject = runtime.block_on(Mooncake::start())?;
    pin(arguments.core)?;
    let load = Load {
        polls: arguments.polls,
        writes_per_s: arguments.writes_per_s,
        lasts: Duration::from_secs(arguments.seconds),
    };
    let bar = ProgressBar::new(arguments.seconds);
    let outcome = runtime.block_on(overload(&mut subject, load, || bar.inc(1)))?;
    bar.finish_and_clear();
    subject.finish();
    Ok(outcome)
}

/// This thread, and with it the runtime that runs on it, stays on one core.
fn pin(core: usize) -> Result<()> {
    ensure!(core < libc::CPU_SETSIZE as usize, "there is no core {core}");
    // SAFETY: the set is plain data, all zeroes is the empty one; CPU_SET writes inside it as was checked above.
    let pinned = unsafe {
        let mut cores: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut cores);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &cores)
    };
    ensure!(
        pinned == 0,
        "pinning the generator to core {core}: {}",
        std::io::Error::last_os_error()
    );
    Ok(())
}

fn allow_files(wanted: u64) -> Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= wanted) {
        return Ok(());
    }
    let maximum = limit.maximum.map(|maximum| maximum.max(wanted));
    let limit = Rlimit {
        current: Some(wanted),
        maximum,
    };
    setrlimit(Resource::Nofile, limit).with_context(|| format!("raising the limit of open files to {wanted}"))
}

/// What did not hold.
fn broken(outcome: &Outcome) -> Vec<String> {
    let mut broken = Vec::new();
    let mut check = |holds: bool, what: String| {
        if !holds {
            broken.push(what);
        }
    };
    let (before, after) = outcome.terms;
    check(
        before == after,
        format!("the term went from {before} to {after}: there was an election"),
    );
    check(
        outcome.nodes_not_up == 0,
        format!("nodes were not up {} times", outcome.nodes_not_up),
    );
    check(
        outcome.without_retry_after == 0,
        format!("{} refusals had no Retry-After", outcome.without_retry_after),
    );
    let unanswered = outcome.writes.get("unanswered").copied().unwrap_or(0);
    check(unanswered == 0, format!("{unanswered} writes were not answered"));
    let strange: Vec<_> = outcome
        .writes
        .keys()
        .filter(|status| !["201", "429", "503", "not sent", "unanswered"].contains(&status.as_str()))
        .collect();
    check(
        strange.is_empty(),
        format!("writes were answered with {strange:?}"),
    );
    check(
        !outcome.acknowledged.is_empty(),
        "no write was acknowledged".into(),
    );
    for (master, peak) in outcome.peak_memory_bytes.iter().enumerate() {
        check(
            *peak <= MEMORY_LIMIT_BYTES,
            format!("master {}: peak memory {} MiB", master + 1, peak >> 20),
        );
    }
    let p99 = outcome.p99_probe();
    check(
        p99 <= PROBE_LIMIT,
        format!("the leader's probe: p99 {} ms", p99.as_millis()),
    );
    broken
}

fn print(outcome: &Outcome, broken: &[String]) {
    println!("writes by status       {:?}", outcome.writes);
    println!(
        "acknowledged writes    p50 {} ms, p99 {} ms",
        percentile(&outcome.acknowledged, 0.5).as_millis(),
        outcome.p99_write().as_millis()
    );
    println!(
        "long polls             {} open, {} refused",
        outcome.polls_open, outcome.polls_refused
    );
    println!(
        "leader's probe         p99 {} ms",
        outcome.p99_probe().as_millis()
    );
    let peaks: Vec<_> = outcome.peak_memory_bytes.iter().map(|b| b >> 20).collect();
    println!("peak memory, MiB       {peaks:?}");
    println!(
        "term                   {} -> {}",
        outcome.terms.0, outcome.terms.1
    );
    println!("nodes not up           {}", outcome.nodes_not_up);
    for what in broken {
        println!("DOES NOT HOLD          {what}");
    }
}

fn as_json(outcome: &Outcome, broken: &[String]) -> serde_json::Value {
    let ms = |at: Duration| at.as_micros() as f64 / 1000.0;
    json!({
        "writes": outcome.writes,
        "p50_write_ms": ms(percentile(&outcome.acknowledged, 0.5)),
        "p99_write_ms": ms(outcome.p99_write()),
        "polls_open": outcome.polls_open,
        "polls_refused": outcome.polls_refused,
        "p99_probe_ms": ms(outcome.p99_probe()),
        "peak_memory_bytes": outcome.peak_memory_bytes,
        "term_before": outcome.terms.0,
        "term_after": outcome.terms.1,
        "nodes_not_up": outcome.nodes_not_up,
        "does_not_hold": broken,
    })
}
