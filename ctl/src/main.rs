//! `mooncakectl`: the operator's command line. See the library.

use clap::Parser;
use mooncake_ctl::{cli::Cli, commands, output};
use std::process::ExitCode;

fn main() -> ExitCode {
    output::die_on_closed_pipe();
    // Wrong usage ends here with code 2.
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => {
            eprintln!("mooncakectl: cannot start: {e}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(commands::run(cli)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.print();
            ExitCode::from(failure.exit_code())
        }
    }
}
