//! One session, from its first frame to its last.

use super::{
    convert,
    facts::{Claim, Violation},
};
use crate::{
    consensus::{Leadership, ProposeError},
    context::MasterContext,
    plan::{Order, Space},
};
use futures_util::{
    Stream, StreamExt,
    stream::{self, PollNext},
};
use mooncake_proto::{
    MAX_SESSION_FRAME_BYTES,
    api::NodeStatus,
    digest::Digest,
    hello::{HelloStream, PeerInfo, Purpose},
    ids::NodeId,
    pb::session::{self as pb, master_frame, node_frame, node_session_server as server},
};
use mooncake_state::{Command, Fence, NodeAbout, Reply};
use std::{
    collections::HashSet,
    io,
    num::NonZeroU32,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    sync::{Semaphore, mpsc},
    time::MissedTickBehavior,
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

/// Sessions at once: ten times the largest fleet this is designed for, since each costs three small tasks.
const MAX_SESSIONS: usize = 10_000;
/// Longest wait for the first frame.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(10);
/// Frames that wait for the network, per session: with blobs at most a few MiB.
const FRAME_QUEUE: usize = 8;
/// Orders that wait behind blobs, per session. A full queue makes the planner try again.
const ORDER_QUEUE: usize = 256;
/// Heartbeats that wait for the network: one on its way, one due, and the answer to the node's.
const HEARTBEAT_QUEUE: usize = 3;
/// Bytes of a blob in one frame.
const BLOB_PART_BYTES: usize = MAX_SESSION_FRAME_BYTES * 3 / 4;
/// Blobs remembered as sent, per session; beyond it they are sent again, which is harmless.
const MAX_SENT_BLOBS: usize = 4096;
/// How often a session looks at its own silence.
const SILENCE_CHECK: Duration = Duration::from_millis(250);
/// A check that comes this late says that this process stood still, not the node.
const OWN_STALL: Duration = Duration::from_secs(1);
/// How long a client may wait for a node id whose former owner may still come back.
const TAKE_OVER_WAIT: Duration = Duration::from_secs(10);
/// How often it looks.
const TAKE_OVER_CHECK: Duration = Duration::from_millis(100);

/// Serves the sessions that come in until `cancel`.
pub async fn serve<S>(
    ctx: Arc<MasterContext>,
    incoming: S,
    cancel: CancellationToken,
) -> Result<(), tonic::transport::Error>
where
    S: Stream<Item = io::Result<HelloStream>> + Send + 'static,
{
    let service = Service {
        ctx,
        cancel: cancel.clone(),
        room: Arc::new(Semaphore::new(MAX_SESSIONS)),
    };
    let service = server::NodeSessionServer::new(service)
        .max_decoding_message_size(MAX_SESSION_FRAME_BYTES)
        .max_encoding_message_size(MAX_SESSION_FRAME_BYTES);
    tonic::transport::Server::builder()
        .add_service(service)
        .serve_with_incoming_shutdown(incoming, cancel.cancelled_owned())
        .await
}

struct Service {
    ctx: Arc<MasterContext>,
    cancel: CancellationToken,
    room: Arc<Semaphore>,
}

type Frames = Pin<Box<dyn Stream<Item = Result<pb::MasterFrame, Status>> + Send>>;

#[tonic::async_trait]
impl server::NodeSession for Service {
    type OpenStream = Frames;

    async fn open(&self, request: Request<Streaming<pb::NodeFrame>>) -> Result<Response<Frames>, Status> {
        let peer = match request.extensions().get::<PeerInfo>() {
            Some(peer) if peer.purpose == Purpose::Session => peer.clone(),
            _ => {
                return Err(Status::permission_denied(
                    "this connection was not opened for a node session",
                ));
            }
        };
        let room = self.room.clone().try_acquire_owned();
        let room = room
            .map_err(|_| Status::resource_exhausted(format!("{MAX_SESSIONS} nodes are connected already")))?;
        let (frames, frame_queue) = mpsc::channel(FRAME_QUEUE);
        let (heartbeats, heartbeat_queue) = mpsc::channel(HEARTBEAT_QUEUE);
        let opening = Opening {
            ctx: self.ctx.clone(),
            peer,
            inbound: request.into_inner(),
            frames,
            heartbeats,
            // A child: the end of one session does not end the others.
            cancel: self.cancel.child_token(),
        };
        tokio::spawn(async move {
            opening.run().await;
            drop(room);
        });
        // Heartbeats pass blobs and orders.
        let frames = stream::select_with_strategy(
            ReceiverStream::new(heartbeat_queue),
            ReceiverStream::new(frame_queue),
            |(): &mut ()| PollNext::Left,
        );
        let frames = frames.map(|body| Ok(pb::MasterFrame { body: Some(body) }));
        Ok(Response::new(Box::pin(frames)))
    }
}

type Body = master_frame::Body;

struct Opening {
    ctx: Arc<MasterContext>,
    peer: PeerInfo,
    inbound: Streaming<pb::NodeFrame>,
    frames: mpsc::Sender<Body>,
    heartbeats: mpsc::Sender<Body>,
    cancel: CancellationToken,
}

/// Why a client does not get a session.
enum NoSession {
    Redirect,
    Refused(&'static str, String),
}

fn refused(code: &'static str, message: impl Into<String>) -> NoSession {
    NoSession::Refused(code, message.into())
}

impl Opening {
    async fn run(mut self) {
        let first = tokio::time::timeout(REGISTER_TIMEOUT, self.inbound.message()).await;
        let register = match first {
            Ok(Ok(Some(pb::NodeFrame {
                body: Some(node_frame::Body::Register(register)),
            }))) => register,
            Ok(Ok(Some(_))) => {
                return self
                    .refuse("register_first", "the first frame must be Register")
                    .await;
            }
            _ => return,
        };
        let (node, about) = match convert::register(&register) {
            Ok(checked) => checked,
            Err(why) => return self.refuse("invalid_register", &why).await,
        };
        if self.peer.node_id != node.as_str() {
            let why = format!(
                "the connection was opened by {}, not by {node}",
                self.peer.node_id
            );
            return self.refuse("node_id_mismatch", &why).await;
        }
        let (orders, order_queue) = mpsc::channel(ORDER_QUEUE);
        match self.register(&node, &register, about, orders).await {
            Ok((number, leadership, incarnation)) => {
                let session = Session {
                    node,
                    number,
                    incarnation,
                    leadership,
                };
                self.serve(session, order_queue).await;
            }
            Err(NoSession::Redirect) => self.redirect().await,
            Err(NoSession::Refused(code, why)) => {
                tracing::warn!(%node, code, why, "refused a node session");
                self.refuse(code, &why).await;
            }
        }
    }

    async fn refuse(&self, code: &str, message: &str) {
        let frame = Body::Refused(pb::Refused {
            code: code.into(),
            message: message.into(),
        });
        let _ = self.frames.send(frame).await;
    }

    async fn redirect(&self) {
        let own_id = self.ctx.consensus.identity().node_id;
        let leader = self.ctx.consensus.leadership().borrow().leader.clone();
        let leader_address = leader
            .filter(|l| l.id != own_id)
            .map_or(String::new(), |l| l.rpc_address);
        let _ = self
            .frames
            .send(Body::Redirect(pb::Redirect { leader_address }))
            .await;
    }

    /// Claims the node id and gets the registration committed.
    async fn register(
        &self,
        node: &NodeId,
        register: &pb::Register,
        about: NodeAbout,
        orders: mpsc::Sender<Order>,
    ) -> Result<(u64, Leadership, u64), NoSession> {
        let leadership = self.ctx.consensus.leadership().borrow().clone();
        if !leadership.is_serving {
            return Err(NoSession::Redirect);
        }
        self.check_epoch(node, register)?;
        self.ctx.begin(leadership.term);
        let give_up = Instant::now() + TAKE_OVER_WAIT;
        let taken = || {
            refused(
                "node_id_taken",
                format!(
                    "another live client has the node id {node} (with another data folder): give each client its own --node-id, \
                 or stop the other one"
                ),
            )
        };
        let number = loop {
            // A former owner with another disk may only be late: it is waited for until it is suspected.
            let late =
                self.ctx.consensus.state().node(node).is_some_and(|known| {
                    known.store_id != register.store_id && known.status == NodeStatus::Up
                });
            if !late {
                let mut facts = self.ctx.sessions.facts_mut();
                match facts.claim(
                    leadership.term,
                    node,
                    &register.store_id,
                    orders.clone(),
                    self.cancel.clone(),
                ) {
                    Claim::Granted { number } => break number,
                    Claim::Taken => return Err(taken()),
                    Claim::NotLeader => return Err(NoSession::Redirect),
                }
            }
            if self.ctx.sessions.facts().is_connected(node) || Instant::now() >= give_up {
                return Err(taken());
            }
            tokio::select! {
                () = tokio::time::sleep(TAKE_OVER_CHECK) => {}
                () = self.cancel.cancelled() => return Err(NoSession::Redirect),
            }
        };
        let space = Space {
            capacity_bytes: about.capacity_bytes,
            free_bytes: about.free_bytes,
            measured_ms: self.ctx.now_ms(),
        };
        let committed = self.commit(node, &register.store_id, about).await;
        let mut facts = self.ctx.sessions.facts_mut();
        let incarnation = match committed {
            Ok(incarnation) => incarnation,
            Err(why) => {
                facts.release(node, number);
                return Err(why);
            }
        };
        if !facts.open(node, number, incarnation, space, self.ctx.now_ms()) {
            return Err(NoSession::Redirect);
        }
        facts.limit_transfers(node, NonZeroU32::new(register.max_transfers));
        let heard = (Instant::now(), self.ctx.now_ms());
        let named = facts.holdings(node, number, register.holdings.clone(), false, heard);
        if let Err(Violation(why)) = named {
            facts.lost(node, number, Instant::now());
            return Err(refused("invalid_register", why));
        }
        Ok((number, leadership, incarnation))
    }

    /// A node that listened to masters of a later epoch than the log knows: these here are left over from before a
    /// restore or a recovery, and must not lead it.
    fn check_epoch(&self, node: &NodeId, register: &pb::Register) -> Result<(), NoSession> {
        let highest: Fence = register.highest_fence.unwrap_or_default().into();
        let epoch = self.ctx.consensus.state().recovery_epoch();
        if highest.recovery_epoch <= epoch {
            return Ok(());
        }
        Err(refused(
            "old_recovery_epoch",
            format!(
                "node {node} belongs to the recovery epoch {}, this master's cluster has {epoch}: it is left over from before \
                 a restore or a recovery. Stop these masters and delete their data folders; or, if they are the right \
                 ones, restore them with --recovery-epoch above {} (and --force-epoch, if that is far from the time)",
                highest.recovery_epoch, highest.recovery_epoch
            ),
        ))
    }

    /// The incarnation under which the node is registered in the log.
    async fn commit(&self, node: &NodeId, store_id: &str, about: NodeAbout) -> Result<u64, NoSession> {
        let known = {
            let state = self.ctx.consensus.state();
            state.node(node).map(|n| {
                let same_about = NodeAbout {
                    free_bytes: 0,
                    ..n.about.clone()
                } == NodeAbout {
                    free_bytes: 0,
                    ..about.clone()
                };
                (
                    n.incarnation,
                    n.store_id == store_id && n.status == NodeStatus::Up && same_about,
                )
            })
        };
        let left = self.ctx.sessions.facts().has_left(node);
        if let Some((incarnation, true)) = known
            && !left
        {
            // Nothing to write, but this master must really lead.
            return match self.ctx.consensus.read_index().await {
                Ok(_) => Ok(incarnation),
                Err(_) => Err(NoSession::Redirect),
            };
        }
        let command = Command::RegisterNode {
            node: node.clone(),
            store_id: store_id.to_owned(),
            expected_incarnation: known.map_or(0, |(incarnation, _)| incarnation),
            about,
            now_ms: self.ctx.now_ms(),
        };
        match self.ctx.consensus.propose(&command).await {
            Ok(proposed) => match proposed.reply {
                Reply::Registered { incarnation } => Ok(incarnation),
                Reply::NodeIdTaken { .. } => Err(refused(
                    "node_id_taken",
                    format!("another client registered as {node} at the same time"),
                )),
                other => Err(refused(
                    "not_registered",
                    format!("the state machine answered {other:?}"),
                )),
            },
            Err(ProposeError::TooLarge { bytes }) => Err(refused(
                "invalid_register",
                format!("what the node says of itself has {bytes} bytes: too much"),
            )),
            // It comes back, here or to the next leader; registering twice is harmless.
            Err(error) => {
                tracing::debug!(%node, %error, "a registration was not committed");
                Err(NoSession::Redirect)
            }
        }
    }

    async fn serve(mut self, session: Session, order_queue: mpsc::Receiver<Order>) {
        let Session {
            node,
            number,
            incarnation,
            leadership,
        } = &session;
        tracing::info!(%node, incarnation, software = self.peer.software, "node connected");
        let guard = LostGuard {
            ctx: self.ctx.clone(),
            node: node.clone(),
            number: *number,
        };
        self.ctx.wake.notify_one();
        let welcome = self.welcome(leadership, *incarnation);
        if self.frames.send(Body::Welcome(welcome)).await.is_err() {
            return;
        }
        let beats = tokio::spawn(beat(self.heartbeats.clone(), self.ctx.options.heartbeat_interval));
        let sender = OrderSender {
            ctx: self.ctx.clone(),
            node: node.clone(),
            term: leadership.term,
            frames: self.frames.clone(),
            cancel: self.cancel.clone(),
        };
        let orders = tokio::spawn(sender.run(order_queue));
        let why = self.listen(&session).await;
        beats.abort();
        orders.abort();
        match why {
            End::Closed(why) => tracing::info!(%node, why, "node disconnected"),
            End::Violation(why) => {
                tracing::warn!(%node, why, "closing the session: the node does not keep to the protocol");
                self.refuse("protocol", &why).await;
            }
            End::NotLeader => {
                tracing::debug!(%node, "sending the node to the next leader");
                self.redirect().await;
            }
        }
        drop(guard);
    }

    fn welcome(&self, leadership: &Leadership, incarnation: u64) -> pb::Welcome {
        let cluster = self.ctx.consensus.cluster();
        pb::Welcome {
            term: leadership.term,
            recovery_epoch: self.ctx.consensus.state().recovery_epoch(),
            incarnation,
            master_id: cluster.me.node_id.to_string(),
            heartbeat_interval_ms: self.ctx.options.heartbeat_interval.as_millis() as u32,
            master_addresses: cluster.members.into_iter().map(|m| m.rpc_address).collect(),
        }
    }

    /// Takes frames in until the session ends. Nothing here waits for anything but the node.
    async fn listen(&mut self, session: &Session) -> End {
        let mut leadership = self.ctx.consensus.leadership();
        let mut checks = tokio::time::interval(SILENCE_CHECK);
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut heard, mut checked) = (Instant::now(), Instant::now());
        let term = session.leadership.term;
        loop {
            tokio::select! {
                biased;
                () = self.cancel.cancelled() => {
                    let leads = {
                        let now = self.ctx.consensus.leadership();
                        let now = now.borrow();
                        now.is_serving && now.term == term
                    };
                    let why = "replaced by a newer session, or this master stops";
                    return if leads { End::Closed(why.into()) } else { End::NotLeader };
                }
                _ = leadership.wait_for(|l| !l.is_serving || l.term != term) => return End::NotLeader,
                frame = self.inbound.message() => match frame {
                    Ok(Some(frame)) => {
                        heard = Instant::now();
                        match self.take(session, frame) {
                            Ok(None) => {}
                            Ok(Some(end)) => return end,
                            Err(Violation(why)) => return End::Violation(why),
                        }
                    }
                    Ok(None) => return End::Closed("the node closed the stream".into()),
                    Err(status) => return End::Closed(format!("the stream broke: {}", status.message())),
                },
                _ = checks.tick() => {
                    if checked.elapsed() > SILENCE_CHECK + OWN_STALL {
                        heard = Instant::now();
                    }
                    checked = Instant::now();
                    if heard.elapsed() > self.ctx.options.session_timeout {
                        return End::Closed(format!("nothing was heard for {} ms", heard.elapsed().as_millis()));
                    }
                }
            }
        }
    }

    fn take(&self, session: &Session, frame: pb::NodeFrame) -> Result<Option<End>, Violation> {
        let Session { node, number, .. } = session;
        let (ctx, number) = (&self.ctx, *number);
        match frame.body {
            Some(node_frame::Body::Heartbeat(beat)) => {
                ctx.sessions
                    .facts_mut()
                    .heartbeat(node, number, beat.free_bytes, ctx.now_ms());
                // The node measures the round trip. Where the queue is full it hears from us anyway.
                let _ = self.heartbeats.try_send(Body::Heartbeat(pb::Heartbeat {
                    answers: beat.sequence,
                    ..Default::default()
                }));
            }
            Some(node_frame::Body::Holdings(holdings)) => {
                let complete = holdings.inventory_complete;
                ctx.sessions.facts_mut().holdings(
                    node,
                    number,
                    holdings.holdings,
                    complete,
                    (Instant::now(), ctx.now_ms()),
                )?;
                ctx.wake.notify_one();
            }
            Some(node_frame::Body::Reports(batch)) => {
                let mut facts = ctx.sessions.facts_mut();
                let state = ctx.consensus.state();
                let mut ended = false;
                for report in batch.reports {
                    ended |= report.outcome() != pb::TaskOutcome::Running;
                    facts.report(
                        &state,
                        &ctx.metrics,
                        node,
                        number,
                        report,
                        (Instant::now(), ctx.now_ms()),
                    )?;
                }
                if ended {
                    ctx.wake.notify_one();
                }
            }
            Some(node_frame::Body::Goodbye(goodbye)) => {
                let mut facts = ctx.sessions.facts_mut();
                facts.goodbye(
                    &ctx.consensus.state(),
                    node,
                    number,
                    &goodbye.reason,
                    ctx.now_ms(),
                );
                drop(facts);
                ctx.wake.notify_one();
                return Ok(Some(End::Closed(format!("it said goodbye: {}", goodbye.reason))));
            }
            Some(node_frame::Body::Register(_)) => return Err(Violation("Register was sent twice".into())),
            // From a newer client: what is not known here is not needed here.
            None => {}
        }
        Ok(None)
    }
}

struct Session {
    node: NodeId,
    number: u64,
    incarnation: u64,
    leadership: Leadership,
}

enum End {
    Closed(String),
    Violation(String),
    NotLeader,
}

/// Notes the loss of the session, whatever way it ends.
struct LostGuard {
    ctx: Arc<MasterContext>,
    node: NodeId,
    number: u64,
}

impl Drop for LostGuard {
    fn drop(&mut self) {
        self.ctx
            .sessions
            .facts_mut()
            .lost(&self.node, self.number, Instant::now());
        self.ctx.wake.notify_one();
    }
}

/// Heartbeats, on a task of its own. Ends when the stream does.
async fn beat(heartbeats: mpsc::Sender<Body>, interval: Duration) {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut sequence = 0;
    loop {
        ticks.tick().await;
        sequence += 1;
        let beat = Body::Heartbeat(pb::Heartbeat {
            sequence,
            ..Default::default()
        });
        if let Err(mpsc::error::TrySendError::Closed(_)) = heartbeats.try_send(beat) {
            return;
        }
    }
}

/// Turns orders into frames, blobs first.
struct OrderSender {
    ctx: Arc<MasterContext>,
    node: NodeId,
    term: u64,
    frames: mpsc::Sender<Body>,
    cancel: CancellationToken,
}

impl OrderSender {
    async fn run(self, mut orders: mpsc::Receiver<Order>) {
        let mut sent = HashSet::new();
        while let Some(order) = orders.recv().await {
            for digest in order.blobs() {
                if sent.contains(&digest) {
                    continue;
                }
                if !self.blob(digest).await {
                    // The order cannot be given: a new session begins with nothing sent.
                    self.cancel.cancel();
                    return;
                }
                if sent.len() >= MAX_SENT_BLOBS {
                    sent.clear();
                }
                sent.insert(digest);
            }
            tracing::debug!(node = %self.node, model = %order.model, fence = ?order.fence, "sending an order");
            self.ctx.metrics.orders.inc();
            let frame = Body::Order(order.to_wire(self.term, self.ctx.options.require_checksums));
            if self.frames.send(frame).await.is_err() {
                return;
            }
        }
    }

    async fn blob(&self, digest: Digest) -> bool {
        let Some(bytes) = self.ctx.consensus.state().blob(&digest).cloned() else {
            tracing::warn!(node = %self.node, %digest, "a blob that an order names is gone");
            return false;
        };
        for frame in blob_frames(digest, &bytes) {
            if self.frames.send(frame).await.is_err() {
                return false;
            }
        }
        true
    }
}

fn blob_frames(digest: Digest, bytes: &[u8]) -> impl Iterator<Item = Body> {
    let count = bytes.len().div_ceil(BLOB_PART_BYTES).max(1) as u32;
    (0..count).map(move |index| {
        let start = index as usize * BLOB_PART_BYTES;
        let data = bytes[start..bytes.len().min(start + BLOB_PART_BYTES)].to_vec();
        let digest = digest.as_bytes().to_vec().into();
        Body::BlobPart(pb::BlobPart {
            digest,
            index,
            count,
            data: data.into(),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blobs_are_cut_to_frames_and_come_together_again() {
        for len in [0, 1, BLOB_PART_BYTES, BLOB_PART_BYTES + 1, 3 * BLOB_PART_BYTES] {
            let blob: Vec<u8> = (0..len).map(|i| i as u8).collect();
            let digest = Digest::sha256(&blob);
            let mut whole = Vec::new();
            let frames: Vec<_> = blob_frames(digest, &blob).collect();
            for (i, frame) in frames.iter().enumerate() {
                let Body::BlobPart(part) = frame else {
                    panic!("{frame:?}")
                };
                assert_eq!((part.index as usize, part.count as usize), (i, frames.len()));
                assert!(part.data.len() < MAX_SESSION_FRAME_BYTES - 1024);
                whole.extend_from_slice(&part.data);
            }
            assert_eq!(Digest::sha256(&whole), digest, "{len}");
        }
    }
}
