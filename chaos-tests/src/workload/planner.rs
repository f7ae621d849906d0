//! What one caller asks next.

use super::library::{Library, Template};
use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use serde_json::{Value, json};
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// Of a caller's creates: repeats of one that was sent before, whatever came of it.
const REPEATS: f64 = 0.30;
/// Of a caller's creates: another body under an id that was sent before.
const CONFLICTS: f64 = 0.05;
/// Of new jobs: those that take a model that nobody has asked for yet, while there is one. Some twenty jobs are made
/// in a second: so a new model comes every one to two seconds, and downloads go on for as long as faults do.
const FRESH_MODELS: f64 = 0.035;
/// Callers come back to the newest jobs, where things happen.
const RECENT: usize = 40;
/// Attempts that new jobs ask for, and those that are another body.
const ATTEMPTS: u32 = 5;
const OTHER_ATTEMPTS: u32 = 6;

/// Priorities that new jobs have, each as often as it stands here: most have none, so that they are what a version
/// without priorities writes.
const PRIORITIES: [i8; 6] = [0, 0, 0, 0, -5, 5];

/// A create as it was sent.
#[derive(Clone, Debug)]
pub struct Sent {
    /// The job.
    pub job: String,
    /// Names the body.
    pub body: String,
    /// The body.
    pub request: Arc<Value>,
    other: Arc<Value>,
}

impl Sent {
    fn with_priority(self, priority: i8) -> Self {
        let with = |request: &Value| {
            let mut request = request.clone();
            request["priority"] = json!(priority);
            Arc::new(request)
        };
        Self {
            body: format!("{} with priority {priority}", self.body),
            request: with(&self.request),
            other: with(&self.other),
            ..self
        }
    }
}

/// Jobs that any caller has sent, whatever came of it.
#[derive(Debug, Default)]
pub struct Known {
    sent: Mutex<Vec<Sent>>,
    next_model: AtomicUsize,
}

impl Known {
    /// Ids of all of them.
    pub fn jobs(&self) -> Vec<String> {
        self.sent.lock().iter().map(|s| s.job.clone()).collect()
    }

    pub(super) fn add(&self, sent: Sent) {
        self.sent.lock().push(sent);
    }

    fn recent(&self, rng: &mut StdRng) -> Option<Sent> {
        let sent = self.sent.lock();
        let from = sent.len().saturating_sub(RECENT);
        sent[from..].choose(rng).cloned()
    }
}

/// One request.
#[derive(Clone, Debug)]
pub enum Step {
    /// POST this.
    Create(Sent),
    /// GET it, linearizable or stale.
    Read {
        /// Its id.
        job: String,
        /// With `min_index` of what the caller has seen.
        stale: bool,
    },
    /// GET it and wait for a change.
    Poll {
        /// Its id.
        job: String,
    },
    /// Cancel it.
    Cancel {
        /// Its id.
        job: String,
    },
    /// The newest jobs.
    List {
        /// As in `Read`.
        stale: bool,
    },
}

/// One caller's mind.
pub struct Planner {
    rng: StdRng,
    caller: u32,
    made: u64,
    library: Arc<Library>,
    nodes: Vec<String>,
    known: Arc<Known>,
}

impl Planner {
    /// Of one caller.
    pub fn new(seed: u64, caller: u32, library: Arc<Library>, nodes: Vec<String>, known: Arc<Known>) -> Self {
        Self {
            rng: StdRng::seed_from_u64(seed ^ (u64::from(caller) << 32)),
            caller,
            made: 0,
            library,
            nodes,
            known,
        }
    }

    /// What is asked next.
    pub fn step(&mut self) -> Step {
        let what = self.rng.random_range(0..100);
        let job = self.known.recent(&mut self.rng);
        let Some(old) = job else {
            return Step::Create(self.new_job());
        };
        match what {
            0..30 => Step::Create(self.create(old)),
            30..55 => Step::Read {
                job: old.job,
                stale: false,
            },
            55..77 => Step::Read {
                job: old.job,
                stale: true,
            },
            77..88 => Step::Poll { job: old.job },
            88..93 => Step::Cancel { job: old.job },
            _ => Step::List { stale: what % 2 == 0 },
        }
    }

    fn create(&mut self, old: Sent) -> Sent {
        let roll: f64 = self.rng.random();
        if roll < REPEATS {
            return old;
        }
        if roll < REPEATS + CONFLICTS {
            return Sent {
                body: format!("not {}", old.body),
                request: old.other.clone(),
                ..old
            };
        }
        self.new_job()
    }

