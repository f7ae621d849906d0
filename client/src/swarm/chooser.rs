//! Which block to ask of whom next. Pure: the caller brings the clock (microseconds from any start) and does
//! the I/O; the simulator in the tests drives the same code.
//!
//! The rules, in the order in which they bite:
//! - A block is asked of a seed only while no other peer here has it: one copy out of the seed before any
//!   second. Which receiver takes which block of those is settled by rendezvous hashing among the receivers, so
//!   that they ask the seed for different ones; when the own share is used up they take from the others'
//!   (with `unless_sent`, so that the seed declines what is on its way to somebody already), but not before the
//!   other had [`choice::SHARE_US`] to ask for it.
//! - Who is far behind its relays, and gets all from them that it can take in, leaves first copies to others.
//! - A block that the rack has is not asked of another rack. One that it has not is brought in by one of its
//!   gateways (those of its members that have peers elsewhere; by rendezvous hashing again), unless it is a first
//!   copy, which whoever gets it brings in.
//! - Rarest first, ties in an order of this node's own, so that nodes differ.
//! - Each peer has a window of outstanding requests which follows the bandwidth-delay product; it is one block
//!   until a block of that peer was verified.
//! - Starved (nothing to ask by these rules although somebody has what is missing, and little outstanding, for
//!   [`choice::STARVED_US`]): the first two rules are suspended.
//! - Endgame: when everything missing is asked for, the last blocks are asked of a second, idle peer if the
//!   first is late; at most 1 % of the blocks (but [`choice::ENDGAME_MIN`] of them) are asked for twice.
//! - A peer that owes and delivers nothing is stalled: others are asked instead, and it counts as a holder
//!   again when it delivers. Stalled for long, it is to be dropped.
//!
//! Not guaranteed: global rarest-first (a node knows its own peers); for more than `SAMPLE` candidates the
//! rarest of a sample is taken, each time of another one.

mod choice;
mod intake;
mod pace;
mod shares;
mod small_map;
mod stalls;
mod types;

use super::bits::Bits;
pub use super::words::PeerIndex;
use intake::Intake;
pub use mooncake_proto::mesh::hash_id;
use pace::{Answer, Pace, WINDOW_MIN};
use shares::Shares;
use small_map::SmallMap;
use std::collections::{HashMap, VecDeque};
pub use types::{Decline, Delivery, PeerTraits, Pick, Stall};

/// Most bytes outstanding at one peer: 10 Gbit/s over 25 ms.
pub const WINDOW_MAX_BYTES: u64 = 32 << 20;
/// How long a block that a peer declined as `sent elsewhere` is not asked of it again: it usually is
/// announced by the other one much earlier.
const DEFER_US: u64 = 300_000;
/// How long a busy peer is left alone.
const BUSY_US: u64 = 200_000;

#[derive(Clone, Copy, Debug)]
struct Asked {
    at_us: u64,
    /// How many were outstanding at the peer before.
    depth: usize,
    canceled: bool,
}

#[derive(Debug)]
struct Peer {
    traits: PeerTraits,
    has: Bits,
    asked: SmallMap<Asked>,
    deferred: HashMap<u32, u64>,
    busy_until_us: u64,
    pace: Pace,
    last_delivery_us: u64,
    stalled_since_us: Option<u64>,
    /// Blocks of it that are being verified: a window is not filled again before it is known to be good.
    verifying: u32,
    /// A block of it was verified.
    trusted: bool,
}

impl Peer {
    /// Whether it may be asked for one more. A peer of which nothing was verified yet gets one block to prove
    /// itself, unless it is the seed, whose word is all there is anyway.
    fn room(&self, now_us: u64) -> bool {
        let window = if self.trusted || self.traits.seed {
            self.pace.window()
        } else {
            1
        };
        self.stalled_since_us.is_none()
            && now_us >= self.busy_until_us
            && self.asked.len() as u32 + self.verifying < window
    }
}

/// How many of the peers that are not stalled have a block. In one piece: an announcement changes all three.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(align(8))]
struct Holders {
    all: u16,
    /// Those that are not seeds.
    relays: u16,
    /// Of these, those in the own rack.
    near: u16,
}

impl Holders {
    fn count(&mut self, traits: &PeerTraits, up: bool) {
        let add = |n: &mut u16, counts: bool| match up {
            true => *n += u16::from(counts),
            false => *n -= u16::from(counts),
        };
        add(&mut self.all, true);
        add(&mut self.relays, !traits.seed);
        add(&mut self.near, !traits.seed && traits.near);
    }
}

/// The state of one fetch.
#[derive(Debug)]
pub struct Chooser {
    node: u64,
    block_size: u64,
    have: Bits,
    /// Delivered, being verified.
    verifying: Bits,
    /// Whose blocks these are.
    verifying_of: SmallMap<PeerIndex>,
    /// Neither held nor being verified nor asked of anybody.
    wanted: Bits,
    peers: SmallMap<Peer>,
    /// By block; kept for what is not held only, for that is what is chosen from.
    holders: Vec<Holders>,
    /// At whom a block is outstanding (canceled requests do not count).
    asked: SmallMap<Vec<PeerIndex>>,
    /// Peers that are no seeds.
    receivers: usize,
    /// Which first copies of a seed are this node's, among all receivers that it knows.
    shares: Shares,
    /// Blocks that a seed has had for less than [`choice::SHARE_US`], and since when, in order.
    fresh: Bits,
    fresh_since: VecDeque<(u64, u32)>,
    /// What it brings into its rack, among the gateways.
    imports: Shares,
    intake: Intake,
    /// Choices so far.
    choices: u64,
    starved_since_us: Option<u64>,
    duplicates: u32,
}

