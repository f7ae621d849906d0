//! Why a store does not open, and how a storage failure at run time reaches the process.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::watch;

/// What to do about a damaged or lost part of a master's disk. One sentence for every such message.
pub(crate) const REPLACE_MASTER: &str = "This master must not go on with what is left, because it may have promised what is \
     gone. If the other masters are well: remove this one from the membership, move its data folder away, and add it \
     again under a new node id. Otherwise restore the folder from a backup of the same instant, or a snapshot";

/// A store that does not open.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The folder cannot be used at all.
    #[error("data folder {}: {what}: {error}. Check that the path exists, that this user may write there, and that the disk is not full", path.display())]
    Folder {
        /// The folder or file.
        path: PathBuf,
        /// What was attempted.
        what: &'static str,
        /// The system's answer.
        error: io::Error,
    },
    /// Another process has it open.
    #[error("data folder {}: another process has it open ({detail}). Two masters must never share a folder: stop the other one, or give each its own", path.display())]
    Locked {
        /// The folder.
        path: PathBuf,
        /// RocksDB's own words.
        detail: String,
    },
    /// It belongs to something else.
    #[error("data folder {}: its {what} is \"{found}\", but this process was started with \"{wanted}\". Nothing was changed. Correct the flag or the path; a folder never moves to another cluster or node id", path.display())]
    Foreign {
        /// The folder.
        path: PathBuf,
        /// `cluster id` or `node id`.
        what: &'static str,
        /// What the disk says.
        found: String,
        /// What the options say.
        wanted: String,
    },
    /// Something that was written is damaged or missing.
    #[error("data folder {}: {record} is damaged: {detail}. Nothing was changed. {REPLACE_MASTER}", path.display())]
    Damaged {
        /// The folder or file.
        path: PathBuf,
        /// Which record.
        record: String,
        /// What is wrong with it.
        detail: String,
    },
    /// Written by a newer program.
    #[error("data folder {}: {record} has format version {found}, this program knows {known}. Nothing was changed. Start the newer program again", path.display())]
    Newer {
        /// The folder or file.
        path: PathBuf,
        /// Which record.
        record: String,
        /// Its version.
        found: u64,
        /// The newest known one.
        known: u64,
    },
    /// Offline work on it was cut off.
    #[error("data folder {}: {what} was begun here and not finished. {advice}", path.display())]
    Unfinished {
        /// The folder.
        path: PathBuf,
        /// Which command.
        what: String,
        /// What to do.
        advice: &'static str,
    },
    /// Offline work was asked of a folder that is not fit for it.
    #[error("data folder {}: {detail}. Nothing was changed", path.display())]
    Unfit {
        /// The folder.
        path: PathBuf,
        /// Why, and what to do.
        detail: String,
    },
    /// RocksDB failed in another way.
    #[error("data folder {}: {what}: {detail}. Check the disk (free space, `dmesg`) and start again", path.display())]
    Database {
        /// The folder.
        path: PathBuf,
        /// What was attempted.
        what: &'static str,
        /// RocksDB's own words.
        detail: String,
    },
    /// The state machine does not take the snapshot.
    #[error("snapshot {}: its checksum is right, but the state machine refuses it: {detail}. Start the program that wrote it, or a newer one", path.display())]
    Restore {
        /// The snapshot file.
        path: PathBuf,
        /// The state machine's own words.
        detail: String,
    },
}

/// The first storage failure of this process's life, for whoever has to end it.
///
/// After it nothing is acknowledged any more: every later write is refused with the same reason. openraft
/// gets the error as well and shuts down; the process must exit, because only reading everything again from
/// the disk tells what is really there.
#[derive(Clone, Debug)]
pub struct Fatal {
    first: Arc<watch::Sender<Option<Arc<str>>>>,
}

impl Fatal {
    pub(crate) fn new() -> Self {
        Self {
            first: Arc::new(watch::Sender::new(None)),
        }
    }

    /// Records a failure (only the first counts) and gives it back as the error to report.
    pub(crate) fn set(&self, what: impl Into<String>) -> io::Error {
        let what: Arc<str> = what.into().into();
        let first = self.first.send_if_modified(|slot| {
            if slot.is_some() {
                return false;
            }
            *slot = Some(Arc::clone(&what));
            true
        });
        if first {
            tracing::error!(error = %what, "the Raft store failed: this process must end and be started again");
        }
        io::Error::other(what.to_string())
    }

    /// The first failure, if there was one.
    pub fn get(&self) -> Option<Arc<str>> {
        self.first.borrow().clone()
    }

    /// `Err` once something failed.
    pub(crate) fn check(&self) -> io::Result<()> {
        match self.get() {
            None => Ok(()),
            Some(what) => Err(io::Error::other(format!(
                "the store failed earlier and takes nothing any more: {what}"
            ))),
        }
    }

    /// Waits for the first failure and gives its text. Never returns while all is well.
    pub async fn wait(&self) -> Arc<str> {
        let mut receiver = self.first.subscribe();
        let value = receiver.wait_for(Option::is_some).await.map(|slot| slot.clone());
        match value {
            Ok(Some(what)) => what,
            // The sender lives in `self`, so the channel cannot close; were it to, nothing failed.
            _ => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_failure_counts_and_wakes_every_waiter() {
        let fatal = Fatal::new();
        assert!(fatal.check().is_ok());
        let waiter = tokio::spawn({
            let fatal = fatal.clone();
            async move { fatal.wait().await }
        });
        fatal.set("first");
        fatal.set("second");
        assert_eq!(&*waiter.await.unwrap(), "first");
        assert_eq!(&*fatal.wait().await, "first");
        assert!(fatal.check().unwrap_err().to_string().contains("first"));
    }
}
