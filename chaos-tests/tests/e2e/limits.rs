//! A node takes and gives no more bandwidth than a person allows it.

use crate::bed::Bed;
use anyhow::Result;
use mooncake_chaos::ClusterOptions;
use std::time::{Duration, Instant};

const SIZE: u64 = 24 << 20;
const RATE: u64 = 8 << 20;
/// What may pass at once after a pause: the largest block.
const BURST: u64 = 4 << 20;

/// How long a job takes, at least, of which every byte passes the limit once. Without the limit it takes a tenth of it;
/// slower than this is no fault.
fn least() -> Duration {
    Duration::from_secs_f64((SIZE - BURST) as f64 / RATE as f64)
}

/// From the request to the end of a job that brings the model to a seed and two more nodes.
async fn takes(flag: &str) -> Result<Duration> {
    let options = ClusterOptions {
        client_args: vec![format!("{flag}={RATE}")],
        ..ClusterOptions::calm()
    };
    let mut bed = Bed::start_with("limited", &[("a.bin", SIZE)], None, options).await?;
    let began = Instant::now();
    bed.post_to_all("limited").await?;
    bed.completed("limited").await?;
    let took = began.elapsed();
    bed.finish("limited").await?;
    Ok(took)
}

#[tokio::test]
async fn a_seed_sends_no_faster_than_its_upload_limit() -> Result<()> {
    let took = takes("--upload-limit").await?;
    assert!(took >= least(), "{took:?}");
    Ok(())
}

#[tokio::test]
async fn nobody_takes_faster_than_its_download_limit() -> Result<()> {
    let took = takes("--download-limit").await?;
    assert!(took >= least(), "{took:?}");
    Ok(())
}
