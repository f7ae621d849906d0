//! What the API answers.

use crate::ids::{JobId, ModelRef, NodeId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A job's status. `Ord` is the order of the state machine; the last three are terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobStatus {
    /// Accepted; nothing is under way.
    Planned,
    /// The seed is acquiring or publishing.
    Seeding,
    /// The artifact is sealed; copies are under way.
    Replicating,
    /// Every placement is staged.
    Completed,
    /// At least one placement failed.
    Failed,
    /// The caller canceled it.
    Canceled,
}

impl JobStatus {
    /// Whether it never changes again.
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Canceled)
    }
}

/// A placement's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlacementState {
    /// No task yet.
    Planned,
    /// A task is under way.
    Acquiring,
    /// The final folder is there and every byte of it was proven.
    Staged,
    /// It will not be staged by this job.
    Failed,
}

/// A node's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeStatus {
    /// Its session is alive.
    Up,
    /// Its session was lost; the grace runs.
    Suspected,
    /// The grace is over, or it deregistered.
    Down,
}

/// The job snapshot. The RFC's fields first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobSnapshot {
    /// Its id.
    pub job_id: JobId,
    /// Its status.
    pub status: JobStatus,
    /// Targets in the order of the request, then the seed if it is not a target.
    pub placements: Vec<PlacementView>,
    /// Why it failed, or `canceled`.
    pub last_error: Option<String>,
    /// Why it has not begun, where that is not to be seen otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting_for: Option<String>,
    /// The model version.
    pub model_ref: ModelRef,
    /// The higher, the sooner, where not all can be served at once.
    #[serde(default)]
    pub priority: i8,
    /// The seed.
    pub seed_node_id: NodeId,
    /// The targets.
    pub target_nodes: Vec<NodeId>,
    /// Totals.
    pub progress: Progress,
    /// When each status was reached (RFC 3339), e.g. `{"planned": "…", "seeding": "…"}`.
    pub transitions: BTreeMap<JobStatus, String>,
    /// What the caller should know although nothing failed.
    pub warnings: Vec<Warning>,
    /// The RFC's tasks.
    pub tasks: Vec<TaskView>,
    /// Log index of the last recorded change of this job: pass it as `since` of a long poll. Live figures (byte
    /// counts, rates, objects done, `running`, `waiting_for`) change without it.
    pub version: u64,
}

/// One placement as one job sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlacementView {
    /// Where.
    pub node_id: NodeId,
    /// Its state.
    pub state: PlacementState,
    /// The final folder, once staged.
    pub local_path: Option<String>,
    /// Verified bytes; the model's size once staged. Advisory until then.
    pub staged_bytes: u64,
    /// True only when the node itself checked every byte.
    pub checksum_verified: bool,
    /// Why it failed.
    pub last_error: Option<String>,
    /// False for a seed that is not a target.
    pub requested: bool,
    /// The last try authorised for this placement; 0: none yet. Tries are counted per model version, over all its
    /// nodes and jobs: the first one here need not be 1, and numbers may be left out.
    pub attempt: u64,
    /// By what the node's last copy of the model came from its peers (`rdma`, `tcp`, both), as its client says itself of what
    /// it fetched since it was started: nothing while it is not connected, and where nothing came from peers. Advisory, and
    /// in linearizable answers only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub transports: Vec<String>,
    /// When each state was reached (RFC 3339).
    pub transitions: BTreeMap<PlacementState, String>,
}

/// Totals over a job's placements.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Model size times requested placements.
    pub bytes_total: u64,
    /// Verified bytes on requested placements.
    pub bytes_staged: u64,
    /// Recent rate of `bytes_staged`; 0 when nothing moves.
    pub bytes_per_second: u64,
    /// Requested placements.
    pub placements_total: u64,
    /// Of these, staged.
    pub placements_staged: u64,
}

/// A remark on a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// Stable, e.g. `checksum_not_checked`.
    pub code: String,
    /// JSON pointer into the request, where there is one.
    pub pointer: Option<String>,
    /// For a person.
    pub detail: String,
}

/// The kind of a task, by the RFC's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TaskType {
    /// Initial acquisition.
    #[serde(rename = "MODEL_DOWNLOAD")]
    ModelDownload,
    /// The copy tasks of one node.
    #[serde(rename = "COPY")]
    Copy,
}

