//! How verified blocks become durable, how digests are taken back, and how a handle ends.

use super::{
    artifact::{Artifact, Phase},
    crash::{broken, step},
    error::{StoreError, io_error},
    journal::{Entry, Journal},
};
use std::{collections::BTreeSet, io};

impl Artifact {
    /// The blocks' digests were proved wrong: they are not held any more, durably so.
    pub fn forget(&self, blocks: &[u32]) -> io::Result<()> {
        // The journal first: no flush can be under way that would record them after their tombstones.
        let mut journal = self.journal.lock();
        let journal_ref = journal.as_mut().ok_or_else(|| {
            io::Error::other(format!(
                "{} is published or closed: its blocks cannot be forgotten",
                self.model
            ))
        })?;
        let mut gone = BTreeSet::new();
        let mut freed = 0;
        {
            let mut state = self.state.lock();
            for &block in blocks {
                if state.has(block) {
                    self.unmark(&mut state, block);
                    gone.insert(block);
                }
            }
            let (dropped, kept) = std::mem::take(&mut state.pending)
                .into_iter()
                .partition(|b| gone.contains(b));
            state.pending = kept;
            let dropped: Vec<u32> = dropped;
            freed += self.bytes_of(&dropped);
            state.pending_bytes -= freed;
        }
        self.plumbing.release(freed);
        let entries: Vec<_> = gone.into_iter().map(Entry::Forgotten).collect();
        if entries.is_empty() {
            return Ok(());
        }
        let result = journal_ref.append(&entries, || ());
        if let Err(e) = &result {
            self.fail(&mut journal, e);
        }
        drop(journal);
        self.bump();
        self.plumbing.bump();
        result.map_err(|e| match e {
            StoreError::Io { source, .. } => source,
            other => io::Error::other(other),
        })
    }

    fn bytes_of(&self, blocks: &[u32]) -> u64 {
        blocks
            .iter()
            .filter_map(|&b| self.blocks.locate(b))
            .map(|r| u64::from(r.len))
            .sum()
    }

    /// Makes every verified block durable and journaled.
    pub fn flush(&self) -> Result<(), StoreError> {
        let mut journal = self.journal.lock();
        self.flush_locked(&mut journal)
    }

    /// The same, unless the journal is in use.
    pub(crate) fn try_flush(&self) -> Option<Result<(), StoreError>> {
        let mut journal = self.journal.try_lock()?;
        Some(self.flush_locked(&mut journal))
    }

    pub(crate) fn flush_locked(&self, journal: &mut Option<Journal>) -> Result<(), StoreError> {
        let Some(open) = journal.as_mut() else {
            return match self.closed() {
                Some(why) => Err(StoreError::Closed {
                    model: Box::new(self.model.clone()),
                    why,
                }),
                None => Ok(()), // published: nothing is pending
            };
        };
        let (batch, bytes, entries) = {
            let mut state = self.state.lock();
            let batch = std::mem::take(&mut state.pending);
            let bytes = std::mem::take(&mut state.pending_bytes);
            let entries: Vec<_> = batch
                .iter()
                .map(|&b| Entry::Verified(b, state.recorded_of(b)))
                .collect();
            (batch, bytes, entries)
        };
        if batch.is_empty() {
            return Ok(());
        }
        let result = self.sync_data(&batch).and_then(|()| {
            if broken("flush::skip_append") {
                return Ok(());
            }
            step("flush::before_append");
            open.append(&entries, || step("flush::after_append"))
        });
        step("flush::after_sync_journal");
        self.plumbing.release(bytes);
        result.inspect_err(|e| self.fail(journal, e))
    }

    fn sync_data(&self, batch: &[u32]) -> Result<(), StoreError> {
        let files: BTreeSet<usize> = batch
            .iter()
            .map(|&b| self.blocks.locate(b).expect("it was written").file)
            .collect();
        for index in files {
            step("flush::before_sync_data");
            if broken("flush::skip_sync") {
                continue;
            }
            if broken("flush::fail_sync") {
                return Err(io_error("sync", self.file_path(index))(
                    io::Error::from_raw_os_error(5),
                ));
            }
            self.file(index)
                .and_then(|f| f.sync_data())
                .map_err(|e| io_error("sync", self.file_path(index))(e))?;
            step("flush::after_sync_data");
        }
        Ok(())
    }

    /// A write-back or journal error: what is on disk is now unknown except for what the journal had, and
    /// the page cache may claim otherwise. So this handle ends, and the next `begin` starts from the journal.
    pub(crate) fn fail(&self, journal: &mut Option<Journal>, error: &StoreError) {
        tracing::error!(model = %self.model, %error, "staging failed; it can be begun again from its journal");
        *journal = None;
        self.close_state(error.to_string());
    }

    /// Ends this handle: waits for writers, and refuses all that comes later. Gives back whether it was in
    /// staging (a published one is left as it is).
    pub(crate) fn close(&self, why: &str) -> bool {
        let mut journal = self.journal.lock();
        if matches!(self.state.lock().phase, Phase::Staged) {
            return false;
        }
        *journal = None;
        self.close_state(why.to_owned());
        let mut state = self.state.lock();
        while !state.busy.is_empty() {
            self.idle.wait(&mut state);
        }
        drop(state);
        self.plumbing.files.close(self.id);
        true
    }

    /// Ends this handle without waiting for its writers, which may hang: what they write from now on does not count.
    /// Whoever opens the staging again waits for them ([`close`](Self::close)). A published copy is left as it is.
    pub(crate) fn abandon(&self, why: &str) {
        if !matches!(self.state.lock().phase, Phase::Staged) {
            self.close_state(why.to_owned());
        }
    }

    /// A published copy turned out to be damaged or gone.
    pub(crate) fn close_staged(&self, why: &str) {
        self.close_state(why.to_owned());
        self.plumbing.files.close(self.id);
    }

    fn close_state(&self, why: String) {
        let mut state = self.state.lock();
        if !matches!(state.phase, Phase::Closed(_)) {
            state.phase = Phase::Closed(why);
        }
        state.pending.clear();
        let bytes = std::mem::take(&mut state.pending_bytes);
        state.recorded.clear();
        state.rescanned = true;
        drop(state);
        self.plumbing.release(bytes);
        self.idle.notify_all();
        self.bump();
        self.plumbing.bump();
    }
}
