//! `conntrack-nat-exhausted`: the tuple that NAT was left with belongs to a flow that lives on.

use droptrace_common::{Site, bits};

use super::{clash, clash::Clash, conntrack_insert_race, values::in_netns};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, RawEvent, Signature, Verdict};

/// NAT found no free port: the winner of the clash holds it for longer than any race.
pub(super) static CAUSE: Cause = Cause {
    slug: "conntrack-nat-exhausted",
    family: Family::Conntrack,
    title: "no free port was left for source NAT",
    mechanism: "Source NAT looks for a port that no other flow to the same destination has: it tries up to 128 ports, \
        halves the number and gives up below 16 tries (nf_nat_l4proto_unique_tuple, net/netfilter/nf_nat_core.c, 5.10 - \
        7.3). Then it keeps a tuple that is taken, which fails when the packet is confirmed (nf_ct_resolve_clash) and \
        counts insert_failed and drop like a race. It is told from a race by the holder of the tuple: ASSURED, or \
        in the table for longer than a packet waits between its NAT decision and its confirmation. That the holder saw a reply proves nothing. \
        A client that uses one port of its own for many targets is not concerned: only flows to one destination address \
        and port share the 64,000 ports of one NAT address.",
    evidence: clash::EVIDENCE,
    remedy: "Give the NAT more addresses or a wider range of ports, reuse connections, or let closed ones leave the \
        table earlier.",
    counter: Some(Counter {
        name: "nf_conntrack insert_failed (conntrack -S)",
    }),
    benign: false,
    needs: clash::NEEDS,
    matches: |signature| signature.site == Site::ConntrackClash && signature.has(bits::WINNER_ASSURED),
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: Some(|event, facts| {
        (Clash::of(event, facts).same_flow() == Some(true)).then_some(&conntrack_insert_race::CAUSE)
    }),
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let clash = Clash::of(event, facts);
    clash.put(&mut found);
    let protocol = event.parse().protocol_name().unwrap_or_default();
    if let Some(reply) = clash.loser_reply {
        let ((target, port), (nat, _)) = (reply.source, reply.destination);
        found.advise(
            format!("Count the flows from {nat} to {target} port {port}: they share one set of ports."),
            Some(in_netns(
                facts,
                None,
                &format!("conntrack -L -p {protocol} --reply-src {target} --reply-dst {nat} --reply-port-src {port} | wc -l"),
            )),
            "Reads only, but walks the whole table.",
        );
        found.advise(
            format!("Add NAT addresses beside {nat}, or widen the ports of the rule (`--to-source {nat}-LAST:1024-65535`)."),
            None,
            "Each address adds up to 64,000 flows per destination; the destination must route and allow the new addresses.",
        );
    }
    found.advise(
        "Have clients keep and reuse connections, or let closed TCP entries leave the table earlier.",
        Some(in_netns(
            facts,
            None,
            "sysctl -w net.netfilter.nf_conntrack_tcp_timeout_time_wait=30",
        )),
        "Applies to all TCP flows of that netns from now on; a late segment of a flow that has left the table is INVALID.",
    );
    if !clash.winner_is_assured() {
        found.advise(
            "The holder was never ASSURED: entries without an answer fill the ports. See who sends them.",
            Some(in_netns(facts, None, "conntrack -L | grep UNREPLIED")),
            "Reads only, but walks the whole table.",
        );
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::ct_status;

    use crate::diagnose::causes::sample::{Kernel, Sample};

    use crate::diagnose::causes::conntrack_insert_race::tests::clash;

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                [
                    clash(
                        kernel,
                        6,
                        2,
                        ct_status::ASSURED | ct_status::SEEN_REPLY,
                        3,
                        431_990,
                    ),
                    clash(kernel, 17, 2, 0, 0, 20),
                ]
            })
            .collect()
    }

    #[test]
    fn an_assured_or_older_holder_means_exhaustion() {
        for sample in samples() {
            let drop = sample.label();
            assert_eq!(drop.cause, "conntrack-nat-exhausted");
            assert_eq!(drop.evidence["winner_age_s"], 10.0);
            assert!(drop.remedy[0].command.as_deref().is_some_and(|command| {
                command.contains("--reply-src 203.0.113.7 --reply-dst 192.0.2.1 --reply-port-src 53")
            }));
            assert!(drop.remedy[1].action.contains("--to-source 192.0.2.1-LAST"));
        }
    }
}
