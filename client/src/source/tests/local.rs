//! From folders.

use super::*;
use crate::store::held::{HeldJournal, writers_wait};
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

    // Whole already: no source is needed.
    let again = node
        .acquire(&["/gone/1", "", "/gone/2", "/gone/3"], &[])
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

    // A part from an earlier attempt may be the culprit: then all of it is read anew, at once.
    let path = source(&root, "f", &declared);
    node.write(1, &actual[BLOCK..2 * BLOCK]);
    node.acquire(&[&path], &[&root]).await.unwrap();
    assert_eq!(node.bytes(), declared);

    // Even if no block is missing. But only once: then it is the source's fault.
    node.artifact.forget(&[0, 1, 2]).unwrap();
    for block in 0..3 {
        node.write(block, &actual[block as usize * BLOCK..][..BLOCK]);
    }
    let path = source(&root, "f", &actual);
    failed(
        node.acquire(&[&path], &[&root]).await,
        "checksum_mismatch",
        false,
        &["Correct the checksum"],
    );
    assert_eq!(node.held(), [0; 0]);
}

#[tokio::test]
async fn what_peers_announced_is_not_the_source() {
    let (_dir, root) = folder();
    let (data, lie) = (noise(4 * BLOCK, 1), noise(4 * BLOCK, 2));
    let part = |of: &[u8], block: u32| of[block as usize * BLOCK..][..BLOCK].to_vec();
    let path = source(&root, "f", &data);
    let opaque = || manifest_file("f", data.len(), Checksum::Opaque("dummy".into()));
    let sha = || manifest_file("f", data.len(), Checksum::Sha256(Digest::sha256(&data)));
    // Without a checksum only the own block counts; with one all are tried: first one is read, then all.
    for (file, blocks_read) in [(opaque(), 3), (sha(), 1 + 4)] {
        let mut node = Node::new(vec![file]);
        node.write(0, &part(&data, 0));
        node.write_from_peer(1, &part(&data, 1));
        node.write_from_peer(3, &part(&lie, 3));
        assert_eq!(node.artifact.unproven(0..4), [1, 3]);
        // Which is which is known after a restart, too.
        node.restart();
        assert_eq!(node.held(), [0, 1, 3]);
        assert_eq!(node.artifact.unproven(0..4), [1, 3]);
        node.acquire(&[&path], &[&root]).await.unwrap();
        assert_eq!(node.bytes(), data);
        assert_eq!(node.counters.load().0, blocks_read * BLOCK as u64);
    }
    // Right ones, with a checksum, are worth keeping.
    let node = Node::new(vec![sha()]);
    node.write_from_peer(1, &part(&data, 1));
    node.acquire(&[&path], &[&root]).await.unwrap();
    assert_eq!(node.counters.load().0, 3 * BLOCK as u64);
}

#[tokio::test]
async fn a_copy_that_reproduces_the_seal_needs_no_source() {
    let (_dir, root) = folder();
    let data = noise(2 * BLOCK, 1);
    let path = source(&root, "f", &data);
    let opaque = || vec![manifest_file("f", data.len(), Checksum::Opaque(String::new()))];
    let seal = Node::new(opaque()).acquire(&[&path], &[&root]).await.unwrap();
    fs::remove_file(&path).unwrap();
    let mut node = Node::new(opaque());
    for block in 0..2 {
        node.write_from_peer(block, &data[block as usize * BLOCK..][..BLOCK]);
    }
    node.restart();
    let expecting = |node: &Node, root: Digest| AcquireTask {
        expected_seal: Some(Seal { root, ..seal }),
        ..node.task(&[&path], &[])
    };
    let run = |task| acquire(task, quick(), CancellationToken::new());
    assert_eq!(run(expecting(&node, seal.root)).await, Ok(seal));
    failed(
        run(expecting(&node, Digest::sha256(b"other"))).await,
        "source_not_allowed",
        false,
        &[],
    );
}

