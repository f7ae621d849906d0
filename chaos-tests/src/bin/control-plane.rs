//! `control-plane`: what the masters can do apart from moving bytes.

use anyhow::Result;
use clap::Parser;
use indicatif::ProgressBar;
use mooncake_chaos::{
    arguments::parse_duration,
    control_plane::{Report, fleet, rates},
    failover::etcd_is_there,
    process,
    report::{exit_code, print_if_interrupted},
};
use parking_lot::Mutex;
use std::{process::ExitCode, sync::Arc, time::Duration};

/// Creates and reads jobs as fast as three masters answer, in turn with puts and ranges of a 3-member etcd on the same
/// machine; then simulates nodes over real sessions, idle and with one job for all of them.
///
/// Exit code 0: nothing failed, no node's session ended before its time, the idle leader takes at most 0.2 of a core, the
/// job at most 20 log entries per target, and there was no election; 2: one of these does not hold; 1: it could not be measured. Needs root and Debian's
/// iproute2, nftables, haproxy and etcd-server. Measure on a machine that does nothing else.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Callers at once, each of whom asks again as soon as it is answered.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=4096))]
    callers: u16,
    /// How long each kind of request is asked in one round.
    #[arg(long, default_value = "10s", value_parser = parse_duration)]
    lasts: Duration,
    /// Of each kind, in turn with etcd.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    rounds: u16,
    /// Simulated nodes.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u16).range(1..=4096))]
    nodes: u16,
    /// Chunks of the model that goes to all of them.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    chunks: u32,
    /// How long the nodes do nothing.
    #[arg(long, default_value = "30s", value_parser = parse_duration)]
    idle: Duration,
    /// How long each node works at its part of the job.
    #[arg(long, default_value = "20s", value_parser = parse_duration)]
    task: Duration,
    /// Only one half of it.
    #[arg(long)]
    only: Option<Half>,
    /// JSON instead of tables: one object per line.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Half {
    /// Creates and reads beside etcd.
    Rates,
    /// The simulated nodes.
    Nodes,
}

fn main() -> ExitCode {
    exit_code(measure(&Arguments::parse()))
}

fn measure(arguments: &Arguments) -> Result<bool> {
    etcd_is_there(arguments.only != Some(Half::Nodes), "--only nodes")?;
    process::build_product()?;
    let plan = rates::Plan {
        callers: arguments.callers.into(),
        lasts: arguments.lasts,
        rounds: arguments.rounds.into(),
    };
    let fleet_plan = fleet::Plan {
        nodes: arguments.nodes.into(),
        chunks: arguments.chunks.into(),
        idle: arguments.idle,
        task: arguments.task,
    };
    let report = Arc::new(Mutex::new(Report::new(plan, fleet_plan)));
    let json = arguments.json;
    print_if_interrupted({
        let report = Arc::clone(&report);
        move || print(&report.lock(), json)
    });
    let runtime = tokio::runtime::Runtime::new()?;
    let done = runtime.block_on(all(arguments.only, plan, fleet_plan, &report));
    let report = report.lock();
    print(&report, json);
    done?;
    Ok(report.broken().is_empty())
}

async fn all(
    only: Option<Half>,
    plan: rates::Plan,
    fleet_plan: fleet::Plan,
    report: &Mutex<Report>,
) -> Result<()> {
    if only != Some(Half::Nodes) {
        let bar = ProgressBar::new((plan.rounds * rates::Kind::ALL.len() * 2) as u64);
        rates::all(plan, report, || bar.inc(1)).await?;
        bar.finish_and_clear();
    }
    if only != Some(Half::Rates) {
        let bar = ProgressBar::new_spinner();
        bar.enable_steady_tick(Duration::from_millis(200));
        fleet::run(fleet_plan, report, |what| bar.set_message(what.to_owned())).await?;
        bar.finish_and_clear();
    }
    Ok(())
}

fn print(report: &Report, json: bool) {
    match json {
        true => report.json_lines().iter().for_each(|line| println!("{line}")),
        false => print!("{}", report.text()),
    }
}
