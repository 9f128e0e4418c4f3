//! `timewait-old-sequence`: a SYN that is not newer than the connection in TIME_WAIT, without PAWS.

use droptrace_common::{FieldId, Site};

use super::{
    paws_timewait::substate,
    timestamps::{RECEIVED, STORED, Timestamps},
    values::{endpoint, in_netns},
};
use crate::diagnose::{Cause, Facts, Family, Finding, RawEvent, Signature, Verdict};

/// A SYN on a 4-tuple in TIME_WAIT has neither a later sequence number nor a newer timestamp.
pub(super) static CAUSE: Cause = Cause {
    slug: "timewait-old-sequence",
    family: Family::TimeWait,
    title: "SYN on a connection in TIME_WAIT with an old sequence number",
    mechanism: "A SYN on a 4-tuple in TIME_WAIT starts a new connection only if its sequence number lies after the last one \
        of the old connection, or its timestamp is newer (tcp_timewait_state_process, net/ipv4/tcp_minisocks.c, 5.10 - \
        7.3). Otherwise it is answered by an ACK of the old connection, or by nothing when such ACKs are rate limited, and \
        dropped; no PAWS counter moves, and no drop reason is given. The client answers the ACK with a RST; some \
        firewalls swallow that, and then the client waits up to 60 s. Clients that choose sequence numbers at random \
        and send no timestamps, or a NAT that strips them, meet it every second time that they reuse a port.",
    evidence: &[
        ("sequence", "sequence number of the SYN"),
        (
            "expected_sequence",
            "next sequence number of the old connection (tw_rcv_nxt)",
        ),
        STORED,
        RECEIVED,
        (
            "substate",
            "state that the ended connection was in: FIN_WAIT2 or TIME_WAIT",
        ),
        ("peer", "address and port that the SYN came from"),
    ],
    remedy: "Let the client not reuse a port within 60 s, send TCP timestamps, or close first; see that no firewall \
        swallows the ACK or the RST that answers it.",
    counter: None,
    benign: false,
    needs: &[],
    matches: |signature| signature.site == Site::TimewaitOldSequence,
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let packet = event.parse();
    let timestamps = Timestamps::of(event);
    let stored = event.field(FieldId::TimestampStored);
    let peer = endpoint(packet.src, packet.sport);
    found
        .put("sequence", packet.tcp.map(|tcp| tcp.sequence))
        .put("expected_sequence", event.field(FieldId::ExpectedSequence))
        .put(STORED.0, stored)
        .put(RECEIVED.0, timestamps.received)
        .put("substate", substate(event))
        .put("peer", peer.clone());
    let who = peer.as_deref().unwrap_or("the client");
    if timestamps.received.is_none() {
        found.advise(
            format!("Have {who} send TCP timestamps, or find the NAT that strips them: with a newer timestamp the SYN would be accepted."),
            Some("sysctl -w net.ipv4.tcp_timestamps=1".to_owned()),
            "On the client, for its new connections: 12 bytes per segment.",
        );
    }
    found.advise(
        format!("Let {who} not use the same port again within 60 s: a wider range of ports, or keep connections open."),
        packet
            .src
            .map(|src| in_netns(facts, None, &format!("ss -tan state time-wait dst {src}"))),
        "Reads only: the 4-tuples that wait here. net.ipv4.tcp_tw_reuse on this host concerns only connections that it opens.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site};

    use crate::diagnose::causes::sample::{Kernel, SYN, Sample};

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                [None, Some(5_000)].map(|timestamp| {
                    Sample::freed(kernel, Site::TimewaitOldSequence, "tcp_v4_rcv")
                        .tcp_with("10.0.0.9:40000", "10.0.0.1:80", SYN, 1_000, timestamp)
                        .on("eth0")
                        .field(FieldId::ExpectedSequence, 2_000)
                        .field(FieldId::TimestampStored, 5_000)
                        .field(FieldId::TimewaitSubstate, 5)
                })
            })
            .collect()
    }

    #[test]
    fn sequence_numbers_are_shown_and_missing_timestamps_remedied() {
        for (index, sample) in samples().iter().enumerate() {
            let drop = sample.label();
            let without = index % 2 == 0;
            assert_eq!(drop.evidence["sequence"], 1_000);
            assert_eq!(drop.evidence["expected_sequence"], 2_000);
            assert_eq!(drop.evidence["substate"], "FIN_WAIT2");
            assert_eq!(drop.evidence["timestamp_received"].is_null(), without);
            assert_eq!(drop.remedy[0].action.contains("send TCP timestamps"), without);
        }
    }
}
