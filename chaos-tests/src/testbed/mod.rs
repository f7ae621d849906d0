//! The testbed: the real binaries, one network namespace each, on one bridge.
//!
//! ```no_run
//! # async fn f() -> anyhow::Result<()> {
//! use mooncake_chaos::testbed::{Testbed, TestbedOptions};
//! let mut bed = Testbed::start(TestbedOptions { masters: 3, clients: 2, ..Default::default() }).await?;
//! let leader = bed.cluster.leader().await?;
//! bed.cluster.masters[leader].kill();
//! bed.network.partition(&[&["m1", "m2"], &["m3"]])?;
//! bed.network.heal()?;
//! bed.cluster.http.get(format!("{}/api/v1/nodes", bed.url())).send().await?; // through the load balancer
//! bed.finish();
//! # Ok(()) }
//! ```
//!
//! Hosts are called `m1` … (master `i` is `m<i+1>`, as its Raft id), `c0` …, `lb`, `src`. All are reachable from the
//! default namespace. What a run makes is removed whatever happens, see [`run`]; where a test does not get as far as
//! [`Testbed::finish`], the logs of all processes are kept below the target folder and the path is printed.
//!
//! Needs root, iproute2, nftables, and for the balancers haproxy and nginx. Not guaranteed: that hosts have separate
//! CPUs or page caches. Two runs of one program take turns.

mod balancer;
mod namespace;
pub mod network;
pub mod run;
pub mod tool;
pub mod wire;

pub use balancer::{Balancer, BalancerKind};
pub use namespace::{Namespace, command};
pub use network::{Host, Network, Rule, Traffic, parse_rate};
pub use wire::{Wire, WireFault};

use crate::{
    cluster::{Cluster, ClusterOptions, Layout, READY_DEADLINE, Seat},
    disk::Disk,
    process::{Process, binary_path},
    source::HttpSource,
};
use anyhow::{Context, Result, bail, ensure};
use run::Run;
use std::{
    net::SocketAddrV4,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};
use tokio::sync::SemaphorePermit;

const POLL: Duration = Duration::from_millis(20);
const RPC_PORT: u16 = 50051;
const MASTER_HTTP_PORT: u16 = 9003;
const DATA_PORT: u16 = 50052;
const CLIENT_HTTP_PORT: u16 = 9300;
const SOURCE_PORT: u16 = 8000;
/// Last bytes of addresses: the source's, the balancer's, the first master's, the first client's.
const SOURCE_HOST: u8 = 5;
const BALANCER_HOST: u8 = 10;
const FIRST_MASTER: u8 = 11;
const FIRST_CLIENT: u8 = 101;
const MAX_MASTERS: usize = 9;
const MAX_CLIENTS: usize = 150;
/// Everything beyond loopback needs one; what it is does not matter.
const SECRET: &str = "the secret of every cluster in a testbed";
const FAKETIME_DIR: &str = "/usr/lib";

/// What to start.
#[derive(Clone, Debug)]
pub struct TestbedOptions {
    /// Number of masters, all voters.
    pub masters: usize,
    /// Number of clients.
    pub clients: usize,
    /// Rate of every master's, client's and the source's link in bits per second, both ways.
    pub link: Option<u64>,
    /// In front of the masters.
    pub balancer: Option<BalancerKind>,
    /// Gives every master's data folder a disk of its own of so many bytes, which can fail.
    pub master_disk_bytes: Option<u64>,
    /// The same for every client's root.
    pub client_disk_bytes: Option<u64>,
    /// Puts the roots of all clients into memory (one tmpfs) of at most so many bytes: for measurements that shall not
    /// be about this machine's disk.
    pub client_memory_bytes: Option<u64>,
    /// Lets a test set the wall clock of each master and client ([`Testbed::set_clock`]).
    pub clocks: bool,
    /// Further arguments of every master.
    pub master_args: Vec<String>,
    /// Further arguments of every client.
    pub client_args: Vec<String>,
    /// Prefixes that clients may read from beside the testbed's own source.
    pub allow_sources: Vec<String>,
}

impl Default for TestbedOptions {
    fn default() -> Self {
        Self {
            masters: 3,
            clients: 3,
            link: None,
            balancer: Some(BalancerKind::HaProxy),
            master_disk_bytes: None,
            client_disk_bytes: None,
            client_memory_bytes: None,
            clocks: false,
            master_args: Vec::new(),
            client_args: Vec::new(),
            allow_sources: Vec::new(),
        }
    }
}

