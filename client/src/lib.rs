//! The node process of Mooncake distribution: sources, chunk store, swarm, transports, task executor.

pub mod source;
pub mod store;
pub mod swarm;
pub mod task;
pub mod transport;
