//! What the leader knows beyond the state: who is connected, what they hold, what they were told.
//!
//! Nothing here is worth saving: a new leader begins with [`Observed::new`] and hears it all again. All times are
//! of the same wall clock as `now_ms`.

use super::{
    order::{Order, OrderBody, Peer},
    standstill::{Reported, Standstill},
};
use mooncake_proto::{
    digest::Digest,
    ids::{ModelRef, NodeId},
    manifest::Seal,
    transport::{RDMA, TCP},
};
use mooncake_state::{Fence, TaskKind};
use std::{
    collections::{BTreeMap, BTreeSet},
    num::NonZeroU32,
};

/// See the module.
#[derive(Clone, Debug)]
pub struct Observed {
    /// When this master became leader, or noticed that it had been stalled itself: nobody's silence counts from
    /// before. Set by [`Observed::begin_again`].
    pub leader_since_ms: u64,
    /// Time-outs.
    pub config: PlanConfig,
    /// The nodes with an open session, whose registration is committed.
    pub sessions: BTreeMap<NodeId, Session>,
    /// The nodes whose session ended since [`Observed::leader_since_ms`]: they had found this leader, so that their
    /// silence counts at once.
    lost: BTreeSet<NodeId>,
}

/// Time-outs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanConfig {
    /// How long a new leader waits for nodes to come back before it judges silence or downloads again.
    pub reconnect_window_ms: u64,
    /// How long a suspected node has to come back before it is down.
    pub grace_ms: u64,
    /// How long an attempt may stand still on a connected node before it has failed; 0: for ever.
    pub no_progress_ms: u64,
}

impl Default for PlanConfig {
    fn default() -> Self {
        Self {
            reconnect_window_ms: 5_000,
            grace_ms: 30_000,
            no_progress_ms: 600_000,
        }
    }
}

/// One open session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// As registered.
    pub incarnation: u64,
    /// When it was opened.
    pub opened_ms: u64,
    /// Everything held has been named.
    pub inventory_complete: bool,
    /// The last measurement of its disk.
    pub space: Option<Space>,
    /// Model versions that it wants to fetch at once at most; none: it did not say.
    pub max_transfers: Option<NonZeroU32>,
    /// What it holds. What is absent is not in the map.
    pub holdings: BTreeMap<ModelRef, Held>,
    /// What it said in this session that it does not hold (any more).
    pub absent: BTreeSet<ModelRef>,
    /// Of what it reported in this session, before its inventory was complete, that it holds all.
    pub reported: BTreeSet<ModelRef>,
    /// The last order per artifact in this session.
    pub sent: BTreeMap<ModelRef, Sent>,
    /// How the last copy of each model version came, as far as it has: of those that the cluster knows. The same process of
    /// a node says it again in its next session; one that was restarted has forgotten it.
    pub carried: BTreeMap<ModelRef, Carried>,
}

/// How the bytes of one copy came from peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// Of the attempt that fetched them.
    pub fence: Fence,
    /// All of them, repeats included.
    pub bytes: u64,
    /// Of these, by RDMA.
    pub rdma_bytes: u64,
}

impl Carried {
    /// By name, the better one first; none if nothing came.
    pub fn transports(&self) -> Vec<&'static str> {
        let by = [
            (RDMA, self.rdma_bytes),
            (TCP, self.bytes.saturating_sub(self.rdma_bytes)),
        ];
        by.into_iter()
            .filter(|(_, bytes)| *bytes > 0)
            .map(|(name, _)| name)
            .collect()
    }
}

/// A measurement of a node's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Size of the filesystem.
    pub capacity_bytes: u64,
    /// Free.
    pub free_bytes: u64,
    /// When it came in.
    pub measured_ms: u64,
}

/// What a node holds of one artifact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Of the artifact.
    pub generation: u64,
    /// Of the artifact.
    pub manifest: Digest,
    /// How much.
    pub state: HeldState,
    /// Bytes whose digest held.
    pub verified_bytes: u64,
    /// What its own digest list reproduces, once whole.
    pub seal: Option<Seal>,
    /// The final folder, once staged.
    pub local_path: String,
    /// The highest fence it obeyed for this artifact.
    pub fence: Fence,
    /// What was recorded before a restart is still being checked: it may have more than it says.
    pub rehashing: bool,
    /// It was part of the inventory at the beginning of the session, and nothing was said of it since. Set by
    /// [`Session::hold`].
    pub from_inventory: bool,
}

/// How much a node holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HeldState {
    /// Some verified blocks.
    Partial,
    /// Every block, not published.
    Whole,
    /// Published.
    Staged,
}

