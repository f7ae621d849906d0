//! The wiring of one node: store, swarm, executor, session, HTTP; start and stop.

use crate::{
    config::Settings,
    executor::{self, AcquireJob, Boxed, Executor, FetchJob, Reports, Transfer},
    http::{self, Http},
    memory, metrics,
    rate::Rate,
    session::{Facts, Session, SessionConfig, Status},
    source::{self, AcquireTask, AllowList, SourceConfig},
    store::{Store, StoreConfig},
    swarm::{BadSource, BadSources, Swarm, SwarmConfig},
    task::TaskFailure,
    transport::{RDMA, TCP, rdma::Fabric},
};
use anyhow::Context;
use mooncake_proto::{
    hello::{FEATURE_RDMA, HelloConfig},
    manifest::Seal,
    pb::session as pb,
};
use mooncake_rdma::Rdma;
use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{net::TcpListener, sync::watch, task::JoinSet};
use tokio_util::sync::CancellationToken;

/// What this program calls itself in hellos and registrations.
pub const SOFTWARE: &str = concat!("mooncake_client ", env!("CARGO_PKG_VERSION"));
/// How often free space is sampled for heartbeats.
const SPACE_INTERVAL: Duration = Duration::from_secs(2);
/// How often expired staging is looked for, at most.
const EXPIRE_INTERVAL: Duration = Duration::from_secs(600);
/// How long a master must have had this node before staging expires: it needs time to send its orders, and
/// without them nobody here knows what is wanted.
const EXPIRE_AFTER_REGISTERED: Duration = Duration::from_secs(60);
/// For tasks to stop when the process stops: one disk operation each. After it the process goes anyway; what
/// was journaled is kept.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// For the goodbye to the master, which takes a second at most, and the end of the session's thread.
const SESSION_STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// The session's look at the holdings, the sample of free space, the look for expired staging, the last flush.
const OWN_BLOCKING_CALLS: usize = 4;

/// A running node.
pub struct Node {
    node_id: String,
    data_address: SocketAddr,
    http_address: SocketAddr,
    store: Store,
    executor: Executor,
    session: Option<Session>,
    http: Http,
    stop: CancellationToken,
    /// What must not end by itself.
    vital: JoinSet<anyhow::Result<()>>,
}

/// Sources and swarm as the executor sees them.
struct Mover {
    swarm: Swarm,
    allow: AllowList,
    source_config: SourceConfig,
}

impl Transfer for Mover {
    fn acquire(&self, job: AcquireJob, cancel: CancellationToken) -> Boxed<Result<Seal, TaskFailure>> {
        let task = AcquireTask {
            artifact: job.artifact,
            sources: job.sources,
            allow: self.allow.clone(),
            expected_seal: job.expected_seal,
            counters: job.live.counters.clone(),
        };
        Box::pin(source::acquire(task, self.source_config.clone(), cancel))
    }

    fn fetch(&self, job: FetchJob, cancel: CancellationToken) -> Boxed<Result<(), TaskFailure>> {
        let swarm = self.swarm.clone();
        let live = job.live.clone();
        let bad: BadSources = Arc::new(move |b: BadSource| live.bad_source(b.node_id, b.reason));
        Box::pin(async move {
            swarm
                .fetch(
                    job.artifact,
                    job.peers,
                    job.seal,
                    job.live.counters.clone(),
                    bad,
                    cancel,
                )
                .await
        })
    }
}

fn swarm_config(max_uploads: usize) -> SwarmConfig {
    SwarmConfig {
        max_uploads,
        ..SwarmConfig::default()
    }
}

/// Most blocking calls under way at once in a node that sends so many blocks at a time: as many threads the
/// runtime needs for them, so that none of them starves another (a share that hangs must not stop what peers
/// send). Each part bounds its own where they begin. Threads are made as they are needed, and idle ones end.
pub fn blocking_calls(max_uploads: usize) -> usize {
    swarm_config(max_uploads).blocking_calls()
        + source::BLOCKING_CALLS
        + executor::BLOCKING_CALLS
        + http::BLOCKING_CALLS
        + OWN_BLOCKING_CALLS
}

