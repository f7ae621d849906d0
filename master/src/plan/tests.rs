//! The state machine and the planner against simulated nodes: no clock, no network, every order of events that a
//! test asks for.

use super::*;
use mooncake_proto::{
    api::{JobStatus, NodeStatus, PlacementState},
    digest::{Algorithm, Digest},
    ids::{JobId, ModelRef, NodeId},
    manifest::{Checksum, Manifest, ManifestFile, ObjectIds, Seal, Sources},
};
use mooncake_state::{
    BlobRef, Command, CreateJob, Failure, Fence, Job, NodeAbout, Reply, ReportId, State, TaskKind, invariants,
};
use std::collections::BTreeMap;

mod places;

const MIB: u64 = 1 << 20;
const BLOCK: u32 = 256 << 10;

fn node(i: usize) -> NodeId {
    NodeId(format!("10.0.{:03}.{:03}:25001", i / 256, i % 256))
}

fn model(m: usize) -> ModelRef {
    ModelRef {
        model_id: format!("m{m}"),
        revision: "r1".into(),
        format: "bin".into(),
        provider: "local".into(),
    }
}

fn manifest(m: usize) -> Manifest {
    Manifest {
        model: model(m),
        file_manifest_version: "v1".into(),
        total_size_bytes: MIB,
        files: vec![ManifestFile {
            path: "model.bin".into(),
            size_bytes: MIB,
            checksum: Checksum::Opaque("dummy".into()),
            artifact_key: "key".into(),
            chunk_size_bytes: MIB,
            chunk_count: 1,
            object_prefix: "p".into(),
            objects: ObjectIds::derived("p", 1),
        }],
    }
}

fn seal() -> Seal {
    Seal {
        block_size_bytes: BLOCK,
        algorithm: Algorithm::Blake3,
        root: Digest::sha256(b"root"),
    }
}

/// A simulated node: what is on its disk outlives its sessions.
#[derive(Default)]
struct Fake {
    alive: bool,
    store: String,
    disk: BTreeMap<ModelRef, Held>,
    /// The task that runs, its fence and kind.
    tasks: BTreeMap<ModelRef, (Fence, TaskKind)>,
    /// Peers and seal it was told.
    peers: BTreeMap<ModelRef, Vec<NodeId>>,
    sealed: BTreeMap<ModelRef, Seal>,
    highest: BTreeMap<ModelRef, Fence>,
    /// The next download fails like this.
    fails: Option<Failure>,
    /// Work does not go on.
    paused: bool,
    downloads: u32,
    orders: Vec<&'static str>,
    /// The models that it was told to begin with, in order.
    began: Vec<ModelRef>,
    /// As it registers.
    max_transfers: Option<std::num::NonZeroU32>,
}

struct Sim {
    state: State,
    observed: Observed,
    index: u64,
    now: u64,
    fakes: BTreeMap<NodeId, Fake>,
}

impl Sim {
    fn new(nodes: usize) -> Self {
        let now = 1_800_000_000_000;
        let mut sim = Self {
            state: State::new(),
            observed: Observed::new(now, PlanConfig::default()),
            index: 0,
            now,
            fakes: BTreeMap::new(),
        };
        for i in 0..nodes {
            let fake = Fake {
                alive: true,
                store: "disk".into(),
                ..Fake::default()
            };
            sim.fakes.insert(node(i), fake);
            sim.connect(i);
        }
        // Beyond the first reconnect window.
        sim.now += 10_000;
        sim
    }

    fn apply(&mut self, command: Command) -> Reply {
        let before = self.state.clone();
        self.index += 1;
        let applied = self.state.apply(self.index, &command);
        invariants::check(&self.state).unwrap();
        invariants::check_command(&before, &command, &applied.reply, &self.state).unwrap();
        applied.reply
    }

    fn connect(&mut self, i: usize) {
        let id = node(i);
        let fake = &self.fakes[&id];
        let expected_incarnation = self.state.node(&id).map_or(0, |n| n.incarnation);
        let about = NodeAbout {
            data_address: id.0.clone(),
            capacity_bytes: 1 << 40,
            free_bytes: 1 << 39,
            ..NodeAbout::default()
        };
        let store_id = fake.store.clone();
        let reply = self.apply(Command::RegisterNode {
            node: id.clone(),
            store_id,
            expected_incarnation,
            about,
            now_ms: self.now,
        });
        let Reply::Registered { incarnation } = reply else {
            panic!("{reply:?}")
        };
        let session = self.observed.open(id.clone(), incarnation, self.now);
        for (model, held) in &self.fakes[&id].disk {
            session.hold(model.clone(), Some(held.clone()));
        }
        session.inventory_complete = true;
        session.max_transfers = self.fakes[&id].max_transfers;
    }

    /// The process dies: tasks are gone, the disk stays.
    fn kill(&mut self, i: usize) {
        self.observed.close(&node(i));
        let fake = self.fakes.get_mut(&node(i)).unwrap();
        fake.alive = false;
        fake.tasks.clear();
        fake.sealed.clear();
    }

    fn restart(&mut self, i: usize) {
        self.fakes.get_mut(&node(i)).unwrap().alive = true;
        self.connect(i);
    }

    /// Another master leads: it knows nothing, and the nodes come back one by one.
    fn new_leader(&mut self) {
        self.observed = Observed::new(self.now, self.observed.config);
    }

    fn create_command(&self, job: usize, m: usize, seed: usize, targets: &[usize]) -> CreateJob {
        CreateJob {
            job: JobId(format!("job-{job}")),
            request_digest: Digest::sha256(&[job as u8]),
            model: model(m),
            manifest: BlobRef::Inline(manifest(m).encode().into()),
            sources: BlobRef::Inline(Sources(vec![format!("/models/{job}")]).encode().into()),
            block_size_bytes: BLOCK,
            algorithm: Algorithm::Blake3,
            seed: node(seed),
            targets: targets.iter().map(|i| node(*i)).collect(),
            target_replica_count: 1,
            max_attempts: 2,
            deadline_ms: None,
            warnings: vec![],
            now_ms: self.now,
        }
    }

