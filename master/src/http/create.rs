//! `POST /api/v1/model-distribution/jobs`.
//!
//! Order of checks: JSON → everything that depends on the request alone → the job id → the site's policy and the
//! nodes → the log. So a repeat of an accepted request is answered from the job, whatever has become of the cluster
//! and of its settings since.

use super::{
    body::HeldBody,
    error::ApiError,
    forward::Prepared,
    jobs::{propose_error, snapshot_of},
    work::at_most,
};
use crate::{consensus::ProposeError, context::MasterContext};
use axum::{
    Extension,
    extract::State,
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use mooncake_proto::{
    api::{CreateJobRequest, ProblemCode, Warning},
    digest::Digest,
    ids::{JobId, ModelRef, NodeId},
    manifest::{Examined, Fault, Faults, ValidJob, ValidateOptions, block_size_for, examine},
    text::cut,
};
use mooncake_state::{
    BlobRef, Command, CreateJob, PRIORITY_CLUSTER_VERSION, Reply, State as Replicated, blob_parts,
};
use std::{fmt::Write, sync::Arc};
use tokio::sync::Semaphore;

/// Bodies up to this size are parsed where they are: a hop to another thread costs more than they do. The size of the
/// body is the measure of the work, because parsing and validating take time and memory by the bytes that came, not
/// by the chunks and ids that these ask for (see [`examine`]).
const PARSE_INLINE_BYTES: usize = 32 << 10;
/// Bodies over this size are parsed one at a time: each takes a few times its size while it lasts.
const PARSE_ALONE_BYTES: usize = 1 << 20;
/// Of the others, this many at once.
const PARSE_AT_ONCE: usize = 4;
/// Blobs up to this size travel inside the create command; with both of them and every target there is room.
const INLINE_BLOB_BYTES: usize = 64 << 10;
/// Parts of a blob proposed at once: keeps the log's pipeline busy without filling it.
const PARTS_AT_ONCE: usize = 4;
/// Unknown members named in warnings; the rest is counted.
const MAX_UNKNOWN_MEMBERS: usize = 20;

static PARSE_LARGE: Semaphore = Semaphore::const_new(1);
static PARSE_SMALL: Semaphore = Semaphore::const_new(PARSE_AT_ONCE);

/// A body that was parsed and validated, ready for the log.
struct Parsed {
    /// Its file and source lists are empty: they are in the blobs, and a million object ids are not kept twice.
    valid: ValidJob,
    request_digest: Digest,
    manifest: Blob,
    sources: Blob,
    /// What this site's policy has against it (`--require-checksums`): it holds for new jobs.
    policy_faults: Faults,
}

struct Blob {
    digest: Digest,
    bytes: Vec<u8>,
}

impl Blob {
    fn new(bytes: Vec<u8>) -> Self {
        Self {
            digest: Digest::sha256(&bytes),
            bytes,
        }
    }

    fn is_inline(&self) -> bool {
        self.bytes.len() <= INLINE_BLOB_BYTES
    }
}

/// What is wrong with the request itself, and the nodes it names, so that the answer can name those that are
/// not known too.
struct Refused {
    faults: Faults,
    seed: Option<String>,
    targets: Vec<String>,
}

enum ParseError {
    Json(ApiError),
    Refused(Refused),
}

/// The handler. The leader runs it, after it confirmed its leadership.
pub(super) async fn create(
    State(ctx): State<Arc<MasterContext>>,
    Extension(prepared): Extension<Prepared>,
) -> Result<Response, ApiError> {
    let Prepared {
        body,
        generated_job_id,
    } = prepared;
    let options = ValidateOptions {
        require_checksums: ctx.options.require_checksums,
    };
    let parsed = parse_somewhere(body.bytes.clone(), options).await?;
    drop(body);
    let parsed = match parsed {
        Ok(parsed) => parsed,
        Err(ParseError::Json(error)) => return Err(error),
        Err(ParseError::Refused(refused)) => {
            let state = ctx.consensus.state();
            let Refused {
                mut faults,
                seed,
                targets,
            } = refused;
            let seed = seed.as_deref().and_then(|s| NodeId::parse(s).ok());
            let targets = targets.iter().map(|t| NodeId::parse(t).ok());
            unknown_nodes(&state, seed.as_ref(), targets, &mut faults);
            return Err(ApiError::faults(faults));
        }
    };
    let job = parsed.valid.job_id.clone().unwrap_or(generated_job_id);
    submit(&ctx, job, parsed).await
}

async fn parse_somewhere(
    bytes: Bytes,
    options: ValidateOptions,
) -> Result<Result<Parsed, ParseError>, ApiError> {
    if bytes.len() <= PARSE_INLINE_BYTES {
        return Ok(parse(&bytes, options));
    }
    let room = parsers(bytes.len());
    at_most(room, "parser of the request", move || parse(&bytes, options)).await
}

/// Who parses bodies of this size.
fn parsers(bytes: usize) -> &'static Semaphore {
    match bytes > PARSE_ALONE_BYTES {
        true => &PARSE_LARGE,
        false => &PARSE_SMALL,
    }
}

