//! A client killed in the middle resumes from what its journal proves.

use crate::bed::{Bed, staged_bytes};
use anyhow::{Context, Result};
use mooncake_chaos::nemesis::flip_bit_in_staging;

const SIZE: u64 = 32 << 20;
const RATE: u64 = 6 << 20;
/// How far the transfer is when something happens to it.
const EARLY: u64 = 12 << 20;
/// DESIGN §9: re-fetches ≤ 2 × (outstanding requests × block) + unjournaled bytes (≤ 64 MiB). These models are
/// smaller than 64 MiB, so the tests hold the clients to the tighter part: what may be outstanding or
/// younger than one journal flush, at the rates the tests set.
const REFETCH_BOUND: u64 = 8 << 20;

async fn start(id: &str) -> Result<Bed> {
    let mut bed = Bed::start(id, &[("a.bin", SIZE / 2), ("b/c.bin", SIZE / 2)], Some(RATE)).await?;
    bed.post_to_all(id).await?;
    Ok(bed)
}

/// Client 2 fetched no more since its start than it lacked, and what the bound allows.
async fn assert_resumed(bed: &Bed, had: u64) -> Result<()> {
    let fetched = bed.metric(2, "mooncake_client_fetched_bytes_total").await?;
    let bound = SIZE - had + REFETCH_BOUND;
    assert!(
        fetched <= bound,
        "had {had} of {SIZE} before the kill, fetched {fetched} after it, bound {bound}"
    );
    Ok(())
}

#[tokio::test]
async fn a_killed_follower_resumes() -> Result<()> {
    let mut bed = start("follower-kill").await?;
    let at = bed.wait_bytes("follower-kill", 2, EARLY).await?;
    bed.cluster.clients[2].kill();
    bed.cluster.clients[2].start()?;
    bed.finish("follower-kill").await?;
    assert_resumed(&bed, staged_bytes(&at, &bed.cluster.nodes[2])).await?;
    bed.assert_served_once()
}

#[tokio::test]
async fn a_killed_seed_resumes_from_a_source_with_ranges() -> Result<()> {
    let mut bed = start("seed-kill").await?;
    bed.wait_bytes("seed-kill", 0, EARLY).await?;
    bed.cluster.clients[0].kill();
    bed.cluster.clients[0].start()?;
    bed.finish("seed-kill").await?;
    let again = bed.source.bytes_served() - SIZE;
    assert!(
        again <= REFETCH_BOUND,
        "{again} bytes of {SIZE} were served again"
    );
    Ok(())
}

#[tokio::test]
async fn a_bit_flipped_while_down_is_found_and_only_that_block_fetched_again() -> Result<()> {
    let mut bed = start("bitflip").await?;
    let at = bed.wait_bytes("bitflip", 2, EARLY).await?;
    bed.cluster.clients[2].kill();
    // The first block arrives early and is journaled.
    flip_bit_in_staging(&bed.cluster.roots[2])?;
    bed.cluster.clients[2].start()?;
    bed.finish("bitflip").await?;
    let log = bed.cluster.clients[2].log();
    let rescan = log
        .lines()
        .find(|l| l.contains("staging re-hashed"))
        .context("no rescan in the log")?;
    assert!(
        rescan.contains("damaged=1"),
        "exactly one block is found damaged: {rescan}"
    );
    assert_resumed(&bed, staged_bytes(&at, &bed.cluster.nodes[2])).await
}

/// A node frozen for less than the grace keeps its work.
#[tokio::test]
async fn a_frozen_follower_goes_on() -> Result<()> {
    let mut bed = start("freeze").await?;
    bed.wait_bytes("freeze", 1, EARLY / 3).await?;
    bed.cluster.clients[1].signal(rustix::process::Signal::STOP)?;
    // Longer than any heartbeat time-out, shorter than the grace: the node is suspected, then back.
    bed.cluster.wait_node_status(1, "suspected").await?;
    bed.cluster.clients[1].signal(rustix::process::Signal::CONT)?;
    bed.finish("freeze").await?;
    assert_eq!(bed.source.bytes_served_again(), 0);
    Ok(())
}
