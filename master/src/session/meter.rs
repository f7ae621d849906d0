//! How fast a task moves: a short window of its own counts.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// The rate is over about this long.
const WINDOW: Duration = Duration::from_secs(5);
/// Samples kept: reports come about once a second.
const MAX_SAMPLES: usize = 16;

/// A windowed meter over a running total.
#[derive(Clone, Debug, Default)]
pub(super) struct Meter(VecDeque<(Instant, u64)>);

impl Meter {
    /// The total is `bytes` now. A total that went back (blocks that proved wrong) starts the window anew.
    pub(super) fn add(&mut self, now: Instant, bytes: u64) {
        if self.0.back().is_some_and(|(_, last)| bytes < *last) {
            self.0.clear();
        }
        // One sample older than the window stays, so that the window is always covered.
        while self.0.len() >= MAX_SAMPLES
            || self
                .0
                .get(1)
                .is_some_and(|(at, _)| now.duration_since(*at) > WINDOW)
        {
            self.0.pop_front();
        }
        self.0.push_back((now, bytes));
    }

    /// Bytes per second; 0 when nothing was heard for a window.
    pub(super) fn rate(&self, now: Instant) -> u64 {
        let (Some((from, first)), Some((to, last))) = (self.0.front(), self.0.back()) else {
            return 0;
        };
        if now.duration_since(*to) > WINDOW {
            return 0;
        }
        // Up to now, not to the last sample: a task that stands still slows down before it is silent.
        let seconds = now.duration_since(*from).as_secs_f64();
        if seconds < 0.05 {
            0
        } else {
            ((last - first) as f64 / seconds) as u64
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_flow_has_its_rate_and_silence_none() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut meter = Meter::default();
        assert_eq!(meter.rate(start), 0);
        for second in 0..20 {
            meter.add(at(second * 1000), second * 1_000_000);
        }
        assert_eq!(meter.rate(at(19_000)), 1_000_000);
        assert!(meter.rate(at(22_000)) < 1_000_000);
        assert_eq!(meter.rate(at(25_000)), 0);
    }

    #[test]
    fn a_step_back_is_no_negative_rate() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut meter = Meter::default();
        meter.add(at(0), 1000);
        meter.add(at(1000), 2000);
        meter.add(at(2000), 5);
        assert_eq!(meter.rate(at(2000)), 0);
        meter.add(at(3000), 1005);
        assert_eq!(meter.rate(at(3000)), 1000);
    }

    #[test]
    fn samples_are_bounded() {
        let start = Instant::now();
        let mut meter = Meter::default();
        for i in 0..1000 {
            meter.add(start + Duration::from_millis(i), i);
        }
        assert!(meter.0.len() <= MAX_SAMPLES);
    }
}
