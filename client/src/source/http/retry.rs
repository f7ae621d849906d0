//! When to try again, and when to give up.

use crate::{
    source::{SourceConfig, context::SourceFile},
    task::TaskFailure,
};
use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use std::time::Duration;

/// The retries of one request, until something was verified.
pub(super) struct Retry<'a> {
    file: &'a SourceFile,
    config: &'a SourceConfig,
    delays: ExponentialBackoff,
    failures: u32,
}

impl<'a> Retry<'a> {
    pub(super) fn new(file: &'a SourceFile, config: &'a SourceConfig) -> Self {
        Self {
            file,
            config,
            delays: delays(config),
            failures: 0,
        }
    }

    /// Something was verified: begins anew.
    pub(super) fn progress(&mut self) {
        self.failures = 0;
        self.delays = delays(self.config);
    }

    /// How long to wait before the next try, or the end.
    pub(super) fn failed(&mut self, why: &str) -> Result<Duration, TaskFailure> {
        self.failures += 1;
        let delay = self.delays.next();
        tracing::debug!(file = %self.file.path, source = %self.file.location, failures = self.failures, "source failed: {why}");
        delay.ok_or_else(|| {
            let message = format!(
                "{} (the source of '{}') cannot be read: {why}; given up after {} tries without progress. What was \
                 verified is kept: try again when the server and the network to it are well",
                self.file.location, self.file.path, self.failures
            );
            TaskFailure::retryable("source_unavailable", message)
        })
    }
}

fn delays(config: &SourceConfig) -> ExponentialBackoff {
    ExponentialBuilder::new()
        .with_min_delay(config.backoff_min)
        .with_max_delay(config.backoff_max)
        .with_factor(2.0)
        .with_jitter()
        .with_max_times(config.retries as usize)
        .build()
}
