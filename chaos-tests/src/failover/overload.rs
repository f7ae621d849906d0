//! More than the masters can do: thousands of open long polls and more writes than they take.
//!
//! Three parts, so that none measures another's queue. The generator is a process of its own on one core
//! ([`generate`]). The probe is a thread that keeps off that core and is served before it is preempted: a small read and
//! one write ten times a second, as a caller meets the masters. And what decides whether nodes stay up is not looked at
//! from outside at all: every node measures the round trips of its own heartbeats, and its `/metrics` are read before
//! and after.
//!
//! Not measured: machines. Masters, nodes and generator share this one's cores, so that the masters have less than a
//! machine each.

use super::{
    GIVE_UP, Mooncake, Subject, generator,
    generator::{Generated, Offer},
};
use crate::report::percentile;
use anyhow::{Context, Result, ensure};
use std::{
    collections::BTreeMap,
    os::unix::process::CommandExt,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{Child, ChildStdin, ChildStdout},
};

/// Nodes: enough heartbeats for a 99th percentile of a minute.
const NODES: usize = 4;
/// Between two probes of each kind.
const PROBE_EVERY: Duration = Duration::from_millis(100);
/// The probe's own threads run before others that want its core: it measures the masters, not its turn.
const PROBE_NICENESS: i32 = -15;
/// One of a second is sent by each node per second (`heartbeat_interval`).
const HEARTBEAT_EVERY: Duration = Duration::from_secs(1);
const HEARTBEAT: &str = "mooncake_client_heartbeat_seconds_bucket{le=\"";
/// How long the generator may take beyond the load: it opens the polls first, and at the end waits for answers.
const GENERATOR_SPARE: Duration = Duration::from_secs(90);

/// How long heartbeats are looked at after the load.
const AFTERMATH: Duration = Duration::from_secs(3);

/// What to offer.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Long polls open at once, spread over the masters.
    pub polls: usize,
    /// Writes offered per second, spread over the masters.
    pub writes_per_s: u32,
    /// For how long.
    pub lasts: Duration,
    /// The generator's.
    pub core: usize,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// As the generator saw it.
    pub generated: Generated,
    /// Peak resident memory of each master.
    pub peak_memory_bytes: Vec<u64>,
    /// Terms before and after: equal if there was no election.
    pub terms: (u64, u64),
    /// How many times a node was suspected or declared down.
    pub nodes_lost: u64,
    /// Of the nodes, during the load.
    pub heartbeats: Heartbeats,
    /// How many there should be at least.
    pub heartbeats_due: u64,
    /// Those of the moments after it, when all polls hang up at once.
    pub heartbeats_after: Heartbeats,
    /// Small reads at the leader: latencies, sorted, of those answered with 200.
    pub reads: Vec<Duration>,
    /// Reads that were answered with something else, or not.
    pub reads_failed: u64,
    /// Writes at the leader: latencies, sorted, of those answered with 201.
    pub writes: Vec<Duration>,
    /// Writes that were refused, or not answered.
    pub writes_refused: u64,
}

/// Offers the load and looks at what it does. `program` is started as the generator, see [`generate`].
pub async fn overload(load: Load, mut progress: impl FnMut()) -> Result<Outcome> {
    let mut subject = Mooncake::start_with(NODES).await?;
    subject.begin_series();
    let (leader, term) = settled(&mut subject).await?;
    let endpoints = subject.endpoints();
    let waiting = subject.unfinished_job().await?;
    let offer = Offer {
        polls: load.polls,
        writes_per_s: load.writes_per_s,
        lasts_ms: load.lasts.as_millis() as u64,
        core: load.core,
        endpoints: endpoints.clone(),
        body: subject.body(),
        waiting: waiting.clone(),
    };
    let probe = Probe::start(&subject, &endpoints[leader], &waiting, load.core)?;
    let before = Heartbeats::read(&subject).await?;
    let began = Instant::now();
    let mut generator = Generator::start(&offer).await?;
    let generated = generator
        .answer(load.lasts + GENERATOR_SPARE, &mut progress)
        .await?;
    let lasted = began.elapsed();
    let heartbeats = Heartbeats::read(&subject).await?;
    let probed = probe.stop()?;
    generator.hang_up().await?;
    tokio::time::sleep(AFTERMATH).await;
    let heartbeats_after = Heartbeats::read(&subject).await?.since(&heartbeats);
    let heartbeats = heartbeats.since(&before);
    let peak_memory_bytes = subject.peak_memory_bytes()?;
    let (_, after) = settled(&mut subject).await.context("after the load")?;
    let nodes_lost = subject.nodes_lost();
    subject.finish();
    Ok(Outcome {
        generated,
        peak_memory_bytes,
        terms: (term, after),
        nodes_lost,
        heartbeats,
        heartbeats_after,
        heartbeats_due: (lasted.as_secs() / HEARTBEAT_EVERY.as_secs()) * NODES as u64,
        reads: probed.reads,
        reads_failed: probed.reads_failed,
        writes: probed.writes,
        writes_refused: probed.writes_refused,
    })
}

