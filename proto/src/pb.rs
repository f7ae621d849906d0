//! Generated protobuf messages and services, one module per `.proto` file (documented there).
#![allow(missing_docs, clippy::all)]

pub mod hello {
    include!(concat!(env!("OUT_DIR"), "/mooncake.hello.v1.rs"));
}
pub mod peer {
    include!(concat!(env!("OUT_DIR"), "/mooncake.peer.v1.rs"));
}
pub mod raft {
    include!(concat!(env!("OUT_DIR"), "/mooncake.raft.v1.rs"));
}
pub mod session {
    include!(concat!(env!("OUT_DIR"), "/mooncake.session.v1.rs"));

    /// Lossless conversions between the wire form and the crate's own types live here so that the master
    /// and the client share them.
    mod convert {
        use super::*;
        use crate::digest::{Algorithm, Digest};

        impl From<crate::ids::ModelRef> for ModelRef {
            fn from(m: crate::ids::ModelRef) -> Self {
                Self {
                    model_id: m.model_id,
                    revision: m.revision,
                    format: m.format,
                    provider: m.provider,
                }
            }
        }

        impl From<ModelRef> for crate::ids::ModelRef {
            fn from(m: ModelRef) -> Self {
                Self {
                    model_id: m.model_id,
                    revision: m.revision,
                    format: m.format,
                    provider: m.provider,
                }
            }
        }

        impl From<Algorithm> for DigestAlgorithm {
            fn from(a: Algorithm) -> Self {
                match a {
                    Algorithm::Blake3 => Self::Blake3,
                    Algorithm::Sha256 => Self::Sha256,
                }
            }
        }

        impl TryFrom<DigestAlgorithm> for Algorithm {
            type Error = &'static str;
            fn try_from(a: DigestAlgorithm) -> Result<Self, Self::Error> {
                match a {
                    DigestAlgorithm::Blake3 => Ok(Self::Blake3),
                    DigestAlgorithm::Sha256 => Ok(Self::Sha256),
                    DigestAlgorithm::Unspecified => Err("digest algorithm is not set"),
                }
            }
        }

        impl From<crate::manifest::Seal> for Seal {
            fn from(s: crate::manifest::Seal) -> Self {
                Self {
                    block_size_bytes: s.block_size_bytes,
                    algorithm: DigestAlgorithm::from(s.algorithm) as i32,
                    root: s.root.as_bytes().to_vec().into(),
                }
            }
        }

        impl TryFrom<Seal> for crate::manifest::Seal {
            type Error = &'static str;
            fn try_from(s: Seal) -> Result<Self, Self::Error> {
                Ok(Self {
                    block_size_bytes: s.block_size_bytes,
                    algorithm: s.algorithm().try_into()?,
                    root: Digest::try_from(s.root.as_ref()).map_err(|_| "seal root is not 32 bytes")?,
                })
            }
        }
    }
}
