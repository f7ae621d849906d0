//! Masters as processes of their own: kill -9, signals, wrong set-ups.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command as Process, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{PATIENCE, Setup, eventually, probe, register};
use mooncake_master::consensus::ProposeError;
use mooncake_proto::ids::NodeId;
use tokio::sync::mpsc;

const CHILD: &str = "MOONCAKE_CONSENSUS_TEST_CHILD";
/// How a [`Puppet`] ends when consensus says that the process must.
const FAILED: i32 = 7;

/// Not a test by itself: the process that [`Puppet`] starts. Without its variable it does nothing.
#[test]
fn child_master() {
    let Ok(what) = std::env::var(CHILD) else { return };
    let setup: Vec<&str> = what.split(' ').collect();
    let [id, folder, members] = setup[..] else {
        panic!("{what}")
    };
    let members = members
        .parse::<mooncake_master::config::InitialCluster>()
        .unwrap()
        .0;
    let setup = Setup {
        folder: folder.into(),
        members,
        snapshot_every: 100,
        snapshot_keep: 20,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async move {
        let master = setup.start(id.parse().unwrap()).await;
        let (lines_tx, mut lines) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines().map_while(Result::ok) {
                let _ = lines_tx.send(line);
            }
        });
        // The parent's death closes the pipe: no child stays behind.
        loop {
            let handle = master.handle.clone();
            let line = tokio::select! {
                line = lines.recv() => line,
                _ = handle.failed() => std::process::exit(FAILED),
            };
            let Some(line) = line else { break };
            let answer = match line.split_once(' ') {
                Some(("propose", name)) => match handle.propose(&register(name)).await {
                    Ok(written) => format!("ok {}", written.index),
                    Err(ProposeError::OutcomeUnknown { .. }) => "unknown".to_owned(),
                    Err(_) => "no".to_owned(),
                },
                Some(("has", name)) => match handle.read_index().await {
                    Ok(_) => format!("{}", handle.state().node(&NodeId(name.to_owned())).is_some()),
                    Err(_) => "no".to_owned(),
                },
                // A command of a given size.
                Some(("fill", bytes)) => match handle
                    .propose(&register(&"x".repeat(bytes.parse().unwrap())))
                    .await
                {
                    Ok(written) => format!("ok {}", written.index),
                    Err(_) => "no".to_owned(),
                },
                _ => panic!("{line}"),
            };
            println!("\n> {answer}");
        }
        // kill -9 or the end of the test: nothing to tidy up.
        std::process::exit(0);
    });
}

/// A master process that does what it is told over its pipes.
struct Puppet {
    child: Child,
    orders: ChildStdin,
    answers: mpsc::UnboundedReceiver<String>,
}

impl Puppet {
    fn start(setup: &Setup, id: u64) -> Self {
        let mut process = Process::new(std::env::current_exe().unwrap());
        process.args(["child_master", "--exact", "--nocapture"]);
        Self::run(process, setup, id)
    }

    /// No file of it may grow beyond the limit: the disk fails in the middle of a write.
    fn start_with_failing_disk(setup: &Setup, id: u64, limit_kib: u64) -> Self {
        let mut process = Process::new("bash");
        let script =
            format!("trap '' XFSZ; ulimit -f {limit_kib}; exec \"$0\" child_master --exact --nocapture");
        process
            .arg("-c")
            .arg(script)
            .arg(std::env::current_exe().unwrap());
        Self::run(process, setup, id)
    }

    fn run(mut process: Process, setup: &Setup, id: u64) -> Self {
        let members = mooncake_master::config::InitialCluster(setup.members.clone());
        let mut child = process
            .env(CHILD, format!("{id} {} {members}", setup.folder.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let orders = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (answers_tx, answers) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some(answer) = line.strip_prefix("> ") {
                    let _ = answers_tx.send(answer.to_owned());
                }
            }
        });
        Self {
            child,
            orders,
            answers,
        }
    }

    /// `None`: it died.
    async fn ask(&mut self, order: &str) -> Option<String> {
        writeln!(self.orders, "{order}").ok()?;
        self.orders.flush().ok()?;
        tokio::time::timeout(PATIENCE, self.answers.recv())
            .await
            .expect("an answer in time")
    }

    fn signal(&self, name: &str) {
        signal(&self.child, name);
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn signal(child: &Child, name: &str) {
    let done = Process::new("kill")
        .args([format!("-{name}"), child.id().to_string()])
        .status()
        .unwrap();
    assert!(done.success());
    if name == "STOP" {
        // Only when a thread of it runs does the process learn of this; until then the others go on.
        let began = std::time::Instant::now();
        while !is_stopped(child.id()) {
            assert!(began.elapsed() < PATIENCE, "it does not stop");
            std::thread::yield_now();
        }
    }
}

/// Whether every thread is stopped (state `T`, after the name in parentheses; proc_pid_stat(5)).
fn is_stopped(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads.flatten().all(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ")
            .is_some_and(|(_, state)| state.starts_with('T'))
    })
}

