//! The encoding of every command and of a snapshot, byte by byte: what an older version wrote must stay readable. A difference here
//! is a broken upgrade, not a file to regenerate; new commands get new files:
//! `MOONCAKE_WRITE_GOLDEN=1 cargo test -p mooncake-state --test golden` writes those that are missing.

use mooncake_proto::{
    api::{NodeStatus, Warning},
    digest::{Algorithm, Digest},
    ids::{JobId, ModelRef, NodeId},
    manifest::{Checksum, Manifest, ManifestFile, ObjectIds, Seal, Sources},
};
use mooncake_state::*;
use std::{collections::BTreeSet, fmt::Write as _, path::PathBuf};

const SNAPSHOT: &str = "snapshot_v1.hex";
/// From the cluster version on that has priorities.
const SNAPSHOT_2: &str = "snapshot_v2.hex";

fn model() -> ModelRef {
    ModelRef {
        model_id: "org/name".into(),
        revision: "r1".into(),
        format: "bin".into(),
        provider: "local".into(),
    }
}

fn node() -> NodeId {
    NodeId("127.0.0.1:25001".into())
}

fn job() -> JobId {
    JobId("019d3ca8-c2e7-7d73-ab73-445f9143d1eb".into())
}

fn report() -> ReportId {
    let fence = Fence {
        recovery_epoch: 1,
        attempt: 300,
    };
    ReportId {
        model: model(),
        generation: 2,
        node: node(),
        incarnation: 3,
        fence,
    }
}

fn seal(algorithm: Algorithm) -> Seal {
    Seal {
        block_size_bytes: 262_144,
        algorithm,
        root: Digest::new([0xab; 32]),
    }
}

fn create(manifest: BlobRef) -> Command {
    Command::CreateJob(Box::new(CreateJob {
        job: job(),
        request_digest: Digest::new([1; 32]),
        model: model(),
        manifest,
        sources: BlobRef::Stored(Digest::new([2; 32])),
        block_size_bytes: 262_144,
        algorithm: Algorithm::Sha256,
        seed: node(),
        targets: vec![node(), NodeId("[::1]:25002".into())],
        target_replica_count: 2,
        max_attempts: 3,
        deadline_ms: Some(1_800_000_060_000),
        warnings: vec![Warning {
            code: "c".into(),
            pointer: Some("/p".into()),
            detail: "d".into(),
        }],
        now_ms: 1_800_000_000_000,
    }))
}

