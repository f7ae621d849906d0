//! Several connections to one peer.

use super::*;
use crate::{
    swarm::{
        chooser::Decline,
        link::{Event, Link},
    },
    transport::{Frame, NoBlocks},
};
use mooncake_proto::pb::peer::{self as pb, peer_message::Body};
use prost::Message;
use tokio::sync::{broadcast, mpsc};

/// What a peer that a test plays does with requests on all connections but the first one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Further {
    /// Nothing.
    Silent,
    /// Says that it has not what is asked for.
    NotHeld,
}

/// Says on every connection that it has everything, answers no request on the first one, and closes the others when told.
async fn play(
    listener: TcpListener,
    hello: Arc<HelloConfig>,
    further: Further,
    close: broadcast::Sender<()>,
) {
    for connection in 0.. {
        let (stream, _) = listener.accept().await.unwrap();
        let (hello, mut close) = (hello.clone(), close.subscribe());
        tokio::spawn(async move {
            let accepted = crate::transport::tcp::accept(stream, &hello, Arc::default()).await;
            let (mut sender, mut receiver) = accepted.map(|c| (c.sender, c.receiver)).unwrap();
            loop {
                let frame = tokio::select! {
                    frame = receiver.receive(&NoBlocks) => frame,
                    _ = close.recv(), if connection > 0 => return,
                };
                let Ok(Frame::Control(bytes)) = frame else { return };
                let answer = match pb::PeerMessage::decode(bytes).unwrap().body {
                    Some(Body::Subscribe(s)) => Body::Status(pb::Status {
                        subscription: s.subscription,
                        state: pb::HoldingState::Partial.into(),
                        own_root: Default::default(),
                    }),
                    Some(Body::Request(r)) if connection > 0 && further == Further::NotHeld => {
                        Body::Declined(pb::Declined {
                            request: r.request,
                            reason: pb::DeclineReason::NotHeld.into(),
                        })
                    }
                    _ => continue,
                };
                let message = pb::PeerMessage { body: Some(answer) };
                let _ = sender.send_control(message.encode_to_vec().into()).await;
            }
        });
    }
}

/// A link of `lanes` lanes to that peer, all of which answer for the subscription.
struct Wide {
    node: Node,
    address: PeerAddress,
    link: Arc<Link>,
    subscription: u32,
    heard: mpsc::Receiver<Event>,
    close: broadcast::Sender<()>,
    budget: Arc<Semaphore>,
}

impl Wide {
    async fn new(lanes: usize, further: Further) -> Self {
        let (m, _, _) = model_of(8);
        let node = Node::start("b", &m).await;
        let (listener, address, hello) = node.impostor("wide", false).await;
        let close = broadcast::channel(1).0;
        tokio::spawn(play(listener, hello, further, close.clone()));
        let link = node.swarm.inner.links.get(&address).await.unwrap();
        let (events, heard) = mpsc::channel(64);
        let subscription = link.subscribe(&node.artifact, 1, events).unwrap();
        let budget = Arc::new(Semaphore::new(64));
        let wide = Self {
            node,
            address,
            link,
            subscription,
            heard,
            close,
            budget,
        };
        for _ in 1..lanes {
            assert!(wide.widen(lanes).await, "one more");
        }
        wide.wait_for("every lane answers", |owing| {
            owing.len() == lanes && owing.iter().all(|(_, ready)| *ready)
        })
        .await;
        wide
    }

    /// Whether a further lane was wanted for so many of them.
    async fn widen(&self, lanes: usize) -> bool {
        let Some(claim) = self.link.set_width(self.subscription, lanes) else {
            return false;
        };
        self.node.swarm.inner.links.widen(&self.address, claim).await;
        true
    }

