//! Which master to dial next, and after which pause: a pure policy.
//!
//! Every address is tried, for ever. A redirect is followed at once (a few times in a row); after a loss the
//! masters are tried one after the other without a pause, the lost one last; a round in which nobody took the
//! node is followed by a pause that grows, with jitter so that a thousand nodes do not come back in step. So is a
//! session that was lost at once.

use std::time::Duration;

/// The first pause.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause while masters cannot be reached.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// The longest pause while masters answer that there is no leader yet: an election takes well under a second
/// and the node should be there soon after it.
const LONGEST_PAUSE_IN_ELECTION: Duration = Duration::from_millis(250);
/// After a round in which every master that answered refused the node: somebody has to change something.
const PAUSE_WHEN_REFUSED: Duration = Duration::from_secs(5);
/// A session that ends sooner has failed: each one costs the masters a commit, so that the next is not begun
/// without a pause, which grows while it goes on like that.
const LEAST_SESSION: Duration = Duration::from_secs(5);
/// Redirects followed without a pause: masters that send a node in circles are in an election.
const MAX_REDIRECTS: u32 = 3;
/// Rounds in which a master that fell silent is passed over while others answer that they know no leader (about
/// as long as an election takes): a frozen one accepts connections, and finding that out costs seconds.
const SUSPECT_SKIPS: u32 = 8;
/// Addresses learned from a welcome: a cluster has at most a handful of masters.
const MAX_LEARNED: usize = 64;

/// How an attempt or a session ended, as far as the next one is concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was registered, then the connection was lost, silent or closed.
    Lost,
    /// The leader is elsewhere.
    Redirected(String),
    /// The master answers, but knows no leader.
    NoLeader,
    /// It cannot be reached, or does not answer.
    Unreachable,
    /// It refuses this node.
    Refused,
}

/// The policy's memory.
#[derive(Debug)]
pub struct Dialer {
    configured: Vec<String>,
    learned: Vec<String>,
    /// Position in the list of all.
    cursor: usize,
    hint: Option<String>,
    /// The master that was lost last, and how often it may still be passed over.
    suspect: Option<(String, u32)>,
    /// Where the last attempt or session was.
    dialled: String,
    redirects: u32,
    /// Attempts since somebody took us, and what they met.
    attempts: usize,
    rounds: u32,
    met_election: bool,
    /// Somebody answered, since the last session, that there is no leader.
    in_election: bool,
    met_refusal: bool,
    pause: Option<Duration>,
    /// Sessions in a row that ended at once, and the pause after the last of them.
    short_sessions: u32,
    short_pause: Option<Duration>,
}

impl Dialer {
    /// `masters` is not empty; `start` spreads the nodes of a cluster over the masters.
    pub fn new(masters: Vec<String>, start: usize) -> Self {
        assert!(
            !masters.is_empty(),
            "the configuration demands at least one master"
        );
        Self {
            cursor: start % masters.len(),
            configured: masters,
            learned: Vec::new(),
            hint: None,
            suspect: None,
            dialled: String::new(),
            redirects: 0,
            attempts: 0,
            rounds: 0,
            met_election: false,
            in_election: false,
            met_refusal: false,
            pause: None,
            short_sessions: 0,
            short_pause: None,
        }
    }

    /// All addresses: as configured, then as learned.
    pub fn addresses(&self) -> Vec<String> {
        let learned = self.learned.iter().filter(|a| !self.configured.contains(a));
        self.configured.iter().chain(learned).cloned().collect()
    }

    /// Where to dial now, after the pause. `jitter` in 0..1.
    pub fn next(&mut self, jitter: f64) -> (String, Duration) {
        let pause = self
            .pause
            .take()
            .max(self.short_pause.take())
            .map_or(Duration::ZERO, |p| p.mul_f64(0.5 + jitter.clamp(0.0, 1.0)));
        let address = match self.hint.take() {
            Some(hint) => hint,
            None => self.in_turn(),
        };
        address.clone_into(&mut self.dialled);
        (address, pause)
    }

    fn in_turn(&mut self) -> String {
        let all = self.addresses();
        let mut turn = || {
            let address = all[self.cursor % all.len()].clone();
            self.cursor = (self.cursor + 1) % all.len();
            address
        };
        let address = turn();
        match &mut self.suspect {
            Some((suspect, skips))
                if *suspect == address && *skips > 0 && self.in_election && all.len() > 1 =>
            {
                *skips -= 1;
                turn()
            }
            _ => address,
        }
    }

