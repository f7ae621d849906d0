//! One distribution by Mooncake, watched by a caller who waits for each change.

use super::{Benchmark, Carried, MODEL, Payload, Round, since};
use crate::testbed::Testbed;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::{Duration, Instant},
};

const JOB: &str = "broadcast";
const SECOND_JOB: &str = "broadcast-joined";
/// Of one long poll.
pub(crate) const WAIT: Duration = Duration::from_secs(20);
const SENT: &str = "mooncake_client_served_bytes_total";
const READ: &str = "mooncake_client_fetched_bytes_total";

/// Distributes to the seed and all followers; `disturbed_after`: what was asked for happens then.
pub(super) async fn run(
    benchmark: &Benchmark,
    bed: &mut Testbed,
    round: &Round,
    disturbed_after: Option<Duration>,
    bound: Duration,
) -> Result<Carried> {
    let setup = &benchmark.setup;
    let base = match setup.source_bits_per_s {
        Some(_) => bed.source()?.url.clone(),
        None => format!("file://{}", benchmark.folder.display()),
    };
    let prepared = benchmark.prepared.in_chunks_of(round.chunk_bytes)?;
    let nodes = bed.cluster.nodes.clone();
    let targets = &nodes[..=round.followers];
    let body = prepared.request(JOB, &base, &nodes[0], targets)?;
    // The last with the usual link: a slow one would tell nothing.
    let victim = *setup.usual(round.followers).end();
    let disturbs = disturbed_after.is_some();
    let mut waited: BTreeSet<usize> = (0..=round.followers).collect();
    if disturbs && setup.kill {
        waited.remove(&victim);
    }

    let term = bed.cluster.term().await?;
    let before = bed.network.traffic()?;
    let began = Instant::now();
    bed.cluster.create(&body).await?;
    let mut disturb_at = disturbed_after.map(|after| began + after);
    let mut second = None;
    let mut watch = Watch::new(JOB, waited);
    while !watch.is_done() {
        let wait = match disturb_at {
            Some(at) => at.saturating_duration_since(Instant::now()).min(WAIT),
            None => WAIT,
        };
        if wait.is_zero() {
            disturb_at = None;
            if setup.kill {
                bed.cluster.clients[victim].kill();
            }
            if setup.join {
                let joins = round.followers + 1;
                let body = prepared.request(SECOND_JOB, &base, &nodes[0], &nodes[joins..=joins])?;
                let began = Instant::now();
                bed.cluster.create(&body).await?;
                second = Some((joins, began));
            }
            continue;
        }
        watch.look(bed, wait).await?;
    }
    ensure!(
        !disturbs || disturb_at.is_none(),
        "all had it before half of the bound ({bound:?}) was over: nothing was disturbed; take a larger --size"
    );
    let traffic = since(&before, &bed.network.traffic()?);
    let mut read = Vec::new();
    for &client in watch.at.keys().filter(|client| **client != 0) {
        read.push(bed.cluster.client_metric(client, READ).await?);
    }
    let payload = Payload {
        sent_bytes: bed.cluster.client_metric(0, SENT).await?,
        received_bytes: read.into_iter().max().unwrap_or_default(),
    };
    let mut at = watch.since(began);
    let mut joined = None;
    if let Some((joins, began)) = second {
        let mut watch = Watch::new(SECOND_JOB, BTreeSet::from([joins]));
        while !watch.is_done() {
            watch.look(bed, WAIT).await?;
        }
        let mut late = watch.since(began);
        joined = late.get(&joins).map(|(took, _)| *took);
        at.append(&mut late);
    }
    Ok(Carried {
        at,
        joined,
        traffic,
        payload: Some(payload),
        elections: Some(bed.cluster.term().await? - term),
    })
}

/// When each of some clients was first read to be staged, and where.
pub(crate) struct Watch {
    job: &'static str,
    waited: BTreeSet<usize>,
    version: u64,
    at: BTreeMap<usize, (Instant, PathBuf)>,
}

impl Watch {
    /// The clients that are waited for, in this job.
    pub(crate) fn new(job: &'static str, waited: BTreeSet<usize>) -> Self {
        Self {
            job,
            waited,
            version: 0,
            at: BTreeMap::new(),
        }
    }

