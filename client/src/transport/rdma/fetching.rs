//! The halves of a connection by which this node fetches.
//!
//! What the peer grants waits for memory, is read, and is given back at once; several blocks are under way at a time, in
//! the order in which they were granted.

use super::{
    super::{
        BlockGate, BlockSource, Frame, FrameReceiver, FrameSender, NO_PROGRESS_TIMEOUT, Room, Sent,
        block_time,
        buffer::{BlockBuffer, BufferPool, Turn},
        frame::Kind,
        tcp::stalled,
    },
    Fabric,
    frames::{Frames, Writer},
};
use futures_util::future::BoxFuture;
use mooncake_proto::pb::peer as pb;
use mooncake_rdma::{Lease, Reader, Remote, Room as SlabRoom};
use prost::{Message, bytes::Bytes};
use std::{
    collections::VecDeque,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

/// A connection that is closed while reads are under way and none has ended for so long was closed because of that: others
/// have noticed that nothing comes (a firewall, say, that lets TCP through and not RoCE's packets) before the card gave up.
const SUSPECT_AFTER: Duration = Duration::from_secs(3);
/// How often it is looked whether the peer has fallen silent.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The half that asks: control messages only.
pub(super) struct Asking {
    writer: Arc<Writer>,
}

impl Asking {
    pub(super) fn new(writer: Arc<Writer>) -> Self {
        Self { writer }
    }
}

impl FrameSender for Asking {
    fn send_control(&mut self, message: Bytes) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(async move { self.writer.write(Kind::Control, 0, &message).await })
    }

    fn send_block(
        &mut self,
        _id: u64,
        _block: Box<dyn BlockSource>,
        _room: Room,
    ) -> BoxFuture<'_, io::Result<Sent>> {
        let what = "the end that fetches sends no blocks";
        Box::pin(std::future::ready(Err(io::Error::new(
            io::ErrorKind::Unsupported,
            what,
        ))))
    }
}

#[derive(Clone, Copy, Debug)]
struct Granted {
    id: u64,
    len: u32,
    at: Remote,
}

type Memory = io::Result<(Turn, Lease)>;

/// The half that fetches.
pub(super) struct Fetching {
    fabric: Arc<Fabric>,
    node_id: String,
    frames: Frames,
    writer: Arc<Writer>,
    reader: Reader,
    buffers: Arc<BufferPool>,
    /// Granted and not begun; the peer grants no more than the depth.
    granted: VecDeque<Granted>,
    depth: usize,
    /// Memory for the first of `granted`.
    memory: Option<BoxFuture<'static, Memory>>,
    /// Under way, in order, and since when.
    reading: VecDeque<(Granted, Turn, Instant)>,
    since: Instant,
    /// When a read ended last.
    arrived: Instant,
    /// RDMA failed, which is noted already.
    broken: bool,
}

impl Fetching {
    pub(super) fn new(
        fabric: Arc<Fabric>,
        node_id: String,
        (frames, writer): (Frames, Arc<Writer>),
        (reader, depth): (Reader, u32),
        buffers: Arc<BufferPool>,
    ) -> Self {
        Self {
            fabric,
            node_id,
            frames,
            writer,
            reader,
            buffers,
            granted: VecDeque::new(),
            depth: depth as usize,
            memory: None,
            reading: VecDeque::new(),
            since: Instant::now(),
            arrived: Instant::now(),
            broken: false,
        }
    }

