//! Hosts on one bridge: a network namespace each, shaped links, and filters that partition them.
//!
//! The bridge is in a namespace of its own, so the machine's packet filter sees nothing of what the hosts say to
//! each other. The one thing in the default namespace is the *door*, a veth pair with the address `.1`, through
//! which tests and people reach every host.
//!
//! Filters act where packets arrive (the input hook of the receiver): the sender cannot tell a lost packet from a
//! slow one, and connections that exist are cut too. [`Rule::Refuse`] answers instead, like a firewall that rejects.

use super::{namespace::Namespace, namespace::command, run::Run};
use anyhow::{Context, Result, ensure};
use std::{
    collections::BTreeMap,
    fmt::Write,
    net::{Ipv4Addr, SocketAddrV4},
};
use tokio::runtime::Runtime;

/// Packets of proxies carry this mark, so that what they send is not sent to them again.
pub(super) const PROXY_MARK: u32 = 0x6d63;
/// How long a packet may wait in a shaped link's queue.
const QUEUE_MS: u64 = 50;
/// Least burst of a token bucket, in bytes: two whole segmentation-offload packets.
const LEAST_BURST_BYTES: u64 = 128 << 10;

/// What a host's packet filter does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Drops all that comes from this host.
    Drop {
        /// The sender.
        from: Ipv4Addr,
    },
    /// Refuses all that comes from this host: TCP with a reset, the rest with an ICMP message.
    Refuse {
        /// The sender.
        from: Ipv4Addr,
    },
    /// Refuses with a reset what this host sends to another over TCP, so that both its connections there and the other's
    /// to it are closed here, and no new ones come about.
    RefuseTo {
        /// The receiver.
        to: Ipv4Addr,
    },
    /// Refuses with a reset what comes from this host for one port; what this host dialled there goes on.
    RefusePort {
        /// The sender.
        from: Ipv4Addr,
        /// The port.
        port: u16,
    },
    /// Drops all that comes in and all that goes out: a cable that is pulled.
    Unplug,
    /// Drops a share of all that comes in.
    Lose {
        /// 0 to 100.
        percent: u8,
    },
    /// Sends this host's new connections to an address to a local port instead, and resets the old ones.
    Redirect {
        /// What is dialled.
        to: SocketAddrV4,
        /// Where a proxy listens.
        port: u16,
    },
}

/// One host.
pub struct Host {
    /// `m1`, `c0`, `lb`, `src`.
    pub name: String,
    /// Its address.
    pub address: Ipv4Addr,
    /// Its namespace.
    pub namespace: Namespace,
    rules: BTreeMap<u64, Rule>,
    runtime: Option<Runtime>,
}

impl Host {
    /// Runs futures of the test on this host: sockets that they make are in its namespace.
    pub fn runtime(&mut self) -> Result<&tokio::runtime::Handle> {
        if self.runtime.is_none() {
            self.runtime = Some(self.namespace.runtime()?);
        }
        Ok(self.runtime.as_ref().context("just made")?.handle())
    }

