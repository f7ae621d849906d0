//! Snapshot files: what is in one, how one is written, read and received.
//!
//! ```text
//! magic "MCRSNAP\n" | version u32 | meta bytes u32 | state bytes u64 | meta | state | SHA-256 of all before
//! ```
//!
//! All integers little endian. The file is what travels between masters, byte for byte, so the receiver checks the
//! same digest that the sender's disk is checked with. A file gets its final name only after its bytes are
//! durable; see [`snapshot`](crate::snapshot) for the order of steps.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use crate::codec;
use crate::types::SnapshotMeta;

const MAGIC: [u8; 8] = *b"MCRSNAP\n";
/// Frozen: the only version so far.
pub(crate) const VERSION: u32 = 1;
const HEADER_BYTES: u64 = 24;
const DIGEST_BYTES: u64 = 32;
/// A membership of a few masters is a few hundred bytes; more is not a snapshot of ours.
const MAX_META_BYTES: u64 = 16 * 1024 * 1024;
/// What is read at once while a digest is computed.
const READ_BYTES: usize = 256 * 1024;

/// Why a file is not a good snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotFileError {
    /// Reading failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The content is not what was written.
    #[error("{0}")]
    Damaged(String),
    /// Written by a newer program.
    #[error("its format version is {0}, this program knows {VERSION}")]
    Newer(u32),
}

impl From<SnapshotFileError> for io::Error {
    fn from(error: SnapshotFileError) -> Self {
        match error {
            SnapshotFileError::Io(error) => error,
            other => io::Error::new(io::ErrorKind::InvalidData, other.to_string()),
        }
    }
}

fn damaged<T>(what: impl Into<String>) -> Result<T, SnapshotFileError> {
    Err(SnapshotFileError::Damaged(what.into()))
}

/// A handle of a snapshot file, as openraft passes it around: cheap to clone, holds the file open (so that it can
/// be read to its end after a newer snapshot replaced it) and never the content.
#[derive(Clone, Debug)]
pub struct SnapshotData {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    file: File,
    path: PathBuf,
    size_bytes: u64,
    /// A received file that was not installed (yet) is removed with its last handle.
    partial: bool,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.partial {
            // Installed means renamed: then there is nothing under this name. What stays is removed at start.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl SnapshotData {
    pub(crate) fn open(path: &Path, partial: bool) -> io::Result<Self> {
        let file = File::open(path)?;
        let size_bytes = file.metadata()?.len();
        Ok(Self {
            inner: Arc::new(Inner {
                file,
                path: path.to_owned(),
                size_bytes,
                partial,
            }),
        })
    }

    /// Size of the whole file, which is what a sender has to send.
    pub fn size_bytes(&self) -> u64 {
        self.inner.size_bytes
    }

    /// Up to `length` bytes from `offset` on; fewer only at the end of the file. Blocking, from any thread.
    pub fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let left = self.inner.size_bytes.saturating_sub(offset);
        let length = usize::try_from(left).map_or(length, |left| left.min(length));
        let mut bytes = vec![0; length];
        self.inner.file.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.inner.path
    }

    pub(crate) fn is_partial(&self) -> bool {
        self.inner.partial
    }

    /// Reads and checks the whole file; gives its meta and the state's bytes.
    pub(crate) fn read_all(&self) -> Result<(SnapshotMeta, Vec<u8>), SnapshotFileError> {
        let (meta, state_at, state_bytes) = self.header()?;
        self.check_digest()?;
        let mut state = vec![0; usize::try_from(state_bytes).map_err(io::Error::other)?];
        self.inner.file.read_exact_at(&mut state, state_at)?;
        Ok((meta, state))
    }

    /// Checks the whole file without keeping it in memory; gives its meta.
    pub(crate) fn verify(&self) -> Result<SnapshotMeta, SnapshotFileError> {
        let (meta, ..) = self.header()?;
        self.check_digest()?;
        Ok(meta)
    }

    /// Meta, where the state starts, how long it is. Lengths are believed only if they add up to the file's size.
    fn header(&self) -> Result<(SnapshotMeta, u64, u64), SnapshotFileError> {
        let size = self.inner.size_bytes;
        if size < HEADER_BYTES + DIGEST_BYTES {
            return damaged(format!("it is {size} bytes long, shorter than any snapshot"));
        }
        let mut header = [0; HEADER_BYTES as usize];
        self.inner.file.read_exact_at(&mut header, 0)?;
        if header[..8] != MAGIC {
            return damaged("it does not begin with the magic of a snapshot");
        }
        let version = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
        if version != VERSION {
            // A flipped bit in the version looks like a newer file; the digest tells which it is.
            return match self.check_digest() {
                Ok(()) => Err(SnapshotFileError::Newer(version)),
                Err(error) => Err(error),
            };
        }
        let meta_bytes = u64::from(u32::from_le_bytes([
            header[12], header[13], header[14], header[15],
        ]));
        let mut state_bytes = [0; 8];
        state_bytes.copy_from_slice(&header[16..24]);
        let state_bytes = u64::from_le_bytes(state_bytes);
        let expected = (HEADER_BYTES + meta_bytes + DIGEST_BYTES).checked_add(state_bytes);
        if expected != Some(size) || meta_bytes > MAX_META_BYTES {
            return damaged(format!(
                "its header announces {meta_bytes} bytes of meta and {state_bytes} of state, the file has {size} bytes"
            ));
        }
        let mut meta = vec![0; meta_bytes as usize];
        self.inner.file.read_exact_at(&mut meta, HEADER_BYTES)?;
        match codec::decode_snapshot_meta(&meta) {
            Ok(meta) => Ok((meta, HEADER_BYTES + meta_bytes, state_bytes)),
            Err(error) => damaged(format!("its meta does not decode: {error}")),
        }
    }

