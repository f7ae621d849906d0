//! Work on a master's data folder that no process runs on: recovery after the loss of a quorum, and restore.
//!
//! Guaranteed: a folder that another process has open is refused. A crash at any instant leaves either the old life,
//! untouched, or a folder that [`Store::open`](crate::Store::open) refuses until the same command has run to its
//! end, or the new life, whole: a marker file stands in the folder from before the first change until after the last.
//!
//! Not guaranteed: that nobody runs on another copy of the folder.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use rocksdb::WriteBatch;

use crate::database::Database;
use crate::error::OpenError;
use crate::meta::{self, Identity, Meta};
use crate::records;
use crate::snapshot::Snapshots;
use crate::store::{SNAPSHOT_FOLDER, check_whole};
use crate::types::{Entry, LogId, NodeId, SnapshotMeta, Vote};

/// Stands in a folder while offline work on it is under way; holds the command's name in its first line, then what the
/// command wants to know of the folder's old life when it is repeated.
const UNFINISHED_FILE: &str = "unfinished";
/// Made by `mkfs` on every file system of its own; no reason to call such a folder not empty.
const LOST_AND_FOUND: &str = "lost+found";
const RECOVER: &str = "`recover --force-new-cluster`";
const RESTORE: &str = "`restore`";
/// Steps of a recovery between writing the marker and removing it.
const STEPS: usize = 3;
/// Log entries decoded at once.
const READ_BYTES: usize = 4 << 20;

/// How a folder goes on: a snapshot, and a vote that is not below its last entry.
#[derive(Clone, Debug)]
pub struct NewLife {
    /// Who voted for whom, in a term that nobody of the old life has seen.
    pub vote: Vote,
    /// What the snapshot covers, the membership included.
    pub meta: SnapshotMeta,
    /// The state machine's bytes.
    pub state: Vec<u8>,
}

/// A data folder, open and checked, that no process runs on.
pub struct Offline {
    path: PathBuf,
    database: Database,
    snapshots: Snapshots,
    identity: Identity,
    meta: Meta,
    last: Option<LogId>,
    begun: Option<String>,
}

