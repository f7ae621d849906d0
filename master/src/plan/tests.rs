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

mod downloads;
mod leaders;
mod nodes;
mod places;
mod standstill;

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

fn verified(bytes: u64) -> Reported {
    Reported {
        verified_bytes: bytes,
        ..Reported::default()
    }
}
