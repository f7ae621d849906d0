//! A node against a master that the test plays.

mod common;

use common::*;
use mooncake_client::{config::Args, node::Node, session::Status};
use mooncake_proto::pb::session::{self as pb, node_frame::Body as NodeBody, order::Body as OrderBody};
use std::path::Path;

async fn node_with(root: &Path, masters: &str, more: &[&str]) -> Node {
    let root = root.to_str().unwrap().to_owned();
    let mut line = vec![
        "mooncake_client",
        "--data-address",
        "127.0.0.1:0",
        "--http-address",
        "127.0.0.1:0",
    ];
    line.extend(["--cluster-id", CLUSTER, "--masters", masters, "--root", &root]);
    line.extend(more);
    let settings = Args::read(line).unwrap().check().unwrap();
    Node::start(settings).await.unwrap()
}

fn peer(register: &pb::Register, seed: bool) -> pb::Peer {
    pb::Peer {
        node_id: register.node_id.clone(),
        data_address: register.data_address.clone(),
        transports: register.transports.clone(),
        labels: register.labels.clone(),
        seed,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquire_then_replicate_to_a_second_node() {
    let folder = tempfile::tempdir().unwrap();
    let mut master = FakeMaster::start().await;
    let sources = folder.path().join("src");
    let version = version("two", &sources, &[700_000, 53, 0, 300_000]);
    let seed = node_with(
        &folder.path().join("n1"),
        &master.address,
        &["--allow-source", sources.to_str().unwrap(), "--label", "rack=r1"],
    )
    .await;
    let mut one = master.session().await;
    assert_eq!(one.register.node_id, seed.node_id());
    assert_eq!(one.register.labels["rack"], "r1");
    assert_eq!(one.register.transports, ["tcp"]);
    assert!(one.register.capacity_bytes >= one.register.free_bytes && one.register.free_bytes > 0);
    assert!(one.inventory().await.is_empty());
    let follower = node_with(&folder.path().join("n2"), &master.address, &[]).await;
    let mut two = master.session().await;

    one.acquire(&version, 1).await;
    // Before there is a seal: the copy follows the acquisition.
    two.replicate(&version, 1, vec![peer(&one.register, true)], None)
        .await;
    let acquired = one.outcome(pb::TaskOutcome::Acquired).await;
    assert_eq!(acquired.seal, Some(version.seal()));
    assert!(acquired.checksum_verified);
    assert_eq!(acquired.verified_bytes, version.manifest.total_size_bytes);
    two.report(|r| r.verified_bytes == version.manifest.total_size_bytes)
        .await;
    assert!(
        two.reports
            .iter()
            .all(|r| r.outcome() == pb::TaskOutcome::Running),
        "not staged before the seal"
    );

    for session in [&one, &two] {
        session.sealed(&version, 1, version.seal()).await;
    }
    for session in [&mut one, &mut two] {
        let staged = session.outcome(pb::TaskOutcome::Staged).await;
        assert_eq!(staged.verified_bytes, version.manifest.total_size_bytes);
        assert_eq!(staged.objects_done, version.manifest.object_count());
        assert_eq!(staged.refetched_bytes, 0);
        version.check(&staged.local_path);
        let holding = session.holding(|h| h.state() == pb::HoldingState::Staged).await;
        assert_eq!(
            (holding.seal, holding.local_path),
            (Some(version.seal()), staged.local_path)
        );
    }
    http_shows_it(&follower, &version).await;

    // A planned stop is announced, and the stream ends.
    seed.shutdown().await;
    loop {
        match one.frame().await.expect("a goodbye comes first") {
            NodeBody::Goodbye(_) => break,
            _ => continue,
        }
    }
    assert_eq!(one.frame().await, None);
    follower.shutdown().await;
}

async fn http_shows_it(node: &Node, version: &Version) {
    let http = node.http_address();
    assert_eq!(get(http, "/livez").await.0, 200);
    assert_eq!(get(http, "/readyz").await.0, 200);
    let (status, body) = get(http, "/api/v1/holdings").await;
    let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!((status, &body["holdings"][0]["state"]), (200, &"staged".into()));
    assert_eq!(body["session"]["state"], "registered");

    let (_, bytes) = &version.files[0];
    let query = |key: &str| {
        format!("/api/v1/object?model_id=org/two&revision=r1&format=bin&provider=local&key={key}")
    };
    for n in 0..7 {
        let (status, object) = get(http, &query(&format!("two/0/chunk-00{n}"))).await;
        assert_eq!(status, 200);
        assert!(
            object == bytes[n * 100_000..bytes.len().min((n + 1) * 100_000)],
            "object {n} differs"
        );
    }
    for (path, status, code) in [
        (query("two/0/chunk-007"), 404, "object_not_found"),
        (query("x").replace("r1", "r2"), 404, "model_not_found"),
        ("/api/v1/object?model_id=x".into(), 400, "invalid_parameter"),
        ("/nothing".into(), 404, "not_found"),
    ] {
        let (got, body) = get(http, &path).await;
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!((got, &body["code"]), (status, &code.into()), "{path}");
    }
    let (status, text) = get(http, "/metrics").await;
    let text = String::from_utf8(text).unwrap();
    assert_eq!(status, 200);
    for line in [
        "mooncake_client_build_info{version=",
        "mooncake_client_session_registered 1",
        "mooncake_client_artifacts{state=\"staged\"} 1",
        "mooncake_client_tasks_total{kind=\"replicate\",outcome=\"staged\"} 1",
        &format!(
            "mooncake_client_verified_bytes {}",
            version.manifest.total_size_bytes
        ),
    ] {
        assert!(text.contains(line), "{line} is missing in:\n{text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outcomes_wait_for_the_masters_and_orders_are_not_restarted() {
    let folder = tempfile::tempdir().unwrap();
    let mut master = FakeMaster::start().await;
    let address = master.address.parse().unwrap();
    let sources = folder.path().join("src");
    let version = version("re", &sources, &[900_000]);
    let node = node_with(
        &folder.path().join("n1"),
        &master.address,
        &["--allow-source", sources.to_str().unwrap()],
    )
    .await;
    let session = master.session().await;
    session.acquire(&version, 1).await;
    // All masters die with the order under way.
    let mut changed = node.store().changed();
    while node.store().find(&version.manifest.model).is_none() {
        within("the task's start", changed.changed()).await.unwrap();
    }
    drop(session);
    drop(master);
    let artifact = node.store().find(&version.manifest.model).unwrap();
    let mut progress = artifact.progress();
    while artifact.have_count() < artifact.blocks().len() {
        within("the end of the acquisition", progress.changed())
            .await
            .unwrap();
    }

    let mut master = FakeMaster::start_on(address, hello(CLUSTER, None), QUICK_HEARTBEAT).await;
    let mut session = master.session().await;
    let acquired = session.outcome(pb::TaskOutcome::Acquired).await;
    assert_eq!(acquired.fetched_bytes, 900_000);
    // The next leader sends its orders again: nothing starts anew, nothing is fetched again.
    session.acquire(&version, 1).await;
    session.sealed(&version, 1, version.seal()).await;
    let staged = session.outcome(pb::TaskOutcome::Staged).await;
    assert_eq!(staged.fetched_bytes, 900_000);
    version.check(&staged.local_path);

    // A silent master is left; the outcome is said again to the next.
    session.fall_silent();
    let mut session = master.session().await;
    let inventory = session.inventory().await;
    assert_eq!(inventory.len(), 1);
    assert_eq!(inventory[0].state(), pb::HoldingState::Staged);
    session.outcome(pb::TaskOutcome::Staged).await;
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stale_fences_revoke_and_delete() {
    let folder = tempfile::tempdir().unwrap();
    let mut master = FakeMaster::start().await;
    let version = version("fence", &folder.path().join("src"), &[900_000]);
    let node = node_with(&folder.path().join("n1"), &master.address, &[]).await;
    let mut session = master.session().await;
    // Nobody has anything: the task waits.
    session.replicate(&version, 5, Vec::new(), None).await;
    session.holding(|h| h.state() == pb::HoldingState::Partial).await;
    let running = session
        .reports
        .last()
        .expect("a start is reported before the inventory is looked through");
    assert_eq!(
        (running.fence.unwrap().attempt, running.kind()),
        (5, pb::TaskKind::Replicate)
    );
    assert_eq!(running.outcome(), pb::TaskOutcome::Running);
    session.replicate(&version, 4, Vec::new(), None).await;
    let refused = session.outcome(pb::TaskOutcome::Failed).await;
    assert_eq!(
        (
            refused.fence.unwrap().attempt,
            refused.failure.unwrap().code.as_str()
        ),
        (4, "stale_fence")
    );
    session
        .order(
            &version.manifest.model,
            5,
            OrderBody::Revoke(pb::Revoke {
                reason: "canceled".into(),
            }),
        )
        .await;
    session
        .order(
            &version.manifest.model,
            5,
            OrderBody::Delete(pb::Delete {
                reason: "gone".into(),
            }),
        )
        .await;
    session.holding(|h| h.state() == pb::HoldingState::Absent).await;
    // Nothing outside is readable without the flag, and the failure says so.
    session.acquire(&version, 6).await;
    let failure = session.outcome(pb::TaskOutcome::Failed).await.failure.unwrap();
    assert!(failure.message.contains("--allow-source"), "{}", failure.message);
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redirects_are_followed_and_dead_and_silent_masters_are_passed() {
    let folder = tempfile::tempdir().unwrap();
    let mut leader = FakeMaster::start().await;
    let (follower, frozen) = (FakeMaster::start().await, FakeMaster::start().await);
    follower.answer(Answer::Redirect(leader.address.clone()));
    frozen.answer(Answer::Silence);
    // The leader is not in the list; one address is dead.
    let masters = format!("127.0.0.1:1,{},{}", frozen.address, follower.address);
    let node = node_with(&folder.path().join("n1"), &masters, &[]).await;
    let session = leader.session().await;
    assert_eq!(session.register.node_id, node.node_id());
    // The leader steps down; another one takes over.
    let mut next = FakeMaster::start().await;
    follower.answer(Answer::Redirect(next.address.clone()));
    leader.answer(Answer::Redirect(String::new()));
    session
        .send(pb::master_frame::Body::Redirect(pb::Redirect {
            leader_address: String::new(),
        }))
        .await;
    next.session().await;
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_are_shown_and_end_when_their_cause_does() {
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    std::fs::write(&secret, SECRET).unwrap();
    let secret = secret.to_str().unwrap();
    for (master_hello, args, code) in [
        (hello("another-cluster", None), &[][..], "wrong_cluster"),
        (
            hello(CLUSTER, Some("fedcba9876543210fedcba9876543210")),
            &["--cluster-secret-file", secret][..],
            "wrong_secret",
        ),
        (hello(CLUSTER, Some(SECRET)), &[][..], "secret_required"),
    ] {
        let mut master = FakeMaster::start_on(own_address(), master_hello, HEARTBEAT).await;
        let node = node_with(&folder.path().join(code), &master.address, args).await;
        let mut status = node.status().unwrap();
        let refused = within(
            "the refusal",
            status.wait_for(|s| matches!(s, Status::Refused { .. })),
        )
        .await
        .unwrap()
        .clone();
        assert!(
            matches!(&refused, Status::Refused { code: c, .. } if c == code),
            "{refused:?}"
        );
        assert!(master_is_alone(&mut master));
        assert_eq!(get(node.http_address(), "/readyz").await.0, 503);
        node.shutdown().await;
    }
    // Taken ids, until the other one is gone; and the right secret.
    let mut master = FakeMaster::start_on(own_address(), hello(CLUSTER, Some(SECRET)), HEARTBEAT).await;
    master.answer(Answer::Refuse("node_id_taken", "another store has this node id"));
    let node = node_with(
        &folder.path().join("taken"),
        &master.address,
        &["--cluster-secret-file", secret],
    )
    .await;
    let mut status = node.status().unwrap();
    within(
        "the refusal",
        status.wait_for(|s| matches!(s, Status::Refused { .. })),
    )
    .await
    .unwrap();
    master.answer(Answer::Welcome);
    master.session().await;
    node.shutdown().await;
}

fn master_is_alone(master: &mut FakeMaster) -> bool {
    master.try_session().is_none()
}

/// Everything that the node does besides stands still: its only worker blocks, as it would behind a disk that
/// hangs. The session stays, and its heartbeats go on.
#[test]
fn heartbeats_need_nothing_of_the_node() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = |workers| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(workers)
            .enable_all()
            .build()
            .unwrap()
    };
    let (masters, nodes) = (runtime(2), runtime(1));
    let mut master = masters.block_on(FakeMaster::start_on(
        own_address(),
        hello(CLUSTER, None),
        QUICK_HEARTBEAT,
    ));
    let node = nodes.block_on(nodes.spawn({
        let (root, address) = (folder.path().join("n"), master.address.clone());
        async move { node_with(&root, &address, &[]).await }
    }));
    let node = node.unwrap();
    masters.block_on(async {
        let mut session = master.session().await;
        session.inventory().await;
        let (blocked_tx, blocked) = tokio::sync::oneshot::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        nodes.spawn(async move {
            let _ = blocked_tx.send(());
            let _ = released.recv();
        });
        blocked.await.unwrap();
        let mut last = 0;
        // For longer than the silence after which either end takes the other for dead.
        for _ in 0..5 {
            match session.frame().await.expect("the session goes on") {
                NodeBody::Heartbeat(beat) => {
                    assert!(beat.sequence > last);
                    last = beat.sequence;
                }
                other => panic!("the node is blocked, but sends {other:?}"),
            }
        }
        assert!(master.try_session().is_none(), "it did not register anew");
        drop(release);
    });
    nodes.block_on(node.shutdown());
}
