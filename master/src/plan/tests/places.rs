//! Nodes that fetch only so many model versions at once, and whose turn it is.

use super::*;
use mooncake_state::{Live, Transfers};
use std::num::NonZeroU32;

/// What a leader knows beyond the state, as far as a job's snapshot asks for it.
struct Leader<'a>(&'a Observed);

impl Live for Leader<'_> {
    fn transfers(&self, state: &State, node: &NodeId) -> Option<Transfers> {
        self.0.transfers(state, node)
    }
}

impl Sim {
    /// The node registers again, with this limit.
    fn limit(&mut self, i: usize, most: u32) {
        self.fake(i).max_transfers = NonZeroU32::new(most);
        self.connect(i);
    }

    fn prioritise(&mut self) {
        let reply = self.apply(Command::SetClusterVersion {
            version: mooncake_state::PRIORITY_CLUSTER_VERSION,
            now_ms: self.now,
        });
        assert_eq!(reply, Reply::Done);
    }

    /// A millisecond after the last one.
    fn create_with(&mut self, job: usize, m: usize, seed: usize, targets: &[usize], priority: i8) {
        self.now += 1;
        let create = Box::new(self.create_command(job, m, seed, targets));
        let reply = self.apply(Command::CreateJobWithPriority { create, priority });
        assert_eq!(reply, Reply::Job { created: true });
    }

    /// Models whose tasks run on the node.
    fn running(&self, i: usize) -> Vec<ModelRef> {
        self.fakes[&node(i)].tasks.keys().cloned().collect()
    }

    /// Models of which the node fetches bytes, by what the nodes themselves do: tasks that lack some, of models that
    /// another node downloads or holds.
    fn fetching(&self, id: &NodeId) -> usize {
        let can_be_had = |model: &ModelRef| {
            let sealed = self.state.artifact(model).is_some_and(|a| a.seal.is_some());
            self.fakes.values().filter(|f| f.alive).any(|f| {
                let downloads = f
                    .tasks
                    .get(model)
                    .is_some_and(|(_, kind)| *kind == TaskKind::Acquire);
                let whole = f.disk.get(model).is_some_and(|h| h.state >= HeldState::Whole);
                downloads || (sealed && whole)
            })
        };
        let fake = &self.fakes[id];
        let partial = |model: &&ModelRef| fake.disk[*model].state == HeldState::Partial;
        fake.tasks
            .keys()
            .filter(partial)
            .filter(|m| can_be_had(m))
            .count()
    }

    fn waits_for(&self, job: usize) -> Option<String> {
        let id = JobId(format!("job-{job}"));
        let snapshot = self.state.job_snapshot(&id, &Leader(&self.observed));
        snapshot.unwrap().waiting_for
    }

    /// The order in which models began on the node.
    fn began(&self, i: usize) -> Vec<ModelRef> {
        self.fakes[&node(i)].began.clone()
    }

    /// Lets the paused node do one step of work.
    fn step(&mut self, i: usize) {
        self.fake(i).paused = false;
        self.work();
        self.fake(i).paused = true;
        self.settle();
    }
}

fn models(numbers: &[usize]) -> Vec<ModelRef> {
    numbers.iter().map(|m| model(*m)).collect()
}

#[test]
fn a_node_fetches_no_more_at_once_than_it_wants_to() {
    let mut sim = Sim::new(3);
    sim.limit(1, 1);
    sim.fake(1).paused = true;
    for job in 0..3 {
        sim.now += 1;
        // By name the youngest comes first.
        sim.create(job, 2 - job, 0, &[0, 1, 2]);
    }
    sim.settle();
    assert_eq!(sim.running(1), models(&[2]));
    assert_eq!(sim.waits_for(0), None);
    for job in [1, 2] {
        let views = sim.views(job);
        assert_eq!(views[1], PlacementState::Planned);
        assert_eq!(
            (views[0], views[2]),
            (PlacementState::Staged, PlacementState::Staged)
        );
        let why = sim.waits_for(job).unwrap();
        assert!(
            why.contains(node(1).as_str()) && why.contains("--max-transfers is 1"),
            "{why}"
        );
    }
    // Who does not know the node's limit does not guess.
    let id = JobId("job-1".into());
    assert_eq!(sim.state.job_snapshot(&id, &()).unwrap().waiting_for, None);
    // Waiting in line is not standing still, however long what runs takes.
    let fence = sim.observed.sessions[&node(1)].sent[&model(2)].fence;
    for bytes in 1..=5 {
        sim.now += sim.observed.config.no_progress_ms - 1;
        let now = sim.now;
        let session = sim.observed.sessions.get_mut(&node(1)).unwrap();
        session.moved(&model(2), fence, verified(bytes), now);
        sim.settle();
        assert_eq!(sim.running(1), models(&[2]));
    }
    sim.fake(1).paused = false;
    sim.settle();
    assert_eq!(sim.began(1), models(&[2, 1, 0]));
    for job in 0..3 {
        assert_eq!(sim.status(job), JobStatus::Completed);
        assert_eq!((sim.job(job).views[1].failures, sim.waits_for(job)), (0, None));
    }
}

