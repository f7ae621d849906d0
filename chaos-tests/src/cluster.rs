//! A cluster of real processes: on loopback, or wherever a [`Layout`] seats them (the testbed does).

mod members;
mod observe;

use crate::{
    process::{Process, binary_path},
    testbed::Namespace,
};
use anyhow::{Context, Result, bail, ensure};
use reqwest::StatusCode;
use serde_json::Value;
use std::{
    net::TcpListener,
    path::{Path, PathBuf},
    sync::{
        Once,
        atomic::{AtomicU16, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::sync::{Semaphore, SemaphorePermit};

/// How long a cluster may take to form, or to have a leader again, on a busy 2-core machine.
pub const READY_DEADLINE: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(20);
/// The master's program, in the target folder.
pub const MASTER: &str = "mooncake_master";
/// What a master logs that got a snapshot from the leader (`master/src/consensus/service.rs`).
pub const SNAPSHOT_INSTALLED: &str = "installed the received snapshot";
/// What a master logs of a node that has not come back within the grace.
pub const NODE_DOWN: &str = "node down node=";

/// What to start.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// Number of masters, all voters.
    pub masters: usize,
    /// Number of clients.
    pub clients: usize,
    /// Given to clients as `--allow-source`.
    pub allow_sources: Vec<String>,
    /// Raft timers of every master: heartbeat, shortest and longest random part of an election's time-out. `None`:
    /// the product's own.
    pub raft_timers_ms: Option<[u64; 3]>,
    /// Further arguments of every master.
    pub master_args: Vec<String>,
    /// What master `i` runs, in the target folder, if not [`MASTER`].
    pub master_programs: Vec<&'static str>,
    /// Further arguments of every client.
    pub client_args: Vec<String>,
    /// Content of the cluster secret file, if there is to be one.
    pub secret: Option<String>,
    /// Where client `i` keeps its models, if not in the cluster's own folder.
    pub client_roots: Vec<Option<PathBuf>>,
    /// Node id of client `i`, if not its data address.
    pub node_ids: Vec<String>,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        Self {
            masters: 3,
            clients: 3,
            allow_sources: Vec::new(),
            raft_timers_ms: None,
            master_args: Vec::new(),
            master_programs: Vec::new(),
            client_args: Vec::new(),
            secret: None,
            client_roots: Vec::new(),
            node_ids: Vec::new(),
        }
    }
}

impl ClusterOptions {
    /// For tests of anything but elections: a machine that stands still for seconds starts none.
    pub fn calm() -> Self {
        Self {
            raft_timers_ms: Some([200, 1500, 3000]),
            ..Self::default()
        }
    }

    /// `raft_timers_ms` as arguments of a master.
    pub fn timer_args(&self) -> Vec<String> {
        let flags = ["--heartbeat-ms", "--election-min-ms", "--election-max-ms"];
        let timers = self.raft_timers_ms.into_iter().flatten();
        let args = flags.iter().zip(timers);
        args.flat_map(|(flag, ms)| [flag.to_string(), ms.to_string()])
            .collect()
    }
}

/// Where one process of a cluster lives.
#[derive(Clone, Debug)]
pub struct Seat {
    /// RPC address of a master, data address of a client.
    pub address: String,
    /// HTTP address.
    pub http: String,
    /// If not the namespace of this program.
    pub namespace: Option<Namespace>,
    /// Data folder of a master, root of a client.
    pub folder: PathBuf,
}

/// Where a whole cluster lives.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Logs and the secret go here.
    pub dir: PathBuf,
    /// Master `i` gets Raft id `i + 1` (until it is renewed).
    pub masters: Vec<Seat>,
    /// The clients.
    pub clients: Vec<Seat>,
}

