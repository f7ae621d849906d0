//! Masters in this process: real consensus on real disks, real ports on loopback.

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{HeaderMap, Method, Request};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use mooncake_master::{
    config::MemberAddress,
    consensus::{Consensus, Handle, Options as ConsensusOptions, Timers},
    context::{MasterContext, Options, Serving},
};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, TcpListener},
    time::Duration,
};
use tempfile::TempDir;

/// No event that a test waits for takes this long, even on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);
pub const JOBS: &str = "/api/v1/model-distribution/jobs";

pub struct TestMaster {
    pub http: String,
    pub rpc: String,
    pub handle: Handle,
    consensus: Option<Consensus>,
    serving: Option<Serving>,
}

impl TestMaster {
    /// Closes the HTTP port and the sessions; what it is to the other masters it stays.
    pub async fn stop_serving(&mut self) {
        if let Some(serving) = self.serving.take() {
            serving.stop().await;
        }
    }

    /// The HTTP port again, with other options, as after a restart; no sessions.
    pub async fn serve_again(&mut self, options: Options) -> Result<()> {
        self.stop_serving().await;
        let context = MasterContext::new(self.handle.clone(), options);
        let http = TcpListener::bind(&self.http)?;
        self.serving = Some(Serving::start(context, http, tokio_stream::pending())?);
        Ok(())
    }

    /// Cut off at once: nothing is handed over.
    pub async fn kill(&mut self) {
        self.serving = None;
        if let Some(consensus) = self.consensus.take() {
            consensus.shutdown().await.expect("the store closes");
        }
    }
}

pub struct TestCluster {
    pub masters: Vec<TestMaster>,
    client: Client<HttpConnector, Full<Bytes>>,
    _dirs: Vec<TempDir>,
}

/// Short enough for tests, long enough for a busy machine.
pub fn options() -> Options {
    Options {
        heartbeat_interval: Duration::from_millis(500),
        // The nodes of these tests send no heartbeats.
        session_timeout: Duration::from_secs(300),
        suspect_after: Duration::from_millis(300),
        // Between the two, a test must see that a node is suspected.
        node_grace: Duration::from_secs(5),
        reconnect_window: Duration::from_millis(500),
        // An election that takes longer is a test that fails.
        hold: Duration::from_secs(50),
        ..Options::default()
    }
}

/// A port on a loopback address of this process's own: connections to elsewhere come from 127.0.0.1, so none of them
/// takes the port of a master that is down.
fn port() -> (TcpListener, String) {
    let pid = std::process::id();
    let ip = Ipv4Addr::new(127, 80, (pid >> 8) as u8, (pid as u8).clamp(1, 254));
    let listener = TcpListener::bind((ip, 0)).expect("a port on loopback");
    let address = listener.local_addr().expect("it is bound").to_string();
    (listener, address)
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Value,
    pub text: String,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    pub fn pointers(&self) -> Vec<(String, String)> {
        let field = |e: &Value, name: &str| e[name].as_str().unwrap_or_default().to_owned();
        let errors = self.body["errors"].as_array().cloned().unwrap_or_default();
        errors
            .iter()
            .map(|e| (field(e, "pointer"), field(e, "code")))
            .collect()
    }
}

impl TestCluster {
    pub async fn start(size: u64) -> Result<Self> {
        Self::start_with(size, options()).await
    }

