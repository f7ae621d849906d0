//! Completion queues and queue pairs.

use crate::{
    choice::{Endpoint, Gid, GidKind, Layer, Mtu},
    connection::Phase,
    device::{Device, DeviceError, check, status_text},
    slab::Slab,
    sys::{
        self, AhAttr, GlobalRoute, IbvCompChannel, IbvCq, IbvQp, QpAttr, QpCap, QpInitAttr, SendWr, Sge, Wc,
    },
};
use std::{
    fmt, io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    ptr::{NonNull, null_mut},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::io::{Interest, unix::AsyncFd};

/// Completions taken in one call.
const POLL_BATCH: usize = 16;
/// Local acknowledge time-out as the verbs number it: 4.096 µs × 2^17 = 0.54 s. With [`RETRIES`] a peer that answers nothing
/// is given up after about four seconds; a lost packet costs at most one of them.
const ACK_TIMEOUT: u8 = 17;
/// The most that the verbs know.
const RETRIES: u8 = 7;
/// "Receiver not ready" cannot happen with reads; the verbs want a number: 0.64 ms.
const MIN_RNR_TIMER: u8 = 12;
/// RoCE v2 packets may cross routers.
const HOP_LIMIT: u8 = 64;

/// A completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Number of the read.
    pub number: u64,
    /// Why it failed; the queue pair is of no use any more then.
    pub error: Option<ReadError>,
}

/// Why a read failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a read ended with '{text}' (status {status}, vendor code {vendor:#x})")]
pub struct ReadError {
    /// The verbs' number.
    pub status: i32,
    /// In words.
    pub text: String,
    /// The card's own code.
    pub vendor: u32,
}

impl ReadError {
    /// Whether it only followed another one.
    pub fn is_flush(&self) -> bool {
        self.status == sys::WC_WR_FLUSH_ERR
    }
}

/// A completion queue whose events wake a task.
pub struct CompletionQueue {
    queue: NonNull<IbvCq>,
    channel: NonNull<IbvCompChannel>,
    /// A descriptor of its own for the channel's events.
    events: Option<AsyncFd<OwnedFd>>,
    /// An event will come, or is there and was not taken: arming is a call into the kernel, and this spares most of them.
    armed: AtomicBool,
    device: Arc<Device>,
}

