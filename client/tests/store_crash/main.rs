//! The store's promise, under kills: never a final folder that is not whole, resume works, and what was
//! verified is lost only up to the bound. A child process (this binary again) writes and publishes a model
//! and is killed at every failpoint, and at random instants; after each kill the folder is examined by a
//! checker that knows the content and does not ask the store. The last tests break the store on purpose
//! and require that the checker notices.
//!
//! SIGKILL keeps the page cache and so says nothing about missing syncs; for those, module `power` shuts the
//! filesystem down under the store (needs root).

mod power;

use mooncake_client::store::{
    ArtifactState, BEGIN_FAILPOINTS, FLUSH_FAILPOINTS, NewArtifact, PUBLISH_FAILPOINTS, Store, StoreConfig,
    kill_at,
};
use mooncake_proto::{
    digest::{Algorithm, Digest},
    ids::ModelRef,
    manifest::{BlockMap, Checksum, Manifest, ManifestFile, ObjectIds, Seal, root},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

const BLOCK: u32 = 256 << 10;
/// Small, so that the bound on losses means something for a model of a few MiB.
const UNJOURNALED: u64 = 4 * BLOCK as u64;
const KILL: i32 = 9;
/// How often a process is killed at a random instant.
const RANDOM_KILLS: usize = 200;
/// How often the work on one copy is cut short before a new one is begun.
const KILLS_PER_MODEL: usize = 12;

/// Files of all kinds: several blocks, less than one, exactly one, empty, hidden, nested.
const FILES: [(&str, u64); 6] = [
    ("model-1.bin", 9 * BLOCK as u64 + 17),
    (".gitattributes", 53),
    ("sub/empty", 0),
    ("sub/deep/er/model-2.bin", 5 * BLOCK as u64),
    ("sub/one", BLOCK as u64),
    ("config.json", 700),
];

fn content(file: usize) -> Vec<u8> {
    let len = FILES[file].1 as usize;
    let mut x = (file as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        out.extend(x.to_le_bytes());
    }
    out.truncate(len);
    out
}

fn model() -> ModelRef {
    ModelRef {
        model_id: "org/m".into(),
        revision: "r".into(),
        format: "f".into(),
        provider: "p".into(),
    }
}

fn manifest() -> Manifest {
    let files: Vec<_> = FILES
        .iter()
        .map(|&(path, size_bytes)| {
            let chunk_count = size_bytes.div_ceil(100_000);
            ManifestFile {
                path: path.into(),
                size_bytes,
                checksum: Checksum::Opaque("dummy".into()),
                artifact_key: String::new(),
                chunk_size_bytes: 100_000,
                chunk_count,
                object_prefix: path.into(),
                objects: ObjectIds::derived(path, chunk_count),
            }
        })
        .collect();
    Manifest {
        model: model(),
        file_manifest_version: "1".into(),
        total_size_bytes: FILES.iter().map(|f| f.1).sum(),
        files,
    }
}

/// The right content, cut into blocks.
struct Truth {
    manifest: Arc<Manifest>,
    map: BlockMap,
    blocks: Vec<Vec<u8>>,
    digests: Vec<Digest>,
    seal: Seal,
}

fn truth() -> Truth {
    let manifest = Arc::new(manifest());
    let map = BlockMap::new(&manifest, BLOCK);
    let files: Vec<_> = (0..FILES.len()).map(content).collect();
    let blocks: Vec<_> = (0..map.len())
        .map(|b| {
            let range = map.locate(b).unwrap();
            files[range.file][range.offset as usize..][..range.len as usize].to_vec()
        })
        .collect();
    let algorithm = Algorithm::Blake3;
    let digests: Vec<_> = blocks.iter().map(|b| algorithm.digest(b)).collect();
    let root = root(algorithm, BLOCK, &manifest.digest(), &digests);
    Truth {
        manifest,
        map,
        blocks,
        digests,
        seal: Seal {
            block_size_bytes: BLOCK,
            algorithm,
            root,
        },
    }
}

fn open(root: &Path) -> Store {
    let config = StoreConfig {
        unjournaled_limit_bytes: UNJOURNALED,
        flush_interval: Duration::from_millis(20),
        ..StoreConfig::new(root)
    };
    Store::open(config).unwrap()
}

fn new(truth: &Truth) -> NewArtifact {
    NewArtifact {
        model: model(),
        generation: 1,
        manifest: truth.manifest.clone(),
        block_size: BLOCK,
        algorithm: Algorithm::Blake3,
    }
}

// ---- the child ----------------------------------------------------------------------------------------

const ENV_ROOT: &str = "STORE_CRASH_ROOT";
const ENV_KILL_AT: &str = "STORE_CRASH_KILL_AT";
/// Set: the mount point of a filesystem that is shut down before the kill.
const ENV_POWER: &str = "STORE_CRASH_POWER";
/// Rules to break, separated by commas.
const ENV_BREAK: &str = "STORE_CRASH_BREAK";

/// Not a test of its own: what the tests below start as a child process (they set the variables).
#[test]
fn worker_process() {
    let Ok(root) = std::env::var(ENV_ROOT) else { return };
    if let Ok(point) = std::env::var(ENV_KILL_AT) {
        let (name, nth) = point.split_once('#').unwrap();
        let shutdown = std::env::var(ENV_POWER).ok().map(PathBuf::from);
        let last_act = move || shutdown.iter().for_each(|mount| power::shut_down(mount));
        kill_at(name, nth.parse().unwrap(), last_act).unwrap();
    }
    let broken = std::env::var(ENV_BREAK).ok();
    for name in broken.iter().flat_map(|names| names.split(',')) {
        fail::cfg(name, "return").unwrap();
    }
    let truth = truth();
    let store = open(Path::new(&root));
    let artifact = store.begin(new(&truth)).unwrap();
    say("begun");
    for block in (0..artifact.blocks().len())
        .filter(|&b| !artifact.has(b))
        .collect::<Vec<_>>()
    {
        let mut bytes = truth.blocks[block as usize].clone();
        match broken.as_deref() {
            Some("write::skip_digest_check") if block == 3 => bytes[7] ^= 1,
            Some("publish::skip_checks") if block % 2 == 1 => continue,
            _ => {}
        }
        artifact
            .write_block(block, &truth.digests[block as usize], &bytes)
            .unwrap();
        say(&format!("block {block}"));
    }
    artifact.publish(&truth.seal).unwrap();
    say("published");
}

/// One line to the parent, in one write.
fn say(line: &str) {
    std::io::stderr()
        .write_all(format!("@{line}\n").as_bytes())
        .unwrap();
}

// ---- the parent ---------------------------------------------------------------------------------------

/// One test at a time: a process that one test forks would for a moment, until it runs the child's program,
/// share the lock of a store that another test has open.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn spawn(root: &Path, env: &[(&str, &str)]) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "worker_process", "--nocapture", "--test-threads=1"])
        .env(ENV_ROOT, root)
        .envs(env.iter().copied())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// What a child said before it ended, and how it ended.
struct Outcome {
    verified: BTreeSet<u32>,
    published: bool,
    killed: bool,
    said: Vec<String>,
}

/// Follows a child to its end; `on_line` sees each line as it comes, and may kill.
fn follow(mut child: Child, mut on_line: impl FnMut(&mut Child, usize)) -> Outcome {
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut said = Vec::new();
    for line in lines {
        said.push(line.unwrap());
        on_line(&mut child, said.iter().filter(|l| l.starts_with('@')).count());
    }
    let status = child.wait().unwrap();
    let killed = status.signal() == Some(KILL);
    assert!(
        killed || status.success(),
        "the child failed by itself: {said:#?}"
    );
    Outcome {
        verified: said
            .iter()
            .filter_map(|l| l.strip_prefix("@block ")?.parse().ok())
            .collect(),
        published: said.iter().any(|l| l == "@published"),
        killed,
        said,
    }
}

fn final_folder(root: &Path) -> PathBuf {
    root.join("p/org--m/r/f")
}

fn walk(folder: &Path, below: &str, out: &mut BTreeMap<String, Vec<u8>>) {
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let path = format!("{below}{}", entry.file_name().to_str().unwrap());
        if entry.file_type().unwrap().is_dir() {
            walk(&entry.path(), &format!("{path}/"), out);
        } else {
            out.insert(path, fs::read(entry.path()).unwrap());
        }
    }
}

