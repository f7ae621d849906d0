//! Consensus: openraft on the Raft store, the Raft port, and the [`Handle`] that everyone else uses.
//!
//! Guaranteed: what [`Handle::propose`] answered with success is on the disks of a quorum and applied here; what it
//! answered with [`ProposeError::NotLeader`], `Overloaded`, `TooLarge` or `Stopped` was not appended; everything else
//! is [`ProposeError::OutcomeUnknown`]. [`Handle::read_index`] rests on a quorum's word, never on a clock. A storage
//! failure ends the process ([`Handle::failed`]).
//!
//! Not guaranteed: that [`Leadership::is_leader`] is still true when it is read, or that [`Handle::state`] is
//! current: ask for a read index where that matters.
//!
//! Raft runs on threads of its own: 64 MiB of JSON, a thousand sessions or a slow digest on the main
//! runtime must not delay a heartbeat. Connections that open for a node session are accepted here (one port) and
//! handed over as [`Sessions`].

mod bootstrap;
mod considerate;
mod early_election;
mod handle;
mod inbound;
mod leadership;
mod machine;
mod membership;
mod membership_rules;
mod network;
mod peers;
mod read_index;
mod removal;
mod service;
mod transfer;
mod upkeep;
mod version;
mod wire;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use mooncake_proto::hello::{self, HelloConfig, HelloStream, Purpose, Secret};
use mooncake_proto::pb::raft as pb;
use mooncake_proto::pb::raft::raft_server::RaftServer;
use mooncake_raft_store::{NodeId, OpenError, OpenOptions, StateMachineStore, Store, TypeConfig};
use openraft::{Config, SnapshotPolicy};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected as _;

pub use bootstrap::BootstrapError;
pub use handle::{
    AppliedWatch, Cluster, Handle, MAX_PROPOSAL_BYTES, MAX_PROPOSALS, MAX_READY_LAG, Member, NotReady,
    PROPOSE_DEADLINE, ProposeError, Proposed, QUORUM_WITHIN, READ_DEADLINE, ReadError, StateAt,
};
pub use leadership::Leadership;
pub use machine::{Change, Machine};
pub use membership::{ChangeError, Changed};
pub use mooncake_raft_store::Identity;
pub(crate) use removal::check_note as check_removal_note;
pub use transfer::TransferError;
pub(crate) use version::{check as check_version, set_supported as set_supported_version};

use crate::{config::MemberAddress, threads::Threads};
use peers::Peers;

/// openraft with our types.
pub(crate) type MasterRaft = openraft::Raft<TypeConfig, StateMachineStore<Machine>>;
/// Reads the applied state.
pub(crate) type StateReader = mooncake_raft_store::StateReader<Machine>;
/// Accepted connections of node sessions; serve them with tonic's `serve_with_incoming`.
pub type Sessions = ReceiverStream<io::Result<HelloStream>>;

/// What this program calls itself in a hello.
pub(crate) const SOFTWARE: &str = concat!("mooncake_master ", env!("CARGO_PKG_VERSION"));
/// Threads for Raft: one may be busy applying, the others go on with heartbeats.
const RAFT_THREADS: usize = 3;
/// Accepted connections that wait to be served.
const ACCEPT_QUEUE: usize = 64;
/// Entries per append, beside the limit in bytes.
const MAX_APPEND_ENTRIES: u64 = 1024;
/// How long the other end may take to check and load a snapshot after its last byte.
const INSTALL_SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(120);
/// Waits between attempts to reach a follower. Short: it bounds how long a returned follower waits for entries.
const REPLICATION_BACKOFF: &str = "20ms 40ms 80ms ..400ms";
/// How long closing the store may take at the end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// A master's place in the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Master {
    /// Its Raft id.
    pub id: NodeId,
    /// `host:port` of its RPC port.
    pub rpc_address: String,
    /// `host:port` of its HTTP port.
    pub http_address: String,
}