    async fn frame(&mut self, gate: &dyn BlockGate) -> io::Result<Frame> {
        self.frames.listen();
        let mut look = tokio::time::interval(LOOK_INTERVAL);
        loop {
            if self.memory.is_none()
                && self.reader.has_room()
                && let Some(next) = self.granted.front()
            {
                self.memory = Some(self.memory_for(next.len));
            }
            let Self {
                reader,
                frames,
                memory,
                ..
            } = self;
            tokio::select! {
                biased;
                // Also while nothing is under way: it ends when the device is taken away.
                read = reader.next() => {
                    let slab = read.map_err(|e| self.broken(e.into()))?;
                    return self.arrived(slab).await;
                }
                got = async { memory.as_mut().expect("guarded").await }, if memory.is_some() => {
                    self.memory = None;
                    let got = got.map_err(|e| self.broken(e))?;
                    self.begin(got)?;
                }
                frame = frames.next() => {
                    let (header, body) = frame?;
                    match header.kind {
                        Kind::Control => return Ok(Frame::Control(body)),
                        Kind::Granted => self.granted(header.id, &body, gate)?,
                        other => return Err(invalid(format!("sent a {other:?} frame to the end that fetches"))),
                    }
                }
                _ = look.tick() => {
                    if self.frames.silent_for() >= NO_PROGRESS_TIMEOUT {
                        return Err(stalled());
                    }
                }
            }
        }
    }

    fn granted(&mut self, id: u64, body: &[u8], gate: &dyn BlockGate) -> io::Result<()> {
        let grant = pb::RdmaGrant::decode(body)
            .map_err(|e| invalid(format!("sent a grant that cannot be read: {e}")))?;
        let due = gate.due(id);
        if due != Some(grant.length) {
            return Err(invalid(format!(
                "granted {} bytes for request {id}, due were {due:?}",
                grant.length
            )));
        }
        if self.granted.len() + self.reading.len() >= self.depth {
            return Err(invalid(format!(
                "granted more than {} blocks at once",
                self.depth
            )));
        }
        self.granted.push_back(Granted {
            id,
            len: grant.length,
            at: Remote {
                address: grant.address,
                key: grant.key,
            },
        });
        Ok(())
    }

    /// A turn and a slab. Until there is room the peer's grants wait, and with them the peer.
    fn memory_for(&self, len: u32) -> BoxFuture<'static, Memory> {
        let (buffers, fabric, device) = (
            self.buffers.clone(),
            self.fabric.clone(),
            self.reader.device().clone(),
        );
        Box::pin(async move {
            let turn = buffers.turn().await;
            let room = fabric.rdma.receiving().room(len as usize).await;
            let lease = match room.take_idle(&device) {
                Ok(lease) => lease,
                Err(room) => fabric
                    .blocking(move || SlabRoom::take(room, &device))
                    .await?
                    .map_err(io::Error::other)?,
            };
            Ok((turn, lease))
        })
    }

    fn begin(&mut self, (turn, slab): (Turn, Lease)) -> io::Result<()> {
        let next = self.granted.pop_front().expect("memory is for the first one");
        let begun = self.reader.begin(slab, next.len, next.at, block_time(next.len));
        begun.map_err(|e| self.broken(e.into()))?;
        self.reading.push_back((next, turn, Instant::now()));
        Ok(())
    }

    async fn arrived(&mut self, slab: Lease) -> io::Result<Frame> {
        let (block, turn, _) = self
            .reading
            .pop_front()
            .expect("one for each read that is under way");
        self.arrived = Instant::now();
        // Before anybody looks at the bytes: the peer waits for its memory.
        self.writer.write(Kind::Done, block.id, &[]).await?;
        Ok(Frame::Block {
            id: block.id,
            bytes: BlockBuffer::registered(slab, block.len as usize, turn),
        })
    }

    /// RDMA is what failed: it rests with this peer.
    fn broken(&mut self, error: io::Error) -> io::Error {
        self.broken = true;
        self.fabric
            .failed(&self.node_id, &error.to_string(), self.since.elapsed(), true);
        error
    }
}

impl Drop for Fetching {
    fn drop(&mut self) {
        let Some((.., began)) = self.reading.front() else {
            return;
        };
        let silent = began.max(&self.arrived).elapsed();
        if !self.broken && silent >= SUSPECT_AFTER {
            let ms = silent.as_millis();
            let why = format!("no read had ended for {ms} ms when the connection was closed");
            self.fabric
                .failed(&self.node_id, &why, self.since.elapsed(), true);
        }
    }
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the peer {what}"))
}

impl FrameReceiver for Fetching {
    fn receive<'a>(&'a mut self, gate: &'a dyn BlockGate) -> BoxFuture<'a, io::Result<Frame>> {
        Box::pin(self.frame(gate))
    }
}
