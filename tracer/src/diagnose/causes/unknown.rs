//! What the catalogue does not explain keeps the kernel's own word, or none.

use droptrace_common::Site;

use super::{
    bad_header, checksum_error, conntrack_dying, evidence::joined, netfilter, socket_filter, tcp_memory,
};
use crate::diagnose::{Cause, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// The evidence of a cause that knows no more than the kernel says.
pub(super) const EVIDENCE: &[(&str, &str)] = &[
    (
        "reason",
        "the kernel's name of the reason; null on kernels without reasons",
    ),
    ("location", "kernel function that freed the packet"),
    ("site", "hook or branch that saw it"),
];

/// The kernel gives a reason that the catalogue has no cause for.
pub static KERNEL_REASON: Cause = Cause {
    slug: "kernel-reason",
    family: Family::Other,
    title: "dropped for the kernel's own reason",
    mechanism: "The kernel names a drop reason (enum skb_drop_reason, include/net/dropreason-core.h) that this \
        catalogue does not explain further, or that more than one cause may stand behind.",
    evidence: joined![
        EVIDENCE,
        [(
            "doubt",
            "why no cause is named, where the reason may have several",
        ),]
    ],
    remedy: "The comment at this reason in the kernel's include/net/dropreason-core.h says what it means.",
    counter: None,
    benign: false,
    needs: &[Need::Owner, Need::Rules],
    matches: |signature| !signature.unspecified(),
    verdict,
    find: find_with_doubt,
    refine: Some(conntrack_dying::refine),
};

/// Neither the catalogue nor the kernel tells.
pub static UNKNOWN: Cause = Cause {
    slug: "unknown",
    family: Family::Other,
    title: "dropped, cause not known",
    mechanism: "The packet was freed as dropped, without a reason from the kernel, at a place that this catalogue \
        does not know, or at which more than one cause may stand behind.",
    evidence: joined![
        EVIDENCE,
        [("doubt", "why no cause is named, where the place may have several"),]
    ],
    remedy: "The location is the kernel function that freed the packet; its source tells which checks it makes.",
    counter: None,
    benign: false,
    needs: &[Need::Owner, Need::Rules],
    matches: |_| true,
    verdict,
    find: find_with_doubt,
    // What a kernel without reasons does not say, the packet itself may prove.
    refine: Some(|event, facts| {
        if checksum_error::proven(event, facts) {
            Some(&checksum_error::CAUSE)
        } else if bad_header::proven(event, facts) {
            Some(&bad_header::CAUSE)
        } else {
            conntrack_dying::refine(event, facts)
        }
    }),
};

/// What a drop is as long as its facts do not prove a cause that others share a place or reason with.
pub(super) fn left_open(facts: &Facts) -> &'static Cause {
    match facts.reason.as_deref() {
        None | Some("NOT_SPECIFIED") => &UNKNOWN,
        Some(_) => &KERNEL_REASON,
    }
}

fn verdict(_: &Signature<'_>) -> Verdict {
    Verdict::Dropped
}

/// Writes the evidence of [`EVIDENCE`].
pub(super) fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    found
        .put("reason", facts.reason.clone())
        .put("location", facts.location.clone())
        .put("site", event.site.name());
    found
}

/// Where a datagram is freed that fails any check of its socket.
const UDP_CHECKS: [&str; 2] = ["udp_queue_rcv_one_skb", "udpv6_queue_rcv_one_skb"];

