//! Segments that do not fit the state of a living connection.

use std::{io::Write, net::TcpStream};

use anyhow::{Context, ensure};
use droptrace::diagnose::{Drop as Labelled, FoundBy};
use socket2::Socket;

use super::Wire;
use crate::{
    Counters, Expected, IpFamily,
    IpFamily::{V4, V6},
    Outcome, Result, Scenario, Test,
    counters::{grown, grown_by, pages},
    netns::Restore,
    packet::{ACK, Client, PSH, Packet, RST, SYN},
    sockets::{accept, listen, wait_until},
    test::{Kernel, Seen},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("tcp-challenge-ack-v4", |t| challenge(t, V4)).family(),
    Scenario::new("tcp-challenge-ack-v6", |t| challenge(t, V6)),
    Scenario::new("tcp-challenge-ack-old-ack", old_ack),
    Scenario::new("tcp-out-of-window-v4", |t| out_of_window(t, V4)),
    Scenario::new("tcp-out-of-window-v6", |t| out_of_window(t, V6)),
    Scenario::new("tcp-zero-window-v4", |t| zero_window(t, V4)),
    Scenario::new("tcp-zero-window-v6", |t| zero_window(t, V6)),
    Scenario::new("tcp-ofo-pruned-v4", |t| pruned(t, V4)),
    Scenario::new("tcp-ofo-pruned-v6", |t| pruned(t, V6)),
    Scenario::new("tcp-memory-v4", |t| memory(t, V4)).alone(),
    Scenario::new("tcp-memory-v6", |t| memory(t, V6)).alone(),
    Scenario::new("benign-keepalive-probe-v4", |t| keepalive(t, V4)),
    Scenario::new("benign-keepalive-probe-v6", |t| keepalive(t, V6)),
];

const PORT: u16 = 8080;
const SENT: u64 = 3;

/// A connection whose client is played by hand; the device goes last.
struct Connection {
    client: Client,
    accepted: TcpStream,
    _listener: Socket,
    wire: Wire,
}

impl Connection {
    /// With this receive buffer, or the kernel's own.
    fn open(t: &Test, family: IpFamily, buffer: Option<usize>) -> Result<Self> {
        let wire = Wire::new(t, family)?;
        t.known();
        let listener = listen(&wire.netns, wire.address(PORT), 16)?;
        if let Some(buffer) = buffer {
            listener.set_recv_buffer_size(buffer)?;
        }
        let mut client = Client::new(wire.peer(3000), wire.address(PORT), 1000, None);
        client.connect(&wire.tun)?;
        let accepted = accept(&listener)?;
        Ok(Self {
            client,
            accepted,
            _listener: listener,
            wire,
        })
    }

    /// Sends a segment that starts so many bytes after where it should.
    fn send_at(&self, ahead: u32, flags: u8, data: &[u8]) -> Result<()> {
        let mut segment = self.client.segment(flags, data);
        segment.sequence = segment.sequence.wrapping_add(ahead);
        self.wire.tun.send(&segment.bytes()?)
    }

    /// Waits for a segment of the kernel that acknowledges this.
    fn acknowledged(&self, sequence: u32) -> Result<Packet> {
        let (local, remote) = (self.client.local, self.client.remote);
        self.wire.tun.receive("an ACK", |packet| {
            packet.goes(remote, local)
                && packet
                    .tcp
                    .as_ref()
                    .is_some_and(|tcp| tcp.acknowledged == sequence)
        })
    }

    /// Segments that the socket has thrown away, as `ss` tells (`sk_drops`).
    fn thrown_away(&self) -> Result<u64> {
        let text = self.wire.netns.run("ss -tmnH")?;
        let (_, rest) = text
            .split_once(",d")
            .with_context(|| format!("no drops in {text}"))?;
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        Ok(digits.parse()?)
    }

