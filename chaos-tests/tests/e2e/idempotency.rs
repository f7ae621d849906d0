//! One request, many times, through every master: one job, one download.

use crate::JOB;
use anyhow::Result;
use futures_util::future::try_join_all;
use mooncake_chaos::{Cluster, ClusterOptions, HttpSource, Model};
use serde_json::json;

#[tokio::test]
async fn twenty_at_once_make_one_job_and_one_download() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let model = Model::create(
        dir.path(),
        "idem",
        &[("a.bin", 5 << 20), ("sub/b.bin", 3 << 20), ("e", 0)],
    )?;
    let source = HttpSource::start(dir.path()).await?;
    let mut cluster = Cluster::start(ClusterOptions {
        allow_sources: vec![source.url.clone()],
        ..Default::default()
    })
    .await?;
    let nodes = cluster.nodes.clone();
    let body = model.request("idem-1", &source.url, &nodes[0], &[&nodes[0], &nodes[1]])?;

    let answers = try_join_all((0..20).map(|n| cluster.post_job_to(n % 3, &body))).await?;
    let created = answers.iter().filter(|(status, _)| *status == 201).count();
    assert_eq!(
        created,
        1,
        "exactly one creates: {:?}",
        answers.iter().map(|a| a.0).collect::<Vec<_>>()
    );
    assert!(
        answers
            .iter()
            .all(|(status, body)| matches!(status, 200 | 201) && body["job_id"] == "idem-1")
    );

    let done = cluster.wait_ended("idem-1", JOB).await?;
    assert_eq!(done["status"], "completed", "{done:#}");
    for master in 0..3 {
        let (status, again) = cluster.post_job_to(master, &body).await?;
        assert_eq!(status, 200);
        assert_eq!(again, done, "the same answer from every master");
    }
    assert_eq!(
        (source.bytes_served(), source.bytes_served_again()),
        (model.total_bytes()?, 0)
    );
    let jobs = cluster.get("/api/v1/model-distribution/jobs").await?;
    assert_eq!(jobs["jobs"].as_array().map(Vec::len), Some(1), "{jobs:#}");

    let mut other = body.clone();
    other["target_nodes"] = json!([nodes[0], nodes[2]]);
    for master in 0..3 {
        let (status, problem) = cluster.post_job_to(master, &other).await?;
        assert_eq!(
            (status, problem["code"].as_str()),
            (409, Some("job_conflict")),
            "{problem:#}"
        );
    }

    // A repeat does not depend on the cluster's state: the node may have left.
    cluster.clients[1]
        .terminate(std::time::Duration::from_secs(10))
        .await?;
    let (status, again) = cluster.post_job_to(0, &body).await?;
    assert_eq!((status, again["status"].as_str()), (200, Some("completed")));
    Ok(())
}
