//! The few structures and calls of libibverbs that this crate needs, declared by hand, and the library itself, found at
//! run time: the same program runs on hosts that have never heard of RDMA.
//!
//! The layouts are those of the library's ABI `IBVERBS_1.1`, which has been stable since 2008 (later fields went into
//! former padding or behind the end). They were compared with what a C compiler says of Debian's `verbs.h` (rdma-core
//! 44, x86-64 and any other 64-bit Linux); the numbers are in this module's tests. Each symbol is asked for by that
//! version's name where the C library can do so, so that a library with another ABI is refused and not misread.

use libc::{c_char, c_int, c_uint, c_void, size_t};
use std::{ffi::CStr, mem::transmute_copy, ptr::NonNull, sync::OnceLock};

/// `struct ibv_device`: what there is before it is opened.
#[repr(C)]
pub(crate) struct IbvDevice {
    _ops: [*mut c_void; 2],
    pub(crate) node_type: c_int,
    pub(crate) transport_type: c_int,
    pub(crate) name: [c_char; 64],
    pub(crate) dev_name: [c_char; 64],
    _dev_path: [c_char; 256],
    _ibdev_path: [c_char; 256],
}

pub(crate) type PollCq = unsafe extern "C" fn(*mut IbvCq, c_int, *mut Wc) -> c_int;
pub(crate) type ReqNotifyCq = unsafe extern "C" fn(*mut IbvCq, c_int) -> c_int;
pub(crate) type PostSend = unsafe extern "C" fn(*mut IbvQp, *mut SendWr, *mut *mut SendWr) -> c_int;

/// `struct ibv_context_ops`: the data path does not go through exported symbols but through these pointers.
#[repr(C)]
pub(crate) struct ContextOps {
    _before_poll: [*mut c_void; 11],
    pub(crate) poll_cq: Option<PollCq>,
    pub(crate) req_notify_cq: Option<ReqNotifyCq>,
    _before_send: [*mut c_void; 12],
    pub(crate) post_send: Option<PostSend>,
    _after_send: [*mut c_void; 6],
}

/// `struct ibv_context`, as far as it is used (it is only ever made by the library).
#[repr(C)]
pub(crate) struct IbvContext {
    _device: *mut IbvDevice,
    pub(crate) ops: ContextOps,
    _cmd_fd: c_int,
    _async_fd: c_int,
    pub(crate) num_comp_vectors: c_int,
}

/// `struct ibv_pd`, made by the library.
#[repr(C)]
pub(crate) struct IbvPd {
    _context: *mut IbvContext,
    _handle: u32,
}

/// `struct ibv_mr`, made by the library.
#[repr(C)]
pub(crate) struct IbvMr {
    _context: *mut IbvContext,
    _pd: *mut IbvPd,
    _addr: *mut c_void,
    _length: size_t,
    _handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

/// `struct ibv_comp_channel`, made by the library.
#[repr(C)]
pub(crate) struct IbvCompChannel {
    _context: *mut IbvContext,
    pub(crate) fd: c_int,
    _refcnt: c_int,
}

/// `struct ibv_cq`, as far as it is used.
#[repr(C)]
pub(crate) struct IbvCq {
    pub(crate) context: *mut IbvContext,
}

/// `struct ibv_qp`, as far as it is used.
#[repr(C)]
pub(crate) struct IbvQp {
    pub(crate) context: *mut IbvContext,
    _pointers: [*mut c_void; 5],
    _handle: u32,
    pub(crate) qp_num: u32,
}

/// `struct ibv_device_attr`.
#[repr(C)]
pub(crate) struct DeviceAttr {
    _fw_ver: [c_char; 64],
    _node_guid: u64,
    _sys_image_guid: u64,
    pub(crate) max_mr_size: u64,
    _page_size_cap: u64,
    _vendor_id: u32,
    _vendor_part_id: u32,
    _hw_ver: u32,
    pub(crate) max_qp: c_int,
    pub(crate) max_qp_wr: c_int,
    _device_cap_flags: c_uint,
    _max_sge: c_int,
    _max_sge_rd: c_int,
    _max_cq: c_int,
    pub(crate) max_cqe: c_int,
    _max_mr: c_int,
    _max_pd: c_int,
    pub(crate) max_qp_rd_atom: c_int,
    _max_ee_rd_atom: c_int,
    _max_res_rd_atom: c_int,
    pub(crate) max_qp_init_rd_atom: c_int,
    _rest: [c_int; 16],
    _max_pkeys: u16,
    _local_ca_ack_delay: u8,
    pub(crate) phys_port_cnt: u8,
    _tail: u32,
}

/// `struct ibv_port_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PortAttr {
    pub(crate) state: c_int,
    pub(crate) max_mtu: c_int,
    pub(crate) active_mtu: c_int,
    pub(crate) gid_tbl_len: c_int,
    _port_cap_flags: u32,
    pub(crate) max_msg_sz: u32,
    _bad_pkey_cntr: u32,
    _qkey_viol_cntr: u32,
    _pkey_tbl_len: u16,
    pub(crate) lid: u16,
    _sm_lid: u16,
    _lmc: u8,
    _max_vl_num: u8,
    _sm_sl: u8,
    _subnet_timeout: u8,
    _init_type_reply: u8,
    _active_width: u8,
    _active_speed: u8,
    _phys_state: u8,
    pub(crate) link_layer: u8,
    _flags: u8,
    _port_cap_flags2: u16,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct QpCap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(crate) struct QpInitAttr {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut IbvCq,
    pub(crate) recv_cq: *mut IbvCq,
    pub(crate) srq: *mut c_void,
    pub(crate) cap: QpCap,
    pub(crate) qp_type: c_int,
    pub(crate) sq_sig_all: c_int,
}

/// `struct ibv_global_route`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct GlobalRoute {
    /// Aligned like the two 64-bit halves of `union ibv_gid`.
    pub(crate) dgid: Gid,
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

/// `union ibv_gid`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Gid {
    pub(crate) raw: [u8; 16],
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct AhAttr {
    pub(crate) grh: GlobalRoute,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct QpAttr {
    pub(crate) qp_state: c_int,
    pub(crate) cur_qp_state: c_int,
    pub(crate) path_mtu: c_int,
    pub(crate) path_mig_state: c_int,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: c_uint,
    pub(crate) cap: QpCap,
    pub(crate) ah_attr: AhAttr,
    pub(crate) alt_ah_attr: AhAttr,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    pub(crate) sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) rate_limit: u32,
}

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Sge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

/// `struct ibv_send_wr`, with the `rdma` arm of its union.
#[repr(C)]
pub(crate) struct SendWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut SendWr,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: c_int,
    pub(crate) send_flags: c_uint,
    pub(crate) imm_data: u32,
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
    _rest_of_unions: [u64; 9],
}

