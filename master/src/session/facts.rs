//! The facts that connected nodes told the leader, and who is connected.
//!
//! Nothing here is worth saving. It belongs to one term: a new one begins with nothing and hears it all again.

use super::{convert, meter::Meter};
use crate::{
    metrics::{self, Metrics},
    plan::{Carried, HeldState, Observed, Order, PlanConfig, Reported, Space, StagedReport},
};
use mooncake_proto::{
    api::NodeStatus,
    ids::{ModelRef, NodeId},
    pb::session as pb,
};
use mooncake_state::{Command, Failure, Fence, Live, LiveProgress, ReportId, State, Transfers};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    num::NonZeroU32,
    time::{Duration, Instant},
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Reports that wait for the log, over all nodes: each is a task's end, so this is the number of tasks that may
/// end at one moment. A session that would exceed it is closed and reports again.
const MAX_PENDING_REPORTS: usize = 65_536;
/// Model versions one node may name.
const MAX_HOLDINGS: usize = 100_000;
/// Tasks of one node that have not ended: more than live jobs could want of it.
const MAX_TASKS: usize = 100_000;
/// Bad sources of one report that are logged.
const MAX_BAD_SOURCES: usize = 16;

/// See the module docs.
pub(crate) struct Facts {
    /// The term these facts belong to; 0: this master does not lead.
    term: u64,
    /// The last term that ended: it does not begin again.
    ended: u64,
    pub(crate) observed: Observed,
    connected: BTreeMap<NodeId, Connected>,
    tasks: BTreeMap<NodeId, BTreeMap<ModelRef, Task>>,
    pending: VecDeque<Command>,
    /// Nodes that said goodbye. Bounded by those that were connected in this term.
    left: BTreeSet<NodeId>,
    next_number: u64,
}

/// A client under a node id: from its claim on, even if its registration is not committed yet.
struct Connected {
    /// Which session; later ones of the same node have higher numbers.
    number: u64,
    store_id: String,
    orders: mpsc::Sender<Order>,
    /// Ends the session.
    cancel: CancellationToken,
    /// The stream ended: the session is only kept so that a short interruption is no event.
    lost: Option<Instant>,
}

/// What a node said of one of its tasks.
#[derive(Default)]
struct Task {
    fence: Fence,
    verified_bytes: u64,
    objects_done: u64,
    fetched_bytes: u64,
    refetched_bytes: u64,
    meter: Meter,
}

/// What became of a claim to a node id.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// It is the only client under this id now.
    Granted { number: u64 },
    /// Another live client has it, with another data folder.
    Taken,
    /// This master leads in another term, or not at all.
    NotLeader,
}

/// Why a session must end.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Violation(pub String);

impl Default for Facts {
    fn default() -> Self {
        Self {
            term: 0,
            ended: 0,
            observed: Observed::new(0, PlanConfig::default()),
            connected: BTreeMap::new(),
            tasks: BTreeMap::new(),
            pending: VecDeque::new(),
            left: BTreeSet::new(),
            next_number: 1,
        }
    }
}

impl Facts {
    /// Whether `term` is new here.
    pub(crate) fn is_new(&self, term: u64) -> bool {
        term > self.term.max(self.ended)
    }

    /// This master leads in `term`: forgets everything, unless it is already at it or past it.
    pub(crate) fn begin(&mut self, term: u64, now_ms: u64, config: PlanConfig) {
        if self.is_new(term) {
            self.clear();
            self.term = term;
            self.observed = Observed::new(now_ms, config);
        }
    }

    /// This master leads no more.
    pub(crate) fn end(&mut self, term: u64) {
        if self.term == term {
            self.clear();
        }
    }

    fn clear(&mut self) {
        for connected in self.connected.values() {
            connected.cancel.cancel();
        }
        let ended = self.ended.max(self.term);
        *self = Self {
            next_number: self.next_number,
            ended,
            ..Self::default()
        };
    }

    pub(crate) fn count(&self) -> usize {
        self.connected.values().filter(|c| c.lost.is_none()).count()
    }

