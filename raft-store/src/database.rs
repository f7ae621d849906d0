//! The one RocksDB of a store, and the witness file beside it.
//!
//! The witness closes a gap that checksums cannot: the end of a write-ahead log that a crash tore looks just like
//! the end of one whose last *acknowledged* record was damaged, and RocksDB drops both. So after every synced
//! write the database's sequence number is written to a small file in place (not synced: it may lag behind after a
//! power loss, never run ahead). A database that comes back with a lower number has lost something that was
//! acknowledged, and is refused.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rocksdb::{
    ColumnFamily, ColumnFamilyDescriptor, DB, DBRecoveryMode, IteratorMode, Options, WriteBatch, WriteOptions,
};

use crate::error::OpenError;
use crate::sabotage;

/// Frozen: names of the column families.
pub(crate) const CF_LOG: &str = "log";
pub(crate) const CF_META: &str = "meta";

const DB_FOLDER: &str = "db";
const WITNESS_FILE: &str = "acknowledged";
const WITNESS_MAGIC: [u8; 8] = *b"MCRACKN\n";
/// Frozen: the only version of the witness file so far.
const WITNESS_VERSION: u32 = 1;
const WITNESS_BYTES: usize = 24;

/// Memory of one write buffer. Entries are at most half a mebibyte and purged soon; a master is to stay small.
const WRITE_BUFFER_BYTES: usize = 16 * 1024 * 1024;
/// Old write-ahead logs beyond this make RocksDB flush the column family that holds them back (`meta`, which hardly
/// grows by itself): bounds both the disk and the replay at start.
const MAX_WAL_BYTES: u64 = 64 * 1024 * 1024;
/// A log of a few tens of mebibytes has a handful of files; the bound keeps a sick one from eating descriptors.
const MAX_OPEN_FILES: i32 = 128;

/// The rule of [`sabotage`] that this module breaks.
pub(crate) const DROP_SYNC: &str = "drop_sync";

/// Key and value.
pub(crate) type Record = (Box<[u8]>, Box<[u8]>);

pub(crate) struct Database {
    db: DB,
    path: PathBuf,
    witness: File,
    /// How many batches were written, and how many of them were synced before they returned.
    writes: AtomicU64,
    syncs: AtomicU64,
    /// Tests only: leave writes in the process's own buffer and call them synced, which must be found out.
    drop_sync: bool,
    /// Tests only: write no witness either, which would find it out at the next start.
    no_witness: bool,
}

