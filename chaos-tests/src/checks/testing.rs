//! Small histories and logs, made by hand, for the checkers' own tests.

use super::{Asked, Evidence, Replay, check, log::LogEntry};
use crate::history::{Answer, Body, JobSeen, Kind, MasterSeen, Op, Outcome, PlacementSeen};
use mooncake_proto::{
    api::{JobStatus, PlacementState, ProblemCode},
    digest::{Algorithm, Digest},
    ids::{JobId, ModelRef, NodeId},
    manifest::{Checksum, Manifest, ManifestFile, ObjectIds, Seal, Sources},
};
use mooncake_state::{BlobRef, Command, CreateJob, Failure, Fence, NodeAbout, Reply, ReportId, State};

const BLOCK: u32 = 256 << 10;
const SIZE: u64 = 1 << 20;

/// A run under construction.
pub struct Run {
    pub evidence: Evidence,
    pub caller: u32,
}

pub fn job_seen(job: &str, version: u64, status: JobStatus) -> JobSeen {
    JobSeen {
        job: job.into(),
        status,
        version,
        placements: vec![],
        rest: "rest".into(),
    }
}

pub fn placement(node: &str, state: PlacementState, attempt: u64) -> PlacementSeen {
    PlacementSeen {
        node: node.into(),
        state,
        attempt,
        requested: true,
        local_path: None,
    }
}

fn read(job: &str, stale_from: Option<u64>) -> Kind {
    Kind::Read {
        job: job.into(),
        stale_from,
        long_poll: false,
    }
}

fn create(job: &str, body: &str) -> Kind {
    Kind::Create {
        job: job.into(),
        body: body.into(),
    }
}

impl Run {
    pub fn new() -> Self {
        Self {
            evidence: Evidence::default(),
            caller: 1,
        }
    }

    /// Violations of one invariant.
    pub fn broken(&self, invariant: &str) -> u64 {
        let found = check(&self.evidence);
        found
            .iter()
            .find(|v| v.invariant == invariant)
            .map_or(0, |v| v.count)
    }

    fn answer(&mut self, kind: Kind, from: u64, to: u64, status: u16, index: u64, body: Body) {
        self.evidence.ops.push(Op {
            caller: self.caller,
            endpoint: "m1".into(),
            kind,
            invoked_us: from,
            returned_us: to,
            outcome: Outcome::Answer(Answer {
                status,
                served_by: Some(1),
                term: Some(1),
                applied_index: Some(index),
                waiting_for: None,
                body,
            }),
        });
    }

    fn problem(&mut self, kind: Kind, from: u64, to: u64, code: ProblemCode, index: u64) {
        self.answer(kind, from, to, code.status(), index, Body::Problem(code));
    }

    /// Made, in version `index`.
    pub fn create(&mut self, job: &str, from: u64, to: u64, index: u64) {
        let seen = job_seen(job, index, JobStatus::Planned);
        self.answer(create(job, "body"), from, to, 201, index, Body::Job(seen));
    }

    /// Answered with 200.
    pub fn create_again(&mut self, job: &str, body: &str, from: u64, to: u64, index: u64) {
        let seen = job_seen(job, index, JobStatus::Planned);
        self.answer(create(job, body), from, to, 200, index, Body::Job(seen));
    }

    pub fn create_problem(&mut self, job: &str, from: u64, to: u64, code: ProblemCode) {
        self.create_problem_with(job, "body", from, to, code);
    }

    pub fn create_problem_with(&mut self, job: &str, body: &str, from: u64, to: u64, code: ProblemCode) {
        self.problem(create(job, body), from, to, code, 1);
    }

    pub fn read(&mut self, job: &str, from: u64, to: u64, version: u64) {
        self.read_as(job, from, to, version, JobStatus::Planned);
    }

    pub fn read_as(&mut self, job: &str, from: u64, to: u64, version: u64, status: JobStatus) {
        let seen = Body::Job(job_seen(job, version, status));
        self.answer(read(job, None), from, to, 200, version, seen);
    }

    pub fn stale_as(&mut self, job: &str, min: u64, from: u64, to: u64, version: u64, status: JobStatus) {
        let seen = Body::Job(job_seen(job, version, status));
        self.answer(read(job, Some(min)), from, to, 200, version, seen);
    }

    pub fn read_problem(&mut self, job: &str, from: u64, to: u64, code: ProblemCode, index: u64) {
        self.problem(read(job, None), from, to, code, index);
    }

    pub fn stale_problem(&mut self, job: &str, min: u64, from: u64, to: u64, code: ProblemCode, index: u64) {
        self.problem(read(job, Some(min)), from, to, code, index);
    }

    pub fn cancel(&mut self, job: &str, from: u64, to: u64, version: u64) {
        let seen = Body::Job(job_seen(job, version, JobStatus::Canceled));
        self.answer(Kind::Cancel { job: job.into() }, from, to, 200, version, seen);
    }

    pub fn answer_job(&mut self, job: &str, from: u64, to: u64, seen: JobSeen) {
        let version = seen.version;
        self.answer(read(job, None), from, to, 200, version, Body::Job(seen));
    }

    pub fn master(
        &mut self,
        id: u64,
        term: u64,
        leader: Option<u64>,
        applied_index: u64,
        digest: Option<&str>,
    ) {
        self.evidence.masters.push(MasterSeen {
            at_us: 0,
            id,
            term,
            leader,
            applied_index,
            digest: digest.map(str::to_owned),
        });
    }

