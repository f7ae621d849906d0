//! What must hold of a whole run, one invariant per file.
//!
//! [`check`] goes through [`INVARIANTS`] with all the [`Evidence`] there is. A checker never repairs, guesses or waits:
//! what it cannot judge it leaves alone, and says so in its module docs. Each one has a unit test with a history that
//! it accepts and one that it refuses; `tests/sabotage` shows that they notice a product that was broken on purpose.

pub mod acknowledged;
pub mod answers;
pub mod completed;
pub mod convergence;
pub mod digests;
pub mod downloads;
pub mod elections;
pub mod idempotency;
pub mod leaders;
pub mod linear;
pub mod log;
pub mod monotone;
pub mod refused;
pub mod replay;
pub mod staged;
pub mod stale_reports;
pub mod state;
pub mod terminal;
#[cfg(test)]
pub(crate) mod testing;

pub use convergence::Convergence;
pub use downloads::Served;
pub use leaders::Elected;
pub use replay::{Asked, Replay};

use crate::history::{Event, FolderSeen, MasterSeen, Op, Record, Standstill};
use anyhow::Result;
use std::{collections::BTreeMap, fmt, path::PathBuf};

/// Violations of one invariant that are written out; the rest is counted.
const MAX_SHOWN: usize = 20;

/// One invariant.
pub struct Invariant {
    /// Short, for reports.
    pub name: &'static str,
    /// Why somebody cares.
    pub reason: &'static str,
    check: fn(&Evidence, &mut Findings),
}

/// All of them.
pub const INVARIANTS: &[Invariant] = &[
    Invariant {
        name: "acknowledged",
        reason: "a job that was answered with 200 or 201 is never lost: its caller has gone home",
        check: acknowledged::check,
    },
    Invariant {
        name: "refused",
        reason: "an answer that says that nothing was done is true: its caller does it elsewhere",
        check: refused::check,
    },
    Invariant {
        name: "idempotency",
        reason: "a repeated create is the same job, and another body under its id is a conflict: callers repeat blindly",
        check: idempotency::check,
    },
    Invariant {
        name: "terminal",
        reason: "terminal states absorb: what was reported as ended is acted upon",
        check: terminal::check,
    },
    Invariant {
        name: "linear",
        reason: "a read sees every write that was acknowledged before it began: callers talk to each other",
        check: linear::check,
    },
    Invariant {
        name: "monotone",
        reason: "status, state and attempt never go backwards for one caller, whichever master answers",
        check: monotone::check,
    },
    Invariant {
        name: "answers",
        reason: "every answer is what the committed log says at the index that the answer names",
        check: answers::check,
    },
    Invariant {
        name: "leaders",
        reason: "one leader per term: two would acknowledge different histories",
        check: leaders::check,
    },
    Invariant {
        name: "elections",
        reason: "a term rises only when something befell the masters: an election nobody needed is time without writes",
        check: elections::check,
    },
    Invariant {
        name: "digests",
        reason: "all masters hold the same log and compute the same state from it: any of them may lead next",
        check: digests::check,
    },
    Invariant {
        name: "state",
        reason: "the replicated state satisfies its own invariants at every step of the log",
        check: state::check,
    },
    Invariant {
        name: "stale_reports",
        reason: "a report of an attempt that is over changes nothing: its node was given up",
        check: stale_reports::check,
    },
    Invariant {
        name: "downloads",
        reason: "one download attempt per artifact at a time, and each byte of the source at most once per attempt: it is paid for",
        check: downloads::check,
    },
    Invariant {
        name: "staged",
        reason: "a staged folder is whole, byte for byte, when it is said to be: a server loads it",
        check: staged::check,
    },
    Invariant {
        name: "completed",
        reason: "completed if and only if every requested placement is staged: it is the signal to go live",
        check: completed::check,
    },
    Invariant {
        name: "convergence",
        reason: "soon after everything is healed, everything is well again without anybody's help",
        check: convergence::check,
    },
];

/// Everything that is known of a run.
#[derive(Default)]
pub struct Evidence {
    /// What callers did.
    pub ops: Vec<Op>,
    /// What was done to the cluster.
    pub events: Vec<Event>,
    /// What masters told of themselves.
    pub masters: Vec<MasterSeen>,
    /// When the machine did nothing.
    pub standstills: Vec<Standstill>,
    /// What was found on disks.
    pub folders: Vec<FolderSeen>,
    /// What masters logged of their elections.
    pub elected: Vec<Elected>,
    /// Reports that were sent although their attempts were over.
    pub stale_sent: u64,
    /// Snapshots that masters were sent and took over.
    pub installed: u64,
    /// Nodes, other than the one that is a ghost, that masters gave up for lost.
    pub nodes_down: u64,
    /// What the source served.
    pub served: Vec<Served>,
    /// The committed log; none: it could not be had (then what depends on it is not judged).
    pub replay: Option<Replay>,
    /// How soon all was well, after each healing and at the end.
    pub convergence: Vec<Convergence>,
}

