//! Seeds, what they acquire, and what is sealed and published.

use super::*;

#[test]
fn the_happy_path() {
    let mut w = World::new(3);
    w.create(0, 0, 0, &[0, 1, 2]);
    assert_eq!((w.job_status(0), w.views(0)), (J::Planned, vec![P::Planned; 3]));
    w.now += 1;
    w.acquire(0, 0, 0);
    w.replicate(0, &[1, 2]);
    assert_eq!(
        (w.job_status(0), w.views(0)),
        (J::Seeding, vec![P::Acquiring; 3]),
        "copies start at once"
    );
    w.now += 1;
    assert_eq!(w.seal(0, 0, 0), Reply::Done);
    assert_eq!(
        (w.job_status(0), w.views(0)),
        (J::Replicating, vec![P::Acquiring; 3])
    );
    w.staged(0, 1);
    w.now += 1;
    w.staged(0, 0);
    assert_eq!(w.job_status(0), J::Replicating);
    w.staged(0, 2);
    assert_eq!(w.job_status(0), J::Completed);
    let times: Vec<_> = w
        .job(0)
        .transitions
        .iter()
        .map(|(s, at)| (*s, at - START_MS))
        .collect();
    assert_eq!(
        times,
        [
            (J::Planned, 0),
            (J::Seeding, 1),
            (J::Replicating, 2),
            (J::Completed, 3)
        ]
    );
    let snapshot = w.state.job_snapshot(&job_id(0), &()).unwrap();
    let staged: Vec<_> = snapshot
        .placements
        .iter()
        .map(|p| (p.staged_bytes, p.checksum_verified))
        .collect();
    assert_eq!(staged, [(MIB, true); 3]);
    assert_eq!(snapshot.placements[1].local_path.as_deref(), Some("/models/1/m0"));
    assert_eq!(
        (snapshot.progress.bytes_total, snapshot.progress.bytes_staged),
        (3 * MIB, 3 * MIB)
    );
    let tasks: Vec<_> = snapshot
        .tasks
        .iter()
        .map(|t| (t.kind, t.state, t.objects_done))
        .collect();
    use mooncake_proto::api::{TaskState::Succeeded, TaskType};
    assert_eq!(
        tasks,
        [
            (TaskType::ModelDownload, Succeeded, 4),
            (TaskType::Copy, Succeeded, 4),
            (TaskType::Copy, Succeeded, 4)
        ]
    );
}

#[test]
fn a_seed_that_fails() {
    let mut w = World::new(4);
    w.create(0, 0, 0, &[0, 1, 2, 3]);
    w.acquire(0, 0, 0);
    w.replicate(0, &[1, 2]);
    w.fail(0, 0, "checksum_mismatch", false);
    assert_eq!(w.job_status(0), J::Failed);
    assert_eq!(
        w.views(0),
        [P::Failed, P::Failed, P::Failed, P::Planned],
        "what had not begun did not fail"
    );
    let errors: Vec<_> = w
        .job(0)
        .views
        .iter()
        .map(|v| v.last_error.clone().unwrap())
        .collect();
    assert_eq!(errors[0], "checksum_mismatch on node 0");
    assert_eq!(errors[1], "seed failed: checksum_mismatch on node 0");
    assert_eq!(errors[3], "not started: seed failed: checksum_mismatch on node 0");
    assert_eq!(
        w.job(0).last_error.as_deref(),
        Some("seed 10.0.0.0:25001 failed: checksum_mismatch on node 0")
    );
    assert_ne!(
        w.placement(0, 1).state,
        P::Acquiring,
        "nobody wants the copies any more"
    );
    // The key is not burnt: other content, other sources.
    assert_eq!(
        w.create_with(1, 0, 1, 1, &[1, 2], |_| {}),
        Reply::Job { created: true }
    );
    assert_eq!(w.state.artifact(&model(0)).unwrap().generation, 2);
    w.acquire(1, 0, 1);
    assert!(w.placement(0, 1).fence.attempt > 3, "attempts never go back");
}

#[test]
fn a_failure_that_may_pass_is_tried_again() {
    let mut w = World::new(2);
    w.create(0, 0, 0, &[0, 1]);
    w.acquire(0, 0, 0);
    w.replicate(0, &[1]);
    w.fail(0, 0, "connection_reset", true);
    assert_eq!(
        (w.job_status(0), w.views(0)),
        (J::Seeding, vec![P::Acquiring; 2]),
        "one failure of two"
    );
    assert!(w.placement(0, 0).not_before_ms > w.now, "after a pause");
    w.acquire(0, 0, 0);
    w.seal(0, 0, 0);
    w.fail(0, 1, "peer_gone", true);
    w.replicate(0, &[1]);
    w.fail(0, 1, "peer_gone", true);
    assert_eq!(w.views(0), [P::Acquiring, P::Failed], "two of two");
    w.staged(0, 0);
    assert_eq!(w.job_status(0), J::Failed);
    assert_eq!(
        w.job(0).last_error.as_deref(),
        Some("1 of 2 placements failed: 10.0.0.1:25001: peer_gone on node 1")
    );
}

