//! The real binary against fake masters on loopback.

mod cluster;
mod fake;

use fake::{Fake, Request, nobody, ok, problem, refuse};
use mooncake_proto::{
    api::{
        ClusterStatus, CreateJobRequest, JobList, JobSnapshot, JobStatus, JobSummary, MemberView, ModelList,
        ModelPlacementView, ModelView, NodeList, NodeStatus, NodeView, PlacementState, PlacementView,
        Problem, ProblemCode, Progress, Warning,
    },
    ids::{JobId, ModelRef, NodeId},
    manifest::{Fault, ValidateOptions, validate},
};
use std::{collections::BTreeMap, path::Path, process::Output};

async fn ctl(endpoints: &[&str], args: &[&str]) -> Output {
    ctl_with(endpoints, args, &[]).await
}

async fn ctl_with(endpoints: &[&str], args: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_mooncakectl"));
    command
        .args(args)
        .env_remove("NO_COLOR")
        .env("MOONCAKE_ENDPOINTS", endpoints.join(","))
        .envs(environment.iter().copied())
        .kill_on_drop(true);
    command.output().await.unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Asserts on the exit code, and on what is said on standard error.
#[track_caller]
fn exits(output: &Output, code: i32, says: &[&str]) {
    let (out, err) = (stdout(output), stderr(output));
    assert_eq!(output.status.code(), Some(code), "stdout: {out}\nstderr: {err}");
    for part in says {
        assert!(err.contains(part), "'{part}' is missing in: {err}");
    }
    assert!(
        !out.contains('\x1b') && !err.contains('\x1b'),
        "no colour off a terminal: {out}{err}"
    );
}

fn model() -> ModelRef {
    ModelRef {
        model_id: "org/m".into(),
        revision: "r1".into(),
        format: "bin".into(),
        provider: "local".into(),
    }
}

fn node(id: &str) -> NodeId {
    NodeId(id.into())
}

fn snapshot(id: &str, status: JobStatus, staged: u64, version: u64) -> JobSnapshot {
    let state = match status {
        JobStatus::Completed => PlacementState::Staged,
        JobStatus::Failed => PlacementState::Failed,
        _ => PlacementState::Acquiring,
    };
    JobSnapshot {
        job_id: JobId(id.into()),
        status,
        placements: vec![PlacementView {
            node_id: node("n1:25001"),
            state,
            local_path: (state == PlacementState::Staged).then(|| "/models/local/org--m/r1/bin".into()),
            staged_bytes: staged,
            checksum_verified: state == PlacementState::Staged,
            last_error: (state == PlacementState::Failed).then(|| "disk full".into()),
            requested: true,
            attempt: 1,
            transports: vec!["tcp".into()],
            transitions: BTreeMap::new(),
        }],
        last_error: (status == JobStatus::Failed).then(|| "n1:25001 failed: disk full".into()),
        waiting_for: None,
        model_ref: model(),
        priority: 0,
        seed_node_id: node("n1:25001"),
        target_nodes: vec![node("n1:25001")],
        progress: Progress {
            bytes_total: 1000,
            bytes_staged: staged,
            bytes_per_second: 10,
            placements_total: 1,
            placements_staged: u64::from(state == PlacementState::Staged),
        },
        transitions: BTreeMap::from([(JobStatus::Planned, "2026-01-01T00:00:00Z".into())]),
        warnings: vec![Warning {
            code: "w".into(),
            pointer: Some("/x".into()),
            detail: "mind this".into(),
        }],
        tasks: vec![],
        version,
    }
}

fn node_view(id: &str, status: NodeStatus) -> NodeView {
    NodeView {
        node_id: node(id),
        status,
        data_address: id.into(),
        http_address: "h:9300".into(),
        transports: vec!["tcp".into()],
        labels: BTreeMap::from([("rack".into(), "a".into())]),
        incarnation: 1,
        version: "0.1.0".into(),
        capacity_bytes: 1 << 40,
        free_bytes: 1 << 30,
        staged_models: 2,
        max_transfers: None,
        since: "2026-01-01T00:00:00Z".into(),
    }
}

/// Two nodes up and one down; every create makes a job that is done at once.
fn friendly(request: &Request) -> axum::response::Response {
    match request.line().as_str() {
        "GET /api/v1/nodes" => ok(NodeList {
            nodes: vec![
                node_view("n1:25001", NodeStatus::Up),
                node_view("n2:25001", NodeStatus::Up),
                node_view("n3:25001", NodeStatus::Down),
            ],
        }),
        "POST /api/v1/model-distribution/jobs" => {
            let id = request.body["job_id"].as_str().unwrap();
            ok(snapshot(id, JobStatus::Planned, 0, 1))
        }
        line if line.starts_with("GET /api/v1/model-distribution/jobs/") => ok(snapshot(
            line.rsplit('/').next().unwrap(),
            JobStatus::Completed,
            1000,
            9,
        )),
        line => problem(ProblemCode::NotFound, line),
    }
}

fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("m/sub")).unwrap();
    for (path, bytes) in [
        ("m/a.safetensors", &[1u8; 5000][..]),
        ("m/sub/.b", b"b"),
        ("m/empty", b""),
    ] {
        std::fs::write(dir.path().join(path), bytes).unwrap();
    }
    dir
}

