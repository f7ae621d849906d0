//! Partitions of all shapes, loss, slow links.

use super::{calm, leader_among, masters_only, probe, term, until, view, whole, write, write_sized};
use anyhow::{Context, Result};
use mooncake_chaos::{
    Filter, Nemesis, Testbed, TestbedOptions, Who,
    cluster::SNAPSHOT_INSTALLED,
    nemesis::wait_purged,
    testbed::{BalancerKind, master_host},
};
use serde_json::Value;
use std::time::{Duration, Instant};

#[tokio::test]
async fn an_isolated_leader_is_replaced_and_says_that_it_leads_no_more() -> Result<()> {
    let mut bed = masters_only(|_| ()).await?;
    let before = whole(&mut bed).await?;
    let fault = Nemesis::Isolate(Who::Leader).inject(&mut bed).await?;
    let old = fault.victims[0];
    let rest: Vec<usize> = (0..3).filter(|&i| i != old).collect();
    let new = leader_among(&bed, &rest).await?;
    assert!(term(&bed, new).await? > before);
    assert_eq!(write(&bed, new, "majority-side").await?, 201);
    // The door still reaches it: it runs, and claims nothing.
    assert_eq!(probe(&bed, old, "/livez").await, 200);
    until("the old leader turns not ready", async || {
        Ok(probe(&bed, old, "/leaderz").await == 503 && probe(&bed, old, "/readyz").await == 503)
    })
    .await?;
    fault.heal(&mut bed).await?;
    whole(&mut bed).await?;

    // An isolated follower changes nothing for the others, and does not depose them when it is back.
    let term_now = term(&bed, 0).await?;
    let fault = Nemesis::Isolate(Who::Follower).inject(&mut bed).await?;
    let cut = fault.victims[0];
    until("the follower turns not ready", async || {
        Ok(probe(&bed, cut, "/readyz").await == 503)
    })
    .await?;
    fault.heal(&mut bed).await?;
    assert_eq!(whole(&mut bed).await?, term_now, "pre-vote keeps its term down");
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn one_way_partitions_of_the_leader() -> Result<()> {
    let mut bed = masters_only(|_| ()).await?;
    for (n, nemesis) in [Nemesis::MuteLeader, Nemesis::DeafLeader].into_iter().enumerate() {
        let before = whole(&mut bed).await?;
        let fault = nemesis.inject(&mut bed).await?;
        let old = fault.victims[0];
        let rest: Vec<usize> = (0..3).filter(|&i| i != old).collect();
        let new = leader_among(&bed, &rest).await?;
        assert!(term(&bed, new).await? > before, "{nemesis:?}");
        assert_eq!(write(&bed, new, &format!("one-way-{n}")).await?, 201);
        assert_ne!(probe(&bed, old, "/leaderz").await, 200, "{nemesis:?}");
        fault.heal(&mut bed).await?;
    }
    whole(&mut bed).await?;
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn a_bridge_keeps_a_leader_that_a_majority_sees() -> Result<()> {
    let mut bed = masters_only(|_| ()).await?;
    whole(&mut bed).await?;
    let fault = Nemesis::Bridge.inject(&mut bed).await?;
    let [a, b] = fault.victims[..] else {
        anyhow::bail!("two ends")
    };
    let middle = (0..3).find(|i| *i != a && *i != b).context("one sees both")?;
    // The two ends do not see each other, whoever leads.
    let refused = bed.network.host(&master_host(a))?.namespace.run(
        "timeout",
        &[
            "0.3",
            "bash",
            "-c",
            &format!(
                "exec 3<>/dev/tcp/{}/50051",
                bed.network.host(&master_host(b))?.address
            ),
        ],
        "",
    );
    assert!(refused.is_err(), "the ends still see each other");
    // One of the three leads and commits with the middle.
    let leader = leader_among(&bed, &[a, middle, b]).await?;
    assert_eq!(write(&bed, leader, "bridge").await?, 201);
    if leader == middle {
        assert_eq!(probe(&bed, leader, "/leaderz").await, 200);
    } else {
        let cut = if leader == a { b } else { a };
        until("the end that the leader does not see is not ready", async || {
            // Or leadership went to the middle meanwhile, which both see.
            Ok(probe(&bed, cut, "/readyz").await == 503 || probe(&bed, middle, "/leaderz").await == 200)
        })
        .await?;
    }
    fault.heal(&mut bed).await?;
    whole(&mut bed).await?;
    bed.finish();
    Ok(())
}

/// Segments that the host's kernel has sent again so far.
/// What a host has sent over TCP: (segments again, all).
fn segments(bed: &Testbed, host: &str) -> Result<(u64, u64)> {
    let text = bed
        .network
        .host(host)?
        .namespace
        .run("cat", &["/proc/thread-self/net/snmp"], "")?;
    let mut tcp = text.lines().filter_map(|l| l.strip_prefix("Tcp: "));
    let (names, values) = (tcp.next().context("names")?, tcp.next().context("values")?);
    let value = |name: &str| -> Result<u64> {
        let at = names.split(' ').position(|n| n == name);
        let value = values.split(' ').nth(at.with_context(|| name.to_owned())?);
        Ok(value.with_context(|| name.to_owned())?.parse()?)
    };
    Ok((value("RetransSegs")?, value("OutSegs")?))
}

/// Of so many segments at least one is sent again where every fifth packet is lost.
const LEAST_AGAIN: u64 = 25;

#[tokio::test]
async fn writes_go_on_under_loss() -> Result<()> {
    let mut bed = masters_only(|_| ()).await?;
    let sum = |bed: &Testbed| -> Result<(u64, u64)> {
        (0..3).try_fold((0, 0), |(again, all), i| {
            let of_one = segments(bed, &master_host(i))?;
            Ok((again + of_one.0, all + of_one.1))
        })
    };
    let before = sum(&bed)?;
    let fault = Nemesis::Loss { percent: 20 }.inject(&mut bed).await?;
    for n in 0..20 {
        // The leader may change, and a request may be lost with it: what counts is that it gets there.
        until("a write under loss", async || {
            let leader = leader_among(&bed, &[0, 1, 2]).await?;
            Ok(matches!(
                write(&bed, leader, &format!("loss-{n}")).await,
                Ok(200 | 201)
            ))
        })
        .await?;
    }
    let after = sum(&bed)?;
    let (again, all) = (after.0 - before.0, after.1 - before.1);
    // A lost acknowledgement is made good by the next one: not all that is lost is sent again.
    assert!(
        again * LEAST_AGAIN >= all,
        "{again} of {all} segments were sent again: next to nothing was lost"
    );
    fault.heal(&mut bed).await?;
    whole(&mut bed).await?;
    for n in 0..20 {
        let id = format!("loss-{n}");
        assert_eq!(bed.cluster.job(&id).await?["job_id"], *id);
    }
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn a_far_leader_commits_after_the_way_there_and_back() -> Result<()> {
    const ONE_WAY_MS: u64 = 60;
    let mut bed = masters_only(|_| ()).await?;
    whole(&mut bed).await?;
    let fault = Nemesis::Delay(Who::Leader, ONE_WAY_MS).inject(&mut bed).await?;
    // Its connections were broken once; from here on nothing may be elected.
    let leader = leader_among(&bed, &[0, 1, 2]).await?;
    until("the connections go through the wires", async || {
        Ok(fault.wire_connections() >= 2)
    })
    .await?;
    let before = term(&bed, leader).await?;
    let started = Instant::now();
    assert_eq!(write(&bed, leader, "far").await?, 201);
    if leader == fault.victims[0] {
        let took = started.elapsed();
        assert!(
            took >= Duration::from_millis(2 * ONE_WAY_MS),
            "{took:?}: nothing was delayed"
        );
        assert_eq!(term(&bed, leader).await?, before, "no election");
    }
    fault.heal(&mut bed).await?;
    whole(&mut bed).await?;
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn masters_that_are_far_from_each_other_elect_and_commit() -> Result<()> {
    const ONE_WAY_MS: u64 = 50;
    let mut bed = masters_only(|_| ()).await?;
    whole(&mut bed).await?;
    let fault = Nemesis::Delay(Who::All, ONE_WAY_MS).inject(&mut bed).await?;
    for n in 0..2 {
        let leader = leader_among(&bed, &[0, 1, 2]).await?;
        let started = Instant::now();
        assert_eq!(write(&bed, leader, &format!("far-{n}")).await?, 201);
        let took = started.elapsed();
        assert!(
            took >= Duration::from_millis(2 * ONE_WAY_MS),
            "{took:?}: nothing was delayed"
        );
        let before = term(&bed, leader).await?;
        bed.cluster.masters[leader].kill();
        let rest: Vec<usize> = (0..3).filter(|&i| i != leader).collect();
        let next = leader_among(&bed, &rest).await?;
        assert!(term(&bed, next).await? > before);
        bed.cluster.masters[leader].start()?;
    }
    // Once elected, nobody is deposed by the way that heartbeats take.
    let leader = leader_among(&bed, &[0, 1, 2]).await?;
    bed.cluster.wait_ready().await?;
    let before = term(&bed, leader).await?;
    for n in 0..20 {
        assert_eq!(write(&bed, leader, &format!("far-on-{n}")).await?, 201);
    }
    assert_eq!(term(&bed, leader).await?, before, "no election");
    fault.heal(&mut bed).await?;
    whole(&mut bed).await?;
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn a_packet_filter_that_refuses_on_the_leaders_behalf_deposes_nobody() -> Result<()> {
    /// Many election time-outs, and longer than any lease.
    const LONG_ENOUGH: Duration = Duration::from_secs(3);
    let mut bed = masters_only(|_| ()).await?;
    for filter in [Filter::AtFollower, Filter::AtLeader] {
        let before = whole(&mut bed).await?;
        let fault = Nemesis::RefuseLeader(filter).inject(&mut bed).await?;
        let [leader, follower] = fault.victims[..] else {
            anyhow::bail!("two ends")
        };
        let third = (0..3).find(|i| *i != leader && *i != follower).context("third")?;
        // As from a dead process: at once.
        let to = bed.rpc_address(leader)?;
        // Through a follower that may not dial the leader nothing can be written.
        let (refused, through) = match filter {
            Filter::AtFollower => (vec![follower], vec![leader, third]),
            Filter::AtLeader => (vec![follower, third], vec![leader]),
        };
        for host in refused.into_iter().map(master_host) {
            let runtime = bed.network.host_mut(&host)?.runtime()?;
            let dial = tokio::net::TcpStream::connect(to);
            let dialled = tokio::time::timeout(crate::LONG, runtime.spawn(dial)).await??;
            let refused = dialled.err().context("it is not refused")?;
            assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        }
        let started = Instant::now();
        let mut n = 0;
        while started.elapsed() < LONG_ENOUGH {
            for through in &through {
                let id = format!("{filter:?}-{n}");
                assert_eq!(write(&bed, *through, &id).await?, 201, "{filter:?}");
                n += 1;
            }
            assert_eq!(term(&bed, leader).await?, before, "{filter:?}: no election");
        }
        assert_eq!(probe(&bed, leader, "/leaderz").await, 200);
        fault.heal(&mut bed).await?;
        assert_eq!(whole(&mut bed).await?, before, "{filter:?}: no election");
    }
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn a_leader_that_its_quorum_does_not_reach_is_left_by_the_front_door() -> Result<()> {
    /// What a caller may be kept waiting for, once a cut-off leader is out.
    const PROMPT: Duration = Duration::from_secs(1);
    const IN_A_ROW: usize = 20;
    let mut bed = Testbed::start(TestbedOptions {
        clients: 1,
        balancer: Some(BalancerKind::HaProxy),
        ..Default::default()
    })
    .await?;
    whole(&mut bed).await?;
    let old = bed.cluster.leader().await?;
    let rest: Vec<usize> = (0..3).filter(|&i| i != old).collect();
    let [cut, b, c] = [old, rest[0], rest[1]].map(master_host);
    // Only from the other masters: the balancer and the callers still reach it.
    bed.network
        .partition(&[&[cut.as_str()], &[b.as_str(), c.as_str()]])?;
    let started = Instant::now();
    until("the cut-off leader turns not ready", async || {
        Ok(probe(&bed, old, "/readyz").await == 503)
    })
    .await?;
    let took = started.elapsed();
    // A second by design. What `/readyz` waits for otherwise, until a leader is not heard of any more, is five.
    assert!(took < Duration::from_secs(5), "not ready only after {took:?}");
    let view: Value = {
        let url = format!("{}/readyz", bed.cluster.endpoints[old]);
        bed.cluster.http.get(url).send().await?.json().await?
    };
    assert_eq!(view["code"], "no_leader", "{view:#}");
    leader_among(&bed, &rest).await?;
    let list = format!("{}/api/v1/nodes", bed.url());
    until("the balancer sends nobody there any more", async || {
        for _ in 0..IN_A_ROW {
            let request = bed.cluster.http.get(&list).timeout(PROMPT);
            if !request.send().await.is_ok_and(|a| a.status().is_success()) {
                return Ok(false);
            }
        }
        Ok(true)
    })
    .await?;
    eprintln!("not ready after {took:?}, out after {:?}", started.elapsed());
    bed.network.heal()?;
    whole(&mut bed).await?;
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn a_snapshot_over_a_slow_link_arrives_and_deposes_nobody() -> Result<()> {
    const RATE: u64 = 1_000_000;
    let args = ["--snapshot-every=50", "--snapshot-keep=1"].map(str::to_owned);
    let mut bed = masters_only(|o| o.master_args = args.to_vec()).await?;
    let before = whole(&mut bed).await?;
    let fault = Nemesis::Kill(Who::Follower).inject(&mut bed).await?;
    let away = fault.victims[0];
    let leader = bed.cluster.leader().await?;
    let known = view(&bed, leader).await?["applied_index"]
        .as_u64()
        .context("index")?;
    for n in 0..60 {
        assert_eq!(write(&bed, leader, &format!("small-{n}")).await?, 201);
    }
    for n in 0..8 {
        // 80 KB of names each: seconds on the slow link.
        let status = write_sized(&bed, leader, &format!("large-{n}"), 1000).await?;
        assert_eq!(status, 201);
    }
    // A leader gives up what it was sending to a dead follower when its next attempt fails, and purges then: before
    // that a follower that comes back is sent the log.
    wait_purged(&mut bed, known).await?;
    // Then nothing but the snapshot is under way: the orders of the large jobs would fill the link just as well.
    until("the node has answered every order", async || {
        let failed = bed
            .cluster
            .master_metric(leader, r#"mooncake_jobs{status="failed"}"#);
        Ok(failed.await? == 68)
    })
    .await?;
    let slow = Nemesis::SlowLink(Who::All, RATE).inject(&mut bed).await?;
    fault.heal(&mut bed).await?;
    let began = Instant::now();
    // On a link that is full with the snapshot an answer may come too late (504): it is repeated, as callers do.
    until("a write goes through meanwhile", async || {
        Ok(matches!(write(&bed, leader, "meanwhile").await?, 200 | 201))
    })
    .await?;
    let target = view(&bed, leader).await?["applied_index"]
        .as_u64()
        .context("index")?;
    until("the follower has caught up", async || {
        let v = view(&bed, away).await;
        Ok(v.is_ok_and(|v| v["applied_index"].as_u64() >= Some(target)))
    })
    .await?;
    // 640 KB of names at this rate; half of that leaves room for whatever packs them.
    let took = began.elapsed();
    let least = Duration::from_secs(320_000 * 8 / RATE);
    assert!(took >= least, "caught up after {took:?}: the link is not slow");
    bed.cluster.masters[away]
        .wait_log(SNAPSHOT_INSTALLED, crate::LONG)
        .await?;
    let qdisc = bed.network.host(&master_host(away))?.namespace.run(
        "tc",
        &["-s", "qdisc", "show", "dev", "eth0"],
        "",
    )?;
    assert!(qdisc.contains("tbf") && qdisc.contains("1Mbit"), "{qdisc}");
    slow.heal(&mut bed).await?;
    assert_eq!(whole(&mut bed).await?, before, "no election");
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn a_slow_snapshot_is_sent_to_one_that_lacks_what_is_purged() -> Result<()> {
    const RATE: u64 = 2_000_000;
    let args = ["--snapshot-every=50", "--snapshot-keep=1"].map(str::to_owned);
    let mut bed = masters_only(|o| {
        calm(o);
        o.master_args.extend(args);
    })
    .await?;
    let before = whole(&mut bed).await?;
    let (url, node) = {
        let leader = bed.cluster.leader().await?;
        (
            bed.cluster.endpoints[leader].clone(),
            bed.cluster.nodes[0].clone(),
        )
    };
    let http = bed.cluster.http.clone();
    let writes = tokio::spawn(async move {
        for n in 0u64.. {
            let id = format!("write-{n}");
            // One that fails is followed by the next: only that there are some counts here.
            if super::post_job(&http, &url, &node, &id, 1).await.is_err() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    });
    let nemesis = Nemesis::SlowSnapshot {
        bits_per_second: RATE,
    };
    let fault = nemesis.inject(&mut bed).await?;
    let away = fault.victims[0];
    let qdisc = bed.network.host(&master_host(away))?.namespace.run(
        "tc",
        &["-s", "qdisc", "show", "dev", "eth0"],
        "",
    )?;
    assert!(qdisc.contains("tbf") && qdisc.contains("2Mbit"), "{qdisc}");
    bed.cluster.masters[away]
        .wait_log(SNAPSHOT_INSTALLED, crate::LONG)
        .await?;
    writes.abort();
    fault.heal(&mut bed).await?;
    assert_eq!(whole(&mut bed).await?, before, "no election");
    bed.finish();
    Ok(())
}
