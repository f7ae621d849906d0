//! The schedule: several clusters side by side lose their leaders in turn.
//!
//! A round is one fault for each cluster, spread evenly over the interval. Everything of one fault happens in its
//! cluster's turn: caught up, load, fault, first acknowledgement, load for a moment longer, healed, caught up again.
//! A turn that takes longer than its share delays those behind it: faults of one cluster are *at least* the interval
//! apart. The kinds of faults are mixed, so that a run that is cut short has some of each.
//!
//! Terms are looked at between the turns too: one that rose with no fault under way is an election nobody caused.

use super::{Fault, GIVE_UP, MAX_WRITES, Report, Subject, WRITE_EVERY, WRITE_TIMEOUT};
use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    sync::{Semaphore, mpsc},
    task::JoinSet,
};

/// Writes come for so long before a fault; what they warm up (connections, caches) is warm by then.
const LOAD_BEFORE: Duration = Duration::from_secs(1);
/// And for so long after the first acknowledgement: long enough that what follows the election is over.
const LOAD_AFTER: Duration = Duration::from_millis(500);
/// Faults come up to this much later than the schedule says, so that they are in step with nothing.
const JITTER_MS: u64 = 97;

/// How many faults of each kind each cluster gets.
#[derive(Clone, Copy, Debug)]
pub struct Counts {
    /// kill -9.
    pub kills: usize,
    /// SIGSTOP, and as many times cut off.
    pub silences: usize,
}

/// Which fault comes in which round.
#[derive(Clone, Debug)]
pub struct Plan {
    rounds: Vec<Fault>,
    /// From one fault of a cluster to its next.
    pub interval: Duration,
}

impl Plan {
    /// Each kind spread evenly over the whole.
    pub fn new(counts: Counts, interval: Duration) -> Self {
        let kinds = [
            (Fault::Kill, counts.kills),
            (Fault::Freeze, counts.silences),
            (Fault::CutOff, counts.silences),
        ];
        // Number i of n belongs at (2i + 1) / 2n of the whole.
        let mut places: Vec<(f64, Fault)> = kinds
            .into_iter()
            .flat_map(|(fault, n)| (0..n).map(move |i| ((2 * i + 1) as f64 / (2 * n) as f64, fault)))
            .collect();
        places.sort_by(|a, b| a.0.total_cmp(&b.0));
        let rounds = places.into_iter().map(|(_, fault)| fault).collect();
        Self { rounds, interval }
    }

    /// Number of rounds.
    pub fn len(&self) -> usize {
        self.rounds.len()
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.rounds.is_empty()
    }
}

/// Carries the plan out. What it measures is in `report` at every moment. A cluster that does not come back is out from
/// then on, and its error is in the report.
pub async fn run(
    subjects: &mut [&mut dyn Subject],
    plan: &Plan,
    report: &Mutex<Report>,
    mut progress: impl FnMut(&str, Fault, Duration),
) {
    let mut states: Vec<Option<State>> = subjects.iter().map(|_| Some(State::default())).collect();
    for subject in subjects.iter_mut() {
        subject.begin_series();
        report.lock().add_cluster(&subject.name(), subject.is_judged());
    }
    let share = plan.interval / subjects.len().max(1) as u32;
    let mut slot = Instant::now();
    for (round, fault) in plan.rounds.iter().enumerate() {
        for (subject, seat) in subjects.iter_mut().zip(&mut states) {
            let Some(state) = seat else { continue };
            tokio::time::sleep(slot.saturating_duration_since(Instant::now())).await;
            // Late for whatever reason: all that follows is as late.
            slot = slot.max(Instant::now()) + share;
            match turn(*subject, state, *fault, round as u64, report).await {
                Ok(took) => progress(&subject.name(), *fault, took),
                Err(error) => {
                    report.lock().out(&subject.name(), format!("{error:#}"));
                    *seat = None;
                }
            }
        }
    }
}

#[derive(Default)]
struct State {
    writes: u64,
    /// As last seen, with all faults healed.
    term: Option<u64>,
}

/// What one write brought.
#[derive(Clone, Copy, Debug)]
struct Acknowledged {
    sent: Instant,
    answered: Instant,
    term: u64,
}

