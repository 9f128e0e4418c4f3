//! Neighbours that do not answer, and destinations without a route.

use std::{
    net::{SocketAddr, UdpSocket},
    thread,
};

use anyhow::ensure;
use droptrace::context::PATIENCE;

use super::Wire;
use crate::{
    Counters, Expected, IpFamily,
    IpFamily::{V4, V6},
    Netns, Outcome, Result, Scenario, Test, Tun,
    counters::{grown_by, of_host},
    netns::Restore,
    packet::udp,
    sockets::{self, wait_until},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("neigh-failed-v4", |t| neighbour(t, V4)).family(),
    Scenario::new("neigh-failed-v6", |t| neighbour(t, V6)),
    Scenario::new("neigh-queue-full-v4", |t| neighbour_queue(t, V4)).alone(),
    Scenario::new("neigh-queue-full-v6", |t| neighbour_queue(t, V6)).alone(),
    Scenario::new("neigh-table-full-v4", |t| neighbour_table(t, V4)).alone(),
    Scenario::new("neigh-table-full-v6", |t| neighbour_table(t, V6)).alone(),
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
    let (socket, nobody) = ask_for_nobody(t, &netns, family, SENT)?;
    t.expect(&[Expected::rejected(&netns, "neigh-failed", SENT)])?;
    if let Some(seen) = t.drop(&netns, "neigh-failed")? {
        seen.goes(socket.local_addr()?, nobody)?
            .evidence("neighbour", nobody.ip().to_string())?
            .evidence("interface", "wire")?;
    }
    drop(tap);
    Ok(Outcome::Passed(format!("sent {SENT}, droptrace: {SENT}")))
}

/// The kernel's names for a family's neighbours: of their settings, and of their statistics.
const fn names(family: IpFamily) -> (&'static str, &'static str) {
    match family {
        V4 => ("ipv4", "arp_cache"),
        V6 => ("ipv6", "ndisc_cache"),
    }
}

/// Sends datagrams to a host that is not on the wire, and waits until the kernel has given it up: gives the socket, and that host.
fn ask_for_nobody(
    t: &Test,
    netns: &Netns,
    family: IpFamily,
    datagrams: u64,
) -> Result<(UdpSocket, SocketAddr)> {
    // Three questions, 300 ms apart.
    let (kind, _) = names(family);
    netns.sysctl(&format!("net.{kind}.neigh.wire.retrans_time_ms"), "300")?;
    let socket = sockets::udp(netns, t.at(family, 0, 1, 3000))?;
    let nobody = t.at(family, 0, 9, 9000);
    for _ in 0..datagrams {
        socket.send_to(b"hello", nobody)?;
    }
    wait_until("a failed neighbour", || {
        Ok(netns.run("ip neigh show")?.contains("FAILED"))
    })?;
    Ok((socket, nobody))
}

/// Datagrams to a host that is not on the wire, of which only one may wait for it.
fn neighbour_queue(t: &Test, family: IpFamily) -> Result<Outcome> {
    const SENT: u64 = 8;
    const COLUMN: &str = "unresolved_discards";
    let (kind, table) = names(family);
    let netns = t.netns("host")?;
    let tap = Tun::tap(&netns, "wire", &[t.net(family, 0, 1)])?;
    netns.sysctl(&format!("net.{kind}.neigh.wire.unres_qlen_bytes"), "1")?;
    t.known();
    let before = of_host(table, COLUMN)?;
    let (socket, nobody) = ask_for_nobody(t, &netns, family, SENT)?;
    let discards = of_host(table, COLUMN)? - before;
    ensure!(
        discards == SENT - 1,
        "{COLUMN} grew by {discards}, not {}",
        SENT - 1
    );
    t.expect(&[
        Expected::dropped(&netns, "neigh-queue-full", discards),
        Expected::rejected(&netns, "neigh-failed", SENT - discards),
    ])?;
    if let Some(seen) = t.drop(&netns, "neigh-queue-full")? {
        seen.goes(socket.local_addr()?, nobody)?
            .counter(&format!("{table} {COLUMN}"))?
            .evidence("neighbour", nobody.ip().to_string())?
            .evidence("interface", "wire")?
            .evidence("limit_bytes", 1)?
            .remedy_says("unres_qlen_bytes=65536")?;
    }
    drop(tap);
    Ok(Outcome::Passed(format!("{COLUMN} and droptrace: {discards}")))
}

/// Datagrams to more hosts than there may be neighbours: those that get one of the entries wait there for a host that does
/// not answer.
fn neighbour_table(t: &Test, family: IpFamily) -> Result<Outcome> {
    const HOSTS: u8 = 20;
    const COLUMN: &str = "table_fulls";
    /// How many entries were given up; each holds one datagram.
    const FAILED: &str = "res_failed";
    let (kind, table) = names(family);
    let (soft, hard) = match family {
        V4 => (
            "net.ipv4.neigh.default.gc_thresh2",
            "net.ipv4.neigh.default.gc_thresh3",
        ),
        V6 => (
            "net.ipv6.neigh.default.gc_thresh2",
            "net.ipv6.neigh.default.gc_thresh3",
        ),
    };
    let netns = t.netns("host")?;
    let tap = Tun::tap(&netns, "wire", &[t.net(family, 0, 1)])?;
    netns.sysctl(&format!("net.{kind}.neigh.wire.retrans_time_ms"), "300")?;
    t.known();
    let socket = sockets::udp(&netns, t.at(family, 0, 1, 3000))?;
    let restore = (Restore::set(soft, "4")?, Restore::set(hard, "6")?);
    let before = [of_host(table, COLUMN)?, of_host(table, FAILED)?];
    for host in 0..HOSTS {
        // The kernel may tell the sender that its packet was lost.
        let _ = socket.send_to(b"hello", t.at(family, 0, 20 + host, 9000));
    }
    // For IPv6, the questions for those hosts need neighbours of their own, and are refused, too.
    wait_until("failed neighbours", || {
        let shown = netns.run("ip neigh show dev wire")?;
        Ok(shown.contains("FAILED") && !shown.contains("INCOMPLETE"))
    })?;
    let [refused, failed] = [
        of_host(table, COLUMN)? - before[0],
        of_host(table, FAILED)? - before[1],
    ];
    ensure!(
        refused > 0 && failed > 0,
        "with {HOSTS} hosts {COLUMN} grew by {refused}, {FAILED} by {failed}"
    );
    // The facts of all must be asked for while the table is as small.
    t.drop(&netns, "neigh-table-full")?;
    thread::sleep(PATIENCE);
    drop(restore);
    t.expect(&[
        Expected::dropped(&netns, "neigh-table-full", refused),
        Expected::rejected(&netns, "neigh-failed", failed),
    ])?;
    if let Some(seen) = t.drop(&netns, "neigh-table-full")? {
        seen.counter(&format!("{table} {COLUMN}"))?
            .evidence("limit", 6)?
            .has_evidence("entries")?
            .has_evidence("refused")?
            .evidence("interface", "wire")?
            .remedy_says(&format!("sysctl -w {hard}=4096"))?;
    }
    drop(tap);
    Ok(Outcome::Passed(format!(
        "{COLUMN} and droptrace: {refused}, {FAILED} and droptrace: {failed}"
    )))
}

/// Packets for an address that is neither here nor routed.
fn no_route(t: &Test, family: IpFamily, forwarding: bool) -> Result<Outcome> {
    const SENT: u64 = 4;
    let wire = Wire::new(t, family)?;
    wire.netns.forward(forwarding)?;
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
    grown_by(&wire.netns, &before, counter, SENT)?;
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
