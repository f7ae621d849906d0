//! Sources that fail, stall, send too little or too much, or change.

use super::{BLOCK_BYTES, until};
use crate::LONG;
use anyhow::{Context, Result};
use mooncake_chaos::{Behaviour, Model, Nemesis, Testbed, TestbedOptions};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const BYTES: u64 = 8 << 20;
/// An honest source needs less than a tenth of it for everything.
const STANDS_STILL: Duration = Duration::from_secs(1);

async fn bed() -> Result<(Testbed, tempfile::TempDir)> {
    let mut bed = Testbed::start(TestbedOptions {
        masters: 1,
        clients: 1,
        balancer: None,
        ..Default::default()
    })
    .await?;
    let folder = tempfile::tempdir()?;
    bed.serve(folder.path()).await?;
    Ok((bed, folder))
}

/// A job of a new model; (its request, the model).
fn job(bed: &Testbed, folder: &tempfile::TempDir, id: &str, attempts: u64) -> Result<(Value, Model)> {
    let model = Model::create(&folder.path().join(id), id, &[("a.bin", BYTES)])?;
    let node = bed.cluster.nodes[0].as_str();
    let base = format!("{}/{id}", bed.source()?.url);
    let mut request = model.request(id, &base, node, &[node])?;
    request["policy"] = json!({"max_attempts": attempts});
    Ok((request, model))
}

async fn ends(bed: &mut Testbed, id: &str, status: &str, model: &Model) -> Result<Value> {
    let ended = bed.cluster.wait_ended(id, LONG).await?;
    assert_eq!(ended["status"], status, "{ended:#}");
    let placement = bed.cluster.placement(&ended, 0);
    if status == "completed" {
        model.assert_equal(placement["local_path"].as_str().context("local_path")?)?;
    } else {
        let folders = mooncake_chaos::model::final_folders(&bed.cluster.roots[0]);
        assert!(
            folders.iter().all(|f| !f.to_string_lossy().contains(id)),
            "{folders:?}"
        );
    }
    Ok(ended)
}

/// A job of a new model from its first byte to its end under one behaviour of the source; its last snapshot.
async fn throughout(
    bed: &mut Testbed,
    folder: &tempfile::TempDir,
    behaviour: Behaviour,
    id: &str,
    attempts: u64,
    status: &str,
) -> Result<Value> {
    let (request, model) = job(bed, folder, id, attempts)?;
    let fault = Nemesis::Source(behaviour).inject(bed).await?;
    assert_eq!(bed.cluster.post_job(&request).await?.0, 201);
    let ended = ends(bed, id, status, &model).await?;
    fault.heal(bed).await?;
    Ok(ended)
}

