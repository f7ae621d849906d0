//! The HTTP API. Any master answers anything: see [`forward`].
//!
//! Guaranteed for every answer, errors included: the headers that name the master that served it, its term and
//! the log index it had applied; errors are problem documents. A caller's mistake is never logged above debug.
//! Not guaranteed: authentication (this port has none in this version); that a live byte count never goes back.

pub(crate) mod body;
mod create;
mod error;
pub(crate) mod forward;
mod jobs;
mod listener;
pub(crate) mod manifests;
mod params;
mod probes;
mod read;
pub(crate) mod waiters;

pub use listener::serve;

use crate::context::MasterContext;
use axum::{
    Router,
    extract::{DefaultBodyLimit, MatchedPath, Request, State},
    http::{HeaderName, HeaderValue, Method},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{MethodRouter, get, post},
};
use error::ApiError;
use forward::{Kind, to_leader};
use mooncake_proto::api::{HEADER_APPLIED_INDEX, HEADER_SERVED_BY, HEADER_TERM, ProblemCode};
use std::{sync::Arc, time::Instant};

/// The routes, ready to be served (or called directly, in tests).
pub fn router(ctx: Arc<MasterContext>) -> Router {
    let jobs =
        led(&ctx, Kind::Read, get(jobs::get_or_list)).merge(led(&ctx, Kind::Create, post(create::create)));
    Router::new()
        .route("/api/v1/model-distribution/jobs", jobs)
        .route(
            "/api/v1/model-distribution/jobs/{job_id}",
            led(&ctx, Kind::Read, get(jobs::get)),
        )
        .route(
            "/api/v1/model-distribution/jobs/{job_id}/cancel",
            led(&ctx, Kind::Cancel, post(jobs::cancel)),
        )
        .route("/api/v1/nodes", led(&ctx, Kind::Read, get(read::nodes)))
        .route("/api/v1/nodes/{node_id}", led(&ctx, Kind::Read, get(read::node)))
        .route("/api/v1/models", led(&ctx, Kind::Read, get(read::models)))
        .route("/api/v1/objects", led(&ctx, Kind::Read, get(read::objects)))
        .route("/api/v1/cluster", get(read::cluster))
        .route("/livez", get(probes::livez))
        .route("/readyz", get(probes::readyz))
        .route("/leaderz", get(probes::leaderz))
        .route("/health", get(probes::health))
        .route("/role", get(probes::role))
        .route("/leader", get(probes::leader))
        .route("/metrics", get(probes::metrics))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        // Bodies are bounded by `body`, with a better answer.
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn_with_state(ctx.clone(), around))
        .with_state(ctx)
}

fn led(
    ctx: &Arc<MasterContext>,
    kind: Kind,
    route: MethodRouter<Arc<MasterContext>>,
) -> MethodRouter<Arc<MasterContext>> {
    route.route_layer(from_fn_with_state((ctx.clone(), kind), to_leader))
}

/// A response's extension: the applied index that its body was read at. The header then says exactly that, and
/// not what was applied a moment later.
#[derive(Clone, Copy, Debug)]
struct ReadAt(u64);

/// A JSON answer read at an applied index.
fn json_at(index: u64, body: &impl serde::Serialize) -> Response {
    let mut response = axum::Json(body).into_response();
    response.extensions_mut().insert(ReadAt(index));
    response
}

async fn not_found(request: Request) -> ApiError {
    let (parts, body) = request.into_parts();
    body::refuse(&parts.headers, body).await;
    let detail = format!(
        "there is nothing at {}; the API begins at /api/v1/",
        parts.uri.path()
    );
    ApiError::new(ProblemCode::NotFound, detail)
}

async fn method_not_allowed(request: Request) -> ApiError {
    let (parts, body) = request.into_parts();
    body::refuse(&parts.headers, body).await;
    let detail = format!(
        "{} is not allowed on {}; the Allow header names what is",
        parts.method,
        parts.uri.path()
    );
    ApiError::new(ProblemCode::MethodNotAllowed, detail)
}

/// Around every request: admission, the three headers, metrics.
async fn around(State(ctx): State<Arc<MasterContext>>, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let method = request.method().clone();
    let path = request
        .extensions()
        .get::<MatchedPath>()
        .map(|p| p.as_str().to_owned());
    let long = request
        .uri()
        .query()
        .is_some_and(|q| q.split('&').any(|p| p.starts_with("wait=")));
    let probe = !request.uri().path().starts_with("/api/");
    let permits = if long && method == Method::GET {
        &ctx.long_polls
    } else {
        &ctx.requests
    };
    let mut response = if probe {
        next.run(request).await
    } else {
        match permits.clone().try_acquire_owned() {
            Ok(_permit) => next.run(request).await,
            Err(_) => {
                let (parts, body) = request.into_parts();
                body::refuse(&parts.headers, body).await;
                ApiError::new(
                    ProblemCode::Overloaded,
                    "this master serves as many requests as it can; repeat the request later",
                )
                .into_response()
            }
        }
    };
    stamp(&ctx, &mut response);
    let status = response.status().as_u16();
    ctx.metrics.request(
        path.as_deref().unwrap_or("none"),
        &method,
        status,
        began.elapsed(),
        long,
    );
    tracing::debug!(%method, path, status, elapsed_ms = began.elapsed().as_millis() as u64, "request served");
    response
}

/// What a passed-on answer has already stays: it names the master that served it.
fn stamp(ctx: &MasterContext, response: &mut Response) {
    let term = ctx.consensus.leadership().borrow().term;
    let read_at = response.extensions().get::<ReadAt>().map(|at| at.0);
    let applied = read_at.unwrap_or_else(|| ctx.consensus.state().applied_index);
    let headers = response.headers_mut();
    if headers.contains_key(HEADER_SERVED_BY) {
        return;
    }
    for (name, value) in [
        (HEADER_SERVED_BY, ctx.consensus.identity().node_id),
        (HEADER_TERM, term),
        (HEADER_APPLIED_INDEX, applied),
    ] {
        headers.insert(HeaderName::from_static(name), HeaderValue::from(value));
    }
}
