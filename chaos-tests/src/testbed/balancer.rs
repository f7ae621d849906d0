//! The load balancers of `deploy/`, run as they are shipped: only the lines that a user is told to edit are edited.

use super::{namespace::Namespace, network::Host};
use crate::process::Process;
use anyhow::{Context, Result, ensure};
use std::{net::TcpListener, path::Path, time::Duration};

const HAPROXY: &str = include_str!("../../../deploy/haproxy.cfg");
const NGINX: &str = include_str!("../../../deploy/nginx.conf");
/// The addresses in the shipped files.
const LISTEN: &str = "127.0.0.1:9000";
const STATISTICS: &str = "127.0.0.1:9001";
const FIRST_MASTER: &str = "127.0.0.1:9003";
/// What the shipped file asks to know whether a master is of use.
const READY: &str = "/readyz";
const PID_FILE: &str = "/run/mooncake-nginx.pid";
const STOPPED: Duration = Duration::from_secs(10);

/// Which one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BalancerKind {
    /// `deploy/haproxy.cfg`.
    HaProxy,
    /// `deploy/nginx.conf`.
    Nginx,
}

/// A running load balancer.
pub struct Balancer {
    /// Base URL for callers.
    pub url: String,
    /// HAProxy's statistics page.
    pub statistics: Option<String>,
    /// Its process.
    pub process: Process,
}

impl Balancer {
    /// Starts it on `host` in front of these masters (HTTP addresses).
    pub(super) fn start(kind: BalancerKind, dir: &Path, host: &Host, masters: &[String]) -> Result<Self> {
        let text = match kind {
            BalancerKind::HaProxy => HAPROXY,
            BalancerKind::Nginx => NGINX,
        };
        Self::start_text(kind, text, dir, host, masters)
    }

    /// The same on loopback, on ports that are free now.
    pub fn start_local(kind: BalancerKind, dir: &Path, masters: &[String]) -> Result<Self> {
        let text = match kind {
            BalancerKind::HaProxy => HAPROXY,
            BalancerKind::Nginx => NGINX,
        };
        let free = || anyhow::Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string());
        Self::start_at(kind, text, dir, None, [free()?, free()?], masters)
    }

    fn start_text(
        kind: BalancerKind,
        text: &str,
        dir: &Path,
        host: &Host,
        masters: &[String],
    ) -> Result<Self> {
        let at = ["9000", "9001"].map(|port| format!("{}:{port}", host.address));
        Self::start_at(kind, text, dir, Some(host.namespace.clone()), at, masters)
    }

    fn start_at(
        kind: BalancerKind,
        text: &str,
        dir: &Path,
        namespace: Option<Namespace>,
        [listen, statistics]: [String; 2],
        masters: &[String],
    ) -> Result<Self> {
        let (file, program) = match kind {
            BalancerKind::HaProxy => ("haproxy.cfg", "/usr/sbin/haproxy"),
            BalancerKind::Nginx => ("nginx.conf", "/usr/sbin/nginx"),
        };
        ensure!(
            Path::new(program).exists(),
            "{program} is missing: install Debian's haproxy and nginx-light (scripts/setup.sh haproxy nginx-light)"
        );
        let pid_file = dir.join("nginx.pid").display().to_string();
        let text = edited(text, masters)?
            .replace(LISTEN, &listen)
            .replace(STATISTICS, &statistics)
            .replace(PID_FILE, &pid_file);
        let path = dir.join(file);
        std::fs::write(&path, text)?;
        let path = path.display().to_string();
        let args: &[&str] = match kind {
            BalancerKind::HaProxy => &["-db", "-f", &path],
            // On loopback nothing else ends workers whose test gives up.
            BalancerKind::Nginx if namespace.is_none() => {
                &["-c", &path, "-g", "daemon off; master_process off;"]
            }
            BalancerKind::Nginx => &["-c", &path, "-g", "daemon off;"],
        };
        let args = args.iter().map(|s| (*s).to_owned()).collect();
        let mut process = Process::new(dir, "balancer", program.into(), args).in_namespace(namespace);
        process.start()?;
        Ok(Self {
            url: format!("http://{listen}"),
            statistics: (kind == BalancerKind::HaProxy).then(|| format!("http://{statistics}/")),
            process,
        })
    }

    /// HAProxy on `host` as it is shipped, but for another service: `servers` instead of the masters, and `check` as
    /// the path of its health check.
    pub(super) fn start_for(dir: &Path, host: &Host, servers: &[String], check: &str) -> Result<Self> {
        ensure!(HAPROXY.contains(READY), "the shipped file does not check {READY}");
        Self::start_text(
            BalancerKind::HaProxy,
            &HAPROXY.replace(READY, check),
            dir,
            host,
            servers,
        )
    }

    /// Ends it in an orderly way (nginx ends its workers).
    pub async fn stop(&mut self) -> Result<()> {
        self.process.terminate(STOPPED).await.map(drop)
    }
}

/// The shipped file with its `server` lines replaced: one per master, in the form of the first one.
fn edited(text: &str, masters: &[String]) -> Result<String> {
    let is_server = |line: &&str| line.trim_start().starts_with("server ") && line.contains("# EDIT");
    let template = text
        .lines()
        .find(is_server)
        .context("the shipped file has no server line to edit")?;
    ensure!(
        template.contains(FIRST_MASTER),
        "the first server line is not for {FIRST_MASTER}: {template}"
    );
    let mut out = String::new();
    let mut done = false;
    for line in text.lines() {
        if !is_server(&line) {
            out += line;
            out.push('\n');
        } else if !done {
            done = true;
            for (i, master) in masters.iter().enumerate() {
                let name = format!("master-{}", i + 1);
                out += &template.replace(FIRST_MASTER, master).replace("master-1", &name);
                out.push('\n');
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_marked_lines_change() {
        for (text, masters) in [(HAPROXY, 5), (NGINX, 2)] {
            let masters: Vec<_> = (0..masters).map(|i| format!("198.18.0.{i}:9003")).collect();
            let edited = edited(text, &masters).unwrap();
            for master in &masters {
                assert_eq!(edited.matches(master.as_str()).count(), 1, "{edited}");
            }
            assert!(!edited.contains(FIRST_MASTER) && !edited.contains("127.0.0.1:9013"));
            assert_eq!(edited.matches(LISTEN).count(), 1);
            let marked = |t: &str| t.lines().filter(|l| !l.contains("EDIT")).count();
            assert_eq!(marked(&edited), marked(text));
        }
    }
}
