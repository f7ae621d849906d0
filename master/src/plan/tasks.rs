//! Which attempts are authorised, and what the nodes are told.

use super::{
    Plan,
    observed::{HeldState, Session},
    order::{Intent, Order, OrderBody},
    peers::{Candidates, holds_sealed},
};
use mooncake_proto::{
    MAX_ACQUISITIONS,
    api::{NodeStatus, PlacementState},
    ids::{JobId, ModelRef, NodeId},
};
use mooncake_state::{
    Artifact, Command, Fence, Job, MAX_AUTHORISE_NODES, Placement, ReplicateTo, TaskKind,
    rules::download_payload,
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

/// The place in the line of what wants to begin: the higher priority first, then the older job.
type Rank = (Reverse<i8>, u64);

fn rank(job: &Job) -> Rank {
    (Reverse(job.priority), job.created_ms())
}

/// What wants to begin: a model, or the copy of one on one node. In the order of their turns, a model before its copies.
type Line<'a> = BTreeSet<(Rank, &'a ModelRef, Option<&'a NodeId>)>;

/// The copies of one model that begin now.
struct Copies {
    first_attempt: u64,
    nodes: Vec<ReplicateTo>,
}

impl<'a> Plan<'a> {
    /// Downloads and copies, in one line where there is not room for all. What runs goes on, whoever waits.
    pub(super) fn authorise(&mut self) {
        let mut copies: BTreeMap<&'a ModelRef, Copies> = BTreeMap::new();
        let mut line: Line<'a> = BTreeSet::new();
        for model in self.state.wanted_models() {
            let first = self.state.live_jobs_of(model).map(|(_, job)| rank(job)).min();
            line.extend(first.map(|rank| (rank, model, None)));
        }
        while let Some((_, model, node)) = line.pop_first() {
            let Some(artifact) = self.state.artifact(model) else {
                continue;
            };
            match node {
                None => {
                    let Some((first_attempt, acquirer)) = self.download(model, artifact) else {
                        continue;
                    };
                    let nodes = Vec::new();
                    copies.insert(model, Copies { first_attempt, nodes });
                    // None of them comes before its model in the line: a job that wants one wants the model.
                    let wanted = self.wanted_copies(model, artifact, acquirer);
                    line.extend(wanted.map(|(node, rank)| (rank, model, Some(node))));
                }
                Some(node) => {
                    let to = self.copy(model, artifact, node);
                    if let Some(copies) = copies.get_mut(model) {
                        copies.nodes.extend(to);
                    }
                }
            }
        }
        for (model, copies) in copies {
            self.replicate(model, copies);
        }
    }

    /// The download of an artifact that nobody holds, and with it the copies: receivers pull from the first block. Gives
    /// the attempt that comes next and where the download runs; `None`: there is nothing to copy yet.
    fn download(&mut self, model: &'a ModelRef, artifact: &'a Artifact) -> Option<(u64, Option<&'a NodeId>)> {
        let attempt = artifact.attempts + 1;
        let acquirer = artifact.acquiring.as_ref();
        if acquirer.is_some() || self.has_holder(model, artifact) {
            return Some((attempt, acquirer));
        }
        if artifact.seal.is_some() && self.may_turn_up() {
            return None;
        }
        let room = self.set_in_motion(model, artifact);
        let (id, job) = self.next_seed(model, artifact)?;
        self.take_for_download(model, &job.seed);
        if !room {
            return None;
        }
        let command = self.acquire(model, artifact, attempt, id, job)?;
        self.propose(command);
        Some((attempt + 1, Some(&job.seed)))
    }

    /// Some live node has every byte of what is sealed.
    pub(super) fn has_holder(&self, model: &ModelRef, artifact: &Artifact) -> bool {
        self.state.is_available(artifact) || self.is_held_by_someone(model, artifact)
    }

    /// A node says that it holds all of what is sealed although the state does not know it.
    fn is_held_by_someone(&self, model: &ModelRef, artifact: &Artifact) -> bool {
        self.observed.sessions.iter().any(|(id, session)| {
            self.ready(id).is_some()
                && session
                    .holdings
                    .get(model)
                    .is_some_and(|h| holds_sealed(artifact, h))
        })
    }

    /// A holder may not have been heard of yet: during the reconnect window any node that is not down, and any
    /// connected node until its inventory is complete, though not for longer than such a window either.
    fn may_turn_up(&self) -> bool {
        let now_ms = self.now_ms;
        self.state
            .nodes()
            .filter(|(_, n)| n.status != NodeStatus::Down)
            .any(|(id, node)| match self.session(id, node) {
                None => now_ms < self.observed.window_end_ms(),
                Some(session) if session.inventory_complete => false,
                Some(session) => {
                    now_ms
                        < session
                            .opened_ms
                            .saturating_add(self.observed.config.reconnect_window_ms)
                }
            })
    }

    /// The first job in the line whose seed can acquire, now or when what keeps it busy has ended. If that seed is between
    /// two attempts, it is waited for.
    fn next_seed(&mut self, model: &ModelRef, artifact: &Artifact) -> Option<(&'a JobId, &'a Job)> {
        let jobs = self.state.live_jobs_of(model);
        let candidates: Vec<_> = jobs
            .filter(|(_, job)| job.may_download() && self.ready(&job.seed).is_some())
            .collect();
        let roomy = candidates.into_iter().filter(|(_, job)| {
            *self.downloads_on(&job.seed) < MAX_ACQUISITIONS && self.has_place_for_download(model, &job.seed)
        });
        let (id, job) = roomy.min_by_key(|(id, job)| (rank(job), *id))?;
        let waits = artifact
            .placements
            .get(&job.seed)
            .is_some_and(|p| p.not_before_ms > self.now_ms);
        (!waits).then_some((id, job))
    }

    /// How many downloads the node has or is about to have. One more than it works at would wait there, and be taken
    /// for one that stands still.
    fn downloads_on(&mut self, node: &'a NodeId) -> &mut usize {
        let state = self.state;
        self.downloads
            .entry(node)
            .or_insert_with(|| state.downloads_on(node))
    }

    fn acquire(
        &mut self,
        model: &ModelRef,
        artifact: &Artifact,
        attempt: u64,
        id: &JobId,
        job: &'a Job,
    ) -> Option<Command> {
        let (node, session) = self.ready(&job.seed)?;
        let reserve_bytes = self.reserve(model, artifact, &job.seed, session)?;
        *self.downloads_on(&job.seed) += 1;
        Some(Command::AuthoriseAcquire {
            model: model.clone(),
            generation: artifact.generation,
            attempt,
            node: job.seed.clone(),
            incarnation: node.incarnation,
            job: id.clone(),
            reserve_bytes,
            now_ms: self.now_ms,
        })
    }

    /// Where live jobs want a copy that could begin now.
    fn wanted_copies(
        &self,
        model: &ModelRef,
        artifact: &'a Artifact,
        acquirer: Option<&NodeId>,
    ) -> impl Iterator<Item = (&'a NodeId, Rank)> {
        let mut wanted: BTreeMap<&'a NodeId, Rank> = BTreeMap::new();
        for (_, job) in self.state.live_jobs_of(model) {
            let rank = rank(job);
            for (node, view) in job.targets.iter().zip(&job.views) {
                if !view.is_finished() {
                    let first = wanted.entry(node).or_insert(rank);
                    *first = rank.min(*first);
                }
            }
        }
        wanted.retain(|id, _| {
            let idle = artifact.placements.get(*id).is_none_or(|p| {
                !matches!(p.state, PlacementState::Acquiring | PlacementState::Staged)
                    && p.not_before_ms <= self.now_ms
            });
            let Some((_, session)) = self.ready(id).filter(|_| idle && acquirer != Some(*id)) else {
                return false;
            };
            // What is staged `compare_holdings` reports: there is nothing to copy.
            session
                .holdings
                .get(model)
                .is_none_or(|h| h.state != HeldState::Staged || !holds_sealed(artifact, h))
        });
        wanted.into_iter()
    }

    /// One copy's turn has come.
    fn copy(&mut self, model: &ModelRef, artifact: &Artifact, id: &'a NodeId) -> Option<ReplicateTo> {
        let (node, session) = self.ready(id)?;
        let all_there = session
            .holdings
            .get(model)
            .is_some_and(|h| holds_sealed(artifact, h));
        if !all_there && !self.take_for_copy(model, id) {
            return None;
        }
        let reserve_bytes = self.reserve(model, artifact, id, session)?;
        Some(ReplicateTo {
            node: id.clone(),
            incarnation: node.incarnation,
            reserve_bytes,
        })
    }

    fn replicate(&mut self, model: &ModelRef, copies: Copies) {
        let Some(artifact) = self.state.artifact(model) else {
            return;
        };
        let mut attempt = copies.first_attempt;
        for nodes in copies.nodes.chunks(MAX_AUTHORISE_NODES) {
            self.propose(Command::AuthoriseReplicate {
                model: model.clone(),
                generation: artifact.generation,
                first_attempt: attempt,
                nodes: nodes.to_vec(),
                now_ms: self.now_ms,
            });
            attempt += nodes.len() as u64;
        }
    }

    /// How much space an attempt on the node may still take. `None`: a newer measurement must be committed first, since
    /// the recorded one would refuse it; or what went before in the line must, since both together do not fit: who gets
    /// the space is not for the order of the commands to decide.
    fn reserve(
        &mut self,
        model: &ModelRef,
        artifact: &Artifact,
        id: &'a NodeId,
        session: &Session,
    ) -> Option<u64> {
        // Staging is preallocated: what was begun has its space.
        let begun = session
            .holdings
            .get(model)
            .is_some_and(|h| h.generation == artifact.generation && h.manifest == artifact.manifest);
        let reserve_bytes = if begun { 0 } else { artifact.total_size_bytes };
        let node = self.state.node(id)?;
        let free = self.state.unreserved_bytes(id);
        let given = self.given_bytes.entry(id).or_default();
        if free.is_some_and(|free| free >= reserve_bytes && free - reserve_bytes < *given) {
            return None;
        }
        *given += reserve_bytes;
        if free.is_some_and(|free| free < reserve_bytes)
            && let Some(space) = session.space
            && space.measured_ms > node.free_at_ms
        {
            self.propose(Command::SetNodeFree {
                node: id.clone(),
                incarnation: node.incarnation,
                capacity_bytes: space.capacity_bytes,
                free_bytes: space.free_bytes,
                measured_ms: space.measured_ms,
                now_ms: self.now_ms,
            });
            return None;
        }
        Some(reserve_bytes)
    }

    /// Every running attempt has its order, its peers and its seal.
    pub(super) fn order(&mut self) {
        for model in self.running_models() {
            let Some(artifact) = self.state.artifact(model) else {
                continue;
            };
            let candidates = Candidates::new(self.state, self.observed, model, artifact);
            for (id, placement) in &artifact.placements {
                if placement.state != PlacementState::Acquiring {
                    continue;
                }
                let Some((_, session)) = self.ready(id) else {
                    continue;
                };
                for body in self.bodies(model, artifact, id, placement, session, &candidates) {
                    let order = Order {
                        model: model.clone(),
                        generation: artifact.generation,
                        fence: placement.fence,
                        body,
                    };
                    self.intents.push(Intent::Send {
                        node: id.clone(),
                        order,
                    });
                }
            }
        }
    }

    /// Artifacts that live jobs want, and those that a seed is still publishing.
    fn running_models(&self) -> BTreeSet<&'a ModelRef> {
        let mut models: BTreeSet<_> = self.state.wanted_models().collect();
        for id in self.observed.sessions.keys() {
            models.extend(self.state.models_on(id).filter(|m| {
                let placement = self.state.artifact(m).and_then(|a| a.placements.get(id));
                placement.is_some_and(|p| p.state == PlacementState::Acquiring)
            }));
        }
        models
    }

    fn bodies(
        &self,
        model: &ModelRef,
        artifact: &Artifact,
        id: &NodeId,
        placement: &Placement,
        session: &Session,
        candidates: &Candidates<'_>,
    ) -> Vec<OrderBody> {
        let sent = session.sent.get(model).filter(|s| s.fence == placement.fence);
        let mut bodies = Vec::new();
        match (placement.kind, sent) {
            (TaskKind::Acquire, None) => {
                // The state keeps the sources for as long as they are read. Once sealed it only publishes and needs
                // none: they may be gone with its job.
                let sources = placement.sources.or_else(|| {
                    let job = self.state.job(placement.job.as_ref()?)?;
                    Some(job.sources)
                });
                match sources.filter(|sources| self.state.blob(sources).is_some()) {
                    Some(sources) => bodies.push(OrderBody::Acquire(download_payload(
                        artifact,
                        sources,
                        placement.fence,
                    ))),
                    None if placement.whole => bodies.push(self.copy_order(artifact, id, candidates)),
                    None => {}
                }
            }
            (TaskKind::Replicate, None) => bodies.push(self.copy_order(artifact, id, candidates)),
            (TaskKind::Replicate, Some(sent)) => {
                bodies.extend(
                    candidates
                        .list(id, Some(&sent.peers))
                        .map(|peers| OrderBody::PeersChanged { peers }),
                );
            }
            (TaskKind::Acquire, Some(_)) => {}
        }
        // A copy may be published once there is a seal; a download once its own seal is committed.
        let told = match bodies.first() {
            Some(OrderBody::Replicate { seal, .. }) => *seal,
            Some(OrderBody::Acquire(_)) => None,
            _ => sent.and_then(|s| s.seal),
        };
        let may_publish = placement.kind == TaskKind::Replicate || placement.whole;
        if let Some(seal) = artifact.seal.filter(|s| may_publish && told != Some(*s)) {
            bodies.push(OrderBody::Sealed { seal });
        }
        bodies
    }

    fn copy_order(&self, artifact: &Artifact, id: &NodeId, candidates: &Candidates<'_>) -> OrderBody {
        OrderBody::Replicate {
            manifest: artifact.manifest,
            block_size_bytes: artifact.block_size_bytes,
            algorithm: artifact.algorithm,
            peers: candidates.list(id, None).unwrap_or_default(),
            seal: artifact.seal,
        }
    }

    /// Tasks that the state does not know as running are revoked; staging that nobody has wanted for long goes.
    pub(super) fn stop_unwanted(&mut self) {
        for (id, session) in &self.observed.sessions {
            let models: BTreeSet<&ModelRef> = session.sent.keys().chain(session.holdings.keys()).collect();
            for model in models {
                if let Some((fence, body)) = self.stop(id, session, model) {
                    let generation = match (session.holdings.get(model), self.state.artifact(model)) {
                        (Some(held), _) => held.generation,
                        (None, Some(artifact)) => artifact.generation,
                        (None, None) => 0,
                    };
                    let order = Order {
                        model: model.clone(),
                        generation,
                        fence,
                        body,
                    };
                    self.intents.push(Intent::Send {
                        node: id.clone(),
                        order,
                    });
                }
            }
        }
    }

    fn stop(&self, id: &NodeId, session: &Session, model: &ModelRef) -> Option<(Fence, OrderBody)> {
        let artifact = self.state.artifact(model);
        let placement = artifact
            .and_then(|a| a.placements.get(id))
            .filter(|p| p.incarnation == session.incarnation);
        if placement.is_some_and(|p| matches!(p.state, PlacementState::Acquiring | PlacementState::Staged)) {
            return None;
        }
        let sent = session.sent.get(model);
        let held = session
            .holdings
            .get(model)
            .filter(|h| h.state != HeldState::Staged);
        let known = placement.map(|p| p.fence);
        if let Some(held) = held
            && !sent.is_some_and(|s| s.deleted)
            && self.is_expired(session, model, artifact, held.generation)
        {
            let reason = "no job has wanted it for the time that staging is kept".to_owned();
            let fence = [Some(held.fence), known, sent.map(|s| s.fence)]
                .into_iter()
                .flatten()
                .max()?;
            return Some((fence, OrderBody::Delete { reason }));
        }
        let reason = "no job wants it on this node any more".to_owned();
        match sent {
            Some(sent) if sent.running.is_some() => Some((sent.fence, OrderBody::Revoke { reason })),
            Some(_) => None,
            // Ordered by an earlier leader: whether it still runs is not known here.
            None => {
                let fence = held?.fence.max(known.unwrap_or_default());
                (fence != Fence::default()).then_some((fence, OrderBody::Revoke { reason }))
            }
        }
    }

    fn is_expired(
        &self,
        session: &Session,
        model: &ModelRef,
        artifact: Option<&Artifact>,
        generation: u64,
    ) -> bool {
        let since_ms = match artifact.filter(|a| a.generation == generation) {
            Some(_) if self.state.live_jobs_of(model).next().is_some() => return false,
            Some(artifact) => artifact.unwanted_since_ms,
            // Forgotten or replaced: by when nobody can tell.
            None => None,
        };
        let since_ms = since_ms.unwrap_or(session.opened_ms);
        since_ms.saturating_add(self.state.limits().unsealed_ttl_ms) <= self.now_ms
    }
}
