//! Validation of a create request: every fault at once, each with its JSON pointer.

use super::*;
use crate::{
    api::{CreateJobRequest, FileSpec, ManifestSpec, ModelSpec, Warning},
    ids::{JobId, MAX_MODEL_COMPONENT_BYTES, NodeId},
};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Most faults named in one answer; the rest is counted. Keeps the answer to a broken 64 MiB body small.
const MAX_FAULTS: usize = 100;
/// Default attempts per placement.
const DEFAULT_MAX_ATTEMPTS: u32 = 3;
/// Most attempts per placement a caller may ask for.
const MAX_ATTEMPTS: u32 = 10;
/// Longest deadline a caller may ask for: one year.
const MAX_DEADLINE_S: u64 = 365 * 24 * 3600;
/// Longest free-form string kept from a request (`checksum`, `artifact_key`, `file_manifest_version`).
const MAX_TEXT_BYTES: usize = 1024;
/// Deepest path: bounds the work of comparing every folder of every path with every file.
const MAX_PATH_COMPONENTS: usize = 64;
/// Longest piece of the caller's own text in a fault or a warning.
const MAX_SHOWN_CHARS: usize = 200;
/// Longest object prefix: room for the default one, `<model_id>/<revision>`, and for a number behind it.
const MAX_PREFIX_BYTES: usize = MAX_OBJECT_ID_BYTES / 4 * 3;

/// One fault of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// RFC 6901 pointer to the member at fault.
    pub pointer: String,
    /// Stable, for programs.
    pub code: String,
    /// For a person: what is wrong and what would be right.
    pub detail: String,
}

/// Site policy.
#[derive(Clone, Copy, Debug, Default)]
pub struct ValidateOptions {
    /// Refuse files whose checksum is no SHA-256 digest.
    pub require_checksums: bool,
}

/// A create request that passed every rule that does not depend on the cluster's state.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidJob {
    /// As given.
    pub job_id: Option<JobId>,
    /// Without sources.
    pub manifest: Manifest,
    /// Parallel to the manifest's files.
    pub sources: Sources,
    /// As given.
    pub seed: NodeId,
    /// Distinct, in the caller's order.
    pub targets: Vec<NodeId>,
    /// As given, or the number of targets.
    pub target_replica_count: u64,
    /// Attempts per placement.
    pub max_attempts: u32,
    /// Seconds from creation.
    pub deadline_s: Option<u64>,
    /// What the caller should know.
    pub warnings: Vec<Warning>,
}

impl ValidJob {
    /// Version 1 of the canonical request digest, by which "the same body" is decided: everything but the
    /// job id and the warnings.
    pub fn request_digest(&self) -> Digest {
        let parts = (
            "mooncake-distribution job request v1",
            self.manifest.digest(),
            Digest::sha256(&self.sources.encode()),
            &self.seed,
            &self.targets,
            self.target_replica_count,
            self.max_attempts,
            self.deadline_s,
        );
        Digest::sha256(&codec::encode(1, &parts))
    }
}

/// Checks a request; see the module docs. On failure at most 100 faults are named, then their number.
pub fn validate(request: CreateJobRequest, options: ValidateOptions) -> Result<ValidJob, Vec<Fault>> {
    let mut v = Validator {
        options,
        faults: Vec::new(),
        count: 0,
        warnings: Vec::new(),
    };
    let job = v.job(request);
    match job {
        Some(mut job) if v.count == 0 => {
            job.warnings = v.warnings;
            Ok(job)
        }
        _ => {
            if v.count > MAX_FAULTS {
                let more = v.count - MAX_FAULTS;
                v.faults.push(Fault {
                    pointer: String::new(),
                    code: "too_many_faults".into(),
                    detail: format!("{more} more faults are not listed"),
                });
            }
            debug_assert!(v.count > 0, "a request without faults validates");
            Err(v.faults)
        }
    }
}

struct Validator {
    options: ValidateOptions,
    faults: Vec<Fault>,
    count: usize,
    warnings: Vec<Warning>,
}

