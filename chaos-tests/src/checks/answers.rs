//! Every answer of a master is what the committed log gives at the index that the answer names.
//!
//! Not judged: live figures (they are not in [`JobSeen`]); an answer whose index may be later than its reading, which are
//! the problems of writes and long polls (of those only what later entries cannot change); answers without an index;
//! answers from before the log that could be read, where masters had purged it.

use super::{Evidence, Findings, Replay};
use crate::history::{Body, JobSeen, Kind, Op};
use mooncake_proto::api::{JobStatus, ProblemCode};

pub(super) fn check(evidence: &Evidence, findings: &mut Findings) {
    let Some(replay) = &evidence.replay else { return };
    for op in &evidence.ops {
        let Some(answer) = op.answer() else { continue };
        let (Some(_), Some(index)) = (answer.served_by, answer.applied_index) else {
            continue;
        };
        let fault = fault(replay, op, index, answer.status, &answer.body);
        let fault = fault.or_else(|| waits(replay, op.seen()?, index, answer.waiting_for.as_deref()));
        if let Some(fault) = fault {
            findings.add(format!(
                "{} at {} µs, index {index}, {:?}: {fault}",
                op.endpoint, op.returned_us, op.kind
            ));
        }
    }
}

fn fault(replay: &Replay, op: &Op, index: u64, status: u16, body: &Body) -> Option<String> {
    if index < replay.first_index {
        return None;
    }
    if index > replay.last_index {
        return Some(format!(
            "the index is not in the committed log, which ends at {}",
            replay.last_index
        ));
    }
    let job_at = || op.kind.job().and_then(|job| replay.job_at(job, index));
    match (&op.kind, body) {
        (_, Body::Job(seen)) => match job_at() {
            None => Some(format!("the log has no such job there; answered was {seen:?}")),
            Some(logged) if logged != seen => Some(difference(logged, seen)),
            Some(_) => None,
        },
        (Kind::List { limit, .. }, Body::List(lines)) => {
            let logged: Vec<_> = replay.newest_first(index).take(*limit).collect();
            let answered: Vec<_> = lines.iter().map(|l| (l.job.as_str(), l.status)).collect();
            (logged != answered).then(|| format!("the log gives {logged:?}, answered was {answered:?}"))
        }
        (Kind::Read { long_poll: false, .. }, Body::Problem(ProblemCode::JobNotFound)) => {
            job_at().map(|logged| {
                format!(
                    "the log has the job, in version {}; the answer is 404",
                    logged.version
                )
            })
        }
        (Kind::Create { .. }, Body::Problem(ProblemCode::JobConflict)) if job_at().is_none() => {
            Some("a conflict with a job that the log does not have".into())
        }
        (Kind::Cancel { .. }, Body::Problem(ProblemCode::JobTerminal)) => {
            let ended = |j: &JobSeen| j.status.is_terminal() && j.status != JobStatus::Canceled;
            (!job_at().is_some_and(ended)).then(|| "the job has not ended by the log".into())
        }
        (_, Body::Problem(ProblemCode::Internal)) => Some("an internal error".into()),
        (_, Body::Other(text)) => Some(format!("{status} with an unreadable body: {text}")),
        (_, Body::List(_)) => Some("a list where none was asked for".into()),
        (_, Body::Problem(_)) => None,
    }
}

/// What a job waits for is a function of the whole state: it changes with other jobs, without a new version. Nodes with a
/// `--max-transfers`, which the log does not know, would make it more than that: no soak has one.
fn waits(replay: &Replay, seen: &JobSeen, index: u64, answered: Option<&str>) -> Option<String> {
    let logged = replay.waits.get(&(index, seen.job.clone()))?;
    (logged.as_deref() != answered)
        .then(|| format!("by the log it waits for {logged:?}, answered was {answered:?}"))
}

