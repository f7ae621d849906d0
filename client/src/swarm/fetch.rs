//! One artifact on its way to this node: the loop that feeds the chooser with what peers say and does what it
//! picks. A single task owns the state; links, dials and writers report to it, and it never waits for any of
//! them alone.

mod contacts;

use super::{
    BUDGET_UNIT_BYTES, Inner,
    bits::Bits,
    chooser::{Chooser, Decline, hash_id},
    link::{Event, Link},
    repair::ListState,
    words::{Change, PeerIndex, Words},
};
use crate::{
    store::{Artifact, WriteError},
    task::{TaskFailure, TransferCounters, quiet},
    transport::{ConnectError, PeerAddress, RDMA, buffer::BlockBuffer},
};
use contacts::Listed;
use futures_util::future::BoxFuture;
use mooncake_proto::{digest::Digest, manifest::Seal};
use std::{
    collections::{BTreeMap, HashMap},
    io,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    sync::{OwnedSemaphorePermit, mpsc, watch},
    task::JoinSet,
    time::MissedTickBehavior,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Events that wait for the loop before the links have to: what a peer says may be 295 KB at a time (blocks are
/// in the buffer budget beside), and a loop that is woken takes all of them at once.
const EVENT_QUEUE: usize = 64;
/// How often stalls, retries and deferred blocks are looked at while something is missing.
const TICK: Duration = Duration::from_millis(50);
/// How often a fetch that gets nowhere says so in the log.
pub const REPORT_EVERY: Duration = Duration::from_secs(30);

/// A peer that sent what it should not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadSource {
    /// Its node id.
    pub node_id: String,
    /// For a person.
    pub reason: String,
}

/// Who is told of bad peers, as they are found. Must not block.
pub type BadSources = Arc<dyn Fn(BadSource) + Send + Sync>;

/// One connection to one peer, while it lasts.
pub(super) struct Session {
    pub(super) node_id: String,
    pub(super) seed: bool,
    pub(super) link: Arc<Link>,
    pub(super) subscription: u32,
    /// What was asked for: the request's id, and the digest that the peer had announced.
    requests: HashMap<u32, (u64, Digest)>,
    /// The root over the peer's own list, once it is whole.
    pub(super) own_root: Option<Digest>,
}

/// What a task of the fetch brings back.
pub(super) enum Done {
    Dialled {
        address: PeerAddress,
        link: Result<Arc<Link>, ConnectError>,
    },
    Written {
        peer: PeerIndex,
        block: u32,
        result: Result<(), WriteError>,
    },
    OwnRoot(Option<Seal>),
    Forgot {
        blocks: Vec<u32>,
        result: io::Result<()>,
    },
    ListChecked {
        peer: PeerIndex,
        list: Vec<Digest>,
        root: Digest,
    },
}

/// The state of one fetch.
pub(super) struct Fetch {
    pub(super) swarm: Arc<Inner>,
    pub(super) artifact: Arc<Artifact>,
    counters: Arc<TransferCounters>,
    bad_sources: BadSources,
    pub(super) chooser: Chooser,
    pub(super) words: Words,
    pub(super) sessions: BTreeMap<PeerIndex, Session>,
    listed: BTreeMap<String, Listed>,
    next_peer: PeerIndex,
    events: mpsc::Sender<Event>,
    /// Blocks that were taken before in this fetch, whatever became of them.
    taken: Bits,
    /// Position in [`Artifact::added`].
    seen: usize,
    pub(super) tasks: JoinSet<Done>,
    /// Blocking work that has begun, and goes on when its task is stopped.
    pub(super) on_disk: TaskTracker,
    pub(super) writing: usize,
    pub(super) list: ListState,
    pub(super) seal: Option<Seal>,
    started: Instant,
    last_progress: Instant,
    /// Bytes that were asked for and have not been waited for at the node's limit yet; below zero after some that were
    /// waited for and then declined.
    owed: i64,
}

impl Fetch {
    pub(super) fn new(
        swarm: Arc<Inner>,
        artifact: Arc<Artifact>,
        counters: Arc<TransferCounters>,
        bad_sources: BadSources,
    ) -> Self {
        let blocks = artifact.blocks().len();
        let chooser = Chooser::new(
            hash_id(&swarm.hello.node_id),
            blocks,
            artifact.blocks().block_size(),
        );
        Self {
            swarm,
            artifact,
            counters,
            bad_sources,
            chooser,
            words: Words::new(blocks),
            sessions: BTreeMap::new(),
            listed: BTreeMap::new(),
            next_peer: 0,
            // Replaced in `run`, which keeps the other end.
            events: mpsc::channel(1).0,
            taken: Bits::new(blocks),
            seen: 0,
            tasks: JoinSet::new(),
            on_disk: TaskTracker::new(),
            writing: 0,
            list: ListState::default(),
            seal: None,
            started: Instant::now(),
            last_progress: Instant::now(),
            owed: 0,
        }
    }

    fn now_us(&self) -> u64 {
        self.started.elapsed().as_micros() as u64
    }

    /// To the end; when it returns, nothing of it touches the artifact any more.
    pub(super) async fn run(
        mut self,
        peers: watch::Receiver<Vec<PeerAddress>>,
        seal: watch::Receiver<Option<Seal>>,
        cancel: CancellationToken,
    ) -> Result<(), TaskFailure> {
        let result = self.work(peers, seal, cancel).await;
        self.tasks.shutdown().await;
        quiet(&self.on_disk, &self.artifact, self.swarm.config.drain_timeout).await;
        result
    }

    async fn work(
        &mut self,
        mut peers: watch::Receiver<Vec<PeerAddress>>,
        mut seal: watch::Receiver<Option<Seal>>,
        cancel: CancellationToken,
    ) -> Result<(), TaskFailure> {
        let (events, mut inbox) = mpsc::channel(EVENT_QUEUE);
        self.events = events;
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut slow_tick = tokio::time::interval(Duration::from_secs(1));
        slow_tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // A permit in hand is what allows the next request.
        let mut permit: Option<OwnedSemaphorePermit> = None;
        let mut waiting: Option<BoxFuture<'static, OwnedSemaphorePermit>> = None;
        // A watch whose sender is gone keeps its last value: nothing changes any more.
        let (mut peers_open, mut seal_open) = (true, true);
        self.list_peers(&peers.borrow_and_update().clone());
        self.take_seal(*seal.borrow_and_update())?;
        let mut ticked = Instant::now();
        loop {
            // Not only when nothing else is to be done: a peer that never stops talking must not keep those that
            // deliver nothing from being noticed.
            if !self.chooser.whole() && ticked.elapsed() >= TICK {
                self.tick();
                ticked = Instant::now();
            }
            self.sync_with_store();
            if self.advance_proof()? {
                return Ok(());
            }
            self.pump(&mut permit, &mut waiting);
            tokio::select! {
                biased;
                () = cancel.cancelled() => return Err(TaskFailure::canceled()),
                changed = peers.changed(), if peers_open => match changed {
                    Ok(()) => self.list_peers(&peers.borrow_and_update().clone()),
                    Err(_) => peers_open = false,
                },
                changed = seal.changed(), if seal_open => match changed {
                    Ok(()) => self.take_seal(*seal.borrow_and_update())?,
                    Err(_) => seal_open = false,
                },
                Some(done) = self.tasks.join_next() => match done {
                    Ok(done) => self.done(done)?,
                    Err(e) => return Err(TaskFailure::retryable("internal_error", format!("a task of the transfer of {} failed: {e}", self.artifact.model()))),
                },
                Some(event) = inbox.recv() => {
                    self.event(event);
                    // What is there already is taken in one go, before new requests are chosen.
                    while let Ok(event) = inbox.try_recv() {
                        self.event(event);
                    }
                }
                got = async { waiting.as_mut().expect("guarded").await }, if waiting.is_some() => {
                    permit = Some(got);
                    waiting = None;
                }
                // Brings the loop round.
                _ = tick.tick(), if !self.chooser.whole() => {}
                _ = slow_tick.tick() => self.slow_tick()?,
            }
        }
    }

    /// Sends requests while there is something to ask for and room in the budget.
    fn pump(
        &mut self,
        permit: &mut Option<OwnedSemaphorePermit>,
        waiting: &mut Option<BoxFuture<'static, OwnedSemaphorePermit>>,
    ) {
        let units = self.artifact.blocks().block_size() / BUDGET_UNIT_BYTES;
        loop {
            if permit.is_none() {
                if waiting.is_some() || self.chooser.missing() == 0 || self.sessions.is_empty() {
                    if self.chooser.missing() == 0 {
                        *waiting = None;
                    }
                    return;
                }
                let budget = self.swarm.budget.clone();
                let download = self.swarm.config.download.clone();
                let owed = match download.is_limited() {
                    true => u64::try_from(self.owed).unwrap_or(0),
                    false => 0,
                };
                let pays = owed > 0 || download.is_owed();
                match (!pays).then(|| budget.clone().try_acquire_many_owned(units)) {
                    Some(Ok(got)) => *permit = Some(got),
                    _ => {
                        self.owed = self.owed.saturating_sub_unsigned(owed);
                        // From here on it is not this fetch's, which may end before it is settled.
                        let debt = download.debt(owed);
                        *waiting = Some(Box::pin(async move {
                            debt.settle().await;
                            budget.acquire_many_owned(units).await.expect("never closed")
                        }));
                        return;
                    }
                }
            }
            let Some(pick) = self.chooser.next(self.now_us()) else {
                // Others may have use for it.
                *permit = None;
                return;
            };
            let Some(expected) = self.words.expected(pick.block) else {
                // Who has a block has announced it; were that ever untrue, the block must be had elsewhere.
                debug_assert!(false, "block {} is asked for and was not announced", pick.block);
                let now_us = self.now_us();
                self.chooser
                    .declined(pick.peer, pick.block, Decline::NotHeld, now_us);
                continue;
            };
            let len = self
                .artifact
                .blocks()
                .locate(pick.block)
                .expect("a block of the artifact")
                .len;
            let mut paid = permit.take().expect("just acquired");
            let needed = len.div_ceil(BUDGET_UNIT_BYTES).min(units);
            drop(paid.split((units - needed) as usize));
            let session = self
                .sessions
                .get_mut(&pick.peer)
                .expect("the chooser knows the sessions' peers only");
            let wanted = (pick.block, &expected);
            match session
                .link
                .request(session.subscription, wanted, len, pick.unless_sent, paid)
            {
                Ok(request) => {
                    session.requests.insert(pick.block, (request, expected));
                    self.owed = self.owed.saturating_add(len.into());
                }
                // The link's end is in the inbox already, or about to be.
                Err(_) => self.leave(pick.peer, false),
            }
        }
    }

    // ---- what peers say -------------------------------------------------------------------------------

    pub(super) fn apply(&mut self, block: u32, change: Change) {
        for peer in change.unusable {
            if self.chooser.retract(peer, block) {
                self.cancel(peer, block);
            }
        }
        let now_us = self.now_us();
        for peer in change.usable {
            self.chooser.announce(peer, block, now_us);
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Status {
                peer,
                known,
                own_root,
            } => {
                let Some(session) = self.sessions.get_mut(&peer) else {
                    return;
                };
                let node_id = session.node_id.clone();
                session.own_root = own_root;
                if !known {
                    self.chooser.retract_all(peer);
                    for (block, change) in self.words.leave(peer, false) {
                        self.apply(block, change);
                    }
                }
                if let Some(listed) = self.listed.get_mut(&node_id) {
                    listed.failures = 0; // it talks to us
                }
            }
            Event::Have { peer, blocks } => {
                let Some(session) = self.sessions.get(&peer) else {
                    return;
                };
                let seed = session.seed;
                for (block, digest) in blocks {
                    let change = self.words.announce(peer, seed, block, digest);
                    self.apply(block, change);
                }
            }
            Event::Block {
                peer,
                block,
                bytes,
                by,
                permit,
            } => {
                let len = bytes.len() as u64;
                self.counters.add_fetched(len);
                if by == RDMA {
                    self.counters.add_rdma(len);
                }
                if !self.take(peer, block, bytes, permit) {
                    self.counters.add_duplicate(len);
                }
            }
            Event::Declined { peer, block, why } => {
                if let Some(session) = self.sessions.get_mut(&peer) {
                    if session.requests.remove(&block).is_some() {
                        let len = self.artifact.blocks().locate(block).map_or(0, |r| r.len);
                        self.owed = self.owed.saturating_sub(len.into());
                    }
                    if why == Decline::NotHeld {
                        let change = self.words.retract(peer, block);
                        self.apply(block, change);
                    }
                    let now_us = self.now_us();
                    self.chooser.declined(peer, block, why, now_us);
                }
            }
            Event::Digests { peer, first, digests } => self.list_part(peer, first, digests),
            Event::Down { peer, why } => {
                if let Some(session) = self.sessions.get(&peer) {
                    tracing::info!(model = %self.artifact.model(), node = %session.node_id, %why, "lost a peer; dialling it again");
                    if let Some(listed) = self.listed.get_mut(&session.node_id) {
                        listed.last_error = Some(why);
                    }
                    self.leave(peer, false);
                }
            }
        }
    }

    /// Whether the bytes were of use: they are being verified and written then.
    fn take(
        &mut self,
        peer: PeerIndex,
        block: u32,
        bytes: BlockBuffer,
        permit: OwnedSemaphorePermit,
    ) -> bool {
        let Some(session) = self.sessions.get_mut(&peer) else {
            return false;
        };
        let Some((_, promised)) = session.requests.remove(&block) else {
            return false;
        };
        let now_us = self.now_us();
        // The peer is held to its own word; if another word counts by now, the bytes are of no use.
        if self.words.expected(block) != Some(promised) {
            self.chooser.declined(peer, block, Decline::Canceled, now_us);
            return false;
        }
        let delivery = self.chooser.delivered(peer, block, bytes.len() as u64, now_us);
        for other in delivery.cancel {
            self.cancel(other, block);
        }
        if !delivery.wanted {
            return false;
        }
        if !self.taken.set(block) {
            self.counters.add_refetched(bytes.len() as u64);
        }
        #[cfg(test)]
        let promised = match self.swarm.config.trust_anything {
            true => self.artifact.algorithm().digest(&bytes),
            false => promised,
        };
        let (artifact, writers) = (self.artifact.clone(), self.swarm.writers.clone());
        let on_disk = self.on_disk.clone();
        self.writing += 1;
        self.tasks.spawn(async move {
            let slot = writers.acquire_owned().await.expect("never closed");
            let write = on_disk.spawn_blocking(move || {
                let result = artifact.write_block(block, &promised, &bytes);
                drop((bytes, permit, slot));
                result
            });
            let result = write.await.expect("writing a block does not panic");
            Done::Written { peer, block, result }
        });
        true
    }

    fn cancel(&self, peer: PeerIndex, block: u32) {
        if let Some(session) = self.sessions.get(&peer)
            && let Some((request, _)) = session.requests.get(&block)
        {
            session.link.cancel(*request);
        }
    }

    // ---- what tasks bring back ------------------------------------------------------------------------

    fn done(&mut self, done: Done) -> Result<(), TaskFailure> {
        match done {
            Done::Dialled { address, link } => self.dialled(address, link),
            Done::Written { peer, block, result } => {
                self.writing -= 1;
                match result {
                    Ok(()) | Err(WriteError::AlreadyHeld { .. }) => {
                        self.chooser.obtained(block);
                        self.last_progress = Instant::now();
                        self.credit(peer);
                    }
                    Err(e @ (WriteError::DigestMismatch { .. } | WriteError::WrongLength { .. })) => {
                        self.chooser.failed(block);
                        let reason = format!("sent bytes that are not what it had announced: {e}");
                        if !self.excuse(peer, &reason) {
                            self.blame(peer, reason);
                        }
                    }
                    Err(e) => {
                        let code = e.code();
                        let message = format!("transfer of {}: {e}", self.artifact.model());
                        let retryable = matches!(code, "disk_error" | "staging_closed");
                        return Err(TaskFailure {
                            code: code.to_owned(),
                            message,
                            retryable,
                        });
                    }
                }
            }
            Done::OwnRoot(seal) => self.list.own_root(seal),
            Done::Forgot { blocks, result } => self.forgot(blocks, result)?,
            Done::ListChecked { peer, list, root } => self.list_checked(peer, list, root),
        }
        Ok(())
    }

    /// Blocks that are held on the disk, whoever put them there.
    fn sync_with_store(&mut self) {
        let fresh = self.artifact.added(self.seen);
        self.seen += fresh.len();
        for block in fresh {
            if !self.chooser.have().get(block) && self.artifact.has(block) {
                self.chooser.obtained(block);
            }
        }
    }

    fn tick(&mut self) {
        let now_us = self.now_us();
        for stall in self.chooser.tick(now_us) {
            for block in &stall.cancel {
                self.cancel(stall.peer, *block);
            }
            if let Some(session) = self.sessions.get(&stall.peer) {
                let (model, node) = (self.artifact.model(), &session.node_id);
                if stall.drop {
                    tracing::warn!(%model, %node, "a peer delivers nothing; leaving it for now");
                    // What it owes would keep its part of the budget for as long as it answers pings.
                    session
                        .link
                        .abandon("the peer delivered nothing that it was asked for");
                    self.leave(stall.peer, false);
                } else {
                    tracing::info!(%model, %node, blocks = stall.cancel.len(), "a peer is stalled; asking others");
                }
            }
        }
        self.dial_due();
    }

    fn slow_tick(&mut self) -> Result<(), TaskFailure> {
        if let Some(why) = self.artifact.closed() {
            let message = format!(
                "transfer of {}: its staging is closed: {why}",
                self.artifact.model()
            );
            return Err(TaskFailure::retryable("staging_closed", message));
        }
        self.renew();
        self.dial_due();
        self.list_overdue();
        if !self.chooser.whole() && self.last_progress.elapsed() >= REPORT_EVERY {
            self.last_progress = Instant::now();
            let errors: Vec<_> = self
                .listed
                .iter()
                .filter_map(|(node, l)| Some(format!("{node}: {}", l.last_error.as_ref()?)))
                .take(8)
                .collect();
            tracing::warn!(
                model = %self.artifact.model(),
                have = self.chooser.have().ones(), blocks = self.artifact.blocks().len(),
                connected = self.sessions.len(), listed = self.listed.len(), ?errors,
                "no block came for {} s; waiting for peers", REPORT_EVERY.as_secs()
            );
        }
        Ok(())
    }
}

impl Fetch {
    /// Leaves one peer whose blocks came over TCP because RDMA had failed, if it may be tried again: it is dialled anew.
    /// What was asked of it is asked again.
    fn renew(&mut self) {
        let links = &self.swarm.links;
        let outdated = self.sessions.iter().find(|(_, s)| links.may_be_better(&s.link));
        if let Some((&peer, session)) = outdated {
            tracing::info!(model = %self.artifact.model(), node = %session.node_id, "dialling a peer anew, to try RDMA again");
            self.leave(peer, false);
        }
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        for session in self.sessions.values() {
            session.link.unsubscribe(session.subscription);
        }
    }
}
