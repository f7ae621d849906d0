//! Whether RDMA can work here, and if not, what a person can do about it. Judging is pure.

use crate::{
    choice::{Gid, GidKind, Layer, Mtu, choose_gid},
    device::Port,
    node::Config,
    pool::MAX_SLAB_BYTES,
};
use std::fmt;

/// The bit of `CapEff` in `/proc/self/status` that lifts the locked-memory limit.
const CAP_IPC_LOCK: u32 = 14;

/// How much memory this process may pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memlock {
    /// As much as it likes: no limit, or privileged.
    Unlimited,
    /// So many bytes.
    Bytes(u64),
}

impl Memlock {
    /// This process's.
    pub fn read() -> Self {
        let mut limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: `limit` outlives the call.
        let rc = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        if rc != 0 || limit.rlim_cur == libc::RLIM_INFINITY || may_lock(&status) {
            return Self::Unlimited;
        }
        Self::Bytes(limit.rlim_cur)
    }
}

/// Whether the status file shows CAP_IPC_LOCK.
fn may_lock(status: &str) -> bool {
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .is_some_and(|bits| bits >> CAP_IPC_LOCK & 1 == 1)
}

/// A device's name and its ports.
pub type DevicePorts<'a> = (String, &'a [Port]);
/// What is missing, `library` or `device`, and a text whose remedy comes after the first semicolon.
pub type Missing = (&'static str, String);

/// What was seen.
pub struct Facts<'a> {
    /// Open devices with their ports; or why there are none at all.
    pub devices: Result<Vec<DevicePorts<'a>>, Missing>,
    /// Those that could not be opened, and why.
    pub unopened: Vec<(String, String)>,
    /// The limit.
    pub memlock: Memlock,
}

/// A port that a connection can go by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsableWay {
    /// The device's name.
    pub device: String,
    /// The port.
    pub port: u8,
    /// By which it is spoken to where this node dials.
    pub gid: Gid,
    /// All that may be used: where a peer dials, the one that fits the peer's.
    pub gids: Vec<Gid>,
    /// InfiniBand's address.
    pub lid: u16,
    /// Path MTU.
    pub mtu: Mtu,
    /// Of one work request.
    pub largest_message: u32,
}

/// Something that a person should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// `memlock`, `library`, `driver`, `device`, `link`, `gid` or `mtu`: stable, for programs.
    pub what: &'static str,
    /// What is the matter, where.
    pub problem: String,
    /// What to do.
    pub remedy: String,
    /// Whether it keeps a port, or all of it, from being used.
    pub fatal: bool,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.what, self.problem, self.remedy)
    }
}

/// What can be used, and what is the matter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Usable ports, by device name and port.
    pub ways: Vec<UsableWay>,
    /// In the order in which to mend them.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Of a node whose devices could not be looked at for so long.
    pub(crate) fn unanswered(waited: std::time::Duration) -> Self {
        Self {
            ways: Vec::new(),
            findings: vec![Finding {
                what: "driver",
                problem: format!(
                    "the devices' drivers did not answer within {} s",
                    waited.as_secs()
                ),
                remedy: "look at the kernel's log (`dmesg`) for the one that hangs".into(),
                fatal: true,
            }],
        }
    }

    /// Whether a connection can be made.
    pub fn is_usable(&self) -> bool {
        !self.ways.is_empty()
    }

    /// Why nothing can be used, in one word for a table; `None` if something can.
    pub fn hindrance(&self) -> Option<&'static str> {
        match self.is_usable() {
            true => None,
            false => Some(
                self.findings
                    .iter()
                    .find(|f| f.fatal)
                    .map_or("device", |f| f.what),
            ),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ways = self.ways.iter().map(|w| {
            let mtu = w.mtu.bytes();
            format!("{} port {} by {:?}, MTU {mtu}", w.device, w.port, w.gid)
        });
        let findings = self.findings.iter().map(ToString::to_string);
        let all: Vec<_> = ways.chain(findings).collect();
        match all.is_empty() {
            true => f.write_str("nothing was looked at yet"),
            false => f.write_str(&all.join(". ")),
        }
    }
}

