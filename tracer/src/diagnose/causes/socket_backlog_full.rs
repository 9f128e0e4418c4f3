//! `socket-backlog-full`: segments that came while the owner had its socket locked, more than may wait.

use droptrace_common::{Site, bits};

use super::{
    evidence::joined,
    progress,
    values::{endpoint, socket_memory},
};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// The backlog of a TCP socket is full.
pub(super) static CAUSE: Cause = Cause {
    slug: "socket-backlog-full",
    family: Family::Socket,
    title: "backlog of a TCP socket that its owner keeps locked is full",
    mechanism: "While a process is within a system call on a TCP socket, the socket is locked, and segments that come are put on its backlog, to be \
        handled when it is unlocked. That takes microseconds, unless the process is stopped short within the call: it waits for memory, for a page of a \
        file that a slow disk holds, or for CPU. The backlog may take about as many bytes as receive and send buffer together, overhead \
        included; beyond that segments are dropped, and TCPBacklogDrop counts them (tcp_add_backlog, net/ipv4/tcp_ipv4.c). The sender sends them again. \
        From 6.1 on the kernel gives the reason SOCKET_BACKLOG; before, what tcp_add_backlog answers tells.",
    evidence: joined![
        [
            ("socket", "local address and port of the connection"),
            ("peer", "its other end"),
            (
                "backlog",
                "what waits for the socket to be unlocked, in bytes, overhead included (sk_backlog.len): at the drop where the kernel has no drop reasons, else when asked just after",
            ),
            (
                "receive_buffer",
                "receive buffer of the socket in bytes (sk_rcvbuf), a part of the limit",
            ),
            (
                "send_buffer",
                "send buffer of the socket in bytes (sk_sndbuf), a part of the limit",
            ),
        ],
        progress::EVIDENCE
    ],
    remedy: "Find out what stops the owner within its system call on the socket: memory that is short, a file on a slow disk, a CPU limit. \
        Larger buffers only let more wait.",
    counter: Some(Counter {
        name: "TcpExtTCPBacklogDrop",
    }),
    benign: false,
    needs: &[Need::Socket, Need::Progress],
    matches: |signature| {
        signature.site == Site::SocketBacklogFull
            || signature.site == Site::Free
                && signature.because(&["SOCKET_BACKLOG"])
                && signature.has(bits::TCP)
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let packet = event.parse();
    let memory = socket_memory(event, facts);
    found
        .put("socket", endpoint(packet.dst, packet.dport))
        .put("peer", endpoint(packet.src, packet.sport))
        .put("backlog", memory.backlog)
        .put("receive_buffer", memory.receive_buffer)
        .put("send_buffer", memory.send_buffer);
    progress::put(
        &mut found,
        facts,
        facts.owner.as_ref(),
        "return from its system call on the socket",
    );
    let command = match (&facts.owner, packet.dport) {
        (Some(owner), _) => format!(
            "sh -c \"grep -e tcp_recvmsg -e tcp_sendmsg /proc/{}/task/*/stack\"",
            owner.pid
        ),
        (None, Some(port)) => format!("ss -tnpm sport = :{port}"),
        (None, None) => "ss -tnpm".to_owned(),
    };
    found.advise(
        "Find the thread that is within the call, and what it waits for there.",
        Some(command),
        "Reads only. What stands above tcp_recvmsg or tcp_sendmsg in its stack, such as a page fault or the allocation of memory, is what keeps the socket locked.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site};

    use crate::diagnose::causes::progress;
    use crate::diagnose::causes::sample::{ACK, Kernel, Sample, V5_10};
    use crate::diagnose::{Owner, SocketMemory};

    fn at(kernel: Kernel, source: &str, destination: &str) -> Sample {
        let sample = if kernel == V5_10 {
            Sample::freed(kernel, Site::SocketBacklogFull, "tcp_v4_rcv").field(FieldId::SocketBacklog, 9_000)
        } else {
            Sample::freed(kernel, Site::Free, "tcp_v4_rcv").reason("SOCKET_BACKLOG")
        };
        sample.tcp(source, destination, ACK).on("eth0").fact(|facts| {
            facts.socket = Some(SocketMemory {
                receive_buffer: Some(2_304),
                send_buffer: Some(4_608),
                backlog: Some(8_000),
                ..SocketMemory::default()
            });
            facts.progress = Some(progress::tests::throttled());
        })
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                [
                    at(kernel, "10.0.0.9:4000", "10.0.0.1:80"),
                    at(kernel, "[fd00::9]:4000", "[fd00::1]:80"),
                ]
            })
            .collect()
    }

    #[test]
    fn the_owner_is_asked_where_it_is_known() {
        for kernel in Kernel::ALL {
            let drop = at(kernel, "10.0.0.9:4000", "10.0.0.1:80").label();
            assert_eq!(drop.cause, "socket-backlog-full");
            let backlog = if kernel == V5_10 { 9_000 } else { 8_000 };
            assert_eq!(drop.evidence["backlog"], backlog);
            assert_eq!(drop.remedy[1].command.as_deref(), Some("ss -tnpm sport = :80"));
            let owned = at(kernel, "10.0.0.9:4000", "10.0.0.1:80").fact(|facts| {
                facts.owner = Some(Owner {
                    pid: 42,
                    comm: "nginx".to_owned(),
                    ..Owner::default()
                });
            });
            let command = owned.label().remedy.remove(1).command.unwrap_or_default();
            assert!(command.contains("/proc/42/task/*/stack"), "{command}");
        }
    }
}
