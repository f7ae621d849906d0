//! Validation through its front door: the RFC's example, one fault at a time, all at once; then the chunk
//! and block arithmetic against a naive model.

use super::*;
use serde_json::{Value, json};

/// The RFC's example request, verbatim.
fn rfc() -> Value {
    serde_json::from_str(include_str!("../../tests/data/rfc_example.json")).unwrap()
}

fn run(body: Value) -> Result<ValidJob, Vec<Fault>> {
    run_with(body, ValidateOptions::default())
}

fn run_with(body: Value, options: ValidateOptions) -> Result<ValidJob, Vec<Fault>> {
    validate(serde_json::from_value(body).unwrap(), options)
}

/// Changes the member at `pointer` (`None` removes it) and returns the faults as `pointer code`.
fn faults_of(changes: &[(&str, Option<Value>)]) -> Vec<String> {
    let mut body = rfc();
    for (pointer, value) in changes {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        let parent = body.pointer_mut(parent).unwrap();
        match (parent, value) {
            (Value::Object(o), Some(v)) => {
                o.insert(key.into(), v.clone());
            }
            (Value::Object(o), None) => {
                o.remove(key);
            }
            (Value::Array(a), Some(v)) => a[key.parse::<usize>().unwrap()] = v.clone(),
            other => panic!("{other:?}"),
        }
    }
    match run(body) {
        Ok(_) => vec![],
        Err(faults) => faults
            .into_iter()
            .map(|f| format!("{} {}", f.pointer, f.code))
            .collect(),
    }
}

const FILE: &str = "/manifest/files/0";

#[test]
fn the_rfc_example_is_valid_and_warned_about() {
    let job = run(rfc()).unwrap();
    assert_eq!(
        job.job_id.as_ref().unwrap().as_str(),
        "019d3ca8-c2e7-7d73-ab73-445f9143d1eb"
    );
    assert_eq!(job.manifest.total_size_bytes, 1 << 20);
    assert_eq!(job.manifest.object_count(), 4);
    assert!(matches!(
        &job.manifest.files[0].objects,
        ObjectIds::Pattern { count: 4, .. }
    ));
    assert_eq!(job.manifest.find_object("demo-model/r1/chunk-003"), Some((0, 3)));
    assert_eq!(job.manifest.find_object("demo-model/r1/chunk-3"), None);
    assert_eq!(job.manifest.files[0].chunk_range(3), 786432..1048576);
    assert_eq!(job.sources.0, ["file:///tmp/mooncake-dist-test/model.bin"]);
    assert_eq!((job.targets.len(), job.target_replica_count), (2, 2));
    let warnings: Vec<_> = job
        .warnings
        .iter()
        .map(|w| (w.code.as_str(), w.pointer.as_deref()))
        .collect();
    assert_eq!(
        warnings,
        [("checksum_not_checked", Some("/manifest/files/0/checksum"))]
    );
    // Frozen: this digest is the artifact's identity in the Raft log and on disks.
    assert_eq!(
        job.manifest.digest().to_string(),
        include_str!("../../tests/data/rfc_example.manifest.sha256").trim(),
        "the canonical encoding of manifests changed"
    );
    let strict = run_with(
        rfc(),
        ValidateOptions {
            require_checksums: true,
        },
    )
    .unwrap_err();
    assert_eq!(
        (strict[0].pointer.as_str(), strict[0].code.as_str()),
        ("/manifest/files/0/checksum", "checksum_required")
    );
}

