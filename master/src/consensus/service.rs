//! The Raft service of the RPC port: checks who calls whom, then hands the call to openraft.
//!
//! Guaranteed: nothing reaches openraft from a connection that was not opened for Raft, from a caller whose identity is
//! not the connection's, from or to a disk that the membership does not know under that id. So a wiped master cannot
//! vote or acknowledge under its old id, and a foreign one cannot at all.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mooncake_proto::hello::{PeerInfo, Purpose};
use mooncake_proto::pb::raft as pb;
use mooncake_proto::pb::raft::raft_server;
use mooncake_raft_store::{LogEnd, Membership, Snapshot, SnapshotInbox, SnapshotReceiver};
use openraft::async_runtime::watch::WatchReceiver as _;
use openraft::errors::{Fatal, RaftError};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, watch};
use tonic::{Request, Response, Status, Streaming};

use super::bootstrap::knows_a_cluster;
use super::early_election::Watchman;
use super::peers::Peers;
use super::{Identity, MasterRaft, StateReader, wire};
use crate::config::{MAX_MEMBERS, MemberAddress};

/// Snapshots received at once: one from the leader, one that a deposed leader has not given up yet.
const MAX_INCOMING_SNAPSHOTS: usize = 2;
/// How long an incoming snapshot may stand still.
const FRAME_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a master that is asked for on another one's behalf may take to answer.
const REACH_TIMEOUT: Duration = Duration::from_secs(2);

/// What the service and the rest of the process share.
pub(crate) struct Shared {
    pub(crate) identity: Identity,
    /// Where this master is reached, as its own flags say.
    pub(crate) address: MemberAddress,
    /// What `--initial-cluster` says, for comparison at bootstrap.
    pub(crate) initial_cluster: Vec<pb::Node>,
    /// Ready to be a member of a new cluster: started with `--bootstrap` on an empty disk.
    pub(crate) bootstrapping: watch::Sender<bool>,
    /// Who called this master, while it knew no cluster yet, by another disk than it has.
    pub(crate) taken_for: watch::Sender<Option<TakenFor>>,
    /// When the leader was last heard of. Held for one assignment.
    pub(crate) leader_heard: Mutex<Option<Instant>>,
    /// The end of this master's log.
    pub(crate) log_end: LogEnd,
}

/// A leader's word that its cluster knows this master's id with a disk that is not the one here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TakenFor {
    /// The disk that it knows.
    pub(crate) disk_id: String,
    /// Who says so.
    pub(crate) by: u64,
    /// By which disk.
    pub(crate) by_disk: String,
}

impl Shared {
    /// The leader (or, if that is this master, its quorum) was heard of at `at`.
    pub(crate) fn heard_leader(&self, at: Instant) {
        let mut heard = self.leader_heard.lock();
        *heard = (*heard).max(Some(at));
    }
}

pub(crate) struct Service {
    pub(crate) raft: MasterRaft,
    pub(crate) reader: StateReader,
    pub(crate) inbox: SnapshotInbox,
    pub(crate) shared: Arc<Shared>,
    pub(crate) watchman: Watchman,
    pub(crate) peers: Arc<Peers>,
    pub(crate) incoming: Semaphore,
    /// The last refusal that was logged, so that one stray master does not fill the log. Held for a comparison.
    pub(crate) refused: Mutex<Option<(String, Instant)>>,
}

/// The same refusal is logged again after this time.
const REPEAT_REFUSAL: Duration = Duration::from_secs(60);

impl Service {
    pub(crate) fn new(
        raft: MasterRaft,
        reader: StateReader,
        inbox: SnapshotInbox,
        shared: Arc<Shared>,
        watchman: Watchman,
        peers: Arc<Peers>,
    ) -> Self {
        Self {
            raft,
            reader,
            inbox,
            shared,
            watchman,
            peers,
            incoming: Semaphore::new(MAX_INCOMING_SNAPSHOTS),
            refused: Mutex::default(),
        }
    }

    fn refuse(&self, message: String) -> Status {
        let mut refused = self.refused.lock();
        let repeated = refused
            .as_ref()
            .is_some_and(|(text, at)| *text == message && at.elapsed() < REPEAT_REFUSAL);
        if !repeated {
            tracing::error!(reason = message, "refused a Raft call");
            *refused = Some((message.clone(), Instant::now()));
        }
        Status::failed_precondition(message)
    }

