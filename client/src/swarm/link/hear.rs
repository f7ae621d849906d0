//! What comes on a lane: answers and the peer's word, to those who wait for them.

use super::{
    Due, Event, Shared, What,
    lanes::{FIRST, LaneId},
};
use crate::{
    swarm::{chooser::Decline, words::PeerIndex},
    transport::{BlockGate, Frame, FrameReceiver, buffer::BlockBuffer},
};
use mooncake_proto::{digest::Digest, pb::peer as pb};
use pb::peer_message::Body;
use prost::Message;
use std::{io, time::Instant};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Lets in what is due on its lane.
struct LaneGate<'a> {
    shared: &'a Shared,
    lane: LaneId,
}

impl BlockGate for LaneGate<'_> {
    fn due(&self, id: u64) -> Option<u32> {
        match self.shared.state.lock().due.get(&id) {
            Some(Due {
                lane,
                what: What::Block { len, .. },
                ..
            }) if *lane == self.lane => Some(*len),
            _ => None,
        }
    }
}

/// Reads until the connection or the peer's manners fail (the error), or `stop`. What was taken by then has been handed
/// over: every answer is either given to whoever waits for it or still due.
pub(super) async fn hear(
    shared: &Shared,
    lane: LaneId,
    mut receiver: Box<dyn FrameReceiver>,
    stop: &CancellationToken,
) -> Option<io::Error> {
    let gate = LaneGate { shared, lane };
    loop {
        let frame = tokio::select! {
            biased;
            () = stop.cancelled() => return None,
            frame = receiver.receive(&gate) => frame,
        };
        let handled = match frame {
            Ok(Frame::Block { id, bytes }) => shared.block(lane, id, bytes).await,
            Ok(Frame::Control(bytes)) => match pb::PeerMessage::decode(bytes) {
                Ok(message) => shared.control(lane, message).await,
                Err(e) => Err(misbehaved(format!("sent a message that cannot be read: {e}"))),
            },
            Err(e) => Err(e),
        };
        if let Err(e) = handled {
            return Some(e);
        }
    }
}

fn not_open(did: &str, request: u64) -> io::Error {
    misbehaved(format!("{did} request {request}, which is not open"))
}

fn misbehaved(what: impl std::fmt::Display) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("the peer broke the protocol: it {what}"),
    )
}

/// A list of 32-byte digests.
pub(in crate::swarm) fn parse_digests(bytes: &[u8]) -> io::Result<Vec<Digest>> {
    if !bytes.len().is_multiple_of(32) {
        return Err(misbehaved(format!("sent {} bytes of digests", bytes.len())));
    }
    Ok(bytes
        .chunks_exact(32)
        .map(|c| Digest::try_from(c).expect("32 bytes"))
        .collect())
}

impl Shared {
    async fn block(&self, lane: LaneId, id: u64, bytes: BlockBuffer) -> io::Result<()> {
        let to = {
            let mut state = self.state.lock();
            let Some(Due {
                subscription,
                what: What::Block { block, permit, .. },
                ..
            }) = state.take_due(id, lane)
            else {
                return Err(not_open("answered", id));
            };
            // A fetch that ended does not want it any more.
            state
                .subscriptions
                .get(&subscription)
                .map(|s| (s.events.clone(), s.peer, block, permit))
        };
        if let Some((events, peer, block, permit)) = to {
            let _ = events
                .send(Event::Block {
                    peer,
                    block,
                    bytes,
                    permit,
                })
                .await;
        }
        Ok(())
    }

    /// The subscription, unless it ended: then what comes for it is dropped.
    fn subscriber(&self, subscription: u32) -> Option<(mpsc::Sender<Event>, PeerIndex, u32)> {
        self.state
            .lock()
            .subscriptions
            .get(&subscription)
            .map(|s| (s.events.clone(), s.peer, s.blocks))
    }

