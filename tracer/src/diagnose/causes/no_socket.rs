//! `no-socket`: nobody listens at the packet's destination.

use droptrace_common::{Site, bits};

use super::{
    ipvs::Entry,
    values::{Segment, counter_of, endpoint, in_netns},
};
use crate::diagnose::{Cause, CountedBy, Counter, Facts, Family, Finding, RawEvent, Signature, Verdict};

/// Protocol numbers of IP.
const TCP: u8 = 6;
const UDP: u8 = 17;
/// Functions that look up a TCP socket.
const TCP_RECEIVE: [&str; 2] = ["tcp_v4_rcv", "tcp_v6_rcv"];
/// Functions that look up a UDP socket; 7.x has merged the inner ones into the outer.
const UDP_RECEIVE: [&str; 6] = [
    "__udp4_lib_rcv",
    "__udp6_lib_rcv",
    "udp_rcv",
    "udpv6_rcv",
    "udplite_rcv",
    "udplitev6_rcv",
];

/// No socket for a packet to a local address.
pub(super) static CAUSE: Cause = Cause {
    slug: "no-socket",
    family: Family::Socket,
    title: "no socket at the destination address and port",
    mechanism: "The packet came to an address of this netns, and the lookup found neither a connection nor a listener for it \
        (tcp_v4_rcv, net/ipv4/tcp_ipv4.c; __udp4_lib_rcv, net/ipv4/udp.c; and their IPv6 twins). TCP is answered by \
        RST, UDP by ICMP port unreachable. From 6.1 on the kernel gives the reason NO_SOCKET; before, the RST or ICMP message tells. \
        A syncookie ACK that a full accept queue refused carries the same reason elsewhere, and is not this cause.",
    evidence: &[
        ("destination", "address and port without a socket"),
        (
            "segment",
            "syn, reply (SYN-ACK) or mid-stream; null when it is not TCP",
        ),
        ("meaning", "what that says"),
        (
            "ipvs_service",
            "whether the destination is an IPVS service (which then had no entry for the packet)",
        ),
    ],
    remedy: "A SYN or datagram: start the service, or let it listen on this address and in this netns. A later segment: \
        find out why this host does not know the connection.",
    counter: Some(Counter {
        name: "TcpOutRsts (TCP), UdpNoPorts or Udp6NoPorts (UDP)",
    }),
    benign: false,
    needs: &[],
    matches: found_none,
    verdict,
    find,
    refine: None,
};

/// Whether the lookup of a TCP or UDP socket failed.
pub(super) fn found_none(signature: &Signature<'_>) -> bool {
    match signature.site {
        Site::ResetWithoutSocket => true,
        // IPVS and netfilter answer the same way: the place tells who did.
        Site::PortUnreachable => signature.at(&UDP_RECEIVE),
        Site::Free => {
            // For UDP the reason means nothing else (`__udp4_lib_rcv`, net/ipv4/udp.c; `__udp6_lib_rcv`, net/ipv6/udp.c,
            // 6.1 - 7.3), whereas TCP gives it to refused syncookies, too.
            signature.because(&["NO_SOCKET"])
                && !signature.has(bits::ICMP)
                && (signature.has(bits::UDP) || signature.at(&TCP_RECEIVE) || signature.at(&UDP_RECEIVE))
        }
        _ => false,
    }
}

/// Whether the kernel says that the lookup of a TCP socket failed.
pub(super) fn no_tcp_socket(signature: &Signature<'_>) -> bool {
    signature.because(&["NO_SOCKET"]) && signature.at(&TCP_RECEIVE)
}

/// A RST is never answered, and no error goes to a group of hosts.
pub(super) fn verdict(signature: &Signature<'_>) -> Verdict {
    if signature.bits & (bits::RST | bits::MULTICAST) != 0 {
        Verdict::Dropped
    } else {
        Verdict::Rejected
    }
}

