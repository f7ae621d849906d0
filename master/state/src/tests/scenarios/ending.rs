//! How jobs end and what is forgotten, and what holds whatever comes.

use super::*;

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
fn damaged_or_newer_bytes_are_refused() {
    let bytes = Command::Tick { now_ms: 1 }.encode().unwrap();
    assert!(Command::decode(&[]).is_err());
    assert!(Command::decode(&[2, bytes[1], bytes[2]]).is_err());
    assert!(Command::decode(&[&bytes[..], &[0]].concat()).is_err());
    let snapshot = World::new(2).state.encode_snapshot();
    assert!(State::decode_snapshot(&snapshot[..snapshot.len() - 1]).is_err());
    assert!(State::decode_snapshot(&[&[9], &snapshot[1..]].concat()).is_err());
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