#[test]
fn one_fault_at_a_time() {
    let f = |member: &str| format!("{FILE}/{member}");
    let table: Vec<(String, Option<Value>, Vec<String>)> = vec![
        (
            "/job_id".into(),
            Some(json!("a b")),
            vec!["/job_id invalid_job_id".into()],
        ),
        ("/model".into(), None, vec!["/model missing".into()]),
        (
            "/model/revision".into(),
            Some(json!("r2")),
            vec!["/manifest/revision reference_mismatch".into()],
        ),
        (
            "/model/model_id".into(),
            Some(json!("")),
            vec![
                "/model/model_id empty".into(),
                "/manifest/model_id reference_mismatch".into(),
            ],
        ),
        (
            "/manifest/provider".into(),
            None,
            vec!["/manifest/provider missing".into()],
        ),
        ("/manifest".into(), None, vec!["/manifest missing".into()]),
        (
            "/manifest/total_size_bytes".into(),
            Some(json!(7)),
            vec!["/manifest/total_size_bytes size_mismatch".into()],
        ),
        (
            "/manifest/files".into(),
            Some(json!([])),
            vec![
                "/manifest/files empty".into(),
                "/manifest/total_size_bytes size_mismatch".into(),
            ],
        ),
        (f("path"), Some(json!("../x")), vec![f("path path_escapes")]),
        (f("path"), Some(json!("a/../x")), vec![f("path path_escapes")]),
        (
            f("path"),
            Some(json!("/etc/passwd")),
            vec![f("path absolute_path")],
        ),
        (f("path"), Some(json!("")), vec![f("path empty_path")]),
        (f("path"), Some(json!("a//b")), vec![f("path empty_component")]),
        (f("path"), Some(json!("a/")), vec![f("path empty_component")]),
        (
            f("path"),
            Some(json!("a\u{0}b")),
            vec![f("path invalid_character")],
        ),
        (
            f("path"),
            Some(json!("x".repeat(256))),
            vec![f("path limit_exceeded")],
        ),
        (f("path"), None, vec![f("path missing")]),
        (
            f("size_bytes"),
            Some(json!(1048577)),
            vec![
                "/manifest/total_size_bytes size_mismatch".into(),
                f("chunk_layout/chunk_count chunk_count_mismatch"),
            ],
        ),
        (
            f("chunk_layout/chunk_count"),
            Some(json!(3)),
            vec![f("chunk_layout/chunk_count chunk_count_mismatch")],
        ),
        (
            f("chunk_layout/chunk_size_bytes"),
            Some(json!(0)),
            vec![f("chunk_layout/chunk_size_bytes out_of_range")],
        ),
        (
            f("chunk_layout"),
            None,
            vec![
                f("chunk_layout/chunk_size_bytes missing"),
                f("chunk_layout/chunk_count missing"),
                f("chunk_layout missing"),
            ],
        ),
        (
            f("artifact/object_ids"),
            Some(json!(["demo-model/r1/a"])),
            vec![f("artifact/object_ids object_count_mismatch")],
        ),
        (
            f("artifact/object_ids/1"),
            Some(json!("demo-model/r1/chunk-000")),
            vec![f("artifact/object_ids/1 duplicate_object_id")],
        ),
        (
            f("artifact/object_ids/1"),
            Some(json!("demo-model/r10/x")),
            vec![f("artifact/object_ids/1 object_outside_prefix")],
        ),
        (
            f("artifact/object_ids/1"),
            Some(json!("demo-model/r1/")),
            vec![f("artifact/object_ids/1 object_outside_prefix")],
        ),
        (f("download_url"), None, vec![f("download_url missing")]),
        (
            f("download_url"),
            Some(json!("ftp://x/y")),
            vec![f("download_url unsupported_scheme")],
        ),
        (
            f("download_url"),
            Some(json!("http://u:p@x/y")),
            vec![f("download_url credentials_in_url")],
        ),
        (
            f("download_url"),
            Some(json!("file://host/y")),
            vec![f("download_url invalid_url")],
        ),
        (
            f("download_url"),
            Some(json!("model.bin")),
            vec![f("download_url invalid_url")],
        ),
        (
            "/seed_node_id".into(),
            Some(json!("nowhere")),
            vec!["/seed_node_id invalid_node_id".into()],
        ),
        (
            "/target_nodes".into(),
            Some(json!([])),
            vec![
                "/target_nodes empty".into(),
                "/replica_policy/target_replica_count replica_count_too_high".into(),
            ],
        ),
        (
            "/target_nodes/1".into(),
            Some(json!("127.0.0.1:25001")),
            vec![
                "/target_nodes/1 duplicate_target".into(),
                "/replica_policy/target_replica_count replica_count_too_high".into(),
            ],
        ),
        (
            "/replica_policy/target_replica_count".into(),
            Some(json!(3)),
            vec!["/replica_policy/target_replica_count replica_count_too_high".into()],
        ),
        (
            "/policy".into(),
            Some(json!({"max_attempts": 0})),
            vec!["/policy/max_attempts out_of_range".into()],
        ),
        (
            "/policy".into(),
            Some(json!({"deadline_s": 0})),
            vec!["/policy/deadline_s out_of_range".into()],
        ),
        (
            "/priority".into(),
            Some(json!(11)),
            vec!["/priority out_of_range".into()],
        ),
        (
            "/priority".into(),
            Some(json!(i64::MIN)),
            vec!["/priority out_of_range".into()],
        ),
    ];
    for (pointer, value, want) in table {
        let mut got = faults_of(&[(&pointer, value.clone())]);
        let mut want = want;
        got.sort();
        want.sort();
        assert_eq!(got, want, "{pointer} = {value:?}");
    }
}

