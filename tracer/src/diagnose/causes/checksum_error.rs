//! `checksum-error`: the packet is not what its sender sent.

use droptrace_common::{Site, bits};

use super::{
    sums::wrong,
    values::{in_netns, on},
};
use crate::diagnose::{Cause, CountedBy, Counter, Facts, Family, Finding, RawEvent, Signature, Verdict};

/// Where UDP finds a wrong checksum when a program reads, without a reason before 6.15 or so.
const READS: [&str; 4] = [
    "udp_recvmsg",
    "udpv6_recvmsg",
    "__first_packet_length",
    "first_packet_length",
];
/// Where kernels without reasons free packets with wrong checksums, and others.
const RECEIVE: [&str; 10] = [
    "ip_rcv",
    "ip_rcv_core",
    "tcp_v4_rcv",
    "tcp_v6_rcv",
    "__udp4_lib_rcv",
    "__udp6_lib_rcv",
    "udp_queue_rcv_one_skb",
    "udpv6_queue_rcv_one_skb",
    "icmp_rcv",
    "icmpv6_rcv",
];

/// A checksum does not fit its packet.
pub(super) static CAUSE: Cause = Cause {
    slug: "checksum-error",
    family: Family::Device,
    title: "wrong checksum",
    mechanism: "The checksum of the IPv4 header, or that of TCP, UDP or ICMP, does not fit the packet: bytes changed on the way, or the sender made a wrong one. The kernel frees the packet and \
        counts InCsumErrors; from 6.1 on with the reason IP_CSUM, TCP_CSUM, UDP_CSUM or ICMP_CSUM. UDP is mostly checked only when a program reads (udp_recvmsg, net/ipv4/udp.c); the \
        free names no network namespace then. On 5.10 the captured bytes must prove it, which takes a packet of at most 128 bytes for TCP and UDP; others stay unknown.",
    evidence: &[
        ("layer", "whose checksum: IPv4 header, TCP, UDP, ICMP or ICMPv6"),
        (
            "carried",
            "the checksum that the packet has; null where not all of it was captured",
        ),
        (
            "correct",
            "the one that it should have; null where not all of it was captured",
        ),
        ("interface", "device that the packet came by"),
    ],
    remedy: "Find where bytes change: a bad cable, port or memory, a driver's or virtual machine's offload, or a middlebox that rewrites packets.",
    counter: Some(Counter {
        name: "InCsumErrors of IpExt, Tcp, Udp, Udp6, Icmp or Icmp6",
    }),
    benign: false,
    needs: &[],
    matches: |signature| {
        signature.because(&["IP_CSUM", "TCP_CSUM", "UDP_CSUM", "ICMP_CSUM"])
            || signature.site == Site::Free
                && signature.unspecified()
                && signature.has(bits::UDP)
                && signature.at(&READS)
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

/// Whether the captured bytes prove it, where the kernel says nothing.
pub(super) fn proven(event: &RawEvent, facts: &Facts) -> bool {
    let signature = Signature::of_event(event, facts);
    signature.site == Site::Free
        && signature.reason.is_none()
        && signature.at(&RECEIVE)
        && event.header.iif != 0
        && wrong(&event.packet).is_some()
}

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let packet = event.parse();
    let v6 = packet.is_ipv6();
    let wrong = wrong(&event.packet);
    let layer = match (facts.reason.as_deref(), packet.protocol) {
        (Some("IP_CSUM"), _) => Some("IPv4 header"),
        (Some("TCP_CSUM"), _) => Some("TCP"),
        (Some("UDP_CSUM"), _) => Some("UDP"),
        (Some("ICMP_CSUM"), _) => Some(if v6 { "ICMPv6" } else { "ICMP" }),
        _ => wrong.map(|wrong| wrong.layer).or(Some("UDP")),
    };
    let of_layer = wrong.filter(|wrong| layer == Some(wrong.layer));
    let interface = on(event, facts);
    found
        .put("layer", layer)
        .put("carried", of_layer.map(|wrong| format!("{:#06x}", wrong.carried)))
        .put("correct", of_layer.map(|wrong| format!("{:#06x}", wrong.correct)))
        .put("interface", interface);
    found.counter = CountedBy::Named(match (layer, v6) {
        (Some("IPv4 header"), _) => "IpExtInCsumErrors",
        (Some("TCP"), _) => "TcpInCsumErrors",
        (Some("ICMP"), _) => "IcmpInCsumErrors",
        (Some("ICMPv6"), _) => "Icmp6InCsumErrors",
        (_, false) => "UdpInCsumErrors",
        (_, true) => "Udp6InCsumErrors",
    });
    match interface {
        Some(interface) => found.advise(
            format!("See whether {interface} counts errors, too, and which offloads it has."),
            Some(in_netns(
                facts,
                None,
                &format!("sh -c \"ip -s -s link show {interface}; ethtool -k {interface}\""),
            )),
            "Reads only. Errors of the device point to cable or port; none, to a sender, an offload or a middlebox.",
        ),
        None => found.advise(
            "See which protocol has how many, in the network namespace of the socket.",
            Some(in_netns(facts, None, "nstat -az *InCsumErrors")),
            "Reads only.",
        ),
    };
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::causes::sample::{Kernel, SYN, Sample, V5_10, V6_1, V6_12};

    /// The samples' packets have a checksum of zero: right for UDP, wrong for the IPv4 header and TCP.
    fn header(kernel: Kernel) -> Sample {
        Sample::freed(kernel, Site::Free, "ip_rcv_core.isra.0")
            .reason_since(V6_1, "IP_CSUM")
            .udp("10.0.0.9:4000", "10.0.0.1:53")
            .on("eth0")
    }

    fn tcp(kernel: Kernel) -> Sample {
        Sample::freed(kernel, Site::Free, "tcp_v6_rcv")
            .reason_since(V6_1, "TCP_CSUM")
            .tcp("[fd00::9]:4000", "[fd00::1]:80", SYN)
            .on("eth0")
    }

    fn read(kernel: Kernel) -> Sample {
        Sample::freed(kernel, Site::Free, "udpv6_recvmsg").udp("[fd00::9]:4000", "[fd00::1]:53")
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| [header(kernel), tcp(kernel), read(kernel)])
            .collect()
    }

    #[test]
    fn layer_and_counter_are_named() {
        for kernel in Kernel::ALL {
            let drop = header(kernel).label();
            assert_eq!(drop.evidence["layer"], "IPv4 header");
            assert_eq!(drop.evidence["carried"], "0x0000");
            assert_eq!(drop.counter.as_deref(), Some("IpExtInCsumErrors"));
            assert_eq!(tcp(kernel).label().counter.as_deref(), Some("TcpInCsumErrors"));
            let drop = read(kernel).label();
            assert_eq!(drop.counter.as_deref(), Some("Udp6InCsumErrors"));
            assert!(drop.evidence["carried"].is_null());
        }
    }

    #[test]
    fn without_reasons_the_bytes_must_prove_it() {
        // A datagram over IPv6 without a checksum proves nothing; nor does what this host sends.
        let place = "__udp6_lib_rcv";
        let datagram = Sample::freed(V5_10, Site::Free, place).udp("[fd00::9]:4000", "[fd00::1]:53");
        assert_eq!(datagram.on("eth0").label().cause, "unknown");
        let sent = Sample::freed(V5_10, Site::Free, "tcp_v4_rcv").tcp("10.0.0.1:4000", "10.0.0.9:80", SYN);
        assert_eq!(sent.leaving("eth0").label().cause, "unknown");
        // With reasons, the kernel would say so.
        let other = Sample::freed(V6_12, Site::Free, "tcp_v4_rcv").tcp("10.0.0.9:4000", "10.0.0.1:80", SYN);
        assert_eq!(other.on("eth0").label().cause, "unknown");
    }
}
