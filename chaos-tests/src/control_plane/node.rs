//! One simulated node: a real session, heartbeats by the clock, and tasks that are finished by time instead of work.
//! It says what a client says, as often: holdings as a task begins and ends, progress every [`PROGRESS`], the outcome.

use crate::session::NodeSession;
use anyhow::{Context, Result, bail};
use mooncake_proto::pb::session::{
    self as pb, TaskKind, TaskOutcome, master_frame::Body as Down, node_frame::Body as Up, order::Body,
};
use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

/// As `mooncake_client` reports it (`PROGRESS_INTERVAL`).
const PROGRESS: Duration = Duration::from_millis(200);
/// A heartbeat without an answer counts after this time, however a phase ends.
const OVERDUE: Duration = Duration::from_secs(1);
/// Heartbeats whose answers are waited for; one more, and the first of them counts as it is.
const MAX_UNANSWERED: usize = 64;

/// What all nodes of a fleet count together.
#[derive(Default)]
pub(super) struct Counts {
    /// Frames sent.
    pub(super) up: AtomicU64,
    /// Frames received.
    pub(super) down: AtomicU64,
    /// Heartbeats of all nodes.
    pub(super) heartbeats: Mutex<Vec<Arc<Mutex<Heartbeats>>>>,
}

/// Heartbeats of one node.
#[derive(Default)]
pub(super) struct Heartbeats {
    unanswered: VecDeque<(u64, Instant)>,
    /// Round trips in microseconds since [`Heartbeats::take`]; of one that is given up, its age then.
    took_us: Vec<u64>,
}

impl Heartbeats {
    fn sent(&mut self, sequence: u64) {
        self.unanswered.push_back((sequence, Instant::now()));
        if self.unanswered.len() > MAX_UNANSWERED {
            self.give_up_first();
        }
    }

    /// Whatever was sent before the answered one is answered with it.
    fn answered(&mut self, answers: u64) {
        while self
            .unanswered
            .front()
            .is_some_and(|(first, _)| *first <= answers)
        {
            self.give_up_first();
        }
    }

    /// From here on its time counts as it is.
    fn give_up_first(&mut self) {
        if let Some((_, sent)) = self.unanswered.pop_front() {
            self.took_us.push(sent.elapsed().as_micros() as u64);
        }
    }

    /// All since the last call, in microseconds. Those that have waited for longer than [`OVERDUE`] count with what they
    /// have waited so far: a master that says nothing must not look quick.
    pub(super) fn take(&mut self) -> Vec<u64> {
        let mut took = std::mem::take(&mut self.took_us);
        let waiting = self.unanswered.iter().map(|(_, sent)| sent.elapsed());
        took.extend(
            waiting
                .filter(|age| *age >= OVERDUE)
                .map(|age| age.as_micros() as u64),
        );
        took
    }
}

/// What the fleet's model is like.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    /// Of the model.
    pub(super) bytes: u64,
    /// Of one block.
    pub(super) block_bytes: u32,
    /// Of the model.
    pub(super) objects: u64,
    /// How long a task takes; a real one takes as long as its link.
    pub(super) takes: Duration,
}

struct Task {
    order: pb::Order,
    kind: TaskKind,
    manifest_digest: Vec<u8>,
    began: Instant,
    seal: Option<pb::Seal>,
    acquired: bool,
}

pub(super) struct Node<'a> {
    pub(super) id: String,
    pub(super) session: NodeSession,
    pub(super) work: Work,
    pub(super) counts: &'a Counts,
}

/// What the digests of this model would give: any 32 bytes will do.
fn seal(work: Work) -> pb::Seal {
    pb::Seal {
        block_size_bytes: work.block_bytes,
        algorithm: pb::DigestAlgorithm::Blake3 as i32,
        root: vec![7; 32].into(),
    }
}

