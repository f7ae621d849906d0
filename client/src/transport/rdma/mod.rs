//! Blocks by RDMA: the one who serves says where in its registered memory a block is, the one who fetches reads it from
//! there (`peer.proto` has the messages, the crate `mooncake-rdma` the verbs).
//!
//! A connection begins as one over TCP, with the same hello: only who passed it learns of a queue pair or a key. Both ends
//! then say whether they can; if not, blocks go over the connection itself, so that a failed set-up costs one exchange.
//! After a failure RDMA rests with that peer, longer each time ([`rests`]), and connections in the meantime are plain ones.
//!
//! Guaranteed: a device that is missing, fails or is taken away costs a connection at most, never more: the next one goes
//! over TCP. Registered memory stays within its bound, and one connection gets at most a quarter of what is served from. Not
//! guaranteed: that a peer which answers pings reads what it asked for; after [`block_time`] its connection is closed.

mod fetching;
mod frames;
pub mod rests;
mod serving;

pub(super) use serving::GrantRoom;

use super::{Connection, RDMA, buffer::BufferPool, frame::Kind, tcp};
use fetching::Fetching;
use frames::{Frames, Writer};
use mooncake_proto::{hello::PeerInfo, pb::peer as pb};
use mooncake_rdma::{Endpoint, Gid, GidKind, Mtu, Offer, Rdma, SetUpError};
use parking_lot::Mutex;
use prost::Message;
use rests::Rests;
use serving::{Credits, Serving};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    net::tcp::{OwnedReadHalf, OwnedWriteHalf},
    sync::Semaphore,
    time::timeout,
};

/// Longest wait for the peer's set up: it makes its end of the connection meanwhile, a few calls of its card's driver.
const SET_UP_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for a call of a card's driver, and for its turn. One that hangs must not keep a connection from being a plain
/// one.
const KERNEL_TIMEOUT: Duration = Duration::from_secs(4);
/// Calls that may block in the kernel at once, for set-ups and for memory to read into: each takes a thread. (Memory to serve
/// from is registered by the threads that fill it, which the upload slots bound.)
pub const MAX_KERNEL_CALLS: usize = 8;
/// Longest reason of a peer that is shown.
const MAX_SHOWN_CHARS: usize = 256;

type Halves = (OwnedReadHalf, OwnedWriteHalf);

/// This node's RDMA, as its data connections use it.
#[derive(Debug)]
pub struct Fabric {
    rdma: Arc<Rdma>,
    /// Peers that this node fetches from. Short sections.
    rests: Mutex<Rests>,
    /// Peers that this node serves, where the fault was this node's. Short sections.
    own_rests: Mutex<Rests>,
    kernel: Arc<Semaphore>,
    fallbacks: AtomicU64,
}

impl Fabric {
    /// For all connections of a node.
    pub fn new(rdma: Arc<Rdma>) -> Arc<Self> {
        Arc::new(Self {
            rdma,
            rests: Mutex::default(),
            own_rests: Mutex::default(),
            kernel: Arc::new(Semaphore::new(MAX_KERNEL_CALLS)),
            fallbacks: AtomicU64::new(0),
        })
    }

    /// The devices and pools.
    pub fn rdma(&self) -> &Arc<Rdma> {
        &self.rdma
    }

    /// Whether a device can be used now.
    pub fn is_usable(&self) -> bool {
        self.rdma.report().is_usable()
    }

    /// How often RDMA failed, in set-up or in use, so that TCP was used instead.
    pub fn fallbacks(&self) -> u64 {
        self.fallbacks.load(Ordering::Relaxed)
    }

