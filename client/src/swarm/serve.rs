//! The server's end of data connections: announces what this node verified, and sends it.
//!
//! Guaranteed: only verified blocks leave this node; every request is answered once; at most `max_uploads`
//! blocks are being sent at a time, first copies before others ([`super::slots`]), connections taking turns block by
//! block;
//! no block keeps its slot for longer than [`crate::transport::block_time`] allows, and what a person's limit makes it wait
//! before;
//! a request that gets no slot in [`BUSY_AFTER`] is told `busy`. Not guaranteed: that the disk still gives back
//! what was verified (the receiver checks).

mod answers;
mod queue;
mod turns;
mod waits;

pub(super) use answers::ANNOUNCE_INTERVAL;

use super::{
    sent::{ConnectionId, SentLog},
    slots::next_of,
};
use crate::{
    rate::Rate,
    store::{Artifact, Store},
    transport::{
        Connection, Frame, FrameReceiver, FrameSender, NoBlocks, RDMA, Room, Sent, buffer::BufferPool,
        rdma::Fabric, tcp,
    },
};
use mooncake_proto::{
    digest::{Algorithm, Digest},
    hello::HelloConfig,
    ids::ModelRef,
    pb::{peer as pb, session::DigestAlgorithm},
};
use parking_lot::Mutex;
use pb::peer_message::Body;
use prost::{Message, bytes::Bytes};
use queue::{Promise, Queued, Upload, holds};
use std::{
    collections::{HashMap, VecDeque},
    io,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;
use turns::{Turn, Turns};
use waits::{Balance, room};

/// Most data connections that are served: every node of the largest cluster dials at most one or two.
const MAX_CONNECTIONS: usize = 2048;
/// Most data connections of one node: one is what a node needs, a few more are there while it restarts.
const MAX_CONNECTIONS_PER_NODE: usize = 8;
/// Connections whose hello is not done: strangers that stay silent must not use up the process.
const MAX_HANDSHAKES: usize = 256;
/// Most subscriptions on one connection: each costs a task. 4,096 artifacts in flight at once between two
/// nodes are far beyond what a node's session orders.
const MAX_SUBSCRIPTIONS: usize = 4096;
/// Most requests that wait on one connection; a puller's own budget (64 MiB) allows 256 of the smallest
/// blocks and a few thousand tiny ones.
const MAX_QUEUED_REQUESTS: usize = 8192;
/// Control messages that wait on one connection before those who make them have to wait.
const CONTROL_QUEUE: usize = 64;
/// How long a request waits for an upload slot before it is declined as busy.
pub(super) const BUSY_AFTER: Duration = Duration::from_secs(2);

/// Roots of whole artifacts being computed at once, for all subscriptions: each hashes up to 32 MiB.
pub(super) const MAX_SEALS: usize = 2;

/// Counters of a server.
#[derive(Debug, Default)]
pub struct ServeStats {
    /// Blocks' bytes sent.
    pub uploaded_bytes: AtomicU64,
    /// Of these, those that peers were given to read by RDMA.
    pub uploaded_by_rdma_bytes: AtomicU64,
    /// Blocks sent.
    pub uploaded_blocks: AtomicU64,
    /// Blocks being sent now.
    pub uploads_active: AtomicUsize,
    /// The most blocks that were ever being sent at once.
    pub uploads_peak: AtomicUsize,
    /// Requests declined as busy.
    pub declined_busy: AtomicU64,
}

type Logs = Mutex<HashMap<Digest, Weak<Mutex<SentLog>>>>;

/// What serves this node's blocks.
pub(super) struct Server {
    store: Store,
    hello: Arc<HelloConfig>,
    buffers: Arc<BufferPool>,
    rdma: Option<Arc<Fabric>>,
    uploads: Arc<Turns>,
    rate: Rate,
    seals: Arc<Semaphore>,
    /// By manifest. Short sections, never across an await; so too the logs themselves.
    logs: Logs,
    /// Connections per node id. Short sections.
    nodes: Mutex<HashMap<String, usize>>,
    next_connection: AtomicU64,
    started: Instant,
    pub(super) stats: ServeStats,
}

/// What a subscription is served from; none while the artifact is not here.
struct Served {
    artifact: Option<Arc<Artifact>>,
    log: Arc<Mutex<SentLog>>,
    stop: CancellationToken,
}

/// One connection, as its tasks share it.
struct Peer {
    id: ConnectionId,
    node_id: String,
    /// Whether its blocks go by RDMA.
    by_rdma: bool,
    control: mpsc::Sender<Bytes>,
    /// Short sections, never across an await.
    queue: Mutex<VecDeque<Queued>>,
    /// With `queue`: something was pushed.
    pushed: Notify,
    /// Short sections, never across an await.
    subscriptions: Mutex<HashMap<u32, Served>>,
}

impl Peer {
    /// Length of what is to be sent next; 0: nothing is.
    fn next_len(&self) -> u32 {
        let queue = self.queue.lock();
        let next = next_of(queue.iter().map(|q| q.rank));
        next.and_then(|at| queue.get(at)).map_or(0, Queued::len)
    }

    /// Takes what is to be sent next out of the queue.
    fn next(&self) -> Option<Queued> {
        let mut queue = self.queue.lock();
        let at = next_of(queue.iter().map(|q| q.rank))?;
        queue.remove(at)
    }
}

impl Server {
    pub(super) fn new(
        store: Store,
        hello: Arc<HelloConfig>,
        buffers: Arc<BufferPool>,
        rdma: Option<Arc<Fabric>>,
        max_uploads: usize,
        rate: Rate,
    ) -> Self {
        Self {
            store,
            hello,
            buffers,
            rdma,
            uploads: Arc::new(Turns::new(max_uploads)),
            rate,
            seals: Arc::new(Semaphore::new(MAX_SEALS)),
            logs: Mutex::default(),
            nodes: Mutex::default(),
            next_connection: AtomicU64::new(0),
            started: Instant::now(),
            stats: ServeStats::default(),
        }
    }

    /// How many connections are open.
    #[cfg(test)]
    pub(super) fn connected(&self) -> usize {
        self.nodes.lock().values().sum()
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    fn log(&self, manifest: Digest) -> Arc<Mutex<SentLog>> {
        let mut logs = self.logs.lock();
        logs.retain(|_, l| l.strong_count() > 0);
        if let Some(log) = logs.get(&manifest).and_then(Weak::upgrade) {
            return log;
        }
        let log = Arc::new(Mutex::new(SentLog::default()));
        logs.insert(manifest, Arc::downgrade(&log));
        log
    }

    /// Accepts and serves until `cancel`; then every connection is closed.
    pub(super) async fn run(self: Arc<Self>, listener: TcpListener, cancel: CancellationToken) {
        let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
        let mut tasks = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                () = cancel.cancelled() => break,
                _ = tasks.join_next(), if !tasks.is_empty() => continue,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, from)) => {
                    let (Ok(slot), Ok(handshake)) = (
                        connections.clone().try_acquire_owned(),
                        handshakes.clone().try_acquire_owned(),
                    ) else {
                        tracing::warn!(%from, limit = MAX_CONNECTIONS, "refused a data connection: too many are open");
                        continue;
                    };
                    let (server, stop) = (self.clone(), cancel.child_token());
                    tasks.spawn(async move {
                        let _slot = slot;
                        tokio::select! {
                            () = stop.cancelled() => {}
                            () = server.greet(stream, from, handshake) => {}
                        }
                    });
                }
                Err(error) => {
                    // Out of file descriptors or a connection that died in the queue: neither ends the port.
                    tracing::warn!(%error, "cannot accept a data connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
        tasks.shutdown().await;
    }

    async fn greet(
        self: Arc<Self>,
        stream: TcpStream,
        from: std::net::SocketAddr,
        handshake: OwnedSemaphorePermit,
    ) {
        let connection =
            match tcp::accept(stream, &self.hello, self.buffers.clone(), self.rdma.as_ref()).await {
                Ok(connection) => connection,
                Err(error) => {
                    tracing::warn!(%from, %error, "refused a data connection");
                    return;
                }
            };
        drop(handshake);
        let node_id = connection.peer.node_id.clone();
        {
            let mut nodes = self.nodes.lock();
            let count = nodes.entry(node_id.clone()).or_default();
            if *count >= MAX_CONNECTIONS_PER_NODE {
                tracing::warn!(node = %node_id, limit = MAX_CONNECTIONS_PER_NODE, "refused a data connection: this node has too many open");
                return;
            }
            *count += 1;
        }
        let counted = Counted {
            server: &self,
            node_id: &node_id,
        };
        self.clone().serve(connection).await;
        drop(counted);
    }

    async fn serve(self: Arc<Self>, connection: Connection) {
        let Connection {
            peer: info,
            transport,
            sender,
            receiver,
            ..
        } = connection;
        let (control, control_queue) = mpsc::channel(CONTROL_QUEUE);
        let peer = Arc::new(Peer {
            id: self.next_connection.fetch_add(1, Ordering::Relaxed),
            node_id: info.node_id,
            by_rdma: transport == RDMA,
            control,
            queue: Mutex::default(),
            pushed: Notify::new(),
            subscriptions: Mutex::default(),
        });
        let _leaving = Leaving(&peer);
        // Announcers end with this set.
        let mut announcers = JoinSet::new();
        let result = tokio::select! {
            result = self.read(&peer, receiver, &mut announcers) => result,
            result = self.write(&peer, sender, control_queue) => result,
        };
        if let Err(error) = result
            && error.kind() != io::ErrorKind::UnexpectedEof
        {
            tracing::debug!(node = %peer.node_id, %error, "data connection closed");
        }
    }

    async fn read(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        mut receiver: Box<dyn FrameReceiver>,
        announcers: &mut JoinSet<()>,
    ) -> io::Result<()> {
        loop {
            let Frame::Control(bytes) = receiver.receive(&NoBlocks).await? else {
                return Err(misbehaved("sent a block"));
            };
            while announcers.try_join_next().is_some() {}
            let message = pb::PeerMessage::decode(bytes).map_err(|e| misbehaved(e.to_string()))?;
            match message.body {
                Some(Body::Subscribe(subscribe)) => self.subscribe(peer, subscribe, announcers)?,
                Some(Body::Unsubscribe(u)) => peer.unsubscribe(u.subscription).await?,
                Some(Body::Request(request)) => {
                    if let Err(reason) = self.admit(peer, &request) {
                        peer.decline(request.request, reason).await?;
                    }
                }
                Some(Body::Cancel(cancel)) => {
                    let canceled = {
                        let mut queue = peer.queue.lock();
                        let at = queue.iter().position(|q| q.request == cancel.request);
                        at.and_then(|at| queue.remove(at)).is_some()
                    };
                    if canceled {
                        peer.decline(cancel.request, pb::DeclineReason::Canceled).await?;
                    }
                }
                Some(Body::FetchDigests(fetch)) => match peer.digests(&fetch) {
                    Some(digests) => {
                        let answer = pb::Digests {
                            request: fetch.request,
                            first: fetch.first,
                            digests,
                        };
                        peer.send(Body::Digests(answer)).await?;
                    }
                    None => peer.decline(fetch.request, pb::DeclineReason::NotHeld).await?,
                },
                Some(Body::Ping(ping)) => {
                    peer.send(Body::Pong(pb::Pong {
                        sequence: ping.sequence,
                    }))
                    .await?
                }
                // From a later version: it does not need an answer.
                None => {}
                Some(_) => return Err(misbehaved("sent a server's message")),
            }
        }
    }

    fn subscribe(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        subscribe: pb::Subscribe,
        announcers: &mut JoinSet<()>,
    ) -> io::Result<()> {
        let wanted = Wanted::parse(&subscribe)?;
        let log = self.log(wanted.manifest_digest);
        let stop = CancellationToken::new();
        {
            let mut subscriptions = peer.subscriptions.lock();
            if subscriptions.len() >= MAX_SUBSCRIPTIONS || subscriptions.contains_key(&subscribe.subscription)
            {
                return Err(misbehaved("subscribed too often, or twice under one number"));
            }
            let served = Served {
                artifact: None,
                log: log.clone(),
                stop: stop.clone(),
            };
            subscriptions.insert(subscribe.subscription, served);
        }
        log.lock().connect(peer.id);
        let (server, peer) = (self.clone(), peer.clone());
        announcers.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                // An error is the closed connection, which its reader sees too.
                _ = server.announce(&peer, subscribe.subscription, wanted) => {}
            }
        });
        Ok(())
    }

    /// Puts a request into the queue, or says why not.
    fn admit(&self, peer: &Peer, request: &pb::Request) -> Result<(), pb::DeclineReason> {
        let (artifact, log) = {
            let subscriptions = peer.subscriptions.lock();
            let served = subscriptions
                .get(&request.subscription)
                .ok_or(pb::DeclineReason::NotHeld)?;
            let artifact = served.artifact.clone().ok_or(pb::DeclineReason::NotHeld)?;
            (artifact, served.log.clone())
        };
        let expected = match request.expected.is_empty() {
            true => None,
            false => {
                Some(Digest::try_from(request.expected.as_ref()).map_err(|_| pb::DeclineReason::NotHeld)?)
            }
        };
        if !holds(&artifact, request.block, expected) {
            return Err(pb::DeclineReason::NotHeld);
        }
        let mut queue = peer.queue.lock();
        if queue.len() >= MAX_QUEUED_REQUESTS {
            return Err(pb::DeclineReason::Busy);
        }
        let promised = Promise::make(log, (peer.id, request.block), request.unless_sent, self.now_ms());
        let (promise, rank) = promised.ok_or(pb::DeclineReason::SentElsewhere)?;
        let (request, subscription, block) = (request.request, request.subscription, request.block);
        queue.push_back(Queued {
            rank,
            request,
            subscription,
            block,
            expected,
            artifact,
            promise,
        });
        drop(queue);
        self.uploads.improve(peer.id, rank);
        peer.pushed.notify_one();
        Ok(())
    }

    async fn write(
        self: &Arc<Self>,
        peer: &Peer,
        mut sender: Box<dyn FrameSender>,
        mut control: mpsc::Receiver<Bytes>,
    ) -> io::Result<()> {
        let mut balance: Balance = 0;
        loop {
            // What is said goes before what is sent: it is small, and others wait for it.
            while let Ok(message) = control.try_recv() {
                sender.send_control(message).await?;
            }
            let rank = peer.queue.lock().iter().map(|q| q.rank).min();
            let Some(rank) = rank else {
                tokio::select! {
                    message = control.recv() => match message {
                        Some(message) => sender.send_control(message).await?,
                        None => return Ok(()),
                    },
                    () = peer.pushed.notified() => {}
                }
                continue;
            };
            // Before a slot, which others wait for.
            let room = room(peer, &mut sender, &mut control).await?;
            let slot = match &room {
                Some(_) => self.slot(peer.id, rank, &mut sender, &mut control).await?,
                None => None,
            };
            if slot.is_some() {
                self.wait_for_rate(peer, &mut balance, &mut sender, &mut control)
                    .await?;
            }
            // Now, for a better one may have come, or this one be canceled.
            let Some(next) = peer.next() else { continue };
            match slot {
                Some(slot) => {
                    balance -= Balance::from(next.len());
                    let room = room.unwrap_or_default();
                    self.upload(peer, &mut sender, next, (slot, room)).await?;
                }
                None => {
                    let request = next.request;
                    drop(next);
                    self.busy(&mut sender, request).await?;
                }
            }
        }
    }

    async fn upload(
        self: &Arc<Self>,
        peer: &Peer,
        sender: &mut Box<dyn FrameSender>,
        next: Queued,
        (slot, room): (Turn, Room),
    ) -> io::Result<()> {
        let len = next.len();
        let Queued {
            request,
            block,
            expected,
            artifact,
            promise,
            ..
        } = next;
        let active = self.stats.uploads_active.fetch_add(1, Ordering::Relaxed) + 1;
        self.stats.uploads_peak.fetch_max(active, Ordering::Relaxed);
        let upload = Upload {
            artifact: artifact.clone(),
            block,
            expected,
            server: self.clone(),
            _slot: slot,
        };
        match sender.send_block(request, Box::new(upload), room).await? {
            Sent::Done => {
                promise.keep(self.now_ms());
                self.stats.uploaded_bytes.fetch_add(len.into(), Ordering::Relaxed);
                if peer.by_rdma {
                    let bytes = &self.stats.uploaded_by_rdma_bytes;
                    bytes.fetch_add(len.into(), Ordering::Relaxed);
                }
                self.stats.uploaded_blocks.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
            // A larger block than the one which was next when room was made: rare, and asked for again.
            Sent::NoRoom => {
                drop(promise);
                self.busy(sender, request).await
            }
            Sent::Unreadable(error) => {
                drop(promise);
                let reason = match holds(&artifact, block, expected) {
                    true => {
                        tracing::warn!(model = %artifact.model(), block, %error, "a verified block cannot be read");
                        pb::DeclineReason::Unreadable
                    }
                    false => pb::DeclineReason::NotHeld,
                };
                sender.send_control(decline(request, reason)).await
            }
        }
    }

    /// Tells the peer what is here of an artifact and what gets verified, for as long as it is subscribed.
    async fn announce(&self, peer: &Peer, subscription: u32, wanted: Wanted) -> io::Result<()> {
        let mut changed = self.store.changed();
        loop {
            changed.borrow_and_update();
            let found = self.store.find(&wanted.model).filter(|a| wanted.matches(a));
            peer.serve_from(subscription, found.clone());
            if let Some(artifact) = found {
                peer.announce_artifact(subscription, &artifact, &self.seals)
                    .await?;
                peer.serve_from(subscription, None);
            } else {
                peer.status(subscription, pb::HoldingState::Unknown, None).await?;
                if changed.changed().await.is_err() {
                    return Ok(());
                }
            }
        }
    }
}

