//! What an operator does to the masters: members, leadership, backup, restore, recovery, upgrade. Every command is that
//! of `docs/operations.md`.

use crate::{JOB, bed::Bed};
use anyhow::{Context, Result, ensure};
use mooncake_chaos::{
    Cluster, ClusterOptions, Model,
    checks::Evidence,
    cluster::{self, MASTER},
    history::MasterSeen,
    process::binary_path,
};
use mooncake_proto::DEFAULT_CLUSTER_ID;
use serde_json::Value;
use std::time::{Duration, Instant, SystemTime};

/// For a process to end by itself, and for masters to agree; a pass takes a second or two.
const PATIENCE: Duration = Duration::from_secs(90);
/// The exit code for "starting again changes nothing, a person has to act".
const NEEDS_A_PERSON: i32 = 3;

/// Runs mooncakectl with `--json`, which must succeed.
async fn ctl(cluster: &Cluster, endpoints: &[usize], args: &[&str]) -> Result<Value> {
    let (code, out, err) = cluster.ctl(endpoints, &[args, &["--json"]].concat()).await?;
    ensure!(code == 0, "mooncakectl {args:?} ends with {code}: {err}");
    serde_json::from_str(&out).with_context(|| format!("mooncakectl {args:?}: {out}"))
}

/// Runs mooncakectl, which must be refused with these words.
async fn refused(cluster: &Cluster, endpoints: &[usize], args: &[&str], says: &[&str]) -> Result<()> {
    let (code, out, err) = cluster.ctl(endpoints, args).await?;
    ensure!(code == 2, "mooncakectl {args:?} ends with {code}: {out}{err}");
    for part in says {
        ensure!(err.contains(part), "'{part}' is missing in: {err}");
    }
    Ok(())
}

async fn master_command(args: &[&str]) -> Result<(i32, String, String)> {
    let args: Vec<String> = args.iter().map(|a| (*a).to_owned()).collect();
    cluster::run_to_end("mooncake_master", &args).await
}

fn roles(status: &Value) -> Vec<(u64, String)> {
    let members = status["members"].as_array().cloned().unwrap_or_default();
    members
        .iter()
        .map(|m| {
            (
                m["id"].as_u64().unwrap_or(0),
                m["role"].as_str().unwrap_or_default().to_owned(),
            )
        })
        .collect()
}

fn ids(status: &Value) -> Vec<u64> {
    roles(status).into_iter().map(|(id, _)| id).collect()
}

