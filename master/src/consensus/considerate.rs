//! A connection for bulk that leaves room for others on its way.
//!
//! A snapshot that is written as fast as the kernel takes it fills the queue in front of the slowest link: megabytes, on
//! many routers seconds. Behind them wait the heartbeats, however separate their connection is. So a considerate
//! connection watches how much longer its round trip takes than it could (the kernel knows both), and keeps so little on
//! its way, by the size of the kernel's send buffer, that it is no more than about [`LATE`]. The principle is LEDBAT's
//! (RFC 6817); the kernel does the waiting.
//!
//! Guaranteed: at most the send buffer is on its way, [`START_BYTES`] at first: a link of 1 Mbit/s is through with that
//! in an eighth of a second, a third of the shortest election time-out, before the first measurement.
//!
//! Not guaranteed: a fair share against connections that are not considerate, which is the point. On a kernel
//! that does not tell round trips the buffer stays at [`START_BYTES`].

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_send_buffer_size;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// So much later than on an empty way, for whatever is behind us: a small part of an election time-out. Above what a
/// receiver may hold an acknowledgement back (40 ms), which looks like a queue and is none.
const LATE: Duration = Duration::from_millis(60);
/// Send buffer at first, and where the way is short: with a round trip of 0.2 ms it carries 40 MB/s. The kernel doubles
/// it for its own bookkeeping, so that up to twice as many bytes are on their way. Twice this size deposed leaders on
/// links of 1 Mbit/s that let a burst pass first: 262 ms, a heartbeat's interval, and what else was being sent.
const START_BYTES: usize = 8 << 10;
/// The smallest: a segment or three.
const LEAST_BYTES: usize = 4 << 10;
/// The largest.
const MOST_BYTES: usize = 4 << 20;
/// Where the way is long, as much as keeps it busy at this rate, in bytes per second, if its queues stay empty.
const FASTEST: u64 = 64 << 20;

/// See the module docs.
pub(crate) struct Considerate {
    inner: TcpStream,
    buffer_bytes: usize,
    changed: Instant,
}

impl Considerate {
    pub(crate) fn new(inner: TcpStream) -> io::Result<Self> {
        set_socket_send_buffer_size(&inner, START_BYTES)?;
        Ok(Self {
            inner,
            buffer_bytes: START_BYTES,
            changed: Instant::now(),
        })
    }

    /// Fits the buffer to the way, at most once per round trip.
    fn adapt(&mut self) {
        let Some(trip) = RoundTrip::of(self.inner.as_raw_fd()) else {
            return;
        };
        if self.changed.elapsed() < trip.now {
            return;
        }
        let fit = fit(self.buffer_bytes, trip);
        if fit != self.buffer_bytes && set_socket_send_buffer_size(&self.inner, fit).is_ok() {
            tracing::trace!(from = self.buffer_bytes, to = fit, ?trip, "send buffer");
            self.buffer_bytes = fit;
            self.changed = Instant::now();
        }
    }
}

/// The kernel's view of one connection's round trips.
#[derive(Clone, Copy, Debug)]
struct RoundTrip {
    now: Duration,
    least: Duration,
}

/// The size for a buffer that is `bytes` large.
fn fit(bytes: usize, trip: RoundTrip) -> usize {
    let queued = trip.now.saturating_sub(trip.least);
    let full = u64::try_from(trip.least.as_micros()).unwrap_or(u64::MAX);
    let full = usize::try_from(full.saturating_mul(FASTEST) / 1_000_000).unwrap_or(MOST_BYTES);
    let most = full.clamp(START_BYTES, MOST_BYTES);
    if queued > LATE {
        (bytes / 2).max(LEAST_BYTES)
    } else {
        (bytes + bytes / 4).min(most)
    }
}

/// Offsets in the kernel's `struct tcp_info`, which only ever grows at its end.
const TCP_INFO_RTT: usize = 68;
const TCP_INFO_MIN_RTT: usize = 148;

impl RoundTrip {
    fn of(socket: RawFd) -> Option<Self> {
        let mut info = [0u8; 256];
        let mut len = info.len() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes into `info`, and says how many.
        let result = unsafe {
            libc::getsockopt(
                socket,
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                info.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        if result != 0 {
            return None;
        }
        let known = info.get(..len as usize)?;
        let micros = |at: usize| {
            let bytes = known.get(at..at + 4)?.try_into().ok()?;
            // Zero and all ones: nothing was measured yet.
            let micros = u32::from_ne_bytes(bytes);
            (micros != 0 && micros != u32::MAX).then(|| Duration::from_micros(micros.into()))
        };
        Some(Self {
            now: micros(TCP_INFO_RTT)?,
            least: micros(TCP_INFO_MIN_RTT)?,
        })
    }
}

impl AsyncRead for Considerate {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl AsyncWrite for Considerate {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.adapt();
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    fn trip(now_ms: u64, least_ms: u64) -> RoundTrip {
        RoundTrip {
            now: Duration::from_millis(now_ms),
            least: Duration::from_millis(least_ms),
        }
    }

    fn settled(mut bytes: usize, trip: RoundTrip) -> usize {
        for _ in 0..100 {
            bytes = fit(bytes, trip);
        }
        bytes
    }

    #[test]
    fn the_buffer_fits_the_way() {
        assert_eq!(settled(START_BYTES, trip(300, 1)), LEAST_BYTES, "a queue");
        assert_eq!(settled(START_BYTES, trip(0, 0)), START_BYTES, "a short way");
        assert_eq!(
            settled(LEAST_BYTES, trip(0, 0)),
            START_BYTES,
            "a queue that is gone"
        );
        assert_eq!(settled(START_BYTES, trip(120, 120)), MOST_BYTES, "a long way");
        assert_eq!(
            settled(START_BYTES, trip(10, 10)),
            FASTEST as usize / 100,
            "a way between"
        );
        assert_eq!(fit(64 << 10, trip(180, 120)), 80 << 10, "as late as it may be");
        assert_eq!(fit(64 << 10, trip(200, 120)), 32 << 10);
        assert_eq!(
            settled(LEAST_BYTES, trip(40, 0)),
            START_BYTES,
            "a delayed acknowledgement"
        );
    }

    #[tokio::test]
    async fn the_kernel_tells_round_trips_and_bytes_arrive() -> io::Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let near = TcpStream::connect(listener.local_addr()?).await?;
        let (mut far, _) = listener.accept().await?;
        let mut near = Considerate::new(near)?;
        let sent: Vec<u8> = (0..1u32 << 20).map(|n| (n % 251) as u8).collect();
        let expected = sent.clone();
        let writer = tokio::spawn(async move {
            near.write_all(&sent).await?;
            near.flush().await?;
            Ok::<_, io::Error>(near)
        });
        let mut received = vec![0; expected.len()];
        far.read_exact(&mut received).await?;
        assert!(received == expected);
        let near = writer.await.map_err(io::Error::other)??;
        let trip = RoundTrip::of(near.inner.as_raw_fd()).ok_or(io::ErrorKind::Unsupported)?;
        assert!(trip.least <= Duration::from_secs(1), "{trip:?}");
        assert!((LEAST_BYTES..=MOST_BYTES).contains(&near.buffer_bytes));
        Ok(())
    }
}
