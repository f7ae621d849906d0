//! Compiles the `.proto` files with protox, a pure-Rust protobuf compiler, so that no `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = [
        "proto/hello.proto",
        "proto/raft.proto",
        "proto/session.proto",
        "proto/peer.proto",
    ];
    let descriptors = protox::compile(files, ["proto"])?;
    let with_services = std::env::var_os("CARGO_FEATURE_NET").is_some();
    tonic_prost_build::configure()
        .build_client(with_services)
        .build_server(with_services)
        .bytes(".")
        .compile_fds(descriptors)?;
    Ok(())
}
