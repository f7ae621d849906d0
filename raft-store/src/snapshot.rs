//! The folder of snapshots: at most one good one, replaced atomically.
//!
//! The steps of a replacement, in this order: partial file → its bytes → fsync → rename → fsync of the folder →
//! older files removed. Guaranteed: a crash between any two leaves the old snapshot or the new one, whole; and a
//! new one is durable before the old one goes. What a crash leaves behind (partials, older files) is removed at the
//! next start, after the newest one was checked.
//!
//! A newest snapshot that is damaged is refused, though an older one may lie beside it: the log may have been
//! purged up to the newest.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::error::OpenError;
use crate::snapshot_file::{self, SnapshotData, SnapshotFileError, SnapshotReceiver};
use crate::types::{Snapshot, SnapshotMeta};

const SUFFIX: &str = ".snap";
const PARTIAL_SUFFIX: &str = ".partial";

/// A received snapshot larger than this is refused before a byte of it is written: the state it holds has to
/// fit in memory, and the state machine bounds what it keeps to about a quarter of this.
pub const MAX_SNAPSHOT_BYTES: u64 = 8 * 1024 * 1024 * 1024;

/// One step of a replacement; the place before it is where a test crashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Create,
    Write,
    SyncFile,
    Rename,
    SyncFolder,
    RemoveOld,
    Done,
}

#[cfg(test)]
pub(crate) type StepHook = Box<dyn Fn(Step) + Send + Sync>;

/// The snapshots' folder of one store.
pub(crate) struct Snapshots {
    folder: PathBuf,
    /// The newest snapshot. Held for a copy or a swap only, so it may be taken on an async thread.
    current: Mutex<Option<Snapshot>>,
    /// Held over a whole replacement, on a blocking thread, so that a snapshot that was built and one that was
    /// received meanwhile cannot interleave their steps. Taken before `current`.
    replacing: Mutex<()>,
    /// What a crash left behind, to be removed once the store is known to be whole.
    leftovers: Mutex<Vec<PathBuf>>,
    next_partial: AtomicU64,
    #[cfg(test)]
    pub(crate) hook: Mutex<Option<StepHook>>,
}

