//! The bounds of everything that reads sources, shared by all acquisitions of the process.

use crate::{memory::Block, rate::Rate, store::Artifact, task::DRAIN_TIMEOUT};
use mooncake_proto::MAX_ACQUISITIONS;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    path::PathBuf,
    pin::pin,
    sync::{
        Arc, LazyLock, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most block buffers at once, in the whole process: enough for every connection to fill one block while its
/// last one is hashed and written. Of blocks of the largest size that is 64 MiB, small beside a node's memory;
/// counting buffers and not bytes keeps many small models as modest as one large one.
pub const MAX_BUFFERS: usize = 16;
/// Of these, most that sources on this machine may have: a read from a network share that hangs keeps its
/// buffer until the kernel gives up, and the web must go on meanwhile.
pub const MAX_LOCAL_BUFFERS: usize = 12;
/// And most that the acquisitions of one artifact may have for them: four blocks keep a disk busy, and one share
/// that hangs leaves the others theirs.
pub const MAX_LOCAL_BUFFERS_PER_TASK: usize = 4;
/// Most calls under way at once to sources on this machine (look, open, read), in the whole process: each takes a
/// thread, for as long as a network share may hang.
pub const SOURCE_CALLS: usize = 16;
/// And most for one artifact, whatever became of the attempt that made them: shares of three models that hang
/// leave room.
pub const SOURCE_CALLS_PER_TASK: usize = 4;
/// Most steps under way at once in what was staged (hashing, syncing, forgetting), in the whole process. Not of
/// [`SOURCE_CALLS`]: a source that hangs must not stop what arrived.
pub const DISK_STEPS: usize = 8;
/// Most blocks being hashed and written at once, in the whole process.
pub const WRITES: usize = 8;
/// HTTP requests that each acquisition may have under way whatever the others do: a slow source takes none from them.
const OWN_CONNECTIONS: usize = 1;
/// Most HTTP requests beyond these, in the whole process: who is alone fills a link with them.
const SHARED_CONNECTIONS: usize = 5;
/// Most HTTP requests under way at once, in the whole process.
pub const CONNECTIONS: usize = MAX_ACQUISITIONS * OWN_CONNECTIONS + SHARED_CONNECTIONS;
const _: () = assert!(
    CONNECTIONS < MAX_BUFFERS,
    "there is room even if every connection stalls with a block half filled"
);
/// Most HTTP requests under way at once for one file: enough to fill a link that one TCP stream does not.
pub const CONNECTIONS_PER_FILE: usize = 4;
/// Most files of one model that are read at once: many small files cost one round trip each.
pub const FILES_AT_ONCE: usize = 8;
/// Most files whose SHA-256 is computed at once, in the whole process; each keeps one core busy.
pub const HASHERS: usize = 4;
/// Most bytes hashed between two looks at the cancel token.
pub const HASH_STEP_BYTES: u64 = 16 << 20;
/// Bytes read at once to be hashed: they fit a core's cache, and the call costs nothing beside their hash.
pub const HASH_PIECE_BYTES: usize = 64 << 10;
/// Bytes asked for in one request: few requests per model, yet the file's front stays close to its back, so
/// that the file hasher keeps up.
pub const PART_BYTES: u64 = 32 << 20;
/// Most redirects followed for one request.
pub const MAX_REDIRECTS: usize = 10;
/// Times a source that does not honour ranges is read again from its start without getting any further.
pub const RESTARTS_WITHOUT_PROGRESS: u32 = 3;

/// Time-outs and retries; the defaults are for production, tests shorten them.
#[derive(Clone, Debug)]
pub struct SourceConfig {
    /// To a TCP (and TLS) connection.
    pub connect_timeout: Duration,
    /// Without a byte, on any connection or file.
    pub no_progress_timeout: Duration,
    /// Fewest bytes that a connection must bring in that time: one that trickles keeps a buffer and a connection for
    /// nothing.
    pub floor_bytes: u64,
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
    /// See [`DRAIN_TIMEOUT`](crate::task::DRAIN_TIMEOUT).
    pub drain_timeout: Duration,
    /// Shared with what comes from peers.
    pub download: Arc<Rate>,
}

impl Default for SourceConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(10),
            no_progress_timeout: Duration::from_secs(30),
            // 2 KiB/s: a model would take years.
            floor_bytes: 64 << 10,
            backoff_min: Duration::from_millis(500),
            backoff_max: Duration::from_secs(30),
            retries: 8,
            retry_after_max: Duration::from_secs(300),
            part_bytes: PART_BYTES,
            drain_timeout: DRAIN_TIMEOUT,
            download: Arc::default(),
        }
    }
}

