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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_whole_transfer() {
    let (m, bytes, seal) = small_model();
    let (a, b) = (Node::start("a", &m).await, Node::start("b", &m).await);
    a.fill(&bytes, a.all());
    let (_peers, peers) = watch::channel(vec![a.peer(true), b.peer(false)]);
    let (_seal, seal_rx) = watch::channel(Some(seal));
    finish(b.fetch(&peers, &seal_rx).0).await.unwrap();
    b.assert_equals(&bytes);
    assert_eq!(b.artifact.seal_if_whole(), Some(seal));
    assert_eq!(b.counters.load(), (m.total_size_bytes, 0), "each byte came once");
    // A block is counted when the sender is told that it went out, which may be after it arrived.
    let uploaded = || a.swarm.stats().uploaded_bytes.load(Ordering::Relaxed);
    let counted = async {
        while uploaded() < m.total_size_bytes {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, counted).await.unwrap();
    assert_eq!(uploaded(), m.total_size_bytes);
    assert!(b.bad.lock().is_empty());
    // A second fetch finds nothing to do.
    finish(b.fetch(&peers, &seal_rx).0).await.unwrap();
    assert_eq!(b.counters.load().0, m.total_size_bytes);
    // Published, it is served as well.
    let (artifact, to_publish) = (b.artifact.clone(), seal);
    tokio::task::spawn_blocking(move || artifact.publish(&to_publish).unwrap())
        .await
        .unwrap();
    let c = Node::start("c", &m).await;
    let (_peers, peers) = watch::channel(vec![b.peer(false)]);
    finish(c.fetch(&peers, &seal_rx).0).await.unwrap();
    c.assert_equals(&bytes);
    drop((b.store, b.dir));
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relay_to_a_node_that_never_sees_the_seed() {
    let (m, bytes, seal) = small_model();
    let (a, b, c) = (
        Node::start("a", &m).await,
        Node::start("b", &m).await,
        Node::start("c", &m).await,
    );
    let (_p, from_a) = watch::channel(vec![a.peer(true)]);
    let (_q, from_b) = watch::channel(vec![b.peer(false)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (at_c, _) = c.fetch(&from_b, &seal_rx);
    let (at_b, _) = b.fetch(&from_a, &seal_rx);
    // One block at the seed reaches the end of the chain while the seed has nothing else.
    a.fill(&bytes, [5]);
    c.wait_for("the first block", |x| x.has(5)).await;
    assert_eq!(c.artifact.have_count(), 1);
    a.fill(&bytes, a.all());
    finish(at_b).await.unwrap();
    finish(at_c).await.unwrap();
    c.assert_equals(&bytes);
    let (out, blocks) = (
        a.swarm.stats().uploaded_blocks.load(Ordering::Relaxed),
        u64::from(a.artifact.blocks().len()),
    );
    assert!(out < 2 * blocks, "one copy, not two: {out} of {blocks}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replication_goes_on_while_the_seed_receives_and_waits_for_the_seal() {
    let (m, bytes, seal) = model_of(40);
    let a = Node::start("a", &m).await;
    let (b, c) = (Node::start("b", &m).await, Node::start("c", &m).await);
    let (_p, peers) = watch::channel(vec![a.peer(true), b.peer(false), c.peer(false)]);
    let (seal_tx, seal_rx) = sealed(None);
    let (at_b, _) = b.fetch(&peers, &seal_rx);
    let (at_c, _) = c.fetch(&peers, &seal_rx);
    for block in 0..40 {
        a.fill(&bytes, [block]);
        if block % 8 == 0 {
            b.wait_for("an early block", |x| x.has(block)).await;
            c.wait_for("an early block", |x| x.has(block)).await;
            assert!(a.artifact.have_count() < 40 && !at_b.is_finished());
        }
    }
    b.wait_for("everything", |x| x.have_count() == 40).await;
    c.wait_for("everything", |x| x.have_count() == 40).await;
    // Whole, but nothing is proven before the seal.
    assert!(!at_b.is_finished() && !at_c.is_finished());
    seal_tx.send_replace(Some(seal));
    finish(at_b).await.unwrap();
    finish(at_c).await.unwrap();
    b.assert_equals(&bytes);
    c.assert_equals(&bytes);
    let out = a.swarm.stats().uploaded_blocks.load(Ordering::Relaxed);
    // The simulator counts copies, in virtual time; here a node that stands still may cost some.
    assert!(
        out <= 60,
        "{out} blocks left the seed, 40 are needed, 80 are two copies"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn six_nodes_and_one_copy_out_of_the_seed() {
    let (m, bytes, seal) = model_of(100);
    let a = Node::start("a", &m).await;
    a.fill(&bytes, a.all());
    let mut nodes = Vec::new();
    for i in 0..6 {
        nodes.push(Node::start(&format!("n{i}"), &m).await);
    }
    let all: Vec<_> = std::iter::once(a.peer(true))
        .chain(nodes.iter().map(|n| n.peer(false)))
        .collect();
    let (_p, peers) = watch::channel(all);
    let (_s, seal_rx) = sealed(Some(seal));
    let tasks: Vec<_> = nodes.iter().map(|n| n.fetch(&peers, &seal_rx).0).collect();
    for task in tasks {
        finish(task).await.unwrap();
    }
    for n in &nodes {
        n.assert_equals(&bytes);
        let (fetched, refetched) = n.counters.load();
        // What the end of a transfer asks for twice was not lost.
        assert_eq!(refetched, 0, "{}", n.node_id);
        assert_eq!(fetched - n.counters.duplicate(), m.total_size_bytes);
    }
    let out = a.swarm.stats().uploaded_blocks.load(Ordering::Relaxed);
    assert!(
        out <= 200,
        "{out} blocks left the seed, 100 are needed, 600 are six copies"
    );
}

/// One corrupt peer and one good one, neither the seed. Gives the receiver when it has everything, the corrupt
/// peer, what it should have, and how the fetch ended.
async fn with_a_corrupt_peer(
    trust_anything: bool,
) -> (Node, Node, Vec<Vec<u8>>, Option<Result<(), TaskFailure>>) {
    let (m, bytes, seal) = model_of(12);
    let (bad, good) = (Node::start("bad", &m).await, Node::start("good", &m).await);
    bad.fill(&bytes, bad.all());
    good.fill(&bytes, good.all());
    bad.rot("model.bin");
    let options = Options {
        config: SwarmConfig {
            trust_anything,
            ..Default::default()
        },
        ..Default::default()
    };
    let b = Node::start_with("b", &m, options).await;
    let (peers_tx, peers) = watch::channel(vec![bad.peer(false)]);
    // Without verification and with a seal, the repair would heal the damage (and fetch it again, for ever).
    let (_s, seal_rx) = sealed((!trust_anything).then_some(seal));
    let (task, _) = b.fetch(&peers, &seal_rx);
    // First the bad one alone, so that it is surely asked.
    let seen = async {
        while b.bad.lock().is_empty() && b.artifact.have_count() == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, seen)
        .await
        .expect("the bad peer is asked");
    peers_tx.send_replace(vec![bad.peer(false), good.peer(false)]);
    if trust_anything {
        b.wait_for("everything", |x| x.have_count() == 12).await;
        return (b, bad, bytes, None);
    }
    let outcome = Some(finish(task).await);
    (b, bad, bytes, outcome)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_corrupt_peer_is_reported_and_left() {
    let (b, bad, bytes, outcome) = with_a_corrupt_peer(false).await;
    outcome.expect("it ends").unwrap();
    b.assert_equals(&bytes);
    let reports = b.bad.lock().clone();
    assert_eq!(reports.len(), 1, "{reports:?}");
    assert_eq!(reports[0].node_id, bad.node_id);
    assert!(reports[0].reason.contains("announced"), "{reports:?}");
    // A peer of which nothing was verified yet gets one block to prove itself.
    let (fetched, refetched) = b.counters.load();
    assert_eq!(refetched, u64::from(BLOCK), "what was damaged came again");
    assert_eq!(
        fetched - b.artifact.blocks().total_bytes(),
        u64::from(BLOCK),
        "bytes in vain"
    );
}

/// The checks of the test above are able to fail: without verification the damage gets in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_verification_the_corrupt_peer_gets_through() {
    let (b, bad, bytes, _) = with_a_corrupt_peer(true).await;
    assert!(
        !b.bad.lock().iter().any(|r| r.node_id == bad.node_id),
        "nobody noticed"
    );
    let damaged = b.all().any(|block| {
        let r = b.artifact.blocks().locate(block).unwrap();
        let want = &bytes[0][r.offset as usize..r.offset as usize + r.len as usize];
        b.artifact.read_block(block).is_ok_and(|got| got != want)
    });
    assert!(damaged, "wrong bytes are held");
    assert_ne!(
        b.artifact.seal_if_whole(),
        Some(seal_of(b.artifact.manifest(), &bytes)),
        "the seal would not hold"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lies_before_the_seal_are_repaired_at_the_seal() {
    let (m, bytes, seal) = model_of(12);
    let lies = model_bytes(&m, 99);
    let (liar, good, b) = (
        Node::start("liar", &m).await,
        Node::start("good", &m).await,
        Node::start("b", &m).await,
    );
    // The liar is consistent: it has other content, with matching digests.
    liar.fill(&lies, [0, 3, 4, 11]);
    good.fill(&bytes, good.all());
    let (peers_tx, peers) = watch::channel(vec![liar.peer(false)]);
    let (seal_tx, seal_rx) = sealed(None);
    let (task, _) = b.fetch(&peers, &seal_rx);
    b.wait_for("the lies", |x| x.have_count() == 4).await;
    peers_tx.send_replace(vec![liar.peer(false), good.peer(false)]);
    b.wait_for("everything", |x| x.have_count() == 12).await;
    assert!(b.artifact.seal_if_whole() != Some(seal));
    seal_tx.send_replace(Some(seal));
    finish(task).await.unwrap();
    b.assert_equals(&bytes);
    assert_eq!(b.artifact.seal_if_whole(), Some(seal));
    assert_eq!(
        b.counters.load(),
        (16 * u64::from(BLOCK), 4 * u64::from(BLOCK)),
        "the four blocks, again"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_seeds_word_beats_a_liar() {
    let (m, bytes, seal) = model_of(6);
    let lies = model_bytes(&m, 99);
    let (liar, seed, b) = (
        Node::start("liar", &m).await,
        Node::start("seed", &m).await,
        Node::start("b", &m).await,
    );
    liar.fill(&lies, liar.all());
    seed.fill(&bytes, seed.all());
    // The seed is known from the start, but has nothing to say yet where it is not connected: so connect it first.
    let (peers_tx, peers) = watch::channel(vec![seed.peer(true)]);
    let (_s, seal_rx) = sealed(None);
    let (task, cancel) = b.fetch(&peers, &seal_rx);
    b.wait_for("a block", |x| x.have_count() > 0).await;
    peers_tx.send_replace(vec![seed.peer(true), liar.peer(false)]);
    b.wait_for("everything", |x| x.have_count() == 6).await;
    b.assert_equals(&bytes);
    assert_eq!(b.artifact.seal_if_whole(), Some(seal));
    cancel.cancel();
    assert!(finish(task).await.unwrap_err().is_canceled());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_that_does_not_reproduce_the_seal_is_refused_until_a_right_one_comes() {
    let (m, bytes, seal) = model_of(5);
    let lies = model_bytes(&m, 99);
    let (liar, good, b) = (
        Node::start("liar", &m).await,
        Node::start("good", &m).await,
        Node::start("b", &m).await,
    );
    liar.fill(&lies, liar.all());
    let (peers_tx, peers) = watch::channel(vec![liar.peer(true)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, _) = b.fetch(&peers, &seal_rx);
    b.wait_for("the lies", |x| x.have_count() == 5).await;
    assert!(!task.is_finished(), "a wrong root is no success");
    good.fill(&bytes, good.all());
    peers_tx.send_replace(vec![liar.peer(true), good.peer(false)]);
    finish(task).await.unwrap();
    b.assert_equals(&bytes);
}

/// Greets one puller, says that it holds all of `seal`, answers pings and nothing else; tells when it was asked
/// for its digest list.
async fn mute(listener: &TcpListener, hello: Arc<HelloConfig>, seal: Seal, asked: Arc<tokio::sync::Notify>) {
    use crate::transport::{Frame, NoBlocks};
    use mooncake_proto::pb::peer::{self as pb, peer_message::Body};
    use prost::Message;
    let (stream, _) = listener.accept().await.unwrap();
    let accepted = crate::transport::tcp::accept(stream, &hello, Arc::default(), None).await;
    let (mut sender, mut receiver) = accepted.map(|c| (c.sender, c.receiver)).unwrap();
    while let Ok(Frame::Control(bytes)) = receiver.receive(&NoBlocks).await {
        let answer = match pb::PeerMessage::decode(bytes).unwrap().body {
            Some(Body::Subscribe(s)) => Body::Status(pb::Status {
                subscription: s.subscription,
                state: pb::HoldingState::Whole.into(),
                own_root: seal.root.as_bytes().to_vec().into(),
            }),
            Some(Body::Ping(p)) => Body::Pong(pb::Pong { sequence: p.sequence }),
            Some(Body::FetchDigests(_)) => {
                asked.notify_one();
                continue;
            }
            _ => continue,
        };
        let message = pb::PeerMessage { body: Some(answer) };
        if sender.send_control(message.encode_to_vec().into()).await.is_err() {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_never_gives_its_list_is_passed_over() {
    let (m, bytes, seal) = model_of(5);
    let lies = model_bytes(&m, 99);
    let options = Options {
        config: SwarmConfig {
            list_timeout: Duration::from_millis(50),
            ..Default::default()
        },
        ..Default::default()
    };
    let (good, b) = (
        Node::start("good", &m).await,
        Node::start_with("b", &m, options).await,
    );
    good.fill(&bytes, good.all());
    // Whole, and wrong: only the list says where.
    b.fill(&lies, b.all());
    let (listener, silent, hello) = b.impostor("mute", false).await;
    let asked = Arc::new(tokio::sync::Notify::new());
    let serving = tokio::spawn({
        let asked = asked.clone();
        async move { mute(&listener, hello, seal, asked).await }
    });
    let (peers_tx, peers) = watch::channel(vec![silent.clone()]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, _) = b.fetch(&peers, &seal_rx);
    tokio::time::timeout(PATIENCE, asked.notified()).await.unwrap();
    peers_tx.send_replace(vec![silent, good.peer(false)]);
    finish(task).await.unwrap();
    b.assert_equals(&bytes);
    serving.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_killed_in_the_middle_is_replaced() {
    let (m, bytes, seal) = model_of(60);
    let (mut a, c, b) = (
        Node::start("a", &m).await,
        Node::start("c", &m).await,
        Node::start("b", &m).await,
    );
    a.fill(&bytes, 0..30);
    c.fill(&bytes, 30..60);
    let (_p, peers) = watch::channel(vec![a.peer(true), c.peer(false)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, _) = b.fetch(&peers, &seal_rx);
    b.wait_for("the middle", |x| x.have_count() >= 20).await;
    a.kill().await;
    c.fill(&bytes, 0..30);
    finish(task).await.unwrap();
    b.assert_equals(&bytes);
    assert!(b.bad.lock().is_empty(), "to die is not to be bad");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_comes_back_is_dialled_again() {
    let (m, bytes, seal) = model_of(20);
    let (mut a, b) = (Node::start("a", &m).await, Node::start("b", &m).await);
    a.fill(&bytes, 0..10);
    let (_p, peers) = watch::channel(vec![a.peer(true)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, _) = b.fetch(&peers, &seal_rx);
    b.wait_for("the first half", |x| x.have_count() == 10).await;
    a.kill().await;
    a.fill(&bytes, 10..20);
    let listener = TcpListener::bind(a.address).await.unwrap();
    let (server, token) = (a.swarm.clone(), CancellationToken::new());
    tokio::spawn(async move { server.serve(listener, token).await });
    finish(task).await.unwrap();
    b.assert_equals(&bytes);
    assert_eq!(b.counters.load(), (m.total_size_bytes, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_are_refused() {
    let (m, bytes, _) = model_of(2);
    let a = Node::start("a", &m).await;
    a.fill(&bytes, a.all());
    let try_with = async |options: Options| {
        let x = Node::start_with("x", &m, options).await;
        let hello = x.swarm.inner.hello.clone();
        let tcp = Tcp::new(hello);
        let dialled = tcp.connect(&a.peer(true), Arc::default()).await;
        dialled.expect_err("must be refused").to_string()
    };
    let e = try_with(Options {
        secret: None,
        ..Default::default()
    })
    .await;
    assert!(e.contains("secret_required"), "{e}");
    let e = try_with(Options {
        secret: Some("another secret than that"),
        ..Default::default()
    })
    .await;
    assert!(e.contains("wrong_secret"), "{e}");
    let e = try_with(Options {
        cluster: "other",
        ..Default::default()
    })
    .await;
    assert!(e.contains("wrong_cluster"), "{e}");
    // Another node than the one named, and oneself under another name.
    let b = Node::start("b", &m).await;
    let tcp = Tcp::new(b.swarm.inner.hello.clone());
    let stale = PeerAddress {
        node_id: "gone:25001".into(),
        ..a.peer(true)
    };
    let e = tcp
        .connect(&stale, Arc::default())
        .await
        .expect_err("another node")
        .to_string();
    assert!(e.contains("a:25001") && e.contains("out of date"), "{e}");
    let e = tcp
        .connect(&b.peer(true), Arc::default())
        .await
        .expect_err("itself")
        .to_string();
    assert!(e.contains("b:25001"), "{e}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uploads_and_buffers_are_bounded() {
    let (m, bytes, seal) = model_of(160);
    let config = SwarmConfig {
        max_uploads: 1,
        buffer_bytes: 8 << 20,
        ..Default::default()
    };
    let a = Node::start_with(
        "a",
        &m,
        Options {
            config: config.clone(),
            ..Default::default()
        },
    )
    .await;
    a.fill(&bytes, a.all());
    let mut nodes = Vec::new();
    for i in 0..3 {
        let options = Options {
            config: config.clone(),
            ..Default::default()
        };
        nodes.push(Node::start_with(&format!("n{i}"), &m, options).await);
    }
    let (_p, peers) = watch::channel(vec![a.peer(false)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let tasks: Vec<_> = nodes.iter().map(|n| n.fetch(&peers, &seal_rx).0).collect();
    let whole = (8 << 20) / BUDGET_UNIT_BYTES as usize;
    for task in tasks {
        finish(task).await.unwrap();
    }
    assert_eq!(a.swarm.stats().uploads_peak.load(Ordering::Relaxed), 1);
    for n in &nodes {
        n.assert_equals(&bytes);
        // All that was reserved came back; more than the budget cannot be reserved (a semaphore).
        assert_eq!(n.swarm.inner.budget.available_permits(), whole);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_budget_that_others_hold_delays_and_does_not_stop() {
    let (m, bytes, seal) = model_of(4);
    let (a, b) = (Node::start("a", &m).await, Node::start("b", &m).await);
    a.fill(&bytes, a.all());
    let budget = b.swarm.inner.budget.clone();
    let held = budget
        .clone()
        .acquire_many_owned(budget.available_permits() as u32)
        .await
        .unwrap();
    let (_p, peers) = watch::channel(vec![a.peer(true)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, _) = b.fetch(&peers, &seal_rx);
    // It is connected (the server knows it), and asks for nothing.
    let connected = async {
        while a.swarm.inner.server.connected() == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, connected).await.unwrap();
    assert_eq!(b.counters.load().0, 0);
    drop(held);
    finish(task).await.unwrap();
    b.assert_equals(&bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_may_get_its_order_before_its_peer_does() {
    let (m, bytes, seal) = model_of(4);
    let (a, b) = (Node::start("a", &m).await, Node::start("b", &m).await);
    // The peer has not heard of the model yet.
    let (store, model) = (a.store.clone(), m.model.clone());
    tokio::task::spawn_blocking(move || store.remove_staging(&model).unwrap())
        .await
        .unwrap();
    let (_p, peers) = watch::channel(vec![a.peer(true)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, _) = b.fetch(&peers, &seal_rx);
    let connected = async {
        while a.swarm.inner.server.connected() == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, connected).await.unwrap();
    let (store, manifest) = (a.store.clone(), m.clone());
    let artifact = tokio::task::spawn_blocking(move || {
        let model = manifest.model.clone();
        store.begin(NewArtifact {
            model,
            generation: 1,
            manifest,
            block_size: BLOCK,
            algorithm: Algorithm::Blake3,
        })
    });
    let artifact = artifact.await.unwrap().unwrap();
    let a = Node { artifact, ..a };
    a.fill(&bytes, a.all());
    finish(task).await.unwrap();
    b.assert_equals(&bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_empty_model_waits_for_its_seal_only() {
    let m = manifest(&[("empty", 0)]);
    let seal = seal_of(&m, &[vec![]]);
    let b = Node::start("b", &m).await;
    let (_p, peers) = watch::channel(vec![]);
    let (seal_tx, seal_rx) = sealed(None);
    let (task, _) = b.fetch(&peers, &seal_rx);
    seal_tx.send_replace(Some(seal));
    finish(task).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_reasons_end_a_fetch() {
    let (m, _, seal) = model_of(2);
    let b = Node::start("b", &m).await;
    let (_p, peers) = watch::channel(vec![]);
    // A seal that this order cannot reproduce.
    let (_s, wrong) = sealed(Some(Seal {
        block_size_bytes: 2 * BLOCK,
        ..seal
    }));
    let e = finish(b.fetch(&peers, &wrong).0).await.unwrap_err();
    assert_eq!((e.code.as_str(), e.retryable), ("seal_mismatch", false), "{e}");
    // Staging that goes away.
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, _) = b.fetch(&peers, &seal_rx);
    let (store, model) = (b.store.clone(), m.model.clone());
    tokio::task::spawn_blocking(move || store.remove_staging(&model).unwrap())
        .await
        .unwrap();
    let e = finish(task).await.unwrap_err();
    assert_eq!((e.code.as_str(), e.retryable), ("staging_closed", true), "{e}");
}

/// A write that waits for the journal is under way when the fetch is canceled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_written_after_a_fetch_has_returned() {
    let (m, bytes, seal) = model_of(12);
    let a = Node::start("a", &m).await;
    a.fill(&bytes, a.all());
    // Room for two blocks that are not journaled.
    let b = Node::start_with_store("b", &m, Options::default(), |config| {
        config.unjournaled_limit_bytes = 2 * u64::from(BLOCK);
    })
    .await;
    let journal = HeldJournal::of(&b.artifact);
    let (_p, peers) = watch::channel(vec![a.peer(true)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, cancel) = b.fetch(&peers, &seal_rx);
    b.wait_for("what there is room for", |x| x.have_count() == 2)
        .await;
    // The third one is in the store, and waits.
    writers_wait(&b.store, true).await;
    cancel.cancel();
    // On its own task it would return at once, if it did not wait.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(!task.is_finished(), "it has returned while a write is under way");
    journal.release();
    assert!(finish(task).await.unwrap_err().is_canceled());
    let held = b.artifact.have_count();
    assert_eq!(b.store.waiting_writers(), 0);
    b.artifact.flush().unwrap();
    assert_eq!(b.artifact.have_count(), held);
}

/// It answers pings, so that the connection lives, and no request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_abandoned_link_owed_is_free_and_nobody_gets_it_again() {
    let (m, _, seal) = model_of(2);
    let b = Node::start("b", &m).await;
    let (listener, silent, hello) = b.impostor("mute", false).await;
    tokio::spawn(async move {
        loop {
            mute(&listener, hello.clone(), seal, Arc::default()).await;
        }
    });
    let link = b.swarm.inner.links.get(&silent).await.unwrap();
    let (events, mut heard) = tokio::sync::mpsc::channel(8);
    let subscription = link.subscribe(&b.artifact, 1, events.clone()).unwrap();
    link.subscribe(&b.artifact, 2, events).unwrap();
    let budget = Arc::new(Semaphore::new(1));
    let permit = budget.clone().try_acquire_owned().unwrap();
    let any = Algorithm::Blake3.digest(b"");
    link.request(subscription, (0, &any), BLOCK, false, permit)
        .unwrap();
    let again = b.swarm.inner.links.get(&silent).await.unwrap();
    assert!(Arc::ptr_eq(&link, &again), "a link is shared while it lives");
    assert_eq!(budget.available_permits(), 0);

    link.abandon("it owes");
    assert_eq!(budget.available_permits(), 1);
    let again = b.swarm.inner.links.get(&silent).await.unwrap();
    assert!(!Arc::ptr_eq(&link, &again));
    let mut down = Vec::new();
    let told = async {
        while down.len() < 2 {
            if let link::Event::Down { peer, why } = heard.recv().await.unwrap() {
                assert_eq!(why, "it owes");
                down.push(peer);
            }
        }
    };
    tokio::time::timeout(PATIENCE, told)
        .await
        .expect("whoever shares it is told");
    down.sort_unstable();
    assert_eq!(down, [1, 2]);
}

/// Both have the library and no device.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_is_shared_for_as_long_as_no_better_one_can_be_had() {
    use crate::transport::{rdma, tcp};
    let (m, _, _) = model_of(1);
    let node = Node::start("b", &m).await;
    let fabric = rdma::without_device();
    let (listener, peer, theirs) = node.impostor("theirs", false).await;
    let feature = |hello: &HelloConfig| {
        Arc::new(HelloConfig {
            features: mooncake_proto::hello::FEATURE_RDMA,
            ..hello.clone()
        })
    };
    let (ours, theirs) = (feature(&node.swarm.inner.hello), feature(&theirs));
    let serving = fabric.clone();
    tokio::spawn(async move {
        let mut open = Vec::new();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            open.push(
                tcp::accept(stream, &theirs, Arc::default(), Some(&serving))
                    .await
                    .unwrap(),
            );
        }
    });
    let transport: Arc<dyn crate::transport::Transport> =
        Arc::new(tcp::Tcp::with_rdma(ours, Some(fabric.clone())));
    let links = link::Links::new(vec![transport], Some(fabric), Arc::default());
    let link = links.get(&peer).await.unwrap();
    tokio::time::sleep(rdma::rests::FIRST + Duration::from_millis(200)).await;
    let again = links.get(&peer).await.unwrap();
    assert!(Arc::ptr_eq(&link, &again));
}

/// A block that was condemned and read again while a request for the old one was on its way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_another_block_by_now_is_declined() {
    let (m, bytes, _) = model_of(2);
    let (a, b) = (Node::start("a", &m).await, Node::start("b", &m).await);
    a.fill(&bytes, a.all());
    let link = b.swarm.inner.links.get(&a.peer(true)).await.unwrap();
    let (events, mut heard) = tokio::sync::mpsc::channel(8);
    let subscription = link.subscribe(&b.artifact, 1, events).unwrap();
    let budget = Arc::new(Semaphore::new(2));
    let mut ask = async |expected: &Digest| {
        // It is served from when it has been announced.
        let permit = budget.clone().acquire_owned().await.unwrap();
        link.request(subscription, (1, expected), BLOCK, false, permit)
            .unwrap();
        loop {
            let event = tokio::time::timeout(PATIENCE, heard.recv()).await.unwrap();
            match event.unwrap() {
                link::Event::Block { block, .. } => return Ok(block),
                link::Event::Declined { why, .. } => return Err(why),
                _ => {}
            }
        }
    };
    let now = a.artifact.digest(1).unwrap();
    while ask(&now).await.is_err() {
        tokio::task::yield_now().await;
    }
    let before = Algorithm::Blake3.digest(b"what it was before");
    assert_eq!(ask(&before).await, Err(chooser::Decline::NotHeld));
    assert_eq!(ask(&now).await, Ok(1));
}

struct PartOfFile {
    file: Arc<std::fs::File>,
    offset: u64,
    len: u32,
}

impl crate::transport::BlockSource for PartOfFile {
    fn open(&self) -> std::io::Result<(Arc<std::fs::File>, u64, u32)> {
        Ok((self.file.clone(), self.offset, self.len))
    }
}

/// Announces every block of `good` and serves it, except for the first one that it is ever asked for: that is `bad`.
async fn wrong_once(listener: TcpListener, hello: Arc<HelloConfig>, good: Vec<u8>) {
    use crate::transport::{Frame, NoBlocks, Room};
    use mooncake_proto::pb::peer::{self as pb, peer_message::Body};
    use prost::Message;
    use std::io::Write;
    let digests: Vec<u8> = good
        .chunks(BLOCK as usize)
        .flat_map(|block| *Algorithm::Blake3.digest(block).as_bytes())
        .collect();
    let in_file = |bytes: &[u8]| {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        Arc::new(file)
    };
    let bad = in_file(&vec![7; good.len()]);
    let good = in_file(&good);
    let mut is_wrong = true;
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let accepted = crate::transport::tcp::accept(stream, &hello, Arc::default(), None).await;
        let (mut sender, mut receiver) = accepted.map(|c| (c.sender, c.receiver)).unwrap();
        while let Ok(Frame::Control(bytes)) = receiver.receive(&NoBlocks).await {
            let answer = match pb::PeerMessage::decode(bytes).unwrap().body {
                Some(Body::Subscribe(s)) => {
                    let status = pb::Status {
                        subscription: s.subscription,
                        state: pb::HoldingState::Partial.into(),
                        own_root: Default::default(),
                    };
                    let message = pb::PeerMessage {
                        body: Some(Body::Status(status)),
                    };
                    let _ = sender.send_control(message.encode_to_vec().into()).await;
                    let run = pb::Run {
                        first: 0,
                        digests: digests.clone().into(),
                    };
                    Body::Have(pb::Have {
                        subscription: s.subscription,
                        runs: vec![run],
                    })
                }
                Some(Body::Request(r)) => {
                    let file = if std::mem::take(&mut is_wrong) {
                        &bad
                    } else {
                        &good
                    };
                    let block = PartOfFile {
                        file: file.clone(),
                        offset: u64::from(r.block) * u64::from(BLOCK),
                        len: BLOCK,
                    };
                    let _ = sender
                        .send_block(r.request, Box::new(block), Room::default())
                        .await;
                    continue;
                }
                _ => continue,
            };
            let message = pb::PeerMessage { body: Some(answer) };
            let _ = sender.send_control(message.encode_to_vec().into()).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seed_may_be_wrong_once_before_the_seal_and_nobody_else() {
    for (seed, known, reports) in [(true, false, 0), (false, false, 1), (true, true, 1)] {
        let (m, bytes, seal) = model_of(4);
        let options = Options {
            config: SwarmConfig {
                penalty: Duration::from_millis(1),
                ..Default::default()
            },
            ..Default::default()
        };
        let b = Node::start_with("b", &m, options).await;
        let (listener, peer, hello) = b.impostor("a", seed).await;
        let serving = tokio::spawn(wrong_once(listener, hello, bytes[0].clone()));
        let (_p, peers) = watch::channel(vec![peer]);
        let (_s, seal_rx) = sealed(known.then_some(seal));
        let (task, cancel) = b.fetch(&peers, &seal_rx);
        b.wait_for("everything", |x| x.have_count() == 4).await;
        assert_eq!(b.bad.lock().len(), reports, "seed: {seed}, sealed: {known}");
        b.assert_equals(&bytes);
        cancel.cancel();
        let _ = finish(task).await;
        serving.abort();
    }
}

/// As above, but the write that hangs outlasts what is waited for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_written_after_a_fetch_has_given_up_waiting_does_not_count() {
    let (m, bytes, seal) = model_of(12);
    let a = Node::start("a", &m).await;
    a.fill(&bytes, a.all());
    let options = Options {
        config: SwarmConfig {
            drain_timeout: Duration::from_millis(20),
            ..Default::default()
        },
        ..Default::default()
    };
    let b = Node::start_with_store("b", &m, options, |config| {
        config.unjournaled_limit_bytes = u64::from(BLOCK);
    })
    .await;
    let journal = HeldJournal::of(&b.artifact);
    let (_p, peers) = watch::channel(vec![a.peer(true)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, cancel) = b.fetch(&peers, &seal_rx);
    writers_wait(&b.store, true).await;
    cancel.cancel();
    assert!(finish(task).await.unwrap_err().is_canceled());
    assert!(b.artifact.closed().is_some(), "nothing counts any more");
    let counted = b.artifact.have_count();
    journal.release();
    // Another attempt takes another handle, once nobody writes through the old one.
    let new = NewArtifact {
        model: m.model.clone(),
        generation: 1,
        manifest: m.clone(),
        block_size: BLOCK,
        algorithm: Algorithm::Blake3,
    };
    let store = b.store.clone();
    let again = tokio::task::spawn_blocking(move || store.begin(new).unwrap())
        .await
        .unwrap();
    assert!(!Arc::ptr_eq(&again, &b.artifact) && again.closed().is_none());
    assert_eq!(b.artifact.have_count(), counted);
    let b = Node { artifact: again, ..b };
    finish(b.fetch(&peers, &seal_rx).0).await.unwrap();
    b.assert_equals(&bytes);
}
