//! What can go wrong, said so that a person can act on it. [`code`](StoreError::code) is what a task's
//! failure report carries.

use super::types::Fence;
use mooncake_proto::{digest::Digest, ids::ModelRef};
use std::{io, path::PathBuf};

/// The stable code of an I/O error.
pub(crate) fn io_code(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "disk_full"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => "disk_not_writable",
        _ => "disk_error",
    }
}

fn io_advice(error: &io::Error) -> &'static str {
    match io_code(error) {
        "disk_full" => "; free space on this filesystem, what was verified so far is kept",
        "disk_not_writable" => "; check owner, mode and mount options of the data folder",
        _ => "; check the disk and the kernel log",
    }
}

/// Why the store or an artifact could not be opened, begun or flushed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process has it.
    #[error("the data folder {} is in use by {holder}: stop that process, or give this one another folder", root.display())]
    Locked {
        /// The data folder.
        root: PathBuf,
        /// `process <pid>`, or that it could not be found out.
        holder: String,
    },
    /// A system call failed.
    #[error("cannot {what} {}: {source}{}", path.display(), io_advice(source))]
    Io {
        /// In the infinitive: "write", "create".
        what: &'static str,
        /// What it was about.
        path: PathBuf,
        /// As the system said it.
        source: io::Error,
    },
    /// One of the store's own files cannot be trusted.
    #[error("{} is damaged or not from this program: {why}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        why: String,
    },
    /// Refused before anything was written.
    #[error("{model} needs {needed_bytes} more bytes, but only {free_bytes} are free for it on the filesystem of {}: free space or remove staged models there", path.display())]
    DiskFull {
        /// For which model.
        model: Box<ModelRef>,
        /// Not yet allocated, with the store's own overhead.
        needed_bytes: u64,
        /// Free, less what other transfers have reserved.
        free_bytes: u64,
        /// The data folder.
        path: PathBuf,
    },
    /// A published copy could not be looked at, which says nothing about it: it is neither offered nor moved.
    #[error("cannot examine the published copy at {}: {source}; it is left as it is: check open file limits, permissions and the disk", path.display())]
    Unexamined {
        /// The file or folder.
        path: PathBuf,
        /// As the system said it.
        source: io::Error,
    },
    /// Something else is where the model would go.
    #[error("{} exists already and is not a staged copy of this manifest: move it away (or name another revision); it is never overwritten", path.display())]
    FinalFolderExists {
        /// The final folder.
        path: PathBuf,
    },
    /// The request makes no sense.
    #[error("cannot stage {model}: {why}")]
    Invalid {
        /// For which model.
        model: Box<ModelRef>,
        /// What is wrong.
        why: String,
    },
    /// This handle's staging was removed or failed before.
    #[error("the staging of {model} is closed: {why}; begin it again")]
    Closed {
        /// Which model.
        model: Box<ModelRef>,
        /// What happened.
        why: String,
    },
}

/// What to do about a file without which a store cannot be used.
pub(super) const RESTORE_OR_EMPTY: &str = "restore it, or start with an empty folder";

impl StoreError {
    /// Of a file without which the store cannot be used: says what to do about it, too.
    pub(super) fn with_remedy(self) -> Self {
        match self {
            Self::Damaged { path, why } => Self::Damaged {
                path,
                why: format!("{why}; {RESTORE_OR_EMPTY}"),
            },
            other => other,
        }
    }

    /// The stable code for reports.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Locked { .. } => "store_locked",
            Self::Io { source, .. } => io_code(source),
            Self::Unexamined { .. } => "disk_error",
            Self::Damaged { .. } => "store_damaged",
            Self::DiskFull { .. } => "disk_full",
            Self::FinalFolderExists { .. } => "final_folder_exists",
            Self::Invalid { .. } => "invalid_artifact",
            Self::Closed { .. } => "staging_closed",
        }
    }

    /// Whether another attempt on this node may succeed without anyone doing anything.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::Closed { .. } | Self::Unexamined { .. })
            || matches!(self, Self::Io { .. }) && self.code() == "disk_error"
    }
}

