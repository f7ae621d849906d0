//! What to do with an order, given what runs: a pure function, so that fencing can be read and tested as a
//! table.
//!
//! Guaranteed: an order below a fence that was obeyed changes nothing; the same order again never restarts
//! work; a higher fence replaces what runs. Not decided here: durability of the fence (the store refuses a
//! lower one across restarts too; it is asked before a decision of this module is carried out).

use crate::store::Fence;

/// The two kinds of task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TaskKind {
    /// MODEL_DOWNLOAD: from the source.
    Acquire,
    /// The copy tasks of one artifact: from peers.
    Replicate,
}

impl TaskKind {
    /// For logs and metric labels.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Acquire => "acquire",
            Self::Replicate => "replicate",
        }
    }
}

/// What an order asks for, without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Work on the artifact.
    Task(TaskKind),
    /// A new list of peers for the work.
    PeersChanged,
    /// The artifact's seal was committed.
    Sealed,
    /// Stop, keep what was verified.
    Revoke,
    /// Stop, remove staging.
    Delete,
}

/// The part of an order that decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Of the artifact.
    pub generation: u64,
    /// Of the attempt.
    pub fence: Fence,
    /// What is asked.
    pub ask: Ask,
}

/// Where the artifact's last task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// At work, or waiting for the seal.
    Running,
    /// Staged or failed: the outcome is kept for reports.
    Ended,
    /// Stopped by an order; the same attempt does not start again.
    Revoked,
}

/// The artifact's last task on this node, in this life of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Current {
    /// Of the artifact.
    pub generation: u64,
    /// Of the attempt.
    pub fence: Fence,
    /// Which kind of task.
    pub kind: TaskKind,
    /// Where it is.
    pub phase: Phase,
}

/// Why an order is not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A higher fence was obeyed.
    StaleFence,
    /// The same fence, an older generation of the artifact.
    StaleGeneration,
    /// This very attempt was revoked before.
    Revoked,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing runs: start the task.
    Start,
    /// Stop what runs, await its end, start the task; verified blocks are used again.
    Replace,
    /// The task runs already: take the order's peers and seal.
    Update,
    /// The task has ended: report its outcome again.
    Repeat,
    /// Give the running task the new peers.
    TakePeers,
    /// Give the running task the seal.
    TakeSeal,
    /// Stop the task if one runs, keep what was verified, forget its outcome.
    Stop,
    /// Stop the task if one runs, then remove staging.
    Remove,
    /// Nothing here waits for this; not a fault.
    Ignore,
    /// Do nothing, say why.
    Refuse(Refusal),
}

impl Action {
    /// Whether the order's fence must be durable before this is done.
    pub fn obeys(self) -> bool {
        matches!(self, Self::Start | Self::Replace | Self::Stop | Self::Remove)
    }
}

/// `obeyed` is the highest fence this node obeyed for the artifact, as far as is known here.
pub fn decide(current: Option<&Current>, obeyed: Fence, order: &Head) -> Action {
    let floor = current.map_or(obeyed, |c| obeyed.max(c.fence));
    if order.fence < floor {
        return Action::Refuse(Refusal::StaleFence);
    }
    let running = current.filter(|c| c.phase == Phase::Running);
    match order.ask {
        Ask::Task(kind) => {
            let start = if running.is_some() {
                Action::Replace
            } else {
                Action::Start
            };
            // Not the same attempt: it is above the floor.
            let Some(same) = current.filter(|c| c.fence == order.fence) else {
                return start;
            };
            if order.generation < same.generation {
                return Action::Refuse(Refusal::StaleGeneration);
            }
            if same.phase == Phase::Revoked && order.generation == same.generation {
                return Action::Refuse(Refusal::Revoked);
            }
            if order.generation > same.generation || kind != same.kind {
                return start;
            }
            if same.phase == Phase::Running {
                Action::Update
            } else {
                Action::Repeat
            }
        }
        Ask::PeersChanged | Ask::Sealed => match running {
            Some(task) if task.generation == order.generation => {
                if order.ask == Ask::Sealed {
                    Action::TakeSeal
                } else {
                    Action::TakePeers
                }
            }
            _ => Action::Ignore,
        },
        Ask::Revoke => Action::Stop,
        Ask::Delete => Action::Remove,
    }
}

