//! The books of a pool: what is lent, what lies idle, what has to go before something new may be made. Pure.

use std::collections::VecDeque;

/// Pieces of one pool, which together are never larger than its bound. `G` tells apart what cannot stand in for each other
/// (devices), `S` is the piece.
#[derive(Debug)]
pub struct Ledger<G, S> {
    max_bytes: usize,
    lent_bytes: usize,
    idle_bytes: usize,
    /// Those given back last at the back.
    idle: VecDeque<Idle<G, S>>,
    peak_bytes: usize,
    lent: u64,
}

#[derive(Debug)]
struct Idle<G, S> {
    group: G,
    size: usize,
    piece: S,
}

/// What [`Ledger::lend`] says. Evicted pieces are to be dropped before a new one is made.
#[derive(Debug)]
pub struct Lent<S> {
    /// An idle piece of the right size; else the caller makes one, and says [`Ledger::failed`] if it cannot.
    pub found: Option<S>,
    /// Idle pieces that made room.
    pub evicted: Vec<S>,
}

impl<G: PartialEq, S> Ledger<G, S> {
    /// At most `max_bytes`, lent and idle together.
    pub fn new(max_bytes: usize) -> Self {
        Self {
            max_bytes,
            lent_bytes: 0,
            idle_bytes: 0,
            idle: VecDeque::new(),
            peak_bytes: 0,
            lent: 0,
        }
    }

    /// Lends a piece of exactly `size` bytes. The caller has seen to it that what is lent stays within the bound.
    pub fn lend(&mut self, group: &G, size: usize) -> Lent<S> {
        assert!(
            self.lent_bytes + size <= self.max_bytes,
            "{size} bytes beside {} lent ones of {}",
            self.lent_bytes,
            self.max_bytes
        );
        if let Some(piece) = self.lend_idle(group, size) {
            return Lent {
                found: Some(piece),
                evicted: Vec::new(),
            };
        }
        self.lent_bytes += size;
        self.lent += 1;
        let mut evicted = Vec::new();
        while self.lent_bytes + self.idle_bytes > self.max_bytes {
            let idle = self
                .idle
                .pop_front()
                .expect("what is lent alone is within the bound");
            self.idle_bytes -= idle.size;
            evicted.push(idle.piece);
        }
        self.peak_bytes = self.peak_bytes.max(self.bytes());
        Lent { found: None, evicted }
    }

    /// Lends an idle piece of exactly `size` bytes, if there is one.
    pub fn lend_idle(&mut self, group: &G, size: usize) -> Option<S> {
        let at = self
            .idle
            .iter()
            .rposition(|i| i.group == *group && i.size == size)?;
        let idle = self.idle.remove(at)?;
        self.idle_bytes -= size;
        self.lent_bytes += size;
        self.lent += 1;
        Some(idle.piece)
    }

    /// A piece that was to be made could not be.
    pub fn failed(&mut self, size: usize) {
        self.lent_bytes -= size;
    }

    /// Takes a piece back; `keep`: it is good for another time. Gives what is to be dropped.
    pub fn give_back(&mut self, group: G, size: usize, piece: S, keep: bool) -> Option<S> {
        self.lent_bytes -= size;
        if !keep {
            return Some(piece);
        }
        self.idle_bytes += size;
        self.idle.push_back(Idle { group, size, piece });
        None
    }

    /// The idle pieces of a group, which is no more.
    pub fn forget(&mut self, group: &G) -> Vec<S> {
        self.take_idle(|idle| idle.group == *group)
    }

    /// All idle pieces.
    pub fn forget_idle(&mut self) -> Vec<S> {
        self.take_idle(|_| true)
    }

    fn take_idle(&mut self, which: impl Fn(&Idle<G, S>) -> bool) -> Vec<S> {
        let (taken, kept) = self.idle.drain(..).partition(which);
        let taken: VecDeque<Idle<G, S>> = taken;
        self.idle = kept;
        self.idle_bytes = self.idle.iter().map(|i| i.size).sum();
        taken.into_iter().map(|i| i.piece).collect()
    }

