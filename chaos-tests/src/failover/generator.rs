//! The generator of an overload: a process of its own, pinned to one core, so that it takes from the masters no more
//! than that.

use anyhow::{Context, Result, ensure};
use reqwest::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};
use tokio::{sync::mpsc, task::JoinSet};

/// The one argument of the generator; see [`main`].
pub const FLAG: &str = "--as-generator";
/// How long one request may take before it counts as unanswered.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);
/// Writes under way at once. What is offered beyond it is counted as not sent: a generator that queues without end
/// would measure itself.
const MAX_WRITES: usize = 4_000;
/// A poll that is refused is opened again after this time, as `Retry-After` says.
const REOPEN: Duration = Duration::from_secs(1);
/// Polls opened per second before the writes begin.
const OPEN_PER_S: u32 = 1_000;
/// How long a poll asks the master to hold it, and how long the generator waits for the answer.
const POLL_WAIT: &str = "60s";
const POLL_TIMEOUT: Duration = Duration::from_secs(75);
/// A poll that has not been answered for so long is one that the master holds.
const HELD_AFTER: Duration = Duration::from_secs(2);
/// The generator's own sockets and files beside one per poll and write.
const SPARE_FILES: u64 = 4_096;

/// What to offer, and to whom.
#[derive(Debug, Serialize, Deserialize)]
pub struct Offer {
    /// Long polls open at once.
    pub polls: usize,
    /// Writes per second.
    pub writes_per_s: u32,
    /// The writes.
    pub lasts_ms: u64,
    /// To be pinned to.
    pub core: usize,
    /// The masters; polls and writes are spread over them.
    pub endpoints: Vec<String>,
    /// Of a write, but for its job id.
    pub body: Value,
    /// The job that polls wait for.
    pub waiting: String,
}

/// What came of it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Generated {
    /// Writes by HTTP status; `unanswered` and `not sent` beside them.
    pub writes: BTreeMap<String, u64>,
    /// Answers of 429 and 503 without `Retry-After`.
    pub without_retry_after: u64,
    /// Latencies of the writes that were acknowledged, in microseconds, sorted. They hold the generator's own queue.
    pub acknowledged_us: Vec<u64>,
    /// Long polls that the masters held in the middle of the load.
    pub polls_held: usize,
    /// Long polls that were refused, ever.
    pub polls_refused: u64,
}

enum Event {
    Wrote {
        status: String,
        took: Duration,
        retry_after: bool,
    },
    PollSent(usize),
    PollEnded {
        number: usize,
        refused: bool,
        retry_after: bool,
    },
}

/// The generator's whole life: the offer on the first line of standard input, what came of it on one of standard
/// output. The polls stay open until standard input ends: ten thousand callers that hang up at once are a load of
/// another kind.
pub fn main() -> Result<()> {
    let mut input = String::new();
    std::io::stdin().read_line(&mut input)?;
    let offer: Offer = serde_json::from_str(&input).context("the offer on standard input")?;
    allow_files((offer.polls + MAX_WRITES) as u64 + SPARE_FILES)?;
    pin_to(&[offer.core])?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let done = runtime.block_on(generate(&offer));
    // A read of standard input that was left behind must not hold up the end.
    runtime.shutdown_background();
    done
}

async fn generate(offer: &Offer) -> Result<()> {
    let http = crate::cluster::http_client()?;
    let (events, mut seen) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    let mut polls = Polls::new(offer.polls);
    let mut outcome = Generated::default();
    let writers: Vec<_> = offer
        .endpoints
        .iter()
        .map(|to| super::mooncake::writer(http.clone(), to, offer.body.clone(), "load-".into()))
        .collect();

    let mut opening = tokio::time::interval(Duration::from_secs(1) / OPEN_PER_S);
    opening.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
    for number in 0..offer.polls {
        opening.tick().await;
        let to = &offer.endpoints[number % offer.endpoints.len()];
        let url = format!("{to}{}/{}?wait={POLL_WAIT}", super::mooncake::JOBS, offer.waiting);
        tasks.spawn(poll(http.clone(), url, number, events.clone()));
        while let Ok(event) = seen.try_recv() {
            polls.take(event, &mut outcome);
        }
    }

    let lasts = Duration::from_millis(offer.lasts_ms);
    let (middle, end) = (tokio::time::sleep(lasts / 2), tokio::time::sleep(lasts));
    tokio::pin!(middle, end);
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / offer.writes_per_s);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
    let (mut number, mut looked) = (0u64, false);
    loop {
        tokio::select! {
            () = &mut end => break,
            () = &mut middle, if !looked => {
                looked = true;
                outcome.polls_held = polls.held();
            }
            _ = ticks.tick() => {
                if polls.writes_under_way >= MAX_WRITES {
                    *outcome.writes.entry("not sent".into()).or_default() += 1;
                    continue;
                }
                polls.writes_under_way += 1;
                tasks.spawn(write(writers[number as usize % writers.len()](number), events.clone()));
                number += 1;
            }
            Some(event) = seen.recv() => polls.take(event, &mut outcome),
            Some(_) = tasks.join_next() => {}
        }
    }
    // What is under way was offered: it is answered, or counts as not.
    let until = tokio::time::Instant::now() + TIMEOUT;
    while polls.writes_under_way > 0 {
        match tokio::time::timeout_at(until, seen.recv()).await {
            Ok(Some(event)) => polls.take(event, &mut outcome),
            _ => break,
        }
    }
    outcome.acknowledged_us.sort_unstable();
    println!("{}", serde_json::to_string(&outcome)?);
    tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink())).await??;
    tasks.shutdown().await;
    Ok(())
}

