//! Neighbours that do not answer, and destinations without a route.

use anyhow::ensure;

use super::Wire;
use crate::{
    Counters, Expected, IpFamily,
    IpFamily::{V4, V6},
    Outcome, Result, Scenario, Test, Tun,
    counters::grown,
    packet::udp,
    sockets::{self, wait_until},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("neigh-failed-v4", |t| neighbour(t, V4)).family(),
    Scenario::new("neigh-failed-v6", |t| neighbour(t, V6)),
    Scenario::new("no-route-v4", |t| no_route(t, V4, true)),
    Scenario::new("no-route-v6", |t| no_route(t, V6, true)),
    Scenario::new("no-route-not-forwarding-v6", |t| no_route(t, V6, false)),
];

/// Datagrams to a host that is not on the wire.
fn neighbour(t: &Test, family: IpFamily) -> Result<Outcome> {
    const SENT: u64 = 3;
    let netns = t.netns("host")?;
    // Ethernet, so that there is a neighbour to ask; nobody answers.
    let tap = Tun::tap(&netns, "wire", &[t.net(family, 0, 1)])?;
    let kind = match family {
        V4 => "ipv4",
        V6 => "ipv6",
    };
    netns.sysctl(&format!("net.{kind}.neigh.wire.retrans_time_ms"), "300")?;
    let socket = sockets::udp(&netns, t.at(family, 0, 1, 3000))?;
    let nobody = t.at(family, 0, 9, 9000);
    for _ in 0..SENT {
        socket.send_to(b"hello", nobody)?;
    }
    // Three questions, 300 ms apart.
    wait_until("a failed neighbour", || {
        Ok(netns.run("ip neigh show")?.contains("FAILED"))
    })?;
    t.expect(&[Expected::rejected(&netns, "neigh-failed", SENT)])?;
    if let Some(seen) = t.drop(&netns, "neigh-failed")? {
        seen.goes(t.at(family, 0, 1, 3000), nobody)?
            .evidence("neighbour", nobody.ip().to_string())?
            .evidence("interface", "wire")?;
    }
    drop(tap);
    Ok(Outcome::Passed(format!("sent {SENT}, droptrace: {SENT}")))
}

/// Packets for an address that is neither here nor routed.
fn no_route(t: &Test, family: IpFamily, forwarding: bool) -> Result<Outcome> {
    const SENT: u64 = 4;
    let wire = Wire::new(t, family)?;
    let switch = if forwarding { "1" } else { "0" };
    wire.netns.sysctl("net.ipv4.ip_forward", switch)?;
    wire.netns.sysctl("net.ipv6.conf.all.forwarding", switch)?;
    let counter = match family {
        V4 => "IpExtInNoRoutes",
        V6 => "Ip6InNoRoutes",
    };
    let before = Counters::read(&wire.netns)?;
    let nowhere = t.at(family, 77, 9, 9000);
    for number in 0..SENT as u16 {
        wire.tun
            .send(&udp(wire.peer(3000 + number), nowhere, b"hello")?)?;
    }
    wait_until("unroutable packets", || {
        Ok(grown(&wire.netns, &before, counter)? >= SENT)
    })?;
    let counted = grown(&wire.netns, &before, counter)?;
    ensure!(counted == SENT, "{counter} grew by {counted}, not {SENT}");
    t.expect(&[Expected::rejected(&wire.netns, "no-route", SENT)])?;
    if let Some(seen) = t.drop(&wire.netns, "no-route")? {
        seen.goes(wire.peer(0), nowhere)?
            .counter(counter)?
            .evidence("destination", nowhere.ip().to_string())?
            .evidence("interface", "wire")?
            .evidence("forwarding", forwarding)?;
    }
    Ok(Outcome::Passed(format!("{counter} and droptrace: {SENT}")))
}
