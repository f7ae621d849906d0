//! The types Raft is run with: opaque commands and replies, `u64` node ids, one leader per term.
//!
//! The encodings that go to disk are not derived from these types but written out in
//! [`codec`](crate::codec), so that a change of a field here cannot silently change a durable format.

use std::fmt;

use serde::{Deserialize, Serialize};

openraft::declare_raft_types!(
    /// The type configuration of every Raft instance of this project.
    ///
    /// The leader id is the *standard* one: openraft's default allows several leaders in one term.
    pub TypeConfig:
        D = Command,
        R = Reply,
        NodeId = u64,
        Node = Node,
        Term = u64,
        LeaderId = LeaderId,
        AsyncRuntime = crate::runtime::Runtime,
);

/// A node id of a master.
pub type NodeId = u64;
/// Who leads which term: at most one node in each.
pub type LeaderId = openraft::impls::leader_id_std::LeaderId<u64, NodeId>;
/// Term and index of a log entry.
pub type LogId = openraft::LogId<CommittedLeaderId>;
/// The committed part of a leader id: its term.
pub type CommittedLeaderId = <LeaderId as openraft::vote::RaftLeaderId>::Committed;
/// A vote: term, candidate, whether a quorum granted it.
pub type Vote = openraft::Vote<LeaderId>;
/// A log entry.
pub type Entry = <TypeConfig as openraft::RaftTypeConfig>::Entry;
/// A membership: voters (two sets while it changes) and all nodes.
pub type Membership = openraft::Membership<NodeId, Node>;
/// A membership with the log id of the entry that set it.
pub type StoredMembership = openraft::StoredMembership<CommittedLeaderId, NodeId, Node>;
/// What a snapshot covers.
pub type SnapshotMeta = openraft::SnapshotMeta<CommittedLeaderId, NodeId, Node>;
/// A snapshot as openraft moves it around: meta and a handle of the file.
pub type Snapshot = openraft::Snapshot<CommittedLeaderId, NodeId, Node, crate::SnapshotData>;

/// One command to the replicated state machine: bytes that this crate never looks into.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command(#[serde(with = "byte_string")] pub Vec<u8>);

/// The state machine's answer to one command: bytes that this crate never looks into.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply(#[serde(with = "byte_string")] pub Vec<u8>);

/// What the membership knows about one master.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// `host:port` of the RPC port (Raft and node sessions).
    pub rpc_address: String,
    /// `host:port` of the HTTP port.
    pub http_address: String,
    /// The random id of the disk that this node id was given to. A master that comes back under its id with
    /// another disk has lost what it promised and must not be let in.
    pub disk_id: String,
}

macro_rules! opaque {
    ($name:ident) => {
        // Only the length: a command can be half a mebibyte, and it is not this crate's to interpret.
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({} bytes)", stringify!($name), self.0.len())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(self, f)
            }
        }

        impl From<Vec<u8>> for $name {
            fn from(bytes: Vec<u8>) -> Self {
                Self(bytes)
            }
        }
    };
}

opaque!(Command);
opaque!(Reply);

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rpc {} http {} disk {}",
            self.rpc_address, self.http_address, self.disk_id
        )
    }
}

/// A log id of `term` and `index`.
pub fn log_id(term: u64, index: u64) -> LogId {
    LogId::new(CommittedLeaderId::new(term), index)
}

/// Bytes as one byte string and not as a sequence of numbers.
mod byte_string {
    use std::fmt;

    use serde::de::{Error, SeqAccess, Visitor};
    use serde::{Deserializer, Serializer};

    /// Memory set aside on the word of a length prefix, before the bytes themselves were seen.
    const MAX_PREALLOCATED_BYTES: usize = 64 * 1024;

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytes)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        struct Bytes;

        impl<'de> Visitor<'de> for Bytes {
            type Value = Vec<u8>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a byte string")
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
                Ok(bytes.to_vec())
            }

            fn visit_byte_buf<E: Error>(self, bytes: Vec<u8>) -> Result<Vec<u8>, E> {
                Ok(bytes)
            }

            // Formats without byte strings (JSON) give a sequence.
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u8>, A::Error> {
                let mut bytes = Vec::with_capacity(seq.size_hint().unwrap_or(0).min(MAX_PREALLOCATED_BYTES));
                while let Some(byte) = seq.next_element()? {
                    bytes.push(byte);
                }
                Ok(bytes)
            }
        }

        deserializer.deserialize_byte_buf(Bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_one_byte_string() {
        let bytes = postcard::to_allocvec(&Command(vec![1, 200, 3])).unwrap();
        assert_eq!(bytes, [3, 1, 200, 3], "a length and the bytes themselves");
        assert_eq!(
            postcard::from_bytes::<Command>(&bytes).unwrap(),
            Command(vec![1, 200, 3])
        );
    }

    #[test]
    fn display_does_not_spill_the_content() {
        assert_eq!(Command(b"secret".to_vec()).to_string(), "Command(6 bytes)");
    }
}
