//! Node sessions: one stream per client, facts up, orders down.
//!
//! Guaranteed: one live client per node id; an order only goes to a session whose registration is committed; the
//! blobs that an order names go before it, once per session; heartbeats pass everything else in both directions.
//! Not guaranteed: that an order arrives. What was sent counts for one session only, and the planner sends again
//! in the next.

mod convert;
mod facts;
mod meter;
mod stream;

pub(crate) use facts::Facts;
pub use stream::serve;

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The sessions of this master.
#[derive(Default)]
pub struct Sessions {
    /// Written by every session for each frame and by the reconciler, read by requests and the planner; each time
    /// for a moment, never across an await.
    facts: RwLock<Facts>,
}

impl Sessions {
    pub(crate) fn facts(&self) -> RwLockReadGuard<'_, Facts> {
        self.facts.read()
    }

    pub(crate) fn facts_mut(&self) -> RwLockWriteGuard<'_, Facts> {
        self.facts.write()
    }

    /// Nodes connected now.
    pub fn count(&self) -> usize {
        self.facts.read().count()
    }
}
