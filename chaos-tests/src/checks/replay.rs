//! The committed log, applied to the pure state machine: what every answer has to agree with.

use super::log::LogEntry;
use crate::history::JobSeen;
use mooncake_proto::{
    api::{JobStatus, PlacementState},
    ids::{JobId, ModelRef},
};
use mooncake_state::{Command, Reply, ReportId, State, TaskKind, invariants};
use std::collections::{BTreeMap, BTreeSet};

/// Entries between two looks at all invariants of the state: each look is linear in it.
const INVARIANTS_EVERY: u64 = 64;

/// What the log gives.
#[derive(Clone, Debug, Default)]
pub struct Replay {
    /// The last index of the committed log.
    pub last_index: u64,
    /// Each job, by the index of each of its changes.
    pub jobs: BTreeMap<String, Vec<(u64, JobSeen)>>,
    /// (when it was created, id, index), newest first.
    created: Vec<(u64, String, u64)>,
    /// The state's digest at the indexes that were asked for.
    pub digests: BTreeMap<u64, String>,
    /// Download attempts that were authorised, by `model_id`.
    pub downloads: BTreeMap<String, u64>,
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

impl Replay {
    /// Applies entries `1..` up to and including `last_index`; takes the digest at each index of `ask`.
    pub fn of(entries: &[LogEntry], last_index: u64, ask: &BTreeSet<u64>) -> Self {
        let mut replay = Self::default();
        let mut state = State::new();
        let mut checked = state.clone();
        for entry in entries.iter().take_while(|e| e.index <= last_index) {
            replay.last_index = entry.index;
            if let Some(command) = &entry.command {
                replay.apply(&mut state, entry.index, command);
            }
            if ask.contains(&entry.index) {
                replay.digests.insert(entry.index, state.digest().to_string());
            }
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
        match command {
            Command::AuthoriseAcquire { model, .. } => {
                if applied.reply == Reply::Done {
                    *self.downloads.entry(model.model_id.clone()).or_default() += 1;
                }
                self.overlapping_downloads.extend(overlap(index, model, state));
            }
            Command::CreateJob(create) if applied.reply == (Reply::Job { created: true }) => {
                let made = state.job(&create.job).map_or(0, |j| j.created_ms());
                self.created.push((made, create.job.0.clone(), index));
            }
            _ => {}
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
    use crate::checks::testing::Log;

    #[test]
    fn a_job_is_what_it_was_at_each_index() {
        let mut log = Log::new(3);
        log.create("a", 0, &[0, 1, 2]);
        let made = log.index();
        let report = log.acquire("a");
        log.seal(&report);
        log.stage(&report);
        let staged = log.index();
        let replay = log.replay(&BTreeSet::from([made]));
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
        assert_eq!(replay.downloads, [("m-a".to_owned(), 1)].into());
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
        let replay = Replay::of(&log.entries, made, &BTreeSet::new());
        assert_eq!(replay.last_index, made);
        assert!(replay.job_at("b", u64::MAX).is_none());
        assert_eq!(replay.newest_first(made).count(), 1);
    }
}
