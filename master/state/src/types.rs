//! What the state is made of. Every type here is in snapshots: fields and variants are frozen in their
//! order; what is added goes behind them, in a new version of the snapshot ([`crate::SNAPSHOT_VERSION_2`]).

use crate::bytes::Bytes;
use mooncake_proto::{
    api::{JobStatus, NodeStatus, PlacementState, Warning},
    digest::{Algorithm, Digest},
    ids::{JobId, ModelRef, NodeId},
    manifest::Seal,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What fences orders and reports: compared epoch first. Attempts count up per artifact and are shared by
/// acquire and replicate orders; the epoch is raised by restore and by recovery after quorum loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Fence {
    /// The recovery epoch in which the attempt was authorised.
    pub recovery_epoch: u64,
    /// The attempt; 0: none was ever authorised.
    pub attempt: u64,
}

impl From<Fence> for mooncake_proto::pb::session::Fence {
    fn from(f: Fence) -> Self {
        Self {
            recovery_epoch: f.recovery_epoch,
            attempt: f.attempt,
        }
    }
}

impl From<mooncake_proto::pb::session::Fence> for Fence {
    fn from(f: mooncake_proto::pb::session::Fence) -> Self {
        Self {
            recovery_epoch: f.recovery_epoch,
            attempt: f.attempt,
        }
    }
}

/// What an attempt does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum TaskKind {
    /// `MODEL_DOWNLOAD`: read the sources.
    Acquire,
    /// The RFC's copy tasks: pull from peers.
    Replicate,
}

/// Why an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Stable, for programs, e.g. `checksum_mismatch`.
    pub code: String,
    /// For a person: what failed, where, why, what to do next.
    pub message: String,
    /// Another attempt on the same node may succeed.
    pub retryable: bool,
}

/// A node, by its `host:port`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Random, kept in the node's data folder.
    pub store_id: String,
    /// Counts up when the node id comes back with another store id.
    pub incarnation: u64,
    /// What it told of itself.
    pub about: NodeAbout,
    /// Up, suspected, down.
    pub status: NodeStatus,
    /// Since when it has this status, or since its last registration: the grace of a suspected node runs from here,
    /// whoever leads, and a verdict that was formed before a registration does not count after it.
    pub since_ms: u64,
    /// When [`NodeAbout::free_bytes`] was measured.
    pub free_at_ms: u64,
    /// Why it is suspected or down.
    pub reason: Option<String>,
}

/// What a node tells of itself when it registers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeAbout {
    /// Where peers dial it.
    pub data_address: String,
    /// Its own HTTP address.
    pub http_address: String,
    /// `tcp`, `rdma`.
    pub transports: Vec<String>,
    /// E.g. `rack`, `zone`.
    pub labels: BTreeMap<String, String>,
    /// Its software's version.
    pub version: String,
    /// Size of its filesystem; 0: unknown.
    pub capacity_bytes: u64,
    /// Free bytes when it registered.
    pub free_bytes: u64,
}

/// One model version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifact {
    /// Counts up when an unsealed version is replaced by other content.
    pub generation: u64,
    /// Blob: the manifest; also its identity.
    pub manifest: Digest,
    /// Sum of the files' sizes.
    pub total_size_bytes: u64,
    /// Files in the manifest.
    pub files: u64,
    /// Objects in the manifest.
    pub objects: u64,
    /// Fixed for this generation.
    pub block_size_bytes: u32,
    /// Fixed for this generation.
    pub algorithm: Algorithm,
    /// The last attempt authorised. Never goes back, not even from one generation to the next.
    pub attempts: u64,
    /// Once every declared checksum held on a seed.
    pub seal: Option<Seal>,
    /// Where the one authorised download runs.
    pub acquiring: Option<NodeId>,
    /// What is known of it on each node.
    pub placements: BTreeMap<NodeId, Placement>,
    /// Since when no live job wants it.
    pub unwanted_since_ms: Option<u64>,
}

