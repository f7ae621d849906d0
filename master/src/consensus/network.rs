//! openraft's view of the other masters: each of its calls becomes one call of `raft.proto`.
//!
//! Guaranteed: an append message holds at most [`MAX_APPEND_BYTES`] of entries (more are sent in the next ones), a
//! snapshot travels in frames of [`SNAPSHOT_FRAME_BYTES`]; every call ends, at the latest after its time-out; a
//! peer that cannot be reached, or refuses, never counts as a granted vote. How long the way to a peer is does not
//! change how often it hears a heartbeat.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::{self, FuturesUnordered};
use mooncake_proto::pb::raft as pb;
use mooncake_proto::pb::raft::raft_client::RaftClient;
use mooncake_raft_store::{CALL_TIMEOUT, Node, NodeId, Snapshot, SnapshotData, TypeConfig, Vote};
use openraft::entry::RaftEntry as _;
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Timeout, Unreachable};
use openraft::network::{RPCOption, RPCTypes, RaftNetworkFactory, RaftNetworkV2};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest,
    TransferLeaderResponse, VoteRequest, VoteResponse,
};
use tokio::sync::watch;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::peers::{Lane, Peers, describe};
use super::wire;

/// Most bytes of entries in one append: large enough that a round trip does not matter beside it, small enough that
/// a follower's fsync of it fits well into an append's time-out. Above the largest command (512 KiB).
pub(crate) const MAX_APPEND_BYTES: usize = 1 << 20;
/// Bytes of a snapshot per frame.
pub(crate) const SNAPSHOT_FRAME_BYTES: usize = 256 << 10;
/// How long a heartbeat, a vote or a hand-over may take to be answered. Below what openraft allows, which drops the
/// call without telling anybody why; far above a round trip, and above the set-up of a connection (four round trips).
const CONTROL_TIMEOUT: Duration = Duration::from_millis(CALL_TIMEOUT.as_millis() as u64 * 9 / 10);
/// How long an append with entries may take, beside the time that its bytes take. Not openraft's value (one heartbeat
/// interval): a fsync on a busy disk takes longer, and sending the same entries again would only make it worse.
/// Liveness does not wait for it, since heartbeats have a connection and a worker of their own.
const APPEND_TIMEOUT: Duration = Duration::from_secs(2);
/// The slowest link, in bytes per second, on which an append of any size arrives in its time: half a megabit.
const SLOWEST_LINK: u64 = 64 << 10;
/// How long a snapshot may make no progress at all before it is given up.
const SNAPSHOT_STALL: Duration = Duration::from_secs(10);

type RpcResult<T> = Result<T, RPCError<TypeConfig>>;

/// Makes a client per target and purpose.
pub(crate) struct Network {
    pub(crate) peers: Arc<Peers>,
    pub(crate) me: NodeId,
    /// Between heartbeats.
    pub(crate) heartbeat: Duration,
}

impl RaftNetworkFactory<TypeConfig> for Network {
    type Network = Peer;

    async fn new_client(&mut self, target: NodeId, node: &Node) -> Peer {
        self.peer(target, node, Lane::Append)
    }

    async fn new_heartbeat_client(&mut self, target: NodeId, node: &Node) -> Peer {
        self.peer(target, node, Lane::Control)
    }

    async fn new_snapshot_client(&mut self, target: NodeId, node: &Node) -> Peer {
        self.peer(target, node, Lane::Snapshot)
    }
}

impl Network {
    fn peer(&self, target: NodeId, node: &Node, append_lane: Lane) -> Peer {
        Peer {
            peers: Arc::clone(&self.peers),
            me: self.me,
            heartbeat: self.heartbeat,
            target,
            node: node.clone(),
            append_lane,
        }
    }
}

/// One other master.
pub(crate) struct Peer {
    peers: Arc<Peers>,
    me: NodeId,
    heartbeat: Duration,
    target: NodeId,
    node: Node,
    append_lane: Lane,
}

impl Peer {
    fn route(&self) -> pb::Route {
        self.peers.route(self.target, &self.node)
    }

