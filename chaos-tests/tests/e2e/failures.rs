//! Failures end in `failed` with a reason a person can act on, and never in a final folder that is not whole.

use crate::JOB;
use anyhow::{Context, Result, ensure};
use mooncake_chaos::{Behaviour, Cluster, ClusterOptions, HttpSource, Model, model::final_folders};
use serde_json::{Value, json};
use std::{
    process::Command,
    time::{Duration, Instant},
};

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
            Vec::<std::path::PathBuf>::new(),
            "no final folder anywhere"
        );
    }
}

#[tokio::test]
async fn seed_failures_say_why_and_leave_nothing() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let model = Model::create(dir.path(), "seedfail", &[("a.bin", 3 << 20), ("b.bin", 2 << 20)])?;
    let source = HttpSource::start(dir.path()).await?;
    let folder = dir.path().display().to_string();
    let allow = vec![source.url.clone(), folder.clone()];
    let mut cluster = Cluster::start(ClusterOptions {
        allow_sources: allow,
        ..Default::default()
    })
    .await?;
    let nodes = cluster.nodes.clone();
    let targets: Vec<&str> = nodes.iter().map(String::as_str).collect();

    let mut wrong = model.request("wrong-checksum", &source.url, &nodes[0], &targets)?;
    wrong["manifest"]["files"][1]["checksum"] = json!(format!("sha256:{}", "1".repeat(64)));
    cluster.post_job(&wrong).await?;
    let job = cluster.wait_ended("wrong-checksum", JOB).await?;
    assert_seed_failed(&cluster, &job, &["b.bin", "1111"]);

    let missing = model.request(
        "missing",
        &format!("file://{folder}/nowhere"),
        &nodes[0],
        &targets,
    )?;
    cluster.post_job(&missing).await?;
    let job = cluster.wait_ended("missing", JOB).await?;
    assert_seed_failed(&cluster, &job, &["nowhere"]);

    let outside = model.request("outside", "/etc", &nodes[0], &targets)?;
    cluster.post_job(&outside).await?;
    let job = cluster.wait_ended("outside", JOB).await?;
    assert_seed_failed(&cluster, &job, &["--allow-source"]);

    source.behave(Behaviour::NotFound);
    let absent = model.request("absent", &source.url, &nodes[0], &targets)?;
    cluster.post_job(&absent).await?;
    let job = cluster.wait_ended("absent", JOB).await?;
    assert_seed_failed(&cluster, &job, &["404"]);

    source.behave(Behaviour::CutWithoutRanges { after_bytes: 1 << 20 });
    let cut = model.request("cut", &source.url, &nodes[0], &targets)?;
    cluster.post_job(&cut).await?;
    let job = cluster.wait_ended("cut", JOB).await?;
    assert_seed_failed(&cluster, &job, &["range"]);

    // The key is free and the cluster is well.
    source.behave(Behaviour::Honest);
    let good = model.request("good", &source.url, &nodes[0], &targets)?;
    cluster.complete(&good, JOB).await?;
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

#[tokio::test]
async fn a_full_disk_fails_one_follower_and_spares_the_others() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let model = Model::create(dir.path(), "fulldisk", &[("a.bin", 24 << 20)])?;
    let small = Tmpfs::mount("16m")?;
    let mut cluster = Cluster::start(ClusterOptions {
        allow_sources: vec![dir.path().display().to_string()],
        client_roots: vec![None, None, Some(small.0.path().to_owned())],
        ..Default::default()
    })
    .await?;
    let nodes = cluster.nodes.clone();
    let targets: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let body = model.request("full", &dir.path().display().to_string(), &nodes[0], &targets)?;
    cluster.post_job(&body).await?;
    let job = cluster.wait_ended("full", JOB).await?;
    assert_eq!(job["status"], "failed", "{job:#}");
    for node in 0..2 {
        let p = cluster.placement(&job, node);
        assert_eq!(p["state"], "staged", "{job:#}");
        model.assert_equal(p["local_path"].as_str().context("path")?)?;
    }
    let failed = cluster.placement(&job, 2);
    assert_eq!(failed["state"], "failed", "{job:#}");
    assert!(
        failed["last_error"].as_str().context("reason")?.contains("space"),
        "{job:#}"
    );
    assert!(
        job["last_error"].as_str().context("reason")?.contains(&nodes[2]),
        "{job:#}"
    );
    assert!(final_folders(&cluster.roots[2]).is_empty());
    drop(cluster);
    Ok(())
}

