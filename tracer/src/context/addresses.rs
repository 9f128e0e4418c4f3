//! The addresses of one netns (its table `local`) and its devices, as
//! netlink tells them.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
};

use droptrace_common::{Address, AddressValue, address_flags};

use super::netlink::{Message, Netlink, address, attributes, half, put, text, word};
use crate::diagnose::AddressHolder;

/// Groups of a subscription that keeps [`Addresses`] current: links, and routes, among which the kernel
/// announces those of the table `local` (`include/uapi/linux/rtnetlink.h`).
pub(super) const GROUPS: u32 = 0x1 | 0x40 | 0x400;

const RTMSG: usize = 12;
const IFINFOMSG: usize = 16;
/// `RTA_TABLE`: the table's number where it takes more than a byte.
const RTA_TABLE: u16 = 15;
/// `RTEXT_FILTER_SKIP_STATS`: the answer need not count packets.
const SKIP_STATS: u32 = 1 << 3;
/// All bits of an [`Address`].
const WHOLE: u8 = 128;

/// An address or prefix: an IPv4 prefix of n bits has 96 + n here.
pub(super) type Prefix = (Address, u8);

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Device {
    pub(super) name: String,
    pub(super) kind: Option<String>,
    /// Bytes that fit into a packet.
    pub(super) mtu: Option<u32>,
    loopback: bool,
    /// Index of the device that it is a part of, as of a bridge.
    master: Option<u32>,
}

/// What a message of the subscription meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Change {
    /// Nothing here.
    None,
    /// Something; it is already taken over.
    Taken,
    /// Something whose effects the kernel does not announce: ask anew.
    Reload,
}

/// Devices and local addresses of a netns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Addresses {
    devices: BTreeMap<u32, Device>,
    /// The devices that hold a prefix, in the kernel's order.
    local: BTreeMap<Prefix, Vec<u32>>,
}

