//! How a master learns that it was removed from its cluster, and remembers it.
//!
//! The leader stops talking to a master that it removed, so the removal may never arrive by the log. A master that
//! knows itself to be a member and hears no leader therefore asks the other members it knows. Only a membership that
//! its asker knows to be *committed*, newer than the one that names this master, and without it (or with another disk
//! under its id), is a removal: whoever is merely behind, or cut off, tells nothing.
//!
//! One that was stopped after it read its removal in its own log, and before it had left its note, knows of no membership
//! that names it. It takes a leader's word, of its own term or a later one, with a committed membership: a master that is
//! being added, and whose log does not reach to that yet, is named by every leader from which it can have heard.
//!
//! A removed master leaves a note in its data folder and ends. It could do no harm (its pre-votes are refused), but it
//! would ask for votes for ever and answer stale reads; and the note keeps a supervisor from starting it again and again
//! without anybody seeing why.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mooncake_proto::pb::raft as pb;
use mooncake_raft_store::{Identity, StoredMembership};
use openraft::async_runtime::watch::WatchReceiver as _;
use tokio::sync::watch;

use super::handle::Handle;

/// The leader has to be silent for this long before the others are asked.
const SILENCE: Duration = Duration::from_secs(2);
/// Between two rounds of questions.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long one question may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
const NOTE_FILE: &str = "removed";

/// Refuses a data folder whose master was removed.
pub(crate) fn check_note(data_dir: &Path) -> Result<(), String> {
    let path = data_dir.join(NOTE_FILE);
    match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Ok(text) => Err(format!(
            "data folder {}: {}. Move it away; to take this machine into the cluster again, start it with a new --node-id \
             and an empty --data-dir and add it (`mooncakectl cluster add`)",
            data_dir.display(),
            text.trim()
        )),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

fn write_note(data_dir: &Path, text: &str) -> std::io::Result<()> {
    let partial = data_dir.join("removed.partial");
    std::fs::write(&partial, format!("{text}\n"))?;
    std::fs::File::open(&partial)?.sync_all()?;
    std::fs::rename(&partial, data_dir.join(NOTE_FILE))?;
    std::fs::File::open(data_dir)?.sync_all()
}

/// Follows the membership until this master is removed; then leaves the note and says so once.
///
/// `pristine`: the folder was empty at the start, so that it cannot have been a member's.
pub(crate) fn watch(handle: Handle, data_dir: PathBuf, pristine: bool) -> watch::Receiver<Option<Arc<str>>> {
    let (removed_tx, removed) = watch::channel(None);
    tokio::spawn(async move {
        let Some(reason) = wait(&handle, pristine).await else {
            return;
        };
        if let Err(error) = write_note(&data_dir, &reason) {
            tracing::error!(%error, "the note that this master was removed could not be written");
        }
        removed_tx.send_replace(Some(reason.into()));
    });
    removed
}

/// What this master knows of its own membership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    /// The newest membership here that names it is at this index.
    Member { at: u64 },
    /// It comes back with a log whose membership, at this index, does not name it.
    Unnamed { at: u64, term: u64 },
}

/// `None`: consensus is gone.
async fn wait(handle: &Handle, pristine: bool) -> Option<String> {
    let mut metrics = handle.inner.raft.metrics();
    let me = handle.identity().clone();
    let mut member_at = None;
    loop {
        let (membership, committed, term) = {
            let metrics = metrics.borrow_watched();
            let committed = metrics.last_applied.as_ref().map_or(0, |id| id.index());
            (metrics.membership_config.clone(), committed, metrics.current_term)
        };
        let at = membership.log_id().as_ref().map_or(0, |id| id.index());
        match (names(&membership, &me), member_at) {
            (true, _) => member_at = Some(at),
            // By its own log. Before it was ever named it only reads what was before its time.
            (false, Some(was)) if was < at && at <= committed => {
                return Some(removed_text(&me, "its own log"));
            }
            _ => {}
        }
        let silent = handle.leader_silence().is_none_or(|silence| silence > SILENCE);
        let known = match member_at {
            Some(at) => Some(Known::Member { at }),
            None if !pristine => Some(Known::Unnamed { at, term }),
            None => None,
        };
        if let (true, Some(known)) = (silent, known) {
            let others = membership.nodes().filter(|(id, _)| **id != me.node_id);
            let answers = futures_util::future::join_all(others.map(async |(id, node)| {
                let answer = handle
                    .inner
                    .peers
                    .ask(&node.rpc_address, PROBE_TIMEOUT)
                    .await
                    .ok()?;
                (answer.node_id == *id && answer.disk_id == node.disk_id).then_some(answer)
            }))
            .await;
            let by = answers
                .iter()
                .flatten()
                .find(|answer| says_removed(answer, &me, known));
            if let Some(by) = by {
                return Some(removed_text(&me, &format!("master {}", by.node_id)));
            }
        }
        if let Ok(Err(_)) = tokio::time::timeout(INTERVAL, metrics.changed()).await {
            return None;
        }
        if silent {
            // Metrics change with every try to be elected; the others are not asked more often for that.
            tokio::time::sleep(INTERVAL).await;
        }
    }
}

