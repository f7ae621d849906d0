//! What the cluster has is never downloaded again; a failed job does not burn the model's name.

use crate::JOB;
use anyhow::{Context, Result};
use mooncake_chaos::{Cluster, ClusterOptions, HttpSource, Model};
use serde_json::json;

struct Bed {
    cluster: Cluster,
    source: HttpSource,
    model: Model,
    nodes: Vec<String>,
    _dir: tempfile::TempDir,
}

async fn bed(id: &str) -> Result<Bed> {
    let dir = tempfile::tempdir()?;
    let model = Model::create(dir.path(), id, &[("weights/a.bin", 6 << 20), ("config.json", 53)])?;
    let source = HttpSource::start(dir.path()).await?;
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

#[tokio::test]
async fn a_second_job_downloads_nothing() -> Result<()> {
    let Bed {
        mut cluster,
        source,
        model,
        nodes,
        _dir,
    } = bed("reuse").await?;
    let first = model.request("first", &source.url, &nodes[0], &[&nodes[0], &nodes[1]])?;
    cluster.complete(&first, JOB).await?;
    let served = source.bytes_served();
    assert_eq!(served, model.total_bytes()?);

    // One more target; and another seed that does not have it yet.
    let more = model.request("more", &source.url, &nodes[2], &[&nodes[0], &nodes[1], &nodes[2]])?;
    let done = cluster.complete(&more, JOB).await?;
    assert_eq!(source.bytes_served(), served, "{done:#}");
    assert!(
        done["transitions"].get("seeding").is_none(),
        "nothing was acquired: {done:#}"
    );
    for node in 0..3 {
        model.assert_equal(
            cluster.placement(&done, node)["local_path"]
                .as_str()
                .context("path")?,
        )?;
    }

    // The seed loses its copy (a new disk under the old name); another node still has it.
    cluster.clients[0].kill();
    cluster.wait_node_status(0, "suspected").await?;
    let root = cluster.roots[0].clone();
    std::fs::remove_dir_all(&root)?;
    std::fs::create_dir_all(&root)?;
    cluster.clients[0].start()?;
    cluster.wait_ready().await?;
    let again = model.request("again", &source.url, &nodes[0], &[&nodes[0]])?;
    let done = cluster.complete(&again, JOB).await?;
    assert_eq!(
        source.bytes_served(),
        served,
        "the seed's new copy came from a peer"
    );
    model.assert_equal(
        cluster.placement(&done, 0)["local_path"]
            .as_str()
            .context("path")?,
    )?;
    Ok(())
}

#[tokio::test]
async fn two_jobs_at_once_with_different_seeds_download_once() -> Result<()> {
    let Bed {
        mut cluster,
        source,
        model,
        nodes,
        _dir,
    } = bed("two-seeds").await?;
    source.limit_rate(Some(4 << 20));
    let a = model.request("a", &source.url, &nodes[0], &[&nodes[0], &nodes[2]])?;
    let b = model.request("b", &source.url, &nodes[1], &[&nodes[1], &nodes[2]])?;
    let (ra, rb) = tokio::join!(cluster.post_job_to(0, &a), cluster.post_job_to(1, &b));
    assert_eq!((ra?.0, rb?.0), (201, 201));
    for id in ["a", "b"] {
        let done = cluster.wait_ended(id, JOB).await?;
        assert_eq!(done["status"], "completed", "{done:#}");
    }
    assert_eq!(
        (source.bytes_served(), source.bytes_served_again()),
        (model.total_bytes()?, 0)
    );
    Ok(())
}

#[tokio::test]
async fn a_wrong_checksum_does_not_burn_the_key() -> Result<()> {
    let Bed {
        mut cluster,
        source,
        model,
        nodes,
        _dir,
    } = bed("burn").await?;
    let good = model.request("good", &source.url, &nodes[0], &[&nodes[0], &nodes[1]])?;
    let mut wrong = good.clone();
    wrong["job_id"] = json!("wrong");
    wrong["manifest"]["files"][0]["checksum"] = json!("0".repeat(64));
    cluster.post_job(&wrong).await?;
    let failed = cluster.wait_ended("wrong", JOB).await?;
    assert_eq!(failed["status"], "failed", "{failed:#}");

    // Corrected, and from another URL too.
    let elsewhere = HttpSource::start(&model.folder).await?;
    let moved = serde_json::to_string(&good)?.replace(&source.url, &elsewhere.url);
    let (status, problem) = cluster.post_job(&serde_json::from_str(&moved)?).await?;
    assert_eq!(status, 201, "{problem:#}");
    // The clients were not told to trust that URL: the job fails, and again the key is not burnt.
    let failed = cluster.wait_ended("good", JOB).await?;
    assert_eq!(failed["status"], "failed");
    assert!(
        failed["last_error"]
            .as_str()
            .context("reason")?
            .contains("--allow-source"),
        "{failed:#}"
    );
    let mut corrected = good.clone();
    corrected["job_id"] = json!("corrected");
    let done = cluster.complete(&corrected, JOB).await?;
    model.assert_equal(
        cluster.placement(&done, 1)["local_path"]
            .as_str()
            .context("path")?,
    )?;

    // Sealed now: other content under the same key is refused.
    wrong["job_id"] = json!("late");
    let (status, problem) = cluster.post_job(&wrong).await?;
    assert_eq!(
        (status, problem["code"].as_str()),
        (409, Some("artifact_conflict")),
        "{problem:#}"
    );
    Ok(())
}
