//! The state machine as the store sees it: bytes in, bytes out.

use crate::types::{LogId, StoredMembership};

/// Encodes a copy of a state; called once, on a blocking thread.
pub type Encode = Box<dyn FnOnce() -> Vec<u8> + Send + Sync>;

/// A deterministic state machine that the log is applied to.
///
/// Guaranteed by the store: entries come in index order, each exactly once per life of the value (after
/// [`restore`](Self::restore) they go on behind the snapshot), never two calls at once.
///
/// Not guaranteed: that what was applied is on the disk. The state is rebuilt at start from the newest
/// snapshot and the log behind it.
pub trait StateMachine: Send + Sync + 'static {
    /// Applies one command and answers it.
    ///
    /// It must be deterministic: a command that makes no sense is answered with bytes that say so. `log_id` gives
    /// term and index of the entry. Called under the state's write lock and on an async worker thread, so it must not
    /// block.
    ///
    /// An error is not about the command but about this program, which cannot go on: it reaches the process as the
    /// store's [`Fatal`](crate::Fatal), nothing more is applied, and the value must not be used any more.
    fn apply(&mut self, log_id: LogId, command: &[u8]) -> Result<Vec<u8>, String>;

    /// An entry without a command (a new leader's blank entry) was applied. Most machines only care if
    /// they record the highest index they have seen.
    fn applied_blank(&mut self, log_id: LogId) {
        let _ = log_id;
    }

    /// A membership entry was applied.
    fn applied_membership(&mut self, membership: &StoredMembership) {
        let _ = membership;
    }

    /// The whole state as bytes, which [`restore`](Self::restore) takes back. Called under the read lock, and while
    /// no entry is applied, so it only takes a copy, which has to be cheap; what it returns does the encoding, beside
    /// whatever is applied meanwhile.
    fn snapshot(&self) -> Encode;

    /// Replaces the whole state by that of a snapshot. On an error the old state must be kept: the error
    /// is reported and the process stops.
    fn restore(&mut self, snapshot: &[u8]) -> Result<(), String>;
}