/// Waits for `check` to give something.
async fn eventually<T>(what: &str, mut check: impl AsyncFnMut() -> Result<Option<T>>) -> Result<T> {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = check().await? {
            return Ok(value);
        }
        ensure!(Instant::now() < until, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until the leader has noticed that a master is silent.
async fn silent(cluster: &Cluster, leader: usize, master: usize, for_ms: u64) -> Result<()> {
    eventually("the silence is noticed", async || {
        let status = ctl(cluster, &[leader], &["cluster", "status"]).await?;
        let members = status["members"].as_array().cloned().unwrap_or_default();
        let silent = members
            .iter()
            .find(|m| m["id"] == master as u64 + 1)
            .and_then(|m| m["silent_ms"].as_u64());
        Ok(silent.is_some_and(|ms| ms > for_ms).then_some(()))
    })
    .await
}

/// Waits until the process at this RPC port answers as a master that is not started for anything yet.
async fn listens(cluster: &Cluster, master: usize) -> Result<()> {
    let url = format!("{}/livez", cluster.endpoints[master]);
    eventually("the new master listens", async || {
        Ok(cluster.http.get(&url).send().await.ok().map(drop))
    })
    .await
}

/// Creates a job without a source of its own: it only has to be in the log.
async fn put_job(bed: &mut Bed, id: &str) -> Result<()> {
    let body = bed.request(id, 0, &[0])?;
    let (status, answer) = bed.cluster.post_job(&body).await?;
    ensure!(status == 201, "{status}: {answer:#}");
    Ok(())
}

fn one_client() -> ClusterOptions {
    ClusterOptions {
        clients: 1,
        ..ClusterOptions::calm()
    }
}

/// What is in the log of a job's placements: nodes that were restarted do not know any more how their copy came.
fn recorded_placements(job: &Value) -> Value {
    let mut placements = job["placements"].clone();
    for placement in placements.as_array_mut().into_iter().flatten() {
        placement.as_object_mut().expect("an object").remove("transports");
    }
    placements
}

#[tokio::test]
async fn members_come_and_go() -> Result<()> {
    let mut bed = Bed::start_with("members", &[("a.bin", 1 << 20)], None, one_client()).await?;
    put_job(&mut bed, "before").await?;
    let leader = bed.cluster.leader().await?;
    let followers: Vec<usize> = (0..3).filter(|i| *i != leader).collect();
    let (lost, other) = (followers[0], followers[1]);
    // Any master takes any command.
    let all = [other, leader];

    // A new one: learner, then voter; each step may be repeated.
    let four = bed.cluster.add_master()?;
    bed.cluster.masters[four].start()?;
    listens(&bed.cluster, four).await?;
    let rpc = bed.cluster.rpc_addresses[four].clone();
    refused(
        &bed.cluster,
        &all,
        &["cluster", "promote", "4"],
        &["404", "master 4 is not a member"],
    )
    .await?;
    let added = ctl(&bed.cluster, &all, &["cluster", "add", &rpc]).await?;
    assert_eq!(
        (&added["changed"], &added["id"]),
        (&true.into(), &4.into()),
        "{added:#}"
    );
    assert!(
        roles(&added["cluster"]).contains(&(4, "learner".into())),
        "{added:#}"
    );
    let again = ctl(&bed.cluster, &all, &["cluster", "add", &rpc]).await?;
    assert_eq!(again["changed"], false, "{again:#}");
    let promoted = ctl(&bed.cluster, &all, &["cluster", "add", &rpc, "--promote"]).await?;
    assert!(
        roles(&promoted["cluster"]).contains(&(4, "follower".into())),
        "{promoted:#}"
    );
    let again = ctl(&bed.cluster, &all, &["cluster", "promote", "4"]).await?;
    assert_eq!(again["changed"], false, "{again:#}");
    // It has what was there before it.
    let job = ctl(&bed.cluster, &[four], &["jobs", "get", "before"]).await?;
    assert_eq!(job["job_id"], "before");

    // A lost one goes; it comes back, is told, says so, ends, and does not start again.
    bed.cluster.masters[lost].kill();
    let lost_id = (lost + 1).to_string();
    let removed = ctl(&bed.cluster, &all, &["cluster", "remove", &lost_id]).await?;
    assert_eq!(removed["changed"], true, "{removed:#}");
    let again = ctl(&bed.cluster, &all, &["cluster", "remove", &lost_id]).await?;
    assert_eq!(again["changed"], false, "{again:#}");
    let term = removed["cluster"]["term"].as_u64();
    for _ in 0..2 {
        bed.cluster.masters[lost].start()?;
        let ended = bed.cluster.masters[lost].wait_exit(PATIENCE).await?;
        assert_eq!(
            ended.code(),
            Some(NEEDS_A_PERSON),
            "{}",
            bed.cluster.masters[lost].log_tail()
        );
        let log = bed.cluster.masters[lost].log();
        assert!(log.contains("was removed from the cluster"), "{log}");
    }
    let status = ctl(&bed.cluster, &all, &["cluster", "status"]).await?;
    assert_eq!(status["term"].as_u64(), term, "it disturbed nobody: {status:#}");

    // With one of three voters dead, none of the others may go.
    bed.cluster.masters[other].kill();
    let says = ["(409)", "writes would stop", "has not answered for"];
    silent(&bed.cluster, leader, other, 4000).await?;
    refused(&bed.cluster, &[leader], &["cluster", "remove", "4"], &says).await?;

    // Wiped, it is refused under its id; another one takes its place, at its own address, in one command.
    std::fs::remove_dir_all(&bed.cluster.data_dirs[other])?;
    bed.cluster.masters[other].start_with(&["--bootstrap=false".into()])?;
    let ended = bed.cluster.masters[other].wait_exit(PATIENCE).await?;
    let log = bed.cluster.masters[other].log();
    assert_eq!(ended.code(), Some(NEEDS_A_PERSON), "{log}");
    assert!(log.contains("A wiped master must come back as a new id"), "{log}");
    let rpc = bed.cluster.rpc_addresses[other].clone();
    let other_id = (other + 1).to_string();
    let replace = ["cluster", "replace", &other_id, &rpc];
    let renewed = bed.cluster.dir().join("renewed").display().to_string();
    let http = bed.cluster.endpoints[other].trim_start_matches("http://");
    let own = format!("9={rpc}/{http}");
    let new = [
        "--bootstrap=false",
        "--node-id",
        "9",
        "--data-dir",
        &renewed,
        "--initial-cluster",
        &own,
    ];
    bed.cluster.masters[other].start_with(&new.map(String::from))?;
    listens(&bed.cluster, other).await?;
    let mistyped = ["cluster", "replace", "7", &rpc];
    refused(
        &bed.cluster,
        &[leader],
        &mistyped,
        &["master 7 is no member", "nothing was changed"],
    )
    .await?;
    let replaced = ctl(&bed.cluster, &[leader], &replace).await?;
    let mut left = vec![leader as u64 + 1, 4, 9];
    left.sort_unstable();
    assert_eq!(ids(&replaced["cluster"]), left, "{replaced:#}");
    assert!(
        roles(&replaced["cluster"])
            .iter()
            .all(|(_, role)| role != "learner"),
        "{replaced:#}"
    );

    // The leader itself, by one on another machine: leadership goes first.
    let five = bed.cluster.add_master()?;
    bed.cluster.masters[five].start()?;
    listens(&bed.cluster, five).await?;
    let rpc = bed.cluster.rpc_addresses[five].clone();
    let leader_id = (leader + 1).to_string();
    let replaced = ctl(
        &bed.cluster,
        &[four, leader],
        &["cluster", "replace", &leader_id, &rpc],
    )
    .await?;
    assert_eq!(ids(&replaced["cluster"]), [4, 5, 9], "{replaced:#}");
    let again = ctl(
        &bed.cluster,
        &[four, five],
        &["cluster", "replace", &leader_id, &rpc],
    )
    .await?;
    assert_eq!(again["changed"], false, "{again:#}");
    let ended = bed.cluster.masters[leader].wait_exit(PATIENCE).await?;
    assert_eq!(ended.code(), Some(NEEDS_A_PERSON));

    // None of the first masters is left, and nothing is lost: the node found the new ones.
    let body = bed.request("after", 0, &[0])?;
    let (status, answer) = bed.cluster.post_job_to(four, &body).await?;
    assert_eq!(status, 201, "{answer:#}");
    let done = bed.cluster.wait_ended("after", JOB).await?;
    assert_eq!(done["status"], "completed", "{done:#}");
    let before = ctl(&bed.cluster, &[four, five], &["jobs", "get", "before"]).await?;
    assert_eq!(before["status"], "completed", "{before:#}");
    Ok(())
}

#[tokio::test]
async fn leadership_goes_where_it_is_sent() -> Result<()> {
    let options = ClusterOptions {
        clients: 0,
        ..ClusterOptions::calm()
    };
    let mut cluster = Cluster::start(options).await?;
    let leader = cluster.leader().await?;
    let next = (leader + 1) % 3;
    // Through the very master that gives it away, and through one that is neither.
    for (through, to) in [(leader, next), ((leader + 2) % 3, leader)] {
        let to_id = (to + 1).to_string();
        let moved = ctl(&cluster, &[through], &["cluster", "transfer", &to_id]).await?;
        assert_eq!(moved["id"], to as u64 + 1, "{moved:#}");
        assert_eq!(cluster.leader().await?, to);
        let again = ctl(&cluster, &[through], &["cluster", "transfer", &to_id]).await?;
        assert_eq!(
            (&again["changed"], &again["id"]),
            (&false.into(), &moved["id"]),
            "{again:#}"
        );
    }
    // To anybody: somebody else leads, and it moved once.
    let term = ctl(&cluster, &[leader], &["cluster", "status"]).await?["term"].as_u64();
    ctl(&cluster, &[next], &["cluster", "transfer"]).await?;
    assert_ne!(cluster.leader().await?, leader);
    let status = ctl(&cluster, &[next], &["cluster", "status"]).await?;
    assert_eq!(status["term"].as_u64(), term.map(|t| t + 1), "{status:#}");
    refused(
        &cluster,
        &[next],
        &["cluster", "transfer", "9"],
        &["not another voter"],
    )
    .await?;

    // Not to one that cannot take it: writes would wait for an election.
    let leader = cluster.leader().await?;
    let gone = (leader + 1) % 3;
    cluster.masters[gone].kill();
    silent(&cluster, leader, gone, 1000).await?;
    let before = ctl(&cluster, &[leader], &["cluster", "status"]).await?["term"].clone();
    let gone_id = (gone + 1).to_string();
    let says = ["(409)", "was not handed over", "has not answered for"];
    refused(&cluster, &[leader], &["cluster", "transfer", &gone_id], &says).await?;
    let status = ctl(&cluster, &[leader], &["cluster", "status"]).await?;
    assert_eq!(status["term"], before, "nobody was asked to stand: {status:#}");
    Ok(())
}

#[tokio::test]
async fn a_backup_is_whole_and_restores_a_cluster() -> Result<()> {
    let mut bed = Bed::start_with("backup", &[("a.bin", 1 << 20)], None, one_client()).await?;
    put_job(&mut bed, "kept").await?;
    let kept = bed.cluster.wait_ended("kept", JOB).await?;
    let leader = bed.cluster.leader().await?;
    let follower = (leader + 1) % 3;
    let file = bed.cluster.dir().join("backup.mcb");
    let path = file.display().to_string();

    // Through a follower it is the leader's; an older file is replaced.
    std::fs::write(&file, "an older one")?;
    let saved = ctl(&bed.cluster, &[follower], &["cluster", "snapshot", "save", &path]).await?;
    assert_eq!(
        (&saved["jobs"], &saved["taken_by"]),
        (&1.into(), &(leader as u64 + 1).into()),
        "{saved:#}"
    );
    let looked = ctl(&bed.cluster, &[], &["cluster", "snapshot", "status", &path]).await?;
    assert_eq!(looked, saved);
    let own = bed.cluster.dir().join("own.mcb").display().to_string();
    let own = ctl(
        &bed.cluster,
        &[follower],
        &["cluster", "snapshot", "save", &own, "--stale"],
    )
    .await?;
    assert_eq!(own["taken_by"], follower as u64 + 1);
    let (code, out, err) = master_command(&["snapshot", "verify", &path]).await?;
    assert!(
        code == 0 && out.contains("is a whole backup") && out.contains("1 jobs"),
        "{out}{err}"
    );
    // Any damage is found by all who read it.
    let damaged = bed.cluster.dir().join("damaged.mcb");
    let mut bytes = std::fs::read(&file)?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&damaged, &bytes)?;
    let damaged = damaged.display().to_string();
    refused(
        &bed.cluster,
        &[],
        &["cluster", "snapshot", "status", &damaged],
        &["SHA-256"],
    )
    .await?;
    let new_dir = bed.cluster.dir().join("restored").display().to_string();
    let member = bed.cluster.member(0);
    let restore = |snapshot: &str, more: &[&str]| {
        let args = [
            "restore",
            "--snapshot",
            snapshot,
            "--data-dir",
            &new_dir,
            "--node-id",
            "1",
        ];
        let args: Vec<String> = args.iter().chain(more).map(|a| (*a).to_owned()).collect();
        async move { cluster::run_to_end("mooncake_master", &args).await }
    };
    let (code, _, err) = restore(&damaged, &["--initial-cluster", &member]).await?;
    assert!(code == 1 && err.contains("SHA-256"), "{err}");

    // What came after the backup is lost with the cluster; what was before is there.
    put_job(&mut bed, "too-late").await?;
    bed.cluster.wait_ended("too-late", JOB).await?;
    bed.cluster.masters.iter_mut().for_each(|m| m.kill());
    let many = [&member[..], &bed.cluster.member(1)].join(",");
    let (code, _, err) = restore(&path, &["--initial-cluster", &many]).await?;
    assert!(code == 1 && err.contains("same --recovery-epoch"), "{err}");
    let (code, out, err) = restore(&path, &["--initial-cluster", &member]).await?;
    assert!(code == 0 && out.contains("recovery epoch  0 ->"), "{out}{err}");
    let (code, _, err) = restore(&path, &["--initial-cluster", &member]).await?;
    assert!(
        code == 1 && err.contains("not empty"),
        "a restore never writes over anything: {err}"
    );
    bed.cluster.masters[0].start_with(&["--data-dir".into(), new_dir.clone()])?;
    bed.cluster.wait_ready().await?;
    let now = bed.cluster.job("kept").await?;
    assert_eq!(
        (&now["status"], recorded_placements(&now)),
        (&kept["status"], recorded_placements(&kept)),
        "{now:#}"
    );
    let (code, _, err) = bed.cluster.ctl(&[0], &["jobs", "get", "too-late"]).await?;
    assert!(code == 2 && err.contains("404"), "{err}");
    put_job(&mut bed, "new-life").await?;
    let done = bed.cluster.wait_ended("new-life", JOB).await?;
    assert_eq!(done["status"], "completed", "{done:#}");
    let status = ctl(&bed.cluster, &[0], &["cluster", "status"]).await?;
    assert!(
        status["recovery_epoch"].as_u64() > Some(1_700_000_000),
        "{status:#}"
    );

    // It grows again.
    let four = bed.cluster.add_master()?;
    bed.cluster.masters[four].start()?;
    listens(&bed.cluster, four).await?;
    let rpc = bed.cluster.rpc_addresses[four].clone();
    let added = ctl(&bed.cluster, &[0], &["cluster", "add", &rpc, "--promote"]).await?;
    assert_eq!(ids(&added["cluster"]), [1, 4], "{added:#}");
    Ok(())
}

#[tokio::test]
async fn three_masters_are_restored_side_by_side() -> Result<()> {
    let mut bed = Bed::start_with("three", &[("a.bin", 1 << 20)], None, one_client()).await?;
    put_job(&mut bed, "kept").await?;
    bed.cluster.wait_ended("kept", JOB).await?;
    let path = bed.cluster.dir().join("backup.mcb").display().to_string();
    ctl(&bed.cluster, &[0], &["cluster", "snapshot", "save", &path]).await?;
    bed.cluster.masters.iter_mut().for_each(|m| m.kill());
    let members: Vec<String> = (0..3).map(|i| bed.cluster.member(i)).collect();
    let members = members.join(",");
    let epoch = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)?
        .as_secs();
    let restore = async |dir: &str, id: &str, epoch: u64| {
        master_command(&[
            "restore",
            "--snapshot",
            &path,
            "--data-dir",
            dir,
            "--node-id",
            id,
            "--initial-cluster",
            &members,
            "--recovery-epoch",
            &epoch.to_string(),
        ])
        .await
    };
    for master in 0..3 {
        let dir = bed.cluster.dir().join(format!("restored-{master}"));
        let dir = dir.display().to_string();
        let id = (master + 1).to_string();
        // As from the shell's history.
        let (code, _, err) = restore(&dir, &id, epoch - 7200).await?;
        assert!(code == 1 && err.contains("--force-epoch"), "{err}");
        let (code, out, err) = restore(&dir, &id, epoch).await?;
        assert!(code == 0, "{out}{err}");
        bed.cluster.masters[master].start_with(&["--data-dir".into(), dir])?;
    }
    bed.cluster.wait_ready().await?;
    bed.cluster.leader().await?;
    let status = ctl(&bed.cluster, &[0], &["cluster", "status"]).await?;
    assert_eq!(status["recovery_epoch"], epoch, "{status:#}");
    put_job(&mut bed, "new-life").await?;
    let done = bed.cluster.wait_ended("new-life", JOB).await?;
    assert_eq!(done["status"], "completed", "{done:#}");
    assert_eq!(bed.cluster.job("kept").await?["status"], "completed");
    Ok(())
}

