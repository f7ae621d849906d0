//! Object ids: a list, or the pattern that the list follows.

use serde::{Deserialize, Serialize};
use std::{borrow::Cow, fmt::Write};

/// The object ids of one file, one per chunk. Ids that count up are kept as their pattern, so that a
/// manifest of a million chunks is a few bytes in the Raft log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ObjectIds {
    /// `{head}{number}{tail}`, number = `first + chunk`, zero-padded to `width` digits.
    Pattern {
        /// Before the number.
        head: String,
        /// The number of chunk 0.
        first: u64,
        /// Least number of digits.
        width: u8,
        /// After the number.
        tail: String,
        /// How many ids.
        count: u64,
    },
    /// As given.
    List(Vec<String>),
}

impl ObjectIds {
    /// `{prefix}/chunk-000`, `-001`, …: the ids derived where a manifest names none.
    pub fn derived(prefix: &str, count: u64) -> Self {
        let width = count.saturating_sub(1).to_string().len().max(3) as u8;
        Self::Pattern {
            head: format!("{prefix}/chunk-"),
            first: 0,
            width,
            tail: String::new(),
            count,
        }
    }

    /// Takes a list and keeps it as a pattern where it follows one.
    pub fn from_list(ids: Vec<String>) -> Self {
        match Self::detect(&ids) {
            Some(pattern) => pattern,
            None => Self::List(ids),
        }
    }

    fn detect(ids: &[String]) -> Option<Self> {
        let first_id = ids.first()?;
        let end = first_id.rfind(|c: char| c.is_ascii_digit())? + 1;
        let start = first_id[..end]
            .rfind(|c: char| !c.is_ascii_digit())
            .map_or(0, |i| i + first_id[i..].chars().next().map_or(1, char::len_utf8));
        let digits = &first_id[start..end];
        // A pattern number must survive the round trip: at most 18 digits, padding only by zeros.
        if digits.len() > 18 {
            return None;
        }
        let pattern = Self::Pattern {
            head: first_id[..start].to_owned(),
            first: digits.parse().ok()?,
            width: digits.len() as u8,
            tail: first_id[end..].to_owned(),
            count: ids.len() as u64,
        };
        let follows = pattern.iter().zip(ids).all(|(a, b)| a == *b);
        follows.then_some(pattern)
    }

    /// How many ids.
    pub fn len(&self) -> u64 {
        match self {
            Self::Pattern { count, .. } => *count,
            Self::List(ids) => ids.len() as u64,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The id of chunk `index`.
    pub fn get(&self, index: u64) -> Option<Cow<'_, str>> {
        match self {
            Self::Pattern {
                head,
                first,
                width,
                tail,
                count,
            } => (index < *count).then(|| {
                let mut id = String::with_capacity(head.len() + tail.len() + 20);
                let _ = write!(
                    id,
                    "{head}{:0width$}{tail}",
                    first + index,
                    width = *width as usize
                );
                Cow::Owned(id)
            }),
            Self::List(ids) => ids
                .get(usize::try_from(index).ok()?)
                .map(|s| Cow::Borrowed(s.as_str())),
        }
    }

    /// All ids in chunk order.
    pub fn iter(&self) -> impl Iterator<Item = Cow<'_, str>> {
        (0..self.len()).map_while(|i| self.get(i))
    }

    /// The chunk that has this id: constant time for a pattern, linear for a list.
    pub fn position(&self, id: &str) -> Option<u64> {
        match self {
            Self::Pattern {
                head, first, tail, ..
            } => {
                let digits = id.strip_prefix(head.as_str())?.strip_suffix(tail.as_str())?;
                let number: u64 = digits.parse().ok()?;
                let index = number.checked_sub(*first)?;
                (self.get(index)? == id).then_some(index)
            }
            Self::List(ids) => ids.iter().position(|i| i == id).map(|i| i as u64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ids(list: &[&str]) -> ObjectIds {
        ObjectIds::from_list(list.iter().map(|s| (*s).to_owned()).collect())
    }

    #[test]
    fn patterns_are_found() {
        for list in [
            &["m/r/chunk-000", "m/r/chunk-001"][..],
            &["a9", "a10"],
            &["x-7.bin", "x-8.bin"],
            &["é1", "é2"],
            &["5", "6"],
        ] {
            assert!(matches!(ids(list), ObjectIds::Pattern { .. }), "{list:?}");
        }
        for list in [
            &["a", "b"][..],
            &["a1", "a3"],
            &["a01", "a2"],
            &["99999999999999999999"],
            &[],
        ] {
            assert!(matches!(ids(list), ObjectIds::List(_)), "{list:?}");
        }
    }

    proptest! {
        #[test]
        fn kept_as_given(list in prop::collection::vec("[ab0-9/é-]{0,6}", 0..6)) {
            let kept = ObjectIds::from_list(list.clone());
            prop_assert_eq!(kept.iter().map(Cow::into_owned).collect::<Vec<_>>(), list.clone());
            for id in &list {
                let at = kept.position(id).unwrap();
                prop_assert_eq!(&list[at as usize], id);
            }
            prop_assert_eq!(kept.position("nowhere"), None);
        }

        #[test]
        fn counting_ids_are_patterns(head in "[a-z/]{0,8}", first in 0u64..2000, count in 1u64..50, width in 1usize..8, tail in "[a-z.]{0,4}") {
            let list: Vec<_> = (first..first + count).map(|n| format!("{head}{n:0width$}{tail}")).collect();
            let kept = ObjectIds::from_list(list.clone());
            let is_pattern = matches!(kept, ObjectIds::Pattern { .. });
            prop_assert!(is_pattern);
            prop_assert_eq!(kept.iter().map(Cow::into_owned).collect::<Vec<_>>(), list);
        }
    }
}
