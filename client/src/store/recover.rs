//! Opening a store's folder, and what becomes of what is found there.

use super::{
    OWN, QUARANTINE, STAGED, STAGING, TRASH,
    artifact::{Artifact, DATA, JOURNAL, Parts, RECORD},
    check_layout, create_dir,
    durable::{self, ANY_POINTS, Kind, sync_dir},
    error::{RESTORE_OR_EMPTY, StoreError, io_error},
    journal::{Binding, Journal},
    naming,
    plumbing::Plumbing,
    publish::mtime_ns,
    records::{FolderIdentity, StagedRecord, StagingRecord},
    tree,
    types::StoreConfig,
};
use mooncake_proto::{
    ids::ModelRef,
    manifest::{BlockMap, Manifest},
};
use rustix::fs::FlockOperation;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

const IDENTITY: Kind = Kind {
    magic: b"MCSTOREI",
    version: 1,
    points: ANY_POINTS,
};

/// Creates or opens the folder, takes its lock, and gives the store's id.
pub(crate) fn open_folder(mut config: StoreConfig) -> Result<(Plumbing, String), StoreError> {
    let root = std::path::absolute(&config.root).map_err(io_error("find", &config.root))?;
    fs::create_dir_all(&root).map_err(io_error("create", &root))?;
    config.root = root.clone();
    let own = root.join(OWN);
    create_dir(&own)?;
    let lock = lock(&root, &own.join("lock"))?;

    let path = own.join("store");
    let store_id = match durable::read(&path, IDENTITY).map_err(StoreError::with_remedy)? {
        Some(bytes) => String::from_utf8(bytes).map_err(|_| StoreError::Damaged {
            path: path.clone(),
            why: format!("its id is not text; {RESTORE_OR_EMPTY}"),
        })?,
        // The id is written before these folders are made: without it they are not from a first start.
        None if own.join(STAGED).exists() => {
            return Err(StoreError::Damaged {
                path,
                why: format!("it is missing, though the folder holds models; {RESTORE_OR_EMPTY}"),
            });
        }
        None => {
            let id = uuid::Uuid::new_v4().to_string();
            durable::write(&path, IDENTITY, id.as_bytes())?;
            id
        }
    };
    for name in [TRASH, QUARANTINE, STAGING, STAGED] {
        create_dir(&own.join(name))?;
    }
    sync_dir(&own)?;
    sync_dir(&root)?;
    if let Some(parent) = root.parent() {
        sync_dir(parent)?;
    }
    for entry in list(&own.join(TRASH))? {
        if let Err(error) = remove(&entry) {
            tracing::warn!(%error, "what is in the trash is removed at the next start");
        }
    }
    Ok((Plumbing::new(config, own, lock), store_id))
}

fn lock(root: &Path, path: &Path) -> Result<File, StoreError> {
    let open = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path);
    let mut file = open.map_err(io_error("open", path))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut text = String::new();
            let _ = file.read_to_string(&mut text);
            let holder = match text.trim().parse::<u32>() {
                Ok(pid) => format!("process {pid}"),
                Err(_) => "another process".into(),
            };
            return Err(StoreError::Locked {
                root: root.to_owned(),
                holder,
            });
        }
        Err(e) => return Err(io_error("lock", path)(e.into())),
    }
    file.set_len(0)
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .map_err(io_error("write", path))?;
    Ok(file)
}

fn list(folder: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let entries =
        fs::read_dir(folder).and_then(|all| all.map(|e| Ok(e?.path())).collect::<io::Result<Vec<_>>>());
    let mut entries = entries.map_err(io_error("list", folder))?;
    entries.sort();
    Ok(entries)
}

