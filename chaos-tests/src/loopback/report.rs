//! CPU seconds per GiB and throughput, the product's by the floor's, for people and for programs.

use super::{Sample, Setup};
use crate::report::{cores, load_average, median_and_worst, right, table};
use comfy_table::Cell;
use serde_json::{Value, json};

/// CPU of the product's receiver by that of the floor's.
const CPU: f64 = 1.5;
/// Throughput of the product by that of the floor.
const THROUGHPUT: f64 = 0.8;
const GIB: f64 = (1u64 << 30) as f64;

/// One run.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// The least that there is to do.
    pub floor: Sample,
    /// What the product did.
    pub product: Sample,
    /// What Mooncake Store did, if it was asked for.
    pub store: Option<Sample>,
}

/// Complete at every moment.
#[derive(Debug)]
pub struct Report {
    setup: Setup,
    runs: usize,
    load_before: f64,
    measured: Vec<Measured>,
}

impl Report {
    /// Nothing yet of so many runs.
    pub fn new(setup: Setup, runs: usize) -> Self {
        Self {
            setup,
            runs,
            load_before: load_average(),
            measured: Vec::new(),
        }
    }

    /// One more.
    pub fn add(&mut self, measured: Measured) {
        self.measured.push(measured);
    }

    fn gib(&self) -> f64 {
        self.setup.size_bytes as f64 / GIB
    }

    /// The product's CPU by that of another side, of the medians; `None` where one was not measured.
    fn cpu_ratio(&self, other: Of) -> Option<f64> {
        let of = |side: Of| median(self.measured.iter().filter_map(side).map(|s| s.cpu.total_s()));
        Some(of(PRODUCT)? / of(other)?)
    }

    /// The same of its throughput.
    fn throughput_ratio(&self, other: Of) -> Option<f64> {
        let of = |side: Of| median(self.measured.iter().filter_map(side).map(|s| s.took_s));
        Some(of(other)? / of(PRODUCT)?)
    }

    /// What is not as it must be.
    pub fn broken(&self) -> Vec<String> {
        let mut broken = Vec::new();
        if let Some(ratio) = self.cpu_ratio(FLOOR)
            && ratio > CPU
        {
            broken.push(format!(
                "the receiver's CPU is {ratio:.2} times the floor's, at most {CPU} is wanted"
            ));
        }
        if let Some(ratio) = self.throughput_ratio(FLOOR)
            && ratio < THROUGHPUT
        {
            broken.push(format!(
                "the throughput is {ratio:.2} times the floor's, at least {THROUGHPUT} is wanted"
            ));
        }
        broken
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut table = table(&[
            "receiver",
            "runs",
            "user",
            "system",
            "softirq",
            "CPU s/GiB",
            "s",
            "MiB/s",
            "RSS MiB",
        ]);
        let gib = self.gib();
        for (name, of) in SIDES {
            let samples = || self.measured.iter().filter_map(of);
            if samples().next().is_none() && name == STORE_NAME {
                continue;
            }
            let per_gib = |what: fn(&Sample) -> f64| {
                let median = median(samples().map(what));
                median.map_or("–".into(), |s| format!("{:.3}", s / gib))
            };
            let took = median(samples().map(|s| s.took_s));
            let peak = samples().map(|s| s.peak_rss_bytes).max();
            let runs = match samples().count() {
                all if all == self.runs => all.to_string(),
                some => format!("{some} of {}", self.runs),
            };
            let numbers = [
                runs,
                per_gib(|s| s.cpu.user_s),
                per_gib(|s| s.cpu.system_s),
                per_gib(|s| s.cpu.softirq_s),
                per_gib(|s| s.cpu.total_s()),
                took.map_or("–".into(), |s| format!("{s:.2}")),
                took.map_or("–".into(), |s| format!("{:.0}", gib * 1024.0 / s)),
                peak.map_or("–".into(), |bytes| (bytes >> 20).to_string()),
            ];
            let mut cells = vec![Cell::new(name)];
            cells.extend(numbers.map(right));
            table.add_row(cells);
        }
        let mut text = format!("{table}\n");
        let ratios = |other| Some((self.cpu_ratio(other)?, self.throughput_ratio(other)?));
        if let Some((cpu, throughput)) = ratios(FLOOR) {
            text += &format!(
                "mooncake by the floor: CPU {cpu:.2} (at most {CPU} is wanted), throughput {throughput:.2} (at least \
                 {THROUGHPUT})\n"
            );
        }
        if let Some((cpu, throughput)) = ratios(STORE) {
            text += &format!("mooncake by {STORE_NAME}: CPU {cpu:.2}, throughput {throughput:.2}\n");
        }
        text += &format!(
            "medians, seconds of CPU per GiB; softirq is that of the whole machine; RSS is the largest of all runs. {} MiB in chunks of {} KiB; the floor \
             has {} streams; folders {}.\n{} cores; load average {:.2} before, {:.2} after.\n",
            self.setup.size_bytes >> 20,
            self.setup.chunk_bytes >> 10,
            self.setup.streams,
            if self.setup.memory {
                "in memory"
            } else {
                "on the disk"
            },
            cores(),
            self.load_before,
            load_average(),
        );
        if self.measured.iter().any(|m| m.store.is_some()) {
            text += "mooncake store: its get over TCP from memory into memory; it checks no digest and writes no file.\n";
        }
        for what in self.broken() {
            text += &format!("DOES NOT HOLD: {what}\n");
        }
        text
    }

