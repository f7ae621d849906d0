//! Names: nodes, jobs, model versions.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Longest node id, in bytes.
pub const MAX_NODE_ID_BYTES: usize = 261;
/// Longest job id, in bytes.
pub const MAX_JOB_ID_BYTES: usize = 128;
/// Longest component of a [`ModelRef`], in bytes.
pub const MAX_MODEL_COMPONENT_BYTES: usize = 256;

/// A node's id: `host:port`, e.g. `127.0.0.1:25001` or `[::1]:25001`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub String);

impl NodeId {
    /// Parses `host:port`; the host is a name, an IPv4 literal or a bracketed IPv6 literal; the port is
    /// 1–65535. The error says what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > MAX_NODE_ID_BYTES {
            return Err(format!(
                "node id is {} bytes long, the limit is {MAX_NODE_ID_BYTES}",
                text.len()
            ));
        }
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, tail) = rest
                    .split_once(']')
                    .ok_or("the '[' of an IPv6 address is not closed")?;
                host.parse::<std::net::Ipv6Addr>()
                    .map_err(|_| format!("'{host}' is not an IPv6 address"))?;
                let port = tail.strip_prefix(':').ok_or("':port' is missing after ']'")?;
                (host, port)
            }
            None => {
                let (host, port) = text
                    .rsplit_once(':')
                    .ok_or_else(|| format!("'{text}' is not host:port"))?;
                if host.contains(':') {
                    return Err(format!("write an IPv6 address in brackets: [{host}]:{port}"));
                }
                if let Some(bad) = host
                    .chars()
                    .find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_')))
                {
                    return Err(format!("host '{host}' holds the character {bad:?}"));
                }
                (host, port)
            }
        };
        if host.is_empty() {
            return Err(format!("'{text}' has no host"));
        }
        match port.parse::<u16>() {
            Ok(p) if p > 0 && port.bytes().all(|b| b.is_ascii_digit()) => Ok(Self(text.to_owned())),
            _ => Err(format!("'{port}' is not a port (1-65535)")),
        }
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A job's id: 1 to 128 characters of `A-Z a-z 0-9 . _ -`; usually a UUID.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(pub String);

impl JobId {
    /// Checks the alphabet and the length; the error says what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() || text.len() > MAX_JOB_ID_BYTES {
            return Err(format!(
                "a job id has 1 to {MAX_JOB_ID_BYTES} characters, this one has {}",
                text.len()
            ));
        }
        match text
            .chars()
            .find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')))
        {
            Some(bad) => Err(format!(
                "a job id holds only A-Z a-z 0-9 . _ -, this one holds {bad:?}"
            )),
            None => Ok(Self(text.to_owned())),
        }
    }

    /// A fresh id (UUIDv7: sorts by creation time).
    pub fn generate() -> Self {
        Self(uuid::Uuid::now_v7().to_string())
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The name of one model version; the key of its artifact.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ModelRef {
    /// E.g. `org/name`; may hold `/`.
    pub model_id: String,
    /// E.g. a commit or `r1`.
    pub revision: String,
    /// E.g. `safetensors`.
    pub format: String,
    /// Where it comes from, e.g. `local`, `hf`.
    pub provider: String,
}

impl ModelRef {
    /// The four components with their JSON names, in the order of the manifest.
    pub fn components(&self) -> [(&'static str, &str); 4] {
        [
            ("model_id", &self.model_id),
            ("revision", &self.revision),
            ("format", &self.format),
            ("provider", &self.provider),
        ]
    }
}

impl fmt::Display for ModelRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}/{}@{} ({})",
            self.provider, self.model_id, self.revision, self.format
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_ids() {
        for good in ["127.0.0.1:25001", "node-1.rack_2:1", "[::1]:65535"] {
            assert_eq!(NodeId::parse(good).unwrap().as_str(), good);
        }
        for bad in [
            "",
            "host",
            ":1",
            "host:",
            "host:0",
            "host:65536",
            "host:+1",
            "::1:25001",
            "[::1]25001",
            "[::1",
            "a b:1",
            "h/x:1",
        ] {
            assert!(NodeId::parse(bad).is_err(), "{bad:?} must be refused");
        }
    }

    #[test]
    fn job_ids() {
        assert!(JobId::parse(JobId::generate().as_str()).is_ok());
        for bad in ["", "a/b", "a b", "ä", &"x".repeat(129)] {
            assert!(JobId::parse(bad).is_err(), "{bad:?} must be refused");
        }
    }
}
