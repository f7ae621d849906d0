//! Planned hand-overs under load: how many requests fail, and how long a write takes while leadership moves.

use super::{GIVE_UP, MAX_WRITES, Mooncake, Subject, mooncake::created};
use anyhow::{Context, Result};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    sync::{Semaphore, mpsc},
    task::JoinSet,
};

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

/// Hands over `count` times at `per_second` writes. Nothing is repeated: what fails, fails.
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
    let load = tokio::spawn({
        let moving = Arc::clone(&moving);
        async move {
            let mut ticks = tokio::time::interval(Duration::from_secs(1) / per_second);
            ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
            let mut writes = JoinSet::new();
            for number in 0u64.. {
                ticks.tick().await;
                while writes.try_join_next().is_some() {}
                let Ok(turn) = Arc::clone(&turns).acquire_owned().await else {
                    return;
                };
                let (write, written) = (writer(number), written.clone());
                let moving = Arc::clone(&moving);
                let sent = Instant::now();
                let mut during = moving.load(std::sync::atomic::Ordering::Relaxed);
                writes.spawn(async move {
                    let error = match tokio::time::timeout(super::WRITE_TIMEOUT, write).await {
                        Ok(Ok(answer)) => created(answer).err().map(|error| format!("{error:#}")),
                        Ok(Err(error)) => Some(format!("{error:#}")),
                        Err(_) => Some("no answer in time".to_owned()),
                    };
                    during |= moving.load(std::sync::atomic::Ordering::Relaxed);
                    let took = sent.elapsed();
                    let _ = written.send(Written { during, took, error });
                    drop(turn);
                });
            }
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
    load.abort();
    let _ = load.await;
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