// SAFETY: the library locks what its calls share; this value owns queue and channel.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl CompletionQueue {
    /// Room for `len` completions. Must be called in a runtime.
    pub fn new(device: &Arc<Device>, len: u32) -> Result<Self, DeviceError> {
        let verbs = device.verbs;
        // SAFETY: the context is open.
        let channel = unsafe { (verbs.create_comp_channel)(device.context.as_ptr()) };
        let channel = NonNull::new(channel)
            .ok_or_else(|| device.call_failed("making a completion channel", io::Error::last_os_error()))?;
        // Another core's interrupt for each, where the device has several.
        // SAFETY: the context is open.
        let vectors = unsafe { device.context.as_ref() }.num_comp_vectors.max(1);
        let vector = Arc::strong_count(device) as i32 % vectors;
        let len = i32::try_from(len.min(device.limits().completions)).unwrap_or(i32::MAX);
        // SAFETY: context and channel are open.
        let queue =
            unsafe { (verbs.create_cq)(device.context.as_ptr(), len, null_mut(), channel.as_ptr(), vector) };
        let Some(queue) = NonNull::new(queue) else {
            let error = device.call_failed("making a completion queue", io::Error::last_os_error());
            // SAFETY: made above, used by nobody.
            unsafe { (verbs.destroy_comp_channel)(channel.as_ptr()) };
            return Err(error);
        };
        let mut made = Self {
            queue,
            channel,
            events: None,
            armed: AtomicBool::new(false),
            device: device.clone(),
        };
        // SAFETY: the channel is open, and so is its descriptor.
        let fd = unsafe { BorrowedFd::borrow_raw(channel.as_ref().fd) };
        made.events = Some(watched(fd).map_err(|e| device.call_failed("watching a completion channel", e))?);
        Ok(made)
    }

    /// Takes what has completed; how many.
    pub fn poll(&self, out: &mut Vec<Completion>) -> io::Result<usize> {
        let mut taken = 0;
        loop {
            // SAFETY: zeroed is a valid value of this plain structure.
            let mut batch: [Wc; POLL_BATCH] = unsafe { std::mem::zeroed() };
            // SAFETY: the queue is there; its context's table of calls was filled by the library.
            let got = unsafe {
                let poll = (*(*self.queue.as_ptr()).context)
                    .ops
                    .poll_cq
                    .ok_or_else(incomplete)?;
                poll(self.queue.as_ptr(), POLL_BATCH as i32, batch.as_mut_ptr())
            };
            let got =
                usize::try_from(got).map_err(|_| io::Error::other("the completion queue cannot be read"))?;
            out.extend(batch[..got].iter().map(|wc| self.completion(wc)));
            taken += got;
            if got < POLL_BATCH {
                return Ok(taken);
            }
        }
    }

    fn completion(&self, wc: &Wc) -> Completion {
        let error = (wc.status != sys::WC_SUCCESS).then(|| ReadError {
            status: wc.status,
            text: status_text(self.device.verbs, wc.status),
            vendor: wc.vendor_err,
        });
        Completion {
            number: wc.wr_id,
            error,
        }
    }

    /// Makes the next completion an event.
    fn arm(&self) -> io::Result<()> {
        if self.armed.load(Ordering::Relaxed) {
            return Ok(());
        }
        // SAFETY: as in `poll`.
        let rc = unsafe {
            let arm = (*(*self.queue.as_ptr()).context)
                .ops
                .req_notify_cq
                .ok_or_else(incomplete)?;
            arm(self.queue.as_ptr(), 0)
        };
        check(rc)?;
        self.armed.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Takes the events that are there, and acknowledges them: the queue cannot be destroyed before.
    fn take_events(&self) -> io::Result<()> {
        loop {
            let (mut queue, mut context) = (null_mut(), null_mut());
            // SAFETY: the channel is open and does not block.
            let rc =
                unsafe { (self.device.verbs.get_cq_event)(self.channel.as_ptr(), &mut queue, &mut context) };
            if rc != 0 {
                let error = io::Error::last_os_error();
                return match error.kind() {
                    io::ErrorKind::WouldBlock => Ok(()),
                    io::ErrorKind::Interrupted => continue,
                    _ => Err(error),
                };
            }
            self.armed.store(false, Ordering::Relaxed);
            // SAFETY: the event is of this queue: the channel has no other.
            unsafe { (self.device.verbs.ack_cq_events)(queue, 1) };
        }
    }

    /// Waits until something has completed, first looking again and again for `spin`. Cancel safe.
    pub async fn wait(&self, spin: Duration, out: &mut Vec<Completion>) -> io::Result<()> {
        if self.poll(out)? > 0 {
            return Ok(());
        }
        if !spin.is_zero() {
            let until = Instant::now() + spin;
            while Instant::now() < until {
                if self.poll(out)? > 0 {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
        }
        let events = self.events.as_ref().expect("set where it is made");
        loop {
            self.arm()?;
            // What completed before it was armed makes no event.
            if self.poll(out)? > 0 {
                return Ok(());
            }
            let mut ready = events.ready(Interest::READABLE | Interest::ERROR).await?;
            self.take_events()?;
            ready.clear_ready();
        }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // An event that nobody took would be one that nobody acknowledged. What is not watched has not been armed, and reading
        // from it would wait.
        if self.events.take().is_some() {
            let _ = self.take_events();
        }
        // SAFETY: made here, and the queue pair that uses it is gone (its owner drops it first).
        let rcs = unsafe {
            let queue = (self.device.verbs.destroy_cq)(self.queue.as_ptr());
            [
                queue,
                (self.device.verbs.destroy_comp_channel)(self.channel.as_ptr()),
            ]
        };
        if rcs != [0; 2] {
            tracing::warn!(device = %self.device.name().name, ?rcs, "a completion queue was not destroyed cleanly");
        }
    }
}

fn incomplete() -> io::Error {
    io::Error::other("the device's driver lacks a call that every driver has")
}

fn watched(fd: BorrowedFd<'_>) -> io::Result<AsyncFd<OwnedFd>> {
    let own = fd.try_clone_to_owned()?;
    // SAFETY: the descriptor is open; only its flags change, which it shares with the one that it was cloned from.
    unsafe {
        let flags = libc::fcntl(own.as_raw_fd(), libc::F_GETFL);
        if flags < 0 || libc::fcntl(own.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: the descriptor is owned by what is registered, and nothing closes or replaces it before.
    unsafe { AsyncFd::register_with_interest(own, Interest::READABLE | Interest::ERROR) }
        .map_err(io::Error::from)
}

/// By which of this node's ports and addresses a connection goes.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// The port.
    pub port: u8,
    /// The address.
    pub gid: Gid,
    /// InfiniBand's.
    pub lid: u16,
    /// In effect.
    pub mtu: Mtu,
    /// Traffic class of its packets; where a network keeps RoCE apart by DSCP, four times the code point.
    pub traffic_class: u8,
}

/// A reliable connection's end.
pub struct QueuePair {
    pair: NonNull<IbvQp>,
    phase: Phase,
    device: Arc<Device>,
    way: Way,
}

// SAFETY: the library locks what its calls share; this value owns the pair.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("number", &self.number())
            .field("phase", &self.phase)
            .finish_non_exhaustive()
    }
}

impl QueuePair {
    /// One that asks: `reads` work requests at once, which complete in `queue`.
    pub fn asking(
        device: &Arc<Device>,
        way: Way,
        queue: &CompletionQueue,
        reads: u32,
    ) -> Result<Self, DeviceError> {
        Self::new(device, way, queue.queue, reads)
    }

    /// One that only answers.
    pub fn answering(device: &Arc<Device>, way: Way) -> Result<Self, DeviceError> {
        Self::new(device, way, device.sink, 1)
    }

    fn new(
        device: &Arc<Device>,
        way: Way,
        queue: NonNull<IbvCq>,
        requests: u32,
    ) -> Result<Self, DeviceError> {
        let mut init = QpInitAttr {
            qp_context: null_mut(),
            send_cq: queue.as_ptr(),
            recv_cq: queue.as_ptr(),
            srq: null_mut(),
            cap: QpCap {
                max_send_wr: requests.clamp(1, device.limits().queue_len),
                max_recv_wr: 1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: sys::QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: domain and queue are there for as long as the pair is: it keeps the device, its owner the queue.
        let pair = unsafe { (device.verbs.create_qp)(device.domain.as_ptr(), &mut init) };
        let pair = NonNull::new(pair)
            .ok_or_else(|| device.call_failed("making a queue pair", io::Error::last_os_error()))?;
        let mut made = Self {
            pair,
            phase: Phase::Reset,
            device: device.clone(),
            way,
        };
        let mut attr = QpAttr {
            qp_state: sys::QPS_INIT,
            port_num: way.port,
            // Peers may read, what they were given the key of; nobody may ever write.
            qp_access_flags: sys::ACCESS_REMOTE_READ as u32,
            ..QpAttr::default()
        };
        let mask = sys::QP_STATE | sys::QP_PKEY_INDEX | sys::QP_PORT | sys::QP_ACCESS_FLAGS;
        made.modify(
            &mut attr,
            mask,
            Phase::Initialized,
            "giving a queue pair its port",
        )?;
        Ok(made)
    }

    fn modify(
        &mut self,
        attr: &mut QpAttr,
        mask: i32,
        next: Phase,
        what: &'static str,
    ) -> Result<(), DeviceError> {
        assert!(self.phase.may_become(next), "{next:?} after {:?}", self.phase);
        // SAFETY: the pair is there, the structure is the library's (its layout is tested).
        let rc = unsafe { (self.device.verbs.modify_qp)(self.pair.as_ptr(), attr, mask) };
        check(rc).map_err(|e| self.device.call_failed(what, e))?;
        self.phase = next;
        Ok(())
    }

    /// Its number, which the peer must know.
    pub fn number(&self) -> u32 {
        // SAFETY: the pair is there.
        unsafe { self.pair.as_ref() }.qp_num
    }

    /// What the peer must know; its own packets begin with `first_packet`.
    pub fn endpoint(&self, first_packet: u32) -> Endpoint {
        Endpoint {
            queue_pair: self.number(),
            first_packet,
            gid: self.way.gid,
            lid: self.way.lid,
            mtu: self.way.mtu,
            reads: self.device.limits().reads_served,
        }
    }

    /// Connects it. `first_packet` is its own, which the peer was told; `asks`: it will post reads.
    pub fn connect(&mut self, peer: &Endpoint, first_packet: u32, asks: bool) -> Result<(), DeviceError> {
        if peer.gid.kind != self.way.gid.kind {
            let what = format!("a GID of another kind, {:?}", peer.gid.kind);
            let source = io::Error::new(io::ErrorKind::InvalidInput, what);
            return Err(self
                .device
                .call_failed("connecting a queue pair to its peer", source));
        }
        let limits = *self.device.limits();
        let mut attr = QpAttr {
            qp_state: sys::QPS_RTR,
            path_mtu: self.way.mtu.min(peer.mtu).number() as i32,
            dest_qp_num: peer.queue_pair,
            rq_psn: peer.first_packet,
            max_dest_rd_atomic: limits.reads_served,
            min_rnr_timer: MIN_RNR_TIMER,
            ah_attr: address(&self.way, peer),
            ..QpAttr::default()
        };
        let mask = sys::QP_STATE
            | sys::QP_AV
            | sys::QP_PATH_MTU
            | sys::QP_DEST_QPN
            | sys::QP_RQ_PSN
            | sys::QP_MAX_DEST_RD_ATOMIC
            | sys::QP_MIN_RNR_TIMER;
        self.modify(
            &mut attr,
            mask,
            Phase::ReadyToReceive,
            "connecting a queue pair to its peer",
        )?;
        if !asks {
            return Ok(());
        }
        let mut attr = QpAttr {
            qp_state: sys::QPS_RTS,
            timeout: ACK_TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RETRIES,
            sq_psn: first_packet,
            max_rd_atomic: limits.reads_asked.min(peer.reads).max(1),
            ..QpAttr::default()
        };
        let mask = sys::QP_STATE
            | sys::QP_TIMEOUT
            | sys::QP_RETRY_CNT
            | sys::QP_RNR_RETRY
            | sys::QP_SQ_PSN
            | sys::QP_MAX_QP_RD_ATOMIC;
        self.modify(
            &mut attr,
            mask,
            Phase::ReadyToSend,
            "making a queue pair ready to ask",
        )
    }

    /// Posts one read of `len` bytes at `address` of the peer into `slab` from `offset` on.
    ///
    /// # Safety
    /// The slab stays where it is, and nobody reads or writes it, until the read has completed, or the pair is gone.
    pub(crate) unsafe fn post_read(
        &mut self,
        number: u64,
        slab: &Slab,
        offset: u32,
        len: u32,
        (address, key): (u64, u32),
        signaled: bool,
    ) -> io::Result<()> {
        if self.phase != Phase::ReadyToSend {
            return Err(io::Error::new(
                io::ErrorKind::NotConnected,
                format!("the queue pair is {:?}", self.phase),
            ));
        }
        assert!(
            offset as usize + len as usize <= slab.len(),
            "a read past the end of a slab"
        );
        let mut sge = Sge {
            addr: slab.address() + u64::from(offset),
            length: len,
            lkey: slab.local_key(),
        };
        let mut request = SendWr::read(number, &mut sge, address, key, signaled);
        let mut bad = null_mut();
        // SAFETY: the pair is there; request and piece outlive the call, which copies them; the memory is the caller's
        // promise.
        let rc = unsafe {
            let post = (*(*self.pair.as_ptr()).context)
                .ops
                .post_send
                .ok_or_else(incomplete)?;
            post(self.pair.as_ptr(), &mut request, &mut bad)
        };
        check(rc)
    }

    /// Ends it: what is under way completes with an error, and nothing more is answered.
    pub fn fail(&mut self) {
        if self.phase == Phase::Failed {
            return;
        }
        let mut attr = QpAttr {
            qp_state: sys::QPS_ERR,
            ..QpAttr::default()
        };
        // A device that is gone answers with an error, and has ended it anyway.
        if let Err(error) = self.modify(&mut attr, sys::QP_STATE, Phase::Failed, "ending a queue pair") {
            tracing::debug!(%error, "a queue pair");
            self.phase = Phase::Failed;
        }
    }

    /// Destroys it. Afterwards the device touches nothing of what it was given any more; an error says that it may.
    pub fn destroy(self) -> io::Result<()> {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: made here, destroyed once; `this` is not used again but for the device, which is read out once.
        let (rc, device) = unsafe {
            let rc = (this.device.verbs.destroy_qp)(this.pair.as_ptr());
            (rc, std::ptr::read(&this.device))
        };
        device.destroyed(rc)
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: made here, destroyed once: `destroy` does not come here.
        let rc = unsafe { (self.device.verbs.destroy_qp)(self.pair.as_ptr()) };
        if let Err(error) = self.device.destroyed(rc) {
            tracing::warn!(device = %self.device.name().name, %error, "a queue pair was not destroyed");
        }
    }
}

/// How packets get to the peer: by its LID within an InfiniBand subnet, by its GID otherwise.
fn address(way: &Way, peer: &Endpoint) -> AhAttr {
    let mut address = AhAttr {
        port_num: way.port,
        ..AhAttr::default()
    };
    match peer.gid.kind.layer() {
        Layer::Infiniband => {
            debug_assert_eq!(way.gid.kind, GidKind::Infiniband);
            address.dlid = peer.lid;
        }
        Layer::Ethernet => {
            address.is_global = 1;
            address.grh = GlobalRoute {
                dgid: sys::Gid { raw: peer.gid.raw },
                flow_label: 0,
                // The table's indices fit: ports have at most 256 entries, and those that are looked at are counted.
                sgid_index: u8::try_from(way.gid.index).unwrap_or(u8::MAX),
                hop_limit: HOP_LIMIT,
                traffic_class: way.traffic_class,
            };
        }
    }
    address
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(kind: GidKind) -> Endpoint {
        Endpoint {
            queue_pair: 5,
            first_packet: 6,
            gid: Gid {
                index: 9,
                kind,
                raw: [7; 16],
            },
            lid: 77,
            mtu: Mtu::from_number(3).unwrap(),
            reads: 4,
        }
    }

    #[test]
    fn infiniband_goes_by_lid_and_roce_by_gid() {
        let way = |kind| Way {
            port: 2,
            gid: Gid {
                index: 3,
                kind,
                raw: [1; 16],
            },
            lid: 1,
            mtu: Mtu::from_number(5).unwrap(),
            traffic_class: 104,
        };
        let ib = address(&way(GidKind::Infiniband), &endpoint(GidKind::Infiniband));
        assert_eq!((ib.is_global, ib.dlid, ib.port_num), (0, 77, 2));
        let roce = address(&way(GidKind::RoceV2), &endpoint(GidKind::RoceV2));
        assert_eq!((roce.is_global, roce.dlid, roce.port_num), (1, 0, 2));
        assert_eq!(roce.grh.dgid.raw, [7; 16], "the peer's address");
        assert_eq!(
            (roce.grh.sgid_index, roce.grh.traffic_class),
            (3, 104),
            "this end's own"
        );
    }
}
