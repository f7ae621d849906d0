//! Many nodes, simulated by this process over real sessions: what the leader spends on them while they do nothing, and
//! what one job costs that all of them take part in.

use super::{
    Report,
    node::{Counts, Node, Work},
};
use crate::{
    cluster::{Cluster, ClusterOptions},
    loopback::Cpu,
    report::percentile,
    session::NodeSession,
};
use anyhow::{Context, Result, bail, ensure};
use futures_util::{StreamExt, stream};
use mooncake_proto::manifest::block_size_for;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use tokio::sync::mpsc;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Registrations under way at once.
const JOINING: usize = 32;
const CHUNK_BYTES: u64 = 4 << 20;
/// Until the job is complete; far beyond what is worth a number.
const PATIENCE: Duration = Duration::from_secs(600);
/// Until all simulated nodes have taken note that they are to stop.
const STOPPED: Duration = Duration::from_secs(10);
/// Until the masters agree on a leader after the run.
const SETTLED: Duration = Duration::from_secs(30);
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
    /// While nothing was asked for; `None`: it did not come so far.
    pub idle: Option<Phase>,
    /// From the job's POST until it was complete.
    pub job: Option<Phase>,
    /// Entries of the log meanwhile.
    pub entries: u64,
    /// Peak resident memory of the leader, of all that.
    pub leader_peak_bytes: u64,
    /// Terms before and after: equal if there was no election.
    pub terms: (u64, u64),
    /// Why a node's session ended before its time, and the run with it.
    pub ended: Option<String>,
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

/// Simulates it; what is measured is in the report as each phase ends, and `progress` is told what begins. A session that
/// ends before its time ends the run: it is something that does not hold, not an error of the measurement.
pub async fn run(plan: Plan, report: &Mutex<Report>, progress: impl FnMut(&str)) -> Result<()> {
    ensure!(plan.nodes > 0 && plan.chunks > 0, "nothing to simulate");
    crate::failover::generator::allow_files(plan.nodes as u64 + FILES)?;
    let mut cluster = Cluster::prepare(&ClusterOptions {
        clients: 0,
        ..Default::default()
    })?;
    cluster.start_all().await?;
    let before = cluster.term().await?;
    report.lock().fleet = Some(Measured {
        terms: (before, before),
        ..Default::default()
    });
    let fleet = Fleet {
        counts: Arc::new(Counts::default()),
        stop: CancellationToken::new(),
        nodes: TaskTracker::new(),
    };
    // Also where something fails below.
    let _stopped = fleet.stop.clone().drop_guard();
    let (failed, mut failures) = mpsc::unbounded_channel();
    let done = tokio::select! {
        done = phases(plan, &mut cluster, &fleet, failed, report, progress) => done.map(|()| None),
        Some(why) = failures.recv() => Ok(Some(why)),
    };
    // What a failing phase waits for may be what a node has just died of.
    let ended = match done {
        Ok(ended) => ended.or_else(|| failures.try_recv().ok()),
        Err(error) => Some(failures.try_recv().map_err(|_| error)?),
    };
    fleet.stop.cancel();
    fleet.nodes.close();
    let stopped = tokio::time::timeout(STOPPED, fleet.nodes.wait()).await;
    stopped.with_context(|| format!("simulated nodes do not stop within {STOPPED:?}"))?;
    let after = match tokio::time::timeout(SETTLED, cluster.term()).await {
        Ok(Ok(after)) => after,
        // No answer to that either: the session's end is what is told.
        _ if ended.is_some() => before,
        Ok(Err(error)) => return Err(error.context("the term after the run")),
        Err(_) => bail!("no master says its term within {SETTLED:?} after the run"),
    };
    let mut report = report.lock();
    let measured = report.fleet.get_or_insert_default();
    measured.terms = (before, after);
    measured.ended = ended;
    Ok(())
}

struct Fleet {
    counts: Arc<Counts>,
    stop: CancellationToken,
    nodes: TaskTracker,
}

/// Registers the nodes, lets them be, and gives them a job.
async fn phases(
    plan: Plan,
    cluster: &mut Cluster,
    fleet: &Fleet,
    failed: mpsc::UnboundedSender<String>,
    report: &Mutex<Report>,
    mut progress: impl FnMut(&str),
) -> Result<()> {
    let measured = |change: &dyn Fn(&mut Measured)| change(report.lock().fleet.get_or_insert_default());
    let counts = &fleet.counts;
    let leader = cluster.leader().await?;
    let rpc = cluster.rpc_addresses[leader].clone();
    let work = Work {
        bytes: plan.chunks * CHUNK_BYTES,
        block_bytes: block_size_for(plan.chunks * CHUNK_BYTES),
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
    while let Some(joined) = joining.next().await {
        let (id, session) = joined?;
        let (counts, stop, failed) = (Arc::clone(counts), fleet.stop.clone(), failed.clone());
        fleet.nodes.spawn(async move {
            let node = Node {
                id,
                session,
                work,
                counts: &counts,
            };
            if let Err(error) = node.run(stop).await {
                let _ = failed.send(format!("{error:#}"));
            }
        });
    }
    drop(joining);
    let joined_s = began.elapsed().as_secs_f64();
    measured(&|m| m.joined_s = joined_s);

    let pid = cluster.masters[leader].pid().context("the leader is gone")?;
    progress("nothing is asked for");
    let look = Look::now(pid, counts)?;
    tokio::time::sleep(plan.idle).await;
    let idle = look.since(pid, counts)?;
    measured(&|m| m.idle = Some(idle.clone()));

    progress("one job with all nodes");
    let entries = applied(cluster, leader).await?;
    let look = Look::now(pid, counts)?;
    let (status, answer) = cluster.post_job(&job(work, &ids)).await?;
    ensure!(status == 201, "the job was answered with {status}: {answer}");
    let ended = cluster.wait_ended("fleet", PATIENCE).await?;
    ensure!(
        ended["status"] == "completed",
        "the job ended as {}: {}",
        ended["status"],
        ended["last_error"]
    );
    let job = look.since(pid, counts)?;
    let entries = applied(cluster, leader).await? - entries;
    let peak_bytes = cluster.masters[leader].peak_memory_bytes()?;
    measured(&|m| {
        m.job = Some(job.clone());
        m.entries = entries;
        m.leader_peak_bytes = peak_bytes;
    });
    Ok(())
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

/// Of all nodes, since the last call.
fn heartbeats_us(counts: &Counts) -> Vec<u64> {
    let nodes = counts.heartbeats.lock();
    nodes.iter().flat_map(|node| node.lock().take()).collect()
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
        drop(heartbeats_us(counts));
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
        let mut heartbeats = heartbeats_us(counts);
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
