//! What the store promises, seen from outside, in one process. Crashes are in `tests/store_crash.rs`.

mod folder;
mod history;

use super::*;
use mooncake_proto::{
    digest::{Algorithm, Digest},
    manifest::{Checksum, ManifestFile, ObjectIds, Seal},
};
use std::{
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt},
    path::PathBuf,
};

const BLOCK: u32 = 256 << 10;

/// Bytes that depend on the seed at every offset.
fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        out.extend(x.to_le_bytes());
    }
    out.truncate(len);
    out
}

fn model(id: &str) -> ModelRef {
    ModelRef {
        model_id: id.into(),
        revision: "r1".into(),
        format: "safetensors".into(),
        provider: "local".into(),
    }
}

/// A model whose files have these sizes, in chunks of 100,000 bytes (so that chunks and blocks do not align).
fn manifest(id: &str, files: &[(&str, u64)]) -> Arc<Manifest> {
    let files: Vec<_> = files
        .iter()
        .enumerate()
        .map(|(i, &(path, size_bytes))| {
            let chunk_count = size_bytes.div_ceil(100_000);
            ManifestFile {
                path: path.into(),
                size_bytes,
                checksum: Checksum::Opaque("dummy".into()),
                artifact_key: String::new(),
                chunk_size_bytes: 100_000,
                chunk_count,
                object_prefix: format!("{id}/{i}"),
                objects: ObjectIds::derived(&format!("{id}/{i}"), chunk_count),
            }
        })
        .collect();
    Arc::new(Manifest {
        model: model(id),
        file_manifest_version: "1".into(),
        total_size_bytes: files.iter().map(|f| f.size_bytes).sum(),
        files,
    })
}

fn usual() -> Arc<Manifest> {
    manifest(
        "org/m",
        &[
            ("a.bin", 700_000),
            ("sub/dir/b.bin", 53),
            (".dot", 0),
            ("sub/c", 262_144),
        ],
    )
}

fn new(manifest: &Arc<Manifest>) -> NewArtifact {
    NewArtifact {
        model: manifest.model.clone(),
        generation: 1,
        manifest: manifest.clone(),
        block_size: BLOCK,
        algorithm: Algorithm::Blake3,
    }
}

/// The right bytes of a block (variant 0), or other bytes of the same length.
fn bytes(artifact: &Artifact, block: u32, variant: u64) -> Vec<u8> {
    content(
        u64::from(block) * 31 + variant + 1,
        artifact.blocks().locate(block).unwrap().len as usize,
    )
}

fn fill(artifact: &Arc<Artifact>) -> Seal {
    for block in 0..artifact.blocks().len() {
        artifact
            .write_own_block(block, &bytes(artifact, block, 0))
            .unwrap();
    }
    artifact.seal_if_whole().unwrap()
}

fn open(root: &Path) -> Store {
    Store::open(StoreConfig::new(root)).unwrap()
}

fn check_folder(folder: &Path, artifact: &Artifact) {
    for (f, file) in artifact.manifest().files.iter().enumerate() {
        let mut want = Vec::new();
        for block in artifact.blocks().of_file(f) {
            want.extend(bytes(artifact, block, 0));
        }
        let path = folder.join(&file.path);
        assert!(fs::read(&path).unwrap() == want, "{} differs", path.display());
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o222,
            0,
            "{}",
            path.display()
        );
    }
}

fn staging_file(root: &Path, manifest: &Manifest, path: &str) -> PathBuf {
    root.join(".mooncake/staging")
        .join(naming::key(&manifest.model))
        .join("data")
        .join(path)
}

fn flip(path: &Path, at: u64) {
    let mode = fs::metadata(path).unwrap().permissions();
    fs::set_permissions(path, PermissionsExt::from_mode(0o644)).unwrap();
    let file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    fs::set_permissions(path, mode).unwrap();
}

