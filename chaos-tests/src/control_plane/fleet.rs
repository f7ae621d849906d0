//! Many nodes, simulated by this process over real sessions: what the leader spends on them while they do nothing, and
//! what one job costs that all of them take part in.

use super::node::{Counts, Node, Work};
use crate::{
    cluster::{Cluster, ClusterOptions},
    loopback::Cpu,
    report::percentile,
    session::NodeSession,
};
use anyhow::{Context, Result, ensure};
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Registrations under way at once.
const JOINING: usize = 32;
const CHUNK_BYTES: u64 = 4 << 20;
/// Until the job is complete; far beyond what is worth a number.
const PATIENCE: Duration = Duration::from_secs(600);
/// Descriptors for each session, and for the rest.
const FILES: u64 = 256;

/// What to simulate.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Nodes.
    pub nodes: usize,
    /// Chunks of the model, one object each.
    pub chunks: u64,
    /// How long nothing is asked for.
    pub idle: Duration,
    /// How long a node works at its task.
    pub task: Duration,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Until all were registered.
    pub joined_s: f64,
    /// While nothing was asked for.
    pub idle: Phase,
    /// From the job's POST until it was complete.
    pub job: Phase,
    /// Entries of the log meanwhile.
    pub entries: u64,
    /// Peak resident memory of the leader, of all that.
    pub leader_peak_bytes: u64,
    /// Terms before and after: equal if there was no election.
    pub terms: (u64, u64),
}

/// What a time cost.
#[derive(Clone, Debug, Default)]
pub struct Phase {
    /// How long.
    pub took_s: f64,
    /// The leader's process, in cores.
    pub leader_cores: f64,
    /// Frames from nodes per second, all together.
    pub up_per_s: f64,
    /// Frames to nodes per second.
    pub down_per_s: f64,
    /// Round trips of heartbeats in milliseconds: p50, p99, largest.
    pub heartbeat_ms: [f64; 3],
}

/// Simulates it; `progress` is told what begins.
pub async fn run(plan: Plan, mut progress: impl FnMut(&str)) -> Result<Measured> {
    ensure!(plan.nodes > 0 && plan.chunks > 0, "nothing to simulate");
    crate::failover::generator::allow_files(plan.nodes as u64 + FILES)?;
    let mut cluster = Cluster::prepare(&ClusterOptions {
        clients: 0,
        ..Default::default()
    })?;
    cluster.start_all().await?;
    let leader = cluster.leader().await?;
    let before = cluster.term().await?;
    let rpc = cluster.rpc_addresses[leader].clone();
    let counts = Arc::new(Counts::default());
    let (stop, nodes) = (CancellationToken::new(), TaskTracker::new());
    let work = Work {
        bytes: plan.chunks * CHUNK_BYTES,
        block_bytes: CHUNK_BYTES as u32,
        objects: plan.chunks,
        takes: plan.task,
    };
    progress("nodes register");
    let began = Instant::now();
    let ids: Vec<String> = (0..plan.nodes).map(|i| format!("node-{i:04}:50052")).collect();
    let mut joining = stream::iter(ids.clone())
        .map(|id| {
            let rpc = rpc.clone();
            async move {
                let session = NodeSession::join(&rpc, &id).await;
                session.with_context(|| format!("node {id}")).map(|s| (id, s))
            }
        })
        .buffer_unordered(JOINING);
    let mut running = Vec::new();
    while let Some(joined) = joining.next().await {
        let (id, session) = joined?;
        let (counts, stop) = (Arc::clone(&counts), stop.clone());
        running.push(nodes.spawn(async move {
            let node = Node {
                id,
                session,
                work,
                counts: &counts,
            };
            node.run(stop).await
        }));
    }
    drop(joining);
    let joined_s = began.elapsed().as_secs_f64();

    let pid = cluster.masters[leader].pid().context("the leader is gone")?;
    progress("nothing is asked for");
    let look = Look::now(pid, &counts)?;
    tokio::time::sleep(plan.idle).await;
    let idle = look.since(pid, &counts)?;

    progress("one job with all nodes");
    let entries = applied(&mut cluster, leader).await?;
    let look = Look::now(pid, &counts)?;
    let (status, answer) = cluster.post_job(&job(work, &ids)).await?;
    ensure!(status == 201, "the job was answered with {status}: {answer}");
    let ended = cluster.wait_ended("fleet", PATIENCE).await?;
    ensure!(ended["status"] == "completed", "the job ended: {ended:#}");
    let job = look.since(pid, &counts)?;
    let entries = applied(&mut cluster, leader).await? - entries;
    let leader_peak_bytes = cluster.masters[leader].peak_memory_bytes()?;
    let after = cluster.term().await?;
    stop.cancel();
    for node in running {
        node.await??;
    }
    Ok(Measured {
        joined_s,
        idle,
        job,
        entries,
        leader_peak_bytes,
        terms: (before, after),
    })
}

async fn applied(cluster: &mut Cluster, leader: usize) -> Result<u64> {
    let url = format!("{}/api/v1/cluster", cluster.endpoints[leader]);
    let view: Value = cluster.http.get(url).send().await?.json().await?;
    view["applied_index"].as_u64().context("no applied_index")
}

/// One file, which no node ever reads: its digests are made up.
fn job(work: Work, targets: &[String]) -> Value {
    let file = json!({
        "path": "model.safetensors",
        "size_bytes": work.bytes,
        "checksum": format!("sha256:{}", "7".repeat(64)),
        "download_url": "https://models.example/model.safetensors",
        "chunk_layout": {
            "chunk_size_bytes": CHUNK_BYTES,
            "chunk_count": work.objects,
            "object_prefix": "fleet/r1/0",
        },
    });
    let names = json!({"model_id": "fleet", "revision": "r1", "format": "bin", "provider": "test"});
    let mut manifest = names.clone();
    manifest["total_size_bytes"] = json!(work.bytes);
    manifest["file_manifest_version"] = json!("v1");
    manifest["files"] = json!([file]);
    json!({
        "job_id": "fleet",
        "model": names,
        "manifest": manifest,
        "seed_node_id": targets[0],
        "target_nodes": targets,
    })
}

struct Look {
    at: Instant,
    cpu: Cpu,
    up: u64,
    down: u64,
}

impl Look {
    /// Heartbeats are counted from here on.
    fn now(leader: u32, counts: &Counts) -> Result<Self> {
        counts.heartbeats_us.lock().clear();
        Ok(Self {
            at: Instant::now(),
            cpu: Cpu::of(leader)?,
            up: counts.up.load(Ordering::Relaxed),
            down: counts.down.load(Ordering::Relaxed),
        })
    }

    fn since(self, leader: u32, counts: &Counts) -> Result<Phase> {
        let took_s = self.at.elapsed().as_secs_f64();
        let used = Cpu::of(leader)? - self.cpu;
        let mut heartbeats = counts.heartbeats_us.lock().clone();
        heartbeats.sort_unstable();
        let now = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
        Ok(Phase {
            took_s,
            // Softirqs are the whole machine's: the nodes' side of the same connections is in them too.
            leader_cores: (used.user_s + used.system_s) / took_s,
            up_per_s: (now(&counts.up) - self.up) as f64 / took_s,
            down_per_s: (now(&counts.down) - self.down) as f64 / took_s,
            heartbeat_ms: [0.5, 0.99, 1.0].map(|p| percentile(&heartbeats, p) as f64 / 1e3),
        })
    }
}
