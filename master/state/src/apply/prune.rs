//! Retention.

use super::Apply;
use crate::{
    command::Reply,
    state::State,
    types::{Node, PastJob},
};
use mooncake_proto::{
    api::NodeStatus,
    digest::Digest,
    ids::{ModelRef, NodeId},
};

/// A time to live of zero would make a second prune at the same instant find what the first one released.
fn is_over(since_ms: u64, ttl_ms: u64, now_ms: u64) -> bool {
    since_ms.saturating_add(ttl_ms.max(1)) <= now_ms
}

fn is_forgotten(state: &State, id: &NodeId, node: &Node, now_ms: u64) -> bool {
    node.status == NodeStatus::Down
        && is_over(node.since_ms, state.limits().down_node_ttl_ms, now_ms)
        && !state.index.live_by_node.contains_key(id)
}

pub(crate) fn is_due(state: &State, now_ms: u64) -> bool {
    let limits = state.limits();
    let index = &state.index;
    index.terminal.len() as u64 > limits.max_terminal_jobs
        || index.past.len() as u64 > limits.max_ids
        || index
            .terminal
            .get_min()
            .is_some_and(|(at, _)| is_over(*at, limits.job_ttl_ms, now_ms))
        || index
            .past
            .get_min()
            .is_some_and(|(at, _)| is_over(*at, limits.id_ttl_ms, now_ms))
        || index
            .unwanted
            .get_min()
            .is_some_and(|(at, _)| is_over(*at, limits.unsealed_ttl_ms, now_ms))
        || state
            .unreferenced_blobs()
            .any(|(_, blob)| is_over(blob.since_ms, limits.blob_ttl_ms, now_ms))
        || state
            .data
            .nodes
            .iter()
            .any(|(id, node)| is_forgotten(state, id, node, now_ms))
}

impl Apply<'_> {
    pub(super) fn prune(&mut self) -> Reply {
        let (now, limits) = (self.now, self.state.data.limits);
        let state = &mut *self.state;

        while let Some((at, id)) = state.index.terminal.get_min().cloned() {
            let too_many = state.index.terminal.len() as u64 > limits.max_terminal_jobs;
            if !too_many && !is_over(at, limits.job_ttl_ms, now) {
                break;
            }
            state.index.terminal.remove_min();
            let job = state.data.jobs.remove(&id).expect("an indexed job exists");
            state.index.created.remove(&(job.created_ms(), id.clone()));
            state.index.past.insert((at, id.clone()));
            state.data.past_jobs.insert(
                id,
                PastJob {
                    request_digest: job.request_digest,
                    finished_ms: at,
                },
            );
        }

        while let Some((at, id)) = state.index.past.get_min().cloned() {
            let too_many = state.index.past.len() as u64 > limits.max_ids;
            if !too_many && !is_over(at, limits.id_ttl_ms, now) {
                break;
            }
            state.index.past.remove_min();
            state.data.past_jobs.remove(&id);
        }

        while let Some((at, model)) = self.state.index.unwanted.get_min().cloned() {
            if !is_over(at, limits.unsealed_ttl_ms, now) {
                break;
            }
            self.state.index.unwanted.remove_min();
            self.forget_artifact(&model);
        }

        let state = &mut *self.state;
        let unreferenced = state.unreferenced_blobs();
        let over = unreferenced.filter(|(_, blob)| is_over(blob.since_ms, limits.blob_ttl_ms, now));
        let over: Vec<Digest> = over.map(|(digest, _)| *digest).collect();
        over.iter().for_each(|digest| state.remove_blob(digest));

        let forgotten = state
            .data
            .nodes
            .iter()
            .filter(|(id, node)| is_forgotten(state, id, node, now));
        let forgotten: Vec<NodeId> = forgotten.map(|(id, _)| id.clone()).collect();
        for id in forgotten {
            let node = self.state.data.nodes.remove(&id).expect("just found");
            let floor = &mut self.state.data.floor_incarnation;
            *floor = (*floor).max(node.incarnation);
            let models: Vec<ModelRef> = self.state.models_on(&id).cloned().collect();
            for model in models {
                self.artifact_mut(&model).placements.remove(&id);
                self.state.index.remove_placement(&model, &id);
            }
        }
        Reply::Done
    }

    /// An unsealed artifact that nobody wants. Its numbers live on in the floors, since nodes remember fences.
    fn forget_artifact(&mut self, model: &ModelRef) {
        let Some(artifact) = self.state.data.artifacts.remove(model) else {
            return;
        };
        let data = &mut self.state.data;
        data.floor_attempt = data.floor_attempt.max(artifact.attempts);
        data.floor_generation = data.floor_generation.max(artifact.generation);
        for node in artifact.placements.keys() {
            self.state.index.remove_placement(model, node);
        }
        self.release(&artifact.manifest);
    }
}