/// Timers, in milliseconds.
///
/// A follower starts an election after `election_max` (the leader's lease) plus a random time between `election_min`
/// and `election_max` without a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timers {
    /// Between heartbeats.
    pub heartbeat_ms: u64,
    /// Shortest random part.
    pub election_min_ms: u64,
    /// Longest random part.
    pub election_max_ms: u64,
}

impl Timers {
    /// Measured on two shared cores: a killed or frozen leader is replaced after 360 to 470 ms (half of the cases by
    /// 400 ms), and eight busy loops beside three masters and a compiler start no election.
    pub const DEFAULT: Self = Self {
        heartbeat_ms: 40,
        election_min_ms: 120,
        election_max_ms: 240,
    };
}

/// How to start.
#[derive(Clone, Debug)]
pub struct Options {
    /// The cluster's name.
    pub cluster_id: String,
    /// This master's Raft id.
    pub node_id: NodeId,
    /// Where its log and snapshots are.
    pub data_dir: PathBuf,
    /// The cluster's secret.
    pub secret: Option<Secret>,
    /// Timers.
    pub timers: Timers,
    /// A snapshot after this many entries.
    pub snapshot_every: u64,
    /// Entries kept behind a snapshot, so that a follower that was away for a moment needs no snapshot.
    pub snapshot_keep: u64,
    /// Where this master is reached, as it would be taken down by a cluster that adds it.
    pub address: MemberAddress,
    /// The members of a new cluster, this one included.
    pub initial_cluster: BTreeMap<NodeId, MemberAddress>,
    /// Make a new cluster if this disk is empty.
    pub bootstrap: bool,
}

/// Why consensus does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The data folder.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The flags.
    #[error("{0}")]
    Config(String),
    /// This master was removed from its cluster.
    #[error("{0}")]
    Removed(String),
    /// The operating system.
    #[error("{what}: {error}")]
    Io {
        /// What was attempted.
        what: &'static str,
        /// Its answer.
        error: io::Error,
    },
    /// The log, which is applied at the start, needs a newer program.
    #[error("{0}")]
    TooOld(Arc<str>),
    /// openraft.
    #[error("Raft does not start: {0}")]
    Raft(String),
}

/// Consensus, running. Owns its runtime; everyone else has a [`Handle`].
pub struct Consensus {
    handle: Handle,
    store: Option<Store>,
    stop_serving: watch::Sender<bool>,
    bootstrap: Option<tokio::task::JoinHandle<Result<(), BootstrapError>>>,
    removed: watch::Receiver<Option<Arc<str>>>,
    threads: Threads,
}

impl Consensus {
    /// Opens the data folder, starts Raft, serves it on `listener`, and makes or joins the cluster in the background.
    ///
    /// Returns before a leader is known: [`Handle::readiness`] tells when this master is of use.
    pub async fn start(options: Options, listener: TcpListener) -> Result<(Self, Sessions), StartError> {
        let raft_config = raft_config(&options)?;
        let threads = Threads::start("raft", RAFT_THREADS).map_err(|error| StartError::Io {
            what: "starting the Raft threads",
            error,
        })?;
        let started = threads
            .handle()
            .spawn(start_on_runtime(options, raft_config, listener));
        let started = started
            .await
            .map_err(|error| StartError::Raft(error.to_string()))??;
        let Started {
            handle,
            store,
            stop_serving,
            bootstrap,
            removed,
            sessions,
        } = started;
        Ok((
            Self {
                handle,
                store: Some(store),
                stop_serving,
                bootstrap,
                removed,
                threads,
            },
            sessions,
        ))
    }

    /// For everyone else.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Waits for the end of the bootstrap and gives its failure. Never returns when there is none.
    pub async fn bootstrap_failed(&mut self) -> BootstrapError {
        if let Some(task) = &mut self.bootstrap {
            let result = task.await;
            self.bootstrap = None;
            match result {
                Ok(Ok(())) | Ok(Err(BootstrapError::Stopped)) => {}
                Ok(Err(error)) => return error,
                Err(error) if error.is_cancelled() => {}
                Err(error) => return BootstrapError::Raft(error.to_string()),
            }
        }
        std::future::pending().await
    }

