//! What a node sent of one artifact, and to whom: so that each block leaves it once before it leaves it
//! twice. Pure; the caller brings the clock.
//!
//! A puller that asks for a block which only this node has sets `unless_sent`: if another puller has it from
//! here, or is about to, the answer is no, and the block is soon to be had there. The promise lapses when the
//! other one disconnects, or when it had [`HOLD_MS`] since the block went out and still somebody asks.

use std::collections::{HashMap, HashSet};

/// How long a puller that got a block has to announce it, before another one is served the same block: many
/// times what a verification and a batch of announcements take, yet short against a stalled transfer.
pub const HOLD_MS: u64 = 3000;

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
    #[cfg(test)]
    copies: u64,
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
    pub fn admit(&mut self, who: ConnectionId, block: u32, unless_sent: bool, now_ms: u64) -> bool {
        if unless_sent
            && let Some((other, fate)) = self.blocks.get(&block)
            && *other != who
            && self.connected.contains(other)
        {
            match fate {
                Fate::Due => return false,
                Fate::Sent { at_ms } if now_ms < at_ms + HOLD_MS => return false,
                Fate::Sent { .. } => {}
            }
        }
        self.blocks.insert(block, (who, Fate::Due));
        true
    }

    /// The block went out to `who`.
    pub fn sent(&mut self, who: ConnectionId, block: u32, now_ms: u64) {
        #[cfg(test)]
        {
            self.copies += 1;
        }
        self.blocks.insert(block, (who, Fate::Sent { at_ms: now_ms }));
    }

    /// The block will not go out to `who` after all.
    pub fn dropped(&mut self, who: ConnectionId, block: u32) {
        if matches!(self.blocks.get(&block), Some((w, Fate::Due)) if *w == who) {
            self.blocks.remove(&block);
        }
    }

    /// How many blocks went out, copies counted.
    #[cfg(test)]
    pub fn copies(&self) -> u64 {
        self.copies
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_copy_before_a_second() {
        let mut log = SentLog::default();
        (1..=3).for_each(|c| log.connect(c));
        assert!(log.admit(1, 7, true, 0));
        assert!(!log.admit(2, 7, true, 1), "due to 1");
        assert!(log.admit(1, 7, true, 1), "1 itself may ask again");
        log.sent(1, 7, 10);
        assert!(!log.admit(2, 7, true, 10 + HOLD_MS - 1), "1 will announce it");
        assert!(log.admit(2, 7, true, 10 + HOLD_MS), "1 had its time");
        log.dropped(2, 7);
        assert!(log.admit(3, 7, true, 11 + HOLD_MS), "2 will not get it");
        assert!(
            log.admit(2, 7, false, 12 + HOLD_MS),
            "who does not say `unless` is served"
        );
    }

    #[test]
    fn a_puller_that_left_passes_nothing_on() {
        let mut log = SentLog::default();
        log.connect(1);
        log.connect(2);
        assert!(log.admit(1, 0, true, 0));
        log.sent(1, 0, 0);
        log.disconnect(1);
        assert!(log.admit(2, 0, true, 1));
        assert_eq!(log.copies(), 1);
    }
}
