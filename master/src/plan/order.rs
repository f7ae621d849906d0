//! Orders as plain data, and their wire form.

use mooncake_proto::{
    digest::{Algorithm, Digest},
    ids::{ModelRef, NodeId},
    manifest::Seal,
    pb::session as pb,
};
use mooncake_state::{Command, Fence, Node, rules::DownloadPayload};
use std::collections::BTreeMap;

/// What the reconciler shall do, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Intent {
    /// Put it into the log. A stale one is refused there: proposing twice is harmless.
    Propose(Command),
    /// Send it, then tell [`super::Observed::sent`]. The blobs it names go first.
    Send {
        /// To whom.
        node: NodeId,
        /// What.
        order: Order,
    },
}

/// One order to one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// The artifact.
    pub model: ModelRef,
    /// Its generation.
    pub generation: u64,
    /// Of the attempt that it begins or is about.
    pub fence: Fence,
    /// What to do.
    pub body: OrderBody,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OrderBody {
    /// `MODEL_DOWNLOAD`.
    Acquire(DownloadPayload),
    /// The copy tasks of every object.
    Replicate {
        /// Blob.
        manifest: Digest,
        /// Of the digest list.
        block_size_bytes: u32,
        /// Of the digest list.
        algorithm: Algorithm,
        /// From whom.
        peers: Vec<Peer>,
        /// Once sealed.
        seal: Option<Seal>,
    },
    /// The whole new list.
    PeersChanged {
        /// From whom.
        peers: Vec<Peer>,
    },
    /// The content is proven: publish when your own digest list reproduces this.
    Sealed {
        /// The proof.
        seal: Seal,
    },
    /// Stop; keep what is verified.
    Revoke {
        /// For a person.
        reason: String,
    },
    /// Remove what is in staging.
    Delete {
        /// For a person.
        reason: String,
    },
}

/// From whom blocks can be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its id.
    pub node: NodeId,
    /// Where it listens.
    pub data_address: String,
    /// `tcp`, `rdma`.
    pub transports: Vec<String>,
    /// E.g. `rack`.
    pub labels: BTreeMap<String, String>,
    /// It acquires from outside: its word on digests goes before any other peer's.
    pub seed: bool,
}

/// The labels that peers are told of each other: those by which the swarm chooses whom to ask. The others are for
/// people, and 64 peers' worth of them would not fit into a frame.
const PEER_LABELS: [&str; 2] = ["rack", "zone"];

impl Peer {
    pub(crate) fn new(id: &NodeId, node: &Node, seed: bool) -> Self {
        Self {
            node: id.clone(),
            data_address: node.about.data_address.clone(),
            transports: node.about.transports.clone(),
            labels: PEER_LABELS
                .iter()
                .filter_map(|key| node.about.labels.get_key_value(*key))
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect(),
            seed,
        }
    }
}

impl Order {
    /// The blobs that must precede it.
    pub fn blobs(&self) -> Vec<Digest> {
        match &self.body {
            OrderBody::Acquire(payload) => vec![payload.manifest, payload.sources],
            OrderBody::Replicate { manifest, .. } => vec![*manifest],
            OrderBody::PeersChanged { .. }
            | OrderBody::Sealed { .. }
            | OrderBody::Revoke { .. }
            | OrderBody::Delete { .. } => Vec::new(),
        }
    }

    /// The frame's body, from the leader of `term`.
    pub fn to_wire(&self, term: u64, require_checksums: bool) -> pb::Order {
        let bytes = |d: &Digest| d.as_bytes().to_vec().into();
        let algorithm = |a: Algorithm| pb::DigestAlgorithm::from(a) as i32;
        let body = match &self.body {
            OrderBody::Acquire(p) => pb::order::Body::Acquire(pb::Acquire {
                manifest_digest: bytes(&p.manifest),
                sources_digest: bytes(&p.sources),
                block_size_bytes: p.block_size_bytes,
                algorithm: algorithm(p.algorithm),
                expected_seal: p.expected_seal.map(Into::into),
                require_checksums,
            }),
            OrderBody::Replicate {
                manifest,
                block_size_bytes,
                algorithm: a,
                peers,
                seal,
            } => pb::order::Body::Replicate(pb::Replicate {
                manifest_digest: bytes(manifest),
                block_size_bytes: *block_size_bytes,
                algorithm: algorithm(*a),
                peers: peers.iter().map(Into::into).collect(),
                seal: seal.map(Into::into),
            }),
            OrderBody::PeersChanged { peers } => pb::order::Body::PeersChanged(pb::PeersChanged {
                peers: peers.iter().map(Into::into).collect(),
            }),
            OrderBody::Sealed { seal } => pb::order::Body::Sealed(pb::Sealed {
                seal: Some((*seal).into()),
            }),
            OrderBody::Revoke { reason } => pb::order::Body::Revoke(pb::Revoke {
                reason: reason.clone(),
            }),
            OrderBody::Delete { reason } => pb::order::Body::Delete(pb::Delete {
                reason: reason.clone(),
            }),
        };
        pb::Order {
            model: Some(self.model.clone().into()),
            generation: self.generation,
            fence: Some(self.fence.into()),
            term,
            body: Some(body),
        }
    }
}

impl From<&Peer> for pb::Peer {
    fn from(p: &Peer) -> Self {
        Self {
            node_id: p.node.0.clone(),
            data_address: p.data_address.clone(),
            transports: p.transports.clone(),
            labels: p.labels.clone().into_iter().collect(),
            seed: p.seed,
        }
    }
}