    /// Checks what is known of a drop of this connection, and, where the kernel names the socket, what it was held against.
    fn check(&self, t: &Test, seen: Seen, ahead: i64) -> Result<()> {
        let seen = seen
            .goes(self.client.local, self.client.remote)?
            .evidence("sequence", i64::from(self.client.sequence) + ahead)?;
        if !t.kernel().hides_socket() {
            seen.owned_here()?
                .evidence("expected_sequence", self.client.sequence)?
                .evidence("ahead", ahead)?
                .has_evidence("window")?;
        }
        Ok(())
    }
}

/// Checks that the drops of a cause were told by a counter, where the kernel frees such segments untraced (before 5.15).
fn by_counter(t: &Test, open: &Connection, cause: &str) -> Result<()> {
    let drops = t.drops(&open.wire.netns, cause);
    ensure!(
        t.trace().is_none()
            || !drops.is_empty() && drops.iter().all(|drop| drop.found_by == FoundBy::Counter),
        "not by counter: {drops:?}"
    );
    Ok(())
}

/// Whether `tcp_drop` frees segments untraced.
fn untraced(t: &Test) -> bool {
    t.kernel() < Kernel(5, 15)
}

/// RSTs that lie in the window but not at its start, and SYNs: the kernel asks the peer instead of believing them.
fn challenge(t: &Test, family: IpFamily) -> Result<Outcome> {
    let open = Connection::open(t, family, None)?;
    let netns = &open.wire.netns;
    let before = Counters::read(netns)?;
    for _ in 0..SENT {
        open.send_at(1000, RST, &[])?;
        open.send_at(0, SYN, &[])?;
    }
    let challenges = challenges(&open, &before, 2 * SENT)?;
    let syns = grown(netns, &before, "TcpExtTCPSYNChallenge")?;
    ensure!(syns == SENT, "TCPSYNChallenge grew by {syns}, not {SENT}");
    t.expect(&[Expected::dropped(netns, "tcp-challenge-ack", challenges)])?;
    for (flags, segment, counter, ahead) in [
        ("R", "reset", "TcpExtTCPChallengeACK", 1000),
        ("S", "syn", "TcpExtTCPSYNChallenge", 0),
    ] {
        let wanted = |drop: &droptrace::diagnose::Drop| drop.flags.as_deref() == Some(flags);
        if let Some(seen) = t.drop_where(netns, "tcp-challenge-ack", wanted)? {
            let seen = seen.counter(counter)?.evidence("segment", segment)?;
            open.check(t, seen, ahead)?;
        }
    }
    drop(open);
    Ok(Outcome::Passed(format!("challenges and droptrace: {challenges}")))
}

/// How many challenge ACKs were sent, or left out since the last was sent only just; no more than wanted.
fn challenges(open: &Connection, before: &Counters, wanted: u64) -> Result<u64> {
    let counted = || -> Result<u64> {
        let now = Counters::read(&open.wire.netns)?;
        Ok(now.since(before, "TcpExtTCPChallengeACK") + now.since(before, "TcpExtTCPACKSkippedChallenge"))
    };
    wait_until("challenges", || Ok(counted()? >= wanted))?;
    let counted = counted()?;
    ensure!(counted == wanted, "{counted} challenges, not {wanted}");
    Ok(counted)
}

/// ACKs of bytes that are acknowledged since long.
fn old_ack(t: &Test) -> Result<Outcome> {
    let open = Connection::open(t, V4, None)?;
    let netns = &open.wire.netns;
    let before = Counters::read(netns)?;
    for _ in 0..SENT {
        let mut segment = open.client.segment(ACK, &[]);
        segment.acknowledged = segment.acknowledged.wrapping_sub(1_000_000);
        open.wire.tun.send(&segment.bytes()?)?;
    }
    let challenges = challenges(&open, &before, SENT)?;
    t.expect(&[Expected::dropped(netns, "tcp-challenge-ack", challenges)])?;
    if untraced(t) {
        by_counter(t, &open, "tcp-challenge-ack")?;
    } else if let Some(seen) = t.drop(netns, "tcp-challenge-ack")? {
        let acknowledged = open.client.expected.wrapping_sub(1_000_000);
        let seen = seen
            .evidence("segment", "ack")?
            .evidence("acknowledged", acknowledged)?;
        open.check(t, seen, 0)?;
    }
    drop(open);
    Ok(Outcome::Passed(format!("challenges and droptrace: {challenges}")))
}

