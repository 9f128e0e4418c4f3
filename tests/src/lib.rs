//! Scenarios that make a kernel drop packets, and what they are made of.
//!
//! A [`scenarios`] entry builds network namespaces, provokes a known number of
//! drops, reads the kernel's own counters, and then asks droptrace: the exact
//! totals, the label, the evidence. Everything here runs as root inside a
//! guest made for the purpose.

pub mod actor;
pub mod bench;
mod bpf;
pub mod cgroup;
pub mod containers;
mod cost;
mod counters;
pub mod netns;
pub mod packet;
pub mod run;
pub mod scenarios;
pub mod sockets;
pub mod stuck;
pub mod test;
pub mod trace;
pub mod tun;

pub use counters::Counters;
pub use netns::Netns;
pub use test::{Expected, IpFamily, Outcome, Scenario, Test};
pub use tun::Tun;

/// What a helper or scenario gives.
pub type Result<T> = anyhow::Result<T>;
