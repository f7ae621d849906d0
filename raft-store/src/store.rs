//! Opening a master's data folder.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;

use crate::database::{DROP_SYNC, Database};
use crate::error::{Fatal, OpenError};
use crate::log_store::{Log, LogStore};
use crate::machine::StateMachine;
use crate::meta::{self, Identity};
use crate::offline;
use crate::records;
use crate::sabotage;
use crate::snapshot::Snapshots;
use crate::snapshot_file::SnapshotReceiver;
use crate::state_machine::StateMachineStore;
use crate::tail::Tail;
use crate::types::{LogId, NodeId};
use crate::writer::Writer;

pub(crate) const SNAPSHOT_FOLDER: &str = "snapshots";

/// Who opens the folder.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The cluster that this process was started for.
    pub cluster_id: String,
    /// Its Raft node id.
    pub node_id: NodeId,
}

/// A master's data folder, open and checked.
///
/// Keep it as long as openraft uses what came from it; [`close`](Self::close) it after `Raft::shutdown`.
pub struct Store {
    identity: Identity,
    pristine: bool,
    only_vote: bool,
    fatal: Fatal,
    log: Arc<Log>,
    snapshots: Arc<Snapshots>,
    /// Taken by the first caller: two log stores would break the order of writes.
    log_store: Mutex<Option<LogStore>>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

/// Counters since the store was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteCounts {
    /// Group commits.
    pub writes: u64,
    /// Those of them that were synced before they were acknowledged.
    pub syncs: u64,
}

impl Store {
    /// Opens (creating it, if there is nothing) and checks everything: identity, vote, every log record from the purge
    /// point on, the newest snapshot. Blocking, and as long as reading all of it takes.
    ///
    /// Refused with a message that says what to do: another cluster's or node's folder, anything damaged or missing,
    /// anything written by a newer program, a folder that another process has open.
    pub fn open(path: impl AsRef<Path>, options: OpenOptions) -> Result<Self, OpenError> {
        Self::open_with(path.as_ref(), options, sabotage::is_broken(DROP_SYNC))
    }

    pub(crate) fn open_with(path: &Path, options: OpenOptions, drop_sync: bool) -> Result<Self, OpenError> {
        Self::open_between(path, options, drop_sync, || {})
    }

    /// `between`: what other processes do between the first look and the database's lock; nothing but in a test.
    pub(crate) fn open_between(
        path: &Path,
        options: OpenOptions,
        drop_sync: bool,
        between: impl FnOnce(),
    ) -> Result<Self, OpenError> {
        // Before anything is made in the folder; and once more under the lock, which offline work holds from before
        // its first change until after its last.
        offline::check_finished(path)?;
        between();
        let (database, created) = Database::open(path, drop_sync)?;
        offline::check_finished(path)?;
        let snapshot_folder = path.join(SNAPSHOT_FOLDER);
        if created && has_snapshots(&snapshot_folder) {
            return Err(OpenError::Damaged {
                path: path.to_owned(),
                record: "the database".into(),
                detail: format!("it is missing, but {} holds snapshots", snapshot_folder.display()),
            });
        }
        let (identity, meta) = meta::load(&database, &options.cluster_id, options.node_id)?;
        let last = records::verify(&database, &meta)?;
        let snapshots = Snapshots::open(&snapshot_folder)?;
        let snapshot = snapshots.current();
        let covered = snapshot.as_ref().and_then(|snapshot| snapshot.meta.last_log_id);
        check_whole(path, meta.purged, last, meta.committed, covered)?;
        snapshots.tidy()?;

        let fatal = Fatal::new();
        let has_log = last.is_some() || meta.purged.is_some() || snapshot.is_some();
        let pristine = meta.vote.is_none() && !has_log;
        let only_vote = meta.vote.is_some() && !has_log;
        tracing::info!(
            path = %path.display(), cluster_id = %identity.cluster_id, node_id = identity.node_id, disk_id = %identity.disk_id,
            vote = ?meta.vote, purged = ?meta.purged, last = ?last, committed = ?meta.committed, snapshot = ?covered, pristine,
            "Raft store opened and checked"
        );
        let database = Arc::new(database);
        let tail = Arc::new(Tail::new(&meta, last));
        let (queue, writer) = Writer::spawn(Arc::clone(&database), Arc::clone(&tail), fatal.clone())
            .map_err(|error| OpenError::Folder {
                path: path.to_owned(),
                what: "starting the writer thread",
                error,
            })?;
        let log = Arc::new(Log::new(database, tail, fatal.clone(), queue));
        Ok(Self {
            identity,
            pristine,
            only_vote,
            fatal,
            log_store: Mutex::new(Some(LogStore::new(Arc::clone(&log)))),
            log,
            snapshots: Arc::new(snapshots),
            writer: Mutex::new(Some(writer)),
        })
    }

    /// Who the disk belongs to.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Whether it held nothing (no vote, no log, no snapshot) when it was opened: only such a disk may be given to a
    /// new member or be bootstrapped.
    pub fn is_pristine(&self) -> bool {
        self.pristine
    }

