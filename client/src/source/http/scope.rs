//! Where a redirect may lead: not from a public server into this network.
//!
//! Addresses are loopback, private or public. A redirect leads from an allowed URL to an address of the same
//! or a wider scope, never to a narrower one, and never to link-local addresses (where clouds keep their
//! metadata service and its credentials). The rule is applied to the addresses that are connected to, when
//! they are resolved, so that a name cannot show one address to the check and another to the connection.

use parking_lot::Mutex;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

/// Most names that redirects of one acquisition may lead to.
const MAX_NAMES: usize = 1024;

/// How far an address is reached from, narrowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Scope {
    Loopback,
    Private,
    Public,
}

impl Scope {
    /// None: no redirect may lead there.
    pub(super) fn of(ip: IpAddr) -> Option<Self> {
        match ip {
            IpAddr::V4(ip) => Self::of_v4(ip),
            IpAddr::V6(ip) => Self::of_v6(ip),
        }
    }

    fn of_v4(ip: Ipv4Addr) -> Option<Self> {
        let [a, b, ..] = ip.octets();
        if ip.is_loopback() {
            Some(Self::Loopback)
        } else if a == 0 || ip.is_link_local() || ip.is_multicast() || a >= 240 {
            None
        } else if ip.is_private() || (a == 100 && b & 0xc0 == 64) {
            Some(Self::Private)
        } else {
            Some(Self::Public)
        }
    }

    fn of_v6(ip: Ipv6Addr) -> Option<Self> {
        let s = ip.segments();
        let low = |hi: u16, lo: u16| Ipv4Addr::from(u32::from(hi) << 16 | u32::from(lo));
        if let Some(v4) = ip.to_ipv4_mapped() {
            return Self::of_v4(v4);
        }
        match s[0] {
            _ if ip.is_loopback() => Some(Self::Loopback),
            _ if ip.is_unspecified() || ip.is_multicast() || ip.is_unicast_link_local() => None,
            _ if ip.is_unique_local() || s[0] & 0xffc0 == 0xfec0 => Some(Self::Private),
            // NAT64 and 6to4 carry an IPv4 address.
            0x64 if s[1] == 0xff9b => Self::of_v4(low(s[6], s[7])),
            0x2002 => Self::of_v4(low(s[1], s[2])),
            _ => Some(Self::Public),
        }
    }

    /// Whether a redirect from a server of this scope may lead to `ip`.
    pub(super) fn may_lead_to(self, ip: IpAddr) -> bool {
        Self::of(ip).is_some_and(|target| target >= self)
    }

    /// Of a server that the operator allowed by name: the widest of its addresses; public where the name
    /// does not resolve here (then only a proxy reaches it).
    pub(super) async fn of_host(host: &str, port: u16) -> Self {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let addresses = tokio::net::lookup_host((bare, port)).await;
        let widest = addresses
            .into_iter()
            .flatten()
            .filter_map(|a| Self::of(a.ip()))
            .max();
        widest.unwrap_or(Self::Public)
    }
}

/// A redirect led to a name whose addresses are all of a narrower scope.
#[derive(Debug, thiserror::Error)]
#[error("'{0}' is an address of this machine or of its network, where a redirect from outside may not lead")]
pub(super) struct ScopeRefused(String);

/// Resolves names, and holds those that redirects led to to their scope.
#[derive(Clone, Debug, Default)]
pub(super) struct Resolver {
    /// Names reached only by redirects. A leaf lock, never held across an await.
    narrowest: Arc<Mutex<HashMap<String, Scope>>>,
}

impl Resolver {
    /// From now on `name` resolves only to addresses of at least `scope`. False: there are too many names.
    pub(super) fn restrict(&self, name: &str, scope: Scope) -> bool {
        let mut names = self.narrowest.lock();
        if names.len() >= MAX_NAMES && !names.contains_key(name) {
            return false;
        }
        let entry = names.entry(name.to_owned()).or_insert(scope);
        *entry = scope.max(*entry);
        true
    }
}

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let narrowest = self.narrowest.lock().get(name.as_str()).copied();
        Box::pin(async move {
            let found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            let allowed: Vec<SocketAddr> = match narrowest {
                None => found,
                Some(scope) => {
                    let list: Vec<_> = found.into_iter().filter(|a| scope.may_lead_to(a.ip())).collect();
                    if list.is_empty() {
                        return Err(ScopeRefused(name.as_str().to_owned()).into());
                    }
                    list
                }
            };
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes() {
        let scope = |text: &str| Scope::of(text.parse().unwrap());
        for ip in [
            "127.0.0.1",
            "127.9.9.9",
            "::1",
            "::ffff:127.0.0.1",
            "64:ff9b::7f00:1",
        ] {
            assert_eq!(scope(ip), Some(Scope::Loopback), "{ip}");
        }
        for ip in [
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "100.100.100.200",
            "fd00:ec2::254",
            "2002:a00:1::",
        ] {
            assert_eq!(scope(ip), Some(Scope::Private), "{ip}");
        }
        for ip in [
            "169.254.169.254",
            "::ffff:169.254.169.254",
            "fe80::1",
            "0.0.0.0",
            "::",
            "224.0.0.1",
            "255.255.255.255",
        ] {
            assert_eq!(scope(ip), None, "{ip}");
        }
        for ip in ["1.1.1.1", "172.32.0.1", "2606:4700::1111"] {
            assert_eq!(scope(ip), Some(Scope::Public), "{ip}");
        }
    }

    #[test]
    fn redirects_lead_outwards_only() {
        let ip = |text: &str| text.parse().unwrap();
        assert!(Scope::Private.may_lead_to(ip("10.0.0.1")) && Scope::Private.may_lead_to(ip("1.1.1.1")));
        assert!(!Scope::Public.may_lead_to(ip("10.0.0.1")) && !Scope::Private.may_lead_to(ip("127.0.0.1")));
        assert!(
            !Scope::Loopback.may_lead_to(ip("169.254.169.254")),
            "link-local never"
        );
    }

    #[tokio::test]
    async fn a_name_is_held_to_its_scope_when_it_is_resolved() {
        let resolver = Resolver::default();
        let resolve = |r: &Resolver| r.resolve("localhost".parse().unwrap());
        assert!(resolve(&resolver).await.unwrap().count() > 0);
        assert!(resolver.restrict("localhost", Scope::Public));
        assert!(
            resolver.restrict("localhost", Scope::Loopback),
            "a later, wider rule does not loosen it"
        );
        let Err(error) = resolve(&resolver).await else {
            panic!("localhost is not public")
        };
        assert!(error.to_string().contains("localhost"));
        assert_eq!(Scope::of_host("127.0.0.1", 80).await, Scope::Loopback);
        assert_eq!(Scope::of_host("[::1]", 80).await, Scope::Loopback);
    }
}