impl Addresses {
    /// Asks for everything.
    ///
    /// # Errors
    /// The kernel refused to list its links or its IPv4 routes. IPv6 may be switched off.
    pub(super) fn load(route: &mut Netlink) -> io::Result<Self> {
        let mut found = Self::default();
        let mut body = vec![0; IFINFOMSG];
        put(&mut body, libc::IFLA_EXT_MASK, &SKIP_STATS.to_ne_bytes());
        for message in route.dump(libc::RTM_GETLINK, &body)? {
            found.take(&message);
        }
        for family in [libc::AF_INET, libc::AF_INET6] {
            let mut body = vec![0; RTMSG];
            body[0] = family as u8;
            body[4] = libc::RT_TABLE_LOCAL;
            body[7] = libc::RTN_LOCAL;
            match route.dump(libc::RTM_GETROUTE, &body) {
                Ok(messages) => messages.iter().for_each(|message| {
                    found.take(message);
                }),
                // A netns without any address has no table `local` yet.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                Err(_) if family == libc::AF_INET6 => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// Takes over what a message says.
    pub(super) fn take(&mut self, message: &Message) -> Change {
        match message.kind {
            libc::RTM_NEWROUTE | libc::RTM_DELROUTE => self.take_route(message),
            libc::RTM_NEWLINK | libc::RTM_DELLINK => self.take_link(message),
            _ => Change::None,
        }
    }

    fn take_route(&mut self, message: &Message) -> Change {
        let body = &message.body;
        let (Some(&family), Some(&bits), Some(&table), Some(&kind)) =
            (body.first(), body.get(1), body.get(4), body.get(7))
        else {
            return Change::None;
        };
        if kind != libc::RTN_LOCAL || !matches!(i32::from(family), libc::AF_INET | libc::AF_INET6) {
            return Change::None;
        }
        let mut table = u32::from(table);
        let mut destination = None;
        let mut ifindex = 0;
        for (attribute, value) in attributes(body, RTMSG) {
            match attribute {
                RTA_TABLE => table = word(value, 0).unwrap_or(table),
                libc::RTA_DST => destination = address(family, value),
                libc::RTA_OIF => ifindex = word(value, 0).unwrap_or(0),
                _ => {}
            }
        }
        if table != u32::from(libc::RT_TABLE_LOCAL) {
            return Change::None;
        }
        let prefix = match destination {
            Some(destination) => whole_bits(destination, bits),
            // "local default": everything.
            None if i32::from(family) == libc::AF_INET => whole_bits(IpAddr::from([0; 4]), 0),
            None => whole_bits(IpAddr::from([0u16; 8]), 0),
        };
        let holders = self.local.entry(prefix).or_default();
        if message.kind == libc::RTM_NEWROUTE {
            if !holders.contains(&ifindex) {
                holders.push(ifindex);
            }
        } else {
            holders.retain(|&each| each != ifindex);
            if holders.is_empty() {
                self.local.remove(&prefix);
            }
        }
        Change::Taken
    }

    fn take_link(&mut self, message: &Message) -> Change {
        let body = &message.body;
        // Bridges speak of their ports in the same group, with a family of their own.
        if body.first() != Some(&(libc::AF_UNSPEC as u8)) {
            return Change::None;
        }
        let (Some(index), Some(flags)) = (word(body, 4), word(body, 8)) else {
            return Change::None;
        };
        if message.kind == libc::RTM_DELLINK {
            self.devices.remove(&index);
            return Change::Reload;
        }
        let mut device = Device {
            name: String::new(),
            kind: None,
            mtu: None,
            loopback: half(body, 2) == Some(libc::ARPHRD_LOOPBACK),
            master: None,
        };
        for (attribute, value) in attributes(body, IFINFOMSG) {
            match attribute {
                libc::IFLA_IFNAME => device.name = text(value),
                libc::IFLA_MASTER => device.master = word(value, 0),
                libc::IFLA_MTU => device.mtu = word(value, 0),
                libc::IFLA_LINKINFO => {
                    device.kind = attributes(value, 0)
                        .find(|(each, _)| *each == libc::IFLA_INFO_KIND)
                        .map(|(_, kind)| text(kind));
                }
                _ => {}
            }
        }
        let changed = self.devices.get(&index) != Some(&device);
        self.devices.insert(index, device);
        if flags & libc::IFF_UP as u32 == 0 {
            // Its IPv6 addresses go without a word.
            Change::Reload
        } else if changed {
            Change::Taken
        } else {
            Change::None
        }
    }

    /// A device by its index.
    pub(super) fn device(&self, ifindex: u32) -> Option<&Device> {
        self.devices.get(&ifindex)
    }

    /// All devices.
    pub(super) fn devices(&self) -> impl Iterator<Item = &Device> {
        self.devices.values()
    }

    /// Indexes of the network cards: devices that no command made (those have a kind), other than loopback, and than those
    /// that add to their own counters what their parts count, as `hv_netvsc` and `net_failover` do.
    pub(super) fn cards(&self) -> Vec<u32> {
        let has_parts = |index| self.devices.values().any(|device| device.master == Some(index));
        let is_card = |index, device: &Device| device.kind.is_none() && !device.loopback && !has_parts(index);
        let all = self.devices.iter();
        all.filter_map(|(index, device)| is_card(*index, device).then_some(*index))
            .collect()
    }

    /// The device that holds an address, by the longest prefix.
    pub(super) fn holder(&self, address: IpAddr) -> Option<AddressHolder> {
        let ifindex = *self.covering(whole(address))?.first()?;
        Some(self.devices.get(&ifindex).map_or_else(
            || AddressHolder {
                device: format!("device {ifindex}"),
                kind: None,
            },
            |device| AddressHolder {
                device: device.name.clone(),
                kind: device.kind.clone(),
            },
        ))
    }

    /// Whether a device has an address of a family.
    pub(super) fn has_address(&self, ifindex: u32, v6: bool) -> bool {
        self.local.iter().any(|((address, _), holders)| {
            holders.contains(&ifindex) && std::net::Ipv6Addr::from(*address).to_ipv4_mapped().is_none() == v6
        })
    }

    fn covering(&self, address: Address) -> Option<&Vec<u32>> {
        // At most 129 looks, and only where no address matches as a whole.
        (0..=WHOLE)
            .rev()
            .find_map(|bits| self.local.get(&(masked(address, bits), bits)))
    }

    /// What the map `ADDRESSES` must hold for this netns. The map answers with the longest prefix alone, hence an
    /// IPVS address inside a local prefix carries that prefix' flags too.
    pub(super) fn wanted(&self, ipvs: &BTreeSet<Address>) -> BTreeMap<Prefix, AddressValue> {
        let mut wanted: BTreeMap<Prefix, AddressValue> = self
            .local
            .iter()
            .map(|(prefix, holders)| (*prefix, self.value(holders)))
            .collect();
        for address in ipvs {
            wanted
                .entry((*address, WHOLE))
                .or_insert_with(|| {
                    self.covering(*address)
                        .map_or_else(AddressValue::default, |holders| self.value(holders))
                })
                .flags |= address_flags::IPVS;
        }
        wanted
    }

    fn value(&self, holders: &[u32]) -> AddressValue {
        let dummy = holders
            .iter()
            .filter_map(|index| self.devices.get(index))
            .any(|device| device.kind.as_deref() == Some("dummy"));
        AddressValue {
            flags: address_flags::LOCAL | if dummy { address_flags::DUMMY } else { 0 },
            ifindex: holders.first().copied().unwrap_or(0),
        }
    }

    /// Addresses that are this netns' own in the eyes of others: no prefixes, no loopback.
    pub(super) fn scoped(&self) -> BTreeSet<Address> {
        self.local
            .keys()
            .filter(|(address, bits)| *bits == WHOLE && !is_loopback(*address))
            .map(|(address, _)| *address)
            .collect()
    }
}

/// An address in the form of the maps.
pub(super) fn whole(address: IpAddr) -> Address {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

fn whole_bits(address: IpAddr, bits: u8) -> Prefix {
    let bits = if address.is_ipv4() { 96 + bits } else { bits };
    (masked(whole(address), bits), bits)
}

fn masked(address: Address, bits: u8) -> Address {
    let mask = u128::MAX.checked_shl(u32::from(WHOLE - bits)).unwrap_or(0);
    (u128::from_be_bytes(address) & mask).to_be_bytes()
}

fn is_loopback(address: Address) -> bool {
    std::net::Ipv6Addr::from(address).to_canonical().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(kind: u16, destination: &str, bits: u8, ifindex: u32) -> Message {
        let destination: IpAddr = destination.parse().unwrap();
        let mut body = vec![0; RTMSG];
        body[0] = super::super::netlink::family(destination);
        body[1] = bits;
        body[4] = libc::RT_TABLE_LOCAL;
        body[7] = libc::RTN_LOCAL;
        put(
            &mut body,
            libc::RTA_DST,
            &super::super::netlink::octets(destination),
        );
        put(&mut body, libc::RTA_OIF, &ifindex.to_ne_bytes());
        Message { kind, body }
    }

    fn link(kind: u16, index: u32, name: &str, info: Option<&str>, up: bool) -> Message {
        let mut body = vec![0; IFINFOMSG];
        body[4..8].copy_from_slice(&index.to_ne_bytes());
        body[8..12].copy_from_slice(&u32::from(up).to_ne_bytes());
        put(&mut body, libc::IFLA_IFNAME, name.as_bytes());
        if let Some(info) = info {
            let mut nested = Vec::new();
            put(&mut nested, libc::IFLA_INFO_KIND, info.as_bytes());
            put(&mut body, libc::IFLA_LINKINFO, &nested);
        }
        Message { kind, body }
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn example() -> Addresses {
        let mut addresses = Addresses::default();
        for message in [
            link(libc::RTM_NEWLINK, 1, "lo", None, true),
            link(libc::RTM_NEWLINK, 2, "eth0", None, true),
            link(libc::RTM_NEWLINK, 7, "kube-ipvs0", Some("dummy"), false),
            route(libc::RTM_NEWROUTE, "127.0.0.0", 8, 1),
            route(libc::RTM_NEWROUTE, "127.0.0.1", 32, 1),
            route(libc::RTM_NEWROUTE, "192.0.2.1", 32, 2),
            route(libc::RTM_NEWROUTE, "10.96.0.10", 32, 7),
            route(libc::RTM_NEWROUTE, "10.100.0.0", 16, 1),
            route(libc::RTM_NEWROUTE, "2001:db8::1", 128, 2),
        ] {
            addresses.take(&message);
        }
        addresses
    }

    #[test]
    fn the_longest_prefix_holds_an_address() {
        let addresses = example();
        let device = |text| addresses.holder(ip(text)).map(|holder| holder.device);
        assert_eq!(device("192.0.2.1"), Some("eth0".into()));
        assert_eq!(device("192.0.2.2"), None);
        assert_eq!(device("10.100.3.4"), Some("lo".into()));
        assert_eq!(device("127.9.9.9"), Some("lo".into()));
        assert_eq!(device("2001:db8::1"), Some("eth0".into()));
        assert_eq!(
            addresses.holder(ip("10.96.0.10")),
            Some(AddressHolder {
                device: "kube-ipvs0".into(),
                kind: Some("dummy".into())
            })
        );
    }

    #[test]
    fn the_map_holds_flags_of_covering_prefixes() {
        let ipvs = [
            whole(ip("10.96.0.10")),
            whole(ip("10.100.0.9")),
            whole(ip("203.0.113.5")),
        ]
        .into();
        let wanted = example().wanted(&ipvs);
        let flags = |text| wanted[&(whole(ip(text)), WHOLE)].flags;
        assert_eq!(flags("192.0.2.1"), address_flags::LOCAL);
        assert_eq!(
            flags("10.96.0.10"),
            address_flags::LOCAL | address_flags::DUMMY | address_flags::IPVS
        );
        assert_eq!(flags("10.100.0.9"), address_flags::LOCAL | address_flags::IPVS);
        assert_eq!(flags("203.0.113.5"), address_flags::IPVS);
        assert_eq!(
            wanted[&(whole(ip("10.100.0.0")), 96 + 16)].flags,
            address_flags::LOCAL
        );
    }

    #[test]
    fn an_address_on_two_devices_stays_until_both_let_go() {
        let mut addresses = example();
        addresses.take(&route(libc::RTM_NEWROUTE, "192.0.2.1", 32, 7));
        let wanted = addresses.wanted(&BTreeSet::new());
        let value = wanted[&(whole(ip("192.0.2.1")), WHOLE)];
        assert_eq!(value.flags, address_flags::LOCAL | address_flags::DUMMY);
        assert_eq!(value.ifindex, 2);
        addresses.take(&route(libc::RTM_DELROUTE, "192.0.2.1", 32, 2));
        assert_eq!(addresses.holder(ip("192.0.2.1")).unwrap().device, "kube-ipvs0");
        addresses.take(&route(libc::RTM_DELROUTE, "192.0.2.1", 32, 7));
        assert_eq!(addresses.holder(ip("192.0.2.1")), None);
    }

    #[test]
    fn what_the_kernel_does_not_announce_asks_for_a_reload() {
        let mut addresses = example();
        let renamed = link(libc::RTM_NEWLINK, 2, "uplink", None, true);
        assert_eq!(addresses.take(&renamed), Change::Taken);
        assert_eq!(addresses.take(&renamed), Change::None);
        assert_eq!(
            addresses.take(&link(libc::RTM_NEWLINK, 2, "uplink", None, false)),
            Change::Reload
        );
        assert_eq!(
            addresses.take(&link(libc::RTM_DELLINK, 2, "uplink", None, false)),
            Change::Reload
        );
        let mut port = link(libc::RTM_DELLINK, 1, "lo", None, true);
        port.body[0] = libc::AF_BRIDGE as u8;
        assert_eq!(addresses.take(&port), Change::None);
        assert!(addresses.device(1).is_some());
    }

    #[test]
    fn routes_of_other_tables_and_types_are_none() {
        let mut addresses = example();
        let mut main = route(libc::RTM_NEWROUTE, "198.51.100.0", 24, 2);
        main.body[4] = 254;
        assert_eq!(addresses.take(&main), Change::None);
        let mut broadcast = route(libc::RTM_NEWROUTE, "192.0.2.255", 32, 2);
        broadcast.body[7] = libc::RTN_BROADCAST;
        assert_eq!(addresses.take(&broadcast), Change::None);
        assert_eq!(
            addresses.take(&Message {
                kind: 24,
                body: vec![2]
            }),
            Change::None
        );
    }

    #[test]
    fn loopback_and_prefixes_are_in_no_scope() {
        assert_eq!(
            example().scoped(),
            [
                whole(ip("10.96.0.10")),
                whole(ip("192.0.2.1")),
                whole(ip("2001:db8::1"))
            ]
            .into()
        );
    }
}
