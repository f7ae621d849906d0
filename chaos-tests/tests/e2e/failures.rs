//! Failures end in `failed` with a reason a person can act on, and never in a final folder that is not whole.

use crate::{JOB, bed::Bed};
use anyhow::{Context, Result, ensure};
use mooncake_chaos::{Behaviour, Cluster, ClusterOptions, Model, model::final_folders};
use serde_json::{Value, json};
use std::{path::PathBuf, process::Command};

/// The job failed because its seed did, and left nothing behind.
fn assert_seed_failed(cluster: &Cluster, job: &Value, reason: &[&str]) {
    assert_eq!(job["status"], "failed", "{job:#}");
    let seed = cluster.placement(job, 0);
    assert_eq!(seed["state"], "failed", "{job:#}");
    let error = seed["last_error"].as_str().unwrap_or_default();
    for part in reason {
        assert!(error.contains(part), "'{error}' does not say '{part}'");
    }
    assert!(
        job["last_error"].as_str().is_some_and(|e| !e.is_empty()),
        "{job:#}"
    );
    for node in 1..cluster.nodes.len() {
        assert_ne!(cluster.placement(job, node)["state"], "staged", "{job:#}");
    }
    for root in &cluster.roots {
        assert_eq!(
            final_folders(root),
            Vec::<PathBuf>::new(),
            "no final folder anywhere"
        );
    }
}

#[tokio::test]
async fn seed_failures_say_why_and_leave_nothing() -> Result<()> {
    let mut bed = Bed::start("seedfail", &[("a.bin", 3 << 20), ("b.bin", 2 << 20)], None).await?;
    let folder = bed.model.folder.display().to_string();

    let mut wrong = bed.request("wrong-checksum", 0, &ALL)?;
    wrong["manifest"]["files"][1]["checksum"] = json!(format!("sha256:{}", "1".repeat(64)));
    seed_fails(&mut bed, &wrong, &["b.bin", "1111"]).await?;

    let missing = bed.request_from(&format!("file://{folder}/nowhere"), "missing", 0, &ALL)?;
    seed_fails(&mut bed, &missing, &["nowhere"]).await?;

    let outside = bed.request_from("/etc", "outside", 0, &ALL)?;
    seed_fails(&mut bed, &outside, &["--allow-source"]).await?;

    bed.source.behave(Behaviour::NotFound);
    let absent = bed.request("absent", 0, &ALL)?;
    seed_fails(&mut bed, &absent, &["404"]).await?;

    bed.source
        .behave(Behaviour::CutWithoutRanges { after_bytes: 1 << 20 });
    let cut = bed.request("cut", 0, &ALL)?;
    seed_fails(&mut bed, &cut, &["range"]).await?;

    // The key is free and the cluster is well.
    bed.source.behave(Behaviour::Honest);
    let good = bed.request("good", 0, &ALL)?;
    bed.cluster.complete(&good, JOB).await?;
    Ok(())
}

const ALL: [usize; 3] = [0, 1, 2];

async fn seed_fails(bed: &mut Bed, body: &Value, reason: &[&str]) -> Result<()> {
    let job = bed.end_of(body).await?;
    assert_seed_failed(&bed.cluster, &job, reason);
    Ok(())
}

/// A small filesystem of its own, unmounted on drop.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn mount(size: &str) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let status = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(dir.path())
            .status()?;
        ensure!(
            status.success(),
            "mounting a tmpfs needs root: this test cannot be skipped in silence"
        );
        Ok(Self(dir))
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// Client 2 has this filesystem for its models.
fn with_small_disk(disk: &Tmpfs) -> ClusterOptions {
    ClusterOptions {
        client_roots: vec![None, None, Some(disk.0.path().to_owned())],
        ..ClusterOptions::calm()
    }
}

/// Client 2 failed for want of space and published nothing; the others have the model.
fn assert_no_space_on_the_third(bed: &Bed, job: &Value) -> Result<()> {
    bed.assert_staged(job, 0)?;
    bed.assert_staged(job, 1)?;
    let failed = bed.cluster.placement(job, 2);
    assert_eq!(failed["state"], "failed", "{job:#}");
    let reason = failed["last_error"].as_str().context("reason")?;
    assert!(reason.contains("space"), "{job:#}");
    assert!(final_folders(&bed.cluster.roots[2]).is_empty());
    Ok(())
}

#[tokio::test]
async fn a_full_disk_fails_one_follower_and_spares_the_others() -> Result<()> {
    let small = Tmpfs::mount("16m")?;
    let mut bed = Bed::start_with("fulldisk", &[("a.bin", 24 << 20)], None, with_small_disk(&small)).await?;
    let body = bed.request("full", 0, &ALL)?;
    let job = bed.end_of(&body).await?;
    assert_eq!(job["status"], "failed", "{job:#}");
    assert_no_space_on_the_third(&bed, &job)?;
    let reason = job["last_error"].as_str().context("reason")?;
    assert!(reason.contains(&bed.cluster.nodes[2]), "{job:#}");
    // The clients end before their disk does.
    drop(bed);
    Ok(())
}