#[test]
fn from_the_first_block_to_the_published_folder() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let mut changed = store.changed();
    let artifact = store.begin(new(&usual())).unwrap();
    assert!(changed.has_changed().unwrap());
    assert_eq!(artifact.state(), ArtifactState::Partial);
    assert_eq!(
        (
            artifact.blocks().len(),
            artifact.have_count(),
            artifact.objects_done()
        ),
        (5, 0, 0)
    );
    assert!(artifact.seal_if_whole().is_none() && artifact.digests().is_none());
    assert!(artifact.read_block(0).is_err() && artifact.block_file(9).is_err());
    assert!(artifact.object("nowhere").is_none());

    let progress = artifact.progress();
    let object = "org/m/0/chunk-002"; // bytes 200,000 to 300,000: blocks 0 and 1
    artifact.write_own_block(1, &bytes(&artifact, 1, 0)).unwrap();
    assert!(progress.has_changed().unwrap());
    assert!(!artifact.object(object).unwrap().held);
    artifact.write_own_block(0, &bytes(&artifact, 0, 0)).unwrap();
    let range = artifact.object(object).unwrap();
    assert!(range.held && range.range == (200_000..300_000) && range.blocks == (0..2));
    let file = fs::File::open(artifact.file_path(range.file)).unwrap();
    let mut got = vec![0; 100_000];
    file.read_exact_at(&mut got, range.range.start).unwrap();
    let two = [bytes(&artifact, 0, 0), bytes(&artifact, 1, 0)].concat();
    assert!(got == two[200_000..300_000]);
    assert_eq!(artifact.objects_done(), 5);

    changed.mark_unchanged();
    let seal = fill(&artifact);
    assert!(changed.has_changed().unwrap(), "whole is news");
    assert_eq!(artifact.state(), ArtifactState::Whole);
    assert_eq!(artifact.added(0), [1, 0, 2, 3, 4]);
    assert_eq!(
        (artifact.added(3), artifact.added(5), artifact.added(99)),
        (vec![3, 4], vec![], vec![])
    );
    assert_eq!(store.holdings()[0].seal, Some(seal));

    let path = artifact.publish(&seal).unwrap();
    assert_eq!(path, dir.path().join("local/org--m/r1/safetensors"));
    assert_eq!(artifact.publish(&seal).unwrap(), path, "idempotent");
    assert_eq!(
        artifact.state(),
        ArtifactState::Staged {
            local_path: path.clone()
        }
    );
    check_folder(&path, &artifact);
    assert_eq!(artifact.read_block(3).unwrap(), bytes(&artifact, 3, 0));
    assert!(artifact.object(object).unwrap().held && artifact.file_path(range.file).starts_with(&path));
    artifact.write_own_block(3, &bytes(&artifact, 3, 0)).unwrap();
    assert!(matches!(
        artifact.write_own_block(3, &bytes(&artifact, 3, 1)),
        Err(WriteError::AlreadyHeld { .. })
    ));
    assert!(artifact.forget(&[3]).is_err());
    store.remove_staging(artifact.model()).unwrap();
    assert!(
        fs::read_dir(dir.path().join(".mooncake/staging"))
            .unwrap()
            .next()
            .is_none()
    );

    let before = store.holdings();
    drop((store, artifact));
    let store = open(dir.path());
    assert_eq!(store.holdings(), before, "staged at once after a restart");
    let artifact = store
        .begin(NewArtifact {
            generation: 7,
            ..new(&usual())
        })
        .unwrap();
    assert_eq!(
        artifact.state(),
        ArtifactState::Staged {
            local_path: path.clone()
        }
    );
    assert_eq!(artifact.read_block(0).unwrap(), bytes(&artifact, 0, 0));
    let other = manifest("org/m", &[("z", 1)]);
    assert!(matches!(
        store.begin(new(&other)),
        Err(StoreError::FinalFolderExists { .. })
    ));
    drop((store, artifact));
    assert_eq!(
        open(dir.path()).find(&usual().model).unwrap().generation(),
        7,
        "the new generation is durable"
    );
}