    /// Whether the call may be made. One of a `leader` that knows this master by another disk says for certain that the
    /// disk was wiped: a quorum elected who says so. Others may be left over from an older life of the cluster.
    fn check<T>(
        &self,
        request: &Request<T>,
        route: Option<&pb::Route>,
        caller: Caller,
    ) -> Result<(), Status> {
        let peer = purpose_is_raft(request)?;
        let route = route.ok_or_else(|| Status::invalid_argument("the call has no route"))?;
        let metrics = self.raft.metrics();
        let membership = Arc::clone(&metrics.borrow_watched().membership_config);
        judge(&self.shared.identity, peer, route, membership.membership()).map_err(|refusal| {
            if let Refusal::Wiped(_, taken_for) = &refusal
                && caller == Caller::Leader
                && !knows_a_cluster(&membership)
            {
                self.shared.taken_for.send_replace(Some(taken_for.clone()));
            }
            self.refuse(refusal.into_message())
        })
    }

    /// Asks at the addresses of members who answers there.
    async fn reach(&self, mut addresses: Vec<String>, membership: &Membership) -> Vec<pb::Reach> {
        addresses.truncate(MAX_MEMBERS);
        let ask = async |address: String| {
            if !membership.nodes().any(|(_, node)| node.rpc_address == address) {
                return pb::Reach {
                    address,
                    unknown: true,
                    ..Default::default()
                };
            }
            let (disk_id, error) = match self.peers.ask(&address, REACH_TIMEOUT).await {
                Ok(answer) => (answer.disk_id, String::new()),
                Err(why) => (String::new(), why),
            };
            pb::Reach {
                address,
                disk_id,
                error,
                unknown: false,
            }
        };
        futures_util::future::join_all(addresses.into_iter().map(ask)).await
    }

    fn heard_leader(&self) {
        self.shared.heard_leader(Instant::now());
    }

    async fn receive(
        &self,
        mut frames: Streaming<pb::SnapshotFrame>,
        size_bytes: u64,
    ) -> Result<Snapshot, Status> {
        use pb::snapshot_frame::Part;
        let inbox = self.inbox.clone();
        let mut receiver = blocking(move || inbox.receive(size_bytes)).await?;
        loop {
            let next = tokio::time::timeout(FRAME_TIMEOUT, frames.message())
                .await
                .map_err(|_| Status::deadline_exceeded("the snapshot stands still"))??;
            let Some(frame) = next else { break };
            let Some(Part::Data(bytes)) = frame.part else {
                return Err(Status::invalid_argument("a snapshot frame without data"));
            };
            // A sender's snapshot counts as a sign of life: nothing else may come while it is busy.
            self.heard_leader();
            receiver = blocking(move || {
                let mut receiver: SnapshotReceiver = receiver;
                receiver.write(&bytes)?;
                Ok(receiver)
            })
            .await?;
        }
        let (meta, snapshot) = blocking(move || receiver.finish()).await?;
        Ok(Snapshot { meta, snapshot })
    }
}

fn purpose_is_raft<T>(request: &Request<T>) -> Result<&PeerInfo, Status> {
    match request.extensions().get::<PeerInfo>() {
        Some(peer) if peer.purpose == Purpose::Raft => Ok(peer),
        Some(peer) => Err(Status::permission_denied(format!(
            "this connection was opened for {:?}, Raft calls need one that was opened for Raft",
            peer.purpose
        ))),
        None => Err(Status::permission_denied("the connection opened without a hello")),
    }
}

/// What the kind of a call says about who makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Caller {
    /// A quorum elected it.
    Leader,
    /// Anyone.
    Any,
}

/// Why a call is refused.
#[derive(Debug, PartialEq, Eq)]
enum Refusal {
    /// The caller is wrong.
    Caller(String),
    /// This master's disk is not the one that its cluster knows.
    Wiped(String, TakenFor),
}

impl Refusal {
    fn into_message(self) -> String {
        match self {
            Self::Caller(message) | Self::Wiped(message, _) => message,
        }
    }
}