    /// With this committed log; the digest is taken at every index that a master named.
    pub fn replay(&mut self, log: Log) {
        self.evidence.replay = Some(log.replay(&self.evidence.asks()));
    }
}

/// A log under construction: nodes `10.0.0.<i>:1`, jobs `j` of models `m-j`.
pub struct Log {
    pub state: State,
    pub entries: Vec<LogEntry>,
}

pub fn node(i: usize) -> NodeId {
    NodeId(format!("10.0.0.{i}:1"))
}

fn model(job: &str) -> ModelRef {
    ModelRef {
        model_id: format!("m-{job}"),
        revision: "r1".into(),
        format: "bin".into(),
        provider: "test".into(),
    }
}

fn seal() -> Seal {
    Seal {
        block_size_bytes: BLOCK,
        algorithm: Algorithm::Blake3,
        root: Digest::sha256(b"root"),
    }
}

impl Log {
    /// With so many nodes.
    pub fn new(nodes: usize) -> Self {
        let mut log = Self {
            state: State::new(),
            entries: Vec::new(),
        };
        log.entries.push(LogEntry {
            index: 1,
            term: 1,
            command: None,
        });
        for i in 0..nodes {
            log.apply(Command::RegisterNode {
                node: node(i),
                store_id: "disk".into(),
                expected_incarnation: 0,
                about: NodeAbout::default(),
                now_ms: log.now(),
            });
        }
        log
    }

    /// Of the last entry.
    pub fn index(&self) -> u64 {
        self.entries.len() as u64
    }

    fn now(&self) -> u64 {
        1_800_000_000_000 + 1000 * self.index()
    }

    pub fn apply(&mut self, command: Command) -> Reply {
        let index = self.index() + 1;
        let reply = self.state.apply(index, &command).reply;
        self.entries.push(LogEntry {
            index,
            term: 1,
            command: Some(command),
        });
        reply
    }

    pub fn create(&mut self, job: &str, seed: usize, targets: &[usize]) {
        let manifest = Manifest {
            model: model(job),
            file_manifest_version: "v1".into(),
            total_size_bytes: SIZE,
            files: vec![ManifestFile {
                path: "model.bin".into(),
                size_bytes: SIZE,
                checksum: Checksum::Opaque(job.into()),
                artifact_key: "key".into(),
                chunk_size_bytes: SIZE,
                chunk_count: 1,
                object_prefix: "o".into(),
                objects: ObjectIds::derived("o", 1),
            }],
        };
        let reply = self.apply(Command::CreateJob(Box::new(CreateJob {
            job: JobId(job.into()),
            request_digest: Digest::sha256(job.as_bytes()),
            model: model(job),
            manifest: BlobRef::Inline(manifest.encode().into()),
            sources: BlobRef::Inline(Sources(vec!["file:///x".into()]).encode().into()),
            block_size_bytes: BLOCK,
            algorithm: Algorithm::Blake3,
            seed: node(seed),
            targets: targets.iter().map(|i| node(*i)).collect(),
            target_replica_count: targets.len() as u64,
            max_attempts: 3,
            deadline_ms: None,
            warnings: vec![],
            now_ms: self.now(),
        })));
        assert_eq!(reply, Reply::Job { created: true });
    }

    /// The job's seed begins to download; what it will report as.
    pub fn acquire(&mut self, job: &str) -> ReportId {
        let seed = self.state.job(&JobId(job.into())).unwrap().seed.clone();
        let artifact = self.state.artifact(&model(job)).unwrap();
        let (generation, attempt) = (artifact.generation, artifact.attempts + 1);
        let incarnation = self.state.node(&seed).unwrap().incarnation;
        let reply = self.apply(Command::AuthoriseAcquire {
            model: model(job),
            generation,
            attempt,
            node: seed.clone(),
            incarnation,
            job: JobId(job.into()),
            reserve_bytes: 0,
            now_ms: self.now(),
        });
        assert_eq!(reply, Reply::Done);
        ReportId {
            model: model(job),
            generation,
            node: seed,
            incarnation,
            fence: Fence {
                recovery_epoch: 0,
                attempt,
            },
        }
    }

    pub fn seal(&mut self, report: &ReportId) {
        let reply = self.apply(Command::Seal {
            report: report.clone(),
            seal: seal(),
            now_ms: self.now(),
        });
        assert_eq!(reply, Reply::Done);
    }

    pub fn stage(&mut self, report: &ReportId) {
        let reply = self.apply(Command::ReportStaged {
            report: report.clone(),
            seal: seal(),
            local_path: "/m".into(),
            checksum_verified: true,
            now_ms: self.now(),
        });
        assert_eq!(reply, Reply::Done);
    }

    /// The attempt fails; another one may follow.
    pub fn fail(&mut self, report: &ReportId) -> Reply {
        self.apply(Command::ReportFailed {
            report: report.clone(),
            failure: Failure {
                code: "source_unreachable".into(),
                message: "the source does not answer".into(),
                retryable: true,
            },
            verified_bytes: 0,
            now_ms: self.now(),
        })
    }

    pub fn replay(&self, asked: &Asked) -> Replay {
        Replay::of(None, &self.entries, self.index(), asked)
    }
}
