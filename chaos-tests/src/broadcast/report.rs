//! What a run measured, as a table for people and as lines of JSON for programs, complete at every moment; and what of
//! it is not as it must be.

use super::{Measured, Payload, Peer, Setup, Subject};
use crate::report::{cores, load_average, machine_line, median_and_worst, right, table};
use comfy_table::{Cell, Table};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Median and worst of the ratio to the bound.
const RATIO: f64 = 1.10;
const WORST_RATIO: f64 = 1.15;
/// Of those with the usual link, where others have a slower one.
const RATIO_BESIDE_SLOW: f64 = 1.15;
/// The most followers against one.
const FLAT: f64 = 1.05;
/// Those left, against the same without anybody killed or joining.
const DISTURBED: f64 = 1.05;
/// Copies out of the seed, where its link would carry several.
const SEED_COPIES: f64 = 1.15;
/// Copies into each follower.
const RECEIVED_COPIES: f64 = 1.02;

/// Where it was measured.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// What the disk takes, syncs included.
    pub disk_bytes_per_s: f64,
    /// Whether folders were in memory instead.
    pub memory: bool,
}

/// See the module docs.
#[derive(Debug)]
pub struct Report {
    setup: Setup,
    machine: Machine,
    began: Instant,
    load_before: f64,
    measured: Vec<Measured>,
}

/// All runs of one kind.
struct Row<'a> {
    subject: Subject,
    followers: usize,
    chunk_bytes: Option<u64>,
    runs: Vec<&'a Measured>,
}

impl Report {
    /// Nothing yet.
    pub fn new(setup: Setup, machine: Machine) -> Self {
        Self {
            setup,
            machine,
            began: Instant::now(),
            load_before: load_average(),
            measured: Vec::new(),
        }
    }

    /// One more.
    pub fn add(&mut self, measured: Measured) {
        self.measured.push(measured);
    }

