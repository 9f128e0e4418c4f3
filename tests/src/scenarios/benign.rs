//! Frees that look like drops although nothing was lost.

use std::{
    io::Write,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use socket2::{Domain, Socket, Type};

use super::{Wire, time_wait::closed_here};
use crate::{
    Counters, IpFamily,
    IpFamily::{V4, V6},
    Outcome, Result, Scenario, Test, Tun,
    counters::grown_by,
    packet::{ACK, Client, FIN, PSH, SYN, frame, udp},
    sockets::{accept, listen},
    test::{Expected, Kernel},
    tun::{OWN, PEER},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("benign-timewait-segment-v4", |t| timewait(t, V4)).family(),
    Scenario::new("benign-timewait-segment-v6", |t| timewait(t, V6)),
    Scenario::new("benign-request-retransmit-v4", |t| retransmit(t, V4)),
    Scenario::new("benign-request-retransmit-v6", |t| retransmit(t, V6)),
    Scenario::new("benign-duplicate-data", duplicate),
    Scenario::new("benign-old-data", old_data),
    Scenario::new("benign-segment-after-fin-v4", |t| after_fin(t, V4)),
    Scenario::new("benign-segment-after-fin-v6", |t| after_fin(t, V6)),
    Scenario::new("benign-queue-purge", purge),
    Scenario::new("benign-unknown-ethertype", ethertype),
    Scenario::new("benign-other-host", other_host),
    Scenario::new("benign-multicast-not-joined-v4", multicast_v4),
    Scenario::new("benign-multicast-not-joined-v6", multicast_v6),
    Scenario::new("benign-tap-overflow", tap_overflow),
];

const PORT: u16 = 8080;
const SENT: u64 = 4;

fn no_loss(t: &Test, netns: &crate::Netns, cause: &str, packets: u64) -> Result<Outcome> {
    t.expect_benign(netns, cause, packets)?;
    t.expect(&[])?;
    Ok(Outcome::Passed(format!("{packets} {cause}, no loss")))
}

/// A FIN sent again, to a socket in TIME_WAIT.
fn timewait(t: &Test, family: IpFamily) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    let listener = listen(&wire.netns, wire.address(PORT), 16)?;
    let mut client = Client::new(wire.peer(3000), wire.address(PORT), 1000, None);
    closed_here(&wire, &listener, &mut client)?;
    client.sequence = client.sequence.wrapping_sub(1);
    for _ in 0..SENT {
        wire.tun.send(&client.segment(FIN | ACK, &[]).bytes()?)?;
    }
    client.take(&wire.tun, ACK)?;
    drop(listener);
    no_loss(t, &wire.netns, "timewait-segment", SENT)
}

/// A SYN sent again while its handshake is pending.
fn retransmit(t: &Test, family: IpFamily) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    let listener = listen(&wire.netns, wire.address(PORT), 16)?;
    let mut client = Client::new(wire.peer(3000), wire.address(PORT), 1000, None);
    let syn = client.segment(SYN, &[]).bytes()?;
    client.syn(&wire.tun)?;
    for _ in 0..SENT {
        wire.tun.send(&syn)?;
    }
    client.send(&wire.tun, ACK, &[])?;
    drop(accept(&listener)?);
    no_loss(t, &wire.netns, "request-retransmit", SENT)
}

/// Data that arrives twice.
fn duplicate(t: &Test) -> Result<Outcome> {
    let wire = Wire::new(t, V4)?;
    let listener = listen(&wire.netns, wire.address(PORT), 16)?;
    let mut client = Client::new(wire.peer(3000), wire.address(PORT), 1000, None);
    client.connect(&wire.tun)?;
    let accepted = accept(&listener)?;
    let data = client.segment(ACK | PSH, b"hello").bytes()?;
    for _ in 0..=SENT {
        wire.tun.send(&data)?;
    }
    client.take(&wire.tun, ACK)?;
    // The free of an old segment is not traced on 5.10 (tcp_drop is inlined there and ends in __kfree_skb).
    // 6.1 traces it when neither socket, device nor route tell the netns any more: it is counted under no netns there.
    let traced = if t.kernel() <= Kernel(6, 1) { 0 } else { SENT };
    let outcome = no_loss(t, &wire.netns, "duplicate-data", traced);
    drop((accepted, listener));
    outcome
}

