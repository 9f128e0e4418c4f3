//! The catalogue: one cause, one place. The order matters: the first that
//! matches a signature is its cause, so the particular stands before the general.

mod accept_queue;
mod unknown;

use super::Cause;

/// Every cause.
pub(super) static ALL: &[&Cause] = &[&accept_queue::CAUSE, &unknown::KERNEL_REASON, &UNKNOWN];

pub use unknown::UNKNOWN;