fn at(dir: &tempfile::TempDir, path: &str) -> String {
    dir.path().join(path).to_str().unwrap().to_owned()
}

fn creates(fake: &Fake) -> Vec<CreateJobRequest> {
    let log = fake.log.lock().unwrap();
    let posts = log
        .iter()
        .filter(|r| r.line() == "POST /api/v1/model-distribution/jobs");
    posts
        .map(|r| serde_json::from_value(r.body.clone()).unwrap())
        .collect()
}

#[tokio::test]
async fn a_folder_goes_to_every_node_that_is_up() {
    let fake = Fake::start(|r| match r.number {
        0 => problem(ProblemCode::JobNotFound, "there is no such job yet"),
        _ => friendly(r),
    })
    .await;
    let dir = folder();
    let output = ctl(
        &[&fake.url],
        &[
            "distribute",
            &at(&dir, "m"),
            "--all",
            "--watch",
            "--job-id",
            "j-1",
        ],
    )
    .await;
    exits(
        &output,
        0,
        &["1 of 3 nodes are not up", "j-1", "completed 1/1 staged", "100%"],
    );
    assert!(
        stdout(&output).contains("/models/local/org--m/r1/bin"),
        "{}",
        stdout(&output)
    );
    let request = creates(&fake).remove(0);
    assert_eq!(
        request.target_nodes,
        Some(vec!["n1:25001".into(), "n2:25001".into()])
    );
    assert_eq!(request.seed_node_id.as_deref(), Some("n1:25001"));
    assert_eq!(request.job_id.as_deref(), Some("j-1"));
    let valid = validate(
        request,
        ValidateOptions {
            require_checksums: true,
        },
    )
    .unwrap();
    assert_eq!(valid.manifest.total_size_bytes, 5001);
    assert_eq!(valid.manifest.model.format, "safetensors");
    assert_eq!(valid.warnings, []);
}

#[tokio::test]
async fn a_manifest_in_two_steps() {
    let fake = Fake::start(friendly).await;
    let dir = folder();
    let file = at(&dir, "m.json");
    let prefix = "https://store/models/";
    let output = ctl(
        &[],
        &[
            "manifest",
            "create",
            &at(&dir, "m"),
            "--url-prefix",
            prefix,
            "-o",
            &file,
            "--model-id",
            "org/m",
        ],
    )
    .await;
    exits(&output, 0, &["3 files"]);
    assert!(output.stdout.is_empty());
    let args = [
        "distribute",
        &file,
        "--to",
        "n2:25001,n1:25001",
        "--seed",
        "n9:25001",
        "--revision",
        "r7",
        "--deadline",
        "2h",
        "--json",
    ];
    let output = ctl(&[&fake.url], &args).await;
    exits(&output, 0, &[]);
    let job: JobSnapshot = serde_json::from_slice(&output.stdout).expect("JSON and nothing else");
    let request = creates(&fake).remove(0);
    assert_eq!(
        request.job_id.as_deref(),
        Some(job.job_id.as_str()),
        "one is always sent"
    );
    assert_eq!(request.policy.as_ref().unwrap().deadline_s, Some(7200));
    let valid = validate(request, ValidateOptions::default()).unwrap();
    assert_eq!(
        (valid.seed, valid.targets),
        (node("n9:25001"), vec![node("n2:25001"), node("n1:25001")])
    );
    assert_eq!(
        (
            valid.manifest.model.model_id.as_str(),
            valid.manifest.model.revision.as_str()
        ),
        ("org/m", "r7")
    );
    assert_eq!(
        valid.sources.0,
        ["a.safetensors", "empty", "sub/.b"].map(|f| format!("{prefix}{f}"))
    );
}