/// Data that arrives again after more has arrived and is acknowledged: it lies before the window, wholly. 6.1 gives it the reason
/// that data beyond the window has.
fn old_data(t: &Test) -> Result<Outcome> {
    let wire = Wire::new(t, V4)?;
    let listener = listen(&wire.netns, wire.address(PORT), 16)?;
    let mut client = Client::new(wire.peer(3000), wire.address(PORT), 1000, None);
    client.connect(&wire.tun)?;
    let accepted = accept(&listener)?;
    let first = client.segment(ACK | PSH, b"hello").bytes()?;
    for _ in 0..2 {
        client.send(&wire.tun, ACK | PSH, b"hello")?;
        client.take(&wire.tun, ACK)?;
    }
    let before = Counters::read(&wire.netns)?;
    for _ in 0..SENT {
        wire.tun.send(&first)?;
    }
    grown_by(&wire.netns, &before, "TcpExtDelayedACKLost", SENT)?;
    // The free is not traced on 5.10, and the hook there tells nothing of what is no loss.
    let traced = if t.kernel() < Kernel(5, 15) { 0 } else { SENT };
    let outcome = no_loss(t, &wire.netns, "duplicate-data", traced);
    drop((accepted, listener));
    outcome
}

/// Acknowledgements of a peer that has closed its sending side and still receives.
fn after_fin(t: &Test, family: IpFamily) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    let listener = listen(&wire.netns, wire.address(PORT), 16)?;
    let mut client = Client::new(wire.peer(3000), wire.address(PORT), 1000, None);
    client.connect(&wire.tun)?;
    let mut accepted = accept(&listener)?;
    client.send(&wire.tun, FIN | ACK, &[])?;
    accepted.write_all(b"the answer")?;
    client.take(&wire.tun, ACK | PSH)?;
    for _ in 0..SENT {
        client.send(&wire.tun, ACK, &[])?;
    }
    // The free is not traced on 5.10 (tcp_drop is inlined there and ends in __kfree_skb).
    let traced = if t.kernel() < Kernel(5, 15) { 0 } else { SENT };
    let outcome = no_loss(t, &wire.netns, "segment-after-fin", traced);
    drop((accepted, listener));
    outcome
}

/// Data that nobody read when the socket was closed.
fn purge(t: &Test) -> Result<Outcome> {
    let wire = Wire::new(t, V4)?;
    let socket = crate::sockets::udp(&wire.netns, wire.address(PORT))?;
    for number in 0..SENT as u16 {
        wire.tun
            .send(&udp(wire.peer(3000 + number), wire.address(PORT), b"hello")?)?;
    }
    // All have arrived once the last can be seen.
    let mut buffer = [0; 16];
    socket.set_read_timeout(Some(crate::tun::ANSWER))?;
    socket.peek_from(&mut buffer)?;
    drop(socket);
    t.expect(&[])?;
    Ok(Outcome::Passed(format!("{SENT} datagrams left unread, no loss")))
}

/// A frame to the device's own address, or to another.
fn tap(t: &Test) -> Result<(std::sync::Arc<crate::Netns>, Tun)> {
    let netns = t.netns("host")?;
    let tap = Tun::tap(&netns, "wire", &[t.net(V4, 0, 1)])?;
    Ok((netns, tap))
}

const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 7];

fn ethertype(t: &Test) -> Result<Outcome> {
    const LOCAL_EXPERIMENTAL: u16 = 0x88b5;
    let (netns, tap) = tap(t)?;
    for _ in 0..SENT {
        tap.send(&frame(OWN, PEER, LOCAL_EXPERIMENTAL, &[0; 46]))?;
    }
    no_loss(t, &netns, "unknown-ethertype", SENT)
}

