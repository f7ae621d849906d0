//! An order as the executor takes it: every blob it names is at hand.

use super::decide::{Ask, Head, TaskKind};
use crate::store::Fence;
use bytes::Bytes;
use mooncake_proto::{
    digest::Algorithm,
    ids::ModelRef,
    manifest::Seal,
    pb::session::{self as pb, order::Body},
};
use std::collections::VecDeque;

/// One order.
#[derive(Clone, Debug)]
pub struct Order {
    /// Which model version.
    pub model: ModelRef,
    /// Of the artifact.
    pub generation: u64,
    /// Of the attempt.
    pub fence: Fence,
    /// Of the leader that sent it.
    pub term: u64,
    /// What to do.
    pub what: What,
}

/// What an order says.
#[derive(Clone, Debug)]
pub enum What {
    /// Read the sources, publish after the seal.
    Acquire(AcquireOrder),
    /// Fetch from peers, publish after the seal.
    Replicate(ReplicateOrder),
    /// The whole new list.
    PeersChanged(Vec<pb::Peer>),
    /// The committed seal.
    Sealed(Seal),
    /// Stop, with the reason.
    Revoke(String),
    /// Remove staging, with the reason.
    Delete(String),
}

/// How the artifact is cut, and of what it consists. The manifest is decoded where a long decode harms
/// nothing.
#[derive(Clone, Debug)]
pub struct Layout {
    /// [`mooncake_proto::manifest::Manifest::encode`].
    pub manifest: Bytes,
    /// In bytes.
    pub block_size: u32,
    /// Of the blocks.
    pub algorithm: Algorithm,
}

/// See [`What::Acquire`].
#[derive(Clone, Debug)]
pub struct AcquireOrder {
    /// The artifact.
    pub layout: Layout,
    /// [`mooncake_proto::manifest::Sources::encode`]: may hold signed URLs, never shown.
    pub sources: Secretive,
    /// The result must reproduce it.
    pub expected_seal: Option<Seal>,
    /// Refuse a file whose declared checksum is none.
    pub require_checksums: bool,
}

/// See [`What::Replicate`].
#[derive(Clone, Debug)]
pub struct ReplicateOrder {
    /// The artifact.
    pub layout: Layout,
    /// Who has, or will have, blocks.
    pub peers: Vec<pb::Peer>,
    /// Once committed.
    pub seal: Option<Seal>,
}

/// Bytes that `Debug` does not show.
#[derive(Clone)]
pub struct Secretive(pub Bytes);

impl std::fmt::Debug for Secretive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "({} bytes)", self.0.len())
    }
}

/// Why an order cannot be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum OrderError {
    /// The master sends the blob first; it did not, or it is not kept any more.
    #[error("it names a blob that was not sent before it")]
    MissingBlob,
    /// It cannot be understood.
    #[error("{0}")]
    Malformed(String),
}

impl Order {
    /// Reads the wire form; `blob` gives what a digest names.
    pub fn from_wire(order: pb::Order, blob: impl Fn(&[u8]) -> Option<Bytes>) -> Result<Self, OrderError> {
        let malformed = |why: &str| OrderError::Malformed(why.to_owned());
        let model = order.model.ok_or_else(|| malformed("it names no model"))?.into();
        let fence = order.fence.ok_or_else(|| malformed("it has no fence"))?.into();
        let blob = |digest: &[u8]| blob(digest).ok_or(OrderError::MissingBlob);
        let layout = |digest: &[u8], block_size: u32, algorithm: pb::DigestAlgorithm| {
            Ok(Layout {
                manifest: blob(digest)?,
                block_size,
                algorithm: algorithm.try_into().map_err(malformed)?,
            })
        };
        let seal = |s: Option<pb::Seal>| s.map(Seal::try_from).transpose().map_err(malformed);
        let what = match order
            .body
            .ok_or_else(|| malformed("it asks for something this version does not know"))?
        {
            Body::Acquire(a) => What::Acquire(AcquireOrder {
                layout: layout(&a.manifest_digest, a.block_size_bytes, a.algorithm())?,
                sources: Secretive(blob(&a.sources_digest)?),
                expected_seal: seal(a.expected_seal)?,
                require_checksums: a.require_checksums,
            }),
            Body::Replicate(r) => What::Replicate(ReplicateOrder {
                layout: layout(&r.manifest_digest, r.block_size_bytes, r.algorithm())?,
                peers: r.peers,
                seal: seal(r.seal)?,
            }),
            Body::PeersChanged(p) => What::PeersChanged(p.peers),
            Body::Sealed(s) => What::Sealed(seal(s.seal)?.ok_or_else(|| malformed("it has no seal"))?),
            Body::Revoke(r) => What::Revoke(r.reason),
            Body::Delete(d) => What::Delete(d.reason),
        };
        Ok(Self {
            model,
            generation: order.generation,
            fence,
            term: order.term,
            what,
        })
    }

