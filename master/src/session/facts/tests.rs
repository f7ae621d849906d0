use super::*;

fn node() -> NodeId {
    NodeId::parse("127.0.0.1:25001").unwrap()
}

fn led() -> Facts {
    let mut facts = Facts::default();
    facts.begin(3, 1000, PlanConfig::default());
    facts
}

fn claim(facts: &mut Facts, store: &str) -> (Claim, CancellationToken, mpsc::Receiver<Order>) {
    let (tx, rx) = mpsc::channel(1);
    let cancel = CancellationToken::new();
    (facts.claim(3, &node(), store, tx, cancel.clone()), cancel, rx)
}

fn space() -> Space {
    Space {
        capacity_bytes: 10,
        free_bytes: 5,
        measured_ms: 1,
    }
}

#[test]
fn one_client_per_node_id_and_the_same_client_replaces_itself() {
    let mut facts = led();
    let (first, cancel, _rx) = claim(&mut facts, "a");
    let Claim::Granted { number } = first else {
        panic!("{first:?}")
    };
    assert_eq!(claim(&mut facts, "b").0, Claim::Taken);
    assert!(!cancel.is_cancelled());
    let (again, _, _rx) = claim(&mut facts, "a");
    assert_eq!(again, Claim::Granted { number: number + 1 });
    assert!(cancel.is_cancelled(), "the old session ends");
    assert!(
        !facts.open(&node(), number, 1, space(), 0),
        "and can no longer open"
    );
    assert!(facts.open(&node(), number + 1, 1, space(), 0));
    facts.lost(&node(), number, Instant::now());
    assert_eq!(
        facts.count(),
        1,
        "the end of the old stream does not end the new session"
    );
    facts.lost(&node(), number + 1, Instant::now());
    assert_eq!(facts.count(), 0);
    assert!(
        matches!(claim(&mut facts, "b").0, Claim::Granted { .. }),
        "a lost one does not keep the id"
    );
}

#[test]
fn a_claim_belongs_to_a_term_and_the_end_of_it_ends_sessions() {
    let mut facts = led();
    let (_, cancel, _rx) = claim(&mut facts, "a");
    facts.begin(3, 2000, PlanConfig::default());
    assert!(!cancel.is_cancelled(), "the same term begins once");
    facts.end(2);
    assert!(!cancel.is_cancelled());
    facts.end(3);
    assert!(cancel.is_cancelled());
    assert_eq!(claim(&mut facts, "a").0, Claim::NotLeader);
    facts.begin(3, 3000, PlanConfig::default());
    assert_eq!(
        claim(&mut facts, "a").0,
        Claim::NotLeader,
        "a term that ended does not begin again"
    );
}

#[test]
fn a_short_interruption_is_no_event() {
    let mut facts = led();
    let (claimed, _, _rx) = claim(&mut facts, "a");
    let Claim::Granted { number } = claimed else {
        panic!()
    };
    facts.open(&node(), number, 1, space(), 0);
    let at = Instant::now();
    facts.lost(&node(), number, at);
    let second = Duration::from_secs(1);
    assert!(facts.close_lost(at, second).is_empty());
    assert!(facts.observed.sessions.contains_key(&node()));
    assert_eq!(facts.close_lost(at + second, second), [node()]);
    assert!(!facts.observed.sessions.contains_key(&node()));
}