impl Validator {
    fn fault(&mut self, pointer: impl Into<String>, code: &str, detail: impl Into<String>) {
        self.count += 1;
        if self.faults.len() < MAX_FAULTS {
            self.faults.push(Fault {
                pointer: pointer.into(),
                code: code.into(),
                detail: detail.into(),
            });
        }
    }

    fn warn(&mut self, pointer: impl Into<String>, code: &str, detail: impl Into<String>) {
        if self.warnings.len() < MAX_FAULTS {
            self.warnings.push(Warning {
                code: code.into(),
                pointer: Some(pointer.into()),
                detail: detail.into(),
            });
        }
    }

    fn required<T>(&mut self, value: Option<T>, pointer: impl Into<String>) -> Option<T> {
        if value.is_none() {
            self.fault(pointer, "missing", "this member is required");
        }
        value
    }

    fn job(&mut self, request: CreateJobRequest) -> Option<ValidJob> {
        let job_id = match request.job_id.as_deref().map(JobId::parse) {
            Some(Err(why)) => {
                self.fault("/job_id", "invalid_job_id", why);
                None
            }
            Some(Ok(id)) => Some(id),
            None => None,
        };
        let model = self
            .required(request.model, "/model")
            .map(|m| self.model(m, "/model"));
        let manifest = self.required(request.manifest, "/manifest");
        let manifest = manifest.and_then(|m| self.manifest(m, model.flatten()));
        let seed = self.required(request.seed_node_id, "/seed_node_id");
        let seed = seed.and_then(|s| self.node(&s, "/seed_node_id"));
        let targets = self.targets(request.target_nodes);

        let mut target_replica_count = targets.as_ref().map_or(0, |t| t.len() as u64);
        if let (Some(want), Some(targets)) = (
            request.replica_policy.and_then(|p| p.target_replica_count),
            targets.as_ref(),
        ) {
            let pointer = "/replica_policy/target_replica_count";
            let named = targets.iter().chain(seed.as_ref()).collect::<BTreeSet<_>>().len() as u64;
            if want > named {
                self.fault(
                    pointer,
                    "replica_count_too_high",
                    format!("{want} replicas are wanted, but only {named} distinct nodes are named"),
                );
            } else if want < targets.len() as u64 {
                self.warn(
                    pointer,
                    "replica_count_below_targets",
                    format!(
                        "{want} replicas are wanted, {} targets are named: every target is staged",
                        targets.len()
                    ),
                );
            }
            target_replica_count = want;
        }

        let policy = request.policy.unwrap_or_default();
        let max_attempts = policy.max_attempts.unwrap_or(DEFAULT_MAX_ATTEMPTS);
        if !(1..=MAX_ATTEMPTS).contains(&max_attempts) {
            self.fault(
                "/policy/max_attempts",
                "out_of_range",
                format!("must be 1 to {MAX_ATTEMPTS}"),
            );
        }
        if let Some(s) = policy.deadline_s
            && !(1..=MAX_DEADLINE_S).contains(&s)
        {
            self.fault(
                "/policy/deadline_s",
                "out_of_range",
                format!("must be 1 to {MAX_DEADLINE_S} seconds"),
            );
        }

        let (manifest, sources) = manifest?;
        Some(ValidJob {
            job_id,
            manifest,
            sources,
            seed: seed?,
            targets: targets?,
            target_replica_count,
            max_attempts,
            deadline_s: policy.deadline_s,
            warnings: Vec::new(),
        })
    }

    fn node(&mut self, text: &str, pointer: &str) -> Option<NodeId> {
        NodeId::parse(text)
            .map_err(|why| self.fault(pointer, "invalid_node_id", why))
            .ok()
    }

