//! What callers did and what they were answered, and what was seen of the masters and of the nodes' disks meanwhile.
//!
//! Guaranteed: times come from one monotonic clock; an operation is recorded when it has returned, with the moment it
//! was invoked, so that two records tell whether one ended before the other began. Everything is in memory and, line
//! by line, in a JSONL file that [`History::load`] reads again.
//! Not guaranteed: the order of records. Sort by the times where order matters.

use anyhow::{Context, Result};
use mooncake_proto::{
    api::{JobList, JobSnapshot, JobStatus, PlacementState, ProblemCode, TaskState},
    digest::Digest,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead, BufReader, Write},
    path::Path,
    time::Instant,
};

/// Hex digits of [`JobSeen::rest`]: 64 bits, so that two different answers never look equal in a run.
const REST_DIGITS: usize = 16;

/// One line of a history.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Record {
    /// A caller's operation.
    Op(Op),
    /// Something that was done to the cluster.
    Event(Event),
    /// A master as it told of itself.
    Master(MasterSeen),
    /// A final folder as it was found on the disk.
    Folder(FolderSeen),
    /// A report that was sent again when its attempt was over.
    StaleReport(StaleReport),
    /// The machine did nothing for a while.
    Standstill(Standstill),
}

/// A time in which a thread of this program that was due did not run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Standstill {
    /// When it ran last.
    pub from_us: u64,
    /// When it ran again.
    pub to_us: u64,
}

/// One operation of one caller.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Op {
    /// Callers do one operation after the other.
    pub caller: u32,
    /// `lb`, `m1`, …
    pub endpoint: String,
    /// What was asked.
    pub kind: Kind,
    /// When it was sent, since the history began.
    pub invoked_us: u64,
    /// When the answer (or its failure) was there.
    pub returned_us: u64,
    /// What came of it.
    pub outcome: Outcome,
}

/// What a caller asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Kind {
    /// POST a job.
    Create {
        /// Its id.
        job: String,
        /// Names the body: two creates of one job with the same name sent the same body.
        body: String,
    },
    /// GET a job.
    Read {
        /// Its id.
        job: String,
        /// `consistency=stale` with this `min_index`; `None`: linearizable.
        stale_from: Option<u64>,
        /// Waits for a change.
        long_poll: bool,
    },
    /// Cancel a job.
    Cancel {
        /// Its id.
        job: String,
    },
    /// The newest jobs.
    List {
        /// As in `Read`.
        stale_from: Option<u64>,
        /// Lines asked for.
        limit: usize,
    },
}

/// What came of an operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// An HTTP answer came.
    Answer(Answer),
    /// None came, for this reason: what was done is unknown.
    NoAnswer(String),
}

/// An HTTP answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// The master that served it; none: it came from the load balancer itself.
    pub served_by: Option<u64>,
    /// That master's term.
    pub term: Option<u64>,
    /// The log index that the answer was read at.
    pub applied_index: Option<u64>,
    /// What the job in the body waits for: of the whole state, not of the job alone.
    #[serde(default)]
    pub waiting_for: Option<String>,
    /// The body.
    pub body: Body,
}

/// The body of an answer, as far as checkers look at it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Body {
    /// A job's snapshot.
    Job(JobSeen),
    /// A list of jobs, newest first.
    List(Vec<LineSeen>),
    /// A problem document.
    Problem(ProblemCode),
    /// Something else.
    Other(String),
}

/// A job's snapshot without what may differ between two reads at one log index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSeen {
    /// Its id.
    pub job: String,
    /// Its status.
    pub status: JobStatus,
    /// Its version.
    pub version: u64,
    /// Its placements.
    pub placements: Vec<PlacementSeen>,
    /// Digest of everything else in the snapshot that is recorded.
    pub rest: String,
}

/// One placement of [`JobSeen`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementSeen {
    /// Where.
    pub node: String,
    /// Its state.
    pub state: PlacementState,
    /// The last try.
    pub attempt: u64,
    /// Of a target.
    pub requested: bool,
    /// The final folder, once staged.
    pub local_path: Option<String>,
}

/// One line of a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineSeen {
    /// Job id.
    pub job: String,
    /// Its status.
    pub status: JobStatus,
}

