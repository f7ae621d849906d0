//! Commands that work on a data folder while no master runs on it: `recover`, `restore`, `snapshot verify`.
//!
//! Guaranteed: a folder that is in use is refused; nothing is changed before everything was checked; a run that was cut
//! off leaves a folder that no master starts on until the command has run to its end; both new lives have a recovery
//! epoch above every older one (by default the time in seconds), so that nodes obey them and refuse the old one.
//!
//! Not guaranteed: that masters of the old life are gone: `recover` cannot see them. Nodes and this master refuse them,
//! a caller that talks to them directly may not notice.

mod cli;
mod recover;
mod restore;

use std::ffi::OsString;
use std::process::ExitCode;

use mooncake_state::{Command, Reply, State};

use cli::{EpochFlags, Offline};

/// Whether the arguments are one of these commands, and not the flags of a master.
pub fn is_command(arguments: &[OsString]) -> bool {
    let first = arguments.get(1).and_then(|first| first.to_str());
    first.is_some_and(|first| cli::NAMES.contains(&first))
}

/// Runs the command: its report goes to standard output.
pub fn run(arguments: Vec<OsString>) -> ExitCode {
    let done = match cli::parse(arguments) {
        Offline::Recover(flags) => recover::run(&flags),
        Offline::Restore(flags) => restore::run(&flags),
        Offline::Snapshot(cli::SnapshotCommand::Verify { file }) => restore::verify(&file),
    };
    match done {
        Ok(report) => {
            println!("{report}");
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::FAILURE
        }
    }
}

/// How far from now a recovery epoch that is given may be: long enough for one command on each of a few machines.
const EPOCH_WINDOW_S: u64 = 3600;

/// The next recovery epoch, if none is given: the time in seconds, which is above that of every earlier recovery,
/// also of one that the state at hand knows nothing of.
fn next_epoch(flags: &EpochFlags, current: u64, now_s: u64) -> Result<u64, String> {
    let least = current.checked_add(1).ok_or_else(|| {
        format!("the state has the recovery epoch {current}, above which there is none: nodes can be told of no new life")
    })?;
    let Some(epoch) = flags.recovery_epoch else {
        return Ok(now_s.max(least));
    };
    if epoch < least {
        return Err(format!(
            "--recovery-epoch {epoch} is not above {current}, the epoch of the state: nodes would not obey it. Leave the \
             flag out, or give the time in seconds (date +%s)"
        ));
    }
    if epoch.abs_diff(now_s) > EPOCH_WINDOW_S && !flags.force_epoch {
        return Err(format!(
            "--recovery-epoch {epoch} is more than an hour from now ({now_s}): a line from an earlier restore? Nodes tell \
             one life of a cluster from another by this number alone, so no two may have the same. Take the time in seconds \
             now (date +%s), the same for all masters of this restore; if it has to be this one, add --force-epoch"
        ));
    }
    Ok(epoch)
}

fn now_s() -> u64 {
    now_ms() / 1000
}

fn now_ms() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64)
}

fn raise_epoch(state: &mut State, index: u64, epoch: u64, now_ms: u64) -> Result<(), String> {
    let applied = state.apply(index, &Command::RaiseRecoveryEpoch { epoch, now_ms });
    match applied.reply {
        Reply::Done => Ok(()),
        other => Err(format!("the state refuses the recovery epoch {epoch}: {other:?}")),
    }
}

/// One line about what a state holds.
fn contents(state: &State) -> String {
    format!(
        "{} jobs ({} not ended), {} models, {} nodes",
        state.jobs().count(),
        state.live_job_count(),
        state.artifacts().count(),
        state.nodes().count()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_only_rise() {
        let next = |recovery_epoch, current, now_s| {
            let flags = EpochFlags {
                recovery_epoch,
                force_epoch: false,
            };
            next_epoch(&flags, current, now_s)
        };
        assert_eq!(next(None, 0, 5_000), Ok(5_000));
        assert_eq!(next(None, 6_000, 5_000), Ok(6_001), "the clock went back");
        assert_eq!(next(None, u64::MAX - 1, 5_000), Ok(u64::MAX));
        assert!(next(None, u64::MAX, 5_000).unwrap_err().contains("no new life"));
        assert_eq!(next(Some(5_008), 7, 5_000), Ok(5_008));
        assert!(next(Some(7), 7, 7).unwrap_err().contains("date +%s"));
    }

    #[test]
    fn an_epoch_of_an_earlier_restore_is_noticed() {
        let now = 1_800_000_000;
        let next = |epoch, force_epoch| {
            let flags = EpochFlags {
                recovery_epoch: Some(epoch),
                force_epoch,
            };
            next_epoch(&flags, 0, now)
        };
        for near in [now - EPOCH_WINDOW_S, now, now + EPOCH_WINDOW_S] {
            assert_eq!(next(near, false), Ok(near));
        }
        for far in [now - EPOCH_WINDOW_S - 1, now + EPOCH_WINDOW_S + 1, 1] {
            assert!(next(far, false).unwrap_err().contains("--force-epoch"), "{far}");
            assert_eq!(next(far, true), Ok(far));
        }
    }

    #[test]
    fn commands_are_told_from_flags() {
        let is = |arguments: &[&str]| {
            let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
            is_command(&arguments)
        };
        assert!(is(&["mooncake_master", "recover", "--data-dir", "d"]));
        assert!(!is(&["mooncake_master"]));
        assert!(!is(&["mooncake_master", "--data-dir", "restore"]));
    }
}
