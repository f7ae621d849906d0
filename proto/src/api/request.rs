//! The create request as it arrives: every field optional, so that one answer can name every fault.

use crate::manifest::{MAX_CHUNKS, MAX_FILES, MAX_TARGETS};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{IgnoredAny, SeqAccess, Visitor},
};
use std::{fmt, marker::PhantomData};

/// Reads a list, and keeps one entry more than its limit: enough to see that it is over, and no memory for what is
/// refused anyway (`{},` are three bytes, an entry is hundreds).
fn at_most<'de, const LIMIT: usize, T, D>(deserializer: D) -> Result<Option<Vec<T>>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    struct List<const LIMIT: usize, T>(PhantomData<T>);

    impl<'de, const LIMIT: usize, T: Deserialize<'de>> Visitor<'de> for List<LIMIT, T> {
        type Value = Option<Vec<T>>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list")
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_none<E>(self) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
            deserializer.deserialize_seq(self)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
            let mut kept = Vec::new();
            while kept.len() <= LIMIT {
                match entries.next_element()? {
                    Some(entry) => kept.push(entry),
                    None => return Ok(Some(kept)),
                }
            }
            while entries.next_element::<IgnoredAny>()?.is_some() {}
            Ok(Some(kept))
        }
    }

    deserializer.deserialize_option(List::<LIMIT, T>(PhantomData))
}

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
    /// Who shall have it. Of more than [`MAX_TARGETS`] one more than these is read.
    #[serde(default, deserialize_with = "at_most::<MAX_TARGETS, _, _>")]
    pub target_nodes: Option<Vec<String>>,
    /// Checked against the nodes named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_policy: Option<ReplicaPolicy>,
    /// Attempts and deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<JobPolicy>,
    /// Who goes first where not all can at once, [`PRIORITY_RANGE`](crate::manifest::PRIORITY_RANGE); default 0. The
    /// higher, the sooner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<i64>,
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
    /// At least one. Of more than [`MAX_FILES`] one more than these is read.
    #[serde(default, deserialize_with = "at_most::<MAX_FILES, _, _>")]
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
    /// One per chunk; left out: derived from the prefix. Of more than [`MAX_CHUNKS`] one more than these is read.
    #[serde(
        default,
        deserialize_with = "at_most::<{ MAX_CHUNKS as usize }, _, _>",
        skip_serializing_if = "Option::is_none"
    )]
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
    /// Refused above the number of distinct nodes named; a warning below it.
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