async fn settled(subject: &mut Mooncake) -> Result<(usize, u64)> {
    tokio::time::timeout(GIVE_UP, subject.settled())
        .await
        .context("the masters do not settle")?
}

/// This program again, as the generator.
struct Generator {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Generator {
    async fn start(offer: &Offer) -> Result<Self> {
        let mut command = std::process::Command::new(std::env::current_exe()?);
        command
            .arg(generator::FLAG)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        // SAFETY: prctl is async-signal-safe; the kernel ends the generator with this thread, which waits for it.
        unsafe {
            command.pre_exec(|| {
                let signal = Some(rustix::process::Signal::KILL);
                rustix::process::set_parent_process_death_signal(signal).map_err(Into::into)
            });
        }
        let mut child = tokio::process::Command::from(command)
            .kill_on_drop(true)
            .spawn()?;
        let mut input = child.stdin.take().context("no standard input")?;
        let output = BufReader::new(child.stdout.take().context("no standard output")?);
        let mut line = serde_json::to_vec(offer)?;
        line.push(b'\n');
        input.write_all(&line).await?;
        Ok(Self { child, input, output })
    }

    /// What came of the offer. The polls are open until [`Generator::hang_up`].
    async fn answer(&mut self, deadline: Duration, progress: &mut impl FnMut()) -> Result<Generated> {
        let mut line = String::new();
        {
            let read = self.output.read_line(&mut line);
            tokio::pin!(read);
            let mut seconds = tokio::time::interval(Duration::from_secs(1));
            let late = tokio::time::sleep(deadline);
            tokio::pin!(late);
            loop {
                tokio::select! {
                    read = &mut read => {
                        read?;
                        break;
                    }
                    () = &mut late => anyhow::bail!("the generator did not end within {deadline:?}"),
                    _ = seconds.tick() => progress(),
                }
            }
        }
        ensure!(
            !line.is_empty(),
            "the generator ended without an answer; see above"
        );
        serde_json::from_str(&line).context("the generator's answer")
    }

    async fn hang_up(mut self) -> Result<()> {
        drop(self.input);
        let status = tokio::time::timeout(GENERATOR_SPARE, self.child.wait())
            .await
            .context("the generator does not end")??;
        ensure!(status.success(), "the generator ended with {status}; see above");
        Ok(())
    }
}

/// What the probe saw.
#[derive(Default)]
struct Probed {
    reads: Vec<Duration>,
    reads_failed: u64,
    writes: Vec<Duration>,
    writes_refused: u64,
}

struct Probe {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Result<Probed>>,
}

impl Probe {
    fn start(subject: &Mooncake, leader: &str, job: &str, not_on: usize) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let read = format!("{leader}{}/{job}", super::mooncake::JOBS);
        // A client of its own: its connections do not queue behind others.
        let http = crate::cluster::http_client()?;
        let write = super::mooncake::writer(http.clone(), leader, &subject.body(), "probe-".into());
        let thread = std::thread::Builder::new().name("probe".into()).spawn({
            let stop = Arc::clone(&stop);
            move || {
                generator::keep_off(not_on)?;
                // Refused without the right to it: then the numbers hold the probe's turns too.
                let _ = rustix::process::setpriority_process(None, PROBE_NICENESS);
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()?;
                Ok(runtime.block_on(probe(http, read, write, &stop)))
            }
        })?;
        Ok(Self { stop, thread })
    }

    fn stop(self) -> Result<Probed> {
        self.stop.store(true, Ordering::Relaxed);
        let probed = self.thread.join();
        probed.map_err(|_| anyhow::anyhow!("the probe panicked"))?
    }
}