    /// By followers, so that subjects stand side by side.
    fn rows(&self) -> Vec<Row<'_>> {
        let key = |m: &Measured| (m.followers, m.subject, m.chunk_bytes);
        let mut keys: Vec<_> = self.measured.iter().map(key).collect();
        keys.sort_unstable();
        keys.dedup();
        keys.into_iter()
            .map(|(followers, subject, chunk_bytes)| Row {
                subject,
                followers,
                chunk_bytes,
                runs: self
                    .measured
                    .iter()
                    .filter(|m| key(m) == (followers, subject, chunk_bytes))
                    .collect(),
            })
            .collect()
    }

    /// What is not as it must be; empty also where nothing was measured that must be anything.
    pub fn broken(&self) -> Vec<String> {
        let mut broken = Vec::new();
        let rows = self.rows();
        for row in rows.iter().filter(|row| !matches!(row.subject, Subject::Peer(_))) {
            self.check_alone(row, &mut broken);
            if row.subject == Subject::Mooncake {
                check_flat(row, &rows, &mut broken);
                check_peers(row, &rows, &mut broken);
            } else {
                check_disturbed(row, &rows, &mut broken);
            }
        }
        broken
    }

    fn check_alone(&self, row: &Row<'_>, broken: &mut Vec<String>) {
        let setup = &self.setup;
        let mut check = |what: &str, value: Option<f64>, limit: f64| {
            if let Some(value) = value
                && value > limit
            {
                broken.push(format!(
                    "{}: {what}: {value:.3}, at most {limit} is wanted",
                    row.name()
                ));
            }
        };
        let (median, worst) = (row.median(Measured::ratio), row.worst(Measured::ratio));
        if row.subject == Subject::Mooncake {
            if setup.slow.is_some() {
                check(
                    "the median ratio of those with the usual link",
                    median,
                    RATIO_BESIDE_SLOW,
                );
            } else {
                check("the median ratio", median, RATIO);
                if setup.source_bits_per_s.is_none() {
                    check("the worst ratio", worst, WORST_RATIO);
                }
            }
        }
        let size = setup.size_bytes as f64;
        let copies = |of: fn(&Measured) -> Option<u64>| row.worst(|m| Some(of(m)? as f64 / size));
        // Only where more could come out than one copy in the time it takes.
        if setup.seed_link_bits_per_s.is_some() && row.subject == Subject::Mooncake {
            let blocks = copies(|m| Some(m.payload?.sent_bytes));
            check("the copies out of the seed (blocks)", blocks, SEED_COPIES);
            let link = copies(|m| Some(m.sent_bytes));
            check("the copies out of the seed (link)", link, SEED_COPIES);
        }
        if row.subject == Subject::Mooncake {
            let blocks = copies(|m| Some(m.payload?.received_bytes));
            check("the copies into a follower (blocks)", blocks, RECEIVED_COPIES);
        }
        let link = copies(|m| Some(m.received_bytes));
        check("the copies into a follower (link)", link, RECEIVED_COPIES);
        let elections: u64 = row.runs.iter().filter_map(|m| m.elections).sum();
        if elections > 0 {
            broken.push(format!("{}: {elections} elections, none is wanted", row.name()));
        }
    }

    /// For people.
    pub fn text(&self) -> String {
        let setup = &self.setup;
        let mut text = format!("{}\n", self.table());
        let bound = match setup.source_bits_per_s {
            Some(_) => "one download from the capped source, without followers",
            None => "S/B, B of one plain TCP stream on the same testbed",
        };
        text += &format!(
            "bound: {bound}. s: median until the last follower has it. ratio, worst: to the bound, of the same run.\n\
             copies: bytes by size; link: as the links carried them, headers included; blocks: as the nodes count \
             their payload.\n",
        );
        if setup.slow.is_some() {
            text += "slow ones: s until the last of those with a slower link has it; they are in no other column.\n";
        }
        text += &format!(
            "size {} MiB; links {} Mbit/s; folders {}; the disk takes {:.0} MB/s.\n",
            setup.size_bytes >> 20,
            setup.link_bits_per_s / 1_000_000,
            if self.machine.memory {
                "in memory"
            } else {
                "on the disk"
            },
            self.machine.disk_bytes_per_s / 1e6,
        );
        text += &machine_line(self.load_before, self.began);
        for what in self.broken() {
            text += &format!("DOES NOT HOLD: {what}\n");
        }
        text
    }

    fn table(&self) -> Table {
        let slow = self.setup.slow.is_some();
        let joined = self.setup.join;
        let mut header = vec![
            "tool",
            "followers",
            "chunk",
            "runs",
            "bound s",
            "s",
            "ratio",
            "worst",
            "out of seed, link",
            "into one, link",
            "out of seed, blocks",
            "into one, blocks",
            "elections",
        ];
        header.extend(slow.then_some("slow ones"));
        header.extend(joined.then_some("joined, ratio"));
        let mut table = table(&header);
        let size = self.setup.size_bytes as f64;
        let number = |value: Option<f64>, digits: usize| match value {
            Some(value) => format!("{value:.digits$}"),
            None => "–".to_owned(),
        };
        for row in self.rows() {
            let times = match row.runs.len() {
                all if all == self.setup.runs => all.to_string(),
                some => format!("{some} of {}", self.setup.runs),
            };
            let payload = |of: fn(&Payload) -> u64| {
                let copies = row.runs.iter().filter_map(|m| m.payload.as_ref());
                median_and_worst(copies.map(|p| of(p) as f64 / size)).map(|(_, worst)| worst)
            };
            let elections: Vec<u64> = row.runs.iter().filter_map(|m| m.elections).collect();
            let mut numbers = vec![
                row.followers.to_string(),
                row.chunk_bytes.map_or("–".into(), size_text),
                times,
                number(row.median(|m| Some(m.bound.as_secs_f64())), 2),
                number(row.median(|m| Some(m.makespan.as_secs_f64())), 2),
                number(row.median(Measured::ratio), 3),
                number(row.worst(Measured::ratio), 3),
                number(row.worst(|m| Some(m.sent_bytes as f64 / size)), 2),
                number(row.worst(|m| Some(m.received_bytes as f64 / size)), 3),
                number(payload(|p| p.sent_bytes), 2),
                number(payload(|p| p.received_bytes), 3),
                match elections.is_empty() {
                    true => "–".into(),
                    false => elections.iter().sum::<u64>().to_string(),
                },
            ];
            if slow {
                numbers.push(number(row.median(|m| Some(m.slow?.as_secs_f64())), 2));
            }
            if joined {
                numbers.push(number(row.median(Measured::joined_ratio), 3));
            }
            let mut cells = vec![Cell::new(row.subject.name())];
            cells.extend(numbers.into_iter().map(right));
            table.add_row(cells);
        }
        table
    }

    /// For programs: one object per row and line, and one of the run.
    pub fn json_lines(&self) -> Vec<Value> {
        let setup = &self.setup;
        let size = setup.size_bytes as f64;
        let mut lines = vec![json!({
            "kind": "run",
            "size_bytes": setup.size_bytes,
            "link_bits_per_s": setup.link_bits_per_s,
            "seed_link_bits_per_s": setup.seed_link_bits_per_s,
            "slow_followers": setup.slow.map(|slow| slow.followers),
            "slow_link_bits_per_s": setup.slow.map(|slow| slow.link_bits_per_s),
            "source_bits_per_s": setup.source_bits_per_s,
            "folders": if self.machine.memory { "memory" } else { "disk" },
            "disk_bytes_per_s": self.machine.disk_bytes_per_s,
            "cores": cores(),
            "load_average_before": self.load_before,
            "load_average_after": load_average(),
            "took_s": self.began.elapsed().as_secs_f64(),
            "does_not_hold": self.broken(),
        })];
        for row in self.rows() {
            let each = |of: &dyn Fn(&Measured) -> Option<f64>| {
                row.runs.iter().filter_map(|m| of(m)).collect::<Vec<_>>()
            };
            lines.push(json!({
                "kind": "broadcast",
                "tool": row.subject.name(),
                "followers": row.followers,
                "chunk_bytes": row.chunk_bytes,
                "runs": row.runs.len(),
                "bound_s": row.median(|m| Some(m.bound.as_secs_f64())),
                "makespan_s": row.median(|m| Some(m.makespan.as_secs_f64())),
                "worst_makespan_s": row.worst(|m| Some(m.makespan.as_secs_f64())),
                "ratio": row.median(Measured::ratio),
                "worst_ratio": row.worst(Measured::ratio),
                "seed_copies": row.worst(|m| Some(m.sent_bytes as f64 / size)),
                "received_copies": row.worst(|m| Some(m.received_bytes as f64 / size)),
                "seed_block_copies": row.worst(|m| Some(m.payload?.sent_bytes as f64 / size)),
                "received_block_copies": row.worst(|m| Some(m.payload?.received_bytes as f64 / size)),
                "elections": row.runs.iter().filter_map(|m| m.elections).reduce(|a, b| a + b),
                "slow_makespan_s": row.median(|m| Some(m.slow?.as_secs_f64())),
                "joined_ratio": row.median(Measured::joined_ratio),
                "all_bounds_s": each(&|m| Some(m.bound.as_secs_f64())),
                "all_makespans_s": each(&|m| Some(m.makespan.as_secs_f64())),
            }));
        }
        lines
    }
}