/// Never a final folder that is not whole. Gives whether there is one.
fn check_final(root: &Path) -> Result<bool, String> {
    let folder = final_folder(root);
    if !folder.exists() {
        return Ok(false);
    }
    let mut got = BTreeMap::new();
    walk(&folder, "", &mut got);
    let want: BTreeMap<_, _> = FILES
        .iter()
        .enumerate()
        .map(|(i, f)| (f.0.to_owned(), content(i)))
        .collect();
    for (path, bytes) in &want {
        if got.get(path) != Some(bytes) {
            return Err(format!("{path} is missing or differs under the final name"));
        }
    }
    if got.len() != want.len() {
        Err(format!("too many files: {:?}", got.keys()))
    } else {
        Ok(true)
    }
}

/// After a kill: the final folder is whole or absent; `verified` is lost only up to the bound; what the
/// store holds has the right bytes.
fn check_after(root: &Path, truth: &Truth, verified: &BTreeSet<u32>) -> Result<BTreeSet<u32>, String> {
    let there = check_final(root)?;
    let store = open(root);
    let artifact = store.begin(new(truth)).map_err(|e| e.to_string())?;
    let staged = matches!(artifact.state(), ArtifactState::Staged { .. });
    if there != staged {
        return Err(format!(
            "final folder: {there}, but the store says staged: {staged}"
        ));
    }
    let held: BTreeSet<u32> = artifact.added(0).into_iter().collect();
    for &block in &held {
        if artifact.read_block(block).map_err(|e| e.to_string())? != truth.blocks[block as usize] {
            return Err(format!("block {block} is offered with wrong bytes"));
        }
    }
    let lost: u64 = verified
        .difference(&held)
        .map(|&b| u64::from(truth.map.locate(b).unwrap().len))
        .sum();
    if lost > UNJOURNALED {
        return Err(format!(
            "{lost} verified bytes were lost, the bound is {UNJOURNALED}"
        ));
    }
    Ok(held)
}

