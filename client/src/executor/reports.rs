//! What this node has to say of its tasks: live progress, and outcomes that are kept until an order makes
//! them moot.
//!
//! Guaranteed: an outcome is said again to every master that the node registers with, until a later order for
//! the artifact, a revoke or a delete; however long no master is there. Not guaranteed: across a restart of
//! the process (what is held on the disk is then reported as holdings, and the master sends its orders again);
//! beyond [`MAX_OUTCOMES`] the oldest go.

use super::decide::{Current, Phase, TaskKind};
use crate::{
    store::{Artifact, Fence},
    task::{TaskFailure, TransferCounters},
};
use mooncake_proto::{ids::ModelRef, manifest::Seal, pb::session as pb};
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    path::PathBuf,
    sync::{Arc, OnceLock},
};
use tokio::sync::watch;

/// Outcomes kept, and revoked attempts: about 1 KiB each. More artifacts than this do not end on one node while no master is there.
pub const MAX_OUTCOMES: usize = 4096;
/// Refusals of orders that wait to be sent: each answers one order, so that more than this is a fault of the
/// master's, and the newest are worth most.
const MAX_REFUSALS: usize = 256;
/// Bad sources named in one report: a swarm of liars must not fill the frame.
pub const MAX_BAD_SOURCES: usize = 64;

/// What a running task shows of itself.
#[derive(Debug, Default)]
pub struct Live {
    /// Set once the store began it.
    pub artifact: OnceLock<Arc<Artifact>>,
    /// Of this attempt.
    pub counters: Arc<TransferCounters>,
    /// Peers that were left, newest last. Held for a push or a copy only.
    bad_sources: Mutex<VecDeque<pb::BadSource>>,
}

impl Live {
    /// Remembers a peer that was left.
    pub fn bad_source(&self, source: String, reason: String) {
        let mut bad = self.bad_sources.lock();
        bad.retain(|b| b.source != source);
        if bad.len() == MAX_BAD_SOURCES {
            bad.pop_front();
        }
        bad.push_back(pb::BadSource { source, reason });
    }
}

/// How a task stands.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// At work.
    Running,
    /// Every checksum held; waiting for the seal to be committed.
    Acquired(Seal),
    /// Published.
    Staged(Seal, PathBuf),
    /// Given up.
    Failed(TaskFailure),
}

impl Outcome {
    /// For logs and metric labels.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Acquired(_) => "acquired",
            Self::Staged(..) => "staged",
            Self::Failed(_) => "failed",
        }
    }

    fn is_end(&self) -> bool {
        matches!(self, Self::Staged(..) | Self::Failed(_))
    }
}

#[derive(Debug)]
struct Entry {
    generation: u64,
    fence: Fence,
    kind: TaskKind,
    outcome: Outcome,
    /// While it has not ended: an artifact must not be kept open by a report.
    live: Option<Arc<Live>>,
    /// The last numbers, once `live` is gone.
    frozen: Option<Box<pb::TaskReport>>,
    /// Of the last change of outcome; see [`Cursor`].
    version: u64,
}

