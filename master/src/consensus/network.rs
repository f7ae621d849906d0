//! openraft's view of the other masters: each of its calls becomes one call of `raft.proto`.
//!
//! Guaranteed: an append message holds at most [`MAX_APPEND_BYTES`] of entries (more are sent in the next ones), a
//! snapshot travels in frames of [`SNAPSHOT_FRAME_BYTES`]; every call ends, at the latest after its time-out; a
//! peer that cannot be reached, or refuses, never counts as a granted vote.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use mooncake_proto::pb::raft as pb;
use mooncake_proto::pb::raft::raft_client::RaftClient;
use mooncake_raft_store::{Node, NodeId, Snapshot, SnapshotData, TypeConfig, Vote};
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
/// How long an append with entries may take. Not openraft's value (one heartbeat interval): a fsync on a busy disk
/// takes longer, and sending the same entries again would only make it worse. Liveness does not wait for it, since
/// heartbeats have a connection and a worker of their own.
const APPEND_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a snapshot may make no progress at all before it is given up.
const SNAPSHOT_STALL: Duration = Duration::from_secs(10);

type RpcResult<T> = Result<T, RPCError<TypeConfig>>;

/// Makes a client per target and purpose.
pub(crate) struct Network {
    pub(crate) peers: Arc<Peers>,
    pub(crate) me: NodeId,
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
        option: &RPCOption,
        send: impl FnOnce(RaftClient<Channel>, pb::VoteRequest) -> F,
    ) -> RpcResult<VoteResponse<TypeConfig>>
    where
        F: Future<Output = Result<Response<pb::VoteResponse>, Status>>,
    {
        let message = wire::vote_request_to_pb(self.route(), request);
        let response = self
            .call(Lane::Control, RPCTypes::Vote, within(option), |client| {
                send(client, message)
            })
            .await?;
        wire::vote_response_from_pb(&response).map_err(malformed)
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

/// A little less than openraft's own limit, which drops the call without telling anybody why.
fn within(option: &RPCOption) -> Duration {
    option.hard_ttl() * 9 / 10
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

impl RaftNetworkV2<TypeConfig> for Peer {
    type SnapshotData = SnapshotData;

    async fn append_entries(
        &mut self,
        mut request: AppendEntriesRequest<TypeConfig>,
        option: RPCOption,
    ) -> RpcResult<AppendEntriesResponse<TypeConfig>> {
        let is_cut = cut(&mut request);
        let last = request.entries.last().map(|entry| entry.log_id());
        let timeout = match self.append_lane {
            Lane::Control => within(&option),
            Lane::Append | Lane::Snapshot => APPEND_TIMEOUT,
        };
        let message = wire::append_to_pb(self.route(), request);
        let response = self
            .call(
                self.append_lane,
                RPCTypes::AppendEntries,
                timeout,
                |mut client| async move { client.append(message).await },
            )
            .await?;
        match wire::append_response_from_pb(&response).map_err(malformed)? {
            AppendEntriesResponse::Success if is_cut => Ok(AppendEntriesResponse::PartialSuccess(last)),
            response => Ok(response),
        }
    }

    async fn vote(
        &mut self,
        request: VoteRequest<TypeConfig>,
        option: RPCOption,
    ) -> RpcResult<VoteResponse<TypeConfig>> {
        let send = |mut client: RaftClient<Channel>, message| async move { client.vote(message).await };
        self.ask_for_vote(&request, &option, send).await
    }

    async fn pre_vote(
        &mut self,
        request: VoteRequest<TypeConfig>,
        option: RPCOption,
    ) -> RpcResult<VoteResponse<TypeConfig>> {
        let send = |mut client: RaftClient<Channel>, message| async move { client.pre_vote(message).await };
        self.ask_for_vote(&request, &option, send).await
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<TypeConfig>,
        option: RPCOption,
    ) -> RpcResult<TransferLeaderResponse<TypeConfig>> {
        let message = wire::transfer_to_pb(self.route(), &request);
        let response = self
            .call(
                Lane::Control,
                RPCTypes::TransferLeader,
                within(&option),
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
}
