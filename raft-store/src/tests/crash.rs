//! `kill -9` in a write loop, and a disk that fills up.

use std::io::{BufRead as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use openraft::RaftLogReader as _;
use tokio::sync::mpsc;

use super::*;

/// How often the child is killed. Each round takes a fraction of a second.
const ROUNDS: u64 = 40;

/// What the child said to its standard output before it died, in order.
#[derive(Debug, Default)]
struct Heard {
    /// Acknowledged and not taken back: index → term.
    acknowledged: BTreeMap<u64, u64>,
    vote: u64,
    fatal: bool,
}

impl Heard {
    fn take(&mut self, line: &str) {
        let mut words = line.split(' ');
        let (word, numbers) = (
            words.next().unwrap(),
            words.map_while(|word| word.parse().ok()).collect::<Vec<u64>>(),
        );
        match (word, numbers.as_slice()) {
            // Acknowledgements come in order: never before one that is missing.
            ("ACK", [term, index]) => {
                if let Some((last, _)) = self.acknowledged.last_key_value() {
                    assert_eq!(*last + 1, *index, "acknowledged out of order");
                }
                self.acknowledged.insert(*index, *term);
            }
            // Said before it is done.
            ("TRUNCATE", [from]) => drop(self.acknowledged.split_off(from)),
            ("VOTE", [term]) => {
                assert!(*term > self.vote);
                self.vote = *term;
            }
            ("FATAL", _) => self.fatal = true,
            _ => {}
        }
    }
}

fn say(line: std::fmt::Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    // One write, so that a kill cannot tear it, on a line of its own (the test harness writes too); nobody
    // listening means the parent is gone.
    if out
        .write_all(format!("\n{line}\n").as_bytes())
        .and_then(|()| out.flush())
        .is_err()
    {
        std::process::exit(3);
    }
}

/// The child: opens, checks, and writes until it is killed. Every life is a new term.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child_writes_until_killed() {
    let Some((folder, mode)) = child_task() else {
        return;
    };
    let store = Store::open_with(&folder, options(), mode == "drop-sync").unwrap();
    let mut log = store.take_log_store().unwrap();
    let mut machine = store.state_machine(Chain::default()).unwrap();
    let mut reader = log.get_log_reader().await;
    let term = reader
        .read_vote()
        .await
        .unwrap()
        .map_or(0, |vote| vote.leader_id.term)
        + 1;
    log.save_vote(&Vote::new(term, 1)).await.unwrap();
    say(format_args!("VOTE {term}"));

    // Acknowledgements are reported by a task of their own, so that appends pile up and are committed in groups.
    let (flushed, mut wait) = mpsc::channel::<(u64, Vec<u64>, Flushed)>(64);
    let reported = Arc::new(AtomicU64::new(0));
    let reports = Arc::clone(&reported);
    let mut sent = 0;
    tokio::spawn(async move {
        while let Some((term, indexes, done)) = wait.recv().await {
            if !matches!(done.await, Ok(Ok(()))) {
                return;
            }
            for index in indexes {
                say(format_args!("ACK {term} {index}"));
            }
            reports.fetch_add(1, Ordering::SeqCst);
        }
    });
    let mut random = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64 | 1;
    let mut next_random = move |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    loop {
        let start = log
            .get_log_state()
            .await
            .unwrap()
            .last_log_id
            .map_or(0, |id| id.index() + 1);
        let end = start + 1 + next_random(5);
        let (done, result) = flush_signal();
        let appended = log
            .append(
                (start..end).map(|index| entry(term, index)),
                IOFlushed::signal(done),
            )
            .await;
        let failed = appended.is_err() || store.fatal().get().is_some();
        if failed
            || flushed
                .send((term, (start..end).collect(), result))
                .await
                .is_err()
        {
            // A disk that is full: nothing may be acknowledged from here on.
            assert!(append(&mut log, vec![entry(term, end)]).await.is_err());
            assert!(log.save_vote(&Vote::new(term + 1, 1)).await.is_err());
            store.fatal().wait().await;
            say(format_args!("FATAL"));
            std::process::exit(0);
        }
        sent += 1;
        let committed = machine
            .applied_state()
            .await
            .unwrap()
            .0
            .map_or(0, |id| id.index() + 1);
        if mode == "fill" {
            continue;
        }
        match next_random(40) {
            // A follower's tail is replaced by what another leader wrote: only what is not committed.
            0 if end > committed + 3 => {
                append(&mut log, vec![entry(term, end)]).await.unwrap();
                // All acknowledgements so far have been said, then the withdrawal, then it happens.
                while reported.load(Ordering::SeqCst) < sent {
                    tokio::task::yield_now().await;
                }
                let from = end - 2;
                say(format_args!("TRUNCATE {from}"));
                let last = reader.try_get_log_entries(from - 1..from).await.unwrap()[0].log_id;
                log.truncate_after(Some(last)).await.unwrap();
            }
            // Entries are committed and applied, a snapshot is taken, and most of the log it covers is purged.
            1 | 2 if end > committed + 10 => {
                let upto = end - 5;
                let entries = reader.try_get_log_entries(committed..upto).await.unwrap();
                let last = entries.last().unwrap().log_id;
                log.save_committed(Some(last)).await.unwrap();
                apply(&mut machine, entries).await;
                if next_random(2) == 0 {
                    snapshot(&mut machine).await;
                    let purge = last.index().saturating_sub(3);
                    if let Some(entry) = reader.try_get_log_entries(purge..=purge).await.unwrap().first() {
                        log.purge(entry.log_id).await.unwrap();
                    }
                }
            }
            _ => {}
        }
    }
}

