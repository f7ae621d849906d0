//! What a soak says of itself, for programs and for people.

use super::RoundOptions;
use crate::{
    checks::{Convergence, Evidence, Violation},
    history::{Event, Kind, Op, Outcome, Phase},
    report::percentile,
    workload::WRITER,
};
use mooncake_proto::api::ProblemCode;
use serde::Serialize;
use std::{collections::BTreeMap, fmt::Write};

/// Upper bounds of the histogram's bars, in milliseconds.
const BARS_MS: [u64; 8] = [100, 200, 300, 500, 1000, 2000, 5000, u64::MAX];

/// What the healing of a fault that befell nothing says.
pub(super) const MET_NOTHING: &str = "met nothing";

/// One round.
#[derive(Clone, Debug, Serialize)]
pub struct RoundReport {
    /// Its seed.
    pub seed: u64,
    /// Broken invariants.
    pub violations: Vec<Violation>,
    /// Requests.
    pub requests: u64,
    /// Jobs in the log.
    pub jobs: u64,
    /// Creates and cancels that were acknowledged.
    pub acknowledged_writes: u64,
    /// Creates and cancels whose outcome their callers do not know.
    pub unknown_outcomes: u64,
    /// Acknowledged jobs that were lost.
    pub lost_writes: u64,
    /// Faults, by name.
    pub nemeses: BTreeMap<String, NemesisReport>,
    /// Longest time between two acknowledged writes of the writer.
    pub longest_gap_ms: u64,
    /// Bytes that the source served more than once, for whatever reason.
    pub duplicate_bytes: u64,
    /// Folders that were hashed when they turned `staged`.
    pub folders: u64,
    /// Elections that masters logged.
    pub elections: u64,
    /// Whether nodes were to be lost for good.
    pub short_grace: bool,
    /// Of a round whose masters purge their logs.
    pub snapshots: Option<SnapshotReport>,
    /// Commands in the log.
    pub commands: BTreeMap<&'static str, u64>,
    /// Reports of attempts that were over, in the log.
    pub stale_reports: u64,
    /// Those that were sent on purpose, whether they got there or not.
    pub stale_sent: u64,
    /// Times that a node, other than the one that is a ghost, stayed away for longer than the grace.
    pub nodes_down: u64,
    /// Times that the machine itself stood still.
    pub standstills: u64,
    /// How soon all was well, after each healing and at the end.
    pub convergence: Vec<Convergence>,
}

/// What came of purged logs.
#[derive(Clone, Debug, Serialize)]
pub struct SnapshotReport {
    /// Snapshots that masters were sent and took over.
    pub installed: u64,
    /// The replay began at the state of this log index.
    pub replayed_from: u64,
    /// And ended here.
    pub replayed_to: u64,
}

/// One kind of fault.
#[derive(Clone, Debug, Default, Serialize)]
pub struct NemesisReport {
    /// How often.
    pub count: u64,
    /// Of those, the ones that found nothing to befall: a download to damage, when there was none.
    pub met_nothing: u64,
    /// From each injection to the first acknowledgement of a write that was sent after it.
    pub next_write_ms: Vec<u64>,
}

/// The whole soak.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// All rounds.
    pub rounds: Vec<RoundReport>,
    /// Rounds that could not be judged, with the reason.
    pub errors: Vec<(u64, String)>,
    /// How long it took.
    pub took_s: u64,
}

/// Adds one round's evidence up.
pub(super) fn summarise(
    options: &RoundOptions,
    evidence: &Evidence,
    violations: Vec<Violation>,
    duplicate_bytes: u64,
) -> RoundReport {
    let writes = || {
        evidence
            .ops
            .iter()
            .filter(|op| matches!(op.kind, Kind::Create { .. } | Kind::Cancel { .. }))
    };
    let lost = violations.iter().find(|v| v.invariant == "acknowledged");
    let replay = evidence.replay.as_ref();
    RoundReport {
        seed: options.seed,
        short_grace: options.short_grace,
        requests: evidence.ops.len() as u64,
        jobs: replay.map_or(0, |r| r.jobs.len() as u64),
        acknowledged_writes: writes().filter(|op| op.is_acknowledged_write()).count() as u64,
        unknown_outcomes: writes().filter(|op| is_unknown(op)).count() as u64,
        lost_writes: lost.map_or(0, |v| v.count),
        nemeses: nemeses(&evidence.events, &evidence.ops),
        longest_gap_ms: longest_gap_us(&evidence.ops) / 1000,
        duplicate_bytes,
        folders: evidence.folders.len() as u64,
        elections: evidence.elected.len() as u64,
        snapshots: options.snapshots.then(|| SnapshotReport {
            installed: evidence.installed,
            replayed_from: replay.map_or(0, |r| r.first_index),
            replayed_to: replay.map_or(0, |r| r.last_index),
        }),
        commands: replay.map(|r| r.commands.clone()).unwrap_or_default(),
        stale_reports: replay.map_or(0, |r| r.stale_reports),
        stale_sent: evidence.stale_sent,
        nodes_down: evidence.nodes_down,
        standstills: evidence.standstills.len() as u64,
        convergence: evidence.convergence.clone(),
        violations,
    }
}

