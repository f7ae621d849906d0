//! The bandwidth that a person gives this node.
//!
//! Guaranteed: over any time, no more than the rate times that time passes, and beyond that one burst
//! ([`Limit::burst_bytes`]) and one block of each transfer under way, which waits after it has asked for it ([`Debt`]; what
//! it has not waited for when it ends, the next one waits for). Those who wait share the
//! rate by bytes, in turns of [`TURN_UNITS`], whether they ask for blocks or for a few bytes. Not guaranteed: an even flow
//! within a burst (a block goes out as fast as the link takes it); that control messages count; and at tens of gibibytes
//! per second more exactness than some per cent (the counters tick in nanoseconds).

use governor::{
    Quota, RateLimiter, clock::Clock, clock::MonotonicClock, state::InMemoryState, state::NotKeyed,
};
use mooncake_proto::manifest::BLOCK_SIZE_RANGE;
use std::{
    num::NonZeroU32,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::sync::Mutex;

/// What is counted: a limiter's numbers are 32 bits wide, and a byte more or less is nothing.
const UNIT_BYTES: u64 = 1024;
/// What one who waits gets before the next one's turn.
const TURN_UNITS: u32 = 64;
/// The least that may be given. Below it the largest block takes so long that whoever waits for it takes this node for
/// stalled (`STALL_US` of the chooser).
pub const LEAST: Limit = Limit(2 << 20);
/// The most: faster than any node's network, and within the counters.
const MOST: Limit = Limit(100 << 30);

/// Bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Limit(pub u64);

impl Limit {
    /// What may pass at once after a pause: the largest block, or a tenth of a second.
    pub fn burst_bytes(self) -> u64 {
        u64::from(*BLOCK_SIZE_RANGE.end()).max(self.0 / 10)
    }
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes per second", self.0)
    }
}

impl FromStr for Limit {
    type Err = String;

    /// Bytes per second: a number, with `KiB`, `MiB` or `GiB` behind it if wanted.
    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, factor) =
            unit(text).map_err(|other| format!("'{other}' is no unit: use KiB, MiB or GiB, per second"))?;
        let limit = digits
            .parse::<u64>()
            .ok()
            .and_then(|n| n.checked_mul(factor))
            .map(Limit)
            .ok_or_else(|| format!("'{digits}' is no number of bytes per second, such as 100MiB"))?;
        match (LEAST..=MOST).contains(&limit) {
            true => Ok(limit),
            false => Err(format!("give {} to {}", LEAST.0, MOST.0)),
        }
    }
}

/// A number of bytes as a person writes it: the digits, and by what `KiB`, `MiB` or `GiB` behind them multiplies. The error is
/// what is there instead, in lower case.
pub(crate) fn unit(text: &str) -> Result<(&str, u64), String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 1,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        other => return Err(other.to_owned()),
    };
    Ok((digits, factor))
}

#[derive(Debug)]
struct Bucket {
    /// Makes a queue of those who wait.
    turn: Mutex<()>,
    limiter: RateLimiter<NotKeyed, InMemoryState, MonotonicClock>,
    /// What has passed and was not waited for by those who ended.
    owed_units: AtomicU64,
}

impl Bucket {
    /// Waits until at most `units` more, of a turn at most, may pass, and says how many those are.
    async fn pass(&self, units: u64) -> u64 {
        let most = u32::try_from(units).unwrap_or(u32::MAX).min(TURN_UNITS);
        let Some(part) = NonZeroU32::new(most) else {
            return 0;
        };
        while let Err(early) = self.limiter.check_n(part).expect("a turn is less than a burst") {
            tokio::time::sleep(early.wait_time_from(MonotonicClock.now())).await;
        }
        part.get().into()
    }
}

/// Lets bytes pass at a rate, for all who share it.
#[derive(Debug, Default)]
pub struct Rate {
    /// None: as fast as can be.
    bucket: Option<Bucket>,
}

impl Rate {
    /// At most `limit`, if there is one.
    pub fn new(limit: Option<Limit>) -> Self {
        let units = |bytes: u64| {
            let units = u32::try_from(bytes / UNIT_BYTES).unwrap_or(u32::MAX);
            NonZeroU32::new(units).unwrap_or(NonZeroU32::MIN)
        };
        let bucket = limit.map(|limit| {
            let quota = Quota::per_second(units(limit.0)).allow_burst(units(limit.burst_bytes()));
            Bucket {
                turn: Mutex::new(()),
                limiter: RateLimiter::direct_with_clock(quota, MonotonicClock),
                owed_units: AtomicU64::new(0),
            }
        });
        Self { bucket }
    }

