//! The rules by which the next request is chosen.

use super::{Asked, Chooser, Peer, PeerIndex, Pick, pace::WINDOW_MIN, shares::weight};
use crate::swarm::bits::ones;
use mooncake_proto::mesh::GATEWAYS;

/// How long the receiver whose share a block is has to ask the seed for it, before others do: a few announcements and
/// requests. While a source is slower than the links, whoever hears first would otherwise get every first copy.
pub(super) const SHARE_US: u64 = 100_000;
/// How long a node does nearly nothing before it may ask a seed for second copies.
pub(super) const STARVED_US: u64 = 250_000;
/// How long a block must have been asked for, at least, before endgame asks a second peer; and so many times what a
/// request usually takes at this node's peers. Where many share a narrow link, a block takes as long as that.
pub(super) const ENDGAME_AGE_US: u64 = 300_000;
const ENDGAME_TIMES_USUAL: f64 = 3.0;
/// Missing blocks at which endgame begins, at most.
const ENDGAME_BLOCKS: u32 = 64;
/// Duplicates that are allowed whatever the number of blocks.
pub(super) const ENDGAME_MIN: u32 = 4;
/// How many blocks a node lacks that a relay has, at least, to be far behind: a part of all of them, and never few.
const BEHIND_PART: u32 = 16;
pub(super) const BEHIND_LEAST: u32 = 64;
/// Candidates looked at for one choice: exact rarest-first for artifacts of the usual 2,000 blocks.
/// Beyond, the rarest of so many is among the rarest hundredth, which is as good.
const SAMPLE: u32 = 512;

/// What makes a block the better choice at a peer, lowest first: own share, rarity, own order.
type Score = (bool, u16, u64);

/// How strictly the rules are taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Strict,
    Starved,
}

impl Chooser {
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
        let leaves_seeds = mode == Mode::Strict && self.is_behind();
        // The best peer mostly has something: the order of the others is not worth a list.
        let mut tried = None;
        loop {
            let open = self
                .peers
                .iter()
                .filter(|(_, p)| p.room(now_us) && p.has.ones() > 0 && !(leaves_seeds && p.traits.seed));
            let ranked = open.map(|(i, p)| (self.preference(*i, p, mode), *i));
            let next = ranked.filter(|r| tried.is_none_or(|t| *r > t)).min()?;
            if let Some(pick) = self.best_of(next.1, now_us, mode) {
                return Some(pick);
            }
            tried = Some(next);
        }
    }

    /// Whether first copies are for others to bring in: some relay has far more than this node, and relays give it all that
    /// it can take. What it brought in would wait behind that on its way here, and all the others for it.
    fn is_behind(&self) -> bool {
        // First, for it needs no look at the peers, and this is asked for each choice.
        if !self.intake.relays_suffice() {
            return false;
        }
        let relays = self.peers.values().filter(|p| !p.traits.seed);
        let most = relays.map(|p| p.has.ones()).max().unwrap_or(0);
        let far = (self.have.len() / BEHIND_PART).max(BEHIND_LEAST);
        most >= self.have.ones() + far
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

    /// From when on a block is late. By the median of the peers, of two in the middle by the quicker one: one that is
    /// slow does not make lateness usual.
    fn late_after_us(&self) -> u64 {
        let peers = self.peers.values();
        let mut usual: Vec<f64> = peers.filter_map(|p| p.pace.usual_latency_us()).collect();
        usual.sort_by(f64::total_cmp);
        let median = usual
            .get(usual.len().saturating_sub(1) / 2)
            .copied()
            .unwrap_or(0.0);
        ENDGAME_AGE_US.max((ENDGAME_TIMES_USUAL * median) as u64)
    }

    /// Everything missing is asked for: ask a second, idle peer for what is late.
    fn endgame(&mut self, now_us: u64) -> Option<Pick> {
        let allowed = (self.have.len() / 100).max(ENDGAME_MIN);
        if self.missing() > ENDGAME_BLOCKS || self.duplicates >= allowed {
            return None;
        }
        let late_after_us = self.late_after_us();
        let mut late: Vec<_> = self
            .asked
            .iter()
            .filter(|(_, at)| at.len() == 1)
            .filter_map(|(block, at)| Some((self.peers.get(&at[0])?.asked.get(block)?.at_us, *block, at[0])))
            .filter(|(at_us, ..)| now_us >= at_us + late_after_us)
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
}
