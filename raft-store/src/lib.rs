//! Raft log, vote, metadata and snapshots on RocksDB, for any state machine.
//!
//! ```text
//! <folder>/db/            RocksDB: column families `log` (index → entry) and `meta` (identity, vote, committed, purged)
//! <folder>/acknowledged   sequence number of the last acknowledged write (tells a lost end from a torn one)
//! <folder>/snapshots/     the newest snapshot, one file
//! ```
//!
//! [`Store::open`] opens and checks a folder; [`Store::take_log_store`] and [`Store::state_machine`] give what
//! `openraft::Raft::new` wants; [`StateReader`] looks at the state; [`Store::fatal`] tells when the process must end.
//!
//! **Guaranteed.** What was acknowledged survives `kill -9` and power loss (of a disk that honours fsync), in order.
//! A folder of another cluster or node id is refused. A damaged record, a missing one, a snapshot that does not match
//! its digest, a write-ahead log whose acknowledged end is gone: refused at start with a message that names it and
//! says what to do, never skipped. A snapshot is replaced atomically. After a storage error nothing is
//! acknowledged any more.
//!
//! **Not guaranteed.** That the applied state is on the disk: it is rebuilt from snapshot and log. That the committed
//! index saved is the last one. That a folder put back from an old copy is noticed: openraft cannot tell either, so
//! never do that to one master of a living cluster. Several entries' atomicity: entries are durable one after another,
//! as Raft needs it.

mod codec;
mod database;
mod error;
mod frame;
mod log_store;
mod machine;
mod meta;
mod offline;
mod records;
mod runtime;
pub mod sabotage;
mod snapshot;
mod snapshot_file;
mod state_machine;
mod store;
mod tail;
#[cfg(test)]
mod tests;
mod types;
mod writer;

pub use codec::{
    DecodeError, decode_entry, decode_log_id, decode_snapshot_meta, decode_vote, encode_entry, encode_log_id,
    encode_snapshot_meta, encode_vote,
};
pub use error::{Fatal, OpenError};
pub use log_store::{LogReader, LogStore, MAX_READ_BYTES};
pub use machine::StateMachine;
pub use meta::Identity;
pub use offline::{NewLife, Offline, create_folder};
pub use runtime::{CALL_TIMEOUT, Runtime};
pub use snapshot::MAX_SNAPSHOT_BYTES;
pub use snapshot_file::{SnapshotData, SnapshotFileError, SnapshotReceiver, read_snapshot_file};
pub use state_machine::{Applied, SnapshotBuilder, StateMachineStore, StateReader};
pub use store::{LogEnd, OpenOptions, SnapshotInbox, Store, WriteCounts};
pub use types::{
    Command, CommittedLeaderId, Entry, LeaderId, LogId, Membership, Node, NodeId, Reply, Snapshot,
    SnapshotMeta, StoredMembership, TypeConfig, Vote, log_id,
};
