//! What every artifact of one store shares: the folder's lock, open files, and the budget of bytes that
//! are not yet journaled, with the thread that works it off.

use super::{artifact::Artifact, types::StoreConfig};
use parking_lot::{Condvar, Mutex};
use std::{
    collections::HashMap,
    fs::File,
    io,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::sync::watch;

/// Most data files held open at once, over all artifacts: well under the usual limit of 1024 descriptors.
const MAX_OPEN_FILES: usize = 256;
/// Pending bytes from which the flusher does not wait for the interval: large enough that a sync is shared
/// by several blocks, and a quarter of the default budget, so that writers seldom wait.
const FLUSH_BATCH_BYTES: u64 = 16 << 20;
/// How soon an artifact whose journal was in use (it is being published, say) is looked at again: often enough for
/// writers that wait for its bytes, seldom enough to cost nothing.
const LOCKED_RETRY: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(crate) struct Plumbing {
    pub(crate) config: StoreConfig,
    /// `<root>/.mooncake`.
    pub(crate) own: PathBuf,
    /// Holds the `flock`; released when the last artifact and the store are gone.
    pub(crate) _lock: File,
    pub(crate) files: FileCache,
    /// Short sections, never across I/O; nothing else is taken while it is held.
    budget: Mutex<Budget>,
    /// With `budget`: bytes were journaled.
    freed: Condvar,
    /// With `budget`: the flusher has something to do.
    work: Condvar,
    pub(crate) changed: watch::Sender<u64>,
    next_id: AtomicU64,
}

#[derive(Debug, Default)]
struct Budget {
    unjournaled_bytes: u64,
    waiting_writers: usize,
    dirty: Vec<Arc<Artifact>>,
    dirty_since: Option<Instant>,
    stopped: bool,
}

impl Plumbing {
    pub(crate) fn new(config: StoreConfig, own: PathBuf, lock: File) -> Self {
        Self {
            config,
            own,
            _lock: lock,
            files: FileCache::default(),
            budget: Mutex::default(),
            freed: Condvar::new(),
            work: Condvar::new(),
            changed: watch::Sender::new(0),
            next_id: AtomicU64::new(0),
        }
    }

    pub(crate) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn bump(&self) {
        self.changed.send_modify(|n| *n += 1);
    }

    /// Waits until `bytes` more may be unjournaled. One block larger than the whole budget goes alone.
    /// `false`: the store is shutting down, nobody would journal them.
    #[must_use]
    pub(crate) fn reserve(&self, bytes: u64) -> bool {
        let mut budget = self.budget.lock();
        while !budget.stopped
            && budget.unjournaled_bytes > 0
            && budget.unjournaled_bytes + bytes > self.config.unjournaled_limit_bytes
        {
            budget.waiting_writers += 1;
            self.work.notify_one();
            self.freed.wait(&mut budget);
            budget.waiting_writers -= 1;
        }
        if !budget.stopped {
            budget.unjournaled_bytes += bytes;
        }
        !budget.stopped
    }

    /// `bytes` of a reservation were journaled, or not written after all.
    pub(crate) fn release(&self, bytes: u64) {
        if bytes > 0 {
            self.budget.lock().unjournaled_bytes -= bytes;
            self.freed.notify_all();
        }
    }

    /// `artifact` has verified blocks to journal.
    pub(crate) fn dirty(&self, artifact: &Arc<Artifact>) {
        let mut budget = self.budget.lock();
        budget.dirty_since.get_or_insert_with(Instant::now);
        if !budget.dirty.iter().any(|a| Arc::ptr_eq(a, artifact)) {
            budget.dirty.push(artifact.clone());
        }
        self.work.notify_one();
    }

    /// Writers that wait for others' bytes to be journaled.
    #[cfg(test)]
    pub(crate) fn waiting_writers(&self) -> usize {
        self.budget.lock().waiting_writers
    }

    /// Ends the flusher after it has worked off what is pending.
    pub(crate) fn stop(&self) {
        self.budget.lock().stopped = true;
        self.work.notify_all();
        self.freed.notify_all();
    }

    pub(crate) fn stopped(&self) -> bool {
        self.budget.lock().stopped
    }

    /// The flusher thread.
    pub(crate) fn run_flusher(&self) {
        let batch_bytes = FLUSH_BATCH_BYTES.min(self.config.unjournaled_limit_bytes / 4);
        let mut not_before = Instant::now();
        let mut budget = self.budget.lock();
        loop {
            let Some(since) = budget.dirty_since else {
                if budget.stopped {
                    return;
                }
                self.work.wait(&mut budget);
                continue;
            };
            let urgent =
                budget.stopped || budget.waiting_writers > 0 || budget.unjournaled_bytes >= batch_bytes;
            let due = if urgent {
                not_before
            } else {
                (since + self.config.flush_interval).max(not_before)
            };
            if !budget.stopped && Instant::now() < due {
                self.work.wait_until(&mut budget, due);
                continue;
            }
            let mut dirty = std::mem::take(&mut budget.dirty);
            budget.dirty_since = None;
            let stopped = budget.stopped;
            parking_lot::MutexGuard::unlocked(&mut budget, || {
                // A failure closed the artifact: whoever writes to it next is told. One whose journal is in use,
                // for as long as a publish syncs its files, must not keep the others waiting.
                dirty.retain(|artifact| {
                    if stopped {
                        let _ = artifact.flush();
                        return false;
                    }
                    artifact.try_flush().is_none()
                });
            });
            if !dirty.is_empty() {
                not_before = Instant::now() + LOCKED_RETRY;
                budget.dirty_since.get_or_insert(not_before);
                for artifact in dirty {
                    if !budget.dirty.iter().any(|a| Arc::ptr_eq(a, &artifact)) {
                        budget.dirty.push(artifact);
                    }
                }
            }
        }
    }
}

/// A bounded cache of open data files, least recently used out first.
#[derive(Debug, Default)]
pub(crate) struct FileCache {
    /// A lookup, or one `open` of a local file, at a time.
    open: Mutex<Cached>,
}

#[derive(Debug, Default)]
struct Cached {
    files: HashMap<(u64, usize), (Arc<File>, u64)>,
    tick: u64,
}

impl FileCache {
    /// File `index` of artifact `owner`.
    pub(crate) fn get(
        &self,
        owner: u64,
        index: usize,
        open: impl FnOnce() -> io::Result<File>,
    ) -> io::Result<Arc<File>> {
        let mut cached = self.open.lock();
        cached.tick += 1;
        let tick = cached.tick;
        if let Some((file, used)) = cached.files.get_mut(&(owner, index)) {
            *used = tick;
            return Ok(file.clone());
        }
        let file = Arc::new(open()?);
        if cached.files.len() >= MAX_OPEN_FILES
            && let Some(&oldest) = cached
                .files
                .iter()
                .min_by_key(|(_, (_, used))| *used)
                .map(|(key, _)| key)
        {
            cached.files.remove(&oldest);
        }
        cached.files.insert((owner, index), (file.clone(), tick));
        Ok(file)
    }

    /// Closes an artifact's files (those in use elsewhere close with their last user).
    pub(crate) fn close(&self, owner: u64) {
        self.open.lock().files.retain(|(o, _), _| *o != owner);
    }
}
