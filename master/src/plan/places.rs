//! The places of nodes that want to fetch only so many model versions at once (`--max-transfers`).
//!
//! Guaranteed: what [`super::plan`] authorises never brings a node over its limit, as far as transfers move. Who holds
//! every byte and has only to publish takes no place. A transfer keeps its place from its first attempt to its last, the
//! pauses between them included; none is stopped for another one. A node whose limit was lowered gets nothing new until
//! enough has ended.
//!
//! A copy that has *stalled* (the last node that held the model is gone, and nobody downloads it) keeps its place against
//! other copies, but not against a download. Otherwise two nodes could wait for each other for ever: each with a copy that
//! waits for the other's download, which waits for the place. So that a download brings no node over its limit by
//! setting its copies in motion, it waits until there is room for them; from then on they hold their places against every
//! download behind it in the line, so that its turn comes. The first one in the line only waits for what moves, and what
//! moves ends without any other place.
//!
//! Not guaranteed: that a stalled copy gets nothing at all (others like it give it what they have), nor that it stays
//! stalled beside a download that took its place: the node that was lost may come back.

use super::{Plan, observed::Observed, peers::holds_sealed};
use mooncake_proto::ids::{ModelRef, NodeId};
use mooncake_state::{Artifact, State, TaskKind, Transfers};

/// What a node with a limit has under way, with what this plan has given it.
#[derive(Debug)]
pub(super) struct Places {
    limit: usize,
    /// Of models that can be had.
    moving: usize,
    /// Of models that cannot be had.
    stalled: usize,
}

impl Observed {
    /// Whether the model takes a place on the node.
    pub(super) fn takes_place(&self, state: &State, model: &ModelRef, node: &NodeId) -> bool {
        let all_there = || {
            let held = self.sessions.get(node).and_then(|s| s.holdings.get(model));
            held.zip(state.artifact(model))
                .is_some_and(|(held, artifact)| holds_sealed(artifact, held))
        };
        state.is_under_way(model, node) && !all_there()
    }

    fn under_way<'a>(
        &'a self,
        state: &'a State,
        node: &'a NodeId,
    ) -> impl Iterator<Item = (&'a ModelRef, &'a Artifact)> {
        let models = state
            .models_on(node)
            .filter(|model| self.takes_place(state, model, node));
        models.filter_map(|model| Some((model, state.artifact(model)?)))
    }

    /// How many model versions the node wants to fetch at once at most.
    fn max_transfers(&self, state: &State, node: &NodeId) -> Option<usize> {
        let incarnation = state.node(node)?.incarnation;
        let session = self.sessions.get(node)?;
        let most = session
            .max_transfers
            .filter(|_| session.incarnation == incarnation)?;
        Some(most.get() as usize)
    }

    /// What a node with a limit fetches.
    pub fn transfers(&self, state: &State, node: &NodeId) -> Option<Transfers> {
        Some(Transfers {
            most: self.max_transfers(state, node)?,
            running: self.under_way(state, node).count(),
        })
    }
}

impl<'a> Plan<'a> {
    /// Those of a node with a limit.
    fn places(&mut self, node: &'a NodeId) -> Option<&mut Places> {
        if !self.places.contains_key(node) {
            let (state, observed) = (self.state, self.observed);
            let mut places = Places {
                limit: observed.max_transfers(state, node)?,
                moving: 0,
                stalled: 0,
            };
            for (model, artifact) in observed.under_way(state, node) {
                match self.can_be_had(model, artifact) {
                    true => places.moving += 1,
                    false => places.stalled += 1,
                }
            }
            self.places.insert(node, places);
        }
        self.places.get_mut(node)
    }

    /// Whether somebody has bytes of the model to give, or gets them: holds it, downloads it, or will again after a pause.
    pub(super) fn can_be_had(&mut self, model: &'a ModelRef, artifact: &'a Artifact) -> bool {
        if let Some(known) = self.can_be_had.get(model) {
            return *known;
        }
        let state = self.state;
        let downloads_again = |seed: &NodeId| {
            let placement = artifact.placements.get(seed);
            placement.is_some_and(|p| p.kind == TaskKind::Acquire) && state.is_under_way(model, seed)
        };
        let can = artifact.acquiring.is_some()
            || self.has_holder(model, artifact)
            || state
                .live_jobs_of(model)
                .any(|(_, job)| downloads_again(&job.seed));
        self.can_be_had.insert(model, can);
        can
    }

    /// A place for a copy, if there is one. The model can be had.
    pub(super) fn take_for_copy(&mut self, model: &ModelRef, node: &'a NodeId) -> bool {
        let (state, observed) = (self.state, self.observed);
        let Some(places) = self.places(node) else {
            return true;
        };
        if observed.takes_place(state, model, node) {
            return true;
        }
        let free = places.moving + places.stalled < places.limit;
        places.moving += usize::from(free);
        free
    }

    /// Whether a download finds a place on its seed.
    pub(super) fn has_place_for_download(&mut self, model: &ModelRef, seed: &'a NodeId) -> bool {
        let (state, observed) = (self.state, self.observed);
        self.places(seed)
            .is_none_or(|places| places.moving < places.limit || observed.takes_place(state, model, seed))
    }

    /// The download takes its place; or keeps what it waits for against those behind it in the line. Comes after
    /// [`Plan::set_in_motion`].
    pub(super) fn take_for_download(&mut self, model: &ModelRef, seed: &'a NodeId) {
        let (state, observed) = (self.state, self.observed);
        if let Some(places) = self.places(seed)
            && !observed.takes_place(state, model, seed)
        {
            places.moving += 1;
        }
    }

    /// The model is about to be downloaded: its copies move again. Whether there is room for all of them.
    pub(super) fn set_in_motion(&mut self, model: &'a ModelRef, artifact: &'a Artifact) -> bool {
        let (state, observed) = (self.state, self.observed);
        let mut room = true;
        for node in artifact.placements.keys() {
            if self.places(node).is_none()
                || !observed.takes_place(state, model, node)
                || self.can_be_had(model, artifact)
            {
                continue;
            }
            if let Some(places) = self.places(node) {
                room &= places.moving < places.limit;
                places.moving += 1;
                places.stalled -= 1;
            }
        }
        self.can_be_had.insert(model, true);
        room
    }
}
