//! One model version on this node: its blocks, from the first written one to the published folder.

use super::{
    error::{StoreError, WriteError},
    journal::{Journal, Recorded},
    plumbing::Plumbing,
    tree,
    types::{ArtifactState, ObjectRange},
};
use mooncake_proto::{
    digest::{Algorithm, Digest, Hasher},
    ids::ModelRef,
    manifest::{BlockMap, BlockRange, Manifest, Seal, root},
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::sync::watch;

/// One model version on this node, shared as `Arc` by everyone who writes, serves or reports it.
///
/// Guaranteed: a block is seen by [`has`](Self::has) and the like only after its bytes matched their
/// digest and were written; the bytes of a held block are not written again until it is forgotten; a kill
/// loses at most the configured bytes of verified blocks. Not guaranteed: that the disk gives back what
/// was written (readers check digests); that a digest given to [`write_block`](Self::write_block) is the
/// sealed one ([`publish`](Self::publish) checks that).
#[derive(Debug)]
pub struct Artifact {
    pub(crate) id: u64,
    pub(crate) plumbing: Arc<Plumbing>,
    pub(crate) model: ModelRef,
    pub(crate) generation: AtomicU64,
    pub(crate) manifest: Arc<Manifest>,
    pub(crate) manifest_digest: Digest,
    pub(crate) blocks: BlockMap,
    pub(crate) algorithm: Algorithm,
    /// `<root>/.mooncake/staging/<key>`.
    pub(crate) staging: PathBuf,
    /// `<root>/<provider>/<model_id>/<revision>/<format>`.
    pub(crate) final_path: PathBuf,
    /// The data folder, under whichever name.
    pub(crate) dir: File,
    /// First object of each file in `State::missing`.
    pub(crate) first_object: Vec<usize>,
    /// Held across the I/O of a flush, a forget, a rescan's end and a publish, which so exclude each other:
    /// what is in the journal is in the order in which it became true. `None` once published or closed.
    /// Taken before `state`, never after.
    pub(crate) journal: Mutex<Option<Journal>>,
    /// What is true now. Short sections, never across I/O.
    pub(crate) state: Mutex<State>,
    /// Held while the root over all digests is computed, which takes a copy of the list (up to 32 MiB): many
    /// callers at once wait for one. Taken before `state`, after `journal`.
    sealing: Mutex<()>,
    /// With `state`: a writer or the rescan is done with a block, or the rescan with all.
    pub(crate) idle: Condvar,
    progress: watch::Sender<u64>,
    #[cfg(test)]
    pub(crate) roots_computed: AtomicU64,
}

/// Which life a copy is in.
#[derive(Debug)]
pub(crate) enum Phase {
    Staging,
    Staged,
    /// Removed, replaced or failed: this handle does nothing any more.
    Closed(String),
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) phase: Phase,
    /// One bit per block.
    have: Vec<u64>,
    /// One bit per block: of those held, which this node read from their source.
    own: Vec<u64>,
    /// Parallel to the blocks; meaningless where `have` has no bit.
    pub(crate) digests: Vec<Digest>,
    added: Vec<u32>,
    have_count: u32,
    pub(crate) verified_bytes: u64,
    /// For each object how many of its blocks are missing.
    missing: Vec<u32>,
    objects_done: u64,
    /// Blocks being written or re-hashed: one at a time each.
    pub(crate) busy: HashSet<u32>,
    /// Verified, not journaled.
    pub(crate) pending: Vec<u32>,
    pub(crate) pending_bytes: u64,
    /// What the journal knew at start and nobody has begun to re-hash.
    pub(crate) recorded: BTreeMap<u32, Recorded>,
    /// Blocks of it that are being re-hashed.
    pub(crate) rehashing: usize,
    /// Blocks of it that are not what was recorded.
    pub(crate) damaged: BTreeSet<u32>,
    /// The recorded blocks were re-hashed (or there were none).
    pub(crate) rescanned: bool,
    /// The tree is there and its space is taken.
    pub(crate) prepared: bool,
    /// Bytes the filesystem could not allocate beforehand, less those written since.
    pub(crate) unallocated_bytes: u64,
    /// Root over the own digests, once computed; gone when one is forgotten.
    seal: Option<Seal>,
}

impl State {
    pub(crate) fn has(&self, block: u32) -> bool {
        self.have
            .get(block as usize / 64)
            .is_some_and(|word| word >> (block % 64) & 1 == 1)
    }

