//! For tests, of every part of the client: an artifact's journal, held so that a write can be seen waiting for it.

use super::{Artifact, Store};
use std::{
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::Duration,
};

/// Longest wait; only ever reached by a test that fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// On a thread of its own, since its guard must not be kept across an await.
pub(crate) struct HeldJournal {
    release: mpsc::Sender<()>,
    holder: JoinHandle<()>,
}

impl HeldJournal {
    /// Returns when it is held.
    pub(crate) fn of(artifact: &Arc<Artifact>) -> Self {
        let artifact = artifact.clone();
        let (locked, lock) = mpsc::channel();
        let (release, until) = mpsc::channel::<()>();
        let holder = std::thread::spawn(move || {
            let journal = artifact.journal.lock();
            locked.send(()).unwrap();
            let _ = until.recv();
            drop(journal);
        });
        lock.recv().unwrap();
        Self { release, holder }
    }

    pub(crate) fn release(self) {
        self.release.send(()).unwrap();
        self.holder.join().unwrap();
    }
}

/// Until a write of this store waits for others' bytes to be journaled, or none does.
pub(crate) async fn writers_wait(store: &Store, wait: bool) {
    let changed = async {
        while (store.waiting_writers() > 0) != wait {
            tokio::task::yield_now().await;
        }
    };
    let in_time = tokio::time::timeout(PATIENCE, changed).await;
    assert!(in_time.is_ok(), "a write waits: {}, not {wait}", !wait);
}
