//! Request bodies: bounded each, bounded together, and bounded in time.
//!
//! Guaranteed: no body over [`MAX_BODY_BYTES`] is ever held. Bodies up to [`SMALL_BYTES`] are bounded together by
//! the admission of requests ([`crate::context::MAX_REQUESTS`], 64 MiB); larger ones have a room for the middling
//! and one for the large, so that none waits behind one that is much larger. Who finds no room within
//! [`BUDGET_WAIT`] is told to come back. A body where none is expected is not held at all. A body that comes
//! slower than [`LEAST_BYTES_PER_S`], after a grace, is given up, and one that does not begin within [`FIRST_BYTE`]: nobody
//! holds a request's place or room by dripping, nor by a promise, since room is only taken for what has begun to come.
//! A refused body is read to its end (within bounds) before the answer, so that a caller which sends first and
//! reads later sees the answer and not a broken connection.

use super::error::ApiError;
use axum::{
    body::{Body, HttpBody},
    http::{HeaderMap, header},
};
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use mooncake_proto::{api::ProblemCode, http::LEAST_BYTES_PER_S, manifest::MAX_BODY_BYTES, text::cut};
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

/// Bodies up to this size need no room of their own. Nearly all are: the RFC's example has 1 KiB.
const SMALL_BYTES: usize = 64 << 10;
/// Bodies up to this size share the room for the middling.
const MIDDLING_BYTES: usize = 2 << 20;
/// All middling bodies held at once.
const MIDDLING_ROOM_BYTES: usize = 32 << 20;
/// All large bodies held at once: two of the largest. A parsed body takes about four times its size beside it.
const LARGE_ROOM_BYTES: usize = 2 * MAX_BODY_BYTES;
/// Longest wait for room.
const BUDGET_WAIT: Duration = Duration::from_secs(10);
/// Longest silence in the middle of a body, and what a body may take beside the time that its size needs.
const READ_GRACE: Duration = Duration::from_secs(30);
/// Longest wait for a body's first byte. Its head is here, so that its sender is, too.
const FIRST_BYTE: Duration = Duration::from_secs(5);
/// Longest time spent on reading a body that was refused already.
const DRAIN_TIME: Duration = Duration::from_secs(5);
/// Most bytes of such a body that are read.
const DRAIN_BYTES: usize = 2 * MAX_BODY_BYTES;
/// Unit of the rooms: a semaphore counts at most `u32::MAX` permits at once.
const UNIT_BYTES: usize = 1 << 10;

/// The rooms for bodies.
pub(crate) struct BodyBudget {
    middling: Arc<Semaphore>,
    large: Arc<Semaphore>,
    wait: Duration,
    grace: Duration,
}

impl Default for BodyBudget {
    fn default() -> Self {
        Self {
            middling: Arc::new(Semaphore::new(MIDDLING_ROOM_BYTES / UNIT_BYTES)),
            large: Arc::new(Semaphore::new(LARGE_ROOM_BYTES / UNIT_BYTES)),
            wait: BUDGET_WAIT,
            grace: READ_GRACE,
        }
    }
}

/// A body, and its room for as long as any clone of this lives.
#[derive(Clone, Debug, Default)]
pub(super) struct HeldBody {
    pub bytes: Bytes,
    _room: Option<Arc<OwnedSemaphorePermit>>,
}

impl HeldBody {
    #[cfg(test)]
    pub fn for_tests(bytes: Bytes) -> Self {
        Self { bytes, _room: None }
    }
}

const fn units(bytes: usize) -> u32 {
    bytes.div_ceil(UNIT_BYTES) as u32
}

/// How long a body may go on coming.
struct Pace {
    began: Instant,
    grace: Duration,
}

impl Pace {
    fn new(grace: Duration) -> Self {
        Self {
            began: Instant::now(),
            grace,
        }
    }

    /// The next frame, with `got` bytes so far.
    async fn next(
        &self,
        stream: &mut axum::body::BodyDataStream,
        got: usize,
    ) -> Result<Option<Bytes>, ApiError> {
        let whole = self.grace + Duration::from_secs_f64(got as f64 / LEAST_BYTES_PER_S as f64);
        let silence = match got {
            0 => self.grace.min(FIRST_BYTE),
            _ => self.grace,
        };
        let until = (self.began + whole).min(Instant::now() + silence);
        match tokio::time::timeout_at(until, stream.next()).await {
            Ok(None) => Ok(None),
            Ok(Some(Ok(frame))) => Ok(Some(frame)),
            Ok(Some(Err(e))) => {
                let detail = format!("the connection broke after {got} bytes of the body: {e}");
                Err(ApiError::new(ProblemCode::InvalidRequest, detail))
            }
            Err(_) => {
                let detail = format!(
                    "only {got} bytes of the body came within {:.0} s; a body begins within {} s, may pause for {} s, and \
                     take {} s and one more for each MiB in all",
                    self.began.elapsed().as_secs_f64(),
                    FIRST_BYTE.as_secs(),
                    self.grace.as_secs(),
                    self.grace.as_secs(),
                );
                Err(ApiError::new(ProblemCode::BodyTimeout, detail))
            }
        }
    }

