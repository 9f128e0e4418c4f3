//! Packets whose checksums or headers are wrong, fragments without the rest, and IPsec policies.

use super::Wire;
use crate::{
    Counters, Expected, IpFamily,
    IpFamily::{V4, V6},
    Outcome, Result, Scenario, Test,
    counters::grown_by,
    packet::{Segment, echo_request, first_fragment, udp},
    sockets,
    test::Kernel,
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("checksum-error-v4", |t| checksum(t, V4)),
    Scenario::new("checksum-error-v6", |t| checksum(t, V6)),
    Scenario::new("bad-header-v4", |t| header(t, V4)),
    Scenario::new("bad-header-v6", |t| header(t, V6)),
    Scenario::new("fragment-reassembly-v4", |t| fragments(t, V4)),
    Scenario::new("fragment-reassembly-v6", |t| fragments(t, V6)),
    Scenario::new("xfrm-policy-v4", |t| xfrm(t, V4)),
    Scenario::new("xfrm-policy-v6", |t| xfrm(t, V6)),
];

const SENT: u64 = 3;
/// What is wrong with a packet that was cut.
const TRUNCATED: &str = "fewer bytes than the IP header says";

/// Injects the packet several times and waits until the counter says so.
fn inject(wire: &Wire, counter: &str, packet: &[u8]) -> Result<()> {
    let before = Counters::read(&wire.netns)?;
    for _ in 0..SENT {
        wire.tun.send(packet)?;
    }
    grown_by(&wire.netns, &before, counter, SENT)?;
    Ok(())
}

/// Length of the IP header of a packet without options or extensions.
const fn header_length(family: IpFamily) -> usize {
    match family {
        V4 => 20,
        V6 => 40,
    }
}

/// Packets with a wrong checksum in each layer.
fn checksum(t: &Test, family: IpFamily) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    t.known();
    let transport = header_length(family);
    let (from, to) = (wire.peer(3000), wire.address(9000));
    let mut kinds = vec![
        (
            "UDP",
            match family {
                V4 => "UdpInCsumErrors",
                V6 => "Udp6InCsumErrors",
            },
            udp(from, to, b"hello")?,
            transport + 6,
        ),
        (
            "TCP",
            "TcpInCsumErrors",
            Segment::syn(from, to, 1).bytes()?,
            transport + 16,
        ),
    ];
    match family {
        V4 => {
            kinds.push(("IPv4 header", "IpExtInCsumErrors", udp(from, to, b"hello")?, 10));
            kinds.push((
                "ICMP",
                "IcmpInCsumErrors",
                echo_request(from.ip(), to.ip())?,
                transport + 2,
            ));
        }
        // icmpv6_rcv frees what it has handled at the same place, where kernels have no reasons.
        V6 if t.kernel() >= Kernel(5, 17) => {
            kinds.push((
                "ICMPv6",
                "Icmp6InCsumErrors",
                echo_request(from.ip(), to.ip())?,
                transport + 2,
            ));
        }
        V6 => {}
    }
    for (_, counter, packet, place) in &mut kinds {
        packet[*place] ^= 0x55;
        inject(&wire, counter, packet)?;
    }
    let all = kinds.len() as u64 * SENT;
    t.expect(&[Expected::dropped(&wire.netns, "checksum-error", all)])?;
    for (layer, counter, ..) in &kinds {
        let of_layer = t.drop_where(&wire.netns, "checksum-error", |drop| {
            drop.evidence.get("layer").is_some_and(|seen| seen == layer)
        })?;
        if let Some(seen) = of_layer {
            seen.goes(wire.peer(0), wire.address(0))?
                .counter(counter)?
                .has_evidence("carried")?
                .has_evidence("correct")?
                .evidence("interface", "wire")?;
        }
    }
    Ok(Outcome::Passed(format!("InCsumErrors and droptrace: {all}")))
}

