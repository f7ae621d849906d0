//! Random command sequences: valid ones, stale ones, nonsense. After every command every invariant holds, twice
//! is once, a refusal changes nothing, a snapshot read back continues with the same digests; at the end a replay
//! gives the same digest.

use super::*;
use proptest::prelude::*;

/// Small numbers that [`resolve`] turns into a command that mostly makes sense in the present state.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Register {
        i: usize,
        store: u8,
        stale: bool,
    },
    Status {
        i: usize,
        status: u8,
        stale: bool,
    },
    Free {
        i: usize,
        blocks: u64,
    },
    Part {
        which: usize,
        index: u32,
        wrong: bool,
    },
    Create {
        job: usize,
        m: usize,
        v: usize,
        seed: usize,
        targets: u8,
        attempts: u32,
        deadline_ms: Option<u64>,
        priority: i8,
    },
    Version {
        version: u32,
    },
    Cancel {
        job: usize,
    },
    Acquire {
        job: usize,
        node: Option<usize>,
        off: u64,
    },
    Replicate {
        m: usize,
        nodes: u8,
        off: u64,
    },
    Seal {
        at: At,
        root: usize,
    },
    Staged {
        at: At,
        root: usize,
    },
    Failed {
        at: At,
        retryable: bool,
    },
    Held {
        at: At,
        root: usize,
    },
    Lost {
        at: At,
    },
    Tick,
    Prune,
    Epoch {
        epoch: u64,
    },
    Limits {
        small: bool,
    },
    /// What a healthy cluster would do next with this model.
    Proceed {
        m: usize,
        root: usize,
    },
    /// An earlier command comes again.
    Again {
        which: usize,
    },
}

/// Which report: mostly that of the placement's attempt, sometimes one that is fenced.
#[derive(Clone, Debug)]
pub(crate) struct At {
    m: usize,
    i: usize,
    fence_off: u64,
    generation_off: u64,
    incarnation_off: u64,
}

const NODES: usize = 4;
const MODELS: usize = 2;
const JOBS: usize = 6;

fn at() -> impl Strategy<Value = At> {
    let mostly_zero = || prop_oneof![9 => Just(0u64), 1 => 1u64..3];
    (0..MODELS, 0..NODES, mostly_zero(), mostly_zero(), mostly_zero()).prop_map(
        |(m, i, fence_off, generation_off, incarnation_off)| At {
            m,
            i,
            fence_off,
            generation_off,
            incarnation_off,
        },
    )
}

fn mostly_zero_root() -> impl Strategy<Value = usize> {
    prop_oneof![6 => Just(0usize), 1 => Just(1)]
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..NODES, prop_oneof![5 => Just(0u8), 1 => 1u8..3], any::<bool>()).prop_map(|(i, store, stale)| Op::Register { i, store, stale }),
        20 => (0..MODELS, mostly_zero_root()).prop_map(|(m, root)| Op::Proceed { m, root }),
        2 => (0..NODES, 0u8..3, prop::bool::weighted(0.1)).prop_map(|(i, status, stale)| Op::Status { i, status, stale }),
        1 => (0..NODES, 0u64..8).prop_map(|(i, blocks)| Op::Free { i, blocks }),
        2 => (0usize..2, 0u32..3, prop::bool::weighted(0.2)).prop_map(|(which, index, wrong)| Op::Part { which, index, wrong }),
        8 => (0..JOBS, 0..MODELS, prop_oneof![4 => Just(0usize), 1 => Just(1)], 0..NODES, 1u8..16, 1u32..4, prop::option::weighted(0.2, 0u64..200_000), prop_oneof![3 => Just(0i8), 1 => -11i8..12])
            .prop_map(|(job, m, v, seed, targets, attempts, deadline_ms, priority)| Op::Create { job, m, v, seed, targets, attempts, deadline_ms, priority }),
        2 => (1..=SUPPORTED_CLUSTER_VERSION + 1).prop_map(|version| Op::Version { version }),
        2 => (0..JOBS).prop_map(|job| Op::Cancel { job }),
        10 => (0..JOBS, prop::option::weighted(0.1, 0..NODES), prop_oneof![9 => Just(0u64), 1 => 1u64..3]).prop_map(|(job, node, off)| Op::Acquire { job, node, off }),
        8 => (0..MODELS, 1u8..16, prop_oneof![9 => Just(0u64), 1 => 1u64..3]).prop_map(|(m, nodes, off)| Op::Replicate { m, nodes, off }),
        8 => (at(), mostly_zero_root()).prop_map(|(at, root)| Op::Seal { at, root }),
        12 => (at(), mostly_zero_root()).prop_map(|(at, root)| Op::Staged { at, root }),
        6 => (at(), prop::bool::weighted(0.7)).prop_map(|(at, retryable)| Op::Failed { at, retryable }),
        2 => (at(), mostly_zero_root()).prop_map(|(at, root)| Op::Held { at, root }),
        5 => at().prop_map(|at| Op::Lost { at }),
        2 => Just(Op::Tick),
        2 => Just(Op::Prune),
        1 => (0u64..4).prop_map(|epoch| Op::Epoch { epoch }),
        1 => any::<bool>().prop_map(|small| Op::Limits { small }),
        3 => (0usize..1000).prop_map(|which| Op::Again { which }),
    ]
}

