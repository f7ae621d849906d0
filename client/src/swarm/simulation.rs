//! Many choosers against each other, without a network: rounds of 10 ms in which every node moves so many
//! blocks up and down. Everything said or sent arrives a round later. Deterministic.

use super::{
    chooser::{Chooser, Decline, PeerTraits, hash_id},
    sent::SentLog,
};
use std::collections::{BTreeMap, VecDeque};

const ROUND_US: u64 = 10_000;
const BLOCK_SIZE: u32 = 256 << 10;

#[derive(Clone)]
struct Link {
    up: u32,
    down: u32,
}

struct World {
    blocks: u32,
    /// Node 0 is the seed.
    links: Vec<Link>,
    choosers: Vec<Option<Chooser>>,
    /// What node 0 has (it may still acquire).
    seed_has: u32,
    seed_rate: u32,
    logs: Vec<SentLog>,
    /// Per server, per puller: requests in order, `(block)`.
    queues: Vec<BTreeMap<usize, VecDeque<u32>>>,
    turn: Vec<usize>,
    /// Sent and not yet taken off the receiver's link.
    arriving: Vec<VecDeque<(usize, u32)>>,
    announcements: Vec<(usize, u32)>,
    sent: Vec<Vec<u32>>,
    declines: u64,
    received: Vec<u32>,
    done_at: Vec<Option<u64>>,
    dead: Vec<bool>,
    round: u64,
}

impl World {
    fn new(nodes: usize, blocks: u32, seed_rate: u32, link: Link) -> Self {
        let mut choosers = vec![None];
        for n in 1..=nodes {
            let mut c = Chooser::new(hash_id(&format!("n{n}")), blocks, BLOCK_SIZE);
            for other in (0..=nodes).filter(|o| *o != n) {
                let hash = hash_id(&format!("n{other}"));
                c.add_peer(
                    other as u32,
                    PeerTraits {
                        hash,
                        seed: other == 0,
                        near: true,
                    },
                );
            }
            choosers.push(Some(c));
        }
        let all = nodes + 1;
        let mut logs: Vec<SentLog> = (0..all).map(|_| SentLog::default()).collect();
        for log in &mut logs {
            (0..all).for_each(|n| log.connect(n as u64));
        }
        Self {
            blocks,
            links: vec![link; all],
            choosers,
            seed_has: 0,
            seed_rate,
            logs,
            queues: vec![BTreeMap::new(); all],
            turn: vec![0; all],
            arriving: vec![VecDeque::new(); all],
            announcements: Vec::new(),
            sent: vec![vec![0; blocks as usize]; all],
            declines: 0,
            received: vec![0; all],
            done_at: vec![None; all],
            dead: vec![false; all],
            round: 0,
        }
    }

    fn kill(&mut self, node: usize) {
        self.dead[node] = true;
        self.queues[node].clear();
        self.arriving[node].clear();
        for log in &mut self.logs {
            log.disconnect(node as u64);
        }
        for queues in &mut self.queues {
            queues.remove(&node);
        }
        for arriving in &mut self.arriving {
            arriving.retain(|(from, _)| *from != node);
        }
        for c in self.choosers.iter_mut().flatten() {
            c.remove_peer(node as u32);
        }
    }

    fn step(&mut self) {
        let now = self.round * ROUND_US;
        // What was said a round ago.
        for (who, block) in std::mem::take(&mut self.announcements) {
            for (n, c) in self.choosers.iter_mut().enumerate() {
                if let Some(c) = c
                    && n != who
                    && !self.dead[who]
                {
                    c.announce(who as u32, block);
                }
            }
        }
        let fresh = self.seed_has..self.blocks.min(self.seed_has + self.seed_rate);
        self.announcements.extend(fresh.clone().map(|b| (0, b)));
        self.seed_has = fresh.end;
        // Blocks come off the links.
        for n in 1..self.links.len() {
            for _ in 0..self.links[n].down {
                let Some((from, block)) = self.arriving[n].pop_front() else {
                    break;
                };
                self.received[n] += 1;
                let c = self.choosers[n].as_mut().unwrap();
                let delivery = c.delivered(from as u32, block, BLOCK_SIZE.into(), now);
                if delivery.wanted {
                    c.obtained(block);
                    self.announcements.push((n, block));
                }
                for loser in delivery.cancel {
                    self.cancel(n, loser as usize, block);
                }
            }
            let c = self.choosers[n].as_mut().unwrap();
            if c.whole() && self.done_at[n].is_none() {
                self.done_at[n] = Some(self.round);
            }
        }
        // Requests.
        for n in 1..self.links.len() {
            if self.dead[n] {
                continue;
            }
            let stalls = self.choosers[n].as_mut().unwrap().tick(now);
            for stall in stalls {
                for block in stall.cancel {
                    self.cancel(n, stall.peer as usize, block);
                }
                if stall.drop {
                    self.choosers[n].as_mut().unwrap().remove_peer(stall.peer);
                }
            }
            while let Some(pick) = self.choosers[n].as_mut().unwrap().next(now) {
                let server = pick.peer as usize;
                if self.logs[server].admit(n as u64, pick.block, pick.unless_sent, now / 1000) {
                    self.queues[server].entry(n).or_default().push_back(pick.block);
                } else {
                    self.declines += 1;
                    self.choosers[n].as_mut().unwrap().declined(
                        pick.peer,
                        pick.block,
                        Decline::SentElsewhere,
                        now,
                    );
                }
            }
        }
        // Uploads, pullers taking turns block by block.
        for server in 0..self.links.len() {
            if self.dead[server] {
                continue;
            }
            for _ in 0..self.links[server].up {
                let turn = self.turn[server];
                let mut order = self.queues[server]
                    .iter()
                    .filter(|(_, q)| !q.is_empty())
                    .map(|(n, _)| *n);
                let first = order.next();
                let Some(first) = first else { break };
                let next = std::iter::once(first)
                    .chain(order)
                    .find(|n| *n > turn)
                    .unwrap_or(first);
                self.turn[server] = next;
                let block = self.queues[server].get_mut(&next).unwrap().pop_front().unwrap();
                self.logs[server].sent(next as u64, block, now / 1000);
                self.sent[server][block as usize] += 1;
                self.arriving[next].push_back((server, block));
            }
        }
        self.round += 1;
    }

