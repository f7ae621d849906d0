//! Mooncake's masters under the measurement.

use super::{Asker, Fault, Subject, WRITE_TIMEOUT, cut_off, testbed};
use crate::{
    cluster::http_client,
    model::Model,
    testbed::{BalancerKind, Testbed, master_host},
};
use anyhow::{Context, Result, ensure};
use futures_util::{FutureExt, future::BoxFuture};
use reqwest::{StatusCode, header::CONTENT_TYPE};
use serde_json::{Value, json};
use std::{path::PathBuf, pin::Pin, time::Duration};

pub(super) const JOBS: &str = "/api/v1/model-distribution/jobs";
const JOB: Duration = Duration::from_secs(60);
const STOPPED: Duration = Duration::from_secs(60);

/// What a master said to a write.
pub type Answer = reqwest::Response;
/// A write under way.
pub type Write = Pin<Box<dyn Future<Output = Result<Answer>> + Send>>;

/// Three masters behind HAProxy, and one node. Every write is a new job for a model that the node holds already, so
/// that what is measured is the masters' work: the job is created, decided and complete in one entry of the log.
pub struct Mooncake {
    bed: Testbed,
    body: Value,
    /// Job ids of one series of writes differ from those of the next.
    series: u32,
    folder: PathBuf,
}

impl Mooncake {
    /// Starts it all, with one node.
    pub async fn start() -> Result<Self> {
        Self::start_with(1).await
    }

    /// Starts it all, with so many nodes.
    pub async fn start_with(nodes: usize) -> Result<Self> {
        let mut bed = testbed(3, nodes, Some(BalancerKind::HaProxy)).await?;
        // Below the run's folder: removed with it, whatever happens.
        let folder = bed.dir().join("models");
        let model = Model::create(&folder, "failover", &[("weights.bin", 4096)])?;
        let source = bed.serve(&folder).await?.url.clone();
        let node = bed.cluster.nodes[0].clone();
        let body = model.request("first", &source, &node, &[&node])?;
        bed.cluster.complete(&body, JOB).await?;
        Ok(Self {
            bed,
            body,
            series: 0,
            folder,
        })
    }

    /// Number of masters.
    pub fn masters(&self) -> usize {
        self.bed.cluster.masters.len()
    }

