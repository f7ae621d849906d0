//! How each fault is injected.

use super::{Filter, Injected, Nemesis, Undo, Who, operate};
use crate::{
    cluster::READY_DEADLINE,
    disk::Disk,
    testbed::{Rule, Testbed, WireFault, client_host, master_host},
};
use anyhow::{Context, Result, ensure};
use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Bytes of a connection that are spared before the first flipped bit and between two: more than the hello, less
/// than a small block.
const FLIP_EVERY_BYTES: u64 = 100_003;
/// Between two looks for a file that is being received: a small one is there for some milliseconds.
const STAGING_POLL: Duration = Duration::from_millis(2);
/// What a master has applied.
const APPLIED: &str = "master_raft_applied_index";

impl Nemesis {
    /// Does it. A fault that could not be injected as a whole is an error; nothing is healed then.
    pub async fn inject(&self, bed: &mut Testbed) -> Result<Injected> {
        self.try_inject(bed)
            .await
            .with_context(|| format!("cannot inject {}", self.name()))
    }

    async fn try_inject(&self, bed: &mut Testbed) -> Result<Injected> {
        let victims = self.victims(bed).await?;
        let (mut undo, mut met_nothing) = (Vec::new(), false);
        match *self {
            Self::Kill(_) => {
                for &i in &victims {
                    bed.cluster.masters[i].kill();
                    undo.push(Undo::StartMaster(i));
                }
            }
            Self::Freeze(_) => {
                for &i in &victims {
                    bed.cluster.masters[i].freeze()?;
                    undo.push(Undo::ThawMaster(i));
                }
            }
            Self::Isolate(_) => {
                let inside: Vec<_> = victims.iter().map(|&i| master_host(i)).collect();
                let outside: Vec<_> = bed
                    .network
                    .hosts()
                    .map(|h| h.name.clone())
                    .filter(|n| !inside.contains(n))
                    .collect();
                let tokens = bed.network.partition(&[&strs(&inside), &strs(&outside)])?;
                undo.push(Undo::Rules(tokens));
            }
            Self::DeafLeader | Self::MuteLeader => {
                let leader = master_host(victims[0]);
                let others: Vec<_> = bed
                    .network
                    .hosts()
                    .map(|h| h.name.clone())
                    .filter(|n| *n != leader)
                    .collect();
                let mut tokens = Vec::new();
                for other in others {
                    tokens.push(match self {
                        Self::DeafLeader => bed.network.cut(&other, &leader)?,
                        _ => bed.network.cut(&leader, &other)?,
                    });
                }
                undo.push(Undo::Rules(tokens));
            }
            Self::Bridge => {
                let [a, b] = [victims[0], victims[1]].map(master_host);
                undo.push(Undo::Rules(bed.network.cut_both(&a, &b)?));
            }
            Self::Loss { percent } => {
                let hosts: Vec<_> = bed.network.hosts().map(|h| h.name.clone()).collect();
                let mut tokens = Vec::new();
                for host in hosts {
                    tokens.push(bed.network.add_rule(&host, Rule::Lose { percent })?);
                }
                undo.push(Undo::Rules(tokens));
            }
            Self::SlowLink(_, rate) => {
                for host in victims.iter().map(|&i| master_host(i)) {
                    bed.network.shape(&host, Some(rate))?;
                    undo.push(Undo::Link(host));
                }
            }
            Self::SlowSnapshot { bits_per_second } => {
                let i = victims[0];
                let lacks_from = bed.cluster.master_metric(i, APPLIED).await?;
                bed.cluster.masters[i].kill();
                operate::wait_purged(bed, lacks_from).await?;
                let host = master_host(i);
                bed.network.shape(&host, Some(bits_per_second))?;
                bed.cluster.masters[i].start()?;
                undo.push(Undo::Link(host));
            }
            Self::Delay(_, ms) => {
                let masters = 0..bed.cluster.masters.len();
                let ways = masters
                    .clone()
                    .flat_map(|from| masters.clone().map(move |to| (from, to)));
                let far = |(from, to): &(usize, usize)| {
                    from != to && (victims.contains(from) || victims.contains(to))
                };
                for (from, to) in ways.filter(far) {
                    let to = bed.rpc_address(to)?;
                    let (wire, token) = bed.add_wire(&master_host(from), to).await?;
                    wire.set(WireFault::Delay { ms });
                    undo.push(Undo::Wire(wire, token));
                }
            }
            Self::PowerLoss(_) => {
                for &i in &victims {
                    disk(&bed.master_disks, i)?.lose_power()?;
                    bed.cluster.masters[i].kill();
                    undo.extend([Undo::PowerCycleMaster(i), Undo::StartMaster(i)]);
                }
            }
            Self::DiskFull(_) => {
                for &i in &victims {
                    let file = disk(&bed.master_disks, i)?.fill(0)?;
                    undo.extend([Undo::RemoveFile(file), Undo::RestartMasterIfDead(i)]);
                }
            }
            Self::Wipe(_) => {
                for &i in &victims {
                    bed.cluster.masters[i].kill();
                    fs::remove_dir_all(&bed.cluster.data_dirs[i])?;
                    undo.push(Undo::ReplaceWiped(i));
                }
            }
            Self::RefuseLeader(filter) => {
                let [leader, follower] = [victims[0], victims[1]].map(master_host);
                let tokens = match filter {
                    Filter::AtFollower => {
                        let to = bed.network.host(&leader)?.address;
                        vec![bed.network.add_rule(&follower, Rule::RefuseTo { to })?]
                    }
                    Filter::AtLeader => {
                        let port = bed.rpc_address(victims[0])?.port();
                        let mut tokens = Vec::new();
                        for other in (0..bed.cluster.masters.len()).filter(|&i| i != victims[0]) {
                            let from = bed.network.host(&master_host(other))?.address;
                            let rule = Rule::RefusePort { from, port };
                            tokens.push(bed.network.add_rule(&leader, rule)?);
                        }
                        tokens
                    }
                };
                undo.push(Undo::Rules(tokens));
            }
            Self::TransferStorm { times } => operate::transfer_storm(bed, times).await?,
            Self::MembershipChurn => {
                operate::churn(bed, victims[0]).await?;
                undo.push(Undo::EndChurn(victims[0]));
            }
            Self::ClockJump(_, seconds) => {
                for host in victims.iter().map(|&i| master_host(i)) {
                    bed.set_clock(&host, seconds)?;
                    undo.push(Undo::Clock(host));
                }
            }
            Self::RollingRestart => {
                for i in 0..bed.cluster.masters.len() {
                    let status = bed.cluster.masters[i].terminate(READY_DEADLINE).await?;
                    ensure!(status.success(), "master {} ended with {status}", i + 1);
                    bed.cluster.masters[i].start()?;
                    // A client may have a fault of its own meanwhile.
                    bed.cluster.wait_masters_ready().await?;
                }
            }
            Self::KillClient(i) => {
                bed.cluster.clients[i].kill();
                undo.push(Undo::StartClient(i));
            }
            Self::FreezeClient(i) => {
                bed.cluster.clients[i].freeze()?;
                undo.push(Undo::ThawClient(i));
            }
            Self::ClientPowerLoss(i) => {
                disk(&bed.client_disks, i)?.lose_power()?;
                bed.cluster.clients[i].kill();
                undo.extend([Undo::PowerCycleClient(i), Undo::StartClient(i)]);
            }
            Self::ClientDiskFull(i) => {
                let file = disk(&bed.client_disks, i)?.fill(0)?;
                undo.push(Undo::RemoveFile(file));
            }
            Self::CorruptStaging(i) => {
                met_nothing = !corrupt_staging(bed, i).await?;
                undo.push(Undo::StartClient(i));
            }
            Self::CorruptWire { to, from, times } => {
                let sender = bed.data_address(from)?;
                let (wire, token) = bed.add_wire(&client_host(to), sender).await?;
                wire.set(WireFault::FlipBits {
                    every_bytes: FLIP_EVERY_BYTES,
                    times,
                });
                undo.push(Undo::Wire(wire, token));
            }
            Self::Source(behaviour) => {
                bed.source()?.behave(behaviour);
                undo.push(Undo::Source);
            }
        }
        Ok(Injected {
            nemesis: self.clone(),
            victims,
            met_nothing,
            undo,
        })
    }