    pub(super) fn claim(
        &mut self,
        term: u64,
        node: &NodeId,
        store_id: &str,
        orders: mpsc::Sender<Order>,
        cancel: CancellationToken,
    ) -> Claim {
        if self.term != term {
            return Claim::NotLeader;
        }
        if let Some(old) = self.connected.get(node) {
            if old.lost.is_none() && old.store_id != store_id {
                return Claim::Taken;
            }
            // The same client came back before the end of its old stream was noticed.
            old.cancel.cancel();
        }
        let number = self.next_number;
        self.next_number += 1;
        let connected = Connected {
            number,
            store_id: store_id.to_owned(),
            orders,
            cancel,
            lost: None,
        };
        self.connected.insert(node.clone(), connected);
        Claim::Granted { number }
    }

    /// Whether some live client has this node id.
    pub(super) fn is_connected(&self, node: &NodeId) -> bool {
        self.connected.get(node).is_some_and(|c| c.lost.is_none())
    }

    /// Gives a claim up whose registration was not committed.
    pub(super) fn release(&mut self, node: &NodeId, number: u64) {
        if self.is_current(node, number) {
            self.forget(node);
        }
    }

    /// Whether the node said goodbye and has not registered since: the verdict on it may still be on its way into the
    /// log, and only a registration after it, in the log too, makes it void.
    pub(super) fn has_left(&self, node: &NodeId) -> bool {
        self.left.contains(node)
    }

    fn is_current(&self, node: &NodeId, number: u64) -> bool {
        self.connected.get(node).is_some_and(|c| c.number == number)
    }

    /// The node's registration is committed. `false`: the session was replaced meanwhile.
    pub(super) fn open(
        &mut self,
        node: &NodeId,
        number: u64,
        incarnation: u64,
        space: Space,
        now_ms: u64,
    ) -> bool {
        if !self.is_current(node, number) {
            return false;
        }
        self.tasks.remove(node);
        self.left.remove(node);
        self.observed.open(node.clone(), incarnation, now_ms).space = Some(space);
        true
    }

    /// The node wants to fetch only so many model versions at once; none: as many as there are.
    pub(super) fn limit_transfers(&mut self, node: &NodeId, most: Option<NonZeroU32>) {
        if let Some(session) = self.observed.sessions.get_mut(node) {
            session.max_transfers = most;
        }
    }

    /// The stream ended.
    pub(super) fn lost(&mut self, node: &NodeId, number: u64, now: Instant) {
        if let Some(connected) = self.connected.get_mut(node).filter(|c| c.number == number) {
            connected.lost = Some(now);
        }
    }

    /// The node said goodbye. It is down at once if nobody would notice; else it is only suspected: it may be back
    /// after a moment, as after a crash, and goes on within the grace.
    pub(super) fn goodbye(&mut self, state: &State, node: &NodeId, number: u64, reason: &str, now_ms: u64) {
        if !self.is_current(node, number) {
            return;
        }
        // Both together, under this lock: the planner must not see it gone and call it suspected.
        self.forget(node);
        self.left.insert(node.clone());
        let status = match state.is_needed(node) {
            true => NodeStatus::Suspected,
            false => NodeStatus::Down,
        };
        let past = [status, NodeStatus::Down];
        if let Some(record) = state.node(node).filter(|n| !past.contains(&n.status)) {
            self.pending.push_back(Command::SetNodeStatus {
                node: node.clone(),
                incarnation: record.incarnation,
                seen_since_ms: record.since_ms,
                status,
                reason: format!("it left: {}", convert::bounded(reason.to_owned())),
                now_ms,
            });
        }
    }

    fn forget(&mut self, node: &NodeId) {
        self.connected.remove(node);
        self.observed.close(node);
        self.tasks.remove(node);
    }

    /// Forgets sessions that ended `after` ago and did not come back. Returns whose.
    pub(crate) fn close_lost(&mut self, now: Instant, after: Duration) -> Vec<NodeId> {
        let gone = |c: &Connected| c.lost.is_some_and(|at| now.duration_since(at) >= after);
        let nodes: Vec<_> = self
            .connected
            .iter()
            .filter(|(_, c)| gone(c))
            .map(|(n, _)| n.clone())
            .collect();
        nodes.iter().for_each(|node| self.forget(node));
        nodes
    }

    /// Hands an order to the node's session. `false`: it cannot take one now.
    pub(crate) fn send(&mut self, node: &NodeId, order: &Order, now_ms: u64) -> bool {
        let connected = self.connected.get(node).filter(|c| c.lost.is_none());
        let sent = connected.is_some_and(|c| c.orders.try_send(order.clone()).is_ok());
        if sent {
            self.observed.sent(node, order, now_ms);
        }
        sent
    }