#[cfg(test)]
mod tests {
    use super::{Action::*, Ask::*, Phase::*, TaskKind::*, *};
    use proptest::prelude::*;

    const fn fence(recovery_epoch: u64, attempt: u64) -> Fence {
        Fence {
            recovery_epoch,
            attempt,
        }
    }

    fn current(attempt: u64, kind: TaskKind, phase: Phase) -> Option<Current> {
        Some(Current {
            generation: 5,
            fence: fence(1, attempt),
            kind,
            phase,
        })
    }

    #[test]
    fn table() {
        type Row = (Option<Current>, Fence, u64, Fence, Ask, Action);
        let f = fence;
        #[rustfmt::skip]
        let rows: &[Row] = &[
            // current                          obeyed   gen  order   ask              action
            // Nothing known of the artifact.
            (None,                              f(0, 0), 5, f(1, 1), Task(Acquire),    Start),
            (None,                              f(1, 1), 5, f(1, 1), Task(Acquire),    Start), // after a restart
            (None,                              f(1, 2), 5, f(1, 1), Task(Acquire),    Refuse(Refusal::StaleFence)),
            (None,                              f(2, 0), 5, f(1, 9), Task(Replicate),  Refuse(Refusal::StaleFence)),
            (None,                              f(1, 1), 5, f(1, 1), PeersChanged,     Ignore),
            (None,                              f(1, 1), 5, f(1, 1), Sealed,           Ignore),
            (None,                              f(1, 1), 5, f(1, 1), Revoke,           Stop),
            (None,                              f(1, 2), 5, f(1, 1), Revoke,           Refuse(Refusal::StaleFence)),
            (None,                              f(1, 1), 5, f(1, 2), Delete,           Remove),
            // The same order again: after a reconnect, or from the next leader.
            (current(3, Acquire, Running),      f(1, 3), 5, f(1, 3), Task(Acquire),    Update),
            (current(3, Replicate, Running),    f(1, 3), 5, f(1, 3), Task(Replicate),  Update),
            (current(3, Acquire, Ended),        f(1, 3), 5, f(1, 3), Task(Acquire),    Repeat),
            (current(3, Acquire, Revoked),      f(1, 3), 5, f(1, 3), Task(Acquire),    Refuse(Refusal::Revoked)),
            // A later attempt.
            (current(3, Acquire, Running),      f(1, 3), 5, f(1, 4), Task(Acquire),    Replace),
            (current(3, Acquire, Running),      f(1, 3), 5, f(1, 4), Task(Replicate),  Replace),
            (current(3, Replicate, Ended),      f(1, 3), 5, f(1, 4), Task(Replicate),  Start),
            (current(3, Replicate, Revoked),    f(1, 3), 5, f(1, 4), Task(Replicate),  Start),
            (current(3, Acquire, Running),      f(1, 3), 5, f(2, 1), Task(Acquire),    Replace), // a new epoch
            // Another kind or generation under the same fence.
            (current(3, Acquire, Running),      f(1, 3), 5, f(1, 3), Task(Replicate),  Replace),
            (current(3, Acquire, Ended),        f(1, 3), 5, f(1, 3), Task(Replicate),  Start),
            (current(3, Acquire, Running),      f(1, 3), 6, f(1, 3), Task(Acquire),    Replace),
            (current(3, Acquire, Revoked),      f(1, 3), 6, f(1, 3), Task(Acquire),    Start),
            (current(3, Acquire, Running),      f(1, 3), 4, f(1, 3), Task(Acquire),    Refuse(Refusal::StaleGeneration)),
            // An earlier attempt.
            (current(3, Acquire, Running),      f(1, 3), 5, f(1, 2), Task(Acquire),    Refuse(Refusal::StaleFence)),
            (current(3, Acquire, Running),      f(1, 3), 5, f(1, 2), PeersChanged,     Refuse(Refusal::StaleFence)),
            (current(3, Acquire, Running),      f(1, 3), 5, f(1, 2), Revoke,           Refuse(Refusal::StaleFence)),
            (current(3, Acquire, Running),      f(1, 3), 5, f(0, 9), Delete,           Refuse(Refusal::StaleFence)),
            // A revoke of a later attempt that never ran here binds too.
            (current(3, Acquire, Running),      f(1, 4), 5, f(1, 3), Task(Acquire),    Refuse(Refusal::StaleFence)),
            // Hints and the seal.
            (current(3, Replicate, Running),    f(1, 3), 5, f(1, 3), PeersChanged,     TakePeers),
            (current(3, Replicate, Running),    f(1, 3), 5, f(1, 3), Sealed,           TakeSeal),
            (current(3, Acquire, Running),      f(1, 3), 5, f(1, 3), Sealed,           TakeSeal),
            (current(3, Acquire, Running),      f(1, 3), 6, f(1, 3), Sealed,           Ignore),
            (current(3, Acquire, Ended),        f(1, 3), 5, f(1, 3), Sealed,           Ignore),
            (current(3, Acquire, Ended),        f(1, 3), 5, f(1, 3), PeersChanged,     Ignore),
            // Revoke and delete.
            (current(3, Replicate, Running),    f(1, 3), 5, f(1, 3), Revoke,           Stop),
            (current(3, Replicate, Running),    f(1, 3), 5, f(1, 4), Revoke,           Stop),
            (current(3, Replicate, Ended),      f(1, 3), 5, f(1, 3), Revoke,           Stop),
            (current(3, Replicate, Running),    f(1, 3), 5, f(1, 3), Delete,           Remove),
        ];
        for (row, (current, obeyed, generation, fence, ask, action)) in rows.iter().enumerate() {
            let order = Head {
                generation: *generation,
                fence: *fence,
                ask: *ask,
            };
            assert_eq!(
                decide(current.as_ref(), *obeyed, &order),
                *action,
                "row {row}: {order:?} on {current:?}"
            );
        }
    }

