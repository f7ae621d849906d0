use super::{
    super::{
        BlockGate, BlockSource, ConnectError, Frame, NoBlocks, PeerAddress, Room, Sent, TCP, Transport,
        tcp::Tcp,
    },
    *,
};
use mooncake_proto::hello::{FEATURE_RDMA, HelloConfig, HelloError};
use prost::bytes::Bytes;
use std::{fs::File, io::Write};
use tokio::net::{TcpListener, TcpStream};

fn hello(node: &str, features: u64) -> Arc<HelloConfig> {
    Arc::new(HelloConfig {
        cluster_id: "test".into(),
        secret: None,
        node_id: node.into(),
        instance_id: format!("disk of {node}"),
        software: "test".into(),
        features,
    })
}

fn peer(listener: &TcpListener) -> PeerAddress {
    PeerAddress {
        node_id: "b:1".into(),
        data_address: listener.local_addr().unwrap().to_string(),
        transports: vec![],
        labels: Default::default(),
        seed: false,
    }
}

/// Both ends of a connection; `None`: that end is of a version, or a host, without RDMA.
async fn connect(
    dialling: Option<Arc<Fabric>>,
    accepting: Option<Arc<Fabric>>,
) -> (Result<Connection, ConnectError>, Result<Connection, HelloError>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let feature = |f: &Option<Arc<Fabric>>| if f.is_some() { FEATURE_RDMA } else { 0 };
    let tcp = Tcp::with_rdma(hello("a:1", feature(&dialling)), dialling);
    let peer = peer(&listener);
    let accept = async {
        let (stream, _) = listener.accept().await.unwrap();
        let hello = hello("b:1", feature(&accepting));
        tcp::accept(stream, &hello, Arc::default(), accepting.as_ref()).await
    };
    tokio::join!(tcp.connect(&peer, Arc::default()), accept)
}

struct Part(Arc<File>, u32);

impl BlockSource for Part {
    fn open(&self) -> io::Result<(Arc<File>, u64, u32)> {
        Ok((self.0.clone(), 0, self.1))
    }
}

struct Due(u64, u32);

impl BlockGate for Due {
    fn due(&self, id: u64) -> Option<u32> {
        (id == self.0).then_some(self.1)
    }
}

/// A control message one way, a block the other way.
async fn works(dialled: Connection, accepted: Connection) {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[7; 5000]).unwrap();
    let (mut asks, mut gets) = (dialled.sender, dialled.receiver);
    let (mut sends, mut hears) = (accepted.sender, accepted.receiver);
    asks.send_control(Bytes::from_static(b"please")).await.unwrap();
    assert!(matches!(hears.receive(&NoBlocks).await.unwrap(), Frame::Control(c) if c == "please"));
    let room = sends.room(5000).await.unwrap();
    let block = Box::new(Part(Arc::new(file), 5000));
    let (sent, got) = tokio::join!(sends.send_block(9, block, room), async {
        gets.receive(&Due(9, 5000)).await
    });
    assert!(matches!(sent.unwrap(), Sent::Done));
    assert!(matches!(got.unwrap(), Frame::Block { id: 9, bytes } if *bytes == [7; 5000]));
}

#[tokio::test]
async fn whoever_has_no_device_or_no_idea_of_rdma_gets_blocks_over_tcp() {
    for (dialling, accepting, negotiated) in [(true, true, true), (true, false, false), (false, true, false)]
    {
        let end = |wanted: bool| wanted.then(without_device);
        let (dialled, accepted) = connect(end(dialling), end(accepting)).await;
        let (dialled, accepted) = (dialled.unwrap(), accepted.unwrap());
        assert_eq!((dialled.transport, accepted.transport), (TCP, TCP));
        // It is tried again only where it was spoken of.
        assert_eq!(dialled.better_from.is_some(), negotiated);
        works(dialled, accepted).await;
    }
}

/// Says hello as a puller that knows RDMA, and then whatever the test wants.
async fn stranger() -> (
    Frames,
    Writer,
    tokio::task::JoinHandle<Result<Connection, HelloError>>,
) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let accepting = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        tcp::accept(
            stream,
            &hello("b:1", FEATURE_RDMA),
            Arc::default(),
            Some(&without_device()),
        )
        .await
    });
    let purpose = mooncake_proto::hello::Purpose::Data;
    let own = hello("a:1", FEATURE_RDMA);
    let info = mooncake_proto::hello::connect(&mut stream, &own, purpose)
        .await
        .unwrap();
    assert_eq!(info.features, FEATURE_RDMA);
    let (read, write) = stream.into_split();
    (Frames::new(read), Writer::new(write), accepting)
}

