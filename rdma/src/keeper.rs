//! A thread of its own for what may block in the kernel and nobody waits for: it looks which devices there are, and buries
//! the ends of connections.
//!
//! Devices are looked at every [`SCAN_INTERVAL`], in the list that the kernel gives: a software device that is being deleted
//! goes on working until whoever has it open lets go of it, and sends no event; so that its absence from the list is the one
//! sign that every kind of device gives.

use crate::{
    device::{self, Device, DeviceError, DeviceName, Port},
    node::Rdma,
    preflight::{self, Facts, Memlock},
    reader::Asking,
    server::Answering,
};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Weak,
        mpsc::{self, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

/// How often the list of devices is read.
pub const SCAN_INTERVAL: Duration = Duration::from_secs(1);
/// How long a node's start waits for the first look. Cards answer within milliseconds.
pub(crate) const FIRST_LOOK_TIMEOUT: Duration = Duration::from_secs(10);
/// Every so many looks at a port, its addresses are read too: they are up to 256 calls.
const SCANS_PER_GID_LOOK: u32 = 10;
/// Looks without anything lent after which idle registered memory is given back.
const SCANS_UNTIL_TRIM: u32 = 60;

/// An end of a connection that is used no more.
pub(crate) enum Remains {
    Asking(Asking, Arc<Device>),
    Answering(Answering),
}

impl Remains {
    fn bury(self) {
        match self {
            Self::Asking(asking, device) => {
                asking.bury(device.gone().is_cancelled());
                drop(device);
            }
            Self::Answering(answering) => answering.bury(),
        }
    }
}

/// Where the ends of connections go. Bounded by the connections that there are.
#[derive(Clone, Debug)]
pub(crate) struct Graveyard(mpsc::Sender<Remains>);

impl Graveyard {
    pub(crate) fn bury(&self, remains: Remains) {
        // The thread ends with the last user of the node's RDMA; whoever comes after it does it by itself.
        if let Err(mpsc::SendError(remains)) = self.0.send(remains) {
            remains.bury();
        }
    }
}

/// The thread's inbox.
pub(crate) struct Inbox(mpsc::Receiver<Remains>);

pub(crate) fn channel() -> (Graveyard, Inbox) {
    let (sender, receiver) = mpsc::channel();
    (Graveyard(sender), Inbox(receiver))
}

/// Starts the thread, which ends when nobody else has `rdma`, and waits for its first look; whether it came in time.
pub(crate) fn start(rdma: &Arc<Rdma>, inbox: Inbox) -> std::io::Result<bool> {
    start_with(rdma, inbox, FIRST_LOOK_TIMEOUT, |rdma, scanner| {
        scanner.scan(rdma)
    })
}

fn start_with(
    rdma: &Arc<Rdma>,
    inbox: Inbox,
    timeout: Duration,
    first_look: impl FnOnce(&Rdma, &mut Scanner) + Send + 'static,
) -> std::io::Result<bool> {
    let weak = Arc::downgrade(rdma);
    let (looked, first) = mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("rdma-keeper".into())
        .spawn(move || {
            let mut scanner = Scanner::default();
            if let Some(rdma) = weak.upgrade() {
                first_look(&rdma, &mut scanner);
            }
            if looked.send(()).is_err()
                && let Some(rdma) = weak.upgrade()
            {
                tracing::info!(rdma = %rdma.report(), "the RDMA devices' drivers have answered at last");
            }
            run(&weak, &inbox.0, scanner);
        })?;
    Ok(first.recv_timeout(timeout).is_ok())
}

fn run(rdma: &Weak<Rdma>, inbox: &mpsc::Receiver<Remains>, mut scanner: Scanner) {
    let mut next_scan = Instant::now() + SCAN_INTERVAL;
    loop {
        match inbox.recv_timeout(next_scan.saturating_duration_since(Instant::now())) {
            Ok(remains) => remains.bury(),
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if Instant::now() >= next_scan {
            // While it is looked for, this thread is one that has it.
            if let Some(rdma) = rdma.upgrade() {
                scanner.scan(&rdma);
            }
            next_scan = Instant::now() + SCAN_INTERVAL;
        }
    }
}

/// What is open, and what was seen of it.
#[derive(Default)]
pub(crate) struct Scanner {
    open: BTreeMap<DeviceName, Open>,
    quiet: (u64, u32),
    reported: Option<String>,
}

struct Open {
    device: Result<Arc<Device>, DeviceError>,
    ports: Vec<Port>,
    looks: u32,
}

impl Open {
    fn new(name: &DeviceName) -> Self {
        let mut open = Self {
            device: Device::open(name),
            ports: Vec::new(),
            looks: 0,
        };
        open.look();
        open
    }

    fn look(&mut self) {
        let Ok(device) = &self.device else { return };
        // A port whose state cannot be asked for is none.
        let all = self.looks.is_multiple_of(SCANS_PER_GID_LOOK);
        self.looks += 1;
        let number = 1..=device.limits().ports;
        if all || changed(device, &self.ports).unwrap_or(false) {
            self.ports = number.filter_map(|n| device.port(n).ok()).collect();
        }
    }
}

/// Whether a port's state is another one by now.
fn changed(device: &Device, ports: &[Port]) -> Result<bool, DeviceError> {
    for port in ports {
        if device.port_state(port.number)? != port.state {
            return Ok(true);
        }
    }
    Ok(false)
}

impl Scanner {
    /// Opens what is new, lets go of what is gone, and tells `rdma` which ways there are.
    pub(crate) fn scan(&mut self, rdma: &Rdma) {
        let listed = device::list();
        if let Ok(listed) = &listed {
            self.follow(rdma, listed);
        }
        for open in self.open.values_mut() {
            open.look();
        }
        let config = rdma.config();
        let facts = Facts {
            devices: match &listed {
                Ok(_) => Ok(self
                    .open
                    .iter()
                    .map(|(name, open)| (name.name.clone(), &open.ports[..]))
                    .collect()),
                Err(DeviceError::Load(error)) => Err(("library", error.to_string())),
                // A module that is loaded later changes that.
                Err(error) => Err(("device", error.to_string())),
            },
            unopened: self
                .open
                .iter()
                .filter_map(|(name, open)| Some((name.name.clone(), open.device.as_ref().err()?.to_string())))
                .collect(),
            memlock: Memlock::read(),
        };
        let report = preflight::judge(&facts, config);
        let ways = report
            .ways
            .iter()
            .filter_map(|w| {
                let (_, open) = self.open.iter().find(|(name, _)| name.name == w.device)?;
                let device = open.device.as_ref().ok()?.clone();
                Some((device, w.clone()))
            })
            .collect();
        let text = report.to_string();
        if self.reported.as_ref() != Some(&text) {
            if self.reported.is_some() {
                tracing::info!(rdma = %text, "RDMA devices changed");
            }
            self.reported = Some(text);
        }
        rdma.set_ways(ways, report);
        self.trim(rdma);
    }

    fn follow(&mut self, rdma: &Rdma, listed: &[DeviceName]) {
        let wanted = |name: &DeviceName| rdma.config().wants(&name.name);
        self.open.retain(|name, open| {
            let stays = listed.contains(name);
            if !stays && let Ok(device) = &open.device {
                tracing::warn!(device = %name.name, "an RDMA device was taken away");
                // In this order: what comes back from now on is not kept.
                device.gone().cancel();
                rdma.forget(device);
            }
            // One that could not be opened is tried anew at the next look.
            stays && open.device.is_ok()
        });
        for name in listed.iter().filter(|n| wanted(n)) {
            if !self.open.contains_key(name) {
                self.open.insert(name.clone(), Open::new(name));
            }
        }
    }

    /// Gives idle registered memory back after a quiet minute.
    fn trim(&mut self, rdma: &Rdma) {
        let (lent, quiet) = rdma.lent();
        if !quiet || lent != self.quiet.0 {
            self.quiet = (lent, 0);
            return;
        }
        self.quiet.1 = self.quiet.1.saturating_add(1);
        if self.quiet.1 == SCANS_UNTIL_TRIM {
            rdma.forget_idle();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::Config;

    #[test]
    fn a_driver_that_hangs_does_not_hold_up_the_start() {
        let rdma = Rdma::start(Config {
            devices: vec!["no such device".into()],
            port: None,
            gid_index: None,
            mtu: None,
            traffic_class: 0,
            memory_bytes: 0,
            depth: 1,
            spin: Duration::ZERO,
        })
        .unwrap();
        let (answers, hangs) = mpsc::channel::<()>();
        let look = move |_: &Rdma, _: &mut Scanner| assert!(hangs.recv().is_err());
        let (_graveyard, inbox) = channel();
        assert!(!start_with(&rdma, inbox, Duration::from_millis(20), look).unwrap());
        drop(answers);
    }
}