fn removed_text(me: &Identity, by: &str) -> String {
    format!(
        "master {} (disk {}) was removed from the cluster, as {by} says",
        me.node_id, me.disk_id
    )
}

fn names(membership: &StoredMembership, me: &Identity) -> bool {
    membership
        .get_node(&me.node_id)
        .is_some_and(|node| node.disk_id == me.disk_id)
}

fn says_removed(answer: &pb::ProbeResponse, me: &Identity, known: Known) -> bool {
    let Some(membership) = &answer.membership else {
        return false;
    };
    let named = membership
        .nodes
        .iter()
        .any(|node| node.id == me.node_id && node.disk_id == me.disk_id);
    let is_final = answer.initialised && answer.membership_index <= answer.committed_index;
    let is_newer = match known {
        Known::Member { at } => answer.membership_index > at,
        Known::Unnamed { at, term } => {
            answer.membership_index >= at && answer.leader_id == answer.node_id && answer.term >= term
        }
    };
    is_final && is_newer && !named
}

#[cfg(test)]
mod tests {
    use super::*;

    fn me() -> Identity {
        Identity {
            cluster_id: "c".into(),
            node_id: 3,
            disk_id: "d3".into(),
        }
    }

    fn answer(disks: &[(u64, &str)], at: u64, committed: u64) -> pb::ProbeResponse {
        let nodes = disks.iter().map(|(id, disk)| pb::Node {
            id: *id,
            disk_id: (*disk).into(),
            ..Default::default()
        });
        pb::ProbeResponse {
            initialised: true,
            membership: Some(pb::Membership {
                configs: vec![],
                nodes: nodes.collect(),
            }),
            membership_index: at,
            committed_index: committed,
            ..Default::default()
        }
    }

    #[test]
    fn only_a_newer_committed_membership_removes() {
        let (with, without) = ([(1, "d1"), (3, "d3")], [(1, "d1")]);
        let known = Known::Member { at: 5 };
        assert!(says_removed(&answer(&without, 9, 9), &me(), known));
        assert!(says_removed(&answer(&[(3, "other disk")], 9, 9), &me(), known));
        for (what, answer) in [
            ("it is named", answer(&with, 9, 9)),
            ("not committed: it may be taken back", answer(&without, 9, 8)),
            (
                "from before its time: who answers is behind",
                answer(&without, 4, 9),
            ),
            ("the same one", answer(&without, 5, 9)),
            ("an empty disk knows nothing", pb::ProbeResponse::default()),
        ] {
            assert!(!says_removed(&answer, &me(), known), "{what}");
        }
    }

    #[test]
    fn who_lost_its_note_takes_a_leaders_word_of_its_own_term() {
        let leads = |answer: pb::ProbeResponse, term| pb::ProbeResponse {
            node_id: 1,
            leader_id: 1,
            term,
            ..answer
        };
        let (with, without) = ([(1, "d1"), (3, "d3")], [(1, "d1")]);
        let known = Known::Unnamed { at: 5, term: 7 };
        assert!(
            says_removed(&leads(answer(&without, 5, 9), 7), &me(), known),
            "its own removal"
        );
        assert!(says_removed(&leads(answer(&without, 8, 9), 9), &me(), known));
        for (what, answer) in [
            ("a follower may be behind its being added", answer(&without, 8, 9)),
            (
                "a leader that was deposed may be too",
                leads(answer(&without, 8, 9), 6),
            ),
            ("it is being added", leads(answer(&with, 9, 9), 7)),
            ("not committed", leads(answer(&without, 9, 8), 7)),
            ("older than its own log", leads(answer(&without, 4, 9), 7)),
        ] {
            assert!(!says_removed(&answer, &me(), known), "{what}");
        }
    }

    #[test]
    fn the_note_stays() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(check_note(folder.path()), Ok(()));
        write_note(folder.path(), &removed_text(&me(), "master 1")).unwrap();
        let why = check_note(folder.path()).unwrap_err();
        assert!(why.contains("master 3") && why.contains("cluster add"), "{why}");
    }
}
