//! What the rest of the master asks of consensus.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mooncake_proto::MAX_COMMAND_BYTES;
use mooncake_raft_store::{Command as RawCommand, NodeId, SnapshotMeta, TypeConfig};
use mooncake_state::{Command, Reply, State};
use openraft::async_runtime::watch::WatchReceiver as _;
use openraft::errors::{ClientWriteError, Fatal, ForwardToLeader, RaftError};
use openraft::{Instant as _, ServerState};
use tokio::sync::{Semaphore, broadcast, oneshot, watch};

use super::bootstrap::knows_a_cluster;
use super::machine::{Change, decode_reply};
use super::peers::Peers;
use super::read_index::Reads;
use super::service::Shared;
use super::{Identity, Leadership, Master, MasterRaft, StateReader};

/// Proposals under way at once. At a few milliseconds each this is far more than the log takes; more are a sign
/// that it stands still, and the caller shall hear that.
pub const MAX_PROPOSALS: usize = 1024;
/// Bytes of proposals under way at once: they are held in memory until a quorum has them.
pub const MAX_PROPOSAL_BYTES: usize = 64 << 20;
/// How long a proposal may take before its outcome is called unknown.
pub const PROPOSE_DEADLINE: Duration = Duration::from_secs(5);
/// How long a linearizable read may take.
pub const READ_DEADLINE: Duration = Duration::from_secs(3);
/// A follower this many entries behind what it knows to be committed is not ready.
pub const MAX_READY_LAG: u64 = 1000;
/// A leader that no quorum confirmed for so long is not ready. A follower may wait for the next leader much longer: it
/// holds requests, and passes them on when there is one. A leader that is cut off learns of its successor last of all, and
/// what it is sent meanwhile is lost time for the caller. More than a frozen machine or an overload takes, and about
/// as long as the others need for an election, so that one of them is there to go to.
pub const QUORUM_WITHIN: Duration = Duration::from_secs(1);
/// How long a new leader waits for the first answers of the others before it calls them silent: many heartbeats.
const SETTLE: Duration = Duration::from_secs(1);

/// Consensus, for the rest of the process. Cheap to clone, usable from any runtime.
#[derive(Clone)]
pub struct Handle {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) raft: MasterRaft,
    pub(crate) reader: StateReader,
    pub(crate) shared: Arc<Shared>,
    pub(crate) runtime: tokio::runtime::Handle,
    pub(crate) proposals: Arc<Semaphore>,
    pub(crate) proposal_bytes: Arc<Semaphore>,
    pub(crate) reads: Reads,
    pub(crate) leadership: watch::Receiver<Leadership>,
    pub(crate) recovered: watch::Receiver<bool>,
    pub(crate) failed: watch::Receiver<Option<Arc<str>>>,
    pub(crate) changes: broadcast::Sender<Change>,
    pub(crate) election_timeout: Duration,
    pub(crate) peers: Arc<Peers>,
    /// Held while the membership is changed.
    pub(crate) changing: Arc<tokio::sync::Mutex<()>>,
}

/// The answer to a proposal: committed by a quorum and applied here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proposed {
    /// Term of the entry.
    pub term: u64,
    /// Index of the entry: a read with `min_index` of this sees it.
    pub index: u64,
    /// What the state machine said.
    pub reply: Reply,
}

/// Why there is no answer to a proposal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// Nothing was appended; ask the leader.
    #[error("this master does not lead{}", known(.leader))]
    NotLeader {
        /// Who does, if known.
        leader: Option<Master>,
    },
    /// It may be in the log, and may be committed, now or later. Never report this as a failure.
    #[error("it is not known whether the command was committed: {reason}")]
    OutcomeUnknown {
        /// For a person.
        reason: String,
    },
    /// Nothing was appended: too much is under way.
    #[error("too many commands wait for the log; try again")]
    Overloaded,
    /// Nothing was appended: over [`MAX_COMMAND_BYTES`].
    #[error("the command has {bytes} bytes, the limit is {MAX_COMMAND_BYTES}")]
    TooLarge {
        /// Its size.
        bytes: usize,
    },
    /// Nothing was appended: this master stops.
    #[error("this master stops")]
    Stopped,
}

/// Why a linearizable read is not possible.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Ask the leader.
    #[error("this master does not lead{}", known(.leader))]
    NotLeader {
        /// Who does, if known.
        leader: Option<Master>,
    },
    /// This master leads, as far as it knows, but no quorum confirmed it in time.
    #[error("no quorum of masters confirmed the leader in time")]
    NoQuorum,
    /// Confirmed, but the state has not caught up in time.
    #[error("the state has not caught up with the log in time")]
    Behind,
    /// Too many readers wait.
    #[error("too many reads wait; try again")]
    Overloaded,
    /// This master stops.
    #[error("this master stops")]
    Stopped,
}

