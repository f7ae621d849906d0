//! What goes with what: which GID a port is spoken to by, which of this node's ways fits a peer's. Pure.

use std::fmt;

/// What a port's frames are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Layer {
    /// InfiniBand: addressed by LID, within one subnet.
    Infiniband,
    /// RoCE: addressed by GID.
    Ethernet,
}

impl Layer {
    /// For messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Infiniband => "InfiniBand",
            Self::Ethernet => "Ethernet",
        }
    }
}

/// What a GID table entry is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GidKind {
    /// InfiniBand.
    Infiniband,
    /// RoCE v1: Ethernet frames of their own, which no router passes on.
    RoceV1,
    /// RoCE v2: UDP port 4791.
    RoceV2,
}

impl GidKind {
    /// On the wire; frozen.
    pub fn number(self) -> u32 {
        match self {
            Self::Infiniband => 1,
            Self::RoceV1 => 2,
            Self::RoceV2 => 3,
        }
    }

    /// From the wire.
    pub fn from_number(number: u32) -> Option<Self> {
        [Self::Infiniband, Self::RoceV1, Self::RoceV2]
            .into_iter()
            .find(|k| k.number() == number)
    }

    /// What frames such a GID belongs to.
    pub fn layer(self) -> Layer {
        match self {
            Self::Infiniband => Layer::Infiniband,
            Self::RoceV1 | Self::RoceV2 => Layer::Ethernet,
        }
    }
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Infiniband => "InfiniBand",
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2 => "RoCE v2",
        })
    }
}

/// An entry of a port's GID table.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Gid {
    /// Where in the table.
    pub index: u32,
    /// What it is for.
    pub kind: GidKind,
    /// The address.
    pub raw: [u8; 16],
}

const MAPPED: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];

impl Gid {
    fn is_link_local(&self) -> bool {
        self.raw[0] == 0xfe && self.raw[1] & 0xc0 == 0x80
    }

    fn is_ipv4(&self) -> bool {
        self.raw[..12] == MAPPED
    }

    /// Which to take where nobody says: lower is better; `None`: of no use. A routable RoCE v2 address before a
    /// link-local one, IPv4 (which is what the interface is known by nearly everywhere) before IPv6, v2 before v1.
    pub fn rank(&self) -> Option<u32> {
        if self.raw == [0; 16] {
            return None;
        }
        Some(match self.kind {
            GidKind::Infiniband => 0,
            GidKind::RoceV2 if self.is_ipv4() => 0,
            GidKind::RoceV2 if !self.is_link_local() => 1,
            GidKind::RoceV2 => 2,
            GidKind::RoceV1 if self.is_ipv4() => 3,
            GidKind::RoceV1 if !self.is_link_local() => 4,
            GidKind::RoceV1 => 5,
        })
    }

    /// How well the two fit: `None` if they cannot speak to each other; the more of the address they share, the likelier
    /// they are on one network.
    pub fn fits(&self, other: &Gid) -> Option<u32> {
        let comparable = self.kind == other.kind
            && self.is_ipv4() == other.is_ipv4()
            && self.is_link_local() == other.is_link_local();
        if !comparable {
            return None;
        }
        // Another InfiniBand subnet would need a router, which nobody has.
        if self.kind == GidKind::Infiniband && self.raw[..8] != other.raw[..8] {
            return None;
        }
        let same = u128::from_be_bytes(self.raw) ^ u128::from_be_bytes(other.raw);
        Some(same.leading_zeros())
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({}, index {})",
            std::net::Ipv6Addr::from(self.raw),
            self.kind,
            self.index
        )
    }
}

/// The GID that a port is spoken to by: the one of this index where a person names it, else the best.
pub fn choose_gid(gids: &[Gid], index: Option<u32>) -> Option<Gid> {
    match index {
        Some(index) => gids.iter().find(|g| g.index == index).copied(),
        None => gids
            .iter()
            .filter_map(|g| Some((g.rank()?, g.index, *g)))
            .min_by_key(|(rank, index, _)| (*rank, *index))
            .map(|(_, _, gid)| gid),
    }
}