/// Everything the folder has: published models first, then staging. One bad entry never hides the others, nor
/// does one that cannot be read now: it is neither offered nor moved, and the next order for its model looks
/// at it again.
pub(crate) fn artifacts(plumbing: &Arc<Plumbing>) -> Result<BTreeMap<ModelRef, Arc<Artifact>>, StoreError> {
    let mut found = BTreeMap::new();
    let mut unknown = BTreeSet::new();
    for path in list(&plumbing.own.join(STAGED))? {
        if path.extension().is_some_and(|e| e == "partial") {
            if let Err(e) = fs::remove_file(&path) {
                tracing::warn!(path = %path.display(), error = %e, "a record that was not finished stays");
            }
            continue;
        }
        match staged(plumbing, &path) {
            Ok(Some(artifact)) => {
                found.insert(artifact.model.clone(), Arc::new(artifact));
            }
            Ok(None) => {}
            Err(error @ StoreError::Damaged { .. }) => {
                tracing::error!(%error, "a published model's record is set aside; the model is not offered");
                if let Err(error) = move_to_quarantine(plumbing, &path, None) {
                    tracing::error!(%error, "it stays where it is");
                }
            }
            Err(error) => {
                tracing::error!(record = %path.display(), %error, "a published model is not offered for now");
                unknown.extend(path.file_name().map(ToOwned::to_owned));
            }
        }
    }
    for path in list(&plumbing.own.join(STAGING))? {
        if path.file_name().is_some_and(|name| unknown.contains(name)) {
            continue; // perhaps left over from a publish
        }
        let discarded = match staging(plumbing, &path) {
            Ok(Some(artifact)) if !found.contains_key(&artifact.model) => {
                found.insert(artifact.model.clone(), Arc::new(artifact));
                Ok(())
            }
            Ok(_) => discard(plumbing, &path),
            Err(error @ StoreError::Damaged { .. }) => {
                tracing::warn!(%error, "a staging folder is removed: its model is fetched again");
                discard(plumbing, &path)
            }
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "what is there is left as it is for now");
                Ok(())
            }
        };
        if let Err(error) = discarded {
            tracing::error!(path = %path.display(), %error, "it stays where it is");
        }
    }
    Ok(found)
}

/// What a staging folder has; `None` where it never got a record, or is left over from a publish.
fn staging(plumbing: &Arc<Plumbing>, path: &Path) -> Result<Option<Artifact>, StoreError> {
    let record_path = path.join(RECORD);
    let Some((record, manifest)) = StagingRecord::read(&record_path)? else {
        return Ok(None);
    };
    let damaged = |why: String| StoreError::Damaged {
        path: record_path.clone(),
        why,
    };
    let key = naming::key(&record.model);
    if path.file_name().is_none_or(|name| name != key.as_str()) {
        return Err(damaged(format!("it belongs into the folder {key}")));
    }
    check_layout(&manifest, record.block_size).map_err(damaged)?;
    let data = path.join(DATA);
    create_dir(&data)?;
    let dir = File::open(&data).map_err(io_error("open", &data))?;
    let parts = Parts {
        final_path: plumbing.config.root.join(naming::final_path(&record.model)),
        model: record.model,
        generation: record.generation,
        manifest_digest: manifest.digest(),
        manifest: Arc::new(manifest),
        block_size: record.block_size,
        algorithm: record.algorithm,
        staging: path.to_owned(),
        dir,
    };
    let binding = Binding {
        manifest_digest: parts.manifest_digest,
        block_size: parts.block_size,
        algorithm: parts.algorithm,
    };
    let (journal, recorded) = Journal::open(&path.join(JOURNAL), &binding)?;
    tracing::info!(model = %parts.model, blocks = recorded.len(), "staging found; its blocks are re-hashed");
    Ok(Some(Artifact::staging(
        plumbing.clone(),
        parts,
        journal,
        recorded,
    )))
}

