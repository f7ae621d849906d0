//! Nodes in one process, on loopback, over real stores.

use super::*;
use crate::store::{
    NewArtifact, StoreConfig,
    held::{HeldJournal, writers_wait},
};
use mooncake_proto::{
    digest::{Algorithm, Digest},
    hello::Secret,
    ids::ModelRef,
    manifest::{Checksum, Manifest, ManifestFile, ObjectIds},
};
use parking_lot::Mutex;
use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, sync::atomic::Ordering, time::Duration};
use tokio::task::JoinHandle;

mod bounds;
mod lies;
mod peers;
mod transfer;

const BLOCK: u32 = 256 << 10;
/// Longest time that any awaited event may take; only ever reached by a test that fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A file's bytes: every 4 KiB marked with its number, so that no two blocks of any two files are equal.
fn file_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut out: Vec<u8> = (0..len).map(|i| (i * 31 / 7) as u8).collect();
    for (i, chunk) in out.chunks_mut(4096).enumerate() {
        let mark = (i as u64 + (seed << 40)).to_be_bytes();
        let n = chunk.len().min(8);
        chunk[..n].copy_from_slice(&mark[..n]);
    }
    out
}

/// A model of these files.
fn manifest(files: &[(&str, usize)]) -> Arc<Manifest> {
    let files: Vec<ManifestFile> = files
        .iter()
        .map(|(path, size)| ManifestFile {
            path: (*path).into(),
            size_bytes: *size as u64,
            checksum: Checksum::Opaque("dummy".into()),
            artifact_key: (*path).into(),
            chunk_size_bytes: 1 << 20,
            chunk_count: (*size as u64).div_ceil(1 << 20),
            object_prefix: format!("m/{path}/"),
            objects: ObjectIds::derived(&format!("m/{path}/"), (*size as u64).div_ceil(1 << 20)),
        })
        .collect();
    let total_size_bytes = files.iter().map(|f| f.size_bytes).sum();
    let model = ModelRef {
        model_id: "org/name".into(),
        revision: "r1".into(),
        format: "safetensors".into(),
        provider: "local".into(),
    };
    Arc::new(Manifest {
        model,
        file_manifest_version: "1".into(),
        total_size_bytes,
        files,
    })
}

/// All bytes of a model, file by file.
fn model_bytes(manifest: &Manifest, seed: u64) -> Vec<Vec<u8>> {
    manifest
        .files
        .iter()
        .enumerate()
        .map(|(i, f)| file_bytes(seed * 100 + i as u64, f.size_bytes as usize))
        .collect()
}

struct Node {
    dir: tempfile::TempDir,
    store: Store,
    swarm: Swarm,
    artifact: Arc<Artifact>,
    address: SocketAddr,
    node_id: String,
    stop: CancellationToken,
    serving: Option<JoinHandle<()>>,
    counters: Arc<TransferCounters>,
    bad: Arc<Mutex<Vec<BadSource>>>,
}

struct Options {
    cluster: &'static str,
    secret: Option<&'static str>,
    config: SwarmConfig,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            cluster: "test",
            secret: Some("a secret of the tests"),
            config: SwarmConfig::default(),
        }
    }
}

impl Node {
    async fn start(name: &str, manifest: &Arc<Manifest>) -> Self {
        Self::start_with(name, manifest, Options::default()).await
    }

    async fn start_with(name: &str, manifest: &Arc<Manifest>, options: Options) -> Self {
        Self::start_with_store(name, manifest, options, |_| ()).await
    }

    async fn start_with_store(
        name: &str,
        manifest: &Arc<Manifest>,
        options: Options,
        change: impl FnOnce(&mut StoreConfig),
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = StoreConfig::new(dir.path().join("store"));
        change(&mut config);
        let store = tokio::task::spawn_blocking(move || Store::open(config).unwrap())
            .await
            .unwrap();
        let new = NewArtifact {
            model: manifest.model.clone(),
            generation: 1,
            manifest: manifest.clone(),
            block_size: BLOCK,
            algorithm: Algorithm::Blake3,
        };
        let opened = store.clone();
        let artifact = tokio::task::spawn_blocking(move || opened.begin(new).unwrap())
            .await
            .unwrap();
        let hello = HelloConfig {
            cluster_id: options.cluster.into(),
            secret: options.secret.map(|s| Secret::new(s.as_bytes()).unwrap()),
            node_id: format!("{name}:25001"),
            instance_id: store.store_id().into(),
            software: "test".into(),
            features: 0,
        };
        let swarm = Swarm::new(store.clone(), Arc::new(hello), options.config);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let (server, token) = (swarm.clone(), stop.clone());
        let serving = Some(tokio::spawn(async move { server.serve(listener, token).await }));
        Self {
            dir,
            store,
            swarm,
            artifact,
            address,
            node_id: format!("{name}:25001"),
            stop,
            serving,
            counters: Arc::default(),
            bad: Arc::default(),
        }
    }

    fn peer(&self, seed: bool) -> PeerAddress {
        PeerAddress {
            node_id: self.node_id.clone(),
            data_address: self.address.to_string(),
            transports: vec!["tcp".into()],
            labels: BTreeMap::new(),
            seed,
        }
    }

