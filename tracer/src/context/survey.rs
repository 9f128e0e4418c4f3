//! One look at every netns, for advice: settings, devices, listeners, IPVS,
//! and where the replies from each address leave.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    thread,
};

use netlink_sys::protocols::{NETLINK_ROUTE, NETLINK_SOCK_DIAG};
use nix::{ifaddrs::getifaddrs, net::if_::InterfaceFlags};
use serde::Serialize;

use super::{addresses::Addresses, counters, ipvs, netlink::Netlink, netns, routes, sockets, sysctls};
use crate::diagnose::{ConntrackUsage, Moved};

/// Settings of a netns that are read.
const SETTINGS: [&str; 5] = [
    "net.core.somaxconn",
    "net.ipv4.tcp_abort_on_overflow",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_max_syn_backlog",
    "net.ipv4.vs.expire_nodest_conn",
];
/// Settings of each device that are read; `all` counts as one.
const DEVICE_SETTINGS: [&str; 2] = ["rp_filter", "accept_local"];
/// Addresses that stand for any host far away: they belong to documentation (RFC 5737, RFC 3849).
const FAR_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const FAR_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1));

/// What one netns has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Survey {
    /// Inode number.
    pub netns: u32,
    /// Name, where it has one.
    pub netns_name: Option<String>,
    /// A path by which it can be entered; `None` for the netns of this process.
    pub path: Option<PathBuf>,
    /// Sysctls by name; absent ones are left out.
    pub settings: BTreeMap<String, String>,
    /// Devices by name.
    pub devices: BTreeMap<String, Device>,
    /// Listening TCP sockets.
    pub listeners: Vec<Listening>,
    /// The kernel's counters of lost packets, since the netns was made.
    #[serde(skip)]
    pub counters: Moved,
    /// Fill of the conntrack table, where there is one.
    pub conntrack: Option<ConntrackUsage>,
    /// Number of IPVS services.
    pub ipvs_services: usize,
    /// Each address that others can reach.
    pub addresses: Vec<Held>,
    /// What could not be found out, and why.
    pub problems: Vec<String>,
}

/// A device, and its settings of source validation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Device {
    /// Kind, such as `dummy`; `None` for a physical one.
    pub kind: Option<String>,
    /// The larger of `rp_filter` of `all` and of the device, as the kernel takes it (`IN_DEV_RPFILTER`).
    pub rp_filter: u8,
    /// `accept_local` of `all` or of the device (`IN_DEV_ACCEPT_LOCAL`).
    pub accept_local: bool,
}

/// A listening TCP socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Listening {
    /// Where it listens.
    pub address: SocketAddr,
    /// Connections that wait for accept().
    pub queue_length: u32,
    /// `sk_max_ack_backlog`.
    pub queue_limit: u32,
}

/// An address, the device that holds it, and where replies from it leave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Held {
    /// The address.
    pub address: IpAddr,
    /// The device that holds it.
    pub device: String,
    /// Device by which a packet from it to a host far away leaves; `None`: no route.
    pub far: Option<String>,
    /// Device by which a packet from it to a neighbour in its own prefix leaves; `None`: no route, or no neighbours.
    pub near: Option<String>,
}

/// Looks at every netns that can be found and entered. What cannot is named in the problems of the first one.
///
/// # Errors
/// Not even the netns of this process could be looked at.
pub fn survey() -> io::Result<Vec<Survey>> {
    // A thread of its own: it changes its netns and never comes back.
    thread::Builder::new()
        .name("droptrace-survey".to_owned())
        .spawn(look_everywhere)?
        .join()
        .unwrap_or_else(|_| Err(io::Error::other("the survey panicked")))
}

fn look_everywhere() -> io::Result<Vec<Survey>> {
    let (_, home) = netns::open(Path::new("/proc/thread-self/ns/net"))?;
    let found = netns::Discovery::default().scan(true, true);
    let mut first = Survey {
        netns: home,
        netns_name: found.get(&home).and_then(|found| found.name.clone()),
        ..Survey::default()
    };
    look(&mut first);
    let mut surveys = vec![first];
    for (inode, found) in found {
        if inode == home {
            continue;
        }
        let entered = netns::open(&found.path).and_then(|(fd, _)| netns::enter(fd));
        if let Err(error) = entered {
            let name = found.name.unwrap_or_else(|| inode.to_string());
            surveys[0]
                .problems
                .push(format!("netns {name} was not looked at: {error}; run as root"));
            continue;
        }
        let mut survey = Survey {
            netns: inode,
            netns_name: found.name,
            path: Some(found.path),
            ..Survey::default()
        };
        look(&mut survey);
        surveys.push(survey);
    }
    Ok(surveys)
}

/// Fills the survey of the netns that the calling thread is in.
fn look(survey: &mut Survey) {
    for name in SETTINGS {
        if let Some(value) = sysctls::path(name, None).and_then(|path| sysctls::read(&path).ok()) {
            survey.settings.insert(name.to_owned(), value);
        }
    }
    survey.counters = counters::read();
    survey.conntrack = sysctls::conntrack().ok();
    let mut problem = |what: &str, error: io::Error| survey.problems.push(format!("{what}: {error}"));
    match Netlink::open(NETLINK_SOCK_DIAG).and_then(|mut diag| sockets::listeners(&mut diag, 0)) {
        Ok(listeners) => {
            survey.listeners = listeners
                .into_iter()
                .map(|each| Listening {
                    address: each.address,
                    queue_length: each.queue_length,
                    queue_limit: each.queue_limit,
                })
                .collect();
        }
        Err(error) => problem("listeners are not known", error),
    }
    if ipvs::is_loaded() {
        match ipvs::Ipvs::open(&mut None).and_then(|mut ipvs| ipvs.services()) {
            Ok(services) => survey.ipvs_services = services.len(),
            Err(error) => problem("IPVS services are not known", error),
        }
    }
    match Netlink::open(NETLINK_ROUTE).and_then(|mut route| devices_and_addresses(&mut route)) {
        Ok((devices, addresses)) => {
            survey.devices = devices;
            survey.addresses = addresses;
        }
        Err(error) => problem("devices and addresses are not known", error),
    }
}

