//! The puller's end of a data connection, shared by every fetch that wants something of that peer.
//!
//! A fetch subscribes and from then on gets events; it requests blocks, each of which is answered exactly
//! once (the budget's permit for the block's bytes travels with the request, so that what may arrive is
//! always paid for). The connection closes when the last fetch lets go of its `Arc`.

use super::{chooser::Decline, words::PeerIndex};
use crate::{
    store::Artifact,
    transport::{
        BlockGate, ConnectError, Connection, Frame, FrameReceiver, FrameSender, PING_INTERVAL, PeerAddress,
        RDMA, Transport,
        buffer::{BlockBuffer, BufferPool},
        rdma::Fabric,
    },
};
use mooncake_proto::{digest::Digest, pb::peer as pb};
use parking_lot::Mutex;
use pb::peer_message::Body;
use prost::{Message, bytes::Bytes};
use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Most connections that this node dials, to all peers: one per peer of each fetch, shared by fetches.
const MAX_LINKS: usize = 1024;
/// Most digests in one frame.
pub(super) const DIGESTS_PER_FRAME: u32 = 4096;

/// What a fetch hears of its peers.
#[derive(Debug)]
pub(super) enum Event {
    /// The peer holds it in this state; `whole` with the root over its own list.
    Status {
        peer: PeerIndex,
        known: bool,
        own_root: Option<Digest>,
    },
    /// The peer verified these blocks.
    Have {
        peer: PeerIndex,
        blocks: Vec<(u32, Digest)>,
    },
    /// A requested block.
    Block {
        peer: PeerIndex,
        block: u32,
        bytes: BlockBuffer,
        /// The name of the connection's transport.
        by: &'static str,
        permit: OwnedSemaphorePermit,
    },
    /// A request that brought no block.
    Declined {
        peer: PeerIndex,
        block: u32,
        why: Decline,
    },
    /// Part of the peer's digest list; `None`: it cannot give it.
    Digests {
        peer: PeerIndex,
        first: u32,
        digests: Option<Vec<Digest>>,
    },
    /// The connection is gone. Nothing more comes from this peer.
    Down { peer: PeerIndex, why: String },
}

#[derive(Debug)]
enum Due {
    Block {
        block: u32,
        len: u32,
        permit: OwnedSemaphorePermit,
    },
    Digests {
        first: u32,
        count: u32,
    },
}

#[derive(Debug)]
struct Subscription {
    peer: PeerIndex,
    blocks: u32,
    events: mpsc::Sender<Event>,
}

#[derive(Debug, Default)]
struct State {
    next_request: u64,
    next_subscription: u32,
    subscriptions: HashMap<u32, Subscription>,
    /// Answers that are due: (subscription, what).
    due: HashMap<u64, (u32, Due)>,
    /// Set once, with the reason; nothing is sent or noted afterwards.
    dead: Option<String>,
}

/// Blocks' bytes that came from peers, by transport.
#[derive(Debug, Default)]
pub struct Received {
    /// Over TCP.
    pub tcp_bytes: AtomicU64,
    /// By RDMA.
    pub rdma_bytes: AtomicU64,
}

