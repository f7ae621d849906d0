//! From staging to the final folder, in one rename.
//!
//! The order: own digest list against the seal; everything journaled; each file read-only and synced; each
//! folder synced; the record (digest list and all) written; the parents of the final folder created and
//! synced; **one rename that never replaces anything**; both parents synced; the rest of staging removed.
//! A crash before the rename leaves staging, whole, and no final folder: the record beside it is then only
//! an intent, and the next publish goes through again. A crash after it leaves the final folder and its
//! record: staged at the next start. There is nothing between.

use super::{
    artifact::{Artifact, DATA, Phase},
    crash::{broken, step},
    durable::sync_dir,
    error::{PublishError, StoreError, io_error},
    records::{FolderIdentity, StagedFile, StagedRecord},
    tree,
};
use mooncake_proto::manifest::{Checksum, Seal};
use rustix::fs::{Mode, RenameFlags};
use std::{
    fs, io,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

impl Artifact {
    /// Publishes the model under its final name and gives that. Idempotent. Blocking; excludes flushes and
    /// `forget` while it runs, reading goes on.
    pub fn publish(&self, seal: &Seal) -> Result<PathBuf, PublishError> {
        let mut journal = self.journal.lock();
        let unchecked = broken("publish::skip_checks");
        let Some(own) = self.seal_if_whole().or(unchecked.then_some(*seal)) else {
            if let Some(why) = self.closed() {
                return Err(StoreError::Closed {
                    model: Box::new(self.model.clone()),
                    why,
                }
                .into());
            }
            return Err(PublishError::NotWhole {
                missing: self.blocks.len() - self.have_count(),
            });
        };
        if own != *seal {
            return Err(PublishError::RootMismatch {
                own: own.root,
                sealed: seal.root,
            });
        }
        if matches!(self.state.lock().phase, Phase::Staged) {
            if self.staging.exists() {
                self.sync_parents()?;
                self.remove_rest();
            }
            return Ok(self.final_path.clone());
        }
        self.flush_locked(&mut journal)?;
        let closed = self.closed();
        if journal.is_none() || closed.is_some() {
            let why = closed.unwrap_or_default();
            return Err(StoreError::Closed {
                model: Box::new(self.model.clone()),
                why,
            }
            .into());
        }
        step("publish::begin");
        if fs::symlink_metadata(&self.final_path).is_ok() {
            return Err(StoreError::FinalFolderExists {
                path: self.final_path.clone(),
            }
            .into());
        }
        let files = match self.seal_files() {
            Ok(files) => files,
            Err(e) => {
                // A failed sync may have dropped dirty pages: only the journal is to be believed.
                self.fail(&mut journal, &e);
                return Err(e.into());
            }
        };
        let record = StagedRecord {
            model: self.model.clone(),
            generation: self.generation(),
            seal: *seal,
            manifest: self.manifest.encode(),
            digests: self.digests().unwrap_or_default(),
            files,
            folder: FolderIdentity::of(&self.dir.metadata().map_err(io_error("examine", self.folder()))?),
        };
        record.write(&self.staged_record())?;
        let root = &self.plumbing.config.root;
        let below = self
            .final_path
            .strip_prefix(root)
            .expect("the final folder is below the root");
        let parent = below.parent().expect("four components");
        tree::create_parents(root, parent).map_err(|(path, e)| io_error("create", path)(e))?;

        let data = self.staging.join(DATA);
        step("publish::before_rename");
        rename_new(&data, &self.final_path).map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists
            | io::ErrorKind::DirectoryNotEmpty
            | io::ErrorKind::NotADirectory => StoreError::FinalFolderExists {
                path: self.final_path.clone(),
            },
            _ => io_error("publish as", &self.final_path)(e),
        })?;
        step("publish::after_rename");

        // It is there: from here on nothing takes it back. A sync that fails is reported, and a repeated
        // publish does it again.
        *journal = None;
        let synced = self.sync_parents();
        {
            let mut state = self.state.lock();
            state.phase = Phase::Staged;
            Self::shrink(&mut state);
        }
        self.plumbing.files.close(self.id); // they were opened for writing
        self.bump();
        self.plumbing.bump();
        synced?;
        self.remove_rest();
        tracing::info!(model = %self.model, path = %self.final_path.display(), root = %seal.root, "model staged");
        Ok(self.final_path.clone())
    }

    /// Makes the rename durable on both sides.
    fn sync_parents(&self) -> Result<(), StoreError> {
        step("publish::before_sync_final_parent");
        sync_dir(self.final_path.parent().expect("four components"))?;
        step("publish::after_sync_final_parent");
        step("publish::before_sync_staging");
        sync_dir(&self.staging)?;
        step("publish::after_sync_staging");
        Ok(())
    }

    /// The record and the journal in staging have done their work.
    fn remove_rest(&self) {
        step("publish::before_remove_staging");
        if let Err(e) = fs::remove_dir_all(&self.staging) {
            tracing::warn!(path = %self.staging.display(), error = %e, "what is left of staging is removed at the next start");
        }
        step("publish::after_remove_staging");
    }

    pub(crate) fn staged_record(&self) -> PathBuf {
        let key = self.staging.file_name().expect("a key");
        self.plumbing.own.join(super::STAGED).join(key)
    }

    /// Every file read-only and durable, then every folder.
    fn seal_files(&self) -> Result<Vec<StagedFile>, StoreError> {
        let mut files = Vec::with_capacity(self.manifest.files.len());
        for (index, entry) in self.manifest.files.iter().enumerate() {
            let failed = |what| io_error(what, self.file_path(index));
            let file = tree::open(&self.dir, &entry.path, false).map_err(failed("open"))?;
            let meta = file.metadata().map_err(failed("examine"))?;
            if meta.len() != entry.size_bytes {
                let why = format!(
                    "it has {} bytes, not {}: begin again",
                    meta.len(),
                    entry.size_bytes
                );
                return Err(StoreError::Damaged {
                    path: self.file_path(index),
                    why,
                });
            }
            // Who may read it was decided by the umask when it was created; only writing is taken away.
            let mode = Mode::from_raw_mode(meta.permissions().mode() & 0o444);
            step("publish::before_chmod_file");
            rustix::fs::fchmod(&file, mode).map_err(|e| failed("make read-only")(e.into()))?;
            step("publish::before_sync_file");
            if !broken("publish::skip_sync") {
                file.sync_all().map_err(failed("sync"))?;
            }
            step("publish::after_sync_file");
            let sha256 = match &entry.checksum {
                Checksum::Sha256(digest) => Some(*digest),
                Checksum::Opaque(_) => None,
            };
            files.push(StagedFile {
                mtime_ns: mtime_ns(&meta),
                sha256,
            });
        }
        tree::sync_folders(
            &self.dir,
            &self.manifest,
            || step("publish::before_sync_tree_dir"),
            || step("publish::after_sync_tree_dir"),
        )
        .map_err(|(what, path, e)| io_error(what, self.folder().join(path))(e))?;
        Ok(files)
    }
}

/// Modification time in nanoseconds since the epoch.
pub(crate) fn mtime_ns(meta: &fs::Metadata) -> i64 {
    meta.mtime()
        .saturating_mul(1_000_000_000)
        .saturating_add(meta.mtime_nsec())
}

/// Renames a folder to a name that nothing has.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, renameat_with};
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // The filesystem does not know the flag. A plain rename of a folder replaces at most an empty
        // folder, never a file and never anything with content.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS | rustix::io::Errno::OPNOTSUPP) => {
            fs::rename(from, to)
        }
        other => Ok(other?),
    }
}
