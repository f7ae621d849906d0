//! The master process: ports, consensus, API, signals.
//!
//! Guaranteed: nothing is served before it is known who this master is; a stop signal makes it not ready, hands
//! leadership over, finishes what is under way and then stops; a second signal, a storage failure, or a disk that the cluster
//! does not want ends the process at once with an error; a master that is removed from its cluster finishes what is
//! under way, says so and ends.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use mooncake_proto::hello::{Secret, check_listen};
use mooncake_raft_store::OpenError;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::{Config, Listen, MemberAddress};
use crate::consensus::{BootstrapError, Consensus, Handle, Options, StartError, TransferError};
use crate::context::{self, MasterContext, Serving};

/// Attempts to hand leadership over at a stop; after that the others elect by themselves.
const TRANSFER_ATTEMPTS: u32 = 3;

/// Why the process ends with an error.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A port, a flag, a file.
    #[error("{0}")]
    Setup(String),
    /// The data folder or Raft.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The cluster does not want this disk.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// This master is no member any more.
    #[error("{0}. It has stopped; its data folder is kept and not used again")]
    Removed(Arc<str>),
    /// The log needs a newer program.
    #[error("{0}")]
    TooOld(Arc<str>),
    /// At run time.
    #[error("{0}")]
    Failed(Arc<str>),
}

impl RunError {
    /// 1: a supervisor may start the process again. 3: that would change nothing, a person has to act. (2 is wrong
    /// usage.)
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Removed(_) | Self::Start(StartError::Removed(_)) => 3,
            Self::TooOld(_) | Self::Start(StartError::TooOld(_)) => 3,
            Self::Start(StartError::Open(OpenError::Newer { .. } | OpenError::Restore { .. })) => 3,
            Self::Bootstrap(BootstrapError::Raft(_) | BootstrapError::Stopped) => 1,
            Self::Bootstrap(_) => 3,
            _ => 1,
        }
    }
}

/// Runs the master until a signal or a failure.
pub async fn run(config: Config) -> Result<(), RunError> {
    let mut signals =
        Signals::new().map_err(|error| RunError::Setup(format!("waiting for signals: {error}")))?;
    tokio::select! {
        // Signals are looked at first: one during a long recovery must not wait for its end.
        biased;
        name = signals.next() => {
            tracing::info!(signal = name, "stopped before the start was complete");
            Ok(())
        }
        started = start(config) => started?.run_until_stopped(signals).await,
    }
}

struct Running {
    config: Config,
    consensus: Consensus,
    serving: Serving,
}

async fn start(config: Config) -> Result<Running, RunError> {
    let secret = match &config.cluster_secret_file {
        Some(path) => Some(Secret::read_file(path).map_err(RunError::Setup)?),
        None => None,
    };
    let (rpc_listener, rpc_address) =
        listen("RPC", "rpc", &config.rpc, secret.as_ref()).map_err(RunError::Setup)?;
    let (http_listener, http_address) =
        listen("HTTP", "http", &config.http, secret.as_ref()).map_err(RunError::Setup)?;
    let advertised = MemberAddress {
        rpc: config
            .advertise_rpc
            .clone()
            .unwrap_or_else(|| rpc_address.to_string()),
        http: config
            .advertise_http
            .clone()
            .unwrap_or_else(|| http_address.to_string()),
    };
    let initial_cluster = initial_cluster(&config, &advertised)?;
    let own = initial_cluster
        .get(&config.node_id)
        .cloned()
        .unwrap_or(advertised);
    tracing::info!(
        node_id = config.node_id, cluster_id = config.cluster_id, rpc = %rpc_address, http = %http_address,
        data_dir = %config.data_dir.display(), secret = secret.is_some(), "mooncake_master {} starts", env!("CARGO_PKG_VERSION")
    );
    let options = Options {
        cluster_id: config.cluster_id.clone(),
        node_id: config.node_id,
        data_dir: config.data_dir.clone(),
        secret,
        timers: config.timers,
        snapshot_every: config.snapshot_every,
        snapshot_keep: config.snapshot_keep,
        address: own.clone(),
        initial_cluster,
        bootstrap: config.bootstrap,
    };
    let (consensus, sessions) = Consensus::start(options, rpc_listener).await?;
    tell_of_other_addresses(&consensus.handle(), &own);
    let options = context::Options {
        cluster_id: config.cluster_id.clone(),
        require_checksums: config.require_checksums,
        algorithm: config.digest_algorithm,
        limits: config.limits,
        node_grace: config.node_grace,
        no_progress: config.no_progress,
        reconnect_window: config.reconnect_window,
        ..context::Options::default()
    };
    let context = MasterContext::new(consensus.handle(), options);
    let serving = Serving::start(context, http_listener, sessions)
        .map_err(|error| RunError::Setup(format!("serving the HTTP port: {error}")))?;
    Ok(Running {
        config,
        consensus,
        serving,
    })
}

