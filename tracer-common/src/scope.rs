//! What the user wants to see; applied in the kernel, before counting.

/// Everything is in scope.
pub const SCOPE_ALL: u32 = 0;
/// Only network namespaces in the map `SCOPE_NETNS`, and packets from or to an
/// address that those hold (map `SCOPE_ADDRESSES` with [`SCOPED_BY_NETNS`]).
pub const SCOPE_NETNS: u32 = 1 << 0;
/// Only packets from or to an address in the map `SCOPE_ADDRESSES` with [`SCOPED_BY_USER`].
pub const SCOPE_ADDRESSES: u32 = 1 << 1;
/// Only packets with this source or destination port.
pub const SCOPE_PORT: u32 = 1 << 2;
/// Only packets of this IP protocol.
pub const SCOPE_PROTOCOL: u32 = 1 << 3;

/// Value bit of the map `SCOPE_ADDRESSES`: the address belongs to a netns in scope.
pub const SCOPED_BY_NETNS: u32 = 1 << 0;
/// Value bit of the map `SCOPE_ADDRESSES`: the user named the address.
pub const SCOPED_BY_USER: u32 = 1 << 1;

/// Read-only for the programs, set before they are loaded.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// Which of the tests apply, all of which must hold.
    pub flags: u32,
    /// Port, host order.
    pub port: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// Zero.
    pub pad: u8,
}
