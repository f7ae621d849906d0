//! The first start of a cluster.
//!
//! Guaranteed: only masters started with `--bootstrap` on empty disks become a cluster, and only when all of
//! `--initial-cluster` are there, name the same members, and are empty themselves. The master with the lowest
//! id initialises; the others wait to be told. A disk that already belongs to a cluster is left as it is. A master
//! whose disk is new while the others' cluster exists is refused: it would be a wiped one under its old id. So is one
//! that waits, to be added or for the others, once a leader calls it by the disk that it had.
//!
//! Not guaranteed: that a wiped *single* master, or *all* masters wiped at once, are noticed: nobody is left to tell.

use std::collections::BTreeMap;
use std::time::Duration;

use mooncake_proto::pb::raft as pb;
use mooncake_raft_store::{Node, NodeId, StoredMembership};
use openraft::async_runtime::watch::WatchReceiver as _;
use openraft::errors::{InitializeError, RaftError};

use super::MasterRaft;
use super::peers::{Lane, Peers, describe};
use super::service::{Shared, TakenFor};
use crate::config::MemberAddress;

/// How often the others are asked while they are not all there.
const RETRY: Duration = Duration::from_millis(250);
/// What to do when a cluster was only half made.
pub(crate) const REMAKE: &str = "If no master of this cluster ever led (each of them says that its data folder is empty, \
     or has a vote but no log), stop them all, delete their data folders and start them again with --bootstrap";
/// How long one question may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);
/// How often a person is told what is still missing.
const REPORT_EVERY: Duration = Duration::from_secs(10);

/// Why this master cannot be a part of the cluster that it was started for. No retry helps.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BootstrapError {
    /// The others' cluster knows this id with another disk.
    #[error(
        "master {by} (disk {by_disk}) says that this cluster exists and that master {id} has disk {known}, but this data \
         folder holds the new disk {found}. A wiped master must come back as a new id: remove master {id} from the cluster, \
         and start this one with a new --node-id and an empty --data-dir, or put its old data folder back. (If master {by} \
         is left over from before a restore or a recovery, stop that one instead and delete its data folder)"
    )]
    Wiped {
        /// This master.
        id: NodeId,
        /// The disk that the cluster knows.
        known: String,
        /// The disk here.
        found: String,
        /// Who says so.
        by: NodeId,
        /// By which disk.
        by_disk: String,
    },
    /// The others' cluster does not know this id.
    #[error(
        "master {by} belongs to a cluster that does not have master {id}: --bootstrap makes new clusters only. Start \
         this master without --bootstrap and add it to that cluster"
    )]
    NotAMember {
        /// This master.
        id: NodeId,
        /// Who says so.
        by: NodeId,
    },
    /// At an address of `--initial-cluster` is someone else.
    #[error(
        "--initial-cluster says that master {wanted} is at {address}, but master {found} answers there: correct the addresses"
    )]
    WrongMaster {
        /// Who should be there.
        wanted: NodeId,
        /// Who is.
        found: NodeId,
        /// Where.
        address: String,
    },
    /// Raft does not want to.
    #[error("initialising the cluster failed: {0}")]
    Raft(String),
    /// Stopped meanwhile.
    #[error("this master stops")]
    Stopped,
}

/// What one round of questions says.
#[derive(Debug, PartialEq, Eq)]
enum Judgement {
    /// Ask again.
    Wait(String),
    /// All are there and empty: these are the members.
    Ready(BTreeMap<NodeId, Node>),
}

/// Whether a master that began with an empty disk was told of its cluster since.
pub(super) fn knows_a_cluster(membership: &StoredMembership) -> bool {
    membership.nodes().next().is_some()
}

