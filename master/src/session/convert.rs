//! From the wire to the planner's types. An error is a sentence about what the node sent.

use crate::plan::{Held, HeldState};
use mooncake_proto::{
    digest::Digest,
    ids::{MAX_MODEL_COMPONENT_BYTES, ModelRef, NodeId},
    manifest::Seal,
    pb::session as pb,
};
use mooncake_state::NodeAbout;

/// Longest free text that is kept of what a node sends (error messages, paths).
const MAX_TEXT_BYTES: usize = 4096;
/// Labels a node may have, and the longest of their parts.
const MAX_LABELS: usize = 64;
const MAX_LABEL_BYTES: usize = 256;
/// Bytes of all labels of a node: they are in every snapshot of the state, and some of them in orders.
const MAX_LABELS_BYTES: usize = 4096;
/// Transports a node may name.
const MAX_TRANSPORTS: usize = 8;

/// Cuts a text to what is kept.
pub(super) fn bounded(mut text: String) -> String {
    if text.len() > MAX_TEXT_BYTES {
        let end = (0..=MAX_TEXT_BYTES)
            .rev()
            .find(|i| text.is_char_boundary(*i))
            .unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

pub(super) fn seal(seal: pb::Seal) -> Result<Seal, String> {
    Seal::try_from(seal).map_err(str::to_owned)
}

/// The name of a model version. Longer ones than a job can have are nobody's.
pub(super) fn model(model: pb::ModelRef) -> Result<ModelRef, String> {
    let model = ModelRef::from(model);
    let parts = [&model.model_id, &model.revision, &model.format, &model.provider];
    match parts.iter().all(|part| part.len() <= MAX_MODEL_COMPONENT_BYTES) {
        true => Ok(model),
        false => Err(format!(
            "a part of a model's name is longer than {MAX_MODEL_COMPONENT_BYTES} bytes"
        )),
    }
}

pub(super) fn holding(holding: pb::Holding) -> Result<(ModelRef, Option<Held>), String> {
    let said = holding.state();
    let model = model(holding.model.ok_or("a holding without a model")?)?;
    let state = match said {
        pb::HoldingState::Partial => HeldState::Partial,
        pb::HoldingState::Whole => HeldState::Whole,
        pb::HoldingState::Staged => HeldState::Staged,
        pb::HoldingState::Absent => return Ok((model, None)),
        pb::HoldingState::Unspecified => return Err(format!("a holding of {model} without a state")),
    };
    let manifest = Digest::try_from(holding.manifest_digest.as_ref())
        .map_err(|_| format!("a holding of {model} whose manifest digest is not 32 bytes"))?;
    let held = Held {
        generation: holding.generation,
        manifest,
        state,
        verified_bytes: holding.verified_bytes,
        seal: holding.seal.map(seal).transpose()?,
        local_path: bounded(holding.local_path),
        fence: holding.fence.unwrap_or_default().into(),
        rehashing: holding.rehashing,
        from_inventory: false,
    };
    Ok((model, Some(held)))
}

/// Checks what a node says of itself.
pub(super) fn register(register: &pb::Register) -> Result<(NodeId, NodeAbout), String> {
    let node = NodeId::parse(&register.node_id).map_err(|e| format!("node id: {e}"))?;
    if register.store_id.is_empty() || register.store_id.len() > 128 {
        return Err("the store id has 1 to 128 characters".into());
    }
    NodeId::parse(&register.data_address).map_err(|e| format!("data address: {e}"))?;
    if !register.http_address.is_empty() {
        NodeId::parse(&register.http_address).map_err(|e| format!("HTTP address: {e}"))?;
    }
    let long = |text: &String| text.len() > MAX_LABEL_BYTES;
    if register.labels.len() > MAX_LABELS || register.labels.iter().any(|(k, v)| long(k) || long(v)) {
        return Err(format!(
            "a node has at most {MAX_LABELS} labels of {MAX_LABEL_BYTES} bytes"
        ));
    }
    let labels_bytes: usize = register.labels.iter().map(|(k, v)| k.len() + v.len()).sum();
    if labels_bytes > MAX_LABELS_BYTES {
        return Err(format!(
            "the node's labels have {labels_bytes} bytes together, the limit is {MAX_LABELS_BYTES}: give it fewer or shorter ones"
        ));
    }
    if register.transports.len() > MAX_TRANSPORTS || register.transports.iter().any(long) {
        return Err(format!(
            "a node names at most {MAX_TRANSPORTS} transports of {MAX_LABEL_BYTES} bytes"
        ));
    }
    let about = NodeAbout {
        data_address: register.data_address.clone(),
        http_address: register.http_address.clone(),
        transports: register.transports.clone(),
        labels: register.labels.clone().into_iter().collect(),
        version: bounded(register.version.clone()),
        capacity_bytes: register.capacity_bytes,
        free_bytes: register.free_bytes,
    };
    Ok((node, about))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_node_says_is_checked() {
        let good = pb::Register {
            node_id: "127.0.0.1:25001".into(),
            store_id: "s".into(),
            data_address: "127.0.0.1:50052".into(),
            ..Default::default()
        };
        assert!(register(&good).is_ok());
        let cases: [fn(&mut pb::Register); 6] = [
            |r| r.node_id = "x".into(),
            |r| r.store_id.clear(),
            |r| r.data_address = "nowhere".into(),
            |r| {
                r.labels
                    .extend((0..=MAX_LABELS).map(|i| (i.to_string(), String::new())))
            },
            |r| {
                r.labels
                    .extend((10..27).map(|i| (i.to_string(), "v".repeat(MAX_LABEL_BYTES))))
            },
            |r| r.transports = vec!["t".into(); MAX_TRANSPORTS + 1],
        ];
        for spoil in cases {
            let mut bad = good.clone();
            spoil(&mut bad);
            assert!(register(&bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_largest_order_fits_into_a_frame() {
        use crate::plan::{MAX_PEERS, Order, OrderBody, Peer};
        use prost::Message as _;
        let long = "x".repeat(MAX_LABEL_BYTES);
        let host = |c: &str| format!("{}:65535", c.repeat(247));
        let mut largest = pb::Register {
            node_id: host("n"),
            store_id: "s".into(),
            data_address: host("d"),
            transports: vec![long.clone(); MAX_TRANSPORTS],
            ..Default::default()
        };
        for key in ["rack".to_owned(), "zone".to_owned()]
            .into_iter()
            .chain((0..).map(|i| format!("{i:0>220}")))
        {
            largest.labels.insert(key.clone(), long.clone());
            if register(&largest).is_err() {
                largest.labels.remove(&key);
                break;
            }
        }
        let (node, about) = register(&largest).unwrap();
        assert!(about.labels.len() > 5, "{}", about.labels.len());
        let record = mooncake_state::Node {
            store_id: "s".into(),
            incarnation: 1,
            about,
            status: mooncake_proto::api::NodeStatus::Up,
            since_ms: 0,
            free_at_ms: 0,
            reason: None,
        };
        let peer = Peer::new(&node, &record, true);
        assert_eq!(peer.labels.keys().collect::<Vec<_>>(), ["rack", "zone"]);
        let order = Order {
            model: ModelRef {
                model_id: "m".repeat(1024),
                revision: "r".repeat(1024),
                format: "f".repeat(1024),
                provider: "p".repeat(1024),
            },
            generation: u64::MAX,
            fence: Default::default(),
            body: OrderBody::PeersChanged {
                peers: vec![peer; MAX_PEERS],
            },
        };
        let bytes = order.to_wire(u64::MAX, true).encoded_len();
        assert!(bytes < mooncake_proto::MAX_SESSION_FRAME_BYTES * 3 / 4, "{bytes}");
    }

    #[test]
    fn texts_are_cut_at_characters() {
        assert_eq!(bounded("short".into()), "short");
        let cut = bounded("ä".repeat(MAX_TEXT_BYTES));
        assert!(cut.len() <= MAX_TEXT_BYTES + 3 && cut.ends_with('…'));
    }

    #[test]
    fn absent_is_nothing_and_unspecified_is_an_error() {
        let model = Some(pb::ModelRef {
            model_id: "m".into(),
            ..Default::default()
        });
        let mut h = pb::Holding {
            model,
            state: pb::HoldingState::Absent as i32,
            ..Default::default()
        };
        assert!(matches!(holding(h.clone()), Ok((_, None))));
        h.state = pb::HoldingState::Unspecified as i32;
        assert!(holding(h.clone()).is_err());
        h.state = pb::HoldingState::Partial as i32;
        assert!(holding(h.clone()).unwrap_err().contains("manifest digest"));
        h.manifest_digest = vec![7; 32].into();
        assert!(matches!(holding(h), Ok((_, Some(_)))));
    }
}