/// No answer, an answer that says so, or one that no master gave.
fn is_unknown(op: &Op) -> bool {
    match &op.outcome {
        Outcome::NoAnswer(_) => true,
        Outcome::Answer(a) => {
            op.problem() == Some(ProblemCode::OutcomeUnknown) || (a.served_by.is_none() && a.status >= 500)
        }
    }
}

/// The writer's acknowledged creates, by when they were sent.
fn written(ops: &[Op]) -> Vec<&Op> {
    let mut written: Vec<&Op> = ops
        .iter()
        .filter(|op| op.caller == WRITER && op.is_acknowledged_write())
        .collect();
    written.sort_by_key(|op| op.invoked_us);
    written
}

fn longest_gap_us(ops: &[Op]) -> u64 {
    let mut ends: Vec<u64> = written(ops).iter().map(|op| op.returned_us).collect();
    ends.sort_unstable();
    ends.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0)
}

fn nemeses(events: &[Event], ops: &[Op]) -> BTreeMap<String, NemesisReport> {
    let written = written(ops);
    let mut out: BTreeMap<String, NemesisReport> = BTreeMap::new();
    for event in events.iter().filter(|e| e.phase == Phase::Injected) {
        let report = out.entry(event.name.clone()).or_default();
        report.count += 1;
        let from = written.partition_point(|op| op.invoked_us <= event.at_us);
        let next = written[from..]
            .iter()
            .map(|op| op.returned_us - event.at_us)
            .min();
        report.next_write_ms.extend(next.map(|us| us / 1000));
    }
    for event in events
        .iter()
        .filter(|e| e.phase == Phase::Healed && e.detail == MET_NOTHING)
    {
        out.entry(event.name.clone()).or_default().met_nothing += 1;
    }
    out
}

impl Report {
    /// Whether every round ran to its end and none broke anything. A soak without rounds proves nothing.
    pub fn is_good(&self) -> bool {
        !self.rounds.is_empty()
            && self.errors.is_empty()
            && self.not_tried().is_empty()
            && self.rounds.iter().all(|r| r.violations.is_empty())
    }

    /// What it would have had to try, and did not: then nothing is known of it.
    fn not_tried(&self) -> Vec<String> {
        let mut not_tried = Vec::new();
        // Where logs were purged, most of a round is not in the replay.
        let whole = self.rounds.iter().any(|r| r.snapshots.is_none());
        if whole && self.sum(|r| r.stale_reports) == 0 {
            not_tried.push("no report of an attempt that was over reached the log".into());
        }
        if self.rounds.iter().any(|r| r.short_grace) && self.sum(|r| r.nodes_down) == 0 {
            not_tried.push("no node was away for longer than the grace".into());
        }
        for (name, all) in self.by_nemesis() {
            if all.count == all.met_nothing {
                not_tried.push(format!("no {name} met anything"));
            }
        }
        not_tried
    }

    fn sum(&self, of: impl Fn(&RoundReport) -> u64) -> u64 {
        self.rounds.iter().map(of).sum()
    }

