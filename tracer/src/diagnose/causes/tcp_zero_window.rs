//! `tcp-zero-window`: data for a connection whose receive window is shut.

use droptrace_common::Site;

use super::window::{AHEAD, DATA, EXPECTED, Held, SEQUENCE, WINDOW, reader, show_connection};
use crate::diagnose::{
    Cause, CountedBy, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict,
};

/// The application does not read, and the receive buffer is full.
pub(super) static CAUSE: Cause = Cause {
    slug: "tcp-zero-window",
    family: Family::Socket,
    title: "receive window is shut: the application does not read",
    mechanism: "What a process does not read stays in the receive buffer; when that is full, the kernel tells the peer a window of 0. Data that still comes is \
        dropped and acknowledged again (tcp_data_queue, net/ipv4/tcp_input.c; TCPZeroWindowDrop, reason TCP_ZEROWINDOW from 6.1 on). Some stacks probe \
        a shut window with a byte of data, which ends here as long as it is shut; Linux probes with an old sequence number (duplicate-data). 7.x drops data that goes \
        beyond the end of the window while some waits to be read before it comes to that (tcp_sequence: TCP_INVALID_END_SEQUENCE, counter BeyondWindow). On \
        5.10 the free is not traced: the counter tells how many and in which netns, not of which connection.",
    evidence: &[SEQUENCE, EXPECTED, WINDOW, AHEAD, DATA],
    remedy: "Find out why the process does not read: stopped, blocked elsewhere, out of CPU, or slower than its peer. A larger buffer only delays it.",
    counter: Some(Counter {
        name: "TcpExtTCPZeroWindowDrop",
    }),
    benign: false,
    needs: &[Need::Owner],
    matches: |signature| match signature.site {
        Site::Counter => signature.because(&["TcpExtTCPZeroWindowDrop"]),
        _ => signature.because(&["TCP_ZEROWINDOW", "TCP_INVALID_END_SEQUENCE"]),
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let beyond = facts.reason.as_deref() == Some("TCP_INVALID_END_SEQUENCE");
    let mut found = Finding {
        counter: if beyond {
            CountedBy::Named("TcpExtBeyondWindow")
        } else {
            CountedBy::Cause
        },
        ..Finding::default()
    };
    Held::of(event).put(&mut found);
    found.advise(
        format!("See what keeps {} from reading.", reader(facts)),
        facts
            .owner
            .as_ref()
            .map(|owner| format!("cat /proc/{0}/stack /proc/{0}/status", owner.pid)),
        "Reads only. Nothing is lost for good: the peer sends it again when the window opens.",
    );
    found.advise(
        "See how much waits to be read: `r` of skmem against `rb`, and Recv-Q.",
        Some(show_connection(event, facts)),
        "Reads only. net.ipv4.tcp_rmem bounds the buffer, unless the process has set its own.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site};

    use crate::diagnose::Owner;
    use crate::diagnose::causes::sample::{ACK, Kernel, Sample, V5_10, V6_1, V7_3};

    fn at(kernel: Kernel, reason: &str, location: &str) -> Sample {
        if kernel == V5_10 {
            return Sample::hook(kernel, Site::Counter).counter("TcpExtTCPZeroWindowDrop");
        }
        let sample = Sample::freed(kernel, Site::Free, location)
            .reason(reason)
            .tcp_with("10.0.0.9:40000", "10.0.0.1:80", ACK, 1000, None)
            .more_data(1)
            .on("eth0");
        if kernel == V6_1 {
            return sample;
        }
        sample
            .field(FieldId::ExpectedSequence, 1000)
            .field(FieldId::ReceiveWindow, 0)
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .map(|kernel| at(kernel, "TCP_ZEROWINDOW", "tcp_data_queue"))
            .into_iter()
            .chain([at(V7_3, "TCP_INVALID_END_SEQUENCE", "tcp_validate_incoming")])
            .collect()
    }

    #[test]
    fn the_reader_is_asked_for() {
        for sample in samples() {
            let traced = sample.kernel != V5_10;
            let drop = sample
                .fact(|facts| {
                    facts.owner = Some(Owner {
                        pid: 42,
                        comm: "slow".to_owned(),
                        ..Owner::default()
                    });
                })
                .label();
            assert!(drop.remedy[0].action.contains("slow (pid 42)"));
            assert_eq!(drop.evidence["data"] == 1, traced);
        }
        let end = at(V7_3, "TCP_INVALID_END_SEQUENCE", "tcp_validate_incoming").label();
        assert_eq!(end.counter.as_deref(), Some("TcpExtBeyondWindow"));
        assert_eq!(end.evidence["window"], 0);
    }
}
