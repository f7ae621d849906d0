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

use cli::Offline;

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

/// The next recovery epoch, if none is given: the time in seconds, which is above that of every earlier recovery,
/// also of one that the state at hand knows nothing of.
fn next_epoch(given: Option<u64>, current: u64) -> Result<u64, String> {
    let epoch = given.unwrap_or_else(|| (now_ms() / 1000).max(current + 1));
    match epoch > current {
        true => Ok(epoch),
        false => Err(format!(
            "--recovery-epoch {epoch} is not above {current}, the epoch of the state: nodes would not obey it. Leave the \
             flag out, or give the time in seconds (date +%s)"
        )),
    }
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
        assert!(next_epoch(None, 0).unwrap() > 1_700_000_000);
        assert_eq!(next_epoch(None, u64::MAX - 1), Ok(u64::MAX));
        assert_eq!(next_epoch(Some(8), 7), Ok(8));
        assert!(next_epoch(Some(7), 7).unwrap_err().contains("date +%s"));
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
