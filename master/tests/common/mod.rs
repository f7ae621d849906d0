//! What the consensus tests share: clusters in this process, masters as processes, questions over the Raft port.
#![allow(dead_code, reason = "each test file uses its part")]

mod exit;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use mooncake_master::config::MemberAddress;
use mooncake_master::consensus::{Consensus, Handle, Options, Sessions, Timers};
use mooncake_proto::hello::{self, HelloConfig, Purpose, Secret};
use mooncake_proto::ids::NodeId;
use mooncake_proto::pb::raft as pb;
use mooncake_proto::pb::raft::raft_client::RaftClient;
use mooncake_state::{Command, NodeAbout};
use tonic::transport::Channel;

/// Longest wait for anything: generous, since these machines are shared; a pass never takes it.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Polls until `check` gives something. For other processes, which cannot be awaited.
pub async fn eventually<T>(what: &str, mut check: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = check().await {
            return value;
        }
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A loopback address of this cluster's own, so that no other test or process can take its ports: all of
/// 127.0.0.0/8 is loopback.
pub fn own_loopback() -> Ipv4Addr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let pid = std::process::id();
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    Ipv4Addr::new(
        127,
        100 + (n % 100) as u8,
        (pid >> 8) as u8,
        (pid as u8).clamp(1, 254),
    )
}

/// Ports that were free a moment ago.
pub fn free_ports<const N: usize>(ip: Ipv4Addr) -> [u16; N] {
    let held: [TcpListener; N] = std::array::from_fn(|_| TcpListener::bind((ip, 0)).unwrap());
    std::array::from_fn(|at| held[at].local_addr().unwrap().port())
}

/// For tests of anything but elections: a machine that stands still for seconds starts none. (A leader whose process
/// dies, or that hands over, is replaced without waiting for any of these.)
pub const CALM: Timers = Timers {
    heartbeat_ms: 200,
    election_min_ms: 1500,
    election_max_ms: 3000,
};
/// [`CALM`] for the binary.
pub const CALM_ARGS: [&str; 6] = [
    "--heartbeat-ms",
    "200",
    "--election-min-ms",
    "1500",
    "--election-max-ms",
    "3000",
];

const SECRET: &str = "the secret of the tests";

pub fn secret() -> Secret {
    Secret::new(SECRET.as_bytes()).unwrap()
}

/// A node registration, which leaves a trace that can be looked for.
pub fn register(name: &str) -> Command {
    Command::RegisterNode {
        node: NodeId(name.to_owned()),
        store_id: format!("store of {name}"),
        expected_incarnation: 0,
        about: NodeAbout::default(),
        now_ms: 1,
    }
}

/// Speaks to a Raft port as a master that is not one.
pub fn raft_client(
    address: &str,
    cluster_id: &str,
    secret: Option<Secret>,
    purpose: Purpose,
) -> RaftClient<Channel> {
    let hello = HelloConfig {
        cluster_id: cluster_id.into(),
        secret,
        node_id: "99".into(),
        instance_id: "test".into(),
        software: "test".into(),
        features: 0,
    };
    RaftClient::new(hello::channel(address, Arc::new(hello), purpose))
}

pub async fn probe(address: &str, with_state_digest: bool) -> Option<pb::ProbeResponse> {
    let mut client = raft_client(
        address,
        mooncake_proto::DEFAULT_CLUSTER_ID,
        Some(secret()),
        Purpose::Raft,
    );
    let ask = client.probe(pb::ProbeRequest {
        with_state_digest,
        ..Default::default()
    });
    Some(
        tokio::time::timeout(Duration::from_secs(20), ask)
            .await
            .ok()?
            .ok()?
            .into_inner(),
    )
}

/// The whole text of an error, causes included.
pub fn text(status: &tonic::Status) -> String {
    let mut text = status.to_string();
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        text += &format!(": {error}");
        source = error.source();
    }
    text
}

/// A master in this process.
pub struct Local {
    pub consensus: Option<Consensus>,
    pub sessions: Option<Sessions>,
    pub handle: Handle,
}

/// How the masters of a test cluster are started.
#[derive(Clone)]
pub struct Setup {
    pub folder: std::path::PathBuf,
    pub members: BTreeMap<u64, MemberAddress>,
    pub snapshot_every: u64,
    pub snapshot_keep: u64,
}

impl Setup {
    pub fn new(folder: &Path, size: u64) -> Self {
        let ip = own_loopback();
        let members = (1..=size).map(|id| {
            let [rpc, http] = free_ports(ip);
            (
                id,
                MemberAddress {
                    rpc: format!("{ip}:{rpc}"),
                    http: format!("{ip}:{http}"),
                },
            )
        });
        let setup = Self {
            folder: folder.to_owned(),
            members: members.collect(),
            snapshot_every: 10_000,
            snapshot_keep: 2_000,
        };
        // Once, before any process starts: a second write would show a starting one an empty file.
        std::fs::write(setup.secret_file(), SECRET).unwrap();
        setup
    }

    /// Holds what [`secret`] gives.
    pub fn secret_file(&self) -> std::path::PathBuf {
        self.folder.join("secret")
    }

    pub fn options(&self, id: u64) -> Options {
        Options {
            cluster_id: mooncake_proto::DEFAULT_CLUSTER_ID.into(),
            node_id: id,
            data_dir: self.folder.join(format!("m{id}")),
            secret: Some(secret()),
            timers: CALM,
            snapshot_every: self.snapshot_every,
            snapshot_keep: self.snapshot_keep,
            address: self.members[&id].clone(),
            initial_cluster: self.members.clone(),
            bootstrap: true,
        }
    }

    pub async fn start(&self, id: u64) -> Local {
        self.start_as(self.options(id)).await
    }

    pub async fn start_as(&self, options: Options) -> Local {
        let address: SocketAddr = options.address.rpc.parse().unwrap();
        let listener = TcpListener::bind(address).unwrap();
        exit::without_destructors();
        let (consensus, sessions) = Consensus::start(options, listener).await.unwrap();
        Local {
            handle: consensus.handle(),
            consensus: Some(consensus),
            sessions: Some(sessions),
        }
    }

    pub async fn start_all(&self) -> BTreeMap<u64, Local> {
        let mut all = BTreeMap::new();
        for id in self.members.keys() {
            all.insert(*id, self.start(*id).await);
        }
        all
    }
}

impl Local {
    pub async fn stop(&mut self) {
        self.sessions = None;
        self.consensus.take().unwrap().shutdown().await.unwrap();
    }
}

/// Waits until one of the masters leads and serves; gives its id.
pub async fn serving(masters: &BTreeMap<u64, Local>) -> u64 {
    let wait = masters
        .iter()
        .filter(|(_, master)| master.consensus.is_some())
        .map(|(id, master)| {
            let (id, mut leadership) = (*id, master.handle.leadership());
            Box::pin(async move {
                leadership.wait_for(|now| now.is_serving).await.unwrap();
                id
            })
        });
    tokio::time::timeout(PATIENCE, futures_util::future::select_all(wait))
        .await
        .expect("a leader")
        .0
}

/// [`serving`], and all of them, who are all members, are under the newest cluster version: from now on nothing gets into
/// the log by itself.
pub async fn settled(masters: &BTreeMap<u64, Local>) -> u64 {
    let leader = serving(masters).await;
    for master in masters.values() {
        eventually("the newest cluster version", async || {
            let version = master.handle.state().cluster_version();
            (version == mooncake_state::SUPPORTED_CLUSTER_VERSION).then_some(())
        })
        .await;
    }
    leader
}