fn bits(mask: u8) -> Vec<usize> {
    (0..NODES).filter(|i| mask & (1 << i) != 0).collect()
}

fn report(state: &State, at: &At) -> ReportId {
    let artifact = state.artifact(&model(at.m));
    let mut fence = artifact
        .and_then(|a| a.placements.get(&node(at.i)))
        .map(|p| p.fence)
        .unwrap_or_default();
    fence.attempt = fence.attempt.wrapping_sub(at.fence_off);
    ReportId {
        model: model(at.m),
        generation: artifact
            .map_or(1, |a| a.generation)
            .wrapping_sub(at.generation_off),
        node: node(at.i),
        incarnation: state
            .node(&node(at.i))
            .map_or(1, |n| n.incarnation)
            .wrapping_sub(at.incarnation_off),
        fence,
    }
}

/// The two blobs that [`Op::Part`] puts, in three parts each.
fn part(which: usize, index: u32, wrong: bool, now_ms: u64) -> Command {
    let whole: Vec<u8> = (0..9).map(|i| (which * 100 + i) as u8).collect();
    let mut bytes = whole[index as usize * 3..][..3].to_vec();
    bytes[0] ^= u8::from(wrong);
    Command::PutBlobPart {
        digest: Digest::sha256(&whole),
        index,
        count: 3,
        total_bytes: 9,
        bytes: bytes.into(),
        now_ms,
    }
}