    fn apply_rules(&self) -> Result<()> {
        self.namespace.run("nft", &["-f", "-"], &render(&self.rules))?;
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // Waiting for it is not allowed in asynchronous code.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Replaces the whole table in one transaction.
fn render(rules: &BTreeMap<u64, Rule>) -> String {
    let (mut input, mut nat, mut output) = (String::new(), String::new(), String::new());
    for rule in rules.values() {
        let _ = match rule {
            Rule::Drop { from } => writeln!(input, "ip saddr {from} drop"),
            Rule::Refuse { from } => writeln!(
                input,
                "ip saddr {from} meta l4proto tcp reject with tcp reset\nip saddr {from} reject"
            ),
            Rule::RefuseTo { to } => {
                writeln!(output, "ip daddr {to} meta l4proto tcp reject with tcp reset")
            }
            Rule::RefusePort { from, port } => {
                writeln!(input, "ip saddr {from} tcp dport {port} reject with tcp reset")
            }
            Rule::Unplug => {
                let _ = writeln!(input, "iifname eth0 drop");
                writeln!(output, "oifname eth0 drop")
            }
            Rule::Lose { percent } => {
                writeln!(input, "iifname eth0 numgen random mod 100 < {percent} drop")
            }
            Rule::Redirect { to, port } => {
                let (ip, to_port) = (to.ip(), to.port());
                let _ = writeln!(
                    nat,
                    "meta mark != {PROXY_MARK} ip daddr {ip} tcp dport {to_port} redirect to :{port}"
                );
                // What still goes there itself was connected before.
                writeln!(
                    output,
                    "meta mark != {PROXY_MARK} ip daddr {ip} tcp dport {to_port} reject with tcp reset"
                )
            }
        };
    }
    format!(
        "add table inet chaos\ndelete table inet chaos\ntable inet chaos {{\n\
         chain in {{ type filter hook input priority 0;\n{input}}}\n\
         chain nat {{ type nat hook output priority -100;\n{nat}}}\n\
         chain out {{ type filter hook output priority 0;\n{output}}}\n}}\n"
    )
}

/// What a host's link carried since it was made, in bytes of frames (headers included; a segmentation-offload packet
/// has one header) that got through the shaped queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// By the host.
    pub sent_bytes: u64,
    /// By the host.
    pub received_bytes: u64,
}

impl std::ops::Sub for Traffic {
    type Output = Self;
    /// Between two looks, the later one first.
    fn sub(self, earlier: Self) -> Self {
        Self {
            sent_bytes: self.sent_bytes.saturating_sub(earlier.sent_bytes),
            received_bytes: self.received_bytes.saturating_sub(earlier.received_bytes),
        }
    }
}

/// By the names of the bridge's ports: what a port receives is what its host sent.
fn parse_traffic(links: &str) -> Result<BTreeMap<String, Traffic>> {
    let links: serde_json::Value = serde_json::from_str(links).context("'ip -json' gave no JSON")?;
    let links = links.as_array().context("'ip -json' gave no list")?;
    let mut found = BTreeMap::new();
    for link in links {
        let name = link["ifname"].as_str().context("a link without a name")?;
        let bytes = |way: &str| {
            link["stats64"][way]["bytes"]
                .as_u64()
                .with_context(|| format!("the link {name} has no count of {way} bytes"))
        };
        let traffic = Traffic {
            sent_bytes: bytes("rx")?,
            received_bytes: bytes("tx")?,
        };
        found.insert(name.to_owned(), traffic);
    }
    Ok(found)
}

/// All hosts of a run.
pub struct Network {
    bridge: Namespace,
    prefix: [u8; 3],
    door: Ipv4Addr,
    hosts: BTreeMap<String, Host>,
    next_rule: u64,
    /// Of the names of namespaces.
    name_prefix: String,
}

impl Network {
    /// Makes the bridge, the door and the hosts: (name, last byte of the address).
    pub fn create(run: &Run, hosts: &[(String, u8)]) -> Result<Self> {
        let number = run.number();
        let prefix = [198, 18 + (number >> 8) as u8, number as u8];
        let address = |last| Ipv4Addr::new(prefix[0], prefix[1], prefix[2], last);
        let bridge = Namespace::create(&run.name("net"))?;
        let mut network = Self {
            bridge,
            prefix,
            door: address(1),
            hosts: BTreeMap::new(),
            next_rule: 0,
            name_prefix: run.name(""),
        };
        let door = run.door();
        let bridge = network.bridge.name().to_owned();
        network.bridge.ip(&[
            "link add br0 type bridge forward_delay 0 mcast_snooping 0".into(),
            "link set br0 up".into(),
            "link set lo up".into(),
        ])?;
        let peer = "door";
        command(
            "ip",
            &[
                "link", "add", &door, "type", "veth", "peer", "name", peer, "netns", &bridge,
            ],
            "",
        )?;
        network.bridge.ip(&[format!("link set {peer} master br0 up")])?;
        let with_mask = format!("{}/24", network.door);
        command("ip", &["addr", "add", &with_mask, "dev", &door], "")?;
        command("ip", &["link", "set", &door, "up"], "")?;
        for (name, last) in hosts {
            network.add(name, *last)?;
        }
        Ok(network)
    }