fn commands() -> Vec<(&'static str, Command)> {
    let now_ms = 1_800_000_000_000;
    let about = NodeAbout {
        data_address: "127.0.0.1:50052".into(),
        http_address: "127.0.0.1:9300".into(),
        transports: vec!["tcp".into(), "rdma".into()],
        labels: [("rack".to_owned(), "r7".to_owned())].into(),
        version: "0.1.0".into(),
        capacity_bytes: 1 << 40,
        free_bytes: 1 << 39,
    };
    let status = |status| Command::SetNodeStatus {
        node: node(),
        incarnation: 3,
        seen_since_ms: 1_799_999_999_000,
        status,
        reason: "its session was lost".into(),
        now_ms,
    };
    vec![
        (
            "00_register_node",
            Command::RegisterNode {
                node: node(),
                store_id: "s-1".into(),
                expected_incarnation: 2,
                about,
                now_ms,
            },
        ),
        ("01_set_node_status_up", status(NodeStatus::Up)),
        ("01_set_node_status_suspected", status(NodeStatus::Suspected)),
        ("01_set_node_status_down", status(NodeStatus::Down)),
        (
            "02_set_node_free",
            Command::SetNodeFree {
                node: node(),
                incarnation: 3,
                capacity_bytes: 1 << 40,
                free_bytes: 12345,
                measured_ms: now_ms - 1,
                now_ms,
            },
        ),
        (
            "03_put_blob_part",
            Command::PutBlobPart {
                digest: Digest::new([9; 32]),
                index: 1,
                count: 2,
                total_bytes: 520_000,
                bytes: vec![1, 2, 3].into(),
                now_ms,
            },
        ),
        (
            "04_create_job_inline",
            create(BlobRef::Inline(vec![4, 5, 6].into())),
        ),
        (
            "04_create_job_stored",
            create(BlobRef::Stored(Digest::new([3; 32]))),
        ),
        (
            "05_cancel_job",
            Command::CancelJob {
                job: job(),
                progress: vec![(1, 4096)],
                now_ms,
            },
        ),
        (
            "06_authorise_acquire",
            Command::AuthoriseAcquire {
                model: model(),
                generation: 2,
                attempt: 300,
                node: node(),
                incarnation: 3,
                job: job(),
                reserve_bytes: 1 << 30,
                now_ms,
            },
        ),
        (
            "07_authorise_replicate",
            Command::AuthoriseReplicate {
                model: model(),
                generation: 2,
                first_attempt: 301,
                nodes: vec![ReplicateTo {
                    node: node(),
                    incarnation: 3,
                    reserve_bytes: 1 << 30,
                }],
                now_ms,
            },
        ),
        (
            "08_seal_blake3",
            Command::Seal {
                report: report(),
                seal: seal(Algorithm::Blake3),
                now_ms,
            },
        ),
        (
            "08_seal_sha256",
            Command::Seal {
                report: report(),
                seal: seal(Algorithm::Sha256),
                now_ms,
            },
        ),
        (
            "09_report_staged",
            Command::ReportStaged {
                report: report(),
                seal: seal(Algorithm::Blake3),
                local_path: "/models/local/org--name/r1/bin".into(),
                checksum_verified: true,
                now_ms,
            },
        ),
        (
            "10_report_failed",
            Command::ReportFailed {
                report: report(),
                failure: Failure {
                    code: "disk_full".into(),
                    message: "no space left".into(),
                    retryable: false,
                },
                verified_bytes: 77,
                now_ms,
            },
        ),
        (
            "11_report_held",
            Command::ReportHeld {
                report: report(),
                seal: seal(Algorithm::Blake3),
                local_path: "/m".into(),
                now_ms,
            },
        ),
        (
            "12_report_lost",
            Command::ReportLost {
                report: report(),
                now_ms,
            },
        ),
        ("13_tick", Command::Tick { now_ms }),
        ("14_prune", Command::Prune { now_ms }),
        (
            "15_raise_recovery_epoch",
            Command::RaiseRecoveryEpoch { epoch: 7, now_ms },
        ),
        (
            "16_set_cluster_version",
            Command::SetClusterVersion { version: 1, now_ms },
        ),
        (
            "17_set_limits",
            Command::SetLimits {
                limits: Limits::default(),
                now_ms,
            },
        ),
        (
            "18_create_job_with_priority",
            with_priority(create(BlobRef::Inline(vec![4, 5, 6].into())), -7),
        ),
    ]
}