    /// Somebody took us.
    pub fn registered(&mut self, address: &str, masters: &[String]) {
        self.learned = masters
            .iter()
            .filter(|a| !a.is_empty())
            .take(MAX_LEARNED)
            .cloned()
            .collect();
        if !self.configured.iter().chain(&self.learned).any(|a| a == address) {
            self.learned.push(address.to_owned());
        }
        self.redirects = 0;
        self.attempts = 0;
        self.rounds = 0;
        self.met_election = false;
        self.in_election = false;
        self.met_refusal = false;
        self.suspect = None;
        // If it is lost, the others come first.
        let all = self.addresses();
        if let Some(at) = all.iter().position(|a| a == address) {
            self.cursor = (at + 1) % all.len();
        }
    }

    /// How long the session lasted that ended now, however it ended.
    pub fn lasted(&mut self, lasted: Duration) {
        if lasted >= LEAST_SESSION {
            self.short_sessions = 0;
            return;
        }
        self.short_pause = Some(grown(self.short_sessions, LONGEST_PAUSE));
        self.short_sessions = self.short_sessions.saturating_add(1);
    }

    /// What came of it.
    pub fn ended(&mut self, ended: &Ended) {
        match ended {
            Ended::Lost => {
                self.suspect = Some((std::mem::take(&mut self.dialled), SUSPECT_SKIPS));
                return;
            }
            // Its leader is the one that we have just lost: it has not noticed yet.
            Ended::Redirected(to)
                if self
                    .suspect
                    .as_ref()
                    .is_some_and(|(s, skips)| s == to && *skips > 0) =>
            {
                self.met_election = true;
                self.in_election = true;
            }
            Ended::Redirected(to) => {
                self.redirects += 1;
                if self.redirects <= MAX_REDIRECTS {
                    self.hint = Some(to.clone());
                    return;
                }
                self.redirects = 0;
                self.met_election = true;
                // It may still be right; the pause below comes first.
                self.hint = Some(to.clone());
                self.pause = Some(self.grown(LONGEST_PAUSE_IN_ELECTION));
                self.rounds = self.rounds.saturating_add(1);
                return;
            }
            Ended::NoLeader => {
                self.met_election = true;
                self.in_election = true;
            }
            Ended::Refused => self.met_refusal = true,
            Ended::Unreachable => {}
        }
        self.attempts += 1;
        if self.attempts < self.addresses().len() {
            return;
        }
        self.pause = Some(match (self.met_election, self.met_refusal) {
            (true, _) => self.grown(LONGEST_PAUSE_IN_ELECTION),
            (false, true) => PAUSE_WHEN_REFUSED,
            (false, false) => self.grown(LONGEST_PAUSE),
        });
        self.rounds = self.rounds.saturating_add(1);
        self.attempts = 0;
        self.redirects = 0;
        self.met_election = false;
        self.met_refusal = false;
    }

    fn grown(&self, longest: Duration) -> Duration {
        grown(self.rounds, longest)
    }
}

