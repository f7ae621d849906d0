//! Blocks over TCP: `sendfile` on the sender, one read straight into the block's buffer on the receiver.
//!
//! `sendfile` may wait for the disk, so that it runs on a blocking thread; the swarm bounds how many blocks
//! are being sent at once, and with it these threads.

use super::{
    BlockGate, BlockSource, ConnectError, Connection, Frame, FrameReceiver, FrameSender, NO_PROGRESS_TIMEOUT,
    PeerAddress, Sent, Transport,
    buffer::BufferPool,
    frame::{HEADER_BYTES, Header, Kind, MAX_CONTROL_BYTES},
};
use futures_util::future::BoxFuture;
use mooncake_proto::hello::{self, HelloConfig, HelloError, PeerInfo, Purpose};
use prost::bytes::{BufMut, Bytes};
use rustix::{io::Errno, net::SendFlags};
use std::{io, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt, Interest},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    runtime::Handle,
    time::timeout,
};

/// Longest wait for a TCP connection inside a cluster.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Dials over TCP.
#[derive(Clone, Debug)]
pub struct Tcp {
    hello: Arc<HelloConfig>,
}

impl Tcp {
    /// Says `hello` on every connection.
    pub fn new(hello: Arc<HelloConfig>) -> Self {
        Self { hello }
    }

    async fn dial(&self, peer: &PeerAddress, buffers: Arc<BufferPool>) -> Result<Connection, ConnectError> {
        let (node_id, address) = (&peer.node_id, &peer.data_address);
        let failed = |source| ConnectError::Dial {
            node_id: node_id.clone(),
            address: address.clone(),
            source,
        };
        let mut stream = timeout(CONNECT_TIMEOUT, TcpStream::connect(address.as_str()))
            .await
            .map_err(|_| failed(io::ErrorKind::TimedOut.into()))?
            .map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        let info = hello::connect(&mut stream, &self.hello, Purpose::Data)
            .await
            .map_err(|source| ConnectError::Hello {
                node_id: node_id.clone(),
                address: address.clone(),
                source,
            })?;
        if info.node_id != *node_id || info.instance_id == self.hello.instance_id {
            let found = info.node_id;
            return Err(ConnectError::WrongNode {
                node_id: node_id.clone(),
                address: address.clone(),
                found,
            });
        }
        Ok(connection(stream, info, buffers))
    }
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }
    fn connect<'a>(
        &'a self,
        peer: &'a PeerAddress,
        buffers: Arc<BufferPool>,
    ) -> BoxFuture<'a, Result<Connection, ConnectError>> {
        Box::pin(self.dial(peer, buffers))
    }
}

/// The accepting side: demands the hello of a data connection.
pub async fn accept(
    mut stream: TcpStream,
    config: &HelloConfig,
    buffers: Arc<BufferPool>,
) -> Result<Connection, HelloError> {
    stream.set_nodelay(true)?;
    let info = hello::accept(&mut stream, config, &[Purpose::Data]).await?;
    Ok(connection(stream, info, buffers))
}

fn connection(stream: TcpStream, peer: PeerInfo, buffers: Arc<BufferPool>) -> Connection {
    let (read, write) = stream.into_split();
    Connection {
        peer,
        transport: "tcp",
        sender: Box::new(TcpSender { half: Some(write) }),
        receiver: Box::new(TcpReceiver { half: read, buffers }),
    }
}

struct TcpSender {
    /// Out while a blocking thread sends, and for good after an error.
    half: Option<OwnedWriteHalf>,
}

impl TcpSender {
    async fn control(&mut self, message: Bytes) -> io::Result<()> {
        assert!(
            message.len() <= MAX_CONTROL_BYTES as usize,
            "control message of {} bytes",
            message.len()
        );
        let half = self.half.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        let header = Header {
            kind: Kind::Control,
            len: message.len() as u32,
            id: 0,
        };
        let mut frame = Vec::with_capacity(HEADER_BYTES + message.len());
        frame.extend_from_slice(&header.encode());
        frame.extend_from_slice(&message);
        let mut rest = frame.as_slice();
        while !rest.is_empty() {
            let written = progress(half.write(rest)).await?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            rest = &rest[written..];
        }
        Ok(())
    }

