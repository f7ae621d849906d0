//! Which of a link's connections carries the next block. The caller brings the clock and opens what is to be opened.
//!
//! One TCP connection is worked on by one core at a time at either end: the copy out of the socket alone takes a good
//! part of it at a gigabyte per second. So a peer that delivers more than [`LANE_BYTES_PER_S`] is asked over several
//! connections, *lanes*, one for each such share of its rate, as far as the transport has a use for them
//! ([`crate::transport::Transport::lanes`]). On paths that are slower than that there is one, as ever.
//!
//! The first lane is the link itself: what the peer says of itself is heard there, digests are fetched there, and the
//! link ends with it. The others are there for blocks only, and nothing depends on them: one that ends gives its requests
//! back, and for [`LANE_RETRY`] no further one is opened.

use mooncake_proto::pb::peer::HoldingState;
use prost::bytes::Bytes;
use std::{
    collections::{BTreeMap, HashSet},
    time::{Duration, Instant},
};
use tokio::sync::mpsc;

/// What one connection is expected to carry without keeping a core busy with nothing else.
pub const LANE_BYTES_PER_S: f64 = (256 << 20) as f64;

/// How long no further lane is opened after one ended or could not be had.
pub const LANE_RETRY: Duration = Duration::from_secs(10);

/// A lane of a link, never used twice; the first one is [`FIRST`].
pub type LaneId = usize;
/// The lane that is the link.
pub const FIRST: LaneId = 0;

/// How many lanes a peer is worth that delivers so many bytes per second, one for each `lane_bytes_per_s`.
pub fn lanes_for(bytes_per_s: f64, lane_bytes_per_s: f64) -> usize {
    ((bytes_per_s / lane_bytes_per_s) as usize).max(1)
}

#[derive(Debug)]
struct Lane {
    outgoing: mpsc::UnboundedSender<Bytes>,
    /// Requests for blocks that are not answered.
    outstanding: usize,
    /// Subscriptions that the peer answers on it, as it said there.
    ready: HashSet<u32>,
}

/// The lanes of one link.
#[derive(Debug)]
pub struct Lanes {
    lanes: BTreeMap<LaneId, Lane>,
    most: usize,
    next: LaneId,
    /// One is being dialled.
    dialling: bool,
    /// No further one is opened before that.
    rests_until: Option<Instant>,
}

impl Lanes {
    /// The first one alone, of at most `most`. `outgoing` is bounded by what is sent: a request per permit of the budget, a cancel per
    /// request, a few subscriptions.
    pub fn new(outgoing: mpsc::UnboundedSender<Bytes>, most: usize) -> Self {
        let first = Lane {
            outgoing,
            outstanding: 0,
            ready: HashSet::new(),
        };
        Self {
            lanes: BTreeMap::from([(FIRST, first)]),
            most,
            next: FIRST + 1,
            dialling: false,
            rests_until: None,
        }
    }

    /// Whether one more is to be dialled now for `width` of them; if so that is noted, and [`Lanes::open`] or
    /// [`Lanes::give_up`] must follow.
    pub fn claim(&mut self, width: usize, now: Instant) -> bool {
        let rests = self.rests_until.is_some_and(|until| now < until);
        let claimed = !self.dialling && !rests && self.lanes.len() < width.min(self.most);
        self.dialling |= claimed;
        claimed
    }

    /// The one that was claimed is there.
    pub fn open(&mut self, outgoing: mpsc::UnboundedSender<Bytes>) -> LaneId {
        self.dialling = false;
        let id = self.next;
        self.next += 1;
        let lane = Lane {
            outgoing,
            outstanding: 0,
            ready: HashSet::new(),
        };
        self.lanes.insert(id, lane);
        id
    }

    /// The one that was claimed could not be had.
    pub fn give_up(&mut self, now: Instant) {
        self.dialling = false;
        self.rests_until = Some(now + LANE_RETRY);
    }

    /// One ended.
    pub fn close(&mut self, lane: LaneId, now: Instant) {
        self.lanes.remove(&lane);
        self.rests_until = Some(now + LANE_RETRY);
    }

    /// The peer said on `lane` what it has of what was subscribed to.
    pub fn status(&mut self, lane: LaneId, subscription: u32, state: HoldingState) {
        let Some(lane) = self.lanes.get_mut(&lane) else {
            return;
        };
        match state {
            HoldingState::Partial | HoldingState::Whole => lane.ready.insert(subscription),
            _ => lane.ready.remove(&subscription),
        };
    }