/// The disk fills up in the middle: somebody else takes the space that was free at the start. Staging is
/// preallocated, so what fails is what comes beside the data: journal and records.
#[tokio::test]
async fn a_disk_that_fills_up_in_the_middle_stages_whole_or_fails_clearly() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let model = Model::create(dir.path(), "fillup", &[("a.bin", 16 << 20)])?;
    let source = HttpSource::start(dir.path()).await?;
    source.limit_rate(Some(4 << 20));
    let small = Tmpfs::mount("20m")?;
    let mut cluster = Cluster::start(ClusterOptions {
        allow_sources: vec![source.url.clone()],
        client_roots: vec![None, None, Some(small.0.path().to_owned())],
        ..Default::default()
    })
    .await?;
    let nodes = cluster.nodes.clone();
    let targets: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let body = model.request("fillup", &source.url, &nodes[0], &targets)?;
    cluster.post_job(&body).await?;
    cluster
        .wait_job("fillup", JOB, |s| {
            let placements = s["placements"].as_array().map(Vec::as_slice).unwrap_or_default();
            placements
                .iter()
                .any(|p| p["node_id"] == *nodes[2] && p["staged_bytes"].as_u64() > Some(0))
        })
        .await?;
    // Until nothing fits any more.
    let hog = small.0.path().join("hog");
    let mut file = std::fs::File::create(&hog)?;
    while std::io::Write::write_all(&mut file, &[0; 4096]).is_ok() {}
    let job = cluster.wait_ended("fillup", JOB).await?;
    for node in 0..2 {
        assert_eq!(cluster.placement(&job, node)["state"], "staged", "{job:#}");
    }
    let third = cluster.placement(&job, 2);
    if third["state"] == "staged" {
        model.assert_equal(third["local_path"].as_str().context("path")?)?;
    } else {
        assert_eq!(third["state"], "failed", "{job:#}");
        assert!(
            third["last_error"].as_str().context("reason")?.contains("space"),
            "{job:#}"
        );
        assert!(final_folders(&cluster.roots[2]).is_empty());
    }
    drop(cluster);
    Ok(())
}

#[tokio::test]
async fn a_dead_node_fails_within_the_grace() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let model = Model::create(dir.path(), "deadnode", &[("a.bin", 24 << 20)])?;
    let source = HttpSource::start(dir.path()).await?;
    source.limit_rate(Some(6 << 20));
    let mut cluster = Cluster::start(ClusterOptions {
        allow_sources: vec![source.url.clone()],
        master_args: vec!["--node-grace-s".into(), "5".into()],
        ..Default::default()
    })
    .await?;
    let nodes = cluster.nodes.clone();
    let targets: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let body = model.request("dead", &source.url, &nodes[0], &targets)?;
    cluster.post_job(&body).await?;
    cluster
        .wait_job("dead", JOB, |s| {
            s["placements"].as_array().is_some_and(|p| {
                p.iter()
                    .any(|p| p["node_id"] == *nodes[2] && p["staged_bytes"].as_u64() > Some(0))
            })
        })
        .await?;
    cluster.clients[2].kill();
    let killed = Instant::now();
    let job = cluster
        .wait_job("dead", JOB, |s| {
            s["placements"].as_array().is_some_and(|p| {
                p.iter()
                    .any(|p| p["node_id"] == *nodes[2] && p["state"] == "failed")
            })
        })
        .await?;
    let took = killed.elapsed();
    assert!(
        took <= Duration::from_secs(10),
        "grace 5 s + 5 s, took {took:?}: {job:#}"
    );
    let job = cluster.wait_ended("dead", JOB).await?;
    assert_eq!(job["status"], "failed", "{job:#}");
    for node in 0..2 {
        assert_eq!(cluster.placement(&job, node)["state"], "staged", "{job:#}");
    }
    assert!(
        cluster.placement(&job, 2)["last_error"]
            .as_str()
            .context("reason")?
            .contains("grace"),
        "{job:#}"
    );
    Ok(())
}

