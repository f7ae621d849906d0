//! Which links are open, and how they come about.

use super::{Claim, Link};
use crate::transport::{ConnectError, Connection, PeerAddress, Transport, buffer::BufferPool};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};
use tokio::sync::Semaphore;

/// Most connections that this node dials, to all peers: one per peer of each fetch, shared by fetches. Further lanes are
/// opened while less than half of it is in use.
const MAX_LINKS: usize = 1024;

type Slot = Arc<tokio::sync::Mutex<Weak<Link>>>;

/// The open links of this node.
pub(in crate::swarm) struct Links {
    /// Preferred first; the last one (TCP) always works.
    transports: Vec<Arc<dyn Transport>>,
    buffers: Arc<BufferPool>,
    /// By node id and address. The outer lock is held for the look-up only, a slot's lock across a dial, so
    /// that fetches that want the same peer share it.
    slots: Mutex<HashMap<(String, String), Slot>>,
    open: Arc<Semaphore>,
}

impl Links {
    pub(in crate::swarm) fn new(transports: Vec<Arc<dyn Transport>>, buffers: Arc<BufferPool>) -> Self {
        Self {
            transports,
            buffers,
            slots: Mutex::default(),
            open: Arc::new(Semaphore::new(MAX_LINKS)),
        }
    }

    /// The link to a peer, dialled if there is none.
    pub(in crate::swarm) async fn get(&self, peer: &PeerAddress) -> Result<Arc<Link>, ConnectError> {
        let slot = {
            let mut slots = self.slots.lock();
            // Forget slots that nobody uses, so that the map does not grow with every peer ever seen.
            slots.retain(|_, s| Arc::strong_count(s) > 1 || s.try_lock().is_ok_and(|l| l.strong_count() > 0));
            slots
                .entry((peer.node_id.clone(), peer.data_address.clone()))
                .or_default()
                .clone()
        };
        let mut slot = slot.lock().await;
        if let Some(link) = slot.upgrade().filter(|l| l.alive()) {
            return Ok(link);
        }
        let permit = self
            .open
            .clone()
            .try_acquire_owned()
            .map_err(|_| ConnectError::TooMany { limit: MAX_LINKS })?;
        let (connection, lanes) = self.dial(peer).await?;
        let link = Link::start(connection, lanes, permit);
        *slot = Arc::downgrade(&link);
        Ok(link)
    }

    /// Opens one more lane, if that is possible: not having one is no failure.
    pub(in crate::swarm) async fn widen(&self, peer: &PeerAddress, claim: Claim) {
        let shared = claim.shared.clone();
        let by_name = self.transports.iter().find(|t| t.name() == shared.transport);
        let permit = match self.open.available_permits() > MAX_LINKS / 2 {
            true => self.open.clone().try_acquire_owned().ok(),
            false => None,
        };
        let (Some(transport), Some(permit)) = (by_name, permit) else {
            return;
        };
        let dialled = tokio::select! {
            () = shared.stop.cancelled() => return,
            dialled = transport.connect(peer, self.buffers.clone()) => dialled,
        };
        match dialled {
            Ok(connection) if claim.fits(&connection) => claim.open(connection, permit),
            Ok(_) => {
                tracing::debug!(node = %peer.node_id, "a further data connection leads to another process")
            }
            Err(error) => tracing::debug!(node = %peer.node_id, %error, "no further data connection"),
        }
    }

    /// A connection, and how many lanes a link of its kind has at most.
    async fn dial(&self, peer: &PeerAddress) -> Result<(Connection, usize), ConnectError> {
        let (last, preferred) = self.transports.split_last().expect("TCP is always there");
        for transport in preferred {
            if !peer.transports.iter().any(|t| t == transport.name()) {
                continue;
            }
            match transport.connect(peer, self.buffers.clone()).await {
                Ok(connection) => return Ok((connection, transport.lanes())),
                Err(error) => tracing::warn!(
                    node = %peer.node_id, transport = transport.name(), %error,
                    "falling back to {}", last.name()
                ),
            }
        }
        let connection = last.connect(peer, self.buffers.clone()).await?;
        Ok((connection, last.lanes()))
    }
}
