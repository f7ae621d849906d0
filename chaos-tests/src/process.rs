//! One process of the product (or of the testbed), which can be killed, frozen and started again.

use crate::testbed::Namespace;
use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use std::{
    fs::File,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

const POLL: Duration = Duration::from_millis(20);

/// One process that can be killed and started again with the same arguments.
///
/// The kernel ends it when the *thread* that started it ends (however the test ends), so start it from a thread
/// that lives as long as it: a test's own or a runtime's worker, never from `spawn_blocking`.
pub struct Process {
    /// `master-1`, `client-0`.
    pub name: String,
    program: PathBuf,
    args: Vec<String>,
    env: Vec<(String, String)>,
    namespace: Option<Namespace>,
    log: PathBuf,
    child: Option<Child>,
}

impl Process {
    /// A process that is not started yet; it appends to `<dir>/<name>.log`.
    pub fn new(dir: &Path, name: &str, program: PathBuf, args: Vec<String>) -> Self {
        Self {
            name: name.to_owned(),
            program,
            args,
            env: Vec::new(),
            namespace: None,
            log: dir.join(format!("{name}.log")),
            child: None,
        }
    }

    /// Another process that is not started yet, with the same program, environment and place, and with its own name, log
    /// and arguments.
    pub fn successor(&self, dir: &Path, name: &str, args: Vec<String>) -> Self {
        let mut process = Self::new(dir, name, self.program.clone(), args);
        process.env.clone_from(&self.env);
        process.in_namespace(self.namespace.clone())
    }

    /// Its arguments.
    pub fn args(&self) -> &[String] {
        &self.args
    }

    /// It will run in this network namespace.
    pub fn in_namespace(mut self, namespace: Option<Namespace>) -> Self {
        self.namespace = namespace;
        self
    }

    /// Sets a variable of its environment, from its next start on.
    pub fn set_env(&mut self, name: &str, value: impl Into<String>) {
        self.env.retain(|(n, _)| n != name);
        self.env.push((name.to_owned(), value.into()));
    }

    /// What it runs from its next start on, as in an upgrade.
    pub fn set_program(&mut self, program: PathBuf) {
        self.program = program;
    }

    /// Its arguments, from its next start on.
    pub fn args_mut(&mut self) -> &mut Vec<String> {
        &mut self.args
    }

    /// Starts it (again).
    pub fn start(&mut self) -> Result<()> {
        self.start_with(&[])
    }

    /// Starts it (again) with arguments added.
    pub fn start_with(&mut self, more: &[String]) -> Result<()> {
        ensure!(self.child.is_none(), "{} is already running", self.name);
        let log = File::options().create(true).append(true).open(&self.log)?;
        let mut command = Command::new(&self.program);
        for (name, _) in std::env::vars_os() {
            if changes_behaviour(&name.to_string_lossy()) {
                command.env_remove(name);
            }
        }
        command
            .args(&self.args)
            .args(more)
            .env("RUST_LOG", "info")
            .envs(self.env.iter().map(|(n, v)| (n, v)))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        if let Some(namespace) = &self.namespace {
            namespace.enter_on_exec(&mut command)?;
        }
        // SAFETY: prctl is async-signal-safe. It makes the kernel end the process with this test, however the
        // test ends.
        unsafe {
            command.pre_exec(|| {
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).map_err(Into::into)
            });
        }
        let child = command.spawn().with_context(|| {
            format!(
                "cannot start {}: build the binaries first (cargo build --workspace)",
                self.program.display()
            )
        })?;
        self.child = Some(child);
        Ok(())
    }

    /// SIGKILL, and waits until it is gone.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        rustix::process::kill_process(self.rustix_pid()?, signal)?;
        Ok(())
    }

    /// SIGSTOP: it stands still, its kernel goes on to accept connections and to acknowledge bytes.
    pub fn freeze(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// SIGCONT.
    pub fn thaw(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// SIGTERM, then waits for the exit status.
    pub async fn terminate(&mut self, deadline: Duration) -> Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        self.wait_exit(deadline).await
    }

    /// Waits for it to end by itself.
    pub async fn wait_exit(&mut self, deadline: Duration) -> Result<ExitStatus> {
        let until = Instant::now() + deadline;
        loop {
            let child = self.child.as_mut().context("not running")?;
            if let Some(status) = child.try_wait()? {
                self.child = None;
                return Ok(status);
            }
            ensure!(
                Instant::now() < until,
                "{} did not end within {deadline:?}\n{}",
                self.name,
                self.log_tail()
            );
            tokio::time::sleep(POLL).await;
        }
    }

    /// Its process id.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    fn rustix_pid(&self) -> Result<rustix::process::Pid> {
        let pid = self
            .pid()
            .with_context(|| format!("{} is not running", self.name))?;
        rustix::process::Pid::from_raw(pid as i32).context("pid 0")
    }

    /// Whether it runs now.
    pub fn is_running(&mut self) -> bool {
        self.child
            .as_mut()
            .is_some_and(|c| matches!(c.try_wait(), Ok(None)))
    }

    /// Peak resident memory so far, in bytes (`VmHWM`).
    pub fn peak_memory_bytes(&self) -> Result<u64> {
        let pid = self.pid().context("not running")?;
        peak_memory_bytes(pid)
    }

    /// Starts a new measurement of [`peak_memory_bytes`](Self::peak_memory_bytes).
    pub fn reset_peak_memory(&self) -> Result<()> {
        let pid = self.pid().context("not running")?;
        // 5 sets the high-water mark to what is resident now (proc_pid_clear_refs(5)).
        std::fs::write(format!("/proc/{pid}/clear_refs"), "5")?;
        Ok(())
    }

    /// Everything it logged.
    pub fn log(&self) -> String {
        std::fs::read(&self.log)
            .map(|b| String::from_utf8_lossy(&b).into_owned())
            .unwrap_or_default()
    }

    /// Waits until it has logged `text`.
    pub async fn wait_log(&self, text: &str, deadline: Duration) -> Result<()> {
        let until = Instant::now() + deadline;
        while !self.log().contains(text) {
            ensure!(
                Instant::now() < until,
                "{} does not log '{text}' within {deadline:?}\n{}",
                self.name,
                self.log_tail()
            );
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// The end of its log, for messages.
    pub fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<_> = log.lines().collect();
        let from = lines.len().saturating_sub(25);
        format!(
            "--- end of the log of {} ---\n{}",
            self.name,
            lines[from..].join("\n")
        )
    }
}