    fn targets(&mut self, targets: Option<Vec<String>>) -> Option<Vec<NodeId>> {
        let targets = self.required(targets, "/target_nodes")?;
        if targets.is_empty() {
            self.fault("/target_nodes", "empty", "at least one target node is required");
        }
        if targets.len() > MAX_TARGETS {
            let detail = format!("{} targets are named, the limit is {MAX_TARGETS}", targets.len());
            self.fault("/target_nodes", "limit_exceeded", detail);
            return None;
        }
        let bytes: usize = targets.iter().map(String::len).sum();
        if bytes > MAX_TARGETS_BYTES {
            let detail = format!(
                "the target ids have {bytes} bytes together, the limit is {MAX_TARGETS_BYTES}: make two jobs"
            );
            self.fault("/target_nodes", "limit_exceeded", detail);
            return None;
        }
        let mut seen = BTreeMap::new();
        let mut out = Vec::with_capacity(targets.len());
        for (i, text) in targets.iter().enumerate() {
            let pointer = format!("/target_nodes/{i}");
            let Some(node) = self.node(text, &pointer) else {
                continue;
            };
            if let Some(first) = seen.insert(node.clone(), i) {
                seen.insert(node.clone(), first);
                self.fault(
                    pointer,
                    "duplicate_target",
                    format!("{node} is already /target_nodes/{first}"),
                );
            }
            out.push(node);
        }
        Some(out)
    }

    fn model(&mut self, spec: ModelSpec, base: &str) -> Option<ModelRef> {
        // Each one is looked at before the first that is missing ends this.
        let model_id = self.component(spec.model_id, base, "model_id");
        let revision = self.component(spec.revision, base, "revision");
        let format = self.component(spec.format, base, "format");
        let provider = self.component(spec.provider, base, "provider");
        Some(ModelRef {
            model_id: model_id?,
            revision: revision?,
            format: format?,
            provider: provider?,
        })
    }

    /// `None` only where a fault was recorded.
    fn component(&mut self, value: Option<String>, base: &str, name: &str) -> Option<String> {
        let pointer = format!("{base}/{name}");
        let value = self.required(value, pointer.clone())?;
        if value.is_empty() {
            self.fault(pointer, "empty", "must not be empty");
        } else if value.len() > MAX_MODEL_COMPONENT_BYTES {
            let detail = format!("{} bytes, the limit is {MAX_MODEL_COMPONENT_BYTES}", value.len());
            self.fault(pointer, "limit_exceeded", detail);
        } else if let Some(bad) = value.chars().find(|c| c.is_control()) {
            self.fault(
                pointer,
                "invalid_character",
                format!("holds the control character {bad:?}"),
            );
        }
        Some(value)
    }

    fn text(&mut self, value: Option<String>, pointer: String) -> String {
        let value = value.unwrap_or_default();
        if value.len() > MAX_TEXT_BYTES {
            let detail = format!("{} bytes, the limit is {MAX_TEXT_BYTES}", value.len());
            self.fault(pointer, "limit_exceeded", detail);
        }
        value
    }

    fn manifest(&mut self, spec: ManifestSpec, model: Option<ModelRef>) -> Option<(Manifest, Sources)> {
        let own = self.model(
            ModelSpec {
                model_id: spec.model_id,
                revision: spec.revision,
                format: spec.format,
                provider: spec.provider,
            },
            "/manifest",
        );
        if let (Some(model), Some(own)) = (&model, &own) {
            for ((name, want), (_, have)) in model.components().into_iter().zip(own.components()) {
                if want != have {
                    let detail = format!("is '{}', but /model/{name} is '{}'", cut(have), cut(want));
                    self.fault(format!("/manifest/{name}"), "reference_mismatch", detail);
                }
            }
        }
        let version = self.text(
            spec.file_manifest_version,
            "/manifest/file_manifest_version".into(),
        );
        let total = self.required(spec.total_size_bytes, "/manifest/total_size_bytes");
        let files = self.required(spec.files, "/manifest/files")?;
        if files.is_empty() {
            self.fault("/manifest/files", "empty", "at least one file is required");
        }
        if files.len() > MAX_FILES {
            let detail = format!("{} files are named, the limit is {MAX_FILES}", files.len());
            self.fault("/manifest/files", "limit_exceeded", detail);
            return None;
        }

        self.paths(&files);
        let countable = self.limits(&files, total);
        let own_ref = own
            .as_ref()
            .map_or_else(String::new, |m| format!("{}/{}", m.model_id, m.revision));
        let shared = prefixes_shared(&files, &own_ref);
        let mut sources = Vec::with_capacity(files.len());
        let mut valid = Vec::with_capacity(files.len());
        for (i, file) in files.into_iter().enumerate() {
            sources.push(file.download_url.clone().unwrap_or_default());
            let given = file.artifact.as_ref().is_some_and(|a| a.object_ids.is_some());
            if let Some(file) = self.file(i, file, &own_ref, &shared) {
                valid.push((i, given, file));
            }
        }
        // Never count out the ids of a manifest that is over the limit: a few bytes can ask for 2^60 of them.
        if countable {
            self.object_ids_distinct(&valid);
        }
        let out = valid.into_iter().map(|(_, _, file)| file).collect();
        let manifest = Manifest {
            model: own?,
            file_manifest_version: version,
            total_size_bytes: total?,
            files: out,
        };
        Some((manifest, Sources(sources)))
    }

