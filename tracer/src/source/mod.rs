//! Where raw events and counts come from: the running kernel, or a capture file.

mod counts;
pub mod file;
pub mod log;
mod ring;
mod sets;

pub use counts::{CountReader, Ledger, Totals};
pub use ring::Ring;
pub use sets::KernelSets;
