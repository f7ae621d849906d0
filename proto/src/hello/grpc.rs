//! The hello under gRPC: a lazy channel that opens with it, and an accept loop that demands it.

use super::{HANDSHAKE_TIMEOUT, HelloConfig, PeerInfo, Purpose, accept, connect};
use hyper_util::rt::TokioIo;
use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, mpsc},
};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::transport::{Channel, Endpoint, server::Connected};

/// Handshakes under way at once on one port: strangers that stay silent must not use up the process.
const MAX_HANDSHAKES: usize = 256;
/// Accepted connections that wait for the server to take them.
const ACCEPT_QUEUE: usize = 64;
/// How long to wait for a TCP connection inside a cluster.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// HTTP/2 pings find a peer that vanished without a reset.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// After a ping without an answer.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection whose hello was accepted.
#[derive(Debug)]
pub struct HelloStream {
    inner: TcpStream,
    peer: PeerInfo,
}

impl Connected for HelloStream {
    type ConnectInfo = PeerInfo;
    fn connect_info(&self) -> PeerInfo {
        self.peer.clone()
    }
}

impl AsyncRead for HelloStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl AsyncWrite for HelloStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

/// A lazy gRPC channel to `address` (`host:port`) whose every connection opens with the hello. It
/// reconnects by itself when used again after a failure.
///
/// # Panics
/// If `address` is not `host:port` (addresses are checked where they are configured).
pub fn channel(address: &str, config: Arc<HelloConfig>, purpose: Purpose) -> Channel {
    channel_over(address, config, purpose, Ok)
}

/// The same, with each connection wrapped, once its hello held, into something that looks after it.
///
/// # Panics
/// As [`channel`].
pub fn channel_over<S>(
    address: &str,
    config: Arc<HelloConfig>,
    purpose: Purpose,
    wrap: fn(TcpStream) -> io::Result<S>,
) -> Channel
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let target: Arc<str> = address.into();
    // The URI only fills HTTP/2's :authority; the connector dials `target`.
    Endpoint::from_shared(format!("http://{address}"))
        .expect("host:port makes a URI")
        .connect_timeout(CONNECT_TIMEOUT + HANDSHAKE_TIMEOUT)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_with_connector_lazy(tower::service_fn(move |_| {
            let (target, config) = (target.clone(), config.clone());
            async move {
                let dial = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(&*target));
                let mut stream = dial
                    .await
                    .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
                stream.set_nodelay(true)?;
                connect(&mut stream, &config, purpose).await?;
                Ok::<_, io::Error>(TokioIo::new(wrap(stream)?))
            }
        }))
}

/// Accepts connections and yields those whose hello held. Handshakes run concurrently, at most 256; what
/// fails is logged (once per connection, at `warn`) and closed. Ends when the stream is dropped.
pub fn incoming(
    listener: TcpListener,
    config: Arc<HelloConfig>,
    allowed: Vec<Purpose>,
) -> impl Stream<Item = io::Result<HelloStream>> {
    let (tx, rx) = mpsc::channel(ACCEPT_QUEUE);
    let allowed: Arc<[Purpose]> = allowed.into();
    tokio::spawn(async move {
        let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
        loop {
            let permit = handshakes.clone().acquire_owned().await.expect("never closed");
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = tx.closed() => return,
            };
            let (mut stream, from) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of file descriptors or a connection that died in the queue: neither ends the port.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let (tx, config, allowed) = (tx.clone(), config.clone(), allowed.clone());
            tokio::spawn(async move {
                let _permit = permit;
                let _ = stream.set_nodelay(true);
                match accept(&mut stream, &config, &allowed).await {
                    Ok(peer) => {
                        let _ = tx.send(Ok(HelloStream { inner: stream, peer })).await;
                    }
                    Err(error) => tracing::warn!(%from, %error, "refused a connection"),
                }
            });
        }
    });
    ReceiverStream::new(rx)
}