    pub async fn start_with(size: u64, options: Options) -> Result<Self> {
        let ports: Vec<_> = (1..=size).map(|id| (id, port(), port())).collect();
        let initial_cluster: BTreeMap<_, _> = ports
            .iter()
            .map(|(id, (_, rpc), (_, http))| {
                (
                    *id,
                    MemberAddress {
                        rpc: rpc.clone(),
                        http: http.clone(),
                    },
                )
            })
            .collect();
        let mut masters = Vec::new();
        let mut dirs = Vec::new();
        for (id, (rpc_listener, rpc), (http_listener, http)) in ports {
            let dir = tempfile::tempdir()?;
            let consensus_options = ConsensusOptions {
                address: initial_cluster[&id].clone(),
                cluster_id: "api-tests".into(),
                node_id: id,
                data_dir: dir.path().to_owned(),
                secret: None,
                // A machine that stands still for seconds starts no election.
                timers: Timers {
                    heartbeat_ms: 200,
                    election_min_ms: 1500,
                    election_max_ms: 3000,
                },
                snapshot_every: 10_000,
                snapshot_keep: 1_000,
                initial_cluster: initial_cluster.clone(),
                bootstrap: true,
            };
            crate::exit::without_destructors();
            let (consensus, sessions) = Consensus::start(consensus_options, rpc_listener).await?;
            let handle = consensus.handle();
            let context = MasterContext::new(handle.clone(), options.clone());
            let serving = Serving::start(context, http_listener, sessions)?;
            masters.push(TestMaster {
                http,
                rpc,
                handle,
                consensus: Some(consensus),
                serving: Some(serving),
            });
            dirs.push(dir);
        }
        let client = Client::builder(TokioExecutor::new()).build_http();
        let cluster = Self {
            masters,
            client,
            _dirs: dirs,
        };
        for at in 0..cluster.masters.len() {
            cluster.until(at, "/readyz", |a| a.status == 200).await?;
        }
        Ok(cluster)
    }

    /// The index of the leader among the masters.
    pub async fn leader(&self) -> Result<usize> {
        tokio::time::timeout(PATIENCE, async {
            loop {
                let serving =
                    |m: &TestMaster| m.consensus.is_some() && m.handle.leadership().borrow().is_serving;
                if let Some(at) = self.masters.iter().position(serving) {
                    return at;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await
        .context("no leader")
    }

    pub async fn a_follower(&self) -> Result<usize> {
        let leader = self.leader().await?;
        Ok((leader + 1) % self.masters.len())
    }

    pub async fn send(
        &self,
        master: usize,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Result<Answer> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("http://{}{path}", self.masters[master].http));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let sent = self.client.request(request.body(Full::new(body.into()))?);
        let response = tokio::time::timeout(PATIENCE, sent)
            .await
            .with_context(|| format!("no answer to {path}"))??;
        let (head, body) = response.into_parts();
        let bytes = body.collect().await?.to_bytes();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        Ok(Answer {
            status: head.status.as_u16(),
            headers: head.headers,
            body,
            text,
        })
    }

    pub async fn get(&self, master: usize, path: &str) -> Result<Answer> {
        self.send(master, Method::GET, path, &[], Bytes::new()).await
    }

    pub async fn post(&self, master: usize, path: &str, body: &Value) -> Result<Answer> {
        let headers = [("content-type", "application/json")];
        self.send(master, Method::POST, path, &headers, body.to_string())
            .await
    }

    /// Asks until the answer is as wanted.
    pub async fn until(&self, master: usize, path: &str, wanted: impl Fn(&Answer) -> bool) -> Result<Answer> {
        let began = tokio::time::Instant::now();
        loop {
            let answer = self.get(master, path).await?;
            if wanted(&answer) {
                return Ok(answer);
            }
            if began.elapsed() > PATIENCE {
                bail!(
                    "{path} of master {master} does not become as wanted; it is {}: {}",
                    answer.status,
                    answer.text
                );
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }

    pub async fn node_status(&self, master: usize, node: &str, status: &str) -> Result<Answer> {
        self.until(master, &format!("/api/v1/nodes/{node}"), |a| {
            a.body["status"] == status
        })
        .await
    }

    pub async fn job_status(&self, master: usize, job: &str, status: &str) -> Result<Answer> {
        self.until(master, &format!("{JOBS}/{job}"), |a| a.body["status"] == status)
            .await
    }
}

/// The RFC's example request.
pub fn rfc_example() -> Value {
    serde_json::from_str(include_str!("../../../proto/tests/data/rfc_example.json"))
        .expect("the RFC's example is JSON")
}

/// The example under another job and model name.
pub fn example(job: &str, model: &str) -> Value {
    let mut body = rfc_example();
    body["job_id"] = job.into();
    body["model"]["model_id"] = model.into();
    body["manifest"]["model_id"] = model.into();
    body
}
