//! Which peers RDMA is not tried with for a while, because it failed there. Pure.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

/// The first rest after a failure; doubles with each further one up to [`LONGEST`].
pub const FIRST: Duration = Duration::from_secs(2);
/// The longest rest: after that long without RDMA nobody should have to restart anything.
pub const LONGEST: Duration = Duration::from_secs(60);
/// A connection that lasted for longer has shown that RDMA works there: what failed before it counts no more.
pub const FORGIVEN_AFTER: Duration = Duration::from_secs(60);
/// Most peers that are remembered: more than any node has links.
const MAX_PEERS: usize = 4096;

#[derive(Debug)]
struct Rest {
    failures: u32,
    until: Instant,
    why: String,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Rests {
    peers: HashMap<String, Rest>,
}

impl Rests {
    /// RDMA with `peer` failed, after it had worked for `lasted`. Until when it rests.
    pub fn failed(&mut self, peer: &str, why: &str, lasted: Duration, now: Instant) -> Instant {
        if self.peers.len() >= MAX_PEERS && !self.peers.contains_key(peer) {
            self.make_room(now);
        }
        let before = self.peers.get(peer).filter(|r| {
            // Nor does a failure of long ago.
            lasted < FORGIVEN_AFTER && now < r.until + FORGIVEN_AFTER
        });
        let failures = before.map_or(0, |r| r.failures).saturating_add(1);
        let rest = FIRST.saturating_mul(1 << (failures - 1).min(16)).min(LONGEST);
        let until = now + rest;
        let why = why.to_owned();
        self.peers.insert(peer.to_owned(), Rest { failures, until, why });
        until
    }

    /// Until when `peer` rests, if it does, and why.
    pub fn resting(&self, peer: &str, now: Instant) -> Option<(Instant, &str)> {
        let rest = self.peers.get(peer).filter(|r| now < r.until)?;
        Some((rest.until, &rest.why))
    }

    fn make_room(&mut self, now: Instant) {
        self.peers.retain(|_, r| now < r.until + FORGIVEN_AFTER);
        if self.peers.len() < MAX_PEERS {
            return;
        }
        let soonest = self.peers.iter().min_by_key(|(_, r)| r.until);
        if let Some(peer) = soonest.map(|(peer, _)| peer.clone()) {
            self.peers.remove(&peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn rests_double_up_to_a_bound_and_are_forgiven() {
        let start = Instant::now();
        let mut rests = Rests::default();
        assert_eq!(rests.resting("a", start), None);
        let mut now = start;
        let mut waited = Vec::new();
        for _ in 0..8 {
            let until = rests.failed("a", "no reply", S, now);
            waited.push((until - now).as_secs());
            assert_eq!(rests.resting("a", until - S), Some((until, "no reply")));
            assert_eq!(rests.resting("a", until), None, "it may be tried again");
            assert_eq!(rests.resting("b", now), None, "another peer");
            now = until;
        }
        assert_eq!(waited, [2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(
            rests.failed("a", "x", FORGIVEN_AFTER, now) - now,
            FIRST,
            "it had worked"
        );
        let until = rests.failed("a", "x", S, now);
        assert_eq!(until - now, 2 * FIRST);
        let later = until + FORGIVEN_AFTER;
        assert_eq!(rests.failed("a", "x", S, later) - later, FIRST, "long ago");
    }

    #[test]
    fn peers_that_are_remembered_are_bounded() {
        let now = Instant::now();
        let mut rests = Rests::default();
        for n in 0..MAX_PEERS {
            rests.failed(&n.to_string(), "x", Duration::ZERO, now);
        }
        rests.failed("0", "x", Duration::ZERO, now);
        rests.failed("new", "x", Duration::ZERO, now);
        assert_eq!(rests.peers.len(), MAX_PEERS);
        assert!(rests.resting("new", now).is_some() && rests.resting("0", now).is_some());
        let later = now + FORGIVEN_AFTER + LONGEST;
        rests.failed("last", "x", Duration::ZERO, later);
        assert_eq!(rests.peers.len(), 1, "the old ones are of no use any more");
    }
}