/// A task's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TaskState {
    /// Authorised; no sign of life yet, or the node is away.
    Pending,
    /// Under way.
    Running,
    /// Done.
    Succeeded,
    /// Failed.
    Failed,
    /// Stopped.
    Canceled,
}

/// One task: the download, or the copy tasks (one per object) of one node as one batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskView {
    /// Its kind.
    #[serde(rename = "type")]
    pub kind: TaskType,
    /// Where it runs.
    pub node_id: NodeId,
    /// Its state.
    pub state: TaskState,
    /// Objects finished.
    pub objects_done: u64,
    /// Objects in all.
    pub objects_total: u64,
}

/// `GET /api/v1/model-distribution/jobs` without `job_id`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobList {
    /// Newest first.
    pub jobs: Vec<JobSummary>,
    /// Pass as `page_token` for the next page.
    pub next_page_token: Option<String>,
}

/// One line of a job list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobSummary {
    /// Its id.
    pub job_id: JobId,
    /// Its status.
    pub status: JobStatus,
    /// The model version.
    pub model_ref: ModelRef,
    /// As in the snapshot.
    #[serde(default)]
    pub priority: i8,
    /// The seed.
    pub seed_node_id: NodeId,
    /// Totals.
    pub progress: Progress,
    /// RFC 3339.
    pub created_at: String,
    /// RFC 3339, once terminal.
    pub finished_at: Option<String>,
    /// Why it failed.
    pub last_error: Option<String>,
}

/// `GET /api/v1/nodes`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeList {
    /// By node id.
    pub nodes: Vec<NodeView>,
}

/// One node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeView {
    /// `host:port`.
    pub node_id: NodeId,
    /// Its status.
    pub status: NodeStatus,
    /// Where peers dial it.
    pub data_address: String,
    /// Its own HTTP address.
    pub http_address: String,
    /// `tcp`, `rdma`.
    pub transports: Vec<String>,
    /// E.g. `rack`, `zone`.
    pub labels: BTreeMap<String, String>,
    /// Counts up when the node comes back with another disk.
    pub incarnation: u64,
    /// Its software's version.
    pub version: String,
    /// Size of its filesystem.
    pub capacity_bytes: u64,
    /// Free bytes by its last heartbeat (leader only, else as registered).
    pub free_bytes: u64,
    /// Model versions staged there.
    pub staged_models: u64,
    /// Model versions that it fetches at once at most, as it said to the leader; none: it has no such limit, or who
    /// answers does not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_transfers: Option<u32>,
    /// RFC 3339: since when it has this status.
    pub since: String,
}

/// `GET /api/v1/models`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelList {
    /// By name.
    pub models: Vec<ModelView>,
    /// Pass as `page_token` for the next page.
    pub next_page_token: Option<String>,
}

/// One model version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelView {
    /// Its name.
    pub model_ref: ModelRef,
    /// Counts up when an unsealed version is replaced.
    pub generation: u64,
    /// Hex.
    pub manifest_digest: String,
    /// Whether its content is proven and fixed.
    pub sealed: bool,
    /// Hex, once sealed.
    pub root: Option<String>,
    /// Digest algorithm of blocks and root.
    pub digest_algorithm: String,
    /// In bytes.
    pub block_size_bytes: u32,
    /// In bytes.
    pub total_size_bytes: u64,
    /// Files.
    pub files: u64,
    /// Objects.
    pub objects: u64,
    /// Where it is, or is going to.
    pub placements: Vec<ModelPlacementView>,
}

/// Where a model version is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelPlacementView {
    /// Where.
    pub node_id: NodeId,
    /// Its state.
    pub state: PlacementState,
    /// The final folder, once staged.
    pub local_path: Option<String>,
}

/// `GET /api/v1/objects?key=`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ObjectLookup {
    /// The object id asked for.
    pub key: String,
    /// Every artifact that has an object of this id (ids are scoped to their artifact).
    pub objects: Vec<ObjectView>,
}

/// One object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ObjectView {
    /// Its artifact.
    pub model_ref: ModelRef,
    /// The file it is a range of.
    pub path: String,
    /// Where in the file it begins.
    pub offset_bytes: u64,
    /// Its size.
    pub size_bytes: u64,
    /// Live nodes that hold it whole.
    pub nodes: Vec<NodeId>,
}
