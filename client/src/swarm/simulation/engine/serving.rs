//! What a node does for those who ask it.

use super::{Batch, ConnId, DIGEST_BYTES, Event, HAVE_BYTES, NodeId, REQUEST_BYTES, World};
use crate::swarm::{chooser::Decline, serve::BUSY_AFTER};

impl World<'_> {
    pub(super) fn request(&mut self, conn: ConnId, block: u32, unless_sent: bool) {
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

    pub(super) fn cancel(&mut self, conn: ConnId, block: u32) {
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

    pub(super) fn count(&mut self, node: NodeId, messages: u64, bytes: u64) {
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
    pub(super) fn offer(&mut self, conn: ConnId) {
        let c = &mut self.conns[conn as usize];
        // Before this one has left, that one must be there: and taken in, which a node that stands still does not do.
        let there_ns = c.there_ns[c.segments as usize % c.there_ns.len()];
        let deaf_ns = self.nodes[c.puller as usize].deaf_ns;
        c.blocked = there_ns > self.now_ns.min(deaf_ns);
        if c.blocked {
            let at = there_ns.max(self.now_ns);
            return self.at(at, Event::Room(conn));
        }
        let server = c.server;
        self.network.wants(server, conn);
        self.send_on(server);
    }

    /// There is room for another segment.
    pub(super) fn room(&mut self, conn: ConnId) {
        let c = &self.conns[conn as usize];
        if c.blocked && c.sending.is_some() {
            self.offer(conn);
        }
    }

    fn send_on(&mut self, node: NodeId) {
        if let Some((conn, takes_ns)) = self.network.begin(node) {
            self.at(self.now_ns + takes_ns, Event::Left(node, conn));
        }
    }

    pub(super) fn left(&mut self, node: NodeId, conn: ConnId) {
        let now_ns = self.now_ns;
        let c = &mut self.conns[conn as usize];
        let at = self.network.end(c.server, c.puller, now_ns);
        // It broke meanwhile.
        if let Some((block, left)) = c.sending {
            let slot = c.segments as usize % c.there_ns.len();
            c.there_ns[slot] = at;
            c.segments = c.segments.wrapping_add(1);
            c.last_ns = at;
            if left == 1 {
                c.sending = None;
                let mut unsaid = std::mem::take(&mut c.unsaid);
                let server = &mut self.nodes[node as usize];
                server.sent += 1;
                server.log.sent(conn.into(), block, now_ns / 1_000_000);
                if !unsaid.is_empty() {
                    self.say(at, &unsaid, &[conn]);
                    unsaid.clear();
                    self.conns[conn as usize].unsaid = unsaid;
                }
                self.give_back(conn);
                self.ask_slot(conn);
                self.at(at, Event::Arrived(conn, block));
            } else {
                c.sending = Some((block, left - 1));
                self.offer(conn);
            }
        }
        self.send_on(node);
    }

    pub(super) fn give_back(&mut self, conn: ConnId) {
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

    pub(super) fn announce(&mut self, node: NodeId) {
        let now_ns = self.now_ns;
        let n = &mut self.nodes[node as usize];
        n.announcing = false;
        n.announced_ns = now_ns;
        let mut blocks = std::mem::take(&mut n.fresh);
        let (mut near, mut far) = std::mem::take(&mut self.to);
        for i in 0..self.nodes[node as usize].serves.len() {
            let conn = self.nodes[node as usize].serves[i];
            let c = &mut self.conns[conn as usize];
            if c.idle {
                continue;
            }
            if c.sending.is_some() {
                c.unsaid.extend(&blocks);
            } else if c.last_ns > now_ns {
                let last_ns = c.last_ns;
                self.say(last_ns, &blocks, &[conn]);
            } else if self.network.near(node, c.puller) {
                near.push(conn);
            } else {
                far.push(conn);
            }
        }
        for (to, latency_us) in [(&mut near, self.s.near_us), (&mut far, self.s.far_us)] {
            if !to.is_empty() {
                self.say(now_ns + latency_us * 1000, &blocks, to);
                to.clear();
            }
        }
        self.to = (near, far);
        blocks.clear();
        self.nodes[node as usize].fresh = blocks;
    }

    /// Announces blocks on connections of one server.
    pub(super) fn say(&mut self, at_ns: u64, blocks: &[u32], to: &[ConnId]) {
        let server = self.conns[to[0] as usize].server;
        let bytes = HAVE_BYTES + DIGEST_BYTES * blocks.len() as u64;
        self.count(server, to.len() as u64, to.len() as u64 * bytes);
        let at = self.batch(blocks, to);
        self.at(at_ns, Event::Have(at));
    }

    /// In memory that was used before, if there is any.
    pub(super) fn batch(&mut self, blocks: &[u32], to: &[ConnId]) -> u32 {
        let at = self.free_batches.pop().unwrap_or_else(|| {
            self.batches.push(Batch::default());
            self.batches.len() as u32 - 1
        });
        let batch = &mut self.batches[at as usize];
        batch.blocks.extend_from_slice(blocks);
        batch.to.extend_from_slice(to);
        at
    }
}