/// The backup is of the middle of a job, and the job goes on behind it: the old life ends with tasks that the restored
/// cluster knows under other fences, or not at all, and their nodes report them to it.
#[tokio::test]
async fn a_restore_half_way_through_a_job_takes_no_report_of_the_old_life() -> Result<()> {
    const SIZE: u64 = 24 << 20;
    /// What the source gives before the backup, and before the old life ends.
    const BEFORE: u64 = 8 << 20;
    const LATER: u64 = 16 << 20;
    let mut bed = Bed::start("half-way", &[("a.bin", SIZE)], Some(8 << 20)).await?;
    bed.source.hold_at(BEFORE);
    bed.post_to_all("half-way").await?;
    bed.wait_bytes("half-way", 0, BEFORE / 2).await?;
    let path = bed.cluster.dir().join("half.mcb").display().to_string();
    let saved = ctl(&bed.cluster, &[0], &["cluster", "snapshot", "save", &path]).await?;
    assert_eq!(saved["jobs"], 1, "{saved:#}");
    let attempt = |snapshot: &Value, cluster: &Cluster| cluster.placement(snapshot, 0)["attempt"].as_u64();
    let then = bed.cluster.job("half-way").await?;
    assert_ne!(then["status"], "completed", "{then:#}");

    // Behind the backup the old life goes on: more bytes, and another job, which the backup does not know.
    bed.source.hold_at(LATER);
    bed.wait_bytes("half-way", 0, BEFORE + (1 << 20)).await?;
    let unknown = tempfile::tempdir()?;
    let other = Model::create(unknown.path(), "unknown", &[("b.bin", 1 << 20)])?;
    let base = unknown.path().display().to_string();
    // Its source may not be read: it fails.
    let body = other.request("unknown", &base, &bed.cluster.nodes[1], &[&bed.cluster.nodes[1]])?;
    bed.cluster.create(&body).await?;
    bed.cluster.wait_ended("unknown", JOB).await?;
    bed.cluster.masters.iter_mut().for_each(|m| m.kill());
    // Without masters the nodes finish what they were ordered: that is what they report to whoever comes.
    bed.source.release();
    eventually("the nodes have what they were ordered", async || {
        Ok((bed.source.bytes_served() >= SIZE && bed.source.bodies() == 0).then_some(()))
    })
    .await?;
    let served = bed.source.bytes_served();

    let dir = bed.cluster.dir().join("half-restored").display().to_string();
    let member = bed.cluster.member(0);
    let (code, out, err) = master_command(&[
        "restore",
        "--snapshot",
        &path,
        "--data-dir",
        &dir,
        "--node-id",
        "1",
        "--initial-cluster",
        &member,
    ])
    .await?;
    assert!(code == 0, "{out}{err}");
    bed.cluster.masters[0].start_with(&["--data-dir".into(), dir.clone()])?;
    bed.cluster.wait_ready().await?;
    let status = ctl(&bed.cluster, &[0], &["cluster", "status"]).await?;
    assert!(
        status["recovery_epoch"].as_u64() > Some(1_700_000_000),
        "{status:#}"
    );

    // The nodes are ordered anew, under a fence of the new life, and say what they have: nothing is fetched twice.
    let done = bed.finish("half-way").await?;
    assert!(
        attempt(&done, &bed.cluster) >= attempt(&then, &bed.cluster),
        "{then:#} {done:#}"
    );
    assert_eq!(
        bed.source.bytes_served(),
        served,
        "what the nodes have is not fetched again"
    );
    // What only the old life knew came with the nodes' reports, and is not there.
    let (code, _, err) = bed.cluster.ctl(&[0], &["jobs", "get", "unknown"]).await?;
    assert!(code == 2 && err.contains("404"), "{err}");
    // And along the restored cluster's log: whatever was reported under another fence changed nothing.
    let index = |status: &Value| status["applied_index"].as_u64().context("applied_index");
    let (begin, end) = (
        index(&status)?,
        index(&ctl(&bed.cluster, &[0], &["cluster", "status"]).await?)?,
    );
    bed.cluster.masters[0].kill();
    let mut evidence = Evidence::default();
    evidence.masters.push(MasterSeen {
        at_us: 0,
        id: 1,
        term: 0,
        leader: None,
        applied_index: end,
        digest: None,
    });
    evidence.replay(&[(1, dir.into())], DEFAULT_CLUSTER_ID).await?;
    let replay = evidence.replay.context("just made")?;
    assert!(
        replay.first_index <= begin && replay.last_index == end,
        "the whole new life is judged"
    );
    assert!(
        replay.stale_reports > 0,
        "no report of the old life reached the log: nothing was tried"
    );
    assert_eq!((replay.stale_changes, replay.state_faults), (vec![], vec![]));
    Ok(())
}

