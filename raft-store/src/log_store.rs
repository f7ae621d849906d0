//! openraft's view of the log: [`RaftLogStorage`] and [`RaftLogReader`].

use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use futures_util::{Stream, stream};
use openraft::OptionalSend;
use openraft::errors::LeaderChanged;
use openraft::storage::{
    IOFlushed, LeaderBoundedStreamError, LeaderBoundedStreamResult, LogState, RaftLogReader, RaftLogStorage,
};
use tokio::sync::{Mutex, Semaphore, mpsc, oneshot};

use crate::database::Database;
use crate::error::Fatal;
use crate::records;
use crate::tail::{Tail, Window, entry_bytes};
use crate::types::{Entry, LeaderId, LogId, TypeConfig, Vote};
use crate::writer::Op;

/// One read for replication gives at most about this much (but at least one entry), so that an append request
/// stays far below the transport's message limit: an entry is at most a little over half a mebibyte.
pub const MAX_READ_BYTES: usize = 1024 * 1024;
/// Entries that were taken in and are not durable yet. Behind them `append` waits.
const MAX_UNFLUSHED_BYTES: usize = 64 * 1024 * 1024;

/// What log store, readers and the store itself share.
pub(crate) struct Log {
    pub(crate) database: Arc<Database>,
    pub(crate) tail: Arc<Tail>,
    pub(crate) fatal: Fatal,
    /// Room for entries that are not durable yet, in bytes.
    pub(crate) room: Arc<Semaphore>,
    /// The way to the writer. The lock makes "change the tail, then queue" one step, so that the queue has the
    /// order of the calls; it is held across the wait for truncation and purge, which nothing may overtake.
    pub(crate) queue: Mutex<mpsc::Sender<Op>>,
}

impl Log {
    pub(crate) fn new(
        database: Arc<Database>,
        tail: Arc<Tail>,
        fatal: Fatal,
        queue: mpsc::Sender<Op>,
    ) -> Self {
        let room = Arc::new(Semaphore::new(MAX_UNFLUSHED_BYTES));
        Self {
            database,
            tail,
            fatal,
            room,
            queue: Mutex::new(queue),
        }
    }

    fn gone(&self) -> io::Error {
        self.fatal.set("the Raft log's writer thread ended unexpectedly")
    }

    /// Queues an operation and waits until it is durable. The caller holds the queue's lock.
    async fn send_and_wait(
        &self,
        queue: &mpsc::Sender<Op>,
        op: impl FnOnce(oneshot::Sender<io::Result<()>>) -> Op,
    ) -> io::Result<()> {
        self.fatal.check()?;
        let (done, answer) = oneshot::channel();
        queue.send(op(done)).await.map_err(|_| self.gone())?;
        answer.await.map_err(|_| self.gone())?
    }

    /// Waits until all that was queued before is durable.
    pub(crate) async fn barrier(&self) -> io::Result<()> {
        let queue = self.queue.lock().await;
        self.send_and_wait(&queue, |done| Op::Barrier { done }).await
    }

    /// Reads `start..end`, cut to what the log holds, up to about `limit_bytes` (at least one entry).
    async fn read(self: &Arc<Self>, start: u64, end: u64, limit_bytes: usize) -> io::Result<Vec<Entry>> {
        let window = self.tail.window(start, end, limit_bytes);
        if window.start >= window.disk_end {
            return Ok(window.cached);
        }
        let log = Arc::clone(self);
        tokio::task::spawn_blocking(move || {
            // Nothing is removed meanwhile; what was removed before, the new window knows.
            let _held = log.tail.hold();
            let Window {
                start,
                disk_end,
                cached,
                ..
            } = log.tail.window(start, end, limit_bytes);
            let mut entries = records::read(&log.database, start, disk_end, limit_bytes)
                .map_err(|error| log.fatal.set(error.to_string()))?;
            if entries.len() as u64 == disk_end.saturating_sub(start) {
                let mut bytes: usize = entries.iter().map(entry_bytes).sum();
                for entry in cached {
                    bytes = bytes.saturating_add(entry_bytes(&entry));
                    if bytes > limit_bytes && !entries.is_empty() {
                        break;
                    }
                    entries.push(entry);
                }
            }
            Ok(entries)
        })
        .await
        .map_err(io::Error::other)?
    }
}

