//! Proof that the checkers check: the product with one rule broken on purpose, and the checker that must notice.
//!
//! Needs binaries with the switches (`mooncake-master/sabotage`, `mooncake-client/failpoints`), which no release build
//! has; `test.sh` builds them for this program and without them afterwards. Each test runs the same script with the rule
//! intact first: a checker that always complains proves nothing.

mod fake_node;
mod fence;
mod log_sync;
mod publish;
mod read_index;

use anyhow::Result;
use mooncake_chaos::{
    Cluster,
    checks::{self, Evidence, Violation},
    history::History,
    process::Process,
    workload::{Auditor, Caller, Endpoint, Library, Observer, Scene},
};
use mooncake_proto::DEFAULT_CLUSTER_ID;
use std::{sync::Arc, time::Duration};

/// Long enough for anything here on a busy 2-core machine; a hang fails, it does not wait for ever.
const LONG: Duration = Duration::from_secs(60);
/// Which rules a master breaks (`mooncake_raft_store::sabotage`).
const SWITCHES: &str = "MOONCAKE_SABOTAGE";

/// A history with its caller.
struct Bench {
    history: Arc<History>,
    auditor: Arc<Auditor>,
    caller: Caller,
    observer: Observer,
    scene: Scene,
}

impl Bench {
    /// Requests go directly to the masters: endpoint `i` is master `i`.
    fn new(cluster: &Cluster, library: Library, secret: Option<String>) -> Result<Self> {
        let history = Arc::new(History::new(None)?);
        let library = Arc::new(library);
        let endpoints = cluster.endpoints.iter().enumerate();
        let scene = Scene {
            endpoints: endpoints
                .map(|(i, url)| Endpoint {
                    name: format!("m{}", i + 1),
                    url: url.clone(),
                })
                .collect(),
            rpc_addresses: cluster.rpc_addresses.clone(),
            secret,
            nodes: cluster.nodes.clone(),
            library: library.clone(),
            http: cluster.http.clone(),
        };
        let auditor = Arc::new(Auditor::new(library, history.clone()));
        Ok(Self {
            caller: Caller::new(1, &scene, history.clone(), auditor.clone()),
            observer: Observer::new(&scene, history.clone())?,
            history,
            auditor,
            scene,
        })
    }

    /// What is broken, by every checker that needs no log.
    async fn judge(self) -> Result<Vec<Violation>> {
        self.auditor.settle().await?;
        Ok(checks::check(&Evidence::of(self.history.records()?)))
    }

    /// The same with the committed log. Stops the masters.
    async fn judge_with_log(self, cluster: &mut Cluster) -> Result<Vec<Violation>> {
        self.auditor.settle().await?;
        let mut evidence = Evidence::of(self.history.records()?);
        cluster.masters.iter_mut().for_each(Process::kill);
        let disks = (1..).zip(cluster.data_dirs.iter().cloned()).collect::<Vec<_>>();
        evidence.replay(&disks, DEFAULT_CLUSTER_ID).await?;
        Ok(checks::check(&evidence))
    }
}

/// Which invariants these are.
fn names(violations: &[Violation]) -> Vec<&'static str> {
    violations.iter().map(|v| v.invariant).collect()
}