    /// Waits until this master is removed from its cluster, and gives the reason. Never returns while it is not.
    pub fn removed(&self) -> impl Future<Output = Arc<str>> + use<> {
        let mut removed = self.removed.clone();
        async move {
            match removed
                .wait_for(Option::is_some)
                .await
                .map(|reason| reason.clone())
            {
                Ok(Some(reason)) => reason,
                _ => std::future::pending().await,
            }
        }
    }

    /// Stops Raft and closes the store. Hand leadership over first ([`Handle::transfer_leader`]).
    pub async fn shutdown(mut self) -> Result<(), String> {
        if let Some(task) = self.bootstrap.take() {
            task.abort();
        }
        self.handle
            .inner
            .raft
            .shutdown()
            .await
            .map_err(|error| format!("stopping Raft: {error}"))?;
        self.stop_serving.send_replace(true);
        if let Some(store) = self.store.take() {
            let closed = tokio::time::timeout(CLOSE_TIMEOUT, store.close()).await;
            match closed {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Err(format!("closing the Raft store: {error}")),
                // Nothing is lost: what was acknowledged is durable already.
                Err(_) => tracing::warn!(
                    "the Raft store was not closed within {} s",
                    CLOSE_TIMEOUT.as_secs()
                ),
            }
        }
        drop(self.threads);
        Ok(())
    }
}

impl fmt::Debug for Consensus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consensus")
            .field("handle", &self.handle)
            .finish_non_exhaustive()
    }
}

struct Started {
    handle: Handle,
    store: Store,
    stop_serving: watch::Sender<bool>,
    bootstrap: Option<tokio::task::JoinHandle<Result<(), BootstrapError>>>,
    removed: watch::Receiver<Option<Arc<str>>>,
    sessions: Sessions,
}

fn raft_config(options: &Options) -> Result<Arc<Config>, StartError> {
    let Timers {
        heartbeat_ms,
        election_min_ms,
        election_max_ms,
    } = options.timers;
    if heartbeat_ms == 0 || heartbeat_ms * 2 > election_min_ms {
        return Err(StartError::Config(format!(
            "--heartbeat-ms {heartbeat_ms} must be at least 1 and at most half of --election-min-ms {election_min_ms}: one lost \
             heartbeat must not start an election"
        )));
    }
    let config = Config {
        cluster_name: options.cluster_id.clone(),
        heartbeat_interval: heartbeat_ms,
        election_timeout_min: election_min_ms,
        election_timeout_max: election_max_ms,
        max_payload_entries: MAX_APPEND_ENTRIES,
        snapshot_policy: SnapshotPolicy::LogsSinceLast(options.snapshot_every),
        max_in_snapshot_log_to_keep: options.snapshot_keep,
        // Above the snapshot policy, or a follower far behind would get snapshots for ever.
        replication_lag_threshold: options.snapshot_every.saturating_mul(2),
        install_snapshot_timeout: INSTALL_SNAPSHOT_TIMEOUT.as_millis() as u64,
        enable_pre_vote: Some(true),
        // A restarted leader stands for election like everyone else.
        enable_leader_restore: Some(false),
        // Spelled out, though it is the default: a follower whose log went back has lost what it promised.
        allow_log_reversion: Some(false),
        backoff: REPLICATION_BACKOFF.into(),
        ..Config::default()
    };
    Ok(Arc::new(config.validate().map_err(|error| {
        StartError::Config(format!("Raft timers: {error}"))
    })?))
}

