//! The floor's two ends, each a process of its own: this program with [`FLAG`] first.

use super::{Cpu, RECEIVER, SEED, Sample, Setup};
use crate::{
    process::peak_memory_bytes,
    testbed::{
        Testbed, client_host,
        tool::{Start, Tool},
    },
};
use anyhow::{Context, Result, ensure};
use mooncake_proto::{digest::Algorithm, manifest::block_size_for};
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io::{Read, Write},
    net::{SocketAddrV4, TcpListener, TcpStream},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::Instant,
};
use tokio::io::AsyncReadExt;

/// The first argument of an end; the second one is its order.
pub const FLAG: &str = "--as-floor";
const PORT: u16 = 7002;

/// What one end does.
#[derive(Debug, Serialize, Deserialize)]
struct Order {
    receives: bool,
    address: SocketAddrV4,
    file: PathBuf,
    size_bytes: u64,
    block_bytes: u64,
    streams: u64,
}

/// The whole life of one end. The receiver prints what it took.
pub fn main(order: Option<String>) -> Result<()> {
    let order = order.with_context(|| format!("{FLAG} needs an order"))?;
    let order: Order = serde_json::from_str(&order).context("the order")?;
    match order.receives {
        true => println!("{}", serde_json::to_string(&receive(&order)?)?),
        false => send(&order)?,
    }
    Ok(())
}

/// Moves the file from the seed's host to the receiver's.
pub(super) async fn transfer(bed: &Testbed, setup: &Setup, file: &Path) -> Result<Sample> {
    let to = bed.network.host(&client_host(RECEIVER))?;
    let written = bed.cluster.roots[RECEIVER].join("floor.bin");
    let order = |receives, file: &Path| Order {
        receives,
        address: SocketAddrV4::new(to.address, PORT),
        file: file.to_owned(),
        size_bytes: setup.size_bytes,
        block_bytes: block_size_for(setup.size_bytes).into(),
        streams: setup.streams as u64,
    };
    let program = std::env::current_exe()?.display().to_string();
    let start = |client, name: &str, order: Order| {
        anyhow::Ok(Start {
            namespace: &bed.network.host(&client_host(client))?.namespace,
            dir: bed.dir(),
            name: name.to_owned(),
            program: &program,
            args: vec![FLAG.to_owned(), serde_json::to_string(&order)?],
            stdin: Stdio::null(),
            piped: order.receives,
        })
    };
    let mut receiver = Tool::start(start(RECEIVER, "floor-receiver", order(true, &written))?)?;
    receiver.listens(PORT).await?;
    let mut sender = Tool::start(start(SEED, "floor-sender", order(false, file))?)?;
    let mut said = String::new();
    receiver.stdout()?.read_to_string(&mut said).await?;
    sender.finished().await?;
    receiver.finished().await?;
    std::fs::remove_file(&written)?;
    serde_json::from_str(&said).with_context(|| format!("the floor's receiver said '{said}'"))
}

/// Stream `i` of `n` carries the blocks `i`, `i + n`, … in this order.
fn blocks(order: &Order, stream: u64) -> impl Iterator<Item = (u64, usize)> + use<> {
    let (size, block, streams) = (order.size_bytes, order.block_bytes, order.streams);
    (stream..size.div_ceil(block))
        .step_by(streams as usize)
        .map(move |i| (i * block, block.min(size - i * block) as usize))
}

fn receive(order: &Order) -> Result<Sample> {
    let listener = TcpListener::bind(order.address)?;
    let connections = (0..order.streams).map(|_| Ok(listener.accept()?.0));
    let connections: Vec<TcpStream> = connections.collect::<Result<_>>()?;
    let (began, before) = (Instant::now(), Cpu::of(std::process::id())?);
    // Counted, as the product's is.
    let file = File::create(&order.file)?;
    let flags = rustix::fs::FallocateFlags::empty();
    // As the product does; not every filesystem can.
    let _ = rustix::fs::fallocate(&file, flags, 0, order.size_bytes);
    std::thread::scope(|scope| {
        let threads: Vec<_> = connections
            .into_iter()
            .map(|connection| scope.spawn(|| take(order, connection, &file)))
            .collect();
        for thread in threads {
            thread.join().expect("the floor does not panic")?;
        }
        anyhow::Ok(())
    })?;
    file.sync_all()?;
    Ok(Sample {
        took_s: began.elapsed().as_secs_f64(),
        cpu: Cpu::of(std::process::id())? - before,
        peak_rss_bytes: peak_memory_bytes(std::process::id())?,
    })
}

/// One read into a block, its digest while it is hot, one write.
fn take(order: &Order, mut connection: TcpStream, file: &File) -> Result<()> {
    let mut number = [0; 8];
    connection.write_all(b"!")?;
    connection.read_exact(&mut number)?;
    let mut block = vec![0; order.block_bytes as usize];
    for (at, len) in blocks(order, u64::from_le_bytes(number)) {
        let block = &mut block[..len];
        connection.read_exact(block)?;
        std::hint::black_box(Algorithm::default().digest(block));
        file.write_all_at(block, at)?;
    }
    Ok(())
}

fn send(order: &Order) -> Result<()> {
    let file = File::open(&order.file)?;
    let connections = (0..order.streams).map(|_| Ok(TcpStream::connect(order.address)?));
    let connections: Vec<TcpStream> = connections.collect::<Result<_>>()?;
    std::thread::scope(|scope| {
        let file = &file;
        let threads: Vec<_> = (0..)
            .zip(connections)
            .map(|(stream, connection)| scope.spawn(move || give(order, stream, connection, file)))
            .collect();
        for thread in threads {
            thread.join().expect("the floor does not panic")?;
        }
        Ok(())
    })
}

fn give(order: &Order, stream: u64, mut connection: TcpStream, file: &File) -> Result<()> {
    // The receiver's clock is running when it says so.
    connection.read_exact(&mut [0])?;
    connection.write_all(&stream.to_le_bytes())?;
    for (mut at, mut len) in blocks(order, stream) {
        while len > 0 {
            let sent = rustix::fs::sendfile(&connection, file, Some(&mut at), len)?;
            ensure!(sent > 0, "{} is shorter than it was", order.file.display());
            len -= sent;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn streams_carry_every_block_once() {
        for (size, streams) in [(1, 1), (10, 3), (1000, 2), (1024, 4)] {
            let order = Order {
                receives: true,
                address: SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0),
                file: PathBuf::new(),
                size_bytes: size,
                block_bytes: 10,
                streams,
            };
            let mut all: Vec<_> = (0..streams).flat_map(|i| blocks(&order, i)).collect();
            all.sort_unstable();
            let mut at = 0;
            for (start, len) in all {
                assert_eq!(start, at, "{size} in {streams}");
                at += len as u64;
            }
            assert_eq!(at, size);
        }
    }

    #[test]
    fn what_is_received_is_what_is_sent() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        let bytes: Vec<u8> = (0..100_003u32).map(|i| (i % 251) as u8).collect();
        std::fs::write(&from, &bytes).unwrap();
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap().to_string().parse().unwrap();
        drop(free);
        let order = |receives, file: &Path| Order {
            receives,
            address,
            file: file.to_owned(),
            size_bytes: bytes.len() as u64,
            block_bytes: 4096,
            streams: 3,
        };
        let (receives, sends) = (order(true, &to), order(false, &from));
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| receive(&receives));
            // It may not listen yet.
            while send(&sends).is_err() && !receiver.is_finished() {
                std::thread::yield_now();
            }
            receiver.join().unwrap().unwrap();
        });
        assert_eq!(std::fs::read(&to).unwrap(), bytes);
    }
}
