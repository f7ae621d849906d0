//! Reading, listing, waiting for and canceling jobs.

use super::{
    error::ApiError,
    json_at,
    params::{Consistency, Params, Segment, job_token},
    read::with_live,
};
use crate::{consensus::ProposeError, context::MasterContext};
use axum::{Extension, extract::State, http::Uri, response::Response};
use mooncake_proto::{
    api::{JobList, JobStatus, ProblemCode},
    ids::JobId,
    text::cut,
};
use mooncake_state::{Command, Live, Reply};
use std::{pin::pin, sync::Arc, time::Duration};
use tokio::time::Instant;

/// Jobs looked at for one page: a rare filter gives a short page and a token rather than a long wait.
const MAX_SCAN: usize = 20_000;

/// `GET /api/v1/model-distribution/jobs`, with `job_id` (the RFC's form) or as a list.
pub(super) async fn get_or_list(
    State(ctx): State<Arc<MasterContext>>,
    Extension(consistency): Extension<Consistency>,
    uri: Uri,
) -> Result<Response, ApiError> {
    let params = Params::parse(uri.query())?;
    if let Some(id) = params.get("job_id") {
        params.only(&["job_id", "wait", "since"])?;
        return one(&ctx, id, &params, consistency).await;
    }
    params.only(&["job_id", "status", "model_id", "node", "limit", "page_token"])?;
    list(&ctx, &params, consistency)
}

/// `GET /api/v1/model-distribution/jobs/{job_id}`.
pub(super) async fn get(
    State(ctx): State<Arc<MasterContext>>,
    Extension(consistency): Extension<Consistency>,
    Segment(id): Segment,
    uri: Uri,
) -> Result<Response, ApiError> {
    let params = Params::parse(uri.query())?;
    params.only(&["wait", "since"])?;
    one(&ctx, &id, &params, consistency).await
}

async fn one(
    ctx: &MasterContext,
    id: &str,
    params: &Params,
    consistency: Consistency,
) -> Result<Response, ApiError> {
    let id = JobId::parse(id).map_err(|why| ApiError::parameter(format!("job_id: {}", cut(&why))))?;
    let wait = params.wait()?.unwrap_or_default();
    let since = params.since()?;
    let linearizable = consistency == Consistency::Linearizable;
    if wait.is_zero() {
        snapshot_of(ctx, &id, linearizable)
    } else {
        long_poll(ctx, &id, wait, since, linearizable).await
    }
}

/// Answers once the job's version is above `since` (none: above what it is now), the job has ended, or `wait`
/// is over.
async fn long_poll(
    ctx: &MasterContext,
    id: &JobId,
    wait: Duration,
    since: Option<u64>,
    linearizable: bool,
) -> Result<Response, ApiError> {
    let deadline = Instant::now() + wait;
    let waiting = ctx.waiters.register(id);
    let mut watch = ctx.consensus.leadership();
    let mut since = since;
    loop {
        let mut notified = pin!(waiting.notified());
        notified.as_mut().enable();
        let (version, ended) = {
            let state = ctx.consensus.state();
            let job = state.job(id).ok_or_else(|| not_found(id))?;
            (job.version, job.status.is_terminal())
        };
        let since = *since.get_or_insert(version);
        if version > since || ended {
            return snapshot_of(ctx, id, linearizable);
        }
        tokio::select! {
            () = notified => {}
            () = tokio::time::sleep_until(deadline) => break,
            () = ctx.stopping.cancelled() => break,
            // The next leader knows what happens from here on.
            _ = watch.wait_for(|view| !view.is_serving), if linearizable => return Err(ApiError::not_leader()),
        }
    }
    // "Nothing happened" is a read too: a leader that was cut off does not know.
    if linearizable && ctx.consensus.read_index().await.is_err() {
        return Err(ApiError::not_leader());
    }
    snapshot_of(ctx, id, linearizable)
}

/// The snapshot as applied here, with live progress where this master leads.
pub(super) fn snapshot_of(ctx: &MasterContext, id: &JobId, live: bool) -> Result<Response, ApiError> {
    let consistency = if live {
        Consistency::Linearizable
    } else {
        Consistency::Stale { min_index: 0 }
    };
    with_live(ctx, consistency, |state, live| {
        match state.job_snapshot(id, live) {
            Some(snapshot) => Ok(json_at(state.applied_index, &snapshot)),
            None => Err(not_found(id).at(state.applied_index)),
        }
    })
}

