//! Writes the membership sets: only what changed, and says what failed.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use droptrace_common::{
    Address, AddressKey, AddressValue, NETNS_PREFIX_BITS, SCOPED_BY_NETNS, SCOPED_BY_USER, ServiceKey,
};

use super::{addresses::Prefix, sets::Sets};

/// What the sets hold now, and whose they are.
pub(super) struct Publisher {
    sets: Box<dyn Sets + Send>,
    addresses: BTreeMap<u32, BTreeMap<Prefix, AddressValue>>,
    services: BTreeMap<u32, BTreeSet<(Address, u16, u8)>>,
    /// Addresses of namespaces in scope.
    scoped: BTreeMap<u32, BTreeSet<Address>>,
    user: BTreeSet<Address>,
    scope: BTreeMap<Address, u32>,
}

impl Publisher {
    /// Starts with the addresses that the user named.
    pub(super) fn new(sets: Box<dyn Sets + Send>, user: BTreeSet<Address>) -> (Self, io::Result<()>) {
        let mut publisher = Self {
            sets,
            addresses: BTreeMap::new(),
            services: BTreeMap::new(),
            scoped: BTreeMap::new(),
            user,
            scope: BTreeMap::new(),
        };
        let written = publisher.write_scope();
        (publisher, written)
    }

    /// Writes the addresses of a netns.
    ///
    /// # Errors
    /// The first failure; everything else is written nevertheless.
    pub(super) fn addresses(&mut self, netns: u32, wanted: BTreeMap<Prefix, AddressValue>) -> io::Result<()> {
        let held = self.addresses.remove(&netns).unwrap_or_default();
        let mut result = Ok(());
        let key = |address: Address| AddressKey { netns, address };
        let bits = |bits: u8| NETNS_PREFIX_BITS + u32::from(bits);
        for (prefix, value) in &wanted {
            if held.get(prefix) != Some(value) {
                first(
                    &mut result,
                    self.sets.set_address(key(prefix.0), bits(prefix.1), *value),
                );
            }
        }
        for prefix in held.keys().filter(|prefix| !wanted.contains_key(*prefix)) {
            first(
                &mut result,
                self.sets.remove_address(key(prefix.0), bits(prefix.1)),
            );
        }
        if !wanted.is_empty() {
            self.addresses.insert(netns, wanted);
        }
        result
    }

    /// Writes the IPVS services of a netns.
    ///
    /// # Errors
    /// See [`Self::addresses`].
    pub(super) fn services(
        &mut self,
        netns: u32,
        wanted: impl Iterator<Item = ServiceKey>,
    ) -> io::Result<()> {
        let held = self.services.remove(&netns).unwrap_or_default();
        let wanted: BTreeSet<_> = wanted.map(|key| (key.address, key.port, key.protocol)).collect();
        let key = |(address, port, protocol): (Address, u16, u8)| ServiceKey {
            netns,
            port,
            protocol,
            pad: 0,
            address,
        };
        let mut result = Ok(());
        for &service in wanted.difference(&held) {
            first(&mut result, self.sets.set_service(key(service)));
        }
        for &service in held.difference(&wanted) {
            first(&mut result, self.sets.remove_service(key(service)));
        }
        if !wanted.is_empty() {
            self.services.insert(netns, wanted);
        }
        result
    }

    /// Puts a netns into scope, with the addresses that it holds now.
    ///
    /// # Errors
    /// See [`Self::addresses`].
    pub(super) fn scope(&mut self, netns: u32, addresses: BTreeSet<Address>) -> io::Result<()> {
        let mut result = Ok(());
        match self.scoped.insert(netns, addresses) {
            None => first(&mut result, self.sets.set_scope_netns(netns)),
            Some(held) if held == self.scoped[&netns] => return result,
            Some(_) => {}
        }
        first(&mut result, self.write_scope());
        result
    }

    /// Takes a netns out of scope.
    ///
    /// # Errors
    /// See [`Self::addresses`].
    pub(super) fn unscope(&mut self, netns: u32) -> io::Result<()> {
        let mut result = Ok(());
        if self.scoped.remove(&netns).is_some() {
            first(&mut result, self.sets.remove_scope_netns(netns));
            first(&mut result, self.write_scope());
        }
        result
    }

    /// Forgets a netns that vanished.
    ///
    /// # Errors
    /// See [`Self::addresses`].
    pub(super) fn forget(&mut self, netns: u32) -> io::Result<()> {
        let mut result = self.addresses(netns, BTreeMap::new());
        first(&mut result, self.services(netns, std::iter::empty()));
        first(&mut result, self.unscope(netns));
        result
    }

    fn write_scope(&mut self) -> io::Result<()> {
        let mut wanted: BTreeMap<Address, u32> = BTreeMap::new();
        for address in self.scoped.values().flatten() {
            *wanted.entry(*address).or_default() |= SCOPED_BY_NETNS;
        }
        for address in &self.user {
            *wanted.entry(*address).or_default() |= SCOPED_BY_USER;
        }
        let mut result = Ok(());
        for (address, flags) in &wanted {
            if self.scope.get(address) != Some(flags) {
                first(&mut result, self.sets.set_scope_address(*address, *flags));
            }
        }
        for address in self.scope.keys().filter(|address| !wanted.contains_key(*address)) {
            first(&mut result, self.sets.remove_scope_address(*address));
        }
        self.scope = wanted;
        result
    }
}

