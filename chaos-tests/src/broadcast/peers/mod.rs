//! What else could carry a file to many hosts, on the same hosts and links: when each follower has it.
//!
//! All start with the file on the seed. What must be there before (a server that listens, a chain that is connected) is
//! there before the clock starts; what a follower starts itself counts. None of them syncs what it wrote.

mod aria2;
mod nginx;
mod socat;
mod torrent;

pub use torrent::Torrent;

use super::Peer;
use crate::testbed::{
    Testbed, client_host,
    tool::{Start, Tool},
};
use anyhow::{Context, Result};
use std::{
    net::Ipv4Addr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tokio::task::JoinSet;

/// What is to be carried, and where it goes.
pub struct Delivery<'a> {
    /// On the seed.
    pub file: &'a Path,
    /// The same, for BitTorrent.
    pub torrent: Option<&'a Torrent>,
    /// How many followers: clients 1 and up.
    pub followers: usize,
}

/// For each follower, in their order: how long until it had the file, and where that is.
pub type Delivered = Vec<(Duration, PathBuf)>;

/// Carries the file to all followers.
pub async fn deliver(peer: Peer, bed: &mut Testbed, delivery: &Delivery<'_>) -> Result<Delivered> {
    match peer {
        Peer::Aria2 => aria2::deliver(bed, delivery).await,
        Peer::Nginx => nginx::deliver(bed, delivery).await,
        Peer::Socat => socat::deliver(bed, delivery).await,
    }
    .with_context(|| format!("the peer {}", peer.name()))
}

/// A tool on the host of a client, without input.
fn on_client<'a>(
    bed: &'a Testbed,
    client: usize,
    what: &str,
    program: &'a str,
    args: Vec<String>,
) -> Result<Start<'a>> {
    let host = client_host(client);
    Ok(Start {
        namespace: &bed.network.host(&host)?.namespace,
        dir: bed.dir(),
        name: format!("{what}-{host}"),
        program,
        args,
        stdin: std::process::Stdio::null(),
        piped: false,
    })
}

fn address(bed: &Testbed, client: usize) -> Result<Ipv4Addr> {
    Ok(bed.network.host(&client_host(client))?.address)
}

/// Where a follower puts the file: its client's root, which is on the medium that is measured.
fn target(bed: &Testbed, client: usize, what: &str) -> Result<PathBuf> {
    let folder = bed.cluster.roots[client].join(what);
    std::fs::create_dir_all(&folder)?;
    Ok(folder.join(FILE))
}

const FILE: &str = "file.bin";

/// Waits for all of them, each of which says when its follower had the file.
async fn all(
    mut waits: JoinSet<Result<(usize, Instant)>>,
    began: Instant,
    targets: Vec<PathBuf>,
) -> Result<Delivered> {
    let mut at = Vec::new();
    while let Some(done) = waits.join_next().await {
        at.push(done??);
    }
    at.sort_by_key(|(follower, _)| *follower);
    let took = at.into_iter().map(|(_, at)| at - began);
    Ok(took.zip(targets).collect())
}

fn strings(args: &[&str]) -> Vec<String> {
    args.iter().map(|s| (*s).to_owned()).collect()
}
