//! Changing who the masters are: add, promote, remove.
//!
//! Guaranteed: one change at a time; what is checked (who is there, who lags, whether a living quorum is left, whether
//! the voters reach each other) holds for the very membership that is changed, or the change is refused; every request may be repeated, and one that
//! finds its wish fulfilled changes nothing. A change that was begun goes on when its caller goes away; one that a
//! leader's death cut in half is completed by the next leader ([`super::upkeep`]).
//!
//! Not guaranteed: that a voter that answered a moment ago still does when the change commits; that voters from before
//! the question reach a new one; that the id of a master
//! that was removed long ago is not given to another disk: nobody remembers it.

use std::time::Duration;

use mooncake_proto::pb::raft as pb;
use mooncake_raft_store::{LogId, Node, NodeId, TypeConfig};
use openraft::async_runtime::watch::WatchReceiver as _;
use openraft::errors::{ChangeMembershipError, ClientWriteError, RaftError};
use openraft::{ChangeMembers, Precondition};

use super::Master;
use super::handle::{Handle, Member, leader_of};
use super::membership_rules::{
    Judged, Removal, judge_new, judge_promotion, judge_reach, judge_removal, living_voters, settled,
};
use super::transfer::TransferError;
use crate::config::check_address;

/// How long a new master may take to say who it is.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a change may take before its outcome is called unknown: two log entries, each on a quorum's disks.
const CHANGE_DEADLINE: Duration = Duration::from_secs(10);

type Change = ChangeMembers<NodeId, Node>;
/// Held while the membership is changed.
type OneChange = tokio::sync::OwnedMutexGuard<()>;

/// What became of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The master that it was about.
    pub id: NodeId,
    /// False: nothing had to be done.
    pub changed: bool,
    /// For a person.
    pub detail: String,
}

/// Why the membership was not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// Ask the leader.
    #[error("this master does not lead")]
    NotLeader {
        /// Who does, if known.
        leader: Option<Master>,
    },
    /// One at a time.
    #[error("another change of the membership is under way; see the cluster's status and repeat the request")]
    InProgress,
    /// No such master.
    #[error("master {0} is not a member of this cluster")]
    NotFound(NodeId),
    /// It cannot be a member like this.
    #[error("{0}")]
    Conflict(String),
    /// Nothing is known of it.
    #[error("{0}")]
    Unreachable(String),
    /// Too far behind.
    #[error("{0}")]
    Behind(String),
    /// Writes would stop.
    #[error("{0}")]
    QuorumAtRisk(String),
    /// It may have been changed.
    #[error("{0}")]
    OutcomeUnknown(String),
    /// This master stops.
    #[error("this master stops")]
    Stopped,
}

impl Handle {
    async fn who_is_at(&self, rpc_address: &str) -> Result<pb::ProbeResponse, ChangeError> {
        check_address(rpc_address)
            .map_err(|why| ChangeError::Conflict(format!("the address '{rpc_address}': {why}")))?;
        self.inner.peers.ask(rpc_address, PROBE_TIMEOUT).await.map_err(|why| {
            ChangeError::Unreachable(format!(
                "no master answers at {rpc_address}: {why}. Is mooncake_master started there, is this its RPC port, and \
                 have both the same --cluster-id and --cluster-secret-file?"
            ))
        })
    }

    /// Takes the master that answers at `rpc_address` into the cluster as a learner: it gets the log and does not vote.
    pub async fn add_learner(
        &self,
        rpc_address: &str,
        expected: Option<NodeId>,
    ) -> Result<Changed, ChangeError> {
        let one = self.one_change()?;
        self.leads()?;
        let answer = self.who_is_at(rpc_address).await?;
        let (members, at) = self.members();
        let cluster_version = self.state().cluster_version();
        match judge_new(rpc_address, expected, &answer, &members, cluster_version)? {
            Judged::Member(id) => Ok(Changed {
                id,
                changed: false,
                detail: format!("master {id} is a member already"),
            }),
            Judged::New(id, node) => {
                let detail = format!("master {id} at {rpc_address} was added as a learner and gets the log");
                self.change(ChangeMembers::AddNodes([(id, node)].into()), at, one)
                    .await?;
                Ok(Changed {
                    id,
                    changed: true,
                    detail,
                })
            }
        }
    }

