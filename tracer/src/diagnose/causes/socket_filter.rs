//! `socket-filter`: a filter of the socket itself refused the packet.

use droptrace_common::{FieldId, Site};

use super::{cgroup_bpf, unknown, values::endpoint};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// The filter that the application put on its socket.
pub(super) static CAUSE: Cause = Cause {
    slug: "socket-filter",
    family: Family::Socket,
    title: "filter of the socket refused the packet",
    mechanism: "An application can put a filter on its socket (SO_ATTACH_FILTER, SO_ATTACH_BPF), which sees each packet before it is queued; \
        what the filter refuses is freed (sk_filter_trim_cap, net/core/filter.c). From 6.1 on the kernel gives the reason SOCKET_FILTER, but the same to \
        packets that a BPF program of the socket's cgroup refuses (cgroup-bpf), and, before the reason SECURITY_HOOK, to those that a security module does. \
        So the programs of the cgroup are asked for, and from 6.12 on the socket, whether it has a filter: if both may have done it, or neither is known, the cause \
        stays open (kernel-reason). Before 6.1 the place says no more than that a check of the socket failed (unknown). For UDP it counts as InErrors.",
    evidence: &[
        ("socket", "local address and port that the packet is for"),
        (
            "has_filter",
            "whether the socket has a filter; null where the kernel does not say which socket it was",
        ),
        (
            "cgroup",
            "cgroup of the socket, which has no program that looks at what it receives",
        ),
    ],
    remedy: "Find out what the application's filter is for: often it is what the application wants.",
    counter: Some(Counter {
        name: "UdpInErrors or Udp6InErrors (UDP, among others)",
    }),
    benign: false,
    needs: &[Need::Socket, Need::CgroupPrograms],
    matches: |signature| signature.site == Site::Free && signature.because(&["SOCKET_FILTER"]),
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: Some(by_another),
};

/// Whether the socket has a filter, where the kernel tells.
fn has_filter(event: &RawEvent) -> Option<bool> {
    event.field(FieldId::SocketFilter).map(|field| field == 2)
}

/// Who refused it, where it was not the socket's filter for sure.
fn by_another(event: &RawEvent, facts: &Facts) -> Option<&'static Cause> {
    let programs = facts
        .cgroup_programs
        .as_ref()
        .map(|found| !found.ingress.is_empty());
    match (has_filter(event), programs) {
        (Some(true) | None, Some(false)) => None,
        (Some(false), Some(true)) => Some(&cgroup_bpf::CAUSE),
        _ => Some(&unknown::KERNEL_REASON),
    }
}

/// Why it stays open who refused the packet.
pub(super) fn doubt(event: &RawEvent, facts: &Facts) -> &'static str {
    let programs = facts
        .cgroup_programs
        .as_ref()
        .map(|found| !found.ingress.is_empty());
    match (has_filter(event), programs) {
        (Some(true), Some(true)) => {
            "the socket has a filter, and its cgroup a BPF program: the kernel gives the same reason whichever of them refuses a packet"
        }
        (Some(false), Some(false)) => {
            "neither the socket has a filter nor its cgroup a BPF program by now: a security module refused it, or what refused it is gone"
        }
        (None, Some(true)) => {
            "the socket's cgroup has a BPF program, and the kernel does not say whether the socket has a filter: it gives the same reason whichever of them refuses a packet"
        }
        _ => {
            "the kernel gives the same reason to what the socket's filter, a BPF program of its cgroup, or a security module refuses, and it is not known which of them there are"
        }
    }
}

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let packet = event.parse();
    found
        .put("socket", endpoint(packet.dst, packet.dport))
        .put("has_filter", has_filter(event))
        .put(
            "cgroup",
            facts
                .cgroup_programs
                .as_ref()
                .map(|programs| programs.cgroup.clone()),
        );
    found.advise(
        "See in the configuration or source of the application what its filter lets pass.",
        facts
            .owner
            .as_ref()
            .map(|owner| format!("sh -c \"tr '\\0' ' ' < /proc/{}/cmdline\"", owner.pid)),
        "Reads only. The kernel shows filters of packet sockets only (ss -0 -b).",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site};

    use crate::diagnose::causes::sample::{Kernel, Sample, V6_1, V6_12, V7_3};
    use crate::diagnose::{CgroupPrograms, Owner};

    pub(in super::super) fn at(kernel: Kernel, has_filter: Option<bool>, program: Option<bool>) -> Sample {
        let sample = Sample::freed(kernel, Site::Free, "udp_queue_rcv_one_skb")
            .reason("SOCKET_FILTER")
            .udp("10.0.0.9:4000", "10.0.0.1:53")
            .on("eth0")
            .fact(|facts| {
                facts.owner = Some(Owner {
                    pid: 42,
                    comm: "dhcpd".to_owned(),
                    ..Owner::default()
                });
                facts.cgroup_programs = program.map(|has| CgroupPrograms {
                    cgroup: "/system.slice/dhcpd.service".to_owned(),
                    ingress: has
                        .then(|| "sd_fw_ingress (id 7)".to_owned())
                        .into_iter()
                        .collect(),
                    egress: Vec::new(),
                });
            });
        match has_filter {
            Some(has) => sample.field(FieldId::SocketFilter, 1 + u64::from(has)),
            None => sample,
        }
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        vec![
            at(V6_1, None, Some(false)),
            at(V6_12, Some(true), Some(false)),
            at(V7_3, Some(true), Some(false)),
        ]
    }

    #[test]
    fn what_refused_it_is_said_only_where_it_is_sure() {
        for (has_filter, program, cause) in [
            (Some(true), Some(false), "socket-filter"),
            (None, Some(false), "socket-filter"),
            (Some(false), Some(true), "cgroup-bpf"),
            (Some(true), Some(true), "kernel-reason"),
            (Some(false), Some(false), "kernel-reason"),
            (None, Some(true), "kernel-reason"),
            (Some(true), None, "kernel-reason"),
            (None, None, "kernel-reason"),
        ] {
            let drop = at(V7_3, has_filter, program).label();
            assert_eq!(drop.cause, cause, "{has_filter:?} {program:?}");
            let open = drop
                .evidence
                .get("doubt")
                .is_some_and(serde_json::Value::is_string);
            assert_eq!(open, cause == "kernel-reason");
        }
    }
}