fn parse(bytes: &[u8], options: ValidateOptions) -> Result<Parsed, ParseError> {
    let (request, unknown) = parse_json(bytes).map_err(ParseError::Json)?;
    let seed = request.seed_node_id.clone();
    let targets = request.target_nodes.clone().unwrap_or_default();
    let Examined {
        job: mut valid,
        policy: policy_faults,
    } = match examine(request, options) {
        Ok(examined) => examined,
        Err(faults) => {
            return Err(ParseError::Refused(Refused {
                faults,
                seed,
                targets,
            }));
        }
    };
    valid.warnings.extend(unknown);
    let request_digest = valid.request_digest();
    let manifest = Blob::new(valid.manifest.encode());
    let sources = Blob::new(valid.sources.encode());
    valid.manifest.files = Vec::new();
    valid.sources.0 = Vec::new();
    Ok(Parsed {
        valid,
        request_digest,
        manifest,
        sources,
        policy_faults,
    })
}

/// Reads JSON; members that nobody knows become warnings.
fn parse_json(bytes: &[u8]) -> Result<(CreateJobRequest, Vec<Warning>), ApiError> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let mut track = serde_path_to_error::Track::new();
    let mut unknown = Vec::new();
    let mut more = 0u64;
    let parsed = serde_ignored::deserialize(
        serde_path_to_error::Deserializer::new(&mut json, &mut track),
        |path| {
            if unknown.len() < MAX_UNKNOWN_MEMBERS {
                let mut pointer = String::new();
                ignored_pointer(&path, &mut pointer);
                unknown.push(Warning {
                    code: "unknown_member".into(),
                    pointer: Some(cut(&pointer).into_owned()),
                    detail: "this member is not known and was ignored".into(),
                });
            } else {
                more += 1;
            }
        },
    );
    let parsed = parsed.and_then(|request: CreateJobRequest| json.end().map(|()| request));
    let request = parsed.map_err(|error| invalid_json(&error, &error_pointer(&track.path())))?;
    if more > 0 {
        let detail = format!("{more} more members are not known and were ignored");
        unknown.push(Warning {
            code: "unknown_member".into(),
            pointer: None,
            detail,
        });
    }
    Ok((request, unknown))
}

fn invalid_json(error: &serde_json::Error, pointer: &str) -> ApiError {
    let pointer = cut(pointer);
    let place = if pointer.is_empty() {
        String::new()
    } else {
        format!(" at {pointer}")
    };
    // serde_json's words may repeat the caller's, and end with the line and the column.
    let text = error.to_string();
    let position = format!(" at line {} column {}", error.line(), error.column());
    let words = cut(text.strip_suffix(&position).unwrap_or(&text));
    let problem = ApiError::new(
        ProblemCode::InvalidJson,
        format!("the body cannot be read{place}: {words}{position}"),
    );
    if error.classify() != serde_json::error::Category::Data {
        return problem;
    }
    let mut pointer = pointer.into_owned();
    // Which member it is stands in the words only; the place is that of the object which has it twice.
    let twice = words
        .strip_prefix("duplicate field `")
        .and_then(|rest| rest.strip_suffix('`'));
    let code = match twice {
        Some(member) => {
            push_token(&mut pointer, member);
            "duplicate_member"
        }
        None => "wrong_type",
    };
    problem.with_errors(vec![Fault {
        pointer,
        code: code.into(),
        detail: format!("{words}{position}"),
    }])
}

fn push_token(pointer: &mut String, token: &str) {
    let _ = write!(pointer, "/{}", token.replace('~', "~0").replace('/', "~1"));
}

