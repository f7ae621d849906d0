//! How blocks go between nodes, and by which devices.

use crate::rate::unit;
use clap::ValueEnum;
use mooncake_rdma::{Config, Mtu, connection::MAX_DEPTH, pool::MAX_SLAB_BYTES};
use std::time::Duration;

/// Longest that a task may look for completions instead of sleeping: it holds a thread of the runtime.
const MAX_SPIN_US: u64 = 1_000;
/// The least registered memory: two of the largest blocks each way.
const MIN_MEMORY_BYTES: usize = 4 * MAX_SLAB_BYTES;
/// The most: beyond it nothing gets faster.
const MAX_MEMORY_BYTES: usize = 16 << 30;

/// How blocks go between this node and others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum TransportChoice {
    /// By RDMA with nodes that can, over TCP with others.
    #[default]
    Auto,
    /// The same, but the node does not start where RDMA cannot be used.
    Rdma,
    /// Over TCP.
    Tcp,
}

/// The flags of RDMA.
#[derive(Clone, Debug, clap::Args)]
pub struct RdmaArgs {
    /// How blocks go to and from other nodes. auto: by RDMA with nodes that can, else over TCP. rdma: the same, but this node
    /// does not start where it cannot use RDMA. A failing device never stops a transfer: it goes on over TCP
    #[arg(long, value_name = "TRANSPORT", default_value = "auto")]
    pub transport: TransportChoice,

    /// Use only this RDMA device, e.g. mlx5_0; repeatable. Without it all of them
    #[arg(long, value_name = "NAME")]
    pub rdma_device: Vec<String>,

    /// Use only this port of each RDMA device
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub rdma_port: Option<u8>,

    /// Use this entry of the ports' GID tables. Without it RoCE v2 with an IPv4 address goes first, link-local ones last
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8))]
    pub rdma_gid_index: Option<u8>,

    /// Largest RDMA packets: 256, 512, 1024, 2048 or 4096 bytes. Without it as large as both ports bear
    #[arg(long, value_name = "BYTES", value_parser = mtu)]
    pub rdma_mtu: Option<u32>,

    /// Most memory registered with RDMA devices, half of it to serve from and half to receive into
    #[arg(long, value_name = "BYTES", default_value = "128MiB", value_parser = memory)]
    pub rdma_memory: usize,

    /// Blocks that are read from one node at the same time
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_DEPTH)))]
    pub rdma_depth: u32,

    /// Look for the end of a read for so long before sleeping until it comes: takes processor time, saves some latency
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=MAX_SPIN_US))]
    pub rdma_spin_us: u64,

    /// Traffic class of RDMA packets, where the network keeps them apart by DSCP: four times the code point
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub rdma_traffic_class: u8,
}

impl RdmaArgs {
    /// What the transport is told; `None`: TCP only.
    pub fn config(&self) -> Option<Config> {
        (self.transport != TransportChoice::Tcp).then(|| Config {
            devices: self.rdma_device.clone(),
            port: self.rdma_port,
            gid_index: self.rdma_gid_index.map(u32::from),
            mtu: self.rdma_mtu.and_then(Mtu::from_bytes),
            traffic_class: self.rdma_traffic_class,
            memory_bytes: self.rdma_memory,
            depth: self.rdma_depth,
            spin: Duration::from_micros(self.rdma_spin_us),
        })
    }
}

fn mtu(text: &str) -> Result<u32, String> {
    let bytes = text.parse().ok().filter(|b| Mtu::from_bytes(*b).is_some());
    bytes.ok_or_else(|| "an RDMA MTU is 256, 512, 1024, 2048 or 4096".to_owned())
}

/// Bytes, with `KiB`, `MiB` or `GiB` behind the number if wanted.
fn memory(text: &str) -> Result<usize, String> {
    let (digits, factor) =
        unit(text).map_err(|other| format!("'{other}' is no unit: use KiB, MiB or GiB"))?;
    let bytes = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(factor));
    let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
    match bytes {
        Some(bytes) if (MIN_MEMORY_BYTES..=MAX_MEMORY_BYTES).contains(&bytes) => Ok(bytes),
        _ => Err(format!(
            "give {} MiB to {} GiB",
            MIN_MEMORY_BYTES >> 20,
            MAX_MEMORY_BYTES >> 30
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_units_and_bounds() {
        assert_eq!(memory("128MiB"), Ok(128 << 20));
        assert_eq!(memory("16777216"), Ok(16 << 20));
        assert_eq!(memory("1gib"), Ok(1 << 30));
        for wrong in ["", "8MiB", "17GiB", "x", "64MB", "-1"] {
            assert!(memory(wrong).is_err(), "{wrong}");
        }
        assert_eq!(mtu("1024"), Ok(1024));
        assert!(mtu("1500").is_err());
    }
}