impl Received {
    fn add(&self, transport: &str, bytes: usize) {
        let counter = if transport == RDMA {
            &self.rdma_bytes
        } else {
            &self.tcp_bytes
        };
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

#[derive(Debug)]
struct Shared {
    node_id: String,
    transport: &'static str,
    received: Arc<Received>,
    /// Short sections, never across an await.
    state: Mutex<State>,
}

impl BlockGate for Shared {
    fn due(&self, id: u64) -> Option<u32> {
        match self.state.lock().due.get(&id) {
            Some((_, Due::Block { len, .. })) => Some(*len),
            _ => None,
        }
    }
}

/// One connection to one peer.
#[derive(Debug)]
pub(super) struct Link {
    shared: Arc<Shared>,
    /// Its length is bounded by what is open: each request for a block (a permit of the budget each) and its one cancel,
    /// each part of the one digest list that a fetch reads at a time, a subscription and its end for each time that a
    /// fetch dials, which backs off. A peer that takes nothing ends the link (`NO_PROGRESS_TIMEOUT`), and the queue.
    outgoing: mpsc::UnboundedSender<Bytes>,
    /// If it does not go by the best transport of both ends: from when on another connection may.
    better_from: Option<Instant>,
    stop: CancellationToken,
    _stop: DropGuard,
}

/// The link was closed; the subscription hears of it by [`Event::Down`].
#[derive(Debug)]
pub(super) struct Closed;

impl Link {
    fn start(connection: Connection, slot: OwnedSemaphorePermit, received: Arc<Received>) -> Arc<Self> {
        let better_from = connection.better_from;
        let shared = Arc::new(Shared {
            node_id: connection.peer.node_id.clone(),
            transport: connection.transport,
            received,
            state: Mutex::default(),
        });
        // The bound is that of what is open: see the field.
        let (outgoing, queue) = mpsc::unbounded_channel();
        let stop = CancellationToken::new();
        let ended = stop.child_token();
        let Connection { sender, receiver, .. } = connection;
        let (reader, writer) = (shared.clone(), shared.clone());
        let write_ended = ended.clone();
        tokio::spawn(async move {
            let why = tokio::select! {
                () = write_ended.cancelled() => return,
                result = write(sender, queue) => result,
            };
            writer
                .fail(why.err().map_or_else(|| "closed".into(), |e| e.to_string()))
                .await;
            write_ended.cancel();
        });
        tokio::spawn(async move {
            let _slot = slot;
            let why = tokio::select! {
                () = ended.cancelled() => "closed".to_owned(),
                error = read(&reader, receiver) => error.to_string(),
            };
            reader.fail(why).await;
            ended.cancel();
        });
        Arc::new(Self {
            shared,
            better_from,
            outgoing,
            _stop: stop.clone().drop_guard(),
            stop,
        })
    }

    fn alive(&self) -> bool {
        self.shared.state.lock().dead.is_none()
    }

    /// Closes a link whose peer answers no requests any more, for every fetch that shares it: from now on nobody gets
    /// it, and what its answers would have taken of the budget is free. The other fetches hear [`Event::Down`].
    pub(super) fn abandon(&self, why: &str) {
        let due = {
            let mut state = self.shared.state.lock();
            state.dead.get_or_insert_with(|| why.to_owned());
            std::mem::take(&mut state.due)
        };
        drop(due);
        // The reader ends, and tells the subscribers.
        self.stop.cancel();
    }

    fn send(&self, body: Body) {
        // A closed queue means that the link is dead, which the subscribers hear of.
        let _ = self.outgoing.send(encode(body));
    }

    /// Subscribes to an artifact; events carry `peer`.
    pub(super) fn subscribe(
        &self,
        artifact: &Artifact,
        peer: PeerIndex,
        events: mpsc::Sender<Event>,
    ) -> Result<u32, Closed> {
        let subscription = {
            let mut state = self.shared.state.lock();
            if state.dead.is_some() {
                return Err(Closed);
            }
            state.next_subscription += 1;
            let id = state.next_subscription;
            state.subscriptions.insert(
                id,
                Subscription {
                    peer,
                    blocks: artifact.blocks().len(),
                    events,
                },
            );
            id
        };
        let model = artifact.model();
        self.send(Body::Subscribe(pb::Subscribe {
            subscription,
            model_id: model.model_id.clone(),
            revision: model.revision.clone(),
            format: model.format.clone(),
            provider: model.provider.clone(),
            generation: artifact.generation(),
            manifest_digest: artifact.manifest_digest().as_bytes().to_vec().into(),
            block_size_bytes: artifact.blocks().block_size(),
            algorithm: mooncake_proto::pb::session::DigestAlgorithm::from(artifact.algorithm()) as u32,
        }));
        Ok(subscription)
    }

    /// No more events. Blocks that are due still arrive and are dropped.
    pub(super) fn unsubscribe(&self, subscription: u32) {
        self.shared.state.lock().subscriptions.remove(&subscription);
        self.send(Body::Unsubscribe(pb::Unsubscribe { subscription }));
    }

    /// Asks for a block of `len` bytes that was announced as `expected`; gives the request's id.
    pub(super) fn request(
        &self,
        subscription: u32,
        (block, expected): (u32, &Digest),
        len: u32,
        unless_sent: bool,
        permit: OwnedSemaphorePermit,
    ) -> Result<u64, Closed> {
        let request = self.note(subscription, Due::Block { block, len, permit })?;
        self.send(Body::Request(pb::Request {
            request,
            subscription,
            block,
            unless_sent,
            expected: expected.as_bytes().to_vec().into(),
        }));
        Ok(request)
    }

    /// Asks for `count` digests from `first` on.
    pub(super) fn fetch_digests(&self, subscription: u32, first: u32, count: u32) -> Result<(), Closed> {
        let request = self.note(subscription, Due::Digests { first, count })?;
        self.send(Body::FetchDigests(pb::FetchDigests {
            request,
            subscription,
            first,
            count,
        }));
        Ok(())
    }

    fn note(&self, subscription: u32, due: Due) -> Result<u64, Closed> {
        let mut state = self.shared.state.lock();
        if state.dead.is_some() {
            return Err(Closed);
        }
        state.next_request += 1;
        let request = state.next_request;
        state.due.insert(request, (subscription, due));
        Ok(request)
    }

    /// A request is not wanted any more. It is answered all the same.
    pub(super) fn cancel(&self, request: u64) {
        self.send(Body::Cancel(pb::Cancel { request }));
    }
}

fn encode(body: Body) -> Bytes {
    pb::PeerMessage { body: Some(body) }.encode_to_vec().into()
}

async fn write(
    mut sender: Box<dyn FrameSender>,
    mut queue: mpsc::UnboundedReceiver<Bytes>,
) -> io::Result<()> {
    let mut ping = tokio::time::interval(PING_INTERVAL);
    ping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut sequence = 0;
    loop {
        tokio::select! {
            message = queue.recv() => match message {
                Some(message) => sender.send_control(message).await?,
                None => return Ok(()),
            },
            _ = ping.tick() => {
                sequence += 1;
                sender.send_control(encode(Body::Ping(pb::Ping { sequence }))).await?;
            }
        }
    }
}

/// Reads until the connection or the peer's manners fail.
async fn read(shared: &Shared, mut receiver: Box<dyn FrameReceiver>) -> io::Error {
    loop {
        let handled = match receiver.receive(shared).await {
            Ok(Frame::Block { id, bytes }) => {
                shared.received.add(shared.transport, bytes.len());
                shared.block(id, bytes).await
            }
            Ok(Frame::Control(bytes)) => match pb::PeerMessage::decode(bytes) {
                Ok(message) => shared.control(message).await,
                Err(e) => Err(misbehaved(format!("sent a message that cannot be read: {e}"))),
            },
            Err(e) => Err(e),
        };
        if let Err(e) = handled {
            return e;
        }
    }
}

fn misbehaved(what: impl std::fmt::Display) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("the peer broke the protocol: it {what}"),
    )
}

