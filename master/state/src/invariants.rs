//! What must hold after every command, one function each. Tests and the chaos checker call [`check`] on one
//! state and [`check_command`] (or [`check_step`]) on a state and its successor.

use crate::{
    command::{Command, PRIORITY_CLUSTER_VERSION, Reply},
    state::{Index, State},
    types::{BlobContent, Job, TaskKind},
};
use mooncake_proto::{
    api::{JobStatus, PlacementState},
    digest::Digest,
    manifest::PRIORITY_RANGE,
};

/// A broken invariant: which, and where.
pub type Broken = String;
type Check = Result<(), Broken>;

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Check {
    if holds { Ok(()) } else { Err(what()) }
}

/// All invariants of one state.
pub fn check(state: &State) -> Check {
    indexes_match(state)?;
    one_download(state)?;
    histories_follow_the_diagram(state)?;
    completed_means_staged(state)?;
    failed_says_why(state)?;
    staged_is_sealed(state)?;
    live_jobs_can_end(state)?;
    tasks_are_wanted(state)?;
    attempts_are_distinct(state)?;
    incarnations_match(state)?;
    priorities_can_be_kept(state)?;
    blobs_are_right(state)
}

/// All invariants of one step.
pub fn check_step(before: &State, after: &State) -> Check {
    time_is_monotone(before, after)?;
    terminal_jobs_absorb(before, after)?;
    views_only_advance(before, after)?;
    seals_are_final(before, after)?;
    attempts_only_grow(before, after)?;
    live_jobs_stay(before, after)
}

/// The indexes are derived: a difference means that a snapshot's reader would behave differently.
pub fn indexes_match(state: &State) -> Check {
    let rebuilt = Index::of(&state.data);
    ensure(rebuilt == state.index, || {
        format!("indexes differ:\n{:?}\n{rebuilt:?}", state.index)
    })
}

/// Each source byte is served once: at most one download runs per artifact, and the record of it is right. A
/// sealed and acquired one (`whole`) reads nothing any more.
pub fn one_download(state: &State) -> Check {
    for (model, artifact) in state.artifacts() {
        let running: Vec<_> = artifact
            .placements
            .iter()
            .filter(|(_, p)| p.state == PlacementState::Acquiring && p.kind == TaskKind::Acquire && !p.whole)
            .map(|(n, _)| n)
            .collect();
        ensure(running.iter().copied().eq(&artifact.acquiring), || {
            format!(
                "{model}: downloads run on {running:?}, recorded is {:?}",
                artifact.acquiring
            )
        })?;
    }
    Ok(())
}

/// Callers map these states: every history is a path of the RFC's diagrams, in order of time.
pub fn histories_follow_the_diagram(state: &State) -> Check {
    use JobStatus as S;
    for (id, job) in state.jobs() {
        let path: Vec<_> = job.transitions.keys().copied().collect();
        let allowed = |a: S, b: S| {
            matches!(
                (a, b),
                (S::Planned, S::Seeding | S::Replicating | S::Canceled)
                    | (S::Seeding, S::Replicating | S::Failed | S::Canceled)
                    | (S::Replicating, S::Completed | S::Failed | S::Canceled)
            )
        };
        let good = path.first() == Some(&S::Planned)
            && path.last() == Some(&job.status)
            && path.windows(2).all(|w| allowed(w[0], w[1]));
        ensure(good, || {
            format!("job {id}: {path:?} with status {:?}", job.status)
        })?;
        let times: Vec<_> = job.transitions.values().collect();
        ensure(times.is_sorted(), || format!("job {id}: times {times:?}"))?;
        for (node, view) in job.nodes().zip(&job.views) {
            let where_ = || format!("job {id} on {node}: {view:?}");
            ensure(view.is_finished() == view.finished_ms.is_some(), where_)?;
            ensure(
                view.state != PlacementState::Acquiring || view.acquiring_ms.is_some(),
                where_,
            )?;
            ensure(
                view.state != PlacementState::Staged || view.acquiring_ms.is_some(),
                where_,
            )?;
            ensure(
                view.state != PlacementState::Planned || view.acquiring_ms.is_none(),
                where_,
            )?;
            let times = [Some(view.planned_ms), view.acquiring_ms, view.finished_ms];
            ensure(times.iter().flatten().is_sorted(), where_)?;
        }
    }
    Ok(())
}