    fn is_own(&self, block: u32) -> bool {
        self.own[block as usize / 64] >> (block % 64) & 1 == 1
    }

    /// What the journal is to say of a held block.
    pub(crate) fn recorded_of(&self, block: u32) -> Recorded {
        Recorded {
            digest: self.digests[block as usize],
            own: self.is_own(block),
        }
    }
}

/// What an artifact is made from.
pub(crate) struct Parts {
    pub(crate) model: ModelRef,
    pub(crate) generation: u64,
    pub(crate) manifest: Arc<Manifest>,
    pub(crate) manifest_digest: Digest,
    pub(crate) block_size: u32,
    pub(crate) algorithm: Algorithm,
    pub(crate) staging: PathBuf,
    pub(crate) final_path: PathBuf,
    pub(crate) dir: File,
}

impl Artifact {
    /// In staging, with what its journal recorded (to be re-hashed).
    pub(crate) fn staging(
        plumbing: Arc<Plumbing>,
        parts: Parts,
        journal: Journal,
        recorded: BTreeMap<u32, Recorded>,
    ) -> Self {
        let artifact = Self::new(plumbing, parts, Some(journal), Phase::Staging);
        {
            let mut state = artifact.state.lock();
            state.rescanned = recorded.is_empty();
            state.recorded = recorded;
        }
        artifact
    }

    /// Published, with the digest list that was checked then.
    pub(crate) fn staged(plumbing: Arc<Plumbing>, parts: Parts, digests: &[Digest]) -> Self {
        let artifact = Self::new(plumbing, parts, None, Phase::Staged);
        {
            let mut state = artifact.state.lock();
            for (block, digest) in digests.iter().enumerate() {
                let (digest, own) = (*digest, false);
                artifact.mark(&mut state, block as u32, Recorded { digest, own });
            }
            Self::shrink(&mut state);
        }
        artifact
    }

    fn new(plumbing: Arc<Plumbing>, parts: Parts, journal: Option<Journal>, phase: Phase) -> Self {
        let blocks = BlockMap::new(&parts.manifest, parts.block_size);
        let mut first_object = Vec::with_capacity(parts.manifest.files.len());
        let mut missing = Vec::with_capacity(parts.manifest.object_count() as usize);
        for (f, file) in parts.manifest.files.iter().enumerate() {
            first_object.push(missing.len());
            for chunk in 0..file.chunk_count {
                missing.push(blocks.overlapping(f, file.chunk_range(chunk)).len() as u32);
            }
        }
        let state = State {
            phase,
            have: vec![0; (blocks.len() as usize).div_ceil(64)],
            own: vec![0; (blocks.len() as usize).div_ceil(64)],
            digests: vec![Digest::new([0; 32]); blocks.len() as usize],
            added: Vec::new(),
            have_count: 0,
            verified_bytes: 0,
            missing,
            objects_done: 0,
            busy: HashSet::new(),
            pending: Vec::new(),
            pending_bytes: 0,
            recorded: BTreeMap::new(),
            rehashing: 0,
            damaged: BTreeSet::new(),
            rescanned: true,
            prepared: false,
            unallocated_bytes: 0,
            seal: None,
        };
        Self {
            id: plumbing.next_id(),
            plumbing,
            model: parts.model,
            generation: AtomicU64::new(parts.generation),
            manifest: parts.manifest,
            manifest_digest: parts.manifest_digest,
            blocks,
            algorithm: parts.algorithm,
            staging: parts.staging,
            final_path: parts.final_path,
            dir: parts.dir,
            first_object,
            journal: Mutex::new(journal),
            state: Mutex::new(state),
            sealing: Mutex::default(),
            idle: Condvar::new(),
            progress: watch::Sender::new(0),
            #[cfg(test)]
            roots_computed: AtomicU64::new(0),
        }
    }

    /// Which model version.
    pub fn model(&self) -> &ModelRef {
        &self.model
    }

    /// As last begun.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    /// What it consists of.
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// [`Manifest::digest`], computed once.
    pub fn manifest_digest(&self) -> Digest {
        self.manifest_digest
    }

    /// How it is cut.
    pub fn blocks(&self) -> &BlockMap {
        &self.blocks
    }

    /// Of block digests and root.
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Where its work in progress is or was: one folder per model of a store.
    pub fn staging_folder(&self) -> &Path {
        &self.staging
    }

