//! A discrete-event simulator of the swarm: thousands of nodes in one process, in virtual time. It drives the modules
//! that decide in a real node ([`super::chooser`], [`super::sent`], [`super::slots`]) on the graph that the masters
//! hand out ([`mooncake_proto::mesh`]); the unit tests and `cargo run --release -p mooncake-client --example
//! simulate_broadcast` run it. Deterministic: one scenario, one result.
//!
//! # The model
//! - **Links.** Each node has an uplink and a downlink. The uplink sends segments (a block is [`Scenario::segments`]
//!   of them) of the connections that have one and whose receiver has room for it, in turn: what a fair queue does,
//!   and TCP over a while. A connection has at most [`CREDIT_SEGMENTS`] on their way; a full downlink thus slows down
//!   its senders, who send to others meanwhile. The downlink, and a rack's link to the spine in each direction, are
//!   queues without loss; what passes through begins to leave as it begins to come.
//! - **What is said.** Requests, declines and announcements arrive after the latency of their path. What a server says
//!   goes out between two blocks of its connection and comes after the segments that are on their way on it.
//!   Announcements are gathered for [`ANNOUNCE_INTERVAL`](super::serve::ANNOUNCE_INTERVAL) as the server does.
//! - **A node** has a budget of outstanding and unwritten blocks, takes [`Scenario::verify_bytes_per_s`] to verify and
//!   write, looks for stalls every 50 ms, sends [`Scenario::max_uploads`] blocks at a time and declines who waited for
//!   a slot for too long.
//! - **Faults.** A node that dies is silent: its peers notice by their stall rules and after
//!   [`Scenario::silence_us`]; after [`Scenario::repair_us`] the masters hand out new neighbours. A frozen node does
//!   nothing and keeps its connections. A corrupter sends wrong bytes from its first block on, is left by whoever got one, and
//!   tried again after the penalty of a real node.
//!
//! # What it leaves out
//! Slow start and loss of TCP, the bytes of control messages on the links (they are counted), disks, the CPU, the
//! masters (but for repair), digests that differ before the seal (a corrupter is one whose bytes do not match its
//! word), and nodes that fetch several artifacts at a time.

mod agenda;
mod engine;
mod network;
#[cfg(test)]
mod tests;

pub use network::CREDIT_SEGMENTS;

use mooncake_proto::mesh::{Mesh, hash_id};

/// One node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeSpec {
    /// Of its uplink.
    pub up_bytes_per_s: f64,
    /// Of its downlink.
    pub down_bytes_per_s: f64,
    /// Its rack; all are in the same without.
    pub rack: Option<u32>,
    /// When it begins to fetch.
    pub joins_us: u64,
    /// When it dies.
    pub dies_us: Option<u64>,
    /// From when to when it stands still.
    pub frozen_us: Option<(u64, u64)>,
    /// Whether it sends wrong bytes.
    pub corrupts: bool,
    /// Whether the makespan and the bound are about it (if it does not die).
    pub counts: bool,
}

impl NodeSpec {
    /// One with the same rate in both directions.
    pub fn with_link(bytes_per_s: f64) -> Self {
        Self {
            up_bytes_per_s: bytes_per_s,
            down_bytes_per_s: bytes_per_s,
            rack: None,
            joins_us: 0,
            dies_us: None,
            frozen_us: None,
            corrupts: false,
            counts: true,
        }
    }
}

/// What is simulated.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// The first is the seed.
    pub nodes: Vec<NodeSpec>,
    /// How many blocks the artifact has.
    pub blocks: u32,
    /// Their size.
    pub block_bytes: u32,
    /// In how many parts a block goes over the links: more are closer to a wire and slower to simulate.
    pub segments: u32,
    /// Rate of the source; `None`: the seed has all at the start.
    pub source_bytes_per_s: Option<f64>,
    /// A rack's link to the spine, as a fraction of its nodes' links; `None`: no bottleneck.
    pub spine: Option<f64>,
    /// One way, within a rack.
    pub near_us: u64,
    /// One way, between racks.
    pub far_us: u64,
    /// Blocks that a node sends at a time.
    pub max_uploads: usize,
    /// Bytes requested or received and not written, per node.
    pub buffer_bytes: u64,
    /// To verify and write.
    pub verify_bytes_per_s: f64,
    /// How long a dead peer is silent before its connections break.
    pub silence_us: u64,
    /// How long after a death the neighbours of the dead are given others.
    pub repair_us: u64,
    /// The end, if it comes to no other.
    pub limit_us: u64,
}

