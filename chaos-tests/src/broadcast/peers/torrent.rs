//! As much of BitTorrent as a peer needs from outside: the metainfo of one file, and a tracker that knows everybody.

use anyhow::Result;
use axum::{
    Router,
    extract::{ConnectInfo, State},
    routing::get,
};
use sha1::{Digest, Sha1};
use std::{
    fs::File,
    io::{self, Read},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
};
use tokio::net::TcpListener;

/// Bounds of a piece, and how many there are about: what makers of torrents choose.
const LEAST_PIECE_BYTES: u64 = 256 << 10;
const MOST_PIECE_BYTES: u64 = 16 << 20;
const PIECES: u64 = 2048;
/// Seconds until a client asks again.
const ANNOUNCE_EVERY_S: u32 = 5;

/// One file's pieces and their SHA-1.
#[derive(Clone, Debug)]
pub struct Torrent {
    name: String,
    size_bytes: u64,
    piece_bytes: u64,
    hashes: Vec<u8>,
}

impl Torrent {
    /// Reads the whole file.
    pub fn of(file: &Path, name: &str) -> Result<Self> {
        let mut file = File::open(file)?;
        let size_bytes = file.metadata()?.len();
        let piece_bytes = piece_bytes(size_bytes);
        let mut piece = Vec::with_capacity(piece_bytes as usize);
        let mut hashes = Vec::new();
        loop {
            piece.clear();
            io::Read::by_ref(&mut file)
                .take(piece_bytes)
                .read_to_end(&mut piece)?;
            if piece.is_empty() {
                break;
            }
            hashes.extend_from_slice(&Sha1::digest(&piece));
        }
        Ok(Self {
            name: name.to_owned(),
            size_bytes,
            piece_bytes,
            hashes,
        })
    }

    /// The `.torrent` file (BEP 3).
    pub fn metainfo(&self, announce: &str) -> Vec<u8> {
        let mut out = Vec::new();
        out.push(b'd');
        text(&mut out, b"announce");
        text(&mut out, announce.as_bytes());
        text(&mut out, b"info");
        out.push(b'd');
        text(&mut out, b"length");
        number(&mut out, self.size_bytes);
        text(&mut out, b"name");
        text(&mut out, self.name.as_bytes());
        text(&mut out, b"piece length");
        number(&mut out, self.piece_bytes);
        text(&mut out, b"pieces");
        text(&mut out, &self.hashes);
        out.extend(b"ee");
        out
    }
}

/// A power of two.
fn piece_bytes(size_bytes: u64) -> u64 {
    let wanted = size_bytes.div_ceil(PIECES).next_power_of_two();
    wanted.clamp(LEAST_PIECE_BYTES, MOST_PIECE_BYTES)
}

fn text(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend(format!("{}:", bytes.len()).bytes());
    out.extend_from_slice(bytes);
}

fn number(out: &mut Vec<u8>, number: u64) {
    out.extend(format!("i{number}e").bytes());
}

/// Where everybody listens.
#[derive(Debug)]
pub struct Swarm {
    /// All of them, the seed too.
    pub hosts: Vec<Ipv4Addr>,
    /// Everywhere the same.
    pub port: u16,
}

impl Swarm {
    /// What a tracker tells one of them: all others, in compact form (BEP 23).
    fn answer(&self, asks: IpAddr) -> Vec<u8> {
        let mut peers = Vec::new();
        for host in self.hosts.iter().filter(|host| IpAddr::V4(**host) != asks) {
            peers.extend_from_slice(&host.octets());
            peers.extend_from_slice(&self.port.to_be_bytes());
        }
        let mut out = Vec::new();
        out.push(b'd');
        text(&mut out, b"interval");
        number(&mut out, ANNOUNCE_EVERY_S.into());
        text(&mut out, b"peers");
        text(&mut out, &peers);
        out.push(b'e');
        out
    }
}

/// Answers announcements for one torrent until it is aborted. It knows everybody from the start, which is more than a
/// real one does: nobody has to wait for others to be announced.
pub async fn track(listener: TcpListener, swarm: Swarm) -> io::Result<()> {
    let app = Router::new()
        .route(
            "/announce",
            get(
                |ConnectInfo(from): ConnectInfo<SocketAddr>, State(swarm): State<Arc<Swarm>>| async move {
                    swarm.answer(from.ip())
                },
            ),
        )
        .with_state(Arc::new(swarm))
        .into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, app).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metainfo_of_a_small_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a");
        std::fs::write(&file, "abc").unwrap();
        let mut wanted =
            b"d8:announce8:http://t4:infod6:lengthi3e4:name1:m12:piece lengthi262144e6:pieces20:".to_vec();
        // FIPS 180: SHA-1 of "abc".
        wanted.extend([
            0xa9, 0x99, 0x3e, 0x36, 0x47, 0x06, 0x81, 0x6a, 0xba, 0x3e, 0x25, 0x71, 0x78, 0x50, 0xc2, 0x6c,
            0x9c, 0xd0, 0xd8, 0x9d,
        ]);
        wanted.extend(b"ee");
        assert_eq!(Torrent::of(&file, "m").unwrap().metainfo("http://t"), wanted);
    }

    #[test]
    fn every_piece_is_hashed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a");
        std::fs::write(&file, vec![7; (LEAST_PIECE_BYTES * 2 + 1) as usize]).unwrap();
        let torrent = Torrent::of(&file, "m").unwrap();
        assert_eq!(torrent.hashes.len(), 3 * 20);
        assert_eq!(torrent.hashes[..20], torrent.hashes[20..40]);
        assert_eq!(torrent.hashes[40..], Sha1::digest([7])[..]);
    }

    #[test]
    fn pieces_are_about_as_many_whatever_the_size() {
        assert_eq!(piece_bytes(1), 256 << 10);
        assert_eq!(piece_bytes(512 << 20), 256 << 10);
        assert_eq!(piece_bytes((512 << 20) + 1), 512 << 10);
        assert_eq!(piece_bytes(1 << 40), 16 << 20);
    }

    #[test]
    fn a_tracker_tells_each_of_the_others() {
        let swarm = Swarm {
            hosts: vec![Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)],
            port: 6881,
        };
        let answer = swarm.answer(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)));
        assert_eq!(answer, b"d8:intervali5e5:peers6:\x0a\x00\x00\x02\x1a\xe1e");
    }
}
