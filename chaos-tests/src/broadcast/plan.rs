//! What a run does, decided before anything starts. Pure.

use anyhow::{Result, ensure};
use std::{path::Path, time::Duration};

/// Hosts of one testbed beside the seed; one more may join.
const MAX_FOLLOWERS: usize = 100;
/// Below it, what starts a transfer is most of what is measured.
const LEAST_SIZE_BYTES: u64 = 1 << 20;
/// Room beside the models in a tmpfs: journals, staging folders, the filesystem's own.
const MEMORY_SPARE_BYTES: u64 = 256 << 20;
/// All followers together may need so much of the disk's rate before folders are better in memory.
const DISK_SHARE: f64 = 0.7;
/// And so much of the memory that is there.
const MEMORY_SHARE: f64 = 0.8;

/// Another way to do it, measured beside Mooncake under the same links.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Peer {
    /// BitTorrent by aria2: every piece's SHA-1 is checked.
    Aria2,
    /// One nginx, every follower fetches with curl: no checks.
    Nginx,
    /// A chain of socat and tee: no checks and no recovery, so nothing that follows a chain can be quicker.
    Socat,
}

impl Peer {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Aria2, Self::Nginx, Self::Socat];

    /// As the table says it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Aria2 => "aria2",
            Self::Nginx => "nginx+curl",
            Self::Socat => "socat chain",
        }
    }

    /// What must be installed: programs and Debian's package of each.
    pub fn needs(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Aria2 => &[("aria2c", "aria2")],
            Self::Nginx => &[("nginx", "nginx-light"), ("curl", "curl")],
            Self::Socat => &[("socat", "socat"), ("tee", "coreutils")],
        }
    }

    /// On `--peers`.
    pub fn flag(self) -> &'static str {
        match self {
            Self::Aria2 => "aria2",
            Self::Nginx => "nginx",
            Self::Socat => "socat",
        }
    }
}

/// Says how to get what the peers need and these folders (those of `PATH`) do not have.
pub fn tools_are_there<'a>(peers: &[Peer], path: impl IntoIterator<Item = &'a Path> + Clone) -> Result<()> {
    for peer in peers {
        for (program, package) in peer.needs() {
            let found = path
                .clone()
                .into_iter()
                .any(|folder| folder.join(program).is_file());
            let others: Vec<_> = peers.iter().filter(|p| *p != peer).map(|p| p.flag()).collect();
            let others = if others.is_empty() {
                "none".to_owned()
            } else {
                others.join(",")
            };
            ensure!(
                found,
                "{program}, which the peer {} needs, is not on the PATH: install Debian's {package} \
                 (scripts/setup.sh {package}), or measure without this peer (--peers {others})",
                peer.name()
            );
        }
    }
    Ok(())
}

/// Who is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// Mooncake, left alone.
    Mooncake,
    /// Mooncake, with a follower killed or joining in the middle.
    Disturbed,
    /// Somebody else.
    Peer(Peer),
}

impl Subject {
    /// As the table says it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mooncake => "mooncake",
            Self::Disturbed => "mooncake, disturbed",
            Self::Peer(peer) => peer.name(),
        }
    }
}

/// Some followers with slower links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slow {
    /// So many, the last ones.
    pub followers: usize,
    /// Of their links, both ways.
    pub link_bits_per_s: u64,
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Of the model: one file.
    pub size_bytes: u64,
    /// How many receivers there are beside the seed: one row each.
    pub followers: Vec<usize>,
    /// Sizes of the manifest's chunks: Mooncake has a row for each.
    pub chunks: Vec<u64>,
    /// Of every link, both ways.
    pub link_bits_per_s: u64,
    /// Of the seed's link, if another.
    pub seed_link_bits_per_s: Option<u64>,
    /// Followers with slower links.
    pub slow: Option<Slow>,
    /// The source is not on the seed but on a host of its own, over HTTP, and gives no more than this.
    pub source_bits_per_s: Option<u64>,
    /// Measured too: a follower is killed in the middle.
    pub kill: bool,
    /// Measured too: a further one joins in the middle, by a job of its own.
    pub join: bool,
    /// Measured beside.
    pub peers: Vec<Peer>,
    /// So many of each; medians are compared.
    pub runs: usize,
}

