//! What the parts of one acquisition share, and their way to the disk.

use super::{AllowList, Location, SourceConfig, http::Fetcher, limits};
use crate::{
    store::Artifact,
    task::{TaskFailure, TransferCounters},
};
use mooncake_proto::manifest::Checksum;
use parking_lot::Mutex;
use std::{
    fmt::Display,
    ops::Range,
    sync::{Arc, OnceLock},
};
use tokio::{
    sync::Semaphore,
    task::{JoinError, JoinHandle},
};
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
    // Closed staging is somebody else's decision, and a new attempt begins it again.
    TaskFailure {
        retryable: code == "staging_closed",
        ..failure
    }
}

/// Most reads of sources (and of what was read) under way at once, in the whole process: each takes a thread, for
/// as long as a network share may hang.
const READS: usize = 8;
/// Most blocks being hashed and written at once, in the whole process. Not of [`READS`]: a source that hangs must
/// not stop what arrived.
const WRITES: usize = 8;

static READ_TURNS: Semaphore = Semaphore::const_new(READS);
static WRITE_TURNS: Semaphore = Semaphore::const_new(WRITES);

pub(super) struct Context {
    pub(super) artifact: Arc<Artifact>,
    pub(super) allow: AllowList,
    pub(super) counters: Arc<TransferCounters>,
    pub(super) config: SourceConfig,
    pub(super) buffers: Arc<limits::Buffers>,
    /// Made for the first file that needs it.
    fetcher: OnceLock<Result<Fetcher, TaskFailure>>,
    /// Files whose blocks proved wrong and may not have been forgotten yet. A leaf lock.
    condemned: Mutex<Vec<Range<u32>>>,
    /// Every disk operation under way.
    tracker: TaskTracker,
}

impl Context {
    pub(super) fn new(
        artifact: Arc<Artifact>,
        allow: AllowList,
        counters: Arc<TransferCounters>,
        config: SourceConfig,
    ) -> Self {
        let buffers = limits::Buffers::new(artifact.blocks().block_size());
        Self {
            artifact,
            allow,
            counters,
            config,
            buffers,
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

    /// Runs `work` where it may block, in turn.
    fn run<T: Send + 'static>(
        &self,
        turns: &'static Semaphore,
        work: impl FnOnce() -> Result<T, TaskFailure> + Send + 'static,
    ) -> JoinHandle<Result<T, TaskFailure>> {
        self.tracker.spawn(async move {
            let turn = turns.acquire().await.expect("never closed");
            let work = tokio::task::spawn_blocking(move || {
                let result = work();
                drop(turn);
                result
            });
            finished(work.await)
        })
    }

    /// Runs `work` where it may block. It goes on to its end even if nobody waits for it any more; `drain`
    /// does.
    pub(super) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, TaskFailure> + Send + 'static,
    ) -> Result<T, TaskFailure> {
        finished(self.run(&READ_TURNS, work).await)
    }

    /// Hashes and writes one block; it needs nobody to wait for it.
    pub(super) fn write(&self, file: &SourceFile, block: u32, buffer: limits::Buffer) -> Writing {
        let artifact = self.artifact.clone();
        let token = file.writes.token();
        let handle = self.run(&WRITE_TURNS, move || {
            let _until_done = token;
            artifact
                .write_own_block(block, &buffer.bytes)
                .map(drop)
                .map_err(|e| disk_failure(e.code(), &e))
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
        self.blocking(move || {
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

    /// Waits until no disk operation of this acquisition is under way, or gives up waiting.
    pub(super) async fn drain(&self) {
        quiet(&self.tracker).await;
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

/// Waits, within a bound, until nothing that `tracker` follows is under way.
pub(super) async fn quiet(tracker: &TaskTracker) {
    tracker.close();
    if tokio::time::timeout(limits::DRAIN_TIMEOUT, tracker.wait())
        .await
        .is_err()
    {
        tracing::warn!(
            "disk operations of an ended transfer still go on: is the disk or a network share stuck?"
        );
    }
}
