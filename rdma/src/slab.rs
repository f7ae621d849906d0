//! Registered memory: pages of its own, one key, one purpose.

use crate::{
    device::{Device, DeviceError},
    sys::{ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ, IbvMr},
};
use std::{fmt, io, ptr::NonNull, sync::Arc};

/// What a slab is for, and with it what the network card may do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Peers that were given its key may read it, and nobody but this process writes it.
    Serve,
    /// The card writes what this process reads elsewhere; no peer can reach it.
    Receive,
}

/// Anonymous pages that no child process gets.
struct Pages {
    start: NonNull<u8>,
    len: usize,
}

impl Pages {
    fn map(len: usize) -> io::Result<Self> {
        // SAFETY: a new private anonymous mapping touches no other memory.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).expect("a mapping is not at address zero");
        let pages = Self { start, len };
        // A child that shared the pages would make the kernel copy them at the next write, and the card would go on with
        // the old ones.
        // SAFETY: the range was just mapped.
        if unsafe { libc::madvise(start.as_ptr().cast(), len, libc::MADV_DONTFORK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(pages)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and whoever had a reference into it borrowed it from the slab.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Registered pages. The registration ends before the pages go, and the device stays open until then. Nothing may be under
/// way into or out of a slab when it is dropped: who posts a read into one gives it away until the read has ended.
pub struct Slab {
    region: NonNull<IbvMr>,
    lkey: u32,
    rkey: u32,
    /// `None` only where the kernel would not let go of it.
    pages: Option<Pages>,
    device: Arc<Device>,
}

// SAFETY: the pages belong to this value alone, and the library's calls may be made by any thread.
unsafe impl Send for Slab {}
// SAFETY: a shared reference only reads the pages.
unsafe impl Sync for Slab {}

impl fmt::Debug for Slab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slab")
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

impl Slab {
    /// `len` bytes (a multiple of the page size), registered with `device`. Blocks while the kernel pins the pages.
    pub(crate) fn register(device: &Arc<Device>, len: usize, purpose: Purpose) -> Result<Self, DeviceError> {
        let pages = Pages::map(len).map_err(|e| device.call_failed("mapping memory", e))?;
        let access = match purpose {
            Purpose::Serve => ACCESS_REMOTE_READ,
            Purpose::Receive => ACCESS_LOCAL_WRITE,
        };
        // SAFETY: the domain is open, and the pages stay mapped until the registration has ended (`drop`).
        let region = unsafe {
            (device.verbs.reg_mr)(device.domain.as_ptr(), pages.start.as_ptr().cast(), len, access)
        };
        let Some(region) = NonNull::new(region) else {
            return Err(device.call_failed("registering memory", io::Error::last_os_error()));
        };
        // SAFETY: the library made it.
        let (lkey, rkey) = unsafe { (region.as_ref().lkey, region.as_ref().rkey) };
        Ok(Self {
            region,
            lkey,
            rkey,
            pages: Some(pages),
            device: device.clone(),
        })
    }

    fn pages(&self) -> &Pages {
        self.pages.as_ref().expect("taken in drop only")
    }

    /// How many bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.pages().len
    }

    /// Where it is, as peers and work requests name it.
    pub fn address(&self) -> u64 {
        self.pages().start.as_ptr() as u64
    }

    /// The key that a peer needs.
    pub fn remote_key(&self) -> u32 {
        self.rkey
    }

    pub(crate) fn local_key(&self) -> u32 {
        self.lkey
    }

    /// The device that it is registered with.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Its first `len` bytes.
    pub fn bytes(&self, len: usize) -> &[u8] {
        let pages = self.pages();
        assert!(len <= pages.len, "{len} bytes of a slab of {}", pages.len);
        // SAFETY: mapped and initialised (anonymous pages are zero), and nothing writes there while `self` is borrowed:
        // reads into it hold the slab itself.
        unsafe { std::slice::from_raw_parts(pages.start.as_ptr(), len) }
    }

    /// Its first `len` bytes, to be filled.
    pub fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        let pages = self.pages();
        assert!(len <= pages.len, "{len} bytes of a slab of {}", pages.len);
        // SAFETY: as in `bytes`, and the borrow is the only one. A peer that still has the key of an earlier block may read
        // what is being written: that is its loss, and on this side only the card looks.
        unsafe { std::slice::from_raw_parts_mut(pages.start.as_ptr(), len) }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: registered once, ended once.
        let rc = unsafe { (self.device.verbs.dereg_mr)(self.region.as_ptr()) };
        if let Err(error) = self.device.destroyed(rc) {
            // The card may still reach the pages: losing them is better than giving them to somebody else.
            tracing::warn!(device = %self.device.name().name, %error, "a registration did not end; keeping its memory");
            std::mem::forget(self.pages.take());
        }
    }
}