/// Path MTU as the verbs number it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mtu(u32);

impl Mtu {
    /// From the verbs' number, 1 (256 bytes) to 5 (4096 bytes).
    pub fn from_number(number: u32) -> Option<Self> {
        (1..=5).contains(&number).then_some(Self(number))
    }

    /// From bytes.
    pub fn from_bytes(bytes: u32) -> Option<Self> {
        (1..=5).map(Self).find(|m| m.bytes() == bytes)
    }

    /// The verbs' number.
    pub fn number(self) -> u32 {
        self.0
    }

    /// In bytes.
    pub fn bytes(self) -> u32 {
        128 << self.0
    }
}

/// What one end tells the other to be connected to. Goes over the authenticated connection only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Number of its queue pair, 24 bits.
    pub queue_pair: u32,
    /// Number of its first packet, 24 bits.
    pub first_packet: u32,
    /// By which it is spoken to.
    pub gid: Gid,
    /// InfiniBand's address of its port.
    pub lid: u16,
    /// The largest that its port bears.
    pub mtu: Mtu,
    /// Reads that it serves at once.
    pub reads: u8,
}

impl Endpoint {
    /// What a stranger's numbers must be to be believed; the text says what is wrong.
    pub fn check(&self) -> Result<(), String> {
        if self.queue_pair == 0 || self.queue_pair > 0xff_ffff || self.first_packet > 0xff_ffff {
            return Err(format!(
                "a queue pair {:#x} with first packet {:#x}: both have 24 bits",
                self.queue_pair, self.first_packet
            ));
        }
        if self.gid.kind.layer() == Layer::Infiniband && self.lid == 0 {
            return Err("an InfiniBand port without a LID: does a subnet manager run?".into());
        }
        if self.gid.kind.layer() == Layer::Ethernet && self.gid.raw == [0; 16] {
            return Err("a RoCE port without a GID".into());
        }
        Ok(())
    }
}

