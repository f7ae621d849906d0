//! The master's configuration: flags, environment, file, in this order of precedence.
//!
//! Names are the same everywhere: `--rpc-port` on the command line (or `--rpc_port`, as Mooncake's operators write
//! it), `MOONCAKE_MASTER_RPC_PORT` in the environment, `rpc_port` (or `rpc-port`) in the file of `--config`, which is
//! TOML or, if its name ends in `.yaml` or `.yml`, YAML. A name that is not known is refused, wherever it stands.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::{ArgAction, CommandFactory, Parser, ValueEnum};
use mooncake_proto::digest::Algorithm;
use mooncake_raft_store::NodeId;
use mooncake_state::Limits;

use crate::consensus::Timers;

/// Default port of the RPC address.
pub const DEFAULT_RPC_PORT: u16 = 50051;
/// Default port of the HTTP address.
pub const DEFAULT_HTTP_PORT: u16 = 9003;
/// Most masters in `--initial-cluster`: every one more makes every write slower, and nobody needs to lose five.
const MAX_MEMBERS: usize = 9;
/// Largest configuration file.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Longest cluster id; it is part of every hello, which is bounded.
const MAX_CLUSTER_ID_BYTES: usize = 256;
const ENV_PREFIX: &str = "MOONCAKE_MASTER_";

/// Where a master is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberAddress {
    /// `host:port` of its RPC port.
    pub rpc: String,
    /// `host:port` of its HTTP port.
    pub http: String,
}

/// The value of `--initial-cluster`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InitialCluster(pub BTreeMap<NodeId, MemberAddress>);

impl FromStr for InitialCluster {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut members = BTreeMap::new();
        let mut addresses = std::collections::BTreeSet::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let form = || {
                format!(
                    "'{part}' is not ID=RPC_HOST:PORT/HTTP_HOST:PORT, e.g. 1=127.0.0.1:50051/127.0.0.1:9003"
                )
            };
            let (id, rest) = part.split_once('=').ok_or_else(form)?;
            let (rpc, http) = rest.split_once('/').ok_or_else(form)?;
            let id: NodeId = id
                .trim()
                .parse()
                .ok()
                .filter(|id| *id > 0)
                .ok_or_else(|| format!("'{id}' is not a master id (1, 2, …)"))?;
            for address in [rpc, http] {
                check_address(address).map_err(|error| format!("master {id}: {error}"))?;
                if !addresses.insert(address.to_owned()) {
                    return Err(format!("the address {address} is named twice"));
                }
            }
            if members
                .insert(
                    id,
                    MemberAddress {
                        rpc: rpc.to_owned(),
                        http: http.to_owned(),
                    },
                )
                .is_some()
            {
                return Err(format!("master {id} is named twice"));
            }
        }
        match members.len() {
            0 => Err("it names no master".into()),
            n if n > MAX_MEMBERS => Err(format!("it names {n} masters, the limit is {MAX_MEMBERS}")),
            _ => Ok(Self(members)),
        }
    }
}

impl fmt::Display for InitialCluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (id, address)) in self.0.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            write!(f, "{comma}{id}={}/{}", address.rpc, address.http)?;
        }
        Ok(())
    }
}

/// An address that others dial: `host:port`, IPv6 in brackets, port not 0.
fn check_address(text: &str) -> Result<(), String> {
    mooncake_proto::ids::NodeId::parse(text).map(drop)
}

