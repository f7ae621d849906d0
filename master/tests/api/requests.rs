//! Wrong requests and the small endpoints.

use super::{
    cluster::{JOBS, PATIENCE, TestCluster, example, rfc_example},
    errors,
    node::{FakeNode, Manner},
};
use anyhow::{Context as _, Result};
use futures_util::{StreamExt, stream::FuturesUnordered};
use hyper::Method;
use mooncake_proto::api::{HEADER_APPLIED_INDEX, HEADER_SERVED_BY, HEADER_TERM, PROBLEM_JSON};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Method, path, headers, body, and the status and code to expect.
type Case = (
    Method,
    String,
    &'static [(&'static str, &'static str)],
    Vec<u8>,
    u16,
    &'static str,
);

#[tokio::test(flavor = "multi_thread")]
async fn wrong_requests_are_problems_and_nobody_logs_an_error() -> Result<()> {
    errors::watch();
    let cluster = TestCluster::start(1).await?;
    let json_type: &'static [(&str, &str)] = &[("content-type", "application/json")];
    let (get, post) = (Method::GET, Method::POST);
    let cases: Vec<Case> = vec![
        (get.clone(), "/nothing".into(), &[], vec![], 404, "not_found"),
        (
            get.clone(),
            "/api/v1/nothing".into(),
            &[],
            vec![],
            404,
            "not_found",
        ),
        (
            Method::DELETE,
            JOBS.into(),
            &[],
            vec![],
            405,
            "method_not_allowed",
        ),
        (
            post.clone(),
            "/api/v1/nodes".into(),
            &[],
            vec![],
            405,
            "method_not_allowed",
        ),
        (
            post.clone(),
            JOBS.into(),
            &[("content-type", "text/plain")],
            b"{}".to_vec(),
            415,
            "unsupported_media_type",
        ),
        (
            post.clone(),
            JOBS.into(),
            &[],
            b"{}".to_vec(),
            415,
            "unsupported_media_type",
        ),
        (
            post.clone(),
            JOBS.into(),
            json_type,
            b"{\"job_id\":".to_vec(),
            400,
            "invalid_json",
        ),
        (
            post.clone(),
            JOBS.into(),
            json_type,
            vec![b' '; (64 << 20) + 1],
            413,
            "body_too_large",
        ),
        (
            post.clone(),
            JOBS.into(),
            json_type,
            b"{}".to_vec(),
            400,
            "invalid_request",
        ),
        (
            get.clone(),
            format!("{JOBS}?job_id=nope"),
            &[],
            vec![],
            404,
            "job_not_found",
        ),
        (
            get.clone(),
            format!("{JOBS}/nope"),
            &[],
            vec![],
            404,
            "job_not_found",
        ),
        (
            get.clone(),
            format!("{JOBS}/no%2Fpe"),
            &[],
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            post.clone(),
            format!("{JOBS}/nope/cancel"),
            &[],
            vec![],
            404,
            "job_not_found",
        ),
        (
            get.clone(),
            format!("{JOBS}?state=failed"),
            &[],
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            get.clone(),
            format!("{JOBS}?status=done"),
            &[],
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            get.clone(),
            format!("{JOBS}?limit=0"),
            &[],
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            get.clone(),
            format!("{JOBS}?page_token=x"),
            &[],
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            get.clone(),
            format!("{JOBS}?consistency=some"),
            &[],
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            get.clone(),
            format!("{JOBS}/nope?wait=x"),
            &[],
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            get.clone(),
            "/api/v1/nodes/a:1".into(),
            &[],
            vec![],
            404,
            "node_not_found",
        ),
        (
            get.clone(),
            "/api/v1/nodes/a".into(),
            &[],
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            get.clone(),
            "/api/v1/objects".into(),
            &[],
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            get.clone(),
            format!("{JOBS}/%FF"),
            &[],
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            post.clone(),
            format!("{JOBS}/%FF/cancel"),
            &[],
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            get.clone(),
            "/api/v1/nodes/%FF".into(),
            &[],
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            get.clone(),
            "/api/v1/nodes?min_index=1".into(),
            &[],
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            get.clone(),
            "/api/v1/cluster?consistency=nonsense".into(),
            &[],
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            post.clone(),
            format!("{JOBS}?foo=1"),
            json_type,
            rfc_example().to_string().into(),
            400,
            "invalid_parameter",
        ),
        (
            post.clone(),
            format!("{JOBS}/nope/cancel?consistency=stale"),
            &[],
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            get,
            "/api/v1/objects?key=x".into(),
            &[],
            vec![],
            404,
            "object_not_found",
        ),
    ];
    for (method, path, headers, body, status, code) in cases {
        let answer = cluster.send(0, method.clone(), &path, headers, body).await?;
        let what = format!("{method} {path}: {}", answer.text);
        assert_eq!(
            (answer.status, answer.body["code"].as_str()),
            (status, Some(code)),
            "{what}"
        );
        assert_eq!(answer.header("content-type"), Some(PROBLEM_JSON), "{what}");
        assert_eq!(answer.body["status"], status, "{what}");
        for name in [HEADER_SERVED_BY, HEADER_TERM, HEADER_APPLIED_INDEX] {
            assert!(answer.header(name).is_some(), "{name} is missing: {what}");
        }
        match status {
            405 => assert!(
                answer.header("allow").is_some_and(|a| a.contains("GET")),
                "{what}"
            ),
            413 => assert!(
                answer.body["detail"].as_str().unwrap().contains("67108864"),
                "{what}"
            ),
            _ => {}
        }
    }
    let invalid = cluster
        .send(0, Method::POST, JOBS, json_type, r#"{"target_nodes": [1]}"#)
        .await?;
    let detail = invalid.body["detail"].as_str().unwrap();
    assert!(
        detail.contains("/target_nodes/0") && detail.contains("line 1 column"),
        "{detail}"
    );
    assert_eq!(
        invalid.pointers(),
        [("/target_nodes/0".to_owned(), "wrong_type".to_owned())],
        "{}",
        invalid.text
    );
    // However long what is wrong is: neither answer nor log grows with it.
    let long = "x".repeat(1 << 20);
    let invalid = cluster
        .send(
            0,
            Method::POST,
            JOBS,
            json_type,
            json!({ "manifest": long }).to_string(),
        )
        .await?;
    assert!(
        invalid.status == 400 && invalid.text.len() < 2000,
        "{}",
        invalid.text.len()
    );
    let path = format!("/{}", &long[..30_000]);
    let nothing = cluster.get(0, &path).await?;
    assert!(
        nothing.status == 404 && nothing.text.len() < 2000,
        "{}",
        nothing.text.len()
    );
    assert_eq!(errors::of_the_api(), Vec::<String>::new());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_fault_comes_at_once_with_its_pointer() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    let node = FakeNode::start(&cluster.masters[0].rpc, "127.0.0.1:25001", Manner::Works).await?;
    let mut body = rfc_example();
    body["manifest"]["files"][0]["path"] = "../model.bin".into();
    body["manifest"]["files"][0]["chunk_layout"]["chunk_count"] = 5.into();
    body["manifest"]["total_size_bytes"] = 7.into();
    body["seed_node_id"] = "127.0.0.1:25009".into();
    body["target_nodes"] = json!([node.id, "127.0.0.1:25008", "nonsense"]);
    let answer = cluster.post(0, JOBS, &body).await?;
    assert_eq!(
        (answer.status, &answer.body["code"]),
        (400, &json!("invalid_request")),
        "{}",
        answer.text
    );
    let found = answer.pointers();
    for (pointer, code) in [
        ("/manifest/files/0/path", "path_escapes"),
        (
            "/manifest/files/0/chunk_layout/chunk_count",
            "chunk_count_mismatch",
        ),
        ("/seed_node_id", "unknown_node"),
        ("/target_nodes/1", "unknown_node"),
        ("/target_nodes/2", "invalid_node_id"),
    ] {
        assert!(
            found.contains(&(pointer.into(), code.into())),
            "{pointer} {code} is not among {found:?}"
        );
    }
    assert!(
        found.iter().any(|(p, _)| p == "/manifest/total_size_bytes"),
        "{found:?}"
    );
    assert!(!found.iter().any(|(p, _)| p == "/target_nodes/0"), "{found:?}");

    // Only the cluster's state is against it.
    let mut body = rfc_example();
    body["target_nodes"] = json!([node.id]);
    body["replica_policy"] = json!({"target_replica_count": 1});
    body["seed_node_id"] = "127.0.0.1:25009".into();
    let answer = cluster.post(0, JOBS, &body).await?;
    assert_eq!(
        answer.pointers(),
        [("/seed_node_id".to_owned(), "unknown_node".to_owned())],
        "{}",
        answer.text
    );
    Ok(())
}

/// Faults of the request and nodes that are not known are counted together, once.
#[tokio::test(flavor = "multi_thread")]
async fn faults_that_are_not_listed_are_counted_once() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    let mut body = rfc_example();
    body["target_nodes"] = (0..120).map(|i| format!("nonsense {i}")).collect();
    let found = cluster.post(0, JOBS, &body).await?.body["errors"].clone();
    let found = found.as_array().unwrap();
    assert_eq!(found.len(), 101);
    assert!(
        found[..100].iter().all(|f| f["code"] == "invalid_node_id"),
        "{found:?}"
    );
    // 20 of the targets, and the seed, which nobody knows.
    assert_eq!(found[100]["code"], "too_many_faults");
    assert_eq!(found[100]["detail"], "21 more faults are not listed");
    Ok(())
}