#[tokio::test]
async fn a_whole_request_is_sent_as_it_is() {
    let fake = Fake::start(friendly).await;
    let dir = folder();
    let file = at(&dir, "request.json");
    let whole = include_str!("../../../proto/tests/data/rfc_example.json");
    std::fs::write(&file, whole).unwrap();
    let whole: CreateJobRequest = serde_json::from_str(whole).unwrap();
    let run = async |args: &[&str]| {
        let args = [&["distribute", &file], args].concat();
        exits(&ctl(&[&fake.url], &args).await, 0, &[]);
        creates(&fake).pop().unwrap()
    };
    let digest = |request| {
        validate(request, ValidateOptions::default())
            .unwrap()
            .request_digest()
    };
    let request = run(&[]).await;
    assert_eq!(
        (&request.seed_node_id, &request.target_nodes),
        (&whole.seed_node_id, &whole.target_nodes)
    );
    assert_eq!(request.job_id, whole.job_id);
    assert!(request.replica_policy.is_some());
    assert_eq!(digest(request), digest(whole.clone()));
    // What is given replaces that, and nothing else.
    let request = run(&["--seed", "n9:1"]).await;
    assert_eq!(request.seed_node_id.as_deref(), Some("n9:1"));
    assert_eq!(request.target_nodes, whole.target_nodes);
    assert!(request.replica_policy.is_some());
    let request = run(&["--to", "n8:1"]).await;
    assert_eq!(request.seed_node_id, whole.seed_node_id);
    assert_eq!(request.target_nodes, Some(vec!["n8:1".to_owned()]));
    assert!(request.replica_policy.is_none(), "it counted other targets");
    // What it says of the model is for the master to compare with its manifest; options hold for both.
    let mut other = whole.clone();
    other.model.as_mut().unwrap().model_id = Some("other".into());
    std::fs::write(&file, serde_json::to_string(&other).unwrap()).unwrap();
    assert_eq!(run(&[]).await.model, other.model, "it is not repaired in silence");
    let request = run(&["--revision", "r7"]).await;
    let (model, manifest) = (request.model.unwrap(), request.manifest.unwrap());
    assert_eq!(
        (model.model_id.as_deref(), model.revision.as_deref()),
        (Some("other"), Some("r7"))
    );
    assert_eq!(manifest.revision.as_deref(), Some("r7"));
    // A manifest names no nodes.
    let manifest = at(&dir, "manifest.json");
    std::fs::write(&manifest, serde_json::to_string(&whole.manifest).unwrap()).unwrap();
    exits(
        &ctl(&[&fake.url], &["distribute", &manifest]).await,
        2,
        &["--to", "--all"],
    );
}

/// Who repeats a command with `--all` under the job's id repeats the same request, whatever nodes are up now.
#[tokio::test]
async fn all_nodes_of_a_job_that_exists_are_its_own() {
    let fake = Fake::start(|r| match r.line().as_str() {
        "GET /api/v1/model-distribution/jobs/j-1" => {
            let mut job = snapshot("j-1", JobStatus::Planned, 0, 1);
            job.target_nodes = ["n7:25001", "n2:25001", "n1:25001"].map(node).to_vec();
            job.seed_node_id = node("n9:25001");
            ok(job)
        }
        _ => friendly(r),
    })
    .await;
    let dir = folder();
    let args = ["distribute", &at(&dir, "m"), "--all", "--job-id", "j-1"];
    exits(&ctl(&[&fake.url], &args).await, 0, &["j-1 exists", "3 nodes"]);
    let request = creates(&fake).remove(0);
    assert_eq!(
        request.target_nodes,
        Some(["n7:25001", "n2:25001", "n1:25001"].map(String::from).to_vec())
    );
    assert_eq!(request.seed_node_id.as_deref(), Some("n9:25001"));
    // Another seed that is asked for is another request: the master says so.
    exits(
        &ctl(&[&fake.url], &[&args[..], &["--seed", "n1:25001"]].concat()).await,
        0,
        &[],
    );
    assert_eq!(creates(&fake).remove(1).seed_node_id.as_deref(), Some("n1:25001"));
}

