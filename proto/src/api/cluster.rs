//! The masters themselves: who they are, and how that is changed.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A master that has not answered its leader for this long is not counted among the living.
pub const ALIVE_WITHIN: Duration = Duration::from_secs(3);

/// `GET /api/v1/cluster` (what the master asked knows), `GET /api/v1/cluster/members` (what the leader knows).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterStatus {
    /// The cluster's id.
    pub cluster_id: String,
    /// Who answered.
    pub served_by: u64,
    /// The Raft term.
    pub term: u64,
    /// The leader, if one is known.
    pub leader_id: Option<u64>,
    /// Applied log index on the answering master.
    pub applied_index: u64,
    /// Last log index on the answering master.
    pub last_log_index: u64,
    /// The term of its last log entry. Of two disks the one with the higher term holds more of what was acknowledged,
    /// whatever the indexes; of equal terms the one with the higher index. 0: an empty log, or a master from before
    /// this field.
    #[serde(default)]
    pub last_log_term: u64,
    /// The gate for commands and encodings.
    pub cluster_version: u32,
    /// Raised by restore and by recovery after quorum loss.
    pub recovery_epoch: u64,
    /// The masters.
    pub members: Vec<MemberView>,
    /// The state machine's digest on the answering master at `applied_index`, hex.
    pub state_digest: Option<String>,
}

/// One master.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemberView {
    /// Its Raft id.
    pub id: u64,
    /// Where masters and clients dial it.
    pub rpc_address: String,
    /// Its HTTP API.
    pub http_address: String,
    /// The random id of its disk.
    pub disk_id: String,
    /// `leader`, `follower`, or `learner`.
    pub role: String,
    /// Entries behind the leader's log, where the leader answers.
    pub lag: Option<u64>,
    /// Since its last answer to the leader, where the leader answers; none of the leader itself, nor of a master that
    /// never answered this leader.
    #[serde(default)]
    pub silent_ms: Option<u64>,
}

/// Body of `POST /api/v1/cluster/add`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddMember {
    /// `host:port` of the new master's RPC port, as the other masters and the nodes reach it.
    pub rpc_address: String,
    /// The id that is expected there; left out: whichever it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
}

/// Body of `POST /api/v1/cluster/promote` and `POST /api/v1/cluster/remove`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemberId {
    /// Which master.
    pub id: u64,
}

/// Body of `POST /api/v1/cluster/transfer`. At least one of the two, so that the request can be repeated: what it
/// asks for is either still to be done or done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransferLeadership {
    /// Who shall lead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<u64>,
    /// Who shall lead no more; with `to` left out, the master closest behind the log takes over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<u64>,
}

/// Answer to each of these requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MembershipAnswer {
    /// False: it was so before; a repeated request is answered like this.
    pub changed: bool,
    /// The master that the request was about.
    pub id: u64,
    /// For a person: what was done, or why nothing had to be.
    pub detail: String,
    /// The cluster afterwards.
    pub cluster: ClusterStatus,
}
