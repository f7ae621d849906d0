//! Devices: what there is, opened ones, their ports. Everything here asks the kernel and may block.

use crate::{
    choice::{Gid, GidKind, Layer, Mtu},
    sys::{self, DeviceAttr, IbvContext, IbvCq, IbvPd, LoadError, PortAttr, Verbs},
};
use std::{
    ffi::{CStr, c_int},
    fmt, io,
    path::Path,
    ptr::NonNull,
    sync::Arc,
};
use tokio_util::sync::CancellationToken;

/// Most GID table entries that are looked at: cards have 16 to 256, each look is a system call.
const MAX_GIDS: u32 = 256;
/// Where the kernel shows what a GID is for.
const SYSFS: &str = "/sys/class/infiniband";
/// What the library calls InfiniBand's transport, RoCE's too.
const TRANSPORT_INFINIBAND: c_int = 0;
/// Port states and layers as the verbs number them.
const PORT_ACTIVE: c_int = 4;
const LAYER_INFINIBAND: u8 = 1;
const LAYER_ETHERNET: u8 = 2;

/// Why a device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// No library.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The library is there, the kernel has no RDMA.
    #[error(
        "the kernel gives no RDMA devices: {0}; load the card's module and ib_uverbs (and give a container /dev/infiniband)"
    )]
    NoKernel(io::Error),
    /// Another transport than InfiniBand's: its connections need another set-up.
    #[error(
        "{device} is no InfiniBand or RoCE device (iWARP, EFA and usNIC are not supported); name others with --rdma-device"
    )]
    OtherTransport {
        /// The device.
        device: String,
    },
    /// A call failed.
    #[error("{device}: {what} failed: {source}")]
    Call {
        /// The device.
        device: String,
        /// Which call.
        what: &'static str,
        /// As the system said it.
        source: io::Error,
    },
}

impl DeviceError {
    /// Whether a list of devices that failed so means that there are none: not that it could not be looked at.
    fn means_no_device(&self) -> bool {
        matches!(self, Self::NoKernel(error) if error.kind() == io::ErrorKind::NotFound)
    }
}

/// A device as it is listed: `name` (`mlx5_0`) is a person's, `node` (`uverbs3`) the kernel's, which a device that comes
/// back may have changed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceName {
    /// Its name.
    pub name: String,
    /// Its device node.
    pub node: String,
}

/// Where the kernel lists its RDMA devices, once it has any.
const CLASS: &str = "/sys/class/infiniband";

/// The list of devices, freed when dropped.
struct List {
    verbs: &'static Verbs,
    devices: NonNull<*mut sys::IbvDevice>,
    len: usize,
}

impl List {
    fn get() -> Result<Self, DeviceError> {
        let verbs = Verbs::get()?;
        // The library asks the kernel for devices in a way that makes it look for a module, each time.
        std::fs::metadata(CLASS).map_err(DeviceError::NoKernel)?;
        let mut len: c_int = 0;
        // SAFETY: `len` outlives the call; the result is null or a list that is freed in `drop`.
        let devices = unsafe { (verbs.get_device_list)(&mut len) };
        let devices =
            NonNull::new(devices).ok_or_else(|| DeviceError::NoKernel(io::Error::last_os_error()))?;
        let len = usize::try_from(len).unwrap_or(0);
        Ok(Self { verbs, devices, len })
    }

    fn iter(&self) -> impl Iterator<Item = (NonNull<sys::IbvDevice>, DeviceName)> {
        (0..self.len).filter_map(|at| {
            // SAFETY: the list has `len` entries and lives as long as `self`.
            let device = NonNull::new(unsafe { *self.devices.as_ptr().add(at) })?;
            let text = |field: &[libc::c_char; 64]| {
                let bytes: Vec<u8> = field.iter().map(|c| *c as u8).take_while(|b| *b != 0).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            };
            // SAFETY: an entry is a device, which is only read.
            let about = unsafe { device.as_ref() };
            let name = DeviceName {
                name: text(&about.name),
                node: text(&about.dev_name),
            };
            Some((device, name))
        })
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: it came from the call that makes such lists; opened devices do not need it.
        unsafe { (self.verbs.free_device_list)(self.devices.as_ptr()) }
    }
}