impl Evidence {
    /// Sorts a history's records.
    pub fn of(records: impl IntoIterator<Item = Record>) -> Self {
        let mut evidence = Self::default();
        for record in records {
            match record {
                Record::Op(op) => evidence.ops.push(op),
                Record::Event(event) => evidence.events.push(event),
                Record::Master(seen) => evidence.masters.push(seen),
                Record::Folder(seen) => evidence.folders.push(seen),
                Record::StaleReport(_) => evidence.stale_sent += 1,
                Record::Standstill(still) => evidence.standstills.push(still),
            }
        }
        evidence
    }

    /// The highest log index that anybody said was applied: all up to there is committed.
    pub fn applied_index(&self) -> u64 {
        let answers = self.ops.iter().filter_map(|op| op.answer()?.applied_index);
        let masters = self.masters.iter().map(|m| m.applied_index);
        answers.chain(masters).max().unwrap_or(0)
    }

    /// What a replay has to say for checkers.
    pub fn asks(&self) -> Asked {
        let mut asked = Asked::default();
        let digests = self.masters.iter().filter(|m| m.digest.is_some());
        asked.digests = digests.map(|m| m.applied_index).collect();
        for op in &self.ops {
            if let (Some(seen), Some(index)) = (op.seen(), op.answer().and_then(|a| a.applied_index)) {
                asked.waits.entry(index).or_default().insert(seen.job.clone());
            }
        }
        asked
    }

    /// Reads the logs of masters that were stopped, each with its Raft id and data folder, and applies what was committed.
    pub async fn replay(&mut self, disks: &[(u64, PathBuf)], cluster_id: &str) -> Result<()> {
        let mut logs = Vec::new();
        for (id, folder) in disks {
            logs.push((*id, log::read(folder, cluster_id, *id).await?));
        }
        let (committed, asked) = (self.applied_index(), self.asks());
        let replay = tokio::task::spawn_blocking(move || {
            let merged = log::merge(logs, committed);
            let mut replay = Replay::of(merged.base, &merged.entries, committed, &asked);
            replay.log_conflicts = merged.conflicts;
            replay
        });
        self.replay = Some(replay.await?);
        Ok(())
    }

    /// Operations by the job they are about.
    pub(crate) fn by_job(&self) -> BTreeMap<&str, Vec<&Op>> {
        let mut jobs: BTreeMap<&str, Vec<&Op>> = BTreeMap::new();
        for op in &self.ops {
            if let Some(job) = op.kind.job() {
                jobs.entry(job).or_default().push(op);
            }
        }
        jobs
    }
}

/// A broken invariant.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Violation {
    /// [`Invariant::name`].
    pub invariant: &'static str,
    /// How often.
    pub count: u64,
    /// What was seen, the first ones.
    pub what: Vec<String>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is broken {} times:", self.invariant, self.count)?;
        self.what.iter().try_for_each(|what| write!(f, "\n  - {what}"))
    }
}

/// What one checker found.
#[derive(Default)]
pub struct Findings {
    count: u64,
    what: Vec<String>,
}

impl Findings {
    /// One violation.
    pub fn add(&mut self, what: impl Into<String>) {
        self.count += 1;
        if self.what.len() < MAX_SHOWN {
            self.what.push(what.into());
        }
    }
}

/// Every broken invariant.
pub fn check(evidence: &Evidence) -> Vec<Violation> {
    INVARIANTS
        .iter()
        .filter_map(|invariant| {
            let mut findings = Findings::default();
            (invariant.check)(evidence, &mut findings);
            (findings.count > 0).then_some(Violation {
                invariant: invariant.name,
                count: findings.count,
                what: findings.what,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ_and_nothing_is_found_in_nothing() {
        let names: std::collections::BTreeSet<_> = INVARIANTS.iter().map(|i| i.name).collect();
        assert_eq!(names.len(), INVARIANTS.len());
        assert_eq!(check(&Evidence::default()), vec![]);
    }

    #[test]
    fn a_flood_is_counted_and_cut() {
        let mut findings = Findings::default();
        (0..100).for_each(|i| findings.add(i.to_string()));
        assert_eq!((findings.count, findings.what.len()), (100, MAX_SHOWN));
    }
}
