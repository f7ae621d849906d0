//! Which block to ask of whom next. Pure: the caller brings the clock (microseconds from any start) and does
//! the I/O; the simulator in the tests drives the same code.
//!
//! The rules, in the order in which they bite:
//! - A block is asked of a seed only while no other peer here has it: one copy out of the seed before any
//!   second. Which receiver takes which block of those is settled by rendezvous hashing among the receivers, so
//!   that they ask the seed for different ones; when the own share is used up they take from the others'
//!   (with `unless_sent`, so that the seed declines what is on its way to somebody already), but not before the
//!   other had [`SHARE_US`] to ask for it.
//! - A block that the rack has is not asked of another rack. One that it has not is brought in by one of its
//!   gateways (those of its members that have peers elsewhere; by rendezvous hashing again), unless it is a first
//!   copy, which whoever gets it brings in.
//! - Rarest first, ties in an order of this node's own, so that nodes differ.
//! - Each peer has a window of outstanding requests which follows the bandwidth-delay product; it is one block
//!   until a block of that peer was verified.
//! - Starved (nothing to ask by these rules although somebody has what is missing, and little outstanding, for
//!   [`STARVED_US`]): the first two rules are suspended.
//! - Endgame: when everything missing is asked for, the last blocks are asked of a second, idle peer if the
//!   first is late; at most 1 % of the blocks (but [`ENDGAME_MIN`] of them) are asked for twice.
//! - A peer that owes and delivers nothing is stalled: others are asked instead, and it counts as a holder
//!   again when it delivers. Stalled for long, it is to be dropped.
//!
//! Not guaranteed: global rarest-first (a node knows its own peers); for more than `SAMPLE` candidates the
//! rarest of a sample is taken, each time of another one.

mod pace;
mod shares;
mod small_map;
mod types;

use super::bits::{Bits, ones};
pub use super::words::PeerIndex;
use mooncake_proto::mesh::GATEWAYS;
pub use mooncake_proto::mesh::hash_id;
use pace::{Answer, Pace, WINDOW_MIN};
use shares::{Shares, weight};
use small_map::SmallMap;
use std::collections::{HashMap, VecDeque};
pub use types::{Decline, Delivery, PeerTraits, Pick, Stall};

/// Most bytes outstanding at one peer: 10 Gbit/s over 25 ms.
pub const WINDOW_MAX_BYTES: u64 = 32 << 20;
/// How long a block that a peer declined as `sent elsewhere` is not asked of it again: it usually is
/// announced by the other one much earlier.
const DEFER_US: u64 = 300_000;
/// How long the receiver whose share a block is has to ask the seed for it, before others do: a few announcements and
/// requests. While a source is slower than the links, whoever hears first would otherwise get every first copy.
const SHARE_US: u64 = 100_000;
/// How long a busy peer is left alone.
const BUSY_US: u64 = 200_000;
/// How long a node does nearly nothing before it may ask a seed for second copies.
const STARVED_US: u64 = 250_000;
/// How long a peer may owe without delivering, at least, before it counts as stalled.
const STALL_US: u64 = 3_000_000;
/// Stalled for this long: drop it.
const STALL_DROP_US: u64 = 15_000_000;
/// Without any answer for this long: drop it, also if nobody else has what it was asked for. More than the slowest
/// sending of a block that its own end bears ([`crate::transport::block_time`]), so that who is only slow is not left.
const SILENT_DROP_US: u64 = 30_000_000;
/// How late a block must be, at least, before endgame asks a second peer.
const ENDGAME_AGE_US: u64 = 300_000;
/// Missing blocks at which endgame begins, at most.
const ENDGAME_BLOCKS: u32 = 64;
/// Duplicates that are allowed whatever the number of blocks.
const ENDGAME_MIN: u32 = 4;
/// Candidates looked at for one choice: exact rarest-first for artifacts of the usual 2,000 blocks.
/// Beyond, the rarest of so many is among the rarest hundredth, which is as good.
const SAMPLE: u32 = 512;

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

/// What makes a block the better choice at a peer, lowest first: own share, rarity, own order.
type Score = (bool, u16, u64);

