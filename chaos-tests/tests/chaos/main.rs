//! Chaos: what the testbed itself promises, and that each nemesis bites. Needs root (see [`mooncake_chaos::testbed`]).

mod balancers;
mod bed;
mod nemeses;
mod soak;

use std::time::Duration;

/// Long enough for anything here on a busy 2-core machine; a hang fails, it does not wait for ever.
const LONG: Duration = Duration::from_secs(60);
