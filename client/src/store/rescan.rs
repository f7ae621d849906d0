//! After a start: what the journal recorded is believed only once it is hashed again.

use super::{
    artifact::{Artifact, Phase},
    journal::{Entry, Recorded},
};
use parking_lot::Mutex;
use std::{collections::BTreeSet, os::unix::fs::FileExt};

/// Most threads of one rescan: enough for a fast disk, and it leaves cores to the rest of the start.
const RESCAN_THREADS: usize = 4;

impl Artifact {
    /// Re-hashes what the journal recorded before this start; verified blocks appear as it goes, the others
    /// are forgotten. Returns once that is done, by whichever thread.
    pub(crate) fn rescan(&self, stopped: &(dyn Fn() -> bool + Sync)) {
        let recorded = {
            let mut state = self.state.lock();
            match state.recorded.take() {
                Some(recorded) => recorded,
                None => {
                    while !state.rescanned {
                        self.idle.wait(&mut state);
                    }
                    return;
                }
            }
        };
        let total = recorded.len();
        let work = Mutex::new(recorded.into_iter());
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(RESCAN_THREADS));
        let bad = Mutex::new(BTreeSet::new());
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    loop {
                        let next = work.lock().next();
                        let Some((block, recorded)) = next else { return };
                        if stopped() || !self.rescan_block(block, recorded) {
                            bad.lock().insert(block);
                        }
                    }
                });
            }
        });
        if !stopped() {
            self.end_rescan(total, bad.into_inner());
        }
        let mut state = self.state.lock();
        state.rescanned = true;
        drop(state);
        self.idle.notify_all();
        self.bump();
        self.plumbing.bump();
    }

    fn end_rescan(&self, total: usize, mut bad: BTreeSet<u32>) {
        let mut journal = self.journal.lock();
        {
            let state = self.state.lock();
            bad.retain(|&b| !state.has(b)); // written again meanwhile
        }
        tracing::info!(model = %self.model, recorded = total, damaged = bad.len(), "staging re-hashed");
        if bad.is_empty() {
            return;
        }
        tracing::warn!(
            model = %self.model, blocks = ?bad.iter().take(16).collect::<Vec<_>>(), count = bad.len(),
            "recorded blocks do not match their digests any more: they are fetched again"
        );
        let entries: Vec<_> = bad.into_iter().map(Entry::Forgotten).collect();
        if let Some(open) = journal.as_mut()
            && let Err(e) = open.append(&entries, || ())
        {
            self.fail(&mut journal, &e);
        }
    }

    /// Whether the block is held now.
    pub(crate) fn rescan_block(&self, block: u32, recorded: Recorded) -> bool {
        let Some(range) = self.blocks.locate(block) else {
            return false;
        };
        {
            let mut state = self.state.lock();
            if state.has(block) {
                return true;
            }
            if !matches!(state.phase, Phase::Staging) || !state.busy.insert(block) {
                return false;
            }
        }
        let mut bytes = vec![0; range.len as usize];
        let read = self
            .file(range.file)
            .and_then(|f| f.read_exact_at(&mut bytes, range.offset));
        let good = read.is_ok() && self.algorithm.digest(&bytes) == recorded.digest;
        let mut state = self.state.lock();
        state.busy.remove(&block);
        if good && matches!(state.phase, Phase::Staging) {
            self.mark(&mut state, block, recorded);
            state.unallocated_bytes = state.unallocated_bytes.saturating_sub(range.len.into());
        }
        drop(state);
        self.idle.notify_all();
        if good {
            self.bump();
        }
        good
    }
}
