//! IPVS services and their real servers, from its generic netlink family.

use std::{
    collections::BTreeSet,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
};

use droptrace_common::{Address, ServiceKey};
use netlink_packet_core::NLA_F_NESTED;
use netlink_sys::protocols::NETLINK_GENERIC;

use super::{
    addresses::whole,
    netlink::{Message, Netlink, attributes, half, octets, port, put, text, word},
};
use crate::diagnose::{IpvsDestination, IpvsService};

/// `GENL_ID_CTRL`, `CTRL_CMD_GETFAMILY`, `CTRL_ATTR_FAMILY_ID`, `CTRL_ATTR_FAMILY_NAME`
/// (`include/uapi/linux/genetlink.h`).
const CONTROLLER: u16 = 16;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
const GENL_HEADER: usize = 4;

// `include/uapi/linux/ip_vs.h`, unchanged 5.10 - 7.3.
const VERSION: u8 = 1;
const GET_SERVICE: u8 = 4;
const GET_DEST: u8 = 8;
const ATTR_SERVICE: u16 = 1;
const ATTR_DEST: u16 = 2;
const SVC_AF: u16 = 1;
const SVC_PROTOCOL: u16 = 2;
const SVC_ADDR: u16 = 3;
const SVC_PORT: u16 = 4;
const SVC_FWMARK: u16 = 5;
const SVC_SCHED_NAME: u16 = 6;
const DEST_ADDR: u16 = 1;
const DEST_PORT: u16 = 2;
const DEST_WEIGHT: u16 = 4;
const DEST_ADDR_FAMILY: u16 = 11;

/// Whether IPVS is there.
pub(super) fn is_loaded() -> bool {
    Path::new("/sys/module/ip_vs").exists()
}

/// A service by address; services by firewall mark have none and are not among these.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Service {
    pub(super) address: IpAddr,
    pub(super) port: u16,
    pub(super) protocol: u8,
    pub(super) scheduler: String,
}

impl Service {
    /// The key in the map `SERVICES`.
    pub(super) fn key(&self, netns: u32) -> ServiceKey {
        ServiceKey {
            netns,
            port: self.port,
            protocol: self.protocol,
            pad: 0,
            address: whole(self.address),
        }
    }
}

/// IPVS of the netns in which it was opened.
pub(super) struct Ipvs {
    netlink: Netlink,
    family: u16,
}

impl Ipvs {
    /// Opens IPVS in the netns of the calling thread, and finds the number of its family unless it is known.
    ///
    /// # Errors
    /// The family is not there, or netlink failed.
    pub(super) fn open(family: &mut Option<u16>) -> io::Result<Self> {
        let mut netlink = Netlink::open(NETLINK_GENERIC)?;
        let family = match *family {
            Some(family) => family,
            None => *family.insert(find_family(&mut netlink)?),
        };
        Ok(Self { netlink, family })
    }

    /// All services.
    ///
    /// # Errors
    /// CAP_NET_ADMIN is missing, or the module went.
    pub(super) fn services(&mut self) -> io::Result<BTreeSet<Service>> {
        let messages = self.netlink.dump(self.family, &[GET_SERVICE, VERSION, 0, 0])?;
        Ok(messages.iter().filter_map(service).collect())
    }

    /// The services with an address, with their real servers.
    ///
    /// # Errors
    /// See [`Self::services`].
    pub(super) fn services_at(&mut self, address: IpAddr) -> io::Result<Vec<IpvsService>> {
        self.services()?
            .into_iter()
            .filter(|service| service.address == address)
            .map(|service| {
                let destinations = self.destinations(&service)?;
                Ok(IpvsService {
                    address: service.address,
                    port: service.port,
                    protocol: service.protocol,
                    scheduler: service.scheduler,
                    destinations,
                })
            })
            .collect()
    }

