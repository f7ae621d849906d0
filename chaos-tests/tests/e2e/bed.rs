//! What most tests start with: a model behind an HTTP source, and a cluster that may read it.

use crate::JOB;
use anyhow::{Context, Result};
use mooncake_chaos::{Cluster, ClusterOptions, HttpSource, Model};
use serde_json::Value;

pub(crate) struct Bed {
    pub(crate) cluster: Cluster,
    pub(crate) source: HttpSource,
    pub(crate) model: Model,
    _dir: tempfile::TempDir,
}

impl Bed {
    /// Three masters, three clients, a model of these files, a source limited to `rate` bytes per second.
    pub(crate) async fn start(id: &str, files: &[(&str, u64)], rate: Option<u64>) -> Result<Self> {
        Self::start_with(id, files, rate, ClusterOptions::default()).await
    }

    /// The same with other options; the source is allowed in any case.
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
        let nodes = &self.cluster.nodes;
        let targets: Vec<&str> = targets.iter().map(|&t| nodes[t].as_str()).collect();
        self.model
            .request(job_id, &self.source.url, &nodes[seed], &targets)
    }

    /// Posts such a request with client 0 as the seed, for all three clients.
    pub(crate) async fn post_to_all(&mut self, job_id: &str) -> Result<()> {
        let body = self.request(job_id, 0, &[0, 1, 2])?;
        let (status, answer) = self.cluster.post_job(&body).await?;
        anyhow::ensure!(status == 201, "expected 201, got {status}: {answer:#}");
        Ok(())
    }

    /// Waits until client `node` has verified more than `bytes`; gives the snapshot.
    pub(crate) async fn wait_bytes(&mut self, job_id: &str, node: usize, bytes: u64) -> Result<Value> {
        let node = self.cluster.nodes[node].clone();
        self.cluster
            .wait_job(job_id, JOB, |s| staged_bytes(s, &node) > bytes)
            .await
    }

    /// Waits for `completed` and compares every client's copy with the model.
    pub(crate) async fn finish(&mut self, job_id: &str) -> Result<Value> {
        let done = self.cluster.wait_ended(job_id, JOB).await?;
        assert_eq!(done["status"], "completed", "{done:#}");
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

    /// A counter of client `client`.
    pub(crate) async fn metric(&self, client: usize, name: &str) -> Result<u64> {
        let url = format!("{}/metrics", self.cluster.client_endpoints[client]);
        let text = self.cluster.http.get(url).send().await?.text().await?;
        let line = text
            .lines()
            .find(|l| l.starts_with(name))
            .with_context(|| format!("no {name} in\n{text}"))?;
        Ok(line.rsplit(' ').next().context("value")?.parse::<f64>()? as u64)
    }

    /// What all clients fetched although they had fetched it before.
    pub(crate) async fn refetched_bytes(&self) -> Result<u64> {
        let mut total = 0;
        for client in 0..self.cluster.clients.len() {
            total += self
                .metric(client, "mooncake_client_refetched_bytes_total")
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
