//! The commands about the masters themselves.

use crate::{at, ctl, exits, fake::*, folder, stdout};
use axum::response::{IntoResponse, Response};
use mooncake_proto::{
    api::{ClusterStatus, MemberView, MembershipAnswer, ProblemCode},
    backup::{self, BackupInfo},
};
use std::os::unix::fs::PermissionsExt;
use tokio::io::AsyncWriteExt;

fn status(leader: u64, ids: &[u64]) -> ClusterStatus {
    let member = |id: &u64| MemberView {
        id: *id,
        rpc_address: format!("m{id}:50051"),
        http_address: format!("m{id}:9003"),
        disk_id: format!("d{id}"),
        role: if *id == leader { "leader" } else { "follower" }.into(),
        lag: Some(0),
        silent_ms: (*id != leader).then_some(7_000),
    };
    ClusterStatus {
        cluster_id: "c".into(),
        served_by: leader,
        term: 3,
        leader_id: Some(leader),
        applied_index: 40,
        last_log_index: 40,
        last_log_term: 3,
        cluster_version: 1,
        recovery_epoch: 0,
        members: ids.iter().map(member).collect(),
        state_digest: None,
    }
}

fn changed(id: u64, detail: &str) -> Response {
    ok(MembershipAnswer {
        changed: true,
        id,
        detail: detail.into(),
        cluster: status(1, &[1, 2]),
    })
}

#[tokio::test]
async fn a_lost_master_is_replaced_step_by_step_and_waited_for() {
    let fake = Fake::start(|r| match r.line().as_str() {
        "GET /api/v1/cluster/members" => ok(status(1, &[1, 2, 3])),
        "POST /api/v1/cluster/add" => changed(4, "master 4 was added"),
        // Behind at first.
        "POST /api/v1/cluster/promote" if r.number == 2 => {
            problem(ProblemCode::MemberBehind, "master 4 is 5000 log entries behind")
        }
        "POST /api/v1/cluster/promote" => changed(4, "master 4 votes from now on"),
        "POST /api/v1/cluster/remove" => changed(2, "master 2 is no member any more"),
        other => problem(ProblemCode::NotFound, other),
    })
    .await;
    let output = ctl(&[&fake.url], &["cluster", "replace", "2", "m4:50051"]).await;
    exits(
        &output,
        0,
        &[
            "master 4 was added",
            "5000 log entries behind",
            "votes from now on",
        ],
    );
    assert!(stdout(&output).contains("master 2 is no member any more"));
    assert!(
        stdout(&output).contains("7 s"),
        "a silent master stands out: {}",
        stdout(&output)
    );
    let log = fake.log.lock().unwrap().clone();
    assert_eq!(log.len(), 5);
    assert_eq!(log[1].body["rpc_address"], "m4:50051");
    assert_eq!((&log[3].body["id"], &log[4].body["id"]), (&4.into(), &2.into()));
}

#[tokio::test]
async fn a_mistyped_id_replaces_nobody() {
    let fake = Fake::start(|_| ok(status(1, &[1, 2, 3]))).await;
    let output = ctl(&[&fake.url], &["cluster", "replace", "7", "m4:50051"]).await;
    exits(&output, 2, &["master 7 is no member", "nothing was changed"]);
    assert_eq!(fake.lines(), ["GET /api/v1/cluster/members"]);
}

#[tokio::test]
async fn leadership_is_taken_from_who_has_it() {
    let fake = Fake::start(|r| match r.line().as_str() {
        "GET /api/v1/cluster/members" => ok(status(1, &[1, 2, 3])),
        "POST /api/v1/cluster/transfer" => changed(2, "leadership moved"),
        other => problem(ProblemCode::NotFound, other),
    })
    .await;
    exits(&ctl(&[&fake.url], &["cluster", "transfer"]).await, 0, &[]);
    exits(&ctl(&[&fake.url], &["cluster", "transfer", "3"]).await, 0, &[]);
    let log = fake.log.lock().unwrap().clone();
    assert_eq!(
        log[1].body,
        serde_json::json!({ "from": 1 }),
        "so that a repeat moves nothing"
    );
    assert_eq!(log[2].body, serde_json::json!({ "to": 3 }));
}

