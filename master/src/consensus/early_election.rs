//! An election that does not wait for a time-out, because the leader's process is known to be dead.
//!
//! A process that was killed is not silent: its host closes its connections at once and refuses new ones. A
//! follower that sees both, and hears from so many voters that they see both too that they are a quorum, knows as much
//! as a time-out would ever tell it.
//!
//! Why it is safe: Raft allows an election at any time; terms, votes and the election restriction (a voter only votes
//! for a log at least as long as its own) do not rest on time. The wait before an election, the lease that voters
//! grant a leader, and the pre-vote only protect a *healthy* leader from being disturbed, and reads here rest on a
//! quorum's word (ReadIndex), not on that lease. So what must be shown is that a healthy leader is left alone:
//! - one that is there answers a new connection, so it is not refused (a frozen one neither: its kernel accepts);
//! - a packet filter in front of one master (or of a minority) that refuses on the leader's behalf convinces that
//!   minority only: the others still have connections from the leader open;
//! - a filter at the leader's own port that refuses every new connection does not close those that the leader
//!   opened to the others, through which its heartbeats go.
//!
//! What is left is a leader cut off, by refusals, from a quorum in both directions: it leads no more.
//!
//! One master stands: the one with the longest log of those who saw it, of equals the one with the lowest id; the
//! others leave it to the time-outs if that one fails. Its vote requests carry the mark of a leadership transfer
//! (Raft dissertation, section 4.2.3), with which voters set the lease aside. A master stands at most once per leader and
//! term, and asks the others anew only after a connection from that leader was there again and closed.
//!
//! Not guaranteed: that it happens. A question that gets lost, or two masters that judge by different answers, cost
//! the election time-out that would have been waited for anyway.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use mooncake_proto::pb::raft as pb;
use mooncake_raft_store::{LogId, Membership, NodeId, Vote};
use openraft::async_runtime::watch::WatchReceiver as _;
use openraft::raft::TransferLeaderRequest;
use tokio::net::TcpStream;

use super::inbound::Inbound;
use super::peers::{Lane, Peers};
use super::{MasterRaft, wire};

/// How long the leader's host may take to refuse a connection. A host that needs longer is not there, and that is
/// what the time-outs are for.
const REFUSE_TIMEOUT: Duration = Duration::from_millis(100);
/// How long one that is asked waits for its own connections from the leader to close: they close within the same
/// millisecond or so.
const NOTICE_TIMEOUT: Duration = Duration::from_millis(30);
/// How long an answer may take: the two above, and the way.
const ASK_TIMEOUT: Duration = Duration::from_millis(200);
/// Waits before asking again when too few saw it; after the last one it is left to the time-outs.
const BACKOFF: [Duration; 3] = [
    Duration::from_millis(20),
    Duration::from_millis(60),
    Duration::from_millis(180),
];

/// What one voter knows of the leader's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Witness {
    /// The end of its log.
    pub(crate) last_log_id: Option<LogId>,
}

/// What follows from the witnesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Too few saw it.
    NoQuorum,
    /// This one stands for election.
    Stands(NodeId),
}

/// Of `witnesses` (voters that saw the leader's end, the one who judges among them), who stands for election.
fn judge(witnesses: &BTreeMap<NodeId, Witness>, membership: &Membership) -> Verdict {
    let voters: BTreeSet<NodeId> = membership.voter_ids().collect();
    let saw = |id: &NodeId| witnesses.contains_key(id);
    let quorum = |config: &BTreeSet<NodeId>| config.iter().filter(|id| saw(id)).count() > config.len() / 2;
    if !membership.get_joint_config().iter().all(quorum) {
        return Verdict::NoQuorum;
    }
    let longest = witnesses
        .iter()
        .filter(|(id, _)| voters.contains(id))
        .max_by_key(|(id, witness)| (witness.last_log_id, std::cmp::Reverse(**id)));
    longest.map_or(Verdict::NoQuorum, |(id, _)| Verdict::Stands(*id))
}

/// Watches the leader; answers the others' questions about it.
#[derive(Clone)]
pub(crate) struct Watchman {
    pub(crate) raft: MasterRaft,
    pub(crate) inbound: Inbound,
    pub(crate) me: NodeId,
}