#[test]
fn a_canceled_job_leaves_no_pause_behind() {
    let mut w = World::new(2);
    w.create(0, 0, 0, &[0, 1]);
    w.acquire(0, 0, 0);
    w.fail(0, 0, "connection_reset", true);
    assert!(w.placement(0, 0).not_before_ms > w.now);
    w.apply(Command::CancelJob {
        job: job_id(0),
        progress: vec![],
        now_ms: w.now,
    });
    assert_eq!(
        (w.placement(0, 0).not_before_ms, w.placement(0, 0).failures),
        (0, 0)
    );
}

#[test]
fn two_jobs_with_two_seeds_download_once() {
    let mut w = World::new(4);
    w.create(0, 0, 0, &[0, 2]);
    w.create(1, 0, 1, &[1, 2, 3]);
    w.acquire(0, 0, 0);
    assert_eq!(
        (w.job_status(0), w.job_status(1)),
        (J::Seeding, J::Seeding),
        "the second follows"
    );
    assert!(matches!(w.try_acquire(1, 0, 1), Reply::Stale { .. }));
    w.replicate(0, &[1, 2, 3]);
    w.seal(0, 0, 0);
    for i in 0..4 {
        w.staged(0, i);
    }
    assert_eq!((w.job_status(0), w.job_status(1)), (J::Completed, J::Completed));
    assert_eq!(w.job(1).views[0].kind, Some(TaskKind::Replicate));
}

#[test]
fn the_second_seed_takes_over() {
    let mut w = World::new(3);
    w.create(0, 0, 0, &[0, 1, 2]);
    w.create(1, 0, 1, &[0, 1, 2]);
    w.acquire(0, 0, 0);
    w.replicate(0, &[1, 2]);
    w.fail(0, 0, "source_not_found", false);
    assert_eq!(
        (w.job_status(0), w.job_status(1)),
        (J::Failed, J::Seeding),
        "only the job with this seed"
    );
    assert_eq!(w.views(1), [P::Acquiring, P::Acquiring, P::Acquiring]);
    assert_eq!(
        w.placement(0, 2).state,
        P::Acquiring,
        "copies go on: the second job wants them"
    );
    w.acquire(1, 0, 1);
    assert_eq!(
        w.placement(0, 1).kind,
        TaskKind::Acquire,
        "instead of the copy that ran there"
    );
    w.replicate(0, &[0]);
    w.seal(0, 1, 0);
    for i in 0..3 {
        w.staged(0, i);
    }
    assert_eq!(
        w.job_status(1),
        J::Completed,
        "the first seed's failure to download is no failure to copy"
    );
    assert_eq!(w.job_status(0), J::Failed);
}

#[test]
fn a_sealed_artifact_is_copied_not_downloaded() {
    let mut w = World::new(4);
    w.stage(0, 0, &[0, 1]);
    // Its seed has it.
    w.create(1, 0, 0, &[0, 2]);
    assert_eq!(
        (w.job_status(1), w.views(1)),
        (J::Replicating, vec![P::Staged, P::Planned])
    );
    assert!(matches!(w.try_acquire(1, 0, 0), Reply::Stale { .. }));
    w.replicate(0, &[2]);
    w.staged(0, 2);
    let transitions: Vec<_> = w.job(1).transitions.keys().copied().collect();
    assert_eq!(
        transitions,
        [J::Planned, J::Replicating, J::Completed],
        "straight to replication"
    );
    // The seed lost it, another node holds it: copied to the seed too.
    assert_eq!(w.lost(0, 0), Reply::Done);
    w.create(2, 0, 0, &[0, 3]);
    assert!(matches!(w.try_acquire(2, 0, 0), Reply::Stale { .. }));
    w.replicate(0, &[0, 3]);
    w.staged(0, 0);
    w.staged(0, 3);
    assert_eq!(w.job_status(2), J::Completed);
    // All targets have it: completed at once, every state recorded.
    w.create(3, 0, 1, &[0, 1, 2, 3]);
    assert_eq!(w.job_status(3), J::Completed);
    let transitions: Vec<_> = w.job(3).transitions.keys().copied().collect();
    assert_eq!(transitions, [J::Planned, J::Replicating, J::Completed]);
    assert!(
        w.state.job_snapshot(&job_id(3), &()).unwrap().tasks.is_empty(),
        "there was nothing to do"
    );
}

