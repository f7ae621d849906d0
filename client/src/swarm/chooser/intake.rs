//! How much comes in altogether, and how much of it from relays. Pure; the caller brings the clock.

/// Over which rates are measured: many blocks on any link that is worth sharing out, short beside a transfer.
const SPAN_US: u64 = 250_000;
/// What relays must bring of the most that ever came in, so that the seed can be left to others.
const ENOUGH: f64 = 0.8;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Intake {
    from_us: u64,
    bytes: u64,
    relayed_bytes: u64,
    /// Bytes per microsecond: the most of any span, and what relays brought in the last one.
    most: f64,
    relayed: f64,
}

impl Intake {
    /// A block came, from a relay or from a seed.
    pub(super) fn delivered(&mut self, bytes: u64, relay: bool, now_us: u64) {
        let span_us = now_us.saturating_sub(self.from_us);
        if span_us >= SPAN_US {
            let rate = |bytes: u64| bytes as f64 / span_us as f64;
            self.most = self.most.max(rate(self.bytes));
            self.relayed = rate(self.relayed_bytes);
            (self.from_us, self.bytes, self.relayed_bytes) = (now_us, 0, 0);
        }
        self.bytes += bytes;
        self.relayed_bytes += if relay { bytes } else { 0 };
    }

    /// Whether relays alone bring about as much as this node was ever seen to take in.
    pub(super) fn relays_suffice(&self) -> bool {
        self.most > 0.0 && self.relayed >= ENOUGH * self.most
    }
}