    fn cancel(&mut self, puller: usize, server: usize, block: u32) {
        let now = self.round * ROUND_US;
        let Some(queue) = self.queues[server].get_mut(&puller) else {
            return;
        };
        let Some(at) = queue.iter().position(|b| *b == block) else {
            return;
        };
        queue.remove(at);
        self.logs[server].dropped(puller as u64, block);
        self.choosers[puller]
            .as_mut()
            .unwrap()
            .declined(server as u32, block, Decline::Canceled, now);
    }

    fn alive(&self) -> impl Iterator<Item = usize> + '_ {
        (1..self.links.len()).filter(|n| !self.dead[*n])
    }

    fn run(&mut self, limit: u64) {
        while self.alive().any(|n| self.done_at[n].is_none()) {
            assert!(
                self.round < limit,
                "not done after {limit} rounds: {}",
                self.summary()
            );
            self.step();
        }
    }

    fn seed_copies(&self) -> f64 {
        self.sent[0].iter().sum::<u32>() as f64 / f64::from(self.blocks)
    }

    fn summary(&self) -> String {
        let done: Vec<u64> = self.alive().filter_map(|n| self.done_at[n]).collect();
        let most = self.alive().map(|n| self.received[n]).max().unwrap_or(0);
        format!(
            "{} of {} done, rounds {:?}..{:?}, seed copies {:.3}, most received {:.3}, declines {}",
            done.len(),
            self.alive().count(),
            done.iter().min(),
            done.iter().max(),
            self.seed_copies(),
            f64::from(most) / f64::from(self.blocks),
            self.declines,
        )
    }

    fn last(&self) -> u64 {
        self.alive().map(|n| self.done_at[n].unwrap()).max().unwrap()
    }
}

#[test]
fn fifty_nodes_one_copy_out_of_the_seed() {
    let mut w = World::new(50, 2000, u32::MAX >> 1, Link { up: 4, down: 4 });
    w.run(2000);
    println!("{}", w.summary());
    let bound = 2000 / 4;
    assert!(w.seed_copies() <= 1.1, "{}", w.summary());
    assert!(w.sent[0].iter().all(|n| *n >= 1));
    assert!(
        w.last() <= bound * 5 / 4,
        "the links allow {bound} rounds: {}",
        w.summary()
    );
    let first = w.alive().map(|n| w.done_at[n].unwrap()).min().unwrap();
    assert!(w.last() <= first * 5 / 4, "somebody starves: {}", w.summary());
    for n in w.alive() {
        assert!(
            w.received[n] <= 2000 * 102 / 100,
            "node {n} received {} blocks",
            w.received[n]
        );
    }
}

#[test]
fn a_seed_that_still_acquires_is_overlapped() {
    // Half the link's speed: the followers are done shortly after the seed is.
    let mut w = World::new(8, 1000, 2, Link { up: 4, down: 4 });
    w.run(3000);
    println!("{}", w.summary());
    assert!(
        w.last() <= 500 * 11 / 10,
        "the seed takes 500 rounds: {}",
        w.summary()
    );
    assert!(w.seed_copies() <= 1.1, "{}", w.summary());
}

#[test]
fn a_seed_with_four_times_the_link_still_sends_one_copy() {
    let mut w = World::new(8, 1000, u32::MAX >> 1, Link { up: 4, down: 4 });
    w.links[0].up = 16;
    w.run(3000);
    println!("{}", w.summary());
    assert!(w.seed_copies() <= 1.15, "{}", w.summary());
    assert!(w.last() <= 250 * 5 / 4, "{}", w.summary());
}

#[test]
fn slow_nodes_slow_down_themselves_only() {
    let mut w = World::new(8, 1000, u32::MAX >> 1, Link { up: 8, down: 8 });
    for slow in [3, 6] {
        w.links[slow] = Link { up: 2, down: 2 };
    }
    w.run(3000);
    println!("{}", w.summary());
    let fast = w
        .alive()
        .filter(|n| ![3, 6].contains(n))
        .map(|n| w.done_at[n].unwrap())
        .max()
        .unwrap();
    assert!(
        fast <= 125 * 5 / 4,
        "the fast ones took {fast} rounds of 125: {}",
        w.summary()
    );
}

#[test]
fn the_dead_do_not_stop_the_rest() {
    let mut w = World::new(40, 1000, u32::MAX >> 1, Link { up: 4, down: 4 });
    for round in 0..100 {
        w.step();
        if round % 25 == 24 {
            w.kill(1 + round as usize / 3);
        }
    }
    // The seed too, once every block has left it.
    while w.sent[0].contains(&0) {
        w.step();
    }
    (0..20).for_each(|_| w.step());
    w.kill(0);
    w.run(3000);
    println!("{}", w.summary());
    assert!(w.last() <= 250 * 14 / 10, "{}", w.summary());
}
