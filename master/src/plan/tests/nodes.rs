//! Nodes that die, restart, come back empty, or are many.

use super::*;

#[test]
fn a_follower_that_dies_fails_after_the_grace() {
    let mut sim = Sim::new(3);
    sim.fake(1).paused = true;
    sim.create(0, 0, 0, &[0, 1, 2]);
    sim.settle();
    sim.kill(1);
    sim.settle();
    assert_eq!(sim.state.node(&node(1)).unwrap().status, NodeStatus::Suspected);
    sim.pass(29_000);
    assert_eq!(sim.status(0), JobStatus::Replicating);
    sim.pass(1_000);
    assert_eq!(
        sim.views(0),
        [
            PlacementState::Staged,
            PlacementState::Failed,
            PlacementState::Staged
        ]
    );
    assert!(sim.job(0).last_error.as_ref().unwrap().contains("grace of 30 s"));
}

#[test]
fn a_follower_that_restarts_goes_on() {
    let mut sim = Sim::new(3);
    sim.fake(1).paused = true;
    sim.create(0, 0, 0, &[0, 1, 2]);
    sim.settle();
    let attempt = sim.job(0).views[1].attempt;
    sim.kill(1);
    sim.pass(10_000);
    sim.fake(1).paused = false;
    sim.restart(1);
    sim.settle();
    assert_eq!(
        (sim.status(0), sim.job(0).views[1].attempt),
        (JobStatus::Completed, attempt),
        "the same attempt"
    );
    assert_eq!(
        sim.fake(1).orders.iter().filter(|o| **o == "replicate").count(),
        2,
        "ordered again"
    );
}

#[test]
fn a_seed_that_restarts_goes_on() {
    let mut sim = Sim::new(2);
    sim.fake(0).paused = true;
    sim.create(0, 0, 0, &[0, 1]);
    sim.settle();
    sim.kill(0);
    sim.pass(10_000);
    sim.fake(0).paused = false;
    sim.restart(0);
    sim.settle();
    assert_eq!(
        (sim.status(0), sim.job(0).views[0].attempt),
        (JobStatus::Completed, 1)
    );
}

#[test]
fn a_wiped_node_is_copied_to_again() {
    let mut sim = Sim::new(2);
    sim.create(0, 0, 0, &[0, 1]);
    sim.settle();
    sim.kill(1);
    let fake = sim.fake(1);
    (fake.disk, fake.highest, fake.store) = (BTreeMap::new(), BTreeMap::new(), "another disk".into());
    sim.restart(1);
    assert_eq!(sim.state.node(&node(1)).unwrap().incarnation, 2);
    sim.create(1, 0, 0, &[0, 1]);
    sim.settle();
    assert_eq!(
        (sim.status(0), sim.status(1), sim.downloads()),
        (JobStatus::Completed, JobStatus::Completed, 1)
    );
}

#[test]
fn space_is_measured_again_before_a_refusal() {
    let mut sim = Sim::new(2);
    let small = |free_bytes, now_ms| Command::SetNodeFree {
        node: node(1),
        incarnation: 1,
        capacity_bytes: 1 << 30,
        free_bytes,
        measured_ms: now_ms,
        now_ms,
    };
    sim.apply(small(10, sim.now));
    sim.now += 1;
    let measured = Space {
        capacity_bytes: 1 << 30,
        free_bytes: 2 * MIB,
        measured_ms: sim.now,
    };
    sim.observed.sessions.get_mut(&node(1)).unwrap().space = Some(measured);
    sim.create(0, 0, 0, &[0, 1]);
    sim.settle();
    assert_eq!(sim.status(0), JobStatus::Completed);
    // Really full.
    sim.apply(small(10, sim.now));
    sim.create(1, 1, 0, &[0, 1]);
    sim.settle();
    assert_eq!(sim.views(1), [PlacementState::Staged, PlacementState::Failed]);
    assert!(
        sim.job(1)
            .last_error
            .as_ref()
            .unwrap()
            .contains("not enough space")
    );
}