#[test]
fn an_empty_request_names_every_member() {
    let got = faults_of(&[("/model", Some(json!({}))), ("/manifest", Some(json!({})))]);
    for pointer in [
        "/model/model_id",
        "/model/revision",
        "/model/format",
        "/model/provider",
        "/manifest/format",
        "/manifest/files",
    ] {
        assert!(
            got.contains(&format!("{pointer} missing")),
            "{pointer} in {got:?}"
        );
    }
}

#[test]
fn derived_ids_fit_their_limit() {
    let mut body = rfc();
    let mut file = body.pointer(FILE).unwrap().clone();
    file.as_object_mut().unwrap().remove("artifact");
    let mut deep = file.clone();
    deep["path"] = json!(vec!["d".repeat(200); 6].join("/"));
    body["manifest"]["files"] = json!([file, deep]);
    body["manifest"]["total_size_bytes"] = json!(2 << 20);
    let got: Vec<_> = run(body)
        .unwrap_err()
        .into_iter()
        .map(|f| (f.pointer, f.code))
        .collect();
    assert_eq!(
        got,
        [(
            "/manifest/files/1/path".to_owned(),
            "object_id_too_long".to_owned()
        )]
    );
}

/// A few bytes that ask for 2^61 derived ids: refused, not counted out.
#[test]
fn a_small_request_cannot_ask_for_much_work() {
    let mut body = rfc();
    let mut file = body.pointer(FILE).unwrap().clone();
    file.as_object_mut().unwrap().remove("artifact");
    file["size_bytes"] = json!(1u64 << 60);
    file["chunk_layout"]["chunk_size_bytes"] = json!(1);
    file["chunk_layout"]["chunk_count"] = json!(1u64 << 60);
    let mut other = file.clone();
    other["path"] = json!("other.bin");
    body["manifest"]["files"] = json!([file, other]);
    body["manifest"]["total_size_bytes"] = json!(1u64 << 61);
    let got: Vec<_> = run(body).unwrap_err().into_iter().map(|f| f.code).collect();
    assert_eq!(got, ["limit_exceeded", "limit_exceeded"], "chunks and blocks");

    let got = faults_of(&[("/manifest/files/0/path", Some(json!(vec!["d"; 65].join("/"))))]);
    assert_eq!(got, ["/manifest/files/0/path limit_exceeded"]);
}

