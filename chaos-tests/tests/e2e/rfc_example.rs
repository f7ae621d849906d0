//! The RFC's example request, verbatim.

use crate::JOB;
use anyhow::{Context, Result};
use mooncake_chaos::{Cluster, ClusterOptions, model::sha256_file};
use serde_json::Value;
use std::path::Path;

const FOLDER: &str = "/tmp/mooncake-dist-test";

#[tokio::test]
async fn the_rfc_example_completes() -> Result<()> {
    std::fs::create_dir_all(FOLDER)?;
    let source = Path::new(FOLDER).join("model.bin");
    let content: Vec<u8> = (0..1u32 << 18)
        .flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes())
        .collect();
    std::fs::write(&source, &content)?;
    let mut cluster = Cluster::start(ClusterOptions {
        clients: 2,
        allow_sources: vec![FOLDER.into()],
        node_ids: vec!["127.0.0.1:25001".into(), "127.0.0.1:25002".into()],
        ..ClusterOptions::calm()
    })
    .await?;
    let body: Value = serde_json::from_str(include_str!("../../../proto/tests/data/rfc_example.json"))?;
    let done = cluster.complete(&body, JOB).await?;

    for node in 0..2 {
        let p = cluster.placement(&done, node);
        assert_eq!(p["state"], "staged", "{done:#}");
        assert_eq!(p["staged_bytes"], 1_048_576, "{done:#}");
        assert_eq!(p["checksum_verified"], true, "{done:#}");
        assert_eq!(p["last_error"], Value::Null, "{done:#}");
        // The seed read it from outside, the other one from the seed.
        let by = [Value::Null, serde_json::json!(["tcp"])];
        assert_eq!(p["transports"], by[node], "{done:#}");
        let path = Path::new(p["local_path"].as_str().context("local_path")?);
        assert!(path.starts_with(&cluster.roots[node]), "{done:#}");
        assert_eq!(sha256_file(&path.join("model.bin"))?, sha256_file(&source)?);
        assert_eq!(
            std::fs::read_dir(path)?.count(),
            1,
            "nothing but the model is in the folder"
        );
    }
    assert!(
        done["warnings"]
            .as_array()
            .context("warnings")?
            .iter()
            .any(|w| w["pointer"] == "/manifest/files/0/checksum"),
        "{done:#}"
    );
    let order = ["planned", "seeding", "replicating", "completed"];
    let at: Vec<&str> = order
        .iter()
        .map(|s| done["transitions"][*s].as_str().unwrap_or_default())
        .collect();
    assert!(at.iter().all(|t| !t.is_empty()) && at.is_sorted(), "{done:#}");

    for n in 0..4 {
        let id = format!("demo-model/r1/chunk-00{n}");
        let found = cluster.get(&format!("/api/v1/objects?key={id}")).await?;
        let object = &found["objects"][0];
        assert_eq!(object["size_bytes"], 262_144, "{found:#}");
        assert_eq!(object["nodes"].as_array().map(Vec::len), Some(2), "{found:#}");
        // And each node gives exactly these bytes for the id.
        for node in 0..2 {
            let url = format!(
                "{}/api/v1/object?model_id=demo-model&revision=r1&format=bin&provider=local&key={id}",
                cluster.client_endpoints[node]
            );
            let answer = cluster.http.get(url).send().await?;
            assert_eq!(answer.status(), 200);
            assert_eq!(answer.bytes().await?, content[n << 18..(n + 1) << 18]);
        }
    }
    Ok(())
}