#[test]
fn what_does_not_match_is_not_taken() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let artifact = store.begin(new(&usual())).unwrap();
    let good = bytes(&artifact, 0, 0);
    let digest = Algorithm::Blake3.digest(&good);
    assert!(matches!(
        artifact.write_block(0, &digest, &bytes(&artifact, 0, 1)),
        Err(WriteError::DigestMismatch { block: 0, .. })
    ));
    assert!(matches!(
        artifact.write_block(0, &digest, &good[1..]),
        Err(WriteError::WrongLength { .. })
    ));
    assert!(matches!(
        artifact.write_block(5, &digest, &good),
        Err(WriteError::NoSuchBlock { .. })
    ));
    assert_eq!((artifact.have_count(), artifact.added(0)), (0, vec![]));
    let raw = fs::read(staging_file(dir.path(), &usual(), "a.bin")).unwrap();
    assert!(raw.iter().all(|&b| b == 0), "not even written");

    let digests: Vec<_> = (0..5)
        .map(|b| Algorithm::Blake3.digest(&bytes(&artifact, b, 0)))
        .collect();
    for (b, digest) in digests.iter().enumerate() {
        artifact
            .write_block(b as u32, digest, &bytes(&artifact, b as u32, 0))
            .unwrap();
    }
    assert_eq!(artifact.digests().unwrap(), digests);
    let own = artifact.seal_if_whole().unwrap();
    for wrong in [
        Seal {
            root: Digest::sha256(b"x"),
            ..own
        },
        Seal {
            block_size_bytes: BLOCK * 2,
            ..own
        },
        Seal {
            algorithm: Algorithm::Sha256,
            ..own
        },
    ] {
        assert!(matches!(
            artifact.publish(&wrong),
            Err(PublishError::RootMismatch { .. })
        ));
    }
    assert!(!dir.path().join("local").exists());
    artifact.forget(&[4]).unwrap();
    assert!(matches!(
        artifact.publish(&own),
        Err(PublishError::NotWhole { missing: 1 })
    ));
    assert!(!dir.path().join("local").exists());
}

#[test]
fn nonsense_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let good = usual();
    let mut bad = vec![
        NewArtifact {
            model: model("other"),
            ..new(&good)
        },
        NewArtifact {
            block_size: BLOCK + 1,
            ..new(&good)
        },
        NewArtifact {
            block_size: 1 << 30,
            ..new(&good)
        },
    ];
    for path in ["../x", "/x", "a//b", "", "a/./b", "a\0b"] {
        bad.push(new(&manifest("org/m", &[(path, 1)])));
    }
    bad.push(new(&manifest("org/m", &[("a", 1), ("b", 1), ("a", 1)])));
    bad.push(new(&manifest("org/m", &[("a/b/c", 1), ("a/b", 1)])));
    let mut zero = (*good).clone();
    zero.files[0].chunk_size_bytes = 0;
    bad.push(new(&Arc::new(zero)));
    for new in bad {
        let error = store.begin(new).unwrap_err();
        assert_eq!(error.code(), "invalid_artifact", "{error}");
    }
    assert_eq!(store.holdings(), []);
    assert!(
        fs::read_dir(dir.path().join(".mooncake/staging"))
            .unwrap()
            .next()
            .is_none()
    );
}

#[test]
fn resumes_and_refetches_only_what_was_damaged_while_down() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let artifact = store.begin(new(&usual())).unwrap();
    for block in [0, 1, 3] {
        artifact
            .write_own_block(block, &bytes(&artifact, block, 0))
            .unwrap();
    }
    artifact.flush().unwrap();
    drop((store, artifact));
    flip(&staging_file(dir.path(), &usual(), "a.bin"), u64::from(BLOCK) + 5);

    let store = open(dir.path());
    let artifact = store.begin(new(&usual())).unwrap();
    let mut have: Vec<_> = artifact.added(0);
    have.sort();
    assert_eq!(have, [0, 3], "block 1 is damaged, block 2 and 4 were never there");
    assert!(artifact.read_block(1).is_err());
    // The tombstone is durable: the next start does not even look at it.
    drop((store, artifact));
    flip(&staging_file(dir.path(), &usual(), "a.bin"), u64::from(BLOCK) + 5);
    let store = open(dir.path());
    let artifact = store.begin(new(&usual())).unwrap();
    assert_eq!(artifact.have_count(), 2);
    let seal = fill(&artifact);
    check_folder(&artifact.publish(&seal).unwrap(), &artifact);
}

#[test]
fn recovered_blocks_are_offered_without_a_new_order() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let seal = fill(&store.begin(new(&usual())).unwrap());
    drop(store);
    let store = open(dir.path());
    let artifact = store.find(&usual().model).unwrap();
    artifact.rescan(&|| false); // waits for the one in the background
    assert_eq!(artifact.state(), ArtifactState::Whole);
    assert_eq!(store.holdings()[0].seal, Some(seal));
    check_folder(&artifact.publish(&seal).unwrap(), &artifact);
}

