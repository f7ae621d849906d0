//! Handing leadership over.
//!
//! Guaranteed: it goes only to a voter that answers and is close behind the log, so that a hand-over does not stop writes;
//! success is said only of the one that was meant. Not guaranteed: that it stays there.

use std::time::Duration;

use mooncake_raft_store::NodeId;

use super::Master;
use super::handle::{Handle, MAX_READY_LAG, Member, known};

/// A follower that was silent for this long is not a candidate for a transfer of leadership.
const TRANSFER_MAX_SILENCE: Duration = Duration::from_secs(1);

/// Why leadership was not handed over.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// There is nothing to hand over.
    #[error("this master does not lead{}", known(.leader))]
    NotLeader {
        /// Who does, if known.
        leader: Option<Master>,
    },
    /// Nobody can take it.
    #[error("no other voter answers and is close enough behind the log")]
    NoCandidate,
    /// The one that was named does not answer.
    #[error("master {id} {}", silence(.silent))]
    Unreachable {
        /// Who.
        id: NodeId,
        /// For how long; `None`: it never answered this leader.
        silent: Option<Duration>,
    },
    /// The one that was named has too little of the log.
    #[error("master {id} is {} log entries behind, the limit is {MAX_READY_LAG}", entries(.lag))]
    Behind {
        /// Who.
        id: NodeId,
        /// By how much, if that is known.
        lag: Option<u64>,
    },
    /// It left this master, but another one than was named was elected.
    #[error("master {} was elected, not master {wanted}", .leader.id)]
    Elsewhere {
        /// Who was named.
        wanted: NodeId,
        /// Who leads now.
        leader: Master,
    },
    /// The id is not a voter, or is this master.
    #[error("master {0} is not another voter of this cluster")]
    BadTarget(NodeId),
    /// The old leader may lead on, or the election takes longer.
    #[error("leadership did not move within {} ms", .0.as_millis())]
    TimedOut(Duration),
    /// This master stops.
    #[error("this master stops")]
    Stopped,
}

/// In words: how long a master has not answered its leader.
pub(super) fn silence(silent: &Option<Duration>) -> String {
    match silent {
        Some(silent) => format!("has not answered for {} s", silent.as_secs()),
        None => "has not answered this leader yet: is it started?".into(),
    }
}

/// In words: how many entries a master is behind.
pub(super) fn entries(lag: &Option<u64>) -> String {
    lag.map_or_else(|| "an unknown number of".into(), |lag| lag.to_string())
}

impl Handle {
    /// Hands leadership to `to`, or to the voter that is closest behind the log, and waits until it is seen to have
    /// moved. Writes are refused meanwhile, for about the time of one election round trip; so a voter that could not
    /// take it is refused before.
    pub async fn transfer_leader(&self, to: Option<NodeId>) -> Result<Master, TransferError> {
        let mut watch = self.leadership();
        let before = watch.borrow_and_update().clone();
        if !before.is_leader {
            return Err(TransferError::NotLeader {
                leader: before.leader,
            });
        }
        let me = self.identity().node_id;
        // A leader that has only just been elected has not heard the others yet.
        let settled = |members: &[Member]| {
            !matches!(
                judge_target(to, members, me),
                Err(TransferError::Unreachable { silent: None, .. }
                    | TransferError::Behind { .. }
                    | TransferError::NoCandidate)
            )
        };
        self.settle(settled).await;
        let target = judge_target(to, &self.cluster().members, me)?;
        tracing::info!(to = target, "handing leadership over");
        self.inner
            .raft
            .trigger()
            .transfer_leader(target)
            .await
            .map_err(|_| TransferError::Stopped)?;
        // The followers' own election timers are the fallback: a leader that is handing over sends no heartbeats.
        let limit = self.inner.election_timeout * 4;
        let moved = watch.wait_for(|now| {
            now.term > before.term && now.leader.as_ref().is_some_and(|leader| leader.id != me)
        });
        match tokio::time::timeout(limit, moved).await {
            Ok(Ok(now)) => match now.leader.clone() {
                Some(leader) => arrived(to, leader),
                None => Err(TransferError::TimedOut(limit)),
            },
            Ok(Err(_)) => Err(TransferError::Stopped),
            Err(_) => Err(TransferError::TimedOut(limit)),
        }
    }
}

