//! Tests of the whole state machine. [`World`] applies commands and checks every invariant after each.

mod properties;
mod prove_the_checker;
mod scenarios;

use crate::{invariants, *};
use mooncake_proto::{
    api::{JobStatus, NodeStatus, PlacementState},
    digest::{Algorithm, Digest},
    ids::{JobId, ModelRef, NodeId},
    manifest::{Checksum, Manifest, ManifestFile, ObjectIds, Seal, Sources},
};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const BLOCK: u32 = 256 << 10;
pub(crate) const START_MS: u64 = 1_800_000_000_000;

pub(crate) fn node(i: usize) -> NodeId {
    NodeId(format!("10.0.0.{i}:25001"))
}

pub(crate) fn job_id(i: usize) -> JobId {
    JobId(format!("job-{i}"))
}

pub(crate) fn model(i: usize) -> ModelRef {
    ModelRef {
        model_id: format!("m{i}"),
        revision: "r1".into(),
        format: "bin".into(),
        provider: "local".into(),
    }
}

/// Content `v` of model `m`: one file of 1 MiB in four objects.
pub(crate) fn manifest(m: usize, v: usize) -> Manifest {
    Manifest {
        model: model(m),
        file_manifest_version: "v1".into(),
        total_size_bytes: MIB,
        files: vec![ManifestFile {
            path: "model.bin".into(),
            size_bytes: MIB,
            checksum: Checksum::Opaque(format!("content {v}")),
            artifact_key: "key".into(),
            chunk_size_bytes: MIB / 4,
            chunk_count: 4,
            object_prefix: format!("m{m}/r1"),
            objects: ObjectIds::derived(&format!("m{m}/r1"), 4),
        }],
    }
}

pub(crate) fn sources(job: usize) -> Sources {
    Sources(vec![format!("file:///models/{job}.bin")])
}

pub(crate) fn seal(root: usize) -> Seal {
    Seal {
        block_size_bytes: BLOCK,
        algorithm: Algorithm::Blake3,
        root: Digest::sha256(&[root as u8]),
    }
}

pub(crate) fn about(i: usize) -> NodeAbout {
    NodeAbout {
        data_address: format!("10.0.0.{i}:50052"),
        http_address: format!("10.0.0.{i}:9300"),
        transports: vec!["tcp".into()],
        version: "0.1.0".into(),
        capacity_bytes: 1 << 40,
        free_bytes: 1 << 39,
        ..NodeAbout::default()
    }
}

pub(crate) fn create_command(job: usize, m: usize, v: usize, seed: usize, targets: &[usize]) -> CreateJob {
    let manifest = manifest(m, v);
    CreateJob {
        job: job_id(job),
        request_digest: Digest::sha256(format!("{m} {v} {seed} {targets:?}").as_bytes()),
        model: model(m),
        manifest: BlobRef::Inline(manifest.encode().into()),
        sources: BlobRef::Inline(sources(job).encode().into()),
        block_size_bytes: BLOCK,
        algorithm: Algorithm::Blake3,
        seed: node(seed),
        targets: targets.iter().map(|i| node(*i)).collect(),
        target_replica_count: targets.len() as u64,
        max_attempts: 2,
        deadline_ms: None,
        warnings: vec![],
        now_ms: START_MS,
    }
}

/// A state under test.
pub(crate) struct World {
    pub(crate) state: State,
    pub(crate) index: u64,
    pub(crate) now: u64,
}

impl World {
    /// With `nodes` registered nodes.
    pub(crate) fn new(nodes: usize) -> Self {
        let mut world = Self {
            state: State::new(),
            index: 0,
            now: START_MS,
        };
        for i in 0..nodes {
            let reply = world.register(i, "disk", 0);
            assert_eq!(reply, Reply::Registered { incarnation: 1 });
        }
        world
    }

    /// Applies a command once and checks everything; applies it again and checks that this changed nothing.
    pub(crate) fn apply(&mut self, command: Command) -> Reply {
        let encoded = command.encode().unwrap();
        assert_eq!(Command::decode(&encoded).unwrap(), command);
        let before = self.state.clone();
        self.index += 1;
        let reply = self.state.apply(self.index, &command).reply;
        self.check(&before, &command, &reply);
        let (once, digest) = (self.state.clone(), self.state.digest());
        self.index += 1;
        self.state.apply(self.index, &command);
        assert_eq!(
            self.state.digest(),
            digest,
            "{} twice is not once:\n{:#?}\n{:#?}",
            command.name(),
            once.data,
            self.state.data
        );
        reply
    }

    fn check(&self, before: &State, command: &Command, reply: &Reply) {
        let checked = invariants::check(&self.state)
            .and_then(|()| invariants::check_command(before, command, reply, &self.state));
        if let Err(broken) = checked {
            panic!("{command:?} broke: {broken}");
        }
    }

    pub(crate) fn register(&mut self, i: usize, store: &str, expected_incarnation: u64) -> Reply {
        self.apply(Command::RegisterNode {
            node: node(i),
            store_id: store.into(),
            expected_incarnation,
            about: about(i),
            now_ms: self.now,
        })
    }

    pub(crate) fn status(&mut self, i: usize, status: NodeStatus) -> Reply {
        let record = self.state.node(&node(i)).unwrap();
        let (incarnation, seen_since_ms) = (record.incarnation, record.since_ms);
        let reason = "it did not come back within the grace of 30 s".into();
        self.apply(Command::SetNodeStatus {
            node: node(i),
            incarnation,
            seen_since_ms,
            status,
            reason,
            now_ms: self.now,
        })
    }

