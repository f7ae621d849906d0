//! Reads the committed log from the disks of masters that were stopped.
//!
//! Masters that were started with [`KEEP_THE_LOG`] have all of it. Of others there is what their last snapshots and what
//! lies behind: [`merge`] takes the earliest snapshot from which the log goes on without a gap.

use anyhow::{Context, Result};
use mooncake_raft_store::{LogId, Offline, OpenOptions, Store};
use mooncake_state::{Command, State};
use openraft::{EntryPayload, storage::RaftLogReader, storage::RaftLogStorage};
use std::path::Path;

/// Arguments of a master that never removes an entry from its log.
pub const KEEP_THE_LOG: [&str; 2] = ["--snapshot-every", "1000000000"];
/// Arguments of a master that removes from its log what a follower lacks that was away for seconds, and whose last
/// snapshots leave some seconds of the log to be judged. Two snapshots' entries behind, a follower is sent a snapshot.
pub const TAKE_SNAPSHOTS: [&str; 4] = ["--snapshot-every", "150", "--snapshot-keep", "20"];
/// Of one of them, besides: its snapshot is older, and so there is more of the log to be judged.
pub const KEEP_LONGER: [&str; 2] = ["--snapshot-every", "600"];

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

/// A snapshot: everything up to its index, as one state.
#[derive(Clone, Debug)]
pub struct Base {
    /// Of the last entry in it.
    pub index: u64,
    /// The term of that entry.
    pub term: u64,
    /// All of it.
    pub state: State,
}

/// What is on one master's disk.
#[derive(Clone, Debug, Default)]
pub struct DiskLog {
    /// Its snapshot, if it took or got one.
    pub base: Option<Base>,
    /// Its entries, those that are in the snapshot too included.
    pub entries: Vec<LogEntry>,
}

impl DiskLog {
    /// Where it ends: (term, index).
    fn end(&self) -> Option<(u64, u64)> {
        let entry = self.entries.last().map(|e| (e.term, e.index));
        entry.max(self.base.as_ref().map(|b| (b.term, b.index)))
    }

    fn at(&self, index: u64) -> Option<&LogEntry> {
        let first = self.entries.first()?.index;
        self.entries.get(usize::try_from(index.checked_sub(first)?).ok()?)
    }
}

/// Everything in the data folder of master `node_id`, which must not run.
pub async fn read(folder: &Path, cluster_id: &str, node_id: u64) -> Result<DiskLog> {
    let options = OpenOptions {
        cluster_id: cluster_id.to_owned(),
        node_id,
    };
    let path = folder.to_owned();
    let (base, store) = tokio::task::spawn_blocking(move || -> Result<_> {
        // One after the other: each of them locks the folder.
        let base = base(&path)?;
        Ok((base, Store::open(path, options)?))
    })
    .await??;
    let mut log = store.take_log_store().context("the log is taken")?;
    let state = log.get_log_state().await?;
    let mut at = state.last_purged_log_id.map_or(0, |id: LogId| id.index() + 1);
    let end = state.last_log_id.map_or(0, |id: LogId| id.index() + 1);
    let mut reader = log.get_log_reader().await;
    let mut entries = Vec::new();
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
    Ok(DiskLog { base, entries })
}

fn base(folder: &Path) -> Result<Option<Base>> {
    let Some((meta, bytes)) = Offline::open(folder)?.snapshot()? else {
        return Ok(None);
    };
    let last = meta.last_log_id.context("a snapshot of nothing")?;
    Ok(Some(Base {
        index: last.index(),
        term: last.committed_leader_id().term,
        state: State::decode_snapshot(&bytes)
            .with_context(|| format!("the snapshot in {}", folder.display()))?,
    }))
}

/// What several masters' disks give together.
#[derive(Clone, Debug, Default)]
pub struct Merged {
    /// What comes before the entries; none: nothing, they begin with the first.
    pub base: Option<Base>,
    /// Without a gap.
    pub entries: Vec<LogEntry>,
    /// Where masters differ up to the committed end.
    pub conflicts: Vec<String>,
}