impl Measured {
    fn ratio(&self) -> Option<f64> {
        over(self.makespan, self.bound)
    }

    fn joined_ratio(&self) -> Option<f64> {
        over(self.joined?, self.bound)
    }
}

fn over(a: Duration, b: Duration) -> Option<f64> {
    let ratio = a.as_secs_f64() / b.as_secs_f64();
    ratio.is_finite().then_some(ratio)
}

impl Row<'_> {
    fn name(&self) -> String {
        let chunk = self.chunk_bytes.map(size_text).unwrap_or_default();
        format!(
            "{}, followers {}, chunk {chunk}",
            self.subject.name(),
            self.followers
        )
    }

    fn median(&self, of: impl Fn(&Measured) -> Option<f64>) -> Option<f64> {
        median_and_worst(self.runs.iter().filter_map(|m| of(m))).map(|(median, _)| median)
    }

    fn worst(&self, of: impl Fn(&Measured) -> Option<f64>) -> Option<f64> {
        median_and_worst(self.runs.iter().filter_map(|m| of(m))).map(|(_, worst)| worst)
    }

    fn makespan(&self) -> Option<f64> {
        self.median(|m| Some(m.makespan.as_secs_f64()))
    }
}

/// The row against that with one follower.
fn check_flat(row: &Row<'_>, rows: &[Row<'_>], broken: &mut Vec<String>) {
    let one = rows
        .iter()
        .find(|r| r.subject == row.subject && r.chunk_bytes == row.chunk_bytes && r.followers == 1);
    if let Some(one) = one.and_then(Row::makespan)
        && let Some(all) = row.makespan()
        && all > FLAT * one
    {
        broken.push(format!(
            "{}: takes {:.3} times as long as one follower, at most {FLAT} is wanted",
            row.name(),
            all / one
        ));
    }
}