/// Goes on to the end, in this process: resume works, and leaves nothing behind.
fn finish(root: &Path, truth: &Truth) {
    let store = open(root);
    let artifact = store.begin(new(truth)).unwrap();
    for block in 0..truth.map.len() {
        artifact
            .write_block(
                block,
                &truth.digests[block as usize],
                &truth.blocks[block as usize],
            )
            .unwrap();
    }
    artifact.publish(&truth.seal).unwrap();
    drop((store, artifact));
    assert_eq!(check_final(root), Ok(true));
    let store = open(root);
    assert!(matches!(store.holdings()[0].state, ArtifactState::Staged { .. }));
    for folder in ["staging", "trash", "quarantine"] {
        let left: Vec<_> = fs::read_dir(root.join(".mooncake").join(folder))
            .unwrap()
            .collect();
        assert!(left.is_empty(), "{folder}: {left:?}");
    }
}

#[test]
fn killed_before_and_after_every_system_call() {
    let _alone = alone();
    let truth = truth();
    let all = BEGIN_FAILPOINTS
        .iter()
        .chain(FLUSH_FAILPOINTS)
        .chain(PUBLISH_FAILPOINTS);
    for name in all {
        // Points in loops are passed several times: also in the middle and late.
        for nth in [1, 2, 4] {
            let dir = tempfile::tempdir().unwrap();
            let point = format!("{name}#{nth}");
            let outcome = follow(spawn(dir.path(), &[(ENV_KILL_AT, &point)]), |_, _| ());
            if !outcome.killed {
                assert!(
                    nth > 1 && outcome.published,
                    "{name} is never passed: {:#?}",
                    outcome.said
                );
                assert_eq!(check_final(dir.path()), Ok(true));
                break;
            }
            check_after(dir.path(), &truth, &outcome.verified).unwrap_or_else(|why| panic!("{point}: {why}"));
            finish(dir.path(), &truth);
        }
    }
}

#[test]
fn killed_at_random_instants() {
    let _alone = alone();
    let truth = truth();
    let seed = std::env::var("STORE_CRASH_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or_else(|| {
            std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .unwrap()
                .as_nanos() as u64
        });
    println!("STORE_CRASH_SEED={seed}");
    let mut x = seed | 1;
    let mut random = |below: u64| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x % below
    };
    let (mut kills, mut partial, mut whole, mut renamed, mut on_this) = (0, 0, 0, 0, 0);
    let mut dir = tempfile::tempdir().unwrap();
    let mut left = u64::from(truth.map.len());
    for _ in 0..20 * RANDOM_KILLS {
        if kills >= RANDOM_KILLS {
            break;
        }
        // At a random line, and a while later that is short or long by chance: in the middle of a write, a
        // flush, a publish. Line 0 is before the first: while the store opens.
        let at = random(left.min(6) + 2) as usize;
        let magnitude = 6 + random(12);
        let delay = Duration::from_micros(random(1 << magnitude));
        let mut child = spawn(dir.path(), &[]);
        let kill = |child: &mut Child| {
            std::thread::sleep(delay);
            let _ = child.kill();
        };
        if at == 0 {
            kill(&mut child);
        }
        let outcome = follow(child, |child, line| {
            if line == at {
                kill(child);
            }
        });
        kills += usize::from(outcome.killed);
        let held = check_after(dir.path(), &truth, &outcome.verified)
            .unwrap_or_else(|why| panic!("seed {seed}, kill {kills}: {why}"));
        left = u64::from(truth.map.len()) - held.len() as u64;
        let there = check_final(dir.path()).unwrap();
        partial += usize::from(outcome.killed && left > 0 && !held.is_empty());
        whole += usize::from(outcome.killed && left == 0 && !there);
        renamed += usize::from(outcome.killed && there);
        on_this += 1;
        if there || on_this >= KILLS_PER_MODEL {
            finish(dir.path(), &truth);
            dir = tempfile::tempdir().unwrap();
            left = u64::from(truth.map.len());
            on_this = 0;
        }
    }
    println!("{kills} kills: {partial} with some blocks, {whole} before the rename, {renamed} after it");
    assert!(
        kills >= RANDOM_KILLS,
        "only {kills} processes were hit before they ended"
    );
    // The moment after the rename is short; the failpoints are what covers it.
    assert!(
        partial > 0 && whole > 0,
        "kills at {partial}, {whole}, {renamed}: not everywhere"
    );
}

