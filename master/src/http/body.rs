//! Request bodies: bounded each, and bounded together.
//!
//! Guaranteed: no body over [`MAX_BODY_BYTES`] is ever held, and all bodies held at once stay below
//! [`BUDGET_BYTES`]; who finds no room within [`BUDGET_WAIT`] is told to come back. A refused body is read to
//! its end (within bounds) before the answer, so that a caller which sends first and reads later sees the
//! answer and not a broken connection.

use super::error::{ApiError, cut};
use axum::{
    body::Body,
    http::{HeaderMap, header},
};
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use mooncake_proto::{api::ProblemCode, manifest::MAX_BODY_BYTES};
use std::{sync::Arc, time::Duration};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// All bodies held at once: two of the largest. A parsed body takes about four times its size beside it.
const BUDGET_BYTES: usize = 2 * MAX_BODY_BYTES;
/// What is reserved for a body that does not tell its length, until it proves larger.
const UNKNOWN_RESERVE_BYTES: usize = 1 << 20;
/// Longest wait for room.
const BUDGET_WAIT: Duration = Duration::from_secs(10);
/// Longest silence in the middle of a body.
const READ_IDLE: Duration = Duration::from_secs(30);
/// Longest time spent on reading a body that was refused already.
const DRAIN_TIME: Duration = Duration::from_secs(5);
/// Most bytes of such a body that are read.
const DRAIN_BYTES: usize = 2 * MAX_BODY_BYTES;
/// Unit of the budget: a semaphore counts at most `u32::MAX` permits at once.
const UNIT_BYTES: usize = 1 << 10;

/// The room for bodies.
pub(crate) struct BodyBudget {
    room: Arc<Semaphore>,
    wait: Duration,
}

impl Default for BodyBudget {
    fn default() -> Self {
        Self {
            room: Arc::new(Semaphore::new(BUDGET_BYTES / UNIT_BYTES)),
            wait: BUDGET_WAIT,
        }
    }
}

/// A body, and its room in the budget for as long as any clone of this lives.
#[derive(Clone, Debug)]
pub(super) struct HeldBody {
    pub bytes: Bytes,
    _room: Arc<Vec<OwnedSemaphorePermit>>,
}

impl HeldBody {
    #[cfg(test)]
    pub fn for_tests(bytes: Bytes) -> Self {
        Self {
            bytes,
            _room: Arc::default(),
        }
    }
}

impl BodyBudget {
    async fn room(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let units = bytes.div_ceil(UNIT_BYTES) as u32;
        match tokio::time::timeout(self.wait, self.room.clone().acquire_many_owned(units)).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(ApiError::new(
                ProblemCode::Overloaded,
                format!(
                    "this master holds {BUDGET_BYTES} bytes of request bodies already; repeat the request later"
                ),
            )),
        }
    }

    /// Reads a body of at most `limit` bytes.
    pub(super) async fn read(
        &self,
        headers: &HeaderMap,
        body: Body,
        limit: usize,
    ) -> Result<HeldBody, ApiError> {
        let told = headers
            .get(header::CONTENT_LENGTH)
            .and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
        if told.is_some_and(|n| n > limit as u64) {
            refuse(headers, body).await;
            return Err(too_large(limit));
        }
        let told = told.map(|n| n as usize);
        let mut reserved = told.unwrap_or(UNKNOWN_RESERVE_BYTES.min(limit));
        let mut room = vec![self.room(reserved).await?];
        let mut held = BytesMut::with_capacity(told.unwrap_or(0));
        let mut stream = body.into_data_stream();
        loop {
            let frame = match tokio::time::timeout(READ_IDLE, stream.next()).await {
                Ok(Some(Ok(frame))) => frame,
                Ok(None) => break,
                Ok(Some(Err(e))) => {
                    let detail = format!("the connection broke after {} bytes of the body: {e}", held.len());
                    return Err(ApiError::new(ProblemCode::InvalidRequest, detail));
                }
                Err(_) => {
                    let detail = format!(
                        "nothing came for {} s after {} bytes of the body",
                        READ_IDLE.as_secs(),
                        held.len()
                    );
                    return Err(ApiError::new(ProblemCode::InvalidRequest, detail));
                }
            };
            if held.len() + frame.len() > limit {
                drop(held);
                drain(&mut stream).await;
                return Err(too_large(limit));
            }
            if held.len() + frame.len() > reserved {
                room.push(self.room(limit - reserved).await?);
                reserved = limit;
            }
            held.extend_from_slice(&frame);
        }
        Ok(HeldBody {
            bytes: held.freeze(),
            _room: Arc::new(room),
        })
    }
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

    #[tokio::test]
    async fn a_body_over_the_limit_is_refused_told_or_not() {
        let budget = BodyBudget::default();
        let free = budget.room.available_permits();
        let told = headers(&[(header::CONTENT_LENGTH, "11")]);
        for headers in [HeaderMap::new(), told] {
            let error = budget
                .read(&headers, Body::from("hello world"), 10)
                .await
                .unwrap_err();
            assert_eq!(error.problem().status, 413);
            assert!(
                error.problem().detail.contains("10 bytes"),
                "{}",
                error.problem().detail
            );
            let held = budget
                .read(&headers, Body::from("hello world"), 11)
                .await
                .unwrap();
            assert_eq!(&held.bytes[..], b"hello world");
            assert!(budget.room.available_permits() < free, "a held body takes room");
            drop(held);
            assert_eq!(budget.room.available_permits(), free);
        }
    }

    #[tokio::test]
    async fn without_room_the_caller_is_told_to_come_back() {
        let budget = BodyBudget {
            wait: Duration::from_millis(10),
            ..BodyBudget::default()
        };
        let _all = budget.room(BUDGET_BYTES).await.unwrap();
        let error = budget
            .read(&HeaderMap::new(), Body::from("x"), 10)
            .await
            .unwrap_err();
        assert_eq!(error.problem().status, 429);
    }
}
