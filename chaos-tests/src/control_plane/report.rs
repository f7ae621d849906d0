//! What the benchmark prints, and what of it does not hold.

use super::{
    fleet,
    rates::{self, ETCD, Kind, Measured, Rates},
};
use crate::report::{load_average, machine_line, median_and_worst, right, table};
use serde_json::{Value, json};
use std::{fmt::Write as _, time::Instant};

const IDLE_CORES: f64 = 0.2;
const ENTRIES_PER_TARGET: f64 = 20.0;
/// `tool` of the lines that are not about rates, which say how it was asked too.
const PRODUCT: &str = "mooncake";

/// What was measured so far.
pub struct Report {
    began: Instant,
    load_before: f64,
    plan: rates::Plan,
    fleet_plan: fleet::Plan,
    /// Beside etcd.
    pub rates: Rates,
    /// The simulated nodes.
    pub fleet: Option<fleet::Measured>,
}

impl Report {
    /// Begins now.
    pub fn new(plan: rates::Plan, fleet_plan: fleet::Plan) -> Self {
        Self {
            began: Instant::now(),
            load_before: load_average(),
            plan,
            fleet_plan,
            rates: Rates::new(),
            fleet: None,
        }
    }

    /// What one loop brought.
    pub(super) fn add_rate(&mut self, kind: Kind, subject: &'static str, measured: Measured) {
        self.rates.entry((kind, subject)).or_default().add([measured]);
    }

    /// What does not hold.
    pub fn broken(&self) -> Vec<String> {
        let mut broken = Vec::new();
        for ((kind, subject), measured) in &self.rates {
            if measured.failed > 0 {
                let first = measured.first_failure.as_deref().unwrap_or("not known");
                let (failed, what) = (measured.failed, kind.name());
                broken.push(format!("{subject}: {failed} {what} failed, the first: {first}"));
            }
        }
        if let Some(fleet) = &self.fleet {
            let per_target = fleet.entries as f64 / self.fleet_plan.nodes as f64;
            let (before, after) = fleet.terms;
            let idle_cores = fleet.idle.as_ref().map_or(0.0, |idle| idle.leader_cores);
            if let Some(why) = &fleet.ended {
                broken.push(format!("a node's session ended before its time: {why}"));
            }
            let checks = [
                (
                    idle_cores <= IDLE_CORES,
                    format!("the idle leader takes {idle_cores:.2} of a core, not at most {IDLE_CORES}"),
                ),
                (
                    per_target <= ENTRIES_PER_TARGET,
                    format!("{per_target:.1} log entries per target, not at most {ENTRIES_PER_TARGET}"),
                ),
                (
                    before == after,
                    format!("the term went from {before} to {after}: there was an election"),
                ),
            ];
            broken.extend(
                checks
                    .into_iter()
                    .filter(|(holds, _)| !holds)
                    .map(|(_, what)| what),
            );
        }
        broken
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut text = machine_line(self.load_before, self.began);
        if !self.rates.is_empty() {
            let rates = &self.rates;
            let _ = writeln!(
                text,
                "\n{} callers, each with a connection of its own to one of three members; {} rounds of {:.1} s of each \
                 kind, in turn; rates are medians.",
                self.plan.callers,
                self.plan.rounds,
                self.plan.lasts.as_secs_f64()
            );
            let mut rows = table(&[
                "what", "whom", "per s", "to etcd", "p50 ms", "p99 ms", "max ms", "failed",
            ]);
            for ((kind, subject), measured) in rates {
                rows.add_row(vec![
                    kind.name().into(),
                    (*subject).into(),
                    right(format!("{:.0}", rate(measured))),
                    right(to_etcd(rates, *kind, subject).map_or("-".into(), |ratio| format!("{ratio:.2} x"))),
                    right(format!("{:.1}", measured.ms_at(0.5))),
                    right(format!("{:.1}", measured.ms_at(0.99))),
                    right(format!("{:.1}", measured.ms_at(1.0))),
                    right(measured.failed.to_string()),
                ]);
            }
            let _ = writeln!(text, "{rows}");
        }
        if let Some(fleet) = &self.fleet {
            let plan = self.fleet_plan;
            let _ = writeln!(
                text,
                "\n{} nodes registered in {:.1} s. The job: {} targets x {} chunks, each at work for {} s.",
                plan.nodes,
                fleet.joined_s,
                plan.nodes,
                plan.chunks,
                plan.task.as_secs()
            );
            let mut rows = table(&[
                "phase",
                "s",
                "leader, cores",
                "frames up/s",
                "down/s",
                "heartbeat p50 ms",
                "p99 ms",
                "max ms",
            ]);
            for (name, phase) in [("idle", &fleet.idle), ("job", &fleet.job)] {
                let Some(phase) = phase else { continue };
                let [p50, p99, max] = phase.heartbeat_ms;
                rows.add_row(vec![
                    name.into(),
                    right(format!("{:.1}", phase.took_s)),
                    right(format!("{:.3}", phase.leader_cores)),
                    right(format!("{:.0}", phase.up_per_s)),
                    right(format!("{:.0}", phase.down_per_s)),
                    right(format!("{p50:.1}")),
                    right(format!("{p99:.1}")),
                    right(format!("{max:.1}")),
                ]);
            }
            if fleet.idle.is_some() {
                let _ = writeln!(text, "{rows}");
            }
            if fleet.job.is_some() {
                let _ = writeln!(
                    text,
                    "{} log entries, {:.2} per target; leader's peak memory {} MiB.",
                    fleet.entries,
                    fleet.entries as f64 / plan.nodes as f64,
                    fleet.leader_peak_bytes >> 20
                );
            }
            let _ = writeln!(text, "Term {} -> {}.", fleet.terms.0, fleet.terms.1);
        }
        for what in self.broken() {
            let _ = writeln!(text, "does not hold: {what}");
        }
        text
    }

