//! Seeds and downloads: who gets one, what a failure means, what a cancel stops.

use super::*;

#[test]
fn the_happy_path() {
    let mut sim = Sim::new(3);
    sim.create(0, 0, 0, &[0, 1, 2]);
    let first = sim.reconcile();
    assert!(
        matches!(&first[..], [Intent::Propose(Command::AuthoriseAcquire { .. }), Intent::Propose(Command::AuthoriseReplicate { nodes, .. })] if nodes.len() == 2),
        "copies are authorised together with the download: {first:?}"
    );
    let second = sim.reconcile();
    assert_eq!(second.len(), 3, "{second:?}");
    assert_eq!(sim.fake(1).orders, ["replicate"]);
    assert_eq!(
        sim.fake(1).peers[&model(0)],
        [node(0), node(2)],
        "whoever has or gets it"
    );
    assert!(sim.reconcile().is_empty(), "nothing is said twice");
    sim.settle();
    assert_eq!((sim.status(0), sim.downloads()), (JobStatus::Completed, 1));
    assert_eq!(sim.fake(0).orders, ["acquire", "sealed"]);
    assert_eq!(sim.fake(1).orders, ["replicate", "sealed"]);
    sim.pass(120_000);
    assert_eq!(
        sim.fake(1).orders,
        ["replicate", "sealed"],
        "and then it is quiet"
    );
}

#[test]
fn a_seed_that_fails() {
    let mut sim = Sim::new(3);
    sim.fake(0).fails = Some(failure(false));
    sim.create(0, 0, 0, &[0, 1, 2]);
    sim.settle();
    assert_eq!(sim.status(0), JobStatus::Failed);
    assert_eq!(sim.views(0), [PlacementState::Failed; 3]);
    assert_eq!(sim.fake(1).orders, ["replicate", "revoke"]);
    assert_eq!(sim.fake(0).orders, ["acquire"], "its task ended by itself");
    // The corrected request works.
    sim.create(1, 0, 0, &[0, 1, 2]);
    sim.settle();
    assert_eq!(sim.status(1), JobStatus::Completed);
}

#[test]
fn a_failure_that_may_pass_is_tried_again_after_a_pause() {
    let mut sim = Sim::new(2);
    sim.fake(0).fails = Some(failure(true));
    sim.create(0, 0, 0, &[0, 1]);
    sim.settle();
    assert_eq!(
        (sim.status(0), sim.downloads()),
        (JobStatus::Seeding, 1),
        "it waits"
    );
    let retry = sim.state.artifact(&model(0)).unwrap().placements[&node(0)].not_before_ms;
    assert!(retry > sim.now);
    sim.now = retry;
    sim.settle();
    assert_eq!((sim.status(0), sim.downloads()), (JobStatus::Completed, 2));
}

#[test]
fn the_second_seed_takes_over() {
    let mut sim = Sim::new(4);
    sim.fake(0).fails = Some(failure(false));
    sim.create(0, 0, 0, &[0, 2]);
    sim.create(1, 0, 1, &[1, 2, 3]);
    sim.settle();
    assert_eq!(
        (sim.status(0), sim.status(1)),
        (JobStatus::Failed, JobStatus::Completed)
    );
    assert_eq!(sim.downloads(), 2, "one after the other");
    assert_eq!(
        sim.fake(1).orders,
        ["replicate", "peers", "acquire", "sealed"],
        "the failed seed is no peer any more; then it is this node's turn"
    );
}

#[test]
fn two_jobs_two_seeds_one_download() {
    let mut sim = Sim::new(3);
    sim.create(0, 0, 0, &[0, 1, 2]);
    sim.create(1, 0, 1, &[0, 1, 2]);
    sim.settle();
    assert_eq!(
        (sim.status(0), sim.status(1), sim.downloads()),
        (JobStatus::Completed, JobStatus::Completed, 1)
    );
}

#[test]
fn cancel_stops_what_no_other_job_wants() {
    let mut sim = Sim::new(3);
    for i in 0..3 {
        sim.fake(i).paused = true;
    }
    sim.create(0, 0, 0, &[0, 1, 2]);
    sim.create(1, 0, 0, &[1]);
    sim.settle();
    sim.cancel(0);
    sim.settle();
    assert_eq!(sim.fake(2).orders.last(), Some(&"revoke"));
    assert!(sim.fake(0).tasks.contains_key(&model(0)) && sim.fake(1).tasks.contains_key(&model(0)));
    sim.cancel(1);
    sim.settle();
    assert!(sim.fakes.values().all(|f| f.tasks.is_empty()), "all is stopped");
    // A leader that comes later does not know what runs: it says so once more where there is staging.
    sim.new_leader();
    sim.connect(1);
    sim.settle();
    assert_eq!(sim.fake(1).orders.iter().filter(|o| **o == "revoke").count(), 2);
    // What nobody wants is kept for a day.
    sim.connect(0);
    sim.connect(2);
    sim.now += 23 * 3_600_000;
    sim.settle();
    assert!(sim.fakes.values().all(|f| f.disk.contains_key(&model(0))));
    sim.now += 2 * 3_600_000;
    sim.settle();
    sim.now += 24 * 3_600_000;
    sim.settle();
    assert!(
        sim.fakes.values().all(|f| !f.disk.contains_key(&model(0))),
        "then it goes"
    );
}

