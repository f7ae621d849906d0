//! What losing masters costs a distribution: the same one with the masters at rest, and with the leader killed -9 every
//! few seconds.
//!
//! Each run has a testbed of its own, with links of one rate, so that the network decides how long it takes. The clock
//! runs from the request to the moment at which a caller reads `completed`: a failover in which that cannot be read
//! counts. Whatever was fetched twice is counted by the nodes and by the source.

use crate::{
    model::{Model, Prepared},
    testbed::{Testbed, TestbedOptions},
};
use anyhow::{Result, ensure};
use serde_json::Value;
use std::{
    path::Path,
    time::{Duration, Instant},
};

/// A killed master is started again after this time, as a supervisor does.
const RESTART: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(50);
/// A run may take so many times what the link needs, and [`SPARE`]: beyond it, it is given up.
const PATIENCE: u32 = 5;
const SPARE: Duration = Duration::from_secs(120);
/// No file of the model is larger.
const FILE_BYTES: u64 = 256 << 20;
const JOB: &str = "distribution";

/// What is distributed, and over what.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Of the model.
    pub size_bytes: u64,
    /// Targets; the first is the seed.
    pub clients: usize,
    /// Of every link, both ways.
    pub link_bits_per_s: u64,
}

impl Setup {
    /// Size by rate: no run can be quicker.
    pub fn bound(&self) -> Duration {
        Duration::from_secs_f64(self.size_bytes as f64 * 8.0 / self.link_bits_per_s as f64)
    }
}

/// Makes the model below `folder`, which is served in every run.
pub fn prepare(folder: &Path, setup: &Setup) -> Result<Prepared> {
    let count = setup.size_bytes.div_ceil(FILE_BYTES);
    let names: Vec<String> = (0..count).map(|i| format!("model-{i:05}.bin")).collect();
    let sizes = (0..count).map(|i| FILE_BYTES.min(setup.size_bytes - i * FILE_BYTES));
    let files: Vec<(&str, u64)> = names.iter().map(String::as_str).zip(sizes).collect();
    let mut model = Model::create(folder, "distribution", &files)?;
    model.chunk_size = 4 << 20;
    Prepared::of(model)
}

/// What one run brought.
#[derive(Clone, Debug)]
pub struct Distributed {
    /// From the request to `completed`.
    pub took: Duration,
    /// Leaders killed meanwhile.
    pub kills: usize,
    /// Terms of Raft from the first to the last, a kill's own included.
    pub terms: u64,
    /// Bytes that the source served more than once.
    pub source_again_bytes: u64,
    /// Bytes that nodes read again although they had read and taken them before.
    pub refetched_bytes: u64,
    /// Bytes that arrived at nodes and were not taken, such as second copies at the end.
    pub duplicate_bytes: u64,
    /// How often the status could not be read for longer than a poll, at most; the longest such time.
    pub longest_unreadable: Duration,
}

impl Distributed {
    /// Everything that was fetched twice.
    pub fn twice_bytes(&self) -> u64 {
        self.source_again_bytes + self.refetched_bytes + self.duplicate_bytes
    }
}

/// One distribution, from nothing. `progress` gets the verified bytes of all nodes and how many leaders were killed.
pub async fn distribute(
    setup: &Setup,
    prepared: &Prepared,
    kill_every: Option<Duration>,
    mut progress: impl FnMut(u64, usize),
) -> Result<Distributed> {
    let mut bed = Testbed::start(TestbedOptions {
        masters: 3,
        clients: setup.clients,
        link: Some(setup.link_bits_per_s),
        ..Default::default()
    })
    .await?;
    let source = bed.serve(&prepared.model.folder).await?.url.clone();
    let body = prepared.request(JOB, &source, &bed.cluster.nodes[0], &bed.cluster.nodes)?;
    let before = bed.cluster.term().await?;
    let mut killer = Killer::new(kill_every);
    let deadline = setup.bound() * PATIENCE + SPARE;
    let began = Instant::now();
    bed.cluster.create(&body).await?;
    let mut longest_unreadable = Duration::ZERO;
    let took = loop {
        let asked = Instant::now();
        let snapshot = bed.cluster.job(JOB).await?;
        longest_unreadable = longest_unreadable.max(asked.elapsed());
        match snapshot["status"].as_str() {
            Some("completed") => break began.elapsed(),
            Some("failed" | "canceled") => anyhow::bail!("the job did not complete: {snapshot:#}"),
            _ => {}
        }
        ensure!(
            began.elapsed() < deadline,
            "the job is not completed after {deadline:?}: {snapshot:#}\n{}",
            bed.cluster.log_tails()
        );
        progress(staged(&snapshot), killer.kills);
        killer.look(&mut bed).await?;
        tokio::time::sleep(POLL).await;
    };
    killer.restart(&mut bed)?;
    bed.cluster.wait_ready().await?;
    let terms = bed.cluster.term().await? - before;
    let again = |name: &'static str| format!("mooncake_client_{name}_bytes_total");
    let refetched_bytes = sum(&bed, &again("refetched")).await?;
    let duplicate_bytes = sum(&bed, &again("duplicate")).await?;
    let served = bed.source()?.bytes_served();
    let source_again_bytes = bed.source()?.bytes_served_again();
    ensure!(
        served >= setup.size_bytes,
        "the source served {served} bytes of {}: this run measured something else",
        setup.size_bytes
    );
    bed.finish();
    Ok(Distributed {
        took,
        kills: killer.kills,
        terms,
        source_again_bytes,
        refetched_bytes,
        duplicate_bytes,
        longest_unreadable,
    })
}

/// Kills the leader when it is time, and starts it again.
struct Killer {
    every: Option<Duration>,
    next: Instant,
    down: Option<(usize, Instant)>,
    kills: usize,
}

impl Killer {
    fn new(every: Option<Duration>) -> Self {
        Self {
            every,
            next: Instant::now() + every.unwrap_or_default(),
            down: None,
            kills: 0,
        }
    }

    async fn look(&mut self, bed: &mut Testbed) -> Result<()> {
        let Some(every) = self.every else { return Ok(()) };
        if self.down.is_some_and(|(_, at)| at.elapsed() >= RESTART) {
            self.restart(bed)?;
        }
        // Two of three must be there to lose one of them.
        if Instant::now() >= self.next && self.down.is_none() {
            let leader = bed.cluster.leader().await?;
            bed.cluster.masters[leader].kill();
            self.down = Some((leader, Instant::now()));
            self.kills += 1;
            self.next += every;
        }
        Ok(())
    }

    fn restart(&mut self, bed: &mut Testbed) -> Result<()> {
        match self.down.take() {
            Some((master, _)) => bed.cluster.masters[master].start(),
            None => Ok(()),
        }
    }
}

fn staged(snapshot: &Value) -> u64 {
    let placements = snapshot["placements"].as_array();
    let bytes = placements
        .into_iter()
        .flatten()
        .map(|p| p["staged_bytes"].as_u64());
    bytes.map(Option::unwrap_or_default).sum()
}

/// A counter, over all clients.
async fn sum(bed: &Testbed, name: &str) -> Result<u64> {
    let mut total = 0;
    for client in 0..bed.cluster.clients.len() {
        total += bed.cluster.client_metric(client, name).await?;
    }
    Ok(total)
}