impl SendWr {
    /// A one-sided read into `sge`.
    pub(crate) fn read(wr_id: u64, sge: *mut Sge, remote_addr: u64, rkey: u32, signaled: bool) -> Self {
        Self {
            wr_id,
            next: std::ptr::null_mut(),
            sg_list: sge,
            num_sge: 1,
            opcode: WR_RDMA_READ,
            send_flags: if signaled { SEND_SIGNALED } else { 0 },
            imm_data: 0,
            remote_addr,
            rkey,
            _rest_of_unions: [0; 9],
        }
    }
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Wc {
    pub(crate) wr_id: u64,
    pub(crate) status: c_int,
    pub(crate) opcode: c_int,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    _imm_data: u32,
    pub(crate) qp_num: u32,
    _src_qp: u32,
    _wc_flags: c_uint,
    _pkey_index: u16,
    _slid: u16,
    _sl: u8,
    _dlid_path_bits: u8,
}

pub(crate) const WR_RDMA_READ: c_int = 4;
pub(crate) const SEND_SIGNALED: c_uint = 2;
pub(crate) const QPT_RC: c_int = 2;
pub(crate) const ACCESS_LOCAL_WRITE: c_int = 1;
pub(crate) const ACCESS_REMOTE_READ: c_int = 4;
pub(crate) const QPS_INIT: c_int = 1;
pub(crate) const QPS_RTR: c_int = 2;
pub(crate) const QPS_RTS: c_int = 3;
pub(crate) const QPS_ERR: c_int = 6;
pub(crate) const QP_STATE: c_int = 1;
pub(crate) const QP_ACCESS_FLAGS: c_int = 1 << 3;
pub(crate) const QP_PKEY_INDEX: c_int = 1 << 4;
pub(crate) const QP_PORT: c_int = 1 << 5;
pub(crate) const QP_AV: c_int = 1 << 7;
pub(crate) const QP_PATH_MTU: c_int = 1 << 8;
pub(crate) const QP_TIMEOUT: c_int = 1 << 9;
pub(crate) const QP_RETRY_CNT: c_int = 1 << 10;
pub(crate) const QP_RNR_RETRY: c_int = 1 << 11;
pub(crate) const QP_RQ_PSN: c_int = 1 << 12;
pub(crate) const QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
pub(crate) const QP_MIN_RNR_TIMER: c_int = 1 << 15;
pub(crate) const QP_SQ_PSN: c_int = 1 << 16;
pub(crate) const QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
pub(crate) const QP_DEST_QPN: c_int = 1 << 20;
pub(crate) const WC_SUCCESS: c_int = 0;
pub(crate) const WC_WR_FLUSH_ERR: c_int = 5;

/// Why there is no libibverbs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// No such library.
    #[error(
        "libibverbs.so.1 cannot be loaded: {0}; install it (Debian, Ubuntu: libibverbs1 and ibverbs-providers; \
         RHEL: libibverbs and rdma-core)"
    )]
    Missing(String),
    /// It is there, and not what it should be.
    #[error("libibverbs.so.1 has no {symbol} of version {version}: {why}; install rdma-core 17 or later")]
    Symbol {
        /// The call.
        symbol: String,
        /// Its version.
        version: String,
        /// As the loader said it.
        why: String,
    },
}

