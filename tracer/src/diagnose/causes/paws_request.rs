//! `paws-request`: a segment older than the SYN of the pending handshake.

use droptrace_common::Site;

use super::timestamps::{self, AGE, BEHIND, PEER, RECEIVED, STORED};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, RawEvent, Signature, Verdict};

/// PAWS rejected a segment that met a request in the SYN queue.
pub(super) static CAUSE: Cause = Cause {
    slug: "paws-request",
    family: Family::TimeWait,
    title: "segment with an older timestamp than the pending handshake (PAWS)",
    mechanism: "A segment that meets a half-open connection must carry a timestamp no older than its SYN's. \
        tcp_check_req (net/ipv4/tcp_minisocks.c) rejects it otherwise, answers with an ACK, and counts PAWSEstab; the handshake stays \
        pending. Either a segment of an earlier connection on the same 4-tuple arrives late, or two clients behind \
        one NAT address share the 4-tuple.",
    evidence: &[STORED, RECEIVED, BEHIND, AGE, PEER],
    remedy: "Find out whether two clients share one address and port: NAT with too few ports. A late segment of an \
        earlier connection needs no remedy.",
    counter: Some(Counter {
        name: "TcpExtPAWSEstab",
    }),
    benign: false,
    needs: &[],
    matches: |signature| {
        signature.site == Site::PawsRequest
            || signature.because(&["TCP_RFC7323_PAWS"])
                && signature.at(&["tcp_v4_rcv", "tcp_v6_rcv", "tcp_check_req"])
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let (mut found, peer) = timestamps::begin(event);
    found.put("peer", peer.clone());
    found.advise(
        format!(
            "See whether several clients stand behind {} (NAT); give that NAT more addresses or ports.",
            peer.as_deref().unwrap_or("that address")
        ),
        timestamps::show_peer(event, facts, "syn-recv"),
        "Reads only: the handshakes that are pending.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site};

    use crate::diagnose::causes::sample::{ACK, Kernel, Sample, V7_3};

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .map(|kernel| {
                let site = if kernel == V7_3 {
                    Site::Free
                } else {
                    Site::PawsRequest
                };
                Sample::freed(kernel, site, "tcp_v4_rcv")
                    .reason_since(V7_3, "TCP_RFC7323_PAWS")
                    .tcp_with("10.0.0.9:40000", "10.0.0.1:80", ACK, 1000, Some(5_000))
                    .on("eth0")
                    .field(FieldId::TimestampStored, 5_001)
                    .field(FieldId::TimestampAge, 0)
            })
            .into()
    }

    #[test]
    fn the_handshake_is_looked_for() {
        for sample in samples() {
            let drop = sample.label();
            assert_eq!(drop.evidence["behind"], 1);
            assert_eq!(
                drop.remedy[0].command.as_deref(),
                Some("ss -tan state syn-recv dst 10.0.0.9")
            );
        }
    }
}
