//! The life of one run: its number, its folder, and the removal of all it made, whatever happens.
//!
//! A run is a file `/run/mooncake-testbed/<number>.json` that names its owner (process id and start time, so that
//! a reused id is not taken for it) and its folder. Everything else follows from the number: network namespaces
//! are `mt<number>-…`, the one interface in the default namespace is `mt<number>`, mounts are below the folder.
//! So anybody can remove what a dead owner left, and [`Run::begin`] does it every time.
//!
//! A run is removed when it is dropped, on SIGINT and SIGTERM, and after SIGKILL by the next run or `testbed clean`
//! (its processes end with it at once, the kernel sees to that).
//! Not guaranteed: that a process which left its namespace or ignores its death signal is found.

use super::namespace::command;
use anyhow::{Context, Result, bail, ensure};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::{Path, PathBuf},
    sync::Once,
};

const REGISTRY: &str = "/run/mooncake-testbed";
/// 198.18.0.0/15 (RFC 2544, for tests of network devices) holds this many networks of 256 addresses.
const RUNS: u16 = 512;

/// Runs of this process that are not removed yet.
static LIVE: Mutex<BTreeMap<u16, PathBuf>> = Mutex::new(BTreeMap::new());

/// What a program still wants to do when a signal ends it.
type LastWords = Box<dyn FnOnce() + Send>;
static LAST_WORDS: Mutex<Option<LastWords>> = Mutex::new(None);

/// SIGINT and SIGTERM do this before they remove this process's runs and end it: print what was measured so far. It
/// must not wait for other threads. Replaces an earlier one.
pub fn before_removal(words: impl FnOnce() + Send + 'static) {
    *LAST_WORDS.lock() = Some(Box::new(words));
}

/// A number and a folder that nobody else has.
#[derive(Debug)]
pub struct Run {
    number: u16,
    dir: PathBuf,
    keep: bool,
}

impl Run {
    /// Removes dead runs, then claims a number.
    pub fn begin() -> Result<Self> {
        ensure!(
            rustix::process::geteuid().is_root(),
            "the testbed makes network namespaces and mounts: run it as root"
        );
        let _turn = turn()?;
        clean_in_turn()?;
        remove_on_signals()?;
        let me = std::process::id();
        let ours = Path::new(REGISTRY).join(format!(".{me}.tmp"));
        for offset in 0..RUNS {
            let number = (me as u16).wrapping_add(offset) % RUNS;
            let dir = std::env::temp_dir().join(format!("mooncake-testbed-{number}"));
            let owner = json!({"pid": me, "start_time": start_time(me), "dir": dir});
            fs::write(&ours, owner.to_string())?;
            // A link appears with its content or not at all, and only for one.
            let claimed = fs::hard_link(&ours, record(number));
            fs::remove_file(&ours)?;
            match claimed {
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => continue,
                other => other.with_context(|| format!("cannot write to {REGISTRY}"))?,
            }
            LIVE.lock().insert(number, dir.clone());
            let run = Self {
                number,
                dir,
                keep: false,
            };
            match fs::remove_dir_all(&run.dir) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e.into()),
                _ => fs::create_dir(&run.dir)?,
            }
            return Ok(run);
        }
        bail!("all {RUNS} runs of this machine are taken: see {REGISTRY}")
    }

    /// Its number.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Its folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The name of something of this run: an interface name, so at most 15 bytes.
    pub fn name(&self, what: &str) -> String {
        format!("{}-{what}", prefix(self.number))
    }

    /// Name of the run's interface in the default namespace.
    pub fn door(&self) -> String {
        prefix(self.number)
    }

    /// Leaves the folder when the run is removed.
    pub fn keep_folder(&mut self) {
        self.keep = true;
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // The signal thread may have been first.
        if LIVE.lock().remove(&self.number).is_some()
            && let Err(e) = remove(self.number, &self.dir, self.keep)
        {
            eprintln!("testbed {}: not all of it could be removed: {e:#}", self.number);
        }
    }
}

fn prefix(number: u16) -> String {
    format!("mt{number}")
}

fn record(number: u16) -> PathBuf {
    Path::new(REGISTRY).join(format!("{number}.json"))
}

/// Waits for the turn to make and to remove runs: two who remove the same dead run at once, or one who reads a record
/// that is being written, would fail over each other. It ends with the file.
fn turn() -> Result<File> {
    fs::create_dir_all(REGISTRY).with_context(|| format!("cannot make {REGISTRY}: is this root?"))?;
    let file = File::create(Path::new(REGISTRY).join("turn"))?;
    file.lock()?;
    Ok(file)
}

