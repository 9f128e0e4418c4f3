//! `paws-timewait`: a SYN or segment older than the connection that ended.

use droptrace_common::{FieldId, Site};

use super::{
    timestamps::{self, AGE, BEHIND, PEER, RECEIVED, STORED},
    values::in_netns,
};
use crate::diagnose::{Cause, CountedBy, Counter, Facts, Family, Finding, RawEvent, Signature, Verdict};

/// PAWS rejected a segment that met a TIME_WAIT socket.
pub(super) static CAUSE: Cause = Cause {
    slug: "paws-timewait",
    family: Family::TimeWait,
    title: "segment with an older timestamp than the connection in TIME_WAIT had (PAWS)",
    mechanism: "A connection that this host closed keeps its 4-tuple in TIME_WAIT for 60 s. A new SYN on the same 4-tuple \
        may take its place only with a newer timestamp (or, without timestamps, a later sequence number). With an older \
        timestamp tcp_timewait_state_process (net/ipv4/tcp_minisocks.c) rejects it, answers with an ACK of the old connection, and \
        starts the 60 s anew, so a client that keeps trying blocks itself. The kernel counts PAWSEstab up to 6.12, \
        PAWSTimewait on 7.x. Clients behind one NAT address, each with a timestamp clock of its own, share \
        4-tuples; so do clients whose clock starts anew for each destination.",
    evidence: &[
        STORED,
        RECEIVED,
        BEHIND,
        AGE,
        (
            "substate",
            "state that the ended connection was in: FIN_WAIT2 or TIME_WAIT",
        ),
        PEER,
    ],
    remedy: "Do not let two clients share one 4-tuple within 60 s: more NAT addresses or ports, or keep connections \
        open; or let the client close first, so that TIME_WAIT is on its side.",
    counter: Some(Counter {
        name: "TcpExtPAWSEstab (TcpExtPAWSTimewait from 7.x on)",
    }),
    benign: false,
    needs: &[],
    matches: |signature| signature.site == Site::PawsTimewait || signature.because(&["TCP_RFC7323_TW_PAWS"]),
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

/// `tw_substate` in words.
pub(super) fn substate(event: &RawEvent) -> Option<&'static str> {
    match event.field(FieldId::TimewaitSubstate)? {
        5 => Some("FIN_WAIT2"),
        6 => Some("TIME_WAIT"),
        _ => None,
    }
}

/// tcp_timewait_state_process (net/ipv4/tcp_minisocks.c) has both the reason TCP_RFC7323_TW_PAWS and the counter
/// PAWSTimewait on 7.x, neither up to 6.12.
fn counter(event: &RawEvent, facts: &Facts) -> CountedBy {
    match facts.reason.as_deref() {
        Some("TCP_RFC7323_TW_PAWS") => CountedBy::Named("TcpExtPAWSTimewait"),
        _ if event.header.location == 0 => CountedBy::Cause,
        _ => CountedBy::Named("TcpExtPAWSEstab"),
    }
}

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let (mut found, peer) = timestamps::begin(event);
    found.counter = counter(event, facts);
    found.put("substate", substate(event)).put("peer", peer.clone());
    let who = peer.as_deref().unwrap_or("the client");
    found.advise(
        format!("See whether several clients stand behind {who} (NAT): each has a timestamp clock of its own. Give that NAT more addresses or a wider range of ports, so that a 4-tuple rests for 60 s."),
        timestamps::show_peer(event, facts, "time-wait"),
        "Reads only: the 4-tuples that wait.",
    );
    found.advise(
        "Keep connections open (HTTP keep-alive), or let the client close first: then TIME_WAIT is on its side.",
        None,
        "A change of the application on one of the sides.",
    );
    found.advise(
        "As a last resort turn timestamps off at the clients behind the NAT, or here.",
        Some(in_netns(facts, None, "sysctl -w net.ipv4.tcp_timestamps=0")),
        "For new connections of that netns: no RTT from timestamps, no protection against wrapped sequence numbers. A SYN on \
         the same 4-tuple must then have a later sequence number, else the cause is timewait-old-sequence. \
         net.ipv4.tcp_tw_reuse concerns only connections that this host opens.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site};

    use crate::diagnose::causes::sample::{Kernel, SYN, Sample, V7_3};

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .map(|kernel| {
                Sample::freed(kernel, Site::PawsTimewait, "tcp_v4_rcv")
                    .reason_since(V7_3, "TCP_RFC7323_TW_PAWS")
                    .tcp_with("10.0.0.9:40000", "10.0.0.1:80", SYN, 1000, Some(5_000))
                    .on("eth0")
                    .field(FieldId::TimestampStored, 7_500)
                    .field(FieldId::TimestampAge, 3)
                    .field(FieldId::TimewaitSubstate, 6)
            })
            .into()
    }

    #[test]
    fn syn_of_another_clock_is_explained_by_nat() {
        for (kernel, sample) in Kernel::ALL.into_iter().zip(samples()) {
            let counter = if kernel == V7_3 {
                "TcpExtPAWSTimewait"
            } else {
                "TcpExtPAWSEstab"
            };
            let drop = sample.label();
            assert_eq!(drop.counter.as_deref(), Some(counter));
            assert_eq!(drop.evidence["substate"], "TIME_WAIT");
            assert_eq!(drop.evidence["behind"], 2_500);
            assert_eq!(drop.evidence["peer"], "10.0.0.9:40000");
            assert_eq!(drop.flags.as_deref(), Some("S"));
            assert!(drop.remedy[0].action.contains("10.0.0.9:40000"));
            assert!(
                drop.remedy.iter().all(|remedy| !remedy
                    .command
                    .as_deref()
                    .unwrap_or_default()
                    .contains("tw_re"))
            );
        }
    }
}