async fn turn(
    subject: &mut dyn Subject,
    state: &mut State,
    fault: Fault,
    round: u64,
    report: &Mutex<Report>,
) -> Result<Duration> {
    let name = subject.name();
    let (leader, term) = settled(subject).await?;
    if let Some(before) = state.term {
        report.lock().at_rest(&name, term.saturating_sub(before));
    }
    let (took, led) = lose(subject, state, fault, leader, term, round).await?;
    // Healed whatever came of it was done inside; the rest belongs to this fault.
    let (_, after) = settled(subject).await?;
    state.term = Some(after);
    report
        .lock()
        .sample(&name, fault, took, led - term - 1, after.saturating_sub(led));
    Ok(took)
}

async fn settled(subject: &mut dyn Subject) -> Result<(usize, u64)> {
    tokio::time::timeout(GIVE_UP, subject.settled())
        .await
        .with_context(|| format!("{} does not settle within {GIVE_UP:?}", subject.name()))?
}

/// Load, fault, first acknowledgement, heal: how long it took, and the term that it carried.
async fn lose(
    subject: &mut dyn Subject,
    state: &mut State,
    fault: Fault,
    leader: usize,
    term: u64,
    round: u64,
) -> Result<(Duration, u64)> {
    let (acknowledged, mut acknowledgements) = mpsc::unbounded_channel();
    let turns = Arc::new(Semaphore::new(MAX_WRITES));
    let mut writes = JoinSet::new();
    let mut ticks = tokio::time::interval(WRITE_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // A multiple of a prime: spread over the whole range, in step with no interval.
    let jitter = Duration::from_micros(round * 7_919 % (JITTER_MS * 1_000));
    let moment = tokio::time::sleep(LOAD_BEFORE + jitter);
    let end = tokio::time::sleep(LOAD_BEFORE + jitter + GIVE_UP);
    tokio::pin!(moment, end);
    let mut lost: Option<Instant> = None;
    let mut first: Option<(Duration, u64)> = None;
    loop {
        tokio::select! {
            () = &mut moment, if lost.is_none() => {
                let at = Instant::now();
                subject.inject(leader, fault)?;
                lost = Some(at);
            }
            () = &mut end => break,
            _ = ticks.tick() => {
                let turn = Arc::clone(&turns).acquire_owned().await?;
                let (write, acknowledged) = (subject.write(state.writes), acknowledged.clone());
                state.writes += 1;
                let sent = Instant::now();
                writes.spawn(async move {
                    if let Ok(Ok(term)) = tokio::time::timeout(WRITE_TIMEOUT, write).await {
                        let _ = acknowledged.send(Acknowledged { sent, answered: Instant::now(), term });
                    }
                    drop(turn);
                });
            }
            Some(ack) = acknowledgements.recv() => {
                let ack: Acknowledged = ack;
                if let Some(at) = lost && first.is_none() && ack.sent >= at && ack.term > term {
                    first = Some((ack.answered - at, ack.term));
                    end.as_mut().reset(tokio::time::Instant::now() + LOAD_AFTER);
                }
            }
            Some(_) = writes.join_next() => {}
        }
    }
    // What is still under way hangs at the lost leader; the others' turn shall not hear of it.
    writes.shutdown().await;
    if lost.is_some() {
        subject.heal(leader, fault)?;
    }
    ensure!(
        first.is_some(),
        "{}: no write was acknowledged in a higher term than {term} within {GIVE_UP:?} of {}",
        subject.name(),
        fault.name()
    );
    first.context("looked at above")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_that_is_cut_short_has_some_of_each() {
        let counts = Counts {
            kills: 30,
            silences: 3,
        };
        let plan = Plan::new(counts, Duration::from_secs(10));
        let count = |rounds: &[Fault], fault| rounds.iter().filter(|f| **f == fault).count();
        assert_eq!(plan.len(), 36);
        for (fault, all) in [(Fault::Kill, 30), (Fault::Freeze, 3), (Fault::CutOff, 3)] {
            assert_eq!(count(&plan.rounds, fault), all);
            let third = count(&plan.rounds[..12], fault);
            assert!(
                third.abs_diff(all / 3) <= 1,
                "{fault:?}: {third} of {all} in the first third"
            );
        }
        assert!(
            Plan::new(
                Counts {
                    kills: 0,
                    silences: 0
                },
                Duration::ZERO
            )
            .is_empty()
        );
    }
}
