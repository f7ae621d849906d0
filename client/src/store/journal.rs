//! The journal of one staging folder: which blocks are verified *and* durable.
//!
//! An append-only file: a header that binds it to one manifest, block size and algorithm, then records of
//! fixed size. A record's checksum covers its position and the header, so that no stale or foreign bytes
//! are taken for a record.
//!
//! Guaranteed: [`Journal::append`] returns after the records are durable; [`Journal::open`] gives exactly
//! the records before the first one that does not hold, and cuts the file there (a torn tail after a crash;
//! or damage, in which case what followed counts as unknown and is fetched again). Not guaranteed: that
//! the data files still hold what the journal says; the store re-hashes them at start.

use super::error::{StoreError, io_error};
use mooncake_proto::{
    codec,
    digest::{Algorithm, Digest},
};
use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{self, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// Frozen, like everything below about the format.
const MAGIC: &[u8; 8] = b"MCJOURNL";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 64;
/// Kind (1), zero (3), block (4), digest (32), CRC-32 (4).
const RECORD_BYTES: usize = 44;
const KIND_VERIFIED: u8 = 1;
const KIND_FORGOTTEN: u8 = 2;
const KIND_OWN: u8 = 3;
/// Records beyond the live ones before opening rewrites the file: bounds what peers that lie can make it
/// grow to over restarts.
const COMPACT_SLACK_RECORDS: u64 = 4096;

/// What one record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// The block's bytes are durable and have this digest.
    Verified(u32, Recorded),
    /// The block is not held any more.
    Forgotten(u32),
}

/// What is recorded of a verified block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Recorded {
    pub(crate) digest: Digest,
    /// This node read it from its source. Otherwise the digest is what peers announced.
    pub(crate) own: bool,
}

/// What a journal belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Binding {
    pub(crate) manifest_digest: Digest,
    pub(crate) block_size: u32,
    pub(crate) algorithm: Algorithm,
}

/// An open journal.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
    header_crc: u32,
    records: u64,
}

fn header(binding: &Binding) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..44].copy_from_slice(binding.manifest_digest.as_bytes());
    bytes[44..48].copy_from_slice(&binding.block_size.to_le_bytes());
    // The algorithm's number is the one in its (frozen) encoding.
    bytes[48] = codec::encode(0, &binding.algorithm)[1];
    let crc = crc32fast::hash(&bytes[..60]);
    bytes[60..].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn record_crc(header_crc: u32, index: u64, content: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&header_crc.to_le_bytes());
    crc.update(&index.to_le_bytes());
    crc.update(content);
    crc.finalize()
}

fn encode_record(header_crc: u32, index: u64, entry: &Entry, out: &mut Vec<u8>) {
    let start = out.len();
    let (kind, block, digest) = match entry {
        Entry::Verified(block, Recorded { digest, own }) => (
            if *own { KIND_OWN } else { KIND_VERIFIED },
            *block,
            *digest.as_bytes(),
        ),
        Entry::Forgotten(block) => (KIND_FORGOTTEN, *block, [0; 32]),
    };
    out.extend([kind, 0, 0, 0]);
    out.extend(block.to_le_bytes());
    out.extend(digest);
    let crc = record_crc(header_crc, index, &out[start..]);
    out.extend(crc.to_le_bytes());
}

fn decode_record(header_crc: u32, index: u64, bytes: &[u8]) -> Option<Entry> {
    let (content, crc) = bytes.split_last_chunk::<4>()?;
    if u32::from_le_bytes(*crc) != record_crc(header_crc, index, content) {
        return None;
    }
    let block = u32::from_le_bytes(content[4..8].try_into().ok()?);
    match content[0] {
        kind @ (KIND_VERIFIED | KIND_OWN) => {
            let digest = Digest::try_from(&content[8..40]).ok()?;
            let own = kind == KIND_OWN;
            Some(Entry::Verified(block, Recorded { digest, own }))
        }
        KIND_FORGOTTEN => Some(Entry::Forgotten(block)),
        _ => None,
    }
}

impl Journal {
    /// A new, empty journal at `path`, in place of whatever is there. The caller syncs the folder.
    pub(crate) fn create(path: &Path, binding: &Binding) -> Result<Self, StoreError> {
        Self::create_with(path, binding, &[])
    }

