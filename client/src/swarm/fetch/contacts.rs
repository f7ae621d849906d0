//! The peers of a fetch: who is on the list, who is dialled and when, who is left and for how long.

use super::{BadSource, Done, Fetch, Session};
use crate::{
    swarm::{
        chooser::{PeerTraits, hash_id},
        link::Link,
        words::PeerIndex,
    },
    transport::{ConnectError, PeerAddress},
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

/// Most peers that one fetch is connected to: enough that every block is near, few enough that what they say
/// costs nothing. The master's peer sets are smaller where clusters are large.
const MAX_PEERS: usize = 64;
/// First wait before a peer is dialled again; doubles up to [`RETRY_MAX`].
const RETRY_MIN: Duration = Duration::from_millis(200);
/// Longest wait before a peer is dialled again.
const RETRY_MAX: Duration = Duration::from_secs(10);
/// Verified blocks of a peer that make up for bad ones: one in so many costs less than doing without the peer.
const FORGIVEN_AFTER: u32 = 256;
/// Longest penalty of a peer that sent bad bytes.
const PENALTY_MAX: Duration = Duration::from_secs(3600);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contact {
    Connected(PeerIndex),
    Dialling,
    /// To be dialled from then on.
    Waiting(Instant),
}

/// A peer on the list.
pub(super) struct Listed {
    address: PeerAddress,
    contact: Contact,
    /// Dials in a row without success.
    pub(super) failures: u32,
    /// Times it sent bad bytes, less those that were made up for.
    strikes: u32,
    /// It was given the benefit of the doubt.
    excused: bool,
    /// Blocks that were verified since it was last forgiven something.
    verified: u32,
    pub(super) last_error: Option<String>,
}

impl Fetch {
    pub(super) fn list_peers(&mut self, peers: &[PeerAddress]) {
        let own = self.swarm.hello.node_id.clone();
        let mut listed = BTreeMap::new();
        for address in peers.iter().filter(|p| p.node_id != own) {
            if listed.contains_key(&address.node_id) {
                continue;
            }
            let entry = match self.listed.remove(&address.node_id) {
                Some(known) if known.address == *address => known,
                known => {
                    if let Some(Listed {
                        contact: Contact::Connected(peer),
                        ..
                    }) = known
                    {
                        self.leave(peer, false);
                    }
                    let strikes = known.map_or(0, |k| k.strikes);
                    let contact = Contact::Waiting(Instant::now());
                    Listed {
                        address: address.clone(),
                        contact,
                        failures: 0,
                        strikes,
                        excused: false,
                        verified: 0,
                        last_error: None,
                    }
                }
            };
            listed.insert(address.node_id.clone(), entry);
        }
        let gone = std::mem::replace(&mut self.listed, listed);
        for (_, listed) in gone {
            if let Contact::Connected(peer) = listed.contact {
                self.leave(peer, false);
            }
        }
        self.dial_due();
    }

    fn near(&self, address: &PeerAddress) -> bool {
        match (&self.swarm.config.rack, address.labels.get("rack")) {
            (Some(own), Some(theirs)) => own == theirs,
            _ => true,
        }
    }

    /// Dials who is due, seed and own rack first, within the bound.
    pub(super) fn dial_due(&mut self) {
        let now = Instant::now();
        let busy = self
            .listed
            .values()
            .filter(|l| !matches!(l.contact, Contact::Waiting(_)))
            .count();
        let own = hash_id(&self.swarm.hello.node_id);
        let mut due: Vec<_> = self
            .listed
            .values()
            .filter(|l| matches!(l.contact, Contact::Waiting(from) if from <= now))
            .map(|l| {
                let a = &l.address;
                // Beyond the bound each node takes others, by a hash of both.
                ((!a.seed, !self.near(a), hash_id(&a.node_id) ^ own), a.clone())
            })
            .collect();
        due.sort_unstable_by_key(|(order, _)| *order);
        for (_, address) in due.into_iter().take(MAX_PEERS.saturating_sub(busy)) {
            self.listed
                .get_mut(&address.node_id)
                .expect("just listed")
                .contact = Contact::Dialling;
            let swarm = self.swarm.clone();
            self.tasks.spawn(async move {
                let link = swarm.links.get(&address).await;
                Done::Dialled { address, link }
            });
        }
    }

    pub(super) fn dialled(&mut self, address: PeerAddress, link: Result<Arc<Link>, ConnectError>) {
        let peer = self.next_peer;
        let near = self.near(&address);
        let Some(listed) = self.listed.get_mut(&address.node_id) else {
            return;
        };
        if listed.contact != Contact::Dialling || listed.address != address {
            return; // the list changed meanwhile
        }
        let subscribed = match link {
            Ok(link) => match link.subscribe(&self.artifact, peer, self.events.clone()) {
                Ok(subscription) => Ok((link, subscription)),
                Err(_) => Err("the connection closed at once".to_owned()),
            },
            Err(e) => Err(e.to_string()),
        };
        let (link, subscription) = match subscribed {
            Ok(ok) => ok,
            Err(error) => {
                if listed.last_error.as_ref() != Some(&error) {
                    tracing::info!(model = %self.artifact.model(), node = %address.node_id, %error, "a peer is out of reach; trying on");
                }
                listed.last_error = Some(error);
                listed.failures += 1;
                let wait = retry_after(listed.failures, hash_id(&address.node_id) ^ self.now_us());
                let listed = self.listed.get_mut(&address.node_id).expect("just seen");
                listed.contact = Contact::Waiting(Instant::now() + wait);
                return;
            }
        };
        self.next_peer += 1;
        listed.contact = Contact::Connected(peer);
        listed.last_error = None;
        let traits = PeerTraits {
            hash: hash_id(&address.node_id),
            seed: address.seed,
            near,
        };
        self.chooser.add_peer(peer, traits);
        let session = Session {
            node_id: address.node_id,
            seed: address.seed,
            link,
            subscription,
            requests: HashMap::new(),
            own_root: None,
        };
        self.sessions.insert(peer, session);
    }

    /// Ends a session; the peer stays on the list and is dialled again in its time. `broken`: it sent bad
    /// bytes, so that its word is worth nothing.
    pub(in crate::swarm) fn leave(&mut self, peer: PeerIndex, broken: bool) {
        let Some(session) = self.sessions.remove(&peer) else {
            return;
        };
        session.link.unsubscribe(session.subscription);
        self.chooser.remove_peer(peer);
        let changes = self.words.leave(peer, broken);
        for (block, change) in changes {
            self.apply(block, change);
        }
        self.list.left(peer);
        let penalty = self.swarm.config.penalty;
        let now_us = self.now_us();
        if let Some(listed) = self.listed.get_mut(&session.node_id)
            && listed.contact == Contact::Connected(peer)
        {
            let wait = if broken {
                listed.strikes += 1;
                (penalty * 4u32.saturating_pow(listed.strikes - 1)).min(PENALTY_MAX)
            } else {
                listed.failures += 1;
                retry_after(listed.failures, hash_id(&session.node_id) ^ now_us)
            };
            listed.contact = Contact::Waiting(Instant::now() + wait);
        }
    }

    /// Whether bad bytes of this peer may be nobody's fault. Until the seal a seed reads a file anew whose checksum did
    /// not hold, and a block of the old one may have been on its way when it found out. Then what it says is heard
    /// anew, over another subscription; once, or it would be no different from a liar.
    pub(in crate::swarm) fn excuse(&mut self, peer: PeerIndex, reason: &str) -> bool {
        let Some(session) = self.sessions.get(&peer).filter(|s| s.seed && self.seal.is_none()) else {
            return false;
        };
        let Some(listed) = self.listed.get_mut(&session.node_id).filter(|l| !l.excused) else {
            return false;
        };
        listed.excused = true;
        tracing::info!(model = %self.artifact.model(), node = %session.node_id, %reason, "the seed has other bytes by now, or a fault: asking it anew");
        self.leave(peer, false);
        true
    }

    /// A block of this peer was verified.
    pub(in crate::swarm) fn credit(&mut self, peer: PeerIndex) {
        let node = self.sessions.get(&peer).map(|s| &s.node_id);
        let Some(listed) = node.and_then(|node| self.listed.get_mut(node)) else {
            return;
        };
        listed.verified += 1;
        if listed.verified >= FORGIVEN_AFTER {
            listed.verified = 0;
            listed.excused = false;
            listed.strikes = listed.strikes.saturating_sub(1);
        }
    }

    /// A peer broke its word: report it and leave it.
    pub(in crate::swarm) fn blame(&mut self, peer: PeerIndex, reason: String) {
        let Some(session) = self.sessions.get(&peer) else {
            return;
        };
        let node_id = session.node_id.clone();
        tracing::warn!(model = %self.artifact.model(), node = %node_id, %reason, "leaving a bad peer");
        (self.bad_sources)(BadSource { node_id, reason });
        self.leave(peer, true);
    }
}

/// Exponential, with a jitter of half the wait, so that nodes do not dial in step.
fn retry_after(failures: u32, noise: u64) -> Duration {
    let whole = (RETRY_MIN * 2u32.saturating_pow(failures.saturating_sub(1).min(16))).min(RETRY_MAX);
    whole / 2 + (whole / 2).mul_f64((noise % 1024) as f64 / 1024.0)
}
