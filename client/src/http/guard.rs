//! Bounds on the connections of the HTTP port: how many there are, and how long one may make no progress.

use axum::serve::Listener;
use std::{
    io::{self, IoSlice},
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep},
};

/// Most connections; more wait in the kernel's queue. Probes, scrapers and a few that read objects.
const MAX_CONNECTIONS: usize = 256;
/// Longest time in which a client takes no byte of what is due to it.
const WRITE_PATIENCE: Duration = Duration::from_secs(30);
/// Longest time in which nothing goes either way: between two requests, or within a request's head.
const IDLE_PATIENCE: Duration = Duration::from_secs(60);

/// A listener whose connections are bounded.
pub(super) struct Guarded {
    listener: TcpListener,
    open: Arc<Semaphore>,
    write: Duration,
    idle: Duration,
}

impl Guarded {
    pub(super) fn new(listener: TcpListener) -> Self {
        Self::with(listener, MAX_CONNECTIONS, WRITE_PATIENCE, IDLE_PATIENCE)
    }

    fn with(listener: TcpListener, connections: usize, write: Duration, idle: Duration) -> Self {
        Self {
            listener,
            open: Arc::new(Semaphore::new(connections)),
            write,
            idle,
        }
    }
}

impl Listener for Guarded {
    type Io = Guest;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Guest, SocketAddr) {
        let slot = self.open.clone().acquire_owned().await.expect("never closed");
        // It logs and tries again where accepting fails.
        let (stream, from) = Listener::accept(&mut self.listener).await;
        let guest = Guest {
            stream,
            write: Patience::new(self.write),
            idle: Patience::new(self.idle),
            _slot: slot,
        };
        (guest, from)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// Runs while something is waited for.
struct Patience {
    time: Duration,
    running: bool,
    sleep: Pin<Box<Sleep>>,
}

impl Patience {
    fn new(time: Duration) -> Self {
        Self {
            time,
            running: false,
            sleep: Box::pin(tokio::time::sleep(time)),
        }
    }

    fn within<T>(&mut self, cx: &mut Context<'_>, step: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if step.is_ready() {
            self.running = false;
            return step;
        }
        if !self.running {
            self.sleep.as_mut().reset(Instant::now() + self.time);
            self.running = true;
        }
        ready!(self.sleep.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

/// One connection.
pub(super) struct Guest {
    stream: TcpStream,
    write: Patience,
    idle: Patience,
    _slot: OwnedSemaphorePermit,
}

impl Guest {
    fn written(&mut self, cx: &mut Context<'_>, step: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if step.is_ready() {
            // An answer on its way: the client need not send anything meanwhile.
            self.idle.running = false;
        }
        self.write.within(cx, step)
    }
}

impl AsyncRead for Guest {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let step = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.idle.within(cx, step)
    }
}

impl AsyncWrite for Guest {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let step = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.written(cx, step)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let step = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.written(cx, step)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::{Router, body::Body, routing::get};
    use bytes::Bytes;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        sync::mpsc,
    };

    const SHORT: Duration = Duration::from_millis(50);
    /// Only ever reached by a test that fails.
    const LONG: Duration = Duration::from_secs(60);

    /// Serves an endless answer; tells when one is let go.
    async fn start(connections: usize, write: Duration, idle: Duration) -> (SocketAddr, mpsc::Receiver<()>) {
        let (held, ended) = mpsc::channel(1);
        let endless = move || {
            let held = held.clone();
            async move {
                struct Held(mpsc::Sender<()>);
                impl Drop for Held {
                    fn drop(&mut self) {
                        let _ = self.0.try_send(());
                    }
                }
                let piece = Bytes::from(vec![0; 1 << 20]);
                let pieces = futures_util::stream::unfold(Held(held), move |held| {
                    let piece = piece.clone();
                    async move { Some((Ok::<_, io::Error>(piece), held)) }
                });
                Body::from_stream(pieces)
            }
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new()
            .route("/endless", get(endless))
            .route("/", get(async || "ok"));
        let guarded = Guarded::with(listener, connections, write, idle);
        tokio::spawn(async move { axum::serve(guarded, router).await });
        (address, ended)
    }

    #[tokio::test]
    async fn a_client_that_stops_reading_loses_what_it_held() {
        let (address, mut ended) = start(4, SHORT, LONG).await;
        let mut client = TcpStream::connect(address).await.unwrap();
        client
            .write_all(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
            .await
            .unwrap();
        assert_eq!(tokio::time::timeout(LONG, ended.recv()).await, Ok(Some(())));
        drop(client);
    }

    #[tokio::test]
    async fn silent_clients_are_bounded_and_make_way() {
        let (address, _ended) = start(1, LONG, SHORT).await;
        let mut silent = TcpStream::connect(address).await.unwrap();
        silent.write_all(b"GET / HT").await.unwrap();
        let mut second = TcpStream::connect(address).await.unwrap();
        second
            .write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            .await
            .unwrap();
        let mut answer = String::new();
        let answered = async {
            second.read_to_string(&mut answer).await.unwrap();
            let mut rest = Vec::new();
            // Closed, by an answer or without one.
            let _ = silent.read_to_end(&mut rest).await;
        };
        tokio::time::timeout(LONG, answered).await.unwrap();
        assert!(answer.ends_with("ok"), "{answer}");
    }
}