    /// For people.
    pub fn markdown(&self) -> String {
        let mut out = String::new();
        let violations = self.sum(|r| r.violations.len() as u64);
        let _ = writeln!(
            out,
            "# Soak: {}\n",
            if self.is_good() { "passed" } else { "FAILED" }
        );
        let _ = writeln!(out, "| what | |\n|---|---|");
        let longest = self.rounds.iter().map(|r| r.longest_gap_ms).max().unwrap_or(0);
        let slowest = self
            .rounds
            .iter()
            .flat_map(|r| r.convergence.iter().filter_map(|c| c.took_ms))
            .max()
            .unwrap_or(0);
        for (what, value) in [
            ("rounds (seeds)", self.rounds.len().to_string()),
            ("rounds that could not be judged", self.errors.len().to_string()),
            ("took", format!("{} min", self.took_s / 60)),
            ("violated invariants", violations.to_string()),
            ("requests", self.sum(|r| r.requests).to_string()),
            ("jobs", self.sum(|r| r.jobs).to_string()),
            (
                "acknowledged writes",
                self.sum(|r| r.acknowledged_writes).to_string(),
            ),
            (
                "acknowledged writes lost",
                self.sum(|r| r.lost_writes).to_string(),
            ),
            ("unknown outcomes", self.sum(|r| r.unknown_outcomes).to_string()),
            ("longest time without a write", format!("{longest} ms")),
            ("slowest convergence after healing", format!("{slowest} ms")),
            (
                "rounds with snapshots and purged logs",
                self.sum(|r| r.snapshots.is_some().into()).to_string(),
            ),
            (
                "snapshots installed",
                self.sum(|r| r.snapshots.as_ref().map_or(0, |s| s.installed))
                    .to_string(),
            ),
            ("elections", self.sum(|r| r.elections).to_string()),
            (
                "times the machine stood still",
                self.sum(|r| r.standstills).to_string(),
            ),
            (
                "nodes that were away for longer than the grace",
                self.sum(|r| r.nodes_down).to_string(),
            ),
            ("stale reports sent", self.sum(|r| r.stale_sent).to_string()),
            (
                "stale reports in the log, fenced off",
                self.sum(|r| r.stale_reports).to_string(),
            ),
            ("staged folders hashed", self.sum(|r| r.folders).to_string()),
            ("bytes served again", self.sum(|r| r.duplicate_bytes).to_string()),
        ] {
            let _ = writeln!(out, "| {what} | {value} |");
        }
        for what in self.not_tried() {
            let _ = writeln!(out, "\nNot tried: {what}.");
        }
        self.nemesis_table(&mut out);
        self.histogram(&mut out);
        for round in self.rounds.iter().filter(|r| !r.violations.is_empty()) {
            let _ = writeln!(out, "\n## Seed {}\n", round.seed);
            for violation in &round.violations {
                let _ = writeln!(out, "{violation}\n");
            }
        }
        for (seed, error) in &self.errors {
            let _ = writeln!(out, "\n## Seed {seed} could not be judged\n\n{error}");
        }
        out
    }

    fn by_nemesis(&self) -> BTreeMap<&str, NemesisReport> {
        let mut all: BTreeMap<&str, NemesisReport> = BTreeMap::new();
        for (name, one) in self.rounds.iter().flat_map(|r| &r.nemeses) {
            let sum = all.entry(name).or_default();
            sum.count += one.count;
            sum.met_nothing += one.met_nothing;
            sum.next_write_ms.extend(&one.next_write_ms);
        }
        all.values_mut().for_each(|all| all.next_write_ms.sort_unstable());
        all
    }

