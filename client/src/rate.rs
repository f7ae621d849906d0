//! The bandwidth that a person gives this node.
//!
//! Guaranteed: over any time, no more than the rate times that time passes, and beyond that one burst
//! ([`Limit::burst_bytes`]) and one block of each transfer, which waits after it has asked for it. Those who wait share the
//! rate by bytes, in turns of [`TURN_UNITS`], whether they ask for blocks or for a few bytes. Not guaranteed: an even flow
//! within a burst (a block goes out as fast as the link takes it); that control messages count; and at tens of gibibytes
//! per second more exactness than some per cent (the counters tick in nanoseconds).

use governor::{
    Quota, RateLimiter, clock::Clock, clock::MonotonicClock, state::InMemoryState, state::NotKeyed,
};
use mooncake_proto::manifest::BLOCK_SIZE_RANGE;
use std::{num::NonZeroU32, str::FromStr};
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

type Bucket = RateLimiter<NotKeyed, InMemoryState, MonotonicClock>;

/// Lets bytes pass at a rate, for all who share it.
#[derive(Debug, Default)]
pub struct Rate {
    /// None: as fast as can be. The lock makes a queue of those who wait.
    bucket: Option<(Mutex<()>, Bucket)>,
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
            (
                Mutex::new(()),
                RateLimiter::direct_with_clock(quota, MonotonicClock),
            )
        });
        Self { bucket }
    }

    /// Whether there is a limit at all.
    pub fn is_limited(&self) -> bool {
        self.bucket.is_some()
    }

    /// Waits until `bytes` more may pass.
    pub async fn wait(&self, bytes: u64) {
        let Some((turn, bucket)) = &self.bucket else {
            return;
        };
        let mut rest = bytes.div_ceil(UNIT_BYTES);
        while let Some(part) = NonZeroU32::new(u32::try_from(rest).unwrap_or(u32::MAX).min(TURN_UNITS)) {
            let _turn = turn.lock().await;
            while let Err(early) = bucket.check_n(part).expect("a turn is less than a burst") {
                tokio::time::sleep(early.wait_time_from(MonotonicClock.now())).await;
            }
            rest -= u64::from(part.get());
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