/// A node under a claim and a registration, and one job that names it.
fn with_job() -> (Facts, State, u64) {
    use mooncake_proto::{digest::Digest, manifest::*};
    let mut facts = led();
    let (Claim::Granted { number }, ..) = claim(&mut facts, "a") else {
        panic!()
    };
    facts.open(&node(), number, 1, space(), 0);
    let mut state = State::new();
    let about = mooncake_state::NodeAbout::default();
    let register = Command::RegisterNode {
        node: node(),
        store_id: "a".into(),
        expected_incarnation: 0,
        about,
        now_ms: 1,
    };
    state.apply(1, &register);
    let model = ModelRef {
        model_id: "m".into(),
        revision: "r".into(),
        format: "f".into(),
        provider: "p".into(),
    };
    let manifest = Manifest {
        model: model.clone(),
        file_manifest_version: "v1".into(),
        total_size_bytes: 0,
        files: vec![],
    };
    let create = mooncake_state::CreateJob {
        job: mooncake_proto::ids::JobId("j".into()),
        request_digest: Digest::sha256(b"j"),
        model,
        manifest: mooncake_state::BlobRef::Inline(manifest.encode().into()),
        sources: mooncake_state::BlobRef::Inline(Sources(vec![]).encode().into()),
        block_size_bytes: 1 << 18,
        algorithm: Default::default(),
        seed: node(),
        targets: vec![node()],
        target_replica_count: 1,
        max_attempts: 1,
        deadline_ms: None,
        warnings: vec![],
        now_ms: 2,
    };
    let reply = state.apply(2, &Command::CreateJob(Box::new(create))).reply;
    assert_eq!(reply, mooncake_state::Reply::Job { created: true });
    (facts, state, number)
}

#[test]
fn a_goodbye_only_costs_the_grace_when_it_costs_nobody_a_job() {
    let status = |command: &Command| match command {
        Command::SetNodeStatus { status, reason, .. } => {
            assert!(reason.contains("it left: restarted"), "{reason}");
            *status
        }
        other => panic!("{other:?}"),
    };
    let (mut facts, mut state, number) = with_job();
    facts.goodbye(&state, &node(), number, "restarted", 3);
    let said = facts.take_pending();
    assert_eq!(
        said.iter().map(status).collect::<Vec<_>>(),
        [NodeStatus::Suspected]
    );
    // The verdict is on its way while the client is back already: it must write its registration.
    assert!(facts.has_left(&node()));
    let (Claim::Granted { number }, ..) = claim(&mut facts, "a") else {
        panic!()
    };
    facts.open(&node(), number, 1, space(), 4);
    assert!(!facts.has_left(&node()));

    let cancel = Command::CancelJob {
        job: mooncake_proto::ids::JobId("j".into()),
        progress: vec![],
        now_ms: 5,
    };
    state.apply(3, &cancel);
    facts.goodbye(&state, &node(), number, "restarted", 6);
    let said = facts.take_pending();
    assert_eq!(said.iter().map(status).collect::<Vec<_>>(), [NodeStatus::Down]);
}

#[test]
fn what_a_node_names_is_bounded() {
    let mut facts = led();
    let (Claim::Granted { number }, ..) = claim(&mut facts, "a") else {
        panic!()
    };
    facts.open(&node(), number, 1, space(), 0);
    let named = |i: usize| pb::ModelRef {
        model_id: format!("m{i}"),
        ..Default::default()
    };
    let now = (Instant::now(), 5);
    let absent = (0..=MAX_HOLDINGS).map(|i| pb::Holding {
        model: Some(named(i)),
        state: pb::HoldingState::Absent as i32,
        ..Default::default()
    });
    assert!(
        facts
            .holdings(&node(), number, absent.collect(), false, now)
            .is_err()
    );

    let (metrics, state) = (Metrics::new(), State::new());
    let mut report = |model: pb::ModelRef| {
        let report = pb::TaskReport {
            model: Some(model),
            fence: Some(pb::Fence::default()),
            outcome: pb::TaskOutcome::Running as i32,
            ..Default::default()
        };
        facts.report(&state, &metrics, &node(), number, report, now)
    };
    for i in 0..MAX_TASKS {
        report(named(i)).unwrap();
    }
    assert!(report(named(MAX_TASKS)).is_err());
    report(named(0)).unwrap();
    let mut long = named(0);
    long.revision = "r".repeat(257);
    assert!(report(long).is_err());
}