    fn check_digest(&self) -> Result<(), SnapshotFileError> {
        let content_bytes = self.inner.size_bytes - DIGEST_BYTES;
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; READ_BYTES];
        let mut offset = 0;
        while offset < content_bytes {
            let length =
                usize::try_from(content_bytes - offset).map_or(READ_BYTES, |left| left.min(READ_BYTES));
            self.inner.file.read_exact_at(&mut buffer[..length], offset)?;
            hasher.update(&buffer[..length]);
            offset += length as u64;
        }
        let mut stored = [0; DIGEST_BYTES as usize];
        self.inner.file.read_exact_at(&mut stored, content_bytes)?;
        if hasher.finalize()[..] != stored {
            return damaged("its SHA-256 does not match its content");
        }
        Ok(())
    }
}

/// Writes a snapshot's bytes (not yet synced) into `file`.
pub(crate) fn write(file: &mut File, meta: &SnapshotMeta, state: &[u8]) -> io::Result<()> {
    let meta = codec::encode_snapshot_meta(meta);
    let mut header = Vec::with_capacity(HEADER_BYTES as usize + meta.len());
    header.extend_from_slice(&MAGIC);
    header.extend_from_slice(&VERSION.to_le_bytes());
    header.extend_from_slice(&u32::try_from(meta.len()).map_err(io::Error::other)?.to_le_bytes());
    header.extend_from_slice(&(state.len() as u64).to_le_bytes());
    header.extend_from_slice(&meta);
    let digest = Sha256::new().chain_update(&header).chain_update(state).finalize();
    file.write_all(&header)?;
    file.write_all(state)?;
    file.write_all(&digest)
}

/// A snapshot that arrives from another master, written to a partial file as it comes.
///
/// Dropped without [`finish`](Self::finish) it removes its file.
#[derive(Debug)]
pub struct SnapshotReceiver {
    file: Option<File>,
    path: PathBuf,
    written_bytes: u64,
    limit_bytes: u64,
}

impl SnapshotReceiver {
    pub(crate) fn create(path: PathBuf, limit_bytes: u64) -> io::Result<Self> {
        let file = File::options().write(true).create_new(true).open(&path)?;
        Ok(Self {
            file: Some(file),
            path,
            written_bytes: 0,
            limit_bytes,
        })
    }

    /// Takes the next bytes. Blocking. Refuses more than was announced.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let total = self.written_bytes.saturating_add(bytes.len() as u64);
        if total > self.limit_bytes {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "the snapshot has more than the {} bytes that were announced",
                    self.limit_bytes
                ),
            ));
        }
        let file = self
            .file
            .as_mut()
            .ok_or_else(|| io::Error::other("the snapshot is finished already"))?;
        file.write_all(bytes)?;
        self.written_bytes = total;
        Ok(())
    }

    /// How much has come so far.
    pub fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    /// Checks length, digest and meta of what came and gives the handle to install. Blocking. What does not hold
    /// is removed and refused with [`io::ErrorKind::InvalidData`]; the sender has to begin again.
    pub fn finish(mut self) -> io::Result<(SnapshotMeta, SnapshotData)> {
        if self.written_bytes != self.limit_bytes {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "the snapshot ended after {} of {} bytes",
                    self.written_bytes, self.limit_bytes
                ),
            ));
        }
        let data = SnapshotData::open(&self.path, true)?;
        // From here on the handle removes the file, not the receiver.
        self.file = None;
        let meta = data.verify().map_err(|error| match error {
            SnapshotFileError::Io(error) => error,
            other => io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the received snapshot is damaged: {other}"),
            ),
        })?;
        Ok((meta, data))
    }
}

impl Drop for SnapshotReceiver {
    fn drop(&mut self) {
        if self.file.take().is_some() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Reads a whole snapshot file with its digest checked, for tools (backup, restore) that have no store open.
pub fn read_snapshot_file(path: &Path) -> Result<(SnapshotMeta, Vec<u8>), SnapshotFileError> {
    SnapshotData::open(path, false)?.read_all()
}