    /// For programs: one object per run and side, and one that compares.
    pub fn json_lines(&self) -> Vec<Value> {
        let gib = self.gib();
        let mut lines = Vec::new();
        for measured in &self.measured {
            for (name, of) in SIDES {
                let Some(sample) = of(measured) else { continue };
                lines.push(json!({
                    "kind": "loopback",
                    "tool": name,
                    "user_s_per_gib": sample.cpu.user_s / gib,
                    "system_s_per_gib": sample.cpu.system_s / gib,
                    "softirq_s_per_gib": sample.cpu.softirq_s / gib,
                    "cpu_s_per_gib": sample.cpu.total_s() / gib,
                    "took_s": sample.took_s,
                    "peak_rss_bytes": sample.peak_rss_bytes,
                }));
            }
        }
        lines.push(json!({
            "kind": "compared",
            "tool": PRODUCT_NAME,
            "runs": self.measured.len(),
            "size_bytes": self.setup.size_bytes,
            "chunk_bytes": self.setup.chunk_bytes,
            "streams": self.setup.streams,
            "folders": if self.setup.memory { "memory" } else { "disk" },
            "cpu_ratio": self.cpu_ratio(FLOOR),
            "throughput_ratio": self.throughput_ratio(FLOOR),
            "cpu_ratio_to_store": self.cpu_ratio(STORE),
            "throughput_ratio_to_store": self.throughput_ratio(STORE),
            "cores": cores(),
            "load_average_before": self.load_before,
            "load_average_after": load_average(),
            "does_not_hold": self.broken(),
        }));
        lines
    }
}

type Of = fn(&Measured) -> Option<&Sample>;
const FLOOR: Of = |m| Some(&m.floor);
const PRODUCT: Of = |m| Some(&m.product);
const STORE: Of = |m| m.store.as_ref();
const PRODUCT_NAME: &str = "mooncake";
const STORE_NAME: &str = "mooncake store";
const SIDES: [(&str, Of); 3] = [("floor", FLOOR), (PRODUCT_NAME, PRODUCT), (STORE_NAME, STORE)];

fn median(of: impl Iterator<Item = f64>) -> Option<f64> {
    median_and_worst(of).map(|(median, _)| median)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::Cpu;

    fn sample(took_s: f64, user_s: f64) -> Sample {
        Sample {
            took_s,
            cpu: Cpu {
                user_s,
                system_s: 0.5,
                softirq_s: 0.5,
            },
            peak_rss_bytes: 30 << 20,
        }
    }

    fn report(runs: &[(Sample, Sample)]) -> Report {
        let setup = Setup {
            size_bytes: 2 << 30,
            chunk_bytes: 4 << 20,
            streams: 2,
            memory: false,
        };
        let mut report = Report::new(setup, 5);
        for (floor, product) in runs {
            report.add(Measured {
                floor: *floor,
                product: *product,
                store: None,
            });
        }
        report
    }

    #[test]
    fn medians_by_the_floor() {
        let good = (sample(2.0, 1.0), sample(2.4, 1.8));
        let outlier = (sample(2.0, 1.0), sample(9.0, 9.0));
        let all = report(&[good, outlier, good]);
        assert_eq!(all.broken(), Vec::<String>::new());
        let text = all.text();
        assert!(
            text.contains("3 of 5") && text.contains("CPU 1.40") && text.contains("throughput 0.83"),
            "{text}"
        );
        let lines = all.json_lines();
        assert_eq!(lines.len(), 7);
        assert_eq!(lines[0]["cpu_s_per_gib"], 1.0);
        assert_eq!(
            (&lines[0]["tool"], &lines[1]["tool"]),
            (&json!("floor"), &json!("mooncake"))
        );
        assert_eq!(lines[6]["cpu_ratio"], 1.4);
        assert_eq!(lines[6]["cpu_ratio_to_store"], Value::Null);
        assert_eq!(report(&[outlier]).broken().len(), 2);
        assert_eq!(report(&[]).broken().len(), 0);
        assert!(report(&[]).text().contains("0 of 5"));
    }

    #[test]
    fn who_was_asked_for_has_a_row_and_no_say() {
        let mut asked = report(&[(sample(2.0, 1.0), sample(2.0, 1.0))]);
        assert!(!asked.text().contains(STORE_NAME));
        asked.measured[0].store = Some(sample(0.5, 3.0));
        let text = asked.text();
        assert!(
            text.contains("by mooncake store: CPU 0.50, throughput 0.25"),
            "{text}"
        );
        let lines = asked.json_lines();
        assert_eq!(lines[2]["tool"], STORE_NAME);
        assert_eq!(lines[3]["cpu_ratio_to_store"], 0.5);
        assert_eq!(lines[3]["throughput_ratio_to_store"], 0.25);
        assert_eq!(asked.broken(), Vec::<String>::new());
    }
}