/// Packets with fewer bytes than they say, and with a field that cannot be.
fn header(t: &Test, family: IpFamily) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    t.known();
    let whole = udp(wire.peer(3000), wire.address(9000), &[7; 40])?;
    let truncated = &whole[..whole.len() - 8];
    let mut nonsense = whole.clone();
    let (cut, wrong) = match family {
        V4 => {
            // A header of 16 bytes.
            nonsense[0] = 0x44;
            ("IpExtInTruncatedPkts", "IpInHdrErrors")
        }
        V6 => {
            // From ::1.
            nonsense[8..24].fill(0);
            nonsense[23] = 1;
            ("Ip6InTruncatedPkts", "Ip6InHdrErrors")
        }
    };
    inject(&wire, cut, truncated)?;
    inject(&wire, wrong, &nonsense)?;
    t.expect(&[Expected::dropped(&wire.netns, "bad-header", 2 * SENT)])?;
    for counter in [cut, wrong] {
        let of_kind = t.drop_where(&wire.netns, "bad-header", |drop| {
            let text = drop.evidence.get("fault").and_then(|fault| fault.as_str());
            text.is_some_and(|text| (text == TRUNCATED) == (counter == cut))
        })?;
        if let Some(seen) = of_kind {
            seen.counter(counter)?.evidence("interface", "wire")?;
        }
    }
    Ok(Outcome::Passed(format!(
        "{cut}, {wrong}, and droptrace: {}",
        2 * SENT
    )))
}

/// The first fragment of packets whose others do not come.
fn fragments(t: &Test, family: IpFamily) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    let (setting, counter) = match family {
        V4 => ("net.ipv4.ipfrag_time", "IpReasmFails"),
        V6 => ("net.ipv6.ip6frag_time", "Ip6ReasmFails"),
    };
    wire.netns.sysctl(setting, "1")?;
    t.known();
    let before = Counters::read(&wire.netns)?;
    for id in 0..SENT as u16 {
        let datagram = udp(wire.peer(3000), wire.address(9000), &[7; 40])?;
        wire.tun.send(&first_fragment(&datagram, id)?)?;
    }
    grown_by(&wire.netns, &before, counter, SENT)?;
    t.expect(&[Expected::dropped(&wire.netns, "fragment-reassembly", SENT)])?;
    if let Some(seen) = t.drop(&wire.netns, "fragment-reassembly")? {
        seen.goes(wire.peer(0), wire.address(0))?
            .counter(counter)?
            .evidence("why", "timeout")?
            .evidence("timeout_s", 1)?
            .has_evidence("limit_bytes")?
            .evidence("interface", "wire")?;
    }
    Ok(Outcome::Passed(format!("{counter} and droptrace: {SENT}")))
}

/// A policy that blocks what comes in.
fn xfrm(t: &Test, family: IpFamily) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    let socket = sockets::udp(&wire.netns, wire.address(9000))?;
    let length = match family {
        V4 => 32,
        V6 => 128,
    };
    wire.netns.ip(&[&format!(
        "xfrm policy add dir in src {}/{length} dst {}/{length} action block",
        wire.peer.ip(),
        wire.address.ip()
    )])?;
    t.known();
    for number in 0..SENT as u16 {
        let packet = udp(wire.peer(3000 + number), wire.address(9000), b"hello")?;
        wire.tun.send(&packet)?;
    }
    // The place has other causes, too, and 5.10 no reason to tell them apart.
    let cause = if t.kernel() >= Kernel(5, 17) {
        "xfrm-policy"
    } else {
        "unknown"
    };
    t.expect(&[Expected::dropped(&wire.netns, cause, SENT)])?;
    if cause == "xfrm-policy"
        && let Some(seen) = t.drop(&wire.netns, cause)?
    {
        seen.goes(wire.peer(0), wire.address(9000))?
            .evidence("where", "input")?
            .evidence("interface", "wire")?
            .remedy_says("ip xfrm policy list dir in")?;
    }
    drop(socket);
    Ok(Outcome::Passed(format!("sent and {cause}: {SENT}")))
}