    /// Paths: each one on its own, then against each other.
    fn paths(&mut self, files: &[FileSpec]) {
        let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
        for (i, file) in files.iter().enumerate() {
            let pointer = format!("/manifest/files/{i}/path");
            let Some(path) = file.path.as_deref() else {
                self.fault(pointer, "missing", "this member is required");
                continue;
            };
            if let Err((code, detail)) = check_path(path) {
                self.fault(pointer, code, detail);
                continue;
            }
            if let Some(&first) = seen.get(path) {
                let detail = format!("'{path}' is already the path of /manifest/files/{first}");
                self.fault(pointer, "duplicate_path", detail);
            } else {
                seen.insert(path, i);
            }
        }
        for (path, &i) in &seen {
            for (end, _) in path.match_indices('/') {
                if let Some(&file) = seen.get(&path[..end]) {
                    let detail = format!(
                        "'{}' is a file here, but '{path}' (/manifest/files/{i}) needs a folder there",
                        &path[..end]
                    );
                    self.fault(
                        format!("/manifest/files/{file}/path"),
                        "file_where_folder_needed",
                        detail,
                    );
                }
            }
        }
    }

    /// The sums, in arithmetic that cannot overflow. Gives whether the number of chunks is within its limit.
    fn limits(&mut self, files: &[FileSpec], total: Option<u64>) -> bool {
        let sum: u128 = files.iter().filter_map(|f| f.size_bytes).map(u128::from).sum();
        if let Some(total) = total
            && files.iter().all(|f| f.size_bytes.is_some())
            && u128::from(total) != sum
        {
            let detail = format!("is {total}, but the files' sizes add up to {sum}");
            self.fault("/manifest/total_size_bytes", "size_mismatch", detail);
        }
        let chunks: u128 = files
            .iter()
            .filter_map(|f| f.chunk_layout.as_ref()?.chunk_count)
            .map(u128::from)
            .sum();
        if chunks > u128::from(MAX_CHUNKS) {
            let detail = format!(
                "the manifest has {chunks} chunks, the limit is {MAX_CHUNKS}: use a larger chunk_size_bytes"
            );
            self.fault("/manifest/files", "limit_exceeded", detail);
        }
        let bs = u64::from(block_size_for(u64::try_from(sum).unwrap_or(u64::MAX)));
        let blocks: u128 = files
            .iter()
            .filter_map(|f| f.size_bytes)
            .map(|s| u128::from(s.div_ceil(bs)))
            .sum();
        if blocks > u128::from(MAX_BLOCKS) {
            let detail = format!(
                "the files need {blocks} blocks of {bs} bytes, the limit is {MAX_BLOCKS}: split the model"
            );
            self.fault("/manifest/files", "limit_exceeded", detail);
        }
        chunks <= u128::from(MAX_CHUNKS)
    }

