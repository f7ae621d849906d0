//! Callers at work: what a control plane asks of a cluster, from a seed, with everything recorded.
//!
//! - [`Planner`] says what one caller asks next: pure, from a seed.
//! - [`Workload`] runs callers through the load balancer and directly at each master, a writer at a fixed pace
//!   (its gaps are the time in which no write was possible), an observer of the masters, an auditor who hashes
//!   every folder as soon as an answer calls it staged, and a node that reports what is over (`ghost`).
//!
//! Reproducible from the seed: what each caller would ask, of which models and nodes. Not reproducible: what it is
//! answered, and so which of the jobs it comes back to.

mod audit;
mod caller;
mod ghost;
mod library;
mod observe;
mod planner;
mod standstill;

pub use audit::Auditor;
pub use caller::{Caller, Endpoint, writes};
pub use ghost::{GHOST, GHOST_JOB};
pub use library::{Library, Template};
pub use observe::{Observer, probe};
pub use planner::{Known, Planner, Sent, Step};
pub use standstill::StandstillWatch;

use crate::history::History;
use anyhow::{Result, anyhow};
use ghost::Ghost;
use mooncake_proto::hello::Secret;
use std::{sync::Arc, time::Duration};
use tokio::{sync::watch, task::JoinSet};

/// Longest wait for an answer, but for that of a long poll: longer than any election.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of the caller that writes at a fixed pace; others count up from 0.
pub const WRITER: u32 = 1_000_000;
/// Number of the caller that reads everything once more at the end.
pub const LAST_READER: u32 = 1_000_001;

/// What a workload works on.
#[derive(Clone)]
pub struct Scene {
    /// The load balancer first, then each master.
    pub endpoints: Vec<Endpoint>,
    /// `host:port` of each master's RPC port, in the order of their Raft ids from 1.
    pub rpc_addresses: Vec<String>,
    /// Cluster secret.
    pub secret: Option<String>,
    /// Node ids.
    pub nodes: Vec<String>,
    /// The models.
    pub library: Arc<Library>,
    /// For requests.
    pub http: reqwest::Client,
}

impl Scene {
    /// The cluster secret, checked.
    fn secret(&self) -> Result<Option<Secret>> {
        let secret = self.secret.as_ref().map(|s| Secret::new(s.as_bytes()));
        secret.transpose().map_err(|e| anyhow!("the cluster secret: {e}"))
    }
}

/// How much is asked.
#[derive(Clone, Debug)]
pub struct WorkloadOptions {
    /// Of every random choice.
    pub seed: u64,
    /// Callers.
    pub callers: u32,
    /// Longest pause of a caller between two requests.
    pub max_pause: Duration,
    /// Between two writes of the writer.
    pub write_every: Duration,
    /// Between two looks at each master.
    pub observe_every: Duration,
}

impl Default for WorkloadOptions {
    fn default() -> Self {
        Self {
            seed: 0,
            callers: 6,
            max_pause: Duration::from_millis(100),
            write_every: Duration::from_millis(100),
            observe_every: Duration::from_millis(500),
        }
    }
}

/// A workload under way.
pub struct Workload {
    stop: watch::Sender<bool>,
    tasks: JoinSet<Result<()>>,
    auditor: Arc<Auditor>,
    known: Arc<Known>,
}

impl Workload {
    /// Starts everybody.
    pub fn start(scene: &Scene, options: &WorkloadOptions, history: &Arc<History>) -> Result<Self> {
        let stop = watch::Sender::new(false);
        let auditor = Arc::new(Auditor::new(scene.library.clone(), history.clone()));
        let known = Arc::new(Known::default());
        let mut tasks = JoinSet::new();
        for number in 0..options.callers {
            let planner = Planner::new(
                options.seed,
                number,
                scene.library.clone(),
                scene.nodes.clone(),
                known.clone(),
            );
            let caller = Caller::new(number, scene, history.clone(), auditor.clone());
            tasks.spawn(caller.run(planner, options.seed, options.max_pause, stop.subscribe()));
        }
        let writer = Caller::new(WRITER, scene, history.clone(), auditor.clone());
        tasks.spawn(writes(
            writer,
            scene.clone(),
            known.clone(),
            options.write_every,
            stop.subscribe(),
        ));
        let ghost = Ghost::new(scene, history.clone())?;
        tasks.spawn(ghost.run(stop.subscribe()));
        let observer = Observer::new(scene, history.clone())?;
        tasks.spawn(observer.run(options.observe_every, stop.subscribe()));
        Ok(Self {
            stop,
            tasks,
            auditor,
            known,
        })
    }

    /// Lets everybody finish what is under way. What every folder was found to be is recorded when this returns.
    pub async fn stop(mut self) -> Result<(Arc<Known>, Arc<Auditor>)> {
        self.stop.send_replace(true);
        while let Some(ended) = self.tasks.join_next().await {
            ended??;
        }
        self.auditor.settle().await?;
        Ok((self.known, self.auditor))
    }
}