#[test]
fn another_manifest_or_layout_replaces_staging() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let first = store.begin(new(&usual())).unwrap();
    fill(&first);
    let others = [
        new(&manifest("org/m", &[("a.bin", 700_001)])),
        NewArtifact {
            block_size: 2 * BLOCK,
            ..new(&usual())
        },
        NewArtifact {
            algorithm: Algorithm::Sha256,
            ..new(&usual())
        },
    ];
    let mut last = first.clone();
    for other in others {
        let next = store.begin(other).unwrap();
        assert_eq!(next.have_count(), 0);
        assert!(last.closed().is_some());
        assert!(matches!(
            last.write_own_block(0, &bytes(&last, 0, 1)),
            Err(WriteError::Closed { .. })
        ));
        assert!(matches!(last.flush(), Err(StoreError::Closed { .. })));
        assert_eq!(store.holdings().len(), 1);
        next.write_own_block(0, &bytes(&next, 0, 0)).unwrap();
        last = next;
    }
    // The same again: the same handle.
    let again = store
        .begin(NewArtifact {
            algorithm: Algorithm::Sha256,
            ..new(&usual())
        })
        .unwrap();
    assert!(Arc::ptr_eq(&again, &last));
    store.remove_staging(&usual().model).unwrap();
    assert!(store.find(&usual().model).is_none() && again.closed().is_some());
    assert!(
        fs::read_dir(dir.path().join(".mooncake/staging"))
            .unwrap()
            .next()
            .is_none()
    );
    assert!(
        fs::read_dir(dir.path().join(".mooncake/trash"))
            .unwrap()
            .next()
            .is_none()
    );
}

#[test]
fn what_is_under_the_final_name_is_never_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let artifact = store.begin(new(&usual())).unwrap();
    let seal = fill(&artifact);
    let path = dir.path().join("local/org--m/r1/safetensors");
    // Appears while the transfer runs: an empty folder, a file, a link to nowhere.
    type Put = fn(&Path);
    let put: [(&str, Put); 3] = [
        ("folder", |p| fs::create_dir(p).unwrap()),
        ("file", |p| fs::write(p, "mine").unwrap()),
        ("link", |p| std::os::unix::fs::symlink("nowhere", p).unwrap()),
    ];
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    for (what, put) in put {
        put(&path);
        let before = fs::symlink_metadata(&path).unwrap();
        let error = artifact.publish(&seal).unwrap_err();
        assert_eq!(error.code(), "final_folder_exists", "{what}: {error}");
        assert!(error.to_string().contains(path.to_str().unwrap()));
        assert_eq!(fs::symlink_metadata(&path).unwrap().ino(), before.ino());
        fs::remove_file(&path).or_else(|_| fs::remove_dir(&path)).unwrap();
    }
    check_folder(&artifact.publish(&seal).unwrap(), &artifact);
    // And before it begins.
    let foreign = dir.path().join("local/x/r1/safetensors");
    fs::create_dir_all(&foreign).unwrap();
    let error = store.begin(new(&manifest("x", &[("f", 1)]))).unwrap_err();
    assert_eq!(error.code(), "final_folder_exists");
}

#[test]
fn forgotten_blocks_stay_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let artifact = store.begin(new(&usual())).unwrap();
    fill(&artifact);
    artifact.flush().unwrap();
    artifact.forget(&[2, 2, 0]).unwrap();
    assert!(!artifact.has(2) && artifact.digest(2).is_none());
    assert_eq!(
        (artifact.have_count(), artifact.state()),
        (3, ArtifactState::Partial)
    );
    // Other bytes are welcome now.
    artifact.write_own_block(0, &bytes(&artifact, 0, 1)).unwrap();
    assert_eq!(artifact.added(5), [0]);
    drop((store, artifact));
    let store = open(dir.path());
    let artifact = store.begin(new(&usual())).unwrap();
    assert_eq!(artifact.have_count(), 4);
    assert!(!artifact.has(2));
    assert_eq!(artifact.read_block(0).unwrap(), bytes(&artifact, 0, 1));
}

