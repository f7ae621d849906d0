//! BitTorrent by aria2: a seed that offers at once, followers that go on to upload when they have all of it.
//!
//! Its defaults, but for: no local discovery and no DHT (the tracker knows everybody), no limit of peers, disk space
//! reserved without writing it. The seed does not hash its file first.

use super::{
    Delivered, Delivery, FILE, Tool, address, all, on_client, strings, target,
    torrent::{Swarm, track},
};
use crate::testbed::Testbed;
use anyhow::{Context, Result, bail};
use std::{os::unix::fs::PermissionsExt, path::Path, time::Instant};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpListener,
    task::JoinSet,
};

const PORT: u16 = 6881;
const TRACKER_PORT: u16 = 6969;
const COMPLETE: &str = "complete";

pub(super) async fn deliver(bed: &mut Testbed, delivery: &Delivery<'_>) -> Result<Delivered> {
    let torrent = delivery.torrent.context("no torrent was made")?;
    let tracker = bed.network.host("src")?.address;
    let metainfo = bed.dir().join("file.torrent");
    let announce = format!("http://{tracker}:{TRACKER_PORT}/announce");
    std::fs::write(&metainfo, torrent.metainfo(&announce))?;
    let hook = bed.dir().join("on-complete.sh");
    std::fs::write(&hook, format!("#!/bin/sh\necho {COMPLETE}\n"))?;
    std::fs::set_permissions(&hook, std::fs::Permissions::from_mode(0o755))?;

    let hosts = (0..=delivery.followers).map(|client| address(bed, client));
    let swarm = Swarm {
        hosts: hosts.collect::<Result<_>>()?,
        port: PORT,
    };
    let runtime = bed.network.host_mut("src")?.runtime()?.clone();
    let listener = runtime
        .spawn(TcpListener::bind((tracker, TRACKER_PORT)))
        .await?
        .context("the tracker cannot listen")?;
    // Ends with this function, however it ends.
    let mut tracking = JoinSet::new();
    tracking.spawn_on(track(listener, swarm), &runtime);

    let offered = target(bed, 0, "aria2")?;
    std::os::unix::fs::symlink(delivery.file, &offered)?;
    let mut args = arguments(&offered, &metainfo)?;
    args.extend(strings(&["--bt-seed-unverified=true"]));
    let mut seed = Tool::start(on_client(bed, 0, "aria2", "aria2c", args)?)?;
    seed.listens(PORT).await?;

    let targets: Vec<_> = (1..=delivery.followers)
        .map(|client| target(bed, client, "aria2"))
        .collect::<Result<_>>()?;
    let began = Instant::now();
    let (mut tools, mut waits) = (vec![seed], JoinSet::new());
    for (i, target) in targets.iter().enumerate() {
        let mut args = arguments(target, &metainfo)?;
        args.push(format!("--on-bt-download-complete={}", hook.display()));
        let mut start = on_client(bed, i + 1, "aria2", "aria2c", args)?;
        start.piped = true;
        let mut tool = Tool::start(start)?;
        let mut lines = BufReader::new(tool.stdout()?).lines();
        let name = tool.name().to_owned();
        waits.spawn(async move {
            while let Some(line) = lines.next_line().await? {
                if line == COMPLETE {
                    return Ok((i, Instant::now()));
                }
            }
            bail!("{name} ended before it had all of the file; its log is beside the others")
        });
        tools.push(tool);
    }
    let received = all(waits, began, targets).await;
    let said: Vec<_> = tools.iter().map(Tool::said).collect();
    for tool in tools {
        tool.stop().await?;
    }
    received.with_context(|| said.concat())
}

fn arguments(target: &Path, metainfo: &Path) -> Result<Vec<String>> {
    let folder = target.parent().context("a file has a folder")?;
    let mut args = strings(&[
        "--no-conf=true",
        "--quiet=true",
        "--log-level=warn",
        "--enable-dht=false",
        "--enable-dht6=false",
        "--bt-enable-lpd=false",
        "--bt-max-peers=0",
        "--disable-ipv6=true",
        "--file-allocation=falloc",
        "--allow-overwrite=true",
        // For ever.
        "--seed-ratio=0.0",
    ]);
    args.extend([
        format!("--listen-port={PORT}"),
        format!("--dir={}", folder.display()),
        format!("--index-out=1={FILE}"),
        metainfo.display().to_string(),
    ]);
    Ok(args)
}