    /// Takes the reports that wait for the log.
    pub(crate) fn take_pending(&mut self) -> Vec<Command> {
        self.pending.drain(..).collect()
    }

    /// Puts back what found no way into the log, before what came since.
    pub(crate) fn put_back(&mut self, commands: Vec<Command>) {
        commands
            .into_iter()
            .rev()
            .for_each(|c| self.pending.push_front(c));
    }

    pub(super) fn heartbeat(&mut self, node: &NodeId, number: u64, free_bytes: u64, now_ms: u64) {
        if !self.is_current(node, number) {
            return;
        }
        if let Some(space) = self
            .observed
            .sessions
            .get_mut(node)
            .and_then(|s| s.space.as_mut())
        {
            space.free_bytes = free_bytes;
            space.measured_ms = now_ms;
        }
    }

    /// What the node holds.
    pub(super) fn holdings(
        &mut self,
        node: &NodeId,
        number: u64,
        holdings: Vec<pb::Holding>,
        complete: bool,
        (now, now_ms): (Instant, u64),
    ) -> Result<(), Violation> {
        if !self.is_current(node, number) {
            return Ok(());
        }
        let Some(session) = self.observed.sessions.get_mut(node) else {
            return Ok(());
        };
        for holding in holdings {
            let (model, held) = convert::holding(holding).map_err(Violation)?;
            if let Some(held) = held.as_ref().filter(|h| h.state == HeldState::Partial)
                && let Some(task) = self.tasks.get_mut(node).and_then(|tasks| tasks.get_mut(&model))
            {
                task.verified_bytes = held.verified_bytes;
                task.meter.add(now, held.verified_bytes);
                let reported = Reported {
                    verified_bytes: held.verified_bytes,
                    ..Reported::default()
                };
                session.moved(&model, task.fence, reported, now_ms);
            }
            session.hold(model, held);
        }
        if session.holdings.len() + session.absent.len() > MAX_HOLDINGS {
            return Err(Violation(format!(
                "it names more than {MAX_HOLDINGS} model versions"
            )));
        }
        session.inventory_complete |= complete;
        Ok(())
    }

