//! The durable encodings of entries, votes, log ids and snapshot meta.
//!
//! Written out by hand, field by field, and frozen: openraft is a moving target (its derived layouts may
//! change with a release), what is on a disk is not. All integers are little endian. Every encoding is
//! wrapped in a [`frame`](crate::frame) or in a snapshot's header, which carry version and checksum, so
//! nothing here has to tell a flipped bit from a good one; decoding still never panics and never
//! allocates more than it was given.

use std::collections::{BTreeMap, BTreeSet};

use openraft::{EntryPayload, vote::RaftLeaderId as _};

use crate::types::{Command, Entry, LogId, Membership, Node, SnapshotMeta, StoredMembership, Vote, log_id};

/// Frozen: payload kinds of a log entry.
const KIND_BLANK: u8 = 0;
const KIND_NORMAL: u8 = 1;
const KIND_MEMBERSHIP: u8 = 2;

/// Bytes that do not decode. With a good checksum this means: written by a newer version, or by a bug.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DecodeError(String);

fn fail<T>(what: impl Into<String>) -> Result<T, DecodeError> {
    Err(DecodeError(what.into()))
}

/// Encodes an entry: term u64, index u64, kind u8, then the command's bytes or the membership.
pub fn encode_entry(entry: &Entry) -> Vec<u8> {
    let mut out = Vec::with_capacity(
        17 + match &entry.payload {
            EntryPayload::Normal(command) => command.0.len(),
            _ => 64,
        },
    );
    put_log_id(&mut out, &entry.log_id);
    match &entry.payload {
        EntryPayload::Blank => out.push(KIND_BLANK),
        EntryPayload::Normal(command) => {
            out.push(KIND_NORMAL);
            out.extend_from_slice(&command.0);
        }
        EntryPayload::Membership(membership) => {
            out.push(KIND_MEMBERSHIP);
            put_membership(&mut out, membership);
        }
    }
    out
}

/// Decodes what [`encode_entry`] wrote.
pub fn decode_entry(bytes: &[u8]) -> Result<Entry, DecodeError> {
    let mut input = Input(bytes);
    let log_id = input.log_id()?;
    let payload = match input.u8()? {
        KIND_BLANK => EntryPayload::Blank,
        KIND_NORMAL => EntryPayload::Normal(Command(std::mem::take(&mut input.0).to_vec())),
        KIND_MEMBERSHIP => EntryPayload::Membership(input.membership()?),
        other => return fail(format!("entry of the unknown kind {other}")),
    };
    input.end()?;
    Ok(Entry { log_id, payload })
}

/// Encodes a vote: term u64, node id u64, committed u8.
pub fn encode_vote(vote: &Vote) -> Vec<u8> {
    let mut out = Vec::with_capacity(17);
    out.extend_from_slice(&vote.leader_id.term().to_le_bytes());
    out.extend_from_slice(&vote.leader_id.node_id().to_le_bytes());
    out.push(u8::from(vote.committed));
    out
}

/// Decodes what [`encode_vote`] wrote.
pub fn decode_vote(bytes: &[u8]) -> Result<Vote, DecodeError> {
    let mut input = Input(bytes);
    let (term, node_id) = (input.u64()?, input.u64()?);
    let vote = if input.bool()? {
        Vote::new_committed(term, node_id)
    } else {
        Vote::new(term, node_id)
    };
    input.end()?;
    Ok(vote)
}

/// Encodes a log id that may be missing: present u8, then term u64 and index u64.
pub fn encode_log_id(id: Option<&LogId>) -> Vec<u8> {
    let mut out = Vec::with_capacity(17);
    put_option_log_id(&mut out, id);
    out
}

/// Decodes what [`encode_log_id`] wrote.
pub fn decode_log_id(bytes: &[u8]) -> Result<Option<LogId>, DecodeError> {
    let mut input = Input(bytes);
    let id = input.option_log_id()?;
    input.end()?;
    Ok(id)
}

/// Encodes a snapshot's meta: last log id, membership's log id (both optional), membership.
pub fn encode_snapshot_meta(meta: &SnapshotMeta) -> Vec<u8> {
    let mut out = Vec::with_capacity(256);
    put_option_log_id(&mut out, meta.last_log_id.as_ref());
    put_option_log_id(&mut out, meta.last_membership.log_id().as_ref());
    put_membership(&mut out, meta.last_membership.membership());
    out
}