/// See the module docs. Fields are dropped in this order: processes, then what they stand on.
pub struct Testbed {
    /// Masters and clients, their addresses, and requests to them.
    pub cluster: Cluster,
    /// The load balancer.
    pub balancer: Option<Balancer>,
    /// Disk of each master, with `master_disk_bytes`.
    pub master_disks: Vec<Disk>,
    /// Disk of each client, with `client_disk_bytes`.
    pub client_disks: Vec<Disk>,
    /// Hosts, links and partitions.
    pub network: Network,
    source: Option<HttpSource>,
    link: Option<u64>,
    clocks: bool,
    finished: bool,
    run: Run,
    _turn: SemaphorePermit<'static>,
}

impl Testbed {
    /// Starts everything and waits until every master is ready, every node is up and the balancer answers.
    pub async fn start(options: TestbedOptions) -> Result<Self> {
        let mut bed = Self::prepare(options.clone()).await?;
        bed.cluster.start_all().await?;
        if let Some(kind) = options.balancer {
            bed.start_balancer(kind).await?;
        }
        Ok(bed)
    }

    /// Makes hosts, disks and folders; nothing runs yet. Waits for the testbed before it to be dropped.
    pub async fn prepare(options: TestbedOptions) -> Result<Self> {
        ensure!(
            (1..=MAX_MASTERS).contains(&options.masters) && options.clients <= MAX_CLIENTS,
            "a testbed has 1 to {MAX_MASTERS} masters and 0 to {MAX_CLIENTS} clients"
        );
        ensure!(
            options.client_disk_bytes.is_none() || options.client_memory_bytes.is_none(),
            "clients have disks that fail, or memory, not both"
        );
        let turn = Cluster::turn().await?;
        let run = Run::begin()?;
        let dir = run.dir().to_owned();
        let mut hosts = vec![("lb".to_owned(), BALANCER_HOST), ("src".to_owned(), SOURCE_HOST)];
        hosts.extend((0..options.masters).map(|i| (master_host(i), FIRST_MASTER + i as u8)));
        hosts.extend((0..options.clients).map(|i| (client_host(i), FIRST_CLIENT + i as u8)));
        let network = Network::create(&run, &hosts)?;
        if let Some(rate) = options.link {
            for (name, _) in hosts.iter().filter(|(name, _)| name != "lb") {
                network.shape(name, Some(rate))?;
            }
        }
        let (mut master_disks, mut client_disks) = (Vec::new(), Vec::new());
        let (mut masters, mut clients) = (Vec::new(), Vec::new());
        for i in 0..options.masters {
            let name = format!("master-{}", i + 1);
            let folder = folder(&dir, &name, options.master_disk_bytes, &mut master_disks)?;
            masters.push(seat(
                network.host(&master_host(i))?,
                RPC_PORT,
                MASTER_HTTP_PORT,
                folder,
            ));
        }
        let roots = match options.client_memory_bytes {
            Some(bytes) => memory(&dir, bytes)?,
            None => dir.clone(),
        };
        for i in 0..options.clients {
            let name = format!("client-{i}");
            let folder = folder(&roots, &name, options.client_disk_bytes, &mut client_disks)?;
            clients.push(seat(
                network.host(&client_host(i))?,
                DATA_PORT,
                CLIENT_HTTP_PORT,
                folder,
            ));
        }
        let source = format!("http://{}:{SOURCE_PORT}/", network.host("src")?.address);
        let mut allow_sources = options.allow_sources;
        allow_sources.push(source);
        let cluster_options = ClusterOptions {
            masters: options.masters,
            clients: options.clients,
            allow_sources,
            master_args: options.master_args,
            client_args: options.client_args,
            secret: Some(SECRET.into()),
            ..Default::default()
        };
        let layout = Layout {
            dir,
            masters,
            clients,
        };
        let mut bed = Self {
            cluster: Cluster::lay_out(&cluster_options, layout)?,
            balancer: None,
            master_disks,
            client_disks,
            network,
            source: None,
            link: options.link,
            clocks: options.clocks,
            finished: false,
            run,
            _turn: turn,
        };
        if options.clocks {
            bed.give_clocks()?;
        }
        Ok(bed)
    }

    /// The run's number, folder and names.
    pub fn run(&self) -> &Run {
        &self.run
    }

    /// The run's folder: logs, data, the configuration of the balancer.
    pub fn dir(&self) -> &Path {
        self.run.dir()
    }

    /// The rate that links were given at the start.
    pub fn link(&self) -> Option<u64> {
        self.link
    }

    /// Base URL of the load balancer, or of the first master where there is none.
    pub fn url(&self) -> &str {
        match &self.balancer {
            Some(balancer) => &balancer.url,
            None => &self.cluster.endpoints[0],
        }
    }

