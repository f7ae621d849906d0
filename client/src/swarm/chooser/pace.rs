//! How much is asked of one peer at a time: a window of outstanding requests that follows the bandwidth-delay
//! product of the path to it. Pure; the caller brings the clock.
//!
//! Guaranteed: the window stays within [`WINDOW_MIN`] and the most it was made with. A latency counts for at most two
//! spans of [`PROBE_US`], so that a window never grows with a queue of this node's own making.

/// Outstanding requests at a peer of which nothing is known yet.
const WINDOW_START: u32 = 4;
/// Fewest outstanding requests: one being sent while the next one waits.
pub(super) const WINDOW_MIN: u32 = 2;
/// How long a measured latency counts. After it the window goes down for one round trip to measure again.
const PROBE_US: u64 = 10_000_000;
/// Blocks, and time, over which a rate is measured: so many blocks, but not what a busy node took in at one go.
const MEASURE_BLOCKS: f64 = 4.0;
const MEASURE_LEAST_US: u64 = 5_000;
const MEASURE_US: u64 = 100_000;
/// What the window covers beside the path: how long the tasks at both ends may take to get round to a block. On a path
/// whose latency is small beside it, the window would else be empty whenever one of them waits for a core.
const HOPS_US: f64 = 5_000.0;
/// Weight of the newest in the usual latency.
const SMOOTHING: f64 = 0.2;

/// A request that was answered with a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    /// Length of the block.
    pub(super) bytes: u64,
    /// When it was asked for.
    pub(super) asked_at_us: u64,
    /// Requests outstanding at the peer before it, and after the answer.
    pub(super) depth: usize,
    pub(super) outstanding: usize,
}

/// The pace of one peer.
#[derive(Debug)]
pub(super) struct Pace {
    block_size: f64,
    window: u32,
    window_max: u32,
    /// Bytes per microsecond.
    rate: f64,
    /// Shortest times from request to block, in this span and in the one before (see [`PROBE_US`]).
    min_latency_us: [f64; 2],
    span_from_us: u64,
    /// Time from request to block, queues and all, smoothed; none came yet: 0.
    usual_latency_us: f64,
    /// The window is at its least until a request that met no queue of our own is answered.
    probing: bool,
    measured_bytes: u64,
    measured_from_us: u64,
    /// Since when nothing is outstanding, if a block was the last that was.
    idle_since_us: Option<u64>,
}

impl Pace {
    pub(super) fn new(block_size: u64, window_max: u32) -> Self {
        Self {
            block_size: block_size as f64,
            window: WINDOW_START.min(window_max),
            window_max,
            rate: 0.0,
            min_latency_us: [f64::INFINITY; 2],
            span_from_us: 0,
            usual_latency_us: 0.0,
            probing: false,
            measured_bytes: 0,
            measured_from_us: 0,
            idle_since_us: None,
        }
    }

    /// Most requests to have outstanding.
    pub(super) fn window(&self) -> u32 {
        self.window
    }

    /// Time from request to block without a queue of our own making, if any block came.
    pub(super) fn base_latency_us(&self) -> Option<f64> {
        let base = self.min_latency_us[0].min(self.min_latency_us[1]);
        base.is_finite().then_some(base)
    }

    /// Time from request to block as it usually is, with all that is before it in the queue, if any block came.
    pub(super) fn usual_latency_us(&self) -> Option<f64> {
        (self.usual_latency_us > 0.0).then_some(self.usual_latency_us)
    }

    /// Nothing is outstanding and something is asked for: what lies between is no measure of the path.
    pub(super) fn begins(&mut self, now_us: u64) {
        match self.idle_since_us.take() {
            Some(since_us) => self.measured_from_us += now_us - since_us,
            None => (self.measured_bytes, self.measured_from_us) = (0, now_us),
        }
    }

    /// The peer has no room.
    pub(super) fn halve(&mut self) {
        self.window = (self.window / 2).max(WINDOW_MIN);
    }

    /// The peer stands still: from the least on.
    pub(super) fn reset(&mut self) {
        self.window = WINDOW_MIN;
    }

    /// A block came.
    pub(super) fn answered(&mut self, answer: Answer, now_us: u64) {
        let latency = (now_us - answer.asked_at_us).max(1) as f64;
        self.usual_latency_us = match self.usual_latency_us() {
            Some(usual) => usual + SMOOTHING * (latency - usual),
            None => latency,
        };
        if now_us > self.span_from_us + PROBE_US {
            // What was measured long ago counts no more; and what is measured behind a queue of our own would let
            // the window, and with it the queue, grow for ever.
            self.probing = self.span_from_us > 0;
            self.min_latency_us = [f64::INFINITY, self.min_latency_us[0]];
            self.span_from_us = now_us;
        }
        self.min_latency_us[0] = self.min_latency_us[0].min(latency);
        self.probing &= answer.depth > 1;
        self.measured_bytes += answer.bytes;
        let span = now_us - self.measured_from_us;
        let enough = self.measured_bytes as f64 >= MEASURE_BLOCKS * self.block_size || span > MEASURE_US;
        if span >= MEASURE_LEAST_US && enough {
            let now_rate = self.measured_bytes as f64 / span as f64;
            // Up at once; down slowly, and only if there was enough asked to show what the path can do.
            let busy = answer.outstanding as u32 + 1 >= self.window / 2;
            if now_rate > self.rate {
                self.rate = now_rate;
            } else if busy {
                self.rate += 0.3 * (now_rate - self.rate);
            }
            (self.measured_bytes, self.measured_from_us) = (0, now_us);
        }
        self.idle_since_us = (answer.outstanding == 0).then_some(now_us);
        if self.probing {
            self.window = WINDOW_MIN;
        } else if self.rate > 0.0
            && let Some(base) = self.base_latency_us()
        {
            let wanted = ((2.0 * base + HOPS_US) * self.rate / self.block_size).ceil() as u32 + 1;
            self.window = wanted.clamp(WINDOW_MIN, self.window_max);
        }
    }
}
