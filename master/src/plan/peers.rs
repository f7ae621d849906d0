//! Who a node is told to copy from.

use super::{
    observed::{Held, HeldState, Observed},
    order::Peer,
};
use mooncake_proto::{
    api::{NodeStatus, PlacementState},
    ids::{ModelRef, NodeId},
};
use mooncake_state::{Artifact, State, TaskKind};
use std::collections::BTreeMap;

/// Most peers one node is told of: a swarm needs no more connections per node to use its links, and the leader's
/// work per node stays constant however many nodes there are.
pub const MAX_PEERS: usize = 64;
/// Of these, most that hold everything: the rest are receivers, with which what is rare is exchanged.
const MAX_HOLDERS: usize = 48;

/// What a candidate is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Seed,
    Holder,
    Receiver,
}

/// Everyone who has or gets one artifact.
pub(super) struct Candidates<'a> {
    state: &'a State,
    ranks: BTreeMap<&'a NodeId, Rank>,
}

/// Whether the node says that it holds every byte of what is sealed.
pub(super) fn holds_sealed(artifact: &Artifact, held: &Held) -> bool {
    held.state >= HeldState::Whole
        && held.generation == artifact.generation
        && held.manifest == artifact.manifest
        && artifact.seal.is_some()
        && held.seal == artifact.seal
}

impl<'a> Candidates<'a> {
    pub(super) fn new(
        state: &'a State,
        observed: &'a Observed,
        model: &ModelRef,
        artifact: &'a Artifact,
    ) -> Self {
        let mut ranks = BTreeMap::new();
        for (id, placement) in &artifact.placements {
            let runs = placement.state == PlacementState::Acquiring;
            let seed = placement.kind == TaskKind::Acquire && runs;
            let rank = match (seed, state.is_holder(id, placement)) {
                (true, _) => Rank::Seed,
                (false, true) => Rank::Holder,
                (false, false) if runs => Rank::Receiver,
                _ => continue,
            };
            ranks.insert(id, rank);
        }
        for (id, session) in &observed.sessions {
            if session
                .holdings
                .get(model)
                .is_some_and(|h| holds_sealed(artifact, h))
            {
                ranks
                    .entry(id)
                    .and_modify(|r| *r = (*r).min(Rank::Holder))
                    .or_insert(Rank::Holder);
            }
        }
        ranks.retain(|id, _| state.node(id).is_some_and(|n| n.status != NodeStatus::Down));
        Self { state, ranks }
    }

    /// The list for `node`, or `None` if `before`, which it was told, still serves. Not random: the list follows
    /// from the ids, those after `node`'s own first, so that each node has other neighbours and all are connected.
    pub(super) fn list(&self, node: &NodeId, before: Option<&[Peer]>) -> Option<Vec<Peer>> {
        if before.is_some_and(|peers| self.still_serves(node, peers)) {
            return None;
        }
        let others = || {
            use std::ops::Bound::{Excluded, Unbounded};
            let after = self.ranks.range::<NodeId, _>((Excluded(node), Unbounded));
            let before = self.ranks.range::<NodeId, _>((Unbounded, Excluded(node)));
            after.chain(before)
        };
        let of = |rank: Rank| others().filter(move |(_, r)| **r == rank).map(|(id, _)| *id);
        let mut chosen: Vec<&NodeId> = of(Rank::Seed).chain(of(Rank::Holder)).take(MAX_HOLDERS).collect();
        chosen.extend(of(Rank::Receiver).take(MAX_PEERS - chosen.len()));
        let holders_left = of(Rank::Seed).chain(of(Rank::Holder)).skip(MAX_HOLDERS);
        chosen.extend(holders_left.take(MAX_PEERS - chosen.len()));
        chosen.sort();
        let list: Vec<Peer> = chosen.into_iter().filter_map(|id| self.peer(id)).collect();
        (before != Some(&list[..])).then_some(list)
    }

    fn peer(&self, id: &NodeId) -> Option<Peer> {
        Some(Peer::new(
            id,
            self.state.node(id)?,
            self.ranks.get(id) == Some(&Rank::Seed),
        ))
    }

    /// A list is kept while everyone on it still serves, a source of everything is on it, and it is full or has
    /// everyone: so that a thousand nodes turning `staged` one by one do not cause a million messages.
    fn still_serves(&self, node: &NodeId, peers: &[Peer]) -> bool {
        let same = peers.iter().all(|p| {
            self.state
                .node(&p.node)
                .is_some_and(|n| n.about.data_address == p.data_address)
                && self
                    .ranks
                    .get(&p.node)
                    .is_some_and(|r| p.seed || *r != Rank::Seed)
        });
        let everyone = self.ranks.len() - usize::from(self.ranks.contains_key(node));
        let complete = peers.len() >= everyone.min(MAX_PEERS);
        let has_source = peers
            .iter()
            .any(|p| self.ranks.get(&p.node).is_some_and(|r| *r < Rank::Receiver))
            || !self
                .ranks
                .iter()
                .any(|(id, r)| *id != node && *r < Rank::Receiver);
        let has_seed = self
            .ranks
            .iter()
            .filter(|(id, r)| **r == Rank::Seed && **id != node)
            .all(|(id, _)| peers.iter().any(|p| p.node == **id));
        same && complete && has_source && has_seed
    }
}
