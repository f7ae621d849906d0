//! What `/metrics` shows. Everything is read when it is asked for; nothing is counted twice.

use crate::{
    executor::{Reports, TaskKind, Totals},
    session::{RoundTrips, Status},
    store::{ArtifactState, Store},
    swarm::Swarm,
    transport::{RDMA, TCP, rdma::Fabric},
};
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, info::Info},
    registry::{Registry, Unit},
};
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::sync::watch;

/// Where the numbers come from.
#[derive(Clone)]
pub struct Sources {
    /// Holdings and space.
    pub store: Store,
    /// Tasks.
    pub reports: Arc<Reports>,
    /// The session.
    pub status: watch::Receiver<Status>,
    /// Of its heartbeats.
    pub round_trips: RoundTrips,
    /// What went to and came from peers.
    pub swarm: Swarm,
    /// If blocks may go by it.
    pub rdma: Option<Arc<Fabric>>,
}

impl EncodeLabelValue for TaskKind {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> fmt::Result {
        self.name().encode(encoder)
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct KindLabel {
    kind: TaskKind,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OutcomeLabel {
    kind: TaskKind,
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TransportLabel {
    transport: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
}

/// The OpenMetrics text. Blocking: it asks the disk for its free space.
pub fn render(sources: &Sources) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("mooncake_client");
    registry.register(
        "build",
        "The running program",
        Info::new(vec![("version", env!("CARGO_PKG_VERSION").to_owned())]),
    );
    let Totals {
        moved,
        outcomes,
        running,
    } = sources.reports.totals();
    let mut bytes = |name: &str, help: &str, value: u64| {
        let counter = Counter::<u64>::default();
        counter.inc_by(value);
        registry.register_with_unit(name, help, Unit::Bytes, counter);
    };
    bytes(
        "fetched",
        "Payload read from sources and peers, repeats included",
        moved.fetched_bytes,
    );
    bytes(
        "refetched",
        "Payload read again although it was read and taken before",
        moved.refetched_bytes,
    );
    bytes(
        "duplicate",
        "Payload that arrived and was not taken: a second copy of a block, or an answer that came too late",
        moved.duplicate_bytes,
    );
    let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (stats, received) = (sources.swarm.stats(), sources.swarm.received());
    let sent = load(&stats.uploaded_bytes);
    bytes("served", "Payload sent to other nodes", sent);
    let sent_by_rdma = load(&stats.uploaded_by_rdma_bytes);
    for (name, help, by_tcp, by_rdma) in [
        (
            "sent",
            "Payload sent to other nodes, by transport; by RDMA: given to them to read",
            sent.saturating_sub(sent_by_rdma),
            sent_by_rdma,
        ),
        (
            "received",
            "Payload received from other nodes, by transport",
            load(&received.tcp_bytes),
            load(&received.rdma_bytes),
        ),
    ] {
        let family = Family::<TransportLabel, Counter>::default();
        for (transport, value) in [(TCP, by_tcp), (RDMA, by_rdma)] {
            family.get_or_create(&TransportLabel { transport }).inc_by(value);
        }
        registry.register_with_unit(name, help, Unit::Bytes, family);
    }
    if let Some(fabric) = &sources.rdma {
        rdma(&mut registry, fabric);
    }

    let tasks = Family::<OutcomeLabel, Counter>::default();
    for ((kind, outcome), count) in outcomes {
        tasks.get_or_create(&OutcomeLabel { kind, outcome }).inc_by(count);
    }
    registry.register(
        "tasks",
        "Tasks that reached an outcome; `running` counts starts",
        tasks,
    );
    let now = Family::<KindLabel, Gauge>::default();
    for kind in [TaskKind::Acquire, TaskKind::Replicate] {
        now.get_or_create(&KindLabel { kind })
            .set(gauge(running.get(&kind).copied().unwrap_or(0)));
    }
    registry.register("tasks_running", "Tasks that have not ended", now);

    let artifacts = Family::<StateLabel, Gauge>::default();
    let mut verified = 0;
    let count = |state| artifacts.get_or_create(&StateLabel { state }).inc();
    for state in ["partial", "whole", "staged"] {
        artifacts.get_or_create(&StateLabel { state }).set(0);
    }
    for holding in sources.store.holdings() {
        verified += holding.verified_bytes;
        count(state_name(&holding.state));
    }
    registry.register(
        "artifacts",
        "Model versions on this node, by state",
        artifacts.clone(),
    );
    let plain = |registry: &mut Registry, name: &str, help: &str, unit: Option<Unit>, value: u64| {
        let gauge_metric = Gauge::<i64>::default();
        gauge_metric.set(gauge(value));
        match unit {
            Some(unit) => registry.register_with_unit(name, help, unit, gauge_metric),
            None => registry.register(name, help, gauge_metric),
        }
    };
    plain(
        &mut registry,
        "verified",
        "Bytes held whose digest was checked",
        Some(Unit::Bytes),
        verified,
    );
    for (name, help, value) in [
        (
            "disk_free",
            "Free on the filesystem of the models",
            sources.store.free_bytes(),
        ),
        (
            "disk_capacity",
            "Size of the filesystem of the models",
            sources.store.capacity_bytes(),
        ),
    ] {
        // A disk that does not answer is shown by the missing line, not by a zero.
        if let Ok(value) = value {
            plain(&mut registry, name, help, Some(Unit::Bytes), value);
        }
    }
    let registered = matches!(*sources.status.borrow(), Status::Registered { .. });
    plain(
        &mut registry,
        "session_registered",
        "Whether the leading master has this node",
        None,
        registered.into(),
    );

    registry.register_with_unit(
        "heartbeat",
        "From a heartbeat to the master's answer to it, since this process started",
        Unit::Seconds,
        sources.round_trips.seconds(),
    );

    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

fn rdma(registry: &mut Registry, fabric: &Fabric) {
    let (serving, receiving) = (fabric.rdma().serving(), fabric.rdma().receiving());
    let fallbacks = Counter::<u64>::default();
    fallbacks.inc_by(fabric.fallbacks());
    let help = "How often RDMA failed, in set-up or in use, so that blocks went over TCP";
    registry.register("rdma_fallbacks", help, fallbacks);
    for (name, help, unit, value) in [
        (
            "rdma_registered",
            "Memory registered with RDMA devices",
            Some(Unit::Bytes),
            serving.bytes() + receiving.bytes(),
        ),
        (
            "rdma_registered_peak",
            "The most memory that was registered with RDMA devices since this process started, at most",
            Some(Unit::Bytes),
            serving.peak_bytes() + receiving.peak_bytes(),
        ),
        (
            "rdma_registered_limit",
            "Bound of the memory registered with RDMA devices",
            Some(Unit::Bytes),
            serving.max_bytes() + receiving.max_bytes(),
        ),
        (
            "rdma_ports",
            "Ports of RDMA devices that can be used",
            None,
            fabric.rdma().report().ways.len(),
        ),
    ] {
        let metric = Gauge::<i64>::default();
        metric.set(gauge(value as u64));
        match unit {
            Some(unit) => registry.register_with_unit(name, help, unit, metric),
            None => registry.register(name, help, metric),
        }
    }
}

/// The name in JSON and labels.
pub fn state_name(state: &ArtifactState) -> &'static str {
    match state {
        ArtifactState::Partial => "partial",
        ArtifactState::Whole => "whole",
        ArtifactState::Staged { .. } => "staged",
    }
}

fn gauge(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
