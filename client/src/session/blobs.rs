//! Manifests and source lists that come in parts, put together and proven by their digest.
//!
//! Kept across reconnects: bytes that match their digest do not go stale. Bounded by
//! [`MAX_BLOBS_BYTES`]; the least recently used go first.

use bytes::{Bytes, BytesMut};
use mooncake_proto::{digest::Digest, pb::session::BlobPart};
use sha2::Digest as _;
use std::collections::HashMap;

/// Most bytes kept, whole and partial blobs together: one largest manifest with its sources (they come from one
/// request body of at most 64 MiB), and many of the usual size. A blob that went is sent again in the next
/// session.
pub const MAX_BLOBS_BYTES: usize = 96 << 20;
/// Most parts of one blob: a manifest comes from a request body of at most 64 MiB and parts are about half a
/// frame.
const MAX_PARTS: u32 = 4096;
/// Blobs that are arriving at once: the master sends one after the other.
const MAX_ARRIVING: usize = 64;

struct Whole {
    bytes: Bytes,
    used: u64,
}

struct Arriving {
    count: u32,
    next: u32,
    bytes: BytesMut,
    /// Hashed part by part, so that a large blob does not hold up the session's heartbeats.
    hasher: sha2::Sha256,
    used: u64,
}

/// Why a part is not taken: the master is at fault, the session starts anew.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BlobError {
    /// The digest is not 32 bytes, or the numbers make no sense.
    #[error("a blob part is malformed: {0}")]
    Malformed(&'static str),
    /// Too much.
    #[error("a blob of more than {MAX_BLOBS_BYTES} bytes arrives")]
    TooLarge,
    /// The whole is not what its digest says.
    #[error("a blob does not match its digest {0}")]
    Mismatch(Digest),
}

/// The blobs of one node.
#[derive(Default)]
pub struct Blobs {
    whole: HashMap<Digest, Whole>,
    arriving: HashMap<Digest, Arriving>,
    clock: u64,
    total_bytes: usize,
}

impl Blobs {
    /// A new session: what was arriving starts anew.
    pub fn restart(&mut self) {
        for (_, gone) in self.arriving.drain() {
            self.total_bytes -= gone.bytes.len();
        }
    }

    /// Takes the next part of a blob; parts come in order.
    pub fn add(&mut self, part: BlobPart) -> Result<(), BlobError> {
        let digest = Digest::try_from(part.digest.as_ref())
            .map_err(|_| BlobError::Malformed("its digest is not 32 bytes"))?;
        if part.count == 0 || part.count > MAX_PARTS || part.index >= part.count {
            return Err(BlobError::Malformed("its index or count is out of range"));
        }
        self.clock += 1;
        if let Some(whole) = self.whole.get_mut(&digest) {
            whole.used = self.clock;
            return Ok(());
        }
        if part.index == 0
            && let Some(old) = self.arriving.remove(&digest)
        {
            self.total_bytes -= old.bytes.len();
        }
        if !self.arriving.contains_key(&digest) && self.arriving.len() >= MAX_ARRIVING {
            return Err(BlobError::Malformed("too many blobs arrive at once"));
        }
        let clock = self.clock;
        let arriving = self.arriving.entry(digest).or_insert_with(|| Arriving {
            count: part.count,
            next: 0,
            bytes: BytesMut::new(),
            hasher: sha2::Sha256::new(),
            used: clock,
        });
        if part.index != arriving.next || part.count != arriving.count {
            return Err(BlobError::Malformed("it is not the next part"));
        }
        if arriving.bytes.len() + part.data.len() > MAX_BLOBS_BYTES {
            return Err(BlobError::TooLarge);
        }
        arriving.hasher.update(&part.data);
        arriving.bytes.extend_from_slice(&part.data);
        arriving.next += 1;
        arriving.used = clock;
        self.total_bytes += part.data.len();
        if arriving.next == arriving.count
            && let Some(done) = self.arriving.remove(&digest)
        {
            if Digest::new(done.hasher.finalize().into()) != digest {
                self.total_bytes -= done.bytes.len();
                return Err(BlobError::Mismatch(digest));
            }
            self.whole.insert(
                digest,
                Whole {
                    bytes: done.bytes.freeze(),
                    used: clock,
                },
            );
        }
        self.shrink();
        Ok(())
    }

    /// The blob of this digest.
    pub fn get(&self, digest: &[u8]) -> Option<Bytes> {
        let digest = Digest::try_from(digest).ok()?;
        self.whole.get(&digest).map(|w| w.bytes.clone())
    }