impl Node<'_> {
    /// Until it is told to stop; an error if the master ends the session before.
    pub(super) async fn run(mut self, stop: CancellationToken) -> Result<()> {
        let every = Duration::from_millis(u64::from(self.session.welcome.heartbeat_interval_ms));
        let mut heartbeats = tokio::time::interval(every);
        heartbeats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut progress = tokio::time::interval(PROGRESS);
        progress.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let beats = Arc::new(Mutex::new(Heartbeats::default()));
        self.counts.heartbeats.lock().push(Arc::clone(&beats));
        let (mut sequence, mut task) = (0, None::<Task>);
        loop {
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                _ = heartbeats.tick() => {
                    sequence += 1;
                    beats.lock().sent(sequence);
                    self.send(Up::Heartbeat(pb::Heartbeat { sequence, free_bytes: 1 << 40, answers: 0 })).await?;
                }
                _ = progress.tick(), if task.is_some() => {
                    let ended = match &mut task {
                        Some(task) => self.go_on(task).await?,
                        None => false,
                    };
                    if ended {
                        task = None;
                    }
                }
                frame = self.session.next() => {
                    let frame = frame.with_context(|| format!("node {}", self.id))?;
                    self.counts.down.fetch_add(1, Ordering::Relaxed);
                    match frame {
                        Down::Heartbeat(beat) => beats.lock().answered(beat.answers),
                        Down::Order(order) => self.obey(order, &mut task).await?,
                        Down::Redirect(_) | Down::Refused(_) => bail!("node {}: the master sent it away", self.id),
                        Down::Welcome(_) | Down::BlobPart(_) => {}
                    }
                }
            }
        }
    }

    async fn send(&self, body: Up) -> Result<()> {
        self.counts.up.fetch_add(1, Ordering::Relaxed);
        self.session.send(body).await
    }

    async fn obey(&self, order: pb::Order, task: &mut Option<Task>) -> Result<()> {
        let (kind, manifest_digest, seal) = match &order.body {
            Some(Body::Acquire(acquire)) => (TaskKind::Acquire, acquire.manifest_digest.to_vec(), None),
            Some(Body::Replicate(replicate)) => (
                TaskKind::Replicate,
                replicate.manifest_digest.to_vec(),
                replicate.seal.clone(),
            ),
            Some(Body::Sealed(sealed)) => {
                if let Some(task) = task {
                    task.seal.clone_from(&sealed.seal);
                }
                return Ok(());
            }
            Some(Body::Revoke(_)) => {
                *task = None;
                return Ok(());
            }
            _ => return Ok(()),
        };
        let new = Task {
            order,
            kind,
            manifest_digest,
            began: Instant::now(),
            seal,
            acquired: false,
        };
        self.holds(&new, pb::HoldingState::Partial).await?;
        *task = Some(new);
        Ok(())
    }

    /// Reports what would have been done by now; whether all of it is.
    async fn go_on(&self, task: &mut Task) -> Result<bool> {
        let done = task.began.elapsed().as_secs_f64() / self.work.takes.as_secs_f64();
        let outcome = match (done >= 1.0, task.kind, &task.seal) {
            (true, _, Some(_)) => TaskOutcome::Staged,
            (true, TaskKind::Acquire, None) if !task.acquired => TaskOutcome::Acquired,
            // There is nothing new to say.
            (true, _, None) => return Ok(false),
            (false, ..) => TaskOutcome::Running,
        };
        task.acquired |= outcome == TaskOutcome::Acquired;
        if outcome == TaskOutcome::Staged {
            self.holds(task, pb::HoldingState::Staged).await?;
        }
        let share = |of: u64| (of as f64 * done.min(1.0)) as u64;
        let report = pb::TaskReport {
            model: task.order.model.clone(),
            generation: task.order.generation,
            fence: task.order.fence,
            kind: task.kind as i32,
            outcome: outcome as i32,
            verified_bytes: share(self.work.bytes),
            verified_blocks: share(self.work.bytes.div_ceil(self.work.block_bytes.into())),
            objects_done: share(self.work.objects),
            seal: (outcome != TaskOutcome::Running).then(|| seal(self.work)),
            local_path: match outcome {
                TaskOutcome::Staged => self.path(),
                _ => String::new(),
            },
            checksum_verified: outcome != TaskOutcome::Running,
            ..Default::default()
        };
        let reports = vec![report];
        self.send(Up::Reports(pb::ReportBatch { reports })).await?;
        Ok(outcome == TaskOutcome::Staged)
    }

    async fn holds(&self, task: &Task, state: pb::HoldingState) -> Result<()> {
        let staged = state == pb::HoldingState::Staged;
        let holding = pb::Holding {
            model: task.order.model.clone(),
            generation: task.order.generation,
            manifest_digest: task.manifest_digest.clone().into(),
            state: state as i32,
            verified_bytes: if staged { self.work.bytes } else { 0 },
            seal: staged.then(|| seal(self.work)),
            local_path: if staged { self.path() } else { String::new() },
            fence: task.order.fence,
            ..Default::default()
        };
        let holdings = pb::Holdings {
            holdings: vec![holding],
            inventory_complete: true,
        };
        self.send(Up::Holdings(holdings)).await
    }

    fn path(&self) -> String {
        format!("/models/{}", self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn a_heartbeat_without_an_answer_does_not_vanish() {
        let mut beats = Heartbeats::default();
        beats.sent(1);
        beats.sent(2);
        assert!(beats.take().is_empty(), "they were sent a moment ago");
        beats.answered(2);
        assert_eq!(beats.take().len(), 2);
        for sequence in 3..=3 + MAX_UNANSWERED as u64 {
            beats.sent(sequence);
        }
        assert_eq!(beats.take().len(), 1, "one more than are waited for");
        let long_ago = Instant::now()
            .checked_sub(OVERDUE * 2)
            .expect("the machine is up longer");
        beats.unanswered.push_front((0, long_ago));
        let took = beats.take();
        assert_eq!(took.len(), 1, "{took:?}");
        assert!(took[0] >= 2_000_000, "{took:?}");
    }
}
