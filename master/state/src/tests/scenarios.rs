//! One test per rule of the design that spans several commands.

use super::*;
use JobStatus as J;
use PlacementState as P;

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
fn a_job_id_is_made_once() {
    let mut w = World::new(2);
    w.create(0, 0, 0, &[0, 1]);
    assert_eq!(
        w.create_with(0, 0, 0, 0, &[0, 1], |_| {}),
        Reply::Job { created: false }
    );
    assert_eq!(w.create_with(0, 0, 0, 0, &[1], |_| {}), Reply::JobConflict);
    // Long after it ended, and after its nodes left.
    w.apply(Command::CancelJob {
        job: job_id(0),
        progress: vec![],
        now_ms: w.now,
    });
    w.kill(1);
    assert_eq!(
        w.create_with(0, 0, 0, 0, &[0, 1], |_| {}),
        Reply::Job { created: false }
    );
    w.now += Limits::default().job_ttl_ms;
    assert!(w.state.prune_due(w.now));
    w.apply(Command::Prune { now_ms: w.now });
    assert!(w.state.job(&job_id(0)).is_none());
    assert_eq!(w.create_with(0, 0, 0, 0, &[0, 1], |_| {}), Reply::JobForgotten);
    assert_eq!(w.create_with(0, 0, 0, 0, &[1], |_| {}), Reply::JobConflict);
    w.now += Limits::default().id_ttl_ms;
    w.apply(Command::Prune { now_ms: w.now });
    assert!(w.state.past_job(&job_id(0)).is_none());
}

#[test]
fn what_a_job_names_must_exist() {
    let mut w = World::new(1);
    assert_eq!(
        w.create_with(0, 0, 0, 7, &[0, 9], |_| {}),
        Reply::UnknownNodes(vec![node(7), node(9)])
    );
    let missing = Digest::sha256(b"nowhere");
    let reply = w.create_with(0, 0, 0, 0, &[0], |c| c.manifest = BlobRef::Stored(missing));
    assert_eq!(reply, Reply::BlobMissing { digest: missing });
    for with in [
        (|c: &mut CreateJob| c.targets.clear()) as fn(&mut CreateJob),
        |c| c.targets.push(node(0)),
        |c| c.max_attempts = 0,
        |c| c.block_size_bytes = 3,
        |c| c.manifest = BlobRef::Inline(vec![9, 9].into()),
        |c| c.model = model(1),
        |c| c.sources = BlobRef::Inline(Sources(vec![]).encode().into()),
    ] {
        let reply = w.create_with(0, 0, 0, 0, &[0], with);
        assert!(matches!(reply, Reply::Invalid { .. }), "{reply:?}");
    }
    assert_eq!(w.state.jobs().count(), 0);
}

#[test]
fn large_blobs_come_in_parts() {
    let mut w = World::new(1);
    let bytes: Vec<u8> = (0..1_200_000u32).map(|i| (i * 7 + i / 256) as u8).collect();
    let parts = blob_parts(&bytes, w.now);
    assert_eq!(parts.len(), 3);
    let digest = Digest::sha256(&bytes);
    for part in parts.iter().rev() {
        assert!(w.state.blob(&digest).is_none());
        assert_eq!(w.apply(part.clone()), Reply::Done);
    }
    assert_eq!(w.state.blob(&digest).map(|b| &b[..]), Some(&bytes[..]));
    assert_eq!(w.apply(parts[0].clone()), Reply::Done, "again");
    // Nothing refers to it: it expires.
    w.now += Limits::default().blob_ttl_ms;
    w.apply(Command::Prune { now_ms: w.now });
    assert!(w.state.blob(&digest).is_none());
    assert_eq!(w.state.data.blobs.len(), 0);
}

#[test]
fn wrong_parts_are_refused_and_replaced() {
    let mut w = World::new(1);
    let digest = Digest::sha256(b"abcd");
    let part = |index, bytes: &[u8]| Command::PutBlobPart {
        digest,
        index,
        count: 2,
        total_bytes: 4,
        bytes: bytes.to_vec().into(),
        now_ms: START_MS,
    };
    w.apply(part(0, b"ab"));
    assert!(matches!(w.apply(part(1, b"xx")), Reply::Invalid { .. }));
    assert!(matches!(w.apply(part(2, b"cd")), Reply::Invalid { .. }));
    assert!(w.state.blob(&digest).is_none());
    assert_eq!(w.apply(part(1, b"cd")), Reply::Done);
    assert_eq!(w.state.blob(&digest).map(|b| b.to_vec()), Some(b"abcd".to_vec()));
}