/// Something that was done to the cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// When.
    pub at_us: u64,
    /// The nemesis.
    pub name: String,
    /// Begun or healed.
    pub phase: Phase,
    /// What it befalls.
    #[serde(default)]
    pub concerns: Vec<Concern>,
    /// For a person.
    pub detail: String,
}

/// What an [`Event`] befalls.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Concern {
    /// The masters: a process, a disk, a clock, what is between them, or who is a member.
    Masters,
    /// The client with this node id: its process, or what it receives.
    Node(String),
    /// That client's disk is away: nothing on it can be read until it is healed.
    Disk(String),
    /// What anybody gets from the source.
    Source,
}

/// Of an [`Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// It is active from here on.
    Injected,
    /// It is over.
    Healed,
    /// All masters were seen well afterwards.
    Well,
}

/// A master as it told of itself, all of it at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MasterSeen {
    /// When.
    pub at_us: u64,
    /// Its Raft id.
    pub id: u64,
    /// Its term.
    pub term: u64,
    /// The leader of that term, if it knew one.
    pub leader: Option<u64>,
    /// What it had applied.
    pub applied_index: u64,
    /// The state's digest at `applied_index`, if asked for.
    pub digest: Option<String>,
}

/// A final folder as it was found on the disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FolderSeen {
    /// When.
    pub at_us: u64,
    /// On which node.
    pub node: String,
    /// Where.
    pub path: String,
    /// The attempt that staged it.
    pub attempt: u64,
    /// What is wrong with it; none: every file is there, byte for byte, and nothing else.
    pub fault: Option<String>,
}

/// A report that was sent again when its attempt was over.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StaleReport {
    /// When.
    pub at_us: u64,
    /// Its attempt, which is over.
    pub attempt: u64,
}

impl JobSeen {
    /// What is recorded of a snapshot. Live figures are left out.
    pub fn of(snapshot: &JobSnapshot) -> Self {
        let mut rest = snapshot.clone();
        let placements = std::mem::take(&mut rest.placements)
            .into_iter()
            .map(|mut p| {
                if p.state != PlacementState::Staged {
                    p.staged_bytes = 0;
                }
                p.transports.clear();
                rest.placements.push(p.clone());
                PlacementSeen {
                    node: p.node_id.0,
                    state: p.state,
                    attempt: p.attempt,
                    requested: p.requested,
                    local_path: p.local_path,
                }
            })
            .collect();
        rest.waiting_for = None; // of what other jobs do: see Answer::waiting_for
        rest.progress.bytes_staged = 0;
        rest.progress.bytes_per_second = 0;
        for task in &mut rest.tasks {
            task.objects_done = 0;
            if task.state == TaskState::Running {
                task.state = TaskState::Pending;
            }
        }
        let json = serde_json::to_vec(&rest).expect("a snapshot encodes");
        let mut rest = Digest::sha256(&json).to_string();
        rest.truncate(REST_DIGITS);
        Self {
            job: snapshot.job_id.0.clone(),
            status: snapshot.status,
            version: snapshot.version,
            placements,
            rest,
        }
    }
}

impl Body {
    /// Reads the body of an answer to an operation of this kind; and what the job in it waits for, if it is one.
    pub fn parse(kind: &Kind, status: u16, bytes: &[u8]) -> (Self, Option<String>) {
        if (200..300).contains(&status)
            && !matches!(kind, Kind::List { .. })
            && let Ok(snapshot) = serde_json::from_slice::<JobSnapshot>(bytes)
        {
            return (Self::Job(JobSeen::of(&snapshot)), snapshot.waiting_for);
        }
        (Self::without_job(kind, status, bytes), None)
    }

    fn without_job(kind: &Kind, status: u16, bytes: &[u8]) -> Self {
        let other = || {
            let text = String::from_utf8_lossy(bytes);
            Self::Other(text.chars().take(200).collect())
        };
        if !(200..300).contains(&status) {
            let problem: Result<mooncake_proto::api::Problem, _> = serde_json::from_slice(bytes);
            return problem.map_or_else(|_| other(), |p| Self::Problem(p.code));
        }
        match kind {
            Kind::List { .. } => serde_json::from_slice::<JobList>(bytes).map_or_else(
                |_| other(),
                |list| {
                    let line = |l: mooncake_proto::api::JobSummary| LineSeen {
                        job: l.job_id.0,
                        status: l.status,
                    };
                    Self::List(list.jobs.into_iter().map(line).collect())
                },
            ),
            _ => other(),
        }
    }
}

