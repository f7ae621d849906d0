//! The files of one artifact below its data folder, reached through that folder's descriptor: it stays
//! valid through the rename that publishes the folder.

use super::crash::step;
use mooncake_proto::manifest::Manifest;
use rustix::{
    fs::{FallocateFlags, Mode, OFlags, ResolveFlags},
    io::Errno,
};
use std::{collections::BTreeSet, fs::File, io, os::unix::fs::MetadataExt};

/// Folders: readable and enterable by all, writable by the owner, less the umask.
const DIR_MODE: Mode = Mode::from_raw_mode(0o755);
const DIR_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY);
/// Files while they are written, less the umask; publishing takes the write bits away.
const FILE_MODE: Mode = Mode::from_raw_mode(0o666);
/// `st_blocks` counts in these.
const STAT_BLOCK_BYTES: u64 = 512;

/// What went wrong with which path.
pub(crate) type TreeError = (&'static str, String, io::Error);

/// Every folder the files need, parents before children.
pub(crate) fn folders(manifest: &Manifest) -> BTreeSet<&str> {
    let mut all = BTreeSet::new();
    for file in &manifest.files {
        for (end, _) in file.path.match_indices('/') {
            all.insert(&file.path[..end]);
        }
    }
    all
}

/// Opens what is at `path` below `dir`: where the kernel can do that, nothing that somebody put in the way (a
/// symbolic link in place of a folder) leads out of it; elsewhere only the last component is protected.
fn open_below(dir: &File, path: &str, flags: OFlags, mode: Mode) -> Result<File, Errno> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    match rustix::fs::openat2(dir, path, flags, mode, resolve) {
        // Old kernels, and containers whose filter does not know the call.
        Err(Errno::NOSYS | Errno::PERM) => Ok(rustix::fs::openat(dir, path, flags, mode)?.into()),
        other => Ok(other?.into()),
    }
}

/// Opens one file for reading, or for reading and writing.
pub(crate) fn open(dir: &File, path: &str, write: bool) -> io::Result<File> {
    if write {
        return open_for_writing(dir, path, OFlags::empty(), Mode::empty());
    }
    Ok(open_below(
        dir,
        path,
        OFlags::RDONLY | OFlags::NONBLOCK,
        Mode::empty(),
    )?)
}

/// A publish that was cut short may have left files read-only in staging.
fn open_for_writing(dir: &File, path: &str, flags: OFlags, mode: Mode) -> io::Result<File> {
    let open = || open_below(dir, path, flags | OFlags::RDWR, mode);
    match open() {
        Err(Errno::ACCESS) => {
            let file = self::open(dir, path, false)?;
            let mode = file.metadata()?.mode() & 0o777 | 0o200;
            rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))?;
            Ok(open()?)
        }
        other => Ok(other?),
    }
}

/// Bytes of the files that the filesystem has already allocated.
pub(crate) fn allocated_bytes(dir: &File, manifest: &Manifest) -> u64 {
    let of = |path: &str, size: u64| {
        let meta = open(dir, path, false).and_then(|f| f.metadata()).ok()?;
        Some((meta.blocks() * STAT_BLOCK_BYTES).min(size))
    };
    manifest
        .files
        .iter()
        .filter_map(|f| of(&f.path, f.size_bytes))
        .sum()
}

/// Creates what is missing, at full size, allocated where the filesystem can do that. Gives the bytes
/// that could not be allocated. What blocks were written is kept.
pub(crate) fn create(dir: &File, manifest: &Manifest) -> Result<u64, TreeError> {
    for folder in folders(manifest) {
        let made = match folder.rsplit_once('/') {
            None => rustix::fs::mkdirat(dir, folder, DIR_MODE),
            Some((parent, name)) => open_below(dir, parent, DIR_FLAGS, Mode::empty())
                .and_then(|parent| rustix::fs::mkdirat(parent, name, DIR_MODE)),
        };
        match made {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(("create folder", folder.to_owned(), e.into())),
        }
    }
    let mut unallocated = 0;
    for file in &manifest.files {
        step("begin::before_allocate");
        let size = file.size_bytes;
        unallocated += allocate(dir, &file.path, size).map_err(|e| ("allocate", file.path.clone(), e))?;
        step("begin::after_allocate");
    }
    sync_folders(dir, manifest, || (), || ())?;
    Ok(unallocated)
}

fn allocate(dir: &File, path: &str, size: u64) -> io::Result<u64> {
    let file = open_for_writing(dir, path, OFlags::CREATE, FILE_MODE)?;
    let meta = file.metadata()?;
    if meta.len() != size {
        file.set_len(size)?;
    }
    if size == 0 || meta.blocks() * STAT_BLOCK_BYTES >= size {
        return Ok(0);
    }
    if super::crash::broken("begin::cannot_allocate") {
        return Ok(size);
    }
    match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size) {
        Ok(()) => Ok(0),
        // The filesystem cannot: the file is sparse and space is only reserved in our own books.
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(size),
        Err(e) => Err(e.into()),
    }
}

/// Makes every entry of the tree durable, children before parents.
pub(crate) fn sync_folders(
    dir: &File,
    manifest: &Manifest,
    before: impl Fn(),
    after: impl Fn(),
) -> Result<(), TreeError> {
    for folder in folders(manifest).into_iter().rev() {
        before();
        open_below(dir, folder, DIR_FLAGS, Mode::empty())
            .and_then(rustix::fs::fsync)
            .map_err(|e| ("sync folder", folder.to_owned(), e.into()))?;
        after();
    }
    before();
    dir.sync_all().map_err(|e| ("sync folder", String::new(), e))?;
    after();
    Ok(())
}

/// Creates `path` and what is missing above it, down from `root` (which exists), each made durable.
pub(crate) fn create_parents(
    root: &std::path::Path,
    relative: &std::path::Path,
) -> Result<(), (std::path::PathBuf, io::Error)> {
    let mut at = root.to_owned();
    for part in relative.components() {
        let parent = at.clone();
        at.push(part);
        step("publish::before_create_parent");
        match rustix::fs::mkdir(&at, DIR_MODE) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err((at, e.into())),
        }
        step("publish::after_create_parent");
        step("publish::before_sync_parent");
        File::open(&parent)
            .and_then(|f| f.sync_all())
            .map_err(|e| (parent, e))?;
        step("publish::after_sync_parent");
    }
    Ok(())
}
