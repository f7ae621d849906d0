//! A bounded pool of registered slabs, over all devices of a node.
//!
//! Guaranteed: registered bytes, lent and idle, are within the bound (but for the instant in which idle slabs make room for
//! one of another size); who waits is served in turn; a slab
//! comes back however its user ends; a slab of a device that was taken away is not lent again.

use crate::{
    device::{Device, DeviceError},
    ledger::{Ledger, Lent},
    slab::{Purpose, Slab},
};
use parking_lot::Mutex;
use std::{fmt, sync::Arc};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The smallest slab, and the unit of the bound: the smallest block. Smaller files' blocks take one too.
pub const MIN_SLAB_BYTES: usize = 256 << 10;
/// The largest slab: the largest block.
pub const MAX_SLAB_BYTES: usize = 4 << 20;

/// The size of the slab for `len` bytes: a power of two, so that slabs are used again.
pub fn slab_bytes(len: usize) -> usize {
    assert!(len <= MAX_SLAB_BYTES, "a slab of {len} bytes");
    len.next_power_of_two().max(MIN_SLAB_BYTES)
}

/// A device as the ledger tells it from others: by identity, for one that comes back has the same name. (A slab keeps its
/// device, so that no other can take its place in memory while the ledger knows it.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Group(usize);

impl Group {
    fn of(device: &Arc<Device>) -> Self {
        Self(Arc::as_ptr(device) as usize)
    }
}

/// See the module.
pub struct Pool {
    purpose: Purpose,
    max_bytes: usize,
    /// In units of [`MIN_SLAB_BYTES`]: what may still be lent.
    units: Arc<Semaphore>,
    /// Short sections: no call into the kernel.
    ledger: Mutex<Ledger<Group, Slab>>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("purpose", &self.purpose)
            .field("max_bytes", &self.max_bytes)
            .field("bytes", &self.bytes())
            .finish()
    }
}

impl Pool {
    /// At most `max_bytes`, but two of the largest slabs at least: one is filled while the other is read.
    pub fn new(purpose: Purpose, max_bytes: usize) -> Arc<Self> {
        let max_bytes = max_bytes.max(2 * MAX_SLAB_BYTES) / MIN_SLAB_BYTES * MIN_SLAB_BYTES;
        Arc::new(Self {
            purpose,
            max_bytes,
            units: Arc::new(Semaphore::new(max_bytes / MIN_SLAB_BYTES)),
            ledger: Mutex::new(Ledger::new(max_bytes)),
        })
    }

    /// The bound.
    pub fn max_bytes(&self) -> usize {
        self.max_bytes
    }

    /// Registered now.
    pub fn bytes(&self) -> usize {
        self.ledger.lock().bytes()
    }

    /// The most that was ever registered at once.
    pub fn peak_bytes(&self) -> usize {
        self.ledger.lock().peak_bytes()
    }

    pub(crate) fn lent(&self) -> (u64, bool) {
        let ledger = self.ledger.lock();
        (ledger.lent(), ledger.is_quiet())
    }

    /// Waits, in turn, until a slab for `len` bytes may be lent.
    pub async fn room(self: &Arc<Self>, len: usize) -> Room {
        let size = slab_bytes(len);
        let units = u32::try_from(size / MIN_SLAB_BYTES).expect("a slab has few units");
        let permit = self.units.clone().acquire_many_owned(units).await;
        Room {
            pool: self.clone(),
            size,
            permit: permit.expect("never closed"),
        }
    }

    pub(crate) fn forget(&self, device: &Arc<Device>) {
        let gone = self.ledger.lock().forget(&Group::of(device));
        drop(gone);
    }

    pub(crate) fn forget_idle(&self) {
        let idle = self.ledger.lock().forget_idle();
        drop(idle);
    }
}

/// The right to one slab.
pub struct Room {
    pool: Arc<Pool>,
    size: usize,
    permit: OwnedSemaphorePermit,
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Room").field("size", &self.size).finish()
    }
}

impl Room {
    /// How many bytes its slab has.
    pub fn size(&self) -> usize {
        self.size
    }

