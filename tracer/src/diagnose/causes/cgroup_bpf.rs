//! `cgroup-bpf`: a BPF program of the socket's cgroup refused the packet.

use droptrace_common::Site;

use super::{unknown, values::endpoint};
use crate::diagnose::{Cause, CountedBy, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// Where kernels without drop reasons free what such a program lets no socket send, and little else.
const SENT: [&str; 3] = ["ip_finish_output", "ip_mc_finish_output", "ip6_finish_output"];

/// The program lets the socket not receive or not send it.
pub(super) static CAUSE: Cause = Cause {
    slug: "cgroup-bpf",
    family: Family::Socket,
    title: "BPF program of the socket's cgroup refused the packet",
    mechanism: "BPF programs of type cgroup_skb see each packet that a socket of their cgroup, or of one below it, sends or receives, and may refuse it: \
        systemd's IPAddressDeny= and RestrictNetworkInterfaces=, and container platforms do so. What may not be sent is freed in ip_finish_output (net/ipv4/ip_output.c) or \
        ip6_finish_output (net/ipv6/ip6_output.c), and send() fails with EPERM; from 6.1 on the kernel gives the reason BPF_CGROUP_EGRESS, before, the place and the program tell. \
        What may not be received has the reason SOCKET_FILTER, as what the socket's own filter refuses; it is this cause if the cgroup has a program and the socket no \
        filter, which kernels from 6.12 on tell. Otherwise the cause stays open (kernel-reason, unknown).",
    evidence: &[
        ("way", "egress (sent by the socket) or ingress (received by it)"),
        ("socket", "local address and port"),
        ("cgroup", "cgroup of the socket"),
        (
            "programs",
            "programs of that cgroup and those above it that look at such packets, each with its id",
        ),
    ],
    remedy: "Find who put the program on the cgroup, and what it lets pass: a systemd unit's IPAddressAllow= and IPAddressDeny=, a container platform's policy.",
    counter: None,
    benign: false,
    needs: &[Need::Socket, Need::CgroupPrograms],
    matches: |signature| {
        signature.site == Site::Free
            && (signature.because(&["BPF_CGROUP_EGRESS"])
                || signature.reason.is_none() && signature.at(&SENT))
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: Some(|_, facts| {
        let sent = |programs: &crate::diagnose::CgroupPrograms| !programs.egress.is_empty();
        let proven = facts.reason.is_some() || facts.cgroup_programs.as_ref().is_some_and(sent);
        (!proven).then_some(&unknown::UNKNOWN)
    }),
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let packet = event.parse();
    let received = facts.reason.as_deref() == Some("SOCKET_FILTER");
    let mut found = Finding {
        counter: match (received, packet.protocol, packet.dst) {
            (true, Some(17), Some(std::net::IpAddr::V4(_))) => CountedBy::Named("UdpInErrors"),
            (true, Some(17), Some(std::net::IpAddr::V6(_))) => CountedBy::Named("Udp6InErrors"),
            _ => CountedBy::Nothing,
        },
        ..Finding::default()
    };
    let programs = facts.cgroup_programs.as_ref();
    let cgroup = programs.map(|found| found.cgroup.clone());
    found
        .put("way", if received { "ingress" } else { "egress" })
        .put(
            "socket",
            if received {
                endpoint(packet.dst, packet.dport)
            } else {
                endpoint(packet.src, packet.sport)
            },
        )
        .put("cgroup", cgroup.clone())
        .put(
            "programs",
            programs.map(|found| {
                if received {
                    found.ingress.clone()
                } else {
                    found.egress.clone()
                }
            }),
        );
    found.advise(
        "List the programs of the cgroup and of those above it, and look at their maps.",
        Some(match cgroup {
            Some(path) => format!("bpftool cgroup show /sys/fs/cgroup{path} effective"),
            None => "bpftool cgroup tree".to_owned(),
        }),
        "Reads only. Names that begin with sd_ are systemd's: `systemctl show -p IPAddressAllow -p IPAddressDeny UNIT` tells the unit's own lists.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::CgroupPrograms;
    use crate::diagnose::causes::sample::{Kernel, Sample, V5_10, V6_1, V6_12, V7_3};
    use crate::diagnose::causes::socket_filter;

    fn sent(kernel: Kernel) -> Sample {
        Sample::freed(kernel, Site::Free, "ip_finish_output")
            .reason_since(V6_1, "BPF_CGROUP_EGRESS")
            .udp("10.0.0.1:4000", "10.0.0.9:53")
            .leaving("eth0")
            .fact(|facts| {
                facts.cgroup_programs = Some(CgroupPrograms {
                    cgroup: "/web".to_owned(),
                    ingress: Vec::new(),
                    egress: vec!["sd_fw_egress (id 6)".to_owned()],
                });
            })
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        let received = [V6_12, V7_3].map(|kernel| socket_filter::tests::at(kernel, Some(false), Some(true)));
        Kernel::ALL.into_iter().map(sent).chain(received).collect()
    }

    #[test]
    fn both_ways_name_the_programs() {
        for kernel in Kernel::ALL {
            let drop = sent(kernel).label();
            assert_eq!(
                (drop.cause.as_str(), drop.counter.as_deref()),
                ("cgroup-bpf", None)
            );
            assert_eq!(drop.evidence["way"], "egress");
            assert_eq!(drop.evidence["socket"], "10.0.0.1:4000");
            assert_eq!(drop.evidence["programs"][0], "sd_fw_egress (id 6)");
            assert_eq!(
                drop.remedy[0].command.as_deref(),
                Some("bpftool cgroup show /sys/fs/cgroup/web effective")
            );
        }
        let received = socket_filter::tests::at(V6_12, Some(false), Some(true)).label();
        assert_eq!(received.evidence["way"], "ingress");
        assert_eq!(received.evidence["programs"][0], "sd_fw_ingress (id 7)");
        assert_eq!(received.counter.as_deref(), Some("UdpInErrors"));
    }

    #[test]
    fn the_place_alone_proves_nothing() {
        let none = |facts: &mut crate::diagnose::Facts| facts.cgroup_programs = None;
        assert_eq!(sent(V5_10).fact(none).label().cause, "unknown");
        assert_eq!(sent(V6_1).fact(none).label().cause, "cgroup-bpf");
    }
}