/// What is wrong with the chunks does not hide what is wrong with the ids, in any file.
#[test]
fn faults_do_not_hide_each_other() {
    let mut body = rfc();
    let second = body.pointer(FILE).unwrap().clone();
    body["manifest"]["files"].as_array_mut().unwrap().push(second);
    body["manifest"]["files"][0]["chunk_layout"]["chunk_count"] = json!(5);
    body["manifest"]["files"][0]["artifact"]["object_ids"][1] = json!("elsewhere/x");
    body["manifest"]["files"][1]["path"] = json!("/abs");
    body["manifest"]["files"][1]
        .as_object_mut()
        .unwrap()
        .remove("size_bytes");
    body["manifest"]["files"][1]["chunk_layout"] = json!({"object_prefix": "demo-model/r1"});
    let got: Vec<_> = run(body)
        .unwrap_err()
        .into_iter()
        .map(|f| format!("{} {}", f.pointer, f.code))
        .collect();
    for want in [
        "/manifest/files/0/chunk_layout/chunk_count chunk_count_mismatch",
        "/manifest/files/0/artifact/object_ids/1 object_outside_prefix",
        "/manifest/files/1/path absolute_path",
        "/manifest/files/1/size_bytes missing",
        "/manifest/files/1/chunk_layout/chunk_size_bytes missing",
        "/manifest/files/1/chunk_layout/chunk_count missing",
    ] {
        assert!(got.iter().any(|g| g == want), "{want} in {got:?}");
    }
    // Answers do not grow with what is wrong.
    let mut body = rfc();
    body["manifest"]["files"][0]["artifact"]["object_ids"][1] = json!("x".repeat(100_000));
    body["manifest"]["files"][0]["path"] = json!(format!("/{}", "y".repeat(100_000)));
    let faults = run(body).unwrap_err();
    assert!(
        faults.iter().all(|f| f.detail.len() < 1000),
        "{:?}",
        faults.iter().map(|f| f.detail.len()).collect::<Vec<_>>()
    );
}

#[test]
fn every_fault_at_once() {
    let got = faults_of(&[
        ("/manifest/files/0/path", Some(json!("../../x"))),
        ("/manifest/files/0/download_url", Some(json!("s3://b/k"))),
        ("/seed_node_id", Some(json!(":"))),
        ("/manifest/total_size_bytes", Some(json!(1))),
        ("/replica_policy/target_replica_count", Some(json!(9))),
    ]);
    assert_eq!(got.len(), 5, "{got:?}");
}

#[test]
fn paths_against_each_other() {
    let mut body = rfc();
    let file = body.pointer(FILE).unwrap().clone();
    let named = |path: &str, n: usize| {
        let mut f = file.clone();
        f["path"] = json!(path);
        f["artifact"] = json!({});
        f["chunk_layout"]["object_prefix"] = json!(format!("p{n}"));
        f
    };
    body["manifest"]["files"] = json!([
        named("a", 0),
        named("a/b/c", 1),
        named("a/b", 2),
        named("a", 3),
        named("a-b", 4)
    ]);
    body["manifest"]["total_size_bytes"] = json!(5 << 20);
    let got: Vec<_> = run(body)
        .unwrap_err()
        .into_iter()
        .map(|f| (f.pointer, f.code))
        .collect();
    let want = [
        ("/manifest/files/3/path", "duplicate_path"),
        ("/manifest/files/0/path", "file_where_folder_needed"),
        ("/manifest/files/0/path", "file_where_folder_needed"),
        ("/manifest/files/2/path", "file_where_folder_needed"),
    ];
    assert_eq!(got.len(), want.len(), "{got:?}");
    for (p, c) in want {
        assert!(
            got.iter().any(|(gp, gc)| gp == p && gc == c),
            "{p} {c} in {got:?}"
        );
    }
}

#[test]
fn ids_are_derived_and_kept_apart() {
    let mut body = rfc();
    let file = body.pointer_mut(FILE).unwrap();
    file.as_object_mut().unwrap().remove("artifact");
    let one = run(body.clone()).unwrap();
    assert_eq!(
        one.manifest.files[0].objects.get(2).unwrap(),
        "demo-model/r1/chunk-002"
    );

    let mut second = body.pointer(FILE).unwrap().clone();
    second["path"] = json!("sub/other.bin");
    body["manifest"]["files"].as_array_mut().unwrap().push(second);
    body["manifest"]["total_size_bytes"] = json!(2 << 20);
    let two = run(body.clone()).unwrap();
    assert_eq!(
        two.manifest.files[0].objects.get(0).unwrap(),
        "demo-model/r1/model.bin/chunk-000"
    );
    assert_eq!(
        two.manifest.files[1].objects.get(3).unwrap(),
        "demo-model/r1/sub/other.bin/chunk-003"
    );

    // Given ids that meet another file's are a fault.
    let ids =
        json!({"object_ids": ["demo-model/r1/a", "demo-model/r1/b", "demo-model/r1/c", "demo-model/r1/d"]});
    body["manifest"]["files"][0]["artifact"] = ids.clone();
    body["manifest"]["files"][1]["artifact"] = ids;
    let faults = run(body).unwrap_err();
    assert_eq!(faults.len(), 4);
    assert!(
        faults
            .iter()
            .all(|f| f.code == "duplicate_object_id" && f.pointer.starts_with("/manifest/files/1/"))
    );
}

