//! Packages of any Debian release, on any machine that has apt, without touching what is installed.

mod apt;
mod mirror;
mod tree;

pub(crate) use apt::{Apt, Installed, unpack};
pub(crate) use tree::{foreign, unpack_tree};

/// A suite of the archive, such as `bookworm` or `bookworm-security`.
pub(crate) type Suite = &'static str;

/// The release whose tools stand in every guest.
pub(crate) const GUEST_SUITES: &[Suite] = &["bookworm", "bookworm-security"];

/// The release whose emulator runs the guests.
pub(crate) const EMULATOR_SUITES: &[Suite] = &["trixie", "trixie-security"];
