//! What may be changed about the masters, and why not: pure, without I/O.

use mooncake_proto::api::ALIVE_WITHIN;
use mooncake_proto::pb::raft as pb;
use mooncake_raft_store::{Node, NodeId};

use super::handle::{MAX_READY_LAG, Member};
use super::membership::ChangeError;
use super::transfer::{entries, silence};
use super::version;
use crate::config::{MAX_MEMBERS, check_address};

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Judged {
    /// It is one already.
    Member(NodeId),
    /// As this.
    New(NodeId, Node),
}

/// What the master that answered may become.
pub(super) fn judge_new(
    rpc_address: &str,
    expected: Option<NodeId>,
    answer: &pb::ProbeResponse,
    members: &[Member],
    cluster_version: u32,
) -> Result<Judged, ChangeError> {
    let id = answer.node_id;
    let conflict = |why: String| Err(ChangeError::Conflict(why));
    if expected.is_some_and(|expected| expected != id) {
        return conflict(format!(
            "at {rpc_address} answers master {id}, not master {}: correct the address or the id",
            expected.unwrap_or_default()
        ));
    }
    if let Some(known) = members.iter().find(|member| member.id == id) {
        if known.disk_id != answer.disk_id {
            return conflict(format!(
                "this cluster knows master {id} with disk {}, but the master at {rpc_address} has disk {}: a wiped master \
                 must come back as a new id. Stop it, start it with a new --node-id and an empty --data-dir, add that, and \
                 remove master {id}",
                known.disk_id, answer.disk_id
            ));
        }
        if known.rpc_address != rpc_address {
            return conflict(format!(
                "master {id} is a member at {}, not at {rpc_address}: addresses do not change while a master is a member",
                known.rpc_address
            ));
        }
        return Ok(Judged::Member(id));
    }
    if answer.initialised {
        return conflict(format!(
            "the data folder of master {id} at {rpc_address} belongs to a cluster already (or did, before it was removed \
             from it): stop it, and start it with an empty --data-dir"
        ));
    }
    if members.len() >= MAX_MEMBERS {
        return conflict(format!(
            "the cluster has {MAX_MEMBERS} masters, the limit: remove one first"
        ));
    }
    if version::of_probe(answer) < cluster_version {
        return conflict(format!(
            "master {id} at {rpc_address} runs {}, which supports cluster versions up to {}, but this cluster is at {}: \
             upgrade it first",
            answer.software,
            version::of_probe(answer),
            cluster_version
        ));
    }
    let http = &answer.http_address;
    if let Err(why) = check_address(http) {
        return conflict(format!(
            "master {id} says that its HTTP address is '{http}': {why}"
        ));
    }
    if http
        .parse::<std::net::SocketAddr>()
        .is_ok_and(|address| address.ip().is_unspecified())
    {
        return conflict(format!(
            "master {id} says that its HTTP address is {http}, which nobody can dial: start it with \
             --advertise-http-address HOST:PORT"
        ));
    }
    // Not a member at the same RPC address: somebody else answers there now, so that one is gone from it. It is the new
    // master's predecessor on this machine, about to be removed.
    if let Some(other) = members
        .iter()
        .find(|member| member.http_address == *http && member.rpc_address != rpc_address)
    {
        return conflict(format!(
            "master {} is a member with the address {http}: give each master its own",
            other.id
        ));
    }
    Ok(Judged::New(
        id,
        Node {
            rpc_address: rpc_address.to_owned(),
            http_address: http.clone(),
            disk_id: answer.disk_id.clone(),
        },
    ))
}

/// What keeps a voter from being counted on; `None`: it answers and keeps up.
fn missing(member: &Member, me: NodeId) -> Option<String> {
    let id = member.id;
    if id == me {
        return None;
    }
    if member.silent.is_none_or(|silent| silent >= ALIVE_WITHIN) {
        return Some(format!("master {id} {}", silence(&member.silent)));
    }
    match member.lag {
        Some(lag) if lag <= MAX_READY_LAG => None,
        lag => Some(format!(
            "master {id} answers, but is {} entries behind: writes would wait for it",
            entries(&lag)
        )),
    }
}