impl Offline {
    /// Opens a folder that a master has run on, and checks everything, as [`Store::open`](crate::Store::open) does.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, OpenError> {
        let path = path.as_ref();
        let unfit = |detail: &str| OpenError::Unfit {
            path: path.to_owned(),
            detail: detail.into(),
        };
        // Opening would create what is not there.
        if !path.join("db").join("CURRENT").exists() {
            return Err(unfit("no master has ever run on it: correct --data-dir"));
        }
        let unfinished_restore = |marker: &Option<Marker>| match marker {
            Some(marker) if marker.what != RECOVER => Err(unfit(
                "`restore` was begun on it and not finished: delete the folder and run `restore` again",
            )),
            _ => Ok(()),
        };
        unfinished_restore(&marker(path))?;
        let (database, _) = Database::open(path, false)?;
        // Under the database's lock it stays as it is.
        let marker = marker(path);
        unfinished_restore(&marker)?;
        let (identity, meta) = meta::read(&database)?;
        let identity =
            identity.ok_or_else(|| unfit("it holds no master's data yet, so there is nothing to recover"))?;
        let last = records::verify(&database, &meta)?;
        let snapshots = Snapshots::open(&path.join(SNAPSHOT_FOLDER))?;
        let covered = snapshots.current().and_then(|snapshot| snapshot.meta.last_log_id);
        check_whole(path, meta.purged, last, meta.committed, covered)?;
        snapshots.tidy()?;
        Ok(Self {
            path: path.to_owned(),
            database,
            snapshots,
            identity,
            meta,
            last,
            begun: marker.map(|marker| marker.note),
        })
    }

    /// The note of a recovery that was begun here and cut off: the folder may hold parts of the new life already.
    pub fn begun(&self) -> Option<&str> {
        self.begun.as_deref()
    }

    /// Who the folder belongs to.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The vote in it.
    pub fn vote(&self) -> Option<&Vote> {
        self.meta.vote.as_ref()
    }

    /// The end of its log, or of its snapshot where that reaches further.
    pub fn last_log_id(&self) -> Option<LogId> {
        let covered = self.snapshots.current().and_then(|s| s.meta.last_log_id);
        self.last.max(covered)
    }

    /// The newest snapshot.
    pub fn snapshot(&self) -> Result<Option<(SnapshotMeta, Vec<u8>)>, OpenError> {
        let Some(current) = self.snapshots.current() else {
            return Ok(None);
        };
        current
            .snapshot
            .read_all()
            .map(Some)
            .map_err(|error| OpenError::Damaged {
                path: current.snapshot.path().to_owned(),
                record: "the snapshot".into(),
                detail: error.to_string(),
            })
    }

    /// Gives every entry behind the snapshot to `each`, in order. An error of `each` ends it.
    pub fn entries<E: From<OpenError>>(&self, mut each: impl FnMut(Entry) -> Result<(), E>) -> Result<(), E> {
        let covered = self.snapshots.current().and_then(|s| s.meta.last_log_id);
        let first = match (covered, self.meta.first) {
            (Some(covered), _) => covered.index() + 1,
            (None, first) => first.unwrap_or(0),
        };
        let Some(last) = self.last.map(|last| last.index()) else {
            return Ok(());
        };
        let mut next = first;
        while next <= last {
            let entries = records::read(&self.database, next, last + 1, READ_BYTES).map_err(|error| {
                OpenError::Damaged {
                    path: self.path.clone(),
                    record: "the log".into(),
                    detail: error.to_string(),
                }
            })?;
            next += entries.len() as u64;
            entries.into_iter().try_for_each(&mut each)?;
        }
        Ok(())
    }

    /// Ends the old life: a new disk id, so that whoever knew the old one refuses this disk and is refused; the log
    /// replaced by the snapshot. Gives the new identity, which the membership in `new` must name: `new` is made from it.
    /// `note` is what [`begun`](Self::begun) says should it be cut off; a repeat keeps that of the first run.
    pub fn begin_new_life(
        self,
        note: &str,
        new: impl FnOnce(&Identity) -> NewLife,
    ) -> Result<Identity, OpenError> {
        let identity = self.new_identity();
        let new = new(&identity);
        self.begin_steps(note, &identity, &new, STEPS)?;
        unmark(&self.path).map_err(self.failed("removing the marker"))?;
        Ok(identity)
    }

    fn new_identity(&self) -> Identity {
        Identity {
            disk_id: meta::new_disk_id(),
            ..self.identity.clone()
        }
    }

    /// The first `steps` of the steps under the marker.
    fn begin_steps(
        &self,
        note: &str,
        identity: &Identity,
        new: &NewLife,
        steps: usize,
    ) -> Result<(), OpenError> {
        if self.begun.is_none() {
            mark(&self.path, RECOVER, note).map_err(self.failed("writing the marker of a recovery"))?;
        }
        if steps >= 1 {
            let mut batch = WriteBatch::default();
            meta::put_disk_id(&self.database, &mut batch, &identity.disk_id);
            meta::put_vote(&self.database, &mut batch, &new.vote);
            self.database
                .write(batch, true)
                .map_err(self.failed("writing the new disk id"))?;
        }
        if steps >= 2 {
            self.snapshots
                .store(&new.meta, &new.state)
                .map_err(self.failed("writing the new snapshot"))?;
        }
        if steps >= 3 {
            self.end_log(&new.meta)
                .map_err(self.failed("ending the old log"))?;
        }
        Ok(())
    }

    fn end_log(&self, meta: &SnapshotMeta) -> io::Result<()> {
        let mut batch = WriteBatch::default();
        if let Some(covered) = &meta.last_log_id {
            records::delete_upto(&self.database, &mut batch, covered.index());
            meta::put_purged(&self.database, &mut batch, covered);
        }
        meta::put_committed(&self.database, &mut batch, meta.last_log_id.as_ref());
        self.database.write(batch, true)
    }

    fn failed(&self, what: &'static str) -> impl FnOnce(io::Error) -> OpenError + use<> {
        folder_error(&self.path, what)
    }
}