impl Entry {
    fn report(&self, model: &ModelRef) -> pb::TaskReport {
        if let Some(frozen) = &self.frozen {
            return (**frozen).clone();
        }
        let live = self.live.as_deref();
        let (fetched_bytes, refetched_bytes) = live.map_or((0, 0), |l| l.counters.load());
        let mut report = pb::TaskReport {
            model: Some(model.clone().into()),
            generation: self.generation,
            fence: Some(self.fence.into()),
            kind: match self.kind {
                TaskKind::Acquire => pb::TaskKind::Acquire,
                TaskKind::Replicate => pb::TaskKind::Replicate,
            } as i32,
            outcome: pb::TaskOutcome::Running as i32,
            fetched_bytes,
            refetched_bytes,
            checked_bytes: live.map_or(0, |l| l.counters.checked()),
            rdma_bytes: live.map_or(0, |l| l.counters.rdma()),
            bad_sources: live.map_or_else(Vec::new, |l| l.bad_sources.lock().iter().cloned().collect()),
            ..Default::default()
        };
        if let Some(artifact) = live.and_then(|l| l.artifact.get()) {
            report.verified_bytes = artifact.verified_bytes();
            report.verified_blocks = artifact.have_count().into();
            report.objects_done = artifact.objects_done();
        }
        let outcome = match &self.outcome {
            Outcome::Running => pb::TaskOutcome::Running,
            Outcome::Acquired(seal) => {
                report.seal = Some((*seal).into());
                // The blocks were all checked here, against digests made here, after the declared checksums.
                report.checksum_verified = true;
                pb::TaskOutcome::Acquired
            }
            Outcome::Staged(seal, path) => {
                report.seal = Some((*seal).into());
                report.local_path = path.to_string_lossy().into_owned();
                report.checksum_verified = true;
                pb::TaskOutcome::Staged
            }
            Outcome::Failed(failure) => {
                report.failure = Some(wire_failure(failure));
                pb::TaskOutcome::Failed
            }
        };
        report.outcome = outcome as i32;
        report
    }
}

/// Longest message of a failure, in bytes: a report must fit a frame with many others.
const MAX_FAILURE_MESSAGE_BYTES: usize = 4096;

fn wire_failure(failure: &TaskFailure) -> pb::Failure {
    let mut message = failure.message.clone();
    if message.len() > MAX_FAILURE_MESSAGE_BYTES {
        let end = (0..=MAX_FAILURE_MESSAGE_BYTES)
            .rev()
            .find(|&i| message.is_char_boundary(i))
            .unwrap_or(0);
        message.truncate(end);
        message.push('…');
    }
    pb::Failure {
        code: failure.code.clone(),
        message,
        retryable: failure.retryable,
    }
}

#[derive(Debug, Default)]
struct Inner {
    entries: BTreeMap<ModelRef, Entry>,
    refusals: VecDeque<pb::TaskReport>,
    /// Attempts that an order stopped, oldest first by version: they must not start again.
    revoked: HashMap<ModelRef, (u64, Current)>,
    version: u64,
    ended: usize,
    /// Of tasks that are not in `entries` any more, or have ended.
    past_bytes: Moved,
    outcomes: BTreeMap<(TaskKind, &'static str), u64>,
}

impl Inner {
    /// Keeps the counts of a task that goes.
    fn absorb(&mut self, live: Option<&Live>) {
        let Some(live) = live else { return };
        self.past_bytes.add(&live.counters);
    }
}

/// Payload that was moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// From sources and peers.
    pub fetched_bytes: u64,
    /// Of these, fetched again.
    pub refetched_bytes: u64,
    /// Of these, not taken.
    pub duplicate_bytes: u64,
}

impl Moved {
    fn add(&mut self, counters: &TransferCounters) {
        let (fetched, refetched) = counters.load();
        self.fetched_bytes += fetched;
        self.refetched_bytes += refetched;
        self.duplicate_bytes += counters.duplicate();
    }
}

/// Counts since the start of the process, for metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// By all tasks.
    pub moved: Moved,
    /// Changes of outcome by kind and name.
    pub outcomes: BTreeMap<(TaskKind, &'static str), u64>,
    /// Tasks that have not ended, by kind.
    pub running: BTreeMap<TaskKind, u64>,
}

/// All reports of this node. Shared by the executor, which writes, and the session, which sends.
#[derive(Debug)]
pub struct Reports {
    /// Short sections; the artifacts' own locks are taken inside, never the other way round.
    inner: Mutex<Inner>,
    /// Bumped when an outcome changed: the session sends at once.
    changed: watch::Sender<u64>,
}

impl Default for Reports {
    fn default() -> Self {
        Self {
            inner: Mutex::default(),
            changed: watch::Sender::new(0),
        }
    }
}

