//! The puller's end of a data connection, shared by every fetch that wants something of that peer.
//!
//! A fetch subscribes and from then on gets events; it requests blocks, each of which is answered exactly
//! once (the budget's permit for the block's bytes travels with the request, so that what may arrive is
//! always paid for). The connection closes when the last fetch lets go of its `Arc`.
//!
//! Where a peer is quicker than one connection is ([`lanes`]), further connections to it carry blocks and nothing else:
//! what the peer says of itself counts on the first one only.

mod dial;
mod hear;
pub(super) mod lanes;

pub(super) use self::{dial::Links, hear::parse_digests};
use self::{
    hear::hear,
    lanes::{FIRST, LaneId, Lanes},
};
use super::{chooser::Decline, words::PeerIndex};
use crate::{
    store::Artifact,
    transport::{Connection, FrameSender, PING_INTERVAL, buffer::BlockBuffer},
};
use mooncake_proto::{digest::Digest, pb::peer as pb};
use parking_lot::Mutex;
use pb::peer_message::Body;
use prost::{Message, bytes::Bytes};
use std::{collections::HashMap, io, sync::Arc};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::sync::{CancellationToken, DropGuard};

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
enum What {
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

/// An answer that is due, and on which lane.
#[derive(Debug)]
struct Due {
    subscription: u32,
    lane: LaneId,
    what: What,
}

#[derive(Debug)]
struct Subscription {
    peer: PeerIndex,
    blocks: u32,
    events: mpsc::Sender<Event>,
    /// For lanes to come.
    subscribe: Bytes,
    /// How many lanes its blocks may come over.
    width: usize,
}

#[derive(Debug)]
struct State {
    next_request: u64,
    next_subscription: u32,
    subscriptions: HashMap<u32, Subscription>,
    due: HashMap<u64, Due>,
    lanes: Lanes,
    /// Set once, with the reason; nothing is sent or noted afterwards.
    dead: Option<String>,
}

#[derive(Debug)]
struct Shared {
    node_id: String,
    /// As [`crate::transport::Transport::name`].
    transport: &'static str,
    /// Short sections, never across an await.
    state: Mutex<State>,
}

/// What connects this node to one peer.
#[derive(Debug)]
pub(super) struct Link {
    shared: Arc<Shared>,
    stop: CancellationToken,
    _stop: DropGuard,
}

/// The link was closed; the subscription hears of it by [`Event::Down`].
#[derive(Debug)]
pub(super) struct Closed;

impl Link {
    /// `most`: of lanes.
    fn start(connection: Connection, most: usize, slot: OwnedSemaphorePermit) -> Arc<Self> {
        let (outgoing, queue) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            node_id: connection.peer.node_id.clone(),
            transport: connection.transport,
            state: Mutex::new(State {
                next_request: 0,
                next_subscription: 0,
                subscriptions: HashMap::new(),
                due: HashMap::new(),
                lanes: Lanes::new(outgoing, most),
                dead: None,
            }),
        });
        let stop = CancellationToken::new();
        // With the first lane the link ends, and with it the others.
        run(shared.clone(), FIRST, connection, queue, slot, stop.clone());
        Arc::new(Self {
            shared,
            _stop: stop.clone().drop_guard(),
            stop,
        })
    }

    /// One more lane, which was claimed.
    fn widen(&self, connection: Connection, slot: OwnedSemaphorePermit) {
        let (outgoing, queue) = mpsc::unbounded_channel();
        let lane = {
            let mut state = self.shared.state.lock();
            for subscription in state.subscriptions.values() {
                let _ = outgoing.send(subscription.subscribe.clone());
            }
            state.lanes.open(outgoing)
        };
        run(
            self.shared.clone(),
            lane,
            connection,
            queue,
            slot,
            self.stop.child_token(),
        );
    }

    /// From now on the blocks of a subscription may come over so many lanes. Whether one more is to be dialled for that
    /// by [`Links::widen`].
    pub(super) fn set_width(&self, subscription: u32, width: usize) -> bool {
        let mut state = self.shared.state.lock();
        if state.dead.is_some() {
            return false;
        }
        match state.subscriptions.get_mut(&subscription) {
            Some(subscription) => subscription.width = width,
            None => return false,
        }
        state.lanes.claim(width)
    }

    /// What each lane owes, and whether it answers for this subscription.
    #[cfg(test)]
    pub(super) fn owing(&self, subscription: u32) -> Vec<(usize, bool)> {
        self.shared.state.lock().lanes.owing(subscription)
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

    /// Subscribes to an artifact; events carry `peer`.
    pub(super) fn subscribe(
        &self,
        artifact: &Artifact,
        peer: PeerIndex,
        events: mpsc::Sender<Event>,
    ) -> Result<u32, Closed> {
        let mut state = self.shared.state.lock();
        if state.dead.is_some() {
            return Err(Closed);
        }
        state.next_subscription += 1;
        let subscription = state.next_subscription;
        let model = artifact.model();
        let subscribe = encode(Body::Subscribe(pb::Subscribe {
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
        state.lanes.say_to_all(&subscribe);
        let entry = Subscription {
            peer,
            blocks: artifact.blocks().len(),
            events,
            subscribe,
            width: 1,
        };
        state.subscriptions.insert(subscription, entry);
        Ok(subscription)
    }

    /// No more events. Blocks that are due still arrive and are dropped.
    pub(super) fn unsubscribe(&self, subscription: u32) {
        let mut state = self.shared.state.lock();
        state.subscriptions.remove(&subscription);
        let message = encode(Body::Unsubscribe(pb::Unsubscribe { subscription }));
        state.lanes.say_to_all(&message);
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
        let mut state = self.shared.state.lock();
        let width = state.subscriptions.get(&subscription).map_or(1, |s| s.width);
        let lane = state.lanes.pick(subscription, width);
        let request = state.note(subscription, lane, What::Block { block, len, permit })?;
        let message = Body::Request(pb::Request {
            request,
            subscription,
            block,
            unless_sent,
            expected: expected.as_bytes().to_vec().into(),
        });
        state.lanes.say(lane, encode(message));
        Ok(request)
    }

    /// Asks for `count` digests from `first` on.
    pub(super) fn fetch_digests(&self, subscription: u32, first: u32, count: u32) -> Result<(), Closed> {
        let mut state = self.shared.state.lock();
        let request = state.note(subscription, FIRST, What::Digests { first, count })?;
        let message = Body::FetchDigests(pb::FetchDigests {
            request,
            subscription,
            first,
            count,
        });
        state.lanes.say(FIRST, encode(message));
        Ok(())
    }

    /// A request is not wanted any more. It is answered all the same.
    pub(super) fn cancel(&self, request: u64) {
        let state = self.shared.state.lock();
        if let Some(due) = state.due.get(&request) {
            state
                .lanes
                .say(due.lane, encode(Body::Cancel(pb::Cancel { request })));
        }
    }
}

impl State {
    fn note(&mut self, subscription: u32, lane: LaneId, what: What) -> Result<u64, Closed> {
        if self.dead.is_some() {
            return Err(Closed);
        }
        self.next_request += 1;
        let due = Due {
            subscription,
            lane,
            what,
        };
        self.due.insert(self.next_request, due);
        Ok(self.next_request)
    }

    /// What is due under this id on this lane.
    fn take_due(&mut self, id: u64, lane: LaneId) -> Option<Due> {
        self.due.get(&id).filter(|due| due.lane == lane)?;
        let due = self.due.remove(&id)?;
        if let What::Block { .. } = due.what {
            self.lanes.answered(lane);
        }
        Some(due)
    }
}

fn encode(body: Body) -> Bytes {
    pb::PeerMessage { body: Some(body) }.encode_to_vec().into()
}

/// Works on one lane, in two tasks, until it ends or `stop`, which is canceled when it ends.
fn run(
    shared: Arc<Shared>,
    lane: LaneId,
    connection: Connection,
    queue: mpsc::UnboundedReceiver<Bytes>,
    slot: OwnedSemaphorePermit,
    stop: CancellationToken,
) {
    let Connection { sender, receiver, .. } = connection;
    let (writing, ended) = (shared.clone(), stop.clone());
    tokio::spawn(async move {
        let why = tokio::select! {
            () = ended.cancelled() => return,
            result = write(sender, queue) => result,
        };
        let why = why.err().map_or_else(|| "closed".into(), |e| e.to_string());
        writing.ended(lane, why).await;
        ended.cancel();
    });
    tokio::spawn(async move {
        let _slot = slot;
        let why = tokio::select! {
            () = stop.cancelled() => "closed".to_owned(),
            error = hear(&shared, lane, receiver) => error.to_string(),
        };
        shared.ended(lane, why).await;
        stop.cancel();
    });
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
