//! Blocks over TCP: `sendfile` on the sender, one read straight into the block's buffer on the receiver.
//!
//! `sendfile` may wait for the disk, so that it runs on a blocking thread, which it holds only while the socket
//! takes bytes; the swarm bounds how many blocks are being sent at once, and with it these threads.

use super::{
    BlockGate, BlockSource, ConnectError, Connection, Frame, FrameReceiver, FrameSender, NO_PROGRESS_TIMEOUT,
    PeerAddress, Room, Sent, Transport, block_time,
    buffer::BufferPool,
    frame::{HEADER_BYTES, Header, Kind, MAX_CONTROL_BYTES},
    rdma::Fabric,
};
use futures_util::future::BoxFuture;
use mooncake_proto::hello::{self, FEATURE_RDMA, HelloConfig, HelloError, PeerInfo, Purpose};
use prost::bytes::{BufMut, Bytes};
use rustix::{io::Errno, net::SendFlags};
use std::{
    io,
    net::{SocketAddr, ToSocketAddrs},
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt, Interest},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::Semaphore,
    time::{Instant, timeout},
};

/// Longest wait for a TCP connection inside a cluster.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Names looked up at once: each takes a thread, for as long as a name server may hang.
pub const MAX_LOOKUPS: usize = 8;

/// Dials over TCP.
#[derive(Clone, Debug)]
pub struct Tcp {
    hello: Arc<HelloConfig>,
    lookups: Arc<Semaphore>,
    rdma: Option<Arc<Fabric>>,
}

impl Tcp {
    /// Says `hello` on every connection.
    pub fn new(hello: Arc<HelloConfig>) -> Self {
        Self::with_rdma(hello, None)
    }

    /// Like [`Tcp::new`]; blocks go by RDMA where the other end can, too. `hello` shows the feature then.
    pub fn with_rdma(hello: Arc<HelloConfig>, rdma: Option<Arc<Fabric>>) -> Self {
        debug_assert_eq!(rdma.is_some(), hello.features & FEATURE_RDMA != 0);
        Self {
            hello,
            lookups: Arc::new(Semaphore::new(MAX_LOOKUPS)),
            rdma,
        }
    }

    async fn stream(&self, address: &str) -> io::Result<TcpStream> {
        if let Ok(literal) = address.parse::<SocketAddr>() {
            return TcpStream::connect(literal).await;
        }
        let turn = self
            .lookups
            .clone()
            .acquire_owned()
            .await
            .map_err(io::Error::other)?;
        let name = address.to_owned();
        // Not tokio's: a look-up that hangs keeps its turn, though nobody waits for it any more.
        let found = tokio::task::spawn_blocking(move || {
            let found = name.to_socket_addrs().map(Vec::from_iter);
            drop(turn);
            found
        });
        let found = found.await.map_err(io::Error::other)??;
        TcpStream::connect(found.as_slice()).await
    }

    async fn dial(&self, peer: &PeerAddress, buffers: Arc<BufferPool>) -> Result<Connection, ConnectError> {
        let (node_id, address) = (&peer.node_id, &peer.data_address);
        let failed = |source| ConnectError::Dial {
            node_id: node_id.clone(),
            address: address.clone(),
            source,
        };
        let mut stream = timeout(CONNECT_TIMEOUT, self.stream(address))
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
        let (read, write) = stream.into_split();
        match &self.rdma {
            Some(rdma) if info.features & FEATURE_RDMA != 0 => {
                rdma.dialled((read, write), info, buffers).await.map_err(failed)
            }
            _ => Ok(connection((read, write), info, buffers)),
        }
    }
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        super::TCP
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
    rdma: Option<&Arc<Fabric>>,
) -> Result<Connection, HelloError> {
    stream.set_nodelay(true)?;
    let info = hello::accept(&mut stream, config, &[Purpose::Data]).await?;
    let halves = stream.into_split();
    match rdma {
        Some(rdma) if info.features & FEATURE_RDMA != 0 => Ok(rdma.accepted(halves, info, buffers).await?),
        _ => Ok(connection(halves, info, buffers)),
    }
}

