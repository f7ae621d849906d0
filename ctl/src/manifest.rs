//! A folder becomes a manifest.
//!
//! Guaranteed: every regular file below the folder is in it, dotfiles, empty files and files in sub-folders
//! included, in the order of their paths; symbolic links are followed; a file that changes while it is hashed,
//! a name that is not UTF-8, a broken link and anything that is not a file or folder is an error, never left
//! out. Not guaranteed: that nobody changes a file afterwards; the seed finds that out.

use crate::{cli::ModelArgs, error::Failure, output};
use mooncake_proto::{
    api::{ChunkLayout, CreateJobRequest, FileSpec, ManifestSpec, ModelSpec},
    digest::{Algorithm, Digest},
    manifest::{MAX_FILES, ValidateOptions, validate},
};
use rayon::prelude::*;
use std::{
    fs::{self, File, Metadata},
    io::Read,
    path::{Path, PathBuf},
};
use url::Url;

/// Version of the layout of manifests made here, in `file_manifest_version`.
const FILE_MANIFEST_VERSION: &str = "v1";
/// Smallest and largest chunk chosen here, in bytes.
const CHUNK_SIZE_RANGE: (u64, u64) = (1 << 20, 1 << 30);
/// About how many chunks a model has, where its size allows: progress in objects is then shown in per mille.
const CHUNKS_WANTED: u64 = 1000;
/// Read at once while hashing.
const READ_BYTES: usize = 1 << 20;
/// Digits of the content's digest in a revision made here: 48 bits tell versions of one model apart.
const REVISION_DIGITS: usize = 12;

/// One file found in the folder.
struct Found {
    /// Relative to the folder, with `/`.
    path: String,
    /// Where its bytes are, links resolved.
    real: PathBuf,
    size_bytes: u64,
}

/// Hashes `folder`, with a progress bar on a terminal.
pub fn create(folder: &Path, args: &ModelArgs) -> Result<ManifestSpec, Failure> {
    let root = folder
        .canonicalize()
        .map_err(|e| Failure::Usage(format!("cannot read {}: {e}", folder.display())))?;
    if !root.is_dir() {
        return Err(Failure::Usage(format!("{} is not a folder", folder.display())));
    }
    let files = find(&root)?;
    let total: u64 = files.iter().map(|f| f.size_bytes).sum();
    let bar = output::bytes_bar(total, "hashing");
    // Big ones first: the last file to be hashed is then a small one.
    let mut order: Vec<usize> = (0..files.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(files[i].size_bytes));
    let hashed: Result<Vec<(usize, Digest)>, Failure> = order
        .par_iter()
        .map(|&i| Ok((i, hash(&files[i], &|n| bar.inc(n))?)))
        .collect();
    bar.finish_and_clear();
    let mut digests = vec![None; files.len()];
    for (i, digest) in hashed? {
        digests[i] = Some(digest);
    }
    let digests: Vec<Digest> = digests.into_iter().flatten().collect();
    let chunk_size = args.chunk_size.unwrap_or_else(|| chunk_size_for(total));
    let spec = ManifestSpec {
        model_id: Some(args.model_id.clone().unwrap_or_else(|| name_of(&root))),
        revision: Some(
            args.revision
                .clone()
                .unwrap_or_else(|| revision_of(&files, &digests)),
        ),
        format: Some(
            args.format
                .clone()
                .unwrap_or_else(|| format_of(&files).to_owned()),
        ),
        provider: Some(args.provider.clone().unwrap_or_else(|| "local".to_owned())),
        total_size_bytes: Some(total),
        file_manifest_version: Some(FILE_MANIFEST_VERSION.to_owned()),
        files: Some(
            files
                .iter()
                .zip(&digests)
                .map(|(file, digest)| {
                    Ok(FileSpec {
                        path: Some(file.path.clone()),
                        size_bytes: Some(file.size_bytes),
                        checksum: Some(format!("sha256:{digest}")),
                        download_url: Some(url_of(file, args.url_prefix.as_ref())?),
                        artifact: None,
                        chunk_layout: Some(ChunkLayout {
                            chunk_size_bytes: Some(chunk_size),
                            chunk_count: Some(file.size_bytes.div_ceil(chunk_size)),
                            object_prefix: None,
                        }),
                    })
                })
                .collect::<Result<_, Failure>>()?,
        ),
    };
    check(&spec)?;
    Ok(spec)
}