    /// Adds a host.
    pub fn add(&mut self, name: &str, last: u8) -> Result<Ipv4Addr> {
        ensure!(!self.hosts.contains_key(name), "there is a host {name} already");
        let [a, b, c] = self.prefix;
        let address = Ipv4Addr::new(a, b, c, last);
        let namespace = Namespace::create(&format!("{}{name}", self.name_prefix))?;
        self.bridge.ip(&[
            format!(
                "link add {name} type veth peer name eth0 netns {}",
                namespace.name()
            ),
            format!("link set {name} master br0 up"),
        ])?;
        namespace.ip(&[
            "link set lo up".into(),
            format!("addr add {address}/24 dev eth0"),
            "link set eth0 up".into(),
        ])?;
        let host = Host {
            name: name.to_owned(),
            address,
            namespace,
            rules: BTreeMap::new(),
            runtime: None,
        };
        self.hosts.insert(name.to_owned(), host);
        Ok(address)
    }

    /// Where this program's own connections to hosts come from.
    pub fn door(&self) -> Ipv4Addr {
        self.door
    }

    /// Namespace of the bridge; the port of host `m1` is called `m1` in it.
    pub fn bridge(&self) -> &Namespace {
        &self.bridge
    }

    /// All hosts.
    pub fn hosts(&self) -> impl Iterator<Item = &Host> {
        self.hosts.values()
    }

    /// A host by name.
    pub fn host(&self, name: &str) -> Result<&Host> {
        self.hosts
            .get(name)
            .with_context(|| format!("there is no host {name}"))
    }

    /// A host by name.
    pub fn host_mut(&mut self, name: &str) -> Result<&mut Host> {
        self.hosts
            .get_mut(name)
            .with_context(|| format!("there is no host {name}"))
    }

    /// What the links of all hosts carried so far, by the hosts' names.
    pub fn traffic(&self) -> Result<BTreeMap<String, Traffic>> {
        let bridge = self.bridge.name();
        let links = command("ip", &["-n", bridge, "-json", "-statistics", "link", "show"], "")?;
        let mut traffic = parse_traffic(&links)?;
        traffic.retain(|name, _| self.hosts.contains_key(name));
        Ok(traffic)
    }

    /// Gives a host's link a rate in both directions; `None` takes it away.
    pub fn shape(&self, name: &str, bits_per_second: Option<u64>) -> Result<()> {
        let host = self.host(name)?;
        for (namespace, device) in [(&host.namespace, "eth0"), (&self.bridge, name)] {
            match bits_per_second {
                Some(rate) => {
                    // 4 ms at the rate: a timer of 250 Hz must not lower it.
                    let burst = (rate / 8 / 250).max(LEAST_BURST_BYTES);
                    namespace.tc(&[format!(
                        "qdisc replace dev {device} root tbf rate {rate}bit burst {burst} latency {QUEUE_MS}ms"
                    )])?;
                }
                None => {
                    // There may be none.
                    let _ = namespace.tc(&[format!("qdisc del dev {device} root")]);
                }
            }
        }
        Ok(())
    }

    /// Adds a rule on the receiver `at`; the token takes it away again.
    pub fn add_rule(&mut self, at: &str, rule: Rule) -> Result<u64> {
        let token = self.next_rule;
        self.next_rule += 1;
        let host = self.host_mut(at)?;
        host.rules.insert(token, rule);
        host.apply_rules()?;
        Ok(token)
    }