/// TcpOutRsts counts the RSTs that are sent: none in answer to a RST or to a group of hosts (tcp_v4_send_reset,
/// net/ipv4/tcp_ipv4.c; tcp_v6_send_reset, net/ipv6/tcp_ipv6.c). UdpNoPorts counts datagrams, answered or not
/// (__udp4_lib_rcv, net/ipv4/udp.c; __udp6_lib_rcv, net/ipv6/udp.c; 5.10 - 7.x).
pub(super) fn counter(event: &RawEvent) -> CountedBy {
    let packet = event.parse();
    match (packet.protocol, packet.dst) {
        (Some(TCP), _) if event.header.bits & (bits::RST | bits::MULTICAST) != 0 => CountedBy::Nothing,
        (Some(TCP), _) => CountedBy::Named("TcpOutRsts"),
        (Some(UDP), dst) => counter_of(dst, "UdpNoPorts", "Udp6NoPorts"),
        _ => CountedBy::Cause,
    }
}

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding {
        counter: counter(event),
        ..Finding::default()
    };
    let packet = event.parse();
    let destination = endpoint(packet.dst, packet.dport);
    let segment = Segment::of(event);
    let ipvs = event.has(bits::SERVICE_IPVS);
    found
        .put("destination", destination.clone())
        .put("segment", segment.map(Segment::name))
        .put(
            "meaning",
            match segment {
                Some(Segment::Syn) => "connection refused: nobody listens there in this netns",
                Some(Segment::Reply) => {
                    "the answer to a connection that this host does not know: its socket is gone, or the request left from another host or netns with this address"
                }
                Some(Segment::MidStream) if ipvs => {
                    "IPVS has no entry for this connection: the entry expired, or another director made it"
                }
                Some(Segment::MidStream) => {
                    "a segment of a connection that this host does not know: it restarted, the address moved here, the socket was closed, or NAT was not undone (conntrack entry gone or INVALID)"
                }
                None => "nobody listens there in this netns",
            },
        )
        .put("ipvs_service", ipvs);
    let Some(port) = packet.dport else {
        return found;
    };
    let where_to = destination.unwrap_or_else(|| format!("port {port}"));
    let socket = if packet.protocol == Some(17) { "u" } else { "t" };
    match segment {
        Some(Segment::Syn) | None => {
            found.advise(
                format!("See who listens on port {port} in that netns, and on which address: start the service, or let it listen on {where_to}."),
                Some(in_netns(facts, None, &format!("ss -{socket}lnp sport = :{port}"))),
                if packet.dst.is_some_and(|to| to.is_loopback()) {
                    "Reads only. A service in another netns is not reached."
                } else {
                    "Reads only. A service that listens on 127.0.0.1 or in another netns is not reached."
                },
            );
        }
        Some(Segment::MidStream) if ipvs => {
            if let Some(service) = Entry::of(event).service_text() {
                found.advise(
                    format!("See the entries of {service} and their timeouts: an idle connection outlives its entry."),
                    Some(in_netns(facts, None, &format!("sh -c \"ipvsadm -Ln --timeout; ipvsadm -Lnc | grep -F {service}\""))),
                    "Reads only. A longer timeout (`ipvsadm --set`) keeps entries of dead connections, too; with two directors run the sync daemon.",
                );
            }
        }
        Some(Segment::Reply | Segment::MidStream) => {
            if let Some((src, sport)) = packet.src.zip(packet.sport) {
                found.advise(
                    format!("See whether conntrack knows the flow from {src} port {sport}, and counts INVALID packets."),
                    Some(in_netns(
                        facts,
                        None,
                        &format!("sh -c \"conntrack -L -p tcp -s {src} --sport {sport}; conntrack -L -q {src}; conntrack -S\""),
                    )),
                    "Reads only, but walks the table. The sender was told by RST; nothing more is lost.",
                );
            }
        }
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{Site, bits};

    use crate::diagnose::Verdict;
    use crate::diagnose::causes::sample::{ACK, Kernel, RST, SYN, SYN_ACK, Sample, V5_10, V6_1, V6_12, V7_3};

    fn tcp(kernel: Kernel, flags: u8) -> Sample {
        let sample = if kernel == V5_10 {
            Sample::freed(kernel, Site::ResetWithoutSocket, "tcp_v4_rcv")
        } else {
            Sample::freed(kernel, Site::Free, "tcp_v4_rcv").reason("NO_SOCKET")
        };
        sample
            .tcp("10.0.0.9:40000", "10.0.0.1:81", flags)
            .on("eth0")
            .bits(bits::DESTINATION_LOCAL)
    }

    fn udp(kernel: Kernel) -> Sample {
        let sample = match kernel {
            V5_10 => Sample::freed(kernel, Site::PortUnreachable, "__udp4_lib_rcv"),
            V6_1 | V6_12 => Sample::freed(kernel, Site::Free, "__udp4_lib_rcv").reason("NO_SOCKET"),
            V7_3 => Sample::freed(kernel, Site::Free, "udp_rcv").reason("NO_SOCKET"),
        };
        sample.udp("10.0.0.9:40000", "10.0.0.1:53").on("eth0")
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                [
                    tcp(kernel, SYN),
                    tcp(kernel, SYN_ACK),
                    tcp(kernel, ACK),
                    tcp(kernel, ACK).bits(bits::SERVICE_IPVS),
                    udp(kernel),
                ]
            })
            .collect()
    }

    #[test]
    fn each_segment_has_its_own_explanation_and_remedy() {
        for kernel in Kernel::ALL {
            let syn = tcp(kernel, SYN).label();
            assert_eq!(syn.verdict, Verdict::Rejected);
            assert_eq!(syn.evidence["segment"], "syn");
            assert_eq!(syn.remedy[0].command.as_deref(), Some("ss -tlnp sport = :81"));
            let reply = tcp(kernel, SYN_ACK).label();
            assert_eq!(reply.evidence["segment"], "reply");
            let later = tcp(kernel, ACK).label();
            assert_eq!(later.evidence["segment"], "mid-stream");
            assert!(later.remedy[0].command.as_deref().is_some_and(|command| {
                command.contains("conntrack -L -p tcp -s 10.0.0.9 --sport 40000")
            }));
            let ipvs = tcp(kernel, ACK).bits(bits::SERVICE_IPVS).label();
            assert_eq!(ipvs.evidence["ipvs_service"], true);
            assert!(ipvs.remedy[0].action.contains("10.0.0.1:81"));
            let meanings = [&syn, &reply, &later, &ipvs].map(|drop| drop.evidence["meaning"].clone());
            for (index, meaning) in meanings.iter().enumerate() {
                assert!(!meanings[..index].contains(meaning), "{meaning}");
            }
        }
    }

    #[test]
    fn the_counter_is_that_of_protocol_and_family() {
        for kernel in Kernel::ALL {
            let counter = |sample: Sample| sample.label().counter;
            assert_eq!(counter(tcp(kernel, SYN)).as_deref(), Some("TcpOutRsts"));
            assert_eq!(counter(udp(kernel)).as_deref(), Some("UdpNoPorts"));
            let six = udp(kernel).udp("[fd00::9]:40000", "[fd00::1]:53");
            assert_eq!(counter(six).as_deref(), Some("Udp6NoPorts"));
            // No RST answers a RST.
            assert_eq!(counter(tcp(kernel, RST).bits(bits::RST)), None);
        }
    }

    #[test]
    fn udp_asks_for_udp_sockets() {
        for kernel in Kernel::ALL {
            let drop = udp(kernel).label();
            assert_eq!(drop.cause, "no-socket");
            assert!(drop.evidence["segment"].is_null());
            assert_eq!(drop.remedy[0].command.as_deref(), Some("ss -ulnp sport = :53"));
        }
    }
}
