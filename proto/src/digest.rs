//! Digests: 32 bytes of BLAKE3 or SHA-256.

use serde::{Deserialize, Serialize};
use sha2::Digest as _;
use std::{fmt, str::FromStr};

/// A 32-byte digest. Displays as lower-case hex.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Digest([u8; 32]);

impl Digest {
    /// From its bytes.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// SHA-256 of `bytes`.
    pub fn sha256(bytes: &[u8]) -> Self {
        Self(sha2::Sha256::digest(bytes).into())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text or bytes are not a digest.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("not a 32-byte digest")]
pub struct NotADigest;

impl TryFrom<&[u8]> for Digest {
    type Error = NotADigest;
    fn try_from(bytes: &[u8]) -> Result<Self, NotADigest> {
        bytes.try_into().map(Self).map_err(|_| NotADigest)
    }
}

impl FromStr for Digest {
    type Err = NotADigest;
    /// 64 hex digits, either case.
    fn from_str(text: &str) -> Result<Self, NotADigest> {
        let hex = text.as_bytes();
        if hex.len() != 64 {
            return Err(NotADigest);
        }
        let mut out = [0; 32];
        for (byte, pair) in out.iter_mut().zip(hex.chunks_exact(2)) {
            let digit = |c: u8| (c as char).to_digit(16).ok_or(NotADigest);
            *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
        }
        Ok(Self(out))
    }
}

/// The algorithm of block digests and of the root. The numbers are frozen: they are in the Raft log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Algorithm {
    /// The default.
    #[default]
    Blake3,
    /// For FIPS sites.
    Sha256,
}

impl Algorithm {
    /// Its name in JSON, flags and the root's domain.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Blake3 => "blake3",
            Self::Sha256 => "sha256",
        }
    }

    /// The digest of `bytes`.
    pub fn digest(self, bytes: &[u8]) -> Digest {
        let mut hasher = self.hasher();
        hasher.update(bytes);
        hasher.finish()
    }

    /// A fresh incremental hasher.
    pub fn hasher(self) -> Hasher {
        match self {
            Self::Blake3 => Hasher::Blake3(Box::default()),
            Self::Sha256 => Hasher::Sha256(sha2::Sha256::new()),
        }
    }
}

impl FromStr for Algorithm {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "blake3" => Ok(Self::Blake3),
            "sha256" => Ok(Self::Sha256),
            other => Err(format!("'{other}' is not a digest algorithm (blake3, sha256)")),
        }
    }
}

/// An incremental hasher of either algorithm.
pub enum Hasher {
    /// BLAKE3 (boxed: its state is 2 KiB).
    Blake3(Box<blake3::Hasher>),
    /// SHA-256.
    Sha256(sha2::Sha256),
}

impl Hasher {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Blake3(h) => {
                h.update(bytes);
            }
            Self::Sha256(h) => h.update(bytes),
        }
    }

    /// The digest of all that was added.
    pub fn finish(self) -> Digest {
        match self {
            Self::Blake3(h) => Digest(*h.finalize().as_bytes()),
            Self::Sha256(h) => Digest(h.finalize().into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        // NIST FIPS 180-2 and the BLAKE3 reference test vectors (empty input).
        assert_eq!(
            Algorithm::Sha256.digest(b"abc").to_string(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(
            Algorithm::Blake3.digest(b"").to_string(),
            "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
        );
    }

    #[test]
    fn hex_round_trip() {
        let d = Digest::sha256(b"x");
        assert_eq!(d.to_string().to_uppercase().parse(), Ok(d));
        assert_eq!("zz".repeat(32).parse::<Digest>(), Err(NotADigest));
        assert_eq!("00".parse::<Digest>(), Err(NotADigest));
    }
}
