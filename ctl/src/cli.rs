//! The command line as it is typed.
// Doc comments are the help texts here; flattened groups of options have none of their own.
#![allow(missing_docs)]

use clap::{Args, Parser, Subcommand, ValueEnum};
use mooncake_proto::{
    api::JobStatus,
    ids::{JobId, NodeId},
};
use std::{path::PathBuf, time::Duration};
use url::Url;

const EXAMPLES: &str = "\
Examples:
  mooncakectl nodes
      Which nodes there are, and whether they are up.
  mooncakectl distribute /models/llama --all --seed 10.0.0.1:25001 --watch
      Copy a folder that is on node 10.0.0.1:25001 to every node, and wait until it is there.
  mooncakectl manifest create /models/llama --url-prefix https://store/models/llama -o llama.json
  mooncakectl distribute llama.json --to 10.0.0.1:25001,10.0.0.2:25001
      The same in two steps, with the files fetched from a web server.
  mooncakectl jobs watch 019d3ca8-c2e7-7d73-ab73-445f9143d1eb

Exit codes:
  0  success (with --watch: the job completed)
  1  the job failed or was canceled
  2  bad usage, a file that cannot be read, or a request that the cluster refused
  3  no master could be reached, or none gave a usable answer in time
  above 128: ended by a signal, 128 and its number

Every request goes to the first endpoint that answers. A request that fails there is repeated at the others;
that never makes two jobs, because every create request carries a job id.";

/// Operates a Mooncake distribution cluster: puts model folders onto nodes and shows how far they are.
#[derive(Debug, Parser)]
#[command(name = "mooncakectl", version, after_help = EXAMPLES, after_long_help = EXAMPLES)]
pub struct Cli {
    /// A master's HTTP address or the load balancer's; repeat it, or separate several by commas
    #[arg(
        long = "endpoint",
        env = "MOONCAKE_ENDPOINTS",
        value_name = "URL",
        value_delimiter = ',',
        default_value = DEFAULT_ENDPOINT,
        value_parser = parse_endpoint,
        global = true
    )]
    endpoints: Vec<Option<Url>>,
    /// How long one request may take before the next endpoint is tried
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_duration, global = true)]
    pub timeout: Duration,
    /// Short for --output json
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// Where a master on this machine listens unless told otherwise.
const DEFAULT_ENDPOINT: &str = "http://127.0.0.1:9003";

impl Cli {
    /// The endpoints in order; an empty variable or list is as good as none.
    pub fn endpoints(&self) -> Vec<Url> {
        let given: Vec<Url> = self.endpoints.iter().flatten().cloned().collect();
        if given.is_empty() {
            parse_endpoint(DEFAULT_ENDPOINT)
                .ok()
                .flatten()
                .into_iter()
                .collect()
        } else {
            given
        }
    }
}

/// Every command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make manifests
    #[command(subcommand)]
    Manifest(ManifestCommand),
    /// Put a model onto nodes: a folder, or a manifest made before
    #[command(after_help = DISTRIBUTE_EXAMPLES)]
    Distribute(Box<DistributeArgs>),
    /// Look at, follow and cancel distribution jobs
    #[command(subcommand)]
    Jobs(JobsCommand),
    /// List the nodes
    Nodes(OutputArgs),
    /// List the models and where they are
    Models(OutputArgs),
    /// Look at the masters, change who they are, back them up
    #[command(subcommand)]
    Cluster(ClusterCommand),
}

const DISTRIBUTE_EXAMPLES: &str = "\
Examples:
  mooncakectl distribute ./llama --all --watch
  mooncakectl distribute ./llama --to node1:25001,node2:25001 --seed node1:25001 --revision v2
  mooncakectl distribute llama.json --all --job-id nightly-2026-01-31

A folder is hashed first. Its files are read by the seed node, from the same paths: they must exist there, and
its client must have been started with --allow-source for them. With --url-prefix they are fetched from a web
server instead.

