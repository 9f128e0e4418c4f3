//! `martian-destination`: a destination address that no received packet may have.

use droptrace_common::{Site, bits};

use super::values::{device, in_netns};
use crate::diagnose::{Cause, Facts, Family, Finding, RawEvent, Signature, Verdict};

/// The destination address of a received packet is invalid.
pub(super) static CAUSE: Cause = Cause {
    slug: "martian-destination",
    family: Family::SourceCheck,
    title: "destination address of the received packet is invalid (martian)",
    mechanism: "A received IPv4 packet is refused when its destination is loopback (127.0.0.0/8) and route_localnet is off \
        for the device, or 0.0.0.0/8, or has a route of a type that nothing can be delivered by (ip_route_input_slow, \
        net/ipv4/route.c). The global in_martian_dst of /proc/net/stat/rt_cache grows; 7.x gives IP_LOCALNET or \
        IP_INVALID_DEST, older kernels no reason. A DNAT rule that sends outside packets to 127.0.0.1 is the usual \
        source.",
    evidence: &[
        ("destination", "destination address of the packet"),
        (
            "destination_kind",
            "loopback, invalid (0.0.0.0/8 or 240.0.0.0/4), or by-route",
        ),
        ("interface", "device that the packet came by"),
    ],
    remedy: "Find the DNAT rule or sender; translate to an address of the device instead, or turn on route_localnet for it.",
    counter: None,
    benign: false,
    needs: &[],
    matches: |signature| {
        let without_hint = signature.site == Site::Free;
        signature.because(&["IP_INVALID_DEST"])
            || without_hint && signature.because(&["IP_LOCALNET"]) && !signature.has(bits::SOURCE_NOT_UNICAST)
            || without_hint
                && signature.unspecified()
                && signature.at(&["ip_rcv_finish_core"])
                && !signature.has(bits::SOURCE_NOT_UNICAST)
                && signature.bits & (bits::DESTINATION_LOOPBACK | bits::DESTINATION_INVALID) != 0
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let destination = event.parse().dst;
    let interface = device(event, facts);
    let kind = if event.has(bits::DESTINATION_LOOPBACK) {
        "loopback"
    } else if event.has(bits::DESTINATION_INVALID) {
        "invalid"
    } else {
        "by-route"
    };
    found
        .put("destination", destination.map(|ip| ip.to_string()))
        .put("destination_kind", kind)
        .put("interface", interface);
    let (Some(destination), Some(interface)) = (destination, interface) else {
        return found;
    };
    found.advise(
        format!("Find what sends to {destination}: mostly a DNAT or REDIRECT rule in PREROUTING."),
        Some(in_netns(
            facts,
            None,
            &format!("sh -c \"iptables-save -t nat | grep -w -F {destination}; nft list ruleset | grep -w -F {destination}\""),
        )),
        "Reads only. REDIRECT to a port, or DNAT to an address of the device, needs no exception.",
    );
    if kind == "loopback" {
        found.advise(
            format!("Or let {interface} deliver to 127.0.0.0/8."),
            Some(in_netns(
                facts,
                None,
                &format!("sysctl -w net.ipv4.conf.{interface}.route_localnet=1"),
            )),
            "Takes effect at once. Hosts on that network can then reach services that listen on loopback only, unless a rule forbids it.",
        );
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{Site, bits};

    use crate::diagnose::causes::sample::{Kernel, SYN, Sample, V7_3};

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                [
                    Sample::freed(kernel, Site::Free, "ip_rcv_finish_core")
                        .reason_since(V7_3, "IP_LOCALNET")
                        .tcp("10.0.0.9:40000", "127.0.0.1:80", SYN)
                        .on("eth0")
                        .bits(bits::DESTINATION_LOOPBACK | bits::DESTINATION_LOCAL),
                    Sample::freed(kernel, Site::Free, "ip_rcv_finish_core")
                        .reason_since(V7_3, "IP_INVALID_DEST")
                        .udp("10.0.0.9:40000", "0.0.0.1:53")
                        .on("eth0")
                        .bits(bits::DESTINATION_INVALID),
                ]
            })
            .collect()
    }

    #[test]
    fn only_loopback_has_an_exception_to_offer() {
        for (index, sample) in samples().iter().enumerate() {
            let drop = sample.label();
            let loopback = index % 2 == 0;
            assert_eq!(
                drop.evidence["destination_kind"],
                if loopback { "loopback" } else { "invalid" }
            );
            assert_eq!(drop.remedy.len(), if loopback { 2 } else { 1 });
            if loopback {
                assert_eq!(
                    drop.remedy[1].command.as_deref(),
                    Some("sysctl -w net.ipv4.conf.eth0.route_localnet=1")
                );
            }
        }
    }
}
