//! `no-route`: the routing table has no way to the destination.

use droptrace_common::{FieldId, Site, bits};

use super::values::{Segment, device, in_netns, on_the_way, sysctl_number};
use crate::diagnose::{
    Cause, CountedBy, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict,
};

/// Functions that free an IPv6 packet for its route.
const IPV6_DISCARD: [&str; 3] = ["ip6_pkt_drop", "ip6_pkt_discard", "ip6_pkt_discard_out"];

/// There is no route, or forwarding is off.
pub(super) static CAUSE: Cause = Cause {
    slug: "no-route",
    family: Family::Routing,
    title: "no route to the destination",
    mechanism: "No route matches the destination of the packet (network unreachable). ip_error (net/ipv4/route.c) frees received IPv4 packets, ip6_pkt_discard (net/ipv6/route.c) IPv6 ones, __ip_queue_xmit \
        (net/ipv4/ip_output.c) segments of a local connection whose route went away. The sender is told by ICMP. With forwarding off \
        IPv4 has not-forwarding instead. A route that refuses is blackhole-route.",
    evidence: &[
        ("destination", "address without a route"),
        ("interface", "device that the packet came by"),
        (
            "forwarding",
            "whether that device forwards (net.ipv4 or net.ipv6.conf.DEVICE.forwarding)",
        ),
        (
            "route_error",
            "what the lookup answered: network-unreachable; null when the packet has no route at all",
        ),
        (
            "segment",
            "syn, reply (SYN-ACK) or mid-stream; null when it is not TCP",
        ),
        ("meaning", "what the loss says"),
    ],
    remedy: "Add a route, or find out why the packet comes here.",
    counter: Some(Counter {
        name: "IpExtInNoRoutes or IpOutNoRoutes; Ip6InNoRoutes or Ip6OutNoRoutes for IPv6",
    }),
    benign: false,
    needs: &[
        Need::Owner,
        Need::Sysctl("net.ipv4.conf.{device}.forwarding"),
        Need::Sysctl("net.ipv6.conf.{device}.forwarding"),
    ],
    matches,
    verdict,
    find,
    refine: None,
};

fn matches(signature: &Signature<'_>) -> bool {
    if signature.site != Site::Free {
        return false;
    }
    let unreachable =
        signature.bits & (bits::NO_ROUTE | bits::ROUTE_REFUSES | bits::NOT_FORWARDING) == bits::NO_ROUTE;
    if signature.at(&IPV6_DISCARD) {
        // Routes that refuse share function and reason.
        return unreachable
            && (signature.unspecified() || signature.because(&["IP_INNOROUTES", "IP_OUTNOROUTES"]));
    }
    signature.because(&["IP_INNOROUTES", "IP_OUTNOROUTES"])
        || signature.unspecified()
            && (signature.at(&["ip_error"]) && unreachable || signature.at(&["__ip_queue_xmit"]))
}

/// The sender is told unless it is local.
fn verdict(signature: &Signature<'_>) -> Verdict {
    if signature.at(&["ip_error"]) || signature.at(&IPV6_DISCARD) {
        Verdict::Rejected
    } else {
        Verdict::Dropped
    }
}

