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

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{Site, bits};

    use crate::diagnose::causes::sample::{Kernel, Sample, V5_10, V6_1, V6_12, V7_3};
    use crate::diagnose::{AddressHolder, Facts, RouteAnswer};

    fn at(kernel: Kernel, source: &str, reason: &str) -> Sample {
        Sample::freed(kernel, Site::MartianSource, "ip_rcv_finish_core")
            .reason_since(V7_3, reason)
            .udp(source, "10.0.0.1:53")
            .on("eth0")
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                [
                    at(kernel, "127.0.0.1:40000", "IP_LOCALNET")
                        .bits(bits::SOURCE_NOT_UNICAST | bits::SOURCE_LOCAL),
                    at(kernel, "198.51.100.9:40000", "IP_INVALID_SOURCE").fact(|facts| {
                        facts.reverse_route = Some(RouteAnswer {
                            device: None,
                            gateway: None,
                            kind: "blackhole".to_owned(),
                            ..RouteAnswer::default()
                        });
                    }),
                ]
            })
            .collect()
    }

    #[test]
    fn kind_of_the_source_is_told() {
        for kernel in Kernel::ALL {
            for (source, kind) in [
                ("127.0.0.1:1", "loopback"),
                ("224.0.0.1:1", "multicast"),
                ("255.255.255.255:1", "broadcast"),
                ("0.0.0.1:1", "zero"),
                ("198.51.100.9:1", "by-route"),
            ] {
                let drop = at(kernel, source, "IP_INVALID_SOURCE").label();
                assert_eq!(drop.cause, "martian-source");
                assert_eq!(drop.evidence["source_kind"], kind);
                assert!(
                    drop.remedy[0]
                        .command
                        .as_deref()
                        .is_some_and(|command| { command.contains("-i eth0 src host") })
                );
            }
        }
    }

    #[test]
    fn an_address_that_only_the_facts_know_is_a_local_source() {
        let held = |facts: &mut Facts| {
            facts.source_holder = Some(Some(AddressHolder {
                device: "lb0".to_owned(),
                kind: Some("dummy".to_owned()),
            }));
        };
        for kernel in [V5_10, V6_1, V6_12] {
            let drop = at(kernel, "10.96.0.10:1", "").fact(held).label();
            assert_eq!(drop.cause, "local-source");
            assert_eq!(drop.evidence["holder"], "lb0");
        }
        // 7.3 says itself what it is, and a loopback source is none.
        let told = at(V7_3, "10.96.0.10:1", "IP_INVALID_SOURCE").fact(held).label();
        assert_eq!(told.cause, "martian-source");
        let loopback = at(V6_1, "127.0.0.1:1", "")
            .bits(bits::SOURCE_NOT_UNICAST)
            .fact(held)
            .label();
        assert_eq!(loopback.cause, "martian-source");
    }
}
