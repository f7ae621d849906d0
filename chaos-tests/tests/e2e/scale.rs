//! Many jobs, and the largest manifest.

use crate::JOB;
use anyhow::{Context, Result, ensure};
use futures_util::{StreamExt, stream};
use mooncake_chaos::{Cluster, ClusterOptions, Model};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const PEAK_LIMIT_BYTES: u64 = 400 << 20;

fn peaks(cluster: &Cluster) -> Result<Vec<u64>> {
    cluster
        .masters
        .iter()
        .chain(&cluster.clients)
        .map(|p| p.peak_memory_bytes())
        .collect()
}

#[tokio::test]
async fn two_hundred_jobs_at_once_three_rounds() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let allow = dir.path().display().to_string();
    let mut cluster = Cluster::start(ClusterOptions {
        allow_sources: vec![allow.clone()],
        ..ClusterOptions::calm()
    })
    .await?;
    let nodes = cluster.nodes.clone();
    let mut rounds = Vec::new();
    for round in 0..3 {
        for process in cluster.masters.iter().chain(&cluster.clients) {
            process.reset_peak_memory()?;
        }
        let mut bodies = Vec::new();
        for n in 0..200 {
            let id = format!("r{round}-m{n}");
            let folder = dir.path().join(&id);
            let model = Model::create(&folder, &id, &[("w.bin", 300_000), ("sub/config.json", 53)])?;
            let base = folder.display().to_string();
            bodies.push(model.request(&id, &base, &nodes[n % 3], &[&nodes[0], &nodes[1], &nodes[2]])?);
        }
        let posted: Vec<_> = stream::iter(bodies.iter().enumerate())
            .map(|(n, body)| cluster.post_job_to(n % 3, body))
            .buffer_unordered(200)
            .collect()
            .await;
        for answer in posted {
            let (status, body) = answer?;
            ensure!(matches!(status, 200 | 201), "{status}: {body:#}");
        }
        for body in &bodies {
            let done = cluster
                .wait_ended(body["job_id"].as_str().context("id")?, 3 * JOB)
                .await?;
            ensure!(done["status"] == "completed", "{done:#}");
        }
        rounds.push(peaks(&cluster)?);
    }
    println!("peak memory per process in each round, in bytes: {rounds:?}");
    for (process, peak) in rounds[2].iter().enumerate() {
        assert!(
            *peak <= PEAK_LIMIT_BYTES,
            "process {process} used {peak} bytes: {rounds:?}"
        );
        let second = rounds[1][process];
        assert!(
            *peak <= second + second / 10,
            "process {process} grows: {rounds:?}"
        );
    }
    Ok(())
}

/// A request of one file in `chunks` chunks, with counting ids in the body. The job's id is the revision, too.
fn chunky(job_id: &str, chunks: u64, node: &str) -> Value {
    let ids: Vec<String> = (0..chunks).map(|n| format!("big/r1/chunk-{n:07}")).collect();
    let names = json!({"model_id": "big", "revision": job_id, "format": "bin", "provider": "test"});
    let mut manifest = names.clone();
    manifest["total_size_bytes"] = json!(chunks * 4096);
    manifest["files"] = json!([{
        "path": "big.bin",
        "size_bytes": chunks * 4096,
        "checksum": "0".repeat(64),
        "download_url": "/nowhere/big.bin",
        "artifact": {"artifact_key": "big", "object_ids": ids},
        "chunk_layout": {"chunk_size_bytes": 4096, "chunk_count": chunks, "object_prefix": "big/r1"}
    }]);
    json!({"job_id": job_id, "model": names, "manifest": manifest, "seed_node_id": node, "target_nodes": [node]})
}

#[tokio::test]
async fn a_manifest_of_a_million_chunks() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions {
        clients: 1,
        ..ClusterOptions::calm()
    })
    .await?;
    let node = cluster.nodes[0].clone();
    // The best of three: one of them may meet a moment when the machine does something else.
    let mut took = Vec::new();
    for job in ["big-1", "big-2", "big-3"] {
        let body = chunky(job, 1_000_000, &node);
        let started = Instant::now();
        cluster.create(&body).await?;
        took.push(started.elapsed());
        let (status, answer) = cluster.post_job(&body).await?;
        assert_eq!(status, 200, "{answer:#}");
    }
    println!(
        "1,000,000 chunks: {took:?}; peak memory per process: {:?}",
        peaks(&cluster)?
    );
    let best = took.iter().min().context("three were posted")?;
    assert!(*best <= Duration::from_secs(5), "accepted in {took:?}");

    let (status, problem) = cluster.post_job(&chunky("bigger", 1_048_577, &node)).await?;
    assert_eq!(status, 400, "{problem:#}");
    assert!(
        problem.to_string().contains("1048576"),
        "the limit is named: {problem:#}"
    );
    for (process, peak) in peaks(&cluster)?.iter().enumerate() {
        assert!(*peak <= PEAK_LIMIT_BYTES, "process {process} used {peak} bytes");
    }
    Ok(())
}
