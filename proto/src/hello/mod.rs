//! The versioned hello that opens every connection between processes (`hello.proto` has the messages).
//!
//! Guaranteed after [`connect`] and [`accept`] returned `Ok`: both ends speak a common protocol version,
//! name the same cluster, and, where a secret is configured, each end proved to the other that it knows the
//! secret, bound to this connection's nonces and to everything both said (so a proof cannot be replayed or
//! moved to another connection). Not guaranteed: secrecy or integrity of what follows; TLS will go below.
//!
//! The proof is HMAC-SHA256 (RFC 2104) over `role || 0 || ClientHello || ServerHello without its proof`, each
//! message behind its length, in the manner of SCRAM's bound nonces (RFC 5802).

mod grpc;

pub use grpc::{HelloStream, channel, incoming};

use crate::{PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, pb::hello as pb};
use hmac::{Hmac, KeyInit, Mac};
use prost::Message;
use std::{fmt, io, net::SocketAddr, path::Path, sync::Arc, time::Duration};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The first field of a hello, so that a stray connection is told apart from an old version.
const MAGIC: &[u8] = b"MOONCAKE";
/// Largest hello message: identities are a few hundred bytes; a stranger must not make us allocate.
const MAX_MESSAGE_BYTES: u32 = 4096;
/// Longest time for the whole exchange: four messages on a connection that is already open.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Shortest secret that is accepted, in bytes.
const MIN_SECRET_BYTES: usize = 16;
const NONCE_BYTES: usize = 32;

/// The cluster's shared secret. Never printed.
#[derive(Clone)]
pub struct Secret(Arc<[u8]>);

impl Secret {
    /// Reads a secret file; white space around the secret is ignored.
    pub fn read_file(path: impl AsRef<Path>) -> Result<Self, String> {
        let path = path.as_ref();
        let text = std::fs::read(path)
            .map_err(|e| format!("cannot read the cluster secret file {}: {e}", path.display()))?;
        Self::new(text.trim_ascii()).map_err(|e| {
            format!(
                "the cluster secret file {}: {e}; make one with: head -c 32 /dev/urandom | base64",
                path.display()
            )
        })
    }

