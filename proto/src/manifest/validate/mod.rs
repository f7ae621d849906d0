//! Validation of a create request: every fault at once, each with its JSON pointer.

mod files;
mod rules;

use super::*;
use crate::{
    api::{CreateJobRequest, ModelSpec, Warning},
    ids::{JobId, MAX_MODEL_COMPONENT_BYTES, NodeId},
};
use std::collections::{BTreeMap, BTreeSet};

/// Most warnings kept: they go into the log and into every snapshot.
const MAX_WARNINGS: usize = 100;

/// Default attempts per placement.
const DEFAULT_MAX_ATTEMPTS: u32 = 3;
/// Most attempts per placement a caller may ask for.
const MAX_ATTEMPTS: u32 = 10;
/// Longest deadline a caller may ask for: one year.
const MAX_DEADLINE_S: u64 = 365 * 24 * 3600;
/// Longest free-form string kept from a request (`checksum`, `artifact_key`, `file_manifest_version`).
const MAX_TEXT_BYTES: usize = 1024;
/// Site policy.
#[derive(Clone, Copy, Debug, Default)]
pub struct ValidateOptions {
    /// Refuse files whose checksum is no SHA-256 digest.
    pub require_checksums: bool,
}

/// A create request that passed every rule that does not depend on the cluster's state.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidJob {
    /// As given.
    pub job_id: Option<JobId>,
    /// Without sources.
    pub manifest: Manifest,
    /// Parallel to the manifest's files.
    pub sources: Sources,
    /// As given.
    pub seed: NodeId,
    /// Distinct, in the caller's order.
    pub targets: Vec<NodeId>,
    /// As given, or the number of targets.
    pub target_replica_count: u64,
    /// Attempts per placement.
    pub max_attempts: u32,
    /// Seconds from creation.
    pub deadline_s: Option<u64>,
    /// In [`PRIORITY_RANGE`].
    pub priority: i8,
    /// What the caller should know.
    pub warnings: Vec<Warning>,
}

impl ValidJob {
    /// The canonical request digest, by which "the same body" is decided: everything but the job id and the warnings.
    /// Version 1 has no priority, and is what a request without one has for ever: masters of before remember it.
    pub fn request_digest(&self) -> Digest {
        let name = match self.priority {
            0 => "mooncake-distribution job request v1",
            _ => "mooncake-distribution job request v2",
        };
        let parts = (
            name,
            self.manifest.digest(),
            Digest::sha256(&self.sources.encode()),
            &self.seed,
            &self.targets,
            self.target_replica_count,
            self.max_attempts,
            self.deadline_s,
        );
        let bytes = match self.priority {
            0 => codec::encode(1, &parts),
            priority => codec::encode(1, &(parts, priority)),
        };
        Digest::sha256(&bytes)
    }
}

/// A request without faults of its own, and what the site's policy has against it: a policy holds for new jobs,
/// and is no part of what a request means.
#[derive(Debug)]
pub struct Examined {
    /// The request.
    pub job: ValidJob,
    /// Empty where the policy allows it.
    pub policy: Faults,
}

/// Checks a request; see the module docs.
pub fn validate(request: CreateJobRequest, options: ValidateOptions) -> Result<ValidJob, Vec<Fault>> {
    match examine(request, options) {
        Ok(Examined { job, policy }) if policy.is_empty() => Ok(job),
        Ok(Examined { policy: faults, .. }) | Err(faults) => Err(faults.into_vec()),
    }
}

/// As [`validate()`], but what is against the site's policy only is told apart. On failure those are among the
/// faults. Time and memory follow the size of the request, whatever it asks for.
pub fn examine(request: CreateJobRequest, options: ValidateOptions) -> Result<Examined, Faults> {
    let mut v = Validator {
        options,
        faults: Faults::default(),
        policy: Faults::default(),
        warnings: Vec::new(),
    };
    let job = v.job(request);
    match job {
        Some(mut job) if v.faults.is_empty() => {
            job.warnings = v.warnings;
            Ok(Examined {
                job,
                policy: v.policy,
            })
        }
        _ => {
            debug_assert!(!v.faults.is_empty(), "a request without faults validates");
            v.faults.append(v.policy);
            Err(v.faults)
        }
    }
}

struct Validator {
    options: ValidateOptions,
    faults: Faults,
    /// Against the site's policy only.
    policy: Faults,
    warnings: Vec<Warning>,
}

impl Validator {
    fn fault(&mut self, pointer: impl Into<String>, code: &str, detail: impl Into<String>) {
        self.faults.push(pointer, code, detail);
    }

    fn warn(&mut self, pointer: impl Into<String>, code: &str, detail: impl Into<String>) {
        if self.warnings.len() < MAX_WARNINGS {
            self.warnings.push(Warning {
                code: code.into(),
                pointer: Some(pointer.into()),
                detail: detail.into(),
            });
        }
    }

    fn required<T>(&mut self, value: Option<T>, pointer: impl Into<String>) -> Option<T> {
        if value.is_none() {
            self.fault(pointer, "missing", "this member is required");
        }
        value
    }

