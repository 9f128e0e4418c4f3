//! The BPF object that was compiled into this program.

/// The object; `None` when the program was built without the BPF toolchain.
pub const OBJECT: Option<&[u8]> = include!(concat!(env!("OUT_DIR"), "/object.rs"));