fn find_with_doubt(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = find(event, facts);
    let signature = Signature::of_event(event, facts);
    let free = signature.site == Site::Free;
    let of_socket = || {
        if signature.site == Site::TcpMemory {
            Some(tcp_memory::DOUBT_WITH_ROOM)
        } else if signature.site == Site::GroupJoined {
            Some(
                "somebody here has joined the group: rp_filter or another check refused the source, or the options of the packet were",
            )
        } else if !free {
            None
        } else if signature.because(&["SOCKET_FILTER"]) {
            Some(socket_filter::doubt(event, facts))
        } else if signature.because(&["PROTO_MEM"]) {
            Some(tcp_memory::DOUBT)
        } else if signature.reason.is_none() && signature.at(&UDP_CHECKS) {
            Some(
                "a filter of the socket, a BPF program of its cgroup, a security module, a bad checksum or an IPsec policy: kernels without drop reasons free the datagram at the same place",
            )
        } else {
            None
        }
    };
    let ruleless = || netfilter::dropped_without_rule(&signature, facts);
    let unconfirmed = || {
        let behind_queue = netfilter::may_be_clash_behind_queue(&signature, facts);
        if !behind_queue && !netfilter::may_be_unconfirmed(&signature, event, facts) {
            None
        } else if facts.clashes_unseen {
            Some(netfilter::CLASHES_UNSEEN)
        } else {
            Some(netfilter::UNREAD)
        }
    };
    let of_netfilter = netfilter::doubt(&signature)
        .or_else(ruleless)
        .or_else(unconfirmed);
    let doubt = of_netfilter.or_else(of_socket).or_else(|| {
        let overflow = signature.site == Site::Free && signature.because(&["TCP_LISTEN_OVERFLOW"]);
        overflow.then_some(
            "the kernel gives this reason for every last ACK of a handshake that a listener refuses, whether its queue is full or not",
        )
    });
    found.put("doubt", doubt);
    if let Some(reason) = facts
        .reason
        .as_deref()
        .filter(|reason| *reason != "NOT_SPECIFIED")
    {
        found.advise(
            format!("Read what the kernel's developers say about {reason}."),
            None,
            "In include/net/dropreason-core.h of the kernel source, for this kernel's release.",
        );
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{Site, bits};

    use crate::diagnose::causes::sample::{Kernel, Sample, V5_10, V6_1, V6_12, V7_3};

    pub(in super::super) fn samples_with_reason() -> Vec<Sample> {
        [V6_1, V6_12, V7_3]
            .into_iter()
            .flat_map(|kernel| {
                [
                    Sample::freed(kernel, Site::Free, "do_execute_actions").reason("OPENVSWITCH_LAST_ACTION"),
                    Sample::freed(kernel, Site::Free, "nf_hook_slow")
                        .reason("NETFILTER_DROP")
                        .bits(bits::SERVICE_IPVS),
                ]
            })
            .collect()
    }

    pub(in super::super) fn samples_without_reason() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                [
                    Sample::freed(kernel, Site::Free, "ip_forward"),
                    Sample::freed(kernel, Site::Free, "nfqnl_reinject").bits(bits::CONNTRACK_DYING),
                ]
            })
            .collect()
    }

    #[test]
    fn the_kernels_own_word_is_kept() {
        let drop = Sample::freed(V6_12, Site::Free, "tun_net_xmit")
            .reason("TAP_FILTER")
            .label();
        assert_eq!(drop.cause, "kernel-reason");
        assert_eq!(drop.evidence["reason"], "TAP_FILTER");
        assert_eq!(drop.evidence["location"], "tun_net_xmit");
        assert!(drop.remedy[0].action.contains("TAP_FILTER"));
    }

    #[test]
    fn doubt_is_told_not_resolved() {
        for (sample, cause) in [
            (
                Sample::freed(V5_10, Site::Free, "nf_hook_slow").bits(bits::SERVICE_IPVS),
                "unknown",
            ),
            (
                Sample::freed(V5_10, Site::Free, "nf_hook_slow").bits(bits::STALE_HINT),
                "unknown",
            ),
            (
                Sample::freed(V6_12, Site::Free, "nf_hook_slow")
                    .reason("NETFILTER_DROP")
                    .bits(bits::CONNTRACK_DYING),
                "kernel-reason",
            ),
            (
                Sample::freed(V7_3, Site::Free, "tcp_v4_rcv").reason("TCP_LISTEN_OVERFLOW"),
                "kernel-reason",
            ),
        ] {
            let drop = sample.label();
            assert_eq!(drop.cause, cause);
            assert!(drop.evidence["doubt"].is_string(), "{drop:?}");
        }
        assert!(Sample::freed(V5_10, Site::Free, "ip_forward").label().evidence["doubt"].is_null());
    }
}
