//! Which digest to expect of each block, and whose word that is. Pure.
//!
//! Until a list that reproduces the seal's root is known, digests are taken as peers announce them, the seed's
//! word before any other's; the first word stands otherwise. A block is only fetched from a peer whose own
//! announcement equals what is expected: so whoever delivers other bytes has broken its own word, whether or
//! not that word was right. A proven list ends all doubt.

use mooncake_proto::digest::Digest;
use std::collections::HashMap;

/// A peer, as the fetch numbers them.
pub type PeerIndex = u32;

/// Most differing announcements kept of one peer. One that differs more is of no use to this node now.
const MAX_DIFFERENT: usize = 1 << 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    None,
    Peer(PeerIndex),
    Seed(PeerIndex),
    /// Its giver is gone and nobody there agrees: whoever speaks next is believed.
    Orphan,
    Proven,
}

/// What an announcement means for the chooser.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// These peers can now be asked for the block.
    pub usable: Vec<PeerIndex>,
    /// These cannot any more.
    pub unusable: Vec<PeerIndex>,
}

/// The digests expected by one fetch.
#[derive(Debug)]
pub struct Words {
    digests: Vec<Digest>,
    words: Vec<Word>,
    /// Who announced the expected digest of a block.
    agree: HashMap<PeerIndex, super::bits::Bits>,
    /// Who announced another one.
    differ: HashMap<PeerIndex, HashMap<u32, Digest>>,
    proven: bool,
}

impl Words {
    /// Nothing is known of `blocks` blocks.
    pub fn new(blocks: u32) -> Self {
        Self {
            digests: vec![Digest::new([0; 32]); blocks as usize],
            words: vec![Word::None; blocks as usize],
            agree: HashMap::new(),
            differ: HashMap::new(),
            proven: false,
        }
    }

    /// Whether a list that reproduces the seal is known.
    pub fn proven(&self) -> bool {
        self.proven
    }

    /// The digest to check block `block` against.
    pub fn expected(&self, block: u32) -> Option<Digest> {
        (self.words[block as usize] != Word::None).then(|| self.digests[block as usize])
    }

    /// Peer `peer` says that it has `block` with `digest`.
    pub fn announce(&mut self, peer: PeerIndex, seed: bool, block: u32, digest: Digest) -> Change {
        let at = block as usize;
        let blocks = self.words.len() as u32;
        let agree = self
            .agree
            .entry(peer)
            .or_insert_with(|| super::bits::Bits::new(blocks));
        let differ = self.differ.entry(peer).or_default();
        let known = self.words[at];
        if known != Word::None && self.digests[at] == digest {
            differ.remove(&block);
            agree.set(block);
            match known {
                Word::Peer(_) | Word::Orphan if seed => self.words[at] = Word::Seed(peer),
                Word::Orphan => self.words[at] = Word::Peer(peer),
                _ => {}
            }
            return Change {
                usable: vec![peer],
                unusable: vec![],
            };
        }
        let overrides = match known {
            Word::None | Word::Orphan => true,
            Word::Peer(_) => seed || known == Word::Peer(peer),
            Word::Seed(by) => by == peer,
            Word::Proven => false,
        };
        if !overrides {
            agree.clear(block);
            if differ.len() < MAX_DIFFERENT || differ.contains_key(&block) {
                differ.insert(block, digest);
            }
            return Change {
                usable: vec![],
                unusable: vec![peer],
            };
        }
        // This announcement is what the peer says now, whatever it said before.
        agree.clear(block);
        differ.insert(block, digest);
        self.expect(
            block,
            digest,
            if seed { Word::Seed(peer) } else { Word::Peer(peer) },
        )
    }

    /// Peer `peer` does not have `block` any more.
    pub fn retract(&mut self, peer: PeerIndex, block: u32) -> Change {
        if let Some(bits) = self.agree.get_mut(&peer) {
            bits.clear(block);
        }
        if let Some(differ) = self.differ.get_mut(&peer) {
            differ.remove(&block);
        }
        self.relearn(peer, block, Word::Orphan).unwrap_or_default()
    }

    /// Everything `peer` announced is void: it is gone, or it broke its word (`broken`: then what only it
    /// said is forgotten). Gives the changes of usability at other peers.
    pub fn leave(&mut self, peer: PeerIndex, broken: bool) -> Vec<(u32, Change)> {
        self.agree.remove(&peer);
        self.differ.remove(&peer);
        let otherwise = if broken { Word::None } else { Word::Orphan };
        (0..self.words.len() as u32)
            .filter_map(|b| Some((b, self.relearn(peer, b, otherwise)?)))
            .collect()
    }

    /// Hands the word that `peer` gave on to a peer that agrees, else takes another peer's, else keeps it as
    /// `otherwise`. `Some` if the expected digest changed.
    fn relearn(&mut self, peer: PeerIndex, block: u32, otherwise: Word) -> Option<Change> {
        let at = block as usize;
        if !matches!(self.words[at], Word::Peer(by) | Word::Seed(by) if by == peer) {
            return None;
        }
        // Lowest index first, so that the outcome does not depend on the order of a map.
        let backer = self
            .agree
            .iter()
            .filter(|(_, bits)| bits.get(block))
            .map(|(p, _)| *p)
            .min();
        if let Some(backer) = backer {
            self.words[at] = Word::Peer(backer);
            return None;
        }
        let said = self
            .differ
            .iter()
            .filter_map(|(p, d)| d.get(&block).map(|digest| (*p, *digest)));
        match said.min_by_key(|(p, _)| *p) {
            Some((by, digest)) => Some(self.expect(block, digest, Word::Peer(by))),
            None => {
                self.words[at] = otherwise;
                None
            }
        }
    }