    fn create(&mut self, job: usize, m: usize, seed: usize, targets: &[usize]) {
        let create = self.create_command(job, m, seed, targets);
        assert_eq!(
            self.apply(Command::CreateJob(Box::new(create))),
            Reply::Job { created: true }
        );
    }

    fn cancel(&mut self, job: usize) {
        let command = Command::CancelJob {
            job: JobId(format!("job-{job}")),
            progress: vec![],
            now_ms: self.now,
        };
        assert_eq!(self.apply(command), Reply::Done);
    }

    fn job(&self, job: usize) -> &Job {
        self.state.job(&JobId(format!("job-{job}"))).unwrap()
    }

    fn status(&self, job: usize) -> JobStatus {
        self.job(job).status
    }

    fn fake(&mut self, i: usize) -> &mut Fake {
        self.fakes.get_mut(&node(i)).unwrap()
    }

    fn downloads(&self) -> u32 {
        self.fakes.values().map(|f| f.downloads).sum()
    }

    /// One round of the reconciler, without any work on the nodes. Returns what was planned.
    fn reconcile(&mut self) -> Vec<Intent> {
        let intents = plan(&self.state, &self.observed, self.now);
        for intent in &intents {
            match intent {
                Intent::Propose(command) => {
                    self.apply(command.clone());
                }
                Intent::Send { node, order } => {
                    for blob in order.blobs() {
                        assert!(
                            self.state.blob(&blob).is_some(),
                            "an order names a blob that is not there"
                        );
                    }
                    self.obey(node, order);
                    self.observed.sent(node, order, self.now);
                }
            }
        }
        intents
    }

    fn obey(&mut self, id: &NodeId, order: &Order) {
        let fake = self.fakes.get_mut(id).unwrap();
        assert!(fake.alive, "an order to a dead node");
        let highest = fake.highest.entry(order.model.clone()).or_default();
        assert!(
            order.fence >= *highest,
            "{id} refuses {:?} after {highest:?}",
            order.fence
        );
        *highest = order.fence;
        let hold = |fake: &mut Fake, manifest: Digest| {
            fake.disk.entry(order.model.clone()).or_insert(Held {
                generation: order.generation,
                manifest,
                state: HeldState::Partial,
                verified_bytes: 0,
                seal: None,
                local_path: String::new(),
                fence: order.fence,
                rehashing: false,
                from_inventory: false,
            });
        };
        match &order.body {
            OrderBody::Acquire(payload) => {
                fake.orders.push("acquire");
                fake.began.push(order.model.clone());
                let running = fake
                    .tasks
                    .insert(order.model.clone(), (order.fence, TaskKind::Acquire));
                if running != Some((order.fence, TaskKind::Acquire)) {
                    fake.downloads += 1;
                }
                hold(fake, payload.manifest);
            }
            OrderBody::Replicate {
                manifest,
                peers,
                seal,
                ..
            } => {
                fake.orders.push("replicate");
                fake.began.push(order.model.clone());
                fake.tasks
                    .insert(order.model.clone(), (order.fence, TaskKind::Replicate));
                fake.peers.insert(
                    order.model.clone(),
                    peers.iter().map(|p| p.node.clone()).collect(),
                );
                if let Some(seal) = seal {
                    fake.sealed.insert(order.model.clone(), *seal);
                }
                hold(fake, *manifest);
            }
            OrderBody::PeersChanged { peers } => {
                fake.orders.push("peers");
                fake.peers.insert(
                    order.model.clone(),
                    peers.iter().map(|p| p.node.clone()).collect(),
                );
            }
            OrderBody::Sealed { seal } => {
                fake.orders.push("sealed");
                fake.sealed.insert(order.model.clone(), *seal);
            }
            OrderBody::Revoke { .. } => {
                fake.orders.push("revoke");
                fake.tasks.remove(&order.model);
            }
            OrderBody::Delete { .. } => {
                fake.orders.push("delete");
                fake.disk.remove(&order.model);
                let session = self.observed.sessions.get_mut(id).unwrap();
                session.hold(order.model.clone(), None);
            }
        }
    }

    /// One step of work on every connected node; reports go into the log as the session does it.
    fn work(&mut self) {
        let ids: Vec<NodeId> = self.fakes.keys().cloned().collect();
        for id in ids {
            let Some(incarnation) = self.observed.sessions.get(&id).map(|s| s.incarnation) else {
                continue;
            };
            let fake = &self.fakes[&id];
            if !fake.alive || fake.paused {
                continue;
            }
            for (model, (fence, kind)) in fake.tasks.clone() {
                self.work_on(&id, incarnation, &model, fence, kind);
            }
        }
    }

