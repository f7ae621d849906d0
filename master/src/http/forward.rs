//! Every master answers everything: what needs the leader is served here by the leader and passed on by the
//! others.
//!
//! Guaranteed:
//! - One hop: a request that was passed on is never passed on again.
//! - A request is repeated only if nothing was done, or if repeating it is harmless. Reads are; so are all
//!   writes of this API, because a create always has its job id (made here, if the caller gave none, before
//!   the request leaves), a second cancel is the first one's answer, and a change of the membership or of
//!   leadership that finds its wish fulfilled does nothing.
//! - While there is no leader a request is held for at most one election ([`crate::context::Options::hold`]).
//!   Then: 503 `no_leader` if nothing can have happened, 504 `outcome_unknown` with the job id if it may have. So
//!   too if a write was lost and its repeat is answered that nothing was done: that is true of the repeat only.
//!
//! Not guaranteed: secrecy between the masters' HTTP ports, which have no authentication in this version.

use super::{
    body::{self, HeldBody},
    error::{ApiError, Elsewhere},
    params::{self, Consistency, Params},
};
use crate::{
    consensus::{Leadership, ReadError},
    context::MasterContext,
};
use axum::{
    body::Body,
    extract::{FromRequestParts, Path, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use mooncake_proto::{
    api::{HEADER_FORWARDED_BY, ProblemCode},
    ids::JobId,
    manifest::MAX_BODY_BYTES,
    text::chain,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// How a follower tells the leader which job id to use if the body has none. Only looked at beside
/// [`HEADER_FORWARDED_BY`].
pub(super) const HEADER_GENERATED_JOB_ID: &str = "x-mooncake-generated-job-id";

/// Longest time to reach the leader's port.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest time for an answer, beside the wait of a long poll: parsing the largest body and committing its
/// parts take a few seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Idle connections kept per master.
const POOL_IDLE_PER_HOST: usize = 64;
/// Idle connections are closed before the other end does it.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(20);
/// Most sends of one request: leaders that die one after another must not keep it for ever.
const MAX_SENDS: u32 = 8;
/// Pause before looking again, where no news of a new leader comes first.
const PAUSE: Duration = Duration::from_millis(25);
/// Largest answer that is passed on: a page of a thousand jobs is about a megabyte.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Longest wait for a stale read's `min_index`.
const MIN_INDEX_WAIT: Duration = Duration::from_secs(2);
/// Largest body where the API expects none.
const MAX_EMPTY_BODY_BYTES: usize = 64 << 10;

/// What a route is to forwarding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Changes nothing; may be read stale.
    Read,
    /// Creates a job: has a body.
    Create,
    /// Cancels a job.
    Cancel,
    /// Changes who the masters are, or who leads: a small body; repeating it changes nothing more.
    Membership,
    /// A read whose answer is too large to be held: it is passed on as it comes.
    Download,
}

impl Kind {
    fn is_read(self) -> bool {
        matches!(self, Self::Read | Self::Download)
    }
}

/// What the first master prepared for the handler; an extension of the request.
#[derive(Clone, Debug)]
pub(super) struct Prepared {
    /// Of a create; others have none that anybody looks at.
    pub body: HeldBody,
    /// For a body without one.
    pub generated_job_id: JobId,
}

/// The pooled client.
pub(crate) struct Forwarder {
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Default for Forwarder {
    fn default() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(POOL_IDLE_TIMEOUT)
            .pool_max_idle_per_host(POOL_IDLE_PER_HOST)
            .build(connector);
        Self { client }
    }
}

/// What to do with a request now.
#[derive(Debug, PartialEq, Eq)]
enum Decision {
    Serve,
    Forward(String),
    /// No leader is known: look again.
    Wait,
    /// It was passed on once: the first master looks again.
    Refuse,
}

fn decide(own_id: u64, view: &Leadership, forwarded: bool) -> Decision {
    if view.is_serving {
        return Decision::Serve;
    }
    if forwarded {
        return Decision::Refuse;
    }
    match &view.leader {
        Some(leader) if leader.id != own_id => Decision::Forward(leader.http_address.clone()),
        // No leader; or this master was elected and has not applied all that its predecessors acknowledged.
        _ => Decision::Wait,
    }
}

/// What became of a request that was sent.
enum Sent {
    Answer(Response),
    /// Nothing was done: it did not get there.
    NotDone(String),
    /// Nothing was done: the other master says so.
    Declined(String),
    /// Something may have been done.
    Lost(String),
}

/// The middleware of every route that needs the leader.
pub(super) async fn to_leader(
    State((ctx, kind)): State<(Arc<MasterContext>, Kind)>,
    request: Request,
    next: Next,
) -> Response {
    match dispatch(&ctx, kind, request, next).await {
        Ok(response) => response,
        Err(error) => error.into_response(),
    }
}

async fn dispatch(
    ctx: &MasterContext,
    kind: Kind,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let (mut parts, body) = request.into_parts();
    let prepared = prepare(ctx, kind, &parts, body).await?;
    parts.extensions.insert(prepared.clone());
    let params = Params::parse(parts.uri.query())?;
    if !kind.is_read() {
        params.none()?;
    }
    let consistency = params.consistency()?;
    if let (true, Consistency::Stale { min_index }) = (kind.is_read(), consistency) {
        wait_applied(ctx, min_index).await?;
        parts.extensions.insert(consistency);
        return Ok(next.run(Request::from_parts(parts, Body::empty())).await);
    }
    parts.extensions.insert(Consistency::Linearizable);

    let arrived = Instant::now();
    let wait = params.wait()?;
    let since = if params.is_long_poll() {
        Some(version_now(ctx, &mut parts, &params).await)
    } else {
        None
    };
    let forwarded = parts.headers.contains_key(HEADER_FORWARDED_BY);
    let own_id = ctx.consensus.identity().node_id;
    let mut watch = ctx.consensus.leadership();
    let mut hold_until = Instant::now() + ctx.options.hold;
    let mut maybe_done = false;
    let mut sends = 0;
    let mut asked = false;
    let mut last = "no leader is known".to_owned();
    loop {
        let view = watch.borrow_and_update().clone();
        // A repeated long poll goes on with what is left of its wait, and from what there was when it came.
        let left = wait.map(|w| w.saturating_sub(arrived.elapsed()));
        let uri = match (left, parts.uri.query()) {
            (Some(left), Some(query)) if asked => with_query(&parts.uri, &params::again(query, left, since)),
            _ => parts.uri.clone(),
        };
        match decide(own_id, &view, forwarded) {
            Decision::Serve => match ctx.consensus.read_index().await {
                Ok(_) => {
                    sends += 1;
                    asked = true;
                    let mut again = parts.clone();
                    again.uri = uri;
                    let response = next.clone().run(Request::from_parts(again, Body::empty())).await;
                    match response.extensions().get::<Elsewhere>() {
                        None if hides_outcome(kind, maybe_done, response.status()) => {
                            return Err(given_up(kind, maybe_done, &last, &prepared, &parts).await);
                        }
                        None => return Ok(response),
                        // Who passed it on decides.
                        Some(_) if forwarded => return Ok(response),
                        Some(elsewhere) => {
                            maybe_done |= elsewhere.maybe_done;
                            last = "this master lost the leadership".into();
                            hold_until = Instant::now() + ctx.options.hold;
                        }
                    }
                }
                Err(ReadError::Overloaded) if !kind.is_read() && maybe_done => {
                    return Err(given_up(kind, maybe_done, &last, &prepared, &parts).await);
                }
                Err(ReadError::Overloaded) => {
                    let detail = "too many reads wait for the quorum; repeat the request later";
                    return Err(ApiError::new(ProblemCode::Overloaded, detail));
                }
                Err(why) => last = why.to_string(),
            },
            Decision::Forward(address) => {
                let deadline = ANSWER_TIMEOUT + left.unwrap_or_default();
                let began = Instant::now();
                asked = true;
                let sent = tokio::select! {
                    sent = ctx.forwarder.send(ctx, kind, &address, &parts, uri, &prepared, deadline) => sent,
                    // It died or was cut off: do not wait for it.
                    () = leader_changed(&mut watch, &view) => Sent::Lost(format!("the leader changed while {address} served it")),
                    () = ctx.stopping.cancelled(), if wait.is_some() => {
                        return Err(ApiError::new(ProblemCode::Draining, "this master is stopping; poll another one"));
                    }
                };
                match sent {
                    Sent::Answer(response) if hides_outcome(kind, maybe_done, response.status()) => {
                        ctx.metrics.forward_failures.inc();
                        return Err(given_up(kind, maybe_done, &last, &prepared, &parts).await);
                    }
                    Sent::Answer(response) => {
                        ctx.metrics.forwarded.inc();
                        return Ok(response);
                    }
                    Sent::NotDone(why) => last = why,
                    Sent::Declined(why) => {
                        // While it held a long poll there was a leader.
                        hold_until += began.elapsed();
                        last = why;
                    }
                    Sent::Lost(why) => {
                        sends += 1;
                        maybe_done = true;
                        last = why;
                        hold_until = Instant::now() + ctx.options.hold;
                    }
                }
                ctx.metrics.forward_failures.inc();
            }
            Decision::Wait => {}
            Decision::Refuse => {
                let detail = format!("master {own_id} does not lead, and the request was passed on once");
                return Err(ApiError::new(ProblemCode::NoLeader, detail));
            }
        }
        if Instant::now() >= hold_until || sends >= MAX_SENDS {
            return Err(given_up(kind, maybe_done, &last, &prepared, &parts).await);
        }
        let pause = PAUSE.min(hold_until.saturating_duration_since(Instant::now()));
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = leader_changed(&mut watch, &view) => {}
        }
    }
}

/// The version of the job that a long poll is about, as applied here when it comes: 0 if it is not known here (yet).
/// It is no later than what a leader would have said, so that a poll which goes on from it at the next leader misses
/// nothing; at worst it is answered at once with a change that came just before it.
async fn version_now(ctx: &MasterContext, parts: &mut Parts, params: &Params) -> u64 {
    let id = match params.get("job_id") {
        Some(id) => Some(id.to_owned()),
        None => Path::<String>::from_request_parts(parts, &())
            .await
            .ok()
            .map(|Path(id)| id),
    };
    let state = ctx.consensus.state();
    id.and_then(|id| JobId::parse(&id).ok())
        .and_then(|id| Some(state.job(&id)?.version))
        .unwrap_or(0)
}

/// Reads the body and does the checks that need no leader.
async fn prepare(ctx: &MasterContext, kind: Kind, parts: &Parts, body: Body) -> Result<Prepared, ApiError> {
    if kind == Kind::Create
        && let Err(error) = body::check_content_type(&parts.headers)
    {
        body::refuse(&parts.headers, body).await;
        return Err(error);
    }
    let body = match kind {
        Kind::Create => ctx.bodies.read(&parts.headers, body, MAX_BODY_BYTES).await?,
        Kind::Membership => {
            ctx.bodies
                .read(&parts.headers, body, MAX_EMPTY_BODY_BYTES)
                .await?
        }
        Kind::Read | Kind::Cancel | Kind::Download => {
            ctx.bodies
                .skip(&parts.headers, body, MAX_EMPTY_BODY_BYTES)
                .await?;
            HeldBody::default()
        }
    };
    let passed_on = parts
        .headers
        .get(HEADER_GENERATED_JOB_ID)
        .filter(|_| parts.headers.contains_key(HEADER_FORWARDED_BY));
    let generated_job_id = passed_on
        .and_then(|v| JobId::parse(v.to_str().ok()?).ok())
        .unwrap_or_else(JobId::generate);
    Ok(Prepared {
        body,
        generated_job_id,
    })
}

async fn wait_applied(ctx: &MasterContext, min_index: u64) -> Result<(), ApiError> {
    let mut applied = ctx.consensus.applied();
    match tokio::time::timeout(MIN_INDEX_WAIT, applied.reached(min_index)).await {
        Ok(true) => Ok(()),
        _ => {
            let applied = ctx.consensus.state().applied_index;
            let detail = format!(
                "this master has applied index {applied}, min_index is {min_index}; ask another one, or later"
            );
            Err(ApiError::new(ProblemCode::NotCaughtUp, detail))
        }
    }
}

/// Resolves when there is another leader than `from` knew, or this master becomes it.
async fn leader_changed(watch: &mut tokio::sync::watch::Receiver<Leadership>, from: &Leadership) {
    let changed = watch.wait_for(|view| {
        (view.is_serving && !from.is_serving) || (view.leader.is_some() && view.leader != from.leader)
    });
    if changed.await.is_err() {
        // Consensus is gone; what waits beside this decides.
        std::future::pending::<()>().await;
    }
}

/// Whether this answer to a repeat says that nothing was done, which is true of the repeat only: an earlier send of
/// the same write was lost and may have done it.
fn hides_outcome(kind: Kind, maybe_done: bool, status: StatusCode) -> bool {
    let nothing_done = matches!(
        status,
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
    );
    !kind.is_read() && maybe_done && nothing_done
}

async fn given_up(kind: Kind, maybe_done: bool, last: &str, prepared: &Prepared, parts: &Parts) -> ApiError {
    if kind.is_read() || !maybe_done {
        return ApiError::new(
            ProblemCode::NoLeader,
            format!("{last}; nothing was done, repeat the request"),
        );
    }
    if kind == Kind::Membership {
        return ApiError::outcome_unknown_with(format!(
            "{last}; look at the cluster's status, or repeat the request: one that finds its wish fulfilled changes nothing"
        ));
    }
    let job = match kind {
        Kind::Create => Some(
            super::create::peek_job_id(&prepared.body)
                .await
                .unwrap_or_else(|| prepared.generated_job_id.to_string()),
        ),
        // `…/jobs/{job_id}/cancel`
        _ => {
            let id = parts.uri.path().rsplit('/').nth(1).unwrap_or_default();
            JobId::parse(id).ok().map(|id| id.to_string())
        }
    };
    let error = ApiError::outcome_unknown(last);
    match job {
        Some(job) => error.with_job(job),
        None => error,
    }
}

fn with_query(uri: &Uri, query: &str) -> Uri {
    format!("{}?{query}", uri.path())
        .parse()
        .unwrap_or_else(|_| uri.clone())
}

/// Headers that belong to one connection whether `Connection` names them or not (RFC 9110, 7.6.1), and what the
/// client computes itself.
fn is_hop_by_hop(name: &HeaderName) -> bool {
    const NAMES: [&str; 11] = [
        "connection",
        "proxy-connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "content-length",
        "expect",
    ];
    NAMES.contains(&name.as_str()) || name == header::HOST
}

impl Forwarder {
    #[allow(
        clippy::too_many_arguments,
        reason = "what one hop needs, each from another place"
    )]
    async fn send(
        &self,
        ctx: &MasterContext,
        kind: Kind,
        address: &str,
        parts: &Parts,
        uri: Uri,
        prepared: &Prepared,
        deadline: Duration,
    ) -> Sent {
        let path = uri.path_and_query().map_or("/", |p| p.as_str());
        let mut request = match axum::http::Request::builder()
            .method(parts.method.clone())
            .uri(format!("http://{address}{path}"))
            .body(Full::new(prepared.body.bytes.clone()))
        {
            Ok(request) => request,
            Err(e) => return Sent::NotDone(format!("cannot address the leader at {address}: {e}")),
        };
        copy_headers(&parts.headers, request.headers_mut());
        request.headers_mut().insert(
            HEADER_FORWARDED_BY,
            HeaderValue::from(ctx.consensus.identity().node_id),
        );
        if let Ok(id) = HeaderValue::from_str(prepared.generated_job_id.as_str()) {
            request.headers_mut().insert(HEADER_GENERATED_JOB_ID, id);
        }
        let exchange = async {
            let response = match self.client.request(request).await {
                Ok(response) => response,
                Err(e) if e.is_connect() => {
                    return Sent::NotDone(format!(
                        "the leader at {address} cannot be reached: {}",
                        chain(&e)
                    ));
                }
                Err(e) => {
                    return Sent::Lost(format!(
                        "the connection to the leader at {address} broke: {}",
                        chain(&e)
                    ));
                }
            };
            let (head, body) = response.into_parts();
            if kind == Kind::Download && head.status.is_success() {
                let mut answer = Response::new(Body::new(body));
                copy_headers(&head.headers, answer.headers_mut());
                return Sent::Answer(answer);
            }
            let body = match Limited::new(body, MAX_ANSWER_BYTES).collect().await {
                Ok(body) => body.to_bytes(),
                Err(e) => return Sent::Lost(format!("the answer of the leader at {address} broke off: {e}")),
            };
            match head.status {
                // Its own words for: nothing was done.
                StatusCode::SERVICE_UNAVAILABLE => {
                    Sent::Declined(format!("the master at {address} does not lead any more"))
                }
                // It lost the leadership meanwhile: the next leader knows.
                StatusCode::GATEWAY_TIMEOUT => {
                    Sent::Lost(format!("the leader at {address} does not know the outcome"))
                }
                status => {
                    let mut answer = Response::new(Body::from(body));
                    *answer.status_mut() = status;
                    copy_headers(&head.headers, answer.headers_mut());
                    Sent::Answer(answer)
                }
            }
        };
        match tokio::time::timeout(deadline, exchange).await {
            Ok(sent) => sent,
            Err(_) => Sent::Lost(format!(
                "the leader at {address} did not answer within {} s",
                deadline.as_secs()
            )),
        }
    }
}

