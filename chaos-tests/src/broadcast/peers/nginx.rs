//! A star: one nginx on the seed (sendfile), every follower fetches the whole file with curl.

use super::{Delivered, Delivery, Tool, address, all, on_client, strings, target};
use crate::testbed::Testbed;
use anyhow::{Context, Result};
use std::{path::Path, time::Instant};
use tokio::task::JoinSet;

const PORT: u16 = 8080;

pub(super) async fn deliver(bed: &mut Testbed, delivery: &Delivery<'_>) -> Result<Delivered> {
    let configuration = bed.dir().join("star.conf");
    std::fs::write(&configuration, render(bed.dir(), delivery.file)?)?;
    let args = vec!["-c".into(), configuration.display().to_string()];
    let mut server = Tool::start(on_client(bed, 0, "nginx", "nginx", args)?)?;
    server.listens(PORT).await?;

    let name = delivery.file.file_name().and_then(|name| name.to_str());
    let name = name.context("the file has a name")?;
    let url = format!("http://{}:{PORT}/{name}", address(bed, 0)?);
    let targets: Vec<_> = (1..=delivery.followers)
        .map(|client| target(bed, client, "curl"))
        .collect::<Result<_>>()?;
    let began = Instant::now();
    let mut waits = JoinSet::new();
    for (i, target) in targets.iter().enumerate() {
        let mut args = strings(&["--disable", "--silent", "--show-error", "--fail", "--output"]);
        args.extend([target.display().to_string(), url.clone()]);
        let mut tool = Tool::start(on_client(bed, i + 1, "curl", "curl", args)?)?;
        waits.spawn(async move {
            tool.finished().await?;
            Ok((i, Instant::now()))
        });
    }
    let received = all(waits, began, targets).await?;
    server.stop().await?;
    Ok(received)
}

fn render(dir: &Path, file: &Path) -> Result<String> {
    let (dir, root) = (dir.display(), file.parent().context("a file has a folder")?);
    // One process: with a master process, killing that one would leave the worker.
    Ok(format!(
        "daemon off;\nmaster_process off;\npid {dir}/star.pid;\nerror_log stderr;\nevents {{ }}\nhttp {{\n\
         access_log off;\nsendfile on;\nclient_body_temp_path {dir}/star-body;\nproxy_temp_path {dir}/star-proxy;\n\
         fastcgi_temp_path {dir}/star-fastcgi;\nuwsgi_temp_path {dir}/star-uwsgi;\nscgi_temp_path {dir}/star-scgi;\n\
         server {{ listen {PORT}; root {}; }}\n}}\n",
        root.display()
    ))
}
