//! What is to happen, in the order of time, and at one time in the order in which it was noted.
//!
//! Nearly everything happens within milliseconds of being noted. So time is cut into slots; what comes in a slot of the
//! near future is put there unsorted, and only the slot that is on is a heap. Of the hundred thousands of events that
//! thousands of nodes have before them, one that is noted or taken touches a few hundred.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, binary_heap::PeekMut},
};

/// A slot is 2^16 ns, shorter than a latency.
const SLOT_SHIFT: u32 = 16;
/// Slots of the near future: 134 ms, more than the time between two ticks of a node.
const SLOTS: u64 = 2048;

#[derive(Debug)]
struct Entry<E> {
    at_ns: u64,
    sequence: u64,
    event: E,
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl<E> Eq for Entry<E> {}
impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_ns, self.sequence).cmp(&(other.at_ns, other.sequence))
    }
}

#[derive(Debug)]
pub(super) struct Agenda<E> {
    sequence: u64,
    /// The number of the slot that is on.
    slot: u64,
    /// What comes in it.
    on: BinaryHeap<Reverse<Entry<E>>>,
    /// The slots after it, each at its number modulo [`SLOTS`].
    next: Vec<Vec<Entry<E>>>,
    /// How much is in them.
    in_next: usize,
    /// What comes after these.
    later: BinaryHeap<Reverse<Entry<E>>>,
    /// Memory of slots that are over.
    spare: Vec<Vec<Entry<E>>>,
}

impl<E> Agenda<E> {
    pub(super) fn new() -> Self {
        Self {
            sequence: 0,
            slot: 0,
            on: BinaryHeap::new(),
            next: (0..SLOTS).map(|_| Vec::new()).collect(),
            in_next: 0,
            later: BinaryHeap::new(),
            spare: Vec::new(),
        }
    }

    pub(super) fn note(&mut self, at_ns: u64, event: E) {
        self.sequence += 1;
        let entry = Entry {
            at_ns,
            sequence: self.sequence,
            event,
        };
        let slot = at_ns >> SLOT_SHIFT;
        if slot <= self.slot {
            self.on.push(Reverse(entry));
        } else if slot < self.slot + SLOTS {
            let into = &mut self.next[(slot % SLOTS) as usize];
            if into.capacity() == 0 {
                *into = self.spare.pop().unwrap_or_default();
            }
            into.push(entry);
            self.in_next += 1;
        } else {
            self.later.push(Reverse(entry));
        }
    }

    /// What is next, and when.
    pub(super) fn take(&mut self) -> Option<(u64, E)> {
        loop {
            if let Some(Reverse(entry)) = self.on.pop() {
                return Some((entry.at_ns, entry.event));
            }
            self.slot = match (self.in_next, self.later.peek()) {
                (0, None) => return None,
                (0, Some(Reverse(first))) => first.at_ns >> SLOT_SHIFT,
                _ => self.slot + 1,
            };
            let mut now = std::mem::take(&mut self.next[(self.slot % SLOTS) as usize]);
            self.in_next -= now.len();
            self.on.extend(now.drain(..).map(Reverse));
            if now.capacity() > 0 {
                self.spare.push(now);
            }
            while let Some(first) = self.later.peek_mut()
                && first.0.at_ns >> SLOT_SHIFT <= self.slot
            {
                self.on.push(PeekMut::pop(first));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn all_comes_in_order(
            noted in prop::collection::vec((0usize..4, prop::sample::select(vec![0u64, 1, 1 << 16, 1 << 20, 1 << 27, 1 << 31])), 0..200)
        ) {
            let (mut agenda, mut set, mut now, mut number) = (Agenda::new(), BTreeSet::new(), 0, 0u64);
            for (takes, after) in noted {
                number += 1;
                agenda.note(now + after, number);
                set.insert((now + after, number));
                for _ in 0..takes / 2 {
                    let next = agenda.take();
                    prop_assert_eq!(next, set.pop_first());
                    now = next.map_or(now, |(at, _)| at);
                }
            }
            while let Some(next) = set.pop_first() {
                prop_assert_eq!(agenda.take(), Some(next));
            }
            prop_assert_eq!(agenda.take(), None);
        }
    }
}
