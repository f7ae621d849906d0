//! A node that speaks the session protocol, moves no bytes, and reports what it is told to.

use anyhow::{Context, Result, bail};
use mooncake_proto::{
    DEFAULT_CLUSTER_ID,
    hello::{HelloConfig, Purpose, channel},
    pb::session::{
        self as pb, master_frame::Body as Down, node_frame::Body as Up,
        node_session_client::NodeSessionClient,
    },
};
use std::{sync::Arc, time::Duration};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

pub struct FakeNode {
    pub id: String,
    frames: mpsc::Sender<pb::NodeFrame>,
    inbound: tonic::Streaming<pb::MasterFrame>,
}

impl FakeNode {
    /// Registers with a master, which must lead.
    pub async fn join(master: &str, id: &str) -> Result<Self> {
        let hello = HelloConfig {
            cluster_id: DEFAULT_CLUSTER_ID.into(),
            secret: None,
            node_id: id.into(),
            instance_id: "store".into(),
            software: "fake node".into(),
            features: 0,
        };
        let mut client = NodeSessionClient::new(channel(master, Arc::new(hello), Purpose::Session));
        let (frames, queue) = mpsc::channel(64);
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
        let mut node = Self {
            id: id.to_owned(),
            inbound: {
                frames.send(frame(Up::Register(register))).await?;
                client.open(ReceiverStream::new(queue)).await?.into_inner()
            },
            frames,
        };
        loop {
            match node.inbound.message().await?.and_then(|f| f.body) {
                Some(Down::Welcome(_)) => break,
                Some(Down::Heartbeat(_)) => {}
                other => bail!("{id} is not welcome: {other:?}"),
            }
        }
        let nothing = pb::Holdings {
            holdings: Vec::new(),
            inventory_complete: true,
        };
        node.frames.send(frame(Up::Holdings(nothing))).await?;
        Ok(node)
    }

    /// The next order to download.
    pub async fn ordered(&mut self, patience: Duration) -> Result<pb::Order> {
        let next = async {
            loop {
                let frame = self.inbound.message().await?.context("the session ended")?;
                if let Some(Down::Order(order)) = frame.body
                    && matches!(order.body, Some(pb::order::Body::Acquire(_)))
                {
                    return Ok(order);
                }
            }
        };
        tokio::time::timeout(patience, next)
            .await
            .context("no order came")?
    }

    /// Reports that this order failed, for now.
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
        self.frames
            .send(frame(Up::Reports(pb::ReportBatch { reports })))
            .await?;
        Ok(())
    }
}

fn frame(body: Up) -> pb::NodeFrame {
    pb::NodeFrame { body: Some(body) }
}