fn ignored_pointer(path: &serde_ignored::Path<'_>, out: &mut String) {
    use serde_ignored::Path as P;
    match path {
        P::Root => {}
        P::Seq { parent, index } => {
            ignored_pointer(parent, out);
            push_token(out, &index.to_string());
        }
        P::Map { parent, key } => {
            ignored_pointer(parent, out);
            push_token(out, key);
        }
        P::Some { parent } | P::NewtypeStruct { parent } | P::NewtypeVariant { parent } => {
            ignored_pointer(parent, out)
        }
    }
}

fn error_pointer(path: &serde_path_to_error::Path) -> String {
    use serde_path_to_error::Segment;
    let mut out = String::new();
    for segment in path {
        match segment {
            Segment::Seq { index } => push_token(&mut out, &index.to_string()),
            Segment::Map { key } => push_token(&mut out, key),
            Segment::Enum { .. } | Segment::Unknown => {}
        }
    }
    out
}

/// The body's own job id. To find it, all of the body is read over, which takes time for a large one.
pub(super) async fn peek_job_id(body: &HeldBody) -> Option<String> {
    if body.bytes.len() <= PARSE_INLINE_BYTES {
        return peek(&body.bytes);
    }
    let held = body.clone();
    let room = parsers(held.bytes.len());
    at_most(room, "parser of the request", move || peek(&held.bytes))
        .await
        .ok()?
}

fn peek(bytes: &[u8]) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Peek {
        job_id: Option<String>,
    }
    let peek: Peek = serde_json::from_slice(bytes).ok()?;
    peek.job_id.filter(|id| JobId::parse(id).is_ok())
}

/// Adds a fault for each node that is not registered.
fn unknown_nodes(
    state: &Replicated,
    seed: Option<&NodeId>,
    targets: impl Iterator<Item = Option<NodeId>>,
    faults: &mut Faults,
) {
    let mut check = |pointer: String, node: &NodeId| {
        if state.node(node).is_none() {
            let detail =
                format!("no node '{node}' has ever registered; GET /api/v1/nodes lists those that have");
            faults.push(pointer, "unknown_node", detail);
        }
    };
    if let Some(seed) = seed {
        check("/seed_node_id".into(), seed);
    }
    for (i, node) in targets.enumerate() {
        if let Some(node) = node {
            check(format!("/target_nodes/{i}"), &node);
        }
    }
}

async fn submit(ctx: &MasterContext, job: JobId, parsed: Parsed) -> Result<Response, ApiError> {
    {
        let state = ctx.consensus.state();
        let known = state.job(&job).map(|j| j.request_digest);
        match known.or_else(|| state.past_job(&job).map(|p| p.request_digest)) {
            Some(digest) if digest != parsed.request_digest => return Err(conflict(&job)),
            Some(_) if known.is_none() => return Err(forgotten(&job)),
            Some(_) => {
                drop(state);
                return answer(ctx, &job, false);
            }
            None => {}
        }
        let mut faults = parsed.policy_faults.clone();
        unknown_nodes(
            &state,
            Some(&parsed.valid.seed),
            parsed.valid.targets.iter().cloned().map(Some),
            &mut faults,
        );
        if !faults.is_empty() {
            return Err(ApiError::faults(faults));
        }
    }
    let mut inline = Inline::Small;
    put_blobs(ctx, &parsed, inline, false)
        .await
        .map_err(|e| e.with_job(job.as_str()))?;
    let mut put_again = false;
    loop {
        let reply = match ctx.consensus.propose(&command(ctx, &job, &parsed, inline)).await {
            Ok(committed) => committed.reply,
            // Two blobs that are small each, and many targets: without the blobs it fits.
            Err(ProposeError::TooLarge { .. }) if inline == Inline::Small => {
                inline = Inline::Nothing;
                put_blobs(ctx, &parsed, inline, false)
                    .await
                    .map_err(|e| e.with_job(job.as_str()))?;
                continue;
            }
            // A valid job fits then: its targets' names and warnings are bounded.
            Err(error @ ProposeError::TooLarge { .. }) => {
                let detail = format!("{error}: name fewer targets, or shorter names");
                let mut faults = Faults::default();
                faults.push("/target_nodes", "limit_exceeded", detail);
                return Err(ApiError::faults(faults));
            }
            Err(error) => return Err(propose_error(error).with_job(job.as_str())),
        };
        return match reply {
            Reply::Job { created } => {
                if created {
                    tracing::info!(job = %job, model = %parsed.valid.manifest.model, seed = %parsed.valid.seed,
                        targets = parsed.valid.targets.len(), "job created");
                    ctx.metrics.jobs_created.inc();
                }
                answer(ctx, &job, created)
            }
            Reply::JobConflict => Err(conflict(&job)),
            Reply::JobForgotten => Err(forgotten(&job)),
            Reply::ArtifactConflict { detail } => {
                Err(ApiError::new(ProblemCode::ArtifactConflict, detail).with_job(job.as_str()))
            }
            Reply::UnknownNodes(nodes) => {
                let state = Replicated::new();
                let named = |node: &NodeId| nodes.contains(node).then(|| node.clone());
                let seed = named(&parsed.valid.seed);
                let mut faults = Faults::default();
                unknown_nodes(
                    &state,
                    seed.as_ref(),
                    parsed.valid.targets.iter().map(named),
                    &mut faults,
                );
                Err(ApiError::faults(faults))
            }
            // Put long ago, and pruned between the look and the command.
            Reply::BlobMissing { .. } if !put_again => {
                put_again = true;
                put_blobs(ctx, &parsed, inline, true)
                    .await
                    .map_err(|e| e.with_job(job.as_str()))?;
                continue;
            }
            Reply::Overloaded { detail } => Err(ApiError::new(ProblemCode::Overloaded, detail)),
            other => Err(ApiError::new(
                ProblemCode::Internal,
                format!("the state machine answered {other:?} to a create"),
            )
            .with_job(job.as_str())),
        };
    }
}

