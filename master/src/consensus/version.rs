//! The newest cluster version that this program supports, and what others say of theirs.

use mooncake_proto::pb::raft as pb;
use mooncake_state::SUPPORTED_CLUSTER_VERSION;

/// The newest cluster version that this program can run under.
///
/// A debug build takes another one from the environment, so that a test can run two "builds" side by side. In a
/// release build this is a constant.
#[cfg(debug_assertions)]
pub(crate) fn supported() -> u32 {
    static SUPPORTED: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    *SUPPORTED.get_or_init(|| {
        std::env::var("MOONCAKE_TEST_SUPPORTED_CLUSTER_VERSION")
            .ok()
            .and_then(|text| text.parse().ok())
            .unwrap_or(SUPPORTED_CLUSTER_VERSION)
    })
}

/// The newest cluster version that this program can run under.
#[cfg(not(debug_assertions))]
pub(crate) const fn supported() -> u32 {
    SUPPORTED_CLUSTER_VERSION
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
