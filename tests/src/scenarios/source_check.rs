//! Source validation of received IPv4 packets; IPv6 has none in its routing code.

use std::fs;

use anyhow::{Context, ensure};

use super::Wire;
use crate::{
    Counters, Expected,
    IpFamily::V4,
    Outcome, Result, Scenario, Test, Tun,
    counters::{grown, grown_by},
    packet::{Segment, udp},
    sockets::{listen, wait_until},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("local-source-kube-ipvs0", |t| {
        local_source(t, "kube-ipvs0", "dummy", "kubectl")
    })
    .family(),
    Scenario::new("local-source-dummy", |t| {
        local_source(t, "vips", "dummy", "ip address del")
    }),
    Scenario::new("local-source-device", |t| {
        local_source(t, "other", "tun", "arping")
    }),
    Scenario::new("local-source-accept-local", accept_local),
    Scenario::new("rp-filter-strict", |t| rp_filter(t, "1", "strict")),
    Scenario::new("rp-filter-loose", |t| rp_filter(t, "2", "loose")),
    Scenario::new("martian-source", martian_source),
    Scenario::new("martian-destination", martian_destination),
];

const PORT: u16 = 9000;
const SENT: u64 = 4;

/// A column of `/proc/net/stat/rt_cache`, summed over CPUs; the counters are the host's, not a netns'.
fn route_cache(column: &str) -> Result<u64> {
    let text =
        fs::read_to_string("/proc/net/stat/rt_cache").context("cannot read /proc/net/stat/rt_cache")?;
    let mut lines = text.lines();
    let index = lines
        .next()
        .and_then(|names| names.split_whitespace().position(|name| name == column))
        .with_context(|| format!("rt_cache has no column {column}"))?;
    lines
        .map(|line| {
            let value = line.split_whitespace().nth(index).unwrap_or("0");
            u64::from_str_radix(value, 16).context("rt_cache holds hexadecimal numbers")
        })
        .sum()
}

/// Packets from outside whose source is an address of this host.
fn local_source(t: &Test, holder: &str, kind: &str, remedy: &str) -> Result<Outcome> {
    let wire = Wire::new(t, V4)?;
    let vip = t.at(V4, 9, 9, 0);
    let _other = if kind == "dummy" {
        wire.netns.ip(&[
            &format!("link add {holder} type dummy"),
            &format!("address add {}/32 dev {holder}", vip.ip()),
        ])?;
        None
    } else {
        Some(Tun::new(&wire.netns, holder, &[t.net(V4, 9, 9)])?)
    };
    for device in ["all", "wire"] {
        wire.netns
            .sysctl(&format!("net.ipv4.conf.{device}.rp_filter"), "0")?;
    }
    t.known();
    let before = Counters::read(&wire.netns)?;
    let martians = route_cache("in_martian_src")?;
    for number in 0..SENT as u16 {
        let mut source = vip;
        source.set_port(3000 + number);
        wire.tun
            .send(&Segment::syn(source, wire.address(PORT), 1).bytes()?)?;
    }
    wait_until("martian sources", || {
        Ok(route_cache("in_martian_src")? >= martians + SENT)
    })?;
    ensure!(
        grown(&wire.netns, &before, "TcpExtIPReversePathFilter")? == 0,
        "rp_filter took them"
    );
    t.expect(&[Expected::dropped(&wire.netns, "local-source", SENT)])?;
    if let Some(seen) = t.drop(&wire.netns, "local-source")? {
        seen.goes(vip, wire.address(PORT))?
            .evidence("source", vip.ip().to_string())?
            .evidence("holder", holder)?
            .evidence("holder_kind", kind)?
            .evidence("interface", "wire")?
            .evidence("accept_local", false)?
            .remedy_says(remedy)?
            .remedy_does_not_say("accept_local")?;
    }
    Ok(Outcome::Passed(format!("in_martian_src and droptrace: {SENT}")))
}

