//! Attempts: their authorisation, and what nodes report of them.

use super::{Apply, stale};
use crate::{
    command::{ReplicateTo, Reply, ReportId},
    rules::{self, Outcome},
    types::{Artifact, Failure, Fence, Placement, TaskKind},
};
use mooncake_proto::{
    api::{NodeStatus, PlacementState},
    digest::Digest,
    ids::{JobId, ModelRef, NodeId},
    manifest::Seal,
};

impl Apply<'_> {
    pub(super) fn artifact_mut(&mut self, model: &ModelRef) -> &mut Artifact {
        self.state
            .data
            .artifacts
            .get_mut(model)
            .expect("the caller found the artifact")
            .make_mut()
    }

    fn placement_mut(&mut self, model: &ModelRef, node: &NodeId) -> &mut Placement {
        self.artifact_mut(model)
            .placements
            .get_mut(node)
            .expect("the caller found the placement")
    }

    /// The artifact's generation and the next attempt, as the proposer saw them?
    fn check_attempt(&self, model: &ModelRef, generation: u64, attempt: u64) -> Result<(), Reply> {
        let Some(artifact) = self.state.artifact(model) else {
            return Err(stale("there is no such artifact"));
        };
        if artifact.generation != generation {
            return Err(stale(format!(
                "the artifact's generation is {}, not {generation}",
                artifact.generation
            )));
        }
        if artifact.attempts + 1 != attempt {
            return Err(stale(format!(
                "the next attempt is {}, not {attempt}",
                artifact.attempts + 1
            )));
        }
        Ok(())
    }

    /// The node runs as this incarnation and is up?
    fn is_up(&self, node: &NodeId, incarnation: u64) -> bool {
        self.state
            .node(node)
            .is_some_and(|n| n.incarnation == incarnation && n.status == NodeStatus::Up)
    }

    pub(super) fn authorise_acquire(
        &mut self,
        model: &ModelRef,
        generation: u64,
        attempt: u64,
        (node, incarnation): (&NodeId, u64),
        job_id: &JobId,
        reserve_bytes: u64,
    ) -> Reply {
        if let Err(reply) = self.check_attempt(model, generation, attempt) {
            return reply;
        }
        if !self.is_up(node, incarnation) {
            return stale("the node is not up as this incarnation");
        }
        let Some(job) = self
            .state
            .job(job_id)
            .filter(|j| j.is_live() && j.model == *model && j.seed == *node)
        else {
            return stale("no such live job with this seed");
        };
        let seed_done = job.position(node).is_none_or(|at| job.views[at].is_finished());
        if seed_done && !job.seeded {
            return stale("the seed has failed for this job");
        }
        let artifact = &self.state.data.artifacts[model];
        if let Some(other) = &artifact.acquiring {
            return stale(format!("a download runs on {other}"));
        }
        if self.state.is_available(artifact) {
            return stale("a live node holds the model: it is copied, not downloaded");
        }
        let sources = job.sources;
        self.artifact_mut(model).acquiring = Some(node.clone());
        self.start(
            model,
            node,
            incarnation,
            attempt,
            TaskKind::Acquire,
            Some((job_id.clone(), sources)),
            reserve_bytes,
        );
        Reply::Done
    }

    pub(super) fn authorise_replicate(
        &mut self,
        model: &ModelRef,
        generation: u64,
        first_attempt: u64,
        nodes: &[ReplicateTo],
    ) -> Reply {
        if let Err(reply) = self.check_attempt(model, generation, first_attempt) {
            return reply;
        }
        if nodes.is_empty() || nodes.len() > crate::command::MAX_AUTHORISE_NODES {
            return Reply::Invalid {
                detail: format!("{} nodes in one command", nodes.len()),
            };
        }
        for (attempt, to) in (first_attempt..).zip(nodes) {
            // Used up even where the node is passed over: the command is then stale when it comes again.
            self.artifact_mut(model).attempts = attempt;
            if self.is_up(&to.node, to.incarnation) && self.wants_copy(model, &to.node) {
                self.start(
                    model,
                    &to.node,
                    to.incarnation,
                    attempt,
                    TaskKind::Replicate,
                    None,
                    to.reserve_bytes,
                );
            }
        }
        Reply::Done
    }

    /// A live job waits for a copy on this node, and nothing runs there.
    fn wants_copy(&self, model: &ModelRef, node: &NodeId) -> bool {
        let artifact = &self.state.data.artifacts[model];
        let idle = artifact
            .placements
            .get(node)
            .is_none_or(|p| !matches!(p.state, PlacementState::Acquiring | PlacementState::Staged));
        idle && self.state.live_jobs_of(model).any(|(_, job)| {
            job.position(node)
                .is_some_and(|at| job.is_requested(at) && !job.views[at].is_finished())
        })
    }

    /// An attempt begins; without room on the node it ends at once.
    #[allow(clippy::too_many_arguments, reason = "one call per kind of task, right above")]
    fn start(
        &mut self,
        model: &ModelRef,
        node: &NodeId,
        incarnation: u64,
        attempt: u64,
        kind: TaskKind,
        download: Option<(JobId, Digest)>,
        reserve_bytes: u64,
    ) {
        let now = self.now;
        let (job, sources) = download.unzip();
        let fence = Fence {
            recovery_epoch: self.state.data.recovery_epoch,
            attempt,
        };
        let artifact = self.artifact_mut(model);
        artifact.attempts = attempt;
        let placement = artifact
            .placements
            .entry(node.clone())
            .or_insert_with(|| Placement::new(incarnation));
        placement.state = PlacementState::Acquiring;
        placement.fence = fence;
        placement.kind = kind;
        placement.job = job;
        placement.whole &= kind == TaskKind::Replicate;
        placement.authorised_ms = now;
        placement.reserved_bytes = 0;
        placement.last_error = None;
        self.set_sources(model, node, sources);
        self.state.index.add_placement(model, node);
        for id in self.live_jobs(model) {
            self.begin_view(&id, node, attempt, kind);
        }
        self.mark(model);
        match self.state.unreserved_bytes(node) {
            Some(free) if free < reserve_bytes => {
                let failure = Failure {
                    code: "not_enough_space".into(),
                    message: format!(
                        "not enough space on node {node}: {reserve_bytes} bytes are needed, {free} are free beside what other jobs have reserved; free some space or choose another node, then create another job"
                    ),
                    retryable: false,
                };
                self.end_attempt(model, node, &failure, 0);
            }
            _ => self.placement_mut(model, node).reserved_bytes = reserve_bytes,
        }
    }

    /// Checks what fences a report, the attempt included (no placement: the default fence).
    fn check_report(&self, report: &ReportId) -> Result<(), Reply> {
        let Some(artifact) = self.state.artifact(&report.model) else {
            return Err(stale("there is no such artifact"));
        };
        if artifact.generation != report.generation {
            return Err(stale(format!(
                "the artifact's generation is {}, not {}",
                artifact.generation, report.generation
            )));
        }
        let Some(node) = self.state.node(&report.node) else {
            return Err(stale("the node is not registered"));
        };
        if node.incarnation != report.incarnation {
            return Err(stale(format!(
                "the node's incarnation is {}, not {}",
                node.incarnation, report.incarnation
            )));
        }
        #[cfg(any(test, feature = "sabotage"))]
        if self.state.break_fence {
            return Ok(());
        }
        let fence = artifact
            .placements
            .get(&report.node)
            .map_or(Fence::default(), |p| p.fence);
        if fence != report.fence {
            return Err(stale(format!(
                "the node's attempt is {fence:?}, not {:?}",
                report.fence
            )));
        }
        Ok(())
    }

    /// A report on an attempt: there must be one.
    fn check_task_report(&self, report: &ReportId) -> Result<&Placement, Reply> {
        self.check_report(report)?;
        let artifact = &self.state.data.artifacts[&report.model];
        artifact
            .placements
            .get(&report.node)
            .ok_or_else(|| stale("no attempt was ever authorised there"))
    }

    pub(super) fn seal(&mut self, report: &ReportId, seal: &Seal) -> Reply {
        let placement = match self.check_task_report(report) {
            Ok(placement) => placement,
            Err(reply) => return reply,
        };
        if placement.kind != TaskKind::Acquire {
            return stale("the attempt is no download");
        }
        let artifact = &self.state.data.artifacts[&report.model];
        if placement.whole && artifact.seal == Some(*seal) {
            return Reply::Done;
        }
        if placement.state != PlacementState::Acquiring {
            return stale("the attempt has ended");
        }
        let (model, node) = (&report.model, &report.node);
        if let Some(failure) = refuse_seal(artifact, seal, node) {
            self.end_attempt(model, node, &failure, 0);
            return Reply::Done;
        }
        self.set_sources(model, node, None);
        let artifact = self.artifact_mut(model);
        artifact.seal = Some(*seal);
        artifact.acquiring = None;
        let total = artifact.total_size_bytes;
        self.placement_mut(model, node).whole = true;
        for id in self.live_jobs(model) {
            let job = &self.state.data.jobs[&id];
            let Some(at) = job.position(node).filter(|at| !job.views[*at].is_finished()) else {
                continue;
            };
            let view = &mut self.job_mut(&id).views[at];
            view.acquired = true;
            view.staged_bytes = total;
            self.touch(&id);
        }
        self.mark(model);
        Reply::Done
    }

    pub(super) fn report_staged(
        &mut self,
        report: &ReportId,
        seal: &Seal,
        local_path: &str,
        checksum_verified: bool,
    ) -> Reply {
        let state = match self.check_task_report(report) {
            Ok(placement) => placement.state,
            Err(reply) => return reply,
        };
        if state == PlacementState::Staged {
            return Reply::Done;
        }
        let artifact = &self.state.data.artifacts[&report.model];
        if artifact.seal.is_none() {
            return stale("the artifact is not sealed: nothing can have been published under it");
        }
        if artifact.seal != Some(*seal) {
            if state != PlacementState::Acquiring {
                return stale("the attempt has ended");
            }
            let failure = Failure {
                code: "seal_mismatch".into(),
                message: format!(
                    "node {} published content with root {}, which is not the sealed one; remove the folder there, then create another job",
                    report.node, seal.root
                ),
                retryable: false,
            };
            self.end_attempt(&report.model, &report.node, &failure, 0);
            return Reply::Done;
        }
        // A fact even if the attempt was given up meanwhile (canceled, node down): the fence is the last one.
        self.staged(&report.model, &report.node, local_path, checksum_verified);
        Reply::Done
    }

    pub(super) fn report_failed(
        &mut self,
        report: &ReportId,
        failure: &Failure,
        verified_bytes: u64,
    ) -> Reply {
        match self.check_task_report(report) {
            Ok(placement) if placement.state != PlacementState::Acquiring => {
                return stale("the attempt has ended");
            }
            Ok(_) => {}
            Err(reply) => return reply,
        }
        self.end_attempt(&report.model, &report.node, failure, verified_bytes);
        Reply::Done
    }

    pub(super) fn report_held(&mut self, report: &ReportId, seal: &Seal, local_path: &str) -> Reply {
        if let Err(reply) = self.check_report(report) {
            return reply;
        }
        let (model, node) = (&report.model, &report.node);
        let artifact = &self.state.data.artifacts[model];
        if artifact.seal != Some(*seal) {
            return stale("the artifact is not sealed with this root");
        }
        if artifact
            .placements
            .get(node)
            .is_some_and(|p| p.state == PlacementState::Staged)
        {
            return Reply::Done;
        }
        let placements = &mut self.artifact_mut(model).placements;
        placements
            .entry(node.clone())
            .or_insert_with(|| Placement::new(report.incarnation));
        self.state.index.add_placement(model, node);
        self.staged(model, node, local_path, true);
        Reply::Done
    }

    pub(super) fn report_lost(&mut self, report: &ReportId) -> Reply {
        let placement = match self.check_task_report(report) {
            Ok(placement) => placement,
            Err(reply) => return reply,
        };
        if placement.state != PlacementState::Staged && !placement.whole {
            return stale("the node was not known to hold it");
        }
        let (model, node) = (&report.model, &report.node);
        let failure = Failure {
            code: "lost".into(),
            message: format!("node {node} had every byte of the model but no longer has it"),
            retryable: true,
        };
        self.end_attempt(model, node, &failure, 0);
        let placement = self.placement_mut(model, node);
        placement.whole = false;
        if placement.state == PlacementState::Staged {
            placement.state = PlacementState::Planned;
        }
        placement.local_path = None;
        placement.checksum_verified = false;
        placement.reserved_bytes = 0;
        self.mark(model);
        Reply::Done
    }

    /// The final folder is there.
    fn staged(&mut self, model: &ModelRef, node: &NodeId, local_path: &str, checksum_verified: bool) {
        self.set_sources(model, node, None);
        let artifact = self.artifact_mut(model);
        let total = artifact.total_size_bytes;
        if artifact.acquiring.as_ref() == Some(node) {
            artifact.acquiring = None;
        }
        let placement = self.placement_mut(model, node);
        placement.state = PlacementState::Staged;
        placement.whole = true;
        placement.failures = 0;
        placement.not_before_ms = 0;
        placement.local_path = Some(local_path.to_owned());
        placement.checksum_verified = checksum_verified;
        placement.last_error = None;
        let attempt = placement.fence.attempt;
        for id in self.live_jobs(model) {
            self.finish_view(&id, node, PlacementState::Staged, |view| {
                view.attempt = view.attempt.max(attempt);
                view.staged_bytes = total;
                view.local_path = Some(local_path.to_owned());
                view.checksum_verified = checksum_verified;
            });
        }
        self.mark(model);
    }

    /// The running attempt of this placement, if there is one, has failed: for each job that waits for it either
    /// another attempt may come, or its view has failed.
    pub(super) fn end_attempt(
        &mut self,
        model: &ModelRef,
        node: &NodeId,
        failure: &Failure,
        verified_bytes: u64,
    ) {
        let Some(artifact) = self.state.data.artifacts.get_mut(model) else {
            return;
        };
        let artifact = artifact.make_mut();
        let Some(placement) = artifact
            .placements
            .get_mut(node)
            .filter(|p| p.state == PlacementState::Acquiring)
        else {
            return;
        };
        placement.failures += 1;
        let read = placement.sources.take();
        let (kind, whole, in_a_row) = (placement.kind, placement.whole, placement.failures);
        // So that the node does not count as running anything while its jobs are looked at.
        placement.state = PlacementState::Failed;
        if artifact.acquiring.as_ref() == Some(node) {
            artifact.acquiring = None;
        }
        let total = artifact.total_size_bytes;
        if let Some(sources) = read {
            self.release(&sources);
        }
        let downloading = kind == TaskKind::Acquire && !whole;
        let available = self.state.is_available(&self.state.data.artifacts[model]);
        let mut again = false;
        for id in self.live_jobs(model) {
            let job = &self.state.data.jobs[&id];
            let Some(at) = job.position(node) else { continue };
            let (view, is_seed, max_attempts) = (&job.views[at], job.seed == *node, job.max_attempts);
            let seeded = job.seeded;
            let open = !view.is_finished();
            let concerned = open || (is_seed && downloading);
            if !concerned {
                continue;
            }
            // A failed download counts for jobs that this node seeds, and not once there is a copy to take. A failed
            // copy on a job's own seed counts from the seal on: before it this node may be the next to download.
            let counts = match downloading {
                true => is_seed && !available,
                false => seeded || whole || !is_seed,
            };
            let failures = if open { view.failures + 1 } else { in_a_row };
            let outcome = Outcome::Failed {
                retryable: failure.retryable,
            };
            let before = if open {
                view.state
            } else {
                PlacementState::Acquiring
            };
            let failed = counts
                && rules::placement_state(before, kind, is_seed || whole, outcome, failures, max_attempts)
                    == Some(PlacementState::Failed);
            if open {
                let view = &mut self.job_mut(&id).views[at];
                view.failures += u32::from(counts);
                view.last_error = Some(failure.message.clone());
                if !whole {
                    view.staged_bytes = verified_bytes.min(total);
                }
                self.touch(&id);
            }
            if !failed {
                again = true;
            } else if downloading && seeded {
                self.fail_job(&id, &format!("seed {node} failed: {}", failure.message));
            } else {
                self.finish_view(&id, node, PlacementState::Failed, |_| {});
            }
        }
        let now = self.now;
        let placement = self.placement_mut(model, node);
        if again {
            placement.state = PlacementState::Planned;
            placement.not_before_ms = now + rules::retry_delay_ms(in_a_row);
        } else {
            // The pause is between the attempts of those who wait: the next job begins at once.
            placement.state = PlacementState::Failed;
            placement.failures = 0;
            placement.not_before_ms = 0;
        }
        placement.reserved_bytes = 0;
        placement.last_error = Some(failure.message.clone());
        self.mark(model);
    }

    /// Gives the running task up if no live job wants it any more. The planner revokes it on the node.
    pub(super) fn release_placement(&mut self, model: &ModelRef, node: &NodeId) {
        let waited_for = self
            .state
            .live_jobs_of(model)
            .any(|(_, job)| job.position(node).is_some());
        let artifact = self.state.data.artifacts.get_mut(model).filter(|_| !waited_for);
        if let Some(placement) = artifact.and_then(|a| a.make_mut().placements.get_mut(node)) {
            // The next job begins at once.
            placement.failures = 0;
            placement.not_before_ms = 0;
        }
        let Some(artifact) = self.state.artifact(model) else {
            return;
        };
        let Some(placement) = artifact
            .placements
            .get(node)
            .filter(|p| p.state == PlacementState::Acquiring)
        else {
            return;
        };
        if self.state.is_wanted(model, node, placement) {
            return;
        }
        let artifact = self.artifact_mut(model);
        if artifact.acquiring.as_ref() == Some(node) {
            artifact.acquiring = None;
        }
        self.set_sources(model, node, None);
        let placement = self.placement_mut(model, node);
        placement.state = PlacementState::Planned;
        placement.reserved_bytes = 0;
    }

    /// What the placement's download reads from now on: kept until it reads no more.
    fn set_sources(&mut self, model: &ModelRef, node: &NodeId, sources: Option<Digest>) {
        let before = std::mem::replace(&mut self.placement_mut(model, node).sources, sources);
        if let Some(sources) = sources {
            self.state.index.refer(sources);
        }
        if let Some(before) = before {
            self.release(&before);
        }
    }

    /// Running attempts get fences of the new epoch: nodes may have obeyed higher ones of the old epoch that the
    /// restored log does not know.
    pub(super) fn raise_recovery_epoch(&mut self, epoch: u64) -> Reply {
        if epoch <= self.state.data.recovery_epoch {
            return stale(format!(
                "the recovery epoch is {} already",
                self.state.data.recovery_epoch
            ));
        }
        self.state.data.recovery_epoch = epoch;
        let models: Vec<ModelRef> = self.state.data.artifacts.keys().cloned().collect();
        for model in models {
            let artifact = self.artifact_mut(&model);
            let mut renewed = Vec::new();
            for (node, placement) in &mut artifact.placements {
                if placement.state == PlacementState::Acquiring {
                    artifact.attempts += 1;
                    placement.fence = Fence {
                        recovery_epoch: epoch,
                        attempt: artifact.attempts,
                    };
                    renewed.push((node.clone(), placement.kind, artifact.attempts, placement.whole));
                }
            }
            let jobs = if renewed.is_empty() {
                Vec::new()
            } else {
                self.live_jobs(&model)
            };
            for (node, kind, attempt, whole) in renewed {
                for id in &jobs {
                    self.begin_view(id, &node, attempt, kind);
                    let job = &self.state.data.jobs[id];
                    if let Some(at) = job
                        .position(&node)
                        .filter(|at| whole && !job.views[*at].is_finished())
                    {
                        self.job_mut(id).views[at].acquired = kind == TaskKind::Acquire;
                    }
                }
            }
        }
        Reply::Done
    }
}

