//! The answer of the routing table to "where would a packet to this address go?"

use std::{io, net::IpAddr};

use super::netlink::{Message, Netlink, address, attributes, family, octets, put, word};

const RTMSG: usize = 12;
/// `RTA_VIA`: a gateway of another family (`include/uapi/linux/rtnetlink.h`).
const RTA_VIA: u16 = 18;
/// `RTAX_MTU` (`include/uapi/linux/rtnetlink.h`).
const RTAX_MTU: u16 = 2;

/// A route as the kernel chose it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Route {
    /// Index of the device by which the packet would leave.
    pub(super) ifindex: Option<u32>,
    /// Gateway.
    pub(super) gateway: Option<IpAddr>,
    /// Type in the words of `ip route`.
    pub(super) kind: &'static str,
    /// MTU of the route itself, where it has one.
    pub(super) mtu: Option<u32>,
}

/// Asks where the netns would send a packet from `from` to `to`; `from` counts only if the netns holds it, or if the
/// packet is a received one, which came by the device `iif`.
///
/// # Errors
/// The kernel did not answer, or refused for a reason that is no route.
pub(super) fn lookup(
    route: &mut Netlink,
    to: IpAddr,
    from: Option<IpAddr>,
    iif: Option<u32>,
) -> io::Result<Route> {
    let mut body = vec![0; RTMSG];
    body[0] = family(to);
    let bits = |address: IpAddr| if address.is_ipv4() { 32 } else { 128 };
    body[1] = bits(to);
    put(&mut body, libc::RTA_DST, &octets(to));
    if let Some(from) = from.filter(|from| from.is_ipv4() == to.is_ipv4()) {
        body[2] = bits(from);
        put(&mut body, libc::RTA_SRC, &octets(from));
    }
    if let Some(iif) = iif {
        put(&mut body, libc::RTA_IIF, &iif.to_ne_bytes());
    }
    match route.ask(libc::RTM_GETROUTE, &body) {
        Ok(message) => Ok(parse(&message)),
        // `fib_props` (`net/ipv4/fib_semantics.c`, 5.10 - 7.3) gives each type of refusing route its errno.
        Err(error) => match error.raw_os_error() {
            Some(libc::ENETUNREACH | libc::EHOSTUNREACH) => Ok(refused("unreachable")),
            Some(libc::EACCES) => Ok(refused("prohibit")),
            // Also the answer to a source that the netns does not hold.
            Some(libc::EINVAL) if from.is_some() && iif.is_none() => lookup(route, to, None, None),
            Some(libc::EINVAL) => Ok(refused("blackhole")),
            _ => Err(error),
        },
    }
}

const fn refused(kind: &'static str) -> Route {
    Route {
        ifindex: None,
        gateway: None,
        kind,
        mtu: None,
    }
}

fn parse(message: &Message) -> Route {
    let body = &message.body;
    let family = body.first().copied().unwrap_or_default();
    let kind = match body.get(7).copied().unwrap_or_default() {
        libc::RTN_UNICAST => "unicast",
        libc::RTN_LOCAL => "local",
        libc::RTN_BROADCAST => "broadcast",
        libc::RTN_ANYCAST => "anycast",
        libc::RTN_MULTICAST => "multicast",
        libc::RTN_BLACKHOLE => return refused("blackhole"),
        libc::RTN_UNREACHABLE => return refused("unreachable"),
        libc::RTN_PROHIBIT => return refused("prohibit"),
        libc::RTN_THROW => return refused("throw"),
        libc::RTN_NAT => "nat",
        _ => "unspecified",
    };
    let mut route = Route {
        ifindex: None,
        gateway: None,
        kind,
        mtu: None,
    };
    for (attribute, value) in attributes(body, RTMSG) {
        match attribute {
            libc::RTA_OIF => route.ifindex = word(value, 0),
            libc::RTA_METRICS => {
                route.mtu = attributes(value, 0)
                    .find(|(each, _)| *each == RTAX_MTU)
                    .and_then(|(_, mtu)| word(mtu, 0));
            }
            libc::RTA_GATEWAY => route.gateway = address(family, value),
            RTA_VIA => {
                let family = super::netlink::half(value, 0).unwrap_or_default() as u8;
                route.gateway = address(family, value.get(2..).unwrap_or_default());
            }
            _ => {}
        }
    }
    route
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_through_a_gateway_is_read() {
        let mut body = vec![0; RTMSG];
        body[0] = libc::AF_INET as u8;
        body[7] = libc::RTN_UNICAST;
        put(&mut body, libc::RTA_OIF, &3u32.to_ne_bytes());
        put(&mut body, libc::RTA_GATEWAY, &[10, 0, 0, 1]);
        let mut metrics = Vec::new();
        put(&mut metrics, RTAX_MTU, &1400_u32.to_ne_bytes());
        put(&mut body, libc::RTA_METRICS, &metrics);
        let route = parse(&Message { kind: 24, body });
        assert_eq!(
            route,
            Route {
                ifindex: Some(3),
                gateway: Some("10.0.0.1".parse().unwrap()),
                kind: "unicast",
                mtu: Some(1400),
            }
        );
    }

    #[test]
    fn an_unreachable_route_names_no_device() {
        let mut body = vec![0; RTMSG];
        body[0] = libc::AF_INET6 as u8;
        body[7] = libc::RTN_UNREACHABLE;
        put(&mut body, libc::RTA_OIF, &1u32.to_ne_bytes());
        assert_eq!(parse(&Message { kind: 24, body }), refused("unreachable"));
    }
}