/// One testbed, and who is measured on it, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Round {
    /// From 1.
    pub run: usize,
    /// Beside the seed.
    pub followers: usize,
    /// Of the manifest.
    pub chunk_bytes: u64,
    /// In this order.
    pub subjects: Vec<Subject>,
}

impl Setup {
    /// Refuses what cannot be measured.
    pub fn check(&self) -> Result<()> {
        ensure!(self.runs > 0, "--runs must be at least 1");
        ensure!(
            self.size_bytes >= LEAST_SIZE_BYTES,
            "--size must be at least {LEAST_SIZE_BYTES} bytes"
        );
        ensure!(!self.followers.is_empty(), "--followers needs a number");
        ensure!(!self.chunks.is_empty(), "--chunk needs a size");
        for &followers in &self.followers {
            ensure!(
                (1..=MAX_FOLLOWERS).contains(&followers),
                "--followers {followers}: 1 to {MAX_FOLLOWERS}"
            );
            if let Some(slow) = self.slow {
                ensure!(
                    slow.followers < followers,
                    "--slow {} of {followers} followers: one at least must have the usual link",
                    slow.followers
                );
            }
            ensure!(
                !self.kill || followers >= 2,
                "--kill needs at least 2 followers, so that one is left"
            );
        }
        ensure!(
            self.source_bits_per_s.is_none() || self.peers.is_empty(),
            "--source-limit: peers have no source beside their seed, measure with --peers none"
        );
        if let Some(limit) = self.source_bits_per_s {
            ensure!(
                limit <= self.link_bits_per_s,
                "--source-limit must be at most the --link"
            );
        }
        Ok(())
    }

    /// The rounds in their order. Those of one run come together, so that a benchmark that is cut short has some of
    /// each.
    pub fn rounds(&self) -> Vec<Round> {
        let mut rounds = Vec::new();
        for run in 1..=self.runs {
            for &followers in &self.followers {
                for (i, &chunk_bytes) in self.chunks.iter().enumerate() {
                    let mut round = |subjects| {
                        rounds.push(Round {
                            run,
                            followers,
                            chunk_bytes,
                            subjects,
                        });
                    };
                    let mut subjects = vec![Subject::Mooncake];
                    // Nobody else knows of chunks.
                    if i == 0 {
                        subjects.extend(self.peers.iter().copied().map(Subject::Peer));
                    }
                    round(subjects);
                    if self.kill || self.join {
                        round(vec![Subject::Disturbed]);
                    }
                }
            }
        }
        rounds
    }

    /// Clients of a round's testbed: the seed, the followers, and who joins.
    pub fn clients(&self, followers: usize) -> usize {
        1 + followers + usize::from(self.join)
    }

    /// The followers with the usual link, as indices of clients; the seed is client 0.
    pub fn usual(&self, followers: usize) -> std::ops::RangeInclusive<usize> {
        1..=followers - self.slow.map_or(0, |slow| slow.followers)
    }

    /// Whether all followers at once would be about the disk and not about the network.
    pub fn wants_memory(&self, disk_bytes_per_s: f64) -> bool {
        let most = self.followers.iter().copied().max().unwrap_or_default();
        let needed = most as f64 * self.link_bits_per_s as f64 / 8.0;
        needed > DISK_SHARE * disk_bytes_per_s
    }

    /// Of the tmpfs of a round's testbed.
    pub fn memory_bytes(&self, followers: usize) -> u64 {
        self.size_bytes * self.clients(followers) as u64 + MEMORY_SPARE_BYTES
    }

    /// Refuses folders in memory where there is not enough.
    pub fn memory_is_there(&self, available_bytes: u64) -> Result<()> {
        let most = self.followers.iter().copied().max().unwrap_or_default();
        let needed = self.memory_bytes(most);
        ensure!(
            needed as f64 <= MEMORY_SHARE * available_bytes as f64,
            "the folders of {} nodes need {} MiB of memory, {} MiB are available: give a smaller --size or fewer \
             --followers, or keep them on the disk (--folders disk)",
            self.clients(most),
            needed >> 20,
            available_bytes >> 20
        );
        Ok(())
    }
}

