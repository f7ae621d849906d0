//! The generator of an overload: a process of its own, pinned to one core, so that it takes from the masters no more
//! than that.
//!
//! It has to offer what it is told however busy the machine is, or it measures itself: bodies are encoded once, answers
//! are read whole so that connections are used again, and it runs before others that want its core.

use super::mooncake::Create;
use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{StatusCode, Uri, header::CONTENT_TYPE};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio_util::task::TaskTracker;

/// The one argument of the generator; see [`main`].
pub const FLAG: &str = "--as-generator";
/// Writes without an answer, and writes that were offered but not sent, among the statuses of [`Generated::writes`].
pub const UNANSWERED: &str = "unanswered";
/// See [`UNANSWERED`].
pub const NOT_SENT: &str = "not sent";
/// The generator runs before others that want its core.
const NICENESS: i32 = -10;
/// What is due is sent so often.
const SEND_EVERY: Duration = Duration::from_millis(1);
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
    /// Writes by HTTP status; [`UNANSWERED`] and [`NOT_SENT`] beside them.
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

/// The generator's whole life: the offer on the first line of standard input, what came of it on one of standard
/// output. The polls stay open until standard input ends: ten thousand callers that hang up at once are a load of
/// another kind.
pub fn main() -> Result<()> {
    let mut input = String::new();
    std::io::stdin().read_line(&mut input)?;
    let offer: Offer = serde_json::from_str(&input).context("the offer on standard input")?;
    allow_files((offer.polls + MAX_WRITES) as u64 + SPARE_FILES)?;
    pin_to(&[offer.core])?;
    // Refused without the right to it: then it waits for its turn behind masters, and may not offer what it should.
    let _ = rustix::process::setpriority_process(None, NICENESS);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let done = runtime.block_on(generate(&offer));
    // Polls, and a read of standard input that was left behind, must not hold up the end.
    runtime.shutdown_background();
    done
}

async fn generate(offer: &Offer) -> Result<()> {
    let http = Client::builder(TokioExecutor::new()).build_http();
    let seen = Arc::new(Mutex::new(Seen::new(offer.polls)));
    let mut opening = tokio::time::interval(Duration::from_secs(1) / OPEN_PER_S);
    opening.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
    for number in 0..offer.polls {
        opening.tick().await;
        let to = &offer.endpoints[number % offer.endpoints.len()];
        let url = format!("{to}{}/{}?wait={POLL_WAIT}", super::mooncake::JOBS, offer.waiting);
        tokio::spawn(poll(http.clone(), url.parse()?, number, Arc::clone(&seen)));
    }
    // The last ones are held by then, or refused.
    tokio::time::sleep(HELD_AFTER).await;

    let create = Create::new(&offer.body);
    let to: Vec<Uri> = offer
        .endpoints
        .iter()
        .map(|to| format!("{to}{}", super::mooncake::JOBS).parse())
        .collect::<Result<_, _>>()?;
    let writes = TaskTracker::new();
    let lasts = Duration::from_millis(offer.lasts_ms);
    let all = (lasts.as_secs_f64() * f64::from(offer.writes_per_s)).round() as usize;
    let began = Instant::now();
    let (mut offered, mut polls_held) = (0, None);
    let mut ticks = tokio::time::interval(SEND_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while offered < all {
        ticks.tick().await;
        let elapsed = began.elapsed();
        if elapsed >= lasts / 2 && polls_held.is_none() {
            polls_held = Some(seen.lock().polls_held());
        }
        let due = (elapsed.as_secs_f64() * f64::from(offer.writes_per_s)) as usize;
        for number in offered..due.min(all) {
            if writes.len() >= MAX_WRITES {
                seen.lock().not_sent += 1;
                continue;
            }
            let request = hyper::Request::post(&to[number % to.len()])
                .header(CONTENT_TYPE, "application/json")
                .body(Full::from(create.body(&format!("load-{number}"))))?;
            writes.spawn(write(http.clone(), request, Arc::clone(&seen)));
        }
        offered = offered.max(due.min(all));
    }
    // What is under way was offered: it is answered, or counts as not; no write is under way for longer than its time-out.
    writes.close();
    writes.wait().await;
    println!(
        "{}",
        serde_json::to_string(&seen.lock().outcome(polls_held.unwrap_or(0)))?
    );
    tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink())).await??;
    Ok(())
}

type Http = Client<HttpConnector, Full<Bytes>>;

/// The status, and whether an answer that says "later" says when. The whole answer is read, so that the connection can
/// be used again.
async fn ask(http: Http, request: hyper::Request<Full<Bytes>>) -> Result<(StatusCode, bool)> {
    let (head, body) = http.request(request).await?.into_parts();
    body.collect().await?;
    let later = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];
    let says_when = !later.contains(&head.status) || head.headers.contains_key("retry-after");
    Ok((head.status, says_when))
}

