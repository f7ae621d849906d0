//! The HTTP JSON types. Field names and lower-case states are the RFC's; what it does not name stands beside.

mod cluster;
mod problem;
mod request;
mod views;

pub use cluster::{
    ALIVE_WITHIN, AddMember, ClusterStatus, MemberId, MemberView, MembershipAnswer, TransferLeadership,
};
pub use problem::{Problem, ProblemCode};
pub use request::{
    ArtifactSpec, ChunkLayout, CreateJobRequest, FileSpec, JobPolicy, ManifestSpec, ModelSpec, ReplicaPolicy,
};
pub use views::*;

/// Header on every answer: the master (its Raft id) that served it.
pub const HEADER_SERVED_BY: &str = "x-mooncake-served-by";
/// Header on every answer: the serving master's Raft term.
pub const HEADER_TERM: &str = "x-mooncake-term";
/// Header on every answer: the log index applied when the answer was made. Pass it as `min_index` to a
/// stale read to never go backwards.
pub const HEADER_APPLIED_INDEX: &str = "x-mooncake-applied-index";
/// Header a forwarding follower sets; a request that carries it is never forwarded again.
pub const HEADER_FORWARDED_BY: &str = "x-mooncake-forwarded-by";
/// Content type of [`Problem`].
pub const PROBLEM_JSON: &str = "application/problem+json";
