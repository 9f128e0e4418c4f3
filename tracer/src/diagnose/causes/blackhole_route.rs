//! `blackhole-route`: a route that says that packets end here.

use std::net::IpAddr;

use droptrace_common::{FieldId, Site, bits};

use super::values::{device, in_netns, on_the_way};
use crate::diagnose::{Cause, Facts, Family, Finding, Need, RawEvent, Verdict};

/// Functions that free what a refusing route gets: IPv4; IPv6 prohibit and unreachable; IPv6 blackhole.
const REFUSE: [&str; 6] = [
    "ip_error",
    "ip6_pkt_drop",
    "ip6_pkt_prohibit",
    "ip6_pkt_discard",
    "dst_discard",
    "dst_discard_out",
];

/// The route is of type blackhole, prohibit or unreachable.
pub(super) static CAUSE: Cause = Cause {
    slug: "blackhole-route",
    family: Family::Routing,
    title: "route of type blackhole, prohibit or unreachable",
    mechanism: "The route to the destination is of a type that refuses packets, as somebody configured (ip route add blackhole …), a routing daemon \
        does for networks that it announces, or a rule of `ip rule` says: unreachable tells the sender host unreachable, prohibit tells it that the way is \
        filtered, blackhole tells nothing. ip_error (net/ipv4/route.c) frees received IPv4 packets, ip6_pkt_drop (net/ipv6/route.c) IPv6 ones, and \
        dst_discard those of an IPv6 blackhole; which type it is says the error that the route keeps (EHOSTUNREACH, EACCES, EINVAL). With \
        forwarding off IPv4 does not ask for the type: that is not-forwarding. Programs on this host are refused by connect() or sendto(), and no packet is lost.",
    evidence: &[
        ("destination", "address that the route is for"),
        (
            "route_type",
            "blackhole, prohibit or unreachable, by the error that the packet's route keeps",
        ),
        (
            "route_now",
            "type of the route that the routing table answers by now, such as blackhole or unicast",
        ),
        ("interface", "device that the packet came by"),
    ],
    remedy: "Find who set the route and why: a daemon that announces the network, a block list, or what was left of a network that moved.",
    counter: None,
    benign: false,
    needs: &[Need::Route],
    matches: |signature| {
        signature.site == Site::Free
            && signature.has(bits::ROUTE_REFUSES)
            && (signature.unspecified() || signature.because(&["IP_INNOROUTES", "IP_OUTNOROUTES"]))
            && signature.at(&REFUSE)
    },
    verdict: |signature| {
        // A blackhole says nothing. IPv4 has prohibit at the same place with the same bits: dropped says too little of it.
        if signature.has(bits::NO_ROUTE) || signature.at(&REFUSE[1..4]) {
            Verdict::Rejected
        } else {
            Verdict::Dropped
        }
    },
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let packet = event.parse();
    let interface = device(event, facts);
    let kind = event
        .field(FieldId::RouteError)
        .and_then(|error| match error as i32 {
            libc::EINVAL => Some("blackhole"),
            libc::EACCES => Some("prohibit"),
            libc::EHOSTUNREACH => Some("unreachable"),
            _ => None,
        });
    found
        .put("destination", packet.dst.map(|ip| ip.to_string()))
        .put("route_type", kind)
        .put("route_now", facts.route.as_ref().map(|route| route.kind.clone()))
        .put("interface", interface);
    let Some(dst) = packet.dst else {
        return found;
    };
    let (version, kind) = (
        if matches!(dst, IpAddr::V6(_)) { "-6" } else { "-4" },
        kind.unwrap_or("blackhole"),
    );
    found.advise(
        format!("Find the route of type {kind} that covers {dst}; `proto` says who set it."),
        Some(in_netns(
            facts,
            None,
            &format!("ip {version} route show table all type {kind}"),
        )),
        "Reads only. If none covers it, a rule does: see `ip rule`. To let packets through, delete the route (ip route del), which a routing daemon may set again.",
    );
    found.advise(
        format!("See what the routing table answers for {dst} now."),
        Some(in_netns(facts, None, &on_the_way(event, facts, dst))),
        "Reads only. Invalid argument means blackhole, permission denied prohibit, no route to host unreachable.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site, bits};

    use crate::diagnose::causes::sample::{Kernel, SYN, Sample, V6_1};
    use crate::diagnose::{RouteAnswer, Verdict};

    fn at(kernel: Kernel, location: &str, error: i32) -> Sample {
        let sample = Sample::freed(kernel, Site::Free, location);
        let sample = if location == "ip_error" {
            sample.tcp("10.0.0.9:40000", "198.51.100.7:80", SYN)
        } else {
            sample.tcp("[fd00::9]:40000", "[fd01::1]:80", SYN)
        };
        let no_route = if error == libc::EHOSTUNREACH {
            bits::NO_ROUTE
        } else {
            0
        };
        sample
            .on("eth0")
            .bits(bits::ROUTE_REFUSES | no_route)
            .field(FieldId::RouteError, error as u64)
            .fact(|facts| {
                facts.route = Some(RouteAnswer {
                    kind: "prohibit".to_owned(),
                    ..RouteAnswer::default()
                });
            })
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                [
                    at(kernel, "ip_error", libc::EINVAL),
                    at(kernel, "ip_error", libc::EACCES),
                    at(kernel, "ip_error", libc::EHOSTUNREACH),
                    at(kernel, "ip6_pkt_drop.isra.0", libc::EACCES).reason_since(V6_1, "IP_INNOROUTES"),
                    at(kernel, "ip6_pkt_drop.isra.0", libc::EHOSTUNREACH).reason_since(V6_1, "IP_INNOROUTES"),
                    at(kernel, "dst_discard", libc::EINVAL),
                ]
            })
            .collect()
    }

    #[test]
    fn the_error_of_the_route_tells_its_type() {
        for kernel in Kernel::ALL {
            for (error, kind, verdict) in [
                (libc::EINVAL, "blackhole", Verdict::Dropped),
                (libc::EHOSTUNREACH, "unreachable", Verdict::Rejected),
            ] {
                let drop = at(kernel, "ip_error", error).label();
                assert_eq!(drop.evidence["route_type"], kind);
                assert_eq!(drop.evidence["route_now"], "prohibit");
                assert_eq!(drop.verdict, verdict);
                assert_eq!(
                    drop.remedy[0].command,
                    Some(format!("ip -4 route show table all type {kind}"))
                );
            }
        }
    }
}
