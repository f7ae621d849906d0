//! A master as a node sees it: the session protocol over the real hello, with a test's hand on every frame.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use bytes::Bytes;
use futures_util::Stream;
use mooncake_proto::{
    digest::{Algorithm, Digest},
    hello::{self, HelloConfig, Purpose, Secret},
    ids::ModelRef,
    manifest::{Checksum, Manifest, ManifestFile, ObjectIds, Seal, Sources},
    pb::session::{
        self as pb,
        master_frame::Body as MasterBody,
        node_frame::Body as NodeBody,
        node_session_server::{NodeSession, NodeSessionServer},
        order::Body as OrderBody,
    },
};
use std::{
    net::SocketAddr,
    path::Path,
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{net::TcpListener, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

pub const BLOCK: u32 = 256 << 10;
pub const CLUSTER: &str = "test-cluster";
pub const SECRET: &str = "0123456789abcdef0123456789abcdef";
/// For events that come at once on an idle machine.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// A node takes a master that was silent for three of these for dead: longer than a test's process stands still.
pub const HEARTBEAT: Duration = Duration::from_secs(5);
/// For tests that wait for just that, or for heartbeats.
pub const QUICK_HEARTBEAT: Duration = Duration::from_secs(1);

/// How a master answers a registration.
#[derive(Clone)]
pub enum Answer {
    Welcome,
    Redirect(String),
    Refuse(&'static str, &'static str),
    /// Accepts, and never says a word.
    Silence,
}

pub struct FakeMaster {
    pub address: String,
    answer: Arc<Mutex<Answer>>,
    sessions: mpsc::UnboundedReceiver<FakeSession>,
    stop: CancellationToken,
}

impl Drop for FakeMaster {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

pub struct FakeSession {
    pub register: pb::Register,
    frames: mpsc::UnboundedReceiver<NodeBody>,
    out: mpsc::Sender<Result<pb::MasterFrame, Status>>,
    beats: CancellationToken,
    /// Everything that reports said, in order.
    pub reports: Vec<pb::TaskReport>,
}

struct Service {
    heartbeat: Duration,
    answer: Arc<Mutex<Answer>>,
    sessions: mpsc::UnboundedSender<FakeSession>,
    stop: CancellationToken,
}

#[tonic::async_trait]
impl NodeSession for Service {
    type OpenStream = Pin<Box<dyn Stream<Item = Result<pb::MasterFrame, Status>> + Send>>;

    async fn open(
        &self,
        request: Request<Streaming<pb::NodeFrame>>,
    ) -> Result<Response<Self::OpenStream>, Status> {
        let mut inbound = request.into_inner();
        let Some(NodeBody::Register(register)) = inbound.message().await?.and_then(|f| f.body) else {
            return Err(Status::invalid_argument("the first frame is not a registration"));
        };
        let (out, out_rx) = mpsc::channel(64);
        let answer = self.answer.lock().unwrap().clone();
        let first = match answer {
            Answer::Welcome => MasterBody::Welcome(pb::Welcome {
                term: 1,
                recovery_epoch: 0,
                incarnation: 1,
                master_id: "fake".into(),
                heartbeat_interval_ms: self.heartbeat.as_millis() as u32,
                master_addresses: Vec::new(),
            }),
            Answer::Redirect(leader_address) => MasterBody::Redirect(pb::Redirect { leader_address }),
            Answer::Refuse(code, message) => MasterBody::Refused(pb::Refused {
                code: code.into(),
                message: message.into(),
            }),
            Answer::Silence => return std::future::pending().await,
        };
        let welcome = matches!(first, MasterBody::Welcome(_));
        let _ = out.send(Ok(pb::MasterFrame { body: Some(first) })).await;
        if welcome {
            let beats = self.stop.child_token();
            let (frames_tx, frames) = mpsc::unbounded_channel();
            let (stop, pulse, heartbeat) = (beats.clone(), out.clone(), self.heartbeat);
            tokio::spawn(async move {
                loop {
                    tokio::select! {
                        () = stop.cancelled() => return,
                        () = tokio::time::sleep(heartbeat) => {}
                    }
                    let beat = MasterBody::Heartbeat(pb::Heartbeat::default());
                    if pulse
                        .send(Ok(pb::MasterFrame { body: Some(beat) }))
                        .await
                        .is_err()
                    {
                        return;
                    }
                }
            });
            tokio::spawn(async move {
                while let Ok(Some(frame)) = inbound.message().await {
                    if let Some(body) = frame.body {
                        let _ = frames_tx.send(body);
                    }
                }
            });
            let _ = self.sessions.send(FakeSession {
                register,
                frames,
                out,
                beats,
                reports: Vec::new(),
            });
        }
        Ok(Response::new(Box::pin(ReceiverStream::new(out_rx))))
    }
}

/// A port on a loopback address of this process's own: connections to elsewhere come from 127.0.0.1, so none of them
/// takes the port while no master listens there.
pub fn own_address() -> SocketAddr {
    let pid = std::process::id();
    let ip = std::net::Ipv4Addr::new(127, 90, (pid >> 8) as u8, (pid as u8).clamp(1, 254));
    (ip, 0).into()
}

pub fn hello(cluster: &str, secret: Option<&str>) -> Arc<HelloConfig> {
    Arc::new(HelloConfig {
        cluster_id: cluster.into(),
        secret: secret.map(|s| Secret::new(s.as_bytes()).unwrap()),
        node_id: "1".into(),
        instance_id: "master-disk".into(),
        software: "fake master".into(),
        features: 0,
    })
}

impl FakeMaster {
    pub async fn start() -> Self {
        Self::start_on(own_address(), hello(CLUSTER, None), HEARTBEAT).await
    }

    pub async fn start_on(address: SocketAddr, hello: Arc<HelloConfig>, heartbeat: Duration) -> Self {
        // One that was dropped there a moment ago may not have ended yet.
        let listener: TcpListener = within("the address", async {
            loop {
                let socket = tokio::net::TcpSocket::new_v4().unwrap();
                socket.set_reuseaddr(true).unwrap();
                socket.bind(address).unwrap();
                match socket.listen(64) {
                    Ok(listener) => return listener,
                    Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                }
            }
        })
        .await;
        let address = listener.local_addr().unwrap().to_string();
        let (sessions_tx, sessions) = mpsc::unbounded_channel();
        let (answer, stop) = (Arc::new(Mutex::new(Answer::Welcome)), CancellationToken::new());
        let service = Service {
            heartbeat,
            answer: answer.clone(),
            sessions: sessions_tx,
            stop: stop.clone(),
        };
        let incoming = hello::incoming(listener, hello, vec![Purpose::Session]);
        let server = tonic::transport::Server::builder()
            .add_service(NodeSessionServer::new(service))
            .serve_with_incoming(incoming);
        let ended = stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = server => {}
                () = ended.cancelled() => {}
            }
        });
        Self {
            address,
            answer,
            sessions,
            stop,
        }
    }

    pub fn answer(&self, answer: Answer) {
        *self.answer.lock().unwrap() = answer;
    }

    /// The next node that registers.
    pub async fn session(&mut self) -> FakeSession {
        within("a registration", self.sessions.recv())
            .await
            .expect("the master lives")
    }
}

