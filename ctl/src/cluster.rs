//! `cluster …`: the masters.

use crate::{
    api::Api,
    cli::{ClusterCommand, Format, OutputArgs, SnapshotCommand},
    error::Failure,
    output,
};
use mooncake_proto::{
    api::{AddMember, ClusterStatus, MemberId, MembershipAnswer, ProblemCode, TransferLeadership},
    backup::{self, BackupInfo},
};
use serde::Serialize;
use std::{
    fs::File,
    io::{BufReader, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

const CLUSTER: [&str; 3] = ["api", "v1", "cluster"];
/// Between two tries to promote a master that catches up.
const PROMOTE_INTERVAL: Duration = Duration::from_secs(1);
/// The least time between two remarks about how far it is.
const REMARK_INTERVAL: Duration = Duration::from_secs(5);

/// Runs a command of this group.
pub async fn run(
    command: &ClusterCommand,
    api: impl Fn() -> Result<Api, Failure>,
    json: bool,
) -> Result<(), Failure> {
    let format = |args: &OutputArgs| if json { Format::Json } else { args.output };
    match command {
        ClusterCommand::Status(args) => {
            output::print(format(args), &status(&api()?).await?, output::cluster);
            Ok(())
        }
        ClusterCommand::Add {
            rpc_address,
            id,
            promote,
            output,
        } => {
            let api = api()?;
            let mut answer = add(&api, rpc_address, *id).await?;
            if promote.promote {
                answer = caught_up(&api, answer.id, promote.wait).await?;
            }
            output::print(format(output), &answer, output::membership);
            Ok(())
        }
        ClusterCommand::Promote { id, output } => {
            let answer = post(&api()?, "promote", &MemberId { id: *id }).await?;
            output::print(format(output), &answer, output::membership);
            Ok(())
        }
        ClusterCommand::Remove { id, output } => {
            let answer = post(&api()?, "remove", &MemberId { id: *id }).await?;
            output::print(format(output), &answer, output::membership);
            Ok(())
        }
        ClusterCommand::Replace {
            old,
            rpc_address,
            wait,
            output,
        } => {
            let answer = replace(&api()?, *old, rpc_address, *wait).await?;
            output::print(format(output), &answer, output::membership);
            Ok(())
        }
        ClusterCommand::Transfer { to, output } => {
            let api = api()?;
            // Named, so that a repeated request does not move leadership twice.
            let from = match to {
                Some(_) => None,
                None => Some(leader(&api).await?),
            };
            let answer = post(&api, "transfer", &TransferLeadership { to: *to, from }).await?;
            output::print(format(output), &answer, output::membership);
            Ok(())
        }
        ClusterCommand::Snapshot(SnapshotCommand::Save { file, stale, output }) => {
            let info = save(&api()?, file, *stale).await?;
            eprintln!("mooncakectl: wrote {}", file.display());
            output::print(format(output), &info, output::backup);
            Ok(())
        }
        ClusterCommand::Snapshot(SnapshotCommand::Status { file, output }) => {
            output::print(format(output), &check(file)?, output::backup);
            Ok(())
        }
    }
}

/// As the leader knows it, with how far everyone is; without a leader as the master asked knows it.
async fn status(api: &Api) -> Result<ClusterStatus, Failure> {
    let any: ClusterStatus = api.get(&CLUSTER, &[]).await?;
    if any.leader_id.is_none_or(|leader| leader == any.served_by) {
        return Ok(any);
    }
    let members: Result<ClusterStatus, Failure> = api.get(&[&CLUSTER[..], &["members"]].concat(), &[]).await;
    Ok(members.unwrap_or(any))
}

async fn leader(api: &Api) -> Result<u64, Failure> {
    let status: ClusterStatus = api.get(&[&CLUSTER[..], &["members"]].concat(), &[]).await?;
    Ok(status.served_by)
}

async fn post(api: &Api, what: &str, body: &impl Serialize) -> Result<MembershipAnswer, Failure> {
    api.post(&[&CLUSTER[..], &[what]].concat(), Some(body)).await
}

async fn add(api: &Api, rpc_address: &str, id: Option<u64>) -> Result<MembershipAnswer, Failure> {
    let body = AddMember {
        rpc_address: rpc_address.to_owned(),
        id,
    };
    post(api, "add", &body).await
}

/// Promotes once the master has the log.
async fn caught_up(api: &Api, id: u64, wait: Duration) -> Result<MembershipAnswer, Failure> {
    let until = Instant::now() + wait;
    let mut said: Option<Instant> = None;
    loop {
        match post(api, "promote", &MemberId { id }).await {
            Err(Failure::Refused(problem))
                if matches!(
                    problem.code,
                    ProblemCode::MemberBehind | ProblemCode::ChangeInProgress
                ) =>
            {
                if Instant::now() >= until {
                    return Err(Failure::Refused(problem));
                }
                if said.is_none_or(|at| at.elapsed() >= REMARK_INTERVAL) {
                    eprintln!("mooncakectl: {}", problem.detail);
                    said = Some(Instant::now());
                }
                tokio::time::sleep(PROMOTE_INTERVAL).await;
            }
            other => return other,
        }
    }
}

async fn replace(
    api: &Api,
    old: u64,
    rpc_address: &str,
    wait: Duration,
) -> Result<MembershipAnswer, Failure> {
    let step = |answer: &MembershipAnswer| eprintln!("mooncakectl: {}", answer.detail);
    let added = add(api, rpc_address, None).await?;
    if added.id == old {
        return Err(Failure::Usage(format!(
            "at {rpc_address} answers master {old} itself: name the address of the new master"
        )));
    }
    step(&added);
    step(&caught_up(api, added.id, wait).await?);
    post(api, "remove", &MemberId { id: old }).await
}

/// Writes a backup so that it is there as a whole, checked and durable, or not at all.
async fn save(api: &Api, path: &Path, stale: bool) -> Result<BackupInfo, Failure> {
    let cannot = |e: std::io::Error| Failure::Usage(format!("cannot write {}: {e}", path.display()));
    let name = path
        .file_name()
        .ok_or_else(|| Failure::Usage(format!("{} is no file name", path.display())))?;
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let partial = Partial(folder.join(format!(
        ".{}.{}.partial",
        name.to_string_lossy(),
        std::process::id()
    )));
    let query = match stale {
        true => vec![("consistency", "stale".to_owned())],
        false => vec![],
    };
    let path_of = [&CLUSTER[..], &["snapshot"]].concat();
    let file = api
        .download(
            &path_of,
            &query,
            || File::create(&partial.0).map_err(cannot),
            |file, piece| file.write_all(piece).map_err(cannot),
        )
        .await?;
    file.sync_all().map_err(cannot)?;
    drop(file);
    // What is on the disk is checked, not what was in memory.
    let info = check(&partial.0).map_err(|failure| {
        Failure::Unreachable(format!("the backup that arrived is not whole: {failure}"))
    })?;
    std::fs::rename(&partial.0, path).map_err(cannot)?;
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(cannot)?;
    Ok(info)
}

fn check(path: &Path) -> Result<BackupInfo, Failure> {
    let wrong = |why: &dyn std::fmt::Display| Failure::Usage(format!("backup {}: {why}", path.display()));
    let file = File::open(path).map_err(|e| wrong(&e))?;
    backup::verify(BufReader::new(file)).map_err(|e| wrong(&e))
}

/// Removed with its last use; renamed, there is nothing left to remove.
struct Partial(PathBuf);

impl Drop for Partial {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