/// Masters and clients; everything stops on drop.
pub struct Cluster {
    /// The masters.
    pub masters: Vec<Process>,
    /// The Raft id of each master: `i + 1`, until it is renewed.
    pub ids: Vec<u64>,
    /// Masters that are gone for good, with their Raft ids: for what they logged.
    pub retired: Vec<(u64, Process)>,
    /// The clients.
    pub clients: Vec<Process>,
    /// Node ids of the clients.
    pub nodes: Vec<String>,
    /// Where client `i` keeps its models.
    pub roots: Vec<PathBuf>,
    /// Data folder of each master.
    pub data_dirs: Vec<PathBuf>,
    /// HTTP base URL of each master.
    pub endpoints: Vec<String>,
    /// RPC address of each master.
    pub rpc_addresses: Vec<String>,
    /// HTTP base URL of each client.
    pub client_endpoints: Vec<String>,
    /// For requests to masters and clients.
    pub http: reqwest::Client,
    dir: PathBuf,
    /// Of a cluster on loopback.
    _temporary: Option<tempfile::TempDir>,
    /// Whether its end prints the ends of all logs: the test runner shows them only for a test that failed.
    tells_on_drop: bool,
    /// Held while this cluster exists; see [`ONE_AT_A_TIME`].
    _turn: Option<SemaphorePermit<'static>>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.tells_on_drop {
            eprintln!("{}", self.log_tails());
        }
    }
}

/// Tests of one program run on several threads, but one cluster at a time: on a 2-core machine two of them
/// would only disturb each other's timers.
static ONE_AT_A_TIME: Semaphore = Semaphore::const_new(1);

/// Lets this program have so many clusters at once from now on. For programs that compare them; call it once.
pub fn allow_side_by_side(clusters: usize) {
    ONE_AT_A_TIME.add_permits(clusters.saturating_sub(1));
}

impl Cluster {
    /// Starts everything and waits until every master is ready and every node is up. One cluster at a time
    /// exists per test program: starting a second one before dropping the first waits for ever.
    pub async fn start(options: ClusterOptions) -> Result<Self> {
        let turn = Self::turn().await?;
        let mut cluster = Self::prepare(&options)?;
        cluster._turn = Some(turn);
        cluster.tells_on_drop = true;
        cluster.start_all().await?;
        Ok(cluster)
    }

