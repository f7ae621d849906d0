//! What the HTTP API, the node sessions and the reconciler of one master share.

use crate::{
    clock::Clock,
    consensus::{Change, Handle},
    http::{body::BodyBudget, manifests::ManifestCache, waiters::JobWaiters},
    metrics::Metrics,
    plan::PlanConfig,
    session::Sessions,
    threads::Threads,
};
use futures_util::{FutureExt as _, TryFutureExt as _};
use mooncake_proto::{digest::Algorithm, hello::HelloStream};
use mooncake_state::Limits;
use std::{
    io,
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::sync::{Notify, Semaphore, watch};
use tokio_stream::Stream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Requests served at once, probes excepted: beyond it callers get 429 rather than a growing queue.
pub const MAX_REQUESTS: usize = 1024;
/// Long polls waiting at once: each costs a task and some tens of KiB with its connection and no room for a body, so
/// there may be more of them; those of all masters meet at the leader. With the requests they fit into the connections that the HTTP port takes.
pub const MAX_LONG_POLLS: usize = 16_384;

/// Threads for node sessions: one may be at a plan's facts while the other answers heartbeats.
const SESSION_THREADS: usize = 2;
/// Longest time for what is under way at a stop.
const STOP_TIME: Duration = Duration::from_secs(10);
/// Ready as long as a leader was heard within this time: an election is no reason to be taken out.
pub(crate) const LEADER_WITHIN: Duration = Duration::from_secs(5);

/// What can be configured.
#[derive(Clone, Debug)]
pub struct Options {
    /// Shown by the cluster status.
    pub cluster_id: String,
    /// Refuse manifests whose checksums are no digests.
    pub require_checksums: bool,
    /// For the blocks of new artifacts.
    pub algorithm: Algorithm,
    /// Retention: committed when this master comes to lead, if it differs.
    pub limits: Limits,
    /// How long a request is held while there is no leader: one election.
    pub hold: Duration,
    /// Interval of the session's heartbeats.
    pub heartbeat_interval: Duration,
    /// A session without a sign of life for this long is lost.
    pub session_timeout: Duration,
    /// How long a session that ended may take to come back before its node is suspected.
    pub suspect_after: Duration,
    /// How long a suspected node may stay away before it is down.
    pub node_grace: Duration,
    /// How long an attempt may stand still on a connected node before it has failed; zero: for ever.
    pub no_progress: Duration,
    /// How long a new leader waits for nodes to come back before it suspects any.
    pub reconnect_window: Duration,
    /// The reconciler's tick.
    pub tick: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            cluster_id: mooncake_proto::DEFAULT_CLUSTER_ID.to_owned(),
            require_checksums: false,
            algorithm: Algorithm::default(),
            limits: Limits::default(),
            hold: Duration::from_secs(2),
            heartbeat_interval: Duration::from_secs(1),
            session_timeout: Duration::from_secs(4),
            suspect_after: Duration::from_secs(1),
            node_grace: Duration::from_secs(30),
            no_progress: Duration::from_secs(600),
            reconnect_window: Duration::from_secs(5),
            tick: Duration::from_millis(250),
        }
    }
}

/// See the module docs.
pub struct MasterContext {
    /// Consensus.
    pub consensus: Handle,
    /// Configuration.
    pub options: Options,
    /// What `/metrics` shows.
    pub metrics: Metrics,
    /// Nodes connected to this master, and the facts they told.
    pub sessions: Sessions,
    /// Wakes the reconciler.
    pub wake: Notify,
    pub(crate) waiters: JobWaiters,
    pub(crate) manifests: ManifestCache,
    pub(crate) bodies: BodyBudget,
    pub(crate) forwarder: crate::http::forward::Forwarder,
    pub(crate) requests: Arc<Semaphore>,
    pub(crate) long_polls: Arc<Semaphore>,
    clock: Clock,
    draining: AtomicBool,
    /// Long polls end now, with what there is.
    pub(crate) stopping: CancellationToken,
}