impl Running {
    async fn run_until_stopped(mut self, mut signals: Signals) -> Result<(), RunError> {
        let handle = self.consensus.handle();
        let removed = self.consensus.removed();
        let name = tokio::select! {
            name = signals.next() => name,
            reason = removed => {
                tracing::error!("{reason}: stopping");
                self.stop(&handle).await?;
                return Err(RunError::Removed(reason));
            }
            reason = handle.failed() => {
                return Err(handle.too_old().map_or(RunError::Failed(reason), RunError::TooOld));
            }
            reason = self.serving.failed() => return Err(RunError::Failed(reason)),
            error = self.consensus.bootstrap_failed() => return Err(RunError::Bootstrap(error)),
        };
        tracing::info!(signal = name, "stopping; a second signal stops at once");
        let stop = self.stop(&handle);
        tokio::select! {
            stopped = stop => stopped,
            name = signals.next() => Err(RunError::Failed(format!("stopped at once by a second signal ({name})").into())),
        }
    }

    async fn stop(self, handle: &Handle) -> Result<(), RunError> {
        self.serving.context().drain();
        if handle.cluster().members.len() > 1 {
            // Load balancers notice that this master is not ready before anything changes.
            tokio::time::sleep(self.config.drain).await;
            hand_over(handle).await;
        }
        self.serving.stop().await;
        self.consensus
            .shutdown()
            .await
            .map_err(|error| RunError::Failed(error.into()))?;
        tracing::info!("stopped");
        Ok(())
    }
}

/// Leadership goes before the process does, so that nobody has to wait for an election time-out.
async fn hand_over(handle: &Handle) {
    for _ in 0..TRANSFER_ATTEMPTS {
        match handle.transfer_leader(None).await {
            Ok(leader) => {
                tracing::info!(leader = leader.id, "leadership handed over");
                return;
            }
            Err(TransferError::NotLeader { .. }) => return,
            Err(error @ (TransferError::NoCandidate | TransferError::Stopped)) => {
                tracing::warn!(%error, "leadership is not handed over");
                return;
            }
            Err(error) => tracing::warn!(%error, "handing leadership over failed"),
        }
    }
}

fn initial_cluster(
    config: &Config,
    advertised: &MemberAddress,
) -> Result<std::collections::BTreeMap<u64, MemberAddress>, RunError> {
    if let Some(own) = config.initial_cluster.get(&config.node_id) {
        if own != advertised {
            tracing::info!(
                initial_cluster = ?own, listening = ?advertised,
                "--initial-cluster gives this master another address than it listens on: the others will dial the former"
            );
        }
        return Ok(config.initial_cluster.clone());
    }
    if config.bootstrap && (unspecified(&advertised.rpc) || unspecified(&advertised.http)) {
        return Err(RunError::Setup(
            "--bootstrap makes a cluster of this master alone, but nobody can dial 0.0.0.0: give --advertise-rpc-address and \
             --advertise-http-address, or --initial-cluster"
                .into(),
        ));
    }
    Ok([(config.node_id, advertised.clone())].into())
}

/// An address to listen on that nobody can dial.
fn unspecified(address: &str) -> bool {
    address
        .parse::<SocketAddr>()
        .is_ok_and(|address| address.ip().is_unspecified())
}

/// Addresses are a part of the membership: other flags at a restart do not change what the others dial.
fn tell_of_other_addresses(handle: &Handle, own: &MemberAddress) {
    let me = handle.identity().node_id;
    let Some(known) = handle
        .cluster()
        .members
        .into_iter()
        .find(|member| member.id == me)
    else {
        return;
    };
    let differs = |known: &str, own: &str| known != own && !unspecified(own);
    if differs(&known.rpc_address, &own.rpc) || differs(&known.http_address, &own.http) {
        tracing::warn!(
            cluster_rpc = known.rpc_address,
            cluster_http = known.http_address,
            rpc = own.rpc,
            http = own.http,
            "the cluster knows this master under other addresses than it has now: unless something forwards them, \
             restart it with the addresses the cluster knows"
        );
    }
}

/// Binds a port, or says what to do about it.
fn listen(
    what: &str,
    flag: &str,
    address: &Listen,
    secret: Option<&Secret>,
) -> Result<(TcpListener, SocketAddr), String> {
    use std::net::ToSocketAddrs as _;
    let flags = format!("--{flag}-address or --{flag}-port");
    let resolved: Vec<SocketAddr> = (address.host.as_str(), address.port)
        .to_socket_addrs()
        .map_err(|error| format!("cannot resolve the {what} address {address}: {error}; correct {flags}"))?
        .collect();
    for address in &resolved {
        check_listen(&format!("the {what} port"), address, secret)?;
    }
    let listener = TcpListener::bind(&resolved[..]).map_err(|error| {
        let advice = match error.kind() {
            io::ErrorKind::AddrInUse => {
                format!("another process has this port (`ss -ltnp` shows which); stop it, or change {flags}")
            }
            io::ErrorKind::AddrNotAvailable => format!("this machine has no such address; correct {flags}"),
            io::ErrorKind::PermissionDenied => format!("ports below 1024 need rights; change {flags}"),
            _ => format!("correct {flags}"),
        };
        format!("cannot listen on {address} ({what}): {error}: {advice}")
    })?;
    let bound = listener
        .local_addr()
        .map_err(|error| format!("the {what} port: {error}"))?;
    listener
        .set_nonblocking(true)
        .map_err(|error| format!("the {what} port: {error}"))?;
    Ok((listener, bound))
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