fn grown(rounds: u32, longest: Duration) -> Duration {
    FIRST_PAUSE.saturating_mul(1 << rounds.min(10)).min(longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dialer() -> Dialer {
        Dialer::new(["a:1", "b:1", "c:1"].map(str::to_owned).into(), 0)
    }

    /// Half way of the jitter: the pause as it is.
    fn next(dialer: &mut Dialer) -> (String, u64) {
        let (address, pause) = dialer.next(0.5);
        (address, pause.as_millis() as u64)
    }

    #[test]
    fn every_master_is_tried_before_the_first_pause_and_pauses_grow_to_a_bound() {
        let mut d = dialer();
        let mut pauses = Vec::new();
        for _ in 0..10 {
            for (n, want) in ["a:1", "b:1", "c:1"].iter().enumerate() {
                let (address, pause) = next(&mut d);
                assert_eq!(address, *want);
                if n == 0 {
                    pauses.push(pause)
                } else {
                    assert_eq!(pause, 0)
                }
                d.ended(&Ended::Unreachable);
            }
        }
        assert_eq!(pauses, [0, 50, 100, 200, 400, 800, 1600, 2000, 2000, 2000]);
    }

    #[test]
    fn the_lost_master_is_tried_last_and_redirects_are_followed_at_once() {
        let mut d = dialer();
        assert_eq!(next(&mut d).0, "a:1");
        d.registered("a:1", &["a:1".into(), "b:1".into(), "d:1".into()]);
        d.ended(&Ended::Lost);
        let order: Vec<_> = (0..4)
            .map(|_| {
                let (address, pause) = next(&mut d);
                assert_eq!(pause, 0);
                d.ended(&Ended::Unreachable);
                address
            })
            .collect();
        assert_eq!(
            order,
            ["b:1", "c:1", "d:1", "a:1"],
            "learned addresses are tried too"
        );
        next(&mut d);
        d.ended(&Ended::Redirected("x:9".into()));
        assert_eq!(next(&mut d), ("x:9".into(), 0));
        d.registered("x:9", &[]);
        assert!(d.addresses().contains(&"x:9".to_owned()));
    }

    #[test]
    fn sessions_that_are_lost_at_once_come_after_pauses_that_grow() {
        let mut d = dialer();
        let mut session = |lasted_ms, ended: &Ended| {
            let (address, pause) = next(&mut d);
            d.registered(&address, &[]);
            d.lasted(Duration::from_millis(lasted_ms));
            d.ended(ended);
            pause
        };
        let redirected = Ended::Redirected("b:1".into());
        let mut pauses: Vec<_> = (0..8).map(|_| session(1, &Ended::Lost)).collect();
        assert_eq!(pauses, [0, 50, 100, 200, 400, 800, 1600, 2000]);
        pauses = (0..3).map(|_| session(4999, &redirected)).collect();
        assert_eq!(pauses, [2000; 3], "nor in circles");
        session(5000, &Ended::Lost);
        pauses = (0..2).map(|_| session(1, &Ended::Lost)).collect();
        assert_eq!(pauses, [0, 50], "a session that held clears it");
    }

    #[test]
    fn masters_in_an_election_are_asked_often() {
        let mut d = dialer();
        let mut longest = 0;
        for n in 0..60 {
            longest = longest.max(next(&mut d).1);
            d.ended(if n % 3 == 0 {
                &Ended::NoLeader
            } else {
                &Ended::Unreachable
            });
        }
        assert_eq!(longest, 250);
    }

    #[test]
    fn a_frozen_leader_is_not_asked_while_the_others_elect() {
        let mut d = dialer();
        assert_eq!(next(&mut d).0, "a:1");
        d.registered("a:1", &[]);
        d.ended(&Ended::Lost);
        // The others still name the frozen one.
        let mut dialled = Vec::new();
        for _ in 0..7 {
            dialled.push(next(&mut d).0);
            d.ended(&Ended::Redirected("a:1".into()));
        }
        assert!(!dialled.contains(&"a:1".to_owned()), "{dialled:?}");
        // Not for ever: it may have thawed.
        for _ in 0..20 {
            dialled.push(next(&mut d).0);
            d.ended(&Ended::NoLeader);
        }
        assert!(dialled.contains(&"a:1".to_owned()), "{dialled:?}");
    }

    #[test]
    fn circles_of_redirects_are_paused() {
        let mut d = dialer();
        let mut pauses = Vec::new();
        for _ in 0..9 {
            pauses.push(next(&mut d).1);
            d.ended(&Ended::Redirected("b:1".into()));
        }
        assert_eq!(pauses, [0, 0, 0, 0, 50, 0, 0, 0, 100]);
    }

    #[test]
    fn refused_by_all_waits_long_but_a_reachable_master_is_not_waited_for() {
        let mut d = dialer();
        for _ in 0..3 {
            assert_eq!(next(&mut d).1, 0);
            d.ended(&Ended::Refused);
        }
        assert_eq!(next(&mut d).1, 5000);
        d.ended(&Ended::Refused);
        d.ended(&Ended::NoLeader);
        d.ended(&Ended::Unreachable);
        assert!(next(&mut d).1 <= 250);
    }

    #[test]
    fn jitter_spreads_by_half() {
        for (jitter, want) in [(0.0, 25), (1.0, 75)] {
            let mut d = dialer();
            (0..3).for_each(|_| {
                d.next(0.0);
                d.ended(&Ended::Unreachable);
            });
            assert_eq!(d.next(jitter).1.as_millis(), want);
        }
    }
}