/// One artifact on one node, shared by all jobs that want it there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// Of the node: what another incarnation held does not count.
    pub incarnation: u64,
    /// `Planned`: nothing runs, another attempt may come. `Acquiring`: the attempt of `fence` runs. `Staged`,
    /// `Failed`: how the last attempt ended.
    pub state: PlacementState,
    /// The last attempt authorised here.
    pub fence: Fence,
    /// What that attempt does.
    pub kind: TaskKind,
    /// For which job it was authorised (a download reads this job's sources).
    pub job: Option<JobId>,
    /// Blob: what the running download reads. Set exactly while it runs and is not `whole`, and kept for as long,
    /// whatever becomes of its job: other jobs follow it.
    pub sources: Option<Digest>,
    /// Every block is verified on the node although it may not be published: true from the seal on for the
    /// node that acquired it.
    pub whole: bool,
    /// Failed attempts in a row.
    pub failures: u32,
    /// No new attempt before.
    pub not_before_ms: u64,
    /// Space that the attempt may still take.
    pub reserved_bytes: u64,
    /// When the last attempt was authorised.
    pub authorised_ms: u64,
    /// The final folder, while staged.
    pub local_path: Option<String>,
    /// The node itself checked every byte.
    pub checksum_verified: bool,
    /// How the last attempt failed.
    pub last_error: Option<String>,
}

/// One request to stage one model version on some nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// By which "the same body" is decided.
    pub request_digest: Digest,
    /// The artifact.
    pub model: ModelRef,
    /// Its generation.
    pub generation: u64,
    /// The manifest's digest.
    pub manifest: Digest,
    /// Blob: where the seed reads each file. Kept while the job is live.
    pub sources: Digest,
    /// Who acquires from outside.
    pub seed: NodeId,
    /// The targets in the caller's order; if the seed is not among them it comes last in `views`.
    pub targets: Vec<NodeId>,
    /// As given.
    pub target_replica_count: u64,
    /// Attempts per placement.
    pub max_attempts: u32,
    /// When it fails if it is still live.
    pub deadline_ms: Option<u64>,
    /// What the caller should know.
    pub warnings: Vec<Warning>,
    /// Of the manifest.
    pub total_size_bytes: u64,
    /// Of the manifest.
    pub objects: u64,
    /// Its status.
    pub status: JobStatus,
    /// Why it failed, or `canceled`.
    pub last_error: Option<String>,
    /// When each status was reached.
    pub transitions: BTreeMap<JobStatus, u64>,
    /// The artifact was once sealed and held by a live node while this job ran: the seed counts no more.
    pub seeded: bool,
    /// Its placements as it sees them: the targets, then the seed if it is not a target.
    pub views: Vec<View>,
    /// The log index of the last change that a caller can see.
    pub version: u64,
    /// Where not all can be served at once, jobs of a higher one go first; 0 unless the caller gave another. Not among the
    /// encoded fields, which are those of snapshots of version 1: see [`crate::State::encode_snapshot`].
    #[serde(skip)]
    pub priority: i8,
}

/// One placement as one job sees it. Frozen once `finished_ms` is set or the job is terminal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// Its state for this job; never goes back.
    pub state: PlacementState,
    /// The attempt last seen; 0: none.
    pub attempt: u64,
    /// What that attempt does; none: there was nothing to do.
    pub kind: Option<TaskKind>,
    /// The download's bytes were sealed: that task is done although its publication may not be.
    pub acquired: bool,
    /// Attempts that failed while this job wanted them.
    pub failures: u32,
    /// Verified bytes known to the log; while the task runs the leader knows better.
    pub staged_bytes: u64,
    /// The final folder, once staged.
    pub local_path: Option<String>,
    /// The node itself checked every byte.
    pub checksum_verified: bool,
    /// Why it failed (or why the last attempt did).
    pub last_error: Option<String>,
    /// When it was `planned`.
    pub planned_ms: u64,
    /// When it became `acquiring`.
    pub acquiring_ms: Option<u64>,
    /// When it became `staged` or `failed`.
    pub finished_ms: Option<u64>,
}

