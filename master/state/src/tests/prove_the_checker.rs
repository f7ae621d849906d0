//! A checker that finds nothing proves nothing: here guarantees are broken on purpose, and it must find each.

use super::*;
use proptest::{
    strategy::{Strategy, ValueTree},
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};

/// A cut-off seed reports on its first attempt while the second runs.
fn stale_report(world: &mut World) -> Command {
    world.create(0, 0, 0, &[0, 1]);
    world.acquire(0, 0, 0);
    let report = world.report(0, 0);
    world.fail(0, 0, "cut off", true);
    world.acquire(0, 0, 0);
    Command::Seal {
        report,
        seal: seal(3),
        now_ms: world.now,
    }
}

#[test]
fn without_the_fence_a_stale_report_is_caught() {
    let mut world = World::new(2);
    let command = stale_report(&mut world);
    let before = world.state.clone();
    let mut sound = world.state.clone();
    let reply = sound.apply(100, &command).reply;
    assert!(reply.is_refusal());
    invariants::check_command(&before, &command, &reply, &sound).unwrap();

    world.state.break_fence = true;
    let reply = world.state.apply(100, &command).reply;
    let broken = invariants::check_command(&before, &command, &reply, &world.state).unwrap_err();
    assert!(broken.contains("a stale report changed the state"), "{broken}");
}

#[test]
fn without_the_fence_random_sequences_find_it() {
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let found = (0..200).any(|_| {
        let ops = properties::ops().new_tree(&mut runner).unwrap().current();
        let mut state = State::new();
        state.break_fence = true;
        properties::run(&mut state, &ops).is_err()
    });
    assert!(
        found,
        "200 sequences against a state machine without fences broke nothing"
    );
}

