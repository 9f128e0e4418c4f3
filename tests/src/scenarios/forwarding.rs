//! Packets that a router does not send on.

use std::{net::SocketAddr, sync::Arc};

use droptrace::diagnose::Direction;

use super::Wire;
use crate::{
    Counters, Expected, IpFamily,
    IpFamily::{V4, V6},
    Netns, Outcome, Result, Scenario, Test, Tun,
    counters::{grown, grown_by},
    packet::{udp, udp_with_hops},
    sockets::wait_until,
    test::Kernel,
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("ttl-exceeded-v4", |t| ttl(t, V4)),
    Scenario::new("ttl-exceeded-v6", |t| ttl(t, V6)),
    Scenario::new("packet-too-big-v4", |t| too_big(t, V4, false)),
    Scenario::new("packet-too-big-route-v4", |t| too_big(t, V4, true)),
    Scenario::new("packet-too-big-v6", |t| too_big(t, V6, false)),
    Scenario::new("not-forwarding-v4", |t| not_forwarding(t, V4)),
    Scenario::new("not-forwarding-v6", |t| not_forwarding(t, V6)),
    Scenario::new("blackhole-route-v4", |t| refusing_routes(t, V4)),
    Scenario::new("blackhole-route-v6", |t| refusing_routes(t, V6)),
];

const SENT: u64 = 3;
/// What fits by the device behind the router; IPv6 needs 1280.
const MTU: u32 = 1300;

/// A netns between the wire (subnet 0) and the device `beyond` (subnet 1).
struct Router {
    wire: Wire,
    _beyond: Tun,
    /// A host behind it.
    host: SocketAddr,
}

impl Router {
    fn new(t: &Test, family: IpFamily, forwards: bool) -> Result<Self> {
        let (wire, beyond) = Wire::with_beyond(t, family)?;
        wire.netns.forward(forwards)?;
        Ok(Self {
            wire,
            _beyond: beyond,
            host: t.at(family, 1, 9, 9000),
        })
    }

    fn netns(&self) -> &Arc<Netns> {
        &self.wire.netns
    }

    /// Sends these packets to the router, one for each source port, and waits until the counter says so.
    fn send(&self, counter: &str, packet: impl Fn(SocketAddr) -> Result<Vec<u8>>) -> Result<()> {
        let before = Counters::read(self.netns())?;
        for number in 0..SENT as u16 {
            self.wire.tun.send(&packet(self.wire.peer(3000 + number))?)?;
        }
        grown_by(self.netns(), &before, counter, SENT)?;
        Ok(())
    }
}

/// Datagrams with one hop left.
fn ttl(t: &Test, family: IpFamily) -> Result<Outcome> {
    let router = Router::new(t, family, true)?;
    t.known();
    let counter = match family {
        V4 => "IpInHdrErrors",
        V6 => "Ip6InHdrErrors",
    };
    router.send(counter, |from| udp_with_hops(from, router.host, b"hello", 1))?;
    t.expect(&[Expected::rejected(router.netns(), "ttl-exceeded", SENT)])?;
    if let Some(seen) = t.drop(router.netns(), "ttl-exceeded")? {
        seen.goes(router.wire.peer(0), router.host)?
            .direction(Direction::Forward)?
            .counter(counter)?
            .evidence("ttl", 1)?
            .evidence("interface", "wire")?
            .evidence("next_interface", "beyond")?
            .has_evidence("meaning")?;
    }
    Ok(Outcome::Passed(format!("{counter} and droptrace: {SENT}")))
}

/// Datagrams that may not be fragmented and do not fit, by the MTU of the device or of the route.
fn too_big(t: &Test, family: IpFamily, of_route: bool) -> Result<Outcome> {
    let router = Router::new(t, family, true)?;
    let to = if of_route {
        router
            .netns()
            .ip(&[&format!("route add {} dev beyond mtu {MTU}", t.net(family, 5, 0))])?;
        t.at(family, 5, 9, 9000)
    } else {
        router.netns().ip(&[&format!("link set beyond mtu {MTU}")])?;
        router.host
    };
    t.known();
    let counter = match family {
        V4 => "IpFragFails",
        V6 => "Ip6FragFails",
    };
    router.send(counter, |from| udp(from, to, &[0; MTU as usize]))?;
    t.expect(&[Expected::rejected(router.netns(), "packet-too-big", SENT)])?;
    if let Some(seen) = t.drop(router.netns(), "packet-too-big")? {
        let from = match (t.kernel() < Kernel(5, 17), of_route) {
            (true, _) => "kernel",
            (false, true) => "route",
            (false, false) => "device",
        };
        seen.goes(router.wire.peer(0), to)?
            .direction(Direction::Forward)?
            .counter(counter)?
            .evidence("mtu", MTU)?
            .evidence("mtu_from", from)?
            .evidence("interface", "beyond")?
            .evidence("dont_fragment", true)?
            .evidence("segments", 1)?;
    }
    Ok(Outcome::Passed(format!("{counter} and droptrace: {SENT}")))
}

