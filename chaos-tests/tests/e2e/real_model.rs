//! A real model, from a folder and from an HTTP server, loaded from the staged path.

use crate::JOB;
use anyhow::{Context, Result, ensure};
use mooncake_chaos::{Cluster, ClusterOptions, HttpSource, Model};
use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// Sets up (once per machine) a Python environment with the model package; prints its interpreter and the
/// model's folder.
fn environment() -> Result<(PathBuf, PathBuf)> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/real-model.sh");
    let output = Command::new("bash").arg(script).output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout)?;
    let mut lines = text.lines();
    Ok((
        lines.next().context("python")?.into(),
        lines.next().context("model")?.into(),
    ))
}

#[tokio::test]
async fn a_real_model_is_staged_and_loads() -> Result<()> {
    let (python, folder) = tokio::task::spawn_blocking(environment).await??;
    let source = HttpSource::start(&folder).await?;
    let base = folder.display().to_string();
    let mut cluster = Cluster::start(ClusterOptions {
        allow_sources: vec![base.clone(), source.url.clone()],
        ..ClusterOptions::calm()
    })
    .await?;
    let nodes = cluster.nodes.clone();
    let targets: Vec<&str> = nodes.iter().map(String::as_str).collect();
    for (id, base) in [("minilm-folder", base), ("minilm-http", source.url.clone())] {
        let model = Model::existing(&folder, id);
        let files = model.files()?;
        ensure!(
            files.keys().any(|p| p.contains('/')),
            "the model has a sub-folder: {files:?}"
        );
        let done = cluster
            .complete(&model.request(id, &base, &nodes[0], &targets)?, JOB)
            .await?;
        for node in 0..3 {
            let path = cluster.placement(&done, node)["local_path"]
                .as_str()
                .context("path")?
                .to_owned();
            model.assert_equal(&path)?;
            let code = "import sys, pathlib\nfrom safetensors import safe_open\n\
                n = 0\n\
                for f in pathlib.Path(sys.argv[1]).rglob('*.safetensors'):\n    \
                    with safe_open(f, framework='numpy') as t:\n        \
                        n += sum(t.get_tensor(k).size for k in t.keys())\n\
                assert n > 20_000_000, n\nprint(n)";
            let output = Command::new(&python).args(["-c", code, &path]).output()?;
            ensure!(
                output.status.success(),
                "{}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }
    assert_eq!(
        (source.bytes_served(), source.bytes_served_again()),
        (Model::existing(&folder, "x").total_bytes()?, 0)
    );
    Ok(())
}
