//! One task from its order to its outcome.
//!
//! ```text
//! acquire:    begin -> read sources, check -> ACQUIRED -> (seal) -> publish -> STAGED
//! replicate:  begin -> fetch from peers    ------------> (seal) -> publish -> STAGED
//! ```
//! Nothing here needs a master until the seal: a task whose masters are all dead goes on to its last byte and
//! waits there, without a time-out; revoke and shutdown end it.

use super::{
    decide::TaskKind,
    order::{AcquireOrder, Layout, ReplicateOrder},
    reports::{Live, Outcome, Reports},
    transfer::{AcquireJob, FetchJob, Transfer},
};
use crate::{
    store::{
        Artifact, ArtifactState, Fence, NewArtifact, PublishError, Rehash, Store, StoreError, crash::broken,
    },
    task::TaskFailure,
    transport::PeerAddress,
};
use mooncake_proto::{
    ids::ModelRef,
    manifest::{Checksum, Manifest, Seal, Sources},
};
use std::{path::PathBuf, sync::Arc};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

/// Tasks that prepare their staging at once: each blocks a thread, and the disk does not get faster.
pub const MAX_BEGINS: usize = 4;
/// Steps of re-hashing what was recorded before a restart, at once: as for [`MAX_BEGINS`]. All tasks take turns, so
/// that each is seen to get on, and one with little to hash does not wait for one with much.
pub const MAX_REHASHES: usize = 4;
/// Copies that are published at once: as for [`MAX_BEGINS`].
pub const MAX_PUBLISHES: usize = 4;
/// Orders whose fence is made durable at once: each waits for a sync of the same file.
pub(super) const MAX_OBEYS: usize = 4;
/// Staging folders that are removed at once.
pub(super) const MAX_REMOVALS: usize = 2;
/// Times that a whole copy which does not reproduce the seal is repaired before the attempt is given up: once
/// is what a lying peer costs; a second time is bad luck, a third a fault.
const MAX_REPAIRS: u32 = 3;

/// What all tasks of a node share.
pub struct Shared {
    /// Where models go.
    pub store: Store,
    /// What moves bytes.
    pub transfer: Arc<dyn Transfer>,
    /// Where outcomes go.
    pub reports: Arc<Reports>,
    /// Of [`mooncake_proto::MAX_ACQUISITIONS`]. Acquisitions depend on nothing but their sources, so waiting cannot
    /// deadlock (replications may wait for each other across nodes: they are not limited).
    pub(super) acquisitions: Semaphore,
    pub(super) begins: Semaphore,
    pub(super) rehashes: Semaphore,
    pub(super) publishes: Semaphore,
    pub(super) obeys: Semaphore,
    pub(super) removals: Semaphore,
}

/// One task.
pub(super) struct Task {
    pub(super) shared: Arc<Shared>,
    pub(super) model: ModelRef,
    pub(super) generation: u64,
    pub(super) fence: Fence,
    pub(super) live: Arc<Live>,
    pub(super) peers: watch::Receiver<Vec<PeerAddress>>,
    pub(super) seal: watch::Receiver<Option<Seal>>,
    pub(super) cancel: CancellationToken,
}

/// The order's payload.
pub(super) enum Work {
    Acquire(AcquireOrder),
    Replicate(ReplicateOrder),
}

impl Work {
    pub(super) fn kind(&self) -> TaskKind {
        match self {
            Self::Acquire(_) => TaskKind::Acquire,
            Self::Replicate(_) => TaskKind::Replicate,
        }
    }
}

impl Task {
    /// To the end: the seal and the final folder.
    pub(super) async fn run(mut self, work: Work) -> Result<(Seal, PathBuf), TaskFailure> {
        match work {
            Work::Acquire(order) => self.acquire(order).await,
            Work::Replicate(order) => self.replicate(order).await,
        }
    }

