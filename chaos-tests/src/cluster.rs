//! A cluster of real processes on loopback.

use anyhow::{Context, Result, bail, ensure};
use reqwest::StatusCode;
use serde_json::Value;
use std::{
    fs::File,
    net::TcpListener,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Once,
        atomic::{AtomicU16, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::sync::{Semaphore, SemaphorePermit};

/// How long a cluster may take to form, or to have a leader again, on a busy 2-core machine.
pub const READY_DEADLINE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// What to start.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// Number of masters, all voters.
    pub masters: usize,
    /// Number of clients.
    pub clients: usize,
    /// Given to clients as `--allow-source`.
    pub allow_sources: Vec<String>,
    /// Further arguments of every master.
    pub master_args: Vec<String>,
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
            master_args: Vec::new(),
            client_args: Vec::new(),
            secret: None,
            client_roots: Vec::new(),
            node_ids: Vec::new(),
        }
    }
}

/// One process that can be killed and started again with the same arguments.
pub struct Process {
    /// `master-1`, `client-25001`.
    pub name: String,
    program: PathBuf,
    args: Vec<String>,
    log: PathBuf,
    child: Option<Child>,
}

impl Process {
    /// Starts it (again).
    pub fn start(&mut self) -> Result<()> {
        self.start_with(&[])
    }

    /// Starts it (again) with arguments added.
    pub fn start_with(&mut self, more: &[String]) -> Result<()> {
        ensure!(self.child.is_none(), "{} is already running", self.name);
        let log = File::options().create(true).append(true).open(&self.log)?;
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .args(more)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        // SAFETY: prctl is async-signal-safe. It makes the kernel end the process with this test, however the
        // test ends.
        unsafe {
            command.pre_exec(|| {
                rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
                    .map_err(Into::into)
            });
        }
        let child = command.spawn().with_context(|| {
            format!(
                "cannot start {}: build the binaries first (cargo build --workspace)",
                self.program.display()
            )
        })?;
        self.child = Some(child);
        Ok(())
    }

    /// SIGKILL, and waits until it is gone.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) -> Result<()> {
        rustix::process::kill_process(self.rustix_pid()?, signal)?;
        Ok(())
    }

    /// SIGTERM, then waits for the exit status.
    pub async fn terminate(&mut self, deadline: Duration) -> Result<std::process::ExitStatus> {
        self.signal(rustix::process::Signal::TERM)?;
        self.wait_exit(deadline).await
    }

    /// Waits for it to end by itself.
    pub async fn wait_exit(&mut self, deadline: Duration) -> Result<std::process::ExitStatus> {
        let until = Instant::now() + deadline;
        loop {
            let child = self.child.as_mut().context("not running")?;
            if let Some(status) = child.try_wait()? {
                self.child = None;
                return Ok(status);
            }
            ensure!(
                Instant::now() < until,
                "{} did not end within {deadline:?}\n{}",
                self.name,
                self.log_tail()
            );
            tokio::time::sleep(POLL).await;
        }
    }

    /// Its process id.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    fn rustix_pid(&self) -> Result<rustix::process::Pid> {
        let pid = self
            .pid()
            .with_context(|| format!("{} is not running", self.name))?;
        rustix::process::Pid::from_raw(pid as i32).context("pid 0")
    }

    /// Whether it runs now.
    pub fn is_running(&mut self) -> bool {
        self.child
            .as_mut()
            .is_some_and(|c| matches!(c.try_wait(), Ok(None)))
    }

    /// Peak resident memory so far, in bytes (`VmHWM`).
    pub fn peak_memory_bytes(&self) -> Result<u64> {
        let pid = self.pid().context("not running")?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status
            .lines()
            .find_map(|l| l.strip_prefix("VmHWM:"))
            .context("no VmHWM")?;
        let kib: u64 = line.trim().trim_end_matches(" kB").trim().parse()?;
        Ok(kib << 10)
    }

    /// Starts a new measurement of [`peak_memory_bytes`](Self::peak_memory_bytes).
    pub fn reset_peak_memory(&self) -> Result<()> {
        let pid = self.pid().context("not running")?;
        // 5 sets the high-water mark to what is resident now (proc_pid_clear_refs(5)).
        std::fs::write(format!("/proc/{pid}/clear_refs"), "5")?;
        Ok(())
    }

    /// Everything it logged.
    pub fn log(&self) -> String {
        std::fs::read(&self.log)
            .map(|b| String::from_utf8_lossy(&b).into_owned())
            .unwrap_or_default()
    }

    /// The end of its log, for messages.
    pub fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<_> = log.lines().collect();
        let from = lines.len().saturating_sub(25);
        format!(
            "--- end of the log of {} ---\n{}",
            self.name,
            lines[from..].join("\n")
        )
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Masters and clients; everything stops on drop.
pub struct Cluster {
    /// The masters; master `i` has Raft id `i + 1`.
    pub masters: Vec<Process>,
    /// The clients.
    pub clients: Vec<Process>,
    /// Node ids of the clients.
    pub nodes: Vec<String>,
    /// Where client `i` keeps its models.
    pub roots: Vec<PathBuf>,
    /// HTTP base URL of each master.
    pub endpoints: Vec<String>,
    /// RPC address of each master.
    pub rpc_addresses: Vec<String>,
    /// HTTP base URL of each client.
    pub client_endpoints: Vec<String>,
    /// For requests to masters and clients.
    pub http: reqwest::Client,
    dir: tempfile::TempDir,
    /// Held while this cluster exists; see [`ONE_AT_A_TIME`].
    _turn: Option<SemaphorePermit<'static>>,
}