/// The GID, of those given, that fits a peer's best, and how well; the first of equals.
pub fn best_fit<'a, T>(
    ways: impl IntoIterator<Item = (&'a T, &'a [Gid])>,
    theirs: &Gid,
) -> Option<(&'a T, Gid)> {
    let mut best: Option<(u32, &T, Gid)> = None;
    for (way, gids) in ways {
        for gid in gids {
            let Some(fit) = gid.rank().and_then(|_| gid.fits(theirs)) else {
                continue;
            };
            if best.as_ref().is_none_or(|(other, ..)| fit > *other) {
                best = Some((fit, way, *gid));
            }
        }
    }
    best.map(|(_, way, gid)| (way, gid))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(index: u32, kind: GidKind, ip: [u8; 4]) -> Gid {
        let mut raw = [0; 16];
        raw[..12].copy_from_slice(&MAPPED);
        raw[12..].copy_from_slice(&ip);
        Gid { index, kind, raw }
    }

    fn v6(index: u32, kind: GidKind, text: &str) -> Gid {
        let ip: std::net::Ipv6Addr = text.parse().unwrap();
        Gid {
            index,
            kind,
            raw: ip.octets(),
        }
    }

    #[test]
    fn a_routable_v2_address_is_taken_and_a_link_local_one_last() {
        // As a network card with an IPv4 and an IPv6 address lists them.
        let table = [
            v6(0, GidKind::RoceV1, "fe80::1"),
            v6(1, GidKind::RoceV2, "fe80::1"),
            v4(2, GidKind::RoceV1, [10, 0, 0, 1]),
            v4(3, GidKind::RoceV2, [10, 0, 0, 1]),
            v6(4, GidKind::RoceV2, "fd00::1"),
        ];
        let chosen = |gids: &[Gid]| choose_gid(gids, None).map(|g| g.index);
        assert_eq!(chosen(&table), Some(3));
        assert_eq!(chosen(&[table[0], table[1], table[2], table[4]]), Some(4));
        assert_eq!(chosen(&table[..3]), Some(1), "v2, though link-local, before v1");
        assert_eq!(chosen(&table[..1]), Some(0));
        assert_eq!(
            choose_gid(&table, Some(2)),
            Some(table[2]),
            "a person's word counts"
        );
        assert_eq!(choose_gid(&table, Some(9)), None);
        assert_eq!(chosen(&[v6(0, GidKind::RoceV2, "::")]), None, "an empty entry");
        let two = [
            v4(5, GidKind::RoceV2, [10, 0, 0, 1]),
            v4(3, GidKind::RoceV2, [10, 1, 0, 1]),
        ];
        assert_eq!(chosen(&two), Some(3), "the lower index of equals");
    }

    #[test]
    fn the_way_on_the_peers_network_is_taken() {
        let a = [
            v4(1, GidKind::RoceV2, [10, 1, 0, 5]),
            v6(2, GidKind::RoceV2, "fd00:1::5"),
        ];
        let b = [v4(1, GidKind::RoceV2, [10, 2, 0, 5])];
        let ways = [("a", &a[..]), ("b", &b[..])];
        let pick =
            |theirs: &Gid| best_fit(ways.iter().map(|(n, g)| (n, *g)), theirs).map(|(n, g)| (*n, g.index));
        assert_eq!(pick(&v4(7, GidKind::RoceV2, [10, 2, 0, 9])), Some(("b", 1)));
        assert_eq!(pick(&v4(7, GidKind::RoceV2, [10, 1, 9, 9])), Some(("a", 1)));
        assert_eq!(pick(&v6(7, GidKind::RoceV2, "fd00:1::9")), Some(("a", 2)));
        assert_eq!(
            pick(&v4(7, GidKind::RoceV1, [10, 2, 0, 9])),
            None,
            "another protocol"
        );
        assert_eq!(
            pick(&v6(7, GidKind::RoceV2, "fe80::9")),
            None,
            "not on a routed address"
        );
        let ib = v6(0, GidKind::Infiniband, "fe80::2c9:3");
        assert!(ib.fits(&v6(0, GidKind::Infiniband, "fe80::2c9:4")).is_some());
        assert_eq!(
            ib.fits(&v6(0, GidKind::Infiniband, "fec0::2c9:4")),
            None,
            "another subnet"
        );
    }

    #[test]
    fn mtus_are_numbered_as_the_verbs_do() {
        let all: Vec<_> = (0..8).filter_map(Mtu::from_number).map(Mtu::bytes).collect();
        assert_eq!(all, [256, 512, 1024, 2048, 4096]);
        assert_eq!(Mtu::from_bytes(1024), Mtu::from_number(3));
        assert_eq!(Mtu::from_bytes(1500), None);
        assert!(Mtu::from_number(3) < Mtu::from_number(5));
        for kind in [GidKind::Infiniband, GidKind::RoceV1, GidKind::RoceV2] {
            assert_eq!(GidKind::from_number(kind.number()), Some(kind));
        }
        assert_eq!(GidKind::from_number(0), None);
    }

    #[test]
    fn a_peers_numbers_are_checked() {
        let good = Endpoint {
            queue_pair: 17,
            first_packet: 0,
            gid: v4(1, GidKind::RoceV2, [10, 0, 0, 1]),
            lid: 0,
            mtu: Mtu::from_number(3).unwrap(),
            reads: 16,
        };
        good.check().unwrap();
        let bad = [
            Endpoint {
                queue_pair: 0,
                ..good
            },
            Endpoint {
                queue_pair: 1 << 24,
                ..good
            },
            Endpoint {
                first_packet: 1 << 24,
                ..good
            },
            Endpoint {
                gid: v6(0, GidKind::RoceV2, "::"),
                ..good
            },
            Endpoint {
                gid: v6(0, GidKind::Infiniband, "fe80::1"),
                ..good
            },
        ];
        for endpoint in bad {
            assert!(endpoint.check().is_err(), "{endpoint:?}");
        }
    }
}