/// Derived ids of one file that another has too: one fault, at what can be changed, that says how many.
#[test]
fn derived_ids_that_another_file_has_are_one_fault() {
    let mut body = rfc();
    let mut second = body.pointer(FILE).unwrap().clone();
    second["path"] = json!("other.bin");
    second.as_object_mut().unwrap().remove("artifact");
    body["manifest"]["files"].as_array_mut().unwrap().push(second);
    body["manifest"]["total_size_bytes"] = json!(2 << 20);
    let faults = run(body).unwrap_err();
    let [fault] = &faults[..] else {
        panic!("{faults:?}")
    };
    assert_eq!(fault.code, "duplicate_object_id");
    assert_eq!(fault.pointer, "/manifest/files/1/chunk_layout/object_prefix");
    assert_eq!(
        fault.detail,
        "'demo-model/r1/chunk-000' is already an object of /manifest/files/0, and so are the 3 after it"
    );
}

#[test]
fn empty_files_have_no_chunks() {
    let mut body = rfc();
    body["manifest"]["files"]
        .as_array_mut()
        .unwrap()
        .push(json!({"path": "empty", "size_bytes": 0}));
    let job = run(body.clone()).unwrap();
    assert_eq!(
        (
            job.manifest.files[1].chunk_count,
            job.manifest.files[1].objects.len()
        ),
        (0, 0)
    );
    assert_eq!(BlockMap::new(&job.manifest, 256 << 10).of_file(1).len(), 0);
    for (text, good) in [("", true), ("x", false)] {
        let mut body = body.clone();
        body["manifest"]["files"][1]["checksum"] =
            json!(format!("sha256:{}", Digest::sha256(text.as_bytes())));
        let faults = run(body).err().unwrap_or_default();
        let named: Vec<_> = faults
            .iter()
            .map(|f| (f.pointer.as_str(), f.code.as_str()))
            .collect();
        let want = [("/manifest/files/1/checksum", "checksum_mismatch_empty")];
        assert_eq!(named, if good { &[][..] } else { &want[..] }, "{text:?}");
    }
    body["manifest"]["files"][1]["chunk_layout"] =
        json!({"chunk_size_bytes": 1, "chunk_count": 1, "object_prefix": "p"});
    assert_eq!(run(body).unwrap_err()[0].code, "chunk_count_mismatch");
}

#[test]
fn limits_are_named() {
    let big = (MAX_CHUNKS + 1) as usize;
    let mut body = rfc();
    body["manifest"]["total_size_bytes"] = json!(big);
    body["manifest"]["files"][0]["size_bytes"] = json!(big);
    body["manifest"]["files"][0]["artifact"] = json!({});
    body["manifest"]["files"][0]["chunk_layout"] =
        json!({"chunk_size_bytes": 1, "chunk_count": big, "object_prefix": "p"});
    let faults = run(body).unwrap_err();
    assert!(
        faults
            .iter()
            .any(|f| f.code == "limit_exceeded" && f.detail.contains("1048576")),
        "{faults:?}"
    );

    // Sums that overflow 64 bits are a fault, not a panic.
    let max = u64::MAX;
    let got = faults_of(&[
        ("/manifest/files/0/size_bytes", Some(json!(max))),
        (
            "/manifest/files/0/chunk_layout/chunk_size_bytes",
            Some(json!(max)),
        ),
    ]);
    assert!(
        got.iter().any(|f| f == "/manifest/files limit_exceeded"),
        "{got:?}"
    );

    // 4,096 ids of the greatest length would not fit into one command of the log.
    let long: Vec<_> = (0..2000).map(|i| format!("{}{i}:1", "h".repeat(200))).collect();
    let got = faults_of(&[("/target_nodes", Some(json!(long))), ("/replica_policy", None)]);
    assert_eq!(got, ["/target_nodes limit_exceeded"]);

    let many: Vec<_> = (0..500).map(|i| format!("bad {i}")).collect();
    let faults = {
        let mut body = rfc();
        body["target_nodes"] = json!(many);
        run(body).unwrap_err()
    };
    assert_eq!(faults.len(), 101);
    assert!(faults[100].detail.contains("400 more") || faults[100].detail.contains("more faults"));
}

