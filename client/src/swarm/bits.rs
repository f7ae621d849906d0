//! A fixed set of bits, one per block.

/// One bit per block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bits {
    words: Vec<u64>,
    len: u32,
    ones: u32,
}

impl Bits {
    /// `len` zeros.
    pub fn new(len: u32) -> Self {
        Self {
            words: vec![0; (len as usize).div_ceil(64)],
            len,
            ones: 0,
        }
    }

    /// Number of bits.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether there are no bits at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of bits that are set.
    pub fn ones(&self) -> u32 {
        self.ones
    }

    /// Whether bit `i` is set; a bit past the end is not.
    pub fn get(&self, i: u32) -> bool {
        self.words
            .get(i as usize / 64)
            .is_some_and(|w| w >> (i % 64) & 1 == 1)
    }

    /// Sets bit `i`; whether it was clear.
    pub fn set(&mut self, i: u32) -> bool {
        assert!(i < self.len, "bit {i} of {}", self.len);
        let word = &mut self.words[i as usize / 64];
        let new = *word >> (i % 64) & 1 == 0;
        *word |= 1 << (i % 64);
        self.ones += u32::from(new);
        new
    }

    /// Clears bit `i`; whether it was set.
    pub fn clear(&mut self, i: u32) -> bool {
        assert!(i < self.len, "bit {i} of {}", self.len);
        let word = &mut self.words[i as usize / 64];
        let was = *word >> (i % 64) & 1 == 1;
        *word &= !(1 << (i % 64));
        self.ones -= u32::from(was);
        was
    }

    /// The 64 bits that start at bit `64 * w`.
    pub fn word(&self, w: usize) -> u64 {
        self.words[w]
    }

    /// How many words there are.
    pub fn words(&self) -> usize {
        self.words.len()
    }

    /// The bits that are set, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.words
            .iter()
            .enumerate()
            .flat_map(|(w, &word)| ones(word).map(move |b| w as u32 * 64 + b))
    }
}

/// The positions of the ones in a word, ascending.
pub fn ones(mut word: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        if word == 0 {
            return None;
        }
        let bit = word.trailing_zeros();
        word &= word - 1;
        Some(bit)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn behaves_like_a_set(len in 1u32..300, ops in prop::collection::vec((any::<bool>(), any::<u32>()), 0..200)) {
            let (mut bits, mut set) = (Bits::new(len), BTreeSet::new());
            for (add, at) in ops {
                let at = at % len;
                if add {
                    prop_assert_eq!(bits.set(at), set.insert(at));
                } else {
                    prop_assert_eq!(bits.clear(at), set.remove(&at));
                }
            }
            prop_assert_eq!(bits.iter().collect::<Vec<_>>(), set.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(bits.ones() as usize, set.len());
            prop_assert!(!bits.get(len));
        }
    }
}