Without --revision a folder's revision is made from its content, so that the same folder is the same model
version, and another content is another one.";

/// Which format standard output has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people
    Table,
    /// For programs: what the API answered
    Json,
}

/// `-o`.
#[derive(Clone, Copy, Debug, Args)]
pub struct OutputArgs {
    /// Format of standard output
    #[arg(short, long, value_enum, default_value = "table")]
    pub output: Format,
}

/// `manifest …`.
#[derive(Debug, Subcommand)]
pub enum ManifestCommand {
    /// Hash a folder and write its manifest
    #[command(after_help = "\
Examples:
  mooncakectl manifest create /models/llama -o llama.json
  mooncakectl manifest create /models/llama --url-prefix https://store/llama --model-id meta/llama --revision r1

Files in sub-folders, dotfiles and empty files are part of the model; symbolic links are followed. The manifest
is what `mooncakectl distribute` takes, and the `manifest` member of a create request.")]
    Create {
        /// The folder
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        #[command(flatten)]
        model: ModelArgs,
        /// Where to write the manifest; left out: standard output
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
}

/// How a folder becomes a model version.
#[derive(Clone, Debug, Default, Args)]
pub struct ModelArgs {
    /// Name of the model, e.g. org/name; left out: the folder's name
    #[arg(long, value_name = "ID")]
    pub model_id: Option<String>,
    /// Its revision; left out: made from the content
    #[arg(long, value_name = "REVISION")]
    pub revision: Option<String>,
    /// Its format; left out: guessed from the file names
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<String>,
    /// Where it comes from; left out: local
    #[arg(long, value_name = "NAME")]
    pub provider: Option<String>,
    /// The files are fetched from below this URL instead of the folder
    #[arg(long, value_name = "URL", value_parser = parse_prefix)]
    pub url_prefix: Option<Url>,
    /// Size of an object, e.g. 4MiB; left out: chosen so that there are enough
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub chunk_size: Option<u64>,
}

/// `distribute …`.
#[derive(Debug, Args)]
pub struct DistributeArgs {
    /// A folder, or a manifest (or whole create request) as JSON
    #[arg(value_name = "DIR|MANIFEST")]
    pub what: PathBuf,
    /// The nodes that shall have it, separated by commas; left out: those of the create request
    #[arg(long, value_name = "NODE,…", value_delimiter = ',', value_parser = NodeId::parse)]
    pub to: Vec<NodeId>,
    /// Every node that is up
    #[arg(long, conflicts_with = "to")]
    pub all: bool,
    /// The node that reads the sources; left out: that of the create request, else the first target
    #[arg(long, value_name = "NODE", value_parser = NodeId::parse)]
    pub seed: Option<NodeId>,
    /// Wait for the end, with live progress
    #[arg(long, short)]
    pub watch: bool,
    /// Id of the job, to repeat the command safely; left out: a new one
    #[arg(long, value_name = "ID", value_parser = JobId::parse)]
    pub job_id: Option<JobId>,
    /// Attempts per node, 1 to 10
    #[arg(long, value_name = "N")]
    pub max_attempts: Option<u32>,
    /// Who goes first where a node takes no more at once: -10 to 10, the higher the sooner; left out: 0
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub priority: Option<i64>,
    /// The job fails if it is not done by then, e.g. 2h
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub deadline: Option<Duration>,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `jobs …`.
#[derive(Debug, Subcommand)]
pub enum JobsCommand {
    /// List jobs, newest first
    List {
        /// Only jobs of this status
        #[arg(long, value_parser = parse_status)]
        status: Option<JobStatus>,
        /// Only jobs that name this node
        #[arg(long, value_parser = NodeId::parse)]
        node: Option<NodeId>,
        /// Only jobs of this model
        #[arg(long)]
        model_id: Option<String>,
        /// At most so many
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
        limit: u32,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Show one job with all its placements
    Get {
        /// Its id
        #[arg(value_parser = JobId::parse)]
        job_id: JobId,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Follow one job to its end; the exit code tells how it ended
    Watch {
        /// Its id
        #[arg(value_parser = JobId::parse)]
        job_id: JobId,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Cancel one job; what other jobs want goes on
    Cancel {
        /// Its id
        #[arg(value_parser = JobId::parse)]
        job_id: JobId,
        #[command(flatten)]
        output: OutputArgs,
    },
}

/// `cluster …`.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Show the masters, who leads, and how far each one is
    Status(OutputArgs),
    /// Take a new master into the cluster, as a learner that does not vote
    #[command(after_help = "\
Start it first, with an id that no master of this cluster ever had and an empty data folder, and without --bootstrap:
  mooncake_master --node-id 4 --data-dir m4 --rpc-address 10.0.0.4:50051 --http-address 10.0.0.4:9003
  mooncakectl cluster add 10.0.0.4:50051 --promote

Repeating the command is harmless.")]
    Add {
        /// Its RPC address, as the other masters and the nodes reach it
        #[arg(value_name = "HOST:PORT")]
        rpc_address: String,
        /// Refuse it if it has another id
        #[arg(long, value_name = "ID")]
        id: Option<u64>,
        #[command(flatten)]
        promote: PromoteArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Let a learner vote; refused while it lags behind
    Promote {
        /// Its id
        #[arg(value_name = "ID")]
        id: u64,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Take a master out of the cluster for good: it stops by itself, and its id must not be used again
    #[command(after_help = "\
Refused if too few of the other voters answer, since writes would stop. The leader hands leadership over first.
Repeating the command is harmless.")]
    Remove {
        /// Its id
        #[arg(value_name = "ID")]
        id: u64,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Put a new master in the place of one that is lost: add, wait until it has the log, promote, remove the old one
    #[command(after_help = "\
Start the new master first (see `cluster add --help`). Interrupted, the same command goes on where it stopped.
  mooncakectl cluster replace 2 10.0.0.4:50051

The new one may be at the addresses of the old one: the same machine, an empty data folder, a new --node-id.")]
    Replace {
        /// The id of the lost master
        #[arg(value_name = "OLD_ID")]
        old: u64,
        /// The RPC address of the new one
        #[arg(value_name = "HOST:PORT")]
        rpc_address: String,
        /// How long the new master may take to catch up
        #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = parse_duration)]
        wait: Duration,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Hand leadership over; no request fails meanwhile
    Transfer {
        /// The id of the next leader; left out: the master closest behind the log
        #[arg(value_name = "ID")]
        to: Option<u64>,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Backups of the masters' state (jobs, models, nodes; no model bytes)
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
}

/// `--promote`.
#[derive(Clone, Copy, Debug, Args)]
pub struct PromoteArgs {
    /// Wait until it has the log, and let it vote then
    #[arg(long)]
    pub promote: bool,
    /// How long it may take to catch up
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = parse_duration, requires = "promote")]
    pub wait: Duration,
}

/// `cluster snapshot …`.
#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Take a backup
    #[command(after_help = "\
It holds everything that was acknowledged before the command began, and is checked before it gets its name. An older
file of the same name is replaced in one step. Only you may read it: the sources of live jobs are in it, which may be
signed URLs. Restore it with `mooncake_master restore`.
  mooncakectl cluster snapshot save /backup/mooncake-$(date +%F).mcb")]
    Save {
        /// Where to write it
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// What the endpoint itself has, though it may be behind: works without a leader
        #[arg(long)]
        stale: bool,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Check a backup and show what is in it; asks no master
    Status {
        /// The backup
        #[arg(value_name = "FILE")]
        file: PathBuf,
        #[command(flatten)]
        output: OutputArgs,
    },
}

fn parse_endpoint(text: &str) -> Result<Option<Url>, String> {
    let text = text.trim();
    if text.is_empty() {
        return Ok(None);
    }
    let full = if text.contains("://") {
        text.to_owned()
    } else {
        format!("http://{text}")
    };
    let url = Url::parse(&full).map_err(|e| format!("not a URL: {e}"))?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none_or(str::is_empty) {
        return Err("use http://host:port or https://host:port".into());
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err("an endpoint has no query and no fragment".into());
    }
    Ok(Some(url))
}

fn parse_prefix(text: &str) -> Result<Url, String> {
    let url = Url::parse(text).map_err(|e| format!("not a URL: {e}"))?;
    match url.scheme() {
        "http" | "https" | "file" => {}
        other => {
            return Err(format!(
                "'{other}:' is not supported: use http://, https:// or file://"
            ));
        }
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err("a prefix has no query and no fragment".into());
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("user names and passwords in URLs are refused: they would be stored and shown".into());
    }
    Ok(url)
}

fn parse_status(text: &str) -> Result<JobStatus, String> {
    serde_json::from_value(serde_json::Value::String(text.to_owned()))
        .map_err(|_| "use planned, seeding, replicating, completed, failed or canceled".into())
}

fn split_unit(text: &str) -> (&str, &str) {
    let text = text.trim();
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    (number, unit.trim())
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split_unit(text);
    let unit_ms: u64 = match unit {
        "ms" => 1,
        "s" | "" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err("use a number and ms, s, m, h or d, e.g. 30s".into()),
    };
    let number: u64 = number.parse().map_err(|_| "use a number and a unit, e.g. 30s")?;
    match number.checked_mul(unit_ms) {
        Some(0) | None => Err("must be above zero, and not absurdly long".into()),
        Some(ms) => Ok(Duration::from_millis(ms)),
    }
}

fn parse_size(text: &str) -> Result<u64, String> {
    let (number, unit) = split_unit(text);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return Err("use bytes, or KiB, MiB, GiB, e.g. 4MiB".into()),
    };
    let number: u64 = number.parse().map_err(|_| "use a number and a unit, e.g. 4MiB")?;
    match number.checked_mul(1 << shift) {
        Some(0) | None => Err("must be above zero, and below 2^64".into()),
        Some(bytes) => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn values() {
        let endpoint = |t: &str| parse_endpoint(t).map(|u| u.map(String::from));
        assert_eq!(endpoint("host:9003"), Ok(Some("http://host:9003/".into())));
        assert_eq!(endpoint(" "), Ok(None));
        assert_eq!(
            endpoint("https://lb/mooncake"),
            Ok(Some("https://lb/mooncake".into()))
        );
        for bad in ["ftp://h", "http://", "http://h?x=1"] {
            assert!(parse_endpoint(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_duration("1500ms"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("2h"), Ok(Duration::from_secs(7200)));
        assert!(
            ["", "s", "0s", "1y", "-1s"]
                .iter()
                .all(|t| parse_duration(t).is_err())
        );
        assert_eq!(
            (parse_size("4MiB"), parse_size("1g"), parse_size("5")),
            (Ok(4 << 20), Ok(1 << 30), Ok(5))
        );
        assert!(["", "MiB", "0", "1TB"].iter().all(|t| parse_size(t).is_err()));
    }

    #[test]
    fn endpoints_are_given_by_repetition_or_commas() {
        let parse = |args: &[&str]| {
            Cli::try_parse_from([&["mooncakectl"], args].concat()).map(|c| c.endpoints().len())
        };
        assert_eq!(
            parse(&["--endpoint", "a:1", "--endpoint", "b:2", "nodes"]).unwrap(),
            2
        );
        assert_eq!(parse(&["nodes", "--endpoint", "a:1,b:2,c:3"]).unwrap(), 3);
        assert_eq!(parse(&["nodes", "--endpoint", ""]).unwrap(), 1, "the default");
        assert!(
            parse(&["distribute", "x"]).is_ok(),
            "a create request names its own nodes; the command says so where there are none"
        );
        assert!(parse(&["distribute", "x", "--to", "a:1", "--all"]).is_err());
        assert!(
            parse(&["distribute", "x", "--to", "a"]).is_err(),
            "a node id has a port"
        );
    }
}
