//! Whatever is damaged on the disk is refused at start, with a message that names it.

use std::path::PathBuf;

use rocksdb::{DB, IteratorMode, Options};

use super::*;

/// Opens the folder's database without this crate, to damage it.
fn raw(path: &Path) -> DB {
    DB::open_cf(&Options::default(), path.join("db"), ["default", "log", "meta"]).unwrap()
}

fn records(db: &DB, family: &str) -> Vec<(Vec<u8>, Vec<u8>)> {
    let family = db.cf_handle(family).unwrap();
    db.iterator_cf(family, IteratorMode::Start)
        .map(|record| record.unwrap())
        .map(|(k, v)| (k.into(), v.into()))
        .collect()
}

fn says_what_to_do(message: &str) {
    assert!(message.contains("under a new node id"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_bit_in_any_record_is_refused_and_named() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path()).await;
    let all: Vec<(&str, Vec<u8>, Vec<u8>)> = {
        let db = raw(folder.path());
        ["log", "meta"]
            .into_iter()
            .flat_map(|family| {
                records(&db, family)
                    .into_iter()
                    .map(move |(key, value)| (family, key, value))
            })
            .collect()
    };
    assert_eq!(
        all.len(),
        20 + 8,
        "20 entries; identity (4), vote, committed, purged, first"
    );
    for (number, (family, key, value)) in all.iter().enumerate() {
        let mut bad = value.clone();
        let bit = (number * 131) % (bad.len() * 8);
        bad[bit / 8] ^= 1 << (bit % 8);
        {
            let db = raw(folder.path());
            db.put_cf(db.cf_handle(family).unwrap(), key, &bad).unwrap();
        }
        let message = refused(folder.path());
        let name = match *family {
            "log" => format!(
                "log record {} is damaged",
                u64::from_be_bytes(key.as_slice().try_into().unwrap())
            ),
            _ => format!("meta record \"{}\" is damaged", String::from_utf8_lossy(key)),
        };
        assert!(message.contains(&name), "{name}: {message}");
        says_what_to_do(&message);
        let db = raw(folder.path());
        db.put_cf(db.cf_handle(family).unwrap(), key, value).unwrap();
    }
    let store = open(folder.path());
    let mut log = store.take_log_store().unwrap();
    assert_filled(&store, &mut log).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_record_is_refused_and_named() {
    for (missing, message_part) in [(10, "log record 10"), (17, "log record 17")] {
        let folder = tempfile::tempdir().unwrap();
        fill(folder.path()).await;
        {
            let db = raw(folder.path());
            db.delete_cf(db.cf_handle("log").unwrap(), u64::to_be_bytes(missing))
                .unwrap();
        }
        let message = refused(folder.path());
        assert!(message.contains(message_part), "{message}");
    }
    for (missing, message_part) in [
        ("node_id", "the identity"),
        ("purged", "log record 0"),
        ("disk_id", "the identity"),
        ("format_version", "the identity"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        fill(folder.path()).await;
        {
            let db = raw(folder.path());
            db.delete_cf(db.cf_handle("meta").unwrap(), missing).unwrap();
        }
        let message = refused(folder.path());
        assert!(message.contains(message_part), "{missing}: {message}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_of_the_log_that_was_committed_and_is_missing_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path()).await;
    {
        let db = raw(folder.path());
        for index in 20..30_u64 {
            db.delete_cf(db.cf_handle("log").unwrap(), index.to_be_bytes())
                .unwrap();
        }
    }
    let message = refused(folder.path());
    assert!(
        message.contains("were committed, but log and snapshot end before"),
        "{message}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_bit_anywhere_in_a_snapshot_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path()).await;
    let snapshots = files(&folder.path().join("snapshots"), ".snap");
    assert_eq!(snapshots.len(), 1);
    let (path, good) = snapshots.into_iter().next().unwrap();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        std::fs::write(&path, &bad).unwrap();
        let message = refused(folder.path());
        assert!(
            message.contains("snapshot-") && message.contains("is damaged"),
            "byte {at}: {message}"
        );
        says_what_to_do(&message);
    }
    for length in [0, 10, good.len() - 1] {
        std::fs::write(&path, &good[..length]).unwrap();
        assert!(refused(folder.path()).contains("is damaged"));
    }
    std::fs::remove_file(&path).unwrap();
    assert!(refused(folder.path()).contains("a snapshot up to there must exist, but there is none"));
    // Its right content under another name is not it, either.
    let renamed = path.with_file_name("snapshot-00000000000000000002-00000000000000000099.snap");
    std::fs::write(&renamed, &good).unwrap();
    assert!(refused(folder.path()).contains("its content belongs to"));
    std::fs::remove_file(&renamed).unwrap();
    std::fs::write(&path, &good).unwrap();
    let store = open(folder.path());
    let mut log = store.take_log_store().unwrap();
    assert_filled(&store, &mut log).await;
}

/// Damages one file in many ways. Each time the folder must be refused, or hold all that was acknowledged.
/// Gives how often it was refused.
async fn damage_file(origin: &Path, file: &Path, variants: Vec<Vec<u8>>) -> usize {
    let mut refusals = 0;
    for (number, bad) in variants.into_iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        copy_folder(origin, folder.path());
        std::fs::write(folder.path().join(file), bad).unwrap();
        match Store::open(folder.path(), options()) {
            Err(error) => {
                assert!(
                    matches!(
                        error,
                        OpenError::Damaged { .. } | OpenError::Database { .. } | OpenError::Newer { .. }
                    ),
                    "variant {number}: {error}"
                );
                refusals += 1;
            }
            Ok(store) => {
                let mut log = store.take_log_store().unwrap();
                assert_filled(&store, &mut log).await;
            }
        }
    }
    refusals
}

fn flips(good: &[u8], positions: impl Iterator<Item = usize>) -> Vec<Vec<u8>> {
    positions
        .map(|at| {
            let mut bad = good.to_vec();
            bad[at] ^= 1 << (at % 8);
            bad
        })
        .collect()
}

/// The largest file with this suffix in the database, relative to the folder.
fn largest(folder: &Path, suffix: &str) -> (PathBuf, Vec<u8>) {
    let (path, content) = files(&folder.join("db"), suffix)
        .into_iter()
        .max_by_key(|(_, content)| content.len())
        .unwrap();
    (path.strip_prefix(folder).unwrap().to_owned(), content)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_or_shortened_write_ahead_log_never_loses_what_was_acknowledged() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path()).await;
    let (file, good) = largest(folder.path(), ".log");
    assert!(
        good.len() > 10_000,
        "all of it is in the write-ahead log: {}",
        good.len()
    );
    // The end is where damage looks like a torn write.
    let last = good.len() - 60;
    let variants = flips(&good, (0..last).step_by(good.len() / 60).chain(last..good.len()));
    let count = variants.len();
    assert_eq!(damage_file(folder.path(), &file, variants).await, count);
    let cuts: Vec<_> = [1, 7, 20, 100, 5000, good.len()]
        .iter()
        .map(|cut| good[..good.len() - cut].to_vec())
        .collect();
    let count = cuts.len();
    assert_eq!(damage_file(folder.path(), &file, cuts).await, count);
    // What a crash tore, behind the last acknowledged write, is not damage.
    let torn = vec![[&good[..], &good[..30]].concat(), [&good[..], &[0; 5]].concat()];
    assert_eq!(damage_file(folder.path(), &file, torn).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_table_file_never_loses_what_was_acknowledged() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path()).await;
    {
        let db = raw(folder.path());
        db.flush_cf(db.cf_handle("log").unwrap()).unwrap();
        db.flush_cf(db.cf_handle("meta").unwrap()).unwrap();
    }
    let (file, good) = largest(folder.path(), ".sst");
    assert!(good.len() > 3_000);
    let refusals = damage_file(
        folder.path(),
        &file,
        flips(&good, (0..good.len()).step_by(good.len() / 50)),
    )
    .await;
    assert!(refusals > 10, "only {refusals} of about 50 were found");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_or_missing_witness_and_a_missing_database_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path()).await;
    let witness = Path::new("acknowledged");
    let good = std::fs::read(folder.path().join(witness)).unwrap();
    assert_eq!(
        damage_file(folder.path(), witness, flips(&good, 0..good.len())).await,
        good.len()
    );
    assert_eq!(
        damage_file(folder.path(), witness, vec![vec![], good[..10].to_vec()]).await,
        2
    );

    let copy = tempfile::tempdir().unwrap();
    copy_folder(folder.path(), copy.path());
    std::fs::remove_file(copy.path().join(witness)).unwrap();
    assert!(refused(copy.path()).contains("file acknowledged is damaged: the file is missing"));

    let copy = tempfile::tempdir().unwrap();
    copy_folder(folder.path(), copy.path());
    std::fs::remove_dir_all(copy.path().join("db")).unwrap();
    assert!(refused(copy.path()).contains("it is missing, but"));
    std::fs::remove_file(copy.path().join(witness)).unwrap();
    let message = refused(copy.path());
    assert!(message.contains("holds snapshots"), "{message}");
}