/// Peak resident memory of a process so far, in bytes (`VmHWM`).
pub fn peak_memory_bytes(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix("VmHWM:"))
        .context("no VmHWM")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").trim().parse()?;
    Ok(kib << 10)
}

/// Variables of whoever runs the tests that the processes under test would obey.
fn changes_behaviour(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    name.ends_with("_PROXY") || name.starts_with("MOONCAKE_") || name.starts_with("SSL_CERT_")
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What a testbed runs.
const PRODUCT: [&str; 3] = ["mooncake_master", "mooncake_client", "mooncakectl"];

/// Makes sure that the product's binaries are beside this program and up to date: `cargo run` builds only the package
/// it runs. Under cargo they are built now, in this program's profile; otherwise they must be there. Programs call this
/// first, tests are built together with them.
pub fn build_product() -> Result<()> {
    let folder = binary_path("")?;
    let (cargo, manifest) = (std::env::var_os("CARGO"), std::env::var_os("CARGO_MANIFEST_DIR"));
    if let (Some(cargo), Some(manifest)) = (cargo, manifest) {
        let mut command = Command::new(cargo);
        // The whole workspace selected, so that dependencies have the features that every other build gives them.
        command.args(["build", "--quiet", "--workspace"]);
        for binary in PRODUCT {
            command.args(["--bin", binary]);
        }
        if folder.ends_with("release") {
            command.arg("--release");
        }
        // What `cargo run` says of this package would make build scripts, and what depends on them, run again.
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
                command.env_remove(&*name);
            }
        }
        if let Some(target) = folder.parent() {
            command.arg("--target-dir").arg(target);
        }
        // Whatever cargo says goes where it can be seen without mixing with this program's output.
        let status = command
            .current_dir(manifest)
            .stdin(Stdio::null())
            .stdout(std::io::stderr())
            .status()
            .with_context(|| format!("cannot run {command:?}"))?;
        ensure!(
            status.success(),
            "the product's binaries could not be built, {status}: see above; the command was {command:?}"
        );
    }
    for binary in PRODUCT {
        let path = folder.join(binary);
        ensure!(
            path.exists(),
            "{} is missing: this program runs the product's binaries from its own folder; build them with `cargo build \
             --workspace --bins` in the same profile, or start this program with `cargo run`",
            path.display()
        );
    }
    Ok(())
}

/// The binary from the target folder this test was built into.
pub fn binary_path(name: &str) -> Result<PathBuf> {
    let exe = std::env::current_exe()?;
    let folder = exe
        .ancestors()
        .find(|d| d.ends_with("debug") || d.ends_with("release"));
    Ok(folder
        .context("this test does not run from a target folder")?
        .join(name))
}