async fn probe(
    http: reqwest::Client,
    read: String,
    write: impl Fn(u64) -> super::Write,
    stop: &AtomicBool,
) -> Probed {
    let mut probed = Probed::default();
    let mut ticks = tokio::time::interval(PROBE_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        ticks.tick().await;
        let timed = async |answer: super::Write| {
            let sent = Instant::now();
            let status = answer.await.ok().map(|answer| answer.status().as_u16());
            (status, sent.elapsed())
        };
        let request = http.get(&read).timeout(generator::TIMEOUT).send();
        let reading = timed(Box::pin(async { Ok(request.await?) }));
        let writing = timed(write(number));
        number += 1;
        let ((read_status, read_took), (write_status, write_took)) = tokio::join!(reading, writing);
        match read_status {
            Some(200) => probed.reads.push(read_took),
            _ => probed.reads_failed += 1,
        }
        match write_status {
            Some(201) => probed.writes.push(write_took),
            _ => probed.writes_refused += 1,
        }
    }
    probed.reads.sort();
    probed.writes.sort();
    probed
}

/// Round trips by the upper end of their bucket, in microseconds; `u64::MAX`: slower than all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Heartbeats(BTreeMap<u64, u64>);

impl Heartbeats {
    async fn read(subject: &Mooncake) -> Result<Self> {
        let mut all = Self::default();
        for endpoint in subject.node_endpoints() {
            let url = format!("{endpoint}/metrics");
            let text = subject.http().get(url).send().await?.text().await?;
            all.add(&text).with_context(|| format!("{endpoint}/metrics"))?;
        }
        Ok(all)
    }

    /// Adds the cumulative buckets of one node's metrics.
    fn add(&mut self, metrics: &str) -> Result<()> {
        let mut lower = 0;
        let mut found = false;
        for line in metrics.lines().filter_map(|line| line.strip_prefix(HEARTBEAT)) {
            let (end, count) = line.split_once("\"} ").context("not a bucket")?;
            let end_us = match end {
                "+Inf" => u64::MAX,
                seconds => (seconds.parse::<f64>()? * 1e6).round() as u64,
            };
            let count: u64 = count.trim().parse()?;
            *self.0.entry(end_us).or_default() += count - lower;
            lower = count;
            found = true;
        }
        ensure!(found, "no {HEARTBEAT}");
        Ok(())
    }

    fn since(mut self, before: &Self) -> Self {
        for (end, count) in &mut self.0 {
            *count -= before.0.get(end).copied().unwrap_or(0).min(*count);
        }
        self
    }

    /// All of them.
    pub fn count(&self) -> u64 {
        self.0.values().sum()
    }

    /// No more than this for the share `p` of them; `None`: slower than the last bucket's end, or there are none.
    pub fn at_most(&self, p: f64) -> Option<Duration> {
        let rank = (p * self.count() as f64).ceil() as u64;
        let mut seen = 0;
        for (end_us, count) in &self.0 {
            seen += count;
            if seen >= rank && rank > 0 {
                return (*end_us != u64::MAX).then(|| Duration::from_micros(*end_us));
            }
        }
        None
    }
}

impl Outcome {
    /// The probe's read below which the share `p` is.
    pub fn read_at(&self, p: f64) -> Duration {
        percentile(&self.reads, p)
    }

    /// The probe's write below which the share `p` of the acknowledged ones is.
    pub fn write_at(&self, p: f64) -> Duration {
        percentile(&self.writes, p)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heartbeats_of_all_nodes_since_the_start_of_the_load() {
        let text = |counts: [u64; 3]| {
            let [a, b, all] = counts;
            format!(
                "# TYPE\nmooncake_client_heartbeat_seconds_sum 1\n{HEARTBEAT}0.05\"}} {a}\n{HEARTBEAT}0.1\"}} {b}\n\
                 {HEARTBEAT}+Inf\"}} {all}\n"
            )
        };
        let mut before = Heartbeats::default();
        before.add(&text([1, 1, 2])).unwrap();
        let mut after = Heartbeats::default();
        after.add(&text([90, 91, 93])).unwrap();
        after.add(&text([10, 10, 10])).unwrap();
        let during = after.since(&before);
        assert_eq!(during.count(), 89 + 1 + 1 + 10);
        assert_eq!(during.at_most(0.5), Some(Duration::from_millis(50)));
        assert_eq!(during.at_most(0.99), Some(Duration::from_millis(100)));
        assert_eq!(during.at_most(1.0), None);
        assert_eq!(Heartbeats::default().at_most(0.99), None);
        assert!(Heartbeats::default().add("nothing").is_err());
    }
}