/// Runs until this master knows a membership.
pub(crate) async fn run(
    raft: &MasterRaft,
    peers: &Peers,
    shared: &Shared,
    members: &BTreeMap<NodeId, MemberAddress>,
) -> Result<(), BootstrapError> {
    let id = shared.identity.node_id;
    let lowest = members.keys().next().copied();
    let mut metrics = raft.metrics();
    let mut taken_for = shared.taken_for.subscribe();
    let mut reported: Option<tokio::time::Instant> = None;
    loop {
        if knows_a_cluster(&metrics.borrow_watched().membership_config) {
            shared.bootstrapping.send_replace(false);
            tracing::info!("this master is a member of the cluster now");
            return Ok(());
        }
        // Where none of --initial-cluster is a member any more, nobody else tells.
        wiped(shared, &mut taken_for)?;
        let others = members.iter().filter(|(other, _)| **other != id);
        let probes =
            futures_util::future::join_all(others.map(|(other, address)| async move {
                (*other, address, probe(peers, *other, address).await)
            }))
            .await;
        match judge(&shared.identity, members, &shared.initial_cluster, &probes)? {
            Judgement::Ready(nodes) if lowest == Some(id) => {
                tracing::info!(
                    members = nodes.len(),
                    "all masters are there and empty: initialising the cluster"
                );
                match raft.initialize(nodes).await {
                    // Not allowed: a vote or a log came meanwhile, so somebody leads; the loop will see.
                    Ok(()) | Err(RaftError::APIError(InitializeError::NotAllowed(_))) => {}
                    Err(RaftError::APIError(error)) => return Err(BootstrapError::Raft(error.to_string())),
                    Err(RaftError::Fatal(_)) => return Err(BootstrapError::Stopped),
                }
            }
            Judgement::Ready(_) => {}
            Judgement::Wait(what) => {
                if reported.is_none_or(|at| at.elapsed() > REPORT_EVERY) {
                    tracing::info!("waiting for the other masters of --initial-cluster: {what}");
                    reported = Some(tokio::time::Instant::now());
                }
            }
        }
        // Wakes at once when the membership arrives, or asks again after a while.
        if let Ok(Err(_)) = tokio::time::timeout(RETRY, metrics.changed()).await {
            return Err(BootstrapError::Stopped);
        }
    }
}

/// Runs until this master, whose disk is empty, was added to a cluster.
pub(crate) async fn wait_to_be_added(raft: &MasterRaft, shared: &Shared) -> Result<(), BootstrapError> {
    let mut metrics = raft.metrics();
    let mut taken_for = shared.taken_for.subscribe();
    loop {
        if knows_a_cluster(&metrics.borrow_watched().membership_config) {
            return Ok(());
        }
        wiped(shared, &mut taken_for)?;
        tokio::select! {
            changed = metrics.changed() => changed.map_err(|_| BootstrapError::Stopped)?,
            _ = taken_for.changed() => {}
        }
    }
}

/// Fails if a leader called this master by a disk that it does not have.
fn wiped(
    shared: &Shared,
    taken_for: &mut tokio::sync::watch::Receiver<Option<TakenFor>>,
) -> Result<(), BootstrapError> {
    match taken_for.borrow_and_update().clone() {
        None => Ok(()),
        Some(taken_for) => Err(BootstrapError::Wiped {
            id: shared.identity.node_id,
            known: taken_for.disk_id,
            found: shared.identity.disk_id.clone(),
            by: taken_for.by,
            by_disk: taken_for.by_disk,
        }),
    }
}

type Probe<'a> = (NodeId, &'a MemberAddress, Result<pb::ProbeResponse, String>);

async fn probe(peers: &Peers, id: NodeId, address: &MemberAddress) -> Result<pb::ProbeResponse, String> {
    let mut client = peers.client(id, &address.rpc, Lane::Control);
    match tokio::time::timeout(PROBE_TIMEOUT, client.probe(pb::ProbeRequest::default())).await {
        Ok(Ok(response)) => {
            peers.succeeded(id, Lane::Control);
            Ok(response.into_inner())
        }
        Ok(Err(status)) => {
            let (text, refused) = describe(&status);
            if refused {
                peers.failed(id, &address.rpc, Lane::Control, true, &text);
            }
            Err(text)
        }
        Err(_) => Err(format!("no answer within {} s", PROBE_TIMEOUT.as_secs())),
    }
}

fn judge(
    me: &super::Identity,
    members: &BTreeMap<NodeId, MemberAddress>,
    own_list: &[pb::Node],
    probes: &[Probe<'_>],
) -> Result<Judgement, BootstrapError> {
    let mut nodes = BTreeMap::new();
    if let Some(own) = members.get(&me.node_id) {
        nodes.insert(me.node_id, node(own, &me.disk_id));
    }
    let mut waiting = Vec::new();
    for (id, address, answer) in probes {
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => {
                waiting.push(format!("master {id} at {} ({error})", address.rpc));
                continue;
            }
        };
        if answer.node_id != *id {
            return Err(BootstrapError::WrongMaster {
                wanted: *id,
                found: answer.node_id,
                address: address.rpc.clone(),
            });
        }
        if answer.initialised {
            let known = answer
                .membership
                .iter()
                .flat_map(|m| &m.nodes)
                .find(|node| node.id == me.node_id);
            match known {
                Some(known) if known.disk_id == me.disk_id => {
                    waiting.push(format!(
                        "the log from the cluster that master {id} belongs to already"
                    ));
                    continue;
                }
                Some(known) => {
                    return Err(BootstrapError::Wiped {
                        id: me.node_id,
                        known: known.disk_id.clone(),
                        found: me.disk_id.clone(),
                        by: *id,
                        by_disk: answer.disk_id.clone(),
                    });
                }
                None => {
                    return Err(BootstrapError::NotAMember {
                        id: me.node_id,
                        by: *id,
                    });
                }
            }
        }
        if !answer.bootstrapping {
            waiting.push(format!(
                "master {id} runs, but without --bootstrap, or its data folder has a vote and no log, since an earlier \
                 bootstrap was cut off. {REMAKE}"
            ));
            continue;
        }
        if answer.initial_cluster != own_list {
            waiting.push(format!(
                "master {id} was started with another --initial-cluster: give all the same"
            ));
            continue;
        }
        nodes.insert(*id, node(address, &answer.disk_id));
    }
    Ok(match waiting.is_empty() {
        true => Judgement::Ready(nodes),
        false => Judgement::Wait(waiting.join("; ")),
    })
}

