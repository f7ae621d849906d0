//! Which receiver takes which block from a seed, or from another rack: rendezvous hashing among the receivers that a
//! node knows, so that they ask for different ones without a word between them. Pure.
//!
//! Not guaranteed: that nodes which know different receivers agree; then a block may be asked for twice, which the
//! seed declines (`unless_sent`).

use crate::swarm::bits::Bits;
use mooncake_proto::mesh::mix;

/// Groups of blocks whose owners are computed one by one.
const OWNER_GROUPS: u32 = 1 << 16;

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

    /// Each group belongs to that one of `among` where it weighs most.
    pub(super) fn refresh(&mut self, among: impl FnOnce() -> Vec<u64>) {
        if self.owned.is_some() {
            return;
        }
        let mut rivals = among();
        let groups = (self.blocks >> self.group_shift) + 1;
        let mut owned = Bits::new(groups);
        if rivals.contains(&self.node) {
            rivals.retain(|r| *r != self.node);
            for group in 0..groups {
                let mine = weight(self.node, group);
                if rivals.iter().all(|r| weight(*r, group) <= mine) {
                    owned.set(group);
                }
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
