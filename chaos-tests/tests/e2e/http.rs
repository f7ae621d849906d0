//! Wrong requests: problem documents with the right status, and nothing at error level in the log.

use anyhow::{Context, Result, bail};
use mooncake_chaos::{Cluster, ClusterOptions};
use reqwest::Method;
use serde_json::{Value, json};

const JOBS: &str = "/api/v1/model-distribution/jobs";

/// Method, path, content type, body, and the status and code that answer it.
type Mistake = (Method, String, &'static str, Vec<u8>, u16, &'static str);

#[tokio::test]
async fn a_callers_mistakes_are_answered_and_not_logged_as_errors() -> Result<()> {
    let cluster = Cluster::start(ClusterOptions {
        clients: 1,
        ..ClusterOptions::calm()
    })
    .await?;
    let example = include_str!("../../../proto/tests/data/rfc_example.json");
    let huge = vec![b' '; (64 << 20) + 1];
    let json_type = "application/json";
    let table: Vec<Mistake> = vec![
        (
            Method::POST,
            JOBS.into(),
            json_type,
            b"{".to_vec(),
            400,
            "invalid_json",
        ),
        (
            Method::POST,
            JOBS.into(),
            json_type,
            b"[]".to_vec(),
            400,
            "invalid_json",
        ),
        (
            Method::POST,
            JOBS.into(),
            json_type,
            b"{\"manifest\": {\"files\": 7}}".to_vec(),
            400,
            "invalid_json",
        ),
        (
            Method::POST,
            JOBS.into(),
            json_type,
            b"{}".to_vec(),
            400,
            "invalid_request",
        ),
        (
            Method::POST,
            JOBS.into(),
            json_type,
            example.into(),
            400,
            "invalid_request",
        ),
        (
            Method::POST,
            JOBS.into(),
            "text/plain",
            example.into(),
            415,
            "unsupported_media_type",
        ),
        (Method::POST, JOBS.into(), json_type, huge, 413, "body_too_large"),
        (
            Method::GET,
            format!("{JOBS}?job_id=nobody"),
            "",
            vec![],
            404,
            "job_not_found",
        ),
        (
            Method::GET,
            format!("{JOBS}/nobody"),
            "",
            vec![],
            404,
            "job_not_found",
        ),
        (
            Method::POST,
            format!("{JOBS}/nobody/cancel"),
            "",
            vec![],
            404,
            "job_not_found",
        ),
        (
            Method::GET,
            format!("{JOBS}?limit=x"),
            "",
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            Method::GET,
            format!("{JOBS}?status=sleeping"),
            "",
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            Method::GET,
            format!("{JOBS}?consistency=maybe"),
            "",
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            Method::GET,
            "/api/v1/objects".into(),
            "",
            vec![],
            400,
            "invalid_parameter",
        ),
        (
            Method::GET,
            "/api/v1/objects?key=no/such".into(),
            "",
            vec![],
            404,
            "object_not_found",
        ),
        (Method::GET, "/nowhere".into(), "", vec![], 404, "not_found"),
        (Method::DELETE, JOBS.into(), "", vec![], 405, "method_not_allowed"),
        (
            Method::POST,
            "/api/v1/nodes".into(),
            json_type,
            b"{}".to_vec(),
            405,
            "method_not_allowed",
        ),
    ];
    for master in 0..3 {
        for (method, path, content_type, body, status, code) in &table {
            let mut request = cluster
                .http
                .request(method.clone(), format!("{}{path}", cluster.endpoints[master]));
            if !content_type.is_empty() {
                request = request.header("content-type", *content_type).body(body.clone());
            }
            let answer = request
                .send()
                .await
                .with_context(|| format!("{method} {path}: no answer"))?;
            let what = format!("{method} {path} ({} bytes) at master {}", body.len(), master + 1);
            assert_eq!(answer.status().as_u16(), *status, "{what}");
            for header in [
                "x-mooncake-served-by",
                "x-mooncake-term",
                "x-mooncake-applied-index",
            ] {
                assert!(answer.headers().contains_key(header), "{what} lacks {header}");
            }
            assert_eq!(
                answer.headers()["content-type"],
                "application/problem+json",
                "{what}"
            );
            if *status == 405 {
                assert!(answer.headers().contains_key("allow"), "{what} lacks Allow");
            }
            let problem: Value = answer.json().await?;
            assert_eq!(problem["code"], *code, "{what}: {problem:#}");
            assert_eq!(problem["status"], *status, "{what}");
            assert!(
                problem["detail"].as_str().is_some_and(|d| d.len() > 10),
                "{what}: {problem:#}"
            );
        }
    }
    for master in &cluster.masters {
        let log = master.log();
        let errors: Vec<_> = log
            .lines()
            .filter(|l| l.contains("ERROR") || l.contains("\"level\":\"error\""))
            .collect();
        assert!(errors.is_empty(), "{}: {errors:#?}", master.name);
    }
    Ok(())
}