/// Removes every run whose owner is dead; their numbers.
pub fn clean() -> Result<Vec<u16>> {
    let _turn = turn()?;
    clean_in_turn()
}

fn clean_in_turn() -> Result<Vec<u16>> {
    let mut removed = Vec::new();
    for (number, owner) in runs()? {
        let pid = owner["pid"].as_u64().unwrap_or(0) as u32;
        if start_time(pid).is_some_and(|t| owner["start_time"] == t) {
            continue;
        }
        let dir = PathBuf::from(owner["dir"].as_str().unwrap_or_default());
        remove(number, &dir, false).with_context(|| format!("cannot remove the dead run {number}"))?;
        removed.push(number);
    }
    Ok(removed)
}

/// All runs with their records.
pub fn runs() -> Result<Vec<(u16, Value)>> {
    let Ok(entries) = fs::read_dir(REGISTRY) else {
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let number = path.file_stem().and_then(|s| s.to_str()?.parse().ok());
        if let (Some(number), Ok(text)) = (number, fs::read_to_string(&path)) {
            let owner = serde_json::from_str(&text)
                .with_context(|| format!("{} is damaged; remove it by hand", path.display()))?;
            found.push((number, owner));
        }
    }
    Ok(found)
}

/// When a process started, in ticks since boot; `None` if there is none.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything; field 22 is the 20th after it (proc_pid_stat(5)).
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// Processes, mounts, namespaces, folder, record, in this order.
fn remove(number: u16, dir: &Path, keep: bool) -> Result<()> {
    let ours = format!("{}-", prefix(number));
    let namespaces: Vec<String> = fs::read_dir("/run/netns")
        .into_iter()
        .flatten()
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .filter(|n| n.starts_with(&ours))
        .collect();
    for namespace in &namespaces {
        for pid in command("ip", &["netns", "pids", namespace], "")?.split_whitespace() {
            let pid = pid.parse()?;
            if pid != std::process::id() as i32
                && let Some(pid) = rustix::process::Pid::from_raw(pid)
            {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
    }
    for mount in mounts_below(dir)? {
        let path = mount.display().to_string();
        // Lazily, if a killed process is still on its way out.
        let unmounted = command("umount", &[&path], "").or_else(|_| command("umount", &["-l", &path], ""));
        // Whoever mounted it may have been faster, where a signal removes the run beside its owner.
        if unmounted.is_err() && mounts_below(dir)?.contains(&mount) {
            unmounted?;
        }
    }
    // Gone with its namespace too, but some time later.
    let _ = command("ip", &["link", "del", &prefix(number)], "");
    for namespace in &namespaces {
        command("ip", &["netns", "del", namespace], "")?;
    }
    if !keep && dir.starts_with("/") && dir.components().count() > 2 {
        match fs::remove_dir_all(dir) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e.into()),
            _ => {}
        }
    }
    match fs::remove_file(record(number)) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e.into()),
        _ => Ok(()),
    }
}

/// Deepest last mounted first.
fn mounts_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found: Vec<PathBuf> = fs::read_to_string("/proc/self/mounts")?
        .lines()
        .filter_map(|l| l.split(' ').nth(1))
        .map(PathBuf::from)
        .filter(|p| p.starts_with(dir) && p != dir)
        .collect();
    found.reverse();
    Ok(found)
}

/// Once per process: SIGINT and SIGTERM remove all runs of this process and end it, as they would without us.
fn remove_on_signals() -> Result<()> {
    static ONCE: Once = Once::new();
    let mut started = Ok(());
    ONCE.call_once(|| {
        started = std::thread::Builder::new()
            .name("testbed-signals".into())
            .spawn(wait_for_signal)
            .map(drop);
    });
    Ok(started?)
}

fn wait_for_signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => return eprintln!("testbed: signals will not remove the run: {e}"),
    };
    let code = runtime.block_on(async {
        let (Ok(mut int), Ok(mut term)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
        else {
            return None;
        };
        tokio::select! {
            _ = int.recv() => Some(130),
            _ = term.recv() => Some(143),
        }
    });
    let Some(code) = code else {
        return eprintln!("testbed: signals will not remove the run: no handler could be set");
    };
    if let Some(words) = LAST_WORDS.lock().take() {
        words();
    }
    // Held to the end: nobody begins or drops a run any more.
    let mut live = LIVE.lock();
    for (number, dir) in std::mem::take(&mut *live) {
        if let Err(e) = remove(number, &dir, false) {
            eprintln!("testbed {number}: not all of it could be removed: {e:#}");
        }
    }
    // _exit: destructors of other threads would work on what is gone.
    // SAFETY: ends the process, touches nothing.
    unsafe { libc::_exit(code) }
}
