//! Manifests and source lists.

use super::Apply;
use crate::{
    bytes::Bytes,
    command::{BlobRef, Reply},
    types::{Blob, BlobContent},
};
use mooncake_proto::{digest::Digest, manifest::MAX_BODY_BYTES};
use std::collections::BTreeMap;

/// Largest blob: what is kept of a request cannot be much larger than its largest body. Twice, as the binary
/// form of a list of short strings may exceed its JSON nowhere near that.
const MAX_BLOB_BYTES: u64 = 2 * MAX_BODY_BYTES as u64;
/// Most bytes in blobs that nothing refers to yet: eight of the largest requests at once.
const MAX_PENDING_BYTES: u64 = 8 * MAX_BODY_BYTES as u64;

/// A blob's digest and its bytes.
pub(super) type Resolved = (Digest, Bytes);

impl Apply<'_> {
    pub(super) fn put_blob_part(
        &mut self,
        digest: &Digest,
        index: u32,
        count: u32,
        total_bytes: u64,
        bytes: &Bytes,
    ) -> Reply {
        if index >= count || total_bytes > MAX_BLOB_BYTES || bytes.len() as u64 > total_bytes {
            let detail = format!("part {index} of {count}, {} of {total_bytes} bytes", bytes.len());
            return Reply::Invalid { detail };
        }
        let now = self.now;
        let referenced = self.state.index.blob_refs.contains_key(digest);
        let pending = self.pending_bytes();
        let blobs = &mut self.state.data.blobs;
        if let Some(Blob {
            content: BlobContent::Complete(_),
            since_ms,
        }) = blobs.get_mut(digest)
        {
            // Someone is about to refer to it: it must live as long as a new one.
            if !referenced {
                *since_ms = now;
            }
            return Reply::Done;
        }
        if pending.saturating_add(bytes.len() as u64) > MAX_PENDING_BYTES {
            let detail =
                format!("{pending} bytes of manifests wait for their jobs, the limit is {MAX_PENDING_BYTES}");
            return Reply::Overloaded { detail };
        }
        // Parts cut in another way (by another version of this program) replace what is there.
        let mut parts = match blobs.get(digest).map(|b| &b.content) {
            Some(BlobContent::Partial {
                count: c,
                total_bytes: t,
                parts,
            }) if *c == count && *t == total_bytes => parts.clone(),
            _ => BTreeMap::new(),
        };
        parts.insert(index, bytes.clone());
        let mut content = BlobContent::Partial {
            count,
            total_bytes,
            parts,
        };
        if let BlobContent::Partial { parts, .. } = &content
            && parts.len() == count as usize
        {
            let mut whole = Vec::with_capacity(total_bytes as usize);
            parts.values().for_each(|part| whole.extend_from_slice(part));
            if whole.len() as u64 != total_bytes || Digest::sha256(&whole) != *digest {
                // This part is not kept, so that the state is what it was; right parts replace wrong ones.
                let detail = format!("the {count} parts of blob {digest} do not add up to its digest");
                return Reply::Invalid { detail };
            }
            content = BlobContent::Complete(whole.into());
        }
        let since_ms = now;
        self.state.put_blob(*digest, Blob { content, since_ms });
        Reply::Done
    }

    /// Bytes of blobs that nothing refers to.
    fn pending_bytes(&self) -> u64 {
        self.state
            .unreferenced_blobs()
            .map(|(_, blob)| blob.content.len())
            .sum()
    }

    /// The bytes of a blob that a command brings or names.
    pub(super) fn resolve(&self, blob: &BlobRef) -> Result<Resolved, Reply> {
        match blob {
            BlobRef::Inline(bytes) => Ok((Digest::sha256(bytes), bytes.clone())),
            BlobRef::Stored(digest) => match self.state.blob(digest) {
                Some(bytes) => Ok((*digest, bytes.clone())),
                None => Err(Reply::BlobMissing { digest: *digest }),
            },
        }
    }

    /// Keeps a blob from now on.
    pub(super) fn refer(&mut self, digest: Digest, bytes: &Bytes) {
        self.state.index.refer(digest);
        if self.state.blob(&digest).is_none() {
            let blob = Blob {
                content: BlobContent::Complete(bytes.clone()),
                since_ms: self.now,
            };
            self.state.put_blob(digest, blob);
        }
    }

    /// Takes one reference away; the last one starts the blob's time to live.
    pub(super) fn release(&mut self, digest: &Digest) {
        if self.state.index.release(digest)
            && let Some(blob) = self.state.data.blobs.get_mut(digest)
        {
            blob.since_ms = self.now;
        }
    }
}