    async fn call<T, F>(
        &self,
        lane: Lane,
        action: RPCTypes,
        timeout: Duration,
        send: impl FnOnce(RaftClient<Channel>) -> F,
    ) -> RpcResult<T>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let client = self.peers.client(self.target, &self.node.rpc_address, lane);
        match tokio::time::timeout(timeout, send(client)).await {
            Ok(Ok(response)) => {
                self.peers.succeeded(self.target, lane);
                Ok(response.into_inner())
            }
            Ok(Err(status)) => Err(self.failed(lane, &status)),
            Err(_) => Err(self.timed_out(lane, action, timeout)),
        }
    }

    /// A vote or a pre-vote, by `send`.
    async fn ask_for_vote<F>(
        &self,
        request: &VoteRequest<TypeConfig>,
        send: impl FnOnce(RaftClient<Channel>, pb::VoteRequest) -> F,
    ) -> RpcResult<VoteResponse<TypeConfig>>
    where
        F: Future<Output = Result<Response<pb::VoteResponse>, Status>>,
    {
        let message = wire::vote_request_to_pb(self.route(), request);
        let response = self
            .call(Lane::Control, RPCTypes::Vote, CONTROL_TIMEOUT, |client| {
                send(client, message)
            })
            .await?;
        wire::vote_response_from_pb(&response).map_err(malformed)
    }

    /// A heartbeat, said again with every interval until it is answered.
    ///
    /// openraft sends the next one after the answer to the last, so a far peer would hear one per round trip, and
    /// where one is lost or late behind something else, none for longer than its patience. An answer to any of the
    /// copies is one to the heartbeat: each was sent after it.
    async fn beat(&self, message: pb::AppendRequest) -> RpcResult<pb::AppendResponse> {
        let mut copies = FuturesUnordered::new();
        let give_up = tokio::time::sleep(CONTROL_TIMEOUT);
        tokio::pin!(give_up);
        loop {
            // Asked for each time: it may be another connection by now.
            let mut client = self
                .peers
                .client(self.target, &self.node.rpc_address, Lane::Control);
            let copy = message.clone();
            copies.push(async move { client.append(copy).await });
            tokio::select! {
                biased;
                Some(answer) = copies.next() => {
                    let response = answer.map_err(|status| self.failed(Lane::Control, &status))?;
                    self.peers.succeeded(self.target, Lane::Control);
                    return Ok(response.into_inner());
                }
                () = &mut give_up => {
                    return Err(self.timed_out(Lane::Control, RPCTypes::AppendEntries, CONTROL_TIMEOUT));
                }
                () = tokio::time::sleep(self.heartbeat) => self.peers.late(self.target, Lane::Control),
            }
        }
    }

    fn failed(&self, lane: Lane, status: &Status) -> RPCError<TypeConfig> {
        let (text, refused) = describe(status);
        self.peers
            .failed(self.target, &self.node.rpc_address, lane, refused, &text);
        match status.code() {
            // Not there, or it will not have us: ask again later, not at once.
            Code::Unavailable | Code::FailedPrecondition | Code::PermissionDenied | Code::Unknown => {
                RPCError::Unreachable(Unreachable::from_string(text))
            }
            _ => RPCError::Network(NetworkError::from_string(text)),
        }
    }

    fn timed_out(&self, lane: Lane, action: RPCTypes, timeout: Duration) -> RPCError<TypeConfig> {
        let text = format!("no answer within {} ms", timeout.as_millis());
        self.peers
            .failed(self.target, &self.node.rpc_address, lane, false, &text);
        RPCError::Timeout(Timeout {
            action,
            id: self.me,
            target: self.target,
            timeout,
        })
    }
}

/// A response that does not make sense is an error of the network, not of this process.
fn malformed(error: wire::Malformed) -> RPCError<TypeConfig> {
    RPCError::Network(NetworkError::new(&error))
}

