//! Snapshots: contents, replacement, and a crash between any two steps.

use std::sync::Arc;

use parking_lot::Mutex;

use super::*;
use crate::snapshot::{Snapshots, Step};

const STEPS: [Step; 7] = [
    Step::Create,
    Step::Write,
    Step::SyncFile,
    Step::Rename,
    Step::SyncFolder,
    Step::RemoveOld,
    Step::Done,
];

fn open_folder(folder: &Path) -> Snapshots {
    let snapshots = Snapshots::open(folder).unwrap();
    snapshots.tidy().unwrap();
    snapshots
}

fn meta(index: u64) -> SnapshotMeta {
    SnapshotMeta {
        last_log_id: Some(log_id(1, index)),
        last_membership: StoredMembership::default(),
    }
}

fn state(index: u64) -> Vec<u8> {
    content(7, index).repeat(20)
}

fn assert_holds(snapshots: &Snapshots, index: u64) {
    let current = snapshots.current().unwrap();
    assert_eq!(current.meta, meta(index));
    assert_eq!(current.snapshot.read_all().unwrap(), (meta(index), state(index)));
}

fn names(folder: &Path) -> Vec<String> {
    files(folder, "")
        .into_keys()
        .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
        .collect()
}

/// Receives the snapshot of `index` from another folder, as the network does.
fn receive(snapshots: &Snapshots, index: u64) -> SnapshotData {
    let other = tempfile::tempdir().unwrap();
    let sent = open_folder(other.path())
        .store(&meta(index), &state(index))
        .unwrap()
        .snapshot;
    let mut receiver = snapshots.receive(sent.size_bytes()).unwrap();
    let mut offset = 0;
    while offset < sent.size_bytes() {
        let piece = sent.read_at(offset, 1000).unwrap();
        receiver.write(&piece).unwrap();
        offset += piece.len() as u64;
    }
    let (received, data) = receiver.finish().unwrap();
    assert_eq!(received, meta(index));
    data
}

#[test]
fn the_steps_come_in_the_safe_order() {
    let folder = tempfile::tempdir().unwrap();
    let snapshots = open_folder(folder.path());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let recorder = Arc::clone(&seen);
    *snapshots.hook.lock() = Some(Box::new(move |step| recorder.lock().push(step)));
    snapshots.store(&meta(5), &state(5)).unwrap();
    assert_eq!(*seen.lock(), STEPS);
    seen.lock().clear();
    let data = receive(&snapshots, 6);
    assert!(seen.lock().is_empty(), "receiving alone changes nothing");
    snapshots.adopt(&meta(6), &data, &state(6)).unwrap();
    assert_eq!(*seen.lock(), STEPS[2..]);
    assert_holds(&snapshots, 6);
    assert_eq!(names(folder.path()).len(), 1, "the older one is gone");
}

/// The child: replaces snapshot 5 by 9 and dies at the step that its mode names.
#[test]
fn child_dies_at_a_step() {
    let Some((folder, mode)) = child_task() else {
        return;
    };
    let snapshots = open_folder(&folder);
    let (how, step) = mode.split_once(' ').unwrap();
    let step = step.to_owned();
    let received = (how == "adopt").then(|| receive(&snapshots, 9));
    *snapshots.hook.lock() = Some(Box::new(move |at| {
        if format!("{at:?}") == step {
            std::process::abort();
        }
    }));
    match received {
        None => drop(snapshots.store(&meta(9), &state(9)).unwrap()),
        Some(data) => snapshots.adopt(&meta(9), &data, &state(9)).unwrap(),
    }
    panic!("the step was never reached");
}

#[test]
fn a_crash_between_any_two_steps_leaves_the_old_one_or_the_new_one() {
    for (how, steps) in [("store", &STEPS[..]), ("adopt", &STEPS[2..])] {
        for step in steps {
            let folder = tempfile::tempdir().unwrap();
            open_folder(folder.path()).store(&meta(5), &state(5)).unwrap();
            let (mut child, _output) = child(
                "tests::snapshots::child_dies_at_a_step",
                folder.path(),
                &format!("{how} {step:?}"),
            );
            let status = child.wait().unwrap();
            assert_eq!(
                std::os::unix::process::ExitStatusExt::signal(&status),
                Some(6),
                "{how} {step:?}: {status}"
            );

            let snapshots = open_folder(folder.path());
            let renamed = matches!(step, Step::SyncFolder | Step::RemoveOld | Step::Done);
            assert_holds(&snapshots, if renamed { 9 } else { 5 });
            assert_eq!(
                names(folder.path()).len(),
                1,
                "{how} {step:?}: nothing else is left after a start"
            );
            // And it goes on from there.
            snapshots.store(&meta(11), &state(11)).unwrap();
            assert_holds(&open_folder(folder.path()), 11);
        }
    }
}

