//! droptrace: why did the kernel drop this packet?
//!
//! Data flows one way: kernel hook → [`source`] → [`diagnose`] → [`sink`].
//! [`plan`] decides beforehand which hooks this kernel offers, [`context`] is
//! the only room that asks the running system, [`cli`] wires them together.

pub mod bpf;
pub mod capture;
pub mod cli;
pub mod context;
pub mod diagnose;
pub mod plan;
pub mod sink;
pub mod source;