    fn work_on(&mut self, id: &NodeId, incarnation: u64, model: &ModelRef, fence: Fence, kind: TaskKind) {
        // A copy is whole when some peer it was told of is.
        let peers = self.fakes[id].peers.get(model).cloned().unwrap_or_default();
        let has_source = peers.iter().any(|p| {
            self.fakes[p].alive
                && self.fakes[p]
                    .disk
                    .get(model)
                    .is_some_and(|h| h.state >= HeldState::Whole)
        });
        let now_ms = self.now;
        let fake = self.fakes.get_mut(id).unwrap();
        let held = fake.disk.get_mut(model).expect("a task has staging");
        let report = ReportId {
            model: model.clone(),
            generation: held.generation,
            node: id.clone(),
            incarnation,
            fence,
        };
        held.fence = fence;
        if kind == TaskKind::Acquire
            && let Some(failure) = fake.fails.take()
        {
            fake.tasks.remove(model);
            let session = self.observed.sessions.get_mut(id).unwrap();
            session.hold(model.clone(), Some(fake.disk[model].clone()));
            session.task_ended(model, fence, None);
            self.apply(Command::ReportFailed {
                report,
                failure,
                verified_bytes: 0,
                now_ms,
            });
            return;
        }
        if held.state == HeldState::Partial && (kind == TaskKind::Acquire || has_source) {
            held.state = HeldState::Whole;
            held.verified_bytes = MIB;
            held.seal = Some(seal());
        }
        let sealed = fake.sealed.get(model).copied();
        let (held, session) = (held.clone(), self.observed.sessions.get_mut(id).unwrap());
        session.hold(model.clone(), Some(held.clone()));
        if held.state == HeldState::Partial {
            return;
        }
        match sealed {
            Some(seal) => {
                let fake = self.fakes.get_mut(id).unwrap();
                fake.tasks.remove(model);
                let local_path = format!("/models/{id}");
                let held = Held {
                    state: HeldState::Staged,
                    local_path: local_path.clone(),
                    ..held
                };
                fake.disk.insert(model.clone(), held.clone());
                let staged = StagedReport {
                    generation: held.generation,
                    manifest: held.manifest,
                    total_size_bytes: MIB,
                    seal,
                    local_path: local_path.clone(),
                };
                self.observed
                    .sessions
                    .get_mut(id)
                    .unwrap()
                    .task_ended(model, fence, Some(staged));
                self.apply(Command::ReportStaged {
                    report,
                    seal,
                    local_path,
                    checksum_verified: true,
                    now_ms,
                });
            }
            None if kind == TaskKind::Acquire => {
                self.apply(Command::Seal {
                    report,
                    seal: seal(),
                    now_ms,
                });
            }
            None => {}
        }
    }

    /// Reconciles and works until nothing is left to do.
    fn settle(&mut self) {
        for _ in 0..50 {
            let planned = self.reconcile();
            let before = self.state.digest();
            self.work();
            if planned.is_empty() && self.state.digest() == before {
                return;
            }
        }
        panic!(
            "the planner does not come to rest: {:#?}",
            plan(&self.state, &self.observed, self.now)
        );
    }

    /// Lets time pass in steps, as the reconciler's tick does.
    fn pass(&mut self, ms: u64) {
        let end = self.now + ms;
        while self.now < end {
            self.now = (self.now + 1_000).min(end);
            self.settle();
        }
    }

    /// The states of a job's views.
    fn views(&self, job: usize) -> Vec<PlacementState> {
        self.job(job).views.iter().map(|v| v.state).collect()
    }
}

fn failure(retryable: bool) -> Failure {
    Failure {
        code: "source_not_found".into(),
        message: "404 from the source".into(),
        retryable,
    }
}

#[test]
fn the_happy_path() {
    let mut sim = Sim::new(3);
    sim.create(0, 0, 0, &[0, 1, 2]);
    let first = sim.reconcile();
    assert!(
        matches!(&first[..], [Intent::Propose(Command::AuthoriseAcquire { .. }), Intent::Propose(Command::AuthoriseReplicate { nodes, .. })] if nodes.len() == 2),
        "copies are authorised together with the download: {first:?}"
    );
    let second = sim.reconcile();
    assert_eq!(second.len(), 3, "{second:?}");
    assert_eq!(sim.fake(1).orders, ["replicate"]);
    assert_eq!(
        sim.fake(1).peers[&model(0)],
        [node(0), node(2)],
        "whoever has or gets it"
    );
    assert!(sim.reconcile().is_empty(), "nothing is said twice");
    sim.settle();
    assert_eq!((sim.status(0), sim.downloads()), (JobStatus::Completed, 1));
    assert_eq!(sim.fake(0).orders, ["acquire", "sealed"]);
    assert_eq!(sim.fake(1).orders, ["replicate", "sealed"]);
    sim.pass(120_000);
    assert_eq!(
        sim.fake(1).orders,
        ["replicate", "sealed"],
        "and then it is quiet"
    );
}

#[test]
fn a_seed_that_fails() {
    let mut sim = Sim::new(3);
    sim.fake(0).fails = Some(failure(false));
    sim.create(0, 0, 0, &[0, 1, 2]);
    sim.settle();
    assert_eq!(sim.status(0), JobStatus::Failed);
    assert_eq!(sim.views(0), [PlacementState::Failed; 3]);
    assert_eq!(sim.fake(1).orders, ["replicate", "revoke"]);
    assert_eq!(sim.fake(0).orders, ["acquire"], "its task ended by itself");
    // The corrected request works.
    sim.create(1, 0, 0, &[0, 1, 2]);
    sim.settle();
    assert_eq!(sim.status(1), JobStatus::Completed);
}

#[test]
fn a_failure_that_may_pass_is_tried_again_after_a_pause() {
    let mut sim = Sim::new(2);
    sim.fake(0).fails = Some(failure(true));
    sim.create(0, 0, 0, &[0, 1]);
    sim.settle();
    assert_eq!(
        (sim.status(0), sim.downloads()),
        (JobStatus::Seeding, 1),
        "it waits"
    );
    let retry = sim.state.artifact(&model(0)).unwrap().placements[&node(0)].not_before_ms;
    assert!(retry > sim.now);
    sim.now = retry;
    sim.settle();
    assert_eq!((sim.status(0), sim.downloads()), (JobStatus::Completed, 2));
}

#[test]
fn the_second_seed_takes_over() {
    let mut sim = Sim::new(4);
    sim.fake(0).fails = Some(failure(false));
    sim.create(0, 0, 0, &[0, 2]);
    sim.create(1, 0, 1, &[1, 2, 3]);
    sim.settle();
    assert_eq!(
        (sim.status(0), sim.status(1)),
        (JobStatus::Failed, JobStatus::Completed)
    );
    assert_eq!(sim.downloads(), 2, "one after the other");
    assert_eq!(
        sim.fake(1).orders,
        ["replicate", "peers", "acquire", "sealed"],
        "the failed seed is no peer any more; then it is this node's turn"
    );
}

