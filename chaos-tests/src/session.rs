//! The node's end of a session, without a node: frames go out and come in as a test or a benchmark wants them.

use anyhow::{Context, Result, bail};
use mooncake_proto::{
    DEFAULT_CLUSTER_ID,
    hello::{HelloConfig, Purpose, Secret, channel},
    pb::session::{
        self as pb, master_frame::Body as Down, node_frame::Body as Up,
        node_session_client::NodeSessionClient,
    },
};
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Frames that wait for the connection.
const QUEUE: usize = 64;

/// One session over a connection of its own. Its end is the node's silence.
pub struct NodeSession {
    /// What the master said to the registration.
    pub welcome: pb::Welcome,
    frames: mpsc::Sender<pb::NodeFrame>,
    inbound: tonic::Streaming<pb::MasterFrame>,
}

impl NodeSession {
    /// Registers with a master, which must lead, and says that nothing is held.
    pub async fn join(master: &str, id: &str) -> Result<Self> {
        Self::join_with(master, id, None).await
    }

    /// The same in a cluster that has a secret.
    pub async fn join_with(master: &str, id: &str, secret: Option<Secret>) -> Result<Self> {
        let hello = HelloConfig {
            cluster_id: DEFAULT_CLUSTER_ID.into(),
            secret,
            node_id: id.into(),
            instance_id: "store".into(),
            software: "session without a node".into(),
            features: 0,
        };
        let mut client = NodeSessionClient::new(channel(master, Arc::new(hello), Purpose::Session));
        let (frames, queue) = mpsc::channel(QUEUE);
        let register = pb::Register {
            node_id: id.into(),
            store_id: "store".into(),
            data_address: id.into(),
            transports: vec!["tcp".into()],
            version: "test".into(),
            capacity_bytes: 1 << 40,
            free_bytes: 1 << 40,
            ..Default::default()
        };
        frames.send(frame(Up::Register(register))).await?;
        let mut inbound = client.open(ReceiverStream::new(queue)).await?.into_inner();
        let welcome = loop {
            match inbound.message().await?.and_then(|f| f.body) {
                Some(Down::Welcome(welcome)) => break welcome,
                Some(Down::Heartbeat(_)) => {}
                other => bail!("{id} is not welcome: {other:?}"),
            }
        };
        let session = Self {
            welcome,
            frames,
            inbound,
        };
        let nothing = pb::Holdings {
            holdings: Vec::new(),
            inventory_complete: true,
        };
        session.send(Up::Holdings(nothing)).await?;
        Ok(session)
    }

    /// What the master says next. Loses nothing when it is dropped.
    pub async fn next(&mut self) -> Result<Down> {
        let frame = self.inbound.message().await?.context("the session ended")?;
        frame.body.context("a frame without a body")
    }

    /// Reports that the attempt of this order to download failed, for now.
    pub async fn fail(&self, order: &pb::Order) -> Result<()> {
        let report = pb::TaskReport {
            model: order.model.clone(),
            generation: order.generation,
            fence: order.fence,
            kind: pb::TaskKind::Acquire as i32,
            outcome: pb::TaskOutcome::Failed as i32,
            failure: Some(pb::Failure {
                code: "source_unreachable".into(),
                message: "the source does not answer".into(),
                retryable: true,
            }),
            ..Default::default()
        };
        let reports = vec![report];
        self.send(Up::Reports(pb::ReportBatch { reports })).await
    }

    /// Says it.
    pub async fn send(&self, body: Up) -> Result<()> {
        let sent = self.frames.send(frame(body)).await;
        sent.ok().context("the session ended")
    }
}

fn frame(body: Up) -> pb::NodeFrame {
    pb::NodeFrame { body: Some(body) }
}
