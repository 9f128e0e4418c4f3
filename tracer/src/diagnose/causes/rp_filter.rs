//! `rp-filter`: the route back to the source leaves by another device.

use droptrace_common::{FieldId, Site, bits};

use super::values::{device, in_netns, sysctl_number};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// Reverse path filtering refused a received packet.
pub(super) static CAUSE: Cause = Cause {
    slug: "rp-filter",
    family: Family::SourceCheck,
    title: "route back to the source leaves by another device (rp_filter)",
    mechanism: "With rp_filter the kernel looks up the route to the source of each received IPv4 packet that needs a route \
        lookup (__fib_validate_source, net/ipv4/fib_frontend.c). Mode 1 (strict) wants it to leave by the device that \
        the packet came by; mode 2 (loose) wants any route. The mode in force is the larger of `all` and the device. \
        Otherwise the packet is dropped, counted in IPReversePathFilter, and from 6.1 on given the reason IP_RPFILTER. \
        Hosts with two uplinks, policy routing or asymmetric paths meet it. IPv6 has no rp_filter of its own; rules with \
        `rpfilter` or `fib` are netfilter's.",
    evidence: &[
        ("source", "source address of the packet"),
        ("interface", "device that the packet came by"),
        ("rp_filter_all", "net.ipv4.conf.all.rp_filter"),
        ("rp_filter_device", "net.ipv4.conf.DEVICE.rp_filter"),
        (
            "mode",
            "mode in force, the larger of both: strict (1) or loose (2)",
        ),
        (
            "reverse_device",
            "device by which the route to the source leaves; null when there is none",
        ),
        ("reverse_gateway", "gateway of that route"),
        (
            "reverse_kind",
            "type of that route, such as unicast or unreachable",
        ),
    ],
    remedy: "Route replies by the device that the packets come by, or use the loose mode on that device.",
    counter: Some(Counter {
        name: "TcpExtIPReversePathFilter",
    }),
    benign: false,
    needs: &[
        Need::ReverseRoute,
        Need::Sysctl("net.ipv4.conf.all.rp_filter"),
        Need::Sysctl("net.ipv4.conf.{device}.rp_filter"),
    ],
    matches: |signature| signature.because(&["IP_RPFILTER"]) || counted(signature) && signature.unspecified(),
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

/// Whether IPReversePathFilter grew for this packet.
pub(super) fn counted(signature: &Signature<'_>) -> bool {
    signature.site == Site::MartianSource && signature.has(bits::RP_FILTER)
}

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let source = event.parse().src;
    let interface = device(event, facts);
    let all = event
        .field(FieldId::RpFilterAll)
        .or_else(|| sysctl_number(facts, "net.ipv4.conf.all.rp_filter"));
    let of_device = event
        .field(FieldId::RpFilterDevice)
        .or_else(|| sysctl_number(facts, &format!("net.ipv4.conf.{}.rp_filter", interface?)));
    let mode = match all.max(of_device) {
        Some(1) => Some("strict"),
        Some(2) => Some("loose"),
        _ => None,
    };
    let route = facts.reverse_route.as_ref();
    let back = route.and_then(|route| route.device.as_deref());
    found
        .put("source", source.map(|ip| ip.to_string()))
        .put("interface", interface)
        .put("rp_filter_all", all)
        .put("rp_filter_device", of_device)
        .put("mode", mode)
        .put("reverse_device", back)
        .put(
            "reverse_gateway",
            route
                .and_then(|route| route.gateway)
                .map(|gateway| gateway.to_string()),
        )
        .put("reverse_kind", route.map(|route| route.kind.clone()));
    let (Some(source), Some(interface)) = (source, interface) else {
        return found;
    };
    match back {
        Some(back) if back != interface => found.advise(
            format!("The route to {source} leaves by {back}, the packet came by {interface}: if {interface} is right, route {source} that way; if not, find out why the sender's path ends at {interface}."),
            Some(in_netns(facts, None, &format!("ip route get {source}"))),
            "Reads only. A changed route moves all traffic to that network; with policy routing a rule and table per uplink keeps replies on the uplink of the request.",
        ),
        _ => found.advise(
            format!("See where this netns would send packets to {source}: without a route even the loose mode refuses them."),
            Some(in_netns(facts, None, &format!("ip route get {source}"))),
            "Reads only.",
        ),
    };
    if mode != Some("loose") {
        found.advise(
            format!("Or use the loose mode on {interface}: any source that has a route is then accepted."),
            Some(in_netns(
                facts,
                None,
                &format!("sysctl -w net.ipv4.conf.{interface}.rp_filter=2"),
            )),
            "Takes effect at once: the larger of `all` and the device counts, so 2 wins over all=1. Forged sources that have a route elsewhere pass.",
        );
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site, bits};

    use crate::diagnose::RouteAnswer;
    use crate::diagnose::causes::sample::{Kernel, Sample, V6_1};

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                [Some("eth1"), None].map(|back| {
                    Sample::freed(kernel, Site::MartianSource, "ip_rcv_finish_core.constprop.0")
                        .reason_since(V6_1, "IP_RPFILTER")
                        .udp("198.51.100.9:40000", "10.0.0.1:53")
                        .on("eth0")
                        .bits(bits::RP_FILTER)
                        .field(FieldId::RpFilterAll, 0)
                        .sysctl(
                            "net.ipv4.conf.eth0.rp_filter",
                            if back.is_some() { "1" } else { "2" },
                        )
                        .fact(|facts| {
                            facts.reverse_route = Some(RouteAnswer {
                                device: back.map(str::to_owned),
                                gateway: back.map(|_| "10.1.0.254".parse().expect("an address")),
                                kind: if back.is_some() { "unicast" } else { "unreachable" }.to_owned(),
                                ..RouteAnswer::default()
                            });
                        })
                })
            })
            .collect()
    }

    #[test]
    fn strict_mode_is_loosened_and_the_other_device_named() {
        for sample in samples().iter().step_by(2) {
            let drop = sample.label();
            assert_eq!(drop.evidence["mode"], "strict");
            assert_eq!(drop.evidence["reverse_device"], "eth1");
            assert!(drop.remedy[0].action.contains("leaves by eth1"));
            assert_eq!(
                drop.remedy[1].command.as_deref(),
                Some("sysctl -w net.ipv4.conf.eth0.rp_filter=2")
            );
        }
    }

    #[test]
    fn loose_mode_wants_a_route() {
        for sample in samples().iter().skip(1).step_by(2) {
            let drop = sample.label();
            assert_eq!(drop.evidence["mode"], "loose");
            assert_eq!(drop.remedy.len(), 1);
            assert_eq!(
                drop.remedy[0].command.as_deref(),
                Some("ip route get 198.51.100.9")
            );
        }
    }
}