impl Watchman {
    /// The leader that this master follows as a voter, by its vote.
    fn followed(&self) -> Option<(Vote, Arc<Membership>)> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let membership = metrics.membership_config.membership();
        let vote = metrics.vote;
        let leader = vote.leader_id.voted_for;
        let follows = vote.committed && metrics.current_leader == Some(leader) && leader != self.me;
        let votes = membership.voter_ids().any(|id| id == self.me);
        (follows && votes).then(|| (vote, Arc::new(membership.clone())))
    }

    /// Whether the leader by `vote` is dead, as far as this master can see for itself. An error says what speaks
    /// against it.
    pub(crate) async fn witness(&self, vote: &Vote) -> Result<Witness, &'static str> {
        let (followed, membership) = self.followed().ok_or("follows no leader as a voter")?;
        if followed != *vote {
            return Err("follows another leader");
        }
        let leader = vote.leader_id.voted_for;
        let address = membership
            .get_node(&leader)
            .map(|node| node.rpc_address.clone())
            .ok_or("the leader's address is not known")?;
        let mut open = self.inbound.subscribe();
        let closed = open.wait_for(|open| !open.contains_key(&leader));
        match tokio::time::timeout(NOTICE_TIMEOUT, closed).await {
            Ok(Ok(_)) => {}
            _ => return Err("has connections from the leader"),
        }
        match tokio::time::timeout(REFUSE_TIMEOUT, TcpStream::connect(&address)).await {
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Ok(Err(_)) => return Err("cannot reach the leader's host"),
            Ok(Ok(_)) => return Err("the leader's host accepts connections"),
            Err(_) => return Err("the leader's host does not answer"),
        }
        // What is on the disk, under the vote that is: the log of a dead leader grows no more.
        match self.raft.watch_log_progress().get() {
            Some(flushed) if flushed.vote == *vote => Ok(Witness {
                last_log_id: flushed.last_log_id,
            }),
            _ => Err("has nothing of this leader on its disk, or follows another one by now"),
        }
    }

    /// Asks the other voters what they see.
    async fn ask(&self, peers: &Peers, vote: &Vote, membership: &Membership) -> BTreeMap<NodeId, Witness> {
        let leader = vote.leader_id.voted_for;
        let voters: BTreeSet<NodeId> = membership.voter_ids().collect();
        let others = membership
            .nodes()
            .filter(|(id, _)| voters.contains(id) && **id != self.me && **id != leader);
        let questions = others.map(|(id, node)| async move {
            let request = pb::LeaderGoneRequest {
                route: Some(peers.route(*id, node)),
                leader: Some(wire::vote_to_pb(vote)),
            };
            let mut client = peers.client(*id, &node.rpc_address, Lane::Control);
            match tokio::time::timeout(ASK_TIMEOUT, client.leader_gone(request)).await {
                Ok(Ok(answer)) => {
                    let answer = answer.get_ref();
                    let witness = wire::leader_gone_from_pb(answer);
                    if witness.is_none() {
                        tracing::debug!(voter = id, against = answer.against, "no witness");
                    }
                    witness.map(|witness| (*id, witness))
                }
                _ => None,
            }
        });
        futures_util::future::join_all(questions)
            .await
            .into_iter()
            .flatten()
            .collect()
    }

    /// One try.
    async fn attempt(&self, peers: &Peers, vote: &Vote, membership: &Membership) -> Outcome {
        let own = match self.witness(vote).await {
            Ok(own) => own,
            Err(reason) => {
                tracing::debug!(leader = %vote, reason, "no early election");
                return Outcome::NoQuorum;
            }
        };
        let mut witnesses = self.ask(peers, vote, membership).await;
        witnesses.insert(self.me, own);
        match judge(&witnesses, membership) {
            Verdict::NoQuorum => Outcome::NoQuorum,
            Verdict::Stands(id) if id != self.me => Outcome::LeftToAnother,
            Verdict::Stands(_) => {
                tracing::info!(
                    term = vote.leader_id.term,
                    leader = &vote.leader_id.voted_for,
                    witnesses = witnesses.len(),
                    "the leader's connections are closed and its host refuses new ones, as a quorum sees: standing for \
                     election at once"
                );
                let stand = TransferLeaderRequest::new(*vote, self.me, own.last_log_id);
                if let Err(error) = self.raft.handle_transfer_leader(stand).await {
                    tracing::debug!(%error, "Raft does not stand for election");
                }
                Outcome::Stood
            }
        }
    }
}

/// What came of one try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// Too few saw it, this one among them perhaps: to be tried again, a few times.
    NoQuorum,
    /// Another one stands.
    LeftToAnother,
    /// This one stood.
    Stood,
}

/// What was done about which leader (its vote: leader and term).
#[derive(Debug, Default)]
struct Memory {
    /// Nothing more for now.
    done: Option<Vote>,
    /// Nothing ever again.
    stood: Option<Vote>,
}

impl Memory {
    fn may_try(&self, leader: &Vote) -> bool {
        self.done.as_ref() != Some(leader) && self.stood.as_ref() != Some(leader)
    }

    fn tried(&mut self, leader: &Vote, outcome: Outcome) {
        self.done = Some(*leader);
        if outcome == Outcome::Stood {
            self.stood = Some(*leader);
        }
    }

    /// A connection from that leader is there again. It may still die in this term.
    fn came_back(&mut self, leader: &Vote) {
        if self.done.as_ref() == Some(leader) {
            self.done = None;
        }
    }
}

