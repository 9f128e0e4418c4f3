//! `tcp-md5`: segments whose MD5 signature is missing, not expected, or wrong.

use super::tcp_signature;
use crate::diagnose::{Cause, Counter, Family, Signature, Verdict};

const WRONG: [tcp_signature::Wrong; 3] = [
    ("TCP_MD5NOTFOUND", "missing", "TcpExtTCPMD5NotFound"),
    ("TCP_MD5UNEXPECTED", "unexpected", "TcpExtTCPMD5Unexpected"),
    ("TCP_MD5FAILURE", "wrong", "TcpExtTCPMD5Failure"),
];
/// TCP MD5 signatures (RFC 2385).
pub(super) static CAUSE: Cause = Cause {
    slug: "tcp-md5",
    family: Family::Socket,
    title: "TCP MD5 signature is missing, not expected, or wrong",
    mechanism: "A socket can have a password for a peer (TCP_MD5SIG; BGP daemons use it). Each segment of that peer must then bear an MD5 signature \
        made with it, and segments of others must not (tcp_inbound_md5_hash, net/ipv4/tcp.c, 6.1 and later; tcp_v4_inbound_md5_hash, net/ipv4/tcp_ipv4.c, 5.10). What does not \
        fit is dropped without an answer, so that the peer sees a connection that does not come about. From 6.1 on the kernel gives a reason for each case; before, \
        the place says no more than that the segment was refused (unknown), and the counters and the kernel's log tell.",
    evidence: tcp_signature::EVIDENCE,
    remedy: "Let both ends have the same password for each other's address, as each sees the other, behind NAT too; or none at both.",
    counter: Some(Counter {
        name: "TcpExtTCPMD5NotFound, TcpExtTCPMD5Unexpected or TcpExtTCPMD5Failure",
    }),
    benign: false,
    needs: &[],
    matches: |signature| tcp_signature::reasons(signature, &WRONG),
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find: |event, facts| tcp_signature::find(event, facts, &WRONG, "MD5"),
    refine: None,
};

#[cfg(test)]
pub(super) mod tests {
    use super::{WRONG, tcp_signature::tests};
    use crate::diagnose::causes::sample::{Sample, V6_1, V6_12, V7_3};

    pub(in super::super) fn samples() -> Vec<Sample> {
        tests::samples(&[V6_1, V6_12, V7_3], &WRONG)
    }

    #[test]
    fn each_reason_is_a_case_with_its_counter() {
        tests::each_is_told("tcp-md5", &WRONG);
    }
}
