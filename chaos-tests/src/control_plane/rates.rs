//! Closed loops: so many callers, each of whom asks again as soon as it is answered. Mooncake and etcd are up at once
//! and take turns, so that the machine is the same for both.

use crate::{
    failover::{Asker, Etcd, Mooncake, Subject},
    report::{ms, percentile},
};
use anyhow::{Context, Result, ensure};
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Until a cluster takes its first write through its balancer.
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
    /// Of those that were answered as wished, in order once [`all`] is done.
    pub latencies: Vec<Duration>,
    /// The others.
    pub failed: u64,
    /// Answered per second, of each round.
    pub rates: Vec<f64>,
}

impl Measured {
    /// Milliseconds below which the share `p` is.
    pub fn ms_at(&self, p: f64) -> f64 {
        ms(percentile(&self.latencies, p))
    }
}

/// By kind and subject.
pub type Rates = BTreeMap<(Kind, String), Measured>;

/// Runs it all; `progress` is called after each loop.
pub async fn all(plan: Plan, mut progress: impl FnMut()) -> Result<Rates> {
    ensure!(plan.callers > 0 && plan.rounds > 0, "nothing to ask");
    crate::cluster::allow_side_by_side(2);
    let mut mooncake = Mooncake::start().await?;
    let mut etcd = Etcd::start(None).await?;
    mooncake.settled().await?;
    etcd.settled().await?;
    // What is read.
    mooncake.begin_series();
    written(&mooncake).await.context("the job that is read")?;
    written(&etcd).await.context("the key that is read")?;
    let first = mooncake.job_of(0);
    let mut rates = Rates::new();
    for _ in 0..plan.rounds {
        for kind in Kind::ALL {
            mooncake.begin_series();
            let asker = match kind {
                Kind::Create => mooncake.creator(),
                Kind::Read => mooncake.reader(&first, false),
                Kind::StaleRead => mooncake.reader(&first, true),
            };
            one(plan, asker, rates.entry((kind, mooncake.name())).or_default()).await?;
            progress();
            let asker = match kind {
                Kind::Create => etcd.putter(),
                Kind::Read => etcd.reader(false),
                Kind::StaleRead => etcd.reader(true),
            };
            one(plan, asker, rates.entry((kind, etcd.name())).or_default()).await?;
            progress();
        }
    }
    for measured in rates.values_mut() {
        measured.latencies.sort();
    }
    mooncake.finish();
    etcd.finish();
    Ok(rates)
}

/// The balancer has to find its members first.
async fn written(subject: &impl Subject) -> Result<()> {
    let deadline = Instant::now() + GIVE_UP;
    while let Err(error) = subject.write(0).await {
        ensure!(Instant::now() < deadline, "not within {GIVE_UP:?}: {error:#}");
        tokio::time::sleep(POLL).await;
    }
    Ok(())
}

async fn one(plan: Plan, asker: Asker, measured: &mut Measured) -> Result<()> {
    let (asker, numbers) = (Arc::new(asker), Arc::new(AtomicU64::new(0)));
    let began = Instant::now();
    let callers = (0..plan.callers).map(|_| {
        let (asker, numbers) = (Arc::clone(&asker), Arc::clone(&numbers));
        tokio::spawn(async move {
            let (mut latencies, mut failed) = (Vec::new(), 0);
            while began.elapsed() < plan.lasts {
                let sent = Instant::now();
                match asker(numbers.fetch_add(1, Ordering::Relaxed)).await {
                    Ok(()) => latencies.push(sent.elapsed()),
                    Err(_) => failed += 1,
                }
            }
            (latencies, failed)
        })
    });
    let mut answered = 0;
    for caller in callers.collect::<Vec<_>>() {
        let (latencies, failed) = caller.await?;
        answered += latencies.len();
        measured.latencies.extend(latencies);
        measured.failed += failed;
    }
    measured
        .rates
        .push(answered as f64 / began.elapsed().as_secs_f64());
    Ok(())
}