    fn nemesis_table(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "\n## Faults\n\nTime from the injection to the acknowledgement of the next write sent (one is sent every 100 ms), in ms.\n\n\
             | fault | times | met nothing | p50 | p99 | max |\n|---|---:|---:|---:|---:|---:|"
        );
        for (name, all) in self.by_nemesis() {
            let (count, met_nothing, next) = (all.count, all.met_nothing, all.next_write_ms);
            let max = next.last().copied().unwrap_or(0);
            let (p50, p99) = (percentile(&next, 0.5), percentile(&next, 0.99));
            let _ = writeln!(
                out,
                "| {name} | {count} | {met_nothing} | {p50} | {p99} | {max} |"
            );
        }
    }

    fn histogram(&self, out: &mut String) {
        let leaderless = ["kill-leader", "freeze-leader", "isolate-leader"];
        let all: Vec<(&str, Vec<u64>)> = self
            .by_nemesis()
            .into_iter()
            .filter(|(name, _)| leaderless.contains(name))
            .map(|(name, all)| (name, all.next_write_ms))
            .collect();
        if all.is_empty() {
            return;
        }
        let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
        let _ = writeln!(
            out,
            "\n## Failover\n\n| next write within | {} |",
            names.join(" | ")
        );
        let _ = writeln!(out, "|---|{}", "---:|".repeat(names.len()));
        let mut from = 0;
        for bar in BARS_MS {
            let counts: Vec<_> = all
                .iter()
                .map(|(_, next)| {
                    next.iter()
                        .filter(|ms| (from..bar).contains(ms))
                        .count()
                        .to_string()
                })
                .collect();
            let label = match bar {
                u64::MAX => format!("{from} ms and more"),
                _ => format!("{from}–{bar} ms"),
            };
            let _ = writeln!(out, "| {label} | {} |", counts.join(" | "));
            from = bar;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::testing::Run;
    use std::{path::PathBuf, time::Duration};

    fn write(run: &mut Run, from_ms: u64, to_ms: u64) {
        run.caller = WRITER;
        run.create(&format!("w-{from_ms}"), from_ms * 1000, to_ms * 1000, from_ms);
    }

    fn evidence() -> Evidence {
        let mut run = Run::new();
        for at in [0, 100, 200, 900, 1000] {
            write(&mut run, at, at + 10);
        }
        // Sent before the fault, answered after it: by the old leader, perhaps.
        write(&mut run, 250, 400);
        run.evidence.events.push(Event {
            at_us: 300_000,
            name: "kill-leader".into(),
            phase: Phase::Injected,
            concerns: vec![],
            detail: String::new(),
        });
        run.evidence
    }

    fn options(seed: u64, snapshots: bool, short_grace: bool) -> RoundOptions {
        RoundOptions {
            seed,
            length: Duration::ZERO,
            masters: 3,
            clients: 4,
            clocks: false,
            snapshots,
            short_grace,
            converge_within: Duration::ZERO,
            out: PathBuf::new(),
            progress: |_| (),
        }
    }

    fn healed(evidence: &mut Evidence, detail: &str) {
        evidence.events.push(Event {
            at_us: 400_000,
            name: "kill-leader".into(),
            phase: Phase::Healed,
            concerns: vec![],
            detail: detail.into(),
        });
    }

    #[test]
    fn a_fault_that_never_met_anything_was_not_tried() {
        let round = |detail| {
            let mut evidence = evidence();
            healed(&mut evidence, detail);
            let mut report = summarise(&options(1, false, false), &evidence, vec![], 0);
            report.stale_reports = 1;
            report
        };
        let mut report = Report {
            rounds: vec![round(MET_NOTHING)],
            ..Report::default()
        };
        assert!(!report.is_good());
        assert!(
            report
                .markdown()
                .contains("Not tried: no kill-leader met anything")
        );
        report.rounds.push(round(""));
        assert!(report.is_good());
        let text = report.markdown();
        assert!(
            text.contains("| kill-leader | 2 | 1 | 610 | 610 | 610 |"),
            "{text}"
        );
    }

    #[test]
    fn a_soak_in_which_no_grace_ran_out_has_not_tried_it() {
        let mut round = summarise(&options(1, false, true), &evidence(), vec![], 0);
        round.stale_reports = 1;
        let mut report = Report {
            rounds: vec![round],
            ..Report::default()
        };
        assert!(!report.is_good());
        assert!(report.markdown().contains("Not tried: no node was away"));
        report.rounds[0].nodes_down = 1;
        assert!(report.is_good());
    }

    #[test]
    fn the_next_write_is_one_that_was_sent_after_the_fault() {
        let report = summarise(&options(1, false, false), &evidence(), vec![], 0);
        assert_eq!(report.nemeses["kill-leader"].next_write_ms, [610]);
        assert_eq!(report.longest_gap_ms, 510);
        assert_eq!((report.acknowledged_writes, report.unknown_outcomes), (6, 0));
    }

    #[test]
    fn a_soak_is_good_only_if_it_ran_and_nothing_broke() {
        assert!(!Report::default().is_good());
        let mut report = Report {
            rounds: vec![
                summarise(&options(1, false, false), &evidence(), vec![], 0),
                summarise(
                    &options(2, true, false),
                    &Evidence {
                        installed: 3,
                        ..Evidence::default()
                    },
                    vec![],
                    0,
                ),
            ],
            ..Report::default()
        };
        assert!(!report.is_good(), "no stale report came");
        assert!(report.markdown().contains("Not tried: no report"));
        report.rounds[0].stale_reports = 1;
        assert!(report.is_good());
        let text = report.markdown();
        assert!(
            text.contains("| kill-leader | 1 | 0 | 610 | 610 | 610 |"),
            "{text}"
        );
        assert!(text.contains("| 500–1000 ms | 1 |"), "{text}");
        assert!(
            text.contains("| rounds with snapshots and purged logs | 1 |"),
            "{text}"
        );
        assert!(text.contains("| snapshots installed | 3 |"), "{text}");
        report.errors.push((2, "the disk is full".into()));
        assert!(!report.is_good() && report.markdown().contains("the disk is full"));
    }
}
