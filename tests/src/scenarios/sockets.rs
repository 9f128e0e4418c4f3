//! Packets to a port that nobody has.

use anyhow::ensure;

use super::Wire;
use crate::{
    Counters, Expected, IpFamily,
    IpFamily::{V4, V6},
    Outcome, Result, Scenario, Test,
    counters::grown,
    packet::{ACK, PSH, RST, SYN, Segment, udp},
    sockets::wait_until,
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("no-socket-tcp-syn-v4", |t| tcp(t, V4, SYN, "syn")).family(),
    Scenario::new("no-socket-tcp-syn-v6", |t| tcp(t, V6, SYN, "syn")),
    Scenario::new("no-socket-tcp-mid-stream-v4", |t| {
        tcp(t, V4, ACK | PSH, "mid-stream")
    }),
    Scenario::new("no-socket-tcp-mid-stream-v6", |t| {
        tcp(t, V6, ACK | PSH, "mid-stream")
    }),
    Scenario::new("no-socket-tcp-reply-v4", |t| tcp(t, V4, SYN | ACK, "reply")),
    Scenario::new("no-socket-tcp-reply-v6", |t| tcp(t, V6, SYN | ACK, "reply")),
    Scenario::new("no-socket-udp-v4", |t| datagram(t, V4)),
    Scenario::new("no-socket-udp-v6", |t| datagram(t, V6)),
];

const PORT: u16 = 9;
const SENT: u16 = 4;

fn tcp(t: &Test, family: IpFamily, flags: u8, segment: &str) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    let before = Counters::read(&wire.netns)?;
    for number in 0..SENT {
        let mut sent = Segment::syn(wire.peer(3000 + number), wire.address(PORT), 100).flags(flags);
        if flags & ACK != 0 {
            sent.acknowledged = 1;
        }
        wire.tun.send(&sent.bytes()?)?;
        wire.tun.receive("a RST", |packet| {
            packet.goes(wire.address(PORT), wire.peer(3000 + number)) && packet.has(RST)
        })?;
    }
    let resets = grown(&wire.netns, &before, "TcpOutRsts")?;
    ensure!(
        resets == u64::from(SENT),
        "TcpOutRsts grew by {resets}, not {SENT}"
    );
    t.expect(&[Expected::rejected(&wire.netns, "no-socket", u64::from(SENT))])?;
    if let Some(seen) = t.drop(&wire.netns, "no-socket")? {
        seen.goes(wire.peer(0), wire.address(PORT))?
            .counter("TcpOutRsts")?
            .evidence("destination", wire.address(PORT).to_string())?
            .evidence("segment", segment)?
            .has_evidence("meaning")?;
    }
    Ok(Outcome::Passed(format!("TcpOutRsts and droptrace: {SENT}")))
}

fn datagram(t: &Test, family: IpFamily) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    let counter = match family {
        V4 => "UdpNoPorts",
        V6 => "Udp6NoPorts",
    };
    let before = Counters::read(&wire.netns)?;
    for number in 0..SENT {
        wire.tun
            .send(&udp(wire.peer(3000 + number), wire.address(PORT), b"hello")?)?;
    }
    wait_until("refused datagrams", || {
        Ok(grown(&wire.netns, &before, counter)? >= u64::from(SENT))
    })?;
    t.expect(&[Expected::rejected(&wire.netns, "no-socket", u64::from(SENT))])?;
    if let Some(seen) = t.drop(&wire.netns, "no-socket")? {
        seen.goes(wire.peer(0), wire.address(PORT))?
            .counter(counter)?
            .evidence("destination", wire.address(PORT).to_string())?
            .evidence("segment", serde_json::Value::Null)?;
    }
    Ok(Outcome::Passed(format!("{counter} and droptrace: {SENT}")))
}
