//! Peers that go, come back, have nothing to say, or are strangers.

use super::*;

/// Greets one puller, says that it holds all of `seal`, answers pings and nothing else; tells when it was asked
/// for its digest list.
async fn mute(listener: &TcpListener, hello: Arc<HelloConfig>, seal: Seal, asked: Arc<tokio::sync::Notify>) {
    use crate::transport::{Frame, NoBlocks};
    use mooncake_proto::pb::peer::{self as pb, peer_message::Body};
    use prost::Message;
    let (stream, _) = listener.accept().await.unwrap();
    let accepted = crate::transport::tcp::accept(stream, &hello, Arc::default(), None).await;
    let (mut sender, mut receiver) = accepted.map(|c| (c.sender, c.receiver)).unwrap();
    while let Ok(Frame::Control(bytes)) = receiver.receive(&NoBlocks).await {
        let answer = match pb::PeerMessage::decode(bytes).unwrap().body {
            Some(Body::Subscribe(s)) => Body::Status(pb::Status {
                subscription: s.subscription,
                state: pb::HoldingState::Whole.into(),
                own_root: seal.root.as_bytes().to_vec().into(),
            }),
            Some(Body::Ping(p)) => Body::Pong(pb::Pong { sequence: p.sequence }),
            Some(Body::FetchDigests(_)) => {
                asked.notify_one();
                continue;
            }
            _ => continue,
        };
        let message = pb::PeerMessage { body: Some(answer) };
        if sender.send_control(message.encode_to_vec().into()).await.is_err() {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_never_gives_its_list_is_passed_over() {
    let (m, bytes, seal) = model_of(5);
    let lies = model_bytes(&m, 99);
    let options = Options {
        config: SwarmConfig {
            list_timeout: Duration::from_millis(50),
            ..Default::default()
        },
        ..Default::default()
    };
    let (good, b) = (
        Node::start("good", &m).await,
        Node::start_with("b", &m, options).await,
    );
    good.fill(&bytes, good.all());
    // Whole, and wrong: only the list says where.
    b.fill(&lies, b.all());
    let (listener, silent, hello) = b.impostor("mute", false).await;
    let asked = Arc::new(tokio::sync::Notify::new());
    let serving = tokio::spawn({
        let asked = asked.clone();
        async move { mute(&listener, hello, seal, asked).await }
    });
    let (peers_tx, peers) = watch::channel(vec![silent.clone()]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, _) = b.fetch(&peers, &seal_rx);
    tokio::time::timeout(PATIENCE, asked.notified()).await.unwrap();
    peers_tx.send_replace(vec![silent, good.peer(false)]);
    finish(task).await.unwrap();
    b.assert_equals(&bytes);
    serving.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_killed_in_the_middle_is_replaced() {
    let (m, bytes, seal) = model_of(60);
    let (mut a, c, b) = (
        Node::start("a", &m).await,
        Node::start("c", &m).await,
        Node::start("b", &m).await,
    );
    a.fill(&bytes, 0..30);
    c.fill(&bytes, 30..60);
    let (_p, peers) = watch::channel(vec![a.peer(true), c.peer(false)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, _) = b.fetch(&peers, &seal_rx);
    b.wait_for("the middle", |x| x.have_count() >= 20).await;
    a.kill().await;
    c.fill(&bytes, 0..30);
    finish(task).await.unwrap();
    b.assert_equals(&bytes);
    assert!(b.bad.lock().is_empty(), "to die is not to be bad");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_comes_back_is_dialled_again() {
    let (m, bytes, seal) = model_of(20);
    let (mut a, b) = (Node::start("a", &m).await, Node::start("b", &m).await);
    a.fill(&bytes, 0..10);
    let (_p, peers) = watch::channel(vec![a.peer(true)]);
    let (_s, seal_rx) = sealed(Some(seal));
    let (task, _) = b.fetch(&peers, &seal_rx);
    b.wait_for("the first half", |x| x.have_count() == 10).await;
    a.kill().await;
    a.fill(&bytes, 10..20);
    let listener = TcpListener::bind(a.address).await.unwrap();
    let (server, token) = (a.swarm.clone(), CancellationToken::new());
    tokio::spawn(async move { server.serve(listener, token).await });
    finish(task).await.unwrap();
    b.assert_equals(&bytes);
    assert_eq!(b.counters.load(), (m.total_size_bytes, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_are_refused() {
    let (m, bytes, _) = model_of(2);
    let a = Node::start("a", &m).await;
    a.fill(&bytes, a.all());
    let try_with = async |options: Options| {
        let x = Node::start_with("x", &m, options).await;
        let hello = x.swarm.inner.hello.clone();
        let tcp = Tcp::new(hello);
        let dialled = tcp.connect(&a.peer(true), Arc::default()).await;
        dialled.expect_err("must be refused").to_string()
    };
    let e = try_with(Options {
        secret: None,
        ..Default::default()
    })
    .await;
    assert!(e.contains("secret_required"), "{e}");
    let e = try_with(Options {
        secret: Some("another secret than that"),
        ..Default::default()
    })
    .await;
    assert!(e.contains("wrong_secret"), "{e}");
    let e = try_with(Options {
        cluster: "other",
        ..Default::default()
    })
    .await;
    assert!(e.contains("wrong_cluster"), "{e}");
    // Another node than the one named, and oneself under another name.
    let b = Node::start("b", &m).await;
    let tcp = Tcp::new(b.swarm.inner.hello.clone());
    let stale = PeerAddress {
        node_id: "gone:25001".into(),
        ..a.peer(true)
    };
    let e = tcp
        .connect(&stale, Arc::default())
        .await
        .expect_err("another node")
        .to_string();
    assert!(e.contains("a:25001") && e.contains("out of date"), "{e}");
    let e = tcp
        .connect(&b.peer(true), Arc::default())
        .await
        .expect_err("itself")
        .to_string();
    assert!(e.contains("b:25001"), "{e}");
}

/// It answers pings, so that the connection lives, and no request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_abandoned_link_owed_is_free_and_nobody_gets_it_again() {
    let (m, _, seal) = model_of(2);
    let b = Node::start("b", &m).await;
    let (listener, silent, hello) = b.impostor("mute", false).await;
    tokio::spawn(async move {
        loop {
            mute(&listener, hello.clone(), seal, Arc::default()).await;
        }
    });
    let link = b.swarm.inner.links.get(&silent).await.unwrap();
    let (events, mut heard) = tokio::sync::mpsc::channel(8);
    let subscription = link.subscribe(&b.artifact, 1, events.clone()).unwrap();
    link.subscribe(&b.artifact, 2, events).unwrap();
    let budget = Arc::new(Semaphore::new(1));
    let permit = budget.clone().try_acquire_owned().unwrap();
    let any = Algorithm::Blake3.digest(b"");
    link.request(subscription, (0, &any), BLOCK, false, permit)
        .unwrap();
    let again = b.swarm.inner.links.get(&silent).await.unwrap();
    assert!(Arc::ptr_eq(&link, &again), "a link is shared while it lives");
    assert_eq!(budget.available_permits(), 0);

    link.abandon("it owes");
    assert_eq!(budget.available_permits(), 1);
    let again = b.swarm.inner.links.get(&silent).await.unwrap();
    assert!(!Arc::ptr_eq(&link, &again));
    let mut down = Vec::new();
    let told = async {
        while down.len() < 2 {
            if let link::Event::Down { peer, why } = heard.recv().await.unwrap() {
                assert_eq!(why, "it owes");
                down.push(peer);
            }
        }
    };
    tokio::time::timeout(PATIENCE, told)
        .await
        .expect("whoever shares it is told");
    down.sort_unstable();
    assert_eq!(down, [1, 2]);
}

/// Both have the library and no device.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_is_shared_for_as_long_as_no_better_one_can_be_had() {
    use crate::transport::{rdma, tcp};
    let (m, _, _) = model_of(1);
    let node = Node::start("b", &m).await;
    let fabric = rdma::without_device();
    let (listener, peer, theirs) = node.impostor("theirs", false).await;
    let feature = |hello: &HelloConfig| {
        Arc::new(HelloConfig {
            features: mooncake_proto::hello::FEATURE_RDMA,
            ..hello.clone()
        })
    };
    let (ours, theirs) = (feature(&node.swarm.inner.hello), feature(&theirs));
    let serving = fabric.clone();
    tokio::spawn(async move {
        let mut open = Vec::new();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            open.push(
                tcp::accept(stream, &theirs, Arc::default(), Some(&serving))
                    .await
                    .unwrap(),
            );
        }
    });
    let transport: Arc<dyn crate::transport::Transport> =
        Arc::new(tcp::Tcp::with_rdma(ours, Some(fabric.clone())));
    let links = link::Links::new(vec![transport], Some(fabric), Arc::default());
    let link = links.get(&peer).await.unwrap();
    tokio::time::sleep(rdma::rests::FIRST + Duration::from_millis(200)).await;
    let again = links.get(&peer).await.unwrap();
    assert!(Arc::ptr_eq(&link, &again));
}
