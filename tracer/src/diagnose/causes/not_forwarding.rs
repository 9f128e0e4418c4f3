//! `not-forwarding`: this host is asked to be a router and is none.

use std::net::IpAddr;

use droptrace_common::{Site, bits};

use super::{
    unknown,
    values::{device, in_netns, sysctl_number},
};
use crate::diagnose::{
    Cause, CountedBy, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict,
};

/// Forwarding is off for a packet to another host.
pub(super) static CAUSE: Cause = Cause {
    slug: "not-forwarding",
    family: Family::Routing,
    title: "packet for another host, but forwarding is off",
    mechanism: "A received packet whose destination is no address of this netns is forwarded only if forwarding is on: for IPv4 on the \
        device that it came by (net.ipv4.conf.DEVICE.forwarding, which net.ipv4.ip_forward sets on all), for IPv6 in the netns \
        (net.ipv6.conf.all.forwarding). ip_error (net/ipv4/route.c) or ip6_forward (net/ipv6/ip6_output.c) frees it without a word to the \
        sender, and counts InAddrErrors; from 6.1 on with the reason IP_INADDRERRORS. Whether there is a route is not asked for IPv4; an IPv6 \
        packet without one is no-route. On 5.10 the IPv6 drop stays unknown, since ip6_forward has several causes there.",
    evidence: &[
        ("destination", "address that is not in this netns"),
        ("interface", "device that the packet came by"),
        (
            "forwarding",
            "net.ipv4.conf.DEVICE.forwarding, or net.ipv6.conf.all.forwarding, by now",
        ),
    ],
    remedy: "Turn forwarding on if this host is to be a router, as hosts of containers and VPNs are; else find out why the packet is sent here, such as \
        a route of the sender or an address that moved.",
    counter: Some(Counter {
        name: "IpInAddrErrors or Ip6InAddrErrors",
    }),
    benign: false,
    needs: &[
        Need::Sysctl("net.ipv4.conf.{device}.forwarding"),
        Need::Sysctl("net.ipv6.conf.all.forwarding"),
    ],
    matches: |signature| {
        signature.site == Site::Free
            && (signature.because(&["IP_INADDRERRORS"]) && signature.at(&["ip_error", "ip6_forward"])
                || signature.unspecified()
                    && signature.at(&["ip_error"])
                    && signature.has(bits::NOT_FORWARDING))
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    // A source that no router may forward has the same reason at the same place.
    refine: Some(|event, _| {
        let refused = match event.parse().src {
            Some(IpAddr::V6(src)) => src.is_unspecified() || src.is_loopback() || src.is_multicast(),
            _ => false,
        };
        refused.then_some(&unknown::KERNEL_REASON)
    }),
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let packet = event.parse();
    found.counter = CountedBy::Named(if packet.is_ipv6() {
        "Ip6InAddrErrors"
    } else {
        "IpInAddrErrors"
    });
    let interface = device(event, facts);
    let setting = if packet.is_ipv6() {
        Some("net.ipv6.conf.all.forwarding".to_owned())
    } else {
        interface.map(|interface| format!("net.ipv4.conf.{interface}.forwarding"))
    };
    let forwarding = setting
        .as_deref()
        .and_then(|setting| sysctl_number(facts, setting))
        .map(|value| value != 0);
    found
        .put("destination", packet.dst.map(|ip| ip.to_string()))
        .put("interface", interface)
        .put("forwarding", forwarding);
    let (Some(dst), Some(setting)) = (packet.dst, setting) else {
        return found;
    };
    found.advise(
        format!("If this host is to be a router for {dst}: turn forwarding on."),
        Some(in_netns(facts, None, &format!("sysctl -w {setting}=1"))),
        if dst.is_ipv6() {
            "This host then forwards whatever its rules allow, by all devices, and stops taking router advertisements unless accept_ra=2."
        } else {
            "This host then forwards whatever comes by that device and its rules allow. Lost at the next boot unless /etc/sysctl.d sets it, too."
        },
    );
    let sender = packet
        .src
        .map_or_else(|| "the sender".to_owned(), |src| src.to_string());
    found.advise(
        format!("If not: find out why {sender} sends packets for {dst} here, and whether {dst} should be an address of this netns."),
        Some(in_netns(facts, None, "ip address show")),
        "Reads only. A virtual address that moved away, or a route of the sender by this host, does this.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{Site, bits};

    use crate::diagnose::causes::sample::{Kernel, SYN, Sample, V5_10, V6_1};

    fn v4(kernel: Kernel) -> Sample {
        let told = if kernel == V5_10 {
            bits::NOT_FORWARDING
        } else {
            bits::ROUTE_REFUSES
        };
        Sample::freed(kernel, Site::Free, "ip_error")
            .reason_since(V6_1, "IP_INADDRERRORS")
            .tcp("10.0.0.9:40000", "198.51.100.7:80", SYN)
            .on("eth0.7")
            .bits(bits::NO_ROUTE | told)
            .sysctl("net.ipv4.conf.eth0.7.forwarding", "0")
    }

    fn v6(kernel: Kernel, source: &str) -> Sample {
        Sample::freed(kernel, Site::Free, "ip6_forward")
            .reason("IP_INADDRERRORS")
            .tcp(source, "[fd01::1]:80", SYN)
            .on("eth0")
            .sysctl("net.ipv6.conf.all.forwarding", "0")
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                let both = [
                    Some(v4(kernel)),
                    (kernel != V5_10).then(|| v6(kernel, "[fd00::9]:40000")),
                ];
                both.into_iter().flatten()
            })
            .collect()
    }

    #[test]
    fn the_setting_that_counts_is_the_remedy() {
        for sample in samples() {
            let drop = sample.label();
            assert_eq!(drop.evidence["forwarding"], false);
            let setting = match drop.dst {
                Some(dst) if dst.is_ipv6() => "net.ipv6.conf.all.forwarding=1",
                _ => "net.ipv4.conf.eth0.7.forwarding=1",
            };
            assert_eq!(drop.remedy[0].command, Some(format!("sysctl -w {setting}")));
        }
    }

    #[test]
    fn a_source_that_may_not_be_forwarded_is_not_this() {
        for source in ["[::]:40000", "[::1]:40000"] {
            assert_eq!(v6(V6_1, source).label().cause, "kernel-reason");
        }
    }
}
