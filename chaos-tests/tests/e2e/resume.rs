//! A client killed in the middle resumes from what its journal proves.

use crate::JOB;
use anyhow::{Context, Result};
use mooncake_chaos::{Cluster, ClusterOptions, HttpSource, Model};
use serde_json::Value;
use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// DESIGN §9: re-fetches ≤ 2 × (outstanding requests × block) + unjournaled bytes (≤ 64 MiB). These models are
/// smaller than 64 MiB, so the tests hold the clients to the tighter part: what may be outstanding or
/// younger than one journal flush, at the rates the tests set.
const REFETCH_BOUND: u64 = 8 << 20;

struct Bed {
    cluster: Cluster,
    source: HttpSource,
    model: Model,
    nodes: Vec<String>,
    _dir: tempfile::TempDir,
}

async fn bed(id: &str, size: u64, rate: u64) -> Result<Bed> {
    let dir = tempfile::tempdir()?;
    let model = Model::create(dir.path(), id, &[("a.bin", size / 2), ("b/c.bin", size / 2)])?;
    let source = HttpSource::start(dir.path()).await?;
    source.limit_rate(Some(rate));
    let cluster = Cluster::start(ClusterOptions {
        allow_sources: vec![source.url.clone()],
        ..Default::default()
    })
    .await?;
    let nodes = cluster.nodes.clone();
    Ok(Bed {
        cluster,
        source,
        model,
        nodes,
        _dir: dir,
    })
}

