//! One-sided reads (RDMA READ) over the verbs API, for moving blocks between nodes: InfiniBand, RoCE, soft-RoCE.
//!
//! libibverbs is loaded at run time, so that one program runs on hosts with and without it. Whoever serves fills a slab of
//! registered memory and tells its peer, over an authenticated connection of their own, where it is and the key to it
//! ([`Server`]); the peer reads from there into a registered slab of its own ([`Reader`]) and says when it is done, so that
//! the slab can be used for something else.
//!
//! # Guaranteed
//! - Registered memory is within [`Config::memory_bytes`], whatever peers do.
//! - A key covers one slab, which holds nothing but blocks that every member of the cluster may have; nothing that a peer
//!   can name is ever written by it.
//! - Memory is not given back while the card may still touch it.
//! - A device may be taken away at any time: what uses it ends with an error within about [`keeper::SCAN_INTERVAL`], or
//!   after the card's own time-out, about four seconds.
//!
//! # Not guaranteed
//! - That what was read is what the peer meant: the receiver checks digests. A peer may overwrite a slab that it granted.
//! - Secrecy.

pub mod choice;
pub mod connection;
pub mod device;
pub mod keeper;
pub mod ledger;
pub mod node;
pub mod pool;
pub mod preflight;
pub mod queue;
pub mod reader;
pub mod server;
pub mod slab;
mod sys;

pub use choice::{Endpoint, Gid, GidKind, Mtu};
pub use node::{Config, Rdma, SetUpError};
pub use pool::{Lease, Pool, Room};
pub use reader::{Offer, Reader, ReaderError, Remote};
pub use server::Server;
pub use sys::LoadError;

use std::hash::{BuildHasher, Hasher};

/// A number that nobody can guess, and that no earlier connection under the same queue pair number had: packets of that one
/// which are still on their way are not taken for this one's.
fn random_24_bits() -> u32 {
    // Each has its own random keys.
    let hash = std::collections::hash_map::RandomState::new()
        .build_hasher()
        .finish();
    (hash & 0xff_ffff) as u32
}

/// A device and the way that it is used by, for a person.
fn describe(device: &device::Device, way: &queue::Way) -> String {
    format!(
        "{} port {}, GID {:?}, MTU {}",
        device.name().name,
        way.port,
        way.gid,
        way.mtu.bytes()
    )
}
