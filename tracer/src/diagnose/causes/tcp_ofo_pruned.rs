//! `tcp-ofo-pruned`: segments ahead of a gap, thrown away for want of buffer.

use droptrace_common::Site;

use super::window::{AHEAD, DATA, EXPECTED, Held, SEQUENCE, WINDOW, reader, show_connection};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// The out-of-order queue was emptied, since the receive buffer is full.
pub(super) static CAUSE: Cause = Cause {
    slug: "tcp-ofo-pruned",
    family: Family::Socket,
    title: "segments that came ahead of a gap were thrown away, since the receive buffer is full",
    mechanism: "Segments that come before an earlier one wait in the out-of-order queue, acknowledged by SACK only. When the receive buffer is full and packing \
        it together does not help, the kernel throws the last of them away (tcp_prune_ofo_queue, net/ipv4/tcp_input.c; reason TCP_OFO_QUEUE_PRUNE from 6.1 \
        on), and the peer must send them again. OfoPruned counts how often that was done, each time for one segment or more; from 6.12 on the queue is kept if \
        the segment that comes would lie behind all that wait: it is refused itself then (TCPOFODrop, reason PROTO_MEM). On 5.10 the free is not \
        traced: there the counter tells how often.",
    evidence: &[SEQUENCE, EXPECTED, WINDOW, AHEAD, DATA],
    remedy: "Find the loss that makes the gap, and give the connection more buffer: net.ipv4.tcp_rmem, or what the process sets by SO_RCVBUF.",
    counter: Some(Counter {
        name: "TcpExtOfoPruned (times, not segments)",
    }),
    benign: false,
    needs: &[Need::Owner],
    matches: |signature| match signature.site {
        Site::Counter => signature.because(&["TcpExtOfoPruned"]),
        _ => signature.because(&["TCP_OFO_QUEUE_PRUNE"]),
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    Held::of(event).put(&mut found);
    found.advise(
        format!(
            "See how full the buffer of {} is: `r` of skmem against `rb`, and Recv-Q, which is what it has not read.",
            reader(facts)
        ),
        Some(show_connection(event, facts)),
        "Reads only. Small segments fill a buffer faster than their data: each takes a whole packet buffer.",
    );
    found.advise(
        "If it reads in time and the buffer is small: raise the largest value of net.ipv4.tcp_rmem, or have the process set no SO_RCVBUF of its own.",
        None,
        "For new connections. A buffer that a process sets itself does not grow by itself any more.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site};

    use crate::diagnose::causes::sample::{ACK, Kernel, Sample, V5_10, V6_1};

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .map(|kernel| {
                if kernel == V5_10 {
                    return Sample::hook(kernel, Site::Counter).counter("TcpExtOfoPruned");
                }
                let sample = Sample::freed(kernel, Site::Free, "tcp_prune_ofo_queue")
                    .reason("TCP_OFO_QUEUE_PRUNE")
                    .tcp_with("10.0.0.9:40000", "10.0.0.1:80", ACK, 3000, None)
                    .more_data(10);
                if kernel == V6_1 {
                    return sample;
                }
                sample
                    .field(FieldId::ExpectedSequence, 1000)
                    .field(FieldId::ReceiveWindow, 8_000)
            })
            .into()
    }

    #[test]
    fn a_segment_ahead_of_a_gap_is_told_as_such() {
        for sample in samples() {
            let (kernel, drop) = (sample.kernel, sample.label());
            match kernel {
                V5_10 => assert!(drop.evidence["sequence"].is_null()),
                V6_1 => assert_eq!(drop.evidence["sequence"], 3000),
                _ => assert_eq!(drop.evidence["ahead"], 2000),
            }
        }
    }
}
