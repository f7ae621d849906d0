//! Whole transfers: from the seed, through relays, before the seal.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_whole_transfer() {
    let (m, bytes, seal) = small_model();
    let (a, b) = (Node::start("a", &m).await, Node::start("b", &m).await);
    a.fill(&bytes, a.all());
    let (_peers, peers) = watch::channel(vec![a.peer(true), b.peer(false)]);
    let (_seal, seal_rx) = watch::channel(Some(seal));
    finish(b.fetch(&peers, &seal_rx).0).await.unwrap();
    b.assert_equals(&bytes);
    assert_eq!(b.artifact.seal_if_whole(), Some(seal));
    assert_eq!(b.counters.load(), (m.total_size_bytes, 0), "each byte came once");
    // A block is counted when the sender is told that it went out, which may be after it arrived.
    let uploaded = || a.swarm.stats().uploaded_bytes.load(Ordering::Relaxed);
    let counted = async {
        while uploaded() < m.total_size_bytes {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, counted).await.unwrap();
    assert_eq!(uploaded(), m.total_size_bytes);
    assert!(b.bad.lock().is_empty());
    // A second fetch finds nothing to do.
    finish(b.fetch(&peers, &seal_rx).0).await.unwrap();
    assert_eq!(b.counters.load().0, m.total_size_bytes);
    // Published, it is served as well.
    let (artifact, to_publish) = (b.artifact.clone(), seal);
    tokio::task::spawn_blocking(move || artifact.publish(&to_publish).unwrap())
        .await
        .unwrap();
    let c = Node::start("c", &m).await;
    let (_peers, peers) = watch::channel(vec![b.peer(false)]);
    finish(c.fetch(&peers, &seal_rx).0).await.unwrap();
    c.assert_equals(&bytes);
    drop((b.store, b.dir));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relay_to_a_node_that_never_sees_the_seed() {
    let (m, bytes, seal) = small_model();
    let (a, b, c) = (
        Node::start("a", &m).await,
        Node::start("b", &m).await,
        Node::start("c", &m).await,
    );
    let (_p, from_a) = watch::channel(vec![a.peer(true)]);
    let (_q, from_b) = watch::channel(vec![b.peer(false)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (at_c, _) = c.fetch(&from_b, &seal_rx);
    let (at_b, _) = b.fetch(&from_a, &seal_rx);
    // One block at the seed reaches the end of the chain while the seed has nothing else.
    a.fill(&bytes, [5]);
    c.wait_for("the first block", |x| x.has(5)).await;
    assert_eq!(c.artifact.have_count(), 1);
    a.fill(&bytes, a.all());
    finish(at_b).await.unwrap();
    finish(at_c).await.unwrap();
    c.assert_equals(&bytes);
    let (out, blocks) = (
        a.swarm.stats().uploaded_blocks.load(Ordering::Relaxed),
        u64::from(a.artifact.blocks().len()),
    );
    assert!(out < 2 * blocks, "one copy, not two: {out} of {blocks}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replication_goes_on_while_the_seed_receives_and_waits_for_the_seal() {
    let (m, bytes, seal) = model_of(40);
    let a = Node::start("a", &m).await;
    let (b, c) = (Node::start("b", &m).await, Node::start("c", &m).await);
    let (_p, peers) = watch::channel(vec![a.peer(true), b.peer(false), c.peer(false)]);
    let (seal_tx, seal_rx) = sealed(None);
    let (at_b, _) = b.fetch(&peers, &seal_rx);
    let (at_c, _) = c.fetch(&peers, &seal_rx);
    for block in 0..40 {
        a.fill(&bytes, [block]);
        if block % 8 == 0 {
            b.wait_for("an early block", |x| x.has(block)).await;
            c.wait_for("an early block", |x| x.has(block)).await;
            assert!(a.artifact.have_count() < 40 && !at_b.is_finished());
        }
    }
    b.wait_for("everything", |x| x.have_count() == 40).await;
    c.wait_for("everything", |x| x.have_count() == 40).await;
    // Whole, but nothing is proven before the seal.
    assert!(!at_b.is_finished() && !at_c.is_finished());
    seal_tx.send_replace(Some(seal));
    finish(at_b).await.unwrap();
    finish(at_c).await.unwrap();
    b.assert_equals(&bytes);
    c.assert_equals(&bytes);
    let out = a.swarm.stats().uploaded_blocks.load(Ordering::Relaxed);
    // The simulator counts copies, in virtual time; here a node that stands still may cost some.
    assert!(
        out <= 60,
        "{out} blocks left the seed, 40 are needed, 80 are two copies"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn six_nodes_and_one_copy_out_of_the_seed() {
    let (m, bytes, seal) = model_of(100);
    let a = Node::start("a", &m).await;
    a.fill(&bytes, a.all());
    let mut nodes = Vec::new();
    for i in 0..6 {
        nodes.push(Node::start(&format!("n{i}"), &m).await);
    }
    let all: Vec<_> = std::iter::once(a.peer(true))
        .chain(nodes.iter().map(|n| n.peer(false)))
        .collect();
    let (_p, peers) = watch::channel(all);
    let (_s, seal_rx) = sealed(Some(seal));
    let tasks: Vec<_> = nodes.iter().map(|n| n.fetch(&peers, &seal_rx).0).collect();
    for task in tasks {
        finish(task).await.unwrap();
    }
    for n in &nodes {
        n.assert_equals(&bytes);
        let (fetched, refetched) = n.counters.load();
        // What the end of a transfer asks for twice was not lost.
        assert_eq!(refetched, 0, "{}", n.node_id);
        assert_eq!(fetched - n.counters.duplicate(), m.total_size_bytes);
    }
    let out = a.swarm.stats().uploaded_blocks.load(Ordering::Relaxed);
    assert!(
        out <= 200,
        "{out} blocks left the seed, 100 are needed, 600 are six copies"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_may_get_its_order_before_its_peer_does() {
    let (m, bytes, seal) = model_of(4);
    let (a, b) = (Node::start("a", &m).await, Node::start("b", &m).await);
    // The peer has not heard of the model yet.
    let (store, model) = (a.store.clone(), m.model.clone());
    tokio::task::spawn_blocking(move || store.remove_staging(&model).unwrap())
        .await
        .unwrap();
    let (_p, peers) = watch::channel(vec![a.peer(true)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, _) = b.fetch(&peers, &seal_rx);
    let connected = async {
        while a.swarm.inner.server.connected() == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, connected).await.unwrap();
    let (store, manifest) = (a.store.clone(), m.clone());
    let artifact = tokio::task::spawn_blocking(move || {
        let model = manifest.model.clone();
        store.begin(NewArtifact {
            model,
            generation: 1,
            manifest,
            block_size: BLOCK,
            algorithm: Algorithm::Blake3,
        })
    });
    let artifact = artifact.await.unwrap().unwrap();
    let a = Node { artifact, ..a };
    a.fill(&bytes, a.all());
    finish(task).await.unwrap();
    b.assert_equals(&bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_empty_model_waits_for_its_seal_only() {
    let m = manifest(&[("empty", 0)]);
    let seal = seal_of(&m, &[vec![]]);
    let b = Node::start("b", &m).await;
    let (_p, peers) = watch::channel(vec![]);
    let (seal_tx, seal_rx) = sealed(None);
    let (task, _) = b.fetch(&peers, &seal_rx);
    seal_tx.send_replace(Some(seal));
    finish(task).await.unwrap();
}
