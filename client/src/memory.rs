//! The memory that blocks pass through on their way to the disk, used again and again.
//!
//! A fresh allocation of a block costs a page fault for each of its pages, and memory that is taken and given back
//! makes the size of the process depend on what happened to be under way at one moment. So what blocks of the
//! smallest size need at most is taken once, at start ([`warm`]), and kept; what larger blocks need is kept while
//! some of them are under way.
//!
//! This is a store, not a bound: how many blocks are under way is bounded by those who take memory for them
//! ([`crate::transport::buffer`] for what peers send, [`crate::source`] for what is read from sources).

use mooncake_proto::manifest::BLOCK_SIZE_RANGE;
use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    ops::{Deref, DerefMut},
};

/// The smallest piece: a block of the smallest size. Smaller files' blocks take one too.
const SMALL_BYTES: usize = *BLOCK_SIZE_RANGE.start() as usize;
/// Most bytes of idle larger pieces while others of them are in use: what the swarm has under way at most, so that
/// a transfer of blocks of one size never gives back what it is about to take again.
const MAX_IDLE_BYTES: usize = 64 << 20;
/// Most bytes of idle larger pieces while none of them is in use: two of the largest, enough for a transfer that
/// moves one block at a time.
const MAX_RESTING_BYTES: usize = 2 * *BLOCK_SIZE_RANGE.end() as usize;

static IDLE: Mutex<Idle> = Mutex::new(Idle::new());

/// Short sections: a push or a pop, and the look for a piece among few.
#[derive(Debug)]
struct Idle {
    /// Each of [`SMALL_BYTES`].
    small: Vec<Vec<u8>>,
    /// How many of them are kept.
    keep: usize,
    /// Those that were used last at the back: the ones to be kept.
    large: VecDeque<Vec<u8>>,
    /// Capacities of `large`.
    large_bytes: usize,
    large_in_use: usize,
}

impl Idle {
    const fn new() -> Self {
        Self {
            small: Vec::new(),
            keep: 0,
            large: VecDeque::new(),
            large_bytes: 0,
            large_in_use: 0,
        }
    }

    fn pop(&mut self, len: usize) -> Option<Vec<u8>> {
        if len <= SMALL_BYTES {
            return self.small.pop();
        }
        self.large_in_use += 1;
        let found = self.large.iter().rposition(|b| b.capacity() >= len)?;
        let piece = self.large.remove(found).expect("just found");
        self.large_bytes -= piece.capacity();
        Some(piece)
    }

    /// Takes a piece back; gives what is not kept, to be freed without the lock.
    fn push(&mut self, bytes: Vec<u8>, small: bool) -> Vec<Vec<u8>> {
        if small {
            if bytes.capacity() != SMALL_BYTES || self.small.len() >= self.keep {
                return vec![bytes];
            }
            self.small.push(bytes);
            return Vec::new();
        }
        self.large_in_use -= 1;
        self.large_bytes += bytes.capacity();
        self.large.push_back(bytes);
        let most = match self.large_in_use {
            0 => MAX_RESTING_BYTES,
            _ => MAX_IDLE_BYTES,
        };
        let mut surplus = Vec::new();
        while self.large_bytes > most
            && let Some(piece) = self.large.pop_front()
        {
            self.large_bytes -= piece.capacity();
            surplus.push(piece);
        }
        surplus
    }
}

/// Takes the memory of `pieces` of the smallest blocks and keeps it from now on. To be called once, at start: a
/// node that cannot have it says so then and not in the middle of a transfer.
pub fn warm(pieces: usize) {
    let touched = (0..pieces).map(|_| {
        // Not zeroed memory of the system, which would become real only when it is first written.
        let mut piece = vec![1; SMALL_BYTES];
        piece.clear();
        piece
    });
    let mut touched: Vec<_> = touched.collect();
    let mut idle = IDLE.lock();
    idle.keep += pieces;
    idle.small.append(&mut touched);
}