impl Node {
    /// Starts everything. An error says which flag or folder is at fault.
    pub async fn start(settings: Settings) -> anyhow::Result<Self> {
        // Ports first: a second client on the same ports must not touch the folder.
        let data = bind("--data-address", settings.data_listen).await?;
        let http_listener = bind("--http-address", settings.http_listen).await?;
        let (data_address, http_address) = (data.local_addr()?, http_listener.local_addr()?);
        let advertise = settings
            .advertise
            .map_or_else(|| data_address.to_string(), |a| a.0);
        let node_id = settings.node_id.map_or_else(|| advertise.clone(), |id| id.0);

        let root = settings.root.clone();
        let store = tokio::task::spawn_blocking(move || Store::open(StoreConfig::new(root)))
            .await?
            .with_context(|| format!("cannot use --root {}", settings.root.display()))?;
        tracing::info!(
            node = %node_id, store_id = %store.store_id(), root = %store.root().display(),
            data = %data_address, advertised = %advertise, http = %http_address, "node starts"
        );
        if settings.allow.is_empty() {
            tracing::info!("no --allow-source: this node reads no source, it only receives from other nodes");
        }

        let rdma = match settings.rdma {
            Some(config) => start_rdma(config, settings.rdma_required).await?,
            None => None,
        };
        let hello = Arc::new(HelloConfig {
            cluster_id: settings.cluster_id,
            secret: settings.secret,
            node_id: node_id.clone(),
            instance_id: store.store_id().to_owned(),
            software: SOFTWARE.to_owned(),
            features: if rdma.is_some() { FEATURE_RDMA } else { 0 },
        });
        let stop = CancellationToken::new();
        let mut vital = JoinSet::new();

        let download = Arc::new(Rate::new(settings.download_limit));
        let swarm_config = SwarmConfig {
            upload: settings.upload_limit,
            download: download.clone(),
            rack: settings.labels.get("rack").cloned(),
            ..swarm_config(settings.max_uploads)
        };
        memory::warm(source::limits::MAX_BUFFERS + swarm_config.max_received);
        let swarm = Swarm::with_rdma(store.clone(), hello.clone(), swarm_config, rdma.clone());
        let (server, server_stop) = (swarm.clone(), stop.clone());
        vital.spawn(async move {
            server.serve(data, server_stop).await;
            Ok(())
        });

        let reports = Arc::new(Reports::default());
        let mover = Arc::new(Mover {
            swarm: swarm.clone(),
            allow: settings.allow,
            source_config: SourceConfig {
                download,
                ..SourceConfig::default()
            },
        });
        let executor = Executor::new(store.clone(), mover, reports.clone());

        let free_bytes = Arc::new(AtomicU64::new(0));
        let register = pb::Register {
            node_id: node_id.clone(),
            store_id: store.store_id().to_owned(),
            http_address: reachable(http_address, &advertise),
            data_address: advertise,
            transports: transports(rdma.as_deref()),
            labels: settings.labels.into_iter().collect(),
            max_transfers: settings.max_transfers.unwrap_or(0),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Default::default()
        };
        let session = Session::start(
            SessionConfig {
                masters: settings.masters,
                hello,
                register,
                free_bytes: free_bytes.clone(),
            },
            Facts {
                store: store.clone(),
                reports: reports.clone(),
            },
            executor.clone(),
        )
        .context("cannot start the session's thread")?;

        let metrics = metrics::Sources {
            store: store.clone(),
            reports,
            status: session.status(),
            round_trips: session.round_trips(),
            swarm,
            rdma,
        };
        let http = Http::new(node_id.clone(), store.clone(), metrics);
        let (server, server_stop) = (http.clone(), stop.clone());
        vital.spawn(async move {
            server.serve(http_listener, server_stop).await;
            Ok(())
        });

        tokio::spawn(
            stop.clone()
                .run_until_cancelled_owned(sample_space(store.clone(), free_bytes)),
        );
        tokio::spawn(stop.clone().run_until_cancelled_owned(expire(
            store.clone(),
            executor.clone(),
            settings.staging_expire,
            session.status(),
        )));
        Ok(Self {
            node_id,
            data_address,
            http_address,
            store,
            executor,
            session: Some(session),
            http,
            stop,
            vital,
        })
    }