    /// Waits until no other cluster of this program exists that was started with a turn.
    pub async fn turn() -> Result<SemaphorePermit<'static>> {
        Ok(ONE_AT_A_TIME.acquire().await?)
    }

    /// Starts every process and waits until every master is ready and every node is up.
    pub async fn start_all(&mut self) -> Result<()> {
        for process in self.masters.iter_mut().chain(&mut self.clients) {
            process.start()?;
        }
        self.wait_ready().await
    }

    /// Lays out folders, ports and arguments on loopback without starting anything.
    pub fn prepare(options: &ClusterOptions) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("mooncake-test-").tempdir()?;
        let seat = |folder: PathBuf| Seat {
            address: loopback(),
            http: loopback(),
            namespace: None,
            folder,
        };
        let masters = (0..options.masters)
            .map(|i| seat(dir.path().join(format!("master-{}", i + 1))))
            .collect();
        let clients = (0..options.clients)
            .map(|i| {
                let given = options.client_roots.get(i).cloned().flatten();
                seat(given.unwrap_or_else(|| dir.path().join(format!("client-{i}"))))
            })
            .collect();
        let layout = Layout {
            dir: dir.path().to_owned(),
            masters,
            clients,
        };
        let mut cluster = Self::lay_out(options, layout)?;
        cluster._temporary = Some(dir);
        Ok(cluster)
    }

    /// The same where `layout` says; `options.client_roots` is not looked at. Nothing is started and nothing is
    /// removed on drop but the processes.
    pub fn lay_out(options: &ClusterOptions, layout: Layout) -> Result<Self> {
        let dir = layout.dir;
        let mut secret_args = Vec::new();
        if let Some(secret) = &options.secret {
            let path = dir.join("secret");
            std::fs::write(&path, secret)?;
            secret_args = vec!["--cluster-secret-file".to_owned(), path.display().to_string()];
        }
        let initial: Vec<_> = layout
            .masters
            .iter()
            .enumerate()
            .map(|(i, seat)| format!("{}={}/{}", i + 1, seat.address, seat.http))
            .collect();
        let rpc: Vec<_> = layout.masters.iter().map(|s| s.address.clone()).collect();
        let mut masters = Vec::new();
        for (i, seat) in layout.masters.iter().enumerate() {
            let mut args = strings(&[
                "--node-id",
                &(i + 1).to_string(),
                "--data-dir",
                &seat.folder.display().to_string(),
                "--rpc-address",
                &seat.address,
                "--http-address",
                &seat.http,
                "--initial-cluster",
                &initial.join(","),
                "--bootstrap",
            ]);
            args.extend(secret_args.iter().cloned());
            args.extend(options.timer_args());
            args.extend(options.master_args.iter().cloned());
            let process = Process::new(
                &dir,
                &format!("master-{}", i + 1),
                binary_path(options.master_programs.get(i).unwrap_or(&MASTER))?,
                args,
            );
            masters.push(process.in_namespace(seat.namespace.clone()));
        }
        let (mut clients, mut nodes) = (Vec::new(), Vec::new());
        for (i, seat) in layout.clients.iter().enumerate() {
            let node = options
                .node_ids
                .get(i)
                .cloned()
                .unwrap_or_else(|| seat.address.clone());
            std::fs::create_dir_all(&seat.folder)?;
            let mut args = strings(&[
                "--node-id",
                &node,
                "--data-address",
                &seat.address,
                "--http-address",
                &seat.http,
                "--root",
                &seat.folder.display().to_string(),
                "--masters",
                &rpc.join(","),
            ]);
            for prefix in &options.allow_sources {
                args.extend(strings(&["--allow-source", prefix]));
            }
            args.extend(secret_args.iter().cloned());
            args.extend(options.client_args.iter().cloned());
            // What is shaped, cut and counted is the network of the testbed; a card of this machine would go around it.
            if !args.iter().any(|a| a.starts_with("--transport")) {
                args.push("--transport=tcp".into());
            }
            let process = Process::new(
                &dir,
                &format!("client-{i}"),
                binary_path("mooncake_client")?,
                args,
            );
            clients.push(process.in_namespace(seat.namespace.clone()));
            nodes.push(node);
        }
        let urls = |seats: &[Seat]| seats.iter().map(|s| format!("http://{}", s.http)).collect();
        Ok(Self {
            ids: (1..=masters.len() as u64).collect(),
            retired: Vec::new(),
            masters,
            clients,
            nodes,
            endpoints: urls(&layout.masters),
            client_endpoints: urls(&layout.clients),
            data_dirs: layout.masters.into_iter().map(|s| s.folder).collect(),
            roots: layout.clients.into_iter().map(|s| s.folder).collect(),
            rpc_addresses: rpc,
            http: http_client()?,
            dir,
            _temporary: None,
            tells_on_drop: false,
            _turn: None,
        })
    }

    /// `ID=RPC/HTTP` of a master.
    pub fn member(&self, master: usize) -> String {
        let http = self.endpoints[master].trim_start_matches("http://");
        format!("{}={}/{http}", self.ids[master], self.rpc_addresses[master])
    }

    /// Runs `mooncakectl` against these masters: (exit code, standard output, standard error).
    pub async fn ctl(&self, endpoints: &[usize], args: &[&str]) -> Result<(i32, String, String)> {
        let mut all = Vec::new();
        for &master in endpoints {
            all.extend(strings(&["--endpoint", &self.endpoints[master]]));
        }
        all.extend(strings(args));
        run_to_end("mooncakectl", &all).await
    }

    /// The cluster's own folder; logs and secret are in it. Removed on drop, if the cluster made it.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The ends of all logs, for messages.
    pub fn log_tails(&self) -> String {
        let tails = self.masters.iter().chain(&self.clients).map(Process::log_tail);
        tails.collect::<Vec<_>>().join("\n")
    }

    /// Waits until every running master is ready and every running client's node is up.
    pub async fn wait_ready(&mut self) -> Result<()> {
        self.wait(async |cluster| {
            cluster.masters_ready().await?;
            cluster.nodes_up().await
        })
        .await
    }

    /// Waits until every running master is ready, whatever its nodes are.
    pub async fn wait_masters_ready(&mut self) -> Result<()> {
        self.wait(async |cluster| cluster.masters_ready().await).await
    }

    async fn wait(&mut self, mut ready: impl AsyncFnMut(&mut Self) -> Result<()>) -> Result<()> {
        let until = Instant::now() + READY_DEADLINE;
        loop {
            match ready(self).await {
                Ok(()) => return Ok(()),
                Err(e) if Instant::now() >= until => {
                    return Err(e.context(format!(
                        "not ready within {READY_DEADLINE:?}\n{}",
                        self.log_tails()
                    )));
                }
                Err(_) => tokio::time::sleep(POLL).await,
            }
        }
    }

    async fn masters_ready(&mut self) -> Result<()> {
        for i in 0..self.masters.len() {
            if self.masters[i].is_running() {
                let answer = self
                    .http
                    .get(format!("{}/readyz", self.endpoints[i]))
                    .send()
                    .await?;
                ensure!(
                    answer.status() == StatusCode::OK,
                    "master {} answers {}",
                    self.ids[i],
                    answer.status()
                );
            }
        }
        Ok(())
    }

    async fn nodes_up(&mut self) -> Result<()> {
        let want: Vec<_> = (0..self.clients.len())
            .filter(|&i| self.clients[i].is_running())
            .map(|i| self.nodes[i].clone())
            .collect();
        let nodes = self.get("/api/v1/nodes").await?;
        for id in want {
            let status = nodes["nodes"]
                .as_array()
                .and_then(|n| n.iter().find(|n| n["node_id"] == *id))
                .map(|n| n["status"].clone());
            ensure!(status == Some("up".into()), "node {id} is {status:?}");
        }
        Ok(())
    }

    /// Waits until the masters say of client `node` that it has this status.
    pub async fn wait_node_status(&mut self, node: usize, status: &str) -> Result<()> {
        let until = Instant::now() + READY_DEADLINE;
        loop {
            let nodes = self.get("/api/v1/nodes").await?;
            let all = nodes["nodes"].as_array().map(Vec::as_slice).unwrap_or_default();
            if all
                .iter()
                .any(|n| n["node_id"] == *self.nodes[node] && n["status"] == status)
            {
                return Ok(());
            }
            ensure!(
                Instant::now() < until,
                "node {} never turned {status}: {nodes:#}",
                self.nodes[node]
            );
            tokio::time::sleep(POLL).await;
        }
    }

    /// Index of the leading master, once the running ones agree on it.
    pub async fn leader(&mut self) -> Result<usize> {
        let until = Instant::now() + READY_DEADLINE;
        loop {
            for i in 0..self.masters.len() {
                if self.masters[i].is_running()
                    && let Ok(answer) = self
                        .http
                        .get(format!("{}/leaderz", self.endpoints[i]))
                        .send()
                        .await
                    && answer.status() == StatusCode::OK
                {
                    return Ok(i);
                }
            }
            ensure!(Instant::now() < until, "no leader within {READY_DEADLINE:?}");
            tokio::time::sleep(POLL).await;
        }
    }

    /// GET from any running master (503, 504 and connection errors move on to the next one, for a while).
    pub async fn get(&mut self, path: &str) -> Result<Value> {
        let until = Instant::now() + READY_DEADLINE;
        let mut last = anyhow::anyhow!("no master is running");
        loop {
            for i in 0..self.masters.len() {
                if !self.masters[i].is_running() {
                    continue;
                }
                match self.http.get(format!("{}{path}", self.endpoints[i])).send().await {
                    Ok(answer) if answer.status() == StatusCode::OK => return Ok(answer.json().await?),
                    Ok(answer) if is_passing(answer.status()) => {
                        last = anyhow::anyhow!("{path}: {}", answer.text().await?);
                    }
                    Ok(answer) => bail!("{path}: {} {}", answer.status(), answer.text().await?),
                    Err(e) => last = e.into(),
                }
            }
            if Instant::now() >= until {
                return Err(last);
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// POST a job to master `master`: (status, body). While the cluster has no leader, or a leader is lost on the way,
    /// the same request is repeated for a while, as callers are told to do; an election in the middle may so turn
    /// the 201 of a new job into the 200 of a repeat.
    pub async fn post_job_to(&self, master: usize, body: &Value) -> Result<(u16, Value)> {
        self.post_to(master, "", body).await
    }

    /// Cancels a job through master `master`, repeated in the same way: (status, body).
    pub async fn cancel_at(&self, master: usize, id: &str) -> Result<(u16, Value)> {
        self.post_to(master, &format!("/{id}/cancel"), &Value::Null).await
    }

    async fn post_to(&self, master: usize, path: &str, body: &Value) -> Result<(u16, Value)> {
        let url = format!("{}/api/v1/model-distribution/jobs{path}", self.endpoints[master]);
        let until = Instant::now() + READY_DEADLINE;
        loop {
            let answer = self.http.post(&url).json(body).send().await?;
            let status = answer.status();
            if is_passing(status) && Instant::now() < until {
                tokio::time::sleep(POLL).await;
                continue;
            }
            return Ok((status.as_u16(), answer.json().await?));
        }
    }

    /// Posts a job that must be accepted, new or repeated; gives the snapshot.
    pub async fn create(&mut self, body: &Value) -> Result<Value> {
        let (status, snapshot) = self.post_job(body).await?;
        ensure!(
            matches!(status, 200 | 201),
            "expected 201 (or 200, after an election), got {status}: {snapshot:#}"
        );
        Ok(snapshot)
    }

    /// POST a job to the first running master.
    pub async fn post_job(&mut self, body: &Value) -> Result<(u16, Value)> {
        let i = (0..self.masters.len())
            .find(|&i| self.masters[i].is_running())
            .context("no master runs")?;
        self.post_job_to(i, body).await
    }

    /// The job's snapshot.
    pub async fn job(&mut self, id: &str) -> Result<Value> {
        self.get(&format!("/api/v1/model-distribution/jobs?job_id={id}"))
            .await
    }

    /// Waits until the job's snapshot satisfies `done`.
    pub async fn wait_job(
        &mut self,
        id: &str,
        deadline: Duration,
        done: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        let until = Instant::now() + deadline;
        loop {
            let snapshot = self.job(id).await?;
            if done(&snapshot) {
                return Ok(snapshot);
            }
            if Instant::now() >= until {
                bail!(
                    "job {id} is not there after {deadline:?}: {snapshot:#}\n{}",
                    self.log_tails()
                );
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Waits until the job has ended.
    pub async fn wait_ended(&mut self, id: &str, deadline: Duration) -> Result<Value> {
        self.wait_job(id, deadline, |s| {
            matches!(s["status"].as_str(), Some("completed" | "failed" | "canceled"))
        })
        .await
    }

    /// Creates a job, waits for `completed`.
    pub async fn complete(&mut self, body: &Value, deadline: Duration) -> Result<Value> {
        let snapshot = self.create(body).await?;
        let id = snapshot["job_id"].as_str().context("no job_id")?.to_owned();
        let snapshot = self.wait_ended(&id, deadline).await?;
        ensure!(
            snapshot["status"] == "completed",
            "the job did not complete: {snapshot:#}"
        );
        Ok(snapshot)
    }

    /// The placement of client `node` in a snapshot.
    pub fn placement<'a>(&self, snapshot: &'a Value, node: usize) -> &'a Value {
        snapshot["placements"]
            .as_array()
            .and_then(|p| p.iter().find(|p| p["node_id"] == *self.nodes[node]))
            .unwrap_or(&Value::Null)
    }
}

/// No leader at the moment, or its answer was lost: asking again may help, and a repeat does no harm.
fn is_passing(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT
    )
}

/// Runs one of the binaries to its end: (exit code, standard output, standard error).
pub async fn run_to_end(binary: &str, args: &[String]) -> Result<(i32, String, String)> {
    let output = tokio::process::Command::new(binary_path(binary)?)
        .args(args)
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(READY_DEADLINE * 2, output)
        .await
        .with_context(|| format!("{binary} {args:?} does not end"))??;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok((
        output.status.code().unwrap_or(-1),
        text(&output.stdout),
        text(&output.stderr),
    ))
}

fn strings(args: &[&str]) -> Vec<String> {
    args.iter().map(|s| (*s).to_owned()).collect()
}

/// A free loopback address below the ephemeral range, never given twice by this process.
pub fn loopback() -> String {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    static SEED: Once = Once::new();
    // Tests run as processes side by side: start at a place of our own.
    SEED.call_once(|| NEXT.store((std::process::id() % 180) as u16 * 100, Ordering::Relaxed));
    loop {
        let port = 11_000 + NEXT.fetch_add(1, Ordering::Relaxed) % 20_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return format!("127.0.0.1:{port}");
        }
    }
}

/// An HTTP client without proxies, for loopback.
pub fn http_client() -> Result<reqwest::Client> {
    static TLS: Once = Once::new();
    TLS.call_once(|| {
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
    Ok(reqwest::Client::builder()
        .no_proxy()
        .timeout(Duration::from_secs(90))
        .build()?)
}
