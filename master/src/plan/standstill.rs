//! Attempts that stand still although their node is connected: when they have failed, and what is said of it.
//!
//! [`Standstill`] is the clock of one attempt, a pure piece: it is told what the node reports and what it was given,
//! and says since when nothing happened. What sets it back:
//!
//! | what happens | when |
//! |---|---|
//! | more bytes were verified than ever before in this attempt | always |
//! | more bytes were checked against declared checksums than before: what is held may take hours of that, and no byte more is verified meanwhile | always |
//! | fewer bytes are verified: some proved wrong and are read again, from there on | [`MAX_FALLS`] times |
//! | it was told of a peer that it did not have | [`MAX_FRESH_PEERS`] times |
//! | it was told the seal | always: there is one |
//!
//! The bounds are there so that an attempt which loses and regains the same bytes, or gets new peers and nothing of
//! them, still ends. Time before this master led, or in which it stood still itself, is never counted: it may be that
//! the node got on and this master did not hear of it.

use super::{
    Plan,
    observed::Sent,
    order::{Intent, Peer},
};
use mooncake_proto::{api::PlacementState, ids::NodeId};
use mooncake_state::{Command, Failure, ReportId, TaskKind};

/// How often the verified bytes of one attempt may fall: each file can prove wrong once in a download, a few at a
/// time, and a copy loses what liars gave it at the seal.
const MAX_FALLS: u32 = 16;
/// How often new peers give an attempt new time. Lists change whenever any node of a large job comes or goes.
const MAX_FRESH_PEERS: u32 = 3;
/// Most peers that are named to a person.
const NAMED_PEERS: usize = 4;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standstill {
    since_ms: u64,
    verified_bytes: u64,
    checked_bytes: u64,
    falls: u32,
    fresh_peers: u32,
}

/// What a node reports of a running attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reported {
    /// Bytes whose block digest held: goes down when some of them prove wrong.
    pub verified_bytes: u64,
    /// Bytes that were hashed for declared checksums in this attempt: only grows.
    pub checked_bytes: u64,
}

impl Standstill {
    pub(super) fn new(now_ms: u64) -> Self {
        Self {
            since_ms: now_ms,
            verified_bytes: 0,
            checked_bytes: 0,
            falls: 0,
            fresh_peers: 0,
        }
    }

    /// The node reported.
    pub(super) fn reported(&mut self, reported: Reported, now_ms: u64) {
        let Reported {
            verified_bytes,
            checked_bytes,
        } = reported;
        let fell = verified_bytes < self.verified_bytes && self.falls < MAX_FALLS;
        if fell {
            self.falls += 1;
        }
        if fell || verified_bytes > self.verified_bytes {
            self.verified_bytes = verified_bytes;
            self.since_ms = now_ms;
        }
        if checked_bytes > self.checked_bytes {
            self.checked_bytes = checked_bytes;
            self.since_ms = now_ms;
        }
    }

    /// The node was told of `new` peers instead of `old` ones.
    pub(super) fn peers_changed(&mut self, old: &[Peer], new: &[Peer], now_ms: u64) {
        let gained = new.iter().any(|n| old.iter().all(|o| o.node != n.node));
        if gained && self.fresh_peers < MAX_FRESH_PEERS {
            self.fresh_peers += 1;
            self.since_ms = now_ms;
        }
    }

    /// The node was told the seal.
    pub(super) fn sealed(&mut self, now_ms: u64) {
        self.since_ms = now_ms;
    }

    /// As last reported, or the mark that it fell from too often.
    pub(super) fn verified_bytes(&self) -> u64 {
        self.verified_bytes
    }

    /// Whether nothing happened for `limit_ms`, by a master that has been watching since `watched_since_ms`.
    fn is_over(&self, limit_ms: u64, watched_since_ms: u64, now_ms: u64) -> bool {
        now_ms >= self.since_ms.max(watched_since_ms).saturating_add(limit_ms)
    }
}

