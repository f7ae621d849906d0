//! `loopback`: what it costs a receiver to take a model in, beside the least that it could cost.

use anyhow::{Result, ensure};
use clap::Parser;
use indicatif::ProgressBar;
use mooncake_chaos::{
    arguments::parse_size,
    loopback::{Loopback, Report, Setup, floor},
    process,
    report::{cores, exit_code, print_if_interrupted},
};
use parking_lot::Mutex;
use std::{path::PathBuf, process::ExitCode, sync::Arc};

/// Moves a model from one node to another over unshaped links, in turn with a floor that only reads, digests, writes and
/// syncs, and compares CPU seconds per GiB of the receivers and throughput.
///
/// Exit code 0: the receiver takes at most 1.5 times the CPU of the floor's and has at least 0.8 times its throughput;
/// 2: one of them does not hold; 1: it could not be measured. Needs root, Debian's iproute2 and nftables, and below the
/// temporary folder (TMPDIR) four times the size. Measure on a machine that does nothing else.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Of the file.
    #[arg(long, default_value = "2GiB", value_parser = parse_size)]
    size: u64,
    /// Chunk size of the manifest.
    #[arg(long, default_value = "4MiB", value_parser = parse_size)]
    chunk: u64,
    /// Of each side, in turn; medians are compared.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Connections and threads of the floor; by default as many as there are cores.
    #[arg(long)]
    streams: Option<usize>,
    /// Nodes and floor write to memory instead of the disk.
    #[arg(long)]
    memory: bool,
    /// A Python that has Mooncake Store (`scripts/mooncake-store.sh` makes one and prints it): its get over TCP is
    /// measured beside, from memory into memory, without digests and files
    #[arg(long, value_name = "PYTHON")]
    mooncake_store: Option<PathBuf>,
    /// JSON instead of the table: one object per line.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let mut given = std::env::args().skip(1);
    let done = match given.next() {
        Some(first) if first == floor::FLAG => floor::main(given.next()).map(|()| true),
        _ => measure(&Arguments::parse()),
    };
    exit_code(done)
}

fn measure(arguments: &Arguments) -> Result<bool> {
    ensure!(arguments.runs > 0, "--runs must be at least 1");
    let cores = cores();
    let streams = arguments.streams.unwrap_or(cores);
    ensure!((1..=64).contains(&streams), "--streams: 1 to 64");
    process::build_product()?;
    let setup = Setup {
        size_bytes: arguments.size,
        chunk_bytes: arguments.chunk,
        streams,
        memory: arguments.memory,
    };
    let folder = tempfile::Builder::new().prefix("mooncake-model-").tempdir()?;
    let report = Arc::new(Mutex::new(Report::new(setup, arguments.runs)));
    let (json, store) = (arguments.json, arguments.mooncake_store.clone());
    print_if_interrupted({
        let (report, folder) = (Arc::clone(&report), folder.path().to_owned());
        move || {
            let _ = std::fs::remove_dir_all(folder);
            print(&report.lock(), json);
        }
    });
    let runtime = tokio::runtime::Runtime::new()?;
    let loopback = Loopback::prepare(setup, folder.path(), store)?;
    let done = runtime.block_on(all(arguments.runs, &loopback, &report));
    let report = report.lock();
    print(&report, json);
    done?;
    Ok(report.broken().is_empty())
}

async fn all(runs: usize, loopback: &Loopback, report: &Mutex<Report>) -> Result<()> {
    let bar = ProgressBar::new(runs as u64);
    for _ in 0..runs {
        let measured = loopback.run().await?;
        report.lock().add(measured);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(())
}

fn print(report: &Report, json: bool) {
    match json {
        true => report.json_lines().iter().for_each(|line| println!("{line}")),
        false => print!("{}", report.text()),
    }
}
