//! The bound on blocks that were received and are not yet written, over all connections of a node.

use crate::memory::Block;
use mooncake_rdma::Lease;
use std::{ops::Deref, sync::Arc};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The least that [`BufferPool::new`] allows: a peer that sends slowly keeps one until it is given up, and a node
/// with few cores must not be held up by a few such peers.
pub const MIN_RECEIVED: usize = 16;

/// The right to have blocks in memory. Whoever is about to receive a block waits here for its turn (first come,
/// first served) and meanwhile reads nothing, so that the sender waits too.
///
/// Guaranteed: never more blocks than allowed, whatever their size (the swarm's budget bounds their bytes), and no
/// deadlock: who waits holds no turn, and whoever has one either gets the block within
/// [`block_time`](super::block_time) or fails, and then needs nothing but the disk to be rid of it.
#[derive(Debug)]
pub struct BufferPool {
    turns: Arc<Semaphore>,
}

impl Default for BufferPool {
    fn default() -> Self {
        Self::new(MIN_RECEIVED)
    }
}

impl BufferPool {
    /// At most `received` blocks (at least [`MIN_RECEIVED`]).
    pub fn new(received: usize) -> Self {
        Self {
            turns: Arc::new(Semaphore::new(received.max(MIN_RECEIVED))),
        }
    }

    /// Waits for a turn: an empty buffer with room for `len` bytes.
    pub async fn take(&self, len: usize) -> BlockBuffer {
        let turn = self.turn().await;
        BlockBuffer {
            bytes: Memory::Own(Block::take(len)),
            _turn: turn,
        }
    }

    /// Waits for a turn only: for a transport that has memory of its own.
    pub(super) async fn turn(&self) -> Turn {
        self.turns.clone().acquire_owned().await.expect("never closed")
    }
}

/// The right to one block in memory.
pub(super) type Turn = OwnedSemaphorePermit;

#[derive(Debug)]
enum Memory {
    Own(Block),
    /// A slab that a network card wrote, and how many bytes of it.
    Registered(Lease, usize),
}

/// One block's bytes, and its turn until it is dropped.
#[derive(Debug)]
pub struct BlockBuffer {
    // Before its turn is over: fields are dropped in this order, and the next one finds the memory.
    bytes: Memory,
    _turn: Turn,
}

impl BlockBuffer {
    /// A block of `len` bytes that was read into a slab.
    pub(super) fn registered(slab: Lease, len: usize, turn: Turn) -> Self {
        Self {
            bytes: Memory::Registered(slab, len),
            _turn: turn,
        }
    }

    /// To be filled; of a buffer that [`BufferPool::take`] gave.
    pub(super) fn own(&mut self) -> &mut Vec<u8> {
        match &mut self.bytes {
            Memory::Own(block) => block,
            Memory::Registered(..) => unreachable!("a network card fills registered memory"),
        }
    }
}

impl Deref for BlockBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.bytes {
            Memory::Own(block) => block,
            Memory::Registered(slab, len) => slab.bytes(*len),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[tokio::test]
    async fn blocks_in_memory_are_bounded_and_take_turns() {
        let pool = BufferPool::new(0);
        let mut held = Vec::new();
        for _ in 0..MIN_RECEIVED {
            held.push(pool.take(1).now_or_never().expect("there is room"));
        }
        let (mut first, mut second) = (Box::pin(pool.take(9)), Box::pin(pool.take(9)));
        assert!(first.as_mut().now_or_never().is_none());
        assert!(second.as_mut().now_or_never().is_none());
        held.pop();
        assert!(
            second.as_mut().now_or_never().is_none(),
            "it came later and does not overtake"
        );
        let got = first.as_mut().now_or_never().expect("its turn");
        drop(got);
        assert!(second.now_or_never().is_some());
    }
}