/// With accept_local=1 the SYN gets in, but its answer goes to the address that is here.
fn accept_local(t: &Test) -> Result<Outcome> {
    let wire = Wire::new(t, V4)?;
    let vip = t.at(V4, 9, 9, 3000);
    wire.netns.ip(&[
        "link add kube-ipvs0 type dummy",
        &format!("address add {}/32 dev kube-ipvs0", vip.ip()),
    ])?;
    crate::netns::modprobe("ip_vs_rr")?;
    wire.netns.run(&format!("ipvsadm -A -t {}:443 -s rr", vip.ip()))?;
    for device in ["all", "wire"] {
        wire.netns
            .sysctl(&format!("net.ipv4.conf.{device}.rp_filter"), "0")?;
    }
    wire.netns.sysctl("net.ipv4.conf.wire.accept_local", "1")?;
    let listener = listen(&wire.netns, wire.address(PORT), 16)?;
    t.known();
    let before = Counters::read(&wire.netns)?;
    for number in 0..SENT as u16 {
        let mut source = vip;
        source.set_port(3000 + number);
        wire.tun
            .send(&Segment::syn(source, wire.address(PORT), 1).bytes()?)?;
    }
    // Each SYN-ACK is answered by a RST of this very host.
    wait_until("answered SYN-ACKs", || {
        Ok(grown(&wire.netns, &before, "TcpOutRsts")? >= SENT)
    })?;
    ensure!(
        !wire.tun.drain().iter().any(|packet| packet.dst.ip() == vip.ip()),
        "an answer left by the device"
    );
    t.expect(&[Expected::rejected(&wire.netns, "vip-no-service", SENT)])?;
    if let Some(seen) = t.drop(&wire.netns, "vip-no-service")? {
        seen.goes(wire.address(PORT), t.at(V4, 9, 9, 0))?
            .flags("SA")?
            .evidence("segment", "reply")?
            .evidence("holder", "kube-ipvs0")?;
    }
    drop(listener);
    Ok(Outcome::Passed(format!(
        "TcpOutRsts and droptrace: {SENT} replies died here"
    )))
}

/// Packets whose source has its route elsewhere (strict) or nowhere (loose).
fn rp_filter(t: &Test, mode: &str, name: &str) -> Result<Outcome> {
    let wire = Wire::new(t, V4)?;
    let _other = Tun::new(&wire.netns, "other", &[t.net(V4, 1, 1)])?;
    wire.netns.sysctl("net.ipv4.conf.all.rp_filter", "0")?;
    wire.netns.sysctl("net.ipv4.conf.wire.rp_filter", mode)?;
    let before = Counters::read(&wire.netns)?;
    let subnet = if mode == "1" { 1 } else { 77 };
    for number in 0..SENT as u16 {
        let source = t.at(V4, subnet, 9, 3000 + number);
        wire.tun.send(&udp(source, wire.address(PORT), b"hello")?)?;
    }
    grown_by(&wire.netns, &before, "TcpExtIPReversePathFilter", SENT)?;
    t.expect(&[Expected::dropped(&wire.netns, "rp-filter", SENT)])?;
    if let Some(seen) = t.drop(&wire.netns, "rp-filter")? {
        let seen = seen
            .goes(t.at(V4, subnet, 9, 0), wire.address(PORT))?
            .counter("IPReversePathFilter")?
            .evidence("interface", "wire")?
            .evidence("mode", name)?
            .evidence("rp_filter_all", 0)?;
        if mode == "1" {
            seen.evidence("reverse_device", "other")?
                .remedy_says("net.ipv4.conf.wire.rp_filter=2")?;
        }
    }
    Ok(Outcome::Passed(format!(
        "IPReversePathFilter and droptrace: {SENT}"
    )))
}

/// Packets from 127.0.0.9 that come by a device.
fn martian_source(t: &Test) -> Result<Outcome> {
    let wire = Wire::new(t, V4)?;
    let martians = route_cache("in_martian_src")?;
    for number in 0..SENT as u16 {
        let source = std::net::SocketAddr::new("127.0.0.9".parse()?, 3000 + number);
        wire.tun.send(&udp(source, wire.address(PORT), b"hello")?)?;
    }
    wait_until("martian sources", || {
        Ok(route_cache("in_martian_src")? >= martians + SENT)
    })?;
    t.expect(&[Expected::dropped(&wire.netns, "martian-source", SENT)])?;
    if let Some(seen) = t.drop(&wire.netns, "martian-source")? {
        seen.evidence("source", "127.0.0.9")?
            .evidence("source_kind", "loopback")?
            .evidence("interface", "wire")?;
    }
    Ok(Outcome::Passed(format!("in_martian_src and droptrace: {SENT}")))
}

/// Packets to 127.0.0.1 that come by a device.
fn martian_destination(t: &Test) -> Result<Outcome> {
    let wire = Wire::new(t, V4)?;
    let martians = route_cache("in_martian_dst")?;
    for number in 0..SENT as u16 {
        let target = std::net::SocketAddr::new("127.0.0.1".parse()?, PORT);
        wire.tun.send(&udp(wire.peer(3000 + number), target, b"hello")?)?;
    }
    wait_until("martian destinations", || {
        Ok(route_cache("in_martian_dst")? >= martians + SENT)
    })?;
    t.expect(&[Expected::dropped(&wire.netns, "martian-destination", SENT)])?;
    if let Some(seen) = t.drop(&wire.netns, "martian-destination")? {
        seen.evidence("destination", "127.0.0.1")?
            .evidence("destination_kind", "loopback")?
            .evidence("interface", "wire")?;
    }
    Ok(Outcome::Passed(format!("in_martian_dst and droptrace: {SENT}")))
}
