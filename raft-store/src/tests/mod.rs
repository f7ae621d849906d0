//! Tests of the whole store. What has to die is a child process: this test binary, started again with one test.

mod crash;
mod damage;
mod identity;
mod offline;
mod raft;
mod snapshots;
mod suite;
mod writing;

use std::collections::BTreeMap;
use std::io::BufReader;
use std::path::Path;
use std::process::{Child, ChildStdout, Command as Process, Stdio};

use futures_util::stream;
use openraft::EntryPayload;
use openraft::storage::{IOFlushed, RaftLogStorage as _, RaftSnapshotBuilder as _, RaftStateMachine};

use crate::*;

/// Where a child finds its folder. Without it the children's tests have nothing to do.
const CHILD_FOLDER: &str = "MOONCAKE_RAFT_STORE_CHILD_FOLDER";
const CHILD_MODE: &str = "MOONCAKE_RAFT_STORE_CHILD_MODE";

/// A state machine that depends on every command and on their order.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Chain {
    count: u64,
    hash: u32,
    last_index: u64,
}

impl StateMachine for Chain {
    type Image = Self;

    fn apply(&mut self, log_id: LogId, command: &[u8]) -> Result<Vec<u8>, String> {
        let mut hasher = crc32fast::Hasher::new_with_initial(self.hash);
        hasher.update(command);
        self.hash = hasher.finalize();
        self.count += 1;
        self.last_index = log_id.index();
        Ok(self.count.to_le_bytes().to_vec())
    }

    fn image(&self) -> Self {
        self.clone()
    }

    fn encode(image: &Self) -> Vec<u8> {
        postcard::to_allocvec(image).unwrap()
    }

    fn decode(&self, snapshot: &[u8]) -> Result<Self, String> {
        postcard::from_bytes(snapshot).map_err(|error| error.to_string())
    }

    fn replace(&mut self, image: Self) -> Self {
        std::mem::replace(self, image)
    }
}

fn options() -> OpenOptions {
    OpenOptions {
        cluster_id: "test-cluster".into(),
        node_id: 1,
    }
}

fn open(path: &Path) -> Store {
    Store::open(path, options()).unwrap()
}

/// Why the folder does not open.
fn refused(path: &Path) -> String {
    match Store::open(path, options()) {
        Ok(_) => panic!("{} opened", path.display()),
        Err(error) => error.to_string(),
    }
}

/// What an entry of this term and index holds, so that whoever reads it can tell whether it is the right one.
fn content(term: u64, index: u64) -> Vec<u8> {
    let seed = [term.to_le_bytes(), index.to_le_bytes()].concat();
    seed.iter()
        .copied()
        .cycle()
        .take(16 + (index * 37 % 1500) as usize)
        .collect()
}

fn entry(term: u64, index: u64) -> Entry {
    Entry {
        log_id: log_id(term, index),
        payload: EntryPayload::Normal(Command(content(term, index))),
    }
}

fn assert_right(entry: &Entry) {
    let term = entry.log_id.committed_leader_id().term;
    assert_eq!(*entry, self::entry(term, entry.log_id.index()));
}

type Flushed = tokio::sync::oneshot::Receiver<std::io::Result<()>>;

fn flush_signal() -> (
    <<crate::Runtime as openraft::AsyncRuntime>::Oneshot as openraft::async_runtime::Oneshot>::Sender<
        std::io::Result<()>,
    >,
    Flushed,
) {
    use openraft::type_config::TypeConfigExt as _;
    TypeConfig::oneshot()
}

/// Appends and waits until it is durable.
async fn append(log: &mut LogStore, entries: Vec<Entry>) -> std::io::Result<()> {
    let (done, flushed) = flush_signal();
    log.append(entries, IOFlushed::signal(done)).await?;
    flushed.await.unwrap()
}

async fn apply<M: StateMachine>(machine: &mut StateMachineStore<M>, entries: Vec<Entry>) {
    machine
        .apply(stream::iter(entries.into_iter().map(|entry| Ok((entry, None)))))
        .await
        .unwrap();
}

async fn snapshot<M: StateMachine>(machine: &mut StateMachineStore<M>) -> Snapshot {
    machine
        .try_create_snapshot_builder(true)
        .await
        .unwrap()
        .build_snapshot()
        .await
        .unwrap()
}

async fn close(store: Store, log: LogStore) {
    drop(log);
    store.close().await.unwrap();
}

/// A folder with a vote, 30 entries of which 0..=9 are purged, a committed index and a snapshot up to 19.
async fn fill(path: &Path) {
    let store = open(path);
    let mut log = store.take_log_store().unwrap();
    let mut machine = store.state_machine(Chain::default()).unwrap();
    log.save_vote(&Vote::new_committed(3, 1)).await.unwrap();
    for index in 0..30 {
        append(&mut log, vec![entry(1 + index / 15, index)])
            .await
            .unwrap();
    }
    apply(
        &mut machine,
        (0..20).map(|index| entry(1 + index / 15, index)).collect(),
    )
    .await;
    snapshot(&mut machine).await;
    log.save_committed(Some(log_id(2, 20))).await.unwrap();
    log.purge(log_id(1, 9)).await.unwrap();
    close(store, log).await;
}

/// That it holds exactly what [`fill`] wrote.
async fn assert_filled(store: &Store, log: &mut LogStore) {
    let mut reader = log.get_log_reader().await;
    let entries = openraft::RaftLogReader::try_get_log_entries(&mut reader, ..)
        .await
        .unwrap();
    let expected: Vec<Entry> = (10..30).map(|index| entry(1 + index / 15, index)).collect();
    assert_eq!(entries, expected);
    assert_eq!(
        openraft::RaftLogReader::read_vote(&mut reader).await.unwrap(),
        Some(Vote::new_committed(3, 1))
    );
    assert_eq!(log.read_committed().await.unwrap(), Some(log_id(2, 20)));
    let machine = store.state_machine(Chain::default()).unwrap();
    assert_eq!(machine.reader().read().count, 20);
    assert_eq!(machine.reader().read().index(), 19);
}

/// Starts this test binary again with one test.
fn child(test: &str, folder: &Path, mode: &str) -> (Child, BufReader<ChildStdout>) {
    spawn(Process::new(std::env::current_exe().unwrap()), test, folder, mode)
}

fn spawn(mut process: Process, test: &str, folder: &Path, mode: &str) -> (Child, BufReader<ChildStdout>) {
    let mut child = process
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(CHILD_FOLDER, folder)
        .env(CHILD_MODE, mode)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    (child, output)
}

/// (folder, mode), in a child.
fn child_task() -> Option<(std::path::PathBuf, String)> {
    let folder = std::env::var_os(CHILD_FOLDER)?;
    Some((folder.into(), std::env::var(CHILD_MODE).unwrap_or_default()))
}

/// The files below a folder with this suffix.
fn files(folder: &Path, suffix: &str) -> BTreeMap<std::path::PathBuf, Vec<u8>> {
    std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().ends_with(suffix))
        .map(|path| (path.clone(), std::fs::read(&path).unwrap()))
        .collect()
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_folder(&path, &target);
        } else {
            std::fs::copy(&path, &target).unwrap();
        }
    }
}