async fn poll(http: reqwest::Client, url: String, number: usize, events: mpsc::UnboundedSender<Event>) {
    loop {
        let _ = events.send(Event::PollSent(number));
        let answer = http.get(&url).timeout(POLL_TIMEOUT).send().await;
        let (refused, retry_after) = match &answer {
            Ok(answer) if answer.status() == StatusCode::OK => (false, true),
            Ok(answer) => (true, says_when(answer)),
            Err(_) => (true, true),
        };
        let ended = Event::PollEnded {
            number,
            refused,
            retry_after,
        };
        let _ = events.send(ended);
        if refused {
            tokio::time::sleep(REOPEN).await;
        }
    }
}

async fn write(write: super::Write, events: mpsc::UnboundedSender<Event>) {
    let sent = Instant::now();
    let (status, retry_after) = match tokio::time::timeout(TIMEOUT, write).await {
        Ok(Ok(answer)) => (answer.status().as_u16().to_string(), says_when(&answer)),
        _ => ("unanswered".to_owned(), true),
    };
    let _ = events.send(Event::Wrote {
        status,
        took: sent.elapsed(),
        retry_after,
    });
}

/// 429 and 503 must say when to come back.
fn says_when(answer: &reqwest::Response) -> bool {
    let later = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];
    !later.contains(&answer.status()) || answer.headers().contains_key("retry-after")
}

/// What is under way.
struct Polls {
    /// When each was sent, if it is not answered.
    sent: Vec<Option<Instant>>,
    writes_under_way: usize,
}

impl Polls {
    fn new(count: usize) -> Self {
        Self {
            sent: vec![None; count],
            writes_under_way: 0,
        }
    }

    fn held(&self) -> usize {
        let held = |sent: &&Option<Instant>| sent.is_some_and(|at| at.elapsed() >= HELD_AFTER);
        self.sent.iter().filter(held).count()
    }

    fn take(&mut self, event: Event, outcome: &mut Generated) {
        match event {
            Event::Wrote {
                status,
                took,
                retry_after,
            } => {
                self.writes_under_way -= 1;
                if status == "201" {
                    outcome.acknowledged_us.push(took.as_micros() as u64);
                }
                outcome.without_retry_after += u64::from(!retry_after);
                *outcome.writes.entry(status).or_default() += 1;
            }
            Event::PollSent(number) => self.sent[number] = Some(Instant::now()),
            Event::PollEnded {
                number,
                refused,
                retry_after,
            } => {
                self.sent[number] = None;
                outcome.polls_refused += u64::from(refused);
                outcome.without_retry_after += u64::from(!retry_after);
            }
        }
    }
}

/// This thread runs on any core but this one; on the only one if there is no other.
pub(super) fn keep_off(core: usize) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let others: Vec<usize> = (0..cores).filter(|other| *other != core).collect();
    match others.is_empty() {
        true => Ok(()),
        false => pin_to(&others),
    }
}

/// This thread, and those that it starts, run on these cores only.
fn pin_to(wanted: &[usize]) -> Result<()> {
    let last = wanted.iter().max().copied().unwrap_or(0);
    ensure!(last < libc::CPU_SETSIZE as usize, "there is no core {last}");
    // SAFETY: the set is plain data, all zeroes is the empty one; CPU_SET writes inside it as was checked above.
    let pinned = unsafe {
        let mut cores: libc::cpu_set_t = std::mem::zeroed();
        for core in wanted {
            libc::CPU_SET(*core, &mut cores);
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &cores)
    };
    ensure!(
        pinned == 0,
        "cannot pin a thread to the cores {wanted:?}: {}",
        std::io::Error::last_os_error()
    );
    Ok(())
}

/// Lets this process have so many files open.
pub(crate) fn allow_files(wanted: u64) -> Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= wanted) {
        return Ok(());
    }
    let maximum = limit.maximum.map(|maximum| maximum.max(wanted));
    let limit = Rlimit {
        current: Some(wanted),
        maximum,
    };
    setrlimit(Resource::Nofile, limit).with_context(|| format!("raising the limit of open files to {wanted}"))
}
