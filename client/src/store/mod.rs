//! The models on this node: staging, journal, publishing, inventory.
//!
//! ```text
//! <root>/<provider>/<model_id>/<revision>/<format>/…   published models: plain folders, read-only files
//! <root>/.mooncake/lock                                 one process per store
//! <root>/.mooncake/store                                the store's random id
//! <root>/.mooncake/fences                               highest fence obeyed per artifact
//! <root>/.mooncake/staging/<key>/{record,journal,data/} work in progress
//! <root>/.mooncake/staged/<key>                         per published model: manifest, seal, digest list
//! <root>/.mooncake/quarantine/                          published folders that were found damaged
//! <root>/.mooncake/trash/                               being deleted
//! ```
//!
//! # Guaranteed
//! - A folder under a final name was complete, durable, and proven by a seal, before it got that name; a
//!   crash at any instant leaves no final folder or a complete one; nothing is ever replaced by one of ours.
//! - A block counts as held only after its bytes matched their digest. What was held before a restart is
//!   re-hashed before it is offered or published again.
//! - A kill loses at most [`UNJOURNALED_LIMIT_BYTES`] of verified blocks, whatever the number of models.
//! - Two transfers that fit alone cannot overflow the disk together: space is allocated (or, where the
//!   filesystem cannot do that, booked) before the first byte is fetched.
//! - One process per folder; an order older than one that was obeyed is refused, across restarts too.
//!
//! # Locks
//! In this order, each explained at its field: `Inner::folders`, `Artifact::journal`, then one of
//! `FileCache`, `Inner::artifacts`, `Artifact::state`, `Plumbing::budget`, of which only `state` is taken
//! inside another (`FileCache`, to see in which way to open a file).
//!
//! # Not guaranteed
//! - That a published folder stays as it is: whoever owns it can change it. At start, files whose size or
//!   time changed are re-hashed and a damaged folder is moved to `quarantine`; silent rot is not looked for.
//! - That a staging folder survives damage of its record: it is then fetched again.

mod artifact;
pub(crate) mod crash;
mod durable;
mod error;
mod fences;
mod flush;
#[cfg(test)]
pub(crate) mod held;
mod journal;
mod naming;
mod plumbing;
mod publish;
mod records;
mod recover;
mod rescan;
mod space;
#[cfg(test)]
mod tests;
mod tree;
mod types;

pub use artifact::Artifact;
#[cfg(feature = "failpoints")]
pub use crash::kill_at;
pub use crash::{BEGIN_FAILPOINTS, FLUSH_FAILPOINTS, PUBLISH_FAILPOINTS};
pub use error::{EpochError, FenceError, PublishError, StoreError, WriteError};
pub use rescan::Rehash;
pub use types::{
    ArtifactState, FLUSH_INTERVAL, Fence, Holding, NewArtifact, ObjectRange, STAGING_MAX_AGE, StoreConfig,
    UNJOURNALED_LIMIT_BYTES,
};

use artifact::{DATA, JOURNAL, Parts, Phase, RECORD};
use error::io_error;
use fences::Fences;
use journal::Journal;
use mooncake_proto::{
    ids::ModelRef,
    manifest::{BLOCK_SIZE_RANGE, MAX_BLOCKS, Manifest},
};
use parking_lot::Mutex;
use plumbing::Plumbing;
use records::{StagedRecord, StagingRecord};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    path::Path,
    sync::{Arc, atomic::Ordering},
    thread::JoinHandle,
    time::{Duration, SystemTime},
};
use tokio::sync::watch;

/// The store's own folder below the root. No model's folder can have this name.
const OWN: &str = ".mooncake";
const STAGING: &str = "staging";
const STAGED: &str = "staged";
const QUARANTINE: &str = "quarantine";
const TRASH: &str = "trash";