/// Keeps the longest prefix of `entries` that fits into a message, at least one entry. Says whether any was cut.
fn cut(request: &mut AppendEntriesRequest<TypeConfig>) -> bool {
    let mut bytes = 0;
    let fits = request
        .entries
        .iter()
        .take_while(|entry| {
            bytes += wire::entry_size_bytes(entry);
            bytes <= MAX_APPEND_BYTES
        })
        .count()
        .max(1);
    let is_cut = fits < request.entries.len();
    request.entries.truncate(fits);
    is_cut
}

/// How long an append with so many bytes of entries may take.
fn append_timeout(bytes: usize) -> Duration {
    APPEND_TIMEOUT + Duration::from_millis(bytes as u64 * 1000 / SLOWEST_LINK)
}

impl RaftNetworkV2<TypeConfig> for Peer {
    type SnapshotData = SnapshotData;

    async fn append_entries(
        &mut self,
        mut request: AppendEntriesRequest<TypeConfig>,
        _: RPCOption,
    ) -> RpcResult<AppendEntriesResponse<TypeConfig>> {
        let is_cut = cut(&mut request);
        let last = request.entries.last().map(|entry| entry.log_id());
        let timeout = append_timeout(request.entries.iter().map(wire::entry_size_bytes).sum());
        let message = wire::append_to_pb(self.route(), request);
        let response = match self.append_lane {
            Lane::Control => self.beat(message).await?,
            lane => {
                self.call(lane, RPCTypes::AppendEntries, timeout, |mut client| async move {
                    client.append(message).await
                })
                .await?
            }
        };
        match wire::append_response_from_pb(&response).map_err(malformed)? {
            AppendEntriesResponse::Success if is_cut => Ok(AppendEntriesResponse::PartialSuccess(last)),
            response => Ok(response),
        }
    }

    async fn vote(
        &mut self,
        request: VoteRequest<TypeConfig>,
        _: RPCOption,
    ) -> RpcResult<VoteResponse<TypeConfig>> {
        let send = |mut client: RaftClient<Channel>, message| async move { client.vote(message).await };
        self.ask_for_vote(&request, send).await
    }

    async fn pre_vote(
        &mut self,
        request: VoteRequest<TypeConfig>,
        _: RPCOption,
    ) -> RpcResult<VoteResponse<TypeConfig>> {
        let send = |mut client: RaftClient<Channel>, message| async move { client.pre_vote(message).await };
        self.ask_for_vote(&request, send).await
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<TypeConfig>,
        _: RPCOption,
    ) -> RpcResult<TransferLeaderResponse<TypeConfig>> {
        let message = wire::transfer_to_pb(self.route(), &request);
        let response = self
            .call(
                Lane::Control,
                RPCTypes::TransferLeader,
                CONTROL_TIMEOUT,
                |mut client| async move { client.transfer_leader(message).await },
            )
            .await?;
        wire::transfer_response_from_pb(&response).map_err(malformed)
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot,
        cancel: impl Future<Output = ReplicationClosed> + Send + 'static,
        option: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        let size_bytes = snapshot.snapshot.size_bytes();
        let meta = &snapshot.meta;
        tracing::info!(peer = self.target, size_bytes, last = ?meta.last_log_id, "sending a snapshot to master {}", self.target);
        let header = pb::SnapshotHeader {
            route: Some(self.route()),
            vote: Some(wire::vote_to_pb(&vote)),
            size_bytes,
        };
        let (progress, mut progressed) = watch::channel(0u64);
        let frames = snapshot_frames(header, snapshot.snapshot, progress);
        let mut client = self
            .peers
            .client(self.target, &self.node.rpc_address, Lane::Snapshot);
        let call = client.install_snapshot(frames);
        tokio::pin!(call, cancel);
        // Until the last frame is taken the limit is on standing still; then on the receiver's checking and loading.
        let mut limit = SNAPSHOT_STALL;
        loop {
            tokio::select! {
                answer = &mut call => {
                    let response = answer.map_err(|status| self.failed(Lane::Snapshot, &status))?;
                    self.peers.succeeded(self.target, Lane::Snapshot);
                    let vote = wire::vote_from_pb(response.get_ref().vote.as_ref()).map_err(malformed)?;
                    return Ok(SnapshotResponse::new(vote));
                }
                closed = &mut cancel => return Err(StreamingError::Closed(closed)),
                changed = async {
                    match progressed.changed().await {
                        Ok(()) => {}
                        // The sender is gone with the stream: everything was taken, wait for the answer only.
                        Err(_) => std::future::pending().await,
                    }
                } => {
                    let () = changed;
                    if *progressed.borrow() >= size_bytes {
                        limit = option.hard_ttl().max(SNAPSHOT_STALL);
                    }
                }
                () = tokio::time::sleep(limit) => {
                    return Err(self.timed_out(Lane::Snapshot, RPCTypes::InstallSnapshot, limit).into());
                }
            }
        }
    }
}