fn difference(logged: &JobSeen, seen: &JobSeen) -> String {
    if (logged.status, logged.version, &logged.placements) == (seen.status, seen.version, &seen.placements) {
        return "they agree in version, status and placements and differ in another recorded field".into();
    }
    format!("the log gives {logged:?}, answered was {seen:?}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::testing::*;
    use crate::history::{Answer, LineSeen, Outcome};

    const NAME: &str = "answers";

    /// A log of two jobs, and the snapshot of the first one at each index.
    fn log() -> (Log, u64, u64) {
        let mut log = Log::new(2);
        log.create("a", 0, &[0, 1]);
        let made = log.index();
        log.acquire("a");
        let acquiring = log.index();
        log.create("b", 1, &[1]);
        (log, made, acquiring)
    }

    fn answer(run: &mut Run, kind: Kind, status: u16, index: u64, body: Body) {
        run.evidence.ops.push(Op {
            caller: 1,
            endpoint: "m1".into(),
            kind,
            invoked_us: 0,
            returned_us: 1,
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

    fn read(job: &str) -> Kind {
        Kind::Read {
            job: job.into(),
            stale_from: None,
            long_poll: false,
        }
    }

    #[test]
    fn what_the_log_says_is_accepted() {
        let (log, made, acquiring) = log();
        let mut run = Run::new();
        let last = log.index();
        run.replay(log);
        let replay = run.evidence.replay.as_ref().unwrap();
        let [first, second] = [made, acquiring].map(|i| replay.job_at("a", i).unwrap().clone());
        assert_ne!(first, second);
        let lines = |jobs: &[&str]| {
            let line = |job: &&str| LineSeen {
                job: (*job).into(),
                status: replay.job_at(job, last).unwrap().status,
            };
            Body::List(jobs.iter().map(line).collect())
        };
        let both = lines(&["b", "a"]);
        answer(&mut run, read("a"), 200, made, Body::Job(first));
        answer(&mut run, read("a"), 200, last, Body::Job(second));
        answer(
            &mut run,
            read("b"),
            404,
            made,
            Body::Problem(ProblemCode::JobNotFound),
        );
        let list = Kind::List {
            stale_from: None,
            limit: 10,
        };
        answer(&mut run, list, 200, last, both);
        assert_eq!(run.broken(NAME), 0);
    }

    #[test]
    fn what_it_does_not_say_is_noticed() {
        let (log, made, acquiring) = log();
        let mut run = Run::new();
        let last = log.index();
        run.replay(log);
        let replay = run.evidence.replay.as_ref().unwrap();
        let old = replay.job_at("a", made).unwrap().clone();
        let mut subtle = old.clone();
        subtle.rest = "0".into();
        let list = Kind::List {
            stale_from: None,
            limit: 10,
        };
        answer(&mut run, read("a"), 200, acquiring, Body::Job(old.clone()));
        answer(&mut run, read("a"), 200, made, Body::Job(subtle));
        answer(&mut run, read("a"), 200, last + 1, Body::Job(old));
        answer(
            &mut run,
            read("b"),
            404,
            last,
            Body::Problem(ProblemCode::JobNotFound),
        );
        answer(&mut run, list, 200, last, Body::List(vec![]));
        answer(&mut run, read("a"), 200, last, Body::Other("{}".into()));
        let cancel = Kind::Cancel { job: "a".into() };
        answer(
            &mut run,
            cancel,
            409,
            last,
            Body::Problem(ProblemCode::JobTerminal),
        );
        assert_eq!(run.broken(NAME), 7);
    }

    /// What a job waits for changes with other jobs; it is compared at the index of the answer.
    #[test]
    fn what_a_job_waits_for_is_compared_too() {
        const MOST: usize = mooncake_proto::MAX_ACQUISITIONS;
        let mut log = Log::new(1);
        let jobs: Vec<_> = (0..=MOST).map(|i| format!("job-{i}")).collect();
        jobs.iter().for_each(|job| log.create(job, 0, &[0]));
        let last = &jobs[MOST];
        let id = mooncake_proto::ids::JobId(last.clone());
        let snapshot = |log: &Log| log.state.job_snapshot(&id, &()).unwrap();
        let (before, at_first) = (snapshot(&log), log.index());
        for job in &jobs[..MOST] {
            log.acquire(job);
        }
        let (after, at_last) = (snapshot(&log), log.index());
        assert!(before.waiting_for.is_none() && after.waiting_for.is_some());
        let mut run = Run::new();
        for (index, waiting_for) in [
            (at_first, &before.waiting_for),
            (at_last, &after.waiting_for),
            (at_first, &after.waiting_for),
            (at_last, &before.waiting_for),
        ] {
            answer(&mut run, read(last), 200, index, Body::Job(JobSeen::of(&before)));
            if let Some(Outcome::Answer(answer)) = run.evidence.ops.last_mut().map(|op| &mut op.outcome) {
                answer.waiting_for.clone_from(waiting_for);
            }
        }
        run.replay(log);
        assert_eq!(run.broken(NAME), 2, "each of the two in the other one's place");
    }
}