impl Kind {
    /// The job it is about.
    pub fn job(&self) -> Option<&str> {
        match self {
            Self::Create { job, .. } | Self::Read { job, .. } | Self::Cancel { job } => Some(job),
            Self::List { .. } => None,
        }
    }

    /// The `min_index` of a stale read; `None`: linearizable, as every write is.
    pub fn stale_from(&self) -> Option<u64> {
        match self {
            Self::Read { stale_from, .. } | Self::List { stale_from, .. } => *stale_from,
            Self::Create { .. } | Self::Cancel { .. } => None,
        }
    }
}

impl Op {
    /// The answer, if one came.
    pub fn answer(&self) -> Option<&Answer> {
        match &self.outcome {
            Outcome::Answer(answer) => Some(answer),
            Outcome::NoAnswer(_) => None,
        }
    }

    /// The snapshot in the answer.
    pub fn seen(&self) -> Option<&JobSeen> {
        match &self.answer()?.body {
            Body::Job(seen) => Some(seen),
            _ => None,
        }
    }

    /// The problem in a master's answer.
    pub fn problem(&self) -> Option<ProblemCode> {
        let answer = self.answer()?;
        answer.served_by?;
        match answer.body {
            Body::Problem(code) => Some(code),
            _ => None,
        }
    }

    /// A create or cancel that was answered that it is done.
    pub fn is_acknowledged_write(&self) -> bool {
        let write = matches!(self.kind, Kind::Create { .. } | Kind::Cancel { .. });
        write && self.answer().is_some_and(|a| matches!(a.status, 200 | 201))
    }
}

/// Of one node's disk, by the events with [`Concern::Disk`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskTrouble {
    /// Times that it was taken away.
    pub injected: u64,
    /// Times that it was given back.
    pub healed: u64,
}

impl DiskTrouble {
    /// Whether it is away.
    pub fn is_active(self) -> bool {
        self.injected > self.healed
    }
}

/// A history being written.
pub struct History {
    began: Instant,
    inner: Mutex<Inner>,
}

struct Inner {
    records: Vec<Record>,
    disks: BTreeMap<String, DiskTrouble>,
    file: Option<File>,
    failed: Option<std::io::Error>,
}

impl History {
    /// An empty one; `file` gets a copy of every record.
    pub fn new(file: Option<&Path>) -> Result<Self> {
        let open =
            |path: &Path| File::create(path).with_context(|| format!("cannot create {}", path.display()));
        let inner = Inner {
            records: Vec::new(),
            disks: BTreeMap::new(),
            file: file.map(open).transpose()?,
            failed: None,
        };
        Ok(Self {
            began: Instant::now(),
            inner: Mutex::new(inner),
        })
    }

    /// Microseconds since it began.
    pub fn now_us(&self) -> u64 {
        self.began.elapsed().as_micros() as u64
    }

    /// Adds one. A file that cannot be written is reported by [`History::records`].
    pub fn record(&self, record: Record) {
        let mut line = serde_json::to_vec(&record).expect("a record encodes");
        line.push(b'\n');
        let mut inner = self.inner.lock();
        if let Some(file) = &mut inner.file
            && let Err(e) = file.write_all(&line)
        {
            inner.failed.get_or_insert(e);
        }
        if let Record::Event(event) = &record {
            for concern in &event.concerns {
                if let Concern::Disk(node) = concern {
                    let trouble = inner.disks.entry(node.clone()).or_default();
                    match event.phase {
                        Phase::Injected => trouble.injected += 1,
                        Phase::Healed => trouble.healed += 1,
                        Phase::Well => {}
                    }
                }
            }
        }
        inner.records.push(record);
    }

    /// How often this node's disk was taken away and given back so far.
    pub fn disk_trouble(&self, node: &str) -> DiskTrouble {
        self.inner.lock().disks.get(node).copied().unwrap_or_default()
    }

