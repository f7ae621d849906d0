//! What `/metrics` shows: `master_…` is about this process, `mooncake_…` about what the cluster does. No metric
//! has a job or a model as a label, so their number does not grow with use.

use crate::context::MasterContext;
use axum::http::Method;
use mooncake_proto::api::{JobStatus, NodeStatus};
use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
        info::Info,
    },
    registry::Registry,
};
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    method: String,
    path: String,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ProposalLabels {
    command: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StatusLabels {
    status: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FromLabels {
    from: &'static str,
}

/// Where fetched bytes came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    /// Outside the cluster.
    Source,
    /// Another node.
    Peer,
}

/// The registry and every metric in it.
pub struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    request_seconds: Histogram,
    proposals: Family<ProposalLabels, Counter>,
    fetched_bytes: Family<FromLabels, Counter>,
    term: Gauge,
    applied_index: Gauge,
    last_log_index: Gauge,
    snapshot_index: Gauge,
    purged_index: Gauge,
    is_leader: Gauge,
    ready: Gauge,
    sessions: Gauge,
    long_polls: Gauge,
    jobs: Family<StatusLabels, Gauge>,
    nodes: Family<StatusLabels, Gauge>,
    models: Gauge,
    /// Other masters came to lead.
    pub leader_changes: Counter,
    /// Requests answered by the leader for this master.
    pub forwarded: Counter,
    /// Sends to a leader that did not bring an answer.
    pub forward_failures: Counter,
    /// Jobs this master created.
    pub jobs_created: Counter,
    /// Orders handed to sessions.
    pub orders: Counter,
    /// Times this process noticed that it had been standing still.
    pub stalls: Counter,
    /// Bytes that nodes fetched again although they had fetched them before.
    pub refetched_bytes: Counter,
    /// Times a node reported a peer that sent wrong blocks or none.
    pub bad_sources: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Registers everything.
    pub fn new() -> Self {
        let mut registry = Registry::default();
        let build = Info::new(vec![
            ("version", env!("CARGO_PKG_VERSION")),
            ("component", "master"),
        ]);
        registry.register("mooncake_build", "The software", build);
        macro_rules! metric {
            ($name:literal, $help:literal, $metric:expr) => {{
                let metric = $metric;
                registry.register($name, $help, metric.clone());
                metric
            }};
        }
        // 1 ms to 65 s; long polls are left out.
        let request_seconds = Histogram::new(exponential_buckets(0.001, 2.0, 17));
        Self {
            requests: metric!(
                "master_http_requests",
                "HTTP requests answered",
                Family::default()
            ),
            request_seconds: metric!(
                "master_http_request_seconds",
                "Time to answer, long polls left out",
                request_seconds
            ),
            proposals: metric!(
                "master_proposals",
                "Commands proposed by the sessions and the reconciler",
                Family::default()
            ),
            fetched_bytes: metric!(
                "mooncake_fetched_bytes",
                "Bytes that nodes reported to have fetched",
                Family::default()
            ),
            term: metric!("master_raft_term", "Raft term", Gauge::default()),
            applied_index: metric!(
                "master_raft_applied_index",
                "Last log index applied",
                Gauge::default()
            ),
            last_log_index: metric!(
                "master_raft_last_log_index",
                "Last log index on disk",
                Gauge::default()
            ),
            snapshot_index: metric!(
                "master_raft_snapshot_index",
                "Log index up to which the newest snapshot on disk covers",
                Gauge::default()
            ),
            purged_index: metric!(
                "master_raft_purged_index",
                "Log index up to which the log is purged: who lacks an entry up to here is sent a snapshot",
                Gauge::default()
            ),
            is_leader: metric!("master_is_leader", "1 on the leader", Gauge::default()),
            ready: metric!(
                "master_service_ready",
                "1 if this master is ready",
                Gauge::default()
            ),
            sessions: metric!(
                "master_node_sessions",
                "Nodes connected to this master",
                Gauge::default()
            ),
            long_polls: metric!("master_long_polls", "Long polls waiting", Gauge::default()),
            jobs: metric!("mooncake_jobs", "Jobs by status", Family::default()),
            nodes: metric!("mooncake_nodes", "Nodes by status", Family::default()),
            models: metric!("mooncake_models", "Model versions known", Gauge::default()),
            leader_changes: metric!("master_leader_changes", "Leaders seen", Counter::default()),
            forwarded: metric!(
                "master_forwarded_requests",
                "Requests passed on and answered",
                Counter::default()
            ),
            forward_failures: metric!(
                "master_forward_failures",
                "Sends to the leader without an answer",
                Counter::default()
            ),
            jobs_created: metric!(
                "mooncake_jobs_created",
                "Jobs created through this master",
                Counter::default()
            ),
            orders: metric!(
                "master_orders",
                "Orders handed to node sessions",
                Counter::default()
            ),
            stalls: metric!(
                "master_stalls",
                "Times this process stood still",
                Counter::default()
            ),
            refetched_bytes: metric!(
                "mooncake_refetched_bytes",
                "Bytes fetched again",
                Counter::default()
            ),
            bad_sources: metric!(
                "mooncake_bad_sources",
                "Reports of peers that served badly",
                Counter::default()
            ),
            registry,
        }
    }

    /// One request was answered.
    pub(crate) fn request(
        &self,
        path: &str,
        method: &Method,
        status: u16,
        elapsed: Duration,
        long_poll: bool,
    ) {
        // Callers choose the method: only those that HTTP knows become labels.
        let known = [
            Method::GET,
            Method::POST,
            Method::PUT,
            Method::DELETE,
            Method::HEAD,
            Method::OPTIONS,
            Method::PATCH,
        ];
        let method = if known.contains(method) {
            method.as_str()
        } else {
            "other"
        };
        let labels = RequestLabels {
            method: method.into(),
            path: path.into(),
            status,
        };
        self.requests.get_or_create(&labels).inc();
        if !long_poll {
            self.request_seconds.observe(elapsed.as_secs_f64());
        }
    }

    /// One command of the sessions or the reconciler went through the log, or did not.
    pub(crate) fn proposal(&self, command: &'static str, outcome: &'static str) {
        self.proposals
            .get_or_create(&ProposalLabels { command, outcome })
            .inc();
    }

    /// Nodes reported that they fetched bytes.
    pub(crate) fn fetched(&self, from: From, bytes: u64) {
        let from = match from {
            From::Source => "source",
            From::Peer => "peer",
        };
        self.fetched_bytes
            .get_or_create(&FromLabels { from })
            .inc_by(bytes);
    }

    /// The OpenMetrics text.
    pub(crate) fn encode(&self, ctx: &MasterContext) -> String {
        self.refresh(ctx);
        let mut text = String::new();
        // Writing into a string has no failure of its own.
        let _ = text::encode(&mut text, &self.registry);
        text
    }

    fn refresh(&self, ctx: &MasterContext) {
        let cluster = ctx.consensus.cluster();
        self.term.set(cluster.term as i64);
        self.applied_index.set(cluster.applied_index as i64);
        self.last_log_index.set(cluster.last_log_index as i64);
        self.snapshot_index.set(cluster.snapshot_index as i64);
        self.purged_index.set(cluster.purged_index as i64);
        self.is_leader
            .set(ctx.consensus.leadership().borrow().is_serving.into());
        self.ready.set(ctx.is_ready().into());
        self.sessions.set(ctx.sessions.count() as i64);
        let polls = crate::context::MAX_LONG_POLLS - ctx.long_polls.available_permits();
        self.long_polls.set(polls as i64);
        let (jobs, nodes, models) = {
            let state = ctx.consensus.state();
            let mut nodes = [0i64; 3];
            for (_, node) in state.nodes() {
                nodes[node.status as usize] += 1;
            }
            (state.count_jobs(), nodes, state.artifacts().count())
        };
        for status in [
            JobStatus::Planned,
            JobStatus::Seeding,
            JobStatus::Replicating,
            JobStatus::Completed,
            JobStatus::Failed,
            JobStatus::Canceled,
        ] {
            let count = jobs.get(&status).copied().unwrap_or(0);
            self.jobs
                .get_or_create(&StatusLabels {
                    status: job_status(status),
                })
                .set(count as i64);
        }
        for (status, name) in [
            (NodeStatus::Up, "up"),
            (NodeStatus::Suspected, "suspected"),
            (NodeStatus::Down, "down"),
        ] {
            self.nodes
                .get_or_create(&StatusLabels { status: name })
                .set(nodes[status as usize]);
        }
        self.models.set(models as i64);
    }
}

fn job_status(status: JobStatus) -> &'static str {
    match status {
        JobStatus::Planned => "planned",
        JobStatus::Seeding => "seeding",
        JobStatus::Replicating => "replicating",
        JobStatus::Completed => "completed",
        JobStatus::Failed => "failed",
        JobStatus::Canceled => "canceled",
    }
}
