//! From folders.

use super::*;
use std::{fs, os::unix::fs::symlink, path::Path};

fn folder() -> (TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().canonicalize().unwrap().to_str().unwrap().to_owned();
    (dir, path)
}

fn source(folder: &str, name: &str, data: &[u8]) -> String {
    let path = Path::new(folder).join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, data).unwrap();
    path.to_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_folder_is_read_once() {
    let (_dir, root) = folder();
    let big = noise(3 * BLOCK + 17, 1);
    let small = noise(53, 2);
    let odd = noise(BLOCK, 3);
    let sha = |d: &[u8]| Checksum::Sha256(Digest::sha256(d));
    let node = Node::new(vec![
        manifest_file("big.bin", big.len(), sha(&big)),
        manifest_file("empty", 0, sha(b"")),
        manifest_file("sub/.small", small.len(), sha(&small)),
        manifest_file("odd name #1%", odd.len(), Checksum::Opaque("dummy".into())),
    ]);
    let sources = [
        source(&root, "big.bin", &big),
        String::new(),
        source(&root, "sub/.small", &small),
        source(&root, "odd name #1%", &odd),
    ];
    let by_url = url::Url::from_file_path(&sources[3]).unwrap();
    let seal = node
        .acquire(&[&sources[0], "", &sources[2], by_url.as_str()], &[&root])
        .await
        .unwrap();
    assert_eq!(Some(seal), node.artifact.seal_if_whole());
    assert_eq!(node.bytes(), [big.clone(), small, odd].concat());
    assert_eq!(node.counters.load(), (node.artifact.blocks().total_bytes(), 0));

    // Whole already: the sources are looked at, nothing is read again.
    let again = node
        .acquire(&[&sources[0], "", &sources[2], by_url.as_str()], &[&root])
        .await
        .unwrap();
    assert_eq!(again, seal);
    assert_eq!(node.counters.load().0, node.artifact.blocks().total_bytes());
}

#[tokio::test]
async fn what_is_held_is_not_read_again() {
    let (_dir, root) = folder();
    let data = noise(6 * BLOCK, 1);
    let path = source(&root, "f", &data);
    let node = Node::with_file(&data);
    for block in [0, 3, 4] {
        node.write(block, &data[block as usize * BLOCK..][..BLOCK]);
    }
    node.acquire(&[&path], &[&root]).await.unwrap();
    assert_eq!(node.counters.load(), (3 * BLOCK as u64, 0));
    assert_eq!(node.bytes(), data);
}

#[tokio::test]
async fn nothing_outside_the_list_is_read() {
    let (_dir, root) = folder();
    let data = noise(10, 1);
    let inside = source(&root, "open/f", &data);
    let secret = source(&root, "secret", &data);
    let link = format!("{root}/open/link");
    symlink(&secret, &link).unwrap();
    let open = format!("{root}/open");
    let node = Node::with_file(&data);
    failed(
        node.acquire(&[&inside], &[]).await,
        "source_not_allowed",
        false,
        &["--allow-source", &inside],
    );
    for outside in [
        &secret,
        &link,
        &format!("{open}/../secret"),
        "/nonexistent/x",
        &format!("file://{open}/%2e%2e/secret"),
    ] {
        failed(
            node.acquire(&[outside], &[&open]).await,
            "source_not_allowed",
            false,
            &["--allow-source", "'f'"],
        );
    }
    assert_eq!(node.counters.load().0, 0);
    node.acquire(&[&inside], &[&open]).await.unwrap();
}

#[tokio::test]
async fn one_bad_source_stops_the_job_before_the_first_byte() {
    let (_dir, root) = folder();
    let data = noise(2 * BLOCK, 1);
    let good = source(&root, "f", &data);
    let sha = Checksum::Sha256(Digest::sha256(&data));
    let node = Node::new(vec![
        manifest_file("a", data.len(), sha.clone()),
        manifest_file("b", data.len(), sha),
    ]);
    let missing = format!("{root}/missing");
    failed(
        node.acquire(&[&good, &missing], &[&root]).await,
        "source_not_found",
        false,
        &[&missing, "'b'"],
    );
    failed(
        node.acquire(&[&good, "http://127.0.0.1:1/x"], &[&root]).await,
        "source_not_allowed",
        false,
        &[],
    );
    failed(
        node.acquire(&[&good], &[&root]).await,
        "source_invalid",
        false,
        &["1 sources", "2 files"],
    );
    assert_eq!((node.counters.load().0, node.held().len()), (0, 0));
}

#[tokio::test]
async fn only_regular_files_of_the_declared_size() {
    let (_dir, root) = folder();
    let data = noise(100, 1);
    let node = Node::with_file(&data);
    let short = source(&root, "short", &data[..99]);
    failed(
        node.acquire(&[&short], &[&root]).await,
        "size_mismatch",
        false,
        &["99 bytes", "100 bytes"],
    );
    failed(
        node.acquire(&[&root], &[&root]).await,
        "source_not_a_file",
        false,
        &["a folder"],
    );
    // Nobody writes this FIFO: opening it must not wait.
    let fifo = format!("{root}/fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    failed(
        node.acquire(&[&fifo], &[&root]).await,
        "source_not_a_file",
        false,
        &["not a regular file"],
    );
}