#[tokio::test]
async fn unknown_nodes_and_other_faults_come_together() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions {
        clients: 1,
        ..ClusterOptions::calm()
    })
    .await?;
    let mut body: Value = serde_json::from_str(include_str!("../../../proto/tests/data/rfc_example.json"))?;
    body["target_nodes"] = json!([cluster.nodes[0], "127.0.0.1:1", "127.0.0.1:1"]);
    body["manifest"]["files"][0]["path"] = json!("../up");
    let (status, problem) = cluster.post_job(&body).await?;
    assert_eq!(status, 400);
    let errors = problem["errors"].as_array().context("errors")?;
    for (pointer, code) in [
        ("/manifest/files/0/path", "path_escapes"),
        ("/seed_node_id", "unknown_node"),
        ("/target_nodes/1", "unknown_node"),
        ("/target_nodes/2", "duplicate_target"),
    ] {
        assert!(
            errors
                .iter()
                .any(|e| e["pointer"] == pointer && e["code"] == code),
            "{pointer} {code}: {problem:#}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn the_probes_answer_as_monitoring_expects() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions {
        clients: 0,
        ..ClusterOptions::calm()
    })
    .await?;
    // A pass during which the leader changed says nothing.
    for _ in 0..10 {
        let before = term(&cluster).await?;
        let leader = cluster.leader().await?;
        let wrong = wrong_probes(&cluster, leader).await?;
        if term(&cluster).await? == before {
            assert_eq!(wrong, Vec::<String>::new());
            return Ok(());
        }
    }
    bail!("the leader changed in each of ten passes")
}

/// The term in which the cluster answers.
async fn term(cluster: &Cluster) -> Result<String> {
    let answer = cluster
        .http
        .get(format!("{}/api/v1/nodes", cluster.endpoints[0]))
        .send()
        .await?;
    Ok(answer.headers()["x-mooncake-term"].to_str()?.to_owned())
}

/// What the probes of the masters answer otherwise than they should while this one leads.
async fn wrong_probes(cluster: &Cluster, leader: usize) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    for master in 0..3 {
        let leads = master == leader;
        for (path, status, says) in [
            ("/livez", 200, ""),
            ("/readyz", 200, ""),
            ("/health", 200, ""),
            ("/leaderz", if leads { 200 } else { 503 }, ""),
            ("/role", 200, if leads { "leader" } else { "standby" }),
            (
                "/leader",
                200,
                cluster.endpoints[leader].trim_start_matches("http://"),
            ),
            ("/metrics", 200, "master_"),
            ("/metrics", 200, "build_info"),
        ] {
            let url = format!("{}{path}", cluster.endpoints[master]);
            let answer = cluster.http.get(url).send().await?;
            let (got, text) = (answer.status(), answer.text().await?);
            if got != status || !text.contains(says) {
                wrong.push(format!("{path} of master {}: {got} {text}", master + 1));
            }
        }
    }
    Ok(wrong)
}

#[tokio::test]
async fn a_long_poll_returns_with_the_change() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let model = mooncake_chaos::Model::create(dir.path(), "poll", &[("a.bin", 1 << 20)])?;
    let allow = vec![dir.path().display().to_string()];
    let mut cluster = Cluster::start(ClusterOptions {
        allow_sources: allow.clone(),
        clients: 2,
        ..ClusterOptions::calm()
    })
    .await?;
    let nodes = cluster.nodes.clone();
    let body = model.request("poll", &allow[0], &nodes[0], &[&nodes[1]])?;
    let (_, mut snapshot) = cluster.post_job(&body).await?;
    let mut seen = vec![snapshot["status"].as_str().unwrap_or_default().to_owned()];
    for _ in 0..50 {
        if snapshot["status"] == "completed" {
            break;
        }
        let since = snapshot["version"].as_u64().context("version")?;
        let next = cluster
            .get(&format!("{JOBS}/poll?wait=60s&since={since}"))
            .await?;
        assert!(
            next["version"].as_u64() > Some(since),
            "a poll returns with a newer version: {next:#}"
        );
        seen.push(next["status"].as_str().unwrap_or_default().to_owned());
        snapshot = next;
    }
    assert_eq!(seen.last().map(String::as_str), Some("completed"), "{seen:?}");
    // The seed is not a target: its placement is reported all the same.
    assert_eq!(
        cluster.placement(&snapshot, 0)["requested"],
        false,
        "{snapshot:#}"
    );
    assert_eq!(cluster.placement(&snapshot, 1)["requested"], true, "{snapshot:#}");
    Ok(())
}
