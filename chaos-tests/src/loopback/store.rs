//! Mooncake Store beside: its get over TCP, between the same two hosts.
//!
//! A master, a seed that offers objects from its memory and a receiver that gets all of them into memory which it
//! registered before. No digest, no file, no sync: what its users have, and less than what is asked of a receiver here.

use super::{Cpu, RECEIVER, SEED, Sample};
use crate::{
    process::peak_memory_bytes,
    testbed::{
        Testbed, client_host,
        tool::{Start, Tool},
    },
};
use anyhow::{Context, Result, ensure};
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::ChildStdout,
};

const ENDS: &str = include_str!("store.py");
/// Installs it, where it is not yet, and prints the Python that has it.
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/mooncake-store.sh");
const MASTER_PORT: u16 = 7011;
const METRICS_PORT: u16 = 7012;
/// Size of an object, and how many are asked for at once: the quickest of those that were tried.
const OBJECT_BYTES: u64 = 16 << 20;
const BATCH: usize = 8;

/// A Python that has it, by the repository's script, which says on stderr what it does and what it lacks.
pub fn made() -> Result<PathBuf> {
    made_by(Path::new(SCRIPT))
}

fn made_by(script: &Path) -> Result<PathBuf> {
    let output = Command::new(script).stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("cannot run {}", script.display()))?;
    let (name, status) = (script.display(), output.status);
    ensure!(status.success(), "{name} failed, {status}: see above");
    let said = String::from_utf8(output.stdout).with_context(|| format!("{name} printed no path"))?;
    let python = PathBuf::from(said.trim_end());
    is_there(&python)?;
    Ok(python)
}

/// An error if this Python does not have it.
pub fn is_there(python: &Path) -> Result<()> {
    let mut import = Command::new(python);
    let output = import.args(["-c", "import mooncake.store"]).output();
    let output = output.with_context(|| format!("cannot run {}", python.display()))?;
    ensure!(
        output.status.success(),
        "{} has no Mooncake Store: give what scripts/mooncake-store.sh prints. It said:\n{}",
        python.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Gets `size_bytes` from the seed's host to the receiver's.
pub(super) async fn get(bed: &Testbed, python: &Path, size_bytes: u64) -> Result<Sample> {
    let address = |client| anyhow::Ok(bed.network.host(&client_host(client))?.address);
    let start = |client, name: &str, program: &Path, args: Vec<String>, piped| {
        let program = program.to_str().context("a path that is not UTF-8")?;
        Tool::start(Start {
            namespace: &bed.network.host(&client_host(client))?.namespace,
            dir: bed.dir(),
            name: name.to_owned(),
            program,
            args,
            stdin: if piped { Stdio::piped() } else { Stdio::null() },
            piped,
        })
    };
    let script = bed.dir().join("store.py");
    std::fs::write(&script, ENDS)?;
    let master = format!("{}:{MASTER_PORT}", address(SEED)?);
    let args = vec![
        format!("--rpc_port={MASTER_PORT}"),
        format!("--metrics_port={METRICS_PORT}"),
    ];
    // The wheel puts it beside its Python.
    let program = python.with_file_name("mooncake_master");
    let mut server = start(SEED, "store-master", &program, args, false)?;
    server.listens(MASTER_PORT).await?;
    let end = |client, role: &str| {
        let args = vec![
            script.display().to_string(),
            role.to_owned(),
            address(client)?.to_string(),
            master.clone(),
            size_bytes.to_string(),
            OBJECT_BYTES.to_string(),
            BATCH.to_string(),
        ];
        start(client, &format!("store-{role}"), python, args, true)
    };
    let mut seed = end(SEED, "seed")?;
    let mut seed_says = BufReader::new(seed.stdout()?).lines();
    says(&seed, &mut seed_says, "ready").await?;
    let mut receiver = end(RECEIVER, "receive")?;
    let mut receiver_says = BufReader::new(receiver.stdout()?).lines();
    says(&receiver, &mut receiver_says, "ready").await?;

    let pid = receiver.pid()?;
    let mut order = receiver.stdin()?;
    let (began, before) = (Instant::now(), Cpu::of(pid)?);
    order.write_all(b"go\n").await?;
    says(&receiver, &mut receiver_says, "done").await?;
    let sample = Sample {
        took_s: began.elapsed().as_secs_f64(),
        cpu: Cpu::of(pid)? - before,
        peak_rss_bytes: peak_memory_bytes(pid)?,
    };
    drop(order);
    // It looks at what it got.
    receiver.finished().await?;
    seed.stop().await?;
    server.stop().await?;
    Ok(sample)
}

async fn says(tool: &Tool, lines: &mut Lines<BufReader<ChildStdout>>, what: &str) -> Result<()> {
    while let Some(line) = lines.next_line().await? {
        if line == what {
            return Ok(());
        }
    }
    anyhow::bail!("{} ended before it was {what}{}", tool.name(), tool.said())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_script_is_where_it_is_looked_for() {
        let mode = std::fs::metadata(SCRIPT).unwrap().permissions().mode();
        assert_ne!(mode & 0o111, 0, "it cannot be run");
    }

    #[test]
    fn a_script_that_brings_no_python_is_an_error() {
        let said = |script: &str| format!("{:#}", made_by(Path::new(script)).unwrap_err());
        assert!(said("/bin/false").contains("/bin/false failed, exit status: 1"));
        assert!(said("/no/such/script").contains("cannot run /no/such/script"));
        assert!(said("/bin/true").contains("cannot run"), "it printed nothing");
    }
}
