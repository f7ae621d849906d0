//! Network namespaces by name, and how a program, a thread or a whole runtime gets into one.

use anyhow::{Context, Result, ensure};
use std::{
    fs::File,
    io::{self, Write},
    os::{fd::AsRawFd, unix::process::CommandExt},
    path::PathBuf,
    process::{Command, Stdio},
};
use tokio::runtime::Runtime;

/// A network namespace that `ip netns` knows under this name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    name: String,
}

impl Namespace {
    /// Makes it.
    pub fn create(name: &str) -> Result<Self> {
        command("ip", &["netns", "add", name], "")?;
        Ok(Self {
            name: name.to_owned(),
        })
    }

    /// For `ip netns exec NAME …`.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn open(&self) -> Result<File> {
        let path = PathBuf::from("/run/netns").join(&self.name);
        File::open(&path).with_context(|| format!("the network namespace {} is gone", path.display()))
    }

    /// The program that `command` starts will run in it.
    pub fn enter_on_exec(&self, command: &mut Command) -> Result<()> {
        let file = self.open()?;
        // SAFETY: setns is async-signal-safe; the closure owns the open file.
        unsafe { command.pre_exec(move || enter(&file)) };
        Ok(())
    }

    /// Runs a tool of the system in it to its end.
    pub fn run(&self, program: &str, args: &[&str], input: &str) -> Result<String> {
        let mut command = Command::new(program);
        command.args(args);
        self.enter_on_exec(&mut command)?;
        finish(command, input).with_context(|| format!("in the network namespace {}", self.name))
    }

    /// Runs lines of `ip` in it.
    pub fn ip(&self, lines: &[String]) -> Result<()> {
        command("ip", &["-n", &self.name, "-batch", "-"], &lines.join("\n"))?;
        Ok(())
    }

    /// Runs lines of `tc` in it.
    pub fn tc(&self, lines: &[String]) -> Result<()> {
        command("tc", &["-n", &self.name, "-batch", "-"], &lines.join("\n"))?;
        Ok(())
    }

    /// A runtime with one worker whose sockets are all in this namespace. To end it from asynchronous code use
    /// `Runtime::shutdown_background`.
    pub fn runtime(&self) -> Result<Runtime> {
        let file = self.open()?;
        let name = self.name.clone();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name(&self.name)
            .enable_all()
            .on_thread_start(move || {
                // A thread in the wrong namespace would make a test pass for the wrong reason.
                if let Err(e) = enter(&file) {
                    eprintln!("cannot enter the network namespace {name}: {e}");
                    std::process::abort();
                }
            })
            .build()?;
        Ok(runtime)
    }
}

fn enter(namespace: &File) -> io::Result<()> {
    // SAFETY: plain system call on an open file; it changes the calling thread only.
    match unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Runs a tool of the system to its end; what it printed, or what it complained about.
pub fn command(program: &str, args: &[&str], input: &str) -> Result<String> {
    let mut command = Command::new(program);
    command.args(args);
    finish(command, input)
}

fn finish(mut command: Command, input: &str) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| {
            format!(
                "cannot run '{program}': the testbed needs root and iproute2, nftables, mount and e2fsprogs"
            )
        })?;
    // A tool that ends before it read everything says why on its own.
    let _ = child.stdin.take().map(|mut s| s.write_all(input.as_bytes()));
    let output = child.wait_with_output()?;
    ensure!(
        output.status.success(),
        "{command:?} failed ({}): {}{}\n{input}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim(),
        String::from_utf8_lossy(&output.stdout).trim(),
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