#[tokio::test]
async fn cancel_stops_what_no_other_job_wants() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let model = Model::create(dir.path(), "cancel", &[("a.bin", 16 << 20)])?;
    let source = HttpSource::start(dir.path()).await?;
    source.limit_rate(Some(3 << 20));
    let mut cluster = Cluster::start(ClusterOptions {
        allow_sources: vec![source.url.clone()],
        ..Default::default()
    })
    .await?;
    let nodes = cluster.nodes.clone();
    let moving = |s: &Value| s["progress"]["bytes_staged"].as_u64() > Some(0);

    // Two jobs want it: canceling one stops nothing.
    let one = model.request("one", &source.url, &nodes[0], &[&nodes[0], &nodes[1]])?;
    let two = model.request("two", &source.url, &nodes[0], &[&nodes[0], &nodes[2]])?;
    cluster.post_job(&one).await?;
    cluster.post_job(&two).await?;
    cluster.wait_job("one", JOB, moving).await?;
    let cancel = |id: &str| {
        format!(
            "{}/api/v1/model-distribution/jobs/{id}/cancel",
            cluster.endpoints[1]
        )
    };
    let answer = cluster.http.post(cancel("one")).send().await?;
    assert_eq!(answer.status(), 200);
    let canceled: Value = answer.json().await?;
    assert_eq!(
        (canceled["status"].as_str(), canceled["last_error"].as_str()),
        (Some("canceled"), Some("canceled"))
    );
    assert_eq!(
        cluster.http.post(cancel("one")).send().await?.status(),
        200,
        "canceling again is fine"
    );
    let done = cluster.wait_ended("two", JOB).await?;
    assert_eq!(done["status"], "completed", "{done:#}");
    assert_eq!(source.bytes_served(), model.total_bytes()?);
    let url = format!(
        "{}/api/v1/model-distribution/jobs/two/cancel",
        cluster.endpoints[0]
    );
    assert_eq!(
        cluster.http.post(url).send().await?.status(),
        409,
        "completed absorbs"
    );
    let late = cluster.job("one").await?;
    assert_eq!(late["status"], "canceled", "{late:#}");

    // Nobody wants it any more: the download stops.
    let other = tempfile::tempdir()?;
    let model = Model::create(other.path(), "cancel-alone", &[("a.bin", 30 << 20)])?;
    let source = HttpSource::start(other.path()).await?;
    source.limit_rate(Some(2 << 20));
    drop(cluster);
    let mut cluster = Cluster::start(ClusterOptions {
        allow_sources: vec![source.url.clone()],
        ..Default::default()
    })
    .await?;
    let nodes = cluster.nodes.clone();
    let body = model.request("alone", &source.url, &nodes[0], &[&nodes[0], &nodes[1]])?;
    cluster.post_job(&body).await?;
    cluster.wait_job("alone", JOB, moving).await?;
    let url = format!(
        "{}/api/v1/model-distribution/jobs/alone/cancel",
        cluster.endpoints[2]
    );
    assert_eq!(cluster.http.post(url).send().await?.status(), 200);
    // The source falls silent: two readings, five frames' time apart, agree.
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let before = source.bytes_served();
        tokio::time::sleep(Duration::from_millis(500)).await;
        if source.bytes_served() == before {
            break;
        }
        ensure!(Instant::now() < until, "the download goes on after the cancel");
    }
    assert!(source.bytes_served() < model.total_bytes()?);
    assert!(cluster.roots.iter().all(|r| final_folders(r).is_empty()));
    Ok(())
}
