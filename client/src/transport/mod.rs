//! How bytes get from node to node: connections that carry control messages and blocks.
//!
//! A [`Transport`] makes a [`Connection`] to a peer; the swarm neither knows nor cares which one. Frames keep
//! their order. A connection is two halves that work at the same time: the [`FrameSender`] is fed by one task,
//! the [`FrameReceiver`] is drained by another; that is what pipelining needs.
//!
//! TCP ([`tcp`]) is the transport that always works. Where both ends can, a TCP connection becomes one whose blocks go by
//! RDMA ([`rdma`]), and stays what it was for everything else: `send_block` says where in registered memory the block is,
//! `receive` reads from there straight into the buffer and says when it is done.
//!
//! Guaranteed: the other end passed the hello (purpose `Data`) and is the node that was asked for; frames
//! are bounded before anything is allocated for them; a half that makes no progress for
//! [`NO_PROGRESS_TIMEOUT`] fails, and so does one that sends a block more slowly than [`block_time`]. Not guaranteed: that bytes arrive undamaged (receivers check digests), and
//! secrecy (TLS will go below).

pub mod buffer;
pub mod frame;
pub mod rdma;
pub mod tcp;

use buffer::{BlockBuffer, BufferPool};
use futures_util::future::BoxFuture;
use mooncake_proto::hello::{HelloError, PeerInfo};
use prost::bytes::Bytes;
use std::{collections::BTreeMap, fs::File, io, sync::Arc, time::Duration};

/// Longest time without a single byte in a direction in which bytes are due. Pings go every
/// [`PING_INTERVAL`], so that three of them may get lost in a stall before a connection is given up.
pub const NO_PROGRESS_TIMEOUT: Duration = Duration::from_secs(15);
/// How often the dialling end pings: twice within the 10 s after which common middleboxes and the design's
/// failure detection get nervous.
pub const PING_INTERVAL: Duration = Duration::from_secs(4);

/// Slowest sending of a block that is borne: a receiver that takes less holds an upload slot which others need.
pub const LEAST_BYTES_PER_S: u64 = 1 << 20;

/// Longest time for a block of `len` bytes to go out: a stall, and the rest at the least rate.
pub fn block_time(len: u32) -> Duration {
    NO_PROGRESS_TIMEOUT + Duration::from_secs_f64(f64::from(len) / LEAST_BYTES_PER_S as f64)
}

pub use mooncake_proto::transport::{RDMA, TCP};

/// Where a peer is and what it is to us, as the master's order says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerAddress {
    /// The id that its hello must show.
    pub node_id: String,
    /// `host:port` of its data port.
    pub data_address: String,
    /// What it can speak; `tcp` is always tried last.
    pub transports: Vec<String>,
    /// `rack`, `zone` and the like.
    pub labels: BTreeMap<String, String>,
    /// Whether it is the seed, whose digests count before those of others.
    pub seed: bool,
}

impl From<mooncake_proto::pb::session::Peer> for PeerAddress {
    fn from(p: mooncake_proto::pb::session::Peer) -> Self {
        Self {
            node_id: p.node_id,
            data_address: p.data_address,
            transports: p.transports,
            labels: p.labels.into_iter().collect(),
            seed: p.seed,
        }
    }
}

/// Why there is no connection to a peer.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nobody answers there.
    #[error("cannot connect to {node_id} at {address}: {source}")]
    Dial {
        /// The peer.
        node_id: String,
        /// Where it should be.
        address: String,
        /// As the system said it.
        source: io::Error,
    },
    /// The hello failed.
    #[error("{node_id} at {address}: {source}")]
    Hello {
        /// The peer.
        node_id: String,
        /// Where it is.
        address: String,
        /// As the hello said it.
        source: HelloError,
    },
    /// Somebody else is there: the address is stale, or it is our own.
    #[error("{address} should be {node_id} but says that it is {found}: the address is out of date")]
    WrongNode {
        /// The peer.
        node_id: String,
        /// Where it should be.
        address: String,
        /// Who is there.
        found: String,
    },
    /// The node's own bound.
    #[error("this node has {limit} data connections open already")]
    TooMany {
        /// The bound.
        limit: usize,
    },
}

