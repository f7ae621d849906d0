//! One source, many receivers: how near the distribution comes to the time that one plain stream takes.
//!
//! Each [`Round`] has a testbed of its own with the seed (`c0`), the followers (`c1` and up) and three masters, all behind
//! links of one rate. First a plain TCP stream between two hosts that take no part says what the links give (B), then
//! Mooncake distributes the file, then the peers carry the same file over the same links, one after the other, with the
//! masters and nodes stopped. The bound is S/B: a receiver cannot be quicker than its own link.
//!
//! The clock of Mooncake runs from the moment before the request is sent to the moment at which a caller who waits for
//! it reads that the last placement that counts is `staged`; the seed's counts too. Afterwards every copy is compared
//! with the source, byte by byte, of the peers too.
//!
//! Not measured: machines. All hosts share the cores of this one, so at high rates the cores are measured and not the
//! network. The kernel's counters of the links have frames' headers in them and what was sent again; those of the
//! payload are the nodes' own.

pub(crate) mod mooncake;
mod peers;
mod plan;
mod report;
pub(crate) mod stream;

pub use plan::{Peer, Round, Setup, Slow, Subject, tools_are_there};
pub use report::{Machine, Report};
pub use stream::{available_memory, disk_rate};

use crate::{
    model::{Model, Prepared},
    process::Process,
    testbed::{Testbed, TestbedOptions, Traffic, client_host},
};
use anyhow::{Context, Result, ensure};
use peers::{Delivery, Torrent, deliver};
use plan::time_for;
use std::{
    collections::BTreeMap,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    time::Duration,
};

/// The plain stream carries so much at most: a rate needs no more.
const MOST_PLAIN_BYTES: u64 = 256 << 20;
/// Whatever carries the file may take so many times what a star would need, and [`SPARE`]: it is given up then.
const PATIENCE: u32 = 3;
const SPARE: Duration = Duration::from_secs(120);
const MODEL: &str = "model.bin";

/// What one run of one subject brought.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Who.
    pub subject: Subject,
    /// Of how many.
    pub followers: usize,
    /// Of the manifest; of Mooncake only.
    pub chunk_bytes: Option<u64>,
    /// No follower with the usual link can be quicker: S/B, or what the capped source takes.
    pub bound: Duration,
    /// Until the last of those with the usual link had it; without those that were killed or joined later.
    pub makespan: Duration,
    /// Until the last of those with a slower link had it.
    pub slow: Option<Duration>,
    /// From the second job's request until the one that joined had it.
    pub joined: Option<Duration>,
    /// What the seed's link carried out.
    pub sent_bytes: u64,
    /// The most that the link of a follower carried in, of those that `makespan` is about.
    pub received_bytes: u64,
    /// As the nodes count it.
    pub payload: Option<Payload>,
    /// Terms of Raft from the first to the last.
    pub elections: Option<u64>,
}

/// Bytes of blocks, as the nodes count them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payload {
    /// By the seed.
    pub sent_bytes: u64,
    /// The most that one follower read, repeats included.
    pub received_bytes: u64,
}

/// The file, and what is made of it once.
pub struct Benchmark {
    setup: Setup,
    memory: bool,
    prepared: Prepared,
    torrent: Option<Torrent>,
    folder: PathBuf,
}

/// When each client had the file, from its own clock, and where it is; and what the links carried meanwhile.
struct Carried {
    at: BTreeMap<usize, (Duration, PathBuf)>,
    joined: Option<Duration>,
    traffic: BTreeMap<String, Traffic>,
    payload: Option<Payload>,
    elections: Option<u64>,
}

impl Benchmark {
    /// Makes the model below `folder`, which is the seed's folder in every round. `memory`: nodes keep their folders in
    /// memory.
    pub fn prepare(setup: Setup, folder: &Path, memory: bool) -> Result<Self> {
        setup.check()?;
        let model = Model::create(folder, "broadcast", &[(MODEL, setup.size_bytes)])?;
        let file = folder.join(MODEL);
        // Or it would be written to the disk while something is measured.
        File::open(&file)?.sync_all()?;
        let torrent = match setup.peers.contains(&Peer::Aria2) {
            true => Some(Torrent::of(&file, MODEL)?),
            false => None,
        };
        Ok(Self {
            setup,
            memory,
            prepared: Prepared::of(model)?,
            torrent,
            folder: folder.to_owned(),
        })
    }