/// Which blobs go into the command itself.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Inline {
    Small,
    Nothing,
}

impl Inline {
    fn takes(self, blob: &Blob) -> bool {
        self == Self::Small && blob.is_inline()
    }
}

fn command(ctx: &MasterContext, job: &JobId, parsed: &Parsed, inline: Inline) -> Command {
    let valid = &parsed.valid;
    let (priority, ignored) = kept_priority(ctx.consensus.state().cluster_version(), valid.priority);
    let blob = |blob: &Blob| match inline.takes(blob) {
        true => BlobRef::Inline(blob.bytes.clone().into()),
        false => BlobRef::Stored(blob.digest),
    };
    let now_ms = ctx.now_ms();
    let create = Box::new(CreateJob {
        job: job.clone(),
        request_digest: parsed.request_digest,
        model: ModelRef::clone(&valid.manifest.model),
        manifest: blob(&parsed.manifest),
        sources: blob(&parsed.sources),
        block_size_bytes: block_size_for(valid.manifest.total_size_bytes),
        algorithm: ctx.options.algorithm,
        seed: valid.seed.clone(),
        targets: valid.targets.clone(),
        target_replica_count: valid.target_replica_count,
        max_attempts: valid.max_attempts,
        deadline_ms: valid
            .deadline_s
            .map(|s| now_ms.saturating_add(s.saturating_mul(1000))),
        warnings: valid.warnings.iter().cloned().chain(ignored).collect(),
        now_ms,
    });
    match priority {
        0 => Command::CreateJob(create),
        priority => Command::CreateJobWithPriority { create, priority },
    }
}

/// What the cluster can keep of a priority, and what the caller is told if that is not all. As long as a master runs a
/// version that knows no priorities, none of them may be given a job that has one; a master of that version would say that
/// it ignores the member.
fn kept_priority(cluster_version: u32, priority: i8) -> (i8, Option<Warning>) {
    if priority == 0 || cluster_version >= PRIORITY_CLUSTER_VERSION {
        return (priority, None);
    }
    let warning = Warning {
        code: "priority_ignored".into(),
        pointer: Some("/priority".into()),
        detail: format!(
            "the cluster is at version {cluster_version}: jobs have priorities from version {PRIORITY_CLUSTER_VERSION} on, \
             which it reaches by itself when every master runs a program that supports it"
        ),
    };
    (0, Some(warning))
}