#[test]
fn two_jobs_two_seeds_one_download() {
    let mut sim = Sim::new(3);
    sim.create(0, 0, 0, &[0, 1, 2]);
    sim.create(1, 0, 1, &[0, 1, 2]);
    sim.settle();
    assert_eq!(
        (sim.status(0), sim.status(1), sim.downloads()),
        (JobStatus::Completed, JobStatus::Completed, 1)
    );
}

#[test]
fn cancel_stops_what_no_other_job_wants() {
    let mut sim = Sim::new(3);
    for i in 0..3 {
        sim.fake(i).paused = true;
    }
    sim.create(0, 0, 0, &[0, 1, 2]);
    sim.create(1, 0, 0, &[1]);
    sim.settle();
    sim.cancel(0);
    sim.settle();
    assert_eq!(sim.fake(2).orders.last(), Some(&"revoke"));
    assert!(sim.fake(0).tasks.contains_key(&model(0)) && sim.fake(1).tasks.contains_key(&model(0)));
    sim.cancel(1);
    sim.settle();
    assert!(sim.fakes.values().all(|f| f.tasks.is_empty()), "all is stopped");
    // A leader that comes later does not know what runs: it says so once more where there is staging.
    sim.new_leader();
    sim.connect(1);
    sim.settle();
    assert_eq!(sim.fake(1).orders.iter().filter(|o| **o == "revoke").count(), 2);
    // What nobody wants is kept for a day.
    sim.connect(0);
    sim.connect(2);
    sim.now += 23 * 3_600_000;
    sim.settle();
    assert!(sim.fakes.values().all(|f| f.disk.contains_key(&model(0))));
    sim.now += 2 * 3_600_000;
    sim.settle();
    sim.now += 24 * 3_600_000;
    sim.settle();
    assert!(
        sim.fakes.values().all(|f| !f.disk.contains_key(&model(0))),
        "then it goes"
    );
}

#[test]
fn a_follower_that_dies_fails_after_the_grace() {
    let mut sim = Sim::new(3);
    sim.fake(1).paused = true;
    sim.create(0, 0, 0, &[0, 1, 2]);
    sim.settle();
    sim.kill(1);
    sim.settle();
    assert_eq!(sim.state.node(&node(1)).unwrap().status, NodeStatus::Suspected);
    sim.pass(29_000);
    assert_eq!(sim.status(0), JobStatus::Replicating);
    sim.pass(1_000);
    assert_eq!(
        sim.views(0),
        [
            PlacementState::Staged,
            PlacementState::Failed,
            PlacementState::Staged
        ]
    );
    assert!(sim.job(0).last_error.as_ref().unwrap().contains("grace of 30 s"));
}

#[test]
fn a_follower_that_restarts_goes_on() {
    let mut sim = Sim::new(3);
    sim.fake(1).paused = true;
    sim.create(0, 0, 0, &[0, 1, 2]);
    sim.settle();
    let attempt = sim.job(0).views[1].attempt;
    sim.kill(1);
    sim.pass(10_000);
    sim.fake(1).paused = false;
    sim.restart(1);
    sim.settle();
    assert_eq!(
        (sim.status(0), sim.job(0).views[1].attempt),
        (JobStatus::Completed, attempt),
        "the same attempt"
    );
    assert_eq!(
        sim.fake(1).orders.iter().filter(|o| **o == "replicate").count(),
        2,
        "ordered again"
    );
}

#[test]
fn a_seed_that_restarts_goes_on() {
    let mut sim = Sim::new(2);
    sim.fake(0).paused = true;
    sim.create(0, 0, 0, &[0, 1]);
    sim.settle();
    sim.kill(0);
    sim.pass(10_000);
    sim.fake(0).paused = false;
    sim.restart(0);
    sim.settle();
    assert_eq!(
        (sim.status(0), sim.job(0).views[0].attempt),
        (JobStatus::Completed, 1)
    );
}

#[test]
fn a_new_leader_authorises_nothing_that_runs() {
    let mut sim = Sim::new(3);
    sim.fake(0).paused = true;
    sim.create(0, 0, 0, &[0, 1, 2]);
    sim.settle();
    sim.new_leader();
    for i in [2, 0, 1] {
        sim.settle();
        sim.connect(i);
    }
    sim.settle();
    assert_eq!(sim.state.artifact(&model(0)).unwrap().attempts, 3);
    assert_eq!(sim.downloads(), 1, "the same fence is the same task");
    sim.fake(0).paused = false;
    sim.settle();
    assert_eq!((sim.status(0), sim.downloads()), (JobStatus::Completed, 1));
}

#[test]
fn the_transfer_ended_while_no_master_was_there() {
    let mut sim = Sim::new(2);
    sim.fake(0).paused = true;
    sim.create(0, 0, 0, &[0, 1]);
    sim.settle();
    sim.new_leader();
    // Nodes went on by themselves: everything is whole on both, nothing is sealed.
    for i in 0..2 {
        let held = sim.fake(i).disk.get_mut(&model(0)).unwrap();
        (held.state, held.verified_bytes, held.seal) = (HeldState::Whole, MIB, Some(seal()));
        sim.fake(i).paused = false;
    }
    sim.now += 60_000;
    sim.observed.leader_since_ms = sim.now;
    sim.connect(0);
    sim.connect(1);
    sim.settle();
    assert_eq!((sim.status(0), sim.downloads()), (JobStatus::Completed, 1));
}

