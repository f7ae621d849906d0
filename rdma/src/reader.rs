//! The end that fetches: reads from where the peer says, several at once.

use crate::{
    choice::Endpoint,
    connection::{MAX_READ_BYTES, OutOfOrder, Reads, parts},
    device::{Device, DeviceError},
    keeper::{Graveyard, Remains},
    pool::{Lease, MAX_SLAB_BYTES},
    queue::{Completion, CompletionQueue, QueuePair, ReadError, Way},
};
use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

/// How long the reads that are under way may take to come back once their queue pair has ended: the card only has to
/// look at each of them.
const DRAIN_TIME: Duration = Duration::from_secs(1);
/// Pause between two looks while it does.
const DRAIN_PAUSE: Duration = Duration::from_millis(1);

/// Why a connection's reads came to an end. It is of no use any more then.
#[derive(Debug, thiserror::Error)]
pub enum ReaderError {
    /// A read failed.
    #[error("{device}: {source}")]
    Read {
        /// This end's device.
        device: String,
        /// What the card said.
        source: ReadError,
    },
    /// The device was taken away.
    #[error("{device} was taken away")]
    Gone {
        /// This end's device.
        device: String,
    },
    /// A read did not end.
    #[error("{device}: a read did not end in its time")]
    TimedOut {
        /// This end's device.
        device: String,
    },
    /// The card reports what nobody asked for.
    #[error("{device}: {source}")]
    OutOfOrder {
        /// This end's device.
        device: String,
        /// What.
        source: OutOfOrder,
    },
    /// A call failed.
    #[error("{device}: {source}")]
    Call {
        /// This end's device.
        device: String,
        /// As the system said it.
        source: io::Error,
    },
}

impl From<ReaderError> for io::Error {
    fn from(e: ReaderError) -> Self {
        let kind = match e {
            ReaderError::TimedOut { .. } => io::ErrorKind::TimedOut,
            _ => io::ErrorKind::ConnectionAborted,
        };
        Self::new(kind, e)
    }
}

/// Where a block is in the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Its first byte.
    pub address: u64,
    /// The key to it.
    pub key: u32,
}

/// Queue pair, completion queue and the reads under way: together, for the memory may only go after the pair.
#[derive(Debug)]
pub(crate) struct Asking {
    pair: QueuePair,
    queue: CompletionQueue,
    reads: Reads<Lease>,
}

impl Asking {
    /// Ends it, in the one order that is safe. Blocks, for [`DRAIN_TIME`] at most and what the kernel needs.
    pub(crate) fn bury(mut self, gone: bool) {
        self.pair.fail();
        let until = Instant::now() + DRAIN_TIME;
        let last = self.reads.next_number() - 1;
        let mut seen = self.reads.is_empty() || gone;
        let mut completions = Vec::new();
        while !seen && Instant::now() < until && self.queue.poll(&mut completions).is_ok() {
            seen = completions.iter().any(|c| c.number == last);
            completions.clear();
            if !seen {
                std::thread::sleep(DRAIN_PAUSE);
            }
        }
        match self.pair.destroy() {
            Ok(()) => drop(self.queue),
            Err(error) => {
                tracing::warn!(%error, blocks = self.reads.len(), "a queue pair was not destroyed; keeping the memory that it reads into");
                std::mem::forget(self.queue);
                self.reads.into_rest().for_each(Lease::leak);
            }
        }
    }
}

/// One end of a connection that is not connected yet.
#[derive(Debug)]
pub struct Offer {
    /// Has the ends' care already: an offer that nobody takes goes to the graveyard, too.
    reader: Reader,
    way: Way,
    first_packet: u32,
    depth: u32,
}

impl Offer {
    /// Makes what a connection needs. Blocks; must be called in a runtime.
    pub(crate) fn new(
        device: &Arc<Device>,
        way: Way,
        (depth, max_read): (u32, u32),
        spin: Duration,
        graveyard: Graveyard,
    ) -> Result<Self, DeviceError> {
        let max_read = max_read.clamp(1, MAX_READ_BYTES);
        let requests = depth * (MAX_SLAB_BYTES as u32).div_ceil(max_read);
        let requests = requests.min(device.limits().queue_len);
        let queue = CompletionQueue::new(device, requests)?;
        let pair = QueuePair::asking(device, way, &queue, requests)?;
        // As many as their work requests fit the queue.
        let depth = depth
            .min(requests / (MAX_SLAB_BYTES as u32).div_ceil(max_read))
            .max(1);
        let asking = Asking {
            pair,
            queue,
            reads: Reads::new(depth),
        };
        Ok(Self {
            reader: Reader {
                asking: Some(asking),
                device: device.clone(),
                completions: Vec::new(),
                max_read,
                spin,
                graveyard,
            },
            way,
            first_packet: crate::random_24_bits(),
            depth,
        })
    }

