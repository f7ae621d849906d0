//! The program `mooncake_master`: reads its configuration and runs; or works on a data folder, if the first argument says
//! so.

use std::process::ExitCode;

use crate::config::{Config, ConfigError, LogFormat};
use crate::{consensus, offline, server};
use tracing_subscriber::EnvFilter;

/// openraft tells of every failed heartbeat, twenty a second, and calls requests that meet a stop errors; what matters
/// of it is logged by the consensus module, when it changes, and storage failures by the store.
const DEFAULT_FILTER: &str = "info,openraft=error,openraft::raft::raft_inner=off";

/// Runs the program with this process's arguments. `supported_cluster_version`: the newest cluster version that this build
/// can run under.
pub fn main(supported_cluster_version: u32) -> ExitCode {
    consensus::set_supported_version(supported_cluster_version);
    let arguments: Vec<_> = std::env::args_os().collect();
    if offline::is_command(&arguments) {
        return offline::run(arguments);
    }
    let config = match Config::load(arguments) {
        Ok(config) => config,
        // Help and version go to stdout and are no failure; clap knows which is which.
        Err(ConfigError::Usage(error)) => error.exit(),
        Err(ConfigError::Invalid(reason)) => {
            eprintln!("error: {reason}");
            return ExitCode::from(2);
        }
    };
    if let Err(reason) = log_to_stderr(&config) {
        eprintln!("error: {reason}");
        return ExitCode::from(2);
    }
    raise_open_files();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "cannot start the runtime");
            return ExitCode::FAILURE;
        }
    };
    let code = match runtime.block_on(server::run(config)) {
        Ok(()) => 0,
        Err(error) => {
            tracing::error!("{error}");
            error.exit_code()
        }
    };
    // Everything durable was waited for. Threads of the store may still be at work, after a failure or when it was
    // stopped while it opened: `exit` would run RocksDB's destructors under them, and now and then die of a signal.
    // SAFETY: `_exit` only ends the process; standard error, where the log goes, is not buffered.
    unsafe { libc::_exit(code.into()) }
}

/// Every long poll keeps a socket open, and one more where it is passed on: take as many files as the system allows.
fn raise_open_files() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "cannot raise the number of open files; many long polls may exceed it");
    }
}

fn log_to_stderr(config: &Config) -> Result<(), String> {
    let filter = match (&config.log_filter, std::env::var("RUST_LOG")) {
        (Some(filter), _) => EnvFilter::try_new(filter).map_err(|error| format!("--log-filter: {error}"))?,
        (None, Ok(filter)) => EnvFilter::try_new(filter).map_err(|error| format!("RUST_LOG: {error}"))?,
        (None, Err(_)) => EnvFilter::new(DEFAULT_FILTER),
    };
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    match config.log_format {
        LogFormat::Text => subscriber
            .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
            .init(),
        LogFormat::Json => subscriber.json().flatten_event(true).init(),
    }
    Ok(())
}
