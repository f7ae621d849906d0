//! A short soak: one round of what `soak` does for hours.

use anyhow::{Result, ensure};
use mooncake_chaos::soak::{RoundOptions, round};
use std::time::Duration;

#[tokio::test(flavor = "multi_thread")]
async fn a_short_soak_breaks_nothing() -> Result<()> {
    let out = tempfile::tempdir()?;
    let judged = round(&RoundOptions {
        seed: 4,
        length: Duration::from_secs(40),
        masters: 3,
        clients: 3,
        clocks: false,
        snapshots: false,
        short_grace: true,
        converge_within: Duration::from_secs(30),
        out: out.path().to_owned(),
        progress: |what| eprintln!("{what}"),
    })
    .await;
    // The history is worth more than a clean disk.
    let report = match judged {
        Ok(report) => report,
        Err(error) => return Err(error.context(format!("see {}", out.keep().display()))),
    };
    if !report.violations.is_empty() {
        let kept = out.keep();
        let violations: Vec<_> = report.violations.iter().map(ToString::to_string).collect();
        ensure!(false, "{}\nsee {}", violations.join("\n"), kept.display());
    }
    let faults: u64 = report.nemeses.values().map(|n| n.count).sum();
    ensure!(
        faults >= 3 && report.acknowledged_writes >= 50 && report.folders >= 10,
        "too little happened: {report:?}"
    );
    Ok(())
}