/// `completed` is a promise: every requested placement is staged with every byte and its folder.
pub fn completed_means_staged(state: &State) -> Check {
    for (id, job) in state.jobs() {
        let staged = requested(job).all(|v| {
            v.state == PlacementState::Staged
                && v.local_path.is_some()
                && v.staged_bytes == job.total_size_bytes
        });
        ensure(job.status != JobStatus::Completed || staged, || {
            format!("job {id} is completed: {:?}", job.views)
        })?;
        ensure(job.status == JobStatus::Completed || !staged, || {
            format!("job {id} is staged but {:?}", job.status)
        })?;
    }
    Ok(())
}

fn requested(job: &Job) -> impl Iterator<Item = &crate::types::View> {
    job.views[..job.targets.len()].iter()
}

/// "failed" with no reason is what people hate.
pub fn failed_says_why(state: &State) -> Check {
    for (id, job) in state.jobs() {
        let needs = matches!(job.status, JobStatus::Failed | JobStatus::Canceled);
        ensure(needs == job.last_error.is_some(), || {
            format!("job {id}: {:?}, {:?}", job.status, job.last_error)
        })?;
        for view in &job.views {
            let says = view.last_error.as_ref().is_some_and(|e| !e.is_empty());
            ensure(view.state != PlacementState::Failed || says, || {
                format!("job {id}: {view:?}")
            })?;
            ensure(
                view.state != PlacementState::Staged || view.last_error.is_none(),
                || format!("job {id}: {view:?}"),
            )?;
        }
    }
    Ok(())
}

/// Nothing is published or called whole before the proof of the content is committed.
pub fn staged_is_sealed(state: &State) -> Check {
    for (model, artifact) in state.artifacts() {
        let held = artifact
            .placements
            .values()
            .any(|p| p.whole || p.state == PlacementState::Staged);
        ensure(!held || artifact.seal.is_some(), || {
            format!("{model} is held but not sealed")
        })?;
    }
    for (id, job) in state.jobs() {
        let staged = job.views.iter().any(|v| v.state == PlacementState::Staged);
        let sealed = state
            .artifact(&job.model)
            .is_some_and(|a| a.seal.is_some() && a.generation == job.generation);
        ensure(!staged || sealed, || {
            format!("job {id} has staged placements of an unsealed artifact")
        })?;
    }
    Ok(())
}

/// A live job waits for something that can come: an unfinished requested placement whose node is not down, and
/// its artifact is there with the content that it was created for.
pub fn live_jobs_can_end(state: &State) -> Check {
    use mooncake_proto::api::NodeStatus;
    for (id, job) in state.jobs().filter(|(_, j)| j.is_live()) {
        ensure(requested(job).any(|v| !v.is_finished()), || {
            format!("job {id} waits for nothing")
        })?;
        for (node, view) in job.nodes().zip(&job.views) {
            let down = state.node(node).is_none_or(|n| n.status == NodeStatus::Down);
            // A node that came back up stays failed for this job; one that is down has failed.
            ensure(!down || view.is_finished(), || {
                format!("job {id} waits for {node}, which is down")
            })?;
        }
        let artifact = state.artifact(&job.model);
        let same = artifact.is_some_and(|a| a.generation == job.generation && a.manifest == job.manifest);
        ensure(same, || format!("job {id}: its artifact is gone"))?;
        ensure(state.blob(&job.manifest).is_some(), || {
            format!("job {id}: its manifest is gone")
        })?;
        ensure(state.blob(&job.sources).is_some(), || {
            format!("job {id}: its sources are gone")
        })?;
        if !job.seeded {
            let acquiring = artifact.and_then(|a| a.acquiring.as_ref());
            let seed = job.position(&job.seed).map(|at| job.views[at].state);
            let stuck = seed == Some(PlacementState::Failed) && acquiring.is_none();
            ensure(!stuck, || format!("job {id}: nobody will acquire for it"))?;
        }
    }
    Ok(())
}

