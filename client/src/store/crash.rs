//! Failpoints of the store: named instants at which a test ends the process (or breaks a rule on purpose).
//! Without the feature `failpoints`, which no release build has, all of this is nothing.

#[cfg(all(feature = "failpoints", not(debug_assertions)))]
compile_error!("the feature `failpoints` breaks the product on purpose: it exists in debug builds only");

/// Every failpoint of [`Artifact::publish`](super::Artifact::publish), in the order in which they are
/// passed: one before and one after each system call.
pub const PUBLISH_FAILPOINTS: &[&str] = &[
    "publish::begin",
    "publish::before_chmod_file",
    "publish::before_sync_file",
    "publish::after_sync_file",
    "publish::before_sync_tree_dir",
    "publish::after_sync_tree_dir",
    "publish::before_record_create",
    "publish::before_record_write",
    "publish::before_record_sync",
    "publish::before_record_rename",
    "publish::before_record_sync_dir",
    "publish::after_record",
    "publish::before_create_parent",
    "publish::after_create_parent",
    "publish::before_sync_parent",
    "publish::after_sync_parent",
    "publish::before_rename",
    "publish::after_rename",
    "publish::before_sync_final_parent",
    "publish::after_sync_final_parent",
    "publish::before_sync_staging",
    "publish::after_sync_staging",
    "publish::before_remove_staging",
    "publish::after_remove_staging",
];

/// The failpoints of a journal flush, in order.
pub const FLUSH_FAILPOINTS: &[&str] = &[
    "flush::before_sync_data",
    "flush::after_sync_data",
    "flush::before_append",
    "flush::after_append",
    "flush::after_sync_journal",
];

/// The failpoints of [`Store::begin`](super::Store::begin) for a new artifact, in order.
pub const BEGIN_FAILPOINTS: &[&str] = &[
    "begin::before_create_folder",
    "begin::after_create_folder",
    "begin::before_record_create",
    "begin::before_record_write",
    "begin::before_record_sync",
    "begin::before_record_rename",
    "begin::before_record_sync_dir",
    "begin::after_record",
    "begin::after_journal",
    "begin::before_tree",
    "begin::before_allocate",
    "begin::after_allocate",
    "begin::after_tree",
];

/// Passes the failpoint `name`.
#[inline]
pub(crate) fn step(name: &'static str) {
    #[cfg(feature = "failpoints")]
    fail::fail_point!(name);
    let _ = name;
}

/// Whether a test wants the rule `name` broken, to see that its checker notices.
#[inline]
pub(crate) fn broken(name: &'static str) -> bool {
    #[cfg(feature = "failpoints")]
    fail::fail_point!(name, |_| true);
    let _ = name;
    false
}

/// Makes the process kill itself (SIGKILL: nothing runs after it) at the `nth` pass of the failpoint, after
/// `last_act` (e.g. shutting the filesystem down, as a power loss would).
#[cfg(feature = "failpoints")]
pub fn kill_at(name: &str, nth: usize, last_act: impl Fn() + Send + Sync + 'static) -> Result<(), String> {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let left = AtomicUsize::new(nth);
    fail::cfg_callback(name, move || {
        if left.fetch_sub(1, Ordering::SeqCst) == 1 {
            last_act();
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            // The signal is on its way; nothing of this thread's work may happen before it arrives.
            loop {
                std::thread::park();
            }
        }
    })
}
