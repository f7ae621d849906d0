//! Connections to the other masters: who is dialled, what is known of them, what is logged about them.
//!
//! Guaranteed: one connection per peer and [`Lane`], whatever the number of clients openraft creates; a peer's
//! state is logged when it changes, not with every failed heartbeat (20 a second).
//!
//! Not guaranteed: that a peer that is not logged as lost answers: a silence below [`QUIET`] is not reported.

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mooncake_proto::hello::{self, HelloConfig, Purpose};
use mooncake_proto::pb::raft as pb;
use mooncake_proto::pb::raft::raft_client::RaftClient;
use mooncake_proto::text::chain_after;
use mooncake_raft_store::{Node, NodeId};
use parking_lot::Mutex;
use tonic::transport::Channel;

use super::considerate::Considerate;

/// Largest Raft message. Appends are cut at [`MAX_APPEND_BYTES`](super::network::MAX_APPEND_BYTES); the rest is
/// room for framing and one entry of the largest size.
pub(crate) const MAX_MESSAGE_BYTES: usize = 4 << 20;
/// How long a peer must fail without a pause before that is worth a log line: heartbeats are late on a busy
/// machine now and then.
const QUIET: Duration = Duration::from_secs(1);
/// A peer that stays lost is mentioned again after this time.
const REMIND: Duration = Duration::from_secs(300);
/// A lane that failed for this long gets a new connection: after a cut the old one may wait for many seconds in
/// TCP's retransmission back-off although the peer answers again.
const REDIAL: Duration = Duration::from_secs(2);

/// Traffic of one kind has a connection of its own, so that a snapshot or a large append never stands in front of
/// a heartbeat; and those that carry much are [`Considerate`], so that they do not on the way there either.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Lane {
    /// Heartbeats, votes, transfer of leadership, probes.
    Control,
    /// Entries.
    Append,
    /// Snapshots.
    Snapshot,
}

struct Connection {
    address: String,
    channel: Channel,
    /// Since when no call was answered in time.
    failing_since: Option<Instant>,
}

#[derive(Default)]
struct Health {
    /// Since when no lane had a success.
    failing_since: Option<Instant>,
    /// What was logged last, and when; `None` while all is well.
    logged: Option<(String, Instant)>,
}

/// The other masters.
pub(crate) struct Peers {
    hello: Arc<HelloConfig>,
    me: NodeId,
    disk_id: String,
    /// Held for a look-up or a line of bookkeeping, never over an await.
    connections: Mutex<HashMap<(NodeId, Lane), Connection>>,
    /// Held as shortly.
    health: Mutex<HashMap<NodeId, Health>>,
}

impl Peers {
    pub(crate) fn new(hello: Arc<HelloConfig>, me: NodeId, disk_id: String) -> Self {
        Self {
            hello,
            me,
            disk_id,
            connections: Mutex::default(),
            health: Mutex::default(),
        }
    }

    /// What every call to `target` carries.
    pub(crate) fn route(&self, target: NodeId, node: &Node) -> pb::Route {
        pb::Route {
            from_id: self.me,
            from_disk_id: self.disk_id.clone(),
            to_id: target,
            to_disk_id: node.disk_id.clone(),
        }
    }

