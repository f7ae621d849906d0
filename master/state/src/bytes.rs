//! Shared values and maps: cloning a state (for a snapshot, a digest, a backup) copies none of it.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{fmt, ops::Deref, sync::Arc};

/// Immutable shared bytes. Encoded as a byte string in one piece, not element by element.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Bytes(Arc<Vec<u8>>);

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Arc::new(bytes))
    }
}

impl Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Bytes;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }
            fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Bytes, E> {
                Ok(bytes.to_vec().into())
            }
            fn visit_byte_buf<E: de::Error>(self, bytes: Vec<u8>) -> Result<Bytes, E> {
                Ok(bytes.into())
            }
        }
        deserializer.deserialize_bytes(Visitor)
    }
}

/// A shared value, copied when it is changed while a clone of the state is alive. Encoded as the value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shared<T>(Arc<T>);

impl<T> Shared<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Arc::new(value))
    }
}

impl<T: Clone> Shared<T> {
    pub(crate) fn make_mut(&mut self) -> &mut T {
        Arc::make_mut(&mut self.0)
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Serialize> Serialize for Shared<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Shared<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::deserialize(deserializer).map(Self::new)
    }
}

/// `#[serde(with)]` for persistent maps: as standard ones are encoded. The map's own decoding makes room for as many
/// entries as damaged bytes say there are.
pub(crate) mod map {
    use imbl::OrdMap;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser::SerializeMap as _};
    use std::{fmt, marker::PhantomData};

    pub(crate) fn serialize<K, V, S>(map: &OrdMap<K, V>, serializer: S) -> Result<S::Ok, S::Error>
    where
        K: Ord + Serialize,
        V: Serialize,
        S: Serializer,
    {
        let mut entries = serializer.serialize_map(Some(map.len()))?;
        for (key, value) in map {
            entries.serialize_entry(key, value)?;
        }
        entries.end()
    }

    pub(crate) fn deserialize<'de, K, V, D>(deserializer: D) -> Result<OrdMap<K, V>, D::Error>
    where
        K: Ord + Clone + Deserialize<'de>,
        V: Clone + Deserialize<'de>,
        D: Deserializer<'de>,
    {
        struct Visitor<K, V>(PhantomData<(K, V)>);
        impl<'de, K, V> de::Visitor<'de> for Visitor<K, V>
        where
            K: Ord + Clone + Deserialize<'de>,
            V: Clone + Deserialize<'de>,
        {
            type Value = OrdMap<K, V>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }
            fn visit_map<A: de::MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
                let mut map = OrdMap::new();
                while let Some((key, value)) = entries.next_entry()? {
                    map.insert(key, value);
                }
                Ok(map)
            }
        }
        deserializer.deserialize_map(Visitor(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::map;
    use imbl::OrdMap;
    use mooncake_proto::codec;
    use serde::{Deserialize, Serialize};
    use std::collections::BTreeMap;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Persistent(#[serde(with = "map")] OrdMap<String, u64>);

    #[test]
    fn persistent_maps_are_encoded_like_standard_ones() {
        for len in [0, 1, 16, 17, 1000] {
            // Not in their order, and with some that are replaced: the tree has been through something.
            let entries = (0..len).map(|i| (format!("{}", i * 7919 % 1009), i));
            let standard: BTreeMap<String, u64> = entries.clone().chain(entries.clone()).collect();
            let persistent = Persistent(entries.clone().chain(entries).collect());
            let encoded = codec::encode(1, &persistent);
            assert_eq!(encoded, codec::encode(1, &standard), "{len} entries");
            assert_eq!(
                codec::decode::<Persistent>(1, &encoded).unwrap(),
                persistent,
                "{len} entries"
            );
        }
    }
}