#[test]
fn the_seed_lost_it_while_another_holds_it() {
    let mut sim = Sim::new(3);
    sim.create(0, 0, 0, &[0, 1]);
    sim.settle();
    sim.fake(0).disk.clear();
    sim.kill(0);
    sim.restart(0);
    sim.settle();
    sim.create(1, 0, 0, &[0, 2]);
    sim.settle();
    assert_eq!((sim.status(1), sim.downloads()), (JobStatus::Completed, 1));
    assert_eq!(sim.job(1).views[0].kind, Some(TaskKind::Replicate));
}

#[test]
fn deadlines_and_retention_are_proposed() {
    let mut sim = Sim::new(1);
    assert!(plan(&sim.state, &sim.observed, sim.now).is_empty());
    sim.create(0, 0, 0, &[0]);
    sim.settle();
    sim.now += sim.state.limits().job_ttl_ms;
    let intents = plan(&sim.state, &sim.observed, sim.now);
    assert!(
        matches!(&intents[..], [Intent::Propose(Command::Prune { .. })]),
        "{intents:?}"
    );
}

#[test]
fn a_download_goes_on_when_the_job_whose_sources_it_reads_is_gone() {
    let mut sim = Sim::new(2);
    sim.fake(0).paused = true;
    sim.create(0, 0, 0, &[0]);
    sim.settle();
    sim.create(1, 0, 0, &[0, 1]);
    sim.settle();
    sim.cancel(0);
    // Long after: nothing but the running download keeps the sources.
    sim.now += 2 * sim.state.limits().blob_ttl_ms;
    sim.observed.config.no_progress_ms = 0;
    sim.settle();
    sim.new_leader();
    sim.connect(0);
    sim.connect(1);
    sim.settle();
    assert_eq!(
        sim.fake(0).orders,
        ["acquire", "acquire"],
        "never told to copy from nobody"
    );
    sim.fake(0).paused = false;
    sim.settle();
    assert_eq!((sim.status(1), sim.downloads()), (JobStatus::Completed, 1));
}

#[test]
fn a_seed_that_restarts_between_seal_and_publication_is_not_taken_to_have_lost_it() {
    for rehashing in [true, false] {
        let mut sim = Sim::new(2);
        sim.create(0, 0, 0, &[0, 1]);
        sim.fake(0).paused = true;
        sim.fake(1).paused = true;
        sim.settle();
        let artifact = sim.state.artifact(&model(0)).unwrap();
        let fence = artifact.placements[&node(0)].fence;
        let report = ReportId {
            model: model(0),
            generation: 1,
            node: node(0),
            incarnation: 1,
            fence,
        };
        sim.apply(Command::Seal {
            report,
            seal: seal(),
            now_ms: sim.now,
        });
        sim.kill(0);
        // All that it recorded has to be hashed again.
        let held = sim.fake(0).disk.get_mut(&model(0)).unwrap();
        (held.verified_bytes, held.rehashing) = (4096, rehashing);
        sim.restart(0);
        sim.settle();
        let views = sim.views(0);
        match rehashing {
            true => {
                assert_eq!(views, [PlacementState::Acquiring; 2]);
                assert_eq!(sim.fake(0).orders, ["acquire", "acquire", "sealed"]);
                let placement = &sim.state.artifact(&model(0)).unwrap().placements[&node(0)];
                assert_eq!(
                    (placement.fence, placement.failures),
                    (fence, 0),
                    "the same attempt"
                );
            }
            // It has looked at everything, and it is not all there.
            false => assert_ne!(sim.job(0).views[0].last_error, None),
        }
        for i in 0..2 {
            sim.fake(i).paused = false;
        }
        sim.pass(60_000);
        assert_eq!(sim.status(0), JobStatus::Completed);
    }
}

#[test]
fn a_seed_gets_no_more_downloads_than_it_works_at_and_the_oldest_job_is_next() {
    const MOST: usize = mooncake_proto::MAX_ACQUISITIONS;
    let mut sim = Sim::new(2);
    sim.fake(0).paused = true;
    // By name the youngest comes first.
    for job in 0..MOST + 2 {
        sim.now += 1;
        sim.create(job, MOST + 2 - job, 0, &[0, 1]);
    }
    sim.settle();
    assert_eq!(sim.fake(0).tasks.len(), MOST);
    let waiting = |sim: &Sim, job: usize| {
        let snapshot = sim.state.job_snapshot(&JobId(format!("job-{job}")), &());
        snapshot.unwrap().waiting_for
    };
    for job in 0..MOST {
        assert_eq!((sim.status(job), waiting(&sim, job)), (JobStatus::Seeding, None));
    }
    for job in [MOST, MOST + 1] {
        assert_eq!(sim.status(job), JobStatus::Planned);
        let why = waiting(&sim, job).unwrap();
        assert!(
            why.contains(node(0).as_str()) && why.contains("8 downloads"),
            "{why}"
        );
    }
    // A line that waits is not one that stands still.
    sim.observed.config.no_progress_ms = 0;
    sim.now += 3_600_000;
    sim.cancel(3);
    sim.settle();
    assert_eq!(sim.status(MOST), JobStatus::Seeding);
    assert_eq!(
        (sim.status(MOST + 1), sim.job(MOST + 1).views[0].failures),
        (JobStatus::Planned, 0)
    );
    // Another seed has room.
    sim.create(MOST + 2, 1, 1, &[1]);
    sim.settle();
    assert_eq!(sim.status(MOST + 2), JobStatus::Completed);
    assert_eq!(waiting(&sim, MOST + 1), None);
    sim.fake(0).paused = false;
    sim.settle();
    assert_eq!(sim.status(MOST + 1), JobStatus::Completed);
}
