//! What a benchmark reads of a cluster: the term, what a client counts, a job as it changes.

use super::Cluster;
use anyhow::{Context, Result};
use serde_json::Value;
use std::time::Duration;

impl Cluster {
    /// The Raft term, as the leader says it.
    pub async fn term(&mut self) -> Result<u64> {
        let leader = self.leader().await?;
        let url = format!("{}/leaderz", self.endpoints[leader]);
        crate::failover::term(&self.http.get(url).send().await?)
    }

    /// A counter of one client, by its full name.
    pub async fn client_counter(&self, client: usize, name: &str) -> Result<u64> {
        let endpoint = &self.client_endpoints[client];
        let url = format!("{endpoint}/metrics");
        let text = self.http.get(url).send().await?.text().await?;
        let line = text
            .lines()
            .find(|line| line.split(' ').next() == Some(name))
            .with_context(|| format!("{endpoint} has no {name}"))?;
        let value = line.rsplit(' ').next().context("no value")?;
        Ok(value.parse::<f64>()? as u64)
    }

    /// The job's snapshot as soon as its version is above `since`, it has ended, or `wait` is over.
    pub async fn job_after(&mut self, id: &str, since: u64, wait: Duration) -> Result<Value> {
        let wait_ms = wait.as_millis().max(1);
        self.get(&format!(
            "/api/v1/model-distribution/jobs?job_id={id}&since={since}&wait={wait_ms}ms"
        ))
        .await
    }
}