    /// Makes writes, apart from what happens to the masters meanwhile.
    pub fn writer(&self) -> impl Fn(u64) -> Write + Send + Sync + 'static {
        self.writer_at(self.bed.url())
    }

    fn writer_at(&self, endpoint: &str) -> impl Fn(u64) -> Write + Send + Sync + 'static {
        let prefix = format!("job-{}-", self.series);
        writer(self.bed.cluster.http.clone(), endpoint, &self.body, prefix)
    }

    /// Callers, each with a connection of its own to one master; masters by turns. Each write makes a job, whose id is this
    /// prefix and a number, and has to be answered with 201.
    pub fn creators(&self, callers: usize, prefix: &str) -> Result<Vec<Asker>> {
        let ask = |caller| -> Result<Asker> {
            let write = writer(
                http_client()?,
                self.endpoint(caller),
                &self.body,
                prefix.to_owned(),
            );
            Ok(Box::new(move |number| {
                let answer = write(number);
                // The whole answer, so that the connection can be used again.
                async move {
                    created(answer.await?)?
                        .bytes()
                        .await
                        .map(drop)
                        .map_err(Into::into)
                }
                .boxed()
            }))
        };
        (0..callers).map(ask).collect()
    }

    /// The same, reads of this job's snapshot.
    pub fn readers(&self, callers: usize, job: &str, stale: bool) -> Result<Vec<Asker>> {
        let consistency = if stale { "&consistency=stale" } else { "" };
        let ask = |caller| -> Result<Asker> {
            let url = format!("{}{JOBS}?job_id={job}{consistency}", self.endpoint(caller));
            let (http, url) = (http_client()?, reqwest::Url::parse(&url)?);
            Ok(Box::new(move |_| {
                let request = http.get(url.clone()).timeout(WRITE_TIMEOUT);
                async move {
                    request.send().await?.error_for_status()?.bytes().await?;
                    Ok(())
                }
                .boxed()
            }))
        };
        (0..callers).map(ask).collect()
    }

    fn endpoint(&self, caller: usize) -> &str {
        &self.bed.cluster.endpoints[caller % self.masters()]
    }

    /// How many bytes the body of a write has, with such a job id.
    pub fn body_bytes(&self, job: &str) -> usize {
        Create::new(&self.body).body(job).len()
    }

    /// Makes this job, and waits until every master has it, so that stale reads find it too. An earlier try may have made
    /// it, and only its answer been lost.
    pub async fn make(&self, job: &str) -> Result<()> {
        let url = format!("{}{JOBS}", self.endpoint(0));
        let request = self.http().post(url).header(CONTENT_TYPE, "application/json");
        let answer = request.body(Create::new(&self.body).body(job)).send().await?;
        let status = answer.status();
        ensure!(
            status == StatusCode::CREATED || status == StatusCode::OK,
            "job {job} was answered with {status}: {}",
            answer.text().await?
        );
        let index = answer.headers().get("x-mooncake-applied-index");
        let index = index.context("no x-mooncake-applied-index")?.to_str()?;
        for endpoint in &self.bed.cluster.endpoints {
            let url = format!("{endpoint}{JOBS}?job_id={job}&consistency=stale&min_index={index}");
            self.http().get(url).send().await?.error_for_status()?;
        }
        Ok(())
    }

    /// The body of every write, but for its job id.
    pub fn body(&self) -> Value {
        self.body.clone()
    }

    /// HTTP base URL of each node.
    pub fn node_endpoints(&self) -> Vec<String> {
        self.bed.cluster.client_endpoints.clone()
    }

    /// SIGTERM, and waits for its end.
    pub async fn stop(&mut self, master: usize) -> Result<()> {
        let status = self.bed.cluster.masters[master].terminate(STOPPED).await?;
        ensure!(status.success(), "master {} ended with {status}", master + 1);
        Ok(())
    }

    /// Starts a stopped one again.
    pub fn start_again(&mut self, master: usize) -> Result<()> {
        self.bed.cluster.masters[master].start()
    }

    /// Leadership away from this master, by request through the load balancer.
    pub async fn transfer(&self, master: usize) -> Result<()> {
        let url = format!("{}/api/v1/cluster/transfer", self.bed.url());
        let wish = json!({ "from": master + 1 });
        let answer = self.http().post(url).json(&wish).send().await?;
        let status = answer.status();
        ensure!(
            status.is_success(),
            "the transfer was answered with {status}: {}",
            answer.text().await?
        );
        Ok(())
    }

    /// HTTP base URL of each master.
    pub fn endpoints(&self) -> Vec<String> {
        self.bed.cluster.endpoints.clone()
    }

    /// For requests.
    pub fn http(&self) -> reqwest::Client {
        self.bed.cluster.http.clone()
    }

    /// A job that waits and goes on waiting: what it downloads comes byte by byte.
    pub async fn unfinished_job(&mut self) -> Result<String> {
        let model = Model::create(&self.folder, "unfinished", &[("weights.bin", 8 << 20)])?;
        let source = self.bed.source()?;
        source.limit_rate(Some(1 << 10));
        let node = self.bed.cluster.nodes[0].clone();
        let body = model.request("unfinished", &source.url, &node, &[&node])?;
        self.bed.cluster.post_job(&body).await?;
        Ok("unfinished".into())
    }

    /// How many times a node of this cluster was suspected or declared down since its masters started, as they logged
    /// it: nothing that happens between two looks is missed.
    pub fn nodes_lost(&self) -> u64 {
        let masters = self.bed.cluster.masters.iter();
        let logs = masters.map(crate::Process::log);
        logs.map(|log| log.lines().filter(|line| tells_of_a_lost_node(line)).count() as u64)
            .sum()
    }

    /// Of each master.
    pub fn peak_memory_bytes(&self) -> Result<Vec<u64>> {
        let masters = self.bed.cluster.masters.iter();
        masters.map(|master| master.peak_memory_bytes()).collect()
    }

    /// Removes it all.
    pub fn finish(self) {
        self.bed.finish();
    }
}