#[tokio::test]
async fn failover_makes_one_job() {
    // The first cannot serve, the second takes the request and never answers it in time, the third answers.
    let draining = Fake::start(|_| problem(ProblemCode::Draining, "stopping")).await;
    let slow = Fake::start(|_| problem(ProblemCode::OutcomeUnknown, "the leader died")).await;
    let good = Fake::start(friendly).await;
    let dead = format!("http://{}", nobody().await);
    let dir = folder();
    let endpoints = [&dead, &draining.url, &slow.url, &good.url].map(String::as_str);
    let output = ctl(&endpoints, &["distribute", &at(&dir, "m"), "--to", "n1:25001"]).await;
    exits(&output, 0, &[]);
    let ids: Vec<_> = [&draining, &slow, &good]
        .iter()
        .flat_map(|f| creates(f))
        .map(|r| r.job_id.unwrap())
        .collect();
    assert_eq!(ids.len(), 3);
    assert!(
        ids.iter().all(|id| *id == ids[0]),
        "the same id everywhere: {ids:?}"
    );
}

#[tokio::test]
async fn an_election_is_sat_out() {
    let fake = Fake::start(|r| {
        if r.number < 2 {
            problem(ProblemCode::NoLeader, "electing")
        } else {
            friendly(r)
        }
    })
    .await;
    exits(&ctl(&[&fake.url], &["nodes"]).await, 0, &[]);
    assert_eq!(fake.lines().len(), 3);
}

#[tokio::test]
async fn unreachable_is_three() {
    let dead = format!("http://{}", nobody().await);
    let stranger = Fake::start(|_| ok("hello")).await;
    let output = ctl(&[&dead, &stranger.url], &["nodes"]).await;
    exits(
        &output,
        3,
        &[&dead, "refused", &stranger.url, "is it a master?", "--endpoint"],
    );
    let dir = folder();
    let output = ctl(
        &[&dead],
        &["distribute", &at(&dir, "m"), "--to", "n1:1", "--job-id", "j-9"],
    )
    .await;
    exits(&output, 3, &["may have been created", "--job-id j-9"]);
}

#[tokio::test]
async fn plain_http_needs_no_certificates() {
    let fake = Fake::start(friendly).await;
    let nothing = [
        ("SSL_CERT_FILE", "/nonexistent"),
        ("SSL_CERT_DIR", "/nonexistent"),
    ];
    exits(&ctl_with(&[&fake.url], &["nodes"], &nothing).await, 0, &[]);
    let https = fake.url.replace("http:", "https:");
    let says = ["CA certificates", "SSL_CERT_FILE"];
    exits(&ctl_with(&[&https], &["nodes"], &nothing).await, 2, &says);
}

#[tokio::test]
async fn refusals_and_bad_usage_are_two() {
    let fake = Fake::start(|r| match r.line().as_str() {
        "POST /api/v1/model-distribution/jobs" => {
            let fault = Fault {
                pointer: "/seed_node_id".into(),
                code: "unknown_node".into(),
                detail: "there is no n1:1".into(),
            };
            refuse(&Problem::new(ProblemCode::InvalidRequest, "1 fault").with_errors(vec![fault]))
        }
        line if line.ends_with("/jobs/j") => problem(ProblemCode::JobNotFound, "there is no job 'j'"),
        _ => (
            axum::http::StatusCode::IM_A_TEAPOT,
            r#"{"code":"new_code","detail":"from the future"}"#,
        )
            .into_response(),
    })
    .await;
    use axum::response::IntoResponse;
    let dir = folder();
    let m = at(&dir, "m");
    exits(
        &ctl(&[&fake.url], &["distribute", &m, "--to", "n1:1"]).await,
        2,
        &["/seed_node_id: there is no n1:1", "unknown_node"],
    );
    exits(
        &ctl(&[&fake.url], &["jobs", "get", "j"]).await,
        2,
        &["404", "there is no job 'j'"],
    );
    exits(
        &ctl(&[&fake.url], &["models"]).await,
        2,
        &["418", "from the future"],
    );
    assert_eq!(fake.lines().len(), 3, "a refusal is final");
    for (args, says) in [
        (&["distribute", &m][..], "--to"),
        (
            &["distribute", "/nonexistent", "--to", "n1:1"],
            "mooncakectl manifest create",
        ),
        (
            &["distribute", &at(&dir, "m/a.safetensors"), "--to", "n1:1"],
            "cannot use",
        ),
        (&["jobs", "get", "a/b"], "job id"),
        (&["nodes", "--endpoint", "ftp://x"], "http://host:port"),
        (&["manifest", "create", "/nonexistent"], "/nonexistent"),
        (
            &["manifest", "create", &m, "-o", "/nonexistent/x.json"],
            "cannot write",
        ),
        (&["no-such-command"], "no-such-command"),
    ] {
        exits(&ctl(&[&fake.url], args).await, 2, &[says]);
    }
}