/// A block as the sending side knows it. Opened on the thread that sends it, for it may wait for the disk.
pub trait BlockSource: Send {
    /// File, offset and length of the block; an error if it is not held (any more).
    fn open(&self) -> io::Result<(Arc<File>, u64, u32)>;
}

/// What became of [`FrameSender::send_block`].
#[derive(Debug)]
pub enum Sent {
    /// All of it went out.
    Done,
    /// The block could not be opened; nothing went out and the connection is fine.
    Unreadable(io::Error),
    /// What was set aside is too small for it; nothing went out and the connection is fine.
    NoRoom,
}

/// What a transport has set aside for one block, until it is used or dropped. TCP needs nothing.
#[derive(Default)]
pub struct Room(Option<rdma::GrantRoom>);

impl std::fmt::Debug for Room {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Room").field(&self.0.is_some()).finish()
    }
}

/// The sending half of a connection. After an error the connection is of no use any more.
pub trait FrameSender: Send {
    /// Sends one encoded `PeerMessage`.
    fn send_control(&mut self, message: Bytes) -> BoxFuture<'_, io::Result<()>>;
    /// Waits until a block of `len` bytes can be sent without waiting for the peer. Apart from the sending, so that control
    /// messages can go out meanwhile: what the peer waits for may be among them.
    fn room(&self, _len: u32) -> BoxFuture<'static, io::Result<Room>> {
        Box::pin(std::future::ready(Ok(Room::default())))
    }
    /// Sends one block as the answer to request `id`. Where blocks go by RDMA it is the peer's turn to fetch it then.
    fn send_block(
        &mut self,
        id: u64,
        block: Box<dyn BlockSource>,
        room: Room,
    ) -> BoxFuture<'_, io::Result<Sent>>;
}

/// One received frame.
#[derive(Debug)]
pub enum Frame {
    /// An encoded `PeerMessage`.
    Control(Bytes),
    /// A block's bytes.
    Block {
        /// The request that it answers.
        id: u64,
        /// The bytes.
        bytes: BlockBuffer,
    },
}

/// Decides whether a block frame is welcome before memory is spent on it.
pub trait BlockGate: Send + Sync {
    /// The exact length due for request `id`; `None` if nothing is due under this id.
    fn due(&self, id: u64) -> Option<u32>;
}

/// A gate that lets no block in: for the side that serves.
#[derive(Debug)]
pub struct NoBlocks;

impl BlockGate for NoBlocks {
    fn due(&self, _id: u64) -> Option<u32> {
        None
    }
}

/// The receiving half of a connection. After an error the connection is of no use any more.
pub trait FrameReceiver: Send {
    /// The next frame. Not cancel safe: a future that is dropped half-way leaves half a frame behind.
    fn receive<'a>(&'a mut self, gate: &'a dyn BlockGate) -> BoxFuture<'a, io::Result<Frame>>;
}

/// An open connection whose hello was accepted.
pub struct Connection {
    /// Who is at the other end.
    pub peer: PeerInfo,
    /// Which transport carries its blocks: [`TCP`] or [`RDMA`].
    pub transport: &'static str,
    /// If it is not the best one that both ends have: when that one may be tried again, by a new connection.
    pub better_from: Option<std::time::Instant>,
    /// The sending half.
    pub sender: Box<dyn FrameSender>,
    /// The receiving half.
    pub receiver: Box<dyn FrameReceiver>,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection")
            .field("peer", &self.peer)
            .field("transport", &self.transport)
            .finish()
    }
}

/// Makes connections of one kind.
pub trait Transport: Send + Sync {
    /// Its name in [`PeerAddress::transports`].
    fn name(&self) -> &'static str;
    /// Dials `peer` and says hello.
    fn connect<'a>(
        &'a self,
        peer: &'a PeerAddress,
        buffers: Arc<BufferPool>,
    ) -> BoxFuture<'a, Result<Connection, ConnectError>>;
}
