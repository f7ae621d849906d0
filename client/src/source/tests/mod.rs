//! Acquisitions into a real store, from real folders and a loopback server that misbehaves.

mod local;
mod server;
mod web;
mod web_environment;
mod web_faults;

use super::*;
use crate::store::{NewArtifact, Store, StoreConfig, StoreError};
use mooncake_proto::{
    digest::{Algorithm, Digest},
    ids::ModelRef,
    manifest::{Checksum, Manifest, ManifestFile, ObjectIds},
};
use std::time::Duration;
use tempfile::TempDir;

/// The smallest block: files of a few MiB have many.
const BLOCK: usize = 256 << 10;

/// Bytes that differ from block to block and from seed to seed.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

fn manifest_file(path: &str, size: usize, checksum: Checksum) -> ManifestFile {
    let chunks = size.div_ceil(1 << 20) as u64;
    ManifestFile {
        path: path.to_owned(),
        size_bytes: size as u64,
        checksum,
        artifact_key: String::new(),
        chunk_size_bytes: 1 << 20,
        chunk_count: chunks,
        object_prefix: "m/r".into(),
        objects: ObjectIds::derived(&format!("m/r/{path}"), chunks),
    }
}

/// A store with one artifact begun.
struct Node {
    root: TempDir,
    /// `None` only within `restart`.
    store: Option<Store>,
    artifact: Arc<Artifact>,
    counters: Arc<TransferCounters>,
}

impl Node {
    fn new(files: Vec<ManifestFile>) -> Self {
        Self::new_with(files, |_| ())
    }

    fn new_with(files: Vec<ManifestFile>, change: impl FnOnce(&mut StoreConfig)) -> Self {
        let root = tempfile::tempdir().unwrap();
        let mut config = StoreConfig::new(root.path());
        change(&mut config);
        let store = Store::open(config).unwrap();
        let model = ModelRef {
            model_id: "org/m".into(),
            revision: "r".into(),
            format: "bin".into(),
            provider: "local".into(),
        };
        let manifest = Manifest {
            model: model.clone(),
            file_manifest_version: "v1".into(),
            total_size_bytes: files.iter().map(|f| f.size_bytes).sum(),
            files,
        };
        let artifact = store
            .begin(NewArtifact {
                model,
                generation: 1,
                manifest: Arc::new(manifest),
                block_size: BLOCK as u32,
                algorithm: Algorithm::Blake3,
            })
            .unwrap();
        Self {
            root,
            store: Some(store),
            artifact,
            counters: Arc::default(),
        }
    }

    /// One file `f` with its true checksum.
    fn with_file(data: &[u8]) -> Self {
        Self::new(vec![manifest_file(
            "f",
            data.len(),
            Checksum::Sha256(Digest::sha256(data)),
        )])
    }

    fn task(&self, sources: &[&str], allow: &[&str]) -> AcquireTask {
        AcquireTask {
            artifact: self.artifact.clone(),
            sources: Sources(sources.iter().map(|s| (*s).to_owned()).collect()),
            allow: AllowList::parse(allow).unwrap(),
            expected_seal: None,
            counters: self.counters.clone(),
        }
    }

    async fn acquire(&self, sources: &[&str], allow: &[&str]) -> Result<Seal, TaskFailure> {
        self.acquire_in(quick(), sources, allow).await
    }

    async fn acquire_in(
        &self,
        config: SourceConfig,
        sources: &[&str],
        allow: &[&str],
    ) -> Result<Seal, TaskFailure> {
        let run = acquire(self.task(sources, allow), config, CancellationToken::new());
        tokio::time::timeout(Duration::from_secs(60), run)
            .await
            .expect("an acquisition ends")
    }

    /// Acquires the one file from a server, with all of it allowed.
    async fn acquire_from(&self, url: &str) -> Result<Seal, TaskFailure> {
        let origin = url::Url::parse(url).unwrap().origin().ascii_serialization();
        self.acquire(&[url], &[&origin]).await
    }

    /// What is on the disk, in order of blocks.
    fn bytes(&self) -> Vec<u8> {
        (0..self.artifact.blocks().len())
            .flat_map(|b| self.artifact.read_block(b).unwrap())
            .collect()
    }

    /// Blocks held, as a list.
    fn held(&self) -> Vec<u32> {
        (0..self.artifact.blocks().len())
            .filter(|&b| self.artifact.has(b))
            .collect()
    }

    fn write(&self, block: u32, bytes: &[u8]) {
        self.artifact.write_own_block(block, bytes).unwrap();
    }

    fn write_from_peer(&self, block: u32, bytes: &[u8]) {
        let announced = Algorithm::Blake3.digest(bytes);
        self.artifact.write_block(block, &announced, bytes).unwrap();
    }

    /// Everything is flushed, closed, opened and re-hashed.
    fn restart(&mut self) {
        let new = NewArtifact {
            model: self.artifact.model().clone(),
            generation: 1,
            manifest: self.artifact.manifest().clone(),
            block_size: BLOCK as u32,
            algorithm: Algorithm::Blake3,
        };
        self.artifact.flush().unwrap();
        // The folder's lock goes with its last handle.
        let placeholder = Node::new(vec![manifest_file("x", 1, Checksum::Opaque(String::new()))]);
        drop(std::mem::replace(
            &mut self.artifact,
            placeholder.artifact.clone(),
        ));
        drop(self.store.take());
        // A write that nobody waits for any more may have one for a moment.
        let until = std::time::Instant::now() + Duration::from_secs(60);
        let store = loop {
            match Store::open(StoreConfig::new(self.root.path())) {
                Err(StoreError::Locked { .. }) if std::time::Instant::now() < until => {
                    std::thread::yield_now()
                }
                opened => break opened.unwrap(),
            }
        };
        self.artifact = store.begin(new).unwrap();
        self.store = Some(store);
    }
}

/// Short pauses and small requests; time-outs that only something that hangs outlasts.
fn quick() -> SourceConfig {
    SourceConfig {
        connect_timeout: Duration::from_secs(30),
        no_progress_timeout: Duration::from_secs(30),
        floor_bytes: 1,
        backoff_min: Duration::from_millis(1),
        backoff_max: Duration::from_millis(5),
        retries: 4,
        retry_after_max: Duration::from_secs(2),
        part_bytes: 2 * BLOCK as u64,
        drain_timeout: Duration::from_secs(30),
        download: Arc::default(),
    }
}

/// Asserts on a failure's code and on what its message must say.
#[track_caller]
fn failed(result: Result<Seal, TaskFailure>, code: &str, retryable: bool, says: &[&str]) -> TaskFailure {
    let failure = result.expect_err("must fail");
    assert_eq!(
        (failure.code.as_str(), failure.retryable),
        (code, retryable),
        "{failure}"
    );
    for part in says {
        assert!(
            failure.message.contains(part),
            "'{part}' is missing in: {failure}"
        );
    }
    failure
}
