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

/// Whether IPVS is there. To ask for its netlink family by name would load the module.
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
    /// Opens IPVS in the netns of the calling thread. Only where [`is_loaded`].
    ///
    /// # Errors
    /// The family is not there, or netlink failed.
    pub(super) fn open() -> io::Result<Self> {
        let mut netlink = Netlink::open(NETLINK_GENERIC)?;
        let mut body = vec![GET_FAMILY, 1, 0, 0];
        put(&mut body, FAMILY_NAME, b"IPVS\0");
        let answer = netlink.ask(CONTROLLER, &body)?;
        let family = attributes(&answer.body, GENL_HEADER)
            .find(|(attribute, _)| *attribute == FAMILY_ID)
            .and_then(|(_, value)| half(value, 0))
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
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
