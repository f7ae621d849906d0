//! The events, and what the nodes do about them.

mod graph;
mod pulling;
mod serving;

use super::{
    Report, Scenario,
    agenda::Agenda,
    network::{CREDIT_SEGMENTS, Network},
    node_hash,
};
use crate::swarm::{
    bits::Bits,
    chooser::{Chooser, Decline},
    sent::SentLog,
    slots::{Rank, UploadSlots, next_of},
};
use mooncake_proto::mesh::Mesh;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// How often a fetch looks for stalls.
const TICK_NS: u64 = 50_000_000;
/// First penalty of a peer that sent bad bytes; quadruples each time.
const PENALTY_NS: u64 = 30_000_000_000;
/// Pause before a peer that was left, or does not answer, is dialled again.
const REDIAL_NS: u64 = 1_000_000_000;
/// Bytes of a request, of a decline, and of an announcement beside the digests, with their frames.
const REQUEST_BYTES: u64 = 24;
const HAVE_BYTES: u64 = 24;
const DIGEST_BYTES: u64 = 32;

type ConnId = u32;
type NodeId = u32;

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A segment has left the uplink.
    Left(NodeId, ConnId),
    /// A connection that had none has room for a segment.
    Room(ConnId),
    /// The last segment of a block is there.
    Arrived(ConnId, u32),
    Verified(ConnId, u32),
    Request(ConnId, u32, bool),
    Declined(ConnId, u32, Decline),
    Cancel(ConnId, u32),
    /// An announcement is there.
    Have(u32),
    /// The node may announce what is new.
    Announce(NodeId),
    Tick(NodeId),
    /// The seed has one more block.
    Acquired,
    Join(NodeId),
    Die(NodeId),
    /// Its connections break.
    Broken(NodeId),
    /// Neighbours are handed out anew.
    Repair,
    Freeze(NodeId),
    Thaw(NodeId),
    /// A penalty is over.
    Redial(NodeId, NodeId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Away,
    Alive,
    Frozen,
    Dead,
}

struct Node {
    life: Life,
    /// From when it takes nothing in: while it is frozen, and when it is dead.
    deaf_ns: u64,
    /// The seed has none.
    chooser: Option<Chooser>,
    held: Bits,
    log: SentLog,
    slots: UploadSlots,
    /// Connections on which it serves, and on which it pulls, by the other end.
    serves: Vec<ConnId>,
    pulls: BTreeMap<NodeId, ConnId>,
    budget: u32,
    /// Not announced.
    fresh: Vec<u32>,
    announced_ns: u64,
    announcing: bool,
    /// What happened while it was frozen.
    missed: Vec<Event>,
    penalties: BTreeMap<NodeId, Penalty>,
    joined_ns: u64,
    done_ns: Option<u64>,
    received: u64,
    sent: u64,
    messages: u64,
    message_bytes: u64,
}

/// Of a peer that sent wrong bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Penalty {
    strikes: u32,
    until_ns: u64,
}

struct Conn {
    server: NodeId,
    puller: NodeId,
    open: bool,
    queue: VecDeque<(Rank, u32)>,
    /// The block being sent and how many of its segments have not left.
    sending: Option<(u32, u32)>,
    /// Since when it waits for a slot.
    waits_ns: Option<u64>,
    /// When the latest segments are there, each at its number modulo their number.
    there_ns: [u64; CREDIT_SEGMENTS as usize],
    segments: u32,
    /// It has a segment to send and no room for it.
    blocked: bool,
    /// When the last segment on its way is there.
    last_ns: u64,
    /// The puller has everything.
    idle: bool,
    /// A wrong block came on it.
    corrupt: bool,
    /// To be announced after the block that is being sent.
    unsaid: Vec<u32>,
}

impl Conn {
    fn next(&self) -> Option<usize> {
        next_of(self.queue.iter().map(|(rank, _)| *rank))
    }
}

/// An announcement on its way, or the memory of one.
#[derive(Default)]
struct Batch {
    blocks: Vec<u32>,
    to: Vec<ConnId>,
}

pub(super) struct World<'a> {
    s: &'a Scenario,
    now_ns: u64,
    agenda: Agenda<Event>,
    events: u64,
    /// Nodes that have not everything and may still get it.
    fetching: usize,
    network: Network,
    nodes: Vec<Node>,
    conns: Vec<Conn>,
    batches: Vec<Batch>,
    free_batches: Vec<u32>,
    /// Memory for lists of connections.
    to: (Vec<ConnId>, Vec<ConnId>),
    mesh: Mesh<u32>,
    corrupt_pairs: BTreeSet<(NodeId, NodeId)>,
    report: Report,
}