#[test]
fn a_thousand_nodes_are_not_told_of_a_thousand_peers() {
    const NODES: usize = 1000;
    let mut sim = Sim::new(0);
    for i in 0..NODES {
        let about = NodeAbout {
            data_address: node(i).0,
            ..NodeAbout::default()
        };
        let command = Command::RegisterNode {
            node: node(i),
            store_id: "disk".into(),
            expected_incarnation: 0,
            about,
            now_ms: sim.now,
        };
        sim.index += 1;
        sim.state.apply(sim.index, &command);
        sim.observed.open(node(i), 1, sim.now).inventory_complete = true;
    }
    sim.create(0, 0, 0, &(0..NODES).collect::<Vec<_>>());
    let propose = |sim: &mut Sim| {
        for intent in plan(&sim.state, &sim.observed, sim.now) {
            if let Intent::Propose(command) = intent {
                command.encode().expect("within one log entry");
                sim.index += 1;
                sim.state.apply(sim.index, &command);
            }
        }
    };
    propose(&mut sim);
    let intents = plan(&sim.state, &sim.observed, sim.now);
    let mut lists = BTreeMap::new();
    for intent in &intents {
        let Intent::Send { node: id, order } = intent else {
            panic!("{intent:?}")
        };
        if let OrderBody::Replicate { peers, .. } = &order.body {
            assert!((12..=MAX_PEERS).contains(&peers.len()), "{}", peers.len());
            assert!(peers.iter().all(|p| p.seed == (p.node == node(0))));
            assert!(peers.iter().all(|p| p.node != *id));
            lists.insert(
                id.clone(),
                peers.iter().map(|p| p.node.clone()).collect::<Vec<_>>(),
            );
        }
        sim.observed.sent(id, order, sim.now);
    }
    assert_eq!(lists.len(), NODES - 1);
    let pullers = lists.values().filter(|l| l.contains(&node(0))).count();
    assert!((12..=MAX_PEERS).contains(&pullers), "{pullers} ask the seed");
    // Everyone can be reached from anybody, and not through the seed.
    let mut reached = std::collections::BTreeSet::from([node(1)]);
    loop {
        let before = reached.len();
        for (id, peers) in &lists {
            if peers.iter().any(|p| reached.contains(p)) {
                reached.insert(id.clone());
            }
        }
        if reached.len() == before {
            break;
        }
    }
    assert_eq!(
        reached.len(),
        NODES - 1,
        "the swarm is connected without the seed"
    );
    // One more node is staged: nobody needs to hear of it.
    let report = |i: usize, sim: &Sim| ReportId {
        model: model(0),
        generation: 1,
        node: node(i),
        incarnation: 1,
        fence: sim.state.artifact(&model(0)).unwrap().placements[&node(i)].fence,
    };
    let id = report(0, &sim);
    sim.apply(Command::Seal {
        report: id,
        seal: seal(),
        now_ms: sim.now,
    });
    for intent in plan(&sim.state, &sim.observed, sim.now) {
        let Intent::Send { node: id, order } = &intent else {
            panic!("{intent:?}")
        };
        assert!(matches!(order.body, OrderBody::Sealed { .. }), "{intent:?}");
        sim.observed.sent(id, order, sim.now);
    }
    let id = report(500, &sim);
    let local_path = "/m".to_owned();
    sim.apply(Command::ReportStaged {
        report: id,
        seal: seal(),
        local_path,
        checksum_verified: true,
        now_ms: sim.now,
    });
    let held = StagedReport {
        generation: 1,
        manifest: manifest(0).digest(),
        total_size_bytes: MIB,
        seal: seal(),
        local_path: "/m".into(),
    };
    let fence = report(500, &sim).fence;
    sim.observed
        .sessions
        .get_mut(&node(500))
        .unwrap()
        .task_ended(&model(0), fence, Some(held));
    assert_eq!(plan(&sim.state, &sim.observed, sim.now), []);
    // One is down: those who knew it hear of it, nobody else.
    let knew: Vec<NodeId> = lists
        .iter()
        .filter(|(id, peers)| peers.contains(&node(700)) && **id != node(500))
        .map(|(id, _)| id.clone())
        .collect();
    sim.observed.close(&node(700));
    for status in [NodeStatus::Suspected, NodeStatus::Down] {
        sim.apply(Command::SetNodeStatus {
            node: node(700),
            incarnation: 1,
            seen_since_ms: sim.state.node(&node(700)).unwrap().since_ms,
            status,
            reason: "gone".into(),
            now_ms: sim.now,
        });
    }
    let mut told = Vec::new();
    for intent in plan(&sim.state, &sim.observed, sim.now) {
        let Intent::Send { node: id, order } = &intent else {
            continue;
        };
        let OrderBody::PeersChanged { peers } = &order.body else {
            panic!("{intent:?}")
        };
        assert!(peers.iter().all(|p| p.node != node(700)));
        told.push(id.clone());
    }
    told.sort();
    assert_eq!(told, knew);
}

#[test]
fn a_late_inventory_does_not_take_back_what_was_reported() {
    for sealed_only in [false, true] {
        let mut sim = Sim::new(2);
        sim.create(0, 0, 0, &[0, 1]);
        sim.fake(0).paused = true;
        sim.fake(1).paused = true;
        sim.settle();
        let late = sim.fakes[&node(0)].disk[&model(0)].clone();
        // Another session: the inventory is on its way while the download ends.
        let session = sim.observed.open(node(0), 1, sim.now);
        let report = |sim: &Sim| ReportId {
            model: model(0),
            generation: 1,
            node: node(0),
            incarnation: 1,
            fence: sim.state.artifact(&model(0)).unwrap().placements[&node(0)].fence,
        };
        session.acquired(&model(0), seal());
        sim.apply(Command::Seal {
            report: report(&sim),
            seal: seal(),
            now_ms: sim.now,
        });
        if !sealed_only {
            let artifact = sim.state.artifact(&model(0)).unwrap();
            let staged = StagedReport {
                generation: 1,
                manifest: artifact.manifest,
                total_size_bytes: MIB,
                seal: seal(),
                local_path: "/m".into(),
            };
            let fence = artifact.placements[&node(0)].fence;
            let session = sim.observed.sessions.get_mut(&node(0)).unwrap();
            session.task_ended(&model(0), fence, Some(staged));
            sim.apply(Command::ReportStaged {
                report: report(&sim),
                seal: seal(),
                local_path: "/m".into(),
                checksum_verified: true,
                now_ms: sim.now,
            });
        }
        let session = sim.observed.sessions.get_mut(&node(0)).unwrap();
        session.hold(model(0), Some(late));
        session.inventory_complete = true;
        let lost = |i: &Intent| matches!(i, Intent::Propose(Command::ReportLost { .. }));
        let intents = plan(&sim.state, &sim.observed, sim.now);
        assert!(!intents.iter().any(lost), "{intents:?}");
    }
}
