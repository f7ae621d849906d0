//! One request, many times, through every master: one job, one download.

use crate::bed::Bed;
use anyhow::Result;
use futures_util::future::try_join_all;
use mooncake_chaos::cluster::READY_DEADLINE;
use serde_json::json;

#[tokio::test]
async fn twenty_at_once_make_one_job_and_one_download() -> Result<()> {
    let files = [("a.bin", 5 << 20), ("sub/b.bin", 3 << 20), ("e", 0)];
    // Its timers are slow: an election would turn the one 201 into a 200 for the repeat of a lost answer.
    let mut bed = Bed::start("idem", &files, None).await?;
    let body = bed.request("idem-1", 0, &[0, 1])?;
    let cluster = &bed.cluster;

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

    let done = bed.completed("idem-1").await?;
    let cluster = &mut bed.cluster;
    for master in 0..3 {
        let (status, again) = cluster.post_job_to(master, &body).await?;
        assert_eq!(status, 200);
        assert_eq!(again, done, "the same answer from every master");
    }
    bed.assert_served_once()?;
    let cluster = &mut bed.cluster;
    let jobs = cluster.get("/api/v1/model-distribution/jobs").await?;
    assert_eq!(jobs["jobs"].as_array().map(Vec::len), Some(1), "{jobs:#}");

    let mut other = body.clone();
    other["target_nodes"] = json!([cluster.nodes[0], cluster.nodes[2]]);
    for master in 0..3 {
        let (status, problem) = cluster.post_job_to(master, &other).await?;
        assert_eq!(
            (status, problem["code"].as_str()),
            (409, Some("job_conflict")),
            "{problem:#}"
        );
    }

    // A repeat does not depend on the cluster's state: the node may have left.
    cluster.clients[1].terminate(READY_DEADLINE).await?;
    let (status, again) = cluster.post_job_to(0, &body).await?;
    assert_eq!((status, again["status"].as_str()), (200, Some("completed")));
    Ok(())
}
