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

        if kind == pb::TaskKind::Replicate && artifact.is_some() {
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
mod tests {
    use super::*;

    fn node() -> NodeId {
        NodeId::parse("127.0.0.1:25001").unwrap()
    }

    fn led() -> Facts {
        let mut facts = Facts::default();
        facts.begin(3, 1000, PlanConfig::default());
        facts
    }

    fn claim(facts: &mut Facts, store: &str) -> (Claim, CancellationToken, mpsc::Receiver<Order>) {
        let (tx, rx) = mpsc::channel(1);
        let cancel = CancellationToken::new();
        (facts.claim(3, &node(), store, tx, cancel.clone()), cancel, rx)
    }

    fn space() -> Space {
        Space {
            capacity_bytes: 10,
            free_bytes: 5,
            measured_ms: 1,
        }
    }

    #[test]
    fn one_client_per_node_id_and_the_same_client_replaces_itself() {
        let mut facts = led();
        let (first, cancel, _rx) = claim(&mut facts, "a");
        let Claim::Granted { number } = first else {
            panic!("{first:?}")
        };
        assert_eq!(claim(&mut facts, "b").0, Claim::Taken);
        assert!(!cancel.is_cancelled());
        let (again, _, _rx) = claim(&mut facts, "a");
        assert_eq!(again, Claim::Granted { number: number + 1 });
        assert!(cancel.is_cancelled(), "the old session ends");
        assert!(
            !facts.open(&node(), number, 1, space(), 0),
            "and can no longer open"
        );
        assert!(facts.open(&node(), number + 1, 1, space(), 0));
        facts.lost(&node(), number, Instant::now());
        assert_eq!(
            facts.count(),
            1,
            "the end of the old stream does not end the new session"
        );
        facts.lost(&node(), number + 1, Instant::now());
        assert_eq!(facts.count(), 0);
        assert!(
            matches!(claim(&mut facts, "b").0, Claim::Granted { .. }),
            "a lost one does not keep the id"
        );
    }

    #[test]
    fn a_claim_belongs_to_a_term_and_the_end_of_it_ends_sessions() {
        let mut facts = led();
        let (_, cancel, _rx) = claim(&mut facts, "a");
        facts.begin(3, 2000, PlanConfig::default());
        assert!(!cancel.is_cancelled(), "the same term begins once");
        facts.end(2);
        assert!(!cancel.is_cancelled());
        facts.end(3);
        assert!(cancel.is_cancelled());
        assert_eq!(claim(&mut facts, "a").0, Claim::NotLeader);
        facts.begin(3, 3000, PlanConfig::default());
        assert_eq!(
            claim(&mut facts, "a").0,
            Claim::NotLeader,
            "a term that ended does not begin again"
        );
    }

    #[test]
    fn a_short_interruption_is_no_event() {
        let mut facts = led();
        let (claimed, _, _rx) = claim(&mut facts, "a");
        let Claim::Granted { number } = claimed else {
            panic!()
        };
        facts.open(&node(), number, 1, space(), 0);
        let at = Instant::now();
        facts.lost(&node(), number, at);
        let second = Duration::from_secs(1);
        assert!(facts.close_lost(at, second).is_empty());
        assert!(facts.observed.sessions.contains_key(&node()));
        assert_eq!(facts.close_lost(at + second, second), [node()]);
        assert!(!facts.observed.sessions.contains_key(&node()));
    }

    /// A node under a claim and a registration, and one job that names it.
    fn with_job() -> (Facts, State, u64) {
        use mooncake_proto::{digest::Digest, manifest::*};
        let mut facts = led();
        let (Claim::Granted { number }, ..) = claim(&mut facts, "a") else {
            panic!()
        };
        facts.open(&node(), number, 1, space(), 0);
        let mut state = State::new();
        let about = mooncake_state::NodeAbout::default();
        let register = Command::RegisterNode {
            node: node(),
            store_id: "a".into(),
            expected_incarnation: 0,
            about,
            now_ms: 1,
        };
        state.apply(1, &register);
        let model = ModelRef {
            model_id: "m".into(),
            revision: "r".into(),
            format: "f".into(),
            provider: "p".into(),
        };
        let manifest = Manifest {
            model: model.clone(),
            file_manifest_version: "v1".into(),
            total_size_bytes: 0,
            files: vec![],
        };
        let create = mooncake_state::CreateJob {
            job: mooncake_proto::ids::JobId("j".into()),
            request_digest: Digest::sha256(b"j"),
            model,
            manifest: mooncake_state::BlobRef::Inline(manifest.encode().into()),
            sources: mooncake_state::BlobRef::Inline(Sources(vec![]).encode().into()),
            block_size_bytes: 1 << 18,
            algorithm: Default::default(),
            seed: node(),
            targets: vec![node()],
            target_replica_count: 1,
            max_attempts: 1,
            deadline_ms: None,
            warnings: vec![],
            now_ms: 2,
        };
        let reply = state.apply(2, &Command::CreateJob(Box::new(create))).reply;
        assert_eq!(reply, mooncake_state::Reply::Job { created: true });
        (facts, state, number)
    }

    #[test]
    fn a_goodbye_only_costs_the_grace_when_it_costs_nobody_a_job() {
        let status = |command: &Command| match command {
            Command::SetNodeStatus { status, reason, .. } => {
                assert!(reason.contains("it left: restarted"), "{reason}");
                *status
            }
            other => panic!("{other:?}"),
        };
        let (mut facts, mut state, number) = with_job();
        facts.goodbye(&state, &node(), number, "restarted", 3);
        let said = facts.take_pending();
        assert_eq!(
            said.iter().map(status).collect::<Vec<_>>(),
            [NodeStatus::Suspected]
        );
        // The verdict is on its way while the client is back already: it must write its registration.
        assert!(facts.has_left(&node()));
        let (Claim::Granted { number }, ..) = claim(&mut facts, "a") else {
            panic!()
        };
        facts.open(&node(), number, 1, space(), 4);
        assert!(!facts.has_left(&node()));

        let cancel = Command::CancelJob {
            job: mooncake_proto::ids::JobId("j".into()),
            progress: vec![],
            now_ms: 5,
        };
        state.apply(3, &cancel);
        facts.goodbye(&state, &node(), number, "restarted", 6);
        let said = facts.take_pending();
        assert_eq!(said.iter().map(status).collect::<Vec<_>>(), [NodeStatus::Down]);
    }

    #[test]
    fn what_a_node_names_is_bounded() {
        let mut facts = led();
        let (Claim::Granted { number }, ..) = claim(&mut facts, "a") else {
            panic!()
        };
        facts.open(&node(), number, 1, space(), 0);
        let named = |i: usize| pb::ModelRef {
            model_id: format!("m{i}"),
            ..Default::default()
        };
        let now = (Instant::now(), 5);
        let absent = (0..=MAX_HOLDINGS).map(|i| pb::Holding {
            model: Some(named(i)),
            state: pb::HoldingState::Absent as i32,
            ..Default::default()
        });
        assert!(
            facts
                .holdings(&node(), number, absent.collect(), false, now)
                .is_err()
        );

        let (metrics, state) = (Metrics::new(), State::new());
        let mut report = |model: pb::ModelRef| {
            let report = pb::TaskReport {
                model: Some(model),
                fence: Some(pb::Fence::default()),
                outcome: pb::TaskOutcome::Running as i32,
                ..Default::default()
            };
            facts.report(&state, &metrics, &node(), number, report, now)
        };
        for i in 0..MAX_TASKS {
            report(named(i)).unwrap();
        }
        assert!(report(named(MAX_TASKS)).is_err());
        report(named(0)).unwrap();
        let mut long = named(0);
        long.revision = "r".repeat(257);
        assert!(report(long).is_err());
    }

    /// The node refuses the order of a leader that was replaced, while it works for the next one.
    #[test]
    fn a_refusal_of_what_was_overtaken_leaves_the_running_task_alone() {
        let (mut facts, state, number) = with_job();
        let metrics = Metrics::new();
        let model = state.wanted_models().next().unwrap().clone();
        let mut report = |attempt: u64, outcome: pb::TaskOutcome, verified_bytes: u64| {
            let report = pb::TaskReport {
                model: Some(model.clone().into()),
                generation: 1,
                fence: Some(pb::Fence {
                    recovery_epoch: 0,
                    attempt,
                }),
                outcome: outcome as i32,
                verified_bytes,
                objects_done: 3,
                failure: Some(pb::Failure::default()),
                ..Default::default()
            };
            let heard = (Instant::now(), 5);
            facts
                .report(&state, &metrics, &node(), number, report, heard)
                .unwrap();
            facts.progress(&model, &node())
        };
        // The model has no bytes: that is as many as can be verified.
        let running = report(4, pb::TaskOutcome::Running, 100).unwrap();
        assert_eq!(
            (running.verified_bytes, running.objects_done, running.running),
            (0, 3, true)
        );
        assert_eq!(report(3, pb::TaskOutcome::Failed, 0), Some(running));
        assert_eq!(report(4, pb::TaskOutcome::Failed, 0), None, "its own end ends it");
        assert_eq!(facts.take_pending().len(), 2, "the state decides on both");
    }

    #[test]
    fn reports_are_checked_and_ends_wait_for_the_log_in_order() {
        let mut facts = led();
        let metrics = Metrics::new();
        let state = State::new();
        let (claimed, _, _rx) = claim(&mut facts, "a");
        let Claim::Granted { number } = claimed else {
            panic!()
        };
        facts.open(&node(), number, 7, space(), 0);
        let model = pb::ModelRef {
            model_id: "m".into(),
            revision: "r".into(),
            format: "f".into(),
            provider: "p".into(),
        };
        let base = pb::TaskReport {
            model: Some(model.clone()),
            generation: 1,
            fence: Some(pb::Fence {
                recovery_epoch: 0,
                attempt: 4,
            }),
            kind: pb::TaskKind::Acquire as i32,
            outcome: pb::TaskOutcome::Running as i32,
            verified_bytes: 100,
            objects_done: 2,
            ..Default::default()
        };
        let now = (Instant::now(), 5);
        let mut report = |r: pb::TaskReport| facts.report(&state, &metrics, &node(), number, r, now);
        report(base.clone()).unwrap();
        let seal = pb::Seal {
            block_size_bytes: 1 << 18,
            algorithm: 1,
            root: vec![1; 32].into(),
        };
        let with = |outcome: pb::TaskOutcome| pb::TaskReport {
            outcome: outcome as i32,
            ..base.clone()
        };
        assert!(report(with(pb::TaskOutcome::Acquired)).is_err(), "no seal");
        assert!(report(with(pb::TaskOutcome::Failed)).is_err(), "no reason");
        assert!(
            report(pb::TaskReport {
                model: None,
                ..base.clone()
            })
            .is_err()
        );
        report(pb::TaskReport {
            seal: Some(seal.clone()),
            ..with(pb::TaskOutcome::Acquired)
        })
        .unwrap();
        report(pb::TaskReport {
            seal: Some(seal),
            local_path: "/x".into(),
            ..with(pb::TaskOutcome::Staged)
        })
        .unwrap();
        let names: Vec<_> = facts.take_pending().iter().map(Command::name).collect();
        assert_eq!(names, ["seal", "report_staged"]);
        assert!(facts.take_pending().is_empty());
        // Of a session that was replaced nothing counts.
        facts
            .report(&state, &metrics, &node(), number + 1, base, now)
            .unwrap();
        assert!(facts.progress(&model.into(), &node()).is_none());
    }
}
