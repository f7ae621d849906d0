//! What it costs a receiver to take a model in: CPU time and throughput with nothing shaped, beside a floor that does
//! the least that any receiver with these digests must do.
//!
//! Both run between the same two hosts of one testbed, in turn. The seed has the model before: what is measured is the
//! transfer alone. Of the receiver counts the user and system time of its process, and the softirq time of the whole
//! machine meanwhile, which the kernel charges to nobody: on both sides alike.
//!
//! The floor reads blocks of the product's size from a socket, computes the product's digest of each, writes it at its
//! place, and syncs at the end: one thread and one connection for each core, a sender with `sendfile`. It has no
//! journal, asks nobody, and finds nothing wrong.
//!
//! Beside both, where it can be had, Mooncake Store ([`store`]).
//!
//! Not measured: the sender; a machine for each host (masters and seed have a share of the cores).

mod cpu;
pub mod floor;
mod report;
pub mod store;

pub use cpu::Cpu;
pub use report::{Measured, Report};

use crate::{
    broadcast::mooncake::{WAIT, Watch},
    model::{Model, Prepared},
    process::peak_memory_bytes,
    testbed::{Testbed, TestbedOptions},
};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeSet,
    fs::File,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

const SEED: usize = 0;
const RECEIVER: usize = 1;
const ACQUIRE: &str = "loopback-acquire";
const RECEIVE: &str = "loopback-receive";
const MODEL: &str = "model.bin";
/// Room beside the models in a tmpfs.
const MEMORY_SPARE_BYTES: u64 = 256 << 20;
/// One transfer is given up after so long for each GiB, and [`SPARE`].
const PATIENCE_PER_GIB: Duration = Duration::from_secs(120);
const SPARE: Duration = Duration::from_secs(120);

/// What is moved, and how the floor is built.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Of the model: one file.
    pub size_bytes: u64,
    /// Of the manifest.
    pub chunk_bytes: u64,
    /// Connections and threads of the floor.
    pub streams: usize,
    /// Whether nodes and floor write to memory.
    pub memory: bool,
}

/// One transfer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// From the request (the floor: from the first connection) until all is written and synced.
    pub took_s: f64,
    /// Of the receiver meanwhile.
    pub cpu: Cpu,
    /// Most memory that the receiver had resident in its life; of Mooncake Store what it receives into, too.
    pub peak_rss_bytes: u64,
}

/// The model, made once.
pub struct Loopback {
    setup: Setup,
    prepared: Prepared,
    folder: PathBuf,
    /// A Python that has Mooncake Store.
    store: Option<PathBuf>,
}

impl Loopback {
    /// Makes the model below `folder`. `store`: a Python that has Mooncake Store, which is then measured beside.
    pub fn prepare(setup: Setup, folder: &Path, store: Option<PathBuf>) -> Result<Self> {
        let mut model = Model::create(folder, "loopback", &[(MODEL, setup.size_bytes)])?;
        model.chunk_size = setup.chunk_bytes;
        File::open(folder.join(MODEL))?.sync_all()?;
        Ok(Self {
            setup,
            prepared: Prepared::of(model)?,
            folder: folder.to_owned(),
            store,
        })
    }

    /// The floor, the product and whoever else, one after the other, on a testbed of their own.
    pub async fn run(&self) -> Result<Measured> {
        let size = self.setup.size_bytes;
        let mut bed = Testbed::start(TestbedOptions {
            masters: 3,
            clients: 2,
            balancer: None,
            client_memory_bytes: self.setup.memory.then_some(size * 3 + MEMORY_SPARE_BYTES),
            allow_sources: vec![self.folder.display().to_string()],
            ..Default::default()
        })
        .await?;
        let gib = size.div_ceil(1 << 30) as u32;
        let patience = PATIENCE_PER_GIB * gib + SPARE;
        let seed = bed.cluster.nodes[SEED].clone();
        let base = format!("file://{}", self.folder.display());
        let acquire = self
            .prepared
            .request(ACQUIRE, &base, &seed, std::slice::from_ref(&seed))?;
        bed.cluster.complete(&acquire, patience).await?;
        let file = self.folder.join(MODEL);
        let floor = tokio::time::timeout(patience, floor::transfer(&bed, &self.setup, &file));
        let floor = floor.await.context("the floor does not end")??;
        let product = tokio::time::timeout(patience, self.product(&mut bed, &base)).await;
        let product = product.with_context(|| format!("no end\n{}", bed.cluster.log_tails()))??;
        let store = match &self.store {
            Some(python) => {
                let got = tokio::time::timeout(patience, store::get(&bed, python, size));
                Some(got.await.context("Mooncake Store does not end")??)
            }
            None => None,
        };
        bed.finish();
        Ok(Measured {
            floor,
            product,
            store,
        })
    }

    async fn product(&self, bed: &mut Testbed, base: &str) -> Result<Sample> {
        let nodes = &bed.cluster.nodes;
        let targets = [nodes[RECEIVER].clone()];
        let body = self.prepared.request(RECEIVE, base, &nodes[SEED], &targets)?;
        let receiver = bed.cluster.clients[RECEIVER]
            .pid()
            .context("the receiver does not run")?;
        let before = Cpu::of(receiver)?;
        let began = Instant::now();
        bed.cluster.create(&body).await?;
        let mut watch = Watch::new(RECEIVE, BTreeSet::from([RECEIVER]));
        while !watch.is_done() {
            watch.look(bed, WAIT).await?;
        }
        let cpu = Cpu::of(receiver)? - before;
        let peak_rss_bytes = peak_memory_bytes(receiver)?;
        let (took, _) = watch.since(began).remove(&RECEIVER).context("just staged")?;
        Ok(Sample {
            took_s: took.as_secs_f64(),
            cpu,
            peak_rss_bytes,
        })
    }
}
