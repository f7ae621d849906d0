//! Model folders and the requests that distribute them.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

/// Written at once; a multiple of 8.
const NOISE_BYTES: usize = 1 << 20;

/// A model folder and how it is named.
#[derive(Clone, Debug)]
pub struct Model {
    /// Its source folder.
    pub folder: PathBuf,
    /// `model_id`.
    pub id: String,
    /// Chunk size of its manifest.
    pub chunk_size: u64,
}

impl Model {
    /// Writes files of the given sizes (`path`, bytes) with content that never repeats.
    pub fn create(folder: &Path, id: &str, files: &[(&str, u64)]) -> Result<Self> {
        for (path, size) in files {
            let path = folder.join(path);
            fs::create_dir_all(path.parent().expect("below the folder"))?;
            write_noise(&path, *size)?;
        }
        Ok(Self {
            folder: folder.to_owned(),
            id: id.to_owned(),
            chunk_size: 1 << 20,
        })
    }

    /// Takes an existing folder.
    pub fn existing(folder: &Path, id: &str) -> Self {
        Self {
            folder: folder.to_owned(),
            id: id.to_owned(),
            chunk_size: 4 << 20,
        }
    }

    /// Relative paths with their content digests, sorted.
    pub fn files(&self) -> Result<BTreeMap<String, (u64, String)>> {
        tree(&self.folder)
    }

    /// Sum of the files' sizes.
    pub fn total_bytes(&self) -> Result<u64> {
        Ok(self.files()?.values().map(|(size, _)| size).sum())
    }

    /// A create request: sources are below `base` (a folder or a URL), seed and targets are node ids.
    pub fn request(&self, job_id: &str, base: &str, seed: &str, targets: &[&str]) -> Result<Value> {
        let mut files = Vec::new();
        for (n, (path, (size, digest))) in self.files()?.into_iter().enumerate() {
            let mut file = json!({
                "path": path,
                "size_bytes": size,
                "checksum": format!("sha256:{digest}"),
                "download_url": format!("{base}/{path}"),
            });
            if size > 0 {
                file["chunk_layout"] = json!({
                    "chunk_size_bytes": self.chunk_size,
                    "chunk_count": size.div_ceil(self.chunk_size),
                    "object_prefix": format!("{}/r1/{n}", self.id),
                });
            }
            files.push(file);
        }
        let names = json!({"model_id": self.id, "revision": "r1", "format": "bin", "provider": "test"});
        let mut manifest = names.clone();
        manifest["total_size_bytes"] = json!(self.total_bytes()?);
        manifest["file_manifest_version"] = json!("v1");
        manifest["files"] = json!(files);
        Ok(json!({
            "job_id": job_id,
            "model": names,
            "manifest": manifest,
            "seed_node_id": seed,
            "target_nodes": targets,
        }))
    }

    /// Checks that `staged` has exactly this model's files, byte for byte.
    pub fn assert_equal(&self, staged: &str) -> Result<()> {
        let (want, got) = (self.files()?, tree(Path::new(staged))?);
        ensure!(
            want == got,
            "{staged} differs from {}:\n want {want:?}\n got  {got:?}",
            self.folder.display()
        );
        Ok(())
    }
}

/// A model and the request for it, with ids and addresses left out: its digests are made once.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The model.
    pub model: Model,
    body: Value,
}

impl Prepared {
    /// Reads the whole model for its digests.
    pub fn of(model: Model) -> Result<Self> {
        let body = model.request("", "", "", &[])?;
        Ok(Self { model, body })
    }

    /// The same content in chunks of another size.
    pub fn in_chunks_of(&self, chunk_bytes: u64) -> Result<Self> {
        let mut other = self.clone();
        other.model.chunk_size = chunk_bytes;
        for file in other.body["manifest"]["files"]
            .as_array_mut()
            .context("no files")?
        {
            let size = file["size_bytes"].as_u64().context("no size")?;
            if size > 0 {
                file["chunk_layout"]["chunk_size_bytes"] = json!(chunk_bytes);
                file["chunk_layout"]["chunk_count"] = json!(size.div_ceil(chunk_bytes));
            }
        }
        Ok(other)
    }

    /// The request: sources are below `base` (a folder or a URL), seed and targets are node ids.
    pub fn request(&self, job: &str, base: &str, seed: &str, targets: &[String]) -> Result<Value> {
        let mut body = self.body.clone();
        body["job_id"] = json!(job);
        body["seed_node_id"] = json!(seed);
        body["target_nodes"] = json!(targets);
        for file in body["manifest"]["files"].as_array_mut().context("no files")? {
            let url = format!("{base}/{}", file["path"].as_str().context("no path")?);
            file["download_url"] = json!(url);
        }
        Ok(body)
    }
}

