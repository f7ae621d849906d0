//! What most tests start with: a model behind an HTTP source, and a cluster that may read it.

use crate::JOB;
use anyhow::{Context, Result, ensure};
use mooncake_chaos::{
    Cluster, ClusterOptions, HttpSource, Model,
    checks::downloads::most_covered,
    model::{journaled_blocks, staging_folders},
};
use serde_json::Value;
use std::time::{Duration, Instant};

/// Block size of models as small as these.
pub(crate) const BLOCK_BYTES: u64 = 256 << 10;

/// Polls until `check` gives something. For what happens in other processes, which cannot be awaited.
pub(crate) async fn eventually<T>(
    what: &str,
    mut check: impl AsyncFnMut() -> Result<Option<T>>,
) -> Result<T> {
    let until = Instant::now() + JOB;
    loop {
        if let Some(value) = check().await? {
            return Ok(value);
        }
        ensure!(Instant::now() < until, "not within {JOB:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) struct Bed {
    pub(crate) cluster: Cluster,
    pub(crate) source: HttpSource,
    pub(crate) model: Model,
    _dir: tempfile::TempDir,
}

impl Bed {
    /// Three masters, three clients, a model of these files, a source limited to `rate` bytes per second.
    pub(crate) async fn start(id: &str, files: &[(&str, u64)], rate: Option<u64>) -> Result<Self> {
        Self::start_with(id, files, rate, ClusterOptions::calm()).await
    }

    /// The same with other options; the source and the model's folder are allowed in any case.
    pub(crate) async fn start_with(
        id: &str,
        files: &[(&str, u64)],
        rate: Option<u64>,
        mut options: ClusterOptions,
    ) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let model = Model::create(dir.path(), id, files)?;
        let source = HttpSource::start(dir.path()).await?;
        source.limit_rate(rate);
        options.allow_sources.push(source.url.clone());
        options.allow_sources.push(dir.path().display().to_string());
        let cluster = Cluster::start(options).await?;
        Ok(Self {
            cluster,
            source,
            model,
            _dir: dir,
        })
    }

    /// A request from the source with client `seed` as the seed.
    pub(crate) fn request(&self, job_id: &str, seed: usize, targets: &[usize]) -> Result<Value> {
        self.request_from(&self.source.url, job_id, seed, targets)
    }

    /// The same with the sources below another folder or URL.
    pub(crate) fn request_from(
        &self,
        base: &str,
        job_id: &str,
        seed: usize,
        targets: &[usize],
    ) -> Result<Value> {
        let nodes = &self.cluster.nodes;
        let targets: Vec<&str> = targets.iter().map(|&t| nodes[t].as_str()).collect();
        self.model.request(job_id, base, &nodes[seed], &targets)
    }

    /// Creates a job and waits until it has ended, however.
    pub(crate) async fn end_of(&mut self, body: &Value) -> Result<Value> {
        self.cluster.create(body).await?;
        let id = body["job_id"].as_str().context("job_id")?;
        self.cluster.wait_ended(id, JOB).await
    }

    /// Posts such a request with client 0 as the seed, for all three clients.
    pub(crate) async fn post_to_all(&mut self, job_id: &str) -> Result<()> {
        let body = self.request(job_id, 0, &[0, 1, 2])?;
        self.cluster.create(&body).await?;
        Ok(())
    }

    /// Waits until client `node` has verified more than `bytes`; gives the snapshot.
    pub(crate) async fn wait_bytes(&mut self, job_id: &str, node: usize, bytes: u64) -> Result<Value> {
        let node = self.cluster.nodes[node].clone();
        self.cluster
            .wait_job(job_id, JOB, |s| staged_bytes(s, &node) > bytes)
            .await
    }

    /// Waits until client `node` has recorded at least so many bytes of verified blocks, which a kill does not take
    /// from it; gives the blocks.
    pub(crate) async fn wait_journaled(&self, node: usize, bytes: u64) -> Result<Vec<u32>> {
        eventually("the journal has it", async || {
            let blocks = journaled_blocks(&self.cluster.roots[node])?;
            Ok((blocks.len() as u64 * BLOCK_BYTES >= bytes).then_some(blocks))
        })
        .await
    }

    /// Waits until nobody reads from the source any more.
    pub(crate) async fn wait_source_left(&self) -> Result<()> {
        eventually("the source is left", async || {
            Ok((self.source.bodies() == 0).then_some(()))
        })
        .await
    }

    /// Compares what client `node` has in staging with the model.
    pub(crate) fn assert_in_staging(&self, node: usize) -> Result<()> {
        let folders = staging_folders(&self.cluster.roots[node]);
        let [folder] = &folders[..] else {
            anyhow::bail!("not one staging folder at client {node}, but {folders:?}")
        };
        self.model.assert_equal(folder.to_str().context("UTF-8")?)
    }

    /// Waits for `completed`.
    pub(crate) async fn completed(&mut self, job_id: &str) -> Result<Value> {
        let done = self.cluster.wait_ended(job_id, JOB).await?;
        assert_eq!(done["status"], "completed", "{done:#}");
        Ok(done)
    }

    /// Waits for `completed` and compares every client's copy with the model.
    pub(crate) async fn finish(&mut self, job_id: &str) -> Result<Value> {
        let done = self.completed(job_id).await?;
        for node in 0..self.cluster.nodes.len() {
            self.assert_staged(&done, node)?;
        }
        Ok(done)
    }

    /// Compares the copy of client `node` with the model.
    pub(crate) fn assert_staged(&self, snapshot: &Value, node: usize) -> Result<()> {
        let placement = self.cluster.placement(snapshot, node);
        assert_eq!(placement["state"], "staged", "{snapshot:#}");
        self.model
            .assert_equal(placement["local_path"].as_str().context("local_path")?)
    }

    /// The source served each byte of the model exactly once.
    pub(crate) fn assert_served_once(&self) -> Result<()> {
        assert_eq!(
            (self.source.bytes_served(), self.source.bytes_served_again()),
            (self.model.total_bytes()?, 0)
        );
        Ok(())
    }

    /// No byte that came with an unbroken request was asked for again.
    pub(crate) fn assert_no_request_twice(&self) {
        for (path, ranges) in self.source.whole_requests() {
            assert!(most_covered(&ranges) <= 1, "{path}: {ranges:?}");
        }
    }

    /// Each request that was broken off cost at most the block that its client was in the middle of.
    pub(crate) fn assert_broken_requests_cost_a_block_each(&self) {
        let (again, broken) = (self.source.bytes_served_again(), self.source.broken_requests());
        assert!(
            again <= broken * BLOCK_BYTES,
            "{again} bytes were served again, and {broken} requests were broken off"
        );
    }

    /// What all clients fetched although they had fetched it before.
    pub(crate) async fn refetched_bytes(&self) -> Result<u64> {
        let mut total = 0;
        for client in 0..self.cluster.clients.len() {
            total += self
                .cluster
                .client_metric(client, "mooncake_client_refetched_bytes_total")
                .await?;
        }
        Ok(total)
    }
}

/// Verified bytes on a node, as a snapshot has them.
pub(crate) fn staged_bytes(snapshot: &Value, node: &str) -> u64 {
    let placements = snapshot["placements"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    let placement = placements.iter().find(|p| p["node_id"] == *node);
    placement.and_then(|p| p["staged_bytes"].as_u64()).unwrap_or(0)
}