/// Whether this leader has heard enough of the voters to judge a change: it may be new, and then has heard nobody.
pub(super) fn settled(members: &[Member], me: NodeId) -> bool {
    members.iter().filter(|member| member.is_voter).all(|member| {
        missing(member, me).is_none() || member.silent.is_some_and(|silent| silent >= ALIVE_WITHIN)
    })
}

/// Those voters whom a promotion needs: they answer and keep up.
pub(super) fn living_voters(members: &[Member], me: NodeId) -> impl Iterator<Item = &Member> {
    members
        .iter()
        .filter(move |member| member.is_voter && missing(member, me).is_none())
}

/// `Ok(false)`: it votes already.
pub(super) fn judge_promotion(id: NodeId, members: &[Member], me: NodeId) -> Result<bool, ChangeError> {
    let member = members
        .iter()
        .find(|member| member.id == id)
        .ok_or(ChangeError::NotFound(id))?;
    if member.is_voter {
        return Ok(false);
    }
    if member.silent.is_none_or(|silent| silent >= ALIVE_WITHIN) {
        return Err(ChangeError::Behind(format!(
            "master {id} {}; as a voter it would only make the quorum larger",
            silence(&member.silent)
        )));
    }
    if member.lag.is_none_or(|lag| lag > MAX_READY_LAG) {
        return Err(ChangeError::Behind(format!(
            "master {id} is {} log entries behind, the limit is {MAX_READY_LAG}: it is catching up, repeat the request later",
            entries(&member.lag)
        )));
    }
    let voters: Vec<_> = members.iter().filter(|member| member.is_voter).collect();
    let missing: Vec<_> = voters.iter().filter_map(|member| missing(member, me)).collect();
    let (all, living) = (voters.len() + 1, voters.len() + 1 - missing.len());
    if living < quorum(all) {
        return Err(ChangeError::QuorumAtRisk(format!(
            "with master {id} there would be {all} voters, of which {} must answer and keep up, but {living} do ({}). Bring \
             the others back, or remove those that are gone, first",
            quorum(all),
            missing.join("; ")
        )));
    }
    Ok(true)
}