    /// Whether all have it.
    pub(crate) fn is_done(&self) -> bool {
        self.at.len() == self.waited.len()
    }

    /// Waits for one change, or for so long.
    pub(crate) async fn look(&mut self, bed: &mut Testbed, wait: Duration) -> Result<()> {
        let snapshot = bed.cluster.job_after(self.job, self.version, wait).await?;
        let now = Instant::now();
        self.version = snapshot["version"].as_u64().context("no version")?;
        self.take(&bed.cluster.nodes, &snapshot, now)
            .with_context(|| format!("{snapshot:#}\n{}", bed.cluster.log_tails()))
    }

    fn take(&mut self, nodes: &[String], snapshot: &Value, now: Instant) -> Result<()> {
        for placement in snapshot["placements"].as_array().into_iter().flatten() {
            let node = nodes.iter().position(|node| placement["node_id"] == **node);
            let Some(client) = node.filter(|client| self.waited.contains(client)) else {
                continue;
            };
            match placement["state"].as_str() {
                Some("staged") => {
                    ensure!(
                        placement["checksum_verified"] == true,
                        "client {client} says staged and has not checked every byte"
                    );
                    let folder = placement["local_path"].as_str().context("staged nowhere")?;
                    let file = PathBuf::from(folder).join(MODEL);
                    self.at.entry(client).or_insert((now, file));
                }
                Some("failed") => bail!("client {client} failed: {}", placement["last_error"]),
                _ => {}
            }
        }
        let ended = matches!(
            snapshot["status"].as_str(),
            Some("completed" | "failed" | "canceled")
        );
        ensure!(
            !ended || self.is_done(),
            "the job ended before all that were waited for had it"
        );
        Ok(())
    }

    /// By client.
    pub(crate) fn since(self, began: Instant) -> BTreeMap<usize, (Duration, PathBuf)> {
        let at = self.at.into_iter();
        at.map(|(client, (at, file))| (client, (at - began, file)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn nodes() -> Vec<String> {
        ["a:1", "b:1", "c:1"].map(str::to_owned).to_vec()
    }

    fn snapshot(status: &str, states: [&str; 3]) -> Value {
        let placements = nodes().into_iter().zip(states).map(|(node, state)| {
            json!({"node_id": node, "state": state, "local_path": "/m", "checksum_verified": true})
        });
        json!({"status": status, "placements": placements.collect::<Vec<_>>()})
    }

    #[test]
    fn each_is_taken_when_it_was_first_read() {
        let mut watch = Watch::new(JOB, BTreeSet::from([0, 1]));
        let began = Instant::now();
        let at = |s| began + Duration::from_secs(s);
        let nodes = nodes();
        let mut take = |s, states| {
            watch
                .take(&nodes, &snapshot("replicating", states), at(s))
                .unwrap()
        };
        take(1, ["staged", "acquiring", "staged"]);
        take(2, ["staged", "acquiring", "staged"]);
        assert!(!watch.is_done(), "the third is not waited for");
        watch
            .take(&nodes, &snapshot("completed", ["staged"; 3]), at(3))
            .unwrap();
        assert!(watch.is_done());
        let took: Vec<_> = watch.since(began).into_values().map(|(took, _)| took).collect();
        assert_eq!(took, [Duration::from_secs(1), Duration::from_secs(3)]);
    }

    #[test]
    fn what_cannot_end_well_is_an_error() {
        let now = Instant::now();
        let take = |snapshot: &Value| {
            let mut watch = Watch::new(JOB, BTreeSet::from([0, 1]));
            watch.take(&nodes(), snapshot, now)
        };
        assert!(take(&snapshot("replicating", ["staged", "failed", "acquiring"])).is_err());
        assert!(take(&snapshot("replicating", ["staged", "acquiring", "failed"])).is_ok());
        assert!(take(&snapshot("canceled", ["staged", "acquiring", "staged"])).is_err());
        let mut unchecked = snapshot("replicating", ["staged", "acquiring", "acquiring"]);
        unchecked["placements"][0]["checksum_verified"] = json!(false);
        assert!(take(&unchecked).is_err());
    }
}
