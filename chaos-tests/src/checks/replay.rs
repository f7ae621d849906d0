//! The committed log, applied to the pure state machine: what every answer has to agree with.

use super::log::{Base, LogEntry};
use crate::history::JobSeen;
use mooncake_proto::{
    api::{JobStatus, PlacementState},
    ids::{JobId, ModelRef, NodeId},
};
use mooncake_state::{Command, Reply, ReportId, State, TaskKind, invariants};
use std::collections::{BTreeMap, BTreeSet};

/// Entries between two looks at all invariants of the state: each look is linear in it.
const INVARIANTS_EVERY: u64 = 64;

/// What the log gives.
#[derive(Clone, Debug, Default)]
pub struct Replay {
    /// The first index at which the state is known: 0, but where masters had purged the log before.
    pub first_index: u64,
    /// The last index of the committed log.
    pub last_index: u64,
    /// Each job, by the index of each of its changes.
    pub jobs: BTreeMap<String, Vec<(u64, JobSeen)>>,
    /// (when it was created, id, index), newest first.
    created: Vec<(u64, String, u64)>,
    /// The state's digest at the indexes that were asked for.
    pub digests: BTreeMap<u64, String>,
    /// What jobs wait for, where it was asked for.
    pub waits: BTreeMap<(u64, String), Option<String>>,
    /// Download attempts that were authorised, by `model_id`.
    pub downloads: BTreeMap<String, Vec<Attempt>>,
    /// Downloads of one artifact at the same time.
    pub overlapping_downloads: Vec<String>,
    /// Reports of attempts that were over.
    pub stale_reports: u64,
    /// Those that changed something.
    pub stale_changes: Vec<String>,
    /// Broken invariants of the state, and changes that were not announced.
    pub state_faults: Vec<String>,
    /// Places where two masters' logs differ; filled by who read them.
    pub log_conflicts: Vec<String>,
    /// Commands applied, by name.
    pub commands: BTreeMap<&'static str, u64>,
}

/// One authorised download.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The node that downloads.
    pub node: String,
    /// The index at which it was authorised.
    pub from: u64,
    /// The index at which it was over; none: it was not, when the log ended.
    pub to: Option<u64>,
}

/// What a replay is asked for.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// The state's digest at these indexes.
    pub digests: BTreeSet<u64>,
    /// What these jobs wait for, at these indexes: it may change without the job.
    pub waits: BTreeMap<u64, BTreeSet<String>>,
}

impl Replay {
    /// Applies the entries behind `base` (all, if there is none) up to and including `last_index`.
    pub fn of(base: Option<Base>, entries: &[LogEntry], last_index: u64, asked: &Asked) -> Self {
        let mut replay = Self::default();
        let mut state = State::new();
        let mut running = BTreeMap::new();
        if let Some(base) = base {
            (replay.first_index, replay.last_index) = (base.index, base.index);
            state = base.state;
            replay.begin_at(&state, &mut running);
            replay.answer(&state, base.index, asked);
        }
        let first = replay.first_index;
        let mut checked = state.clone();
        let behind = entries.iter().skip_while(|e| first > 0 && e.index <= first);
        for entry in behind.take_while(|e| e.index <= last_index) {
            replay.last_index = entry.index;
            if let Some(command) = &entry.command {
                replay.apply(&mut state, entry.index, command);
                replay.follow_downloads(&state, entry.index, &mut running);
            }
            replay.answer(&state, entry.index, asked);
            if entry.index % INVARIANTS_EVERY == 0 {
                replay.look_at(&checked, &state, entry.index);
                checked = state.clone();
            }
        }
        replay.look_at(&checked, &state, replay.last_index);
        replay.nothing_changed_unannounced(&state);
        replay.created.sort_by(|a, b| (b.0, &b.1).cmp(&(a.0, &a.1)));
        replay
    }

    /// Every job as the snapshot has it. When a job was created before is not known, nor how it came to be what it is.
    fn begin_at(&mut self, state: &State, running: &mut BTreeMap<ModelRef, (NodeId, u64)>) {
        let index = self.first_index;
        for (id, job) in state.jobs() {
            self.created.push((job.created_ms(), id.0.clone(), index));
            self.jobs.extend(
                state
                    .job_snapshot(id, &())
                    .map(|snapshot| (id.0.clone(), vec![(index, JobSeen::of(&snapshot))])),
            );
        }
        self.follow_downloads(state, index, running);
    }