/// How far one session got. A fresh one has said nothing: everything is due.
#[derive(Debug, Default)]
pub struct Cursor {
    version: u64,
    said: HashMap<ModelRef, pb::TaskReport>,
}

impl Reports {
    /// A task starts; what was said of the artifact before is moot.
    pub fn begin(&self, model: &ModelRef, generation: u64, fence: Fence, kind: TaskKind) -> Arc<Live> {
        let live = Arc::new(Live::default());
        let mut inner = self.inner.lock();
        inner.version += 1;
        let entry = Entry {
            generation,
            fence,
            kind,
            outcome: Outcome::Running,
            live: Some(live.clone()),
            frozen: None,
            version: inner.version,
        };
        *inner.outcomes.entry((kind, Outcome::Running.name())).or_default() += 1;
        inner.revoked.remove(model);
        if let Some(old) = inner.entries.insert(model.clone(), entry) {
            inner.ended -= usize::from(old.outcome.is_end());
            inner.absorb(old.live.as_deref());
        }
        self.bump(inner);
        live
    }

    /// The outcome of the task under `fence` changes. Of an artifact that has another task by now, nothing
    /// changes.
    pub fn set(&self, model: &ModelRef, fence: Fence, outcome: Outcome) {
        let mut inner = self.inner.lock();
        inner.version += 1;
        let version = inner.version;
        let Some(entry) = inner.entries.get_mut(model).filter(|e| e.fence == fence) else {
            return;
        };
        let was_end = entry.outcome.is_end();
        entry.outcome = outcome;
        entry.version = version;
        entry.frozen = None;
        let is_end = entry.outcome.is_end();
        let counted = (entry.kind, entry.outcome.name());
        if is_end {
            entry.frozen = Some(Box::new(entry.report(model)));
            let live = entry.live.take();
            inner.absorb(live.as_deref());
        }
        *inner.outcomes.entry(counted).or_default() += 1;
        inner.ended = inner.ended + usize::from(is_end) - usize::from(was_end);
        if inner.ended > MAX_OUTCOMES {
            let oldest = inner
                .entries
                .iter()
                .filter(|(_, e)| e.outcome.is_end())
                .min_by_key(|(_, e)| e.version);
            if let Some(model) = oldest.map(|(m, _)| m.clone()) {
                tracing::warn!(%model, "too many outcomes are kept: the oldest is dropped");
                inner.entries.remove(&model);
                inner.ended -= 1;
            }
        }
        self.bump(inner);
    }

    /// An ended task's outcome is asked for again.
    pub fn repeat(&self, model: &ModelRef) {
        let mut inner = self.inner.lock();
        inner.version += 1;
        let version = inner.version;
        if let Some(entry) = inner.entries.get_mut(model) {
            entry.version = version;
        }
        self.bump(inner);
    }

    /// What was said of the artifact is moot: its task, if there was one, was revoked.
    pub fn forget(&self, model: &ModelRef, revoked: Option<Current>) {
        let mut inner = self.inner.lock();
        if let Some(old) = inner.entries.remove(model) {
            inner.ended -= usize::from(old.outcome.is_end());
            inner.absorb(old.live.as_deref());
        }
        let Some(revoked) = revoked else { return };
        inner.version += 1;
        let version = inner.version;
        inner.revoked.insert(model.clone(), (version, revoked));
        if inner.revoked.len() > MAX_OUTCOMES {
            let oldest = inner.revoked.iter().min_by_key(|(_, (version, _))| *version);
            if let Some(oldest) = oldest.map(|(m, _)| m.clone()) {
                inner.revoked.remove(&oldest);
            }
        }
    }

    /// What is known of the artifact's last task, once it does not run any more.
    pub fn settled(&self, model: &ModelRef) -> Option<Current> {
        let inner = self.inner.lock();
        let ended = inner.entries.get(model).filter(|e| e.outcome.is_end());
        let ended = ended.map(|e| Current {
            generation: e.generation,
            fence: e.fence,
            kind: e.kind,
            phase: Phase::Ended,
        });
        ended.or_else(|| inner.revoked.get(model).map(|(_, revoked)| *revoked))
    }

