//! What a run measured, as a table for people and as lines of JSON for programs, complete at every moment.

use super::{Cost, Fault, HandOver};
use crate::report::{cores, load_average, machine_line, ms, percentile, right, table};
use comfy_table::{Cell, Table};
use serde_json::{Value, json};
use std::{
    fs::File,
    io::Write,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// What is promised of a leader that is killed: its host refuses connections at once (p50, p99).
const KILLED: Targets = Targets {
    p50: Duration::from_millis(150),
    p99: Duration::from_millis(700),
};
/// Of one that is frozen or cut off: nothing but its silence tells.
const SILENT: Targets = Targets {
    p50: Duration::from_millis(500),
    p99: Duration::from_millis(1200),
};
/// The 99th percentile of writes during a planned hand-over, of which none may fail.
const HAND_OVER_P99: Duration = Duration::from_millis(100);

struct Targets {
    p50: Duration,
    p99: Duration,
}

impl Fault {
    fn targets(self) -> Targets {
        match self {
            Self::Kill => KILLED,
            Self::Freeze | Self::CutOff => SILENT,
        }
    }
}

/// What became of the targets.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// A line for each that was missed, or of which there is no sample.
    pub missed: Vec<String>,
}

impl Verdict {
    /// `sorted` against one target. By the nearest rank: a p99 of fewer than a hundred samples is their largest, so that
    /// few are judged more strictly, never less.
    fn percentile(&mut self, what: &str, sorted: &[Duration], p: f64, target: Duration) {
        let name = format!("p{:.0}", p * 100.0);
        if sorted.is_empty() {
            self.missed.push(format!("{what}: {name} of no sample at all"));
            return;
        }
        let took = percentile(sorted, p);
        if took > target {
            let (took, target) = (ms(took), ms(target));
            self.missed
                .push(format!("{what}: {name} {took:.0} ms, not at most {target:.0} ms"));
        }
    }
}

/// See the module docs.
#[derive(Debug)]
pub struct Report {
    began: Instant,
    load_before: f64,
    interval: Duration,
    /// What was asked for: faults of each kind per cluster.
    planned: Vec<(Fault, usize)>,
    clusters: Vec<Cluster>,
    costs: Vec<(HandOver, Cost)>,
    /// Every sample as it comes, if wanted.
    samples: Option<File>,
}

#[derive(Debug, Default)]
struct Cluster {
    name: String,
    rows: Vec<Row>,
    /// Whether the targets are its targets.
    judged: bool,
    /// Elections while no fault was under way.
    at_rest: u64,
    error: Option<String>,
}

#[derive(Debug)]
struct Row {
    fault: Fault,
    samples: Vec<Duration>,
    /// Terms beyond the one that a fault needs, until the first acknowledgement.
    more_terms: u64,
    /// Terms from there until the lost leader was back.
    on_return: u64,
}

