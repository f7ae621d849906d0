//! What a new leader takes over, and what it waits for.

use super::*;

#[test]
fn a_new_leader_authorises_nothing_that_runs() {
    let mut sim = Sim::new(3);
    sim.fake(0).paused = true;
    sim.create(0, 0, 0, &[0, 1, 2]);
    sim.settle();
    sim.new_leader();
    for i in [2, 0, 1] {
        sim.settle();
        sim.connect(i);
    }
    sim.settle();
    assert_eq!(sim.state.artifact(&model(0)).unwrap().attempts, 3);
    assert_eq!(sim.downloads(), 1, "the same fence is the same task");
    sim.fake(0).paused = false;
    sim.settle();
    assert_eq!((sim.status(0), sim.downloads()), (JobStatus::Completed, 1));
}

#[test]
fn the_transfer_ended_while_no_master_was_there() {
    let mut sim = Sim::new(2);
    sim.fake(0).paused = true;
    sim.create(0, 0, 0, &[0, 1]);
    sim.settle();
    sim.new_leader();
    // Nodes went on by themselves: everything is whole on both, nothing is sealed.
    for i in 0..2 {
        let held = sim.fake(i).disk.get_mut(&model(0)).unwrap();
        (held.state, held.verified_bytes, held.seal) = (HeldState::Whole, MIB, Some(seal()));
        sim.fake(i).paused = false;
    }
    sim.now += 60_000;
    sim.observed.leader_since_ms = sim.now;
    sim.connect(0);
    sim.connect(1);
    sim.settle();
    assert_eq!((sim.status(0), sim.downloads()), (JobStatus::Completed, 1));
}

#[test]
fn a_new_leader_waits_for_those_who_may_hold_it() {
    let mut sim = Sim::new(3);
    sim.create(0, 0, 2, &[2]);
    sim.settle();
    assert_eq!(sim.status(0), JobStatus::Completed);
    // The state believes that the only holder lost it; in truth node 1 has it, which nobody has heard yet.
    let held = sim.fake(2).disk.remove(&model(0)).unwrap();
    sim.fake(1).disk.insert(model(0), held);
    sim.observed
        .sessions
        .get_mut(&node(2))
        .unwrap()
        .hold(model(0), None);
    sim.settle();
    sim.new_leader();
    sim.connect(0);
    sim.connect(2);
    sim.create(1, 0, 0, &[0]);
    sim.settle();
    assert_eq!(
        (sim.status(1), sim.downloads()),
        (JobStatus::Planned, 1),
        "no download within the window"
    );
    sim.now += 3_000;
    sim.connect(1);
    sim.settle();
    assert_eq!(
        (sim.status(1), sim.downloads()),
        (JobStatus::Completed, 1),
        "copied"
    );
    // Nobody has it any more and one node does not come back: after the window it is downloaded.
    for i in 0..3 {
        sim.fake(i).disk.clear();
    }
    sim.new_leader();
    sim.connect(0);
    sim.connect(1);
    sim.settle();
    sim.create(2, 0, 0, &[0, 1]);
    sim.pass(4_000);
    assert_eq!(sim.downloads(), 1);
    sim.pass(1_000);
    assert_eq!((sim.status(2), sim.downloads()), (JobStatus::Completed, 2));
}

#[test]
fn who_had_found_this_leader_is_not_given_time_to_find_it() {
    let mut sim = Sim::new(2);
    sim.new_leader();
    sim.connect(0);
    sim.connect(1);
    sim.settle();
    sim.pass(1_000);
    sim.kill(1);
    sim.settle();
    let status = |sim: &Sim| sim.state.node(&node(1)).unwrap().status;
    assert_eq!(status(&sim), NodeStatus::Suspected, "in the middle of the window");
    sim.pass(29_000);
    assert_eq!(status(&sim), NodeStatus::Suspected);
    sim.pass(1_000);
    assert_eq!(
        status(&sim),
        NodeStatus::Down,
        "the grace alone, no window before it"
    );
    // But a leader that was stalled itself has to ask anew: the session may have ended of its own silence.
    let mut sim = Sim::new(2);
    sim.kill(1);
    sim.now += 40_000;
    sim.observed.begin_again(sim.now);
    sim.settle();
    assert_eq!(status(&sim), NodeStatus::Up);
    sim.restart(1);
    sim.pass(60_000);
    assert_eq!(status(&sim), NodeStatus::Up);
}

#[test]
fn the_grace_goes_on_across_leaders() {
    let mut sim = Sim::new(2);
    sim.kill(1);
    sim.pass(20_000);
    assert_eq!(sim.state.node(&node(1)).unwrap().status, NodeStatus::Suspected);
    sim.new_leader();
    sim.connect(0);
    sim.pass(9_000);
    assert_eq!(sim.state.node(&node(1)).unwrap().status, NodeStatus::Suspected);
    sim.pass(2_000);
    assert_eq!(
        sim.state.node(&node(1)).unwrap().status,
        NodeStatus::Down,
        "30 s in all, not 30 s more"
    );
    // A leader that comes when the grace is long over gives one window first.
    let mut sim = Sim::new(2);
    sim.kill(1);
    sim.settle();
    sim.now += 60_000;
    sim.new_leader();
    sim.settle();
    sim.now += 4_000;
    sim.connect(0);
    sim.settle();
    assert_eq!(sim.state.node(&node(1)).unwrap().status, NodeStatus::Suspected);
    sim.restart(1);
    sim.pass(10_000);
    assert!(
        sim.state.nodes().all(|(_, n)| n.status == NodeStatus::Up),
        "nobody was judged by the old silence"
    );
}