    /// How far it is. A closed one is `Partial`: it holds nothing that counts.
    pub fn state(&self) -> ArtifactState {
        let state = self.state.lock();
        match state.phase {
            Phase::Staged => ArtifactState::Staged {
                local_path: self.final_path.clone(),
            },
            Phase::Staging if self.is_whole(&state) => ArtifactState::Whole,
            Phase::Staging | Phase::Closed(_) => ArtifactState::Partial,
        }
    }

    /// Why the handle does nothing any more, if that is so: the staging was removed, replaced, or a write
    /// or sync failed. [`Store::begin`](super::Store::begin) gives a new one.
    pub fn closed(&self) -> Option<String> {
        match &self.state.lock().phase {
            Phase::Closed(why) => Some(why.clone()),
            _ => None,
        }
    }

    /// Fails where [`closed`](Self::closed) is something.
    pub fn check_open(&self) -> Result<(), StoreError> {
        self.closed().map_or(Ok(()), |why| {
            Err(StoreError::Closed {
                model: Box::new(self.model.clone()),
                why,
            })
        })
    }

    pub(crate) fn is_whole(&self, state: &State) -> bool {
        state.rescanned && state.have_count == self.blocks.len()
    }

    /// Whether the block is verified.
    pub fn has(&self, block: u32) -> bool {
        self.state.lock().has(block)
    }

    /// Of these blocks, those that are held and were only compared with what peers announced: this node did
    /// not read them from their source, in this life of the process or an earlier one.
    pub fn unproven(&self, blocks: std::ops::Range<u32>) -> Vec<u32> {
        let state = self.state.lock();
        blocks.filter(|&b| state.has(b) && !state.is_own(b)).collect()
    }

    /// Number of verified blocks.
    pub fn have_count(&self) -> u32 {
        self.state.lock().have_count
    }

    /// Sum of the verified blocks' lengths.
    pub fn verified_bytes(&self) -> u64 {
        self.state.lock().verified_bytes
    }

    /// Number of objects all of whose blocks are verified.
    pub fn objects_done(&self) -> u64 {
        self.state.lock().objects_done
    }

    /// The digest of a verified block.
    pub fn digest(&self, block: u32) -> Option<Digest> {
        let state = self.state.lock();
        state.has(block).then(|| state.digests[block as usize])
    }

    /// All digests, once every block is verified.
    pub fn digests(&self) -> Option<Vec<Digest>> {
        let state = self.state.lock();
        self.is_whole(&state).then(|| state.digests.clone())
    }

    /// Verified blocks in the order in which they were verified, from position `from` on: append-only while
    /// the process lives. A block that was forgotten is named again once it is verified again.
    pub fn added(&self, from: usize) -> Vec<u32> {
        let state = self.state.lock();
        state.added.get(from..).map(<[u32]>::to_vec).unwrap_or_default()
    }

    /// Counts up whenever a block was verified or forgotten, or the state changed.
    pub fn progress(&self) -> watch::Receiver<u64> {
        self.progress.subscribe()
    }

    pub(crate) fn bump(&self) {
        self.progress.send_modify(|n| *n += 1);
    }

    /// Takes a block from a peer or a source: hashes the bytes, compares, writes, and only then shows it.
    /// Blocks while too many bytes are unjournaled, or while another thread writes the same block. A block
    /// that is already held with this digest is fine and is not written again.
    pub fn write_block(
        self: &Arc<Self>,
        block: u32,
        expected: &Digest,
        bytes: &[u8],
    ) -> Result<(), WriteError> {
        let range = self.check_length(block, bytes)?;
        let actual = self.algorithm.digest(bytes);
        if actual != *expected && !super::crash::broken("write::skip_digest_check") {
            return Err(WriteError::DigestMismatch {
                block,
                expected: *expected,
                actual,
            });
        }
        let (digest, own) = (*expected, false);
        self.write_checked(block, range, Recorded { digest, own }, bytes)
    }

    /// Takes a block from the source, whose digest this node is the first to compute. That it came from there
    /// is remembered across restarts (see [`unproven`](Self::unproven)), unless a peer's copy was held already.
    pub fn write_own_block(self: &Arc<Self>, block: u32, bytes: &[u8]) -> Result<Digest, WriteError> {
        let range = self.check_length(block, bytes)?;
        let digest = self.algorithm.digest(bytes);
        let own = true;
        self.write_checked(block, range, Recorded { digest, own }, bytes)?;
        Ok(digest)
    }