#[test]
fn a_higher_priority_goes_first_then_the_older_job() {
    let mut sim = Sim::new(2);
    sim.prioritise();
    sim.limit(1, 1);
    sim.fake(1).paused = true;
    sim.create_with(0, 0, 0, &[1], -10);
    sim.settle();
    for (job, priority) in [(1, 1), (2, -3), (3, 5), (4, 5), (5, 10)] {
        sim.create_with(job, job, 0, &[1], priority);
    }
    sim.settle();
    assert_eq!(
        sim.running(1),
        models(&[0]),
        "what runs is not stopped for another one"
    );
    for _ in 0..20 {
        sim.step(1);
    }
    assert_eq!(sim.began(1), models(&[0, 5, 3, 4, 1, 2]));
    assert_eq!(
        sim.status(2),
        JobStatus::Completed,
        "the lowest priority has its turn"
    );
}

/// Two models that together do not fit: the space is the more urgent one's, whatever their names are.
#[test]
fn the_higher_priority_gets_the_space() {
    let mut sim = Sim::new(3);
    sim.prioritise();
    for job in 0..2 {
        sim.create_with(job, job, 0, &[0], 0);
    }
    sim.settle();
    let largest = (0..2).map(|m| manifest(m).total_size_bytes).max().unwrap();
    let free = Command::SetNodeFree {
        node: node(1),
        incarnation: 1,
        capacity_bytes: 1 << 30,
        free_bytes: largest + 1,
        measured_ms: sim.now,
        now_ms: sim.now,
    };
    sim.apply(free);
    // Both are there to be copied at once; by name the less urgent one comes first.
    sim.create_with(2, 0, 0, &[1], 0);
    sim.create_with(3, 1, 0, &[1], 1);
    sim.settle();
    assert_eq!(sim.began(1), models(&[1]));
    assert_eq!(
        (sim.status(2), sim.status(3)),
        (JobStatus::Failed, JobStatus::Completed)
    );
}

#[test]
fn a_model_has_the_priority_of_whoever_wants_it_there() {
    let mut sim = Sim::new(3);
    sim.prioritise();
    sim.limit(1, 1);
    sim.limit(2, 1);
    for i in [1, 2] {
        sim.fake(i).paused = true;
    }
    sim.create_with(0, 0, 0, &[1, 2], 0);
    sim.settle();
    // Model 1 is urgent on node 1 only, for a job that came later.
    sim.create_with(1, 1, 0, &[1, 2], 0);
    sim.create_with(2, 2, 0, &[1, 2], 1);
    sim.create_with(3, 1, 0, &[1], 2);
    sim.settle();
    for _ in 0..9 {
        sim.step(1);
        sim.step(2);
    }
    assert_eq!(sim.began(1), models(&[0, 1, 2]));
    assert_eq!(sim.began(2), models(&[0, 2, 1]));
}

#[test]
fn downloads_and_copies_share_the_places_of_a_node() {
    let mut sim = Sim::new(3);
    sim.prioritise();
    sim.limit(0, 1);
    sim.fake(0).paused = true;
    sim.create_with(0, 0, 0, &[0], 0);
    sim.create_with(1, 1, 0, &[1], 0);
    sim.create_with(2, 2, 2, &[0], 1);
    sim.create_with(3, 3, 0, &[1], 2);
    sim.settle();
    assert_eq!(
        sim.running(0),
        models(&[3]),
        "all of them came before it was planned"
    );
    assert_eq!(
        sim.status(1),
        JobStatus::Planned,
        "no copy begins before its download"
    );
    let why = sim.waits_for(1).unwrap();
    assert!(why.contains("the download there begins"), "{why}");
    for _ in 0..12 {
        sim.step(0);
    }
    assert_eq!(sim.began(0), models(&[3, 2, 0, 1]));
    assert!((0..4).all(|job| sim.status(job) == JobStatus::Completed));
}

