//! The commands of the log, and what the state machine answers to them.
//!
//! Encoding: a version byte, then postcard. The order of variants and of fields is frozen: new ones go to
//! the end of the enum, with a [`Command::required_version`] of their own; a changed field needs a new
//! variant. `tests/golden/` holds the encoding of each, byte by byte.

use crate::{
    bytes::Bytes,
    types::{Failure, Fence, Limits, NodeAbout},
};
use mooncake_proto::{
    MAX_COMMAND_BYTES,
    api::{JobStatus, NodeStatus, Warning},
    codec::{self, CodecError},
    digest::{Algorithm, Digest},
    ids::{JobId, ModelRef, NodeId},
    manifest::Seal,
};
use serde::{Deserialize, Serialize};

/// Version byte of [`Command::encode`]. Frozen: it is in the Raft log.
pub const COMMAND_VERSION: u8 = 1;
/// The cluster version from which on jobs have priorities, in commands and in snapshots.
pub const PRIORITY_CLUSTER_VERSION: u32 = 2;
/// Room for the other fields of a command beside a blob's bytes.
pub const MAX_BLOB_PART_BYTES: usize = MAX_COMMAND_BYTES - 4096;
/// Most nodes in one [`Command::AuthoriseReplicate`]: with ids of full length still half a command.
pub const MAX_AUTHORISE_NODES: usize = 512;

/// One entry of the log. Every command carries the proposer's wall clock as `now_ms`; the state machine
/// never lets its time go back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields without a remark are what their names say")]
pub enum Command {
    /// #0: A node opened a session: it is up. The same id with another store id is a new incarnation, which
    /// holds nothing of the old one; refused unless `expected_incarnation` is the current one, so that of two
    /// clients under one new id only one gets in.
    RegisterNode {
        node: NodeId,
        store_id: String,
        /// What the proposer saw (0: no such node); only looked at when the store id differs.
        expected_incarnation: u64,
        about: NodeAbout,
        now_ms: u64,
    },
    /// #1: A session was lost (`Suspected`), the grace is over (`Down`), or the node left (`Down` from `Up`).
    SetNodeStatus {
        node: NodeId,
        incarnation: u64,
        /// [`crate::Node::since_ms`] as the proposer saw it: a verdict on an older silence does not count.
        seen_since_ms: u64,
        status: NodeStatus,
        /// For a person.
        reason: String,
        now_ms: u64,
    },
    /// #2: A newer measurement of a node's free space, proposed when the registered one would refuse an attempt.
    SetNodeFree {
        node: NodeId,
        incarnation: u64,
        capacity_bytes: u64,
        free_bytes: u64,
        /// When it was measured, by the proposer's clock.
        measured_ms: u64,
        now_ms: u64,
    },
    /// #3: A part of a manifest or source list that does not fit into [`Command::CreateJob`].
    PutBlobPart {
        /// SHA-256 of the whole.
        digest: Digest,
        index: u32,
        count: u32,
        total_bytes: u64,
        bytes: Bytes,
        now_ms: u64,
    },
    /// #4: A job. Idempotent by its id.
    CreateJob(Box<CreateJob>),
    /// #5: The caller canceled a job.
    CancelJob {
        job: JobId,
        /// Verified bytes as the leader saw them, so that frozen views show them, by the view's place in
        /// [`crate::Job::views`]: a command has room for every view of the largest job, whatever the nodes' names.
        progress: Vec<(u32, u64)>,
        now_ms: u64,
    },
    /// #6: The one download attempt of an artifact begins.
    AuthoriseAcquire {
        model: ModelRef,
        generation: u64,
        /// Must be the artifact's next attempt.
        attempt: u64,
        /// The seed of `job`.
        node: NodeId,
        incarnation: u64,
        /// Whose sources are read.
        job: JobId,
        /// Space that the attempt may take on the node.
        reserve_bytes: u64,
        now_ms: u64,
    },
    /// #7: Copies begin: the first node's attempt is `first_attempt`, the next one's one more, …
    AuthoriseReplicate {
        model: ModelRef,
        generation: u64,
        /// Must be the artifact's next attempt.
        first_attempt: u64,
        nodes: Vec<ReplicateTo>,
        now_ms: u64,
    },
    /// #8: The download attempt holds every byte and every declared checksum held.
    Seal {
        report: ReportId,
        seal: Seal,
        now_ms: u64,
    },
    /// #9: The attempt published the final folder.
    ReportStaged {
        report: ReportId,
        /// What the node's own digest list reproduces.
        seal: Seal,
        local_path: String,
        checksum_verified: bool,
        now_ms: u64,
    },
    /// #10: The attempt failed.
    ReportFailed {
        report: ReportId,
        failure: Failure,
        verified_bytes: u64,
        now_ms: u64,
    },
    /// #11: The node has the final folder although no running attempt reported it. `report.fence` is the
    /// placement's fence as the proposer saw it (default: no placement).
    ReportHeld {
        report: ReportId,
        seal: Seal,
        local_path: String,
        now_ms: u64,
    },
    /// #12: The node no longer has what the state believes it holds. `report.fence` as in `ReportHeld`.
    ReportLost { report: ReportId, now_ms: u64 },
    /// #13: Deadlines that passed fail their jobs.
    Tick { now_ms: u64 },
    /// #14: What is past its [`Limits`] goes.
    Prune { now_ms: u64 },
    /// #15: After restore or recovery: above what any node has obeyed. Attempts under way get new fences.
    RaiseRecoveryEpoch { epoch: u64, now_ms: u64 },
    /// #16: All masters can read this version's commands.
    SetClusterVersion { version: u32, now_ms: u64 },
    /// #17: Retention.
    SetLimits { limits: Limits, now_ms: u64 },
    /// #18, since cluster version 2: a job whose priority is not 0.
    CreateJobWithPriority {
        create: Box<CreateJob>,
        /// The higher, the sooner; see [`crate::Job::priority`].
        priority: i8,
    },
}

