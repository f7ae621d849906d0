//! The reconciler: what the leader does by itself.
//!
//! It runs only while this master leads: wakes on an applied entry, a session's news or a tick, reads the state and
//! the facts, asks the pure [`plan`], sends orders and proposes commands. Nothing it holds is worth saving: it
//! begins every term with a look at everything.
//!
//! Guaranteed: reports of one artifact reach the log in the order in which they came; what a report says is in the
//! log before the planner looks again; a report without an outcome is proposed again until it has one or this
//! master leads no more (then the node tells it to the next leader). A master that stood still does not hold its
//! own silence against the nodes. Not guaranteed: that a cycle ends quickly: without a quorum it waits for one.

use crate::{
    consensus::ProposeError,
    context::MasterContext,
    plan::{Intent, plan},
    session::Facts,
};
use futures_util::{StreamExt, stream};
use mooncake_proto::{
    api::NodeStatus,
    ids::{ModelRef, NodeId},
};
use mooncake_state::{Command, Failure, Reply};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};
use tokio_util::sync::CancellationToken;

/// Chains of proposals under way at once: below what consensus takes, so that callers find room beside it.
const CHAINS_AT_ONCE: usize = 64;
/// Least time between two cycles: news that come together are looked at together.
const MIN_PAUSE: Duration = Duration::from_millis(5);
/// A tick that comes this late says that this process stood still.
const OWN_STALL: Duration = Duration::from_secs(1);

/// Runs until `cancel`.
pub(crate) async fn run(ctx: Arc<MasterContext>, cancel: CancellationToken) {
    let mut leadership = ctx.consensus.leadership();
    loop {
        let term = tokio::select! {
            led = leadership.wait_for(|l| l.is_serving) => match led {
                Ok(led) => led.term,
                Err(_) => return,
            },
            () = cancel.cancelled() => return,
        };
        ctx.begin(term);
        tracing::info!(term, "reconciling");
        let mut watch = ctx.consensus.leadership();
        tokio::select! {
            () = lead(&ctx) => {}
            _ = watch.wait_for(|l| !l.is_serving || l.term != term) => {}
            () = cancel.cancelled() => {}
        }
        ctx.sessions.facts_mut().end(term);
        tracing::info!(term, "no longer reconciling");
    }
}

/// One term's work; never returns by itself.
async fn lead(ctx: &MasterContext) {
    let mut applied = ctx.consensus.applied();
    let tick = ctx.options.tick;
    loop {
        let (began, mut accounted) = (Instant::now(), Duration::ZERO);
        let worked = cycle(ctx, &mut accounted).await;
        if worked == Worked::InVain {
            // The log refused everything: the state will not be asked the same again at once.
            tokio::time::sleep(tick).await;
        } else {
            tokio::select! {
                () = ctx.wake.notified() => {}
                moved = applied.changed() => if !moved { return std::future::pending().await },
                () = tokio::time::sleep(tick) => {}
            }
            tokio::time::sleep(MIN_PAUSE).await;
        }
        if let Some(stood) = stood(began.elapsed(), accounted, tick) {
            tracing::warn!(
                stood_ms = stood.as_millis() as u64,
                "this process stood still: the nodes get a new reconnect window"
            );
            ctx.metrics.stalls.inc();
            ctx.sessions.facts_mut().observed.begin_again(ctx.now_ms());
        }
    }
}

/// How long this process stood still in a round that took `elapsed`, if that is more than a late tick: what was spent on
/// waiting for others and on working is `accounted` for.
fn stood(elapsed: Duration, accounted: Duration, tick: Duration) -> Option<Duration> {
    let rest = elapsed.saturating_sub(accounted);
    (rest > tick + OWN_STALL).then_some(rest)
}

/// Others decide how long `work` takes.
async fn awaited<T>(accounted: &mut Duration, work: impl Future<Output = T>) -> T {
    let began = Instant::now();
    let done = work.await;
    *accounted += began.elapsed();
    done
}

/// `work` takes the time that it computes; what it takes beyond that, it stood still.
fn computed<T>(accounted: &mut Duration, work: impl FnOnce() -> T) -> T {
    let began = thread_time();
    let done = work();
    *accounted += thread_time().saturating_sub(began);
    done
}

