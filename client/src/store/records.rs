//! What the store writes down beside the data: who a staging folder belongs to, and what was published.

use super::{
    crash,
    durable::{self, Kind},
    error::StoreError,
};
use mooncake_proto::{
    codec,
    digest::{Algorithm, Digest},
    ids::ModelRef,
    manifest::{Manifest, Seal},
};
use serde::{Deserialize, Serialize};
use std::{os::unix::fs::MetadataExt, path::Path};

/// Version byte of the encodings below. Frozen: they are on disks.
const ENCODING: u8 = 1;
const STAGING: Kind = Kind {
    magic: b"MCSTAGIN",
    version: 1,
    points: [
        "begin::before_record_create",
        "begin::before_record_write",
        "begin::before_record_sync",
        "begin::before_record_rename",
        "begin::before_record_sync_dir",
        "begin::after_record",
    ],
};
const STAGED: Kind = Kind {
    magic: b"MCSTAGED",
    version: 1,
    points: [
        "publish::before_record_create",
        "publish::before_record_write",
        "publish::before_record_sync",
        "publish::before_record_rename",
        "publish::before_record_sync_dir",
        "publish::after_record",
    ],
};

/// Beside a staging folder's data: everything needed to go on after a restart.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StagingRecord {
    pub(crate) model: ModelRef,
    pub(crate) generation: u64,
    pub(crate) block_size: u32,
    pub(crate) algorithm: Algorithm,
    /// [`Manifest::encode`].
    pub(crate) manifest: Vec<u8>,
}

/// For each published model: what it consists of, for the next start, for peers, for later checks.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StagedRecord {
    pub(crate) model: ModelRef,
    pub(crate) generation: u64,
    pub(crate) seal: Seal,
    /// [`Manifest::encode`].
    pub(crate) manifest: Vec<u8>,
    /// One per block.
    pub(crate) digests: Vec<Digest>,
    /// Parallel to the manifest's files.
    pub(crate) files: Vec<StagedFile>,
    /// It tells our folder from one that somebody else put under the final name.
    pub(crate) folder: FolderIdentity,
}

/// What a folder keeps through a rename. The time of birth is there because inode numbers are used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FolderIdentity {
    inode: u64,
    /// Nanoseconds since the epoch; 0 where the filesystem does not know it.
    born_ns: u64,
}

impl FolderIdentity {
    pub(crate) fn of(meta: &std::fs::Metadata) -> Self {
        let born = meta
            .created()
            .ok()
            .and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
        let born_ns = born.map_or(0, |age| u64::try_from(age.as_nanos()).unwrap_or(u64::MAX));
        Self {
            inode: meta.ino(),
            born_ns,
        }
    }
}

/// How a file looked when it was published: one that looks the same is not re-hashed at start.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StagedFile {
    pub(crate) mtime_ns: i64,
    /// As the manifest beside it declares it. Nothing reads it: files are not reused across revisions yet, and the
    /// manifest says the same. It stays because the encoding is frozen.
    pub(crate) sha256: Option<Digest>,
}

fn decode<T: serde::de::DeserializeOwned>(path: &Path, kind: Kind) -> Result<Option<T>, StoreError> {
    let Some(bytes) = durable::read(path, kind)? else {
        return Ok(None);
    };
    codec::decode(ENCODING, &bytes)
        .map(Some)
        .map_err(|e| StoreError::Damaged {
            path: path.to_owned(),
            why: e.to_string(),
        })
}

fn manifest(path: &Path, bytes: &[u8]) -> Result<Manifest, StoreError> {
    Manifest::decode(bytes).map_err(|e| StoreError::Damaged {
        path: path.to_owned(),
        why: e.to_string(),
    })
}

impl StagingRecord {
    pub(crate) fn write(&self, path: &Path) -> Result<(), StoreError> {
        durable::write(path, STAGING, &codec::encode(ENCODING, self))
    }

    pub(crate) fn read(path: &Path) -> Result<Option<(Self, Manifest)>, StoreError> {
        let Some(record) = decode::<Self>(path, STAGING)? else {
            return Ok(None);
        };
        let manifest = manifest(path, &record.manifest)?;
        Ok(Some((record, manifest)))
    }
}

impl StagedRecord {
    pub(crate) fn write(&self, path: &Path) -> Result<(), StoreError> {
        durable::write(path, STAGED, &codec::encode(ENCODING, self))
    }

    pub(crate) fn read(path: &Path) -> Result<Option<(Self, Manifest)>, StoreError> {
        let Some(record) = decode::<Self>(path, STAGED)? else {
            return Ok(None);
        };
        let manifest = manifest(path, &record.manifest)?;
        let own = mooncake_proto::manifest::root(
            record.seal.algorithm,
            record.seal.block_size_bytes,
            &manifest.digest(),
            &record.digests,
        );
        if record.files.len() != manifest.files.len()
            || (own != record.seal.root && !crash::broken("publish::skip_checks"))
        {
            let why = "its digest list does not reproduce its seal".into();
            return Err(StoreError::Damaged {
                path: path.to_owned(),
                why,
            });
        }
        Ok(Some((record, manifest)))
    }
}
