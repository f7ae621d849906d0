//! The frame around every value in the database: version, checksum, payload.
//!
//! ```text
//! version u8 = 1 | crc32 u32 LE over (key length u32 LE, key, version, payload) | payload
//! ```
//!
//! The key is part of the checksum, so a good value under a wrong key is found too. RocksDB has checksums of its
//! own; these ones also cover what RocksDB did to the value between the call and its own checksum.
//!
//! Not guaranteed: that a *missing* record is noticed (the log's order is checked by whoever reads it), nor
//! protection against a person who computes checksums.

/// Frozen: the only version so far.
const VERSION: u8 = 1;
const HEADER_BYTES: usize = 5;

/// A value that is not what was written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("it is {0} bytes long, shorter than its header")]
    Short(usize),
    #[error("its format version is {0}, this program knows {VERSION}")]
    Version(u8),
    #[error("its checksum is {stored:08x}, its content gives {computed:08x}")]
    Checksum { stored: u32, computed: u32 },
}

fn checksum(key: &[u8], version: u8, payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&(key.len() as u32).to_le_bytes());
    hasher.update(key);
    hasher.update(&[version]);
    hasher.update(payload);
    hasher.finalize()
}

/// Frames `payload` for `key`.
pub(crate) fn seal(key: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut value = Vec::with_capacity(HEADER_BYTES + payload.len());
    value.push(VERSION);
    value.extend_from_slice(&checksum(key, VERSION, payload).to_le_bytes());
    value.extend_from_slice(payload);
    value
}

/// Checks a value read under `key` and gives its payload.
pub(crate) fn open<'a>(key: &[u8], value: &'a [u8]) -> Result<&'a [u8], FrameError> {
    let Some((header, payload)) = value.split_at_checked(HEADER_BYTES) else {
        return Err(FrameError::Short(value.len()));
    };
    let stored = u32::from_le_bytes([header[1], header[2], header[3], header[4]]);
    let computed = checksum(key, header[0], payload);
    // The checksum first: a version byte that a bit flipped in is damage, not news from the future.
    if stored != computed {
        return Err(FrameError::Checksum { stored, computed });
    }
    if header[0] != VERSION {
        return Err(FrameError::Version(header[0]));
    }
    Ok(payload)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_every_cut_and_every_other_key_is_found() {
        let value = seal(b"key", b"payload");
        assert_eq!(open(b"key", &value).unwrap(), b"payload");
        for bit in 0..value.len() * 8 {
            let mut bad = value.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(
                matches!(open(b"key", &bad), Err(FrameError::Checksum { .. })),
                "bit {bit}"
            );
        }
        for end in 0..value.len() {
            assert!(open(b"key", &value[..end]).is_err(), "cut at {end}");
        }
        assert!(open(b"kez", &value).is_err());
    }

    #[test]
    fn the_layout_is_frozen() {
        assert_eq!(
            seal(b"k", b"v"),
            [&[1][..], &checksum(b"k", 1, b"v").to_le_bytes(), b"v"].concat()
        );
        assert_eq!(
            checksum(b"k", 1, b"v"),
            crc32fast::hash(&[1, 0, 0, 0, b'k', 1, b'v'])
        );
    }

    #[test]
    fn a_newer_version_is_told_from_damage() {
        let mut value = vec![2];
        value.extend_from_slice(&checksum(b"k", 2, b"v").to_le_bytes());
        value.push(b'v');
        assert_eq!(open(b"k", &value), Err(FrameError::Version(2)));
    }
}
