//! What a node does to get what it has not.

use super::{ConnId, Event, Life, NodeId, PENALTY_NS, REDIAL_NS, REQUEST_BYTES, TICK_NS, World};
use crate::swarm::{chooser::Decline, serve::ANNOUNCE_INTERVAL};

impl World<'_> {
    pub(super) fn have(&mut self, batch: u32) {
        let mut said = std::mem::take(&mut self.batches[batch as usize]);
        for conn in said.to.drain(..) {
            let c = &self.conns[conn as usize];
            let node = &mut self.nodes[c.puller as usize];
            match node.life {
                Life::Alive if c.open && !c.idle => {}
                Life::Frozen if c.open => {
                    let at = self.batch(&said.blocks, &[conn]);
                    let puller = self.conns[conn as usize].puller;
                    self.nodes[puller as usize].missed.push(Event::Have(at));
                    continue;
                }
                _ => continue,
            }
            let chooser = node.chooser.as_mut().expect("pulls");
            let (mut news, now_us) = (false, self.now_ns / 1000);
            for block in &said.blocks {
                news |= chooser.announce(conn, *block, now_us);
            }
            if news {
                self.pump(self.conns[conn as usize].puller);
            }
        }
        said.blocks.clear();
        self.batches[batch as usize] = said;
        self.free_batches.push(batch);
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

    pub(super) fn declined(&mut self, conn: ConnId, block: u32, why: Decline) {
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

    pub(super) fn arrived(&mut self, conn: ConnId, block: u32) {
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

    pub(super) fn verified(&mut self, conn: ConnId, block: u32) {
        let c = &self.conns[conn as usize];
        let (server, puller) = (c.server, c.puller);
        let node = &mut self.nodes[puller as usize];
        node.budget += 1;
        let chooser = node.chooser.as_mut().expect("pulls");
        if self.s.nodes[server as usize].corrupts {
            chooser.failed(block);
            self.report.corrupt += 1;
            let before = std::mem::replace(&mut self.conns[conn as usize].corrupt, true);
            self.report.corrupt_connections += u64::from(!before);
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
                for conn in node.pulls.values() {
                    self.conns[*conn as usize].idle = true;
                }
            }
            self.holds(puller, block);
        }
        self.pump(puller);
    }

    /// The node has a block to offer.
    pub(super) fn holds(&mut self, node: NodeId, block: u32) {
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

    pub(super) fn tick(&mut self, node: NodeId) {
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