    /// Takes rules away; unknown tokens are fine.
    pub fn remove_rules(&mut self, tokens: &[u64]) -> Result<()> {
        for host in self.hosts.values_mut() {
            let before = host.rules.len();
            host.rules.retain(|token, _| !tokens.contains(token));
            if host.rules.len() != before {
                host.apply_rules()?;
            }
        }
        Ok(())
    }

    /// One way: nothing that `from` sends reaches `to`.
    pub fn cut(&mut self, from: &str, to: &str) -> Result<u64> {
        let from = self.host(from)?.address;
        self.add_rule(to, Rule::Drop { from })
    }

    /// Both ways.
    pub fn cut_both(&mut self, a: &str, b: &str) -> Result<Vec<u64>> {
        Ok(vec![self.cut(a, b)?, self.cut(b, a)?])
    }

    /// No host of one group reaches a host of another; hosts in no group reach all. A host in several groups
    /// reaches all of them (a bridge).
    pub fn partition(&mut self, groups: &[&[&str]]) -> Result<Vec<u64>> {
        let mut names: Vec<&str> = groups.iter().copied().flatten().copied().collect();
        names.sort_unstable();
        names.dedup();
        let mut tokens = Vec::new();
        for &from in &names {
            for &to in &names {
                let together = groups.iter().any(|g| g.contains(&from) && g.contains(&to));
                if from != to && !together {
                    tokens.push(self.cut(from, to)?);
                }
            }
        }
        Ok(tokens)
    }

    /// Cuts one host off from everybody, the door too, both ways in the same moment.
    pub fn isolate(&mut self, name: &str) -> Result<u64> {
        self.add_rule(name, Rule::Unplug)
    }

    /// Takes all rules away.
    pub fn heal(&mut self) -> Result<()> {
        for host in self.hosts.values_mut() {
            if !host.rules.is_empty() {
                host.rules.clear();
                host.apply_rules()?;
            }
        }
        Ok(())
    }
}

/// `400mbit`, `1gbit`, `800kbit`, `1000000` (bits) as bits per second, in `tc`'s units.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "gbit" => 1_000_000_000,
        "mbit" => 1_000_000,
        "kbit" => 1_000,
        "bit" | "" => 1,
        other => return Err(format!("'{other}' is no unit: write 400mbit, 1gbit or 800kbit")),
    };
    match digits.parse::<u64>().ok().and_then(|n| n.checked_mul(unit)) {
        Some(rate) if rate >= 8_000 => Ok(rate),
        _ => Err(format!("'{text}' is no rate of at least 8kbit, such as 400mbit")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates() {
        assert_eq!(parse_rate("400mbit"), Ok(400_000_000));
        assert_eq!(parse_rate("800kbit"), Ok(800_000));
        assert_eq!(parse_rate("9000"), Ok(9_000));
        for bad in ["", "mbit", "4 mbit", "1kbit", "4mib", "99999999999gbit"] {
            assert!(parse_rate(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_port_receives_what_its_host_sends() {
        let links = r#"[{"ifname": "c0", "stats64": {"rx": {"bytes": 7, "packets": 1}, "tx": {"bytes": 5, "packets": 1}}}]"#;
        let traffic = parse_traffic(links).unwrap();
        let c0 = Traffic {
            sent_bytes: 7,
            received_bytes: 5,
        };
        assert_eq!(traffic, BTreeMap::from([("c0".to_owned(), c0)]));
        assert!(parse_traffic(r#"[{"ifname": "c0"}]"#).is_err());
    }

    #[test]
    fn a_table_is_replaced_as_a_whole() {
        let rule = Rule::Drop {
            from: Ipv4Addr::new(198, 18, 0, 11),
        };
        let text = render(&BTreeMap::from([(1, rule)]));
        assert!(text.starts_with("add table inet chaos\ndelete table inet chaos\n"));
        assert!(text.contains("ip saddr 198.18.0.11 drop"));
    }
}
