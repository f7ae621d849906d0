//! Masters die in the middle of a transfer; the transfer does not notice.

use crate::bed::{Bed, eventually};
use anyhow::Result;
use mooncake_chaos::{ClusterOptions, model::final_folders};
use serde_json::Value;

#[tokio::test]
async fn killing_the_leader_costs_no_byte() -> Result<()> {
    let files = [("a.bin", 20 << 20), ("b/c.bin", 12 << 20)];
    // With the product's own timers.
    let options = ClusterOptions::default();
    let mut bed = Bed::start_with("leaderkill", &files, Some(8 << 20), options).await?;
    bed.source.hold_at(16 << 20);
    bed.post_to_all("leaderkill").await?;
    bed.wait_bytes("leaderkill", 1, 4 << 20).await?;
    let leader = bed.cluster.leader().await?;
    bed.cluster.masters[leader].kill();
    bed.source.release();
    bed.finish("leaderkill").await?;
    bed.assert_served_once()?;
    assert_eq!(bed.refetched_bytes().await?, 0);
    Ok(())
}

#[tokio::test]
async fn with_all_masters_dead_the_transfer_goes_on_to_its_end() -> Result<()> {
    let mut bed = Bed::start("alldead", &[("a.bin", 24 << 20)], Some(6 << 20)).await?;
    let total = bed.model.total_bytes()?;
    bed.source.hold_at(total / 2);
    bed.post_to_all("alldead").await?;
    let at = bed.wait_bytes("alldead", 1, 3 << 20).await?;
    assert_eq!(at["status"], "seeding", "the seed is still acquiring: {at:#}");
    bed.cluster.masters.iter_mut().for_each(|m| m.kill());
    bed.source.release();

    // While they are dead every node comes to hold every verified byte, on its disk.
    eventually("the transfer goes on to its end", async || {
        let mut held = Vec::new();
        for endpoint in &bed.cluster.client_endpoints {
            let url = format!("{endpoint}/api/v1/holdings");
            let v: Value = bed.cluster.http.get(url).send().await?.json().await?;
            held.push(v["holdings"][0]["verified_bytes"].as_u64().unwrap_or(0));
        }
        Ok(held.iter().all(|&h| h == total).then_some(()))
    })
    .await?;
    for (node, root) in bed.cluster.roots.iter().enumerate() {
        bed.assert_in_staging(node)?;
        assert!(
            final_folders(root).is_empty(),
            "nothing is published without a committed seal"
        );
    }

    for master in &mut bed.cluster.masters {
        master.start()?;
    }
    bed.finish("alldead").await?;
    bed.assert_served_once()?;
    assert_eq!(bed.refetched_bytes().await?, 0);
    Ok(())
}
