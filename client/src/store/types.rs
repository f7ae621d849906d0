//! Plain values of the store's interface.

use mooncake_proto::{
    digest::{Algorithm, Digest},
    ids::ModelRef,
    manifest::{Manifest, Seal},
    pb,
};
use serde::{Deserialize, Serialize};
use std::{fmt, ops::Range, path::PathBuf, sync::Arc, time::Duration};

/// Default bound of bytes that are verified but not yet journaled: what a kill of the process may cost
/// (DESIGN §9 allows 64 MiB per node).
pub const UNJOURNALED_LIMIT_BYTES: u64 = 64 << 20;
/// Default longest time a verified block waits for the journal while less than a batch is pending. Long
/// enough to share one sync between many blocks, short enough that a slow transfer loses next to nothing.
pub const FLUSH_INTERVAL: Duration = Duration::from_millis(200);
/// Default age after which staging that nobody wants is removed.
pub const STAGING_MAX_AGE: Duration = Duration::from_secs(24 * 3600);

/// Where the store lives and how it behaves.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// The folder: models appear below it, the store's own files in `.mooncake`. Created if missing.
    pub root: PathBuf,
    /// See [`UNJOURNALED_LIMIT_BYTES`].
    pub unjournaled_limit_bytes: u64,
    /// See [`FLUSH_INTERVAL`].
    pub flush_interval: Duration,
}

impl StoreConfig {
    /// The defaults, at `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            unjournaled_limit_bytes: UNJOURNALED_LIMIT_BYTES,
            flush_interval: FLUSH_INTERVAL,
        }
    }
}

/// Orders the attempts on one artifact: compared by recovery epoch, then attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Fence {
    /// Raised by a restore or a forced new cluster.
    pub recovery_epoch: u64,
    /// Counts up per artifact.
    pub attempt: u64,
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.recovery_epoch, self.attempt)
    }
}

impl From<pb::session::Fence> for Fence {
    fn from(f: pb::session::Fence) -> Self {
        Self {
            recovery_epoch: f.recovery_epoch,
            attempt: f.attempt,
        }
    }
}

impl From<Fence> for pb::session::Fence {
    fn from(f: Fence) -> Self {
        Self {
            recovery_epoch: f.recovery_epoch,
            attempt: f.attempt,
        }
    }
}

/// What [`Store::begin`](super::Store::begin) is asked for.
#[derive(Clone, Debug)]
pub struct NewArtifact {
    /// Which model version; equal to the manifest's.
    pub model: ModelRef,
    /// The generation the order names.
    pub generation: u64,
    /// What it consists of.
    pub manifest: Arc<Manifest>,
    /// A power of two within [`mooncake_proto::manifest::BLOCK_SIZE_RANGE`].
    pub block_size: u32,
    /// Of block digests and root.
    pub algorithm: Algorithm,
}

/// How far an artifact is on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArtifactState {
    /// In staging, some blocks verified.
    Partial,
    /// In staging, every block verified.
    Whole,
    /// Published.
    Staged {
        /// The final folder.
        local_path: PathBuf,
    },
}

/// One line of the node's inventory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Which model version.
    pub model: ModelRef,
    /// As last begun.
    pub generation: u64,
    /// [`Manifest::digest`].
    pub manifest_digest: Digest,
    /// How far.
    pub state: ArtifactState,
    /// Sum of the verified blocks' lengths.
    pub verified_bytes: u64,
    /// Number of verified blocks.
    pub verified_blocks: u32,
    /// Of a staged or whole copy: what its own digest list reproduces.
    pub seal: Option<Seal>,
    /// Highest fence obeyed for this artifact.
    pub fence: Fence,
    /// What was recorded before a restart is still being checked: there may be more than is named here.
    pub rehashing: bool,
}

/// Where an object's bytes are in its artifact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectRange {
    /// Index of the file.
    pub file: usize,
    /// Its bytes within the file.
    pub range: Range<u64>,
    /// The blocks that overlap it.
    pub blocks: Range<u32>,
    /// Whether all of them are verified.
    pub held: bool,
}
