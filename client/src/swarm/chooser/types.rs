//! What goes into the chooser and comes out of it.

use crate::swarm::words::PeerIndex;

/// What the chooser needs to know of a peer.
#[derive(Clone, Copy, Debug)]
pub struct PeerTraits {
    /// [`hash_id`](super::hash_id) of its node id.
    pub hash: u64,
    /// Whether it is the seed.
    pub seed: bool,
    /// Whether it is in this node's rack; all are where no racks are known.
    pub near: bool,
}

/// The next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    /// Of whom.
    pub peer: PeerIndex,
    /// What.
    pub block: u32,
    /// To be declined if somebody else gets it from there.
    pub unless_sent: bool,
}

/// Why a request brought no block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decline {
    /// The peer does not have it (any more), or cannot read it.
    NotHeld,
    /// The peer has no slot.
    Busy,
    /// `unless_sent` applied.
    SentElsewhere,
    /// This node canceled it.
    Canceled,
}

/// What came of a delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// The block is wanted: verify it, then say [`obtained`](super::Chooser::obtained) or
    /// [`failed`](super::Chooser::failed).
    pub wanted: bool,
    /// Requests for the same block at other peers, to be canceled.
    pub cancel: Vec<PeerIndex>,
}

/// A peer that does not deliver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stall {
    /// Which.
    pub peer: PeerIndex,
    /// Requests to cancel: others have these blocks.
    pub cancel: Vec<u32>,
    /// Leave it altogether.
    pub drop: bool,
}