impl Database {
    /// Opens or creates. `bool`: whether it was created now.
    pub(crate) fn open(path: &Path, drop_sync: bool) -> Result<(Self, bool), OpenError> {
        let folder = path.join(DB_FOLDER);
        let failed = |what| {
            move |error| OpenError::Folder {
                path: path.to_owned(),
                what,
                error,
            }
        };
        std::fs::create_dir_all(path).map_err(failed("creating it"))?;
        let witness_path = path.join(WITNESS_FILE);
        let exists = |path: &Path| path.try_exists();
        // RocksDB names its CURRENT file last when it creates a database: before that there was nothing to lose.
        let has_db = exists(&folder.join("CURRENT")).map_err(failed("looking for the database"))?;
        let has_witness = exists(&witness_path).map_err(failed("looking for the witness file"))?;
        if has_db && !has_witness {
            let detail = "the file is missing beside a database".to_owned();
            return Err(OpenError::Damaged {
                path: path.to_owned(),
                record: format!("file {WITNESS_FILE}"),
                detail,
            });
        }
        if !has_witness {
            create_witness(path, &witness_path).map_err(failed("creating the witness file"))?;
        }
        let witness = File::options()
            .read(true)
            .write(true)
            .open(&witness_path)
            .map_err(failed("opening the witness file"))?;
        let acknowledged = read_witness(&witness).map_err(|detail| OpenError::Damaged {
            path: path.to_owned(),
            record: format!("file {WITNESS_FILE}"),
            detail,
        })?;
        let lost = |detail| OpenError::Damaged {
            path: path.to_owned(),
            record: "the database".into(),
            detail,
        };
        if !has_db && acknowledged > 0 {
            return Err(lost(format!(
                "it is missing, but {acknowledged} changes were acknowledged"
            )));
        }

        let mut options = Options::default();
        options.create_if_missing(true);
        options.create_missing_column_families(true);
        options.set_paranoid_checks(true);
        // A record that a crash tore at the very end was never acknowledged (the witness tells); anything else that
        // is wrong in a write-ahead log is refused. RocksDB's default would silently drop all that follows.
        options.set_wal_recovery_mode(DBRecoveryMode::TolerateCorruptedTailRecords);
        options.set_track_and_verify_wals_in_manifest(true);
        options.set_max_total_wal_size(MAX_WAL_BYTES);
        options.set_max_open_files(MAX_OPEN_FILES);
        options.set_write_buffer_size(WRITE_BUFFER_BYTES);
        options.set_keep_log_file_num(2);
        options.set_max_log_file_size(1024 * 1024);
        options.set_manual_wal_flush(drop_sync);
        let column_family = |name| {
            let mut options = Options::default();
            options.set_write_buffer_size(WRITE_BUFFER_BYTES);
            ColumnFamilyDescriptor::new(name, options)
        };
        let families = ["default", CF_LOG, CF_META].map(column_family);
        let db = DB::open_cf_descriptors(&options, &folder, families).map_err(|error| {
            let detail = error.to_string();
            match error.kind() {
                rocksdb::ErrorKind::Corruption => lost(detail),
                rocksdb::ErrorKind::IOError if detail.contains("lock") => OpenError::Locked {
                    path: path.to_owned(),
                    detail,
                },
                _ => OpenError::Database {
                    path: path.to_owned(),
                    what: "opening the database",
                    detail,
                },
            }
        })?;
        if !has_db {
            // The names of the folders must be as durable as what will be promised inside them.
            let parent = path
                .canonicalize()
                .ok()
                .and_then(|path| path.parent().map(Path::to_owned));
            for folder in [Some(path.to_owned()), parent].into_iter().flatten() {
                File::open(&folder)
                    .and_then(|folder| folder.sync_all())
                    .map_err(failed("syncing the new folder"))?;
            }
        }
        let found = db.latest_sequence_number();
        if found < acknowledged {
            return Err(lost(format!(
                "it has {found} changes, but {acknowledged} were acknowledged: the end of its write-ahead log is gone"
            )));
        }
        let database = Self {
            db,
            path: path.to_owned(),
            witness,
            writes: AtomicU64::new(0),
            syncs: AtomicU64::new(0),
            drop_sync,
            no_witness: sabotage::is_broken(DROP_SYNC),
        };
        Ok((database, !has_db))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn log(&self) -> &ColumnFamily {
        self.db
            .cf_handle(CF_LOG)
            .expect("it was opened with the database")
    }

    pub(crate) fn meta(&self) -> &ColumnFamily {
        self.db
            .cf_handle(CF_META)
            .expect("it was opened with the database")
    }

    /// Writes a batch. With `sync` it is durable, and witnessed, when this returns.
    pub(crate) fn write(&self, batch: WriteBatch, sync: bool) -> io::Result<()> {
        let sync_now = sync && !self.drop_sync;
        if !batch.is_empty() {
            let mut options = WriteOptions::default();
            options.set_sync(sync_now);
            self.db.write_opt(batch, &options).map_err(io::Error::other)?;
        } else if sync_now {
            self.db.flush_wal(true).map_err(io::Error::other)?;
        }
        self.writes.fetch_add(1, Ordering::Relaxed);
        if sync {
            if !self.drop_sync {
                self.syncs.fetch_add(1, Ordering::Relaxed);
            }
            if !self.no_witness {
                self.witness
                    .write_all_at(&encode_witness(self.db.latest_sequence_number()), 0)?;
            }
        }
        Ok(())
    }

    /// (written batches, of which synced).
    pub(crate) fn counts(&self) -> (u64, u64) {
        (
            self.writes.load(Ordering::Relaxed),
            self.syncs.load(Ordering::Relaxed),
        )
    }

    pub(crate) fn iterate<'a>(
        &'a self,
        family: &ColumnFamily,
        mode: IteratorMode<'_>,
    ) -> impl Iterator<Item = Result<Record, rocksdb::Error>> + 'a {
        self.db.iterator_cf(family, mode)
    }
}

/// magic | version u32 | sequence number u64 | crc32 u32 of all before; little endian. It lies within one sector, so
/// a crash leaves the old or the new one.
fn encode_witness(sequence: u64) -> [u8; WITNESS_BYTES] {
    let mut bytes = [0; WITNESS_BYTES];
    bytes[..8].copy_from_slice(&WITNESS_MAGIC);
    bytes[8..12].copy_from_slice(&WITNESS_VERSION.to_le_bytes());
    bytes[12..20].copy_from_slice(&sequence.to_le_bytes());
    let checksum = crc32fast::hash(&bytes[..20]);
    bytes[20..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

fn create_witness(folder: &Path, path: &Path) -> io::Result<()> {
    // Whole before it has its name: a crash here must not leave a torn file that the next start refuses.
    let partial = path.with_extension("partial");
    std::fs::write(&partial, encode_witness(0))?;
    File::open(&partial)?.sync_all()?;
    std::fs::rename(&partial, path)?;
    File::open(folder)?.sync_all()
}

fn read_witness(file: &File) -> Result<u64, String> {
    let mut bytes = [0; WITNESS_BYTES];
    file.read_exact_at(&mut bytes, 0)
        .map_err(|error| error.to_string())?;
    let mut sequence = [0; 8];
    sequence.copy_from_slice(&bytes[12..20]);
    let sequence = u64::from_le_bytes(sequence);
    if bytes != encode_witness(sequence) {
        return Err("its checksum does not match its content".into());
    }
    Ok(sequence)
}

/// Makes the witness say that nothing was ever acknowledged.
#[cfg(test)]
pub(crate) fn reset_witness(folder: &Path) {
    std::fs::write(folder.join(WITNESS_FILE), encode_witness(0)).unwrap();
}