/// Why this master should not get requests.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotReady {
    /// It belongs to no cluster yet.
    #[error(
        "not a member of a cluster yet: start all masters with --bootstrap once, or add this one to a cluster"
    )]
    NotInitialised,
    /// The log is read again after a start.
    #[error("still recovering the state it had before it was started")]
    Recovering,
    /// None is known.
    #[error("no leader is known")]
    NoLeader,
    /// Known, but silent.
    #[error("nothing heard from the leader, or from a quorum, for {silent_ms} ms")]
    LeaderSilent {
        /// For how long.
        silent_ms: u64,
    },
    /// Too far behind.
    #[error("{entries} entries behind the committed log")]
    Behind {
        /// How far.
        entries: u64,
    },
}

pub(super) fn known(leader: &Option<Master>) -> String {
    leader.as_ref().map_or(String::new(), |master| {
        format!("; master {} does ({})", master.id, master.http_address)
    })
}

/// The state as of one entry: a copy, which costs next to nothing, so that no reader holds up what is applied.
pub struct StateAt {
    /// The state.
    pub state: State,
    /// The index of the last entry in it.
    pub applied_index: u64,
}

impl Deref for StateAt {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

/// The applied index, as it moves.
#[derive(Clone, Debug)]
pub struct AppliedWatch(watch::Receiver<u64>);

impl AppliedWatch {
    /// The index of the last applied entry.
    pub fn index(&self) -> u64 {
        self.0.borrow().saturating_sub(1)
    }

    /// Waits until it moved since the last call. `false`: this master stops.
    pub async fn changed(&mut self) -> bool {
        self.0.changed().await.is_ok()
    }

    /// Waits until `index` is applied. `false`: this master stops.
    pub async fn reached(&mut self, index: u64) -> bool {
        self.0.wait_for(|count| *count > index).await.is_ok()
    }
}

/// One master, as the membership and the leader's bookkeeping know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its Raft id.
    pub id: NodeId,
    /// `host:port` of the RPC port.
    pub rpc_address: String,
    /// `host:port` of the HTTP port.
    pub http_address: String,
    /// The disk that the id was given to.
    pub disk_id: String,
    /// Votes; otherwise it only learns.
    pub is_voter: bool,
    /// Entries behind the leader's log; only the leader knows.
    pub lag: Option<u64>,
    /// Since its last answer; only the leader knows, and of itself there is none.
    pub silent: Option<Duration>,
}

/// The cluster as this master sees it.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// This master.
    pub me: Identity,
    /// The newest term it knows of.
    pub term: u64,
    /// The leader of that term.
    pub leader_id: Option<NodeId>,
    /// Last index of its own log.
    pub last_log_index: u64,
    /// Term of the entry there.
    pub last_log_term: u64,
    /// What it knows to be committed.
    pub committed_index: u64,
    /// What it has applied.
    pub applied_index: u64,
    /// What its newest snapshot covers.
    pub snapshot_index: u64,
    /// Up to where its log is purged: a master that lacks an entry up to here is sent a snapshot.
    pub purged_index: u64,
    /// Everyone, by id.
    pub members: Vec<Member>,
}

impl Handle {
    /// Proposes a command and waits until it is committed and applied here, at most [`PROPOSE_DEADLINE`].
    pub async fn propose(&self, command: &Command) -> Result<Proposed, ProposeError> {
        self.propose_within(command, PROPOSE_DEADLINE).await
    }

    /// The same with another deadline.
    pub async fn propose_within(
        &self,
        command: &Command,
        deadline: Duration,
    ) -> Result<Proposed, ProposeError> {
        let bytes = command.encode().map_err(|error| match error {
            mooncake_state::CommandError::TooLarge { bytes } => ProposeError::TooLarge { bytes },
        })?;
        let inner = &self.inner;
        let weight = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let slot = Arc::clone(&inner.proposals)
            .try_acquire_owned()
            .map_err(|_| ProposeError::Overloaded)?;
        let room = Arc::clone(&inner.proposal_bytes)
            .try_acquire_many_owned(weight)
            .map_err(|_| ProposeError::Overloaded)?;
        let (answer, waiter) = oneshot::channel();
        let raft = inner.raft.clone();
        // A task of its own: it holds its slot until Raft is done with the entry, whether the caller waits or not,
        // so that what a stalled log holds in memory stays bounded.
        inner.runtime.spawn(async move {
            let outcome = raft.client_write(RawCommand(bytes)).await;
            drop((slot, room));
            let _ = answer.send(outcome);
        });
        match tokio::time::timeout(deadline, waiter).await {
            Ok(Ok(Ok(written))) => {
                let reply = decode_reply(&written.data.0).map_err(|error| ProposeError::OutcomeUnknown {
                    // It is committed; what the state machine said is not readable. Cannot happen in one process.
                    reason: format!("the state machine's answer cannot be read: {error}"),
                })?;
                Ok(Proposed {
                    term: written.log_id.committed_leader_id().term,
                    index: written.log_id.index(),
                    reply,
                })
            }
            Ok(Ok(Err(error))) => Err(classify(error)),
            Ok(Err(_)) => Err(ProposeError::OutcomeUnknown {
                reason: "this master stops".into(),
            }),
            Err(_) => Err(ProposeError::OutcomeUnknown {
                reason: format!(
                    "no quorum of masters confirmed it within {} ms",
                    deadline.as_millis()
                ),
            }),
        }
    }