/// A list of 32-byte digests.
pub(super) fn parse_digests(bytes: &[u8]) -> io::Result<Vec<Digest>> {
    if !bytes.len().is_multiple_of(32) {
        return Err(misbehaved(format!("sent {} bytes of digests", bytes.len())));
    }
    Ok(bytes
        .chunks_exact(32)
        .map(|c| Digest::try_from(c).expect("32 bytes"))
        .collect())
}

impl Shared {
    async fn block(&self, id: u64, bytes: BlockBuffer) -> io::Result<()> {
        let to = {
            let mut state = self.state.lock();
            let Some((subscription, Due::Block { block, permit, .. })) = state.due.remove(&id) else {
                return Err(misbehaved(format!("answered request {id}, which is not open")));
            };
            // A fetch that ended does not want it any more.
            state
                .subscriptions
                .get(&subscription)
                .map(|s| (s.events.clone(), s.peer, block, permit))
        };
        if let Some((events, peer, block, permit)) = to {
            let _ = events
                .send(Event::Block {
                    peer,
                    block,
                    bytes,
                    by: self.transport,
                    permit,
                })
                .await;
        }
        Ok(())
    }

    /// The subscription, unless it ended: then what comes for it is dropped.
    fn subscriber(&self, subscription: u32) -> Option<(mpsc::Sender<Event>, PeerIndex, u32)> {
        self.state
            .lock()
            .subscriptions
            .get(&subscription)
            .map(|s| (s.events.clone(), s.peer, s.blocks))
    }

