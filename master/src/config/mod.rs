//! The master's configuration: flags, environment, file, in this order of precedence.
//!
//! Names are the same everywhere: `--rpc-port` on the command line (or `--rpc_port`, as Mooncake's operators write
//! it), `MOONCAKE_MASTER_RPC_PORT` in the environment, `rpc_port` (or `rpc-port`) in the file of `--config`, which is
//! TOML or, if its name ends in `.yaml` or `.yml`, YAML. A name that is not known is refused, wherever it stands.

mod address;
mod file;
mod flags;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser as _;
use mooncake_proto::digest::Algorithm;
use mooncake_raft_store::NodeId;
use mooncake_state::Limits;

use crate::consensus::Timers;

pub use address::{InitialCluster, Listen, ListenAddress, MemberAddress};
pub(crate) use address::{MAX_MEMBERS, check_address, dialled};
pub(crate) use file::hyphens;
pub use flags::LogFormat;
use flags::{DigestAlgorithm, Flags};

/// Default port of the RPC address.
pub const DEFAULT_RPC_PORT: u16 = 50051;
/// Default port of the HTTP address.
pub const DEFAULT_HTTP_PORT: u16 = 9003;
/// Longest cluster id; it is part of every hello, which is bounded.
pub(crate) const MAX_CLUSTER_ID_BYTES: usize = 256;
const ENV_PREFIX: &str = "MOONCAKE_MASTER_";

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
        if let Some(path) = file::config_file(&arguments) {
            let from_file = file::read_file(&path).map_err(|error| {
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

#[cfg(test)]
mod tests;