    /// Its id.
    pub fn node_id(&self) -> &str {
        &self.node_id
    }

    /// Where it listens for peers.
    pub fn data_address(&self) -> SocketAddr {
        self.data_address
    }

    /// Where it serves HTTP.
    pub fn http_address(&self) -> SocketAddr {
        self.http_address
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The session's state.
    pub fn status(&self) -> Option<watch::Receiver<Status>> {
        self.session.as_ref().map(Session::status)
    }

    /// Ends when a part that must run has ended by itself, with the reason.
    pub async fn failed(&mut self) -> anyhow::Error {
        let session = async {
            match &mut self.session {
                Some(session) => session.ended().await,
                None => std::future::pending().await,
            }
        };
        let part = tokio::select! {
            () = session => return anyhow::anyhow!("the session's thread ended by itself; the log has the reason"),
            part = self.vital.join_next() => part,
        };
        match part {
            Some(Ok(Err(e))) => e,
            Some(Err(e)) => anyhow::anyhow!("a part of the node ended: {e}"),
            Some(Ok(Ok(()))) | None => anyhow::anyhow!("a part of the node ended by itself"),
        }
    }

    /// [`Node::stop`], and lets go of everything: that waits for the store's threads, however long they hang.
    pub async fn shutdown(mut self) {
        self.stop().await;
    }

    /// Not ready, goodbye to the master, tasks stopped, journals flushed, ports closed; each in bounded time.
    pub async fn stop(&mut self) {
        tracing::info!(node = %self.node_id, "stopping");
        self.http.draining.store(true, Ordering::Relaxed);
        // First: the master gives this node's work to others while the tasks end here.
        if let Some(session) = self.session.take()
            && tokio::time::timeout(SESSION_STOP_TIMEOUT, session.stop())
                .await
                .is_err()
        {
            tracing::warn!(
                "the session did not end within {} s: leaving it",
                SESSION_STOP_TIMEOUT.as_secs()
            );
        }
        self.stop.cancel();
        if tokio::time::timeout(STOP_TIMEOUT, self.executor.shutdown())
            .await
            .is_err()
        {
            tracing::warn!(
                "tasks did not stop within {} s: leaving them",
                STOP_TIMEOUT.as_secs()
            );
        }
        let store = self.store.clone();
        let flush = tokio::task::spawn_blocking(move || {
            for artifact in store.holdings().iter().filter_map(|h| store.find(&h.model)) {
                if let Err(error) = artifact.flush() {
                    tracing::warn!(model = %artifact.model(), %error, "not everything verified could be journaled");
                }
            }
        });
        let _ = tokio::time::timeout(STOP_TIMEOUT, flush).await;
        let ended = async { while self.vital.join_next().await.is_some() {} };
        if tokio::time::timeout(STOP_TIMEOUT, ended).await.is_err() {
            tracing::warn!(
                "the ports did not close within {} s: leaving them",
                STOP_TIMEOUT.as_secs()
            );
        }
        tracing::info!(node = %self.node_id, "stopped");
    }
}

/// This node's RDMA, if it has what is needed: the library at least, for a device may come later.
async fn start_rdma(config: mooncake_rdma::Config, required: bool) -> anyhow::Result<Option<Arc<Fabric>>> {
    let started = tokio::task::spawn_blocking(move || Rdma::start(config));
    let rdma = started
        .await?
        .context("cannot start the thread that looks after RDMA devices")?;
    let report = rdma.report();
    match report.hindrance() {
        None => tracing::info!(rdma = %report, "blocks go by RDMA to and from nodes that can"),
        Some(_) if required => {
            anyhow::bail!(
                "--transport rdma, but RDMA cannot be used here: {report} (or give --transport auto)"
            )
        }
        Some(what) => tracing::info!(what, rdma = %report, "RDMA cannot be used here; blocks go over TCP"),
    }
    // Without the library nothing can change before the next start: other nodes need not ask.
    Ok((report.hindrance() != Some("library")).then(|| Fabric::new(rdma)))
}

/// What this node tells the masters of its transports, for people to see. What keeps a device from being used is said, too;
/// a node without any has none to speak of.
fn transports(rdma: Option<&Fabric>) -> Vec<String> {
    let mut all = vec![TCP.to_owned()];
    if let Some(fabric) = rdma {
        match fabric.rdma().report().hindrance() {
            None => all.push(RDMA.to_owned()),
            Some("device" | "library") => {}
            Some(what) => all.push(format!("{RDMA}-off:{what}")),
        }
    }
    all
}

/// Where others reach a port that listens on every address: at the host of the advertised address.
fn reachable(listens: SocketAddr, advertise: &str) -> String {
    match advertise.rsplit_once(':') {
        Some((host, _)) if listens.ip().is_unspecified() => format!("{host}:{}", listens.port()),
        _ => listens.to_string(),
    }
}

async fn bind(flag: &str, address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|e| {
        let advice = match e.kind() {
            std::io::ErrorKind::AddrInUse => {
                "another process listens there; stop it or give another port (0 takes a free one)"
            }
            std::io::ErrorKind::AddrNotAvailable => "this machine has no such address",
            std::io::ErrorKind::PermissionDenied => "ports below 1024 need privileges",
            _ => "check the address",
        };
        anyhow::anyhow!("cannot listen on {address} ({flag}): {e}; {advice}")
    })
}

