//! Tries the transport alone, without a cluster: what preflight sees, and one machine's blocks read by another. The numbers
//! compare with those of `ib_read_bw`.
//!
//! For networks that are one's own: whoever reaches the port of `serve` gets the keys that a cluster only gives to members.

use anyhow::{Context, bail, ensure};
use clap::{Args, Parser, Subcommand};
use mooncake_rdma::{
    Config, Endpoint, Gid, GidKind, Mtu, Rdma, Remote, SetUpError, connection::parts, pool::MAX_SLAB_BYTES,
};
use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::Semaphore,
};

/// A block's time to be read: generous, for machines that are emulated.
const BLOCK_TIME: Duration = Duration::from_secs(60);
/// Bytes of an announcement: number, address, key, length.
const GRANT_BYTES: usize = 24;

#[derive(Parser)]
#[command(about = "Tries the RDMA transport alone")]
struct Cli {
    #[command(flatten)]
    rdma: RdmaArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Args)]
struct RdmaArgs {
    /// Use this device only; repeatable
    #[arg(long, global = true)]
    rdma_device: Vec<String>,
    /// Use this port only
    #[arg(long, global = true)]
    rdma_port: Option<u8>,
    /// Use this entry of the GID table
    #[arg(long, global = true)]
    rdma_gid_index: Option<u32>,
    /// At most this path MTU, in bytes
    #[arg(long, global = true)]
    rdma_mtu: Option<u32>,
    /// Registered memory, in MiB
    #[arg(long, global = true, default_value_t = 64)]
    memory_mib: usize,
    /// Blocks under way at once
    #[arg(long, global = true, default_value_t = 8)]
    depth: u32,
    /// Microseconds to look for completions before sleeping
    #[arg(long, global = true, default_value_t = 0)]
    spin_us: u64,
}

#[derive(Subcommand)]
enum Command {
    /// What can be used, and what is the matter with the rest; exit status 1 if nothing can
    Devices,
    /// Serves a file's blocks until it is stopped
    Serve {
        /// Where to listen
        address: String,
        /// What to serve; without it a file of 64 MiB is made
        #[arg(long)]
        file: Option<PathBuf>,
        /// Bytes of a block
        #[arg(long, default_value_t = 1 << 20)]
        block: u32,
    },
    /// Reads blocks into memory, and says how fast
    Fetch {
        /// Of the server
        address: String,
        /// Bytes to read, the file again and again
        #[arg(long, default_value_t = 64 << 20)]
        bytes: u64,
        /// So many connections, one block each
        #[arg(long)]
        connections: Option<u32>,
        /// Uses a key that is not the slab's: has to fail
        #[arg(long)]
        wrong_key: bool,
        /// Compares what was read with this copy of the file
        #[arg(long)]
        compare: Option<PathBuf>,
    },
}

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    let mtu = match cli.rdma.rdma_mtu {
        Some(bytes) => Some(Mtu::from_bytes(bytes).context("an MTU is 256, 512, 1024, 2048 or 4096")?),
        None => None,
    };
    let config = Config {
        devices: cli.rdma.rdma_device,
        port: cli.rdma.rdma_port,
        gid_index: cli.rdma.rdma_gid_index,
        mtu,
        traffic_class: 0,
        memory_bytes: cli.rdma.memory_mib << 20,
        depth: cli.rdma.depth,
        spin: Duration::from_micros(cli.rdma.spin_us),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let rdma = Rdma::start(config)?;
        match cli.command {
            Command::Devices => devices(&rdma),
            Command::Serve { address, file, block } => serve(&rdma, &address, file, block).await,
            Command::Fetch {
                address,
                bytes,
                connections,
                wrong_key,
                compare,
            } => {
                let compare = compare.map(std::fs::read).transpose()?;
                match connections {
                    Some(count) => {
                        for _ in 0..count {
                            fetch(&rdma, &address, 1, wrong_key, None).await?;
                        }
                        println!("{count} connections, one block each");
                        Ok(())
                    }
                    None => fetch(&rdma, &address, bytes, wrong_key, compare.as_deref()).await,
                }
            }
        }
    })
}

fn devices(rdma: &Rdma) -> anyhow::Result<()> {
    let report = rdma.report();
    for way in &report.ways {
        let (mtu, message) = (way.mtu.bytes(), way.largest_message);
        println!(
            "{} port {}: {:?}, MTU {mtu}, messages up to {message} bytes",
            way.device, way.port, way.gid
        );
    }
    for finding in &report.findings {
        println!("{finding}");
    }
    ensure!(report.is_usable(), "no RDMA device can be used");
    Ok(())
}

fn write_endpoint(e: &Endpoint) -> String {
    let gid = u128::from_be_bytes(e.gid.raw);
    let kind = e.gid.kind.number();
    format!(
        "{} {} {gid:032x} {kind} {} {} {}\n",
        e.queue_pair,
        e.first_packet,
        e.lid,
        e.mtu.number(),
        e.reads
    )
}

