//! Following a job to its end.

use crate::{
    api::Api,
    cli::Format,
    error::Failure,
    output::{self, bytes, name, percent},
};
use indicatif::{ProgressBar, ProgressStyle};
use mooncake_proto::{
    api::{JobSnapshot, JobStatus, PlacementState},
    ids::JobId,
};
use std::time::{Duration, Instant};

/// How long a master holds an answer back while nothing happens: short where a progress bar shows the live
/// byte counts, long where only changes are printed.
const WAIT_BAR: Duration = Duration::from_secs(1);
const WAIT_LINES: Duration = Duration::from_secs(5);
const WAIT_QUIET: Duration = Duration::from_secs(20);
/// How long unreachable masters are waited for: transfers go on without them.
const PATIENCE: Duration = Duration::from_secs(120);
/// A line of progress is worth it after so many per cent.
const LINE_EVERY_PERCENT: u64 = 10;

/// One look at a job.
pub async fn get(api: &Api, id: &JobId) -> Result<JobSnapshot, Failure> {
    api.get(&["api", "v1", "model-distribution", "jobs", id.as_str()], &[])
        .await
}

/// Follows `id`; the last snapshot is printed in `format`. Fails if the job did not complete.
pub async fn follow(api: &Api, id: &JobId, format: Format) -> Result<(), Failure> {
    let mut view = View::new(format);
    let mut job = get(api, id).await?;
    let mut silent_since: Option<Instant> = None;
    loop {
        view.show(&job);
        if job.status.is_terminal() {
            break;
        }
        let wait = view.wait();
        let query = [
            ("wait", format!("{}s", wait.as_secs())),
            ("since", job.version.to_string()),
        ];
        let path = ["api", "v1", "model-distribution", "jobs", id.as_str()];
        match api.poll(&path, &query, wait).await {
            Ok(next) => {
                job = next;
                silent_since = None;
            }
            Err(Failure::Unreachable(why)) => {
                let since = *silent_since.get_or_insert_with(|| {
                    view.remark(&format!(
                        "no master answers; transfers go on without them, still trying for {PATIENCE:?}"
                    ));
                    Instant::now()
                });
                if since.elapsed() >= PATIENCE {
                    let hint = format!("mooncakectl jobs watch {id}");
                    return Err(Failure::Unreachable(format!(
                        "lost sight of job {id}: {why}\nGo on with: {hint}"
                    )));
                }
            }
            Err(other) => return Err(other),
        }
    }
    view.end();
    output::print(format, &job, output::job);
    outcome(&job)
}

/// Success only for a completed job.
pub fn outcome(job: &JobSnapshot) -> Result<(), Failure> {
    match job.status {
        JobStatus::Completed => Ok(()),
        status => {
            let why = job.last_error.as_deref().unwrap_or("no reason is given");
            Err(Failure::Job(format!(
                "job {} is {}: {why}",
                job.job_id,
                name(status)
            )))
        }
    }
}

/// A bar on a terminal, lines elsewhere, nothing beside JSON.
enum View {
    Bar(ProgressBar),
    Lines { last: String, percent: u64 },
    Quiet,
}

impl View {
    fn new(format: Format) -> Self {
        match format {
            Format::Json => Self::Quiet,
            Format::Table if output::is_live() => {
                let bar = output::bytes_bar(0, "");
                let style = "{bar:30} {bytes}/{total_bytes} {msg}";
                bar.set_style(ProgressStyle::with_template(style).expect("a valid template"));
                Self::Bar(bar)
            }
            Format::Table => Self::Lines {
                last: String::new(),
                percent: 0,
            },
        }
    }

    const fn wait(&self) -> Duration {
        match self {
            Self::Bar(_) => WAIT_BAR,
            Self::Lines { .. } => WAIT_LINES,
            Self::Quiet => WAIT_QUIET,
        }
    }

    fn show(&mut self, job: &JobSnapshot) {
        let p = &job.progress;
        match self {
            Self::Quiet => {}
            Self::Bar(bar) => {
                bar.set_length(p.bytes_total);
                bar.set_position(p.bytes_staged);
                bar.set_message(format!(
                    "{}/s {} {}/{} staged",
                    bytes(p.bytes_per_second),
                    name(job.status),
                    p.placements_staged,
                    p.placements_total
                ));
            }
            Self::Lines { last, percent: shown } => {
                let failed = job
                    .placements
                    .iter()
                    .filter(|p| p.state == PlacementState::Failed)
                    .count();
                let failed = if failed > 0 {
                    format!(", {failed} failed")
                } else {
                    String::new()
                };
                let state = format!(
                    "{} {}/{} staged{failed}",
                    name(job.status),
                    p.placements_staged,
                    p.placements_total
                );
                let done = percent(p.bytes_staged, p.bytes_total);
                if state != *last || done >= *shown + LINE_EVERY_PERCENT {
                    let (staged, total) = (bytes(p.bytes_staged), bytes(p.bytes_total));
                    eprintln!(
                        "{}: {state}, {staged} of {total} ({done}%), {}/s",
                        job.job_id,
                        bytes(p.bytes_per_second)
                    );
                    *last = state;
                    *shown = done;
                }
            }
        }
    }

    fn remark(&self, text: &str) {
        match self {
            Self::Bar(bar) => bar.suspend(|| eprintln!("mooncakectl: {text}")),
            Self::Lines { .. } | Self::Quiet => eprintln!("mooncakectl: {text}"),
        }
    }

    fn end(&self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}
