//! Probes, and what monitoring scripts written for Mooncake ask. All of them answer for *this* master and are
//! never passed on.

use super::error::ApiError;
use crate::{
    consensus::{Master, NotReady},
    context::{LEADER_WITHIN, MasterContext},
};
use axum::{
    Json,
    extract::State,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use mooncake_proto::api::ProblemCode;
use serde::Serialize;
use std::sync::Arc;

/// `/livez`: the process answers.
pub(super) async fn livez() -> &'static str {
    "ok\n"
}

/// `/readyz`: caught up, not draining, a leader known within the last 5 s; on the leader, a quorum within the last
/// second.
pub(super) async fn readyz(State(ctx): State<Arc<MasterContext>>) -> Result<&'static str, ApiError> {
    not_ready(&ctx).map_or(Ok("ok\n"), Err)
}

fn not_ready(ctx: &MasterContext) -> Option<ApiError> {
    if ctx.is_draining() {
        return Some(ApiError::new(
            ProblemCode::Draining,
            "this master is stopping; another one answers",
        ));
    }
    let why = ctx.consensus.readiness(LEADER_WITHIN).err()?;
    let code = match why {
        NotReady::NoLeader | NotReady::LeaderSilent { .. } => ProblemCode::NoLeader,
        NotReady::NotInitialised | NotReady::Recovering | NotReady::Behind { .. } => ProblemCode::NotCaughtUp,
    };
    Some(ApiError::new(code, format!("this master is not ready: {why}")))
}

/// `/leaderz`: 200 only on a master that a quorum confirms as the leader now.
pub(super) async fn leaderz(State(ctx): State<Arc<MasterContext>>) -> Result<&'static str, ApiError> {
    let view = ctx.consensus.leadership().borrow().clone();
    if !view.is_serving {
        return Err(not_leading(
            ctx.consensus.identity().node_id,
            view.leader.as_ref(),
        ));
    }
    match ctx.consensus.read_index().await {
        Ok(_) => Ok("ok\n"),
        Err(why) => Err(ApiError::new(ProblemCode::NoLeader, why.to_string())),
    }
}

fn not_leading(own_id: u64, leader: Option<&Master>) -> ApiError {
    match leader {
        Some(leader) if leader.id != own_id => ApiError::new(
            ProblemCode::NotLeader,
            format!(
                "master {own_id} does not lead; master {} at {} does",
                leader.id, leader.http_address
            ),
        ),
        Some(_) => ApiError::new(
            ProblemCode::NoLeader,
            format!(
                "master {own_id} was elected and has not applied all that was acknowledged before: ask again"
            ),
        ),
        None => ApiError::new(
            ProblemCode::NoLeader,
            format!("master {own_id} does not lead and knows nobody who does: ask again"),
        ),
    }
}

#[derive(Serialize)]
struct Health {
    status: &'static str,
    role: &'static str,
    leader_address: Option<String>,
    service_ready: bool,
}

fn health_of(ctx: &MasterContext) -> Health {
    let ready = not_ready(ctx).is_none();
    Health {
        status: if ready { "ok" } else { "not_ready" },
        role: role_of(ctx),
        leader_address: ctx
            .consensus
            .leadership()
            .borrow()
            .leader
            .as_ref()
            .map(|l| l.http_address.clone()),
        service_ready: ready,
    }
}

fn is_leader(ctx: &MasterContext) -> bool {
    ctx.consensus.leadership().borrow().is_serving
}

fn role_of(ctx: &MasterContext) -> &'static str {
    if is_leader(ctx) { "leader" } else { "standby" }
}

/// `/health`: 200 if ready, else 503; the body says why in the same words either way.
pub(super) async fn health(State(ctx): State<Arc<MasterContext>>) -> Response {
    let health = health_of(&ctx);
    let status = if health.service_ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (status, Json(health)).into_response()
}

/// `/role`.
pub(super) async fn role(State(ctx): State<Arc<MasterContext>>) -> Response {
    Json(serde_json::json!({ "role": role_of(&ctx) })).into_response()
}

/// `/leader`.
pub(super) async fn leader(State(ctx): State<Arc<MasterContext>>) -> Response {
    let leader = ctx.consensus.leadership().borrow().leader.clone();
    let body = serde_json::json!({
        "leader_id": leader.as_ref().map(|l| l.id),
        "leader_address": leader.as_ref().map(|l| &l.http_address),
        "leader_rpc_address": leader.as_ref().map(|l| &l.rpc_address),
    });
    let status = if leader.is_some() {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (status, Json(body)).into_response()
}

/// `/metrics`.
pub(super) async fn metrics(State(ctx): State<Arc<MasterContext>>) -> Response {
    let text = ctx.metrics.encode(&ctx);
    let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_lead_says_who_does() {
        let master = |id| Master {
            id,
            rpc_address: "127.0.0.1:50052".into(),
            http_address: "127.0.0.1:9013".into(),
        };
        let error = not_leading(1, Some(&master(2)));
        assert_eq!(error.problem().code, ProblemCode::NotLeader);
        assert!(error.problem().detail.contains("127.0.0.1:9013"));
        for leader in [None, Some(master(1))] {
            let error = not_leading(1, leader.as_ref());
            assert_eq!(error.problem().code, ProblemCode::NoLeader, "{leader:?}");
        }
    }
}
