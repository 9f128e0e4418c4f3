//! `conntrack-insert-race`: two first packets wanted the same conntrack tuple at the same time.

use droptrace_common::{Site, bits};

use super::{clash, clash::Clash, conntrack_nat_exhausted, values::in_netns};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, RawEvent, Signature, Verdict};

/// Another flow confirmed the tuple first.
pub(super) static CAUSE: Cause = Cause {
    slug: "conntrack-insert-race",
    family: Family::Conntrack,
    title: "lost the race for a conntrack tuple",
    mechanism: "A new flow gets its conntrack entry, and its NAT port, when its first packet comes, but the entry \
        enters the table only when that packet leaves (__nf_conntrack_confirm, \
        net/netfilter/nf_conntrack_core.c). In between, another CPU can give the same tuple to another flow: \
        source NAT chose one address and port for both, or two packets of one flow are under way at once. \
        The second to be confirmed clashes. nf_ct_resolve_clash can join the two, or keep both, only for \
        protocols without a handshake such as UDP, and only while their reply tuples allow it; it drops \
        every TCP clash, and UDP flows to which source NAT gave one reply tuple (5.10 - 7.3). The sender \
        sees a lost first packet: a TCP SYN comes again after 1 s, a DNS query after 5 s. The counters \
        insert_failed and drop grow by one.",
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

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site, bits, ct_status};

    use crate::diagnose::causes::sample::{Kernel, SYN, Sample, V6_1, V6_12, V7_3};

    const LOSER: ([FieldId; 5], [FieldId; 5]) = (
        [
            FieldId::LoserOrigSrcHi,
            FieldId::LoserOrigSrcLo,
            FieldId::LoserOrigDstHi,
            FieldId::LoserOrigDstLo,
            FieldId::LoserOrigPorts,
        ],
        [
            FieldId::LoserReplySrcHi,
            FieldId::LoserReplySrcLo,
            FieldId::LoserReplyDstHi,
            FieldId::LoserReplyDstLo,
            FieldId::LoserReplyPorts,
        ],
    );
    const WINNER: ([FieldId; 5], [FieldId; 5]) = (
        [
            FieldId::WinnerOrigSrcHi,
            FieldId::WinnerOrigSrcLo,
            FieldId::WinnerOrigDstHi,
            FieldId::WinnerOrigDstLo,
            FieldId::WinnerOrigPorts,
        ],
        [
            FieldId::WinnerReplySrcHi,
            FieldId::WinnerReplySrcLo,
            FieldId::WinnerReplyDstHi,
            FieldId::WinnerReplyDstLo,
            FieldId::WinnerReplyPorts,
        ],
    );

    /// A flow of 10.1.0.CLIENT that was given the port 5000 of 192.0.2.1, like the winner's.
    pub(in super::super) fn clash(
        kernel: Kernel,
        protocol: u8,
        client: u8,
        status: u64,
        tcp_state: u64,
        expires_s: i32,
    ) -> Sample {
        let sample = Sample::freed(kernel, Site::ConntrackClash, "nf_hook_slow")
            .reason_since(V6_1, "NETFILTER_DROP")
            .leaving("eth0");
        let source = format!("10.1.0.{client}:5000");
        let sample = if protocol == 6 {
            sample.tcp(&source, "203.0.113.7:53", SYN)
        } else {
            sample.udp(&source, "203.0.113.7:53")
        };
        let assured = if status & ct_status::ASSURED == 0 {
            0
        } else {
            bits::WINNER_ASSURED
        };
        sample
            .bits(assured)
            .tuple(LOSER.0, &source, "203.0.113.7:53")
            .tuple(LOSER.1, "203.0.113.7:53", "192.0.2.1:5000")
            .tuple(WINNER.0, "10.1.0.1:5000", "203.0.113.7:53")
            .tuple(WINNER.1, "203.0.113.7:53", "192.0.2.1:5000")
            .field(FieldId::WinnerStatus, status | ct_status::CONFIRMED)
            .field(FieldId::WinnerTcpState, tcp_state)
            .field(FieldId::WinnerTimeout, u64::from((expires_s * 250) as u32))
            .sysctl("net.netfilter.nf_conntrack_udp_timeout", "30")
            .sysctl("net.netfilter.nf_conntrack_udp_timeout_stream", "120")
            .sysctl("net.netfilter.nf_conntrack_tcp_timeout_syn_sent", "120")
            .sysctl("net.netfilter.nf_conntrack_tcp_timeout_established", "432000")
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                [
                    clash(kernel, 6, 2, 0, 1, 120),
                    clash(kernel, 17, 2, ct_status::SEEN_REPLY, 0, 30),
                    // Two packets of one flow, however old the winner.
                    clash(kernel, 6, 1, 0, 1, 60),
                    clash(kernel, 6, 1, ct_status::ASSURED, 3, 432_000),
                ]
            })
            .collect()
    }

    #[test]
    fn both_tuples_and_the_winner_are_shown() {
        for kernel in Kernel::ALL {
            let drop = clash(kernel, 6, 2, 0, 1, 119).label();
            assert_eq!(drop.cause, "conntrack-insert-race");
            assert_eq!(drop.evidence["nat"], "source");
            assert_eq!(drop.evidence["loser_original"], "10.1.0.2:5000 > 203.0.113.7:53");
            assert_eq!(drop.evidence["loser_reply"], "203.0.113.7:53 > 192.0.2.1:5000");
            assert_eq!(drop.evidence["winner_original"], "10.1.0.1:5000 > 203.0.113.7:53");
            assert_eq!(drop.evidence["same_flow"], false);
            assert_eq!(drop.evidence["winner_state"], "SYN_SENT UNREPLIED");
            assert_eq!(drop.evidence["winner_age_s"], 1.0);
            assert_eq!(drop.evidence["winner_expires_s"], 119.0);
            assert!(drop.remedy[0].action.contains("192.0.2.1"));
            assert!(drop.remedy[0].action.contains("--random-fully"));
        }
    }

    #[test]
    fn a_reply_or_an_unknown_age_proves_no_exhaustion() {
        let replied = clash(V6_12, 17, 2, ct_status::SEEN_REPLY, 0, 29).label();
        assert_eq!(replied.cause, "conntrack-insert-race");
        assert!(replied.remedy[1].action.contains("single-request-reopen"));
        let no_hz = clash(V6_12, 17, 2, 0, 0, 2).fact(|facts| facts.hz = None).label();
        assert_eq!(no_hz.cause, "conntrack-insert-race");
        assert!(no_hz.evidence["winner_age_s"].is_null());
        let no_setting = clash(V6_12, 17, 2, 0, 0, 2)
            .fact(|facts| facts.sysctls.clear())
            .label();
        assert_eq!(no_setting.cause, "conntrack-insert-race");
        // IPS_FIXED_TIMEOUT: the timeout tells no age.
        let fixed = clash(V6_12, 17, 2, 1 << 10, 0, 1).label();
        assert_eq!(fixed.cause, "conntrack-insert-race");
    }

    #[test]
    fn one_flow_twice_is_no_exhaustion() {
        let drop = clash(V7_3, 6, 1, ct_status::ASSURED, 3, 432_000).label();
        assert_eq!(drop.cause, "conntrack-insert-race");
        assert_eq!(drop.evidence["same_flow"], true);
        assert!(drop.remedy[0].action.contains("NFQUEUE"));
    }
}
