//! What moves the bytes: the sources and the swarm, behind a trait so that the executor's rules can be tested
//! without either.

use super::reports::Live;
use crate::{store::Artifact, task::TaskFailure, transport::PeerAddress};
use mooncake_proto::manifest::{Seal, Sources};
use std::{future::Future, pin::Pin, sync::Arc};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// A boxed future, so that the trait can be used as an object.
pub type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Read everything that is missing from the sources.
pub struct AcquireJob {
    /// Where the bytes go.
    pub artifact: Arc<Artifact>,
    /// Parallel to the manifest's files.
    pub sources: Sources,
    /// The result must reproduce it.
    pub expected_seal: Option<Seal>,
    /// Counts and complaints.
    pub live: Arc<Live>,
}

/// Fetch everything that is missing from peers.
pub struct FetchJob {
    /// Where the bytes go.
    pub artifact: Arc<Artifact>,
    /// Who may have blocks; changes as it goes on.
    pub peers: watch::Receiver<Vec<PeerAddress>>,
    /// Once committed.
    pub seal: watch::Receiver<Option<Seal>>,
    /// Counts and complaints.
    pub live: Arc<Live>,
}

/// Moves bytes into an artifact. Both end soon after `cancel`, and touch the artifact no more once they have
/// returned.
pub trait Transfer: Send + Sync + 'static {
    /// Every block held and every declared checksum checked: the seal of the copy.
    fn acquire(&self, job: AcquireJob, cancel: CancellationToken) -> Boxed<Result<Seal, TaskFailure>>;
    /// Every block held and, where the seal is known, the copy reproduces it.
    fn fetch(&self, job: FetchJob, cancel: CancellationToken) -> Boxed<Result<(), TaskFailure>>;
}
