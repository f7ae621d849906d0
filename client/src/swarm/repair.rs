//! From blocks that matched announced digests to an artifact that matches the seal.
//!
//! When the seal is known, the digest list of a whole peer whose root equals it is fetched early: from then on
//! every block is checked against what is proven. A list that does not reproduce the root is no list, and its
//! giver is reported. What is held and differs from the proven list is forgotten and fetched again. A peer that
//! was asked for its list and stays silent is passed over for the next one that has it, and in the end left.

use super::{
    fetch::{Done, Fetch, Session},
    link::{Closed, DIGESTS_PER_FRAME, Link},
    words::PeerIndex,
};
use crate::task::TaskFailure;
use mooncake_proto::{
    digest::Digest,
    manifest::{Seal, root},
};
use std::{collections::BTreeSet, io, sync::Arc, time::Instant};

/// A digest list on its way here.
struct ListFetch {
    peer: PeerIndex,
    parts: Vec<Option<Vec<Digest>>>,
    /// When it was asked for, or its last part came.
    since: Instant,
}

impl ListFetch {
    /// Asks for the whole list, in frames.
    fn start(peer: PeerIndex, link: &Link, subscription: u32, blocks: u32) -> Result<Self, Closed> {
        let mut parts = Vec::new();
        for first in (0..blocks).step_by(DIGESTS_PER_FRAME as usize) {
            link.fetch_digests(subscription, first, DIGESTS_PER_FRAME.min(blocks - first))?;
            parts.push(None);
        }
        Ok(Self {
            peer,
            parts,
            since: Instant::now(),
        })
    }
}

/// How far the proof is.
#[derive(Default)]
pub(super) struct ListState {
    fetch: Option<ListFetch>,
    /// Peers that were asked and stayed silent.
    silent: BTreeSet<PeerIndex>,
    /// A list is being checked, or what it proves is being applied: no other is fetched meanwhile.
    applying: bool,
    /// The own root is being computed.
    computing: bool,
    /// Over the own list, while nothing was forgotten since.
    own: Option<Seal>,
}

impl ListState {
    pub(super) fn own_root(&mut self, seal: Option<Seal>) {
        self.computing = false;
        self.own = seal;
    }

    /// The peer is gone: its list will not come.
    pub(super) fn left(&mut self, peer: PeerIndex) {
        self.silent.remove(&peer);
        if self.fetch.as_ref().is_some_and(|f| f.peer == peer) {
            self.fetch = None;
        }
    }
}

impl Fetch {
    /// Takes what the masters sealed.
    pub(super) fn take_seal(&mut self, seal: Option<Seal>) -> Result<(), TaskFailure> {
        let Some(seal) = seal else { return Ok(()) };
        if seal.block_size_bytes != self.artifact.blocks().block_size()
            || seal.algorithm != self.artifact.algorithm()
        {
            let message = format!(
                "{} is sealed with blocks of {} bytes and {}, but this transfer was ordered with {} and {}: \
                 the order is out of date, distribute the model again",
                self.artifact.model(),
                seal.block_size_bytes,
                seal.algorithm.name(),
                self.artifact.blocks().block_size(),
                self.artifact.algorithm().name(),
            );
            return Err(TaskFailure::permanent("seal_mismatch", message));
        }
        self.seal = Some(seal);
        Ok(())
    }

    /// The next step towards the proof; `true`: it is done.
    pub(super) fn advance_proof(&mut self) -> Result<bool, TaskFailure> {
        let Some(seal) = self.seal else { return Ok(false) };
        let whole = self.chooser.whole() && self.writing == 0;
        if whole && !self.list.applying {
            match self.list.own {
                Some(own) if own == seal => return Ok(true),
                // Blocks that were on their way to the disk when the list came, or that somebody else wrote.
                Some(_) if self.words.proven() => {
                    let wrong = self.differing(|fetch, block| fetch.words.expected(block));
                    self.list.own = None;
                    if !wrong.is_empty() {
                        self.forget(wrong);
                    }
                    return Ok(false);
                }
                Some(_) => {}
                None => {
                    if !self.list.computing {
                        self.list.computing = true;
                        let artifact = self.artifact.clone();
                        self.spawn_proof(move || Done::OwnRoot(artifact.seal_if_whole()));
                    }
                    return Ok(false);
                }
            }
        }
        if !self.words.proven() && self.list.fetch.is_none() && !self.list.applying {
            self.start_list(&seal);
        }
        Ok(false)
    }

    /// Runs a step of the proof where it may block, in turn.
    fn spawn_proof(&mut self, step: impl FnOnce() -> Done + Send + 'static) {
        let (turns, on_disk) = (self.swarm.proofs.clone(), self.on_disk.clone());
        self.tasks.spawn(async move {
            let turn = turns.acquire_owned().await.expect("never closed");
            let step = on_disk.spawn_blocking(move || {
                let done = step();
                drop(turn);
                done
            });
            step.await.expect("a step of the proof does not panic")
        });
    }