/// The number that counts is that of the distinct nodes named, the seed among them.
#[test]
fn replica_counts_are_held_against_the_nodes_named() {
    let with = |count: u64, seed: &str| {
        let mut body = rfc();
        body["replica_policy"]["target_replica_count"] = json!(count);
        body["seed_node_id"] = json!(seed);
        match run(body) {
            Ok(job) => job.warnings.into_iter().map(|w| w.code).collect::<Vec<_>>(),
            Err(faults) => faults.into_iter().map(|f| f.code).collect(),
        }
    };
    let (target, other) = ("127.0.0.1:25001", "127.0.0.1:25003");
    let checksum = "checksum_not_checked".to_owned();
    let below = vec!["replica_count_below_nodes".to_owned(), checksum.clone()];
    let sorted = |count, seed| {
        let mut codes = with(count, seed);
        codes.sort_unstable_by(|a, b| b.cmp(a));
        codes
    };
    assert_eq!(sorted(1, target), below);
    assert_eq!(sorted(2, target), std::slice::from_ref(&checksum));
    assert_eq!(with(3, target), ["replica_count_too_high"]);
    assert_eq!(sorted(2, other), below, "three nodes are named");
    assert_eq!(sorted(3, other), [checksum]);
    assert_eq!(with(4, other), ["replica_count_too_high"]);
}

#[test]
fn the_same_body_has_the_same_digest() {
    let base = run(rfc()).unwrap().request_digest();
    let mut other_id = rfc();
    other_id["job_id"] = json!("x");
    assert_eq!(
        run(other_id).unwrap().request_digest(),
        base,
        "the id is not part of the body"
    );
    let mut upper = rfc();
    upper["manifest"]["files"][0]["checksum"] = json!("AB".repeat(32));
    let mut lower = rfc();
    lower["manifest"]["files"][0]["checksum"] = json!(format!("sha256:{}", "ab".repeat(32)));
    assert_eq!(
        run(upper).unwrap().request_digest(),
        run(lower).unwrap().request_digest()
    );
    for (pointer, value) in [
        ("/manifest/files/0/download_url", json!("/other")),
        ("/seed_node_id", json!("127.0.0.1:25002")),
        ("/manifest/files/0/path", json!("other.bin")),
    ] {
        let mut body = rfc();
        *body.pointer_mut(pointer).unwrap() = value;
        assert_ne!(run(body).unwrap().request_digest(), base, "{pointer}");
    }
    let with = |priority: Value| {
        let mut body = rfc();
        body["priority"] = priority;
        let job = run(body).unwrap();
        (job.priority, job.request_digest())
    };
    assert_eq!(with(json!(0)), (0, base), "a default that is spelled out");
    assert_eq!(with(Value::Null), (0, base));
    let (low, high) = (with(json!(-10)), with(json!(10)));
    assert_eq!((low.0, high.0), (-10, 10));
    assert!(low.1 != base && high.1 != base && low.1 != high.1);
    let mut moved = rfc();
    moved["manifest"]["files"][0]["download_url"] = json!("/elsewhere");
    assert_eq!(
        run(moved).unwrap().manifest.digest(),
        run(rfc()).unwrap().manifest.digest(),
        "identity excludes the source"
    );
}