/// Time that this thread has computed for.
fn thread_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call fills the structure that it is given.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    match failed {
        0 => Duration::new(time.tv_sec as u64, time.tv_nsec as u32),
        // A system without such a clock: a long plan counts as a stall then.
        _ => Duration::ZERO,
    }
}

/// The retention of this master's configuration becomes the cluster's. All masters should have the same.
async fn set_limits(ctx: &MasterContext) {
    let limits = ctx.options.limits;
    let differs = *ctx.consensus.state().limits() != limits;
    if differs {
        propose_chain(
            ctx,
            vec![Command::SetLimits {
                limits,
                now_ms: ctx.now_ms(),
            }],
        )
        .await;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Worked {
    /// Something was done, or there was nothing to do.
    Well,
    /// Everything that was proposed was refused.
    InVain,
}

async fn cycle(ctx: &MasterContext, accounted: &mut Duration) -> Worked {
    awaited(accounted, set_limits(ctx)).await;
    let reports = {
        let mut facts = ctx.sessions.facts_mut();
        for node in facts.close_lost(Instant::now(), ctx.options.suspect_after) {
            tracing::info!(%node, "the session did not come back");
        }
        facts.take_pending()
    };
    if !reports.is_empty() {
        let outcome = awaited(accounted, propose_all(ctx, reports)).await;
        if !outcome.unsettled.is_empty() {
            ctx.sessions.facts_mut().put_back(outcome.unsettled);
            return Worked::InVain;
        }
    }
    let now_ms = ctx.now_ms();
    let commands = computed(accounted, || {
        let intents = {
            let facts = ctx.sessions.facts();
            plan(&ctx.consensus.state(), &facts.observed, now_ms)
        };
        hand_out(&mut ctx.sessions.facts_mut(), intents, now_ms)
    });
    if commands.is_empty() {
        return Worked::Well;
    }
    let outcome = awaited(accounted, propose_all(ctx, commands)).await;
    if outcome.effective == 0 {
        Worked::InVain
    } else {
        Worked::Well
    }
}

/// Hands the orders to their sessions; the commands are left. Where an order found no room, those behind it for the
/// same artifact and node are kept back too: they are about what it would have begun.
fn hand_out(facts: &mut Facts, intents: Vec<Intent>, now_ms: u64) -> Vec<Command> {
    let mut commands = Vec::new();
    let mut kept_back: BTreeSet<(NodeId, ModelRef)> = BTreeSet::new();
    for intent in intents {
        match intent {
            Intent::Propose(command) => commands.push(command),
            Intent::Send { node, order } => {
                let about = (node, order.model.clone());
                if kept_back.contains(&about) {
                    continue;
                }
                if !facts.send(&about.0, &order, now_ms) {
                    tracing::debug!(node = %about.0, model = %order.model, "an order found no room; it is planned again");
                    kept_back.insert(about);
                }
            }
        }
    }
    commands
}

struct Outcome {
    /// Committed and not refused.
    effective: usize,
    /// Of which nothing is known, or which found no room.
    unsettled: Vec<Command>,
}

/// Proposes chains side by side, each one in order.
async fn propose_all(ctx: &MasterContext, commands: Vec<Command>) -> Outcome {
    let chains = stream::iter(chains(commands).into_values());
    let outcomes: Vec<Outcome> = chains
        .map(|chain| propose_chain(ctx, chain))
        .buffered(CHAINS_AT_ONCE)
        .collect()
        .await;
    let mut all = Outcome {
        effective: 0,
        unsettled: Vec::new(),
    };
    for outcome in outcomes {
        all.effective += outcome.effective;
        all.unsettled.extend(outcome.unsettled);
    }
    all
}

async fn propose_chain(ctx: &MasterContext, chain: Vec<Command>) -> Outcome {
    let mut outcome = Outcome {
        effective: 0,
        unsettled: Vec::new(),
    };
    let mut chain = chain.into_iter();
    while let Some(command) = chain.next() {
        let name = command.name();
        match ctx.consensus.propose(&command).await {
            Ok(proposed) if proposed.reply.is_refusal() => {
                ctx.metrics.proposal(name, "refused");
                log_refusal(&command, &proposed.reply);
            }
            Ok(_) => {
                ctx.metrics.proposal(name, "applied");
                outcome.effective += 1;
                log_applied(&command);
            }
            Err(error @ ProposeError::TooLarge { .. }) => {
                ctx.metrics.proposal(name, "too_large");
                tracing::error!(command = name, %error, "a command of this program does not fit into the log");
                // A task's end must not get lost: its job would wait for ever.
                if let Some(failed) = too_large(&command, &error.to_string()) {
                    chain = std::iter::once(failed)
                        .chain(chain)
                        .collect::<Vec<_>>()
                        .into_iter();
                }
            }
            Err(error) => {
                ctx.metrics.proposal(name, "unsettled");
                tracing::debug!(command = name, %error, "a command was not settled");
                outcome.unsettled.push(command);
                // Those after it must not overtake it.
                outcome.unsettled.extend(chain);
                return outcome;
            }
        }
    }
    outcome
}

/// What is reported of an attempt whose own report does not fit into the log. `None`: it was no such report, or it is
/// this one already.
fn too_large(command: &Command, error: &str) -> Option<Command> {
    let report = match command {
        Command::Seal { report, .. } | Command::ReportStaged { report, .. } => report,
        Command::ReportFailed { report, failure, .. } if failure.code != REPORT_TOO_LARGE => report,
        _ => return None,
    };
    Some(Command::ReportFailed {
        failure: Failure {
            code: REPORT_TOO_LARGE.into(),
            message: format!(
                "node {} reported an end that does not fit into the log ({error}); is it of another version?",
                report.node
            ),
            retryable: false,
        },
        report: report.clone(),
        verified_bytes: 0,
        now_ms: command.now_ms(),
    })
}

/// [`Failure::code`].
const REPORT_TOO_LARGE: &str = "report_too_large";

fn log_refusal(command: &Command, reply: &Reply) {
    match reply {
        Reply::Stale { detail } => {
            tracing::debug!(command = command.name(), detail, "the state had moved on")
        }
        // The planner and the sessions only propose what the state allows.
        other => {
            tracing::error!(command = command.name(), reply = ?other, "the state machine refused a command")
        }
    }
}

fn log_applied(command: &Command) {
    match command {
        Command::SetNodeStatus {
            node,
            status: NodeStatus::Suspected,
            reason,
            ..
        } => {
            tracing::info!(%node, reason, "node suspected");
        }
        Command::SetNodeStatus {
            node,
            status: NodeStatus::Down,
            reason,
            ..
        } => {
            tracing::warn!(%node, reason, "node down");
        }
        Command::AuthoriseAcquire {
            model,
            node,
            attempt,
            job,
            ..
        } => {
            tracing::info!(%model, %node, attempt, %job, "download authorised");
        }
        Command::AuthoriseReplicate {
            model,
            first_attempt,
            nodes,
            ..
        } => {
            tracing::info!(%model, first_attempt, nodes = nodes.len(), "copies authorised");
        }
        Command::Seal { report, .. } => {
            tracing::info!(model = %report.model, node = %report.node, "artifact sealed")
        }
        Command::ReportStaged {
            report, local_path, ..
        } => {
            tracing::info!(model = %report.model, node = %report.node, local_path, "model staged");
        }
        Command::ReportFailed { report, failure, .. } => {
            tracing::warn!(model = %report.model, node = %report.node, code = failure.code, reason = failure.message,
                retryable = failure.retryable, "task failed");
        }
        Command::ReportLost { report, .. } => {
            tracing::warn!(model = %report.model, node = %report.node, "a staged model is gone from its node");
        }
        _ => {}
    }
}

/// What must stay in order among itself: the commands of one artifact, those of one node, the rest.
fn chains(commands: Vec<Command>) -> BTreeMap<String, Vec<Command>> {
    let mut chains: BTreeMap<String, Vec<Command>> = BTreeMap::new();
    for command in commands {
        let key = match &command {
            Command::AuthoriseAcquire { model, .. } | Command::AuthoriseReplicate { model, .. } => {
                format!("m {model}")
            }
            Command::Seal { report, .. }
            | Command::ReportStaged { report, .. }
            | Command::ReportFailed { report, .. }
            | Command::ReportHeld { report, .. }
            | Command::ReportLost { report, .. } => format!("m {}", report.model),
            Command::RegisterNode { node, .. }
            | Command::SetNodeStatus { node, .. }
            | Command::SetNodeFree { node, .. } => format!("n {node}"),
            _ => "upkeep".to_owned(),
        };
        chains.entry(key).or_default().push(command);
    }
    chains
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_proto::ids::{ModelRef, NodeId};
    use mooncake_state::{Failure, Fence, ReportId};

    #[test]
    fn an_end_that_does_not_fit_is_still_an_end() {
        let report = ReportId {
            model: ModelRef {
                model_id: "m".into(),
                revision: "r".into(),
                format: "f".into(),
                provider: "p".into(),
            },
            generation: 1,
            node: NodeId::parse("a:1").unwrap(),
            incarnation: 1,
            fence: Fence::default(),
        };
        let huge = Command::ReportFailed {
            report: report.clone(),
            failure: Failure {
                code: "x".into(),
                message: "m".repeat(mooncake_proto::MAX_COMMAND_BYTES),
                retryable: true,
            },
            verified_bytes: 1,
            now_ms: 7,
        };
        let error = huge.encode().unwrap_err().to_string();
        let instead = too_large(&huge, &error).unwrap();
        assert!(instead.encode().is_ok());
        let Command::ReportFailed {
            report: about,
            failure,
            ..
        } = &instead
        else {
            panic!("{instead:?}")
        };
        assert_eq!((about, failure.code.as_str()), (&report, REPORT_TOO_LARGE));
        assert_eq!(too_large(&instead, &error), None, "once is enough");
        assert_eq!(too_large(&Command::Tick { now_ms: 0 }, &error), None);
    }

    #[test]
    fn only_time_that_nothing_accounts_for_is_a_stall() {
        let s = Duration::from_secs_f64;
        let cases = [
            (0.3, 0.0, None),
            (1.25, 0.0, None),
            (1.26, 0.0, Some(1.26)),
            // A quorum that is slow, a plan that is large.
            (9.0, 8.7, None),
            (9.0, 4.0, Some(5.0)),
            (1.0, 1.1, None),
        ];
        for (elapsed, accounted, stall) in cases {
            let found = stood(s(elapsed), s(accounted), s(0.25));
            assert_eq!(found, stall.map(s), "{elapsed} {accounted}");
        }
        let mut accounted = Duration::ZERO;
        let began = thread_time();
        let sum: u64 = computed(&mut accounted, || {
            (0..1_000_000u64).map(std::hint::black_box).sum()
        });
        assert_eq!(sum, 499_999_500_000);
        assert!(accounted > Duration::ZERO && accounted <= thread_time() - began);
        // What sleeps does not compute.
        let before = accounted;
        let asleep = Duration::from_millis(50);
        computed(&mut accounted, || std::thread::sleep(asleep));
        assert!(accounted - before < asleep);
    }

    #[test]
    fn commands_of_one_artifact_stay_in_order() {
        let model = |id: &str| ModelRef {
            model_id: id.into(),
            revision: "r".into(),
            format: "f".into(),
            provider: "p".into(),
        };
        let node = NodeId::parse("a:1").unwrap();
        let failed = |id: &str, attempt: u64| Command::ReportFailed {
            report: ReportId {
                model: model(id),
                generation: 1,
                node: node.clone(),
                incarnation: 1,
                fence: Fence {
                    recovery_epoch: 0,
                    attempt,
                },
            },
            failure: Failure {
                code: "x".into(),
                message: String::new(),
                retryable: true,
            },
            verified_bytes: 0,
            now_ms: 0,
        };
        let replicate = Command::AuthoriseReplicate {
            model: model("a"),
            generation: 1,
            first_attempt: 3,
            nodes: Vec::new(),
            now_ms: 0,
        };
        let commands = vec![
            failed("a", 1),
            Command::Tick { now_ms: 0 },
            failed("b", 1),
            failed("a", 2),
            replicate.clone(),
        ];
        let chains: Vec<_> = chains(commands).into_values().collect();
        assert_eq!(
            chains,
            [
                vec![failed("a", 1), failed("a", 2), replicate],
                vec![failed("b", 1)],
                vec![Command::Tick { now_ms: 0 }]
            ]
        );
    }
}
