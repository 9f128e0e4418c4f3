//! What devices, their queues, and programs on them drop.

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{bail, ensure};

use super::Wire;
use crate::{
    Expected, IpFamily,
    IpFamily::{V4, V6},
    Netns, Outcome, Result, Scenario, Test, Tun,
    bpf::{Kind, Point, Program, TC_ACT_SHOT, XDP_DROP},
    counters::{softnet_dropped, tc_dropped, tx_dropped},
    netns::Restore,
    packet::{frame, udp},
    sockets::{self, wait_until},
    test::Kernel,
    tun::{PEER, mac},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("qdisc-full-v4", |t| qdisc_full(t, V4)).family(),
    Scenario::new("qdisc-full-v6", |t| qdisc_full(t, V6)),
    Scenario::new("qdisc-policy-v4", |t| qdisc_policy(t, V4)),
    Scenario::new("qdisc-policy-v6", |t| qdisc_policy(t, V6)),
    Scenario::new("cpu-backlog-full-v4", |t| cpu_backlog(t, V4)).alone(),
    Scenario::new("cpu-backlog-full-v6", |t| cpu_backlog(t, V6)).alone(),
    Scenario::new("tc-program-action-v4", |t| tc_action(t, V4)),
    Scenario::new("tc-program-action-v6", |t| tc_action(t, V6)),
    Scenario::new("tc-program-bpf-v4", |t| tc_bpf(t, V4)),
    Scenario::new("tc-program-bpf-v6", |t| tc_bpf(t, V6)),
    Scenario::new("tc-program-tcx", tcx),
    Scenario::new("xdp-program-generic-v4", |t| xdp_generic(t, V4)),
    Scenario::new("xdp-program-generic-v6", |t| xdp_generic(t, V6)),
    Scenario::new("xdp-program-veth", xdp_veth),
    Scenario::new("device-tx-drop-ring-v4", |t| ring_full(t, V4)),
    Scenario::new("device-tx-drop-ring-v6", |t| ring_full(t, V6)),
    Scenario::new("device-tx-drop-no-carrier", no_carrier),
];

const SENT: u64 = 6;

/// Whence and whither [`send`] sends.
fn ends(t: &Test, family: IpFamily) -> (SocketAddr, SocketAddr) {
    (t.at(family, 0, 1, 3000), t.at(family, 0, 2, 9000))
}

/// Sends datagrams out by the wire.
fn send(t: &Test, netns: &Netns, family: IpFamily, packets: u64) -> Result<()> {
    let (from, to) = ends(t, family);
    let socket = sockets::udp(netns, from)?;
    for _ in 0..packets {
        // The kernel may tell the sender that its packet was lost.
        let _ = socket.send_to(&[7; 500], to);
    }
    Ok(())
}

/// Injects datagrams for this host.
fn inject(wire: &Wire) -> Result<()> {
    for number in 0..SENT as u16 {
        let packet = udp(wire.peer(4000 + number), wire.address(9000), b"hello")?;
        wire.tun.send(&packet)?;
    }
    Ok(())
}

/// Provokes drops, once more where all of them had to do without the facts that name their cause. Says how often.
fn until_named(t: &Test, netns: &Netns, cause: &str, provoke: impl Fn() -> Result<()>) -> Result<u64> {
    const ROUNDS: u64 = 5;
    for round in 1..=ROUNDS {
        provoke()?;
        let until = Instant::now() + Duration::from_secs(4);
        while t.trace().is_some() && t.drops(netns, cause).is_empty() && Instant::now() < until {
            thread::sleep(Duration::from_millis(50));
        }
        if t.trace().is_none() || !t.drops(netns, cause).is_empty() {
            return Ok(round);
        }
    }
    bail!("{ROUNDS} times no drop was named {cause}")
}

/// A shaper with a small queue below it.
fn qdisc_full(t: &Test, family: IpFamily) -> Result<Outcome> {
    let (from, to) = ends(t, family);
    let wire = Wire::new(t, family)?;
    let netns = &wire.netns;
    netns.run("tc qdisc add dev wire root handle 1: tbf rate 800bit burst 2000 limit 100000")?;
    netns.run("tc qdisc add dev wire parent 1:1 handle 10: pfifo limit 4")?;
    t.known();
    until_named(t, netns, "qdisc-full", || send(t, netns, family, 40))?;
    let dropped = tc_dropped(netns, "qdisc show dev wire", "pfifo 10:")?;
    ensure!(dropped > 10, "the queue dropped only {dropped}");
    t.expect_by_facts(&[Expected::dropped(netns, "qdisc-full", dropped)])?;
    if let Some(seen) = t.drop_where(netns, "qdisc-full", |drop| {
        drop.protocol.as_deref() == Some("udp")
    })? {
        seen.goes(from, to)?
            .interface("wire")?
            .evidence("interface", "wire")?
            .evidence("qdisc", "pfifo 10:")?
            .evidence("limit", "4 packets")?
            .has_evidence("dropped")?
            .remedy_says("tc qdisc change dev wire handle 10: pfifo limit 8")?;
    }
    Ok(Outcome::Passed(format!("pfifo and droptrace: {dropped}")))
}

