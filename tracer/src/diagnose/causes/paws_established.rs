//! `paws-established`: a segment of a living connection with an old timestamp.

use droptrace_common::Site;

use super::{
    timestamps::{self, AGE, BEHIND, RECEIVED, STORED},
    values::in_netns,
};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// PAWS rejected a segment of an established connection.
pub(super) static CAUSE: Cause = Cause {
    slug: "paws-established",
    family: Family::TimeWait,
    title: "segment with an older timestamp than the connection has seen (PAWS)",
    mechanism: "With TCP timestamps (RFC 7323) each segment must carry a timestamp no older than the last accepted one \
        (ts_recent); an older one marks a segment of the past (Protection Against Wrapped Sequences). \
        tcp_validate_incoming (net/ipv4/tcp_input.c) drops it, answers with a duplicate ACK, and counts PAWSEstab. RSTs are \
        exempt, and a stored timestamp older than 24 days is not compared. Either the network delivers \
        segments out of order, or something between changes timestamps: NAT that lets two hosts share one 4-tuple, a \
        load balancer that answers for several servers.",
    evidence: &[STORED, RECEIVED, BEHIND, AGE],
    remedy: "A few ticks behind: reordering, harmless but for the retransmission. Far behind: find the middlebox or the \
        second host behind one address.",
    counter: Some(Counter {
        name: "TcpExtPAWSEstab",
    }),
    benign: false,
    needs: &[Need::Owner],
    matches: |signature| {
        signature.site == Site::PawsEstablished
            // SYN_SENT rejects for the same reason elsewhere, and counts PAWSActive.
            || signature.because(&["TCP_RFC7323_PAWS"]) && signature.at(&["tcp_validate_incoming", "tcp_drop_reason"])
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let (mut found, _) = timestamps::begin(event);
    let packet = event.parse();
    if let Some((src, sport)) = packet.src.zip(packet.sport) {
        let host = match src {
            std::net::IpAddr::V4(ip) => ip.to_string(),
            std::net::IpAddr::V6(ip) => format!("[{ip}]"),
        };
        found.advise(
            format!("See whether the path from {src} reorders: `reord_seen` and `rcv_ooopack` of the connection."),
            Some(in_netns(facts, None, &format!("ss -tino dst {host}:{sport}"))),
            "Reads only. Reordering by several queues or CPUs (RSS, RPS, veth, bonding) costs a duplicate ACK, seldom more.",
        );
    }
    found.advise(
        "If the timestamps are far behind: find what shares or rewrites them, and let one 4-tuple belong to one host.",
        None,
        "net.ipv4.tcp_timestamps=0 on this host ends the check for new connections, and with it RTT measurement, protection \
         against wrapped sequence numbers, and window scaling with syncookies.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site};

    use crate::diagnose::causes::sample::{ACK, Kernel, Sample, V5_10};

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .map(|kernel| {
                let sample = if kernel == V5_10 {
                    Sample::hook(kernel, Site::PawsEstablished)
                } else {
                    Sample::freed(kernel, Site::Free, "tcp_validate_incoming").reason("TCP_RFC7323_PAWS")
                };
                sample
                    .tcp_with("10.0.0.9:40000", "10.0.0.1:80", ACK, 1000, Some(5_000))
                    .on("eth0")
                    .field(FieldId::TimestampStored, 7_500)
                    .field(FieldId::TimestampAge, 3)
            })
            .into()
    }

    #[test]
    fn timestamps_are_compared_as_the_kernel_does() {
        for sample in samples() {
            let drop = sample.label();
            assert_eq!(drop.evidence["timestamp_stored"], 7_500);
            assert_eq!(drop.evidence["timestamp_received"], 5_000);
            assert_eq!(drop.evidence["behind"], 2_500);
            assert_eq!(drop.evidence["age_s"], 3);
            assert_eq!(
                drop.remedy[0].command.as_deref(),
                Some("ss -tino dst 10.0.0.9:40000")
            );
        }
        let wrapped = Sample::hook(V5_10, Site::PawsEstablished)
            .tcp("[fd00::9]:40000", "[fd00::1]:80", ACK)
            .field(FieldId::TimestampStored, 10)
            .field(FieldId::TimestampReceived, u64::from(u32::MAX))
            .label();
        assert_eq!(wrapped.evidence["behind"], 11);
        assert_eq!(
            wrapped.remedy[0].command.as_deref(),
            Some("ss -tino dst [fd00::9]:40000")
        );
    }
}
