//! Timestamps and sequence numbers of the past.

use anyhow::ensure;
use socket2::Socket;

use super::Wire;
use crate::{
    Counters, Expected, IpFamily,
    IpFamily::{V4, V6},
    Outcome, Result, Scenario, Test,
    counters::grown_by,
    packet::{ACK, Client, FIN, PSH, Segment},
    sockets::{accept, listen},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("paws-established-v4", |t| established(t, V4)).family(),
    Scenario::new("paws-established-v6", |t| established(t, V6)),
    Scenario::new("paws-timewait-v4", |t| timewait(t, V4)),
    Scenario::new("paws-timewait-v6", |t| timewait(t, V6)),
    Scenario::new("paws-request-v4", |t| request(t, V4)),
    Scenario::new("paws-request-v6", |t| request(t, V6)),
    Scenario::new("timewait-old-sequence-v4", |t| old_sequence(t, V4)),
    Scenario::new("timewait-old-sequence-v6", |t| old_sequence(t, V6)),
];

const PORT: u16 = 8080;
const SENT: u64 = 3;
/// The client's clock at first, and how far its late segments are behind.
const CLOCK: u32 = 1_000_000;
const BEHIND: u32 = 50_000;

/// A connection that this netns has closed: its end is in TIME_WAIT, the client's is gone.
pub(super) fn closed_here(wire: &Wire, listener: &Socket, client: &mut Client) -> Result<()> {
    client.connect(&wire.tun)?;
    let accepted = accept(listener)?;
    drop(accepted);
    client.take(&wire.tun, FIN)?;
    client.send(&wire.tun, FIN | ACK, &[])?;
    let (local, remote) = (client.local, client.remote);
    let last = client.sequence;
    wire.tun.receive("the last ACK", |packet| {
        packet.goes(remote, local)
            && packet.has(ACK)
            && packet.tcp.as_ref().is_some_and(|tcp| tcp.acknowledged == last)
    })?;
    Ok(())
}

/// Data whose timestamp is older than the connection has seen.
fn established(t: &Test, family: IpFamily) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    let listener = listen(&wire.netns, wire.address(PORT), 16)?;
    let mut client = Client::new(wire.peer(3000), wire.address(PORT), 1000, Some(CLOCK));
    client.connect(&wire.tun)?;
    let accepted = accept(&listener)?;
    client.send(&wire.tun, ACK | PSH, b"first")?;
    let before = Counters::read(&wire.netns)?;
    client.timestamp = Some(CLOCK - BEHIND);
    for _ in 0..SENT {
        wire.tun.send(&client.segment(ACK | PSH, b"second").bytes()?)?;
    }
    grown_by(&wire.netns, &before, "TcpExtPAWSEstab", SENT)?;
    t.expect(&[Expected::dropped(&wire.netns, "paws-established", SENT)])?;
    if let Some(seen) = t.drop(&wire.netns, "paws-established")? {
        let seen = seen
            .goes(client.local, client.remote)?
            .counter("PAWSEstab")?
            .evidence("timestamp_received", CLOCK - BEHIND)?;
        seen.evidence("timestamp_stored", CLOCK)?
            .evidence("behind", BEHIND)?;
    }
    drop((accepted, listener));
    Ok(Outcome::Passed(format!("PAWSEstab and droptrace: {SENT}")))
}

/// SYNs on a 4-tuple in TIME_WAIT, with a clock that is behind.
fn timewait(t: &Test, family: IpFamily) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    let listener = listen(&wire.netns, wire.address(PORT), 16)?;
    let mut client = Client::new(wire.peer(3000), wire.address(PORT), 1000, Some(CLOCK));
    closed_here(&wire, &listener, &mut client)?;
    let before = Counters::read(&wire.netns)?;
    let counter = if before.has("TcpExtPAWSTimewait") {
        "TcpExtPAWSTimewait"
    } else {
        "TcpExtPAWSEstab"
    };
    for _ in 0..SENT {
        let syn = Segment::syn(client.local, client.remote, 500_000).timestamp(CLOCK - BEHIND, 0);
        wire.tun.send(&syn.bytes()?)?;
    }
    grown_by(&wire.netns, &before, counter, SENT)?;
    t.expect(&[Expected::dropped(&wire.netns, "paws-timewait", SENT)])?;
    if let Some(seen) = t.drop(&wire.netns, "paws-timewait")? {
        seen.goes(client.local, client.remote)?
            .flags("S")?
            .counter(counter)?
            .evidence("timestamp_stored", CLOCK)?
            .evidence("timestamp_received", CLOCK - BEHIND)?
            .evidence("substate", "TIME_WAIT")?
            .evidence("peer", client.local.to_string())?;
    }
    drop(listener);
    Ok(Outcome::Passed(format!("{counter} and droptrace: {SENT}")))
}

/// ACKs that are older than the SYN of the pending handshake.
fn request(t: &Test, family: IpFamily) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    let listener = listen(&wire.netns, wire.address(PORT), 16)?;
    let before = Counters::read(&wire.netns)?;
    let mut client = Client::new(wire.peer(3000), wire.address(PORT), 1000, Some(CLOCK));
    client.syn(&wire.tun)?;
    client.timestamp = Some(CLOCK - BEHIND);
    for _ in 0..SENT {
        wire.tun.send(&client.segment(ACK, &[]).bytes()?)?;
    }
    grown_by(&wire.netns, &before, "TcpExtPAWSEstab", SENT)?;
    t.expect(&[Expected::dropped(&wire.netns, "paws-request", SENT)])?;
    if let Some(seen) = t.drop(&wire.netns, "paws-request")? {
        seen.goes(client.local, client.remote)?
            .evidence("timestamp_stored", CLOCK)?
            .evidence("timestamp_received", CLOCK - BEHIND)?
            .evidence("peer", client.local.to_string())?;
    }
    drop(listener);
    Ok(Outcome::Passed(format!("PAWSEstab and droptrace: {SENT}")))
}

/// SYNs on a 4-tuple in TIME_WAIT, without timestamps and with a sequence number of the past.
fn old_sequence(t: &Test, family: IpFamily) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    let listener = listen(&wire.netns, wire.address(PORT), 16)?;
    let mut client = Client::new(wire.peer(3000), wire.address(PORT), 500_000, None);
    closed_here(&wire, &listener, &mut client)?;
    let before = Counters::read(&wire.netns)?;
    for _ in 0..SENT {
        wire.tun
            .send(&Segment::syn(client.local, client.remote, 1000).bytes()?)?;
    }
    // No counter tells of it; the old connection's ACK answers at least the first.
    client.take(&wire.tun, ACK)?;
    let now = Counters::read(&wire.netns)?;
    ensure!(
        now.since(&before, "TcpExtPAWSEstab") == 0 && now.since(&before, "TcpExtPAWSTimewait") == 0,
        "a PAWS counter grew"
    );
    t.expect(&[Expected::dropped(&wire.netns, "timewait-old-sequence", SENT)])?;
    if let Some(seen) = t.drop(&wire.netns, "timewait-old-sequence")? {
        seen.goes(client.local, client.remote)?
            .flags("S")?
            .evidence("sequence", 1000)?
            .evidence("expected_sequence", client.sequence)?
            .evidence("substate", "TIME_WAIT")?;
    }
    drop(listener);
    Ok(Outcome::Passed(format!("sent {SENT}, droptrace: {SENT}")))
}
