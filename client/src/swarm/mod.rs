//! The swarm: nodes pull verified blocks from each other while they and their peers still receive.
//!
//! - [`Swarm::serve`] answers on the data port: whatever this node verified, of artifacts in staging and of
//!   published ones, goes to whoever asks, block by block, from the first one on.
//! - [`Swarm::fetch`] brings one artifact to this node from any peers that have it.
//!
//! [`chooser`] (what to ask of whom), [`words`] (which digest to expect), [`sent`] (one copy before a second),
//! [`slots`] (who sends next) and [`bits`] are pure, and [`simulation`] drives them with thousands of nodes; `link` is the puller's end of a connection, `serve` the server's, `fetch` the loop
//! that joins them.
//!
//! # Guaranteed
//! - Nothing is recorded whose bytes did not match the digest that their sender had announced for them; a
//!   sender of other bytes is reported and left (it may come back after a penalty that quadruples, for it
//!   may be the only holder and the fault may have been the wire's).
//! - [`Swarm::fetch`] returns `Ok` only when every block is held and the node's own digest list reproduces the
//!   seal. A peer that lied before the seal was known costs work: the right list is fetched from a peer, proven
//!   against the root, and what differs is forgotten and fetched again.
//! - When a fetch has returned, nothing of it touches the artifact any more.
//! - The masters are not needed: with peers and seal known, or with the seal to come, a transfer goes on.
//! - Memory: blocks requested or received and not yet written are within [`SwarmConfig::buffer_bytes`] for all
//!   fetches of the node together; those received, of whatever size, are at most [`SwarmConfig::max_received`].
//! - No block is asked of a node that is not the one that was named (the hello proves it, as far as the
//!   cluster secret goes), and never of oneself.
//!
//! # Not guaranteed
//! - An end: while no peer is reachable, or no peer has a block, a fetch waits (and says so in the log, every
//!   [`fetch::REPORT_EVERY`]); the master decides when that is a failure.
//! - Secrecy.

pub mod bits;
pub mod chooser;
pub mod fetch;
mod link;
mod repair;
pub mod sent;
mod serve;
pub mod simulation;
pub mod slots;
#[cfg(test)]
mod tests;
pub mod words;

pub use crate::transport::PeerAddress;
pub use fetch::{BadSource, BadSources};
pub use link::Received;
pub use serve::ServeStats;

use crate::{
    rate::{Limit, Rate},
    store::{Artifact, Store},
    task::{DRAIN_TIMEOUT, TaskFailure, TransferCounters},
    transport::{
        Transport,
        buffer::{BufferPool, MIN_RECEIVED},
        rdma::{self, Fabric},
        tcp::{self, Tcp},
    },
};
use link::Links;
use mooncake_proto::{
    hello::HelloConfig,
    manifest::{BLOCK_SIZE_RANGE, Seal},
};
use serve::Server;
use std::{sync::Arc, time::Duration};
use tokio::{
    net::TcpListener,
    sync::{Semaphore, watch},
};
use tokio_util::sync::CancellationToken;

/// Unit of the buffer budget.
const BUDGET_UNIT_BYTES: u32 = 1024;

/// The most that [`SwarmConfig::max_writers`] is by default, however many cores there are.
pub const MAX_WRITERS: usize = 32;
/// Digest lists being hashed or applied at once, over all fetches.
const MAX_PROOFS: usize = 4;

/// How the swarm of a node behaves.
#[derive(Clone, Debug)]
pub struct SwarmConfig {
    /// Most blocks sent at a time. Each takes a thread while it is sent; 16 keep any link busy and leave each
    /// receiver a share in which a block still takes milliseconds.
    pub max_uploads: usize,
    /// Most bytes requested or received and not yet written, over all fetches.
    pub buffer_bytes: usize,
    /// Most blocks being hashed and written at a time.
    pub max_writers: usize,
    /// Most blocks, of whatever size, being received or waiting to be written, over all fetches.
    pub max_received: usize,
    /// This node's rack, if racks are known (`rack` of its labels).
    pub rack: Option<String>,
    /// First penalty of a peer that sent bad bytes; quadruples each time.
    pub penalty: Duration,
    /// How long a peer that was asked for its digest list may send no part of it before another is asked.
    pub list_timeout: Duration,
    /// See [`DRAIN_TIMEOUT`].
    pub drain_timeout: Duration,
    /// Most bytes per second to peers. Under a small one fewer blocks are sent at a time: whoever has a slot waits for
    /// about a second then, others are told `busy` and ask elsewhere.
    pub upload: Option<Limit>,
    /// Of what comes from peers, and whatever else shares it.
    pub download: Arc<Rate>,
    /// Breaks the rule that everything is verified, to see that the tests notice.
    #[cfg(test)]
    pub trust_anything: bool,
}

