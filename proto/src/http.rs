//! The accept loop of an HTTP port: HTTP/1.1, bounded connections, and none that only holds its place.
//!
//! Guaranteed: at most [`Limits::connections`] are open (more wait in the kernel's queue); a connection that has
//! not sent a whole request's head within [`Limits::head`], from its start or since its last answer, is closed, and
//! so is one that does not take what is due to it at [`LEAST_BYTES_PER_S`], pauses of [`Limits::write`] in all set aside:
//! with it goes what its request held.
//! Not guaranteed: an end of a request's body, or of an answer that its handler does not finish; handlers bound
//! these.

use hyper::{
    Request, Response,
    body::{Body, Incoming},
    server::conn::http1,
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use std::{
    convert::Infallible,
    error::Error,
    io::{self, IoSlice},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
    time::{Instant, Sleep},
};

/// Longest head that is read.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Slowest caller that is waited for, whether it sends a body or takes an answer: a megabit per second, a poor link between
/// sites. Who is slower keeps a place that others need.
pub const LEAST_BYTES_PER_S: u64 = 128 << 10;
/// After a failed accept (out of file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What a port bears.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most connections.
    pub connections: usize,
    /// Longest time for a request's head; also how long an idle connection is kept.
    pub head: Duration,
    /// How long a client may take nothing of what is due to it, at once or in several pauses: what it takes at more
    /// than the least pace makes up for them.
    pub write: Duration,
}

/// Serves on `listener` until `stop` ends; then finishes the requests under way and returns. The caller bounds how
/// long it waits for that: when this future is dropped, so are the connections.
pub async fn serve<S, B>(listener: TcpListener, service: S, limits: Limits, stop: impl Future<Output = ()>)
where
    S: tower::Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let open = Arc::new(Semaphore::new(limits.connections));
    let mut tasks = tokio::task::JoinSet::new();
    // Dropped to say that it is time to end.
    let (running, ending) = watch::channel(());
    let mut stop = pin!(stop);
    loop {
        while tasks.try_join_next().is_some() {}
        let slot = tokio::select! {
            slot = open.clone().acquire_owned() => slot.expect("never closed"),
            () = &mut stop => break,
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stop => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept an HTTP connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // Answers are small; a socket that cannot be set so is served all the same.
        let _ = stream.set_nodelay(true);
        let (service, mut ending) = (service.clone(), ending.clone());
        tasks.spawn(async move {
            let _slot = slot;
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(limits.head)
                .max_buf_size(MAX_HEAD_BYTES)
                .serve_connection(
                    TokioIo::new(Guest::new(stream, limits.write)),
                    TowerToHyperService::new(service),
                );
            let mut connection = pin!(connection);
            let served = tokio::select! {
                served = connection.as_mut() => served,
                _ = ending.changed() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = served {
                // Callers that go away are no event.
                tracing::debug!(%error, "an HTTP connection ended");
            }
        });
    }
    drop(running);
    while tasks.join_next().await.is_some() {}
}

/// How long a client is still waited for. It gets the time that what it takes needs at the least pace, and never has
/// more than `most` left: what it took quickly once does not allow it to drip for hours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Patience {
    most: Duration,
    left: Duration,
}

impl Patience {
    fn new(most: Duration) -> Self {
        Self { most, left: most }
    }

    fn waited(&mut self, time: Duration) {
        self.left = self.left.saturating_sub(time);
    }

    fn took(&mut self, bytes: usize) {
        let earned = Duration::from_secs_f64(bytes as f64 / LEAST_BYTES_PER_S as f64);
        self.left = (self.left + earned).min(self.most);
    }
}

/// One connection, which must take what is due to it.
struct Guest {
    stream: TcpStream,
    patience: Patience,
    /// Since when something is due; `timer` runs.
    waiting: Option<Instant>,
    timer: Pin<Box<Sleep>>,
}

impl Guest {
    fn new(stream: TcpStream, most: Duration) -> Self {
        Self {
            stream,
            patience: Patience::new(most),
            waiting: None,
            timer: Box::pin(tokio::time::sleep(most)),
        }
    }

    fn written(&mut self, cx: &mut Context<'_>, step: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(taken) = &step {
            if let Some(since) = self.waiting.take() {
                self.patience.waited(since.elapsed());
            }
            self.patience.took(*taken.as_ref().unwrap_or(&0));
            return step;
        }
        if self.waiting.is_none() {
            let now = Instant::now();
            self.waiting = Some(now);
            self.timer.as_mut().reset(now + self.patience.left);
        }
        ready!(self.timer.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Guest {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
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
    use hyper::body::Frame;
    use prost::bytes::Bytes;
    use std::net::SocketAddr;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        sync::{mpsc, oneshot},
        task::JoinHandle,
    };

    const SHORT: Duration = Duration::from_millis(50);
    /// Only ever reached by a test that fails.
    const LONG: Duration = Duration::from_secs(60);

    /// "ok", or bytes without end; tells when it is let go.
    struct Answer {
        rest: u64,
        gone: mpsc::UnboundedSender<()>,
    }

    impl Body for Answer {
        type Data = Bytes;
        type Error = Infallible;
        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            if self.rest == 0 {
                return Poll::Ready(None);
            }
            let len = self.rest.min(1 << 20);
            self.rest -= len;
            Poll::Ready(Some(Ok(Frame::data(vec![b'o'; len as usize].into()))))
        }
    }

