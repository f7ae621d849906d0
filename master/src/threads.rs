//! Threads of one part's own.
//!
//! A part whose answers are waited for with a clock in hand (Raft, the node sessions) does not queue behind requests: on a
//! machine that has too much to do, the system gives threads that mostly wait their turn at once.

use std::io;

/// A runtime that may be dropped anywhere.
pub(crate) struct Threads(Option<tokio::runtime::Runtime>);

impl Threads {
    /// So many threads of this name.
    pub(crate) fn start(name: &str, threads: usize) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .thread_name(name)
            .enable_all()
            .build()?;
        Ok(Self(Some(runtime)))
    }

    /// For tasks that are to run there.
    pub(crate) fn handle(&self) -> &tokio::runtime::Handle {
        self.0.as_ref().expect("until it is dropped").handle()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        // Dropping a runtime waits for its threads, which is not allowed on an async thread.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