    /// Answers an order that is not carried out. Said once, to the master that is there.
    pub fn refuse(
        &self,
        model: &ModelRef,
        generation: u64,
        fence: Fence,
        kind: TaskKind,
        failure: &TaskFailure,
    ) {
        let entry = Entry {
            generation,
            fence,
            kind,
            outcome: Outcome::Failed(failure.clone()),
            live: None,
            frozen: None,
            version: 0,
        };
        let mut inner = self.inner.lock();
        if inner.refusals.len() == MAX_REFUSALS {
            inner.refusals.pop_front();
        }
        inner.refusals.push_back(entry.report(model));
        self.bump(inner);
    }

    fn bump(&self, inner: parking_lot::MutexGuard<'_, Inner>) {
        drop(inner);
        self.changed.send_modify(|n| *n += 1);
    }

    /// Fires when an outcome changed.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// The outcome of an artifact's task.
    pub fn outcome(&self, model: &ModelRef) -> Option<Outcome> {
        self.inner.lock().entries.get(model).map(|e| e.outcome.clone())
    }

    /// For metrics.
    pub fn totals(&self) -> Totals {
        let inner = self.inner.lock();
        let mut totals = Totals {
            moved: inner.past_bytes,
            outcomes: inner.outcomes.clone(),
            running: BTreeMap::new(),
        };
        for entry in inner.entries.values().filter(|e| !e.outcome.is_end()) {
            if let Some(live) = &entry.live {
                totals.moved.add(&live.counters);
            }
            *totals.running.entry(entry.kind).or_default() += 1;
        }
        totals
    }