/// netem that loses everything.
fn qdisc_policy(t: &Test, family: IpFamily) -> Result<Outcome> {
    let (from, to) = ends(t, family);
    let wire = Wire::new(t, family)?;
    let netns = &wire.netns;
    netns.run("tc qdisc add dev wire root handle 7: netem loss 100%")?;
    t.known();
    until_named(t, netns, "qdisc-policy", || send(t, netns, family, SENT))?;
    let dropped = tc_dropped(netns, "qdisc show dev wire", "netem 7:")?;
    ensure!(dropped >= SENT, "netem dropped only {dropped}");
    t.expect_by_facts(&[Expected::dropped(netns, "qdisc-policy", dropped)])?;
    if let Some(seen) = t.drop_where(netns, "qdisc-policy", |drop| {
        drop.protocol.as_deref() == Some("udp")
    })? {
        seen.goes(from, to)?
            .evidence("interface", "wire")?
            .evidence("qdisc", "netem 7:")?
            .remedy_says("tc qdisc del dev wire root")?;
    }
    Ok(Outcome::Passed(format!("netem and droptrace: {dropped}")))
}

/// A frame that a bridge floods to ten devices at once, each of which hands its copy to this CPU's queue.
fn cpu_backlog(t: &Test, family: IpFamily) -> Result<Outcome> {
    const PORTS: u64 = 10;
    let bridge = t.netns("bridge")?;
    let hosts = t.netns("hosts")?;
    for netns in [&bridge, &hosts] {
        // Nothing but the test's own packets.
        netns.sysctl("net.ipv6.conf.default.disable_ipv6", "1")?;
    }
    let tap = Tun::tap(&bridge, "wire", &[])?;
    // The port that is the last one to be asked gets the frame itself, the others copies. The frame still belongs to the
    // socket behind the tap, hence to another netns than the device that it would come by.
    bridge.ip(&[
        "link add br0 type bridge mcast_snooping 0",
        "link set br0 up",
        "link add sink type dummy",
        "link set sink up master br0",
        "link set wire master br0",
    ])?;
    for port in 0..PORTS {
        bridge.veth(&format!("port{port}"), &hosts, &format!("host{port}"))?;
        bridge.ip(&[&format!("link set port{port} master br0")])?;
    }
    wait_until("ports that forward", || {
        Ok(bridge
            .run("bridge link show")?
            .matches("state forwarding")
            .count() as u64
            == PORTS + 2)
    })?;
    t.known();
    let restore = Restore::set("net.core.netdev_max_backlog", "1")?;
    let before = softnet_dropped()?;
    let packet = udp(t.at(family, 0, 2, 3000), t.at(family, 0, 9, 9000), b"hello")?;
    let nobody = [2, 0, 0, 0, 0, 9];
    let ethertype = match family {
        V4 => 0x0800,
        V6 => 0x86dd,
    };
    tap.send(&frame(nobody, PEER, ethertype, &packet))?;
    let dropped = softnet_dropped()? - before;
    ensure!(
        (1..=PORTS).contains(&dropped),
        "softnet_stat dropped grew by {dropped} of {PORTS}"
    );
    t.drop(&hosts, "cpu-backlog-full")?;
    drop(restore);
    t.expect(&[Expected::dropped(&hosts, "cpu-backlog-full", dropped)])?;
    if let Some(seen) = t.drop(&hosts, "cpu-backlog-full")? {
        seen.goes(t.at(family, 0, 2, 3000), t.at(family, 0, 9, 9000))?
            .has_evidence("interface")?
            .evidence("limit", 1)?
            .remedy_says("net.core.netdev_max_backlog=1000")?;
    }
    Ok(Outcome::Passed(format!("softnet_stat and droptrace: {dropped}")))
}