fn not_found(id: &JobId) -> ApiError {
    let detail = format!("there is no job '{id}'; GET /api/v1/model-distribution/jobs lists those there are");
    ApiError::new(ProblemCode::JobNotFound, detail).with_job(id.as_str())
}

fn list(ctx: &MasterContext, params: &Params, consistency: Consistency) -> Result<Response, ApiError> {
    let limit = params.limit()?;
    let status = params.status()?;
    let node = params.node()?;
    let model_id = params.get("model_id");
    let after = params.job_token()?;
    Ok(with_live(ctx, consistency, |state, live| {
        let mut jobs = Vec::new();
        let mut next_page_token = None;
        let mut last = None;
        for (scanned, (id, job)) in state.jobs_newest_first(after).enumerate() {
            if jobs.len() == limit || scanned == MAX_SCAN {
                next_page_token = last;
                break;
            }
            last = Some(job_token(job.created_ms(), id));
            let wanted = status.is_none_or(|s| s == job.status)
                && model_id.is_none_or(|m| m == job.model.model_id)
                && node.as_ref().is_none_or(|n| job.position(n).is_some());
            if wanted {
                jobs.extend(state.job_summary(id, live));
            }
        }
        json_at(
            state.applied_index,
            &JobList {
                jobs,
                next_page_token,
            },
        )
    }))
}

/// `POST /api/v1/model-distribution/jobs/{job_id}/cancel`.
pub(super) async fn cancel(
    State(ctx): State<Arc<MasterContext>>,
    Segment(id): Segment,
) -> Result<Response, ApiError> {
    let id = JobId::parse(&id).map_err(|why| ApiError::parameter(format!("job_id: {}", cut(&why))))?;
    let progress = {
        let facts = ctx.sessions.facts();
        let state = ctx.consensus.state();
        let job = state.job(&id).ok_or_else(|| not_found(&id))?;
        match job.status {
            JobStatus::Canceled => {
                drop(state);
                drop(facts);
                return snapshot_of(&ctx, &id, true);
            }
            status if status.is_terminal() => return Err(terminal(&id, status)),
            _ => job
                .nodes()
                .enumerate()
                .filter_map(|(at, node)| {
                    let bytes = facts.progress(&job.model, node)?.verified_bytes;
                    Some((u32::try_from(at).ok()?, bytes))
                })
                .collect(),
        }
    };
    let command = Command::CancelJob {
        job: id.clone(),
        progress,
        now_ms: ctx.now_ms(),
    };
    let committed = ctx
        .consensus
        .propose(&command)
        .await
        .map_err(|e| propose_error(e).with_job(id.as_str()))?;
    match committed.reply {
        Reply::JobNotFound => Err(not_found(&id)),
        Reply::JobTerminal { status } => Err(terminal(&id, status)),
        // Also where another cancel came between the look and the command.
        Reply::Done => {
            tracing::info!(job = %id, "job canceled");
            snapshot_of(&ctx, &id, true)
        }
        other => Err(ApiError::new(
            ProblemCode::Internal,
            format!("the state machine answered {other:?} to a cancel"),
        )
        .with_job(id.as_str())),
    }
}

fn terminal(id: &JobId, status: JobStatus) -> ApiError {
    let status = format!("{status:?}").to_lowercase();
    let detail = format!("job '{id}' is {status}: only a job that has not ended can be canceled");
    ApiError::new(ProblemCode::JobTerminal, detail).with_job(id.as_str())
}

/// A proposal without an answer.
pub(super) fn propose_error(error: ProposeError) -> ApiError {
    match error {
        ProposeError::NotLeader { .. } | ProposeError::Stopped => ApiError::not_leader(),
        ProposeError::OutcomeUnknown { reason } => ApiError::outcome_unknown(&reason),
        ProposeError::Overloaded => ApiError::new(
            ProblemCode::Overloaded,
            "too many writes wait for the log; repeat the request later",
        ),
        error @ ProposeError::TooLarge { .. } => ApiError::new(ProblemCode::Internal, error.to_string()),
    }
}