/// Data far beyond what the receiver has room for, and RSTs out there.
fn out_of_window(t: &Test, family: IpFamily) -> Result<Outcome> {
    const AHEAD: u32 = 10_000_000;
    let open = Connection::open(t, family, None)?;
    let netns = &open.wire.netns;
    let before = Counters::read(netns)?;
    for _ in 0..SENT {
        open.send_at(AHEAD, ACK | PSH, b"far away")?;
        // Each is answered, however fast they come, since they have data.
        open.acknowledged(open.client.sequence)?;
        open.send_at(AHEAD, RST, &[])?;
    }
    wait_until("segments thrown away", || Ok(open.thrown_away()? >= 2 * SENT))?;
    let thrown = open.thrown_away()?;
    ensure!(
        thrown == 2 * SENT,
        "the socket threw away {thrown}, not {}",
        2 * SENT
    );
    let now = Counters::read(netns)?;
    if now.has("TcpExtBeyondWindow") {
        let counted = now.since(&before, "TcpExtBeyondWindow");
        ensure!(counted == SENT, "BeyondWindow grew by {counted}, not {SENT}");
    }
    t.expect(&[Expected::dropped(netns, "tcp-out-of-window", thrown)])?;
    for (flags, segment, data) in [("PA", "data", 8), ("R", "reset", 0)] {
        let wanted = |drop: &droptrace::diagnose::Drop| drop.flags.as_deref() == Some(flags);
        if let Some(seen) = t.drop_where(netns, "tcp-out-of-window", wanted)? {
            let mut seen = seen.evidence("segment", segment)?.evidence("data", data)?;
            if data > 0 {
                // Every kernel tells what it was held against.
                seen = seen
                    .owned_here()?
                    .evidence("side", "beyond")?
                    .evidence("expected_sequence", open.client.sequence)?
                    .evidence("ahead", AHEAD)?;
            }
            open.check(t, seen, i64::from(AHEAD))?;
        }
    }
    drop(open);
    Ok(Outcome::Passed(format!("sk_drops and droptrace: {thrown}")))
}

/// Data for a window that is shut, since nobody reads.
fn zero_window(t: &Test, family: IpFamily) -> Result<Outcome> {
    let mut open = Connection::open(t, family, Some(8192))?;
    let before = Counters::read(&open.wire.netns)?;
    let mut window = 500;
    while window > 0 {
        let data = vec![b'x'; window.min(500)];
        open.client.send(&open.wire.tun, ACK | PSH, &data)?;
        let answer = open.acknowledged(open.client.sequence)?;
        window = answer.tcp.map_or(0, |tcp| usize::from(tcp.window));
    }
    for _ in 0..SENT {
        open.send_at(0, ACK | PSH, b"y")?;
    }
    // 7.x refuses them before it comes to the window of 0.
    let counter = if before.has("TcpExtBeyondWindow") {
        "TcpExtBeyondWindow"
    } else {
        "TcpExtTCPZeroWindowDrop"
    };
    let netns = &open.wire.netns;
    grown_by(netns, &before, counter, SENT)?;
    if t.kernel().hides_socket() {
        t.expect_without_netns(open.client.local.ip(), "tcp-zero-window", SENT)?;
    } else {
        t.expect(&[Expected::dropped(netns, "tcp-zero-window", SENT)])?;
    }
    if untraced(t) {
        by_counter(t, &open, "tcp-zero-window")?;
    } else if !t.kernel().hides_socket()
        && let Some(seen) = t.drop(netns, "tcp-zero-window")?
    {
        let seen = seen
            .counter(counter)?
            .evidence("window", 0)?
            .evidence("data", 1)?;
        open.check(t, seen, 0)?;
    }
    drop(open);
    Ok(Outcome::Passed(format!("{counter} and droptrace: {SENT}")))
}

