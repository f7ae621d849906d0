//! Who has a Raft connection open to this master: a process that ends, however it ends, closes all of its own at
//! once, long before a time-out could tell.
//!
//! Guaranteed: a connection counts from before its first call is served until its stream ended, failed or was dropped.
//!
//! Not guaranteed: that a peer without a connection is dead, or that one with a connection is alive: a frozen
//! process, and a host that lost its network, keep theirs.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use mooncake_proto::hello::{HelloStream, PeerInfo};
use mooncake_raft_store::NodeId;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tonic::transport::server::Connected;

/// Open Raft connections per master. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Inbound(watch::Sender<BTreeMap<NodeId, usize>>);

impl Inbound {
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(BTreeMap::new()))
    }

    /// Changes with every connection that opens or closes.
    pub(crate) fn subscribe(&self) -> watch::Receiver<BTreeMap<NodeId, usize>> {
        self.0.subscribe()
    }

    /// Counts `stream` as its sender's. One whose hello gave no master's id is not counted; its calls are refused.
    pub(crate) fn track(&self, stream: HelloStream) -> TrackedStream {
        let from = stream.connect_info().node_id.parse().ok();
        if let Some(from) = from {
            self.0.send_modify(|counts| *counts.entry(from).or_insert(0) += 1);
        }
        TrackedStream {
            inner: stream,
            open: from.map(|from| Open {
                from,
                counts: self.0.clone(),
            }),
        }
    }
}

/// One counted connection; not any more when it is dropped.
struct Open {
    from: NodeId,
    counts: watch::Sender<BTreeMap<NodeId, usize>>,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.counts.send_modify(|counts| {
            if let Some(count) = counts.get_mut(&self.from) {
                *count -= 1;
                if *count == 0 {
                    counts.remove(&self.from);
                }
            }
        });
    }
}

/// See [`Inbound::track`].
pub(crate) struct TrackedStream {
    inner: HelloStream,
    open: Option<Open>,
}

impl Connected for TrackedStream {
    type ConnectInfo = PeerInfo;
    fn connect_info(&self) -> PeerInfo {
        self.inner.connect_info()
    }
}

impl AsyncRead for TrackedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(cx, buf);
        let ended = match &read {
            Poll::Ready(Ok(())) => buf.filled().len() == before && buf.remaining() > 0,
            Poll::Ready(Err(_)) => true,
            Poll::Pending => false,
        };
        if ended {
            // Now, and not when the server is done with the calls that are still under way.
            self.open = None;
        }
        read
    }
}

impl AsyncWrite for TrackedStream {
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
