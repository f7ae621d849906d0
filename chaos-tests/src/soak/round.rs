//! One round.

use super::{
    report::{MET_NOTHING, RoundReport, summarise},
    schedule::{self, Means, Step},
};
use crate::{
    checks::{self, Convergence, Elected, Evidence, Served, downloads::most_covered, log},
    cluster::{NODE_DOWN, SNAPSHOT_INSTALLED},
    history::{History, Phase},
    nemesis::{Injected, Nemesis},
    process::Process,
    testbed::{BalancerKind, Testbed, TestbedOptions},
    workload::{
        self, Auditor, Caller, Endpoint, Known, LAST_READER, Library, Observer, Scene, StandstillWatch,
        Workload, WorkloadOptions,
    },
};
use anyhow::{Context, Result, anyhow, ensure};
use mooncake_proto::DEFAULT_CLUSTER_ID;
use serde_json::json;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

/// Models of one round: more than callers ask for, so that there is always one that nobody has.
const MODELS: usize = 120;
/// What the source gives: a model takes a second, so that faults meet downloads under way, and all of a round's models
/// well below its length.
const SOURCE_BYTES_PER_SECOND: u64 = 2 << 20;
/// Disk of a master: all of its log of a round, several times over.
const MASTER_DISK_BYTES: u64 = 1 << 30;
/// Disk of a client: all models of a round.
const CLIENT_DISK_BYTES: u64 = 1 << 30;
/// Of rounds in which nodes are to be lost for good: shorter than most faults last.
const SHORT_GRACE_S: u64 = 2;
/// A cluster that is not well so long after its limit will not be.
const GIVE_UP_FACTOR: u32 = 4;
const POLL: Duration = Duration::from_millis(100);
/// Reads of the last pass at once.
const LAST_READS_AT_ONCE: usize = 16;

/// One round.
#[derive(Clone, Debug)]
pub struct RoundOptions {
    /// Of the schedule and the workload.
    pub seed: u64,
    /// How long faults go on.
    pub length: Duration,
    /// Masters.
    pub masters: usize,
    /// Clients, at least two.
    pub clients: usize,
    /// Wall clocks jump too.
    pub clocks: bool,
    /// Masters take snapshots and purge their logs. The committed log is then judged from where it can be read on.
    pub snapshots: bool,
    /// A node that is away is `down` after [`SHORT_GRACE_S`], which most faults outlast. Else by the default.
    pub short_grace: bool,
    /// How soon all must be well after everything is healed.
    pub converge_within: Duration,
    /// Gets `history.jsonl`, `schedule.json` and `report.json`.
    pub out: PathBuf,
    /// Takes what is going on.
    pub progress: fn(&str),
}

/// Runs one round and judges it. An error is a fault of the test (or of the machine), not a violation.
pub async fn round(options: &RoundOptions) -> Result<RoundReport> {
    fs::create_dir_all(&options.out)?;
    let history = Arc::new(History::new(Some(&options.out.join("history.jsonl")))?);
    let mut bed = Testbed::prepare(TestbedOptions {
        masters: options.masters,
        clients: options.clients,
        master_disk_bytes: Some(MASTER_DISK_BYTES),
        client_disk_bytes: Some(CLIENT_DISK_BYTES),
        clocks: options.clocks,
        master_args: {
            let mut args = match options.snapshots {
                true => log::TAKE_SNAPSHOTS.map(str::to_owned).to_vec(),
                false => log::KEEP_THE_LOG.map(str::to_owned).to_vec(),
            };
            args.extend(
                options
                    .short_grace
                    .then(|| format!("--node-grace-s={SHORT_GRACE_S}")),
            );
            args
        },
        ..Default::default()
    })
    .await?;
    let models = tempfile::Builder::new().prefix("mooncake-models-").tempdir()?;
    let source = bed.serve(models.path()).await?;
    source.limit_rate(Some(SOURCE_BYTES_PER_SECOND));
    let url = source.url.clone();
    let (folder, seed) = (models.path().to_owned(), options.seed);
    let library = tokio::task::spawn_blocking(move || Library::create(&folder, &url, MODELS, seed)).await??;
    if options.snapshots
        && let Some(last) = bed.cluster.masters.last_mut()
    {
        // A later flag overrides an earlier one.
        last.args_mut().extend(log::KEEP_LONGER.map(str::to_owned));
    }
    bed.cluster.start_all().await?;
    bed.start_balancer(BalancerKind::HaProxy).await?;
    let scene = scene(&bed, Arc::new(library))?;
    let observer = Observer::new(&scene, history.clone())?;
    let standstills = StandstillWatch::start(&history, &options.out)?;

    (options.progress)(&format!("seed {}: running", options.seed));
    let workload_options = WorkloadOptions {
        seed: options.seed,
        ..Default::default()
    };
    let workload = Workload::start(&scene, &workload_options, &history)?;
    let mut convergence = Vec::new();
    let injected = faults(options, &mut bed, &history, &mut convergence).await;
    let stopped = workload.stop().await;
    injected?;
    let (known, auditor) = stopped?;

    (options.progress)(&format!(
        "seed {}: healed, waiting until all is well",
        options.seed
    ));
    convergence.push(converge(options, &mut bed, &observer).await);
    read_all(&scene, &history, &known, &auditor).await?;
    observer.look(true).await;
    drop(standstills);
    let evidence = evidence(&mut bed, &history, convergence).await?;
    let violations = checks::check(&evidence);

    let report = summarise(options, &evidence, violations, bed.source()?.bytes_served_again());
    fs::write(
        options.out.join("report.json"),
        serde_json::to_vec_pretty(&report)?,
    )?;
    if report.violations.is_empty() {
        bed.finish();
    }
    Ok(report)
}