    /// Makes the round's testbed and measures all of its subjects, each of which is told to `measured` at once.
    pub async fn round(
        &self,
        round: &Round,
        mut begins: impl FnMut(Subject),
        mut measured: impl FnMut(Measured),
    ) -> Result<()> {
        let setup = &self.setup;
        let mut bed = Testbed::start(TestbedOptions {
            masters: 3,
            clients: setup.clients(round.followers),
            link: Some(setup.link_bits_per_s),
            balancer: None,
            client_memory_bytes: self.memory.then(|| setup.memory_bytes(round.followers)),
            allow_sources: vec![self.folder.display().to_string()],
            ..Default::default()
        })
        .await?;
        if let Some(rate) = setup.seed_link_bits_per_s {
            bed.network.shape(&client_host(0), Some(rate))?;
        }
        for client in setup.usual(round.followers).end() + 1..=round.followers {
            let rate = setup.slow.map(|slow| slow.link_bits_per_s);
            bed.network.shape(&client_host(client), rate)?;
        }
        let bound = self.bound(&mut bed).await?;
        for &subject in &round.subjects {
            begins(subject);
            // What it would take from a seed that serves one after the other.
            let star = bound * (round.followers as u32 + 1);
            let patience = star * PATIENCE * self.slowest_by() + SPARE;
            let carried = tokio::time::timeout(patience, self.carry(&mut bed, round, subject, bound));
            let carried = carried.await.with_context(|| {
                format!(
                    "{subject:?} did not end within {patience:?}\n{}",
                    bed.cluster.log_tails()
                )
            })??;
            self.compare(&carried).await?;
            measured(self.measured(round, subject, bound, &carried)?);
            self.clear(&mut bed)?;
        }
        bed.finish();
        Ok(())
    }

    /// How many times slower than the others the slow ones are.
    fn slowest_by(&self) -> u32 {
        let usual = self.setup.link_bits_per_s;
        let slow = self.setup.slow.map_or(usual, |slow| slow.link_bits_per_s);
        usual.div_ceil(slow).max(1) as u32
    }

    async fn bound(&self, bed: &mut Testbed) -> Result<Duration> {
        let size = self.setup.size_bytes;
        if let Some(limit) = self.setup.source_bits_per_s {
            let source = bed.serve(&self.folder).await?;
            source.limit_rate(Some(limit / 8));
            let url = format!("{}/{MODEL}", source.url);
            return stream::download(bed, "c1", url, size).await;
        }
        // Neither is the seed, whose link may be another; the first follower always has the usual one.
        let plain = size.min(MOST_PLAIN_BYTES);
        let goodput = stream::goodput(bed, "src", "c1", plain).await?;
        Ok(time_for(size, goodput))
    }

    async fn carry(
        &self,
        bed: &mut Testbed,
        round: &Round,
        subject: Subject,
        bound: Duration,
    ) -> Result<Carried> {
        let before = bed.network.traffic()?;
        let peer = match subject {
            Subject::Mooncake => return mooncake::run(self, bed, round, None, bound).await,
            Subject::Disturbed => return mooncake::run(self, bed, round, Some(bound / 2), bound).await,
            Subject::Peer(peer) => peer,
        };
        let file = self.folder.join(MODEL);
        let delivery = Delivery {
            file: &file,
            torrent: self.torrent.as_ref(),
            followers: round.followers,
        };
        let delivered = deliver(peer, bed, &delivery).await?;
        Ok(Carried {
            at: (1..).zip(delivered).collect(),
            joined: None,
            traffic: since(&before, &bed.network.traffic()?),
            payload: None,
            elections: None,
        })
    }