pub(crate) fn resolve(op: &Op, state: &State, history: &[Command], now_ms: u64) -> Option<Command> {
    let incarnation = |i: usize| state.node(&node(i)).map_or(0, |n| n.incarnation);
    let next = |m: usize| {
        state
            .artifact(&model(m))
            .map_or((1, 1), |a| (a.generation, a.attempts + 1))
    };
    Some(match op {
        Op::Register { i, store, stale } => Command::RegisterNode {
            node: node(*i),
            store_id: format!("store {store}"),
            expected_incarnation: if *stale { 0 } else { incarnation(*i) },
            about: about(*i),
            now_ms,
        },
        Op::Status { i, status, stale } => Command::SetNodeStatus {
            node: node(*i),
            incarnation: incarnation(*i),
            // Another time than the true one, also where there is no such node.
            seen_since_ms: state
                .node(&node(*i))
                .map_or(0, |n| n.since_ms)
                .wrapping_sub(u64::from(*stale)),
            status: [NodeStatus::Up, NodeStatus::Suspected, NodeStatus::Down][*status as usize],
            reason: "silence".into(),
            now_ms,
        },
        Op::Free { i, blocks } => Command::SetNodeFree {
            node: node(*i),
            incarnation: incarnation(*i),
            capacity_bytes: MIB * 8,
            free_bytes: blocks * MIB / 2,
            measured_ms: now_ms,
            now_ms,
        },
        Op::Part { which, index, wrong } => part(*which, *index, *wrong, now_ms),
        Op::Create {
            job,
            m,
            v,
            seed,
            targets,
            attempts,
            deadline_ms,
            priority,
        } => {
            let mut create = create_command(*job, *m, *v, *seed, &bits(*targets));
            create.max_attempts = *attempts;
            create.deadline_ms = deadline_ms.map(|d| now_ms + d);
            create.now_ms = now_ms;
            let create = Box::new(create);
            match *priority {
                0 => Command::CreateJob(create),
                priority => Command::CreateJobWithPriority { create, priority },
            }
        }
        Op::Version { version } => Command::SetClusterVersion {
            version: *version,
            now_ms,
        },
        Op::Cancel { job } => Command::CancelJob {
            job: job_id(*job),
            progress: (0..NODES).map(|i| (i as u32, 1000 * i as u64)).collect(),
            now_ms,
        },
        Op::Acquire {
            job,
            node: other,
            off,
        } => {
            let record = state.job(&job_id(*job))?;
            let artifact = state.artifact(&record.model)?;
            let target = other.map_or(record.seed.clone(), node);
            Command::AuthoriseAcquire {
                model: record.model.clone(),
                generation: artifact.generation,
                attempt: artifact.attempts + 1 - off.min(&artifact.attempts),
                incarnation: state.node(&target).map_or(0, |n| n.incarnation),
                node: target,
                job: job_id(*job),
                reserve_bytes: MIB,
                now_ms,
            }
        }
        Op::Replicate { m, nodes, off } => {
            let (generation, first_attempt) = next(*m);
            let to = |i: usize| ReplicateTo {
                node: node(i),
                incarnation: incarnation(i),
                reserve_bytes: MIB,
            };
            let nodes = bits(*nodes).into_iter().map(to).collect();
            let first_attempt = first_attempt.saturating_sub(*off);
            Command::AuthoriseReplicate {
                model: model(*m),
                generation,
                first_attempt,
                nodes,
                now_ms,
            }
        }
        Op::Seal { at, root } => Command::Seal {
            report: report(state, at),
            seal: seal(*root),
            now_ms,
        },
        Op::Staged { at, root } => Command::ReportStaged {
            report: report(state, at),
            seal: seal(*root),
            local_path: format!("/models/{}/{}", at.i, at.m),
            checksum_verified: true,
            now_ms,
        },
        Op::Failed { at, retryable } => Command::ReportFailed {
            report: report(state, at),
            failure: Failure {
                code: "x".into(),
                message: "it failed".into(),
                retryable: *retryable,
            },
            verified_bytes: 7,
            now_ms,
        },
        Op::Held { at, root } => Command::ReportHeld {
            report: report(state, at),
            seal: seal(*root),
            local_path: "/held".into(),
            now_ms,
        },
        Op::Lost { at } => Command::ReportLost {
            report: report(state, at),
            now_ms,
        },
        Op::Proceed { m, root } => return proceed(state, *m, *root, now_ms),
        Op::Tick => Command::Tick { now_ms },
        Op::Prune => Command::Prune { now_ms },
        Op::Epoch { epoch } => Command::RaiseRecoveryEpoch {
            epoch: *epoch,
            now_ms,
        },
        Op::Limits { small } => {
            let mut limits = Limits::default();
            if *small {
                limits = Limits {
                    max_terminal_jobs: 2,
                    max_ids: 2,
                    job_ttl_ms: 50_000,
                    id_ttl_ms: 100_000,
                    blob_ttl_ms: 0,
                    unsealed_ttl_ms: 40_000,
                    down_node_ttl_ms: 30_000,
                };
            }
            Command::SetLimits { limits, now_ms }
        }
        Op::Again { which } => history.get(which % history.len().max(1))?.clone(),
    })
}

/// The next step of a healthy cluster: authorise, seal, stage.
fn proceed(state: &State, m: usize, root: usize, now_ms: u64) -> Option<Command> {
    let artifact = state.artifact(&model(m))?;
    let exact = |i: usize| At {
        m,
        i,
        fence_off: 0,
        generation_off: 0,
        incarnation_off: 0,
    };
    let index_of = |id: &NodeId| (0..NODES).find(|i| node(*i) == *id).expect("a node of the test");
    if let Some(id) = &artifact.acquiring {
        return resolve(
            &Op::Seal {
                at: exact(index_of(id)),
                root,
            },
            state,
            &[],
            now_ms,
        );
    }
    if !state.is_available(artifact) {
        let (id, _) = state.live_jobs_of(&model(m)).next()?;
        let job = (0..JOBS).find(|j| job_id(*j) == *id)?;
        return resolve(
            &Op::Acquire {
                job,
                node: None,
                off: 0,
            },
            state,
            &[],
            now_ms,
        );
    }
    let running = artifact
        .placements
        .iter()
        .find(|(_, p)| p.state == PlacementState::Acquiring);
    let op = match running {
        Some((id, _)) => Op::Staged {
            at: exact(index_of(id)),
            root: 0,
        },
        None => Op::Replicate { m, nodes: 15, off: 0 },
    };
    resolve(&op, state, &[], now_ms)
}