/// Where to listen: host and, perhaps, port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenAddress {
    /// A name or a literal, IPv6 without brackets.
    pub host: String,
    /// 0: any free one.
    pub port: Option<u16>,
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        // A literal without a port, IPv6 with or without brackets.
        let bare = text
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
            .unwrap_or(text);
        if bare.parse::<IpAddr>().is_ok() {
            return Ok(Self {
                host: bare.to_owned(),
                port: None,
            });
        }
        let (host, port) = match text.rsplit_once(':') {
            None => (text, None),
            Some((host, port)) => {
                let port = port
                    .parse::<u16>()
                    .map_err(|_| format!("'{port}' is not a port (0-65535)"))?;
                (host, Some(port))
            }
        };
        let literal = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let host = match literal {
            Some(inner) => {
                inner
                    .parse::<std::net::Ipv6Addr>()
                    .map_err(|_| format!("'{inner}' is not an IPv6 address"))?;
                inner
            }
            None if host.contains(':') => {
                return Err(format!("write an IPv6 address in brackets: [{host}]:PORT"));
            }
            None => host,
        };
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
        if host.is_empty() || !host.chars().all(good) {
            return Err(format!("'{text}' is not HOST:PORT"));
        }
        Ok(Self {
            host: host.to_owned(),
            port,
        })
    }
}

/// A listen address with its port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    /// A name or a literal, IPv6 without brackets.
    pub host: String,
    /// 0: any free one.
    pub port: u16,
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// Form of the log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object per line.
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DigestAlgorithm {
    Blake3,
    Sha256,
}

#[derive(Parser, Debug)]
#[command(
    name = "mooncake_master",
    version,
    about = "A master of Mooncake distribution: takes jobs, survives the loss of a minority of masters.",
    long_about = "A master of Mooncake distribution. Three masters make a cluster that no single failure stops.\n\n\
        Every flag may be written --rpc_port or --rpc-port, may be set in the environment as \
        MOONCAKE_MASTER_RPC_PORT, and may stand in the file of --config as rpc_port. Flags win over the \
        environment, the environment wins over the file.",
    after_long_help = "A cluster of three on one machine, each in its own terminal:\n\n  \
        C=1=127.0.0.1:50051/127.0.0.1:9003,2=127.0.0.1:50061/127.0.0.1:9013,3=127.0.0.1:50071/127.0.0.1:9023\n  \
        mooncake_master --node-id 1 --data-dir m1 --rpc-port 50051 --http-port 9003 --initial-cluster $C --bootstrap\n  \
        mooncake_master --node-id 2 --data-dir m2 --rpc-port 50061 --http-port 9013 --initial-cluster $C --bootstrap\n  \
        mooncake_master --node-id 3 --data-dir m3 --rpc-port 50071 --http-port 9023 --initial-cluster $C --bootstrap\n\n\
        --bootstrap makes a cluster of empty data folders, once; later it does nothing, so it may stay in a unit file. \
        A master whose data folder was lost must not come back under its old id.\n\n\
        Signals: SIGTERM or SIGINT stops gracefully (not ready, hand leadership over, finish, stop); a second one stops at once.",
    args_override_self = true
)]
struct Flags {
    /// TOML or YAML file with the same names as the flags
    #[arg(long, value_name = "FILE", env = "MOONCAKE_MASTER_CONFIG")]
    config: Option<PathBuf>,