/// Relative paths below `folder` with size and SHA-256.
pub fn tree(folder: &Path) -> Result<BTreeMap<String, (u64, String)>> {
    let mut out = BTreeMap::new();
    for entry in walkdir::WalkDir::new(folder).min_depth(1) {
        let entry = entry?;
        if entry.file_type().is_dir() {
            continue;
        }
        ensure!(
            entry.file_type().is_file(),
            "{} is not a regular file",
            entry.path().display()
        );
        let path = entry
            .path()
            .strip_prefix(folder)?
            .to_str()
            .expect("test paths are UTF-8")
            .to_owned();
        out.insert(path, (entry.metadata()?.len(), sha256_file(entry.path())?));
    }
    Ok(out)
}

/// Hex SHA-256 of a file.
pub fn sha256_file(path: &Path) -> Result<String> {
    let mut file = fs::File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            return Ok(hasher.finalize().iter().map(|b| format!("{b:02x}")).collect());
        }
        hasher.update(&buffer[..n]);
    }
}

/// Every final folder below a client's root: the only folders a server would load a model from.
pub fn final_folders(root: &Path) -> Vec<PathBuf> {
    let at_depth = |depth| walkdir::WalkDir::new(root).min_depth(depth).max_depth(depth);
    at_depth(4)
        .into_iter()
        .filter_map(Result::ok)
        .filter(|e| e.file_type().is_dir())
        .map(|e| e.into_path())
        .filter(|p| p.strip_prefix(root).is_ok_and(|p| !p.starts_with(".mooncake")))
        .collect()
}

/// Bytes that do not repeat, within one test process or across its calls (xorshift64*, Vigna 2016).
fn write_noise(path: &Path, size: u64) -> Result<()> {
    static SEED: AtomicU64 = AtomicU64::new(0x9E37_79B9_7F4A_7C15);
    let mut x = SEED.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed) | 1;
    let mut file = fs::File::create(path)?;
    let mut piece = Vec::with_capacity(NOISE_BYTES);
    let mut left = size;
    while left > 0 {
        piece.clear();
        while piece.len() < NOISE_BYTES {
            x ^= x >> 12;
            x ^= x << 25;
            x ^= x >> 27;
            piece.extend_from_slice(&x.wrapping_mul(0x2545_F491_4F6C_DD1D).to_le_bytes());
        }
        piece.truncate(left.min(NOISE_BYTES as u64) as usize);
        file.write_all(&piece)?;
        left -= piece.len() as u64;
    }
    Ok(())
}

/// The files of models that a client is still receiving, each in a folder of its own below its root.
pub fn staging_folders(root: &Path) -> Vec<PathBuf> {
    stagings(root).into_iter().map(|s| s.join("data")).collect()
}

fn stagings(root: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(root.join(".mooncake/staging")) else {
        return Vec::new();
    };
    entries.filter_map(Result::ok).map(|e| e.path()).collect()
}

/// Blocks that the journals of a client's unfinished models have recorded, which a killed client still has when it
/// comes back. The journal may grow meanwhile: what is given is the least that is there later. With several models,
/// block numbers of different models are in one list.
pub fn journaled_blocks(root: &Path) -> Result<Vec<u32>> {
    /// The client's frozen format: a header, then records of kind (1), zero (3), block (4), digest and checksum.
    const HEADER_BYTES: usize = 64;
    const RECORD_BYTES: usize = 44;
    const KIND_FORGOTTEN: u8 = 2;
    let mut all = Vec::new();
    for staging in stagings(root) {
        let bytes = match fs::read(staging.join("journal")) {
            Ok(bytes) => bytes,
            // Not begun yet, or published meanwhile.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e.into()),
        };
        let mut blocks = std::collections::BTreeSet::new();
        // A record that is being written is not whole yet.
        for record in bytes
            .get(HEADER_BYTES..)
            .unwrap_or_default()
            .chunks_exact(RECORD_BYTES)
        {
            let block = u32::from_le_bytes(record[4..8].try_into()?);
            if record[0] == KIND_FORGOTTEN {
                blocks.remove(&block);
            } else {
                blocks.insert(block);
            }
        }
        all.extend(blocks);
    }
    Ok(all)
}
