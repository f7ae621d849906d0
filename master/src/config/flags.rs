//! The flags as they are typed.

use std::path::PathBuf;

use clap::{ArgAction, Parser, ValueEnum};

use super::address::{InitialCluster, ListenAddress, dialled};
use crate::consensus::Timers;

/// Form of the log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object per line.
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum DigestAlgorithm {
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
        Signals: SIGTERM or SIGINT stops gracefully (not ready, hand leadership over, finish, stop); a second one stops at once.\n\n\
        Work on a data folder while no master runs on it, each with its own --help:\n\n  \
        mooncake_master restore          make a new data folder from a backup\n  \
        mooncake_master recover          after the loss of a majority: go on with this master alone\n  \
        mooncake_master snapshot verify  look at a backup",
    args_override_self = true
)]
pub(super) struct Flags {
    /// TOML or YAML file with the same names as the flags
    #[arg(long, value_name = "FILE", env = "MOONCAKE_MASTER_CONFIG")]
    pub(super) config: Option<PathBuf>,

    /// This master's id in the cluster, from 1; never give an id to another disk
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..), env = "MOONCAKE_MASTER_NODE_ID", help_heading = "Cluster")]
    pub(super) node_id: u64,
    /// Name of the cluster; processes of different clusters refuse each other
    #[arg(long, default_value = mooncake_proto::DEFAULT_CLUSTER_ID, env = "MOONCAKE_MASTER_CLUSTER_ID", help_heading = "Cluster")]
    pub(super) cluster_id: String,
    /// Folder of the Raft log and snapshots
    #[arg(
        long,
        default_value = "mooncake-master-data",
        value_name = "DIR",
        env = "MOONCAKE_MASTER_DATA_DIR",
        help_heading = "Cluster"
    )]
    pub(super) data_dir: PathBuf,
    /// All masters of a new cluster as ID=RPC_HOST:PORT/HTTP_HOST:PORT,…; the same for all of them
    #[arg(
        long,
        value_name = "MEMBERS",
        env = "MOONCAKE_MASTER_INITIAL_CLUSTER",
        help_heading = "Cluster"
    )]
    pub(super) initial_cluster: Option<InitialCluster>,
    /// Make a new cluster of the empty masters of --initial-cluster (give it to all of them); without that list, a
    /// cluster of this master alone
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set, env = "MOONCAKE_MASTER_BOOTSTRAP", help_heading = "Cluster")]
    pub(super) bootstrap: bool,
    /// File with the secret that all masters and clients share; required to listen beyond loopback
    #[arg(
        long,
        value_name = "FILE",
        env = "MOONCAKE_MASTER_CLUSTER_SECRET_FILE",
        help_heading = "Cluster"
    )]
    pub(super) cluster_secret_file: Option<PathBuf>,

    /// Where masters and clients reach this master, HOST[:PORT]
    #[arg(
        long,
        default_value = "127.0.0.1",
        value_name = "HOST[:PORT]",
        env = "MOONCAKE_MASTER_RPC_ADDRESS",
        help_heading = "Addresses"
    )]
    pub(super) rpc_address: ListenAddress,
    /// Port of --rpc-address [default: 50051]; 0 takes a free one and logs it
    #[arg(long, env = "MOONCAKE_MASTER_RPC_PORT", help_heading = "Addresses")]
    pub(super) rpc_port: Option<u16>,
    /// The HTTP API, administration and metrics, HOST[:PORT]
    #[arg(
        long,
        default_value = "127.0.0.1",
        value_name = "HOST[:PORT]",
        env = "MOONCAKE_MASTER_HTTP_ADDRESS",
        help_heading = "Addresses"
    )]
    pub(super) http_address: ListenAddress,
    /// Port of --http-address [default: 9003]; 0 takes a free one and logs it
    #[arg(
        long,
        alias = "metrics-port",
        env = "MOONCAKE_MASTER_HTTP_PORT",
        help_heading = "Addresses"
    )]
    pub(super) http_port: Option<u16>,
    /// What others dial for the RPC port, if it is not the address listened on
    #[arg(long, value_name = "HOST:PORT", value_parser = dialled, env = "MOONCAKE_MASTER_ADVERTISE_RPC_ADDRESS", help_heading = "Addresses")]
    pub(super) advertise_rpc_address: Option<String>,
    /// What others dial for the HTTP port, if it is not the address listened on
    #[arg(long, value_name = "HOST:PORT", value_parser = dialled, env = "MOONCAKE_MASTER_ADVERTISE_HTTP_ADDRESS", help_heading = "Addresses")]
    pub(super) advertise_http_address: Option<String>,

    /// A node whose session is lost is suspected, and declared down after this many seconds more
    #[arg(
        long,
        default_value_t = 30,
        env = "MOONCAKE_MASTER_NODE_GRACE_S",
        help_heading = "Nodes and jobs"
    )]
    pub(super) node_grace_s: u64,
    /// A download or copy that stands still for this many seconds on a connected node has failed; 0: never
    #[arg(
        long,
        default_value_t = 600,
        env = "MOONCAKE_MASTER_NO_PROGRESS_S",
        help_heading = "Nodes and jobs"
    )]
    pub(super) no_progress_s: u64,
    /// How long a new leader waits for nodes to reconnect before it suspects any
    #[arg(
        long,
        default_value_t = 5,
        env = "MOONCAKE_MASTER_RECONNECT_WINDOW_S",
        help_heading = "Nodes and jobs"
    )]
    pub(super) reconnect_window_s: u64,
    /// Refuse manifests whose checksums are no SHA-256 digests (otherwise accepted with a warning)
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set, env = "MOONCAKE_MASTER_REQUIRE_CHECKSUMS", help_heading = "Nodes and jobs")]
    pub(super) require_checksums: bool,
    /// Digest of the blocks of new models
    #[arg(
        long,
        value_enum,
        default_value = "blake3",
        env = "MOONCAKE_MASTER_DIGEST_ALGORITHM",
        help_heading = "Nodes and jobs"
    )]
    pub(super) digest_algorithm: DigestAlgorithm,
    /// Ended jobs are kept this many seconds [7 days] …
    #[arg(
        long,
        default_value_t = 604_800,
        env = "MOONCAKE_MASTER_JOB_RETENTION_S",
        help_heading = "Nodes and jobs"
    )]
    pub(super) job_retention_s: u64,
    /// … but at most this many
    #[arg(
        long,
        default_value_t = 10_000,
        env = "MOONCAKE_MASTER_JOB_RETENTION_COUNT",
        help_heading = "Nodes and jobs"
    )]
    pub(super) job_retention_count: u64,
    /// Ids of forgotten jobs are recognised for this many seconds [30 days] …
    #[arg(
        long,
        default_value_t = 2_592_000,
        env = "MOONCAKE_MASTER_ID_RETENTION_S",
        help_heading = "Nodes and jobs"
    )]
    pub(super) id_retention_s: u64,
    /// … but at most this many
    #[arg(
        long,
        default_value_t = 1_000_000,
        env = "MOONCAKE_MASTER_ID_RETENTION_COUNT",
        help_heading = "Nodes and jobs"
    )]
    pub(super) id_retention_count: u64,
    /// Staging that no live job wants is deleted after this many seconds [24 hours]
    #[arg(
        long,
        default_value_t = 86_400,
        env = "MOONCAKE_MASTER_STAGING_RETENTION_S",
        help_heading = "Nodes and jobs"
    )]
    pub(super) staging_retention_s: u64,

    /// Between the leader's heartbeats
    #[arg(
        long,
        default_value_t = Timers::DEFAULT.heartbeat_ms,
        env = "MOONCAKE_MASTER_HEARTBEAT_MS",
        help_heading = "Raft"
    )]
    pub(super) heartbeat_ms: u64,
    /// A follower elects after the larger of the two plus a random time between them without a heartbeat
    #[arg(
        long,
        default_value_t = Timers::DEFAULT.election_min_ms,
        env = "MOONCAKE_MASTER_ELECTION_MIN_MS",
        help_heading = "Raft"
    )]
    pub(super) election_min_ms: u64,
    /// See --election-min-ms
    #[arg(
        long,
        default_value_t = Timers::DEFAULT.election_max_ms,
        env = "MOONCAKE_MASTER_ELECTION_MAX_MS",
        help_heading = "Raft"
    )]
    pub(super) election_max_ms: u64,
    /// Build a snapshot after this many log entries
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..), env = "MOONCAKE_MASTER_SNAPSHOT_EVERY", help_heading = "Raft")]
    pub(super) snapshot_every: u64,
    /// Keep this many entries that a snapshot covers, for followers that were away for a moment
    #[arg(
        long,
        default_value_t = 2_000,
        env = "MOONCAKE_MASTER_SNAPSHOT_KEEP",
        help_heading = "Raft"
    )]
    pub(super) snapshot_keep: u64,
    /// After a stop signal: how long to be not ready before leadership is handed over; about one health-check
    /// interval of the load balancer
    #[arg(
        long,
        default_value_t = 1_000,
        env = "MOONCAKE_MASTER_DRAIN_MS",
        help_heading = "Raft"
    )]
    pub(super) drain_ms: u64,

    /// Form of the log lines on stderr
    #[arg(
        long,
        value_enum,
        default_value = "text",
        env = "MOONCAKE_MASTER_LOG_FORMAT",
        help_heading = "Logging"
    )]
    pub(super) log_format: LogFormat,
    /// What is logged, e.g. "debug" or "info,mooncake_master::consensus=debug"; RUST_LOG does the same
    #[arg(
        long,
        value_name = "FILTER",
        env = "MOONCAKE_MASTER_LOG_FILTER",
        help_heading = "Logging"
    )]
    pub(super) log_filter: Option<String>,
}