/// The store: a handle, cheap to clone. The last one to go flushes what is pending and ends its threads.
#[derive(Clone, Debug)]
pub struct Store {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    plumbing: Arc<Plumbing>,
    store_id: String,
    fences: Fences,
    /// What there is. Short sections, never across I/O.
    artifacts: Mutex<BTreeMap<ModelRef, Arc<Artifact>>>,
    /// Held by whatever creates or removes folders of models (space check and allocation included, so that
    /// they are one step). Taken before any other lock of the store.
    folders: Mutex<()>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.plumbing.stop();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Store {
    /// Opens the store, alone, and recovers what the folder has: published models are checked by size and
    /// time and are there at once; staging is re-hashed in the background. Blocking.
    pub fn open(config: StoreConfig) -> Result<Store, StoreError> {
        let (plumbing, store_id) = recover::open_folder(config)?;
        let plumbing = Arc::new(plumbing);
        let fences = Fences::open(plumbing.own.join("fences")).map_err(StoreError::with_remedy)?;
        let artifacts = recover::artifacts(&plumbing)?;

        let mut threads = Vec::new();
        let mut spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            let thread = std::thread::Builder::new().name(name.into()).spawn(run);
            threads.push(thread.map_err(io_error("start a thread for", &plumbing.own))?);
            Ok(())
        };
        let flusher = plumbing.clone();
        spawn("store-flusher", Box::new(move || flusher.run_flusher()))?;
        let rescan: Vec<_> = artifacts.values().cloned().collect();
        let stop = plumbing.clone();
        spawn(
            "store-rescan",
            Box::new(move || {
                for artifact in rescan {
                    artifact.rescan(&|| stop.stopped());
                }
            }),
        )?;
        Ok(Store {
            inner: Arc::new(Inner {
                plumbing,
                store_id,
                fences,
                artifacts: Mutex::new(artifacts),
                folders: Mutex::new(()),
                threads,
            }),
        })
    }

    /// The random id this folder got when it was first opened.
    pub fn store_id(&self) -> &str {
        &self.inner.store_id
    }

    /// The folder, absolute.
    pub fn root(&self) -> &Path {
        &self.inner.plumbing.config.root
    }

    /// Free for us on the filesystem, now.
    pub fn free_bytes(&self) -> io::Result<u64> {
        space::free_bytes(self.root())
    }

    /// Size of the filesystem.
    pub fn capacity_bytes(&self) -> io::Result<u64> {
        space::capacity_bytes(self.root())
    }

    /// The highest fence ever obeyed, over all artifacts.
    pub fn highest_fence(&self) -> Fence {
        self.inner.fences.highest()
    }

    /// Takes the recovery epoch of a master that this node has a session with: durable when it returns. From then on
    /// masters and orders of a lower one are refused. Blocking.
    pub fn enter_epoch(&self, epoch: u64) -> Result<(), EpochError> {
        self.inner.fences.enter_epoch(epoch)
    }

    /// Takes an order's fence: durable when it returns; the same again is fine, a lower one is refused.
    pub fn obey(&self, model: &ModelRef, fence: Fence) -> Result<(), FenceError> {
        self.inner.fences.obey(model, fence)
    }

    /// Everything held here.
    pub fn holdings(&self) -> Vec<Holding> {
        let artifacts: Vec<_> = self.inner.artifacts.lock().values().cloned().collect();
        artifacts
            .iter()
            .filter(|a| a.closed().is_none())
            .map(|a| self.holding_of(a))
            .collect()
    }

    /// One artifact's line of the inventory; `None` where nothing is held.
    pub fn holding(&self, model: &ModelRef) -> Option<Holding> {
        self.find(model).map(|a| self.holding_of(&a))
    }

    fn holding_of(&self, artifact: &Artifact) -> Holding {
        // First: when it has ended, what is read afterwards is all there is.
        let rehashing = !artifact.rehashed();
        Holding {
            model: artifact.model().clone(),
            generation: artifact.generation(),
            manifest_digest: artifact.manifest_digest(),
            state: artifact.state(),
            verified_bytes: artifact.verified_bytes(),
            verified_blocks: artifact.have_count(),
            seal: artifact.seal_if_whole(),
            fence: self.inner.fences.of(artifact.model()),
            rehashing,
        }
    }

