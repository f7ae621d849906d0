//! What the cluster has is never downloaded again; a failed job does not burn the model's name.

use crate::{JOB, bed::Bed};
use anyhow::{Context, Result};
use mooncake_chaos::{ClusterOptions, HttpSource};
use serde_json::json;

const FILES: [(&str, u64); 2] = [("weights/a.bin", 6 << 20), ("config.json", 53)];

#[tokio::test]
async fn a_second_job_downloads_nothing() -> Result<()> {
    let mut bed = Bed::start("reuse", &FILES, None).await?;
    let first = bed.request("first", 0, &[0, 1])?;
    bed.cluster.complete(&first, JOB).await?;
    bed.assert_served_once()?;

    // One more target; and another seed that does not have it yet.
    let more = bed.request("more", 2, &[0, 1, 2])?;
    bed.cluster.complete(&more, JOB).await?;
    let done = bed.finish("more").await?;
    bed.assert_served_once()?;
    assert!(
        done["transitions"].get("seeding").is_none(),
        "nothing was acquired: {done:#}"
    );

    // The seed loses its copy (a new disk under the old name); another node still has it.
    bed.cluster.clients[0].kill();
    bed.cluster.wait_node_status(0, "suspected").await?;
    let root = bed.cluster.roots[0].clone();
    std::fs::remove_dir_all(&root)?;
    std::fs::create_dir_all(&root)?;
    bed.cluster.clients[0].start()?;
    bed.cluster.wait_ready().await?;
    let again = bed.request("again", 0, &[0])?;
    let done = bed.cluster.complete(&again, JOB).await?;
    bed.assert_staged(&done, 0)?;
    bed.assert_served_once()
}

#[tokio::test]
async fn two_jobs_at_once_with_different_seeds_download_once() -> Result<()> {
    let mut bed = Bed::start("two-seeds", &FILES, Some(4 << 20)).await?;
    let a = bed.request("a", 0, &[0, 2])?;
    let b = bed.request("b", 1, &[1, 2])?;
    let (ra, rb) = tokio::join!(bed.cluster.post_job_to(0, &a), bed.cluster.post_job_to(1, &b));
    for (status, answer) in [ra?, rb?] {
        assert!(matches!(status, 200 | 201), "{status}: {answer:#}");
    }
    for id in ["a", "b"] {
        let done = bed.cluster.wait_ended(id, JOB).await?;
        assert_eq!(done["status"], "completed", "{done:#}");
    }
    bed.assert_served_once()
}

#[tokio::test]
async fn a_wrong_checksum_does_not_burn_the_key() -> Result<()> {
    let mirror = tempfile::tempdir()?;
    let elsewhere = HttpSource::start(mirror.path()).await?;
    let options = ClusterOptions {
        allow_sources: vec![elsewhere.url.clone()],
        ..ClusterOptions::calm()
    };
    let mut bed = Bed::start_with("burn", &FILES, None, options).await?;
    let mut wrong = bed.request("wrong", 0, &[0, 1])?;
    wrong["manifest"]["files"][0]["checksum"] = json!("0".repeat(64));
    bed.cluster.create(&wrong).await?;
    let failed = bed.cluster.wait_ended("wrong", JOB).await?;
    assert_eq!(failed["status"], "failed", "{failed:#}");

    // Corrected, and from another URL.
    for (path, _) in FILES {
        let to = mirror.path().join(path);
        std::fs::create_dir_all(to.parent().context("below the mirror")?)?;
        std::fs::copy(bed.model.folder.join(path), to)?;
    }
    let good = bed.request("good", 0, &[0, 1])?;
    let moved = serde_json::to_string(&good)?.replace(&bed.source.url, &elsewhere.url);
    let done = bed.cluster.complete(&serde_json::from_str(&moved)?, JOB).await?;
    bed.assert_staged(&done, 0)?;
    bed.assert_staged(&done, 1)?;
    assert_eq!(elsewhere.bytes_served(), bed.model.total_bytes()?);

    // And from the first URL: the same content, already there.
    let mut again = good.clone();
    again["job_id"] = json!("again");
    bed.cluster.complete(&again, JOB).await?;

    // Sealed now: other content under the same key is refused.
    wrong["job_id"] = json!("late");
    let (status, problem) = bed.cluster.post_job(&wrong).await?;
    assert_eq!(
        (status, problem["code"].as_str()),
        (409, Some("artifact_conflict")),
        "{problem:#}"
    );
    Ok(())
}