    /// What the peer must know.
    pub fn endpoint(&self) -> Endpoint {
        self.reader.asking().pair.endpoint(self.first_packet)
    }

    /// Blocks that this end reads at once.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// For messages.
    pub fn describe(&self) -> String {
        crate::describe(&self.reader.device, &self.way)
    }

    /// Connects to the peer that answered. Blocks.
    pub fn connect(mut self, peer: &Endpoint) -> Result<Reader, DeviceError> {
        let asking = self.reader.asking.as_mut().expect("taken in drop only");
        asking.pair.connect(peer, self.first_packet, true)?;
        Ok(self.reader)
    }
}

/// The end that fetches.
#[derive(Debug)]
pub struct Reader {
    /// `None` once it is given to the graveyard.
    asking: Option<Asking>,
    device: Arc<Device>,
    completions: Vec<Completion>,
    max_read: u32,
    spin: Duration,
    graveyard: Graveyard,
}

impl Reader {
    fn asking(&self) -> &Asking {
        self.asking.as_ref().expect("taken in drop only")
    }

    /// The device that reads.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Whether another block may begin.
    pub fn has_room(&self) -> bool {
        self.asking().reads.has_room()
    }

    /// Blocks under way.
    pub fn under_way(&self) -> usize {
        self.asking().reads.len()
    }

    /// Begins to read `len` bytes into `lease`, which has to be done `within` a time. Blocks come back from
    /// [`Reader::next`] in the order in which they began.
    pub fn begin(
        &mut self,
        lease: Lease,
        len: u32,
        from: Remote,
        within: Duration,
    ) -> Result<(), ReaderError> {
        let device = self.device.name().name.clone();
        let end = from.address.checked_add(len.into());
        if end.is_none() || len == 0 || len as usize > lease.len() {
            let source = io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{len} bytes at {:#x} into {}", from.address, lease.len()),
            );
            return Err(ReaderError::Call { device, source });
        }
        let asking = self.asking.as_mut().expect("taken in drop only");
        let number = asking.reads.next_number();
        let mut failed = None;
        for part in parts(len, self.max_read) {
            let there = (from.address + u64::from(part.offset), from.key);
            // SAFETY: the lease goes into `reads` below, whatever becomes of the posting, and leaves it when its read has
            // completed or when the pair is gone (`bury`).
            let posted = unsafe {
                asking
                    .pair
                    .post_read(number, &lease, part.offset, part.len, there, part.last)
            };
            if let Err(source) = posted {
                failed = Some(source);
                break;
            }
        }
        asking.reads.begin(Instant::now() + within, lease);
        match failed {
            Some(source) => Err(ReaderError::Call { device, source }),
            None => Ok(()),
        }
    }

    /// The next block that was read: cancel safe. Waits for ever while nothing is under way.
    pub async fn next(&mut self) -> Result<Lease, ReaderError> {
        let device = || self.device.name().name.clone();
        loop {
            let asking = self.asking.as_mut().expect("taken in drop only");
            if !self.completions.is_empty() {
                let Completion { number, error } = self.completions.remove(0);
                if let Some(source) = error {
                    return Err(ReaderError::Read {
                        device: device(),
                        source,
                    });
                }
                return asking
                    .reads
                    .ended(number)
                    .map_err(|source| ReaderError::OutOfOrder {
                        device: device(),
                        source,
                    });
            }
            let Some(deadline) = asking.reads.deadline() else {
                self.device.gone().cancelled().await;
                return Err(ReaderError::Gone { device: device() });
            };
            tokio::select! {
                biased;
                () = self.device.gone().cancelled() => return Err(ReaderError::Gone { device: device() }),
                waited = asking.queue.wait(self.spin, &mut self.completions) => {
                    waited.map_err(|source| ReaderError::Call { device: device(), source })?;
                }
                () = tokio::time::sleep_until(deadline.into()) => return Err(ReaderError::TimedOut { device: device() }),
            }
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if let Some(asking) = self.asking.take() {
            self.graveyard.bury(Remains::Asking(asking, self.device.clone()));
        }
    }
}