    /// Confirms with a quorum that this master leads; afterwards [`state`](Self::state) holds everything that was
    /// acknowledged before the call. Gives the index up to which the state is confirmed.
    pub async fn read_index(&self) -> Result<u64, ReadError> {
        self.read_index_within(READ_DEADLINE).await
    }

    /// The same with another deadline.
    pub async fn read_index_within(&self, deadline: Duration) -> Result<u64, ReadError> {
        self.inner.reads.read(deadline).await
    }

    /// The state as applied here, as of now; possibly stale.
    pub fn state(&self) -> StateAt {
        let applied = self.inner.reader.read();
        StateAt {
            state: applied.machine.state().clone(),
            applied_index: applied.index(),
        }
    }

    /// A copy of the state with what a snapshot says of itself, all of one log index.
    pub(crate) fn copy_state(&self) -> (SnapshotMeta, State) {
        let applied = self.inner.reader.read();
        let meta = SnapshotMeta {
            last_log_id: applied.last_applied,
            last_membership: applied.membership.clone(),
        };
        (meta, applied.machine.state().clone())
    }

    /// The applied index, to wait on.
    pub fn applied(&self) -> AppliedWatch {
        AppliedWatch(self.inner.reader.progress())
    }

    /// What entries change, as they are applied. A listener that lags gets `Lagged` and must look at everything.
    pub fn changes(&self) -> broadcast::Receiver<Change> {
        self.inner.changes.subscribe()
    }

    /// Who leads, to read or to wait on.
    pub fn leadership(&self) -> watch::Receiver<Leadership> {
        self.inner.leadership.clone()
    }

    /// This master.
    pub fn identity(&self) -> &Identity {
        &self.inner.shared.identity
    }

    /// Whether the state is at least what it was before this process was started (stale reads before that
    /// could go backwards).
    pub fn recovered(&self) -> watch::Receiver<bool> {
        self.inner.recovered.clone()
    }

    /// How long ago this master, as leader, was confirmed by a quorum. `None`: it does not lead, or never was.
    pub fn quorum_silence(&self) -> Option<Duration> {
        let metrics = self.inner.raft.metrics();
        let metrics = metrics.borrow_watched();
        // openraft notes a quorum when followers answer, and when something is written. A sole voter has nobody to ask.
        if metrics.state == ServerState::Leader && metrics.membership_config.voter_ids().eq([metrics.id]) {
            return Some(Duration::ZERO);
        }
        metrics.last_quorum_acked.map(|at| at.elapsed())
    }

    /// How long ago this master heard from a leader (as follower), or was elected or confirmed by a quorum (as leader);
    /// the last of these, so that it does not begin anew with an election.
    pub fn leader_silence(&self) -> Option<Duration> {
        let heard = (*self.inner.shared.leader_heard.lock()).map(|at: Instant| at.elapsed());
        heard.into_iter().chain(self.quorum_silence()).min()
    }

    /// Whether requests should be sent here. `max_silence`: how long the leader may be silent. A leader that its quorum
    /// does not confirm is not ready much sooner ([`QUORUM_WITHIN`]).
    pub fn readiness(&self, max_silence: Duration) -> Result<(), NotReady> {
        let (initialised, leads, committed) = {
            let metrics = self.inner.raft.metrics();
            let metrics = metrics.borrow_watched();
            (
                knows_a_cluster(&metrics.membership_config),
                metrics.state == ServerState::Leader,
                metrics.cluster_committed.as_ref().map_or(0, |id| id.index()),
            )
        };
        if !initialised {
            return Err(NotReady::NotInitialised);
        }
        let max_silence = match leads {
            true => max_silence.min(QUORUM_WITHIN),
            false => max_silence,
        };
        // Not whether one is known at this moment: in an election there is none, and requests are held for that long.
        match self.leader_silence() {
            None => return Err(NotReady::NoLeader),
            Some(silence) if silence > max_silence => {
                return Err(NotReady::LeaderSilent {
                    silent_ms: silence.as_millis() as u64,
                });
            }
            Some(_) => {}
        }
        if !*self.inner.recovered.borrow() {
            return Err(NotReady::Recovering);
        }
        let entries = committed.saturating_sub(self.applied().index());
        if entries > MAX_READY_LAG {
            return Err(NotReady::Behind { entries });
        }
        Ok(())
    }