/// Sorts by term, then index: fixed width, and "nothing applied yet" (0) below index 0 (1).
fn file_name(meta: &SnapshotMeta) -> String {
    let (term, next) = match &meta.last_log_id {
        Some(id) => (id.committed_leader_id().term, id.index().saturating_add(1)),
        None => (0, 0),
    };
    format!("snapshot-{term:020}-{next:020}{SUFFIX}")
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

impl Snapshots {
    /// Opens the folder (creating it) and checks the newest snapshot. Removes nothing: see [`tidy`](Self::tidy).
    pub(crate) fn open(folder: &Path) -> Result<Self, OpenError> {
        let failed = |what| {
            move |error| OpenError::Folder {
                path: folder.to_owned(),
                what,
                error,
            }
        };
        fs::create_dir_all(folder).map_err(failed("creating the snapshot folder"))?;
        let (mut whole, mut leftovers) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(folder).map_err(failed("listing the snapshots"))? {
            let path = entry.map_err(failed("listing the snapshots"))?.path();
            match path.file_name().and_then(|name| name.to_str()) {
                Some(name) if name.ends_with(SUFFIX) => whole.push(path),
                Some(name) if name.ends_with(PARTIAL_SUFFIX) => leftovers.push(path),
                // Not ours, so not ours to remove.
                _ => {
                    tracing::warn!(path = %path.display(), "a file in the snapshot folder that is no snapshot")
                }
            }
        }
        whole.sort();
        let current = match whole.pop() {
            None => None,
            Some(path) => Some(Self::check(&path)?),
        };
        leftovers.append(&mut whole);
        // The folder's own name, too, must be durable before a snapshot in it is relied on.
        for folder in [Some(folder), folder.parent()].into_iter().flatten() {
            sync_folder(folder).map_err(failed("syncing the snapshot folder"))?;
        }
        Ok(Self {
            folder: folder.to_owned(),
            current: Mutex::new(current),
            replacing: Mutex::new(()),
            leftovers: Mutex::new(leftovers),
            next_partial: AtomicU64::new(0),
            #[cfg(test)]
            hook: Mutex::new(None),
        })
    }

    /// Removes what a crash left behind: partial files, and snapshots older than the newest.
    pub(crate) fn tidy(&self) -> Result<(), OpenError> {
        for path in std::mem::take(&mut *self.leftovers.lock()) {
            tracing::info!(path = %path.display(), "removing an older or unfinished snapshot");
            fs::remove_file(&path).map_err(|error| OpenError::Folder {
                path,
                what: "removing an older or unfinished snapshot",
                error,
            })?;
        }
        Ok(())
    }

    fn check(path: &Path) -> Result<Snapshot, OpenError> {
        let record = || match path.file_name() {
            Some(name) => format!("snapshot {}", name.display()),
            None => "snapshot".to_owned(),
        };
        let damaged = |detail: String| OpenError::Damaged {
            path: path.to_owned(),
            record: record(),
            detail,
        };
        let opened = SnapshotData::open(path, false).map_err(|error| damaged(error.to_string()))?;
        let meta = opened.verify().map_err(|error| match error {
            SnapshotFileError::Newer(found) => {
                let known = snapshot_file::VERSION.into();
                OpenError::Newer {
                    path: path.to_owned(),
                    record: record(),
                    found: found.into(),
                    known,
                }
            }
            other => damaged(other.to_string()),
        })?;
        let expected = file_name(&meta);
        if path.file_name().is_none_or(|name| name != expected.as_str()) {
            return Err(damaged(format!(
                "its content belongs to a file called {expected}"
            )));
        }
        Ok(Snapshot {
            meta,
            snapshot: opened,
        })
    }

    /// The newest snapshot.
    pub(crate) fn current(&self) -> Option<Snapshot> {
        self.current.lock().clone()
    }

    /// Writes a new snapshot and makes it the current one. Blocking. If a newer one came in between (a built one can
    /// be overtaken by a received one), that one stays and is returned.
    pub(crate) fn store(&self, meta: &SnapshotMeta, state: &[u8]) -> io::Result<Snapshot> {
        let _replacing = self.replacing.lock();
        if let Some(newer) = self.newer(meta) {
            return Ok(newer);
        }
        let partial = self.partial_path();
        self.step(Step::Create);
        let mut file = File::options().write(true).create_new(true).open(&partial)?;
        let written = (|| {
            self.step(Step::Write);
            snapshot_file::write(&mut file, meta, state)?;
            self.step(Step::SyncFile);
            file.sync_all()
        })();
        if let Err(error) = written {
            // The disk may be full: do not keep it so. The error that counts is the first.
            let _ = fs::remove_file(&partial);
            return Err(error);
        }
        self.publish(&partial, meta)
    }

    /// Makes a received (or another store's) snapshot the current one. Blocking. `data` was checked by the caller,
    /// `meta` is its own.
    pub(crate) fn adopt(&self, meta: &SnapshotMeta, data: &SnapshotData, state: &[u8]) -> io::Result<()> {
        let ours = data.path().parent() == Some(self.folder.as_path());
        if !(ours && data.is_partial()) {
            // The current one itself (nothing to do), or a file of somebody else, which is copied and not moved.
            return if ours {
                Ok(())
            } else {
                self.store(meta, state).map(drop)
            };
        }
        let _replacing = self.replacing.lock();
        if self.newer(meta).is_some() {
            return Ok(());
        }
        self.step(Step::SyncFile);
        File::open(data.path())?.sync_all()?;
        self.publish(data.path(), meta).map(drop)
    }

    fn newer(&self, meta: &SnapshotMeta) -> Option<Snapshot> {
        self.current()
            .filter(|current| current.meta.last_log_id > meta.last_log_id)
    }

    /// From a durable partial file to the current snapshot. The caller holds `replacing`.
    fn publish(&self, partial: &Path, meta: &SnapshotMeta) -> io::Result<Snapshot> {
        let path = self.folder.join(file_name(meta));
        self.step(Step::Rename);
        fs::rename(partial, &path)?;
        self.step(Step::SyncFolder);
        sync_folder(&self.folder)?;
        self.step(Step::RemoveOld);
        let new = Snapshot {
            meta: meta.clone(),
            snapshot: SnapshotData::open(&path, false)?,
        };
        let old = self.current.lock().replace(new.clone());
        if let Some(old) = old
            && old.snapshot.path() != path
            && let Err(error) = fs::remove_file(old.snapshot.path())
        {
            // Only space is lost, and the next start removes it.
            tracing::warn!(path = %old.snapshot.path().display(), %error, "an older snapshot could not be removed");
        }
        self.step(Step::Done);
        Ok(new)
    }

    /// Begins to receive a snapshot of `size_bytes`.
    pub(crate) fn receive(&self, size_bytes: u64) -> io::Result<SnapshotReceiver> {
        if size_bytes > MAX_SNAPSHOT_BYTES {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("a snapshot of {size_bytes} bytes is above the limit of {MAX_SNAPSHOT_BYTES}"),
            ));
        }
        SnapshotReceiver::create(self.partial_path(), size_bytes)
    }

    /// A name that is free: the folder had no partials when it was opened.
    fn partial_path(&self) -> PathBuf {
        let number = self.next_partial.fetch_add(1, Ordering::Relaxed);
        self.folder.join(format!("{number}{PARTIAL_SUFFIX}"))
    }

    #[cfg(not(test))]
    fn step(&self, _: Step) {}

    #[cfg(test)]
    fn step(&self, step: Step) {
        if let Some(hook) = &*self.hook.lock() {
            hook(step);
        }
    }
}
