//! Faults, by name: injected into a [`Testbed`], and healed.
//!
//! A [`Nemesis`] says what happens to whom; [`Nemesis::inject`] does it and gives an [`Injected`], which remembers how
//! to undo it. Whom `Leader` or `Follower` means is decided at the moment of the injection. Several may be active at
//! once as long as no two have the same victim. `tests/chaos/nemeses` shows of each one that it bites.
//!
//! Not guaranteed: that the cluster is well right after [`Injected::heal`]; wait for what you need.

mod inject;
mod operate;

pub use operate::wait_purged;

use crate::{
    history::Concern,
    process::Process,
    source::Behaviour,
    testbed::{Testbed, Wire},
};
use anyhow::{Context, Result};
use std::path::PathBuf;

/// Which masters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// The leader of the moment.
    Leader,
    /// One that does not lead.
    Follower,
    /// The smallest majority, the leader in it.
    Majority,
    /// All.
    All,
}

impl Who {
    fn name(self) -> &'static str {
        match self {
            Self::Leader => "leader",
            Self::Follower => "follower",
            Self::Majority => "majority",
            Self::All => "all",
        }
    }

    /// Their indices, the leader first if it is among them.
    pub async fn find(self, bed: &mut Testbed) -> Result<Vec<usize>> {
        let count = bed.cluster.masters.len();
        if self == Self::All {
            return Ok((0..count).collect());
        }
        let leader = bed.cluster.leader().await?;
        let followers = (0..count).filter(|&i| i != leader);
        Ok(match self {
            Self::Leader => vec![leader],
            Self::Follower => followers.take(1).collect(),
            Self::Majority => [leader].into_iter().chain(followers.take(count / 2)).collect(),
            Self::All => (0..count).collect(),
        })
    }
}

/// Where a packet filter is, and what it refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// At one follower: all connections between it and the leader, whoever opens them.
    AtFollower,
    /// At the leader: what the other masters dial there. The leader's own connections to them go on.
    AtLeader,
}

/// A fault. Clients are named by index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Nemesis {
    /// SIGKILL; healed by a start on the same disk.
    Kill(Who),
    /// SIGSTOP: silent, but its kernel goes on to accept connections. Healed by SIGCONT.
    Freeze(Who),
    /// No packet between these masters and any other host; the door still reaches them, so that a test can look.
    Isolate(Who),
    /// The leader hears nobody; what it sends arrives.
    DeafLeader,
    /// Nobody hears the leader; what is sent to it arrives.
    MuteLeader,
    /// The leader and one follower do not see each other, all other masters see both.
    Bridge,
    /// Every host loses this share of what it receives.
    Loss {
        /// 0 to 100.
        percent: u8,
    },
    /// These masters' links get this slow, both ways.
    SlowLink(Who, u64),
    /// A follower is killed, and comes back on a link of so many bits per second once the others no longer have the log
    /// that it lacks: it is sent a snapshot. Healed by the link's own rate. Needs writes, a small `--snapshot-every` and
    /// `--snapshot-keep`.
    SlowSnapshot {
        /// Of the follower's link, both ways.
        bits_per_second: u64,
    },
    /// Everything between these masters and their peers' RPC ports takes so much longer, each way.
    Delay(Who, u64),
    /// The disks lose what was not synced, the processes end; healed by mount and start. Needs disks.
    PowerLoss(Who),
    /// The disks are full to the last block; healed by space and, if it ended, a start. Needs disks.
    DiskFull(Who),
    /// Killed, and the data folder is gone. Healing starts it on the empty folder under its old id, which must be
    /// refused: it ends by itself. Then a new one in its place, under a new id, replaces it, by an operator's command.
    Wipe(Who),
    /// A packet filter refuses, with resets, on the leader's behalf. The leader is well.
    RefuseLeader(Filter),
    /// Leadership is handed over so many times, as fast as it goes. Heals itself.
    TransferStorm {
        /// Hand-overs.
        times: u32,
    },
    /// A fourth master is added and promoted, then a follower is removed, whose process ends. Healing puts a new one
    /// in its place, under a new id, and removes the fourth one. By an operator's commands.
    MembershipChurn,
    /// The wall clock is so many seconds off; healed by the right time. Needs `clocks`.
    ClockJump(Who, i64),
    /// SIGTERM and a new start, one master after the other, each ready again before the next. Heals itself.
    RollingRestart,
    /// SIGKILL to a client; healed by a start on the same disk.
    KillClient(usize),
    /// SIGSTOP to a client.
    FreezeClient(usize),
    /// As [`Nemesis::PowerLoss`].
    ClientPowerLoss(usize),
    /// As [`Nemesis::DiskFull`], while the client runs.
    ClientDiskFull(usize),
    /// A client is killed and a bit of the largest file that it has not published yet is flipped; healed by a start.
    /// Waits until there is such a file.
    CorruptStaging(usize),
    /// Flips bits in what the first of two clients receives from the other one's data port.
    CorruptWire {
        /// Receives.
        to: usize,
        /// Sends.
        from: usize,
        /// Bits in all.
        times: u64,
    },
    /// The source misbehaves.
    Source(Behaviour),
}

