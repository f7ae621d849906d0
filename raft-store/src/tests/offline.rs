//! Recovery and restore on folders that no process runs on.

use std::collections::BTreeSet;

use super::*;

const RECOVERED_TERM: u64 = 9;

fn node(disk_id: &str) -> Node {
    Node {
        rpc_address: "h:1".into(),
        http_address: "h:2".into(),
        disk_id: disk_id.into(),
    }
}

fn new_life(index: u64, disk_id: &str) -> NewLife {
    let at = log_id(RECOVERED_TERM, index);
    let membership =
        Membership::new(vec![BTreeSet::from([1])], BTreeMap::from([(1, node(disk_id))])).unwrap();
    NewLife {
        vote: Vote::new(RECOVERED_TERM, 1),
        meta: SnapshotMeta {
            last_log_id: Some(at),
            last_membership: StoredMembership::new(Some(at), membership),
        },
        state: postcard::to_allocvec(&Chain {
            count: index,
            ..Chain::default()
        })
        .unwrap(),
    }
}

/// A folder with entries 1 to 20 of term 3 and a snapshot up to 8. Gives its disk id.
async fn lived_in(path: &Path) -> String {
    let store = open(path);
    let mut log = store.take_log_store().unwrap();
    let mut machine = store.state_machine(Chain::default()).unwrap();
    log.save_vote(&Vote::new_committed(3, 2)).await.unwrap();
    append(&mut log, (1..=20).map(|index| entry(3, index)).collect())
        .await
        .unwrap();
    apply(&mut machine, (1..=8).map(|index| entry(3, index)).collect()).await;
    machine
        .get_snapshot_builder()
        .await
        .build_snapshot()
        .await
        .unwrap();
    let disk = store.identity().disk_id.clone();
    drop((log, machine));
    store.close().await.unwrap();
    disk
}

async fn assert_new_life(path: &Path, index: u64, disk_id: &str) {
    let store = open(path);
    assert_eq!(store.identity().disk_id, disk_id);
    let machine = store.state_machine(Chain::default()).unwrap();
    {
        let reader = machine.reader();
        let applied = reader.read();
        assert_eq!(applied.last_applied, Some(log_id(RECOVERED_TERM, index)));
        assert_eq!(applied.machine.count, index);
        assert_eq!(applied.membership.get_node(&1), Some(&node(disk_id)));
    }
    drop(machine);
    // Its writer holds the database's lock until it has ended.
    store.close().await.unwrap();
}

#[tokio::test]
async fn a_recovered_folder_begins_a_new_life_behind_its_whole_log() {
    let folder = tempfile::tempdir().unwrap();
    let old_disk = lived_in(folder.path()).await;
    let offline = Offline::open(folder.path()).unwrap();
    assert_eq!(offline.last_log_id(), Some(log_id(3, 20)));
    assert_eq!(offline.vote(), Some(&Vote::new_committed(3, 2)));
    assert_eq!(
        offline.snapshot().unwrap().unwrap().0.last_log_id,
        Some(log_id(3, 8))
    );
    let mut seen = Vec::new();
    offline
        .entries(|entry| {
            assert_right(&entry);
            seen.push(entry.log_id.index());
            Ok::<(), OpenError>(())
        })
        .unwrap();
    assert_eq!(
        seen,
        (9..=20).collect::<Vec<_>>(),
        "what the snapshot does not cover"
    );
    let identity = offline
        .begin_new_life("", |identity| new_life(21, &identity.disk_id))
        .unwrap();
    assert_ne!(
        identity.disk_id, old_disk,
        "whoever knew the old disk refuses this one"
    );
    assert_new_life(folder.path(), 21, &identity.disk_id).await;
    // And again, should it be needed.
    let again = Offline::open(folder.path()).unwrap();
    assert_eq!(again.last_log_id(), Some(log_id(RECOVERED_TERM, 21)));
    again
        .entries(|entry| -> Result<(), OpenError> { panic!("{entry:?}") })
        .unwrap();
}

