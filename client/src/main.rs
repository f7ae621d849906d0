//! `mooncake_client`: see [`mooncake_client::config`] for its settings.

use anyhow::Context;
use mooncake_client::{
    config::{Args, LogFormat},
    node::Node,
};
use std::{io::IsTerminal, process::ExitCode};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::{EnvFilter, fmt, prelude::*};

/// Exit code for faults of the command line or the configuration, as `clap` has it.
const EXIT_USAGE: u8 = 2;
/// Threads for blocking work beside one for each upload: more than may be under way together (of the swarm 32
/// writers, 4 proofs and 2 seals; 8 reads of sources, 8 writes of them and 12 of their names' look-ups; 4 begins,
/// 4 publishes, 4 fences and 2 removals; 16 objects and 4 looks over HTTP; 8 look-ups of peers; 4 of the node's
/// own), so that none of them starves another. Each of these numbers is a bound where the work is begun; threads
/// are made as they are needed, and idle ones end.
const BLOCKING_THREADS: usize = 120;

fn main() -> ExitCode {
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
        .max_blocking_threads(BLOCKING_THREADS + settings.max_uploads)
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(e) => return failed(&anyhow::anyhow!("cannot start the runtime: {e}")),
    };
    let result = runtime.block_on(async {
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
            () = node.shutdown() => true,
            _ = terminate.recv() => false,
            _ = interrupt.recv() => false,
        };
        if !stopped {
            tracing::warn!("a second signal: stopping at once; what was journaled is kept");
        }
        fault.map_or(Ok(()), Err)
    });
    // Blocking work that hangs on a disk must not keep the process.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => failed(&e),
    }
}

fn usage(why: &str) -> ExitCode {
    eprintln!("error: {why}\n\nFor more information, try 'mooncake_client --help'.");
    ExitCode::from(EXIT_USAGE)
}

fn failed(error: &anyhow::Error) -> ExitCode {
    tracing::error!("{error:#}");
    eprintln!("error: {error:#}");
    ExitCode::FAILURE
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
/// few long-lived records lie between then keeps many megabytes. Two arenas, and large buffers always on their own.
fn tune_malloc() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt only sets parameters of the allocator; it is called before any other thread exists.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 10);
    }
}