#[test]
fn encodings_round_trip_and_refuse_damage() {
    let job = run(rfc()).unwrap();
    let bytes = job.manifest.encode();
    assert_eq!(Manifest::decode(&bytes).unwrap(), job.manifest);
    assert!(matches!(
        Manifest::decode(&[9, 1]),
        Err(CodecError::UnknownVersion { found: 9, .. })
    ));
    assert!(matches!(
        Manifest::decode(&bytes[..bytes.len() - 1]),
        Err(CodecError::Damaged(_))
    ));
    assert_eq!(Manifest::decode(&[]), Err(CodecError::Empty));
    assert_eq!(Sources::decode(&job.sources.encode()).unwrap(), job.sources);
}

mod arithmetic {
    use super::*;
    use proptest::prelude::*;

    fn manifest(sizes: &[u64], chunk: u64) -> Manifest {
        let mut m = run(rfc()).unwrap().manifest;
        m.files = sizes
            .iter()
            .map(|&size_bytes| ManifestFile {
                size_bytes,
                chunk_size_bytes: chunk,
                chunk_count: size_bytes.div_ceil(chunk),
                objects: ObjectIds::derived("p", size_bytes.div_ceil(chunk)),
                ..m.files[0].clone()
            })
            .collect();
        m.total_size_bytes = sizes.iter().sum();
        m
    }

    proptest! {
        /// Blocks tile every file exactly, in order; overlapping() agrees with a byte-by-byte model.
        #[test]
        fn blocks_tile_files(sizes in prop::collection::vec(0u64..40, 1..6), shift in 0u32..5, chunk in 1u64..20) {
            let m = manifest(&sizes, chunk);
            let map = BlockMap::new(&m, 1 << shift);
            let mut at = vec![0u64; sizes.len()];
            for b in 0..map.len() {
                let r = map.locate(b).unwrap();
                prop_assert_eq!(r.offset, at[r.file]);
                prop_assert!(r.len > 0 && r.len <= 1 << shift);
                prop_assert!(map.of_file(r.file).contains(&b));
                at[r.file] += u64::from(r.len);
            }
            prop_assert_eq!(&at, &sizes);
            prop_assert_eq!(map.locate(map.len()), None);
            for (f, file) in m.files.iter().enumerate() {
                for c in 0..file.chunk_count {
                    let range = file.chunk_range(c);
                    let want: Vec<u32> = map.of_file(f).filter(|&b| {
                        let r = map.locate(b).unwrap();
                        r.offset < range.end && r.offset + u64::from(r.len) > range.start
                    }).collect();
                    prop_assert_eq!(map.overlapping(f, range).collect::<Vec<_>>(), want);
                }
            }
        }

        #[test]
        fn block_sizes_are_in_range(total in 0u64..1 << 42) {
            let bs = block_size_for(total);
            prop_assert!(bs.is_power_of_two() && BLOCK_SIZE_RANGE.contains(&bs));
        }
    }

    #[test]
    fn about_two_thousand_blocks_where_the_size_allows() {
        assert_eq!(block_size_for(0), 256 << 10);
        assert_eq!(block_size_for(1 << 30), 1 << 20);
        assert_eq!(block_size_for(1 << 40), 4 << 20);
    }

    #[test]
    fn the_root_binds_everything() {
        let m = manifest(&[10], 5).digest();
        let d = [Digest::sha256(b"a"), Digest::sha256(b"b")];
        let base = root(Algorithm::Blake3, 1, &m, &d);
        assert_ne!(base, root(Algorithm::Sha256, 1, &m, &d));
        assert_ne!(base, root(Algorithm::Blake3, 2, &m, &d));
        assert_ne!(base, root(Algorithm::Blake3, 1, &d[0], &d));
        assert_ne!(base, root(Algorithm::Blake3, 1, &m, &[d[1], d[0]]));
        assert_ne!(base, root(Algorithm::Blake3, 1, &m, &d[..1]));
    }
}
