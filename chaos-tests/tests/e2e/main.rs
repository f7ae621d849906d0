//! End to end, with real processes: the list of the RFC's "End-to-End Validation" and what must hold.

mod bed;
mod failover;
mod failures;
mod http;
mod idempotency;
mod limits;
mod operations;
mod real_model;
mod resume;
mod reuse;
mod rfc_example;
mod scale;
mod secrets;

use std::time::Duration;

/// Long enough for any job of these tests on a busy 2-core machine; a hang fails, it does not wait for ever.
const JOB: Duration = Duration::from_secs(300);
