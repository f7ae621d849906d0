//! The events, and what the nodes do about them.

use super::{
    Report, Scenario,
    network::{CREDIT_SEGMENTS, Network},
    node_hash,
};
use crate::swarm::{
    bits::Bits,
    chooser::{Chooser, Decline, PeerTraits},
    sent::SentLog,
    serve::{ANNOUNCE_INTERVAL, BUSY_AFTER},
    slots::{Rank, UploadSlots, next_of},
};
use mooncake_proto::mesh::Mesh;
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque},
};

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
    /// A segment is there; `true`: the last one of its block.
    Arrived(ConnId, Option<u32>),
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

#[derive(Debug)]
struct Queued {
    at_ns: u64,
    sequence: u64,
    event: Event,
}

impl PartialEq for Queued {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for Queued {}
impl PartialOrd for Queued {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Queued {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_ns, self.sequence).cmp(&(other.at_ns, other.sequence))
    }
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
    /// Segments on their way.
    flying: u32,
    /// It has a segment to send and no room for it.
    blocked: bool,
    /// When the last segment on its way is there.
    last_ns: u64,
    /// To be announced after the block that is being sent.
    unsaid: Vec<u32>,
}

impl Conn {
    fn next(&self) -> Option<usize> {
        next_of(self.queue.iter().map(|(rank, _)| *rank))
    }
}

struct Batch {
    blocks: Vec<u32>,
    to: Vec<ConnId>,
}

