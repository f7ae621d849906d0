//! The master: Raft, HTTP API, node sessions, reconciler.

pub(crate) mod backup;
pub(crate) mod clock;
pub mod config;
pub mod consensus;
pub mod context;
pub mod http;
pub mod metrics;
pub mod offline;
pub mod plan;
pub mod program;
pub(crate) mod reconciler;
pub mod server;
pub mod session;
mod threads;
