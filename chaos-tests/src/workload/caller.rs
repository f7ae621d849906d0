//! One caller: asks, waits for the answer, records both.

use super::{
    ANSWER_TIMEOUT, Scene,
    audit::Auditor,
    planner::{Known, Planner, Sent, Step},
};
use crate::history::{Answer, Body, History, Kind, Op, Outcome, Record};
use anyhow::Result;
use mooncake_proto::api::{HEADER_APPLIED_INDEX, HEADER_SERVED_BY, HEADER_TERM};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::{sync::watch, task::JoinSet, time::MissedTickBehavior};

/// Longest wait of a long poll.
const POLL: Duration = Duration::from_millis(1500);
/// Lines of a list.
const LIST_LIMIT: usize = 25;
/// Of all requests, those through the load balancer (the first endpoint).
const THROUGH_BALANCER: f64 = 0.5;
/// Writes under way at once: more would only measure the writer.
const MAX_WRITES: usize = 64;

/// Where requests go.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// `lb`, `m1`, …
    pub name: String,
    /// Base URL.
    pub url: String,
}

/// One caller.
#[derive(Clone)]
pub struct Caller {
    number: u32,
    endpoints: Vec<Endpoint>,
    http: reqwest::Client,
    history: Arc<History>,
    auditor: Arc<Auditor>,
    /// What it has seen of each job: the version, and the index of the answer.
    seen: BTreeMap<String, (u64, u64)>,
    /// The highest index that it has seen.
    index: u64,
}

impl Caller {
    /// A caller who has seen nothing.
    pub fn new(number: u32, scene: &Scene, history: Arc<History>, auditor: Arc<Auditor>) -> Self {
        Self {
            number,
            endpoints: scene.endpoints.clone(),
            http: scene.http.clone(),
            history,
            auditor,
            seen: BTreeMap::new(),
            index: 0,
        }
    }

    pub(super) async fn run(
        mut self,
        mut planner: Planner,
        seed: u64,
        max_pause: Duration,
        mut stop: watch::Receiver<bool>,
    ) -> Result<()> {
        let mut rng = StdRng::seed_from_u64(seed.rotate_left(17) ^ u64::from(self.number));
        while !*stop.borrow() {
            let at = match rng.random_bool(THROUGH_BALANCER) || self.endpoints.len() == 1 {
                true => 0,
                false => rng.random_range(1..self.endpoints.len()),
            };
            self.take(at, planner.step()).await;
            let pause = rng.random_range(Duration::ZERO..=max_pause);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = stop.wait_for(|stop| *stop) => {}
            }
        }
        Ok(())
    }

    /// One step at one endpoint.
    pub async fn take(&mut self, endpoint: usize, step: Step) -> Op {
        match step {
            Step::Create(sent) => self.create(endpoint, &sent).await,
            Step::Read { job, stale } => {
                let kind = Kind::Read {
                    job,
                    stale_from: stale.then_some(self.index),
                    long_poll: false,
                };
                self.ask(endpoint, kind, None).await
            }
            Step::Poll { job } => {
                let kind = Kind::Read {
                    job,
                    stale_from: None,
                    long_poll: true,
                };
                self.ask(endpoint, kind, None).await
            }
            Step::Cancel { job } => self.ask(endpoint, Kind::Cancel { job }, None).await,
            Step::List { stale } => {
                let kind = Kind::List {
                    stale_from: stale.then_some(self.index),
                    limit: LIST_LIMIT,
                };
                self.ask(endpoint, kind, None).await
            }
        }
    }

    /// POSTs a job.
    pub async fn create(&mut self, endpoint: usize, sent: &Sent) -> Op {
        let kind = Kind::Create {
            job: sent.job.clone(),
            body: sent.body.clone(),
        };
        self.ask(endpoint, kind, Some(&sent.request)).await
    }

    async fn ask(&mut self, endpoint: usize, kind: Kind, body: Option<&serde_json::Value>) -> Op {
        let Endpoint { name, url } = &self.endpoints[endpoint];
        let jobs = format!("{url}/api/v1/model-distribution/jobs");
        let stale = kind
            .stale_from()
            .map(|from| format!("consistency=stale&min_index={from}"));
        let request = match &kind {
            Kind::Create { .. } => self
                .http
                .post(jobs)
                .json(body.unwrap_or(&serde_json::Value::Null)),
            Kind::Cancel { job } => self.http.post(format!("{jobs}/{job}/cancel")),
            Kind::List { limit, .. } => {
                let stale = stale.map(|s| format!("&{s}")).unwrap_or_default();
                self.http.get(format!("{jobs}?limit={limit}{stale}"))
            }
            Kind::Read { job, long_poll, .. } => {
                let wait = match (long_poll, self.seen.get(job)) {
                    (true, Some((version, _))) => format!("wait={}ms&since={version}", POLL.as_millis()),
                    (true, None) => format!("wait={}ms", POLL.as_millis()),
                    (false, _) => String::new(),
                };
                let query: Vec<_> = [Some(wait).filter(|w| !w.is_empty()), stale]
                    .into_iter()
                    .flatten()
                    .collect();
                // Both forms of the API are used.
                match query.is_empty() {
                    true => self.http.get(format!("{jobs}?job_id={job}")),
                    false => self.http.get(format!("{jobs}/{job}?{}", query.join("&"))),
                }
            }
        };
        let invoked_us = self.history.now_us();
        let outcome = match answer(request.timeout(ANSWER_TIMEOUT), &kind).await {
            Ok(answer) => Outcome::Answer(answer),
            Err(e) => Outcome::NoAnswer(causes(&e)),
        };
        let op = Op {
            caller: self.number,
            endpoint: name.clone(),
            kind,
            invoked_us,
            returned_us: self.history.now_us(),
            outcome,
        };
        if let Some(index) = op.answer().and_then(|a| a.applied_index) {
            self.index = self.index.max(index);
            if let Some(seen) = op.seen() {
                self.seen.insert(seen.job.clone(), (seen.version, index));
                self.auditor.look(seen);
            }
        }
        self.history.record(Record::Op(op.clone()));
        op
    }
}

async fn answer(request: reqwest::RequestBuilder, kind: &Kind) -> reqwest::Result<Answer> {
    let response = request.send().await?;
    let status = response.status().as_u16();
    let number = |name: &str| response.headers().get(name)?.to_str().ok()?.parse().ok();
    let (served_by, term, applied_index) = (
        number(HEADER_SERVED_BY),
        number(HEADER_TERM),
        number(HEADER_APPLIED_INDEX),
    );
    let bytes = response.bytes().await?;
    let (body, waiting_for) = Body::parse(kind, status, &bytes);
    Ok(Answer {
        status,
        served_by,
        term,
        applied_index,
        waiting_for,
        body,
    })
}

/// The whole text of an error.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// The writer: a new job through the load balancer at a fixed pace, whatever became of the one before.
pub async fn writes(
    caller: Caller,
    scene: Scene,
    known: Arc<Known>,
    every: Duration,
    mut stop: watch::Receiver<bool>,
) -> Result<()> {
    let mut tick = tokio::time::interval(every);
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut running = JoinSet::new();
    let mut number = 0;
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            _ = stop.wait_for(|stop| *stop) => break,
        }
        while running.try_join_next().is_some() {}
        if running.len() >= MAX_WRITES {
            continue;
        }
        number += 1;
        let sent = Planner::writers_job(&scene.library, &scene.nodes, number);
        known.add(sent.clone());
        let mut caller = caller.clone();
        running.spawn(async move { caller.create(0, &sent).await });
    }
    while let Some(done) = running.join_next().await {
        done?;
    }
    Ok(())
}
