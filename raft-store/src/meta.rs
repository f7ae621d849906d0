//! The records of the `meta` column family: who the disk belongs to, vote, committed, purge point.
//!
//! Every record is framed. The identity (format version, cluster id, node id, disk id) is written in one synced
//! batch before anything else and never changes.

use rocksdb::{IteratorMode, WriteBatch};

use crate::codec;
use crate::database::Database;
use crate::error::OpenError;
use crate::frame::{self, FrameError};
use crate::types::{LogId, NodeId, Vote};

/// Frozen: the keys.
const FORMAT: &str = "format_version";
const CLUSTER_ID: &str = "cluster_id";
const NODE_ID: &str = "node_id";
const DISK_ID: &str = "disk_id";
const VOTE: &str = "vote";
const COMMITTED: &str = "committed";
const PURGED: &str = "purged";
/// Index of the first entry of a log that was never purged, so that a missing beginning is noticed.
const FIRST: &str = "first";

/// Frozen: the only version of the whole folder's format so far.
const FORMAT_VERSION: u64 = 1;

/// Who a disk belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The cluster.
    pub cluster_id: String,
    /// The Raft node id.
    pub node_id: NodeId,
    /// Random, given to the disk when it was first used: tells a wiped master from the one it was.
    pub disk_id: String,
}

/// What `meta` holds.
#[derive(Debug, Default)]
pub(crate) struct Meta {
    pub(crate) vote: Option<Vote>,
    pub(crate) committed: Option<LogId>,
    pub(crate) purged: Option<LogId>,
    pub(crate) first: Option<u64>,
}

/// Reads and checks every record; on a fresh disk writes the identity.
pub(crate) fn load(
    database: &Database,
    cluster_id: &str,
    node_id: NodeId,
) -> Result<(Identity, Meta), OpenError> {
    let (found, meta) = read(database)?;
    let Some(found) = found else {
        let identity = Identity {
            cluster_id: cluster_id.to_owned(),
            node_id,
            disk_id: new_disk_id(),
        };
        create(database, &identity)?;
        return Ok((identity, meta));
    };
    let foreign = |what, found: &dyn std::fmt::Display, wanted: &dyn std::fmt::Display| OpenError::Foreign {
        path: database.path().to_owned(),
        what,
        found: found.to_string(),
        wanted: wanted.to_string(),
    };
    if found.cluster_id != cluster_id {
        return Err(foreign("cluster id", &found.cluster_id, &cluster_id));
    }
    if found.node_id != node_id {
        return Err(foreign("node id", &found.node_id, &node_id));
    }
    Ok((found, meta))
}

/// A random one: no two disks ever share it.
pub(crate) fn new_disk_id() -> String {
    uuid::Uuid::new_v4().to_string()
}