    fn measured(
        &self,
        round: &Round,
        subject: Subject,
        bound: Duration,
        carried: &Carried,
    ) -> Result<Measured> {
        let usual = self.setup.usual(round.followers);
        let slow = usual.end() + 1..=round.followers;
        let last = |which: &dyn Fn(usize) -> bool| {
            let at = carried.at.iter().filter(|(client, _)| which(**client));
            at.map(|(_, (at, _))| *at).max()
        };
        let received = usual
            .clone()
            .filter(|client| carried.at.contains_key(client))
            .filter_map(|client| carried.traffic.get(&client_host(client)));
        let seed = carried.traffic.get(&client_host(0));
        Ok(Measured {
            subject,
            followers: round.followers,
            chunk_bytes: (!matches!(subject, Subject::Peer(_))).then_some(round.chunk_bytes),
            bound,
            // The seed is one of those that count: it seals last of all bytes.
            makespan: last(&|client| client == 0 || usual.contains(&client)).context("nobody has it")?,
            slow: last(&|client| slow.contains(&client)),
            joined: carried.joined,
            sent_bytes: seed.context("the seed has no link")?.sent_bytes,
            received_bytes: received.map(|t| t.received_bytes).max().unwrap_or_default(),
            payload: carried.payload,
            elections: carried.elections,
        })
    }

    /// A copy that is not the source was not carried.
    async fn compare(&self, carried: &Carried) -> Result<()> {
        let source = self.folder.join(MODEL);
        for (_, copy) in carried.at.values() {
            let (source, copy) = (source.clone(), copy.clone());
            tokio::task::spawn_blocking(move || same(&source, &copy)).await??;
        }
        Ok(())
    }

    /// Stops masters and nodes, and makes room for the next subject.
    fn clear(&self, bed: &mut Testbed) -> Result<()> {
        let cluster = &mut bed.cluster;
        let processes = cluster.masters.iter_mut().chain(&mut cluster.clients);
        processes.for_each(Process::kill);
        for root in &cluster.roots {
            std::fs::remove_dir_all(root)?;
            std::fs::create_dir(root)?;
        }
        Ok(())
    }
}

fn since(before: &BTreeMap<String, Traffic>, now: &BTreeMap<String, Traffic>) -> BTreeMap<String, Traffic> {
    let before = |host| before.get(host).copied().unwrap_or_default();
    now.iter()
        .map(|(host, traffic)| (host.clone(), *traffic - before(host)))
        .collect()
}

/// Byte by byte.
fn same(source: &Path, copy: &Path) -> Result<()> {
    const BUFFER_BYTES: u64 = 1 << 20;
    let open = |path: &Path| File::open(path).with_context(|| format!("no copy at {}", path.display()));
    let (mut a, mut b) = (open(source)?, open(copy)?);
    let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
    let mut at = 0;
    loop {
        of_a.clear();
        of_b.clear();
        (&mut a).take(BUFFER_BYTES).read_to_end(&mut of_a)?;
        (&mut b).take(BUFFER_BYTES).read_to_end(&mut of_b)?;
        ensure!(
            of_a == of_b,
            "{} is not what was carried: it differs within the {BUFFER_BYTES} bytes at {at}",
            copy.display()
        );
        if of_a.is_empty() {
            return Ok(());
        }
        at += of_a.len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_copy_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name| folder.path().join(name);
        let mut bytes = vec![1; (1 << 20) + 7];
        std::fs::write(path("a"), &bytes).unwrap();
        std::fs::write(path("b"), &bytes).unwrap();
        same(&path("a"), &path("b")).unwrap();
        std::fs::write(path("b"), &bytes[1..]).unwrap();
        assert!(same(&path("a"), &path("b")).is_err(), "shorter");
        bytes[1 << 20] = 2;
        std::fs::write(path("b"), &bytes).unwrap();
        assert!(same(&path("a"), &path("b")).is_err(), "a byte");
        assert!(same(&path("a"), &path("c")).is_err(), "missing");
    }
}
