//! What is bounded, and how a fetch ends.

use super::*;
use crate::rate::{LEAST, Rate};
use std::time::Instant;

/// What a fetch has asked for last and not waited for, others wait for, however it ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_small_models_keep_to_the_download_limit() {
    let (m, bytes, seal) = model_of(1);
    let rate = Arc::new(Rate::new(Some(LEAST)));
    let under_limit = || Options {
        config: SwarmConfig {
            download: rate.clone(),
            ..Default::default()
        },
        ..Default::default()
    };
    let a = Node::start("a", &m).await;
    a.fill(&bytes, a.all());
    let (_p, peers) = watch::channel(vec![a.peer(true)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let mut nodes = Vec::new();
    for i in 0..4 {
        nodes.push(Node::start_with(&format!("n{i}"), &m, under_limit()).await);
    }
    rate.wait(LEAST.burst_bytes()).await;
    let began = Instant::now();
    for node in &nodes {
        finish(node.fetch(&peers, &seal_rx).0).await.unwrap();
    }
    // The last one's block is not waited for yet.
    let least = Duration::from_secs_f64(3.0 * f64::from(BLOCK) / LEAST.0 as f64);
    assert!(began.elapsed() >= least.mul_f64(0.99), "{:?}", began.elapsed());
    assert!(rate.is_owed());

    // Canceled while it waits for what it has.
    let (m, bytes, seal) = model_of(12);
    let (a, b) = (
        Node::start("a", &m).await,
        Node::start_with("b", &m, under_limit()).await,
    );
    a.fill(&bytes, a.all());
    let (_p, peers) = watch::channel(vec![a.peer(true)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, cancel) = b.fetch(&peers, &seal_rx);
    b.wait_for("a block", |x| x.have_count() > 0).await;
    cancel.cancel();
    assert!(finish(task).await.unwrap_err().is_canceled());
    assert!(rate.is_owed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uploads_and_buffers_are_bounded() {
    let (m, bytes, seal) = model_of(160);
    let config = SwarmConfig {
        max_uploads: 1,
        buffer_bytes: 8 << 20,
        ..Default::default()
    };
    let a = Node::start_with(
        "a",
        &m,
        Options {
            config: config.clone(),
            ..Default::default()
        },
    )
    .await;
    a.fill(&bytes, a.all());
    let mut nodes = Vec::new();
    for i in 0..3 {
        let options = Options {
            config: config.clone(),
            ..Default::default()
        };
        nodes.push(Node::start_with(&format!("n{i}"), &m, options).await);
    }
    let (_p, peers) = watch::channel(vec![a.peer(false)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let tasks: Vec<_> = nodes.iter().map(|n| n.fetch(&peers, &seal_rx).0).collect();
    let whole = (8 << 20) / BUDGET_UNIT_BYTES as usize;
    for task in tasks {
        finish(task).await.unwrap();
    }
    assert_eq!(a.swarm.stats().uploads_peak.load(Ordering::Relaxed), 1);
    for n in &nodes {
        n.assert_equals(&bytes);
        // All that was reserved came back; more than the budget cannot be reserved (a semaphore).
        assert_eq!(n.swarm.inner.budget.available_permits(), whole);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_budget_that_others_hold_delays_and_does_not_stop() {
    let (m, bytes, seal) = model_of(4);
    let (a, b) = (Node::start("a", &m).await, Node::start("b", &m).await);
    a.fill(&bytes, a.all());
    let budget = b.swarm.inner.budget.clone();
    let held = budget
        .clone()
        .acquire_many_owned(budget.available_permits() as u32)
        .await
        .unwrap();
    let (_p, peers) = watch::channel(vec![a.peer(true)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, _) = b.fetch(&peers, &seal_rx);
    // It is connected (the server knows it), and asks for nothing.
    let connected = async {
        while a.swarm.inner.server.connected() == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, connected).await.unwrap();
    assert_eq!(b.counters.load().0, 0);
    drop(held);
    finish(task).await.unwrap();
    b.assert_equals(&bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_reasons_end_a_fetch() {
    let (m, _, seal) = model_of(2);
    let b = Node::start("b", &m).await;
    let (_p, peers) = watch::channel(vec![]);
    // A seal that this order cannot reproduce.
    let (_s, wrong) = sealed(Some(Seal {
        block_size_bytes: 2 * BLOCK,
        ..seal
    }));
    let e = finish(b.fetch(&peers, &wrong).0).await.unwrap_err();
    assert_eq!((e.code.as_str(), e.retryable), ("seal_mismatch", false), "{e}");
    // Staging that goes away.
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, _) = b.fetch(&peers, &seal_rx);
    let (store, model) = (b.store.clone(), m.model.clone());
    tokio::task::spawn_blocking(move || store.remove_staging(&model).unwrap())
        .await
        .unwrap();
    let e = finish(task).await.unwrap_err();
    assert_eq!((e.code.as_str(), e.retryable), ("staging_closed", true), "{e}");
}

/// A write that waits for the journal is under way when the fetch is canceled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_written_after_a_fetch_has_returned() {
    let (m, bytes, seal) = model_of(12);
    let a = Node::start("a", &m).await;
    a.fill(&bytes, a.all());
    // Room for two blocks that are not journaled.
    let b = Node::start_with_store("b", &m, Options::default(), |config| {
        config.unjournaled_limit_bytes = 2 * u64::from(BLOCK);
    })
    .await;
    let journal = HeldJournal::of(&b.artifact);
    let (_p, peers) = watch::channel(vec![a.peer(true)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, cancel) = b.fetch(&peers, &seal_rx);
    b.wait_for("what there is room for", |x| x.have_count() == 2)
        .await;
    // The third one is in the store, and waits.
    writers_wait(&b.store, true).await;
    cancel.cancel();
    // On its own task it would return at once, if it did not wait.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(!task.is_finished(), "it has returned while a write is under way");
    journal.release();
    assert!(finish(task).await.unwrap_err().is_canceled());
    let held = b.artifact.have_count();
    assert_eq!(b.store.waiting_writers(), 0);
    b.artifact.flush().unwrap();
    assert_eq!(b.artifact.have_count(), held);
}

/// As above, but the write that hangs outlasts what is waited for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_written_after_a_fetch_has_given_up_waiting_does_not_count() {
    let (m, bytes, seal) = model_of(12);
    let a = Node::start("a", &m).await;
    a.fill(&bytes, a.all());
    let options = Options {
        config: SwarmConfig {
            drain_timeout: Duration::from_millis(20),
            ..Default::default()
        },
        ..Default::default()
    };
    let b = Node::start_with_store("b", &m, options, |config| {
        config.unjournaled_limit_bytes = u64::from(BLOCK);
    })
    .await;
    let journal = HeldJournal::of(&b.artifact);
    let (_p, peers) = watch::channel(vec![a.peer(true)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, cancel) = b.fetch(&peers, &seal_rx);
    writers_wait(&b.store, true).await;
    cancel.cancel();
    assert!(finish(task).await.unwrap_err().is_canceled());
    assert!(b.artifact.closed().is_some(), "nothing counts any more");
    let counted = b.artifact.have_count();
    journal.release();
    // Another attempt takes another handle, once nobody writes through the old one.
    let new = NewArtifact {
        model: m.model.clone(),
        generation: 1,
        manifest: m.clone(),
        block_size: BLOCK,
        algorithm: Algorithm::Blake3,
    };
    let store = b.store.clone();
    let again = tokio::task::spawn_blocking(move || store.begin(new).unwrap())
        .await
        .unwrap();
    assert!(!Arc::ptr_eq(&again, &b.artifact) && again.closed().is_none());
    assert_eq!(b.artifact.have_count(), counted);
    let b = Node { artifact: again, ..b };
    finish(b.fetch(&peers, &seal_rx).0).await.unwrap();
    b.assert_equals(&bytes);
}