macro_rules! verbs {
    ($($(#[$doc:meta])* $name:ident: fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        /// The library's calls.
        pub(crate) struct Verbs {
            $($(#[$doc])* pub(crate) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl Verbs {
            fn load() -> Result<Self, LoadError> {
                let library = open_library()?;
                Ok(Self {
                    $($name: {
                        let found = symbol(library, concat!("ibv_", stringify!($name)))?;
                        // SAFETY: a function pointer has the size of a pointer, and the symbol of this name and
                        // version is a function of this type (see the module's documentation).
                        unsafe {
                            transmute_copy::<NonNull<c_void>, unsafe extern "C" fn($($arg),*) $(-> $ret)?>(&found)
                        }
                    },)*
                })
            }
        }
    };
}

verbs! {
    get_device_list: fn(*mut c_int) -> *mut *mut IbvDevice;
    free_device_list: fn(*mut *mut IbvDevice);
    open_device: fn(*mut IbvDevice) -> *mut IbvContext;
    close_device: fn(*mut IbvContext) -> c_int;
    query_device: fn(*mut IbvContext, *mut DeviceAttr) -> c_int;
    query_port: fn(*mut IbvContext, u8, *mut PortAttr) -> c_int;
    query_gid: fn(*mut IbvContext, u8, c_int, *mut Gid) -> c_int;
    alloc_pd: fn(*mut IbvContext) -> *mut IbvPd;
    dealloc_pd: fn(*mut IbvPd) -> c_int;
    reg_mr: fn(*mut IbvPd, *mut c_void, size_t, c_int) -> *mut IbvMr;
    dereg_mr: fn(*mut IbvMr) -> c_int;
    create_comp_channel: fn(*mut IbvContext) -> *mut IbvCompChannel;
    destroy_comp_channel: fn(*mut IbvCompChannel) -> c_int;
    create_cq: fn(*mut IbvContext, c_int, *mut c_void, *mut IbvCompChannel, c_int) -> *mut IbvCq;
    destroy_cq: fn(*mut IbvCq) -> c_int;
    get_cq_event: fn(*mut IbvCompChannel, *mut *mut IbvCq, *mut *mut c_void) -> c_int;
    ack_cq_events: fn(*mut IbvCq, c_uint);
    create_qp: fn(*mut IbvPd, *mut QpInitAttr) -> *mut IbvQp;
    modify_qp: fn(*mut IbvQp, *mut QpAttr, c_int) -> c_int;
    destroy_qp: fn(*mut IbvQp) -> c_int;
    wc_status_str: fn(c_int) -> *const c_char;
}

impl Verbs {
    /// The library, loaded at the first call and never unloaded; the outcome of the first call stays.
    pub(crate) fn get() -> Result<&'static Self, LoadError> {
        static VERBS: OnceLock<Result<Verbs, LoadError>> = OnceLock::new();
        VERBS.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }
}

fn loader_error() -> String {
    // SAFETY: dlerror gives null or a C string that lives until this thread's next call of the loader.
    let text = unsafe {
        let text = libc::dlerror();
        (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
    };
    text.unwrap_or_else(|| "the loader gives no reason".to_owned())
}

fn open_library() -> Result<NonNull<c_void>, LoadError> {
    // SAFETY: the name is a C string; the library's constructors only read its configuration.
    let library = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    NonNull::new(library).ok_or_else(|| LoadError::Missing(loader_error()))
}

/// The version of a call's symbol. The two that make and destroy channels never needed a new one.
fn version_of(name: &str) -> &'static CStr {
    match name {
        "ibv_create_comp_channel" | "ibv_destroy_comp_channel" => c"IBVERBS_1.0",
        _ => c"IBVERBS_1.1",
    }
}

fn symbol(library: NonNull<c_void>, name: &str) -> Result<NonNull<c_void>, LoadError> {
    let c_name = std::ffi::CString::new(name).expect("a name has no zero byte");
    let version = version_of(name);
    // SAFETY: the library is open for good, and both are C strings.
    #[cfg(target_env = "gnu")]
    let found = unsafe { libc::dlvsym(library.as_ptr(), c_name.as_ptr(), version.as_ptr()) };
    // SAFETY: as above; other C libraries do not know versions.
    #[cfg(not(target_env = "gnu"))]
    let found = unsafe { libc::dlsym(library.as_ptr(), c_name.as_ptr()) };
    NonNull::new(found).ok_or_else(|| LoadError::Symbol {
        symbol: name.to_owned(),
        version: version.to_string_lossy().into_owned(),
        why: loader_error(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    /// What a C compiler said of rdma-core 44's header.
    #[test]
    #[cfg(target_pointer_width = "64")]
    fn layouts_are_those_of_the_header() {
        assert_eq!(size_of::<IbvDevice>(), 664);
        assert_eq!(offset_of!(IbvDevice, node_type), 16);
        assert_eq!(offset_of!(IbvDevice, name), 24);
        assert_eq!(offset_of!(IbvDevice, dev_name), 88);
        assert_eq!(size_of::<ContextOps>(), 256);
        assert_eq!(offset_of!(ContextOps, poll_cq), 88);
        assert_eq!(offset_of!(ContextOps, req_notify_cq), 96);
        assert_eq!(offset_of!(ContextOps, post_send), 200);
        assert_eq!(offset_of!(IbvContext, ops), 8);
        assert_eq!(offset_of!(IbvContext, num_comp_vectors), 272);
        assert_eq!((offset_of!(IbvMr, lkey), offset_of!(IbvMr, rkey)), (36, 40));
        assert_eq!(size_of::<IbvMr>(), 48);
        assert_eq!(offset_of!(IbvCompChannel, fd), 8);
        assert_eq!((offset_of!(IbvCq, context), offset_of!(IbvQp, context)), (0, 0));
        assert_eq!(offset_of!(IbvQp, qp_num), 52);
        assert_eq!(size_of::<DeviceAttr>(), 232);
        assert_eq!(offset_of!(DeviceAttr, max_mr_size), 80);
        assert_eq!(offset_of!(DeviceAttr, max_qp), 108);
        assert_eq!(offset_of!(DeviceAttr, max_qp_wr), 112);
        assert_eq!(offset_of!(DeviceAttr, max_cqe), 132);
        assert_eq!(offset_of!(DeviceAttr, max_qp_rd_atom), 144);
        assert_eq!(offset_of!(DeviceAttr, max_qp_init_rd_atom), 156);
        assert_eq!(offset_of!(DeviceAttr, phys_port_cnt), 227);
        assert_eq!(size_of::<PortAttr>(), 52);
        assert_eq!(offset_of!(PortAttr, gid_tbl_len), 12);
        assert_eq!(offset_of!(PortAttr, max_msg_sz), 20);
        assert_eq!(offset_of!(PortAttr, lid), 34);
        assert_eq!(offset_of!(PortAttr, link_layer), 46);
        assert_eq!(size_of::<QpInitAttr>(), 64);
        assert_eq!(offset_of!(QpInitAttr, cap), 32);
        assert_eq!(offset_of!(QpInitAttr, qp_type), 52);
        assert_eq!(size_of::<GlobalRoute>(), 24);
        assert_eq!(offset_of!(GlobalRoute, sgid_index), 20);
        assert_eq!(size_of::<AhAttr>(), 32);
        assert_eq!((offset_of!(AhAttr, dlid), offset_of!(AhAttr, port_num)), (24, 30));
        assert_eq!(size_of::<QpAttr>(), 144);
        assert_eq!(offset_of!(QpAttr, rq_psn), 20);
        assert_eq!(offset_of!(QpAttr, ah_attr), 56);
        assert_eq!(offset_of!(QpAttr, alt_ah_attr), 88);
        assert_eq!(offset_of!(QpAttr, pkey_index), 120);
        assert_eq!(offset_of!(QpAttr, max_rd_atomic), 126);
        assert_eq!(offset_of!(QpAttr, port_num), 129);
        assert_eq!(offset_of!(QpAttr, rate_limit), 136);
        assert_eq!(size_of::<Sge>(), 16);
        assert_eq!(size_of::<SendWr>(), 128);
        assert_eq!(offset_of!(SendWr, opcode), 28);
        assert_eq!(offset_of!(SendWr, remote_addr), 40);
        assert_eq!(offset_of!(SendWr, rkey), 48);
        assert_eq!(size_of::<Wc>(), 48);
        assert_eq!(offset_of!(Wc, byte_len), 20);
        assert_eq!(offset_of!(Wc, qp_num), 28);
    }

    /// The machine of whoever runs this may have the library or not: both answers are good ones, a crash is not, and a
    /// second call says the same.
    #[test]
    fn the_library_is_found_or_said_to_be_missing() {
        let first = Verbs::get().map(|_| ());
        match &first {
            Ok(()) => {}
            Err(LoadError::Missing(why)) => assert!(why.contains("libibverbs"), "{why}"),
            Err(other) => panic!("{other}"),
        }
        assert_eq!(first, Verbs::get().map(|_| ()));
    }
}