    async fn victims(&self, bed: &mut Testbed) -> Result<Vec<usize>> {
        match *self {
            Self::Kill(who)
            | Self::Freeze(who)
            | Self::Isolate(who)
            | Self::SlowLink(who, _)
            | Self::Delay(who, _)
            | Self::PowerLoss(who)
            | Self::DiskFull(who)
            | Self::Wipe(who)
            | Self::ClockJump(who, _) => who.find(bed).await,
            Self::DeafLeader | Self::MuteLeader => Who::Leader.find(bed).await,
            Self::SlowSnapshot { .. } | Self::MembershipChurn => Who::Follower.find(bed).await,
            Self::Bridge | Self::RefuseLeader(_) => {
                let mut ends = Who::Leader.find(bed).await?;
                ends.extend(Who::Follower.find(bed).await?);
                Ok(ends)
            }
            Self::RollingRestart | Self::TransferStorm { .. } => Who::All.find(bed).await,
            Self::Loss { .. } | Self::Source(_) => Ok(Vec::new()),
            Self::KillClient(i)
            | Self::FreezeClient(i)
            | Self::ClientPowerLoss(i)
            | Self::ClientDiskFull(i)
            | Self::CorruptStaging(i)
            | Self::CorruptWire { to: i, .. } => Ok(vec![i]),
        }
    }
}