/// A connection whose blocks go over it.
pub(super) fn connection(
    (read, write): (OwnedReadHalf, OwnedWriteHalf),
    peer: PeerInfo,
    buffers: Arc<BufferPool>,
) -> Connection {
    Connection {
        peer,
        transport: super::TCP,
        better_from: None,
        sender: Box::new(TcpSender {
            half: Some(write),
            block_time,
        }),
        receiver: Box::new(TcpReceiver {
            half: read,
            buffers,
            block_time,
        }),
    }
}

struct TcpSender {
    /// Out while a blocking thread sends, and for good after an error.
    half: Option<OwnedWriteHalf>,
    /// [`block_time`].
    block_time: fn(u32) -> Duration,
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
        write_frame(half, &header, &message).await
    }

    async fn block(&mut self, id: u64, source: Box<dyn BlockSource>) -> io::Result<Sent> {
        let half = self.half.take().ok_or(io::ErrorKind::NotConnected)?;
        let mut upload = Upload {
            half,
            id,
            source,
            open: None,
        };
        let started = Instant::now();
        loop {
            let pushed = tokio::task::spawn_blocking(move || {
                let result = upload.push();
                (upload, result)
            });
            let result;
            (upload, result) = pushed.await.map_err(io::Error::other)?;
            match result? {
                Pushed::Full => {
                    let len = upload.open.as_ref().map_or(0, |o| o.len);
                    let most = (self.block_time)(len);
                    if started.elapsed() >= most {
                        return Err(too_slow("took", len, most));
                    }
                    progress(upload.half.writable()).await?;
                }
                Pushed::Done(sent) => {
                    self.half = Some(upload.half);
                    return Ok(sent);
                }
            }
        }
    }
}

impl FrameSender for TcpSender {
    fn send_control(&mut self, message: Bytes) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(self.control(message))
    }
    fn send_block(
        &mut self,
        id: u64,
        block: Box<dyn BlockSource>,
        _room: Room,
    ) -> BoxFuture<'_, io::Result<Sent>> {
        Box::pin(self.block(id, block))
    }
}

/// A block on its way out. What waits for the disk runs on a blocking thread ([`Upload::push`]), what waits
/// for the receiver does not hold one.
struct Upload {
    half: OwnedWriteHalf,
    id: u64,
    source: Box<dyn BlockSource>,
    open: Option<Open>,
}

struct Open {
    file: Arc<std::fs::File>,
    header: [u8; HEADER_BYTES],
    header_sent: usize,
    len: u32,
    at: u64,
    end: u64,
}

enum Pushed {
    /// The socket takes no more for now.
    Full,
    Done(Sent),
}

impl Upload {
    /// Sends what the socket takes: the header, then the block from the page cache without a copy through
    /// this process. Blocking.
    fn push(&mut self) -> io::Result<Pushed> {
        if self.open.is_none() {
            let (file, offset, len) = match self.source.open() {
                Ok(opened) => opened,
                Err(e) => return Ok(Pushed::Done(Sent::Unreadable(e))),
            };
            let header = Header {
                kind: Kind::Block,
                len,
                id: self.id,
            }
            .encode();
            self.open = Some(Open {
                file,
                header,
                header_sent: 0,
                len,
                at: offset,
                end: offset + u64::from(len),
            });
        }
        let open = self.open.as_mut().expect("just set");
        let socket: &TcpStream = self.half.as_ref();
        let full = loop {
            let rest = &open.header[open.header_sent..];
            let step = if rest.is_empty() {
                let left = (open.end - open.at) as usize;
                if left == 0 {
                    break false;
                }
                let sent = attempt(socket, || {
                    rustix::fs::sendfile(socket, &open.file, Some(&mut open.at), left)
                })?;
                if sent == Some(0) {
                    let what = "the file became shorter while a block of it was sent";
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
                }
                sent
            } else {
                // MORE: header and first bytes of the block share a segment.
                let flags = SendFlags::MORE | SendFlags::NOSIGNAL;
                let sent = attempt(socket, || rustix::net::send(socket, rest, flags))?;
                open.header_sent += sent.unwrap_or(0);
                sent
            };
            if step.is_none() {
                break true;
            }
        };
        Ok(if full {
            Pushed::Full
        } else {
            Pushed::Done(Sent::Done)
        })
    }
}

