//! `tcp-out-of-window`: a segment whose sequence number the connection does not accept.

use droptrace_common::{FieldId, Site, bits};

use super::{
    KERNEL_REASON, benign,
    window::{AHEAD, DATA, EXPECTED, Held, SEQUENCE, WINDOW, show_connection},
};
use crate::diagnose::{
    Cause, CountedBy, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict,
};

/// The segment lies outside the receive window.
pub(super) static CAUSE: Cause = Cause {
    slug: "tcp-out-of-window",
    family: Family::Socket,
    title: "segment outside the receive window of its connection",
    mechanism: "A connection takes segments that start within its receive window: from what it expects next (rcv_nxt) to as many bytes on as it \
        has told the peer. tcp_validate_incoming and tcp_data_queue (net/ipv4/tcp_input.c) drop one that starts beyond, and answer with an ACK that \
        tells what is expected; tcp_check_req (7.x) does so for a pending handshake. So they do with a RST that lies outside. No correct peer sends \
        this: something between changes sequence numbers in one direction only, the segment is of an older connection with the same \
        addresses and ports, or somebody guesses. The reasons are TCP_INVALID_SEQUENCE and TCP_OVERWINDOW; 6.1 gives the former to segments before the \
        window as well, which are duplicates (duplicate-data): there the hook at tcp_send_dupack tells the side of each that has data, and \
        without it such data keeps the kernel's reason. 5.10 has no reason: the hook at \
        tcp_validate_incoming compares, and does not see what tcp_data_queue drops at the very end of the window.",
    evidence: &[
        SEQUENCE,
        EXPECTED,
        WINDOW,
        AHEAD,
        DATA,
        ("segment", "data, reset, or empty"),
        (
            "side",
            "beyond or before the window; null where the kernel does not tell",
        ),
    ],
    remedy: "Compare both ends of the connection: a firewall or load balancer that rewrites sequence numbers, or two hosts behind one address.",
    counter: Some(Counter {
        name: "TcpExtBeyondWindow (7.x; before, none)",
    }),
    benign: false,
    needs: &[Need::Owner],
    matches: |signature| {
        signature.site == Site::TcpOutOfWindow
            || signature.because(&["TCP_OVERWINDOW"])
            // Where the reason has both sides, the hook tells them apart.
            || signature.site != Site::SegmentBefore && signature.because(&["TCP_INVALID_SEQUENCE"])
            // A RST has no data that could have been received before.
            || signature.has(bits::RST) && signature.because(&["TCP_OLD_SEQUENCE"])
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: Some(refine),
};

/// Where nothing says what the socket expected, the reason alone does not tell on which side the segment lies. One without
/// data has nothing to lose: a keepalive or zero-window probe, or an ACK sent again. What has data is not called anything.
fn refine(event: &RawEvent, facts: &Facts) -> Option<&'static Cause> {
    let told = event.field(FieldId::ExpectedSequence).is_some();
    if told || facts.reason.as_deref() != Some("TCP_INVALID_SEQUENCE") || event.has(bits::RST) {
        return None;
    }
    Some(match Held::of(event).data {
        Some(0) => &benign::DUPLICATE_DATA,
        _ => &KERNEL_REASON,
    })
}

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let held = Held::of(event);
    let reset = event.has(bits::RST);
    let mut found = Finding {
        // BeyondWindow counts no RST (tcp_validate_incoming), and nothing of a pending handshake (tcp_check_req).
        counter: if reset || event.site == Site::RequestOther {
            CountedBy::Nothing
        } else {
            CountedBy::Cause
        },
        ..Finding::default()
    };
    held.put(&mut found);
    let side = held
        .ahead()
        .map(|ahead| if ahead < 0 { "before" } else { "beyond" });
    found
        .put(
            "segment",
            match held.data {
                _ if reset => Some("reset"),
                Some(0) => Some("empty"),
                Some(_) => Some("data"),
                None => None,
            },
        )
        .put("side", side);
    if reset {
        found.advise(
            "The RST was not believed, and the connection goes on: if its peer is really gone, it hangs until keepalive or retransmission gives up.",
            Some(show_connection(event, facts)),
            "Reads only. A RST whose sequence number lies outside the window comes from a middlebox that does not know it, or from somebody who guesses.",
        );
        return found;
    }
    if held.window == Some(0) {
        found.advise(
            "The window is shut, since nobody reads: what the peer had sent already finds no room. See what keeps the owner from reading.",
            Some(show_connection(event, facts)),
            "Reads only. `r` of skmem says how much waits to be read, `rb` how much fits.",
        );
        return found;
    }
    found.advise(
        "Capture the connection at both ends and compare sequence numbers: where they differ, find what rewrites them (sequence randomisation of a firewall, a proxy, sequence adjustment of a conntrack helper).",
        Some(show_connection(event, facts)),
        "Reads only. If the numbers agree, two hosts or an older connection share the address and port.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site};

    use crate::diagnose::causes::sample::{ACK, Kernel, RST, Sample, V5_10, V6_1, V7_3};

    fn at(kernel: Kernel, flags: u8, sequence: u32) -> Sample {
        let sample = match kernel {
            V5_10 => Sample::hook(kernel, Site::TcpOutOfWindow),
            V6_1 if flags & RST == 0 => refused(kernel, Site::SegmentBeyond),
            _ => refused(kernel, Site::Free),
        };
        sample
            .tcp_with("10.0.0.9:40000", "10.0.0.1:80", flags, sequence, None)
            .more_data(8)
            .on("eth0")
    }

    fn refused(kernel: Kernel, site: Site) -> Sample {
        Sample::freed(kernel, site, "tcp_validate_incoming").reason("TCP_INVALID_SEQUENCE")
    }

    fn told(sample: Sample) -> Sample {
        sample
            .field(FieldId::ExpectedSequence, 1000)
            .field(FieldId::ReceiveWindow, 64_240)
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                [
                    told(at(kernel, ACK, 10_001_000)),
                    // 6.1 does not answer a RST, and so tells nothing of it.
                    match kernel {
                        V6_1 => at(kernel, RST, 10_001_000),
                        _ => told(at(kernel, RST, 10_001_000)),
                    },
                ]
            })
            .chain([Sample::freed(V7_3, Site::RequestOther, "tcp_v4_rcv")
                .reason("TCP_OVERWINDOW")
                .tcp("10.0.0.9:40000", "10.0.0.1:80", ACK)])
            .collect()
    }

    #[test]
    fn the_segment_is_held_against_what_the_socket_expects() {
        for kernel in Kernel::ALL {
            let drop = told(at(kernel, ACK, 10_001_000)).label();
            assert_eq!(drop.evidence["sequence"], 10_001_000);
            assert_eq!(drop.evidence["segment"], "data");
            assert_eq!(drop.evidence["data"], 8);
            assert_eq!(drop.evidence["side"], "beyond");
            assert_eq!(drop.evidence["ahead"], 10_000_000);
            assert_eq!(drop.evidence["window"], 64_240);
            let reset = told(at(kernel, RST, 990)).label();
            assert_eq!(reset.evidence["segment"], "reset");
            assert_eq!(reset.counter, None);
        }
        let shut = at(V7_3, ACK, 2_000)
            .field(FieldId::ExpectedSequence, 1000)
            .field(FieldId::ReceiveWindow, 0)
            .label();
        assert!(shut.remedy[0].action.contains("nobody reads"));
    }

    #[test]
    fn a_segment_before_the_window_was_received_before() {
        let old = told(
            refused(V6_1, Site::SegmentBefore)
                .tcp_with("10.0.0.9:40000", "10.0.0.1:80", ACK, 900, None)
                .more_data(8),
        );
        assert_eq!(old.label().cause, "duplicate-data");
    }

    #[test]
    fn where_nothing_tells_the_side_nothing_is_called_out_of_window_but_a_reset() {
        let untold = |flags| refused(V6_1, Site::Free).tcp("10.0.0.9:40000", "10.0.0.1:80", flags);
        let empty = untold(ACK).label();
        assert_eq!(empty.cause, "duplicate-data");
        assert!(empty.benign);
        assert_eq!(untold(ACK).more_data(8).label().cause, "kernel-reason");
        assert_eq!(untold(RST).label().cause, "tcp-out-of-window");
        let empty = refused(V7_3, Site::Free).tcp("10.0.0.9:40000", "10.0.0.1:80", ACK);
        assert_eq!(told(empty).label().cause, "tcp-out-of-window");
    }
}