/// Why a download's seal is refused.
fn refuse_seal(artifact: &Artifact, seal: &Seal, node: &NodeId) -> Option<Failure> {
    if seal.block_size_bytes != artifact.block_size_bytes || seal.algorithm != artifact.algorithm {
        return Some(Failure {
            code: "seal_mismatch".into(),
            message: format!(
                "node {node} computed its digests over blocks of {} bytes with {}, ordered were {} and {}; is it of another version?",
                seal.block_size_bytes,
                seal.algorithm.name(),
                artifact.block_size_bytes,
                artifact.algorithm.name()
            ),
            retryable: false,
        });
    }
    match artifact.seal {
        Some(sealed) if sealed != *seal => Some(Failure {
            code: "source_changed".into(),
            message: format!(
                "the source now gives other content (root {}) than the sealed version (root {}); restore the source, or distribute the new content under another revision",
                seal.root, sealed.root
            ),
            retryable: false,
        }),
        _ => None,
    }
}

impl Placement {
    fn new(incarnation: u64) -> Self {
        Self {
            incarnation,
            state: PlacementState::Planned,
            fence: Fence::default(),
            kind: TaskKind::Replicate,
            job: None,
            sources: None,
            whole: false,
            failures: 0,
            not_before_ms: 0,
            reserved_bytes: 0,
            authorised_ms: 0,
            local_path: None,
            checksum_verified: false,
            last_error: None,
        }
    }
}
