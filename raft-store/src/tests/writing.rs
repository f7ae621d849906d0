//! Order, grouping and syncs of writes; reads from memory and disk.

use std::sync::Arc;

use futures_util::StreamExt as _;
use openraft::RaftLogReader as _;
use openraft::storage::LeaderBoundedStreamError;

use super::*;

fn big(term: u64, index: u64, size_bytes: usize) -> Entry {
    Entry {
        log_id: log_id(term, index),
        payload: EntryPayload::Normal(Command(vec![index as u8; size_bytes])),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_acknowledged_was_synced_and_committed_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path());
    let mut log = store.take_log_store().unwrap();
    let mut before = store.write_counts().syncs;
    let mut synced = |what: &str| {
        let now = store.write_counts().syncs;
        assert!(now > before, "{what} was acknowledged without a sync");
        before = now;
    };
    append(&mut log, (0..5).map(|index| entry(1, index)).collect())
        .await
        .unwrap();
    synced("an append");
    log.save_vote(&Vote::new(2, 1)).await.unwrap();
    synced("a vote");
    log.truncate_after(Some(log_id(1, 3))).await.unwrap();
    synced("a truncation");
    let mut machine = store.state_machine(Chain::default()).unwrap();
    apply(&mut machine, (0..2).map(|index| entry(1, index)).collect()).await;
    snapshot(&mut machine).await;
    drop(machine);
    log.purge(log_id(1, 1)).await.unwrap();
    synced("a purge");

    let counts = store.write_counts();
    log.save_committed(Some(log_id(1, 2))).await.unwrap();
    assert_eq!(log.read_committed().await.unwrap(), Some(log_id(1, 2)));
    // The barrier behind it forces one; the committed index alone none.
    let later = store.write_counts();
    assert_eq!(later.syncs, counts.syncs);
    close(store, log).await;

    let store = open(folder.path());
    let mut log = store.take_log_store().unwrap();
    assert_eq!(log.read_committed().await.unwrap(), Some(log_id(1, 2)));
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_are_readable_before_they_are_durable_and_from_disk_and_memory_alike() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path());
    let mut log = store.take_log_store().unwrap();
    let mut reader = log.get_log_reader().await;
    // 30 MiB: more than what is kept in memory.
    let (size, count) = (300 * 1024, 100);
    let mut waiting = Vec::new();
    for index in 0..count {
        let (done, flushed) = flush_signal();
        log.append([big(1, index, size)], IOFlushed::signal(done))
            .await
            .unwrap();
        assert_eq!(
            reader.try_get_log_entries(index..).await.unwrap(),
            [big(1, index, size)]
        );
        waiting.push(flushed);
    }
    for flushed in waiting {
        flushed.await.unwrap().unwrap();
    }
    let all: Vec<Entry> = (0..count).map(|index| big(1, index, size)).collect();
    assert!(
        reader.try_get_log_entries(..).await.unwrap() == all,
        "disk and memory together"
    );
    assert!(reader.try_get_log_entries(3..=97).await.unwrap() == all[3..=97]);
    for start in 0..count {
        let limited = reader.limited_get_log_entries(start, count).await.unwrap();
        assert!(
            !limited.is_empty() && limited.len() * size <= MAX_READ_BYTES,
            "{} entries",
            limited.len()
        );
        assert!(limited[..] == all[start as usize..][..limited.len()]);
    }
    let streamed: Vec<Entry> = reader
        .entries_stream(5..90)
        .await
        .map(Result::unwrap)
        .collect()
        .await;
    assert!(streamed == all[5..90], "a stream gives all of its range");
    assert!(reader.try_get_log_entries(count..).await.unwrap().is_empty());
    assert!(reader.limited_get_log_entries(0, 0).await.unwrap().is_empty());
    drop(reader);
    close(store, log).await;

    let store = open(folder.path());
    let mut log = store.take_log_store().unwrap();
    let mut reader = log.get_log_reader().await;
    assert!(
        reader.try_get_log_entries(..).await.unwrap() == all,
        "all from the disk"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leaders_stream_ends_when_the_vote_changes() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path());
    let mut log = store.take_log_store().unwrap();
    let vote = Vote::new_committed(1, 1);
    log.save_vote(&vote).await.unwrap();
    append(&mut log, (0..20).map(|index| big(1, index, 300 * 1024)).collect())
        .await
        .unwrap();
    let mut reader = log.get_log_reader().await;
    let mut stream = reader.leader_bounded_stream(vote.leader_id, 0..20).await;
    assert_eq!(stream.next().await.unwrap().unwrap().log_id, log_id(1, 0));
    log.save_vote(&Vote::new(2, 2)).await.unwrap();
    let rest: Vec<_> = stream.collect().await;
    assert!(rest.len() < 19, "entries went on under another vote");
    assert!(matches!(
        rest.last(),
        Some(Err(LeaderBoundedStreamError::LeaderChanged(_)))
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hole_a_falling_term_and_cutting_what_is_committed_are_refused() {
    for (what, next) in [
        ("a hole", entry(2, 12)),
        ("an overwrite", entry(2, 9)),
        ("a falling term", entry(1, 10)),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let store = open(folder.path());
        let mut log = store.take_log_store().unwrap();
        append(&mut log, (0..10).map(|index| entry(2, index)).collect())
            .await
            .unwrap();
        assert!(append(&mut log, vec![next]).await.is_err(), "{what}");
        assert!(
            store.fatal().get().is_some(),
            "{what} is a broken caller: nothing goes on"
        );
        assert!(append(&mut log, vec![entry(2, 10)]).await.is_err());
        drop(log);
        assert!(store.close().await.is_err(), "what is queued cannot be durable");
        let store = open(folder.path());
        let mut log = store.take_log_store().unwrap();
        assert_eq!(log.get_log_state().await.unwrap().last_log_id, Some(log_id(2, 9)));
    }
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path());
    let mut log = store.take_log_store().unwrap();
    append(&mut log, (0..10).map(|index| entry(2, index)).collect())
        .await
        .unwrap();
    log.save_committed(Some(log_id(2, 5))).await.unwrap();
    log.truncate_after(Some(log_id(2, 5))).await.unwrap();
    assert!(
        log.truncate_after(Some(log_id(2, 4)))
            .await
            .unwrap_err()
            .to_string()
            .contains("committed")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn truncation_and_purge_hold_after_a_restart_and_the_log_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path()).await;
    let store = open(folder.path());
    let mut log = store.take_log_store().unwrap();
    log.truncate_after(Some(log_id(2, 24))).await.unwrap();
    append(&mut log, (25..28).map(|index| entry(5, index)).collect())
        .await
        .unwrap();
    log.purge(log_id(2, 15)).await.unwrap();
    close(store, log).await;
    let store = open(folder.path());
    let mut log = store.take_log_store().unwrap();
    let state = log.get_log_state().await.unwrap();
    assert_eq!(
        (state.last_purged_log_id, state.last_log_id),
        (Some(log_id(2, 15)), Some(log_id(5, 27)))
    );
    let mut reader = log.get_log_reader().await;
    let entries = reader.try_get_log_entries(..).await.unwrap();
    let expected: Vec<Entry> = (16..25)
        .map(|index| entry(2, index))
        .chain((25..28).map(|index| entry(5, index)))
        .collect();
    assert_eq!(entries, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_beside_a_writer_that_cuts_see_no_mixture() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path());
    let mut log = store.take_log_store().unwrap();
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut readers = Vec::new();
    for _ in 0..2 {
        let (mut reader, stop) = (log.get_log_reader().await, Arc::clone(&stop));
        readers.push(tokio::spawn(async move {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let entries = reader.try_get_log_entries(..).await.unwrap();
                for pair in entries.windows(2) {
                    assert_eq!(pair[0].log_id.index() + 1, pair[1].log_id.index());
                    assert!(
                        pair[0].log_id < pair[1].log_id,
                        "{} then {}",
                        pair[0].log_id,
                        pair[1].log_id
                    );
                }
            }
        }));
    }
    let mut next = 0;
    for term in 1..60 {
        append(
            &mut log,
            (next..next + 8)
                .map(|index| big(term, index, 100 * 1024))
                .collect(),
        )
        .await
        .unwrap();
        next += 6;
        let mut reader = log.get_log_reader().await;
        let last = reader.try_get_log_entries(next - 1..next).await.unwrap()[0].log_id;
        log.truncate_after(Some(last)).await.unwrap();
        if next > 120 {
            let purge = reader.try_get_log_entries(next - 110..=next - 110).await.unwrap()[0].log_id;
            log.purge(purge).await.unwrap();
        }
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    for reader in readers {
        reader.await.unwrap();
    }
}