    /// The artifact, in staging or staged; `None` if there is none or its handle is closed.
    pub fn find(&self, model: &ModelRef) -> Option<Arc<Artifact>> {
        self.inner
            .artifacts
            .lock()
            .get(model)
            .filter(|a| a.closed().is_none())
            .cloned()
    }

    #[cfg(test)]
    pub(crate) fn waiting_writers(&self) -> usize {
        self.inner.plumbing.waiting_writers()
    }

    /// Counts up when holdings change: an artifact came, went, became whole or staged, or lost blocks.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.inner.plumbing.changed.subscribe()
    }

    /// Creates the staging of a model version, or resumes what the disk has of it; one that is staged
    /// already comes back as it is. Staging of another manifest under the same name is removed. Blocking:
    /// returns once the space is allocated. What was recorded before a restart is not held before it is hashed
    /// again: see [`Artifact::rehash`].
    pub fn begin_unhashed(&self, new: NewArtifact) -> Result<Arc<Artifact>, StoreError> {
        check(&new).map_err(|why| StoreError::Invalid {
            model: Box::new(new.model.clone()),
            why,
        })?;
        let _folders = self.inner.folders.lock();
        self.begin_in_folders(&new)
    }

    /// The same, and hashes what was recorded; for hours, where that is much.
    pub fn begin(&self, new: NewArtifact) -> Result<Arc<Artifact>, StoreError> {
        let artifact = self.begin_unhashed(new)?;
        artifact.rescan(&|| self.inner.plumbing.stopped());
        artifact.check_open()?;
        Ok(artifact)
    }

    fn begin_in_folders(&self, new: &NewArtifact) -> Result<Arc<Artifact>, StoreError> {
        let manifest_digest = new.manifest.digest();
        let existing = self.inner.artifacts.lock().get(&new.model).cloned();
        let existing = match existing {
            None => self.look_again(&new.model)?,
            existing => existing,
        };
        if let Some(artifact) = existing {
            let same_manifest = artifact.manifest_digest == manifest_digest;
            let same = same_manifest
                && artifact.blocks.block_size() == new.block_size
                && artifact.algorithm == new.algorithm;
            if matches!(artifact.state(), ArtifactState::Staged { .. }) {
                match recover::looks_intact(&artifact) {
                    Ok(()) if same_manifest => {
                        self.renew(&artifact, new.generation)?;
                        return Ok(artifact);
                    }
                    Ok(()) => {
                        return Err(StoreError::FinalFolderExists {
                            path: artifact.final_path.clone(),
                        });
                    }
                    Err(recover::Fault::Wrong(why)) => self.lose(&artifact, &why)?,
                    Err(recover::Fault::Unknown(e)) => return Err(e),
                }
            } else if same && artifact.closed().is_none() {
                self.check_final_path(&artifact)?;
                self.renew(&artifact, new.generation)?;
                self.prepare(&artifact)?;
                return Ok(artifact);
            } else if artifact.close("it was begun again") {
                self.inner.artifacts.lock().remove(&new.model);
                if same_manifest && same {
                    tracing::info!(model = %new.model, "staging is opened again from its journal");
                } else {
                    tracing::info!(model = %new.model, "staging of another manifest or layout is removed");
                    recover::discard(&self.inner.plumbing, &artifact.staging)?;
                }
                self.inner.plumbing.bump();
            } else {
                // It was published between the look and the close.
                return if same_manifest {
                    Ok(artifact)
                } else {
                    Err(StoreError::FinalFolderExists {
                        path: artifact.final_path.clone(),
                    })
                };
            }
        }
        let artifact = Arc::new(self.open_staging(new)?);
        let prepared = self.prepare(&artifact);
        if prepared.is_err() && artifact.state.lock().recorded.is_empty() {
            // An empty shell: nothing was verified before.
            artifact.close("it could not be prepared");
            recover::discard(&self.inner.plumbing, &artifact.staging)?;
        } else {
            self.inner
                .artifacts
                .lock()
                .insert(new.model.clone(), artifact.clone());
            self.inner.plumbing.bump();
        }
        prepared.map(|()| artifact)
    }

    /// A published model that could not be examined when the store opened is there once it can be.
    fn look_again(&self, model: &ModelRef) -> Result<Option<Arc<Artifact>>, StoreError> {
        let plumbing = &self.inner.plumbing;
        let record = plumbing.own.join(STAGED).join(naming::key(model));
        let Some(artifact) = recover::staged(plumbing, &record)? else {
            return Ok(None);
        };
        let artifact = Arc::new(artifact);
        self.inner
            .artifacts
            .lock()
            .insert(model.clone(), artifact.clone());
        plumbing.bump();
        Ok(Some(artifact))
    }

    /// Nothing of somebody else's may have come where staging would be published.
    fn check_final_path(&self, artifact: &Artifact) -> Result<(), StoreError> {
        // The journal's lock keeps publish away: what is there now and is not staged is not ours.
        let _journal = artifact.journal.lock();
        let staged = matches!(artifact.state(), ArtifactState::Staged { .. });
        if !staged && fs::symlink_metadata(&artifact.final_path).is_ok() {
            return Err(StoreError::FinalFolderExists {
                path: artifact.final_path.clone(),
            });
        }
        Ok(())
    }

    /// The staging folder with record and journal, new or as found.
    fn open_staging(&self, new: &NewArtifact) -> Result<Artifact, StoreError> {
        let plumbing = &self.inner.plumbing;
        let final_path = self.root().join(naming::final_path(&new.model));
        if fs::symlink_metadata(&final_path).is_ok() {
            return Err(StoreError::FinalFolderExists { path: final_path });
        }
        let stagings = plumbing.own.join(STAGING);
        let staging = stagings.join(naming::key(&new.model));
        crash::step("begin::before_create_folder");
        create_dir(&staging)?;
        crash::step("begin::after_create_folder");
        let record = StagingRecord {
            model: new.model.clone(),
            generation: new.generation,
            block_size: new.block_size,
            algorithm: new.algorithm,
            manifest: new.manifest.encode(),
        };
        // The space is checked before anything large is written; a record that does not fit says so itself.
        record.write(&staging.join(RECORD))?;
        let data = staging.join(DATA);
        create_dir(&data)?;
        let dir = File::open(&data).map_err(io_error("open", &data))?;
        let parts = Parts {
            model: new.model.clone(),
            generation: new.generation,
            manifest: new.manifest.clone(),
            manifest_digest: new.manifest.digest(),
            block_size: new.block_size,
            algorithm: new.algorithm,
            staging: staging.clone(),
            final_path,
            dir,
        };
        let binding = journal::Binding {
            manifest_digest: parts.manifest_digest,
            block_size: parts.block_size,
            algorithm: parts.algorithm,
        };
        let (journal, recorded) = Journal::open(&staging.join(JOURNAL), &binding)?;
        durable::sync_dir(&staging)?;
        durable::sync_dir(&stagings)?;
        crash::step("begin::after_journal");
        Ok(Artifact::staging(plumbing.clone(), parts, journal, recorded))
    }

    /// The space is checked and taken, the tree is there. Once per life of an artifact.
    fn prepare(&self, artifact: &Artifact) -> Result<(), StoreError> {
        if artifact.state.lock().prepared {
            return Ok(());
        }
        let booked: u64 = {
            let artifacts = self.inner.artifacts.lock();
            artifacts
                .values()
                .filter(|a| a.id != artifact.id)
                .map(|a| a.unallocated_bytes())
                .sum()
        };
        let full = |e: space::NoSpace| StoreError::DiskFull {
            model: Box::new(artifact.model.clone()),
            needed_bytes: e.needed_bytes,
            free_bytes: e.free_bytes,
            path: self.root().to_owned(),
        };
        let needed_bytes = space::needed_bytes(artifact);
        space::check(self.root(), needed_bytes, booked)
            .map_err(io_error("examine", self.root()))?
            .map_err(full)?;
        crash::step("begin::before_tree");
        let unallocated = tree::create(&artifact.dir, &artifact.manifest).map_err(|(what, path, e)| {
            if error::io_code(&e) == "disk_full" {
                let free_bytes = self.free_bytes().unwrap_or(0);
                return full(space::NoSpace {
                    needed_bytes,
                    free_bytes,
                });
            }
            io_error(what, artifact.folder().join(path))(e)
        })?;
        crash::step("begin::after_tree");
        let mut state = artifact.state.lock();
        state.unallocated_bytes = unallocated.saturating_sub(state.verified_bytes);
        state.prepared = true;
        Ok(())
    }

    /// Takes the generation of a repeated order.
    fn renew(&self, artifact: &Artifact, generation: u64) -> Result<(), StoreError> {
        if artifact.generation() == generation {
            return Ok(());
        }
        // The journal's lock keeps publish away from the records meanwhile.
        let _journal = artifact.journal.lock();
        let is_staged = matches!(artifact.state(), ArtifactState::Staged { .. });
        if is_staged {
            let path = artifact.staged_record();
            if let Some((mut record, _)) = StagedRecord::read(&path)? {
                record.generation = generation;
                record.write(&path)?;
            }
        } else {
            let record = StagingRecord {
                model: artifact.model.clone(),
                generation,
                block_size: artifact.blocks.block_size(),
                algorithm: artifact.algorithm,
                manifest: artifact.manifest.encode(),
            };
            record.write(&artifact.staging.join(RECORD))?;
        }
        artifact.generation.store(generation, Ordering::Relaxed);
        self.inner.plumbing.bump();
        Ok(())
    }

    /// A published copy is damaged or gone: it is set aside and not held any more.
    fn lose(&self, artifact: &Artifact, why: &str) -> Result<(), StoreError> {
        recover::set_aside(
            &self.inner.plumbing,
            &artifact.staged_record(),
            &artifact.final_path,
            why,
        )?;
        artifact.close_staged(why);
        self.inner.artifacts.lock().remove(&artifact.model);
        self.inner.plumbing.bump();
        Ok(())
    }

    /// Looks whether a published copy is still there (existence, identity, sizes). One that is not is set
    /// aside, so that it can be fetched again. `false`: nothing is held (any more).
    pub fn recheck(&self, model: &ModelRef) -> Result<bool, StoreError> {
        let _folders = self.inner.folders.lock();
        let Some(artifact) = self.find(model) else {
            return Ok(false);
        };
        if matches!(artifact.state(), ArtifactState::Staged { .. })
            && let Err(fault) = recover::looks_intact(&artifact)
        {
            return match fault {
                recover::Fault::Wrong(why) => self.lose(&artifact, &why).map(|()| false),
                recover::Fault::Unknown(e) => Err(e),
            };
        }
        Ok(true)
    }

    /// Removes what is in staging of a model. A published model, or none, is left as it is.
    pub fn remove_staging(&self, model: &ModelRef) -> Result<(), StoreError> {
        let _folders = self.inner.folders.lock();
        let Some(artifact) = self.inner.artifacts.lock().get(model).cloned() else {
            return Ok(());
        };
        if artifact.close("it was removed") {
            self.inner.artifacts.lock().remove(model);
            recover::discard(&self.inner.plumbing, &artifact.staging)?;
            self.inner.plumbing.bump();
        }
        Ok(())
    }

    /// Removes staging that nobody wants and that was not written for `max_age`. Gives what was removed.
    pub fn expire_staging(&self, max_age: Duration, wanted: impl Fn(&ModelRef) -> bool) -> Vec<ModelRef> {
        let artifacts: Vec<_> = self.inner.artifacts.lock().values().cloned().collect();
        let mut removed = Vec::new();
        for artifact in artifacts {
            let staging = matches!(artifact.state.lock().phase, Phase::Staging | Phase::Closed(_));
            if !staging || wanted(&artifact.model) {
                continue;
            }
            let touched = |name| {
                fs::metadata(artifact.staging.join(name))
                    .and_then(|m| m.modified())
                    .ok()
            };
            let last = touched(JOURNAL).into_iter().chain(touched(RECORD)).max();
            // A clock that went backwards makes it young, not old.
            let age = last.and_then(|at| SystemTime::now().duration_since(at).ok());
            if age.is_none_or(|age| age < max_age) {
                continue;
            }
            match self.remove_staging(&artifact.model) {
                Ok(()) => {
                    tracing::info!(model = %artifact.model, age_s = age.map(|a| a.as_secs()), "staging expired");
                    removed.push(artifact.model.clone());
                }
                Err(error) => tracing::warn!(model = %artifact.model, %error, "expired staging stays"),
            }
        }
        removed
    }
}