    /// A member of the same cluster that a test plays itself: where it listens, how it is dialled, what it says.
    async fn impostor(&self, name: &str, seed: bool) -> (TcpListener, PeerAddress, Arc<HelloConfig>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let peer = PeerAddress {
            node_id: format!("{name}:25001"),
            data_address: listener.local_addr().unwrap().to_string(),
            ..self.peer(seed)
        };
        let hello = HelloConfig {
            node_id: peer.node_id.clone(),
            instance_id: name.into(),
            ..HelloConfig::clone(&self.swarm.inner.hello)
        };
        (listener, peer, Arc::new(hello))
    }

    /// Writes blocks as a seed does.
    fn fill(&self, bytes: &[Vec<u8>], blocks: impl IntoIterator<Item = u32>) {
        for block in blocks {
            let r = self.artifact.blocks().locate(block).unwrap();
            let part = &bytes[r.file][r.offset as usize..r.offset as usize + r.len as usize];
            self.artifact.write_own_block(block, part).unwrap();
        }
    }

    fn all(&self) -> std::ops::Range<u32> {
        0..self.artifact.blocks().len()
    }

    fn fetch(
        &self,
        peers: &watch::Receiver<Vec<PeerAddress>>,
        seal: &watch::Receiver<Option<Seal>>,
    ) -> (JoinHandle<Result<(), TaskFailure>>, CancellationToken) {
        let cancel = CancellationToken::new();
        let bad = self.bad.clone();
        let sink: BadSources = Arc::new(move |b| bad.lock().push(b));
        let (swarm, artifact, counters) = (self.swarm.clone(), self.artifact.clone(), self.counters.clone());
        let (peers, seal, token) = (peers.clone(), seal.clone(), cancel.clone());
        (
            tokio::spawn(async move { swarm.fetch(artifact, peers, seal, counters, sink, token).await }),
            cancel,
        )
    }

    fn assert_equals(&self, bytes: &[Vec<u8>]) {
        for block in self.all() {
            let r = self.artifact.blocks().locate(block).unwrap();
            let want = &bytes[r.file][r.offset as usize..r.offset as usize + r.len as usize];
            assert!(
                self.artifact.read_block(block).unwrap() == want,
                "{}: block {block} differs",
                self.node_id
            );
        }
    }

    /// The file in staging, for damage.
    fn staging_file(&self, path: &str) -> PathBuf {
        let mut files = self.artifact.manifest().files.iter();
        self.artifact
            .file_path(files.position(|f| f.path == path).unwrap())
    }

    /// Flips a bit in every block of a file on the disk, behind the store's back.
    fn rot(&self, path: &str) {
        let file = self.staging_file(path);
        let mut bytes = std::fs::read(&file).unwrap();
        bytes.chunks_mut(BLOCK as usize).for_each(|c| c[c.len() / 2] ^= 1);
        let open = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&open, &bytes, 0).unwrap();
    }

    async fn wait_for(&self, what: &str, holds: impl Fn(&Artifact) -> bool) {
        let mut progress = self.artifact.progress();
        let waited = tokio::time::timeout(PATIENCE, async {
            while !holds(&self.artifact) {
                progress.changed().await.unwrap();
            }
        });
        assert!(
            waited.await.is_ok(),
            "{}: {what} did not come; has {} blocks",
            self.node_id,
            self.artifact.have_count()
        );
    }

    async fn kill(&mut self) {
        self.stop.cancel();
        if let Some(serving) = self.serving.take() {
            serving.await.unwrap();
        }
    }
}

async fn finish(task: JoinHandle<Result<(), TaskFailure>>) -> Result<(), TaskFailure> {
    tokio::time::timeout(PATIENCE, task)
        .await
        .expect("the fetch ends in time")
        .unwrap()
}

fn seal_of(manifest: &Manifest, bytes: &[Vec<u8>]) -> Seal {
    let blocks = mooncake_proto::manifest::BlockMap::new(manifest, BLOCK);
    let digests: Vec<Digest> = (0..blocks.len())
        .map(|b| {
            let r = blocks.locate(b).unwrap();
            Algorithm::Blake3.digest(&bytes[r.file][r.offset as usize..r.offset as usize + r.len as usize])
        })
        .collect();
    let root = mooncake_proto::manifest::root(Algorithm::Blake3, BLOCK, &manifest.digest(), &digests);
    Seal {
        block_size_bytes: BLOCK,
        algorithm: Algorithm::Blake3,
        root,
    }
}

fn small_model() -> (Arc<Manifest>, Vec<Vec<u8>>, Seal) {
    // Sub-folder, an empty file, one of 53 bytes, and sizes off the block's grid.
    let m = manifest(&[
        ("config.json", 53),
        ("empty", 0),
        ("sub/model.bin", 10 * BLOCK as usize + 12345),
        ("z", 3 * BLOCK as usize),
    ]);
    let bytes = model_bytes(&m, 1);
    let seal = seal_of(&m, &bytes);
    (m, bytes, seal)
}

/// A model of `blocks` whole blocks in one file.
fn model_of(blocks: u32) -> (Arc<Manifest>, Vec<Vec<u8>>, Seal) {
    let m = manifest(&[("model.bin", (blocks * BLOCK) as usize)]);
    let bytes = model_bytes(&m, 7);
    let seal = seal_of(&m, &bytes);
    (m, bytes, seal)
}

fn sealed(seal: Option<Seal>) -> (watch::Sender<Option<Seal>>, watch::Receiver<Option<Seal>>) {
    watch::channel(seal)
}
