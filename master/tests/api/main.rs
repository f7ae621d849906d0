//! The API and the node sessions on real masters in this process: consensus on disk, HTTP and gRPC on loopback.

mod cluster;
mod errors;
#[path = "../common/exit.rs"]
mod exit;
mod followers;
mod jobs;
mod node;
mod requests;
mod sessions;
