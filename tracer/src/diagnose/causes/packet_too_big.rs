//! `packet-too-big`: larger than what fits on the way, and not to be fragmented.

use droptrace_common::{FieldId, Site};

use super::values::{in_netns, iptables, on_the_way};
use crate::diagnose::{
    Cause, CountedBy, Counter, Direction, Facts, Family, Finding, Need, RawEvent, Verdict,
};

/// Where the sender is told.
const TOLD: [&str; 3] = ["ip_forward", "ip6_forward", "ip_fragment"];

/// The packet exceeds the MTU of its route.
pub(super) static CAUSE: Cause = Cause {
    slug: "packet-too-big",
    family: Family::Routing,
    title: "packet is larger than the MTU and may not be fragmented",
    mechanism: "A packet that is larger than the MTU of its route cannot be forwarded if it says `don't fragment`, as those of TCP do, \
        or is IPv6: ip_forward (net/ipv4/ip_forward.c) or ip6_forward (net/ipv6/ip6_output.c) frees it and tells the sender the \
        MTU by ICMP, who then sends less at once. ip_fragment (net/ipv4/ip_output.c) does so for packets that this host makes. From 6.1 \
        on a forwarded packet has the reason PKT_TOO_BIG; before, the ICMP message tells. The first loss of a connection is how path MTU discovery \
        works. If it goes on, the ICMP messages do not arrive, and the connection hangs with the first full segment. A veth peer with \
        a smaller MTU drops without a reason (unknown), and ip6_fragment does from 6.1 on.",
    evidence: &[
        ("mtu", "bytes that fit"),
        (
            "mtu_from",
            "who says so: kernel (it told the sender), route (its own MTU) or device; null when not known",
        ),
        ("interface", "device by which the packet would leave"),
        (
            "dont_fragment",
            "whether the packet may not be fragmented by routers; always true for IPv6",
        ),
        (
            "segments",
            "segments that the packet stands for; its length is that of all of them",
        ),
        ("meaning", "what the loss says"),
    ],
    remedy: "Let ICMP errors through to the sender, clamp the MSS of TCP to the path's MTU, or give all devices of the path one MTU.",
    counter: Some(Counter {
        name: "IpFragFails or Ip6FragFails",
    }),
    benign: false,
    needs: &[Need::Route, Need::Owner],
    matches: |signature| match signature.site {
        Site::PacketTooBig => true,
        Site::Free => {
            signature.because(&["PKT_TOO_BIG"]) || signature.unspecified() && signature.at(&["ip_fragment"])
        }
        _ => false,
    },
    verdict: |signature| {
        if signature.site == Site::PacketTooBig || signature.at(&TOLD) {
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
    found.counter = CountedBy::Named(if packet.is_ipv6() {
        "Ip6FragFails"
    } else {
        "IpFragFails"
    });
    let route = facts.route.as_ref();
    let told = event.field(FieldId::Mtu).map(|mtu| mtu as u32);
    let mtu = told.or_else(|| route.and_then(|route| route.mtu));
    let of_route = route.is_some_and(|route| route.mtu_of_route);
    let interface = route.and_then(|route| route.device.as_deref());
    let dont_fragment = packet.is_ipv6() || event.packet.get(6).is_some_and(|flags| flags & 0x40 != 0);
    let outgoing = crate::diagnose::catalogue::direction(event) == Some(Direction::Out);
    found
        .put("mtu", mtu)
        .put(
            "mtu_from",
            match mtu {
                _ if told.is_some() => Some("kernel"),
                Some(_) if of_route => Some("route"),
                Some(_) => Some("device"),
                None => None,
            },
        )
        .put("interface", interface)
        .put("dont_fragment", dont_fragment)
        .put("segments", event.header.segments)
        .put(
            "meaning",
            if outgoing {
                "a local program sends more than fits and forbids fragments: it is told message too long"
            } else {
                "the sender is told the MTU and should send less from now on; if this goes on, the ICMP message does not reach it"
            },
        );
    let Some(dst) = packet.dst else {
        return found;
    };
    let size = mtu.map_or_else(String::new, |mtu| format!(", {mtu} bytes"));
    found.advise(
        format!("See whether the MTU of the route to {dst}{size}, is meant: a tunnel or VLAN on the way takes some, and a route may have its own."),
        Some(in_netns(facts, None, &on_the_way(event, facts, dst))),
        "Reads only. Shows `mtu` where the route has its own; else that of the device counts.",
    );
    if let (false, Some(interface)) = (outgoing, interface) {
        if packet.protocol == Some(libc::IPPROTO_TCP as u8) {
            let command = iptables(&packet);
            found.advise(
                format!("Let new TCP connections through {interface} use segments that fit."),
                Some(in_netns(
                    facts,
                    None,
                    &format!("{command} -t mangle -A FORWARD -o {interface} -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu"),
                )),
                "Changes the MSS in SYNs that leave there. Running connections keep theirs; the other direction needs the same on its device.",
            );
        }
        let message = if packet.is_ipv6() {
            "packet too big"
        } else {
            "fragmentation needed"
        };
        let sender = packet
            .src
            .map_or_else(|| "the sender".to_owned(), |src| src.to_string());
        found.advise(
            format!(
                "Let the ICMP message ({message}) get to {sender}: no filter may drop it on the way back."
            ),
            None,
            "Then the sender learns the MTU with the first loss. It keeps what it learnt for 10 minutes.",
        );
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site, route};

    use crate::diagnose::causes::sample::{ACK, Kernel, Sample, V5_10, V6_1};
    use crate::diagnose::{RouteAnswer, Verdict};

    fn routed(sample: Sample, own: bool) -> Sample {
        sample.fact(|facts| {
            facts.route = Some(RouteAnswer {
                device: Some("tun0".to_owned()),
                kind: "unicast".to_owned(),
                mtu: Some(1400),
                mtu_of_route: own,
                ..RouteAnswer::default()
            });
        })
    }

    fn forwarded(kernel: Kernel, version: u8) -> Sample {
        let place = if version == 4 { "ip_forward" } else { "ip6_forward" };
        let sample = if kernel == V5_10 {
            Sample::freed(kernel, Site::PacketTooBig, place).field(FieldId::Mtu, 1380)
        } else {
            Sample::freed(kernel, Site::Free, place).reason("PKT_TOO_BIG")
        };
        let sample = if version == 4 {
            sample.tcp("10.0.0.9:40000", "10.0.1.7:80", ACK)
        } else {
            sample.tcp("[fd00::9]:40000", "[fd01::7]:80", ACK)
        };
        routed(sample.on("eth0").field(FieldId::Route, route::ELSEWHERE), false)
    }

    fn local(kernel: Kernel) -> Sample {
        let site = if kernel == V5_10 {
            Site::PacketTooBig
        } else {
            Site::Free
        };
        let sample = Sample::freed(kernel, site, "ip_fragment").udp("10.0.0.1:4000", "10.0.1.7:53");
        routed(sample.leaving("tun0"), true)
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| [forwarded(kernel, 4), forwarded(kernel, 6), local(kernel)])
            .collect()
    }

    #[test]
    fn the_mtu_at_fault_is_named_with_its_source() {
        for kernel in Kernel::ALL {
            let drop = forwarded(kernel, 4).label();
            assert_eq!(drop.verdict, Verdict::Rejected);
            assert_eq!(drop.evidence["interface"], "tun0");
            let (mtu, from) = if kernel == V5_10 {
                (1380, "kernel")
            } else {
                (1400, "device")
            };
            assert_eq!(drop.evidence["mtu"], mtu);
            assert_eq!(drop.evidence["mtu_from"], from);
            // The samples' IPv4 header does not say `don't fragment`; that of a real packet is in the scenario.
            assert_eq!(drop.evidence["dont_fragment"], false);
            assert_eq!(forwarded(kernel, 6).label().evidence["dont_fragment"], true);
            assert_eq!(local(kernel).label().evidence["mtu_from"], "route");
        }
    }

    #[test]
    fn only_tcp_through_this_host_has_its_mss_clamped() {
        let command = |sample: Sample| {
            sample
                .label()
                .remedy
                .get(1)
                .and_then(|remedy| remedy.command.clone())
        };
        assert_eq!(
            command(forwarded(V6_1, 6)).as_deref(),
            Some(
                "ip6tables -t mangle -A FORWARD -o tun0 -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu"
            )
        );
        assert_eq!(command(local(V6_1)), None);
    }
}