async fn start_on_runtime(
    options: Options,
    config: Arc<Config>,
    listener: TcpListener,
) -> Result<Started, StartError> {
    let open = OpenOptions {
        cluster_id: options.cluster_id.clone(),
        node_id: options.node_id,
    };
    removal::check_note(&options.data_dir).map_err(StartError::Removed)?;
    let data_dir = options.data_dir.clone();
    let (machine, changes) = Machine::new();
    let (store, state_machine) = tokio::task::spawn_blocking(move || -> Result<_, OpenError> {
        let store = Store::open(&data_dir, open)?;
        let state_machine = store.state_machine(machine)?;
        Ok((store, state_machine))
    })
    .await
    .map_err(|error| StartError::Raft(error.to_string()))??;
    let reader = state_machine.reader();
    let identity = store.identity().clone();
    let (pristine, only_vote) = (store.is_pristine(), store.holds_only_a_vote());
    let log_store = store
        .take_log_store()
        .ok_or_else(|| StartError::Raft("the log is in use".into()))?;

    let hello = Arc::new(HelloConfig {
        cluster_id: identity.cluster_id.clone(),
        secret: options.secret.clone(),
        node_id: identity.node_id.to_string(),
        instance_id: identity.disk_id.clone(),
        software: SOFTWARE.into(),
        features: 0,
    });
    let peers = Arc::new(Peers::new(
        Arc::clone(&hello),
        identity.node_id,
        identity.disk_id.clone(),
    ));
    let network = network::Network {
        peers: Arc::clone(&peers),
        me: identity.node_id,
        heartbeat: Duration::from_millis(options.timers.heartbeat_ms),
    };
    let raft = MasterRaft::new(identity.node_id, config, network, log_store, state_machine)
        .await
        .map_err(|error| {
            let too_old = reader.read().machine.too_old().cloned();
            too_old.map_or_else(|| StartError::Raft(error.to_string()), StartError::TooOld)
        })?;

    let list = |(id, address): (&NodeId, &MemberAddress)| pb::Node {
        id: *id,
        rpc_address: address.rpc.clone(),
        http_address: address.http.clone(),
        disk_id: String::new(),
    };
    let shared = Arc::new(service::Shared {
        identity,
        address: options.address.clone(),
        initial_cluster: options.initial_cluster.iter().map(list).collect(),
        bootstrapping: watch::Sender::new(options.bootstrap && pristine),
        taken_for: watch::Sender::new(None),
        leader_heard: Mutex::default(),
        log_end: store.log_end(),
    });
    let inbound = inbound::Inbound::new();
    let watchman = early_election::Watchman {
        raft: raft.clone(),
        inbound: inbound.clone(),
        me: shared.identity.node_id,
    };
    let service = service::Service::new(
        raft.clone(),
        reader.clone(),
        store.snapshot_inbox(),
        Arc::clone(&shared),
        watchman.clone(),
        Arc::clone(&peers),
    );
    let stop_serving = watch::Sender::new(false);
    let sessions = serve(listener, hello, service, inbound, stop_serving.subscribe()).map_err(|error| {
        StartError::Io {
            what: "listening on the RPC port",
            error,
        }
    })?;

    early_election::spawn(watchman, Arc::clone(&peers));
    let watches = leadership::spawn(&raft, Arc::clone(&shared));
    let handle = Handle {
        inner: Arc::new(handle::Inner {
            raft: raft.clone(),
            reader,
            shared: Arc::clone(&shared),
            runtime: tokio::runtime::Handle::current(),
            proposals: Arc::new(Semaphore::new(MAX_PROPOSALS)),
            proposal_bytes: Arc::new(Semaphore::new(MAX_PROPOSAL_BYTES)),
            reads: read_index::Reads::spawn(raft.clone()),
            leadership: watches.leadership,
            recovered: watch_recovery(&raft),
            failed: watch_failure(store.fatal(), watches.stopped),
            changes,
            election_timeout: Duration::from_millis(options.timers.election_max_ms),
            peers: Arc::clone(&peers),
            changing: Arc::default(),
        }),
    };
    tokio::spawn(upkeep::run(handle.clone()));
    let removed = removal::watch(handle.clone(), options.data_dir.clone(), pristine);
    let bootstrap = match (options.bootstrap, pristine) {
        (true, true) => Some(tokio::spawn(async move {
            bootstrap::run(&raft, &peers, &shared, &options.initial_cluster).await
        })),
        (_, false) if only_vote => {
            tracing::warn!(
                "this data folder has a vote but no log: this master stopped while its cluster was being made. If the \
                 others have a leader, it fills this folder by itself. {}",
                bootstrap::REMAKE
            );
            None
        }
        (true, false) => {
            tracing::info!("--bootstrap has nothing to do: this data folder belongs to a cluster already");
            None
        }
        (false, true) => {
            tracing::info!(
                "this data folder is empty: waiting to be added to a cluster (`mooncakectl cluster add`; to make a new one, start \
                 all masters with --bootstrap)"
            );
            Some(tokio::spawn(async move {
                bootstrap::wait_to_be_added(&raft, &shared).await
            }))
        }
        (false, false) => None,
    };
    Ok(Started {
        handle,
        store,
        stop_serving,
        bootstrap,
        removed,
        sessions,
    })
}