/// Whether `peer` may make a call with `route` to the master with `identity`.
fn judge(
    identity: &Identity,
    peer: &PeerInfo,
    route: &pb::Route,
    membership: &Membership,
) -> Result<(), Refusal> {
    if peer.node_id != route.from_id.to_string() || peer.instance_id != route.from_disk_id {
        return Err(Refusal::Caller(format!(
            "the call says it is from master {} with disk {}, but the connection belongs to {} with disk {}",
            route.from_id, route.from_disk_id, peer.node_id, peer.instance_id
        )));
    }
    if route.to_id != identity.node_id {
        return Err(Refusal::Caller(format!(
            "the call is meant for master {}, this is master {}: check the addresses of the masters",
            route.to_id, identity.node_id
        )));
    }
    let own = membership.get_node(&identity.node_id);
    if route.to_disk_id != identity.disk_id && own.is_some_and(|own| own.disk_id == identity.disk_id) {
        // This master is who its cluster takes it for: the caller has another cluster in mind.
        return Err(Refusal::Caller(format!(
            "master {} (disk {}) knows this master, {}, by disk {}, but it has disk {}, and so its cluster knows it: master \
             {} belongs to an old life of this cluster, from before a restore or a recovery. Stop master {} and delete \
             its data folder; this one is well",
            route.from_id,
            route.from_disk_id,
            identity.node_id,
            route.to_disk_id,
            identity.disk_id,
            route.from_id,
            route.from_id
        )));
    }
    if route.to_disk_id != identity.disk_id {
        let message = format!(
            "the cluster knows master {} with disk {}, but its data folder now holds disk {}: a wiped or exchanged disk \
             has forgotten what the old one promised, so this master must come back as a new id (remove master {} from \
             the cluster, then start it with a new --node-id and an empty --data-dir), or with its old data folder",
            identity.node_id, route.to_disk_id, identity.disk_id, identity.node_id
        );
        let taken_for = TakenFor {
            disk_id: route.to_disk_id.clone(),
            by: route.from_id,
            by_disk: route.from_disk_id.clone(),
        };
        return Err(Refusal::Wiped(message, taken_for));
    }
    if let Some(known) = membership.get_node(&route.from_id)
        && known.disk_id != route.from_disk_id
    {
        return Err(Refusal::Caller(format!(
            "master {} calls with disk {}, but the cluster knows it with disk {}: a wiped or exchanged disk must come \
             back as a new id",
            route.from_id, route.from_disk_id, known.disk_id
        )));
    }
    Ok(())
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T, Status> {
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::InvalidData => {
            Err(Status::data_loss(error.to_string()))
        }
        Ok(Err(error)) => Err(Status::internal(error.to_string())),
        Err(error) => Err(Status::internal(error.to_string())),
    }
}

fn stopped(error: impl std::fmt::Display) -> Status {
    Status::unavailable(format!("this master stops: {error}"))
}

fn raft_stopped(error: RaftError<mooncake_raft_store::TypeConfig>) -> Status {
    match error {
        RaftError::Fatal(Fatal::Stopped) => stopped("shut down"),
        other => stopped(other),
    }
}

fn malformed(error: wire::Malformed) -> Status {
    Status::invalid_argument(error.to_string())
}

#[tonic::async_trait]
impl raft_server::Raft for Service {
    async fn append(
        &self,
        request: Request<pb::AppendRequest>,
    ) -> Result<Response<pb::AppendResponse>, Status> {
        self.check(&request, request.get_ref().route.as_ref(), Caller::Leader)?;
        let append = wire::append_from_pb(request.into_inner()).map_err(malformed)?;
        let response = self.raft.append_entries(append).await.map_err(raft_stopped)?;
        if !matches!(response, openraft::raft::AppendEntriesResponse::HigherVote(_)) {
            self.heard_leader();
        }
        Ok(Response::new(wire::append_response_to_pb(&response)))
    }

    async fn vote(&self, request: Request<pb::VoteRequest>) -> Result<Response<pb::VoteResponse>, Status> {
        self.check(&request, request.get_ref().route.as_ref(), Caller::Any)?;
        let vote = wire::vote_request_from_pb(request.get_ref()).map_err(malformed)?;
        let response = self.raft.vote(vote).await.map_err(raft_stopped)?;
        Ok(Response::new(wire::vote_response_to_pb(&response)))
    }

    async fn pre_vote(
        &self,
        request: Request<pb::VoteRequest>,
    ) -> Result<Response<pb::VoteResponse>, Status> {
        self.check(&request, request.get_ref().route.as_ref(), Caller::Any)?;
        let vote = wire::vote_request_from_pb(request.get_ref()).map_err(malformed)?;
        let response = self.raft.pre_vote(vote).await.map_err(raft_stopped)?;
        Ok(Response::new(wire::vote_response_to_pb(&response)))
    }

