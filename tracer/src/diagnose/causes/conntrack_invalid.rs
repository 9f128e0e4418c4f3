//! `conntrack-invalid`: conntrack called the packet INVALID, and that was its end.

use droptrace_common::{FieldId, Site, ct_status};

use super::{
    evidence::joined,
    netfilter::{self, ENTRY, PACKET, RULE},
    no_socket,
    values::{in_netns, iptables},
};
use crate::diagnose::{
    Cause, CountedBy, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict,
};

/// An INVALID packet was dropped by a rule, or reset since it was not translated.
pub(super) static CAUSE: Cause = Cause {
    slug: "conntrack-invalid",
    family: Family::Conntrack,
    title: "conntrack called the packet INVALID",
    mechanism: "The packet does not fit its connection (a sequence number out of the window, an impossible state), or its headers \
        are damaged: conntrack lets it go on without its entry (nf_conntrack_in, net/netfilter/nf_conntrack_core.c; \
        nf_ct_l4proto_log_invalid and nf_l4proto_log_invalid, nf_conntrack_proto.c, are called with the reason whether logging is on or \
        not). Then a rule or policy drops it, since it is INVALID or since nothing accepts it as ESTABLISHED; or NAT, which translates \
        only what has an entry, leaves its addresses as they are: it arrives at this host itself, which has no socket for it and \
        answers by RST, and that ends the connection. A packet that opens no connection and belongs to none (a late RST or FIN) is \
        INVALID, too, but called so without a reason: it shows as netfilter-rule.",
    evidence: joined![
        [(
            "outcome",
            "rule: a rule or policy dropped it; reset: it was not translated, and answered by RST",
        )],
        ENTRY,
        [(
            "nat",
            "whether NAT translates the connection; null when the packet belongs to none",
        )],
        RULE,
        PACKET
    ],
    remedy: "Out of the window: find what reorders or delays packets or hides part of them from this host (asymmetric routing), or let \
        conntrack be liberal. With NAT: drop INVALID packets, so that they are sent again instead of being answered by RST.",
    counter: Some(Counter {
        name: "nf_conntrack invalid (conntrack -S)",
    }),
    benign: false,
    needs: &[Need::Owner, Need::Rules],
    matches: |signature| match signature.site {
        Site::ConntrackInvalid | Site::ConntrackInvalidNat => {
            was_reset(signature) || netfilter::doubt(signature).is_none()
        }
        Site::ConntrackInvalidReset => true,
        _ => false,
    },
    verdict: |signature: &Signature<'_>| {
        if was_reset(signature) {
            no_socket::verdict(signature)
        } else {
            Verdict::Dropped
        }
    },
    find,
    refine: None,
};

