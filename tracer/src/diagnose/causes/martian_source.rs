//! `martian-source`: a source address that no packet may have.

use droptrace_common::{Site, bits};

use super::{
    local_source, rp_filter,
    values::{device, in_netns},
};
use crate::diagnose::{Cause, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// The source address of a received packet is invalid.
pub(super) static CAUSE: Cause = Cause {
    slug: "martian-source",
    family: Family::SourceCheck,
    title: "source address of the received packet is invalid (martian)",
    mechanism: "A received IPv4 packet is refused when its source address is loopback (127.0.0.0/8, unless \
        route_localnet), multicast, broadcast or 0.0.0.0/8, or when the route to it is neither unicast nor local \
        (ip_route_input_slow and __fib_validate_source, net/ipv4/route.c and fib_frontend.c, 5.10 - 7.3). \
        ip_handle_martian_source notes it and logs it if log_martians is on; the global in_martian_src of \
        /proc/net/stat/rt_cache grows.",
    evidence: &[
        ("source", "source address of the packet"),
        (
            "source_kind",
            "loopback, multicast, broadcast, zero, or by-route (the route to it is of another type)",
        ),
        ("interface", "device that the packet came by"),
        (
            "reverse_kind",
            "type of the route to the source, where it is neither unicast nor local",
        ),
    ],
    remedy: "Find the sender by its hardware address; on this side only a loopback source can be let in (route_localnet).",
    counter: None,
    benign: false,
    needs: &[
        Need::SourceHolder,
        Need::ReverseRoute,
        Need::Sysctl("net.ipv4.conf.all.accept_local"),
        Need::Sysctl("net.ipv4.conf.{device}.accept_local"),
    ],
    matches: |signature| {
        signature.because(&["IP_INVALID_SOURCE"])
            || signature.site == Site::MartianSource
                && (signature.unspecified() || signature.because(&["IP_LOCALNET"]))
                && !rp_filter::counted(signature)
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    // The kernel's table of addresses may be behind: the facts know better.
    refine: Some(|event, facts| {
        let unspecified = facts
            .reason
            .as_deref()
            .is_none_or(|reason| reason == "NOT_SPECIFIED");
        let held = matches!(facts.source_holder, Some(Some(_)));
        (unspecified && held && !event.has(bits::SOURCE_NOT_UNICAST)).then_some(&local_source::CAUSE)
    }),
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let source = event.parse().src;
    let interface = device(event, facts);
    let kind = source.map(|source| match source {
        ip if ip.is_loopback() => "loopback",
        ip if ip.is_multicast() => "multicast",
        std::net::IpAddr::V4(ip) if ip.is_broadcast() => "broadcast",
        std::net::IpAddr::V4(ip) if ip.octets()[0] == 0 => "zero",
        _ => "by-route",
    });
    let by_route = kind == Some("by-route");
    found
        .put("source", source.map(|ip| ip.to_string()))
        .put("source_kind", kind)
        .put("interface", interface)
        .put(
            "reverse_kind",
            facts
                .reverse_route
                .as_ref()
                .filter(|_| by_route)
                .map(|route| route.kind.clone()),
        );
    if let (Some(source), Some(interface)) = (source, interface) {
        found.advise(
            format!("Find who sends from {source}, by the hardware address of the frames."),
            Some(in_netns(
                facts,
                None,
                &format!("tcpdump -e -n -c 3 -i {interface} src host {source}"),
            )),
            "Puts the device into promiscuous mode until three packets came.",
        );
        if by_route {
            found.advise(
                format!("See which route this netns has to {source}: it must be of type unicast."),
                Some(in_netns(facts, None, &format!("ip route get {source}"))),
                "Reads only.",
            );
        }
    }
    found
}