async fn sample_space(store: Store, free_bytes: Arc<AtomicU64>) {
    loop {
        let disk = store.clone();
        if let Ok(Ok(free)) = tokio::task::spawn_blocking(move || disk.free_bytes()).await {
            free_bytes.store(free, Ordering::Relaxed);
        }
        tokio::time::sleep(SPACE_INTERVAL).await;
    }
}

async fn expire(store: Store, executor: Executor, max_age: Duration, mut status: watch::Receiver<Status>) {
    let interval = (max_age / 4).clamp(Duration::from_secs(1), EXPIRE_INTERVAL);
    loop {
        tokio::time::sleep(interval).await;
        if !stays_registered(&mut status, EXPIRE_AFTER_REGISTERED.min(max_age)).await {
            continue;
        }
        let (store, executor) = (store.clone(), executor.clone());
        // It logs what it removes.
        let _ =
            tokio::task::spawn_blocking(move || store.expire_staging(max_age, |model| executor.wants(model)))
                .await;
    }
}

/// Whether the session does not change for this long.
async fn stays_registered(status: &mut watch::Receiver<Status>, time: Duration) -> bool {
    let registered = matches!(*status.borrow_and_update(), Status::Registered { .. });
    registered && tokio::time::timeout(time, status.changed()).await.is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unspecified_address_is_shown_as_the_advertised_host() {
        for (listens, advertise, want) in [
            ("0.0.0.0:9300", "n1.example:50052", "n1.example:9300"),
            ("[::]:9300", "[fd00::1]:50052", "[fd00::1]:9300"),
            ("127.0.0.1:9300", "n1.example:50052", "127.0.0.1:9300"),
        ] {
            assert_eq!(reachable(listens.parse().unwrap(), advertise), want);
        }
    }

    #[tokio::test]
    async fn a_taken_port_is_named_with_its_flag() {
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let error = bind("--data-address", taken.local_addr().unwrap())
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("--data-address") && error.contains("another process"),
            "{error}"
        );
    }
}