    /// The list that reproduces the root. Gives the changes at blocks that were expected otherwise.
    pub fn prove(&mut self, list: &[Digest]) -> Vec<(u32, Change)> {
        assert_eq!(list.len(), self.words.len(), "a list has one digest per block");
        self.proven = true;
        let mut changes = Vec::new();
        for (block, digest) in list.iter().enumerate() {
            if self.words[block] != Word::None && self.digests[block] == *digest {
                self.words[block] = Word::Proven;
            } else {
                changes.push((block as u32, self.expect(block as u32, *digest, Word::Proven)));
            }
        }
        changes
    }

    fn expect(&mut self, block: u32, digest: Digest, word: Word) -> Change {
        let at = block as usize;
        let mut change = Change::default();
        if self.words[at] != Word::None && self.digests[at] != digest {
            let old = self.digests[at];
            for (peer, bits) in &mut self.agree {
                if bits.clear(block) {
                    self.differ.entry(*peer).or_default().insert(block, old);
                    change.unusable.push(*peer);
                }
            }
        }
        let blocks = self.words.len() as u32;
        for (peer, differ) in &mut self.differ {
            if differ.get(&block) == Some(&digest) {
                differ.remove(&block);
                self.agree
                    .entry(*peer)
                    .or_insert_with(|| super::bits::Bits::new(blocks))
                    .set(block);
                change.usable.push(*peer);
            }
        }
        change.usable.sort_unstable();
        change.unusable.sort_unstable();
        self.digests[at] = digest;
        self.words[at] = word;
        change
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn d(n: u8) -> Digest {
        Digest::new([n; 32])
    }

    #[test]
    fn the_seeds_word_goes_before_others() {
        let mut w = Words::new(2);
        assert_eq!(w.announce(1, false, 0, d(1)).usable, [1], "the first word stands");
        assert_eq!(
            w.announce(2, false, 0, d(2)),
            Change {
                usable: vec![],
                unusable: vec![2]
            }
        );
        assert_eq!(w.expected(0), Some(d(1)));
        assert_eq!(
            w.announce(0, true, 0, d(2)),
            Change {
                usable: vec![0, 2],
                unusable: vec![1]
            }
        );
        assert_eq!(w.expected(0), Some(d(2)));
        assert_eq!(w.announce(1, false, 0, d(2)).usable, [1], "it came round");
        assert_eq!(w.announce(1, false, 0, d(3)).unusable, [1]);
        assert_eq!(w.expected(0), Some(d(2)), "nobody overrides the seed");
        assert_eq!(w.expected(1), None);
    }

    #[test]
    fn a_broken_word_is_replaced() {
        let mut w = Words::new(3);
        for block in 0..3 {
            w.announce(1, false, block, d(1));
        }
        w.announce(2, false, 0, d(2));
        w.announce(3, false, 1, d(1));
        let changes = w.leave(1, true);
        assert_eq!(
            changes,
            [(
                0,
                Change {
                    usable: vec![2],
                    unusable: vec![]
                }
            )]
        );
        assert_eq!(w.expected(0), Some(d(2)), "re-learned from 2");
        assert_eq!(w.expected(1), Some(d(1)), "3 says the same");
        assert_eq!(w.expected(2), None, "nobody else said anything");
    }

    #[test]
    fn a_proven_list_ends_all_doubt() {
        let mut w = Words::new(2);
        w.announce(1, true, 0, d(1));
        w.announce(2, false, 0, d(9));
        w.announce(1, true, 1, d(5));
        let changes = w.prove(&[d(9), d(5)]);
        assert_eq!(
            changes,
            [(
                0,
                Change {
                    usable: vec![2],
                    unusable: vec![1]
                }
            )]
        );
        assert_eq!(
            w.announce(1, true, 0, d(1)).unusable,
            [1],
            "not even the seed's word counts now"
        );
        w.leave(2, true);
        assert_eq!((w.expected(0), w.expected(1)), (Some(d(9)), Some(d(5))));
    }

    #[test]
    fn a_peer_that_changes_its_mind_is_taken_at_its_last_word() {
        let mut w = Words::new(1);
        w.announce(1, false, 0, d(1));
        assert_eq!(
            w.announce(1, false, 0, d(2)),
            Change {
                usable: vec![1],
                unusable: vec![]
            }
        );
        assert_eq!(w.retract(1, 0), Change::default());
        assert_eq!(w.expected(0), Some(d(2)), "nobody says otherwise");
        assert_eq!(
            w.announce(2, false, 0, d(1)).usable,
            [2],
            "its giver is gone: the next is believed"
        );
    }

    #[test]
    fn a_word_survives_its_giver_while_others_agree() {
        let mut w = Words::new(1);
        w.announce(0, true, 0, d(1));
        w.announce(1, false, 0, d(1));
        assert_eq!(w.leave(0, false), []);
        assert_eq!(w.announce(2, false, 0, d(7)).unusable, [2]);
        assert_eq!(
            w.leave(1, false),
            [(
                0,
                Change {
                    usable: vec![2],
                    unusable: vec![]
                }
            )]
        );
    }
}
