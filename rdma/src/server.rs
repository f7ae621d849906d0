//! The end that serves: grants a peer the reading of a slab until it is done with it.

use crate::{
    choice::Endpoint,
    connection::{Grants, NotGranted},
    device::{Device, DeviceError},
    keeper::{Graveyard, Remains},
    pool::Lease,
    queue::{QueuePair, Way},
    reader::Remote,
};
use parking_lot::Mutex;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// What keeps a grant's place: dropped when the peer is done.
type Place = Box<dyn std::any::Any + Send>;

/// A queue pair that answers and what its peer may read at present.
#[derive(Debug)]
pub(crate) struct Answering {
    pair: QueuePair,
    grants: Vec<(Lease, Place)>,
}

impl Answering {
    /// Ends it; the memory goes after the pair. Blocks.
    pub(crate) fn bury(mut self) {
        self.pair.fail();
        if let Err(error) = self.pair.destroy() {
            tracing::warn!(%error, blocks = self.grants.len(), "a queue pair was not destroyed; keeping the memory that its peer may read");
            for (lease, _) in self.grants {
                lease.leak();
            }
        }
    }
}

/// The end that serves. Shared by the two halves of a connection.
#[derive(Debug)]
pub struct Server {
    pair: Option<QueuePair>,
    device: Arc<Device>,
    way: Way,
    /// Short sections, never across an await or a call into the kernel.
    grants: Mutex<Grants<(Lease, Place)>>,
    graveyard: Graveyard,
}

impl Server {
    /// Connects to the peer that offered; gives what it must know. Blocks.
    pub(crate) fn new(
        device: &Arc<Device>,
        way: Way,
        peer: &Endpoint,
        graveyard: Graveyard,
    ) -> Result<(Self, Endpoint), DeviceError> {
        let mut pair = QueuePair::answering(device, way)?;
        let first_packet = crate::random_24_bits();
        pair.connect(peer, first_packet, false)?;
        let endpoint = pair.endpoint(first_packet);
        let server = Self {
            pair: Some(pair),
            device: device.clone(),
            way,
            grants: Mutex::default(),
            graveyard,
        };
        Ok((server, endpoint))
    }

    /// The device that answers.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// For messages.
    pub fn describe(&self) -> String {
        crate::describe(&self.device, &self.way)
    }

    /// The peer may read `lease` as the answer to request `id`, and has to be done `within` a time. `place` is kept as
    /// long.
    pub fn grant(&self, id: u64, lease: Lease, within: Duration, place: Place) -> Remote {
        let remote = Remote {
            address: lease.address(),
            key: lease.remote_key(),
        };
        self.grants
            .lock()
            .grant(id, Instant::now(), within, (lease, place));
        remote
    }

    /// The peer is done with request `id`.
    pub fn done(&self, id: u64) -> Result<(), NotGranted> {
        let memory = self.grants.lock().done(id)?;
        drop(memory);
        Ok(())
    }

    /// Whether request `id` is granted.
    pub fn grants(&self, id: u64) -> bool {
        self.grants.lock().contains(id)
    }

    /// When the peer has to be done with something.
    pub fn deadline(&self) -> Option<Instant> {
        self.grants.lock().deadline()
    }

    /// Blocks that the peer may read at present.
    pub fn granted(&self) -> usize {
        self.grants.lock().len()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let grants = self.grants.lock().take_all();
        if let Some(pair) = self.pair.take() {
            self.graveyard
                .bury(Remains::Answering(Answering { pair, grants }));
        }
    }
}
