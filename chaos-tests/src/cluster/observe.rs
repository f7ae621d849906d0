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

    /// A counter or gauge of one client, by its full name with labels.
    pub async fn client_metric(&self, client: usize, name: &str) -> Result<u64> {
        self.metric(&self.client_endpoints[client], name).await
    }

    /// A counter or gauge of one master, by its full name with labels.
    pub async fn master_metric(&self, master: usize, name: &str) -> Result<u64> {
        self.metric(&self.endpoints[master], name).await
    }

    async fn metric(&self, endpoint: &str, name: &str) -> Result<u64> {
        let url = format!("{endpoint}/metrics");
        let text = self.http.get(url).send().await?.text().await?;
        let value = text
            .lines()
            .filter_map(|line| line.rsplit_once(' '))
            .find(|(of, _)| *of == name)
            .with_context(|| format!("{endpoint} has no {name} in\n{text}"))?
            .1;
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