#[test]
fn of_the_downloads_that_a_seed_works_at_the_higher_priority_is_next() {
    const MOST: usize = mooncake_proto::MAX_ACQUISITIONS;
    let mut sim = Sim::new(1);
    sim.prioritise();
    sim.fake(0).paused = true;
    for job in 0..MOST + 2 {
        sim.create_with(job, job, 0, &[0], i8::from(job == MOST + 1));
        sim.settle();
    }
    sim.cancel(0);
    sim.settle();
    assert_eq!(
        (sim.status(MOST), sim.status(MOST + 1)),
        (JobStatus::Planned, JobStatus::Seeding)
    );
}

#[test]
fn of_two_seeds_that_of_the_higher_priority_downloads() {
    let mut sim = Sim::new(2);
    sim.prioritise();
    sim.create_with(0, 0, 0, &[0, 1], 0);
    sim.create_with(1, 0, 1, &[0, 1], 1);
    sim.settle();
    assert_eq!((sim.fake(0).downloads, sim.fake(1).downloads), (0, 1));
}

#[test]
fn what_is_there_already_takes_no_place() {
    let mut sim = Sim::new(3);
    sim.create(0, 0, 0, &[0]);
    sim.create(1, 1, 0, &[0]);
    sim.settle();
    // Node 1 has every byte of model 0, from a job that was canceled before it could publish.
    let held = Held {
        state: HeldState::Whole,
        ..sim.fakes[&node(0)].disk[&model(0)].clone()
    };
    sim.fake(1).disk.insert(model(0), held);
    sim.limit(1, 1);
    sim.fake(1).paused = true;
    sim.create(2, 1, 0, &[1]);
    sim.settle();
    assert_eq!(sim.running(1), models(&[1]));
    sim.create(3, 0, 0, &[1]);
    sim.settle();
    assert_eq!(
        sim.running(1),
        models(&[0, 1]),
        "at once, though the node is full"
    );
    // Nor does it keep others out.
    sim.cancel(2);
    sim.settle();
    sim.create(4, 1, 0, &[1]);
    sim.settle();
    assert_eq!(sim.running(1), models(&[0, 1]));
    sim.fake(1).paused = false;
    sim.settle();
    assert!([3, 4].iter().all(|job| sim.status(*job) == JobStatus::Completed));
}

#[test]
fn a_limit_counts_from_the_registration_that_names_it() {
    let mut sim = Sim::new(2);
    sim.fake(1).paused = true;
    for job in 0..6 {
        sim.now += 1;
        sim.create(job, job, 0, &[1]);
    }
    sim.limit(1, 3);
    sim.settle();
    assert_eq!(sim.running(1), models(&[0, 1, 2]));
    // Lowered: nothing is stopped, and nothing begins until there is room.
    sim.limit(1, 1);
    sim.settle();
    assert_eq!(sim.running(1), models(&[0, 1, 2]));
    assert!(sim.waits_for(3).unwrap().contains("fetches 3 model versions"));
    sim.cancel(0);
    sim.cancel(2);
    sim.settle();
    assert_eq!(sim.running(1), models(&[1]));
    sim.cancel(1);
    sim.settle();
    assert_eq!(sim.running(1), models(&[3]));
    // Raised, and taken away.
    sim.limit(1, 2);
    sim.settle();
    assert_eq!(sim.running(1), models(&[3, 4]));
    sim.limit(1, 0);
    sim.settle();
    assert_eq!(sim.running(1), models(&[3, 4, 5]));
    // A new leader hears of it with the session.
    sim.limit(1, 1);
    sim.new_leader();
    sim.connect(0);
    sim.connect(1);
    sim.create(6, 6, 0, &[1]);
    sim.settle();
    assert_eq!(sim.running(1), models(&[3, 4, 5]));
    sim.fake(1).paused = false;
    sim.settle();
    assert!((3..=6).all(|job| sim.status(job) == JobStatus::Completed));
}

#[test]
fn a_transfer_keeps_its_place_between_two_attempts() {
    let mut sim = Sim::new(1);
    sim.prioritise();
    sim.limit(0, 1);
    sim.fake(0).fails = Some(failure(true));
    sim.create_with(0, 0, 0, &[0], 0);
    sim.settle();
    assert!(sim.running(0).is_empty());
    sim.create_with(1, 1, 0, &[0], 5);
    sim.settle();
    assert!(sim.running(0).is_empty(), "the pause is the first one's");
    assert!(sim.waits_for(1).is_some());
    assert_eq!(sim.waits_for(0), None);
    sim.pass(1_000);
    assert_eq!(sim.began(0), models(&[0, 0, 1]));
    assert!((0..2).all(|job| sim.status(job) == JobStatus::Completed));
    // Whose last attempt has failed keeps nothing.
    sim.fake(0).fails = Some(failure(false));
    sim.create_with(2, 2, 0, &[0], 0);
    sim.create_with(3, 3, 0, &[0], 0);
    sim.settle();
    assert_eq!(
        (sim.status(2), sim.status(3)),
        (JobStatus::Failed, JobStatus::Completed)
    );
}