/// Whether the packet found no socket here, for want of translation.
fn was_reset(signature: &Signature<'_>) -> bool {
    signature.site == Site::ConntrackInvalidReset
        || signature.site == Site::ConntrackInvalidNat && no_socket::no_tcp_socket(signature)
}

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding {
        counter: CountedBy::Cause,
        ..Finding::default()
    };
    let reset = was_reset(&Signature::of_event(event, facts));
    found.put("outcome", if reset { "reset" } else { "rule" });
    netfilter::put_entry(&mut found, event);
    let nat = event
        .field(FieldId::EntryStatus)
        .map(|status| status & ct_status::NAT != 0);
    found.put("nat", nat);
    netfilter::put_rule(&mut found, event, facts);
    netfilter::put_packet(&mut found, event, facts, reset);
    let words = netfilter::words(event).unwrap_or_default();
    if reset {
        let program = iptables(&event.parse());
        found.advise(
            "Drop INVALID packets before they reach a socket: then the peer sends again, and the connection lives.",
            Some(in_netns(
                facts,
                None,
                &format!("{program} -I INPUT -m conntrack --ctstate INVALID -j DROP"),
            )),
            "Drops every INVALID packet to this netns, also those of connections without NAT.",
        );
    }
    if words.contains("checksum") {
        found.advise(
            "If a device or a capture makes such checksums, do not let conntrack check them.",
            Some(in_netns(
                facts,
                None,
                "sysctl -w net.netfilter.nf_conntrack_checksum=0",
            )),
            "Damaged packets are then tracked, and dropped later by their receiver.",
        );
    } else {
        found.advise(
            "If packets of the connection pass this host by, or come much too late, let conntrack accept sequence numbers out of the window.",
            Some(in_netns(
                facts,
                None,
                "sysctl -w net.netfilter.nf_conntrack_tcp_be_liberal=1",
            )),
            "For all connections of the netns: only a RST out of the window is INVALID then.",
        );
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site, ct_status};

    use crate::diagnose::{
        Verdict,
        causes::{
            netfilter::tests::{entry, frames, freed, told_or_not},
            sample::{ACK, Kernel, Sample, V5_10},
        },
    };

    const WINDOW: &str = "SEQ is over the upper bound (over the window of the receiver)";
    const INPUT: &[&str] = &["nf_hook_slow", "ip_local_deliver"];

    fn dropped(kernel: Kernel) -> Sample {
        let sample = frames(freed(kernel, Site::ConntrackInvalid, "nf_hook_slow"), INPUT);
        entry(sample, WINDOW).field(FieldId::EntryStatus, ct_status::ASSURED)
    }

    fn reset(kernel: Kernel) -> Sample {
        let sample = if kernel == V5_10 {
            Sample::freed(kernel, Site::ConntrackInvalidReset, "tcp_v4_rcv")
        } else {
            Sample::freed(kernel, Site::ConntrackInvalidNat, "tcp_v4_rcv").reason("NO_SOCKET")
        };
        let sample = sample.tcp("10.0.0.9:80", "10.0.0.1:40000", ACK).on("eth0");
        entry(sample, WINDOW).field(FieldId::EntryStatus, 1 << 4)
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                told_or_not(&dropped(kernel), "input")
                    .into_iter()
                    .chain([reset(kernel)])
            })
            .collect()
    }

    #[test]
    fn the_end_is_a_rule_or_a_reset() {
        for kernel in Kernel::ALL {
            let by_rule = dropped(kernel).label();
            assert_eq!(by_rule.verdict, Verdict::Dropped);
            assert_eq!(by_rule.evidence["outcome"], "rule");
            assert_eq!(by_rule.evidence["nat"], false);
            assert_eq!(by_rule.evidence["why"], WINDOW);
            let by_reset = reset(kernel).label();
            assert_eq!(by_reset.verdict, Verdict::Rejected);
            assert_eq!(by_reset.evidence["outcome"], "reset");
            assert!(
                by_reset.remedy[0]
                    .command
                    .as_deref()
                    .is_some_and(|command| command.contains("INVALID"))
            );
        }
    }

    #[test]
    fn an_invalid_packet_may_end_for_another_cause() {
        for kernel in [Kernel::V6_1, Kernel::V6_12, Kernel::V7_3] {
            for site in [Site::ConntrackInvalid, Site::ConntrackInvalidNat] {
                let other = Sample::freed(kernel, site, "tcp_validate_incoming")
                    .reason("TCP_RFC7323_PAWS")
                    .tcp("10.0.0.9:80", "10.0.0.1:40000", ACK);
                assert_eq!(other.label().cause, "paws-established");
            }
            // Without NAT the RST is what would have come anyhow.
            let anyhow = Sample::freed(kernel, Site::ConntrackInvalid, "tcp_v4_rcv")
                .reason("NO_SOCKET")
                .tcp("10.0.0.9:80", "10.0.0.1:40000", ACK);
            assert_eq!(anyhow.label().cause, "no-socket");
        }
        let other = Sample::freed(V5_10, Site::ConntrackInvalid, "tcp_v4_rcv").tcp(
            "10.0.0.9:80",
            "10.0.0.1:40000",
            ACK,
        );
        assert_eq!(other.label().cause, "unknown");
    }

    #[test]
    fn a_damaged_packet_gets_its_own_remedy() {
        for kernel in Kernel::ALL {
            let sample = frames(freed(kernel, Site::ConntrackInvalid, "nf_hook_slow"), INPUT);
            let drop = entry(sample, "bad checksum").label();
            assert!(drop.evidence["nat"].is_null());
            assert!(
                drop.remedy[0]
                    .command
                    .as_deref()
                    .is_some_and(|command| command.contains("checksum"))
            );
        }
    }
}