#[tokio::test]
async fn watching_tells_how_the_job_ended() {
    // planned → seeding → … → the end, by long poll; the master is away in between.
    for (end, code) in [
        (JobStatus::Completed, 0),
        (JobStatus::Failed, 1),
        (JobStatus::Canceled, 1),
    ] {
        let fake = Fake::start(move |r| match r.number {
            0 => ok(snapshot("j", JobStatus::Planned, 0, 1)),
            1 => ok(snapshot("j", JobStatus::Seeding, 400, 2)),
            2..=4 => problem(ProblemCode::NoLeader, "electing"),
            5 => ok(snapshot("j", JobStatus::Replicating, 700, 3)),
            _ => ok(snapshot("j", end, 1000, 4)),
        })
        .await;
        let output = ctl(&[&fake.url], &["jobs", "watch", "j"]).await;
        exits(
            &output,
            code,
            &["planned 0/1", "seeding 0/1", "(40%)", "replicating"],
        );
        if code == 1 {
            exits(&output, 1, &["job j is"]);
        }
        let log = fake.log.lock().unwrap();
        assert!(log[0].query.is_empty());
        assert_eq!(
            (log[1].query["since"].as_str(), log[1].query["wait"].as_str()),
            ("1", "5s")
        );
        assert_eq!(log[6].query["since"], "3");
    }
    let fake = Fake::start(|_| ok(snapshot("j", JobStatus::Failed, 0, 1))).await;
    let output = ctl(&[&fake.url], &["jobs", "watch", "j", "-o", "json"]).await;
    exits(&output, 1, &["disk full"]);
    let job: JobSnapshot = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(job.status, JobStatus::Failed);
}

#[tokio::test]
async fn a_lost_cancel_is_repeated() {
    let fake = Fake::start(|r| match (r.method.as_str(), r.number) {
        ("POST", 0) => problem(ProblemCode::OutcomeUnknown, "the leader died"),
        _ => ok(snapshot("j", JobStatus::Canceled, 10, 5)),
    })
    .await;
    let output = ctl(&[&fake.url], &["jobs", "cancel", "j"]).await;
    exits(&output, 0, &[]);
    assert!(stdout(&output).contains("canceled"));
    let done = Fake::start(|_| problem(ProblemCode::JobTerminal, "it has ended")).await;
    exits(
        &ctl(&[&done.url], &["jobs", "cancel", "j"]).await,
        2,
        &["409", "it has ended"],
    );
}

