//! The master: Raft, HTTP API, node sessions, reconciler.

pub mod config;
pub mod consensus;
pub mod plan;
pub mod server;