#[test]
fn nobody_holds_what_is_sealed() {
    let mut w = World::new(2);
    w.stage(0, 0, &[0]);
    w.lost(0, 0);
    w.create(1, 0, 0, &[0, 1]);
    assert_eq!(w.job_status(1), J::Planned);
    w.acquire(1, 0, 0);
    w.replicate(0, &[1]);
    // The source gives something else.
    assert_eq!(w.seal(0, 0, 1), Reply::Done);
    assert_eq!(
        (w.job_status(1), w.views(1)),
        (J::Failed, vec![P::Failed, P::Failed])
    );
    assert!(
        w.job(1)
            .last_error
            .as_ref()
            .unwrap()
            .contains("the source now gives other content")
    );
    assert_eq!(
        w.state.artifact(&model(0)).unwrap().seal,
        Some(seal(0)),
        "the seal stands"
    );
    // The source was restored.
    w.create(2, 0, 0, &[0, 1]);
    w.acquire(2, 0, 0);
    w.replicate(0, &[1]);
    w.seal(0, 0, 0);
    w.staged(0, 0);
    w.staged(0, 1);
    assert_eq!(w.job_status(2), J::Completed);
}

#[test]
fn other_content_under_the_same_key() {
    let mut w = World::new(2);
    w.create(0, 0, 0, &[0]);
    let conflict = |r: Reply| assert!(matches!(r, Reply::ArtifactConflict { .. }), "{r:?}");
    conflict(w.create_with(1, 0, 1, 0, &[0], |_| {}));
    w.acquire(0, 0, 0);
    w.seal(0, 0, 0);
    w.staged(0, 0);
    assert_eq!(w.job_status(0), J::Completed);
    conflict(w.create_with(1, 0, 1, 0, &[0], |_| {}));
}

#[test]
fn a_seed_beside_the_targets() {
    let mut w = World::new(3);
    w.create(0, 0, 0, &[1, 2]);
    w.acquire(0, 0, 0);
    w.replicate(0, &[1, 2]);
    assert_eq!(w.job_status(0), J::Seeding);
    let snapshot = w.state.job_snapshot(&job_id(0), &()).unwrap();
    let requested: Vec<_> = snapshot
        .placements
        .iter()
        .map(|p| (p.node_id.clone(), p.requested))
        .collect();
    assert_eq!(requested, [(node(1), true), (node(2), true), (node(0), false)]);
    assert_eq!(snapshot.progress.bytes_total, 2 * MIB);
    w.seal(0, 0, 0);
    // From here on it does not count.
    w.fail(0, 0, "publish_failed", false);
    assert_eq!(
        (w.job_status(0), w.views(0)),
        (J::Replicating, vec![P::Acquiring, P::Acquiring, P::Failed])
    );
    w.staged(0, 1);
    w.staged(0, 2);
    assert_eq!(w.job_status(0), J::Completed);
    // Until the seal it does.
    w.create(1, 1, 0, &[1]);
    w.acquire(1, 1, 0);
    w.fail(1, 0, "source_not_found", false);
    assert_eq!(
        (w.job_status(1), w.views(1)),
        (J::Failed, vec![P::Planned, P::Failed])
    );
}

#[test]
fn a_seed_may_finish_publishing_after_its_job() {
    let mut w = World::new(2);
    w.create(0, 0, 0, &[1]);
    w.acquire(0, 0, 0);
    w.replicate(0, &[1]);
    w.seal(0, 0, 0);
    w.staged(0, 1);
    assert_eq!(w.job_status(0), J::Completed);
    assert_eq!(w.placement(0, 0).state, P::Acquiring);
    assert_eq!(w.staged(0, 0), Reply::Done);
    assert_eq!(w.placement(0, 0).state, P::Staged);
    assert_eq!(
        w.views(0),
        [P::Staged, P::Acquiring],
        "as it stood when the job ended"
    );
}

#[test]
fn a_second_download_that_fails_ends_a_replicating_job() {
    let mut w = World::new(3);
    w.stage(0, 0, &[0]);
    w.create(1, 0, 1, &[2]);
    w.replicate(0, &[2]);
    w.lost(0, 0);
    w.acquire(1, 0, 1);
    w.fail(0, 1, "source_not_found", false);
    assert_eq!(
        (w.job_status(1), w.views(1)),
        (J::Failed, vec![P::Failed, P::Failed])
    );
    assert!(
        w.job(1)
            .last_error
            .as_ref()
            .unwrap()
            .starts_with("seed 10.0.0.1:25001 failed")
    );
}

