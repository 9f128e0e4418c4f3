//! `bridge-netfilter`: a bridged packet was dropped by a rule for routed ones.

use droptrace_common::Site;

use super::{
    evidence::joined,
    netfilter::{self, PACKET, RULE},
    netfilter_rule,
    values::{in_netns, sysctl},
};
use crate::diagnose::{Cause, Facts, Family, Finding, HookPoint, Need, RawEvent, Signature, Verdict};

/// A packet between two ports of a bridge met the rules of IP.
pub(super) static CAUSE: Cause = Cause {
    slug: "bridge-netfilter",
    family: Family::Netfilter,
    title: "bridged packet dropped by a rule for routed packets",
    mechanism: "The module br_netfilter passes what a bridge forwards to the hooks of IP, as if it were routed \
        (net/bridge/br_netfilter_hooks.c; net.bridge.bridge-nf-call-iptables and -ip6tables, on by default once the module is \
        loaded, as container runtimes do). A rule or policy of iptables or nftables then drops a packet that never leaves its bridge. Which \
        rule it was is found out as for netfilter-rule; a rule of the bridge's own tables is netfilter-rule.",
    evidence: joined![
        RULE,
        [(
            "call",
            "net.bridge.bridge-nf-call-iptables, for IPv6 bridge-nf-call-ip6tables; null when it could not be read",
        )],
        PACKET
    ],
    remedy: "Accept the packet in the chain at the hook point forward, or do not pass bridged packets to the hooks of IP.",
    counter: None,
    benign: false,
    needs: &[
        Need::Rules,
        Need::Sysctl("net.bridge.bridge-nf-call-iptables"),
        Need::Sysctl("net.bridge.bridge-nf-call-ip6tables"),
    ],
    matches: |signature| signature.site == Site::BridgeNetfilter && netfilter::doubt(signature).is_none(),
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: Some(refine),
};

/// The bridge's own hooks are asked on the same way.
fn refine(_: &RawEvent, facts: &Facts) -> Option<&'static Cause> {
    (HookPoint::of(facts) == Some(HookPoint::Bridge)).then_some(&netfilter_rule::CAUSE)
}

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    netfilter::put_rule(&mut found, event, facts);
    let call = if event.parse().is_ipv6() {
        "net.bridge.bridge-nf-call-ip6tables"
    } else {
        "net.bridge.bridge-nf-call-iptables"
    };
    found.put("call", sysctl(facts, call));
    netfilter::put_packet(&mut found, event, facts, false);
    netfilter::advise(&mut found, event, facts);
    found.advise(
        "Or do not pass bridged packets to the hooks of IP.",
        Some(in_netns(facts, None, &format!("sysctl -w {call}=0"))),
        "Kubernetes and Docker need it where packets between pods of one bridge pass a service address or a network policy.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::causes::{
        netfilter::tests::{frames, freed, told_or_not},
        sample::{Kernel, Sample, V5_10},
    };

    fn bridged(kernel: Kernel, names: &[&str]) -> Sample {
        frames(freed(kernel, Site::BridgeNetfilter, "nf_hook_slow"), names)
            .sysctl("net.bridge.bridge-nf-call-iptables", "1")
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                let forwarded = bridged(kernel, &["nf_hook_slow", "br_nf_forward_ip"]);
                told_or_not(&forwarded, "forward")
            })
            .collect()
    }

    #[test]
    fn the_bridges_own_rules_and_other_ends_are_other_causes() {
        for kernel in Kernel::ALL {
            let own = bridged(kernel, &["nf_hook_slow", "__br_forward"]).label();
            assert_eq!(own.cause, "netfilter-rule");
            assert_eq!(own.evidence["hook_point"], "bridge");
        }
        let elsewhere = Sample::freed(V5_10, Site::BridgeNetfilter, "br_dev_queue_push_xmit");
        assert_eq!(elsewhere.udp("10.0.0.9:1", "10.0.0.1:2").label().cause, "unknown");
    }
}