fn other_host(t: &Test) -> Result<Outcome> {
    const IPV4: u16 = 0x0800;
    let (netns, tap) = tap(t)?;
    let packet = udp(t.at(V4, 0, 2, 3000), t.at(V4, 0, 7, PORT), b"hello")?;
    for _ in 0..SENT {
        tap.send(&frame(OTHER, PEER, IPV4, &packet))?;
    }
    // ip_rcv_core frees other hosts' packets by kfree_skb on all four kernels.
    no_loss(t, &netns, "other-host", SENT)
}

/// IPv4 packets to a group that nobody joined; and to one that somebody did, from a source that rp_filter refuses: those are
/// lost.
fn multicast_v4(t: &Test) -> Result<Outcome> {
    const REFUSED: u64 = 3;
    let wire = Wire::new(t, V4)?;
    wire.netns.sysctl("net.ipv4.conf.wire.rp_filter", "1")?;
    let (joined, other) = (Ipv4Addr::new(239, 1, 1, 1), Ipv4Addr::new(239, 9, 9, 9));
    let IpAddr::V4(here) = wire.address.ip() else {
        unreachable!("an IPv4 address")
    };
    let socket = crate::sockets::udp(&wire.netns, (Ipv4Addr::UNSPECIFIED, PORT).into())?;
    socket.join_multicast_v4(&joined, &here)?;
    for number in 0..SENT as u16 {
        wire.tun
            .send(&udp(wire.peer(3000 + number), (other, PORT).into(), b"nobody")?)?;
    }
    for number in 0..REFUSED as u16 {
        let nowhere = t.at(V4, 1, 9, 3000 + number);
        wire.tun.send(&udp(nowhere, (joined, PORT).into(), b"refused")?)?;
    }
    t.expect_benign(&wire.netns, "multicast-not-joined", SENT)?;
    // Without drop reasons nothing tells rp_filter's refusal of such a packet from others.
    let label = if t.kernel() < Kernel(5, 17) {
        "unknown"
    } else {
        "rp-filter"
    };
    t.expect(&[Expected::dropped(&wire.netns, label, REFUSED)])?;
    Ok(Outcome::Passed(format!(
        "{SENT} of a group that nobody joined, no loss; {REFUSED} of one that somebody joined: {label}"
    )))
}

/// IPv6 packets to a group that nobody joined.
fn multicast_v6(t: &Test) -> Result<Outcome> {
    let wire = Wire::new(t, V6)?;
    let group = SocketAddr::new("ff02::1234".parse()?, PORT);
    for number in 0..SENT as u16 {
        wire.tun.send(&udp(wire.peer(3000 + number), group, b"hello")?)?;
    }
    no_loss(t, &wire.netns, "multicast-not-joined", SENT)
}

/// A packet socket that is not read, with a small buffer. The frames are for nobody else: of a packet that others
/// take as well, the tap's copy is only a reference, and giving that up is no free.
fn tap_overflow(t: &Test) -> Result<Outcome> {
    const EVERY_PROTOCOL: u16 = 0x0003;
    const LOCAL_EXPERIMENTAL: u16 = 0x88b5;
    let (netns, wire) = tap(t)?;
    let socket = netns.enter(|| {
        let socket = Socket::new(
            Domain::PACKET,
            Type::DGRAM,
            Some(i32::from(EVERY_PROTOCOL.to_be()).into()),
        )?;
        socket.set_recv_buffer_size(2304)?;
        Ok(socket)
    })?;
    for _ in 0..100 {
        wire.send(&frame(OWN, PEER, LOCAL_EXPERIMENTAL, &[0; 46]))?;
    }
    t.expect_benign(&netns, "tap-overflow", 10)?;
    t.expect(&[])?;
    drop(socket);
    Ok(Outcome::Passed("a capture that was too slow, no loss".to_owned()))
}