    /// The cluster as this master sees it.
    pub fn cluster(&self) -> Cluster {
        let metrics = self.inner.raft.metrics().borrow_watched().clone();
        let index = |id: &Option<mooncake_raft_store::LogId>| id.as_ref().map_or(0, |id| id.index());
        let leader_end = metrics.last_log_index.unwrap_or(0);
        let own_end = self.inner.shared.log_end.last();
        let voters: Vec<_> = metrics.membership_config.voter_ids().collect();
        let members = metrics
            .membership_config
            .nodes()
            .map(|(id, node)| {
                let matched = metrics.replication.as_ref().and_then(|all| all.get(id));
                let acked = metrics
                    .heartbeat
                    .as_ref()
                    .and_then(|all| all.get(id).copied().flatten());
                let me = *id == metrics.id;
                Member {
                    id: *id,
                    rpc_address: node.rpc_address.clone(),
                    http_address: node.http_address.clone(),
                    disk_id: node.disk_id.clone(),
                    is_voter: voters.contains(id),
                    lag: match metrics.replication {
                        Some(_) if me => Some(0),
                        Some(_) => Some(leader_end.saturating_sub(matched.map_or(0, index))),
                        None => None,
                    },
                    silent: acked.filter(|_| !me).map(|at| at.elapsed()),
                }
            })
            .collect();
        Cluster {
            me: self.inner.shared.identity.clone(),
            term: metrics.current_term,
            leader_id: metrics.current_leader,
            last_log_index: index(&own_end),
            last_log_term: own_end.map_or(0, |id| id.committed_leader_id().term),
            committed_index: index(&metrics.cluster_committed),
            applied_index: self.applied().index(),
            snapshot_index: index(&metrics.snapshot),
            purged_index: index(&metrics.purged),
            members,
        }
    }

    /// Waits, at most [`SETTLE`], until what this leader knows of the others is enough for `settled`.
    pub(super) async fn settle(&self, settled: impl Fn(&[Member]) -> bool) {
        let mut metrics = self.inner.raft.metrics();
        let wait = async {
            // Looked at anew after each change, an answer of another master included.
            while !settled(&self.cluster().members) {
                if metrics.changed().await.is_err() {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(SETTLE, wait).await;
    }

    /// Builds a snapshot now.
    pub async fn trigger_snapshot(&self) -> Result<(), ProposeError> {
        self.inner
            .raft
            .trigger()
            .snapshot()
            .await
            .map_err(|_| ProposeError::Stopped)
    }

    /// Why this program is too old for this cluster's log, after [`failed`](Self::failed) if that was the reason.
    pub fn too_old(&self) -> Option<Arc<str>> {
        self.inner.reader.read().machine.too_old().cloned()
    }

    /// Waits for a failure after which the process must end, and gives its reason. Never returns while all is well.
    pub async fn failed(&self) -> Arc<str> {
        let mut failed = self.inner.failed.clone();
        match failed
            .wait_for(Option::is_some)
            .await
            .map(|reason| reason.clone())
        {
            Ok(Some(reason)) => reason,
            _ => std::future::pending().await,
        }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("identity", self.identity())
            .finish_non_exhaustive()
    }
}

pub(crate) fn leader_of(forward: &ForwardToLeader<TypeConfig>) -> Option<Master> {
    let (id, node) = (forward.leader_id?, forward.leader_node.as_ref()?);
    Some(Master {
        id,
        rpc_address: node.rpc_address.clone(),
        http_address: node.http_address.clone(),
    })
}

fn classify(error: RaftError<TypeConfig, ClientWriteError<TypeConfig>>) -> ProposeError {
    match error {
        RaftError::APIError(ClientWriteError::ForwardToLeader(forward)) => ProposeError::NotLeader {
            leader: leader_of(&forward),
        },
        RaftError::APIError(ClientWriteError::LogEntryDiscarded(_)) => ProposeError::OutcomeUnknown {
            reason: "another leader was elected before a quorum confirmed it".into(),
        },
        // Membership changes and preconditions are no part of a command.
        RaftError::APIError(other) => ProposeError::OutcomeUnknown {
            reason: other.to_string(),
        },
        // It may have been appended just before.
        RaftError::Fatal(Fatal::Stopped) => ProposeError::OutcomeUnknown {
            reason: "this master stops".into(),
        },
        RaftError::Fatal(fatal) => ProposeError::OutcomeUnknown {
            reason: fatal.to_string(),
        },
    }
}
