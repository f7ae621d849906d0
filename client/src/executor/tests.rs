//! The executor on a real store, with transfers that the test holds in its hand.

use super::*;
use crate::{
    store::{ArtifactState, Fence, NewArtifact, StoreConfig},
    task::TaskFailure,
};
use bytes::Bytes;
use mooncake_proto::{
    digest::Algorithm,
    manifest::{BlockMap, Checksum, Manifest, ManifestFile, ObjectIds, Seal, Sources, root},
    pb::session as pb,
};
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::watch;

const BLOCK: u32 = 256 << 10;

fn model(name: &str) -> ModelRef {
    ModelRef {
        model_id: name.into(),
        revision: "r".into(),
        format: "f".into(),
        provider: "p".into(),
    }
}

fn fence(attempt: u64) -> Fence {
    Fence {
        recovery_epoch: 0,
        attempt,
    }
}

fn content() -> Vec<u8> {
    (0..BLOCK as usize * 2 + 1000)
        .map(|i| (i * 7 / 3) as u8)
        .collect()
}

fn manifest(name: &str, checksum: Checksum) -> Manifest {
    let size_bytes = content().len() as u64;
    Manifest {
        model: model(name),
        file_manifest_version: "v1".into(),
        total_size_bytes: size_bytes,
        files: vec![ManifestFile {
            path: "sub/model.bin".into(),
            size_bytes,
            checksum,
            artifact_key: "k".into(),
            chunk_size_bytes: 100_000,
            chunk_count: size_bytes.div_ceil(100_000),
            object_prefix: "o".into(),
            objects: ObjectIds::derived("o", size_bytes.div_ceil(100_000)),
        }],
    }
}

fn plain(name: &str) -> Manifest {
    manifest(name, Checksum::Opaque("dummy".into()))
}

fn blocks_of(manifest: &Manifest) -> Vec<Vec<u8>> {
    let (map, content) = (BlockMap::new(manifest, BLOCK), content());
    (0..map.len())
        .map(|b| map.locate(b).unwrap())
        .map(|r| content[r.offset as usize..r.offset as usize + r.len as usize].to_vec())
        .collect()
}

fn seal_of(manifest: &Manifest) -> Seal {
    let digests: Vec<_> = blocks_of(manifest)
        .iter()
        .map(|b| Algorithm::Blake3.digest(b))
        .collect();
    Seal {
        block_size_bytes: BLOCK,
        algorithm: Algorithm::Blake3,
        root: root(Algorithm::Blake3, BLOCK, &manifest.digest(), &digests),
    }
}

/// Moves the content when the gate opens; `wrong` blocks come damaged that many times.
struct Hand {
    gate: watch::Sender<bool>,
    started: AtomicUsize,
    at_work: AtomicUsize,
    most_at_work: AtomicUsize,
    wrong: AtomicUsize,
    peers: watch::Sender<usize>,
}

impl Default for Hand {
    fn default() -> Self {
        Self {
            gate: watch::Sender::new(false),
            started: AtomicUsize::new(0),
            at_work: AtomicUsize::new(0),
            most_at_work: AtomicUsize::new(0),
            wrong: AtomicUsize::new(0),
            peers: watch::Sender::new(0),
        }
    }
}

impl Hand {
    async fn work(
        &self,
        artifact: &Arc<crate::store::Artifact>,
        cancel: &CancellationToken,
    ) -> Result<(), TaskFailure> {
        self.started.fetch_add(1, Ordering::SeqCst);
        let at_work = self.at_work.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_at_work.fetch_max(at_work, Ordering::SeqCst);
        let blocks = blocks_of(artifact.manifest());
        // One block at once, the rest behind the gate.
        if !artifact.has(0) {
            artifact.write_own_block(0, &blocks[0]).unwrap();
        }
        let mut gate = self.gate.subscribe();
        let result = tokio::select! {
            _ = gate.wait_for(|open| *open) => Ok(()),
            () = cancel.cancelled() => Err(TaskFailure::canceled()),
        };
        if result.is_ok() {
            let damaged = self
                .wrong
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1))
                .is_ok();
            if artifact.have_count() == artifact.blocks().len() {
                artifact.forget(&[1]).unwrap();
            }
            for (n, block) in blocks.into_iter().enumerate() {
                if !artifact.has(n as u32) {
                    let mut block = block;
                    block[0] ^= u8::from(damaged);
                    artifact.write_own_block(n as u32, &block).unwrap();
                }
            }
        }
        self.at_work.fetch_sub(1, Ordering::SeqCst);
        result
    }
}

