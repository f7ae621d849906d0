//! The file of a backup: what `mooncakectl cluster snapshot save` writes and `mooncake_master restore` reads.
//!
//! ```text
//! magic "MCBACKUP" | version u32 | info bytes u32 | meta bytes u32 | state bytes u64 | info | meta | state |
//! SHA-256 of all before
//! ```
//!
//! All integers little endian. `info` is JSON for people and tools; `meta` and `state` are the Raft store's and the
//! state machine's own encodings, which nothing here looks into. The digest is the one check of the whole file, on
//! arrival and at restore: a file that was cut off or altered in any bit is refused.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::io::{self, Read};

const MAGIC: [u8; 8] = *b"MCBACKUP";
/// Frozen: the only version so far.
const VERSION: u32 = 1;
/// Bytes before `info`.
const HEADER_BYTES: usize = 28;
const DIGEST_BYTES: usize = 32;
/// Both are a few hundred bytes per master.
const MAX_INFO_BYTES: u32 = 1 << 20;
/// The largest state that is read: the limit of the masters' own snapshots.
pub const MAX_STATE_BYTES: u64 = 8 << 30;
/// What is read at once.
const READ_BYTES: usize = 256 << 10;

/// What a backup says of itself. New fields take a default: older files lack them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupInfo {
    /// The cluster it is of.
    pub cluster_id: String,
    /// When it was taken, RFC 3339.
    pub taken_at: String,
    /// The master that wrote it.
    pub taken_by: u64,
    /// The program that wrote it.
    pub software: String,
    /// Raft term of the last entry in it.
    pub term: u64,
    /// Log index of the last entry in it: every write acknowledged up to there is included.
    pub index: u64,
    /// The gate for commands and encodings: a program has to support it to read the state.
    pub cluster_version: u32,
    /// Before a restore raises it.
    pub recovery_epoch: u64,
    /// The masters at that time, as `id=rpc/http`.
    pub members: Vec<String>,
    /// Jobs in it.
    pub jobs: u64,
    /// Of which have not ended.
    pub live_jobs: u64,
    /// Nodes in it.
    pub nodes: u64,
    /// Model versions in it.
    pub models: u64,
}

/// Why a file is no good backup.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// Reading failed.
    #[error("it cannot be read: {0}")]
    Io(#[from] io::Error),
    /// It is something else.
    #[error("it is no backup of Mooncake distribution: {0}")]
    Foreign(String),
    /// It is cut off or altered.
    #[error("it is damaged: {0}. Take another one")]
    Damaged(String),
    /// By a newer program.
    #[error(
        "its format version is {0}, this program knows {VERSION}. Use the program that wrote it, or a newer one"
    )]
    Newer(u32),
}

/// The bytes before the state; the state and then [`digest`] follow.
pub fn head(info: &BackupInfo, meta: &[u8], state_bytes: u64) -> Vec<u8> {
    let info = serde_json::to_vec(info).expect("plain data always encodes");
    let mut out = Vec::with_capacity(HEADER_BYTES + info.len() + meta.len());
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&(info.len() as u32).to_le_bytes());
    out.extend_from_slice(&(meta.len() as u32).to_le_bytes());
    out.extend_from_slice(&state_bytes.to_le_bytes());
    out.extend_from_slice(&info);
    out.extend_from_slice(meta);
    out
}

/// The bytes after the state.
pub fn digest(head: &[u8], state: &[u8]) -> [u8; 32] {
    Sha256::new()
        .chain_update(head)
        .chain_update(state)
        .finalize()
        .into()
}

/// Size of the whole file.
pub fn size_bytes(head: &[u8], state_bytes: u64) -> u64 {
    head.len() as u64 + state_bytes + DIGEST_BYTES as u64
}

/// A whole backup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backup {
    /// What it says of itself.
    pub info: BackupInfo,
    /// The Raft store's part.
    pub meta: Vec<u8>,
    /// The state machine's part.
    pub state: Vec<u8>,
}

/// Reads and checks a whole backup.
pub fn read(from: impl Read) -> Result<Backup, BackupError> {
    let mut state = Vec::new();
    let (info, meta) = walk(from, |piece| state.extend_from_slice(piece))?;
    Ok(Backup { info, meta, state })
}

/// Checks a whole backup without keeping its state; gives what it says of itself.
pub fn verify(from: impl Read) -> Result<BackupInfo, BackupError> {
    walk(from, |_| {}).map(|(info, _)| info)
}