/// Judges what was seen by what a person wants.
pub fn judge(facts: &Facts<'_>, config: &Config) -> Report {
    let mut report = Report::default();
    let mut find = |what, fatal, problem: String, remedy: &str| {
        report.findings.push(Finding {
            what,
            problem,
            remedy: remedy.to_owned(),
            fatal,
        });
    };
    let devices = match &facts.devices {
        Ok(devices) => devices,
        Err((what, why)) => {
            let (problem, remedy) = why.split_once("; ").unwrap_or((why, "see docs/rdma.md"));
            find(what, true, problem.to_owned(), remedy);
            return report;
        }
    };
    for (device, why) in &facts.unopened {
        let (why, remedy) = why
            .split_once("; ")
            .unwrap_or((why, "is /dev/infiniband there and may this user open it?"));
        find("device", true, format!("{device} cannot be used: {why}"), remedy);
    }
    if devices.is_empty() {
        let remedy = "load the card's driver (`ibv_devices` lists what there is); without a card, \
                      `rdma link add rxe0 type rxe netdev eth0` makes a software device";
        find("device", true, "there is no RDMA device".into(), remedy);
    }
    let known = |name: &String| {
        devices.iter().any(|(d, _)| d == name) || facts.unopened.iter().any(|(d, _)| d == name)
    };
    for name in config.devices.iter().filter(|n| !known(n)) {
        let problem = format!("there is no device {name}, which --rdma-device names");
        find(
            "device",
            config.devices.len() == 1,
            problem,
            "`ibv_devices` lists what there is",
        );
    }
    let needed = config.memory_bytes as u64 + MAX_SLAB_BYTES as u64;
    let may_pin = match facts.memlock {
        Memlock::Unlimited => true,
        Memlock::Bytes(limit) => limit >= needed,
    };
    if let Memlock::Bytes(limit) = facts.memlock
        && !may_pin
    {
        let problem = format!(
            "this process may lock {} KiB of memory and needs {} KiB (--rdma-memory and one slab)",
            limit >> 10,
            needed >> 10
        );
        let remedy = "set LimitMEMLOCK=infinity in the systemd unit (`ulimit -l unlimited` in a shell, \
                      `--ulimit memlock=-1` for a container), or lower --rdma-memory";
        find("memlock", true, problem, remedy);
    }
    let mut ways = Vec::new();
    for (device, ports) in devices {
        for port in ports.iter().filter(|p| config.port.is_none_or(|n| n == p.number)) {
            if let Some(way) = judge_port(device, port, config, &mut find) {
                ways.push(way);
            }
        }
        if let Some(number) = config.port
            && !ports.iter().any(|p| p.number == number)
        {
            let problem = format!("{device} has no port {number}, which --rdma-port names");
            find("device", true, problem, "ports count from 1");
        }
    }
    if may_pin {
        ways.sort_by(|a, b| (&a.device, a.port).cmp(&(&b.device, b.port)));
        report.ways = ways;
    }
    report
}