async fn poll(http: Http, url: Uri, number: usize, seen: Arc<Mutex<Seen>>) {
    loop {
        seen.lock().polls[number].sent = Some(Instant::now());
        let mut request = hyper::Request::new(Full::default());
        *request.uri_mut() = url.clone();
        let answer = tokio::time::timeout(POLL_TIMEOUT, ask(http.clone(), request)).await;
        let good = seen.lock().poll_ended(number, answer.ok().and_then(Result::ok));
        if !good {
            tokio::time::sleep(REOPEN).await;
        }
    }
}

async fn write(http: Http, request: hyper::Request<Full<Bytes>>, seen: Arc<Mutex<Seen>>) {
    let sent = Instant::now();
    let answer = tokio::time::timeout(TIMEOUT, ask(http, request)).await;
    seen.lock()
        .wrote(sent.elapsed(), answer.ok().and_then(Result::ok));
}

#[derive(Clone, Copy, Default)]
struct Poll {
    /// If it is not answered.
    sent: Option<Instant>,
    /// Whether the one before it was held to its end.
    before: bool,
}

/// What was seen so far.
struct Seen {
    polls: Vec<Poll>,
    polls_refused: u64,
    without_retry_after: u64,
    statuses: BTreeMap<StatusCode, u64>,
    unanswered: u64,
    not_sent: u64,
    acknowledged_us: Vec<u64>,
}

impl Seen {
    fn new(polls: usize) -> Self {
        Self {
            polls: vec![Poll::default(); polls],
            polls_refused: 0,
            without_retry_after: 0,
            statuses: BTreeMap::new(),
            unanswered: 0,
            not_sent: 0,
            acknowledged_us: Vec::new(),
        }
    }

    /// One that was sent again a moment ago is held if the one before it was.
    fn polls_held(&self) -> usize {
        let held = |poll: &&Poll| {
            poll.sent
                .is_some_and(|at| poll.before || at.elapsed() >= HELD_AFTER)
        };
        self.polls.iter().filter(held).count()
    }

    /// Whether it was held to its end.
    fn poll_ended(&mut self, number: usize, answer: Option<(StatusCode, bool)>) -> bool {
        let good = answer.is_some_and(|(status, _)| status == StatusCode::OK);
        self.polls[number] = Poll {
            sent: None,
            before: good,
        };
        self.polls_refused += u64::from(!good);
        self.without_retry_after += u64::from(answer.is_some_and(|(_, says_when)| !says_when));
        good
    }

    fn wrote(&mut self, took: Duration, answer: Option<(StatusCode, bool)>) {
        let Some((status, says_when)) = answer else {
            self.unanswered += 1;
            return;
        };
        if status == StatusCode::CREATED {
            self.acknowledged_us.push(took.as_micros() as u64);
        }
        self.without_retry_after += u64::from(!says_when);
        *self.statuses.entry(status).or_default() += 1;
    }

    fn outcome(&self, polls_held: usize) -> Generated {
        let statuses = self.statuses.iter();
        let mut writes: BTreeMap<String, u64> = statuses.map(|(s, n)| (s.as_u16().to_string(), *n)).collect();
        for (name, count) in [(UNANSWERED, self.unanswered), (NOT_SENT, self.not_sent)] {
            if count > 0 {
                writes.insert(name.into(), count);
            }
        }
        let mut acknowledged_us = self.acknowledged_us.clone();
        acknowledged_us.sort_unstable();
        Generated {
            writes,
            without_retry_after: self.without_retry_after,
            acknowledged_us,
            polls_held,
            polls_refused: self.polls_refused,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_seen_is_counted() {
        let mut seen = Seen::new(3);
        let long_ago = Instant::now().checked_sub(HELD_AFTER);
        seen.polls[0].sent = long_ago;
        seen.polls[1].sent = Some(Instant::now());
        seen.polls[2].sent = long_ago;
        assert_eq!(seen.polls_held(), 2, "one was just sent");
        assert!(seen.poll_ended(0, Some((StatusCode::OK, true))));
        assert_eq!(seen.polls_held(), 1);
        seen.polls[0].sent = Some(Instant::now());
        assert_eq!(seen.polls_held(), 2, "sent again after one that was held");
        assert!(!seen.poll_ended(1, Some((StatusCode::TOO_MANY_REQUESTS, false))));
        assert!(!seen.poll_ended(2, None));
        seen.wrote(Duration::from_micros(7), Some((StatusCode::CREATED, true)));
        seen.wrote(Duration::ZERO, Some((StatusCode::SERVICE_UNAVAILABLE, false)));
        seen.wrote(Duration::ZERO, None);
        let outcome = seen.outcome(3);
        let writes = outcome
            .writes
            .iter()
            .map(|(status, count)| (status.as_str(), *count));
        assert_eq!(
            writes.collect::<Vec<_>>(),
            [("201", 1), ("503", 1), (UNANSWERED, 1)]
        );
        assert_eq!(outcome.acknowledged_us, [7]);
        assert_eq!((outcome.polls_refused, outcome.without_retry_after), (2, 2));
    }
}