/// What ip_error (net/ipv4/route.c), __ip_queue_xmit (net/ipv4/ip_output.c) and ip6_pkt_drop (net/ipv6/route.c) count,
/// 5.10 - 7.x.
fn counter(event: &RawEvent, facts: &Facts) -> CountedBy {
    let signature = Signature::of_event(event, facts);
    if signature.at(&["__ip_queue_xmit"]) {
        return CountedBy::Named("IpOutNoRoutes");
    }
    if signature.at(&["ip_error"]) {
        return CountedBy::Named("IpExtInNoRoutes");
    }
    if !signature.at(&IPV6_DISCARD) {
        return CountedBy::Cause;
    }
    match signature.reason {
        Some("IP_INNOROUTES") => CountedBy::Named("Ip6InNoRoutes"),
        Some("IP_OUTNOROUTES") => CountedBy::Named("Ip6OutNoRoutes"),
        _ if signature.at(&["ip6_pkt_discard_out"]) || event.header.iif == 0 => {
            CountedBy::Named("Ip6OutNoRoutes")
        }
        // A received packet to the unspecified address is counted elsewhere.
        _ if event.parse().dst.is_some_and(|dst| dst.is_unspecified()) => CountedBy::Cause,
        _ => CountedBy::Named("Ip6InNoRoutes"),
    }
}

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let packet = event.parse();
    let interface = device(event, facts);
    let version = if packet.is_ipv6() { "ipv6" } else { "ipv4" };
    let forwarding = interface
        .and_then(|interface| sysctl_number(facts, &format!("net.{version}.conf.{interface}.forwarding")))
        .map(|value| value != 0);
    let segment = Segment::of(event);
    let outgoing = event.header.iif == 0;
    found.counter = counter(event, facts);
    found
        .put("destination", packet.dst.map(|ip| ip.to_string()))
        .put("interface", interface)
        .put("forwarding", forwarding)
        .put(
            "route_error",
            event
                .field(FieldId::RouteError)
                .and_then(|error| match error as i32 {
                    libc::ENETUNREACH => Some("network-unreachable"),
                    _ => None,
                }),
        )
        .put("segment", segment.map(Segment::name))
        .put(
            "meaning",
            match segment {
                Some(Segment::MidStream) if outgoing => "the route of a running local connection went away",
                Some(Segment::Reply) if outgoing => "this host cannot answer a client: no route back to it",
                Some(Segment::Syn) => "a connection cannot be opened through or to this host",
                Some(Segment::Reply) => "the answer to a connection does not find its way on from here",
                Some(Segment::MidStream) => "a running connection is routed here, where its way ends",
                None if outgoing => "this host has no way to the destination",
                None => "the packet is routed here, where its way ends",
            },
        );
    let Some(dst) = packet.dst else {
        return found;
    };
    found.advise(
        format!("See how this netns routes {dst}, and add a route if the packet is right here."),
        Some(in_netns(facts, None, &on_the_way(event, facts, dst))),
        "Reads only. A new route moves all traffic to that network.",
    );
    if let (Some(interface), Some(false), false) = (interface, forwarding, outgoing) {
        found.advise(
            format!("Forwarding is off on {interface}: turn it on only if this host is to be a router for {dst}; else find out why the packet is sent here."),
            Some(in_netns(
                facts,
                None,
                &format!("sysctl -w net.{version}.conf.{interface}.forwarding=1"),
            )),
            "This host then forwards whatever its rules allow; for IPv6 it also stops taking router advertisements unless accept_ra=2.",
        );
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site, bits};

    use crate::diagnose::causes::sample::{ACK, Kernel, SYN, Sample, V6_1};
    use crate::diagnose::{Direction, Verdict};

    fn received(kernel: Kernel) -> Sample {
        Sample::freed(kernel, Site::Free, "ip_error")
            .reason_since(V6_1, "IP_INNOROUTES")
            .tcp("10.0.0.9:40000", "198.51.100.7:80", SYN)
            .on("eth0")
            .bits(bits::NO_ROUTE)
            .field(FieldId::RouteError, libc::ENETUNREACH as u64)
            .sysctl("net.ipv4.conf.eth0.forwarding", "1")
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                [
                    received(kernel),
                    Sample::freed(kernel, Site::Free, "__ip_queue_xmit")
                        .reason_since(V6_1, "IP_OUTNOROUTES")
                        .tcp("10.0.0.1:40000", "198.51.100.7:80", ACK)
                        .leaving("eth0"),
                    Sample::freed(kernel, Site::Free, "ip6_pkt_drop.isra.0")
                        .tcp("[fd00::9]:40000", "[fd01::1]:80", SYN)
                        .on("eth0")
                        .bits(bits::NO_ROUTE)
                        .sysctl("net.ipv6.conf.eth0.forwarding", "0"),
                ]
            })
            .collect()
    }

    #[test]
    fn forwarding_that_is_off_stands_in_the_way_too() {
        for kernel in Kernel::ALL {
            let on = received(kernel).label();
            assert_eq!(on.verdict, Verdict::Rejected);
            assert_eq!(on.evidence["forwarding"], true);
            assert_eq!(on.evidence["route_error"], "network-unreachable");
            assert_eq!(on.remedy.len(), 1);
            assert_eq!(
                on.remedy[0].command.as_deref(),
                Some("ip route get 198.51.100.7 from 10.0.0.9 iif eth0")
            );
            assert_eq!(on.counter.as_deref(), Some("IpExtInNoRoutes"));
        }
        let off = samples()[2].label();
        assert_eq!(off.evidence["forwarding"], false);
        assert_eq!(
            off.remedy[1].command.as_deref(),
            Some("sysctl -w net.ipv6.conf.eth0.forwarding=1")
        );
    }

    #[test]
    fn an_outgoing_segment_is_asked_for_without_a_device() {
        let drop = samples()[1].label();
        assert_eq!(drop.direction, Some(Direction::Out));
        assert_eq!(drop.counter.as_deref(), Some("IpOutNoRoutes"));
        assert_eq!(samples()[2].label().counter.as_deref(), Some("Ip6InNoRoutes"));
        assert_eq!(
            drop.evidence["meaning"],
            "the route of a running local connection went away"
        );
        assert_eq!(
            drop.remedy[0].command.as_deref(),
            Some("ip route get 198.51.100.7")
        );
    }
}