    /// A subscription ended.
    pub fn forget(&mut self, subscription: u32) {
        for lane in self.lanes.values_mut() {
            lane.ready.remove(&subscription);
        }
    }

    /// The lane for one more block: of the first `width` that answer for this subscription the one that owes least.
    pub fn pick(&mut self, subscription: u32, width: usize) -> LaneId {
        let answering = self
            .lanes
            .iter_mut()
            .filter(|(id, lane)| **id == FIRST || lane.ready.contains(&subscription))
            .take(width.max(1));
        let (id, lane) = answering
            .min_by_key(|(_, lane)| lane.outstanding)
            .expect("the first one lasts as long as the link");
        lane.outstanding += 1;
        *id
    }

    /// A request for a block was answered on `lane`.
    pub fn answered(&mut self, lane: LaneId) {
        if let Some(lane) = self.lanes.get_mut(&lane) {
            lane.outstanding -= 1;
        }
    }

    /// What each owes, the first one first, and whether it answers for this subscription.
    #[cfg(test)]
    pub fn owing(&self, subscription: u32) -> Vec<(usize, bool)> {
        let lanes = self.lanes.iter();
        let owing = lanes.map(|(id, l)| (l.outstanding, *id == FIRST || l.ready.contains(&subscription)));
        owing.collect()
    }

    /// Says something on a lane. A closed queue means that the lane is about to end, which is dealt with then.
    pub fn say(&self, lane: LaneId, message: Bytes) {
        if let Some(lane) = self.lanes.get(&lane) {
            let _ = lane.outgoing.send(message);
        }
    }

    /// Says something on every lane but the first one.
    pub fn say_further(&self, message: &Bytes) {
        for (_, lane) in self.lanes.iter().filter(|(id, _)| **id != FIRST) {
            let _ = lane.outgoing.send(message.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> mpsc::UnboundedSender<Bytes> {
        mpsc::unbounded_channel().0
    }

    #[test]
    fn a_lane_for_each_share_of_the_rate() {
        assert_eq!(lanes_for(0.0, 100.0), 1);
        assert_eq!(lanes_for(199.0, 100.0), 1);
        assert_eq!(lanes_for(200.0, 100.0), 2);
        assert_eq!(lanes_for(450.0, 100.0), 4);
    }

    #[test]
    fn the_lane_that_owes_least_of_those_that_answer() {
        let (mut lanes, now) = (Lanes::new(queue(), 3), Instant::now());
        assert!(!lanes.claim(1, now), "there is one");
        assert!(lanes.claim(2, now));
        assert!(!lanes.claim(2, now), "it is on its way");
        let second = lanes.open(queue());
        assert_eq!(lanes.pick(7, 2), FIRST);
        assert_eq!(lanes.pick(7, 2), FIRST, "the second one says nothing of 7 yet");
        lanes.status(second, 7, HoldingState::Partial);
        assert_eq!(lanes.pick(8, 2), FIRST, "nor of 8");
        lanes.answered(FIRST);
        assert_eq!(lanes.pick(7, 2), second);
        assert_eq!(lanes.pick(7, 2), second);
        assert_eq!(lanes.pick(7, 1), FIRST, "the peer has become slower");
        assert_eq!(lanes.pick(7, 2), second);
        lanes.status(second, 7, HoldingState::Unknown);
        assert_eq!(lanes.pick(7, 2), FIRST);
        lanes.status(second, 7, HoldingState::Whole);
        lanes.forget(7);
        assert_eq!(lanes.owing(7), [(5, true), (3, false)]);
    }

    #[test]
    fn after_a_lane_ended_there_is_none_for_a_while_and_then_another_one() {
        let (mut lanes, now) = (Lanes::new(queue(), 3), Instant::now());
        assert!(lanes.claim(3, now));
        let second = lanes.open(queue());
        lanes.status(second, 7, HoldingState::Whole);
        assert!(lanes.claim(3, now));
        lanes.give_up(now);
        assert!(!lanes.claim(3, now), "a third one could not be had");
        assert_eq!((lanes.pick(7, 3), lanes.pick(7, 3)), (FIRST, second));
        // While another one is dialled.
        let later = now + LANE_RETRY;
        assert!(lanes.claim(3, later));
        lanes.close(second, later);
        assert_eq!(lanes.pick(7, 3), FIRST);
        let third = lanes.open(queue());
        assert_ne!(
            third, second,
            "what is said of the one that ended is not about this one"
        );
        assert!(!lanes.claim(3, later));
        assert!(lanes.claim(3, later + LANE_RETRY));
    }
}
