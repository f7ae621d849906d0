//! The encoding of everything durable that is not protobuf: one version byte, then
//! [postcard](https://postcard.jamesmunns.com/wire-format) (deterministic, so digests of it are stable).

use serde::{Serialize, de::DeserializeOwned};

/// Why bytes were not what they should be.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum CodecError {
    /// Nothing there.
    #[error("no bytes where a version byte was expected")]
    Empty,
    /// Written by a newer program (or not by this program at all).
    #[error(
        "encoding version {found} is not known here (the newest known is {known}); was this written by a newer version?"
    )]
    UnknownVersion {
        /// The version byte found.
        found: u8,
        /// The newest version this build reads.
        known: u8,
    },
    /// The right version, but not a valid value.
    #[error("damaged encoding: {0}")]
    Damaged(String),
}

/// Encodes `value` behind `version`.
pub fn encode<T: Serialize>(version: u8, value: &T) -> Vec<u8> {
    // Serialising plain data into memory has no failure of its own.
    postcard::to_extend(value, vec![version]).expect("plain data always encodes")
}

/// Decodes what [`encode`] wrote; bytes left over are an error.
pub fn decode<T: DeserializeOwned>(version: u8, bytes: &[u8]) -> Result<T, CodecError> {
    let (&found, rest) = bytes.split_first().ok_or(CodecError::Empty)?;
    if found != version {
        return Err(CodecError::UnknownVersion {
            found,
            known: version,
        });
    }
    match postcard::take_from_bytes(rest) {
        Ok((value, [])) => Ok(value),
        Ok((_, left)) => Err(CodecError::Damaged(format!("{} bytes left over", left.len()))),
        Err(e) => Err(CodecError::Damaged(e.to_string())),
    }
}