/// [`Command::CreateJob`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateJob {
    /// Its id.
    pub job: JobId,
    /// See [`mooncake_proto::manifest::ValidJob::request_digest`].
    pub request_digest: Digest,
    /// The artifact's key; the manifest must name the same.
    pub model: ModelRef,
    /// [`mooncake_proto::manifest::Manifest::encode`].
    pub manifest: BlobRef,
    /// [`mooncake_proto::manifest::Sources::encode`].
    pub sources: BlobRef,
    /// Used if the artifact is new.
    pub block_size_bytes: u32,
    /// Used if the artifact is new.
    pub algorithm: Algorithm,
    /// Who acquires from outside.
    pub seed: NodeId,
    /// Distinct, in the caller's order.
    pub targets: Vec<NodeId>,
    /// As given.
    pub target_replica_count: u64,
    /// Attempts per placement.
    pub max_attempts: u32,
    /// When it fails if it is still live.
    pub deadline_ms: Option<u64>,
    /// What the caller should know.
    pub warnings: Vec<Warning>,
    /// The proposer's clock.
    pub now_ms: u64,
}

/// A blob in a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BlobRef {
    /// Here.
    Inline(Bytes),
    /// Put before, by [`Command::PutBlobPart`].
    Stored(Digest),
}

/// One node of [`Command::AuthoriseReplicate`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicateTo {
    /// Where.
    pub node: NodeId,
    /// Its incarnation.
    pub incarnation: u64,
    /// Space that the attempt may take on the node.
    pub reserve_bytes: u64,
}

/// What a report is about; it counts only if every field matches the state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportId {
    /// The artifact.
    pub model: ModelRef,
    /// Its generation.
    pub generation: u64,
    /// Who reports.
    pub node: NodeId,
    /// Its incarnation.
    pub incarnation: u64,
    /// The attempt.
    pub fence: Fence,
}