/// Undoes the count of a node's connections.
struct Counted<'a> {
    server: &'a Server,
    node_id: &'a str,
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        let mut nodes = self.server.nodes.lock();
        if let Some(count) = nodes.get_mut(self.node_id) {
            *count -= 1;
            if *count == 0 {
                nodes.remove(self.node_id);
            }
        }
    }
}

/// A connection that ends, however it ends, is struck from the logs.
struct Leaving<'a>(&'a Peer);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        for served in self.0.subscriptions.lock().values() {
            served.log.lock().disconnect(self.0.id);
        }
        // What waited will not go out: said now, not when the last task lets go of the connection.
        let waited = std::mem::take(&mut *self.0.queue.lock());
        drop(waited);
    }
}

/// What a subscription is about.
struct Wanted {
    model: ModelRef,
    manifest_digest: Digest,
    block_size: u32,
    algorithm: Algorithm,
}

impl Wanted {
    fn parse(s: &pb::Subscribe) -> io::Result<Self> {
        let algorithm = DigestAlgorithm::try_from(s.algorithm as i32)
            .ok()
            .and_then(|a| a.try_into().ok());
        Ok(Self {
            model: ModelRef {
                model_id: s.model_id.clone(),
                revision: s.revision.clone(),
                format: s.format.clone(),
                provider: s.provider.clone(),
            },
            manifest_digest: Digest::try_from(s.manifest_digest.as_ref())
                .map_err(|e| misbehaved(e.to_string()))?,
            block_size: s.block_size_bytes,
            algorithm: algorithm.ok_or_else(|| misbehaved("named an unknown digest algorithm"))?,
        })
    }

    fn matches(&self, artifact: &Artifact) -> bool {
        artifact.manifest_digest() == self.manifest_digest
            && artifact.blocks().block_size() == self.block_size
            && artifact.algorithm() == self.algorithm
    }
}

fn misbehaved(what: impl Into<String>) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("the peer broke the protocol: it {}", what.into()),
    )
}

fn encode(body: Body) -> Bytes {
    pb::PeerMessage { body: Some(body) }.encode_to_vec().into()
}

fn decline(request: u64, reason: pb::DeclineReason) -> Bytes {
    encode(Body::Declined(pb::Declined {
        request,
        reason: reason.into(),
    }))
}