/// The header, then the file in frames, read as they are taken. A read error ends the stream early, which the
/// receiver refuses because its length is wrong.
fn snapshot_frames(
    header: pb::SnapshotHeader,
    data: SnapshotData,
    progress: watch::Sender<u64>,
) -> impl futures_util::Stream<Item = pb::SnapshotFrame> + Send + 'static {
    use pb::snapshot_frame::Part;
    let size_bytes = header.size_bytes;
    stream::unfold(
        (Some(header), data, 0u64, progress),
        move |(header, data, offset, progress)| async move {
            if let Some(header) = header {
                let frame = pb::SnapshotFrame {
                    part: Some(Part::Header(header)),
                };
                return Some((frame, (None, data, 0, progress)));
            }
            if offset >= size_bytes {
                return None;
            }
            let reader = data.clone();
            let read =
                tokio::task::spawn_blocking(move || reader.read_at(offset, SNAPSHOT_FRAME_BYTES)).await;
            let bytes = match read {
                Ok(Ok(bytes)) if !bytes.is_empty() => bytes,
                Ok(Ok(_)) => return None,
                Ok(Err(error)) => {
                    tracing::error!(%error, offset, "reading the snapshot to send failed");
                    return None;
                }
                Err(_) => return None,
            };
            let offset = offset + bytes.len() as u64;
            progress.send_replace(offset);
            let frame = pb::SnapshotFrame {
                part: Some(Part::Data(bytes.into())),
            };
            Some((frame, (None, data, offset, progress)))
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_raft_store::{Command, Entry, log_id};
    use openraft::EntryPayload;

    fn request(sizes: &[usize]) -> AppendEntriesRequest<TypeConfig> {
        let entry = |(at, size): (usize, &usize)| Entry {
            log_id: log_id(1, at as u64 + 1),
            payload: EntryPayload::Normal(Command(vec![0; *size])),
        };
        AppendEntriesRequest {
            vote: Vote::new_committed(1, 1),
            prev_log_id: Some(log_id(1, 0)),
            entries: sizes.iter().enumerate().map(entry).collect(),
            leader_commit: None,
        }
    }

    #[test]
    fn appends_are_cut_by_bytes() {
        let mut small = request(&[10; 50]);
        assert!(!cut(&mut small));
        assert_eq!(small.entries.len(), 50);

        let mut large = request(&[400 << 10; 4]);
        assert!(cut(&mut large));
        assert_eq!(large.entries.len(), 2, "a third one would pass the limit");

        let mut huge = request(&[MAX_APPEND_BYTES + 1, 1]);
        assert!(cut(&mut huge));
        assert_eq!(
            huge.entries.len(),
            1,
            "one entry always goes, or replication would stand still"
        );

        let mut empty = request(&[]);
        assert!(!cut(&mut empty));
    }

    #[test]
    fn the_largest_append_has_time_to_arrive_on_the_slowest_link() {
        assert_eq!(append_timeout(0), APPEND_TIMEOUT);
        let bytes = MAX_APPEND_BYTES as u64;
        assert!(append_timeout(MAX_APPEND_BYTES) >= Duration::from_secs(bytes / SLOWEST_LINK));
    }
}