/// Watches until Raft is gone.
pub(crate) fn spawn(watchman: Watchman, peers: Arc<Peers>) {
    tokio::spawn(async move {
        let mut metrics = watchman.raft.metrics();
        let mut open = watchman.inbound.subscribe();
        let mut memory = Memory::default();
        loop {
            let followed = watchman.followed();
            if let Some((vote, membership)) = followed {
                let leader = vote.leader_id.voted_for;
                if open.borrow_and_update().contains_key(&leader) {
                    memory.came_back(&vote);
                } else if memory.may_try(&vote) {
                    for wait in [Duration::ZERO].iter().chain(&BACKOFF) {
                        tokio::time::sleep(*wait).await;
                        if open.borrow_and_update().contains_key(&leader) {
                            memory.came_back(&vote);
                            break;
                        }
                        let outcome = watchman.attempt(&peers, &vote, &membership).await;
                        memory.tried(&vote, outcome);
                        if outcome != Outcome::NoQuorum {
                            break;
                        }
                    }
                }
            }
            tokio::select! {
                changed = metrics.changed() => if changed.is_err() { return },
                changed = open.changed() => if changed.is_err() { return },
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_raft_store::{Node, log_id};

    fn membership(configs: &[&[NodeId]], learners: &[NodeId]) -> Membership {
        let configs: Vec<BTreeSet<NodeId>> = configs.iter().map(|c| c.iter().copied().collect()).collect();
        let all = configs.iter().flatten().chain(learners);
        let nodes: BTreeMap<_, _> = all.map(|id| (*id, Node::default())).collect();
        Membership::new(configs, nodes).unwrap()
    }

    fn saw(witnesses: &[(NodeId, u64, u64)]) -> BTreeMap<NodeId, Witness> {
        let one = |(id, term, index): &(NodeId, u64, u64)| {
            let last_log_id = Some(log_id(*term, *index));
            (*id, Witness { last_log_id })
        };
        witnesses.iter().map(one).collect()
    }

    #[test]
    fn who_stood_never_stands_again_against_the_same_leader_and_term() {
        let [first, second] = [Vote::new_committed(3, 1), Vote::new_committed(4, 1)];
        for outcome in [Outcome::NoQuorum, Outcome::LeftToAnother, Outcome::Stood] {
            let mut memory = Memory::default();
            assert!(memory.may_try(&first));
            memory.tried(&first, outcome);
            assert!(
                !memory.may_try(&first),
                "{outcome:?}: it is left to the time-outs"
            );
            memory.came_back(&second);
            assert!(!memory.may_try(&first), "{outcome:?}: another one came back");
            memory.came_back(&first);
            assert_eq!(memory.may_try(&first), outcome != Outcome::Stood, "{outcome:?}");
            assert!(memory.may_try(&second), "{outcome:?}: a term of its own");
        }
    }

    #[test]
    fn a_quorum_must_have_seen_it() {
        let three = membership(&[&[1, 2, 3]], &[4]);
        assert_eq!(judge(&saw(&[(2, 1, 5)]), &three), Verdict::NoQuorum);
        assert_eq!(
            judge(&saw(&[(2, 1, 5), (4, 1, 9)]), &three),
            Verdict::NoQuorum,
            "a learner is no witness"
        );
        assert_eq!(judge(&saw(&[(2, 1, 5), (3, 1, 5)]), &three), Verdict::Stands(2));
        let changing = membership(&[&[1, 2, 3], &[1, 4, 5]], &[]);
        assert_eq!(
            judge(&saw(&[(2, 1, 5), (3, 1, 5)]), &changing),
            Verdict::NoQuorum,
            "of both configurations while the membership changes"
        );
        let two = membership(&[&[1, 2]], &[]);
        assert_eq!(
            judge(&saw(&[(2, 1, 5)]), &two),
            Verdict::NoQuorum,
            "one of two is no quorum, however dead the other is"
        );
    }

    #[test]
    fn the_longest_log_stands_then_the_lowest_id() {
        let five = membership(&[&[1, 2, 3, 4, 5]], &[6]);
        let stands = |witnesses: &[(NodeId, u64, u64)]| judge(&saw(witnesses), &five);
        assert_eq!(stands(&[(2, 1, 5), (3, 1, 6), (4, 1, 6)]), Verdict::Stands(3));
        assert_eq!(stands(&[(2, 2, 1), (3, 1, 6), (4, 1, 6)]), Verdict::Stands(2));
        assert_eq!(stands(&[(2, 1, 6), (3, 1, 6), (4, 1, 6)]), Verdict::Stands(2));
        assert_eq!(
            stands(&[(2, 1, 5), (3, 1, 5), (4, 1, 5), (6, 1, 9)]),
            Verdict::Stands(2),
            "a learner is no candidate"
        );
    }
}