impl Default for SwarmConfig {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(2, |n| n.get());
        let max_writers = (2 * cores).clamp(4, MAX_WRITERS);
        Self {
            max_uploads: 16,
            buffer_bytes: 64 << 20,
            max_writers,
            // While one block is written by each writer, the next one arrives for it.
            max_received: (2 * max_writers).max(MIN_RECEIVED),
            rack: None,
            penalty: Duration::from_secs(30),
            // A slow peer sends at most one block before it answers.
            list_timeout: Duration::from_secs(10),
            drain_timeout: DRAIN_TIMEOUT,
            upload: None,
            download: Arc::default(),
            #[cfg(test)]
            trust_anything: false,
        }
    }
}

impl SwarmConfig {
    fn upload_slots(&self) -> usize {
        let largest = u64::from(*BLOCK_SIZE_RANGE.end());
        let within = self.upload.map_or(u64::MAX, |limit| limit.0 / largest);
        self.max_uploads
            .min(usize::try_from(within).unwrap_or(usize::MAX))
            .max(1)
    }

    /// Most blocking calls under way at once.
    pub fn blocking_calls(&self) -> usize {
        self.max_uploads.max(1)
            + self.max_writers.max(1)
            + MAX_PROOFS
            + serve::MAX_SEALS
            + tcp::MAX_LOOKUPS
            + rdma::MAX_KERNEL_CALLS
    }
}

struct Inner {
    hello: Arc<HelloConfig>,
    config: SwarmConfig,
    links: Links,
    server: Arc<Server>,
    /// In units of [`BUDGET_UNIT_BYTES`].
    budget: Arc<Semaphore>,
    writers: Arc<Semaphore>,
    /// Roots and lists being computed and applied: each hashes up to 32 MiB, or waits for the disk.
    proofs: Arc<Semaphore>,
}

/// A handle, cheap to clone. One per node.
#[derive(Clone)]
pub struct Swarm {
    inner: Arc<Inner>,
}

impl Swarm {
    /// Serves from `store`, says `hello` on every connection.
    pub fn new(store: Store, hello: Arc<HelloConfig>, config: SwarmConfig) -> Self {
        Self::with_rdma(store, hello, config, None)
    }

    /// Like [`Swarm::new`]; blocks go by RDMA to and from peers that can, too. `hello` shows the feature then.
    pub fn with_rdma(
        store: Store,
        hello: Arc<HelloConfig>,
        config: SwarmConfig,
        rdma: Option<Arc<Fabric>>,
    ) -> Self {
        let tcp: Arc<dyn Transport> = Arc::new(Tcp::with_rdma(hello.clone(), rdma.clone()));
        Self::build(store, hello, config, rdma, vec![tcp])
    }

    /// Like [`Swarm::new`], dialling with `transports`: preferred ones first, TCP last.
    pub fn with_transports(
        store: Store,
        hello: Arc<HelloConfig>,
        config: SwarmConfig,
        transports: Vec<Arc<dyn Transport>>,
    ) -> Self {
        Self::build(store, hello, config, None, transports)
    }

    fn build(
        store: Store,
        hello: Arc<HelloConfig>,
        config: SwarmConfig,
        rdma: Option<Arc<Fabric>>,
        transports: Vec<Arc<dyn Transport>>,
    ) -> Self {
        assert!(!transports.is_empty(), "at least TCP");
        let buffers = Arc::new(BufferPool::new(config.max_received));
        // Two of the largest blocks must fit, or a fetch could not move at all.
        let least = 2 * *BLOCK_SIZE_RANGE.end() as usize;
        let budget = config.buffer_bytes.max(least) / BUDGET_UNIT_BYTES as usize;
        Self {
            inner: Arc::new(Inner {
                links: Links::new(transports, rdma.clone(), buffers.clone()),
                server: Arc::new(Server::new(
                    store,
                    hello.clone(),
                    buffers,
                    rdma,
                    config.upload_slots(),
                    Rate::new(config.upload),
                )),
                budget: Arc::new(Semaphore::new(budget)),
                writers: Arc::new(Semaphore::new(config.max_writers.max(1))),
                proofs: Arc::new(Semaphore::new(MAX_PROOFS)),
                hello,
                config,
            }),
        }
    }

    /// Serves data connections on `listener` until `cancel`.
    pub async fn serve(&self, listener: TcpListener, cancel: CancellationToken) {
        self.inner.server.clone().run(listener, cancel).await;
    }

    /// What the serving side did so far.
    pub fn stats(&self) -> &ServeStats {
        &self.inner.server.stats
    }

    /// What came from peers so far, whatever became of it.
    pub fn received(&self) -> &Received {
        self.inner.links.received()
    }

    /// Fetches what `artifact` misses from `peers`, whose list may change at any time, and proves it by
    /// `seal`, which may come at any time: returns `Ok` once every block is held and the digest list
    /// reproduces the seal. Fails only for local reasons (disk, cancellation). What was verified stays.
    pub async fn fetch(
        &self,
        artifact: Arc<Artifact>,
        peers: watch::Receiver<Vec<PeerAddress>>,
        seal: watch::Receiver<Option<Seal>>,
        counters: Arc<TransferCounters>,
        bad_sources: BadSources,
        cancel: CancellationToken,
    ) -> Result<(), TaskFailure> {
        fetch::Fetch::new(self.inner.clone(), artifact, counters, bad_sources)
            .run(peers, seal, cancel)
            .await
    }
}