#[test]
fn a_built_snapshot_never_replaces_a_newer_received_one() {
    let folder = tempfile::tempdir().unwrap();
    let snapshots = open_folder(folder.path());
    let data = receive(&snapshots, 20);
    snapshots.adopt(&meta(20), &data, &state(20)).unwrap();
    assert_eq!(snapshots.store(&meta(10), &state(10)).unwrap().meta, meta(20));
    assert_holds(&snapshots, 20);
}

#[test]
fn a_handle_reads_to_its_end_after_the_file_was_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let snapshots = open_folder(folder.path());
    let old = snapshots.store(&meta(1), &state(1)).unwrap().snapshot;
    let before = old.read_at(0, usize::MAX).unwrap();
    snapshots.store(&meta(2), &state(2)).unwrap();
    assert_eq!(old.read_at(0, usize::MAX).unwrap(), before);
    assert_eq!(old.read_all().unwrap(), (meta(1), state(1)));
}

#[test]
fn what_arrives_short_long_or_damaged_is_refused_and_removed() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let snapshots = open_folder(folder.path());
    let sent = open_folder(other.path())
        .store(&meta(1), &state(1))
        .unwrap()
        .snapshot;
    let good = sent.read_at(0, usize::MAX).unwrap();
    let size = good.len() as u64;

    let mut short = snapshots.receive(size).unwrap();
    short.write(&good[..good.len() - 1]).unwrap();
    assert!(short.finish().unwrap_err().to_string().contains("ended after"));
    let mut long = snapshots.receive(size - 1).unwrap();
    assert!(long.write(&good).unwrap_err().to_string().contains("more than"));
    drop(long);
    let mut bad = good.clone();
    bad[good.len() / 2] ^= 4;
    let mut damaged = snapshots.receive(size).unwrap();
    damaged.write(&bad).unwrap();
    let error = damaged.finish().unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
    assert!(error.to_string().contains("SHA-256"), "{error}");
    assert!(snapshots.receive(MAX_SNAPSHOT_BYTES + 1).is_err());
    drop(snapshots.receive(10).unwrap());
    assert!(names(folder.path()).is_empty(), "{:?}", names(folder.path()));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_installed_snapshot_is_the_state_and_survives_a_restart() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fill(one.path()).await;
    let (from, to) = (open(one.path()), open(two.path()));
    let mut source = from.state_machine(Chain::default()).unwrap();
    let sent = source.get_current_snapshot().await.unwrap().unwrap();
    let mut receiver = to.receive_snapshot(sent.snapshot.size_bytes()).unwrap();
    receiver
        .write(&sent.snapshot.read_at(0, usize::MAX).unwrap())
        .unwrap();
    let (meta, data) = receiver.finish().unwrap();
    let mut target = to.state_machine(Chain::default()).unwrap();
    let mut progress = target.reader().progress();
    target.install_snapshot(&meta, data).await.unwrap();
    progress.changed().await.unwrap();
    assert_eq!(*progress.borrow(), 20);
    assert_eq!(target.reader().read().machine, source.reader().read().machine);
    drop(target);
    to.close().await.unwrap();
    let to = open(two.path());
    assert!(!to.is_pristine());
    let target = to.state_machine(Chain::default()).unwrap();
    assert_eq!(target.reader().read().machine, source.reader().read().machine);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_the_machine_refuses_is_not_installed() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let snapshots = open_folder(one.path());
    let alien = snapshots.store(&meta(3), b"").unwrap();
    let store = open(two.path());
    let mut machine = store.state_machine(Chain::default()).unwrap();
    assert!(
        machine
            .install_snapshot(&alien.meta, alien.snapshot)
            .await
            .is_err()
    );
    assert!(store.fatal().get().unwrap().contains("installing a snapshot"));
    assert!(machine.get_current_snapshot().await.unwrap().is_none());
}

/// A gate: whoever has it waits until the other end is dropped.
type Gate = Mutex<Option<std::sync::mpsc::Receiver<()>>>;

