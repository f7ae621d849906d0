//! An HTTP source that counts what it served, stops where it is told to, and misbehaves on request.

use anyhow::Result;
use axum::{
    Router,
    body::Body,
    extract::{Path as UrlPath, State},
    http::{HeaderMap, HeaderValue, Response, StatusCode, header},
};
use bytes::Bytes;
use futures_util::stream;
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{sync::watch, time::Instant};

/// Bytes per body frame.
const FRAME_BYTES: u64 = 64 << 10;
/// What a held source finishes once it has begun it, at multiples of this in the file: the smallest block. So a held
/// client lacks no part of a block that it has begun, and would get no byte twice if it asked again meanwhile.
const PIECE_BYTES: u64 = 256 << 10;

/// How the source answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// Ranges, strong ETags.
    Honest,
    /// 200 with the whole body to every request.
    NoRanges,
    /// No ranges, and the connection is cut after this many bytes.
    CutWithoutRanges {
        /// Bytes of the body before the cut.
        after_bytes: u64,
    },
    /// 404.
    NotFound,
    /// 500.
    ServerError,
    /// Bodies stand still after so many bytes, for as long as this is how the source behaves.
    Stall {
        /// Bytes of each body before.
        after_bytes: u64,
    },
    /// Bodies end after so many bytes, whatever their `Content-Length` says.
    Short {
        /// Bytes of each body.
        bytes: u64,
    },
    /// 200 without a length, and the content over and over for ever.
    Endless,
    /// The objects were replaced: other content of the same size, another ETag. Bodies under way are finished as they
    /// began.
    Changed,
}

impl Behaviour {
    /// For reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Honest => "honest",
            Self::NoRanges => "no-ranges",
            Self::CutWithoutRanges { .. } => "cut-without-ranges",
            Self::NotFound => "not-found",
            Self::ServerError => "server-error",
            Self::Stall { .. } => "stall",
            Self::Short { .. } => "short",
            Self::Endless => "endless",
            Self::Changed => "changed",
        }
    }

    fn has_ranges(self) -> bool {
        matches!(
            self,
            Self::Honest | Self::Stall { .. } | Self::Short { .. } | Self::Changed
        )
    }
}

/// How often a stalled body looks whether it may go on.
const STALL_POLL: Duration = Duration::from_millis(20);

struct Shared {
    folder: PathBuf,
    behaviour: Mutex<Behaviour>,
    bytes_per_second: Mutex<Option<u64>>,
    /// When the link is free again, under `bytes_per_second`.
    free_at: Mutex<Instant>,
    /// Times each byte of each path was served, as ranges.
    served: Mutex<HashMap<String, Vec<(u64, u64)>>>,
    /// The ranges of requests that were served to their end, by path.
    whole: Mutex<BTreeMap<String, Vec<(u64, u64)>>>,
    requests: Mutex<u64>,
    /// See [`HttpSource::hold_at`]; `u64::MAX`: no hold.
    hold: watch::Sender<u64>,
    /// Bytes of the pieces that were begun.
    begun: Mutex<u64>,
    bodies: AtomicUsize,
    waiting: AtomicUsize,
}

/// One more of something, as long as it lives.
struct Counted(Arc<Shared>, fn(&Shared) -> &AtomicUsize);

impl Counted {
    fn new(shared: &Arc<Shared>, what: fn(&Shared) -> &AtomicUsize) -> Self {
        what(shared).fetch_add(1, Ordering::SeqCst);
        Self(shared.clone(), what)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        (self.1)(&self.0).fetch_sub(1, Ordering::SeqCst);
    }
}

impl Shared {
    /// Waits until `bytes` more may be sent.
    async fn begin(self: &Arc<Self>, bytes: u64) {
        let may = |limit: u64| {
            let mut begun = self.begun.lock();
            let may = begun.saturating_add(bytes) <= limit;
            if may {
                *begun += bytes;
            }
            may
        };
        let mut hold = self.hold.subscribe();
        if may(*hold.borrow_and_update()) {
            return;
        }
        let _waiting = Counted::new(self, |s| &s.waiting);
        let _ = hold.wait_for(|limit| may(*limit)).await;
    }
}

/// The server; it stops on drop.
pub struct HttpSource {
    /// `http://127.0.0.1:port`, without a slash at the end.
    pub url: String,
    shared: Arc<Shared>,
    task: tokio::task::JoinHandle<()>,
}

impl HttpSource {
    /// Serves the files below `folder` on loopback.
    pub async fn start(folder: &Path) -> Result<Self> {
        Self::listen(folder, "127.0.0.1:0").await
    }

