//! What the masters can do apart from moving bytes: jobs created and read beside etcd's puts and ranges ([`rates`]), and
//! a thousand nodes that do nothing, or all take part in one job ([`fleet`]).
//!
//! Not measured: machines. Masters, etcd, HAProxy, callers and simulated nodes share this one's cores, so that absolute
//! rates are those of a fraction of a machine each; what is compared ran under the same burden.

pub mod fleet;
mod node;
pub mod rates;
mod report;

pub use report::Report;
