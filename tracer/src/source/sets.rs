//! The membership sets as BPF maps.

use std::io;

use aya::{
    Ebpf,
    maps::{HashMap, LpmTrie, MapData, MapError, lpm_trie::Key},
};
use droptrace_common::{Address, AddressKey, AddressValue, ServiceKey};

use super::take_map;
use crate::context::Sets;

/// The maps that context keeps current.
pub struct KernelSets {
    addresses: LpmTrie<MapData, AddressKey, AddressValue>,
    services: HashMap<MapData, ServiceKey, u32>,
    netns: HashMap<MapData, u32, u32>,
    scope: HashMap<MapData, Address, u32>,
}

impl KernelSets {
    /// Takes the maps out of the loaded object.
    ///
    /// # Errors
    /// A map is missing.
    pub fn open(ebpf: &mut Ebpf) -> anyhow::Result<Self> {
        Ok(Self {
            addresses: take_map(ebpf, "ADDRESSES")?,
            services: take_map(ebpf, "SERVICES")?,
            netns: take_map(ebpf, "SCOPE_NETNS")?,
            scope: take_map(ebpf, "SCOPE_ADDRESSES")?,
        })
    }
}

impl Sets for KernelSets {
    fn set_address(&mut self, key: AddressKey, prefix: u32, value: AddressValue) -> io::Result<()> {
        self.addresses
            .insert(&Key::new(prefix, key), value, 0)
            .map_err(other)
    }

    fn remove_address(&mut self, key: AddressKey, prefix: u32) -> io::Result<()> {
        absent_is_fine(self.addresses.remove(&Key::new(prefix, key)))
    }

    fn set_service(&mut self, key: ServiceKey) -> io::Result<()> {
        self.services.insert(key, 1, 0).map_err(other)
    }

    fn remove_service(&mut self, key: ServiceKey) -> io::Result<()> {
        absent_is_fine(self.services.remove(&key))
    }

    fn set_scope_netns(&mut self, netns: u32) -> io::Result<()> {
        self.netns.insert(netns, 1, 0).map_err(other)
    }

    fn remove_scope_netns(&mut self, netns: u32) -> io::Result<()> {
        absent_is_fine(self.netns.remove(&netns))
    }

    fn set_scope_address(&mut self, address: Address, flags: u32) -> io::Result<()> {
        self.scope.insert(address, flags, 0).map_err(other)
    }

    fn remove_scope_address(&mut self, address: Address) -> io::Result<()> {
        absent_is_fine(self.scope.remove(&address))
    }
}

fn other(error: MapError) -> io::Error {
    io::Error::other(error)
}

fn absent_is_fine(result: Result<(), MapError>) -> io::Result<()> {
    match result {
        Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        Ok(()) | Err(MapError::KeyNotFound) => Ok(()),
        Err(error) => Err(other(error)),
    }
}