    /// Lets a learner vote.
    pub async fn promote(&self, id: NodeId) -> Result<Changed, ChangeError> {
        let one = self.one_change()?;
        self.leads()?;
        let me = self.identity().node_id;
        self.settle(|members| settled(members, me)).await;
        let (members, at) = self.members();
        if !judge_promotion(id, &members, me)? {
            return Ok(Changed {
                id,
                changed: false,
                detail: format!("master {id} votes already"),
            });
        }
        self.check_reach(id, &members).await?;
        self.change(ChangeMembers::AddVoterIds([id].into()), at, one)
            .await?;
        Ok(Changed {
            id,
            changed: true,
            detail: format!("master {id} votes from now on"),
        })
    }

    /// Removes a voter or a learner. The leader hands over first and answers [`ChangeError::NotLeader`]: the next
    /// leader removes it.
    pub async fn remove(&self, id: NodeId) -> Result<Changed, ChangeError> {
        let one = self.one_change()?;
        self.leads()?;
        let me = self.identity().node_id;
        self.settle(|members| settled(members, me)).await;
        let (members, at) = self.members();
        let change: Change = match judge_removal(id, &members, me)? {
            Removal::Done => {
                return Ok(Changed {
                    id,
                    changed: false,
                    detail: format!("master {id} is not a member"),
                });
            }
            Removal::HandOver => {
                drop(one);
                return Err(match self.transfer_leader(None).await {
                    Ok(next) => {
                        tracing::info!(leader = next.id, "handed leadership over in order to be removed");
                        ChangeError::NotLeader { leader: Some(next) }
                    }
                    Err(TransferError::NotLeader { leader }) => ChangeError::NotLeader { leader },
                    Err(TransferError::Stopped) => ChangeError::Stopped,
                    Err(why) => ChangeError::QuorumAtRisk(format!(
                        "master {id} leads and has to hand leadership over before it is removed, which failed: {why}. \
                         Nothing was changed"
                    )),
                });
            }
            Removal::Learner => ChangeMembers::RemoveNodes([id].into()),
            Removal::Voter => ChangeMembers::RemoveVoters([id].into()),
        };
        self.change(change, at, one).await?;
        Ok(Changed {
            id,
            changed: true,
            detail: format!("master {id} is no member any more"),
        })
    }

    fn one_change(&self) -> Result<OneChange, ChangeError> {
        std::sync::Arc::clone(&self.inner.changing)
            .try_lock_owned()
            .map_err(|_| ChangeError::InProgress)
    }

    fn leads(&self) -> Result<(), ChangeError> {
        let now = self.inner.leadership.borrow().clone();
        match now.is_serving {
            true => Ok(()),
            false => Err(ChangeError::NotLeader { leader: now.leader }),
        }
    }

    /// The log id of the membership in force here, committed or not.
    pub(super) fn membership_at(&self) -> Option<LogId> {
        let metrics = self.inner.raft.metrics();
        *metrics.borrow_watched().membership_config.log_id()
    }

    /// The members, and the log id of the membership that names them.
    fn members(&self) -> (Vec<Member>, Option<LogId>) {
        let at = self.membership_at();
        // Looked at after the log id: a membership that came in between makes the precondition fail.
        (self.cluster().members, at)
    }

