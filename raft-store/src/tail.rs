//! The end of the log in memory: what is not durable yet, and what was written last.
//!
//! openraft requires entries to be readable when `append` returns, before they are durable; and it reads every
//! entry again soon, to replicate and to apply it. Both are served from here, without the disk.

use std::collections::VecDeque;

use openraft::EntryPayload;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::meta::Meta;
use crate::types::{Entry, LogId, Vote};

/// Durable entries are kept in memory up to this sum. A follower that is further behind is read for from the disk.
const MAX_DURABLE_BYTES: usize = 8 * 1024 * 1024;
/// What an entry costs beside its command.
const ENTRY_OVERHEAD_BYTES: usize = 96;

pub(crate) fn entry_bytes(entry: &Entry) -> usize {
    ENTRY_OVERHEAD_BYTES
        + match &entry.payload {
            EntryPayload::Normal(command) => command.0.len(),
            EntryPayload::Membership(membership) => 256 * membership.nodes().count(),
            EntryPayload::Blank => 0,
        }
}

/// The log's bounds, its last entries, and the small values beside it.
pub(crate) struct Tail {
    /// Held for a few copies at a time, never over I/O or an `.await`: the writer thread, readers and the Raft core
    /// all come by.
    state: RwLock<State>,
    /// Held for writing while entries are removed, on the disk and here; for reading while the disk is read, so that
    /// a reader never sees one without the other. Only taken on blocking threads and before `state`.
    cuts: RwLock<()>,
}

struct State {
    /// First index of a log that was never purged.
    first: u64,
    purged: Option<LogId>,
    last: Option<LogId>,
    vote: Option<Vote>,
    committed: Option<LogId>,
    /// Index of the first entry in `entries`; they are contiguous up to `last`.
    first_cached: u64,
    entries: VecDeque<Entry>,
    cached_bytes: usize,
    /// All entries below this index are durable.
    durable_end: u64,
}

/// What a read needs to know: what is in memory, and what has to come from the disk.
pub(crate) struct Window {
    /// Where to begin: the range asked for, cut to what the log holds.
    pub(crate) start: u64,
    /// `start..disk_end` is on the disk; empty when all is in memory.
    pub(crate) disk_end: u64,
    pub(crate) cached: Vec<Entry>,
}

fn next_index(id: Option<&LogId>) -> u64 {
    id.map_or(0, |id| id.index().saturating_add(1))
}

impl Tail {
    pub(crate) fn new(meta: &Meta, last: Option<LogId>) -> Self {
        let next = next_index(last.as_ref());
        Self {
            cuts: RwLock::new(()),
            state: RwLock::new(State {
                first: meta.first.unwrap_or(0),
                purged: meta.purged,
                last,
                vote: meta.vote,
                committed: meta.committed,
                first_cached: next,
                entries: VecDeque::new(),
                cached_bytes: 0,
                durable_end: next,
            }),
        }
    }

