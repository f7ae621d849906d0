//! When the machine itself stood still, as threads of this program see it that do next to nothing: one looks at its clock,
//! one has a page written to the disk.
//!
//! What is seen is a fault that nobody injected: it befalls masters as it befalls these threads. Not seen: one process that
//! waits for its turn on one core while another core is free.

use crate::history::{History, Record, Standstill};
use anyhow::{Context, Result};
use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

/// How often the clock is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How often a page is written: seldom enough to be no load.
const WRITE_EVERY: Duration = Duration::from_millis(200);
const PAGE_BYTES: usize = 4096;
/// A look so late is recorded: a third of the shortest silence after which a follower stands for election.
const LATE: Duration = Duration::from_millis(120);

/// The threads, until it is dropped.
pub struct StandstillWatch {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl StandstillWatch {
    /// Records into `history` from now on; the page goes into a file in `folder`.
    pub fn start(history: &Arc<History>, folder: &Path) -> Result<Self> {
        let mut watch = Self {
            stop: Arc::default(),
            threads: Vec::new(),
        };
        watch.watch(history, "clock", LOOK_EVERY, || ())?;
        let path = folder.join("page");
        let file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
        watch.watch(history, "disk", WRITE_EVERY, move || {
            // A disk that is full or broken is not what is looked for.
            let _ = file
                .write_all_at(&[1; PAGE_BYTES], 0)
                .and_then(|()| file.sync_data());
        })?;
        Ok(watch)
    }

    /// Does `work` every so often, and records when that took too long.
    fn watch(
        &mut self,
        history: &Arc<History>,
        name: &str,
        every: Duration,
        work: impl Fn() + Send + 'static,
    ) -> Result<()> {
        let (stop, history) = (self.stop.clone(), history.clone());
        let thread = std::thread::Builder::new()
            .name(format!("standstill-{name}"))
            .spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    // Begun anew each time: what recording takes is no standstill.
                    let from_us = history.now_us();
                    work();
                    std::thread::sleep(every);
                    let to_us = history.now_us();
                    if to_us - from_us >= (every + LATE).as_micros() as u64 {
                        history.record(Record::Standstill(Standstill { from_us, to_us }));
                    }
                }
            })
            .context("starting a thread that watches for standstills")?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Drop for StandstillWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // They do not panic, and are at their ends within a look.
            let _ = thread.join();
        }
    }
}
