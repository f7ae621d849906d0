//! A node takes and gives no more bandwidth than a person allows it, and fetches no more models at once.

use crate::{
    JOB,
    bed::{Bed, eventually, staged_bytes},
};
use anyhow::{Context, Result, ensure};
use mooncake_chaos::{Cluster, ClusterOptions, HttpSource, Model};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const SIZE: u64 = 24 << 20;
const RATE: u64 = 8 << 20;
/// What may pass at once after a pause: the largest block.
const BURST: u64 = 4 << 20;

/// How long a job takes, at least, of which every byte passes the limit once. Without the limit it takes a tenth of it.
fn least() -> Duration {
    Duration::from_secs_f64((SIZE - BURST) as f64 / RATE as f64)
}

/// And at most: a limit that gives a fraction of what it is told is one too many. A busy machine takes its time beside.
fn most() -> Duration {
    least() * 3 + Duration::from_secs(10)
}

/// From the request to the end of a job that brings the model to a seed and two more nodes.
async fn takes(flag: &str) -> Result<Duration> {
    let options = ClusterOptions {
        client_args: vec![format!("{flag}={RATE}")],
        ..ClusterOptions::calm()
    };
    let mut bed = Bed::start_with("limited", &[("a.bin", SIZE)], None, options).await?;
    let began = Instant::now();
    bed.post_to_all("limited").await?;
    bed.completed("limited").await?;
    let took = began.elapsed();
    bed.finish("limited").await?;
    Ok(took)
}

#[tokio::test]
async fn a_seed_sends_no_faster_than_its_upload_limit() -> Result<()> {
    let took = takes("--upload-limit").await?;
    assert!((least()..=most()).contains(&took), "{took:?}");
    Ok(())
}

#[tokio::test]
async fn nobody_takes_faster_than_its_download_limit() -> Result<()> {
    let took = takes("--download-limit").await?;
    assert!((least()..=most()).contains(&took), "{took:?}");
    Ok(())
}

/// What each of the three models below has; under the limit it takes a second to fetch.
const MODEL_SIZE: u64 = 12 << 20;

/// Looks at these jobs of one target each until all have ended, and never sees two of them under way on their node;
/// gives their last snapshots. A job that is under way both times it is looked at was so in between: what a node has of a
/// model only grows.
async fn one_at_a_time(cluster: &mut Cluster, jobs: &[&str], node: usize) -> Result<Vec<Value>> {
    let until = Instant::now() + JOB;
    let id = cluster.nodes[node].clone();
    let mut busy = 0;
    loop {
        let mut looks = Vec::new();
        for _ in 0..2 {
            let mut snapshots = Vec::new();
            for job in jobs {
                snapshots.push(cluster.job(job).await?);
            }
            looks.push(snapshots);
        }
        let fetching = |job: usize| {
            looks.iter().all(|snapshots| {
                let snapshot = &snapshots[job];
                cluster.placement(snapshot, node)["state"] == "acquiring"
                    && staged_bytes(snapshot, &id) < MODEL_SIZE
            })
        };
        let under_way: Vec<_> = (0..jobs.len()).filter(|job| fetching(*job)).collect();
        ensure!(under_way.len() <= 1, "{under_way:?} at once: {looks:#?}");
        busy += under_way.len();
        let last = looks.pop().context("two looks")?;
        if last.iter().all(|s| s["status"] == "completed") {
            ensure!(busy > 0, "none of them was ever seen under way");
            return Ok(last);
        }
        let ended = |s: &Value| matches!(s["status"].as_str(), Some("failed" | "canceled"));
        ensure!(!last.iter().any(ended), "{last:#?}");
        ensure!(Instant::now() < until, "not within {JOB:?}: {last:#?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// When a job's placement on the node reached this state. As text: they compare as the times do.
fn reached(cluster: &Cluster, snapshot: &Value, node: usize, state: &str) -> Result<String> {
    let at = &cluster.placement(snapshot, node)["transitions"][state];
    Ok(at
        .as_str()
        .with_context(|| format!("{state}: {snapshot:#}"))?
        .to_owned())
}

#[tokio::test]
async fn a_node_fetches_one_model_at_a_time_and_the_highest_priority_first() -> Result<()> {
    const PRIORITIES: [i64; 3] = [0, -5, 5];
    let dir = tempfile::tempdir()?;
    let models = (0..3).map(|m| {
        let id = format!("m{m}");
        Model::create(&dir.path().join(&id), &id, &[("a.bin", MODEL_SIZE)])
    });
    let models = models.collect::<Result<Vec<_>>>()?;
    let source = HttpSource::start(dir.path()).await?;
    let mut cluster = Cluster::start(ClusterOptions {
        allow_sources: vec![source.url.clone()],
        client_args: vec!["--max-transfers=1".into(), format!("--download-limit={RATE}")],
        ..ClusterOptions::calm()
    })
    .await?;
    // The masters find out by themselves that all of them know priorities.
    eventually("the cluster's version", async || {
        let status = cluster.get("/api/v1/cluster").await?;
        Ok((status["cluster_version"].as_u64() >= Some(2)).then_some(()))
    })
    .await?;
    let nodes = cluster.get("/api/v1/nodes").await?;
    for node in nodes["nodes"].as_array().context("nodes")? {
        assert_eq!(node["max_transfers"], 1, "{node:#}");
    }
    let bodies = |cluster: &Cluster, jobs: &[&str], target: usize| -> Result<Vec<Value>> {
        let body = |(m, job): (usize, &&str)| {
            let base = format!("{}/m{m}", source.url);
            let mut body = models[m].request(job, &base, &cluster.nodes[0], &[&cluster.nodes[target]])?;
            body["priority"] = json!(PRIORITIES[m]);
            Ok(body)
        };
        jobs.iter().enumerate().map(body).collect()
    };

    // From the source to the seed. The first one has begun before the others are there, and is not stopped for them.
    let jobs = ["to-seed-0", "to-seed-1", "to-seed-2"];
    source.hold_at(1 << 20);
    for (m, body) in bodies(&cluster, &jobs, 0)?.iter().enumerate() {
        let created = cluster.create(body).await?;
        assert_eq!(created["priority"], PRIORITIES[m], "{created:#}");
        if m == 0 {
            let begun = |s: &Value| s["status"] != "planned";
            cluster.wait_job(jobs[m], JOB, begun).await?;
        }
    }
    for job in &jobs[1..] {
        let waits = cluster.job(job).await?;
        let why = waits["waiting_for"].as_str().unwrap_or_default();
        assert!(
            why.contains(&cluster.nodes[0]) && why.contains("--max-transfers is 1"),
            "{waits:#}"
        );
    }
    source.release();
    let ended = one_at_a_time(&mut cluster, &jobs, 0).await?;
    let began = |m: usize| reached(&cluster, &ended[m], 0, "acquiring");
    assert!(began(0)? < began(2)? && began(2)? < began(1)?, "{ended:#?}");

    // From the seed to a node that is away while the jobs are created: it finds all of them when it comes back.
    let jobs = ["to-node-0", "to-node-1", "to-node-2"];
    cluster.clients[1].kill();
    cluster.wait_node_status(1, "suspected").await?;
    for body in bodies(&cluster, &jobs, 1)? {
        cluster.create(&body).await?;
    }
    cluster.clients[1].start()?;
    let ended = one_at_a_time(&mut cluster, &jobs, 1).await?;
    let staged = |m: usize| reached(&cluster, &ended[m], 1, "staged");
    assert!(staged(2)? < staged(0)? && staged(0)? < staged(1)?, "{ended:#?}");
    Ok(())
}
