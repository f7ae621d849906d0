//! Clusters of masters in one process, over real sockets and disks.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use common::{
    Local, PATIENCE, Setup, eventually, probe, raft_client, register, secret, serving, settled, text,
};
use futures_util::StreamExt as _;
use mooncake_master::consensus::{
    BootstrapError, NotReady, Options, ProposeError, QUORUM_WITHIN, ReadError, TransferError,
};
use mooncake_proto::hello::{Purpose, Secret};
use mooncake_proto::ids::NodeId;
use mooncake_proto::pb::raft as pb;
use mooncake_state::Reply;
use tonic::transport::server::Connected as _;

#[tokio::test(flavor = "multi_thread")]
async fn three_masters_agree_and_answer() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup::new(folder.path(), 3);
    let mut masters = setup.start_all().await;
    let leader = settled(&masters).await;

    // A write on the leader, seen by everyone at the same index with the same digest.
    let written = masters[&leader].handle.propose(&register("a:1")).await.unwrap();
    assert!(
        matches!(written.reply, Reply::Registered { incarnation } if incarnation > 0),
        "{written:?}"
    );
    let mut digests = BTreeSet::new();
    for master in masters.values() {
        let mut applied = master.handle.applied();
        assert!(
            tokio::time::timeout(PATIENCE, applied.reached(written.index))
                .await
                .unwrap()
        );
        let state = master.handle.state();
        assert_eq!(state.applied_index, written.index);
        assert!(state.node(&NodeId("a:1".into())).is_some());
        digests.insert(state.digest());
    }
    assert_eq!(digests.len(), 1);

    // Linearizable read on the leader; followers say who leads and append nothing.
    let read = masters[&leader].handle.read_index().await.unwrap();
    assert!(read >= written.index);
    for (id, master) in masters.iter().filter(|(id, _)| **id != leader) {
        let refused = master.handle.propose(&register("b:1")).await.unwrap_err();
        let ProposeError::NotLeader { leader: Some(known) } = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(
            (known.id, &known.http_address),
            (leader, &setup.members[&leader].http)
        );
        let refused = master.handle.read_index().await.unwrap_err();
        assert!(matches!(refused, ReadError::NotLeader { leader: Some(known) } if known.id == leader));
        assert!(matches!(
            master.handle.transfer_leader(None).await,
            Err(TransferError::NotLeader { .. })
        ));
        let mut recovered = master.handle.recovered();
        tokio::time::timeout(PATIENCE, recovered.wait_for(|yes| *yes))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(master.handle.readiness(PATIENCE), Ok(()), "master {id}");
    }
    assert_eq!(masters[&leader].handle.readiness(PATIENCE), Ok(()));
    let after = masters[&leader].handle.read_index().await.unwrap();
    assert!(
        masters[&leader]
            .handle
            .state()
            .node(&NodeId("b:1".into()))
            .is_none(),
        "nothing was appended at {after}"
    );

    // The status: everyone's disk; the leader knows how far the others are.
    let cluster = masters[&leader].handle.cluster();
    assert_eq!(cluster.members.len(), 3);
    assert_eq!(cluster.leader_id, Some(leader));
    let disks: BTreeSet<_> = masters
        .values()
        .map(|master| master.handle.identity().disk_id.clone())
        .collect();
    assert_eq!(
        cluster
            .members
            .iter()
            .map(|member| member.disk_id.clone())
            .collect::<BTreeSet<_>>(),
        disks
    );
    assert!(
        cluster
            .members
            .iter()
            .all(|member| member.is_voter && member.lag.is_some())
    );

    for master in masters.values_mut() {
        master.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_single_master_bootstraps_and_restarts() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup::new(folder.path(), 1);
    let mut masters = setup.start_all().await;
    serving(&masters).await;
    let written = masters[&1].handle.propose(&register("a:1")).await.unwrap();
    // Nothing is written meanwhile, and there is nobody who could confirm it.
    tokio::time::sleep(QUORUM_WITHIN + Duration::from_millis(200)).await;
    assert_eq!(
        masters[&1].handle.readiness(PATIENCE),
        Ok(()),
        "a quorum by itself"
    );
    masters.get_mut(&1).unwrap().stop().await;

    let masters = setup.start_all().await;
    serving(&masters).await;
    let read = masters[&1].handle.read_index().await.unwrap();
    assert!(read > written.index, "the new term's first entry is behind it");
    assert!(masters[&1].handle.state().node(&NodeId("a:1".into())).is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn leadership_moves_where_it_is_told_to() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup::new(folder.path(), 3);
    let masters = setup.start_all().await;
    let first = serving(&masters).await;
    let second = setup.members.keys().copied().find(|id| *id != first).unwrap();
    assert_eq!(
        masters[&first].handle.transfer_leader(Some(first)).await,
        Err(TransferError::BadTarget(first))
    );
    assert_eq!(
        masters[&first].handle.transfer_leader(Some(77)).await,
        Err(TransferError::BadTarget(77))
    );

    let before = masters[&first].handle.leadership().borrow().term;
    let new = masters[&first]
        .handle
        .transfer_leader(Some(second))
        .await
        .unwrap();
    assert_eq!(new.id, second);
    let mut leadership = masters[&second].handle.leadership();
    let now = tokio::time::timeout(PATIENCE, leadership.wait_for(|now| now.is_serving))
        .await
        .unwrap()
        .unwrap()
        .clone();
    assert!(now.term > before);
    masters[&second].handle.propose(&register("a:1")).await.unwrap();
    // And once more to whoever is closest.
    let third = masters[&second].handle.transfer_leader(None).await.unwrap();
    assert_ne!(third.id, second);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_quorum_nothing_is_acknowledged() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup::new(folder.path(), 3);
    let mut masters = setup.start_all().await;
    let leader = serving(&masters).await;
    let others: Vec<u64> = setup.members.keys().copied().filter(|id| *id != leader).collect();
    for id in &others {
        masters.get_mut(id).unwrap().stop().await;
    }

    let handle = masters[&leader].handle.clone();
    // As long as its lease lasts it takes the command, and does not know; later it refuses.
    let first = handle
        .propose_within(&register("lost:1"), Duration::from_millis(500))
        .await
        .unwrap_err();
    assert!(
        matches!(
            first,
            ProposeError::OutcomeUnknown { .. } | ProposeError::NotLeader { .. }
        ),
        "{first:?}"
    );
    let read = handle.read_index().await.unwrap_err();
    assert!(
        matches!(read, ReadError::NoQuorum | ReadError::NotLeader { .. }),
        "{read:?}"
    );
    let later = common::eventually("the lease ends", async || {
        match handle
            .propose_within(&register("lost:2"), Duration::from_millis(500))
            .await
        {
            Err(ProposeError::NotLeader { leader }) => Some(leader),
            Err(ProposeError::OutcomeUnknown { .. }) => None,
            other => panic!("{other:?}"),
        }
    })
    .await;
    assert_eq!(later, None, "an old leader does not send callers back to itself");
    let silent = common::eventually("not ready", async || {
        handle.readiness(Duration::from_millis(500)).err()
    })
    .await;
    assert!(
        matches!(silent, NotReady::LeaderSilent { .. } | NotReady::NoLeader),
        "{silent:?}"
    );
    assert!(
        handle
            .quorum_silence()
            .is_none_or(|silence| silence > Duration::from_millis(100))
    );

    // With one of them back there is a quorum again.
    let back = setup.start(others[0]).await;
    masters.insert(others[0], back);
    let written = common::eventually("writes go on", async || {
        for master in masters.values().filter(|master| master.consensus.is_some()) {
            if let Ok(written) = master
                .handle
                .propose_within(&register("a:1"), Duration::from_secs(5))
                .await
            {
                return Some(written);
            }
        }
        None
    })
    .await;
    assert!(written.index > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_far_behind_gets_a_snapshot() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup {
        snapshot_every: 50,
        snapshot_keep: 5,
        ..Setup::new(folder.path(), 3)
    };
    let mut masters = setup.start_all().await;
    let leader = serving(&masters).await;
    let behind = setup.members.keys().copied().find(|id| *id != leader).unwrap();
    masters.get_mut(&behind).unwrap().stop().await;

    let handle = masters[&leader].handle.clone();
    let known = handle.applied().index();
    let mut last = 0;
    for n in 0..250 {
        last = handle.propose(&register(&format!("n{n}:1"))).await.unwrap().index;
    }
    // The log that the follower would need is gone.
    common::eventually("a log purged beyond what the follower has", async || {
        (handle.cluster().purged_index > known).then_some(())
    })
    .await;
    handle.propose(&register("x:1")).await.unwrap();

    let back = setup.start(behind).await;
    let mut applied = back.handle.applied();
    assert!(
        tokio::time::timeout(PATIENCE, applied.reached(last))
            .await
            .unwrap()
    );
    // Its log begins behind what it never got as entries.
    assert!(
        back.handle.cluster().purged_index > known,
        "a snapshot replaced the state"
    );
    // Equal digests at equal index.
    let index = handle.propose(&register("y:1")).await.unwrap().index;
    assert!(
        tokio::time::timeout(PATIENCE, applied.reached(index))
            .await
            .unwrap()
    );
    assert_eq!(back.handle.state().digest(), handle.state().digest());
    assert!(back.handle.state().node(&NodeId("n0:1".into())).is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn many_writers_and_readers_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup::new(folder.path(), 3);
    let masters = setup.start_all().await;
    let leader = settled(&masters).await;
    let handle = masters[&leader].handle.clone();
    let tasks: Vec<_> = (0..32)
        .map(|task| {
            let handle = handle.clone();
            tokio::spawn(async move {
                for n in 0..20 {
                    let name = format!("t{task}n{n}:1");
                    let written = handle.propose(&register(&name)).await.unwrap();
                    let read = handle.read_index().await.unwrap();
                    assert!(read >= written.index);
                    assert!(handle.state().node(&NodeId(name)).is_some());
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let index = handle.applied().index();
    let mut digests = BTreeSet::new();
    for master in masters.values() {
        assert!(
            tokio::time::timeout(PATIENCE, master.handle.applied().reached(index))
                .await
                .unwrap()
        );
        digests.insert(master.handle.state().digest());
    }
    assert_eq!(digests.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn too_large_and_too_much_are_refused_before_the_log() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup::new(folder.path(), 1);
    let masters = setup.start_all().await;
    settled(&masters).await;
    let handle = &masters[&1].handle;
    let large = register(&"x".repeat(mooncake_proto::MAX_COMMAND_BYTES));
    assert!(matches!(
        handle.propose(&large).await,
        Err(ProposeError::TooLarge { .. })
    ));

    // Far more bytes at once than may be held, all asked for before the first can be on the disk.
    let half = register(&"x".repeat(mooncake_proto::MAX_COMMAND_BYTES / 2 - 4096));
    let before = handle.applied().index();
    let answers =
        futures_util::future::join_all((0..600).map(|_| handle.propose_within(&half, PATIENCE))).await;
    let taken = answers.iter().filter(|answer| answer.is_ok()).count();
    let refused = answers
        .iter()
        .filter(|answer| matches!(answer, Err(ProposeError::Overloaded)))
        .count();
    assert_eq!(taken + refused, 600, "nothing is left open");
    assert!(taken >= 100 && refused > 0, "{taken} taken, {refused} refused");
    assert_eq!(
        handle.applied().index() - before,
        taken as u64,
        "what was refused is not in the log"
    );
    handle.propose(&register("a:1")).await.unwrap();
}

/// Stops one that does not lead and deletes its data folder; gives its id.
async fn wipe_a_follower(setup: &Setup, masters: &mut BTreeMap<u64, Local>, leader: u64) -> u64 {
    let wiped = setup.members.keys().copied().find(|id| *id != leader).unwrap();
    masters.get_mut(&wiped).unwrap().stop().await;
    std::fs::remove_dir_all(setup.options(wiped).data_dir).unwrap();
    wiped
}

/// Why this master cannot be a part of its cluster.
async fn refused(back: &mut Local) -> BootstrapError {
    let failed = back.consensus.as_mut().unwrap().bootstrap_failed();
    tokio::time::timeout(PATIENCE, failed).await.unwrap()
}

/// Wipes a follower and starts it again, with other options: it ends because the leader says so, and the others go on.
async fn is_told_by_the_leader(change: impl FnOnce(&mut Options)) {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup::new(folder.path(), 3);
    let mut masters = setup.start_all().await;
    let leader = serving(&masters).await;
    let wiped = wipe_a_follower(&setup, &mut masters, leader).await;

    let mut options = setup.options(wiped);
    change(&mut options);
    let mut back = setup.start_as(options).await;
    let refused = refused(&mut back).await;
    assert!(
        matches!(&refused, BootstrapError::Wiped { id, by, known, found, .. }
            if (*id, *by) == (wiped, leader) && known != found),
        "{refused:?}"
    );
    back.stop().await;
    masters[&leader].handle.propose(&register("a:1")).await.unwrap();
}

/// One that was added was not started with --bootstrap, and knows nobody to ask. (Soak, seed 310001: it waited for ever.)
#[tokio::test(flavor = "multi_thread")]
async fn a_wiped_master_that_waits_to_be_added_is_told_by_who_calls_it() {
    is_told_by_the_leader(|options| options.bootstrap = false).await;
}

/// As with the unit in deploy/: `bootstrap = true` stays in the configuration, and of those in `initial_cluster` none may
/// be a member any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_wiped_master_whose_first_peers_are_gone_is_told_by_who_leads() {
    is_told_by_the_leader(|options| {
        for (id, address) in &mut options.initial_cluster {
            if *id != options.node_id {
                // Nobody listens there.
                address.rpc = "127.0.0.1:1".into();
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wiped_master_is_refused_under_its_old_id() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup::new(folder.path(), 3);
    let mut masters = setup.start_all().await;
    let leader = serving(&masters).await;
    masters[&leader].handle.propose(&register("a:1")).await.unwrap();
    let wiped = wipe_a_follower(&setup, &mut masters, leader).await;

    let mut back = setup.start(wiped).await;
    let refused = refused(&mut back).await;
    assert!(
        matches!(refused, BootstrapError::Wiped { id, .. } if id == wiped),
        "{refused:?}"
    );
    assert!(refused.to_string().contains("must come back as a new id"));
    assert_eq!(back.handle.readiness(PATIENCE), Err(NotReady::NotInitialised));

    // It takes nothing from the leader and gives no vote, whatever the caller says its disk was.
    let known = masters[&leader]
        .handle
        .cluster()
        .members
        .into_iter()
        .find(|member| member.id == wiped)
        .unwrap();
    let mut client = raft_client(
        &setup.members[&wiped].rpc,
        mooncake_proto::DEFAULT_CLUSTER_ID,
        Some(secret()),
        Purpose::Raft,
    );
    let route = pb::Route {
        from_id: 99,
        from_disk_id: "test".into(),
        to_id: wiped,
        to_disk_id: known.disk_id,
    };
    let vote = Some(pb::Vote {
        term: 99,
        node_id: 99,
        committed: false,
    });
    let request = pb::VoteRequest {
        route: Some(route),
        vote,
        ..Default::default()
    };
    let refused = client.vote(request).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    assert!(
        refused.message().contains("must come back as a new id"),
        "{refused}"
    );
    assert_eq!(back.handle.applied().index(), 0);

    // Meanwhile the others go on.
    masters[&leader].handle.propose(&register("b:1")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_are_told_why_they_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup::new(folder.path(), 1);
    let mut masters = setup.start_all().await;
    serving(&masters).await;
    let address = setup.members[&1].rpc.clone();
    assert!(probe(&address, true).await.unwrap().initialised);

    let ask = async |cluster: &str, secret: Option<Secret>| {
        let refused = raft_client(&address, cluster, secret, Purpose::Raft)
            .probe(pb::ProbeRequest::default())
            .await;
        text(&refused.unwrap_err())
    };
    let other = Secret::new(b"another cluster's secret").unwrap();
    let ours = mooncake_proto::DEFAULT_CLUSTER_ID;
    assert!(ask(ours, Some(other)).await.contains("different cluster secrets"));
    assert!(ask(ours, None).await.contains("--cluster-secret-file"));
    assert!(ask("elsewhere", Some(secret())).await.contains("'elsewhere'"));
    // Nodes do not belong here at all, and data connections have another port.
    let data = raft_client(&address, ours, Some(secret()), Purpose::Data)
        .probe(pb::ProbeRequest::default())
        .await;
    assert!(text(&data.unwrap_err()).contains("does not serve"));

    // A session's connection is handed to whoever serves sessions, and never reaches Raft.
    let mut sessions = masters.get_mut(&1).unwrap().sessions.take().unwrap();
    let asking = tokio::spawn(async move {
        raft_client(&address, ours, Some(secret()), Purpose::Session)
            .probe(pb::ProbeRequest::default())
            .await
    });
    let session = tokio::time::timeout(PATIENCE, sessions.next())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert_eq!(session.connect_info().purpose, Purpose::Session);
    drop(session);
    assert!(asking.await.unwrap().is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_says_which_members_it_reaches() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup::new(folder.path(), 3);
    let mut masters = setup.start_all().await;
    let leader = serving(&masters).await;
    let others: Vec<u64> = setup.members.keys().copied().filter(|id| *id != leader).collect();
    let disk = masters[&leader].handle.identity().disk_id.clone();
    let asked = &masters[&others[0]].handle;
    let knows = |handle: &mooncake_master::consensus::Handle| handle.cluster().members.len() == 3;
    eventually("it knows the members", async || knows(asked).then_some(())).await;
    masters.get_mut(&others[1]).unwrap().stop().await;
    let mut client = raft_client(
        &setup.members[&others[0]].rpc,
        mooncake_proto::DEFAULT_CLUSTER_ID,
        Some(secret()),
        Purpose::Raft,
    );
    let [here, gone] = [leader, others[1]].map(|id| setup.members[&id].rpc.clone());
    // Of the last one it knows nothing, so that it does not dial it for whoever asks.
    let stranger = setup.members[&leader].http.clone();
    let request = pb::ProbeRequest {
        reach_addresses: vec![here.clone(), gone.clone(), stranger.clone()],
        ..Default::default()
    };
    let answer = client.probe(request).await.unwrap().into_inner();
    let [reached, lost, unknown] = &answer.reach[..] else {
        panic!("{answer:?}")
    };
    assert_eq!(
        (&reached.address, &reached.disk_id, reached.unknown),
        (&here, &disk, false)
    );
    assert_eq!(
        (&lost.address, lost.disk_id.as_str(), lost.unknown),
        (&gone, "", false)
    );
    assert!(!lost.error.is_empty());
    assert_eq!(
        (&unknown.address, unknown.disk_id.as_str(), unknown.unknown),
        (&stranger, "", true)
    );
    assert!(answer.last_log_index > 0 && answer.last_log_term > 0 && answer.last_log_term <= answer.term);
}