/// The devices that there are now.
pub fn list() -> Result<Vec<DeviceName>, DeviceError> {
    Ok(List::get()?.iter().map(|(_, name)| name).collect())
}

/// An open device with its protection domain. What is made of it keeps it open.
pub struct Device {
    pub(crate) verbs: &'static Verbs,
    pub(crate) context: NonNull<IbvContext>,
    pub(crate) domain: NonNull<IbvPd>,
    /// Where queue pairs complete that never post anything: each must have a queue.
    pub(crate) sink: NonNull<IbvCq>,
    name: DeviceName,
    limits: Limits,
    gone: CancellationToken,
}

/// What a device bears.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Reads of one queue pair under way at once, as the one who asks.
    pub reads_asked: u8,
    /// As the one who is asked.
    pub reads_served: u8,
    /// Work requests of one queue.
    pub queue_len: u32,
    /// Completions of one queue.
    pub completions: u32,
    /// Ports.
    pub ports: u8,
}

// SAFETY: the library locks whatever the calls used here share (verbs(7): every call may be made by several threads at
// once); this type only holds pointers to what the library owns until `drop`.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("name", &self.name.name)
            .field("gone", &self.gone.is_cancelled())
            .finish()
    }
}

impl Device {
    /// Opens the device of this name.
    pub fn open(name: &DeviceName) -> Result<Arc<Self>, DeviceError> {
        let list = List::get()?;
        let failed = |what| {
            let source = io::Error::last_os_error();
            let device = name.name.clone();
            DeviceError::Call { device, what, source }
        };
        let Some((device, _)) = list.iter().find(|(_, n)| n == name) else {
            return Err(DeviceError::Call {
                device: name.name.clone(),
                what: "opening",
                source: io::ErrorKind::NotFound.into(),
            });
        };
        // SAFETY: an entry of the list, which lives, is a device, which is only read.
        if unsafe { device.as_ref() }.transport_type != TRANSPORT_INFINIBAND {
            let device = name.name.clone();
            return Err(DeviceError::OtherTransport { device });
        }
        let verbs = list.verbs;
        // SAFETY: the device is one of the list, which lives.
        let context = unsafe { (verbs.open_device)(device.as_ptr()) };
        let context = Opened {
            verbs,
            context: NonNull::new(context).ok_or_else(|| failed("opening"))?,
        };
        let mut attr = std::mem::MaybeUninit::<DeviceAttr>::zeroed();
        // SAFETY: the context is open, the structure is as large as the library's (its layout is tested).
        let rc = unsafe { (verbs.query_device)(context.context.as_ptr(), attr.as_mut_ptr()) };
        check(rc).map_err(|source| DeviceError::Call {
            device: name.name.clone(),
            what: "asking for its limits",
            source,
        })?;
        // SAFETY: zeroed is a valid value, and the call filled it.
        let attr = unsafe { attr.assume_init() };
        // SAFETY: the context is open.
        let domain = unsafe { (verbs.alloc_pd)(context.context.as_ptr()) };
        let domain = NonNull::new(domain).ok_or_else(|| failed("making a protection domain"))?;
        // SAFETY: the context is open; no channel.
        let sink = unsafe {
            let null = std::ptr::null_mut();
            (verbs.create_cq)(context.context.as_ptr(), 1, null, std::ptr::null_mut(), 0)
        };
        let Some(sink) = NonNull::new(sink) else {
            let error = failed("making a completion queue");
            // SAFETY: nothing was made in it.
            unsafe { (verbs.dealloc_pd)(domain.as_ptr()) };
            return Err(error);
        };
        let small = |n: c_int| u8::try_from(n.clamp(1, 255)).expect("in range");
        let device = Self {
            verbs,
            context: context.context,
            domain,
            sink,
            name: name.clone(),
            limits: Limits {
                reads_asked: small(attr.max_qp_init_rd_atom),
                reads_served: small(attr.max_qp_rd_atom),
                queue_len: u32::try_from(attr.max_qp_wr).unwrap_or(1),
                completions: u32::try_from(attr.max_cqe).unwrap_or(1),
                ports: attr.phys_port_cnt,
            },
            gone: CancellationToken::new(),
        };
        std::mem::forget(context);
        Ok(Arc::new(device))
    }

