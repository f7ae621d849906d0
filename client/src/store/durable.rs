//! Small durable files: magic, version, length, payload, SHA-256 of all that; replaced as a whole
//! (partial → fsync → rename → fsync of the folder), so that a reader finds the old or the new one.
//! Not for large or growing files: those have formats of their own.

use super::{
    crash::step,
    error::{StoreError, io_error},
};
use mooncake_proto::digest::Digest;
use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
};

const HEADER_BYTES: usize = 8 + 4 + 8;
const DIGEST_BYTES: usize = 32;

/// What kind of file it is. Frozen: it is on disks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    pub(crate) magic: &'static [u8; 8],
    pub(crate) version: u32,
    /// The failpoints before each system call of a replacement, and after the last.
    pub(crate) points: Points,
}

/// See [`Kind::points`]: create, write, sync, rename, sync of the folder, done.
pub(crate) type Points = [&'static str; 6];

/// For files that no crash test looks at on their own.
pub(crate) const ANY_POINTS: Points = ["durable::any"; 6];

/// Makes a folder's entries durable.
pub(crate) fn sync_dir(path: &Path) -> Result<(), StoreError> {
    File::open(path)
        .and_then(|f| f.sync_all())
        .map_err(io_error("sync folder", path))
}

/// The bytes of a file of this kind.
fn frame(kind: Kind, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len() + DIGEST_BYTES);
    bytes.extend(kind.magic);
    bytes.extend(kind.version.to_le_bytes());
    bytes.extend((payload.len() as u64).to_le_bytes());
    bytes.extend(payload);
    let digest = Digest::sha256(&bytes);
    bytes.extend(digest.as_bytes());
    bytes
}

/// Replaces `path`; durable when it returns.
pub(crate) fn write(path: &Path, kind: Kind, payload: &[u8]) -> Result<(), StoreError> {
    let folder = path.parent().expect("own files are in a folder");
    let partial = folder.join({
        let mut name = path.file_name().expect("own files have a name").to_owned();
        name.push(".partial");
        name
    });
    step(kind.points[0]);
    let mut file = File::create(&partial).map_err(io_error("create", &partial))?;
    step(kind.points[1]);
    file.write_all(&frame(kind, payload))
        .map_err(io_error("write", &partial))?;
    step(kind.points[2]);
    file.sync_all().map_err(io_error("sync", &partial))?;
    step(kind.points[3]);
    fs::rename(&partial, path).map_err(io_error("rename into place", path))?;
    step(kind.points[4]);
    sync_dir(folder)?;
    step(kind.points[5]);
    Ok(())
}

/// Reads and checks; `None` where there is no such file.
pub(crate) fn read(path: &Path, kind: Kind) -> Result<Option<Vec<u8>>, StoreError> {
    let mut bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io_error("read", path)(e)),
    };
    let damaged = |why: String| StoreError::Damaged {
        path: path.to_owned(),
        why,
    };
    if bytes.len() < HEADER_BYTES + DIGEST_BYTES || bytes[..8] != *kind.magic {
        return Err(damaged("it does not begin as such a file does".into()));
    }
    let version = u32::from_le_bytes(bytes[8..12].try_into().expect("4 bytes"));
    if version != kind.version {
        let known = kind.version;
        return Err(damaged(format!(
            "it has format version {version}, this program knows {known}: was it written by a newer one?"
        )));
    }
    let len = u64::from_le_bytes(bytes[12..20].try_into().expect("8 bytes"));
    let content = bytes.len() - DIGEST_BYTES;
    if len != (content - HEADER_BYTES) as u64
        || Digest::sha256(&bytes[..content]).as_bytes()[..] != bytes[content..]
    {
        return Err(damaged("its checksum does not hold".into()));
    }
    bytes.truncate(content);
    bytes.drain(..HEADER_BYTES);
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: Kind = Kind {
        magic: b"MCTEST00",
        version: 3,
        points: ANY_POINTS,
    };

    #[test]
    fn round_trip_and_every_flipped_bit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        assert_eq!(read(&path, KIND).unwrap(), None);
        write(&path, KIND, b"first").unwrap();
        write(&path, KIND, b"second").unwrap();
        assert_eq!(read(&path, KIND).unwrap().unwrap(), b"second");
        let good = fs::read(&path).unwrap();
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &bad).unwrap();
            assert!(
                matches!(read(&path, KIND), Err(StoreError::Damaged { .. })),
                "bit {bit}"
            );
        }
        for len in 0..good.len() {
            fs::write(&path, &good[..len]).unwrap();
            assert!(
                matches!(read(&path, KIND), Err(StoreError::Damaged { .. })),
                "{len} bytes"
            );
        }
    }
}
