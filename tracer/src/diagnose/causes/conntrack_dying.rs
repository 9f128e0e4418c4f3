//! `conntrack-dying`: the packet's conntrack entry was being removed.

use super::{
    evidence::joined,
    netfilter::{self, PACKET},
    values::in_netns,
};
use crate::diagnose::{Cause, Facts, Family, Finding, HookPoint, RawEvent, Signature, Verdict};
use droptrace_common::bits;

/// Conntrack, not a rule, dropped a packet whose entry is dying.
pub(super) static CAUSE: Cause = Cause {
    slug: "conntrack-dying",
    family: Family::Conntrack,
    title: "conntrack entry of the packet was being removed",
    mechanism: "An entry may be removed while a packet of it is on its way: a masqueraded connection now leaves by another device, or, up to 5.18, a \
        module with a helper or a timeout goes. nf_nat_inet_fn (net/netfilter/nf_nat_core.c) drops the packet of an entry that it removes \
        itself, __nf_conntrack_confirm (nf_conntrack_core.c) the first packet of one that was marked as dying. From 5.19 on an entry that is \
        not confirmed yet is not marked when a module goes: some kernels drop its packet all the same, which stays open (kernel-reason; seen on \
        6.1.192), newer ones do not (6.12.118). A rule drops at the \
        same place: it is this cause only where no rule or policy of any ruleset can drop at the hook point, or where all that can count, and none did \
        (known from full events, hence sampled); else it stays open.",
    evidence: joined![
        [("hook_point", "prerouting, input, forward, output or postrouting")],
        PACKET
    ],
    remedy: "Nothing, if it was once: the packet is sent again, and makes a new entry. Else find what removes entries: most likely a route that goes to and fro between devices that masquerade.",
    counter: None,
    benign: false,
    needs: &[],
    matches: |_| false,
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

/// This cause, where nothing else can have dropped the packet.
pub(super) fn refine(event: &RawEvent, facts: &Facts) -> Option<&'static Cause> {
    let signature = Signature::of_event(event, facts);
    let dying = netfilter::by_verdict(&signature)
        && signature.has(bits::CONNTRACK_DYING)
        && !signature.has(bits::STALE_HINT)
        && !signature.has(bits::SERVICE_IPVS);
    let ruleless = netfilter::no_rule_can(facts) || netfilter::no_rule_moved(facts);
    (dying && ruleless).then_some(&CAUSE)
}

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    found.put("hook_point", HookPoint::of(facts).map(HookPoint::name));
    netfilter::put_packet(&mut found, event, facts, false);
    found.advise(
        "See which entries go, and whether routes change at the same time (`ip monitor route`).",
        Some(in_netns(facts, None, "timeout 10 conntrack -E -e DESTROY")),
        "Shows for ten seconds which entries go; one that goes long before its time was removed by somebody.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{Site, bits};

    use crate::diagnose::causes::{
        netfilter::tests::{frames, freed, rules},
        sample::{Kernel, Sample, V5_10},
    };

    fn dying(kernel: Kernel) -> Sample {
        frames(
            freed(kernel, Site::Free, "nf_hook_slow").bits(bits::CONNTRACK_DYING),
            &["nf_hook_slow", "ip_local_deliver"],
        )
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .map(|kernel| dying(kernel).fact(|facts| facts.rules = Some(crate::diagnose::Rules::default())))
            .collect()
    }

    #[test]
    fn where_a_rule_can_drop_it_stays_open() {
        for kernel in Kernel::ALL {
            let open = if kernel == V5_10 {
                "unknown"
            } else {
                "kernel-reason"
            };
            assert_eq!(dying(kernel).label().cause, open);
            let with_rules = dying(kernel).fact(rules(&["input"], false));
            assert_eq!(with_rules.clone().label().cause, open);
            let unmoved = with_rules.fact(|facts| facts.rules.as_mut().unwrap().unmoved = true);
            assert_eq!(unmoved.label().cause, "conntrack-dying");
            let nowhere = frames(dying(kernel), &[])
                .fact(|facts| facts.rules = Some(crate::diagnose::Rules::default()));
            assert_eq!(nowhere.label().cause, open);
        }
    }
}
