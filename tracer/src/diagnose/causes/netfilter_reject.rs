//! `netfilter-reject`: a rule of netfilter answered the packet and dropped it.

use droptrace_common::Site;

use super::netfilter;
use crate::diagnose::{Cause, Family, Need, Signature, Verdict};

/// A rule answers with RST or an ICMP error.
pub(super) static CAUSE: Cause = Cause {
    slug: "netfilter-reject",
    family: Family::Netfilter,
    title: "netfilter rule rejected the packet",
    mechanism: "A REJECT target of iptables, or a reject statement of nftables, answers the packet with RST (nf_send_reset, \
        nf_send_reset6) or with an ICMP error (nf_send_unreach, nf_send_unreach6; net/ipv4/netfilter/nf_reject_ipv4.c and its \
        IPv6 twin), then drops it like any other rule. Which rule it was is found out as for netfilter-rule. A RST of a bridge's \
        own chains is made elsewhere, and shows as netfilter-rule.",
    evidence: netfilter::EVIDENCE,
    remedy: netfilter::REMEDY,
    counter: None,
    benign: false,
    needs: &[Need::Owner, Need::Rules],
    matches: |signature| signature.site == Site::NetfilterReject,
    verdict: |_: &Signature<'_>| Verdict::Rejected,
    find: |event, facts| netfilter::find(event, facts, true),
    refine: None,
};

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::Verdict;
    use crate::diagnose::causes::{
        netfilter::tests::{by_nftables, frames, told_or_not},
        sample::{Kernel, Sample, V6_1},
    };

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                let udp = Sample::freed(kernel, Site::NetfilterReject, "nf_hook_slow")
                    .reason_since(V6_1, "NETFILTER_DROP")
                    .udp("[fd00::9]:40000", "[fd00::1]:53")
                    .on("eth0");
                let tcp = frames(
                    by_nftables(kernel, Site::NetfilterReject),
                    &["nf_hook_slow", "ip_local_deliver"],
                );
                [frames(udp, &["nf_hook_slow", "ip6_forward"])]
                    .into_iter()
                    .chain(told_or_not(&tcp, "input"))
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