    /// Has every living voter ask for the new one, and the new one for them: this leader's own way to it says nothing of
    /// theirs, and the next leader may be any of them.
    async fn check_reach(&self, id: NodeId, members: &[Member]) -> Result<(), ChangeError> {
        let me = self.identity().node_id;
        let Some(new) = members.iter().find(|member| member.id == id) else {
            return Err(ChangeError::NotFound(id));
        };
        let voters: Vec<_> = living_voters(members, me).collect();
        let others = voters.iter().filter(|voter| voter.id != me);
        let ways = others.map(|voter| (*voter, vec![new]));
        let ways = ways.chain([(new, voters.clone())]);
        let asked = futures_util::future::join_all(ways.map(async |(from, to)| {
            let addresses = to.iter().map(|member| member.rpc_address.clone()).collect();
            let answer = self
                .inner
                .peers
                .ask_to_reach(&from.rpc_address, PROBE_TIMEOUT, addresses)
                .await
                .map_err(|why| {
                    ChangeError::Behind(format!(
                        "master {} does not say whether it reaches {}: {why}; repeat the request later",
                        from.id,
                        to.iter()
                            .map(|member| format!("master {}", member.id))
                            .collect::<Vec<_>>()
                            .join(", ")
                    ))
                })?;
            to.iter()
                .try_for_each(|to| judge_reach(from.id, to, &answer.reach))
        }))
        .await;
        asked.into_iter().collect()
    }

    async fn change(&self, change: Change, at: Option<LogId>, one: OneChange) -> Result<(), ChangeError> {
        let raft = self.inner.raft.clone();
        tracing::info!(%change, "changing the membership");
        let unchanged = Precondition::LastMembershipLogId {
            last_membership_log_id: at,
        };
        // A task of its own: between its two steps it must not end with its caller, and no other change begins.
        let task = self.inner.runtime.spawn(async move {
            let done = raft.change_membership_if(change, false, [unchanged]).await;
            drop(one);
            done
        });
        match tokio::time::timeout(CHANGE_DEADLINE, task).await {
            Ok(Ok(Ok(_))) => Ok(()),
            Ok(Ok(Err(error))) => Err(classify(error, self.membership_at() != at)),
            Ok(Err(error)) => Err(ChangeError::OutcomeUnknown(error.to_string())),
            Err(_) => Err(ChangeError::OutcomeUnknown(format!(
                "no quorum of masters confirmed the new membership within {} s; it may still be confirmed",
                CHANGE_DEADLINE.as_secs()
            ))),
        }
    }
}

