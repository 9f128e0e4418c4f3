//! `conntrack-insert-race`: two first packets wanted the same conntrack tuple at the same time.

use droptrace_common::{Site, bits};

use super::{clash, clash::Clash, conntrack_nat_exhausted, values::in_netns};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, RawEvent, Signature, Verdict};

/// Another flow confirmed the tuple first.
pub(super) static CAUSE: Cause = Cause {
    slug: "conntrack-insert-race",
    family: Family::Conntrack,
    title: "lost the race for a conntrack tuple",
    mechanism: "A new flow gets its conntrack entry, and its NAT port, when its first packet comes, but the entry enters \
        the table only when that packet leaves (__nf_conntrack_confirm, net/netfilter/nf_conntrack_core.c). Between the \
        two another CPU can give the same tuple to another flow: both SNAT to one address and port, or two packets of \
        one flow. The second to be confirmed clashes; nf_ct_resolve_clash merges UDP flows of equal tuples, and drops \
        the rest: every TCP clash, and UDP flows that differ (5.10 - 7.3). The sender sees a lost first packet: a TCP SYN \
        comes again after 1 s, a DNS query after 5 s. The counters insert_failed and drop grow by one.",
    evidence: clash::EVIDENCE,
    remedy: "Let the SNAT rule choose ports at random (iptables --random-fully, nft fully-random); for DNS avoid two \
        queries from one socket at once (resolv.conf option single-request-reopen), or ask a cache on the node.",
    counter: Some(Counter {
        name: "nf_conntrack insert_failed (conntrack -S)",
    }),
    benign: false,
    needs: clash::NEEDS,
    matches: |signature| signature.site == Site::ConntrackClash && !signature.has(bits::WINNER_ASSURED),
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: Some(|event, facts| {
        let clash = Clash::of(event, facts);
        (clash.winner_is_older() && clash.same_flow() == Some(false))
            .then_some(&conntrack_nat_exhausted::CAUSE)
    }),
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let clash = Clash::of(event, facts);
    let packet = event.parse();
    clash.put(&mut found);
    if clash.same_flow() == Some(true) {
        found.advise(
            "Two first packets of one flow were under way at once: see whether NFQUEUE holds them, a bridge or tap doubles \
             them, or the sender repeats them at once.",
            Some(in_netns(facts, None, "iptables-save -c")),
            "Reads only. The flow itself lives on with the packet that won.",
        );
    } else if matches!(clash.nat(), Some("source" | "both")) {
        let address = clash.loser_reply.map_or_else(
            || "the node's address".to_owned(),
            |reply| reply.destination.0.to_string(),
        );
        found.advise(
            format!("Let the rule that translates to {address} choose ports at random: `--random-fully` for MASQUERADE or SNAT in iptables, `fully-random` in nft."),
            Some(in_netns(
                facts,
                None,
                "sh -c \"iptables-save -t nat | grep -e MASQUERADE -e SNAT; nft list ruleset | grep -e masquerade -e snat\"",
            )),
            "The command only shows the rules. Random ports make clashes rare, not impossible; a client no longer keeps its own port.",
        );
    } else {
        found.advise(
            "See which NAT rules give two flows the same tuple.",
            Some(in_netns(facts, None, "conntrack -S")),
            "Reads only: insert_failed and drop, per CPU.",
        );
    }
    if packet.protocol == Some(17) && packet.dport == Some(53) {
        found.advise(
            "For DNS: let the resolver use another socket for the second query (`options single-request-reopen` in /etc/resolv.conf of the client; glibc), or ask a DNS cache on the node.",
            None,
            "musl ignores the option. A cache on the node needs no NAT for its clients, so the race is gone.",
        );
    }
    found
}