#[test]
fn a_new_leader_waits_for_those_who_may_hold_it() {
    let mut sim = Sim::new(3);
    sim.create(0, 0, 2, &[2]);
    sim.settle();
    assert_eq!(sim.status(0), JobStatus::Completed);
    // The state believes that the only holder lost it; in truth node 1 has it, which nobody has heard yet.
    let held = sim.fake(2).disk.remove(&model(0)).unwrap();
    sim.fake(1).disk.insert(model(0), held);
    sim.observed
        .sessions
        .get_mut(&node(2))
        .unwrap()
        .hold(model(0), None);
    sim.settle();
    sim.new_leader();
    sim.connect(0);
    sim.connect(2);
    sim.create(1, 0, 0, &[0]);
    sim.settle();
    assert_eq!(
        (sim.status(1), sim.downloads()),
        (JobStatus::Planned, 1),
        "no download within the window"
    );
    sim.now += 3_000;
    sim.connect(1);
    sim.settle();
    assert_eq!(
        (sim.status(1), sim.downloads()),
        (JobStatus::Completed, 1),
        "copied"
    );
    // Nobody has it any more and one node does not come back: after the window it is downloaded.
    for i in 0..3 {
        sim.fake(i).disk.clear();
    }
    sim.new_leader();
    sim.connect(0);
    sim.connect(1);
    sim.settle();
    sim.create(2, 0, 0, &[0, 1]);
    sim.pass(4_000);
    assert_eq!(sim.downloads(), 1);
    sim.pass(1_000);
    assert_eq!((sim.status(2), sim.downloads()), (JobStatus::Completed, 2));
}

#[test]
fn who_had_found_this_leader_is_not_given_time_to_find_it() {
    let mut sim = Sim::new(2);
    sim.new_leader();
    sim.connect(0);
    sim.connect(1);
    sim.settle();
    sim.pass(1_000);
    sim.kill(1);
    sim.settle();
    let status = |sim: &Sim| sim.state.node(&node(1)).unwrap().status;
    assert_eq!(status(&sim), NodeStatus::Suspected, "in the middle of the window");
    sim.pass(29_000);
    assert_eq!(status(&sim), NodeStatus::Suspected);
    sim.pass(1_000);
    assert_eq!(
        status(&sim),
        NodeStatus::Down,
        "the grace alone, no window before it"
    );
    // But a leader that was stalled itself has to ask anew: the session may have ended of its own silence.
    let mut sim = Sim::new(2);
    sim.kill(1);
    sim.now += 40_000;
    sim.observed.begin_again(sim.now);
    sim.settle();
    assert_eq!(status(&sim), NodeStatus::Up);
    sim.restart(1);
    sim.pass(60_000);
    assert_eq!(status(&sim), NodeStatus::Up);
}

#[test]
fn the_grace_goes_on_across_leaders() {
    let mut sim = Sim::new(2);
    sim.kill(1);
    sim.pass(20_000);
    assert_eq!(sim.state.node(&node(1)).unwrap().status, NodeStatus::Suspected);
    sim.new_leader();
    sim.connect(0);
    sim.pass(9_000);
    assert_eq!(sim.state.node(&node(1)).unwrap().status, NodeStatus::Suspected);
    sim.pass(2_000);
    assert_eq!(
        sim.state.node(&node(1)).unwrap().status,
        NodeStatus::Down,
        "30 s in all, not 30 s more"
    );
    // A leader that comes when the grace is long over gives one window first.
    let mut sim = Sim::new(2);
    sim.kill(1);
    sim.settle();
    sim.now += 60_000;
    sim.new_leader();
    sim.settle();
    sim.now += 4_000;
    sim.connect(0);
    sim.settle();
    assert_eq!(sim.state.node(&node(1)).unwrap().status, NodeStatus::Suspected);
    sim.restart(1);
    sim.pass(10_000);
    assert!(
        sim.state.nodes().all(|(_, n)| n.status == NodeStatus::Up),
        "nobody was judged by the old silence"
    );
}

#[test]
fn the_seed_lost_it_while_another_holds_it() {
    let mut sim = Sim::new(3);
    sim.create(0, 0, 0, &[0, 1]);
    sim.settle();
    sim.fake(0).disk.clear();
    sim.kill(0);
    sim.restart(0);
    sim.settle();
    sim.create(1, 0, 0, &[0, 2]);
    sim.settle();
    assert_eq!((sim.status(1), sim.downloads()), (JobStatus::Completed, 1));
    assert_eq!(sim.job(1).views[0].kind, Some(TaskKind::Replicate));
}

#[test]
fn a_wiped_node_is_copied_to_again() {
    let mut sim = Sim::new(2);
    sim.create(0, 0, 0, &[0, 1]);
    sim.settle();
    sim.kill(1);
    let fake = sim.fake(1);
    (fake.disk, fake.highest, fake.store) = (BTreeMap::new(), BTreeMap::new(), "another disk".into());
    sim.restart(1);
    assert_eq!(sim.state.node(&node(1)).unwrap().incarnation, 2);
    sim.create(1, 0, 0, &[0, 1]);
    sim.settle();
    assert_eq!(
        (sim.status(0), sim.status(1), sim.downloads()),
        (JobStatus::Completed, JobStatus::Completed, 1)
    );
}

#[test]
fn space_is_measured_again_before_a_refusal() {
    let mut sim = Sim::new(2);
    let small = |free_bytes, now_ms| Command::SetNodeFree {
        node: node(1),
        incarnation: 1,
        capacity_bytes: 1 << 30,
        free_bytes,
        measured_ms: now_ms,
        now_ms,
    };
    sim.apply(small(10, sim.now));
    sim.now += 1;
    let measured = Space {
        capacity_bytes: 1 << 30,
        free_bytes: 2 * MIB,
        measured_ms: sim.now,
    };
    sim.observed.sessions.get_mut(&node(1)).unwrap().space = Some(measured);
    sim.create(0, 0, 0, &[0, 1]);
    sim.settle();
    assert_eq!(sim.status(0), JobStatus::Completed);
    // Really full.
    sim.apply(small(10, sim.now));
    sim.create(1, 1, 0, &[0, 1]);
    sim.settle();
    assert_eq!(sim.views(1), [PlacementState::Staged, PlacementState::Failed]);
    assert!(
        sim.job(1)
            .last_error
            .as_ref()
            .unwrap()
            .contains("not enough space")
    );
}