    /// An order named it: it was useful just now.
    pub fn touch(&mut self, digest: &[u8]) {
        self.clock += 1;
        if let Ok(digest) = Digest::try_from(digest)
            && let Some(whole) = self.whole.get_mut(&digest)
        {
            whole.used = self.clock;
        }
    }

    fn shrink(&mut self) {
        while self.total_bytes > MAX_BLOBS_BYTES {
            let whole = self.whole.iter().map(|(d, w)| (w.used, *d));
            let arriving = self.arriving.iter().map(|(d, a)| (a.used, *d));
            let Some((_, oldest)) = whole.chain(arriving).min() else {
                return;
            };
            if let Some(gone) = self.whole.remove(&oldest) {
                self.total_bytes -= gone.bytes.len();
            }
            if let Some(gone) = self.arriving.remove(&oldest) {
                self.total_bytes -= gone.bytes.len();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(data: &[u8], size: usize) -> Vec<BlobPart> {
        let digest = Bytes::copy_from_slice(Digest::sha256(data).as_bytes());
        let count = data.len().div_ceil(size).max(1) as u32;
        (0..count)
            .map(|index| {
                let at = index as usize * size;
                let data = Bytes::copy_from_slice(&data[at..data.len().min(at + size)]);
                BlobPart {
                    digest: digest.clone(),
                    index,
                    count,
                    data,
                }
            })
            .collect()
    }

    fn add_all(blobs: &mut Blobs, parts: Vec<BlobPart>) {
        parts.into_iter().for_each(|p| blobs.add(p).unwrap());
    }

    #[test]
    fn put_together() {
        let mut blobs = Blobs::default();
        for data in [&b"0123456789"[..], b"x", b""] {
            let digest = Digest::sha256(data);
            assert_eq!(blobs.get(digest.as_bytes()), None);
            // Once, and again: the second time changes nothing.
            add_all(&mut blobs, parts(data, 3));
            add_all(&mut blobs, parts(data, 3));
            assert_eq!(blobs.get(digest.as_bytes()).as_deref(), Some(data));
        }
        assert_eq!(blobs.total_bytes, 11);
    }

    #[test]
    fn two_at_once_and_a_restart_in_the_middle() {
        let mut blobs = Blobs::default();
        let (a, b) = (parts(b"aaaaaa", 2), parts(b"bbbbbb", 2));
        blobs.add(a[0].clone()).unwrap();
        blobs.add(b[0].clone()).unwrap();
        blobs.add(b[1].clone()).unwrap();
        blobs.restart();
        assert_eq!(blobs.total_bytes, 0);
        add_all(&mut blobs, b);
        // The first part again starts anew.
        blobs.add(a[0].clone()).unwrap();
        add_all(&mut blobs, a);
        assert_eq!(blobs.total_bytes, 12);
    }

    #[test]
    fn faults_are_refused() {
        let mut blobs = Blobs::default();
        let good = parts(b"0123456789", 3);
        let bad = |change: fn(&mut BlobPart)| {
            let mut part = good[0].clone();
            change(&mut part);
            part
        };
        for part in [
            bad(|p| p.digest = Bytes::from_static(b"short")),
            bad(|p| p.count = 0),
            bad(|p| p.count = MAX_PARTS + 1),
            bad(|p| p.index = 4),
            bad(|p| p.index = 1),
        ] {
            assert!(matches!(blobs.add(part), Err(BlobError::Malformed(_))));
        }
        let mut wrong = parts(b"0123456789", 5);
        wrong[1].data = Bytes::from_static(b"56780");
        blobs.add(wrong[0].clone()).unwrap();
        assert_eq!(
            blobs.add(wrong[1].clone()),
            Err(BlobError::Mismatch(Digest::sha256(b"0123456789")))
        );
        assert_eq!(blobs.get(Digest::sha256(b"0123456789").as_bytes()), None);
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let mut blobs = Blobs::default();
        let data: Vec<Vec<u8>> = (0..4u8).map(|n| vec![n; MAX_BLOBS_BYTES / 3 - 1]).collect();
        for d in &data[..3] {
            add_all(&mut blobs, parts(d, 1 << 20));
        }
        blobs.touch(Digest::sha256(&data[0]).as_bytes());
        add_all(&mut blobs, parts(&data[3], 1 << 20));
        let kept: Vec<_> = data
            .iter()
            .map(|d| blobs.get(Digest::sha256(d).as_bytes()).is_some())
            .collect();
        assert_eq!(kept, [true, false, true, true]);
        assert!(blobs.total_bytes <= MAX_BLOBS_BYTES);
    }
}
