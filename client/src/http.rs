//! The node's own HTTP port: health, metrics, holdings, and objects by their id.
//!
//! An object is served only when every byte of it was verified here; each block is looked up again when it is
//! read, so that one which was condemned meanwhile ends the answer early (shorter than `Content-Length`)
//! instead of being sent. Connections are bounded, and one that stops reading or sending is closed, and with it
//! goes what it held here ([`mooncake_proto::http`]).

use crate::{
    metrics::{self, state_name},
    session::Status,
    store::{Artifact, ArtifactState, Store},
};
use axum::{
    Json, Router,
    body::Body,
    extract::{Query, State},
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use bytes::Bytes;
use mooncake_proto::{
    api::{Problem, ProblemCode},
    http::Limits as PortLimits,
    ids::ModelRef,
};
use serde::Deserialize;
use serde_json::json;
use std::{
    io,
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    net::TcpListener,
    sync::{OwnedSemaphorePermit, Semaphore, watch},
};
use tokio_util::sync::CancellationToken;

/// Objects served at once; each may hold one block (up to 4 MiB) in memory.
const MAX_OBJECT_READS: usize = 16;
/// Requests for which a disk is asked (holdings, metrics) at once.
const MAX_LOOKS: usize = 4;
/// Most blocking calls under way at once.
pub const BLOCKING_CALLS: usize = MAX_OBJECT_READS + MAX_LOOKS;
/// Probes, scrapers and a few that read objects.
const LIMITS: PortLimits = PortLimits {
    connections: 256,
    head: Duration::from_secs(60),
    write: Duration::from_secs(30),
};
/// For answers that are under way when the process stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// What the handlers read.
#[derive(Clone)]
pub struct Http {
    /// This node.
    pub node_id: String,
    /// Holdings and objects.
    pub store: Store,
    /// Numbers.
    pub metrics: metrics::Sources,
    /// The session.
    pub status: watch::Receiver<Status>,
    /// Set when the process begins to stop.
    pub draining: Arc<AtomicBool>,
    limits: Arc<Limits>,
}

struct Limits {
    objects: Arc<Semaphore>,
    looks: Arc<Semaphore>,
}

impl Http {
    /// Ready to be served.
    pub fn new(node_id: String, store: Store, metrics: metrics::Sources) -> Self {
        let limits = Limits {
            objects: Arc::new(Semaphore::new(MAX_OBJECT_READS)),
            looks: Arc::new(Semaphore::new(MAX_LOOKS)),
        };
        let status = metrics.status.clone();
        Self {
            node_id,
            store,
            metrics,
            status,
            draining: Arc::default(),
            limits: Arc::new(limits),
        }
    }

    /// Until `stop`; answers under way get a moment to end.
    pub async fn serve(self, listener: TcpListener, stop: CancellationToken) {
        let server =
            mooncake_proto::http::serve(listener, self.router(), LIMITS, stop.clone().cancelled_owned());
        let late = async {
            stop.cancelled().await;
            tokio::time::sleep(DRAIN_TIMEOUT).await;
        };
        tokio::select! {
            () = server => {}
            () = late => {}
        }
    }

    /// The routes.
    pub fn router(self) -> Router {
        Router::new()
            .route("/livez", get(async || "ok\n"))
            .route("/readyz", get(readyz))
            .route("/metrics", get(show_metrics))
            .route("/api/v1/holdings", get(holdings))
            .route("/api/v1/object", get(object))
            .fallback(async || {
                problem(ProblemCode::NotFound, "the client serves /livez, /readyz, /metrics, /api/v1/holdings and /api/v1/object; jobs are at the masters")
            })
            .method_not_allowed_fallback(async || problem(ProblemCode::MethodNotAllowed, "only GET is served here"))
            .with_state(self)
    }
}

fn problem(code: ProblemCode, detail: impl Into<String>) -> Response {
    let problem = Problem::new(code, detail);
    let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = (status, Json(problem)).into_response();
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/problem+json"),
    );
    response
}

async fn readyz(State(http): State<Http>) -> Response {
    let session = http.status.borrow().clone();
    let draining = http.draining.load(Ordering::Relaxed);
    let ready = matches!(session, Status::Registered { .. }) && !draining;
    let status = if ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (
        status,
        Json(json!({ "ready": ready, "draining": draining, "node_id": http.node_id, "session": session })),
    )
        .into_response()
}

/// Runs what asks the disk, a few at a time. It keeps its turn to its end, also if its caller goes away meanwhile.
async fn look<T: Send + 'static>(
    turns: &Arc<Semaphore>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Response> {
    let turn = turns.clone().acquire_owned().await.expect("never closed");
    let work = tokio::task::spawn_blocking(move || {
        let done = work();
        drop(turn);
        done
    });
    work.await
        .map_err(|e| problem(ProblemCode::Internal, e.to_string()))
}

async fn show_metrics(State(http): State<Http>) -> Response {
    let sources = http.metrics.clone();
    match look(&http.limits.looks, move || metrics::render(&sources)).await {
        Ok(Ok(text)) => (
            [(
                header::CONTENT_TYPE,
                "application/openmetrics-text; version=1.0.0; charset=utf-8",
            )],
            text,
        )
            .into_response(),
        Ok(Err(e)) => problem(
            ProblemCode::Internal,
            format!("the metrics cannot be written: {e}"),
        ),
        Err(response) => response,
    }
}

