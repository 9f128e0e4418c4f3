//! `neigh-failed`: the next hop does not answer ARP or neighbour discovery.

use droptrace_common::{FieldId, Site, bits};

use super::values::{Segment, counter_of, endpoint, in_netns};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// Address resolution failed.
pub(super) static CAUSE: Cause = Cause {
    slug: "neigh-failed",
    family: Family::Routing,
    title: "next hop does not answer ARP or neighbour discovery",
    mechanism: "Before a packet leaves by an Ethernet-like device the hardware address of its next hop must be known. The \
        kernel asks (ARP, or neighbour solicitation), three times in about 3 s, while up to unres_qlen_bytes of packets wait; then the \
        neighbour is FAILED, and arp_error_report or ndisc_error_report frees each of them and tells the sender host \
        unreachable (net/ipv4/arp.c, net/ipv6/ndisc.c). From 6.1 on IPv4 frees carry NEIGH_FAILED, also for packets that come while the \
        state is FAILED. The drop comes seconds after the packet was sent.",
    evidence: &[
        ("neighbour", "next hop that does not answer"),
        ("interface", "device it was asked on"),
        (
            "segment",
            "syn, reply (SYN-ACK) or mid-stream; null when it is not TCP",
        ),
        ("meaning", "what the loss says"),
    ],
    remedy: "The next hop is down, has another address, or is on another network; or the route names a wrong gateway or \
        device.",
    counter: Some(Counter {
        name: "arp_cache or ndisc_cache res_failed (/proc/net/stat)",
    }),
    benign: false,
    needs: &[Need::Owner],
    matches: |signature| match signature.site {
        Site::NeighbourFailed => true,
        Site::Free => {
            signature.because(&["NEIGH_FAILED"])
                || signature.unspecified()
                    && signature.at(&["neigh_invalidate", "arp_error_report", "ndisc_error_report"])
        }
        _ => false,
    },
    verdict: |_: &Signature<'_>| Verdict::Rejected,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let packet = event.parse();
    let neighbour = event.address(FieldId::NeighbourHi, FieldId::NeighbourLo);
    let interface = [
        event.field(FieldId::NeighbourIfindex).map(|index| index as u32),
        Some(event.header.ifindex),
    ]
    .into_iter()
    .flatten()
    .find_map(|index| facts.devices.get(&index))
    .map(String::as_str);
    let segment = Segment::of(event);
    found
        .put("neighbour", neighbour.map(|ip| ip.to_string()))
        .put("interface", interface)
        .put("segment", segment.map(Segment::name))
        .put(
            "meaning",
            match segment {
                Some(Segment::Syn) if event.has(bits::IPVS_PROPERTY) => {
                    "IPVS sent a new connection to a real server that is not there"
                }
                Some(Segment::Syn) => "the connection cannot be opened: host unreachable",
                Some(Segment::Reply) => "the client that this host answers is not reachable",
                Some(Segment::MidStream) => {
                    "the other end of a running connection, or the gateway to it, went away"
                }
                None => "the destination, or the gateway to it, is not reachable",
            },
        );
    found.counter = counter_of(
        neighbour,
        "arp_cache res_failed (/proc/net/stat)",
        "ndisc_cache res_failed (/proc/net/stat)",
    );
    let target = neighbour.or(packet.dst);
    let (Some(target), Some(dst)) = (target, endpoint(packet.dst, None)) else {
        return found;
    };
    found.advise(
        format!("See the route to {dst} and the neighbour's state."),
        Some(in_netns(
            facts,
            None,
            &format!("sh -c \"ip route get {dst}; ip neigh show to {target}\""),
        )),
        "Reads only. A neighbour that is FAILED is asked again with the next packet.",
    );
    if let (Some(interface), std::net::IpAddr::V4(_)) = (interface, target) {
        found.advise(
            format!("Ask {target} by hand: no answer means it is down, not on {interface}'s network, or a switch or VLAN is between."),
            Some(in_netns(facts, None, &format!("arping -c 3 -I {interface} {target}"))),
            "Sends three ARP requests.",
        );
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site, bits};

    use crate::diagnose::causes::sample::{Kernel, SYN, Sample, V5_10, V6_1, V6_12, of_both_versions};

    fn at(kernel: Kernel, version: u8) -> Sample {
        let site = if kernel == V5_10 || version == 6 {
            Site::NeighbourFailed
        } else {
            Site::Free
        };
        let sample = Sample::freed(kernel, site, "neigh_invalidate");
        if version == 4 {
            sample
                .reason_since(V6_1, "NEIGH_FAILED")
                .tcp("10.0.0.1:40000", "10.9.0.7:80", SYN)
                .address(FieldId::NeighbourHi, FieldId::NeighbourLo, "10.0.0.254")
        } else {
            sample.tcp("[fd00::1]:40000", "[fd00::7]:80", SYN).address(
                FieldId::NeighbourHi,
                FieldId::NeighbourLo,
                "fd00::7",
            )
        }
        .leaving("eth0")
        .field(FieldId::NeighbourIfindex, 3)
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        of_both_versions(at)
    }

    #[test]
    fn next_hop_is_asked_for_not_the_destination() {
        for kernel in Kernel::ALL {
            let drop = at(kernel, 4).label();
            assert_eq!(drop.evidence["neighbour"], "10.0.0.254");
            assert_eq!(drop.evidence["interface"], "eth0");
            assert_eq!(
                drop.remedy[0].command.as_deref(),
                Some("sh -c \"ip route get 10.9.0.7; ip neigh show to 10.0.0.254\"")
            );
            assert_eq!(
                drop.remedy[1].command.as_deref(),
                Some("arping -c 3 -I eth0 10.0.0.254")
            );
            // There is no ARP for IPv6.
            assert_eq!(at(kernel, 6).label().remedy.len(), 1);
        }
    }

    #[test]
    fn a_packet_from_ipvs_points_to_the_real_server() {
        let drop = at(V6_12, 4).bits(bits::IPVS_PROPERTY).label();
        assert!(
            drop.evidence["meaning"]
                .as_str()
                .is_some_and(|text| text.contains("real server"))
        );
    }
}
