//! `tcp-memory`: all TCP sockets together hold as much as they may.

use droptrace_common::{FieldId, Site, bits};

use super::{
    unknown,
    values::{endpoint, sysctl, who},
};
use crate::diagnose::{
    Cause, CountedBy, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict,
};

/// The limit that `net.ipv4.tcp_mem` sets.
pub(super) static CAUSE: Cause = Cause {
    slug: "tcp-memory",
    family: Family::Socket,
    title: "TCP sockets hold as much memory as they may together",
    mechanism: "What all TCP sockets of the host hold may take as many pages as the third number of net.ipv4.tcp_mem says; beyond the second a socket that \
        holds more than its share gets no more. A segment for which there is no memory is dropped (tcp_data_queue and tcp_data_queue_ofo, \
        net/ipv4/tcp_input.c; reason PROTO_MEM), TCPRcvQDrop or TCPOFODrop counts it, and the peer sends it again. A full receive buffer of the socket \
        itself has the same reason at the same place: only while all sockets together hold more than the second number it is this cause, \
        otherwise it stays open (kernel-reason). Kernels before drop reasons, such as 5.10, free such segments without a trace, and a full receive \
        buffer moves the same counters: there tcp_try_rmem_schedule is looked at, which refuses a segment whose socket has room only for want of memory.",
    evidence: &[
        ("socket", "local address and port of the connection"),
        (
            "pages",
            "pages that TCP sockets hold on this host, when asked just after",
        ),
        (
            "tcp_mem",
            "net.ipv4.tcp_mem: three numbers of pages: no pressure below the first, pressure above the second, the limit",
        ),
    ],
    remedy: "Find the sockets that hold the memory: somebody does not read, or there are too many. If all of them are needed, raise net.ipv4.tcp_mem.",
    counter: Some(Counter {
        name: "TcpExtTCPRcvQDrop or TcpExtTCPOFODrop",
    }),
    benign: false,
    needs: &[
        Need::Owner,
        Need::MemoryPages,
        Need::HostSysctl("net.ipv4.tcp_mem"),
    ],
    matches: |signature| {
        signature.site == Site::TcpMemory
            || signature.site == Site::Free && signature.because(&["PROTO_MEM"]) && signature.has(bits::TCP)
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: Some(|_, facts| (!short(facts)).then(|| unknown::left_open(facts))),
};

/// Why a segment without memory is not laid to all sockets together.
pub(super) const DOUBT: &str = "the receive buffer of the socket is full, its cgroup may have no more memory, or all TCP sockets held too much a moment before: the kernel gives the same reason for each";

/// The same of a socket whose receive buffer has room.
pub(super) const DOUBT_WITH_ROOM: &str = "there was no memory for the segment: the cgroup of the socket may have no more, or all TCP sockets held too much a moment before";

/// Whether all TCP sockets hold more than net.ipv4.tcp_mem allows without pressure (`__sk_mem_raise_allocated`, net/core/sock.c).
fn short(facts: &Facts) -> bool {
    let pressure = sysctl(facts, "net.ipv4.tcp_mem")
        .and_then(|text| text.split_whitespace().nth(1))
        .and_then(|word| word.parse::<u64>().ok());
    facts
        .memory_pages
        .zip(pressure)
        .is_some_and(|(pages, pressure)| pages > pressure)
}

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let packet = event.parse();
    let sequences = event
        .field(FieldId::ExpectedSequence)
        .zip(packet.tcp.map(|tcp| tcp.sequence));
    // Often a part of tcp_data_queue, whose name then says nothing of the order (seen on 6.12.118).
    if facts.location.as_deref() == Some("tcp_data_queue_ofo") {
        found.counter = CountedBy::Named("TcpExtTCPOFODrop");
    } else if let Some((expected, sequence)) = sequences {
        let ahead = sequence.wrapping_sub(expected as u32) as i32 > 0;
        found.counter = CountedBy::Named(if ahead {
            "TcpExtTCPOFODrop"
        } else {
            "TcpExtTCPRcvQDrop"
        });
    }
    found
        .put("socket", endpoint(packet.dst, packet.dport))
        .put("pages", facts.memory_pages)
        .put("tcp_mem", sysctl(facts, "net.ipv4.tcp_mem"));
    found.advise(
        format!(
            "Find the sockets that hold the memory; {} got none for this segment.",
            who(facts.owner.as_ref())
        ),
        Some("ss -tanmp".to_owned()),
        "Reads only, in one network namespace: r in skmem is what waits to be read, t and w what waits to be sent.",
    );
    found.advise(
        "If all of them are needed, raise net.ipv4.tcp_mem: pages, of which the third number is the limit.",
        Some("sysctl net.ipv4.tcp_mem".to_owned()),
        "Reads only. It is one setting for the whole host, by default up to about a tenth of its memory (`tcp_init_mem`, net/ipv4/tcp.c); the kernel takes that memory from everybody else.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site};

    use crate::diagnose::causes::sample::{ACK, Kernel, Sample, V5_10, V7_3};

    fn at(kernel: Kernel, pages: u64) -> Sample {
        let sample = if kernel == V5_10 {
            Sample::hook(kernel, Site::TcpMemory)
        } else {
            Sample::freed(kernel, Site::Free, "tcp_data_queue").reason("PROTO_MEM")
        };
        sample
            .tcp("10.0.0.9:4000", "10.0.0.1:80", ACK)
            .on("eth0")
            .sysctl("net.ipv4.tcp_mem", "10\t20\t30")
            .fact(|facts| facts.memory_pages = Some(pages))
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL.map(|kernel| at(kernel, 31)).into()
    }

    #[test]
    fn only_what_all_sockets_hold_proves_it() {
        let drop = at(V7_3, 31).label();
        assert_eq!(drop.cause, "tcp-memory");
        assert_eq!(
            drop.counter.as_deref(),
            Some("TcpExtTCPRcvQDrop or TcpExtTCPOFODrop")
        );
        assert_eq!(drop.evidence["pages"], 31);
        for (kernel, slug) in [(V5_10, "unknown"), (V7_3, "kernel-reason")] {
            let open = at(kernel, 20).label();
            assert_eq!(open.cause, slug);
            assert!(open.evidence["doubt"].is_string());
        }
    }

    #[test]
    fn the_order_tells_the_counter() {
        for (expected, counter) in [(1000, "TcpExtTCPRcvQDrop"), (900, "TcpExtTCPOFODrop")] {
            let drop = at(V5_10, 31).field(FieldId::ExpectedSequence, expected).label();
            assert_eq!(drop.counter.as_deref(), Some(counter));
        }
    }
}
