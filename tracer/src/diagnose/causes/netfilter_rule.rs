//! `netfilter-rule`: a rule or policy of netfilter dropped or rejected the packet.

use droptrace_common::{Site, bits};

use super::values::{Segment, device, in_netns};
use crate::diagnose::{Cause, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// A netfilter verdict ended the packet, and no better cause is known for it.
pub(super) static CAUSE: Cause = Cause {
    slug: "netfilter-rule",
    family: Family::Netfilter,
    title: "netfilter rule or policy dropped the packet",
    mechanism: "A rule, or the policy of a chain, of nftables or iptables gave the verdict DROP or REJECT. nf_hook_slow \
        (net/netfilter/core.c) frees the packet; from 6.12 on, and in 6.1.192, nftables frees it in nft_do_chain. A packet that a program \
        behind NFQUEUE dropped is freed at nf_reinject or nfqnl_reinject, one that no program would take at nf_queue. \
        Conntrack clashes, a full conntrack table and IPVS give the same verdict and are causes of their own; where the \
        destination is an IPVS service and nf_hook_slow freed the packet, it stays open who dropped it (kernel-reason). For a \
        local sender send() fails with EPERM.",
    evidence: &[
        (
            "by",
            "rule, reject (a REJECT target or reject statement answered), nfqueue (a program's verdict, or a later rule), or nfqueue-full (no program listens, or its queue is full)",
        ),
        (
            "engine",
            "nftables, where the kernel tells (6.12 and later, 6.1.192); null when it may be iptables or nftables",
        ),
        (
            "hook_point",
            "prerouting, input, forward, output, postrouting, ingress or bridge; null when the stack does not tell",
        ),
        ("interface", "device that the packet came by or leaves by"),
        (
            "segment",
            "syn, reply (SYN-ACK) or mid-stream; null when it is not TCP",
        ),
        (
            "meaning",
            "what the loss of it does to the connection; null when it is not TCP",
        ),
    ],
    remedy: "Find the rule by its counter or by a trace of one packet; add an accept before it if the packet is wanted.",
    counter: None,
    benign: false,
    needs: &[Need::Owner],
    matches: |signature| by(signature.site, signature).is_some(),
    verdict: |signature: &Signature<'_>| {
        if signature.site == Site::NetfilterReject {
            Verdict::Rejected
        } else {
            Verdict::Dropped
        }
    },
    find,
    refine: None,
};

/// Why a verdict of netfilter is not laid to a rule: conntrack or IPVS may just as well have given it.
pub(super) fn doubt(signature: &Signature<'_>) -> Option<&'static str> {
    if signature.has(bits::STALE_HINT)
        && signature.at(&["nf_hook_slow", "nf_reinject", "nfqnl_reinject", "nft_do_chain"])
    {
        Some(
            "conntrack, IPVS or a reject rule gave a verdict on such a packet too long before this free: it stays open whether the packet is the same",
        )
    } else if !signature.at(&["nf_hook_slow", "nf_reinject", "nfqnl_reinject"]) {
        None
    } else if signature.has(bits::CONNTRACK_DYING) {
        Some(
            "conntrack drops a packet whose entry is being removed at the same place as a rule: it stays open which of them did",
        )
    } else if signature.has(bits::SERVICE_IPVS) && !signature.has(bits::IPVS_PROPERTY) {
        Some(
            "the destination is an IPVS service, and IPVS drops silently at the same place as a rule: run with --ipvs to tell them apart",
        )
    } else {
        None
    }
}

/// Who gave the verdict; `None`: not netfilter, or not known to be a rule.
fn by(site: Site, signature: &Signature<'_>) -> Option<&'static str> {
    let named = signature.because(&["NETFILTER_DROP"]);
    match site {
        Site::NetfilterReject => Some("reject"),
        Site::Free if doubt(signature).is_some() => None,
        Site::Free if named && signature.at(&["nft_do_chain"]) => Some("rule"),
        Site::Free if (named || signature.reason.is_none()) && signature.at(&["nf_hook_slow"]) => {
            Some("rule")
        }
        Site::Free if signature.unspecified() && signature.at(&["nf_reinject", "nfqnl_reinject"]) => {
            Some("nfqueue")
        }
        Site::Free if signature.unspecified() && signature.at(&["nf_queue"]) => Some("nfqueue-full"),
        _ => None,
    }
}

/// The hook point: the innermost frame that belongs to one.
fn hook_point(facts: &Facts) -> Option<&'static str> {
    facts.frames.iter().find_map(|frame| point_of_frame(frame))
}

/// The hook point that a function calls netfilter for.
fn point_of_frame(frame: &str) -> Option<&'static str> {
    Some(match frame.split('.').next().unwrap_or(frame) {
        "ip_rcv"
        | "ip_list_rcv"
        | "ip_sublist_rcv"
        | "ipv6_rcv"
        | "ipv6_list_rcv"
        | "ip6_sublist_rcv"
        | "br_nf_pre_routing"
        | "br_nf_pre_routing_ipv6" => "prerouting",
        "ip_local_deliver" | "ip6_input" => "input",
        "ip_forward" | "ip6_forward" | "br_nf_forward" | "br_nf_forward_ip" => "forward",
        "__ip_local_out" | "ip_local_out" | "__ip6_local_out" | "ip6_local_out" | "ip6_xmit" => "output",
        "ip_output" | "ip_mc_output" | "ip6_output" | "br_nf_post_routing" => "postrouting",
        "__netif_receive_skb_core" => "ingress",
        "br_handle_frame" | "br_forward" | "__br_forward" | "br_pass_frame_up" => "bridge",
        _ => return None,
    })
}

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let signature = Signature::of_event(event, facts);
    let by = by(event.site, &signature);
    let point = hook_point(facts);
    let segment = Segment::of(event);
    let rejected = event.site == Site::NetfilterReject;
    found
        .put("by", by)
        .put("engine", signature.at(&["nft_do_chain"]).then_some("nftables"))
        .put("hook_point", point)
        .put("interface", device(event, facts))
        .put("segment", segment.map(Segment::name))
        .put(
            "meaning",
            segment.map(|segment| match (segment, rejected) {
                (Segment::Syn, true) => "the connection is refused at once",
                (Segment::Syn, false) => "the connection cannot be opened: the client tries again until it gives up",
                (Segment::Reply, _) => {
                    "the connection was let through one way, its answer is not: a rule forgets the way back"
                }
                (Segment::MidStream, true) => "a running connection is cut",
                (Segment::MidStream, false) => {
                    "a running connection stalls: a rule came later than the connection, or its conntrack state is lost or INVALID"
                }
            }),
        );
    advise(&mut found, event, facts, by, point);
    found
}

