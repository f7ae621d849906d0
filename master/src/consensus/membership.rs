//! Changing who the masters are: add, promote, remove.
//!
//! Guaranteed: one change at a time; what is checked (who is there, who lags, whether a living quorum is left) holds
//! for the very membership that is changed, or the change is refused; every request may be repeated, and one that
//! finds its wish fulfilled changes nothing. A change that was begun goes on when its caller goes away; one that a
//! leader's death cut in half is completed by the next leader ([`super::upkeep`]).
//!
//! Not guaranteed: that a voter that answered a moment ago still does when the change commits; that the id of a master
//! that was removed long ago is not given to another disk: nobody remembers it.

use std::time::Duration;

use mooncake_proto::pb::raft as pb;
use mooncake_raft_store::{Node, NodeId, TypeConfig};
use openraft::async_runtime::watch::WatchReceiver as _;
use openraft::errors::{ChangeMembershipError, ClientWriteError, RaftError};
use openraft::{ChangeMembers, Precondition};

use super::handle::{Handle, MAX_READY_LAG, Member, TransferError, leader_of};
use super::{Master, version};
use crate::config::{MAX_MEMBERS, check_address};

/// How long a new master may take to say who it is.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);
/// A voter that has not answered for this long is not counted among the living.
const ALIVE_WITHIN: Duration = Duration::from_secs(3);
/// How long a change may take before its outcome is called unknown: two log entries, each on a quorum's disks.
const CHANGE_DEADLINE: Duration = Duration::from_secs(10);

type Change = ChangeMembers<NodeId, Node>;

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
    /// Takes the master that answers at `rpc_address` into the cluster as a learner: it gets the log and does not vote.
    pub async fn add_learner(
        &self,
        rpc_address: &str,
        expected: Option<NodeId>,
    ) -> Result<Changed, ChangeError> {
        check_address(rpc_address)
            .map_err(|why| ChangeError::Conflict(format!("the address '{rpc_address}': {why}")))?;
        let _one = self.one_change()?;
        self.leads()?;
        let answer = self.inner.peers.ask(rpc_address, PROBE_TIMEOUT).await.map_err(|why| {
            ChangeError::Unreachable(format!(
                "no master answers at {rpc_address}: {why}. Is mooncake_master started there, is this its RPC port, and \
                 have both the same --cluster-id and --cluster-secret-file?"
            ))
        })?;
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
                self.change(ChangeMembers::AddNodes([(id, node)].into()), at)
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
        let _one = self.one_change()?;
        self.leads()?;
        let (members, at) = self.members();
        if !judge_promotion(id, &members, self.identity().node_id)? {
            return Ok(Changed {
                id,
                changed: false,
                detail: format!("master {id} votes already"),
            });
        }
        self.change(ChangeMembers::AddVoterIds([id].into()), at).await?;
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
        let (members, at) = self.members();
        let me = self.identity().node_id;
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
        self.change(change, at).await?;
        Ok(Changed {
            id,
            changed: true,
            detail: format!("master {id} is no member any more"),
        })
    }

    fn one_change(&self) -> Result<tokio::sync::OwnedMutexGuard<()>, ChangeError> {
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

    /// The members, and the log id of the membership that names them.
    fn members(&self) -> (Vec<Member>, Precondition<TypeConfig>) {
        let at = *self
            .inner
            .raft
            .metrics()
            .borrow_watched()
            .membership_config
            .log_id();
        // Looked at after the log id: a membership that came in between makes the precondition fail.
        let members = self.cluster().members;
        (
            members,
            Precondition::LastMembershipLogId {
                last_membership_log_id: at,
            },
        )
    }

    async fn change(&self, change: Change, at: Precondition<TypeConfig>) -> Result<(), ChangeError> {
        let raft = self.inner.raft.clone();
        tracing::info!(%change, "changing the membership");
        // A task of its own: between its two steps it must not end with its caller.
        let task = self
            .inner
            .runtime
            .spawn(async move { raft.change_membership_if(change, false, [at]).await });
        match tokio::time::timeout(CHANGE_DEADLINE, task).await {
            Ok(Ok(Ok(_))) => Ok(()),
            Ok(Ok(Err(error))) => Err(classify(error)),
            Ok(Err(error)) => Err(ChangeError::OutcomeUnknown(error.to_string())),
            Err(_) => Err(ChangeError::OutcomeUnknown(format!(
                "no quorum of masters confirmed the new membership within {} s; it may still be confirmed",
                CHANGE_DEADLINE.as_secs()
            ))),
        }
    }
}

