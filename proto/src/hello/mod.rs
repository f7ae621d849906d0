//! The versioned hello that opens every connection between processes (`hello.proto` has the messages).
//!
//! Guaranteed after [`connect`] and [`accept`] returned `Ok`: both ends speak a common protocol version,
//! name the same cluster, and, where a secret is configured, each end proved to the other that it knows the
//! secret, bound to this connection's nonces and to everything both said (so a proof cannot be replayed or
//! moved to another connection). Not guaranteed: secrecy or integrity of what follows; TLS will go below.
//!
//! The proof is HMAC-SHA256 (RFC 2104) over `role || 0 || ClientHello || ServerHello`, each message as it was sent,
//! behind its length, in the manner of SCRAM's bound nonces (RFC 5802).

mod grpc;

pub use grpc::{HelloStream, channel, channel_over, incoming};

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
/// Longest piece of the other end's text in a message.
const MAX_SHOWN_CHARS: usize = 128;

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

/// A bit of [`HelloConfig::features`], frozen: on data connections this end speaks of RDMA first (`peer.proto`).
pub const FEATURE_RDMA: u64 = 1;

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
    let sent = write(stream, &hello).await?;
    let (reply, received): (pb::ServerHello, _) = read(stream).await?;
    if let Some(r) = reply.refusal {
        return Err(refused(&r.code, r.message));
    }
    if !(PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION).contains(&reply.version) {
        let message = format!("the other end chose protocol version {}", reply.version);
        return Err(refused("version_mismatch", message));
    }
    if reply.cluster_id != config.cluster_id {
        return Err(wrong_cluster(&reply.cluster_id, &config.cluster_id));
    }
    let transcript = [sent, received].concat();
    let (theirs, _): (pb::Proof, _) = read(stream).await?;
    let mut own = pb::Proof::default();
    if let Some(secret) = &config.secret {
        verify(secret, b"server", &transcript, &theirs.proof)?;
        own = prove(secret, b"client", &transcript);
    }
    write(stream, &own).await?;
    let (verdict, _): (pb::Verdict, _) = read(stream).await?;
    if let Some(r) = verdict.refusal {
        return Err(refused(&r.code, r.message));
    }
    let features = reply.features & config.features;
    Ok(peer(reply.identity, purpose, reply.version, features))
}

async fn accept_inner<S>(
    stream: &mut S,
    config: &HelloConfig,
    allowed: &[Purpose],
) -> Result<PeerInfo, HelloError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (hello, received): (pb::ClientHello, _) = read(stream).await?;
    let (purpose, version) = match judge(&hello, config, allowed) {
        Ok(accepted) => accepted,
        Err(e) => {
            let refusal = pb::ServerHello {
                refusal: wire_refusal(&e),
                ..Default::default()
            };
            let _ = write(stream, &refusal).await;
            return Err(e);
        }
    };
    let reply = pb::ServerHello {
        version,
        features: config.features,
        cluster_id: config.cluster_id.clone(),
        identity: Some(identity(config)),
        nonce: nonce(),
        refusal: None,
    };
    let sent = write(stream, &reply).await?;
    let transcript = [received, sent].concat();
    let own = config
        .secret
        .as_ref()
        .map(|secret| prove(secret, b"server", &transcript));
    write(stream, &own.unwrap_or_default()).await?;
    let (theirs, _): (pb::Proof, _) = read(stream).await?;
    if let Some(secret) = &config.secret
        && let Err(e) = verify(secret, b"client", &transcript, &theirs.proof)
    {
        let refusal = wire_refusal(&e);
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

/// What the other end is told.
fn wire_refusal(error: &HelloError) -> Option<pb::Refusal> {
    match error {
        HelloError::Refused { code, message } => Some(pb::Refusal {
            code: code.clone(),
            message: message.clone(),
        }),
        HelloError::Io(_) | HelloError::TimedOut => None,
    }
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
    let message = format!(
        "one end belongs to cluster '{}', the other to '{}': check --cluster-id and the address",
        cut(a),
        cut(b)
    );
    refused("wrong_cluster", message)
}

/// The beginning of what a stranger says: neither an answer nor a log line may grow with it.
fn cut(text: &str) -> &str {
    match text.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => &text[..end],
        None => text,
    }
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

fn mac(secret: &Secret, role: &[u8], transcript: &[u8]) -> Hmac<sha2::Sha256> {
    let mut mac = Hmac::<sha2::Sha256>::new_from_slice(&secret.0).expect("HMAC takes a key of any length");
    mac.update(role);
    mac.update(&[0]);
    mac.update(transcript);
    mac
}

fn prove(secret: &Secret, role: &[u8], transcript: &[u8]) -> pb::Proof {
    let proof = mac(secret, role, transcript).finalize().into_bytes();
    pb::Proof {
        proof: proof.to_vec().into(),
    }
}

fn verify(secret: &Secret, role: &[u8], transcript: &[u8], proof: &[u8]) -> Result<(), HelloError> {
    mac(secret, role, transcript).verify_slice(proof).map_err(|_| {
        refused(
            "wrong_secret",
            "the two ends have different cluster secrets: compare their --cluster-secret-file",
        )
    })
}

/// Sends a message and gives its frame.
async fn write<S: AsyncWrite + Unpin>(stream: &mut S, message: &impl Message) -> Result<Vec<u8>, HelloError> {
    let body = message.encode_to_vec();
    if body.len() > MAX_MESSAGE_BYTES as usize {
        let what = format!(
            "a hello of {} bytes: the cluster id or the node id is too long",
            body.len()
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what).into());
    }
    let mut frame = (body.len() as u32).to_be_bytes().to_vec();
    frame.extend(body);
    stream.write_all(&frame).await?;
    stream.flush().await?;
    Ok(frame)
}

/// Receives a message and gives its frame too.
async fn read<M: Message + Default>(
    stream: &mut (impl AsyncRead + Unpin),
) -> Result<(M, Vec<u8>), HelloError> {
    let stranger = || {
        let message = "what arrived is not a Mooncake hello: check the address and the port";
        refused("not_mooncake", message)
    };
    let len = stream.read_u32().await?;
    if len > MAX_MESSAGE_BYTES {
        return Err(stranger());
    }
    let mut frame = len.to_be_bytes().to_vec();
    frame.resize(4 + len as usize, 0);
    stream.read_exact(&mut frame[4..]).await?;
    let message = M::decode(&frame[4..]).map_err(|_| stranger())?;
    Ok((message, frame))
}

#[cfg(test)]
mod tests;