#[tokio::test]
async fn after_the_loss_of_a_quorum_one_master_goes_on_and_the_old_ones_command_nobody() -> Result<()> {
    let mut bed = Bed::start("recover", &[("a.bin", 24 << 20)], Some(4 << 20)).await?;
    bed.post_to_all("recover").await?;
    bed.wait_bytes("recover", 1, 3 << 20).await?;
    let survivor = bed.cluster.leader().await?;
    let lost: Vec<usize> = (0..3).filter(|i| *i != survivor).collect();
    let dir = bed.cluster.data_dirs[survivor].display().to_string();
    let recover = ["recover", "--force-new-cluster", "--data-dir", &dir];
    let status = ctl(&bed.cluster, &[survivor], &["cluster", "status"]).await?;
    let log_term = status["last_log_term"].as_u64().context("last_log_term")?;

    // Half-way the majority is gone. The survivor still runs: its folder is refused.
    lost.iter().for_each(|&i| bed.cluster.masters[i].kill());
    let (code, _, err) = master_command(&recover).await?;
    assert!(code == 1 && err.contains("another process has it open"), "{err}");
    bed.cluster.masters[survivor].kill();
    let (code, _, err) = master_command(&["recover", "--data-dir", &dir]).await?;
    assert!(code == 2 && err.contains("--force-new-cluster"), "{err}");
    let dry_run = ["recover", "--dry-run", "--data-dir", &dir];
    for _ in 0..2 {
        let (code, out, err) = master_command(&dry_run).await?;
        let ends = format!("log ends at     term {log_term}, index ");
        assert!(
            code == 0 && out.contains(&ends) && out.contains("Nothing was changed"),
            "{out}{err}"
        );
    }
    let (code, out, err) = master_command(&recover).await?;
    let others: Vec<String> = lost.iter().map(|i| (i + 1).to_string()).collect();
    let never = format!(
        "The other old masters ({}) must never start again",
        others.join(", ")
    );
    assert!(code == 0 && out.contains(&never), "{out}{err}");
    // Cut off before its last step, it is refused, and its repeat still knows who the others were.
    let marker = bed.cluster.data_dirs[survivor].join("unfinished");
    std::fs::write(&marker, "`recover --force-new-cluster`\n1 2 3\n")?;
    bed.cluster.masters[survivor].start()?;
    let ended = bed.cluster.masters[survivor].wait_exit(PATIENCE).await?;
    assert!(!ended.success(), "{}", bed.cluster.masters[survivor].log_tail());
    let (code, out, err) = master_command(&recover).await?;
    assert!(code == 0 && out.contains(&never), "{out}{err}");
    bed.cluster.masters[survivor].start()?;
    bed.cluster.wait_ready().await?;
    let status = ctl(&bed.cluster, &[survivor], &["cluster", "status"]).await?;
    assert_eq!(ids(&status), [survivor as u64 + 1], "{status:#}");
    let epoch = status["recovery_epoch"].as_u64().context("recovery_epoch")?;
    assert!(epoch > 1_700_000_000, "{status:#}");

    // The job goes on under the new epoch, and nothing is fetched twice: only requests that the new order broke off
    // begin again, at their last whole block.
    let done = bed.finish("recover").await?;
    bed.assert_no_request_twice();
    bed.assert_broken_requests_cost_a_block_each();
    let served = bed.source.bytes_served();
    let before = recorded_placements(&done);

    // The two old masters come back. They are a majority of the old cluster, elect a leader, and know a job that
    // is not done; the nodes know their addresses.
    for &old in &lost {
        bed.cluster.masters[old].start()?;
    }
    eventually("the old masters have a leader", async || {
        for &old in &lost {
            let answer = bed
                .cluster
                .http
                .get(format!("{}/leaderz", bed.cluster.endpoints[old]))
                .send()
                .await;
            if answer.is_ok_and(|a| a.status() == 200) {
                return Ok(Some(()));
            }
        }
        Ok(None)
    })
    .await?;
    // They call the survivor by the disk that it no longer has. Both logs say who has to go: not the survivor.
    let survivors_log = eventually("the survivor says who is left over", async || {
        let log = bed.cluster.masters[survivor].log();
        Ok(log
            .contains("belongs to an old life of this cluster")
            .then_some(log))
    })
    .await?;
    assert!(
        !survivors_log.contains("must come back as a new id"),
        "{survivors_log}"
    );
    // Without the right master every node looks for another one, and refuses those that are left over; so it is
    // after a restart of the node, too.
    bed.cluster.masters[survivor].kill();
    bed.cluster.clients[2].kill();
    bed.cluster.clients[2].start()?;
    for node in 0..3 {
        eventually("the node refuses the old masters", async || {
            let log = bed.cluster.clients[node].log();
            Ok(log.contains("left over from before").then_some(()))
        })
        .await?;
    }
    for &old in &lost {
        let sessions = bed.cluster.master_metric(old, "master_node_sessions").await?;
        assert_eq!(sessions, 0, "an old master commands a node");
    }

    // With the right one back they obey it, and nothing of the old life has changed anything.
    for &old in &lost {
        bed.cluster.masters[old].kill();
    }
    bed.cluster.masters[survivor].start()?;
    bed.cluster.wait_ready().await?;
    let now = bed.cluster.job("recover").await?;
    assert_eq!(recorded_placements(&now), before);
    assert_eq!(bed.source.bytes_served(), served);
    Ok(())
}