/// The bounds of a range as `start..end`.
fn bounds(range: &impl RangeBounds<u64>) -> (u64, u64) {
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(start) => start.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(end) => end.saturating_add(1),
        Bound::Excluded(end) => *end,
        Bound::Unbounded => u64::MAX,
    };
    (start, end)
}

/// Reads the log. Cheap to clone; any number of them beside the writer.
#[derive(Clone)]
pub struct LogReader {
    log: Arc<Log>,
}

impl RaftLogReader<TypeConfig> for LogReader {
    // Pieces of a bounded size, each checked against the vote before and after it was read, so that a follower far
    // behind does not bring the whole log into memory and no entry of another leader's log slips in.
    async fn leader_bounded_stream<RB>(
        &mut self,
        leader: LeaderId,
        range: RB,
    ) -> impl Stream<Item = LeaderBoundedStreamResult<TypeConfig>> + OptionalSend
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        let (start, end) = bounds(&range);
        let log = Arc::clone(&self.log);
        let still_led = move |log: &Log| {
            let vote = log.tail.vote();
            match &vote {
                Some(vote) if vote.leader_id() == &leader && vote.is_committed() => Ok(()),
                _ => Err(LeaderBoundedStreamError::LeaderChanged(LeaderChanged::new(
                    leader, vote,
                ))),
            }
        };
        let pieces = stream::unfold((start, false), move |(start, ended)| {
            let log = Arc::clone(&log);
            async move {
                if ended {
                    return None;
                }
                let piece = async {
                    still_led(&log)?;
                    let entries = log.read(start, end, MAX_READ_BYTES).await?;
                    still_led(&log)?;
                    Ok(entries)
                };
                next_piece(piece.await)
            }
        });
        Box::pin(flatten(pieces))
    }

    async fn entries_stream<RB>(&mut self, range: RB) -> impl Stream<Item = io::Result<Entry>> + OptionalSend
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        let (start, end) = bounds(&range);
        let log = Arc::clone(&self.log);
        let pieces = stream::unfold((start, false), move |(start, ended)| {
            let log = Arc::clone(&log);
            async move {
                if ended {
                    return None;
                }
                next_piece(log.read(start, end, MAX_READ_BYTES).await)
            }
        });
        Box::pin(flatten(pieces))
    }

    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> io::Result<Vec<Entry>> {
        let (start, end) = bounds(&range);
        self.log.read(start, end, usize::MAX).await
    }

    async fn read_vote(&mut self) -> io::Result<Option<Vote>> {
        Ok(self.log.tail.vote())
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> io::Result<Vec<Entry>> {
        self.log.read(start, end, MAX_READ_BYTES).await
    }
}

/// One piece of a stream and where the next begins. An empty piece or an error ends it.
type Piece<E> = Option<(Vec<Result<Entry, E>>, (u64, bool))>;

fn next_piece<E>(read: Result<Vec<Entry>, E>) -> Piece<E> {
    match read {
        Ok(entries) => {
            let next = entries.last()?.log_id.index().saturating_add(1);
            Some((entries.into_iter().map(Ok).collect(), (next, false)))
        }
        Err(error) => Some((vec![Err(error)], (0, true))),
    }
}

fn flatten<T>(pieces: impl Stream<Item = Vec<T>>) -> impl Stream<Item = T> {
    use futures_util::StreamExt as _;
    pieces.flat_map(stream::iter)
}

