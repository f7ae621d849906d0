//! One artifact on this node: its orders, one after the other, and its one task.

use super::{
    decide::{Action, Current, Phase, Refusal, TaskKind, decide},
    order::{Order, What, enqueue},
    reports::Outcome,
    run::{Shared, Task, Work, blocking, internal},
};
use crate::{
    store::{Fence, FenceError},
    task::TaskFailure,
    transport::PeerAddress,
};
use mooncake_proto::{ids::ModelRef, manifest::Seal};
use parking_lot::Mutex;
use std::{collections::VecDeque, path::PathBuf, sync::Arc};
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

/// What waits for a slot's worker.
#[derive(Debug, Default)]
struct Waiting {
    orders: VecDeque<Order>,
    /// The worker has no task and handles no order: the slot can be dropped.
    idle: bool,
}

/// The orders of one artifact.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    /// Held for a push or a pop only.
    waiting: Mutex<Waiting>,
    pushed: Notify,
}

impl Inbox {
    pub(super) fn push(&self, order: Order) {
        let late = enqueue(&mut self.waiting.lock().orders, order);
        match late {
            Some(order) => log_stale(&order),
            None => self.pushed.notify_one(),
        }
    }

    /// Whether nothing would be lost by dropping the slot.
    pub(super) fn is_idle(&self) -> bool {
        let waiting = self.waiting.lock();
        waiting.idle && waiting.orders.is_empty()
    }

    /// The next order; `task`: whether one runs meanwhile.
    async fn pop(&self, task: bool) -> Order {
        loop {
            let pushed = self.pushed.notified();
            {
                let mut waiting = self.waiting.lock();
                if let Some(order) = waiting.orders.pop_front() {
                    waiting.idle = false;
                    return order;
                }
                // Most slots never see another order: what the queue allocated is not kept for them.
                waiting.orders = VecDeque::new();
                waiting.idle = !task;
            }
            pushed.await;
        }
    }
}

fn log_stale(order: &Order) {
    tracing::warn!(
        model = %order.model, fence = %order.fence, term = order.term,
        "refused an order: a later attempt was ordered before; it comes from a leader that was replaced"
    );
}

type Ending = Result<(Seal, PathBuf), TaskFailure>;

/// A task that runs.
struct Running {
    cancel: CancellationToken,
    peers: watch::Sender<Vec<PeerAddress>>,
    seal: watch::Sender<Option<Seal>>,
    handle: JoinHandle<Ending>,
}

pub(super) struct Slot {
    shared: Arc<Shared>,
    model: ModelRef,
    inbox: Arc<Inbox>,
    /// The parent of every task's token: process shutdown.
    stop: CancellationToken,
    obeyed: Fence,
    current: Option<Current>,
    running: Option<Running>,
}

impl Slot {
    pub(super) fn new(
        shared: Arc<Shared>,
        model: ModelRef,
        inbox: Arc<Inbox>,
        stop: CancellationToken,
    ) -> Self {
        // An earlier slot of the artifact may have been dropped.
        let current = shared.reports.settled(&model);
        Self {
            shared,
            model,
            inbox,
            stop,
            obeyed: Fence::default(),
            current,
            running: None,
        }
    }

