//! Nodes that die, come back, register anew, and what they hold.

use super::*;

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
