//! Nodes, models, objects, the cluster.

use super::{
    error::ApiError,
    json_at,
    params::{Consistency, Params, model_token},
};
use crate::{consensus::StateGuard, context::MasterContext};
use axum::{
    Extension, Json,
    extract::{Path, State},
    http::Uri,
    response::Response,
};
use mooncake_proto::{
    api::{ClusterStatus, MemberView, ModelList, ObjectLookup, ObjectView, ProblemCode},
    ids::{ModelRef, NodeId},
    manifest::MAX_OBJECT_ID_BYTES,
};
use mooncake_state::{Bytes, Live};
use std::{ops::Deref, sync::Arc};

/// `GET /api/v1/nodes`.
pub(super) async fn nodes(
    State(ctx): State<Arc<MasterContext>>,
    Extension(consistency): Extension<Consistency>,
    uri: Uri,
) -> Result<Response, ApiError> {
    Params::parse(uri.query())?.only(&[])?;
    Ok(with_live(&ctx, consistency, |state, live| {
        json_at(state.applied_index, &state.node_list(live))
    }))
}

/// `GET /api/v1/nodes/{node_id}`.
pub(super) async fn node(
    State(ctx): State<Arc<MasterContext>>,
    Extension(consistency): Extension<Consistency>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Response, ApiError> {
    Params::parse(uri.query())?.only(&[])?;
    let id = NodeId::parse(&id).map_err(|why| ApiError::parameter(format!("node_id: {why}")))?;
    let view = with_live(&ctx, consistency, |state, live| {
        Some(json_at(state.applied_index, &state.node_view(&id, live)?))
    });
    let missing = || {
        let detail = format!("no node '{id}' has registered; GET /api/v1/nodes lists those that have");
        ApiError::new(ProblemCode::NodeNotFound, detail)
    };
    view.ok_or_else(missing)
}

/// Reads with live facts where this master leads. The facts' lock is taken before the state's, always.
pub(super) fn with_live<T>(
    ctx: &MasterContext,
    consistency: Consistency,
    read: impl FnOnce(&StateGuard<'_>, &dyn Live) -> T,
) -> T {
    match consistency {
        Consistency::Linearizable => {
            let facts = ctx.sessions.facts();
            read(&ctx.consensus.state(), &*facts)
        }
        Consistency::Stale { .. } => read(&ctx.consensus.state(), &()),
    }
}

/// `GET /api/v1/models`, with filters `model_id`, `revision`, `format`, `provider`.
pub(super) async fn models(State(ctx): State<Arc<MasterContext>>, uri: Uri) -> Result<Response, ApiError> {
    let params = Params::parse(uri.query())?;
    params.only(&[
        "model_id",
        "revision",
        "format",
        "provider",
        "limit",
        "page_token",
    ])?;
    let limit = params.limit()?;
    let after = params.model_token()?;
    let state = ctx.consensus.state();
    let wanted = |model: &&ModelRef| {
        model
            .components()
            .iter()
            .all(|(name, is)| params.get(name).is_none_or(|w| w == *is))
    };
    let mut names = state.models_after(after.as_ref()).filter(wanted);
    let page: Vec<_> = names.by_ref().take(limit).collect();
    let next_page_token = names.next().and(page.last()).map(|last| model_token(last));
    let models = page.into_iter().filter_map(|m| state.model_view(m)).collect();
    Ok(json_at(
        state.applied_index,
        &ModelList {
            models,
            next_page_token,
        },
    ))
}

/// `GET /api/v1/objects?key=`.
pub(super) async fn objects(
    State(ctx): State<Arc<MasterContext>>,
    uri: Uri,
) -> Result<Json<ObjectLookup>, ApiError> {
    let params = Params::parse(uri.query())?;
    params.only(&["key"])?;
    let key = params
        .get("key")
        .filter(|k| !k.is_empty() && k.len() <= MAX_OBJECT_ID_BYTES);
    let detail = format!("key: give the object's id, 1 to {MAX_OBJECT_ID_BYTES} bytes");
    let key = key.ok_or_else(|| ApiError::parameter(detail))?.to_owned();
    // Manifests may be large and many: decoded outside the state's lock, one after the other.
    let looked = tokio::task::spawn_blocking(move || look_up(&ctx, key)).await;
    let found =
        looked.map_err(|e| ApiError::new(ProblemCode::Internal, format!("the object lookup failed: {e}")))?;
    if found.objects.is_empty() {
        let detail = format!("no model version has an object '{}'", found.key);
        return Err(ApiError::new(ProblemCode::ObjectNotFound, detail));
    }
    Ok(Json(found))
}

fn look_up(ctx: &MasterContext, key: String) -> ObjectLookup {
    let candidates: Vec<(ModelRef, mooncake_proto::digest::Digest, Option<Bytes>)> = {
        let state = ctx.consensus.state();
        let blob = |digest| state.blob(digest).cloned();
        state
            .artifacts()
            .map(|(model, artifact)| (model.clone(), artifact.manifest, blob(&artifact.manifest)))
            .collect()
    };
    let mut objects = Vec::new();
    for (model_ref, digest, encoded) in candidates {
        let cached = ctx.manifests.get(&digest);
        let Some(manifest) = cached.or_else(|| ctx.manifests.decode(digest, &encoded?)) else {
            continue;
        };
        let Some((file, chunk)) = manifest.find_object(&key) else {
            continue;
        };
        let file = &manifest.files[file];
        let range = file.chunk_range(chunk);
        let state = ctx.consensus.state();
        // Gone or replaced meanwhile: then it is not there.
        let Some(artifact) = state.artifact(&model_ref).filter(|a| a.manifest == digest) else {
            continue;
        };
        let nodes = state.holders(artifact).cloned().collect();
        drop(state);
        objects.push(ObjectView {
            path: file.path.clone(),
            offset_bytes: range.start,
            size_bytes: range.end - range.start,
            nodes,
            model_ref,
        });
    }
    ObjectLookup { key, objects }
}

/// `GET /api/v1/cluster`: what *this* master knows; `?digest=true` adds the state's digest (linear in the state).
pub(super) async fn cluster(
    State(ctx): State<Arc<MasterContext>>,
    uri: Uri,
) -> Result<Json<ClusterStatus>, ApiError> {
    let params = Params::parse(uri.query())?;
    params.only(&["digest"])?;
    let with_digest = match params.get("digest") {
        None | Some("false") => false,
        Some("true") => true,
        Some(other) => {
            return Err(ApiError::parameter(format!(
                "digest: '{other}' is neither true nor false"
            )));
        }
    };
    let status = tokio::task::spawn_blocking(move || cluster_status(&ctx, with_digest)).await;
    status
        .map(Json)
        .map_err(|e| ApiError::new(ProblemCode::Internal, format!("the cluster status failed: {e}")))
}

fn cluster_status(ctx: &MasterContext, with_digest: bool) -> ClusterStatus {
    let cluster = ctx.consensus.cluster();
    let (applied_index, cluster_version, recovery_epoch, state) = {
        let read = ctx.consensus.state();
        // A copy shares the blobs; the digest is computed without the lock.
        let copy = with_digest.then(|| read.deref().clone());
        (
            read.applied_index,
            read.cluster_version(),
            read.recovery_epoch(),
            copy,
        )
    };
    let leader_id = cluster.leader_id;
    let members = cluster.members.into_iter().map(|member| MemberView {
        id: member.id,
        rpc_address: member.rpc_address,
        http_address: member.http_address,
        disk_id: member.disk_id,
        role: match () {
            () if leader_id == Some(member.id) => "leader",
            () if member.is_voter => "follower",
            () => "learner",
        }
        .to_owned(),
        lag: member.lag,
    });
    ClusterStatus {
        cluster_id: ctx.options.cluster_id.clone(),
        served_by: ctx.consensus.identity().node_id,
        term: cluster.term,
        leader_id,
        applied_index,
        last_log_index: cluster.last_log_index,
        cluster_version,
        recovery_epoch,
        members: members.collect(),
        state_digest: state.map(|s| s.digest().to_string()),
    }
}