/// The disk fills up in the middle: somebody else takes the space that was free at the start. Staging is
/// preallocated, so what fails is what comes beside the data: journal and records.
#[tokio::test]
async fn a_disk_that_fills_up_in_the_middle_stages_whole_or_fails_clearly() -> Result<()> {
    let small = Tmpfs::mount("20m")?;
    let files = [("a.bin", 16 << 20)];
    let mut bed = Bed::start_with("fillup", &files, Some(4 << 20), with_small_disk(&small)).await?;
    bed.source.hold_at(8 << 20);
    bed.post_to_all("fillup").await?;
    bed.wait_bytes("fillup", 2, 0).await?;
    // Until nothing fits any more.
    let mut hog = std::fs::File::create(small.0.path().join("hog"))?;
    while std::io::Write::write_all(&mut hog, &[0; 4096]).is_ok() {}
    bed.source.release();
    let job = bed.cluster.wait_ended("fillup", JOB).await?;
    if job["status"] == "completed" {
        for node in ALL {
            bed.assert_staged(&job, node)?;
        }
    } else {
        assert_no_space_on_the_third(&bed, &job)?;
    }
    drop(bed);
    Ok(())
}

#[tokio::test]
async fn a_dead_node_fails_within_the_grace() -> Result<()> {
    // Long enough that only a node that is dead stays away for so long; the product's own is 30 s.
    let options = ClusterOptions {
        master_args: vec!["--node-grace-s".into(), "5".into()],
        ..ClusterOptions::calm()
    };
    let mut bed = Bed::start_with("dead", &[("a.bin", 24 << 20)], Some(6 << 20), options).await?;
    bed.source.hold_at(12 << 20);
    bed.post_to_all("dead").await?;
    bed.wait_bytes("dead", 2, 0).await?;
    bed.cluster.clients[2].kill();
    bed.source.release();
    let job = bed.cluster.wait_ended("dead", JOB).await?;
    assert_eq!(job["status"], "failed", "{job:#}");
    bed.assert_staged(&job, 0)?;
    bed.assert_staged(&job, 1)?;
    let dead = bed.cluster.placement(&job, 2);
    assert_eq!(dead["state"], "failed", "{job:#}");
    let reason = dead["last_error"].as_str().context("reason")?;
    assert!(reason.contains("within the grace of 5 s"), "{job:#}");
    Ok(())
}

fn moving(job: &Value) -> bool {
    job["progress"]["bytes_staged"].as_u64() > Some(0)
}

#[tokio::test]
async fn cancel_stops_what_no_other_job_wants() -> Result<()> {
    let mut bed = Bed::start("cancel", &[("a.bin", 16 << 20)], None).await?;
    bed.source.hold_at(8 << 20);

    // Two jobs want it: canceling one stops nothing.
    let one = bed.request("one", 0, &[0, 1])?;
    let two = bed.request("two", 0, &[0, 2])?;
    bed.cluster.create(&one).await?;
    bed.cluster.create(&two).await?;
    bed.cluster.wait_job("one", JOB, moving).await?;
    let (status, canceled) = bed.cluster.cancel_at(1, "one").await?;
    assert_eq!(
        (status, &canceled["status"], &canceled["last_error"]),
        (200, &json!("canceled"), &json!("canceled"))
    );
    let (status, again) = bed.cluster.cancel_at(1, "one").await?;
    assert_eq!(status, 200, "canceling again is fine: {again:#}");
    bed.source.release();
    bed.completed("two").await?;
    bed.assert_served_once()?;
    let (status, problem) = bed.cluster.cancel_at(0, "two").await?;
    assert_eq!(status, 409, "completed absorbs: {problem:#}");
    let late = bed.cluster.job("one").await?;
    assert_eq!(late["status"], "canceled", "{late:#}");
    Ok(())
}

#[tokio::test]
async fn cancel_stops_the_download_that_nobody_wants_any_more() -> Result<()> {
    let mut bed = Bed::start("cancel-alone", &[("a.bin", 16 << 20)], None).await?;
    bed.source.hold_at(8 << 20);
    let body = bed.request("alone", 0, &[0, 1])?;
    bed.cluster.create(&body).await?;
    bed.cluster.wait_job("alone", JOB, moving).await?;
    let (status, canceled) = bed.cluster.cancel_at(2, "alone").await?;
    assert_eq!(status, 200, "{canceled:#}");
    // The seed ends its requests, though nothing is wrong with them.
    bed.wait_source_left().await?;
    bed.source.release();
    // It still does as it is told; and by then it has come back for nothing of the other.
    let other = Model::create(&bed.model.folder.join("other"), "other", &[("o.bin", 1 << 20)])?;
    let nodes = &bed.cluster.nodes;
    let base = format!("{}/other", bed.source.url);
    let body = other.request("other", &base, &nodes[0], &[&nodes[0], &nodes[1]])?;
    let done = bed.cluster.complete(&body, JOB).await?;
    let staged = bed.cluster.placement(&done, 1)["local_path"].as_str();
    other.assert_equal(staged.context("local_path")?)?;
    assert!(bed.source.bytes_served_of("a.bin") <= 8 << 20);
    let late = bed.cluster.job("alone").await?;
    assert_eq!(late["status"], "canceled", "{late:#}");
    Ok(())
}
