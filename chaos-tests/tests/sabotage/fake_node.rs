//! A node that speaks the session protocol, moves no bytes, and reports what it is told to.

use anyhow::{Context, Result};
use mooncake_chaos::session::NodeSession;
use mooncake_proto::pb::session::{self as pb, master_frame::Body as Down};
use std::time::Duration;

pub struct FakeNode {
    pub id: String,
    session: NodeSession,
}

impl FakeNode {
    /// Registers with a master, which must lead.
    pub async fn join(master: &str, id: &str) -> Result<Self> {
        Ok(Self {
            id: id.to_owned(),
            session: NodeSession::join(master, id).await?,
        })
    }

    /// The next order to download.
    pub async fn ordered(&mut self, patience: Duration) -> Result<pb::Order> {
        let next = async {
            loop {
                if let Down::Order(order) = self.session.next().await?
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
        self.session.fail(order).await
    }
}