    /// Takes the secret's bytes.
    pub fn new(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() < MIN_SECRET_BYTES {
            return Err(format!(
                "the secret has {} bytes, at least {MIN_SECRET_BYTES} are needed",
                bytes.len()
            ));
        }
        Ok(Self(bytes.into()))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// What this process says of itself.
#[derive(Clone, Debug)]
pub struct HelloConfig {
    /// Both ends must name the same.
    pub cluster_id: String,
    /// `None` only on loopback (see [`check_listen`]).
    pub secret: Option<Secret>,
    /// A client's `host:port`, a master's decimal Raft id.
    pub node_id: String,
    /// The random id on this process's disk.
    pub instance_id: String,
    /// For log lines, e.g. `mooncake_client 0.1.0`.
    pub software: String,
    /// Bit set of optional features; unknown bits are ignored.
    pub features: u64,
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Between masters.
    Raft,
    /// From a node to a master.
    Session,
    /// Between nodes.
    Data,
}

impl From<Purpose> for pb::Purpose {
    fn from(p: Purpose) -> Self {
        match p {
            Purpose::Raft => Self::Raft,
            Purpose::Session => Self::Session,
            Purpose::Data => Self::Data,
        }
    }
}

/// What the other end said, after it was checked.
#[derive(Clone, Debug)]
pub struct PeerInfo {
    /// Its id.
    pub node_id: String,
    /// The random id on its disk.
    pub instance_id: String,
    /// For log lines.
    pub software: String,
    /// What the connection is for.
    pub purpose: Purpose,
    /// The protocol version chosen.
    pub version: u32,
    /// Features both ends have.
    pub features: u64,
}

/// Why a hello failed. `Refused` says the same on both ends.
#[derive(Debug, thiserror::Error)]
pub enum HelloError {
    /// One end refuses the other: trying again without a change of configuration is of no use.
    #[error("refused ({code}): {message}")]
    Refused {
        /// Stable: `not_mooncake`, `version_mismatch`, `wrong_cluster`, `secret_required`,
        /// `secret_not_configured`, `wrong_secret`, `wrong_purpose`.
        code: String,
        /// For a person.
        message: String,
    },
    /// The connection broke.
    #[error("the connection broke during the hello: {0}")]
    Io(#[from] io::Error),
    /// The other end is silent.
    #[error("no hello within {} s: is the other end a Mooncake process?", HANDSHAKE_TIMEOUT.as_secs())]
    TimedOut,
}

impl From<HelloError> for io::Error {
    fn from(e: HelloError) -> Self {
        match e {
            HelloError::Io(e) => e,
            HelloError::Refused { .. } => Self::new(io::ErrorKind::PermissionDenied, e),
            HelloError::TimedOut => Self::new(io::ErrorKind::TimedOut, e),
        }
    }
}

fn refused(code: &str, message: impl Into<String>) -> HelloError {
    HelloError::Refused {
        code: code.into(),
        message: message.into(),
    }
}

/// A listener beyond loopback needs a secret. The error says what to do.
pub fn check_listen(what: &str, address: &SocketAddr, secret: Option<&Secret>) -> Result<(), String> {
    if address.ip().is_loopback() || secret.is_some() {
        return Ok(());
    }
    Err(format!(
        "refusing to listen on {address} ({what}): beyond loopback a cluster secret is required; \
         give --cluster-secret-file FILE to every master and client"
    ))
}

/// The opener's side. The stream is ready for its protocol afterwards.
pub async fn connect<S>(
    stream: &mut S,
    config: &HelloConfig,
    purpose: Purpose,
) -> Result<PeerInfo, HelloError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    timed(connect_inner(stream, config, purpose)).await
}

/// The acceptor's side; `allowed` are the purposes this port serves.
pub async fn accept<S>(
    stream: &mut S,
    config: &HelloConfig,
    allowed: &[Purpose],
) -> Result<PeerInfo, HelloError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    timed(accept_inner(stream, config, allowed)).await
}

async fn timed<T>(exchange: impl Future<Output = Result<T, HelloError>>) -> Result<T, HelloError> {
    tokio::time::timeout(HANDSHAKE_TIMEOUT, exchange)
        .await
        .unwrap_or(Err(HelloError::TimedOut))
}

async fn connect_inner<S>(
    stream: &mut S,
    config: &HelloConfig,
    purpose: Purpose,
) -> Result<PeerInfo, HelloError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let hello = pb::ClientHello {
        magic: MAGIC.into(),
        version_min: PROTOCOL_VERSION_MIN,
        version_max: PROTOCOL_VERSION,
        features: config.features,
        cluster_id: config.cluster_id.clone(),
        purpose: pb::Purpose::from(purpose) as i32,
        identity: Some(identity(config)),
        nonce: nonce(),
        has_secret: config.secret.is_some(),
    };
    write(stream, &hello).await?;
    let mut reply: pb::ServerHello = read(stream).await?;
    if let Some(r) = reply.refusal {
        return Err(refused(&r.code, r.message));
    }
    if !(PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION).contains(&reply.version) {
        return Err(refused(
            "version_mismatch",
            format!("the other end chose protocol version {}", reply.version),
        ));
    }
    if reply.cluster_id != config.cluster_id {
        return Err(wrong_cluster(&reply.cluster_id, &config.cluster_id));
    }
    let proof = std::mem::take(&mut reply.proof);
    let transcript = transcript(&hello, &reply);
    let mut own = prost::bytes::Bytes::new();
    if let Some(secret) = &config.secret {
        verify(secret, b"server", &transcript, &proof)?;
        own = mac(secret, b"client", &transcript)
            .finalize()
            .into_bytes()
            .to_vec()
            .into();
    }
    write(stream, &pb::ClientProof { proof: own }).await?;
    let verdict: pb::Verdict = read(stream).await?;
    if let Some(r) = verdict.refusal {
        return Err(refused(&r.code, r.message));
    }
    Ok(peer(
        reply.identity,
        purpose,
        reply.version,
        reply.features & config.features,
    ))
}

async fn accept_inner<S>(
    stream: &mut S,
    config: &HelloConfig,
    allowed: &[Purpose],
) -> Result<PeerInfo, HelloError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let hello: pb::ClientHello = read(stream).await?;
    let (purpose, version) = match judge(&hello, config, allowed) {
        Ok(accepted) => accepted,
        Err(e) => {
            let HelloError::Refused { code, message } = &e else {
                return Err(e);
            };
            let refusal = Some(pb::Refusal {
                code: code.clone(),
                message: message.clone(),
            });
            let _ = write(
                stream,
                &pb::ServerHello {
                    refusal,
                    ..Default::default()
                },
            )
            .await;
            return Err(e);
        }
    };
    let mut reply = pb::ServerHello {
        version,
        features: config.features,
        cluster_id: config.cluster_id.clone(),
        identity: Some(identity(config)),
        nonce: nonce(),
        proof: Default::default(),
        refusal: None,
    };
    let transcript = transcript(&hello, &reply);
    if let Some(secret) = &config.secret {
        reply.proof = mac(secret, b"server", &transcript)
            .finalize()
            .into_bytes()
            .to_vec()
            .into();
    }
    write(stream, &reply).await?;
    let answer: pb::ClientProof = read(stream).await?;
    if let Some(secret) = &config.secret
        && let Err(e) = verify(secret, b"client", &transcript, &answer.proof)
    {
        let HelloError::Refused { code, message } = &e else {
            return Err(e);
        };
        let refusal = Some(pb::Refusal {
            code: code.clone(),
            message: message.clone(),
        });
        let _ = write(stream, &pb::Verdict { refusal }).await;
        return Err(e);
    }
    write(stream, &pb::Verdict { refusal: None }).await?;
    Ok(peer(
        hello.identity,
        purpose,
        version,
        hello.features & config.features,
    ))
}