    fn check_length(&self, block: u32, bytes: &[u8]) -> Result<BlockRange, WriteError> {
        let count = self.blocks.len();
        let range = self
            .blocks
            .locate(block)
            .ok_or(WriteError::NoSuchBlock { block, count })?;
        if bytes.len() != range.len as usize {
            return Err(WriteError::WrongLength {
                block,
                want: range.len,
                got: bytes.len(),
            });
        }
        Ok(range)
    }

    fn write_checked(
        self: &Arc<Self>,
        block: u32,
        range: BlockRange,
        recorded: Recorded,
        bytes: &[u8],
    ) -> Result<(), WriteError> {
        let len = u64::from(range.len);
        if !self.plumbing.reserve(len) {
            return Err(WriteError::Closed {
                block,
                why: "the store is shutting down".into(),
            });
        }
        // Everything that is not journaled in the end gives its reservation back.
        let claimed = {
            let mut state = self.state.lock();
            self.claim(&mut state, block, recorded.digest)
        };
        match claimed {
            Ok(true) => {}
            Ok(false) => {
                self.plumbing.release(len);
                return Ok(());
            }
            Err(e) => {
                self.plumbing.release(len);
                return Err(e);
            }
        }
        let written = self
            .file(range.file)
            .and_then(|file| file.write_all_at(bytes, range.offset));
        let mut state = self.state.lock();
        state.busy.remove(&block);
        self.idle.notify_all();
        let closed = match &state.phase {
            Phase::Closed(why) => Some(why.clone()),
            _ => None,
        };
        if written.is_err() || closed.is_some() {
            drop(state);
            self.plumbing.release(len);
            return Err(match (written, closed) {
                (_, Some(why)) => WriteError::Closed { block, why },
                (Err(source), None) => WriteError::Io {
                    block,
                    path: self.file_path(range.file),
                    source,
                },
                (Ok(()), None) => unreachable!("one of them holds"),
            });
        }
        self.mark(&mut state, block, recorded);
        state.pending.push(block);
        state.pending_bytes += len;
        state.unallocated_bytes = state.unallocated_bytes.saturating_sub(len);
        let whole = self.is_whole(&state);
        drop(state);
        self.plumbing.dirty(self);
        self.bump();
        if whole {
            self.plumbing.bump();
        }
        Ok(())
    }

    /// Makes the caller the block's only writer. `false`: it is held already, with this digest.
    fn claim(
        &self,
        state: &mut MutexGuard<'_, State>,
        block: u32,
        digest: Digest,
    ) -> Result<bool, WriteError> {
        loop {
            if let Phase::Closed(why) = &state.phase {
                return Err(WriteError::Closed {
                    block,
                    why: why.clone(),
                });
            }
            if state.has(block) {
                let held = state.digests[block as usize];
                if held == digest {
                    return Ok(false);
                }
                return Err(WriteError::AlreadyHeld {
                    block,
                    held,
                    given: digest,
                });
            }
            if state.busy.insert(block) {
                return Ok(true);
            }
            self.idle.wait(state);
        }
    }

    /// The block is verified.
    pub(crate) fn mark(&self, state: &mut State, block: u32, recorded: Recorded) {
        debug_assert!(!state.has(block), "block {block} is marked twice");
        state.have[block as usize / 64] |= 1 << (block % 64);
        if recorded.own {
            state.own[block as usize / 64] |= 1 << (block % 64);
        }
        state.digests[block as usize] = recorded.digest;
        state.added.push(block);
        state.have_count += 1;
        let range = self.blocks.locate(block).expect("checked by the caller");
        state.verified_bytes += u64::from(range.len);
        for object in self.objects_of(range) {
            state.missing[object] -= 1;
            state.objects_done += u64::from(state.missing[object] == 0);
        }
    }

    pub(crate) fn unmark(&self, state: &mut State, block: u32) {
        state.have[block as usize / 64] &= !(1 << (block % 64));
        state.own[block as usize / 64] &= !(1 << (block % 64));
        state.have_count -= 1;
        state.seal = None;
        let range = self.blocks.locate(block).expect("it was held");
        state.verified_bytes -= u64::from(range.len);
        for object in self.objects_of(range) {
            state.objects_done -= u64::from(state.missing[object] == 0);
            state.missing[object] += 1;
        }
    }