    fn answer(&mut self, state: &State, index: u64, asked: &Asked) {
        if asked.digests.contains(&index) {
            self.digests.insert(index, state.digest().to_string());
        }
        for job in asked.waits.get(&index).into_iter().flatten() {
            if let Some(snapshot) = state.job_snapshot(&JobId(job.clone()), &()) {
                self.waits.insert((index, job.clone()), snapshot.waiting_for);
            }
        }
    }

    /// Notes which downloads began and ended with the entry at `index`.
    fn follow_downloads(
        &mut self,
        state: &State,
        index: u64,
        running: &mut BTreeMap<ModelRef, (NodeId, u64)>,
    ) {
        let now: BTreeMap<_, _> = state
            .artifacts()
            .filter_map(|(model, artifact)| {
                let node = artifact.acquiring.as_ref()?;
                let attempt = artifact.placements.get(node)?.fence.attempt;
                Some((model.clone(), (node.clone(), attempt)))
            })
            .collect();
        for (model, _) in running.iter().filter(|(model, was)| now.get(*model) != Some(was)) {
            let attempts = self.downloads.get_mut(&model.model_id);
            if let Some(attempt) = attempts.and_then(|a| a.last_mut()) {
                attempt.to = Some(index);
            }
        }
        for (model, is) in now.iter().filter(|(model, is)| running.get(*model) != Some(is)) {
            let attempts = self.downloads.entry(model.model_id.clone()).or_default();
            attempts.push(Attempt {
                node: is.0.0.clone(),
                from: index,
                to: None,
            });
        }
        *running = now;
    }

    fn apply(&mut self, state: &mut State, index: u64, command: &Command) {
        *self.commands.entry(command.name()).or_default() += 1;
        let report = report_of(command);
        let before = report.is_some().then(|| state.clone());
        let applied = state.apply(index, command);
        if let (Some(report), Some(before)) = (report, before)
            && is_stale(report, &before)
        {
            self.stale_reports += 1;
            self.stale_changes
                .extend(judge_report(index, report, &before, state));
        }
        if let Command::AuthoriseAcquire { model, .. } = command {
            self.overlapping_downloads.extend(overlap(index, model, state));
        }
        if let Some(create) = command.created()
            && applied.reply == (Reply::Job { created: true })
        {
            let made = state.job(&create.job).map_or(0, |j| j.created_ms());
            self.created.push((made, create.job.0.clone(), index));
        }
        for id in &applied.jobs {
            if let Some(snapshot) = state.job_snapshot(id, &()) {
                let timeline = self.jobs.entry(id.0.clone()).or_default();
                timeline.push((index, JobSeen::of(&snapshot)));
            }
        }
    }

    fn look_at(&mut self, before: &State, after: &State, index: u64) {
        let broken = invariants::check(after).and_then(|()| invariants::check_step(before, after));
        if let Err(what) = broken {
            self.state_faults.push(format!("index {index}: {what}"));
        }
    }

    /// A caller's long poll is woken by what the state machine names; a change that it does not name is missed.
    fn nothing_changed_unannounced(&mut self, state: &State) {
        for (id, _) in state.jobs() {
            let now = state.job_snapshot(id, &()).map(|s| JobSeen::of(&s));
            if now.as_ref() != self.job_at(id.as_str(), u64::MAX) {
                self.state_faults
                    .push(format!("job {id} changed without a new version: {now:?}"));
            }
        }
    }

    /// The job as it was once the entry at `index` was applied.
    pub fn job_at(&self, job: &str, index: u64) -> Option<&JobSeen> {
        let timeline = self.jobs.get(job)?;
        let upto = timeline.partition_point(|(at, _)| *at <= index);
        Some(&timeline.get(upto.checked_sub(1)?)?.1)
    }

    /// The list of jobs as it was once the entry at `index` was applied.
    pub fn newest_first(&self, index: u64) -> impl Iterator<Item = (&str, JobStatus)> {
        self.created
            .iter()
            .filter(move |(_, _, at)| *at <= index)
            .filter_map(move |(_, job, _)| Some((job.as_str(), self.job_at(job, index)?.status)))
    }

    /// Ids of jobs that had not ended at the end of the log.
    pub fn live_jobs(&self) -> impl Iterator<Item = JobId> {
        self.jobs
            .iter()
            .filter(|(_, t)| t.last().is_some_and(|(_, j)| !j.status.is_terminal()))
            .map(|(id, _)| JobId(id.clone()))
    }
}

/// The report in a command, if it is one of a running attempt.
fn report_of(command: &Command) -> Option<&ReportId> {
    match command {
        Command::Seal { report, .. }
        | Command::ReportStaged { report, .. }
        | Command::ReportFailed { report, .. }
        | Command::ReportHeld { report, .. }
        | Command::ReportLost { report, .. } => Some(report),
        _ => None,
    }
}

