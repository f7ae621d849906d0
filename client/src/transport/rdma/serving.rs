//! The halves of a connection by which this node serves: blocks are filled into registered slabs from the page cache, and
//! kept there until the peer is done.

use super::{
    super::{
        BlockGate, BlockSource, Frame, FrameReceiver, FrameSender, NO_PROGRESS_TIMEOUT, Room, Sent,
        block_time, frame::Kind, tcp::stalled,
    },
    Fabric,
    frames::{Frames, Writer},
};
use futures_util::future::BoxFuture;
use mooncake_proto::pb::peer as pb;
use mooncake_rdma::{
    Lease, Rdma, Room as SlabRoom, Server,
    pool::{MIN_SLAB_BYTES, slab_bytes},
};
use prost::{Message, bytes::Bytes};
use std::{
    io,
    os::unix::fs::FileExt,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How often it is looked whether the peer is overdue with something, or silent.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// What one peer may have granted at a time: so many blocks, and so many bytes.
#[derive(Clone, Debug)]
pub(super) struct Credits {
    blocks: Arc<Semaphore>,
    /// In units of [`MIN_SLAB_BYTES`].
    units: Arc<Semaphore>,
}

impl Credits {
    pub(super) fn new(rdma: &Rdma, depth: u32) -> Self {
        Self::of(depth, rdma.granted_bytes_per_peer())
    }

    fn of(depth: u32, bytes: usize) -> Self {
        Self {
            blocks: Arc::new(Semaphore::new(depth as usize)),
            units: Arc::new(Semaphore::new(bytes / MIN_SLAB_BYTES)),
        }
    }

    async fn take(&self, len: u32) -> Credit {
        let units = u32::try_from(slab_bytes(len as usize) / MIN_SLAB_BYTES).expect("a slab has few units");
        let block = self.blocks.clone().acquire_owned().await.expect("never closed");
        let units = self
            .units
            .clone()
            .acquire_many_owned(units)
            .await
            .expect("never closed");
        Credit {
            _block: block,
            _units: units,
        }
    }
}

/// The right to one grant, until the peer is done with it.
#[derive(Debug)]
struct Credit {
    _block: OwnedSemaphorePermit,
    _units: OwnedSemaphorePermit,
}

/// A credit of the peer's and a slab's place in the pool.
pub struct GrantRoom {
    credit: Credit,
    slab: SlabRoom,
}

/// What both halves share.
pub(super) struct Serving {
    fabric: Arc<Fabric>,
    node_id: String,
    server: Arc<Server>,
    credits: Credits,
    since: Instant,
}

impl Serving {
    pub(super) fn new(fabric: Arc<Fabric>, node_id: String, server: Arc<Server>, credits: Credits) -> Self {
        Self {
            fabric,
            node_id,
            server,
            credits,
            since: Instant::now(),
        }
    }

    pub(super) fn halves(self, frames: Frames, writer: Arc<Writer>) -> (Granting, Released) {
        let serving = Arc::new(self);
        let granting = Granting {
            serving: serving.clone(),
            writer,
        };
        (granting, Released { serving, frames })
    }

    /// RDMA is what failed, at this end.
    fn broken(&self, why: &str) -> io::Error {
        self.fabric
            .failed(&self.node_id, why, self.since.elapsed(), false);
        io::Error::new(io::ErrorKind::ConnectionAborted, why.to_owned())
    }
}

/// The half that grants.
pub(super) struct Granting {
    serving: Arc<Serving>,
    writer: Arc<Writer>,
}

enum Filled {
    Slab(Lease, u32),
    Unreadable(io::Error),
    NoRoom,
}

impl Granting {
    async fn block(&mut self, id: u64, source: Box<dyn BlockSource>, room: Room) -> io::Result<Sent> {
        let server = &self.serving.server;
        let Some(GrantRoom { credit, slab: room }) = room.0 else {
            return Ok(Sent::NoRoom);
        };
        if server.grants(id) {
            return Err(invalid(format!(
                "asked again under {id}, which it was granted already"
            )));
        }
        let device = server.device().clone();
        let filled = tokio::task::spawn_blocking(move || fill(room, &*source, &device));
        let filled = filled.await.map_err(io::Error::other)?;
        let (slab, len) = match filled.map_err(|e| self.serving.broken(&e.to_string()))? {
            Filled::Slab(slab, len) => (slab, len),
            Filled::Unreadable(error) => return Ok(Sent::Unreadable(error)),
            Filled::NoRoom => return Ok(Sent::NoRoom),
        };
        let at = server.grant(id, slab, block_time(len), Box::new(credit));
        let grant = pb::RdmaGrant {
            address: at.address,
            key: told(at.key),
            length: len,
        };
        self.writer
            .write(Kind::Granted, id, &grant.encode_to_vec())
            .await?;
        Ok(Sent::Done)
    }
}

/// From the page cache into a slab. Blocking; the upload slot is held until it is done.
fn fill(
    room: SlabRoom,
    source: &dyn BlockSource,
    device: &Arc<mooncake_rdma::device::Device>,
) -> Result<Filled, mooncake_rdma::device::DeviceError> {
    let (file, offset, len) = match source.open() {
        Ok(opened) => opened,
        Err(e) => return Ok(Filled::Unreadable(e)),
    };
    if len as usize > room.size() {
        return Ok(Filled::NoRoom);
    }
    let mut slab = room.take(device)?;
    let bytes = slab.bytes_mut(len as usize);
    if let Err(e) = file.read_exact_at(bytes, offset) {
        return Ok(Filled::Unreadable(e));
    }
    damage(bytes);
    Ok(Filled::Slab(slab, len))
}

/// The key that the peer is told; another one where a test wants to see what comes of it.
fn told(key: u32) -> u32 {
    fail::fail_point!("rdma::wrong_key", |_| key ^ 0x5a5a_5a00);
    key
}

/// Nothing, unless a test wants to see that a damaged block is noticed.
fn damage(_bytes: &mut [u8]) {
    fail::fail_point!("rdma::damage", |_| {
        if let Some(first) = _bytes.first_mut() {
            *first ^= 1;
        }
    });
}

impl FrameSender for Granting {
    fn send_control(&mut self, message: Bytes) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(async move { self.writer.write(Kind::Control, 0, &message).await })
    }

    fn room(&self, len: u32) -> BoxFuture<'static, io::Result<Room>> {
        let serving = self.serving.clone();
        Box::pin(async move {
            let credit = serving.credits.take(len).await;
            let slab = serving.fabric.rdma.serving().room(len as usize).await;
            Ok(Room(Some(GrantRoom { credit, slab })))
        })
    }

    fn send_block(
        &mut self,
        id: u64,
        block: Box<dyn BlockSource>,
        room: Room,
    ) -> BoxFuture<'_, io::Result<Sent>> {
        Box::pin(self.block(id, block, room))
    }
}

