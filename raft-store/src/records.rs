//! The records of the `log` column family: big-endian index → framed entry. Writing, reading, and the check of the
//! whole log at start.

use std::io;

use rocksdb::{Direction, IteratorMode, WriteBatch};

use crate::codec;
use crate::database::Database;
use crate::error::OpenError;
use crate::frame::{self, FrameError};
use crate::meta::{Meta, database_damaged};
use crate::types::{Entry, LogId};

/// Sorts behind every key of 8 bytes.
const END: [u8; 9] = [0xff; 9];

fn key(index: u64) -> [u8; 8] {
    index.to_be_bytes()
}

/// Frames an entry for its index.
pub(crate) fn seal(entry: &Entry) -> (u64, Vec<u8>) {
    let index = entry.log_id.index();
    (index, frame::seal(&key(index), &codec::encode_entry(entry)))
}

pub(crate) fn put(database: &Database, batch: &mut WriteBatch, index: u64, record: &[u8]) {
    batch.put_cf(database.log(), key(index), record);
}

/// Removes all entries from `from` on.
pub(crate) fn delete_from(database: &Database, batch: &mut WriteBatch, from: u64) {
    batch.delete_range_cf(database.log(), &key(from)[..], &END[..]);
}

/// Removes all entries up to and including `upto`.
pub(crate) fn delete_upto(database: &Database, batch: &mut WriteBatch, upto: u64) {
    match upto.checked_add(1) {
        Some(end) => batch.delete_range_cf(database.log(), key(0), key(end)),
        None => batch.delete_range_cf(database.log(), &key(0)[..], &END[..]),
    }
}

/// Why a record is not the entry of its index.
enum RecordError {
    Newer(u8),
    Damaged(String),
}

fn decode(stored_key: &[u8], value: &[u8], expected: u64) -> Result<Entry, RecordError> {
    let Ok(index) = <[u8; 8]>::try_from(stored_key).map(u64::from_be_bytes) else {
        return Err(RecordError::Damaged(format!(
            "its key is {} bytes long, not 8",
            stored_key.len()
        )));
    };
    if index != expected {
        return Err(RecordError::Damaged(format!(
            "it is missing; the next one found is {index}"
        )));
    }
    let payload = frame::open(stored_key, value).map_err(|error| match error {
        FrameError::Version(found) => RecordError::Newer(found),
        other => RecordError::Damaged(other.to_string()),
    })?;
    let entry = codec::decode_entry(payload).map_err(|error| RecordError::Damaged(error.to_string()))?;
    if entry.log_id.index() != expected {
        return Err(RecordError::Damaged(format!(
            "it holds the entry of index {}",
            entry.log_id.index()
        )));
    }
    Ok(entry)
}

/// Reads the entries of `start..end`, all of which must be there, until more than `limit_bytes` were read (but at
/// least one). Blocking.
pub(crate) fn read(database: &Database, start: u64, end: u64, limit_bytes: usize) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let mut bytes = 0;
    let first = key(start);
    let mut records = database.iterate(database.log(), IteratorMode::From(&first, Direction::Forward));
    for index in start..end {
        let bad = |detail: &str| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("log record {index} in {}: {detail}", database.path().display()),
            )
        };
        let (stored_key, value) = match records.next() {
            None => return Err(bad("it is missing, and nothing comes behind it")),
            Some(Err(error)) => return Err(bad(error.as_ref())),
            Some(Ok(record)) => record,
        };
        // The bound is looked at before the record is kept: what is returned stays within it, but for a first
        // record that is larger by itself.
        bytes += value.len();
        if bytes > limit_bytes && !entries.is_empty() {
            break;
        }
        entries.push(decode(&stored_key, &value, index).map_err(|error| match error {
            RecordError::Newer(found) => bad(&format!("its format version {found} is unknown")),
            RecordError::Damaged(detail) => bad(&detail),
        })?);
    }
    Ok(entries)
}

/// Reads the whole log at start: every record from the purge point on must be there, in order, with a good checksum
/// and terms that never decrease. Gives the last log id.
pub(crate) fn verify(database: &Database, meta: &Meta) -> Result<Option<LogId>, OpenError> {
    let path = database.path();
    let damaged = |index: u64, detail: String| OpenError::Damaged {
        path: path.to_owned(),
        record: format!("log record {index}"),
        detail,
    };
    let first = match (&meta.purged, meta.first) {
        (Some(purged), _) => purged.index().checked_add(1),
        (None, first) => first,
    };
    let mut last = meta.purged;
    let mut expected = first;
    for record in database.iterate(database.log(), IteratorMode::Start) {
        let (stored_key, value) =
            record.map_err(|error| database_damaged(database, "reading the log", &error))?;
        let Some(index) = expected else {
            return Err(OpenError::Damaged {
                path: path.to_owned(),
                record: "meta record \"first\"".into(),
                detail: "it is missing, though there is a log".into(),
            });
        };
        let entry = decode(&stored_key, &value, index).map_err(|error| match error {
            RecordError::Newer(found) => OpenError::Newer {
                path: path.to_owned(),
                record: format!("log record {index}"),
                found: found.into(),
                known: 1,
            },
            RecordError::Damaged(detail) => damaged(index, detail),
        })?;
        if let Some(last) = &last
            && entry.log_id.committed_leader_id() < last.committed_leader_id()
        {
            return Err(damaged(
                index,
                format!(
                    "its term is lower than that of the entry before it ({} after {last})",
                    entry.log_id
                ),
            ));
        }
        last = Some(entry.log_id);
        expected = index.checked_add(1);
    }
    Ok(last)
}