    /// Lent and idle.
    pub fn bytes(&self) -> usize {
        self.lent_bytes + self.idle_bytes
    }

    /// The most that it ever was.
    pub fn peak_bytes(&self) -> usize {
        self.peak_bytes
    }

    /// How often something was lent, ever.
    pub fn lent(&self) -> u64 {
        self.lent
    }

    /// Whether nothing is lent.
    pub fn is_quiet(&self) -> bool {
        self.lent_bytes == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(ledger: &mut Ledger<u8, u32>, group: u8, size: usize, name: u32) -> (u32, Vec<u32>) {
        let lent = ledger.lend(&group, size);
        (lent.found.unwrap_or(name), lent.evicted)
    }

    #[test]
    fn what_is_idle_is_used_again() {
        let mut ledger = Ledger::new(100);
        assert_eq!(new(&mut ledger, 1, 40, 1), (1, vec![]));
        assert_eq!(ledger.lend_idle(&1, 40), None);
        assert_eq!(ledger.give_back(1, 40, 1, true), None);
        assert_eq!(ledger.lend_idle(&2, 40), None, "of another device");
        assert_eq!(ledger.lend_idle(&1, 20), None, "of another size");
        assert_eq!(new(&mut ledger, 1, 40, 2), (1, vec![]), "the same again");
        assert_eq!(new(&mut ledger, 1, 40, 3), (3, vec![]), "nothing is idle");
        assert_eq!((ledger.bytes(), ledger.peak_bytes(), ledger.lent()), (80, 80, 3));
    }

    #[test]
    fn what_lay_idle_longest_makes_room_for_what_is_new() {
        let mut ledger = Ledger::new(100);
        for name in 1..=3 {
            new(&mut ledger, 1, 30, name);
        }
        for name in 1..=3 {
            ledger.give_back(1, 30, name, true);
        }
        assert_eq!(new(&mut ledger, 1, 50, 4), (4, vec![1, 2]), "50 + 30 fit");
        assert_eq!(ledger.bytes(), 80);
        // Another device's pieces are of no use.
        assert_eq!(new(&mut ledger, 2, 30, 5), (5, vec![3]));
        assert_eq!((ledger.bytes(), ledger.peak_bytes()), (80, 90));
    }

    #[test]
    fn a_piece_that_cannot_be_made_takes_no_room() {
        let mut ledger = Ledger::<u8, u32>::new(100);
        assert!(ledger.lend(&1, 100).found.is_none());
        ledger.failed(100);
        assert!(ledger.is_quiet());
        assert_eq!(new(&mut ledger, 1, 100, 7), (7, vec![]));
        assert_eq!(
            ledger.give_back(1, 100, 7, false),
            Some(7),
            "it is not to be kept"
        );
        assert_eq!(ledger.bytes(), 0);
    }

    #[test]
    fn a_device_that_is_gone_leaves_nothing() {
        let mut ledger = Ledger::new(100);
        for (group, name) in [(1, 1), (2, 2), (1, 3)] {
            new(&mut ledger, group, 20, name);
        }
        for (group, name) in [(1, 1), (2, 2), (1, 3)] {
            ledger.give_back(group, 20, name, true);
        }
        assert_eq!(ledger.forget(&1), [1, 3]);
        assert_eq!(ledger.bytes(), 20);
        assert_eq!(ledger.forget_idle(), [2]);
        assert_eq!(ledger.bytes(), 0);
    }

    #[test]
    #[should_panic(expected = "60 bytes beside 60 lent ones of 100")]
    fn more_than_the_bound_is_never_lent() {
        let mut ledger = Ledger::<u8, u32>::new(100);
        ledger.lend(&1, 60);
        ledger.lend(&1, 60);
    }
}
