//! What all benchmarks have in common: tables, numbers, what they say of the machine, how they end.

use crate::testbed::run::before_removal;
use anyhow::Result;
use comfy_table::{Cell, CellAlignment, Table, presets};
use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

/// How a benchmark ends: 0 where all holds that it promises (true), 2 where something does not, 1 where it could not
/// be measured.
pub fn exit_code(measured: Result<bool>) -> ExitCode {
    match measured {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(2),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// SIGINT and SIGTERM end the program with what was measured so far ([`before_removal`]).
pub fn print_if_interrupted(print: impl FnOnce() + Send + 'static) {
    before_removal(move || {
        eprintln!("interrupted: this is what was measured so far");
        print();
    });
}

/// What a reader needs to know of the machine: its cores, and who else used them.
pub fn machine_line(load_before: f64, began: Instant) -> String {
    format!(
        "{} cores; load average {load_before:.2} before, {:.2} after; the run took {} s.\n",
        cores(),
        load_average(),
        began.elapsed().as_secs()
    )
}

/// An empty table with this header.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(header);
    table
}

/// A number's cell.
pub fn right(number: impl Into<String>) -> Cell {
    Cell::new(number.into()).set_alignment(CellAlignment::Right)
}

/// Milliseconds with three decimals at most.
pub fn ms(at: Duration) -> f64 {
    at.as_micros() as f64 / 1000.0
}

/// Cores that this program may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Of the last minute; 0 where the kernel does not say.
pub fn load_average() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = text.split(' ').next().unwrap_or_default();
    first.parse().unwrap_or(0.0)
}

/// The value below which the share `p` of the sorted ones is, by the nearest rank.
pub fn percentile<T: Copy + Default>(sorted: &[T], p: f64) -> T {
    let rank = (p * sorted.len() as f64).ceil() as usize;
    sorted
        .get(rank.clamp(1, sorted.len().max(1)) - 1)
        .copied()
        .unwrap_or_default()
}

/// The median (the lower of the two in the middle) and the largest; `None` of nothing.
pub fn median_and_worst(values: impl IntoIterator<Item = f64>) -> Option<(f64, f64)> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let worst = *sorted.last()?;
    Some((percentile(&sorted, 0.5), worst))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let at = |ms: &[u64], p| {
            let sorted: Vec<_> = ms.iter().map(|ms| Duration::from_millis(*ms)).collect();
            percentile(&sorted, p).as_millis()
        };
        let hundred: Vec<_> = (1..=100).collect();
        assert_eq!(at(&hundred, 0.5), 50);
        assert_eq!(at(&hundred, 0.99), 99);
        assert_eq!(at(&hundred, 1.0), 100);
        assert_eq!(at(&[7], 0.5), 7);
        assert_eq!(at(&[], 0.5), 0);
    }

    #[test]
    fn medians() {
        assert_eq!(median_and_worst([]), None);
        assert_eq!(median_and_worst([3.0]), Some((3.0, 3.0)));
        assert_eq!(median_and_worst([3.0, 1.0]), Some((1.0, 3.0)));
        assert_eq!(median_and_worst([5.0, 1.0, 2.0]), Some((2.0, 5.0)));
    }
}
