//! Membership sets that context keeps current and the programs test.

/// An IPv6 address, or an IPv4 address mapped into IPv6 (`::ffff:a.b.c.d`), in network order.
pub type Address = [u8; 16];

/// Bits of an [`AddressKey`] that the netns takes.
pub const NETNS_PREFIX_BITS: u32 = 32;
/// Prefix bits of an IPv4 address before its own prefix: the netns and the mapping.
pub const ADDRESS_PREFIX_BASE: u32 = NETNS_PREFIX_BITS + 96;

/// Data of the longest-prefix map `ADDRESSES`: a netns and an address in its table `local`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AddressKey {
    /// Inode of the netns, native order (all its bits always count).
    pub netns: u32,
    /// The address.
    pub address: Address,
}

/// Value of the map `ADDRESSES`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressValue {
    /// See [`address_flags`].
    pub flags: u32,
    /// Index of the device that holds the address.
    pub ifindex: u32,
}

/// Flags of an [`AddressValue`].
pub mod address_flags {
    /// The netns' table `local` has it as type local.
    pub const LOCAL: u32 = 1 << 0;
    /// It sits on a dummy device.
    pub const DUMMY: u32 = 1 << 1;
    /// Some IPVS service has it.
    pub const IPVS: u32 = 1 << 2;
}

/// Key of the map `SERVICES`: an IPVS service by address, port and protocol.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ServiceKey {
    /// Inode of the netns.
    pub netns: u32,
    /// Port, host order.
    pub port: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// Zero.
    pub pad: u8,
    /// Virtual address.
    pub address: Address,
}
