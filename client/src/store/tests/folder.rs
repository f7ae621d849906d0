//! The folder itself: its lock, its space, and what is found in it at the next start.

use super::{super::journal::Recorded, *};

#[test]
fn one_process_per_folder() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let error = Store::open(StoreConfig::new(dir.path())).unwrap_err();
    assert!(
        error
            .to_string()
            .contains(&format!("process {}", std::process::id())),
        "{error}"
    );
    // A handle that outlives the store keeps the folder.
    let artifact = store.begin(new(&usual())).unwrap();
    let id = store.store_id().to_owned();
    drop(store);
    assert!(matches!(
        Store::open(StoreConfig::new(dir.path())),
        Err(StoreError::Locked { .. })
    ));
    assert!(matches!(
        artifact.write_own_block(0, &bytes(&artifact, 0, 0)),
        Err(WriteError::Closed { .. })
    ));
    drop(artifact);
    let store = open(dir.path());
    assert_eq!(store.store_id(), id);
    drop(store);
    fs::remove_file(dir.path().join(".mooncake/store")).unwrap();
    assert_eq!(
        Store::open(StoreConfig::new(dir.path())).unwrap_err().code(),
        "store_damaged"
    );
}

#[test]
fn a_store_that_cannot_be_used_says_what_to_do() {
    for name in ["store", "fences"] {
        let dir = tempfile::tempdir().unwrap();
        let store = open(dir.path());
        let fence = Fence {
            recovery_epoch: 0,
            attempt: 1,
        };
        store.obey(&model("m"), fence).unwrap();
        drop(store);
        let path = dir.path().join(".mooncake").join(name);
        flip(&path, 0);
        let error = Store::open(StoreConfig::new(dir.path())).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.code(), "store_damaged");
        assert!(
            text.contains(&path.display().to_string()) && text.contains("start with an empty folder"),
            "{text}"
        );
    }
}

#[test]
fn space_is_asked_for_first() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let free = store.free_bytes().unwrap();
    assert!(free <= store.capacity_bytes().unwrap());
    let huge = manifest("huge", &[("small", 10), ("f", free + (1 << 30))]);
    let error = store
        .begin(NewArtifact {
            block_size: 4 << 20,
            ..new(&huge)
        })
        .unwrap_err();
    let StoreError::DiskFull {
        needed_bytes,
        free_bytes,
        ..
    } = &error
    else {
        panic!("{error}")
    };
    assert!(needed_bytes > free_bytes);
    assert_eq!(error.code(), "disk_full");
    assert!(
        error.to_string().contains(dir.path().to_str().unwrap()),
        "{error}"
    );
    assert!(
        fs::read_dir(dir.path().join(".mooncake/staging"))
            .unwrap()
            .next()
            .is_none()
    );

    // What is promised to others is not free; a gibibyte more, since other tests free some meanwhile.
    let free = space::free_bytes(dir.path()).unwrap();
    assert!(space::check(dir.path(), 1 << 20, 0).unwrap().is_ok());
    assert!(
        space::check(dir.path(), 1 << 20, free + (1 << 30))
            .unwrap()
            .is_err()
    );

    // Begun: it is really taken.
    let artifact = store.begin(new(&manifest("m", &[("f", 8 << 20)]))).unwrap();
    let taken = tree::allocated_bytes(&artifact.dir, &artifact.manifest) + artifact.unallocated_bytes();
    assert_eq!(taken, 8 << 20);
}

#[test]
fn errors_say_what_and_where_and_have_codes() {
    use rustix::io::Errno;
    for (errno, code, retry) in [
        (Errno::NOSPC, "disk_full", false),
        (Errno::DQUOT, "disk_full", false),
        (Errno::ROFS, "disk_not_writable", false),
        (Errno::IO, "disk_error", true),
    ] {
        let error = io_error("write", "/data/x")(errno.into());
        assert_eq!((error.code(), error.retryable()), (code, retry));
        assert!(error.to_string().contains("cannot write /data/x"), "{error}");
        let error = WriteError::Io {
            block: 3,
            path: "/data/x".into(),
            source: errno.into(),
        };
        assert_eq!(error.code(), code);
        assert!(error.to_string().contains("block 3 to /data/x"), "{error}");
    }
}