    /// Whether there is a limit at all.
    pub fn is_limited(&self) -> bool {
        self.bucket.is_some()
    }

    /// Waits until `bytes` more may pass.
    pub async fn wait(&self, bytes: u64) {
        self.wait_units(&mut bytes.div_ceil(UNIT_BYTES)).await;
    }

    /// `bytes` pass before they are waited for.
    pub fn debt(self: &Arc<Self>, bytes: u64) -> Debt {
        Debt {
            rate: self.clone(),
            units: bytes.div_ceil(UNIT_BYTES),
        }
    }

    /// Whether somebody left a debt, so that whoever waits next, if only for nothing, waits for that first.
    pub fn is_owed(&self) -> bool {
        let owed = self.bucket.as_ref().map(|b| b.owed_units.load(Ordering::Relaxed));
        owed.is_some_and(|units| units > 0)
    }

    /// Counts `rest` down to zero, and what others left before it.
    async fn wait_units(&self, rest: &mut u64) {
        let Some(bucket) = &self.bucket else {
            return;
        };
        while *rest > 0 || self.is_owed() {
            let _turn = bucket.turn.lock().await;
            // Only whoever has the turn takes from it.
            while self.is_owed() {
                let passed = bucket.pass(bucket.owed_units.load(Ordering::Relaxed)).await;
                bucket.owed_units.fetch_sub(passed, Ordering::Relaxed);
            }
            *rest -= bucket.pass(*rest).await;
        }
    }
}

/// What passes before it is waited for. Whatever has not been waited for when this is dropped is left to whoever waits next.
#[derive(Debug)]
#[must_use = "dropped, it is left to others"]
pub struct Debt {
    rate: Arc<Rate>,
    units: u64,
}

impl Debt {
    /// Waits until it all may have passed.
    pub async fn settle(mut self) {
        let rate = self.rate.clone();
        rate.wait_units(&mut self.units).await;
    }
}

impl Drop for Debt {
    fn drop(&mut self) {
        if let Some(bucket) = &self.rate.bucket {
            bucket.owed_units.fetch_add(self.units, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn limits_are_read() {
        assert_eq!("100MiB".parse(), Ok(Limit(100 << 20)));
        assert_eq!("2gib".parse(), Ok(Limit(2 << 30)));
        assert_eq!("4194304".parse(), Ok(Limit(4 << 20)));
        for wrong in ["", "fast", "1000", "1MiB", "100MB", "-1MiB", "99999999999GiB"] {
            assert!(wrong.parse::<Limit>().is_err(), "{wrong}");
        }
    }

    #[tokio::test]
    async fn what_nobody_waited_for_the_next_one_waits_for() {
        let limit = Limit(64 << 20);
        let rate = Arc::new(Rate::new(Some(limit)));
        let began = Instant::now();
        rate.wait(limit.burst_bytes()).await;
        // Never begun; dropped in the middle; whole.
        drop(rate.debt(4 << 20));
        let begun = rate.debt(8 << 20).settle();
        assert!(
            tokio::time::timeout(Duration::from_millis(80), begun)
                .await
                .is_err()
        );
        assert!(rate.is_owed());
        rate.debt(4 << 20).settle().await;
        assert!(!rate.is_owed());
        let least = Duration::from_secs_f64((16 << 20) as f64 / limit.0 as f64);
        assert!(began.elapsed() >= least.mul_f64(0.99), "{:?}", began.elapsed());
        // What was waited for is not waited for again.
        assert!(began.elapsed() < least * 3, "{:?}", began.elapsed());
        drop(Arc::new(Rate::default()).debt(1));
    }

    #[tokio::test]
    async fn no_more_passes_than_the_rate_and_one_burst() {
        let limit = Limit(64 << 20);
        let rate = Rate::new(Some(limit));
        let bytes = limit.burst_bytes() + (16 << 20);
        let began = Instant::now();
        // Larger than a burst, smaller, and several at once.
        tokio::join!(rate.wait(bytes / 2), rate.wait(bytes / 4), rate.wait(bytes / 4));
        let least = Duration::from_secs_f64((16 << 20) as f64 / limit.0 as f64);
        assert!(began.elapsed() >= least.mul_f64(0.99), "{:?}", began.elapsed());
        // By bytes: who asks for little is not behind all that who asks for much wants.
        let (much, little) = (rate.wait(32 << 20), rate.wait(1 << 20));
        tokio::pin!(much, little);
        tokio::select! {
            biased;
            () = &mut much => panic!("first come, all served"),
            () = &mut little => {}
        }
        // Without a limit nobody waits: this returns at all.
        Rate::default().wait(u64::MAX).await;
    }
}