/// Puts what does not fit into the command; what the state has already is put only if `again`.
async fn put_blobs(
    ctx: &MasterContext,
    parsed: &Parsed,
    inline: Inline,
    again: bool,
) -> Result<(), ApiError> {
    for blob in [&parsed.manifest, &parsed.sources] {
        if inline.takes(blob) || (!again && ctx.consensus.state().blob(&blob.digest).is_some()) {
            continue;
        }
        let parts = stream::iter(blob_parts(&blob.bytes, ctx.now_ms()));
        parts
            .map(|part| async move {
                match ctx.consensus.propose(&part).await.map_err(propose_error)?.reply {
                    Reply::Done => Ok(()),
                    Reply::Overloaded { detail } => Err(ApiError::new(ProblemCode::Overloaded, detail)),
                    other => {
                        let detail =
                            format!("the state machine answered {other:?} to a part of the manifest");
                        Err(ApiError::new(ProblemCode::Internal, detail))
                    }
                }
            })
            .buffer_unordered(PARTS_AT_ONCE)
            .try_collect::<()>()
            .await?;
    }
    Ok(())
}

fn answer(ctx: &MasterContext, job: &JobId, created: bool) -> Result<Response, ApiError> {
    let mut response = snapshot_of(ctx, job, true)?;
    if created {
        *response.status_mut() = StatusCode::CREATED;
    }
    if let Ok(location) = HeaderValue::from_str(&format!("/api/v1/model-distribution/jobs/{job}")) {
        response.headers_mut().insert(header::LOCATION, location);
    }
    Ok(response)
}

fn conflict(job: &JobId) -> ApiError {
    let detail =
        format!("job '{job}' exists with another body; use another job_id, or send the first body again");
    ApiError::new(ProblemCode::JobConflict, detail).with_job(job.as_str())
}

