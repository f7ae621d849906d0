//! The real binary: killed, restarted, stopped, misconfigured.

mod common;

use common::*;
use mooncake_chaos::{HttpSource, model::journaled_blocks};
use mooncake_proto::pb::session::{self as pb, node_frame::Body as NodeBody};
use std::{path::Path, process::Stdio, time::Duration};
use tokio::{
    io::AsyncReadExt,
    net::TcpListener,
    process::{Child, Command},
};

fn command(root: &Path, master: &str, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mooncake_client"));
    command
        .args([
            "--node-id",
            "127.0.0.1:25001",
            "--data-address",
            "127.0.0.1:0",
            "--http_address",
            "127.0.0.1:0",
        ])
        .args(["--cluster_id", CLUSTER, "--masters", master, "--root"])
        .arg(root)
        .args(["--log-level", "warn"])
        .args(more)
        .env_remove("RUST_LOG")
        .env_remove("HTTP_PROXY")
        .env_remove("http_proxy")
        .env_remove("ALL_PROXY")
        .env_remove("all_proxy")
        .env("NO_PROXY", "127.0.0.1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .kill_on_drop(true);
    command
}

fn start(root: &Path, master: &str, more: &[&str]) -> Child {
    command(root, master, more).spawn().unwrap()
}

async fn kill(mut child: Child) {
    child.start_kill().unwrap();
    child.wait().await.unwrap();
}

/// Waits until the node has recorded at least so many bytes of verified blocks: gives how many.
async fn recorded_bytes(root: &Path, least: u64) -> u64 {
    within("the journal has it", async {
        loop {
            let bytes = journaled_blocks(root).unwrap().len() as u64 * u64::from(BLOCK);
            if bytes >= least {
                return bytes;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_must_have_rdma_and_cannot_does_not_start() {
    let folder = tempfile::tempdir().unwrap();
    let more = ["--transport=rdma", "--rdma-device=no_such_device"];
    let mut command = command(&folder.path().join("models"), "127.0.0.1:1", &more);
    let ended = within("it says why and ends", command.stderr(Stdio::piped()).output())
        .await
        .unwrap();
    assert_eq!(ended.status.code(), Some(1));
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(
        said.contains("--transport rdma, but RDMA cannot be used here"),
        "{said}"
    );
    assert!(said.contains("--transport auto"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_and_restarted_it_goes_on_where_it_was() {
    const SIZE: usize = 24 << 20;
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("models");
    let sources = folder.path().join("src");
    let mut version = version("kill", &sources, &[SIZE]);
    let source = HttpSource::start(&sources).await.unwrap();
    version.sources.0[0] = format!("{}/kill/{}", source.url, version.files[0].0);
    // So that the kill comes in the middle.
    source.hold_at(SIZE as u64 / 2);
    let mut master = FakeMaster::start().await;
    let prefix = format!("{}/kill/", source.url);
    let args = ["--allow-source", prefix.as_str()];

    let client = start(&root, &master.address, &args);
    let session = master.session().await;
    let store_id = session.register.store_id.clone();
    session.acquire(&version, 3).await;
    let recorded = recorded_bytes(&root, SIZE as u64 / 4).await;
    kill(client).await;
    source.release();

    let client = start(&root, &master.address, &args);
    let mut session = master.session().await;
    assert_eq!(session.register.store_id, store_id);
    assert_eq!(
        session.register.highest_fence.unwrap().attempt,
        3,
        "what was obeyed is on the disk"
    );
    let inventory = session.inventory().await;
    assert_eq!(
        (inventory.len(), inventory[0].state()),
        (1, pb::HoldingState::Partial)
    );
    assert_eq!(inventory[0].fence.unwrap().attempt, 3);
    session.acquire(&version, 2).await;
    let refused = session.outcome(pb::TaskOutcome::Failed).await;
    assert_eq!(refused.failure.unwrap().code, "stale_fence");
    session.acquire(&version, 3).await;
    let acquired = session.outcome(pb::TaskOutcome::Acquired).await;
    assert_eq!(acquired.seal, Some(version.seal()));
    assert!(
        acquired.fetched_bytes <= SIZE as u64 - recorded,
        "{} of {SIZE} were fetched after the restart, {recorded} were recorded before it",
        acquired.fetched_bytes
    );
    kill(client).await;

    // Whole, but not sealed: it says so, and fetches nothing to say it again.
    let served_before = source.bytes_served();
    let client = start(&root, &master.address, &args);
    let mut session = master.session().await;
    session.acquire(&version, 4).await;
    let acquired = session.outcome(pb::TaskOutcome::Acquired).await;
    assert_eq!((acquired.fetched_bytes, acquired.seal), (0, Some(version.seal())));
    assert_eq!(source.bytes_served(), served_before);
    session.sealed(&version, 4, version.seal()).await;
    let staged = session.outcome(pb::TaskOutcome::Staged).await;
    version.check(&staged.local_path);
    kill(client).await;

    // Staged: known at once.
    let mut client = start(&root, &master.address, &args);
    let mut session = master.session().await;
    let inventory = session.inventory().await;
    assert_eq!(inventory[0].state(), pb::HoldingState::Staged);
    assert_eq!(
        (inventory[0].seal.clone(), &inventory[0].local_path),
        (Some(version.seal()), &staged.local_path)
    );

    // SIGTERM: the master is told, the exit is clean.
    let pid = client.id().expect("it runs").to_string();
    assert!(
        Command::new("kill")
            .args(["-TERM", &pid])
            .status()
            .await
            .unwrap()
            .success()
    );
    loop {
        match session.frame().await.expect("a goodbye comes before the end") {
            NodeBody::Goodbye(_) => break,
            _ => continue,
        }
    }
    assert!(within("the exit", client.wait()).await.unwrap().success());
}

#[tokio::test]
async fn faults_of_the_start_are_said_with_their_flag() {
    let folder = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let file = folder.path().join("a-file");
    std::fs::write(&file, "x").unwrap();
    let master = "127.0.0.1:1";
    let own = folder.path().join("own");
    let cases: [(&Path, &[&str], i32, &str); 5] = [
        (&own, &["--data-address", &taken][..], 1, "--data-address"),
        (&own, &["--http-address", &taken], 1, "--http-address"),
        (&file, &[], 1, "--root"),
        (
            &own,
            &["--data-address", "0.0.0.0:0", "--advertise-address", "h:1"],
            2,
            "--cluster-secret-file",
        ),
        (&own, &["--no-such-flag"], 2, "--no-such-flag"),
    ];
    for (root, more, code, says) in cases {
        let mut child = Command::new(env!("CARGO_BIN_EXE_mooncake_client"));
        child.args(["--masters", master, "--root"]).arg(root);
        if !more.contains(&"--data-address") {
            child.args(["--data-address", "127.0.0.1:0"]);
        }
        if !more.contains(&"--http-address") {
            child.args(["--http-address", "127.0.0.1:0"]);
        }
        let output = within("the exit", child.args(more).kill_on_drop(true).output())
            .await
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{more:?}: {stderr}");
        assert!(stderr.contains(says), "{more:?}: {stderr}");
    }
}

#[tokio::test]
async fn a_second_client_on_the_same_folder_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("models");
    let mut master = FakeMaster::start().await;
    let _first = start(&root, &master.address, &[]);
    master.session().await;
    let second = command(&root, &master.address, &["--log-format", "json"])
        .stderr(Stdio::piped())
        .output();
    let output = within("the exit", second).await.unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("in use by"), "{stderr}");
    let first_line: serde_json::Value = serde_json::from_str(stderr.lines().next().unwrap()).unwrap();
    assert_eq!(first_line["level"], "ERROR");
}

#[tokio::test]
async fn help_teaches() {
    let output = Command::new(env!("CARGO_BIN_EXE_mooncake_client"))
        .arg("--help")
        .output()
        .await
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    for word in [
        "Examples:",
        "--allow-source",
        "--cluster-secret-file",
        "--config",
        "--max-transfers",
    ] {
        assert!(text.contains(word), "{word} is missing in:\n{text}");
    }
}

/// The logs of a node never show a signed URL's query.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn signed_urls_are_not_logged() {
    let folder = tempfile::tempdir().unwrap();
    let mut version = version("signed", &folder.path().join("src"), &[100]);
    let mut master = FakeMaster::start().await;
    version.sources.0[0] = "http://127.0.0.1:1/model.bin?X-Signature=topsecretvalue".into();
    let mut child = command(
        &folder.path().join("models"),
        &master.address,
        &["--allow-source", "http://127.0.0.2:1/"],
    )
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    let mut session = master.session().await;
    session.acquire(&version, 1).await;
    let failure = session.outcome(pb::TaskOutcome::Failed).await.failure.unwrap();
    assert!(
        failure.message.contains("--allow-source") && !failure.message.contains("topsecret"),
        "{}",
        failure.message
    );
    child.start_kill().unwrap();
    let mut log = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut log)
        .await
        .unwrap();
    child.wait().await.unwrap();
    assert!(log.contains("task failed") && !log.contains("topsecret"), "{log}");
}