/// The last order sent for one artifact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    /// Its fence.
    pub fence: Fence,
    /// The task it began, as far as it still runs; `None` after a revoke or delete, and once it reported its end.
    pub running: Option<TaskKind>,
    /// The seal it was told.
    pub seal: Option<Seal>,
    /// The peers it was told.
    pub peers: Vec<Peer>,
    /// Since when it gets nowhere.
    pub standstill: Standstill,
    /// A delete was sent: once is enough in one session.
    pub deleted: bool,
}

impl Observed {
    /// What a new leader knows: nothing.
    pub fn new(leader_since_ms: u64, config: PlanConfig) -> Self {
        Self {
            leader_since_ms,
            config,
            sessions: BTreeMap::new(),
            lost: BTreeSet::new(),
        }
    }

    /// This master was stalled itself: whatever it believes of the nodes' silence may be its own.
    pub fn begin_again(&mut self, now_ms: u64) {
        self.leader_since_ms = now_ms;
        self.lost.clear();
    }

    /// A node registered (the command is committed): its session begins. An older one of the same node is replaced.
    pub fn open(&mut self, node: NodeId, incarnation: u64, now_ms: u64) -> &mut Session {
        let session = Session {
            incarnation,
            opened_ms: now_ms,
            inventory_complete: false,
            space: None,
            max_transfers: None,
            holdings: BTreeMap::new(),
            absent: BTreeSet::new(),
            reported: BTreeSet::new(),
            sent: BTreeMap::new(),
            carried: BTreeMap::new(),
        };
        self.lost.remove(&node);
        self.sessions.insert(node.clone(), session);
        self.sessions.get_mut(&node).expect("just inserted")
    }

    /// The session ended.
    pub fn close(&mut self, node: &NodeId) {
        if self.sessions.remove(node).is_some() {
            self.lost.insert(node.clone());
        }
    }

    /// An order was handed to the node's session.
    pub fn sent(&mut self, node: &NodeId, order: &Order, now_ms: u64) {
        if let Some(session) = self.sessions.get_mut(node) {
            session.sent(order, now_ms);
        }
    }

    /// From when on the silence of a node without a session counts: at once if this leader had a session with it,
    /// else when it had the time to find this leader.
    pub(super) fn silence_counts_from_ms(&self, node: &NodeId) -> u64 {
        match self.lost.contains(node) {
            true => self.leader_since_ms,
            false => self.window_end_ms(),
        }
    }

    /// Until when a node that has not come back may still be on its way to a new leader.
    pub(super) fn window_end_ms(&self) -> u64 {
        self.leader_since_ms
            .saturating_add(self.config.reconnect_window_ms)
    }
}

impl Session {
    /// The node named what it holds of `model`; `None`: nothing any more.
    pub fn hold(&mut self, model: ModelRef, held: Option<Held>) {
        match held {
            Some(mut held) => {
                let late = !self.inventory_complete && self.reported.contains(&model);
                held.from_inventory = !self.inventory_complete && !late;
                self.absent.remove(&model);
                let known = self.holdings.get(&model);
                if late && known.is_some_and(|k| k.state > held.state && k.fence >= held.fence) {
                    return;
                }
                self.holdings.insert(model, held);
            }
            None => {
                self.holdings.remove(&model);
                self.carried.remove(&model);
                self.absent.insert(model);
            }
        }
    }

    /// A task reported its end. Call it before the report is proposed, so that what is held is never behind what
    /// is committed.
    pub fn task_ended(&mut self, model: &ModelRef, fence: Fence, staged: Option<StagedReport>) {
        if let Some(sent) = self.sent_mut(model, fence) {
            sent.running = None;
        }
        if let Some(report) = staged {
            let held = Held {
                generation: report.generation,
                manifest: report.manifest,
                state: HeldState::Staged,
                verified_bytes: report.total_size_bytes,
                seal: Some(report.seal),
                local_path: report.local_path,
                fence,
                rehashing: false,
                from_inventory: false,
            };
            self.holdings.insert(model.clone(), held);
            self.absent.remove(model);
            self.reported(model);
        }
    }

    /// A report said what is held: a frame of the inventory that was made before it and comes after it is old news.
    fn reported(&mut self, model: &ModelRef) {
        if !self.inventory_complete {
            self.reported.insert(model.clone());
        }
    }

    /// The download holds every byte: see [`Session::task_ended`] for when to call it.
    pub fn acquired(&mut self, model: &ModelRef, seal: Seal) {
        self.absent.remove(model);
        self.reported(model);
        if let Some(held) = self.holdings.get_mut(model) {
            held.state = held.state.max(HeldState::Whole);
            held.seal = Some(seal);
            held.from_inventory = false;
        }
    }