/// Decodes what [`encode_snapshot_meta`] wrote.
pub fn decode_snapshot_meta(bytes: &[u8]) -> Result<SnapshotMeta, DecodeError> {
    let mut input = Input(bytes);
    let last_log_id = input.option_log_id()?;
    let membership_log_id = input.option_log_id()?;
    let membership = input.membership()?;
    input.end()?;
    Ok(SnapshotMeta {
        last_log_id,
        last_membership: StoredMembership::new(membership_log_id, membership),
    })
}

fn put_log_id(out: &mut Vec<u8>, id: &LogId) {
    out.extend_from_slice(&id.committed_leader_id().term.to_le_bytes());
    out.extend_from_slice(&id.index().to_le_bytes());
}

fn put_option_log_id(out: &mut Vec<u8>, id: Option<&LogId>) {
    out.push(u8::from(id.is_some()));
    if let Some(id) = id {
        put_log_id(out, id);
    }
}

/// Voter sets (count u32, each: count u32, ids u64), nodes (count u32, each: id u64 and three strings,
/// each: length u32, UTF-8).
fn put_membership(out: &mut Vec<u8>, membership: &Membership) {
    let configs = membership.get_joint_config();
    put_count(out, configs.len());
    for config in configs {
        put_count(out, config.len());
        for id in config {
            out.extend_from_slice(&id.to_le_bytes());
        }
    }
    put_count(out, membership.nodes().count());
    for (id, node) in membership.nodes() {
        out.extend_from_slice(&id.to_le_bytes());
        for text in [&node.rpc_address, &node.http_address, &node.disk_id] {
            put_count(out, text.len());
            out.extend_from_slice(text.as_bytes());
        }
    }
}

fn put_count(out: &mut Vec<u8>, count: usize) {
    let count =
        u32::try_from(count).expect("a membership has fewer than 2^32 nodes and no address is 4 GiB long");
    out.extend_from_slice(&count.to_le_bytes());
}

struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        let Some((head, tail)) = self.0.split_at_checked(count) else {
            return fail(format!("{count} more bytes expected, {} left", self.0.len()));
        };
        self.0 = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(self.array::<1>()?[0])
    }

    fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn bool(&mut self) -> Result<bool, DecodeError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => fail(format!("a flag is {other}, not 0 or 1")),
        }
    }

    fn text(&mut self) -> Result<String, DecodeError> {
        let length = self.u32()? as usize;
        match std::str::from_utf8(self.take(length)?) {
            Ok(text) => Ok(text.to_owned()),
            Err(error) => fail(format!("a text is not UTF-8: {error}")),
        }
    }

    fn log_id(&mut self) -> Result<LogId, DecodeError> {
        let (term, index) = (self.u64()?, self.u64()?);
        Ok(log_id(term, index))
    }

    fn option_log_id(&mut self) -> Result<Option<LogId>, DecodeError> {
        if self.bool()? {
            self.log_id().map(Some)
        } else {
            Ok(None)
        }
    }

    fn membership(&mut self) -> Result<Membership, DecodeError> {
        // No capacity is taken on the word of a count: the bytes must be there.
        let mut configs = Vec::new();
        for _ in 0..self.u32()? {
            let mut config = BTreeSet::new();
            for _ in 0..self.u32()? {
                config.insert(self.u64()?);
            }
            configs.push(config);
        }
        let mut nodes = BTreeMap::new();
        for _ in 0..self.u32()? {
            let id = self.u64()?;
            let node = Node {
                rpc_address: self.text()?,
                http_address: self.text()?,
                disk_id: self.text()?,
            };
            nodes.insert(id, node);
        }
        if let Some(id) = configs.iter().flatten().find(|id| !nodes.contains_key(id)) {
            return fail(format!("the membership's voter {id} is not among its nodes"));
        }
        Membership::new(configs, nodes).map_err(|error| DecodeError(error.to_string()))
    }

    fn end(&self) -> Result<(), DecodeError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            fail(format!("{} bytes too many", self.0.len()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn membership() -> Membership {
        let node = |n: u64| Node {
            rpc_address: format!("127.0.0.1:{n}"),
            http_address: format!("[::1]:{n}"),
            disk_id: format!("disk-{n}"),
        };
        Membership::new(
            vec![BTreeSet::from([1, 2]), BTreeSet::from([2, 3])],
            (1..=4).map(|n| (n, node(n))).collect::<BTreeMap<_, _>>(),
        )
        .unwrap()
    }

    fn entries() -> Vec<Entry> {
        [
            EntryPayload::Blank,
            EntryPayload::Normal(Command(vec![])),
            EntryPayload::Normal(Command(vec![7; 300])),
            EntryPayload::Membership(membership()),
        ]
        .into_iter()
        .map(|payload| Entry {
            log_id: log_id(3, 4),
            payload,
        })
        .collect()
    }

    #[test]
    fn entries_round_trip_and_every_shorter_input_is_refused_or_is_a_shorter_command() {
        for entry in entries() {
            let bytes = encode_entry(&entry);
            assert_eq!(decode_entry(&bytes).unwrap(), entry);
            for end in 0..bytes.len() {
                match (decode_entry(&bytes[..end]), &entry.payload) {
                    (Err(_), _) => {}
                    (Ok(shorter), EntryPayload::Normal(_)) => assert_ne!(shorter, entry),
                    (Ok(_), _) => panic!("{end} bytes of {} decoded", bytes.len()),
                }
            }
        }
    }

    #[test]
    fn the_encodings_are_frozen() {
        let entry = Entry {
            log_id: log_id(1, 2),
            payload: EntryPayload::Normal(Command(vec![9])),
        };
        assert_eq!(
            encode_entry(&entry),
            [1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 9]
        );
        assert_eq!(
            encode_vote(&Vote::new_committed(5, 6)),
            [5, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 1]
        );
        assert_eq!(encode_log_id(None), [0]);
        assert_eq!(
            encode_log_id(Some(&log_id(1, 2))),
            [1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]
        );
        let one = Membership::new(
            vec![BTreeSet::from([8])],
            [(
                8,
                Node {
                    rpc_address: "a".into(),
                    http_address: "bc".into(),
                    disk_id: String::new(),
                },
            )]
            .into_iter()
            .collect::<BTreeMap<_, _>>(),
        )
        .unwrap();
        let meta = SnapshotMeta {
            last_log_id: None,
            last_membership: StoredMembership::new(None, one),
        };
        let mut expected = vec![
            0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0,
        ];
        expected.extend([1, 0, 0, 0, b'a', 2, 0, 0, 0, b'b', b'c', 0, 0, 0, 0]);
        assert_eq!(encode_snapshot_meta(&meta), expected);
    }

    #[test]
    fn votes_log_ids_and_meta_round_trip() {
        for vote in [Vote::new(0, 0), Vote::new(7, 2), Vote::new_committed(u64::MAX, 3)] {
            assert_eq!(decode_vote(&encode_vote(&vote)).unwrap(), vote);
        }
        for id in [None, Some(log_id(4, u64::MAX))] {
            assert_eq!(decode_log_id(&encode_log_id(id.as_ref())).unwrap(), id);
        }
        for meta in [
            SnapshotMeta::default(),
            SnapshotMeta {
                last_log_id: Some(log_id(2, 9)),
                last_membership: StoredMembership::new(Some(log_id(1, 5)), membership()),
            },
        ] {
            assert_eq!(decode_snapshot_meta(&encode_snapshot_meta(&meta)).unwrap(), meta);
        }
    }

    #[test]
    fn unknown_kinds_flags_and_trailing_bytes_are_refused() {
        let mut bytes = encode_entry(&entries()[0]);
        bytes[16] = 9;
        assert!(
            decode_entry(&bytes)
                .unwrap_err()
                .to_string()
                .contains("unknown kind 9")
        );
        let mut bytes = encode_entry(&entries()[0]);
        bytes.push(0);
        assert!(decode_entry(&bytes).is_err());
        let mut bytes = encode_vote(&Vote::new(1, 1));
        bytes[16] = 2;
        assert!(decode_vote(&bytes).is_err());
    }
}