    fn job(&mut self, request: CreateJobRequest) -> Option<ValidJob> {
        let job_id = match request.job_id.as_deref().map(JobId::parse) {
            Some(Err(why)) => {
                self.fault("/job_id", "invalid_job_id", why);
                None
            }
            Some(Ok(id)) => Some(id),
            None => None,
        };
        let model = self
            .required(request.model, "/model")
            .map(|m| self.model(m, "/model"));
        let manifest = self.required(request.manifest, "/manifest");
        let manifest = manifest.and_then(|m| self.manifest(m, model.flatten()));
        let seed = self.required(request.seed_node_id, "/seed_node_id");
        let seed = seed.and_then(|s| self.node(&s, "/seed_node_id"));
        let given = request.target_nodes.as_ref().map_or(0, Vec::len);
        let targets = self.targets(request.target_nodes);

        let mut target_replica_count = targets.as_ref().map_or(0, |t| t.len() as u64);
        if let (Some(want), Some(targets)) = (
            request.replica_policy.and_then(|p| p.target_replica_count),
            // Where an id is no id, nobody knows how many nodes were meant.
            targets.as_ref().filter(|targets| targets.len() == given),
        ) {
            let pointer = "/replica_policy/target_replica_count";
            let named = targets.iter().chain(seed.as_ref()).collect::<BTreeSet<_>>().len() as u64;
            if want > named {
                self.fault(
                    pointer,
                    "replica_count_too_high",
                    format!("{want} replicas are wanted, but only {named} distinct nodes are named"),
                );
            } else if want < named {
                self.warn(
                    pointer,
                    "replica_count_below_nodes",
                    format!(
                        "{want} replicas are wanted, {named} distinct nodes are named: every target is staged"
                    ),
                );
            }
            target_replica_count = want;
        }

        let policy = request.policy.unwrap_or_default();
        let max_attempts = policy.max_attempts.unwrap_or(DEFAULT_MAX_ATTEMPTS);
        if !(1..=MAX_ATTEMPTS).contains(&max_attempts) {
            self.fault(
                "/policy/max_attempts",
                "out_of_range",
                format!("must be 1 to {MAX_ATTEMPTS}"),
            );
        }
        if let Some(s) = policy.deadline_s
            && !(1..=MAX_DEADLINE_S).contains(&s)
        {
            self.fault(
                "/policy/deadline_s",
                "out_of_range",
                format!("must be 1 to {MAX_DEADLINE_S} seconds"),
            );
        }

        let priority = match request.priority.map_or(Ok(0), i8::try_from) {
            Ok(priority) if PRIORITY_RANGE.contains(&priority) => priority,
            _ => {
                let (least, most) = (PRIORITY_RANGE.start(), PRIORITY_RANGE.end());
                self.fault("/priority", "out_of_range", format!("must be {least} to {most}"));
                0
            }
        };

        let (manifest, sources) = manifest?;
        Some(ValidJob {
            job_id,
            manifest,
            sources,
            seed: seed?,
            targets: targets?,
            target_replica_count,
            max_attempts,
            deadline_s: policy.deadline_s,
            priority,
            warnings: Vec::new(),
        })
    }

    fn node(&mut self, text: &str, pointer: &str) -> Option<NodeId> {
        NodeId::parse(text)
            .map_err(|why| self.fault(pointer, "invalid_node_id", why))
            .ok()
    }

    fn targets(&mut self, targets: Option<Vec<String>>) -> Option<Vec<NodeId>> {
        let targets = self.required(targets, "/target_nodes")?;
        if targets.is_empty() {
            self.fault("/target_nodes", "empty", "at least one target node is required");
        }
        if targets.len() > MAX_TARGETS {
            let detail = format!("more than {MAX_TARGETS} targets are named, which is the limit");
            self.fault("/target_nodes", "limit_exceeded", detail);
            return None;
        }
        let bytes: usize = targets.iter().map(String::len).sum();
        if bytes > MAX_TARGETS_BYTES {
            let detail = format!(
                "the target ids have {bytes} bytes together, the limit is {MAX_TARGETS_BYTES}: make two jobs"
            );
            self.fault("/target_nodes", "limit_exceeded", detail);
            return None;
        }
        let mut seen = BTreeMap::new();
        let mut out = Vec::with_capacity(targets.len());
        for (i, text) in targets.iter().enumerate() {
            let pointer = format!("/target_nodes/{i}");
            let Some(node) = self.node(text, &pointer) else {
                continue;
            };
            if let Some(first) = seen.insert(node.clone(), i) {
                seen.insert(node.clone(), first);
                self.fault(
                    pointer,
                    "duplicate_target",
                    format!("{node} is already /target_nodes/{first}"),
                );
            }
            out.push(node);
        }
        Some(out)
    }

    fn model(&mut self, spec: ModelSpec, base: &str) -> Option<ModelRef> {
        // Each one is looked at before the first that is missing ends this.
        let model_id = self.component(spec.model_id, base, "model_id");
        let revision = self.component(spec.revision, base, "revision");
        let format = self.component(spec.format, base, "format");
        let provider = self.component(spec.provider, base, "provider");
        Some(ModelRef {
            model_id: model_id?,
            revision: revision?,
            format: format?,
            provider: provider?,
        })
    }

    /// `None` only where a fault was recorded.
    fn component(&mut self, value: Option<String>, base: &str, name: &str) -> Option<String> {
        let pointer = format!("{base}/{name}");
        let value = self.required(value, pointer.clone())?;
        if value.is_empty() {
            self.fault(pointer, "empty", "must not be empty");
        } else if value.len() > MAX_MODEL_COMPONENT_BYTES {
            let detail = format!("{} bytes, the limit is {MAX_MODEL_COMPONENT_BYTES}", value.len());
            self.fault(pointer, "limit_exceeded", detail);
        } else if let Some(bad) = value.chars().find(|c| c.is_control()) {
            self.fault(
                pointer,
                "invalid_character",
                format!("holds the control character {bad:?}"),
            );
        }
        Some(value)
    }

    fn text(&mut self, value: Option<String>, pointer: String) -> String {
        let value = value.unwrap_or_default();
        if value.len() > MAX_TEXT_BYTES {
            let detail = format!("{} bytes, the limit is {MAX_TEXT_BYTES}", value.len());
            self.fault(pointer, "limit_exceeded", detail);
        }
        value
    }
}