    /// For machines: an object per row.
    pub fn json_lines(&self) -> Vec<Value> {
        let mut lines = Vec::new();
        for ((kind, subject), measured) in &self.rates {
            lines.push(json!({
                "kind": "rate",
                "what": kind.name(),
                "tool": subject,
                "callers": self.plan.callers,
                "per_s": rate(measured),
                "to_etcd": to_etcd(&self.rates, *kind, subject),
                "rounds_per_s": measured.rates,
                "p50_ms": measured.ms_at(0.5),
                "p99_ms": measured.ms_at(0.99),
                "max_ms": measured.ms_at(1.0),
                "failed": measured.failed,
                "rounds": measured.rates.len(),
            }));
        }
        if let Some(fleet) = &self.fleet {
            let phase = |phase: &fleet::Phase| {
                json!({
                    "took_s": phase.took_s,
                    "leader_cores": phase.leader_cores,
                    "frames_up_per_s": phase.up_per_s,
                    "frames_down_per_s": phase.down_per_s,
                    "heartbeat_p50_ms": phase.heartbeat_ms[0],
                    "heartbeat_p99_ms": phase.heartbeat_ms[1],
                    "heartbeat_max_ms": phase.heartbeat_ms[2],
                })
            };
            lines.push(json!({
                "kind": "fleet",
                "tool": PRODUCT,
                "nodes": self.fleet_plan.nodes,
                "chunks": self.fleet_plan.chunks,
                "joined_s": fleet.joined_s,
                "idle": fleet.idle.as_ref().map(phase),
                "job": fleet.job.as_ref().map(phase),
                "log_entries": fleet.entries,
                "leader_peak_bytes": fleet.leader_peak_bytes,
                "terms": [fleet.terms.0, fleet.terms.1],
            }));
        }
        lines.push(json!({ "kind": "broken", "tool": PRODUCT, "what": self.broken() }));
        lines
    }
}

fn rate(measured: &Measured) -> f64 {
    median_and_worst(measured.rates.iter().copied()).map_or(0.0, |(median, _)| median)
}

fn to_etcd(rates: &Rates, kind: Kind, subject: &'static str) -> Option<f64> {
    if subject == ETCD {
        return None;
    }
    Some(rate(rates.get(&(kind, subject))?) / rate(rates.get(&(kind, ETCD))?))
}

#[cfg(test)]
mod tests {
    use super::{super::rates::MOONCAKE, *};
    use std::time::Duration;

    fn report() -> Report {
        let plan = rates::Plan {
            callers: 2,
            lasts: Duration::from_secs(1),
            rounds: 3,
        };
        let fleet_plan = fleet::Plan {
            nodes: 10,
            chunks: 4,
            idle: Duration::from_secs(1),
            task: Duration::from_secs(1),
        };
        Report::new(plan, fleet_plan)
    }

    #[test]
    fn what_does_not_hold_is_named() {
        let mut report = report();
        assert!(report.broken().is_empty());
        let mut fleet = fleet::Measured {
            entries: 200,
            ..Default::default()
        };
        let idle = |leader_cores| fleet::Phase {
            leader_cores,
            ..Default::default()
        };
        fleet.idle = Some(idle(0.2));
        report.fleet = Some(fleet.clone());
        assert!(report.broken().is_empty(), "{:?}", report.broken());
        fleet.entries = 201;
        fleet.idle = Some(idle(0.21));
        fleet.ended = Some("node 1".into());
        fleet.terms = (1, 2);
        report.fleet = Some(fleet);
        let failed = Measured {
            failed: 1,
            ..Default::default()
        };
        report.add_rate(Kind::Read, MOONCAKE, failed);
        assert_eq!(report.broken().len(), 5, "{:?}", report.broken());
        assert!(report.text().contains("does not hold"));
    }

    #[test]
    fn rates_are_compared_with_etcds() {
        let of = |rates: &[f64]| Measured {
            rates: rates.to_vec(),
            ..Default::default()
        };
        let mut report = report();
        report.add_rate(Kind::Create, MOONCAKE, of(&[30.0, 10.0, 20.0]));
        report.add_rate(Kind::Create, ETCD, of(&[10.0]));
        assert_eq!(to_etcd(&report.rates, Kind::Create, MOONCAKE), Some(2.0));
        assert_eq!(to_etcd(&report.rates, Kind::Create, ETCD), None);
        assert_eq!(to_etcd(&report.rates, Kind::Read, MOONCAKE), None);
        report.fleet = Some(fleet::Measured::default());
        let lines = report.json_lines();
        let of = |tool| lines.iter().find(|line| line["tool"] == tool).expect("a line");
        assert_eq!(
            (&of(MOONCAKE)["to_etcd"], &of(ETCD)["to_etcd"]),
            (&json!(2.0), &Value::Null)
        );
        assert!(lines.iter().all(|line| line["tool"].is_string()), "{lines:#?}");
    }
}