/// Memory for one block; goes back when dropped.
#[derive(Debug)]
pub struct Block {
    bytes: Vec<u8>,
    small: bool,
}

impl Block {
    /// Empty, with room for `len` bytes.
    pub fn take(len: usize) -> Self {
        let small = len <= SMALL_BYTES;
        let found = IDLE.lock().pop(len);
        // Powers of two: the last block of a file and the others can use each other's.
        let bytes = found.unwrap_or_else(|| Vec::with_capacity(len.next_power_of_two().max(SMALL_BYTES)));
        Self { bytes, small }
    }
}

impl Deref for Block {
    type Target = Vec<u8>;
    fn deref(&self) -> &Vec<u8> {
        &self.bytes
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        let surplus = IDLE.lock().push(bytes, self.small);
        drop(surplus);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(len: usize) -> Vec<u8> {
        Vec::with_capacity(len)
    }

    #[test]
    fn small_pieces_are_kept_up_to_what_was_warmed() {
        let mut idle = Idle::new();
        idle.keep = 2;
        assert!(idle.pop(1).is_none());
        let kept: Vec<_> = (0..3)
            .map(|_| idle.push(piece(SMALL_BYTES), true).len())
            .collect();
        assert_eq!(kept, [0, 0, 1]);
        // One that its user made grow is not one of them any more.
        assert_eq!(idle.pop(SMALL_BYTES).unwrap().capacity(), SMALL_BYTES);
        assert_eq!(idle.push(piece(2 * SMALL_BYTES), true).len(), 1);
        assert_eq!(idle.small.len(), 1);
    }

    #[test]
    fn large_pieces_are_kept_while_some_are_in_use_and_few_afterwards() {
        let largest = *BLOCK_SIZE_RANGE.end() as usize;
        let mut idle = Idle::new();
        let (in_use, most) = (24, MAX_IDLE_BYTES / largest);
        assert!((0..in_use).all(|_| idle.pop(largest).is_none()));
        let freed: usize = (1..in_use).map(|_| idle.push(piece(largest), false).len()).sum();
        assert_eq!((idle.large.len(), freed), (most, in_use - 1 - most));
        assert_eq!(
            idle.pop(largest - 1).unwrap().capacity(),
            largest,
            "the last block of a file fits"
        );
        for _ in 0..2 {
            drop(idle.push(piece(largest), false));
        }
        assert_eq!(idle.large_in_use, 0);
        assert_eq!(idle.large_bytes, MAX_RESTING_BYTES);
        assert_eq!(
            idle.large_bytes,
            idle.large.iter().map(Vec::capacity).sum::<usize>()
        );
    }

    /// A transfer of blocks of one size must not be left with pieces of another one's.
    #[test]
    fn pieces_that_are_in_use_displace_those_of_an_earlier_size() {
        let (small, large) = (1 << 20, 4 << 20);
        let mut idle = Idle::new();
        let in_use = 2 * MAX_IDLE_BYTES / small;
        assert!((0..in_use).all(|_| idle.pop(small).is_none()));
        (1..in_use).for_each(|_| drop(idle.push(piece(small), false)));
        assert_eq!(idle.large_bytes, MAX_IDLE_BYTES);
        assert!(idle.pop(large).is_none(), "none is large enough");
        assert_eq!(
            idle.push(piece(large), false).len(),
            4,
            "as many bytes of the old ones"
        );
        assert_eq!(idle.pop(large).map(|p| p.capacity()), Some(large));
    }

    #[test]
    fn a_block_has_room_and_comes_back_empty() {
        for len in [1, SMALL_BYTES, SMALL_BYTES + 1, 3 << 20] {
            let mut block = Block::take(len);
            assert!(block.is_empty() && block.capacity() >= len);
            block.resize(len, 7);
            drop(block);
            assert!(Block::take(len).is_empty());
        }
    }
}
