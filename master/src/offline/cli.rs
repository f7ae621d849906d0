//! The command line of the offline commands.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::config::{InitialCluster, dialled, hyphens};

/// What the first argument is for one of these commands.
pub(super) const NAMES: [&str; 3] = ["recover", "restore", "snapshot"];

#[derive(Parser, Debug)]
#[command(
    name = "mooncake_master",
    version,
    about = "Works on a master's data folder while no master runs on it."
)]
struct Line {
    #[command(subcommand)]
    command: Offline,
}

#[derive(Subcommand, Debug)]
pub(super) enum Offline {
    /// After a majority of the masters is lost for good: make this master's data a cluster of this master alone
    #[command(after_long_help = "\
Use it only when a majority of the masters' disks is lost: whatever was acknowledged and is not on this disk is lost. \
Of several disks choose the one whose last log entry has the highest term, and of equal terms the highest index: a longer \
log of a lower term holds less. --dry-run shows both and changes nothing.

  systemctl stop mooncake-master
  sudo -u mooncake mooncake_master recover --dry-run --data-dir /var/lib/mooncake-master
  sudo -u mooncake mooncake_master recover --force-new-cluster --data-dir /var/lib/mooncake-master
  systemctl start mooncake-master

Afterwards delete the data folders of all other old masters, and add new ones (mooncakectl cluster add).")]
    Recover(RecoverFlags),
    /// Make a new data folder from a backup (mooncakectl cluster snapshot save)
    #[command(after_long_help = "\
A cluster of one, to which others are added afterwards (mooncakectl cluster add --promote):

  mooncake_master restore --snapshot backup.mcb --data-dir m1 --node-id 1 --initial-cluster 1=10.0.0.1:50051/10.0.0.1:9003

Three at once: the same command on each machine with its own --node-id, the same file and the same --recovery-epoch \
(date +%s, taken once, for this restore). Run it once per machine: a master that is lost later is replaced, never restored \
again.

Run it as the user that the master runs as; where that one may not make the folder:

  install -d -o mooncake -g mooncake -m 0700 /var/lib/mooncake-master

Then start the masters as usual; --bootstrap changes nothing any more.")]
    Restore(RestoreFlags),
    /// Look at a backup
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
}

#[derive(Args, Debug)]
pub(super) struct RecoverFlags {
    /// Says that you know: the other masters are gone for good
    #[arg(long, required_unless_present = "dry_run")]
    pub(super) force_new_cluster: bool,
    /// Show where the log on this disk ends and what it holds, and change nothing
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Folder of the Raft log and snapshots
    #[arg(long, value_name = "DIR", env = "MOONCAKE_MASTER_DATA_DIR")]
    pub(super) data_dir: PathBuf,
    /// Refuse the folder if it is not this master's
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) node_id: Option<u64>,
    /// What others dial for the RPC port from now on; left out: as before
    #[arg(long, value_name = "HOST:PORT", value_parser = dialled)]
    pub(super) advertise_rpc_address: Option<String>,
    /// What others dial for the HTTP port from now on; left out: as before
    #[arg(long, value_name = "HOST:PORT", value_parser = dialled)]
    pub(super) advertise_http_address: Option<String>,
    #[command(flatten)]
    pub(super) epoch: EpochFlags,
}

#[derive(Args, Clone, Copy, Debug)]
pub(super) struct EpochFlags {
    /// What tells the new life of the cluster from every older one; left out: the time in seconds. Needed, and the same on
    /// all of them, where several masters are restored side by side
    #[arg(long, value_name = "SECONDS")]
    pub(super) recovery_epoch: Option<u64>,
    /// Take a recovery epoch that is more than an hour from now
    #[arg(long, requires = "recovery_epoch")]
    pub(super) force_epoch: bool,
}

#[derive(Args, Debug)]
pub(super) struct RestoreFlags {
    /// The backup
    #[arg(long, value_name = "FILE")]
    pub(super) snapshot: PathBuf,
    /// The new folder; must not exist, or be empty (but for lost+found)
    #[arg(long, value_name = "DIR")]
    pub(super) data_dir: PathBuf,
    /// This master's id in the new cluster
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) node_id: u64,
    /// All masters of the new cluster as ID=RPC_HOST:PORT/HTTP_HOST:PORT,…
    #[arg(long, value_name = "MEMBERS")]
    pub(super) initial_cluster: InitialCluster,
    /// Name of the new cluster; left out: that of the backup
    #[arg(long)]
    pub(super) cluster_id: Option<String>,
    #[command(flatten)]
    pub(super) epoch: EpochFlags,
}

#[derive(Subcommand, Debug)]
pub(super) enum SnapshotCommand {
    /// Check a backup to its last byte, its state included, and show what is in it
    Verify {
        /// The backup
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

/// Ends the process where the arguments are no such command.
pub(super) fn parse(arguments: Vec<OsString>) -> Offline {
    Line::parse_from(arguments.into_iter().map(hyphens)).command
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn clap_agrees_with_itself_and_the_names() {
        Line::command().debug_assert();
        let mut names: Vec<_> = Line::command()
            .get_subcommands()
            .map(|command| command.get_name().to_owned())
            .collect();
        names.sort();
        assert_eq!(names, NAMES);
    }
}