#[tokio::test]
async fn only_files_that_miss_blocks_need_their_source() {
    let (_dir, root) = folder();
    let data = noise(2 * BLOCK, 1);
    let path = source(&root, "b", &data);
    let sha = Checksum::Sha256(Digest::sha256(&data));
    let mut node = Node::new(vec![
        manifest_file("a", data.len(), sha.clone()),
        manifest_file("b", data.len(), sha),
    ]);
    for block in [0, 1, 3] {
        node.write(block, &data[(block as usize % 2) * BLOCK..][..BLOCK]);
    }
    node.restart();
    for gone in ["/gone/a", "http://127.0.0.1:1/a"] {
        node.acquire(&[gone, &path], &[&root]).await.unwrap();
    }
    assert_eq!(node.counters.load().0, BLOCK as u64);
}

#[tokio::test]
async fn an_empty_file_has_the_checksum_of_an_empty_file() {
    let good = Node::new(vec![manifest_file("e", 0, Checksum::Sha256(Digest::sha256(b"")))]);
    good.acquire(&[""], &[]).await.unwrap();
    let bad = Node::new(vec![manifest_file(
        "e",
        0,
        Checksum::Sha256(Digest::sha256(b"x")),
    )]);
    failed(
        bad.acquire(&[""], &[]).await,
        "checksum_mismatch",
        false,
        &["'e'", "empty", &Digest::sha256(b"x").to_string()],
    );
}