    async fn install_snapshot(
        &self,
        request: Request<Streaming<pb::SnapshotFrame>>,
    ) -> Result<Response<pb::SnapshotResponse>, Status> {
        use pb::snapshot_frame::Part;
        purpose_is_raft(&request)?;
        let (metadata, extensions, mut frames) = request.into_parts();
        let first = tokio::time::timeout(FRAME_TIMEOUT, frames.message())
            .await
            .map_err(|_| Status::deadline_exceeded("the snapshot's header does not come"))??;
        let Some(pb::SnapshotFrame {
            part: Some(Part::Header(header)),
        }) = first
        else {
            return Err(Status::invalid_argument("a snapshot begins with its header"));
        };
        self.check(
            &Request::from_parts(metadata, extensions, ()),
            header.route.as_ref(),
            Caller::Leader,
        )?;
        let vote = wire::vote_from_pb(header.vote.as_ref()).map_err(malformed)?;
        // A deposed leader learns that before it sends gigabytes.
        let own = self.raft.metrics().borrow_watched().vote;
        if own > vote {
            return Ok(Response::new(pb::SnapshotResponse {
                vote: Some(wire::vote_to_pb(&own)),
            }));
        }
        let _one = self
            .incoming
            .try_acquire()
            .map_err(|_| Status::resource_exhausted("this master receives a snapshot already"))?;
        tracing::info!(
            from = header.route.as_ref().map(|r| r.from_id),
            size_bytes = header.size_bytes,
            "receiving a snapshot"
        );
        let snapshot = self.receive(frames, header.size_bytes).await?;
        let response = self
            .raft
            .install_full_snapshot(vote, snapshot)
            .await
            .map_err(stopped)?;
        tracing::info!("installed the received snapshot");
        Ok(Response::new(pb::SnapshotResponse {
            vote: Some(wire::vote_to_pb(&response.vote)),
        }))
    }

    async fn transfer_leader(
        &self,
        request: Request<pb::TransferLeaderRequest>,
    ) -> Result<Response<pb::TransferLeaderResponse>, Status> {
        self.check(&request, request.get_ref().route.as_ref(), Caller::Any)?;
        let transfer = wire::transfer_from_pb(request.get_ref()).map_err(malformed)?;
        let response = self
            .raft
            .handle_transfer_leader(transfer)
            .await
            .map_err(stopped)?;
        Ok(Response::new(wire::transfer_response_to_pb(&response)))
    }

    async fn leader_gone(
        &self,
        request: Request<pb::LeaderGoneRequest>,
    ) -> Result<Response<pb::LeaderGoneResponse>, Status> {
        self.check(&request, request.get_ref().route.as_ref(), Caller::Any)?;
        let leader = wire::vote_from_pb(request.get_ref().leader.as_ref()).map_err(malformed)?;
        let seen = self.watchman.witness(&leader).await;
        Ok(Response::new(wire::leader_gone_to_pb(&seen)))
    }