/// The node refuses the order of a leader that was replaced, while it works for the next one.
#[test]
fn a_refusal_of_what_was_overtaken_leaves_the_running_task_alone() {
    let (mut facts, state, number) = with_job();
    let metrics = Metrics::new();
    let model = state.wanted_models().next().unwrap().clone();
    let mut report = |attempt: u64, outcome: pb::TaskOutcome, verified_bytes: u64| {
        let report = pb::TaskReport {
            model: Some(model.clone().into()),
            generation: 1,
            fence: Some(pb::Fence {
                recovery_epoch: 0,
                attempt,
            }),
            outcome: outcome as i32,
            verified_bytes,
            objects_done: 3,
            failure: Some(pb::Failure::default()),
            ..Default::default()
        };
        let heard = (Instant::now(), 5);
        facts
            .report(&state, &metrics, &node(), number, report, heard)
            .unwrap();
        facts.progress(&model, &node())
    };
    // The model has no bytes: that is as many as can be verified.
    let running = report(4, pb::TaskOutcome::Running, 100).unwrap();
    assert_eq!(
        (running.verified_bytes, running.objects_done, running.running),
        (0, 3, true)
    );
    assert_eq!(report(3, pb::TaskOutcome::Failed, 0), Some(running));
    assert_eq!(report(4, pb::TaskOutcome::Failed, 0), None, "its own end ends it");
    assert_eq!(facts.take_pending().len(), 2, "the state decides on both");
}

#[test]
fn reports_are_checked_and_ends_wait_for_the_log_in_order() {
    let mut facts = led();
    let metrics = Metrics::new();
    let state = State::new();
    let (claimed, _, _rx) = claim(&mut facts, "a");
    let Claim::Granted { number } = claimed else {
        panic!()
    };
    facts.open(&node(), number, 7, space(), 0);
    let model = pb::ModelRef {
        model_id: "m".into(),
        revision: "r".into(),
        format: "f".into(),
        provider: "p".into(),
    };
    let base = pb::TaskReport {
        model: Some(model.clone()),
        generation: 1,
        fence: Some(pb::Fence {
            recovery_epoch: 0,
            attempt: 4,
        }),
        kind: pb::TaskKind::Acquire as i32,
        outcome: pb::TaskOutcome::Running as i32,
        verified_bytes: 100,
        objects_done: 2,
        ..Default::default()
    };
    let now = (Instant::now(), 5);
    let mut report = |r: pb::TaskReport| facts.report(&state, &metrics, &node(), number, r, now);
    report(base.clone()).unwrap();
    let seal = pb::Seal {
        block_size_bytes: 1 << 18,
        algorithm: 1,
        root: vec![1; 32].into(),
    };
    let with = |outcome: pb::TaskOutcome| pb::TaskReport {
        outcome: outcome as i32,
        ..base.clone()
    };
    assert!(report(with(pb::TaskOutcome::Acquired)).is_err(), "no seal");
    assert!(report(with(pb::TaskOutcome::Failed)).is_err(), "no reason");
    assert!(
        report(pb::TaskReport {
            model: None,
            ..base.clone()
        })
        .is_err()
    );
    report(pb::TaskReport {
        seal: Some(seal.clone()),
        ..with(pb::TaskOutcome::Acquired)
    })
    .unwrap();
    report(pb::TaskReport {
        seal: Some(seal),
        local_path: "/x".into(),
        ..with(pb::TaskOutcome::Staged)
    })
    .unwrap();
    let names: Vec<_> = facts.take_pending().iter().map(Command::name).collect();
    assert_eq!(names, ["seal", "report_staged"]);
    assert!(facts.take_pending().is_empty());
    // Of a session that was replaced nothing counts.
    facts
        .report(&state, &metrics, &node(), number + 1, base, now)
        .unwrap();
    assert!(facts.progress(&model.into(), &node()).is_none());
}