async fn holdings(State(http): State<Http>) -> Response {
    let store = http.store.clone();
    let read = look(&http.limits.looks, move || {
        let holdings: Vec<_> = store
            .holdings()
            .into_iter()
            .map(|h| {
                let local_path = match &h.state {
                    ArtifactState::Staged { local_path } => Some(local_path.to_string_lossy().into_owned()),
                    _ => None,
                };
                json!({
                    "model": h.model,
                    "generation": h.generation,
                    "manifest_digest": h.manifest_digest.to_string(),
                    "state": state_name(&h.state),
                    "verified_bytes": h.verified_bytes,
                    "verified_blocks": h.verified_blocks,
                    "root": h.seal.map(|s| s.root.to_string()),
                    "local_path": local_path,
                    "fence": { "recovery_epoch": h.fence.recovery_epoch, "attempt": h.fence.attempt },
                })
            })
            .collect();
        (holdings, store.free_bytes().ok(), store.capacity_bytes().ok())
    });
    match read.await {
        Ok((holdings, free_bytes, capacity_bytes)) => Json(json!({
            "node_id": http.node_id,
            "store_id": http.store.store_id(),
            "session": *http.status.borrow(),
            "free_bytes": free_bytes,
            "capacity_bytes": capacity_bytes,
            "holdings": holdings,
        }))
        .into_response(),
        Err(response) => response,
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ObjectQuery {
    model_id: String,
    revision: String,
    format: String,
    provider: String,
    key: String,
}

async fn object(
    State(http): State<Http>,
    query: Result<Query<ObjectQuery>, axum::extract::rejection::QueryRejection>,
) -> Response {
    let query = match query {
        Ok(Query(query)) => query,
        Err(e) => {
            let detail = format!(
                "{}; give model_id, revision, format, provider and key",
                e.body_text()
            );
            return problem(ProblemCode::InvalidParameter, detail);
        }
    };
    let key = query.key;
    let model = ModelRef {
        model_id: query.model_id,
        revision: query.revision,
        format: query.format,
        provider: query.provider,
    };
    let Some(artifact) = http.store.find(&model) else {
        return problem(
            ProblemCode::ModelNotFound,
            format!("this node holds nothing of {model}"),
        );
    };
    let Some(object) = artifact.object(&key) else {
        return problem(
            ProblemCode::ObjectNotFound,
            format!("{model} has no object '{key}'"),
        );
    };
    if !object.held {
        return problem(
            ProblemCode::ObjectNotFound,
            format!(
                "this node does not hold all of object '{key}' of {model} yet; ask the masters at /api/v1/objects?key= for nodes that do"
            ),
        );
    }
    let Ok(permit) = http.limits.objects.clone().try_acquire_owned() else {
        let mut busy = problem(
            ProblemCode::Overloaded,
            format!("{MAX_OBJECT_READS} objects are being served; try again"),
        );
        busy.headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        return busy;
    };
    let len = object.range.end - object.range.start;
    let reader = Reader {
        artifact,
        blocks: object.blocks,
        range: object.range,
        _permit: permit,
    };
    let stream = futures_util::stream::try_unfold(reader, |mut reader| async move {
        let (reader, piece) = tokio::task::spawn_blocking(move || {
            let piece = reader.next();
            (reader, piece)
        })
        .await
        .map_err(io::Error::other)?;
        Ok::<_, io::Error>(piece?.map(|bytes| (bytes, reader)))
    });
    (
        [
            (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
            (header::CONTENT_LENGTH, len.to_string()),
        ],
        Body::from_stream(stream),
    )
        .into_response()
}

/// Reads an object block by block.
struct Reader {
    artifact: Arc<Artifact>,
    blocks: std::ops::Range<u32>,
    /// Of the file.
    range: std::ops::Range<u64>,
    _permit: OwnedSemaphorePermit,
}

impl Reader {
    fn next(&mut self) -> io::Result<Option<Bytes>> {
        let Some(block) = self.blocks.next() else {
            return Ok(None);
        };
        // Opened through the artifact: the same in staging, in the final folder, and while it moves.
        let (file, offset, len) = self.artifact.block_file(block)?;
        let (start, end) = (
            offset.max(self.range.start),
            (offset + u64::from(len)).min(self.range.end),
        );
        let mut bytes = vec![0; (end - start) as usize];
        file.read_exact_at(&mut bytes, start)?;
        Ok(Some(bytes.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_look_at_a_disk_that_hangs_keeps_its_turn_when_its_caller_is_gone() {
        let turns = Arc::new(Semaphore::new(MAX_LOOKS));
        let (begun, begins) = tokio::sync::oneshot::channel();
        let (release, gate) = std::sync::mpsc::channel::<()>();
        let hung = look(&turns, move || {
            begun.send(()).unwrap();
            let _ = gate.recv();
        });
        tokio::select! {
            _ = hung => panic!("the gate is closed"),
            begun = begins => begun.unwrap(),
        }
        assert_eq!(turns.available_permits(), MAX_LOOKS - 1);
        drop(release);
        let all = turns.acquire_many(MAX_LOOKS as u32);
        let all = tokio::time::timeout(Duration::from_secs(60), all).await;
        assert!(all.expect("it ends with the look").is_ok());
    }
}
