//! The manifest and its files.

use super::{
    super::{distinct::clashes, *},
    Validator,
    rules::{check_path, check_source},
};
use crate::{
    api::{FileSpec, ManifestSpec, ModelSpec},
    text::cut,
};
use std::collections::{BTreeMap, HashSet};

/// Longest object prefix: room for the default one, `<model_id>/<revision>`, and for a number behind it.
const MAX_PREFIX_BYTES: usize = MAX_OBJECT_ID_BYTES / 4 * 3;

impl Validator {
    pub(super) fn manifest(
        &mut self,
        spec: ManifestSpec,
        model: Option<ModelRef>,
    ) -> Option<(Manifest, Sources)> {
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
            let detail = format!("more than {MAX_FILES} files are named, which is the limit");
            self.fault("/manifest/files", "limit_exceeded", detail);
            return None;
        }

        self.paths(&files);
        self.limits(&files, total);
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
        self.object_ids_distinct(&valid);
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
                let detail = format!("'{}' is already the path of /manifest/files/{first}", cut(path));
                self.fault(pointer, "duplicate_path", detail);
            } else {
                seen.insert(path, i);
            }
        }
        for (path, &i) in &seen {
            for (end, _) in path.match_indices('/') {
                if let Some(&file) = seen.get(&path[..end]) {
                    let detail = format!(
                        "'{}' is a file here, but '{}' (/manifest/files/{i}) needs a folder there",
                        cut(&path[..end]),
                        cut(path)
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

    /// The sums, in arithmetic that cannot overflow.
    fn limits(&mut self, files: &[FileSpec], total: Option<u64>) {
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
                let detail = format!("{what}, and this cluster requires one");
                self.policy.push(pointer, "checksum_required", detail);
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
            if self.faults.is_full() {
                self.faults.count_more(1); // a million of them need no million texts
                continue;
            }
            let pointer = format!("{pointer}/{n}");
            let shown = cut(id);
            if !inside {
                let prefix = prefix.unwrap_or_default();
                let detail = format!(
                    "'{shown}' does not start with the object_prefix '{}/'",
                    cut(prefix)
                );
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
        let ids: Vec<_> = files.iter().map(|(_, _, file)| &file.objects).collect();
        for clash in clashes(&ids) {
            if self.faults.is_full() {
                self.faults.count_more(1); // a million of them need no million texts
                continue;
            }
            let (i, given, file) = &files[clash.file];
            let owner = files[clash.owner].0;
            // Derived ids are not in the request: what can be changed is their prefix.
            let member = match given {
                true => format!("artifact/object_ids/{}", clash.chunk),
                false => "chunk_layout/object_prefix".into(),
            };
            let id = file.objects.get(clash.chunk).unwrap_or_default();
            let more = match clash.count - 1 {
                0 => String::new(),
                more => format!(", and so are the {more} after it"),
            };
            let detail = format!(
                "'{}' is already an object of /manifest/files/{owner}{more}",
                cut(&id)
            );
            self.fault(
                format!("/manifest/files/{i}/{member}"),
                "duplicate_object_id",
                detail,
            );
        }
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
