//! Commands change the state here and nowhere else.

mod blobs;
mod jobs;
mod nodes;
pub(crate) mod prune;
mod tasks;

use crate::{
    command::{Applied, Command, Reply},
    state::State,
};
use mooncake_proto::ids::{JobId, ModelRef};
use std::collections::BTreeSet;

/// One command being applied.
pub(crate) struct Apply<'a> {
    pub(crate) state: &'a mut State,
    /// Its log index: the version of every job that it changes.
    pub(crate) index: u64,
    /// Its time, never before that of an earlier command.
    pub(crate) now: u64,
    /// Jobs that changed visibly.
    touched: BTreeSet<JobId>,
    /// Artifacts whose jobs must be evaluated once the facts are in.
    dirty: BTreeSet<ModelRef>,
}

impl State {
    /// Applies the command at log index `index`. Total: every command has an answer, whatever the state.
    ///
    /// A refused command changes nothing, not even the time, so that the digest stays the same.
    pub fn apply(&mut self, index: u64, command: &Command) -> Applied {
        let required = command.required_version();
        if required > self.data.cluster_version {
            return Applied {
                reply: Reply::Gated { required },
                jobs: Vec::new(),
            };
        }
        let now = self.data.time_ms.max(command.now_ms());
        let mut apply = Apply {
            state: self,
            index,
            now,
            touched: BTreeSet::new(),
            dirty: BTreeSet::new(),
        };
        let reply = apply.command(command);
        apply.settle();
        let jobs: Vec<_> = std::mem::take(&mut apply.touched).into_iter().collect();
        if reply.is_refusal() {
            debug_assert!(
                jobs.is_empty(),
                "{} was refused but changed {jobs:?}",
                command.name()
            );
        } else {
            self.data.time_ms = now;
        }
        Applied { reply, jobs }
    }
}

impl Apply<'_> {
    fn command(&mut self, command: &Command) -> Reply {
        match command {
            Command::RegisterNode {
                node,
                store_id,
                expected_incarnation,
                about,
                now_ms: _,
            } => self.register_node(node, store_id, *expected_incarnation, about),
            Command::SetNodeStatus {
                node,
                incarnation,
                seen_since_ms,
                status,
                reason,
                now_ms: _,
            } => self.set_node_status(node, *incarnation, *seen_since_ms, *status, reason),
            Command::SetNodeFree {
                node,
                incarnation,
                capacity_bytes,
                free_bytes,
                measured_ms,
                now_ms: _,
            } => self.set_node_free(node, *incarnation, *capacity_bytes, *free_bytes, *measured_ms),
            Command::PutBlobPart {
                digest,
                index,
                count,
                total_bytes,
                bytes,
                now_ms: _,
            } => self.put_blob_part(digest, *index, *count, *total_bytes, bytes),
            Command::CreateJob(create) => self.create_job(create, 0),
            Command::CreateJobWithPriority { create, priority } => self.create_job(create, *priority),
            Command::CancelJob {
                job,
                progress,
                now_ms: _,
            } => self.cancel_job(job, progress),
            Command::AuthoriseAcquire {
                model,
                generation,
                attempt,
                node,
                incarnation,
                job,
                reserve_bytes,
                now_ms: _,
            } => self.authorise_acquire(
                model,
                *generation,
                *attempt,
                (node, *incarnation),
                job,
                *reserve_bytes,
            ),
            Command::AuthoriseReplicate {
                model,
                generation,
                first_attempt,
                nodes,
                now_ms: _,
            } => self.authorise_replicate(model, *generation, *first_attempt, nodes),
            Command::Seal {
                report,
                seal,
                now_ms: _,
            } => self.seal(report, seal),
            Command::ReportStaged {
                report,
                seal,
                local_path,
                checksum_verified,
                now_ms: _,
            } => self.report_staged(report, seal, local_path, *checksum_verified),
            Command::ReportFailed {
                report,
                failure,
                verified_bytes,
                now_ms: _,
            } => self.report_failed(report, failure, *verified_bytes),
            Command::ReportHeld {
                report,
                seal,
                local_path,
                now_ms: _,
            } => self.report_held(report, seal, local_path),
            Command::ReportLost { report, now_ms: _ } => self.report_lost(report),
            Command::Tick { now_ms: _ } => self.tick(),
            Command::Prune { now_ms: _ } => self.prune(),
            Command::RaiseRecoveryEpoch { epoch, now_ms: _ } => self.raise_recovery_epoch(*epoch),
            Command::SetClusterVersion { version, now_ms: _ } => {
                let current = &mut self.state.data.cluster_version;
                if *version < *current {
                    return Reply::Stale {
                        detail: format!("the cluster version is {current} and never goes back"),
                    };
                }
                *current = *version;
                Reply::Done
            }
            Command::SetLimits { limits, now_ms: _ } => {
                self.state.data.limits = *limits;
                Reply::Done
            }
        }
    }

    /// Marks a job as visibly changed.
    pub(crate) fn touch(&mut self, id: &JobId) {
        self.touched.insert(id.clone());
        let index = self.index;
        self.job_mut(id).version = index;
    }

    /// Marks an artifact's jobs for evaluation at the end of the command.
    pub(crate) fn mark(&mut self, model: &ModelRef) {
        self.dirty.insert(model.clone());
    }

    /// Evaluates what was marked until nothing is left: a job that ends may release tasks.
    fn settle(&mut self) {
        while let Some(model) = self.dirty.pop_first() {
            self.evaluate(&model);
        }
    }

    pub(crate) fn job_mut(&mut self, id: &JobId) -> &mut crate::types::Job {
        self.state
            .data
            .jobs
            .get_mut(id)
            .expect("an indexed job exists")
            .make_mut()
    }

    /// Ids of the live jobs that want this artifact.
    pub(crate) fn live_jobs(&self, model: &ModelRef) -> Vec<JobId> {
        self.state
            .index
            .live_by_model
            .get(model)
            .into_iter()
            .flatten()
            .cloned()
            .collect()
    }
}

pub(crate) fn stale(detail: impl Into<String>) -> Reply {
    Reply::Stale {
        detail: detail.into(),
    }
}
