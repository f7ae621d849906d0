//! The bounds of everything that reads sources, shared by all acquisitions of the process.

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use parking_lot::Mutex;

/// Most block buffers at once, in the whole process: enough for every connection to fill one block while its
/// last one is hashed and written. Of blocks of the largest size that is 64 MiB, small beside a node's memory;
/// counting buffers and not bytes keeps many small models as modest as one large one.
pub const MAX_BUFFERS: usize = 16;
/// Of these, most that sources on this machine may have: a read from a network share that hangs keeps its
/// buffer until the kernel gives up, and the web must go on meanwhile.
pub const MAX_LOCAL_BUFFERS: usize = 12;
/// And most that one acquisition may have for them: four blocks keep a disk busy, and one share that hangs
/// leaves the others theirs.
pub const MAX_LOCAL_BUFFERS_PER_TASK: usize = 4;
/// Most HTTP requests under way at once, in the whole process. 12 blocks leave room in
/// [`MAX_BUFFERS`] even if every connection stalls with a block half filled.
pub const CONNECTIONS: usize = 12;
/// Most HTTP requests under way at once for one file: enough to fill a link that one TCP stream does not.
pub const CONNECTIONS_PER_FILE: usize = 4;
/// Most files of one model that are read at once: many small files cost one round trip each.
pub const FILES_AT_ONCE: usize = 8;
/// Most files whose SHA-256 is computed at once, in the whole process; each keeps one core busy.
pub const HASHERS: usize = 4;
/// Most bytes hashed between two looks at the cancel token.
pub const HASH_STEP_BYTES: u64 = 16 << 20;
/// Bytes asked for in one request: few requests per model, yet the file's front stays close to its back, so
/// that the file hasher keeps up.
pub const PART_BYTES: u64 = 32 << 20;
/// Most redirects followed for one request.
pub const MAX_REDIRECTS: usize = 10;
/// Times a source that does not honour ranges is read again from its start without getting any further.
pub const RESTARTS_WITHOUT_PROGRESS: u32 = 3;
/// How long the end of an acquisition waits for disk operations that were already under way.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Time-outs and retries; the defaults are for production, tests shorten them.
#[derive(Clone, Debug)]
pub struct SourceConfig {
    /// To a TCP (and TLS) connection.
    pub connect_timeout: Duration,
    /// Without a byte, on any connection or file.
    pub no_progress_timeout: Duration,
    /// The first pause before a retry; doubles, with jitter.
    pub backoff_min: Duration,
    /// The longest pause before a retry that the server did not ask for.
    pub backoff_max: Duration,
    /// Retries in a row that brought no verified block.
    pub retries: u32,
    /// The longest `Retry-After` that is waited for; a longer one ends the attempt.
    pub retry_after_max: Duration,
    /// See [`PART_BYTES`].
    pub part_bytes: u64,
}

impl Default for SourceConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(10),
            no_progress_timeout: Duration::from_secs(30),
            backoff_min: Duration::from_millis(500),
            backoff_max: Duration::from_secs(30),
            retries: 8,
            retry_after_max: Duration::from_secs(300),
            part_bytes: PART_BYTES,
        }
    }
}

static BUFFERS: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(MAX_BUFFERS)));
static LOCAL_BUFFERS: LazyLock<Arc<Semaphore>> =
    LazyLock::new(|| Arc::new(Semaphore::new(MAX_LOCAL_BUFFERS)));
static CONNECTION_PERMITS: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(CONNECTIONS)));
static HASHER_PERMITS: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(HASHERS)));

async fn permit(semaphore: &Arc<Semaphore>, n: u32) -> OwnedSemaphorePermit {
    semaphore
        .clone()
        .acquire_many_owned(n)
        .await
        .expect("these semaphores are never closed")
}

/// Waits for the right to have one HTTP request under way.
pub(super) async fn connection() -> OwnedSemaphorePermit {
    permit(&CONNECTION_PERMITS, 1).await
}

/// Waits for the right to hash one step of a file.
pub(super) async fn hasher() -> OwnedSemaphorePermit {
    permit(&HASHER_PERMITS, 1).await
}

/// Block buffers of one acquisition: reused, and counted against the process's [`MAX_BUFFERS`].
#[derive(Debug)]
pub(super) struct Buffers {
    block_size: usize,
    /// See [`MAX_LOCAL_BUFFERS_PER_TASK`].
    local: Arc<Semaphore>,
    /// Buffers not in use; a leaf lock, held for a push or a pop.
    free: Mutex<Vec<Vec<u8>>>,
}

impl Buffers {
    pub(super) fn new(block_size: u32) -> Arc<Self> {
        Arc::new(Self {
            block_size: block_size as usize,
            local: Arc::new(Semaphore::new(MAX_LOCAL_BUFFERS_PER_TASK)),
            free: Mutex::default(),
        })
    }

    /// An empty buffer with room for one block. Whoever waits here must not hold a buffer that only more
    /// waiting could free.
    pub(super) async fn take(self: &Arc<Self>) -> Buffer {
        self.take_within(&[]).await
    }

    /// The same, for a source on this machine.
    pub(super) async fn take_local(self: &Arc<Self>) -> Buffer {
        self.take_within(&[&self.local, &LOCAL_BUFFERS]).await
    }

    /// The narrower bound first: who waits for it takes nothing from the others.
    async fn take_within(self: &Arc<Self>, bounds: &[&Arc<Semaphore>]) -> Buffer {
        let mut permits = Vec::with_capacity(bounds.len() + 1);
        for bound in bounds.iter().copied().chain([&*BUFFERS]) {
            permits.push(permit(bound, 1).await);
        }
        let bytes = self
            .free
            .lock()
            .pop()
            .unwrap_or_else(|| Vec::with_capacity(self.block_size));
        Buffer {
            bytes,
            pool: self.clone(),
            _permits: permits,
        }
    }
}

/// One block's bytes.
#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) bytes: Vec<u8>,
    pool: Arc<Buffers>,
    _permits: Vec<OwnedSemaphorePermit>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        let mut free = self.pool.free.lock();
        // What all connections of one model can use; the rest goes back to the allocator.
        if free.len() < CONNECTIONS {
            free.push(bytes);
        }
    }
}
