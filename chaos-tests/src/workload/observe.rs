//! Looks at each master's own word: term, leader, applied index, digest of the state, all of one moment.

use super::Scene;
use crate::history::{History, MasterSeen, Record};
use anyhow::Result;
use mooncake_proto::{
    DEFAULT_CLUSTER_ID,
    hello::{self, HelloConfig, Purpose},
    pb::raft::{ProbeRequest, raft_client::RaftClient},
};
use std::{sync::Arc, time::Duration};
use tokio::{sync::watch, time::MissedTickBehavior};
use tonic::transport::Channel;

/// A frozen master answers nothing.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Every so many looks the digest is asked for: it is linear in the state.
const DIGEST_EVERY: u64 = 4;

/// Who looks.
pub struct Observer {
    masters: Vec<RaftClient<Channel>>,
    history: Arc<History>,
}

/// One look.
pub async fn probe(
    client: &mut RaftClient<Channel>,
    history: &History,
    with_state_digest: bool,
) -> Result<MasterSeen> {
    let ask = client.probe(ProbeRequest {
        with_state_digest,
        ..Default::default()
    });
    let answer = tokio::time::timeout(PROBE_TIMEOUT, ask).await??.into_inner();
    Ok(MasterSeen {
        at_us: history.now_us(),
        id: answer.node_id,
        term: answer.term,
        leader: (answer.leader_id > 0).then_some(answer.leader_id),
        applied_index: answer.applied_index,
        digest: Some(answer.state_digest).filter(|d| !d.is_empty()),
    })
}

impl Observer {
    /// Of the masters of `scene`.
    pub fn new(scene: &Scene, history: Arc<History>) -> Result<Self> {
        let secret = scene.secret()?;
        let hello = Arc::new(HelloConfig {
            cluster_id: DEFAULT_CLUSTER_ID.into(),
            secret,
            // No master has this id.
            node_id: "999".into(),
            instance_id: "observer".into(),
            software: "mooncake-chaos".into(),
            features: 0,
        });
        let client =
            |address: &String| RaftClient::new(hello::channel(address, hello.clone(), Purpose::Raft));
        Ok(Self {
            masters: scene.rpc_addresses.iter().map(client).collect(),
            history,
        })
    }

    /// Every master that answers, with its digest. Recorded.
    pub async fn look(&self, with_state_digest: bool) -> Vec<MasterSeen> {
        let looks = self.masters.iter().map(|client| {
            let mut client = client.clone();
            async move { probe(&mut client, &self.history, with_state_digest).await.ok() }
        });
        let seen: Vec<_> = futures_util::future::join_all(looks)
            .await
            .into_iter()
            .flatten()
            .collect();
        for seen in &seen {
            self.history.record(Record::Master(seen.clone()));
        }
        seen
    }

    pub(super) async fn run(self, every: Duration, mut stop: watch::Receiver<bool>) -> Result<()> {
        let mut tick = tokio::time::interval(every);
        tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
        for look in 0u64.. {
            tokio::select! {
                _ = tick.tick() => {}
                _ = stop.wait_for(|stop| *stop) => break,
            }
            self.look(look % DIGEST_EVERY == 0).await;
        }
        Ok(())
    }
}
