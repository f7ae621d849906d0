//! Closed loops: so many callers, each of whom asks again as soon as it is answered. Mooncake and etcd are up at once
//! and take turns, so that the machine is the same for both.
//!
//! Both are asked directly, without a load balancer, in the way of their own clients: Mooncake over HTTP/1.1 with JSON,
//! etcd over gRPC (through its JSON gateway it would be the gateway that is measured). Each caller has one long-lived
//! connection to one member, members by turns, on both sides alike.

use super::Report;
use crate::{
    failover::{Asker, Etcd, Mooncake, Subject},
    report::{ms, percentile},
};
use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Before each loop's clock starts: connections are made, caches warm.
const WARM_UP: Duration = Duration::from_secs(1);
/// Of each cluster.
const MEMBERS: usize = 3;
/// As the table says it.
pub const MOONCAKE: &str = "mooncake, HTTP";
/// See [`MOONCAKE`].
pub const ETCD: &str = "etcd 3.4 (100/1000 ms), gRPC";
/// Until a cluster answers a first request.
const GIVE_UP: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A job; a put of a value of its size.
    Create,
    /// A snapshot that shows everything acknowledged before; a linearizable range of one key.
    Read,
    /// What the asked member has applied; a serializable range.
    StaleRead,
}

impl Kind {
    /// All of them, in the order of a round.
    pub const ALL: [Self; 3] = [Self::Create, Self::Read, Self::StaleRead];

    /// As the table says it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "creates / puts",
            Self::Read => "reads, linearizable",
            Self::StaleRead => "reads, stale",
        }
    }
}

/// How to ask.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Callers at once.
    pub callers: usize,
    /// Of one loop.
    pub lasts: Duration,
    /// How often each is repeated, in turn.
    pub rounds: usize,
}

/// What came of all rounds of one kind with one subject.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Of those that were answered as wished, in order.
    pub latencies: Vec<Duration>,
    /// The others.
    pub failed: u64,
    /// Why the first of them failed.
    pub first_failure: Option<String>,
    /// Answered per second, of each round.
    pub rates: Vec<f64>,
}

impl Measured {
    /// Adds other rounds, or all callers of one.
    pub fn add(&mut self, others: impl IntoIterator<Item = Self>) {
        for other in others {
            self.latencies.extend(other.latencies);
            self.failed += other.failed;
            self.first_failure = self.first_failure.take().or(other.first_failure);
            self.rates.extend(other.rates);
        }
        self.latencies.sort_unstable();
    }

    /// Milliseconds below which the share `p` is.
    pub fn ms_at(&self, p: f64) -> f64 {
        ms(percentile(&self.latencies, p))
    }
}

