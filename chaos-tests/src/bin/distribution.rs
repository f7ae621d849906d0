//! `distribution`: what losing the leader again and again costs a distribution.

use anyhow::Result;
use clap::Parser;
use comfy_table::Cell;
use indicatif::{ProgressBar, ProgressStyle};
use mooncake_chaos::{
    arguments::{parse_duration, parse_size},
    distribution::{Distributed, Setup, distribute, prepare},
    process,
    report::{exit_code, median_and_worst, print_if_interrupted, right, table},
    testbed::parse_rate,
};
use parking_lot::Mutex;
use serde_json::json;
use std::{process::ExitCode, sync::Arc, time::Duration};

/// How much longer it may take with kills.
const RATIO: f64 = 1.05;

/// Distributes a model to nodes over shaped links, in turn without faults and with the leading master killed -9 (and
/// started again) every few seconds, and compares the medians.
///
/// Exit code 0: with kills it takes at most 1.05 times as long, no byte is fetched twice, the leader was killed in each
/// run that is to have kills, and there was no election in the others; 2: one of them does not hold; 1: it could not be
/// measured. Needs root, Debian's iproute2, nftables and haproxy, and below the temporary folder
/// (TMPDIR) the size of the model once for the source and once for each client.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Of the model.
    #[arg(long, default_value = "2GiB", value_parser = parse_size)]
    size: u64,
    /// Targets; the first is the seed.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=100))]
    clients: u8,
    /// From one kill to the next.
    #[arg(long, default_value = "5s", value_parser = parse_duration)]
    kill_every: Duration,
    /// Rate of every link, both ways; low enough that the network is what takes the time, not this machine.
    #[arg(long, default_value = "300mbit", value_parser = parse_rate)]
    link: u64,
    /// So many runs without kills, and as many with.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..))]
    pairs: u8,
    /// JSON instead of the table: one object per row and line.
    #[arg(long)]
    json: bool,
}

#[derive(Default)]
struct Results {
    at_rest: Vec<Distributed>,
    killed: Vec<Distributed>,
}

#[tokio::main]
async fn main() -> ExitCode {
    exit_code(measure(&Arguments::parse()).await)
}

async fn measure(arguments: &Arguments) -> Result<bool> {
    process::build_product()?;
    let setup = Setup {
        size_bytes: arguments.size,
        clients: arguments.clients.into(),
        link_bits_per_s: arguments.link,
    };
    let folder = tempfile::Builder::new().prefix("mooncake-model-").tempdir()?;
    let results = Arc::new(Mutex::new(Results::default()));
    let json = arguments.json;
    print_if_interrupted({
        let (results, folder) = (Arc::clone(&results), folder.path().to_owned());
        move || {
            let _ = std::fs::remove_dir_all(folder);
            print(&results.lock(), &setup, json);
        }
    });
    let done = all(arguments, &setup, folder.path(), &results).await;
    let results = results.lock();
    print(&results, &setup, json);
    done?;
    Ok(results.missed().is_empty())
}

async fn all(
    arguments: &Arguments,
    setup: &Setup,
    folder: &std::path::Path,
    results: &Mutex<Results>,
) -> Result<()> {
    let prepared = prepare(folder, setup)?;
    let total = setup.size_bytes * setup.clients as u64;
    for pair in 1..=arguments.pairs {
        for kill_every in [None, Some(arguments.kill_every)] {
            let style = ProgressStyle::with_template("{prefix} {bar:30} {bytes}/{total_bytes} {msg}")?;
            let bar = ProgressBar::new(total).with_style(style);
            let what = if kill_every.is_some() {
                "with kills"
            } else {
                "at rest"
            };
            bar.set_prefix(format!("pair {pair} of {}, {what}", arguments.pairs));
            let progress = |bytes, kills| {
                bar.set_position(bytes);
                bar.set_message(format!("{kills} kills"));
            };
            let one = distribute(setup, &prepared, kill_every, progress).await?;
            bar.finish_and_clear();
            let mut results = results.lock();
            match kill_every {
                None => results.at_rest.push(one),
                Some(_) => results.killed.push(one),
            }
        }
    }
    Ok(())
}

impl Results {
    fn runs(&self) -> impl Iterator<Item = &Distributed> {
        self.at_rest.iter().chain(&self.killed)
    }

    /// Of the medians.
    fn ratio(&self) -> Option<f64> {
        let median = |runs: &[Distributed]| {
            let (median, _) = median_and_worst(runs.iter().map(|run| run.took.as_secs_f64()))?;
            Some(median)
        };
        Some(median(&self.killed)? / median(&self.at_rest)?)
    }

