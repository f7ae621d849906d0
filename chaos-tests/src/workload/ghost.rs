//! A node that moves no bytes and reports too late: every report of a failed attempt is repeated while the next attempt is
//! under way, as a node does that was cut off and comes back. The state machine must take none of them.
//!
//! It speaks the session protocol itself ([`NodeSession`]), under an id of its own, and is ordered only what its own jobs
//! want, of a model that no other job takes. What it does is in the history as [`Record::StaleReport`]; whether it changed
//! anything is judged by the replay of the log.

use super::{Planner, Scene};
use crate::{
    history::{History, Record, StaleReport},
    session::NodeSession,
};
use anyhow::{Context, Result, bail};
use mooncake_proto::{
    hello::Secret,
    pb::session::{self as pb, master_frame::Body as Down, node_frame::Body as Up},
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::watch;

/// Its id: an address at which nobody listens.
pub const GHOST: &str = "192.0.2.7:7000";
/// How the ids of its jobs begin.
pub const GHOST_JOB: &str = "ghost-";
const JOBS: &str = "/api/v1/model-distribution/jobs";
/// Silence of a master after which the ghost looks for the leader again.
const SILENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(500);
/// After the end of the workload, for its last job to end.
const LAST_JOB: Duration = Duration::from_secs(20);

/// See the module docs.
pub(super) struct Ghost {
    scene: Scene,
    history: Arc<History>,
    secret: Option<Secret>,
    made: u64,
    job: Option<String>,
}

impl Ghost {
    pub(super) fn new(scene: &Scene, history: Arc<History>) -> Result<Self> {
        Ok(Self {
            secret: scene.secret()?,
            scene: scene.clone(),
            history,
            made: 0,
            job: None,
        })
    }

    /// Until it is stopped, and until its last job has ended then: a live job would keep the cluster from being well.
    pub(super) async fn run(mut self, mut stop: watch::Receiver<bool>) -> Result<()> {
        let mut until = None;
        loop {
            if *stop.borrow() {
                let until = *until.get_or_insert_with(|| Instant::now() + LAST_JOB);
                if self.job.is_none() || Instant::now() >= until {
                    return Ok(());
                }
            }
            // Whatever ends a session, the next one finds out: faults are what this is about.
            let _ = self.session(&stop).await;
            tokio::select! {
                () = tokio::time::sleep(PAUSE) => {}
                _ = stop.wait_for(|stop| *stop), if !*stop.borrow() => {}
            }
        }
    }

    async fn session(&mut self, stop: &watch::Receiver<bool>) -> Result<()> {
        let master = self.leader().await?;
        let rpc = &self.scene.rpc_addresses[master];
        let join = NodeSession::join_with(rpc, GHOST, self.secret.clone());
        let mut session = tokio::time::timeout(SILENCE, join).await??;
        let every = Duration::from_millis(session.welcome.heartbeat_interval_ms.max(1).into());
        let mut beats = tokio::time::interval(every);
        let (mut sequence, mut last) = (0, None::<pb::Order>);
        loop {
            if self.job.is_none() {
                if *stop.borrow() {
                    return Ok(());
                }
                self.create(master).await?;
            }
            tokio::select! {
                _ = beats.tick() => {
                    sequence += 1;
                    let beat = pb::Heartbeat { sequence, free_bytes: 1 << 40, answers: 0 };
                    session.send(Up::Heartbeat(beat)).await?;
                    self.look(master).await?;
                }
                frame = session.next() => match frame? {
                    Down::Order(order) if matches!(order.body, Some(pb::order::Body::Acquire(_))) => {
                        if let Some(old) = last.take().filter(|old| old.fence != order.fence) {
                            self.history.record(Record::StaleReport(StaleReport {
                                at_us: self.history.now_us(),
                                attempt: old.fence.map_or(0, |f| f.attempt),
                            }));
                            session.fail(&old).await?;
                        }
                        session.fail(&order).await?;
                        last = Some(order);
                    }
                    Down::Redirect(_) | Down::Refused(_) => bail!("sent away"),
                    _ => {}
                },
            }
        }
    }

    /// The master that leads, by its own word.
    async fn leader(&self) -> Result<usize> {
        for master in 0..self.scene.rpc_addresses.len() {
            let request = self.get(master, "/leaderz");
            if request.send().await.is_ok_and(|a| a.status().is_success()) {
                return Ok(master);
            }
        }
        bail!("nobody leads")
    }

    fn url(&self, master: usize, path: &str) -> String {
        // The load balancer comes first.
        format!("{}{path}", self.scene.endpoints[master + 1].url)
    }

    fn get(&self, master: usize, path: &str) -> reqwest::RequestBuilder {
        self.scene.http.get(self.url(master, path)).timeout(SILENCE)
    }

    async fn create(&mut self, master: usize) -> Result<()> {
        let model = self.scene.library.reserved().context("no model is reserved")?;
        let id = format!("{GHOST_JOB}{}", self.made);
        let sent = Planner::job(&id, model, GHOST, &[GHOST.to_owned()]);
        let url = self.url(master, JOBS);
        let post = self.scene.http.post(url).json(&*sent.request).timeout(SILENCE);
        // An answer that was lost leaves a job that the next try finds.
        let answer = post.send().await?.error_for_status();
        answer.context("the job of a node that reports too late")?;
        self.made += 1;
        self.job = Some(id);
        Ok(())
    }

    /// Forgets the job if it has ended.
    async fn look(&mut self, master: usize) -> Result<()> {
        let Some(job) = &self.job else { return Ok(()) };
        let answer = self.get(master, &format!("{JOBS}/{job}")).send().await?;
        let seen: mooncake_proto::api::JobSnapshot = answer.error_for_status()?.json().await?;
        if seen.status.is_terminal() {
            self.job = None;
        }
        Ok(())
    }
}
