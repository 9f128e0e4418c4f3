//! `netfilter-reject`: a rule of netfilter answered the packet and dropped it.

use droptrace_common::Site;

use super::{
    evidence::joined,
    netfilter::{self, PACKET, RULE},
};
use crate::diagnose::{Cause, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// A rule answers with RST or an ICMP error.
pub(super) static CAUSE: Cause = Cause {
    slug: "netfilter-reject",
    family: Family::Netfilter,
    title: "netfilter rule rejected the packet",
    mechanism: "A REJECT target of iptables, or a reject statement of nftables, answers the packet with RST (nf_send_reset, \
        nf_send_reset6) or with an ICMP error (nf_send_unreach, nf_send_unreach6; net/ipv4/netfilter/nf_reject_ipv4.c and its \
        IPv6 twin), then drops it like any other rule. Which rule it was is found out as for netfilter-rule. A RST of a bridge's \
        own chains is made elsewhere, and shows as netfilter-rule.",
    evidence: joined![RULE, PACKET],
    remedy: "Look at the rule, or find it by its counter or by a trace of one packet; add an accept before it if the packet is wanted.",
    counter: None,
    benign: false,
    needs: &[Need::Owner, Need::Rules],
    matches: |signature| signature.site == Site::NetfilterReject,
    verdict: |_: &Signature<'_>| Verdict::Rejected,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    netfilter::put_rule(&mut found, event, facts);
    netfilter::put_packet(&mut found, event, facts, true);
    netfilter::advise(&mut found, event, facts);
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::Verdict;
    use crate::diagnose::causes::{
        netfilter::tests::{frames, freed, rules},
        sample::{Kernel, Sample, V6_1, V6_12},
    };

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                let nft = if kernel >= V6_12 {
                    "nft_do_chain"
                } else {
                    "nf_hook_slow"
                };
                let udp = Sample::freed(kernel, Site::NetfilterReject, "nf_hook_slow")
                    .reason_since(V6_1, "NETFILTER_DROP")
                    .udp("[fd00::9]:40000", "[fd00::1]:53")
                    .on("eth0");
                let tcp = || {
                    frames(
                        freed(kernel, Site::NetfilterReject, nft),
                        &["nf_hook_slow", "ip_local_deliver"],
                    )
                };
                [
                    frames(udp, &["nf_hook_slow", "ip6_forward"]),
                    tcp().fact(rules(&["input"], true)),
                    tcp().fact(rules(&["input", "late"], false)),
                ]
            })
            .collect()
    }

    #[test]
    fn rejected_packets_say_so() {
        for sample in samples() {
            let drop = sample.label();
            assert_eq!(drop.verdict, Verdict::Rejected);
            assert!(drop.evidence["hook_point"].is_string());
        }
    }
}
