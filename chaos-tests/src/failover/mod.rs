//! How long a cluster takes no writes after its leader is lost: Mooncake's masters, and etcd measured the same way on
//! the same machine in the same run.
//!
//! Around each fault a write is sent every [`WRITE_EVERY`] through HAProxy, whatever became of those before it. The
//! clock runs from the moment before the fault to the first acknowledgement of a write that was *sent after it* and
//! carries a higher term. So it holds detection, election, the load balancer's part, and the commit.
//!
//! All clusters are up at once and take turns, see [`run`]: what one loses is measured while the others are at rest.
//!
//! Not measured: clients' own retries. A write that fails is not repeated; the next one is 10 ms behind it.

mod etcd;
mod etcd_rpc;
pub mod generator;
mod handover;
mod mooncake;
mod overload;
mod report;
mod run;

pub use etcd::{Etcd, etcd_is_there};
pub use handover::{Cost, HandOver, hand_over};
pub use mooncake::{Answer, Mooncake, Write, term};
pub use overload::{Heartbeats, Load, Outcome, overload};
pub use report::{Report, Verdict};
pub use run::{Counts, Plan, run};

use crate::testbed::{BalancerKind, Network, Testbed, TestbedOptions};
use anyhow::Result;
use futures_util::future::BoxFuture;
use std::time::Duration;

/// Between two writes.
pub const WRITE_EVERY: Duration = Duration::from_millis(10);
/// How long one write may take; longer than any failover that is worth a number.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Writes under way at once: those of one time-out. Beyond it the measurement waits, and says so.
const MAX_WRITES: usize = 1_000;
/// How long until writes are acknowledged again, or a cluster has caught up: the run fails after that.
const GIVE_UP: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// What happens to the leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// kill -9 of its process: its host refuses connections from then on.
    Kill,
    /// SIGSTOP: its host accepts connections, nobody answers.
    Freeze,
    /// All packets to and from it are dropped.
    CutOff,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Kill, Self::Freeze, Self::CutOff];

    /// As the table says it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill -9",
            Self::Freeze => "SIGSTOP",
            Self::CutOff => "cut off",
        }
    }
}

/// A cluster whose leader can be lost.
pub trait Subject: Send {
    /// As the table says it.
    fn name(&self) -> String;
    /// Whether the targets of this benchmark are its targets; a yardstick has none.
    fn is_judged(&self) -> bool {
        false
    }
    /// The numbers of writes begin at 0 again.
    fn begin_series(&mut self) {}
    /// Who leads, and in which term, once all members are there, agree and have caught up.
    fn settled(&mut self) -> BoxFuture<'_, Result<(usize, u64)>>;
    /// One write through the load balancer; the term in which it was acknowledged.
    fn write(&self, number: u64) -> BoxFuture<'static, Result<u64>>;
    /// Does it to this member.
    fn inject(&mut self, member: usize, fault: Fault) -> Result<()>;
    /// Undoes it.
    fn heal(&mut self, member: usize, fault: Fault) -> Result<()>;
}

/// A testbed that a subject stands on: `masters` and `clients` as asked, HAProxy where Mooncake needs it.
async fn testbed(masters: usize, clients: usize, balancer: Option<BalancerKind>) -> Result<Testbed> {
    let options = TestbedOptions {
        masters,
        clients,
        balancer,
        ..Default::default()
    };
    match balancer {
        Some(_) => Testbed::start(options).await,
        None => Testbed::prepare(options).await,
    }
}

/// One caller's request, again and again, by its number; anything but what was wished for is an error.
pub type Asker = Box<dyn Fn(u64) -> BoxFuture<'static, Result<()>> + Send + Sync>;

fn cut_off(network: &mut Network, host: &str) -> Result<()> {
    network.isolate(host).map(drop)
}