    fn any_ask() -> impl Strategy<Value = Ask> {
        prop_oneof![
            Just(Task(Acquire)),
            Just(Task(Replicate)),
            Just(PeersChanged),
            Just(Sealed),
            Just(Revoke),
            Just(Delete)
        ]
    }

    proptest! {
        /// Carried out in any order, what runs only ever goes to higher fences, and a repeated order never
        /// starts work that was started under it.
        #[test]
        fn fences_only_rise(orders in prop::collection::vec((0u64..2, 0u64..4, 0u64..3, any_ask()), 1..40)) {
            let mut current: Option<Current> = None;
            let mut obeyed = Fence::default();
            for (epoch, attempt, generation, ask) in orders {
                let order = Head { generation, fence: fence(epoch, attempt), ask };
                let before = current;
                let action = decide(current.as_ref(), obeyed, &order);
                if action.obeys() {
                    prop_assert!(order.fence >= obeyed);
                    obeyed = order.fence;
                }
                match action {
                    Start | Replace => {
                        let Task(kind) = ask else { panic!("{ask:?} starts nothing") };
                        prop_assert_eq!(action == Replace, before.is_some_and(|c| c.phase == Running));
                        current = Some(Current { generation, fence: order.fence, kind, phase: Running });
                        // The same order again does not restart it.
                        prop_assert_eq!(decide(current.as_ref(), obeyed, &order), Update);
                    }
                    Stop | Remove => {
                        if let Some(c) = &mut current {
                            *c = Current { fence: order.fence, phase: Revoked, ..*c };
                        }
                    }
                    _ => {}
                }
                if let (Some(was), Some(is)) = (before, current) {
                    prop_assert!(is.fence >= was.fence);
                }
            }
        }
    }
}
