//! Three masters: every one answers everything, and one of them may go.

use super::{
    cluster::{JOBS, TestCluster, example, rfc_example},
    node::{FakeNode, Manner, Opened, open, register},
};
use anyhow::Result;
use futures_util::future::join_all;
use hyper::Method;
use mooncake_proto::api::{HEADER_APPLIED_INDEX, HEADER_FORWARDED_BY, HEADER_SERVED_BY};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const SEED: &str = "127.0.0.1:25001";
const FOLLOWER: &str = "127.0.0.1:25002";

#[tokio::test(flavor = "multi_thread")]
async fn twenty_at_once_through_all_masters_make_one_job() -> Result<()> {
    let cluster = TestCluster::start(3).await?;
    let leader = cluster.leader().await?;
    let rpc = cluster.masters[leader].rpc.clone();
    let seed = FakeNode::start(&rpc, SEED, Manner::Works).await?;
    let _follower = FakeNode::start(&rpc, FOLLOWER, Manner::Works).await?;
    let body = rfc_example();
    let answers = join_all((0..20).map(|i| cluster.post(i % 3, JOBS, &body))).await;
    let answers: Vec<_> = answers.into_iter().collect::<Result<_>>()?;
    let created = answers.iter().filter(|a| a.status == 201).count();
    let repeated = answers.iter().filter(|a| a.status == 200).count();
    assert_eq!((created, repeated), (1, 19), "{answers:?}");
    let id = body["job_id"].as_str().unwrap();
    for master in 0..3 {
        let done = cluster.job_status(master, id, "completed").await?;
        // The leader's answer, headers included.
        assert_eq!(done.header(HEADER_SERVED_BY), Some(&*(leader + 1).to_string()));
        assert_eq!(
            cluster.get(master, JOBS).await?.body["jobs"]
                .as_array()
                .unwrap()
                .len(),
            1
        );
        // A stale read is this master's own.
        let index = done.header(HEADER_APPLIED_INDEX).unwrap();
        let path = format!("{JOBS}/{id}?consistency=stale&min_index={index}");
        let stale = cluster.get(master, &path).await?;
        assert_eq!(stale.header(HEADER_SERVED_BY), Some(&*(master + 1).to_string()));
        assert_eq!(stale.body["status"], "completed", "{}", stale.text);
    }
    let downloads = seed
        .log
        .borrow()
        .iter()
        .filter(|l| l.starts_with("acquire"))
        .count();
    assert_eq!(downloads, 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_passed_on_once() -> Result<()> {
    let cluster = TestCluster::start(3).await?;
    let follower = cluster.a_follower().await?;
    let headers = [(HEADER_FORWARDED_BY, "9")];
    let refused = cluster
        .send(follower, Method::GET, "/api/v1/nodes", &headers, "")
        .await?;
    assert_eq!(
        (refused.status, &refused.body["code"]),
        (503, &json!("no_leader")),
        "{}",
        refused.text
    );
    assert!(refused.header("retry-after").is_some());
    assert_eq!(
        refused.header(HEADER_SERVED_BY),
        Some(&*(follower + 1).to_string())
    );
    // Faults and problems come through as they are.
    let faulty = cluster.post(follower, JOBS, &rfc_example()).await?;
    assert_eq!(
        (faulty.status, faulty.pointers().len()),
        (400, 3),
        "{}",
        faulty.text
    );
    let leader = cluster.leader().await?;
    let other = cluster.get(follower, "/leaderz").await?;
    assert_eq!(
        (other.status, &other.body["code"]),
        (503, &json!("not_leader")),
        "{}",
        other.text
    );
    assert!(
        other.text.contains(&cluster.masters[leader].http),
        "{}",
        other.text
    );
    assert_eq!(
        cluster.get(follower, "/role").await?.body,
        json!({"role": "standby"})
    );
    let huge = vec![b' '; (64 << 20) + 1];
    let json_type = [("content-type", "application/json")];
    assert_eq!(
        cluster
            .send(follower, Method::POST, JOBS, &json_type, huge)
            .await?
            .status,
        413
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_sends_nodes_to_the_leader() -> Result<()> {
    let cluster = TestCluster::start(3).await?;
    let leader = cluster.leader().await?;
    let follower = cluster.a_follower().await?;
    let (opened, _stream) = open(&cluster.masters[follower].rpc, SEED, register(SEED, "s")).await?;
    let Opened::Redirect(address) = opened else {
        panic!("{opened:?}")
    };
    assert_eq!(address, cluster.masters[leader].rpc);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leader_goes_and_nothing_is_forgotten() -> Result<()> {
    let mut cluster = TestCluster::start(3).await?;
    let old = cluster.leader().await?;
    let (a, b) = ((old + 1) % 3, (old + 2) % 3);
    let seed = FakeNode::start(&cluster.masters[old].rpc, SEED, Manner::Dawdles).await?;
    let mut body = example("survives", "m");
    body["target_nodes"] = json!([SEED]);
    body["replica_policy"] = json!({"target_replica_count": 1});
    assert_eq!(cluster.post(a, JOBS, &body).await?.status, 201);
    let seeding = cluster.job_status(a, "survives", "seeding").await?;
    seed.got("acquire").await?;
    let version = seeding.body["version"].as_u64().unwrap();
    cluster.masters[old].kill().await;
    // Held through the election, answered by the next leader; so is the repeat of the create.
    let repeated = cluster.post(a, JOBS, &body).await?;
    assert_eq!(
        (repeated.status, &repeated.body["status"]),
        (200, &json!("seeding")),
        "{}",
        repeated.text
    );
    let read = cluster.get(b, &format!("{JOBS}/survives")).await?;
    assert!(read.body["version"].as_u64().unwrap() >= version, "{}", read.text);
    // The node finds the next leader, gets its order again and ends the job.
    let new = cluster.leader().await?;
    assert_ne!(new, old);
    drop(seed);
    let seed = FakeNode::start(&cluster.masters[new].rpc, SEED, Manner::Works).await?;
    seed.got("acquire m 1048576").await?;
    let other = if new == a { b } else { a };
    let path = format!("{JOBS}/survives?wait=50s&since={version}");
    let polled = cluster
        .until(other, &path, |a| a.body["status"] == "completed")
        .await?;
    assert_eq!(polled.header(HEADER_SERVED_BY), Some(&*(new + 1).to_string()));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_majority_the_caller_is_told_that_nothing_was_done() -> Result<()> {
    let options = mooncake_master::context::Options {
        hold: std::time::Duration::from_millis(500),
        ..super::cluster::options()
    };
    let mut cluster = TestCluster::start_with(3, options).await?;
    let leader = cluster.leader().await?;
    let left = (leader + 1) % 3;
    cluster.masters[leader].kill().await;
    cluster.masters[(leader + 2) % 3].kill().await;
    let answer = cluster.get(left, "/api/v1/nodes").await?;
    assert_eq!(
        (answer.status, &answer.body["code"]),
        (503, &json!("no_leader")),
        "{}",
        answer.text
    );
    assert!(answer.header("retry-after").is_some());
    assert_eq!(
        cluster.get(left, "/api/v1/nodes?consistency=stale").await?.status,
        200
    );
    assert_eq!(cluster.get(left, "/livez").await?.status, 200);
    cluster.until(left, "/readyz", |a| a.status == 503).await?;
    Ok(())
}

/// Takes one request, answers `answer` (nothing: the connection just ends), and gives the request's head.
async fn serve_once(listener: &tokio::net::TcpListener, answer: &str) -> Result<String> {
    let (mut stream, _) = listener.accept().await?;
    let mut request = Vec::new();
    let head = loop {
        anyhow::ensure!(stream.read_buf(&mut request).await? > 0, "a request was to come");
        if let Some(end) = request.windows(4).position(|w| w == b"\r\n\r\n") {
            break end + 4;
        }
    };
    let text = String::from_utf8_lossy(&request[..head]).to_lowercase();
    let length = text.lines().find_map(|l| l.strip_prefix("content-length: "));
    let length: usize = length.map_or(Ok(0), str::parse)?;
    while request.len() < head + length {
        anyhow::ensure!(stream.read_buf(&mut request).await? > 0, "the body was to come");
    }
    stream.write_all(answer.as_bytes()).await?;
    Ok(text)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_write_is_not_hidden_by_what_its_repeat_is_answered() -> Result<()> {
    let mut cluster = TestCluster::start(3).await?;
    let leader = cluster.leader().await?;
    let follower = (leader + 1) % 3;
    // It leads on, but something else is where it answers: loses the first request, has no room for the second.
    cluster.masters[leader].stop_serving().await;
    let listener = tokio::net::TcpListener::bind(&cluster.masters[leader].http).await?;
    let overloaded = "HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    for (path, body) in [
        (JOBS.to_owned(), example("lost", "m")),
        (format!("{JOBS}/lost/cancel"), json!(null)),
    ] {
        let fake = async {
            serve_once(&listener, "").await?;
            serve_once(&listener, overloaded).await
        };
        let (answer, served) = tokio::join!(cluster.post(follower, &path, &body), fake);
        let answer = answer?;
        assert_eq!(
            (answer.status, &answer.body["code"], &answer.body["job_id"]),
            (504, &json!("outcome_unknown"), &json!("lost")),
            "{}",
            answer.text
        );
        served?;
    }
    // Nothing was sent before: nothing is hidden.
    let body = example("lost", "m");
    let (answer, served) = tokio::join!(
        cluster.post(follower, JOBS, &body),
        serve_once(&listener, overloaded)
    );
    assert_eq!(answer?.status, 429);
    served?;
    Ok(())
}

/// What changes while a long poll looks for the next leader is not missed: it goes on from what there was when it came.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_poll_that_is_sent_again_goes_on_from_where_it_began() -> Result<()> {
    let mut cluster = TestCluster::start(3).await?;
    let leader = cluster.leader().await?;
    let follower = (leader + 1) % 3;
    let seed = FakeNode::start(&cluster.masters[leader].rpc, SEED, Manner::Dawdles).await?;
    let mut body = example("polled", "m");
    body["target_nodes"] = json!([SEED]);
    body["replica_policy"] = json!({"target_replica_count": 1});
    assert_eq!(cluster.post(follower, JOBS, &body).await?.status, 201);
    seed.got("acquire").await?;
    let version = cluster.job_status(follower, "polled", "seeding").await?.body["version"].clone();
    let stale = format!("{JOBS}/polled?consistency=stale");
    cluster
        .until(follower, &stale, |a| a.body["version"] == version)
        .await?;
    // It leads on, but something else is where it answers: a leader that steps down, or dies, then the next one.
    cluster.masters[leader].stop_serving().await;
    let listener = tokio::net::TcpListener::bind(&cluster.masters[leader].http).await?;
    let stepped_down = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    let changed = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}";
    for first in [stepped_down, ""] {
        for path in [
            format!("{JOBS}/polled?wait=50s"),
            format!("{JOBS}?job_id=polled&wait=50s"),
        ] {
            let fake = async {
                let one = serve_once(&listener, first).await?;
                Ok::<_, anyhow::Error>((one, serve_once(&listener, changed).await?))
            };
            let (answer, heads) = tokio::join!(cluster.get(follower, &path), fake);
            assert_eq!(answer?.status, 200);
            let (one, two) = heads?;
            assert!(!one.contains("since="), "{one}");
            assert!(two.contains(&format!("since={version} ")), "{two}");
        }
    }
    Ok(())
}
