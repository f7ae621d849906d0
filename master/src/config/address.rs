//! Addresses as they stand in flags: where masters are reached, and where this one listens.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use mooncake_raft_store::NodeId;

/// Most masters in `--initial-cluster`: every one more makes every write slower, and nobody needs to lose five.
pub(crate) const MAX_MEMBERS: usize = 9;

/// Where a master is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberAddress {
    /// `host:port` of its RPC port.
    pub rpc: String,
    /// `host:port` of its HTTP port.
    pub http: String,
}

/// The value of `--initial-cluster`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InitialCluster(pub BTreeMap<NodeId, MemberAddress>);

impl FromStr for InitialCluster {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut members = BTreeMap::new();
        let mut addresses = std::collections::BTreeSet::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let form = || {
                format!(
                    "'{part}' is not ID=RPC_HOST:PORT/HTTP_HOST:PORT, e.g. 1=127.0.0.1:50051/127.0.0.1:9003"
                )
            };
            let (id, rest) = part.split_once('=').ok_or_else(form)?;
            let (rpc, http) = rest.split_once('/').ok_or_else(form)?;
            let id: NodeId = id
                .trim()
                .parse()
                .ok()
                .filter(|id| *id > 0)
                .ok_or_else(|| format!("'{id}' is not a master id (1, 2, …)"))?;
            for address in [rpc, http] {
                check_address(address).map_err(|error| format!("master {id}: {error}"))?;
                if !addresses.insert(address.to_owned()) {
                    return Err(format!("the address {address} is named twice"));
                }
            }
            if members
                .insert(
                    id,
                    MemberAddress {
                        rpc: rpc.to_owned(),
                        http: http.to_owned(),
                    },
                )
                .is_some()
            {
                return Err(format!("master {id} is named twice"));
            }
        }
        match members.len() {
            0 => Err("it names no master".into()),
            n if n > MAX_MEMBERS => Err(format!("it names {n} masters, the limit is {MAX_MEMBERS}")),
            _ => Ok(Self(members)),
        }
    }
}

impl fmt::Display for InitialCluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (id, address)) in self.0.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            write!(f, "{comma}{id}={}/{}", address.rpc, address.http)?;
        }
        Ok(())
    }
}

/// An address that others dial: `host:port`, IPv6 in brackets, port not 0.
pub(crate) fn check_address(text: &str) -> Result<(), String> {
    mooncake_proto::ids::NodeId::parse(text).map(drop)
}

/// Where to listen: host and, perhaps, port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenAddress {
    /// A name or a literal, IPv6 without brackets.
    pub host: String,
    /// 0: any free one.
    pub port: Option<u16>,
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        // A literal without a port, IPv6 with or without brackets.
        let bare = text
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
            .unwrap_or(text);
        if bare.parse::<IpAddr>().is_ok() {
            return Ok(Self {
                host: bare.to_owned(),
                port: None,
            });
        }
        let (host, port) = match text.rsplit_once(':') {
            None => (text, None),
            Some((host, port)) => {
                let port = port
                    .parse::<u16>()
                    .map_err(|_| format!("'{port}' is not a port (0-65535)"))?;
                (host, Some(port))
            }
        };
        let literal = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let host = match literal {
            Some(inner) => {
                inner
                    .parse::<std::net::Ipv6Addr>()
                    .map_err(|_| format!("'{inner}' is not an IPv6 address"))?;
                inner
            }
            None if host.contains(':') => {
                return Err(format!("write an IPv6 address in brackets: [{host}]:PORT"));
            }
            None => host,
        };
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
        if host.is_empty() || !host.chars().all(good) {
            return Err(format!("'{text}' is not HOST:PORT"));
        }
        Ok(Self {
            host: host.to_owned(),
            port,
        })
    }
}

/// A listen address with its port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    /// A name or a literal, IPv6 without brackets.
    pub host: String,
    /// 0: any free one.
    pub port: u16,
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

pub(crate) fn dialled(text: &str) -> Result<String, String> {
    check_address(text).map(|()| text.to_owned())
}