impl Scenario {
    /// A seed and `followers` nodes with equal links, everything else as in a real node on a local network.
    pub fn uniform(followers: usize, blocks: u32, block_bytes: u32, link_bytes_per_s: f64) -> Self {
        let size = f64::from(blocks) * f64::from(block_bytes);
        Self {
            nodes: vec![NodeSpec::with_link(link_bytes_per_s); followers + 1],
            blocks,
            block_bytes,
            segments: 4,
            source_bytes_per_s: None,
            spine: None,
            near_us: 100,
            far_us: 200,
            max_uploads: super::SwarmConfig::default().max_uploads,
            buffer_bytes: super::SwarmConfig::default().buffer_bytes as u64,
            verify_bytes_per_s: 1e9,
            silence_us: crate::transport::NO_PROGRESS_TIMEOUT.as_micros() as u64,
            // Suspected at once, down after the grace of 30 s.
            repair_us: 32_000_000,
            limit_us: (20.0 * size / link_bytes_per_s * 1e6) as u64 + 300_000_000,
        }
    }

    /// Deals the nodes out to `racks` racks, the seed to the first.
    pub fn in_racks(mut self, racks: u32) -> Self {
        for (i, node) in self.nodes.iter_mut().enumerate() {
            node.rack = Some(i as u32 % racks);
        }
        self
    }

    /// Size of the artifact.
    pub fn size_bytes(&self) -> f64 {
        f64::from(self.blocks) * f64::from(self.block_bytes)
    }

    /// How many racks there are.
    pub fn racks(&self) -> usize {
        let racks: std::collections::BTreeSet<_> = self.nodes.iter().map(|n| n.rack).collect();
        racks.len()
    }

    /// The least time in which those that count can have everything: every byte leaves the seed and the source once,
    /// comes in at each and into each rack once, and all that comes in somewhere goes out somewhere.
    pub fn bound_s(&self) -> f64 {
        let size = self.size_bytes();
        let counted = || {
            self.nodes[1..]
                .iter()
                .filter(|n| n.counts && n.dies_us.is_none() && n.joins_us == 0)
        };
        let mut rate = self.nodes[0]
            .up_bytes_per_s
            .min(self.source_bytes_per_s.unwrap_or(f64::INFINITY));
        rate = counted().map(|n| n.down_bytes_per_s).fold(rate, f64::min);
        let up: f64 = counted().chain(&self.nodes[..1]).map(|n| n.up_bytes_per_s).sum();
        rate = rate.min(up / (counted().count().max(1) as f64));
        size / rate
    }

    /// The graph of those that are there.
    fn mesh(&self, there: impl Fn(usize) -> bool) -> Mesh<u32> {
        let mut mesh = Mesh::new();
        for (i, node) in self.nodes.iter().enumerate().filter(|(i, _)| there(*i)) {
            let rack = node.rack.map(|r| r.to_string()).unwrap_or_default();
            mesh.insert(i as u32, node_hash(i as u32), &rack, i == 0);
        }
        mesh
    }
}

fn node_hash(node: u32) -> u64 {
    hash_id(&format!(
        "10.{}.{}.{}:25001",
        node >> 16,
        node >> 8 & 255,
        node & 255
    ))
}

/// What came of a scenario.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// [`Scenario::bound_s`].
    pub bound_s: f64,
    /// When the last of those that count had everything, from when it joined; `None`: somebody never had.
    pub makespan_s: Option<f64>,
    /// By node, from when it joined.
    pub done_s: Vec<Option<f64>>,
    /// Bytes out of the seed, as a multiple of the artifact's size.
    pub seed_copies: f64,
    /// Bytes that went from rack to rack.
    pub cross_rack_bytes: f64,
    /// Most bytes that a living node received, as a multiple of the size.
    pub received_max: f64,
    /// On average.
    pub received_mean: f64,
    /// Messages that a node sent per second, on average.
    pub messages_mean: f64,
    /// And the one that sent most.
    pub messages_max: f64,
    /// Their bytes, as a multiple of the size and per node.
    pub message_bytes: f64,
    /// Requests that were declined.
    pub declined: u64,
    /// Wrong blocks received.
    pub corrupt: u64,
    /// Connections on which one came.
    pub corrupt_connections: u64,
    /// Pairs of receiver and corrupter between which one came: fewer where a penalty was over before the end.
    pub corrupt_pairs: u64,
    /// Most neighbours of a node.
    pub neighbours_max: usize,
    /// Events that were simulated.
    pub events: u64,
}

impl Report {
    /// Makespan over bound.
    pub fn ratio(&self) -> f64 {
        self.makespan_s.map_or(f64::INFINITY, |m| m / self.bound_s)
    }
}

/// Runs a scenario.
pub fn run(scenario: &Scenario) -> Report {
    engine::World::new(scenario).run()
}