fn judge(
    hello: &pb::ClientHello,
    config: &HelloConfig,
    allowed: &[Purpose],
) -> Result<(Purpose, u32), HelloError> {
    if hello.magic != MAGIC {
        return Err(refused(
            "not_mooncake",
            "this port speaks Mooncake's own protocol",
        ));
    }
    let version = hello.version_max.min(PROTOCOL_VERSION);
    if version < hello.version_min.max(PROTOCOL_VERSION_MIN) {
        return Err(refused(
            "version_mismatch",
            format!(
                "one end speaks protocol versions {}-{}, the other {PROTOCOL_VERSION_MIN}-{PROTOCOL_VERSION}: upgrade the older one",
                hello.version_min, hello.version_max
            ),
        ));
    }
    if hello.cluster_id != config.cluster_id {
        return Err(wrong_cluster(&hello.cluster_id, &config.cluster_id));
    }
    let purpose = match hello.purpose() {
        pb::Purpose::Raft => Purpose::Raft,
        pb::Purpose::Session => Purpose::Session,
        pb::Purpose::Data => Purpose::Data,
        pb::Purpose::Unspecified => return Err(refused("wrong_purpose", "the hello names no purpose")),
    };
    if !allowed.contains(&purpose) {
        return Err(refused(
            "wrong_purpose",
            format!("this port does not serve {purpose:?} connections: check the address"),
        ));
    }
    if hello.nonce.len() != NONCE_BYTES {
        return Err(refused("not_mooncake", "the hello's nonce is not 32 bytes"));
    }
    match (&config.secret, hello.has_secret) {
        (Some(_), false) => Err(refused(
            "secret_required",
            format!(
                "cluster '{}' requires its secret: start this process with --cluster-secret-file",
                config.cluster_id
            ),
        )),
        (None, true) => Err(refused(
            "secret_not_configured",
            format!(
                "the process at this address has no secret for cluster '{}': start it with --cluster-secret-file",
                config.cluster_id
            ),
        )),
        _ => Ok((purpose, version)),
    }
}

fn wrong_cluster(a: &str, b: &str) -> HelloError {
    refused(
        "wrong_cluster",
        format!("one end belongs to cluster '{a}', the other to '{b}': check --cluster-id and the address"),
    )
}

fn identity(config: &HelloConfig) -> pb::Identity {
    pb::Identity {
        node_id: config.node_id.clone(),
        instance_id: config.instance_id.clone(),
        software: config.software.clone(),
    }
}

fn peer(identity: Option<pb::Identity>, purpose: Purpose, version: u32, features: u64) -> PeerInfo {
    let i = identity.unwrap_or_default();
    PeerInfo {
        node_id: i.node_id,
        instance_id: i.instance_id,
        software: i.software,
        purpose,
        version,
        features,
    }
}

fn nonce() -> prost::bytes::Bytes {
    let nonce: [u8; NONCE_BYTES] = rand::random();
    nonce.to_vec().into()
}

fn transcript(hello: &pb::ClientHello, reply_without_proof: &pb::ServerHello) -> Vec<u8> {
    let mut out = hello.encode_length_delimited_to_vec();
    out.extend(reply_without_proof.encode_length_delimited_to_vec());
    out
}

fn mac(secret: &Secret, role: &[u8], transcript: &[u8]) -> Hmac<sha2::Sha256> {
    let mut mac = Hmac::<sha2::Sha256>::new_from_slice(&secret.0).expect("HMAC takes a key of any length");
    mac.update(role);
    mac.update(&[0]);
    mac.update(transcript);
    mac
}

fn verify(secret: &Secret, role: &[u8], transcript: &[u8], proof: &[u8]) -> Result<(), HelloError> {
    mac(secret, role, transcript).verify_slice(proof).map_err(|_| {
        refused(
            "wrong_secret",
            "the two ends have different cluster secrets: compare their --cluster-secret-file",
        )
    })
}

async fn write<S: AsyncWrite + Unpin>(stream: &mut S, message: &impl Message) -> Result<(), HelloError> {
    let body = message.encode_to_vec();
    assert!(
        body.len() <= MAX_MESSAGE_BYTES as usize,
        "a hello is small: node and cluster ids are bounded"
    );
    let mut frame = (body.len() as u32).to_be_bytes().to_vec();
    frame.extend(body);
    stream.write_all(&frame).await?;
    stream.flush().await?;
    Ok(())
}

async fn read<M: Message + Default>(stream: &mut (impl AsyncRead + Unpin)) -> Result<M, HelloError> {
    let len = stream.read_u32().await?;
    if len > MAX_MESSAGE_BYTES {
        return Err(refused(
            "not_mooncake",
            "what arrived is not a Mooncake hello: check the address and the port",
        ));
    }
    let mut body = vec![0; len as usize];
    stream.read_exact(&mut body).await?;
    M::decode(body.as_slice()).map_err(|_| {
        refused(
            "not_mooncake",
            "what arrived is not a Mooncake hello: check the address and the port",
        )
    })
}

#[cfg(test)]
mod tests;
