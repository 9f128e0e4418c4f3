//! `bad-header`: the headers of the packet make no sense.

use droptrace_common::Site;

use super::{
    sums::{Fault, fault},
    values::on,
};
use crate::diagnose::{Cause, CountedBy, Counter, Facts, Family, Finding, RawEvent, Signature, Verdict};

/// A router's own use of the reason: `ttl-exceeded`.
const ROUTER: [&str; 2] = ["ip_forward", "ip6_forward"];
/// Where kernels without reasons free packets with a bad IP header.
const IP: [&str; 4] = ["ip_rcv", "ip_rcv_core", "ipv6_rcv", "ip6_rcv_core"];
/// And with a bad header of TCP or UDP.
const TRANSPORT: [&str; 4] = ["tcp_v4_rcv", "tcp_v6_rcv", "__udp4_lib_rcv", "__udp6_lib_rcv"];

/// A header has a value that it must not have, or there is less of the packet than it says.
pub(super) static CAUSE: Cause = Cause {
    slug: "bad-header",
    family: Family::Device,
    title: "malformed or truncated packet",
    mechanism: "The IP header has a value that it must not have (ip_rcv_core, net/ipv4/ip_input.c; ip6_rcv_core, net/ipv6/ip6_input.c), there are fewer bytes than it says, or the header of \
        TCP or UDP does not fit. From 6.1 on the reason is IP_INHDR or PKT_TOO_SMALL. On 5.10 the captured bytes must prove it, else the drop stays unknown. A wrong checksum is \
        checksum-error; a used up TTL, which has the reason IP_INHDR in ip_forward, is ttl-exceeded.",
    evidence: &[
        ("fault", "what is wrong, as far as the captured bytes tell"),
        ("length", "bytes that there are"),
        ("interface", "device that the packet came by"),
    ],
    remedy: "Find who sends such packets: a broken driver or tunnel cuts them, and port scanners make them on purpose.",
    counter: Some(Counter {
        name: "IpInHdrErrors, Ip6InHdrErrors, IpExtInTruncatedPkts, Ip6InTruncatedPkts, TcpInErrs, UdpInErrors or Udp6InErrors",
    }),
    benign: false,
    needs: &[],
    matches: |signature| {
        signature.because(&["IP_INHDR", "PKT_TOO_SMALL", "IPV6_BAD_EXTHDR"]) && !signature.at(&ROUTER)
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

/// Whether the captured bytes prove it, where the kernel says nothing.
pub(super) fn proven(event: &RawEvent, facts: &Facts) -> bool {
    let signature = Signature::of_event(event, facts);
    signature.site == Site::Free
        && signature.reason.is_none()
        && event.header.iif != 0
        && match fault(event) {
            Some(Fault::Header(_) | Fault::Truncated) => signature.at(&IP),
            Some(Fault::Transport(_)) => signature.at(&TRANSPORT),
            None => false,
        }
}

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let packet = event.parse();
    let fault = fault(event);
    let v6 = event.packet.first().is_some_and(|first| first >> 4 == 6);
    let counter = match fault {
        Some(Fault::Header(_)) if v6 => Some("Ip6InHdrErrors"),
        Some(Fault::Header(_)) => Some("IpInHdrErrors"),
        Some(Fault::Truncated) if v6 => Some("Ip6InTruncatedPkts"),
        Some(Fault::Truncated) => Some("IpExtInTruncatedPkts"),
        Some(Fault::Transport(_)) if packet.protocol == Some(6) => Some("TcpInErrs"),
        Some(Fault::Transport(_)) if v6 => Some("Udp6InErrors"),
        Some(Fault::Transport(_)) => Some("UdpInErrors"),
        None => None,
    };
    found.counter = counter.map_or(CountedBy::Cause, CountedBy::Named);
    let interface = on(event, facts);
    found
        .put("fault", fault.map(Fault::text))
        .put("length", event.header.len)
        .put("interface", interface);
    let source = packet.src.map_or_else(
        || "The source is not known".to_owned(),
        |src| format!("It says to come from {src}"),
    );
    found.advise(
        format!("{source}: capture what comes in, with the hardware address of who sent it."),
        Some(super::values::in_netns(
            facts,
            None,
            &format!("tcpdump -c 20 -envvi {}", interface.unwrap_or("any")),
        )),
        "Copies packets to the terminal; ends after 20.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::causes::sample::{Kernel, SYN, Sample, V5_10, V6_1, V6_12, V7_3};

    /// There are `cut` bytes fewer than the header says.
    fn at(kernel: Kernel, version: u8, cut: u32) -> Sample {
        let place = if version == 4 {
            "ip_rcv_core.isra.0"
        } else {
            "ip6_rcv_core.isra.0"
        };
        let sample = Sample::freed(kernel, Site::Free, place).reason_since(V6_1, "PKT_TOO_SMALL");
        if version == 4 {
            sample.tcp("10.0.0.9:4000", "10.0.0.1:80", SYN)
        } else {
            sample.tcp("[fd00::9]:4000", "[fd00::1]:80", SYN)
        }
        .on("eth0")
        .shorter(cut)
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .map(|kernel| at(kernel, 6, 8))
            // The samples' IPv4 header has a wrong checksum, which the kernel looks at before.
            .chain([V6_1, V6_12, V7_3].map(|kernel| at(kernel, 4, 8)))
            .collect()
    }

    #[test]
    fn a_cut_packet_is_told_by_its_length() {
        for kernel in Kernel::ALL {
            let drop = at(kernel, 6, 8).label();
            assert_eq!(drop.evidence["fault"], "fewer bytes than the IP header says");
            assert_eq!(drop.counter.as_deref(), Some("Ip6InTruncatedPkts"));
            assert_eq!(
                drop.remedy[0].command.as_deref(),
                Some("tcpdump -c 20 -envvi eth0")
            );
        }
        let whole =
            Sample::freed(V5_10, Site::Free, "ip6_rcv_core").tcp("[fd00::9]:4000", "[fd00::1]:80", SYN);
        assert_eq!(whole.on("eth0").label().cause, "unknown");
    }
}