    fn create_with(path: &Path, binding: &Binding, entries: &[Entry]) -> Result<Self, StoreError> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(path)
            .map_err(io_error("create", path))?;
        let header = header(binding);
        let header_crc = crc32fast::hash(&header);
        let mut bytes = header.to_vec();
        for (index, entry) in entries.iter().enumerate() {
            encode_record(header_crc, index as u64, entry, &mut bytes);
        }
        file.write_all_at(&bytes, 0)
            .and_then(|()| file.sync_all())
            .map_err(io_error("write", path))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            header_crc,
            records: entries.len() as u64,
        })
    }

    /// Opens the journal at `path` and says which blocks it knows as verified. One that is missing or not
    /// bound to `binding` is replaced by an empty one: its blocks are unknown.
    pub(crate) fn open(
        path: &Path,
        binding: &Binding,
    ) -> Result<(Self, BTreeMap<u32, Recorded>), StoreError> {
        let file = match OpenOptions::new().read(true).write(true).open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Ok((Self::create(path, binding)?, BTreeMap::new()));
            }
            Err(e) => return Err(io_error("open", path)(e)),
        };
        let mut bytes = Vec::new();
        (&file).read_to_end(&mut bytes).map_err(io_error("read", path))?;
        let header = header(binding);
        if bytes.get(..HEADER_BYTES) != Some(&header[..]) {
            tracing::warn!(
                path = %path.display(),
                "the journal's header does not hold: every block of this staging folder is fetched again"
            );
            return Ok((Self::create(path, binding)?, BTreeMap::new()));
        }
        let header_crc = crc32fast::hash(&header);
        let body = &bytes[HEADER_BYTES..];
        let mut known = BTreeMap::new();
        let mut records = 0u64;
        for chunk in body.chunks_exact(RECORD_BYTES) {
            match decode_record(header_crc, records, chunk) {
                Some(Entry::Verified(block, recorded)) => known.insert(block, recorded),
                Some(Entry::Forgotten(block)) => known.remove(&block),
                None => break,
            };
            records += 1;
        }
        let good = records as usize * RECORD_BYTES;
        if good < body.len() {
            let lost = (body.len() - good).div_ceil(RECORD_BYTES);
            tracing::warn!(
                path = %path.display(), records, lost,
                "the journal ends in records that do not hold (a crash, or damage): their blocks are fetched again"
            );
        }
        if records > 2 * known.len() as u64 + COMPACT_SLACK_RECORDS {
            let entries: Vec<_> = known.iter().map(|(&b, &d)| Entry::Verified(b, d)).collect();
            let partial = path.with_extension("partial");
            let mut journal = Self::create_with(&partial, binding, &entries)?;
            std::fs::rename(&partial, path).map_err(io_error("rename into place", path))?;
            super::durable::sync_dir(path.parent().expect("a journal is in a folder"))?;
            journal.path = path.to_owned();
            return Ok((journal, known));
        }
        if good < body.len() {
            file.set_len((HEADER_BYTES + good) as u64)
                .and_then(|()| file.sync_all())
                .map_err(io_error("truncate", path))?;
        }
        Ok((
            Self {
                path: path.to_owned(),
                file,
                header_crc,
                records,
            },
            known,
        ))
    }

    /// Appends and syncs. After an error the tail is unknown: the journal must be opened again, not used.
    pub(crate) fn append(&mut self, entries: &[Entry], between: impl FnOnce()) -> Result<(), StoreError> {
        let mut bytes = Vec::with_capacity(entries.len() * RECORD_BYTES);
        for (i, entry) in entries.iter().enumerate() {
            encode_record(self.header_crc, self.records + i as u64, entry, &mut bytes);
        }
        let at = HEADER_BYTES as u64 + self.records * RECORD_BYTES as u64;
        self.file
            .write_all_at(&bytes, at)
            .map_err(io_error("append to", &self.path))?;
        between();
        self.file.sync_data().map_err(io_error("sync", &self.path))?;
        self.records += entries.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn binding() -> Binding {
        Binding {
            manifest_digest: Digest::sha256(b"m"),
            block_size: 1 << 18,
            algorithm: Algorithm::Blake3,
        }
    }

    fn digest(n: u32) -> Digest {
        Digest::sha256(&n.to_le_bytes())
    }

    /// Both kinds occur.
    fn recorded(n: u32) -> Recorded {
        Recorded {
            digest: digest(n),
            own: n % 2 == 1,
        }
    }

    fn written(path: &Path, n: u32) -> BTreeMap<u32, Recorded> {
        let mut journal = Journal::create(path, &binding()).unwrap();
        for b in 0..n {
            journal.append(&[Entry::Verified(b, recorded(b))], || ()).unwrap();
        }
        (0..n).map(|b| (b, recorded(b))).collect()
    }

    #[test]
    fn records_survive_and_forgetting_too() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let mut want = written(&path, 5);
        let (mut journal, known) = Journal::open(&path, &binding()).unwrap();
        assert_eq!(known, want);
        journal
            .append(&[Entry::Forgotten(3), Entry::Verified(9, recorded(9))], || ())
            .unwrap();
        want.remove(&3);
        want.insert(9, recorded(9));
        assert_eq!(Journal::open(&path, &binding()).unwrap().1, want);
        // Verified again, with another digest: the later record counts.
        journal
            .append(&[Entry::Verified(3, recorded(33))], || ())
            .unwrap();
        want.insert(3, recorded(33));
        assert_eq!(Journal::open(&path, &binding()).unwrap().1, want);
    }

    #[test]
    fn cut_at_any_byte_keeps_the_whole_records_before() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let want = written(&path, 4);
        let good = std::fs::read(&path).unwrap();
        for len in 0..good.len() {
            std::fs::write(&path, &good[..len]).unwrap();
            let (mut journal, known) = Journal::open(&path, &binding()).unwrap();
            let whole = len.saturating_sub(HEADER_BYTES) / RECORD_BYTES;
            assert_eq!(
                known,
                want.iter().take(whole).map(|(&b, &d)| (b, d)).collect(),
                "{len} bytes"
            );
            // And it goes on from there.
            journal
                .append(&[Entry::Verified(77, recorded(77))], || ())
                .unwrap();
            let (_, known) = Journal::open(&path, &binding()).unwrap();
            assert_eq!(known.len(), whole + 1);
            assert_eq!(known[&77], recorded(77));
        }
    }

    #[test]
    fn a_flipped_bit_is_never_believed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let want = written(&path, 3);
        let good = std::fs::read(&path).unwrap();
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, &bad).unwrap();
            let (_, known) = Journal::open(&path, &binding()).unwrap();
            let hit = (bit / 8)
                .checked_sub(HEADER_BYTES)
                .map_or(0, |at| at / RECORD_BYTES);
            assert_eq!(
                known,
                want.iter().take(hit).map(|(&b, &d)| (b, d)).collect(),
                "bit {bit}"
            );
        }
    }

    #[test]
    fn another_binding_is_another_journal() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        for other in [
            Binding {
                manifest_digest: digest(0),
                ..binding()
            },
            Binding {
                block_size: 1 << 19,
                ..binding()
            },
            Binding {
                algorithm: Algorithm::Sha256,
                ..binding()
            },
        ] {
            written(&path, 3);
            assert_eq!(Journal::open(&path, &other).unwrap().1, BTreeMap::new());
        }
    }

    #[test]
    fn compacted_at_open_when_mostly_history() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let mut journal = Journal::create(&path, &binding()).unwrap();
        let churn: Vec<_> = (0..3000)
            .flat_map(|n| [Entry::Verified(7, recorded(n)), Entry::Forgotten(7)])
            .chain([Entry::Verified(1, recorded(1)), Entry::Verified(2, recorded(2))])
            .collect();
        journal.append(&churn, || ()).unwrap();
        let want = BTreeMap::from([(1, recorded(1)), (2, recorded(2))]);
        assert_eq!(Journal::open(&path, &binding()).unwrap().1, want);
        assert_eq!(
            std::fs::metadata(&path).unwrap().len() as usize,
            HEADER_BYTES + 2 * RECORD_BYTES
        );
        let (mut journal, known) = Journal::open(&path, &binding()).unwrap();
        assert_eq!(known, want);
        journal.append(&[Entry::Verified(3, recorded(3))], || ()).unwrap();
        assert_eq!(Journal::open(&path, &binding()).unwrap().1.len(), 3);
    }
}
