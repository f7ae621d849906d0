//! More than the masters can do: thousands of open long polls and more writes than they take.

use super::{GIVE_UP, Mooncake, Subject, percentile};
use anyhow::{Context, Result};
use reqwest::StatusCode;
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};
use tokio::{sync::mpsc, task::JoinSet};

/// How long one request may take before it counts as unanswered.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Writes under way at once. What is offered beyond it is counted as not sent: a generator that queues without end
/// would measure itself.
const MAX_WRITES: usize = 4_000;
/// A poll that is refused is opened again after this time, as `Retry-After` says.
const REOPEN: Duration = Duration::from_secs(1);

/// What to offer.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Long polls open at once, spread over the masters.
    pub polls: usize,
    /// Writes offered per second, spread over the masters.
    pub writes_per_s: u32,
    /// For how long.
    pub lasts: Duration,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Writes by HTTP status; `unanswered` and `not sent` beside them.
    pub writes: BTreeMap<String, u64>,
    /// Answers of 429 and 503 without `Retry-After`.
    pub without_retry_after: u64,
    /// Latencies of the writes that were acknowledged, sorted.
    pub acknowledged: Vec<Duration>,
    /// Long polls that were open in the middle of the load.
    pub polls_open: usize,
    /// Long polls that were refused, ever.
    pub polls_refused: u64,
    /// Peak resident memory of each master.
    pub peak_memory_bytes: Vec<u64>,
    /// Terms before and after: equal if there was no election.
    pub terms: (u64, u64),
    /// Nodes that were anything but `up` when looked at, once a second.
    pub nodes_not_up: u64,
    /// Latencies of a liveness probe (`/livez`) of the leader, ten a second, sorted.
    pub probes: Vec<Duration>,
}

enum Event {
    Wrote {
        status: String,
        took: Duration,
        retry_after: bool,
    },
    PollOpened,
    PollEnded {
        refused: bool,
        retry_after: bool,
    },
}

/// Offers the load and looks at what it does. Run it on a runtime whose thread is pinned to one core, so that the
/// generator does not take what the masters need.
pub async fn overload(subject: &mut Mooncake, load: Load, mut progress: impl FnMut()) -> Result<Outcome> {
    subject.begin_series();
    let (leader, term) = tokio::time::timeout(GIVE_UP, subject.settled())
        .await
        .context("the masters do not settle")??;
    let waiting = subject.unfinished_job().await?;
    let endpoints = subject.endpoints();
    let http = subject.http();
    let (events, mut seen) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    for number in 0..load.polls {
        let url = format!(
            "{}/api/v1/model-distribution/jobs/{waiting}?wait=60s",
            endpoints[number % endpoints.len()]
        );
        let (http, events) = (http.clone(), events.clone());
        tasks.spawn(async move {
            loop {
                let _ = events.send(Event::PollOpened);
                let answer = http.get(&url).timeout(Duration::from_secs(75)).send().await;
                let (refused, retry_after) = match &answer {
                    Ok(answer) if answer.status() == StatusCode::OK => (false, true),
                    Ok(answer) => (true, says_when(answer)),
                    Err(_) => (true, true),
                };
                let _ = events.send(Event::PollEnded { refused, retry_after });
                if refused {
                    tokio::time::sleep(REOPEN).await;
                }
            }
        });
    }
    let writers: Vec<_> = endpoints
        .iter()
        .map(|endpoint| subject.writer_at(endpoint))
        .collect();
    let mut outcome = Outcome {
        terms: (term, term),
        ..Outcome::default()
    };
    let began = Instant::now();
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / load.writes_per_s);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
    let mut looks = tokio::time::interval(Duration::from_secs(1));
    let mut probes = tokio::time::interval(Duration::from_millis(100));
    probes.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut number, mut under_way, mut open) = (0u64, 0usize, 0usize);
    let (probed, mut probe_answers) = mpsc::unbounded_channel();
    while began.elapsed() < load.lasts {
        tokio::select! {
            _ = ticks.tick() => {
                if under_way >= MAX_WRITES {
                    *outcome.writes.entry("not sent".into()).or_default() += 1;
                    continue;
                }
                under_way += 1;
                let write = writers[number as usize % writers.len()](number);
                number += 1;
                let events = events.clone();
                tasks.spawn(async move {
                    let sent = Instant::now();
                    let event = match tokio::time::timeout(TIMEOUT, write).await {
                        Ok(Ok(answer)) => Event::Wrote {
                            status: answer.status().as_u16().to_string(),
                            took: sent.elapsed(),
                            retry_after: says_when(&answer),
                        },
                        _ => Event::Wrote { status: "unanswered".into(), took: sent.elapsed(), retry_after: true },
                    };
                    let _ = events.send(event);
                });
            }
            _ = looks.tick() => {
                outcome.nodes_not_up += subject.nodes_not_up().await.unwrap_or(0);
                progress();
            }
            _ = probes.tick() => {
                let request = http.get(format!("{}/livez", endpoints[leader])).timeout(TIMEOUT);
                let probed = probed.clone();
                tasks.spawn(async move {
                    let sent = Instant::now();
                    let _ = request.send().await;
                    let _ = probed.send(sent.elapsed());
                });
            }
            Some(took) = probe_answers.recv() => outcome.probes.push(took),
            Some(event) = seen.recv() => match event {
                Event::Wrote { status, took, retry_after } => {
                    under_way -= 1;
                    if status == "201" {
                        outcome.acknowledged.push(took);
                    }
                    outcome.without_retry_after += u64::from(!retry_after);
                    *outcome.writes.entry(status).or_default() += 1;
                }
                Event::PollOpened => {
                    open += 1;
                    outcome.polls_open = outcome.polls_open.max(open);
                }
                Event::PollEnded { refused, retry_after } => {
                    open -= 1;
                    outcome.polls_refused += u64::from(refused);
                    outcome.without_retry_after += u64::from(!retry_after);
                }
            },
        }
    }
    tasks.shutdown().await;
    outcome.peak_memory_bytes = subject.peak_memory_bytes()?;
    let (_, after) = tokio::time::timeout(GIVE_UP, subject.settled())
        .await
        .context("the masters do not settle after the load")??;
    outcome.terms.1 = after;
    outcome.acknowledged.sort();
    outcome.probes.sort();
    Ok(outcome)
}

/// 429 and 503 must say when to come back.
fn says_when(answer: &reqwest::Response) -> bool {
    let later = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];
    !later.contains(&answer.status()) || answer.headers().contains_key("retry-after")
}

impl Outcome {
    /// The acknowledged write below which 99 % are.
    pub fn p99_write(&self) -> Duration {
        percentile(&self.acknowledged, 0.99)
    }

    /// The probe below which 99 % are.
    pub fn p99_probe(&self) -> Duration {
        percentile(&self.probes, 0.99)
    }
}