    /// A published copy takes no more blocks: what only writing needs goes. (`added` stays: those who follow it
    /// may not have seen its end yet.)
    pub(crate) fn shrink(state: &mut State) {
        state.busy = HashSet::new();
        state.pending = Vec::new();
        state.added.shrink_to_fit();
        state.recorded = BTreeMap::new();
    }

    /// The objects that overlap a block, as indices into `State::missing`.
    fn objects_of(&self, range: BlockRange) -> std::ops::Range<usize> {
        let chunk = self.manifest.files[range.file].chunk_size_bytes;
        let base = self.first_object[range.file];
        let first = range.offset / chunk;
        let last = (range.offset + u64::from(range.len) - 1) / chunk;
        base + first as usize..base + last as usize + 1
    }

    /// The open data file `index`.
    pub(crate) fn file(&self, index: usize) -> io::Result<Arc<File>> {
        self.plumbing.files.get(self.id, index, || {
            let write = matches!(self.state.lock().phase, Phase::Staging);
            tree::open(&self.dir, &self.manifest.files[index].path, write)
        })
    }

    /// Where the data folder is now.
    pub(crate) fn folder(&self) -> PathBuf {
        match self.state.lock().phase {
            Phase::Staged => self.final_path.clone(),
            _ => self.staging.join(DATA),
        }
    }

    pub(crate) fn file_path(&self, index: usize) -> PathBuf {
        self.folder().join(&self.manifest.files[index].path)
    }

    /// The bytes of a verified block, from staging or from the published folder.
    pub fn read_block(&self, block: u32) -> io::Result<Vec<u8>> {
        let (file, offset, len) = self.block_file(block)?;
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }

    /// Adds a verified block's bytes to `hasher`, a piece at a time: no more of it than `scratch` is in memory.
    pub fn hash_block(&self, block: u32, hasher: &mut Hasher, scratch: &mut [u8]) -> io::Result<()> {
        let (file, mut offset, len) = self.block_file(block)?;
        let end = offset + u64::from(len);
        while offset < end {
            let piece = scratch.len().min((end - offset) as usize);
            file.read_exact_at(&mut scratch[..piece], offset)?;
            hasher.update(&scratch[..piece]);
            offset += piece as u64;
        }
        Ok(())
    }

    /// Where to read a verified block: the open file, offset and length. For `sendfile` and the like.
    pub fn block_file(&self, block: u32) -> io::Result<(Arc<File>, u64, u32)> {
        let range = self.blocks.locate(block).filter(|_| self.has(block));
        let range = range.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                format!("block {block} of {} is not held here", self.model),
            )
        })?;
        Ok((self.file(range.file)?, range.offset, range.len))
    }

    /// Where an object's bytes are; `None` if the manifest has no such object.
    pub fn object(&self, id: &str) -> Option<ObjectRange> {
        let (file, chunk) = self.manifest.find_object(id)?;
        let range = self.manifest.files[file].chunk_range(chunk);
        let held = self.state.lock().missing[self.first_object[file] + chunk as usize] == 0;
        Some(ObjectRange {
            file,
            blocks: self.blocks.overlapping(file, range.clone()),
            range,
            held,
        })
    }

    /// The root over the node's own digest list, once every block is verified.
    pub fn seal_if_whole(&self) -> Option<Seal> {
        {
            let state = self.state.lock();
            if !self.is_whole(&state) || state.seal.is_some() {
                return state.seal.filter(|_| self.is_whole(&state));
            }
        }
        let _sealing = self.sealing.lock();
        let digests = {
            let state = self.state.lock();
            if !self.is_whole(&state) || state.seal.is_some() {
                return state.seal.filter(|_| self.is_whole(&state));
            }
            state.digests.clone()
        };
        #[cfg(test)]
        self.roots_computed.fetch_add(1, Ordering::Relaxed);
        let block_size_bytes = self.blocks.block_size();
        let own = root(self.algorithm, block_size_bytes, &self.manifest_digest, &digests);
        let seal = Seal {
            block_size_bytes,
            algorithm: self.algorithm,
            root: own,
        };
        let mut state = self.state.lock();
        // Forgotten and written again meanwhile? Then the root is not this list's.
        if self.is_whole(&state) && state.digests == digests {
            state.seal = Some(seal);
            Some(seal)
        } else {
            None
        }
    }
}

/// The data folder's name in staging.
pub(crate) const DATA: &str = "data";
/// The journal's.
pub(crate) const JOURNAL: &str = "journal";
/// The record's.
pub(crate) const RECORD: &str = "record";
