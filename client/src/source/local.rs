//! Sources on this machine: `file://` and absolute paths.
//!
//! Guaranteed: what is opened is the path that was compared with the allow list, with every symbolic link
//! resolved beforehand and none followed afterwards (where the kernel knows `openat2`; elsewhere only the last
//! component is protected against an exchange in between); a regular file; of the declared size before and
//! after. Not guaranteed: that somebody who changes a file and sets its time back is noticed by anything but
//! the checksum.

use super::{
    AllowList, Location,
    context::{Context, SourceFile},
    limits,
};
use crate::task::TaskFailure;
use futures_util::{StreamExt, stream::FuturesUnordered};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use std::{
    fs::{File, Metadata},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    sync::Arc,
};

/// Blocks of one file between disk and disk at once: one is read while the other is hashed and written.
const BLOCKS_AT_ONCE: usize = 2;

/// Which version of a file was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Version {
    size_bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Version {
    fn of(meta: &Metadata) -> Self {
        Self {
            size_bytes: meta.size(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }
}

/// Opens a file's source after all checks. Blocking.
pub(super) fn open(allow: &AllowList, file: &SourceFile) -> Result<(File, Version), TaskFailure> {
    let Location::Path(path) = &file.location else {
        unreachable!("only called for paths")
    };
    let resolved = match path.canonicalize() {
        Ok(resolved) => resolved,
        // Whether a path outside exists is nobody's business.
        Err(e) if allow.allows_as_written(path) => return Err(cannot_read(file, &e)),
        Err(_) => return Err(allow.refusal(&file.path, &file.location)),
    };
    if !allow.allows_resolved(path, &resolved) {
        return Err(allow.refusal(&file.path, &file.location));
    }
    let opened = open_resolved(&resolved).map_err(|e| cannot_read(file, &e))?;
    let meta = opened.metadata().map_err(|e| cannot_read(file, &e))?;
    if !meta.is_file() {
        let kind = if meta.is_dir() {
            "a folder"
        } else {
            "not a regular file"
        };
        let message = format!(
            "{} (the source of '{}') is {kind}: name a regular file",
            file.location, file.path
        );
        return Err(TaskFailure::permanent("source_not_a_file", message));
    }
    if meta.size() != file.size_bytes {
        return Err(file.size_mismatch(format!("{} bytes", meta.size())));
    }
    let version = Version::of(&meta);
    Ok((opened, version))
}

/// Opens a path that holds no symbolic link, and does not follow one that was put there meanwhile. Does not
/// wait for the writer of a FIFO either.
fn open_resolved(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    match rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
        Ok(fd) => Ok(fd.into()),
        // Old kernels, and containers whose filter does not know the call.
        Err(rustix::io::Errno::NOSYS | rustix::io::Errno::PERM) => {
            Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
        }
        Err(e) => Err(e.into()),
    }
}

fn cannot_read(file: &SourceFile, error: &io::Error) -> TaskFailure {
    let what = format!(
        "cannot read {} (the source of '{}'): {error}",
        file.location, file.path
    );
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => TaskFailure::permanent(
            "source_not_found",
            format!("{what}; it must exist on the seed node, under this very path"),
        ),
        io::ErrorKind::PermissionDenied => TaskFailure::permanent(
            "source_forbidden",
            format!("{what}; let the user of the client read it"),
        ),
        _ => TaskFailure::retryable(
            "source_unavailable",
            format!("{what}; check the disk or the network share"),
        ),
    }
}

/// A source that is open, until its file is taken.
pub(super) struct Source {
    file: Option<File>,
    turns: Arc<limits::Buffers>,
}

impl Source {
    pub(super) fn new(file: File, turns: Arc<limits::Buffers>) -> Self {
        Self {
            file: Some(file),
            turns,
        }
    }

    fn file(&self) -> &File {
        self.file.as_ref().expect("until it is dropped")
    }
}

impl Drop for Source {
    /// Where a transfer is left early. Closing may wait for a network share, too: it takes its turn.
    fn drop(&mut self) {
        let Some(file) = self.file.take() else { return };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return drop(file);
        };
        let turns = self.turns.clone();
        runtime.spawn(async move {
            let turn = turns.call_some_time().await;
            let closed = tokio::task::spawn_blocking(move || drop((file, turn)));
            // Nothing in it panics; and a runtime that shuts down leaves the file to the end of the process.
            let _ = closed.await;
        });
    }
}

/// Whether a file's source can be read, now.
pub(super) async fn look(context: &Arc<Context>, file: &SourceFile) -> Result<(), TaskFailure> {
    let (looked_at, what) = (context.clone(), file.clone());
    context
        .call_source(file, move || open(&looked_at.allow, &what).map(drop))
        .await
}

/// Copies what is missing of one file.
pub(super) async fn fetch(context: &Arc<Context>, file: &Arc<SourceFile>) -> Result<(), TaskFailure> {
    let mut missing = file
        .blocks
        .clone()
        .filter(|&b| !context.artifact.has(b))
        .peekable();
    if missing.peek().is_none() {
        return Ok(());
    }
    let (looked_at, what) = (context.clone(), file.clone());
    let opened = context.call_source(file, move || {
        let (source, version) = open(&looked_at.allow, &what)?;
        // Advice only: some filesystems have none to take.
        let _ = rustix::fs::fadvise(&source, 0, None, rustix::fs::Advice::Sequential);
        Ok((Source::new(source, looked_at.buffers.clone()), version))
    });
    let (source, version) = opened.await?;
    let source = Arc::new(source);
    let mut copies = FuturesUnordered::new();
    loop {
        while copies.len() < BLOCKS_AT_ONCE
            && let Some(block) = missing.next()
        {
            copies.push(copy(context, file, &source, block));
        }
        match copies.next().await {
            Some(result) => result?,
            None => break,
        }
    }
    drop(copies);
    let after = context.call_source(file, move || {
        let after = source.file().metadata().map(|m| Version::of(&m));
        // In this call's turn.
        drop(Arc::into_inner(source).and_then(|mut source| source.file.take()));
        Ok(after)
    });
    match after.await? {
        Ok(after) if after == version => Ok(()),
        Ok(_) => Err(file.changed("its size or modification time is another now")),
        Err(e) => Err(cannot_read(file, &e)),
    }
}

async fn copy(
    context: &Arc<Context>,
    file: &Arc<SourceFile>,
    source: &Arc<Source>,
    block: u32,
) -> Result<(), TaskFailure> {
    let range = context
        .artifact
        .blocks()
        .locate(block)
        .expect("a block of this artifact");
    context.config.download.wait(range.len.into()).await;
    // Reads that hang, of this source or of others, keep their buffers.
    let mut buffer = context.local_buffer(file).await?;
    let (source, what) = (source.clone(), file.clone());
    let read = context.call_source(file, move || {
        buffer.bytes.resize(range.len as usize, 0);
        match source.file().read_exact_at(&mut buffer.bytes, range.offset) {
            Ok(()) => Ok(buffer),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Err(what.changed("it became shorter")),
            Err(e) => Err(cannot_read(&what, &e)),
        }
    });
    let buffer = read.await?;
    context.counters.add_fetched(range.len.into());
    context.write(file, block, buffer).done().await
}