    fn file(
        &mut self,
        i: usize,
        spec: FileSpec,
        own_ref: &str,
        shared: &HashSet<String>,
    ) -> Option<ManifestFile> {
        let base = format!("/manifest/files/{i}");
        let size = self.required(spec.size_bytes, format!("{base}/size_bytes"));
        let path = spec.path.unwrap_or_default();
        let checksum = self.checksum(spec.checksum, &base, size);
        if size != Some(0) || spec.download_url.as_deref().is_some_and(|u| !u.is_empty()) {
            self.source(spec.download_url.as_deref(), format!("{base}/download_url"));
        }
        let artifact = spec.artifact.unwrap_or_default();
        let artifact_key = self.text(artifact.artifact_key, format!("{base}/artifact/artifact_key"));
        let layout = match (spec.chunk_layout, size) {
            (None, Some(0)) => Default::default(),
            (layout, _) => self
                .required(layout, format!("{base}/chunk_layout"))
                .unwrap_or_default(),
        };
        let prefix_given = layout.object_prefix.is_some();
        let prefix = layout.object_prefix.unwrap_or_else(|| own_ref.to_owned());
        let fits = (1..=MAX_PREFIX_BYTES).contains(&prefix.len()) && !prefix.chars().any(char::is_control);
        // A default prefix is wrong only where the model's name is, which is a fault of its own.
        if prefix_given && !fits {
            let detail = format!("must have 1 to {MAX_PREFIX_BYTES} bytes and no control characters");
            let pointer = format!("{base}/chunk_layout/object_prefix");
            self.fault(pointer, "invalid_prefix", detail);
        }
        let chunks = self.chunks(&base, size, layout.chunk_size_bytes, layout.chunk_count);
        let count = chunks.map(|(_, count)| count);
        let given = artifact
            .object_ids
            .map(|ids| self.object_ids(ids, &base, count, fits.then_some(prefix.as_str())));
        let (chunk_size, chunk_count) = chunks?;
        let objects = match given {
            Some(ids) => ids?,
            None if shared.contains(&prefix) => ObjectIds::derived(&format!("{prefix}/{path}"), chunk_count),
            None => ObjectIds::derived(&prefix, chunk_count),
        };
        if let Some(id) = chunk_count.checked_sub(1).and_then(|last| objects.get(last))
            && id.len() > MAX_OBJECT_ID_BYTES
            && matches!(objects, ObjectIds::Pattern { .. })
        {
            let detail = format!(
                "its object ids would have {} bytes, the limit is {MAX_OBJECT_ID_BYTES}: give object_ids or an object_prefix of its own",
                id.len()
            );
            self.fault(format!("{base}/path"), "object_id_too_long", detail);
        }
        Some(ManifestFile {
            path,
            size_bytes: size?,
            checksum,
            artifact_key,
            chunk_size_bytes: chunk_size,
            chunk_count,
            object_prefix: prefix,
            objects,
        })
    }

    fn checksum(&mut self, text: Option<String>, base: &str, size: Option<u64>) -> Checksum {
        let pointer = format!("{base}/checksum");
        let checksum = Checksum::parse(&self.text(text, pointer.clone()));
        if let Checksum::Opaque(text) = &checksum {
            let what = if text.is_empty() {
                "no checksum is given".to_owned()
            } else {
                format!("'{}' is not a SHA-256 digest", cut(text))
            };
            let what = format!("{what} (sha256:<64 hex digits>)");
            if self.options.require_checksums {
                self.fault(
                    pointer,
                    "checksum_required",
                    format!("{what}, and this cluster requires one"),
                );
            } else if size != Some(0) {
                self.warn(
                    pointer,
                    "checksum_not_checked",
                    format!("{what}: the file's checksum cannot be compared with the source; only its size is checked there"),
                );
            }
        } else if size == Some(0) && checksum != Checksum::Sha256(Digest::sha256(b"")) {
            let detail = format!(
                "the file is empty, but this is not the SHA-256 of an empty text ({})",
                Digest::sha256(b"")
            );
            self.fault(pointer, "checksum_mismatch_empty", detail);
        }
        checksum
    }

    fn source(&mut self, url: Option<&str>, pointer: String) {
        let Some(url) = self.required(url, pointer.clone()) else {
            return;
        };
        if let Err((code, detail)) = check_source(url) {
            self.fault(pointer, code, detail);
        }
    }

