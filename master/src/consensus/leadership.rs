//! Who leads, as a value to watch.

use std::sync::Arc;
use std::time::Instant;

use mooncake_raft_store::{NodeId, StoredMembership, TypeConfig};
use openraft::async_runtime::watch::WatchReceiver as _;
use openraft::{Instant as _, RaftMetrics, ServerState};
use tokio::sync::watch;

use super::{Master, MasterRaft, service::Shared};

/// Who leads, from where this master stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leadership {
    /// The newest term this master knows of.
    pub term: u64,
    /// The leader of that term, if it is known. Known does not mean alive.
    pub leader: Option<Master>,
    /// This master was elected in `term`. By itself that proves nothing: an old leader that was cut off believes it too.
    pub is_leader: bool,
    /// This master leads *and* has applied the first entry of its own term: its state holds all that was
    /// acknowledged before. Only then may the leader's work begin.
    pub is_serving: bool,
}

/// Where a master is reached, by the membership.
pub(crate) fn master(membership: &StoredMembership, id: NodeId) -> Option<Master> {
    membership.get_node(&id).map(|node| Master {
        id,
        rpc_address: node.rpc_address.clone(),
        http_address: node.http_address.clone(),
    })
}

pub(crate) fn of(metrics: &RaftMetrics<TypeConfig>) -> Leadership {
    let is_leader = metrics.state == ServerState::Leader;
    let own_term_applied = metrics
        .last_applied
        .as_ref()
        .is_some_and(|id| id.committed_leader_id().term == metrics.current_term);
    Leadership {
        term: metrics.current_term,
        leader: metrics
            .current_leader
            .and_then(|id| master(&metrics.membership_config, id)),
        is_leader,
        is_serving: is_leader && own_term_applied,
    }
}

/// What the watching task found out.
pub(crate) struct Watches {
    pub(crate) leadership: watch::Receiver<Leadership>,
    /// Set once, when openraft stopped by itself: the process must end.
    pub(crate) stopped: watch::Receiver<Option<Arc<str>>>,
}

/// Follows openraft's metrics until Raft is gone.
pub(crate) fn spawn(raft: &MasterRaft, shared: Arc<Shared>) -> Watches {
    let mut metrics = raft.metrics();
    let (leadership_tx, leadership) = watch::channel(Leadership::default());
    let (stopped_tx, stopped) = watch::channel(None);
    tokio::spawn(async move {
        let mut elected: Option<(u64, Instant)> = None;
        loop {
            let (now, running, acked) = {
                let metrics = metrics.borrow_watched();
                let acked = metrics.last_quorum_acked.map(|at| at.elapsed());
                (of(&metrics), metrics.running_state.clone(), acked)
            };
            // A leader hears of itself by its quorum. Remembered, so that it counts after it leads no more.
            if let Some(at) = acked.and_then(|ago| Instant::now().checked_sub(ago)) {
                shared.heard_leader(at);
            }
            if let Err(fatal) = running {
                let text: Arc<str> = fatal.to_string().into();
                stopped_tx.send_replace(Some(text));
                return;
            }
            leadership_tx.send_if_modified(|last| {
                if *last == now {
                    return false;
                }
                log_change(last, &now, &mut elected);
                if now.is_leader && !last.is_leader {
                    shared.heard_leader(Instant::now());
                }
                *last = now;
                true
            });
            if metrics.changed().await.is_err() {
                stopped_tx.send_if_modified(|stopped| {
                    stopped.get_or_insert_with(|| "Raft is gone".into());
                    true
                });
                return;
            }
        }
    });
    Watches { leadership, stopped }
}

fn log_change(last: &Leadership, now: &Leadership, elected: &mut Option<(u64, Instant)>) {
    let leader = now.leader.as_ref().map(|master| master.id);
    if now.is_leader && !last.is_leader {
        *elected = Some((now.term, Instant::now()));
        tracing::info!(term = now.term, "this master was elected leader");
    }
    if now.is_serving && !last.is_serving {
        let since = elected
            .filter(|(term, _)| *term == now.term)
            .map(|(_, at)| at.elapsed().as_millis() as u64);
        tracing::info!(
            term = now.term,
            after_ms = since,
            "leading: everything acknowledged before is applied"
        );
    }
    if last.is_leader && !now.is_leader {
        tracing::info!(term = now.term, leader, "this master leads no more");
    }
    let known = |l: &Leadership| l.leader.as_ref().map(|master| master.id);
    if !now.is_leader && known(last) != known(now) {
        match &now.leader {
            Some(master) => tracing::info!(
                term = now.term,
                leader = master.id,
                rpc = master.rpc_address,
                "following"
            ),
            None => tracing::info!(term = now.term, "no leader is known"),
        }
    }
}
