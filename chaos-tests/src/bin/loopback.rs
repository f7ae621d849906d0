//! `loopback`: what it costs a receiver to take a model in, beside the least that it could cost.

use anyhow::{Result, ensure};
use clap::Parser;
use indicatif::ProgressBar;
use mooncake_chaos::{
    arguments::parse_size,
    loopback::{Loopback, Report, Setup, floor, store},
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
    /// Measure Mooncake Store's get over TCP beside, from memory into memory, without digests and files.
    ///
    /// auto: by the Python that scripts/mooncake-store.sh of the repository makes; where it cannot, that is said and
    /// Mooncake Store left out, and the exit code is that of the rest. none: not at all. Else the path of a Python that
    /// has it.
    #[arg(long, value_name = "auto|none|PYTHON", default_value = "auto")]
    mooncake_store: Beside,
    /// JSON instead of the table: one object per line.
    #[arg(long)]
    json: bool,
}

#[derive(Clone)]
enum Beside {
    Auto,
    None,
    Python(PathBuf),
}

impl From<&str> for Beside {
    fn from(given: &str) -> Self {
        match given {
            "auto" => Self::Auto,
            "none" => Self::None,
            path => Self::Python(path.into()),
        }
    }
}

impl Beside {
    fn python(&self) -> Result<Option<PathBuf>> {
        match self {
            Self::None => Ok(None),
            Self::Python(path) => store::is_there(path).map(|()| Some(path.clone())),
            Self::Auto => {
                let made = store::made();
                Ok(made
                    .inspect_err(|e| eprintln!("WARNING: MOONCAKE STORE IS NOT MEASURED: {e:#}"))
                    .ok())
            }
        }
    }
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
    let store = arguments.mooncake_store.python()?;
    let setup = Setup {
        size_bytes: arguments.size,
        chunk_bytes: arguments.chunk,
        streams,
        memory: arguments.memory,
    };
    let folder = tempfile::Builder::new().prefix("mooncake-model-").tempdir()?;
    let report = Arc::new(Mutex::new(Report::new(setup, arguments.runs)));
    let json = arguments.json;
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
