//! The API's answers, built from the state and from what the leader observes live.

use crate::{state::State, types::*};
use mooncake_proto::{
    MAX_ACQUISITIONS,
    api::*,
    ids::{JobId, ModelRef, NodeId},
    time::rfc3339,
};
use std::collections::BTreeMap;

/// What the leader knows beyond the state; advisory. `()` knows nothing (followers).
pub trait Live {
    /// What the node last said of the model.
    fn progress(&self, _model: &ModelRef, _node: &NodeId) -> Option<LiveProgress> {
        None
    }
    /// By which transports the node's last copy of the model came from its peers.
    fn transports(&self, _model: &ModelRef, _node: &NodeId) -> Vec<&'static str> {
        Vec::new()
    }
    /// Free bytes by the node's last heartbeat.
    fn free_bytes(&self, _node: &NodeId) -> Option<u64> {
        None
    }
    /// How many model versions the node fetches, if it is known to have a limit.
    fn transfers(&self, _state: &State, _node: &NodeId) -> Option<Transfers> {
        None
    }
}

impl Live for () {}

/// What a node fetches at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfers {
    /// Model versions that it fetches now.
    pub running: usize,
    /// Most that it wants to.
    pub most: usize,
}

impl Transfers {
    /// Whether one more has to wait.
    pub fn is_full(&self) -> bool {
        self.running >= self.most
    }
}

/// One placement's live progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LiveProgress {
    /// Bytes whose digest held.
    pub verified_bytes: u64,
    /// Objects all of whose blocks are verified.
    pub objects_done: u64,
    /// Recent rate of `verified_bytes`.
    pub bytes_per_second: u64,
    /// The node has shown a sign of life of this task in this session.
    pub running: bool,
}

impl State {
    /// A job's snapshot.
    pub fn job_snapshot(&self, id: &JobId, live: &dyn Live) -> Option<JobSnapshot> {
        let job = self.job(id)?;
        let placements: Vec<_> = job
            .nodes()
            .enumerate()
            .map(|(at, n)| placement_view(job, at, n, live))
            .collect();
        Some(JobSnapshot {
            job_id: id.clone(),
            status: job.status,
            progress: progress(job, live),
            placements,
            last_error: job.last_error.clone(),
            waiting_for: self.waits_for(job, live),
            model_ref: job.model.clone(),
            priority: job.priority,
            seed_node_id: job.seed.clone(),
            target_nodes: job.targets.clone(),
            transitions: job.transitions.iter().map(|(s, at)| (*s, rfc3339(*at))).collect(),
            warnings: job.warnings.clone(),
            tasks: job
                .nodes()
                .enumerate()
                .filter_map(|(at, n)| task_view(job, at, n, live))
                .collect(),
            version: job.version,
        })
    }

    /// A node takes a number of downloads at once, and of transfers if it says so, whatever becomes of their jobs.
    fn waits_for(&self, job: &Job, live: &dyn Live) -> Option<String> {
        let artifact = self.artifact(&job.model).filter(|_| job.is_live())?;
        if artifact.acquiring.is_none() && !self.is_available(artifact) {
            let running = self.downloads_on(&job.seed);
            if running >= MAX_ACQUISITIONS {
                return Some(format!(
                    "node {} works at {running} downloads, as many as a node does at once: this one begins when one of \
                     them ends",
                    job.seed
                ));
            }
            return self.waits_for_place(job, &job.seed, "the download", live);
        }
        let views = job.targets.iter().zip(&job.views);
        let mut begun_nowhere = views.filter(|(_, view)| view.state == PlacementState::Planned);
        begun_nowhere.find_map(|(node, _)| self.waits_for_place(job, node, "the copy", live))
    }

    fn waits_for_place(&self, job: &Job, node: &NodeId, what: &str, live: &dyn Live) -> Option<String> {
        // Who has a place between two attempts waits for no other.
        let full = live
            .transfers(self, node)
            .filter(|t| t.is_full() && !self.is_under_way(&job.model, node))?;
        let Transfers { running, most } = full;
        Some(format!(
            "node {node} fetches {running} model version{} (its --max-transfers is {most}): {what} there begins when there is \
             a place, jobs of a higher priority first, then older ones",
            if running == 1 { "" } else { "s" }
        ))
    }

    /// One line of a job list.
    pub fn job_summary(&self, id: &JobId, live: &dyn Live) -> Option<JobSummary> {
        let job = self.job(id)?;
        Some(JobSummary {
            job_id: id.clone(),
            status: job.status,
            model_ref: job.model.clone(),
            priority: job.priority,
            seed_node_id: job.seed.clone(),
            progress: progress(job, live),
            created_at: rfc3339(job.created_ms()),
            finished_at: job.finished_ms().map(rfc3339),
            last_error: job.last_error.clone(),
        })
    }

    /// A node.
    pub fn node_view(&self, id: &NodeId, live: &dyn Live) -> Option<NodeView> {
        let node = self.node(id)?;
        let staged = self.models_on(id).filter(|m| {
            let placement = self.artifact(m).and_then(|a| a.placements.get(id));
            placement.is_some_and(|p| p.state == PlacementState::Staged && p.incarnation == node.incarnation)
        });
        Some(NodeView {
            node_id: id.clone(),
            status: node.status,
            data_address: node.about.data_address.clone(),
            http_address: node.about.http_address.clone(),
            transports: node.about.transports.clone(),
            labels: node.about.labels.clone(),
            incarnation: node.incarnation,
            version: node.about.version.clone(),
            capacity_bytes: node.about.capacity_bytes,
            free_bytes: live.free_bytes(id).unwrap_or(node.about.free_bytes),
            staged_models: staged.count() as u64,
            max_transfers: live
                .transfers(self, id)
                .map(|t| u32::try_from(t.most).unwrap_or(u32::MAX)),
            since: rfc3339(node.since_ms),
        })
    }