/// Reads and checks every record. No identity: a fresh disk.
pub(crate) fn read(database: &Database) -> Result<(Option<Identity>, Meta), OpenError> {
    let path = database.path();
    let mut meta = Meta::default();
    let (mut format, mut found_cluster, mut found_node, mut disk_id) = (None, None, None, None);
    for record in database.iterate(database.meta(), IteratorMode::Start) {
        let (key, value) =
            record.map_err(|error| database_damaged(database, "reading the meta records", &error))?;
        let name = String::from_utf8_lossy(&key).into_owned();
        let damaged = |detail: String| OpenError::Damaged {
            path: path.to_owned(),
            record: format!("meta record \"{name}\""),
            detail,
        };
        let payload = match frame::open(&key, &value) {
            Ok(payload) => payload,
            Err(FrameError::Version(found)) => {
                return Err(OpenError::Newer {
                    path: path.to_owned(),
                    record: format!("meta record \"{name}\""),
                    found: found.into(),
                    known: 1,
                });
            }
            Err(error) => return Err(damaged(error.to_string())),
        };
        let number = || {
            <[u8; 8]>::try_from(payload)
                .map(u64::from_le_bytes)
                .map_err(|_| damaged("it is not 8 bytes long".into()))
        };
        let text = || String::from_utf8(payload.to_vec()).map_err(|error| damaged(error.to_string()));
        let decoded = |error: codec::DecodeError| damaged(error.to_string());
        match name.as_str() {
            FORMAT => format = Some(number()?),
            CLUSTER_ID => found_cluster = Some(text()?),
            NODE_ID => found_node = Some(number()?),
            DISK_ID => disk_id = Some(text()?),
            VOTE => meta.vote = Some(codec::decode_vote(payload).map_err(decoded)?),
            COMMITTED => meta.committed = codec::decode_log_id(payload).map_err(decoded)?,
            PURGED => meta.purged = codec::decode_log_id(payload).map_err(decoded)?,
            FIRST => meta.first = Some(number()?),
            _ => return Err(damaged("no record of this name exists in this format".into())),
        }
    }
    if let Some(found) = format.filter(|found| *found != FORMAT_VERSION) {
        let record = "the store".to_owned();
        return Err(OpenError::Newer {
            path: path.to_owned(),
            record,
            found,
            known: FORMAT_VERSION,
        });
    }
    match (format, found_cluster, found_node, disk_id) {
        (Some(_), Some(cluster_id), Some(node_id), Some(disk_id)) => {
            let identity = Identity {
                cluster_id,
                node_id,
                disk_id,
            };
            Ok((Some(identity), meta))
        }
        (None, None, None, None) => {
            let log_empty = database
                .iterate(database.log(), IteratorMode::Start)
                .next()
                .is_none();
            let untouched = meta.vote.is_none()
                && meta.committed.is_none()
                && meta.purged.is_none()
                && meta.first.is_none();
            if !(log_empty && untouched) {
                return Err(OpenError::Damaged {
                    path: path.to_owned(),
                    record: "the identity".into(),
                    detail: "cluster id, node id and disk id are missing, though there is a vote or a log"
                        .into(),
                });
            }
            Ok((None, meta))
        }
        _ => Err(OpenError::Damaged {
            path: path.to_owned(),
            record: "the identity".into(),
            detail: "of format version, cluster id, node id and disk id some are there and some are missing"
                .into(),
        }),
    }
}

pub(crate) fn create(database: &Database, identity: &Identity) -> Result<(), OpenError> {
    let mut batch = WriteBatch::default();
    put(database, &mut batch, FORMAT, &FORMAT_VERSION.to_le_bytes());
    put(database, &mut batch, CLUSTER_ID, identity.cluster_id.as_bytes());
    put(database, &mut batch, NODE_ID, &identity.node_id.to_le_bytes());
    put(database, &mut batch, DISK_ID, identity.disk_id.as_bytes());
    database.write(batch, true).map_err(|error| OpenError::Database {
        path: database.path().to_owned(),
        what: "writing the identity",
        detail: error.to_string(),
    })
}

/// A RocksDB error while reading at start, told apart: damage, or anything else.
pub(crate) fn database_damaged(database: &Database, what: &'static str, error: &rocksdb::Error) -> OpenError {
    let (path, detail) = (database.path().to_owned(), error.to_string());
    match error.kind() {
        rocksdb::ErrorKind::Corruption => OpenError::Damaged {
            path,
            record: "the database".into(),
            detail: format!("{what}: {detail}"),
        },
        _ => OpenError::Database { path, what, detail },
    }
}

fn put(database: &Database, batch: &mut WriteBatch, key: &str, payload: &[u8]) {
    batch.put_cf(database.meta(), key, frame::seal(key.as_bytes(), payload));
}

/// Only for a disk that no process runs on: whoever knew the old id refuses this disk from then on, and is refused.
pub(crate) fn put_disk_id(database: &Database, batch: &mut WriteBatch, disk_id: &str) {
    put(database, batch, DISK_ID, disk_id.as_bytes());
}

pub(crate) fn put_vote(database: &Database, batch: &mut WriteBatch, vote: &Vote) {
    put(database, batch, VOTE, &codec::encode_vote(vote));
}

pub(crate) fn put_committed(database: &Database, batch: &mut WriteBatch, committed: Option<&LogId>) {
    put(database, batch, COMMITTED, &codec::encode_log_id(committed));
}

pub(crate) fn put_purged(database: &Database, batch: &mut WriteBatch, purged: &LogId) {
    put(database, batch, PURGED, &codec::encode_log_id(Some(purged)));
}

pub(crate) fn put_first(database: &Database, batch: &mut WriteBatch, index: u64) {
    put(database, batch, FIRST, &index.to_le_bytes());
}
