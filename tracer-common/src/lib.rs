//! What crosses the border between the BPF programs and user space: the raw
//! event, the count keys, the layout of the running kernel's structures, the
//! scope and the sets that context keeps current.
//!
//! Everything here is `repr(C)`, plain bytes, and shared by both sides, so that
//! a field exists once.
#![cfg_attr(not(test), no_std)]

mod brief;
mod counts;
mod event;
mod layout;
mod memo;
#[cfg(feature = "user")]
mod pod;
mod scope;
mod sets;

pub use brief::{BRIEF_PACKET, BriefEvent};
pub use counts::{CountKey, CountValue, QUIET_MAX, Sampling, TALLIES, Tally};
pub use event::{
    EVENT_MAX, EventHeader, FIELDS_MAX, Field, FieldId, PACKET_MAX, Site, bits, ct_status, route,
};
pub use layout::{ABSENT, IpvsLayout, Layout, LayoutEntry, Resolve};
pub use memo::{Frees, Like, MEMO_WORDS, MEMOS, Memo};
pub use scope::{
    SCOPE_ADDRESSES, SCOPE_ALL, SCOPE_NETNS, SCOPE_PORT, SCOPE_PROTOCOL, SCOPED_BY_NETNS, SCOPED_BY_USER,
    Scope,
};
pub use sets::{
    ADDRESS_PREFIX_BASE, Address, AddressKey, AddressValue, NETNS_PREFIX_BITS, ServiceKey, address_flags,
};