/// The published model of a record; `None` where it is not (or not any more) published.
pub(crate) fn staged(plumbing: &Arc<Plumbing>, path: &Path) -> Result<Option<Artifact>, StoreError> {
    let Some((mut record, manifest)) = StagedRecord::read(path)? else {
        return Ok(None);
    };
    let damaged = |why: String| StoreError::Damaged {
        path: path.to_owned(),
        why,
    };
    let key = naming::key(&record.model);
    if path.file_name().is_none_or(|name| name != key.as_str()) {
        return Err(damaged(format!("it should have the name {key}")));
    }
    check_layout(&manifest, record.seal.block_size_bytes).map_err(damaged)?;
    let staging = plumbing.own.join(STAGING).join(&key);
    let final_path = plumbing.config.root.join(naming::final_path(&record.model));
    let dir = match open_dir(&final_path) {
        Ok(dir) => dir,
        Err(e)
            if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
                || is_elsewhere(&e) =>
        {
            if staging.join(DATA).exists() {
                tracing::info!(model = %record.model, "publishing was not finished; it goes on from staging");
            } else {
                tracing::warn!(model = %record.model, path = %final_path.display(), "the published folder is gone");
            }
            fs::remove_file(path).map_err(io_error("remove", path))?;
            return Ok(None);
        }
        Err(source) => return Err(unexamined(&final_path)(source)),
    };
    let identity = FolderIdentity::of(&dir.metadata().map_err(unexamined(&final_path))?);
    let ours = identity == record.folder;
    match check_files(&dir, &final_path, &manifest, &mut record, ours) {
        Ok(false) => {}
        Ok(true) => {
            record.folder = identity;
            record.write(path)?;
        }
        Err(Fault::Unknown(e)) => return Err(e),
        Err(Fault::Wrong(why)) if ours => {
            set_aside(plumbing, path, &final_path, &why)?;
            return Ok(None);
        }
        Err(Fault::Wrong(why)) => {
            tracing::error!(
                model = %record.model, path = %final_path.display(), why,
                "another folder is where the model was published, and it is not the model: it is left alone"
            );
            move_to_quarantine(plumbing, path, None)?;
            return Ok(None);
        }
    }
    // The rename may have been the last thing before a crash.
    sync_dir(final_path.parent().expect("four components"))?;
    if staging.exists() {
        discard(plumbing, &staging)?;
    }
    let parts = Parts {
        generation: record.generation,
        manifest_digest: manifest.digest(),
        manifest: Arc::new(manifest),
        block_size: record.seal.block_size_bytes,
        algorithm: record.seal.algorithm,
        model: record.model,
        staging,
        final_path,
        dir,
    };
    Ok(Some(Artifact::staged(plumbing.clone(), parts, &record.digests)))
}

fn open_dir(path: &Path) -> io::Result<File> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

/// What a look at a published copy found.
#[derive(Debug)]
pub(crate) enum Fault {
    /// It is gone, or another: it is to be set aside.
    Wrong(String),
    /// The look itself failed (no descriptors, no permission, no memory, the disk): nothing is known.
    Unknown(StoreError),
}

impl Fault {
    /// Only what the filesystem says about the path itself is held against the copy.
    fn of(path: &Path, error: io::Error) -> Self {
        let gone = matches!(
            error.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::UnexpectedEof
        );
        if gone || is_elsewhere(&error) {
            Self::Wrong(format!("{}: {error}", path.display()))
        } else {
            Self::Unknown(unexamined(path)(error))
        }
    }
}

/// A symbolic link, a path that leads out of the folder, or a socket, is where a file or folder of ours was.
fn is_elsewhere(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(error);
    errno.is_some_and(|e| matches!(e, Errno::LOOP | Errno::XDEV | Errno::NXIO))
}

fn unexamined(path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::Unexamined { path, source }
}

/// Every file there, with its size; those that do not look as they did when published are re-hashed.
/// Gives whether the record now differs from what was read.
fn check_files(
    dir: &File,
    folder: &Path,
    manifest: &Manifest,
    record: &mut StagedRecord,
    ours: bool,
) -> Result<bool, Fault> {
    let blocks = BlockMap::new(manifest, record.seal.block_size_bytes);
    let mut changed = !ours;
    for (index, entry) in manifest.files.iter().enumerate() {
        let fault = |e| Fault::of(&folder.join(&entry.path), e);
        let open = tree::open(dir, &entry.path, false).and_then(|f| Ok((f.metadata()?, f)));
        let (meta, file) = open.map_err(fault)?;
        check_size(&entry.path, entry.size_bytes, &meta)?;
        let mtime_ns = mtime_ns(&meta);
        if ours && mtime_ns == record.files[index].mtime_ns {
            continue;
        }
        tracing::info!(model = %record.model, file = entry.path, "the file's time changed: it is re-hashed");
        let mut bytes = Vec::new();
        for block in blocks.of_file(index) {
            let range = blocks.locate(block).expect("of this file");
            bytes.resize(range.len as usize, 0);
            file.read_exact_at(&mut bytes, range.offset).map_err(fault)?;
            if record.seal.algorithm.digest(&bytes) != record.digests[block as usize] {
                let why = format!(
                    "{}: the bytes from {} on are not as published",
                    entry.path, range.offset
                );
                return Err(Fault::Wrong(why));
            }
        }
        record.files[index].mtime_ns = mtime_ns;
        changed = true;
    }
    Ok(changed)
}