    /// (chunk size, chunk count), or `None` after a fault.
    fn chunks(
        &mut self,
        base: &str,
        size: Option<u64>,
        chunk_size: Option<u64>,
        count: Option<u64>,
    ) -> Option<(u64, u64)> {
        let layout = format!("{base}/chunk_layout");
        if size == Some(0) {
            if count.is_some_and(|c| c != 0) {
                let detail = "an empty file has no chunks: chunk_count must be 0";
                self.fault(format!("{layout}/chunk_count"), "chunk_count_mismatch", detail);
            }
            return Some((chunk_size.unwrap_or(0), 0));
        }
        let chunk_size = self.required(chunk_size, format!("{layout}/chunk_size_bytes"));
        let count = self.required(count, format!("{layout}/chunk_count"));
        let chunk_size = chunk_size?;
        if chunk_size == 0 {
            self.fault(
                format!("{layout}/chunk_size_bytes"),
                "out_of_range",
                "must be at least 1",
            );
            return None;
        }
        let size = size?;
        let want = size.div_ceil(chunk_size);
        let count = count?;
        if count != want {
            let detail = format!("is {count}, but {size} bytes in chunks of {chunk_size} make {want}");
            self.fault(format!("{layout}/chunk_count"), "chunk_count_mismatch", detail);
            return None;
        }
        Some((chunk_size, count))
    }

    /// Checks given ids against the number of chunks and the prefix, as far as these are known.
    fn object_ids(
        &mut self,
        ids: Vec<String>,
        base: &str,
        count: Option<u64>,
        prefix: Option<&str>,
    ) -> Option<ObjectIds> {
        let pointer = format!("{base}/artifact/object_ids");
        let len = ids.len() as u64;
        if let Some(count) = count
            && count != len
        {
            let detail = format!("{len} ids are given for {count} chunks");
            self.fault(pointer.clone(), "object_count_mismatch", detail);
        }
        let mut seen = HashSet::with_capacity(ids.len());
        for (n, id) in ids.iter().enumerate() {
            let inside = prefix.is_none_or(|prefix| {
                let rest = id.strip_prefix(prefix);
                rest.is_some_and(|rest| rest.len() > 1 && rest.starts_with('/'))
            });
            let new = seen.insert(id.as_str());
            let well_formed = id.len() <= MAX_OBJECT_ID_BYTES && !id.chars().any(char::is_control);
            if inside && new && well_formed {
                continue;
            }
            if self.count >= MAX_FAULTS {
                self.count += 1; // a million of them need no million texts
                continue;
            }
            let pointer = format!("{pointer}/{n}");
            let shown = cut(id);
            if !inside {
                let prefix = prefix.unwrap_or_default();
                let detail = format!("'{shown}' does not start with the object_prefix '{prefix}/'");
                self.fault(pointer.clone(), "object_outside_prefix", detail);
            }
            if !well_formed {
                let detail =
                    format!("must have at most {MAX_OBJECT_ID_BYTES} bytes and no control characters");
                self.fault(pointer.clone(), "invalid_object_id", detail);
            }
            if !new {
                let detail = format!("'{shown}' is already an object of this file");
                self.fault(pointer, "duplicate_object_id", detail);
            }
        }
        drop(seen);
        (Some(len) == count).then(|| ObjectIds::from_list(ids))
    }

    /// Across files; within a file duplicates were already found.
    fn object_ids_distinct(&mut self, files: &[(usize, bool, ManifestFile)]) {
        if files.len() < 2 {
            return;
        }
        let mut owners: HashMap<std::borrow::Cow<'_, str>, usize> = HashMap::new();
        let (mut clashes, mut more) = (Vec::new(), 0);
        for (i, given, file) in files {
            for (n, id) in file.objects.iter().enumerate() {
                match owners.get(&id) {
                    Some(owner) if owner != i && clashes.len() >= MAX_FAULTS => more += 1,
                    Some(owner) if owner != i => {
                        // Derived ids are not in the request: what can be changed is their prefix.
                        let member = if *given {
                            format!("artifact/object_ids/{n}")
                        } else {
                            "chunk_layout/object_prefix".into()
                        };
                        clashes.push((format!("/manifest/files/{i}/{member}"), *owner, id.into_owned()));
                    }
                    Some(_) => {}
                    None => {
                        owners.insert(id, *i);
                    }
                }
            }
        }
        drop(owners);
        for (pointer, owner, id) in clashes {
            let detail = format!("'{id}' is already an object of /manifest/files/{owner}");
            self.fault(pointer, "duplicate_object_id", detail);
        }
        self.count += more;
    }
}