impl Artifact {
    fn unallocated_bytes(&self) -> u64 {
        let state = self.state.lock();
        if matches!(state.phase, Phase::Staging) {
            state.unallocated_bytes
        } else {
            0
        }
    }
}

/// Creates one folder; it may be there.
fn create_dir(path: &Path) -> Result<(), StoreError> {
    match fs::create_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(io_error("create", path)(e)),
        _ => Ok(()),
    }
}

/// Whether this can be staged at all. Orders come from a master that checked; a store does not rely on it.
fn check(new: &NewArtifact) -> Result<(), String> {
    if new.manifest.model != new.model {
        return Err(format!("the manifest is of {}", new.manifest.model));
    }
    check_layout(&new.manifest, new.block_size)
}

fn check_layout(manifest: &Manifest, block_size: u32) -> Result<(), String> {
    if !block_size.is_power_of_two() || !BLOCK_SIZE_RANGE.contains(&block_size) {
        return Err(format!(
            "the block size {block_size} is not a power of two within {BLOCK_SIZE_RANGE:?}"
        ));
    }
    let mut paths = BTreeSet::new();
    for file in &manifest.files {
        if !paths.insert(file.path.as_str()) {
            return Err(format!("the path {:?} is there twice", file.path));
        }
    }
    let folders = tree::folders(manifest);
    if let Some(both) = folders.iter().find(|f| paths.contains(*f)) {
        return Err(format!("{both:?} is a file and a folder"));
    }
    let mut blocks = 0u64;
    for file in &manifest.files {
        let plain = !file.path.is_empty()
            && !file.path.contains('\0')
            && file.path.split('/').all(|part| !matches!(part, "" | "." | ".."));
        if !plain {
            return Err(format!("the path {:?} may leave the folder", file.path));
        }
        let chunks = match (file.size_bytes, file.chunk_size_bytes) {
            (0, _) => 0,
            (_, 0) => return Err(format!("{:?} has chunks of 0 bytes", file.path)),
            (size, chunk) => size.div_ceil(chunk),
        };
        if file.chunk_count != chunks || file.objects.len() != chunks {
            return Err(format!(
                "{:?} does not have {} chunks",
                file.path, file.chunk_count
            ));
        }
        blocks = blocks.saturating_add(file.size_bytes.div_ceil(block_size.into()));
    }
    if blocks > MAX_BLOCKS {
        return Err(format!(
            "{blocks} blocks of {block_size} bytes, the limit is {MAX_BLOCKS}"
        ));
    }
    Ok(())
}