#[tokio::test]
async fn a_source_that_is_out_of_order_or_stalls_is_waited_for() -> Result<()> {
    let (mut bed, folder) = bed().await?;
    let (request, model) = job(&bed, &folder, "out-of-order", 5)?;
    let fault = Nemesis::Source(Behaviour::ServerError).inject(&mut bed).await?;
    assert_eq!(bed.cluster.post_job(&request).await?.0, 201);
    until("it was asked", async || Ok(bed.source()?.requests() > 1)).await?;
    assert_eq!(bed.source()?.bytes_served(), 0);
    fault.heal(&mut bed).await?;
    ends(&mut bed, "out-of-order", "completed", &model).await?;

    bed.source()?.reset_counts();
    let (request, model) = job(&bed, &folder, "stalls", 5)?;
    let stall = Behaviour::Stall {
        after_bytes: 256 << 10,
    };
    let fault = Nemesis::Source(stall).inject(&mut bed).await?;
    assert_eq!(bed.cluster.post_job(&request).await?.0, 201);
    until("something came", async || Ok(bed.source()?.bytes_served() > 0)).await?;
    let (mut served, mut since) = (0, Instant::now());
    until("nothing comes any more", async || {
        let now = bed.source()?.bytes_served();
        if now != served {
            (served, since) = (now, Instant::now());
        }
        Ok(since.elapsed() >= STANDS_STILL)
    })
    .await?;
    assert!(served < BYTES, "{served} bytes of {BYTES}: it did not stall");
    fault.heal(&mut bed).await?;
    ends(&mut bed, "stalls", "completed", &model).await?;
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn a_source_that_has_nothing_fails_the_job_at_once() -> Result<()> {
    let (mut bed, folder) = bed().await?;
    let nothing = Behaviour::NotFound;
    let ended = throughout(&mut bed, &folder, nothing, "not-there", 5, "failed").await?;
    let error = bed.cluster.placement(&ended, 0)["last_error"].to_string();
    assert!(error.contains("404"), "{ended:#}");
    assert_eq!(bed.source()?.bytes_served(), 0);
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn without_ranges_a_cut_body_begins_again() -> Result<()> {
    let (mut bed, folder) = bed().await?;
    let whole = Behaviour::NoRanges;
    throughout(&mut bed, &folder, whole, "whole", 5, "completed").await?;
    assert_eq!(bed.source()?.bytes_served(), BYTES, "one body");

    bed.source()?.reset_counts();
    let (request, model) = job(&bed, &folder, "cut", 5)?;
    let after_bytes = BYTES / 4;
    let cut = Nemesis::Source(Behaviour::CutWithoutRanges { after_bytes });
    let fault = cut.inject(&mut bed).await?;
    assert_eq!(bed.cluster.post_job(&request).await?.0, 201);
    until("a cut body was asked for again", async || {
        Ok(bed.source()?.bytes_served_again() > 0)
    })
    .await?;
    fault.heal(&mut bed).await?;
    ends(&mut bed, "cut", "completed", &model).await?;
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn short_bodies_are_asked_for_again_from_where_they_ended() -> Result<()> {
    let (mut bed, folder) = bed().await?;
    const BODY: u64 = 3 << 19;
    let short = Behaviour::Short { bytes: BODY };
    // The source never gives more than one short body at a time, and the job ends nevertheless.
    throughout(&mut bed, &folder, short, "short", 5, "completed").await?;
    let (requests, again) = (bed.source()?.requests(), bed.source()?.bytes_served_again());
    assert!(requests >= BYTES.div_ceil(BODY), "{requests} requests");
    // Each break costs the client at most the block that it was in the middle of.
    let refetched = "mooncake_client_refetched_bytes_total";
    let refetched = bed.cluster.client_metric(0, refetched).await?;
    assert!(
        refetched <= requests * BLOCK_BYTES,
        "{refetched} bytes came again to the client in {requests} requests"
    );
    // The source counts what it handed to its kernel, of which a connection that breaks loses what nobody had read yet.
    assert!(
        again < BYTES,
        "{again} bytes were sent again in {requests} requests"
    );
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn an_endless_body_is_cut_off() -> Result<()> {
    let (mut bed, folder) = bed().await?;
    let endless = Behaviour::Endless;
    throughout(&mut bed, &folder, endless, "endless", 1, "failed").await?;
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn an_object_that_changes_half_way_is_never_published() -> Result<()> {
    let (mut bed, folder) = bed().await?;
    let (request, model) = job(&bed, &folder, "changes", 1)?;
    bed.source()?.hold_at(BYTES / 2);
    assert_eq!(bed.cluster.post_job(&request).await?.0, 201);
    until("some of it came", async || {
        Ok(bed.source()?.bytes_served() > BYTES / 8)
    })
    .await?;
    let fault = Nemesis::Source(Behaviour::Changed).inject(&mut bed).await?;
    // The rest of the open bodies is still the old object; a break makes the client ask again.
    Nemesis::KillClient(0)
        .inject(&mut bed)
        .await?
        .heal(&mut bed)
        .await?;
    bed.source()?.release();
    let ended = ends(&mut bed, "changes", "failed", &model).await?;
    let error = bed.cluster.placement(&ended, 0)["last_error"].to_string();
    assert!(error.contains("chang") || error.contains("checksum"), "{ended:#}");
    fault.heal(&mut bed).await?;
    bed.finish();
    Ok(())
}