#[test]
fn staged_copies_are_looked_at_when_the_store_opens() {
    type Harm = fn(&Path);
    let cases: [(&str, Harm, bool); 6] = [
        ("untouched", |_| (), true),
        ("touched", |p| set_time(&p.join("a.bin")), true),
        (
            "truncated",
            |p| {
                fs::File::options()
                    .write(true)
                    .open(p.join("a.bin"))
                    .unwrap()
                    .set_len(5)
                    .unwrap()
            },
            false,
        ),
        (
            "changed",
            |p| {
                flip(&p.join("a.bin"), 9);
                set_time(&p.join("a.bin"))
            },
            false,
        ),
        (
            "file gone",
            |p| fs::remove_file(p.join("sub/dir/b.bin")).unwrap(),
            false,
        ),
        ("all gone", |p| fs::remove_dir_all(p).unwrap(), false),
    ];
    for (what, harm, stays) in cases {
        let dir = tempfile::tempdir().unwrap();
        let store = open(dir.path());
        let artifact = store.begin(new(&usual())).unwrap();
        let seal = fill(&artifact);
        let path = artifact.publish(&seal).unwrap();
        drop((store, artifact));
        for file in ["a.bin", "sub/dir/b.bin"] {
            fs::set_permissions(path.join(file), PermissionsExt::from_mode(0o644)).unwrap();
        }
        harm(&path);
        let store = open(dir.path());
        assert_eq!(store.find(&usual().model).is_some(), stays, "{what}");
        assert_eq!(path.exists(), stays, "{what}");
        let aside: Vec<_> = fs::read_dir(dir.path().join(".mooncake/quarantine"))
            .unwrap()
            .collect();
        assert_eq!(aside.len(), usize::from(!stays && what != "all gone"), "{what}");
        let artifact = store.begin(new(&usual())).unwrap();
        assert_eq!(
            matches!(artifact.state(), ArtifactState::Staged { .. }),
            stays,
            "{what}"
        );
        if !stays {
            check_folder(&artifact.publish(&fill(&artifact)).unwrap(), &artifact);
        }
    }
}

fn set_time(path: &Path) {
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000))
        .unwrap();
}

#[test]
fn a_staged_copy_that_goes_while_we_run_is_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let artifact = store.begin(new(&usual())).unwrap();
    let path = artifact.publish(&fill(&artifact)).unwrap();
    assert!(store.recheck(artifact.model()).unwrap());
    let moved = dir.path().join("moved");
    fs::rename(&path, &moved).unwrap();
    assert!(!store.recheck(artifact.model()).unwrap());
    assert_eq!(store.holdings(), []);
    let second = store.begin(new(&usual())).unwrap();
    assert_eq!(second.state(), ArtifactState::Partial);
    second.publish(&fill(&second)).unwrap();
    fs::remove_dir_all(&path).unwrap();
    let third = store.begin(new(&usual())).unwrap();
    assert_eq!(third.state(), ArtifactState::Partial, "begin looks by itself");
    store.remove_staging(third.model()).unwrap();
    drop((store, artifact, second, third));

    // A copy that somebody puts back is taken after every byte was hashed; a wrong one is left alone.
    let store = open(dir.path());
    let artifact = store.begin(new(&usual())).unwrap();
    artifact.publish(&fill(&artifact)).unwrap();
    drop((store, artifact));
    fs::remove_dir_all(&path).unwrap();
    copy(&moved, &path);
    let store = open(dir.path());
    assert!(matches!(store.holdings()[0].state, ArtifactState::Staged { .. }));
    drop(store);
    fs::remove_dir_all(&path).unwrap();
    copy(&moved, &path);
    flip(&path.join("a.bin"), 1);
    let store = open(dir.path());
    assert_eq!(store.holdings(), []);
    assert!(path.join("a.bin").exists(), "not ours to move");
    assert_eq!(
        store.begin(new(&usual())).unwrap_err().code(),
        "final_folder_exists"
    );
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn damaged_records_hide_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let models = ["a", "b", "c", "d"].map(|id| manifest(id, &[("f", 300_000)]));
    for (i, m) in models.iter().enumerate() {
        let artifact = store.begin(new(m)).unwrap();
        let seal = fill(&artifact);
        if i < 2 {
            artifact.publish(&seal).unwrap();
        }
    }
    drop(store);
    let own = dir.path().join(".mooncake");
    flip(&own.join("staged").join(naming::key(&models[0].model)), 40);
    flip(
        &own.join("staging")
            .join(naming::key(&models[2].model))
            .join("record"),
        40,
    );
    let store = open(dir.path());
    let held: Vec<_> = store
        .holdings()
        .iter()
        .map(|h| h.model.model_id.clone())
        .collect();
    assert_eq!(held, ["b", "d"]);
    assert_eq!(
        store.begin(new(&models[0])).unwrap_err().code(),
        "final_folder_exists"
    );
    assert_eq!(store.begin(new(&models[2])).unwrap().have_count(), 0);
    assert_eq!(store.begin(new(&models[3])).unwrap().have_count(), 2);
}

