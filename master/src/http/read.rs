//! Nodes, models, objects, the cluster.

use super::{
    error::ApiError,
    json_at,
    params::{Consistency, Params, Segment, model_token},
    work::at_most,
};
use crate::{consensus::StateAt, context::MasterContext};
use axum::{Extension, extract::State, http::Uri, response::Response};
use mooncake_proto::{
    api::{ClusterStatus, MemberView, ModelList, ObjectLookup, ObjectView, ProblemCode},
    digest::Digest,
    ids::{ModelRef, NodeId},
    manifest::MAX_OBJECT_ID_BYTES,
    text::cut,
};
use mooncake_state::{Bytes, Live};
use std::{collections::HashMap, sync::Arc};
use tokio::sync::Semaphore;

/// Object look-ups at once: each may decode every manifest there is, the largest of them some 100 MB when decoded.
static LOOK_UPS: Semaphore = Semaphore::const_new(2);
/// Cluster statuses at once: each may hold a copy of the state and digest it.
static STATUSES: Semaphore = Semaphore::const_new(2);
/// Looks at the state for one look-up: another one is needed only if a model version came during the last.
const MAX_LOOKS: usize = 16;

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
    Segment(id): Segment,
    uri: Uri,
) -> Result<Response, ApiError> {
    Params::parse(uri.query())?.only(&[])?;
    let id = NodeId::parse(&id).map_err(|why| ApiError::parameter(format!("node_id: {}", cut(&why))))?;
    with_live(&ctx, consistency, |state, live| {
        match state.node_view(&id, live) {
            Some(view) => Ok(json_at(state.applied_index, &view)),
            None => {
                let detail =
                    format!("no node '{id}' has registered; GET /api/v1/nodes lists those that have");
                Err(ApiError::new(ProblemCode::NodeNotFound, detail).at(state.applied_index))
            }
        }
    })
}

/// Reads with live facts where this master leads.
pub(super) fn with_live<T>(
    ctx: &MasterContext,
    consistency: Consistency,
    read: impl FnOnce(&StateAt, &dyn Live) -> T,
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
pub(super) async fn objects(State(ctx): State<Arc<MasterContext>>, uri: Uri) -> Result<Response, ApiError> {
    let params = Params::parse(uri.query())?;
    params.only(&["key"])?;
    let key = params
        .get("key")
        .filter(|k| !k.is_empty() && k.len() <= MAX_OBJECT_ID_BYTES);
    let detail = format!("key: give the object's id, 1 to {MAX_OBJECT_ID_BYTES} bytes");
    let key = key.ok_or_else(|| ApiError::parameter(detail))?.to_owned();
    let (index, found) = at_most(&LOOK_UPS, "object lookup", move || look_up(&ctx, key)).await??;
    if found.objects.is_empty() {
        let detail = format!("no model version has an object '{}'", found.key);
        return Err(ApiError::new(ProblemCode::ObjectNotFound, detail).at(index));
    }
    Ok(json_at(index, &found))
}

/// Where in a model version an object is: its file's path, offset and size in it.
type Place = (String, u64, u64);

/// The answer, and the applied index it holds at: all of it is read at that one, from one copy of the state. Manifests may be
/// large and many, so they are decoded before; what came meanwhile takes another look.
fn look_up(ctx: &MasterContext, key: String) -> Result<(u64, ObjectLookup), ApiError> {
    let mut places: HashMap<Digest, Option<Place>> = HashMap::new();
    for _ in 0..MAX_LOOKS {
        let unseen: Vec<(Digest, Option<Bytes>)> = {
            let state = ctx.consensus.state();
            let unseen: Vec<_> = state
                .artifacts()
                .filter(|(_, artifact)| !places.contains_key(&artifact.manifest))
                .map(|(_, artifact)| (artifact.manifest, state.blob(&artifact.manifest).cloned()))
                .collect();
            if unseen.is_empty() {
                let found = state.artifacts().filter_map(|(model, artifact)| {
                    let (path, offset_bytes, size_bytes) = places.get(&artifact.manifest)?.clone()?;
                    Some(ObjectView {
                        model_ref: model.clone(),
                        path,
                        offset_bytes,
                        size_bytes,
                        nodes: state.holders(artifact).cloned().collect(),
                    })
                });
                let objects = found.collect();
                return Ok((state.applied_index, ObjectLookup { key, objects }));
            }
            unseen
        };
        for (digest, encoded) in unseen {
            let cached = ctx.manifests.get(&digest);
            let manifest = cached.or_else(|| ctx.manifests.decode(digest, &encoded?));
            let place = manifest.and_then(|manifest| {
                let (file, chunk) = manifest.find_object(&key)?;
                let file = &manifest.files[file];
                let range = file.chunk_range(chunk);
                Some((file.path.clone(), range.start, range.end - range.start))
            });
            places.insert(digest, place);
        }
    }
    Err(ApiError::new(
        ProblemCode::Overloaded,
        "models are added faster than they can be looked through; repeat the request later",
    ))
}

/// `GET /api/v1/cluster`: what *this* master knows; `?digest=true` adds the state's digest (linear in the state).
pub(super) async fn cluster(State(ctx): State<Arc<MasterContext>>, uri: Uri) -> Result<Response, ApiError> {
    let params = Params::parse(uri.query())?;
    params.only(&["digest"])?;
    // They change nothing here, but a wrong one is still a mistake.
    params.consistency()?;
    let with_digest = match params.get("digest") {
        None | Some("false") => false,
        Some("true") => true,
        Some(other) => {
            return Err(ApiError::parameter(format!(
                "digest: '{}' is neither true nor false",
                cut(other)
            )));
        }
    };
    let work = move || cluster_status(&ctx, with_digest);
    let status = at_most(&STATUSES, "cluster status", work).await?;
    Ok(json_at(status.applied_index, &status))
}

pub(super) fn cluster_status(ctx: &MasterContext, with_digest: bool) -> ClusterStatus {
    let cluster = ctx.consensus.cluster();
    let state = ctx.consensus.state();
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
        silent_ms: member.silent.map(|silent| silent.as_millis() as u64),
    });
    ClusterStatus {
        cluster_id: ctx.options.cluster_id.clone(),
        served_by: ctx.consensus.identity().node_id,
        term: cluster.term,
        leader_id,
        applied_index: state.applied_index,
        last_log_index: cluster.last_log_index,
        last_log_term: cluster.last_log_term,
        cluster_version: state.cluster_version(),
        recovery_epoch: state.recovery_epoch(),
        members: members.collect(),
        state_digest: with_digest.then(|| state.digest().to_string()),
    }
}
