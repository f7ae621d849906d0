//! Jobs: creation, evaluation, their ends.

use super::Apply;
use super::blobs::Resolved;
use crate::{
    bytes::Shared,
    command::{CreateJob, Reply},
    rules::{self, JobFacts},
    types::{Artifact, Job, TaskKind, View},
};
use mooncake_proto::{
    api::{JobStatus, NodeStatus, PlacementState},
    ids::{JobId, ModelRef, NodeId},
    manifest::{BLOCK_SIZE_RANGE, MAX_TARGETS, Manifest, PRIORITY_RANGE, Sources},
};
use std::collections::{BTreeMap, BTreeSet};

/// Most jobs that are not finished: each costs every plan some work, and every master some kilobytes.
const MAX_LIVE_JOBS: usize = 10_000;
/// Most bytes of manifests and source lists that are kept. A manifest takes a few kilobytes, unless it names a million
/// objects one by one: there is room for dozens of those.
const MAX_KEPT_BLOB_BYTES: u64 = 2 << 30;

impl Apply<'_> {
    pub(super) fn create_job(&mut self, create: &CreateJob, priority: i8) -> Reply {
        if let Some(job) = self.state.job(&create.job) {
            return match job.request_digest == create.request_digest {
                true => Reply::Job { created: false },
                false => Reply::JobConflict,
            };
        }
        if let Some(past) = self.state.past_job(&create.job) {
            return match past.request_digest == create.request_digest {
                true => Reply::JobForgotten,
                false => Reply::JobConflict,
            };
        }
        if !PRIORITY_RANGE.contains(&priority) {
            let detail = "the priority is out of range".into();
            return Reply::Invalid { detail };
        }
        if let Err(reply) = self.check_create(create).and_then(|()| self.check_room()) {
            return reply;
        }
        let blobs = match self.create_blobs(create) {
            Ok(blobs) => blobs,
            Err(reply) => return reply,
        };
        let (manifest, (manifest_digest, manifest_bytes), (sources, sources_bytes)) = blobs;
        match self.state.artifact(&create.model) {
            Some(artifact) if artifact.manifest == manifest_digest => {}
            Some(artifact) => {
                if let Some(detail) = self.conflict(create, artifact) {
                    return Reply::ArtifactConflict { detail };
                }
                self.put_artifact(create, &manifest, &manifest_bytes, manifest_digest);
            }
            None => self.put_artifact(create, &manifest, &manifest_bytes, manifest_digest),
        }
        self.refer(sources, &sources_bytes);
        self.insert_job(create, priority, &manifest, manifest_digest, sources);
        Reply::Job { created: true }
    }

    /// What a valid request satisfies and what the cluster must know.
    fn check_create(&self, create: &CreateJob) -> Result<(), Reply> {
        let invalid = |detail: &str| {
            Err(Reply::Invalid {
                detail: detail.into(),
            })
        };
        if create.targets.is_empty() || create.targets.len() > MAX_TARGETS {
            return invalid("a job has at least one target, and no more than the limit");
        }
        let mut seen = BTreeSet::new();
        if !create.targets.iter().all(|t| seen.insert(t)) {
            return invalid("a target is named twice");
        }
        if create.max_attempts == 0 {
            return invalid("max_attempts is 0");
        }
        if !create.block_size_bytes.is_power_of_two() || !BLOCK_SIZE_RANGE.contains(&create.block_size_bytes)
        {
            return invalid("the block size is out of range");
        }
        seen.insert(&create.seed);
        let unknown: Vec<NodeId> = seen
            .into_iter()
            .filter(|n| self.state.node(n).is_none())
            .cloned()
            .collect();
        if !unknown.is_empty() {
            return Err(Reply::UnknownNodes(unknown));
        }
        Ok(())
    }

    /// What the cluster holds must fit into every master's memory, and into a snapshot.
    fn check_room(&self) -> Result<(), Reply> {
        let live = self.state.data.jobs.len() - self.state.index.terminal.len();
        if live >= MAX_LIVE_JOBS {
            let detail =
                format!("{live} jobs are not finished yet, which is the limit; wait for some to end");
            return Err(Reply::Overloaded { detail });
        }
        let blob_bytes = self.state.index.blob_bytes;
        if blob_bytes > MAX_KEPT_BLOB_BYTES {
            let detail = format!(
                "the manifests of {} model versions take {blob_bytes} bytes, above the limit of {MAX_KEPT_BLOB_BYTES}; larger                  chunks, or object ids that are derived from the prefix, make smaller manifests",
                self.state.data.artifacts.len()
            );
            return Err(Reply::Overloaded { detail });
        }
        Ok(())
    }

    /// The manifest, its encoding and that of the sources, each with its digest.
    fn create_blobs(&self, create: &CreateJob) -> Result<(Manifest, Resolved, Resolved), Reply> {
        let (manifest_digest, manifest_bytes) = self.resolve(&create.manifest)?;
        let (sources_digest, sources_bytes) = self.resolve(&create.sources)?;
        let manifest = Manifest::decode(&manifest_bytes).map_err(|e| Reply::Invalid {
            detail: format!("the manifest cannot be read: {e}"),
        })?;
        let sources = Sources::decode(&sources_bytes).map_err(|e| Reply::Invalid {
            detail: format!("the sources cannot be read: {e}"),
        })?;
        if manifest.model != create.model || sources.0.len() != manifest.files.len() {
            let detail = "manifest, sources and model do not belong together".into();
            return Err(Reply::Invalid { detail });
        }
        Ok((
            manifest,
            (manifest_digest, manifest_bytes),
            (sources_digest, sources_bytes),
        ))
    }

    /// Why other content under this key is refused; `None`: the old content is replaced.
    fn conflict(&self, create: &CreateJob, artifact: &Artifact) -> Option<String> {
        let model = &create.model;
        if artifact.seal.is_some() {
            return Some(format!(
                "{model} is sealed with other content (manifest {}); distribute other content under another revision",
                artifact.manifest
            ));
        }
        let (job, _) = self.state.live_jobs_of(model).next()?;
        Some(format!(
            "job {job} is distributing {model} with other content (manifest {}); wait for it or cancel it",
            artifact.manifest
        ))
    }

    /// A new artifact, or a new generation of one that was never sealed and that nobody wants.
    fn put_artifact(
        &mut self,
        create: &CreateJob,
        manifest: &Manifest,
        bytes: &crate::Bytes,
        digest: mooncake_proto::digest::Digest,
    ) {
        let model = &create.model;
        let (mut generation, mut attempts) =
            (self.state.data.floor_generation, self.state.data.floor_attempt);
        if let Some(old) = self.state.data.artifacts.remove(model) {
            generation = generation.max(old.generation);
            attempts = attempts.max(old.attempts);
            for node in old.placements.keys() {
                self.state.index.remove_placement(model, node);
            }
            if let Some(at) = old.unwanted_since_ms {
                self.state.index.unwanted.remove(&(at, model.clone()));
            }
            self.release(&old.manifest);
        }
        self.refer(digest, bytes);
        let artifact = Artifact {
            generation: generation + 1,
            manifest: digest,
            total_size_bytes: manifest.total_size_bytes,
            files: manifest.files.len() as u64,
            objects: manifest.object_count(),
            block_size_bytes: create.block_size_bytes,
            algorithm: create.algorithm,
            attempts,
            seal: None,
            acquiring: None,
            placements: BTreeMap::new(),
            unwanted_since_ms: None,
        };
        self.state
            .data
            .artifacts
            .insert(model.clone(), Shared::new(artifact));
    }

    fn insert_job(
        &mut self,
        create: &CreateJob,
        priority: i8,
        manifest: &Manifest,
        manifest_digest: mooncake_proto::digest::Digest,
        sources: mooncake_proto::digest::Digest,
    ) {
        let now = self.now;
        let artifact = &self.state.data.artifacts[&create.model];
        let mut job = Job {
            request_digest: create.request_digest,
            model: create.model.clone(),
            generation: artifact.generation,
            manifest: manifest_digest,
            sources,
            seed: create.seed.clone(),
            targets: create.targets.clone(),
            target_replica_count: create.target_replica_count,
            max_attempts: create.max_attempts,
            deadline_ms: create.deadline_ms,
            warnings: create.warnings.clone(),
            total_size_bytes: manifest.total_size_bytes,
            objects: manifest.object_count(),
            status: JobStatus::Planned,
            last_error: None,
            transitions: BTreeMap::from([(JobStatus::Planned, now)]),
            seeded: false,
            views: Vec::new(),
            version: self.index,
            priority,
        };
        let views = create.targets.len() + usize::from(!create.targets.contains(&create.seed));
        job.views = vec![View::new(now); views];
        // `refer` was called for the sources: the index must not count them twice.
        self.state.index.add_job(&create.job, &job);
        self.state.index.release(&sources);
        self.state.data.jobs.insert(create.job.clone(), Shared::new(job));
        self.set_unwanted_since(&create.model, None);
        self.touch(&create.job);
        self.join_placements(&create.job);
        self.mark(&create.model);
    }

    /// The new job sees what is there already: copies that are staged, tasks that run, nodes that are down.
    fn join_placements(&mut self, id: &JobId) {
        let job = self.state.data.jobs[id].clone();
        for node in job.nodes() {
            let record = &self.state.data.nodes[node];
            if record.status == NodeStatus::Down {
                let reason = record.reason.clone().unwrap_or_default();
                let message =
                    format!("node {node} is down: {reason}; bring it back, then create another job");
                self.finish_view(id, node, PlacementState::Failed, |view| {
                    view.last_error = Some(message)
                });
                continue;
            }
            let artifact = &self.state.data.artifacts[&job.model];
            let Some(placement) = artifact
                .placements
                .get(node)
                .filter(|p| p.incarnation == record.incarnation)
            else {
                continue;
            };
            let placement = placement.clone();
            match placement.state {
                PlacementState::Staged => self.finish_view(id, node, PlacementState::Staged, |view| {
                    view.attempt = placement.fence.attempt;
                    view.staged_bytes = job.total_size_bytes;
                    view.local_path = placement.local_path.clone();
                    view.checksum_verified = placement.checksum_verified;
                }),
                PlacementState::Acquiring => {
                    self.begin_view(id, node, placement.fence.attempt, placement.kind)
                }
                PlacementState::Planned | PlacementState::Failed => {}
            }
        }
    }

    /// An attempt runs for this view.
    pub(super) fn begin_view(&mut self, id: &JobId, node: &NodeId, attempt: u64, kind: TaskKind) {
        let now = self.now;
        let job = &self.state.data.jobs[id];
        let Some(at) = job
            .position(node)
            .filter(|at| job.is_live() && !job.views[*at].is_finished())
        else {
            return;
        };
        let view = &mut self.job_mut(id).views[at];
        view.state = PlacementState::Acquiring;
        view.acquiring_ms.get_or_insert(now);
        view.attempt = attempt;
        view.kind = Some(kind);
        view.acquired = false;
        self.touch(id);
    }

    /// Freezes a view as staged or failed. A state passed through is recorded with the same time.
    pub(super) fn finish_view(
        &mut self,
        id: &JobId,
        node: &NodeId,
        state: PlacementState,
        with: impl FnOnce(&mut View),
    ) {
        debug_assert!(matches!(state, PlacementState::Staged | PlacementState::Failed));
        let now = self.now;
        let job = &self.state.data.jobs[id];
        let Some(at) = job
            .position(node)
            .filter(|at| job.is_live() && !job.views[*at].is_finished())
        else {
            return;
        };
        let view = &mut self.job_mut(id).views[at];
        if state == PlacementState::Staged {
            view.acquiring_ms.get_or_insert(now);
            view.last_error = None;
        }
        view.state = state;
        view.finished_ms = Some(now);
        with(view);
        self.touch(id);
    }

    /// Draws the conclusions for every live job of an artifact, after its placements or nodes changed.
    pub(super) fn evaluate(&mut self, model: &ModelRef) {
        let Some(artifact) = self.state.artifact(model) else {
            return;
        };
        let available = self.state.is_available(artifact);
        let acquiring = artifact.acquiring.clone();
        for id in self.live_jobs(model) {
            if available && !self.state.data.jobs[&id].seeded {
                let job = self.job_mut(&id);
                job.seeded = true;
                // A copy that runs on a seed beside the targets (another job had asked for it) is wanted no more.
                let seed = job.seed.clone();
                self.release_placement(model, &seed);
            }
            // Not a clone, which would make the next change copy the job: most jobs do not change.
            let job = &self.state.data.jobs[&id];
            let seeded = job.seeded;
            let follows = acquiring.as_ref().is_some_and(|node| *node != job.seed);
            // Without a copy to take from and without a seed to make one, nothing can go on.
            let lost = seeded && !available && acquiring.is_none() && self.is_down(&job.seed);
            if lost {
                let error = format!(
                    "no live node holds the model any more, and the seed {} is down: bring one of them back, then create another job",
                    job.seed
                );
                self.fail_job(&id, &error);
                continue;
            }
            let requested: Vec<_> = job.views[..job.targets.len()].iter().map(|v| v.state).collect();
            let seed = job
                .position(&job.seed)
                .map_or(PlacementState::Planned, |at| job.views[at].state);
            let facts = JobFacts {
                status: job.status,
                seeded,
                follows,
                seed,
                requested: &requested,
            };
            let next = rules::job_status(&facts);
            let seed_failed =
                next == JobStatus::Failed && !seeded && seed == PlacementState::Failed && !follows;
            if seed_failed {
                let reason = job
                    .position(&job.seed)
                    .and_then(|at| job.views[at].last_error.clone());
                let reason = reason.unwrap_or_default();
                let error = format!("seed {} failed: {reason}", job.seed);
                self.stop_views(&id, &format!("seed failed: {reason}"));
                self.end_or_advance(&id, next, Some(error));
            } else if next != job.status {
                let error = (next == JobStatus::Failed).then(|| failed_placements(job));
                self.end_or_advance(&id, next, error);
            }
        }
    }

    fn is_down(&self, node: &NodeId) -> bool {
        self.state.node(node).is_none_or(|n| n.status == NodeStatus::Down)
    }

    /// Fails a live job for a reason that is not a placement's.
    pub(super) fn fail_job(&mut self, id: &JobId, error: &str) {
        let nodes: Vec<NodeId> = self.state.data.jobs[id].nodes().cloned().collect();
        for node in nodes {
            self.finish_view(id, &node, PlacementState::Failed, |view| {
                view.last_error = Some(error.to_owned())
            });
        }
        self.end_or_advance(id, JobStatus::Failed, Some(error.to_owned()));
    }

    /// Placements that had begun have failed; those that had not stay `planned` and say why.
    fn stop_views(&mut self, id: &JobId, reason: &str) {
        let job = &self.state.data.jobs[id];
        let views: Vec<_> = job
            .nodes()
            .cloned()
            .zip(job.views.iter().map(|v| v.state))
            .collect();
        for (at, (node, state)) in views.iter().enumerate() {
            match state {
                PlacementState::Acquiring => {
                    let error = Some(reason.to_owned());
                    self.finish_view(id, node, PlacementState::Failed, |view| view.last_error = error);
                }
                PlacementState::Planned => {
                    self.job_mut(id).views[at].last_error = Some(format!("not started: {reason}"))
                }
                PlacementState::Staged | PlacementState::Failed => {}
            }
        }
    }

    /// Moves a job along the RFC's diagram; a terminal status lets go of what it wanted.
    fn end_or_advance(&mut self, id: &JobId, next: JobStatus, error: Option<String>) {
        let now = self.now;
        let job = &self.state.data.jobs[id];
        let path = rules::job_path(job.status, next, job.seeded);
        if path.is_empty() {
            return;
        }
        let job = self.job_mut(id);
        for status in path {
            job.transitions.insert(status, now);
            job.status = status;
        }
        if error.is_some() {
            job.last_error = error;
        }
        self.touch(id);
        if next.is_terminal() {
            self.ended(id);
        }
    }

    /// A job has just become terminal.
    fn ended(&mut self, id: &JobId) {
        let job = self.state.data.jobs[id].clone();
        self.state.index.end_job(id, &job);
        self.release(&job.sources);
        if !self.state.index.live_by_model.contains_key(&job.model) {
            let now = self.now;
            self.set_unwanted_since(&job.model, Some(now));
        }
        let acquiring = self.state.artifact(&job.model).and_then(|a| a.acquiring.clone());
        for node in job.nodes().chain(acquiring.as_ref()) {
            self.release_placement(&job.model, node);
        }
        self.mark(&job.model);
    }

    fn set_unwanted_since(&mut self, model: &ModelRef, since: Option<u64>) {
        let Some(artifact) = self.state.data.artifacts.get_mut(model) else {
            return;
        };
        let before = std::mem::replace(&mut artifact.make_mut().unwanted_since_ms, since);
        let artifact = &self.state.data.artifacts[model];
        self.state.index.set_unwanted(model, before, artifact);
    }

    pub(super) fn cancel_job(&mut self, id: &JobId, progress: &[(u32, u64)]) -> Reply {
        let Some(job) = self.state.job(id) else {
            return Reply::JobNotFound;
        };
        match job.status {
            JobStatus::Canceled => return Reply::Done,
            status if status.is_terminal() => return Reply::JobTerminal { status },
            _ => {}
        }
        let total = job.total_size_bytes;
        let views = &mut self.job_mut(id).views;
        for (at, bytes) in progress {
            // What a reader saw live just before is what stays: only what runs is shown live.
            let running = |v: &&mut View| v.state == PlacementState::Acquiring;
            if let Some(view) = views.get_mut(*at as usize).filter(running) {
                view.staged_bytes = view.staged_bytes.max((*bytes).min(total));
            }
        }
        for view in views.iter_mut().filter(|v| !v.is_finished()) {
            view.last_error = Some("canceled".into());
        }
        self.end_or_advance(id, JobStatus::Canceled, Some("canceled".into()));
        Reply::Done
    }

    /// Deadlines.
    pub(super) fn tick(&mut self) -> Reply {
        while let Some((at, id)) = self.state.index.deadlines.get_min().cloned() {
            if at > self.now {
                break;
            }
            let job = &self.state.data.jobs[&id];
            let after_s = at.saturating_sub(job.created_ms()) / 1000;
            let error = format!("the deadline of {after_s} s passed before every placement was staged");
            self.fail_job(&id, &error);
        }
        Reply::Done
    }
}

/// The job's error when placements failed: the first by name, the others by number.
fn failed_placements(job: &Job) -> String {
    let failed: Vec<_> = job
        .targets
        .iter()
        .zip(&job.views)
        .filter(|(_, view)| view.state == PlacementState::Failed)
        .collect();
    let Some((node, view)) = failed.first() else {
        return "no placement could be staged".into();
    };
    let reason = view.last_error.as_deref().unwrap_or("no reason was given");
    let more = match failed.len() - 1 {
        0 => String::new(),
        n => format!(" (and {n} more)"),
    };
    format!(
        "{} of {} placements failed: {node}: {reason}{more}",
        failed.len(),
        job.targets.len()
    )
}

impl View {
    fn new(now: u64) -> Self {
        Self {
            state: PlacementState::Planned,
            attempt: 0,
            kind: None,
            acquired: false,
            failures: 0,
            staged_bytes: 0,
            local_path: None,
            checksum_verified: false,
            last_error: None,
            planned_ms: now,
            acquiring_ms: None,
            finished_ms: None,
        }
    }
}