/// Filters with an action on both sides of a device.
fn tc_action(t: &Test, family: IpFamily) -> Result<Outcome> {
    let (from, to) = ends(t, family);
    let wire = Wire::new(t, family)?;
    let netns = &wire.netns;
    let protocol = match family {
        V4 => "ip",
        V6 => "ipv6",
    };
    netns.run("tc qdisc add dev wire clsact")?;
    for side in ["ingress", "egress"] {
        netns.run(&format!(
            "tc filter add dev wire {side} pref 10 protocol {protocol} flower ip_proto udp action drop"
        ))?;
    }
    t.known();
    let rounds = until_named(t, netns, "tc-program", || {
        inject(&wire)?;
        send(t, netns, family, SENT)
    })?;
    let sent = rounds * SENT;
    for side in ["ingress", "egress"] {
        let dropped = tc_dropped(netns, &format!("filter show dev wire {side}"), "gact action drop")?;
        ensure!(
            dropped == sent,
            "the action at {side} dropped {dropped}, not {sent}"
        );
    }
    t.expect_by_facts(&[Expected::dropped(netns, "tc-program", 2 * sent)])?;
    for (side, from, to) in [
        ("ingress", wire.peer(0), wire.address(9000)),
        ("egress", from, to),
    ] {
        let of_side = t.drop_where(netns, "tc-program", |drop| {
            drop.evidence.get("side").is_some_and(|seen| seen == side)
        })?;
        if let Some(seen) = of_side {
            seen.goes(from, to)?
                .interface("wire")?
                .evidence("interface", "wire")?
                .evidence("by", "action")?
                .has_evidence("filter")?
                .remedy_says(&format!("tc -s filter show dev wire {side}"))?;
        }
    }
    Ok(Outcome::Passed(format!("actions and droptrace: {}", 2 * sent)))
}

/// A pinned program, until this value goes.
struct Pinned(PathBuf);

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A BPF program as a filter.
fn tc_bpf(t: &Test, family: IpFamily) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    let netns = &wire.netns;
    let program = Program::load(Kind::Tc, TC_ACT_SHOT, "refuse_all")?;
    // A name there has no dots.
    let name = netns.name().replace('.', "-");
    let pinned = Pinned(PathBuf::from(format!("/sys/fs/bpf/{name}")));
    program.pin(&pinned.0)?;
    netns.run("tc qdisc add dev wire clsact")?;
    netns.run(&format!(
        "tc filter add dev wire ingress bpf direct-action object-pinned {}",
        pinned.0.display()
    ))?;
    program_drops(t, &wire, "refuse_all")
}

/// A BPF program without a qdisc.
fn tcx(t: &Test) -> Result<Outcome> {
    if t.kernel() < Kernel(6, 6) {
        return Ok(Outcome::Skipped("this kernel has no tcx (since 6.6)".to_owned()));
    }
    let wire = Wire::new(t, V4)?;
    let program = Program::load(Kind::Tc, TC_ACT_SHOT, "refuse_tcx")?;
    let _link = program.attach(&wire.netns, "wire", Point::TcxIngress)?;
    program_drops(t, &wire, "refuse_tcx")
}

/// Datagrams for a device whose program drops them.
fn program_drops(t: &Test, wire: &Wire, program: &str) -> Result<Outcome> {
    let netns = &wire.netns;
    t.known();
    let rounds = until_named(t, netns, "tc-program", || inject(wire))?;
    let sent = rounds * SENT;
    t.expect_by_facts(&[Expected::dropped(netns, "tc-program", sent)])?;
    if let Some(seen) = t.drop(netns, "tc-program")? {
        ensure!(
            seen.0.evidence.get("filter").is_some_and(|filter| {
                filter.as_str().is_some_and(|text| text.contains(program)) || filter.is_null()
            }),
            "the program is not named: {seen}"
        );
        seen.goes(wire.peer(0), wire.address(9000))?
            .interface("wire")?
            .evidence("side", "ingress")?
            .evidence("by", "program")?
            .has_evidence("filter")?
            .remedy_says("bpftool prog show id")?;
    }
    Ok(Outcome::Passed(format!("sent and dropped: {sent}")))
}