/// How strictly the rules are taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Strict,
    Starved,
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
    /// Blocks that a seed has had for less than [`SHARE_US`], and since when, in order.
    fresh: Bits,
    fresh_since: VecDeque<(u64, u32)>,
    /// What it brings into its rack, among the gateways.
    imports: Shares,
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

    /// The next request to send, noted as sent; `None`: nothing to ask for at the moment.
    pub fn next(&mut self, now_us: u64) -> Option<Pick> {
        if self.missing() == 0 {
            return None;
        }
        let pick = if self.wanted.ones() == 0 {
            self.endgame(now_us)
        } else if let Some(pick) = self.choose(now_us, Mode::Strict) {
            self.starved_since_us = None;
            Some(pick)
        } else {
            self.starved(now_us)
        };
        if let Some(pick) = pick {
            let p = self.peers.get_mut(&pick.peer).expect("chosen among the peers");
            if p.asked.is_empty() {
                p.pace.begins(now_us);
            }
            let depth = p.asked.len();
            p.asked.insert(
                pick.block,
                Asked {
                    at_us: now_us,
                    depth,
                    canceled: false,
                },
            );
            match self.asked.get_mut(&pick.block) {
                Some(list) => list.push(pick.peer),
                None => drop(self.asked.insert(pick.block, vec![pick.peer])),
            }
            self.wanted.clear(pick.block);
        }
        pick
    }

    /// By the rules there is nothing to ask for.
    fn starved(&mut self, now_us: u64) -> Option<Pick> {
        if self.asked.len() >= WINDOW_MIN as usize {
            return None;
        }
        // Who waits for what nobody has is not helped by a second copy.
        let Some(pick) = self.choose(now_us, Mode::Starved) else {
            self.starved_since_us = None;
            return None;
        };
        let since = *self.starved_since_us.get_or_insert(now_us);
        (now_us >= since + STARVED_US).then_some(pick)
    }

    fn choose(&mut self, now_us: u64, mode: Mode) -> Option<Pick> {
        self.refresh_shares();
        self.choices += 1;
        while let Some((since_us, block)) = self.fresh_since.front().copied()
            && now_us >= since_us + SHARE_US
        {
            self.fresh_since.pop_front();
            self.fresh.clear(block);
        }
        // The best peer mostly has something: the order of the others is not worth a list.
        let mut tried = None;
        loop {
            let open = self
                .peers
                .iter()
                .filter(|(_, p)| p.room(now_us) && p.has.ones() > 0);
            let ranked = open.map(|(i, p)| (self.preference(*i, p, mode), *i));
            let next = ranked.filter(|r| tried.is_none_or(|t| *r > t)).min()?;
            if let Some(pick) = self.best_of(next.1, now_us, mode) {
                return Some(pick);
            }
            tried = Some(next);
        }
    }

    /// Whom to ask before whom, lowest first.
    fn preference(&self, peer: PeerIndex, p: &Peer, mode: Mode) -> (u8, u32, u64) {
        // What this node brings in, from a seed or from another rack, is what others wait for. In need, those come
        // last.
        let class = match (mode, p.traits.seed, p.traits.near) {
            (Mode::Strict, true, _) => 0,
            (Mode::Strict, false, false) => 1,
            (Mode::Strict, false, true) => 2,
            (Mode::Starved, false, true) => 3,
            (Mode::Starved, false, false) => 4,
            (Mode::Starved, true, _) => 5,
        };
        let load = p.asked.len() as u32 * 1024 / p.pace.window();
        (class, load, weight(self.node, peer))
    }

    /// Whose is what, among those that are there now.
    fn refresh_shares(&mut self) {
        let (peers, node) = (&self.peers, self.node);
        let receivers = || peers.values().map(|p| p.traits).filter(|t| !t.seed);
        let and_this_one = |mut hashes: Vec<u64>| {
            hashes.push(node);
            hashes
        };
        self.shares
            .refresh(|| and_this_one(receivers().map(|t| t.hash).collect()));
        self.imports.refresh(|| {
            // The gateways of a rack are those of its members with the lowest hashes (`mooncake_proto::mesh`), and
            // they know each other.
            let near = receivers().filter(|t| t.near).map(|t| t.hash);
            let mut rack = and_this_one(near.collect());
            rack.sort_unstable();
            rack.truncate(GATEWAYS);
            rack
        });
    }

    fn best_of(&self, peer: PeerIndex, now_us: u64, mode: Mode) -> Option<Pick> {
        let p = &self.peers[&peer];
        let strict = mode == Mode::Strict;
        let words = self.wanted.words();
        let start = (weight(self.node, self.choices as u32) % words as u64) as usize;
        let mut looked_at = 0;
        let mut best: Option<(Score, u32)> = None;
        for i in 0..words {
            let w = if start + i < words {
                start + i
            } else {
                start + i - words
            };
            for bit in ones(self.wanted.word(w) & p.has.word(w)) {
                let block = w as u32 * 64 + bit;
                let holders = self.holders[block as usize];
                let first = holders.relays == 0;
                if strict {
                    let elsewhere = p.traits.seed && !first;
                    let nearer = !p.traits.near && holders.near > 0;
                    let not_my_import = !p.traits.near && !first && !self.imports.owns(block);
                    let anothers = p.traits.seed && self.fresh.get(block) && !self.shares.owns(block);
                    if elsewhere || nearer || not_my_import || anothers {
                        continue;
                    }
                    if !p.deferred.is_empty() && p.deferred.get(&block).is_some_and(|until| *until > now_us) {
                        continue;
                    }
                }
                looked_at += 1;
                let not_mine = p.traits.seed && !self.shares.owns(block);
                let rough = (not_mine, holders.all);
                if best.is_some_and(|((not_mine, all, _), _)| rough > (not_mine, all)) {
                    continue;
                }
                let score = (not_mine, holders.all, weight(self.node, block));
                // Canceled there and not answered yet: a second request would make two of one answer.
                if best.is_none_or(|(s, _)| score < s) && !p.asked.contains_key(&block) {
                    best = Some((score, block));
                }
            }
            if looked_at >= SAMPLE {
                break;
            }
        }
        let (_, block) = best?;
        // Of a relay no such thing is asked: it is one of many, and those who ask it do not all know each other.
        let first_copy = p.traits.seed && self.holders[block as usize].relays == 0;
        let unless_sent = strict && first_copy && self.receivers > 0;
        Some(Pick {
            peer,
            block,
            unless_sent,
        })
    }

    /// Everything missing is asked for: ask a second, idle peer for what is late.
    fn endgame(&mut self, now_us: u64) -> Option<Pick> {
        let allowed = (self.have.len() / 100).max(ENDGAME_MIN);
        if self.missing() > ENDGAME_BLOCKS || self.duplicates >= allowed {
            return None;
        }
        let mut late: Vec<_> = self
            .asked
            .iter()
            .filter(|(_, at)| at.len() == 1)
            .filter_map(|(block, at)| Some((self.peers.get(&at[0])?.asked.get(block)?.at_us, *block, at[0])))
            .filter(|(at_us, ..)| now_us >= at_us + ENDGAME_AGE_US)
            .collect();
        late.sort_unstable();
        for (_, block, slow) in late {
            let idle = |(i, p): &(&PeerIndex, &Peer)| {
                **i != slow && p.asked.is_empty() && p.room(now_us) && p.has.get(block)
            };
            let peer = self
                .peers
                .iter()
                .filter(idle)
                .min_by_key(|(i, p)| (p.traits.seed, !p.traits.near, **i));
            if let Some((peer, _)) = peer {
                let peer = *peer;
                self.duplicates += 1;
                return Some(Pick {
                    peer,
                    block,
                    unless_sent: false,
                });
            }
        }
        None
    }

    /// A block arrived from `peer`, in answer to a request.
    pub fn delivered(&mut self, peer: PeerIndex, block: u32, bytes: u64, now_us: u64) -> Delivery {
        self.answered(peer, block, Some(bytes), now_us);
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

    /// Duplicate requests so far.
    #[cfg(test)]
    pub fn duplicates(&self) -> u32 {
        self.duplicates
    }
}

#[cfg(test)]
#[path = "chooser_tests.rs"]
mod tests;