/// What a workload needs to know of a testbed.
pub fn scene(bed: &Testbed, library: Arc<Library>) -> Result<Scene> {
    let mut endpoints = vec![Endpoint {
        name: "lb".into(),
        url: bed.url().to_owned(),
    }];
    for (i, url) in bed.cluster.endpoints.iter().enumerate() {
        endpoints.push(Endpoint {
            name: format!("m{}", i + 1),
            url: url.clone(),
        });
    }
    Ok(Scene {
        endpoints,
        rpc_addresses: bed.cluster.rpc_addresses.clone(),
        secret: Some(fs::read_to_string(bed.dir().join("secret"))?),
        nodes: bed.cluster.nodes.clone(),
        library,
        http: bed.cluster.http.clone(),
    })
}

/// Injects and heals, one step after the other, until the time is over. What is done is in `schedule.json` before it is
/// done: a round that cannot be judged has it, too.
async fn faults(
    options: &RoundOptions,
    bed: &mut Testbed,
    history: &Arc<History>,
    convergence: &mut Vec<Convergence>,
) -> Result<()> {
    let until = Instant::now() + options.length;
    let means = Means {
        clients: options.clients,
        clocks: options.clocks,
        snapshots: options.snapshots,
    };
    let mut done = Vec::new();
    // What the same schedule takes to be drawn again.
    let round = json!({
        "program": env!("CARGO_PKG_VERSION"),
        "seed": options.seed,
        "length_s": options.length.as_secs(),
        "masters": options.masters,
        "clients": options.clients,
        "clocks": options.clocks,
        "snapshots": options.snapshots,
        "short_grace": options.short_grace,
        "converge_within_s": options.converge_within.as_secs(),
    });
    for Step { after, nemeses, hold } in schedule::steps(options.seed, means) {
        tokio::time::sleep(after).await;
        if Instant::now() + hold > until {
            break;
        }
        let names: Vec<_> = nemeses.iter().map(Nemesis::name).collect();
        let mut active: Vec<Injected> = Vec::new();
        let mut befallen = BTreeSet::new();
        for nemesis in nemeses {
            let (name, what) = (nemesis.name(), format!("{nemesis:?}"));
            done.push(
                json!({"at_us": history.now_us(), "nemesis": what, "hold_ms": hold.as_millis() as u64}),
            );
            fs::write(
                options.out.join("schedule.json"),
                serde_json::to_vec_pretty(&json!({"round": round, "faults": done}))?,
            )?;
            let concerns = nemesis.concerns(&bed.cluster.nodes);
            history.event(&name, Phase::Injected, concerns.clone(), what);
            befallen.extend(concerns);
            active.push(nemesis.inject(bed).await?);
            (options.progress)(&format!("seed {}: {name}", options.seed));
        }
        tokio::time::sleep(hold).await;
        for injected in active.into_iter().rev() {
            let name = injected.nemesis.name();
            let concerns = injected.nemesis.concerns(&bed.cluster.nodes);
            let met = if injected.met_nothing { MET_NOTHING } else { "" };
            injected.heal(bed).await?;
            history.event(&name, Phase::Healed, concerns, met);
        }
        // The next fault is one that a healthy cluster gets.
        let healed = Instant::now();
        let ready = bed.cluster.wait_ready().await;
        let stuck = ready.is_err();
        if !stuck {
            let concerns = befallen.into_iter().collect();
            history.event(&names.join(" and "), Phase::Well, concerns, "");
        }
        convergence.push(Convergence {
            after: names.join(" and "),
            took_ms: (!stuck).then_some(healed.elapsed().as_millis() as u64),
            limit_ms: options.converge_within.as_millis() as u64,
            waited_for: ready.map_or_else(|e| format!("{e:#}"), |()| "masters ready, nodes up".into()),
        });
        if stuck {
            break;
        }
    }
    Ok(())
}

