//! One model version: files, their chunks (the RFC's objects) and the blocks in which bytes move.
//!
//! A *chunk* is a range of a file whose size the caller chooses; it has an object id. A *block* is the unit
//! of transfer and of checking: every file is cut into blocks of one power-of-two size per artifact, without
//! regard to chunks; a chunk is held when every block that overlaps it is held. Chunks and blocks never span
//! files, and empty files have neither.
//!
//! Guaranteed: a [`Manifest`] that came out of [`validate()`] or of [`Manifest::decode`] of such a manifest's
//! bytes satisfies every rule of [`validate()`]. Not guaranteed: that the source really has these sizes or
//! checksums; the seed finds that out.

mod blocks;
mod distinct;
mod faults;
mod objects;
mod validate;

pub use blocks::{BlockMap, BlockRange, block_size_for, root};
pub use faults::{Fault, Faults, MAX_FAULTS};
pub use objects::ObjectIds;
pub use validate::{Examined, ValidJob, ValidateOptions, examine, validate};

use crate::{
    codec::{self, CodecError},
    digest::{Algorithm, Digest},
    ids::ModelRef,
};
use serde::{Deserialize, Serialize};

/// Most chunks in one manifest.
pub const MAX_CHUNKS: u64 = 1 << 20;
/// Most blocks in one artifact: bounds every block map (128 KiB of bits) and digest list (32 MiB).
pub const MAX_BLOCKS: u64 = 1 << 20;
/// Most files in one manifest.
pub const MAX_FILES: usize = 1 << 18;
/// Most target nodes of one job.
pub const MAX_TARGETS: usize = 4096;
/// Longest target ids of one job together, in bytes: with all else keeps the create command below
/// [`crate::MAX_COMMAND_BYTES`].
pub const MAX_TARGETS_BYTES: usize = 256 << 10;
/// Priorities that a job can have; 0 where none is asked for.
pub const PRIORITY_RANGE: std::ops::RangeInclusive<i8> = -10..=10;
/// Longest relative path, in bytes (Linux's `PATH_MAX` less room for the root folder).
pub const MAX_PATH_BYTES: usize = 3072;
/// Longest path component, in bytes (`NAME_MAX`).
pub const MAX_PATH_COMPONENT_BYTES: usize = 255;
/// Longest object id, in bytes.
pub const MAX_OBJECT_ID_BYTES: usize = 1024;
/// Longest source URL, in bytes.
pub const MAX_URL_BYTES: usize = 8192;
/// Largest HTTP request body, in bytes.
pub const MAX_BODY_BYTES: usize = 64 << 20;
/// Smallest and largest block, in bytes.
pub const BLOCK_SIZE_RANGE: std::ops::RangeInclusive<u32> = 256 << 10..=4 << 20;

/// Version byte of [`Manifest::encode`]. Frozen: it is in the Raft log and on nodes' disks.
const MANIFEST_VERSION: u8 = 1;
/// Version byte of [`Sources::encode`]. Frozen like the above.
const SOURCES_VERSION: u8 = 1;

/// A validated model version. Its identity ([`Manifest::digest`]) excludes where it is downloaded from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Which model version this is.
    pub model: ModelRef,
    /// The caller's `file_manifest_version`, kept as given.
    pub file_manifest_version: String,
    /// Sum of all files' sizes.
    pub total_size_bytes: u64,
    /// In the caller's order.
    pub files: Vec<ManifestFile>,
}

/// One file of a [`Manifest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestFile {
    /// Relative, `/`-separated, without empty, `.` or `..` components.
    pub path: String,
    /// Exact size.
    pub size_bytes: u64,
    /// What the caller declared.
    pub checksum: Checksum,
    /// The caller's `artifact.artifact_key`, kept as given.
    pub artifact_key: String,
    /// Size of every chunk but the last.
    pub chunk_size_bytes: u64,
    /// `ceil(size_bytes / chunk_size_bytes)`; 0 for an empty file.
    pub chunk_count: u64,
    /// The caller's `object_prefix`.
    pub object_prefix: String,
    /// One id per chunk.
    pub objects: ObjectIds,
}

impl ManifestFile {
    /// Byte range of chunk `index` within the file.
    pub fn chunk_range(&self, index: u64) -> std::ops::Range<u64> {
        assert!(index < self.chunk_count, "chunk {index} of {}", self.chunk_count);
        let start = index * self.chunk_size_bytes;
        start..self.size_bytes.min(start.saturating_add(self.chunk_size_bytes))
    }
}

/// A file's declared checksum.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Checksum {
    /// `sha256:<hex>` or bare hex.
    Sha256(Digest),
    /// Anything else, e.g. the RFC's `"dummy"`: accepted with a warning, checks nothing.
    Opaque(String),
}

impl Checksum {
    /// Reads the JSON form.
    pub fn parse(text: &str) -> Self {
        let hex = text.strip_prefix("sha256:").unwrap_or(text);
        match hex.parse() {
            Ok(digest) => Self::Sha256(digest),
            Err(_) => Self::Opaque(text.to_owned()),
        }
    }
}

impl Manifest {
    /// The canonical encoding: what is stored, sent and digested.
    pub fn encode(&self) -> Vec<u8> {
        codec::encode(MANIFEST_VERSION, self)
    }

    /// Reads [`Manifest::encode`]'s bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, CodecError> {
        codec::decode(MANIFEST_VERSION, bytes)
    }

    /// The identity of this content: SHA-256 of the canonical encoding.
    pub fn digest(&self) -> Digest {
        Digest::sha256(&self.encode())
    }

    /// Number of chunks (objects) in all files.
    pub fn object_count(&self) -> u64 {
        self.files.iter().map(|f| f.chunk_count).sum()
    }

    /// Finds an object by its id: (file index, chunk index).
    pub fn find_object(&self, id: &str) -> Option<(usize, u64)> {
        self.files
            .iter()
            .enumerate()
            .find_map(|(f, file)| Some((f, file.objects.position(id)?)))
    }
}

/// Where the seed reads each file: parallel to [`Manifest::files`]; empty files may have an empty entry.
/// Entries may be signed URLs: never show or log one without redaction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sources(pub Vec<String>);

impl Sources {
    /// What is stored and sent.
    pub fn encode(&self) -> Vec<u8> {
        codec::encode(SOURCES_VERSION, self)
    }

    /// Reads [`Sources::encode`]'s bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, CodecError> {
        codec::decode(SOURCES_VERSION, bytes)
    }
}

/// What proves an artifact's content: committed once, after every declared checksum held on the seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seal {
    /// The block size of the digest list.
    pub block_size_bytes: u32,
    /// The algorithm of the digest list and of the root.
    pub algorithm: Algorithm,
    /// See [`root`].
    pub root: Digest,
}

#[cfg(test)]
mod tests;
