//! What context tells the BPF programs: which addresses, services and network
//! namespaces they test packets against.

use std::io;

use droptrace_common::{Address, AddressKey, AddressValue, ServiceKey};

/// Where context writes the membership sets; the live run writes BPF maps.
///
/// Every method is idempotent: what is set again is replaced, and removing what is absent is no error.
pub trait Sets {
    /// Sets an entry of the map `ADDRESSES`. `prefix` is the prefix of the whole key in bits:
    /// [`droptrace_common::NETNS_PREFIX_BITS`] and those of the address.
    ///
    /// # Errors
    /// The map is full or closed; the entry is then absent.
    fn set_address(&mut self, key: AddressKey, prefix: u32, value: AddressValue) -> io::Result<()>;
    /// Removes an entry of the map `ADDRESSES`.
    ///
    /// # Errors
    /// The map is closed.
    fn remove_address(&mut self, key: AddressKey, prefix: u32) -> io::Result<()>;
    /// Adds an entry of the map `SERVICES`.
    ///
    /// # Errors
    /// See [`Self::set_address`].
    fn set_service(&mut self, key: ServiceKey) -> io::Result<()>;
    /// Removes an entry of the map `SERVICES`.
    ///
    /// # Errors
    /// See [`Self::remove_address`].
    fn remove_service(&mut self, key: ServiceKey) -> io::Result<()>;
    /// Adds a netns (inode number) to the map `SCOPE_NETNS`.
    ///
    /// # Errors
    /// See [`Self::set_address`].
    fn set_scope_netns(&mut self, netns: u32) -> io::Result<()>;
    /// Removes a netns from the map `SCOPE_NETNS`.
    ///
    /// # Errors
    /// See [`Self::remove_address`].
    fn remove_scope_netns(&mut self, netns: u32) -> io::Result<()>;
    /// Sets an entry of the map `SCOPE_ADDRESSES`; `flags` are [`droptrace_common::SCOPED_BY_NETNS`] and
    /// [`droptrace_common::SCOPED_BY_USER`].
    ///
    /// # Errors
    /// See [`Self::set_address`].
    fn set_scope_address(&mut self, address: Address, flags: u32) -> io::Result<()>;
    /// Removes an entry of the map `SCOPE_ADDRESSES`.
    ///
    /// # Errors
    /// See [`Self::remove_address`].
    fn remove_scope_address(&mut self, address: Address) -> io::Result<()>;
}

/// Sets that nobody tests against: for commands that only ask, such as `doctor`.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoSets;

impl Sets for NoSets {
    fn set_address(&mut self, _: AddressKey, _: u32, _: AddressValue) -> io::Result<()> {
        Ok(())
    }
    fn remove_address(&mut self, _: AddressKey, _: u32) -> io::Result<()> {
        Ok(())
    }
    fn set_service(&mut self, _: ServiceKey) -> io::Result<()> {
        Ok(())
    }
    fn remove_service(&mut self, _: ServiceKey) -> io::Result<()> {
        Ok(())
    }
    fn set_scope_netns(&mut self, _: u32) -> io::Result<()> {
        Ok(())
    }
    fn remove_scope_netns(&mut self, _: u32) -> io::Result<()> {
        Ok(())
    }
    fn set_scope_address(&mut self, _: Address, _: u32) -> io::Result<()> {
        Ok(())
    }
    fn remove_scope_address(&mut self, _: Address) -> io::Result<()> {
        Ok(())
    }
}
