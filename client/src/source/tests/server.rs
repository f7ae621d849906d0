//! A web server on loopback that does exactly what a test says, however wrong, and counts what it sent.

use parking_lot::Mutex;
use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader},
    net::TcpListener,
    sync::Notify,
};

/// A request as it came.
#[derive(Clone, Debug)]
pub(super) struct Request {
    /// Counts from 0 over all connections.
    pub(super) number: usize,
    pub(super) path: String,
    /// Names in lower case.
    pub(super) headers: HashMap<String, String>,
}

impl Request {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// First and last byte of `Range: bytes=a-b`.
    pub(super) fn range(&self) -> Option<(usize, usize)> {
        let (a, b) = self.header("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some((a.parse().unwrap(), b.parse().unwrap()))
    }
}

/// A step of an answer.
#[derive(Clone)]
pub(super) enum Piece {
    Bytes(Vec<u8>),
    /// Waits for the test.
    Wait(Arc<Notify>),
    /// Sends nothing more, and keeps the connection.
    Stall,
    /// Sends a byte every 20 ms, for ever.
    Trickle,
    /// Sends bytes for ever.
    Endless,
    /// Closes the connection.
    Cut,
}

/// An answer: a head as it goes over the wire, then pieces.
pub(super) struct Reply {
    head: String,
    pieces: Vec<Piece>,
}

impl Reply {
    /// `head` is the status and the headers, one a line.
    pub(super) fn new(head: &str, pieces: Vec<Piece>) -> Self {
        let head = head.lines().map(str::trim).collect::<Vec<_>>().join("\r\n");
        Self {
            head: format!("HTTP/1.1 {head}\r\n\r\n"),
            pieces,
        }
    }

    /// A complete answer with a correct length.
    pub(super) fn sized(head: &str, body: &[u8]) -> Self {
        Self::new(
            &format!("{head}\nContent-Length: {}", body.len()),
            vec![Piece::Bytes(body.to_vec())],
        )
    }
}

/// What a good server answers: the range, under the condition, of this version.
pub(super) fn good(data: &[u8], etag: &str, request: &Request) -> Reply {
    if request.header("if-match").is_some_and(|tag| tag != etag) {
        return Reply::sized("412 Precondition Failed", b"other version");
    }
    match request.range() {
        Some((a, b)) => {
            let head = format!(
                "206 Partial Content\nETag: {etag}\nContent-Range: bytes {a}-{b}/{}",
                data.len()
            );
            Reply::sized(&head, &data[a..=b])
        }
        None => Reply::sized(&format!("200 OK\nETag: {etag}"), data),
    }
}

type Handler = dyn Fn(&Request) -> Reply + Send + Sync;

pub(super) struct Server {
    pub(super) address: SocketAddr,
    log: Arc<Mutex<Vec<Request>>>,
    served: Arc<AtomicU64>,
    accept: tokio::task::JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

impl Server {
    pub(super) async fn start(handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_with(None, handler).await
    }

    /// With a certificate: speaks TLS.
    pub(super) async fn start_with(
        tls: Option<tokio_rustls::TlsAcceptor>,
        handler: impl Fn(&Request) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (log, served) = (Arc::<Mutex<Vec<_>>>::default(), Arc::<AtomicU64>::default());
        let handler: Arc<Handler> = Arc::new(handler);
        let (l, s) = (log.clone(), served.clone());
        let accept = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (tls, handler, l, s) = (tls.clone(), handler.clone(), l.clone(), s.clone());
                connections.spawn(async move {
                    match tls {
                        None => connection(stream, handler, l, s).await,
                        // A client that does not trust the certificate ends the handshake.
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                connection(stream, handler, l, s).await;
                            }
                        }
                    }
                });
            }
        });
        Self {
            address,
            log,
            served,
            accept,
        }
    }

    /// A server that does everything right.
    pub(super) async fn good(data: Vec<u8>) -> Self {
        Self::start(move |request| good(&data, "\"v1\"", request)).await
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}/{path}", self.address)
    }

    pub(super) fn requests(&self) -> Vec<Request> {
        self.log.lock().clone()
    }

    /// Bytes of bodies that were sent.
    pub(super) fn served(&self) -> u64 {
        self.served.load(Ordering::SeqCst)
    }
}

async fn connection<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    handler: Arc<Handler>,
    log: Arc<Mutex<Vec<Request>>>,
    served: Arc<AtomicU64>,
) {
    let mut stream = BufReader::new(stream);
    while let Some(request) = read_request(&mut stream, &log).await {
        let reply = handler(&request);
        if stream.write_all(reply.head.as_bytes()).await.is_err() {
            return;
        }
        for piece in reply.pieces {
            let sent = match piece {
                Piece::Bytes(bytes) => {
                    served.fetch_add(bytes.len() as u64, Ordering::SeqCst);
                    stream.write_all(&bytes).await
                }
                Piece::Wait(notify) => {
                    notify.notified().await;
                    Ok(())
                }
                Piece::Stall => std::future::pending().await,
                Piece::Trickle => loop {
                    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                    if let Err(e) = stream.write_all(b"x").await {
                        break Err(e);
                    }
                },
                Piece::Endless => loop {
                    if let Err(e) = stream.write_all(&[b'x'; 64 << 10]).await {
                        break Err(e);
                    }
                },
                Piece::Cut => return,
            };
            if sent.is_err() {
                return;
            }
        }
        // TLS keeps the last record back otherwise.
        if stream.flush().await.is_err() {
            return;
        }
    }
}

async fn read_request<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut BufReader<S>,
    log: &Mutex<Vec<Request>>,
) -> Option<Request> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).await.ok()? == 0 {
            return None;
        }
        match line.trim_end() {
            "" => break,
            text => lines.push(text.to_owned()),
        }
    }
    let path = lines.first()?.split(' ').nth(1)?.to_owned();
    let headers = lines[1..]
        .iter()
        .filter_map(|l| l.split_once(": "))
        .map(|(k, v)| (k.to_ascii_lowercase(), v.to_owned()))
        .collect();
    let mut log = log.lock();
    let request = Request {
        number: log.len(),
        path,
        headers,
    };
    log.push(request.clone());
    Some(request)
}
