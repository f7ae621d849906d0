//! `mooncake_master` as its next release may be: the same, but for a newer cluster version that it supports. Tests run it
//! beside the real one, as in a rolling upgrade.

fn main() -> std::process::ExitCode {
    mooncake_master::program::main(mooncake_state::SUPPORTED_CLUSTER_VERSION + 1)
}
