//! What the server says to one peer, beside blocks: what is here, and that a request is declined.

use super::{Peer, decline, encode};
use crate::{
    store::Artifact,
    swarm::link::{DIGESTS_PER_FRAME, parse_digests},
};
use mooncake_proto::{digest::Digest, pb::peer as pb};
use pb::peer_message::Body;
use prost::bytes::Bytes;
use std::{collections::VecDeque, io, sync::Arc, time::Duration};
use tokio::sync::Semaphore;

/// Pause between two announcements of one artifact on one connection: bounds the messages per second however
/// fast blocks come in, and is short against a block's way through the swarm.
pub(in crate::swarm) const ANNOUNCE_INTERVAL: Duration = Duration::from_millis(10);

impl Peer {
    pub(super) async fn send(&self, body: Body) -> io::Result<()> {
        self.control
            .send(encode(body))
            .await
            .map_err(|_| io::ErrorKind::NotConnected.into())
    }

    pub(super) async fn decline(&self, request: u64, reason: pb::DeclineReason) -> io::Result<()> {
        self.control
            .send(decline(request, reason))
            .await
            .map_err(|_| io::ErrorKind::NotConnected.into())
    }

    pub(super) async fn status(
        &self,
        subscription: u32,
        state: pb::HoldingState,
        root: Option<Digest>,
    ) -> io::Result<()> {
        let own_root = root.map(|r| r.as_bytes().to_vec().into()).unwrap_or_default();
        self.send(Body::Status(pb::Status {
            subscription,
            state: state.into(),
            own_root,
        }))
        .await
    }

    pub(super) fn serve_from(&self, subscription: u32, artifact: Option<Arc<Artifact>>) {
        if let Some(served) = self.subscriptions.lock().get_mut(&subscription) {
            served.artifact = artifact;
        }
    }

    pub(super) async fn unsubscribe(&self, subscription: u32) -> io::Result<()> {
        let Some(served) = self.subscriptions.lock().remove(&subscription) else {
            return Ok(());
        };
        served.stop.cancel();
        let still = self
            .subscriptions
            .lock()
            .values()
            .any(|s| Arc::ptr_eq(&s.log, &served.log));
        if !still {
            served.log.lock().disconnect(self.id);
        }
        let dropped: Vec<u64> = {
            let mut queue = self.queue.lock();
            let (dropped, kept): (VecDeque<_>, _) =
                queue.drain(..).partition(|q| q.subscription == subscription);
            *queue = kept;
            dropped.into_iter().map(|q| q.request).collect()
        };
        for request in dropped {
            self.decline(request, pb::DeclineReason::Canceled).await?;
        }
        Ok(())
    }

    /// The digests asked for, if all these blocks are held.
    pub(super) fn digests(&self, fetch: &pb::FetchDigests) -> Option<Bytes> {
        if fetch.count == 0 || fetch.count > DIGESTS_PER_FRAME {
            return None;
        }
        let artifact = self
            .subscriptions
            .lock()
            .get(&fetch.subscription)?
            .artifact
            .clone()?;
        let end = fetch.first.checked_add(fetch.count)?;
        let mut out = Vec::with_capacity(fetch.count as usize * 32);
        for block in fetch.first..end {
            out.extend_from_slice(artifact.digest(block)?.as_bytes());
        }
        debug_assert_eq!(
            parse_digests(&out).expect("whole digests").len(),
            fetch.count as usize
        );
        Some(out.into())
    }

    /// Until the artifact's handle is closed.
    pub(super) async fn announce_artifact(
        &self,
        subscription: u32,
        artifact: &Arc<Artifact>,
        seals: &Arc<Semaphore>,
    ) -> io::Result<()> {
        let mut progress = artifact.progress();
        let mut told = 0;
        let mut state = None;
        while artifact.closed().is_none() {
            progress.borrow_and_update();
            if state.is_none() {
                self.status(subscription, pb::HoldingState::Partial, None).await?;
                state = Some(None);
            }
            let fresh = artifact.added(told);
            told += fresh.len();
            for part in fresh.chunks(DIGESTS_PER_FRAME as usize) {
                let runs = runs(artifact, part);
                if !runs.is_empty() {
                    self.send(Body::Have(pb::Have { subscription, runs })).await?;
                }
            }
            let root = if artifact.have_count() == artifact.blocks().len() {
                let artifact = artifact.clone();
                let turn = seals.clone().acquire_owned().await.map_err(io::Error::other)?;
                let seal = tokio::task::spawn_blocking(move || {
                    let seal = artifact.seal_if_whole();
                    drop(turn);
                    seal
                });
                seal.await.map_err(io::Error::other)?.map(|s| s.root)
            } else {
                None
            };
            if state != Some(root) {
                state = Some(root);
                let word = if root.is_some() {
                    pb::HoldingState::Whole
                } else {
                    pb::HoldingState::Partial
                };
                self.status(subscription, word, root).await?;
            }
            // At once after a quiet time, in batches otherwise.
            tokio::time::sleep(ANNOUNCE_INTERVAL).await;
            if progress.changed().await.is_err() {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// Blocks as runs of consecutive numbers with their digests; those not held any more are left out.
fn runs(artifact: &Artifact, blocks: &[u32]) -> Vec<pb::Run> {
    let mut sorted = blocks.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let mut runs: Vec<(u32, Vec<u8>)> = Vec::new();
    for block in sorted {
        let Some(digest) = artifact.digest(block) else {
            continue;
        };
        match runs.last_mut() {
            Some((first, digests)) if *first + (digests.len() / 32) as u32 == block => {
                digests.extend_from_slice(digest.as_bytes());
            }
            _ => runs.push((block, digest.as_bytes().to_vec())),
        }
    }
    runs.into_iter()
        .map(|(first, digests)| pb::Run {
            first,
            digests: digests.into(),
        })
        .collect()
}