/// Everything but what belongs to the connection it came on.
fn copy_headers(from: &HeaderMap, to: &mut HeaderMap) {
    let named: Vec<HeaderName> = from
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|option| option.trim().parse().ok())
        .collect();
    for (name, value) in from {
        if !is_hop_by_hop(name) && !named.contains(name) {
            to.append(name.clone(), value.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consensus::Master;

    fn led_by(leader: Option<u64>, is_serving: bool) -> Leadership {
        let leader = leader.map(|id| Master {
            id,
            rpc_address: format!("127.0.0.1:{}", 50050 + id),
            http_address: format!("127.0.0.1:{}", 9000 + id),
        });
        Leadership {
            term: 1,
            leader,
            is_leader: is_serving,
            is_serving,
        }
    }

    #[test]
    fn decisions() {
        let table = [
            (led_by(Some(1), true), false, Decision::Serve),
            (led_by(Some(1), true), true, Decision::Serve),
            (
                led_by(Some(2), false),
                false,
                Decision::Forward("127.0.0.1:9002".into()),
            ),
            (led_by(Some(2), false), true, Decision::Refuse),
            (led_by(None, false), false, Decision::Wait),
            (led_by(None, false), true, Decision::Refuse),
            // Elected, but not caught up with itself: never sent to itself.
            (led_by(Some(1), false), false, Decision::Wait),
        ];
        for (view, forwarded, want) in table {
            assert_eq!(decide(1, &view, forwarded), want, "{view:?} {forwarded}");
        }
    }

    #[tokio::test]
    async fn giving_up_tells_whether_something_may_have_happened() {
        let (parts, ()) = axum::http::Request::post("/api/v1/model-distribution/jobs/j7/cancel")
            .body(())
            .unwrap()
            .into_parts();
        let held = |text: &'static str| HeldBody::for_tests(Bytes::from_static(text.as_bytes()));
        let generated = JobId::parse("generated").unwrap();
        let prepared = |text| Prepared {
            body: held(text),
            generated_job_id: generated.clone(),
        };
        let case = async |kind, maybe_done, text| {
            let error = given_up(kind, maybe_done, "it broke", &prepared(text), &parts).await;
            (error.problem().status, error.problem().job_id.clone())
        };
        assert_eq!(case(Kind::Read, true, "").await, (503, None));
        assert_eq!(case(Kind::Create, false, "").await, (503, None));
        assert_eq!(
            case(
                Kind::Create,
                true,
                r#"{"manifest": {"job_id": "no"}, "job_id": "mine"}"#
            )
            .await,
            (504, Some("mine".into()))
        );
        assert_eq!(
            case(Kind::Create, true, "{}").await,
            (504, Some("generated".into()))
        );
        assert_eq!(case(Kind::Cancel, true, "").await, (504, Some("j7".into())));
    }

    #[test]
    fn an_answer_that_nothing_was_done_hides_nothing() {
        for (kind, maybe_done, status, hides) in [
            (Kind::Create, true, 429, true),
            (Kind::Create, true, 408, true),
            (Kind::Create, false, 408, false),
            (Kind::Membership, true, 503, true),
            (Kind::Download, true, 503, false),
            (Kind::Cancel, true, 503, true),
            (Kind::Create, true, 201, false),
            (Kind::Create, true, 409, false),
            (Kind::Create, false, 429, false),
            (Kind::Read, true, 429, false),
        ] {
            let status_code = StatusCode::from_u16(status).unwrap();
            assert_eq!(
                hides_outcome(kind, maybe_done, status_code),
                hides,
                "{kind:?} {maybe_done} {status}"
            );
        }
    }

    #[test]
    fn hop_by_hop_headers_stay() {
        let mut from = HeaderMap::new();
        from.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        from.insert(header::CONNECTION, HeaderValue::from_static("close, X-One"));
        from.append(header::CONNECTION, HeaderValue::from_static("x-two"));
        from.insert("x-one", HeaderValue::from_static("1"));
        from.insert("x-two", HeaderValue::from_static("2"));
        from.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        from.insert(header::HOST, HeaderValue::from_static("a"));
        let mut to = HeaderMap::new();
        copy_headers(&from, &mut to);
        assert_eq!(to.len(), 1);
        assert!(to.contains_key(header::CONTENT_TYPE));
    }
}