/// `moved`: there is another membership in force than the one that was to be changed.
fn classify(error: RaftError<TypeConfig, ClientWriteError<TypeConfig>>, moved: bool) -> ChangeError {
    match error {
        // The first of two steps may be done, and the leadership was lost before the second.
        RaftError::APIError(ClientWriteError::ForwardToLeader(_)) if moved => ChangeError::OutcomeUnknown(
            "this master lost the leadership while it changed the membership: the next leader completes the change, or \
             drops it"
                .into(),
        ),
        RaftError::APIError(ClientWriteError::ForwardToLeader(forward)) => ChangeError::NotLeader {
            leader: leader_of(&forward),
        },
        RaftError::APIError(ClientWriteError::ChangeMembershipError(
            ChangeMembershipError::InProgress(_) | ChangeMembershipError::UncommittedLeaderLog(_),
        )) => ChangeError::InProgress,
        RaftError::APIError(ClientWriteError::ChangeMembershipError(error)) => {
            ChangeError::Conflict(error.to_string())
        }
        // Also of the second step: then the first one stands, and `upkeep` completes it.
        RaftError::APIError(ClientWriteError::PreconditionFailed(_)) => ChangeError::InProgress,
        RaftError::APIError(other) => ChangeError::OutcomeUnknown(other.to_string()),
        RaftError::Fatal(fatal) => ChangeError::OutcomeUnknown(fatal.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::net::TcpListener;

    use openraft::EntryPayload;
    use openraft::errors::ForwardToLeader;

    use super::*;
    use crate::config::MemberAddress;
    use crate::consensus::{Consensus, Options, Timers};

    /// For what only a hang would exceed.
    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn a_change_whose_leader_was_lost_between_its_steps_is_not_called_undone() {
        let lost = || RaftError::APIError(ClientWriteError::ForwardToLeader(ForwardToLeader::empty()));
        assert_eq!(classify(lost(), false), ChangeError::NotLeader { leader: None });
        assert!(
            matches!(classify(lost(), true), ChangeError::OutcomeUnknown(why) if why.contains("next leader"))
        );
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_change_that_a_lost_leader_left_in_half_is_completed_by_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let listeners: BTreeMap<NodeId, TcpListener> = (1..=3)
            .map(|id| (id, TcpListener::bind("127.0.0.1:0").unwrap()))
            .collect();
        let address = |(id, listener): (&NodeId, &TcpListener)| {
            let rpc = listener.local_addr().unwrap().to_string();
            // Nobody listens there, and nobody asks.
            let http = format!("127.0.0.1:{id}");
            (*id, MemberAddress { rpc, http })
        };
        let initial_cluster: BTreeMap<_, _> = listeners.iter().map(address).collect();
        let mut masters = BTreeMap::new();
        for (id, listener) in listeners {
            let options = Options {
                cluster_id: "test".into(),
                node_id: id,
                data_dir: folder.path().join(id.to_string()),
                secret: None,
                timers: Timers {
                    heartbeat_ms: 200,
                    election_min_ms: 1500,
                    election_max_ms: 3000,
                },
                snapshot_every: 10_000,
                snapshot_keep: 2_000,
                address: initial_cluster[&id].clone(),
                initial_cluster: initial_cluster.clone(),
                bootstrap: true,
            };
            masters.insert(id, Consensus::start(options, listener).await.unwrap());
        }
        let serves = masters.iter().map(|(id, (consensus, _))| {
            let mut leadership = consensus.handle().leadership();
            Box::pin(async move { leadership.wait_for(|now| now.is_serving).await.map(|_| *id) })
        });
        let first = tokio::time::timeout(PATIENCE, futures_util::future::select_all(serves));
        let leader = first.await.unwrap().0.unwrap();
        let (old, _sessions) = masters.remove(&leader).unwrap();

        // The first of the two steps, as openraft does it; the leader's own upkeep does not get at it.
        let handle = old.handle();
        let _one = std::sync::Arc::clone(&handle.inner.changing).lock_owned().await;
        let before = handle
            .inner
            .raft
            .metrics()
            .borrow_watched()
            .membership_config
            .clone();
        let nodes: BTreeMap<_, _> = before.nodes().map(|(id, node)| (*id, node.clone())).collect();
        let rest: BTreeSet<_> = masters.keys().copied().collect();
        let voters = vec![BTreeSet::from([1, 2, 3]), rest.clone()];
        let joint = mooncake_raft_store::Membership::new(voters, nodes).unwrap();
        let guard = Precondition::LastMembershipLogId {
            last_membership_log_id: *before.log_id(),
        };
        handle
            .inner
            .raft
            .append_membership(joint, EntryPayload::Blank, [guard])
            .await
            .unwrap();
        old.shutdown().await.unwrap();

        for (consensus, _) in masters.values() {
            let mut metrics = consensus.handle().inner.raft.metrics();
            let uniform = async {
                loop {
                    let seen = metrics.borrow_watched().committed_membership_config.clone();
                    let named: BTreeSet<_> = seen.nodes().map(|(id, _)| *id).collect();
                    if seen.membership().get_joint_config().len() == 1 && named == rest {
                        return;
                    }
                    metrics.changed().await.unwrap();
                }
            };
            tokio::time::timeout(PATIENCE, uniform)
                .await
                .expect("the change is completed");
        }
        for (_, (consensus, _)) in masters {
            consensus.shutdown().await.unwrap();
        }
    }
}
