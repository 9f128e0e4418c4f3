//! `netfilter-rule`: a rule or policy of netfilter dropped the packet.

use droptrace_common::Site;

use super::{masquerade_no_address, netfilter, unknown};
use crate::diagnose::{Cause, Family, Need, Signature, Verdict};

/// A netfilter verdict ended the packet, and no better cause is known for it.
pub(super) static CAUSE: Cause = Cause {
    slug: "netfilter-rule",
    family: Family::Netfilter,
    title: "netfilter rule or policy dropped the packet",
    mechanism: "A rule, or the policy of a chain, of nftables or iptables gave the verdict DROP. nf_hook_slow \
        (net/netfilter/core.c) frees the packet; from 6.12 on, and in 6.1.192, nftables frees it in nft_do_chain. \
        Conntrack clashes, a full conntrack table and IPVS give the same verdict and are causes of their own; where the \
        destination is an IPVS service and nf_hook_slow freed the packet, where no rule or policy can drop at the hook point, where all of them count and none did, or where the packet would \
        have opened a connection and the rules could not be read in time, it stays open who dropped it (kernel-reason). For a \
        local sender send() fails with EPERM. The kernel does not say which rule it was: after such a packet the rulesets of its \
        netns are read (never changed), and a rule is told if its counter alone moved, and by as many packets as were seen to end \
        so since the reading before. Hence none is told for the first packet, nor for a rule or policy of nftables that does not count.",
    evidence: netfilter::EVIDENCE,
    remedy: netfilter::REMEDY,
    counter: None,
    benign: false,
    needs: &[Need::Owner, Need::Rules],
    matches: |signature| {
        signature.site == Site::Free
            && netfilter::doubt(signature).is_none()
            && netfilter::by_verdict(signature)
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find: |event, facts| netfilter::find(event, facts, false),
    refine: Some(|event, facts| {
        let signature = Signature::of_event(event, facts);
        let open = netfilter::dropped_without_rule(&signature, facts).is_some()
            || netfilter::may_be_unconfirmed(&signature, event, facts);
        masquerade_no_address::refine(event, facts).or_else(|| open.then(|| unknown::left_open(facts)))
    }),
};

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site, ct_status};

    use crate::diagnose::causes::{
        netfilter::tests::{by_nftables, frames, freed, rules, told_or_not},
        sample::{ACK, Kernel, SYN, SYN_ACK, Sample, V5_10, V6_1, V6_12},
    };
    use crate::diagnose::{Rules, Verdict};

    const INPUT: &[&str] = &["nf_hook_slow", "ip_local_deliver", "ip_rcv"];

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                let dropped = frames(by_nftables(kernel, Site::Free), INPUT);
                [dropped.clone()]
                    .into_iter()
                    .chain(told_or_not(&dropped, "input"))
            })
            .collect()
    }

    #[test]
    fn hook_point_is_the_innermost_frame_that_belongs_to_one() {
        for kernel in Kernel::ALL {
            for (names, point) in [
                (INPUT, "input"),
                (
                    &["nf_hook_slow", "ip_rcv", "__netif_receive_skb_one_core"],
                    "prerouting",
                ),
                (&["nf_hook_slow", "ip_forward", "ip_rcv"], "forward"),
                (&["nf_hook_slow", "__ip_local_out", "ip_local_out"], "output"),
                (&["nf_hook_slow", "ip_output", "__ip_queue_xmit"], "postrouting"),
                (&["nf_hook_slow", "ip6_xmit.constprop.0"], "output"),
            ] {
                let drop = frames(freed(kernel, Site::Free, "nf_hook_slow"), names).label();
                assert_eq!(drop.cause, "netfilter-rule");
                assert_eq!(drop.evidence["hook_point"], point);
                assert_eq!(drop.verdict, Verdict::Dropped);
            }
            let unknown = frames(freed(kernel, Site::Free, "nf_hook_slow"), &["nf_hook_slow"]).label();
            assert!(unknown.evidence["hook_point"].is_null());
        }
    }

    #[test]
    fn a_counter_tells_the_rule_and_elimination_the_chain() {
        let dropped = || frames(freed(V6_1, Site::Free, "nf_hook_slow"), INPUT);
        let told = dropped().fact(rules(&["input", "late"], true)).label();
        assert_eq!(told.evidence["told_by"], "counter");
        assert_eq!(told.evidence["rule"], "handle 4");
        assert_eq!(told.evidence["chain"], "input");
        assert!(told.evidence["untold"].is_null());
        let command = told.remedy[0].command.as_deref();
        assert!(command.is_some_and(|command| command.ends_with("nft -a list chain inet t input")));

        let only = dropped().fact(rules(&["input"], false)).label();
        assert_eq!(only.evidence["told_by"], "elimination");
        assert_eq!(only.evidence["table"], "inet t");
        assert!(only.evidence["rule"].is_null() && only.evidence["untold"].is_string());

        let several = dropped().fact(rules(&["input", "late"], false)).label();
        let unread = dropped().fact(rules(&["input"], false)).fact(|facts| {
            if let Some(rules) = &mut facts.rules {
                rules
                    .unread
                    .push("iptables-legacy, ip filter: refused".to_owned());
            }
        });
        // All of them, where the stack does not tell the hook point.
        let nowhere = frames(dropped(), &[]).fact(rules(&["input"], false)).label();
        for open in [several, unread.label(), nowhere] {
            for field in ["told_by", "chain", "table", "engine"] {
                assert!(open.evidence[field].is_null(), "{field} of {open:?}");
            }
        }
        let unasked = dropped().label();
        assert_eq!(unasked.evidence["untold"], "not observed");
        assert!(unasked.evidence["candidates"].is_null());
    }

    #[test]
    fn where_no_rule_can_drop_it_was_none() {
        let ruleless = |place| {
            frames(freed(V6_1, Site::Free, place), INPUT).fact(|facts| facts.rules = Some(Rules::default()))
        };
        let unmoved = |place| {
            frames(freed(V6_1, Site::Free, place), INPUT)
                .fact(rules(&["input"], false))
                .fact(|facts| facts.rules.as_mut().unwrap().unmoved = true)
        };
        for open in [ruleless("nf_hook_slow"), unmoved("nf_hook_slow")] {
            let open = open.label();
            assert_eq!(open.cause, "kernel-reason");
            assert!(open.evidence["doubt"].is_string());
        }
        assert_eq!(unmoved("nft_do_chain").label().cause, "netfilter-rule");
        // nftables itself freed it: the rule is gone by now.
        assert_eq!(ruleless("nft_do_chain").label().cause, "netfilter-rule");
        let nowhere = frames(ruleless("nf_hook_slow"), &[]);
        assert_eq!(nowhere.label().cause, "netfilter-rule");
    }

    #[test]
    fn of_a_first_packet_without_known_rules_it_stays_open() {
        for (kernel, open) in [(V5_10, "unknown"), (V6_1, "kernel-reason")] {
            let first = |names: &[&str]| {
                let dropped = freed(kernel, Site::Free, "nf_hook_slow");
                frames(dropped, names).field(FieldId::EntryStatus, 0)
            };
            let drop = first(INPUT).label();
            assert_eq!(drop.cause, open);
            assert!(drop.evidence["doubt"].is_string());
            assert_eq!(first(&[]).label().cause, open);
            // Conntrack does not confirm there, nor what it has confirmed, and a rule that is known may well have done it.
            let forward = first(&["nf_hook_slow", "ip_forward"]).label();
            let later = frames(freed(kernel, Site::Free, "nf_hook_slow"), INPUT)
                .field(FieldId::EntryStatus, ct_status::CONFIRMED)
                .label();
            let known = first(INPUT).fact(rules(&["input"], false)).label();
            for drop in [forward, later, known] {
                assert_eq!(drop.cause, "netfilter-rule");
            }
            let unseen = |told| {
                first(INPUT)
                    .fact(rules(&["input"], told))
                    .fact(|facts| facts.clashes_unseen = true)
                    .label()
            };
            assert_eq!(unseen(false).cause, open);
            assert_eq!(unseen(true).cause, "netfilter-rule");
        }
    }

    #[test]
    fn trace_holds_the_packets_own_values() {
        let drop = frames(freed(V6_12, Site::Free, "nft_do_chain"), &["ip_local_deliver"]).label();
        assert_eq!(drop.evidence["engine"], "nftables");
        let command = drop.remedy[1].command.clone().unwrap_or_default();
        assert!(command.contains("ip saddr 10.0.0.9 ip daddr 10.0.0.1 tcp dport 80 meta nftrace set 1"));
        assert!(command.contains("hook prerouting"));
        let out = frames(
            freed(V6_12, Site::Free, "nft_do_chain").leaving("eth0"),
            &["__ip_local_out"],
        );
        let out = out.label();
        let command = out.remedy[1].command.as_deref();
        assert!(command.is_some_and(|command| command.contains("hook output")));
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
