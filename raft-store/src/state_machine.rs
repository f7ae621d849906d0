//! Drives a [`StateMachine`]: applies entries in order, answers each, builds and installs snapshots.
//!
//! The state lives in memory. What is durable is the newest snapshot (state, last applied log id, membership) and the
//! log behind it; a start restores the one and openraft applies the other again, up to the committed index that was
//! saved. So after a start the state may be older than before the crash until the leader's commit index is known:
//! wait for `Raft::wait_for_recovery` before serving.

use std::any::Any;
use std::io;
use std::ops::Deref;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use futures_util::{Stream, StreamExt as _};
use openraft::storage::{EntryResponder, RaftSnapshotBuilder, RaftStateMachine};
use openraft::{EntryPayload, OptionalSend};
use parking_lot::{RwLock, RwLockReadGuard};
use tokio::sync::watch;

use crate::error::{Fatal, OpenError};
use crate::machine::StateMachine;
use crate::snapshot::Snapshots;
use crate::snapshot_file::SnapshotData;
use crate::types::{LogId, Reply, Snapshot, SnapshotMeta, StoredMembership, TypeConfig};

/// A state machine and how far it got; dereferences to the machine.
#[derive(Debug)]
pub struct Applied<M> {
    /// The machine itself.
    pub machine: M,
    /// The last entry it has seen.
    pub last_applied: Option<LogId>,
    /// The last membership that was applied.
    pub membership: StoredMembership,
}

impl<M> Applied<M> {
    /// The index of the last applied entry, 0 before the first.
    pub fn index(&self) -> u64 {
        self.last_applied.map_or(0, |id| id.index())
    }
}

impl<M> Deref for Applied<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.machine
    }
}

struct Shared<M> {
    /// Written by openraft's one state machine task, entry by entry; read by everyone who serves requests. Never
    /// held over an `.await`. Readers should be short: while one reads, nothing is applied. (Only whoever applies may take
    /// its time: a snapshot is decoded under the read lock, so that others can read meanwhile.)
    applied: RwLock<Applied<M>>,
    /// Index + 1 of the last applied entry.
    progress: watch::Sender<u64>,
}

/// Looks at the state; cheap to clone, for any thread.
pub struct StateReader<M> {
    shared: Arc<Shared<M>>,
}

impl<M> Clone for StateReader<M> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<M> StateReader<M> {
    /// The state as of now. Do not hold the guard over an `.await`: nothing is applied meanwhile.
    pub fn read(&self) -> RwLockReadGuard<'_, Applied<M>> {
        self.shared.applied.read()
    }

    /// Changes with every applied entry and every installed snapshot. The value is the number of entries applied so
    /// far, that is, the index of the last one plus 1; 0 when there is none.
    pub fn progress(&self) -> watch::Receiver<u64> {
        self.shared.progress.subscribe()
    }
}

/// openraft's view of the state machine.
pub struct StateMachineStore<M> {
    shared: Arc<Shared<M>>,
    snapshots: Arc<Snapshots>,
    fatal: Fatal,
}

impl<M: StateMachine> StateMachineStore<M> {
    /// Restores `machine` from the newest snapshot, if there is one. Blocking.
    pub(crate) fn open(mut machine: M, snapshots: Arc<Snapshots>, fatal: Fatal) -> Result<Self, OpenError> {
        let (mut last_applied, mut membership) = (None, StoredMembership::default());
        if let Some(current) = snapshots.current() {
            let path = current.snapshot.path();
            let (meta, state) = current.snapshot.read_all().map_err(|error| OpenError::Damaged {
                path: path.to_owned(),
                record: "the snapshot".into(),
                detail: error.to_string(),
            })?;
            let copy = machine.decode(&state).map_err(|detail| OpenError::Restore {
                path: path.to_owned(),
                detail,
            })?;
            machine.replace(copy);
            last_applied = meta.last_log_id;
            membership = meta.last_membership;
        }
        let applied = Applied {
            machine,
            last_applied,
            membership,
        };
        let progress = watch::Sender::new(count(&applied.last_applied));
        Ok(Self {
            shared: Arc::new(Shared {
                applied: RwLock::new(applied),
                progress,
            }),
            snapshots,
            fatal,
        })
    }

    /// A handle to look at the state.
    pub fn reader(&self) -> StateReader<M> {
        StateReader {
            shared: Arc::clone(&self.shared),
        }
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "applying a log entry panicked".to_owned())
}

fn count(last_applied: &Option<LogId>) -> u64 {
    last_applied.map_or(0, |id| id.index().saturating_add(1))
}

impl<M: StateMachine> RaftStateMachine<TypeConfig> for StateMachineStore<M> {
    type SnapshotData = SnapshotData;
    type SnapshotBuilder = SnapshotBuilder<M>;

    async fn applied_state(&mut self) -> io::Result<(Option<LogId>, StoredMembership)> {
        let applied = self.shared.applied.read();
        Ok((applied.last_applied, applied.membership.clone()))
    }

