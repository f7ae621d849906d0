//! What a create request costs follows its size, not what it asks for. Alone in its program, since it looks at the
//! peak memory of the whole process.

use mooncake_proto::{
    api::CreateJobRequest,
    manifest::{MAX_BODY_BYTES, MAX_FILES, MAX_OBJECT_ID_BYTES, ValidateOptions, validate},
};
use serde_json::json;

/// Peak resident memory of this process so far.
fn peak_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status
        .lines()
        .find(|l| l.starts_with("VmHWM:"))
        .expect("it is told");
    let kib: usize = line
        .split_whitespace()
        .nth(1)
        .expect("a number")
        .parse()
        .expect("a number");
    kib << 10
}

/// Reads and validates a body; gives the faults' codes.
fn faults(body: &[u8]) -> Vec<String> {
    let request: CreateJobRequest = serde_json::from_slice(body).expect("JSON of the request's shape");
    match validate(request, ValidateOptions::default()) {
        Ok(_) => Vec::new(),
        Err(faults) => faults.into_iter().map(|f| f.code).collect(),
    }
}

#[test]
fn memory_follows_the_size_of_the_request() {
    // Three KiB that ask for a million ids of the greatest length, of two files.
    let mut body: serde_json::Value =
        serde_json::from_str(include_str!("data/rfc_example.json")).expect("the RFC's example is JSON");
    let half = 1u64 << 19;
    let file = |path: &str, prefix: &str| {
        json!({
            "path": path, "size_bytes": half, "download_url": "/source",
            "chunk_layout": {"chunk_size_bytes": 1, "chunk_count": half, "object_prefix": prefix},
        })
    };
    let prefix = "p".repeat(MAX_OBJECT_ID_BYTES / 4 * 3);
    let other = format!("q{}", &prefix[1..]);
    body["manifest"]["files"] = json!([file("a", &prefix), file("b", &other)]);
    body["manifest"]["total_size_bytes"] = json!(half * 2);
    let small = body.to_string();
    assert!(small.len() < 4 << 10, "{}", small.len());
    let before = peak_bytes();
    assert_eq!(faults(small.as_bytes()), [""; 0]);
    let grown = peak_bytes() - before;
    assert!(
        grown < 8 << 20,
        "{grown} bytes for {} of the request",
        small.len()
    );

    // Millions of entries of three bytes: those over the limit are not kept.
    let entries = (MAX_BODY_BYTES - (1 << 10)) / 3;
    assert!(entries > 50 * MAX_FILES);
    let many = format!(
        r#"{{"manifest": {{"files": [{}{{}}]}}, "target_nodes": [""]}}"#,
        "{},".repeat(entries)
    );
    let before = peak_bytes();
    let codes = faults(many.as_bytes());
    assert!(codes.contains(&"limit_exceeded".to_owned()), "{codes:?}");
    let grown = peak_bytes() - before;
    // Twice while the list grows.
    assert!(grown < MAX_FILES * 256 * 4, "{grown} bytes");
}
