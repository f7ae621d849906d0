//! `cluster …`: the masters.

use crate::{
    api::Api,
    cli::{ClusterCommand, Format, OutputArgs, SnapshotCommand},
    error::Failure,
    output,
};
use mooncake_proto::{
    api::{
        ALIVE_WITHIN, AddMember, ClusterStatus, MemberId, MemberView, MembershipAnswer, ProblemCode,
        TransferLeadership,
    },
    backup::{self, BackupInfo},
};
use serde::Serialize;
use std::{
    fs::File,
    io::{BufReader, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tokio::signal::unix::{SignalKind, signal};

const CLUSTER: [&str; 3] = ["api", "v1", "cluster"];
/// The role of a member without a vote.
const LEARNER: &str = "learner";
/// The role of the one that leads.
const LEADER: &str = "leader";
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
            let info = unless_interrupted(save(&api()?, file, *stale)).await?;
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
    Ok(members(api).await.unwrap_or(any))
}

/// As the leader knows it.
async fn members(api: &Api) -> Result<ClusterStatus, Failure> {
    api.get(&[&CLUSTER[..], &["members"]].concat(), &[]).await
}

async fn leader(api: &Api) -> Result<u64, Failure> {
    Ok(members(api).await?.served_by)
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
    check_replaced(&members(api).await?.members, old, rpc_address)?;
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

/// The old one has to be there, or everything has to be done: a mistyped id must not add a master and remove none.
fn check_replaced(members: &[MemberView], old: u64, rpc_address: &str) -> Result<(), Failure> {
    let is_old = |member: &MemberView| member.id == old;
    let answers = |member: &MemberView| {
        member.role == LEADER
            || member
                .silent_ms
                .is_some_and(|ms| Duration::from_millis(ms) <= ALIVE_WITHIN)
    };
    // One that does not answer is another one, that was at this address before.
    let is_done =
        |member: &MemberView| member.rpc_address == rpc_address && member.role != LEARNER && answers(member);
    if members.iter().any(|member| is_old(member) || is_done(member)) {
        return Ok(());
    }
    let ids: Vec<_> = members.iter().map(|member| member.id.to_string()).collect();
    Err(Failure::Usage(format!(
        "master {old} is no member of this cluster (members: {}), and no voter is at {rpc_address}: there is nothing to \
         replace, and nothing was changed. Only to add a master: mooncakectl cluster add {rpc_address} --promote",
        ids.join(", ")
    )))
}

/// What was begun is undone when a person or a supervisor wants the program to end.
async fn unless_interrupted<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let watch = |kind| signal(kind).map_err(|e| Failure::Usage(format!("cannot wait for signals: {e}")));
    let (mut interrupt, mut terminate) = (watch(SignalKind::interrupt())?, watch(SignalKind::terminate())?);
    tokio::select! {
        done = work => done,
        _ = interrupt.recv() => Err(Failure::Interrupted(SignalKind::interrupt().as_raw_value())),
        _ = terminate.recv() => Err(Failure::Interrupted(SignalKind::terminate().as_raw_value())),
    }
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
            || partial.create().map_err(cannot),
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

impl Partial {
    /// Empty, and for nobody else: a backup holds the sources of live jobs, which may be signed URLs.
    fn create(&self) -> std::io::Result<File> {
        let _ = std::fs::remove_file(&self.0);
        File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&self.0)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(id: u64, role: &str) -> MemberView {
        MemberView {
            id,
            rpc_address: format!("m{id}:50051"),
            http_address: format!("m{id}:9003"),
            disk_id: format!("d{id}"),
            role: role.into(),
            lag: None,
            silent_ms: Some(40),
        }
    }

    #[test]
    fn only_a_member_is_replaced() {
        let gone = |id, silent_ms| MemberView {
            silent_ms,
            ..member(id, "follower")
        };
        let members = [
            member(1, LEADER),
            member(2, "follower"),
            member(4, LEARNER),
            gone(5, Some(60_000)),
            gone(6, None),
        ];
        let check = |old, address| check_replaced(&members, old, address);
        for address in ["m4:50051", "m9:50051", "m2:50051"] {
            check(2, address).unwrap();
        }
        // A repeat of what is done; but a learner at the address is not done, nor is a voter that is gone from it.
        check(7, "m2:50051").unwrap();
        for address in ["m9:50051", "m4:50051", "m5:50051", "m6:50051"] {
            let why = check(7, address).unwrap_err().to_string();
            assert!(
                why.contains("master 7 is no member") && why.contains("1, 2, 4, 5, 6"),
                "{why}"
            );
        }
    }
}