    async fn wait_for(&self, what: &str, holds: impl Fn(&[(usize, bool)]) -> bool) {
        let waiting = async {
            while !holds(&self.link.owing(self.subscription)) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        if tokio::time::timeout(PATIENCE, waiting).await.is_err() {
            panic!("not in time: {what}: {:?}", self.link.owing(self.subscription));
        }
    }

    fn ask(&self, blocks: std::ops::Range<u32>) {
        let any = Algorithm::Blake3.digest(b"");
        for block in blocks {
            let permit = self.budget.clone().try_acquire_owned().unwrap();
            let asked = self
                .link
                .request(self.subscription, (block, &any), BLOCK, false, permit);
            asked.unwrap();
        }
    }

    fn owing(&self) -> Vec<usize> {
        let owing = self.link.owing(self.subscription);
        owing.into_iter().map(|(owes, _)| owes).collect()
    }

    /// The next blocks that came to nothing, and why.
    async fn declined(&mut self, count: usize) -> Vec<(u32, Decline)> {
        let mut declined = Vec::new();
        let hearing = async {
            while declined.len() < count {
                match self.heard.recv().await.expect("the link is alive") {
                    Event::Declined { block, why, .. } => declined.push((block, why)),
                    Event::Down { why, .. } => panic!("the link ended: {why}"),
                    _ => {}
                }
            }
        };
        tokio::time::timeout(PATIENCE, hearing)
            .await
            .expect("declined in time");
        declined.sort_unstable_by_key(|(block, _)| *block);
        declined
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_lane_owes_is_asked_anew_when_it_ends_and_the_link_lives() {
    let mut wide = Wide::new(3, Further::Silent).await;
    wide.ask(0..6);
    assert_eq!(wide.owing(), [2, 2, 2], "in turn");
    wide.close.send(()).unwrap();
    let back = wide.declined(4).await;
    let blocks: Vec<u32> = back.iter().map(|(block, _)| *block).collect();
    assert_eq!(blocks, [1, 2, 4, 5], "what was not asked for on the first one");
    assert!(back.iter().all(|(_, why)| *why == Decline::Canceled), "{back:?}");
    wide.wait_for("both are gone", |owing| owing.len() == 1).await;
    assert_eq!(wide.budget.available_permits(), 64 - 2);
    assert!(!wide.widen(3).await, "not at once");
    wide.ask(6..8);
    assert_eq!(wide.owing(), [4]);
    let same = wide.node.swarm.inner.links.get(&wide.address).await.unwrap();
    assert!(Arc::ptr_eq(&same, &wide.link));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_lane_has_not_the_peer_may_have() {
    let mut wide = Wide::new(2, Further::NotHeld).await;
    wide.ask(0..2);
    assert_eq!(wide.declined(1).await, [(1, Decline::Canceled)]);
    wide.ask(1..2);
    assert_eq!(wide.owing(), [2, 0], "it is asked on the first one");
    wide.ask(2..3);
    assert_eq!(
        wide.declined(1).await,
        [(2, Decline::Canceled)],
        "others go on coming over the lane"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_the_first_lane_the_link_ends() {
    let mut wide = Wide::new(2, Further::Silent).await;
    wide.ask(0..4);
    wide.link.abandon("it owes");
    assert_eq!(wide.budget.available_permits(), 64);
    let down = async {
        loop {
            if let Some(Event::Down { why, .. }) = wide.heard.recv().await {
                return why;
            }
        }
    };
    assert_eq!(tokio::time::timeout(PATIENCE, down).await.unwrap(), "it owes");
    assert!(!wide.widen(2).await);
}

/// The server's end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quick_peer_is_asked_over_as_many_connections_as_it_is_worth() {
    let (m, bytes, seal) = model_of(64);
    let wide = SwarmConfig {
        lane_bytes_per_s: 1.0, // everybody is quick
        // Slow enough that there is time for lanes, quick enough to be measured.
        download: Arc::new(Rate::new(Some(Limit(32 << 20)))),
        ..Default::default()
    };
    let options = |config| Options {
        config,
        ..Default::default()
    };
    let (a, b, c) = (
        Node::start("a", &m).await,
        Node::start_with("b", &m, options(wide.clone())).await,
        Node::start_with(
            "c",
            &m,
            options(SwarmConfig {
                lane_bytes_per_s: f64::MAX,
                ..wide
            }),
        )
        .await,
    );
    a.fill(&bytes, a.all());
    let (_p, peers) = watch::channel(vec![a.peer(true)]);
    let (_s, seal_rx) = sealed(Some(seal));
    for (node, connections) in [(&b, crate::transport::tcp::MAX_LANES), (&c, 1)] {
        let (task, _) = node.fetch(&peers, &seal_rx);
        let mut most = 0;
        let watching = async {
            while !task.is_finished() {
                most = most.max(a.swarm.inner.server.connected());
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(PATIENCE, watching).await.unwrap();
        finish(task).await.unwrap();
        node.assert_equals(&bytes);
        assert_eq!(most, connections, "{}", node.node_id);
        assert_eq!(node.counters.duplicate(), 0);
        assert_eq!(node.counters.load().1, 0, "refetched");
        let closed = async {
            while a.swarm.inner.server.connected() > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(PATIENCE, closed)
            .await
            .expect("they end with the fetch");
    }
}
