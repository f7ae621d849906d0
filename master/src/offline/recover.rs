//! `recover --force-new-cluster`: one surviving disk becomes a cluster of its own.
//!
//! The whole log is kept, its uncommitted end too: what of it was acknowledged cannot be told from here, and the outcome
//! of the rest was never known to anybody.

use std::collections::{BTreeMap, BTreeSet};

use mooncake_raft_store::{
    Entry, LogId, Membership, NewLife, Node, NodeId, Offline, OpenError, SnapshotMeta, StoredMembership,
    Vote, log_id,
};
use mooncake_state::{Command, State};
use openraft::EntryPayload;
use openraft::vote::RaftLeaderId as _;

use super::cli::RecoverFlags;
use super::{contents, next_epoch, now_ms, now_s, raise_epoch};
use crate::consensus::{check_removal_note, check_version};

/// Why a log cannot be read to its end.
enum ReadError {
    Open(OpenError),
    Entry(String),
}

impl From<OpenError> for ReadError {
    fn from(error: OpenError) -> Self {
        Self::Open(error)
    }
}

/// What a folder holds.
struct Life {
    state: State,
    membership: StoredMembership,
}

pub(super) fn run(flags: &RecoverFlags) -> Result<String, String> {
    let dir = flags.data_dir.display();
    check_removal_note(&flags.data_dir).map_err(|why| {
        format!(
            "{why}. If it is all that is left of the cluster, delete its file `removed` first: what was acknowledged after \
             the removal is lost then"
        )
    })?;
    let folder = Offline::open(&flags.data_dir).map_err(|error| error.to_string())?;
    let old = folder.identity().clone();
    let id = old.node_id;
    if flags.node_id.is_some_and(|wanted| wanted != id) {
        return Err(format!(
            "data folder {dir} is that of master {id}: correct --node-id or --data-dir"
        ));
    }
    let Some(last) = folder.last_log_id() else {
        return Err(format!(
            "data folder {dir} has no log yet: there is nothing to recover"
        ));
    };
    let Life {
        mut state,
        membership,
    } = read(&folder).map_err(|error| match error {
        ReadError::Open(error) => error.to_string(),
        ReadError::Entry(why) => format!("data folder {dir}: {why}. Nothing was changed"),
    })?;
    let before = members_before(folder.begun(), &membership);
    if flags.dry_run {
        return Ok(dry_run(&folder, last, &state, &before));
    }
    let known = membership.get_node(&id);
    let address = |flag: &Option<String>, known: Option<&String>, name: &str| {
        flag.clone().or_else(|| known.cloned()).ok_or_else(|| {
            format!("master {id} was no member yet, so that its addresses are not known: give --advertise-{name}-address")
        })
    };
    let rpc = address(
        &flags.advertise_rpc_address,
        known.map(|node| &node.rpc_address),
        "rpc",
    )?;
    let http = address(
        &flags.advertise_http_address,
        known.map(|node| &node.http_address),
        "http",
    )?;

    let old_epoch = state.recovery_epoch();
    let epoch = next_epoch(&flags.epoch, old_epoch, now_s())?;
    let voted = folder.vote().map_or(0, |vote| vote.leader_id.term());
    let term = voted.max(last.committed_leader_id().term) + 1;
    let index = last.index() + 1;
    let time_ms = state.time_ms();
    raise_epoch(&mut state, index, epoch, now_ms().max(time_ms))?;
    let held = contents(&state);

    let new = folder
        .begin_new_life(&note(&before), |identity| {
            let node = Node {
                rpc_address: rpc.clone(),
                http_address: http.clone(),
                disk_id: identity.disk_id.clone(),
            };
            alone(id, node, term, index, state.encode_snapshot())
        })
        .map_err(|error| error.to_string())?;

    let others: Vec<String> = before
        .iter()
        .filter(|other| **other != id)
        .map(NodeId::to_string)
        .collect();
    let others = match others.is_empty() {
        true => "none".to_owned(),
        false => others.join(", "),
    };
    Ok(format!(
        "Data folder {dir} is now a cluster of master {id} alone.\n\
         \x20 cluster id      {}\n\
         \x20 kept            every log entry up to index {} (term {}): {held}\n\
         \x20 members before  {before:?}, now [{id}] at {rpc} / {http}\n\
         \x20 recovery epoch  {old_epoch} -> {epoch}: nodes obey it and refuse masters of the old one\n\
         \x20 disk id         {} -> {}: old masters refuse this one, and are refused\n\
         Next:\n\
         \x20 1. The other old masters ({others}) must never start again: delete their data folders.\n\
         \x20 2. Start this master as before (--bootstrap and --initial-cluster change nothing any more).\n\
         \x20 3. Wait until `mooncakectl cluster status` names it as the leader; the nodes come back by themselves if it is\n\
         \x20    among their --masters.\n\
         \x20 4. Add new masters, each with an id that was never used and an empty data folder:\n\
         \x20    mooncakectl cluster add HOST:RPC_PORT --promote",
        new.cluster_id,
        last.index(),
        last.committed_leader_id().term,
        old.disk_id,
        new.disk_id,
    ))
}