    async fn control(&self, message: pb::PeerMessage) -> io::Result<()> {
        let (events, event) = match message.body {
            Some(Body::Status(status)) => {
                let Some((events, peer, _)) = self.subscriber(status.subscription) else {
                    return Ok(());
                };
                let known = matches!(
                    status.state(),
                    pb::HoldingState::Partial | pb::HoldingState::Whole
                );
                let own_root = Digest::try_from(status.own_root.as_ref()).ok();
                (
                    events,
                    Event::Status {
                        peer,
                        known,
                        own_root,
                    },
                )
            }
            Some(Body::Have(have)) => {
                let Some((events, peer, blocks)) = self.subscriber(have.subscription) else {
                    return Ok(());
                };
                let mut list = Vec::new();
                for run in have.runs {
                    let digests = parse_digests(&run.digests)?;
                    if u64::from(run.first) + digests.len() as u64 > u64::from(blocks) {
                        return Err(misbehaved(format!(
                            "announced a block past the last one ({blocks} blocks)"
                        )));
                    }
                    list.extend((run.first..).zip(digests));
                }
                (events, Event::Have { peer, blocks: list })
            }
            Some(Body::Declined(declined)) => {
                let due = self.state.lock().due.remove(&declined.request);
                let Some((subscription, due)) = due else {
                    return Err(misbehaved(format!(
                        "declined request {}, which is not open",
                        declined.request
                    )));
                };
                let Some((events, peer, _)) = self.subscriber(subscription) else {
                    return Ok(());
                };
                match due {
                    Due::Digests { first, .. } => (
                        events,
                        Event::Digests {
                            peer,
                            first,
                            digests: None,
                        },
                    ),
                    Due::Block { block, .. } => {
                        let why = match declined.reason() {
                            pb::DeclineReason::Busy => Decline::Busy,
                            pb::DeclineReason::SentElsewhere => Decline::SentElsewhere,
                            pb::DeclineReason::Canceled => Decline::Canceled,
                            pb::DeclineReason::NotHeld
                            | pb::DeclineReason::Unreadable
                            | pb::DeclineReason::Unspecified => Decline::NotHeld,
                        };
                        (events, Event::Declined { peer, block, why })
                    }
                }
            }
            Some(Body::Digests(answer)) => {
                let due = self.state.lock().due.remove(&answer.request);
                let Some((subscription, Due::Digests { first, count })) = due else {
                    return Err(misbehaved(format!(
                        "answered request {}, which is not open",
                        answer.request
                    )));
                };
                let digests = parse_digests(&answer.digests)?;
                if answer.first != first || digests.len() != count as usize {
                    return Err(misbehaved("sent other digests than were asked for"));
                }
                let Some((events, peer, _)) = self.subscriber(subscription) else {
                    return Ok(());
                };
                (
                    events,
                    Event::Digests {
                        peer,
                        first,
                        digests: Some(digests),
                    },
                )
            }
            Some(Body::Pong(_)) => return Ok(()),
            // What a later version says beside its answers is not for this one.
            None => return Ok(()),
            Some(other) => return Err(misbehaved(format!("sent a puller's message: {other:?}"))),
        };
        let _ = events.send(event).await;
        Ok(())
    }