#[tokio::test]
async fn the_cluster_version_rises_when_all_support_it_and_keeps_old_programs_out() -> Result<()> {
    const NEW: &str = "examples/next_cluster_version";
    const NOW: u32 = mooncake_state::SUPPORTED_CLUSTER_VERSION;
    let (old, new) = (binary_path(MASTER)?, binary_path(NEW)?);
    ensure!(
        new.exists(),
        "{} is missing: build it with `cargo build --workspace --examples`",
        new.display()
    );
    let options = ClusterOptions {
        clients: 0,
        master_programs: vec![NEW, NEW, MASTER],
        ..ClusterOptions::default()
    };
    let mut cluster = Cluster::start(options).await?;
    let version = async |cluster: &Cluster| {
        let status = ctl(cluster, &[0, 1], &["cluster", "status"]).await?;
        anyhow::Ok(status["cluster_version"].as_u64())
    };
    // A new build leads: it would raise the version if it could.
    let leader = cluster.leader().await?;
    if leader == 2 {
        ctl(&cluster, &[0], &["cluster", "transfer", "1"]).await?;
    }
    let leader = cluster.leader().await?;
    eventually("the leader looked", async || {
        let asked = cluster.masters[leader]
            .log()
            .contains("this master was elected leader");
        Ok(asked.then_some(()))
    })
    .await?;
    eventually("the version that all support", async || {
        Ok((version(&cluster).await? == Some(NOW.into())).then_some(()))
    })
    .await?;
    // Several looks of its upkeep go by.
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(
        version(&cluster).await?,
        Some(NOW.into()),
        "one master does not support the next one"
    );

    // The last one is upgraded.
    cluster.masters[2].terminate(PATIENCE).await?;
    cluster.masters[2].set_program(new);
    cluster.masters[2].start()?;
    cluster.wait_ready().await?;
    eventually("the version rises", async || {
        Ok((version(&cluster).await? == Some((NOW + 1).into())).then_some(()))
    })
    .await?;

    // And cannot be set back: neither from a snapshot nor from the log.
    cluster.masters[2].terminate(PATIENCE).await?;
    cluster.masters[2].set_program(old.clone());
    cluster.masters[2].start()?;
    let ended = cluster.masters[2].wait_exit(PATIENCE).await?;
    assert_eq!(
        ended.code(),
        Some(NEEDS_A_PERSON),
        "{}",
        cluster.masters[2].log_tail()
    );
    let log = cluster.masters[2].log();
    assert!(
        log.contains(&format!("this cluster is at version {}", NOW + 1)) && !log.contains("panicked"),
        "{log}"
    );
    // Nor does a new, old program get in.
    let four = cluster.add_master()?;
    cluster.masters[four].set_program(old);
    cluster.masters[four].start()?;
    listens(&cluster, four).await?;
    let rpc = cluster.rpc_addresses[four].clone();
    refused(
        &cluster,
        &[0, 1],
        &["cluster", "add", &rpc],
        &["upgrade it first"],
    )
    .await
}