#[tokio::test]
async fn a_refusal_is_shown_as_it_is() {
    let fake = Fake::start(|_| problem(ProblemCode::QuorumAtRisk, "writes would stop")).await;
    let output = ctl(&[&fake.url], &["cluster", "remove", "2"]).await;
    exits(&output, 2, &["Too few voters", "(409)", "writes would stop"]);
}

fn backup_file() -> Vec<u8> {
    let info = BackupInfo {
        cluster_id: "c".into(),
        taken_at: "2026-01-31T00:00:00.000Z".into(),
        taken_by: 1,
        software: "test".into(),
        term: 3,
        index: 40,
        cluster_version: 1,
        recovery_epoch: 0,
        members: vec!["1=m1:50051/m1:9003".into()],
        jobs: 17,
        live_jobs: 1,
        nodes: 2,
        models: 3,
    };
    let state = vec![9; 1000];
    let head = backup::head(&info, b"meta", 1000);
    let digest = backup::digest(&head, &state);
    [&head[..], &state, &digest].concat()
}

#[tokio::test]
async fn a_backup_gets_its_name_only_whole() {
    let dir = folder();
    let file = at(&dir, "backup.mcb");
    std::fs::write(&file, "the last one").unwrap();
    let before = std::fs::read_dir(dir.path()).unwrap().count();
    // Cut off, and altered: as a broken connection and a broken machine do it.
    for bad in [backup_file()[..900].to_vec(), {
        let mut bytes = backup_file();
        bytes[700] ^= 1;
        bytes
    }] {
        let fake = Fake::start(move |_| bad.clone().into_response()).await;
        let output = ctl(&[&fake.url], &["cluster", "snapshot", "save", &file]).await;
        exits(&output, 3, &["not whole"]);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "the last one");
        assert_eq!(
            std::fs::read_dir(dir.path()).unwrap().count(),
            before,
            "nothing is left over"
        );
    }
    let fake = Fake::start(|_| backup_file().into_response()).await;
    let output = ctl(&[&fake.url], &["cluster", "snapshot", "save", &file, "--stale"]).await;
    exits(&output, 0, &["wrote"]);
    let mode = std::fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "it holds the sources of live jobs");
    assert!(
        stdout(&output).contains("17 (1 not ended)"),
        "{}",
        stdout(&output)
    );
    assert_eq!(fake.log.lock().unwrap()[0].query["consistency"], "stale");
    let output = ctl(&[], &["cluster", "snapshot", "status", &file]).await;
    exits(&output, 0, &[]);
    assert!(stdout(&output).contains("index 40, term 3"));
    std::fs::write(&file, "something else").unwrap();
    exits(
        &ctl(&[], &["cluster", "snapshot", "status", &file]).await,
        2,
        &["no backup of Mooncake distribution"],
    );
}

#[tokio::test]
async fn a_backup_that_is_interrupted_leaves_nothing() {
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let dir = tempfile::tempdir().unwrap();
        let file = at(&dir, "backup.mcb");
        // The beginning of a backup, and then nothing more.
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n",
                backup_file().len()
            );
            stream.write_all(head.as_bytes()).await.unwrap();
            stream.write_all(&backup_file()[..100]).await.unwrap();
            std::future::pending::<()>().await;
        });
        let mut child = tokio::process::Command::new(env!("CARGO_BIN_EXE_mooncakectl"))
            .args(["--endpoint", &url, "cluster", "snapshot", "save", &file])
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let left = || std::fs::read_dir(dir.path()).unwrap().count();
        while left() == 0 {
            assert!(child.try_wait().unwrap().is_none(), "it waits for the rest");
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        let pid = child.id().unwrap().to_string();
        let sent = std::process::Command::new("kill")
            .args(["-s", signal, &pid])
            .status();
        assert!(sent.unwrap().success());
        assert_eq!(child.wait().await.unwrap().code(), Some(code));
        assert_eq!(left(), 0);
        server.abort();
    }
}