    async fn fail(&self, mut why: String) {
        let (subscriptions, _due) = {
            let mut state = self.state.lock();
            // Unless it was given one when it was abandoned.
            why = state.dead.get_or_insert(why).clone();
            (
                std::mem::take(&mut state.subscriptions),
                std::mem::take(&mut state.due),
            )
        };
        if !subscriptions.is_empty() {
            tracing::debug!(node = %self.node_id, %why, "data connection closed");
        }
        for s in subscriptions.into_values() {
            let _ = s
                .events
                .send(Event::Down {
                    peer: s.peer,
                    why: why.clone(),
                })
                .await;
        }
    }
}

type Slot = Arc<tokio::sync::Mutex<Weak<Link>>>;

/// The open links of this node.
pub(super) struct Links {
    /// Preferred first; the last one (TCP) always works.
    transports: Vec<Arc<dyn Transport>>,
    rdma: Option<Arc<Fabric>>,
    buffers: Arc<BufferPool>,
    /// By node id and address. The outer lock is held for the look-up only, a slot's lock across a dial, so
    /// that fetches that want the same peer share it.
    slots: Mutex<HashMap<(String, String), Slot>>,
    open: Arc<Semaphore>,
    received: Arc<Received>,
}

impl Links {
    pub(super) fn new(
        transports: Vec<Arc<dyn Transport>>,
        rdma: Option<Arc<Fabric>>,
        buffers: Arc<BufferPool>,
    ) -> Self {
        Self {
            transports,
            rdma,
            buffers,
            slots: Mutex::default(),
            open: Arc::new(Semaphore::new(MAX_LINKS)),
            received: Arc::default(),
        }
    }

    pub(super) fn received(&self) -> &Received {
        &self.received
    }

    /// Whether a new connection may be a better one than this link's: one by RDMA, if this node can now.
    pub(super) fn may_be_better(&self, link: &Link) -> bool {
        let outdated = link.better_from.is_some_and(|from| from <= Instant::now());
        outdated && self.rdma.as_ref().is_some_and(|rdma| rdma.is_usable())
    }

    /// The link to a peer, dialled if there is none.
    pub(super) async fn get(&self, peer: &PeerAddress) -> Result<Arc<Link>, ConnectError> {
        let slot = {
            let mut slots = self.slots.lock();
            // Forget slots that nobody uses, so that the map does not grow with every peer ever seen.
            slots.retain(|_, s| Arc::strong_count(s) > 1 || s.try_lock().is_ok_and(|l| l.strong_count() > 0));
            slots
                .entry((peer.node_id.clone(), peer.data_address.clone()))
                .or_default()
                .clone()
        };
        let mut slot = slot.lock().await;
        let usable = |link: &Arc<Link>| link.alive() && !self.may_be_better(link);
        if let Some(link) = slot.upgrade().filter(usable) {
            return Ok(link);
        }
        let permit = self
            .open
            .clone()
            .try_acquire_owned()
            .map_err(|_| ConnectError::TooMany { limit: MAX_LINKS })?;
        let link = Link::start(self.dial(peer).await?, permit, self.received.clone());
        *slot = Arc::downgrade(&link);
        Ok(link)
    }

    async fn dial(&self, peer: &PeerAddress) -> Result<Connection, ConnectError> {
        let (last, preferred) = self.transports.split_last().expect("TCP is always there");
        for transport in preferred {
            if !peer.transports.iter().any(|t| t == transport.name()) {
                continue;
            }
            match transport.connect(peer, self.buffers.clone()).await {
                Ok(connection) => return Ok(connection),
                Err(error) => tracing::warn!(
                    node = %peer.node_id, transport = transport.name(), %error,
                    "falling back to {}", last.name()
                ),
            }
        }
        last.connect(peer, self.buffers.clone()).await
    }
}