/// By kind and subject.
pub type Rates = BTreeMap<(Kind, &'static str), Measured>;

/// Runs it all; what is measured is in the report as each loop ends, and `progress` is called then.
pub async fn all(plan: Plan, report: &Mutex<Report>, mut progress: impl FnMut()) -> Result<()> {
    ensure!(plan.callers > 0 && plan.rounds > 0, "nothing to ask");
    crate::cluster::allow_side_by_side(2);
    let mut mooncake = Mooncake::start().await?;
    let mut etcd = Etcd::start(None).await?;
    mooncake.settled().await?;
    etcd.settled().await?;
    let value_bytes = mooncake.body_bytes(&series(0, Kind::Create));
    for round in 0..plan.rounds {
        for kind in Kind::ALL {
            for whom in order(round) {
                let name = whom.name();
                let askers = match whom {
                    Whom::Mooncake => of_mooncake(&mooncake, plan, round, kind).await,
                    Whom::Etcd => of_etcd(&etcd, plan, round, kind, value_bytes).await,
                };
                let askers = askers.with_context(|| format!("{name}, {}", kind.name()))?;
                let measured = one(plan, askers).await?;
                report.lock().add_rate(kind, name, measured);
                progress();
            }
        }
    }
    mooncake.finish();
    etcd.finish();
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whom {
    Mooncake,
    Etcd,
}

impl Whom {
    /// As the table says it.
    fn name(self) -> &'static str {
        match self {
            Self::Mooncake => MOONCAKE,
            Self::Etcd => ETCD,
        }
    }
}

/// Each goes first in turn: whoever comes second finds the disk as the other one left it.
fn order(round: usize) -> [Whom; 2] {
    match round % 2 {
        0 => [Whom::Mooncake, Whom::Etcd],
        _ => [Whom::Etcd, Whom::Mooncake],
    }
}

/// What the ids of one loop begin with.
fn series(round: usize, kind: Kind) -> String {
    format!("rates-{round}-{}-", kind as u8)
}

/// What is read was written just before: masters forget the oldest of 10,000 ended jobs, and the creates of one loop are
/// more than that.
async fn of_mooncake(mooncake: &Mooncake, plan: Plan, round: usize, kind: Kind) -> Result<Vec<Asker>> {
    let series = series(round, kind);
    if kind == Kind::Create {
        return mooncake.creators(plan.callers, &series);
    }
    let job = format!("{series}read");
    retried(|| mooncake.make(&job)).await?;
    mooncake.readers(plan.callers, &job, kind == Kind::StaleRead)
}

async fn of_etcd(etcd: &Etcd, plan: Plan, round: usize, kind: Kind, bytes: usize) -> Result<Vec<Asker>> {
    let series = series(round, kind);
    if kind == Kind::Create {
        return etcd.putters(plan.callers, &series, bytes);
    }
    // Number 0 of this series, by one caller of each member, and read from each before the clock starts.
    let key = format!("{series}0");
    for put in etcd.putters(MEMBERS, &series, bytes)? {
        retried(|| put(0)).await?;
    }
    for read in etcd.readers(MEMBERS, &key, true)? {
        retried(|| read(0)).await?;
    }
    etcd.readers(plan.callers, &key, kind == Kind::StaleRead)
}

/// Until it is answered as wished.
async fn retried<F: Future<Output = Result<()>>>(ask: impl Fn() -> F) -> Result<()> {
    let deadline = Instant::now() + GIVE_UP;
    while let Err(error) = ask().await {
        ensure!(Instant::now() < deadline, "not within {GIVE_UP:?}: {error:#}");
        tokio::time::sleep(POLL).await;
    }
    Ok(())
}

/// One loop, with a caller for each asker. What is sent in the first moments ([`WARM_UP`]) is asked, but not counted,
/// unless it fails.
async fn one(plan: Plan, askers: Vec<Asker>) -> Result<Measured> {
    let numbers = Arc::new(AtomicU64::new(0));
    let began = Instant::now() + WARM_UP;
    let callers = askers.into_iter().map(|ask| {
        let numbers = Arc::clone(&numbers);
        tokio::spawn(async move {
            let mut seen = Measured::default();
            loop {
                let sent = Instant::now();
                if sent >= began + plan.lasts {
                    return seen;
                }
                match ask(numbers.fetch_add(1, Ordering::Relaxed)).await {
                    Ok(()) if sent >= began => seen.latencies.push(sent.elapsed()),
                    Ok(()) => {}
                    Err(error) => {
                        seen.failed += 1;
                        seen.first_failure.get_or_insert_with(|| format!("{error:#}"));
                    }
                }
            }
        })
    });
    let mut seen = Vec::new();
    for caller in callers.collect::<Vec<_>>() {
        seen.push(caller.await?);
    }
    let mut measured = Measured::default();
    measured.add(seen);
    let rate = measured.latencies.len() as f64 / began.elapsed().as_secs_f64();
    measured.rates.push(rate);
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_goes_first_in_turn() {
        assert_eq!(order(0)[0], Whom::Mooncake);
        assert_eq!(order(1)[0], Whom::Etcd);
        assert_eq!(order(2), order(0));
    }

    #[test]
    fn rounds_are_added_up() {
        let of = |ms: &[u64], failure: Option<&str>| Measured {
            latencies: ms.iter().map(|ms| Duration::from_millis(*ms)).collect(),
            failed: u64::from(failure.is_some()),
            first_failure: failure.map(str::to_owned),
            rates: vec![1.0],
        };
        let mut sum = Measured::default();
        sum.add([of(&[5, 1], None)]);
        sum.add([of(&[3], Some("first")), of(&[], Some("second"))]);
        assert_eq!(sum.ms_at(0.5), 3.0);
        assert_eq!((sum.failed, sum.rates.len()), (2, 3));
        assert_eq!(sum.first_failure.as_deref(), Some("first"));
    }
}
