//! Who owes and does not deliver.

use super::{Chooser, PeerIndex, Stall};

/// How long a peer may owe without delivering, at least, before it counts as stalled.
pub(super) const STALL_US: u64 = 3_000_000;
/// Stalled for this long: drop it.
pub(super) const STALL_DROP_US: u64 = 15_000_000;
/// Without any answer for this long: drop it, also if nobody else has what it was asked for. More than the slowest
/// sending of a block that its own end bears ([`crate::transport::block_time`]), so that who is only slow is not left.
pub(super) const SILENT_DROP_US: u64 = 30_000_000;

impl Chooser {
    /// To be called a few times per second: finds peers that owe and do not deliver.
    pub fn tick(&mut self, now_us: u64) -> Vec<Stall> {
        let mut stalls = Vec::new();
        let peers: Vec<PeerIndex> = self.peers.keys().copied().collect();
        for peer in peers {
            let p = &self.peers[&peer];
            if let Some(since) = p.stalled_since_us {
                if now_us >= since + STALL_DROP_US {
                    stalls.push(Stall {
                        peer,
                        cancel: vec![],
                        drop: true,
                    });
                }
                continue;
            }
            let Some(oldest) = p.asked.values().map(|a| a.at_us).min() else {
                continue;
            };
            let usual = p.pace.base_latency_us().map_or(0, |base| (base * 8.0) as u64);
            let silent_us = now_us.saturating_sub(oldest.max(p.last_delivery_us));
            if silent_us < STALL_US.max(usual) {
                continue;
            }
            // Where nobody else has a block, waiting is all there is; where every request is canceled, it owes
            // an answer all the same.
            let standing = p.asked.iter().filter(|(_, a)| !a.canceled).map(|(b, _)| *b);
            let standing: Vec<u32> = standing.collect();
            let others_have = |b: &u32| self.have.get(*b) || self.holders[*b as usize].all > 1;
            let cancel: Vec<u32> = standing.iter().copied().filter(others_have).collect();
            if cancel.is_empty() && !standing.is_empty() {
                // But not for ever: a connection that brings nothing keeps its part of the budget from others, and
                // another one to the same peer may do better.
                if silent_us >= SILENT_DROP_US.max(usual) {
                    stalls.push(Stall {
                        peer,
                        cancel,
                        drop: true,
                    });
                }
                continue;
            }
            self.count(peer, false);
            let p = self.peers.get_mut(&peer).expect("just seen");
            p.stalled_since_us = Some(now_us);
            p.pace.reset();
            for block in &cancel {
                p.asked.get_mut(block).expect("standing").canceled = true;
            }
            for block in &cancel {
                self.release(peer, *block);
            }
            stalls.push(Stall {
                peer,
                cancel,
                drop: false,
            });
        }
        stalls
    }
}