    /// This master's id in the cluster, from 1; never give an id to another disk
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..), env = "MOONCAKE_MASTER_NODE_ID", help_heading = "Cluster")]
    node_id: u64,
    /// Name of the cluster; processes of different clusters refuse each other
    #[arg(long, default_value = mooncake_proto::DEFAULT_CLUSTER_ID, env = "MOONCAKE_MASTER_CLUSTER_ID", help_heading = "Cluster")]
    cluster_id: String,
    /// Folder of the Raft log and snapshots
    #[arg(
        long,
        default_value = "mooncake-master-data",
        value_name = "DIR",
        env = "MOONCAKE_MASTER_DATA_DIR",
        help_heading = "Cluster"
    )]
    data_dir: PathBuf,
    /// All masters of a new cluster as ID=RPC_HOST:PORT/HTTP_HOST:PORT,…; the same for all of them
    #[arg(
        long,
        value_name = "MEMBERS",
        env = "MOONCAKE_MASTER_INITIAL_CLUSTER",
        help_heading = "Cluster"
    )]
    initial_cluster: Option<InitialCluster>,
    /// Make a new cluster of the empty masters of --initial-cluster (give it to all of them); without that list, a
    /// cluster of this master alone
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set, env = "MOONCAKE_MASTER_BOOTSTRAP", help_heading = "Cluster")]
    bootstrap: bool,
    /// File with the secret that all masters and clients share; required to listen beyond loopback
    #[arg(
        long,
        value_name = "FILE",
        env = "MOONCAKE_MASTER_CLUSTER_SECRET_FILE",
        help_heading = "Cluster"
    )]
    cluster_secret_file: Option<PathBuf>,

    /// Where masters and clients reach this master, HOST[:PORT]
    #[arg(
        long,
        default_value = "127.0.0.1",
        value_name = "HOST[:PORT]",
        env = "MOONCAKE_MASTER_RPC_ADDRESS",
        help_heading = "Addresses"
    )]
    rpc_address: ListenAddress,
    /// Port of --rpc-address [default: 50051]; 0 takes a free one and logs it
    #[arg(long, env = "MOONCAKE_MASTER_RPC_PORT", help_heading = "Addresses")]
    rpc_port: Option<u16>,
    /// The HTTP API, administration and metrics, HOST[:PORT]
    #[arg(
        long,
        default_value = "127.0.0.1",
        value_name = "HOST[:PORT]",
        env = "MOONCAKE_MASTER_HTTP_ADDRESS",
        help_heading = "Addresses"
    )]
    http_address: ListenAddress,
    /// Port of --http-address [default: 9003]; 0 takes a free one and logs it
    #[arg(
        long,
        alias = "metrics-port",
        env = "MOONCAKE_MASTER_HTTP_PORT",
        help_heading = "Addresses"
    )]
    http_port: Option<u16>,
    /// What others dial for the RPC port, if it is not the address listened on
    #[arg(long, value_name = "HOST:PORT", value_parser = dialled, env = "MOONCAKE_MASTER_ADVERTISE_RPC_ADDRESS", help_heading = "Addresses")]
    advertise_rpc_address: Option<String>,
    /// What others dial for the HTTP port, if it is not the address listened on
    #[arg(long, value_name = "HOST:PORT", value_parser = dialled, env = "MOONCAKE_MASTER_ADVERTISE_HTTP_ADDRESS", help_heading = "Addresses")]
    advertise_http_address: Option<String>,

    /// A node whose session is lost is suspected, and declared down after this many seconds more
    #[arg(
        long,
        default_value_t = 30,
        env = "MOONCAKE_MASTER_NODE_GRACE_S",
        help_heading = "Nodes and jobs"
    )]
    node_grace_s: u64,
    /// A download or copy that stands still for this many seconds on a connected node has failed; 0: never
    #[arg(
        long,
        default_value_t = 600,
        env = "MOONCAKE_MASTER_NO_PROGRESS_S",
        help_heading = "Nodes and jobs"
    )]
    no_progress_s: u64,
    /// How long a new leader waits for nodes to reconnect before it suspects any
    #[arg(
        long,
        default_value_t = 5,
        env = "MOONCAKE_MASTER_RECONNECT_WINDOW_S",
        help_heading = "Nodes and jobs"
    )]
    reconnect_window_s: u64,
    /// Refuse manifests whose checksums are no SHA-256 digests (otherwise accepted with a warning)
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set, env = "MOONCAKE_MASTER_REQUIRE_CHECKSUMS", help_heading = "Nodes and jobs")]
    require_checksums: bool,
    /// Digest of the blocks of new models
    #[arg(
        long,
        value_enum,
        default_value = "blake3",
        env = "MOONCAKE_MASTER_DIGEST_ALGORITHM",
        help_heading = "Nodes and jobs"
    )]
    digest_algorithm: DigestAlgorithm,
    /// Ended jobs are kept this many seconds [7 days] …
    #[arg(
        long,
        default_value_t = 604_800,
        env = "MOONCAKE_MASTER_JOB_RETENTION_S",
        help_heading = "Nodes and jobs"
    )]
    job_retention_s: u64,
    /// … but at most this many
    #[arg(
        long,
        default_value_t = 10_000,
        env = "MOONCAKE_MASTER_JOB_RETENTION_COUNT",
        help_heading = "Nodes and jobs"
    )]
    job_retention_count: u64,
    /// Ids of forgotten jobs are recognised for this many seconds [30 days] …
    #[arg(
        long,
        default_value_t = 2_592_000,
        env = "MOONCAKE_MASTER_ID_RETENTION_S",
        help_heading = "Nodes and jobs"
    )]
    id_retention_s: u64,
    /// … but at most this many
    #[arg(
        long,
        default_value_t = 1_000_000,
        env = "MOONCAKE_MASTER_ID_RETENTION_COUNT",
        help_heading = "Nodes and jobs"
    )]
    id_retention_count: u64,
    /// Staging that no live job wants is deleted after this many seconds [24 hours]
    #[arg(
        long,
        default_value_t = 86_400,
        env = "MOONCAKE_MASTER_STAGING_RETENTION_S",
        help_heading = "Nodes and jobs"
    )]
    staging_retention_s: u64,

    /// Between the leader's heartbeats
    #[arg(
        long,
        default_value_t = Timers::DEFAULT.heartbeat_ms,
        env = "MOONCAKE_MASTER_HEARTBEAT_MS",
        help_heading = "Raft"
    )]
    heartbeat_ms: u64,
    /// A follower elects after the larger of the two plus a random time between them without a heartbeat
    #[arg(
        long,
        default_value_t = Timers::DEFAULT.election_min_ms,
        env = "MOONCAKE_MASTER_ELECTION_MIN_MS",
        help_heading = "Raft"
    )]
    election_min_ms: u64,
    /// See --election-min-ms
    #[arg(
        long,
        default_value_t = Timers::DEFAULT.election_max_ms,
        env = "MOONCAKE_MASTER_ELECTION_MAX_MS",
        help_heading = "Raft"
    )]
    election_max_ms: u64,
    /// Build a snapshot after this many log entries
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..), env = "MOONCAKE_MASTER_SNAPSHOT_EVERY", help_heading = "Raft")]
    snapshot_every: u64,
    /// Keep this many entries that a snapshot covers, for followers that were away for a moment
    #[arg(
        long,
        default_value_t = 2_000,
        env = "MOONCAKE_MASTER_SNAPSHOT_KEEP",
        help_heading = "Raft"
    )]
    snapshot_keep: u64,
    /// After a stop signal: how long to be not ready before leadership is handed over; about one health-check
    /// interval of the load balancer
    #[arg(
        long,
        default_value_t = 1_000,
        env = "MOONCAKE_MASTER_DRAIN_MS",
        help_heading = "Raft"
    )]
    drain_ms: u64,

    /// Form of the log lines on stderr
    #[arg(
        long,
        value_enum,
        default_value = "text",
        env = "MOONCAKE_MASTER_LOG_FORMAT",
        help_heading = "Logging"
    )]
    log_format: LogFormat,
    /// What is logged, e.g. "debug" or "info,mooncake_master::consensus=debug"; RUST_LOG does the same
    #[arg(
        long,
        value_name = "FILTER",
        env = "MOONCAKE_MASTER_LOG_FILTER",
        help_heading = "Logging"
    )]
    log_filter: Option<String>,
}