impl MasterContext {
    /// Around running consensus. Nothing is served yet: see [`Serving`].
    pub fn new(consensus: Handle, options: Options) -> Arc<Self> {
        Arc::new(Self {
            metrics: Metrics::new(),
            sessions: Sessions::default(),
            wake: Notify::new(),
            waiters: JobWaiters::default(),
            manifests: ManifestCache::default(),
            bodies: BodyBudget::default(),
            forwarder: Default::default(),
            requests: Arc::new(Semaphore::new(MAX_REQUESTS)),
            long_polls: Arc::new(Semaphore::new(MAX_LONG_POLLS)),
            clock: Clock::default(),
            stopping: CancellationToken::new(),
            draining: AtomicBool::new(false),
            consensus,
            options,
        })
    }

    /// This moment, for commands: see [`crate::clock`].
    pub fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    /// This master leads in `term`: what it observed in another one is forgotten, and its clock is set.
    pub(crate) fn begin(&self, term: u64) {
        let mut facts = self.sessions.facts_mut();
        if facts.is_new(term) {
            self.clock.set_anew(self.consensus.state().time_ms());
            let config = PlanConfig {
                reconnect_window_ms: self.options.reconnect_window.as_millis() as u64,
                grace_ms: self.options.node_grace.as_millis() as u64,
                no_progress_ms: self.options.no_progress.as_millis() as u64,
            };
            facts.begin(term, self.clock.now_ms(), config);
        }
    }

    /// Whether this master should get requests.
    pub fn is_ready(&self) -> bool {
        !self.is_draining() && self.consensus.readiness(LEADER_WITHIN).is_ok()
    }

    /// From now on not ready: a load balancer takes this master out while it still answers.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// See [`MasterContext::drain`].
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    async fn watch_changes(self: Arc<Self>, cancel: CancellationToken) {
        use tokio::sync::broadcast::error::RecvError;
        let mut changes = self.consensus.changes();
        loop {
            let event = tokio::select! {
                event = changes.recv() => event,
                () = cancel.cancelled() => return,
            };
            match event {
                Ok(Change::Jobs(jobs)) => jobs.iter().for_each(|job| self.waiters.wake(job)),
                Ok(Change::Everything) | Err(RecvError::Lagged(_)) => self.waiters.wake_all(),
                Err(RecvError::Closed) => return,
            }
            self.wake.notify_one();
        }
    }

    async fn watch_leader(self: Arc<Self>, cancel: CancellationToken) {
        let mut watch = self.consensus.leadership();
        let mut before = None;
        loop {
            let leader = watch.borrow_and_update().leader.as_ref().map(|l| l.id);
            if leader.is_some() && leader != before {
                self.metrics.leader_changes.inc();
                before = leader;
            }
            tokio::select! {
                changed = watch.changed() => if changed.is_err() { return },
                () = cancel.cancelled() => return,
            }
        }
    }
}

/// Everything that runs on one master beside consensus.
pub struct Serving {
    ctx: Arc<MasterContext>,
    /// The HTTP port stops taking connections.
    http: CancellationToken,
    /// Sessions, reconciler and watchers end.
    rest: CancellationToken,
    tasks: TaskTracker,
    /// The first part that ended although nobody stopped it.
    failed: watch::Receiver<Option<Arc<str>>>,
    /// Of the sessions.
    _threads: Threads,
}

/// Runs a part without which this master must not go on: if it ends before `stop`, by itself or by a panic, that is
/// told to [`Serving::failed`]. A leader without a reconciler would take jobs and never do them.
async fn vital(
    what: &'static str,
    part: impl Future<Output = Result<(), String>>,
    stop: CancellationToken,
    failed: watch::Sender<Option<Arc<str>>>,
) {
    let outcome = AssertUnwindSafe(part).catch_unwind().await;
    if stop.is_cancelled() {
        return;
    }
    let why = match outcome {
        Ok(Ok(())) => format!("{what} ended"),
        Ok(Err(error)) => format!("{what} ended: {error}"),
        Err(_) => format!("{what} panicked; the log above says where"),
    };
    failed.send_if_modified(|first| {
        let is_first = first.is_none();
        if is_first {
            *first = Some(why.into());
        }
        is_first
    });
}

