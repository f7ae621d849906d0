//! A node's RDMA: its devices, its two pools, and the making of connections.

use crate::{
    choice::{Endpoint, Gid, Mtu, best_fit},
    device::{Device, DeviceError},
    keeper::{self, Graveyard},
    pool::Pool,
    preflight::{Report, UsableWay},
    queue::Way,
    reader::Offer,
    server::Server,
    slab::Purpose,
};
use parking_lot::Mutex;
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

/// What a person may set.
#[derive(Clone, Debug)]
pub struct Config {
    /// Names of the devices to use; empty: all.
    pub devices: Vec<String>,
    /// Only this port of each.
    pub port: Option<u8>,
    /// Only this entry of the GID tables.
    pub gid_index: Option<u32>,
    /// At most this path MTU.
    pub mtu: Option<Mtu>,
    /// Of the packets.
    pub traffic_class: u8,
    /// Most bytes of registered memory, half of them to serve from and half to receive into.
    pub memory_bytes: usize,
    /// Blocks under way on one connection.
    pub depth: u32,
    /// How long to look for completions before sleeping until one comes.
    pub spin: Duration,
}

impl Config {
    /// Whether the device of this name is to be used.
    pub fn wants(&self, device: &str) -> bool {
        self.devices.is_empty() || self.devices.iter().any(|d| d == device)
    }
}

/// Why there is no connection by RDMA.
#[derive(Debug, thiserror::Error)]
pub enum SetUpError {
    /// Nothing is usable now.
    #[error("no RDMA device is usable: {0}")]
    Nothing(String),
    /// The peer's address fits none of this node's.
    #[error("no RDMA port of this node is on the network of the peer's {0:?}")]
    NoMatch(Gid),
    /// The peer's numbers make no sense.
    #[error("the peer offers {0}")]
    Peer(String),
    /// The device would not.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

type OpenWay = (Arc<Device>, UsableWay);

/// See the module.
pub struct Rdma {
    config: Config,
    serving: Arc<Pool>,
    receiving: Arc<Pool>,
    /// Short sections.
    state: Mutex<(Vec<OpenWay>, Arc<Report>)>,
    /// Which way the next connection takes: in turn.
    next: AtomicUsize,
    graveyard: Graveyard,
}

impl std::fmt::Debug for Rdma {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rdma")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl Rdma {
    /// Looks at the devices, once before this returns unless a driver takes longer than [`keeper::FIRST_LOOK_TIMEOUT`], and
    /// follows them from then on. That there is none is not an error: one may come. Blocks.
    pub fn start(config: Config) -> std::io::Result<Arc<Self>> {
        let (graveyard, inbox) = keeper::channel();
        let half = config.memory_bytes / 2;
        let rdma = Arc::new(Self {
            serving: Pool::new(Purpose::Serve, half),
            receiving: Pool::new(Purpose::Receive, half),
            state: Mutex::default(),
            next: AtomicUsize::new(0),
            config,
            graveyard,
        });
        if !keeper::start(&rdma, inbox)? {
            rdma.not_looked_at(keeper::FIRST_LOOK_TIMEOUT);
        }
        Ok(rdma)
    }

    /// As given.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// How things were at the last look.
    pub fn report(&self) -> Arc<Report> {
        self.state.lock().1.clone()
    }

    /// Memory that peers read.
    pub fn serving(&self) -> &Arc<Pool> {
        &self.serving
    }

    /// Memory that is read into.
    pub fn receiving(&self) -> &Arc<Pool> {
        &self.receiving
    }

    /// Most bytes that one peer may have granted at a time: a quarter of what is served from, so that a few that are slow
    /// do not hold up the others; but one of the largest blocks.
    pub fn granted_bytes_per_peer(&self) -> usize {
        (self.serving.max_bytes() / 4).max(crate::pool::MAX_SLAB_BYTES)
    }

    fn ways(&self) -> Result<Vec<OpenWay>, SetUpError> {
        let state = self.state.lock();
        let alive = state.0.iter().filter(|(d, _)| !d.gone().is_cancelled());
        let ways: Vec<_> = alive.cloned().collect();
        match ways.is_empty() {
            true => Err(SetUpError::Nothing(state.1.to_string())),
            false => Ok(ways),
        }
    }

    /// One end of a new connection, to be offered to a peer; ports take turns. Blocks; must be called in a runtime.
    pub fn offer(&self) -> Result<Offer, SetUpError> {
        let ways = self.ways()?;
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        let (device, way) = &ways[turn % ways.len()];
        let limits = (self.config.depth, way.largest_message);
        let graveyard = self.graveyard.clone();
        Ok(Offer::new(
            device,
            self.way(way, way.gid),
            limits,
            self.config.spin,
            graveyard,
        )?)
    }

    /// The other end of what a peer offered, and what it must know. Blocks.
    pub fn answer(&self, offer: &Endpoint) -> Result<(Server, Endpoint), SetUpError> {
        offer.check().map_err(SetUpError::Peer)?;
        let ways = self.ways()?;
        // Beginning where the last one did not, so that ports which fit equally well take turns.
        let turn = self.next.fetch_add(1, Ordering::Relaxed) % ways.len();
        let in_turn = ways[turn..].iter().chain(&ways[..turn]);
        let best = best_fit(in_turn.map(|w| (w, &w.1.gids[..])), &offer.gid);
        let ((device, way), gid) = best.ok_or(SetUpError::NoMatch(offer.gid))?;
        Ok(Server::new(
            device,
            self.way(way, gid),
            offer,
            self.graveyard.clone(),
        )?)
    }

    fn way(&self, way: &UsableWay, gid: Gid) -> Way {
        Way {
            port: way.port,
            gid,
            lid: way.lid,
            mtu: way.mtu,
            traffic_class: self.config.traffic_class,
        }
    }

    /// Says so, unless the look has ended meanwhile.
    fn not_looked_at(&self, waited: Duration) {
        let mut state = self.state.lock();
        if *state.1 == Report::default() {
            state.1 = Arc::new(Report::unanswered(waited));
        }
    }

    pub(crate) fn set_ways(&self, ways: Vec<OpenWay>, report: Report) {
        *self.state.lock() = (ways, Arc::new(report));
    }

    pub(crate) fn forget(&self, device: &Arc<Device>) {
        self.state.lock().0.retain(|(d, _)| !Arc::ptr_eq(d, device));
        self.serving.forget(device);
        self.receiving.forget(device);
    }

    pub(crate) fn forget_idle(&self) {
        self.serving.forget_idle();
        self.receiving.forget_idle();
    }

    /// Slabs ever lent, and whether none is now.
    pub(crate) fn lent(&self) -> (u64, bool) {
        let (a, b) = (self.serving.lent(), self.receiving.lent());
        (a.0 + b.0, a.1 && b.1)
    }
}