/// The prefixes that more than one file with derived ids would share: their ids then hold the path too.
fn prefixes_shared(files: &[FileSpec], own_ref: &str) -> HashSet<String> {
    let mut seen = HashSet::new();
    let mut shared = HashSet::new();
    for file in files {
        if file.artifact.as_ref().is_some_and(|a| a.object_ids.is_some()) || file.size_bytes == Some(0) {
            continue;
        }
        let prefix = file
            .chunk_layout
            .as_ref()
            .and_then(|l| l.object_prefix.as_deref())
            .unwrap_or(own_ref);
        if !seen.insert(prefix) {
            shared.insert(prefix.to_owned());
        }
    }
    shared
}

/// The beginning of the caller's text, for people: an answer must not grow with what is wrong.
fn cut(text: &str) -> std::borrow::Cow<'_, str> {
    match text.char_indices().nth(MAX_SHOWN_CHARS) {
        None => text.into(),
        Some((end, _)) => format!("{}…", &text[..end]).into(),
    }
}

/// A path that stays inside its folder on any POSIX filesystem.
fn check_path(path: &str) -> Result<(), (&'static str, String)> {
    if path.is_empty() {
        return Err(("empty_path", "must not be empty".into()));
    }
    if path.starts_with('/') {
        return Err((
            "absolute_path",
            format!(
                "'{}' is absolute: write it relative to the model's folder",
                cut(path)
            ),
        ));
    }
    if path.len() > MAX_PATH_BYTES {
        return Err((
            "limit_exceeded",
            format!("{} bytes, the limit is {MAX_PATH_BYTES}", path.len()),
        ));
    }
    if let Some(bad) = path.chars().find(|c| c.is_control()) {
        return Err((
            "invalid_character",
            format!("holds the control character {bad:?}"),
        ));
    }
    if path.split('/').count() > MAX_PATH_COMPONENTS {
        let detail = format!("more than {MAX_PATH_COMPONENTS} components");
        return Err(("limit_exceeded", detail));
    }
    for component in path.split('/') {
        match component {
            "" => {
                return Err((
                    "empty_component",
                    format!("'{path}' has an empty component ('//' or a final '/')"),
                ));
            }
            "." | ".." => {
                return Err((
                    "path_escapes",
                    format!("'{path}' has the component '{component}', which may leave the folder"),
                ));
            }
            c if c.len() > MAX_PATH_COMPONENT_BYTES => {
                return Err((
                    "limit_exceeded",
                    format!(
                        "a component has {} bytes, the limit is {MAX_PATH_COMPONENT_BYTES}",
                        c.len()
                    ),
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

/// A source this version can read, without credentials in it. Never repeats the URL: it may be signed.
fn check_source(text: &str) -> Result<(), (&'static str, String)> {
    if text.len() > MAX_URL_BYTES {
        return Err((
            "limit_exceeded",
            format!("{} bytes, the limit is {MAX_URL_BYTES}", text.len()),
        ));
    }
    if text.starts_with('/') {
        return Ok(());
    }
    let forms = "use file:///absolute/path, /absolute/path, http:// or https://";
    let url = url::Url::parse(text).map_err(|e| ("invalid_url", format!("not a URL ({e}): {forms}")))?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err((
            "credentials_in_url",
            "user-info in a URL is refused: it would be stored and shown".into(),
        ));
    }
    match url.scheme() {
        "file" if url.host_str().is_none_or(|h| h.is_empty() || h == "localhost") => Ok(()),
        "file" => Err((
            "invalid_url",
            "a file:// URL names no host: write file:///absolute/path".into(),
        )),
        "http" | "https" => Ok(()),
        other => Err((
            "unsupported_scheme",
            format!("'{}:' is not supported: {forms}", cut(other)),
        )),
    }
}