/// The chain without checks is the floor and no rival; a star of one is a plain download without checks.
fn check_peers(row: &Row<'_>, rows: &[Row<'_>], broken: &mut Vec<String>) {
    for peer in rows.iter().filter(|peer| peer.followers == row.followers) {
        let rival = match peer.subject {
            Subject::Peer(Peer::Aria2) => true,
            Subject::Peer(Peer::Nginx) => row.followers > 1,
            _ => false,
        };
        if let (true, Some(theirs), Some(ours)) = (rival, peer.makespan(), row.makespan())
            && ours >= theirs
        {
            broken.push(format!(
                "{}: takes {ours:.2} s, {} takes {theirs:.2} s",
                row.name(),
                peer.subject.name()
            ));
        }
    }
}

/// Those that are left against all without a disturbance.
fn check_disturbed(row: &Row<'_>, rows: &[Row<'_>], broken: &mut Vec<String>) {
    let calm = rows.iter().find(|r| {
        r.subject == Subject::Mooncake && r.chunk_bytes == row.chunk_bytes && r.followers == row.followers
    });
    if let Some(calm) = calm.and_then(Row::makespan)
        && let Some(disturbed) = row.makespan()
        && disturbed > DISTURBED * calm
    {
        broken.push(format!(
            "{}: takes {:.3} times as long as undisturbed, at most {DISTURBED} is wanted",
            row.name(),
            disturbed / calm
        ));
    }
}

