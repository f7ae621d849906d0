//! The masters themselves: members, leadership, backup.

use super::{
    ReadAt, body::check_content_type, error::ApiError, forward::Prepared, json_at, params::Params,
    read::cluster_status, work::at_most,
};
use crate::{
    backup,
    consensus::{ChangeError, Changed, TransferError},
    context::MasterContext,
};
use axum::{
    Extension,
    body::Body,
    extract::State,
    http::{HeaderMap, HeaderValue, Uri, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use mooncake_proto::{
    api::{AddMember, MemberId, MembershipAnswer, ProblemCode, TransferLeadership},
    http::LEAST_BYTES_PER_S,
    text::cut,
};
use serde::de::DeserializeOwned;
use std::{convert::Infallible, sync::Arc, time::Duration};
use tokio::{
    sync::{Semaphore, mpsc},
    time::Instant,
};
use tokio_stream::wrappers::ReceiverStream;

/// Backups taken at once: each holds an encoded copy of the state until its caller has it.
const MAX_BACKUPS: usize = 2;
static BACKUPS: Semaphore = Semaphore::const_new(MAX_BACKUPS);
/// Encoded copies made at once.
static ENCODING: Semaphore = Semaphore::const_new(1);
/// What is handed to the connection at once.
const PIECE_BYTES: usize = 256 << 10;
/// Longest time in which a caller takes no piece: then it has gone, and the copy of the state with it.
const PIECE_PATIENCE: Duration = Duration::from_secs(60);
/// What a caller may take for a whole backup: this, and the time of its size at [`LEAST_BYTES_PER_S`]. There is room for few
/// callers at once, and two that take a piece now and then must not keep the others out for hours.
const DOWNLOAD_GRACE: Duration = Duration::from_secs(60);

/// `GET /api/v1/cluster/members`: the cluster as its leader knows it, with how far each master is.
pub(super) async fn members(State(ctx): State<Arc<MasterContext>>, uri: Uri) -> Result<Response, ApiError> {
    Params::parse(uri.query())?.only(&[])?;
    let status = cluster_status(&ctx, false);
    Ok(json_at(status.applied_index, &status))
}

/// `POST /api/v1/cluster/add`.
pub(super) async fn add(
    State(ctx): State<Arc<MasterContext>>,
    headers: HeaderMap,
    Extension(prepared): Extension<Prepared>,
) -> Result<Response, ApiError> {
    let AddMember { rpc_address, id } = parse(&headers, &prepared)?;
    answer(&ctx, ctx.consensus.add_learner(&rpc_address, id).await)
}

/// `POST /api/v1/cluster/promote`.
pub(super) async fn promote(
    State(ctx): State<Arc<MasterContext>>,
    headers: HeaderMap,
    Extension(prepared): Extension<Prepared>,
) -> Result<Response, ApiError> {
    let MemberId { id } = parse(&headers, &prepared)?;
    answer(&ctx, ctx.consensus.promote(id).await)
}

/// `POST /api/v1/cluster/remove`.
pub(super) async fn remove(
    State(ctx): State<Arc<MasterContext>>,
    headers: HeaderMap,
    Extension(prepared): Extension<Prepared>,
) -> Result<Response, ApiError> {
    let MemberId { id } = parse(&headers, &prepared)?;
    answer(&ctx, ctx.consensus.remove(id).await)
}

/// `POST /api/v1/cluster/transfer`.
pub(super) async fn transfer(
    State(ctx): State<Arc<MasterContext>>,
    headers: HeaderMap,
    Extension(prepared): Extension<Prepared>,
) -> Result<Response, ApiError> {
    let wish: TransferLeadership = parse(&headers, &prepared)?;
    if wish.to.is_none() && wish.from.is_none() {
        let detail = "name `to`, who shall lead, or `from`, who shall lead no more: without either a repeated request \
                      would move leadership twice";
        return Err(ApiError::new(ProblemCode::InvalidRequest, detail));
    }
    // The leader runs this.
    let me = ctx.consensus.identity().node_id;
    let done = match (wish.to, wish.from) {
        (Some(to), _) => to == me,
        (None, from) => from != Some(me),
    };
    if done {
        let detail = format!("master {me} leads already");
        return answer(
            &ctx,
            Ok(Changed {
                id: me,
                changed: false,
                detail,
            }),
        );
    }
    match ctx.consensus.transfer_leader(wish.to).await {
        Ok(leader) => {
            let detail = format!("leadership moved from master {me} to master {}", leader.id);
            answer(
                &ctx,
                Ok(Changed {
                    id: leader.id,
                    changed: true,
                    detail,
                }),
            )
        }
        Err(error @ TransferError::BadTarget(_)) => {
            Err(ApiError::new(ProblemCode::MemberNotFound, error.to_string()))
        }
        Err(TransferError::NotLeader { .. } | TransferError::Stopped) => Err(ApiError::not_leader()),
        Err(error @ TransferError::Unreachable { .. }) => Err(ApiError::new(
            ProblemCode::MemberUnreachable,
            format!("leadership was not handed over: {error}"),
        )),
        // Not done as asked, and not undone: asked for it again, the one that leads now hands over to the right one.
        Err(error @ TransferError::Elsewhere { .. }) => Err(ApiError::outcome_unknown_with(format!(
            "{error}; repeat the request"
        ))),
        Err(error @ (TransferError::NoCandidate | TransferError::Behind { .. })) => Err(ApiError::new(
            ProblemCode::MemberBehind,
            format!("leadership was not handed over: {error}"),
        )),
        Err(error @ TransferError::TimedOut(_)) => Err(ApiError::new(
            ProblemCode::MemberUnreachable,
            format!("{error}: is the other master up and close behind the log? See the cluster's status"),
        )),
    }
}

fn answer(ctx: &MasterContext, changed: Result<Changed, ChangeError>) -> Result<Response, ApiError> {
    let Changed { id, changed, detail } = changed.map_err(change_error)?;
    if changed {
        tracing::info!(member = id, "{detail}");
    }
    let cluster = cluster_status(ctx, false);
    let index = cluster.applied_index;
    let body = MembershipAnswer {
        changed,
        id,
        detail,
        cluster,
    };
    Ok(json_at(index, &body))
}

fn change_error(error: ChangeError) -> ApiError {
    let code = match &error {
        ChangeError::NotLeader { .. } | ChangeError::Stopped => return ApiError::not_leader(),
        ChangeError::OutcomeUnknown(why) => {
            return ApiError::outcome_unknown_with(format!(
                "{why}; look at the cluster's status, or repeat the request: one that finds its wish fulfilled changes \
                 nothing"
            ));
        }
        ChangeError::InProgress => ProblemCode::ChangeInProgress,
        ChangeError::NotFound(_) => ProblemCode::MemberNotFound,
        ChangeError::Conflict(_) => ProblemCode::MemberConflict,
        ChangeError::Unreachable(_) => ProblemCode::MemberUnreachable,
        ChangeError::Behind(_) => ProblemCode::MemberBehind,
        ChangeError::QuorumAtRisk(_) => ProblemCode::QuorumAtRisk,
    };
    ApiError::new(code, error.to_string())
}

fn parse<T: DeserializeOwned>(headers: &HeaderMap, prepared: &Prepared) -> Result<T, ApiError> {
    check_content_type(headers)?;
    serde_json::from_slice(&prepared.body.bytes).map_err(|error| {
        let detail = format!(
            "the body is not what this request takes: {}",
            cut(&error.to_string())
        );
        ApiError::new(ProblemCode::InvalidJson, detail)
    })
}

/// `GET /api/v1/cluster/snapshot`: a backup. Linearizable, it holds everything acknowledged before; stale, what the
/// master asked has applied.
pub(super) async fn snapshot(State(ctx): State<Arc<MasterContext>>, uri: Uri) -> Result<Response, ApiError> {
    Params::parse(uri.query())?.only(&[])?;
    let permit = BACKUPS.try_acquire().map_err(|_| {
        let detail = format!("{MAX_BACKUPS} backups are being taken already; repeat the request later");
        ApiError::new(ProblemCode::Overloaded, detail)
    })?;
    let made = at_most(&ENCODING, "backup", move || backup::take(&ctx.consensus)).await?;
    let backup::Taken {
        index,
        size_bytes,
        parts,
    } = made;
    tracing::info!(index, size_bytes, "a backup is taken");
    let (pieces, stream) = mpsc::channel::<Result<Bytes, Infallible>>(2);
    tokio::spawn(async move {
        let _permit = permit;
        if let Err(why) = send(parts, pieces).await {
            // What was sent is too short, and the reader sees that.
            tracing::warn!(index, why, "a backup did not reach its caller");
        }
    });
    let mut response = Body::from_stream(ReceiverStream::new(stream)).into_response();
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(size_bytes));
    response.extensions_mut().insert(ReadAt(index));
    Ok(response)
}

async fn send(
    parts: [Bytes; 3],
    pieces: mpsc::Sender<Result<Bytes, Infallible>>,
) -> Result<(), &'static str> {
    let size_bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
    let pace = Duration::from_secs(size_bytes / LEAST_BYTES_PER_S);
    let until = Instant::now() + DOWNLOAD_GRACE + pace;
    for mut part in parts {
        while !part.is_empty() {
            let piece = part.split_to(part.len().min(PIECE_BYTES));
            let patience = until.min(Instant::now() + PIECE_PATIENCE);
            match tokio::time::timeout_at(patience, pieces.send(Ok(piece))).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Err("the caller went away"),
                Err(_) if patience == until => return Err("the caller is too slow"),
                Err(_) => return Err("the caller stood still"),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes a piece each `pause`; gives how the sending ended, after how long, and how many bytes came.
    async fn taken_every(pause: Duration, size_bytes: usize) -> (Result<(), &'static str>, Duration, usize) {
        let (pieces, mut taken) = mpsc::channel(2);
        let begin = Instant::now();
        let sending = tokio::spawn(async move {
            let parts = [
                Bytes::from_static(b"head"),
                vec![7; size_bytes].into(),
                Bytes::from_static(b"end"),
            ];
            (send(parts, pieces).await, begin.elapsed())
        });
        let mut bytes = 0;
        while let Some(Ok(piece)) = taken.recv().await {
            bytes += piece.len();
            tokio::time::sleep(pause).await;
        }
        let (ended, after) = sending.await.unwrap();
        (ended, after, bytes)
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_caller_gives_the_room_back() {
        let size_bytes = 30 * LEAST_BYTES_PER_S as usize;
        let limit = DOWNLOAD_GRACE + Duration::from_secs(30);
        // Always within the patience for one piece.
        let (ended, after, bytes) = taken_every(PIECE_PATIENCE / 2, size_bytes).await;
        assert_eq!(ended, Err("the caller is too slow"));
        assert_eq!(after, limit);
        assert!(bytes < size_bytes);
        let (ended, after, _) = taken_every(PIECE_PATIENCE * 2, size_bytes).await;
        assert_eq!((ended, after), (Err("the caller stood still"), PIECE_PATIENCE));
        // A little above the least pace.
        let (ended, _, bytes) = taken_every(Duration::from_millis(1900), size_bytes).await;
        assert_eq!((ended, bytes), (Ok(()), size_bytes + 7));
    }
}
