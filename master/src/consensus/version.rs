//! The newest cluster version that this program supports, and what others say of theirs.

use std::sync::OnceLock;

use mooncake_proto::pb::raft as pb;
use mooncake_state::SUPPORTED_CLUSTER_VERSION;

/// What this build supports, if its `main` said so.
static SUPPORTED: OnceLock<u32> = OnceLock::new();

/// Says which newest cluster version this build can run under. Later words change nothing.
pub(crate) fn set_supported(version: u32) {
    let _ = SUPPORTED.set(version);
}

/// The newest cluster version that this program can run under.
pub(crate) fn supported() -> u32 {
    SUPPORTED.get().copied().unwrap_or(SUPPORTED_CLUSTER_VERSION)
}

/// What the master that answered supports. A program from before the field says nothing, which means 1.
pub(crate) fn of_probe(answer: &pb::ProbeResponse) -> u32 {
    answer.supported_cluster_version.max(1)
}

/// Whether this program may run on a state of this version; the refusal says what to do.
pub(crate) fn check(cluster_version: u32) -> Result<(), String> {
    match cluster_version <= supported() {
        true => Ok(()),
        false => Err(format!(
            "this cluster is at version {cluster_version}, this program ({}) supports versions up to {}: start the version \
             of mooncake_master that the other masters run",
            super::SOFTWARE,
            supported()
        )),
    }
}