/// The log that holds everything committed: of those read, the one with the newest end, as in an election, with what
/// others still have before it; and where others differ from it up to `committed`.
pub fn merge(mut logs: Vec<(u64, DiskLog)>, committed: u64) -> Merged {
    logs.sort_by_key(|(_, log)| log.end());
    let Some((best, newest)) = logs.pop() else {
        return Merged::default();
    };
    let mut conflicts = Vec::new();
    for (other, log) in &logs {
        let pairs = log.entries.iter().filter_map(|a| Some((a, newest.at(a.index)?)));
        let differs = pairs
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
    let last = newest.end().map_or(0, |(_, index)| index);
    if last < committed {
        conflicts.push(format!(
            "index {committed} was applied by a master, and the longest log (of master {best}) ends at {last}"
        ));
    }
    let mut entries = newest.entries;
    if entries.is_empty() {
        return Merged {
            base: newest.base,
            entries,
            conflicts,
        };
    }
    let mut bases: Vec<Base> = newest.base.into_iter().collect();
    logs.sort_by_key(|(_, log)| std::cmp::Reverse(log.entries.first().map(|e| e.index)));
    for (_, log) in logs {
        // One log up to an entry is one with every other that has this entry in this term.
        if let Some(first) = entries.first()
            && let Some(same) = log.at(first.index)
            && same.term == first.term
        {
            let first = first.index;
            let before = log.entries.into_iter().take_while(|e| e.index < first);
            entries = before.chain(entries).collect();
        }
        bases.extend(log.base);
    }
    let first = entries.first().map_or(0, |e| e.index);
    // Openraft numbers from 0; unit tests, from 1.
    let base = match first <= 1 {
        true => None,
        false => bases
            .into_iter()
            .filter(|b| b.index + 1 >= first)
            .min_by_key(|b| b.index),
    };
    Merged {
        base,
        entries,
        conflicts,
    }
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

    /// Entries from index `first` on.
    fn log_from(first: u64, terms: &[u64]) -> DiskLog {
        DiskLog {
            base: None,
            entries: (first..).zip(terms).map(|(i, t)| entry(i, *t)).collect(),
        }
    }

    fn log(terms: &[u64]) -> DiskLog {
        log_from(1, terms)
    }

    /// The same behind a snapshot of this index.
    fn behind(index: u64, term: u64, mut log: DiskLog) -> DiskLog {
        let state = State::new();
        log.base = Some(Base { index, term, state });
        log
    }

    fn indexes(merged: &Merged) -> Vec<u64> {
        merged.entries.iter().map(|e| e.index).collect()
    }

    #[test]
    fn the_newest_end_wins_and_differences_below_the_commit_are_conflicts() {
        // The second one is longer, but its end was never committed.
        let logs = || vec![(1, log(&[1, 1, 3])), (2, log(&[1, 1, 2, 2])), (3, log(&[1]))];
        let merged = merge(logs(), 2);
        assert_eq!(merged.entries, log(&[1, 1, 3]).entries);
        assert!(merged.conflicts.is_empty() && merged.base.is_none());
        let conflicts = merge(logs(), 3).conflicts;
        assert_eq!(conflicts.len(), 1, "{conflicts:?}");
        let conflicts = merge(logs(), 4).conflicts;
        assert!(conflicts.iter().any(|c| c.contains("ends at 3")), "{conflicts:?}");
    }

    #[test]
    fn one_index_and_term_with_two_contents_is_a_conflict() {
        let mut other = log(&[1, 1]);
        other.entries[1].command = Some(Command::Tick { now_ms: 1 });
        let conflicts = merge(vec![(1, log(&[1, 1])), (2, other)], 2).conflicts;
        assert!(conflicts[0].contains("other content"), "{conflicts:?}");
    }

    #[test]
    fn purged_logs_are_joined_and_begin_at_the_earliest_snapshot_without_a_gap() {
        let newest = behind(7, 1, log_from(7, &[1, 2, 2]));
        // It ends sooner and begins sooner.
        let other = behind(5, 1, log_from(4, &[1, 1, 1, 1]));
        // A snapshot from before a gap is of no use.
        let old = behind(2, 1, log_from(3, &[]));
        let merged = merge(vec![(1, newest.clone()), (2, other), (3, old)], 9);
        assert_eq!(indexes(&merged), [4, 5, 6, 7, 8, 9]);
        assert_eq!(merged.base.map(|b| b.index), Some(5));
        assert_eq!(merged.conflicts, Vec::<String>::new());

        // What differs where both have entries is a conflict all the same.
        let stale = behind(5, 1, log_from(6, &[1, 1, 1]));
        let merged = merge(vec![(1, newest), (2, stale)], 9);
        assert_eq!(indexes(&merged), [6, 7, 8, 9]);
        assert_eq!(merged.conflicts.len(), 1, "{:?}", merged.conflicts);
    }

    #[test]
    fn a_master_that_has_nothing_but_a_snapshot_is_the_newest_by_it() {
        let snapshot = behind(9, 3, DiskLog::default());
        let merged = merge(vec![(1, snapshot), (2, log(&[1, 1]))], 9);
        assert_eq!(merged.base.map(|b| b.index), Some(9));
        assert_eq!(merged.conflicts, Vec::<String>::new());
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
        let read = read(dir.path(), "c", 1).await.unwrap();
        assert_eq!(read.entries, [entry(1, 7), ticked]);
        assert!(read.base.is_none());
    }
}