    /// Whether it held a vote but neither log nor snapshot when it was opened: its master stopped while its cluster
    /// was being made, or while it was being added to one.
    pub fn holds_only_a_vote(&self) -> bool {
        self.only_vote
    }

    /// The log, for `Raft::new`. There is one: later calls give `None`.
    pub fn take_log_store(&self) -> Option<LogStore> {
        self.log_store.lock().take()
    }

    /// The state machine, for `Raft::new`, restored from the newest snapshot; its
    /// [`reader`](StateMachineStore::reader) is for everyone else. Call it once. Blocking.
    pub fn state_machine<M: StateMachine>(&self, machine: M) -> Result<StateMachineStore<M>, OpenError> {
        StateMachineStore::open(machine, Arc::clone(&self.snapshots), self.fatal.clone())
    }

    /// Begins to receive a snapshot of `size_bytes` from another master. Blocking.
    pub fn receive_snapshot(&self, size_bytes: u64) -> std::io::Result<SnapshotReceiver> {
        self.snapshots.receive(size_bytes)
    }

    /// A handle of what [`receive_snapshot`](Self::receive_snapshot) does, for the network's server side.
    pub fn snapshot_inbox(&self) -> SnapshotInbox {
        SnapshotInbox {
            snapshots: Arc::clone(&self.snapshots),
        }
    }

    /// Where the log ends, for whoever compares logs.
    pub fn log_end(&self) -> LogEnd {
        LogEnd {
            tail: Arc::clone(&self.log.tail),
        }
    }

    /// Tells of the first storage failure. Wait on it and end the process.
    pub fn fatal(&self) -> Fatal {
        self.fatal.clone()
    }

    /// How much was written and synced.
    pub fn write_counts(&self) -> WriteCounts {
        let (writes, syncs) = self.log.database.counts();
        WriteCounts { writes, syncs }
    }

    /// Waits until all that was queued is durable, ends the writer and closes the database. The log store and its
    /// readers must be gone (that is, after `Raft::shutdown`), otherwise the last of them closes it.
    pub async fn close(self) -> std::io::Result<()> {
        let flushed = self.log.barrier().await;
        let writer = self.writer.lock().take();
        drop(self);
        // Ends when the last sender is gone, which openraft's tasks may still hold for a moment.
        if let Some(writer) = writer {
            tokio::task::spawn_blocking(move || writer.join())
                .await
                .map_err(std::io::Error::other)?
                .map_err(|_| std::io::Error::other("the Raft log's writer thread panicked"))?;
        }
        flushed
    }
}

/// The end of a store's log, as it moves; cheap to clone, and does not keep the store open.
#[derive(Clone)]
pub struct LogEnd {
    tail: Arc<Tail>,
}

impl LogEnd {
    /// The last entry, whether a snapshot has taken its place or not. Of two disks of one cluster, the one whose last
    /// entry is greater (by term, then by index) holds all that the other could have acknowledged.
    pub fn last(&self) -> Option<LogId> {
        let (purged, last) = self.tail.bounds();
        last.max(purged)
    }
}

impl std::fmt::Debug for LogEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("LogEnd").field(&self.last()).finish()
    }
}

/// Receives snapshots into a store's folder; cheap to clone.
#[derive(Clone)]
pub struct SnapshotInbox {
    snapshots: Arc<Snapshots>,
}

impl SnapshotInbox {
    /// Begins to receive a snapshot of `size_bytes` from another master. Blocking.
    pub fn receive(&self, size_bytes: u64) -> std::io::Result<SnapshotReceiver> {
        self.snapshots.receive(size_bytes)
    }
}

fn has_snapshots(folder: &Path) -> bool {
    std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some())
}

/// The parts must fit together: nothing between the snapshot and the log may be missing.
pub(crate) fn check_whole(
    path: &Path,
    purged: Option<LogId>,
    last: Option<LogId>,
    committed: Option<LogId>,
    snapshot: Option<LogId>,
) -> Result<(), OpenError> {
    let damaged = |record: &str, detail| {
        Err(OpenError::Damaged {
            path: path.to_owned(),
            record: record.into(),
            detail,
        })
    };
    let index = |id: Option<LogId>| id.map(|id| id.index());
    if index(purged) > index(snapshot) {
        let have = snapshot.map_or("there is none".to_owned(), |id| {
            format!("the newest one ends at {id}")
        });
        let upto = purged.map(|id| id.to_string()).unwrap_or_default();
        return damaged(
            "the snapshot",
            format!("the log was purged up to {upto}, so a snapshot up to there must exist, but {have}"),
        );
    }
    if index(committed) > index(last).max(index(snapshot)) {
        let upto = committed.map(|id| id.to_string()).unwrap_or_default();
        return damaged(
            "the log",
            format!("entries up to {upto} were committed, but log and snapshot end before"),
        );
    }
    Ok(())
}
