//! The states of a connection, without a device: what a queue pair may do next, which reads are under way at the end that
//! fetches, what is granted at the end that serves. Pure.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

/// Largest single read. Large enough that a work request costs nothing, small enough that a queue pair's answers to others
/// are not held up, and below what any device takes (soft-RoCE: 8 MiB).
pub const MAX_READ_BYTES: u32 = 1 << 20;
/// Most blocks under way on one connection.
pub const MAX_DEPTH: u32 = 64;

/// A queue pair's state. Each is reached from the one before only, but [`Phase::Failed`], from which there is no way back:
/// the queue pair is drained and given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Just made.
    Reset,
    /// It belongs to a port.
    Initialized,
    /// It knows its peer and answers it.
    ReadyToReceive,
    /// It may ask, too.
    ReadyToSend,
    /// An error, or its end.
    Failed,
}

impl Phase {
    /// Whether `next` may follow.
    pub fn may_become(self, next: Self) -> bool {
        match next {
            Self::Reset => false,
            Self::Initialized => self == Self::Reset,
            Self::ReadyToReceive => self == Self::Initialized,
            Self::ReadyToSend => self == Self::ReadyToReceive,
            Self::Failed => self != Self::Failed,
        }
    }
}

/// One work request of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// From the block's first byte.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
    /// Whether it is the one whose completion is reported: reads of one queue pair end in the order in which they were
    /// posted, so that the last one speaks for all. One event per block.
    pub last: bool,
}

/// A block cut into reads of at most `most` bytes.
pub fn parts(len: u32, most: u32) -> impl Iterator<Item = Part> {
    let most = most.clamp(1, MAX_READ_BYTES);
    (0..len).step_by(most as usize).map(move |offset| Part {
        offset,
        len: most.min(len - offset),
        last: len - offset <= most,
    })
}

/// Why a completion is none that was waited for.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the device reports the end of read {got}, the next one due is {due:?}")]
pub struct OutOfOrder {
    got: u64,
    due: Option<u64>,
}

/// The reads under way of one queue pair. `T` is what they read into, which this keeps until they have ended.
#[derive(Debug)]
pub struct Reads<T> {
    depth: usize,
    next: u64,
    /// In the order of posting.
    under_way: VecDeque<(u64, Instant, T)>,
}

impl<T> Reads<T> {
    /// At most `depth` at once.
    pub fn new(depth: u32) -> Self {
        Self {
            depth: depth.clamp(1, MAX_DEPTH) as usize,
            next: 1,
            under_way: VecDeque::new(),
        }
    }

    /// Whether another one may begin.
    pub fn has_room(&self) -> bool {
        self.under_way.len() < self.depth
    }

    /// How many are under way.
    pub fn len(&self) -> usize {
        self.under_way.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// The number that the next one has.
    pub fn next_number(&self) -> u64 {
        self.next
    }

    /// Another one has begun, which has to end by `deadline`.
    pub fn begin(&mut self, deadline: Instant, into: T) {
        assert!(self.has_room(), "a read beyond {}", self.depth);
        self.under_way.push_back((self.next, deadline, into));
        self.next += 1;
    }

    /// The read of this number has ended well.
    pub fn ended(&mut self, number: u64) -> Result<T, OutOfOrder> {
        let due = self.under_way.front().map(|(n, ..)| *n);
        if due != Some(number) {
            return Err(OutOfOrder { got: number, due });
        }
        let (.., into) = self.under_way.pop_front().expect("just seen");
        Ok(into)
    }

    /// When the oldest one has to have ended.
    pub fn deadline(&self) -> Option<Instant> {
        self.under_way.front().map(|(_, deadline, _)| *deadline)
    }

    /// All that were read into: once nothing is under way any more.
    pub fn into_rest(self) -> impl Iterator<Item = T> {
        self.under_way.into_iter().map(|(.., into)| into)
    }
}

/// The peer gave back what it was never granted.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer says that it is done with {0}, which it was not granted")]
pub struct NotGranted(pub u64);

/// What a peer may read at present. `T` is the memory, which this keeps until the peer is done.
#[derive(Debug)]
pub struct Grants<T> {
    granted: BTreeMap<u64, (Instant, T)>,
}

impl<T> Default for Grants<T> {
    fn default() -> Self {
        Self {
            granted: BTreeMap::new(),
        }
    }
}

impl<T> Grants<T> {
    /// The peer may read this now, and has `within` for it. An id is granted once at a time; another one under the same
    /// would be this end's own fault.
    pub fn grant(&mut self, id: u64, now: Instant, within: Duration, memory: T) {
        let before = self.granted.insert(id, (now + within, memory));
        assert!(before.is_none(), "request {id} is granted twice");
    }