/// Why a command cannot be put into the log.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum CommandError {
    /// Over [`MAX_COMMAND_BYTES`].
    #[error(
        "the command has {bytes} bytes, the limit of one log entry is {MAX_COMMAND_BYTES}; name fewer or shorter nodes, or put blobs in parts"
    )]
    TooLarge {
        /// Its size.
        bytes: usize,
    },
}

impl Command {
    /// The job that it creates.
    pub fn created(&self) -> Option<&CreateJob> {
        match self {
            Self::CreateJob(create) | Self::CreateJobWithPriority { create, .. } => Some(create),
            _ => None,
        }
    }

    /// The bytes of the log entry.
    pub fn encode(&self) -> Result<Vec<u8>, CommandError> {
        let bytes = codec::encode(COMMAND_VERSION, self);
        match bytes.len() {
            n if n > MAX_COMMAND_BYTES => Err(CommandError::TooLarge { bytes: n }),
            _ => Ok(bytes),
        }
    }

    /// Reads [`Command::encode`]'s bytes. An error here means that the log was written by a newer program or is
    /// damaged: the process must stop, since skipping an entry would make its state differ from the others'.
    pub fn decode(bytes: &[u8]) -> Result<Self, CodecError> {
        codec::decode(COMMAND_VERSION, bytes)
    }

    /// The lowest cluster version under which this command may be proposed.
    pub const fn required_version(&self) -> u32 {
        match self {
            Self::RegisterNode { .. }
            | Self::SetNodeStatus { .. }
            | Self::SetNodeFree { .. }
            | Self::PutBlobPart { .. }
            | Self::CreateJob(_)
            | Self::CancelJob { .. }
            | Self::AuthoriseAcquire { .. }
            | Self::AuthoriseReplicate { .. }
            | Self::Seal { .. }
            | Self::ReportStaged { .. }
            | Self::ReportFailed { .. }
            | Self::ReportHeld { .. }
            | Self::ReportLost { .. }
            | Self::Tick { .. }
            | Self::Prune { .. }
            | Self::RaiseRecoveryEpoch { .. }
            | Self::SetClusterVersion { .. }
            | Self::SetLimits { .. } => 1,
            Self::CreateJobWithPriority { .. } => PRIORITY_CLUSTER_VERSION,
        }
    }

    /// The proposer's clock.
    pub const fn now_ms(&self) -> u64 {
        match self {
            Self::CreateJob(create) | Self::CreateJobWithPriority { create, .. } => create.now_ms,
            Self::RegisterNode { now_ms, .. }
            | Self::SetNodeStatus { now_ms, .. }
            | Self::SetNodeFree { now_ms, .. }
            | Self::PutBlobPart { now_ms, .. }
            | Self::CancelJob { now_ms, .. }
            | Self::AuthoriseAcquire { now_ms, .. }
            | Self::AuthoriseReplicate { now_ms, .. }
            | Self::Seal { now_ms, .. }
            | Self::ReportStaged { now_ms, .. }
            | Self::ReportFailed { now_ms, .. }
            | Self::ReportHeld { now_ms, .. }
            | Self::ReportLost { now_ms, .. }
            | Self::Tick { now_ms }
            | Self::Prune { now_ms }
            | Self::RaiseRecoveryEpoch { now_ms, .. }
            | Self::SetClusterVersion { now_ms, .. }
            | Self::SetLimits { now_ms, .. } => *now_ms,
        }
    }