/// Writes the log: the one handle that openraft owns. See [`writer`](crate::writer) for what is guaranteed.
pub struct LogStore {
    log: Arc<Log>,
}

impl LogStore {
    pub(crate) fn new(log: Arc<Log>) -> Self {
        Self { log }
    }
}

impl RaftLogStorage<TypeConfig> for LogStore {
    type LogReader = LogReader;

    async fn get_log_state(&mut self) -> io::Result<LogState<TypeConfig>> {
        let (last_purged_log_id, last_log_id) = self.log.tail.bounds();
        Ok(LogState {
            last_purged_log_id,
            last_log_id,
        })
    }

    async fn get_log_reader(&mut self) -> LogReader {
        LogReader {
            log: Arc::clone(&self.log),
        }
    }

    async fn save_vote(&mut self, vote: &Vote) -> io::Result<()> {
        let queue = self.log.queue.lock().await;
        self.log
            .send_and_wait(&queue, |done| Op::Vote { vote: *vote, done })
            .await
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> io::Result<()> {
        self.log.fatal.check()?;
        let queue = self.log.queue.lock().await;
        queue
            .send(Op::Committed { committed })
            .await
            .map_err(|_| self.log.gone())?;
        self.log.tail.set_committed(committed);
        Ok(())
    }

    async fn read_committed(&mut self) -> io::Result<Option<LogId>> {
        Ok(self.log.tail.committed())
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<TypeConfig>) -> io::Result<()>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        self.log.fatal.check()?;
        let entries: Vec<Entry> = entries.into_iter().collect();
        let records: Vec<(u64, Vec<u8>)> = entries.iter().map(records::seal).collect();
        let bytes = records
            .iter()
            .map(|(_, record)| record.len())
            .sum::<usize>()
            .min(MAX_UNFLUSHED_BYTES);
        let bytes = u32::try_from(bytes).expect("MAX_UNFLUSHED_BYTES fits");
        let room = Arc::clone(&self.log.room)
            .acquire_many_owned(bytes)
            .await
            .map_err(io::Error::other)?;
        let queue = self.log.queue.lock().await;
        // The place in the queue first: what is in the tail is queued for certain, though this call be cancelled.
        let place = queue.reserve().await.map_err(|_| self.log.gone())?;
        let first = self
            .log
            .tail
            .append(entries)
            .map_err(|what| self.log.fatal.set(what))?;
        place.send(Op::Append {
            first,
            records,
            callback,
            room,
        });
        Ok(())
    }

    async fn truncate_after(&mut self, last_log_id: Option<LogId>) -> io::Result<()> {
        let queue = self.log.queue.lock().await;
        let (purged, last) = self.log.tail.bounds();
        let from = last_log_id.map_or(0, |id| id.index().saturating_add(1));
        if last.is_none_or(|last| last.index() < from) {
            return Ok(());
        }
        let kept = self
            .log
            .tail
            .committed()
            .into_iter()
            .chain(purged)
            .map(|id| id.index())
            .max();
        if let Some(kept) = kept.filter(|kept| *kept >= from) {
            return Err(self.log.fatal.set(format!(
                "entries from {from} on were to be removed, but all up to {kept} are committed"
            )));
        }
        let last = match from.checked_sub(1) {
            None => None,
            Some(index) if purged.is_some_and(|purged| purged.index() == index) => purged,
            Some(index) => self
                .log
                .read(index, from, usize::MAX)
                .await?
                .first()
                .map(|entry| entry.log_id),
        };
        self.log
            .send_and_wait(&queue, |done| Op::Truncate { from, last, done })
            .await
    }

    async fn purge(&mut self, log_id: LogId) -> io::Result<()> {
        let queue = self.log.queue.lock().await;
        if self.log.tail.bounds().0.is_some_and(|purged| purged >= log_id) {
            return Ok(());
        }
        self.log
            .send_and_wait(&queue, |done| Op::Purge { upto: log_id, done })
            .await
    }
}