    /// A client on the lane's connection. Lazy: nothing is dialled before the first call.
    pub(crate) fn client(&self, target: NodeId, address: &str, lane: Lane) -> RaftClient<Channel> {
        let mut connections = self.connections.lock();
        let fresh = || {
            let hello = Arc::clone(&self.hello);
            Connection {
                address: address.to_owned(),
                channel: match lane {
                    Lane::Control => hello::channel(address, hello, Purpose::Raft),
                    Lane::Append | Lane::Snapshot => {
                        hello::channel_over(address, hello, Purpose::Raft, Considerate::new)
                    }
                },
                failing_since: None,
            }
        };
        let connection = connections.entry((target, lane)).or_insert_with(fresh);
        let stuck = connection
            .failing_since
            .is_some_and(|since| since.elapsed() > REDIAL);
        if connection.address != address || stuck {
            // The clock starts again: the new connection has its chance before it is replaced.
            *connection = fresh();
        }
        RaftClient::new(connection.channel.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Asks whoever answers at an address who it is, on a connection of its own: nothing is noted about it, and it may
    /// be nobody that is known.
    pub(crate) async fn ask(&self, address: &str, timeout: Duration) -> Result<pb::ProbeResponse, String> {
        self.ask_to_reach(address, timeout, Vec::new()).await
    }

    /// The same, and has it ask in turn at these addresses.
    pub(crate) async fn ask_to_reach(
        &self,
        address: &str,
        timeout: Duration,
        reach_addresses: Vec<String>,
    ) -> Result<pb::ProbeResponse, String> {
        let mut client = RaftClient::new(hello::channel(address, Arc::clone(&self.hello), Purpose::Raft));
        let request = pb::ProbeRequest {
            reach_addresses,
            ..Default::default()
        };
        match tokio::time::timeout(timeout, client.probe(request)).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(describe(&status).0),
            Err(_) => Err(format!("no answer within {} s", timeout.as_secs())),
        }
    }

    /// Notes that a call was answered.
    pub(crate) fn succeeded(&self, target: NodeId, lane: Lane) {
        if let Some(connection) = self.connections.lock().get_mut(&(target, lane)) {
            connection.failing_since = None;
        }
        let mut health = self.health.lock();
        let health = health.entry(target).or_default();
        let since = health.failing_since.take();
        if health.logged.take().is_some() {
            let lost_ms = since.map_or(0, |since| since.elapsed().as_millis() as u64);
            tracing::info!(peer = target, lost_ms, "master {target} answers again");
        }
    }

    /// Notes that an answer is late: if none comes, the lane is in trouble from here on.
    pub(crate) fn late(&self, target: NodeId, lane: Lane) {
        if let Some(connection) = self.connections.lock().get_mut(&(target, lane)) {
            connection.failing_since.get_or_insert_with(Instant::now);
        }
        let mut health = self.health.lock();
        let health = health.entry(target).or_default();
        health.failing_since.get_or_insert_with(Instant::now);
    }

    /// Notes that a call failed. `refused`: the peer is there and wants nothing to do with us, which a person has to
    /// look at; that is logged at once.
    pub(crate) fn failed(&self, target: NodeId, address: &str, lane: Lane, refused: bool, error: &str) {
        self.late(target, lane);
        let mut health = self.health.lock();
        let health = health.entry(target).or_default();
        let quiet = health.failing_since.get_or_insert_with(Instant::now).elapsed() < QUIET;
        let say = match &health.logged {
            None => refused || !quiet,
            Some((text, at)) => at.elapsed() > REMIND || (refused && text != error),
        };
        if say {
            health.logged = Some((error.to_owned(), Instant::now()));
            if refused {
                tracing::error!(
                    peer = target,
                    address,
                    error,
                    "master {target} at {address} refuses this master"
                );
            } else {
                tracing::warn!(
                    peer = target,
                    address,
                    error,
                    "master {target} at {address} does not answer"
                );
            }
        }
    }
}

/// What went wrong with a call, in one line, and whether it was a refusal.
pub(crate) fn describe(status: &tonic::Status) -> (String, bool) {
    use tonic::Code;
    let hello_refused = {
        let mut source: Option<&(dyn Error + 'static)> = status.source();
        let mut found = false;
        while let Some(error) = source {
            let io = error.downcast_ref::<std::io::Error>();
            found |= io.is_some_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied);
            found |= matches!(error.downcast_ref(), Some(hello::HelloError::Refused { .. }));
            source = error.source();
        }
        found
    };
    let refused = hello_refused
        || matches!(
            status.code(),
            Code::FailedPrecondition | Code::PermissionDenied | Code::Unimplemented
        );
    let mut text = chain_after(status.message(), status.source());
    if text.is_empty() {
        text = status.code().to_string();
    }
    (text, refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_told_from_silence() {
        assert!(describe(&tonic::Status::failed_precondition("another disk")).1);
        assert!(!describe(&tonic::Status::unavailable("gone")).1);
        let refusal = hello::HelloError::Refused {
            code: "wrong_secret".into(),
            message: "compare them".into(),
        };
        let status = tonic::Status::from_error(Box::new(std::io::Error::from(refusal)));
        let (text, refused) = describe(&status);
        assert!(refused, "{status:?}");
        assert!(text.contains("compare them"), "{text}");
    }
}