    /// Its name.
    pub fn name(&self) -> &DeviceName {
        &self.name
    }

    /// What it bears.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Ends when the device was taken away: whatever uses it lets go of it then, for the kernel waits for that.
    pub fn gone(&self) -> &CancellationToken {
        &self.gone
    }

    pub(crate) fn call_failed(&self, what: &'static str, source: io::Error) -> DeviceError {
        DeviceError::Call {
            device: self.name.name.clone(),
            what,
            source,
        }
    }

    /// Whether what a call was to destroy is gone, by the call's answer `rc`. May ask the kernel.
    pub(crate) fn destroyed(&self, rc: c_int) -> io::Result<()> {
        destroyed(rc, || match list() {
            Ok(devices) => devices.contains(&self.name),
            // Whoever cannot look knows nothing, and the card may still write.
            Err(error) => !error.means_no_device(),
        })
    }

    fn port_attr(&self, number: u8) -> Result<PortAttr, DeviceError> {
        // SAFETY: zeroed is a valid value of this plain structure.
        let mut attr: PortAttr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open; the call writes what its version of the structure has, which is a prefix.
        let rc = unsafe { (self.verbs.query_port)(self.context.as_ptr(), number, &mut attr) };
        check(rc).map_err(|e| self.call_failed("asking for a port's state", e))?;
        Ok(attr)
    }

    /// The state of its port, as [`Port::state`] has it.
    pub fn port_state(&self, number: u8) -> Result<&'static str, DeviceError> {
        Ok(state_name(self.port_attr(number)?.state))
    }

    /// How its port is.
    pub fn port(&self, number: u8) -> Result<Port, DeviceError> {
        let attr = self.port_attr(number)?;
        let layer = match attr.link_layer {
            LAYER_ETHERNET => Layer::Ethernet,
            // Unspecified is what InfiniBand drivers of old said.
            LAYER_INFINIBAND | 0 => Layer::Infiniband,
            _ => Layer::Ethernet,
        };
        let entries = u32::try_from(attr.gid_tbl_len).unwrap_or(0).min(MAX_GIDS);
        let gids = (0..entries)
            .filter_map(|index| self.gid(number, index, layer))
            .collect();
        let mtu = |number: c_int| u32::try_from(number).ok().and_then(Mtu::from_number);
        Ok(Port {
            number,
            active: attr.state == PORT_ACTIVE,
            state: state_name(attr.state),
            layer,
            mtu: mtu(attr.active_mtu)
                .or_else(|| Mtu::from_number(1))
                .expect("1 is one"),
            largest_mtu: mtu(attr.max_mtu)
                .or_else(|| Mtu::from_number(1))
                .expect("1 is one"),
            largest_message: attr.max_msg_sz,
            lid: attr.lid,
            gids,
        })
    }

    fn gid(&self, port: u8, index: u32, layer: Layer) -> Option<Gid> {
        let mut gid = sys::Gid::default();
        // SAFETY: the context is open, `gid` outlives the call.
        let rc = unsafe { (self.verbs.query_gid)(self.context.as_ptr(), port, index as c_int, &mut gid) };
        if rc != 0 || gid.raw == [0; 16] {
            return None;
        }
        let kind = match layer {
            Layer::Infiniband => GidKind::Infiniband,
            Layer::Ethernet => {
                let path = format!("{SYSFS}/{}/ports/{port}/gid_attrs/types/{index}", self.name.name);
                roce_kind(&std::fs::read_to_string(Path::new(&path)).unwrap_or_default())
            }
        };
        Some(Gid {
            index,
            kind,
            raw: gid.raw,
        })
    }
}