impl Nemesis {
    /// A name for reports, which says the kind and not the numbers.
    pub fn name(&self) -> String {
        match self {
            Self::Kill(who) => format!("kill-{}", who.name()),
            Self::Freeze(who) => format!("freeze-{}", who.name()),
            Self::Isolate(who) => format!("isolate-{}", who.name()),
            Self::DeafLeader => "deaf-leader".into(),
            Self::MuteLeader => "mute-leader".into(),
            Self::Bridge => "bridge".into(),
            Self::Loss { .. } => "loss".into(),
            Self::SlowLink(who, _) => format!("slow-link-{}", who.name()),
            Self::SlowSnapshot { .. } => "slow-snapshot".into(),
            Self::Delay(who, _) => format!("delay-{}", who.name()),
            Self::PowerLoss(who) => format!("power-loss-{}", who.name()),
            Self::DiskFull(who) => format!("disk-full-{}", who.name()),
            Self::Wipe(who) => format!("wipe-{}", who.name()),
            Self::ClockJump(who, s) => {
                let way = if *s < 0 { "back" } else { "ahead" };
                format!("clock-{way}-{}", who.name())
            }
            Self::RefuseLeader(Filter::AtFollower) => "refuse-at-follower".into(),
            Self::RefuseLeader(Filter::AtLeader) => "refuse-at-leader".into(),
            Self::TransferStorm { .. } => "transfer-storm".into(),
            Self::MembershipChurn => "membership-churn".into(),
            Self::RollingRestart => "rolling-restart".into(),
            Self::KillClient(_) => "kill-client".into(),
            Self::FreezeClient(_) => "freeze-client".into(),
            Self::ClientPowerLoss(_) => "power-loss-client".into(),
            Self::ClientDiskFull(_) => "disk-full-client".into(),
            Self::CorruptStaging(_) => "corrupt-staging".into(),
            Self::CorruptWire { .. } => "corrupt-wire".into(),
            Self::Source(behaviour) => format!("source-{}", behaviour.name()),
        }
    }

    /// What it befalls, `nodes` being the clients by index: what checkers may excuse, and no more.
    pub fn concerns(&self, nodes: &[String]) -> Vec<Concern> {
        let node = |i: &usize| nodes.get(*i).cloned().unwrap_or_default();
        match self {
            Self::Kill(_)
            | Self::Freeze(_)
            | Self::Isolate(_)
            | Self::DeafLeader
            | Self::MuteLeader
            | Self::Bridge
            | Self::SlowLink(..)
            | Self::SlowSnapshot { .. }
            | Self::Delay(..)
            | Self::PowerLoss(_)
            | Self::DiskFull(_)
            | Self::Wipe(_)
            | Self::RefuseLeader(_)
            | Self::TransferStorm { .. }
            | Self::MembershipChurn
            | Self::ClockJump(..)
            | Self::RollingRestart => vec![Concern::Masters],
            // Every host of the testbed, and what comes from the source is lost on the way like anything else.
            Self::Loss { .. } => {
                let nodes = nodes.iter().cloned().map(Concern::Node);
                nodes.chain([Concern::Masters, Concern::Source]).collect()
            }
            Self::ClientPowerLoss(i) => vec![Concern::Node(node(i)), Concern::Disk(node(i))],
            Self::KillClient(i)
            | Self::FreezeClient(i)
            | Self::ClientDiskFull(i)
            | Self::CorruptStaging(i)
            | Self::CorruptWire { to: i, .. } => vec![Concern::Node(node(i))],
            Self::Source(_) => vec![Concern::Source],
        }
    }
}