/// Judged from the records alone: another generation, another incarnation, another attempt.
fn is_stale(report: &ReportId, before: &State) -> bool {
    let artifact = before.artifact(&report.model);
    let node = before.node(&report.node);
    let (Some(artifact), Some(node)) = (artifact, node) else {
        return true;
    };
    let fence = artifact
        .placements
        .get(&report.node)
        .map_or_else(Default::default, |p| p.fence);
    artifact.generation != report.generation
        || node.incarnation != report.incarnation
        || fence != report.fence
}

/// What a stale report changed, if it did.
pub(super) fn judge_report(index: u64, report: &ReportId, before: &State, after: &State) -> Option<String> {
    (before.digest() != after.digest())
        .then(|| format!("index {index}: {report:?} is stale and changed the state"))
}

fn overlap(index: u64, model: &ModelRef, state: &State) -> Option<String> {
    let running: Vec<_> = state
        .artifact(model)?
        .placements
        .iter()
        .filter(|(_, p)| p.kind == TaskKind::Acquire && p.state == PlacementState::Acquiring && !p.whole)
        .map(|(node, p)| (node.as_str(), p.fence))
        .collect();
    (running.len() > 1).then(|| format!("index {index}: {model} is downloaded by {running:?} at once"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::testing::{Log, node};

    #[test]
    fn a_job_is_what_it_was_at_each_index() {
        let mut log = Log::new(3);
        log.create("a", 0, &[0, 1, 2]);
        let made = log.index();
        let report = log.acquire("a");
        log.seal(&report);
        log.stage(&report);
        let staged = log.index();
        let replay = log.replay(&Asked {
            digests: BTreeSet::from([made]),
            ..Default::default()
        });
        assert!(replay.job_at("a", made - 1).is_none());
        let statuses: Vec<_> = (made..=staged)
            .map(|i| replay.job_at("a", i).unwrap().status)
            .collect();
        assert_eq!(
            statuses,
            [
                JobStatus::Planned,
                JobStatus::Seeding,
                JobStatus::Replicating,
                JobStatus::Replicating
            ]
        );
        let first = &replay.job_at("a", staged).unwrap().placements[0];
        assert_eq!(first.state, PlacementState::Staged);
        // Authorised with the entry behind the creation; over when all of it was there, which is sealing.
        let attempt = Attempt {
            node: node(0).0,
            from: made + 1,
            to: Some(made + 2),
        };
        assert_eq!(replay.downloads, [("m-a".to_owned(), vec![attempt])].into());
        assert_eq!(replay.digests.keys().collect::<Vec<_>>(), [&made]);
        assert_eq!(replay.live_jobs().collect::<Vec<_>>(), [JobId("a".into())]);
        assert_eq!(replay.state_faults, Vec::<String>::new());
    }

    #[test]
    fn it_ends_where_the_committed_log_ends() {
        let mut log = Log::new(1);
        log.create("a", 0, &[0]);
        let made = log.index();
        log.create("b", 0, &[0]);
        let replay = Replay::of(None, &log.entries, made, &Asked::default());
        assert_eq!(replay.last_index, made);
        assert!(replay.job_at("b", u64::MAX).is_none());
        assert_eq!(replay.newest_first(made).count(), 1);
    }

    #[test]
    fn behind_a_snapshot_it_goes_on_as_from_the_beginning() {
        let mut log = Log::new(2);
        log.create("a", 0, &[0, 1]);
        let report = log.acquire("a");
        let base = Base {
            index: log.index(),
            term: 1,
            state: log.state.clone(),
        };
        log.seal(&report);
        log.create("b", 1, &[1]);
        let (whole, last) = (log.replay(&Asked::default()), log.index());
        let behind = Replay::of(Some(base.clone()), &log.entries, last, &Asked::default());
        assert_eq!((behind.first_index, behind.last_index), (base.index, last));
        for index in base.index..=last {
            for job in ["a", "b"] {
                assert_eq!(behind.job_at(job, index), whole.job_at(job, index));
            }
            let (b, w): (Vec<_>, Vec<_>) = (
                behind.newest_first(index).collect(),
                whole.newest_first(index).collect(),
            );
            assert_eq!(b, w);
        }
        assert_eq!(behind.state_faults, Vec::<String>::new());
        assert!(behind.job_at("a", base.index - 1).is_none(), "not known");
        assert_eq!(whole.downloads["m-a"][0].to, behind.downloads["m-a"][0].to);
    }
}