    async fn apply<Strm>(&mut self, mut entries: Strm) -> io::Result<()>
    where
        Strm: Stream<Item = io::Result<EntryResponder<TypeConfig>>> + Unpin + OptionalSend,
    {
        while let Some(next) = entries.next().await {
            let (entry, responder) = next?;
            let id = entry.log_id;
            let reply = {
                let mut applied = self.shared.applied.write();
                let reply = match entry.payload {
                    EntryPayload::Normal(command) => {
                        // A machine that panics may be half changed: nobody may see it again.
                        let apply = AssertUnwindSafe(|| applied.machine.apply(id, &command.0));
                        let applied =
                            std::panic::catch_unwind(apply).unwrap_or_else(|panic| Err(panic_text(&*panic)));
                        Reply(applied.map_err(|why| self.fatal.set(why))?)
                    }
                    EntryPayload::Blank => {
                        applied.machine.applied_blank(id);
                        Reply::default()
                    }
                    EntryPayload::Membership(membership) => {
                        let membership = StoredMembership::new(Some(id), membership);
                        applied.machine.applied_membership(&membership);
                        applied.membership = membership;
                        Reply::default()
                    }
                };
                applied.last_applied = Some(id);
                reply
            };
            self.shared.progress.send_replace(count(&Some(id)));
            // Every entry is answered; whoever gets the answer can already read what it speaks of.
            if let Some(responder) = responder {
                responder.send(reply);
            }
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> SnapshotBuilder<M> {
        // The copy is taken here, in step with `apply`: a snapshot must not be ahead of what openraft believes to be
        // applied. Only the copy: nothing is applied, so no write is answered, until this returns.
        let applied = self.shared.applied.read();
        let meta = SnapshotMeta {
            last_log_id: applied.last_applied,
            last_membership: applied.membership.clone(),
        };
        SnapshotBuilder {
            copied: Some((meta, applied.machine.image())),
            snapshots: Arc::clone(&self.snapshots),
            fatal: self.fatal.clone(),
        }
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, snapshot: SnapshotData) -> io::Result<()> {
        let (shared, snapshots, fatal) = (
            Arc::clone(&self.shared),
            Arc::clone(&self.snapshots),
            self.fatal.clone(),
        );
        let announced = meta.clone();
        tokio::task::spawn_blocking(move || {
            let installed = (|| {
                let (meta, state) = snapshot.read_all()?;
                if meta != announced {
                    let what = format!("the snapshot's own meta is {meta}, announced was {announced}");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, what));
                }
                // Whoever reads the state meanwhile reads the old one: the decoding of a large one takes seconds.
                let copy = shared.applied.read().machine.decode(&state);
                let copy = copy.map_err(io::Error::other)?;
                let _old = {
                    let mut applied = shared.applied.write();
                    applied.last_applied = meta.last_log_id;
                    applied.membership = meta.last_membership.clone();
                    applied.machine.replace(copy)
                };
                // Only a state that the machine understands gets onto the disk, where the next start depends on it.
                snapshots.adopt(&meta, &snapshot, &state)?;
                shared.progress.send_replace(count(&meta.last_log_id));
                Ok(())
            })();
            installed.map_err(|error| fatal.set(format!("installing a snapshot: {error}")))
        })
        .await
        .map_err(io::Error::other)?
    }

    async fn get_current_snapshot(&mut self) -> io::Result<Option<Snapshot>> {
        Ok(self.snapshots.current())
    }
}

/// Encodes one copy of the state and writes it to a file, while entries are applied.
pub struct SnapshotBuilder<M: StateMachine> {
    copied: Option<(SnapshotMeta, M::Image)>,
    snapshots: Arc<Snapshots>,
    fatal: Fatal,
}

impl<M: StateMachine> RaftSnapshotBuilder<TypeConfig> for SnapshotBuilder<M> {
    type SnapshotData = SnapshotData;

    async fn build_snapshot(&mut self) -> io::Result<Snapshot> {
        let Some((meta, copy)) = self.copied.take() else {
            return Err(io::Error::other("a snapshot builder builds once"));
        };
        let snapshots = Arc::clone(&self.snapshots);
        let built = tokio::task::spawn_blocking(move || {
            let began = Instant::now();
            let state = M::encode(&copy);
            drop(copy);
            let encoded = began.elapsed();
            let stored = snapshots.store(&meta, &state)?;
            tracing::info!(
                index = stored.meta.last_log_id.map_or(0, |id| id.index()),
                bytes = state.len(),
                encode_ms = encoded.as_millis(),
                write_ms = (began.elapsed() - encoded).as_millis(),
                "snapshot built"
            );
            Ok(stored)
        });
        built.await.map_err(io::Error::other).flatten().map_err(|error| {
            self.fatal
                .set(format!("encoding and writing a snapshot: {error}"))
        })
    }
}