#[test]
fn deadlines_and_retention_are_proposed() {
    let mut sim = Sim::new(1);
    assert!(plan(&sim.state, &sim.observed, sim.now).is_empty());
    sim.create(0, 0, 0, &[0]);
    sim.settle();
    sim.now += sim.state.limits().job_ttl_ms;
    let intents = plan(&sim.state, &sim.observed, sim.now);
    assert!(
        matches!(&intents[..], [Intent::Propose(Command::Prune { .. })]),
        "{intents:?}"
    );
}

#[test]
fn a_thousand_nodes_are_not_told_of_a_thousand_peers() {
    const NODES: usize = 1000;
    let mut sim = Sim::new(0);
    for i in 0..NODES {
        let about = NodeAbout {
            data_address: node(i).0,
            ..NodeAbout::default()
        };
        let command = Command::RegisterNode {
            node: node(i),
            store_id: "disk".into(),
            expected_incarnation: 0,
            about,
            now_ms: sim.now,
        };
        sim.index += 1;
        sim.state.apply(sim.index, &command);
        sim.observed.open(node(i), 1, sim.now).inventory_complete = true;
    }
    sim.create(0, 0, 0, &(0..NODES).collect::<Vec<_>>());
    let propose = |sim: &mut Sim| {
        for intent in plan(&sim.state, &sim.observed, sim.now) {
            if let Intent::Propose(command) = intent {
                command.encode().expect("within one log entry");
                sim.index += 1;
                sim.state.apply(sim.index, &command);
            }
        }
    };
    propose(&mut sim);
    let intents = plan(&sim.state, &sim.observed, sim.now);
    let mut lists = BTreeMap::new();
    for intent in &intents {
        let Intent::Send { node: id, order } = intent else {
            panic!("{intent:?}")
        };
        if let OrderBody::Replicate { peers, .. } = &order.body {
            assert!((12..=MAX_PEERS).contains(&peers.len()), "{}", peers.len());
            assert!(peers.iter().all(|p| p.seed == (p.node == node(0))));
            assert!(peers.iter().all(|p| p.node != *id));
            lists.insert(
                id.clone(),
                peers.iter().map(|p| p.node.clone()).collect::<Vec<_>>(),
            );
        }
        sim.observed.sent(id, order, sim.now);
    }
    assert_eq!(lists.len(), NODES - 1);
    let pullers = lists.values().filter(|l| l.contains(&node(0))).count();
    assert!((12..=MAX_PEERS).contains(&pullers), "{pullers} ask the seed");
    // Everyone can be reached from anybody, and not through the seed.
    let mut reached = std::collections::BTreeSet::from([node(1)]);
    loop {
        let before = reached.len();
        for (id, peers) in &lists {
            if peers.iter().any(|p| reached.contains(p)) {
                reached.insert(id.clone());
            }
        }
        if reached.len() == before {
            break;
        }
    }
    assert_eq!(
        reached.len(),
        NODES - 1,
        "the swarm is connected without the seed"
    );
    // One more node is staged: nobody needs to hear of it.
    let report = |i: usize, sim: &Sim| ReportId {
        model: model(0),
        generation: 1,
        node: node(i),
        incarnation: 1,
        fence: sim.state.artifact(&model(0)).unwrap().placements[&node(i)].fence,
    };
    let id = report(0, &sim);
    sim.apply(Command::Seal {
        report: id,
        seal: seal(),
        now_ms: sim.now,
    });
    for intent in plan(&sim.state, &sim.observed, sim.now) {
        let Intent::Send { node: id, order } = &intent else {
            panic!("{intent:?}")
        };
        assert!(matches!(order.body, OrderBody::Sealed { .. }), "{intent:?}");
        sim.observed.sent(id, order, sim.now);
    }
    let id = report(500, &sim);
    let local_path = "/m".to_owned();
    sim.apply(Command::ReportStaged {
        report: id,
        seal: seal(),
        local_path,
        checksum_verified: true,
        now_ms: sim.now,
    });
    let held = StagedReport {
        generation: 1,
        manifest: manifest(0).digest(),
        total_size_bytes: MIB,
        seal: seal(),
        local_path: "/m".into(),
    };
    let fence = report(500, &sim).fence;
    sim.observed
        .sessions
        .get_mut(&node(500))
        .unwrap()
        .task_ended(&model(0), fence, Some(held));
    assert_eq!(plan(&sim.state, &sim.observed, sim.now), []);
    // One is down: those who knew it hear of it, nobody else.
    let knew: Vec<NodeId> = lists
        .iter()
        .filter(|(id, peers)| peers.contains(&node(700)) && **id != node(500))
        .map(|(id, _)| id.clone())
        .collect();
    sim.observed.close(&node(700));
    for status in [NodeStatus::Suspected, NodeStatus::Down] {
        sim.apply(Command::SetNodeStatus {
            node: node(700),
            incarnation: 1,
            seen_since_ms: sim.state.node(&node(700)).unwrap().since_ms,
            status,
            reason: "gone".into(),
            now_ms: sim.now,
        });
    }
    let mut told = Vec::new();
    for intent in plan(&sim.state, &sim.observed, sim.now) {
        let Intent::Send { node: id, order } = &intent else {
            continue;
        };
        let OrderBody::PeersChanged { peers } = &order.body else {
            panic!("{intent:?}")
        };
        assert!(peers.iter().all(|p| p.node != node(700)));
        told.push(id.clone());
    }
    told.sort();
    assert_eq!(told, knew);
}

