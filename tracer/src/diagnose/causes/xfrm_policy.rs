//! `xfrm-policy`: IPsec does not let the packet through.

use super::values::{in_netns, on};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// A policy of IPsec blocks the packet, or wants it protected and it is not.
pub(super) static CAUSE: Cause = Cause {
    slug: "xfrm-policy",
    family: Family::Device,
    title: "IPsec policy does not let the packet through",
    mechanism: "Where IPsec policies (ip xfrm policy) exist, the kernel asks them for every packet: one may block it, or demand that it came through a tunnel or transport that it did not \
        come through. __xfrm_policy_check (net/xfrm/xfrm_policy.c) says no then, and whoever asked frees the packet: the transport protocol for what is for this host, ip_forward or \
        ip6_forward for the rest. From 6.1 on the reason is XFRM_POLICY; on 5.10 the place has other causes, too, and the drop stays unknown.",
    evidence: &[
        ("where", "forward, or input"),
        ("interface", "device that the packet came by"),
        ("destination", "where the packet goes to"),
    ],
    remedy: "Compare the policies with what the peer sends: a peer that lost its security association sends in the clear, and a policy that is too wide covers others.",
    counter: Some(Counter {
        name: "/proc/net/xfrm_stat, where the kernel has it: XfrmInPolBlock, XfrmInTmplMismatch, XfrmInNoPols, XfrmFwdHdrError",
    }),
    benign: false,
    needs: &[Need::Symbols],
    matches: |signature| signature.because(&["XFRM_POLICY"]),
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let packet = event.parse();
    let forward = Signature::of_event(event, facts).at(&["ip_forward", "ip6_forward"]);
    let (place, direction) = if forward {
        ("forward", "fwd")
    } else {
        ("input", "in")
    };
    found
        .put("where", place)
        .put("interface", on(event, facts))
        .put("destination", packet.dst.map(|ip| ip.to_string()));
    found.advise(
        "See the policies of that direction, with what they cover, and the security associations that there are.",
        Some(in_netns(
            facts,
            None,
            &format!("sh -c \"ip xfrm policy list dir {direction}; ip -s xfrm state list\""),
        )),
        "Reads only. Shows keys of the associations: mind who sees the terminal.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::causes::sample::{Sample, V6_1, V6_12, V7_3};

    pub(in super::super) fn samples() -> Vec<Sample> {
        [V6_1, V6_12, V7_3]
            .into_iter()
            .flat_map(|kernel| {
                ["udp_queue_rcv_one_skb", "ip_forward"].map(|place| {
                    Sample::freed(kernel, Site::Free, place)
                        .reason("XFRM_POLICY")
                        .udp("10.0.0.9:4000", "10.0.0.1:53")
                        .on("eth0")
                })
            })
            .collect()
    }

    #[test]
    fn the_direction_whose_policies_count_is_told() {
        for (sample, place) in samples().iter().zip(["input", "forward"].iter().cycle()) {
            let drop = sample.label();
            assert_eq!(drop.evidence["where"], *place);
            let direction = if *place == "input" { "dir in;" } else { "dir fwd;" };
            assert!(
                drop.remedy[0]
                    .command
                    .as_ref()
                    .is_some_and(|command| command.contains(direction))
            );
        }
    }
}
