//! The state machine as the store sees it: bytes in, bytes out.

use crate::types::{LogId, StoredMembership};

/// A deterministic state machine that the log is applied to.
///
/// Guaranteed by the store: entries come in index order, each exactly once per life of the value (after
/// [`replace`](Self::replace) they go on behind the snapshot); of `apply` and its like, `image`, `decode` and `replace` never
/// two at once. `encode` runs beside any of them.
///
/// Not guaranteed: that what was applied is on the disk. The state is rebuilt at start from the newest
/// snapshot and the log behind it.
pub trait StateMachine: Send + Sync + 'static {
    /// The whole state, apart from the machine.
    type Image: Send + Sync + 'static;

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

    /// A copy of the whole state. Called under the read lock, and while no entry is applied: it has to be cheap.
    fn image(&self) -> Self::Image;

    /// A copy as bytes. Called on a blocking thread, beside whatever is applied meanwhile.
    fn encode(image: &Self::Image) -> Vec<u8>;

    /// Reads what [`encode`](Self::encode) wrote; other versions of this program may have written it. Called on a blocking
    /// thread, under the read lock. An error is reported and the process stops.
    fn decode(&self, snapshot: &[u8]) -> Result<Self::Image, String>;

    /// Puts a copy in the place of the whole state, and returns what was there. Called under the write lock: it has to be
    /// cheap.
    fn replace(&mut self, image: Self::Image) -> Self::Image;
}