/// Keeps the first failure.
fn first(result: &mut io::Result<()>, next: io::Result<()>) {
    if result.is_ok() {
        *result = next;
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::{Arc, Mutex};

    use droptrace_common::address_flags;

    use super::*;

    /// Sets that a test can look into.
    #[derive(Clone, Default)]
    pub(in crate::context) struct Held(pub(in crate::context) Arc<Mutex<Contents>>);

    #[derive(Clone, Debug, Default, PartialEq, Eq)]
    pub(in crate::context) struct Contents {
        pub(in crate::context) addresses: BTreeMap<(u32, Address, u32), u32>,
        pub(in crate::context) services: BTreeSet<(u32, Address, u16, u8)>,
        pub(in crate::context) netns: BTreeSet<u32>,
        pub(in crate::context) scope: BTreeMap<Address, u32>,
        pub(in crate::context) writes: usize,
    }

    impl Held {
        pub(in crate::context) fn contents(&self) -> Contents {
            self.0.lock().unwrap().clone()
        }
        #[allow(clippy::unnecessary_wraps, reason = "what the methods of Sets answer")]
        fn write(&self, change: impl FnOnce(&mut Contents)) -> io::Result<()> {
            let mut contents = self.0.lock().unwrap();
            contents.writes += 1;
            change(&mut contents);
            Ok(())
        }
    }

    impl Sets for Held {
        fn set_address(&mut self, key: AddressKey, prefix: u32, value: AddressValue) -> io::Result<()> {
            self.write(|held| {
                held.addresses
                    .insert((key.netns, key.address, prefix), value.flags);
            })
        }
        fn remove_address(&mut self, key: AddressKey, prefix: u32) -> io::Result<()> {
            self.write(|held| {
                held.addresses.remove(&(key.netns, key.address, prefix));
            })
        }
        fn set_service(&mut self, key: ServiceKey) -> io::Result<()> {
            self.write(|held| {
                held.services
                    .insert((key.netns, key.address, key.port, key.protocol));
            })
        }
        fn remove_service(&mut self, key: ServiceKey) -> io::Result<()> {
            self.write(|held| {
                held.services
                    .remove(&(key.netns, key.address, key.port, key.protocol));
            })
        }
        fn set_scope_netns(&mut self, netns: u32) -> io::Result<()> {
            self.write(|held| {
                held.netns.insert(netns);
            })
        }
        fn remove_scope_netns(&mut self, netns: u32) -> io::Result<()> {
            self.write(|held| {
                held.netns.remove(&netns);
            })
        }
        fn set_scope_address(&mut self, address: Address, flags: u32) -> io::Result<()> {
            self.write(|held| {
                held.scope.insert(address, flags);
            })
        }
        fn remove_scope_address(&mut self, address: Address) -> io::Result<()> {
            self.write(|held| {
                held.scope.remove(&address);
            })
        }
    }

    const A: Address = [1; 16];
    const B: Address = [2; 16];

    fn value(flags: u32) -> AddressValue {
        AddressValue { flags, ifindex: 1 }
    }

    #[test]
    fn only_changes_are_written() {
        let held = Held::default();
        let (mut publisher, _) = Publisher::new(Box::new(held.clone()), BTreeSet::new());
        let both = BTreeMap::from([
            ((A, 128), value(address_flags::LOCAL)),
            ((B, 128), value(address_flags::LOCAL)),
        ]);
        publisher.addresses(9, both.clone()).unwrap();
        assert_eq!(held.contents().writes, 2);
        publisher.addresses(9, both.clone()).unwrap();
        assert_eq!(held.contents().writes, 2);
        let mut fewer = both;
        fewer.remove(&(B, 128));
        fewer.insert((A, 128), value(address_flags::LOCAL | address_flags::IPVS));
        publisher.addresses(9, fewer).unwrap();
        assert_eq!(held.contents().writes, 4);
        assert_eq!(
            held.contents().addresses,
            BTreeMap::from([((9, A, 32 + 128), address_flags::LOCAL | address_flags::IPVS)])
        );
        publisher.forget(9).unwrap();
        assert!(held.contents().addresses.is_empty());
    }

    #[test]
    fn an_address_stays_in_scope_while_anyone_holds_it() {
        let held = Held::default();
        let (mut publisher, _) = Publisher::new(Box::new(held.clone()), [A].into());
        assert_eq!(held.contents().scope, BTreeMap::from([(A, SCOPED_BY_USER)]));
        publisher.scope(1, [A, B].into()).unwrap();
        publisher.scope(2, [B].into()).unwrap();
        let contents = held.contents();
        assert_eq!(contents.netns, [1, 2].into());
        assert_eq!(
            contents.scope,
            BTreeMap::from([(A, SCOPED_BY_USER | SCOPED_BY_NETNS), (B, SCOPED_BY_NETNS)])
        );
        publisher.forget(1).unwrap();
        assert_eq!(
            held.contents().scope,
            BTreeMap::from([(A, SCOPED_BY_USER), (B, SCOPED_BY_NETNS)])
        );
        publisher.forget(2).unwrap();
        assert_eq!(held.contents().scope, BTreeMap::from([(A, SCOPED_BY_USER)]));
        assert!(held.contents().netns.is_empty());
    }
}