fn node(address: &MemberAddress, disk_id: &str) -> Node {
    Node {
        rpc_address: address.rpc.clone(),
        http_address: address.http.clone(),
        disk_id: disk_id.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members() -> BTreeMap<NodeId, MemberAddress> {
        (1..=3)
            .map(|n| {
                (
                    n,
                    MemberAddress {
                        rpc: format!("h{n}:1"),
                        http: format!("h{n}:2"),
                    },
                )
            })
            .collect()
    }

    fn me() -> crate::consensus::Identity {
        crate::consensus::Identity {
            cluster_id: "c".into(),
            node_id: 1,
            disk_id: "d1".into(),
        }
    }

    fn pristine(id: NodeId) -> pb::ProbeResponse {
        pb::ProbeResponse {
            node_id: id,
            disk_id: format!("d{id}"),
            bootstrapping: true,
            ..Default::default()
        }
    }

    fn initialised(id: NodeId, disks: &[(NodeId, &str)]) -> pb::ProbeResponse {
        let nodes = disks.iter().map(|(id, disk)| pb::Node {
            id: *id,
            disk_id: (*disk).into(),
            ..Default::default()
        });
        pb::ProbeResponse {
            node_id: id,
            initialised: true,
            membership: Some(pb::Membership {
                configs: vec![],
                nodes: nodes.collect(),
            }),
            ..Default::default()
        }
    }

    fn judged(answers: [Result<pb::ProbeResponse, String>; 2]) -> Result<Judgement, BootstrapError> {
        let members = members();
        let probes: Vec<Probe<'_>> = [2, 3]
            .into_iter()
            .zip(answers)
            .map(|(id, answer)| (id, &members[&id], answer))
            .collect();
        judge(&me(), &members, &[], &probes)
    }

    #[test]
    fn only_a_complete_and_empty_cluster_is_made() {
        let Ok(Judgement::Ready(nodes)) = judged([Ok(pristine(2)), Ok(pristine(3))]) else {
            panic!()
        };
        assert_eq!(
            nodes
                .values()
                .map(|node| node.disk_id.as_str())
                .collect::<Vec<_>>(),
            ["d1", "d2", "d3"]
        );

        let wait = |answers| match judged(answers) {
            Ok(Judgement::Wait(what)) => what,
            other => panic!("{other:?}"),
        };
        assert!(wait([Ok(pristine(2)), Err("connection refused".into())]).contains("master 3"));
        let without_flag = pb::ProbeResponse {
            bootstrapping: false,
            ..pristine(2)
        };
        let why = wait([Ok(without_flag), Ok(pristine(3))]);
        assert!(why.contains("without --bootstrap"), "{why}");
        assert!(
            why.contains("a vote and no log") && why.contains("delete their data folders"),
            "{why}"
        );
        let other_list = pb::ProbeResponse {
            initial_cluster: vec![pb::Node::default()],
            ..pristine(2)
        };
        assert!(wait([Ok(other_list), Ok(pristine(3))]).contains("another --initial-cluster"));
        let known = initialised(3, &[(1, "d1"), (2, "d2"), (3, "d3")]);
        assert!(wait([Ok(pristine(2)), Ok(known)]).contains("the log"));
    }

    #[test]
    fn a_wiped_disk_is_refused_even_if_others_do_not_answer() {
        let known = initialised(3, &[(1, "old"), (2, "d2"), (3, "d3")]);
        let refused = judged([Err("down".into()), Ok(known)]).unwrap_err();
        assert!(matches!(refused, BootstrapError::Wiped { .. }));
        assert!(refused.to_string().contains("must come back as a new id"));

        let foreign = initialised(2, &[(2, "d2"), (3, "d3")]);
        assert_eq!(
            judged([Ok(foreign), Ok(pristine(3))]),
            Err(BootstrapError::NotAMember { id: 1, by: 2 })
        );
        assert!(matches!(
            judged([Ok(pristine(3)), Ok(pristine(3))]),
            Err(BootstrapError::WrongMaster {
                wanted: 2,
                found: 3,
                ..
            })
        ));
    }
}
