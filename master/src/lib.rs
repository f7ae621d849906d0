//! The master: Raft, HTTP API, node sessions, reconciler.

pub mod plan;
