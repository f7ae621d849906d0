//! What a node sent of one artifact, and to whom: so that each block leaves it once before it leaves it
//! twice. Pure; the caller brings the clock.
//!
//! A puller that asks for a block which only this node has sets `unless_sent`: if another puller has it from
//! here, or is about to, the answer is no, and the block is soon to be had there. The promise lapses when the
//! other one disconnects, or when it had [`HOLD_MS`] since the block went out and still somebody asks.

use super::slots::Rank;
use std::collections::{HashMap, HashSet, VecDeque, hash_map::Entry};

/// How long a puller that got a block has to announce it, before another one is served the same block: many
/// times what a verification and a batch of announcements take, yet short against a stalled transfer.
pub const HOLD_MS: u64 = 1000;

/// One connection of this node, in either direction of time unique.
pub type ConnectionId = u64;

#[derive(Clone, Copy, Debug)]
enum Fate {
    /// Asked for and queued.
    Due,
    /// The last byte went out then.
    Sent { at_ms: u64 },
}

/// The record of one artifact.
#[derive(Debug, Default)]
pub struct SentLog {
    blocks: HashMap<u32, (ConnectionId, Fate)>,
    connected: HashSet<ConnectionId>,
    /// What was sent, in order, as far as it still matters.
    order: VecDeque<(u64, u32)>,
    /// By block: copies that went out or are due.
    copies: Vec<u16>,
}

impl SentLog {
    /// A puller subscribed.
    pub fn connect(&mut self, who: ConnectionId) {
        self.connected.insert(who);
    }

    /// It is gone, and with it what it was to pass on.
    pub fn disconnect(&mut self, who: ConnectionId) {
        self.connected.remove(&who);
    }

    /// Whether `who` may have `block`; if so it is noted as due to it.
    pub fn admit(&mut self, who: ConnectionId, block: u32, unless_sent: bool, now_ms: u64) -> Option<Rank> {
        if unless_sent
            && let Some((other, fate)) = self.blocks.get(&block)
            && *other != who
            && self.connected.contains(other)
        {
            match fate {
                Fate::Due => return None,
                Fate::Sent { at_ms } if now_ms < at_ms + HOLD_MS => return None,
                Fate::Sent { .. } => {}
            }
        }
        self.blocks.insert(block, (who, Fate::Due));
        let at = block as usize;
        if self.copies.len() <= at {
            self.copies.resize(at + 1, 0);
        }
        self.copies[at] = self.copies[at].saturating_add(1);
        Some(if self.copies[at] == 1 {
            Rank::First
        } else {
            Rank::Again
        })
    }

    /// The block went out to `who`.
    pub fn sent(&mut self, who: ConnectionId, block: u32, now_ms: u64) {
        self.forget(now_ms);
        self.blocks.insert(block, (who, Fate::Sent { at_ms: now_ms }));
        self.order.push_back((now_ms, block));
    }

    /// Who sent what when is of no use after a while.
    fn forget(&mut self, now_ms: u64) {
        while let Some((at_ms, block)) = self.order.front().copied()
            && now_ms >= at_ms + HOLD_MS
        {
            self.order.pop_front();
            if let Entry::Occupied(entry) = self.blocks.entry(block)
                && let (_, Fate::Sent { at_ms }) = entry.get()
                && now_ms >= at_ms + HOLD_MS
            {
                entry.remove();
            }
        }
    }

    /// The block will not go out to `who` after all.
    pub fn dropped(&mut self, who: ConnectionId, block: u32) {
        if let Some(copies) = self.copies.get_mut(block as usize) {
            *copies = copies.saturating_sub(1);
        }
        if matches!(self.blocks.get(&block), Some((w, Fate::Due)) if *w == who) {
            self.blocks.remove(&block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_copy_before_a_second() {
        let mut log = SentLog::default();
        (1..=3).for_each(|c| log.connect(c));
        assert!(log.admit(1, 7, true, 0).is_some());
        assert!(log.admit(2, 7, true, 1).is_none(), "due to 1");
        assert!(log.admit(1, 7, true, 1).is_some(), "1 itself may ask again");
        log.sent(1, 7, 10);
        assert!(
            log.admit(2, 7, true, 10 + HOLD_MS - 1).is_none(),
            "1 will announce it"
        );
        assert!(log.admit(2, 7, true, 10 + HOLD_MS).is_some(), "1 had its time");
        log.dropped(2, 7);
        assert!(log.admit(3, 7, true, 11 + HOLD_MS).is_some(), "2 will not get it");
        assert!(
            log.admit(2, 7, false, 12 + HOLD_MS).is_some(),
            "who does not say `unless` is served"
        );
    }

    #[test]
    fn a_puller_that_left_passes_nothing_on() {
        let mut log = SentLog::default();
        log.connect(1);
        log.connect(2);
        assert!(log.admit(1, 0, true, 0).is_some());
        log.sent(1, 0, 0);
        log.disconnect(1);
        assert_eq!(log.admit(2, 0, true, 1), Some(Rank::Again));
    }
}