    /// An idle slab, if one fits: does not block.
    pub fn take_idle(self, device: &Arc<Device>) -> Result<Lease, Self> {
        let found = self.pool.ledger.lock().lend_idle(&Group::of(device), self.size);
        match found {
            Some(slab) => Ok(Lease {
                slab: Some(slab),
                pool: self.pool,
                _permit: self.permit,
            }),
            None => Err(self),
        }
    }

    /// The slab. Blocks for as long as the kernel pins memory if no idle one fits.
    pub fn take(self, device: &Arc<Device>) -> Result<Lease, DeviceError> {
        let Lent { found, evicted } = self.pool.ledger.lock().lend(&Group::of(device), self.size);
        // First: together with the new one they would be beyond the bound.
        drop(evicted);
        let slab = match found {
            Some(slab) => slab,
            None => match Slab::register(device, self.size, self.pool.purpose) {
                Ok(slab) => slab,
                Err(error) => {
                    self.pool.ledger.lock().failed(self.size);
                    return Err(error);
                }
            },
        };
        Ok(Lease {
            slab: Some(slab),
            pool: self.pool,
            _permit: self.permit,
        })
    }
}

/// A lent slab; goes back when dropped.
pub struct Lease {
    slab: Option<Slab>,
    pool: Arc<Pool>,
    // After the slab is back: the next one in turn finds it.
    _permit: OwnedSemaphorePermit,
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("slab", &self.slab).finish()
    }
}

impl std::ops::Deref for Lease {
    type Target = Slab;
    fn deref(&self) -> &Slab {
        self.slab.as_ref().expect("there until dropped")
    }
}

impl std::ops::DerefMut for Lease {
    fn deref_mut(&mut self) -> &mut Slab {
        self.slab.as_mut().expect("there until dropped")
    }
}

impl Lease {
    /// Never lends it again, and lets go of its memory never: something may still be under way in it.
    pub(crate) fn leak(mut self) {
        if let Some(slab) = self.slab.take() {
            std::mem::forget(slab);
        }
        std::mem::forget(self);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(slab) = self.slab.take() else { return };
        let (group, size) = (Group::of(slab.device()), slab.len());
        let mut ledger = self.pool.ledger.lock();
        // Asked within the lock: whoever takes a device away marks it first and clears the ledger then.
        let keep = !slab.device().gone().is_cancelled();
        let surplus = ledger.give_back(group, size, slab, keep);
        drop(ledger);
        drop(surplus);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_two_between_the_smallest_and_the_largest_block() {
        for (len, size) in [
            (0, MIN_SLAB_BYTES),
            (1, MIN_SLAB_BYTES),
            (MIN_SLAB_BYTES, MIN_SLAB_BYTES),
            (MIN_SLAB_BYTES + 1, 2 * MIN_SLAB_BYTES),
            (3 << 20, MAX_SLAB_BYTES),
            (MAX_SLAB_BYTES, MAX_SLAB_BYTES),
        ] {
            assert_eq!(slab_bytes(len), size, "{len}");
        }
    }

    /// Rooms without slabs: no device is needed.
    #[tokio::test]
    async fn rooms_are_bounded_and_given_in_turn() {
        let pool = Pool::new(Purpose::Serve, 0);
        assert_eq!(pool.max_bytes(), 2 * MAX_SLAB_BYTES, "the least that works");
        let first = pool.room(MAX_SLAB_BYTES).await;
        let small = pool.room(1).await;
        assert_eq!((first.size(), small.size()), (MAX_SLAB_BYTES, MIN_SLAB_BYTES));
        let waiting = tokio::spawn({
            let pool = pool.clone();
            async move { pool.room(MAX_SLAB_BYTES).await.size() }
        });
        tokio::task::yield_now().await;
        let behind = tokio::spawn({
            let pool = pool.clone();
            async move { pool.room(1).await.size() }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        assert!(
            !behind.is_finished(),
            "there would be room for it, but another one was first"
        );
        drop(small);
        assert_eq!(waiting.await.unwrap(), MAX_SLAB_BYTES);
        drop(first);
        assert_eq!(behind.await.unwrap(), MIN_SLAB_BYTES);
        assert_eq!(pool.bytes(), 0, "nothing was registered");
    }
}
