//! Attempts that stand still.

use super::*;

/// Everything is held already, on a disk so slow that its checksums take longer than an attempt may stand still.
#[test]
fn who_checks_what_it_holds_does_not_stand_still() {
    let mut sim = Sim::new(2);
    sim.create(0, 0, 0, &[0, 1]);
    sim.fake(0).paused = true;
    sim.settle();
    let fence = sim.observed.sessions[&node(0)].sent[&model(0)].fence;
    for checked_bytes in 1..=5 {
        sim.now += 599_999;
        let reported = Reported {
            verified_bytes: MIB,
            checked_bytes,
        };
        let session = sim.observed.sessions.get_mut(&node(0)).unwrap();
        session.moved(&model(0), fence, reported, sim.now);
        sim.settle();
        assert_eq!(sim.job(0).views[0].failures, 0, "{checked_bytes}");
    }
    sim.now += 600_000;
    sim.settle();
    assert_eq!(sim.job(0).views[0].failures, 1, "now the hasher hangs");
}

#[test]
fn a_master_that_stood_still_does_not_hold_that_against_attempts() {
    let mut sim = Sim::new(2);
    sim.create(0, 0, 0, &[0, 1]);
    sim.fake(0).paused = true;
    sim.settle();
    sim.now += 700_000;
    sim.observed.begin_again(sim.now);
    sim.settle();
    assert_eq!(sim.job(0).views[0].failures, 0);
    sim.now += 599_999;
    sim.settle();
    assert_eq!(sim.job(0).views[0].failures, 0);
    sim.now += 1;
    sim.settle();
    assert_eq!(sim.job(0).views[0].failures, 1);
}

#[test]
fn a_copy_that_stands_still_fails_and_says_whom_it_could_not_reach() {
    let mut sim = Sim::new(3);
    sim.observed.config.no_progress_ms = 600_000;
    sim.create(0, 0, 0, &[0, 1]);
    sim.fake(0).paused = true;
    sim.fake(1).paused = true;
    sim.settle();
    let download = sim.job(0).views[0].attempt;
    // While the download stands still, a copy is not to blame; the download is.
    sim.now += 599_999;
    sim.settle();
    assert_eq!(sim.job(0).views[0].attempt, download);
    let fence = sim.observed.sessions[&node(0)].sent[&model(0)].fence;
    let now = sim.now;
    let session = sim.observed.sessions.get_mut(&node(0)).unwrap();
    session.moved(&model(0), fence, verified(4096), now);
    sim.now += 599_999;
    sim.settle();
    assert_eq!(sim.job(0).views[0].attempt, download, "it moved");
    assert_eq!(sim.job(0).views[1].failures, 0);
    sim.fake(0).paused = false;
    sim.settle();
    assert_eq!(sim.status(0), JobStatus::Replicating);
    for failures in 1..=2 {
        sim.now += 599_999;
        sim.settle();
        assert_eq!(sim.job(0).views[1].failures, failures - 1);
        sim.now += 1;
        sim.settle();
        assert_eq!(sim.job(0).views[1].failures, failures);
        sim.pass(1_000); // the pause before another attempt
    }
    assert_eq!(sim.views(0), [PlacementState::Staged, PlacementState::Failed]);
    let error = sim.job(0).last_error.clone().unwrap();
    assert!(
        error.contains(node(0).as_str()) && error.contains("stood still"),
        "{error}"
    );
    assert_eq!(*sim.fake(1).orders.last().unwrap(), "revoke");
}

#[test]
fn a_node_that_has_every_byte_and_does_not_publish_fails_too() {
    let mut sim = Sim::new(3);
    sim.observed.config.no_progress_ms = 600_000;
    sim.create(0, 0, 0, &[0, 1]);
    sim.fake(1).paused = true;
    sim.settle();
    let total = sim.state.artifact(&model(0)).unwrap().total_size_bytes;
    for failures in 1..=2 {
        let fence = sim.observed.sessions[&node(1)].sent[&model(0)].fence;
        let now = sim.now;
        let session = sim.observed.sessions.get_mut(&node(1)).unwrap();
        session.moved(&model(0), fence, verified(total), now);
        sim.now += 599_999;
        sim.settle();
        assert_eq!(sim.job(0).views[1].failures, failures - 1);
        sim.now += 1;
        sim.settle();
        assert_eq!(sim.job(0).views[1].failures, failures);
        sim.pass(1_000);
    }
    let error = sim.job(0).last_error.clone().unwrap();
    assert!(error.contains("has not published"), "{error}");
}

#[test]
fn orders_that_begin_nothing_do_not_look_like_ones_that_did() {
    let mut sim = Sim::new(1);
    let fence = Fence {
        recovery_epoch: 0,
        attempt: 7,
    };
    let order = |body| Order {
        model: model(0),
        generation: 1,
        fence,
        body,
    };
    let session = sim.observed.sessions.get_mut(&node(0)).unwrap();
    session.sent(&order(OrderBody::Sealed { seal: seal() }), 1);
    session.sent(&order(OrderBody::PeersChanged { peers: vec![] }), 1);
    assert!(session.sent.is_empty(), "the task's own order found no room");
}