/// Its first copies are gone, so that a seed which no job waits for any more downloads once more.
#[test]
fn a_seed_that_downloads_again_keeps_its_place_between_two_attempts() {
    let mut sim = Sim::new(3);
    sim.prioritise();
    sim.create_with(0, 0, 1, &[1], 0);
    sim.settle();
    // Seeded at once: node 1 has it. Node 2 gets nothing as long as it is not there.
    sim.limit(0, 1);
    sim.limit(2, 1);
    sim.fake(2).paused = true;
    sim.create_with(1, 0, 0, &[2], 5);
    sim.settle();
    assert!(sim.job(1).seeded);
    sim.fake(0).fails = Some(failure(true));
    sim.kill(1);
    while sim.state.node(&node(1)).unwrap().status != NodeStatus::Down {
        sim.pass(1_000);
    }
    assert_eq!(sim.began(0), models(&[0]));
    assert!(sim.running(0).is_empty());
    sim.create_with(2, 2, 0, &[0], -5);
    sim.settle();
    assert!(sim.running(0).is_empty(), "the pause is the first one's");
    assert!(sim.waits_for(2).is_some());
    sim.fake(2).paused = false;
    sim.pass(1_000);
    assert_eq!(sim.began(0), models(&[0, 0, 2]));
    assert!(
        [1, 2]
            .into_iter()
            .all(|job| sim.status(job) == JobStatus::Completed)
    );
}

/// Another seed downloads meanwhile, and this one is no target: nothing comes to it any more.
#[test]
fn a_seed_whose_download_another_one_took_over_keeps_no_place() {
    let mut sim = Sim::new(3);
    sim.prioritise();
    sim.limit(0, 1);
    sim.fake(0).fails = Some(failure(true));
    sim.create_with(0, 0, 0, &[2], 0);
    sim.settle();
    assert_eq!(sim.began(0), models(&[0]));
    sim.fake(1).paused = true;
    sim.create_with(1, 0, 1, &[2], 5);
    sim.settle();
    assert_eq!(sim.running(1), models(&[0]));
    sim.create_with(2, 2, 0, &[0], -5);
    sim.settle();
    assert_eq!(sim.began(0), models(&[0, 2]), "the place is free");
    assert_eq!(sim.status(2), JobStatus::Completed);
    sim.fake(1).paused = false;
    sim.settle();
    assert!((0..2).all(|job| sim.status(job) == JobStatus::Completed));
}

#[test]
fn a_lowered_limit_takes_no_place_away_from_who_pauses() {
    let mut sim = Sim::new(1);
    sim.limit(0, 3);
    for job in 0..3 {
        sim.now += 1;
        sim.create(job, job, 0, &[0]);
        sim.fake(0).fails = Some(failure(true));
        sim.settle();
    }
    sim.now += 1;
    sim.create(3, 3, 0, &[0]);
    sim.limit(0, 1);
    sim.settle();
    assert!(sim.running(0).is_empty());
    sim.fake(0).paused = true;
    sim.pass(1_000);
    assert_eq!(sim.running(0), models(&[0, 1, 2]), "they had begun");
    sim.fake(0).paused = false;
    sim.settle();
    assert_eq!(sim.began(0).last(), Some(&model(3)));
    assert!((0..4).all(|job| sim.status(job) == JobStatus::Completed));
}