#[test]
fn unwanted_staging_expires() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let (a, b, c) = (
        manifest("a", &[("f", 1)]),
        manifest("b", &[("f", 1)]),
        manifest("c", &[("f", 1)]),
    );
    for m in [&a, &b, &c] {
        store.begin(new(m)).unwrap();
    }
    let staged = store.find(&c.model).unwrap();
    staged.publish(&fill(&staged)).unwrap();
    assert_eq!(store.expire_staging(Duration::from_secs(3600), |_| false), []);
    assert_eq!(
        store.expire_staging(Duration::ZERO, |m| *m == a.model),
        std::slice::from_ref(&b.model)
    );
    let held: Vec<_> = store.holdings().into_iter().map(|h| h.model).collect();
    assert_eq!(held, [a.model.clone(), c.model.clone()]);
}

#[test]
fn fences_are_kept_per_model() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let fence = |recovery_epoch, attempt| Fence {
        recovery_epoch,
        attempt,
    };
    let m = usual();
    store.obey(&m.model, fence(1, 3)).unwrap();
    store.obey(&model("other"), fence(1, 1)).unwrap();
    store.begin(new(&m)).unwrap();
    drop(store);
    let store = open(dir.path());
    assert_eq!(store.highest_fence(), fence(1, 3));
    assert_eq!(store.holding(&m.model).unwrap().fence, fence(1, 3));
    assert!(matches!(
        store.obey(&m.model, fence(1, 2)),
        Err(FenceError::Stale { .. })
    ));
}

#[test]
fn a_model_of_empty_files_is_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let artifact = store.begin(new(&manifest("e", &[("a", 0), ("b/c", 0)]))).unwrap();
    assert_eq!(artifact.state(), ArtifactState::Whole);
    let path = artifact.publish(&artifact.seal_if_whole().unwrap()).unwrap();
    assert_eq!(fs::metadata(path.join("b/c")).unwrap().len(), 0);
}

/// Runs `look` while this process has no descriptor left: the classic fault that says nothing about a copy.
/// In a process of its own, because the limit is the process's.
fn without_descriptors<T>(look: impl FnOnce() -> T) -> T {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let before = getrlimit(Resource::Nofile);
    let none = Rlimit {
        current: Some(0),
        ..before
    };
    setrlimit(Resource::Nofile, none).unwrap();
    let result = look();
    setrlimit(Resource::Nofile, before).unwrap();
    result
}