fn with_priority(command: Command, priority: i8) -> Command {
    match command {
        Command::CreateJob(create) => Command::CreateJobWithPriority { create, priority },
        other => panic!("{other:?} creates no job"),
    }
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for line in bytes.chunks(32) {
        for byte in line {
            write!(text, "{byte:02x}").unwrap();
        }
        text.push('\n');
    }
    text
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text
        .chars()
        .filter_map(|c| c.to_digit(16))
        .map(|d| d as u8)
        .collect();
    digits.chunks(2).map(|d| d[0] << 4 | d[1]).collect()
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

#[test]
fn encodings_are_frozen() {
    let write = std::env::var_os("MOONCAKE_WRITE_GOLDEN").is_some();
    for (name, command) in commands() {
        let path = folder().join(format!("{name}.hex"));
        let encoded = command.encode().unwrap();
        if write && !path.exists() {
            std::fs::write(&path, hex(&encoded)).unwrap();
        }
        let golden = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert_eq!(hex(&encoded), golden, "the encoding of {name} changed");
        assert_eq!(
            Command::decode(&unhex(&golden)).unwrap(),
            command,
            "{name} is read as something else"
        );
    }
}

/// Every variant is there, in its frozen place, and no file is left without its command.
#[test]
fn every_command_has_a_golden_file() {
    let commands = commands();
    let mut numbers = BTreeSet::new();
    for (name, command) in &commands {
        let number = command.encode().unwrap()[1];
        assert_eq!(
            name[..2].parse::<u8>().unwrap(),
            number,
            "{name} is variant {number}"
        );
        assert!(
            name[3..].starts_with(command.name()),
            "{name} is {}",
            command.name()
        );
        numbers.insert(number);
    }
    let last = *numbers.last().unwrap();
    assert_eq!(
        numbers.len(),
        usize::from(last) + 1,
        "a variant has no golden file"
    );
    // The next number is no command: nothing was added without a file.
    let unknown = [&[COMMAND_VERSION, last + 1][..], &[0; 600]].concat();
    let error = Command::decode(&unknown).unwrap_err().to_string();
    assert!(
        !error.contains("left over"),
        "variant {} exists but has no golden file",
        last + 1
    );
    let files = std::fs::read_dir(folder()).unwrap();
    let mut names: BTreeSet<_> = commands.iter().map(|(n, _)| format!("{n}.hex")).collect();
    names.extend([SNAPSHOT, SNAPSHOT_2].map(str::to_owned));
    for file in files {
        let name = file.unwrap().file_name().into_string().unwrap();
        assert!(names.contains(&name), "{name} belongs to no command");
    }
}

/// A state with something in every part of it.
fn state() -> State {
    let manifest = Manifest {
        model: model(),
        file_manifest_version: "v1".into(),
        total_size_bytes: 4,
        files: vec![ManifestFile {
            path: "a".into(),
            size_bytes: 4,
            checksum: Checksum::Opaque("dummy".into()),
            artifact_key: "k".into(),
            chunk_size_bytes: 4,
            chunk_count: 1,
            object_prefix: "p".into(),
            objects: ObjectIds::derived("p", 1),
        }],
    };
    let sources = BlobRef::Inline(Sources(vec!["/src/a".into()]).encode().into());
    let Command::CreateJob(mut first) = create(BlobRef::Inline(manifest.encode().into())) else {
        unreachable!()
    };
    (first.sources, first.targets, first.algorithm) = (sources, vec![node()], Algorithm::Blake3);
    let mut second = first.clone();
    second.job = JobId("second".into());
    let mut third = first.clone();
    third.job = JobId("third".into());
    let mut commands = vec![commands().swap_remove(0).1, Command::CreateJob(first)];
    let now_ms = 1_800_000_000_001;
    let fence = Fence {
        recovery_epoch: 0,
        attempt: 1,
    };
    let report = ReportId {
        model: model(),
        generation: 1,
        node: node(),
        incarnation: 1,
        fence,
    };
    commands.extend([
        Command::AuthoriseAcquire {
            model: model(),
            generation: 1,
            attempt: 1,
            node: node(),
            incarnation: 1,
            job: job(),
            reserve_bytes: 4,
            now_ms,
        },
        Command::Seal {
            report: report.clone(),
            seal: seal(Algorithm::Blake3),
            now_ms,
        },
        Command::ReportStaged {
            report: report.clone(),
            seal: seal(Algorithm::Blake3),
            local_path: "/m".into(),
            checksum_verified: true,
            now_ms,
        },
        Command::SetLimits {
            limits: Limits {
                max_terminal_jobs: 0,
                ..Limits::default()
            },
            now_ms,
        },
        Command::Prune { now_ms },
        Command::ReportLost { report, now_ms },
        Command::CreateJob(second),
        Command::CancelJob {
            job: JobId("second".into()),
            progress: vec![(0, 2)],
            now_ms,
        },
        Command::CreateJob(third),
        Command::PutBlobPart {
            digest: Digest::new([9; 32]),
            index: 1,
            count: 2,
            total_bytes: 5,
            bytes: vec![1, 2, 3].into(),
            now_ms,
        },
    ]);
    let mut state = State::new();
    for (index, command) in (1..).zip(&commands) {
        let reply = state.apply(index, command).reply;
        assert!(!reply.is_refusal(), "{command:?}: {reply:?}");
    }
    state
}

/// The same, in a cluster whose masters all know priorities, with a job that has one.
fn prioritised() -> State {
    let mut state = state();
    let now_ms = 1_800_000_000_002;
    let reply = state.apply(
        100,
        &Command::SetClusterVersion {
            version: PRIORITY_CLUSTER_VERSION,
            now_ms,
        },
    );
    assert_eq!(reply.reply, Reply::Done);
    let third = state.job(&JobId("third".into())).unwrap();
    let bytes = state.blob(&third.manifest).unwrap().to_vec();
    let Command::CreateJob(mut urgent) = create(BlobRef::Inline(bytes.into())) else {
        unreachable!()
    };
    urgent.job = JobId("urgent".into());
    urgent.sources = BlobRef::Stored(third.sources);
    urgent.targets = vec![node()];
    let applied = state.apply(101, &with_priority(Command::CreateJob(urgent), 7));
    assert_eq!(applied.reply, Reply::Job { created: true });
    state
}

fn check_snapshot(name: &str, state: &State) -> State {
    let path = folder().join(name);
    let encoded = state.encode_snapshot();
    if std::env::var_os("MOONCAKE_WRITE_GOLDEN").is_some() && !path.exists() {
        std::fs::write(&path, hex(&encoded)).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert_eq!(hex(&encoded), golden, "the encoding of snapshots changed");
    let read = State::decode_snapshot(&unhex(&golden)).unwrap();
    assert_eq!(read.digest(), state.digest());
    read
}

/// A snapshot of each version stays readable, and is read as what it was.
#[test]
fn snapshots_are_frozen() {
    let read = check_snapshot(SNAPSHOT, &state());
    assert_eq!(read.jobs().count(), 2);
    assert!(read.past_job(&job()).is_some());
    assert!(read.artifact(&model()).unwrap().seal.is_some());
    let read = check_snapshot(SNAPSHOT_2, &prioritised());
    let priorities: Vec<_> = read.jobs().map(|(id, job)| (id.as_str(), job.priority)).collect();
    assert_eq!(priorities, [("second", 0), ("third", 0), ("urgent", 7)]);
}

/// What a program from before reads is the first version, until the cluster's version says that there is none left.
#[test]
fn the_cluster_version_says_which_snapshot_is_written() {
    let mut state = state();
    let first = state.encode_snapshot();
    assert_eq!(first[0], SNAPSHOT_VERSION_1);
    let version = PRIORITY_CLUSTER_VERSION;
    let now_ms = state.time_ms();
    state.apply(100, &Command::SetClusterVersion { version, now_ms });
    let second = state.encode_snapshot();
    assert_eq!(second[0], SNAPSHOT_VERSION_2);
    // A priority of a job that is not there is damage.
    let priority_of = |id: &str, priority: i8| {
        let body = &second[..second.len() - 1];
        [body, &[1, id.len() as u8], id.as_bytes(), &[priority as u8]].concat()
    };
    let read = State::decode_snapshot(&priority_of("third", -10)).unwrap();
    assert_eq!(read.job(&JobId("third".into())).unwrap().priority, -10);
    let error = State::decode_snapshot(&priority_of("none", 1)).unwrap_err();
    assert!(error.to_string().contains("job none"), "{error}");
}