/// Stops after some of the steps, as a crash does.
#[cfg(test)]
pub(crate) fn cut_off_after(
    offline: Offline,
    steps: usize,
    note: &str,
    new: impl FnOnce(&Identity) -> NewLife,
) {
    let identity = offline.new_identity();
    let new = new(&identity);
    offline.begin_steps(note, &identity, &new, steps).unwrap();
}

/// Makes the folder of a master that begins with a snapshot. `path` must not exist, or be empty but for the
/// `lost+found` of a file system. The disk id in `disk_id` is the one that the membership of `new` names.
pub fn create_folder(
    path: impl AsRef<Path>,
    cluster_id: &str,
    node_id: NodeId,
    disk_id: &str,
    new: &NewLife,
) -> Result<(), OpenError> {
    let path = path.as_ref();
    let failed = |what| folder_error(path, what);
    check_finished(path)?;
    match fs::read_dir(path).map(holds_something) {
        Ok(true) => {
            return Err(OpenError::Unfit {
                path: path.to_owned(),
                detail: "it is not empty, and a restore never writes over anything: give another --data-dir, or move \
                         this one away"
                    .into(),
            });
        }
        Ok(false) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed("listing it")(error)),
    }
    fs::create_dir_all(path).map_err(failed("creating it"))?;
    mark(path, RESTORE, "").map_err(failed("writing the marker of a restore"))?;
    let (database, _) = Database::open(path, false)?;
    let identity = Identity {
        cluster_id: cluster_id.to_owned(),
        node_id,
        disk_id: disk_id.to_owned(),
    };
    meta::create(&database, &identity)?;
    let snapshots = Snapshots::open(&path.join(SNAPSHOT_FOLDER))?;
    snapshots
        .store(&new.meta, &new.state)
        .map_err(failed("writing the snapshot"))?;
    let mut batch = WriteBatch::default();
    meta::put_vote(&database, &mut batch, &new.vote);
    meta::put_committed(&database, &mut batch, new.meta.last_log_id.as_ref());
    if let Some(covered) = &new.meta.last_log_id {
        meta::put_purged(&database, &mut batch, covered);
    }
    database.write(batch, true).map_err(failed("writing the vote"))?;
    unmark(path).map_err(failed("removing the marker"))
}

/// Refuses a folder on which offline work was cut off.
pub(crate) fn check_finished(path: &Path) -> Result<(), OpenError> {
    let Some(Marker { what, .. }) = marker(path) else {
        return Ok(());
    };
    let advice = match what == RECOVER {
        true => "Run it again: it goes on where it stopped",
        false => "Delete the folder and run it again",
    };
    Err(OpenError::Unfinished {
        path: path.to_owned(),
        what,
        advice,
    })
}

/// What an unreadable entry is, nobody knows: it counts as something.
fn holds_something(entries: fs::ReadDir) -> bool {
    let mut entries = entries.map(|entry| entry.map(|entry| entry.file_name()));
    entries.any(|name| !name.is_ok_and(|name| name == LOST_AND_FOUND))
}

struct Marker {
    /// The command.
    what: String,
    note: String,
}

fn marker(path: &Path) -> Option<Marker> {
    let text = match fs::read_to_string(path.join(UNFINISHED_FILE)) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(_) => "offline work".into(),
    };
    let (what, note) = text.split_once('\n').unwrap_or((&text, ""));
    Some(Marker {
        what: what.trim().to_owned(),
        note: note.trim().to_owned(),
    })
}

fn mark(path: &Path, what: &str, note: &str) -> io::Result<()> {
    // Whole before it has its name: a crash must not leave a marker that does not say what it stands for.
    let partial = path.join(UNFINISHED_FILE).with_extension("partial");
    let mut file = File::create(&partial)?;
    writeln!(file, "{what}\n{note}")?;
    file.sync_all()?;
    fs::rename(&partial, path.join(UNFINISHED_FILE))?;
    File::open(path)?.sync_all()
}

fn unmark(path: &Path) -> io::Result<()> {
    fs::remove_file(path.join(UNFINISHED_FILE))?;
    File::open(path)?.sync_all()
}

fn folder_error(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> OpenError + use<> {
    let path = path.to_owned();
    move |error| OpenError::Folder { path, what, error }
}
