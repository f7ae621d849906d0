//! The frame header of a data connection (`peer.proto` has the layout).

use mooncake_proto::manifest::BLOCK_SIZE_RANGE;
use std::io;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 20;
/// Largest control message: 4096 digests of 32 bytes, twice over.
pub const MAX_CONTROL_BYTES: u32 = 256 << 10;
/// Largest set up: an endpoint, or a reason.
pub const MAX_SET_UP_BYTES: u32 = 4 << 10;
/// Largest grant: three numbers.
const MAX_GRANT_BYTES: u32 = 64;
const MAGIC: [u8; 4] = *b"MKPF";

/// What follows a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One `PeerMessage`.
    Control,
    /// One block.
    Block,
    /// How blocks will go: first on a connection, before anything else.
    SetUp,
    /// Where in the sender's registered memory a block is.
    Granted,
    /// The block was read from there.
    Done,
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What follows.
    pub kind: Kind,
    /// How many bytes follow.
    pub len: u32,
    /// Of a block: the request that it answers.
    pub id: u64,
}

impl Header {
    /// Its bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[..4].copy_from_slice(&MAGIC);
        out[4] = match self.kind {
            Kind::Control => 1,
            Kind::Block => 2,
            Kind::SetUp => 3,
            Kind::Granted => 4,
            Kind::Done => 5,
        };
        out[8..12].copy_from_slice(&self.len.to_be_bytes());
        out[12..].copy_from_slice(&self.id.to_be_bytes());
        out
    }

    /// Reads and checks a header: nothing larger than the bounds gets past here.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> io::Result<Self> {
        let bad = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        if bytes[..4] != MAGIC || bytes[5..8] != [0; 3] {
            return Err(bad("the peer sent something that is no frame".into()));
        }
        let len = u32::from_be_bytes(bytes[8..12].try_into().expect("4 bytes"));
        let id = u64::from_be_bytes(bytes[12..].try_into().expect("8 bytes"));
        let (kind, max) = match bytes[4] {
            1 => (Kind::Control, MAX_CONTROL_BYTES),
            2 => (Kind::Block, *BLOCK_SIZE_RANGE.end()),
            3 => (Kind::SetUp, MAX_SET_UP_BYTES),
            4 => (Kind::Granted, MAX_GRANT_BYTES),
            5 => (Kind::Done, 0),
            other => return Err(bad(format!("the peer sent a frame of unknown kind {other}"))),
        };
        if len > max {
            return Err(bad(format!(
                "the peer announced a {kind:?} frame of {len} bytes, at most {max} are allowed"
            )));
        }
        Ok(Self { kind, len, id })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_layout_is_frozen() {
        let h = Header {
            kind: Kind::Block,
            len: 0x0010_0203,
            id: 0x0102_0304_0506_0708,
        };
        let bytes = h.encode();
        assert_eq!(
            &bytes,
            b"MKPF\x02\0\0\0\x00\x10\x02\x03\x01\x02\x03\x04\x05\x06\x07\x08"
        );
        assert_eq!(Header::decode(&bytes).unwrap(), h);
    }

    #[test]
    fn bad_headers_are_refused() {
        let good = Header {
            kind: Kind::Control,
            len: MAX_CONTROL_BYTES,
            id: 0,
        };
        assert!(Header::decode(&good.encode()).is_ok());
        assert!(
            Header::decode(
                &Header {
                    len: MAX_CONTROL_BYTES + 1,
                    ..good
                }
                .encode()
            )
            .is_err()
        );
        let block = Header {
            kind: Kind::Block,
            len: 4 << 20,
            id: 1,
        };
        assert!(Header::decode(&block.encode()).is_ok());
        assert!(
            Header::decode(
                &Header {
                    len: (4 << 20) + 1,
                    ..block
                }
                .encode()
            )
            .is_err()
        );
        for (kind, most) in [(Kind::SetUp, 4096), (Kind::Granted, 64), (Kind::Done, 0)] {
            let largest = Header {
                kind,
                len: most,
                id: 1,
            };
            assert_eq!(Header::decode(&largest.encode()).unwrap(), largest);
            let larger = Header {
                len: most + 1,
                ..largest
            };
            assert!(Header::decode(&larger.encode()).is_err(), "{kind:?}");
        }
        let mut unknown = good.encode();
        unknown[4] = 6;
        assert!(Header::decode(&unknown).is_err());
        for at in 0..8 {
            let mut bytes = good.encode();
            bytes[at] ^= 0x80;
            assert!(Header::decode(&bytes).is_err(), "byte {at}");
        }
    }
}