impl<'a> World<'a> {
    pub(super) fn new(s: &'a Scenario) -> Self {
        assert!(s.block_bytes.is_multiple_of(s.segments) && s.nodes.len() > 1);
        let budget = (s.buffer_bytes / u64::from(s.block_bytes)).max(2) as u32;
        let nodes = (0..s.nodes.len() as u32).map(|i| Node {
            life: Life::Away,
            deaf_ns: u64::MAX,
            chooser: (i > 0).then(|| Chooser::new(node_hash(i), s.blocks, s.block_bytes)),
            held: Bits::new(s.blocks),
            log: SentLog::default(),
            slots: UploadSlots::new(s.max_uploads),
            serves: Vec::new(),
            pulls: BTreeMap::new(),
            budget,
            fresh: Vec::new(),
            announced_ns: 0,
            announcing: false,
            missed: Vec::new(),
            penalties: BTreeMap::new(),
            joined_ns: s.nodes[i as usize].joins_us * 1000,
            done_ns: None,
            received: 0,
            sent: 0,
            messages: 0,
            message_bytes: 0,
        });
        let mut world = Self {
            now_ns: 0,
            agenda: Agenda::new(),
            events: 0,
            fetching: s.nodes.len() - 1,
            network: Network::new(s),
            nodes: nodes.collect(),
            conns: Vec::new(),
            batches: Vec::new(),
            free_batches: Vec::new(),
            to: Default::default(),
            mesh: s.mesh(|i| s.nodes[i].joins_us == 0),
            corrupt_pairs: BTreeSet::new(),
            report: Report {
                bound_s: s.bound_s(),
                ..Report::default()
            },
            s,
        };
        world.begin();
        world
    }

    fn begin(&mut self) {
        match self.s.source_bytes_per_s {
            None => (0..self.s.blocks).for_each(|b| {
                self.nodes[0].held.set(b);
            }),
            Some(_) => self.source(),
        }
        for (i, node) in self.s.nodes.iter().enumerate() {
            let i = i as u32;
            if node.joins_us == 0 {
                self.nodes[i as usize].life = Life::Alive;
                self.tick_from(i);
            } else {
                self.at(node.joins_us * 1000, Event::Join(i));
            }
            if let Some(at) = node.dies_us {
                self.at(at * 1000, Event::Die(i));
            }
            if let Some((from, to)) = node.frozen_us {
                self.at(from * 1000, Event::Freeze(i));
                self.at(to * 1000, Event::Thaw(i));
            }
        }
        self.repair();
    }

    pub(super) fn run(mut self) -> Report {
        let limit_ns = self.s.limit_us * 1000;
        while self.fetching > 0
            && let Some((at_ns, event)) = self.agenda.take()
        {
            self.now_ns = at_ns;
            if at_ns > limit_ns {
                break;
            }
            self.events += 1;
            self.happens(event);
        }
        self.finish()
    }

    fn finish(mut self) -> Report {
        let s = self.s;
        let size = s.size_bytes();
        let mut r = std::mem::take(&mut self.report);
        let end_s = |n: &Node| {
            let end = n.done_ns.unwrap_or(self.now_ns);
            end.saturating_sub(n.joined_ns) as f64 / 1e9
        };
        r.done_s = self.nodes.iter().map(|n| n.done_ns.map(|_| end_s(n))).collect();
        let counted: Vec<Option<f64>> = (1..s.nodes.len())
            .filter(|i| s.nodes[*i].counts && s.nodes[*i].dies_us.is_none())
            .map(|i| r.done_s[i])
            .collect();
        r.makespan_s = counted.iter().copied().try_fold(0.0, |m: f64, d| Some(m.max(d?)));
        let all_s = self.nodes.iter().map(end_s).fold(0.0, f64::max);
        let block = f64::from(s.block_bytes);
        r.seed_copies = self.nodes[0].sent as f64 * block / size;
        r.cross_rack_bytes = self.network.cross_rack_bytes as f64;
        let living: Vec<&Node> = self.nodes[1..].iter().filter(|n| n.life == Life::Alive).collect();
        let received = |n: &&Node| n.received as f64 * block / size;
        r.received_max = living.iter().map(received).fold(0.0, f64::max);
        r.received_mean = living.iter().map(received).sum::<f64>() / living.len().max(1) as f64;
        let messages = |n: &Node| n.messages as f64 / all_s;
        r.messages_max = self.nodes.iter().map(messages).fold(0.0, f64::max);
        r.messages_mean = self.nodes.iter().map(messages).sum::<f64>() / self.nodes.len() as f64;
        let bytes: u64 = self.nodes.iter().map(|n| n.message_bytes).sum();
        r.message_bytes = bytes as f64 / size / self.nodes.len() as f64;
        r.corrupt_pairs = self.corrupt_pairs.len() as u64;
        r.events = self.events;
        r
    }

