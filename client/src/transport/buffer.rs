//! Block buffers that are used again: a fresh allocation of a megabyte costs page faults for every block.

use parking_lot::Mutex;
use std::{ops::Deref, sync::Arc};

/// Most bytes that idle buffers keep. The bytes in use are bounded by the swarm's budget, not here.
const MAX_IDLE_BYTES: usize = 4 << 20;

/// The idle buffers of one node.
#[derive(Debug, Default)]
pub struct BufferPool {
    /// Short sections; a list and the sum of its capacities.
    idle: Mutex<(Vec<Vec<u8>>, usize)>,
}

impl BufferPool {
    /// An empty buffer with room for at least `len` bytes.
    pub fn take(self: &Arc<Self>, len: usize) -> BlockBuffer {
        let found = {
            let mut idle = self.idle.lock();
            let found = idle
                .0
                .iter()
                .rposition(|b| b.capacity() >= len)
                .map(|i| idle.0.swap_remove(i));
            if let Some(b) = &found {
                idle.1 -= b.capacity();
            }
            found
        };
        BlockBuffer {
            bytes: found.unwrap_or_else(|| Vec::with_capacity(len)),
            pool: self.clone(),
        }
    }
}

/// One block's bytes; goes back to its pool when dropped.
#[derive(Debug)]
pub struct BlockBuffer {
    pub(super) bytes: Vec<u8>,
    pool: Arc<BufferPool>,
}

impl Deref for BlockBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for BlockBuffer {
    fn drop(&mut self) {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        let mut idle = self.pool.idle.lock();
        if bytes.capacity() > 0 && idle.1 + bytes.capacity() <= MAX_IDLE_BYTES {
            idle.1 += bytes.capacity();
            idle.0.push(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_and_idle_bytes_are_bounded() {
        let pool = Arc::new(BufferPool::default());
        let first = pool.take(1 << 20);
        let address = first.bytes.as_ptr();
        drop(first);
        assert_eq!(
            pool.take(4096).bytes.as_ptr(),
            address,
            "a large idle buffer serves a small block"
        );
        let many: Vec<_> = (0..40).map(|_| pool.take(1 << 20)).collect();
        drop(many);
        let idle = pool.idle.lock();
        assert_eq!(idle.1, idle.0.iter().map(Vec::capacity).sum::<usize>());
        assert!(idle.1 <= MAX_IDLE_BYTES);
    }
}
