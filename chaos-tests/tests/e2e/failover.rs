//! Masters die in the middle of a transfer; the transfer does not notice.

use crate::JOB;
use anyhow::{Context, Result, ensure};
use mooncake_chaos::{Cluster, ClusterOptions, HttpSource, Model};
use serde_json::Value;
use std::time::{Duration, Instant};

/// A client's own count of bytes that it fetched although it had fetched them before.
async fn refetched_bytes(cluster: &Cluster) -> Result<u64> {
    let mut total = 0;
    for endpoint in &cluster.client_endpoints {
        let text = cluster
            .http
            .get(format!("{endpoint}/metrics"))
            .send()
            .await?
            .text()
            .await?;
        let line = text
            .lines()
            .find(|l| l.starts_with("mooncake_client_refetched_bytes_total"))
            .with_context(|| format!("no refetched bytes in the metrics of {endpoint}:\n{text}"))?;
        total += line.rsplit(' ').next().context("value")?.parse::<f64>()? as u64;
    }
    Ok(total)
}

#[tokio::test]
async fn killing_the_leader_costs_no_byte() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let model = Model::create(
        dir.path(),
        "leaderkill",
        &[("a.bin", 20 << 20), ("b/c.bin", 12 << 20)],
    )?;
    let source = HttpSource::start(dir.path()).await?;
    source.limit_rate(Some(8 << 20));
    let mut cluster = Cluster::start(ClusterOptions {
        allow_sources: vec![source.url.clone()],
        ..Default::default()
    })
    .await?;
    let nodes = cluster.nodes.clone();
    let targets: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let body = model.request("leaderkill", &source.url, &nodes[0], &targets)?;
    cluster.post_job(&body).await?;
    cluster
        .wait_job("leaderkill", JOB, |s| {
            s["progress"]["bytes_staged"].as_u64() > Some(4 << 20)
        })
        .await?;
    let leader = cluster.leader().await?;
    cluster.masters[leader].kill();
    let done = cluster.wait_ended("leaderkill", JOB).await?;
    assert_eq!(done["status"], "completed", "{done:#}");
    assert_eq!(
        (source.bytes_served(), source.bytes_served_again()),
        (model.total_bytes()?, 0)
    );
    assert_eq!(refetched_bytes(&cluster).await?, 0);
    for node in 0..3 {
        model.assert_equal(
            cluster.placement(&done, node)["local_path"]
                .as_str()
                .context("path")?,
        )?;
    }
    Ok(())
}

#[tokio::test]
async fn with_all_masters_dead_the_transfer_goes_on_to_its_end() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let model = Model::create(dir.path(), "alldead", &[("a.bin", 24 << 20)])?;
    let total = model.total_bytes()?;
    let source = HttpSource::start(dir.path()).await?;
    source.limit_rate(Some(6 << 20));
    let mut cluster = Cluster::start(ClusterOptions {
        allow_sources: vec![source.url.clone()],
        ..Default::default()
    })
    .await?;
    let nodes = cluster.nodes.clone();
    let targets: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let body = model.request("alldead", &source.url, &nodes[0], &targets)?;
    cluster.post_job(&body).await?;
    let at = cluster
        .wait_job("alldead", JOB, |s| {
            s["progress"]["bytes_staged"].as_u64() > Some(3 << 20)
        })
        .await?;
    assert_eq!(at["status"], "seeding", "the seed is still acquiring: {at:#}");
    cluster.masters.iter_mut().for_each(|m| m.kill());
    assert!(source.bytes_served() < total, "killed in the middle");

    // While they are dead every node comes to hold every verified byte, on its disk.
    let until = Instant::now() + JOB;
    loop {
        let mut held = Vec::new();
        for endpoint in &cluster.client_endpoints {
            let v: Value = cluster
                .http
                .get(format!("{endpoint}/api/v1/holdings"))
                .send()
                .await?
                .json()
                .await?;
            held.push(v["holdings"][0]["verified_bytes"].as_u64().unwrap_or(0));
        }
        if held.iter().all(|&h| h == total) {
            break;
        }
        ensure!(
            Instant::now() < until,
            "the transfer stopped with the masters: {held:?} of {total}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for root in &cluster.roots {
        let on_disk = mooncake_chaos::model::allocated_bytes(root)?;
        assert!(
            on_disk >= total,
            "{} bytes on disk below {}",
            on_disk,
            root.display()
        );
        assert!(
            mooncake_chaos::model::final_folders(root).is_empty(),
            "nothing is published without a committed seal"
        );
    }

    for master in &mut cluster.masters {
        master.start()?;
    }
    let done = cluster.wait_ended("alldead", JOB).await?;
    assert_eq!(done["status"], "completed", "{done:#}");
    assert_eq!((source.bytes_served(), source.bytes_served_again()), (total, 0));
    assert_eq!(refetched_bytes(&cluster).await?, 0);
    for node in 0..3 {
        model.assert_equal(
            cluster.placement(&done, node)["local_path"]
                .as_str()
                .context("path")?,
        )?;
    }
    Ok(())
}
