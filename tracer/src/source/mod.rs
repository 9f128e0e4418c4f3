//! Where raw events and counts come from: the running kernel, or a capture file.

use anyhow::Context as _;
use aya::{Ebpf, maps::Map};

mod briefs;
mod counts;
pub mod file;
pub mod log;
pub mod proof;
mod ring;
mod sets;

pub use briefs::Labels;
pub use counts::{CountReader, Ledger, Totals};
pub use ring::Ring;
pub use sets::KernelSets;

/// Takes a map out of the loaded object.
///
/// # Errors
/// There is none of this name, or it is of another kind.
fn take_map<T: TryFrom<Map, Error = aya::maps::MapError>>(ebpf: &mut Ebpf, name: &str) -> anyhow::Result<T> {
    let map = ebpf
        .take_map(name)
        .with_context(|| format!("the BPF object has no map {name}"))?;
    T::try_from(map).with_context(|| format!("the map {name} is of another kind"))
}