fn walk(mut from: impl Read, mut state: impl FnMut(&[u8])) -> Result<(BackupInfo, Vec<u8>), BackupError> {
    let mut header = [0; HEADER_BYTES];
    take(&mut from, &mut header, "header").map_err(|error| match error {
        BackupError::Damaged(why) => BackupError::Foreign(why),
        other => other,
    })?;
    if header[..8] != MAGIC {
        return Err(BackupError::Foreign("it does not begin with MCBACKUP".into()));
    }
    let number = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
    let version = number(8);
    if version != VERSION {
        return Err(BackupError::Newer(version));
    }
    let (info_bytes, meta_bytes) = (number(12), number(16));
    let state_bytes = u64::from_le_bytes(header[20..28].try_into().expect("eight bytes"));
    if info_bytes > MAX_INFO_BYTES || meta_bytes > MAX_INFO_BYTES || state_bytes > MAX_STATE_BYTES {
        return Err(BackupError::Damaged(format!(
            "its header announces {info_bytes}, {meta_bytes} and {state_bytes} bytes"
        )));
    }
    let mut hasher = Sha256::new().chain_update(header);
    let mut info = vec![0; info_bytes as usize];
    take(&mut from, &mut info, "description")?;
    let mut meta = vec![0; meta_bytes as usize];
    take(&mut from, &mut meta, "meta")?;
    hasher.update(&info);
    hasher.update(&meta);
    let mut buffer = vec![0; READ_BYTES];
    let mut left = state_bytes;
    while left > 0 {
        let piece = &mut buffer[..usize::try_from(left).map_or(READ_BYTES, |left| left.min(READ_BYTES))];
        take(&mut from, piece, "state")?;
        hasher.update(&*piece);
        state(piece);
        left -= piece.len() as u64;
    }
    let mut stored = [0; DIGEST_BYTES];
    take(&mut from, &mut stored, "checksum")?;
    if hasher.finalize()[..] != stored {
        return Err(BackupError::Damaged(
            "its SHA-256 does not match its content".into(),
        ));
    }
    if from.read(&mut [0])? != 0 {
        return Err(BackupError::Damaged("more bytes follow behind its end".into()));
    }
    let info = serde_json::from_slice(&info)
        .map_err(|error| BackupError::Damaged(format!("its description does not decode: {error}")))?;
    Ok((info, meta))
}

fn take(from: &mut impl Read, into: &mut [u8], what: &str) -> Result<(), BackupError> {
    from.read_exact(into).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => BackupError::Damaged(format!("it ends within its {what}")),
        _ => error.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> BackupInfo {
        BackupInfo {
            cluster_id: "c".into(),
            taken_at: "2026-01-01T00:00:00.000Z".into(),
            taken_by: 2,
            software: "test".into(),
            term: 3,
            index: 40,
            cluster_version: 1,
            recovery_epoch: 0,
            members: vec!["1=h:1/h:2".into()],
            jobs: 5,
            live_jobs: 1,
            nodes: 2,
            models: 3,
        }
    }

    fn file() -> Vec<u8> {
        let (meta, state) = (b"meta", vec![7; 3 * READ_BYTES / 2]);
        let head = head(&info(), meta, state.len() as u64);
        let digest = digest(&head, &state);
        let size = size_bytes(&head, state.len() as u64);
        let file = [&head[..], &state, &digest].concat();
        assert_eq!(file.len() as u64, size);
        file
    }

    #[test]
    fn what_was_written_is_read() {
        let file = file();
        let backup = read(&file[..]).unwrap();
        assert_eq!((backup.info, &backup.meta[..]), (info(), &b"meta"[..]));
        assert_eq!(backup.state, vec![7; 3 * READ_BYTES / 2]);
        assert_eq!(verify(&file[..]).unwrap(), info());
    }

    #[test]
    fn every_damage_is_found() {
        let good = file();
        for at in (0..HEADER_BYTES + 400).chain(good.len() - 40..good.len()) {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(verify(&bad[..]).is_err(), "a flipped bit in byte {at}");
        }
        for length in [0, 5, HEADER_BYTES, good.len() / 2, good.len() - 1] {
            assert!(verify(&good[..length]).is_err(), "cut off after {length}");
        }
        assert!(matches!(
            verify(&[good, vec![0]].concat()[..]),
            Err(BackupError::Damaged(_))
        ));
        assert!(matches!(
            verify(&b"something else entirely, and long"[..]),
            Err(BackupError::Foreign(_))
        ));
    }
}