impl Transfer for Arc<Hand> {
    fn acquire(&self, job: AcquireJob, cancel: CancellationToken) -> Boxed<Result<Seal, TaskFailure>> {
        let hand = self.clone();
        Box::pin(async move {
            hand.work(&job.artifact, &cancel).await?;
            Ok(job.artifact.seal_if_whole().expect("all blocks were written"))
        })
    }

    fn fetch(&self, job: FetchJob, cancel: CancellationToken) -> Boxed<Result<(), TaskFailure>> {
        let (hand, mut peers) = (self.clone(), job.peers.clone());
        hand.peers.send_replace(peers.borrow_and_update().len());
        let seen = hand.clone();
        tokio::spawn(async move {
            while peers.changed().await.is_ok() {
                seen.peers.send_replace(peers.borrow_and_update().len());
            }
        });
        Box::pin(async move { hand.work(&job.artifact, &cancel).await })
    }
}

struct Bench {
    hand: Arc<Hand>,
    executor: Executor,
    store: Store,
}

impl Bench {
    fn new(folder: &tempfile::TempDir) -> Self {
        let store = Store::open(StoreConfig::new(folder.path().join("models"))).unwrap();
        let hand = Arc::new(Hand::default());
        let executor = Executor::new(store.clone(), Arc::new(hand.clone()), Arc::default());
        Self {
            hand,
            executor,
            store,
        }
    }

    fn order(&self, manifest: &Manifest, attempt: u64, what: What) {
        let model = manifest.model.clone();
        self.executor.submit(Order {
            model,
            generation: 1,
            fence: fence(attempt),
            term: 1,
            what,
        });
    }