#[tokio::test]
async fn a_wrong_checksum_discards_the_file() {
    let (_dir, root) = folder();
    let (declared, actual) = (noise(3 * BLOCK, 1), noise(3 * BLOCK, 2));
    let path = source(&root, "f", &actual);
    let node = Node::with_file(&declared);
    let (want, got) = (
        Digest::sha256(&declared).to_string(),
        Digest::sha256(&actual).to_string(),
    );
    failed(
        node.acquire(&[&path], &[&root]).await,
        "checksum_mismatch",
        false,
        &["'f'", &path, &want, &got, "manifest"],
    );
    assert_eq!(node.held(), [0; 0]);

    // A part from an earlier attempt may be the culprit: worth another attempt, which then reads it all.
    let path = source(&root, "f", &declared);
    node.write(1, &actual[BLOCK..2 * BLOCK]);
    failed(
        node.acquire(&[&path], &[&root]).await,
        "checksum_mismatch",
        true,
        &["earlier attempt"],
    );
    assert_eq!(node.held(), [0; 0]);
    node.acquire(&[&path], &[&root]).await.unwrap();
    assert_eq!(node.bytes(), declared);
}

#[tokio::test]
async fn a_checksum_that_is_none_checks_the_size_only() {
    let (_dir, root) = folder();
    let data = noise(4 * BLOCK, 1);
    let path = source(&root, "f", &data);
    let node = Node::new(vec![manifest_file(
        "f",
        data.len(),
        Checksum::Opaque("dummy".into()),
    )]);
    node.acquire(&[&path], &[&root]).await.unwrap();
    assert_eq!(node.bytes(), data);
}

#[tokio::test]
async fn the_seal_of_before_must_be_reproduced() {
    let (_dir, root) = folder();
    let data = noise(2 * BLOCK, 1);
    let path = source(&root, "f", &data);
    let opaque = || vec![manifest_file("f", data.len(), Checksum::Opaque(String::new()))];
    let first = Node::new(opaque());
    let seal = first.acquire(&[&path], &[&root]).await.unwrap();

    let second = Node::new(opaque());
    let expecting = |expected_seal| AcquireTask {
        expected_seal,
        ..second.task(&[&path], &[&root])
    };
    source(&root, "f", &noise(2 * BLOCK, 2));
    let other = acquire_with(expecting(Some(seal)), quick(), CancellationToken::new()).await;
    failed(
        other,
        "source_changed",
        false,
        &[&seal.root.to_string(), "revision"],
    );
    assert_eq!(
        second.held(),
        [0; 0],
        "a copy that can never be published is not resumed"
    );
    source(&root, "f", &data);
    let same = acquire_with(expecting(Some(seal)), quick(), CancellationToken::new()).await;
    assert_eq!(same, Ok(seal));
}

#[tokio::test]
async fn a_file_that_is_written_meanwhile_is_noticed() {
    let (_dir, root) = folder();
    let data = noise(64 * BLOCK, 1);
    let path = source(&root, "f", &data);
    let node = Node::new(vec![manifest_file(
        "f",
        data.len(),
        Checksum::Opaque(String::new()),
    )]);
    let mut progress = node.artifact.progress();
    let (sources, allow) = ([path.as_str()], [root.as_str()]);
    let (run, ()) = tokio::join!(node.acquire(&sources, &allow), async {
        // Some block is there, so that the file is open.
        progress.changed().await.unwrap();
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_len(data.len() as u64 / 2).unwrap();
    });
    failed(run, "source_changed", true, &[&path, "changed while it was read"]);
    assert_eq!(node.held(), [0; 0]);
}

#[tokio::test]
async fn canceling_keeps_what_was_verified() {
    let (_dir, root) = folder();
    let data = noise(64 * BLOCK, 1);
    let path = source(&root, "f", &data);
    let node = Node::with_file(&data);
    let cancel = CancellationToken::new();
    let mut progress = node.artifact.progress();
    let task = node.task(&[&path], &[&root]);
    let (result, ()) = tokio::join!(acquire_with(task, quick(), cancel.clone()), async {
        progress.changed().await.unwrap();
        cancel.cancel();
    });
    let failure = failed(result, "canceled", false, &[]);
    assert!(failure.is_canceled());
    let held = node.held();
    assert!(!held.is_empty() && held.len() < 64, "{} blocks", held.len());
    let before = node.counters.load().0;
    node.acquire(&[&path], &[&root]).await.unwrap();
    assert_eq!(
        node.counters.load().0 - before,
        (64 - held.len() as u64) * BLOCK as u64
    );
    assert_eq!(node.bytes(), data);
}