/// A fault that is active.
#[derive(Debug)]
#[must_use = "dropping it does not heal it"]
pub struct Injected {
    /// Which one.
    pub nemesis: Nemesis,
    /// Indices of the masters or clients it befell.
    pub victims: Vec<usize>,
    /// It found nothing to befall: there was no download to damage.
    pub met_nothing: bool,
    undo: Vec<Undo>,
}

/// One step of healing.
#[derive(Debug)]
enum Undo {
    StartMaster(usize),
    StartClient(usize),
    ThawMaster(usize),
    ThawClient(usize),
    Rules(Vec<u64>),
    Link(String),
    PowerCycleMaster(usize),
    PowerCycleClient(usize),
    RemoveFile(PathBuf),
    RestartMasterIfDead(usize),
    ReplaceWiped(usize),
    /// A follower's place is empty; the fourth master is the last one.
    EndChurn(usize),
    Clock(String),
    Wire(Wire, u64),
    Source,
}

impl Injected {
    /// Bits that a corrupting wire has flipped so far.
    pub fn flips(&self) -> u64 {
        self.wires().map(Wire::flips).sum()
    }

    /// Connections that went over wires so far.
    pub fn wire_connections(&self) -> u64 {
        self.wires().map(Wire::connections).sum()
    }

    fn wires(&self) -> impl Iterator<Item = &Wire> {
        self.undo.iter().filter_map(|u| match u {
            Undo::Wire(wire, _) => Some(wire),
            _ => None,
        })
    }

    /// Undoes it, in order; see the variants of [`Nemesis`].
    pub async fn heal(self, bed: &mut Testbed) -> Result<()> {
        let name = self.nemesis.name();
        for step in self.undo {
            let what = format!("cannot heal {name}: {step:?}");
            step.apply(bed).await.context(what)?;
        }
        Ok(())
    }
}

impl Undo {
    async fn apply(self, bed: &mut Testbed) -> Result<()> {
        let cluster = &mut bed.cluster;
        match self {
            Self::StartMaster(i) => restart(&mut cluster.masters[i]),
            Self::StartClient(i) => restart(&mut cluster.clients[i]),
            Self::RestartMasterIfDead(i) if cluster.masters[i].is_running() => Ok(()),
            Self::RestartMasterIfDead(i) => restart(&mut cluster.masters[i]),
            Self::ReplaceWiped(i) => operate::replace_wiped(bed, i).await,
            Self::EndChurn(i) => operate::end_churn(bed, i).await,
            Self::ThawMaster(i) => cluster.masters[i].thaw(),
            Self::ThawClient(i) => cluster.clients[i].thaw(),
            Self::Rules(tokens) => bed.network.remove_rules(&tokens),
            Self::Link(host) => bed.network.shape(&host, bed.link()),
            Self::PowerCycleMaster(i) => bed.master_disks[i].power_cycle(),
            Self::PowerCycleClient(i) => bed.client_disks[i].power_cycle(),
            Self::RemoveFile(path) => Ok(std::fs::remove_file(path)?),
            Self::Clock(host) => bed.set_clock(&host, 0),
            Self::Wire(wire, token) => bed.remove_wire(wire, token),
            Self::Source => {
                bed.source()?.behave(Behaviour::Honest);
                Ok(())
            }
        }
    }
}

/// It was killed already, or ended by its own error, which this only collects.
fn restart(process: &mut Process) -> Result<()> {
    process.kill();
    process.start()
}
