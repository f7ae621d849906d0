//! What a job may be made of: manifests, blobs, sizes.

use super::*;

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