/// Shorthand for `map_err`.
pub(crate) fn io_error(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.into();
    move |source| StoreError::Io { what, path, source }
}

/// Why a block was not taken.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The manifest has fewer blocks.
    #[error("block {block} does not exist: there are {count}")]
    NoSuchBlock {
        /// As asked.
        block: u32,
        /// How many there are.
        count: u32,
    },
    /// The bytes are not the block's.
    #[error("block {block} has {want} bytes, {got} were given")]
    WrongLength {
        /// Which block.
        block: u32,
        /// Its length.
        want: u32,
        /// What was given.
        got: usize,
    },
    /// Nothing was written.
    #[error("block {block} does not match its digest: expected {expected}, the bytes have {actual}")]
    DigestMismatch {
        /// Which block.
        block: u32,
        /// As announced.
        expected: Digest,
        /// Of the bytes.
        actual: Digest,
    },
    /// The block is held with another digest: `forget` it first if that one was proved wrong.
    #[error("block {block} is already held with digest {held}, not {given}")]
    AlreadyHeld {
        /// Which block.
        block: u32,
        /// Of the copy that is held.
        held: Digest,
        /// Of the bytes given.
        given: Digest,
    },
    /// The artifact's staging is gone.
    #[error("block {block} cannot be written: staging is closed ({why})")]
    Closed {
        /// Which block.
        block: u32,
        /// What happened.
        why: String,
    },
    /// A system call failed.
    #[error("cannot write block {block} to {}: {source}{}", path.display(), io_advice(source))]
    Io {
        /// Which block.
        block: u32,
        /// The staging file.
        path: PathBuf,
        /// As the system said it.
        source: io::Error,
    },
}

impl WriteError {
    /// The stable code for reports.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoSuchBlock { .. } | Self::WrongLength { .. } => "block_malformed",
            Self::DigestMismatch { .. } => "digest_mismatch",
            Self::AlreadyHeld { .. } => "block_conflict",
            Self::Closed { .. } => "staging_closed",
            Self::Io { source, .. } => io_code(source),
        }
    }
}

/// Why a model was not published.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// Blocks are missing.
    #[error("{missing} blocks are not verified yet")]
    NotWhole {
        /// How many.
        missing: u32,
    },
    /// The node's own digest list does not reproduce the seal.
    #[error("this copy has root {own}, the seal says {sealed} (or another block size or algorithm)")]
    RootMismatch {
        /// Over the own list.
        own: Digest,
        /// As committed.
        sealed: Digest,
    },
    /// Everything else.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl PublishError {
    /// The stable code for reports.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotWhole { .. } => "not_whole",
            Self::RootMismatch { .. } => "root_mismatch",
            Self::Store(e) => e.code(),
        }
    }
}

/// Why an order is not obeyed.
#[derive(Debug, thiserror::Error)]
pub enum FenceError {
    /// A later attempt was obeyed before.
    #[error("order for {model} has fence {given}, but {highest} was obeyed already: it is out of date")]
    Stale {
        /// For which model.
        model: Box<ModelRef>,
        /// Of the order.
        given: Fence,
        /// On disk.
        highest: Fence,
    },
    /// It could not be made durable.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why a master of some recovery epoch is not listened to.
#[derive(Debug, thiserror::Error)]
pub enum EpochError {
    /// A master of a later one was listened to before.
    #[error(
        "its masters are of the recovery epoch {given}, but this node belongs to the epoch {highest} already: the masters \
         were restored or recovered since, and this one is left over from before. Stop it and delete its data folder"
    )]
    Old {
        /// Of the master.
        given: u64,
        /// On disk.
        highest: u64,
    },
    /// It could not be made durable.
    #[error(transparent)]
    Store(#[from] StoreError),
}
