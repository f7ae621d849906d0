//! Planned hand-overs under load: how many requests fail, and how long a write takes while leadership moves.

use super::{GIVE_UP, MAX_WRITES, Mooncake, Subject, WRITE_TIMEOUT, mooncake::created};
use anyhow::{Context, Result};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    sync::{Semaphore, mpsc},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

/// How long the writes that are still under way at the end may take: each has its own time-out before that.
const DRAIN: Duration = WRITE_TIMEOUT.saturating_mul(2);

/// How leadership is made to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandOver {
    /// SIGTERM of the leader, which is started again when it has ended.
    Stop,
    /// A request to the leader, which stays and follows.
    Transfer,
    /// Each master in turn is stopped and started again, the leader where it is.
    Rolling,
}

impl HandOver {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Stop, Self::Transfer, Self::Rolling];

    /// As the table says it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "leader stopped",
            Self::Transfer => "transfer",
            Self::Rolling => "rolling restart",
        }
    }
}

/// What hand-overs cost their callers.
#[derive(Clone, Debug, Default)]
pub struct Cost {
    /// Hand-overs (of [`HandOver::Rolling`]: restarts).
    pub count: usize,
    /// Writes sent.
    pub writes: u64,
    /// Writes that were not answered with 201, with the reason.
    pub failed: Vec<String>,
    /// Latencies of writes sent while a hand-over was under way, sorted.
    pub during: Vec<Duration>,
    /// Latencies of all others, sorted.
    pub otherwise: Vec<Duration>,
}

struct Written {
    during: bool,
    took: Duration,
    error: Option<String>,
}

/// Hands over `count` times at `per_second` writes. Nothing is repeated: what fails, fails. Every write that was sent is
/// in the result, those that were under way at the end too.
pub async fn hand_over(
    subject: &mut Mooncake,
    how: HandOver,
    count: usize,
    per_second: u32,
    mut progress: impl FnMut(),
) -> Result<Cost> {
    let (written, mut results) = mpsc::unbounded_channel();
    let moving = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let turns = Arc::new(Semaphore::new(MAX_WRITES));
    subject.begin_series();
    let writer = subject.writer();
    let stop = CancellationToken::new();
    // Also where something fails below.
    let _stopped = stop.clone().drop_guard();
    let load = tokio::spawn({
        let (moving, stop) = (Arc::clone(&moving), stop.clone());
        async move {
            let mut ticks = tokio::time::interval(Duration::from_secs(1) / per_second);
            ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
            let mut writes = JoinSet::new();
            for number in 0u64.. {
                let next = async {
                    ticks.tick().await;
                    Arc::clone(&turns).acquire_owned().await
                };
                let Some(Ok(turn)) = stop.run_until_cancelled(next).await else {
                    break;
                };
                while writes.try_join_next().is_some() {}
                let (write, written) = (writer(number), written.clone());
                let moving = Arc::clone(&moving);
                let sent = Instant::now();
                let mut during = moving.load(std::sync::atomic::Ordering::Relaxed);
                writes.spawn(async move {
                    // An answer that breaks off is a failed request too.
                    let whole = async { anyhow::Ok(created(write.await?)?.bytes().await?) };
                    let error = match tokio::time::timeout(WRITE_TIMEOUT, whole).await {
                        Ok(Ok(_)) => None,
                        Ok(Err(error)) => Some(format!("{error:#}")),
                        Err(_) => Some(format!("no answer within {WRITE_TIMEOUT:?}")),
                    };
                    during |= moving.load(std::sync::atomic::Ordering::Relaxed);
                    let took = sent.elapsed();
                    let _ = written.send(Written { during, took, error });
                    drop(turn);
                });
            }
            while writes.join_next().await.is_some() {}
        }
    });
    for number in 0..count {
        let (leader, _) = tokio::time::timeout(GIVE_UP, subject.settled())
            .await
            .context("the masters do not settle")??;
        let member = match how {
            HandOver::Stop | HandOver::Transfer => leader,
            HandOver::Rolling => number % subject.masters(),
        };
        tokio::time::sleep(Duration::from_secs(1)).await;
        moving.store(true, std::sync::atomic::Ordering::Relaxed);
        if how == HandOver::Transfer {
            subject.transfer(member).await?;
            moving.store(false, std::sync::atomic::Ordering::Relaxed);
        } else {
            subject.stop(member).await?;
            moving.store(false, std::sync::atomic::Ordering::Relaxed);
            subject.start_again(member)?;
        }
        progress();
    }
    tokio::time::timeout(GIVE_UP, subject.settled())
        .await
        .context("the masters do not settle")??;
    stop.cancel();
    tokio::time::timeout(DRAIN, load)
        .await
        .with_context(|| format!("writes are still under way {DRAIN:?} after the last was sent"))??;
    let mut cost = Cost {
        count,
        ..Cost::default()
    };
    while let Some(one) = results.recv().await {
        cost.writes += 1;
        match (one.error, one.during) {
            (Some(error), _) => cost.failed.push(error),
            (None, true) => cost.during.push(one.took),
            (None, false) => cost.otherwise.push(one.took),
        }
    }
    cost.during.sort();
    cost.otherwise.sort();
    Ok(cost)
}