/// Datagrams to a host behind a router that is switched off.
fn not_forwarding(t: &Test, family: IpFamily) -> Result<Outcome> {
    let router = Router::new(t, family, false)?;
    t.known();
    let counter = match family {
        V4 => "IpInAddrErrors",
        V6 => "Ip6InAddrErrors",
    };
    router.send(counter, |from| udp(from, router.host, b"hello"))?;
    // `ip6_forward` has several causes, and 5.10 no reason to tell them apart.
    let told = family == V4 || t.kernel() >= Kernel(5, 17);
    let cause = if told { "not-forwarding" } else { "unknown" };
    t.expect(&[Expected::dropped(router.netns(), cause, SENT)])?;
    if !told {
        return Ok(Outcome::Passed(format!("{counter} and {cause}: {SENT}")));
    }
    if let Some(seen) = t.drop(router.netns(), cause)? {
        let setting = match family {
            V4 => "sysctl -w net.ipv4.conf.wire.forwarding=1",
            V6 => "sysctl -w net.ipv6.conf.all.forwarding=1",
        };
        seen.goes(router.wire.peer(0), router.host)?
            .counter(counter)?
            .evidence("destination", router.host.ip().to_string())?
            .evidence("interface", "wire")?
            .evidence("forwarding", false)?
            .remedy_says(setting)?;
    }
    Ok(Outcome::Passed(format!("{counter} and {cause}: {SENT}")))
}

/// Datagrams to networks whose routes refuse.
fn refusing_routes(t: &Test, family: IpFamily) -> Result<Outcome> {
    let router = Router::new(t, family, true)?;
    let kinds = [("blackhole", 71), ("prohibit", 72), ("unreachable", 73)];
    for (kind, subnet) in kinds {
        router
            .netns()
            .ip(&[&format!("route add {kind} {}", t.net(family, subnet, 0))])?;
    }
    t.known();
    // Of the three, no counter but that of all packets grows for each.
    let counter = match family {
        V4 => "IpExtInOctets",
        V6 => "Ip6InReceives",
    };
    let before = Counters::read(router.netns())?;
    let mut octets = 0;
    for (_, subnet) in kinds {
        for number in 0..SENT as u16 {
            let to = t.at(family, subnet, 9, 9000);
            let packet = udp(router.wire.peer(3000 + number), to, b"hello")?;
            octets += packet.len() as u64;
            router.wire.tun.send(&packet)?;
        }
    }
    let all = match family {
        V4 => octets,
        V6 => 3 * SENT,
    };
    wait_until(counter, || Ok(grown(router.netns(), &before, counter)? >= all))?;
    // IPv4 frees blackhole and prohibit at one place with the same bits.
    let silent = match family {
        V4 => 2 * SENT,
        V6 => SENT,
    };
    t.expect(&[
        Expected::dropped(router.netns(), "blackhole-route", silent),
        Expected::rejected(router.netns(), "blackhole-route", 3 * SENT - silent),
    ])?;
    for (kind, subnet) in kinds {
        let to = t.at(family, subnet, 9, 9000);
        let seen = t.drop_where(router.netns(), "blackhole-route", |drop| {
            drop.dst == Some(to.ip())
        })?;
        if let Some(seen) = seen {
            seen.goes(router.wire.peer(0), to)?
                .evidence("destination", to.ip().to_string())?
                .evidence("route_type", kind)?
                .evidence("route_now", kind)?
                .evidence("interface", "wire")?
                .remedy_says(&format!("type {kind}"))?;
        }
    }
    Ok(Outcome::Passed(format!(
        "sent {}, droptrace: {}",
        3 * SENT,
        3 * SENT
    )))
}