fn check_size(path: &str, size_bytes: u64, meta: &fs::Metadata) -> Result<(), Fault> {
    if !meta.is_file() || meta.len() != size_bytes {
        let why = format!("{path}: it is not a file of {size_bytes} bytes");
        return Err(Fault::Wrong(why));
    }
    Ok(())
}

/// The quick look at a published copy while the process runs: our folder, every file with its size.
pub(crate) fn looks_intact(artifact: &Artifact) -> Result<(), Fault> {
    let at = |e| Fault::of(&artifact.final_path, e);
    let there = open_dir(&artifact.final_path)
        .and_then(|d| d.metadata())
        .map_err(at)?;
    let ours = artifact.dir.metadata().map_err(at)?;
    if (there.dev(), there.ino()) != (ours.dev(), ours.ino()) {
        let why = format!("{}: another folder was put there", artifact.final_path.display());
        return Err(Fault::Wrong(why));
    }
    for entry in &artifact.manifest.files {
        let meta = tree::open(&artifact.dir, &entry.path, false).and_then(|f| f.metadata());
        let meta = meta.map_err(|e| Fault::of(&artifact.final_path.join(&entry.path), e))?;
        check_size(&entry.path, entry.size_bytes, &meta)?;
    }
    Ok(())
}

/// A published folder is damaged: it and its record move to quarantine, for people to look at. A folder
/// that is not ours stays; then only the record moves.
pub(crate) fn set_aside(
    plumbing: &Plumbing,
    record_path: &Path,
    final_path: &Path,
    why: &str,
) -> Result<(), StoreError> {
    let recorded = StagedRecord::read(record_path)
        .ok()
        .flatten()
        .map(|(record, _)| record.folder);
    let there = fs::symlink_metadata(final_path)
        .ok()
        .map(|meta| FolderIdentity::of(&meta));
    let ours = there.filter(|&folder| Some(folder) == recorded);
    let to = move_to_quarantine(plumbing, record_path, ours.map(|_| final_path))?;
    tracing::error!(
        path = %final_path.display(), why, moved_to = %to.display(),
        "a published model is damaged: it was set aside and is not offered any more; delete it there when no longer needed"
    );
    Ok(())
}

fn move_to_quarantine(
    plumbing: &Plumbing,
    record: &Path,
    folder: Option<&Path>,
) -> Result<PathBuf, StoreError> {
    let to = plumbing.own.join(QUARANTINE).join(unique(record));
    create_dir(&to)?;
    if let Some(folder) = folder {
        fs::rename(folder, to.join(DATA)).map_err(io_error("move away", folder))?;
        sync_dir(folder.parent().expect("four components"))?;
    }
    match fs::rename(record, to.join(RECORD)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io_error("move away", record)(e)),
        _ => {}
    }
    sync_dir(record.parent().expect("own files are in a folder"))?;
    Ok(to)
}

/// Removes a folder of the store's own: out of the way in one step, then for good.
pub(crate) fn discard(plumbing: &Plumbing, path: &Path) -> Result<(), StoreError> {
    let to = plumbing.own.join(TRASH).join(unique(path));
    match fs::rename(path, &to) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(io_error("remove", path))?,
    }
    sync_dir(path.parent().expect("own files are in a folder"))?;
    remove(&to)
}

fn remove(path: &Path) -> Result<(), StoreError> {
    let is_dir = fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir());
    let removed = if is_dir {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
    removed.map_err(io_error("remove", path))
}

fn unique(path: &Path) -> String {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_nanos());
    format!("{}-{now}", path.file_name().unwrap_or_default().to_string_lossy())
}