fn advise(found: &mut Finding, event: &RawEvent, facts: &Facts, by: Option<&str>, point: Option<&str>) {
    if by == Some("nfqueue-full") {
        found.advise(
            "See which program should take packets from the queue, whether it runs and keeps up.",
            Some(in_netns(facts, None, "cat /proc/net/netfilter/nfnetlink_queue")),
            "Reads only: queue, port id of the program, waiting, dropped by the queue and by the program. A rule with `--queue-bypass` (nft: `bypass`) lets packets pass while no program listens.",
        );
        return;
    }
    found.advise(
        "Find the rule: its counter grows with each such packet.",
        Some(in_netns(
            facts,
            None,
            "sh -c \"iptables-save -c | grep -e DROP -e REJECT -e QUEUE; nft list ruleset | grep -n -e drop -e reject -e queue\"",
        )),
        "Reads only. For IPv6 rules of iptables: ip6tables-save -c. nft counts only where a rule says `counter`.",
    );
    let packet = event.parse();
    if let Some((src, dst)) = packet.src.zip(packet.dst) {
        let family = if src.is_ipv4() { "ip" } else { "ip6" };
        let transport = match (packet.protocol_name(), packet.dport) {
            (Some(name), Some(port)) if matches!(name.as_str(), "tcp" | "udp" | "sctp") => {
                format!(" {name} dport {port}")
            }
            _ => String::new(),
        };
        let hook = if matches!(point, Some("output" | "postrouting")) && event.header.iif == 0 {
            "output"
        } else {
            "prerouting"
        };
        found.advise(
            "Or trace one such packet through all nftables rules, those of iptables-nft included.",
            Some(in_netns(
                facts,
                None,
                &format!("sh -c \"nft add table inet look; nft 'add chain inet look c {{ type filter hook {hook} priority -350; }}'; nft add rule inet look c {family} saddr {src} {family} daddr {dst}{transport} meta nftrace set 1; timeout 10 nft monitor trace; nft delete table inet look\""),
            )),
            "Adds a table `look` for ten seconds (broken off, it stays: `nft delete table inet look`). Each traced packet costs time. Rules of iptables-legacy do not show.",
        );
    }
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::Verdict;
    use crate::diagnose::causes::sample::{ACK, Kernel, SYN, SYN_ACK, Sample, V6_1, V6_12};

    fn freed(kernel: Kernel, location: &str) -> Sample {
        Sample::freed(kernel, Site::Free, location)
            .reason_since(V6_1, "NETFILTER_DROP")
            .tcp("10.0.0.9:40000", "10.0.0.1:80", SYN)
            .on("eth0")
    }

    fn frames(sample: Sample, names: &[&str]) -> Sample {
        sample.fact(|facts| facts.frames = names.iter().map(|name| (*name).to_owned()).collect())
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                // nftables frees the packet itself from 6.12 on.
                let nft = if kernel >= V6_12 {
                    "nft_do_chain"
                } else {
                    "nf_hook_slow"
                };
                [
                    frames(
                        freed(kernel, nft),
                        &["nf_hook_slow", "ip_local_deliver", "ip_rcv"],
                    ),
                    frames(
                        Sample::freed(kernel, Site::NetfilterReject, "nf_hook_slow")
                            .reason_since(V6_1, "NETFILTER_DROP")
                            .udp("[fd00::9]:40000", "[fd00::1]:53")
                            .on("eth0"),
                        &["nf_hook_slow", "ip6_forward"],
                    ),
                ]
            })
            .collect()
    }

    #[test]
    fn hook_point_is_the_innermost_frame_that_belongs_to_one() {
        for kernel in Kernel::ALL {
            for (names, point) in [
                (&["nf_hook_slow", "ip_local_deliver", "ip_rcv"][..], "input"),
                (
                    &["nf_hook_slow", "ip_rcv", "__netif_receive_skb_one_core"],
                    "prerouting",
                ),
                (&["nf_hook_slow", "ip_forward", "ip_rcv"], "forward"),
                (&["nf_hook_slow", "__ip_local_out", "ip_local_out"], "output"),
                (&["nf_hook_slow", "ip_output", "__ip_queue_xmit"], "postrouting"),
                (&["nf_hook_slow", "ip6_xmit.constprop.0"], "output"),
            ] {
                let drop = frames(freed(kernel, "nf_hook_slow"), names).label();
                assert_eq!(drop.cause, "netfilter-rule");
                assert_eq!(drop.evidence["hook_point"], point);
                assert_eq!(drop.verdict, Verdict::Dropped);
            }
            let unknown = frames(freed(kernel, "nf_hook_slow"), &["nf_hook_slow"]).label();
            assert!(unknown.evidence["hook_point"].is_null());
        }
    }

    #[test]
    fn rejected_and_queued_packets_say_so() {
        for kernel in Kernel::ALL {
            let rejected = Sample::freed(kernel, Site::NetfilterReject, "nf_hook_slow").tcp(
                "10.0.0.9:40000",
                "10.0.0.1:80",
                SYN,
            );
            let rejected = frames(rejected, &["nf_hook_slow", "ip_local_deliver"]).label();
            assert_eq!(rejected.verdict, Verdict::Rejected);
            assert_eq!(rejected.evidence["by"], "reject");
            assert_eq!(rejected.evidence["hook_point"], "input");
            let full = Sample::freed(kernel, Site::Free, "nf_queue")
                .tcp("10.0.0.9:40000", "10.0.0.1:80", SYN)
                .label();
            assert_eq!(full.evidence["by"], "nfqueue-full");
            assert!(full.remedy[0].effect.contains("bypass"));
        }
    }

    #[test]
    fn trace_holds_the_packets_own_values() {
        let drop = frames(freed(V6_12, "nft_do_chain"), &["ip_local_deliver"]).label();
        assert_eq!(drop.evidence["engine"], "nftables");
        let command = drop.remedy[1].command.clone().unwrap_or_default();
        assert!(command.contains("ip saddr 10.0.0.9 ip daddr 10.0.0.1 tcp dport 80 meta nftrace set 1"));
        assert!(command.contains("hook prerouting"));
        let out = frames(freed(V6_12, "nft_do_chain").leaving("eth0"), &["__ip_local_out"]).label();
        assert!(
            out.remedy[1]
                .command
                .as_deref()
                .is_some_and(|command| command.contains("hook output"))
        );
    }

    #[test]
    fn each_segment_has_its_own_meaning() {
        let meaning = |flags| {
            Sample::freed(V6_1, Site::Free, "nf_hook_slow")
                .reason("NETFILTER_DROP")
                .tcp("10.0.0.9:40000", "10.0.0.1:80", flags)
                .label()
                .evidence["meaning"]
                .clone()
        };
        let told = [meaning(SYN), meaning(SYN_ACK), meaning(ACK)];
        assert!(told.iter().all(serde_json::Value::is_string));
        assert!(told[0] != told[1] && told[1] != told[2] && told[0] != told[2]);
    }
}