#[test]
fn a_download_goes_on_when_the_job_whose_sources_it_reads_is_gone() {
    let mut sim = Sim::new(2);
    sim.fake(0).paused = true;
    sim.create(0, 0, 0, &[0]);
    sim.settle();
    sim.create(1, 0, 0, &[0, 1]);
    sim.settle();
    sim.cancel(0);
    // Long after: nothing but the running download keeps the sources.
    sim.now += 2 * sim.state.limits().blob_ttl_ms;
    sim.observed.config.no_progress_ms = 0;
    sim.settle();
    sim.new_leader();
    sim.connect(0);
    sim.connect(1);
    sim.settle();
    assert_eq!(
        sim.fake(0).orders,
        ["acquire", "acquire"],
        "never told to copy from nobody"
    );
    sim.fake(0).paused = false;
    sim.settle();
    assert_eq!((sim.status(1), sim.downloads()), (JobStatus::Completed, 1));
}

#[test]
fn a_seed_that_restarts_between_seal_and_publication_is_not_taken_to_have_lost_it() {
    for rehashing in [true, false] {
        let mut sim = Sim::new(2);
        sim.create(0, 0, 0, &[0, 1]);
        sim.fake(0).paused = true;
        sim.fake(1).paused = true;
        sim.settle();
        let artifact = sim.state.artifact(&model(0)).unwrap();
        let fence = artifact.placements[&node(0)].fence;
        let report = ReportId {
            model: model(0),
            generation: 1,
            node: node(0),
            incarnation: 1,
            fence,
        };
        sim.apply(Command::Seal {
            report,
            seal: seal(),
            now_ms: sim.now,
        });
        sim.kill(0);
        // All that it recorded has to be hashed again.
        let held = sim.fake(0).disk.get_mut(&model(0)).unwrap();
        (held.verified_bytes, held.rehashing) = (4096, rehashing);
        sim.restart(0);
        sim.settle();
        let views = sim.views(0);
        match rehashing {
            true => {
                assert_eq!(views, [PlacementState::Acquiring; 2]);
                assert_eq!(sim.fake(0).orders, ["acquire", "acquire", "sealed"]);
                let placement = &sim.state.artifact(&model(0)).unwrap().placements[&node(0)];
                assert_eq!(
                    (placement.fence, placement.failures),
                    (fence, 0),
                    "the same attempt"
                );
            }
            // It has looked at everything, and it is not all there.
            false => assert_ne!(sim.job(0).views[0].last_error, None),
        }
        for i in 0..2 {
            sim.fake(i).paused = false;
        }
        sim.pass(60_000);
        assert_eq!(sim.status(0), JobStatus::Completed);
    }
}

fn verified(bytes: u64) -> Reported {
    Reported {
        verified_bytes: bytes,
        ..Reported::default()
    }
}

/// Everything is held already, on a disk so slow that its checksums take longer than an attempt may stand still.
#[test]
fn who_checks_what_it_holds_does_not_stand_still() {
    let mut sim = Sim::new(2);
    sim.create(0, 0, 0, &[0, 1]);
    sim.fake(0).paused = true;
    sim.settle();
    let fence = sim.observed.sessions[&node(0)].sent[&model(0)].fence;
    for checked_bytes in 1..=5 {
        sim.now += 599_999;
        let reported = Reported {
            verified_bytes: MIB,
            checked_bytes,
        };
        let session = sim.observed.sessions.get_mut(&node(0)).unwrap();
        session.moved(&model(0), fence, reported, sim.now);
        sim.settle();
        assert_eq!(sim.job(0).views[0].failures, 0, "{checked_bytes}");
    }
    sim.now += 600_000;
    sim.settle();
    assert_eq!(sim.job(0).views[0].failures, 1, "now the hasher hangs");
}

#[test]
fn a_master_that_stood_still_does_not_hold_that_against_attempts() {
    let mut sim = Sim::new(2);
    sim.create(0, 0, 0, &[0, 1]);
    sim.fake(0).paused = true;
    sim.settle();
    sim.now += 700_000;
    sim.observed.begin_again(sim.now);
    sim.settle();
    assert_eq!(sim.job(0).views[0].failures, 0);
    sim.now += 599_999;
    sim.settle();
    assert_eq!(sim.job(0).views[0].failures, 0);
    sim.now += 1;
    sim.settle();
    assert_eq!(sim.job(0).views[0].failures, 1);
}

#[test]
fn a_seed_gets_no_more_downloads_than_it_works_at_and_the_oldest_job_is_next() {
    const MOST: usize = mooncake_proto::MAX_ACQUISITIONS;
    let mut sim = Sim::new(2);
    sim.fake(0).paused = true;
    // By name the youngest comes first.
    for job in 0..MOST + 2 {
        sim.now += 1;
        sim.create(job, MOST + 2 - job, 0, &[0, 1]);
    }
    sim.settle();
    assert_eq!(sim.fake(0).tasks.len(), MOST);
    let waiting = |sim: &Sim, job: usize| {
        let snapshot = sim.state.job_snapshot(&JobId(format!("job-{job}")), &());
        snapshot.unwrap().waiting_for
    };
    for job in 0..MOST {
        assert_eq!((sim.status(job), waiting(&sim, job)), (JobStatus::Seeding, None));
    }
    for job in [MOST, MOST + 1] {
        assert_eq!(sim.status(job), JobStatus::Planned);
        let why = waiting(&sim, job).unwrap();
        assert!(
            why.contains(node(0).as_str()) && why.contains("8 downloads"),
            "{why}"
        );
    }
    // A line that waits is not one that stands still.
    sim.observed.config.no_progress_ms = 0;
    sim.now += 3_600_000;
    sim.cancel(3);
    sim.settle();
    assert_eq!(sim.status(MOST), JobStatus::Seeding);
    assert_eq!(
        (sim.status(MOST + 1), sim.job(MOST + 1).views[0].failures),
        (JobStatus::Planned, 0)
    );
    // Another seed has room.
    sim.create(MOST + 2, 1, 1, &[1]);
    sim.settle();
    assert_eq!(sim.status(MOST + 2), JobStatus::Completed);
    assert_eq!(waiting(&sim, MOST + 1), None);
    sim.fake(0).paused = false;
    sim.settle();
    assert_eq!(sim.status(MOST + 1), JobStatus::Completed);
}