#[test]
fn a_seal_of_another_form_is_refused() {
    let mut w = World::new(1);
    w.create(0, 0, 0, &[0]);
    w.acquire(0, 0, 0);
    let report = w.report(0, 0);
    w.apply(Command::Seal {
        report,
        seal: Seal {
            block_size_bytes: BLOCK * 2,
            ..seal(0)
        },
        now_ms: w.now,
    });
    assert_eq!(w.job_status(0), J::Failed);
    assert_eq!(w.state.artifact(&model(0)).unwrap().seal, None);
}

#[test]
fn a_publication_of_other_content_fails() {
    let mut w = World::new(2);
    w.create(0, 0, 0, &[0, 1]);
    w.acquire(0, 0, 0);
    w.replicate(0, &[1]);
    assert!(w.staged(0, 1).is_refusal(), "nothing is sealed");
    w.seal(0, 0, 0);
    let mut report = w.staged_report(0, 1);
    if let Command::ReportStaged { seal: s, .. } = &mut report {
        *s = seal(5);
    }
    w.apply(report);
    assert_eq!(w.views(0), [P::Acquiring, P::Failed]);
}

#[test]
fn a_download_keeps_its_sources_when_its_job_goes() {
    let mut w = World::new(3);
    w.create(0, 0, 0, &[0]);
    w.create(1, 0, 2, &[1]);
    w.acquire(0, 0, 0);
    // The job whose sources are read ends; the other one follows its download.
    w.apply(Command::CancelJob {
        job: job_id(0),
        progress: vec![],
        now_ms: w.now,
    });
    assert_eq!(w.placement(0, 0).state, P::Acquiring);
    let read = w.placement(0, 0).sources.expect("the download still reads");
    assert_eq!(read, w.job(0).sources);
    w.now += 30 * Limits::default().job_ttl_ms;
    w.apply(Command::Prune { now_ms: w.now });
    assert!(w.state.job(&job_id(0)).is_none(), "even its job is forgotten");
    assert!(w.state.blob(&read).is_some());
    let copy = State::decode_snapshot(&w.state.encode_snapshot()).unwrap();
    assert_eq!(copy.index, w.state.index);
    // Sealed, it reads no more.
    assert_eq!(w.seal(0, 0, 0), Reply::Done);
    assert_eq!(w.placement(0, 0).sources, None);
    w.now += Limits::default().blob_ttl_ms;
    w.apply(Command::Prune { now_ms: w.now });
    assert!(w.state.blob(&read).is_none());
}

#[test]
fn copies_that_fail_before_the_seal_do_not_use_up_the_next_seed() {
    let mut w = World::new(2);
    w.create(0, 0, 0, &[0]);
    w.create(1, 0, 1, &[1]);
    w.acquire(0, 0, 0);
    // `max_attempts` is 2; one of them cannot even be tried again.
    for retryable in [true, true, true, false] {
        w.replicate(0, &[1]);
        w.fail(0, 1, "peer_unreachable", retryable);
        w.now += 60_000;
        assert_eq!(w.placement(0, 1).state, P::Planned, "and another copy may come");
    }
    assert_eq!((w.job_status(1), w.job(1).views[0].failures), (J::Seeding, 0));
    w.fail(0, 0, "checksum_mismatch", false);
    assert_eq!((w.job_status(0), w.job_status(1)), (J::Failed, J::Seeding));
    w.acquire(1, 0, 1);
    assert_eq!(w.seal(0, 1, 0), Reply::Done);
    assert_eq!(w.staged(0, 1), Reply::Done);
    assert_eq!(w.job_status(1), J::Completed);
}

#[test]
fn a_copy_on_a_seed_beside_the_targets_ends_with_the_seal() {
    let mut w = World::new(4);
    w.create(0, 0, 0, &[0, 3]);
    w.create(1, 0, 3, &[1]);
    w.acquire(0, 0, 0);
    w.replicate(0, &[3]);
    w.apply(Command::CancelJob {
        job: job_id(0),
        progress: vec![],
        now_ms: w.now,
    });
    assert_eq!(
        w.placement(0, 3).state,
        P::Acquiring,
        "it may be the next to download"
    );
    w.seal(0, 0, 0);
    assert_eq!(w.placement(0, 3).state, P::Planned);
}