    /// `GET /api/v1/nodes`.
    pub fn node_list(&self, live: &dyn Live) -> NodeList {
        NodeList {
            nodes: self
                .data
                .nodes
                .keys()
                .filter_map(|id| self.node_view(id, live))
                .collect(),
        }
    }

    /// A model version.
    pub fn model_view(&self, model: &ModelRef) -> Option<ModelView> {
        let artifact = self.artifact(model)?;
        Some(ModelView {
            model_ref: model.clone(),
            generation: artifact.generation,
            manifest_digest: artifact.manifest.to_string(),
            sealed: artifact.seal.is_some(),
            root: artifact.seal.map(|s| s.root.to_string()),
            digest_algorithm: artifact.algorithm.name().to_owned(),
            block_size_bytes: artifact.block_size_bytes,
            total_size_bytes: artifact.total_size_bytes,
            files: artifact.files,
            objects: artifact.objects,
            placements: artifact
                .placements
                .iter()
                .map(|(node, p)| ModelPlacementView {
                    node_id: node.clone(),
                    state: p.state,
                    local_path: p.local_path.clone(),
                })
                .collect(),
        })
    }

    /// Model versions by name, after `after` (none: from the first).
    pub fn models_after(&self, after: Option<&ModelRef>) -> impl Iterator<Item = &ModelRef> {
        use std::ops::Bound::{Excluded, Unbounded};
        let start = after.map_or(Unbounded, Excluded);
        self.data
            .artifacts
            .range::<_, ModelRef>((start, Unbounded))
            .map(|(model, _)| model)
    }
}

/// What the leader sees of a view that can still change.
fn live_progress(job: &Job, at: usize, node: &NodeId, live: &dyn Live) -> Option<LiveProgress> {
    let view = &job.views[at];
    let running = job.is_live() && view.state == PlacementState::Acquiring;
    running.then(|| live.progress(&job.model, node)).flatten()
}

fn staged_bytes(job: &Job, at: usize, node: &NodeId, live: &dyn Live) -> u64 {
    let bytes = live_progress(job, at, node, live).map_or(0, |l| l.verified_bytes);
    job.views[at].staged_bytes.max(bytes).min(job.total_size_bytes)
}

fn placement_view(job: &Job, at: usize, node: &NodeId, live: &dyn Live) -> PlacementView {
    let view = &job.views[at];
    let mut transitions = BTreeMap::from([(PlacementState::Planned, rfc3339(view.planned_ms))]);
    if let Some(ms) = view.acquiring_ms {
        transitions.insert(PlacementState::Acquiring, rfc3339(ms));
    }
    if let Some(ms) = view.finished_ms {
        transitions.insert(view.state, rfc3339(ms));
    }
    PlacementView {
        node_id: node.clone(),
        state: view.state,
        local_path: view.local_path.clone(),
        staged_bytes: staged_bytes(job, at, node, live),
        checksum_verified: view.checksum_verified,
        last_error: view.last_error.clone(),
        requested: job.is_requested(at),
        attempt: view.attempt,
        transports: match view.state {
            PlacementState::Planned => Vec::new(),
            _ => live
                .transports(&job.model, node)
                .into_iter()
                .map(Into::into)
                .collect(),
        },
        transitions,
    }
}

fn progress(job: &Job, live: &dyn Live) -> Progress {
    let mut progress = Progress {
        bytes_total: job.total_size_bytes.saturating_mul(job.targets.len() as u64),
        placements_total: job.targets.len() as u64,
        ..Progress::default()
    };
    for (at, node) in job.targets.iter().enumerate() {
        let bytes = staged_bytes(job, at, node, live);
        progress.bytes_staged = progress.bytes_staged.saturating_add(bytes);
        progress.placements_staged += u64::from(job.views[at].state == PlacementState::Staged);
        // What nodes say of themselves: no sum of it may bring a master down.
        let rate = live_progress(job, at, node, live).map_or(0, |l| l.bytes_per_second);
        progress.bytes_per_second = progress.bytes_per_second.saturating_add(rate);
    }
    progress
}

fn task_view(job: &Job, at: usize, node: &NodeId, live: &dyn Live) -> Option<TaskView> {
    let view = &job.views[at];
    let kind = view.kind?;
    let seen = live_progress(job, at, node, live);
    let state = match view.state {
        PlacementState::Staged => TaskState::Succeeded,
        _ if kind == TaskKind::Acquire && view.acquired => TaskState::Succeeded,
        PlacementState::Failed => TaskState::Failed,
        _ if !job.is_live() => TaskState::Canceled,
        _ if seen.is_some_and(|l| l.running) => TaskState::Running,
        _ => TaskState::Pending,
    };
    let objects_done = match state {
        TaskState::Succeeded => job.objects,
        _ => seen.map_or(0, |l| l.objects_done).min(job.objects),
    };
    Some(TaskView {
        kind: match kind {
            TaskKind::Acquire => TaskType::ModelDownload,
            TaskKind::Replicate => TaskType::Copy,
        },
        node_id: node.clone(),
        state,
        objects_done,
        objects_total: job.objects,
    })
}
