//! The puller's end of the connections to one peer, shared by every fetch that wants something of that peer.
//!
//! A fetch subscribes and from then on gets events; it requests blocks, each of which is answered exactly
//! once (the budget's permit for the block's bytes travels with the request, so that what may arrive is
//! always paid for). The link ends when the last fetch lets go of its `Arc`.
//!
//! A link is one connection; where a peer is quicker than one is ([`lanes`]), further ones carry blocks and nothing else:
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
use std::{
    collections::{HashMap, HashSet},
    io,
    sync::{Arc, OnceLock},
    time::Instant,
};
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
    /// Blocks that a further lane had not: the first one is asked, whose word counts.
    doubted: HashSet<u32>,
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
    /// Of the process at the other end.
    instance_id: String,
    /// As [`crate::transport::Transport::name`].
    transport: &'static str,
    /// Ends every lane.
    stop: CancellationToken,
    /// Short sections, never across an await.
    state: Mutex<State>,
}

/// What connects this node to one peer.
#[derive(Debug)]
pub(super) struct Link {
    shared: Arc<Shared>,
    _stop: DropGuard,
}

/// The right to open one more lane of a link. Dropped unused, there is none for a while.
#[derive(Debug)]
pub(super) struct Claim {
    shared: Arc<Shared>,
    used: bool,
}

impl Claim {
    /// Whether the link is up and this leads to the same process.
    fn fits(&self, connection: &Connection) -> bool {
        connection.peer.instance_id == self.shared.instance_id
    }

    fn open(mut self, connection: Connection, slot: OwnedSemaphorePermit) {
        let (outgoing, queue) = mpsc::unbounded_channel();
        let lane = {
            let mut state = self.shared.state.lock();
            if state.dead.is_some() {
                return;
            }
            for subscription in state.subscriptions.values() {
                let _ = outgoing.send(subscription.subscribe.clone());
            }
            state.lanes.open(outgoing)
        };
        self.used = true;
        let stop = self.shared.stop.child_token();
        run(self.shared.clone(), lane, connection, queue, slot, stop);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.used {
            self.shared.state.lock().lanes.give_up(Instant::now());
        }
    }
}

/// The link was closed; the subscription hears of it by [`Event::Down`].
#[derive(Debug)]
pub(super) struct Closed;

impl Link {
    /// `most`: of lanes.
    fn start(connection: Connection, most: usize, slot: OwnedSemaphorePermit) -> Arc<Self> {
        let (outgoing, queue) = mpsc::unbounded_channel();
        let stop = CancellationToken::new();
        let shared = Arc::new(Shared {
            node_id: connection.peer.node_id.clone(),
            instance_id: connection.peer.instance_id.clone(),
            transport: connection.transport,
            stop: stop.clone(),
            state: Mutex::new(State {
                next_request: 0,
                next_subscription: 0,
                subscriptions: HashMap::new(),
                due: HashMap::new(),
                lanes: Lanes::new(outgoing, most),
                dead: None,
            }),
        });
        // With the first lane the link ends, and with it the others.
        run(shared.clone(), FIRST, connection, queue, slot, stop.clone());
        Arc::new(Self {
            shared,
            _stop: stop.drop_guard(),
        })
    }

    /// From now on the blocks of a subscription may come over so many lanes. Gives the right to one more lane if that
    /// takes one, for [`Links::widen`].
    pub(super) fn set_width(&self, subscription: u32, width: usize) -> Option<Claim> {
        let mut state = self.shared.state.lock();
        if state.dead.is_some() {
            return None;
        }
        state.subscriptions.get_mut(&subscription)?.width = width;
        let claimed = state.lanes.claim(width, Instant::now());
        claimed.then(|| Claim {
            shared: self.shared.clone(),
            used: false,
        })
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
        self.shared.stop.cancel();
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
        let mut subscribe = pb::Subscribe {
            subscription,
            model_id: model.model_id.clone(),
            revision: model.revision.clone(),
            format: model.format.clone(),
            provider: model.provider.clone(),
            generation: artifact.generation(),
            manifest_digest: artifact.manifest_digest().as_bytes().to_vec().into(),
            block_size_bytes: artifact.blocks().block_size(),
            algorithm: mooncake_proto::pb::session::DigestAlgorithm::from(artifact.algorithm()) as u32,
            blocks_only: false,
        };
        state.lanes.say(FIRST, encode(Body::Subscribe(subscribe.clone())));
        subscribe.blocks_only = true;
        let subscribe = encode(Body::Subscribe(subscribe));
        state.lanes.say_further(&subscribe);
        let entry = Subscription {
            peer,
            blocks: artifact.blocks().len(),
            events,
            subscribe,
            width: 1,
            doubted: HashSet::new(),
        };
        state.subscriptions.insert(subscription, entry);
        Ok(subscription)
    }

    /// No more events. Blocks that are due still arrive and are dropped.
    pub(super) fn unsubscribe(&self, subscription: u32) {
        let mut state = self.shared.state.lock();
        state.subscriptions.remove(&subscription);
        state.lanes.forget(subscription);
        let message = encode(Body::Unsubscribe(pb::Unsubscribe { subscription }));
        state.lanes.say_further(&message);
        state.lanes.say(FIRST, message);
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
        let width = match state.subscriptions.get_mut(&subscription) {
            Some(s) => match s.doubted.remove(&block) {
                true => 1,
                false => s.width,
            },
            None => 1,
        };
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
    let unwritable = Arc::new(OnceLock::new());
    let (ended, why) = (stop.clone(), unwritable.clone());
    tokio::spawn(async move {
        let result = tokio::select! {
            () = ended.cancelled() => return,
            result = write(sender, queue) => result,
        };
        if let Err(e) = result {
            let _ = why.set(e.to_string());
        }
        // The end is told by the reader alone, once it has handed over what it took.
        ended.cancel();
    });
    tokio::spawn(async move {
        let _slot = slot;
        let error = hear(&shared, lane, receiver, &stop).await;
        // Before anybody is told: what comes on the other lanes of a link that ended is not due any more.
        stop.cancel();
        let broke = error
            .as_ref()
            .is_some_and(|e| e.kind() == io::ErrorKind::InvalidData);
        let why = match (error, unwritable.get()) {
            (Some(error), _) => error.to_string(),
            (None, Some(why)) => why.clone(),
            (None, None) => "closed".to_owned(),
        };
        match lane {
            FIRST => shared.fail(why).await,
            _ => shared.ended(lane, why, broke).await,
        }
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
