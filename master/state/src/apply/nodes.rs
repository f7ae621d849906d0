//! Nodes: registration, silence, space.

use super::{Apply, stale};
use crate::{
    command::Reply,
    types::{Failure, Node, NodeAbout},
};
use mooncake_proto::{
    api::{NodeStatus, PlacementState},
    ids::{ModelRef, NodeId},
};

impl Apply<'_> {
    pub(super) fn register_node(
        &mut self,
        id: &NodeId,
        store: &str,
        expected: u64,
        about: &NodeAbout,
    ) -> Reply {
        let now = self.now;
        let floor = self.state.data.floor_incarnation;
        let incarnation = match self.state.node(id) {
            Some(node) if node.store_id == store => node.incarnation,
            Some(node) if node.incarnation != expected => {
                return Reply::NodeIdTaken {
                    incarnation: node.incarnation,
                };
            }
            Some(node) => node.incarnation + 1,
            None => floor + 1,
        };
        if self.state.node(id).is_some_and(|n| n.incarnation != incarnation) {
            self.forget_incarnation(id);
        }
        let node = Node {
            store_id: store.to_owned(),
            incarnation,
            about: about.clone(),
            status: NodeStatus::Up,
            since_ms: now,
            free_at_ms: now,
            reason: None,
        };
        self.state.data.nodes.insert(id.clone(), node);
        self.mark_models_on(id);
        Reply::Registered { incarnation }
    }

    /// The node came back with another disk: what the old one held or was doing is gone. Frozen views stay.
    fn forget_incarnation(&mut self, id: &NodeId) {
        let models: Vec<ModelRef> = self.state.models_on(id).cloned().collect();
        let failure = Failure {
            code: "node_replaced".into(),
            message: format!("node {id} came back with another data folder, what it held is gone"),
            retryable: true,
        };
        for model in models {
            self.end_attempt(&model, id, &failure, 0);
            let artifact = self.artifact_mut(&model);
            artifact.placements.remove(id);
            self.state.index.remove_placement(&model, id);
            self.mark(&model);
        }
    }

    pub(super) fn set_node_status(
        &mut self,
        id: &NodeId,
        incarnation: u64,
        seen_since_ms: u64,
        status: NodeStatus,
        reason: &str,
    ) -> Reply {
        let now = self.now;
        let Some(node) = self.state.data.nodes.get_mut(id) else {
            return stale("the node is not registered");
        };
        if node.incarnation != incarnation {
            return stale(format!(
                "the node's incarnation is {}, not {incarnation}",
                node.incarnation
            ));
        }
        if node.status == status {
            return Reply::Done;
        }
        if node.since_ms != seen_since_ms {
            return stale(format!(
                "the node is {:?} since {}, not since {seen_since_ms}",
                node.status, node.since_ms
            ));
        }
        if node.status == NodeStatus::Down {
            return stale("a node that is down comes back by registering");
        }
        // Up, it may say goodbye; but a job that names it may have been created since that was decided: then the
        // grace runs, as after a crash.
        let left = node.status == NodeStatus::Up && status == NodeStatus::Down;
        let status = match left && self.state.is_needed(id) {
            true => NodeStatus::Suspected,
            false => status,
        };
        let Some(node) = self.state.data.nodes.get_mut(id) else {
            return stale("the node is not registered");
        };
        node.status = status;
        // Another time than the one the verdict saw, so that the same verdict again is stale.
        node.since_ms = now.max(seen_since_ms.saturating_add(1));
        node.reason = (status != NodeStatus::Up).then(|| reason.to_owned());
        if status == NodeStatus::Down {
            self.node_went_down(id, reason);
        }
        self.mark_models_on(id);
        Reply::Done
    }

    /// What runs on the node has failed, and so has what was to run there.
    fn node_went_down(&mut self, id: &NodeId, reason: &str) {
        let message = format!("node {id} is down: {reason}");
        let failure = Failure {
            code: "node_down".into(),
            message: message.clone(),
            retryable: false,
        };
        let models: Vec<ModelRef> = self.state.models_on(id).cloned().collect();
        for model in models {
            self.end_attempt(&model, id, &failure, 0);
        }
        let jobs: Vec<_> = self.state.live_jobs_on(id).map(|(job, _)| job.clone()).collect();
        for job in jobs {
            self.finish_view(&job, id, PlacementState::Failed, |view| {
                view.last_error = Some(message.clone())
            });
        }
    }

    pub(super) fn set_node_free(
        &mut self,
        id: &NodeId,
        incarnation: u64,
        capacity_bytes: u64,
        free_bytes: u64,
        measured_ms: u64,
    ) -> Reply {
        let now = self.now;
        match self.state.data.nodes.get_mut(id) {
            Some(node) if node.incarnation == incarnation => {
                // A clock that ran ahead must not hide reservations that are still to come.
                node.free_at_ms = measured_ms.min(now);
                node.about.capacity_bytes = capacity_bytes;
                node.about.free_bytes = free_bytes;
                Reply::Done
            }
            _ => stale("no such node or incarnation"),
        }
    }

    /// Holders may have come or gone with the node.
    fn mark_models_on(&mut self, id: &NodeId) {
        let models: Vec<ModelRef> = self.state.models_on(id).cloned().collect();
        let wanted: Vec<ModelRef> = self
            .state
            .live_jobs_on(id)
            .map(|(_, job)| job.model.clone())
            .collect();
        for model in models.iter().chain(&wanted) {
            self.mark(model);
        }
    }
}
