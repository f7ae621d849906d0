//! Long runs: a cluster, a workload, faults from a seed, and every checker at the end.
//!
//! A run is a row of rounds; each has a seed, a testbed and a history of its own, so that a failing round stands alone.
//! Reproducible from a seed: the schedule of faults and what callers ask. Not reproducible: what real processes do in
//! between; so the whole history, the schedule and all logs of a failing round are kept.

mod report;
mod round;
mod schedule;

pub use report::{NemesisReport, Report, RoundReport, SnapshotReport};
pub use round::{RoundOptions, round};
pub use schedule::{Means, Step, steps};
