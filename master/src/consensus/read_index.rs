//! Linearizable reads: ReadIndex rounds, shared by everyone who waits.
//!
//! Guaranteed: a read that was answered with index *i* began before a quorum confirmed this leader, and the state holds
//! everything acknowledged before it began. No clock and no lease is involved. However many readers there are,
//! one round is under way at a time: those that come meanwhile share the next one.

use std::time::Duration;

use mooncake_raft_store::TypeConfig;
use openraft::errors::{LinearizableReadError, RaftError};
use openraft::{LinearizerOption, ReadPolicy};
use tokio::sync::{mpsc, oneshot};

use super::handle::{ReadError, leader_of};
use super::{Master, MasterRaft};

/// Readers that wait for a round. More is a caller's overload: each holds an HTTP request, which is bounded too.
const MAX_WAITING: usize = 16_384;
/// How long a round waits for the quorum. A few heartbeats: whoever does not answer by then is cut off.
const ROUND_TIMEOUT: Duration = Duration::from_secs(1);

type Answer = Result<u64, ReadError>;

/// Asks for rounds.
#[derive(Clone)]
pub(crate) struct Reads {
    queue: mpsc::Sender<oneshot::Sender<Answer>>,
}

impl Reads {
    pub(crate) fn spawn(raft: MasterRaft) -> Self {
        let (queue, mut waiting) = mpsc::channel::<oneshot::Sender<Answer>>(MAX_WAITING);
        // A test's: answers as if a quorum had been asked.
        let unasked = mooncake_raft_store::sabotage::is_broken("skip_read_index");
        tokio::spawn(async move {
            let mut batch = Vec::new();
            while waiting.recv_many(&mut batch, MAX_WAITING).await > 0 {
                batch.retain(|waiter| !waiter.is_closed());
                if batch.is_empty() {
                    continue;
                }
                let answer = if unasked { Ok(0) } else { round(&raft).await };
                for waiter in batch.drain(..) {
                    // A reader that gave up is no longer there.
                    let _ = waiter.send(answer.clone());
                }
            }
        });
        Self { queue }
    }

    pub(crate) async fn read(&self, deadline: Duration) -> Answer {
        let (answer, waiter) = oneshot::channel();
        match self.queue.try_send(answer) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => return Err(ReadError::Overloaded),
            Err(mpsc::error::TrySendError::Closed(_)) => return Err(ReadError::Stopped),
        }
        match tokio::time::timeout(deadline, waiter).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(ReadError::Stopped),
            Err(_) => Err(ReadError::NoQuorum),
        }
    }
}

async fn round(raft: &MasterRaft) -> Answer {
    let option = LinearizerOption::from(ReadPolicy::ReadIndex).with_wait_timeout(ROUND_TIMEOUT);
    let linearizer = match tokio::time::timeout(ROUND_TIMEOUT * 2, raft.get_read_linearizer(option)).await {
        Ok(Ok(linearizer)) => linearizer,
        Ok(Err(error)) => return Err(classify(error)),
        Err(_) => return Err(ReadError::NoQuorum),
    };
    let index = linearizer.read_log_id().index();
    match linearizer.try_await_ready(raft, Some(ROUND_TIMEOUT)).await {
        Ok(Ok(_)) => Ok(index),
        // Confirmed, but the state is far behind: the caller may try again.
        Ok(Err(_)) => Err(ReadError::Behind),
        Err(_) => Err(ReadError::Stopped),
    }
}

fn classify(error: RaftError<TypeConfig, LinearizableReadError<TypeConfig>>) -> ReadError {
    match error {
        RaftError::APIError(LinearizableReadError::ForwardToLeader(forward)) => {
            let leader: Option<Master> = leader_of(&forward);
            ReadError::NotLeader { leader }
        }
        RaftError::APIError(LinearizableReadError::QuorumNotEnough(_)) => ReadError::NoQuorum,
        RaftError::Fatal(_) => ReadError::Stopped,
    }
}