/// Each invariant of one state, against a state that breaks it.
#[test]
fn every_invariant_notices_its_breach() {
    type Break = fn(&mut State);
    type Invariant = fn(&State) -> Result<(), String>;
    fn artifact(s: &mut State) -> &mut Artifact {
        s.data.artifacts.get_mut(&model(0)).unwrap().make_mut()
    }
    fn placement(s: &mut State, i: usize) -> &mut Placement {
        artifact(s).placements.get_mut(&node(i)).unwrap()
    }
    fn job(s: &mut State, i: usize) -> &mut Job {
        s.data.jobs.get_mut(&job_id(i)).unwrap().make_mut()
    }
    // Job 0 on model 0: under way, before the seal, on nodes 0 (seed), 1, 2. Job 1 on model 1: completed.
    let sound = || {
        let mut w = World::new(4);
        w.stage(1, 1, &[0, 1]);
        w.create(0, 0, 0, &[0, 1, 2]);
        w.acquire(0, 0, 0);
        w.replicate(0, &[1, 2]);
        w.state
    };
    let table: &[(&str, Invariant, Break)] = &[
        ("an index is behind", invariants::indexes_match, |s| {
            s.index.live_by_node.clear()
        }),
        ("a second download", invariants::one_download, |s| {
            placement(s, 1).kind = TaskKind::Acquire
        }),
        ("a download nobody runs", invariants::one_download, |s| {
            placement(s, 0).state = PlacementState::Planned
        }),
        (
            "a status that was never reached",
            invariants::histories_follow_the_diagram,
            |s| job(s, 0).status = JobStatus::Replicating,
        ),
        (
            "an edge that the RFC does not have",
            invariants::histories_follow_the_diagram,
            |s| {
                job(s, 1).transitions.remove(&JobStatus::Replicating);
            },
        ),
        ("time goes back", invariants::histories_follow_the_diagram, |s| {
            job(s, 0).transitions.insert(JobStatus::Seeding, 1);
        }),
        (
            "staged without ever acquiring",
            invariants::histories_follow_the_diagram,
            |s| job(s, 1).views[0].acquiring_ms = None,
        ),
        (
            "completed without a copy",
            invariants::completed_means_staged,
            |s| job(s, 1).views[1].state = PlacementState::Acquiring,
        ),
        ("completed at 57 %", invariants::completed_means_staged, |s| {
            job(s, 1).views[1].staged_bytes = MIB / 2
        }),
        ("failed without a reason", invariants::failed_says_why, |s| {
            job(s, 0).views[1].state = PlacementState::Failed
        }),
        ("an error on a completed job", invariants::failed_says_why, |s| {
            job(s, 1).last_error = Some("?".into())
        }),
        ("held but not sealed", invariants::staged_is_sealed, |s| {
            placement(s, 0).whole = true
        }),
        (
            "waits for a node that is down",
            invariants::live_jobs_can_end,
            |s| {
                s.data.nodes.get_mut(&node(1)).unwrap().status = NodeStatus::Down;
            },
        ),
        ("its sources are gone", invariants::live_jobs_can_end, |s| {
            let sources = s.data.jobs[&job_id(0)].sources;
            s.data.blobs.remove(&sources);
        }),
        ("nobody will acquire", invariants::live_jobs_can_end, |s| {
            artifact(s).acquiring = None;
            job(s, 0).views[0].state = PlacementState::Failed;
        }),
        ("runs for nobody", invariants::tasks_are_wanted, |s| {
            job(s, 0).views[1].state = PlacementState::Failed
        }),
        ("keeps space", invariants::tasks_are_wanted, |s| {
            placement(s, 1).state = PlacementState::Failed
        }),
        ("one attempt twice", invariants::attempts_are_distinct, |s| {
            placement(s, 1).fence = placement(s, 2).fence
        }),
        (
            "an attempt that was not counted",
            invariants::attempts_are_distinct,
            |s| artifact(s).attempts = 1,
        ),
        (
            "an older incarnation's copy",
            invariants::incarnations_match,
            |s| {
                s.data.nodes.get_mut(&node(1)).unwrap().incarnation = 2;
            },
        ),
        (
            "a priority that no snapshot holds",
            invariants::priorities_can_be_kept,
            |s| job(s, 0).priority = 1,
        ),
        ("a blob of other content", invariants::blobs_are_right, |s| {
            let digest = *s.data.blobs.keys().next().unwrap();
            let blob = s.data.blobs.get_mut(&digest).unwrap();
            blob.content = BlobContent::Complete(vec![1].into());
        }),
    ];
    for (what, check, break_it) in table {
        let mut state = sound();
        invariants::check(&state).unwrap();
        break_it(&mut state);
        assert!(check(&state).is_err(), "not noticed: {what}");
        assert!(invariants::check(&state).is_err(), "not among all: {what}");
    }
    let steps: &[(&str, Break)] = &[
        ("time goes back", |s| s.data.time_ms -= 1),
        ("a completed job fails", |s| job(s, 1).status = JobStatus::Failed),
        ("a terminal job's view changes", |s| {
            job(s, 1).views[0].local_path = None
        }),
        ("a view goes back", |s| {
            job(s, 0).views[1].state = PlacementState::Planned
        }),
        ("an attempt goes back", |s| job(s, 0).views[1].attempt = 0),
        ("a change without a version", |s| {
            job(s, 0).views[1].staged_bytes = 5
        }),
        ("a priority changes", |s| job(s, 0).priority = 1),
        ("a seal is replaced", |s| {
            s.data.artifacts.get_mut(&model(1)).unwrap().make_mut().seal = Some(seal(9))
        }),
        ("a seal is taken back", |s| {
            s.data.artifacts.get_mut(&model(1)).unwrap().make_mut().seal = None
        }),
        ("attempts go back", |s| artifact(s).attempts = 0),
        ("an artifact is forgotten with its attempts", |s| {
            s.data.artifacts.remove(&model(0));
        }),
        ("an incarnation goes back", |s| {
            s.data.nodes.get_mut(&node(0)).unwrap().incarnation = 0
        }),
        ("a live job is pruned", |s| {
            s.data.jobs.remove(&job_id(0));
        }),
    ];
    for (what, break_it) in steps {
        let before = sound();
        invariants::check_step(&before, &before).unwrap();
        let mut after = before.clone();
        break_it(&mut after);
        assert!(
            invariants::check_step(&before, &after).is_err(),
            "not noticed: {what}"
        );
    }
}
