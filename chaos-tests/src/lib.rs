//! The testbed: real binaries, real sockets, real disks, real kills.
//!
//! - [`cluster`]: masters and clients as processes on loopback, with everything cleaned up on drop.
//! - [`testbed`]: the same with a network namespace each, shaped links, load balancer, partitions, disks that fail.
//! - [`nemesis`]: faults by name, injected into a testbed and healed.
//! - [`process`]: one such process; [`disk`]: one such disk.
//! - [`source`]: an HTTP source that counts what it served and misbehaves on request.
//! - [`failover`]: how long writes stop when the leader is lost, beside etcd.
//! - [`distribution`]: what that costs a distribution; [`broadcast`]: how near one comes to the speed of the link.
//! - [`loopback`]: what it costs a receiver in CPU; [`control_plane`]: what the masters can do apart from moving bytes.
//! - [`session`]: a node's end of a session, without a node.
//! - [`arguments`], [`report`]: what the benchmarks have in common.
//! - [`workload`]: callers; [`history`]: what they saw; [`checks`]: what must hold of it; [`soak`]: all of it for hours.
//! - [`model`]: model folders and the requests that distribute them.
//!
//! The binaries are taken from the target folder that this test was built into; `test.sh` builds them first.

pub mod arguments;
pub mod broadcast;
pub mod checks;
pub mod cluster;
pub mod control_plane;
pub mod disk;
pub mod distribution;
pub mod failover;
pub mod history;
pub mod loopback;
pub mod model;
pub mod nemesis;
pub mod process;
pub mod report;
pub mod session;
pub mod soak;
pub mod source;
pub mod testbed;
pub mod workload;

pub use cluster::{Cluster, ClusterOptions};
pub use disk::Disk;
pub use model::Model;
pub use nemesis::{Filter, Injected, Nemesis, Who};
pub use process::Process;
pub use source::{Behaviour, HttpSource};
pub use testbed::{Testbed, TestbedOptions};
