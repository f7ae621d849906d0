//! The facts of this node, sent to the master of one session: the inventory, then what changes, and reports.
//!
//! Runs on the node's main runtime, apart from the session's thread: whatever it waits for (a disk, a lock of
//! the store) never delays a heartbeat.

use crate::{
    executor::{Cursor, Reports},
    store::{ArtifactState, Holding, Store},
};
use mooncake_proto::{
    ids::ModelRef,
    pb::session::{self as pb, node_frame::Body},
};
use prost::Message;
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::{sync::mpsc, time::Instant};

/// Most bytes of holdings or reports in one frame: well below [`mooncake_proto::MAX_SESSION_FRAME_BYTES`].
const BATCH_BYTES: usize = 256 << 10;
/// How often progress is reported while it changes.
pub const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// Changes of holdings within this time are sent together: computing an inventory costs a hash per artifact.
const HOLDINGS_INTERVAL: Duration = Duration::from_millis(100);

/// What the pump reads.
#[derive(Clone)]
pub struct Facts {
    /// Holdings.
    pub store: Store,
    /// Reports.
    pub reports: Arc<Reports>,
}

/// Sends until the session ends (`out` closes).
pub async fn pump(facts: Facts, out: mpsc::Sender<pb::NodeFrame>) {
    let mut holdings_changed = facts.store.changed();
    let mut reports_changed = facts.reports.changed();
    let mut said = BTreeMap::new();
    let mut cursor = Cursor::default();
    let mut complete = false;
    let mut holdings_due = Some(Instant::now());
    loop {
        if holdings_due.is_some_and(|at| at <= Instant::now()) {
            holdings_due = None;
            holdings_changed.borrow_and_update();
            let store = facts.store.clone();
            let Ok(now) = tokio::task::spawn_blocking(move || store.holdings()).await else {
                return;
            };
            let changed = difference(&mut said, now);
            if !send_holdings(&out, changed, !complete).await {
                return;
            }
            complete = true;
        }
        reports_changed.borrow_and_update();
        let (due, live) = facts.reports.due(&mut cursor);
        for reports in batches(due, BATCH_BYTES) {
            let batch = pb::ReportBatch { reports };
            if out
                .send(pb::NodeFrame {
                    body: Some(Body::Reports(batch)),
                })
                .await
                .is_err()
            {
                return;
            }
        }
        let tick = async {
            if live {
                tokio::time::sleep(PROGRESS_INTERVAL).await
            } else {
                std::future::pending().await
            }
        };
        let collected = async {
            match holdings_due {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = out.closed() => return,
            () = tick => {}
            () = collected => {}
            // Both senders live as long as `facts`.
            _ = reports_changed.changed() => {}
            _ = holdings_changed.changed(), if holdings_due.is_none() => {
                holdings_due = Some(Instant::now() + HOLDINGS_INTERVAL);
            }
        }
    }
}

async fn send_holdings(
    out: &mpsc::Sender<pb::NodeFrame>,
    changed: Vec<pb::Holding>,
    inventory: bool,
) -> bool {
    let mut frames = batches(changed, BATCH_BYTES);
    if frames.is_empty() {
        if !inventory {
            return true;
        }
        frames.push(Vec::new());
    }
    let last = frames.len() - 1;
    for (n, holdings) in frames.into_iter().enumerate() {
        let frame = pb::Holdings {
            holdings,
            inventory_complete: inventory && n == last,
        };
        if out
            .send(pb::NodeFrame {
                body: Some(Body::Holdings(frame)),
            })
            .await
            .is_err()
        {
            return false;
        }
    }
    true
}

/// The lines that differ from what was said; `said` is brought up to date. Gone ones become `ABSENT`.
fn difference(said: &mut BTreeMap<ModelRef, pb::Holding>, now: Vec<Holding>) -> Vec<pb::Holding> {
    let now: BTreeMap<_, _> = now
        .into_iter()
        .map(|h| (h.model.clone(), wire_holding(h)))
        .collect();
    let gone = said
        .iter()
        .filter(|(model, _)| !now.contains_key(*model))
        .map(|(_, line)| pb::Holding {
            state: pb::HoldingState::Absent as i32,
            verified_bytes: 0,
            verified_blocks: 0,
            seal: None,
            local_path: String::new(),
            rehashing: false,
            ..line.clone()
        });
    let mut out: Vec<_> = gone.collect();
    out.extend(
        now.iter()
            .filter(|(model, line)| said.get(*model) != Some(line))
            .map(|(_, line)| line.clone()),
    );
    *said = now;
    out
}

/// The wire form of one line of the inventory.
pub fn wire_holding(h: Holding) -> pb::Holding {
    let (state, local_path) = match h.state {
        ArtifactState::Partial => (pb::HoldingState::Partial, String::new()),
        ArtifactState::Whole => (pb::HoldingState::Whole, String::new()),
        ArtifactState::Staged { local_path } => (
            pb::HoldingState::Staged,
            local_path.to_string_lossy().into_owned(),
        ),
    };
    pb::Holding {
        model: Some(h.model.into()),
        generation: h.generation,
        manifest_digest: h.manifest_digest.as_bytes().to_vec().into(),
        state: state as i32,
        verified_bytes: h.verified_bytes,
        verified_blocks: h.verified_blocks.into(),
        seal: h.seal.map(Into::into),
        local_path,
        fence: Some(h.fence.into()),
        rehashing: h.rehashing,
    }
}

/// Cuts a list into frames of at most `limit` bytes; one item alone may be larger (items are bounded where
/// they are made, far below a frame's limit).
fn batches<M: Message>(items: Vec<M>, limit: usize) -> Vec<Vec<M>> {
    let mut out: Vec<Vec<M>> = Vec::new();
    let mut room = 0;
    for item in items {
        // Tag and length of a repeated field.
        let len = item.encoded_len() + 8;
        match out.last_mut() {
            Some(last) if len <= room => {
                room -= len;
                last.push(item);
            }
            _ => {
                room = limit.saturating_sub(len);
                out.push(vec![item]);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Fence;
    use mooncake_proto::digest::Digest;

    fn holding(name: &str, blocks: u32) -> Holding {
        Holding {
            model: ModelRef {
                model_id: name.into(),
                revision: "r".into(),
                format: "f".into(),
                provider: "p".into(),
            },
            generation: 1,
            manifest_digest: Digest::sha256(name.as_bytes()),
            state: ArtifactState::Partial,
            verified_bytes: blocks.into(),
            verified_blocks: blocks,
            seal: None,
            fence: Fence::default(),
            rehashing: false,
        }
    }

    #[test]
    fn only_changes_are_said() {
        let mut said = BTreeMap::new();
        assert_eq!(
            difference(&mut said, vec![holding("a", 0), holding("b", 1)]).len(),
            2
        );
        assert!(difference(&mut said, vec![holding("a", 0), holding("b", 1)]).is_empty());
        let changed = difference(&mut said, vec![holding("b", 2), holding("c", 0)]);
        let states: Vec<_> = changed
            .iter()
            .map(|h| (h.model.as_ref().unwrap().model_id.as_str(), h.state()))
            .collect();
        assert_eq!(
            states,
            [
                ("a", pb::HoldingState::Absent),
                ("b", pb::HoldingState::Partial),
                ("c", pb::HoldingState::Partial)
            ]
        );
        assert!(
            difference(&mut said, vec![holding("b", 2), holding("c", 0)]).is_empty(),
            "a loss is said once"
        );
    }

    #[test]
    fn batches_keep_order_and_size() {
        let items: Vec<_> = (0..1000)
            .map(|n| wire_holding(holding(&"x".repeat(n % 200), 1)))
            .collect();
        let frames = batches(items.clone(), 4096);
        assert!(frames.len() > 10);
        for holdings in &frames {
            let frame = pb::Holdings {
                holdings: holdings.clone(),
                inventory_complete: true,
            };
            assert!(frame.encoded_len() <= 4096 + 8);
        }
        assert_eq!(frames.concat(), items);
        assert_eq!(
            batches(vec![wire_holding(holding(&"x".repeat(9000), 1))], 4096).len(),
            1
        );
        assert!(batches(Vec::<pb::Holding>::new(), 4096).is_empty());
    }
}