/// What one master says of its way to another.
pub(super) fn judge_reach(from: NodeId, to: &Member, found: &[pb::Reach]) -> Result<(), ChangeError> {
    // A program from before the question does not answer it.
    let Some(found) = found.iter().find(|found| found.address == to.rpc_address) else {
        return Ok(());
    };
    let (id, address) = (to.id, &to.rpc_address);
    if found.unknown {
        return Err(ChangeError::Behind(format!(
            "master {from} has not learnt of master {id} yet: repeat the request later"
        )));
    }
    if found.disk_id == to.disk_id {
        return Ok(());
    }
    Err(ChangeError::Unreachable(match found.disk_id.is_empty() {
        true => format!(
            "master {from} cannot reach master {id} at {address}: {}. Voters need each other: correct the network or the \
             address first",
            found.error
        ),
        false => format!(
            "at {address}, as master {from} sees it, answers another master than {id} (disk {} instead of {}): the address \
             must lead to the same machine from everywhere",
            found.disk_id, to.disk_id
        ),
    }))
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Removal {
    /// It is no member.
    Done,
    /// It leads.
    HandOver,
    /// Counts for no quorum.
    Learner,
    /// Another one than the leader.
    Voter,
}

/// How the member is removed.
pub(super) fn judge_removal(id: NodeId, members: &[Member], me: NodeId) -> Result<Removal, ChangeError> {
    let Some(member) = members.iter().find(|member| member.id == id) else {
        return Ok(Removal::Done);
    };
    if !member.is_voter {
        return Ok(Removal::Learner);
    }
    let left: Vec<_> = members
        .iter()
        .filter(|member| member.is_voter && member.id != id)
        .collect();
    if left.is_empty() {
        return Err(ChangeError::QuorumAtRisk(format!(
            "master {id} is the only voter: without it there is no cluster. Add and promote another one first"
        )));
    }
    let missing: Vec<_> = left.iter().filter_map(|member| missing(member, me)).collect();
    let living = left.len() - missing.len();
    if living < quorum(left.len()) {
        return Err(ChangeError::QuorumAtRisk(format!(
            "without master {id} there would be {} voters, of which {} must answer and keep up, but {living} do ({}): writes \
             would stop. Bring those back, wait for them, or remove them first",
            left.len(),
            quorum(left.len()),
            missing.join("; ")
        )));
    }
    Ok(match id == me {
        true => Removal::HandOver,
        false => Removal::Voter,
    })
}

fn quorum(voters: usize) -> usize {
    voters / 2 + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn member(id: NodeId, is_voter: bool, silent_s: Option<u64>, lag: u64) -> Member {
        Member {
            id,
            rpc_address: format!("h{id}:1"),
            http_address: format!("h{id}:2"),
            disk_id: format!("d{id}"),
            is_voter,
            lag: Some(lag),
            silent: silent_s.map(Duration::from_secs),
        }
    }

    /// Master 1 leads; seconds of silence of the others.
    fn voters(silent_s: &[u64]) -> Vec<Member> {
        let mut all = vec![member(1, true, None, 0)];
        all.extend(
            (2..)
                .zip(silent_s)
                .map(|(id, silent)| member(id, true, Some(*silent), 0)),
        );
        all
    }

    fn probe(id: NodeId) -> pb::ProbeResponse {
        pb::ProbeResponse {
            node_id: id,
            disk_id: format!("d{id}"),
            http_address: format!("h{id}:2"),
            ..Default::default()
        }
    }

    fn conflict(judged: Result<Judged, ChangeError>) -> String {
        match judged {
            Err(ChangeError::Conflict(why)) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_empty_disks_under_free_ids_are_added() {
        let members = voters(&[0, 0]);
        let judge = |address: &str, answer: &pb::ProbeResponse| judge_new(address, None, answer, &members, 1);
        let Ok(Judged::New(4, node)) = judge("h4:1", &probe(4)) else {
            panic!()
        };
        assert_eq!(
            (node.disk_id.as_str(), node.http_address.as_str()),
            ("d4", "h4:2")
        );
        assert_eq!(judge("h3:1", &probe(3)), Ok(Judged::Member(3)));

        let wiped = pb::ProbeResponse {
            disk_id: "new".into(),
            ..probe(3)
        };
        assert!(conflict(judge("h3:1", &wiped)).contains("must come back as a new id"));
        assert!(conflict(judge("h9:1", &probe(3))).contains("addresses do not change"));
        let foreign = pb::ProbeResponse {
            initialised: true,
            ..probe(4)
        };
        assert!(conflict(judge("h4:1", &foreign)).contains("belongs to a cluster already"));
        let unreachable = pb::ProbeResponse {
            http_address: "0.0.0.0:9003".into(),
            ..probe(4)
        };
        assert!(conflict(judge("h4:1", &unreachable)).contains("--advertise-http-address"));
        let taken = pb::ProbeResponse {
            http_address: "h2:2".into(),
            ..probe(4)
        };
        assert!(conflict(judge("h4:1", &taken)).contains("master 2"));
        assert!(
            matches!(judge("h2:1", &taken), Ok(Judged::New(4, _))),
            "in the place of a master that does not answer there any more"
        );
        assert!(conflict(judge_new("h4:1", Some(5), &probe(4), &members, 1)).contains("answers master 4"));
        assert!(conflict(judge_new("h4:1", None, &probe(4), &members, 2)).contains("upgrade it first"));
    }

    #[test]
    fn only_who_keeps_up_is_promoted() {
        let with = |learner| {
            let mut all = voters(&[0, 0]);
            all.push(learner);
            judge_promotion(4, &all, 1)
        };
        assert_eq!(with(member(4, false, Some(0), MAX_READY_LAG)), Ok(true));
        assert_eq!(with(member(4, true, Some(0), 0)), Ok(false));
        for (learner, why) in [
            (
                member(4, false, Some(0), MAX_READY_LAG + 234),
                "1234 log entries behind",
            ),
            (member(4, false, Some(9), 0), "not answered for 9 s"),
            (member(4, false, None, 0), "is it started"),
        ] {
            assert!(matches!(with(learner), Err(ChangeError::Behind(text)) if text.contains(why)));
        }
        assert_eq!(
            judge_promotion(7, &voters(&[0]), 1),
            Err(ChangeError::NotFound(7))
        );
        let mut half_dead = voters(&[0, 9, 9]);
        half_dead.push(member(5, false, Some(0), 0));
        assert_eq!(judge_promotion(5, &half_dead, 1), Ok(true), "3 of 5 answer");
        let mut worse = voters(&[9, 9, 9]);
        worse.push(member(5, false, Some(0), 0));
        assert!(matches!(
            judge_promotion(5, &worse, 1),
            Err(ChangeError::QuorumAtRisk(_))
        ));
        let mut behind = voters(&[0, 0, 9]);
        behind.push(member(5, false, Some(0), 0));
        assert_eq!(judge_promotion(5, &behind, 1), Ok(true));
        behind[1].lag = Some(MAX_READY_LAG + 1);
        behind[2].lag = None;
        let refused = judge_promotion(5, &behind, 1);
        assert!(
            matches!(&refused, Err(ChangeError::QuorumAtRisk(why)) if why.contains("writes would wait for it")),
            "{refused:?}"
        );
    }

    #[test]
    fn a_living_quorum_stays() {
        assert_eq!(
            judge_removal(3, &voters(&[0, 9]), 1),
            Ok(Removal::Voter),
            "the dead one"
        );
        assert_eq!(judge_removal(1, &voters(&[0, 0]), 1), Ok(Removal::HandOver));
        assert_eq!(judge_removal(7, &voters(&[0, 0]), 1), Ok(Removal::Done));
        let refused = judge_removal(2, &voters(&[0, 9]), 1);
        assert!(
            matches!(&refused, Err(ChangeError::QuorumAtRisk(why)) if why.contains("(master 3 has not answered for 9 s)")),
            "{refused:?}"
        );
        assert!(matches!(
            judge_removal(1, &voters(&[]), 1),
            Err(ChangeError::QuorumAtRisk(_))
        ));
        // It answers, and has just come back with an old log.
        let mut behind = voters(&[0, 0]);
        behind[2].lag = Some(MAX_READY_LAG + 1);
        let refused = judge_removal(2, &behind, 1);
        assert!(
            matches!(&refused, Err(ChangeError::QuorumAtRisk(why)) if why.contains("master 3 answers, but is 1001 entries behind")),
            "{refused:?}"
        );
        assert_eq!(judge_removal(3, &behind, 1), Ok(Removal::Voter));
        let mut with_learner = voters(&[9, 9]);
        with_learner.push(member(4, false, None, 0));
        assert_eq!(
            judge_removal(4, &with_learner, 1),
            Ok(Removal::Learner),
            "it counts for no quorum"
        );
    }

    #[test]
    fn a_new_leader_waits_for_what_it_has_not_heard_yet() {
        assert!(settled(&voters(&[0, 0]), 1));
        assert!(settled(&voters(&[0, 9]), 1), "it was heard, and then no more");
        let mut unheard = voters(&[0, 0]);
        unheard[2].silent = None;
        assert!(!settled(&unheard, 1));
        unheard[2].is_voter = false;
        assert!(settled(&unheard, 1), "a learner counts for no quorum");
        // Heard, but how far its log is comes with the next answer.
        let mut no_match = voters(&[0, 0]);
        no_match[1].lag = Some(1 << 20);
        assert!(!settled(&no_match, 1));
    }

    #[test]
    fn voters_reach_each_other() {
        let to = member(4, false, Some(0), 0);
        let found = |disk_id: &str, error: &str, unknown| {
            [pb::Reach {
                address: "h4:1".into(),
                disk_id: disk_id.into(),
                error: error.into(),
                unknown,
            }]
        };
        assert_eq!(judge_reach(2, &to, &found("d4", "", false)), Ok(()));
        assert_eq!(judge_reach(2, &to, &[]), Ok(()), "an older program");
        let why = judge_reach(2, &to, &found("", "no route to host", false)).unwrap_err();
        assert!(
            matches!(&why, ChangeError::Unreachable(why) if why.contains("master 2 cannot reach master 4 at h4:1: no route")),
            "{why}"
        );
        let why = judge_reach(2, &to, &found("d9", "", false)).unwrap_err();
        assert!(
            matches!(&why, ChangeError::Unreachable(why) if why.contains("answers another master")),
            "{why}"
        );
        assert!(matches!(
            judge_reach(2, &to, &found("", "", true)),
            Err(ChangeError::Behind(_))
        ));
    }
}