/// The leader that all of `ids` agree on.
async fn agreed_leader(setup: &Setup, ids: &[u64]) -> u64 {
    eventually("all agree on a leader", async || {
        let mut seen = BTreeSet::new();
        for id in ids {
            let answer = probe(&setup.members[id].rpc, false).await?;
            seen.insert((answer.term, answer.leader_id));
        }
        match (seen.len(), seen.first()) {
            (1, Some((_, leader))) if ids.contains(leader) => Some(*leader),
            _ => None,
        }
    })
    .await
}

/// The term of this master.
async fn agreed_term(setup: &Setup, id: u64) -> u64 {
    eventually("it answers", async || probe(&setup.members[&id].rpc, false).await)
        .await
        .term
}

/// Asks the masters that run, in turn, until one of them answers from a linearizable read.
async fn has(masters: &mut BTreeMap<u64, Puppet>, ids: &[u64], name: &str) -> String {
    eventually("a linearizable read", async || {
        for id in ids {
            let answer = masters.get_mut(id)?.ask(&format!("has {name}")).await;
            if let Some(answer) = answer.filter(|answer| answer != "no") {
                return Some(answer);
            }
        }
        None
    })
    .await
}

/// Writes through whichever of these masters leads, until it is acknowledged; gives the index.
async fn written(masters: &mut BTreeMap<u64, Puppet>, ids: &[u64], name: &str) -> u64 {
    eventually("an acknowledged write", async || {
        for id in ids {
            let answer = masters.get_mut(id)?.ask(&format!("propose {name}")).await?;
            if let Some(index) = answer.strip_prefix("ok ") {
                return Some(index.parse().unwrap());
            }
        }
        None
    })
    .await
}