impl FakeMaster {
    /// A node that has registered already.
    pub fn try_session(&mut self) -> Option<FakeSession> {
        self.sessions.try_recv().ok()
    }
}

pub async fn within<T>(what: &str, event: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, event).await {
        Ok(value) => value,
        Err(_) => panic!("{what} did not come"),
    }
}

impl FakeSession {
    pub async fn send(&self, body: MasterBody) {
        let _ = self.out.send(Ok(pb::MasterFrame { body: Some(body) })).await;
    }

    /// No heartbeats from now on.
    pub fn fall_silent(&self) {
        self.beats.cancel();
    }

    /// A blob, in parts of `part` bytes.
    pub async fn blob(&self, bytes: &[u8], part: usize) -> Bytes {
        let digest = Bytes::copy_from_slice(Digest::sha256(bytes).as_bytes());
        let count = bytes.len().div_ceil(part).max(1);
        for index in 0..count {
            let data = &bytes[index * part..bytes.len().min((index + 1) * part)];
            let part = pb::BlobPart {
                digest: digest.clone(),
                index: index as u32,
                count: count as u32,
                data: Bytes::copy_from_slice(data),
            };
            self.send(MasterBody::BlobPart(part)).await;
        }
        digest
    }

    pub async fn order(&self, model: &ModelRef, attempt: u64, body: OrderBody) {
        let order = pb::Order {
            model: Some(model.clone().into()),
            generation: 1,
            fence: Some(pb::Fence {
                recovery_epoch: 0,
                attempt,
            }),
            term: 1,
            body: Some(body),
        };
        self.send(MasterBody::Order(order)).await;
    }