#[tokio::test]
async fn a_recovery_cut_off_at_any_step_is_refused_until_it_is_repeated() {
    // What each step leaves behind is what the steps before it made: the marker alone; marker and identity; marker,
    // identity and snapshot; all but the removal of the marker.
    for steps in 0..4 {
        let folder = tempfile::tempdir().unwrap();
        lived_in(folder.path()).await;
        if steps == 0 {
            std::fs::write(
                folder.path().join("unfinished"),
                "`recover --force-new-cluster`\n",
            )
            .unwrap();
        } else {
            let offline = Offline::open(folder.path()).unwrap();
            assert_eq!(offline.begun(), None);
            crate::offline::cut_off_after(offline, steps, "members 1, 2, 3", |identity| {
                new_life(21, &identity.disk_id)
            });
        }
        let why = refused(folder.path());
        assert!(
            why.contains("Run it again") && !why.contains("members"),
            "{steps}: {why}"
        );
        let offline = Offline::open(folder.path()).unwrap();
        // What was noted of the old life outlasts a repeat that is cut off too, and sees the new one.
        if steps > 0 {
            assert_eq!(offline.begun(), Some("members 1, 2, 3"), "{steps}");
            let next = offline.last_log_id().unwrap().index() + 1;
            crate::offline::cut_off_after(offline, 1, "members 1", |identity| {
                new_life(next, &identity.disk_id)
            });
        } else {
            drop(offline);
        }
        let offline = Offline::open(folder.path()).unwrap();
        let noted = ["", "members 1, 2, 3"][usize::from(steps > 0)];
        assert_eq!(offline.begun(), Some(noted), "{steps}");
        let next = offline.last_log_id().unwrap().index() + 1;
        assert!(next == 21 || next == 22, "{steps}: {next}");
        let identity = offline
            .begin_new_life("members 1", |identity| new_life(next, &identity.disk_id))
            .unwrap();
        assert_new_life(folder.path(), next, &identity.disk_id).await;
    }
}

#[tokio::test]
async fn only_a_master_s_own_idle_folder_is_recovered() {
    let why = |path: &Path| match Offline::open(path) {
        Ok(_) => panic!("{} opened", path.display()),
        Err(error) => error.to_string(),
    };
    let folder = tempfile::tempdir().unwrap();
    assert!(why(folder.path()).contains("no master has ever run on it"));
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        0,
        "nothing was made"
    );
    let running = open(folder.path());
    assert!(why(folder.path()).contains("another process has it open"));
    running.close().await.unwrap();
}

#[tokio::test]
async fn a_restore_makes_a_folder_and_never_writes_over_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new");
    // A disk of its own has this.
    std::fs::create_dir_all(path.join("lost+found")).unwrap();
    create_folder(&path, "test-cluster", 1, "disk", &new_life(5, "disk")).unwrap();
    assert_new_life(&path, 5, "disk").await;
    let again = create_folder(&path, "test-cluster", 1, "disk", &new_life(5, "disk"));
    assert!(
        again
            .unwrap_err()
            .to_string()
            .contains("never writes over anything")
    );
    // Cut off, it is refused by everyone, with what to do.
    std::fs::write(path.join("unfinished"), "`restore`\n").unwrap();
    assert!(refused(&path).contains("Delete the folder"));
    let again = create_folder(&path, "test-cluster", 1, "disk", &new_life(5, "disk"));
    assert!(again.unwrap_err().to_string().contains("Delete the folder"));
    assert!(matches!(Offline::open(&path), Err(OpenError::Unfit { .. })));
}

#[tokio::test]
async fn a_recovery_that_begins_and_breaks_off_while_a_master_opens_the_folder_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    lived_in(folder.path()).await;
    let opened = Store::open_between(folder.path(), options(), false, || {
        let offline = Offline::open(folder.path()).unwrap();
        crate::offline::cut_off_after(offline, 1, "", |identity| new_life(21, &identity.disk_id));
    });
    assert!(matches!(opened, Err(OpenError::Unfinished { .. })));
}

#[tokio::test]
async fn the_end_of_the_log_is_told_also_where_only_a_snapshot_is_left() {
    let folder = tempfile::tempdir().unwrap();
    lived_in(folder.path()).await;
    let store = open(folder.path());
    assert_eq!(store.log_end().last(), Some(log_id(3, 20)));
    store.close().await.unwrap();
    let offline = Offline::open(folder.path()).unwrap();
    offline
        .begin_new_life("", |identity| new_life(21, &identity.disk_id))
        .unwrap();
    let store = open(folder.path());
    assert_eq!(store.log_end().last(), Some(log_id(RECOVERED_TERM, 21)));
    store.close().await.unwrap();
}