    /// A task's progress, or its end: the end waits for the log.
    pub(super) fn report(
        &mut self,
        state: &State,
        metrics: &Metrics,
        node: &NodeId,
        number: u64,
        report: pb::TaskReport,
        (now, now_ms): (Instant, u64),
    ) -> Result<(), Violation> {
        if !self.is_current(node, number) {
            return Ok(());
        }
        let Some(session) = self.observed.sessions.get_mut(node) else {
            return Ok(());
        };
        let (outcome, kind) = (report.outcome(), report.kind());
        let model = report
            .model
            .ok_or_else(|| Violation("a report without a model".into()))?;
        let model = convert::model(model).map_err(Violation)?;
        let fence: Fence = report
            .fence
            .ok_or_else(|| Violation("a report without a fence".into()))?
            .into();
        let seal = report.seal.map(convert::seal).transpose().map_err(Violation)?;
        let id = ReportId {
            model: model.clone(),
            generation: report.generation,
            node: node.clone(),
            incarnation: session.incarnation,
            fence,
        };
        for bad in report.bad_sources.iter().take(MAX_BAD_SOURCES) {
            metrics.bad_sources.inc();
            tracing::warn!(%node, %model, source = bad.source, reason = bad.reason, "a node reports a bad source");
        }

        let artifact = state
            .artifact(&model)
            .filter(|a| a.generation == report.generation);
        // More than there is is no progress of anything.
        let total_bytes = artifact.map_or(u64::MAX, |a| a.total_size_bytes);
        let verified_bytes = report.verified_bytes.min(total_bytes);
        let tasks = self.tasks.entry(node.clone()).or_default();
        if tasks.len() >= MAX_TASKS && !tasks.contains_key(&model) {
            return Err(Violation(format!(
                "it reports more than {MAX_TASKS} tasks at once"
            )));
        }
        let task = tasks.entry(model.clone()).or_default();
        // The refusal of an order that a later one has overtaken says nothing of the task that runs.
        let is_overtaken = fence < task.fence;
        if fence > task.fence {
            *task = Task {
                fence,
                ..Task::default()
            };
        }
        let from = if kind == pb::TaskKind::Acquire {
            metrics::From::Source
        } else {
            metrics::From::Peer
        };
        if !is_overtaken {
            metrics.fetched(from, report.fetched_bytes.saturating_sub(task.fetched_bytes));
            metrics
                .refetched_bytes
                .inc_by(report.refetched_bytes.saturating_sub(task.refetched_bytes));
            task.fetched_bytes = task.fetched_bytes.max(report.fetched_bytes);
            task.refetched_bytes = task.refetched_bytes.max(report.refetched_bytes);
            task.verified_bytes = verified_bytes;
            task.objects_done = report.objects_done;
            task.meter.add(now, verified_bytes);
        }
        let reported = Reported {
            verified_bytes,
            checked_bytes: report.checked_bytes,
        };
        session.moved(&model, fence, reported, now_ms);

        if kind == pb::TaskKind::Acquire {
            session.read_from_source(&model, fence);
        } else if kind == pb::TaskKind::Replicate && artifact.is_some() {
            let carried = Carried {
                fence,
                bytes: report.fetched_bytes,
                rdma_bytes: report.rdma_bytes,
            };
            session.carried(&model, carried);
        }

        let missing = |what: &str| Violation(format!("a report of {outcome:?} without {what}"));
        let command = match outcome {
            pb::TaskOutcome::Running => return Ok(()),
            pb::TaskOutcome::Unspecified => return Err(Violation("a report without an outcome".into())),
            pb::TaskOutcome::Acquired => {
                let seal = seal.ok_or_else(|| missing("a seal"))?;
                session.acquired(&model, seal);
                Command::Seal {
                    report: id,
                    seal,
                    now_ms,
                }
            }
            pb::TaskOutcome::Staged => {
                let seal = seal.ok_or_else(|| missing("a seal"))?;
                let local_path = convert::bounded(report.local_path);
                let staged = artifact.map(|a| StagedReport {
                    generation: a.generation,
                    manifest: a.manifest,
                    total_size_bytes: a.total_size_bytes,
                    seal,
                    local_path: local_path.clone(),
                });
                session.task_ended(&model, fence, staged);
                if !is_overtaken {
                    tasks.remove(&model);
                }
                let checksum_verified = report.checksum_verified;
                Command::ReportStaged {
                    report: id,
                    seal,
                    local_path,
                    checksum_verified,
                    now_ms,
                }
            }
            pb::TaskOutcome::Failed => {
                let failure = report.failure.ok_or_else(|| missing("a reason"))?;
                session.task_ended(&model, fence, None);
                if !is_overtaken {
                    tasks.remove(&model);
                }
                let failure = Failure {
                    code: convert::bounded(failure.code),
                    message: convert::bounded(failure.message),
                    retryable: failure.retryable,
                };
                Command::ReportFailed {
                    report: id,
                    failure,
                    verified_bytes,
                    now_ms,
                }
            }
        };
        if self.pending.len() >= MAX_PENDING_REPORTS {
            return Err(Violation("too many reports wait for the log".into()));
        }
        self.pending.push_back(command);
        Ok(())
    }
}

impl Live for Facts {
    fn progress(&self, model: &ModelRef, node: &NodeId) -> Option<LiveProgress> {
        let held = self
            .observed
            .sessions
            .get(node)
            .and_then(|s| s.holdings.get(model));
        let task = self.tasks.get(node).and_then(|tasks| tasks.get(model));
        if held.is_none() && task.is_none() {
            return None;
        }
        Some(LiveProgress {
            verified_bytes: task
                .map(|t| t.verified_bytes)
                .max(held.map(|h| h.verified_bytes))
                .unwrap_or(0),
            objects_done: task.map_or(0, |t| t.objects_done),
            bytes_per_second: task.map_or(0, |t| t.meter.rate(Instant::now())),
            running: task.is_some(),
        })
    }

    fn transports(&self, model: &ModelRef, node: &NodeId) -> Vec<&'static str> {
        let session = self.observed.sessions.get(node);
        session
            .and_then(|session| session.carried.get(model))
            .map(Carried::transports)
            .unwrap_or_default()
    }

    fn free_bytes(&self, node: &NodeId) -> Option<u64> {
        Some(self.observed.sessions.get(node)?.space?.free_bytes)
    }

    fn transfers(&self, state: &State, node: &NodeId) -> Option<Transfers> {
        self.observed.transfers(state, node)
    }
}

#[cfg(test)]
mod tests;