    /// Serves the files below `folder` at this address, from the current runtime.
    pub async fn listen(folder: &Path, address: &str) -> Result<Self> {
        let shared = Arc::new(Shared {
            folder: folder.to_owned(),
            behaviour: Mutex::new(Behaviour::Honest),
            bytes_per_second: Mutex::new(None),
            free_at: Mutex::new(Instant::now()),
            served: Mutex::default(),
            whole: Mutex::default(),
            requests: Mutex::new(0),
            hold: watch::Sender::new(u64::MAX),
            begun: Mutex::new(0),
            bodies: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
        });
        let listener = tokio::net::TcpListener::bind(address).await?;
        let url = format!("http://{}", listener.local_addr()?);
        let app = Router::new()
            .route("/{*path}", axum::routing::get(serve))
            .with_state(shared.clone());
        let task = tokio::spawn(async move {
            let _ = axum::serve(listener, app).await;
        });
        Ok(Self { url, shared, task })
    }

    /// From now on.
    pub fn behave(&self, behaviour: Behaviour) {
        *self.shared.behaviour.lock() = behaviour;
    }

    /// Limits the source as a whole; `None`: unlimited.
    pub fn limit_rate(&self, bytes_per_second: Option<u64>) {
        *self.shared.bytes_per_second.lock() = bytes_per_second;
    }

    /// Stops before the first piece of 256 KiB that would take it beyond `bytes` of bodies since the start, until
    /// [`release`](Self::release) or a later hold: whatever a test does meanwhile, it does in the middle.
    pub fn hold_at(&self, bytes: u64) {
        self.shared.hold.send_replace(bytes);
    }

    /// Ends the hold.
    pub fn release(&self) {
        self.hold_at(u64::MAX);
    }

    /// Bodies that wait at the hold.
    pub fn waiting(&self) -> usize {
        self.shared.waiting.load(Ordering::SeqCst)
    }

    /// Bodies that are being sent to somebody who is still there. At 0, the counts stand until the next request.
    pub fn bodies(&self) -> usize {
        self.shared.bodies.load(Ordering::SeqCst)
    }

    /// Body bytes handed to the network so far.
    pub fn bytes_served(&self) -> u64 {
        self.shared
            .served
            .lock()
            .values()
            .flatten()
            .map(|(a, b)| b - a)
            .sum()
    }

    /// Of these, those of one file.
    pub fn bytes_served_of(&self, path: &str) -> u64 {
        let served = self.shared.served.lock();
        served.get(path).into_iter().flatten().map(|(a, b)| b - a).sum()
    }

    /// Body bytes that were served more than once.
    pub fn bytes_served_again(&self) -> u64 {
        let served = self.shared.served.lock();
        served
            .values()
            .map(|ranges| ranges.iter().map(|(a, b)| b - a).sum::<u64>() - union(ranges))
            .sum()
    }

    /// The ranges of the requests whose last byte was handed to the network, by path. The others were broken off.
    pub fn whole_requests(&self) -> BTreeMap<String, Vec<(u64, u64)>> {
        self.shared.whole.lock().clone()
    }

    /// Requests so far that are not (or not yet) among [`whole_requests`](Self::whole_requests).
    pub fn broken_requests(&self) -> u64 {
        let whole: usize = self.shared.whole.lock().values().map(Vec::len).sum();
        self.requests().saturating_sub(whole as u64)
    }

    /// Requests so far.
    pub fn requests(&self) -> u64 {
        *self.shared.requests.lock()
    }

    /// Forgets the counts (a hold does not).
    pub fn reset_counts(&self) {
        self.shared.served.lock().clear();
        self.shared.whole.lock().clear();
        *self.shared.requests.lock() = 0;
    }
}

