//! After a start: what the journal recorded is believed only once it is hashed again.
//!
//! Guaranteed: verified blocks appear as they are found; any number of threads, of any tasks, may take part, step by
//! step; whoever stops leaves the rest to the others; the end comes once, with the last step.

use super::{
    artifact::{Artifact, Phase},
    journal::{Entry, Recorded},
};
use std::{collections::BTreeSet, os::unix::fs::FileExt};

/// Most threads that one [`Artifact::rescan`] starts: enough for a fast disk, and it leaves cores to the rest of the
/// start.
const RESCAN_THREADS: usize = 4;
/// Bytes of one step: milliseconds, after which others get their turn and a stop is seen.
const STEP_BYTES: u64 = 16 << 20;

/// How far a re-hash is after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rehash {
    /// There may be more to do.
    More,
    /// Others do the last of it; [`Artifact::progress`] tells when they have.
    Others,
    /// All that was recorded is held, or was found damaged.
    Done,
}

impl Artifact {
    /// Whether nothing is left to re-hash.
    pub fn rehashed(&self) -> bool {
        self.state.lock().rescanned
    }

    /// Re-hashes a few megabytes of what the journal recorded before this start. Blocking.
    pub fn rehash(&self) -> Rehash {
        self.rehash_step(STEP_BYTES)
    }

    pub(crate) fn rehash_step(&self, bytes: u64) -> Rehash {
        let mut step = Vec::new();
        {
            let mut state = self.state.lock();
            if state.rescanned {
                return Rehash::Done;
            }
            let mut taken = 0;
            while taken < bytes
                && let Some((block, recorded)) = state.recorded.pop_first()
            {
                taken += self.blocks.locate(block).map_or(0, |r| u64::from(r.len));
                step.push((block, recorded));
            }
            state.rehashing += step.len();
        }
        if step.is_empty() {
            return Rehash::Others;
        }
        let damaged: Vec<u32> = step
            .iter()
            .filter(|(block, recorded)| !self.rescan_block(*block, *recorded))
            .map(|(block, _)| *block)
            .collect();
        let damaged = {
            let mut state = self.state.lock();
            if state.rescanned {
                return Rehash::Done; // closed meanwhile: nothing was found out
            }
            state.damaged.extend(damaged);
            if !state.recorded.is_empty() || state.rehashing > step.len() {
                state.rehashing -= step.len();
                return Rehash::More;
            }
            // The last step; `rehashing` stays up, so that nobody else ends it, too.
            std::mem::take(&mut state.damaged)
        };
        self.end_rescan(damaged);
        {
            let mut state = self.state.lock();
            state.rehashing = 0;
            state.rescanned = true;
        }
        self.idle.notify_all();
        self.bump();
        self.plumbing.bump();
        Rehash::Done
    }

    /// Re-hashes everything that is left; returns once that is done, by whichever thread, or `stopped`.
    pub(crate) fn rescan(&self, stopped: &(dyn Fn() -> bool + Sync)) {
        if self.rehashed() {
            return;
        }
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(RESCAN_THREADS));
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| while !stopped() && self.rehash() == Rehash::More {});
            }
        });
        let mut state = self.state.lock();
        while !state.rescanned && !stopped() {
            self.idle.wait(&mut state);
        }
    }

    fn end_rescan(&self, mut bad: BTreeSet<u32>) {
        let mut journal = self.journal.lock();
        {
            let state = self.state.lock();
            bad.retain(|&b| !state.has(b)); // written again meanwhile
        }
        tracing::info!(model = %self.model, verified = self.have_count(), damaged = bad.len(), "staging re-hashed");
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