impl Serving {
    /// Starts the HTTP port, the node sessions, the reconciler and the wakers of long polls.
    pub fn start<S>(ctx: Arc<MasterContext>, http: std::net::TcpListener, sessions: S) -> io::Result<Self>
    where
        S: Stream<Item = io::Result<HelloStream>> + Send + 'static,
    {
        let threads = Threads::start("sessions", SESSION_THREADS)?;
        http.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(http)?;
        let (http, rest) = (ctx.stopping.clone(), CancellationToken::new());
        let tasks = TaskTracker::new();
        let (failing, failed) = watch::channel(None);
        let port = crate::http::serve(ctx.clone(), listener, http.clone());
        tasks.spawn(vital(
            "the HTTP port",
            port.map(Ok),
            http.clone(),
            failing.clone(),
        ));
        let served = crate::session::serve(ctx.clone(), sessions, rest.clone());
        tasks.spawn_on(
            vital(
                "the node sessions' port",
                served.map_err(|error| error.to_string()),
                rest.clone(),
                failing.clone(),
            ),
            threads.handle(),
        );
        tasks.spawn(vital(
            "the watch on changes",
            ctx.clone().watch_changes(rest.clone()).map(Ok),
            rest.clone(),
            failing.clone(),
        ));
        tasks.spawn(vital(
            "the watch on the leader",
            ctx.clone().watch_leader(rest.clone()).map(Ok),
            rest.clone(),
            failing.clone(),
        ));
        let reconciler = crate::reconciler::run(ctx.clone(), rest.clone());
        tasks.spawn(vital(
            "the reconciler",
            reconciler.map(Ok),
            rest.clone(),
            failing.clone(),
        ));
        tasks.close();
        Ok(Self {
            ctx,
            http,
            rest,
            tasks,
            failed,
            _threads: threads,
        })
    }

    /// Waits until a part ends although nobody stopped it, and says which and why: the process must end then.
    pub fn failed(&self) -> impl Future<Output = Arc<str>> + use<> {
        let mut failed = self.failed.clone();
        async move {
            match failed.wait_for(Option::is_some).await.map(|why| why.clone()) {
                Ok(Some(why)) => why,
                // All parts have ended, stopped.
                _ => std::future::pending().await,
            }
        }
    }

    /// What it all shares.
    pub fn context(&self) -> &Arc<MasterContext> {
        &self.ctx
    }

    /// Takes no more connections, finishes the requests under way (long polls are answered now), ends the sessions;
    /// bounded in time.
    pub async fn stop(&self) {
        self.http.cancel();
        self.rest.cancel();
        if tokio::time::timeout(STOP_TIME, self.tasks.wait()).await.is_err() {
            tracing::warn!(
                "requests were still under way after {} s: they are cut off",
                STOP_TIME.as_secs()
            );
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.http.cancel();
        self.rest.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_part_that_ends_by_itself_is_told() {
        let run = async |part: futures_util::future::BoxFuture<'static, Result<(), String>>,
                         stopped: bool| {
            let (failing, failed) = watch::channel(None);
            let stop = CancellationToken::new();
            if stopped {
                stop.cancel();
            }
            vital("the part", part, stop, failing).await;
            failed.borrow().as_deref().map(str::to_owned)
        };
        let text = run(async { panic!("on purpose") }.boxed(), false).await;
        assert!(text.unwrap().contains("the part panicked"));
        let text = run(async { Err("no port".to_owned()) }.boxed(), false).await;
        assert_eq!(text.unwrap(), "the part ended: no port");
        assert_eq!(
            run(async { Ok(()) }.boxed(), false).await.unwrap(),
            "the part ended"
        );
        assert_eq!(run(async { Ok(()) }.boxed(), true).await, None, "it was stopped");
    }
}