impl Drop for HttpSource {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn union(ranges: &[(u64, u64)]) -> u64 {
    let mut sorted = ranges.to_vec();
    sorted.sort_unstable();
    let (mut total, mut end) = (0, 0);
    for (a, b) in sorted {
        total += b.saturating_sub(a.max(end));
        end = end.max(b);
    }
    total
}

async fn serve(
    State(shared): State<Arc<Shared>>,
    UrlPath(path): UrlPath<String>,
    headers: HeaderMap,
) -> Response<Body> {
    *shared.requests.lock() += 1;
    let behaviour = *shared.behaviour.lock();
    if behaviour == Behaviour::ServerError {
        return answer(StatusCode::INTERNAL_SERVER_ERROR, Body::from("out of order"));
    }
    let file = if behaviour == Behaviour::NotFound || path.split('/').any(|c| c == "..") {
        None
    } else {
        File::open(shared.folder.join(&path)).ok()
    };
    let Some(file) = file else {
        return answer(StatusCode::NOT_FOUND, Body::from("there is no such object here"));
    };
    let size = file.metadata().map(|m| m.len()).unwrap_or(0);
    let etag = match behaviour {
        Behaviour::Changed => "\"v2\"",
        _ => "\"v1\"",
    };
    // A range of another version is not asked for (If-Range, RFC 9110).
    let same_version = headers.get(header::IF_RANGE).is_none_or(|tag| tag == etag);
    let range = headers
        .get(header::RANGE)
        .filter(|_| behaviour.has_ranges() && same_version)
        .and_then(|r| parse_range(r.to_str().ok()?, size));
    let (start, end) = range.unwrap_or((0, size));
    let mut response = answer(
        if range.is_some() {
            StatusCode::PARTIAL_CONTENT
        } else {
            StatusCode::OK
        },
        Body::from_stream(frames(shared, path, file, start, end, behaviour)),
    );
    let h = response.headers_mut();
    if behaviour != Behaviour::Endless {
        h.insert(header::CONTENT_LENGTH, HeaderValue::from(end - start));
    }
    h.insert(header::ETAG, HeaderValue::from_static(etag));
    if behaviour.has_ranges() {
        h.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    }
    if range.is_some() {
        let value = format!("bytes {start}-{}/{size}", end - 1);
        h.insert(
            header::CONTENT_RANGE,
            HeaderValue::from_str(&value).expect("ascii"),
        );
    }
    response
}

fn answer(status: StatusCode, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response
}

/// `bytes=a-b` or `bytes=a-` as a half-open range.
fn parse_range(text: &str, size: u64) -> Option<(u64, u64)> {
    let (a, b) = text.strip_prefix("bytes=")?.split_once('-')?;
    let start: u64 = a.parse().ok()?;
    let end = if b.is_empty() {
        size
    } else {
        b.parse::<u64>().ok()? + 1
    };
    (start < end && start < size).then_some((start, end.min(size)))
}

fn frames(
    shared: Arc<Shared>,
    path: String,
    file: File,
    start: u64,
    end: u64,
    behaviour: Behaviour,
) -> impl futures_util::Stream<Item = io::Result<Bytes>> {
    let file = Arc::new(file);
    let body = Counted::new(&shared, |s| &s.bodies);
    stream::unfold((start, body), move |(at, body)| {
        let (shared, path, file) = (shared.clone(), path.clone(), file.clone());
        async move {
            let mut at = at;
            if behaviour == Behaviour::Endless && at >= end && end > start {
                at = start;
            }
            if at >= end {
                return None;
            }
            match behaviour {
                Behaviour::Short { bytes } if at - start >= bytes => return None,
                Behaviour::Stall { after_bytes } if at - start >= after_bytes => {
                    while *shared.behaviour.lock() == behaviour {
                        tokio::time::sleep(STALL_POLL).await;
                    }
                }
                _ => {}
            }
            if let Behaviour::CutWithoutRanges { after_bytes } = behaviour
                && at - start >= after_bytes
            {
                return Some((Err(io::Error::from(io::ErrorKind::ConnectionReset)), (end, body)));
            }
            if at == start || at % PIECE_BYTES == 0 {
                let piece_end = (at / PIECE_BYTES + 1) * PIECE_BYTES;
                shared.begin(piece_end.min(end) - at).await;
            }
            // Frames end with pieces, wherever the range began.
            let len = FRAME_BYTES.min(end - at).min(PIECE_BYTES - at % PIECE_BYTES);
            let rate = *shared.bytes_per_second.lock();
            if let Some(rate) = rate {
                let slot = {
                    let mut free_at = shared.free_at.lock();
                    let slot = (*free_at).max(Instant::now());
                    *free_at = slot + Duration::from_secs_f64(len as f64 / rate as f64);
                    slot
                };
                tokio::time::sleep_until(slot).await;
            }
            let mut frame = vec![0; len as usize];
            if let Err(e) = file.read_exact_at(&mut frame, at) {
                return Some((Err(e), (end, body)));
            }
            if behaviour == Behaviour::Changed {
                frame.iter_mut().for_each(|b| *b ^= 0x55);
            }
            // An endless body has no last byte: whoever got it broke it off.
            if at + len == end && behaviour != Behaviour::Endless {
                shared
                    .whole
                    .lock()
                    .entry(path.clone())
                    .or_default()
                    .push((start, end));
            }
            shared.served.lock().entry(path).or_default().push((at, at + len));
            Some((Ok(Bytes::from(frame)), (at + len, body)))
        }
    })
}