    /// Suspected, then down.
    pub(crate) fn kill(&mut self, i: usize) {
        assert_eq!(self.status(i, NodeStatus::Suspected), Reply::Done);
        self.now += 30_000;
        assert_eq!(self.status(i, NodeStatus::Down), Reply::Done);
    }

    /// Content 0 of model `m`.
    pub(crate) fn create(&mut self, job: usize, m: usize, seed: usize, targets: &[usize]) {
        let reply = self.create_with(job, m, 0, seed, targets, |_| {});
        assert_eq!(reply, Reply::Job { created: true });
    }

    pub(crate) fn create_with(
        &mut self,
        job: usize,
        m: usize,
        v: usize,
        seed: usize,
        targets: &[usize],
        with: impl FnOnce(&mut CreateJob),
    ) -> Reply {
        let mut create = create_command(job, m, v, seed, targets);
        create.now_ms = self.now;
        with(&mut create);
        let before = self.state.job(&job_id(job)).is_some();
        let reply = self.apply(Command::CreateJob(Box::new(create)));
        assert!(before || !matches!(reply, Reply::Job { created: false }));
        reply
    }

    fn next_attempt(&self, m: usize) -> (u64, u64) {
        let artifact = self.state.artifact(&model(m)).unwrap();
        (artifact.generation, artifact.attempts + 1)
    }

    pub(crate) fn try_acquire(&mut self, job: usize, m: usize, i: usize) -> Reply {
        let (generation, attempt) = self.next_attempt(m);
        let incarnation = self.state.node(&node(i)).unwrap().incarnation;
        self.apply(Command::AuthoriseAcquire {
            model: model(m),
            generation,
            attempt,
            node: node(i),
            incarnation,
            job: job_id(job),
            reserve_bytes: MIB,
            now_ms: self.now,
        })
    }

    pub(crate) fn acquire(&mut self, job: usize, m: usize, i: usize) {
        assert_eq!(self.try_acquire(job, m, i), Reply::Done);
    }

    pub(crate) fn replicate(&mut self, m: usize, nodes: &[usize]) {
        let (generation, first_attempt) = self.next_attempt(m);
        let to = |i: &usize| ReplicateTo {
            node: node(*i),
            incarnation: self.state.node(&node(*i)).unwrap().incarnation,
            reserve_bytes: MIB,
        };
        let nodes = nodes.iter().map(to).collect();
        let command = Command::AuthoriseReplicate {
            model: model(m),
            generation,
            first_attempt,
            nodes,
            now_ms: self.now,
        };
        assert_eq!(self.apply(command), Reply::Done);
    }

    /// What a report of the current attempt says.
    pub(crate) fn report(&self, m: usize, i: usize) -> ReportId {
        let artifact = self.state.artifact(&model(m)).unwrap();
        ReportId {
            model: model(m),
            generation: artifact.generation,
            node: node(i),
            incarnation: self.state.node(&node(i)).unwrap().incarnation,
            fence: artifact
                .placements
                .get(&node(i))
                .map(|p| p.fence)
                .unwrap_or_default(),
        }
    }

    pub(crate) fn seal(&mut self, m: usize, i: usize, root: usize) -> Reply {
        let report = self.report(m, i);
        self.apply(Command::Seal {
            report,
            seal: seal(root),
            now_ms: self.now,
        })
    }

    pub(crate) fn staged_report(&self, m: usize, i: usize) -> Command {
        Command::ReportStaged {
            report: self.report(m, i),
            seal: seal(0),
            local_path: format!("/models/{i}/m{m}"),
            checksum_verified: true,
            now_ms: self.now,
        }
    }

    pub(crate) fn staged(&mut self, m: usize, i: usize) -> Reply {
        self.apply(self.staged_report(m, i))
    }

    pub(crate) fn fail(&mut self, m: usize, i: usize, code: &str, retryable: bool) -> Reply {
        let failure = Failure {
            code: code.into(),
            message: format!("{code} on node {i}"),
            retryable,
        };
        let report = self.report(m, i);
        self.apply(Command::ReportFailed {
            report,
            failure,
            verified_bytes: 1000,
            now_ms: self.now,
        })
    }

    pub(crate) fn lost(&mut self, m: usize, i: usize) -> Reply {
        let report = self.report(m, i);
        self.apply(Command::ReportLost {
            report,
            now_ms: self.now,
        })
    }

    pub(crate) fn job(&self, job: usize) -> &Job {
        self.state.job(&job_id(job)).unwrap()
    }

    pub(crate) fn job_status(&self, job: usize) -> JobStatus {
        self.job(job).status
    }

    /// The states of a job's views, in order.
    pub(crate) fn views(&self, job: usize) -> Vec<PlacementState> {
        self.job(job).views.iter().map(|v| v.state).collect()
    }

    pub(crate) fn placement(&self, m: usize, i: usize) -> &Placement {
        &self.state.artifact(&model(m)).unwrap().placements[&node(i)]
    }

    /// Model `m` staged on `nodes`, by a job that is `completed`.
    pub(crate) fn stage(&mut self, job: usize, m: usize, nodes: &[usize]) {
        self.create(job, m, nodes[0], nodes);
        self.acquire(job, m, nodes[0]);
        if nodes.len() > 1 {
            self.replicate(m, &nodes[1..]);
        }
        assert_eq!(self.seal(m, nodes[0], 0), Reply::Done);
        for i in nodes {
            assert_eq!(self.staged(m, *i), Reply::Done);
        }
        assert_eq!(self.job_status(job), JobStatus::Completed);
    }
}