/// What no live job wants does not run (the planner revokes it on the node), and a running view has a live task
/// or will get another one.
pub fn tasks_are_wanted(state: &State) -> Check {
    for (model, artifact) in state.artifacts() {
        for (node, placement) in &artifact.placements {
            let runs = placement.state == PlacementState::Acquiring;
            ensure(!runs || state.is_wanted(model, node, placement), || {
                format!("{model} on {node}: {placement:?} runs for nobody")
            })?;
            ensure(
                runs || placement.state == PlacementState::Staged || placement.reserved_bytes == 0,
                || format!("{model} on {node}: {placement:?} keeps space"),
            )?;
        }
    }
    Ok(())
}

/// Two attempts with one fence could not be told apart; none is above the artifact's count.
pub fn attempts_are_distinct(state: &State) -> Check {
    for (model, artifact) in state.artifacts() {
        let mut seen = std::collections::BTreeSet::new();
        for (node, placement) in artifact.placements.iter().filter(|(_, p)| p.fence.attempt > 0) {
            let new = seen.insert(placement.fence.attempt);
            ensure(new && placement.fence.attempt <= artifact.attempts, || {
                format!("{model} on {node}: {placement:?}")
            })?;
            ensure(placement.fence.recovery_epoch <= state.recovery_epoch(), || {
                format!("{model} on {node}: {placement:?}")
            })?;
        }
    }
    Ok(())
}

/// What an older incarnation held or did is gone from the record.
pub fn incarnations_match(state: &State) -> Check {
    for (model, artifact) in state.artifacts() {
        for (node, placement) in &artifact.placements {
            let current = state.node(node).map(|n| n.incarnation);
            ensure(current == Some(placement.incarnation), || {
                format!(
                    "{model} on {node}: incarnation {}, the node has {current:?}",
                    placement.incarnation
                )
            })?;
        }
    }
    Ok(())
}

/// What a snapshot of this cluster version cannot hold would be lost on who installs it.
pub fn priorities_can_be_kept(state: &State) -> Check {
    let can = state.cluster_version() >= PRIORITY_CLUSTER_VERSION;
    for (id, job) in state.jobs().filter(|(_, job)| job.priority != 0) {
        ensure(can && PRIORITY_RANGE.contains(&job.priority), || {
            format!("job {id} has the priority {}", job.priority)
        })?;
    }
    Ok(())
}

/// Nodes check what they are sent by its digest: a wrong blob would fail every job that uses it.
pub fn blobs_are_right(state: &State) -> Check {
    for (digest, blob) in &state.data.blobs {
        if let BlobContent::Complete(bytes) = &blob.content {
            ensure(Digest::sha256(bytes) == *digest, || {
                format!("blob {digest} has other content")
            })?;
        }
    }
    for (model, artifact) in state.artifacts() {
        for (node, placement) in &artifact.placements {
            let reads = placement.state == PlacementState::Acquiring
                && placement.kind == TaskKind::Acquire
                && !placement.whole;
            ensure(placement.sources.is_some() == reads, || {
                format!("{model} on {node}: {placement:?} has the wrong sources")
            })?;
        }
    }
    for digest in state.index.blob_refs.keys() {
        ensure(state.blob(digest).is_some(), || {
            format!("blob {digest} is referred to but not there")
        })?;
    }
    Ok(())
}

/// Times in answers never go back, whichever master's clock they come from.
pub fn time_is_monotone(before: &State, after: &State) -> Check {
    ensure(before.time_ms() <= after.time_ms(), || {
        format!("{} → {}", before.time_ms(), after.time_ms())
    })
}

/// Nothing changes a terminal job until it is pruned as a whole.
pub fn terminal_jobs_absorb(before: &State, after: &State) -> Check {
    for (id, old) in before.jobs().filter(|(_, j)| !j.is_live()) {
        let same = after.job(id).is_none_or(|new| new == old);
        ensure(same, || {
            format!("terminal job {id} changed: {old:?} → {:?}", after.job(id))
        })?;
    }
    Ok(())
}