/// What is kept beside a recovery under way, so that its repeat can still name the old masters.
fn note(before: &[NodeId]) -> String {
    before.iter().map(NodeId::to_string).collect::<Vec<_>>().join(" ")
}

/// The members of the old life: a recovery that was cut off may have put its own membership over theirs.
fn members_before(noted: Option<&str>, now: &StoredMembership) -> Vec<NodeId> {
    let noted: Vec<NodeId> = noted
        .unwrap_or_default()
        .split_whitespace()
        .filter_map(|id| id.parse().ok())
        .collect();
    match noted.is_empty() {
        true => now.nodes().map(|(id, _)| *id).collect(),
        false => noted,
    }
}

fn dry_run(folder: &Offline, last: LogId, state: &State, before: &[NodeId]) -> String {
    format!(
        "The folder is that of master {} of the cluster {} and can be recovered. Nothing was changed.\n\
         \x20 log ends at     term {}, index {}\n\
         \x20 holds           {}\n\
         \x20 members         {before:?}\n\
         \x20 recovery epoch  {}\n\
         Of several disks recover the one with the highest term here, and of equal terms the highest index: a longer log of \
         a lower term holds less of what was acknowledged.",
        folder.identity().node_id,
        folder.identity().cluster_id,
        last.committed_leader_id().term,
        last.index(),
        contents(state),
        state.recovery_epoch(),
    )
}

/// The state and the membership at the end of the log.
fn read(folder: &Offline) -> Result<Life, ReadError> {
    let mut life = match folder.snapshot()? {
        None => Life {
            state: State::new(),
            membership: StoredMembership::default(),
        },
        Some((meta, bytes)) => Life {
            state: State::decode_snapshot(&bytes).map_err(|error| {
                ReadError::Entry(format!("its snapshot cannot be read by this program: {error}"))
            })?,
            membership: meta.last_membership,
        },
    };
    check_version(life.state.cluster_version()).map_err(ReadError::Entry)?;
    folder.entries(|entry: Entry| {
        let at = entry.log_id;
        match entry.payload {
            EntryPayload::Blank => {}
            EntryPayload::Normal(command) => {
                let command = Command::decode(&command.0).map_err(|error| {
                    ReadError::Entry(format!(
                        "log entry {at} cannot be read by this program ({error}): use the version that wrote it"
                    ))
                })?;
                life.state.apply(at.index(), &command);
                check_version(life.state.cluster_version()).map_err(ReadError::Entry)?;
            }
            EntryPayload::Membership(membership) => {
                life.membership = StoredMembership::new(Some(at), membership);
            }
        }
        Ok::<(), ReadError>(())
    })?;
    Ok(life)
}

fn alone(id: NodeId, node: Node, term: u64, index: u64, state: Vec<u8>) -> NewLife {
    let at = log_id(term, index);
    let membership = Membership::new(vec![BTreeSet::from([id])], BTreeMap::from([(id, node)]))
        .expect("one voter, and its node");
    NewLife {
        vote: Vote::new(term, id),
        meta: SnapshotMeta {
            last_log_id: Some(at),
            last_membership: StoredMembership::new(Some(at), membership),
        },
        state,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeat_names_the_masters_of_the_first_run() {
        let node = Node {
            rpc_address: "h:1".into(),
            http_address: "h:2".into(),
            disk_id: "d".into(),
        };
        let alone = alone(2, node, 5, 9, Vec::new()).meta.last_membership;
        assert_eq!(members_before(None, &alone), [2]);
        assert_eq!(members_before(Some(""), &alone), [2], "begun by an older program");
        let noted = note(&[1, 2, 3]);
        assert_eq!(members_before(Some(&noted), &alone), [1, 2, 3]);
    }
}
