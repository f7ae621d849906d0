//! The leader's clock: wall time that does not jump.
//!
//! Graces and deadlines run on it. It is read from the wall once and then follows the monotonic clock, so a
//! wall clock that is set neither expires nodes nor keeps dead ones alive; it is read again when this master
//! becomes leader, and never goes behind what is in the log.

use parking_lot::Mutex;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// See the module docs.
pub(crate) struct Clock {
    /// A wall time and the moment it was read. Held for a copy.
    anchor: Mutex<(u64, Instant)>,
}

impl Default for Clock {
    fn default() -> Self {
        Self {
            anchor: Mutex::new((wall_ms(), Instant::now())),
        }
    }
}

impl Clock {
    /// Milliseconds since the epoch.
    pub(crate) fn now_ms(&self) -> u64 {
        let (at, read) = *self.anchor.lock();
        at.saturating_add(read.elapsed().as_millis() as u64)
    }

    /// Reads the wall again.
    pub(crate) fn set_anew(&self, at_least_ms: u64) {
        *self.anchor.lock() = (wall_ms().max(at_least_ms), Instant::now());
    }
}

fn wall_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_behind_the_log() {
        let clock = Clock::default();
        let ahead = wall_ms() + 1_000_000;
        clock.set_anew(ahead);
        assert!(clock.now_ms() >= ahead);
        clock.set_anew(0);
        assert!(clock.now_ms() < ahead);
    }
}
