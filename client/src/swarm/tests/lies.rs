//! Peers that send or say what is not so.

use super::*;

/// One corrupt peer and one good one, neither the seed. Gives the receiver when it has everything, the corrupt
/// peer, what it should have, and how the fetch ended.
async fn with_a_corrupt_peer(
    trust_anything: bool,
) -> (Node, Node, Vec<Vec<u8>>, Option<Result<(), TaskFailure>>) {
    let (m, bytes, seal) = model_of(12);
    let (bad, good) = (Node::start("bad", &m).await, Node::start("good", &m).await);
    bad.fill(&bytes, bad.all());
    good.fill(&bytes, good.all());
    bad.rot("model.bin");
    let options = Options {
        config: SwarmConfig {
            trust_anything,
            ..Default::default()
        },
        ..Default::default()
    };
    let b = Node::start_with("b", &m, options).await;
    let (peers_tx, peers) = watch::channel(vec![bad.peer(false)]);
    // Without verification and with a seal, the repair would heal the damage (and fetch it again, for ever).
    let (_s, seal_rx) = sealed((!trust_anything).then_some(seal));
    let (task, _) = b.fetch(&peers, &seal_rx);
    // First the bad one alone, so that it is surely asked.
    let seen = async {
        while b.bad.lock().is_empty() && b.artifact.have_count() == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, seen)
        .await
        .expect("the bad peer is asked");
    peers_tx.send_replace(vec![bad.peer(false), good.peer(false)]);
    if trust_anything {
        b.wait_for("everything", |x| x.have_count() == 12).await;
        return (b, bad, bytes, None);
    }
    let outcome = Some(finish(task).await);
    (b, bad, bytes, outcome)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_corrupt_peer_is_reported_and_left() {
    let (b, bad, bytes, outcome) = with_a_corrupt_peer(false).await;
    outcome.expect("it ends").unwrap();
    b.assert_equals(&bytes);
    let reports = b.bad.lock().clone();
    assert_eq!(reports.len(), 1, "{reports:?}");
    assert_eq!(reports[0].node_id, bad.node_id);
    assert!(reports[0].reason.contains("announced"), "{reports:?}");
    // A peer of which nothing was verified yet gets one block to prove itself.
    let (fetched, refetched) = b.counters.load();
    assert_eq!(refetched, u64::from(BLOCK), "what was damaged came again");
    assert_eq!(
        fetched - b.artifact.blocks().total_bytes(),
        u64::from(BLOCK),
        "bytes in vain"
    );
}

/// The checks of the test above are able to fail: without verification the damage gets in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_verification_the_corrupt_peer_gets_through() {
    let (b, bad, bytes, _) = with_a_corrupt_peer(true).await;
    assert!(
        !b.bad.lock().iter().any(|r| r.node_id == bad.node_id),
        "nobody noticed"
    );
    let damaged = b.all().any(|block| {
        let r = b.artifact.blocks().locate(block).unwrap();
        let want = &bytes[0][r.offset as usize..r.offset as usize + r.len as usize];
        b.artifact.read_block(block).is_ok_and(|got| got != want)
    });
    assert!(damaged, "wrong bytes are held");
    assert_ne!(
        b.artifact.seal_if_whole(),
        Some(seal_of(b.artifact.manifest(), &bytes)),
        "the seal would not hold"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lies_before_the_seal_are_repaired_at_the_seal() {
    let (m, bytes, seal) = model_of(12);
    let lies = model_bytes(&m, 99);
    let (liar, good, b) = (
        Node::start("liar", &m).await,
        Node::start("good", &m).await,
        Node::start("b", &m).await,
    );
    // The liar is consistent: it has other content, with matching digests.
    liar.fill(&lies, [0, 3, 4, 11]);
    good.fill(&bytes, good.all());
    let (peers_tx, peers) = watch::channel(vec![liar.peer(false)]);
    let (seal_tx, seal_rx) = sealed(None);
    let (task, _) = b.fetch(&peers, &seal_rx);
    b.wait_for("the lies", |x| x.have_count() == 4).await;
    peers_tx.send_replace(vec![liar.peer(false), good.peer(false)]);
    b.wait_for("everything", |x| x.have_count() == 12).await;
    assert!(b.artifact.seal_if_whole() != Some(seal));
    seal_tx.send_replace(Some(seal));
    finish(task).await.unwrap();
    b.assert_equals(&bytes);
    assert_eq!(b.artifact.seal_if_whole(), Some(seal));
    assert_eq!(
        b.counters.load(),
        (16 * u64::from(BLOCK), 4 * u64::from(BLOCK)),
        "the four blocks, again"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_seeds_word_beats_a_liar() {
    let (m, bytes, seal) = model_of(6);
    let lies = model_bytes(&m, 99);
    let (liar, seed, b) = (
        Node::start("liar", &m).await,
        Node::start("seed", &m).await,
        Node::start("b", &m).await,
    );
    liar.fill(&lies, liar.all());
    seed.fill(&bytes, seed.all());
    // The seed is known from the start, but has nothing to say yet where it is not connected: so connect it first.
    let (peers_tx, peers) = watch::channel(vec![seed.peer(true)]);
    let (_s, seal_rx) = sealed(None);
    let (task, cancel) = b.fetch(&peers, &seal_rx);
    b.wait_for("a block", |x| x.have_count() > 0).await;
    peers_tx.send_replace(vec![seed.peer(true), liar.peer(false)]);
    b.wait_for("everything", |x| x.have_count() == 6).await;
    b.assert_equals(&bytes);
    assert_eq!(b.artifact.seal_if_whole(), Some(seal));
    cancel.cancel();
    assert!(finish(task).await.unwrap_err().is_canceled());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_that_does_not_reproduce_the_seal_is_refused_until_a_right_one_comes() {
    let (m, bytes, seal) = model_of(5);
    let lies = model_bytes(&m, 99);
    let (liar, good, b) = (
        Node::start("liar", &m).await,
        Node::start("good", &m).await,
        Node::start("b", &m).await,
    );
    liar.fill(&lies, liar.all());
    let (peers_tx, peers) = watch::channel(vec![liar.peer(true)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, _) = b.fetch(&peers, &seal_rx);
    b.wait_for("the lies", |x| x.have_count() == 5).await;
    assert!(!task.is_finished(), "a wrong root is no success");
    good.fill(&bytes, good.all());
    peers_tx.send_replace(vec![liar.peer(true), good.peer(false)]);
    finish(task).await.unwrap();
    b.assert_equals(&bytes);
}

/// A block that was condemned and read again while a request for the old one was on its way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_another_block_by_now_is_declined() {
    let (m, bytes, _) = model_of(2);
    let (a, b) = (Node::start("a", &m).await, Node::start("b", &m).await);
    a.fill(&bytes, a.all());
    let link = b.swarm.inner.links.get(&a.peer(true)).await.unwrap();
    let (events, mut heard) = tokio::sync::mpsc::channel(8);
    let subscription = link.subscribe(&b.artifact, 1, events).unwrap();
    let budget = Arc::new(Semaphore::new(2));
    let mut ask = async |expected: &Digest| {
        // It is served from when it has been announced.
        let permit = budget.clone().acquire_owned().await.unwrap();
        link.request(subscription, (1, expected), BLOCK, false, permit)
            .unwrap();
        loop {
            let event = tokio::time::timeout(PATIENCE, heard.recv()).await.unwrap();
            match event.unwrap() {
                link::Event::Block { block, .. } => return Ok(block),
                link::Event::Declined { why, .. } => return Err(why),
                _ => {}
            }
        }
    };
    let now = a.artifact.digest(1).unwrap();
    while ask(&now).await.is_err() {
        tokio::task::yield_now().await;
    }
    let before = Algorithm::Blake3.digest(b"what it was before");
    assert_eq!(ask(&before).await, Err(chooser::Decline::NotHeld));
    assert_eq!(ask(&now).await, Ok(1));
}

struct PartOfFile {
    file: Arc<std::fs::File>,
    offset: u64,
    len: u32,
}

impl crate::transport::BlockSource for PartOfFile {
    fn open(&self) -> std::io::Result<(Arc<std::fs::File>, u64, u32)> {
        Ok((self.file.clone(), self.offset, self.len))
    }
}

/// Announces every block of `good` and serves it, except for the first one that it is ever asked for: that is `bad`.
async fn wrong_once(listener: TcpListener, hello: Arc<HelloConfig>, good: Vec<u8>) {
    use crate::transport::{Frame, NoBlocks, Room};
    use mooncake_proto::pb::peer::{self as pb, peer_message::Body};
    use prost::Message;
    use std::io::Write;
    let digests: Vec<u8> = good
        .chunks(BLOCK as usize)
        .flat_map(|block| *Algorithm::Blake3.digest(block).as_bytes())
        .collect();
    let in_file = |bytes: &[u8]| {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        Arc::new(file)
    };
    let bad = in_file(&vec![7; good.len()]);
    let good = in_file(&good);
    let mut is_wrong = true;
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let accepted = crate::transport::tcp::accept(stream, &hello, Arc::default(), None).await;
        let (mut sender, mut receiver) = accepted.map(|c| (c.sender, c.receiver)).unwrap();
        while let Ok(Frame::Control(bytes)) = receiver.receive(&NoBlocks).await {
            let answer = match pb::PeerMessage::decode(bytes).unwrap().body {
                Some(Body::Subscribe(s)) => {
                    let status = pb::Status {
                        subscription: s.subscription,
                        state: pb::HoldingState::Partial.into(),
                        own_root: Default::default(),
                    };
                    let message = pb::PeerMessage {
                        body: Some(Body::Status(status)),
                    };
                    let _ = sender.send_control(message.encode_to_vec().into()).await;
                    let run = pb::Run {
                        first: 0,
                        digests: digests.clone().into(),
                    };
                    Body::Have(pb::Have {
                        subscription: s.subscription,
                        runs: vec![run],
                    })
                }
                Some(Body::Request(r)) => {
                    let file = if std::mem::take(&mut is_wrong) {
                        &bad
                    } else {
                        &good
                    };
                    let block = PartOfFile {
                        file: file.clone(),
                        offset: u64::from(r.block) * u64::from(BLOCK),
                        len: BLOCK,
                    };
                    let _ = sender
                        .send_block(r.request, Box::new(block), Room::default())
                        .await;
                    continue;
                }
                _ => continue,
            };
            let message = pb::PeerMessage { body: Some(answer) };
            let _ = sender.send_control(message.encode_to_vec().into()).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seed_may_be_wrong_once_before_the_seal_and_nobody_else() {
    for (seed, known, reports) in [(true, false, 0), (false, false, 1), (true, true, 1)] {
        let (m, bytes, seal) = model_of(4);
        let options = Options {
            config: SwarmConfig {
                penalty: Duration::from_millis(1),
                ..Default::default()
            },
            ..Default::default()
        };
        let b = Node::start_with("b", &m, options).await;
        let (listener, peer, hello) = b.impostor("a", seed).await;
        let serving = tokio::spawn(wrong_once(listener, hello, bytes[0].clone()));
        let (_p, peers) = watch::channel(vec![peer]);
        let (_s, seal_rx) = sealed(known.then_some(seal));
        let (task, cancel) = b.fetch(&peers, &seal_rx);
        b.wait_for("everything", |x| x.have_count() == 4).await;
        assert_eq!(b.bad.lock().len(), reports, "seed: {seed}, sealed: {known}");
        b.assert_equals(&bytes);
        cancel.cancel();
        let _ = finish(task).await;
        serving.abort();
    }
}
