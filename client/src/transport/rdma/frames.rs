//! Frames of a connection whose blocks go by RDMA: what goes over it is small. Unlike a plain connection's, the reading may
//! be given up and taken up at any point, for it waits together with the network card; and both halves write.

use crate::transport::{
    frame::{HEADER_BYTES, Header, Kind},
    tcp::write_frame,
};
use prost::bytes::{BufMut, Bytes};
use std::{
    io,
    time::{Duration, Instant},
};
use tokio::{
    io::AsyncReadExt,
    net::tcp::{OwnedReadHalf, OwnedWriteHalf},
    sync::Mutex,
};

/// Reads frames.
#[derive(Debug)]
pub(super) struct Frames {
    half: OwnedReadHalf,
    header: [u8; HEADER_BYTES],
    filled: usize,
    /// Once the header is whole.
    parsed: Option<Header>,
    body: Vec<u8>,
    last_byte: Instant,
}

impl Frames {
    pub(super) fn new(half: OwnedReadHalf) -> Self {
        Self {
            half,
            header: [0; HEADER_BYTES],
            filled: 0,
            parsed: None,
            body: Vec::new(),
            last_byte: Instant::now(),
        }
    }

    /// The half, between two frames.
    pub(super) fn into_half(self) -> OwnedReadHalf {
        assert!(
            self.filled == 0 && self.parsed.is_none(),
            "half a frame would be lost"
        );
        self.half
    }

    /// How long nothing has come, as long as somebody waited for it.
    pub(super) fn silent_for(&self) -> Duration {
        self.last_byte.elapsed()
    }

    /// Somebody waits from now on.
    pub(super) fn listen(&mut self) {
        self.last_byte = Instant::now();
    }

    /// The next frame that is not a block. Cancel safe.
    pub(super) async fn next(&mut self) -> io::Result<(Header, Bytes)> {
        loop {
            let got = match self.parsed {
                None => self.half.read(&mut self.header[self.filled..]).await?,
                Some(header) => {
                    let rest = header.len as usize - self.body.len();
                    if rest == 0 {
                        self.parsed = None;
                        return Ok((header, std::mem::take(&mut self.body).into()));
                    }
                    self.half.read_buf(&mut (&mut self.body).limit(rest)).await?
                }
            };
            if got == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.last_byte = Instant::now();
            if self.parsed.is_none() {
                self.filled += got;
                if self.filled == HEADER_BYTES {
                    self.filled = 0;
                    let header = Header::decode(&self.header)?;
                    if header.kind == Kind::Block {
                        let what = "the peer sent a block over a connection whose blocks go by RDMA";
                        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
                    }
                    self.body = Vec::with_capacity(header.len as usize);
                    self.parsed = Some(header);
                }
            }
        }
    }
}

/// Writes frames, each as a whole, for both halves of a connection.
#[derive(Debug)]
pub(super) struct Writer(Mutex<OwnedWriteHalf>);

impl Writer {
    pub(super) fn new(half: OwnedWriteHalf) -> Self {
        Self(Mutex::new(half))
    }

    pub(super) fn into_half(self) -> OwnedWriteHalf {
        self.0.into_inner()
    }

    /// Not cancel safe: who gives up half-way has to close the connection.
    pub(super) async fn write(&self, kind: Kind, id: u64, body: &[u8]) -> io::Result<()> {
        let header = Header {
            kind,
            len: u32::try_from(body.len()).map_err(io::Error::other)?,
            id,
        };
        write_frame(&mut *self.0.lock().await, &header, body).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::{TcpListener, TcpStream};

    async fn pair() -> (Frames, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (a, b) = tokio::join!(
            TcpStream::connect(listener.local_addr().unwrap()),
            listener.accept()
        );
        (Frames::new(b.unwrap().0.into_split().0), a.unwrap())
    }

    #[tokio::test]
    async fn a_reading_that_is_given_up_loses_nothing() {
        let (mut frames, mut peer) = pair().await;
        let mut bytes = Vec::new();
        for (kind, id, body) in [
            (Kind::Control, 0, &b"hello"[..]),
            (Kind::Done, 7, b""),
            (Kind::Granted, 8, b"0123456789"),
        ] {
            let len = body.len() as u32;
            bytes.extend_from_slice(&Header { kind, len, id }.encode());
            bytes.extend_from_slice(body);
        }
        let mut got = Vec::new();
        for byte in bytes {
            peer.write_all(&[byte]).await.unwrap();
            // Given up after every byte.
            let wait = Duration::from_millis(2);
            if let Ok(frame) = tokio::time::timeout(wait, frames.next()).await {
                let (header, body) = frame.unwrap();
                got.push((header.kind, header.id, body));
            }
        }
        // What a busy machine did not bring in time.
        while got.len() < 3 {
            let (header, body) = frames.next().await.unwrap();
            got.push((header.kind, header.id, body));
        }
        let expected = [
            (Kind::Control, 0, Bytes::from_static(b"hello")),
            (Kind::Done, 7, Bytes::new()),
            (Kind::Granted, 8, Bytes::from_static(b"0123456789")),
        ];
        assert_eq!(got, expected);
        frames.into_half();
    }

    #[tokio::test]
    async fn a_block_is_refused_before_it_is_read() {
        let (mut frames, mut peer) = pair().await;
        let header = Header {
            kind: Kind::Block,
            len: 4 << 20,
            id: 1,
        };
        peer.write_all(&header.encode()).await.unwrap();
        let error = frames.next().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[tokio::test]
    async fn both_halves_write_whole_frames() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (a, b) = tokio::join!(
            TcpStream::connect(listener.local_addr().unwrap()),
            listener.accept()
        );
        let writer = Writer::new(a.unwrap().into_split().1);
        let mut frames = Frames::new(b.unwrap().0.into_split().0);
        let body = vec![3; 100_000];
        let writing = async {
            tokio::join!(
                async { writer.write(Kind::Control, 0, &body).await.unwrap() },
                async { writer.write(Kind::Done, 9, &[]).await.unwrap() },
            )
        };
        let reading = async {
            let first = frames.next().await.unwrap();
            let second = frames.next().await.unwrap();
            [first.0.kind, second.0.kind]
        };
        let (_, mut kinds) = tokio::join!(writing, reading);
        kinds.sort_by_key(|k| *k as u8);
        assert_eq!(kinds, [Kind::Control, Kind::Done]);
        assert!(frames.silent_for() < Duration::from_secs(5));
    }
}