fn size_text(bytes: u64) -> String {
    for (unit, name) in [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")] {
        if bytes.is_multiple_of(unit) {
            return format!("{} {name}", bytes / unit);
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 1000;

    fn report(setup: impl FnOnce(&mut Setup)) -> Report {
        let mut all = Setup {
            size_bytes: SIZE,
            followers: vec![1, 8],
            chunks: vec![4 << 20],
            link_bits_per_s: 200_000_000,
            seed_link_bits_per_s: None,
            slow: None,
            source_bits_per_s: None,
            kill: false,
            join: false,
            peers: Peer::ALL.to_vec(),
            runs: 3,
        };
        setup(&mut all);
        let machine = Machine {
            disk_bytes_per_s: 1e9,
            memory: true,
        };
        Report::new(all, machine)
    }

    fn measured(subject: Subject, followers: usize, ratio: f64) -> Measured {
        Measured {
            subject,
            followers,
            chunk_bytes: (!matches!(subject, Subject::Peer(_))).then_some(4 << 20),
            bound: Duration::from_secs(10),
            makespan: Duration::from_secs_f64(10.0 * ratio),
            slow: None,
            joined: None,
            sent_bytes: SIZE,
            received_bytes: SIZE,
            payload: Some(Payload {
                sent_bytes: SIZE,
                received_bytes: SIZE,
            }),
            elections: Some(0),
        }
    }

    /// What is broken, with one more change to the first one.
    fn broken(setup: impl FnOnce(&mut Setup), all: &[Measured]) -> Vec<String> {
        let mut report = report(setup);
        all.iter().cloned().for_each(|m| report.add(m));
        report.broken()
    }

    #[test]
    fn the_median_may_not_be_above_one_limit_nor_the_worst_above_another() {
        let runs = |ratios: [f64; 3]| ratios.map(|r| measured(Subject::Mooncake, 8, r));
        assert_eq!(broken(|_| {}, &runs([1.02, 1.09, 1.14])), Vec::<String>::new());
        assert!(broken(|_| {}, &runs([1.02, 1.11, 1.12]))[0].contains("median ratio: 1.110"));
        assert!(broken(|_| {}, &runs([1.02, 1.03, 1.2]))[0].contains("worst ratio: 1.200"));
        let beside_slow = |s: &mut Setup| {
            s.slow = Some(super::super::Slow {
                followers: 2,
                link_bits_per_s: 50_000_000,
            });
        };
        assert!(broken(beside_slow, &runs([1.12; 3])).is_empty());
        assert_eq!(broken(beside_slow, &runs([1.16; 3])).len(), 1);
    }

    #[test]
    fn many_followers_are_compared_with_one() {
        let one = measured(Subject::Mooncake, 1, 1.00);
        assert!(broken(|_| {}, &[one.clone(), measured(Subject::Mooncake, 8, 1.05)]).is_empty());
        let all = broken(|_| {}, &[one, measured(Subject::Mooncake, 8, 1.06)]);
        assert!(
            all.len() == 1 && all[0].contains("1.060 times as long as one"),
            "{all:?}"
        );
    }

    #[test]
    fn rivals_are_those_that_could_be_beaten() {
        let with = |peer, followers, ratio| {
            let ours = measured(Subject::Mooncake, followers, 1.05);
            broken(|_| {}, &[ours, measured(Subject::Peer(peer), followers, ratio)]).len()
        };
        assert_eq!(with(Peer::Aria2, 1, 1.04), 1);
        assert_eq!(with(Peer::Aria2, 8, 1.06), 0);
        assert_eq!(with(Peer::Nginx, 8, 1.04), 1);
        assert_eq!(with(Peer::Nginx, 1, 1.00), 0);
        assert_eq!(with(Peer::Socat, 8, 1.00), 0);
    }

    #[test]
    fn copies_and_elections() {
        let mut one = measured(Subject::Mooncake, 8, 1.0);
        one.elections = Some(1);
        one.payload = Some(Payload {
            sent_bytes: SIZE * 2,
            received_bytes: SIZE * 103 / 100,
        });
        let usual = broken(|_| {}, &[one.clone()]);
        assert_eq!(usual.len(), 2, "{usual:?}");
        let wide_link = |s: &mut Setup| s.seed_link_bits_per_s = Some(800_000_000);
        let wide = broken(wide_link, &[one]);
        assert!(wide[0].contains("out of the seed (blocks): 2.000"), "{wide:?}");
    }

    #[test]
    fn what_links_carried_counts_too() {
        let carried = |subject, sent_bytes, received_bytes| Measured {
            sent_bytes,
            received_bytes,
            ..measured(subject, 8, 1.0)
        };
        let wide_link = |s: &mut Setup| s.seed_link_bits_per_s = Some(800_000_000);
        let most = (SIZE * 115 / 100, SIZE * 102 / 100);
        for subject in [Subject::Mooncake, Subject::Disturbed] {
            let fine = broken(wide_link, &[carried(subject, most.0, most.1)]);
            assert_eq!(fine, Vec::<String>::new());
            let into = broken(|_| {}, &[carried(subject, SIZE, most.1 + 1)]);
            assert!(
                into.len() == 1 && into[0].contains("into a follower (link): 1.021"),
                "{into:?}"
            );
        }
        let much = [carried(Subject::Mooncake, most.0 + 1, SIZE)];
        let out = broken(wide_link, &much);
        assert!(
            out.len() == 1 && out[0].contains("out of the seed (link): 1.151"),
            "{out:?}"
        );
        assert!(
            broken(|_| {}, &much).is_empty(),
            "the usual link cannot carry more"
        );
        let peer = [carried(Subject::Peer(Peer::Aria2), SIZE * 8, SIZE * 2)];
        assert!(broken(wide_link, &peer).is_empty(), "others may do as they like");
    }

    #[test]
    fn a_disturbed_one_is_compared_with_an_undisturbed_one() {
        let calm = measured(Subject::Mooncake, 8, 1.0);
        let fine = [calm.clone(), measured(Subject::Disturbed, 8, 1.04)];
        assert!(broken(|s| s.kill = true, &fine).is_empty());
        let slow = [calm, measured(Subject::Disturbed, 8, 1.06)];
        assert_eq!(broken(|s| s.kill = true, &slow).len(), 1);
    }

    #[test]
    fn rows_say_how_many_runs_there_were() {
        let mut report = report(|_| {});
        report.add(measured(Subject::Mooncake, 8, 1.1));
        report.add(measured(Subject::Mooncake, 8, 1.0));
        report.add(measured(Subject::Peer(Peer::Aria2), 8, 1.4));
        let text = report.text();
        for wanted in ["2 of 3", "1 of 3", "aria2", "4 MiB", "in memory"] {
            assert!(text.contains(wanted), "{wanted}: {text}");
        }
        let lines = report.json_lines();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[1]["tool"], "mooncake");
        assert_eq!(lines[1]["ratio"], 1.0);
        assert_eq!(lines[1]["worst_ratio"], 1.1);
        assert_eq!(lines[2]["chunk_bytes"], Value::Null);
        assert_eq!(lines[2]["makespan_s"], 14.0);
    }
}
