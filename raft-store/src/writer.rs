//! The one thread that writes: group commit, one sync per group, acknowledgements in order.
//!
//! Guaranteed: whatever is acknowledged is durable; acknowledgements come in the order of the calls, for votes, log
//! entries, truncation and purge alike; after the first failure nothing is acknowledged any more, not even what would
//! have worked.
//!
//! Not guaranteed: durability of the committed index, which rides along with the next group (it is an optimisation
//! of recovery; losing the last of it after a power loss loses nothing).

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use openraft::storage::IOFlushed;
use rocksdb::WriteBatch;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::database::Database;
use crate::error::Fatal;
use crate::tail::Tail;
use crate::types::{LogId, TypeConfig, Vote};
use crate::{meta, records};

/// Calls that may wait for the writer. openraft sends appends without waiting for each other; behind this many it
/// waits, which is what slows a leader down whose disk is slow.
pub(crate) const MAX_QUEUED_OPS: usize = 1024;
/// Calls committed by one sync. More would only make the first of them wait longer.
const MAX_GROUP_OPS: usize = 256;
/// Bytes committed by one sync, so that one group's time stays far below an election's.
const MAX_GROUP_BYTES: usize = 8 * 1024 * 1024;

/// One call, as it lies in the queue.
pub(crate) enum Op {
    Append {
        /// Written as the log's first index, when the log was empty and never purged.
        first: Option<u64>,
        /// (index, framed record), in order.
        records: Vec<(u64, Vec<u8>)>,
        callback: IOFlushed<TypeConfig>,
        /// Gives the queue's room back when the entries are durable.
        room: OwnedSemaphorePermit,
    },
    Vote {
        vote: Vote,
        done: oneshot::Sender<io::Result<()>>,
    },
    /// Removes all entries from this index on.
    Truncate {
        from: u64,
        done: oneshot::Sender<io::Result<()>>,
    },
    Purge {
        upto: LogId,
        done: oneshot::Sender<io::Result<()>>,
    },
    /// Nobody waits for it and it forces no sync.
    Committed { committed: Option<LogId> },
    /// Answered when all before it is durable.
    Barrier { done: oneshot::Sender<io::Result<()>> },
}

impl Op {
    fn size_bytes(&self) -> usize {
        match self {
            Op::Append { records, .. } => records.iter().map(|(_, record)| record.len()).sum(),
            _ => 0,
        }
    }

    fn needs_sync(&self) -> bool {
        !matches!(self, Op::Committed { .. })
    }
}

/// What to tell, and to whom, once a group is durable.
enum Reply {
    Flushed {
        callback: IOFlushed<TypeConfig>,
        last: u64,
        room: OwnedSemaphorePermit,
    },
    Done(oneshot::Sender<io::Result<()>>),
}

pub(crate) struct Writer {
    database: Arc<Database>,
    tail: Arc<Tail>,
    fatal: Fatal,
}

impl Writer {
    /// Starts the thread. It ends when every sender is gone, after all that was queued is done.
    pub(crate) fn spawn(
        database: Arc<Database>,
        tail: Arc<Tail>,
        fatal: Fatal,
    ) -> io::Result<(mpsc::Sender<Op>, JoinHandle<()>)> {
        let (sender, receiver) = mpsc::channel(MAX_QUEUED_OPS);
        let writer = Self {
            database,
            tail,
            fatal,
        };
        let thread = std::thread::Builder::new()
            .name("raft-log-writer".into())
            .spawn(move || writer.run(receiver))?;
        Ok((sender, thread))
    }

    fn run(self, mut queue: mpsc::Receiver<Op>) {
        let mut carried = None;
        loop {
            let Some(first) = carried.take().or_else(|| queue.blocking_recv()) else {
                break;
            };
            let mut bytes = first.size_bytes();
            let mut group = vec![first];
            while group.len() < MAX_GROUP_OPS {
                let Ok(op) = queue.try_recv() else { break };
                bytes += op.size_bytes();
                if bytes > MAX_GROUP_BYTES {
                    carried = Some(op);
                    break;
                }
                group.push(op);
            }
            self.commit(group);
        }
    }

    fn commit(&self, group: Vec<Op>) {
        let sync = group.iter().any(Op::needs_sync);
        let mut batch = WriteBatch::default();
        let mut replies = Vec::with_capacity(group.len());
        let mut committed = None;
        for op in group {
            match op {
                Op::Append {
                    first,
                    records,
                    callback,
                    room,
                } => {
                    if let Some(first) = first {
                        meta::put_first(&self.database, &mut batch, first);
                    }
                    let mut last = 0;
                    for (index, record) in &records {
                        records::put(&self.database, &mut batch, *index, record);
                        last = *index;
                    }
                    replies.push(Reply::Flushed { callback, last, room });
                }
                Op::Vote { vote, done } => {
                    meta::put_vote(&self.database, &mut batch, &vote);
                    replies.push(Reply::Done(done));
                }
                Op::Truncate { from, done } => {
                    records::delete_from(&self.database, &mut batch, from);
                    replies.push(Reply::Done(done));
                }
                Op::Purge { upto, done } => {
                    records::delete_upto(&self.database, &mut batch, upto.index());
                    meta::put_purged(&self.database, &mut batch, &upto);
                    replies.push(Reply::Done(done));
                }
                // Only the last of a group is worth writing. It goes last, so that it never runs ahead of the
                // entries it speaks of.
                Op::Committed { committed: value } => committed = Some(value),
                Op::Barrier { done } => replies.push(Reply::Done(done)),
            }
        }
        if let Some(committed) = committed {
            meta::put_committed(&self.database, &mut batch, committed.as_ref());
        }
        // After a failure nobody knows what the disk holds: nothing is tried, everything is refused.
        let result = self.fatal.check().and_then(|()| {
            self.database.write(batch, sync).map_err(|error| {
                self.fatal.set(format!(
                    "writing the Raft log in {}: {error}",
                    self.database.path().display()
                ))
            })
        });
        for reply in replies {
            let result = match &result {
                Ok(()) => Ok(()),
                Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
            };
            match reply {
                Reply::Flushed { callback, last, room } => {
                    if result.is_ok() {
                        self.tail.flushed(last);
                    }
                    drop(room);
                    callback.io_completed(result);
                }
                // A caller that went away does not need its answer.
                Reply::Done(done) => drop(done.send(result)),
            }
        }
    }
}