#[test]
fn a_job_with_stored_blobs() {
    let mut w = World::new(1);
    let bytes = manifest(0, 0).encode();
    for part in blob_parts(&bytes, w.now) {
        w.apply(part);
    }
    let reply = w.create_with(0, 0, 0, 0, &[0], |c| {
        c.manifest = BlobRef::Stored(Digest::sha256(&bytes))
    });
    assert_eq!(reply, Reply::Job { created: true });
    w.now += 10 * Limits::default().blob_ttl_ms;
    w.apply(Command::Prune { now_ms: w.now });
    assert!(
        w.state.manifest(&w.job(0).manifest).is_some(),
        "kept while it is referred to"
    );
    let sources = w.job(0).sources;
    assert!(w.state.sources(&sources).is_some());
    w.apply(Command::CancelJob {
        job: job_id(0),
        progress: vec![],
        now_ms: w.now,
    });
    w.now += Limits::default().blob_ttl_ms;
    w.apply(Command::Prune { now_ms: w.now });
    assert!(
        w.state.sources(&sources).is_none(),
        "signed URLs go when the job is over"
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
fn a_follower_that_fails_does_not_stop_the_others() {
    let mut w = World::new(3);
    w.create(0, 0, 0, &[0, 1, 2]);
    w.acquire(0, 0, 0);
    w.replicate(0, &[1, 2]);
    w.fail(0, 1, "disk_full", false);
    assert_eq!(w.job_status(0), J::Seeding);
    w.seal(0, 0, 0);
    w.staged(0, 0);
    assert_eq!(w.job_status(0), J::Replicating);
    w.staged(0, 2);
    assert_eq!(
        (w.job_status(0), w.views(0)),
        (J::Failed, vec![P::Staged, P::Failed, P::Staged])
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
fn cancel() {
    let mut w = World::new(3);
    w.create(0, 0, 0, &[0, 1, 2]);
    w.create(1, 0, 1, &[1]);
    w.acquire(0, 0, 0);
    w.replicate(0, &[1, 2]);
    let progress = vec![(1, 4096), (2, 99 * MIB), (9, 1)];
    assert_eq!(
        w.apply(Command::CancelJob {
            job: job_id(0),
            progress,
            now_ms: w.now
        }),
        Reply::Done
    );
    assert_eq!(
        (w.job_status(0), w.views(0)),
        (J::Canceled, vec![P::Acquiring; 3]),
        "as they stood"
    );
    assert_eq!(w.job(0).last_error.as_deref(), Some("canceled"));
    let views = &w.job(0).views;
    assert!(views.iter().all(|v| v.last_error.as_deref() == Some("canceled")));
    assert_eq!((views[1].staged_bytes, views[2].staged_bytes), (4096, MIB));
    assert_eq!(w.placement(0, 2).state, P::Planned, "nobody wants it there");
    assert_eq!(
        w.placement(0, 0).state,
        P::Acquiring,
        "the other job follows this download"
    );
    w.seal(0, 0, 0);
    w.staged(0, 1);
    assert_eq!(w.job_status(1), J::Completed);
    assert_eq!(
        w.apply(Command::CancelJob {
            job: job_id(1),
            progress: vec![],
            now_ms: w.now
        }),
        Reply::JobTerminal { status: J::Completed }
    );
    let reply = w.apply(Command::CancelJob {
        job: job_id(7),
        progress: vec![],
        now_ms: w.now,
    });
    assert_eq!(reply, Reply::JobNotFound);
    // The last job that wanted it: the download stops.
    w.create(2, 1, 0, &[0, 1]);
    w.acquire(2, 1, 0);
    w.apply(Command::CancelJob {
        job: job_id(2),
        progress: vec![],
        now_ms: w.now,
    });
    assert_eq!(w.placement(1, 0).state, P::Planned);
    assert!(
        w.seal(1, 0, 0).is_refusal(),
        "what it still reports changes nothing"
    );
    assert!(w.fail(1, 0, "late", false).is_refusal());
}

#[test]
fn deadline() {
    let mut w = World::new(2);
    let deadline = w.now + 5000;
    w.create_with(0, 0, 0, 0, &[0, 1], |c| c.deadline_ms = Some(deadline));
    w.acquire(0, 0, 0);
    assert_eq!(w.state.next_deadline_ms(), Some(deadline));
    w.apply(Command::Tick { now_ms: deadline - 1 });
    assert_eq!(w.job_status(0), J::Seeding);
    w.apply(Command::Tick { now_ms: deadline });
    assert_eq!(
        (w.job_status(0), w.views(0)),
        (J::Failed, vec![P::Failed, P::Failed])
    );
    assert!(w.job(0).last_error.as_ref().unwrap().contains("deadline of 5 s"));
    assert_eq!(w.state.next_deadline_ms(), None);
    assert_eq!(w.placement(0, 0).state, P::Planned, "stopped");
}

#[test]
fn a_follower_that_dies() {
    let mut w = World::new(3);
    w.create(0, 0, 0, &[0, 1, 2]);
    w.acquire(0, 0, 0);
    w.replicate(0, &[1, 2]);
    w.status(1, NodeStatus::Suspected);
    assert_eq!(w.views(0), [P::Acquiring; 3], "the grace runs");
    assert_eq!(w.register(1, "disk", 1), Reply::Registered { incarnation: 1 });
    assert_eq!(w.state.node(&node(1)).unwrap().status, NodeStatus::Up);
    w.now += 1;
    w.kill(1);
    assert_eq!(
        (w.job_status(0), w.views(0)),
        (J::Seeding, vec![P::Acquiring, P::Failed, P::Acquiring])
    );
    assert!(
        w.job(0).views[1]
            .last_error
            .as_ref()
            .unwrap()
            .contains("grace of 30 s")
    );
    w.seal(0, 0, 0);
    w.staged(0, 0);
    w.staged(0, 2);
    assert_eq!(w.job_status(0), J::Failed);
    // It comes back and had finished: that is a fact, but the job has ended.
    w.register(1, "disk", 1);
    assert_eq!(w.staged(0, 1), Reply::Done);
    assert_eq!(w.views(0), [P::Staged, P::Failed, P::Staged]);
    w.create(1, 0, 0, &[1]);
    assert_eq!(w.job_status(1), J::Completed);
}

#[test]
fn a_seed_that_dies() {
    let mut w = World::new(3);
    w.create(0, 0, 0, &[0, 1]);
    w.create(1, 0, 2, &[1, 2]);
    w.acquire(0, 0, 0);
    w.replicate(0, &[1]);
    w.kill(0);
    assert_eq!((w.job_status(0), w.job_status(1)), (J::Failed, J::Seeding));
    assert!(w.job(0).last_error.as_ref().unwrap().contains("is down"));
    w.acquire(1, 0, 2);
    w.seal(0, 2, 0);
    w.staged(0, 1);
    w.staged(0, 2);
    assert_eq!(w.job_status(1), J::Completed);
}

#[test]
fn a_verdict_on_an_older_silence_does_not_count() {
    let mut w = World::new(1);
    w.status(0, NodeStatus::Suspected);
    let since = w.state.node(&node(0)).unwrap().since_ms;
    w.now += 10;
    w.register(0, "disk", 1);
    w.now += 10;
    w.status(0, NodeStatus::Suspected);
    let down = Command::SetNodeStatus {
        node: node(0),
        incarnation: 1,
        seen_since_ms: since,
        status: NodeStatus::Down,
        reason: "x".into(),
        now_ms: w.now,
    };
    assert!(w.apply(down).is_refusal());
    assert_eq!(w.state.node(&node(0)).unwrap().status, NodeStatus::Suspected);
}

#[test]
fn a_goodbye_that_crosses_a_new_job_costs_it_only_the_grace() {
    let mut w = World::new(2);
    // The leader saw no job and proposed the verdict; the job was committed before it.
    w.create(0, 0, 0, &[0, 1]);
    assert_eq!(w.status(1, NodeStatus::Down), Reply::Done);
    assert_eq!(w.state.node(&node(1)).unwrap().status, NodeStatus::Suspected);
    assert!(w.job(0).views.iter().all(|v| !v.is_finished()));
    // Suspected, and the grace is over: nothing protects it any more.
    assert_eq!(w.status(1, NodeStatus::Down), Reply::Done);
    assert_eq!(w.state.node(&node(1)).unwrap().status, NodeStatus::Down);
}

#[test]
fn a_job_for_a_node_that_is_down() {
    let mut w = World::new(3);
    w.kill(1);
    w.create(0, 0, 0, &[0, 1]);
    assert_eq!(
        w.views(0),
        [P::Planned, P::Failed],
        "said at once, not after a time-out"
    );
    assert_eq!(w.job_status(0), J::Planned);
    w.create(1, 1, 1, &[0, 2]);
    assert_eq!(w.job_status(1), J::Failed);
    assert!(w.job(1).last_error.as_ref().unwrap().contains("is down"));
}

#[test]
fn another_disk_is_another_incarnation() {
    let mut w = World::new(2);
    w.stage(0, 0, &[0, 1]);
    let frozen = w.job(0).clone();
    assert_eq!(w.register(1, "new", 7), Reply::NodeIdTaken { incarnation: 1 });
    assert_eq!(w.register(1, "new", 1), Reply::Registered { incarnation: 2 });
    assert_eq!(w.job(0), &frozen, "what was staged was staged");
    assert!(
        !w.state
            .artifact(&model(0))
            .unwrap()
            .placements
            .contains_key(&node(1)),
        "it holds nothing"
    );
    let mut old = w.report(0, 1);
    old.incarnation = 1;
    assert!(
        w.apply(Command::ReportLost {
            report: old,
            now_ms: w.now
        })
        .is_refusal()
    );
    w.create(1, 0, 0, &[0, 1]);
    assert_eq!(w.views(1), [P::Staged, P::Planned]);
    w.replicate(0, &[1]);
    // Again in mid-transfer: one failed attempt, then another.
    w.register(1, "newer", 2);
    assert_eq!(w.views(1), [P::Staged, P::Acquiring]);
    w.replicate(0, &[1]);
    w.staged(0, 1);
    assert_eq!(w.job_status(1), J::Completed);
}

#[test]
fn the_only_copy_is_gone() {
    let mut w = World::new(3);
    w.stage(0, 0, &[0]);
    // Its seed is another node: that one downloads again.
    w.create(1, 0, 1, &[2]);
    w.replicate(0, &[2]);
    w.kill(0);
    assert_eq!(w.job_status(1), J::Replicating);
    w.acquire(1, 0, 1);
    w.kill(1);
    assert_eq!(
        (w.job_status(1), w.views(1)),
        (J::Failed, vec![P::Failed, P::Failed])
    );
    assert!(
        w.job(1)
            .last_error
            .as_ref()
            .unwrap()
            .starts_with("seed 10.0.0.1:25001 failed: node 10.0.0.1:25001 is down")
    );
    // The other way round: the seed first, which does not matter, then the copy.
    let mut w = World::new(3);
    w.stage(0, 0, &[0]);
    w.create(1, 0, 1, &[2]);
    w.replicate(0, &[2]);
    w.kill(1);
    assert_eq!(
        (w.job_status(1), w.views(1)),
        (J::Replicating, vec![P::Acquiring, P::Failed])
    );
    w.kill(0);
    assert_eq!(
        (w.job_status(1), w.views(1)),
        (J::Failed, vec![P::Failed, P::Failed])
    );
    assert!(
        w.job(1)
            .last_error
            .as_ref()
            .unwrap()
            .contains("no live node holds the model")
    );
}

#[test]
fn the_only_copy_comes_back() {
    let mut w = World::new(3);
    w.stage(0, 0, &[0]);
    w.kill(0);
    w.create(1, 0, 1, &[1, 2]);
    assert_eq!(w.job_status(1), J::Planned, "nobody holds it");
    w.register(0, "disk", 1);
    assert_eq!(w.job_status(1), J::Replicating);
    assert!(w.try_acquire(1, 0, 1).is_refusal());
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
fn space_is_reserved() {
    let mut w = World::new(2);
    let free = |free_bytes, now_ms, measured_ms| Command::SetNodeFree {
        node: node(1),
        incarnation: 1,
        capacity_bytes: 10 * MIB,
        free_bytes,
        measured_ms,
        now_ms,
    };
    w.apply(free(MIB + MIB / 2, w.now, w.now));
    w.create(0, 0, 0, &[0, 1]);
    w.create(1, 1, 0, &[0, 1]);
    w.now += 1;
    w.acquire(0, 0, 0);
    w.acquire(1, 1, 0);
    w.replicate(0, &[1]);
    assert_eq!(w.state.unreserved_bytes(&node(1)), Some(MIB / 2));
    w.replicate(1, &[1]);
    assert_eq!(
        w.views(1),
        [P::Acquiring, P::Failed],
        "two jobs that fit alone do not fit together"
    );
    assert!(
        w.job(1).views[1]
            .last_error
            .as_ref()
            .unwrap()
            .contains("not enough space")
    );
    assert_eq!(w.views(0), [P::Acquiring, P::Acquiring]);
    // A later measurement has the first attempt's space in it.
    w.now += 60_000;
    w.apply(free(MIB / 2, w.now, w.now));
    assert_eq!(w.state.unreserved_bytes(&node(1)), Some(MIB / 2));
}

#[test]
fn found_without_an_order() {
    let mut w = World::new(3);
    w.stage(0, 0, &[0]);
    w.create(1, 0, 0, &[0, 1]);
    let held = |w: &World, root| Command::ReportHeld {
        report: w.report(0, 1),
        seal: seal(root),
        local_path: "/models/found".into(),
        now_ms: w.now,
    };
    assert!(w.apply(held(&w, 1)).is_refusal(), "another root");
    let stale = held(&w, 0);
    w.replicate(0, &[1]);
    assert!(w.apply(stale).is_refusal(), "an attempt was authorised meanwhile");
    assert_eq!(w.apply(held(&w, 0)), Reply::Done);
    assert_eq!(w.job_status(1), J::Completed);
    assert_eq!(w.job(1).views[1].local_path.as_deref(), Some("/models/found"));
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
fn a_new_epoch_renews_what_runs() {
    let mut w = World::new(2);
    w.create(0, 0, 0, &[0, 1]);
    w.acquire(0, 0, 0);
    w.replicate(0, &[1]);
    let old = w.staged_report(0, 1);
    assert_eq!(
        w.apply(Command::RaiseRecoveryEpoch {
            epoch: 5,
            now_ms: w.now
        }),
        Reply::Done
    );
    assert_eq!(w.views(0), [P::Acquiring, P::Acquiring]);
    assert_eq!(
        w.placement(0, 0).fence,
        Fence {
            recovery_epoch: 5,
            attempt: 3
        }
    );
    assert_eq!(
        w.placement(0, 1).fence,
        Fence {
            recovery_epoch: 5,
            attempt: 4
        }
    );
    w.seal(0, 0, 0);
    assert!(w.apply(old).is_refusal());
    w.staged(0, 0);
    w.staged(0, 1);
    assert_eq!(w.job_status(0), J::Completed);
    assert!(
        w.apply(Command::RaiseRecoveryEpoch {
            epoch: 4,
            now_ms: w.now
        })
        .is_refusal()
    );
}

#[test]
fn retention_by_number() {
    let mut w = World::new(1);
    let limits = Limits {
        max_terminal_jobs: 2,
        max_ids: 1,
        ..Limits::default()
    };
    w.apply(Command::SetLimits {
        limits,
        now_ms: w.now,
    });
    for job in 0..5 {
        w.create(job, 0, 0, &[0]);
        w.now += 1;
        w.apply(Command::CancelJob {
            job: job_id(job),
            progress: vec![],
            now_ms: w.now,
        });
    }
    w.apply(Command::Prune { now_ms: w.now });
    let kept: Vec<_> = w.state.jobs().map(|(id, _)| id.clone()).collect();
    assert_eq!(kept, [job_id(3), job_id(4)], "the newest");
    assert!(w.state.past_job(&job_id(2)).is_some() && w.state.past_job(&job_id(1)).is_none());
    assert!(!w.state.prune_due(w.now));
    let newest: Vec<_> = w
        .state
        .jobs_newest_first(None)
        .map(|(id, _)| id.clone())
        .collect();
    assert_eq!(newest, [job_id(4), job_id(3)]);
    let token = (w.job(4).created_ms(), job_id(4));
    assert_eq!(
        w.state
            .jobs_newest_first(Some(token))
            .map(|(id, _)| id.clone())
            .collect::<Vec<_>>(),
        [job_id(3)]
    );
}

#[test]
fn what_is_forgotten_keeps_its_numbers() {
    let mut w = World::new(2);
    w.create(0, 0, 0, &[0]);
    w.acquire(0, 0, 0);
    w.apply(Command::CancelJob {
        job: job_id(0),
        progress: vec![],
        now_ms: w.now,
    });
    w.kill(1);
    w.now += Limits::default().unsealed_ttl_ms;
    w.apply(Command::Prune { now_ms: w.now });
    assert!(w.state.artifact(&model(0)).is_none());
    w.create(1, 0, 0, &[0]);
    let artifact = w.state.artifact(&model(0)).unwrap();
    assert_eq!((artifact.generation, artifact.attempts), (2, 1));
    w.now += Limits::default().down_node_ttl_ms;
    w.apply(Command::Prune { now_ms: w.now });
    assert!(w.state.node(&node(1)).is_none());
    assert_eq!(w.register(1, "disk", 0), Reply::Registered { incarnation: 2 });
}

#[test]
fn time_never_goes_back() {
    let mut w = World::new(1);
    w.now = START_MS + 1000;
    w.create(0, 0, 0, &[0]);
    w.now = START_MS;
    w.acquire(0, 0, 0);
    assert_eq!(w.job(0).transitions[&J::Seeding], START_MS + 1000);
    assert_eq!(w.state.time_ms(), START_MS + 1000);
}

#[test]
fn versions_are_gated() {
    let mut w = World::new(1);
    assert!(
        w.apply(Command::SetClusterVersion {
            version: 0,
            now_ms: w.now
        })
        .is_refusal()
    );
    assert_eq!(
        w.apply(Command::SetClusterVersion {
            version: 1,
            now_ms: w.now
        }),
        Reply::Done
    );
    w.state.data.cluster_version = 0;
    let reply = w.state.apply(99, &Command::Tick { now_ms: w.now }).reply;
    assert_eq!(reply, Reply::Gated { required: 1 });
}

#[test]
fn a_priority_is_kept_from_the_cluster_version_on_that_knows_it() {
    let mut w = World::new(1);
    let urgent = |job: usize, priority: i8| Command::CreateJobWithPriority {
        create: Box::new(create_command(job, 0, 0, 0, &[0])),
        priority,
    };
    let required = PRIORITY_CLUSTER_VERSION;
    assert_eq!(w.apply(urgent(0, 3)), Reply::Gated { required });
    w.create(1, 0, 0, &[0]);
    let now_ms = w.now;
    w.apply(Command::SetClusterVersion {
        version: required,
        now_ms,
    });
    for priority in [11, -11, i8::MIN] {
        assert!(matches!(w.apply(urgent(0, priority)), Reply::Invalid { .. }));
    }
    assert_eq!(w.apply(urgent(0, 3)), Reply::Job { created: true });
    let read = State::decode_snapshot(&w.state.encode_snapshot()).unwrap();
    for (job, priority) in [(0, 3), (1, 0)] {
        let id = job_id(job);
        assert_eq!(read.job(&id), w.state.job(&id));
        assert_eq!(read.job(&id).unwrap().priority, priority);
        assert_eq!(read.job_snapshot(&id, &()).unwrap().priority, priority);
        assert_eq!(read.job_summary(&id, &()).unwrap().priority, priority);
    }
    // It belongs to the body, and so to its digest: a repeat changes nothing.
    assert_eq!(w.apply(urgent(0, 3)), Reply::Job { created: false });
}

#[test]
fn what_is_under_way_on_a_node() {
    let mut w = World::new(2);
    w.create(0, 0, 0, &[0, 1]);
    let under_way = |w: &World, i: usize| w.state.is_under_way(&model(0), &node(i));
    assert!(!under_way(&w, 0) && !under_way(&w, 1));
    w.acquire(0, 0, 0);
    w.replicate(0, &[1]);
    assert!(under_way(&w, 0) && under_way(&w, 1));
    // Between two attempts it is.
    w.fail(0, 1, "x", true);
    assert_eq!(w.placement(0, 1).state, P::Planned);
    assert!(under_way(&w, 1));
    // With every byte it is not, though it is not published.
    assert_eq!(w.seal(0, 0, 0), Reply::Done);
    assert_eq!(w.placement(0, 0).state, P::Acquiring);
    assert!(!under_way(&w, 0));
    // Nor when nobody waits for it.
    w.apply(Command::CancelJob {
        job: job_id(0),
        progress: vec![],
        now_ms: w.now,
    });
    assert!(!under_way(&w, 1));
}

#[test]
fn a_command_that_is_too_large_is_refused_before_the_log() {
    let mut create = create_command(0, 0, 0, 0, &[0]);
    create.manifest = BlobRef::Inline(vec![0; 600 << 10].into());
    assert!(matches!(
        Command::CreateJob(Box::new(create)).encode(),
        Err(CommandError::TooLarge { .. })
    ));
    for part in blob_parts(&vec![7; 3 << 20], 0) {
        part.encode().unwrap();
    }
}

#[test]
fn damaged_or_newer_bytes_are_refused() {
    let bytes = Command::Tick { now_ms: 1 }.encode().unwrap();
    assert!(Command::decode(&[]).is_err());
    assert!(Command::decode(&[2, bytes[1], bytes[2]]).is_err());
    assert!(Command::decode(&[&bytes[..], &[0]].concat()).is_err());
    let snapshot = World::new(2).state.encode_snapshot();
    assert!(State::decode_snapshot(&snapshot[..snapshot.len() - 1]).is_err());
    assert!(State::decode_snapshot(&[&[9], &snapshot[1..]].concat()).is_err());
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

/// One of a thousand jobs that want one model must not cost the copying of the others with every command.
#[test]
fn a_job_that_does_not_change_is_not_copied() {
    let mut w = World::new(4);
    w.create(0, 0, 0, &[0, 1]);
    w.create(1, 0, 0, &[0, 2]);
    w.acquire(0, 0, 0);
    w.seal(0, 0, 0);
    let before = w.state.clone();
    w.replicate(0, &[1]);
    w.staged(0, 1);
    assert_eq!(w.job(1), before.job(&job_id(1)).unwrap());
    assert!(std::ptr::eq(w.job(1), before.job(&job_id(1)).unwrap()));
    assert!(!std::ptr::eq(w.job(0), before.job(&job_id(0)).unwrap()));
}

#[test]
fn a_verdict_from_before_a_registration_does_not_count() {
    let mut w = World::new(1);
    let seen_since_ms = w.state.node(&node(0)).unwrap().since_ms;
    w.now += 1;
    w.register(0, "disk", 1);
    let reply = w.apply(Command::SetNodeStatus {
        node: node(0),
        incarnation: 1,
        seen_since_ms,
        status: NodeStatus::Down,
        reason: "it left: stopped".into(),
        now_ms: w.now,
    });
    assert!(matches!(reply, Reply::Stale { .. }), "{reply:?}");
    assert_eq!(w.state.node(&node(0)).unwrap().status, NodeStatus::Up);
}

#[test]
fn who_is_needed() {
    let mut w = World::new(4);
    let needed = |w: &World| (0..4).map(|i| w.state.is_needed(&node(i))).collect::<Vec<_>>();
    assert_eq!(needed(&w), [false; 4]);
    w.create(0, 0, 0, &[1, 2]);
    assert_eq!(needed(&w), [true, true, true, false], "planned");
    w.acquire(0, 0, 0);
    w.replicate(0, &[1, 2]);
    w.seal(0, 0, 0);
    w.staged(0, 0);
    w.staged(0, 1);
    assert_eq!(needed(&w), [true, true, true, false], "copied from, or copied to");
    w.staged(0, 2);
    assert_eq!(needed(&w), [false; 4], "{:?}", w.job(0));
}

#[test]
fn the_progress_of_the_largest_job_fits_into_its_cancel() {
    let command = Command::CancelJob {
        job: JobId("j".repeat(128)),
        progress: (0..=mooncake_proto::manifest::MAX_TARGETS as u32)
            .map(|i| (i, u64::MAX))
            .collect(),
        now_ms: u64::MAX,
    };
    assert!(command.encode().unwrap().len() <= mooncake_proto::MAX_COMMAND_BYTES);
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

/// Nodes say of themselves what they like.
#[test]
fn sums_of_what_nodes_claim_do_not_overflow() {
    struct Boast;
    impl Live for Boast {
        fn progress(&self, _: &ModelRef, _: &NodeId) -> Option<LiveProgress> {
            Some(LiveProgress {
                verified_bytes: u64::MAX,
                objects_done: u64::MAX,
                bytes_per_second: u64::MAX,
                running: true,
            })
        }
    }
    let mut w = World::new(3);
    w.create(0, 0, 0, &[0, 1, 2]);
    w.acquire(0, 0, 0);
    w.replicate(0, &[1, 2]);
    let snapshot = w.state.job_snapshot(&job_id(0), &Boast).unwrap();
    assert_eq!(snapshot.progress.bytes_per_second, u64::MAX);
    assert_eq!(snapshot.progress.bytes_staged, 3 * MIB);
}