#[tokio::test]
async fn lists_go_through_all_pages() {
    let fake = Fake::start(|r| {
        assert_eq!(
            (r.query["status"].as_str(), r.query["node"].as_str()),
            ("failed", "n1:25001")
        );
        let page: usize = r.query.get("page_token").map_or(0, |t| t.parse().unwrap());
        let jobs = (0..r.query["limit"].parse().unwrap())
            .map(|i| JobSummary {
                job_id: JobId(format!("j-{page}-{i}")),
                status: JobStatus::Failed,
                model_ref: model(),
                priority: 3,
                seed_node_id: node("n1:25001"),
                progress: Progress::default(),
                created_at: "2026-01-01T00:00:00Z".into(),
                finished_at: None,
                last_error: Some("disk full".into()),
            })
            .collect();
        ok(JobList {
            jobs,
            next_page_token: Some((page + 1).to_string()),
        })
    })
    .await;
    let args = [
        "jobs", "list", "--status", "failed", "--node", "n1:25001", "--limit", "150", "-o", "json",
    ];
    let output = ctl(&[&fake.url], &args).await;
    exits(&output, 0, &[]);
    let list: JobList = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(list.jobs.len(), 150);
    assert_eq!(list.jobs[149].job_id.as_str(), "j-1-49");
    let table = stdout(&ctl(&[&fake.url], &args[..8]).await);
    assert!(table.starts_with("JOB "), "{table}");
    assert!(
        table.contains("disk full") && table.contains("raise --limit") && table.contains("PRIORITY"),
        "{table}"
    );
}

#[tokio::test]
async fn nodes_models_and_cluster() {
    let fake = Fake::start(|r| match r.path.as_str() {
        "/api/v1/nodes" => friendly(r),
        "/api/v1/models" => ok(ModelList {
            models: vec![ModelView {
                model_ref: model(),
                generation: 1,
                manifest_digest: "00".into(),
                sealed: true,
                root: None,
                digest_algorithm: "blake3".into(),
                block_size_bytes: 1 << 20,
                total_size_bytes: 3 << 30,
                files: 4,
                objects: 5,
                placements: vec![ModelPlacementView {
                    node_id: node("n7:25001"),
                    state: PlacementState::Staged,
                    local_path: None,
                }],
            }],
            next_page_token: None,
        }),
        "/api/v1/cluster" => ok(ClusterStatus {
            cluster_id: "c".into(),
            served_by: 2,
            term: 3,
            leader_id: Some(1),
            applied_index: 40,
            last_log_index: 42,
            last_log_term: 3,
            cluster_version: 1,
            recovery_epoch: 0,
            members: vec![MemberView {
                id: 1,
                rpc_address: "m1:50051".into(),
                http_address: "m1:9003".into(),
                disk_id: "d1".into(),
                role: "leader".into(),
                lag: Some(0),
                silent_ms: None,
            }],
            state_digest: None,
        }),
        other => problem(ProblemCode::NotFound, other),
    })
    .await;
    for (args, says) in [
        (&["nodes"][..], &["n3:25001", "down", "1.0 GiB", "rack=a"][..]),
        (&["models"], &["org/m", "3.0 GiB", "n7:25001"]),
        (&["cluster", "status"], &["leader   1", "40 of 42", "m1:9003"]),
    ] {
        let output = ctl(&[&fake.url], args).await;
        exits(&output, 0, &[]);
        for part in says {
            assert!(
                stdout(&output).contains(part),
                "'{part}' is missing in: {}",
                stdout(&output)
            );
        }
    }
    let output = ctl(&[&fake.url], &["--json", "nodes"]).await;
    assert_eq!(
        serde_json::from_slice::<NodeList>(&output.stdout)
            .unwrap()
            .nodes
            .len(),
        3
    );
    assert_eq!(
        stdout(&output).matches("\"status\": \"up\"").count(),
        2,
        "one member a line, for grep"
    );
}

#[tokio::test]
async fn help_teaches() {
    let output = ctl(&[], &["--help"]).await;
    exits(&output, 0, &[]);
    for part in [
        "Exit codes",
        "mooncakectl distribute",
        "MOONCAKE_ENDPOINTS",
        "http://127.0.0.1:9003",
    ] {
        assert!(stdout(&output).contains(part), "{part}");
    }
    let output = ctl(&[], &["distribute", "--help"]).await;
    assert!(stdout(&output).contains("--allow-source") && stdout(&output).contains("Examples"));
}

#[tokio::test]
async fn nothing_is_left_of_a_manifest_that_cannot_be_made() {
    let dir = folder();
    std::os::unix::fs::symlink("nowhere", Path::new(&at(&dir, "m/broken"))).unwrap();
    let file = at(&dir, "out.json");
    exits(
        &ctl(&[], &["manifest", "create", &at(&dir, "m"), "-o", &file]).await,
        2,
        &["broken"],
    );
    assert!(!Path::new(&file).exists());
}
