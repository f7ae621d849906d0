//! How long heartbeats take from this node to its master and back.
//!
//! A master answers each heartbeat at once, on the way that its own heartbeats go, so the time holds both processes'
//! queues and the network. A heartbeat that is never answered (the session broke, the master is of an older version)
//! is not in the numbers.

use parking_lot::Mutex;
use prometheus_client::metrics::histogram::Histogram;
use std::{collections::VecDeque, sync::Arc, time::Instant};

/// Upper ends in seconds. What operators ask about is whether it stays below 0.1, and how far from it.
const BUCKETS: [f64; 12] = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
];
/// Heartbeats remembered until their answer: more than a session lets pass in silence.
const MAX_WAITING: usize = 64;

/// Of all sessions of this process; clones share their numbers.
#[derive(Clone, Debug)]
pub struct RoundTrips {
    seconds: Histogram,
    /// Sequence and when it was sent. For a moment at a time, by the session's own thread only.
    waiting: Arc<Mutex<VecDeque<(u64, Instant)>>>,
}

impl Default for RoundTrips {
    fn default() -> Self {
        Self {
            seconds: Histogram::new(BUCKETS),
            waiting: Arc::default(),
        }
    }
}

impl RoundTrips {
    /// For `/metrics`.
    pub fn seconds(&self) -> Histogram {
        self.seconds.clone()
    }

    /// A session begins: answers to the last one's heartbeats do not come any more.
    pub(super) fn restart(&self) {
        self.waiting.lock().clear();
    }

    pub(super) fn sent(&self, sequence: u64, at: Instant) {
        let mut waiting = self.waiting.lock();
        if waiting.len() == MAX_WAITING {
            waiting.pop_front();
        }
        waiting.push_back((sequence, at));
    }

    pub(super) fn answered(&self, sequence: u64, at: Instant) {
        let mut waiting = self.waiting.lock();
        // Answers come in order; what is before it was lost.
        while let Some(&(first, sent)) = waiting.front() {
            if first > sequence {
                return;
            }
            waiting.pop_front();
            if first == sequence {
                self.seconds
                    .observe(at.saturating_duration_since(sent).as_secs_f64());
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::{encoding::text::encode, registry::Registry};
    use std::time::Duration;

    fn text(trips: &RoundTrips) -> String {
        let (mut registry, mut text) = (Registry::default(), String::new());
        registry.register("t", "t", trips.seconds());
        encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn each_answer_counts_once_and_for_its_own_heartbeat() {
        let trips = RoundTrips::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        for (sequence, ms) in [(1, 0), (2, 1_000), (3, 2_000)] {
            trips.sent(sequence, at(ms));
        }
        // The first answer was lost; the second is counted from its own heartbeat; nothing twice; nothing unknown.
        for sequence in [2, 2, 1, 7] {
            trips.answered(sequence, at(1_030));
        }
        let seen = text(&trips);
        for line in ["le=\"0.02\"} 0", "le=\"0.05\"} 1", "t_count 1"] {
            assert!(seen.contains(line), "{line}: {seen}");
        }
        trips.sent(8, at(3_000));
        trips.restart();
        trips.answered(8, at(3_001));
        assert!(
            text(&trips).contains("t_count 1"),
            "an answer of the session before"
        );
        for sequence in 0..1_000 {
            trips.sent(sequence, at(0));
        }
        assert_eq!(trips.waiting.lock().len(), MAX_WAITING);
    }
}