/// Tests of one program run on several threads, but one cluster at a time: on a 2-core machine two of them
/// would only disturb each other's timers.
static ONE_AT_A_TIME: Semaphore = Semaphore::const_new(1);

impl Cluster {
    /// Starts everything and waits until every master is ready and every node is up. One cluster at a time
    /// exists per test program: starting a second one before dropping the first waits for ever.
    pub async fn start(options: ClusterOptions) -> Result<Self> {
        let turn = ONE_AT_A_TIME.acquire().await?;
        let mut cluster = Self::prepare(&options)?;
        cluster._turn = Some(turn);
        for process in cluster.masters.iter_mut().chain(&mut cluster.clients) {
            process.start()?;
        }
        cluster.wait_ready().await?;
        Ok(cluster)
    }

    /// Lays out folders, ports and arguments without starting anything.
    pub fn prepare(options: &ClusterOptions) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("mooncake-test-").tempdir()?;
        let mut secret_args = Vec::new();
        if let Some(secret) = &options.secret {
            let path = dir.path().join("secret");
            std::fs::write(&path, secret)?;
            secret_args = vec!["--cluster-secret-file".to_owned(), path.display().to_string()];
        }
        let rpc: Vec<String> = (0..options.masters).map(|_| loopback()).collect();
        let http: Vec<String> = (0..options.masters).map(|_| loopback()).collect();
        let initial = rpc.iter().zip(&http).enumerate();
        let initial: Vec<_> = initial
            .map(|(i, (rpc, http))| format!("{}={rpc}/{http}", i + 1))
            .collect();
        let mut masters = Vec::new();
        for i in 0..options.masters {
            let name = format!("master-{}", i + 1);
            let mut args = strings(&[
                "--node-id",
                &(i + 1).to_string(),
                "--data-dir",
                &dir.path().join(&name).display().to_string(),
                "--rpc-address",
                &rpc[i],
                "--http-address",
                &http[i],
                "--initial-cluster",
                &initial.join(","),
                "--bootstrap",
            ]);
            args.extend(secret_args.iter().cloned());
            args.extend(options.master_args.iter().cloned());
            masters.push(process(dir.path(), name, "mooncake_master", args)?);
        }
        let (mut clients, mut nodes, mut roots, mut client_endpoints) = (vec![], vec![], vec![], vec![]);
        for i in 0..options.clients {
            let data = loopback();
            let node = options.node_ids.get(i).cloned().unwrap_or_else(|| data.clone());
            let client_http = loopback();
            let name = format!("client-{i}");
            let root = options
                .client_roots
                .get(i)
                .cloned()
                .flatten()
                .unwrap_or_else(|| dir.path().join(&name));
            std::fs::create_dir_all(&root)?;
            let mut args = strings(&[
                "--node-id",
                &node,
                "--data-address",
                &data,
                "--http-address",
                &client_http,
                "--root",
                &root.display().to_string(),
                "--masters",
                &rpc.join(","),
            ]);
            for prefix in &options.allow_sources {
                args.extend(strings(&["--allow-source", prefix]));
            }
            args.extend(secret_args.iter().cloned());
            args.extend(options.client_args.iter().cloned());
            clients.push(process(dir.path(), name, "mooncake_client", args)?);
            client_endpoints.push(format!("http://{client_http}"));
            nodes.push(node);
            roots.push(root);
        }
        Ok(Self {
            masters,
            clients,
            nodes,
            roots,
            endpoints: http.iter().map(|a| format!("http://{a}")).collect(),
            rpc_addresses: rpc,
            client_endpoints,
            http: http_client()?,
            dir,
            _turn: None,
        })
    }

    /// The cluster's own folder (removed on drop).
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Waits until every running master is ready and every running client's node is up.
    pub async fn wait_ready(&mut self) -> Result<()> {
        let until = Instant::now() + READY_DEADLINE;
        loop {
            match self.ready().await {
                Ok(()) => return Ok(()),
                Err(e) if Instant::now() >= until => {
                    let tails: Vec<_> = self
                        .masters
                        .iter()
                        .chain(&self.clients)
                        .map(Process::log_tail)
                        .collect();
                    return Err(e.context(format!(
                        "not ready within {READY_DEADLINE:?}\n{}",
                        tails.join("\n")
                    )));
                }
                Err(_) => tokio::time::sleep(POLL).await,
            }
        }
    }

    async fn ready(&mut self) -> Result<()> {
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
                    i + 1,
                    answer.status()
                );
            }
        }
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

    /// GET from any running master (503 and connection errors move on to the next one, for a while).
    pub async fn get(&mut self, path: &str) -> Result<Value> {
        let until = Instant::now() + Duration::from_secs(15);
        let mut last = anyhow::anyhow!("no master is running");
        loop {
            for i in 0..self.masters.len() {
                if !self.masters[i].is_running() {
                    continue;
                }
                match self.http.get(format!("{}{path}", self.endpoints[i])).send().await {
                    Ok(answer) if answer.status() == StatusCode::OK => return Ok(answer.json().await?),
                    Ok(answer) if answer.status() == StatusCode::SERVICE_UNAVAILABLE => {
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

    /// POST a job to master `master`: (status, body).
    pub async fn post_job_to(&self, master: usize, body: &Value) -> Result<(u16, Value)> {
        let url = format!("{}/api/v1/model-distribution/jobs", self.endpoints[master]);
        let answer = self.http.post(url).json(body).send().await?;
        Ok((answer.status().as_u16(), answer.json().await?))
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
                let tails: Vec<_> = self
                    .masters
                    .iter()
                    .chain(&self.clients)
                    .map(Process::log_tail)
                    .collect();
                bail!(
                    "job {id} is not there after {deadline:?}: {snapshot:#}\n{}",
                    tails.join("\n")
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

    /// Posts a job, expects 201, waits for `completed`.
    pub async fn complete(&mut self, body: &Value, deadline: Duration) -> Result<Value> {
        let (status, snapshot) = self.post_job(body).await?;
        ensure!(status == 201, "expected 201, got {status}: {snapshot:#}");
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

fn process(dir: &Path, name: String, binary: &str, args: Vec<String>) -> Result<Process> {
    let log = dir.join(format!("{name}.log"));
    Ok(Process {
        program: binary_path(binary)?,
        args,
        log,
        name,
        child: None,
    })
}

/// The binary from the target folder this test was built into.
pub fn binary_path(name: &str) -> Result<PathBuf> {
    let exe = std::env::current_exe()?;
    let folder = exe
        .ancestors()
        .find(|d| d.ends_with("debug") || d.ends_with("release"));
    Ok(folder
        .context("this test does not run from a target folder")?
        .join(name))
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