    /// The time that `wait` takes is not the sender's.
    async fn paused<T>(&mut self, wait: impl Future<Output = T>) -> T {
        let began = Instant::now();
        let done = wait.await;
        self.began += began.elapsed();
        done
    }
}

impl BodyBudget {
    async fn acquire(&self, room: &Arc<Semaphore>, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        match tokio::time::timeout(self.wait, room.clone().acquire_many_owned(units(bytes))).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(ApiError::new(
                ProblemCode::Overloaded,
                "this master holds as many bytes of request bodies as it can; repeat the request later",
            )),
        }
    }

    /// Room for a body of up to `bytes`; none is needed for a small one.
    async fn room(&self, bytes: usize) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
        match bytes {
            0..=SMALL_BYTES => Ok(None),
            _ if bytes <= MIDDLING_BYTES => self.acquire(&self.middling, bytes).await.map(Some),
            _ => self.acquire(&self.large, bytes).await.map(Some),
        }
    }

    /// Reads a body of at most `limit` bytes.
    pub(super) async fn read(
        &self,
        headers: &HeaderMap,
        body: Body,
        limit: usize,
    ) -> Result<HeldBody, ApiError> {
        let told = told(headers, &body);
        if told.is_some_and(|n| n > limit as u64) {
            refuse(headers, body).await;
            return Err(too_large(limit));
        }
        // Every body is small until it proves larger: a told size is a promise only.
        let most = told.map_or(limit, |n| n as usize);
        let mut reserved = SMALL_BYTES.min(most);
        let mut room = None;
        let mut held = BytesMut::with_capacity(reserved);
        let mut stream = body.into_data_stream();
        let mut pace = Pace::new(self.grace);
        while let Some(frame) = pace.next(&mut stream, held.len()).await? {
            let size = held.len() + frame.len();
            if size > limit {
                drop((held, room));
                drain(&mut stream).await;
                return Err(too_large(limit));
            }
            if size > reserved {
                reserved = match size {
                    0..=MIDDLING_BYTES => MIDDLING_BYTES.min(most),
                    // As much as was told, whatever that is worth if more comes.
                    _ => most.max(size),
                };
                // Nobody with room for a large one waits for a middling one's, so this cannot wait in a circle.
                room = pace.paused(self.room(reserved)).await?;
            }
            held.extend_from_slice(&frame);
        }
        if let Some(room) = &mut room {
            // What was not needed is for others.
            let unused = room.num_permits().saturating_sub(units(held.len()) as usize);
            drop(room.split(unused));
        }
        Ok(HeldBody {
            bytes: held.freeze(),
            _room: room.map(Arc::new),
        })
    }

    /// Reads a body of at most `limit` bytes that nobody looks at, and keeps nothing of it.
    pub(super) async fn skip(&self, headers: &HeaderMap, body: Body, limit: usize) -> Result<(), ApiError> {
        if body.is_end_stream() {
            return Ok(());
        }
        if told(headers, &body).is_some_and(|n| n > limit as u64) {
            refuse(headers, body).await;
            return Err(too_large(limit));
        }
        let mut stream = body.into_data_stream();
        let pace = Pace::new(self.grace);
        let mut got = 0;
        while let Some(frame) = pace.next(&mut stream, got).await? {
            got += frame.len();
            if got > limit {
                drain(&mut stream).await;
                return Err(too_large(limit));
            }
        }
        Ok(())
    }
}

/// The size of a body, where it is known before it comes.
fn told(headers: &HeaderMap, body: &Body) -> Option<u64> {
    let header = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|v| v.to_str().ok()?.parse().ok());
    body.size_hint().exact().or(header)
}

fn too_large(limit: usize) -> ApiError {
    let detail = format!(
        "the limit of a request body is {limit} bytes ({} MiB)",
        limit >> 20
    );
    ApiError::new(ProblemCode::BodyTooLarge, detail)
}

/// Takes in a body that is refused without being looked at.
pub(super) async fn refuse(headers: &HeaderMap, body: Body) {
    // Who asks first has not sent it, and will not after the final answer.
    if headers.contains_key(header::EXPECT) {
        return;
    }
    drain(&mut body.into_data_stream()).await;
}

async fn drain(stream: &mut axum::body::BodyDataStream) {
    let read = async {
        let mut left = DRAIN_BYTES;
        while let Some(Ok(frame)) = stream.next().await {
            left = left.saturating_sub(frame.len());
            if left == 0 {
                return;
            }
        }
    };
    let _ = tokio::time::timeout(DRAIN_TIME, read).await;
}