/// What is on the disk must hold all that was acknowledged, in order, each entry the right one.
async fn check(store: &Store, log: &mut LogStore, heard: &Heard) -> Result<(), String> {
    let mut reader = log.get_log_reader().await;
    let vote = reader
        .read_vote()
        .await
        .unwrap()
        .map_or(0, |vote| vote.leader_id.term);
    if vote < heard.vote {
        return Err(format!("vote {vote} < {}", heard.vote));
    }
    let entries = reader.try_get_log_entries(..).await.unwrap();
    let mut last = log.get_log_state().await.unwrap().last_purged_log_id;
    for entry in &entries {
        assert_right(entry);
        if let Some(last) = last {
            assert_eq!(entry.log_id.index(), last.index() + 1);
            assert!(entry.log_id > last);
        }
        last = Some(entry.log_id);
    }
    let found: BTreeMap<u64, u64> = entries
        .iter()
        .map(|entry| (entry.log_id.index(), entry.log_id.committed_leader_id().term))
        .collect();
    let purged = log
        .get_log_state()
        .await
        .unwrap()
        .last_purged_log_id
        .map_or(0, |id| id.index() + 1);
    for (index, term) in heard.acknowledged.range(purged..) {
        if found.get(index) != Some(term) {
            return Err(format!(
                "entry {index} of term {term} was acknowledged, found term {:?}",
                found.get(index)
            ));
        }
    }
    // Snapshot and log fit together.
    let machine = store.state_machine(Chain::default()).unwrap();
    let covered = machine
        .reader()
        .read()
        .last_applied
        .map_or(0, |id| id.index() + 1);
    assert!(covered >= purged);
    assert_eq!(machine.reader().read().count, covered);
    Ok(())
}

/// Starts the child, lets it acknowledge a number of entries, kills it, and hears it to the end.
fn kill_after(folder: &Path, mode: &str, acknowledgements: u64, heard: &mut Heard) {
    let (mut process, output) = child("tests::crash::child_writes_until_killed", folder, mode);
    let mut count = 0;
    let mut killed = false;
    for line in output.lines() {
        let line = line.unwrap();
        count += u64::from(line.starts_with("ACK "));
        heard.take(&line);
        if count >= acknowledgements && !killed {
            process.kill().unwrap();
            killed = true;
        }
    }
    let status = process.wait().unwrap();
    assert!(
        killed,
        "the child ended by itself after {count} acknowledgements: {status}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_in_a_write_loop_nothing_acknowledged_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let mut heard = Heard::default();
    for round in 0..ROUNDS {
        kill_after(folder.path(), "", 1 + (round * 53) % 400, &mut heard);
        let store = open(folder.path());
        let mut log = store.take_log_store().unwrap();
        check(&store, &mut log, &heard)
            .await
            .unwrap_or_else(|what| panic!("round {round}: {what}"));
        // What was written and not heard of may be there; the next life goes on behind it.
        let last = log.get_log_state().await.unwrap().last_log_id;
        let mut reader = log.get_log_reader().await;
        for entry in reader.try_get_log_entries(..).await.unwrap() {
            heard
                .acknowledged
                .insert(entry.log_id.index(), entry.log_id.committed_leader_id().term);
        }
        if let Some(last) = last {
            heard.acknowledged.split_off(&(last.index() + 1));
        }
        drop(reader);
        close(store, log).await;
    }
    assert!(heard.vote >= ROUNDS, "every life voted: {}", heard.vote);
    assert!(
        heard.acknowledged.len() > 1000,
        "{} entries in {ROUNDS} rounds",
        heard.acknowledged.len()
    );
}

/// The proof that the checks bite: a store that says "durable" without writing is found out, by the witness at open,
/// and, were there no witness, by the check of the acknowledged entries.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_drops_its_syncs_is_found_out() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path());
    store.close().await.unwrap();
    let mut heard = Heard::default();
    kill_after(folder.path(), "drop-sync", 50, &mut heard);
    let message = refused(folder.path());
    assert!(message.contains("were acknowledged"), "{message}");

    crate::database::reset_witness(folder.path());
    let store = open(folder.path());
    let mut log = store.take_log_store().unwrap();
    let found = check(&store, &mut log, &heard).await;
    assert!(found.is_err(), "dropped syncs went unnoticed");
}

/// Writes fail for real (a limit on the file size): nothing is acknowledged after the first failure, the hook
/// fires, and all that was acknowledged before is there.
#[tokio::test(flavor = "multi_thread")]
async fn a_failing_disk_stops_the_store_and_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut shell = Process::new("sh");
    shell
        .args(["-c", "trap '' XFSZ; ulimit -f 1000; exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap());
    let (mut process, output) = spawn(
        shell,
        "tests::crash::child_writes_until_killed",
        folder.path(),
        "fill",
    );
    let mut heard = Heard::default();
    for line in output.lines() {
        heard.take(&line.unwrap());
    }
    let status = process.wait().unwrap();
    assert!(status.success(), "{status}");
    assert!(heard.fatal, "the failure was never reported");
    assert!(heard.acknowledged.len() > 100);
    let store = open(folder.path());
    let mut log = store.take_log_store().unwrap();
    check(&store, &mut log, &heard).await.unwrap();
}
