//! Decoded manifests, kept while there is room: object lookups would else decode every manifest each time.

use mooncake_proto::{digest::Digest, manifest::Manifest};
use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc};

/// Encoded bytes of the manifests kept; decoded they take a small multiple of it.
const MAX_CACHED_BYTES: usize = 16 << 20;

/// Keeps the most recently used.
#[derive(Default)]
pub(crate) struct ManifestCache {
    /// Held for a map operation only; decoding happens outside.
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    entries: HashMap<Digest, Entry>,
    bytes: usize,
    clock: u64,
}

struct Entry {
    manifest: Arc<Manifest>,
    bytes: usize,
    used: u64,
}

impl ManifestCache {
    pub(crate) fn get(&self, digest: &Digest) -> Option<Arc<Manifest>> {
        let mut inner = self.inner.lock();
        inner.clock += 1;
        let clock = inner.clock;
        let entry = inner.entries.get_mut(digest)?;
        entry.used = clock;
        Some(entry.manifest.clone())
    }

    /// Decodes `encoded` and keeps it if it is small enough. `None`: it does not decode.
    pub(crate) fn decode(&self, digest: Digest, encoded: &[u8]) -> Option<Arc<Manifest>> {
        let manifest = Arc::new(Manifest::decode(encoded).ok()?);
        let bytes = encoded.len();
        if bytes > MAX_CACHED_BYTES / 4 {
            return Some(manifest);
        }
        let mut inner = self.inner.lock();
        inner.clock += 1;
        let used = inner.clock;
        if let Some(old) = inner.entries.insert(
            digest,
            Entry {
                manifest: manifest.clone(),
                bytes,
                used,
            },
        ) {
            inner.bytes -= old.bytes;
        }
        inner.bytes += bytes;
        while inner.bytes > MAX_CACHED_BYTES {
            let Some(oldest) = inner.entries.iter().min_by_key(|(_, e)| e.used).map(|(d, _)| *d) else {
                break;
            };
            if let Some(gone) = inner.entries.remove(&oldest) {
                inner.bytes -= gone.bytes;
            }
        }
        Some(manifest)
    }
}