/// What a caller saw never goes back: status, state and attempt; a finished view is frozen.
pub fn views_only_advance(before: &State, after: &State) -> Check {
    for (id, old) in before.jobs() {
        let Some(new) = after.job(id) else { continue };
        let same = (old.request_digest, old.priority) == (new.request_digest, new.priority);
        ensure(
            same && old.status <= new.status && old.version <= new.version,
            || format!("job {id}: {old:?} → {new:?}"),
        )?;
        for (a, b) in old.views.iter().zip(&new.views) {
            let advances = if a.is_finished() {
                a == b
            } else {
                a.state <= b.state && a.attempt <= b.attempt
            };
            ensure(advances, || format!("job {id}: {a:?} → {b:?}"))?;
        }
        let visible = old.status != new.status || old.views != new.views || old.last_error != new.last_error;
        ensure(!visible || old.version < new.version, || {
            format!("job {id} changed without a new version")
        })?;
    }
    Ok(())
}

/// A second root for the same content is refused; sealed content is never replaced.
pub fn seals_are_final(before: &State, after: &State) -> Check {
    for (model, old) in before.artifacts().filter(|(_, a)| a.seal.is_some()) {
        let kept = after.artifact(model).is_some_and(|new| {
            (new.seal, new.manifest, new.generation) == (old.seal, old.manifest, old.generation)
        });
        ensure(kept, || format!("the seal of {model} changed"))?;
    }
    Ok(())
}

/// Nodes refuse fences below what they obeyed: an attempt number that comes again would be refused for ever, or
/// taken for the old one.
pub fn attempts_only_grow(before: &State, after: &State) -> Check {
    for (model, old) in before.artifacts() {
        let (attempts, generation) = match after.artifact(model) {
            Some(new) => (new.attempts, new.generation),
            None => (after.data.floor_attempt, after.data.floor_generation),
        };
        ensure(attempts >= old.attempts && generation >= old.generation, || {
            format!("{model}: attempts went back")
        })?;
    }
    for (id, old) in before.nodes() {
        let incarnation = after
            .node(id)
            .map_or(after.data.floor_incarnation, |n| n.incarnation);
        ensure(incarnation >= old.incarnation, || {
            format!("{id}: incarnations went back")
        })?;
    }
    Ok(())
}

/// A live job is never pruned, and no job is forgotten together with its id.
pub fn live_jobs_stay(before: &State, after: &State) -> Check {
    for (id, _) in before.jobs().filter(|(_, j)| j.is_live()) {
        ensure(after.job(id).is_some(), || format!("live job {id} is gone"))?;
    }
    Ok(())
}

/// All invariants of one command: [`check_step`], and that what does not match the state changes nothing. The
/// match is worked out here once more, from the state before, on purpose.
pub fn check_command(before: &State, command: &Command, reply: &Reply, after: &State) -> Check {
    check_step(before, after)?;
    stale_reports_change_nothing(before, command, after)?;
    ensure(!reply.is_refusal() || before.digest() == after.digest(), || {
        format!("{} was refused ({reply:?}) but changed the state", command.name())
    })
}

/// A cut-off node may still work and report: unless artifact, generation, node, incarnation and attempt match,
/// what it says changes nothing.
pub fn stale_reports_change_nothing(before: &State, command: &Command, after: &State) -> Check {
    let (Command::Seal { report, .. }
    | Command::ReportStaged { report, .. }
    | Command::ReportFailed { report, .. }
    | Command::ReportHeld { report, .. }
    | Command::ReportLost { report, .. }) = command
    else {
        return Ok(());
    };
    let matches = before.artifact(&report.model).is_some_and(|artifact| {
        let fence = artifact
            .placements
            .get(&report.node)
            .map(|p| p.fence)
            .unwrap_or_default();
        artifact.generation == report.generation
            && fence == report.fence
            && before
                .node(&report.node)
                .is_some_and(|n| n.incarnation == report.incarnation)
    });
    ensure(matches || before.digest() == after.digest(), || {
        format!("a stale report changed the state: {report:?}")
    })
}