impl Chooser {
    /// For an artifact of `blocks` blocks of `block_size` bytes, on the node with this [`hash_id`].
    pub fn new(node: u64, blocks: u32, block_size: u32) -> Self {
        let mut wanted = Bits::new(blocks);
        (0..blocks).for_each(|b| {
            wanted.set(b);
        });
        Self {
            node,
            block_size: block_size.into(),
            have: Bits::new(blocks),
            verifying: Bits::new(blocks),
            verifying_of: SmallMap::new(),
            wanted,
            peers: SmallMap::new(),
            holders: vec![Holders::default(); blocks as usize],
            asked: SmallMap::new(),
            receivers: 0,
            shares: Shares::new(node, blocks),
            fresh: Bits::new(blocks),
            fresh_since: VecDeque::new(),
            imports: Shares::new(node, blocks),
            intake: Intake::default(),
            choices: 0,
            starved_since_us: None,
            duplicates: 0,
        }
    }

    /// What is held.
    pub fn have(&self) -> &Bits {
        &self.have
    }

    /// How many blocks are neither held nor being verified.
    pub fn missing(&self) -> u32 {
        self.have.len() - self.have.ones() - self.verifying.ones()
    }

    /// Whether every block is held.
    pub fn whole(&self) -> bool {
        self.have.ones() == self.have.len()
    }

    /// How many peers there are.
    pub fn peer_count(&self) -> usize {
        self.peers.len()
    }

    /// Blocks asked of `peer` and not answered, canceled ones included.
    pub fn outstanding(&self, peer: PeerIndex) -> usize {
        self.peers.get(&peer).map_or(0, |p| p.asked.len())
    }

    /// A peer is connected. It has nothing until it says so.
    pub fn add_peer(&mut self, peer: PeerIndex, traits: PeerTraits) {
        let fresh = Peer {
            traits,
            has: Bits::new(self.have.len()),
            asked: SmallMap::new(),
            deferred: HashMap::new(),
            busy_until_us: 0,
            pace: Pace::new(self.block_size, self.window_max()),
            last_delivery_us: 0,
            stalled_since_us: None,
            verifying: 0,
            trusted: false,
        };
        assert!(
            self.peers.insert(peer, fresh).is_none(),
            "peer {peer} is there already"
        );
        self.receivers += usize::from(!traits.seed);
        self.shares.stale();
        self.imports.stale();
    }

    /// A peer is gone; what was asked of it is wanted again.
    pub fn remove_peer(&mut self, peer: PeerIndex) {
        let Some(gone) = self.peers.get(&peer) else { return };
        if gone.stalled_since_us.is_none() {
            self.count(peer, false);
        }
        let gone = self.peers.remove(&peer).expect("just seen");
        for (block, asked) in gone.asked {
            if !asked.canceled {
                self.release(peer, block);
            }
        }
        self.receivers -= usize::from(!gone.traits.seed);
        self.shares.stale();
        self.imports.stale();
    }

    /// A peer can be asked for a block. Whether that is news of a block that is asked of nobody: there may be something
    /// to choose that was not there before.
    pub fn announce(&mut self, peer: PeerIndex, block: u32, now_us: u64) -> bool {
        let Some(p) = self.peers.get_mut(&peer) else {
            return false;
        };
        let (news, traits, counts) = (p.has.set(block), p.traits, p.stalled_since_us.is_none());
        if news && counts {
            self.count_one(&traits, block, true);
        }
        if news && traits.seed && self.fresh.set(block) {
            self.fresh_since.push_back((now_us, block));
        }
        news && self.wanted.get(block)
    }

    /// A peer cannot be asked for a block any more. `true`: it was asked, and what it would send is of no use;
    /// the request is to be canceled.
    pub fn retract(&mut self, peer: PeerIndex, block: u32) -> bool {
        let Some(p) = self.peers.get_mut(&peer) else {
            return false;
        };
        let (traits, stalled) = (p.traits, p.stalled_since_us.is_some());
        let standing = p.asked.get_mut(&block).filter(|a| !a.canceled);
        let released = standing.map(|a| a.canceled = true).is_some();
        if p.has.clear(block) && !stalled {
            self.count_one(&traits, block, false);
        }
        if released {
            self.release(peer, block);
        }
        released
    }

    /// A peer lost everything it had.
    pub fn retract_all(&mut self, peer: PeerIndex) {
        let Some(p) = self.peers.get(&peer) else { return };
        let blocks: Vec<u32> = p.has.iter().collect();
        for block in blocks {
            // Nothing to cancel: it declines what it has not.
            self.retract(peer, block);
        }
    }