    /// The list fetch that is due, if any peer can give the list.
    fn start_list(&mut self, seal: &Seal) {
        let found = self
            .sessions
            .iter()
            .find(|(p, s)| s.own_root == Some(seal.root) && !self.list.silent.contains(p))
            .map(|(p, _)| *p);
        let Some(peer) = found else { return };
        let session = &self.sessions[&peer];
        match ListFetch::start(
            peer,
            &session.link,
            session.subscription,
            self.artifact.blocks().len(),
        ) {
            Ok(fetch) => self.list.fetch = Some(fetch),
            Err(_) => self.leave(peer, false),
        }
    }

    /// Gives up a list that does not come, so that the next peer is asked; where there is none, leaves the silent
    /// ones, so that a new connection may do better.
    pub(super) fn list_overdue(&mut self) {
        let timeout = self.swarm.config.list_timeout;
        if let Some(fetch) = self.list.fetch.take_if(|f| f.since.elapsed() >= timeout) {
            self.list.silent.insert(fetch.peer);
            if let Some(session) = self.sessions.get(&fetch.peer) {
                tracing::warn!(
                    model = %self.artifact.model(), node = %session.node_id, waited_ms = timeout.as_millis() as u64,
                    "a peer does not give its digest list; asking another"
                );
            }
        }
        let Some(seal) = self.seal.filter(|_| !self.words.proven()) else {
            return;
        };
        if self.list.fetch.is_some() || self.list.applying {
            return;
        }
        let named =
            |(p, s): &(&PeerIndex, &Session)| s.own_root == Some(seal.root) && !self.list.silent.contains(*p);
        if self.sessions.iter().any(|s| named(&s)) {
            return;
        }
        // Who still delivers blocks is worth more than its list; if it stops, the chooser leaves it.
        let whole = self.chooser.whole();
        let idle = |p: &PeerIndex| whole || self.chooser.outstanding(*p) == 0;
        let idle: Vec<_> = self.list.silent.iter().copied().filter(idle).collect();
        for peer in idle {
            self.leave(peer, false);
        }
    }

    /// Part of a list came.
    pub(super) fn list_part(&mut self, peer: PeerIndex, first: u32, digests: Option<Vec<Digest>>) {
        let Some(fetch) = self.list.fetch.as_mut().filter(|f| f.peer == peer) else {
            return;
        };
        let Some(digests) = digests else {
            // It lost blocks since it said that it is whole; its status will say so, or it can be asked again.
            self.list.fetch = None;
            if let Some(session) = self.sessions.get_mut(&peer) {
                session.own_root = None;
            }
            return;
        };
        fetch.since = Instant::now();
        fetch.parts[(first / DIGESTS_PER_FRAME) as usize] = Some(digests);
        if fetch.parts.iter().any(Option::is_none) {
            return;
        }
        let fetch = self.list.fetch.take().expect("just seen");
        let list: Vec<Digest> = fetch.parts.into_iter().flatten().flatten().collect();
        self.list.applying = true;
        let artifact = self.artifact.clone();
        self.spawn_proof(move || {
            let blocks = artifact.blocks();
            let root = root(
                artifact.algorithm(),
                blocks.block_size(),
                &artifact.manifest_digest(),
                &list,
            );
            Done::ListChecked { peer, list, root }
        });
    }

    /// A whole list was hashed.
    pub(super) fn list_checked(&mut self, peer: PeerIndex, list: Vec<Digest>, root: Digest) {
        self.list.applying = false;
        let Some(seal) = self.seal else { return };
        if root != seal.root {
            self.blame(
                peer,
                "gave a digest list that does not reproduce the root it had named".into(),
            );
            return;
        }
        for (block, change) in self.words.prove(&list) {
            self.apply(block, change);
        }
        let wrong = self.differing(|_, block| Some(list[block as usize]));
        if !wrong.is_empty() {
            self.forget(wrong);
        }
    }

    /// Held blocks whose digest is not the right one.
    fn differing(&self, right: impl Fn(&Self, u32) -> Option<Digest>) -> Vec<u32> {
        let have = self.chooser.have().iter();
        have.filter(|b| {
            self.artifact
                .digest(*b)
                .is_some_and(|own| Some(own) != right(self, *b))
        })
        .collect()
    }

    fn forget(&mut self, blocks: Vec<u32>) {
        tracing::warn!(
            model = %self.artifact.model(), count = blocks.len(), first = ?blocks.first(),
            "blocks were announced with wrong digests before the seal: fetching them again"
        );
        self.list.applying = true;
        self.list.own = None;
        let artifact = self.artifact.clone();
        self.spawn_proof(move || {
            let result = Arc::clone(&artifact).forget(&blocks);
            Done::Forgot { blocks, result }
        });
    }

    pub(super) fn forgot(&mut self, blocks: Vec<u32>, result: io::Result<()>) -> Result<(), TaskFailure> {
        self.list.applying = false;
        if let Err(e) = result {
            let message = format!(
                "transfer of {}: cannot forget blocks that are wrong: {e}; check the disk",
                self.artifact.model()
            );
            return Err(TaskFailure::retryable("disk_error", message));
        }
        for block in blocks {
            self.chooser.lost(block);
        }
        Ok(())
    }
}
