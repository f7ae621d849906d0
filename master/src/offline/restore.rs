//! `restore`: the folder of a master of a new cluster, from a backup. `snapshot verify`: a look at one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use mooncake_proto::backup::{self, Backup};
use mooncake_proto::digest::Digest;
use mooncake_raft_store::{
    Membership, NewLife, Node, NodeId, SnapshotMeta, StoredMembership, Vote, create_folder,
    decode_snapshot_meta, log_id,
};
use mooncake_state::State;

use super::cli::RestoreFlags;
use super::{contents, next_epoch, now_s, raise_epoch};
use crate::config::{InitialCluster, MAX_CLUSTER_ID_BYTES};
use crate::consensus::check_version;

pub(super) fn run(flags: &RestoreFlags) -> Result<String, String> {
    let id = flags.node_id;
    let members = &flags.initial_cluster;
    if !members.0.contains_key(&id) {
        return Err(format!(
            "--initial-cluster does not name master {id}, which --node-id says this is"
        ));
    }
    if members.0.len() > 1 && flags.epoch.recovery_epoch.is_none() {
        return Err(format!(
            "a cluster of {} masters is restored by one command on each, and all of them must give the same \
             --recovery-epoch, above that of every earlier restore: for example --recovery-epoch {}",
            members.0.len(),
            now_s()
        ));
    }
    let (backup, mut state) = open(&flags.snapshot)?;
    let info = &backup.info;
    let cluster_id = flags
        .cluster_id
        .clone()
        .unwrap_or_else(|| info.cluster_id.clone());
    if cluster_id.is_empty() || cluster_id.len() > MAX_CLUSTER_ID_BYTES {
        return Err(format!(
            "--cluster-id must have 1 to {MAX_CLUSTER_ID_BYTES} bytes"
        ));
    }
    let epoch = next_epoch(&flags.epoch, state.recovery_epoch(), now_s())?;
    let (term, index) = (info.term + 1, info.index + 1);
    // The time of the backup, not of now: every master must make the same state of it.
    let time_ms = state.time_ms();
    raise_epoch(&mut state, index, epoch, time_ms)?;
    let new = new_life(flags, &cluster_id, epoch, term, index, &state)?;
    let disk_id = new
        .meta
        .last_membership
        .get_node(&id)
        .map(|node| node.disk_id.clone())
        .unwrap_or_default();
    create_folder(&flags.data_dir, &cluster_id, id, &disk_id, &new).map_err(|error| error.to_string())?;
    let rest: Vec<String> = members
        .0
        .keys()
        .filter(|other| **other != id)
        .map(NodeId::to_string)
        .collect();
    let next = match rest.is_empty() {
        true => "Next: start this master with this --data-dir, then add others: mooncakectl cluster add HOST:RPC_PORT --promote"
            .to_owned(),
        false => format!(
            "Next: run the same command for master {} (same file, same --initial-cluster, --recovery-epoch {epoch}), then \
             start them all. Once: a master that is lost later is replaced, never restored again",
            rest.join(", ")
        ),
    };
    Ok(format!(
        "Data folder {} is now master {id} of the cluster {cluster_id}.\n\
         \x20 from            {} of {}, log index {}: {}\n\
         \x20 members         {members}\n\
         \x20 recovery epoch  {} -> {epoch}: nodes obey it and refuse masters of the old one\n\
         \x20 old masters     must never start again: delete their data folders\n\
         {next}",
        flags.data_dir.display(),
        flags.snapshot.display(),
        info.taken_at,
        info.index,
        contents(&state),
        info.recovery_epoch,
    ))
}