fn staged_bytes(snapshot: &Value, node: &str) -> u64 {
    let placements = snapshot["placements"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    placements
        .iter()
        .find(|p| p["node_id"] == *node)
        .and_then(|p| p["staged_bytes"].as_u64())
        .unwrap_or(0)
}

async fn metric(cluster: &Cluster, client: usize, name: &str) -> Result<u64> {
    let url = format!("{}/metrics", cluster.client_endpoints[client]);
    let text = cluster.http.get(url).send().await?.text().await?;
    let line = text
        .lines()
        .find(|l| l.starts_with(name))
        .with_context(|| format!("no {name} in\n{text}"))?;
    Ok(line.rsplit(' ').next().context("value")?.parse::<f64>()? as u64)
}

async fn finish(cluster: &mut Cluster, model: &Model, id: &str) -> Result<()> {
    let done = cluster.wait_ended(id, JOB).await?;
    assert_eq!(done["status"], "completed", "{done:#}");
    for node in 0..cluster.nodes.len() {
        model.assert_equal(
            cluster.placement(&done, node)["local_path"]
                .as_str()
                .context("path")?,
        )?;
    }
    Ok(())
}

#[tokio::test]
async fn a_killed_follower_resumes() -> Result<()> {
    let size = 32 << 20;
    let Bed {
        mut cluster,
        source,
        model,
        nodes,
        _dir,
    } = bed("follower-kill", size, 6 << 20).await?;
    let targets: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let body = model.request("fk", &source.url, &nodes[0], &targets)?;
    cluster.post_job(&body).await?;
    let at = cluster
        .wait_job("fk", JOB, |s| staged_bytes(s, &nodes[2]) > 12 << 20)
        .await?;
    cluster.clients[2].kill();
    let had = staged_bytes(&at, &nodes[2]);
    cluster.clients[2].start()?;
    finish(&mut cluster, &model, "fk").await?;
    let fetched = metric(&cluster, 2, "mooncake_client_fetched_bytes_total").await?;
    let bound = size - had + REFETCH_BOUND;
    assert!(
        fetched <= bound,
        "had {had} of {size} before the kill, fetched {fetched} after it, bound {bound}"
    );
    assert_eq!((source.bytes_served(), source.bytes_served_again()), (size, 0));
    Ok(())
}

#[tokio::test]
async fn a_killed_seed_resumes_from_a_source_with_ranges() -> Result<()> {
    let size = 32 << 20;
    let Bed {
        mut cluster,
        source,
        model,
        nodes,
        _dir,
    } = bed("seed-kill", size, 6 << 20).await?;
    let body = model.request("sk", &source.url, &nodes[0], &[&nodes[0], &nodes[1], &nodes[2]])?;
    cluster.post_job(&body).await?;
    cluster
        .wait_job("sk", JOB, |s| staged_bytes(s, &nodes[0]) > 12 << 20)
        .await?;
    cluster.clients[0].kill();
    cluster.clients[0].start()?;
    finish(&mut cluster, &model, "sk").await?;
    let again = source.bytes_served() - size;
    assert!(
        again <= REFETCH_BOUND,
        "{again} bytes of {size} were served again"
    );
    Ok(())
}

#[tokio::test]
async fn a_bit_flipped_while_down_is_found_and_only_that_block_fetched_again() -> Result<()> {
    let size = 32 << 20;
    let Bed {
        mut cluster,
        source,
        model,
        nodes,
        _dir,
    } = bed("bitflip", size, 6 << 20).await?;
    let targets: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let body = model.request("bf", &source.url, &nodes[0], &targets)?;
    cluster.post_job(&body).await?;
    let at = cluster
        .wait_job("bf", JOB, |s| staged_bytes(s, &nodes[2]) > 12 << 20)
        .await?;
    let had = staged_bytes(&at, &nodes[2]);
    cluster.clients[2].kill();
    flip_first_data_bit(&cluster.roots[2])?;
    cluster.clients[2].start()?;
    finish(&mut cluster, &model, "bf").await?;
    assert!(
        cluster.clients[2].log().contains("digest"),
        "the flip is reported:\n{}",
        cluster.clients[2].log_tail()
    );
    let fetched = metric(&cluster, 2, "mooncake_client_fetched_bytes_total").await?;
    let bound = size - had + REFETCH_BOUND;
    assert!(
        fetched <= bound,
        "had {had} of {size}, fetched {fetched}, bound {bound}"
    );
    Ok(())
}

/// Flips a bit in the first block of the first staging file (the first block arrives early and is journaled).
fn flip_first_data_bit(root: &Path) -> Result<()> {
    let file: PathBuf = walkdir::WalkDir::new(root)
        .into_iter()
        .filter_map(Result::ok)
        .map(|e| e.into_path())
        .filter(|p| p.file_name().is_some_and(|n| n == "a.bin" || n == "c.bin"))
        .find(|p| {
            let mut head = [0; 64];
            File::open(p).and_then(|f| f.read_exact_at(&mut head, 0)).is_ok() && head != [0; 64]
        })
        .context("no staging file with data")?;
    let file = File::options().read(true).write(true).open(file)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, 7)?;
    file.write_all_at(&[byte[0] ^ 1], 7)?;
    file.sync_all()?;
    Ok(())
}

/// A node frozen for less than the grace keeps its work.
#[tokio::test]
async fn a_frozen_follower_goes_on() -> Result<()> {
    let size = 24 << 20;
    let Bed {
        mut cluster,
        source,
        model,
        nodes,
        _dir,
    } = bed("freeze", size, 6 << 20).await?;
    let targets: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let body = model.request("fz", &source.url, &nodes[0], &targets)?;
    cluster.post_job(&body).await?;
    cluster
        .wait_job("fz", JOB, |s| staged_bytes(s, &nodes[1]) > 4 << 20)
        .await?;
    cluster.clients[1].signal(rustix::process::Signal::STOP)?;
    // Longer than any heartbeat time-out, shorter than the grace: the node is suspected, then back.
    cluster.wait_node_status(1, "suspected").await?;
    cluster.clients[1].signal(rustix::process::Signal::CONT)?;
    finish(&mut cluster, &model, "fz").await?;
    assert_eq!(source.bytes_served_again(), 0);
    Ok(())
}