/// All of `ids` have applied the same and agree on the state.
async fn equal_digests(setup: &Setup, ids: &[u64], at_least: u64) {
    eventually("equal digests at equal index", async || {
        let mut seen = BTreeSet::new();
        for id in ids {
            let answer = probe(&setup.members[id].rpc, true).await?;
            seen.insert((answer.applied_index, answer.state_digest));
        }
        let index = seen.first()?.0;
        let same_index = seen.iter().all(|(at, _)| *at == index);
        assert!(
            !same_index || seen.len() == 1,
            "different states at index {index}: {seen:?}"
        );
        (same_index && index >= at_least).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_writes_survive_kill_9_of_the_leader() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup {
        snapshot_every: 100,
        snapshot_keep: 20,
        ..Setup::new(folder.path(), 3)
    };
    let ids = [1, 2, 3];
    let mut masters: BTreeMap<u64, Puppet> = ids.iter().map(|id| (*id, Puppet::start(&setup, *id))).collect();
    let mut acknowledged: Vec<String> = Vec::new();
    let mut highest = 0;
    for round in 0..3 {
        let leader = agreed_leader(&setup, &ids).await;
        // Written one after the other until the leader dies in the middle of one.
        for n in 0..120 {
            let name = format!("r{round}n{n}:1");
            let puppet = masters.get_mut(&leader).unwrap();
            if n == 100 {
                // The order is on its way while the process is killed: its outcome is open.
                writeln!(puppet.orders, "propose {name}").unwrap();
                puppet.kill();
                break;
            }
            match puppet
                .ask(&format!("propose {name}"))
                .await
                .as_deref()
                .map(|answer| answer.split_once(' '))
            {
                Some(Some(("ok", index))) => {
                    highest = highest.max(index.parse::<u64>().unwrap());
                    acknowledged.push(name);
                }
                Some(None) => {} // unknown or refused: promised nothing
                other => panic!("{other:?}"),
            }
        }
        let rest: Vec<u64> = ids.iter().copied().filter(|id| *id != leader).collect();
        agreed_leader(&setup, &rest).await;
        for name in &acknowledged {
            let has = has(&mut masters, &rest, name).await;
            assert_eq!(has, "true", "{name} was acknowledged and is lost");
        }
        masters.insert(leader, Puppet::start(&setup, leader));
        equal_digests(&setup, &ids, highest).await;
    }
    assert!(
        acknowledged.len() > 200,
        "the test tested something: {}",
        acknowledged.len()
    );

    // All at once, as in a power cut.
    masters.values_mut().for_each(Puppet::kill);
    masters = ids.iter().map(|id| (*id, Puppet::start(&setup, *id))).collect();
    agreed_leader(&setup, &ids).await;
    for name in &acknowledged {
        let has = has(&mut masters, &ids, name).await;
        assert_eq!(has, "true", "{name} was acknowledged and is lost");
    }
    equal_digests(&setup, &ids, highest).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_follower_that_thaws_deposes_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup::new(folder.path(), 3);
    let ids = [1, 2, 3];
    let masters: BTreeMap<u64, Puppet> = ids.iter().map(|id| (*id, Puppet::start(&setup, *id))).collect();
    // With a follower that disturbs, every round ends in another term; with a machine that stands still, one may.
    for round in 1.. {
        let leader = agreed_leader(&setup, &ids).await;
        let term = agreed_term(&setup, leader).await;
        let frozen = *ids.iter().find(|id| **id != leader).unwrap();
        // Longer than any election time-out: when it wakes, its timer has run out long ago.
        masters[&frozen].signal("STOP");
        tokio::time::sleep(Duration::from_millis(2 * common::CALM.election_max_ms + 1000)).await;
        masters[&frozen].signal("CONT");
        // It must have had the time to do harm: it answers, and so it has handled its timer.
        for _ in 0..20 {
            probe(&setup.members[&frozen].rpc, false).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let after = agreed_leader(&setup, &ids).await;
        if (after, agreed_term(&setup, after).await) == (leader, term) {
            break;
        }
        assert!(
            round < 3,
            "the pre-vote keeps it from disturbing a healthy leader"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_leader_that_thaws_steps_down_and_answers_nothing_stale() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup::new(folder.path(), 3);
    let ids = [1, 2, 3];
    let mut masters: BTreeMap<u64, Puppet> = ids.iter().map(|id| (*id, Puppet::start(&setup, *id))).collect();
    let old = agreed_leader(&setup, &ids).await;
    let old_term = agreed_term(&setup, old).await;
    written(&mut masters, &ids, "before:1").await;
    masters[&old].signal("STOP");
    // It finds this order first when it wakes, still believing that it leads.
    let order = masters.get_mut(&old).unwrap();
    writeln!(order.orders, "has after:1").unwrap();
    order.orders.flush().unwrap();

    let rest: Vec<u64> = ids.iter().copied().filter(|id| *id != old).collect();
    let index = written(&mut masters, &rest, "after:1").await;
    masters[&old].signal("CONT");
    let read = tokio::time::timeout(PATIENCE, masters.get_mut(&old).unwrap().answers.recv())
        .await
        .unwrap()
        .unwrap();
    assert_ne!(
        read, "false",
        "a read that says what was true before another leader's acknowledged write"
    );
    let new = agreed_leader(&setup, &ids).await;
    assert!(
        agreed_term(&setup, new).await > old_term,
        "what it led is over, and it knows"
    );
    equal_digests(&setup, &ids, index).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_disk_ends_the_process_and_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup::new(folder.path(), 1);
    let mut master = Puppet::start_with_failing_disk(&setup, 1, 1024);
    agreed_leader(&setup, &[1]).await;
    let mut acknowledged = 0;
    let mut failed = false;
    for _ in 0..20 {
        match master
            .ask("fill 100000")
            .await
            .as_deref()
            .map(|answer| answer.split_once(' '))
        {
            Some(Some(("ok", index))) => acknowledged = index.parse::<u64>().unwrap(),
            Some(_) | None => {
                failed = true;
                break;
            }
        }
    }
    assert!(
        failed && acknowledged > 0,
        "the disk failed after index {acknowledged}: {failed}"
    );
    let status = eventually("the process ends by itself", async || {
        master.child.try_wait().unwrap()
    })
    .await;
    assert_eq!(status.code(), Some(FAILED));

    // On a good disk everything that was acknowledged is there.
    let _again = Puppet::start(&setup, 1);
    agreed_leader(&setup, &[1]).await;
    equal_digests(&setup, &[1], acknowledged).await;
}

/// The real binary.
struct Binary {
    child: Child,
    log: Arc<Mutex<Vec<String>>>,
}

impl Binary {
    fn start(setup: &Setup, id: u64, more: &[&str]) -> Self {
        let members = mooncake_master::config::InitialCluster(setup.members.clone()).to_string();
        let data = setup.folder.join(format!("m{id}"));
        let secret = setup.secret_file();
        let id_text = id.to_string();
        let address = &setup.members[&id];
        let mut arguments = vec![
            "--node_id",
            &id_text,
            "--data_dir",
            data.to_str().unwrap(),
            "--initial-cluster",
            &members,
            "--bootstrap",
            "--rpc_address",
            &address.rpc,
            "--http_address",
            &address.http,
            "--cluster_secret_file",
            secret.to_str().unwrap(),
            "--drain-ms",
            "50",
        ];
        arguments.extend(more);
        Self::run(&arguments)
    }

    fn run(arguments: &[&str]) -> Self {
        let mut child = Process::new(env!("CARGO_BIN_EXE_mooncake_master"))
            .args(arguments)
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let lines = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn({
            let log = Arc::clone(&log);
            move || {
                lines
                    .lines()
                    .map_while(Result::ok)
                    .for_each(|line| log.lock().unwrap().push(line))
            }
        });
        Self { child, log }
    }

    fn said(&self, what: &str) -> bool {
        self.log.lock().unwrap().iter().any(|line| line.contains(what))
    }

    fn signal(&self, name: &str) {
        signal(&self.child, name);
    }

    async fn end(&mut self) -> ExitStatus {
        eventually("the process ends", async || self.child.try_wait().unwrap()).await
    }

    async fn says(&self, what: &str) {
        let found = async || self.said(what).then_some(());
        let deadline = tokio::time::timeout(PATIENCE, eventually(what, found)).await;
        assert!(deadline.is_ok(), "{:#?}", self.log.lock().unwrap());
    }
}

impl Drop for Binary {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("process {}: {:#?}", self.child.id(), self.log.lock().unwrap());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_binary_elects_hands_over_and_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup::new(folder.path(), 3);
    let ids = [1, 2, 3];
    let mut masters: BTreeMap<u64, Binary> = ids
        .iter()
        .map(|id| (*id, Binary::start(&setup, *id, &common::CALM_ARGS)))
        .collect();
    let leader = agreed_leader(&setup, &ids).await;
    equal_digests(&setup, &ids, 1).await;
    let term = probe(&setup.members[&leader].rpc, false).await.unwrap().term;

    // SIGTERM: leadership goes first, then the process, without an error.
    let stopped = masters.get_mut(&leader).unwrap();
    stopped.signal("TERM");
    assert!(
        stopped.end().await.success(),
        "{:#?}",
        stopped.log.lock().unwrap()
    );
    assert!(
        stopped.said("leadership handed over"),
        "{:#?}",
        stopped.log.lock().unwrap()
    );
    assert!(!stopped.said("ERROR"), "{:#?}", stopped.log.lock().unwrap());
    let rest: Vec<u64> = ids.iter().copied().filter(|id| *id != leader).collect();
    let next = agreed_leader(&setup, &rest).await;
    let after = probe(&setup.members[&next].rpc, false).await.unwrap();
    assert_eq!(
        (after.leader_id, after.term),
        (next, term + 1),
        "one transfer, no election beside it"
    );

    // It comes back as what it was; --bootstrap does nothing any more.
    masters.insert(leader, Binary::start(&setup, leader, &common::CALM_ARGS));
    masters[&leader].says("belongs to a cluster already").await;
    agreed_leader(&setup, &ids).await;
    equal_digests(&setup, &ids, after.applied_index).await;

    // Wiped, it is refused, with the reason and a status that a supervisor sees.
    masters.get_mut(&leader).unwrap().signal("KILL");
    masters.get_mut(&leader).unwrap().end().await;
    std::fs::remove_dir_all(folder.path().join(format!("m{leader}"))).unwrap();
    let mut wiped = Binary::start(&setup, leader, &[]);
    assert_eq!(wiped.end().await.code(), Some(3));
    assert!(
        wiped.said("must come back as a new id"),
        "{:#?}",
        wiped.log.lock().unwrap()
    );
}

/// The timers are so long that they cannot have been what replaced the leader.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_leader_is_replaced_without_waiting_for_a_time_out() {
    const NEVER: [&str; 4] = ["--election-min-ms", "600000", "--election-max-ms", "600001"];
    const STANDS: &str = "standing for election at once";
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup::new(folder.path(), 3);
    let ids = [1, 2, 3];
    let mut masters: BTreeMap<u64, Binary> = ids
        .iter()
        .map(|id| (*id, Binary::start(&setup, *id, &NEVER)))
        .collect();
    for _ in 0..3 {
        let leader = agreed_leader(&setup, &ids).await;
        let before = probe(&setup.members[&leader].rpc, false).await.unwrap();
        masters.get_mut(&leader).unwrap().signal("KILL");
        masters.get_mut(&leader).unwrap().end().await;
        let rest: Vec<u64> = ids.iter().copied().filter(|id| *id != leader).collect();
        let next = agreed_leader(&setup, &rest).await;
        let after = probe(&setup.members[&next].rpc, false).await.unwrap();
        assert_eq!(after.term, before.term + 1, "one election, one candidate");
        assert!(masters[&next].said(STANDS));
        masters.insert(leader, Binary::start(&setup, leader, &NEVER));
        equal_digests(&setup, &ids, after.applied_index).await;
    }

    // A frozen leader is not a dead one: its host answers.
    let leader = agreed_leader(&setup, &ids).await;
    let term = probe(&setup.members[&leader].rpc, false).await.unwrap().term;
    masters[&leader].signal("STOP");
    let rest: Vec<u64> = ids.iter().copied().filter(|id| *id != leader).collect();
    for _ in 0..20 {
        for id in &rest {
            assert_eq!(probe(&setup.members[id].rpc, false).await.unwrap().term, term);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    masters[&leader].signal("CONT");
    assert_eq!(agreed_leader(&setup, &ids).await, leader);

    // One witness is no quorum.
    for id in [rest[0], leader] {
        masters.get_mut(&id).unwrap().signal("KILL");
        masters.get_mut(&id).unwrap().end().await;
    }
    for _ in 0..20 {
        assert_eq!(
            probe(&setup.members[&rest[1]].rpc, false).await.unwrap().term,
            term
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_with_another_secret_is_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup::new(folder.path(), 2);
    let other = folder.path().join("other");
    std::fs::write(&other, "the secret of somebody else").unwrap();
    let right = Binary::start(&setup, 1, &[]);
    let wrong = Binary::start(&setup, 2, &["--cluster-secret-file", other.to_str().unwrap()]);
    right.says("different cluster secrets").await;
    wrong.says("different cluster secrets").await;
    assert!(!probe(&setup.members[&1].rpc, false).await.unwrap().initialised);
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_setups_end_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let data = data.to_str().unwrap();
    let failing = async |arguments: &[&str], code: i32, why: &str| {
        let mut process = Binary::run(arguments);
        assert_eq!(process.end().await.code(), Some(code), "{arguments:?}");
        process.says(why).await;
    };
    let taken = std::net::TcpListener::bind((common::own_loopback(), 0)).unwrap();
    let address = taken.local_addr().unwrap().to_string();
    failing(
        &["--data-dir", data, "--rpc-address", &address],
        1,
        "change --rpc-address or --rpc-port",
    )
    .await;
    failing(
        &["--data-dir", data, "--rpc-port", "0", "--http-address", &address],
        1,
        "change --http-address",
    )
    .await;
    failing(
        &[
            "--data-dir",
            data,
            "--rpc-port",
            "0",
            "--http-address",
            "0.0.0.0:0",
        ],
        1,
        "a cluster secret is required",
    )
    .await;
    failing(
        &["--data-dir", data, "--rpc-address", "0.0.0.0:0"],
        1,
        "a cluster secret is required",
    )
    .await;
    failing(&["--no-such-flag"], 2, "--no-such-flag").await;
    failing(&["--config", "/nonexistent.toml"], 2, "/nonexistent.toml").await;
    let ports = ["--rpc-port", "0", "--http-port", "0", "--data-dir", data];
    failing(
        &[&ports[..], &["--heartbeat-ms", "100"]].concat(),
        1,
        "--heartbeat-ms 100",
    )
    .await;

    // A folder never moves to another id.
    let mut first = Binary::run(&[&ports[..], &["--bootstrap"]].concat());
    first.says("leading").await;
    first.signal("INT");
    assert!(first.end().await.success());
    failing(&[&ports[..], &["--node-id", "2"]].concat(), 1, "node id").await;
    failing(
        &[&ports[..], &["--cluster-id", "other"]].concat(),
        1,
        "cluster id",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_does_not_wait() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup::new(folder.path(), 2);
    let drain = ["--drain-ms", "600000"];
    let mut one = Binary::start(&setup, 1, &drain);
    let _two = Binary::start(&setup, 2, &drain);
    agreed_leader(&setup, &[1, 2]).await;
    one.signal("TERM");
    one.says("a second signal stops at once").await;
    one.signal("TERM");
    let status = one.end().await;
    assert_eq!(status.code(), Some(1));
}