    /// Adds an event of now.
    pub fn event(&self, name: &str, phase: Phase, concerns: Vec<Concern>, detail: impl Into<String>) {
        self.record(Record::Event(Event {
            at_us: self.now_us(),
            name: name.to_owned(),
            phase,
            concerns,
            detail: detail.into(),
        }));
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.inner.lock().records.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Looks at what there is so far.
    pub fn with<T>(&self, look: impl FnOnce(&[Record]) -> T) -> T {
        look(&self.inner.lock().records)
    }

    /// Everything so far.
    pub fn records(&self) -> Result<Vec<Record>> {
        let mut inner = self.inner.lock();
        if let Some(e) = inner.failed.take() {
            return Err(e).context("the history's file could not be written");
        }
        Ok(inner.records.clone())
    }

    /// Reads the file of a history.
    pub fn load(path: &Path) -> Result<Vec<Record>> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let lines = BufReader::new(file).lines().enumerate();
        lines
            .map(|(n, line)| {
                serde_json::from_str(&line?).with_context(|| format!("{}: line {}", path.display(), n + 1))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_state::LiveProgress;

    #[test]
    fn a_file_gives_back_what_was_recorded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history.jsonl");
        let history = History::new(Some(&path)).unwrap();
        history.event(
            "kill-leader",
            Phase::Injected,
            vec![Concern::Masters, Concern::Node("n".into())],
            "master 1",
        );
        history.record(Record::Op(Op {
            caller: 1,
            endpoint: "lb".into(),
            kind: Kind::Read {
                job: "j".into(),
                stale_from: Some(7),
                long_poll: false,
            },
            invoked_us: 1,
            returned_us: 2,
            outcome: Outcome::Answer(Answer {
                status: 404,
                served_by: Some(1),
                term: Some(2),
                applied_index: Some(9),
                waiting_for: None,
                body: Body::Problem(ProblemCode::JobNotFound),
            }),
        }));
        assert_eq!(History::load(&path).unwrap(), history.records().unwrap());
    }

    #[test]
    fn live_figures_are_left_out_and_nothing_else() {
        struct Half;
        impl mooncake_state::Live for Half {
            fn progress(
                &self,
                _: &mooncake_proto::ids::ModelRef,
                _: &mooncake_proto::ids::NodeId,
            ) -> Option<LiveProgress> {
                Some(LiveProgress {
                    verified_bytes: 7,
                    objects_done: 1,
                    bytes_per_second: 3,
                    running: true,
                })
            }
        }
        let mut log = crate::checks::testing::Log::new(2);
        log.create("a", 0, &[0, 1]);
        log.acquire("a");
        let state = &log.state;
        let id = mooncake_proto::ids::JobId("a".into());
        let (dead, live) = (
            state.job_snapshot(&id, &()).unwrap(),
            state.job_snapshot(&id, &Half).unwrap(),
        );
        assert_ne!(dead, live);
        assert_eq!(JobSeen::of(&dead), JobSeen::of(&live));
        let mut other = dead.clone();
        other.last_error = Some("x".into());
        assert_ne!(JobSeen::of(&dead), JobSeen::of(&other));
    }

    /// Soak, seed 320000: the seed's other downloads came and went, and the job's version stayed.
    #[test]
    fn what_a_job_waits_for_changes_without_its_version() {
        const MOST: usize = mooncake_proto::MAX_ACQUISITIONS;
        let mut log = crate::checks::testing::Log::new(1);
        let jobs: Vec<_> = (0..=MOST).map(|i| format!("job-{i}")).collect();
        jobs.iter().for_each(|job| log.create(job, 0, &[0]));
        let id = mooncake_proto::ids::JobId(jobs[MOST].clone());
        let before = log.state.job_snapshot(&id, &()).unwrap();
        for job in &jobs[..MOST] {
            log.acquire(job);
        }
        let after = log.state.job_snapshot(&id, &()).unwrap();
        assert_eq!((before.version, &before.waiting_for), (after.version, &None));
        assert!(after.waiting_for.is_some());
        assert_eq!(JobSeen::of(&before), JobSeen::of(&after));
    }

    #[test]
    fn an_answer_of_the_balancer_is_no_masters_problem() {
        let kind = Kind::Cancel { job: "j".into() };
        let (body, _) = Body::parse(&kind, 503, b"<html>no server is available</html>");
        assert!(matches!(body, Body::Other(_)));
    }
}