    pub async fn acquire(&self, version: &Version, attempt: u64) {
        let body = pb::Acquire {
            manifest_digest: self.blob(&version.manifest.encode(), 50).await,
            sources_digest: self.blob(&version.sources.encode(), 50).await,
            block_size_bytes: BLOCK,
            algorithm: pb::DigestAlgorithm::Blake3 as i32,
            expected_seal: None,
            require_checksums: false,
        };
        self.order(&version.manifest.model, attempt, OrderBody::Acquire(body))
            .await;
    }

    pub async fn replicate(
        &self,
        version: &Version,
        attempt: u64,
        peers: Vec<pb::Peer>,
        seal: Option<pb::Seal>,
    ) {
        let body = pb::Replicate {
            manifest_digest: self.blob(&version.manifest.encode(), 1 << 16).await,
            block_size_bytes: BLOCK,
            algorithm: pb::DigestAlgorithm::Blake3 as i32,
            peers,
            seal,
        };
        self.order(&version.manifest.model, attempt, OrderBody::Replicate(body))
            .await;
    }

    pub async fn sealed(&self, version: &Version, attempt: u64, seal: pb::Seal) {
        self.order(
            &version.manifest.model,
            attempt,
            OrderBody::Sealed(pb::Sealed { seal: Some(seal) }),
        )
        .await;
    }

    /// The next frame; `None`: the session is over.
    pub async fn frame(&mut self) -> Option<NodeBody> {
        let frame = within("a frame", self.frames.recv()).await;
        if let Some(NodeBody::Reports(batch)) = &frame {
            self.reports.extend(batch.reports.iter().cloned());
        }
        frame
    }

    /// The first report from now on for which `is` holds.
    pub async fn report(&mut self, is: impl Fn(&pb::TaskReport) -> bool) -> pb::TaskReport {
        let search = async {
            loop {
                match self.frame().await.expect("the session goes on") {
                    NodeBody::Reports(batch) => {
                        if let Some(found) = batch.reports.into_iter().find(|r| is(r)) {
                            return found;
                        }
                    }
                    _ => continue,
                }
            }
        };
        within("the report", search).await
    }

    pub async fn outcome(&mut self, outcome: pb::TaskOutcome) -> pb::TaskReport {
        self.report(|r| {
            if r.outcome() == pb::TaskOutcome::Failed && outcome != pb::TaskOutcome::Failed {
                panic!("the task failed: {:?}", r.failure);
            }
            r.outcome() == outcome
        })
        .await
    }

    /// The inventory that follows the registration.
    pub async fn inventory(&mut self) -> Vec<pb::Holding> {
        let mut out = Vec::new();
        loop {
            if let NodeBody::Holdings(h) = self.frame().await.expect("the session goes on") {
                out.extend(h.holdings);
                if h.inventory_complete {
                    return out;
                }
            }
        }
    }

