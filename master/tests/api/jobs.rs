//! Jobs from their creation to their end.

use super::{
    cluster::{JOBS, TestCluster, example, rfc_example},
    node::{FakeNode, Manner, register},
};
use anyhow::Result;
use hyper::Method;
use mooncake_proto::{api::HEADER_APPLIED_INDEX, pb::session as pb};
use serde_json::{Value, json};
use std::time::Duration;

const SEED: &str = "127.0.0.1:25001";
const FOLLOWER: &str = "127.0.0.1:25002";

#[tokio::test(flavor = "multi_thread")]
async fn the_rfcs_example_is_completed() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    let rpc = &cluster.masters[0].rpc;
    let seed = FakeNode::start(rpc, SEED, Manner::Works).await?;
    let follower = FakeNode::start(rpc, FOLLOWER, Manner::Works).await?;
    let body = rfc_example();
    let id = body["job_id"].as_str().unwrap();
    let created = cluster.post(0, JOBS, &body).await?;
    assert_eq!(
        (created.status, &created.body["job_id"]),
        (201, &body["job_id"]),
        "{}",
        created.text
    );
    assert_eq!(created.header("location"), Some(&*format!("{JOBS}/{id}")));

    let done = cluster
        .until(0, &format!("{JOBS}?job_id={id}"), |a| {
            a.body["status"] == "completed"
        })
        .await?;
    for at in 0..2 {
        let placement = &done.body["placements"][at];
        assert_eq!(placement["state"], "staged");
        assert_eq!(placement["staged_bytes"], 1_048_576);
        assert_eq!(placement["checksum_verified"], true);
        assert_eq!(
            placement["local_path"],
            format!("/models/{}", placement["node_id"].as_str().unwrap())
        );
    }
    assert_eq!(done.body["last_error"], Value::Null);
    let transitions = done.body["transitions"].as_object().unwrap();
    assert_eq!(transitions.len(), 4, "{transitions:?}");
    assert_eq!(done.body["tasks"].as_array().unwrap().len(), 2);
    assert_eq!(done.body["progress"]["bytes_staged"], 2 * 1_048_576);
    assert!(
        done.text.contains("checksum"),
        "a warning about the checksum: {}",
        done.text
    );
    seed.got("acquire demo-model 1048576").await?;
    seed.got("sealed").await?;
    follower.got("replicate").await?;

    let again = cluster.post(0, JOBS, &body).await?;
    assert_eq!((again.status, &again.body["status"]), (200, &json!("completed")));
    let mut other = body.clone();
    other["target_nodes"] = json!([SEED]);
    other["replica_policy"] = json!({"target_replica_count": 1});
    let conflict = cluster.post(0, JOBS, &other).await?;
    assert_eq!(
        (conflict.status, &conflict.body["code"]),
        (409, &json!("job_conflict")),
        "{}",
        conflict.text
    );
    // Other content under the sealed key.
    let mut other = example("other-content", "demo-model");
    other["manifest"]["files"][0]["path"] = "other.bin".into();
    let conflict = cluster.post(0, JOBS, &other).await?;
    assert_eq!(
        (conflict.status, &conflict.body["code"]),
        (409, &json!("artifact_conflict")),
        "{}",
        conflict.text
    );

    let object = cluster
        .get(0, "/api/v1/objects?key=demo-model/r1/chunk-002")
        .await?;
    assert_eq!(
        object.body["objects"][0]["size_bytes"], 262_144,
        "{}",
        object.text
    );
    assert_eq!(object.body["objects"][0]["offset_bytes"], 524_288);
    assert_eq!(object.body["objects"][0]["nodes"], json!([SEED, FOLLOWER]));
    let models = cluster.get(0, "/api/v1/models?model_id=demo-model").await?;
    assert_eq!(models.body["models"][0]["sealed"], true, "{}", models.text);
    assert_eq!(
        cluster.get(0, "/api/v1/models?model_id=none").await?.body["models"],
        json!([])
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_members_are_warned_about_and_a_missing_id_is_made() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    let _seed = FakeNode::start(&cluster.masters[0].rpc, SEED, Manner::Works).await?;
    let mut body = example("x", "m");
    body.as_object_mut().unwrap().remove("job_id");
    body["target_nodes"] = json!([SEED]);
    body["replica_policy"] = json!({"target_replica_count": 1, "colour": "red"});
    let created = cluster.post(0, JOBS, &body).await?;
    assert_eq!(created.status, 201, "{}", created.text);
    let id = created.body["job_id"].as_str().unwrap();
    assert_eq!(id.len(), 36, "a UUID: {id}");
    let warnings = created.body["warnings"].as_array().unwrap();
    assert!(
        warnings
            .iter()
            .any(|w| w["code"] == "unknown_member" && w["pointer"] == "/replica_policy/colour"),
        "{warnings:?}"
    );
    cluster.job_status(0, id, "completed").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seed_that_fails_fails_its_job_with_a_reason() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    let rpc = &cluster.masters[0].rpc;
    let _seed = FakeNode::start(rpc, SEED, Manner::Fails).await?;
    let _follower = FakeNode::start(rpc, FOLLOWER, Manner::Works).await?;
    cluster.post(0, JOBS, &example("fails", "m")).await?;
    let failed = cluster.job_status(0, "fails", "failed").await?;
    assert_eq!(failed.body["placements"][0]["state"], "failed", "{}", failed.text);
    let reason = failed.body["placements"][0]["last_error"].as_str().unwrap();
    assert!(reason.contains("model.bin has another checksum"), "{reason}");
    assert_ne!(failed.body["placements"][1]["state"], "staged");
    // A job that has ended cannot be canceled.
    let cancel = cluster
        .send(0, Method::POST, &format!("{JOBS}/fails/cancel"), &[], "")
        .await?;
    assert_eq!(
        (cancel.status, &cancel.body["code"]),
        (409, &json!("job_terminal")),
        "{}",
        cancel.text
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn progress_is_live_and_a_cancel_is_idempotent_and_stops_the_task() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    let seed = FakeNode::start(&cluster.masters[0].rpc, SEED, Manner::Dawdles).await?;
    let mut body = example("slow", "m");
    body["target_nodes"] = json!([SEED]);
    body["replica_policy"] = json!({"target_replica_count": 1});
    cluster.post(0, JOBS, &body).await?;
    let moving = cluster
        .until(0, &format!("{JOBS}/slow"), |a| {
            a.body["progress"]["bytes_staged"] == 524_288
        })
        .await?;
    assert_eq!(moving.body["status"], "seeding", "{}", moving.text);
    assert_eq!(moving.body["tasks"][0]["state"], "running");
    assert_eq!(moving.body["tasks"][0]["objects_done"], 2);
    for _ in 0..2 {
        let canceled = cluster
            .send(0, Method::POST, &format!("{JOBS}/slow/cancel"), &[], "")
            .await?;
        assert_eq!(
            (canceled.status, &canceled.body["status"]),
            (200, &json!("canceled")),
            "{}",
            canceled.text
        );
        assert_eq!(
            canceled.body["placements"][0]["staged_bytes"], 524_288,
            "the view is frozen as it stood"
        );
    }
    seed.got("revoke m").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_poll_wakes_at_a_change_and_gives_up_after_its_wait() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    let _seed = FakeNode::start(&cluster.masters[0].rpc, SEED, Manner::Dawdles).await?;
    let mut body = example("slow", "m");
    body["target_nodes"] = json!([SEED]);
    body["replica_policy"] = json!({"target_replica_count": 1});
    cluster.post(0, JOBS, &body).await?;
    let seeding = cluster.job_status(0, "slow", "seeding").await?;
    let version = seeding.body["version"].as_u64().unwrap();
    // Nothing happens: the same version, after the wait and not before.
    let began = std::time::Instant::now();
    let same = cluster
        .get(0, &format!("{JOBS}/slow?since={version}&wait=300ms"))
        .await?;
    assert_eq!(same.body["version"], version, "{}", same.text);
    assert!(began.elapsed() >= Duration::from_millis(300));
    // An older version is answered at once, whatever the wait.
    let behind = cluster
        .get(0, &format!("{JOBS}/slow?since={}&wait=60s", version - 1))
        .await?;
    assert_eq!(behind.body["version"], version);
    // A change wakes it long before the wait is over (the test's patience is the same 60 s).
    let path = format!("{JOBS}?job_id=slow&since={version}&wait=55s");
    let cancel = format!("{JOBS}/slow/cancel");
    let (woken, canceled) = tokio::join!(cluster.get(0, &path), async {
        cluster
            .until(0, "/metrics", |a| a.text.contains("\nmaster_long_polls 1\n"))
            .await?;
        cluster.send(0, Method::POST, &cancel, &[], "").await
    });
    canceled?;
    let woken = woken?;
    assert_eq!(woken.body["status"], "canceled", "{}", woken.text);
    let index: u64 = woken.header(HEADER_APPLIED_INDEX).unwrap().parse()?;
    assert!(index >= woken.body["version"].as_u64().unwrap());
    // An ended job does not change: no wait.
    let ended = cluster.get(0, &format!("{JOBS}/slow?wait=55s")).await?;
    assert_eq!(ended.body["status"], "canceled");
    Ok(())
}

/// Whatever can be held back has the place of a long poll, not that of a request.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_poll_is_one_however_it_is_asked_for() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    let _seed = FakeNode::start(&cluster.masters[0].rpc, SEED, Manner::Dawdles).await?;
    for (number, (method, query)) in [
        (Method::GET, "wait=55s"),
        (Method::GET, "w%61it=55s"),
        (Method::HEAD, "wait=55s"),
    ]
    .into_iter()
    .enumerate()
    {
        let id = format!("spelled-{number}");
        let mut body = example(&id, &id);
        body["target_nodes"] = json!([SEED]);
        body["replica_policy"] = json!({"target_replica_count": 1});
        cluster.post(0, JOBS, &body).await?;
        cluster.job_status(0, &id, "seeding").await?;
        let path = format!("{JOBS}/{id}?{query}");
        let (woken, canceled) = tokio::join!(cluster.send(0, method, &path, &[], ""), async {
            cluster
                .until(0, "/metrics", |a| a.text.contains("\nmaster_long_polls 1\n"))
                .await?;
            cluster
                .post(0, &format!("{JOBS}/{id}/cancel"), &json!(null))
                .await
        });
        assert_eq!((woken?.status, canceled?.status), (200, 200));
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_are_filtered_and_paged_newest_first() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    let _seed = FakeNode::start(&cluster.masters[0].rpc, SEED, Manner::Dawdles).await?;
    for at in 0..5 {
        let mut body = example(&format!("job-{at}"), &format!("model-{}", at % 2));
        body["target_nodes"] = json!([SEED]);
        body["replica_policy"] = json!({"target_replica_count": 1});
        assert_eq!(cluster.post(0, JOBS, &body).await?.status, 201);
    }
    let ids = |body: &Value| -> Vec<String> {
        body["jobs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|j| j["job_id"].as_str().unwrap().to_owned())
            .collect()
    };
    let mut all = Vec::new();
    let mut path = format!("{JOBS}?limit=2");
    let mut pages = 0;
    loop {
        let page = cluster.get(0, &path).await?.body;
        all.extend(ids(&page));
        pages += 1;
        match page["next_page_token"].as_str() {
            Some(token) => path = format!("{JOBS}?limit=2&page_token={token}"),
            None => break,
        }
    }
    assert_eq!((pages, all.len()), (3, 5), "{all:?}");
    let listed = ids(&cluster.get(0, JOBS).await?.body);
    assert_eq!(listed, all, "pages together are the list");
    let filtered = ids(&cluster.get(0, &format!("{JOBS}?model_id=model-1")).await?.body);
    assert_eq!(filtered.len(), 2, "{filtered:?}");
    assert_eq!(
        ids(&cluster.get(0, &format!("{JOBS}?status=completed")).await?.body).len(),
        0
    );
    assert_eq!(
        ids(&cluster.get(0, &format!("{JOBS}?node={SEED}")).await?.body).len(),
        5
    );
    assert_eq!(
        ids(&cluster.get(0, &format!("{JOBS}?node=127.0.0.1:9")).await?.body).len(),
        0
    );
    let models = cluster.get(0, "/api/v1/models?limit=1").await?.body;
    let token = models["next_page_token"].as_str().unwrap();
    let rest = cluster
        .get(0, &format!("/api/v1/models?limit=1&page_token={token}"))
        .await?
        .body;
    assert_eq!(rest["models"][0]["model_ref"]["model_id"], "model-1");
    assert_eq!(rest["next_page_token"], Value::Null);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_priority_is_part_of_the_request_and_of_every_answer() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    let _seed = FakeNode::start(&cluster.masters[0].rpc, SEED, Manner::Dawdles).await?;
    let _follower = FakeNode::start(&cluster.masters[0].rpc, FOLLOWER, Manner::Works).await?;
    // All masters of this cluster know priorities, which it finds out by itself.
    cluster
        .until(0, "/api/v1/cluster", |a| a.body["cluster_version"] == 2)
        .await?;
    let mut body = example("urgent", "m");
    body["priority"] = json!(7);
    let created = cluster.post(0, JOBS, &body).await?;
    assert_eq!(
        (created.status, &created.body["priority"]),
        (201, &json!(7)),
        "{}",
        created.text
    );
    assert!(!created.text.contains("priority_ignored"), "{}", created.text);
    assert_eq!(cluster.post(0, JOBS, &body).await?.status, 200);
    for other in [json!(6), json!(0), Value::Null] {
        let mut other_body = body.clone();
        other_body["priority"] = other;
        let conflict = cluster.post(0, JOBS, &other_body).await?;
        assert_eq!(
            (conflict.status, &conflict.body["code"]),
            (409, &json!("job_conflict")),
            "{}",
            conflict.text
        );
    }
    let plain = cluster.post(0, JOBS, &example("plain", "m")).await?;
    assert_eq!((plain.status, &plain.body["priority"]), (201, &json!(0)));
    let list = cluster.get(0, JOBS).await?;
    let priorities: Vec<_> = list.body["jobs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|job| (&job["job_id"], &job["priority"]))
        .collect();
    assert_eq!(
        priorities,
        [(&json!("plain"), &json!(0)), (&json!("urgent"), &json!(7))]
    );
    let got = cluster.get(0, &format!("{JOBS}/urgent")).await?;
    assert_eq!(got.body["priority"], 7);
    for (wrong, code, fault) in [
        (json!(11), "invalid_request", "out_of_range"),
        (json!(-11), "invalid_request", "out_of_range"),
        (json!(1.5), "invalid_json", "wrong_type"),
        (json!("high"), "invalid_json", "wrong_type"),
    ] {
        let mut body = example("wrong", "m");
        body["priority"] = wrong;
        let refused = cluster.post(0, JOBS, &body).await?;
        assert_eq!(
            (refused.status, &refused.body["code"]),
            (400, &json!(code)),
            "{}",
            refused.text
        );
        assert_eq!(refused.body["errors"][0]["pointer"], "/priority");
        assert_eq!(refused.body["errors"][0]["code"], fault);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_says_that_it_waits_for_a_place_on_a_node() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    let rpc = &cluster.masters[0].rpc;
    let limited = pb::Register {
        max_transfers: 1,
        ..register(SEED, "s")
    };
    let _seed = FakeNode::start_as(rpc, limited, Manner::Dawdles).await?;
    let node = cluster.get(0, &format!("/api/v1/nodes/{SEED}")).await?;
    assert_eq!(node.body["max_transfers"], 1, "{}", node.text);
    let to_seed = |job: &str, model: &str| {
        let mut body = example(job, model);
        body["target_nodes"] = json!([SEED]);
        body["replica_policy"] = json!({"target_replica_count": 1});
        body
    };
    cluster.post(0, JOBS, &to_seed("first", "m1")).await?;
    cluster.job_status(0, "first", "seeding").await?;
    cluster.post(0, JOBS, &to_seed("second", "m2")).await?;
    let waits = cluster.get(0, &format!("{JOBS}/second")).await?;
    assert_eq!(waits.body["status"], "planned");
    let why = waits.body["waiting_for"].as_str().unwrap_or_default();
    assert!(
        why.contains(SEED) && why.contains("--max-transfers is 1"),
        "{}",
        waits.text
    );
    cluster
        .send(0, Method::POST, &format!("{JOBS}/first/cancel"), &[], "")
        .await?;
    let begun = cluster.job_status(0, "second", "seeding").await?;
    assert_eq!(begun.body["waiting_for"], Value::Null, "{}", begun.text);
    Ok(())
}
