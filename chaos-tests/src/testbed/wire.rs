//! A wire that damages, delays or stalls what goes over it: a proxy in the namespace of the dialling host, put under
//! its connections by the packet filter, so that neither end is configured for it.
//!
//! Faults act on what the dialled end sends (for a peer's data port: the model's bytes); the other direction is
//! only delayed. They stand for what netem does where the kernel has it.

use super::network::PROXY_MARK;
use anyhow::{Context, Result};
use parking_lot::Mutex;
use std::{
    net::SocketAddrV4,
    os::fd::AsRawFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    runtime::Handle,
    sync::mpsc,
    task::JoinHandle,
    time::Instant,
};

const READ_BYTES: usize = 64 << 10;
/// Reads on their way through a delay, per direction: 16 MiB.
const IN_FLIGHT: usize = 256;
/// How often a stalled wire looks whether it may go on.
const STALL_POLL: Duration = Duration::from_millis(10);

/// What a wire does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireFault {
    /// Nothing.
    None,
    /// Flips one bit every so many bytes, so many times in all.
    FlipBits {
        /// Bytes of one connection between two flips (and before the first, so that the hello is spared).
        every_bytes: u64,
        /// Flips in all, over all connections.
        times: u64,
    },
    /// Each direction takes so much longer.
    Delay {
        /// Milliseconds.
        ms: u64,
    },
    /// Nothing goes on; connections stay open.
    Stall,
}

#[derive(Debug)]
struct Shared {
    fault: Mutex<WireFault>,
    flips: AtomicU64,
    connections: AtomicU64,
}

/// See the module docs. It ends when dropped, with all its connections.
#[derive(Debug)]
pub struct Wire {
    /// Local port of the proxy.
    pub(super) port: u16,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

impl Wire {
    /// Listens on the host of `runtime` and passes connections on to `to`.
    pub(super) async fn start(runtime: &Handle, to: SocketAddrV4) -> Result<Self> {
        let shared = Arc::new(Shared {
            fault: Mutex::new(WireFault::None),
            flips: AtomicU64::new(0),
            connections: AtomicU64::new(0),
        });
        let theirs = shared.clone();
        let (tell, told) = tokio::sync::oneshot::channel();
        let task = runtime.spawn(async move {
            let listener = TcpListener::bind("0.0.0.0:0").await;
            let port = listener.as_ref().map(TcpListener::local_addr);
            let _ = tell.send(port.map_err(|e| e.to_string()));
            let Ok(listener) = listener else { return };
            // Ends with its connections, all at once.
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((inner, _)) = listener.accept().await {
                while connections.try_join_next().is_some() {}
                connections.spawn(carry(inner, to, theirs.clone()));
            }
        });
        let address = told
            .await?
            .map_err(|e| anyhow::anyhow!("a wire cannot listen: {e}"))??;
        Ok(Self {
            port: address.port(),
            shared,
            task,
        })
    }

    /// From now on, on existing connections too.
    pub fn set(&self, fault: WireFault) {
        *self.shared.fault.lock() = fault;
    }

    /// Bits flipped so far.
    pub fn flips(&self) -> u64 {
        self.shared.flips.load(Ordering::Relaxed)
    }

    /// Connections carried so far.
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::Relaxed)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(inner: TcpStream, to: SocketAddrV4, shared: Arc<Shared>) {
    let Ok(outer) = dial(to).await else { return };
    shared.connections.fetch_add(1, Ordering::Relaxed);
    let (inner_read, inner_write) = inner.into_split();
    let (outer_read, outer_write) = outer.into_split();
    tokio::join!(
        pump(inner_read, outer_write, shared.clone(), false),
        pump(outer_read, inner_write, shared, true),
    );
}

async fn dial(to: SocketAddrV4) -> Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    let mark = PROXY_MARK;
    // SAFETY: the option takes a u32 of that size.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MARK,
            (&raw const mark).cast(),
            size_of::<u32>() as libc::socklen_t,
        )
    };
    if result != 0 {
        return Err(std::io::Error::last_os_error()).context("a wire cannot mark its socket");
    }
    Ok(socket.connect(to.into()).await?)
}

/// Bytes through a queue, so that a delay costs time and no throughput.
async fn pump(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    shared: Arc<Shared>,
    damages: bool,
) {
    let (queue, mut queued) = mpsc::channel::<(Instant, Vec<u8>)>(IN_FLIGHT);
    let fault = || *shared.fault.lock();
    let read = async {
        let mut passed = 0;
        let mut buffer = vec![0; READ_BYTES];
        while let Ok(n @ 1..) = from.read(&mut buffer).await {
            let mut bytes = buffer[..n].to_vec();
            let mut due = Instant::now();
            match fault() {
                WireFault::Delay { ms } => due += Duration::from_millis(ms),
                WireFault::FlipBits { every_bytes, times } if damages => {
                    flip(&mut bytes, passed, every_bytes, || {
                        shared
                            .flips
                            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |f| {
                                (f < times).then_some(f + 1)
                            })
                            .is_ok()
                    });
                }
                _ => {}
            }
            passed += n as u64;
            if queue.send((due, bytes)).await.is_err() {
                break;
            }
        }
        drop(queue);
    };
    let write = async {
        while let Some((due, bytes)) = queued.recv().await {
            tokio::time::sleep_until(due).await;
            while fault() == WireFault::Stall {
                tokio::time::sleep(STALL_POLL).await;
            }
            if to.write_all(&bytes).await.is_err() {
                return;
            }
        }
        let _ = to.shutdown().await;
    };
    tokio::join!(read, write);
}

/// Flips the lowest bit of every byte whose position in the connection is a multiple of `every` (but 0), as long
/// as `may` says so.
fn flip(bytes: &mut [u8], at: u64, every: u64, may: impl Fn() -> bool) {
    let every = every.max(1);
    let mut next = at.div_ceil(every).max(1) * every;
    while let Some(byte) = bytes.get_mut((next - at) as usize) {
        if !may() {
            return;
        }
        *byte ^= 1;
        next += every;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_flip_at_the_same_places_however_the_bytes_are_cut() {
        for cut in [1, 3, 7, 10, 100] {
            let mut all = [0u8; 100];
            let mut at = 0;
            for piece in all.chunks_mut(cut) {
                flip(piece, at, 10, || true);
                at += piece.len() as u64;
            }
            let flipped: Vec<_> = (0..100).filter(|&i| all[i] == 1).collect();
            assert_eq!(flipped, [10, 20, 30, 40, 50, 60, 70, 80, 90]);
        }
    }
}
