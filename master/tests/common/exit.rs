//! How a test program with masters in it ends.

use std::ffi::{c_int, c_void};
use std::sync::Once;

unsafe extern "C" {
    /// glibc's: like `atexit`, and the handler learns the status.
    fn on_exit(handler: extern "C" fn(c_int, *mut c_void), arg: *mut c_void) -> c_int;
}

extern "C" fn leave(status: c_int, _: *mut c_void) {
    // SAFETY: `_exit` only ends the process.
    unsafe { libc::_exit(status) }
}

/// Masters that still run when the last test is done have RocksDB's threads: its static destructors must not run
/// under them. The status stays what the test runner made it.
pub(crate) fn without_destructors() {
    static ONCE: Once = Once::new();
    // SAFETY: the handler is a plain function that takes what `on_exit` gives.
    ONCE.call_once(|| unsafe {
        on_exit(leave, std::ptr::null_mut());
    });
}