/// Segments ahead of a gap, the later ones first, until the buffer is full.
fn pruned(t: &Test, family: IpFamily) -> Result<Outcome> {
    const SEGMENTS: u32 = 29;
    let open = Connection::open(t, family, Some(8192))?;
    let netns = &open.wire.netns;
    let before = Counters::read(netns)?;
    for number in (1..=SEGMENTS).rev() {
        // With gaps between them, so that they cannot be packed together.
        open.send_at(20 * number, ACK | PSH, b"0123456789")?;
    }
    wait_until("segments ahead of a gap", || {
        Ok(grown(netns, &before, "TcpExtTCPOFOQueue")? >= u64::from(SEGMENTS))
    })?;
    let prunings = grown(netns, &before, "TcpExtOfoPruned")?;
    let thrown = open.thrown_away()?;
    ensure!(
        prunings > 0 && thrown >= prunings,
        "OfoPruned grew by {prunings}, the socket threw away {thrown}"
    );
    if untraced(t) {
        // The counter tells how often, not of how many segments.
        t.expect(&[Expected::dropped(netns, "tcp-ofo-pruned", prunings)])?;
        by_counter(t, &open, "tcp-ofo-pruned")?;
    } else {
        t.expect(&[Expected::dropped(netns, "tcp-ofo-pruned", thrown)])?;
        if let Some(seen) = t.drop(netns, "tcp-ofo-pruned")? {
            let seen = seen
                .goes(open.client.local, open.client.remote)?
                .owned_here()?
                .evidence("data", 10)?;
            if !t.kernel().hides_socket() {
                seen.evidence("expected_sequence", open.client.sequence)?
                    .has_evidence("ahead")?;
            }
        }
    }
    drop(open);
    Ok(Outcome::Passed(format!(
        "OfoPruned {prunings}, sk_drops {thrown}, all in droptrace"
    )))
}