impl Plan<'_> {
    /// An attempt that stands still although its node is connected (its peers cannot be reached, its source gives
    /// nothing, its disk hangs) has failed: so that its attempts run out, with a reason, instead of never ending.
    /// A copy has nothing to go on with while the download stands still, or waits for its turn, so it is only judged while
    /// some node holds what is sealed.
    /// Who has every byte has still to publish, and its disk may hang in that too.
    pub(super) fn judge_standstill(&mut self) {
        let limit_ms = self.observed.config.no_progress_ms;
        if limit_ms == 0 {
            return;
        }
        for (id, session) in &self.observed.sessions {
            if self.ready(id).is_none() {
                continue;
            }
            for (model, sent) in session.sent.iter().filter(|(_, s)| s.running.is_some()) {
                let Some(artifact) = self.state.artifact(model) else {
                    continue;
                };
                let running = artifact
                    .placements
                    .get(id)
                    .filter(|p| p.state == PlacementState::Acquiring && p.fence == sent.fence);
                let Some(placement) = running else { continue };
                // From when it was told of the seal: its clock begins again with that.
                let told = sent.seal.is_some() && sent.seal == artifact.seal;
                let over = sent
                    .standstill
                    .is_over(limit_ms, self.observed.leader_since_ms, self.now_ms);
                let judged = || match placement.kind {
                    TaskKind::Acquire => true,
                    TaskKind::Replicate => told && self.has_holder(model, artifact),
                };
                if !over || !judged() {
                    continue;
                }
                let held = session.holdings.get(model).map_or(0, |h| h.verified_bytes);
                let bytes = sent.standstill.verified_bytes().max(held);
                self.intents.push(Intent::Propose(Command::ReportFailed {
                    report: ReportId {
                        model: model.clone(),
                        generation: artifact.generation,
                        node: id.clone(),
                        incarnation: session.incarnation,
                        fence: sent.fence,
                    },
                    failure: Failure {
                        code: "no_progress".into(),
                        message: message(
                            id,
                            placement.kind,
                            sent,
                            bytes,
                            artifact.total_size_bytes,
                            limit_ms,
                        ),
                        retryable: true,
                    },
                    verified_bytes: bytes,
                    now_ms: self.now_ms,
                }));
            }
        }
    }
}