    /// A block is held: verified, or found on the disk.
    pub fn obtained(&mut self, block: u32) {
        self.verified(block, true);
        self.have.set(block);
        self.verifying.clear(block);
        self.wanted.clear(block);
    }

    /// A delivered block was not right or could not be kept.
    pub fn failed(&mut self, block: u32) {
        self.verified(block, false);
        self.verifying.clear(block);
        self.want_if_idle(block);
    }

    /// A held block is not held any more.
    pub fn lost(&mut self, block: u32) {
        if self.have.clear(block) {
            self.recount(block);
        }
        self.want_if_idle(block);
    }

    fn verified(&mut self, block: u32, good: bool) {
        if let Some(peer) = self.verifying_of.remove(&block)
            && let Some(p) = self.peers.get_mut(&peer)
        {
            p.verifying -= 1;
            p.trusted |= good;
        }
    }

    fn want_if_idle(&mut self, block: u32) {
        if !self.have.get(block) && !self.verifying.get(block) && !self.asked.contains_key(&block) {
            self.wanted.set(block);
        }
    }

    /// The request at `peer` does not stand any more.
    fn release(&mut self, peer: PeerIndex, block: u32) {
        if let Some(list) = self.asked.get_mut(&block) {
            list.retain(|p| *p != peer);
            if list.is_empty() {
                self.asked.remove(&block);
            }
        }
        self.want_if_idle(block);
    }

    fn count_one(&mut self, traits: &PeerTraits, block: u32, up: bool) {
        if !self.have.get(block) {
            self.holders[block as usize].count(traits, up);
        }
    }

    fn count(&mut self, peer: PeerIndex, up: bool) {
        let p = &self.peers[&peer];
        for block in p.has.iter().filter(|b| !self.have.get(*b)) {
            self.holders[block as usize].count(&p.traits, up);
        }
    }

    /// Anew, after the block was held.
    fn recount(&mut self, block: u32) {
        let mut holders = Holders::default();
        let live = self.peers.values().filter(|p| p.stalled_since_us.is_none());
        live.filter(|p| p.has.get(block))
            .for_each(|p| holders.count(&p.traits, true));
        self.holders[block as usize] = holders;
    }

    fn window_max(&self) -> u32 {
        ((WINDOW_MAX_BYTES / self.block_size) as u32).max(WINDOW_MIN)
    }

    /// A block arrived from `peer`, in answer to a request.
    pub fn delivered(&mut self, peer: PeerIndex, block: u32, bytes: u64, now_us: u64) -> Delivery {
        self.answered(peer, block, Some(bytes), now_us);
        if let Some(p) = self.peers.get(&peer) {
            self.intake.delivered(bytes, !p.traits.seed, now_us);
        }
        if self.have.get(block) || self.verifying.get(block) {
            return Delivery {
                wanted: false,
                cancel: vec![],
            };
        }
        self.verifying.set(block);
        self.wanted.clear(block);
        if let Some(p) = self.peers.get_mut(&peer) {
            p.verifying += 1;
            self.verifying_of.insert(block, peer);
        }
        let cancel = self.asked.remove(&block).unwrap_or_default();
        for other in &cancel {
            if let Some(asked) = self.peers.get_mut(other).and_then(|p| p.asked.get_mut(&block)) {
                asked.canceled = true;
            }
        }
        Delivery { wanted: true, cancel }
    }

    /// A request brought no block.
    pub fn declined(&mut self, peer: PeerIndex, block: u32, why: Decline, now_us: u64) {
        self.answered(peer, block, None, now_us);
        match why {
            Decline::NotHeld => {
                self.retract(peer, block);
            }
            Decline::Busy => {
                if let Some(p) = self.peers.get_mut(&peer) {
                    p.busy_until_us = now_us + BUSY_US;
                    p.pace.halve();
                }
            }
            Decline::SentElsewhere => {
                if let Some(p) = self.peers.get_mut(&peer) {
                    p.deferred.retain(|_, until| *until > now_us);
                    p.deferred.insert(block, now_us + DEFER_US);
                }
            }
            Decline::Canceled => {}
        }
    }

    fn answered(&mut self, peer: PeerIndex, block: u32, bytes: Option<u64>, now_us: u64) {
        let Some(p) = self.peers.get_mut(&peer) else {
            return;
        };
        let Some(asked) = p.asked.remove(&block) else {
            return;
        };
        p.last_delivery_us = now_us;
        if let Some(bytes) = bytes {
            let answer = Answer {
                bytes,
                asked_at_us: asked.at_us,
                depth: asked.depth,
                outstanding: p.asked.len(),
            };
            p.pace.answered(answer, now_us);
        }
        let woke = p.stalled_since_us.take().is_some();
        if woke {
            self.count(peer, true);
        }
        if !asked.canceled {
            self.release(peer, block);
        }
    }

    /// Duplicate requests so far.
    #[cfg(test)]
    pub fn duplicates(&self) -> u32 {
        self.duplicates
    }
}

#[cfg(test)]
#[path = "chooser_tests.rs"]
mod tests;
