//! `masquerade-no-address`: masquerading found no address to translate to.

use super::{
    netfilter,
    values::{device, in_netns},
};
use crate::diagnose::{Cause, Facts, Family, Finding, HookPoint, RawEvent, Signature, Verdict};

/// The device by which the packet would leave has no address.
pub(super) static CAUSE: Cause = Cause {
    slug: "masquerade-no-address",
    family: Family::Netfilter,
    title: "masquerading found no address on the outgoing device",
    mechanism: "A MASQUERADE target or masquerade statement translates the source to an address of the device by which the packet leaves. Where \
        that has none, nf_nat_masquerade_ipv4 or _ipv6 (net/netfilter/nf_nat_masquerade.c) drops the packet. A rule drops at the same \
        place: it is this cause only where no rule or policy of any ruleset can drop at postrouting, and some rule there \
        masquerades (known from full events, hence sampled).",
    evidence: &[
        ("interface", "device by which the packet would have left"),
        (
            "address",
            "whether that device has an address of the packet's family",
        ),
    ],
    remedy: "Give the device an address, or do not masquerade what leaves by it.",
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
    let masquerades = facts.rules.as_ref().is_some_and(|rules| rules.masquerades);
    let signature = Signature::of_event(event, facts);
    let is = masquerades
        && HookPoint::of(facts) == Some(HookPoint::Postrouting)
        && facts.out_has_address == Some(false)
        && netfilter::by_verdict(&signature)
        && netfilter::no_rule_can(facts);
    is.then_some(&CAUSE)
}

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let out = facts.devices.get(&event.header.ifindex).map(String::as_str);
    let interface = out.or_else(|| device(event, facts));
    found
        .put("interface", interface)
        .put("address", facts.out_has_address);
    found.advise(
        "Give the device an address, or take it from the rule that masquerades.",
        Some(in_netns(
            facts,
            None,
            &format!(
                "sh -c \"ip address show{}; iptables-save -t nat | grep MASQUERADE; nft list ruleset | grep -n masquerade\"",
                interface.map(|name| format!(" dev {name}")).unwrap_or_default()
            ),
        )),
        "Reads only.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::{
        Rules,
        causes::{
            netfilter::tests::{frames, freed, rules},
            sample::{Kernel, Sample, V5_10, V6_1, V6_12},
        },
    };

    /// From 6.12 on nftables frees in its own function.
    fn sample(kernel: Kernel) -> Sample {
        let place = if kernel >= V6_12 {
            "nft_do_chain"
        } else {
            "nf_hook_slow"
        };
        frames(freed(kernel, Site::Free, place).leaving("eth1"), &["ip_output"]).fact(|facts| {
            facts.out_has_address = Some(false);
            facts.rules = Some(Rules {
                masquerades: true,
                ..Rules::default()
            });
        })
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL.into_iter().map(sample).collect()
    }

    #[test]
    fn an_address_or_a_rule_that_can_drop_makes_it_another() {
        for kernel in Kernel::ALL {
            let addressed = sample(kernel).fact(|facts| facts.out_has_address = Some(true));
            let ruled = sample(kernel).fact(rules(&["post"], false));
            let forwarded = frames(sample(kernel), &["ip_forward"]);
            assert_eq!(ruled.label().cause, "netfilter-rule");
            // Where no rule can drop, one must have if nftables itself frees the packet.
            let open = match kernel {
                V5_10 => "unknown",
                V6_1 => "kernel-reason",
                _ => "netfilter-rule",
            };
            for other in [addressed, forwarded] {
                assert_eq!(other.label().cause, open);
            }
            assert_eq!(sample(kernel).label().evidence["interface"], "eth1");
        }
    }
}
