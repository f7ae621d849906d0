//! The node process of Mooncake distribution: sources, chunk store, swarm, transports, task executor.

pub mod config;
pub mod executor;
pub mod http;
pub mod memory;
pub mod metrics;
pub mod node;
pub mod rate;
pub mod session;
pub mod source;
pub mod store;
pub mod swarm;
pub mod task;
pub mod transport;