/// Between two looks of those who wait in any case.
const SOME_TIME: Duration = Duration::from_secs(3600);

static BUFFERS: LazyLock<Bound> = LazyLock::new(|| Bound::new(MAX_BUFFERS));
static LOCAL_BUFFERS: LazyLock<Bound> = LazyLock::new(|| Bound::new(MAX_LOCAL_BUFFERS));
static CALLS: LazyLock<Bound> = LazyLock::new(|| Bound::new(SOURCE_CALLS));
/// By staging folder. Held for a look-up.
static SHARES: LazyLock<Mutex<HashMap<PathBuf, Weak<Share>>>> = LazyLock::new(Mutex::default);
/// For [`DISK_STEPS`].
pub(super) static DISK_TURNS: Semaphore = Semaphore::const_new(DISK_STEPS);
/// For [`WRITES`].
pub(super) static WRITE_TURNS: Semaphore = Semaphore::const_new(WRITES);
static CONNECTION_PERMITS: LazyLock<Arc<Semaphore>> =
    LazyLock::new(|| Arc::new(Semaphore::new(SHARED_CONNECTIONS)));
static HASHER_PERMITS: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(HASHERS)));

async fn permit(semaphore: &Arc<Semaphore>, n: u32) -> OwnedSemaphorePermit {
    semaphore
        .clone()
        .acquire_many_owned(n)
        .await
        .expect("these semaphores are never closed")
}

/// The HTTP requests of one acquisition.
#[derive(Debug)]
pub(super) struct Connections {
    own: Arc<Semaphore>,
}

impl Default for Connections {
    fn default() -> Self {
        Self {
            own: Arc::new(Semaphore::new(OWN_CONNECTIONS)),
        }
    }
}

impl Connections {
    /// Waits for the right to have one HTTP request under way.
    pub(super) async fn take(&self) -> OwnedSemaphorePermit {
        tokio::select! {
            biased;
            own = permit(&self.own, 1) => own,
            shared = permit(&CONNECTION_PERMITS, 1) => shared,
        }
    }
}

/// Waits for the right to hash one step of a file.
pub(super) async fn hasher() -> OwnedSemaphorePermit {
    permit(&HASHER_PERMITS, 1).await
}

/// A number of things for which many wait in line.
#[derive(Debug)]
struct Bound {
    permits: Arc<Semaphore>,
    /// How often one was given back.
    returned: Arc<AtomicU64>,
}

/// For as long as was waited, nobody gave anything back: whoever has it hangs.
#[derive(Debug)]
pub(super) struct Stuck;

#[derive(Debug)]
struct Permit {
    _permit: OwnedSemaphorePermit,
    returned: Arc<AtomicU64>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.returned.fetch_add(1, Ordering::Relaxed);
    }
}

impl Bound {
    fn new(number: usize) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(number)),
            returned: Arc::default(),
        }
    }

    /// Waits in line, however long, while the line moves; gives up once it stood still for `patience`.
    async fn take(&self, patience: Duration) -> Result<Permit, Stuck> {
        self.take_unless(patience, || false).await
    }

    /// The same; but does not give up while there is an `excuse` for the line.
    async fn take_unless(&self, patience: Duration, excuse: impl Fn() -> bool) -> Result<Permit, Stuck> {
        let mut turn = pin!(permit(&self.permits, 1));
        let mut seen = self.returned.load(Ordering::Relaxed);
        loop {
            if let Ok(permit) = tokio::time::timeout(patience, turn.as_mut()).await {
                return Ok(Permit {
                    _permit: permit,
                    returned: self.returned.clone(),
                });
            }
            let now = self.returned.load(Ordering::Relaxed);
            if now == seen && !excuse() {
                return Err(Stuck);
            }
            seen = now;
        }
    }
}

/// What calls to the sources of one artifact may take, over all its attempts: a call that hangs keeps its part when
/// its attempt has ended, so that the next attempt does not take another one.
#[derive(Debug)]
struct Share {
    calls: Bound,
    buffers: Bound,
}