fn devices_and_addresses(route: &mut Netlink) -> io::Result<(BTreeMap<String, Device>, Vec<Held>)> {
    let known = Addresses::load(route)?;
    let name_of = |ifindex: Option<u32>| Some(known.device(ifindex?)?.name.clone());
    let all = DEVICE_SETTINGS.map(|setting| device_setting(setting, "all"));
    let devices = known
        .devices()
        .map(|device| {
            let own = DEVICE_SETTINGS.map(|setting| device_setting(setting, &device.name));
            let found = Device {
                kind: device.kind.clone(),
                rp_filter: all[0].max(own[0]),
                accept_local: all[1].max(own[1]) > 0,
            };
            (device.name.clone(), found)
        })
        .collect();
    let mut held = Vec::new();
    let mut seen = BTreeSet::new();
    for entry in getifaddrs()? {
        // An IPv4 label such as eth0:1 names the device before the colon.
        let device = entry
            .interface_name
            .split(':')
            .next()
            .unwrap_or_default()
            .to_owned();
        let (Some(address), mask) = (entry.address.and_then(ip), entry.netmask.and_then(ip)) else {
            continue;
        };
        let reachable = !entry.flags.contains(InterfaceFlags::IFF_LOOPBACK)
            && entry.flags.contains(InterfaceFlags::IFF_UP)
            && !is_link_local(address);
        if !reachable || !seen.insert((address, device.clone())) {
            continue;
        }
        let far = if address.is_ipv4() { FAR_V4 } else { FAR_V6 };
        let near = mask.and_then(|mask| neighbour(address, mask));
        let mut leaves = |to: IpAddr| {
            let found = routes::lookup(route, to, Some(address), None).ok()?;
            (found.kind == "unicast").then(|| name_of(found.ifindex))?
        };
        held.push(Held {
            address,
            far: leaves(far),
            near: near.and_then(&mut leaves),
            device,
        });
    }
    Ok((devices, held))
}

/// A setting of IPv4 on a device, 0 where it has none.
fn device_setting(setting: &str, device: &str) -> u8 {
    sysctls::path(&format!("net.ipv4.conf.{{device}}.{setting}"), Some(device))
        .and_then(|path| sysctls::read(&path).ok()?.parse().ok())
        .unwrap_or_default()
}

fn ip(address: nix::sys::socket::SockaddrStorage) -> Option<IpAddr> {
    match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
        (Some(v4), _) => Some(v4.ip().into()),
        (None, Some(v6)) => Some(v6.ip().into()),
        (None, None) => None,
    }
}

const fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(_) => false,
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

/// Another host of the address' prefix; `None` where the prefix has no other host.
fn neighbour(address: IpAddr, mask: IpAddr) -> Option<IpAddr> {
    match (address, mask) {
        (IpAddr::V4(address), IpAddr::V4(mask)) => {
            let mask = u32::from(mask);
            // A prefix of 31 bits has two hosts and no broadcast address (RFC 3021).
            if mask == u32::MAX {
                return None;
            }
            let own = u32::from(address);
            let (network, last) = (own & mask, own | !mask);
            let candidates = if !mask == 1 {
                [network, last]
            } else {
                [network + 1, network + 2]
            };
            candidates
                .into_iter()
                .find(|candidate| *candidate != own)
                .map(|other| Ipv4Addr::from(other).into())
        }
        (IpAddr::V6(address), IpAddr::V6(mask)) => {
            let mask = u128::from(mask);
            if mask == u128::MAX {
                return None;
            }
            let own = u128::from(address);
            let network = own & mask;
            [network + 1, network]
                .into_iter()
                .find(|candidate| *candidate != own)
                .map(|other| Ipv6Addr::from(other).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_neighbour_is_another_host_of_the_prefix() {
        for (address, mask, other) in [
            ("10.0.0.1", "255.255.255.0", Some("10.0.0.2")),
            ("10.0.0.7", "255.255.255.0", Some("10.0.0.1")),
            ("10.0.0.6", "255.255.255.254", Some("10.0.0.7")),
            ("10.0.0.6", "255.255.255.255", None),
            ("2001:db8::1", "ffff:ffff:ffff:ffff::", Some("2001:db8::")),
            ("2001:db8::2", "ffff:ffff:ffff:ffff::", Some("2001:db8::1")),
            ("2001:db8::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None),
        ] {
            assert_eq!(neighbour(v4(address), v4(mask)), other.map(v4), "{address}");
        }
    }

    #[test]
    fn this_netns_is_surveyed_first() {
        let surveys = survey().unwrap();
        assert_eq!(surveys[0].path, None);
        assert!(surveys[0].settings.contains_key("net.core.somaxconn"));
        assert!(surveys[0].devices.contains_key("lo"));
    }
}