fn dialled(text: &str) -> Result<String, String> {
    check_address(text).map(|()| text.to_owned())
}

/// The master's configuration, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// This master's Raft id.
    pub node_id: NodeId,
    /// The cluster's name.
    pub cluster_id: String,
    /// Folder of the Raft log and snapshots.
    pub data_dir: PathBuf,
    /// The members of a new cluster; empty: this master alone.
    pub initial_cluster: BTreeMap<NodeId, MemberAddress>,
    /// Make a new cluster if the data folder is empty.
    pub bootstrap: bool,
    /// The cluster's secret.
    pub cluster_secret_file: Option<PathBuf>,
    /// RPC: Raft and node sessions.
    pub rpc: Listen,
    /// The HTTP API.
    pub http: Listen,
    /// What others dial for the RPC port, if it is not the address listened on.
    pub advertise_rpc: Option<String>,
    /// What others dial for the HTTP port, if it is not the address listened on.
    pub advertise_http: Option<String>,
    /// From suspected to down.
    pub node_grace: Duration,
    /// How long an attempt may stand still; zero: for ever.
    pub no_progress: Duration,
    /// For nodes, after an election.
    pub reconnect_window: Duration,
    /// Refuse manifests whose checksums are no digests.
    pub require_checksums: bool,
    /// Digest of the blocks of new models.
    pub digest_algorithm: Algorithm,
    /// What is kept for how long; replicated, the leader proposes it.
    pub limits: Limits,
    /// Raft's timers.
    pub timers: Timers,
    /// A snapshot after this many entries.
    pub snapshot_every: u64,
    /// Entries kept behind a snapshot.
    pub snapshot_keep: u64,
    /// Not ready for this long before leadership is handed over at a stop.
    pub drain: Duration,
    /// Form of the log lines.
    pub log_format: LogFormat,
    /// What is logged.
    pub log_filter: Option<String>,
}

