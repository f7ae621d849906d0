//! Which receiver takes which block from the seed: rendezvous hashing among the receivers that a node knows, so that
//! they ask for different ones without a word between them. Pure.
//!
//! Not guaranteed: that nodes which know different receivers agree; then a block may be asked for twice, which the
//! seed declines (`unless_sent`).

use crate::swarm::bits::Bits;

/// Groups of blocks whose owners are computed one by one.
const OWNER_GROUPS: u32 = 1 << 16;

/// A node's number in hashes.
pub fn hash_id(node_id: &str) -> u64 {
    // FNV-1a, mixed: stable over versions and platforms, for all nodes must agree on it.
    mix(node_id.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
    }))
}

/// The finalizer of SplitMix64.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// What `item` weighs at `node`.
pub(super) fn weight(node: u64, item: u32) -> u64 {
    mix(node ^ u64::from(item).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// This node's share.
#[derive(Debug)]
pub(super) struct Shares {
    node: u64,
    blocks: u32,
    group_shift: u32,
    /// By group; `None`: the receivers changed.
    owned: Option<Bits>,
}

impl Shares {
    pub(super) fn new(node: u64, blocks: u32) -> Self {
        let mut group_shift = 0;
        while blocks >> group_shift > OWNER_GROUPS {
            group_shift += 1;
        }
        Self {
            node,
            blocks,
            group_shift,
            owned: None,
        }
    }

    /// The receivers changed.
    pub(super) fn stale(&mut self) {
        self.owned = None;
    }

    /// Of all receivers, this node and `rivals`, each group belongs to the one where it weighs most.
    pub(super) fn refresh(&mut self, rivals: impl Fn() -> Vec<u64>) {
        if self.owned.is_some() {
            return;
        }
        let rivals = rivals();
        let groups = (self.blocks >> self.group_shift) + 1;
        let mut owned = Bits::new(groups);
        for group in 0..groups {
            let mine = weight(self.node, group);
            if rivals.iter().all(|r| weight(*r, group) <= mine) {
                owned.set(group);
            }
        }
        self.owned = Some(owned);
    }

    /// Whether the block is this node's, as far as is known.
    pub(super) fn owns(&self, block: u32) -> bool {
        let group = block >> self.group_shift;
        self.owned.as_ref().is_some_and(|owned| owned.get(group))
    }
}
