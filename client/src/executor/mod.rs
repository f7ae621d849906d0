//! Orders become tasks, tasks become reports.
//!
//! Guaranteed:
//! - One task per artifact at a time; a later attempt starts after the earlier one has stopped.
//! - An order below a fence that was obeyed, in this life of the process or an earlier one, changes nothing.
//! - The same order again (after a reconnect, or from the next leader) restarts nothing, for as long as the outcome
//!   is kept ([`MAX_OUTCOMES`] artifacts).
//! - A task needs no master: it goes on while there is none, and its outcome is kept ([`Reports`]).
//!
//! Not guaranteed: that an order survives a restart of the process. What was verified does; the master sees
//! the holdings and sends the order again.

mod decide;
mod order;
mod reports;
mod run;
mod slot;
#[cfg(test)]
mod tests;
mod transfer;

pub use decide::{Action, Ask, Current, Head, Phase, Refusal, TaskKind, decide};
pub use order::{AcquireOrder, Layout, Order, OrderError, ReplicateOrder, Secretive, What};
pub use reports::{Cursor, Live, MAX_BAD_SOURCES, MAX_OUTCOMES, Moved, Outcome, Reports, Totals};
pub use run::{MAX_BEGINS, MAX_PUBLISHES, MAX_REHASHES, publish_failure, store_failure};
pub use transfer::{AcquireJob, Boxed, FetchJob, Transfer};

use crate::store::Store;
use mooncake_proto::ids::ModelRef;
use parking_lot::Mutex;
use run::{MAX_OBEYS, MAX_REMOVALS, Shared};
use slot::{Inbox, Slot};
use std::{collections::HashMap, sync::Arc};
use tokio::sync::Semaphore;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Most blocking calls under way at once.
pub const BLOCKING_CALLS: usize = MAX_BEGINS + MAX_REHASHES + MAX_PUBLISHES + MAX_OBEYS + MAX_REMOVALS;

/// Artifacts whose last task is remembered. Idle ones beyond it are forgotten, oldest first, since each keeps
/// a worker of some kilobytes; the store still knows their fences and holdings, the reports how they ended.
const MAX_SLOTS: usize = 128;

struct Handle {
    inbox: Arc<Inbox>,
    stop: CancellationToken,
    /// Of the last order; the smallest is the oldest.
    touched: u64,
}

#[derive(Default)]
struct Slots {
    by_model: HashMap<ModelRef, Handle>,
    orders: u64,
}

/// The executor: a handle, cheap to clone.
#[derive(Clone)]
pub struct Executor {
    shared: Arc<Shared>,
    /// Held to find the slot and to push the order into it, so that none is pushed into a slot that goes.
    slots: Arc<Mutex<Slots>>,
    stop: CancellationToken,
    tasks: TaskTracker,
    /// Where tasks run; orders come from another runtime.
    runtime: tokio::runtime::Handle,
}

impl Executor {
    /// Tasks will run on the current runtime.
    pub fn new(store: Store, transfer: Arc<dyn Transfer>, reports: Arc<Reports>) -> Self {
        let shared = Shared {
            store,
            transfer,
            reports,
            acquisitions: Semaphore::new(mooncake_proto::MAX_ACQUISITIONS),
            begins: Semaphore::new(MAX_BEGINS),
            rehashes: Semaphore::new(MAX_REHASHES),
            publishes: Semaphore::new(MAX_PUBLISHES),
            obeys: Semaphore::new(MAX_OBEYS),
            removals: Semaphore::new(MAX_REMOVALS),
        };
        Self {
            shared: Arc::new(shared),
            slots: Arc::default(),
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
            runtime: tokio::runtime::Handle::current(),
        }
    }

    /// Takes an order. Never blocks on a disk or on a task.
    pub fn submit(&self, order: Order) {
        if self.stop.is_cancelled() {
            return;
        }
        let mut slots = self.slots.lock();
        slots.orders += 1;
        let touched = slots.orders;
        if let Some(handle) = slots.by_model.get_mut(&order.model) {
            handle.touched = touched;
            handle.inbox.push(order);
            return;
        }
        if slots.by_model.len() >= MAX_SLOTS {
            let idle = slots
                .by_model
                .iter()
                .filter(|(_, h)| h.inbox.is_idle())
                .min_by_key(|(_, h)| h.touched);
            if let Some(oldest) = idle.map(|(m, _)| m.clone())
                && let Some(handle) = slots.by_model.remove(&oldest)
            {
                handle.stop.cancel();
            }
        }
        let (inbox, stop) = (Arc::new(Inbox::default()), self.stop.child_token());
        let slot = Slot::new(
            self.shared.clone(),
            order.model.clone(),
            inbox.clone(),
            stop.clone(),
        );
        self.tasks.spawn_on(slot.work(), &self.runtime);
        let model = order.model.clone();
        inbox.push(order);
        slots.by_model.insert(model, Handle { inbox, stop, touched });
    }

    /// What tasks have to say.
    pub fn reports(&self) -> &Arc<Reports> {
        &self.shared.reports
    }

    /// Whether a task works on the model or waits for something: its staging must not expire.
    pub fn wants(&self, model: &ModelRef) -> bool {
        matches!(
            self.shared.reports.outcome(model),
            Some(Outcome::Running | Outcome::Acquired(_))
        ) || self
            .slots
            .lock()
            .by_model
            .get(model)
            .is_some_and(|h| !h.inbox.is_idle())
    }

    /// Stops every task and waits until none touches the store. What was verified stays.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}
