//! `conntrack-table-full`: no room for another flow.

use droptrace_common::Site;

use super::values::in_netns;
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// The conntrack table is full and nothing can be evicted.
pub(super) static CAUSE: Cause = Cause {
    slug: "conntrack-table-full",
    family: Family::Conntrack,
    title: "conntrack table is full",
    mechanism: "When a netns holds more than nf_conntrack_max entries, a new flow may only take the place of an entry that \
        is not ASSURED, looked for in a few buckets (early_drop, net/netfilter/nf_conntrack_core.c). If there is none, \
        the packet is dropped and the kernel logs `nf_conntrack: table full, dropping packet`. Packets of known flows \
        pass. The counter drop grows by one (5.10 - 7.3).",
    evidence: &[
        ("count", "entries in the table of that netns"),
        ("max", "net.netfilter.nf_conntrack_max"),
    ],
    remedy: "Raise net.netfilter.nf_conntrack_max and the number of buckets, find who fills the table, or leave flows \
        that need neither NAT nor state out of it.",
    counter: Some(Counter {
        name: "nf_conntrack drop (conntrack -S)",
    }),
    benign: false,
    needs: &[Need::Conntrack, Need::Owner],
    matches: |signature| signature.site == Site::ConntrackTableFull,
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(_: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let max = facts.conntrack.map(|usage| usage.max);
    found
        .put("count", facts.conntrack.map(|usage| usage.count))
        .put("max", max);
    let wanted = max.unwrap_or(65536).saturating_mul(2);
    found.advise(
        format!(
            "Raise the limit{}, and the buckets with it.",
            max.map_or_else(String::new, |max| format!(", now {max}"))
        ),
        Some(format!(
            "sh -c \"sysctl -w net.netfilter.nf_conntrack_max={wanted}; echo {} > /sys/module/nf_conntrack/parameters/hashsize\"",
            wanted / 4
        )),
        "To be set in the initial netns, for all of them; takes effect at once. An entry takes about 320 bytes of kernel memory, a bucket 8.",
    );
    found.advise(
        "See who fills the table.",
        Some(in_netns(
            facts,
            None,
            "sh -c \"conntrack -L | grep -o 'src=[^ ]*' | sort | uniq -c | sort -rn | head\"",
        )),
        "Reads only, but walks the whole table. Each flow shows two sources: its own and that of its replies.",
    );
    found.advise(
        "Leave flows without NAT and without state rules out of the table (iptables -t raw … -j CT --notrack; nft `notrack`).",
        None,
        "For both directions of the flow; rules with `ct state` and NAT no longer see it.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::ConntrackUsage;
    use crate::diagnose::causes::sample::{Kernel, SYN, Sample, V6_1};

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .map(|kernel| {
                Sample::freed(kernel, Site::ConntrackTableFull, "nf_hook_slow")
                    .reason_since(V6_1, "NETFILTER_DROP")
                    .tcp("10.0.0.9:40000", "10.0.0.1:80", SYN)
                    .on("eth0")
                    .fact(|facts| {
                        facts.conntrack = Some(ConntrackUsage {
                            count: 65_540,
                            max: 65_536,
                        });
                    })
            })
            .into()
    }

    #[test]
    fn count_and_max_are_shown_and_max_is_doubled() {
        for sample in samples() {
            let drop = sample.label();
            assert_eq!(drop.evidence["count"], 65_540);
            assert_eq!(drop.evidence["max"], 65_536);
            let command = drop.remedy[0].command.clone().unwrap_or_default();
            assert!(command.contains("nf_conntrack_max=131072"), "{command}");
            assert!(command.contains("echo 32768 > /sys/module/nf_conntrack/parameters/hashsize"));
        }
    }
}
