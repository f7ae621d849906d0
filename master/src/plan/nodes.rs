//! Verdicts on nodes, and what they hold against what the state believes.

use super::{
    Plan,
    observed::{HeldState, Session},
    peers::holds_sealed,
};
use mooncake_proto::{
    api::{NodeStatus, PlacementState},
    ids::{ModelRef, NodeId},
};
use mooncake_state::{Artifact, Command, Fence, Node, ReportId};

impl<'a> Plan<'a> {
    /// The session of a node that runs as the incarnation which the state knows.
    pub(super) fn session(&self, id: &NodeId, node: &Node) -> Option<&'a Session> {
        self.observed
            .sessions
            .get(id)
            .filter(|s| s.incarnation == node.incarnation)
    }

    /// The session of a node to which tasks can be given.
    pub(super) fn ready(&self, id: &NodeId) -> Option<(&'a Node, &'a Session)> {
        let node = self.state.node(id).filter(|n| n.status == NodeStatus::Up)?;
        Some((node, self.session(id, node)?))
    }

    /// Up without a session: suspected, but never before the node had the time to find this leader. Suspected:
    /// down when the grace is over, which goes on from where the last leader left it.
    pub(super) fn judge_nodes(&mut self) {
        let now_ms = self.now_ms;
        let grace_ms = self.observed.config.grace_ms;
        for (id, node) in self.state.nodes() {
            let connected = self.session(id, node).is_some();
            let counts_from_ms = self.observed.silence_counts_from_ms(id);
            let (status, reason) = match node.status {
                NodeStatus::Up if !connected && now_ms >= counts_from_ms => {
                    (NodeStatus::Suspected, "its session was lost".to_owned())
                }
                NodeStatus::Suspected
                    if !connected && now_ms >= counts_from_ms.max(node.since_ms.saturating_add(grace_ms)) =>
                {
                    let reason = format!(
                        "it did not come back within the grace of {} s",
                        grace_ms as f64 / 1000.0
                    );
                    (NodeStatus::Down, reason)
                }
                NodeStatus::Suspected | NodeStatus::Down if connected => {
                    // The verdict and its registration crossed each other.
                    self.propose(Command::RegisterNode {
                        node: id.clone(),
                        store_id: node.store_id.clone(),
                        expected_incarnation: node.incarnation,
                        about: node.about.clone(),
                        now_ms,
                    });
                    continue;
                }
                _ => continue,
            };
            self.propose(Command::SetNodeStatus {
                node: id.clone(),
                incarnation: node.incarnation,
                seen_since_ms: node.since_ms,
                status,
                reason,
                now_ms,
            });
        }
    }

    /// What a node says of itself wins over what was recorded: a copy that is gone is no copy, and a published
    /// folder with the right root is one, whoever ordered it.
    pub(super) fn compare_holdings(&mut self) {
        for (id, session) in &self.observed.sessions {
            let Some(node) = self
                .state
                .node(id)
                .filter(|n| n.incarnation == session.incarnation)
            else {
                continue;
            };
            for model in self.state.models_on(id) {
                let Some(artifact) = self.state.artifact(model) else {
                    continue;
                };
                if let Some(command) = self.lost(id, node, session, model, artifact) {
                    self.propose(command);
                }
            }
            for (model, held) in &session.holdings {
                let Some(artifact) = self.state.artifact(model) else {
                    continue;
                };
                let staged = artifact
                    .placements
                    .get(id)
                    .is_some_and(|p| p.state == PlacementState::Staged);
                if let Some(seal) = held.seal
                    && held.state == HeldState::Staged
                    && !staged
                    && holds_sealed(artifact, held)
                {
                    self.propose(Command::ReportHeld {
                        report: report_id(id, node, model, artifact),
                        seal,
                        local_path: held.local_path.clone(),
                        now_ms: self.now_ms,
                    });
                }
            }
        }
    }

    fn lost(
        &self,
        id: &NodeId,
        node: &Node,
        session: &Session,
        model: &ModelRef,
        artifact: &Artifact,
    ) -> Option<Command> {
        let placement = artifact.placements.get(id)?;
        if placement.state != PlacementState::Staged && !placement.whole {
            return None;
        }
        let gone = match session.holdings.get(model) {
            // A report may be ahead of the list of what is held: of what was ordered in this session only an
            // explicit word counts.
            None if session
                .sent
                .get(model)
                .is_some_and(|s| s.fence == placement.fence) =>
            {
                session.absent.contains(model)
            }
            None => session.inventory_complete,
            Some(held) if held.generation != artifact.generation => session.inventory_complete,
            // A seed that restarted before it published: what it had is probably still there. Its order comes again,
            // and if something is gone after all, that brings it.
            Some(held) if held.rehashing && placement.state == PlacementState::Acquiring => false,
            // Only at the beginning of a session: later, a list made before the last block may come in after the
            // report that the model is staged.
            Some(held) => held.state == HeldState::Partial && held.from_inventory,
        };
        gone.then(|| Command::ReportLost {
            report: report_id(id, node, model, artifact),
            now_ms: self.now_ms,
        })
    }
}

/// Fenced by the placement as it is now.
fn report_id(id: &NodeId, node: &Node, model: &ModelRef, artifact: &Artifact) -> ReportId {
    ReportId {
        model: model.clone(),
        generation: artifact.generation,
        node: id.clone(),
        incarnation: node.incarnation,
        fence: artifact.placements.get(id).map_or(Fence::default(), |p| p.fence),
    }
}