    fn destinations(&mut self, service: &Service) -> io::Result<Vec<IpvsDestination>> {
        let v4 = service.address.is_ipv4();
        let family = if v4 { libc::AF_INET } else { libc::AF_INET6 } as u16;
        let mut address = octets(service.address);
        address.resize(16, 0);
        let mut nested = Vec::new();
        put(&mut nested, SVC_AF, &family.to_ne_bytes());
        put(
            &mut nested,
            SVC_PROTOCOL,
            &u16::from(service.protocol).to_ne_bytes(),
        );
        put(&mut nested, SVC_ADDR, &address);
        put(&mut nested, SVC_PORT, &service.port.to_be_bytes());
        let mut body = vec![GET_DEST, VERSION, 0, 0];
        put(&mut body, ATTR_SERVICE | NLA_F_NESTED, &nested);
        match self.netlink.dump(self.family, &body) {
            Ok(messages) => Ok(messages
                .iter()
                .filter_map(|message| destination(message, v4))
                .collect()),
            // The service went meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }
}

/// The number of the family IPVS, from the list of all: to ask for it by name would load a module that has just been
/// unloaded (`ctrl_getfamily`, net/netlink/genetlink.c, 5.10 - 7.3).
fn find_family(netlink: &mut Netlink) -> io::Result<u16> {
    netlink
        .dump(CONTROLLER, &[GET_FAMILY, 1, 0, 0])?
        .iter()
        .find_map(|message| family_number(message, b"IPVS\0"))
        .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
}

/// The number of the family that a message of the controller describes, if it has this name.
fn family_number(message: &Message, name: &[u8]) -> Option<u16> {
    let value = |wanted| {
        attributes(&message.body, GENL_HEADER)
            .find(|(attribute, _)| *attribute == wanted)
            .map(|(_, value)| value)
    };
    (value(FAMILY_NAME)? == name)
        .then(|| half(value(FAMILY_ID)?, 0))
        .flatten()
}

/// The address of an `union nf_inet_addr`: an IPv4 address takes the first four bytes.
fn address(v4: bool, value: &[u8]) -> Option<IpAddr> {
    if v4 {
        let octets: [u8; 4] = value.get(..4)?.try_into().ok()?;
        Some(Ipv4Addr::from(octets).into())
    } else {
        let octets: [u8; 16] = value.get(..16)?.try_into().ok()?;
        Some(Ipv6Addr::from(octets).into())
    }
}

fn nested(message: &Message, attribute: u16) -> Option<&[u8]> {
    attributes(&message.body, GENL_HEADER)
        .find(|(each, _)| *each == attribute)
        .map(|(_, value)| value)
}

fn service(message: &Message) -> Option<Service> {
    let service = nested(message, ATTR_SERVICE)?;
    let find = |wanted| {
        attributes(service, 0)
            .find(|(each, _)| *each == wanted)
            .map(|(_, value)| value)
    };
    if find(SVC_FWMARK).is_some() {
        return None;
    }
    let v4 = i32::from(half(find(SVC_AF)?, 0)?) == libc::AF_INET;
    Some(Service {
        address: address(v4, find(SVC_ADDR)?)?,
        port: port(find(SVC_PORT)?, 0)?,
        protocol: half(find(SVC_PROTOCOL)?, 0)? as u8,
        scheduler: find(SVC_SCHED_NAME).map(text).unwrap_or_default(),
    })
}

fn destination(message: &Message, service_v4: bool) -> Option<IpvsDestination> {
    let destination = nested(message, ATTR_DEST)?;
    let find = |wanted| {
        attributes(destination, 0)
            .find(|(each, _)| *each == wanted)
            .map(|(_, value)| value)
    };
    // A tunnelled server may be of the other family (3.18 and later tell it).
    let v4 = find(DEST_ADDR_FAMILY)
        .and_then(|value| half(value, 0))
        .map_or(service_v4, |family| i32::from(family) == libc::AF_INET);
    Some(IpvsDestination {
        address: address(v4, find(DEST_ADDR)?)?,
        port: port(find(DEST_PORT)?, 0)?,
        weight: word(find(DEST_WEIGHT)?, 0)? as i32,
    })
}

/// The addresses of services.
pub(super) fn addresses(services: &BTreeSet<Service>) -> BTreeSet<Address> {
    services.iter().map(|service| whole(service.address)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    // What a 7.3 kernel said of `ipvsadm -A -t 10.96.0.10:80 -s rr`, `-A -u [2001:db8::10]:53 -s rr`, `-A -f 7 -s rr`
    // and `-a -t 10.96.0.10:80 -r 10.0.0.2:8080 -m -w 3`, behind the netlink header.
    const SERVICE_V4: &str = "\
        010100002c01010006000100020000000600020006000000140003000a60000a00000000000000000000000006000400\
        0050000007000600727200000c00070002000000ffffffff080008000000000008000900ffffffff5c000a0008000100\
        00000000080002000000000008000300000000000c00040000000000000000000c000500000000000000000008000600\
        0000000008000700000000000800080000000000080009000000000008000a00000000007c000c000c00010000000000\
        000000000c00020000000000000000000c00030000000000000000000c00040000000000000000000c00050000000000\
        000000000c00060000000000000000000c00070000000000000000000c00080000000000000000000c00090000000000\
        000000000c000a000000000000000000";
    const SERVICE_V6: &str = "\
        010100002c010100060001000a00000006000200110000001400030020010db800000000000000000000001006000400\
        0035000007000600727200000c00070002000000ffffffff080008000000000008000900800000005c000a0008000100\
        00000000080002000000000008000300000000000c00040000000000000000000c000500000000000000000008000600\
        0000000008000700000000000800080000000000080009000000000008000a00000000007c000c000c00010000000000\
        000000000c00020000000000000000000c00030000000000000000000c00040000000000000000000c00050000000000\
        000000000c00060000000000000000000c00070000000000000000000c00080000000000000000000c00090000000000\
        000000000c000a000000000000000000";
    const SERVICE_MARK: &str = "\
        01010000100101000600010002000000080005000700000007000600727200000c00070002000000ffffffff08000800\
        0000000008000900ffffffff5c000a000800010000000000080002000000000008000300000000000c00040000000000\
        000000000c00050000000000000000000800060000000000080007000000000008000800000000000800090000000000\
        08000a00000000007c000c000c00010000000000000000000c00020000000000000000000c0003000000000000000000\
        0c00040000000000000000000c00050000000000000000000c00060000000000000000000c0007000000000000000000\
        0c00080000000000000000000c00090000000000000000000c000a000000000000000000";
    const DESTINATION: &str = "\
        0501000050010200140001000a000002000000000000000000000000060002001f900000080003000000000008000400\
        0300000005000d000000000006000e000000000006000f00000000000800050000000000080006000000000008000700\
        000000000800080000000000080009000000000006000b00020000005c000a0008000100000000000800020000000000\
        08000300000000000c00040000000000000000000c000500000000000000000008000600000000000800070000000000\
        0800080000000000080009000000000008000a00000000007c000c000c00010000000000000000000c00020000000000\
        000000000c00030000000000000000000c00040000000000000000000c00050000000000000000000c00060000000000\
        000000000c00070000000000000000000c00080000000000000000000c00090000000000000000000c000a0000000000\
        00000000";

    #[test]
    fn a_family_is_found_by_its_whole_name() {
        let described = |name: &[u8]| {
            let mut body = vec![1, 2, 0, 0];
            put(&mut body, FAMILY_NAME, name);
            put(&mut body, FAMILY_ID, &37_u16.to_ne_bytes());
            Message {
                kind: CONTROLLER,
                body,
            }
        };
        assert_eq!(family_number(&described(b"IPVS\0"), b"IPVS\0"), Some(37));
        assert_eq!(family_number(&described(b"IPVS2\0"), b"IPVS\0"), None);
        assert_eq!(family_number(&described(b"nlctrl\0"), b"IPVS\0"), None);
    }

    fn message(hex: &str) -> Message {
        let body = (0..hex.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
            .collect();
        Message { kind: 34, body }
    }

    #[test]
    fn recorded_services_are_read() {
        let v4 = service(&message(SERVICE_V4)).unwrap();
        assert_eq!(
            v4,
            Service {
                address: "10.96.0.10".parse().unwrap(),
                port: 80,
                protocol: 6,
                scheduler: "rr".into()
            }
        );
        let v6 = service(&message(SERVICE_V6)).unwrap();
        assert_eq!(
            (v6.address, v6.port, v6.protocol),
            ("2001:db8::10".parse().unwrap(), 53, 17)
        );
        assert_eq!(service(&message(SERVICE_MARK)), None);
        let key = v4.key(9);
        assert_eq!((key.netns, key.port, key.protocol), (9, 80, 6));
        assert_eq!(key.address[12..], [10, 96, 0, 10]);
    }

    #[test]
    fn a_recorded_server_is_read() {
        assert_eq!(
            destination(&message(DESTINATION), true),
            Some(IpvsDestination {
                address: "10.0.0.2".parse().unwrap(),
                port: 8080,
                weight: 3
            })
        );
    }

    #[test]
    fn cut_messages_are_none() {
        let whole = message(SERVICE_V4);
        for length in 0..80 {
            let mut cut = whole.clone();
            cut.body.truncate(length);
            assert_eq!(service(&cut), None);
            assert_eq!(destination(&cut, true), None);
        }
    }
}
