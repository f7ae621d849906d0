//! Space on the filesystem: asked for before anything is fetched.

use super::{artifact::Artifact, tree};
use std::{io, path::Path};

/// For folders, inodes and the store's own files. A transfer that leaves less than this free would fail at
/// the very end, in a rename or a record, which is the worst place.
const METADATA_BYTES: u64 = 1 << 20;
/// Of the journal and the staged record, per block.
const BYTES_PER_BLOCK: u64 = 128;
/// Of an inode and a directory entry, per file.
const BYTES_PER_FILE: u64 = 512;

/// It does not fit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoSpace {
    pub(crate) needed_bytes: u64,
    pub(crate) free_bytes: u64,
}

pub(crate) fn free_bytes(root: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(root)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

pub(crate) fn capacity_bytes(root: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(root)?;
    Ok(stat.f_blocks.saturating_mul(stat.f_frsize))
}

/// What is still to be allocated for an artifact.
pub(crate) fn needed_bytes(artifact: &Artifact) -> u64 {
    let total = artifact.blocks.total_bytes();
    let data = total.saturating_sub(tree::allocated_bytes(&artifact.dir, &artifact.manifest));
    let overhead = u64::from(artifact.blocks.len()) * BYTES_PER_BLOCK
        + artifact.manifest.files.len() as u64 * BYTES_PER_FILE;
    data + METADATA_BYTES + overhead
}

/// `booked`: promised to others, not yet allocated.
pub(crate) fn check(root: &Path, needed_bytes: u64, booked: u64) -> io::Result<Result<(), NoSpace>> {
    let free_bytes = free_bytes(root)?.saturating_sub(booked);
    Ok(if needed_bytes > free_bytes {
        Err(NoSpace {
            needed_bytes,
            free_bytes,
        })
    } else {
        Ok(())
    })
}