/// A publish keeps an artifact's journal for as long as it syncs all files.
#[test]
fn a_journal_in_use_keeps_no_other_artifact_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let config = StoreConfig {
        unjournaled_limit_bytes: 3 * u64::from(BLOCK),
        flush_interval: Duration::from_secs(3600),
        ..StoreConfig::new(dir.path())
    };
    let store = Store::open(config).unwrap();
    let begin = |name| {
        let files = [("f", 8 * u64::from(BLOCK))];
        store.begin(new(&manifest(name, &files))).unwrap()
    };
    let (used, other) = (begin("used"), begin("other"));
    let journal = used.journal.lock();
    used.write_own_block(0, &bytes(&used, 0, 0)).unwrap();
    let (done, ended) = std::sync::mpsc::channel();
    let writer = other.clone();
    let thread = std::thread::spawn(move || {
        fill_quietly(&writer);
        let _ = done.send(());
    });
    let ended = ended.recv_timeout(Duration::from_secs(30));
    drop(journal);
    thread.join().unwrap();
    ended.expect("the budget comes back while the other journal is in use");
    // What waited is not forgotten.
    drop((store, used, other));
    let store = open(dir.path());
    assert_eq!(
        store
            .begin(new(&manifest("used", &[("f", 8 * u64::from(BLOCK))])))
            .unwrap()
            .have_count(),
        1
    );
}

#[test]
fn a_rehash_shows_as_it_goes_and_ends_once_whoever_takes_part() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let first = store.begin(new(&usual())).unwrap();
    fill(&first);
    first.flush().unwrap();
    flip(&staging_file(dir.path(), &usual(), "a.bin"), u64::from(BLOCK) + 5);
    // No thread of the start knows of this one.
    first.close("for the test");
    let artifact = store.begin_unhashed(new(&usual())).unwrap();
    assert_eq!((artifact.have_count(), artifact.rehashed()), (0, false));
    assert_eq!(artifact.rehash_step(1), Rehash::More);
    assert_eq!((artifact.have_count(), artifact.rehashed()), (1, false));
    assert!(artifact.verified_bytes() > 0, "it is seen to get on");
    // One is stopped, others go on.
    artifact.rescan(&|| true);
    assert!(!artifact.rehashed());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| artifact.rescan(&|| false));
        }
    });
    assert!(artifact.rehashed());
    assert_eq!((artifact.have_count(), artifact.has(1)), (4, false));
    assert_eq!(artifact.rehash(), Rehash::Done);
    drop((store, first, artifact));
    let again = open(dir.path()).begin(new(&usual())).unwrap();
    assert_eq!(again.have_count(), 4, "the damaged one is not recorded any more");
}

#[test]
fn a_small_budget_delays_writers_but_never_stops_them() {
    let dir = tempfile::tempdir().unwrap();
    let config = StoreConfig {
        unjournaled_limit_bytes: 2 * u64::from(BLOCK) - 1,
        flush_interval: Duration::from_secs(3600), // only pressure makes it flush
        ..StoreConfig::new(dir.path())
    };
    let store = Store::open(config).unwrap();
    let big = manifest("big", &[("f", 40 * u64::from(BLOCK))]);
    let artifact = store.begin(new(&big)).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            // All threads write all blocks: endgame at its worst.
            scope.spawn(|| fill_quietly(&artifact));
        }
    });
    let mut added = artifact.added(0);
    added.sort();
    assert_eq!(added, (0..40).collect::<Vec<_>>(), "each block once");
    // At most the budget is not in the journal.
    let journal = fs::read(artifact.staging.join(JOURNAL)).unwrap();
    assert!(
        (journal.len() - 64) / 44 >= 39,
        "{} bytes of journal",
        journal.len()
    );
    check_folder_bytes(&artifact);
}

fn fill_quietly(artifact: &Arc<Artifact>) {
    for block in 0..artifact.blocks().len() {
        artifact
            .write_own_block(block, &bytes(artifact, block, 0))
            .unwrap();
    }
}

fn check_folder_bytes(artifact: &Artifact) {
    for block in 0..artifact.blocks().len() {
        assert!(
            artifact.read_block(block).unwrap() == bytes(artifact, block, 0),
            "block {block}"
        );
    }
}
