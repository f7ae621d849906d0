//! A node that speaks the session protocol and moves no bytes.

use anyhow::{Context as _, Result, bail};
use mooncake_proto::{
    hello::{HelloConfig, Purpose, channel},
    pb::session::{
        self as pb, master_frame::Body as Down, node_frame::Body as Up,
        node_session_client::NodeSessionClient,
    },
};
use std::{collections::HashMap, sync::Arc};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;

use super::cluster::PATIENCE;

/// What the node does with its orders.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// Everything succeeds.
    Works,
    /// Downloads report half of the bytes and go no further until told to finish.
    Dawdles,
    /// Downloads fail for good.
    Fails,
}

pub struct FakeNode {
    pub id: String,
    frames: mpsc::Sender<pb::NodeFrame>,
    /// What came from the master, as names.
    pub log: watch::Receiver<Vec<String>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for FakeNode {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// How a master answered a registration.
#[derive(Debug)]
pub enum Opened {
    Welcome(pb::Welcome),
    Redirect(String),
    Refused(pb::Refused),
}

pub struct Stream {
    frames: mpsc::Sender<pb::NodeFrame>,
    inbound: tonic::Streaming<pb::MasterFrame>,
}

pub fn register(id: &str, store_id: &str) -> pb::Register {
    pb::Register {
        node_id: id.into(),
        store_id: store_id.into(),
        data_address: id.into(),
        transports: vec!["tcp".into()],
        version: "test".into(),
        capacity_bytes: 1 << 40,
        free_bytes: 1 << 40,
        ..Default::default()
    }
}

/// Opens a session and gives the first answer.
pub async fn open(master: &str, hello_id: &str, register: pb::Register) -> Result<(Opened, Stream)> {
    let hello = HelloConfig {
        cluster_id: "api-tests".into(),
        secret: None,
        node_id: hello_id.into(),
        instance_id: register.store_id.clone(),
        software: "fake node".into(),
        features: 0,
    };
    let mut client = NodeSessionClient::new(channel(master, Arc::new(hello), Purpose::Session));
    let (frames, queue) = mpsc::channel(64);
    frames
        .send(pb::NodeFrame {
            body: Some(Up::Register(register)),
        })
        .await?;
    let opened = tokio::time::timeout(PATIENCE, client.open(ReceiverStream::new(queue)));
    let mut inbound = opened.await.context("the session does not open")??.into_inner();
    loop {
        let frame = tokio::time::timeout(PATIENCE, inbound.message())
            .await
            .context("no answer to Register")??;
        let opened = match frame.and_then(|f| f.body) {
            Some(Down::Welcome(welcome)) => Opened::Welcome(welcome),
            Some(Down::Redirect(redirect)) => Opened::Redirect(redirect.leader_address),
            Some(Down::Refused(refused)) => Opened::Refused(refused),
            Some(Down::Heartbeat(_)) => continue,
            other => bail!("the first frame is {other:?}"),
        };
        return Ok((opened, Stream { frames, inbound }));
    }
}

impl FakeNode {
    /// Registers with `master`, which must lead, and obeys orders in its manner.
    pub async fn start(master: &str, id: &str, manner: Manner) -> Result<Self> {
        Self::start_as(master, register(id, &format!("store-{id}")), manner).await
    }

    /// The same, with more to say of itself.
    pub async fn start_as(master: &str, register: pb::Register, manner: Manner) -> Result<Self> {
        let id = &register.node_id.clone();
        let (opened, stream) = open(master, id, register).await?;
        let Opened::Welcome(_) = opened else {
            bail!("{id} is not welcome: {opened:?}")
        };
        let complete = pb::Holdings {
            holdings: Vec::new(),
            inventory_complete: true,
        };
        stream
            .frames
            .send(pb::NodeFrame {
                body: Some(Up::Holdings(complete)),
            })
            .await?;
        let (log_tx, log) = watch::channel(Vec::new());
        let frames = stream.frames.clone();
        let actor = Actor {
            id: id.to_owned(),
            manner,
            log: log_tx,
            stream,
            blobs: HashMap::new(),
            running: HashMap::new(),
        };
        let task = tokio::spawn(async move {
            // The end of the stream is the end of the node.
            let _ = actor.run().await;
        });
        Ok(Self {
            id: id.to_owned(),
            frames,
            log,
            task,
        })
    }

    pub async fn send(&self, body: Up) -> Result<()> {
        self.frames
            .send(pb::NodeFrame { body: Some(body) })
            .await
            .context("the session is gone")
    }

    /// Waits until the master has sent this.
    pub async fn got(&self, what: &str) -> Result<()> {
        let mut log = self.log.clone();
        let waited = log.wait_for(|log| log.iter().any(|l| l.starts_with(what)));
        let found = tokio::time::timeout(PATIENCE, waited).await.map(|r| r.is_ok());
        match found {
            Ok(true) => Ok(()),
            _ => bail!("{} did not get {what:?}, but {:?}", self.id, *self.log.borrow()),
        }
    }
}

struct Actor {
    id: String,
    manner: Manner,
    log: watch::Sender<Vec<String>>,
    stream: Stream,
    blobs: HashMap<Vec<u8>, Vec<u8>>,
    /// Order by model.
    running: HashMap<String, pb::TaskReport>,
}

/// What a digest list of this artifact would give: any 32 bytes will do.
pub fn seal() -> pb::Seal {
    pb::Seal {
        block_size_bytes: 256 << 10,
        algorithm: pb::DigestAlgorithm::Blake3 as i32,
        root: vec![7; 32].into(),
    }
}

impl Actor {
    async fn run(mut self) -> Result<()> {
        while let Some(frame) = self.stream.inbound.message().await? {
            match frame.body {
                Some(Down::BlobPart(part)) => {
                    let blob = self.blobs.entry(part.digest.to_vec()).or_default();
                    blob.extend_from_slice(&part.data);
                    self.note(format!("blob {}/{}", part.index + 1, part.count));
                }
                Some(Down::Order(order)) => self.obey(order).await?,
                Some(Down::Heartbeat(beat)) if beat.answers != 0 => {
                    self.note(format!("heartbeat {} answered", beat.answers));
                }
                Some(Down::Redirect(redirect)) => {
                    self.note(format!("redirect {}", redirect.leader_address));
                    return Ok(());
                }
                Some(Down::Refused(refused)) => {
                    self.note(format!("refused {}", refused.code));
                    return Ok(());
                }
                _ => {}
            }
        }
        self.note("closed".into());
        Ok(())
    }

    fn note(&self, what: String) {
        self.log.send_modify(|log| log.push(what));
    }

    async fn obey(&mut self, order: pb::Order) -> Result<()> {
        use pb::order::Body;
        let model = order.model.clone().context("an order without a model")?;
        let mut report = pb::TaskReport {
            model: order.model.clone(),
            generation: order.generation,
            fence: order.fence,
            ..Default::default()
        };
        match order.body.context("an order without a body")? {
            Body::Acquire(acquire) => {
                // The blobs must have come before.
                let manifest = self
                    .blobs
                    .get(&acquire.manifest_digest.to_vec())
                    .context("no manifest")?;
                let manifest = mooncake_proto::manifest::Manifest::decode(manifest)?;
                anyhow::ensure!(
                    self.blobs.contains_key(&acquire.sources_digest.to_vec()),
                    "no sources"
                );
                self.note(format!(
                    "acquire {} {}",
                    model.model_id, manifest.total_size_bytes
                ));
                report.kind = pb::TaskKind::Acquire as i32;
                report.verified_bytes = manifest.total_size_bytes / 2;
                report.objects_done = manifest.object_count() / 2;
                self.report(pb::TaskOutcome::Running, &report).await?;
                report.verified_bytes = manifest.total_size_bytes;
                self.running.insert(model.model_id, report.clone());
                match self.manner {
                    Manner::Works => self.report(pb::TaskOutcome::Acquired, &report).await?,
                    Manner::Dawdles => {}
                    Manner::Fails => {
                        report.failure = Some(pb::Failure {
                            code: "checksum_mismatch".into(),
                            message: "model.bin has another checksum than declared".into(),
                            retryable: false,
                        });
                        self.report(pb::TaskOutcome::Failed, &report).await?;
                    }
                }
            }
            Body::Replicate(replicate) => {
                let manifest = self
                    .blobs
                    .get(&replicate.manifest_digest.to_vec())
                    .context("no manifest")?;
                let manifest = mooncake_proto::manifest::Manifest::decode(manifest)?;
                self.note(format!(
                    "replicate {} {}",
                    model.model_id,
                    replicate.seal.is_some()
                ));
                report.kind = pb::TaskKind::Replicate as i32;
                report.verified_bytes = manifest.total_size_bytes;
                self.running.insert(model.model_id, report.clone());
                if replicate.seal.is_some() {
                    self.stage(report).await?;
                }
            }
            Body::Sealed(_) => {
                self.note(format!("sealed {}", model.model_id));
                if let Some(report) = self.running.get(&model.model_id).cloned() {
                    self.stage(report).await?;
                }
            }
            Body::Revoke(_) => {
                self.running.remove(&model.model_id);
                self.note(format!("revoke {}", model.model_id));
            }
            Body::PeersChanged(_) => self.note(format!("peers {}", model.model_id)),
            Body::Delete(_) => self.note(format!("delete {}", model.model_id)),
        }
        Ok(())
    }

    async fn stage(&self, mut report: pb::TaskReport) -> Result<()> {
        report.local_path = format!("/models/{}", self.id);
        report.checksum_verified = true;
        self.report(pb::TaskOutcome::Staged, &report).await
    }

    async fn report(&self, outcome: pb::TaskOutcome, report: &pb::TaskReport) -> Result<()> {
        let proven = matches!(outcome, pb::TaskOutcome::Acquired | pb::TaskOutcome::Staged);
        let report = pb::TaskReport {
            outcome: outcome as i32,
            seal: proven.then(seal),
            ..report.clone()
        };
        let batch = pb::ReportBatch {
            reports: vec![report],
        };
        self.stream
            .frames
            .send(pb::NodeFrame {
                body: Some(Up::Reports(batch)),
            })
            .await?;
        Ok(())
    }
}