    async fn control(&self, lane: LaneId, message: pb::PeerMessage) -> io::Result<()> {
        let (events, event) = match message.body {
            Some(Body::Status(status)) if lane != FIRST => {
                let mut state = self.state.lock();
                if state.subscriptions.contains_key(&status.subscription) {
                    state.lanes.status(lane, status.subscription, status.state());
                }
                return Ok(());
            }
            // From a version that does not know `blocks_only`; the first lane brings it, too.
            Some(Body::Have(_)) if lane != FIRST => return Ok(()),
            Some(Body::Status(status)) => {
                let Some((events, peer, _)) = self.subscriber(status.subscription) else {
                    return Ok(());
                };
                let known = matches!(
                    status.state(),
                    pb::HoldingState::Partial | pb::HoldingState::Whole
                );
                let own_root = Digest::try_from(status.own_root.as_ref()).ok();
                (
                    events,
                    Event::Status {
                        peer,
                        known,
                        own_root,
                    },
                )
            }
            Some(Body::Have(have)) => {
                let Some((events, peer, blocks)) = self.subscriber(have.subscription) else {
                    return Ok(());
                };
                let mut list = Vec::new();
                for run in have.runs {
                    let digests = parse_digests(&run.digests)?;
                    if u64::from(run.first) + digests.len() as u64 > u64::from(blocks) {
                        return Err(misbehaved(format!(
                            "announced a block past the last one ({blocks} blocks)"
                        )));
                    }
                    list.extend((run.first..).zip(digests));
                }
                (events, Event::Have { peer, blocks: list })
            }
            Some(Body::Declined(declined)) => {
                // A further lane may be behind or ahead of the first one, whose word counts.
                let doubted = lane != FIRST && declined.reason() == pb::DeclineReason::NotHeld;
                let due = {
                    let mut state = self.state.lock();
                    let due = state.take_due(declined.request, lane);
                    if doubted
                        && let Some(Due {
                            subscription,
                            what: What::Block { block, .. },
                            ..
                        }) = due
                        && let Some(subscription) = state.subscriptions.get_mut(&subscription)
                    {
                        subscription.doubted.insert(block);
                    }
                    due
                };
                let Some(Due {
                    subscription, what, ..
                }) = due
                else {
                    return Err(not_open("declined", declined.request));
                };
                let Some((events, peer, _)) = self.subscriber(subscription) else {
                    return Ok(());
                };
                match what {
                    What::Digests { first, .. } => (
                        events,
                        Event::Digests {
                            peer,
                            first,
                            digests: None,
                        },
                    ),
                    What::Block { block, .. } => {
                        let why = match declined.reason() {
                            pb::DeclineReason::Busy => Decline::Busy,
                            pb::DeclineReason::SentElsewhere => Decline::SentElsewhere,
                            pb::DeclineReason::Canceled => Decline::Canceled,
                            // It is asked there.
                            pb::DeclineReason::NotHeld if doubted => Decline::Canceled,
                            pb::DeclineReason::NotHeld
                            | pb::DeclineReason::Unreadable
                            | pb::DeclineReason::Unspecified => Decline::NotHeld,
                        };
                        (events, Event::Declined { peer, block, why })
                    }
                }
            }
            Some(Body::Digests(answer)) => {
                let due = self.state.lock().take_due(answer.request, lane);
                let Some(Due {
                    subscription,
                    what: What::Digests { first, count },
                    ..
                }) = due
                else {
                    return Err(not_open("answered", answer.request));
                };
                let digests = parse_digests(&answer.digests)?;
                if answer.first != first || digests.len() != count as usize {
                    return Err(misbehaved("sent other digests than were asked for"));
                }
                let Some((events, peer, _)) = self.subscriber(subscription) else {
                    return Ok(());
                };
                (
                    events,
                    Event::Digests {
                        peer,
                        first,
                        digests: Some(digests),
                    },
                )
            }
            Some(Body::Pong(_)) => return Ok(()),
            // What a later version says beside its answers is not for this one.
            None => return Ok(()),
            Some(other) => return Err(misbehaved(format!("sent a puller's message: {other:?}"))),
        };
        let _ = events.send(event).await;
        Ok(())
    }

    /// A further lane is gone; what it owed is to be asked for anew. A peer that `broke` the protocol is left altogether.
    pub(super) async fn ended(&self, lane: LaneId, why: String, broke: bool) {
        let given_back = {
            let mut state = self.state.lock();
            state.lanes.close(lane, Instant::now());
            if broke {
                state.dead.get_or_insert_with(|| why.clone());
            }
            let owed: Vec<_> = state.due.extract_if(|_, due| due.lane == lane).collect();
            let declined = owed.into_iter().filter_map(|(_, due)| match due.what {
                What::Block { block, .. } => Some((due.subscription, block)),
                What::Digests { .. } => None,
            });
            declined.collect::<Vec<_>>()
        };
        if broke {
            self.stop.cancel();
        }
        let blocks = given_back.len();
        tracing::debug!(node = %self.node_id, lane, blocks, %why, "a further data connection closed");
        for (subscription, block) in given_back {
            if let Some((events, peer, _)) = self.subscriber(subscription) {
                let why = Decline::Canceled;
                let _ = events.send(Event::Declined { peer, block, why }).await;
            }
        }
    }

    /// The link is gone.
    pub(super) async fn fail(&self, mut why: String) {
        let (subscriptions, _due) = {
            let mut state = self.state.lock();
            // Unless it was given one when it was abandoned.
            why = state.dead.get_or_insert(why).clone();
            (
                std::mem::take(&mut state.subscriptions),
                std::mem::take(&mut state.due),
            )
        };
        if !subscriptions.is_empty() {
            tracing::debug!(node = %self.node_id, %why, "data connection closed");
        }
        for s in subscriptions.into_values() {
            let _ = s
                .events
                .send(Event::Down {
                    peer: s.peer,
                    why: why.clone(),
                })
                .await;
        }
    }
}
