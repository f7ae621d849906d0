//! `broadcast`: how near a distribution comes to the time that one plain stream takes, beside other tools.

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use mooncake_chaos::{
    arguments::parse_size,
    broadcast::{
        Benchmark, Machine, Peer, Report, Setup, Slow, Subject, available_memory, disk_rate, tools_are_there,
    },
    process,
    report::{exit_code, print_if_interrupted},
    testbed::parse_rate,
};
use parking_lot::Mutex;
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

/// Distributes a file from a seed to all followers over shaped links, and lets other tools do the same.
///
/// The bound is S/B: the size by what one plain TCP stream brings on the same testbed. Exit code 0: all that is wanted
/// of the rows measured holds (docs/performance.md lists it); 2: some of it does not, and is named; 1: it could not be
/// measured. Needs root, Debian's iproute2 and nftables, and what the peers need: aria2, nginx-light and curl, socat.
/// Ctrl-C prints what was measured so far and removes all of it.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Receivers beside the seed; a row for each number.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 8])]
    followers: Vec<usize>,
    /// Rate of every link, both ways.
    #[arg(long, default_value = "200mbit", value_parser = parse_rate)]
    link: u64,
    /// Of the file.
    #[arg(long, default_value = "512MiB", value_parser = parse_size)]
    size: u64,
    /// Chunk sizes of the manifest; a row for each.
    #[arg(long, value_delimiter = ',', default_values = ["4MiB", "256MiB"], value_parser = parse_size)]
    chunk: Vec<u64>,
    /// Whom to measure beside; by default all, and none with --source-limit.
    #[arg(long, value_enum, value_delimiter = ',')]
    peers: Option<Vec<Beside>>,
    /// Of each; medians are compared.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// The source is on a host of its own, over HTTP, and gives no more than this in all.
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    source_limit: Option<u64>,
    /// So many followers have links of this rate.
    #[arg(long, value_name = "N:RATE", value_parser = parse_slow)]
    slow: Option<Slow>,
    /// Rate of the seed's link.
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    seed_link: Option<u64>,
    /// Measure too what it costs the others that a follower is killed (-9) in the middle.
    #[arg(long)]
    kill: bool,
    /// Measure too what it costs the others that a further follower joins in the middle, by a second job.
    #[arg(long)]
    join: bool,
    /// Where nodes and peers put the file; by default in memory if the disk would decide.
    #[arg(long, value_enum, default_value = "auto")]
    folders: Folders,
    /// JSON instead of the table: one object per row and line.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Beside {
    Aria2,
    Nginx,
    Socat,
    /// Nobody.
    None,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Folders {
    Auto,
    Disk,
    Memory,
}

fn parse_slow(text: &str) -> Result<Slow, String> {
    let parts = text.split_once(':');
    let (followers, rate) = parts.ok_or_else(|| format!("'{text}': write 2:50mbit"))?;
    Ok(Slow {
        followers: followers
            .parse()
            .map_err(|_| format!("'{followers}' is no number of followers"))?,
        link_bits_per_s: parse_rate(rate)?,
    })
}

impl Arguments {
    fn setup(&self) -> Setup {
        let peers = match &self.peers {
            Some(given) => {
                let mut peers: Vec<_> = given.iter().filter_map(|peer| peer.peer()).collect();
                peers.sort_unstable();
                peers.dedup();
                peers
            }
            None if self.source_limit.is_some() => Vec::new(),
            None => Peer::ALL.to_vec(),
        };
        let mut followers = self.followers.clone();
        followers.sort_unstable();
        followers.dedup();
        Setup {
            size_bytes: self.size,
            followers,
            chunks: self.chunk.clone(),
            link_bits_per_s: self.link,
            seed_link_bits_per_s: self.seed_link,
            slow: self.slow,
            source_bits_per_s: self.source_limit,
            kill: self.kill,
            join: self.join,
            peers,
            runs: self.runs,
        }
    }
}

impl Beside {
    fn peer(self) -> Option<Peer> {
        match self {
            Self::Aria2 => Some(Peer::Aria2),
            Self::Nginx => Some(Peer::Nginx),
            Self::Socat => Some(Peer::Socat),
            Self::None => None,
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    exit_code(measure(&Arguments::parse()).await)
}

async fn measure(arguments: &Arguments) -> Result<bool> {
    let setup = arguments.setup();
    setup.check()?;
    let path = std::env::var_os("PATH").context("there is no PATH")?;
    let path: Vec<PathBuf> = std::env::split_paths(&path).collect();
    tools_are_there(&setup.peers, path.iter().map(PathBuf::as_path))?;
    process::build_product()?;
    let folder = tempfile::Builder::new().prefix("mooncake-model-").tempdir()?;
    let disk_bytes_per_s = disk_rate(folder.path(), setup.size_bytes)?;
    let memory = match arguments.folders {
        Folders::Auto => setup.wants_memory(disk_bytes_per_s),
        Folders::Disk => false,
        Folders::Memory => true,
    };
    if memory {
        setup.memory_is_there(available_memory()?)?;
    }
    let machine = Machine {
        disk_bytes_per_s,
        memory,
    };
    let report = Arc::new(Mutex::new(Report::new(setup.clone(), machine)));
    let json = arguments.json;
    print_if_interrupted({
        let (report, folder) = (Arc::clone(&report), folder.path().to_owned());
        move || {
            let _ = std::fs::remove_dir_all(folder);
            print(&report.lock(), json);
        }
    });
    let done = all(setup, folder.path(), memory, &report).await;
    let report = report.lock();
    print(&report, json);
    done?;
    Ok(report.broken().is_empty())
}

async fn all(setup: Setup, folder: &Path, memory: bool, report: &Mutex<Report>) -> Result<()> {
    let rounds = setup.rounds();
    let steps: usize = rounds.iter().map(|round| round.subjects.len()).sum();
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}")?;
    let bar = ProgressBar::new(steps as u64).with_style(style);
    bar.enable_steady_tick(Duration::from_secs(1));
    bar.set_message("making the file");
    let benchmark = Benchmark::prepare(setup, folder, memory)?;
    for round in &rounds {
        bar.set_message(format!(
            "run {}, followers {}: testbed and plain stream",
            round.run, round.followers
        ));
        let begins = |subject: Subject| {
            let (run, followers) = (round.run, round.followers);
            bar.set_message(format!("run {run}, followers {followers}: {}", subject.name()));
        };
        let measured = |measured| {
            report.lock().add(measured);
            bar.inc(1);
        };
        benchmark.round(round, begins, measured).await?;
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
