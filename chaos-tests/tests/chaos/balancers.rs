//! Both shipped load balancer configurations: a master dies, requests go on.

use crate::LONG;
use anyhow::{Result, ensure};
use mooncake_chaos::{Testbed, TestbedOptions, testbed::BalancerKind};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// A job whose nodes do not exist is refused by the leader alone, after a linearizable read: it needs the whole
/// path, and leaves nothing.
async fn request(bed: &Testbed, n: usize) -> Result<u16> {
    let body: Value = json!({"job_id": format!("none-{n}")});
    let url = format!("{}/api/v1/model-distribution/jobs", bed.url());
    let status = bed.cluster.http.post(url).json(&body).send().await?.status();
    if status.as_u16() >= 500 {
        return Ok(status.as_u16());
    }
    let url = format!("{}/api/v1/nodes", bed.url());
    Ok(bed.cluster.http.get(url).send().await?.status().as_u16())
}

/// Sequential requests while each master in turn is killed and started again. A follower's death costs nothing; the
/// leader's may be seen as 503 (nothing was done) or 504 (outcome unknown) for one election, never as an error of
/// the balancer and never for longer.
async fn survives(kind: BalancerKind) -> Result<()> {
    let mut bed = Testbed::start(TestbedOptions {
        clients: 0,
        balancer: Some(kind),
        ..Default::default()
    })
    .await?;
    for n in 0..20 {
        assert_eq!(request(&bed, n).await?, 200);
    }
    let leader = bed.cluster.leader().await?;
    let order = (0..3).filter(|&i| i != leader).chain([leader]);
    for victim in order {
        bed.cluster.masters[victim].kill();
        let (mut good, mut n) = (0, 0);
        let until = Instant::now() + LONG;
        while good < 50 {
            ensure!(
                Instant::now() < until,
                "requests do not go on without master {}",
                victim + 1
            );
            n += 1;
            match request(&bed, n).await? {
                200 => good += 1,
                status if victim == leader && matches!(status, 503 | 504) => {}
                status => {
                    let log = bed.balancer.as_ref().map(|b| b.process.log_tail());
                    panic!(
                        "{kind:?} answers {status} after master {} died: {log:?}",
                        victim + 1
                    );
                }
            }
        }
        bed.cluster.masters[victim].start()?;
        bed.cluster.wait_ready().await?;
    }
    // Back in rotation: with the other two frozen only the last one could answer its own probe.
    for other in (0..3).filter(|&i| i != leader) {
        bed.cluster.masters[other].kill();
    }
    let url = format!("{}/livez", bed.url());
    let until = Instant::now() + LONG;
    // HAProxy asks /readyz, which needs a leader heard of within 5 s; /livez answers through it until then.
    while !bed
        .cluster
        .http
        .get(&url)
        .send()
        .await
        .is_ok_and(|a| a.status() == 200)
    {
        ensure!(Instant::now() < until, "the master that came back is not used");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn haproxy_goes_on_without_any_one_master() -> Result<()> {
    survives(BalancerKind::HaProxy).await
}

#[tokio::test]
async fn nginx_goes_on_without_any_one_master() -> Result<()> {
    survives(BalancerKind::Nginx).await
}
