//! Between openraft's types and the messages of `raft.proto`.
//!
//! Guaranteed: what the `_to_pb` functions produce, the `_from_pb` ones give back unchanged. A message
//! that lacks what it needs is an error that names the field, never a default: a missing term must not become term 0.

use std::collections::{BTreeMap, BTreeSet};

use mooncake_proto::pb::raft as pb;
use mooncake_raft_store::{Command, Entry, LogId, Membership, Node, NodeId, TypeConfig, Vote, log_id};
use openraft::EntryPayload;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, TransferLeaderError, TransferLeaderRequest,
    TransferLeaderResponse, VoteRequest, VoteResponse,
};
use openraft::vote::RaftLeaderId as _;

use super::early_election::Witness;

/// A message that does not make sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("malformed Raft message: {0}")]
pub struct Malformed(pub &'static str);

type Result<T> = std::result::Result<T, Malformed>;

pub fn log_id_to_pb(id: &LogId) -> pb::LogId {
    pb::LogId {
        term: id.committed_leader_id().term,
        index: id.index(),
    }
}

pub fn log_id_from_pb(id: &pb::LogId) -> LogId {
    log_id(id.term, id.index)
}

pub fn vote_to_pb(vote: &Vote) -> pb::Vote {
    pb::Vote {
        term: vote.leader_id.term(),
        node_id: *vote.leader_id.node_id(),
        committed: vote.committed,
    }
}

pub fn vote_from_pb(vote: Option<&pb::Vote>) -> Result<Vote> {
    let vote = vote.ok_or(Malformed("the vote is missing"))?;
    Ok(match vote.committed {
        true => Vote::new_committed(vote.term, vote.node_id),
        false => Vote::new(vote.term, vote.node_id),
    })
}

pub fn leader_gone_to_pb(seen: &std::result::Result<Witness, &'static str>) -> pb::LeaderGoneResponse {
    match seen {
        Ok(witness) => pb::LeaderGoneResponse {
            gone: true,
            against: String::new(),
            last_log_id: witness.last_log_id.as_ref().map(log_id_to_pb),
        },
        Err(against) => pb::LeaderGoneResponse {
            gone: false,
            against: (*against).to_owned(),
            last_log_id: None,
        },
    }
}

pub fn leader_gone_from_pb(answer: &pb::LeaderGoneResponse) -> Option<Witness> {
    answer.gone.then(|| Witness {
        last_log_id: answer.last_log_id.as_ref().map(log_id_from_pb),
    })
}

pub fn node_to_pb(id: NodeId, node: &Node) -> pb::Node {
    pb::Node {
        id,
        rpc_address: node.rpc_address.clone(),
        http_address: node.http_address.clone(),
        disk_id: node.disk_id.clone(),
    }
}

pub fn node_from_pb(node: &pb::Node) -> (NodeId, Node) {
    let pb::Node {
        id,
        rpc_address,
        http_address,
        disk_id,
    } = node.clone();
    (
        id,
        Node {
            rpc_address,
            http_address,
            disk_id,
        },
    )
}

pub fn membership_to_pb(membership: &Membership) -> pb::Membership {
    pb::Membership {
        configs: membership
            .get_joint_config()
            .iter()
            .map(|ids| pb::VoterSet {
                ids: ids.iter().copied().collect(),
            })
            .collect(),
        nodes: membership
            .nodes()
            .map(|(id, node)| node_to_pb(*id, node))
            .collect(),
    }
}

pub fn membership_from_pb(membership: &pb::Membership) -> Result<Membership> {
    let configs: Vec<BTreeSet<NodeId>> = membership
        .configs
        .iter()
        .map(|set| set.ids.iter().copied().collect())
        .collect();
    let nodes: BTreeMap<NodeId, Node> = membership.nodes.iter().map(node_from_pb).collect();
    if nodes.len() != membership.nodes.len() {
        return Err(Malformed("a membership names a node twice"));
    }
    Membership::new(configs, nodes)
        .map_err(|_| Malformed("a membership has a voter without a node or no voters"))
}

pub fn entry_to_pb(entry: Entry) -> pb::Entry {
    use pb::entry::Payload;
    let payload = match entry.payload {
        EntryPayload::Blank => Payload::Blank(pb::Blank {}),
        EntryPayload::Normal(command) => Payload::Command(command.0.into()),
        EntryPayload::Membership(membership) => Payload::Membership(membership_to_pb(&membership)),
    };
    pb::Entry {
        log_id: Some(log_id_to_pb(&entry.log_id)),
        payload: Some(payload),
    }
}

pub fn entry_from_pb(entry: pb::Entry) -> Result<Entry> {
    use pb::entry::Payload;
    let log_id = entry
        .log_id
        .as_ref()
        .map(log_id_from_pb)
        .ok_or(Malformed("an entry has no log id"))?;
    let payload = match entry
        .payload
        .ok_or(Malformed("an entry has no payload that this version knows"))?
    {
        Payload::Blank(_) => EntryPayload::Blank,
        Payload::Command(bytes) => EntryPayload::Normal(Command(bytes.into())),
        Payload::Membership(membership) => EntryPayload::Membership(membership_from_pb(&membership)?),
    };
    Ok(Entry { log_id, payload })
}

/// Bytes that an entry takes in a message, give or take the framing.
pub fn entry_size_bytes(entry: &Entry) -> usize {
    /// Log id and tags.
    const FRAME: usize = 32;
    /// Addresses and a disk id.
    const PER_NODE: usize = 256;
    FRAME
        + match &entry.payload {
            EntryPayload::Blank => 0,
            EntryPayload::Normal(command) => command.0.len(),
            EntryPayload::Membership(membership) => membership.nodes().count() * PER_NODE,
        }
}

pub fn append_to_pb(route: pb::Route, request: AppendEntriesRequest<TypeConfig>) -> pb::AppendRequest {
    pb::AppendRequest {
        route: Some(route),
        vote: Some(vote_to_pb(&request.vote)),
        prev_log_id: request.prev_log_id.as_ref().map(log_id_to_pb),
        entries: request.entries.into_iter().map(entry_to_pb).collect(),
        leader_commit: request.leader_commit.as_ref().map(log_id_to_pb),
    }
}

pub fn append_from_pb(request: pb::AppendRequest) -> Result<AppendEntriesRequest<TypeConfig>> {
    Ok(AppendEntriesRequest {
        vote: vote_from_pb(request.vote.as_ref())?,
        prev_log_id: request.prev_log_id.as_ref().map(log_id_from_pb),
        entries: request
            .entries
            .into_iter()
            .map(entry_from_pb)
            .collect::<Result<_>>()?,
        leader_commit: request.leader_commit.as_ref().map(log_id_from_pb),
    })
}

pub fn append_response_to_pb(response: &AppendEntriesResponse<TypeConfig>) -> pb::AppendResponse {
    use pb::append_response::Result as R;
    let result = match response {
        AppendEntriesResponse::Success => R::Success(pb::Blank {}),
        AppendEntriesResponse::PartialSuccess(upto) => R::PartialSuccess(pb::PartialSuccess {
            log_id: upto.as_ref().map(log_id_to_pb),
        }),
        AppendEntriesResponse::Conflict => R::Conflict(pb::Blank {}),
        AppendEntriesResponse::HigherVote(vote) => R::HigherVote(vote_to_pb(vote)),
    };
    pb::AppendResponse { result: Some(result) }
}

pub fn append_response_from_pb(response: &pb::AppendResponse) -> Result<AppendEntriesResponse<TypeConfig>> {
    use pb::append_response::Result as R;
    Ok(
        match response
            .result
            .as_ref()
            .ok_or(Malformed("an append response has no result"))?
        {
            R::Success(_) => AppendEntriesResponse::Success,
            R::PartialSuccess(partial) => {
                AppendEntriesResponse::PartialSuccess(partial.log_id.as_ref().map(log_id_from_pb))
            }
            R::Conflict(_) => AppendEntriesResponse::Conflict,
            R::HigherVote(vote) => AppendEntriesResponse::HigherVote(vote_from_pb(Some(vote))?),
        },
    )
}

pub fn vote_request_to_pb(route: pb::Route, request: &VoteRequest<TypeConfig>) -> pb::VoteRequest {
    pb::VoteRequest {
        route: Some(route),
        vote: Some(vote_to_pb(&request.vote)),
        last_log_id: request.last_log_id.as_ref().map(log_id_to_pb),
        leadership_transfer: request.leadership_transfer,
    }
}

pub fn vote_request_from_pb(request: &pb::VoteRequest) -> Result<VoteRequest<TypeConfig>> {
    Ok(VoteRequest {
        vote: vote_from_pb(request.vote.as_ref())?,
        last_log_id: request.last_log_id.as_ref().map(log_id_from_pb),
        leadership_transfer: request.leadership_transfer,
    })
}

pub fn vote_response_to_pb(response: &VoteResponse<TypeConfig>) -> pb::VoteResponse {
    pb::VoteResponse {
        vote: Some(vote_to_pb(&response.vote)),
        granted: response.vote_granted,
        last_log_id: response.last_log_id.as_ref().map(log_id_to_pb),
    }
}

pub fn vote_response_from_pb(response: &pb::VoteResponse) -> Result<VoteResponse<TypeConfig>> {
    Ok(VoteResponse {
        vote: vote_from_pb(response.vote.as_ref())?,
        vote_granted: response.granted,
        last_log_id: response.last_log_id.as_ref().map(log_id_from_pb),
    })
}

pub fn transfer_to_pb(
    route: pb::Route,
    request: &TransferLeaderRequest<TypeConfig>,
) -> pb::TransferLeaderRequest {
    pb::TransferLeaderRequest {
        route: Some(route),
        from_leader: Some(vote_to_pb(request.from_leader())),
        to_id: *request.to_node_id(),
        last_log_id: request.last_log_id().map(log_id_to_pb),
    }
}

pub fn transfer_from_pb(request: &pb::TransferLeaderRequest) -> Result<TransferLeaderRequest<TypeConfig>> {
    Ok(TransferLeaderRequest::new(
        vote_from_pb(request.from_leader.as_ref())?,
        request.to_id,
        request.last_log_id.as_ref().map(log_id_from_pb),
    ))
}

pub fn transfer_response_to_pb(response: &TransferLeaderResponse<TypeConfig>) -> pb::TransferLeaderResponse {
    use pb::transfer_leader_response::Result as R;
    let result = match response {
        Ok(()) => R::Accepted(pb::Blank {}),
        Err(TransferLeaderError::VoteChanged { expected, actual }) => R::VoteChanged(pb::VoteChanged {
            expected: Some(vote_to_pb(expected)),
            actual: Some(vote_to_pb(actual)),
        }),
        Err(TransferLeaderError::LogNotFlushed { expected, actual }) => R::LogNotFlushed(pb::LogNotFlushed {
            expected: expected.as_ref().map(log_id_to_pb),
            actual: actual.as_ref().map(log_id_to_pb),
        }),
    };
    pb::TransferLeaderResponse { result: Some(result) }
}

pub fn transfer_response_from_pb(
    response: &pb::TransferLeaderResponse,
) -> Result<TransferLeaderResponse<TypeConfig>> {
    use pb::transfer_leader_response::Result as R;
    Ok(
        match response
            .result
            .as_ref()
            .ok_or(Malformed("a transfer response has no result"))?
        {
            R::Accepted(_) => Ok(()),
            R::VoteChanged(changed) => Err(TransferLeaderError::VoteChanged {
                expected: vote_from_pb(changed.expected.as_ref())?,
                actual: vote_from_pb(changed.actual.as_ref())?,
            }),
            R::LogNotFlushed(log) => Err(TransferLeaderError::LogNotFlushed {
                expected: log.expected.as_ref().map(log_id_from_pb),
                actual: log.actual.as_ref().map(log_id_from_pb),
            }),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(n: u64) -> Node {
        Node {
            rpc_address: format!("[::1]:{n}"),
            http_address: format!("host-{n}:9003"),
            disk_id: format!("disk-{n}"),
        }
    }

    fn membership() -> Membership {
        let nodes: BTreeMap<_, _> = (1..=4).map(|n| (n, node(n))).collect();
        Membership::new(vec![BTreeSet::from([1, 2, 3]), BTreeSet::from([2, 3, 4])], nodes).unwrap()
    }

    #[test]
    fn every_payload_survives() {
        for payload in [
            EntryPayload::Blank,
            EntryPayload::Normal(Command(vec![])),
            EntryPayload::Normal(Command(vec![0, 255, 7])),
            EntryPayload::Membership(membership()),
        ] {
            let entry = Entry {
                log_id: log_id(7, 99),
                payload,
            };
            assert_eq!(entry_from_pb(entry_to_pb(entry.clone())).unwrap(), entry);
        }
    }

    #[test]
    fn append_survives() {
        for prev in [None, Some(log_id(1, 0)), Some(log_id(3, 8))] {
            let request = AppendEntriesRequest {
                vote: Vote::new_committed(3, 2),
                prev_log_id: prev,
                entries: vec![Entry {
                    log_id: log_id(3, 9),
                    payload: EntryPayload::Blank,
                }],
                leader_commit: Some(log_id(3, 7)),
            };
            let back = append_from_pb(append_to_pb(pb::Route::default(), request.clone())).unwrap();
            assert_eq!(format!("{back:?}"), format!("{request:?}"));
        }
        for response in [
            AppendEntriesResponse::Success,
            AppendEntriesResponse::PartialSuccess(None),
            AppendEntriesResponse::PartialSuccess(Some(log_id(2, 5))),
            AppendEntriesResponse::Conflict,
            AppendEntriesResponse::HigherVote(Vote::new(9, 3)),
        ] {
            assert_eq!(
                append_response_from_pb(&append_response_to_pb(&response)).unwrap(),
                response
            );
        }
    }

    #[test]
    fn votes_survive() {
        for (vote, transfer) in [(Vote::new(5, 1), false), (Vote::new_committed(5, 2), true)] {
            let request = VoteRequest {
                vote,
                last_log_id: Some(log_id(4, 44)),
                leadership_transfer: transfer,
            };
            assert_eq!(
                vote_request_from_pb(&vote_request_to_pb(pb::Route::default(), &request)).unwrap(),
                request
            );
            let response = VoteResponse {
                vote,
                vote_granted: transfer,
                last_log_id: None,
            };
            assert_eq!(
                vote_response_from_pb(&vote_response_to_pb(&response)).unwrap(),
                response
            );
        }
    }

    #[test]
    fn transfers_survive() {
        let request = TransferLeaderRequest::new(Vote::new_committed(5, 2), 3, Some(log_id(5, 1)));
        assert_eq!(
            transfer_from_pb(&transfer_to_pb(pb::Route::default(), &request)).unwrap(),
            request
        );
        for response in [
            Ok(()),
            Err(TransferLeaderError::VoteChanged {
                expected: Vote::new(1, 1),
                actual: Vote::new(2, 2),
            }),
            Err(TransferLeaderError::LogNotFlushed {
                expected: Some(log_id(1, 1)),
                actual: None,
            }),
        ] {
            assert_eq!(
                transfer_response_from_pb(&transfer_response_to_pb(&response)).unwrap(),
                response
            );
        }
    }

    #[test]
    fn what_is_missing_is_named_and_never_a_default() {
        assert!(vote_from_pb(None).is_err());
        assert!(entry_from_pb(pb::Entry::default()).is_err());
        let no_payload = pb::Entry {
            log_id: Some(pb::LogId { term: 1, index: 1 }),
            payload: None,
        };
        assert!(
            entry_from_pb(no_payload)
                .unwrap_err()
                .to_string()
                .contains("payload")
        );
        assert!(append_response_from_pb(&pb::AppendResponse::default()).is_err());
        assert!(transfer_response_from_pb(&pb::TransferLeaderResponse::default()).is_err());
        let voter_without_node = pb::Membership {
            configs: vec![pb::VoterSet { ids: vec![1] }],
            nodes: vec![],
        };
        assert!(membership_from_pb(&voter_without_node).is_err());
        let twice = pb::Membership {
            configs: vec![pb::VoterSet { ids: vec![1] }],
            nodes: vec![node_to_pb(1, &node(1)), node_to_pb(1, &node(2))],
        };
        assert!(membership_from_pb(&twice).is_err());
    }
}
