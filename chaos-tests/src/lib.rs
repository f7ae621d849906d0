//! The testbed: real binaries, real sockets, real disks, real kills.
//!
//! - [`cluster`]: masters and clients as processes on loopback, with everything cleaned up on drop.
//! - [`source`]: an HTTP source that counts what it served and misbehaves on request.
//! - [`model`]: model folders and the requests that distribute them.
//!
//! The binaries are taken from the target folder that this test was built into; `test.sh` builds them first.
//! What is not covered here: separate network namespaces and fault injection on the network.

pub mod cluster;
pub mod model;
pub mod source;

pub use cluster::{Cluster, ClusterOptions};
pub use model::Model;
pub use source::{Behaviour, HttpSource};