pub(super) struct World<'a> {
    s: &'a Scenario,
    now_ns: u64,
    queue: BinaryHeap<Reverse<Queued>>,
    events: u64,
    sequence: u64,
    /// Nodes that have not everything and may still get it.
    fetching: usize,
    network: Network,
    nodes: Vec<Node>,
    conns: Vec<Conn>,
    batches: Vec<Option<Batch>>,
    free_batches: Vec<u32>,
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
            queue: BinaryHeap::new(),
            events: 0,
            sequence: 0,
            fetching: s.nodes.len() - 1,
            network: Network::new(s),
            nodes: nodes.collect(),
            conns: Vec::new(),
            batches: Vec::new(),
            free_batches: Vec::new(),
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
        while let Some(Reverse(next)) = self.queue.pop() {
            self.now_ns = next.at_ns;
            if next.at_ns > limit_ns || self.over() {
                break;
            }
            self.events += 1;
            self.happens(next.event);
        }
        self.finish()
    }

    fn over(&self) -> bool {
        self.fetching == 0
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
        self.sequence += 1;
        let sequence = self.sequence;
        self.queue.push(Reverse(Queued {
            at_ns,
            sequence,
            event,
        }));
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
            Event::Arrived(c, _) | Event::Verified(c, _) | Event::Declined(c, ..) => {
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
            Event::Arrived(conn, last) => self.arrived(conn, last),
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
            Event::Freeze(node) => self.nodes[node as usize].life = Life::Frozen,
            Event::Thaw(node) => {
                self.nodes[node as usize].life = Life::Alive;
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

    // ---- the graph ------------------------------------------------------------------------------------------

    /// The masters hand out the neighbours of those that are there.
    fn repair(&mut self) {
        let alive = |n: &Node| matches!(n.life, Life::Alive | Life::Frozen);
        let there: Vec<bool> = self.nodes.iter().map(alive).collect();
        self.mesh = self.s.mesh(|i| there[i]);
        for node in (1..self.nodes.len() as u32).filter(|n| there[*n as usize]) {
            let neighbours = self.mesh.neighbours(&node);
            self.report.neighbours_max = self.report.neighbours_max.max(neighbours.len());
            let gone: Vec<ConnId> = self.nodes[node as usize]
                .pulls
                .iter()
                .filter(|(other, _)| neighbours.binary_search(other).is_err())
                .map(|(_, conn)| *conn)
                .collect();
            gone.into_iter().for_each(|conn| self.close(conn));
            for other in neighbours {
                self.dial(node, other);
            }
        }
    }

    fn dial(&mut self, puller: NodeId, server: NodeId) {
        let node = &self.nodes[puller as usize];
        let penalised = node
            .penalties
            .get(&server)
            .is_some_and(|p| p.until_ns > self.now_ns);
        if node.done_ns.is_some() || node.pulls.contains_key(&server) || penalised {
            return;
        }
        match (node.life, self.nodes[server as usize].life) {
            (Life::Alive, Life::Alive) => {}
            (Life::Alive | Life::Frozen, Life::Alive | Life::Frozen) => {
                return self.at(self.now_ns + REDIAL_NS, Event::Redial(puller, server));
            }
            _ => return,
        }
        let conn = self.conns.len() as ConnId;
        self.conns.push(Conn {
            server,
            puller,
            open: true,
            queue: VecDeque::new(),
            sending: None,
            waits_ns: None,
            flying: 0,
            blocked: false,
            last_ns: 0,
            unsaid: Vec::new(),
        });
        self.nodes[server as usize].log.connect(conn.into());
        self.nodes[server as usize].serves.push(conn);
        let traits = PeerTraits {
            hash: node_hash(server),
            seed: server == 0,
            near: self.network.near(server, puller),
        };
        let node = &mut self.nodes[puller as usize];
        node.pulls.insert(server, conn);
        node.chooser.as_mut().expect("pulls").add_peer(conn, traits);
        let held: Vec<u32> = self.nodes[server as usize].held.iter().collect();
        if !held.is_empty() {
            // The connection, the hello, the subscription.
            let at = self.now_ns + 4 * self.network.latency_ns(server, puller);
            self.say(at, held, vec![conn]);
        }
    }

    fn close(&mut self, conn: ConnId) {
        let c = &mut self.conns[conn as usize];
        if !std::mem::take(&mut c.open) {
            return;
        }
        let (server, puller, waited, sent) = (c.server, c.puller, c.waits_ns.take(), c.sending.take());
        c.queue.clear();
        c.unsaid.clear();
        let at = &mut self.nodes[server as usize];
        at.log.disconnect(conn.into());
        at.serves.retain(|c| *c != conn);
        if waited.is_some() {
            at.slots.withdraw(conn.into());
        }
        if sent.is_some() {
            self.give_back(conn);
        }
        let node = &mut self.nodes[puller as usize];
        node.pulls.remove(&server);
        let chooser = node.chooser.as_mut().expect("pulls");
        node.budget += chooser.outstanding(conn) as u32;
        chooser.remove_peer(conn);
    }

    // ---- serving --------------------------------------------------------------------------------------------

    fn request(&mut self, conn: ConnId, block: u32, unless_sent: bool) {
        let now_ms = self.now_ms();
        let c = &mut self.conns[conn as usize];
        if !c.open {
            return;
        }
        let server = &mut self.nodes[c.server as usize];
        if !server.held.get(block) {
            return self.decline(conn, block, Decline::NotHeld);
        }
        let Some(rank) = server.log.admit(conn.into(), block, unless_sent, now_ms) else {
            return self.decline(conn, block, Decline::SentElsewhere);
        };
        c.queue.push_back((rank, block));
        server.slots.improve(conn.into(), rank);
        self.ask_slot(conn);
    }

    fn cancel(&mut self, conn: ConnId, block: u32) {
        let c = &mut self.conns[conn as usize];
        if let Some(at) = c.queue.iter().position(|(_, b)| *b == block) {
            c.queue.remove(at);
            self.nodes[c.server as usize].log.dropped(conn.into(), block);
            self.decline(conn, block, Decline::Canceled);
        }
    }

    fn decline(&mut self, conn: ConnId, block: u32, why: Decline) {
        self.report.declined += 1;
        let c = &self.conns[conn as usize];
        let at = c
            .last_ns
            .max(self.now_ns + self.network.latency_ns(c.server, c.puller));
        self.count(c.server, 1, REQUEST_BYTES);
        self.at(at, Event::Declined(conn, block, why));
    }

    fn count(&mut self, node: NodeId, messages: u64, bytes: u64) {
        self.nodes[node as usize].messages += messages;
        self.nodes[node as usize].message_bytes += bytes;
    }

    fn ask_slot(&mut self, conn: ConnId) {
        let now_ns = self.now_ns;
        let c = &mut self.conns[conn as usize];
        if c.sending.is_some() || c.waits_ns.is_some() {
            return;
        }
        let Some(next) = c.next() else { return };
        let rank = c.queue[next].0;
        if self.nodes[c.server as usize].slots.ask(conn.into(), rank) {
            self.begin_block(conn);
        } else {
            c.waits_ns = Some(now_ns);
        }
    }

    fn begin_block(&mut self, conn: ConnId) {
        let c = &mut self.conns[conn as usize];
        c.waits_ns = None;
        let Some((_, block)) = c.next().and_then(|at| c.queue.remove(at)) else {
            // Canceled while it waited.
            return self.give_back(conn);
        };
        c.sending = Some((block, self.s.segments));
        self.offer(conn);
    }

    /// The connection takes its turn if it has room.
    fn offer(&mut self, conn: ConnId) {
        let c = &mut self.conns[conn as usize];
        c.blocked = c.flying >= CREDIT_SEGMENTS;
        let (server, blocked) = (c.server, c.blocked);
        if !blocked {
            self.network.wants(server, conn);
            self.send_on(server);
        }
    }

    fn send_on(&mut self, node: NodeId) {
        if let Some((conn, takes_ns)) = self.network.begin(node) {
            self.at(self.now_ns + takes_ns, Event::Left(node, conn));
        }
    }

    fn left(&mut self, node: NodeId, conn: ConnId) {
        let now_ns = self.now_ns;
        let c = &mut self.conns[conn as usize];
        let at = self.network.end(c.server, c.puller, now_ns);
        // It broke meanwhile.
        if let Some((block, left)) = c.sending {
            c.flying += 1;
            c.last_ns = at;
            let last = left == 1;
            if last {
                c.sending = None;
                let unsaid = std::mem::take(&mut c.unsaid);
                let server = &mut self.nodes[node as usize];
                server.sent += 1;
                server.log.sent(conn.into(), block, now_ns / 1_000_000);
                if !unsaid.is_empty() {
                    self.say(at, unsaid, vec![conn]);
                }
                self.give_back(conn);
                self.ask_slot(conn);
            } else {
                c.sending = Some((block, left - 1));
                self.offer(conn);
            }
            self.at(at, Event::Arrived(conn, last.then_some(block)));
        }
        self.send_on(node);
    }

    fn give_back(&mut self, conn: ConnId) {
        let server = self.conns[conn as usize].server;
        let Some(next) = self.nodes[server as usize].slots.give_back(conn.into()) else {
            return;
        };
        let next = next as ConnId;
        let c = &mut self.conns[next as usize];
        let waited_ns = self.now_ns - c.waits_ns.expect("who waits has a time");
        if waited_ns < BUSY_AFTER.as_nanos() as u64 {
            return self.begin_block(next);
        }
        // Too late for its first request.
        c.waits_ns = None;
        if let Some((_, block)) = c.next().and_then(|at| c.queue.remove(at)) {
            self.nodes[server as usize].log.dropped(next.into(), block);
            self.decline(next, block, Decline::Busy);
        }
        self.give_back(next);
        self.ask_slot(next);
    }

    fn announce(&mut self, node: NodeId) {
        let now_ns = self.now_ns;
        let n = &mut self.nodes[node as usize];
        n.announcing = false;
        n.announced_ns = now_ns;
        let blocks = std::mem::take(&mut n.fresh);
        let (mut near, mut far) = (Vec::new(), Vec::new());
        for i in 0..self.nodes[node as usize].serves.len() {
            let conn = self.nodes[node as usize].serves[i];
            let c = &mut self.conns[conn as usize];
            if self.nodes[c.puller as usize].done_ns.is_some() {
                continue;
            }
            if c.sending.is_some() {
                c.unsaid.extend(&blocks);
            } else if c.last_ns > now_ns {
                let last_ns = c.last_ns;
                self.say(last_ns, blocks.clone(), vec![conn]);
            } else if self.network.near(node, c.puller) {
                near.push(conn);
            } else {
                far.push(conn);
            }
        }
        for (to, latency_us) in [(near, self.s.near_us), (far, self.s.far_us)] {
            if !to.is_empty() {
                self.say(now_ns + latency_us * 1000, blocks.clone(), to);
            }
        }
    }

    fn say(&mut self, at_ns: u64, blocks: Vec<u32>, to: Vec<ConnId>) {
        let server = self.conns[to[0] as usize].server;
        let bytes = HAVE_BYTES + DIGEST_BYTES * blocks.len() as u64;
        self.count(server, to.len() as u64, to.len() as u64 * bytes);
        let batch = Some(Batch { blocks, to });
        let at = match self.free_batches.pop() {
            Some(free) => {
                self.batches[free as usize] = batch;
                free
            }
            None => {
                self.batches.push(batch);
                self.batches.len() as u32 - 1
            }
        };
        self.at(at_ns, Event::Have(at));
    }

    // ---- pulling --------------------------------------------------------------------------------------------

    fn have(&mut self, batch: u32) {
        let Batch { blocks, to } = self.batches[batch as usize].take().expect("said once");
        self.free_batches.push(batch);
        let mut frozen = Vec::new();
        for conn in to {
            let c = &self.conns[conn as usize];
            let node = &mut self.nodes[c.puller as usize];
            match node.life {
                Life::Alive if c.open && node.done_ns.is_none() => {}
                Life::Frozen if c.open => {
                    frozen.push(conn);
                    continue;
                }
                _ => continue,
            }
            let chooser = node.chooser.as_mut().expect("pulls");
            let (mut news, now_us) = (false, self.now_ns / 1000);
            for block in &blocks {
                news |= chooser.announce(conn, *block, now_us);
            }
            if news {
                self.pump(self.conns[conn as usize].puller);
            }
        }
        for conn in frozen {
            let puller = self.conns[conn as usize].puller;
            let at = self.batches.len() as u32;
            self.batches.push(Some(Batch {
                blocks: blocks.clone(),
                to: vec![conn],
            }));
            self.nodes[puller as usize].missed.push(Event::Have(at));
        }
    }

    fn pump(&mut self, node: NodeId) {
        let now_us = self.now_us();
        while self.nodes[node as usize].budget > 0 {
            let n = &mut self.nodes[node as usize];
            let Some(pick) = n.chooser.as_mut().expect("pulls").next(now_us) else {
                return;
            };
            n.budget -= 1;
            self.count(node, 1, REQUEST_BYTES);
            let server = self.conns[pick.peer as usize].server;
            let at = self.now_ns + self.network.latency_ns(node, server);
            self.at(at, Event::Request(pick.peer, pick.block, pick.unless_sent));
        }
    }

    fn declined(&mut self, conn: ConnId, block: u32, why: Decline) {
        let now_us = self.now_us();
        let c = &self.conns[conn as usize];
        if !c.open {
            return;
        }
        let puller = c.puller;
        let node = &mut self.nodes[puller as usize];
        node.budget += 1;
        node.chooser
            .as_mut()
            .expect("pulls")
            .declined(conn, block, why, now_us);
        self.pump(puller);
    }

    fn arrived(&mut self, conn: ConnId, last: Option<u32>) {
        let c = &mut self.conns[conn as usize];
        c.flying -= 1;
        if c.blocked && c.sending.is_some() {
            self.offer(conn);
        }
        let Some(block) = last else { return };
        let c = &self.conns[conn as usize];
        let puller = c.puller;
        let (now_us, bytes) = (self.now_us(), self.s.block_bytes.into());
        let node = &mut self.nodes[puller as usize];
        node.received += 1;
        if !c.open {
            return;
        }
        let delivery = node
            .chooser
            .as_mut()
            .expect("pulls")
            .delivered(conn, block, bytes, now_us);
        for loser in delivery.cancel {
            self.send_cancel(loser, block);
        }
        if delivery.wanted {
            let takes_ns = (bytes as f64 / self.s.verify_bytes_per_s * 1e9) as u64;
            self.at(self.now_ns + takes_ns, Event::Verified(conn, block));
        } else {
            self.nodes[puller as usize].budget += 1;
        }
        self.pump(puller);
    }

    fn send_cancel(&mut self, conn: ConnId, block: u32) {
        let c = &self.conns[conn as usize];
        let at = self.now_ns + self.network.latency_ns(c.server, c.puller);
        self.count(c.puller, 1, REQUEST_BYTES);
        self.at(at, Event::Cancel(conn, block));
    }

    fn verified(&mut self, conn: ConnId, block: u32) {
        let c = &self.conns[conn as usize];
        let (server, puller) = (c.server, c.puller);
        let node = &mut self.nodes[puller as usize];
        node.budget += 1;
        let chooser = node.chooser.as_mut().expect("pulls");
        if self.s.nodes[server as usize].corrupts {
            chooser.failed(block);
            self.report.corrupt += 1;
            self.corrupt_pairs.insert((puller, server));
            if self.conns[conn as usize].open {
                self.blame(puller, server, conn);
            }
        } else {
            chooser.obtained(block);
            let whole = chooser.whole();
            if whole {
                node.done_ns = Some(self.now_ns);
                self.fetching -= 1;
            }
            self.holds(puller, block);
        }
        self.pump(puller);
    }

    /// The node has a block to offer.
    fn holds(&mut self, node: NodeId, block: u32) {
        let now_ns = self.now_ns;
        let n = &mut self.nodes[node as usize];
        n.held.set(block);
        n.fresh.push(block);
        if !n.announcing {
            n.announcing = true;
            let at = now_ns.max(n.announced_ns + ANNOUNCE_INTERVAL.as_nanos() as u64);
            self.at(at, Event::Announce(node));
        }
    }

    fn blame(&mut self, puller: NodeId, server: NodeId, conn: ConnId) {
        self.close(conn);
        let penalty = self.nodes[puller as usize].penalties.entry(server).or_default();
        penalty.until_ns = self.now_ns + PENALTY_NS * 4u64.pow(penalty.strikes.min(8));
        penalty.strikes += 1;
        let at = penalty.until_ns;
        self.at(at, Event::Redial(puller, server));
    }

    fn tick(&mut self, node: NodeId) {
        let now_us = self.now_us();
        let n = &mut self.nodes[node as usize];
        if n.done_ns.is_some() {
            return;
        }
        for stall in n.chooser.as_mut().expect("ticks").tick(now_us) {
            for block in stall.cancel {
                self.send_cancel(stall.peer, block);
            }
            if stall.drop {
                let server = self.conns[stall.peer as usize].server;
                self.close(stall.peer);
                self.at(self.now_ns + REDIAL_NS, Event::Redial(node, server));
            }
        }
        self.pump(node);
        self.at(self.now_ns + TICK_NS, Event::Tick(node));
    }
}
