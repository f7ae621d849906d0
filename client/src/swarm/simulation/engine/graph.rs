//! Who is connected to whom.

use super::{Conn, ConnId, Event, Life, Node, NodeId, REDIAL_NS, World};
use crate::swarm::{
    chooser::PeerTraits,
    simulation::{network::CREDIT_SEGMENTS, node_hash},
};
use std::collections::VecDeque;

impl World<'_> {
    /// The masters hand out the neighbours of those that are there.
    pub(super) fn repair(&mut self) {
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

    pub(super) fn dial(&mut self, puller: NodeId, server: NodeId) {
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
            there_ns: [0; CREDIT_SEGMENTS as usize],
            segments: 0,
            blocked: false,
            last_ns: 0,
            idle: false,
            corrupt: false,
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
            self.say(at, &held, &[conn]);
        }
    }

    pub(super) fn close(&mut self, conn: ConnId) {
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
}