#[test]
fn a_copy_that_stands_still_fails_and_says_whom_it_could_not_reach() {
    let mut sim = Sim::new(3);
    sim.observed.config.no_progress_ms = 600_000;
    sim.create(0, 0, 0, &[0, 1]);
    sim.fake(0).paused = true;
    sim.fake(1).paused = true;
    sim.settle();
    let download = sim.job(0).views[0].attempt;
    // While the download stands still, a copy is not to blame; the download is.
    sim.now += 599_999;
    sim.settle();
    assert_eq!(sim.job(0).views[0].attempt, download);
    let fence = sim.observed.sessions[&node(0)].sent[&model(0)].fence;
    let now = sim.now;
    let session = sim.observed.sessions.get_mut(&node(0)).unwrap();
    session.moved(&model(0), fence, verified(4096), now);
    sim.now += 599_999;
    sim.settle();
    assert_eq!(sim.job(0).views[0].attempt, download, "it moved");
    assert_eq!(sim.job(0).views[1].failures, 0);
    sim.fake(0).paused = false;
    sim.settle();
    assert_eq!(sim.status(0), JobStatus::Replicating);
    for failures in 1..=2 {
        sim.now += 599_999;
        sim.settle();
        assert_eq!(sim.job(0).views[1].failures, failures - 1);
        sim.now += 1;
        sim.settle();
        assert_eq!(sim.job(0).views[1].failures, failures);
        sim.pass(1_000); // the pause before another attempt
    }
    assert_eq!(sim.views(0), [PlacementState::Staged, PlacementState::Failed]);
    let error = sim.job(0).last_error.clone().unwrap();
    assert!(
        error.contains(node(0).as_str()) && error.contains("stood still"),
        "{error}"
    );
    assert_eq!(*sim.fake(1).orders.last().unwrap(), "revoke");
}

#[test]
fn a_node_that_has_every_byte_and_does_not_publish_fails_too() {
    let mut sim = Sim::new(3);
    sim.observed.config.no_progress_ms = 600_000;
    sim.create(0, 0, 0, &[0, 1]);
    sim.fake(1).paused = true;
    sim.settle();
    let total = sim.state.artifact(&model(0)).unwrap().total_size_bytes;
    for failures in 1..=2 {
        let fence = sim.observed.sessions[&node(1)].sent[&model(0)].fence;
        let now = sim.now;
        let session = sim.observed.sessions.get_mut(&node(1)).unwrap();
        session.moved(&model(0), fence, verified(total), now);
        sim.now += 599_999;
        sim.settle();
        assert_eq!(sim.job(0).views[1].failures, failures - 1);
        sim.now += 1;
        sim.settle();
        assert_eq!(sim.job(0).views[1].failures, failures);
        sim.pass(1_000);
    }
    let error = sim.job(0).last_error.clone().unwrap();
    assert!(error.contains("has not published"), "{error}");
}

#[test]
fn orders_that_begin_nothing_do_not_look_like_ones_that_did() {
    let mut sim = Sim::new(1);
    let fence = Fence {
        recovery_epoch: 0,
        attempt: 7,
    };
    let order = |body| Order {
        model: model(0),
        generation: 1,
        fence,
        body,
    };
    let session = sim.observed.sessions.get_mut(&node(0)).unwrap();
    session.sent(&order(OrderBody::Sealed { seal: seal() }), 1);
    session.sent(&order(OrderBody::PeersChanged { peers: vec![] }), 1);
    assert!(session.sent.is_empty(), "the task's own order found no room");
}

#[test]
fn a_late_inventory_does_not_take_back_what_was_reported() {
    for sealed_only in [false, true] {
        let mut sim = Sim::new(2);
        sim.create(0, 0, 0, &[0, 1]);
        sim.fake(0).paused = true;
        sim.fake(1).paused = true;
        sim.settle();
        let late = sim.fakes[&node(0)].disk[&model(0)].clone();
        // Another session: the inventory is on its way while the download ends.
        let session = sim.observed.open(node(0), 1, sim.now);
        let report = |sim: &Sim| ReportId {
            model: model(0),
            generation: 1,
            node: node(0),
            incarnation: 1,
            fence: sim.state.artifact(&model(0)).unwrap().placements[&node(0)].fence,
        };
        session.acquired(&model(0), seal());
        sim.apply(Command::Seal {
            report: report(&sim),
            seal: seal(),
            now_ms: sim.now,
        });
        if !sealed_only {
            let artifact = sim.state.artifact(&model(0)).unwrap();
            let staged = StagedReport {
                generation: 1,
                manifest: artifact.manifest,
                total_size_bytes: MIB,
                seal: seal(),
                local_path: "/m".into(),
            };
            let fence = artifact.placements[&node(0)].fence;
            let session = sim.observed.sessions.get_mut(&node(0)).unwrap();
            session.task_ended(&model(0), fence, Some(staged));
            sim.apply(Command::ReportStaged {
                report: report(&sim),
                seal: seal(),
                local_path: "/m".into(),
                checksum_verified: true,
                now_ms: sim.now,
            });
        }
        let session = sim.observed.sessions.get_mut(&node(0)).unwrap();
        session.hold(model(0), Some(late));
        session.inventory_complete = true;
        let lost = |i: &Intent| matches!(i, Intent::Propose(Command::ReportLost { .. }));
        let intents = plan(&sim.state, &sim.observed, sim.now);
        assert!(!intents.iter().any(lost), "{intents:?}");
    }
}
