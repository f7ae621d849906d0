//! The HTTP API. Any master answers anything: see [`forward`].
//!
//! Guaranteed for every answer, errors included: the headers that name the master that served it, its term and
//! the log index it had applied; errors are problem documents, that of a panic too. A caller's mistake is never
//! logged above debug, and what an answer repeats of the caller's text is bounded.
//! Not guaranteed: authentication (this port has none in this version); that a live byte count never goes back.

pub(crate) mod body;
mod cluster;
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
mod work;

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
use futures_util::FutureExt;
use mooncake_proto::{
    api::{HEADER_APPLIED_INDEX, HEADER_SERVED_BY, HEADER_TERM, ProblemCode},
    text::cut,
};
use params::Params;
use std::{panic::AssertUnwindSafe, sync::Arc, time::Instant};

/// The routes, ready to be served (or called directly, in tests).
pub fn router(ctx: Arc<MasterContext>) -> Router {
    let routes = routes(&ctx);
    finish(ctx, routes)
}

fn routes(ctx: &Arc<MasterContext>) -> Router<Arc<MasterContext>> {
    let jobs =
        led(ctx, Kind::Read, get(jobs::get_or_list)).merge(led(ctx, Kind::Create, post(create::create)));
    Router::new()
        .route("/api/v1/model-distribution/jobs", jobs)
        .route(
            "/api/v1/model-distribution/jobs/{job_id}",
            led(ctx, Kind::Read, get(jobs::get)),
        )
        .route(
            "/api/v1/model-distribution/jobs/{job_id}/cancel",
            led(ctx, Kind::Cancel, post(jobs::cancel)),
        )
        .route("/api/v1/nodes", led(ctx, Kind::Read, get(read::nodes)))
        .route("/api/v1/nodes/{node_id}", led(ctx, Kind::Read, get(read::node)))
        .route("/api/v1/models", led(ctx, Kind::Read, get(read::models)))
        .route("/api/v1/objects", led(ctx, Kind::Read, get(read::objects)))
        .route("/api/v1/cluster", get(read::cluster))
        .route(
            "/api/v1/cluster/members",
            led(ctx, Kind::Read, get(cluster::members)),
        )
        .route(
            "/api/v1/cluster/add",
            led(ctx, Kind::Membership, post(cluster::add)),
        )
        .route(
            "/api/v1/cluster/promote",
            led(ctx, Kind::Membership, post(cluster::promote)),
        )
        .route(
            "/api/v1/cluster/remove",
            led(ctx, Kind::Membership, post(cluster::remove)),
        )
        .route(
            "/api/v1/cluster/transfer",
            led(ctx, Kind::Membership, post(cluster::transfer)),
        )
        .route(
            "/api/v1/cluster/snapshot",
            led(ctx, Kind::Download, get(cluster::snapshot)),
        )
        .route("/livez", get(probes::livez))
        .route("/readyz", get(probes::readyz))
        .route("/leaderz", get(probes::leaderz))
        .route("/health", get(probes::health))
        .route("/role", get(probes::role))
        .route("/leader", get(probes::leader))
        .route("/metrics", get(probes::metrics))
}

/// What every route has around it.
fn finish(ctx: Arc<MasterContext>, routes: Router<Arc<MasterContext>>) -> Router {
    routes
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
        cut(parts.uri.path())
    );
    ApiError::new(ProblemCode::NotFound, detail)
}

async fn method_not_allowed(request: Request) -> ApiError {
    let (parts, body) = request.into_parts();
    body::refuse(&parts.headers, body).await;
    let detail = format!(
        "{} is not allowed on {}; the Allow header names what is",
        cut(parts.method.as_str()),
        cut(parts.uri.path())
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
    // As the handlers read it, however it is spelled; they refuse what cannot be read.
    let long = matches!(method, Method::GET | Method::HEAD)
        && Params::parse(request.uri().query()).is_ok_and(|params| params.is_long_poll());
    let probe = !request.uri().path().starts_with("/api/");
    let permits = if long { &ctx.long_polls } else { &ctx.requests };
    let mut response = if probe {
        caught(next.run(request)).await
    } else {
        match permits.clone().try_acquire_owned() {
            Ok(_permit) => caught(next.run(request)).await,
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

/// A handler that panics is answered for: without this its caller sees a closed connection and cannot tell what for.
/// Nothing that handlers share is left half changed by one, since no lock is held across what may panic and the
/// state is written by consensus alone.
async fn caught(handler: impl Future<Output = Response>) -> Response {
    match AssertUnwindSafe(handler).catch_unwind().await {
        Ok(response) => response,
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied());
            // Logged as an error where it becomes a response.
            let detail = format!(
                "the handler of this request panicked: {}; this is a fault of the program, please report it",
                cut(text.unwrap_or("it did not say why"))
            );
            ApiError::new(ProblemCode::Internal, detail).into_response()
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::MemberAddress,
        consensus::{Consensus, Options, Timers},
        context,
    };
    use axum::body::{Body, to_bytes};
    use mooncake_proto::api::{PROBLEM_JSON, Problem};
    use tower::ServiceExt;

    #[tokio::test]
    async fn a_handler_that_panics_is_answered_for() {
        let dir = tempfile::tempdir().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let own = MemberAddress {
            rpc: listener.local_addr().unwrap().to_string(),
            http: "127.0.0.1:9".into(),
        };
        let options = Options {
            cluster_id: "panics".into(),
            node_id: 1,
            data_dir: dir.path().to_owned(),
            secret: None,
            timers: Timers {
                heartbeat_ms: 100,
                election_min_ms: 500,
                election_max_ms: 1000,
            },
            snapshot_every: 10_000,
            snapshot_keep: 1_000,
            address: own.clone(),
            initial_cluster: [(1, own)].into(),
            bootstrap: true,
        };
        let (consensus, _sessions) = Consensus::start(options, listener).await.unwrap();
        let ctx = MasterContext::new(consensus.handle(), context::Options::default());
        async fn panics() -> Response {
            panic!("on {}", "purpose")
        }
        let routes = routes(&ctx)
            .route("/panics", get(panics))
            .route("/api/v1/panics", get(panics));
        let router = finish(ctx, routes);
        for path in ["/panics", "/api/v1/panics"] {
            let request = Request::get(path).body(Body::empty()).unwrap();
            let response = router.clone().oneshot(request).await.unwrap();
            assert_eq!(response.status(), 500);
            for name in [HEADER_SERVED_BY, HEADER_TERM, HEADER_APPLIED_INDEX] {
                assert!(response.headers().contains_key(name), "{name}");
            }
            assert_eq!(response.headers()["content-type"], PROBLEM_JSON);
            let body = to_bytes(response.into_body(), 1 << 20).await.unwrap();
            let problem: Problem = serde_json::from_slice(&body).unwrap();
            assert_eq!(problem.code, ProblemCode::Internal);
            assert!(problem.detail.contains("on purpose"), "{}", problem.detail);
        }
        consensus.shutdown().await.unwrap();
    }
}
