//! What the parts of one acquisition share, and their way to the disk.

use super::{
    AllowList, Location, SourceConfig,
    http::Fetcher,
    limits::{self, Stuck},
};
use crate::{
    store::Artifact,
    task::{TaskFailure, TransferCounters, quiet},
};
use mooncake_proto::manifest::Checksum;
use parking_lot::Mutex;
use std::{
    fmt::Display,
    ops::Range,
    sync::{Arc, OnceLock},
    time::Duration,
};
use tokio::task::{JoinError, JoinHandle};
use tokio_util::task::TaskTracker;

/// One file to read.
#[derive(Clone, Debug)]
pub(super) struct SourceFile {
    /// In the manifest; for messages.
    pub(super) path: String,
    pub(super) size_bytes: u64,
    pub(super) checksum: Checksum,
    pub(super) location: Location,
    pub(super) blocks: Range<u32>,
    /// Whether some blocks were there already, from an earlier acquisition or from peers.
    pub(super) carried_over: bool,
    /// Writes of this file under way.
    pub(super) writes: TaskTracker,
}

impl SourceFile {
    /// The size of the source is not the manifest's.
    pub(super) fn size_mismatch(&self, found: impl Display) -> TaskFailure {
        TaskFailure::permanent(
            "size_mismatch",
            format!(
                "{} (the source of '{}') has {found}, but the manifest says {} bytes: correct the manifest or the source",
                self.location, self.path, self.size_bytes
            ),
        )
    }

    /// It was not read: others have everything that is needed for it, and do not give it back.
    pub(super) fn no_room(&self, what: &str, limit: Duration) -> TaskFailure {
        TaskFailure::retryable(
            "source_unavailable",
            format!(
                "{} (the source of '{}') was not read: none of the {what} that sources on this machine share came back \
                 for {limit:?}, so that reads of it or of others hang: check the network shares and the disk",
                self.location, self.path
            ),
        )
    }

    /// The source is not what it was when this acquisition began.
    pub(super) fn changed(&self, how: impl Display) -> TaskFailure {
        TaskFailure::retryable(
            "source_changed",
            format!(
                "{} (the source of '{}') changed while it was read ({how}): what was read of it is discarded; \
                 make sure that nobody writes it, then try again",
                self.location, self.path
            ),
        )
    }
}

/// A failure of this node's disk.
pub(super) fn disk_failure(code: &str, error: &dyn std::error::Error) -> TaskFailure {
    let failure = TaskFailure::permanent(code, error.to_string());
    // Closed staging is somebody else's decision, and a new attempt begins it again. A block that somebody else wrote
    // meanwhile is one that a new attempt finds there, and checks.
    TaskFailure {
        retryable: matches!(code, "staging_closed" | "block_conflict"),
        ..failure
    }
}

pub(super) struct Context {
    pub(super) artifact: Arc<Artifact>,
    pub(super) allow: AllowList,
    pub(super) counters: Arc<TransferCounters>,
    pub(super) config: SourceConfig,
    pub(super) buffers: Arc<limits::Buffers>,
    pub(super) connections: limits::Connections,
    /// Made for the first file that needs it.
    fetcher: OnceLock<Result<Fetcher, TaskFailure>>,
    /// Files whose blocks proved wrong and may not have been forgotten yet. A leaf lock.
    condemned: Mutex<Vec<Range<u32>>>,
    /// Everything under way that may touch the artifact. Calls to sources do not.
    tracker: TaskTracker,
}

impl Context {
    pub(super) fn new(
        artifact: Arc<Artifact>,
        allow: AllowList,
        counters: Arc<TransferCounters>,
        config: SourceConfig,
    ) -> Self {
        let buffers = limits::Buffers::new(&artifact);
        Self {
            artifact,
            allow,
            counters,
            config,
            buffers,
            connections: limits::Connections::default(),
            fetcher: OnceLock::new(),
            condemned: Mutex::default(),
            tracker: TaskTracker::new(),
        }
    }

    pub(super) fn fetcher(&self) -> Result<&Fetcher, TaskFailure> {
        self.fetcher
            .get_or_init(|| Fetcher::new(self.allow.clone(), &self.config))
            .as_ref()
            .map_err(TaskFailure::clone)
    }

