//! `ttl-exceeded`: the packet has used up its hops.

use droptrace_common::Site;

use super::values::{device, in_netns, on_the_way};
use crate::diagnose::{
    Cause, CountedBy, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict,
};

/// A packet to be forwarded has a TTL or hop limit of 1.
pub(super) static CAUSE: Cause = Cause {
    slug: "ttl-exceeded",
    family: Family::Routing,
    title: "TTL or hop limit used up",
    mechanism: "Each router takes one from a packet's TTL (IPv6: hop limit) and does not forward one that has only 1 left: \
        ip_forward (net/ipv4/ip_forward.c) or ip6_forward (net/ipv6/ip6_output.c) frees it and tells the sender time exceeded. From 6.1 \
        on the free carries the reason IP_INHDR; before, the ICMP message tells. Packets that this host makes do not come here.",
    evidence: &[
        ("ttl", "TTL or hop limit of the packet"),
        ("interface", "device that the packet came by"),
        (
            "next_interface",
            "device by which its route leaves; null when there is no route any more",
        ),
        ("next_gateway", "gateway of that route, where it has one"),
        ("meaning", "what the loss says"),
    ],
    remedy: "Find the loop: two routers that each send the packet to the other. traceroute sends such packets on purpose.",
    counter: Some(Counter {
        name: "IpInHdrErrors or Ip6InHdrErrors",
    }),
    benign: false,
    needs: &[Need::Route],
    matches: |signature| match signature.site {
        Site::TtlExceeded => true,
        Site::Free => signature.because(&["IP_INHDR"]) && signature.at(&["ip_forward", "ip6_forward"]),
        _ => false,
    },
    verdict: |_: &Signature<'_>| Verdict::Rejected,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let packet = event.parse();
    found.counter = CountedBy::Named(if packet.is_ipv6() {
        "Ip6InHdrErrors"
    } else {
        "IpInHdrErrors"
    });
    let interface = device(event, facts);
    let ttl = match event.packet.first().map(|first| first >> 4) {
        Some(4) => event.packet.get(8),
        Some(6) => event.packet.get(7),
        _ => None,
    };
    let route = facts.route.as_ref();
    let next = route.and_then(|route| route.device.as_deref());
    let back = next.is_some() && next == interface;
    found
        .put("ttl", ttl.copied())
        .put("interface", interface)
        .put("next_interface", next)
        .put(
            "next_gateway",
            route.and_then(|route| route.gateway).map(|ip| ip.to_string()),
        )
        .put(
            "meaning",
            if back {
                "the packet would leave by the device that it came by: it goes round between this host and another router there, unless traceroute sent it"
            } else {
                "the packet went round in a loop that this host is part of, came from too far away, or traceroute sent it"
            },
        );
    let Some(dst) = packet.dst else {
        return found;
    };
    found.advise(
        format!(
            "See where this netns sends packets to {dst}: in a loop, that router has a route back to here."
        ),
        Some(in_netns(facts, None, &on_the_way(event, facts, dst))),
        "Reads only. The route that is wrong may be on the other router.",
    );
    found.advise(
        format!("Follow the way to {dst}: addresses that repeat are the routers of the loop."),
        Some(in_netns(facts, None, &format!("traceroute -n {dst}"))),
        "Sends some dozens of datagrams, the last of which expire on the way.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{Site, route};

    use crate::diagnose::Verdict;
    use crate::diagnose::causes::sample::{Kernel, SYN, Sample, V5_10, V6_1, of_both_versions};

    fn at(kernel: Kernel, version: u8) -> Sample {
        let (site, place) = match (kernel, version) {
            (V5_10, 4) => (Site::TtlExceeded, "ip_forward"),
            (V5_10, _) => (Site::TtlExceeded, "ip6_forward"),
            (_, 4) => (Site::Free, "ip_forward"),
            _ => (Site::Free, "ip6_forward"),
        };
        let sample = Sample::freed(kernel, site, place).reason_since(V6_1, "IP_INHDR");
        let (sample, gateway) = if version == 4 {
            (sample.tcp("10.0.0.9:40000", "10.0.1.7:80", SYN), "10.0.0.254")
        } else {
            (sample.tcp("[fd00::9]:40000", "[fd01::7]:80", SYN), "fd00::fe")
        };
        sample
            .on("eth0")
            .field(droptrace_common::FieldId::Route, route::ELSEWHERE)
            .routed("eth0", gateway)
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        of_both_versions(at)
    }

    #[test]
    fn a_route_back_by_the_same_device_is_a_loop() {
        for kernel in Kernel::ALL {
            let drop = at(kernel, 4).label();
            assert_eq!(drop.verdict, Verdict::Rejected);
            // The samples' own TTL; that of a real packet is in the scenario.
            assert_eq!(drop.evidence["ttl"], 64);
            assert_eq!(at(kernel, 6).label().evidence["ttl"], 64);
            assert_eq!(drop.evidence["next_gateway"], "10.0.0.254");
            let meaning = |sample: Sample| sample.label().evidence["meaning"].clone();
            assert!(
                meaning(at(kernel, 4))
                    .as_str()
                    .is_some_and(|text| text.contains("goes round between"))
            );
            let on = at(kernel, 4).fact(|facts| {
                if let Some(route) = &mut facts.route {
                    route.device = Some("eth1".to_owned());
                }
            });
            assert!(meaning(on).as_str().is_some_and(|text| text.contains("too far")));
            assert_eq!(
                drop.remedy[0].command.as_deref(),
                Some("ip route get 10.0.1.7 from 10.0.0.9 iif eth0")
            );
        }
    }

    #[test]
    fn a_bad_header_elsewhere_is_not_this() {
        let drop = Sample::freed(V6_1, Site::Free, "ip_rcv_core")
            .reason("IP_INHDR")
            .label();
        assert_ne!(drop.cause, "ttl-exceeded");
    }
}
