//! Disks that lose power or run full.

use super::{leader_among, masters_only, until, whole, write, write_sized};
use crate::LONG;
use anyhow::{Context, Result};
use mooncake_chaos::{Model, Nemesis, Testbed, TestbedOptions, Who};

const DISK_BYTES: u64 = 64 << 20;
/// Larger than what a file system keeps beside a name.
const CANARY: &[u8] = &[7; 64 << 10];

#[tokio::test]
async fn power_loss_on_all_masters_keeps_what_was_acknowledged() -> Result<()> {
    let mut bed = masters_only(|o| o.master_disk_bytes = Some(DISK_BYTES)).await?;
    let leader = bed.cluster.leader().await?;
    assert_eq!(write(&bed, leader, "synced").await?, 201);
    let canaries: Vec<_> = bed
        .master_disks
        .iter()
        .map(|d| d.path().join("never-synced"))
        .collect();
    for canary in &canaries {
        std::fs::write(canary, CANARY)?;
    }
    let fault = Nemesis::PowerLoss(Who::All).inject(&mut bed).await?;
    fault.heal(&mut bed).await?;
    for canary in &canaries {
        // Its name may be there: a master's own sync takes the names along, never the data of other files.
        assert!(
            std::fs::read(canary).map_or(true, |data| data != CANARY),
            "{} survived: no power was lost",
            canary.display()
        );
    }
    whole(&mut bed).await?;
    assert_eq!(bed.cluster.job("synced").await?["job_id"], "synced");
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn a_leader_whose_disk_is_full_ends_and_another_takes_over() -> Result<()> {
    let mut bed = masters_only(|o| o.master_disk_bytes = Some(DISK_BYTES)).await?;
    let fault = Nemesis::DiskFull(Who::Leader).inject(&mut bed).await?;
    let full = fault.victims[0];
    // RocksDB has preallocated some of its log: write until it needs more, 300 KB at a time.
    let mut n = 0;
    until("the full master ends", async || {
        n += 1;
        let _ = write_sized(&bed, full, &format!("full-{n}"), 4000).await;
        Ok(!bed.cluster.masters[full].is_running())
    })
    .await?;
    let status = bed.cluster.masters[full].wait_exit(LONG).await?;
    assert!(!status.success(), "{status}");
    let log = bed.cluster.masters[full].log();
    assert!(
        log.contains("No space left on device"),
        "{}",
        bed.cluster.masters[full].log_tail()
    );
    let rest: Vec<usize> = (0..3).filter(|&i| i != full).collect();
    let leader = leader_among(&bed, &rest).await?;
    assert_eq!(write(&bed, leader, "others").await?, 201);
    fault.heal(&mut bed).await?;
    whole(&mut bed).await?;
    bed.finish();
    Ok(())
}

async fn two_clients(id: &str, bytes: u64) -> Result<(Testbed, Model, tempfile::TempDir)> {
    let mut bed = Testbed::start(TestbedOptions {
        masters: 1,
        clients: 2,
        balancer: None,
        client_disk_bytes: Some(DISK_BYTES),
        ..Default::default()
    })
    .await?;
    let folder = tempfile::tempdir()?;
    let model = Model::create(folder.path(), id, &[("a.bin", bytes)])?;
    bed.serve(folder.path()).await?;
    Ok((bed, model, folder))
}

#[tokio::test]
async fn power_loss_on_a_client_costs_no_more_than_a_repeat() -> Result<()> {
    let (mut bed, model, _folder) = two_clients("power", 12 << 20).await?;
    bed.source()?.limit_rate(Some(4 << 20));
    let nodes = bed.cluster.nodes.clone();
    let targets: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let request = model.request("power", &bed.source()?.url.clone(), &nodes[0], &targets)?;
    assert_eq!(bed.cluster.post_job(&request).await?.0, 201);
    until("the transfer has begun", async || {
        Ok(bed.source()?.bytes_served() > 3 << 20)
    })
    .await?;
    let canary = bed.client_disks[1].path().join("never-synced");
    std::fs::write(&canary, CANARY)?;
    let fault = Nemesis::ClientPowerLoss(1).inject(&mut bed).await?;
    fault.heal(&mut bed).await?;
    assert!(
        std::fs::read(&canary).map_or(true, |data| data != CANARY),
        "no power was lost"
    );
    let done = bed.cluster.wait_ended("power", LONG).await?;
    assert_eq!(done["status"], "completed", "{done:#}");
    for node in 0..2 {
        let placement = bed.cluster.placement(&done, node);
        model.assert_equal(placement["local_path"].as_str().context("local_path")?)?;
    }
    assert_eq!(bed.source()?.bytes_served_again(), 0, "the seed was not the one");
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn a_client_whose_disk_is_full_says_so_and_succeeds_with_space() -> Result<()> {
    let (mut bed, model, _folder) = two_clients("full", 6 << 20).await?;
    let fault = Nemesis::ClientDiskFull(1).inject(&mut bed).await?;
    let nodes = bed.cluster.nodes.clone();
    let targets: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let url = bed.source()?.url.clone();
    let mut request = model.request("full-1", &url, &nodes[0], &targets)?;
    request["policy"] = serde_json::json!({"max_attempts": 1});
    assert_eq!(bed.cluster.post_job(&request).await?.0, 201);
    let ended = bed.cluster.wait_ended("full-1", LONG).await?;
    assert_eq!(ended["status"], "failed", "{ended:#}");
    let error = bed.cluster.placement(&ended, 1)["last_error"].to_string();
    assert!(error.contains("space"), "{ended:#}");
    fault.heal(&mut bed).await?;
    request["job_id"] = "full-2".into();
    let done = bed.cluster.complete(&request, LONG).await?;
    let placement = bed.cluster.placement(&done, 1);
    model.assert_equal(placement["local_path"].as_str().context("local_path")?)?;
    bed.finish();
    Ok(())
}