    async fn block(&mut self, id: u64, block: Box<dyn BlockSource>) -> io::Result<Sent> {
        let half = self.half.take().ok_or(io::ErrorKind::NotConnected)?;
        let sent = tokio::task::spawn_blocking(move || {
            let result = match block.open() {
                Ok((file, offset, len)) => {
                    send_file(half.as_ref(), id, &file, offset, len).map(|()| Sent::Done)
                }
                Err(e) => Ok(Sent::Unreadable(e)),
            };
            (half, result)
        });
        let (half, result) = sent.await.map_err(io::Error::other)?;
        if result.is_ok() {
            self.half = Some(half);
        }
        result
    }
}

impl FrameSender for TcpSender {
    fn send_control(&mut self, message: Bytes) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(self.control(message))
    }
    fn send_block(&mut self, id: u64, block: Box<dyn BlockSource>) -> BoxFuture<'_, io::Result<Sent>> {
        Box::pin(self.block(id, block))
    }
}

/// Header and block, from the page cache to the socket without a copy through this process. Blocking.
fn send_file(socket: &TcpStream, id: u64, file: &std::fs::File, offset: u64, len: u32) -> io::Result<()> {
    let header = Header {
        kind: Kind::Block,
        len,
        id,
    }
    .encode();
    let mut rest = &header[..];
    while !rest.is_empty() {
        // MORE: header and first bytes of the block share a segment.
        let n = when_writable(socket, || {
            rustix::net::send(socket, rest, SendFlags::MORE | SendFlags::NOSIGNAL)
        })?;
        rest = &rest[n..];
    }
    let mut at = offset;
    let end = offset + u64::from(len);
    while at < end {
        let rest = (end - at) as usize;
        let sent = when_writable(socket, || rustix::fs::sendfile(socket, file, Some(&mut at), rest))?;
        if sent == 0 {
            let what = "the file became shorter while a block of it was sent";
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
        }
    }
    Ok(())
}

/// Repeats `call` until it neither is interrupted nor would block. Blocking; the runtime's reactor does the
/// waiting. A socket that takes nothing for [`NO_PROGRESS_TIMEOUT`] fails.
fn when_writable<T>(socket: &TcpStream, mut call: impl FnMut() -> Result<T, Errno>) -> io::Result<T> {
    loop {
        match socket.try_io(Interest::WRITABLE, || call().map_err(io::Error::from)) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                Handle::current().block_on(progress(socket.writable()))?;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

fn stalled() -> io::Error {
    let s = NO_PROGRESS_TIMEOUT.as_secs();
    io::Error::new(
        io::ErrorKind::TimedOut,
        format!("the connection made no progress for {s} s"),
    )
}

async fn progress<T>(step: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(NO_PROGRESS_TIMEOUT, step)
        .await
        .unwrap_or_else(|_| Err(stalled()))
}

struct TcpReceiver {
    half: OwnedReadHalf,
    buffers: Arc<BufferPool>,
}

impl TcpReceiver {
    async fn frame(&mut self, gate: &dyn BlockGate) -> io::Result<Frame> {
        let mut header = [0; HEADER_BYTES];
        let mut filled = 0;
        while filled < HEADER_BYTES {
            match progress(self.half.read(&mut header[filled..])).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => filled += n,
            }
        }
        let header = Header::decode(&header)?;
        match header.kind {
            Kind::Control => {
                let mut bytes = Vec::with_capacity(header.len as usize);
                read_exactly(&mut self.half, &mut bytes, header.len as usize).await?;
                Ok(Frame::Control(bytes.into()))
            }
            Kind::Block => {
                let due = gate.due(header.id);
                if due != Some(header.len) {
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        format!(
                            "the peer sent {} bytes for request {}, due were {due:?}",
                            header.len, header.id
                        ),
                    ));
                }
                let mut buffer = self.buffers.take(header.len as usize);
                read_exactly(&mut self.half, &mut buffer.bytes, header.len as usize).await?;
                Ok(Frame::Block {
                    id: header.id,
                    bytes: buffer,
                })
            }
        }
    }
}

impl FrameReceiver for TcpReceiver {
    fn receive<'a>(&'a mut self, gate: &'a dyn BlockGate) -> BoxFuture<'a, io::Result<Frame>> {
        Box::pin(self.frame(gate))
    }
}

/// Fills `into`, which is empty, with exactly `len` bytes, without writing zeros there first.
async fn read_exactly(half: &mut (impl AsyncRead + Unpin), into: &mut Vec<u8>, len: usize) -> io::Result<()> {
    debug_assert!(into.is_empty());
    while into.len() < len {
        let rest = len - into.len();
        if progress(half.read_buf(&mut (&mut *into).limit(rest))).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}
