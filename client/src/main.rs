//! `mooncake_client`: see [`mooncake_client::config`] for its settings.

use anyhow::Context;
use mooncake_client::{
    config::{Args, LogFormat},
    node::{Node, blocking_calls},
};
use std::{convert::Infallible, io::IsTerminal, process::ExitCode};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::{EnvFilter, fmt, prelude::*};

/// Exit code for faults of the command line or the configuration, as `clap` has it.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    // FAILPOINTS in the environment, for tests of whole processes.
    #[cfg(feature = "failpoints")]
    let _failpoints = fail::FailScenario::setup();
    let args = Args::read(std::env::args_os()).unwrap_or_else(|e| e.exit());
    let filter = match EnvFilter::try_new(&args.log_level) {
        Ok(filter) => filter,
        Err(e) => return usage(&format!("--log-level (or RUST_LOG) '{}': {e}", args.log_level)),
    };
    let (text, json) = match args.log_format {
        // Colours are for terminals, not for files and journals.
        LogFormat::Text => {
            let is_terminal = std::io::stderr().is_terminal();
            (
                Some(fmt::layer().with_ansi(is_terminal).with_writer(std::io::stderr)),
                None,
            )
        }
        LogFormat::Json => (
            None,
            Some(
                fmt::layer()
                    .json()
                    .flatten_event(true)
                    .with_writer(std::io::stderr),
            ),
        ),
    };
    tracing_subscriber::registry()
        .with(filter)
        .with(text)
        .with(json)
        .init();

    let settings = match args.check() {
        Ok(settings) => settings,
        Err(why) => return usage(&why),
    };
    tune_malloc();
    raise_open_files();
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .max_blocking_threads(blocking_calls(settings.max_uploads))
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(e) => return failed(&anyhow::anyhow!("cannot start the runtime: {e}")),
    };
    let ended: anyhow::Result<Infallible> = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
        let mut node = Node::start(settings).await?;
        let fault = tokio::select! {
            _ = terminate.recv() => None,
            _ = interrupt.recv() => None,
            fault = node.failed() => Some(fault),
        };
        // A second signal while it stops: the default would be lost to the handlers above.
        let stopped = tokio::select! {
            () = node.stop() => true,
            _ = terminate.recv() => false,
            _ = interrupt.recv() => false,
        };
        if !stopped {
            tracing::warn!("a second signal: stopping at once; what was journaled is kept");
        }
        // With everything in place: who lets go of the store waits for its threads, and a disk that hangs keeps them.
        end(fault)
    });
    match ended {
        Ok(never) => match never {},
        Err(e) => end(Some(e)),
    }
}

/// The end of the process, whatever still waits for a disk.
fn end(fault: Option<anyhow::Error>) -> ! {
    let code = match &fault {
        None => 0,
        Some(error) => {
            tell(error);
            1
        }
    };
    // SAFETY: `_exit` only ends the process; standard error, where the log goes, is not buffered.
    unsafe { libc::_exit(code) }
}

fn usage(why: &str) -> ExitCode {
    eprintln!("error: {why}\n\nFor more information, try 'mooncake_client --help'.");
    ExitCode::from(EXIT_USAGE)
}

fn failed(error: &anyhow::Error) -> ExitCode {
    tell(error);
    ExitCode::FAILURE
}

fn tell(error: &anyhow::Error) {
    tracing::error!("{error:#}");
    eprintln!("error: {error:#}");
}

/// Every staged model keeps a folder open and every peer a socket: take as many files as the system allows.
fn raise_open_files() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "cannot raise the number of open files; many models or peers may exceed it");
    }
}

/// glibc keeps an arena per thread and, once it has freed a large buffer, takes further ones from them too: what
/// few long-lived records lie between then keeps many megabytes. One arena, so that whoever needs memory finds the
/// holes that others left (each thread's own cache serves most calls, and blocks are not allocated at all: see
/// `mooncake_client::memory`), and large buffers always on their own.
fn tune_malloc() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt only sets parameters of the allocator; it is called before any other thread exists.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 10);
    }
}
