//! The planner: what the leader does next, as a pure function of the replicated state and of what it observes.
//!
//! Guaranteed: no clock, no I/O; the same input gives the same intents. An intent is only given while the state
//! asks for it, so calling [`plan`] again and again converges: once everything proposed is applied, everything
//! sent is noted with [`Observed::sent`] and nothing new is observed, it returns nothing.
//! Not guaranteed: that a proposal still matches when it is applied (it is fenced and then refused as stale), nor
//! that an order arrives (it is sent again in the next session).
//!
//! The caller should apply what was proposed before it plans again: planning on an old state only repeats
//! proposals.

mod nodes;
mod observed;
mod order;
mod peers;
mod places;
mod standstill;
mod tasks;

pub use observed::{Carried, Held, HeldState, Observed, PlanConfig, Sent, Session, Space, StagedReport};
pub use order::{Intent, Order, OrderBody, Peer};
pub use peers::MAX_PEERS;
pub use standstill::{Reported, Standstill};

use mooncake_proto::ids::{ModelRef, NodeId};
use mooncake_state::{Command, State};
use std::collections::BTreeMap;

/// See the module.
pub fn plan(state: &State, observed: &Observed, now_ms: u64) -> Vec<Intent> {
    let mut plan = Plan {
        state,
        observed,
        now_ms,
        intents: Vec::new(),
        downloads: BTreeMap::new(),
        places: BTreeMap::new(),
        can_be_had: BTreeMap::new(),
        given_bytes: BTreeMap::new(),
    };
    plan.upkeep();
    plan.judge_nodes();
    plan.compare_holdings();
    plan.judge_standstill();
    plan.authorise();
    plan.order();
    plan.stop_unwanted();
    plan.intents
}

/// One call of [`plan`].
struct Plan<'a> {
    state: &'a State,
    observed: &'a Observed,
    now_ms: u64,
    intents: Vec<Intent>,
    /// Downloads per node, with those that this plan proposes, as far as somebody asked.
    downloads: BTreeMap<&'a NodeId, usize>,
    /// Of nodes with a limit, as far as somebody asked.
    places: BTreeMap<&'a NodeId, places::Places>,
    /// See [`Plan::can_be_had`], as far as somebody asked.
    can_be_had: BTreeMap<&'a ModelRef, bool>,
    /// Space that this plan gives away, by node.
    given_bytes: BTreeMap<&'a NodeId, u64>,
}

impl<'a> Plan<'a> {
    fn propose(&mut self, command: Command) {
        self.intents.push(Intent::Propose(command));
    }

    /// Deadlines and retention.
    fn upkeep(&mut self) {
        let now_ms = self.now_ms;
        if self.state.next_deadline_ms().is_some_and(|at| at <= now_ms) {
            self.propose(Command::Tick { now_ms });
        }
        if self.state.prune_due(now_ms) {
            self.propose(Command::Prune { now_ms });
        }
    }
}

#[cfg(test)]
mod tests;