/// Waits until all is well, for longer than allowed, so that "late" and "never" can be told apart.
async fn converge(options: &RoundOptions, bed: &mut Testbed, observer: &Observer) -> Convergence {
    let began = Instant::now();
    let mut waited_for = String::new();
    let took_ms = loop {
        match all_well(bed, observer).await {
            Ok(()) => break Some(began.elapsed().as_millis() as u64),
            Err(why) => waited_for = format!("{why:#}"),
        }
        if began.elapsed() > options.converge_within * GIVE_UP_FACTOR {
            break None;
        }
        tokio::time::sleep(POLL).await;
    };
    Convergence {
        after: "everything".into(),
        took_ms,
        limit_ms: options.converge_within.as_millis() as u64,
        waited_for,
    }
}

async fn all_well(bed: &mut Testbed, observer: &Observer) -> Result<()> {
    let cluster = &mut bed.cluster;
    for (i, url) in cluster.endpoints.iter().enumerate() {
        let answer = cluster
            .http
            .get(format!("{url}/readyz"))
            .timeout(POLL * 10)
            .send()
            .await;
        let status = answer.with_context(|| format!("master {}", i + 1))?.status();
        ensure!(status.is_success(), "master {} is not ready: {status}", i + 1);
    }
    let nodes = cluster.get("/api/v1/nodes").await?;
    let real = |node: &&serde_json::Value| node["node_id"] != workload::GHOST;
    for node in nodes["nodes"].as_array().into_iter().flatten().filter(real) {
        ensure!(
            node["status"] == "up",
            "node {} is {}",
            node["node_id"],
            node["status"]
        );
    }
    for status in ["planned", "seeding", "replicating"] {
        let path = format!("/api/v1/model-distribution/jobs?status={status}&limit=10");
        let jobs = cluster.get(&path).await?;
        // The ghost's node is gone, and with it, after the grace, its last job.
        let real = |job: &&serde_json::Value| {
            !job["job_id"]
                .as_str()
                .unwrap_or_default()
                .starts_with(workload::GHOST_JOB)
        };
        let job = jobs["jobs"].as_array().into_iter().flatten().find(real);
        ensure!(
            job.is_none(),
            "job {} is still {status}",
            job.map(|j| j["job_id"].to_string()).unwrap_or_default()
        );
    }
    let seen = observer.look(true).await;
    ensure!(
        seen.len() == cluster.endpoints.len(),
        "only {} masters answer the observer",
        seen.len()
    );
    ensure!(
        seen.windows(2)
            .all(|w| (w[0].applied_index, &w[0].digest) == (w[1].applied_index, &w[1].digest)),
        "masters have applied different entries: {:?}",
        seen.iter().map(|s| (s.id, s.applied_index)).collect::<Vec<_>>()
    );
    Ok(())
}

/// Every job once more, linearizable, through the load balancer.
async fn read_all(
    scene: &Scene,
    history: &Arc<History>,
    known: &Known,
    auditor: &Arc<Auditor>,
) -> Result<()> {
    use futures_util::StreamExt as _;
    let reader = Caller::new(LAST_READER, scene, history.clone(), auditor.clone());
    let reads = known.jobs().into_iter().map(|job| {
        let mut reader = reader.clone();
        async move { reader.take(0, workload::Step::Read { job, stale: false }).await }
    });
    futures_util::stream::iter(reads)
        .buffer_unordered(LAST_READS_AT_ONCE)
        .for_each(|_| std::future::ready(()))
        .await;
    auditor.settle().await
}

/// Stops the masters and collects everything.
async fn evidence(bed: &mut Testbed, history: &History, convergence: Vec<Convergence>) -> Result<Evidence> {
    let mut evidence = Evidence::of(history.records()?);
    evidence.convergence = convergence;
    evidence.served = served(bed)?;
    // Not asked politely: what was acknowledged is on the disk.
    bed.cluster.masters.iter_mut().for_each(Process::kill);
    let running = bed.cluster.ids.iter().zip(&bed.cluster.masters);
    let retired = bed.cluster.retired.iter().map(|(id, master)| (id, master));
    for (id, master) in running.chain(retired) {
        let log = master.log();
        evidence
            .elected
            .extend(Elected::in_log(*id, &log).map_err(|e| anyhow!(e))?);
        evidence.installed += log.matches(SNAPSHOT_INSTALLED).count() as u64;
        let lost = |line: &&str| line.contains(NODE_DOWN) && !line.contains(workload::GHOST);
        evidence.nodes_down += log.lines().filter(lost).count() as u64;
    }
    let disks = bed.cluster.ids.iter().copied();
    let disks: Vec<_> = disks.zip(bed.cluster.data_dirs.iter().cloned()).collect();
    evidence.replay(&disks, DEFAULT_CLUSTER_ID).await?;
    Ok(evidence)
}

fn served(bed: &Testbed) -> Result<Vec<Served>> {
    let whole: BTreeMap<String, Vec<(u64, u64)>> = bed.source()?.whole_requests();
    Ok(whole
        .into_iter()
        .map(|(path, ranges)| Served {
            model: path.split('/').next().unwrap_or_default().to_owned(),
            times: most_covered(&ranges),
            path,
        })
        .collect())
}
