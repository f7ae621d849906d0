//! Who sends next: upload slots. Pure.
//!
//! What would be the first copy of a block to leave this node goes before what was sent already: what is new spreads
//! before what others have is sent once more. (The half of BitTorrent's super-seeding that needs no lies about what
//! one has, for every node; its choking, which picks peers by what they give, is of no use among nodes of one owner.)
//! Within each of the two it goes by turns.
//!
//! Guaranteed: at most `max` slots are taken; a connection takes or waits for one at a time. Not guaranteed: that a
//! further copy gets a slot at all while first ones keep coming; the server declines it after a while, and its block
//! is elsewhere by then.

use super::sent::ConnectionId;
use std::collections::{BTreeMap, BTreeSet};

/// Which copy of a block a request would make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// The first one to leave this node.
    First,
    /// Another one.
    Again,
}

/// The slots of one node.
#[derive(Debug)]
pub struct UploadSlots {
    max: usize,
    taken: BTreeSet<ConnectionId>,
    /// By rank, then in the order in which they asked.
    waiting: BTreeSet<(Rank, u64, ConnectionId)>,
    waits: BTreeMap<ConnectionId, (Rank, u64)>,
    /// How many asked.
    asked: u64,
}

impl UploadSlots {
    /// `max` slots.
    pub fn new(max: usize) -> Self {
        Self {
            max,
            taken: BTreeSet::new(),
            waiting: BTreeSet::new(),
            waits: BTreeMap::new(),
            asked: 0,
        }
    }

    /// How many are taken.
    pub fn taken(&self) -> usize {
        self.taken.len()
    }

    /// `who` has a block of this rank to send. Whether it may begin; else it waits, and a later
    /// [`UploadSlots::give_back`] names it.
    pub fn ask(&mut self, who: ConnectionId, rank: Rank) -> bool {
        assert!(
            !self.taken.contains(&who) && !self.waits.contains_key(&who),
            "connection {who} asks for a second slot"
        );
        if self.taken.len() < self.max {
            self.taken.insert(who);
            return true;
        }
        self.asked += 1;
        self.waits.insert(who, (rank, self.asked));
        self.waiting.insert((rank, self.asked, who));
        false
    }

    /// `who`, if it waits, has something of a lower rank to send by now.
    pub fn improve(&mut self, who: ConnectionId, rank: Rank) {
        if let Some((before, asked)) = self.waits.get_mut(&who)
            && rank < *before
        {
            self.waiting.remove(&(*before, *asked, who));
            self.waiting.insert((rank, *asked, who));
            *before = rank;
        }
    }

    /// `who` waits no longer. Whether it did.
    pub fn withdraw(&mut self, who: ConnectionId) -> bool {
        let Some((rank, asked)) = self.waits.remove(&who) else {
            return false;
        };
        self.waiting.remove(&(rank, asked, who))
    }

    /// `who` is done with its slot; whom it goes to now.
    pub fn give_back(&mut self, who: ConnectionId) -> Option<ConnectionId> {
        assert!(self.taken.remove(&who), "connection {who} had no slot");
        let (_, _, next) = self.waiting.pop_first()?;
        self.waits.remove(&next);
        self.taken.insert(next);
        Some(next)
    }
}

/// Where the next one to send is in a queue of these ranks: the first of the lowest.
pub fn next_of(ranks: impl Iterator<Item = Rank>) -> Option<usize> {
    let lowest = ranks.enumerate().min_by_key(|(at, rank)| (*rank, *at));
    lowest.map(|(at, _)| at)
}
