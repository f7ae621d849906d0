//! The replicated state machine of Mooncake distribution: jobs, placements, artifacts, nodes.
//!
//! Guaranteed:
//! - **Pure.** No clock, no random numbers, no I/O, no iteration over hash maps: the same commands in the same
//!   order give the same [`State::digest`] on every master, in every process.
//! - **Idempotent.** Every command applied twice (even with others in between, where it is fenced) leaves what
//!   once leaves.
//! - **Absorbing.** Nothing changes a terminal job, or a view that is `staged` or `failed`.
//! - **Fenced.** A report counts only if artifact, generation, node, incarnation and attempt match; else the
//!   answer is [`Reply::Stale`] and the digest stays the same.
//! - Every history of a job and of a placement view is a path of the RFC's state diagrams. States passed
//!   through in one step are recorded with that step's time.
//!
//! Not guaranteed: that a node really has what it reported. The seal makes a wrong *publication* impossible, and
//! `ReportLost` corrects the record once the node says so. Nor that a job ends by itself: that takes node
//! verdicts, reports or a deadline, which the leader's planner proposes.
//!
//! Where things are: [`types`] what the state is made of; [`Command`] and [`Reply`]; [`rules`] the RFC's rules as
//! one pure function each; [`views`] the API's answers; [`invariants`] what must hold after every command.

#[cfg(all(feature = "sabotage", not(debug_assertions)))]
compile_error!("the feature `sabotage` breaks the product on purpose: it exists in debug builds only");

mod apply;
mod bytes;
mod command;
pub mod invariants;
pub mod rules;
mod state;
pub mod types;
pub mod views;

pub use bytes::Bytes;
pub use command::*;
pub use state::{SNAPSHOT_VERSION_1, SNAPSHOT_VERSION_2, SUPPORTED_CLUSTER_VERSION, State};
pub use types::*;
pub use views::{Live, LiveProgress, Transfers};

#[cfg(test)]
mod tests;