    /// A line for each thing that does not hold.
    fn missed(&self) -> Vec<String> {
        let mut missed = Vec::new();
        match self.ratio() {
            Some(ratio) if ratio <= RATIO => {}
            Some(ratio) => missed.push(format!(
                "with kills {ratio:.3} times as long, not at most {RATIO}"
            )),
            None => missed.push("no pair was finished".into()),
        }
        let twice = self.runs().map(Distributed::twice_bytes).sum::<u64>();
        if twice > 0 {
            missed.push(format!("{twice} bytes were fetched twice"));
        }
        let elections = self.at_rest.iter().map(|run| run.terms).sum::<u64>();
        if elections > 0 {
            missed.push(format!("{elections} elections with the masters at rest"));
        }
        let never = self.killed.iter().filter(|run| run.kills == 0).count();
        if never > 0 {
            missed.push(format!(
                "in {never} runs with kills the distribution ended before the first: choose a shorter --kill-every or a \
                 larger --size"
            ));
        }
        missed
    }
}

fn print(results: &Results, setup: &Setup, json: bool) {
    let kinds = [("at rest", &results.at_rest), ("leader killed", &results.killed)];
    if json {
        for (kind, runs) in kinds {
            for run in runs {
                let line = json!({
                    "masters": kind,
                    "size_bytes": setup.size_bytes,
                    "clients": setup.clients,
                    "link_bits_per_s": setup.link_bits_per_s,
                    "took_s": run.took.as_secs_f64(),
                    "kills": run.kills,
                    "terms": run.terms,
                    "source_again_bytes": run.source_again_bytes,
                    "refetched_bytes": run.refetched_bytes,
                    "duplicate_bytes": run.duplicate_bytes,
                    "longest_unreadable_ms": run.longest_unreadable.as_millis() as u64,
                });
                println!("{line}");
            }
        }
        let line = json!({
            "masters": "compared",
            "pairs": results.killed.len(),
            "bound_s": setup.bound().as_secs_f64(),
            "ratio": results.ratio(),
            "holds": results.missed().is_empty(),
            "does_not_hold": results.missed(),
        });
        println!("{line}");
        return;
    }
    let mut table = table(&[
        "masters",
        "s",
        "of the bound",
        "kills",
        "terms",
        "source again B",
        "refetched B",
        "duplicate B",
        "unreadable ms",
    ]);
    for (kind, runs) in kinds {
        for run in runs {
            let took = run.took.as_secs_f64();
            let numbers = [
                format!("{took:.2}"),
                format!("{:.3}", took / setup.bound().as_secs_f64()),
                run.kills.to_string(),
                run.terms.to_string(),
                run.source_again_bytes.to_string(),
                run.refetched_bytes.to_string(),
                run.duplicate_bytes.to_string(),
                run.longest_unreadable.as_millis().to_string(),
            ];
            let mut row = vec![Cell::new(kind)];
            row.extend(numbers.map(right));
            table.add_row(row);
        }
    }
    println!("{table}");
    println!(
        "bound: {:.2} s (size by rate); unreadable: the longest time for which the job's status could not be read",
        setup.bound().as_secs_f64()
    );
    if let Some(ratio) = results.ratio() {
        println!(
            "ratio of the medians of {} pairs: {ratio:.3} ({} is wanted); fetched twice: {} bytes (0 is wanted)",
            results.killed.len(),
            RATIO,
            results.runs().map(Distributed::twice_bytes).sum::<u64>()
        );
    }
    for what in results.missed() {
        println!("DOES NOT HOLD: {what}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(took_s: f64, kills: usize, terms: u64) -> Distributed {
        Distributed {
            took: Duration::from_secs_f64(took_s),
            kills,
            terms,
            source_again_bytes: 0,
            refetched_bytes: 0,
            duplicate_bytes: 0,
            longest_unreadable: Duration::ZERO,
        }
    }

    #[test]
    fn every_bound_is_looked_at() {
        let results = |at_rest, killed| Results {
            at_rest: vec![at_rest],
            killed: vec![killed],
        };
        let missed = |at_rest, killed| results(at_rest, killed).missed();
        assert!(missed(run(10.0, 0, 0), run(10.5, 2, 2)).is_empty());
        let mut twice = run(10.0, 2, 2);
        twice.duplicate_bytes = 1;
        for (at_rest, killed, wanted) in [
            (run(10.0, 0, 0), run(10.6, 2, 2), "times as long"),
            (run(10.0, 0, 0), twice, "fetched twice"),
            (run(10.0, 0, 1), run(10.0, 2, 2), "1 elections"),
            (run(10.0, 0, 0), run(10.0, 0, 0), "--kill-every"),
        ] {
            let missed = missed(at_rest, killed);
            assert_eq!(missed.len(), 1, "{missed:?}");
            assert!(missed[0].contains(wanted), "{wanted}: {missed:?}");
        }
        assert_eq!(Results::default().missed().len(), 1);
    }
}
