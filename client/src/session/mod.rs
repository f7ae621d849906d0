//! The session with the leading master: register, say what is held and how tasks go, take orders; for ever.
//!
//! It runs on a thread of its own with a runtime of its own: nothing that blocks or starves the node's other
//! work (a slow disk, a lock, hashing) delays its heartbeats.
//!
//! Guaranteed:
//! - Every master that is configured, or was named by one, is tried until one takes the node; see [`dialer`].
//! - Each session begins with the registration, then the whole inventory, then every outcome that is kept.
//! - A master that falls silent is left after a few heartbeat intervals.
//! - On shutdown the master is told, so that it waits for no grace.
//!
//! Not guaranteed: that a report arrived. Nothing is acknowledged; the next session says it all again.

mod blobs;
pub mod dialer;
mod link;
mod meter;
mod pump;

pub use blobs::MAX_BLOBS_BYTES;
pub use meter::RoundTrips;
pub use pump::{Facts, PROGRESS_INTERVAL, wire_holding};

use crate::executor::Executor;
use blobs::Blobs;
use dialer::{Dialer, Ended};
use link::{Fixed, LinkEnd};
use mooncake_proto::{hello::HelloConfig, pb::session as pb};
use serde::Serialize;
use std::{
    io,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};
use tokio::{
    sync::{Semaphore, oneshot, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

/// How often an outage that goes on is logged again.
const OUTAGE_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// What the session needs to know.
pub struct SessionConfig {
    /// Not empty; each `host:port`.
    pub masters: Vec<String>,
    /// Opens every connection.
    pub hello: Arc<HelloConfig>,
    /// Id, addresses, labels; the rest is filled in.
    pub register: pb::Register,
    /// Free bytes, for heartbeats; sampled by somebody else.
    pub free_bytes: Arc<AtomicU64>,
}

/// Where the session is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Status {
    /// Looking for the leader.
    Connecting,
    /// A master took the node.
    Registered {
        /// Its id.
        master_id: String,
        /// Where it was dialled.
        address: String,
        /// Its term.
        term: u64,
        /// This node's incarnation, as counted by the masters.
        incarnation: u64,
    },
    /// A master refuses the node; it goes on trying.
    Refused {
        /// Where.
        address: String,
        /// Stable.
        code: String,
        /// For a person.
        message: String,
    },
}

/// The running session.
pub struct Session {
    status: watch::Receiver<Status>,
    round_trips: RoundTrips,
    stop: CancellationToken,
    ended: oneshot::Receiver<()>,
}

impl Session {
    /// Starts the thread. To be called within the node's main runtime.
    pub fn start(config: SessionConfig, facts: Facts, executor: Executor) -> io::Result<Self> {
        let stop = CancellationToken::new();
        let (status_tx, status) = watch::channel(Status::Connecting);
        let (ended_tx, ended) = oneshot::channel();
        let round_trips = RoundTrips::default();
        let fixed = Fixed {
            hello: config.hello,
            round_trips: round_trips.clone(),
            register: config.register,
            facts,
            executor,
            free_bytes: config.free_bytes,
            capacity_bytes: Arc::default(),
            space_turn: Arc::new(Semaphore::new(1)),
            fence_turn: Arc::new(Semaphore::new(1)),
            main: tokio::runtime::Handle::current(),
            stop: stop.clone(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            // Two questions to the disk for a registration, the rest for name look-ups.
            .max_blocking_threads(4)
            .build()?;
        std::thread::Builder::new()
            .name("session".into())
            .spawn(move || {
                runtime.block_on(run(&fixed, config.masters, &status_tx));
                // A name look-up that hangs must not hold up the process's end.
                runtime.shutdown_background();
                drop(ended_tx);
            })?;
        Ok(Self {
            status,
            round_trips,
            stop,
            ended,
        })
    }

    /// How long its heartbeats took.
    pub fn round_trips(&self) -> RoundTrips {
        self.round_trips.clone()
    }

    /// Where it is, now and later.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// Ends when the thread has ended: by [`Session::stop`], or by a fault of this program.
    pub async fn ended(&mut self) {
        let _ = (&mut self.ended).await;
    }

    /// Says goodbye and waits for the thread to end.
    pub async fn stop(mut self) {
        self.stop.cancel();
        self.ended().await;
    }
}

async fn run(fixed: &Fixed, masters: Vec<String>, status: &watch::Sender<Status>) {
    let mut dialer = Dialer::new(masters, rand::random::<u32>() as usize);
    let mut blobs = Blobs::default();
    let mut log = Log::new(fixed.register.node_id.clone());
    loop {
        let (address, pause) = dialer.next(rand::random());
        tokio::select! {
            () = fixed.stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        let mut welcomed = None;
        let end = link::run(fixed, &address, &mut blobs, |welcome| {
            welcomed = Some(Instant::now());
            dialer.registered(&address, &welcome.master_addresses);
            log.registered(&address, welcome);
            status.send_replace(Status::Registered {
                master_id: welcome.master_id.clone(),
                address: address.clone(),
                term: welcome.term,
                incarnation: welcome.incarnation,
            });
        });
        let end = end.await;
        if let Some(at) = welcomed {
            dialer.lasted(at.elapsed());
        }
        match end {
            LinkEnd::Stopped => return,
            LinkEnd::Ended(ended, why) => {
                log.ended(&address, &ended, &why);
                dialer.ended(&ended);
                status.send_if_modified(|s| {
                    let registered = matches!(s, Status::Registered { .. });
                    if registered {
                        *s = Status::Connecting;
                    }
                    registered
                });
            }
            LinkEnd::Refused { code, message } => {
                log.refused(&address, &code, &message);
                dialer.ended(&Ended::Refused);
                status.send_replace(Status::Refused {
                    address: address.clone(),
                    code,
                    message,
                });
            }
        }
    }
}

/// Says each thing once: a node that waits for its masters over night must not fill a disk with it.
struct Log {
    node_id: String,
    registered: bool,
    since: Instant,
    said_at: Instant,
    /// What was said of each address in this outage.
    said: Vec<(String, String)>,
}

/// Addresses remembered by [`Log`].
const MAX_SAID: usize = 64;

impl Log {
    fn new(node_id: String) -> Self {
        let now = Instant::now();
        Self {
            node_id,
            registered: false,
            since: now,
            said_at: now,
            said: Vec::new(),
        }
    }

    fn registered(&mut self, address: &str, welcome: &pb::Welcome) {
        tracing::info!(
            node = %self.node_id, master = %welcome.master_id, %address, term = welcome.term,
            incarnation = welcome.incarnation, after_ms = self.since.elapsed().as_millis() as u64,
            "registered with the leading master"
        );
        self.registered = true;
        self.said.clear();
    }

    /// Whether this is news of this address.
    fn news(&mut self, address: &str, what: &str) -> bool {
        match self.said.iter_mut().find(|(a, _)| a == address) {
            Some((_, said)) if said == what => return false,
            Some((_, said)) => what.clone_into(said),
            None => {
                if self.said.len() == MAX_SAID {
                    self.said.remove(0);
                }
                self.said.push((address.to_owned(), what.to_owned()));
            }
        }
        true
    }

    fn ended(&mut self, address: &str, ended: &Ended, why: &str) {
        if std::mem::take(&mut self.registered) {
            self.since = Instant::now();
            self.said_at = self.since;
            tracing::warn!(node = %self.node_id, %address, "session lost: {why}; looking for the leader");
            return;
        }
        match ended {
            Ended::Redirected(_) | Ended::NoLeader => {
                tracing::debug!(node = %self.node_id, %address, "{why}")
            }
            _ if self.news(address, why) => {
                tracing::info!(node = %self.node_id, %address, "no session with this master: {why}; trying the others and again");
            }
            _ => tracing::debug!(node = %self.node_id, %address, "no session with this master: {why}"),
        }
        if self.said_at.elapsed() >= OUTAGE_LOG_INTERVAL {
            self.said_at = Instant::now();
            tracing::warn!(
                node = %self.node_id, outage_s = self.since.elapsed().as_secs(), %address,
                "no master takes this node, last: {why}; transfers go on meanwhile; check the masters and --masters"
            );
        }
    }

    fn refused(&mut self, address: &str, code: &str, message: &str) {
        if std::mem::take(&mut self.registered) {
            self.since = Instant::now();
        }
        if self.news(address, &format!("{code}: {message}")) {
            let advice = advice(code);
            tracing::error!(node = %self.node_id, %address, %code, "the master refuses this node: {message}{advice}; trying again meanwhile");
        } else {
            tracing::debug!(node = %self.node_id, %address, %code, "refused again");
        }
    }
}

/// What to do about a refusal whose message does not say it (those of the hello do).
fn advice(code: &str) -> &'static str {
    match code {
        "node_id_taken" => {
            "; another client that is alive has this id: stop it, or give one of the two another --node-id"
        }
        "unsupported" => "; upgrade mooncake_client or the masters",
        _ => "",
    }
}