    /// A short name for logs and metrics.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::RegisterNode { .. } => "register_node",
            Self::SetNodeStatus { .. } => "set_node_status",
            Self::SetNodeFree { .. } => "set_node_free",
            Self::PutBlobPart { .. } => "put_blob_part",
            Self::CreateJob(_) => "create_job",
            Self::CancelJob { .. } => "cancel_job",
            Self::AuthoriseAcquire { .. } => "authorise_acquire",
            Self::AuthoriseReplicate { .. } => "authorise_replicate",
            Self::Seal { .. } => "seal",
            Self::ReportStaged { .. } => "report_staged",
            Self::ReportFailed { .. } => "report_failed",
            Self::ReportHeld { .. } => "report_held",
            Self::ReportLost { .. } => "report_lost",
            Self::Tick { .. } => "tick",
            Self::Prune { .. } => "prune",
            Self::RaiseRecoveryEpoch { .. } => "raise_recovery_epoch",
            Self::SetClusterVersion { .. } => "set_cluster_version",
            Self::SetLimits { .. } => "set_limits",
            Self::CreateJobWithPriority { .. } => "create_job_with_priority",
        }
    }
}

/// Cuts a blob into the commands that put it into the state.
pub fn blob_parts(bytes: &[u8], now_ms: u64) -> Vec<Command> {
    let digest = Digest::sha256(bytes);
    let count = bytes.len().div_ceil(MAX_BLOB_PART_BYTES).max(1) as u32;
    (0..count)
        .map(|index| {
            let start = index as usize * MAX_BLOB_PART_BYTES;
            let end = bytes.len().min(start + MAX_BLOB_PART_BYTES);
            let total_bytes = bytes.len() as u64;
            Command::PutBlobPart {
                digest,
                index,
                count,
                total_bytes,
                bytes: bytes[start..end].to_vec().into(),
                now_ms,
            }
        })
        .collect()
}

/// What [`crate::State::apply`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// For whoever proposed the command.
    pub reply: Reply,
    /// Jobs that changed visibly: wake their long polls.
    pub jobs: Vec<JobId>,
}

/// The answer to a command. Serialised between masters of one version span only: new variants at the end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Applied, or found to be applied already.
    Done,
    /// It does not match the state (fence, incarnation, generation, order of attempts …) and changed nothing.
    Stale {
        /// What did not match.
        detail: String,
    },
    /// [`Command::RegisterNode`] was applied.
    Registered {
        /// The node's incarnation.
        incarnation: u64,
    },
    /// [`Command::RegisterNode`]: another store has this node id.
    NodeIdTaken {
        /// The incarnation that has it.
        incarnation: u64,
    },
    /// [`Command::CreateJob`]: there it is.
    Job {
        /// False: it was there before, with the same body.
        created: bool,
    },
    /// [`Command::CreateJob`]: the same body was a job that is past its retention.
    JobForgotten,
    /// [`Command::CreateJob`]: the id is taken by another body.
    JobConflict,
    /// [`Command::CreateJob`]: the model version is sealed with other content, or a live job wants other content.
    ArtifactConflict {
        /// For a person.
        detail: String,
    },
    /// [`Command::CreateJob`] names nodes that are not registered.
    UnknownNodes(Vec<NodeId>),
    /// [`Command::CreateJob`] refers to a blob that is not (completely) here: put its parts again.
    BlobMissing {
        /// Which.
        digest: Digest,
    },
    /// [`Command::CancelJob`]: no such job.
    JobNotFound,
    /// [`Command::CancelJob`]: it ended before.
    JobTerminal {
        /// How.
        status: JobStatus,
    },
    /// The command is not well-formed; its proposer is at fault. It changed nothing.
    Invalid {
        /// What is wrong.
        detail: String,
    },
    /// Too much is pending; try again later. It changed nothing.
    Overloaded {
        /// What is.
        detail: String,
    },
    /// The cluster's version does not allow this command yet. It changed nothing.
    Gated {
        /// The version it needs.
        required: u32,
    },
}

impl Reply {
    /// Whether the command was refused and changed nothing.
    pub const fn is_refusal(&self) -> bool {
        !matches!(self, Self::Done | Self::Registered { .. } | Self::Job { .. })
    }
}