    /// Holdings frames until one line satisfies `is`.
    pub async fn holding(&mut self, is: impl Fn(&pb::Holding) -> bool) -> pb::Holding {
        let search = async {
            loop {
                if let NodeBody::Holdings(h) = self.frame().await.expect("the session goes on")
                    && let Some(found) = h.holdings.into_iter().find(|h| is(h))
                {
                    return found;
                }
            }
        };
        within("the holding", search).await
    }
}

/// A model version with its source on the disk.
pub struct Version {
    pub manifest: Manifest,
    pub sources: Sources,
    pub files: Vec<(String, Vec<u8>)>,
}

pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// Files of these sizes, written below `folder`.
pub fn version(name: &str, folder: &Path, sizes: &[usize]) -> Version {
    let model = ModelRef {
        model_id: format!("org/{name}"),
        revision: "r1".into(),
        format: "bin".into(),
        provider: "local".into(),
    };
    let mut files = Vec::new();
    let mut out = Version {
        manifest: Manifest {
            model,
            file_manifest_version: "v1".into(),
            total_size_bytes: 0,
            files: Vec::new(),
        },
        sources: Sources(Vec::new()),
        files: Vec::new(),
    };
    for (n, &len) in sizes.iter().enumerate() {
        let (path, bytes) = (format!("sub{n}/file{n}.bin"), noise(n as u64 + 1, len));
        let at = folder.join(name).join(&path);
        std::fs::create_dir_all(at.parent().unwrap()).unwrap();
        std::fs::write(&at, &bytes).unwrap();
        let chunk_count = (len as u64).div_ceil(100_000);
        let object_prefix = format!("{name}/{n}");
        out.manifest.total_size_bytes += len as u64;
        out.manifest.files.push(ManifestFile {
            path: path.clone(),
            size_bytes: len as u64,
            checksum: Checksum::Sha256(Digest::sha256(&bytes)),
            artifact_key: format!("key{n}"),
            chunk_size_bytes: 100_000,
            chunk_count,
            objects: ObjectIds::derived(&object_prefix, chunk_count),
            object_prefix,
        });
        out.sources.0.push(at.to_str().unwrap().to_owned());
        files.push((path, bytes));
    }
    out.files = files;
    out
}

impl Version {
    /// The root that the blocks of the files have.
    pub fn seal(&self) -> pb::Seal {
        let digests: Vec<_> = self
            .files
            .iter()
            .flat_map(|(_, bytes)| bytes.chunks(BLOCK as usize))
            .map(|block| Algorithm::Blake3.digest(block))
            .collect();
        let root =
            mooncake_proto::manifest::root(Algorithm::Blake3, BLOCK, &self.manifest.digest(), &digests);
        Seal {
            block_size_bytes: BLOCK,
            algorithm: Algorithm::Blake3,
            root,
        }
        .into()
    }

    /// Whether `folder` holds exactly these files.
    pub fn check(&self, folder: impl AsRef<Path>) {
        for (path, bytes) in &self.files {
            let staged = std::fs::read(folder.as_ref().join(path)).unwrap();
            assert!(staged == *bytes, "{path} differs");
        }
    }
}

/// Reads `http://address/path`: status and body.
pub async fn get(address: impl std::fmt::Display, path: &str) -> (u16, Vec<u8>) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let fetch = async {
        let mut stream = tokio::net::TcpStream::connect(address.to_string()).await.unwrap();
        let request = format!("GET {path} HTTP/1.0\r\nHost: test\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        answer
    };
    let answer = within("an HTTP answer", fetch).await;
    let split = answer
        .windows(4)
        .position(|w| w == b"\r\n\r\n")
        .expect("a header ends");
    let head = String::from_utf8_lossy(&answer[..split]).into_owned();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer[split + 4..].to_vec())
}