    /// See [`Observed::sent`].
    pub fn sent(&mut self, order: &Order, now_ms: u64) {
        let begun = Sent::new(order.fence, now_ms);
        let begun = match &order.body {
            OrderBody::Acquire(_) => Sent {
                running: Some(TaskKind::Acquire),
                ..begun
            },
            OrderBody::Replicate { peers, seal, .. } => Sent {
                running: Some(TaskKind::Replicate),
                seal: *seal,
                peers: peers.clone(),
                ..begun
            },
            OrderBody::Revoke { .. } => begun,
            OrderBody::Delete { .. } => Sent {
                deleted: true,
                ..begun
            },
            // These begin nothing: without its order in this session a task would look as if it had been ordered.
            OrderBody::PeersChanged { .. } | OrderBody::Sealed { .. } => {
                if let Some(sent) = self.sent_mut(&order.model, order.fence) {
                    match &order.body {
                        OrderBody::PeersChanged { peers } => {
                            sent.standstill.peers_changed(&sent.peers, peers, now_ms);
                            sent.peers = peers.clone();
                        }
                        OrderBody::Sealed { seal } => {
                            sent.standstill.sealed(now_ms);
                            sent.seal = Some(*seal);
                        }
                        _ => {}
                    }
                }
                return;
            }
        };
        self.sent.insert(order.model.clone(), begun);
    }

    fn sent_mut(&mut self, model: &ModelRef, fence: Fence) -> Option<&mut Sent> {
        self.sent.get_mut(model).filter(|sent| sent.fence == fence)
    }

    /// The running attempt is this far.
    pub fn moved(&mut self, model: &ModelRef, fence: Fence, reported: Reported, now_ms: u64) {
        if let Some(sent) = self.sent_mut(model, fence) {
            sent.standstill.reported(reported, now_ms);
        }
    }

    /// A copy told how its bytes came so far.
    pub fn carried(&mut self, model: &ModelRef, carried: Carried) {
        let known = self.carried.get(model);
        if known.is_none_or(|known| known.fence <= carried.fence) {
            self.carried.insert(model.clone(), carried);
        }
    }

    /// An attempt reads the model from its source: what an earlier one copied counts no more.
    pub fn read_from_source(&mut self, model: &ModelRef, fence: Fence) {
        if self.carried.get(model).is_some_and(|known| known.fence < fence) {
            self.carried.remove(model);
        }
    }
}

/// What a task that staged reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagedReport {
    /// Of the artifact.
    pub generation: u64,
    /// Of the artifact.
    pub manifest: Digest,
    /// Of the artifact.
    pub total_size_bytes: u64,
    /// What the node's digest list reproduces.
    pub seal: Seal,
    /// The final folder.
    pub local_path: String,
}

impl Sent {
    fn new(fence: Fence, now_ms: u64) -> Self {
        Self {
            fence,
            standstill: Standstill::new(now_ms),
            running: None,
            seal: None,
            peers: Vec::new(),
            deleted: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_copy_says_how_it_came() {
        let carried = |attempt, bytes, rdma_bytes| Carried {
            fence: Fence {
                attempt,
                ..Fence::default()
            },
            bytes,
            rdma_bytes,
        };
        for (bytes, rdma_bytes, says) in [
            (0, 0, &[][..]),
            (5, 0, &[TCP]),
            (5, 5, &[RDMA]),
            (5, 2, &[RDMA, TCP]),
            // What a node says makes no sense: it is no master's end.
            (2, 5, &[RDMA]),
        ] {
            assert_eq!(carried(1, bytes, rdma_bytes).transports(), says);
        }

        let mut observed = Observed::new(0, PlanConfig::default());
        let session = observed.open(NodeId::parse("127.0.0.1:25001").unwrap(), 1, 0);
        let model = ModelRef {
            model_id: "org/m".into(),
            revision: "r1".into(),
            format: "bin".into(),
            provider: "local".into(),
        };
        for (said, transports) in [
            (carried(2, 1, 0), &[TCP][..]),
            (carried(2, 2, 1), &[RDMA, TCP]),
            (carried(1, 9, 9), &[RDMA, TCP]),
            (carried(3, 9, 9), &[RDMA]),
        ] {
            session.carried(&model, said);
            assert_eq!(session.carried[&model].transports(), transports, "{said:?}");
        }
        session.hold(model.clone(), None);
        assert!(session.carried.is_empty(), "what is gone came by nothing");
        session.carried(&model, carried(4, 1, 0));
        session.read_from_source(&model, carried(4, 0, 0).fence);
        assert!(!session.carried.is_empty(), "it said so of this very attempt");
        session.read_from_source(&model, carried(5, 0, 0).fence);
        assert!(session.carried.is_empty(), "a later attempt read it from outside");
    }
}
