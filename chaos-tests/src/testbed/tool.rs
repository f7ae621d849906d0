//! A program of the system on one host of a testbed.

use super::Namespace;
use anyhow::{Context, Result, ensure};
use std::{
    fs::File,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use tokio::process::{Child, ChildStdin, ChildStdout};

const POLL: Duration = Duration::from_millis(10);
/// How long until a server listens, on a busy machine.
const LISTENS_WITHIN: Duration = Duration::from_secs(30);
const LOG_TAIL_BYTES: usize = 2000;

/// It is killed when this is dropped, and by the kernel when the thread that started it ends.
#[derive(Debug)]
pub struct Tool {
    name: String,
    child: Child,
    log: PathBuf,
}

/// How one is started; what it complains about goes to `<dir>/<name>.log`.
pub struct Start<'a> {
    /// Where it runs.
    pub namespace: &'a Namespace,
    /// For its log.
    pub dir: &'a Path,
    /// For messages.
    pub name: String,
    /// Found on the PATH.
    pub program: &'a str,
    /// Its arguments.
    pub args: Vec<String>,
    /// Nothing, or the end of a pipe.
    pub stdin: Stdio,
    /// Whether its output is read here, see [`Tool::stdout`]; else it goes to the log.
    pub piped: bool,
}

impl Tool {
    /// Starts it.
    pub fn start(start: Start<'_>) -> Result<Self> {
        let log = start.dir.join(format!("{}.log", start.name));
        let file = File::options().create(true).append(true).open(&log)?;
        let mut command = Command::new(start.program);
        for (name, _) in std::env::vars_os() {
            // A proxy would be another way than the links.
            if name.to_string_lossy().to_ascii_uppercase().ends_with("_PROXY") {
                command.env_remove(name);
            }
        }
        let stdout = match start.piped {
            true => Stdio::piped(),
            false => file.try_clone()?.into(),
        };
        command
            .args(&start.args)
            .stdin(start.stdin)
            .stdout(stdout)
            .stderr(file);
        start.namespace.enter_on_exec(&mut command)?;
        // SAFETY: prctl is async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                let signal = Some(rustix::process::Signal::KILL);
                rustix::process::set_parent_process_death_signal(signal).map_err(Into::into)
            });
        }
        let mut command = tokio::process::Command::from(command);
        let child = command
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {} ({})", start.name, start.program))?;
        Ok(Self {
            name: start.name,
            child,
            log,
        })
    }

    /// What it prints, if it is read here and was not taken yet.
    pub fn stdout(&mut self) -> Result<ChildStdout> {
        let stdout = self.child.stdout.take();
        stdout.with_context(|| format!("the output of {} is not read here", self.name))
    }

    /// What it is told, if that is a pipe and was not taken yet.
    pub fn stdin(&mut self) -> Result<ChildStdin> {
        let stdin = self.child.stdin.take();
        stdin.with_context(|| format!("{} is told nothing from here", self.name))
    }

    /// Of its process.
    pub fn pid(&self) -> Result<u32> {
        let pid = self.child.id();
        pid.with_context(|| format!("{} ended{}", self.name, self.said()))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Waits for its end, which must be a good one.
    pub async fn finished(&mut self) -> Result<()> {
        let status = self.child.wait().await?;
        ensure!(
            status.success(),
            "{} ended with {status}{}",
            self.name,
            self.said()
        );
        Ok(())
    }

    /// Kills it and waits until it is gone.
    pub async fn stop(mut self) -> Result<()> {
        Ok(self.child.kill().await?)
    }

    /// Waits until something on its host listens on this TCP port.
    pub async fn listens(&mut self, port: u16) -> Result<()> {
        let until = Instant::now() + LISTENS_WITHIN;
        loop {
            if let Some(status) = self.child.try_wait()? {
                anyhow::bail!(
                    "{} ended with {status} before it listened{}",
                    self.name,
                    self.said()
                );
            }
            let pid = self.pid()?;
            for table in ["tcp", "tcp6"] {
                // Of its own namespace. There may be no IPv6.
                let table = std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
                if listens_on(&table, port) {
                    return Ok(());
                }
            }
            ensure!(
                Instant::now() < until,
                "{} does not listen on port {port} within {LISTENS_WITHIN:?}{}",
                self.name,
                self.said()
            );
            tokio::time::sleep(POLL).await;
        }
    }

    /// The end of its log, for messages.
    pub fn said(&self) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        let tail = &log[log.len().saturating_sub(LOG_TAIL_BYTES)..];
        match tail.is_empty() {
            true => String::new(),
            false => format!("\n--- it said ---\n{}", String::from_utf8_lossy(tail)),
        }
    }
}

/// Of `/proc/net/tcp`.
fn listens_on(table: &str, port: u16) -> bool {
    /// TCP_LISTEN.
    const LISTEN: &str = "0A";
    table.lines().skip(1).any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let local = fields.get(1).and_then(|local| local.rsplit_once(':'));
        let local = local.and_then(|(_, port)| u16::from_str_radix(port, 16).ok());
        local == Some(port) && fields.get(3) == Some(&LISTEN)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_listener_listens() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue\n   \
                     0: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0\n   \
                     1: 0100007F:1AE1 0100007F:1F91 01 00000000:00000000 00:00000000 00000000     0\n";
        assert!(listens_on(table, 0x1f90));
        assert!(!listens_on(table, 0x1ae1), "connected");
        assert!(!listens_on(table, 0x1f91), "the other end");
        assert!(!listens_on("", 80));
    }
}
