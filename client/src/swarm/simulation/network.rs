//! Links: uplinks that serve their connections in turn, downlinks and racks' links as queues.

use super::Scenario;
use std::collections::VecDeque;

/// Segments of one connection that are on their way: what socket buffers hold.
pub const CREDIT_SEGMENTS: u32 = 4;

/// A queue with one rate. Only the time is kept at which it is empty.
#[derive(Clone, Copy, Debug)]
struct Queue {
    ns_per_byte: f64,
    free_ns: u64,
}

impl Queue {
    fn new(bytes_per_s: f64) -> Self {
        Self {
            ns_per_byte: 1e9 / bytes_per_s,
            free_ns: 0,
        }
    }

    /// `bytes` come, the first one at `first_ns`, the last one at `last_ns`: when the last one has left.
    fn pass(&mut self, bytes: u64, first_ns: u64, last_ns: u64) -> (u64, u64) {
        let begins = self.free_ns.max(first_ns);
        let takes = (bytes as f64 * self.ns_per_byte) as u64;
        self.free_ns = (begins + takes).max(last_ns);
        (self.free_ns - takes, self.free_ns)
    }
}

#[derive(Clone, Debug)]
struct Uplink {
    ns_per_byte: f64,
    /// Connections that have a segment to send and room for it.
    turns: VecDeque<u32>,
    busy: bool,
}

/// All links.
#[derive(Debug)]
pub(super) struct Network {
    segment_bytes: u64,
    near_ns: u64,
    far_ns: u64,
    up: Vec<Uplink>,
    down: Vec<Queue>,
    rack: Vec<u32>,
    /// By rack, from its nodes and to them.
    spine: Vec<[Queue; 2]>,
    pub(super) cross_rack_bytes: u64,
}

impl Network {
    pub(super) fn new(s: &Scenario) -> Self {
        let rack: Vec<u32> = s.nodes.iter().map(|n| n.rack.unwrap_or(0)).collect();
        let racks = rack.iter().max().map_or(1, |r| r + 1);
        let spine = (0..racks).map(|r| {
            let share = s.spine.unwrap_or(f64::INFINITY);
            let members = || {
                s.nodes
                    .iter()
                    .zip(&rack)
                    .filter(|(_, of)| **of == r)
                    .map(|(n, _)| n)
            };
            let up: f64 = members().map(|n| n.up_bytes_per_s).sum();
            let down: f64 = members().map(|n| n.down_bytes_per_s).sum();
            [Queue::new(up * share), Queue::new(down * share)]
        });
        Self {
            segment_bytes: u64::from(s.block_bytes / s.segments),
            near_ns: s.near_us * 1000,
            far_ns: s.far_us * 1000,
            up: s
                .nodes
                .iter()
                .map(|n| Uplink {
                    ns_per_byte: 1e9 / n.up_bytes_per_s,
                    turns: VecDeque::new(),
                    busy: false,
                })
                .collect(),
            down: s.nodes.iter().map(|n| Queue::new(n.down_bytes_per_s)).collect(),
            spine: spine.collect(),
            rack,
            cross_rack_bytes: 0,
        }
    }

    pub(super) fn near(&self, a: u32, b: u32) -> bool {
        self.rack[a as usize] == self.rack[b as usize]
    }

    pub(super) fn latency_ns(&self, a: u32, b: u32) -> u64 {
        if self.near(a, b) {
            self.near_ns
        } else {
            self.far_ns
        }
    }

    /// A connection has something to send and room for it.
    pub(super) fn wants(&mut self, node: u32, connection: u32) {
        self.up[node as usize].turns.push_back(connection);
    }

    /// The next segment to send, if the link is idle: of which connection, and how long it takes.
    pub(super) fn begin(&mut self, node: u32) -> Option<(u32, u64)> {
        let up = &mut self.up[node as usize];
        if up.busy {
            return None;
        }
        let connection = up.turns.pop_front()?;
        up.busy = true;
        Some((connection, (self.segment_bytes as f64 * up.ns_per_byte) as u64))
    }

    /// A segment has left: when it is there.
    pub(super) fn end(&mut self, from: u32, to: u32, now_ns: u64) -> u64 {
        let bytes = self.segment_bytes;
        let up = &mut self.up[from as usize];
        up.busy = false;
        let takes = (bytes as f64 * up.ns_per_byte) as u64;
        let (mut first, mut last) = (now_ns.saturating_sub(takes), now_ns);
        if !self.near(from, to) {
            self.cross_rack_bytes += bytes;
            (first, last) = self.spine[self.rack[from as usize] as usize][0].pass(bytes, first, last);
            (first, last) = self.spine[self.rack[to as usize] as usize][1].pass(bytes, first, last);
        }
        let latency = self.latency_ns(from, to);
        self.down[to as usize]
            .pass(bytes, first + latency, last + latency)
            .1
    }

    /// The node sends nothing any more.
    pub(super) fn silence(&mut self, node: u32) {
        self.up[node as usize].turns.clear();
        self.up[node as usize].busy = true;
    }
}