/// Calls until not interrupted; `None` if it would block.
fn attempt<T>(socket: &TcpStream, mut call: impl FnMut() -> Result<T, Errno>) -> io::Result<Option<T>> {
    loop {
        match socket.try_io(Interest::WRITABLE, || call().map_err(io::Error::from)) {
            Ok(done) => return Ok(Some(done)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// A header and what follows it, in one write if the socket takes it.
pub(super) async fn write_frame(half: &mut OwnedWriteHalf, header: &Header, body: &[u8]) -> io::Result<()> {
    let mut frame = Vec::with_capacity(HEADER_BYTES + body.len());
    frame.extend_from_slice(&header.encode());
    frame.extend_from_slice(body);
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

pub(super) fn stalled() -> io::Error {
    let s = NO_PROGRESS_TIMEOUT.as_secs();
    io::Error::new(
        io::ErrorKind::TimedOut,
        format!("the connection made no progress for {s} s"),
    )
}

pub(super) fn too_slow(did: &str, len: u32, most: Duration) -> io::Error {
    io::Error::new(
        io::ErrorKind::TimedOut,
        format!(
            "the peer {did} less than a block of {len} bytes in {} s",
            most.as_secs()
        ),
    )
}

pub(super) async fn progress<T>(step: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(NO_PROGRESS_TIMEOUT, step)
        .await
        .unwrap_or_else(|_| Err(stalled()))
}

struct TcpReceiver {
    half: OwnedReadHalf,
    buffers: Arc<BufferPool>,
    /// [`block_time`].
    block_time: fn(u32) -> Duration,
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
                // Until there is room the connection rests, and with it its sender.
                let mut buffer = self.buffers.take(header.len as usize).await;
                let most = (self.block_time)(header.len);
                // Not for ever, byte by byte: others wait for the buffer.
                timeout(
                    most,
                    read_exactly(&mut self.half, buffer.own(), header.len as usize),
                )
                .await
                .unwrap_or_else(|_| Err(too_slow("sent", header.len, most)))?;
                Ok(Frame::Block {
                    id: header.id,
                    bytes: buffer,
                })
            }
            kind @ (Kind::SetUp | Kind::Granted | Kind::Done) => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the peer sent a {kind:?} frame on a connection whose blocks go over TCP"),
            )),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::buffer::MIN_RECEIVED;
    use std::io::Write;

    fn hello(node: &str) -> HelloConfig {
        HelloConfig {
            cluster_id: "test".into(),
            secret: None,
            node_id: node.into(),
            instance_id: format!("disk of {node}"),
            software: "test".into(),
            features: 0,
        }
    }

    async fn pair() -> (Connection, Connection) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let peer = PeerAddress {
            node_id: "b:1".into(),
            data_address: listener.local_addr().unwrap().to_string(),
            transports: vec![],
            labels: Default::default(),
            seed: false,
        };
        let tcp = Tcp::new(Arc::new(hello("a:1")));
        let accepting = async {
            let (stream, _) = listener.accept().await.unwrap();
            accept(stream, &hello("b:1"), Arc::default(), None).await.unwrap()
        };
        let (dialled, accepted) = tokio::join!(tcp.connect(&peer, Arc::default()), accepting);
        (dialled.unwrap(), accepted)
    }

    struct Part(Arc<std::fs::File>, u64, u32);

    impl BlockSource for Part {
        fn open(&self) -> io::Result<(Arc<std::fs::File>, u64, u32)> {
            Ok((self.0.clone(), self.1, self.2))
        }
    }

    struct Missing;

    impl BlockSource for Missing {
        fn open(&self) -> io::Result<(Arc<std::fs::File>, u64, u32)> {
            Err(io::ErrorKind::NotFound.into())
        }
    }

    struct Due(u64, u32);

    impl BlockGate for Due {
        fn due(&self, id: u64) -> Option<u32> {
            (id == self.0).then_some(self.1)
        }
    }

    fn file(bytes: &[u8]) -> Arc<std::fs::File> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        Arc::new(file)
    }

    #[tokio::test]
    async fn the_largest_block_between_two_control_messages() {
        const LEN: usize = 4 << 20;
        let bytes: Vec<u8> = (0..LEN + 100).map(|i| (i * 31 / 7) as u8).collect();
        let source = file(&bytes);
        let (a, b) = pair().await;
        let (mut sender, mut receiver) = (a.sender, b.receiver);
        let sending = async {
            sender.send_control(Bytes::from_static(b"before")).await.unwrap();
            let missing = sender
                .send_block(1, Box::new(Missing), Room::default())
                .await
                .unwrap();
            assert!(
                matches!(missing, Sent::Unreadable(_)),
                "nothing went out, the connection is fine"
            );
            // Larger than the socket's buffers, so that it goes in pieces.
            let sent = sender
                .send_block(7, Box::new(Part(source, 50, LEN as u32)), Room::default())
                .await
                .unwrap();
            assert!(matches!(sent, Sent::Done));
            sender.send_control(Bytes::from_static(b"after")).await.unwrap();
        };
        let receiving = async {
            let gate = Due(7, LEN as u32);
            assert!(matches!(receiver.receive(&gate).await.unwrap(), Frame::Control(c) if c == "before"));
            let Frame::Block { id: 7, bytes: got } = receiver.receive(&gate).await.unwrap() else {
                panic!("no block")
            };
            assert!(*got == bytes[50..50 + LEN]);
            assert!(matches!(receiver.receive(&gate).await.unwrap(), Frame::Control(c) if c == "after"));
        };
        tokio::join!(sending, receiving);
    }

    #[tokio::test]
    async fn a_block_that_nobody_asked_for_ends_the_connection() {
        let (a, b) = pair().await;
        let (mut sender, mut receiver) = (a.sender, b.receiver);
        let source = file(&[1; 100]);
        sender
            .send_block(7, Box::new(Part(source, 0, 100)), Room::default())
            .await
            .unwrap();
        let e = receiver.receive(&Due(8, 100)).await.expect_err("another request");
        assert_eq!(e.kind(), io::ErrorKind::InvalidData);
        let (a, b) = pair().await;
        let (mut sender, mut receiver) = (a.sender, b.receiver);
        sender
            .send_block(7, Box::new(Part(file(&[1; 100]), 0, 100)), Room::default())
            .await
            .unwrap();
        let e = receiver.receive(&Due(7, 99)).await.expect_err("another length");
        assert_eq!(e.kind(), io::ErrorKind::InvalidData);
    }

    #[tokio::test]
    async fn a_receiver_that_takes_a_block_too_slowly_loses_its_slot() {
        const LEN: u32 = 16 << 20;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap());
        let (dialled, accepted) = tokio::join!(dialled, listener.accept());
        let (mut slow, stream) = (dialled.unwrap(), accepted.unwrap().0);
        // No slower than at once; a real block has 15 s more.
        let mut sender = TcpSender {
            half: Some(stream.into_split().1),
            block_time: |_| Duration::ZERO,
        };
        let source = file(&vec![1; LEN as usize]);
        let trickle = async {
            // It makes progress all the time.
            let mut few = [0; 4096];
            while slow.read(&mut few).await.is_ok_and(|n| n > 0) {
                tokio::task::yield_now().await;
            }
        };
        let sending = async {
            let sent = sender
                .send_block(1, Box::new(Part(source, 0, LEN)), Room::default())
                .await;
            assert_eq!(sent.expect_err("too slow").kind(), io::ErrorKind::TimedOut);
            drop(sender);
        };
        tokio::join!(sending, trickle);
        assert_eq!(block_time(4 << 20), Duration::from_secs(19));
    }

    #[tokio::test]
    async fn a_sender_of_a_block_that_is_too_slow_gives_back_its_turn() {
        const LEN: u32 = 1 << 20;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap());
        let (dialled, accepted) = tokio::join!(dialled, listener.accept());
        let (mut slow, stream) = (dialled.unwrap(), accepted.unwrap().0);
        let buffers = Arc::new(BufferPool::default());
        let mut receiver = TcpReceiver {
            half: stream.into_split().0,
            buffers: buffers.clone(),
            // A real block has 15 s more.
            block_time: |_| Duration::from_millis(50),
        };
        let trickle = async {
            let header = Header {
                kind: Kind::Block,
                len: LEN,
                id: 7,
            };
            slow.write_all(&header.encode()).await.unwrap();
            // It makes progress all the time.
            while slow.write_all(&[1]).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let receiving = async {
            let e = receiver.receive(&Due(7, LEN)).await.expect_err("too slow");
            assert_eq!(e.kind(), io::ErrorKind::TimedOut, "{e}");
            drop(receiver);
            let all = (0..MIN_RECEIVED).map(|_| buffers.take(1));
            futures_util::future::join_all(all).await
        };
        tokio::join!(receiving, trickle);
    }

    #[tokio::test]
    async fn a_block_waits_for_its_turn_and_then_comes_whole() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap());
        let (dialled, accepted) = tokio::join!(dialled, listener.accept());
        let buffers = Arc::new(BufferPool::default());
        let mut receiver = TcpReceiver {
            half: accepted.unwrap().0.into_split().0,
            buffers: buffers.clone(),
            block_time,
        };
        let mut sender = TcpSender {
            half: Some(dialled.unwrap().into_split().1),
            block_time,
        };
        let bytes = vec![9; 1 << 20];
        let others = futures_util::future::join_all((0..MIN_RECEIVED).map(|_| buffers.take(1))).await;
        let block = Box::new(Part(file(&bytes), 0, bytes.len() as u32));
        let sending = async { sender.send_block(7, block, Room::default()).await.unwrap() };
        let receiving = async {
            let gate = Due(7, bytes.len() as u32);
            let mut receive = receiver.receive(&gate);
            assert!(
                timeout(Duration::from_millis(20), &mut receive).await.is_err(),
                "no turn is free"
            );
            drop(others);
            receive.await.unwrap()
        };
        let (sent, got) = tokio::join!(sending, receiving);
        assert!(matches!(sent, Sent::Done));
        assert!(matches!(got, Frame::Block { id: 7, bytes: got } if *got == *bytes));
    }

    #[tokio::test]
    async fn literals_need_no_look_up() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let tcp = Tcp::new(Arc::new(hello("a:1")));
        // Every look-up hangs.
        let _all = tcp
            .lookups
            .clone()
            .acquire_many_owned(MAX_LOOKUPS as u32)
            .await
            .unwrap();
        tcp.stream(&address.to_string()).await.unwrap();
        let named = format!("localhost:{}", address.port());
        let waits = timeout(Duration::from_millis(20), tcp.stream(&named)).await;
        assert!(waits.is_err(), "it takes its turn");
        drop(_all);
        tcp.stream(&named).await.unwrap();
    }

    #[tokio::test]
    async fn a_file_that_became_shorter_ends_the_connection() {
        let (a, _b) = pair().await;
        let mut sender = a.sender;
        let source = file(&[1; 100]);
        assert!(
            sender
                .send_block(7, Box::new(Part(source, 50, 100)), Room::default())
                .await
                .is_err()
        );
        let e = sender
            .send_control(Bytes::from_static(b"x"))
            .await
            .expect_err("half a frame is out");
        assert_eq!(e.kind(), io::ErrorKind::NotConnected);
    }
}
