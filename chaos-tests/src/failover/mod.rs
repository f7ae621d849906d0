//! How long a cluster takes no writes after its leader is lost: Mooncake's masters, and etcd measured the same way on
//! the same machine in the same run.
//!
//! A write is sent every [`WRITE_EVERY`] through HAProxy, whatever became of those before it. The clock runs from the
//! moment of the fault to the first acknowledgement of a write that was *sent after it* and carries a higher term. So it
//! holds detection, election, the load balancer's part, and the commit.
//!
//! Not measured: clients' own retries. A write that fails is not repeated; the next one is 10 ms behind it.

mod etcd;
mod handover;
mod mooncake;
mod overload;

pub use etcd::Etcd;
pub use handover::{Cost, HandOver, hand_over};
pub use mooncake::{Answer, Mooncake, Write, term};
pub use overload::{Load, Outcome, overload};

use crate::testbed::{BalancerKind, Network, Testbed, TestbedOptions};
use anyhow::{Context, Result, ensure};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    sync::{Semaphore, mpsc},
    task::JoinSet,
};

/// Between two writes.
pub const WRITE_EVERY: Duration = Duration::from_millis(10);
/// How long one write may take; longer than any failover that is worth a number.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Writes under way at once: those of one time-out. Beyond it the measurement waits, and says so.
const MAX_WRITES: usize = 1_000;
/// How long until writes are acknowledged again, or a cluster has caught up: the run fails after that.
const GIVE_UP: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// What happens to the leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// kill -9 of its process: its host refuses connections from then on.
    Kill,
    /// SIGSTOP: its host accepts connections, nobody answers.
    Freeze,
    /// All packets to and from it are dropped.
    CutOff,
}

impl Fault {
    /// As the table says it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill -9",
            Self::Freeze => "SIGSTOP",
            Self::CutOff => "cut off",
        }
    }
}

/// What one write brought.
#[derive(Clone, Copy, Debug)]
struct Acknowledged {
    sent: Instant,
    answered: Instant,
    term: u64,
}

/// A cluster whose leader can be lost.
pub trait Subject: Send {
    /// As the table says it.
    fn name(&self) -> String;
    /// The numbers of writes begin at 0 again.
    fn begin_series(&mut self) {}
    /// Who leads, and in which term, once all members are there, agree and have caught up.
    fn settled(&mut self) -> impl Future<Output = Result<(usize, u64)>> + Send;
    /// One write through the load balancer; the term in which it was acknowledged.
    fn write(&self, number: u64) -> impl Future<Output = Result<u64>> + Send + 'static;
    /// Does it to this member.
    fn inject(&mut self, member: usize, fault: Fault) -> Result<()>;
    /// Undoes it.
    fn heal(&mut self, member: usize, fault: Fault) -> Result<()>;
}

/// What one series of faults brought.
#[derive(Clone, Debug)]
pub struct Series {
    /// Whose.
    pub subject: String,
    /// Which.
    pub fault: Fault,
    /// Each fault's time without writes.
    pub samples: Vec<Duration>,
    /// Elections that nobody caused (terms beyond one per fault).
    pub extra_terms: u64,
}

impl Series {
    /// The sample below which the share `p` of them is, by the nearest rank.
    pub fn percentile(&self, p: f64) -> Duration {
        let mut sorted = self.samples.clone();
        sorted.sort();
        percentile(&sorted, p)
    }
}

/// The duration below which the share `p` of the sorted ones is, by the nearest rank.
pub fn percentile(sorted: &[Duration], p: f64) -> Duration {
    let rank = (p * sorted.len() as f64).ceil() as usize;
    sorted
        .get(rank.clamp(1, sorted.len().max(1)) - 1)
        .copied()
        .unwrap_or_default()
}

