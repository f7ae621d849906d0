//! The create request as it arrives: every field optional, so that one answer can name every fault.

use serde::{Deserialize, Serialize};

/// `POST /api/v1/model-distribution/jobs`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CreateJobRequest {
    /// Left out: the server makes a UUIDv7 (and the request is not idempotent).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<String>,
    /// The model version; must agree with the manifest.
    pub model: Option<ModelSpec>,
    /// What is distributed.
    pub manifest: Option<ManifestSpec>,
    /// Who acquires it from outside.
    pub seed_node_id: Option<String>,
    /// Who shall have it.
    pub target_nodes: Option<Vec<String>>,
    /// Checked against the nodes named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_policy: Option<ReplicaPolicy>,
    /// Attempts and deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<JobPolicy>,
}

/// The four components of a model's name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// E.g. `org/name`.
    pub model_id: Option<String>,
    /// E.g. `r1`.
    pub revision: Option<String>,
    /// E.g. `safetensors`.
    pub format: Option<String>,
    /// E.g. `local`.
    pub provider: Option<String>,
}

/// The RFC's manifest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ManifestSpec {
    /// E.g. `org/name`.
    pub model_id: Option<String>,
    /// E.g. `r1`.
    pub revision: Option<String>,
    /// E.g. `safetensors`.
    pub format: Option<String>,
    /// E.g. `local`.
    pub provider: Option<String>,
    /// Sum of the files' sizes.
    pub total_size_bytes: Option<u64>,
    /// Kept as given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_manifest_version: Option<String>,
    /// At least one.
    pub files: Option<Vec<FileSpec>>,
}

/// One file of the manifest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FileSpec {
    /// Relative to the model's folder.
    pub path: Option<String>,
    /// Exact.
    pub size_bytes: Option<u64>,
    /// `sha256:<hex>` or bare hex; anything else checks nothing and is warned about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksum: Option<String>,
    /// `file://`, an absolute path, or `http(s)://`. May be left out for an empty file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub download_url: Option<String>,
    /// Names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact: Option<ArtifactSpec>,
    /// May be left out for an empty file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunk_layout: Option<ChunkLayout>,
}

/// The names of a file's objects.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ArtifactSpec {
    /// Kept as given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_key: Option<String>,
    /// One per chunk; left out: derived from the prefix.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object_ids: Option<Vec<String>>,
}

/// How a file is cut into objects.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChunkLayout {
    /// Size of every chunk but the last.
    pub chunk_size_bytes: Option<u64>,
    /// `ceil(size_bytes / chunk_size_bytes)`.
    pub chunk_count: Option<u64>,
    /// Every object id starts with it and a `/`. Left out: `<model_id>/<revision>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object_prefix: Option<String>,
}

/// The RFC's replica policy.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReplicaPolicy {
    /// Refused above the number of distinct nodes named; a warning below the number of targets.
    pub target_replica_count: Option<u64>,
}

/// How long and how often to try.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JobPolicy {
    /// Attempts per placement, 1–10; default 3. Only failures that another attempt may cure are repeated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_attempts: Option<u32>,
    /// Seconds from creation to failure, 1–31,536,000; default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_s: Option<u64>,
}
