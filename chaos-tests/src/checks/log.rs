//! Reads the committed log from the disks of masters that were stopped.
//!
//! The masters must have kept all of it: start them with [`KEEP_THE_LOG`].

use anyhow::{Context, Result, ensure};
use mooncake_raft_store::{LogId, OpenOptions, Store};
use mooncake_state::Command;
use openraft::{EntryPayload, storage::RaftLogReader, storage::RaftLogStorage};
use std::path::Path;

/// Arguments of a master that never removes an entry from its log.
pub const KEEP_THE_LOG: [&str; 2] = ["--snapshot-every", "1000000000"];

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Its place.
    pub index: u64,
    /// The term of the leader that wrote it.
    pub term: u64,
    /// None: it is one of Raft's own.
    pub command: Option<Command>,
}

/// Every entry in the data folder of master `node_id`, which must not run.
pub async fn read(folder: &Path, cluster_id: &str, node_id: u64) -> Result<Vec<LogEntry>> {
    let options = OpenOptions {
        cluster_id: cluster_id.to_owned(),
        node_id,
    };
    let path = folder.to_owned();
    let store = tokio::task::spawn_blocking(move || Store::open(path, options)).await??;
    let mut log = store.take_log_store().context("the log is taken")?;
    let state = log.get_log_state().await?;
    ensure!(
        state.last_purged_log_id.is_none(),
        "the log in {} begins behind {:?}: start masters with {KEEP_THE_LOG:?}",
        folder.display(),
        state.last_purged_log_id
    );
    let end = state.last_log_id.map_or(0, |id: LogId| id.index() + 1);
    let mut reader = log.get_log_reader().await;
    let mut entries = Vec::new();
    let mut at = 0;
    while at < end {
        let piece = reader.limited_get_log_entries(at, end).await?;
        let Some(last) = piece.last() else { break };
        at = last.log_id.index() + 1;
        for entry in piece {
            let command = match &entry.payload {
                EntryPayload::Normal(command) => Some(
                    Command::decode(&command.0)
                        .with_context(|| format!("entry {} of {}", entry.log_id, folder.display()))?,
                ),
                EntryPayload::Blank | EntryPayload::Membership(_) => None,
            };
            entries.push(LogEntry {
                index: entry.log_id.index(),
                term: entry.log_id.committed_leader_id().term,
                command,
            });
        }
    }
    drop((reader, log));
    store.close().await?;
    Ok(entries)
}

/// The log that holds everything committed: of those read, the one with the newest end, as in an election; and where
/// others differ from it up to `committed`.
pub fn merge(mut logs: Vec<(u64, Vec<LogEntry>)>, committed: u64) -> (Vec<LogEntry>, Vec<String>) {
    logs.sort_by_key(|(_, log)| log.last().map(|e| (e.term, e.index)));
    let Some((best, newest)) = logs.pop() else {
        return Default::default();
    };
    let mut conflicts = Vec::new();
    for (other, log) in &logs {
        let differs = log
            .iter()
            .zip(&newest)
            .take_while(|(a, _)| a.index <= committed)
            .find(|(a, b)| a != b);
        if let Some((a, b)) = differs {
            conflicts.push(format!(
                "entry {} has term {} on master {other} and term {} on master {best}{}",
                a.index,
                a.term,
                b.term,
                if a.term == b.term {
                    ", with other content"
                } else {
                    ""
                }
            ));
        }
    }
    let last = newest.last().map_or(0, |e| e.index);
    if last < committed {
        conflicts.push(format!(
            "index {committed} was applied by a master, and the longest log (of master {best}) ends at {last}"
        ));
    }
    (newest, conflicts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_raft_store::log_id;

    fn entry(index: u64, term: u64) -> LogEntry {
        LogEntry {
            index,
            term,
            command: None,
        }
    }

    fn log(terms: &[u64]) -> Vec<LogEntry> {
        (1..).zip(terms).map(|(i, t)| entry(i, *t)).collect()
    }

    #[test]
    fn the_newest_end_wins_and_differences_below_the_commit_are_conflicts() {
        // The second one is longer, but its end was never committed.
        let logs = || vec![(1, log(&[1, 1, 3])), (2, log(&[1, 1, 2, 2])), (3, log(&[1]))];
        let (best, conflicts) = merge(logs(), 2);
        assert_eq!((best, conflicts), (log(&[1, 1, 3]), vec![]));
        let (_, conflicts) = merge(logs(), 3);
        assert_eq!(conflicts.len(), 1, "{conflicts:?}");
        let (_, conflicts) = merge(logs(), 4);
        assert!(conflicts.iter().any(|c| c.contains("ends at 3")), "{conflicts:?}");
    }

    #[test]
    fn one_index_and_term_with_two_contents_is_a_conflict() {
        let mut other = log(&[1, 1]);
        other[1].command = Some(Command::Tick { now_ms: 1 });
        let (_, conflicts) = merge(vec![(1, log(&[1, 1])), (2, other)], 2);
        assert!(conflicts[0].contains("other content"), "{conflicts:?}");
    }

    #[tokio::test]
    async fn a_stopped_masters_log_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let options = OpenOptions {
            cluster_id: "c".into(),
            node_id: 1,
        };
        let store = Store::open(dir.path(), options).unwrap();
        let mut writer = store.take_log_store().unwrap();
        let tick = Command::Tick { now_ms: 5 };
        let payloads = [
            EntryPayload::Blank,
            EntryPayload::Normal(mooncake_raft_store::Command(tick.encode().unwrap())),
        ];
        let entries = (1..)
            .zip(payloads)
            .map(|(index, payload)| mooncake_raft_store::Entry {
                log_id: log_id(7, index),
                payload,
            });
        let entries: Vec<_> = entries.collect();
        writer
            .append(entries, openraft::storage::IOFlushed::noop())
            .await
            .unwrap();
        drop(writer);
        store.close().await.unwrap();
        let mut ticked = entry(2, 7);
        ticked.command = Some(tick);
        assert_eq!(read(dir.path(), "c", 1).await.unwrap(), [entry(1, 7), ticked]);
    }
}
