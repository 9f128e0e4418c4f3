//! Packages of any Debian release, on any machine that has apt, without touching what is installed.

mod apt;
mod mirror;

pub(crate) use apt::{Apt, Installed, unpack};

/// A suite of the archive, such as `bookworm` or `bookworm-security`.
pub(crate) type Suite = &'static str;

/// The release whose tools stand in every guest.
pub(crate) const GUEST_SUITES: &[Suite] = &["bookworm", "bookworm-security"];