fn pass(gate: &Gate) {
    let gate = gate.lock().take();
    if let Some(gate) = gate {
        assert!(gate.recv().is_err(), "nothing is ever sent");
    }
}

/// A machine whose copy is encoded, and a snapshot decoded, only when the test says so.
#[derive(Default)]
struct Slow {
    chain: Chain,
    encode: Arc<Gate>,
    decode: Gate,
}

impl StateMachine for Slow {
    type Image = (Chain, Arc<Gate>);

    fn apply(&mut self, log_id: LogId, command: &[u8]) -> Result<Vec<u8>, String> {
        self.chain.apply(log_id, command)
    }

    fn image(&self) -> Self::Image {
        (self.chain.clone(), self.encode.clone())
    }

    fn encode((copy, gate): &Self::Image) -> Vec<u8> {
        pass(gate);
        Chain::encode(copy)
    }

    fn decode(&self, snapshot: &[u8]) -> Result<Self::Image, String> {
        pass(&self.decode);
        Ok((self.chain.decode(snapshot)?, self.encode.clone()))
    }

    fn replace(&mut self, (copy, gate): Self::Image) -> Self::Image {
        (self.chain.replace(copy), gate)
    }
}

const LONG: std::time::Duration = std::time::Duration::from_secs(10);

/// openraft asks for the builder from the task that applies entries: while it waits, every write does.
#[tokio::test(flavor = "multi_thread")]
async fn entries_are_applied_while_a_snapshot_is_encoded() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path());
    let (go, gate) = std::sync::mpsc::channel();
    let encode: Arc<Gate> = Arc::new(Mutex::new(Some(gate)));
    let machine = Slow {
        encode: encode.clone(),
        ..Slow::default()
    };
    let mut machine = store.state_machine(machine).unwrap();
    let reader = machine.reader();
    apply(&mut machine, vec![entry(1, 0)]).await;
    // In tasks of their own: whoever waits for the encoding blocks a thread, and that must not be the one with the clock.
    let builder = tokio::spawn(async move {
        let builder = machine.try_create_snapshot_builder(true).await.unwrap();
        (machine, builder)
    });
    let (mut machine, mut builder) = tokio::time::timeout(LONG, builder)
        .await
        .expect("the builder waits for the encoding")
        .unwrap();
    let built = tokio::spawn(async move { builder.build_snapshot().await.unwrap() });
    let encoding = async {
        while encode.lock().is_some() {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(LONG, encoding).await.expect("it is encoded");
    let applied = tokio::spawn(async move { apply(&mut machine, vec![entry(1, 1)]).await });
    let applied = tokio::time::timeout(LONG, applied).await;
    applied.expect("entries wait for the encoding").unwrap();
    drop(go);
    let built = built.await.unwrap();
    assert_eq!(built.meta.last_log_id, Some(log_id(1, 0)), "as of the copy");
    let (_, state) = built.snapshot.read_all().unwrap();
    let copied: Chain = postcard::from_bytes(&state).unwrap();
    assert_eq!((copied.count, copied.last_index), (1, 0), "as of the copy");
    assert_eq!(reader.read().chain.count, 2);
}

/// A follower that gets a snapshot still answers.
#[tokio::test(flavor = "multi_thread")]
async fn the_old_state_is_read_while_a_snapshot_is_decoded() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let sender = open(folders[0].path());
    let mut leader = sender.state_machine(Chain::default()).unwrap();
    apply(&mut leader, vec![entry(1, 0), entry(1, 1)]).await;
    let sent = snapshot(&mut leader).await;

    let store = open(folders[1].path());
    let (go, gate) = std::sync::mpsc::channel();
    let machine = Slow {
        decode: Mutex::new(Some(gate)),
        ..Slow::default()
    };
    let mut machine = store.state_machine(machine).unwrap();
    let reader = machine.reader();
    let installed = tokio::spawn(async move { machine.install_snapshot(&sent.meta, sent.snapshot).await });
    let while_decoding = {
        let reader = reader.clone();
        // Until the other thread is at the gate, and takes what is in it.
        tokio::task::spawn_blocking(move || {
            while reader.read().decode.lock().is_some() {
                std::thread::yield_now();
            }
            reader.read().chain.count
        })
    };
    let count = tokio::time::timeout(LONG, while_decoding).await;
    assert_eq!(count.expect("readers wait for the decoding").unwrap(), 0);
    drop(go);
    installed.await.unwrap().unwrap();
    assert_eq!(reader.read().chain.count, 2);
}