    async fn probe(&self, request: Request<pb::ProbeRequest>) -> Result<Response<pb::ProbeResponse>, Status> {
        purpose_is_raft(&request)?;
        let metrics = self.raft.metrics().borrow_watched().clone();
        let membership = metrics.membership_config.membership();
        let (applied_index, state_digest) = if request.get_ref().with_state_digest {
            let reader = self.reader.clone();
            // Not on an async thread: those of Raft have to be free for heartbeats, and the digest is over the whole state.
            tokio::task::spawn_blocking(move || {
                let (index, state) = {
                    let applied = reader.read();
                    (applied.index(), applied.machine.state().clone())
                };
                (index, state.digest().to_string())
            })
            .await
            .map_err(|error| Status::internal(error.to_string()))?
        } else {
            // Without the lock: this is one of Raft's own threads.
            (self.reader.progress().borrow().saturating_sub(1), String::new())
        };
        let reach = self.reach(request.into_inner().reach_addresses, membership).await;
        let last_log_id = self.shared.log_end.last();
        let identity = &self.shared.identity;
        Ok(Response::new(pb::ProbeResponse {
            node_id: identity.node_id,
            disk_id: identity.disk_id.clone(),
            cluster_id: identity.cluster_id.clone(),
            software: super::SOFTWARE.into(),
            initialised: knows_a_cluster(&metrics.membership_config),
            membership: Some(wire::membership_to_pb(membership)),
            initial_cluster: self.shared.initial_cluster.clone(),
            term: metrics.current_term,
            leader_id: metrics.current_leader.unwrap_or(0),
            last_log_index: last_log_id.map_or(0, |id| id.index()),
            applied_index,
            state_digest,
            bootstrapping: *self.shared.bootstrapping.borrow(),
            rpc_address: self.shared.address.rpc.clone(),
            http_address: self.shared.address.http.clone(),
            supported_cluster_version: super::version::supported(),
            membership_index: metrics
                .membership_config
                .log_id()
                .as_ref()
                .map_or(0, |id| id.index()),
            // What is applied is committed; what is not yet may be too, and is told a moment later.
            committed_index: metrics.last_applied.as_ref().map_or(0, |id| id.index()),
            last_log_term: last_log_id.map_or(0, |id| id.committed_leader_id().term),
            reach,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_raft_store::Node;
    use std::collections::{BTreeMap, BTreeSet};

    fn identity() -> Identity {
        Identity {
            cluster_id: "c".into(),
            node_id: 2,
            disk_id: "disk-2".into(),
        }
    }

    fn peer(node_id: &str, disk: &str) -> PeerInfo {
        PeerInfo {
            node_id: node_id.into(),
            instance_id: disk.into(),
            software: String::new(),
            purpose: Purpose::Raft,
            version: 1,
            features: 0,
        }
    }

    fn route(from: u64, from_disk: &str, to: u64, to_disk: &str) -> pb::Route {
        pb::Route {
            from_id: from,
            from_disk_id: from_disk.into(),
            to_id: to,
            to_disk_id: to_disk.into(),
        }
    }

    fn membership() -> Membership {
        let node = |n: u64| Node {
            disk_id: format!("disk-{n}"),
            ..Node::default()
        };
        let nodes: BTreeMap<_, _> = (1..=3).map(|n| (n, node(n))).collect();
        Membership::new(vec![BTreeSet::from([1, 2, 3])], nodes).unwrap()
    }

    #[test]
    fn only_known_disks_talk() {
        let members = membership();
        let judge = |peer: &PeerInfo, route: &pb::Route, members: &Membership| {
            judge(&identity(), peer, route, members).map_err(Refusal::into_message)
        };
        let good = route(1, "disk-1", 2, "disk-2");
        assert_eq!(judge(&peer("1", "disk-1"), &good, &members), Ok(()));
        // An empty membership (a new member that was not told yet) takes anyone who names its disk.
        assert_eq!(judge(&peer("1", "disk-1"), &good, &Membership::default()), Ok(()));
        // A member that this master has not learnt of yet.
        assert_eq!(
            judge(&peer("4", "disk-4"), &route(4, "disk-4", 2, "disk-2"), &members),
            Ok(())
        );

        // Its own cluster knows the disk: it was restored or recovered, and whoever calls it by another one was not.
        let old_life = judge(&peer("1", "disk-1"), &route(1, "disk-1", 2, "disk-old"), &members).unwrap_err();
        assert!(
            old_life.contains("Stop master 1 and delete its data folder"),
            "{old_life}"
        );
        assert!(!old_life.contains("come back as a new id"), "{old_life}");
        // Wiped, it knows of no cluster; or one that knew its old disk filled its log before that was noticed.
        let renamed = {
            let nodes = [(
                2,
                Node {
                    disk_id: "disk-old".into(),
                    ..Node::default()
                },
            )];
            Membership::new(vec![BTreeSet::from([2])], BTreeMap::from(nodes)).unwrap()
        };
        for own in [Membership::default(), renamed] {
            let wiped_here =
                judge(&peer("1", "disk-1"), &route(1, "disk-1", 2, "disk-old"), &own).unwrap_err();
            assert!(wiped_here.contains("come back as a new id"), "{wiped_here}");
        }
        let wiped_there = judge(
            &peer("1", "disk-new"),
            &route(1, "disk-new", 2, "disk-2"),
            &members,
        )
        .unwrap_err();
        assert!(wiped_there.contains("back as a new id"), "{wiped_there}");
        assert!(
            judge(&peer("1", "disk-1"), &route(1, "disk-1", 3, "disk-2"), &members)
                .unwrap_err()
                .contains("meant for")
        );
        assert!(
            judge(&peer("3", "disk-3"), &good, &members)
                .unwrap_err()
                .contains("the connection belongs to")
        );
    }
}