/// Large uploads that are under way, or wait for room, stand in nobody's way but their own.
#[tokio::test(flavor = "multi_thread")]
async fn large_uploads_do_not_hold_up_small_requests() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    let _node = FakeNode::start(&cluster.masters[0].rpc, "127.0.0.1:25001", Manner::Works).await?;
    // Two fill the room, the third waits for it.
    let mut uploads = Vec::new();
    for _ in 0..3 {
        let mut stream = tokio::net::TcpStream::connect(&cluster.masters[0].http).await?;
        let head = format!(
            "POST {JOBS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n",
            64 << 20
        );
        stream.write_all(head.as_bytes()).await?;
        uploads.push(stream);
    }
    // Who has room is told to send its body.
    let mut invited: FuturesUnordered<_> = uploads
        .iter_mut()
        .map(|stream| async move {
            let mut line = [0; 12];
            stream.read_exact(&mut line).await.map(|_| line)
        })
        .collect();
    for _ in 0..2 {
        let line = tokio::time::timeout(PATIENCE, invited.next())
            .await?
            .expect("three of them")?;
        assert_eq!(&line, b"HTTP/1.1 100");
    }
    let mut body = rfc_example();
    body["target_nodes"] = json!(["127.0.0.1:25001"]);
    body["replica_policy"] = json!({"target_replica_count": 1});
    let (read, created) = tokio::join!(cluster.get(0, "/api/v1/nodes"), cluster.post(0, JOBS, &body));
    let created = created?;
    assert_eq!((read?.status, created.status), (200, 201), "{}", created.text);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn monitoring_gets_what_it_expects() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    assert_eq!(cluster.get(0, "/livez").await?.status, 200);
    assert_eq!(cluster.get(0, "/leaderz").await?.status, 200);
    assert_eq!(cluster.get(0, "/role").await?.body, json!({"role": "leader"}));
    assert_eq!(
        cluster.get(0, "/leader").await?.body["leader_address"],
        cluster.masters[0].http
    );
    let health = cluster.get(0, "/health").await?.body;
    assert_eq!(
        (&health["role"], &health["service_ready"]),
        (&json!("leader"), &json!(true))
    );
    let status = cluster.get(0, "/api/v1/cluster?digest=true").await?.body;
    assert_eq!(
        (&status["leader_id"], &status["served_by"]),
        (&json!(1), &json!(1))
    );
    assert_eq!(status["state_digest"].as_str().unwrap().len(), 64);
    assert_eq!(status["members"][0]["role"], "leader");
    let status = cluster.get(0, "/api/v1/cluster").await?;
    assert_eq!(
        status.header(HEADER_APPLIED_INDEX),
        Some(&*status.body["applied_index"].to_string())
    );
    let metrics = cluster.get(0, "/metrics").await?.text;
    for name in [
        "mooncake_build_info{",
        "master_is_leader 1",
        "mooncake_jobs{status=\"completed\"} 0",
        "master_http_requests_total{",
    ] {
        assert!(metrics.contains(name), "{name} is missing in {metrics}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn stale_reads_wait_for_their_index() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    let fresh = cluster.get(0, "/api/v1/nodes?consistency=stale").await?;
    assert_eq!(fresh.status, 200);
    let index: u64 = fresh.header(HEADER_APPLIED_INDEX).unwrap().parse()?;
    let reached = cluster
        .get(0, &format!("/api/v1/nodes?consistency=stale&min_index={index}"))
        .await?;
    assert_eq!(reached.status, 200);
    let beyond = cluster
        .get(
            0,
            &format!("/api/v1/nodes?consistency=stale&min_index={}", index + 1000),
        )
        .await?;
    assert_eq!(
        (beyond.status, &beyond.body["code"]),
        (503, &json!("not_caught_up"))
    );
    assert!(beyond.header("retry-after").is_some());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn requiring_checksums_is_for_new_jobs() -> Result<()> {
    let mut cluster = TestCluster::start(1).await?;
    let _node = FakeNode::start(&cluster.masters[0].rpc, "127.0.0.1:25001", Manner::Works).await?;
    let mut body = example("before", "m");
    body["target_nodes"] = json!(["127.0.0.1:25001"]);
    body["replica_policy"] = json!({"target_replica_count": 1});
    assert_eq!(cluster.post(0, JOBS, &body).await?.status, 201);
    let strict = mooncake_master::context::Options {
        require_checksums: true,
        ..super::cluster::options()
    };
    cluster.masters[0].serve_again(strict).await?;
    let repeat = cluster.post(0, JOBS, &body).await?;
    assert_eq!(
        (repeat.status, &repeat.body["job_id"]),
        (200, &json!("before")),
        "{}",
        repeat.text
    );
    // A new one is refused, with all that is against it.
    body["job_id"] = "after".into();
    body["seed_node_id"] = "127.0.0.1:25009".into();
    let refused = cluster.post(0, JOBS, &body).await?;
    assert_eq!(
        refused.pointers(),
        [
            (
                "/manifest/files/0/checksum".to_owned(),
                "checksum_required".to_owned()
            ),
            ("/seed_node_id".to_owned(), "unknown_node".to_owned())
        ],
        "{}",
        refused.text
    );
    assert_eq!(cluster.get(0, &format!("{JOBS}/after")).await?.status, 404);
    Ok(())
}

/// The largest manifest: a million chunks whose ids follow a pattern.
#[tokio::test(flavor = "multi_thread")]
async fn a_million_chunks_are_accepted_and_one_too_many_is_not() -> Result<()> {
    let cluster = TestCluster::start(1).await?;
    let _node = FakeNode::start(&cluster.masters[0].rpc, "127.0.0.1:25001", Manner::Works).await?;
    for (chunks, status) in [(1_000_000u64, 201), ((1 << 20) + 1, 400)] {
        let ids: Vec<String> = (0..chunks)
            .map(|i| format!("demo-model/r1/chunk-{i:07}"))
            .collect();
        let mut body = rfc_example();
        body["job_id"] = format!("large-{chunks}").into();
        body["manifest"]["total_size_bytes"] = (chunks * 1024).into();
        let file = &mut body["manifest"]["files"][0];
        file["size_bytes"] = (chunks * 1024).into();
        file["artifact"]["object_ids"] = ids.into();
        file["chunk_layout"] =
            json!({"chunk_size_bytes": 1024, "chunk_count": chunks, "object_prefix": "demo-model/r1"});
        body["target_nodes"] = json!(["127.0.0.1:25001"]);
        body["replica_policy"] = json!({"target_replica_count": 1});
        let answer = cluster.post(0, JOBS, &body).await?;
        assert_eq!(answer.status, status, "{}", answer.text);
        if status == 400 {
            assert!(
                answer.text.contains("1048576"),
                "the limit is named: {}",
                answer.text
            );
        }
    }
    // While a look-up decodes that manifest, a job brings the object: an answer that claims to have seen the index
    // of the job has seen the object too.
    let key = "late/chunk-0";
    let mut body = example("late", "late");
    body["target_nodes"] = json!(["127.0.0.1:25001"]);
    body["replica_policy"] = json!({"target_replica_count": 1});
    let file = &mut body["manifest"]["files"][0];
    file["artifact"]["object_ids"] = json!([0, 1, 2, 3].map(|i| format!("late/chunk-{i}")));
    file["chunk_layout"]["object_prefix"] = "late".into();
    let path = format!("/api/v1/objects?key={key}");
    let (missed_once, first_miss) = tokio::sync::oneshot::channel();
    let mut missed_once = Some(missed_once);
    let looks = async {
        let mut missed = Vec::new();
        loop {
            let look = cluster.get(0, &path).await?;
            let index: u64 = look.header(HEADER_APPLIED_INDEX).unwrap().parse()?;
            match look.status {
                404 => {
                    missed.push(index);
                    missed_once.take().map(|tell| tell.send(()));
                }
                _ => return anyhow::Ok((look, missed)),
            }
        }
    };
    let looks = async { tokio::time::timeout(PATIENCE, looks).await? };
    let post = async {
        first_miss.await.context("the first look-up finds nothing")?;
        cluster.post(0, JOBS, &body).await
    };
    let (looked, job) = tokio::join!(looks, post);
    let ((found, missed), job) = (looked?, job?);
    assert_eq!(
        (found.status, job.status),
        (200, 201),
        "{} {}",
        found.text,
        job.text
    );
    let created = job.body["version"].as_u64().unwrap();
    assert!(
        missed.iter().all(|index| *index < created),
        "created at {created}, missed at {missed:?}"
    );
    Ok(())
}
