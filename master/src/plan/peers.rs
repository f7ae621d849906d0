//! Who a node is told to copy from: its neighbours in the [`Mesh`] of everyone who has or gets the artifact.
//!
//! What it costs: the mesh of an artifact that is being copied is made anew for each plan, its members times the
//! logarithm of their number, and a list is looked up for each of its running copies. Per node both stay as they are
//! however many nodes there are.

use super::{
    observed::{Held, HeldState, Observed},
    order::Peer,
};
use mooncake_proto::{
    api::{NodeStatus, PlacementState},
    ids::{ModelRef, NodeId},
    mesh::{self, Mesh, hash_id},
};
use mooncake_state::{Artifact, State, TaskKind};
use std::collections::BTreeMap;

/// Most peers one node is told of: a swarm needs no more connections per node to use its links, and the leader's
/// work per node stays constant however many nodes there are.
pub const MAX_PEERS: usize = if mesh::MAX_NEIGHBOURS > mesh::EVERYBODY {
    mesh::MAX_NEIGHBOURS
} else {
    mesh::EVERYBODY
};

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
    mesh: Mesh<&'a NodeId>,
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
        let mut mesh = Mesh::new();
        for (id, rank) in &ranks {
            let rack = state.node(id).and_then(|n| n.about.labels.get("rack"));
            let rack = rack.map_or("", String::as_str);
            mesh.insert(*id, hash_id(&id.0), rack, *rank == Rank::Seed);
        }
        Self { state, ranks, mesh }
    }

    /// The list for `node`, or `None` if `before`, which it was told, still serves.
    pub(super) fn list(&self, node: &NodeId, before: Option<&[Peer]>) -> Option<Vec<Peer>> {
        let neighbours = self.mesh.neighbours(&node);
        let list: Vec<Peer> = neighbours.iter().filter_map(|id| self.peer(id)).collect();
        let told = |before: &[Peer]| {
            before.len() == list.len() && before.iter().zip(&list).all(|(b, l)| serves_as(b, l))
        };
        (!before.is_some_and(told)).then_some(list)
    }

    fn peer(&self, id: &NodeId) -> Option<Peer> {
        Some(Peer::new(
            id,
            self.state.node(id)?,
            self.ranks.get(id) == Some(&Rank::Seed),
        ))
    }
}

/// Whether who was told of `before` needs not hear of `now`: that a seed is done does not matter to who knows it.
fn serves_as(before: &Peer, now: &Peer) -> bool {
    let seed = before.seed;
    *before == Peer { seed, ..now.clone() } && (before.seed || !now.seed)
}