    /// The report of `model` once `is` holds.
    async fn report(&self, is: impl Fn(&pb::TaskReport) -> bool) -> pb::TaskReport {
        let mut changed = self.executor.reports().changed();
        let mut cursor = Cursor::default();
        let search = async {
            loop {
                changed.borrow_and_update();
                if let Some(found) = self.executor.reports().due(&mut cursor).0.into_iter().find(&is) {
                    return found;
                }
                changed.changed().await.unwrap();
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(20), search)
            .await
            .expect("no such report")
    }

    async fn outcome(&self, outcome: pb::TaskOutcome) -> pb::TaskReport {
        self.report(|r| r.outcome() == outcome).await
    }

    /// Until the current task moves bytes.
    async fn started(&self, times: usize, manifest: &Manifest) {
        let search = async {
            while self.hand.started.load(Ordering::SeqCst) < times
                || self.store.find(&manifest.model).is_none_or(|a| !a.has(0))
            {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(20), search)
            .await
            .expect("the task does not start");
    }
}

fn layout(manifest: &Manifest) -> Layout {
    Layout {
        manifest: manifest.encode().into(),
        block_size: BLOCK,
        algorithm: Algorithm::Blake3,
    }
}

fn acquire(manifest: &Manifest) -> What {
    What::Acquire(AcquireOrder {
        layout: layout(manifest),
        sources: Secretive(Sources(vec!["/nowhere".into()]).encode().into()),
        expected_seal: None,
        require_checksums: false,
    })
}

fn replicate(manifest: &Manifest, seal: Option<Seal>) -> What {
    let peers = vec![pb::Peer {
        node_id: "n:1".into(),
        ..Default::default()
    }];
    What::Replicate(ReplicateOrder {
        layout: layout(manifest),
        peers,
        seal,
    })
}

#[tokio::test]
async fn acquired_then_sealed_then_staged() {
    let folder = tempfile::tempdir().unwrap();
    let bench = Bench::new(&folder);
    let m = plain("a");
    bench.order(&m, 1, acquire(&m));
    bench.started(1, &m).await;
    assert!(bench.executor.wants(&m.model));
    bench.hand.gate.send_replace(true);
    let acquired = bench.outcome(pb::TaskOutcome::Acquired).await;
    assert_eq!(acquired.seal, Some(seal_of(&m).into()));
    assert_eq!(
        (acquired.verified_bytes, acquired.verified_blocks),
        (content().len() as u64, 3)
    );
    assert!(acquired.checksum_verified);
    assert!(
        matches!(bench.store.find(&m.model).unwrap().state(), ArtifactState::Whole),
        "nothing is published before the seal"
    );

    bench.order(&m, 1, What::Sealed(seal_of(&m)));
    let staged = bench.outcome(pb::TaskOutcome::Staged).await;
    assert_eq!(staged.seal, Some(seal_of(&m).into()));
    assert_eq!(
        (staged.verified_bytes, staged.objects_done),
        (content().len() as u64, 6)
    );
    let file = std::path::Path::new(&staged.local_path).join("sub/model.bin");
    assert_eq!(std::fs::read(file).unwrap(), content());
    assert!(!bench.executor.wants(&m.model));

    // The same order from the next leader: the outcome again, no new work.
    bench.order(&m, 1, acquire(&m));
    bench.outcome(pb::TaskOutcome::Staged).await;
    assert_eq!(bench.hand.started.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_repeated_order_brings_the_peers_and_the_seal_without_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let bench = Bench::new(&folder);
    let m = plain("a");
    bench.order(&m, 1, replicate(&m, None));
    bench.started(1, &m).await;
    assert_eq!(*bench.hand.peers.borrow(), 1);
    bench.order(&m, 1, What::PeersChanged(vec![pb::Peer::default(); 3]));
    bench.hand.peers.subscribe().wait_for(|n| *n == 3).await.unwrap();
    bench.order(&m, 1, replicate(&m, Some(seal_of(&m))));
    bench.hand.peers.subscribe().wait_for(|n| *n == 1).await.unwrap();
    bench.hand.gate.send_replace(true);
    bench.outcome(pb::TaskOutcome::Staged).await;
    assert_eq!(bench.hand.started.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_later_attempt_starts_after_the_earlier_one_stopped_and_reuses_its_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let bench = Bench::new(&folder);
    let m = plain("a");
    bench.order(&m, 1, acquire(&m));
    bench.started(1, &m).await;
    bench.order(&m, 2, replicate(&m, Some(seal_of(&m))));
    bench.started(2, &m).await;
    bench.hand.gate.send_replace(true);
    let staged = bench.outcome(pb::TaskOutcome::Staged).await;
    assert_eq!(staged.fence, Some(fence(2).into()));
    assert_eq!(staged.kind(), pb::TaskKind::Replicate);
    assert_eq!(bench.hand.most_at_work.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_stale_order_is_refused_across_restarts() {
    let folder = tempfile::tempdir().unwrap();
    let m = plain("a");
    let bench = Bench::new(&folder);
    bench.order(&m, 3, acquire(&m));
    bench.started(1, &m).await;
    bench.order(&m, 2, replicate(&m, None));
    let refused = bench.outcome(pb::TaskOutcome::Failed).await;
    assert_eq!(
        (refused.fence, refused.failure.unwrap().code.as_str()),
        (Some(fence(2).into()), "stale_fence")
    );
    bench
        .report(|r| r.outcome() == pb::TaskOutcome::Running && r.fence == Some(fence(3).into()))
        .await;
    bench.executor.shutdown().await;
    let Bench {
        executor,
        store,
        hand,
    } = bench;
    drop((executor, store, hand));

    let bench = Bench::new(&folder);
    bench.order(&m, 2, replicate(&m, None));
    assert_eq!(
        bench.outcome(pb::TaskOutcome::Failed).await.failure.unwrap().code,
        "stale_fence"
    );
    assert_eq!(bench.hand.started.load(Ordering::SeqCst), 0);
    // The attempt that was obeyed goes on.
    bench.order(&m, 3, acquire(&m));
    bench.started(1, &m).await;
    bench.executor.shutdown().await;
}

#[tokio::test]
async fn revoke_keeps_blocks_and_delete_removes_them() {
    let folder = tempfile::tempdir().unwrap();
    let bench = Bench::new(&folder);
    let m = plain("a");
    bench.order(&m, 1, acquire(&m));
    bench.started(1, &m).await;
    bench.order(&m, 1, What::Revoke("canceled".into()));
    bench.order(&m, 1, acquire(&m)); // late: refused
    bench.order(&m, 2, acquire(&m));
    bench.started(2, &m).await;
    assert!(bench.store.find(&m.model).unwrap().has(0));
    assert_eq!(bench.hand.started.load(Ordering::SeqCst), 2);

    let mut changed = bench.store.changed();
    bench.order(&m, 2, What::Delete("gone".into()));
    while bench.store.find(&m.model).is_some() {
        changed.changed().await.unwrap();
    }
    assert_eq!(
        bench.executor.reports().outcome(&m.model),
        None,
        "nothing is said of a deleted artifact"
    );
}

#[tokio::test]
async fn a_copy_that_does_not_reproduce_the_seal_is_repaired() {
    let folder = tempfile::tempdir().unwrap();
    let bench = Bench::new(&folder);
    let m = plain("a");
    bench.hand.wrong.store(1, Ordering::SeqCst);
    bench.hand.gate.send_replace(true);
    bench.order(&m, 1, replicate(&m, Some(seal_of(&m))));
    let failed = bench
        .report(|r| matches!(r.outcome(), pb::TaskOutcome::Staged | pb::TaskOutcome::Failed))
        .await;
    // Block 2 stays damaged in this fake: repaired in vain, and never published.
    assert_eq!(failed.failure.unwrap().code, "root_mismatch");
    assert_eq!(
        bench.hand.started.load(Ordering::SeqCst),
        4,
        "once and three repairs"
    );
    assert!(!matches!(
        bench.store.find(&m.model).unwrap().state(),
        ArtifactState::Staged { .. }
    ));
}

#[tokio::test]
async fn another_seal_fails_the_acquisition() {
    let folder = tempfile::tempdir().unwrap();
    let bench = Bench::new(&folder);
    let m = plain("a");
    bench.hand.gate.send_replace(true);
    bench.order(&m, 1, acquire(&m));
    bench.outcome(pb::TaskOutcome::Acquired).await;
    let other = Seal {
        root: Algorithm::Blake3.digest(b"other"),
        ..seal_of(&m)
    };
    bench.order(&m, 1, What::Sealed(other));
    let failure = bench.outcome(pb::TaskOutcome::Failed).await.failure.unwrap();
    assert_eq!(
        (failure.code.as_str(), failure.retryable),
        ("source_changed", false)
    );
}

#[tokio::test]
async fn orders_that_cannot_be_carried_out_say_why() {
    let folder = tempfile::tempdir().unwrap();
    let bench = Bench::new(&folder);
    let (m, strict, odd) = (plain("a"), plain("strict"), plain("odd"));
    let unreadable = What::Replicate(ReplicateOrder {
        layout: Layout {
            manifest: Bytes::from_static(b"\x09nonsense"),
            ..layout(&m)
        },
        peers: Vec::new(),
        seal: None,
    });
    bench.order(&m, 1, unreadable);
    let What::Acquire(order) = acquire(&strict) else {
        unreachable!()
    };
    bench.order(
        &strict,
        1,
        What::Acquire(AcquireOrder {
            require_checksums: true,
            ..order
        }),
    );
    let What::Acquire(order) = acquire(&odd) else {
        unreachable!()
    };
    let odd_layout = Layout {
        block_size: 12345,
        ..layout(&odd)
    };
    bench.order(
        &odd,
        1,
        What::Acquire(AcquireOrder {
            layout: odd_layout,
            ..order
        }),
    );
    for (m, code) in [
        (m, "order_unreadable"),
        (strict, "checksum_required"),
        (odd, "invalid_artifact"),
    ] {
        let is = |r: &pb::TaskReport| {
            r.outcome() == pb::TaskOutcome::Failed && r.model == Some(m.model.clone().into())
        };
        let failure = bench.report(is).await.failure.unwrap();
        assert_eq!(
            (failure.code.as_str(), failure.retryable),
            (code, false),
            "{}",
            failure.message
        );
    }
    assert_eq!(bench.hand.started.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn shutdown_fails_nothing_and_starts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let bench = Bench::new(&folder);
    let m = plain("a");
    bench.order(&m, 1, acquire(&m));
    bench.started(1, &m).await;
    bench.executor.shutdown().await;
    assert_eq!(bench.hand.at_work.load(Ordering::SeqCst), 0);
    assert_eq!(bench.executor.reports().outcome(&m.model), Some(Outcome::Running));
    bench.order(&m, 2, acquire(&m));
    assert_eq!(bench.hand.started.load(Ordering::SeqCst), 1);
}

/// A slot that idles makes room for others; what it knew is not lost with it.
#[tokio::test]
async fn an_order_of_long_ago_restarts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let bench = Bench::new(&folder);
    let (ended, revoked) = (plain("ended"), plain("revoked"));
    bench.order(&revoked, 1, replicate(&revoked, None));
    bench.started(1, &revoked).await;
    bench.order(&revoked, 1, What::Revoke("canceled".into()));
    bench.hand.gate.send_replace(true);
    bench.order(&ended, 1, replicate(&ended, Some(seal_of(&ended))));
    bench.outcome(pb::TaskOutcome::Staged).await;
    for n in 0..2 * MAX_SLOTS {
        bench.order(&plain(&n.to_string()), 1, What::PeersChanged(Vec::new()));
        // Until it idles, so that it can make room.
        while !bench
            .executor
            .slots
            .lock()
            .by_model
            .values()
            .all(|h| h.inbox.is_idle())
        {
            tokio::task::yield_now().await;
        }
    }
    let slots = |m: &Manifest| bench.executor.slots.lock().by_model.contains_key(&m.model);
    assert!(!slots(&ended) && !slots(&revoked));
    bench.order(&revoked, 1, replicate(&revoked, None));
    bench.order(&ended, 1, replicate(&ended, Some(seal_of(&ended))));
    let again = bench.outcome(pb::TaskOutcome::Staged).await;
    assert_eq!(again.model, Some(ended.model.clone().into()));
    while !bench
        .executor
        .slots
        .lock()
        .by_model
        .values()
        .all(|h| h.inbox.is_idle())
    {
        tokio::task::yield_now().await;
    }
    assert_eq!(
        bench.hand.started.load(Ordering::SeqCst),
        2,
        "neither starts again"
    );
    // A later attempt does.
    bench.order(&revoked, 2, replicate(&revoked, Some(seal_of(&revoked))));
    bench
        .report(|r| r.outcome() == pb::TaskOutcome::Staged && r.fence == Some(fence(2).into()))
        .await;
}

/// What was recorded before a restart may take hours to hash.
#[tokio::test]
async fn a_long_rehash_keeps_no_other_waiting_and_can_be_revoked() {
    let folder = tempfile::tempdir().unwrap();
    let bench = Bench::new(&folder);
    bench.hand.gate.send_replace(true);
    let (m, small) = (plain("a"), plain("small"));
    let first = bench
        .store
        .begin(NewArtifact {
            model: m.model.clone(),
            generation: 1,
            manifest: Arc::new(m.clone()),
            block_size: BLOCK,
            algorithm: Algorithm::Blake3,
        })
        .unwrap();
    for (n, block) in blocks_of(&m).iter().enumerate().take(2) {
        first.write_own_block(n as u32, block).unwrap();
    }
    first.flush().unwrap();
    first.close("for the test");
    drop(first);
    // Nobody gets on with hashing for now.
    let all = MAX_REHASHES as u32;
    let turns = bench.executor.shared.rehashes.acquire_many(all).await.unwrap();
    for attempt in 1..=MAX_BEGINS as u64 + 1 {
        bench.order(&m, attempt, replicate(&m, Some(seal_of(&m))));
    }
    bench.order(&small, 1, replicate(&small, Some(seal_of(&small))));
    let staged = bench.outcome(pb::TaskOutcome::Staged).await;
    assert_eq!(
        staged.model,
        Some(small.model.clone().into()),
        "it has nothing to hash"
    );
    bench.order(&m, 9, What::Revoke("canceled".into()));
    let mut changed = bench.executor.reports().changed();
    bench.order(&m, 10, replicate(&m, Some(seal_of(&m))));
    let is_tenth = |r: &pb::TaskReport| r.fence == Some(fence(10).into());
    let search = async {
        while !bench
            .executor
            .reports()
            .due(&mut Cursor::default())
            .0
            .iter()
            .any(is_tenth)
        {
            changed.changed().await.unwrap();
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(20), search)
        .await
        .expect("the revoked one ended");
    assert_eq!(
        bench.hand.started.load(Ordering::SeqCst),
        1,
        "m is not hashed yet"
    );
    drop(turns);
    bench
        .report(|r| r.outcome() == pb::TaskOutcome::Staged && is_tenth(r))
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_artifacts_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let bench = Bench::new(&folder);
    bench.hand.gate.send_replace(true);
    let models: Vec<_> = (0..60).map(|n| plain(&n.to_string())).collect();
    for m in &models {
        bench.order(m, 1, replicate(m, Some(seal_of(m))));
    }
    for m in &models {
        let wire = Some(m.model.clone().into());
        bench
            .report(|r| r.outcome() == pb::TaskOutcome::Staged && r.model == wire)
            .await;
    }
}