impl Share {
    fn of(artifact: &Artifact) -> Arc<Self> {
        let mut shares = SHARES.lock();
        shares.retain(|_, share| share.strong_count() > 0);
        if let Some(share) = shares.get(artifact.staging_folder()).and_then(Weak::upgrade) {
            return share;
        }
        let share = Arc::new(Self {
            calls: Bound::new(SOURCE_CALLS_PER_TASK),
            buffers: Bound::new(MAX_LOCAL_BUFFERS_PER_TASK),
        });
        shares.insert(artifact.staging_folder().to_owned(), Arc::downgrade(&share));
        share
    }
}

/// The right to have one call to a source on this machine under way.
#[derive(Debug)]
pub(super) struct Call {
    _permits: [Permit; 2],
    _share: Arc<Share>,
}

/// Block buffers of one acquisition, counted against the process's [`MAX_BUFFERS`].
#[derive(Debug)]
pub(super) struct Buffers {
    block_size: usize,
    share: Arc<Share>,
}

impl Buffers {
    pub(super) fn new(artifact: &Artifact) -> Arc<Self> {
        Arc::new(Self {
            block_size: artifact.blocks().block_size() as usize,
            share: Share::of(artifact),
        })
    }

    /// Waits for the right to call a source on this machine.
    pub(super) async fn call(&self, patience: Duration) -> Result<Call, Stuck> {
        let own = self.share.calls.take(patience).await?;
        Ok(Call {
            _permits: [own, CALLS.take(patience).await?],
            _share: self.share.clone(),
        })
    }

    /// The same, however long it takes: for what has to be done some time.
    pub(super) async fn call_some_time(&self) -> Call {
        loop {
            // Stuck or not, there is nothing else to do than to wait on.
            if let Ok(call) = self.call(SOME_TIME).await {
                return call;
            }
        }
    }

    /// An empty buffer with room for one block. Whoever waits here must not hold a buffer that only more
    /// waiting could free.
    pub(super) async fn take(&self, patience: Duration) -> Result<Buffer, Stuck> {
        self.take_within(&[], patience).await
    }

    /// The same, for a source on this machine. The narrower bound first: who waits for it takes nothing from the
    /// others.
    pub(super) async fn take_local(&self, patience: Duration) -> Result<Buffer, Stuck> {
        self.take_within(&[&self.share.buffers, &LOCAL_BUFFERS], patience)
            .await
    }

    async fn take_within(&self, narrower: &[&Bound], patience: Duration) -> Result<Buffer, Stuck> {
        let mut until_arrived = Vec::with_capacity(narrower.len());
        for bound in narrower {
            until_arrived.push(bound.take(patience).await?);
        }
        // Where every writer is at work, it is the own disk that gives no buffer back: no source is to blame, and the
        // masters notice an attempt that stands still.
        let disk_is_busy = || WRITE_TURNS.available_permits() == 0;
        let permit = BUFFERS.take_unless(patience, disk_is_busy).await?;
        Ok(Buffer {
            bytes: Block::take(self.block_size),
            share: Some(self.share.clone()),
            until_arrived,
            _permit: permit,
        })
    }
}

/// One block's bytes.
#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) bytes: Block,
    /// Of the bounds on what one source, or all on this machine, may keep.
    until_arrived: Vec<Permit>,
    share: Option<Arc<Share>>,
    _permit: Permit,
}

impl Buffer {
    /// Its source has filled it: others of its kind may be read meanwhile.
    pub(super) fn arrived(&mut self) {
        self.until_arrived.clear();
        self.share = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_line_that_moves_is_waited_in_and_one_that_stands_still_is_left() {
        // Each turn is a fraction of the patience; all of them are more.
        let (patience, held) = (Duration::from_secs(2), Duration::from_millis(500));
        let bound = Bound::new(1);
        let turn = async || {
            let _permit = bound.take(patience).await?;
            tokio::time::sleep(held).await;
            Ok::<_, Stuck>(())
        };
        let turns = futures_util::future::join_all((0..6).map(|_| turn())).await;
        assert!(turns.iter().all(Result::is_ok), "{turns:?}");

        let patience = Duration::from_millis(1);
        let hangs = bound.take(patience).await.unwrap();
        assert!(bound.take(patience).await.is_err());
        drop(hangs);
        assert!(bound.take(patience).await.is_ok());
    }
}