fn classify(error: RaftError<TypeConfig, ClientWriteError<TypeConfig>>) -> ChangeError {
    match error {
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

#[derive(Debug, PartialEq, Eq)]
enum Judged {
    Member(NodeId),
    New(NodeId, Node),
}

/// What the master that answered may become.
fn judge_new(
    rpc_address: &str,
    expected: Option<NodeId>,
    answer: &pb::ProbeResponse,
    members: &[Member],
    cluster_version: u32,
) -> Result<Judged, ChangeError> {
    let id = answer.node_id;
    let conflict = |why: String| Err(ChangeError::Conflict(why));
    if expected.is_some_and(|expected| expected != id) {
        return conflict(format!(
            "at {rpc_address} answers master {id}, not master {}: correct the address or the id",
            expected.unwrap_or_default()
        ));
    }
    if let Some(known) = members.iter().find(|member| member.id == id) {
        if known.disk_id != answer.disk_id {
            return conflict(format!(
                "this cluster knows master {id} with disk {}, but the master at {rpc_address} has disk {}: a wiped master \
                 must come back as a new id. Stop it, start it with a new --node-id and an empty --data-dir, add that, and \
                 remove master {id}",
                known.disk_id, answer.disk_id
            ));
        }
        if known.rpc_address != rpc_address {
            return conflict(format!(
                "master {id} is a member at {}, not at {rpc_address}: addresses do not change while a master is a member",
                known.rpc_address
            ));
        }
        return Ok(Judged::Member(id));
    }
    if answer.initialised {
        return conflict(format!(
            "the data folder of master {id} at {rpc_address} belongs to a cluster already (or did, before it was removed \
             from it): stop it, and start it with an empty --data-dir"
        ));
    }
    if members.len() >= MAX_MEMBERS {
        return conflict(format!(
            "the cluster has {MAX_MEMBERS} masters, the limit: remove one first"
        ));
    }
    if version::of_probe(answer) < cluster_version {
        return conflict(format!(
            "master {id} at {rpc_address} runs {}, which supports cluster versions up to {}, but this cluster is at {}: \
             upgrade it first",
            answer.software,
            version::of_probe(answer),
            cluster_version
        ));
    }
    let http = &answer.http_address;
    if let Err(why) = check_address(http) {
        return conflict(format!(
            "master {id} says that its HTTP address is '{http}': {why}"
        ));
    }
    if http
        .parse::<std::net::SocketAddr>()
        .is_ok_and(|address| address.ip().is_unspecified())
    {
        return conflict(format!(
            "master {id} says that its HTTP address is {http}, which nobody can dial: start it with \
             --advertise-http-address HOST:PORT"
        ));
    }
    // Not a member at the same RPC address: somebody else answers there now, so that one is gone from it. It is the new
    // master's predecessor on this machine, about to be removed.
    if let Some(other) = members
        .iter()
        .find(|member| member.http_address == *http && member.rpc_address != rpc_address)
    {
        return conflict(format!(
            "master {} is a member with the address {http}: give each master its own",
            other.id
        ));
    }
    Ok(Judged::New(
        id,
        Node {
            rpc_address: rpc_address.to_owned(),
            http_address: http.clone(),
            disk_id: answer.disk_id.clone(),
        },
    ))
}

fn is_alive(member: &Member, me: NodeId) -> bool {
    member.id == me || member.silent.is_some_and(|silent| silent < ALIVE_WITHIN)
}

/// `Ok(false)`: it votes already.
fn judge_promotion(id: NodeId, members: &[Member], me: NodeId) -> Result<bool, ChangeError> {
    let member = members
        .iter()
        .find(|member| member.id == id)
        .ok_or(ChangeError::NotFound(id))?;
    if member.is_voter {
        return Ok(false);
    }
    if !is_alive(member, me) {
        return Err(ChangeError::Behind(match member.silent {
            Some(silent) => format!(
                "master {id} has not answered for {} s: as a voter it would only make the quorum larger",
                silent.as_secs()
            ),
            None => format!("master {id} has not answered this leader yet: is it started?"),
        }));
    }
    match member.lag {
        Some(lag) if lag <= MAX_READY_LAG => {}
        lag => {
            let behind = lag.map_or("an unknown number of".to_owned(), |lag| lag.to_string());
            return Err(ChangeError::Behind(format!(
                "master {id} is {behind} log entries behind, the limit is {MAX_READY_LAG}: it is catching up, repeat the \
                 request later"
            )));
        }
    }
    let alive = 1 + members
        .iter()
        .filter(|member| member.is_voter && is_alive(member, me))
        .count();
    let voters = 1 + members.iter().filter(|member| member.is_voter).count();
    if alive < quorum(voters) {
        return Err(ChangeError::QuorumAtRisk(format!(
            "with master {id} there would be {voters} voters, of which {} must answer, but only {alive} do: bring the others \
             back, or remove those that are gone, first",
            quorum(voters)
        )));
    }
    Ok(true)
}

#[derive(Debug, PartialEq, Eq)]
enum Removal {
    Done,
    HandOver,
    Learner,
    Voter,
}

fn judge_removal(id: NodeId, members: &[Member], me: NodeId) -> Result<Removal, ChangeError> {
    let Some(member) = members.iter().find(|member| member.id == id) else {
        return Ok(Removal::Done);
    };
    if !member.is_voter {
        return Ok(Removal::Learner);
    }
    let left: Vec<_> = members
        .iter()
        .filter(|member| member.is_voter && member.id != id)
        .collect();
    if left.is_empty() {
        return Err(ChangeError::QuorumAtRisk(format!(
            "master {id} is the only voter: without it there is no cluster. Add and promote another one first"
        )));
    }
    let silent: Vec<_> = left
        .iter()
        .filter(|member| !is_alive(member, me))
        .map(|member| member.id.to_string())
        .collect();
    let alive = left.len() - silent.len();
    if alive < quorum(left.len()) {
        return Err(ChangeError::QuorumAtRisk(format!(
            "without master {id} there would be {} voters, of which {} must answer, but {} do (silent: master {}): writes \
             would stop. Bring those back or remove them first",
            left.len(),
            quorum(left.len()),
            alive,
            silent.join(", ")
        )));
    }
    Ok(match id == me {
        true => Removal::HandOver,
        false => Removal::Voter,
    })
}

fn quorum(voters: usize) -> usize {
    voters / 2 + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(id: NodeId, is_voter: bool, silent_s: Option<u64>, lag: u64) -> Member {
        Member {
            id,
            rpc_address: format!("h{id}:1"),
            http_address: format!("h{id}:2"),
            disk_id: format!("d{id}"),
            is_voter,
            lag: Some(lag),
            silent: silent_s.map(Duration::from_secs),
        }
    }

    /// Master 1 leads; seconds of silence of the others.
    fn voters(silent_s: &[u64]) -> Vec<Member> {
        let mut all = vec![member(1, true, None, 0)];
        all.extend(
            (2..)
                .zip(silent_s)
                .map(|(id, silent)| member(id, true, Some(*silent), 0)),
        );
        all
    }

    fn probe(id: NodeId) -> pb::ProbeResponse {
        pb::ProbeResponse {
            node_id: id,
            disk_id: format!("d{id}"),
            http_address: format!("h{id}:2"),
            ..Default::default()
        }
    }

    fn conflict(judged: Result<Judged, ChangeError>) -> String {
        match judged {
            Err(ChangeError::Conflict(why)) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_empty_disks_under_free_ids_are_added() {
        let members = voters(&[0, 0]);
        let judge = |address: &str, answer: &pb::ProbeResponse| judge_new(address, None, answer, &members, 1);
        let Ok(Judged::New(4, node)) = judge("h4:1", &probe(4)) else {
            panic!()
        };
        assert_eq!(
            (node.disk_id.as_str(), node.http_address.as_str()),
            ("d4", "h4:2")
        );
        assert_eq!(judge("h3:1", &probe(3)), Ok(Judged::Member(3)));

        let wiped = pb::ProbeResponse {
            disk_id: "new".into(),
            ..probe(3)
        };
        assert!(conflict(judge("h3:1", &wiped)).contains("must come back as a new id"));
        assert!(conflict(judge("h9:1", &probe(3))).contains("addresses do not change"));
        let foreign = pb::ProbeResponse {
            initialised: true,
            ..probe(4)
        };
        assert!(conflict(judge("h4:1", &foreign)).contains("belongs to a cluster already"));
        let unreachable = pb::ProbeResponse {
            http_address: "0.0.0.0:9003".into(),
            ..probe(4)
        };
        assert!(conflict(judge("h4:1", &unreachable)).contains("--advertise-http-address"));
        let taken = pb::ProbeResponse {
            http_address: "h2:2".into(),
            ..probe(4)
        };
        assert!(conflict(judge("h4:1", &taken)).contains("master 2"));
        assert!(
            matches!(judge("h2:1", &taken), Ok(Judged::New(4, _))),
            "in the place of a master that does not answer there any more"
        );
        assert!(conflict(judge_new("h4:1", Some(5), &probe(4), &members, 1)).contains("answers master 4"));
        assert!(conflict(judge_new("h4:1", None, &probe(4), &members, 2)).contains("upgrade it first"));
    }

    #[test]
    fn only_who_keeps_up_is_promoted() {
        let with = |learner| {
            let mut all = voters(&[0, 0]);
            all.push(learner);
            judge_promotion(4, &all, 1)
        };
        assert_eq!(with(member(4, false, Some(0), MAX_READY_LAG)), Ok(true));
        assert_eq!(with(member(4, true, Some(0), 0)), Ok(false));
        for (learner, why) in [
            (
                member(4, false, Some(0), MAX_READY_LAG + 234),
                "1234 log entries behind",
            ),
            (member(4, false, Some(9), 0), "not answered for 9 s"),
            (member(4, false, None, 0), "is it started"),
        ] {
            assert!(matches!(with(learner), Err(ChangeError::Behind(text)) if text.contains(why)));
        }
        assert_eq!(
            judge_promotion(7, &voters(&[0]), 1),
            Err(ChangeError::NotFound(7))
        );
        let mut half_dead = voters(&[0, 9, 9]);
        half_dead.push(member(5, false, Some(0), 0));
        assert_eq!(judge_promotion(5, &half_dead, 1), Ok(true), "3 of 5 answer");
        let mut worse = voters(&[9, 9, 9]);
        worse.push(member(5, false, Some(0), 0));
        assert!(matches!(
            judge_promotion(5, &worse, 1),
            Err(ChangeError::QuorumAtRisk(_))
        ));
    }

    #[test]
    fn a_living_quorum_stays() {
        assert_eq!(
            judge_removal(3, &voters(&[0, 9]), 1),
            Ok(Removal::Voter),
            "the dead one"
        );
        assert_eq!(judge_removal(1, &voters(&[0, 0]), 1), Ok(Removal::HandOver));
        assert_eq!(judge_removal(7, &voters(&[0, 0]), 1), Ok(Removal::Done));
        let refused = judge_removal(2, &voters(&[0, 9]), 1);
        assert!(
            matches!(&refused, Err(ChangeError::QuorumAtRisk(why)) if why.contains("silent: master 3")),
            "{refused:?}"
        );
        assert!(matches!(
            judge_removal(1, &voters(&[]), 1),
            Err(ChangeError::QuorumAtRisk(_))
        ));
        let mut with_learner = voters(&[9, 9]);
        with_learner.push(member(4, false, None, 0));
        assert_eq!(
            judge_removal(4, &with_learner, 1),
            Ok(Removal::Learner),
            "it counts for no quorum"
        );
    }
}