// ---- the checker is checked ---------------------------------------------------------------------------

/// Runs the child with one rule broken and gives what the checker says.
fn with_broken(rule: &str, env: &[(&str, &str)]) -> Result<BTreeSet<u32>, String> {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let env: Vec<_> = env.iter().copied().chain([(ENV_BREAK, rule)]).collect();
    let outcome = follow(spawn(dir.path(), &env), |_, _| ());
    check_after(dir.path(), &truth(), &outcome.verified)
}

#[test]
fn a_publish_without_its_checks_is_noticed() {
    let error = with_broken("publish::skip_checks", &[]).unwrap_err();
    assert!(error.contains("under the final name"), "{error}");
}

#[test]
fn a_write_without_its_digest_check_is_noticed() {
    let error = with_broken("write::skip_digest_check", &[]).unwrap_err();
    assert!(error.contains("under the final name"), "{error}");
}

#[test]
fn a_flush_that_journals_nothing_is_noticed() {
    let error = with_broken("flush::skip_append", &[(ENV_KILL_AT, "publish::begin#1")]).unwrap_err();
    assert!(error.contains("verified bytes were lost"), "{error}");
}

// ---- failures that are no crash -------------------------------------------------------------------------

/// Turns a failpoint on for as long as it lives.
struct Broken(&'static str);

impl Broken {
    fn new(name: &'static str) -> Self {
        fail::cfg(name, "return").unwrap();
        Self(name)
    }
}

impl Drop for Broken {
    fn drop(&mut self) {
        fail::remove(self.0);
    }
}

#[test]
fn after_a_failed_sync_only_the_journal_is_believed() {
    let _alone = alone();
    let truth = truth();
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let artifact = store.begin(new(&truth)).unwrap();
    let write = |block: u32| {
        artifact.write_block(
            block,
            &truth.digests[block as usize],
            &truth.blocks[block as usize],
        )
    };
    write(0).unwrap();
    artifact.flush().unwrap();
    let broken = Broken::new("flush::fail_sync");
    write(1).unwrap();
    assert!(artifact.flush().is_err(), "by the flusher's hand or by ours");
    assert!(artifact.closed().is_some());
    assert!(store.find(&model()).is_none() && store.holdings().is_empty());
    assert!(write(2).is_err() && artifact.publish(&truth.seal).is_err());
    drop(broken);
    // The kernel may hold block 1 in its cache without ever having written it: it is fetched again.
    let again = store.begin(new(&truth)).unwrap();
    assert_eq!(again.added(0), [0]);
    drop((again, artifact, store));
    finish(dir.path(), &truth);
}

#[test]
fn where_space_cannot_be_allocated_it_is_booked() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let _broken = Broken::new("begin::cannot_allocate");
    let size = store.free_bytes().unwrap() / 100 * 60;
    let sized = |id: &str| {
        let mut manifest = manifest();
        manifest.model.model_id = id.into();
        manifest.files.truncate(1);
        let file = &mut manifest.files[0];
        (file.size_bytes, file.chunk_size_bytes, file.chunk_count) = (size, size, 1);
        file.objects = ObjectIds::derived("x", 1);
        manifest.total_size_bytes = size;
        NewArtifact {
            model: manifest.model.clone(),
            generation: 1,
            manifest: Arc::new(manifest),
            block_size: 4 << 20,
            algorithm: Algorithm::Blake3,
        }
    };
    let first = store.begin(sized("first")).unwrap();
    let error = store.begin(sized("second")).unwrap_err();
    assert_eq!(error.code(), "disk_full", "each fits alone, both do not: {error}");
    assert_eq!(store.holdings().len(), 1);
    store.remove_staging(first.model()).unwrap();
    store.begin(sized("second")).unwrap();
}