fn strs(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}

fn disk(disks: &[Disk], i: usize) -> Result<&Disk> {
    disks
        .get(i)
        .context("it has no disk of its own: set master_disk_bytes or client_disk_bytes")
}

/// Where a client keeps the files of a copy that is not published yet: `<root>/.mooncake/staging/<key>/data`.
const DATA: &str = "data";

/// How long a download is waited for that can be damaged: in a workload the next one is a second away, unless everything
/// is there.
const STAGING_PATIENCE: Duration = Duration::from_secs(20);

/// Kills a client in the middle of a download and damages what it has. One that has published in the last moment runs
/// again, until its next download; one that downloads nothing any more is only killed, and the answer is no.
async fn corrupt_staging(bed: &mut Testbed, client: usize) -> Result<bool> {
    let root = bed.cluster.roots[client].clone();
    let until = Instant::now() + STAGING_PATIENCE;
    loop {
        while staged_data(&root).is_err() && Instant::now() < until {
            tokio::time::sleep(STAGING_POLL).await;
        }
        bed.cluster.clients[client].kill();
        match staged_data(&root) {
            Ok((path, at)) => return flip_bit(&path, at).map(|()| true),
            Err(_) if Instant::now() >= until => return Ok(false),
            Err(_) => {}
        }
        bed.cluster.clients[client].start()?;
    }
}

/// The largest file that a client has in staging, and where its data begins.
fn staged_data(root: &Path) -> Result<(PathBuf, u64)> {
    let staging = root.join(".mooncake");
    // Below it only: the root itself may be called so.
    let is_data = |path: &Path| {
        path.strip_prefix(&staging)
            .is_ok_and(|below| below.components().any(|c| c.as_os_str() == DATA))
    };
    let largest = walkdir::WalkDir::new(&staging)
        .into_iter()
        .filter_map(Result::ok)
        .filter(|e| e.file_type().is_file() && is_data(e.path()))
        .max_by_key(|e| e.metadata().map_or(0, |m| m.len()))
        .with_context(|| format!("nothing is staged below {}", staging.display()))?;
    let file = File::open(largest.path())?;
    // Written from the front: the first byte that is not zero is data.
    let mut byte = [0];
    let len = file.metadata()?.len();
    let at = (0..len)
        .step_by(4096)
        .find(|&at| file.read_exact_at(&mut byte, at).is_ok() && byte[0] != 0)
        .with_context(|| format!("{} has no data yet", largest.path().display()))?;
    Ok((largest.into_path(), at))
}

/// Of a file that nobody uses meanwhile.
fn flip_bit(path: &Path, at: u64) -> Result<()> {
    let file = File::options().read(true).write(true).open(path)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    byte[0] ^= 1;
    file.write_all_at(&byte, at)?;
    file.sync_all()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_in_staging_is_damaged_whatever_the_root_is_called() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join(DATA);
        let staging = root.join(".mooncake/staging/key");
        fs::create_dir_all(staging.join(DATA)).unwrap();
        fs::write(root.join(".mooncake/fences"), [1; 9000]).unwrap();
        fs::write(staging.join("journal"), [1; 9000]).unwrap();
        assert!(staged_data(&root).is_err(), "nothing is being received");
        let file = staging.join(DATA).join("a.bin");
        fs::write(&file, [0; 8192]).unwrap();
        assert!(staged_data(&root).is_err(), "nothing of it has come yet");
        let mut bytes = vec![0; 8192];
        bytes[4096] = 7;
        fs::write(&file, bytes).unwrap();
        assert_eq!(staged_data(&root).unwrap(), (file, 4096));
    }
}