/// Segments for which there is no memory, since one socket holds more than all may: one that fits the sequence, and one
/// ahead of a gap, for each of some connections that nobody reads.
fn memory(t: &Test, family: IpFamily) -> Result<Outcome> {
    const CONNECTIONS: u16 = 3;
    const LIMIT: u64 = 64;
    /// More than a socket has left of the memory that it holds, which is less than a page.
    const DATA: [u8; 8000] = [b'x'; 8000];
    let wire = Wire::new(t, family)?;
    let netns = &wire.netns;
    netns.ip(&["link set wire mtu 9000"])?;
    netns.sysctl("net.ipv4.tcp_wmem", "4096 8388608 8388608")?;
    t.known();
    let listener = listen(netns, wire.address(PORT), 16)?;
    let connect = |port| -> Result<(Client, TcpStream)> {
        let mut client = Client::new(wire.peer(port), wire.address(PORT), 1000, None);
        client.connect(&wire.tun)?;
        Ok((client, accept(&listener)?))
    };
    let (_silent, holder) = connect(2999)?;
    hold(&holder)?;
    let mut open = (0..CONNECTIONS)
        .map(|number| connect(3000 + number))
        .collect::<Result<Vec<_>>>()?;
    for (client, _) in &mut open {
        // One is always taken by an empty queue.
        client.send(&wire.tun, ACK | PSH, b"first")?;
        let (local, expected) = (client.local, client.sequence);
        wire.tun.receive("an ACK", |packet| {
            packet.dst == local
                && packet
                    .tcp
                    .as_ref()
                    .is_some_and(|tcp| tcp.acknowledged == expected)
        })?;
    }
    let held = pages("TCP")?;
    ensure!(
        held > LIMIT,
        "TCP sockets hold {held} pages, not more than {LIMIT}"
    );
    let restore = Restore::set(
        "net.ipv4.tcp_mem",
        &format!("{} {} {LIMIT}", LIMIT / 4, LIMIT / 2),
    )?;
    let before = Counters::read(netns)?;
    for (client, _) in &open {
        // The one ahead first: from 6.12 on, the other shuts the window.
        let mut ahead = client.segment(ACK | PSH, &DATA);
        ahead.sequence = ahead.sequence.wrapping_add(10);
        wire.tun.send(&ahead.bytes()?)?;
        wire.tun.send(&client.segment(ACK | PSH, &DATA).bytes()?)?;
    }
    let each = u64::from(CONNECTIONS);
    for counter in ["TcpExtTCPRcvQDrop", "TcpExtTCPOFODrop"] {
        wait_until(counter, || Ok(grown(netns, &before, counter)? >= each))?;
        let counted = grown(netns, &before, counter)?;
        ensure!(counted == each, "{counter} grew by {counted}, not {each}");
    }
    let dropped = 2 * each;
    if t.kernel().hides_socket() {
        t.expect_without_netns(wire.peer(0).ip(), "tcp-memory", dropped)?;
    } else {
        t.expect_by_facts(&[Expected::dropped(netns, "tcp-memory", dropped)])?;
        let in_order = |drop: &Labelled| {
            let counter = drop.counter.as_deref();
            counter.is_some_and(|counter| counter.contains("TCPRcvQDrop"))
        };
        if let Some(seen) = t.drop_where(netns, "tcp-memory", in_order)? {
            seen.goes(wire.peer(0), wire.address(PORT))?
                .counter("TCPRcvQDrop")?
                .owned_here()?
                .evidence("socket", wire.address(PORT).to_string())?
                .evidence("tcp_mem", format!("{}\t{}\t{LIMIT}", LIMIT / 4, LIMIT / 2))?
                .has_evidence("pages")?
                .remedy_says("net.ipv4.tcp_mem")?;
        }
    }
    drop(restore);
    drop((open, holder));
    Ok(Outcome::Passed(format!(
        "{held} pages held, TCPRcvQDrop {each}, TCPOFODrop {each}, droptrace {dropped}"
    )))
}

/// Lets a socket hold a megabyte and more that its peer does not acknowledge. From 6.0 on each CPU keeps up to a megabyte
/// before the host knows of it (`sk_memory_allocated_add`, include/net/sock.h).
fn hold(holder: &TcpStream) -> Result<()> {
    const HELD: usize = 6 << 20;
    holder.set_nonblocking(true)?;
    let mut written = 0;
    while written < HELD {
        match (&*holder).write(&[0; 16_384]) {
            Ok(more) => written += more,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(error).context("cannot fill a send buffer"),
        }
    }
    Ok(())
}

/// Probes of an idle connection, which carry the last old sequence number: no loss.
fn keepalive(t: &Test, family: IpFamily) -> Result<Outcome> {
    let mut open = Connection::open(t, family, None)?;
    open.client.send(&open.wire.tun, ACK | PSH, b"hello")?;
    open.acknowledged(open.client.sequence)?;
    for _ in 0..SENT {
        open.send_at(u32::MAX, ACK, &[])?;
    }
    wait_until("probes thrown away", || Ok(open.thrown_away()? >= SENT))?;
    // The free of an old segment is not traced on 5.10.
    let traced = if untraced(t) { 0 } else { SENT };
    t.expect_benign(&open.wire.netns, "duplicate-data", traced)?;
    t.expect(&[])?;
    drop(open.accepted);
    Ok(Outcome::Passed(format!(
        "{SENT} probes, {traced} traced, no loss"
    )))
}
