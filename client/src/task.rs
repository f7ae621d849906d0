//! What every task of this node has in common, whatever moves its bytes: how it fails and what it counts.

use crate::store::Artifact;
use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};
use tokio_util::task::TaskTracker;

/// How long the end of a transfer waits for disk operations that were already under way.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Waits until nothing that `tracker` follows is under way, so that a transfer which has returned touches `artifact` no
/// more. If that is not so `within` the time, the artifact's handle ends instead: whatever lands later is not taken for
/// anything, and the next transfer begins with another handle, once it has landed.
pub async fn quiet(tracker: &TaskTracker, artifact: &Artifact, within: Duration) {
    tracker.close();
    if tokio::time::timeout(within, tracker.wait()).await.is_err() {
        tracing::warn!(model = %artifact.model(), "disk operations of an ended transfer still go on: is the disk stuck?");
        artifact.abandon("disk operations of an ended transfer hang: look at the disk");
    }
}

/// Why a task ended without success. Reported to the master and shown to a person, so that the message says
/// what failed, where, why and what to do next; it never holds a secret (URLs are redacted before they get
/// here).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message} [{code}]")]
pub struct TaskFailure {
    /// Stable, for programs: snake_case.
    pub code: String,
    /// For a person.
    pub message: String,
    /// Whether another attempt may succeed without anybody changing anything.
    pub retryable: bool,
}

impl TaskFailure {
    /// A failure that another attempt may cure.
    pub fn retryable(code: &str, message: impl Into<String>) -> Self {
        Self {
            code: code.to_owned(),
            message: message.into(),
            retryable: true,
        }
    }

    /// A failure that stays until somebody changes something.
    pub fn permanent(code: &str, message: impl Into<String>) -> Self {
        Self {
            code: code.to_owned(),
            message: message.into(),
            retryable: false,
        }
    }

    /// The task was told to stop: not a fault of anybody. What was verified stays on the disk.
    pub fn canceled() -> Self {
        Self::permanent(
            CODE_CANCELED,
            "the task was canceled; what was verified stays on the disk",
        )
    }

    /// Whether this is [`TaskFailure::canceled`].
    pub fn is_canceled(&self) -> bool {
        self.code == CODE_CANCELED
    }
}

/// [`TaskFailure::code`] of a canceled task.
pub const CODE_CANCELED: &str = "canceled";

/// What a task moved, for reports and metrics. Only counts up.
#[derive(Debug, Default)]
pub struct TransferCounters {
    /// Payload bytes read from outside (source or peers), discarded ones included.
    pub fetched_bytes: AtomicU64,
    /// Of these, bytes read once more although they had been read before in this process and were taken: they were
    /// lost again, were not what their sender had announced, or came in part before a connection was cut.
    pub refetched_bytes: AtomicU64,
    /// Of these, bytes that arrived and were not taken, because the block was held or being verified already
    /// (the second copy that the end of a transfer asks for, or an answer that a cancel did not overtake) or
    /// because nobody waited for them any more (their sender had been left meanwhile).
    pub duplicate_bytes: AtomicU64,
    /// Bytes of staging that were hashed for declared checksums, whether they came in this task or were there before.
    pub checked_bytes: AtomicU64,
    /// Of the fetched bytes, those that came by RDMA.
    pub rdma_bytes: AtomicU64,
}

impl TransferCounters {
    /// Counts bytes that arrived.
    pub fn add_fetched(&self, bytes: u64) {
        self.fetched_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts bytes that arrived once more.
    pub fn add_refetched(&self, bytes: u64) {
        self.refetched_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts bytes that arrived and were not taken.
    pub fn add_duplicate(&self, bytes: u64) {
        self.duplicate_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts bytes that were hashed for a declared checksum.
    pub fn add_checked(&self, bytes: u64) {
        self.checked_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts bytes that arrived by RDMA; they are counted as fetched beside it.
    pub fn add_rdma(&self, bytes: u64) {
        self.rdma_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes that arrived by RDMA.
    pub fn rdma(&self) -> u64 {
        self.rdma_bytes.load(Ordering::Relaxed)
    }

    /// Bytes that were hashed for declared checksums.
    pub fn checked(&self) -> u64 {
        self.checked_bytes.load(Ordering::Relaxed)
    }

    /// Bytes that arrived and were not taken.
    pub fn duplicate(&self) -> u64 {
        self.duplicate_bytes.load(Ordering::Relaxed)
    }

    /// (fetched, refetched).
    pub fn load(&self) -> (u64, u64) {
        (
            self.fetched_bytes.load(Ordering::Relaxed),
            self.refetched_bytes.load(Ordering::Relaxed),
        )
    }
}
