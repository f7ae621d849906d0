//! The contracts of Mooncake distribution: what processes say to each other and to callers.
//!
//! - [`backup`]: the file of a backup of the masters.
//! - [`manifest`]: one model version: its JSON form, its validation, its canonical encoding, and the
//!   arithmetic of chunks and blocks.
//! - [`api`]: the HTTP JSON types, error documents included.
//! - [`hello`] (feature `net`): the handshake that opens every connection between processes.
//! - [`http`] (feature `net`): the accept loop of the HTTP ports.
//! - [`text`]: what a message repeats of a caller, and how an error is told.
//! - [`mesh`]: who copies from whom.
//! - [`pb`]: the protobuf messages and, with feature `net`, the gRPC services.
//!
//! Nothing here does I/O, except for `hello` and `http`, which read and write the streams they are given.

pub mod api;
pub mod backup;
pub mod codec;
pub mod digest;
#[cfg(feature = "net")]
pub mod hello;
#[cfg(feature = "net")]
pub mod http;
pub mod ids;
pub mod manifest;
pub mod mesh;
pub mod pb;
pub mod text;
pub mod time;

/// The protocol version that this build speaks; it also speaks [`PROTOCOL_VERSION_MIN`].
pub const PROTOCOL_VERSION: u32 = 1;
/// The oldest protocol version that this build still speaks.
pub const PROTOCOL_VERSION_MIN: u32 = 1;
/// The cluster id used where none is configured (Mooncake's own default).
pub const DEFAULT_CLUSTER_ID: &str = "mooncake_cluster";
/// Downloads that a node has at work at once: a client lets more wait in line, and masters order no more. One keeps a
/// disk or a link busy; each more only holds buffers.
pub const MAX_ACQUISITIONS: usize = 8;
/// Largest frame of a node session, in bytes.
pub const MAX_SESSION_FRAME_BYTES: usize = 1 << 20;
/// Largest command in the Raft log, in bytes. Larger manifests go in as parts.
pub const MAX_COMMAND_BYTES: usize = 512 << 10;

/// The names of transports: in orders, reports, answers, metrics and logs.
pub mod transport {
    /// TCP.
    pub const TCP: &str = "tcp";
    /// One-sided reads of an RDMA device.
    pub const RDMA: &str = "rdma";
}