    fn new_job(&mut self) -> Sent {
        // The last one is reserved.
        let models = &self.library.models[..self.library.models.len() - 1];
        let fresh = self.rng.random_bool(FRESH_MODELS);
        // The first one is the writer's.
        let used = self
            .known
            .next_model
            .load(Ordering::Relaxed)
            .min(models.len() - 1);
        let at = if (fresh && used < models.len() - 1) || used == 0 {
            1 + self.known.next_model.fetch_add(1, Ordering::Relaxed) % (models.len() - 1)
        } else {
            self.rng.random_range(1..=used)
        };
        let mut nodes = self.nodes.clone();
        let seed = nodes.choose(&mut self.rng).cloned().unwrap_or_default();
        let keep = self.rng.random_range(1..=nodes.len());
        while nodes.len() > keep {
            nodes.swap_remove(self.rng.random_range(0..nodes.len()));
        }
        self.made += 1;
        let job = format!("c{}-{}", self.caller, self.made);
        let priority = PRIORITIES.choose(&mut self.rng).copied().unwrap_or_default();
        let sent = Self::job(&job, &models[at], &seed, &nodes).with_priority(priority);
        self.known.add(sent.clone());
        sent
    }

    /// The writer's jobs: always the same small model, to where it already is.
    pub fn writers_job(library: &Library, nodes: &[String], number: u64) -> Sent {
        Self::job(&format!("w-{number}"), &library.models[0], &nodes[0], &nodes[..1])
    }

    /// A create of this model.
    pub fn job(job: &str, model: &Template, seed: &str, targets: &[String]) -> Sent {
        Sent {
            job: job.to_owned(),
            body: format!("{} from {seed} to {}", model.id, targets.join(",")),
            request: Arc::new(model.request(job, seed, targets, ATTEMPTS)),
            other: Arc::new(model.request(job, seed, targets, OTHER_ATTEMPTS)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn planner(seed: u64) -> (tempfile::TempDir, Planner) {
        let dir = tempfile::tempdir().unwrap();
        let library = Library::create(dir.path(), "http://s", 5, 1).unwrap();
        let nodes = (0..3).map(|i| format!("10.0.0.{i}:1")).collect();
        let planner = Planner::new(seed, 0, Arc::new(library), nodes, Arc::default());
        (dir, planner)
    }

    #[test]
    fn a_seed_gives_the_same_steps() {
        let steps = |seed| {
            let (_dir, mut planner) = planner(seed);
            // Content of models differs from run to run, names do not.
            let name = |step: Step| match step {
                Step::Create(sent) => format!("create {} {}", sent.job, sent.body),
                other => format!("{other:?}"),
            };
            (0..200).map(|_| name(planner.step())).collect::<Vec<_>>()
        };
        assert_eq!(steps(7), steps(7));
        assert_ne!(steps(7), steps(8));
    }

    #[test]
    fn everything_is_asked_in_proportion() {
        let (_dir, mut planner) = planner(7);
        let (mut kinds, mut bodies) = (BTreeMap::new(), BTreeMap::<String, Vec<String>>::new());
        for _ in 0..4000 {
            let step = planner.step();
            let kind = match &step {
                Step::Create(sent) => {
                    bodies
                        .entry(sent.job.clone())
                        .or_default()
                        .push(sent.body.clone());
                    "create"
                }
                Step::Read { stale: true, .. } => "stale",
                Step::Read { .. } => "read",
                Step::Poll { .. } => "poll",
                Step::Cancel { .. } => "cancel",
                Step::List { .. } => "list",
            };
            *kinds.entry(kind).or_insert(0) += 1;
        }
        assert_eq!(kinds.len(), 6, "{kinds:?}");
        let creates = kinds["create"] as f64;
        let conflicts = bodies
            .values()
            .flatten()
            .filter(|b| b.starts_with("not "))
            .count() as f64;
        let repeats = creates - bodies.len() as f64 - conflicts;
        assert!(
            (0.25..0.35).contains(&(repeats / creates)),
            "{repeats} of {creates}"
        );
        assert!(
            (0.03..0.07).contains(&(conflicts / creates)),
            "{conflicts} of {creates}"
        );
    }

    #[test]
    fn another_body_is_another_body() {
        let (_dir, mut planner) = planner(7);
        let sent = planner.new_job();
        assert_ne!(sent.request, sent.other);
        assert_eq!(sent.request["job_id"], sent.other["job_id"]);
        let valid = |v: &Value| {
            let request = serde_json::from_value(v.clone()).unwrap();
            mooncake_proto::manifest::validate(request, Default::default())
                .unwrap()
                .request_digest()
        };
        assert_ne!(valid(&sent.request), valid(&sent.other));
    }
}