/// Generic XDP, on a device that has no other.
fn xdp_generic(t: &Test, family: IpFamily) -> Result<Outcome> {
    let netns = t.netns("host")?;
    let tap = Tun::tap(&netns, "wire", &[t.net(family, 0, 1)])?;
    let program = Program::load(Kind::Xdp, XDP_DROP, "xdp_refuse")?;
    let link = program.attach(&netns, "wire", Point::XdpGeneric)?;
    t.known();
    let (from, to) = (t.at(family, 0, 2, 4000), t.at(family, 0, 1, 9000));
    for _ in 0..SENT {
        tap.send_ip(&udp(from, to, b"hello")?)?;
    }
    t.expect(&[Expected::dropped(&netns, "xdp-program", SENT)])?;
    if let Some(seen) = t.drop(&netns, "xdp-program")? {
        seen.goes(from, to)?
            .interface("wire")?
            .evidence("interface", "wire")?
            .evidence("mode", "generic")?
            .has_evidence("program")?
            .remedy_says("bpftool prog show id")?;
    }
    drop((link, tap));
    Ok(Outcome::Passed(format!("sent and dropped: {SENT}")))
}

/// Two namespaces with a veth pair, IPv4 only, whose neighbours are known.
fn pair(t: &Test) -> Result<(Arc<Netns>, Arc<Netns>)> {
    let (here, there) = (t.netns("here")?, t.netns("there")?);
    for netns in [&here, &there] {
        netns.sysctl("net.ipv6.conf.default.disable_ipv6", "1")?;
    }
    here.veth("wire", &there, "wire")?;
    here.address("wire", &t.net(V4, 0, 1))?;
    there.address("wire", &t.net(V4, 0, 2))?;
    for (netns, host) in [(&here, 2), (&there, 1)] {
        netns.ip(&[&format!(
            "neigh replace {} lladdr {} dev wire nud permanent",
            t.ip(V4, 0, host),
            mac(PEER)
        )])?;
    }
    there.ip(&[&format!("link set wire address {}", mac(PEER))])?;
    Ok((here, there))
}

/// The XDP of veth, which looks at packets that the other end's stack made.
fn xdp_veth(t: &Test) -> Result<Outcome> {
    let (from, to) = ends(t, V4);
    let (here, there) = pair(t)?;
    let program = Program::load(Kind::Xdp, XDP_DROP, "xdp_veth")?;
    let link = program.attach(&there, "wire", Point::XdpNative)?;
    t.known();
    send(t, &here, V4, SENT)?;
    t.expect(&[Expected::dropped(&there, "xdp-program", SENT)])?;
    if let Some(seen) = t.drop(&there, "xdp-program")? {
        seen.goes(from, to)?
            .interface("wire")?
            .evidence("mode", "native")?
            .has_evidence("program")?;
    }
    drop(link);
    Ok(Outcome::Passed(format!("sent and dropped: {SENT}")))
}

/// A program that does not read from its TUN device.
fn ring_full(t: &Test, family: IpFamily) -> Result<Outcome> {
    let (from, to) = ends(t, family);
    let netns = t.netns("host")?;
    let tun = Tun::unread(&netns, "wire", &[t.net(family, 0, 1)])?;
    netns.ip(&["link set wire txqueuelen 4"])?;
    t.known();
    send(t, &netns, family, 30)?;
    let dropped = tx_dropped(&netns, "wire")?;
    ensure!(dropped > 20, "tx_dropped is only {dropped}");
    t.expect(&[Expected::dropped(&netns, "device-tx-drop", dropped)])?;
    let datagram = t.drop_where(&netns, "device-tx-drop", |drop| {
        drop.protocol.as_deref() == Some("udp")
    })?;
    if let Some(seen) = datagram {
        seen.goes(from, to)?
            .interface("wire")?
            .evidence("interface", "wire")?
            .evidence("queue_length", 4)?
            .evidence("carrier", true)?;
    }
    drop(tun);
    Ok(Outcome::Passed(format!("tx_dropped and droptrace: {dropped}")))
}

/// A veth whose other end is off.
fn no_carrier(t: &Test) -> Result<Outcome> {
    let (from, to) = ends(t, V4);
    let (here, there) = pair(t)?;
    there.ip(&["link set wire down"])?;
    t.known();
    let rounds = until_named(t, &here, "device-tx-drop", || send(t, &here, V4, SENT))?;
    let sent = rounds * SENT;
    t.expect_by_facts(&[Expected::dropped(&here, "device-tx-drop", sent)])?;
    if let Some(seen) = t.drop(&here, "device-tx-drop")? {
        seen.goes(from, to)?
            .interface("wire")?
            .evidence("why", "no-carrier")?
            .evidence("carrier", false)?
            .evidence("up", true)?;
    }
    Ok(Outcome::Passed(format!("sent and dropped: {sent}")))
}
