//! Planned hand-overs under load: how many requests fail, and how long a write takes while leadership moves.

use super::{GIVE_UP, MAX_WRITES, Mooncake, Subject, WRITE_TIMEOUT, Write};
use anyhow::{Context, Result, ensure};
use reqwest::StatusCode;
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant, SystemTime},
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
    /// Of these, acknowledged with 200: see [`hand_over`].
    pub repeated: u64,
    /// Writes that were not acknowledged, with the reason.
    pub failed: Vec<String>,
    /// Latencies of writes sent while a hand-over was under way, sorted.
    pub during: Vec<Duration>,
    /// Latencies of all others, sorted.
    pub otherwise: Vec<Duration>,
    /// Each hand-over by itself, in the order in which they came.
    pub each: Vec<One>,
}

/// One hand-over.
#[derive(Clone, Copy, Debug)]
pub struct One {
    /// Index of the master that was stopped, or led.
    pub master: usize,
    /// When it began, to be found in the masters' logs.
    pub began: SystemTime,
    /// From there until the master was stopped, or did not lead any more.
    pub took: Duration,
    /// The write during it that took longest: when it was sent, and its latency.
    pub slowest: Option<(SystemTime, Duration)>,
}

struct Written {
    /// During which hand-over, by its index.
    during: Option<usize>,
    sent: SystemTime,
    took: Duration,
    answer: Result<StatusCode, String>,
}

/// Which hand-over is under way, for those who write.
#[derive(Default)]
struct Moving(AtomicUsize);

impl Moving {
    fn set(&self, number: Option<usize>) {
        self.0
            .store(number.map_or(0, |number| number + 1), Ordering::Relaxed);
    }

    fn get(&self) -> Option<usize> {
        self.0.load(Ordering::Relaxed).checked_sub(1)
    }
}

/// The whole answer: one that breaks off is a failed request too.
async fn acknowledged(write: Write) -> Result<StatusCode> {
    let answer = write.await?;
    let status = answer.status();
    let good = [StatusCode::CREATED, StatusCode::OK];
    ensure!(good.contains(&status), "{status}");
    answer.bytes().await?;
    Ok(status)
}

/// Hands over `count` times at `per_second` writes. Nothing is repeated: what fails, fails. Every write that was sent is
/// in the result, those that were under way at the end too.
///
/// An acknowledgement is 201, or 200: a master that passes a write on once more, because the leader's answer was lost, is
/// told that the job is there already. Every write is a job of its own, so nobody else can have made it.
pub async fn hand_over(
    subject: &mut Mooncake,
    how: HandOver,
    count: usize,
    per_second: u32,
    mut progress: impl FnMut(),
) -> Result<Cost> {
    let (written, mut results) = mpsc::unbounded_channel();
    let moving = Arc::new(Moving::default());
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
                let (sent, clock) = (SystemTime::now(), Instant::now());
                let before = moving.get();
                writes.spawn(async move {
                    let answer = match tokio::time::timeout(WRITE_TIMEOUT, acknowledged(write)).await {
                        Ok(answer) => answer.map_err(|error| format!("{error:#}")),
                        Err(_) => Err(format!("no answer within {WRITE_TIMEOUT:?}")),
                    };
                    let _ = written.send(Written {
                        during: before.or_else(|| moving.get()),
                        sent,
                        took: clock.elapsed(),
                        answer,
                    });
                    drop(turn);
                });
            }
            while writes.join_next().await.is_some() {}
        }
    });
    let mut each = Vec::with_capacity(count);
    for number in 0..count {
        let (leader, _) = tokio::time::timeout(GIVE_UP, subject.settled())
            .await
            .context("the masters do not settle")??;
        let member = match how {
            HandOver::Stop | HandOver::Transfer => leader,
            HandOver::Rolling => number % subject.masters(),
        };
        tokio::time::sleep(Duration::from_secs(1)).await;
        moving.set(Some(number));
        let (began, clock) = (SystemTime::now(), Instant::now());
        match how {
            HandOver::Transfer => subject.transfer(member).await?,
            HandOver::Stop | HandOver::Rolling => subject.stop(member).await?,
        }
        moving.set(None);
        each.push(One {
            master: member,
            began,
            took: clock.elapsed(),
            slowest: None,
        });
        if how != HandOver::Transfer {
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
        each,
        ..Cost::default()
    };
    while let Some(write) = results.recv().await {
        cost.writes += 1;
        cost.repeated += u64::from(write.answer == Ok(StatusCode::OK));
        match (write.answer, write.during) {
            (Err(error), _) => cost.failed.push(error),
            (Ok(_), Some(number)) => {
                cost.during.push(write.took);
                let slowest = &mut cost.each[number].slowest;
                if slowest.is_none_or(|(_, took)| took < write.took) {
                    *slowest = Some((write.sent, write.took));
                }
            }
            (Ok(_), None) => cost.otherwise.push(write.took),
        }
    }
    cost.during.sort();
    cost.otherwise.sort();
    Ok(cost)
}
