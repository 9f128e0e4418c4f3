//! `conntrack-helper`: a conntrack helper dropped the packet.

use droptrace_common::Site;

use super::{
    evidence::joined,
    netfilter::{self, ENTRY},
    values::{device, in_netns, sysctl_number},
};
use crate::diagnose::{Cause, Facts, Family, Finding, HookPoint, Need, RawEvent, Signature, Verdict};

/// A helper could not do what the packet asks for.
pub(super) static CAUSE: Cause = Cause {
    slug: "conntrack-helper",
    family: Family::Conntrack,
    title: "conntrack helper dropped the packet",
    mechanism: "A helper (ftp, sip, h323, irc, tftp, amanda, sane, pptp) reads what the connection says of further ones, and expects them or \
        translates their addresses in the packet. Where it cannot (no room for another expectation, no port to be had, the packet \
        cannot be changed), it drops the packet and says why (nf_ct_helper_log, net/netfilter/nf_conntrack_helper.c). Some helpers \
        drop malformed messages without a word: those show as netfilter-rule.",
    evidence: joined![
        ENTRY,
        [
            (
                "hook_point",
                "where the helper was asked; null when the stack does not tell",
            ),
            ("interface", "device that the packet came by or leaves by"),
        ]
    ],
    remedy: "Make room for expectations, or do without the helper: passive FTP and most of today's SIP need none.",
    counter: None,
    benign: false,
    needs: &[
        Need::Owner,
        Need::Sysctl("net.netfilter.nf_conntrack_expect_max"),
        Need::Symbols,
    ],
    matches: |signature| signature.site == Site::ConntrackHelper,
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    netfilter::put_entry(&mut found, event);
    found
        .put("hook_point", HookPoint::of(facts).map(HookPoint::name))
        .put("interface", device(event, facts));
    if netfilter::words(event).is_some_and(|words| words.contains("expectation")) {
        let max = sysctl_number(facts, "net.netfilter.nf_conntrack_expect_max");
        found.advise(
            "See which expectations fill the table, and make room for more.",
            Some(in_netns(
                facts,
                None,
                &format!(
                    "sh -c \"conntrack -L expect; sysctl -w net.netfilter.nf_conntrack_expect_max={}\"",
                    max.map_or(1024, |max| max.max(1) * 2)
                ),
            )),
            "The limit holds for each netns, and can be set in the initial one only; an expectation takes a few hundred bytes.",
        );
    }
    found.advise(
        "See which rules give connections to helpers; where the protocol does not need one, take the rule away.",
        Some(in_netns(
            facts,
            None,
            "sh -c \"iptables-save | grep -e CT; nft list ruleset | grep -n -e helper\"",
        )),
        "Reads only.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::causes::{
        netfilter::tests::{entry, frames, freed},
        sample::{Kernel, Sample},
    };

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .map(|kernel| {
                let sample = freed(kernel, Site::ConntrackHelper, "nf_hook_slow");
                entry(frames(sample, &["ip_output"]), "cannot add expectation")
                    .sysctl("net.netfilter.nf_conntrack_expect_max", "64")
            })
            .collect()
    }

    #[test]
    fn no_room_for_expectations_asks_for_more() {
        for sample in samples() {
            let drop = sample.label();
            assert_eq!(drop.evidence["why"], "cannot add expectation");
            let command = drop.remedy[0].command.as_deref();
            assert!(command.is_some_and(|command| command.contains("expect_max=128")));
        }
    }
}