fn read_endpoint(line: &str) -> anyhow::Result<Endpoint> {
    let words: Vec<_> = line.split_whitespace().collect();
    ensure!(words.len() == 7, "the other end says: {}", line.trim());
    let number = |at: usize| words[at].parse::<u32>();
    Ok(Endpoint {
        queue_pair: number(0)?,
        first_packet: number(1)?,
        gid: Gid {
            index: 0,
            kind: GidKind::from_number(number(3)?).context("a GID of a kind that is not known")?,
            raw: u128::from_str_radix(words[2], 16)?.to_be_bytes(),
        },
        lid: number(4)?.try_into()?,
        mtu: Mtu::from_number(number(5)?).context("an MTU that is none")?,
        reads: number(6)?.try_into()?,
    })
}

async fn serve(rdma: &Arc<Rdma>, address: &str, file: Option<PathBuf>, block: u32) -> anyhow::Result<()> {
    ensure!(
        (1..=MAX_SLAB_BYTES as u32).contains(&block),
        "a block has 1 to {MAX_SLAB_BYTES} bytes"
    );
    let file = match file {
        Some(path) => File::open(&path).with_context(|| format!("cannot open {}", path.display()))?,
        None => pattern_file()?,
    };
    ensure!(
        file.metadata()?.len() >= u64::from(block),
        "the file is smaller than a block"
    );
    let file = Arc::new(file);
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address}"))?;
    println!("serving on {}", listener.local_addr()?);
    loop {
        let (stream, from) = listener.accept().await?;
        let (rdma, file) = (rdma.clone(), file.clone());
        tokio::spawn(async move {
            if let Err(error) = serve_one(rdma, stream, file, block).await {
                eprintln!("{from}: {error:#}");
            }
        });
    }
}

/// 64 MiB in which every eight bytes say where they are; gone when it is closed.
fn pattern_file() -> anyhow::Result<File> {
    let path = std::env::temp_dir().join(format!("rdma_probe.{}", std::process::id()));
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)?;
    std::fs::remove_file(&path)?;
    for at in (0..64 << 20).step_by(1 << 20) {
        let words = (0..(1 << 20) / 8).flat_map(|i| (at + 8 * i as u64).to_le_bytes());
        file.write_all_at(&words.collect::<Vec<_>>(), at)?;
    }
    Ok(file)
}

async fn serve_one(rdma: Arc<Rdma>, stream: TcpStream, file: Arc<File>, block: u32) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    let (read, mut write) = stream.into_split();
    let mut read = BufReader::new(read);
    let mut line = String::new();
    read.read_line(&mut line).await?;
    let (bytes, offer) = line.split_once(' ').context("no offer")?;
    let (bytes, offer): (u64, _) = (bytes.parse()?, read_endpoint(offer)?);
    let blocks = bytes.div_ceil(block.into());
    let keeper = rdma.clone();
    let answered = tokio::task::spawn_blocking(move || keeper.answer(&offer)).await?;
    let (server, endpoint) = match answered {
        Ok(ok) => ok,
        Err(error) => {
            write.write_all(format!("{error}\n").as_bytes()).await?;
            return Err(error.into());
        }
    };
    let server = Arc::new(server);
    write
        .write_all(format!("{block} {}", write_endpoint(&endpoint)).as_bytes())
        .await?;
    let credits = Arc::new(Semaphore::new(rdma.config().depth as usize));
    let granting = grant_all(&rdma, &server, &mut write, (file, block, blocks), credits);
    let releasing = async {
        for _ in 0..blocks {
            server.done(read.read_u64().await?)?;
        }
        anyhow::Ok(())
    };
    tokio::try_join!(granting, releasing)?;
    Ok(())
}

async fn grant_all(
    rdma: &Arc<Rdma>,
    server: &Arc<mooncake_rdma::Server>,
    write: &mut OwnedWriteHalf,
    (file, block, blocks): (Arc<File>, u32, u64),
    credits: Arc<Semaphore>,
) -> anyhow::Result<()> {
    let whole = file.metadata()?.len() / u64::from(block);
    for id in 0..blocks {
        let credit = credits.clone().acquire_owned().await?;
        let room = rdma.serving().room(block as usize).await;
        let (device, file) = (server.device().clone(), file.clone());
        let offset = id % whole * u64::from(block);
        let filled = tokio::task::spawn_blocking(move || {
            let mut lease = room.take(&device)?;
            file.read_exact_at(lease.bytes_mut(block as usize), offset)?;
            anyhow::Ok(lease)
        });
        let lease = filled.await??;
        let at = server.grant(id, lease, BLOCK_TIME, Box::new(credit));
        let mut frame = Vec::with_capacity(GRANT_BYTES);
        frame.extend_from_slice(&id.to_be_bytes());
        frame.extend_from_slice(&at.address.to_be_bytes());
        frame.extend_from_slice(&at.key.to_be_bytes());
        frame.extend_from_slice(&block.to_be_bytes());
        write.write_all(&frame).await?;
    }
    Ok(())
}