    /// Starts the load balancer and waits until it passes requests on.
    pub async fn start_balancer(&mut self, kind: BalancerKind) -> Result<()> {
        ensure!(self.balancer.is_none(), "there is a balancer already");
        let masters: Vec<_> = self
            .cluster
            .endpoints
            .iter()
            .map(|e| e.trim_start_matches("http://").to_owned())
            .collect();
        let balancer = Balancer::start(kind, self.run.dir(), self.network.host("lb")?, &masters)?;
        let url = format!("{}/readyz", balancer.url);
        self.balancer = Some(balancer);
        let until = Instant::now() + READY_DEADLINE;
        loop {
            let answer = self.cluster.http.get(&url).send().await;
            if answer.as_ref().is_ok_and(|a| a.status().is_success()) {
                return Ok(());
            }
            let process = self.balancer.as_mut().map(|b| &mut b.process);
            if let Some(process) = process
                && (!process.is_running() || Instant::now() >= until)
            {
                bail!(
                    "the load balancer does not pass requests on: {answer:?}\n{}",
                    process.log_tail()
                );
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// HAProxy as shipped in front of something else than masters, with another path for its health check.
    pub fn balancer_for(&self, servers: &[String], check: &str) -> Result<Balancer> {
        Balancer::start_for(self.run.dir(), self.network.host("lb")?, servers, check)
    }

    /// Serves the files below `folder` from the host `src`; clients may read from it. Replaces an earlier one.
    pub async fn serve(&mut self, folder: &Path) -> Result<&HttpSource> {
        self.source = None;
        let host = self.network.host_mut("src")?;
        let address = format!("{}:{SOURCE_PORT}", host.address);
        let folder = folder.to_owned();
        let source = host
            .runtime()?
            .spawn(async move { HttpSource::listen(&folder, &address).await })
            .await??;
        Ok(self.source.insert(source))
    }

    /// What [`Testbed::serve`] started.
    pub fn source(&self) -> Result<&HttpSource> {
        self.source.as_ref().context("this testbed serves no folder")
    }

    /// Puts a wire under what the host `from` dials at `to`: its connections there are reset and come back through
    /// the wire. [`Testbed::remove_wire`] undoes it.
    pub async fn add_wire(&mut self, from: &str, to: SocketAddrV4) -> Result<(Wire, u64)> {
        let runtime = self.network.host_mut(from)?.runtime()?.clone();
        let wire = Wire::start(&runtime, to).await?;
        let rule = Rule::Redirect { to, port: wire.port };
        let token = self.network.add_rule(from, rule)?;
        Ok((wire, token))
    }

    /// Ends a wire; its connections break, new ones are direct.
    pub fn remove_wire(&mut self, wire: Wire, token: u64) -> Result<()> {
        self.network.remove_rules(&[token])?;
        drop(wire);
        Ok(())
    }

    /// Data address of a client.
    pub fn data_address(&self, client: usize) -> Result<SocketAddrV4> {
        Ok(SocketAddrV4::new(
            self.network.host(&client_host(client))?.address,
            DATA_PORT,
        ))
    }

    /// RPC address of a master.
    pub fn rpc_address(&self, master: usize) -> Result<SocketAddrV4> {
        Ok(SocketAddrV4::new(
            self.network.host(&master_host(master))?.address,
            RPC_PORT,
        ))
    }

    /// Lays out one more master on a host of its own, which is made if it is not there from an earlier one. Not
    /// started, and no member yet; its folder is on no disk that can fail. Gives its index.
    pub fn add_master(&mut self) -> Result<usize> {
        let index = self.cluster.masters.len();
        ensure!(index < MAX_MASTERS, "a testbed has at most {MAX_MASTERS} masters");
        let name = master_host(index);
        if self.network.host(&name).is_err() {
            self.network.add(&name, FIRST_MASTER + index as u8)?;
            self.network.shape(&name, self.link)?;
        }
        let used = self.cluster.ids.len() + self.cluster.retired.len();
        let folder = self.dir().join(format!("master-data-{}", used + 1));
        let seat = seat(self.network.host(&name)?, RPC_PORT, MASTER_HTTP_PORT, folder);
        let index = self.cluster.add_master_at(seat)?;
        if self.clocks {
            self.set_clock(&name, 0)?;
            let file = self.clock_file(&name).display().to_string();
            self.cluster.masters[index].set_env("FAKETIME_TIMESTAMP_FILE", file);
        }
        Ok(index)
    }

    /// Sets the wall clock of one host's process (`m1`, `c0`) so many seconds off, running or not; its monotonic
    /// clock goes on. Needs `clocks`.
    pub fn set_clock(&self, host: &str, offset_s: i64) -> Result<()> {
        ensure!(self.clocks, "this testbed was started without `clocks`");
        // By rename: the library may read at any time.
        let (path, new) = (self.clock_file(host), self.clock_file(&format!("{host}.new")));
        std::fs::write(&new, format!("{offset_s:+}s\n"))?;
        std::fs::rename(new, path)?;
        Ok(())
    }

    fn clock_file(&self, host: &str) -> PathBuf {
        self.dir().join(format!("clock-{host}"))
    }

    /// libfaketime in front of the C library: per process, adjustable while it runs, and nothing in the product.
    fn give_clocks(&mut self) -> Result<()> {
        let library = walkdir::WalkDir::new(FAKETIME_DIR)
            .max_depth(3)
            .into_iter()
            .filter_map(Result::ok)
            .find(|e| e.file_name() == "libfaketime.so.1")
            .context("libfaketime.so.1 is not below /usr/lib: install Debian's libfaketime")?;
        let hosts: Vec<String> = (0..self.cluster.masters.len())
            .map(master_host)
            .chain((0..self.cluster.clients.len()).map(client_host))
            .collect();
        for host in &hosts {
            self.set_clock(host, 0)?;
        }
        let files: Vec<String> = hosts
            .iter()
            .map(|h| self.clock_file(h).display().to_string())
            .collect();
        let processes = self.cluster.masters.iter_mut().chain(&mut self.cluster.clients);
        for (process, file) in processes.zip(files) {
            process.set_env("LD_PRELOAD", library.path().display().to_string());
            process.set_env("FAKETIME_TIMESTAMP_FILE", file);
            process.set_env("FAKETIME_NO_CACHE", "1");
            process.set_env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
            process.set_env("NO_FAKE_STAT", "1");
        }
        Ok(())
    }

    /// The test passed: nothing is kept. Without it the logs are.
    pub fn finish(mut self) {
        self.finished = true;
    }

    fn keep_logs(&self) -> Result<PathBuf> {
        let target = binary_path("..")?;
        static KEPT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("{}-{}", std::process::id(), KEPT.fetch_add(1, Ordering::Relaxed));
        let folder = target.join("chaos-logs").join(name);
        std::fs::create_dir_all(&folder)?;
        for entry in std::fs::read_dir(self.dir())? {
            let path = entry?.path();
            let wanted = path
                .extension()
                .is_some_and(|e| e == "log" || e == "cfg" || e == "conf");
            if let (true, Some(name)) = (wanted, path.file_name()) {
                std::fs::copy(&path, folder.join(name))?;
            }
        }
        Ok(folder.canonicalize()?)
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        if !self.finished {
            match self.keep_logs() {
                Ok(folder) => eprintln!("testbed: logs are kept in {}", folder.display()),
                Err(e) => eprintln!("testbed: the logs could not be kept: {e:#}"),
            }
        }
        let processes = self.cluster.masters.iter_mut().chain(&mut self.cluster.clients);
        processes.for_each(Process::kill);
    }
}

/// Host of master `i`.
pub fn master_host(i: usize) -> String {
    format!("m{}", i + 1)
}

/// Host of client `i`.
pub fn client_host(i: usize) -> String {
    format!("c{i}")
}

fn seat(host: &Host, port: u16, http_port: u16, folder: PathBuf) -> Seat {
    Seat {
        address: format!("{}:{port}", host.address),
        http: format!("{}:{http_port}", host.address),
        namespace: Some(host.namespace.clone()),
        folder,
    }
}

/// A tmpfs below `dir`; the run unmounts it.
fn memory(dir: &Path, bytes: u64) -> Result<PathBuf> {
    let path = dir.join("memory");
    std::fs::create_dir(&path)?;
    let size = format!("size={bytes}");
    command(
        "mount",
        &["-t", "tmpfs", "-o", &size, "tmpfs", &path.display().to_string()],
        "",
    )?;
    Ok(path)
}

/// A folder of its own, on a disk of its own if `size` says so. Not the root of the disk: that holds `lost+found`.
fn folder(dir: &Path, name: &str, size: Option<u64>, disks: &mut Vec<Disk>) -> Result<PathBuf> {
    let Some(size) = size else {
        return Ok(dir.join(name));
    };
    let disk = Disk::create(dir, name, size)?;
    let folder = disk.path().join("data");
    disks.push(disk);
    Ok(folder)
}