    async fn acquire(&mut self, order: AcquireOrder) -> Result<(Seal, PathBuf), TaskFailure> {
        let shared = self.shared.clone();
        let (artifact, own) = {
            let _turn = self.turn(&shared.acquisitions).await?;
            let sources = order.sources.0;
            // The fault is not repeated: it could quote the source list, which may hold signed URLs.
            let turn = self.turn(&shared.begins).await?;
            let decoded =
                blocking(move || Sources::decode(&sources).map_err(|_| undecodable("source list"))).await??;
            drop(turn);
            let artifact = self.begin(order.layout, order.require_checksums).await?;
            let job = AcquireJob {
                artifact: artifact.clone(),
                sources: decoded,
                expected_seal: order.expected_seal,
                live: self.live.clone(),
            };
            let own = shared.transfer.acquire(job, self.cancel.clone()).await?;
            (artifact, own)
        };
        let committed = match order.expected_seal {
            // Committed already, and `acquire` compared.
            Some(seal) => seal,
            None => {
                tracing::info!(model = %self.model, fence = %self.fence, root = %own.root, "acquired, waiting for the seal to be committed");
                self.shared
                    .reports
                    .set(&self.model, self.fence, Outcome::Acquired(own));
                self.committed_seal().await?
            }
        };
        if own != committed {
            return Err(TaskFailure::permanent(
                "source_changed",
                format!(
                    "{} was sealed with root {} but this copy, read from its source, has root {}: the source changed \
                     between two downloads; distribute the new content under another revision",
                    self.model, committed.root, own.root
                ),
            ));
        }
        match self.publish(artifact, committed).await? {
            Ok(path) => Ok((committed, path)),
            Err(e) => Err(publish_failure(&e)),
        }
    }

    async fn replicate(&mut self, order: ReplicateOrder) -> Result<(Seal, PathBuf), TaskFailure> {
        let artifact = self.begin(order.layout, false).await?;
        let mut last = None;
        for _ in 0..=MAX_REPAIRS {
            let staged = matches!(artifact.state(), ArtifactState::Staged { .. });
            if !staged && !broken("fetch::skip") {
                let job = FetchJob {
                    artifact: artifact.clone(),
                    peers: self.peers.clone(),
                    seal: self.seal.clone(),
                    live: self.live.clone(),
                };
                self.shared.transfer.fetch(job, self.cancel.clone()).await?;
            }
            let committed = self.committed_seal().await?;
            match self.publish(artifact.clone(), committed).await? {
                Ok(path) => return Ok((committed, path)),
                // The fetch knows the seal by now, and finds out which blocks are wrong.
                Err(e @ (PublishError::RootMismatch { .. } | PublishError::NotWhole { .. }))
                    if !matches!(artifact.state(), ArtifactState::Staged { .. }) =>
                {
                    tracing::warn!(model = %self.model, fence = %self.fence, error = %e, "the copy does not reproduce the seal yet");
                    last = Some(e);
                }
                Err(e) => return Err(publish_failure(&e)),
            }
        }
        Err(last.as_ref().map_or_else(TaskFailure::canceled, publish_failure))
    }