    impl Drop for Answer {
        fn drop(&mut self) {
            let _ = self.gone.send(());
        }
    }

    struct Port {
        address: SocketAddr,
        gone: mpsc::UnboundedReceiver<()>,
        stop: oneshot::Sender<()>,
        ended: JoinHandle<()>,
    }

    async fn start(connections: usize, head: Duration, write: Duration) -> Port {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (gone_tx, gone) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: Request<Incoming>| {
            let rest = if request.uri().path() == "/endless" {
                u64::MAX
            } else {
                2
            };
            let gone = gone_tx.clone();
            async move { Ok::<_, Infallible>(Response::new(Answer { rest, gone })) }
        });
        let limits = Limits {
            connections,
            head,
            write,
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let ended = tokio::spawn(serve(listener, service, limits, async {
            let _ = stopped.await;
        }));
        Port {
            address,
            gone,
            stop,
            ended,
        }
    }

    async fn within<T>(what: impl Future<Output = T>) -> T {
        tokio::time::timeout(LONG, what).await.expect("in time")
    }

    /// Sends `request` and reads until the port closes the connection.
    async fn exchange(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        // Closed in order, or by force.
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8(answer).unwrap()
    }

    const LAST: &str = "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";

    #[tokio::test]
    async fn a_client_that_stops_reading_loses_what_it_held() {
        let mut port = start(4, LONG, SHORT).await;
        let mut client = TcpStream::connect(port.address).await.unwrap();
        client
            .write_all(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
            .await
            .unwrap();
        assert_eq!(within(port.gone.recv()).await, Some(()));
        drop(client);
    }

    #[test]
    fn who_takes_too_little_is_waited_for_less_and_less() {
        let most = Duration::from_secs(30);
        let second = Duration::from_secs(1);
        // Seconds until `bytes_per_s`, taken once a second, is given up; `None`: never.
        let lasts = |bytes_per_s: u64| {
            let mut patience = Patience::new(most);
            (1..100_000).find(|_| {
                patience.waited(second);
                let over = patience.left.is_zero();
                patience.took(bytes_per_s as usize);
                over
            })
        };
        assert_eq!(lasts(0), Some(30));
        // Never silent for longer than a second.
        assert_eq!(lasts(1), Some(31));
        assert!(matches!(lasts(LEAST_BYTES_PER_S / 2), Some(58..=60)));
        assert_eq!(lasts(LEAST_BYTES_PER_S), None);
        let mut patience = Patience::new(most);
        patience.took(1 << 40);
        assert_eq!(patience.left, most, "no credit for later");
    }

    #[tokio::test]
    async fn heads_that_come_byte_by_byte_make_way() {
        let port = start(1, SHORT, LONG).await;
        let mut slow = TcpStream::connect(port.address).await.unwrap();
        slow.write_all(b"GET / HTTP/1.1\r\nX: ").await.unwrap();
        // It never rests for long, and it never ends.
        let trickle = async {
            while slow.write_all(b"y").await.is_ok() {
                tokio::time::sleep(SHORT / 10).await;
            }
        };
        let waits = exchange(port.address, LAST);
        let ((), answer) = within(async { tokio::join!(trickle, waits) }).await;
        assert!(answer.contains("\r\noo\r\n"), "{answer}");
    }

    #[tokio::test]
    async fn connections_that_are_silent_from_the_start_or_after_an_answer_make_way() {
        let port = start(1, SHORT, LONG).await;
        let silent = TcpStream::connect(port.address).await.unwrap();
        let kept = within(exchange(port.address, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")).await;
        assert!(kept.contains("200 OK"), "{kept}");
        let answer = within(exchange(port.address, LAST)).await;
        assert!(answer.contains("\r\noo\r\n"), "{answer}");
        drop(silent);
    }

    #[tokio::test]
    async fn it_stops_once_nothing_is_under_way() {
        let mut port = start(4, LONG, LONG).await;
        let _idle = TcpStream::connect(port.address).await.unwrap();
        let mut busy = TcpStream::connect(port.address).await.unwrap();
        busy.write_all(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
            .await
            .unwrap();
        let mut first = [0; 8];
        busy.read_exact(&mut first).await.unwrap();
        port.stop.send(()).unwrap();
        // New ones are not taken any more, and the answer goes on.
        let mut more = vec![0; 64 << 20];
        within(busy.read_exact(&mut more)).await.unwrap();
        assert!(!port.ended.is_finished());
        drop(busy);
        within(port.gone.recv()).await.unwrap();
        within(port.ended).await.unwrap();
    }
}
