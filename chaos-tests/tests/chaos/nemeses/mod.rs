//! Each nemesis bites: its effect is seen, and after healing the cluster is whole.

mod clients;
mod disks;
mod masters;
mod network;
mod sources;
mod stalls;

use crate::LONG;
use anyhow::{Context, Result, ensure};
use mooncake_chaos::{ClusterOptions, Testbed, TestbedOptions};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

pub(crate) const POLL: Duration = Duration::from_millis(20);

/// Three masters, a client for jobs to name, no balancer: requests go to each master by name.
pub(crate) async fn masters_only(change: impl FnOnce(&mut TestbedOptions)) -> Result<Testbed> {
    let mut options = TestbedOptions {
        clients: 1,
        balancer: None,
        ..Default::default()
    };
    change(&mut options);
    Testbed::start(options).await
}

/// Blocks of models as small as these.
pub(crate) const BLOCK_BYTES: u64 = 256 << 10;

/// For tests that count elections and are about anything but time-outs: a machine that stands still starts none.
pub(crate) fn calm(options: &mut TestbedOptions) {
    options.master_args = ClusterOptions::calm().timer_args();
}

/// Longer than a few lost packets take on a link that is full.
const VIEW: Duration = Duration::from_secs(10);

/// What master `i` says of itself and the cluster; an error if it does not answer within [`VIEW`].
pub(crate) async fn view(bed: &Testbed, i: usize) -> Result<Value> {
    let url = format!("{}/api/v1/cluster?digest=true", bed.cluster.endpoints[i]);
    let request = bed.cluster.http.get(url).timeout(VIEW);
    Ok(request.send().await?.error_for_status()?.json().await?)
}

pub(crate) async fn term(bed: &Testbed, i: usize) -> Result<u64> {
    view(bed, i).await?["term"].as_u64().context("term")
}

/// Longer than a cut-off leader waits for the quorum (1 s) before it says 503.
const PROBE: Duration = Duration::from_secs(3);

/// Status of `/readyz` or `/leaderz` of master `i`; 0: it does not answer within [`PROBE`].
pub(crate) async fn probe(bed: &Testbed, i: usize, path: &str) -> u16 {
    let url = format!("{}{path}", bed.cluster.endpoints[i]);
    let request = bed.cluster.http.get(url).timeout(PROBE);
    request.send().await.map_or(0, |a| a.status().as_u16())
}

/// Waits until `done` says so.
pub(crate) async fn until(what: &str, mut done: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + LONG;
    while !done().await? {
        ensure!(Instant::now() < deadline, "not within {LONG:?}: {what}");
        tokio::time::sleep(POLL).await;
    }
    Ok(())
}

/// Waits until one of `masters` leads, confirmed by a quorum; its index.
pub(crate) async fn leader_among(bed: &Testbed, masters: &[usize]) -> Result<usize> {
    let mut leader = None;
    until("a leader among the masters that see each other", async || {
        for &i in masters {
            if probe(bed, i, "/leaderz").await == 200 {
                leader = Some(i);
            }
        }
        Ok(leader.is_some())
    })
    .await?;
    leader.context("just found")
}

/// A write through the log, to master `i`: a job of a new model that its node may not read. 201, or why not.
pub(crate) async fn write(bed: &Testbed, i: usize, id: &str) -> Result<u16> {
    write_sized(bed, i, id, 1).await
}

/// The same with so many chunks of names that follow no pattern, 64 bytes each, so that all are in the log.
pub(crate) async fn write_sized(bed: &Testbed, i: usize, id: &str, chunks: usize) -> Result<u16> {
    let (url, node) = (&bed.cluster.endpoints[i], &bed.cluster.nodes[0]);
    post_job(&bed.cluster.http, url, node, id, chunks).await
}

/// The same, to whatever is at `url`, for whatever node.
pub(crate) async fn post_job(
    http: &reqwest::Client,
    url: &str,
    node: &str,
    id: &str,
    chunks: usize,
) -> Result<u16> {
    let url = format!("{url}/api/v1/model-distribution/jobs");
    let names = json!({"model_id": id, "revision": "r1", "format": "bin", "provider": "test"});
    let mut manifest = names.clone();
    manifest["total_size_bytes"] = chunks.into();
    manifest["file_manifest_version"] = "v1".into();
    let prefix = format!("{id}/r1/0");
    let mut file = json!({"path": "a", "size_bytes": chunks, "checksum": "dummy",
        "download_url": "http://192.0.2.1/not-allowed",
        "chunk_layout": {"chunk_size_bytes": 1, "chunk_count": chunks, "object_prefix": prefix}});
    if chunks > 1 {
        // An odd factor: all are different, and no two neighbours look alike.
        let name = |n: usize| (n as u128 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835);
        let ids: Vec<_> = (0..chunks)
            .map(|n| format!("{prefix}/{:064x}", name(n)))
            .collect();
        file["artifact"] = json!({"object_ids": ids});
    }
    manifest["files"] = json!([file]);
    let body = json!({"job_id": id, "model": names, "manifest": manifest, "seed_node_id": node,
        "target_nodes": [node], "policy": {"max_attempts": 1}});
    let answer = http.post(url).json(&body).send().await?;
    let status = answer.status().as_u16();
    let text = answer.text().await?;
    ensure!(!matches!(status, 400..429), "{status}: {text}");
    Ok(status)
}

/// Waits until all masters are ready and have equal states at equal indices; their common term.
pub(crate) async fn whole(bed: &mut Testbed) -> Result<u64> {
    bed.cluster.wait_ready().await?;
    let mut agreed = None;
    until("equal digests at equal indices", async || {
        let mut views = Vec::new();
        for i in 0..bed.cluster.masters.len() {
            let Ok(v) = view(bed, i).await else {
                return Ok(false);
            };
            views.push((
                v["term"].clone(),
                v["applied_index"].clone(),
                v["state_digest"].clone(),
            ));
        }
        agreed = views[0].0.as_u64();
        Ok(views.iter().all(|v| v == &views[0]))
    })
    .await?;
    agreed.context("term")
}