    /// The part that decides.
    pub fn head(&self) -> Head {
        let ask = match &self.what {
            What::Acquire(_) => Ask::Task(TaskKind::Acquire),
            What::Replicate(_) => Ask::Task(TaskKind::Replicate),
            What::PeersChanged(_) => Ask::PeersChanged,
            What::Sealed(_) => Ask::Sealed,
            What::Revoke(_) => Ask::Revoke,
            What::Delete(_) => Ask::Delete,
        };
        Head {
            generation: self.generation,
            fence: self.fence,
            ask,
        }
    }
}

/// Adds an order to what waits for one artifact, and drops what it makes moot: of each kind at most one order
/// waits, all of the same fence. So the queue is bounded by the number of kinds, and a master can send as
/// much as it likes while a task takes its time to stop. Gives back an order that is out of date.
pub(super) fn enqueue(queue: &mut VecDeque<Order>, order: Order) -> Option<Order> {
    if queue.iter().any(|q| q.fence > order.fence) {
        return Some(order);
    }
    queue.retain(|q| q.fence == order.fence);
    let ask = order.head().ask;
    match queue.iter_mut().find(|q| q.head().ask == ask) {
        // In its place: a seal must not overtake the task that waits for it.
        Some(same) => *same = order,
        None => queue.push_back(order),
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> ModelRef {
        ModelRef {
            model_id: "m".into(),
            revision: "r".into(),
            format: "f".into(),
            provider: "p".into(),
        }
    }

    fn order(attempt: u64, what: What) -> Order {
        Order {
            model: model(),
            generation: 1,
            fence: Fence {
                recovery_epoch: 0,
                attempt,
            },
            term: 1,
            what,
        }
    }

    fn replicate(peer: &str) -> What {
        What::Replicate(ReplicateOrder {
            layout: Layout {
                manifest: Bytes::new(),
                block_size: 1 << 18,
                algorithm: Algorithm::Blake3,
            },
            peers: vec![pb::Peer {
                node_id: peer.into(),
                ..Default::default()
            }],
            seal: None,
        })
    }

    #[test]
    fn the_queue_keeps_only_what_counts() {
        let mut queue = VecDeque::new();
        for n in 0..1000 {
            assert!(enqueue(&mut queue, order(1, replicate(&n.to_string()))).is_none());
            assert!(enqueue(&mut queue, order(1, What::PeersChanged(Vec::new()))).is_none());
        }
        assert_eq!(queue.len(), 2);
        assert!(matches!(&queue[0].what, What::Replicate(r) if r.peers[0].node_id == "999"));
        assert!(enqueue(&mut queue, order(2, What::Revoke("gone".into()))).is_none());
        assert_eq!(queue.len(), 1, "a later fence drops the earlier ones");
        assert!(
            enqueue(&mut queue, order(1, replicate("late"))).is_some(),
            "and refuses them"
        );
        assert!(enqueue(&mut queue, order(2, What::Delete("gone".into()))).is_none());
        assert_eq!(queue.len(), 2);
    }

    #[test]
    fn wire_orders() {
        let seal = Seal {
            block_size_bytes: 1 << 18,
            algorithm: Algorithm::Blake3,
            root: Algorithm::Blake3.digest(b""),
        };
        let wire = |body| pb::Order {
            model: Some(model().into()),
            generation: 7,
            fence: Some(pb::Fence {
                recovery_epoch: 1,
                attempt: 2,
            }),
            term: 3,
            body,
        };
        let known = |digest: &[u8]| (digest == b"known").then(|| Bytes::from_static(b"blob"));
        let acquire = |manifest: &'static [u8], algorithm: i32| {
            wire(Some(Body::Acquire(pb::Acquire {
                manifest_digest: Bytes::from_static(manifest),
                sources_digest: Bytes::from_static(b"known"),
                block_size_bytes: 1 << 18,
                algorithm,
                expected_seal: Some(seal.into()),
                require_checksums: false,
            })))
        };
        let read = Order::from_wire(acquire(b"known", 1), known).unwrap();
        assert_eq!(
            read.fence,
            Fence {
                recovery_epoch: 1,
                attempt: 2
            }
        );
        let What::Acquire(a) = read.what else {
            panic!("an acquire order")
        };
        assert_eq!(
            (a.layout.manifest.as_ref(), a.expected_seal),
            (&b"blob"[..], Some(seal))
        );
        assert!(
            !format!("{:?}", a.sources).contains("98"),
            "sources are not shown"
        );

        assert_eq!(
            Order::from_wire(acquire(b"other", 1), known).unwrap_err(),
            OrderError::MissingBlob
        );
        assert!(matches!(
            Order::from_wire(acquire(b"known", 0), known),
            Err(OrderError::Malformed(_))
        ));
        assert!(matches!(
            Order::from_wire(wire(None), known),
            Err(OrderError::Malformed(_))
        ));
        let no_seal = wire(Some(Body::Sealed(pb::Sealed { seal: None })));
        assert!(matches!(
            Order::from_wire(no_seal, known),
            Err(OrderError::Malformed(_))
        ));
        let no_fence = pb::Order {
            fence: None,
            ..acquire(b"known", 1)
        };
        assert!(matches!(
            Order::from_wire(no_fence, known),
            Err(OrderError::Malformed(_))
        ));
    }
}