fn judge_port(
    device: &str,
    port: &Port,
    config: &Config,
    find: &mut impl FnMut(&'static str, bool, String, &str),
) -> Option<UsableWay> {
    let at = format!("{device} port {}", port.number);
    if !port.active {
        let remedy = match port.layer {
            Layer::Ethernet => "bring its network interface up (`ip link`), check cable and switch",
            Layer::Infiniband => "check the cable, and that a subnet manager (opensm) runs in the fabric",
        };
        find("link", true, format!("{at} is {}", port.state), remedy);
        return None;
    }
    if port.layer == Layer::Infiniband && port.lid == 0 {
        find(
            "link",
            true,
            format!("{at} has no LID"),
            "a subnet manager (opensm) must run in the fabric",
        );
        return None;
    }
    let Some(gid) = choose_gid(&port.gids, config.gid_index) else {
        let (problem, remedy) = match config.gid_index {
            Some(index) => (
                format!("{at} has no GID {index}, which --rdma-gid-index names"),
                "`show_gids` or /sys/class/infiniband/*/ports/*/gids list them",
            ),
            None => (
                format!("{at} has no GID"),
                "give its network interface an IP address",
            ),
        };
        find("gid", true, problem, remedy);
        return None;
    };
    if port.layer == Layer::Ethernet && gid.rank().is_some_and(|rank| rank >= 2) {
        let problem = match gid.kind {
            GidKind::RoceV1 => format!("{at} speaks by {gid:?} only: RoCE v1 crosses no router"),
            _ => format!("{at} speaks by {gid:?} only: a link-local address crosses no router"),
        };
        find(
            "gid",
            false,
            problem,
            "give its network interface an IPv4 address",
        );
    }
    let mtu = match config.mtu {
        Some(wanted) if wanted > port.mtu => {
            let problem = format!(
                "{at} bears an MTU of {} and not {}",
                port.mtu.bytes(),
                wanted.bytes()
            );
            find(
                "mtu",
                false,
                problem,
                "raise its network interface's MTU, or lower --rdma-mtu",
            );
            port.mtu
        }
        Some(wanted) => wanted,
        None => {
            if port.mtu < port.largest_mtu && port.layer == Layer::Ethernet && port.mtu.bytes() < 4096 {
                let problem = format!(
                    "{at} uses an MTU of {}, it bears {}",
                    port.mtu.bytes(),
                    port.largest_mtu.bytes()
                );
                let remedy =
                    "with jumbo frames (an interface MTU of 4200 or more, on the switches too) it is faster";
                find("mtu", false, problem, remedy);
            }
            port.mtu
        }
    };
    let gids = match config.gid_index {
        Some(_) => vec![gid],
        None => port.gids.clone(),
    };
    Some(UsableWay {
        device: device.to_owned(),
        port: port.number,
        gid,
        gids,
        lid: port.lid,
        mtu,
        largest_message: port.largest_message,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn config() -> Config {
        Config {
            devices: Vec::new(),
            port: None,
            gid_index: None,
            mtu: None,
            traffic_class: 0,
            memory_bytes: 64 << 20,
            depth: 8,
            spin: Duration::ZERO,
        }
    }

    fn gid(index: u32, kind: GidKind, text: &str) -> Gid {
        let raw = text.parse::<std::net::Ipv6Addr>().unwrap().octets();
        Gid { index, kind, raw }
    }

    fn port() -> Port {
        Port {
            number: 1,
            active: true,
            state: "active",
            layer: Layer::Ethernet,
            mtu: Mtu::from_bytes(4096).unwrap(),
            largest_mtu: Mtu::from_bytes(4096).unwrap(),
            largest_message: 1 << 30,
            lid: 0,
            gids: vec![
                gid(0, GidKind::RoceV2, "fe80::1"),
                gid(1, GidKind::RoceV2, "::ffff:10.0.0.1"),
            ],
        }
    }

    fn judged(ports: &[Port], memlock: Memlock, config: &Config) -> Report {
        let facts = Facts {
            devices: Ok(vec![("rxe0".to_owned(), ports)]),
            unopened: Vec::new(),
            memlock,
        };
        judge(&facts, config)
    }

    #[test]
    fn a_good_port_is_used_without_a_word() {
        let report = judged(&[port()], Memlock::Unlimited, &config());
        assert_eq!(report.findings, []);
        let way = &report.ways[0];
        assert_eq!((way.gid.index, way.mtu.bytes(), way.gids.len()), (1, 4096, 2));
        assert_eq!(report.hindrance(), None);
        assert!(report.to_string().contains("10.0.0.1"), "{report}");
        let enough = Memlock::Bytes((64 << 20) + (4 << 20));
        assert!(judged(&[port()], enough, &config()).is_usable());
    }

    #[test]
    fn everything_that_is_the_matter_is_said_with_its_remedy() {
        let set = |change: &dyn Fn(&mut Config)| {
            let mut c = config();
            change(&mut c);
            c
        };
        let with = |change: &dyn Fn(&mut Port)| {
            let mut p = port();
            change(&mut p);
            p
        };
        let small = Mtu::from_bytes(1024).unwrap();
        // (port, memlock, config, usable, what, words)
        let cases = [
            (
                port(),
                Memlock::Bytes(8 << 20),
                config(),
                false,
                "memlock",
                "LimitMEMLOCK",
            ),
            (
                with(&|p| (p.active, p.state) = (false, "down")),
                Memlock::Unlimited,
                config(),
                false,
                "link",
                "port 1 is down",
            ),
            (
                with(&|p| p.gids.clear()),
                Memlock::Unlimited,
                config(),
                false,
                "gid",
                "IP address",
            ),
            (
                with(&|p| p.gids.truncate(1)),
                Memlock::Unlimited,
                config(),
                true,
                "gid",
                "link-local",
            ),
            (
                with(&|p| p.mtu = small),
                Memlock::Unlimited,
                config(),
                true,
                "mtu",
                "jumbo",
            ),
            (
                with(&|p| p.mtu = small),
                Memlock::Unlimited,
                set(&|c| c.mtu = Mtu::from_bytes(4096)),
                true,
                "mtu",
                "--rdma-mtu",
            ),
            (
                port(),
                Memlock::Unlimited,
                set(&|c| c.gid_index = Some(7)),
                false,
                "gid",
                "--rdma-gid-index",
            ),
            (
                port(),
                Memlock::Unlimited,
                set(&|c| c.port = Some(2)),
                false,
                "device",
                "--rdma-port",
            ),
            (
                with(&|p| p.layer = Layer::Infiniband),
                Memlock::Unlimited,
                config(),
                false,
                "link",
                "subnet manager",
            ),
        ];
        for (port, memlock, config, usable, what, words) in cases {
            let report = judged(&[port], memlock, &config);
            assert_eq!(report.is_usable(), usable, "{report}");
            assert_eq!(report.findings.len(), 1, "{report}");
            assert_eq!(
                (report.findings[0].what, report.findings[0].fatal),
                (what, !usable)
            );
            assert!(report.to_string().contains(words), "{report}");
            assert_eq!(report.hindrance(), (!usable).then_some(what));
        }
    }

    #[test]
    fn no_device_no_library_the_wrong_name() {
        let none = |devices, config: &Config| {
            let facts = Facts {
                devices,
                unopened: vec![],
                memlock: Memlock::Unlimited,
            };
            judge(&facts, config)
        };
        let report = none(Ok(vec![]), &config());
        assert_eq!(report.hindrance(), Some("device"));
        assert!(report.to_string().contains("rdma link add"), "{report}");
        let report = none(
            Err((
                "library",
                "libibverbs.so.1 cannot be loaded: no such file; install it".into(),
            )),
            &config(),
        );
        assert_eq!(report.hindrance(), Some("library"));
        assert!(report.to_string().contains("install it"), "{report}");
        let mut named = config();
        named.devices = vec!["mlx5_9".into()];
        let report = none(Ok(vec![]), &named);
        assert!(report.to_string().contains("mlx5_9"), "{report}");
        let ports = [port()];
        let facts = Facts {
            devices: Ok(vec![("rxe0".into(), &ports[..])]),
            unopened: vec![("mlx5_0".into(), "permission denied".into())],
            memlock: Memlock::Unlimited,
        };
        let report = judge(&facts, &config());
        assert!(report.is_usable(), "the other one works");
        assert!(report.to_string().contains("mlx5_0 cannot be used"), "{report}");
    }

    #[test]
    fn a_privileged_process_has_no_limit() {
        assert!(may_lock("Name:\tx\nCapEff:\t000001ffffffffff\n"));
        assert!(may_lock("CapEff:\t0000000000004000\n"));
        assert!(!may_lock("CapEff:\t0000000000000000\n"));
        assert!(
            !may_lock("CapEff:\t00000000a00425fb\n"),
            "a container's usual ones"
        );
        assert!(!may_lock(""));
    }
}