#[test]
fn a_copy_that_cannot_be_examined_is_left_alone() {
    const CHILD: &str = "MOONCAKE_TEST_UNEXAMINED";
    if std::env::var_os(CHILD).is_none() {
        let me = std::env::current_exe().unwrap();
        let name = "store::tests::folder::a_copy_that_cannot_be_examined_is_left_alone";
        let child = std::process::Command::new(me)
            .args(["--exact", name, "--test-threads=1"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert!(
            child.status.success(),
            "{}",
            String::from_utf8_lossy(&child.stdout)
        );
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let artifact = store.begin(new(&usual())).unwrap();
    let path = artifact.publish(&fill(&artifact)).unwrap();
    let staged = ArtifactState::Staged {
        local_path: path.clone(),
    };
    let error = without_descriptors(|| store.recheck(artifact.model())).unwrap_err();
    assert!(
        matches!(error, StoreError::Unexamined { .. }) && error.retryable(),
        "{error}"
    );
    let error = without_descriptors(|| store.begin(new(&usual()))).unwrap_err();
    assert!(error.retryable(), "{error}");
    assert_eq!(store.begin(new(&usual())).unwrap().state(), staged);

    // The same at start: neither offered nor moved, and there again once it can be examined.
    let plumbing = store.inner.plumbing.clone();
    let record = artifact.staged_record();
    let looked = without_descriptors(|| recover::staged(&plumbing, &record).map(|a| a.is_some()));
    assert!(looked.is_err() && path.exists() && record.exists());
    store.inner.artifacts.lock().clear();
    assert_eq!(store.begin(new(&usual())).unwrap().state(), staged);
    assert_eq!(store.holdings().len(), 1);
    let quarantine = dir.path().join(".mooncake/quarantine");
    assert_eq!(fs::read_dir(quarantine).unwrap().count(), 0);
}

#[test]
fn stray_files_do_not_stop_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    fill(&store.begin(new(&usual())).unwrap());
    drop(store);
    let own = dir.path().join(".mooncake");
    for folder in ["staging", "trash", "staged", "quarantine"] {
        fs::write(own.join(folder).join("notes.txt"), "mine").unwrap();
    }
    fs::create_dir(own.join("staged/folder")).unwrap();
    fs::create_dir(own.join("staging/empty")).unwrap();
    let store = open(dir.path());
    assert_eq!(store.holdings().len(), 1);
    assert_eq!(store.begin(new(&usual())).unwrap().have_count(), 5);
    assert!(own.join("staging/notes.txt").exists(), "not ours to remove");
    assert!(!own.join("trash/notes.txt").exists());
}

#[test]
fn links_put_in_the_way_lead_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let artifact = store.begin(new(&usual())).unwrap();
    let data = artifact.folder();
    fs::remove_dir_all(data.join("sub")).unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), data.join("sub")).unwrap();
    fs::create_dir(elsewhere.path().join("dir")).unwrap();
    assert!(tree::create(&artifact.dir, &artifact.manifest).is_err());
    assert!(tree::sync_folders(&artifact.dir, &artifact.manifest, || (), || ()).is_err());
    assert!(artifact.write_own_block(3, &bytes(&artifact, 3, 0)).is_err());
    assert_eq!(
        fs::read_dir(elsewhere.path().join("dir")).unwrap().count(),
        0,
        "nothing was created outside"
    );
}

#[test]
fn resuming_looks_at_the_final_name_too() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    store.begin(new(&usual())).unwrap();
    let foreign = dir.path().join("local/org--m/r1/safetensors");
    fs::create_dir_all(&foreign).unwrap();
    let error = store.begin(new(&usual())).unwrap_err();
    assert_eq!(error.code(), "final_folder_exists");
    fs::remove_dir(&foreign).unwrap();
    store.begin(new(&usual())).unwrap();
}

#[test]
fn many_who_ask_for_the_root_compute_it_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let artifact = store.begin(new(&usual())).unwrap();
    fill_quietly(&artifact);
    let start = std::sync::Barrier::new(16);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                start.wait();
                artifact.seal_if_whole().unwrap()
            });
        }
    });
    assert_eq!(artifact.roots_computed.load(Ordering::Relaxed), 1);
}

/// Where space is only booked, what a rescan finds written is not booked any more.
#[test]
fn rescanned_blocks_are_not_booked_twice() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let artifact = store.begin(new(&usual())).unwrap();
    fill_quietly(&artifact);
    artifact.flush().unwrap();
    drop((store, artifact));
    let store = open(dir.path());
    let artifact = store.find(&usual().model).unwrap();
    artifact.rescan(&|| false); // the one in the background is done
    artifact.forget(&[1]).unwrap();
    let len = u64::from(BLOCK);
    let data = bytes(&artifact, 1, 0);
    let recorded = Recorded {
        digest: Algorithm::Blake3.digest(&data),
        own: true,
    };
    artifact.state.lock().unallocated_bytes = 3 * len;
    assert!(artifact.rescan_block(1, recorded));
    assert_eq!(artifact.unallocated_bytes(), 2 * len);
}