    /// Whether it is granted.
    pub fn contains(&self, id: u64) -> bool {
        self.granted.contains_key(&id)
    }

    /// The peer is done with it.
    pub fn done(&mut self, id: u64) -> Result<T, NotGranted> {
        let (_, memory) = self.granted.remove(&id).ok_or(NotGranted(id))?;
        Ok(memory)
    }

    /// When the peer has to be done with something, at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        self.granted.values().map(|(deadline, _)| *deadline).min()
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.granted.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.granted.is_empty()
    }

    /// All that was granted: once the peer cannot reach it any more.
    pub fn take_all(&mut self) -> Vec<T> {
        std::mem::take(&mut self.granted)
            .into_values()
            .map(|(_, memory)| memory)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_pair_goes_forward_or_fails() {
        use Phase::*;
        let all = [Reset, Initialized, ReadyToReceive, ReadyToSend, Failed];
        for (at, from) in all.into_iter().enumerate() {
            let reachable: Vec<_> = all.into_iter().filter(|next| from.may_become(*next)).collect();
            let expected: Vec<_> = match from {
                Failed => vec![],
                ReadyToSend => vec![Failed],
                _ => vec![all[at + 1], Failed],
            };
            assert_eq!(reachable, expected, "{from:?}");
        }
    }

    #[test]
    fn a_block_is_cut_into_reads_without_gaps() {
        for (len, most, sizes) in [
            (1, 1 << 20, vec![1]),
            (1 << 20, 1 << 20, vec![1 << 20]),
            ((1 << 20) + 1, 1 << 20, vec![1 << 20, 1]),
            (4 << 20, 8 << 20, vec![1 << 20; 4]),
            (10, 4, vec![4, 4, 2]),
        ] {
            let cut: Vec<_> = parts(len, most).collect();
            assert_eq!(cut.iter().map(|p| p.len).collect::<Vec<_>>(), sizes);
            let mut at = 0;
            for (i, part) in cut.iter().enumerate() {
                assert_eq!(part.offset, at);
                assert_eq!(part.last, i + 1 == cut.len());
                at += part.len;
            }
            assert_eq!(at, len);
        }
        assert_eq!(parts(0, 4).count(), 0);
    }

    #[test]
    fn reads_end_in_order_and_are_bounded() {
        let now = Instant::now();
        let mut reads = Reads::new(2);
        assert_eq!((reads.next_number(), reads.deadline()), (1, None));
        reads.begin(now, "a");
        assert_eq!(reads.next_number(), 2);
        reads.begin(now + Duration::from_secs(1), "b");
        assert!(!reads.has_room());
        assert_eq!(reads.ended(2), Err(OutOfOrder { got: 2, due: Some(1) }));
        assert_eq!(reads.deadline(), Some(now));
        assert_eq!(reads.ended(1), Ok("a"));
        assert_eq!(reads.deadline(), Some(now + Duration::from_secs(1)));
        assert!(reads.has_room());
        reads.begin(now, "c");
        assert_eq!(reads.ended(2), Ok("b"));
        assert_eq!(reads.len(), 1);
        assert_eq!(reads.into_rest().collect::<Vec<_>>(), ["c"]);
        let mut none = Reads::<()>::new(1);
        assert_eq!(none.ended(7), Err(OutOfOrder { got: 7, due: None }));
    }

    #[test]
    fn what_is_granted_is_kept_until_the_peer_is_done() {
        let now = Instant::now();
        let second = Duration::from_secs(1);
        let mut grants = Grants::default();
        grants.grant(7, now, 3 * second, "a");
        grants.grant(8, now, second, "b");
        assert_eq!(grants.deadline(), Some(now + second), "the sooner one");
        assert_eq!(grants.done(9), Err(NotGranted(9)));
        assert_eq!(grants.done(8), Ok("b"));
        assert_eq!(grants.done(8), Err(NotGranted(8)), "not twice");
        assert!(grants.contains(7) && !grants.contains(8));
        assert_eq!(grants.deadline(), Some(now + 3 * second));
        assert_eq!(grants.take_all(), ["a"]);
        assert!(grants.is_empty());
    }

    #[test]
    #[should_panic(expected = "a read beyond 1")]
    fn no_more_reads_than_the_depth() {
        let mut reads = Reads::new(1);
        reads.begin(Instant::now(), ());
        reads.begin(Instant::now(), ());
    }
}