impl Job {
    /// The nodes of `views`, in order.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeId> {
        self.targets
            .iter()
            .chain((self.views.len() > self.targets.len()).then_some(&self.seed))
    }

    /// Whether the node is among its targets, or its seed, and has come to no end there yet.
    pub fn is_open(&self, node: &NodeId) -> bool {
        self.position(node)
            .is_some_and(|at| !self.views[at].is_finished())
    }

    /// Whether it waits for the model to be on the node: as a target, or as the seed of the first copy.
    pub fn waits_for(&self, node: &NodeId) -> bool {
        self.is_open(node) && (!self.seeded || self.is_target(node))
    }

    /// Whether the node is one that the caller asked for.
    pub fn is_target(&self, node: &NodeId) -> bool {
        self.position(node).is_some_and(|at| self.is_requested(at))
    }

    /// Whether its seed may download for it: for the first copy, or again when all copies are gone.
    pub fn may_download(&self) -> bool {
        self.seeded || self.is_open(&self.seed)
    }

    /// Where `node` is in `views`.
    pub fn position(&self, node: &NodeId) -> Option<usize> {
        self.nodes().position(|n| n == node)
    }

    /// Whether view `at` is a target's, not that of a seed beside the targets.
    pub fn is_requested(&self, at: usize) -> bool {
        at < self.targets.len()
    }

    /// Whether it can still change.
    pub fn is_live(&self) -> bool {
        !self.status.is_terminal()
    }

    /// When it was created.
    pub fn created_ms(&self) -> u64 {
        self.transitions
            .get(&JobStatus::Planned)
            .copied()
            .unwrap_or_default()
    }

    /// When it became terminal.
    pub fn finished_ms(&self) -> Option<u64> {
        self.status
            .is_terminal()
            .then(|| self.transitions.get(&self.status).copied())
            .flatten()
    }
}

impl View {
    /// Whether its state is final.
    pub fn is_finished(&self) -> bool {
        matches!(self.state, PlacementState::Staged | PlacementState::Failed)
    }
}

/// A manifest or source list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    /// Its bytes.
    pub content: BlobContent,
    /// Since when it is unreferenced, or when its last part came.
    pub since_ms: u64,
}

/// The bytes of a [`Blob`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BlobContent {
    /// Parts are missing.
    Partial {
        /// How many parts there are.
        count: u32,
        /// Their sizes' sum.
        total_bytes: u64,
        /// Those that came.
        parts: BTreeMap<u32, Bytes>,
    },
    /// All there; the digest holds.
    Complete(Bytes),
}

impl BlobContent {
    /// Bytes held.
    pub fn len(&self) -> u64 {
        match self {
            Self::Partial { parts, .. } => parts.values().map(|p| p.len() as u64).sum(),
            Self::Complete(bytes) => bytes.len() as u64,
        }
    }

    /// Whether no byte is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What stays of a job after it was pruned, so that a repeated request is still recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PastJob {
    /// Of its request.
    pub request_digest: Digest,
    /// When it ended.
    pub finished_ms: u64,
}

/// How long things are kept. Replicated, so that every master prunes the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Terminal jobs are kept this long …
    pub job_ttl_ms: u64,
    /// … but at most this many.
    pub max_terminal_jobs: u64,
    /// Ids of pruned jobs are kept this long after the job ended …
    pub id_ttl_ms: u64,
    /// … but at most this many.
    pub max_ids: u64,
    /// Unreferenced blobs, complete or not.
    pub blob_ttl_ms: u64,
    /// Unsealed artifacts that no live job wants; nodes keep their staging as long.
    pub unsealed_ttl_ms: u64,
    /// Nodes that are down and named by no live job.
    pub down_node_ttl_ms: u64,
}

const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;

impl Default for Limits {
    fn default() -> Self {
        Self {
            job_ttl_ms: 7 * DAY_MS,
            max_terminal_jobs: 10_000,
            id_ttl_ms: 30 * DAY_MS,
            max_ids: 1_000_000,
            blob_ttl_ms: HOUR_MS,
            unsealed_ttl_ms: DAY_MS,
            down_node_ttl_ms: 30 * DAY_MS,
        }
    }
}