    /// Keeps entries from being removed, while they are read from the disk.
    pub(crate) fn hold(&self) -> RwLockReadGuard<'_, ()> {
        self.cuts.read()
    }

    /// Keeps readers off the disk, while entries are removed.
    pub(crate) fn cut(&self) -> RwLockWriteGuard<'_, ()> {
        self.cuts.write()
    }

    /// (purged, last).
    pub(crate) fn bounds(&self) -> (Option<LogId>, Option<LogId>) {
        let state = self.state.read();
        (state.purged, state.last)
    }

    pub(crate) fn vote(&self) -> Option<Vote> {
        self.state.read().vote
    }

    pub(crate) fn set_vote(&self, vote: Vote) {
        self.state.write().vote = Some(vote);
    }

    pub(crate) fn committed(&self) -> Option<LogId> {
        self.state.read().committed
    }

    pub(crate) fn set_committed(&self, committed: Option<LogId>) {
        self.state.write().committed = committed;
    }

    /// Takes entries in, if they go on where the log ends. Gives the index to be written as the log's first one,
    /// when it is (a log that was never purged and is empty may begin anywhere; openraft begins at 0).
    pub(crate) fn append(&self, entries: Vec<Entry>) -> Result<Option<u64>, String> {
        let mut state = self.state.write();
        let mut last = state.last;
        for entry in &entries {
            let id = entry.log_id;
            if let Some(last) = &last {
                if Some(id.index()) != last.index().checked_add(1) {
                    return Err(format!(
                        "entry {id} does not follow the last one, {last}: the log would have a hole"
                    ));
                }
                if id.committed_leader_id() < last.committed_leader_id() {
                    return Err(format!("entry {id} has a lower term than the last one, {last}"));
                }
            }
            last = Some(id);
        }
        let Some(first) = entries.first().map(|entry| entry.log_id.index()) else {
            return Ok(None);
        };
        let begins = state.last.is_none();
        if begins {
            state.first = first;
            state.first_cached = first;
            state.durable_end = first;
        }
        state.last = last;
        for entry in entries {
            state.cached_bytes += entry_bytes(&entry);
            state.entries.push_back(entry);
        }
        Ok(begins.then_some(first))
    }

    /// All entries up to `last` are durable.
    pub(crate) fn flushed(&self, last: u64) {
        let mut state = self.state.write();
        state.durable_end = state.durable_end.max(last.saturating_add(1));
        while state.cached_bytes > MAX_DURABLE_BYTES && state.first_cached < state.durable_end {
            state.drop_first();
        }
    }

    /// All entries from `from` on are gone, on the disk too. `last` is now the last one.
    pub(crate) fn truncated(&self, from: u64, last: Option<LogId>) {
        let mut state = self.state.write();
        while state
            .entries
            .back()
            .is_some_and(|entry| entry.log_id.index() >= from)
        {
            if let Some(entry) = state.entries.pop_back() {
                state.cached_bytes -= entry_bytes(&entry);
            }
        }
        state.last = last;
        state.durable_end = state.durable_end.min(from);
        state.first_cached = state.first_cached.min(from);
    }

    /// All entries up to `upto` are gone, on the disk too.
    pub(crate) fn purged(&self, upto: LogId) {
        let mut state = self.state.write();
        while state
            .entries
            .front()
            .is_some_and(|entry| entry.log_id.index() <= upto.index())
        {
            state.drop_first();
        }
        state.purged = Some(upto);
        if next_index(state.last.as_ref()) <= upto.index() {
            state.last = Some(upto);
        }
        // A log that ends at its purge point has its end named by it.
        if state.last.is_some_and(|last| last.index() == upto.index()) {
            state.last = Some(upto);
        }
        if state.entries.is_empty() {
            let next = next_index(state.last.as_ref());
            state.first_cached = next;
            state.durable_end = next;
        }
    }

    /// Looks at `start..end`: copies what is in memory (up to `limit_bytes`), says what is not.
    pub(crate) fn window(&self, start: u64, end: u64, limit_bytes: usize) -> Window {
        let state = self.state.read();
        let start = match &state.purged {
            Some(purged) => start.max(purged.index().saturating_add(1)),
            None => start.max(state.first),
        };
        let end = end.min(next_index(state.last.as_ref()));
        let disk_end = state.first_cached.clamp(start, end.max(start));
        let mut cached = Vec::new();
        let mut bytes = 0;
        let skip = usize::try_from(disk_end.saturating_sub(state.first_cached)).unwrap_or(usize::MAX);
        for entry in state.entries.iter().skip(skip) {
            bytes += entry_bytes(entry);
            if entry.log_id.index() >= end || (bytes > limit_bytes && !cached.is_empty()) {
                break;
            }
            cached.push(entry.clone());
        }
        Window {
            start,
            disk_end,
            cached,
        }
    }
}

impl State {
    fn drop_first(&mut self) {
        if let Some(entry) = self.entries.pop_front() {
            self.cached_bytes -= entry_bytes(&entry);
            self.first_cached += 1;
        }
    }
}