    /// A turn at something that is limited.
    async fn turn<'a>(&self, what: &'a Semaphore) -> Result<tokio::sync::SemaphorePermit<'a>, TaskFailure> {
        tokio::select! {
            biased;
            () = self.cancel.cancelled() => Err(TaskFailure::canceled()),
            permit = what.acquire() => Ok(permit.expect("never closed")),
        }
    }

    /// Creates or resumes the staging folder. How far it is shows from the first re-hashed block on.
    async fn begin(&self, layout: Layout, require_checksums: bool) -> Result<Arc<Artifact>, TaskFailure> {
        let turn = self.turn(&self.shared.begins).await?;
        let (store, model, generation) = (self.shared.store.clone(), self.model.clone(), self.generation);
        let artifact = blocking(move || {
            let manifest = Manifest::decode(&layout.manifest).map_err(|_| undecodable("manifest"))?;
            let without = manifest.files.iter().find(|f| require_checksums && matches!(f.checksum, Checksum::Opaque(_)));
            if let Some(file) = without {
                return Err(TaskFailure::permanent(
                    "checksum_required",
                    format!("'{}' of {model} has no SHA-256 checksum, and the masters run with --require-checksums", file.path),
                ));
            }
            let new = NewArtifact {
                model,
                generation,
                manifest: Arc::new(manifest),
                block_size: layout.block_size,
                algorithm: layout.algorithm,
            };
            store.begin_unhashed(new).map_err(|e| store_failure(&e))
        })
        .await??;
        drop(turn);
        let _ = self.live.artifact.set(artifact.clone());
        let workers = (0..MAX_REHASHES).map(|_| self.rehash(&artifact));
        // To the end of each, also if one fails: nothing of a task touches the artifact after it.
        let ended = futures_util::future::join_all(workers).await;
        ended.into_iter().collect::<Result<(), _>>()?;
        artifact.check_open().map_err(|e| store_failure(&e))?;
        if self.cancel.is_cancelled() {
            return Err(TaskFailure::canceled());
        }
        Ok(artifact)
    }

    /// Takes part in hashing what was recorded before a restart, step by step, in turn with other tasks.
    async fn rehash(&self, artifact: &Arc<Artifact>) -> Result<(), TaskFailure> {
        let mut progress = artifact.progress();
        while !artifact.rehashed() {
            progress.borrow_and_update();
            let turn = self.turn(&self.shared.rehashes).await?;
            let work = artifact.clone();
            let step = blocking(move || work.rehash()).await?;
            drop(turn);
            if step == Rehash::Others {
                tokio::select! {
                    biased;
                    () = self.cancel.cancelled() => return Err(TaskFailure::canceled()),
                    // Its sender lives in the artifact.
                    _ = progress.changed() => {}
                }
            }
        }
        Ok(())
    }

    async fn publish(
        &self,
        artifact: Arc<Artifact>,
        seal: Seal,
    ) -> Result<Result<PathBuf, PublishError>, TaskFailure> {
        let _turn = self.turn(&self.shared.publishes).await?;
        // Not canceled from here on: a publish that has begun goes to its end.
        blocking(move || artifact.publish(&seal)).await
    }

    async fn committed_seal(&mut self) -> Result<Seal, TaskFailure> {
        tokio::select! {
            biased;
            () = self.cancel.cancelled() => Err(TaskFailure::canceled()),
            seal = self.seal.wait_for(Option::is_some) => {
                // The slot that holds the sender outlives its task.
                seal.ok().and_then(|s| *s).ok_or_else(TaskFailure::canceled)
            }
        }
    }
}

/// Runs what blocks away from the runtime's workers. A panic in it becomes a failure of the task.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, TaskFailure> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| internal(&e.to_string()))
}

pub(super) fn internal(what: &str) -> TaskFailure {
    TaskFailure::retryable(
        "internal_error",
        format!(
            "a fault in mooncake_client ended the task ({what}); its log has the details, please report it"
        ),
    )
}

fn undecodable(what: &str) -> TaskFailure {
    TaskFailure::permanent(
        "order_unreadable",
        format!(
            "this node cannot read the order's {what}: is it an older version than the masters? Upgrade mooncake_client"
        ),
    )
}

/// What a failure of the store means for the task.
pub fn store_failure(error: &StoreError) -> TaskFailure {
    TaskFailure {
        code: error.code().to_owned(),
        message: error.to_string(),
        retryable: error.retryable(),
    }
}

/// What a failure to publish means for the task.
pub fn publish_failure(error: &PublishError) -> TaskFailure {
    match error {
        PublishError::Store(e) => store_failure(e),
        PublishError::NotWhole { .. } => TaskFailure::retryable(
            error.code(),
            format!(
                "the copy cannot be published: {error}; what is verified is kept, another attempt fetches the rest"
            ),
        ),
        PublishError::RootMismatch { .. } => TaskFailure::retryable(
            error.code(),
            format!("the copy cannot be published: {error}; another attempt fetches what differs"),
        ),
    }
}
