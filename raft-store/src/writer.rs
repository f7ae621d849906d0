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
        /// The last entry that stays.
        last: Option<LogId>,
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
    Voted {
        vote: Vote,
        done: oneshot::Sender<io::Result<()>>,
    },
    Truncated {
        from: u64,
        last: Option<LogId>,
        done: oneshot::Sender<io::Result<()>>,
    },
    Purged {
        upto: LogId,
        done: oneshot::Sender<io::Result<()>>,
    },
    Done(oneshot::Sender<io::Result<()>>),
}

/// A writer that panicked answers nobody any more: whoever waits on the store's failure must know.
struct PanicGuard<'a>(&'a Fatal);

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.set("the Raft log's writer thread panicked");
        }
    }
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
        let _guard = PanicGuard(&self.fatal);
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
        let cuts = group
            .iter()
            .any(|op| matches!(op, Op::Truncate { .. } | Op::Purge { .. }));
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
                    replies.push(Reply::Voted { vote, done });
                }
                Op::Truncate { from, last, done } => {
                    records::delete_from(&self.database, &mut batch, from);
                    replies.push(Reply::Truncated { from, last, done });
                }
                Op::Purge { upto, done } => {
                    records::delete_upto(&self.database, &mut batch, upto.index());
                    meta::put_purged(&self.database, &mut batch, &upto);
                    replies.push(Reply::Purged { upto, done });
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
        let held = cuts.then(|| self.tail.cut());
        // After a failure nobody knows what the disk holds: nothing is tried, everything is refused.
        let result = self.fatal.check().and_then(|()| {
            self.database.write(batch, sync).map_err(|error| {
                self.fatal.set(format!(
                    "writing the Raft log in {}: {error}",
                    self.database.path().display()
                ))
            })
        });
        // What is in memory follows what is on the disk, in the order of the calls, before anyone is told.
        if result.is_ok() {
            for reply in &replies {
                match reply {
                    Reply::Flushed { last, .. } => self.tail.flushed(*last),
                    Reply::Voted { vote, .. } => self.tail.set_vote(*vote),
                    Reply::Truncated { from, last, .. } => self.tail.truncated(*from, *last),
                    Reply::Purged { upto, .. } => self.tail.purged(*upto),
                    Reply::Done(_) => {}
                }
            }
        }
        drop(held);
        for reply in replies {
            let result = match &result {
                Ok(()) => Ok(()),
                Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
            };
            match reply {
                Reply::Flushed { callback, room, .. } => {
                    drop(room);
                    callback.io_completed(result);
                }
                // A caller that went away does not need its answer.
                Reply::Voted { done, .. }
                | Reply::Truncated { done, .. }
                | Reply::Purged { done, .. }
                | Reply::Done(done) => drop(done.send(result)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use openraft::EntryPayload;
    use openraft::type_config::TypeConfigExt as _;
    use tokio::sync::Semaphore;

    use super::*;
    use crate::meta::Meta;
    use crate::types::{Entry, log_id};

    #[test]
    fn what_waits_is_committed_by_one_sync_and_acknowledged_in_order() {
        const APPENDS: u64 = 200;
        let folder = tempfile::tempdir().unwrap();
        let (database, _) = Database::open(folder.path(), false).unwrap();
        let (database, tail) = (Arc::new(database), Arc::new(Tail::new(&Meta::default(), None)));
        let room = Arc::new(Semaphore::new(Semaphore::MAX_PERMITS));
        let (queue, thread) = Writer::spawn(Arc::clone(&database), Arc::clone(&tail), Fatal::new()).unwrap();

        // A purge has to wait for a reader of the disk, and everything behind it waits with it.
        let held = tail.hold();
        let (done, mut purged) = oneshot::channel();
        queue
            .blocking_send(Op::Purge {
                upto: log_id(1, 9),
                done,
            })
            .unwrap();
        let mut waiting = Vec::new();
        for index in 10..10 + APPENDS {
            let entry = Entry {
                log_id: log_id(1, index),
                payload: EntryPayload::Blank,
            };
            let (signal, flushed) = TypeConfig::oneshot();
            let op = Op::Append {
                first: None,
                records: vec![records::seal(&entry)],
                callback: IOFlushed::signal(signal),
                room: Arc::clone(&room).try_acquire_many_owned(1).unwrap(),
            };
            queue.blocking_send(op).unwrap();
            waiting.push(flushed);
        }
        assert!(
            purged.try_recv().is_err() && waiting[0].try_recv().is_err(),
            "acknowledged too early"
        );
        assert_eq!(database.counts(), (0, 0));
        drop(held);
        waiting.pop().unwrap().blocking_recv().unwrap().unwrap();
        purged.try_recv().unwrap().unwrap();
        for mut flushed in waiting {
            flushed
                .try_recv()
                .expect("an earlier call was overtaken")
                .unwrap();
        }
        let (writes, syncs) = database.counts();
        assert!(
            writes <= 2 && syncs == writes,
            "{writes} writes and {syncs} syncs for {APPENDS} appends"
        );
        assert_eq!(
            records::read(&database, 10, 10 + APPENDS, usize::MAX)
                .unwrap()
                .len() as u64,
            APPENDS
        );
        drop(queue);
        thread.join().unwrap();
    }

    #[test]
    fn after_a_failure_nothing_is_written_or_acknowledged() {
        let folder = tempfile::tempdir().unwrap();
        let (database, _) = Database::open(folder.path(), false).unwrap();
        let (database, tail, fatal) = (
            Arc::new(database),
            Arc::new(Tail::new(&Meta::default(), None)),
            Fatal::new(),
        );
        let (queue, thread) = Writer::spawn(Arc::clone(&database), Arc::clone(&tail), fatal.clone()).unwrap();
        fatal.set("the disk is gone");
        let (done, answer) = oneshot::channel();
        queue
            .blocking_send(Op::Vote {
                vote: Vote::new(4, 1),
                done,
            })
            .unwrap();
        let error = answer.blocking_recv().unwrap().unwrap_err();
        assert!(error.to_string().contains("the disk is gone"), "{error}");
        assert_eq!(tail.vote(), None);
        assert_eq!(database.counts(), (0, 0));
        drop(queue);
        thread.join().unwrap();
    }
}