/// Seconds since 1970, as the samples say it.
fn unix_s(at: SystemTime) -> f64 {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

impl Report {
    /// Nothing yet. Samples are appended to the file as lines of JSON.
    pub fn new(planned: &[(Fault, usize)], interval: Duration, samples: Option<File>) -> Self {
        Self {
            began: Instant::now(),
            load_before: load_average(),
            interval,
            planned: planned.iter().copied().filter(|(_, count)| *count > 0).collect(),
            clusters: Vec::new(),
            costs: Vec::new(),
            samples,
        }
    }

    pub(super) fn add_cluster(&mut self, name: &str, judged: bool) {
        let row = |(fault, _): &(Fault, usize)| Row {
            fault: *fault,
            samples: Vec::new(),
            more_terms: 0,
            on_return: 0,
        };
        self.clusters.push(Cluster {
            name: name.to_owned(),
            rows: self.planned.iter().map(row).collect(),
            judged,
            ..Cluster::default()
        });
    }

    fn cluster(&mut self, name: &str) -> Option<&mut Cluster> {
        self.clusters.iter_mut().find(|c| c.name == name)
    }

    pub(super) fn at_rest(&mut self, name: &str, terms: u64) {
        if let Some(cluster) = self.cluster(name) {
            cluster.at_rest += terms;
        }
    }

    pub(super) fn out(&mut self, name: &str, error: String) {
        if let Some(cluster) = self.cluster(name) {
            cluster.error = Some(error);
        }
    }

    pub(super) fn sample(
        &mut self,
        name: &str,
        fault: Fault,
        took: Duration,
        more_terms: u64,
        on_return: u64,
    ) {
        let Some(row) = self
            .cluster(name)
            .and_then(|c| c.rows.iter_mut().find(|r| r.fault == fault))
        else {
            return;
        };
        row.samples.push(took);
        row.more_terms += more_terms;
        row.on_return += on_return;
        let line = json!({
            "cluster": name,
            "fault": fault.name(),
            "ms": ms(took),
            "more_terms": more_terms,
            "terms_on_return": on_return,
            "unix_s": unix_s(SystemTime::now()) as u64,
        });
        self.write_sample(&line);
    }

    fn write_sample(&mut self, line: &Value) {
        if let Some(file) = &mut self.samples
            && let Err(error) = writeln!(file, "{line}")
        {
            eprintln!("warning: samples are not written to the file any more: {error}");
            self.samples = None;
        }
    }

    /// Of Mooncake.
    pub fn cost(&mut self, how: HandOver, cost: Cost) {
        for one in &cost.each {
            self.write_sample(&json!({
                "hand_over": how.name(),
                "master": one.master + 1,
                "unix_s": unix_s(one.began),
                "ms": ms(one.took),
                "slowest_write_ms": one.slowest.map(|(_, took)| ms(took)),
                "slowest_write_unix_s": one.slowest.map(|(sent, _)| unix_s(sent)),
            }));
        }
        self.costs.push((how, cost));
    }

    /// The errors of clusters that fell out.
    pub fn errors(&self) -> Vec<String> {
        self.clusters.iter().filter_map(|c| c.error.clone()).collect()
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut text = String::new();
        if !self.planned.is_empty() {
            text += &format!("{}\n", self.lost_table());
            text += &format!(
                "Milliseconds from the fault to the first acknowledged write that was sent after it, in a higher term. \
                 Faults of one cluster at least {} s apart.\n\
                 more terms: terms beyond one per fault (split votes); on return: elections that the healed member \
                 caused; at rest: elections without any fault.\n",
                self.interval.as_secs_f64()
            );
        }
        if !self.costs.is_empty() {
            text += &format!("{}\n", self.costs_table());
        }
        text += &machine_line(self.load_before, self.began);
        let verdict = self.verdict();
        for what in &verdict.missed {
            text += &format!("DOES NOT HOLD: {what}\n");
        }
        for error in self.errors() {
            text += &format!("OUT OF THE RUN: {error}\n");
        }
        text
    }

    /// What was measured against what is promised.
    pub fn verdict(&self) -> Verdict {
        let mut verdict = Verdict::default();
        for cluster in self.clusters.iter().filter(|cluster| cluster.judged) {
            let name = &cluster.name;
            for row in &cluster.rows {
                let (what, sorted) = (format!("{name}, {}", row.fault.name()), row.sorted());
                let targets = row.fault.targets();
                verdict.percentile(&what, &sorted, 0.5, targets.p50);
                verdict.percentile(&what, &sorted, 0.99, targets.p99);
            }
            if cluster.at_rest > 0 {
                let elections = cluster.at_rest;
                verdict
                    .missed
                    .push(format!("{name}: {elections} elections without a fault"));
            }
        }
        for (how, cost) in &self.costs {
            if let Some(first) = cost.failed.first() {
                verdict.missed.push(format!(
                    "{}: {} of {} writes failed, the first: {first}",
                    how.name(),
                    cost.failed.len(),
                    cost.writes
                ));
            }
            let what = format!("{}, writes during it", how.name());
            verdict.percentile(&what, &cost.during, 0.99, HAND_OVER_P99);
        }
        verdict
    }

    /// For programs: one object per row and line.
    pub fn json_lines(&self) -> Vec<Value> {
        let verdict = self.verdict();
        let mut lines = vec![json!({
            "kind": "run",
            "cores": cores(),
            "load_average_before": self.load_before,
            "load_average_after": load_average(),
            "took_s": self.began.elapsed().as_secs_f64(),
            "interval_s": self.interval.as_secs_f64(),
            "errors": self.errors(),
            "does_not_hold": verdict.missed,
        })];
        for (cluster, row, planned) in self.rows() {
            let sorted = row.sorted();
            lines.push(json!({
                "kind": "lost",
                "cluster": cluster.name,
                "fault": row.fault.name(),
                "planned": planned,
                "times": sorted.len(),
                "p50_ms": ms(percentile(&sorted, 0.5)),
                "p99_ms": ms(percentile(&sorted, 0.99)),
                "max_ms": ms(percentile(&sorted, 1.0)),
                "more_terms": row.more_terms,
                "terms_on_return": row.on_return,
                "elections_at_rest": cluster.at_rest,
                "samples_ms": row.samples.iter().map(|s| ms(*s)).collect::<Vec<_>>(),
            }));
        }
        for (how, cost) in &self.costs {
            lines.push(json!({
                "kind": "planned",
                "cluster": "mooncake",
                "hand_over": how.name(),
                "times": cost.count,
                "writes": cost.writes,
                "repeated": cost.repeated,
                "failed": cost.failed,
                "p99_during_ms": ms(percentile(&cost.during, 0.99)),
                "max_during_ms": ms(percentile(&cost.during, 1.0)),
                "p99_otherwise_ms": ms(percentile(&cost.otherwise, 0.99)),
            }));
        }
        lines
    }

    fn rows(&self) -> impl Iterator<Item = (&Cluster, &Row, usize)> {
        // By fault, so that clusters stand side by side.
        self.planned.iter().flat_map(|(fault, planned)| {
            self.clusters.iter().flat_map(move |cluster| {
                let rows = cluster.rows.iter().filter(move |row| row.fault == *fault);
                rows.map(move |row| (cluster, row, *planned))
            })
        })
    }

    fn lost_table(&self) -> Table {
        let mut table = table(&[
            "leader",
            "cluster",
            "times",
            "p50 ms",
            "p99 ms",
            "max ms",
            "more terms",
            "on return",
            "at rest",
        ]);
        for (cluster, row, planned) in self.rows() {
            let sorted = row.sorted();
            let whole = |p| percentile(&sorted, p).as_millis().to_string();
            let times = match sorted.len() {
                all if all == planned => all.to_string(),
                some => format!("{some} of {planned}"),
            };
            let numbers = [
                times,
                whole(0.5),
                whole(0.99),
                whole(1.0),
                row.more_terms.to_string(),
                row.on_return.to_string(),
                cluster.at_rest.to_string(),
            ];
            let mut cells = vec![Cell::new(row.fault.name()), Cell::new(&cluster.name)];
            cells.extend(numbers.map(right));
            table.add_row(cells);
        }
        table
    }

    fn costs_table(&self) -> Table {
        let mut table = table(&[
            "planned, mooncake",
            "times",
            "writes",
            "by repeat",
            "failed",
            "p99 ms during",
            "max ms during",
            "p99 ms otherwise",
        ]);
        for (how, cost) in &self.costs {
            let whole = |sorted: &[Duration], p| percentile(sorted, p).as_millis().to_string();
            let numbers = [
                cost.count.to_string(),
                cost.writes.to_string(),
                cost.repeated.to_string(),
                cost.failed.len().to_string(),
                whole(&cost.during, 0.99),
                whole(&cost.during, 1.0),
                whole(&cost.otherwise, 0.99),
            ];
            let mut cells = vec![Cell::new(how.name())];
            cells.extend(numbers.map(right));
            table.add_row(cells);
        }
        table
    }
}

impl Row {
    fn sorted(&self) -> Vec<Duration> {
        let mut sorted = self.samples.clone();
        sorted.sort();
        sorted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_is_cut_short_says_so() {
        let mut report = Report::new(
            &[(Fault::Kill, 300), (Fault::Freeze, 0)],
            Duration::from_secs(10),
            None,
        );
        for name in ["a", "b"] {
            report.add_cluster(name, true);
        }
        for took in [300, 100, 200] {
            report.sample("a", Fault::Kill, Duration::from_millis(took), 1, 0);
        }
        report.at_rest("a", 2);
        report.out("b", "b does not settle".into());
        let text = report.text();
        for wanted in ["3 of 300", "0 of 300", "OUT OF THE RUN: b does not settle"] {
            assert!(text.contains(wanted), "{wanted}: {text}");
        }
        assert!(!text.contains("SIGSTOP"), "{text}");
        let lines = report.json_lines();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[1]["p50_ms"], 200.0);
        assert_eq!(lines[1]["more_terms"], 3);
        assert_eq!(lines[1]["elections_at_rest"], 2);
        assert_eq!(lines[2]["times"], 0);
    }

    /// As many samples, one of which takes `worst`.
    fn killed(report: &mut Report, name: &str, count: usize, usual_ms: u64, worst_ms: u64) {
        for i in 0..count {
            let took = if i < 2 { worst_ms } else { usual_ms };
            report.sample(name, Fault::Kill, Duration::from_millis(took), 0, 0);
        }
    }

    fn report(judged: bool) -> Report {
        let mut report = Report::new(&[(Fault::Kill, 100)], Duration::from_secs(10), None);
        report.add_cluster("a", judged);
        report
    }

    #[test]
    fn every_missed_target_has_a_line() {
        let mut good = report(true);
        killed(&mut good, "a", 100, 150, 700);
        good.cost(HandOver::Stop, cost(&[], 100));
        assert_eq!(good.verdict(), Verdict::default());

        let mut bad = report(true);
        killed(&mut bad, "a", 100, 151, 701);
        bad.at_rest("a", 1);
        bad.cost(HandOver::Stop, cost(&["503"], 101));
        let verdict = bad.verdict();
        let wanted = [
            "p50 151",
            "p99 701",
            "1 elections without",
            "1 of 101 writes failed, the first: 503",
            "p99 101",
        ];
        assert_eq!(verdict.missed.len(), wanted.len(), "{verdict:?}");
        for (line, wanted) in verdict.missed.iter().zip(wanted) {
            assert!(line.contains(wanted), "{wanted}: {line}");
        }
        assert!(bad.text().contains("DOES NOT HOLD: a, kill -9: p50"));

        let mut yardstick = report(false);
        killed(&mut yardstick, "a", 100, 1000, 2000);
        yardstick.at_rest("a", 4);
        assert_eq!(yardstick.verdict(), Verdict::default());
    }

    #[test]
    fn few_samples_are_judged_by_their_largest_and_none_is_a_miss() {
        let mut few = report(true);
        killed(&mut few, "a", 5, 100, 700);
        assert_eq!(few.verdict(), Verdict::default());
        killed(&mut few, "a", 1, 100, 701);
        let missed = few.verdict().missed;
        assert!(missed.len() == 1 && missed[0].contains("p99 701"), "{missed:?}");

        let missed = report(true).verdict().missed;
        let none = |line: &String| line.contains("of no sample at all");
        assert!(missed.len() == 2 && missed.iter().all(none), "{missed:?}");
    }

    /// A hundred writes during the hand-over, of which two take `worst_ms`.
    fn cost(failed: &[&str], worst_ms: u64) -> Cost {
        let mut during = vec![Duration::from_millis(10); 98];
        during.extend([Duration::from_millis(worst_ms); 2]);
        Cost {
            count: 1,
            writes: (during.len() + failed.len()) as u64,
            failed: failed.iter().map(|&f| f.to_owned()).collect(),
            during,
            ..Cost::default()
        }
    }
}