    fn at(&mut self, at_ns: u64, event: Event) {
        self.agenda.note(at_ns, event);
    }

    fn now_us(&self) -> u64 {
        self.now_ns / 1000
    }

    fn now_ms(&self) -> u64 {
        self.now_ns / 1_000_000
    }

    /// Whom an event is for, if it can be missed.
    fn addressee(&self, event: Event) -> Option<NodeId> {
        match event {
            Event::Left(node, _) | Event::Announce(node) | Event::Tick(node) => Some(node),
            Event::Room(c) | Event::Arrived(c, _) | Event::Verified(c, _) | Event::Declined(c, ..) => {
                Some(self.conns[c as usize].puller)
            }
            Event::Request(c, ..) | Event::Cancel(c, _) => Some(self.conns[c as usize].server),
            _ => None,
        }
    }

    fn happens(&mut self, event: Event) {
        if let Some(node) = self.addressee(event) {
            let node = &mut self.nodes[node as usize];
            match node.life {
                Life::Alive => {}
                Life::Frozen => return node.missed.push(event),
                Life::Dead | Life::Away => return,
            }
        }
        match event {
            Event::Left(node, conn) => self.left(node, conn),
            Event::Room(conn) => self.room(conn),
            Event::Arrived(conn, block) => self.arrived(conn, block),
            Event::Verified(conn, block) => self.verified(conn, block),
            Event::Request(conn, block, unless_sent) => self.request(conn, block, unless_sent),
            Event::Declined(conn, block, why) => self.declined(conn, block, why),
            Event::Cancel(conn, block) => self.cancel(conn, block),
            Event::Have(batch) => self.have(batch),
            Event::Announce(node) => self.announce(node),
            Event::Tick(node) => self.tick(node),
            Event::Acquired => {
                let block = self.nodes[0].held.ones();
                self.holds(0, block);
                if block + 1 < self.s.blocks {
                    self.source();
                }
            }
            Event::Join(node) => {
                self.nodes[node as usize].life = Life::Alive;
                self.tick_from(node);
                self.repair();
            }
            Event::Die(node) => {
                let n = &mut self.nodes[node as usize];
                n.life = Life::Dead;
                n.deaf_ns = n.deaf_ns.min(self.now_ns);
                self.fetching -= usize::from(n.chooser.is_some() && n.done_ns.is_none());
                self.network.silence(node);
                self.at(self.now_ns + self.s.silence_us * 1000, Event::Broken(node));
                self.at(self.now_ns + self.s.repair_us * 1000, Event::Repair);
            }
            Event::Broken(node) => {
                let serves = std::mem::take(&mut self.nodes[node as usize].serves);
                let pulls = std::mem::take(&mut self.nodes[node as usize].pulls);
                for conn in serves.into_iter().chain(pulls.into_values()) {
                    self.close(conn);
                }
            }
            Event::Repair => self.repair(),
            Event::Freeze(node) => {
                let n = &mut self.nodes[node as usize];
                (n.life, n.deaf_ns) = (Life::Frozen, self.now_ns);
            }
            Event::Thaw(node) => {
                let n = &mut self.nodes[node as usize];
                (n.life, n.deaf_ns) = (Life::Alive, u64::MAX);
                for missed in std::mem::take(&mut self.nodes[node as usize].missed) {
                    self.happens(missed);
                }
            }
            Event::Redial(puller, server) => self.dial(puller, server),
        }
    }

    fn source(&mut self) {
        let rate = self.s.source_bytes_per_s.expect("there is a source");
        let next = f64::from(self.nodes[0].held.ones() + 1) * f64::from(self.s.block_bytes);
        self.at((next / rate * 1e9) as u64, Event::Acquired);
    }

    /// Ticks of nodes that began together do not come together.
    fn tick_from(&mut self, node: NodeId) {
        if self.nodes[node as usize].chooser.is_some() {
            let phase = node_hash(node) % TICK_NS;
            self.at(self.now_ns + phase, Event::Tick(node));
        }
    }
}