impl Subject for Mooncake {
    fn name(&self) -> String {
        "mooncake, defaults".into()
    }

    fn is_judged(&self) -> bool {
        true
    }

    fn begin_series(&mut self) {
        self.series += 1;
    }

    fn settled(&mut self) -> BoxFuture<'_, Result<(usize, u64)>> {
        async {
            self.bed.cluster.wait_ready().await?;
            let leader = self.bed.cluster.leader().await?;
            let url = format!("{}/leaderz", self.bed.cluster.endpoints[leader]);
            let answer = self.bed.cluster.http.get(url).send().await?;
            Ok((leader, term(&answer)?))
        }
        .boxed()
    }

    fn write(&self, number: u64) -> BoxFuture<'static, Result<u64>> {
        let write = self.writer()(number);
        async move { term(&created(write.await?)?) }.boxed()
    }

    fn inject(&mut self, member: usize, fault: Fault) -> Result<()> {
        match fault {
            Fault::Kill => {
                // Not waiting for its end: the clock runs from the signal.
                self.bed.cluster.masters[member].signal(rustix::process::Signal::KILL)
            }
            Fault::Freeze => self.bed.cluster.masters[member].freeze(),
            Fault::CutOff => cut_off(&mut self.bed.network, &master_host(member)),
        }
    }

    fn heal(&mut self, member: usize, fault: Fault) -> Result<()> {
        match fault {
            Fault::Kill => {
                self.bed.cluster.masters[member].kill();
                self.bed.cluster.masters[member].start()
            }
            Fault::Freeze => self.bed.cluster.masters[member].thaw(),
            Fault::CutOff => self.bed.network.heal(),
        }
    }
}

/// Makes writes to one master or balancer; their job ids are this prefix and a number.
pub(super) fn writer(
    http: reqwest::Client,
    endpoint: &str,
    body: &Value,
    prefix: String,
) -> impl Fn(u64) -> Write + Send + Sync + 'static + use<> {
    let (url, create) = (format!("{endpoint}{JOBS}"), Create::new(body));
    move |number| {
        let body = create.body(&format!("{prefix}{number}"));
        let request = http
            .post(&url)
            .header(CONTENT_TYPE, "application/json")
            .body(body);
        Box::pin(async move { Ok(request.send().await?) })
    }
}

/// The body of a create, encoded once: what differs from one to the next is the job id, which comes first.
pub(super) struct Create {
    rest: String,
}

impl Create {
    /// From a body with whatever job id.
    pub(super) fn new(body: &Value) -> Self {
        let mut body = body.clone();
        if let Some(members) = body.as_object_mut() {
            members.remove("job_id");
        }
        let rest = body.to_string();
        Self {
            rest: rest.strip_prefix('{').unwrap_or_default().to_owned(),
        }
    }

    /// For this job. The alphabet of job ids needs no escapes.
    pub(super) fn body(&self, job_id: &str) -> String {
        format!("{{\"job_id\":\"{job_id}\",{}", self.rest)
    }
}

/// As the reconciler logs it when it commits it.
fn tells_of_a_lost_node(line: &str) -> bool {
    line.contains("node suspected") || line.contains("node down")
}

/// Only 201 will do.
pub(super) fn created(answer: Answer) -> Result<Answer> {
    ensure!(answer.status() == StatusCode::CREATED, "{}", answer.status());
    Ok(answer)
}

/// The term in which a master answered.
pub fn term(answer: &reqwest::Response) -> Result<u64> {
    let header = answer
        .headers()
        .get("x-mooncake-term")
        .context("no x-mooncake-term")?;
    Ok(header.to_str()?.parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_job_id_differs() {
        let create = Create::new(&json!({"job_id": "first", "model": {"a": 1}}));
        for id in ["job-1", "job-2"] {
            let body: Value = serde_json::from_str(&create.body(id)).unwrap();
            assert_eq!(body, json!({"job_id": id, "model": {"a": 1}}));
        }
    }
}
