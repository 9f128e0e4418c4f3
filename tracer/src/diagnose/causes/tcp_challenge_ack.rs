//! `tcp-challenge-ack`: a RST, SYN or ACK that a connection does not believe.

use droptrace_common::{Site, bits};

use super::window::{AHEAD, EXPECTED, Held, SEQUENCE, WINDOW, show_connection};
use crate::diagnose::{
    Cause, CountedBy, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict,
};

/// The kernel asks the peer instead of believing the segment.
pub(super) static CAUSE: Cause = Cause {
    slug: "tcp-challenge-ack",
    family: Family::Socket,
    title: "RST, SYN or ACK that the connection does not believe (challenge ACK)",
    mechanism: "A living connection does not act upon a RST that lies in its window but not exactly at the next expected byte, upon any SYN, nor upon an ACK \
        of bytes that are long acknowledged or were never sent: a stranger could guess it (RFC 5961). The segment is dropped, and a challenge ACK asks \
        the real peer, who answers with an exact RST if it knows nothing of the connection (tcp_validate_incoming, tcp_ack, net/ipv4/tcp_input.c). \
        Challenge ACKs are limited per connection (net.ipv4.tcp_invalid_ratelimit, 500 ms) and per netns or host (tcp_challenge_ack_limit); to an ACK \
        of bytes that were never sent, 6.12 and earlier give none on an established connection. From 6.1 on the kernel gives the reasons TCP_RESET, \
        TCP_INVALID_SYN, TCP_TOO_OLD_ACK and TCP_ACK_UNSENT_DATA; on 5.10 the hook at tcp_validate_incoming sees RST and SYN, and the counters \
        tell of old ACKs.",
    evidence: &[
        (
            "segment",
            "what was not believed: reset, syn or ack; null where only a counter tells",
        ),
        SEQUENCE,
        ("acknowledged", "sequence number that it acknowledges, for an ACK"),
        EXPECTED,
        WINDOW,
        AHEAD,
        ("meaning", "what that says"),
    ],
    remedy: "A client that lost its state opens a connection again with the same port: it recovers by the challenge. Many of them without such a client: \
        somebody guesses, or a middlebox ends connections by inexact RSTs.",
    counter: Some(Counter {
        name: "TcpExtTCPChallengeACK, TcpExtTCPACKSkippedChallenge where none is sent",
    }),
    benign: false,
    needs: &[Need::Owner],
    matches: |signature| match signature.site {
        Site::TcpChallengeAck => true,
        Site::Counter => signature.because(&["TcpExtTCPChallengeACK"]),
        Site::Free => {
            signature.because(&["TCP_INVALID_SYN", "TCP_TOO_OLD_ACK", "TCP_ACK_UNSENT_DATA"])
                // A RST that ends a connection is freed untraced; one that came to a listener or a connection that is
                // being opened, elsewhere.
                || signature.because(&["TCP_RESET"]) && signature.at(&["tcp_validate_incoming", "tcp_drop_reason"])
        }
        _ => false,
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let held = Held::of(event);
    let syn = event.header.bits & (bits::SYN | bits::SYN_ACK) != 0;
    let segment = match event.site {
        Site::Counter => None,
        _ if event.has(bits::RST) => Some("reset"),
        _ if syn => Some("syn"),
        _ => Some("ack"),
    };
    let mut found = Finding {
        counter: if segment == Some("syn") {
            CountedBy::Named("TcpExtTCPSYNChallenge")
        } else {
            CountedBy::Cause
        },
        ..Finding::default()
    };
    let acknowledged = event.parse().tcp.map(|tcp| tcp.acknowledgement);
    held.put(&mut found);
    found.evidence.remove("data");
    let rest = std::mem::take(&mut found.evidence);
    found.put("segment", segment);
    for (name, value) in rest {
        let after_sequence = name == SEQUENCE.0;
        found.put(&name, value);
        if after_sequence {
            found.put("acknowledged", acknowledged.filter(|_| segment == Some("ack")));
        }
    }
    found.put(
        "meaning",
        match segment {
            Some("reset") => {
                "somebody wants to end the connection without knowing its exact state: a middlebox, a peer that is behind, or a stranger"
            }
            Some("syn") => {
                "the peer opens a connection with the addresses and port of one that lives here: it restarted or lost its state, NAT gave the port to somebody else, or somebody guesses"
            }
            Some("ack") => {
                "the peer acknowledges what was never sent, or what was acknowledged long ago: it is another host, or its segments are delayed by a whole window"
            }
            _ => "a RST, SYN or ACK that did not fit its connection; which one is not known",
        },
    );
    found.advise(
        "See the connection that did not believe it, and ask its peer whether it knows it.",
        Some(show_connection(event, facts)),
        "Reads only. If the peer is gone for good, keepalive (`timer:(keepalive,…)`) or a user timeout ends what is left here sooner.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site};

    use crate::diagnose::causes::sample::{ACK, Kernel, RST, SYN, Sample, V5_10, V6_1, V6_12};

    fn at(kernel: Kernel, flags: u8) -> Sample {
        let sample = match (kernel, flags) {
            (V5_10, ACK) => return Sample::hook(kernel, Site::Counter).counter("TcpExtTCPChallengeACK"),
            (V5_10, _) => Sample::hook(kernel, Site::TcpChallengeAck),
            (_, RST) => Sample::freed(kernel, Site::Free, "tcp_validate_incoming").reason("TCP_RESET"),
            (_, SYN) => Sample::freed(kernel, Site::Free, "tcp_validate_incoming").reason("TCP_INVALID_SYN"),
            _ => Sample::freed(kernel, Site::Free, "tcp_rcv_established").reason("TCP_TOO_OLD_ACK"),
        };
        let sample = sample
            .tcp_with("10.0.0.9:40000", "10.0.0.1:80", flags, 2000, None)
            .on("eth0");
        if kernel == V6_1 {
            return sample;
        }
        sample
            .field(FieldId::ExpectedSequence, 1000)
            .field(FieldId::ReceiveWindow, 64_240)
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| [RST, SYN, ACK].map(|flags| at(kernel, flags)))
            .collect()
    }

    #[test]
    fn what_was_not_believed_is_told() {
        for kernel in Kernel::ALL {
            for (flags, segment) in [(RST, "reset"), (SYN, "syn"), (ACK, "ack")] {
                let drop = at(kernel, flags).label();
                assert_eq!(drop.cause, "tcp-challenge-ack");
                if kernel == V5_10 && flags == ACK {
                    assert!(drop.evidence["segment"].is_null());
                    continue;
                }
                assert_eq!(drop.evidence["segment"], segment);
                assert_eq!(drop.evidence["sequence"], 2000);
                if kernel != V6_1 {
                    assert_eq!(drop.evidence["ahead"], 1000);
                }
                let own = drop.counter.as_deref() == Some("TcpExtTCPSYNChallenge");
                assert_eq!(own, flags == SYN);
            }
        }
    }

    #[test]
    fn a_reset_that_was_not_for_a_connection_is_no_challenge() {
        let drop = Sample::freed(V6_12, Site::Free, "tcp_rcv_state_process")
            .reason("TCP_RESET")
            .tcp("10.0.0.9:40000", "10.0.0.1:80", RST)
            .label();
        assert_eq!(drop.cause, "tcp-reset-received");
    }
}
