//! `tcp-ao`: segments whose TCP-AO signature is missing, not expected, or wrong.

use super::tcp_signature;
use crate::diagnose::{Cause, Counter, Family, Signature, Verdict};

const WRONG: [tcp_signature::Wrong; 4] = [
    ("TCP_AONOTFOUND", "missing", "TcpExtTCPAORequired"),
    ("TCP_AOUNEXPECTED", "unexpected", "TcpExtTCPAOKeyNotFound"),
    ("TCP_AOKEYNOTFOUND", "unknown-key", "TcpExtTCPAOKeyNotFound"),
    ("TCP_AOFAILURE", "wrong", "TcpExtTCPAOBad"),
];

/// The TCP authentication option (RFC 5925).
pub(super) static CAUSE: Cause = Cause {
    slug: "tcp-ao",
    family: Family::Socket,
    title: "TCP-AO signature is missing, not expected, or wrong",
    mechanism: "A socket can have keys for a peer by the TCP authentication option (TCP_AO_ADD_KEY; since 6.7). Each segment of that peer must then be signed with one \
        of them, and segments of others must not (tcp_inbound_hash and tcp_inbound_ao_hash, net/ipv4/tcp_ao.c). What does not fit is dropped without an answer, \
        with a reason for each case.",
    evidence: tcp_signature::EVIDENCE,
    remedy: "Let both ends have the same keys, under the same numbers (SendID, RecvID), for each other's address.",
    counter: Some(Counter {
        name: "TcpExtTCPAORequired, TcpExtTCPAOKeyNotFound or TcpExtTCPAOBad",
    }),
    benign: false,
    needs: &[],
    matches: |signature| tcp_signature::reasons(signature, &WRONG),
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find: |event, facts| tcp_signature::find(event, facts, &WRONG, "AO"),
    refine: None,
};

#[cfg(test)]
pub(super) mod tests {
    use super::{WRONG, tcp_signature::tests};
    use crate::diagnose::causes::sample::{Sample, V6_12, V7_3};

    pub(in super::super) fn samples() -> Vec<Sample> {
        tests::samples(&[V6_12, V7_3], &WRONG)
    }

    #[test]
    fn each_reason_is_a_case_with_its_counter() {
        tests::each_is_told("tcp-ao", &WRONG);
    }
}