fn offer() -> pb::RdmaEndpoint {
    to_wire(&Endpoint {
        queue_pair: 17,
        first_packet: 5,
        gid: Gid {
            index: 0,
            kind: GidKind::RoceV2,
            raw: std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets(),
        },
        lid: 0,
        mtu: Mtu::from_bytes(1024).unwrap(),
        reads: 16,
    })
}

#[tokio::test]
async fn an_offer_that_cannot_be_taken_is_answered_with_the_reason_and_the_connection_goes_on() {
    let bad = pb::RdmaEndpoint {
        gid: vec![1; 15].into(),
        ..offer()
    };
    for (endpoint, reason) in [(offer(), "no RDMA device is usable"), (bad, "a GID of 15 bytes")] {
        let (mut frames, writer, accepting) = stranger().await;
        let said = pb::RdmaSetUp {
            endpoint: Some(endpoint),
            depth: 3,
            ..Default::default()
        };
        writer.write(Kind::SetUp, 0, &said.encode_to_vec()).await.unwrap();
        let answer = set_up(&mut frames).await.unwrap();
        assert!(answer.endpoint.is_none());
        assert!(answer.why_not.contains(reason), "{}", answer.why_not);
        let mut accepted = accepting.await.unwrap().unwrap();
        assert_eq!(accepted.transport, TCP);
        writer.write(Kind::Control, 0, b"and now").await.unwrap();
        let heard = accepted.receiver.receive(&NoBlocks).await.unwrap();
        assert!(matches!(heard, Frame::Control(c) if c == "and now"));
        // What belongs to RDMA has no place on it.
        writer.write(Kind::Done, 1, &[]).await.unwrap();
        let error = accepted.receiver.receive(&NoBlocks).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}

#[tokio::test]
async fn anything_else_before_the_set_up_ends_the_connection() {
    let (_frames, writer, accepting) = stranger().await;
    writer.write(Kind::Control, 0, b"hello").await.unwrap();
    let error = accepting.await.unwrap().unwrap_err().to_string();
    assert!(error.contains("before it said how blocks are to go"), "{error}");
    let (_frames, writer, accepting) = stranger().await;
    writer.write(Kind::SetUp, 0, &[0xff; 9]).await.unwrap();
    let error = accepting.await.unwrap().unwrap_err().to_string();
    assert!(error.contains("cannot be read"), "{error}");
}

#[test]
fn endpoints_go_over_the_wire_and_nonsense_does_not_come_back() {
    let good = offer();
    let read = from_wire(&good).unwrap();
    assert_eq!(to_wire(&read), good);
    let set = |change: &dyn Fn(&mut pb::RdmaEndpoint)| {
        let mut e = offer();
        change(&mut e);
        from_wire(&e)
    };
    assert!(set(&|e| e.queue_pair = 1 << 24).is_err());
    assert!(set(&|e| e.gid_kind = 9).is_err());
    assert!(set(&|e| e.lid = 1 << 16).is_err());
    assert!(set(&|e| e.mtu = 0).is_err());
    assert!(set(&|e| e.gid = vec![0; 16].into()).is_err(), "no address");
    assert_eq!(set(&|e| e.reads = 1000).unwrap().reads, 255);
    assert_eq!(shown("a\nb\u{7}c"), "a b c");
    assert_eq!(shown(&"x".repeat(1000)).len(), MAX_SHOWN_CHARS);
}

#[test]
fn a_failure_rests_one_peer_in_one_direction_and_is_counted() {
    let fabric = without_device();
    let until = fabric.failed("b:1", "no reply", Duration::ZERO, true);
    assert!(until > Instant::now());
    assert_eq!(fabric.fallbacks(), 1);
    assert!(fabric.rests.lock().resting("b:1", Instant::now()).is_some());
    assert!(fabric.own_rests.lock().resting("b:1", Instant::now()).is_none());
    assert!(!fabric.is_usable());
}

#[test]
fn room_of_another_transport_is_none() {
    assert!(format!("{:?}", Room::default()).contains("false"));
}