/// The half that hears what the peer is done with.
pub(super) struct Released {
    serving: Arc<Serving>,
    frames: Frames,
}

impl Released {
    async fn frame(&mut self) -> io::Result<Frame> {
        self.frames.listen();
        let server = &self.serving.server;
        let mut look = tokio::time::interval(LOOK_INTERVAL);
        loop {
            tokio::select! {
                biased;
                frame = self.frames.next() => {
                    let (header, body) = frame?;
                    match header.kind {
                        Kind::Control => return Ok(Frame::Control(body)),
                        Kind::Done => server.done(header.id).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?,
                        other => return Err(invalid(format!("sent a {other:?} frame to the end that serves"))),
                    }
                }
                () = server.device().gone().cancelled() => {
                    let device = &server.device().name().name;
                    return Err(self.serving.broken(&format!("{device} was taken away")));
                }
                _ = look.tick() => {
                    if self.frames.silent_for() >= NO_PROGRESS_TIMEOUT {
                        return Err(stalled());
                    }
                    if server.deadline().is_some_and(|deadline| deadline <= Instant::now()) {
                        return Err(self.serving.broken("the peer did not read what it was granted"));
                    }
                }
            }
        }
    }
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the peer {what}"))
}

impl FrameReceiver for Released {
    fn receive<'a>(&'a mut self, _gate: &'a dyn BlockGate) -> BoxFuture<'a, io::Result<Frame>> {
        Box::pin(self.frame())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[tokio::test]
    async fn a_peer_has_so_many_blocks_and_so_many_bytes() {
        let (small, large) = (MIN_SLAB_BYTES as u32, 4 * MIN_SLAB_BYTES as u32);
        let credits = Credits::of(3, 6 * MIN_SLAB_BYTES);
        let first = credits.take(large).await;
        let second = credits.take(1).await;
        let third = credits.take(small).await;
        assert!(credits.take(1).now_or_never().is_none(), "three blocks");
        drop(third);
        assert!(
            credits.take(large).now_or_never().is_none(),
            "one unit of six is free"
        );
        assert!(credits.take(small).now_or_never().is_some());
        drop(first);
        assert!(credits.take(large).now_or_never().is_some());
        drop(second);
        assert_eq!(
            (
                credits.blocks.available_permits(),
                credits.units.available_permits()
            ),
            (3, 6)
        );
    }
}