/// Whether the content type is JSON (`application/json`, or `…+json`, whatever the parameters).
pub(super) fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let value = headers
        .get(header::CONTENT_TYPE)
        .map(|v| v.to_str().unwrap_or("?"));
    let essence = value
        .and_then(|v| v.split(';').next())
        .unwrap_or_default()
        .trim()
        .to_ascii_lowercase();
    if essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json")) {
        return Ok(());
    }
    let detail = match value {
        Some(value) => format!(
            "the content type is '{}'; send the body as application/json",
            cut(value)
        ),
        None => "the request has no content type; send the body as application/json".to_owned(),
    };
    Err(ApiError::new(ProblemCode::UnsupportedMediaType, detail))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(header::HeaderName, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(n, v)| (n.clone(), v.parse().unwrap()))
            .collect()
    }

    #[test]
    fn content_types() {
        for good in [
            "application/json",
            "Application/JSON; charset=utf-8",
            "application/vnd.x+json",
        ] {
            assert!(
                check_content_type(&headers(&[(header::CONTENT_TYPE, good)])).is_ok(),
                "{good}"
            );
        }
        for bad in [
            "text/plain",
            "application/x-www-form-urlencoded",
            "json",
            "text/x+json",
        ] {
            let error = check_content_type(&headers(&[(header::CONTENT_TYPE, bad)])).unwrap_err();
            assert_eq!(error.problem().status, 415);
            assert!(error.problem().detail.contains(bad));
        }
        assert!(check_content_type(&HeaderMap::new()).is_err());
    }

    fn told_size(bytes: usize) -> HeaderMap {
        headers(&[(header::CONTENT_LENGTH, &bytes.to_string())])
    }

    /// A body that comes in frames of `frame` bytes and does not tell its size.
    fn stream_of(bytes: usize, frame: usize) -> Body {
        let frames = (0..bytes).step_by(frame).map(move |at| {
            let part = vec![b' '; frame.min(bytes - at)];
            Ok::<_, std::io::Error>(Bytes::from(part))
        });
        Body::from_stream(futures_util::stream::iter(frames))
    }

    /// A body that begins and never goes on.
    fn stalled(bytes: usize) -> Body {
        let begins = futures_util::stream::iter([Ok::<_, std::io::Error>(Bytes::from(vec![b' '; bytes]))]);
        Body::from_stream(begins.chain(futures_util::stream::pending()))
    }

    impl BodyBudget {
        fn free(&self) -> [usize; 2] {
            [&self.middling, &self.large].map(|room| room.available_permits() * UNIT_BYTES)
        }
    }

    #[tokio::test]
    async fn a_body_over_the_limit_is_refused_told_or_not() {
        let budget = BodyBudget::default();
        let limit = SMALL_BYTES + 10;
        for told in [false, true] {
            let read = async |size: usize| {
                let headers = if told { told_size(size) } else { HeaderMap::new() };
                budget.read(&headers, stream_of(size, 1000), limit).await
            };
            let error = read(limit + 1).await.unwrap_err();
            assert_eq!(error.problem().status, 413);
            assert!(
                error.problem().detail.contains(&format!("{limit} bytes")),
                "{}",
                error.problem().detail
            );
            let held = read(limit).await.unwrap();
            assert_eq!(held.bytes.len(), limit);
            assert!(budget.free()[0] < MIDDLING_ROOM_BYTES, "a held body takes room");
            drop(held);
            assert_eq!(budget.free(), [MIDDLING_ROOM_BYTES, LARGE_ROOM_BYTES]);
            let error = budget
                .skip(&HeaderMap::new(), stream_of(11, 4), 10)
                .await
                .unwrap_err();
            assert_eq!(error.problem().status, 413);
            budget
                .skip(&HeaderMap::new(), stream_of(10, 4), 10)
                .await
                .unwrap();
        }
    }

    #[tokio::test]
    async fn a_body_keeps_the_room_that_it_needs() {
        let budget = BodyBudget::default();
        let read = async |size: usize| {
            let body = stream_of(size, 60_000);
            budget
                .read(&HeaderMap::new(), body, MAX_BODY_BYTES)
                .await
                .unwrap()
        };
        let small = read(SMALL_BYTES).await;
        assert_eq!(budget.free(), [MIDDLING_ROOM_BYTES, LARGE_ROOM_BYTES]);
        let middling = read(100 << 10).await;
        assert_eq!(
            budget.free(),
            [MIDDLING_ROOM_BYTES - (100 << 10), LARGE_ROOM_BYTES]
        );
        let large = read(3 << 20).await;
        assert_eq!(
            budget.free(),
            [MIDDLING_ROOM_BYTES - (100 << 10), LARGE_ROOM_BYTES - (3 << 20)]
        );
        drop((small, middling, large));
    }

    #[tokio::test]
    async fn without_room_the_caller_is_told_to_come_back_and_smaller_ones_are_served() {
        let budget = BodyBudget {
            wait: Duration::from_millis(10),
            ..BodyBudget::default()
        };
        let _all = budget.acquire(&budget.large, LARGE_ROOM_BYTES).await.unwrap();
        let body = || stream_of(MIDDLING_BYTES + 1, 1 << 20);
        for headers in [HeaderMap::new(), told_size(MIDDLING_BYTES + 1)] {
            let error = budget.read(&headers, body(), MAX_BODY_BYTES).await.unwrap_err();
            assert_eq!(error.problem().status, 429);
        }
        for size in [0, 3000, SMALL_BYTES, SMALL_BYTES + 1, MIDDLING_BYTES] {
            let body = stream_of(size, 1 << 20);
            let held = budget.read(&told_size(size), body, MAX_BODY_BYTES).await.unwrap();
            assert_eq!(held.bytes.len(), size);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_promise_takes_no_room_and_little_time() {
        let budget = BodyBudget::default();
        let began = Instant::now();
        let headers = told_size(MAX_BODY_BYTES);
        let read = budget.read(&headers, stalled(0), MAX_BODY_BYTES);
        assert_eq!(read.await.unwrap_err().problem().status, 408);
        assert!((FIRST_BYTE..FIRST_BYTE * 2).contains(&began.elapsed()));
        // And what begins and stops has room for what came, by the step.
        for (came, taken) in [
            (SMALL_BYTES, [0, 0]),
            (SMALL_BYTES + 1, [MIDDLING_BYTES, 0]),
            (MIDDLING_BYTES + 1, [0, MAX_BODY_BYTES]),
        ] {
            let headers = told_size(MAX_BODY_BYTES);
            let read = budget.read(&headers, stalled(came), MAX_BODY_BYTES);
            let look = async {
                tokio::time::sleep(Duration::from_secs(1)).await;
                budget.free()
            };
            let (ended, free) = tokio::join!(read, look);
            assert_eq!(ended.unwrap_err().problem().status, 408);
            let free_of = [MIDDLING_ROOM_BYTES - taken[0], LARGE_ROOM_BYTES - taken[1]];
            assert_eq!(free, free_of, "{came}");
        }
        assert_eq!(budget.free(), [MIDDLING_ROOM_BYTES, LARGE_ROOM_BYTES]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_does_not_come_is_given_up() {
        let budget = BodyBudget::default();
        let began = Instant::now();
        let error = budget
            .read(&told_size(1000), stalled(10), MAX_BODY_BYTES)
            .await
            .unwrap_err();
        assert_eq!(error.problem().status, 408);
        assert!(
            error.problem().detail.contains("10 bytes"),
            "{}",
            error.problem().detail
        );
        assert!((READ_GRACE..READ_GRACE * 2).contains(&began.elapsed()));
        // One byte every second never pauses for long, and would take months.
        let drip = || {
            let bytes = futures_util::stream::unfold((), async |()| {
                tokio::time::sleep(Duration::from_secs(1)).await;
                Some((Ok::<_, std::io::Error>(Bytes::from_static(b" ")), ()))
            });
            Body::from_stream(Box::pin(bytes))
        };
        let began = Instant::now();
        let error = budget
            .read(&told_size(MAX_BODY_BYTES), drip(), MAX_BODY_BYTES)
            .await
            .unwrap_err();
        assert_eq!(error.problem().status, 408);
        assert!((READ_GRACE..READ_GRACE * 2).contains(&began.elapsed()));
        let error = budget
            .skip(&HeaderMap::new(), drip(), SMALL_BYTES)
            .await
            .unwrap_err();
        assert_eq!(error.problem().status, 408);
        assert_eq!(budget.free(), [MIDDLING_ROOM_BYTES, LARGE_ROOM_BYTES]);
        // As slow as is allowed, for longer than the grace.
        let steady = futures_util::stream::unfold(0, async |n| {
            tokio::time::sleep(Duration::from_secs(1)).await;
            (n < 60).then(|| {
                (
                    Ok::<_, std::io::Error>(Bytes::from(vec![b' '; LEAST_BYTES_PER_S as usize])),
                    n + 1,
                )
            })
        });
        let held = budget
            .read(
                &HeaderMap::new(),
                Body::from_stream(Box::pin(steady)),
                MAX_BODY_BYTES,
            )
            .await
            .unwrap();
        assert_eq!(held.bytes.len(), 60 * LEAST_BYTES_PER_S as usize);
    }
}