/// Who can take leadership over from `me`.
fn judge_target(to: Option<NodeId>, members: &[Member], me: NodeId) -> Result<NodeId, TransferError> {
    let voters = || members.iter().filter(|member| member.is_voter && member.id != me);
    let fit = |member: &Member| {
        let (id, silent, lag) = (member.id, member.silent, member.lag);
        if silent.is_none_or(|silent| silent >= TRANSFER_MAX_SILENCE) {
            return Err(TransferError::Unreachable { id, silent });
        }
        if lag.is_none_or(|lag| lag > MAX_READY_LAG) {
            return Err(TransferError::Behind { id, lag });
        }
        Ok(id)
    };
    match to {
        Some(id) => voters()
            .find(|member| member.id == id)
            .ok_or(TransferError::BadTarget(id))
            .and_then(fit),
        None => voters()
            .filter(|member| fit(member).is_ok())
            .min_by_key(|member| (member.lag, member.id))
            .map(|member| member.id)
            .ok_or(TransferError::NoCandidate),
    }
}

/// Whether the one that was elected is the one that was meant.
fn arrived(wanted: Option<NodeId>, leader: Master) -> Result<Master, TransferError> {
    match wanted {
        Some(wanted) if wanted != leader.id => Err(TransferError::Elsewhere { wanted, leader }),
        _ => Ok(leader),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(id: NodeId, silent_ms: Option<u64>, lag: u64) -> Member {
        Member {
            id,
            rpc_address: format!("h{id}:1"),
            http_address: format!("h{id}:2"),
            disk_id: format!("d{id}"),
            is_voter: true,
            lag: Some(lag),
            silent: silent_ms.map(Duration::from_millis),
        }
    }

    #[test]
    fn leadership_goes_only_to_who_can_take_it() {
        let members = [
            member(1, None, 0),
            member(2, Some(10), 7),
            member(3, Some(9_000), 0),
            member(4, Some(10), MAX_READY_LAG + 1),
            member(5, None, 0),
            Member {
                is_voter: false,
                ..member(6, Some(0), 0)
            },
        ];
        let to = |to| judge_target(to, &members, 1);
        assert_eq!(to(Some(2)), Ok(2));
        assert_eq!(to(None), Ok(2), "the only one that is fit");
        for bad in [1, 6, 9] {
            assert_eq!(to(Some(bad)), Err(TransferError::BadTarget(bad)));
        }
        for (id, says) in [
            (3, "master 3 has not answered for 9 s"),
            (4, "master 4 is 1001 log entries behind"),
            (5, "is it started"),
        ] {
            let why = to(Some(id)).unwrap_err();
            assert!(why.to_string().contains(says), "{why}");
            assert!(matches!(
                (id, why),
                (4, TransferError::Behind { .. }) | (3 | 5, TransferError::Unreachable { .. })
            ));
        }
        assert_eq!(
            judge_target(None, &members[2..], 1),
            Err(TransferError::NoCandidate)
        );
    }

    #[test]
    fn another_leader_than_was_named_is_no_success() {
        let leader = Master {
            id: 3,
            rpc_address: String::new(),
            http_address: String::new(),
        };
        assert_eq!(arrived(None, leader.clone()), Ok(leader.clone()));
        assert_eq!(arrived(Some(3), leader.clone()), Ok(leader.clone()));
        let why = arrived(Some(2), leader.clone()).unwrap_err();
        assert_eq!(why, TransferError::Elsewhere { wanted: 2, leader });
        assert!(
            why.to_string().contains("master 3 was elected, not master 2"),
            "{why}"
        );
    }
}