    /// Until shutdown, or until the slot is dropped for another one (its token ends).
    pub(super) async fn work(mut self) {
        loop {
            let busy = self.running.is_some();
            let inbox = self.inbox.clone();
            let ended = async {
                match &mut self.running {
                    Some(running) => (&mut running.handle).await,
                    None => std::future::pending().await,
                }
            };
            // `pop` takes an order only when it is polled to its end, so that none is lost here.
            tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                ending = ended => {
                    self.running = None;
                    self.ended(ending.unwrap_or_else(|e| Err(internal(&e.to_string()))));
                }
                order = inbox.pop(busy) => self.order(order).await,
            }
        }
        // Every task's token is a child of `stop`.
        self.stop_running().await;
    }

    async fn order(&mut self, order: Order) {
        let head = order.head();
        let action = decide(self.current.as_ref(), self.obeyed, &head);
        tracing::debug!(model = %self.model, fence = %order.fence, ask = ?head.ask, ?action, "order");
        if action.obeys() && !self.obey(&order).await {
            return;
        }
        match (action, order.what) {
            (Action::Start | Action::Replace, What::Acquire(a)) => {
                self.start(order.generation, order.fence, Work::Acquire(a)).await;
            }
            (Action::Start | Action::Replace, What::Replicate(r)) => {
                self.start(order.generation, order.fence, Work::Replicate(r))
                    .await;
            }
            (Action::Update, What::Acquire(a)) => self.take_seal(a.expected_seal),
            (Action::Update, What::Replicate(r)) => {
                self.take_peers(r.peers);
                self.take_seal(r.seal);
                self.shared.reports.repeat(&self.model);
            }
            (Action::Repeat, _) => self.shared.reports.repeat(&self.model),
            (Action::TakePeers, What::PeersChanged(peers)) => self.take_peers(peers),
            (Action::TakeSeal, What::Sealed(seal)) => self.take_seal(Some(seal)),
            (Action::Stop, What::Revoke(reason)) => {
                let was_running = self.stop_running().await;
                self.revoked(order.fence);
                if was_running {
                    tracing::info!(model = %self.model, fence = %order.fence, "task revoked: {reason}; verified blocks are kept");
                } else {
                    // A new leader makes sure; nothing ran.
                    tracing::debug!(model = %self.model, fence = %order.fence, "revoked: {reason}");
                }
            }
            (Action::Remove, What::Delete(reason)) => {
                self.stop_running().await;
                self.revoked(order.fence);
                let (store, model) = (self.shared.store.clone(), self.model.clone());
                let _turn = self.shared.removals.acquire().await.expect("never closed");
                match blocking(move || store.remove_staging(&model)).await {
                    Ok(Ok(())) => {
                        tracing::info!(model = %self.model, fence = %order.fence, "staging removed: {reason}")
                    }
                    Ok(Err(error)) => {
                        tracing::warn!(model = %self.model, %error, "staging could not be removed")
                    }
                    Err(error) => {
                        tracing::error!(model = %self.model, %error, "staging could not be removed")
                    }
                }
            }
            (Action::Refuse(refusal), what) => {
                let kind = match what {
                    What::Acquire(_) => Some(TaskKind::Acquire),
                    What::Replicate(_) => Some(TaskKind::Replicate),
                    _ => None,
                };
                self.refuse(order.generation, order.fence, kind, refusal);
            }
            // Ignored; and pairs that `decide` does not make.
            _ => {}
        }
    }

    /// Makes the order's fence durable. `false`: the order is not obeyed.
    async fn obey(&mut self, order: &Order) -> bool {
        let (store, model, fence) = (self.shared.store.clone(), self.model.clone(), order.fence);
        let turn = self.shared.obeys.acquire().await.expect("never closed");
        let result = blocking(move || store.obey(&model, fence)).await;
        drop(turn);
        let kind = match &order.what {
            What::Acquire(_) => Some(TaskKind::Acquire),
            What::Replicate(_) => Some(TaskKind::Replicate),
            _ => None,
        };
        let failure = match result {
            Ok(Ok(())) => {
                self.obeyed = self.obeyed.max(fence);
                return true;
            }
            Ok(Err(FenceError::Stale { highest, .. })) => {
                self.obeyed = self.obeyed.max(highest);
                self.refuse(order.generation, fence, kind, Refusal::StaleFence);
                return false;
            }
            Ok(Err(FenceError::Store(e))) => super::run::store_failure(&e),
            Err(failure) => failure,
        };
        tracing::error!(model = %self.model, %fence, code = %failure.code, "the order's fence cannot be made durable: {}", failure.message);
        if let Some(kind) = kind {
            self.shared
                .reports
                .refuse(&self.model, order.generation, fence, kind, &failure);
        }
        false
    }

    fn refuse(&self, generation: u64, fence: Fence, kind: Option<TaskKind>, refusal: Refusal) {
        let floor = self.current.map_or(self.obeyed, |c| self.obeyed.max(c.fence));
        let why = match refusal {
            Refusal::StaleFence => {
                format!("its fence {fence} is below {floor}, which this node obeyed already")
            }
            Refusal::StaleGeneration => {
                "this node works on a later generation of the artifact under this fence".to_owned()
            }
            Refusal::Revoked => format!("attempt {fence} was revoked before"),
        };
        tracing::warn!(model = %self.model, %fence, "refused an order: {why}");
        let code = match refusal {
            Refusal::StaleFence | Refusal::StaleGeneration => "stale_fence",
            // The master has revoked it itself: there is nobody to tell.
            Refusal::Revoked => return,
        };
        if let Some(kind) = kind {
            let failure =
                TaskFailure::retryable(code, format!("the order for {} was refused: {why}", self.model));
            self.shared
                .reports
                .refuse(&self.model, generation, fence, kind, &failure);
        }
    }

    async fn start(&mut self, generation: u64, fence: Fence, work: Work) {
        if self.stop_running().await {
            tracing::info!(model = %self.model, %fence, "the running attempt made way for a later one");
        }
        let kind = work.kind();
        let (peers, seal) = match &work {
            Work::Acquire(a) => (Vec::new(), a.expected_seal),
            Work::Replicate(r) => (r.peers.iter().cloned().map(PeerAddress::from).collect(), r.seal),
        };
        let (peers, seal) = (watch::Sender::new(peers), watch::Sender::new(seal));
        let cancel = self.stop.child_token();
        let task = Task {
            shared: self.shared.clone(),
            model: self.model.clone(),
            generation,
            fence,
            live: self.shared.reports.begin(&self.model, generation, fence, kind),
            peers: peers.subscribe(),
            seal: seal.subscribe(),
            cancel: cancel.clone(),
        };
        tracing::info!(model = %self.model, %fence, kind = kind.name(), peers = peers.borrow().len(), "task starts");
        self.current = Some(Current {
            generation,
            fence,
            kind,
            phase: Phase::Running,
        });
        self.running = Some(Running {
            cancel,
            peers,
            seal,
            handle: tokio::spawn(task.run(work)),
        });
    }

    fn ended(&mut self, ending: Ending) {
        let Some(current) = &mut self.current else { return };
        let (fence, kind) = (current.fence, current.kind.name());
        current.phase = Phase::Ended;
        match ending {
            Ok((seal, path)) => {
                tracing::info!(model = %self.model, %fence, kind, path = %path.display(), "staged");
                self.shared
                    .reports
                    .set(&self.model, fence, Outcome::Staged(seal, path));
            }
            // Only when something else of this process canceled it: say so, or the master waits for ever.
            Err(failure) if failure.is_canceled() && self.stop.is_cancelled() => {}
            Err(failure) => {
                tracing::warn!(model = %self.model, %fence, kind, code = %failure.code, retryable = failure.retryable, "task failed: {}", failure.message);
                self.shared
                    .reports
                    .set(&self.model, fence, Outcome::Failed(failure));
            }
        }
    }

    /// Stops what runs and waits for its end, so that nothing of it touches the artifact afterwards.
    async fn stop_running(&mut self) -> bool {
        let Some(running) = self.running.take() else {
            return false;
        };
        running.cancel.cancel();
        if let Err(e) = running.handle.await {
            tracing::error!(model = %self.model, error = %e, "the stopped task had panicked");
        }
        true
    }

    fn revoked(&mut self, fence: Fence) {
        if let Some(current) = &mut self.current {
            current.fence = fence;
            current.phase = Phase::Revoked;
        }
        self.shared.reports.forget(&self.model, self.current);
    }

    fn take_peers(&self, peers: Vec<mooncake_proto::pb::session::Peer>) {
        let Some(running) = &self.running else { return };
        let peers: Vec<_> = peers.into_iter().map(PeerAddress::from).collect();
        running.peers.send_if_modified(|now| {
            let changed = *now != peers;
            *now = peers;
            changed
        });
    }

    fn take_seal(&self, seal: Option<Seal>) {
        let (Some(running), Some(seal)) = (&self.running, seal) else {
            return;
        };
        running.seal.send_if_modified(|now| {
            let changed = *now != Some(seal);
            *now = Some(seal);
            changed
        });
    }
}