    /// Runs what may block in the kernel, in turn; an error is of that, or of [`KERNEL_TIMEOUT`]. What comes after that is
    /// dropped.
    async fn blocking<T: Send + 'static>(&self, call: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        let kernel = self.kernel.clone();
        let done = async {
            let turn = kernel.acquire_owned().await.map_err(io::Error::other)?;
            let called = tokio::task::spawn_blocking(move || {
                let result = call();
                drop(turn);
                result
            });
            called.await.map_err(io::Error::other)
        };
        timeout(KERNEL_TIMEOUT, done).await.unwrap_or_else(|_| {
            let s = KERNEL_TIMEOUT.as_secs();
            let what = format!("the device's driver did not answer within {s} s");
            Err(io::Error::new(io::ErrorKind::TimedOut, what))
        })
    }

    /// RDMA with this peer failed on the way in (`fetching`) or out. Until when it rests.
    fn failed(&self, node_id: &str, why: &str, lasted: Duration, fetching: bool) -> Instant {
        let now = Instant::now();
        let rests = if fetching { &self.rests } else { &self.own_rests };
        let until = rests.lock().failed(node_id, why, lasted, now);
        self.fallbacks.fetch_add(1, Ordering::Relaxed);
        let rest_s = (until - now).as_secs();
        tracing::warn!(node = %node_id, %why, rest_s, "RDMA failed; blocks go over TCP for now");
        until
    }

    /// An end to be offered to the peer; or until when not, and why.
    async fn offer(&self, node_id: &str) -> Result<Offer, (Instant, String)> {
        let now = Instant::now();
        if let Some((until, why)) = self.rests.lock().resting(node_id, now) {
            return Err((until, format!("it failed before: {why}")));
        }
        let rdma = self.rdma.clone();
        let why = match self.blocking(move || rdma.offer()).await {
            Ok(Ok(offer)) => return Ok(offer),
            // Others have nothing to do with it, and it may be over soon.
            Ok(Err(error @ SetUpError::Nothing(_))) => return Err((now + rests::FIRST, error.to_string())),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        Err((self.failed(node_id, &why, Duration::ZERO, true), why))
    }

    /// Goes on with a connection that this node dialled, to fetch by it.
    pub(super) async fn dialled(
        self: &Arc<Self>,
        (read, write): Halves,
        peer: PeerInfo,
        buffers: Arc<BufferPool>,
    ) -> io::Result<Connection> {
        let (mut frames, writer) = (Frames::new(read), Writer::new(write));
        let (offer, refusal) = match self.offer(&peer.node_id).await {
            Ok(offer) => (Some(offer), None),
            Err(refusal) => (None, Some(refusal)),
        };
        let said = pb::RdmaSetUp {
            endpoint: offer.as_ref().map(|o| to_wire(&o.endpoint())),
            why_not: refusal.as_ref().map(|(_, why)| shown(why)).unwrap_or_default(),
            depth: offer.as_ref().map_or(0, Offer::depth),
        };
        writer.write(Kind::SetUp, 0, &said.encode_to_vec()).await?;
        let Some(offer) = offer else {
            let (until, why) = refusal.unwrap_or((Instant::now(), String::new()));
            return Ok(plain(frames, writer, peer, buffers, until, &why));
        };
        // Whatever comes between: the next connection is to be a plain one.
        let answer = set_up(&mut frames).await.inspect_err(|error| {
            self.failed(&peer.node_id, &error.to_string(), Duration::ZERO, true);
        })?;
        let Some(endpoint) = &answer.endpoint else {
            let why = format!("the peer says: {}", shown(&answer.why_not));
            // Not a failure; but neither is it to be asked again and again.
            let until = self
                .rests
                .lock()
                .failed(&peer.node_id, &why, Duration::ZERO, Instant::now());
            return Ok(plain(frames, writer, peer, buffers, until, &why));
        };
        let connected = match from_wire(endpoint) {
            Ok(endpoint) => {
                let depth = offer.depth();
                let way = offer.describe();
                match self.blocking(move || offer.connect(&endpoint)).await {
                    Ok(Ok(reader)) => Ok((reader, depth, way)),
                    Ok(Err(error)) => Err(error.to_string()),
                    Err(error) => Err(error.to_string()),
                }
            }
            Err(why) => Err(format!("the peer offers {why}")),
        };
        let (reader, depth, way) = connected.map_err(|why| {
            // The other end believes in it: this connection cannot become a plain one any more.
            self.failed(&peer.node_id, &why, Duration::ZERO, true);
            io::Error::other(format!("cannot set up RDMA: {why}"))
        })?;
        tracing::info!(node = %peer.node_id, by = %way, "fetching by RDMA");
        let writer = Arc::new(writer);
        Ok(Connection {
            transport: RDMA,
            better_from: None,
            sender: Box::new(fetching::Asking::new(writer.clone())),
            receiver: Box::new(Fetching::new(
                self.clone(),
                peer.node_id.clone(),
                (frames, writer),
                (reader, depth),
                buffers,
            )),
            peer,
        })
    }

    /// Goes on with a connection that a peer dialled, to serve it.
    pub(super) async fn accepted(
        self: &Arc<Self>,
        (read, write): Halves,
        peer: PeerInfo,
        buffers: Arc<BufferPool>,
    ) -> io::Result<Connection> {
        let (mut frames, writer) = (Frames::new(read), Writer::new(write));
        let offered = set_up(&mut frames).await?;
        let Some(endpoint) = &offered.endpoint else {
            let why = format!("the peer says: {}", shown(&offered.why_not));
            return Ok(plain(frames, writer, peer, buffers, Instant::now(), &why));
        };
        let answered = self.answer(&peer.node_id, endpoint).await;
        let depth = match offered.depth {
            0 => 1,
            depth => depth.min(self.rdma.config().depth),
        };
        let said = pb::RdmaSetUp {
            endpoint: answered.as_ref().ok().map(|(_, own)| to_wire(own)),
            why_not: answered.as_ref().err().map(|why| shown(why)).unwrap_or_default(),
            depth,
        };
        writer.write(Kind::SetUp, 0, &said.encode_to_vec()).await?;
        let server = match answered {
            Ok((server, _)) => Arc::new(server),
            Err(why) => return Ok(plain(frames, writer, peer, buffers, Instant::now(), &why)),
        };
        tracing::info!(node = %peer.node_id, by = %server.describe(), "serving by RDMA");
        let credits = Credits::new(&self.rdma, depth);
        let serving = Serving::new(self.clone(), peer.node_id.clone(), server, credits);
        let (sender, receiver) = serving.halves(frames, Arc::new(writer));
        Ok(Connection {
            transport: RDMA,
            better_from: None,
            sender: Box::new(sender),
            receiver: Box::new(receiver),
            peer,
        })
    }

    /// The end that answers a peer's, or why there is none.
    async fn answer(
        &self,
        node_id: &str,
        offered: &pb::RdmaEndpoint,
    ) -> Result<(mooncake_rdma::Server, Endpoint), String> {
        if let Some((_, why)) = self.own_rests.lock().resting(node_id, Instant::now()) {
            return Err(format!("it failed before: {why}"));
        }
        let offered = from_wire(offered).map_err(|why| format!("the offer has {why}"))?;
        let rdma = self.rdma.clone();
        let why = match self.blocking(move || rdma.answer(&offered)).await {
            Ok(Ok(answered)) => return Ok(answered),
            Ok(Err(error @ SetUpError::Nothing(_))) => return Err(error.to_string()),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        self.failed(node_id, &why, Duration::ZERO, false);
        Err(why)
    }
}

/// The connection as it is, for blocks too.
fn plain(
    frames: Frames,
    writer: Writer,
    peer: PeerInfo,
    buffers: Arc<BufferPool>,
    better_from: Instant,
    why: &str,
) -> Connection {
    tracing::info!(node = %peer.node_id, %why, "blocks go over TCP");
    let mut connection = tcp::connection((frames.into_half(), writer.into_half()), peer, buffers);
    connection.better_from = Some(better_from);
    connection
}

async fn set_up(frames: &mut Frames) -> io::Result<pb::RdmaSetUp> {
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let (header, body) = timeout(SET_UP_TIMEOUT, frames.next()).await.map_err(|_| {
        io::Error::new(
            io::ErrorKind::TimedOut,
            "the peer does not say how blocks are to go",
        )
    })??;
    if header.kind != Kind::SetUp {
        return Err(invalid(format!(
            "the peer sent a {:?} frame before it said how blocks are to go",
            header.kind
        )));
    }
    pb::RdmaSetUp::decode(body).map_err(|e| invalid(format!("the peer's set up cannot be read: {e}")))
}

/// A peer's text, of bounded length and without control characters.
fn shown(text: &str) -> String {
    let clean = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    clean.take(MAX_SHOWN_CHARS).collect()
}

fn to_wire(e: &Endpoint) -> pb::RdmaEndpoint {
    pb::RdmaEndpoint {
        queue_pair: e.queue_pair,
        first_packet: e.first_packet,
        gid: e.gid.raw.to_vec().into(),
        gid_kind: e.gid.kind.number(),
        lid: e.lid.into(),
        mtu: e.mtu.number(),
        reads: e.reads.into(),
    }
}

/// Checked; the text says what is wrong.
fn from_wire(e: &pb::RdmaEndpoint) -> Result<Endpoint, String> {
    let endpoint = Endpoint {
        queue_pair: e.queue_pair,
        first_packet: e.first_packet,
        gid: Gid {
            // Where it is in the peer's table is the peer's matter.
            index: 0,
            kind: GidKind::from_number(e.gid_kind).ok_or_else(|| format!("a GID of kind {}", e.gid_kind))?,
            raw: e
                .gid
                .as_ref()
                .try_into()
                .map_err(|_| format!("a GID of {} bytes", e.gid.len()))?,
        },
        lid: e.lid.try_into().map_err(|_| format!("a LID of {}", e.lid))?,
        mtu: Mtu::from_number(e.mtu).ok_or_else(|| format!("an MTU of number {}", e.mtu))?,
        reads: u8::try_from(e.reads).unwrap_or(u8::MAX),
    };
    endpoint.check()?;
    Ok(endpoint)
}

/// On a host without devices, or with some that are called otherwise.
#[cfg(test)]
pub(crate) fn without_device() -> Arc<Fabric> {
    let config = mooncake_rdma::Config {
        devices: vec!["no such device".into()],
        port: None,
        gid_index: None,
        mtu: None,
        traffic_class: 0,
        memory_bytes: 0,
        depth: 4,
        spin: Duration::ZERO,
    };
    Fabric::new(Rdma::start(config).unwrap())
}

#[cfg(test)]
mod tests;
