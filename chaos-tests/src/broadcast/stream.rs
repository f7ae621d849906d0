//! What the links and the disk give by themselves: the measures that everything else is compared with.

use crate::{cluster::http_client, testbed::Testbed};
use anyhow::{Context, Result, ensure};
use futures_util::StreamExt;
use std::{
    fs::File,
    io::Write,
    net::SocketAddrV4,
    path::Path,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

const PORT: u16 = 7001;
const BUFFER_BYTES: usize = 256 << 10;
/// Beyond it the rate does not change any more.
const MOST_DISK_BYTES: u64 = 512 << 20;

/// Bytes per second of one TCP stream from one host to another, from the connection to the last byte received: no disk,
/// no checks.
pub async fn goodput(bed: &mut Testbed, from: &str, to: &str, bytes: u64) -> Result<f64> {
    let address = SocketAddrV4::new(bed.network.host(to)?.address, PORT);
    let receiver = bed.network.host_mut(to)?.runtime()?.clone();
    let sender = bed.network.host_mut(from)?.runtime()?.clone();
    let listener = receiver
        .spawn(TcpListener::bind(address))
        .await?
        .with_context(|| format!("the plain stream cannot listen on {address}"))?;
    let received = receiver.spawn(async move {
        let (mut stream, _) = listener.accept().await?;
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut received = 0;
        loop {
            match stream.read(&mut buffer).await? {
                0 => return anyhow::Ok((received, Instant::now())),
                n => received += n as u64,
            }
        }
    });
    let sent = sender.spawn(async move {
        let mut stream = TcpStream::connect(address).await?;
        let began = Instant::now();
        let buffer = vec![0x5a; BUFFER_BYTES];
        let mut left = bytes;
        while left > 0 {
            let n = left.min(BUFFER_BYTES as u64) as usize;
            stream.write_all(&buffer[..n]).await?;
            left -= n as u64;
        }
        stream.shutdown().await?;
        anyhow::Ok(began)
    });
    let began = sent.await?.context("the plain stream broke at its sender")?;
    let (received, ended) = received
        .await?
        .context("the plain stream broke at its receiver")?;
    ensure!(
        received == bytes,
        "the plain stream carried {received} bytes of {bytes}"
    );
    Ok(bytes as f64 / (ended - began).as_secs_f64())
}

/// How long one download of the whole object takes to the host, with nothing written.
pub async fn download(bed: &mut Testbed, to: &str, url: String, bytes: u64) -> Result<Duration> {
    let runtime = bed.network.host_mut(to)?.runtime()?.clone();
    let http = http_client()?;
    let task = runtime.spawn(async move {
        let began = Instant::now();
        // The client's own time-out is for answers, not for a model.
        let request = http.get(&url).timeout(Duration::from_secs(24 * 3600));
        let mut body = request.send().await?.error_for_status()?.bytes_stream();
        let mut received = 0;
        while let Some(piece) = body.next().await {
            received += piece?.len() as u64;
        }
        ensure!(received == bytes, "{url}: {received} bytes of {bytes} came");
        Ok(began.elapsed())
    });
    task.await?
}

/// Bytes per second that the disk below `folder` takes, the final sync included.
pub fn disk_rate(folder: &Path, bytes: u64) -> Result<f64> {
    let bytes = bytes.min(MOST_DISK_BYTES);
    let path = folder.join("disk-rate.bin");
    let mut file = File::create(&path)?;
    let buffer = vec![0x5a; 1 << 20];
    let began = Instant::now();
    let mut left = bytes;
    while left > 0 {
        let n = left.min(buffer.len() as u64) as usize;
        file.write_all(&buffer[..n])?;
        left -= n as u64;
    }
    file.sync_all()?;
    let took = began.elapsed();
    drop(file);
    std::fs::remove_file(&path)?;
    Ok(bytes as f64 / took.as_secs_f64())
}

/// Memory that programs can have, in bytes.
pub fn available_memory() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let line = line.context("/proc/meminfo has no MemAvailable")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib << 10)
}
