//! What a peer asked for, until it has gone out.

use super::{Server, turns::Turn};
use crate::{
    store::Artifact,
    swarm::{
        sent::{ConnectionId, SentLog},
        slots::Rank,
    },
    transport::BlockSource,
};
use mooncake_proto::digest::Digest;
use parking_lot::Mutex;
use std::{
    fs::File,
    io,
    sync::{Arc, atomic::Ordering},
};

/// A block that the log has as due to a peer. However its request ends without it having gone out - canceled,
/// declined, unreadable, with its connection -, it is struck from the log when this is dropped.
pub(super) struct Promise {
    log: Arc<Mutex<SentLog>>,
    who: ConnectionId,
    block: u32,
    kept: bool,
}

impl Promise {
    /// Notes that `block` is due to `who`, and says how it ranks; `None` if another puller is to pass it on.
    pub(super) fn make(
        log: Arc<Mutex<SentLog>>,
        (who, block): (ConnectionId, u32),
        unless_sent: bool,
        now_ms: u64,
    ) -> Option<(Self, Rank)> {
        let rank = log.lock().admit(who, block, unless_sent, now_ms)?;
        let kept = false;
        Some((
            Self {
                log,
                who,
                block,
                kept,
            },
            rank,
        ))
    }

    /// The block went out.
    pub(super) fn keep(mut self, now_ms: u64) {
        self.kept = true;
        self.log.lock().sent(self.who, self.block, now_ms);
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if !self.kept {
            self.log.lock().dropped(self.who, self.block);
        }
    }
}

/// A request that waits for its turn.
pub(super) struct Queued {
    pub(super) rank: Rank,
    pub(super) request: u64,
    pub(super) subscription: u32,
    pub(super) block: u32,
    pub(super) expected: Option<Digest>,
    pub(super) artifact: Arc<Artifact>,
    pub(super) promise: Promise,
}

impl Queued {
    pub(super) fn len(&self) -> u32 {
        self.artifact.blocks().locate(self.block).map_or(0, |r| r.len)
    }
}

/// One block on its way out. Holds the upload slot until the sending thread is done with it.
pub(super) struct Upload {
    pub(super) artifact: Arc<Artifact>,
    pub(super) block: u32,
    pub(super) expected: Option<Digest>,
    pub(super) server: Arc<Server>,
    pub(super) _slot: Turn,
}

impl BlockSource for Upload {
    fn open(&self) -> io::Result<(Arc<File>, u64, u32)> {
        if !holds(&self.artifact, self.block, self.expected) {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.artifact.block_file(self.block)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.server.stats.uploads_active.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether the block is here, and still the one that the puller was told of. What was read from a source may be
/// condemned and read again while requests wait.
pub(super) fn holds(artifact: &Artifact, block: u32, expected: Option<Digest>) -> bool {
    artifact
        .digest(block)
        .is_some_and(|own| expected.is_none_or(|expected| expected == own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_did_not_go_out_is_no_copy() {
        let log = Arc::new(Mutex::new(SentLog::default()));
        let ask = |who, at| Promise::make(log.clone(), (who, 7), false, at);
        (1..=3).for_each(|who| log.lock().connect(who));
        // Its connection ends while the request waits.
        drop(ask(1, 0).expect("nobody has it"));
        log.lock().disconnect(1);
        let (second, rank) = ask(2, 1).expect("served");
        assert_eq!(rank, Rank::First, "it is the first copy that leaves");
        second.keep(2);
        let (_, rank) = ask(3, 3).expect("served");
        assert_eq!(rank, Rank::Again);
    }
}