/// Runs a sequence; the first broken invariant is the error.
pub(crate) fn run(state: &mut State, ops: &[(Op, u64)]) -> Result<Vec<Command>, String> {
    let mut history = Vec::new();
    let mut now = START_MS;
    for (step, (op, advance)) in ops.iter().enumerate() {
        // Clocks of different leaders differ: sometimes time goes back.
        now = if *advance > 45_000 {
            now - 5_000
        } else {
            now + advance
        };
        let Some(command) = resolve(op, state, &history, now) else {
            continue;
        };
        let index = 2 * history.len() as u64 + 1;
        let before = state.clone();
        let digest_before = before.digest();
        let applied = state.apply(index, &command);
        let context = |broken: String| format!("step {step}, {command:?} → {:?}: {broken}", applied.reply);
        invariants::check(state).map_err(context)?;
        invariants::check_command(&before, &command, &applied.reply, state).map_err(context)?;
        let digest = state.digest();
        let mut twice = state.clone();
        twice.apply(index + 1, &command);
        if before.digest() != digest_before {
            return Err(context("a copy changed when the state did".into()));
        }
        if twice.digest() != digest {
            return Err(context(format!(
                "twice is not once:\n{:#?}\n{:#?}",
                state.data, twice.data
            )));
        }
        for (id, job) in state.jobs() {
            let changed = before.job(id) != Some(job);
            if changed != applied.jobs.contains(id)
                && before
                    .job(id)
                    .is_none_or(|b| b.views != job.views || b.status != job.status)
            {
                return Err(context(format!(
                    "job {id} changed={changed}, announced {:?}",
                    applied.jobs
                )));
            }
        }
        if step % 7 == 3 {
            let read = State::decode_snapshot(&state.encode_snapshot()).map_err(|e| e.to_string())?;
            if read.digest() != digest || read.index != state.index {
                return Err(context("a snapshot read back differs".into()));
            }
            #[cfg(test)]
            let break_fence = state.break_fence;
            *state = read;
            state.break_fence = break_fence;
        }
        history.push(command);
    }
    Ok(history)
}

pub(crate) fn ops() -> impl Strategy<Value = Vec<(Op, u64)>> {
    prop::collection::vec((op(), 0u64..50_000), 1..120).prop_map(|mut ops| {
        // Nodes first, or nothing can happen.
        let nodes = (0..NODES).map(|i| {
            (
                Op::Register {
                    i,
                    store: 0,
                    stale: false,
                },
                1,
            )
        });
        ops.splice(0..0, nodes);
        ops
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn invariants_hold_and_replay_agrees(ops in ops()) {
        let mut state = State::new();
        let history = run(&mut state, &ops).map_err(TestCaseError::fail)?;
        let mut replay = State::new();
        for (at, command) in history.iter().enumerate() {
            let decoded = Command::decode(&command.encode().unwrap()).unwrap();
            replay.apply(2 * at as u64 + 1, &decoded);
        }
        prop_assert_eq!(replay.digest(), state.digest());
    }

    /// Any bytes: an error, never a panic, and what decodes encodes to the same.
    #[test]
    fn decoding_is_total(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = State::decode_snapshot(&bytes);
        if let Ok(command) = Command::decode(&bytes) {
            State::new().apply(1, &command);
        }
    }
}

/// The generator reaches what it is there for: else the property would hold for want of trying.
#[test]
fn the_generator_reaches_every_ending() {
    use proptest::{
        strategy::ValueTree,
        test_runner::{Config, TestRunner},
    };
    let mut runner = TestRunner::new_with_rng(
        Config::default(),
        proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha),
    );
    let mut statuses = std::collections::BTreeMap::<JobStatus, u32>::new();
    let (mut shared, mut source_changed, mut regenerated, mut prioritised) = (0, 0, 0, 0);
    for _ in 0..400 {
        let ops = ops().new_tree(&mut runner).unwrap().current();
        let mut state = State::new();
        run(&mut state, &ops).unwrap();
        for (_, job) in state.jobs() {
            *statuses.entry(job.status).or_default() += 1;
            prioritised += u32::from(job.priority != 0);
            source_changed += u32::from(
                job.last_error
                    .as_ref()
                    .is_some_and(|e| e.contains("other content")),
            );
        }
        for (model, artifact) in state.artifacts() {
            shared += u32::from(state.live_jobs_of(model).count() > 1);
            regenerated += u32::from(artifact.generation > 1);
        }
    }
    for status in [
        JobStatus::Planned,
        JobStatus::Seeding,
        JobStatus::Replicating,
        JobStatus::Completed,
        JobStatus::Failed,
        JobStatus::Canceled,
    ] {
        assert!(
            statuses.get(&status).is_some_and(|n| *n >= 10),
            "{status:?} is not reached: {statuses:?}"
        );
    }
    assert!(
        shared > 10 && source_changed > 0 && regenerated > 10 && prioritised > 10,
        "{shared} {source_changed} {regenerated} {prioritised}"
    );
}