/// Checks everything that a restore relies on.
pub(super) fn verify(path: &Path) -> Result<String, String> {
    let (backup, state) = open(path)?;
    let info = &backup.info;
    Ok(format!(
        "{} is a whole backup.\n\
         \x20 cluster id       {}\n\
         \x20 taken            {} by master {} ({})\n\
         \x20 log              index {}, term {}\n\
         \x20 holds            {}\n\
         \x20 cluster version  {}\n\
         \x20 recovery epoch   {}\n\
         \x20 masters          {}\n\
         \x20 state digest     {}",
        path.display(),
        info.cluster_id,
        info.taken_at,
        info.taken_by,
        info.software,
        info.index,
        info.term,
        contents(&state),
        info.cluster_version,
        info.recovery_epoch,
        info.members.join(","),
        state.digest(),
    ))
}

fn open(path: &Path) -> Result<(Backup, State), String> {
    let failed = |why: String| format!("backup {}: {why}", path.display());
    let file = File::open(path).map_err(|error| failed(error.to_string()))?;
    let backup = backup::read(BufReader::new(file)).map_err(|error| failed(error.to_string()))?;
    check_version(backup.info.cluster_version).map_err(failed)?;
    let meta = decode_snapshot_meta(&backup.meta).map_err(|error| failed(error.to_string()))?;
    let last = meta
        .last_log_id
        .map(|id| (id.committed_leader_id().term, id.index()));
    if last != Some((backup.info.term, backup.info.index)) {
        return Err(failed(format!(
            "it describes itself as index {} of term {}, its content ends at {last:?}",
            backup.info.index, backup.info.term
        )));
    }
    let state = State::decode_snapshot(&backup.state)
        .map_err(|error| failed(format!("its state cannot be read by this program: {error}")))?;
    Ok((backup, state))
}

fn new_life(
    flags: &RestoreFlags,
    cluster_id: &str,
    epoch: u64,
    term: u64,
    index: u64,
    state: &State,
) -> Result<NewLife, String> {
    let members = &flags.initial_cluster;
    let encoded = state.encode_snapshot();
    let nodes: BTreeMap<NodeId, Node> = members
        .0
        .iter()
        .map(|(id, address)| {
            let disk_id = match members.0.len() {
                1 => uuid::Uuid::new_v4().to_string(),
                _ => shared_disk_id(cluster_id, members, epoch, &encoded, *id),
            };
            let node = Node {
                rpc_address: address.rpc.clone(),
                http_address: address.http.clone(),
                disk_id,
            };
            (*id, node)
        })
        .collect();
    let voters: BTreeSet<NodeId> = nodes.keys().copied().collect();
    let membership = Membership::new(vec![voters], nodes).map_err(|error| error.to_string())?;
    let at = log_id(term, index);
    Ok(NewLife {
        vote: Vote::new(term, flags.node_id),
        meta: SnapshotMeta {
            last_log_id: Some(at),
            last_membership: StoredMembership::new(Some(at), membership),
        },
        state: encoded,
    })
}

/// The same on every machine, without the machines talking: each restore computes the ids of all disks. The epoch is
/// in it, so that another restore has other disks.
fn shared_disk_id(
    cluster_id: &str,
    members: &InitialCluster,
    epoch: u64,
    state: &[u8],
    id: NodeId,
) -> String {
    let state = Digest::sha256(state);
    let text = format!("mooncake restored disk\n{cluster_id}\n{members}\n{epoch}\n{state}\n{id}");
    let digest = Digest::sha256(text.as_bytes()).to_string();
    let tail = digest.rsplit(':').next().unwrap_or_default();
    format!("restored-{epoch}-{}", tail.get(..32).unwrap_or(tail))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_machine_computes_the_same_disks() {
        let members: InitialCluster = "1=a:1/a:2,2=b:1/b:2".parse().unwrap();
        let of = |epoch, id| shared_disk_id("c", &members, epoch, b"state", id);
        assert_eq!(of(5, 1), of(5, 1));
        let all: BTreeSet<_> = [of(5, 1), of(5, 2), of(6, 1), of(6, 2)].into();
        assert_eq!(all.len(), 4, "per master and per restore");
    }
}