fn forgotten(job: &JobId) -> ApiError {
    let detail = format!(
        "job '{job}' had this body, ended, and is past its retention; use another job_id to run it again"
    );
    ApiError::new(ProblemCode::JobConflict, detail).with_job(job.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json_error(body: &[u8]) -> String {
        let error = parse_json(body).unwrap_err();
        assert_eq!(error.problem().code, ProblemCode::InvalidJson);
        error.problem().detail.clone()
    }

    #[test]
    fn errors_name_place_and_position() {
        let detail = json_error(br#"{"manifest": {"files": [{"path": 7}]}}"#);
        assert!(
            detail.contains("/manifest/files/0/path") && detail.contains("line 1 column"),
            "{detail}"
        );
        for (body, words) in [
            (&b""[..], "EOF"),
            (b"{\"job_id\": ", "EOF"),
            (b"[]", "line 1"),
            (b"{} x", "trailing"),
            (b"{\"job_id\": \"a\", \"job_id\": \"b\"}", "duplicate"),
            (b"{\"job_id\": \"\xff\"}", "unicode"),
        ] {
            let detail = json_error(body);
            assert!(detail.contains(words), "{detail}");
        }
        // Syntax has no pointer of its own; a wrong type has, escaped, and what it repeats is bounded.
        assert!(parse_json(b"{} x").unwrap_err().problem().errors.is_empty());
        let long = "x".repeat(1 << 20);
        for (body, pointer, code) in [
            (
                r#"{"manifest": {"files": [{"size_bytes": -1}]}}"#,
                "/manifest/files/0/size_bytes",
                "wrong_type",
            ),
            (
                r#"{"manifest": {"files": [{"size_bytes": 1.5}]}}"#,
                "/manifest/files/0/size_bytes",
                "wrong_type",
            ),
            (
                &format!(r#"{{"manifest": {{"files": [{{"size_bytes": "{long}"}}]}}}}"#),
                "/manifest/files/0/size_bytes",
                "wrong_type",
            ),
            (r#"{"manifest": {"files": 7}}"#, "/manifest/files", "wrong_type"),
            (r#"[]"#, "", "wrong_type"),
            (r#"{"job_id": "a", "job_id": "b"}"#, "/job_id", "duplicate_member"),
        ] {
            let error = parse_json(body.as_bytes()).unwrap_err();
            let problem = error.problem();
            let [fault] = &problem.errors[..] else {
                panic!("{problem:?}")
            };
            assert_eq!((&*fault.pointer, &*fault.code), (pointer, code));
            assert!(fault.detail.contains("line 1 column"), "{fault:?}");
            assert!(problem.detail.len() + fault.detail.len() < 1000, "{problem:?}");
        }
        // What is not known is skipped without recursion, however deep it is.
        let deep = [b"{\"x\":".as_slice(), &b"[".repeat(100_000)].concat();
        assert!(json_error(&deep).contains("EOF"));
    }

    #[test]
    fn unknown_members_are_warnings_with_pointers() {
        let (_, warnings) = parse_json(
            br#"{"extra/a": 1, "manifest": {"files": [{"x~y": null}]}, "policy": {"retries": 2}}"#,
        )
        .unwrap();
        let pointers: Vec<_> = warnings.iter().map(|w| w.pointer.as_deref().unwrap()).collect();
        assert_eq!(
            pointers,
            ["/extra~1a", "/manifest/files/0/x~0y", "/policy/retries"]
        );
        let many = format!(
            "{{{}}}",
            (0..50)
                .map(|i| format!("\"m{i}\":0"))
                .collect::<Vec<_>>()
                .join(",")
        );
        let (_, warnings) = parse_json(many.as_bytes()).unwrap();
        assert_eq!(warnings.len(), MAX_UNKNOWN_MEMBERS + 1);
        assert!(warnings.last().unwrap().detail.starts_with("30 more"));
        // They are kept in the log and in every snapshot: their size is bounded too.
        let long = format!("{{\"{}\": 1}}", "~".repeat(1 << 20));
        let (_, warnings) = parse_json(long.as_bytes()).unwrap();
        let pointer = warnings[0].pointer.as_deref().unwrap();
        assert!(
            pointer.chars().count() <= 201 && pointer.ends_with('…'),
            "{}",
            pointer.len()
        );
    }

    #[test]
    fn a_policy_is_no_part_of_what_a_request_means() {
        let body = include_bytes!("../../../proto/tests/data/rfc_example.json");
        let parsed = |require_checksums| match parse(body, ValidateOptions { require_checksums }) {
            Ok(parsed) => parsed,
            Err(_) => panic!("it has no fault of its own"),
        };
        let (lenient, strict) = (parsed(false), parsed(true));
        assert!(lenient.policy_faults.is_empty());
        assert_eq!(strict.policy_faults.into_vec()[0].code, "checksum_required");
        assert_eq!(lenient.request_digest, strict.request_digest);
        // With faults of its own, all of them come at once.
        let body = String::from_utf8_lossy(body).replace("\"model.bin\"", "\"../model.bin\"");
        let options = ValidateOptions {
            require_checksums: true,
        };
        let Err(ParseError::Refused(refused)) = parse(body.as_bytes(), options) else {
            panic!("it has a fault")
        };
        let codes: Vec<_> = refused.faults.into_vec().into_iter().map(|f| f.code).collect();
        assert_eq!(codes, ["path_escapes", "checksum_required"]);
    }

    #[test]
    fn a_priority_waits_for_masters_that_know_it() {
        for (version, given, kept, warns) in [
            (1, 0, 0, false),
            (1, 3, 0, true),
            (2, 3, 3, false),
            (3, -10, -10, false),
        ] {
            let (priority, warning) = kept_priority(version, given);
            assert_eq!((priority, warning.is_some()), (kept, warns), "{version} {given}");
        }
    }

    #[test]
    fn peeking_finds_only_the_outer_id() {
        assert_eq!(
            peek(br#"{"manifest":{"job_id":"inner"},"job_id":"outer"}"#).as_deref(),
            Some("outer")
        );
        assert_eq!(peek(br#"{"manifest":{"job_id":"inner"}}"#), None);
        assert_eq!(peek(br#"{"job_id":"not/valid"}"#), None);
        assert_eq!(peek(b"nonsense"), None);
    }

    /// Where the one parser of large bodies is busy, it has to wait: so it does not work on the runtime's thread.
    #[tokio::test]
    async fn a_large_body_is_not_peeked_into_on_the_spot() {
        let text = format!(
            r#"{{"x": "{}", "job_id": "late"}}"#,
            " ".repeat(PARSE_ALONE_BYTES)
        );
        let body = HeldBody::for_tests(text.into_bytes().into());
        let busy = PARSE_LARGE.acquire().await.unwrap();
        let mut peeked = Box::pin(peek_job_id(&body));
        assert!(futures_util::poll!(peeked.as_mut()).is_pending());
        drop(busy);
        assert_eq!(peeked.await.as_deref(), Some("late"));
    }
}