/// Another file fails, or the task is canceled, while a condemned file waits for its writes.
#[tokio::test]
async fn what_was_condemned_is_forgotten_whatever_comes_first() {
    let data = noise(4 * BLOCK, 1);
    let node = Node::with_file(&data);
    for block in 0..3 {
        node.write(block, &data[block as usize * BLOCK..][..BLOCK]);
    }
    let context = Arc::new(Context::new(
        node.artifact.clone(),
        AllowList::default(),
        node.counters.clone(),
        quick(),
    ));
    let file = Arc::new(SourceFile {
        path: "f".into(),
        size_bytes: data.len() as u64,
        checksum: Checksum::Sha256(Digest::sha256(b"another")),
        location: Location::Path("/gone".into()),
        blocks: 0..3,
        carried_over: false,
        writes: TaskTracker::new(),
    });
    let under_way = file.writes.token();
    let mut files = JoinSet::new();
    let (task_context, task_file) = (context.clone(), file.clone());
    files.spawn(async move { one_pass(&task_context, &task_file).await });
    while !file.writes.is_closed() {
        tokio::task::yield_now().await;
    }
    assert_eq!(node.held(), [0, 1, 2], "it waits for a write");
    finish(&context, &mut files).await.unwrap();
    assert_eq!(node.held(), [0; 0]);
    drop(under_way);
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
    let other = acquire(expecting(Some(seal)), quick(), CancellationToken::new()).await;
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
    let same = acquire(expecting(Some(seal)), quick(), CancellationToken::new()).await;
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
    let (result, ()) = tokio::join!(acquire(task, quick(), cancel.clone()), async {
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

fn a_file_at(path: &str, len: usize) -> Arc<SourceFile> {
    Arc::new(SourceFile {
        path: "f".into(),
        size_bytes: len as u64,
        checksum: Checksum::Opaque(String::new()),
        location: Location::Path(path.into()),
        blocks: 0..(len.div_ceil(BLOCK)) as u32,
        carried_over: false,
        writes: TaskTracker::new(),
    })
}

/// Everything of which a share that hangs might have too much: the threads that call it, and the buffers.
#[tokio::test]
async fn shares_that_hang_stop_neither_others_nor_their_own_tasks_for_ever() {
    let (_dir, root) = folder();
    let data = noise(2 * BLOCK, 1);
    let path = source(&root, "f", &data);
    let file = a_file_at(&path, data.len());
    let impatient = |node: &Node| {
        let config = SourceConfig {
            no_progress_timeout: Duration::from_millis(50),
            ..quick()
        };
        let (artifact, allow) = (node.artifact.clone(), AllowList::parse(&[&root]).unwrap());
        Arc::new(Context::new(artifact, allow, node.counters.clone(), config))
    };
    let hung = [Node::with_file(&data), Node::with_file(&data)];
    let (most, mut release, mut stuck) = (limits::SOURCE_CALLS_PER_TASK, Vec::new(), Vec::new());
    for node in &hung {
        let context = impatient(node);
        let mut calls = Vec::new();
        for _ in 0..2 * most {
            let (until, gate) = std::sync::mpsc::channel::<()>();
            release.push(until);
            calls.push(context.call_source(&file, move || Ok(gate.recv().is_err())));
        }
        let ended = futures_util::future::join_all(calls).await;
        let (mut silent, mut refused) = (0, 0);
        for failure in ended.into_iter().map(Result::unwrap_err) {
            assert_eq!(
                (failure.code.as_str(), failure.retryable),
                ("source_unavailable", true)
            );
            silent += usize::from(failure.message.contains("gave nothing"));
            refused += usize::from(failure.message.contains("share came back"));
        }
        assert_eq!((silent, refused), (most, most), "no more threads than its part");
        // The next attempt finds no other part.
        let failure = crate::source::local::look(&impatient(node), &file)
            .await
            .unwrap_err();
        assert!(failure.message.contains("share came back"), "{failure}");
        drop(context);
    }
    let node = &hung[0];
    let context = impatient(node);
    for _ in 0..limits::MAX_LOCAL_BUFFERS_PER_TASK {
        stuck.push(context.local_buffer(&file).await.unwrap());
    }
    let failure = context.local_buffer(&file).await.unwrap_err();
    assert!(failure.message.contains("none of the buffers"), "{failure}");
    // The web has its own share, and so has every other model.
    drop(context.buffers.take(Duration::from_secs(30)).await.unwrap());
    let other = Node::with_file(&data);
    other.acquire(&[&path], &[&root]).await.unwrap();
    // Nor is it for ever: what came back is used again.
    drop((release, stuck));
    node.acquire(&[&path], &[&root]).await.unwrap();
}

#[tokio::test]
async fn who_waits_for_the_disk_can_be_canceled() {
    let (_dir, root) = folder();
    let data = noise(2 * BLOCK, 1);
    let path = source(&root, "f", &data);
    let node = Node::with_file(&data);
    let turns = limits::DISK_TURNS
        .acquire_many(limits::DISK_STEPS as u32)
        .await
        .unwrap();
    let cancel = CancellationToken::new();
    let run = acquire(node.task(&[&path], &[&root]), quick(), cancel.clone());
    let run = async {
        tokio::join!(run, async {
            tokio::task::yield_now().await;
            cancel.cancel();
        })
    };
    let ended = tokio::time::timeout(Duration::from_secs(30), run).await;
    drop(turns);
    let (result, ()) = ended.expect("it waits for no turn");
    assert!(result.unwrap_err().is_canceled());
}

/// Everything is here already, and the source is gone: what is left is hours of hashing on a slow disk, and the masters
/// see that it goes on.
#[tokio::test]
async fn what_is_held_is_checked_and_that_is_counted() {
    let data = noise(3 * BLOCK + 1000, 1);
    let node = Node::with_file(&data);
    for (block, bytes) in data.chunks(BLOCK).enumerate() {
        node.write(block as u32, bytes);
    }
    assert_eq!(node.counters.checked(), 0);
    node.acquire(&["/nowhere/f"], &["/nowhere"]).await.unwrap();
    assert_eq!(node.counters.checked(), data.len() as u64);
    assert_eq!(node.counters.load(), (0, 0));
}

/// The source is as fast as can be; the disk that is written to takes nothing for a while.
#[tokio::test]
async fn a_stall_of_the_own_disk_is_no_fault_of_the_source() {
    let (_dir, root) = folder();
    // More than there are buffers.
    let data = noise((limits::MAX_BUFFERS + 4) * BLOCK, 1);
    let parts: Vec<_> = data.chunks(2 * BLOCK).collect();
    let paths: Vec<_> = parts
        .iter()
        .enumerate()
        .map(|(n, part)| source(&root, &format!("f{n}"), part))
        .collect();
    let files = parts.iter().enumerate().map(|(n, part)| {
        let checksum = Checksum::Sha256(Digest::sha256(part));
        manifest_file(&format!("f{n}"), part.len(), checksum)
    });
    let node = Node::new(files.collect());
    // Long enough for what is no stall of the disk but of this process.
    let patience = Duration::from_secs(2);
    let config = SourceConfig {
        no_progress_timeout: patience,
        ..quick()
    };
    let writers = limits::WRITE_TURNS
        .acquire_many(limits::WRITES as u32)
        .await
        .unwrap();
    let sources: Vec<_> = paths.iter().map(String::as_str).collect();
    let run = acquire(node.task(&sources, &[&root]), config, CancellationToken::new());
    let mut run = Box::pin(run);
    let early = tokio::time::timeout(2 * patience, run.as_mut()).await;
    assert!(early.is_err(), "{early:?}");
    drop(writers);
    let ended = tokio::time::timeout(Duration::from_secs(60), run).await;
    ended.expect("it ends").unwrap();
    assert_eq!(node.bytes(), data);
}

/// A write hangs for longer than the end of an acquisition waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_lands_after_the_end_does_not_count() {
    let (_dir, root) = folder();
    let data = noise(4 * BLOCK, 1);
    let path = source(&root, "f", &data);
    let file = manifest_file("f", data.len(), Checksum::Sha256(Digest::sha256(&data)));
    let mut node = Node::new_with(vec![file], |config| {
        config.unjournaled_limit_bytes = BLOCK as u64;
    });
    let journal = HeldJournal::of(&node.artifact);
    let config = SourceConfig {
        drain_timeout: Duration::from_millis(20),
        ..quick()
    };
    let cancel = CancellationToken::new();
    let run = tokio::spawn(acquire(node.task(&[&path], &[&root]), config, cancel.clone()));
    writers_wait(node.store.as_ref().unwrap(), true).await;
    cancel.cancel();
    assert!(run.await.unwrap().unwrap_err().is_canceled());
    assert!(node.artifact.closed().is_some(), "nothing counts any more");
    let counted = node.artifact.have_count();
    journal.release();
    writers_wait(node.store.as_ref().unwrap(), false).await;
    assert_eq!(node.artifact.have_count(), counted);
    let again = tokio::task::spawn_blocking(move || {
        node.restart();
        node
    });
    let node = again.await.unwrap();
    node.acquire(&[&path], &[&root]).await.unwrap();
    assert_eq!(node.bytes(), data);
}

/// A file that is left half-way is closed in its turn: that may hang as long as anything else on its share.
#[tokio::test]
async fn a_source_that_is_left_is_closed_in_its_turn() {
    let data = noise(BLOCK, 1);
    let node = Node::with_file(&data);
    let turns = limits::Buffers::new(&node.artifact);
    let mut calls = Vec::new();
    for _ in 0..limits::SOURCE_CALLS_PER_TASK {
        calls.push(turns.call(Duration::from_secs(60)).await.unwrap());
    }
    let (mut near, far) = std::os::unix::net::UnixStream::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    let far = std::fs::File::from(std::os::fd::OwnedFd::from(far));
    drop(crate::source::local::Source::new(far, turns.clone()));
    let mut read = move || std::io::Read::read(&mut near, &mut [0]);
    for _ in 0..20 {
        // What another thread was given before this has been begun.
        tokio::task::spawn_blocking(|| ()).await.unwrap();
        assert_eq!(read().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    }
    drop(calls);
    let closed = async {
        while read().is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), closed)
        .await
        .expect("it is closed in the end");
}