fn message(id: &NodeId, kind: TaskKind, sent: &Sent, bytes: u64, total_bytes: u64, limit_ms: u64) -> String {
    if bytes >= total_bytes {
        return format!(
            "node {id} is connected and has verified all {total_bytes} bytes, but has not published them for {} s: look \
             at its disk and its log",
            limit_ms / 1000
        );
    }
    let stands = format!(
        "node {id} is connected, but has stood still at {bytes} of {total_bytes} bytes for {} s",
        limit_ms / 1000
    );
    if kind == TaskKind::Acquire {
        return format!("{stands}: look at its source, its disk and its log");
    }
    let named: Vec<_> = sent
        .peers
        .iter()
        .take(NAMED_PEERS)
        .map(|p| format!("{} ({})", p.node, p.data_address))
        .collect();
    let more = match sent.peers.len().saturating_sub(NAMED_PEERS) {
        0 => String::new(),
        n => format!(" and {n} more"),
    };
    match named.is_empty() {
        true => format!("{stands}: no other live node has it"),
        false => format!(
            "{stands}: its peers are {}{more}; check that it reaches their data ports, and its disk",
            named.join(", ")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT_MS: u64 = 600;

    #[derive(Clone, Copy)]
    enum Event {
        /// (verified, checked)
        Reports(u64, u64),
        /// These peers, by number, and no others.
        Peers(&'static [u8]),
        Seal,
    }
    use Event::*;

    fn peers(numbers: &[u8]) -> Vec<Peer> {
        let peer = |n: &u8| Peer {
            node: NodeId(format!("n{n}:1")),
            data_address: String::new(),
            transports: vec![],
            labels: Default::default(),
            seed: false,
        };
        numbers.iter().map(peer).collect()
    }

    /// When an attempt that began at 0 has failed, if these events came at these times and then nothing.
    fn ends(events: &[(u64, Event)], watched_since_ms: u64) -> u64 {
        let mut clock = Standstill::new(0);
        let mut known = peers(&[1]);
        for (at, event) in events {
            assert!(
                !clock.is_over(LIMIT_MS, watched_since_ms, *at),
                "over before {at}"
            );
            match event {
                Reports(verified_bytes, checked_bytes) => {
                    let reported = Reported {
                        verified_bytes: *verified_bytes,
                        checked_bytes: *checked_bytes,
                    };
                    clock.reported(reported, *at);
                }
                Peers(numbers) => {
                    let new = peers(numbers);
                    clock.peers_changed(&known, &new, *at);
                    known = new;
                }
                Seal => clock.sealed(*at),
            }
        }
        (0..)
            .find(|now| clock.is_over(LIMIT_MS, watched_since_ms, *now))
            .unwrap()
    }

    /// What it is about, what happens when, since when this master looks on, and when the attempt is over.
    type Case<'a> = (&'a str, &'a [(u64, Event)], u64, u64);

    #[test]
    fn what_gives_an_attempt_more_time() {
        let cases: &[Case] = &[
            ("nothing happens", &[], 0, 600),
            ("this master looks on since later", &[], 250, 850),
            ("and that was long ago", &[(300, Reports(1, 0))], 250, 900),
            (
                "bytes are verified",
                &[(100, Reports(5, 0)), (500, Reports(6, 0))],
                0,
                1100,
            ),
            (
                "the same is said again",
                &[(100, Reports(5, 0)), (500, Reports(5, 0))],
                0,
                700,
            ),
            (
                "what is held is checked for its checksums",
                &[(100, Reports(9, 0)), (600, Reports(9, 1)), (1100, Reports(9, 2))],
                0,
                1700,
            ),
            (
                "and the check stands still",
                &[(100, Reports(9, 4)), (600, Reports(9, 4))],
                0,
                700,
            ),
            (
                "a file proves wrong and is read again, below what was reached",
                &[
                    (100, Reports(9, 0)),
                    (600, Reports(2, 0)),
                    (1100, Reports(3, 0)),
                    (1600, Reports(4, 0)),
                ],
                0,
                2200,
            ),
            ("the seal", &[(100, Seal), (500, Seal)], 0, 1100),
            ("a new peer", &[(100, Peers(&[1, 2]))], 0, 700),
            (
                "fewer peers, and the same in another order",
                &[(100, Peers(&[]))],
                0,
                600,
            ),
            ("the same number, another node", &[(100, Peers(&[2]))], 0, 700),
            ("the same peers", &[(100, Peers(&[1]))], 0, 600),
            (
                "new peers again and again",
                &[
                    (100, Peers(&[1, 2])),
                    (200, Peers(&[1, 3])),
                    (300, Peers(&[1, 2])),
                    (400, Peers(&[1, 3])),
                    (500, Peers(&[1, 2])),
                ],
                0,
                900,
            ),
        ];
        for (what, events, watched_since_ms, end) in cases {
            assert_eq!(ends(events, *watched_since_ms), *end, "{what}");
        }
    }

    #[test]
    fn losing_and_regaining_the_same_bytes_is_no_progress_for_ever() {
        let mut clock = Standstill::new(0);
        let mut now_ms = 0;
        let mut rounds = 0;
        while !clock.is_over(LIMIT_MS, 0, now_ms) {
            rounds += 1;
            assert!(rounds < 1000, "it never ends");
            for verified_bytes in [9, 2] {
                now_ms += LIMIT_MS / 2;
                clock.reported(
                    Reported {
                        verified_bytes,
                        checked_bytes: 0,
                    },
                    now_ms,
                );
            }
        }
        assert!(rounds > MAX_FALLS, "{rounds}");
    }
}