/// The model's name as a request repeats it beside the manifest.
pub fn model_of(spec: &ManifestSpec) -> ModelSpec {
    ModelSpec {
        model_id: spec.model_id.clone(),
        revision: spec.revision.clone(),
        format: spec.format.clone(),
        provider: spec.provider.clone(),
    }
}

/// Everything below `root`, sorted by path.
fn find(root: &Path) -> Result<Vec<Found>, Failure> {
    let mut files = Vec::new();
    for entry in walkdir::WalkDir::new(root).follow_links(true) {
        let entry = entry.map_err(|e| Failure::Usage(format!("cannot read the folder: {e}")))?;
        let at = entry.path();
        let kind = entry.file_type();
        if kind.is_dir() {
            continue;
        }
        if !kind.is_file() {
            return Err(Failure::Usage(format!(
                "{} is neither a file nor a folder: move it away",
                at.display()
            )));
        }
        let relative = at.strip_prefix(root).expect("the walk stays below its root");
        let path = relative
            .to_str()
            .ok_or_else(|| Failure::Usage(format!("the name of {} is not UTF-8: rename it", at.display())))?;
        let cannot = |e: &dyn std::fmt::Display| Failure::Usage(format!("cannot read {}: {e}", at.display()));
        files.push(Found {
            path: path.to_owned(),
            real: at.canonicalize().map_err(|e| cannot(&e))?,
            size_bytes: entry.metadata().map_err(|e| cannot(&e))?.len(),
        });
        if files.len() > MAX_FILES {
            return Err(Failure::Usage(format!(
                "{} holds more than {MAX_FILES} files, the limit",
                root.display()
            )));
        }
    }
    if files.is_empty() {
        return Err(Failure::Usage(format!("{} holds no file", root.display())));
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

fn version(meta: &Metadata) -> (u64, Option<std::time::SystemTime>) {
    (meta.len(), meta.modified().ok())
}

/// SHA-256 of a file that nobody changes meanwhile.
fn hash(found: &Found, progress: &dyn Fn(u64)) -> Result<Digest, Failure> {
    let cannot = |e: std::io::Error| Failure::Usage(format!("cannot read {}: {e}", found.real.display()));
    let mut file = File::open(&found.real).map_err(cannot)?;
    let before = version(&file.metadata().map_err(cannot)?);
    let mut hasher = Algorithm::Sha256.hasher();
    let mut buffer = vec![0; READ_BYTES.min(found.size_bytes as usize + 1)];
    let mut read = 0;
    loop {
        let n = file.read(&mut buffer).map_err(cannot)?;
        if n == 0 {
            break;
        }
        hasher.update(&buffer[..n]);
        read += n as u64;
        progress(n as u64);
    }
    let after = version(&fs::metadata(&found.real).map_err(cannot)?);
    if read != found.size_bytes || before != after || after.0 != read {
        return Err(Failure::Usage(format!(
            "{} changed while it was hashed: let nobody write to the folder, then try again",
            found.real.display()
        )));
    }
    Ok(hasher.finish())
}

/// A power of two that makes about [`CHUNKS_WANTED`] chunks.
fn chunk_size_for(total: u64) -> u64 {
    let (min, max) = CHUNK_SIZE_RANGE;
    total.div_ceil(CHUNKS_WANTED).clamp(min, max).next_power_of_two()
}

fn name_of(root: &Path) -> String {
    root.file_name()
        .map_or_else(|| "model".to_owned(), |n| n.to_string_lossy().into_owned())
}

/// The same content has the same revision, wherever it lies.
fn revision_of(files: &[Found], digests: &[Digest]) -> String {
    let mut hasher = Algorithm::Sha256.hasher();
    hasher.update(b"mooncakectl revision v1\0");
    for (file, digest) in files.iter().zip(digests) {
        hasher.update(&(file.path.len() as u64).to_be_bytes());
        hasher.update(file.path.as_bytes());
        hasher.update(digest.as_bytes());
    }
    hasher.finish().to_string()[..REVISION_DIGITS].to_owned()
}

/// By the kind of file that holds most of the bytes.
fn format_of(files: &[Found]) -> &'static str {
    const KNOWN: [(&str, &str); 7] = [
        ("safetensors", "safetensors"),
        ("gguf", "gguf"),
        ("bin", "pytorch"),
        ("pt", "pytorch"),
        ("pth", "pytorch"),
        ("onnx", "onnx"),
        ("engine", "tensorrt"),
    ];
    let format = |f: &Found| {
        let (_, extension) = f.path.rsplit_once('.')?;
        KNOWN
            .iter()
            .find(|(e, _)| e.eq_ignore_ascii_case(extension))
            .map(|(_, format)| *format)
    };
    let largest = files
        .iter()
        .filter_map(|f| Some((f.size_bytes, format(f)?)))
        .max_by_key(|(size, _)| *size);
    largest.map_or("files", |(_, format)| format)
}

fn url_of(file: &Found, prefix: Option<&Url>) -> Result<String, Failure> {
    match prefix {
        Some(prefix) => {
            let mut url = prefix.clone();
            match url.path_segments_mut() {
                Ok(mut segments) => segments.pop_if_empty().extend(file.path.split('/')),
                Err(()) => return Err(Failure::Usage(format!("{prefix} cannot be a prefix"))),
            };
            Ok(url.into())
        }
        None => Url::from_file_path(&file.real)
            .map(Into::into)
            .map_err(|()| Failure::Usage(format!("{} cannot be written as a URL", file.real.display()))),
    }
}

/// Whether a master would take it, without asking one.
fn check(spec: &ManifestSpec) -> Result<(), Failure> {
    let anyone = "node:1".to_owned();
    let request = CreateJobRequest {
        model: Some(model_of(spec)),
        manifest: Some(spec.clone()),
        seed_node_id: Some(anyone.clone()),
        target_nodes: Some(vec![anyone]),
        ..CreateJobRequest::default()
    };
    validate(
        request,
        ValidateOptions {
            require_checksums: true,
        },
    )
    .map(drop)
    .map_err(|faults| {
        let list: Vec<_> = faults
            .iter()
            .map(|f| format!("\n  {}: {}", f.pointer, f.detail))
            .collect();
        Failure::Usage(format!(
            "this folder cannot be distributed as it is:{}",
            list.concat()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_proto::manifest::MAX_CHUNKS;
    use std::os::unix::fs::symlink;

    fn folder() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("my-model");
        fs::create_dir_all(root.join("sub/deep")).unwrap();
        for (path, bytes) in [
            ("model.safetensors", &[7u8; 3000][..]),
            ("config.json", b"{}"),
            (".hidden", b"x"),
            ("empty", b""),
            ("sub/deep/odd name #1%?.bin", b"abc"),
        ] {
            fs::write(root.join(path), bytes).unwrap();
        }
        (dir, root)
    }

    fn paths(spec: &ManifestSpec) -> Vec<&str> {
        spec.files
            .as_ref()
            .unwrap()
            .iter()
            .map(|f| f.path.as_deref().unwrap())
            .collect()
    }

    #[test]
    fn everything_in_the_folder_is_in_the_manifest() {
        let (_dir, root) = folder();
        let spec = create(&root, &ModelArgs::default()).unwrap();
        assert_eq!(
            paths(&spec),
            [
                ".hidden",
                "config.json",
                "empty",
                "model.safetensors",
                "sub/deep/odd name #1%?.bin"
            ]
        );
        assert_eq!(spec.total_size_bytes, Some(3006));
        assert_eq!(
            (spec.model_id.as_deref(), spec.format.as_deref()),
            (Some("my-model"), Some("safetensors"))
        );
        let files = spec.files.as_ref().unwrap();
        let abc = &files[4];
        let sha = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(abc.checksum.as_deref(), Some(sha));
        let url = Url::parse(abc.download_url.as_deref().unwrap()).unwrap();
        assert_eq!(
            url.to_file_path().unwrap(),
            root.canonicalize().unwrap().join("sub/deep/odd name #1%?.bin")
        );
        assert_eq!(files[2].chunk_layout.as_ref().unwrap().chunk_count, Some(0));
    }

    #[test]
    fn the_revision_is_the_content() {
        let (_dir, root) = folder();
        let revision = |root: &Path| create(root, &ModelArgs::default()).unwrap().revision.unwrap();
        let first = revision(&root);
        assert_eq!(first.len(), REVISION_DIGITS);
        let moved = root.with_file_name("elsewhere");
        fs::rename(&root, &moved).unwrap();
        assert_eq!(revision(&moved), first);
        fs::write(moved.join(".hidden"), "y").unwrap();
        assert_ne!(revision(&moved), first);
    }

    #[test]
    fn urls_keep_odd_names() {
        let (_dir, root) = folder();
        let args = ModelArgs {
            url_prefix: Some(Url::parse("https://store/m%20x/").unwrap()),
            model_id: Some("org/m".into()),
            chunk_size: Some(1000),
            ..ModelArgs::default()
        };
        let spec = create(&root, &args).unwrap();
        let files = spec.files.as_ref().unwrap();
        let url = files[4].download_url.as_deref();
        assert_eq!(
            url,
            Some("https://store/m%20x/sub/deep/odd%20name%20%231%25%3F.bin")
        );
        assert_eq!(files[3].chunk_layout.as_ref().unwrap().chunk_count, Some(3));
        assert_eq!(spec.model_id.as_deref(), Some("org/m"));
    }

    #[test]
    fn links_are_followed_and_broken_ones_are_errors() {
        let (dir, root) = folder();
        let blob = dir.path().join("blob");
        fs::write(&blob, "linked").unwrap();
        symlink(&blob, root.join("link.bin")).unwrap();
        let spec = create(&root, &ModelArgs::default()).unwrap();
        let link = spec
            .files
            .unwrap()
            .into_iter()
            .find(|f| f.path.as_deref() == Some("link.bin"))
            .unwrap();
        assert_eq!(link.size_bytes, Some(6));
        assert!(
            link.download_url.unwrap().ends_with("/blob"),
            "the URL names where the bytes are"
        );
        symlink("nowhere", root.join("broken")).unwrap();
        assert!(
            create(&root, &ModelArgs::default())
                .unwrap_err()
                .to_string()
                .contains("broken")
        );
        fs::remove_file(root.join("broken")).unwrap();
        symlink(&root, root.join("loop")).unwrap();
        assert!(
            create(&root, &ModelArgs::default())
                .unwrap_err()
                .to_string()
                .contains("loop")
        );
    }

    #[test]
    fn folders_that_are_none() {
        let (dir, root) = folder();
        for bad in [dir.path().join("missing"), root.join("config.json")] {
            assert!(matches!(
                create(&bad, &ModelArgs::default()),
                Err(Failure::Usage(_))
            ));
        }
        let empty = dir.path().join("nothing");
        fs::create_dir(&empty).unwrap();
        assert!(
            create(&empty, &ModelArgs::default())
                .unwrap_err()
                .to_string()
                .contains("holds no file")
        );
        let control = root.join("bell\u{7}");
        fs::write(&control, "x").unwrap();
        assert!(
            create(&root, &ModelArgs::default())
                .unwrap_err()
                .to_string()
                .contains("control character")
        );
    }

    #[test]
    fn chunk_sizes() {
        assert_eq!(chunk_size_for(0), 1 << 20);
        assert_eq!(chunk_size_for(256 << 20), 1 << 20);
        assert_eq!(chunk_size_for(16 << 30), 32 << 20);
        for total in [1u64 << 30, 1 << 40, 1 << 45] {
            assert!(total.div_ceil(chunk_size_for(total)) < MAX_CHUNKS);
        }
    }
}