/// Why there is no configuration.
#[derive(Debug)]
pub enum ConfigError {
    /// clap's own: also `--help` and `--version`.
    Usage(clap::Error),
    /// Anything else.
    Invalid(String),
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(error) => error.fmt(f),
            Self::Invalid(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for ConfigError {}

impl Config {
    /// From command line, environment and file.
    pub fn load(arguments: impl IntoIterator<Item = OsString>) -> Result<Self, ConfigError> {
        let mut arguments: Vec<OsString> = arguments.into_iter().map(hyphens).collect();
        if let Some(path) = config_file(&arguments) {
            let from_file = read_file(&path).map_err(|error| {
                ConfigError::Invalid(format!("configuration file {}: {error}", path.display()))
            })?;
            let program = arguments
                .first()
                .cloned()
                .unwrap_or_else(|| "mooncake_master".into());
            // Alone first: an error then names the file and not a flag that nobody gave.
            Flags::try_parse_from(std::iter::once(&program).chain(&from_file)).map_err(|error| {
                let text = error.render().to_string();
                let reason = text
                    .split("\n\n")
                    .next()
                    .unwrap_or(&text)
                    .trim_start_matches("error: ");
                ConfigError::Invalid(format!("configuration file {}: {reason}", path.display()))
            })?;
            let at = arguments.len().min(1);
            arguments.splice(at..at, from_file);
        }
        Self::checked(Flags::try_parse_from(arguments).map_err(ConfigError::Usage)?)
    }

    fn checked(flags: Flags) -> Result<Self, ConfigError> {
        let invalid = |text: String| Err(ConfigError::Invalid(text));
        if flags.cluster_id.is_empty() || flags.cluster_id.len() > MAX_CLUSTER_ID_BYTES {
            return invalid(format!(
                "--cluster-id must have 1 to {MAX_CLUSTER_ID_BYTES} bytes"
            ));
        }
        let initial_cluster = flags.initial_cluster.unwrap_or_default().0;
        if !initial_cluster.is_empty() && !initial_cluster.contains_key(&flags.node_id) {
            let ids: Vec<_> = initial_cluster.keys().map(u64::to_string).collect();
            return invalid(format!(
                "--initial-cluster names the masters {}, but --node-id is {}: every master needs its own id of that list",
                ids.join(", "),
                flags.node_id
            ));
        }
        if flags.snapshot_keep >= flags.snapshot_every.saturating_mul(2) {
            return invalid(format!(
                "--snapshot-keep {} must be below twice --snapshot-every {}",
                flags.snapshot_keep, flags.snapshot_every
            ));
        }
        let seconds = |s: u64| s.saturating_mul(1000);
        let listen = |address: ListenAddress, port: Option<u16>, default: u16| Listen {
            port: port.or(address.port).unwrap_or(default),
            host: address.host,
        };
        Ok(Self {
            node_id: flags.node_id,
            cluster_id: flags.cluster_id,
            data_dir: flags.data_dir,
            initial_cluster,
            bootstrap: flags.bootstrap,
            cluster_secret_file: flags.cluster_secret_file,
            rpc: listen(flags.rpc_address, flags.rpc_port, DEFAULT_RPC_PORT),
            http: listen(flags.http_address, flags.http_port, DEFAULT_HTTP_PORT),
            advertise_rpc: flags.advertise_rpc_address,
            advertise_http: flags.advertise_http_address,
            node_grace: Duration::from_secs(flags.node_grace_s),
            no_progress: Duration::from_secs(flags.no_progress_s),
            reconnect_window: Duration::from_secs(flags.reconnect_window_s),
            require_checksums: flags.require_checksums,
            digest_algorithm: match flags.digest_algorithm {
                DigestAlgorithm::Blake3 => Algorithm::Blake3,
                DigestAlgorithm::Sha256 => Algorithm::Sha256,
            },
            limits: Limits {
                job_ttl_ms: seconds(flags.job_retention_s),
                max_terminal_jobs: flags.job_retention_count,
                id_ttl_ms: seconds(flags.id_retention_s),
                max_ids: flags.id_retention_count,
                unsealed_ttl_ms: seconds(flags.staging_retention_s),
                ..Limits::default()
            },
            timers: Timers {
                heartbeat_ms: flags.heartbeat_ms,
                election_min_ms: flags.election_min_ms,
                election_max_ms: flags.election_max_ms,
            },
            snapshot_every: flags.snapshot_every,
            snapshot_keep: flags.snapshot_keep,
            drain: Duration::from_millis(flags.drain_ms),
            log_format: flags.log_format,
            log_filter: flags.log_filter,
        })
    }
}

/// `--rpc_port=1` → `--rpc-port=1`; values are left alone.
fn hyphens(argument: OsString) -> OsString {
    let Some(text) = argument.to_str().filter(|text| text.starts_with("--")) else {
        return argument;
    };
    match text.split_once('=') {
        Some((name, value)) => format!("{}={value}", name.replace('_', "-")).into(),
        None => text.replace('_', "-").into(),
    }
}

/// The file has to be known before the flags are parsed, since it supplies some of them.
fn config_file(arguments: &[OsString]) -> Option<PathBuf> {
    let mut found = None;
    let mut arguments = arguments.iter().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.to_str() {
            Some("--") => break,
            Some("--config") => found = arguments.next().map(PathBuf::from),
            Some(text) => found = text.strip_prefix("--config=").map(PathBuf::from).or(found),
            None => {}
        }
    }
    found.or_else(|| std::env::var_os(format!("{ENV_PREFIX}CONFIG")).map(PathBuf::from))
}

/// The file's settings as arguments, except those that the environment sets.
fn read_file(path: &Path) -> Result<Vec<OsString>, String> {
    let size = std::fs::metadata(path).map_err(|error| error.to_string())?.len();
    if size > MAX_FILE_BYTES {
        return Err(format!("it has {size} bytes, the limit is {MAX_FILE_BYTES}"));
    }
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    let is_yaml = path
        .extension()
        .is_some_and(|ext| ext.eq_ignore_ascii_case("yaml") || ext.eq_ignore_ascii_case("yml"));
    file_arguments(&text, is_yaml, |name| std::env::var_os(name).is_some())
}

fn file_arguments(
    text: &str,
    is_yaml: bool,
    in_environment: impl Fn(&str) -> bool,
) -> Result<Vec<OsString>, String> {
    let values: serde_json::Value = match is_yaml {
        true => serde_yaml_ng::from_str(text).map_err(|error| error.to_string())?,
        false => toml::from_str(text).map_err(|error| error.to_string())?,
    };
    let values = match values {
        serde_json::Value::Object(values) => values,
        serde_json::Value::Null => return Ok(Vec::new()),
        _ => return Err("it must be a list of names and values, e.g. node_id: 1".into()),
    };
    let command = Flags::command();
    let names: Vec<_> = command
        .get_arguments()
        .filter_map(|argument| argument.get_long())
        .collect();
    let mut arguments = Vec::new();
    for (key, value) in values {
        let name = key.replace('_', "-");
        if name == "config" || !(names.contains(&name.as_str()) || name == "metrics-port") {
            return Err(format!(
                "there is no setting '{key}'; see mooncake_master --help for the names"
            ));
        }
        if in_environment(&format!("{ENV_PREFIX}{}", name.replace('-', "_").to_uppercase())) {
            continue;
        }
        let value = plain(&value).ok_or_else(|| {
            format!("the value of '{key}' is neither a text nor a number nor true or false")
        })?;
        arguments.push(format!("--{name}={value}").into());
    }
    Ok(arguments)
}

/// Scalars as they are; lists and tables (for `initial_cluster`) in the flag's own form.
fn plain(value: &serde_json::Value) -> Option<String> {
    use serde_json::Value;
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Bool(flag) => Some(flag.to_string()),
        Value::Number(number) => Some(number.to_string()),
        Value::Array(items) => items
            .iter()
            .map(plain)
            .collect::<Option<Vec<_>>>()
            .map(|items| items.join(",")),
        Value::Object(items) => items
            .iter()
            .map(|(key, value)| plain(value).map(|value| format!("{key}={value}")))
            .collect::<Option<Vec<_>>>()
            .map(|items| items.join(",")),
        Value::Null => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(arguments: &[&str]) -> Result<Config, ConfigError> {
        Config::load(
            std::iter::once("mooncake_master")
                .chain(arguments.iter().copied())
                .map(OsString::from),
        )
    }

    fn refused(arguments: &[&str]) -> String {
        load(arguments).unwrap_err().to_string()
    }

    const THREE: &str = "1=127.0.0.1:50051/127.0.0.1:9003,2=[::1]:50061/h2:9013,3=h3:50071/h3:9023";

    #[test]
    fn clap_agrees_with_itself() {
        Flags::command().debug_assert();
    }

    #[test]
    fn defaults_listen_on_loopback() {
        let config = load(&[]).unwrap();
        assert_eq!(config.rpc.to_string(), "127.0.0.1:50051");
        assert_eq!(config.http.to_string(), "127.0.0.1:9003");
        assert_eq!((config.node_id, config.bootstrap), (1, false));
        assert_eq!(config.limits, Limits::default());
    }

    #[test]
    fn underscores_and_mooncakes_names_are_taken() {
        let config = load(&[
            "--rpc_port",
            "7",
            "--metrics_port=8",
            "--cluster_id",
            "a_b",
            "--rpc_address",
            "0.0.0.0",
            "--node_grace_s=4",
            "--require_checksums",
            "--digest_algorithm",
            "sha256",
        ])
        .unwrap();
        assert_eq!(config.rpc.to_string(), "0.0.0.0:7");
        assert_eq!(config.http.port, 8);
        assert_eq!(config.cluster_id, "a_b", "only names are changed");
        assert_eq!(config.node_grace, Duration::from_secs(4));
        assert!(config.require_checksums);
        assert_eq!(config.digest_algorithm, Algorithm::Sha256);
    }

    #[test]
    fn listen_addresses() {
        for (text, host, port) in [
            ("127.0.0.1", "127.0.0.1", None),
            ("127.0.0.1:0", "127.0.0.1", Some(0)),
            ("::1", "::1", None),
            ("[::1]", "::1", None),
            ("[::1]:50051", "::1", Some(50051)),
            ("node-1.rack_2:9", "node-1.rack_2", Some(9)),
        ] {
            assert_eq!(
                text.parse(),
                Ok(ListenAddress {
                    host: host.into(),
                    port
                }),
                "{text}"
            );
        }
        for text in ["", ":1", "h:65536", "a:b:1", "[::g]:1", "http://h:1"] {
            assert!(text.parse::<ListenAddress>().is_err(), "{text}");
        }
        assert_eq!(
            Listen {
                host: "::1".into(),
                port: 5
            }
            .to_string(),
            "[::1]:5"
        );
        assert_eq!(
            load(&["--rpc-address", "[::1]:5", "--rpc-port", "6"])
                .unwrap()
                .rpc
                .to_string(),
            "[::1]:6"
        );
    }

    #[test]
    fn initial_cluster() {
        let cluster: InitialCluster = THREE.parse().unwrap();
        assert_eq!(cluster.0.len(), 3);
        assert_eq!(
            cluster.0[&2],
            MemberAddress {
                rpc: "[::1]:50061".into(),
                http: "h2:9013".into()
            }
        );
        assert_eq!(cluster.to_string(), THREE);
        for (text, why) in [
            ("", "no master"),
            ("1=h:1", "is not ID="),
            ("0=h:1/h:2", "not a master id"),
            ("1=h:1/h:2,1=h:3/h:4", "twice"),
            ("1=h:1/h:2,2=h:1/h:4", "twice"),
            ("1=h:0/h:2", "not a port"),
        ] {
            let error = text.parse::<InitialCluster>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
        assert!(refused(&["--node-id", "4", "--initial-cluster", THREE]).contains("--node-id is 4"));
        assert!(
            load(&["--node-id", "2", "--initial-cluster", THREE, "--bootstrap"])
                .unwrap()
                .bootstrap
        );
        assert!(refused(&["--node-id", "0"]).contains("0"));
    }

    #[test]
    fn files_of_both_kinds_and_flags_win() {
        let folder = tempfile::tempdir().unwrap();
        let toml = folder.path().join("m.toml");
        std::fs::write(&toml, "node_id = 2\nrpc-port = 70\nbootstrap = true\ninitial_cluster = [\"1=a:1/a:2\", \"2=b:1/b:2\"]\n").unwrap();
        let path = toml.to_str().unwrap();
        let config = load(&["--config", path]).unwrap();
        assert_eq!((config.node_id, config.rpc.port, config.bootstrap), (2, 70, true));
        assert_eq!(config.initial_cluster.len(), 2);
        let config = load(&[
            "--rpc_port",
            "71",
            "--bootstrap=false",
            &format!("--config={path}"),
        ])
        .unwrap();
        assert_eq!((config.rpc.port, config.bootstrap), (71, false));

        let yaml = folder.path().join("m.yml");
        std::fs::write(
            &yaml,
            "node_id: 1\nmetrics_port: 72\ninitial_cluster:\n  1: a:1/a:2\n  2: b:1/b:2\n",
        )
        .unwrap();
        let config = load(&["--config", yaml.to_str().unwrap()]).unwrap();
        assert_eq!((config.http.port, config.initial_cluster.len()), (72, 2));
    }

    #[test]
    fn faults_of_a_file_name_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("m.toml");
        let path = file.to_str().unwrap();
        for (text, why) in [
            ("nod_id = 2", "no setting 'nod_id'"),
            ("heartbeat_ms = \"fast\"", "invalid value 'fast'"),
            ("node_id = ", "m.toml"),
            ("config = \"x\"", "no setting 'config'"),
        ] {
            std::fs::write(&file, text).unwrap();
            let error = refused(&["--config", path]);
            assert!(error.contains(why) && error.contains("m.toml"), "{text}: {error}");
        }
        assert!(refused(&["--config", "/nonexistent/m.toml"]).contains("/nonexistent/m.toml"));
    }

    #[test]
    fn the_environment_stands_between_flags_and_file() {
        let text = "rpc_port = 1\nhttp_port = 2";
        let arguments = file_arguments(text, false, |name| name == "MOONCAKE_MASTER_RPC_PORT").unwrap();
        assert_eq!(arguments, ["--http-port=2"]);
        let set: Vec<_> = Flags::command()
            .get_arguments()
            .filter(|argument| {
                argument
                    .get_long()
                    .is_some_and(|long| long != "help" && long != "version")
            })
            .filter(|argument| {
                let want = format!(
                    "{ENV_PREFIX}{}",
                    argument.get_long().unwrap().replace('-', "_").to_uppercase()
                );
                argument.get_env().and_then(|env| env.to_str()) != Some(&want)
            })
            .map(|argument| argument.get_id().to_string())
            .collect();
        assert!(
            set.is_empty(),
            "every flag has its variable, these differ: {set:?}"
        );
    }
}
