//! `failover`: how long writes stop when the leader is lost, beside etcd on the same machine.

use anyhow::{Result, bail};
use clap::{Parser, ValueEnum};
use comfy_table::{Cell, CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use mooncake_chaos::failover::{
    Cost, Etcd, Fault, HandOver, Mooncake, Series, Subject, hand_over, percentile, run,
};
use serde_json::json;
use std::{process::ExitCode, time::Duration};

/// Loses the leader again and again under load through HAProxy, and says for how long no write was acknowledged.
///
/// Mooncake's three masters first, then a 3-member etcd with its default timers and with 50/500 ms, each member in a
/// network namespace of its own. Needs root, and Debian's iproute2, nftables, haproxy and etcd-server. Exit code 0
/// when all was measured, 1 when it was not.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// How often the leader is killed -9.
    #[arg(long, default_value_t = 100)]
    kills: usize,
    /// How often it is frozen (SIGSTOP), and how often it is cut off.
    #[arg(long, default_value_t = 30)]
    silences: usize,
    /// Seconds from one fault to the next.
    #[arg(long, default_value_t = 10.0)]
    interval_s: f64,
    /// Whom to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["mooncake", "etcd", "etcd-fast"])]
    subjects: Vec<Whom>,
    /// How often the leader hands over (SIGTERM), and how many restarts the rolling restart has; Mooncake only.
    #[arg(long, default_value_t = 30)]
    hand_overs: usize,
    /// Writes per second during hand-overs.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    writes_per_s: u32,
    /// One JSON document instead of the table, with every sample.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Whom {
    Mooncake,
    Etcd,
    EtcdFast,
}

#[tokio::main]
async fn main() -> ExitCode {
    match measure(Arguments::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn measure(arguments: Arguments) -> Result<()> {
    if arguments.kills == 0 && arguments.silences == 0 && arguments.hand_overs == 0 {
        bail!("nothing to measure: give --kills, --silences or --hand-overs a number above 0");
    }
    let (mut all, mut costs) = (Vec::new(), Vec::new());
    for whom in &arguments.subjects {
        match whom {
            Whom::Mooncake => {
                let mut subject = Mooncake::start().await?;
                series(&mut subject, &arguments, &mut all).await?;
                for how in [HandOver::Stop, HandOver::Rolling] {
                    let bar = bar(arguments.hand_overs, format!("mooncake: {}", how.name()))?;
                    let (count, rate) = (arguments.hand_overs, arguments.writes_per_s);
                    let cost = hand_over(&mut subject, how, count, rate, || bar.inc(1)).await?;
                    bar.finish_and_clear();
                    costs.push((how, cost));
                }
                subject.finish();
            }
            Whom::Etcd | Whom::EtcdFast => {
                let timers = (*whom == Whom::EtcdFast).then_some((50, 500));
                let mut subject = Etcd::start(timers).await?;
                series(&mut subject, &arguments, &mut all).await?;
                subject.finish();
            }
        }
    }
    match arguments.json {
        true => println!("{:#}", as_json(&all, &costs)),
        false => println!("{}\n{}", as_table(&all), costs_table(&costs)),
    }
    Ok(())
}

async fn series<S: Subject>(subject: &mut S, arguments: &Arguments, all: &mut Vec<Series>) -> Result<()> {
    let interval = Duration::from_secs_f64(arguments.interval_s);
    let faults = [
        (Fault::Kill, arguments.kills),
        (Fault::Freeze, arguments.silences),
        (Fault::CutOff, arguments.silences),
    ];
    for (fault, count) in faults.into_iter().filter(|(_, count)| *count > 0) {
        let bar = bar(count, format!("{}: {}", subject.name(), fault.name()))?;
        let done = |took: Duration| {
            bar.set_message(format!("{} ms", took.as_millis()));
            bar.inc(1);
        };
        all.push(run(subject, fault, count, interval, done).await?);
        bar.finish_and_clear();
    }
    Ok(())
}

fn bar(count: usize, what: String) -> Result<ProgressBar> {
    let style = ProgressStyle::with_template("{prefix} {bar:30} {pos}/{len} {msg} {eta}")?;
    let bar = ProgressBar::new(count as u64).with_style(style);
    bar.set_prefix(what);
    bar.tick();
    Ok(bar)
}

fn costs_table(costs: &[(HandOver, Cost)]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header([
        "planned",
        "times",
        "writes",
        "failed",
        "p99 ms during",
        "max ms during",
        "p99 ms otherwise",
    ]);
    for (how, cost) in costs {
        let ms = |sorted: &[Duration], p| percentile(sorted, p).as_millis().to_string();
        let numbers = [
            cost.count.to_string(),
            cost.writes.to_string(),
            cost.failed.len().to_string(),
            ms(&cost.during, 0.99),
            ms(&cost.during, 1.0),
            ms(&cost.otherwise, 0.99),
        ];
        let mut row = vec![Cell::new(how.name())];
        row.extend(numbers.map(|number| Cell::new(number).set_alignment(CellAlignment::Right)));
        table.add_row(row);
    }
    table
}

fn as_table(all: &[Series]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header([
        "cluster",
        "leader",
        "times",
        "p50 ms",
        "p99 ms",
        "max ms",
        "extra terms",
    ]);
    for series in all {
        let ms = |p| series.percentile(p).as_millis().to_string();
        let numbers = [
            series.samples.len().to_string(),
            ms(0.5),
            ms(0.99),
            ms(1.0),
            series.extra_terms.to_string(),
        ];
        let mut row = vec![Cell::new(&series.subject), Cell::new(series.fault.name())];
        row.extend(numbers.map(|number| Cell::new(number).set_alignment(CellAlignment::Right)));
        table.add_row(row);
    }
    table
}

fn as_json(all: &[Series], costs: &[(HandOver, Cost)]) -> serde_json::Value {
    let ms = |at: Duration| at.as_micros() as f64 / 1000.0;
    let planned = |(how, cost): &(HandOver, Cost)| {
        json!({
            "planned": how.name(),
            "times": cost.count,
            "writes": cost.writes,
            "failed": cost.failed,
            "p99_during_ms": ms(percentile(&cost.during, 0.99)),
            "max_during_ms": ms(percentile(&cost.during, 1.0)),
            "p99_otherwise_ms": ms(percentile(&cost.otherwise, 0.99)),
        })
    };
    let one = |series: &Series| {
        json!({
            "cluster": series.subject,
            "fault": series.fault.name(),
            "times": series.samples.len(),
            "p50_ms": ms(series.percentile(0.5)),
            "p99_ms": ms(series.percentile(0.99)),
            "max_ms": ms(series.percentile(1.0)),
            "extra_terms": series.extra_terms,
            "samples_ms": series.samples.iter().map(|s| ms(*s)).collect::<Vec<_>>(),
        })
    };
    json!({
        "lost": all.iter().map(one).collect::<Vec<_>>(),
        "planned": costs.iter().map(planned).collect::<Vec<_>>(),
    })
}