/// Each of two nodes copies, in its only place, what the other one would have to download in its only place.
#[test]
fn nodes_do_not_wait_for_each_other_for_ever() {
    let mut sim = Sim::new(3);
    sim.create(0, 0, 2, &[2]);
    sim.create(1, 1, 2, &[2]);
    sim.settle();
    for i in 0..2 {
        sim.limit(i, 1);
        sim.fake(i).paused = true;
    }
    sim.now += 1;
    sim.create(2, 0, 0, &[1]);
    sim.now += 1;
    sim.create(3, 1, 1, &[0]);
    sim.settle();
    assert_eq!((sim.running(0), sim.running(1)), (models(&[1]), models(&[0])));
    // A third one waits behind the copy that nobody has the bytes for, and does not pass the download.
    sim.now += 1;
    sim.create(4, 4, 0, &[0]);
    sim.kill(2);
    sim.settle();
    sim.pass(30_000);
    assert_eq!(sim.state.node(&node(2)).unwrap().status, NodeStatus::Down);
    assert_eq!(sim.running(0), models(&[0, 1]), "the older job's download begins");
    assert_eq!(
        sim.running(1),
        models(&[0]),
        "the younger one's waits until there is room"
    );
    assert_eq!(sim.fetching(&node(0)), 1);
    for _ in 0..20 {
        for i in 0..2 {
            sim.step(i);
        }
    }
    for job in [2, 3, 4] {
        assert_eq!(sim.status(job), JobStatus::Completed, "{job}");
    }
    assert_eq!(sim.began(0), models(&[1, 0, 4]), "model 4 came last");
}

/// A generator that gives the same numbers in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) as usize % sides
    }
}

/// Jobs, failures and deaths at random: no node ever fetches more at once than it wants to, and everything ends.
#[test]
fn limits_hold_and_everything_ends_whatever_happens() {
    const NODES: usize = 5;
    let (mut completed, mut failed, mut waited) = (0, 0, 0);
    for seed in 0..150 {
        let mut dice = Dice(seed);
        let mut sim = Sim::new(NODES);
        sim.prioritise();
        sim.observed.config.no_progress_ms = 0;
        for i in 0..NODES {
            sim.limit(i, dice.roll(4) as u32);
        }
        let mut dead: BTreeMap<usize, u64> = BTreeMap::new();
        let mut jobs = 0;
        for round in 0..120 {
            sim.now += 1 + dice.roll(3_000) as u64;
            let i = dice.roll(NODES);
            match dice.roll(12) {
                0..4 if round < 80 => {
                    let targets: Vec<_> = (0..NODES).filter(|_| dice.roll(2) == 0).chain([i]).collect();
                    let targets: std::collections::BTreeSet<_> = targets.into_iter().collect();
                    let targets: Vec<_> = targets.into_iter().collect();
                    let (m, at, priority) = (dice.roll(6), dice.roll(NODES), dice.roll(3) as i8 - 1);
                    sim.create_with(jobs, m, at, &targets, priority);
                    jobs += 1;
                }
                4 => sim.fake(i).fails = Some(failure(dice.roll(3) > 0)),
                5..8 => sim.fake(i).paused ^= true,
                8 if jobs > 0 => {
                    let job = dice.roll(jobs);
                    if !sim.status(job).is_terminal() {
                        sim.cancel(job);
                    }
                }
                9 if dead.is_empty() && dice.roll(2) == 0 => {
                    sim.kill(i);
                    dead.insert(i, sim.now);
                }
                // Long enough after its death it comes back with an empty disk.
                10 if dead
                    .first_key_value()
                    .is_some_and(|(_, at)| sim.now > at + 40_000) =>
                {
                    let (i, _) = dead.pop_first().unwrap();
                    let fake = sim.fake(i);
                    (fake.disk, fake.highest) = (BTreeMap::new(), BTreeMap::new());
                    fake.store.push('x');
                    sim.restart(i);
                }
                _ => {}
            }
            sim.reconcile();
            waited += (0..jobs).filter(|job| sim.waits_for(*job).is_some()).count();
            check_limits(&sim, seed, round);
            sim.work();
        }
        for i in 0..NODES {
            (sim.fake(i).paused, sim.fake(i).fails) = (false, None);
        }
        // Pauses and the grace are over after that.
        for round in 0..200 {
            sim.now += 1_000;
            sim.reconcile();
            check_limits(&sim, seed, 120 + round);
            sim.work();
        }
        for job in 0..jobs {
            match sim.status(job) {
                JobStatus::Completed => completed += 1,
                JobStatus::Failed => failed += 1,
                JobStatus::Canceled => {}
                other => panic!("seed {seed}: job {job} is {other:?}: {:#?}", sim.job(job)),
            }
        }
    }
    // It reaches what it is there for.
    assert!(
        completed > 1000 && failed > 100 && waited > 1000,
        "{completed} {failed} {waited}"
    );
}

fn check_limits(sim: &Sim, seed: u64, round: usize) {
    for (id, fake) in sim.fakes.iter().filter(|(_, f)| f.alive) {
        if let Some(most) = fake.max_transfers {
            let fetching = sim.fetching(id);
            assert!(
                fetching <= most.get() as usize,
                "seed {seed}, round {round}: {id} fetches {fetching} of {most}: {:?}",
                fake.tasks
            );
        }
    }
}