    /// Calls a source on this machine where it may block. A network share that hangs must not hang the job for
    /// ever: the call keeps its turn for as long as it takes, but nobody waits for it any more.
    pub(super) async fn call_source<T: Send + 'static>(
        &self,
        file: &SourceFile,
        work: impl FnOnce() -> Result<T, TaskFailure> + Send + 'static,
    ) -> Result<T, TaskFailure> {
        let limit = self.config.no_progress_timeout;
        let turn = self.buffers.call(limit).await;
        let turn = turn.map_err(|Stuck| file.no_room("turns", limit))?;
        let call = tokio::task::spawn_blocking(move || {
            let result = work();
            drop(turn);
            result
        });
        match tokio::time::timeout(limit, call).await {
            Ok(result) => finished(result),
            Err(_) => Err(TaskFailure::retryable(
                "source_unavailable",
                format!(
                    "{} (the source of '{}') gave nothing for {limit:?}: check the disk or the network share",
                    file.location, file.path
                ),
            )),
        }
    }

    /// A buffer for a block of a source on this machine.
    pub(super) async fn local_buffer(&self, file: &SourceFile) -> Result<limits::Buffer, TaskFailure> {
        let limit = self.config.no_progress_timeout;
        let taken = self.buffers.take_local(limit).await;
        taken.map_err(|Stuck| file.no_room("buffers", limit))
    }

    /// Works on what is staged, where it may block. Once begun it goes on to its end even if nobody waits for it any
    /// more; `drain` does.
    pub(super) async fn on_disk<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, TaskFailure> + Send + 'static,
    ) -> Result<T, TaskFailure> {
        // Here and not in the task: who is canceled leaves the line.
        let turn = limits::DISK_TURNS.acquire().await.expect("never closed");
        let work = self.tracker.spawn_blocking(move || {
            let result = work();
            drop(turn);
            result
        });
        finished(work.await)
    }

    /// Hashes and writes one block; it needs nobody to wait for it. From here on only the own disk decides how long
    /// the buffer is needed: it does not count for its source any more.
    pub(super) fn write(&self, file: &SourceFile, block: u32, mut buffer: limits::Buffer) -> Writing {
        buffer.arrived();
        let artifact = self.artifact.clone();
        let token = file.writes.token();
        let handle = self.tracker.spawn(async move {
            let turn = limits::WRITE_TURNS.acquire().await.expect("never closed");
            let work = tokio::task::spawn_blocking(move || {
                let _until_done = (token, turn);
                artifact
                    .write_own_block(block, &buffer.bytes)
                    .map(drop)
                    .map_err(|e| disk_failure(e.code(), &e))
            });
            finished(work.await)
        });
        Writing(handle)
    }

    /// From now on these blocks are wrong, whatever becomes of the task that found out: noted at once, without
    /// waiting for anything.
    pub(super) fn condemn(&self, blocks: &Range<u32>) {
        self.condemned.lock().push(blocks.clone());
    }

    /// Forgets a file that was condemned. Its writes must have ended: one that lands later would bring a block
    /// back.
    pub(super) async fn forget_condemned(&self, blocks: &Range<u32>) -> Result<(), TaskFailure> {
        self.forget(blocks.clone()).await?;
        self.condemned.lock().retain(|b| b != blocks);
        Ok(())
    }

    /// Forgets what the files' own tasks could not: they were stopped. For the end, when nothing is written
    /// any more.
    pub(super) async fn forget_all_condemned(&self) -> Result<(), TaskFailure> {
        let left = std::mem::take(&mut *self.condemned.lock());
        for blocks in left {
            self.forget(blocks).await?;
        }
        Ok(())
    }

    /// Durably gives blocks up.
    pub(super) async fn forget(&self, blocks: Range<u32>) -> Result<(), TaskFailure> {
        let held = blocks.filter(|&b| self.artifact.has(b)).collect();
        self.give_up(held).await
    }

    /// The same, for blocks that are held.
    pub(super) async fn give_up(&self, held: Vec<u32>) -> Result<(), TaskFailure> {
        if held.is_empty() {
            return Ok(());
        }
        let artifact = self.artifact.clone();
        self.on_disk(move || {
            artifact.forget(&held).map_err(|e| {
                let message = format!(
                    "cannot discard blocks of {} that proved wrong: {e}",
                    artifact.model()
                );
                TaskFailure::retryable("disk_error", message)
            })
        })
        .await
    }

    /// Waits until nothing of this acquisition touches the artifact, or gives up waiting.
    pub(super) async fn drain(&self) {
        quiet(&self.tracker, &self.artifact, self.config.drain_timeout).await;
    }
}

/// A write under way; it goes on if this is dropped.
pub(super) struct Writing(JoinHandle<Result<(), TaskFailure>>);

impl Writing {
    /// Its end.
    pub(super) async fn done(self) -> Result<(), TaskFailure> {
        finished(self.0.await)
    }
}

fn finished<T>(result: Result<Result<T, TaskFailure>, JoinError>) -> Result<T, TaskFailure> {
    match result {
        Ok(result) => result,
        Err(e) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
        // Only a runtime that shuts down cancels blocking work.
        Err(_) => Err(TaskFailure::canceled()),
    }
}