/// Accepts connections, keeps those for Raft, gives away those for sessions.
fn serve(
    listener: TcpListener,
    hello: Arc<HelloConfig>,
    service: service::Service,
    inbound: inbound::Inbound,
    mut stop: watch::Receiver<bool>,
) -> io::Result<Sessions> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let (raft_tx, raft_rx) = mpsc::channel(ACCEPT_QUEUE);
    let (session_tx, session_rx) = mpsc::channel(ACCEPT_QUEUE);
    let incoming = hello::incoming(listener, hello, vec![Purpose::Raft, Purpose::Session]);
    let mut until = stop.clone();
    tokio::spawn(async move {
        let mut incoming = std::pin::pin!(incoming);
        loop {
            let next = tokio::select! {
                next = incoming.next() => next,
                _ = until.wait_for(|stop| *stop) => return,
            };
            let Some(next) = next else { return };
            let Ok(stream) = next else { continue };
            // Sessions that nobody serves fast enough must not stand in front of Raft: they are closed and come back.
            let (queued, what) = match stream.connect_info().purpose {
                Purpose::Session => (session_tx.try_send(Ok(stream)).is_ok(), "session"),
                _ => {
                    let stream = inbound.track(stream);
                    (raft_tx.try_send(Ok::<_, io::Error>(stream)).is_ok(), "Raft")
                }
            };
            if !queued {
                tracing::debug!("closed a {what} connection: too many wait to be served");
            }
        }
    });
    let raft = RaftServer::new(service)
        .max_decoding_message_size(peers::MAX_MESSAGE_BYTES)
        .max_encoding_message_size(peers::MAX_MESSAGE_BYTES);
    tokio::spawn(async move {
        let served = tonic::transport::Server::builder()
            .add_service(raft)
            .serve_with_incoming_shutdown(ReceiverStream::new(raft_rx), async move {
                let _ = stop.wait_for(|stop| *stop).await;
            })
            .await;
        if let Err(error) = served {
            tracing::error!(%error, "the Raft service ended");
        }
    });
    Ok(ReceiverStream::new(session_rx))
}

/// Turns true once the state is at least what it was before the start.
fn watch_recovery(raft: &MasterRaft) -> watch::Receiver<bool> {
    let raft = raft.clone();
    let (recovered_tx, recovered) = watch::channel(false);
    tokio::spawn(async move {
        // No time limit: it needs a leader, and there may be none for as long as the others are away.
        if raft.wait_for_recovery(None).await.is_ok() {
            recovered_tx.send_replace(true);
        }
    });
    recovered
}

/// The first reason to end the process, from the disk or from openraft.
fn watch_failure(
    storage: mooncake_raft_store::Fatal,
    mut stopped: watch::Receiver<Option<Arc<str>>>,
) -> watch::Receiver<Option<Arc<str>>> {
    let (failed_tx, failed) = watch::channel(None);
    tokio::spawn(async move {
        let reason: Arc<str> = tokio::select! {
            biased;
            reason = storage.wait() => format!("the Raft store failed: {reason}").into(),
            reason = async {
                match stopped.wait_for(Option::is_some).await.map(|reason| reason.clone()) {
                    Ok(Some(reason)) => reason,
                    _ => "Raft is gone".into(),
                }
            } => storage.get().map_or_else(
                || format!("Raft stopped: {reason}").into(),
                |disk| format!("the Raft store failed: {disk}").into(),
            ),
        };
        failed_tx.send_replace(Some(reason));
    });
    failed
}