    /// What is due since `cursor`: outcomes that changed, and progress that differs from what was said last.
    /// The second value: whether any task is live, so that it pays to ask again soon.
    pub fn due(&self, cursor: &mut Cursor) -> (Vec<pb::TaskReport>, bool) {
        let mut inner = self.inner.lock();
        let mut out: Vec<_> = inner.refusals.drain(..).collect();
        let mut any_live = false;
        for (model, entry) in &inner.entries {
            let live = !entry.outcome.is_end();
            any_live |= live;
            let is_new = entry.version > cursor.version;
            if !live && !is_new {
                continue;
            }
            let report = entry.report(model);
            let said = cursor.said.get(model);
            if !is_new && said == Some(&report) {
                continue;
            }
            let mut news = report.clone();
            // A bad peer is said once per session: the master counts what it is told.
            if let Some(said) = said {
                news.bad_sources.retain(|b| !said.bad_sources.contains(b));
            }
            out.push(news);
            if live {
                cursor.said.insert(model.clone(), report);
            } else {
                cursor.said.remove(model);
            }
        }
        cursor.said.retain(|model, _| inner.entries.contains_key(model));
        cursor.version = inner.version;
        (out, any_live)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_proto::digest::Algorithm;

    fn model(name: &str) -> ModelRef {
        ModelRef {
            model_id: name.into(),
            revision: "r".into(),
            format: "f".into(),
            provider: "p".into(),
        }
    }

    fn fence(attempt: u64) -> Fence {
        Fence {
            recovery_epoch: 0,
            attempt,
        }
    }

    fn seal() -> Seal {
        Seal {
            block_size_bytes: 1 << 18,
            algorithm: Algorithm::Blake3,
            root: Algorithm::Blake3.digest(b""),
        }
    }

    fn failed() -> Outcome {
        Outcome::Failed(TaskFailure::permanent("disk_full", "the disk is full"))
    }

    #[test]
    fn progress_is_said_when_it_changed_and_outcomes_to_every_session() {
        let reports = Reports::default();
        let (mut first, m) = (Cursor::default(), model("a"));
        let live = reports.begin(&m, 1, fence(1), TaskKind::Replicate);
        assert_eq!(reports.due(&mut first).0.len(), 1);
        assert_eq!(reports.due(&mut first), (Vec::new(), true), "nothing changed");
        live.counters.add_fetched(5);
        live.bad_source("n1".into(), "lies".into());
        let (due, _) = reports.due(&mut first);
        assert_eq!((due[0].fetched_bytes, due[0].bad_sources.len()), (5, 1));
        live.counters.add_refetched(1);
        live.bad_source("n2".into(), "lies too".into());
        let (due, _) = reports.due(&mut first);
        assert_eq!(due[0].bad_sources.len(), 1, "each is said once");
        assert_eq!(
            reports.due(&mut Cursor::default()).0[0].bad_sources.len(),
            2,
            "to each master"
        );

        reports.set(&m, fence(1), Outcome::Staged(seal(), "/x".into()));
        for cursor in [&mut first, &mut Cursor::default()] {
            let (due, live) = reports.due(cursor);
            assert_eq!((due.len(), live), (1, false));
            assert_eq!(
                (due[0].outcome(), due[0].local_path.as_str()),
                (pb::TaskOutcome::Staged, "/x")
            );
            assert_eq!(due[0].fetched_bytes, 5, "the last numbers stay");
            assert!(reports.due(cursor).0.is_empty());
        }
        let totals = reports.totals();
        assert_eq!(
            (totals.moved.fetched_bytes, totals.running.len()),
            (5, 0),
            "counted once, after the end too"
        );
        assert_eq!(totals.outcomes[&(TaskKind::Replicate, "staged")], 1);
        reports.repeat(&m);
        assert_eq!(reports.due(&mut first).0.len(), 1);
        reports.forget(&m, None);
        assert!(reports.due(&mut Cursor::default()).0.is_empty());
    }

    #[test]
    fn a_later_attempt_makes_the_outcome_moot_and_a_late_outcome_changes_nothing() {
        let reports = Reports::default();
        let m = model("a");
        reports.begin(&m, 1, fence(1), TaskKind::Acquire);
        reports.set(&m, fence(1), failed());
        reports.begin(&m, 1, fence(2), TaskKind::Acquire);
        reports.set(&m, fence(1), failed());
        let (due, live) = reports.due(&mut Cursor::default());
        assert_eq!(
            (due.len(), due[0].outcome(), live),
            (1, pb::TaskOutcome::Running, true)
        );
    }

    #[test]
    fn outcomes_are_bounded() {
        let reports = Reports::default();
        for n in 0..MAX_OUTCOMES + 10 {
            let m = model(&n.to_string());
            reports.begin(&m, 1, fence(1), TaskKind::Acquire);
            reports.set(&m, fence(1), failed());
        }
        assert_eq!(reports.due(&mut Cursor::default()).0.len(), MAX_OUTCOMES);
        assert_eq!(reports.outcome(&model("0")), None, "the oldest went");
    }

    #[test]
    fn refusals_do_not_touch_the_running_task() {
        let reports = Reports::default();
        let m = model("a");
        reports.begin(&m, 1, fence(2), TaskKind::Acquire);
        let stale = TaskFailure::retryable("stale_fence", "x");
        reports.refuse(&m, 1, fence(1), TaskKind::Acquire, &stale);
        let (due, _) = reports.due(&mut Cursor::default());
        assert_eq!(due.len(), 2);
        assert_eq!(due[0].outcome(), pb::TaskOutcome::Failed);
        assert_eq!(due[1].outcome(), pb::TaskOutcome::Running);
        assert_eq!(
            reports.due(&mut Cursor::default()).0.len(),
            1,
            "a refusal is said once"
        );
    }

    #[test]
    fn long_messages_are_cut_at_a_character() {
        let failure = TaskFailure::permanent("x", "é".repeat(5000));
        let wire = wire_failure(&failure);
        assert!(wire.message.len() <= MAX_FAILURE_MESSAGE_BYTES + '…'.len_utf8());
    }
}
