//! A map from numbers to a few values, in ascending order, with the keys in one piece of memory and the values in
//! another. A choice looks at every peer and an announcement at one: with nodes of trees, or hash tables, half of the time
//! of both went into waiting for memory.
//!
//! Not for many: to insert and to remove moves what lies behind.

use std::ops::Index;

#[derive(Clone, Debug)]
pub(super) struct SmallMap<V> {
    keys: Vec<u32>,
    values: Vec<V>,
}

impl<V> SmallMap<V> {
    pub(super) fn new() -> Self {
        Self {
            keys: Vec::new(),
            values: Vec::new(),
        }
    }

    fn at(&self, key: u32) -> Option<usize> {
        self.keys.binary_search(&key).ok()
    }

    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    pub(super) fn contains_key(&self, key: &u32) -> bool {
        self.at(*key).is_some()
    }

    pub(super) fn get(&self, key: &u32) -> Option<&V> {
        self.at(*key).map(|at| &self.values[at])
    }

    pub(super) fn get_mut(&mut self, key: &u32) -> Option<&mut V> {
        self.at(*key).map(|at| &mut self.values[at])
    }

    /// What was there before.
    pub(super) fn insert(&mut self, key: u32, value: V) -> Option<V> {
        match self.keys.binary_search(&key) {
            Ok(at) => Some(std::mem::replace(&mut self.values[at], value)),
            Err(at) => {
                self.keys.insert(at, key);
                self.values.insert(at, value);
                None
            }
        }
    }

    pub(super) fn remove(&mut self, key: &u32) -> Option<V> {
        let at = self.at(*key)?;
        self.keys.remove(at);
        Some(self.values.remove(at))
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &u32> {
        self.keys.iter()
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &V> {
        self.values.iter()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&u32, &V)> {
        self.keys.iter().zip(&self.values)
    }
}

impl<V> IntoIterator for SmallMap<V> {
    type Item = (u32, V);
    type IntoIter = std::iter::Zip<std::vec::IntoIter<u32>, std::vec::IntoIter<V>>;

    fn into_iter(self) -> Self::IntoIter {
        self.keys.into_iter().zip(self.values)
    }
}

impl<V> Index<&u32> for SmallMap<V> {
    type Output = V;

    fn index(&self, key: &u32) -> &V {
        self.get(key).expect("a key that is there")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn behaves_like_a_tree(ops in prop::collection::vec((0u8..4, 0u32..20, any::<u8>()), 0..100)) {
            let (mut map, mut tree) = (SmallMap::new(), BTreeMap::new());
            for (op, key, value) in ops {
                match op {
                    0 => prop_assert_eq!(map.remove(&key), tree.remove(&key)),
                    1 => prop_assert_eq!(map.get_mut(&key), tree.get_mut(&key)),
                    _ => prop_assert_eq!(map.insert(key, value), tree.insert(key, value)),
                }
                prop_assert_eq!(map.len(), tree.len());
                prop_assert_eq!(map.is_empty(), tree.is_empty());
                prop_assert_eq!(map.contains_key(&key), tree.contains_key(&key));
            }
            prop_assert!(map.iter().eq(&tree));
            prop_assert!(map.keys().eq(tree.keys()) && map.values().eq(tree.values()));
            prop_assert!(map.into_iter().eq(tree));
        }
    }
}
