//! Whether the user wants to see a drop.

use core::ptr::read_volatile;

use droptrace_common::{
    SCOPE_ADDRESSES as BY_ADDRESS, SCOPE_ALL, SCOPE_NETNS as BY_NETNS, SCOPE_PORT, SCOPE_PROTOCOL,
    SCOPED_BY_NETNS, SCOPED_BY_USER, Scope,
};

use crate::{
    maps::{SCOPE_ADDRESSES, SCOPE_NETNS},
    packet::Tuple,
};

/// Filled by user space before loading.
#[unsafe(no_mangle)]
#[unsafe(link_section = ".rodata")]
static SCOPE: Scope = Scope {
    flags: SCOPE_ALL,
    port: 0,
    protocol: 0,
    pad: 0,
};

/// Whether this test applies.
#[inline(always)]
pub(crate) fn has(test: u32) -> bool {
    // SAFETY: a plain number in read-only data; volatile, since user space replaced it.
    unsafe { read_volatile(&raw const SCOPE.flags) & test != 0 }
}

/// Whether a drop of this packet in this netns is in scope.
#[inline(always)]
pub(crate) fn admits(tuple: &Tuple, netns: u32) -> bool {
    // SAFETY: a plain value in read-only data; volatile, since user space replaced it.
    let scope = unsafe { read_volatile(&raw const SCOPE) };
    if scope.flags == SCOPE_ALL {
        return true;
    }
    if scope.flags & SCOPE_PROTOCOL != 0 && tuple.protocol != scope.protocol {
        return false;
    }
    if scope.flags & SCOPE_PORT != 0 && tuple.sport != scope.port && tuple.dport != scope.port {
        return false;
    }
    if scope.flags & BY_ADDRESS != 0 && !addressed(tuple, SCOPED_BY_USER) {
        return false;
    }
    if scope.flags & BY_NETNS != 0 {
        // SAFETY: the value is not read.
        return unsafe { SCOPE_NETNS.get(netns) }.is_some() || addressed(tuple, SCOPED_BY_NETNS);
    }
    true
}

#[inline(always)]
fn addressed(tuple: &Tuple, by: u32) -> bool {
    // SAFETY: the value is copied at once.
    let flags = |address| unsafe { SCOPE_ADDRESSES.get(address) }.copied().unwrap_or(0);
    (flags(tuple.src) | flags(tuple.dst)) & by != 0
}