/// How long so many bytes take at this rate.
pub fn time_for(bytes: u64, bytes_per_s: f64) -> Duration {
    Duration::from_secs_f64(bytes as f64 / bytes_per_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup() -> Setup {
        Setup {
            size_bytes: 512 << 20,
            followers: vec![1, 8],
            chunks: vec![4 << 20, 256 << 20],
            link_bits_per_s: 200_000_000,
            seed_link_bits_per_s: None,
            slow: None,
            source_bits_per_s: None,
            kill: false,
            join: false,
            peers: vec![Peer::Aria2, Peer::Socat],
            runs: 3,
        }
    }

    #[test]
    fn peers_are_measured_once_and_mooncake_with_every_chunk_size() {
        let rounds = setup().rounds();
        assert_eq!(rounds.len(), 12);
        let of = |subject| {
            let with = rounds.iter().filter(|r| r.subjects.contains(&subject));
            with.count()
        };
        assert_eq!(of(Subject::Mooncake), 12);
        assert_eq!(of(Subject::Peer(Peer::Socat)), 6);
        assert_eq!(of(Subject::Peer(Peer::Nginx)), 0);
        // Whatever it is cut short to has whole runs first.
        assert!(rounds[..4].iter().all(|r| r.run == 1) && rounds[4].run == 2);
    }

    #[test]
    fn a_disturbed_one_has_an_undisturbed_one_beside_it() {
        let disturbed = Setup {
            followers: vec![8],
            chunks: vec![4 << 20],
            peers: Vec::new(),
            kill: true,
            join: true,
            ..setup()
        };
        disturbed.check().unwrap();
        let subjects: Vec<_> = disturbed.rounds().into_iter().flat_map(|r| r.subjects).collect();
        assert_eq!(
            subjects,
            [Subject::Mooncake, Subject::Disturbed].repeat(disturbed.runs)
        );
        assert_eq!(disturbed.clients(8), 10);
    }

    #[test]
    fn the_slow_ones_are_the_last() {
        let slow = Slow {
            followers: 2,
            link_bits_per_s: 50_000_000,
        };
        let mut setup = Setup {
            slow: Some(slow),
            followers: vec![8],
            ..setup()
        };
        setup.check().unwrap();
        assert_eq!(setup.usual(8), 1..=6);
        setup.followers = vec![2];
        assert!(setup.check().is_err(), "nobody left");
    }

    #[test]
    fn folders_are_in_memory_where_the_disk_would_decide() {
        let setup = setup();
        // 8 followers write 200 MB/s.
        assert!(setup.wants_memory(250e6));
        assert!(!setup.wants_memory(300e6));
        assert!(setup.memory_is_there(8 << 30).is_ok());
        let error = setup.memory_is_there(4 << 30).unwrap_err().to_string();
        assert!(error.contains("--folders disk"), "{error}");
    }

    #[test]
    fn a_missing_tool_is_named_with_its_package_and_the_way_around_it() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("aria2c"), "").unwrap();
        let path = [folder.path()];
        tools_are_there(&[Peer::Aria2], path).unwrap();
        let error = tools_are_there(&[Peer::Aria2, Peer::Socat], path).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("scripts/setup.sh socat"), "{error}");
        assert!(error.contains("--peers aria2"), "{error}");
        let error = tools_are_there(&[Peer::Nginx], path).unwrap_err().to_string();
        assert!(error.contains("--peers none"), "{error}");
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        for broken in [
            Setup { runs: 0, ..setup() },
            Setup {
                followers: vec![0],
                ..setup()
            },
            Setup {
                kill: true,
                ..setup()
            },
            Setup {
                source_bits_per_s: Some(100_000_000),
                ..setup()
            },
            Setup {
                peers: Vec::new(),
                source_bits_per_s: Some(300_000_000),
                ..setup()
            },
        ] {
            assert!(broken.check().is_err(), "{broken:?}");
        }
    }
}