async fn fetch(
    rdma: &Arc<Rdma>,
    address: &str,
    bytes: u64,
    wrong_key: bool,
    compare: Option<&[u8]>,
) -> anyhow::Result<()> {
    let stream = TcpStream::connect(address)
        .await
        .with_context(|| format!("cannot connect to {address}"))?;
    stream.set_nodelay(true)?;
    let (read, mut write) = stream.into_split();
    let mut read = BufReader::new(read);
    let keeper = rdma.clone();
    let offer = tokio::task::spawn_blocking(move || keeper.offer()).await?;
    let offer = offer.map_err(|e: SetUpError| anyhow::anyhow!("{e}"))?;
    let way = offer.describe();
    write
        .write_all(format!("{bytes} {}", write_endpoint(&offer.endpoint())).as_bytes())
        .await?;
    let mut line = String::new();
    read.read_line(&mut line).await?;
    let Some((block, endpoint)) = line.split_once(' ') else {
        bail!("the server closed the connection");
    };
    let (Ok(block), Ok(endpoint)) = (block.parse::<u32>(), read_endpoint(endpoint)) else {
        bail!("the server says: {}", line.trim());
    };
    ensure!(
        (1..=MAX_SLAB_BYTES as u32).contains(&block),
        "the server has blocks of {block} bytes"
    );
    let blocks = bytes.div_ceil(block.into());
    let reader = tokio::task::spawn_blocking(move || offer.connect(&endpoint)).await??;
    let started = Instant::now();
    let fetched = Fetched {
        rdma,
        reader,
        read,
        write,
        block,
        wrong_key,
        compare,
    };
    fetched.run(blocks).await?;
    let seconds = started.elapsed().as_secs_f64();
    if blocks > 1 {
        let total = blocks * u64::from(block);
        let reads = parts(block, u32::MAX).count();
        println!(
            "{total} bytes in {seconds:.3} s: {:.1} MB/s ({} blocks of {block} bytes, {reads} reads each, depth {}; {way})",
            total as f64 / 1e6 / seconds,
            blocks,
            rdma.config().depth,
        );
    }
    Ok(())
}

struct Fetched<'a> {
    rdma: &'a Arc<Rdma>,
    reader: mooncake_rdma::Reader,
    read: BufReader<OwnedReadHalf>,
    write: OwnedWriteHalf,
    block: u32,
    wrong_key: bool,
    compare: Option<&'a [u8]>,
}

impl Fetched<'_> {
    async fn run(mut self, blocks: u64) -> anyhow::Result<()> {
        let mut frame = [0; GRANT_BYTES];
        let mut filled = 0;
        let (mut begun, mut ended) = (0, 0);
        let mut ids = std::collections::VecDeque::new();
        while ended < blocks {
            tokio::select! {
                biased;
                lease = self.reader.next(), if self.reader.under_way() > 0 => {
                    let lease = lease?;
                    let id: u64 = ids.pop_front().context("a block that nobody began")?;
                    if let Some(whole) = self.compare {
                        let in_file = whole.len() as u64 / u64::from(self.block);
                        let at = (id % in_file * u64::from(self.block)) as usize;
                        let same = lease.bytes(self.block as usize) == &whole[at..at + self.block as usize];
                        ensure!(same, "block {id} is not what the file has");
                    }
                    drop(lease);
                    self.write.write_u64(id).await?;
                    ended += 1;
                }
                got = self.read.read(&mut frame[filled..]), if begun < blocks && self.reader.has_room() => {
                    let got = got?;
                    ensure!(got > 0, "the server closed the connection");
                    filled += got;
                    if filled == GRANT_BYTES {
                        filled = 0;
                        ids.push_back(self.begin(&frame).await?);
                        begun += 1;
                    }
                }
            }
        }
        Ok(())
    }

    async fn begin(&mut self, frame: &[u8; GRANT_BYTES]) -> anyhow::Result<u64> {
        let word = |at: usize| u64::from_be_bytes(frame[at..at + 8].try_into().expect("8 bytes"));
        let (id, address, key_and_len) = (word(0), word(8), word(16));
        let key = (key_and_len >> 32) as u32;
        let len = key_and_len as u32;
        ensure!(len == self.block, "a block of {len} bytes");
        let room = self.rdma.receiving().room(len as usize).await;
        let lease = room.take(self.reader.device())?;
        let from = Remote {
            address,
            // The lower bits of a key may be a counter within the same registration: another entry of the table.
            key: if self.wrong_key { key ^ 0x5a5a_5a00 } else { key },
        };
        self.reader.begin(lease, len, from, BLOCK_TIME)?;
        Ok(id)
    }
}
