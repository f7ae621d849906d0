//! `mooncake_master`.

fn main() -> std::process::ExitCode {
    mooncake_master::program::main(mooncake_state::SUPPORTED_CLUSTER_VERSION)
}