/// Loses the leader `count` times, `interval` apart, the cluster caught up before each.
pub async fn run<S: Subject>(
    subject: &mut S,
    fault: Fault,
    count: usize,
    interval: Duration,
    mut progress: impl FnMut(Duration),
) -> Result<Series> {
    let (acknowledged, mut acknowledgements) = mpsc::unbounded_channel();
    let mut series = Series {
        subject: subject.name(),
        fault,
        samples: Vec::with_capacity(count),
        extra_terms: 0,
    };
    subject.begin_series();
    let turns = Arc::new(Semaphore::new(MAX_WRITES));
    let mut writes = JoinSet::new();
    let mut number = 0;
    for _ in 0..count {
        let next = Instant::now() + interval;
        let (leader, term) = tokio::time::timeout(GIVE_UP, subject.settled())
            .await
            .with_context(|| format!("{} does not settle within {GIVE_UP:?}", subject.name()))??;
        // The load is there before the fault; the moment of the fault is not in step with it.
        let mut ticks = tokio::time::interval(WRITE_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let inject_at = Instant::now() + interval / 2 + Duration::from_micros(number % 9_973);
        let mut lost: Option<Instant> = None;
        let sample = loop {
            tokio::select! {
                _ = ticks.tick() => {
                    if lost.is_none() && Instant::now() >= inject_at {
                        subject.inject(leader, fault)?;
                        lost = Some(Instant::now());
                    }
                    ensure!(
                        lost.is_none_or(|at| at.elapsed() < GIVE_UP),
                        "{}: no write was acknowledged within {GIVE_UP:?} of the fault", subject.name()
                    );
                    let turn = Arc::clone(&turns).acquire_owned().await?;
                    let (write, acknowledged) = (subject.write(number), acknowledged.clone());
                    number += 1;
                    let sent = Instant::now();
                    writes.spawn(async move {
                        if let Ok(Ok(term)) = tokio::time::timeout(WRITE_TIMEOUT, write).await {
                            let _ = acknowledged.send(Acknowledged { sent, answered: Instant::now(), term });
                        }
                        drop(turn);
                    });
                }
                Some(ack) = acknowledgements.recv() => {
                    let ack: Acknowledged = ack;
                    if let Some(at) = lost && ack.sent >= at && ack.term > term {
                        series.extra_terms += ack.term - term - 1;
                        break ack.answered - at;
                    }
                }
                Some(_) = writes.join_next() => {}
            }
        };
        series.samples.push(sample);
        progress(sample);
        // Long enough that what follows the election is over, as an operator would leave it.
        tokio::time::sleep(Duration::from_millis(500)).await;
        subject.heal(leader, fault)?;
        tokio::time::sleep(next.saturating_duration_since(Instant::now())).await;
    }
    writes.shutdown().await;
    Ok(series)
}

/// A testbed that a subject stands on: `masters` and `clients` as asked, HAProxy where Mooncake needs it.
async fn testbed(masters: usize, clients: usize, balancer: Option<BalancerKind>) -> Result<Testbed> {
    let options = TestbedOptions {
        masters,
        clients,
        balancer,
        ..Default::default()
    };
    match balancer {
        Some(_) => Testbed::start(options).await,
        None => Testbed::prepare(options).await,
    }
}

fn cut_off(network: &mut Network, host: &str) -> Result<()> {
    network.isolate(host).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let series = |ms: &[u64]| Series {
            subject: String::new(),
            fault: Fault::Kill,
            samples: ms.iter().map(|ms| Duration::from_millis(*ms)).collect(),
            extra_terms: 0,
        };
        let hundred = series(&(1..=100).rev().collect::<Vec<_>>());
        assert_eq!(hundred.percentile(0.5), Duration::from_millis(50));
        assert_eq!(hundred.percentile(0.99), Duration::from_millis(99));
        assert_eq!(hundred.percentile(1.0), Duration::from_millis(100));
        assert_eq!(series(&[7]).percentile(0.5), Duration::from_millis(7));
        assert_eq!(series(&[]).percentile(0.5), Duration::ZERO);
    }
}