/// What the kernel writes of an Ethernet port's GID. A kernel that does not say is too old for anything but v1.
fn roce_kind(text: &str) -> GidKind {
    match text.trim() {
        "RoCE v2" => GidKind::RoceV2,
        _ => GidKind::RoceV1,
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: everything made of this device holds an `Arc` of it and is gone, so that these are the last uses. A
        // device that was taken away gives errors, and the kernel has cleaned up.
        let rcs = unsafe {
            [
                (self.verbs.destroy_cq)(self.sink.as_ptr()),
                (self.verbs.dealloc_pd)(self.domain.as_ptr()),
                (self.verbs.close_device)(self.context.as_ptr()),
            ]
        };
        if rcs != [0; 3] {
            tracing::warn!(device = %self.name.name, ?rcs, "an RDMA device was not closed cleanly");
        }
    }
}

/// Closes a context again if the rest of opening fails.
struct Opened {
    verbs: &'static Verbs,
    context: NonNull<IbvContext>,
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: it was opened and nothing was made of it.
        unsafe { (self.verbs.close_device)(self.context.as_ptr()) };
    }
}

/// A port's state when it was asked for.
#[derive(Clone, Debug)]
pub struct Port {
    /// From 1 on.
    pub number: u8,
    /// Whether frames get through.
    pub active: bool,
    /// For messages.
    pub state: &'static str,
    /// What its frames are.
    pub layer: Layer,
    /// In effect.
    pub mtu: Mtu,
    /// What the port bears.
    pub largest_mtu: Mtu,
    /// Of one work request.
    pub largest_message: u32,
    /// InfiniBand's address; 0: none.
    pub lid: u16,
    /// Those in use.
    pub gids: Vec<Gid>,
}

fn state_name(state: c_int) -> &'static str {
    match state {
        1 => "down",
        2 => "initializing",
        3 => "armed",
        4 => "active",
        5 => "active, deferred",
        _ => "unknown",
    }
}

/// Calls that answer with an error number, or with -1 and `errno`.
pub(crate) fn check(rc: c_int) -> io::Result<()> {
    match rc {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        number => Err(io::Error::from_raw_os_error(number.abs())),
    }
}

/// When a card is pulled out, the kernel destroys all that a process has of it and from then on answers every call with EIO,
/// those that are to destroy something too. A driver may say EIO of a card that is still there and may still write: so the
/// device must have gone from the list.
fn destroyed(rc: c_int, listed: impl FnOnce() -> bool) -> io::Result<()> {
    check(rc).or_else(|error| match error.raw_os_error() {
        Some(libc::EIO) if !listed() => Ok(()),
        _ => Err(error),
    })
}

/// What a completion's status means, as the library puts it.
pub(crate) fn status_text(verbs: &Verbs, status: c_int) -> String {
    // SAFETY: the call takes any number and gives a static string.
    let text = unsafe { (verbs.wc_status_str)(status) };
    if text.is_null() {
        return format!("status {status}");
    }
    // SAFETY: not null, static.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_writes_of_gids() {
        assert_eq!(roce_kind("RoCE v2\n"), GidKind::RoceV2);
        assert_eq!(roce_kind("IB/RoCE v1\n"), GidKind::RoceV1);
        assert_eq!(roce_kind(""), GidKind::RoceV1);
    }

    #[test]
    fn what_a_pulled_card_had_is_destroyed() {
        let (listed, pulled) = (|| true, || false);
        destroyed(0, listed).unwrap();
        destroyed(libc::EIO, pulled).unwrap();
        assert!(destroyed(libc::EIO, listed).is_err(), "it may still write");
        assert!(destroyed(libc::EBUSY, pulled).is_err());
        let failed = |number| DeviceError::NoKernel(io::Error::from_raw_os_error(number)).means_no_device();
        assert!(failed(libc::ENOENT) && !failed(libc::EMFILE) && !failed(libc::ENOMEM));
    }

    #[test]
    fn error_numbers_come_in_two_ways() {
        check(0).unwrap();
        assert_eq!(
            check(libc::ENOMEM).unwrap_err().kind(),
            io::ErrorKind::OutOfMemory
        );
        assert_eq!(
            check(-libc::EACCES).unwrap_err().kind(),
            io::ErrorKind::PermissionDenied
        );
    }
}
